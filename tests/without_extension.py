"""A plugin of pytest: fxbatch as it is where it was installed without a C compiler, and records in Python alone.

python -m pytest -p tests.without_extension tests/trace
"""

import sys

assert "fxbatch" not in sys.modules, "to be loaded first, by -p"
sys.modules["fxbatch.trace._fast"] = None  # type: ignore[assignment]  # what Python takes for a module that is not there
