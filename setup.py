"""The optional C extensions: without a compiler the project installs and works all the same, in Python."""

from setuptools import Extension, setup

_PASSES = ("_loops", "_agenda", "_arenas", "_deduplicate", "_reuse_rows", "_search")

setup(
    ext_modules=[
        Extension("fxbatch.trace._fast", ["fxbatch/trace/_fast.c"], optional=True),
        Extension(
            "fxbatch.passes._loops",
            [f"fxbatch/passes/{name}.c" for name in _PASSES],
            depends=[f"fxbatch/passes/{name}.h" for name in ("_arenas", "_arrays", "_search")],
            optional=True,
        ),
    ]
)
