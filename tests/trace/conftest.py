"""Every test of the trace runs twice: with the C extension and without, where every call goes the long way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxbatch.trace.columns import _fast
from fxbatch.trace.torch_patches import use_extension


@pytest.fixture(autouse=True, params=["python", "extension"])
def recorded_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """What records in this test."""
    on = request.param == "extension"
    if on and _fast is None:
        pytest.skip("fxbatch was installed without its C extension")
    use_extension(on)
    yield request.param
    use_extension(_fast is not None)
