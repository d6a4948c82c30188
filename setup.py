"""What is compiled, and the README as a package index shows it.

The recorder and native programs are C; the passes with hot loops are typed Python, compiled by Cython.
All of it is optional: without a compiler the project installs and works all the same, in Python, more slowly.
"""

import re
import runpy
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def readme_for_index() -> str:
    """README.md with absolute links and pictures: an index has no folders beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository, tag = project["urls"]["Repository"], f"v{project['version']}"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/raw/{tag}/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/{tag}/", text)


EXTENSIONS = runpy.run_path(str(ROOT / "fxbatch" / "extensions.py"))
TYPED = EXTENSIONS["TYPED"]

# Sums may be added up in several places at once; infinities and what is no number stay what they are.
_FLAGS = {
    "ragged/segment_loops": (
        "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    )
}  # fmt: skip

_LOOPS = cythonize(
    [
        Extension(
            f"fxbatch.{name.replace('/', '.')}",
            [f"fxbatch/{name}.py"],
            extra_compile_args=["-g0", *_FLAGS.get(name, ())],
        )
        for name in TYPED
    ],
    build_dir="build",
    # A pass checks each column that comes from outside, once, and uses no negative index.
    compiler_directives={
        "language_level": 3,
        "boundscheck": False,
        "wraparound": False,
        "initializedcheck": False,
        "cdivision": True,
        # Local variables are of the types that they are given: C numbers in the loops.
        "infer_types": True,
    },
)
for extension in _LOOPS:
    extension.optional = True

_NATIVE = (
    "_native",
    "_native_blocks",
    "_native_calls",
    "_native_products",
    "_native_program",
    "_native_steps",
    "_native_threads",
)

_CODEGEN = Path(__file__).parent / "fxbatch" / "codegen"
_HEADER = _CODEGEN / "_native_operations.h"
_MADE = runpy.run_path(str(_CODEGEN / "native_table.py"))["header"]()
if not _HEADER.exists() or _HEADER.read_text() != _MADE:
    _HEADER.write_text(_MADE)


class NotingBuild(build_ext):
    """Notes what each extension beside its sources was compiled from (fxbatch/extensions.py)."""

    def run(self):
        self.compiled = {}
        super().run()
        if self.inplace:
            EXTENSIONS["note"](self.compiled)

    def build_extension(self, extension):
        super().build_extension(extension)
        name = extension.name.removeprefix("fxbatch.").replace(".", "/")
        sources = [f"fxbatch/{name}.py"] if name in TYPED else [*extension.sources, *extension.depends]
        self.compiled[name] = sorted(sources)


setup(
    cmdclass={"build_ext": NotingBuild},
    long_description=readme_for_index(),
    long_description_content_type="text/markdown",
    ext_modules=[
        *_LOOPS,
        Extension(
            "fxbatch.trace._fast",
            ["fxbatch/trace/_fast.c"],
            depends=sorted(map(str, Path("fxbatch/trace").glob("_fast_*.h"))),
            optional=True,
        ),
        Extension(
            "fxbatch.codegen._native",
            [f"fxbatch/codegen/{name}.c" for name in _NATIVE],
            depends=[
                "fxbatch/trace/_fast_dlpack.h",
                *(
                    f"fxbatch/codegen/{name}.h"
                    for name in (
                        "_native",
                        "_native_loops",
                        "_native_operations",
                        "_native_steps",
                        "_native_tiles",
                    )
                ),
            ],
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
    ],
)
