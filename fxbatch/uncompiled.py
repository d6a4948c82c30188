"""A stand-in for the module `cython` where a pass runs as plain Python: types and decorators that do nothing.

The passes whose loops are hot (signature_graph, select, deduplicate, schedule, plan, room, gradients) are typed Python.
Cython compiles them where there is a compiler (setup.py); elsewhere the same files run as they are, slowly and right.
Only arguments, attributes and columns say their types: those of other local variables follow (`infer_types`).

    try:
        import cython
    except ImportError:
        from fxbatch.uncompiled import cython
"""

from __future__ import annotations

from typing import Any


class _Anything:
    """A type, or a decorator, that leaves what it is given as it is."""

    compiled = False

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: Any) -> _Anything:
        return self

    def __call__(self, *given: Any, **options: Any) -> Any:
        # What is decorated or cast; options are of a decorator.
        return given[-1] if given and not isinstance(given[-1], bool) else self


cython = _Anything()
