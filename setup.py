"""The optional C extensions: without a compiler the project installs and works all the same, in Python."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("fxbatch.trace._fast", ["fxbatch/trace/_fast.c"], optional=True),
        Extension(
            "fxbatch.passes._loops",
            ["fxbatch/passes/_loops.c", "fxbatch/passes/_deduplicate.c"],
            optional=True,
        ),
    ]
)
