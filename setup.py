"""The optional C extensions: without a compiler the project installs and works all the same, in Python."""

from setuptools import Extension, setup

_PASSES = (
    "_loops",
    "_agenda",
    "_arenas",
    "_component",
    "_deduplicate",
    "_gradients",
    "_phases",
    "_reuse_rows",
    "_search",
    "_select",
    "_survey",
)
_NATIVE = ("_native", "_native_blocks", "_native_program", "_native_steps", "_native_threads")

setup(
    ext_modules=[
        Extension(
            "fxbatch.trace._fast",
            ["fxbatch/trace/_fast.c"],
            depends=[
                f"fxbatch/trace/_fast_{name}.h"
                for name in ("columns", "integers", "modules", "traces", "waiting")
            ],
            optional=True,
        ),
        Extension(
            "fxbatch.passes._loops",
            [f"fxbatch/passes/{name}.c" for name in _PASSES],
            depends=[f"fxbatch/passes/{name}.h" for name in ("_arenas", "_arrays", "_gradients", "_search")],
            optional=True,
        ),
        Extension(
            "fxbatch.codegen._native",
            [f"fxbatch/codegen/{name}.c" for name in _NATIVE],
            depends=[f"fxbatch/codegen/{name}.h" for name in ("_native", "_native_loops", "_native_steps")],
            # Loops are vectorised: comparisons become blends, and the square root an instruction.
            extra_compile_args=[
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-fvisibility=hidden",
            ],
            optional=True,
        ),
    ]
)
