"""What records here: the C extension, or Python where there is none (`tests.without_extension`)."""

from __future__ import annotations

import pytest

from fxbatch.trace.state import _fast


@pytest.fixture
def recorded_by() -> str:
    """ "extension" or "python"."""
    return "python" if _fast is None else "extension"
