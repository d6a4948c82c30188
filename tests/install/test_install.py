"""What `python -m build` makes is whole, and installs and works with and without a compiler.

The installs are in environments of their own: only the dependencies are those of this one.
"""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# By Cython.
TYPED = [
    "bare_parameters", "deduplicate", "fuse_runs", "gradients", "operands", "places", "plan", "pool", "room",
    "row_places", "schedule", "segment_loops", "select", "signature_graph",
]  # fmt: skip
pytestmark = pytest.mark.slow  # a minute or two of compiling: `make package`

SMALL_MODEL = """
import torch, fxbatch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.Linear(8, 4)
    def encode(self, tree):
        if isinstance(tree, tuple):
            return torch.tanh(self.cell(torch.cat([self.encode(child) for child in tree])))
        return tree
    @fxbatch.autobatch(adaptive=False)  # so few trees would run the loop
    def forward(self, tree):
        return self.encode(tree).sum()
model = Model()
x, y = torch.randn(2, 4)
trees = [x, (x, y), ((x, y), x), (y, (x, (y, x)))]
gradients = []
for batched in (True, False):
    with torch.enable_grad() if batched else fxbatch.disabled():
        losses = model(trees)
    model.zero_grad()
    losses.sum().backward()
    gradients.append((losses, model.cell.weight.grad.clone()))
torch.testing.assert_close(gradients[0], gradients[1])
print(fxbatch.__file__)
"""

# Each example as a target by its installed name: loaded and explained.
EXPLAIN = """
import sys
from fxbatch_cli.main import main
for target in sys.argv[1:]:
    assert main(["explain", target]) == 0, target
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose dependencies are those of this one."""

    folder: Path

    @staticmethod
    def make(folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        # Plain paths: the .pth files in them, and with them the editable install of the checkout, are not read.
        paths = [*site.getsitepackages(), *[p for p in sys.path if p.endswith("site-packages")]]
        (packages / "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
        return Environment(folder)

    def run(self, *command: str | Path, **variables: str) -> str:
        """Standard output of a program of the environment, run in its folder; an error has both."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        found = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, f"{command}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
        return found.stdout

    def install(self, archive: Path, **variables: str) -> None:
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
        self.run("python", "-m", "pip", "install", "--quiet", *options, archive, **variables)

    @property
    def extensions(self) -> list[str]:
        return sorted(
            p.name.partition(".")[0] for p in self.folder.glob("lib/python*/site-packages/fxbatch/*/*.so")
        )

    def check(self) -> None:
        """The command answers, and a small model trains as its loop does, with the installed package."""
        assert "Write a PyTorch model for one instance" in self.run("fxbatch", "--help")
        version = self.run("fxbatch", "--version")
        assert version.startswith("fxbatch ")
        assert ("all 16 compiled" if self.extensions else "none compiled") in version
        assert str(self.folder) in self.run("python", "-c", SMALL_MODEL)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def members(sdist: Path) -> dict[str, str]:
    """Path in the repository -> path in the archive, of each file."""
    with tarfile.open(sdist) as archive:
        return {m.name.partition("/")[2]: m.name for m in archive.getmembers() if m.isfile()}


def test_the_source_archive_is_the_whole_repository(archives: tuple[Path, Path]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: what belongs to it is not known")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(tracked.splitlines()) - {".gitignore"} <= set(members(archives[0]))


def test_the_readme_of_an_index_has_no_relative_links(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as archive:
        member = archive.extractfile(members(archives[0])["PKG-INFO"])
        assert member is not None
        text = member.read().decode()
    assert text.count("Project-URL: ") >= 3
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert any("docs/pictures/" in link for link in links)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_wheel_with_its_extensions_and_examples(archives: tuple[Path, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "wheel")
    environment.install(archives[1])
    assert environment.extensions == ["_fast", "_native", *TYPED]
    environment.check()
    names = [
        ".".join(["fxbatch_examples", *p.relative_to(ROOT / "examples").with_suffix("").parts])
        for p in sorted((ROOT / "examples").rglob("*.py"))
        if "\ndef minibatch(" in p.read_text()
    ]
    assert len(names) > 18
    environment.run("python", "-c", EXPLAIN, *[f"{name}:minibatch" for name in names])
    assert "usage: " in environment.run("python", "-m", "fxbatch_examples.parser", "--help")


def test_the_source_archive_without_a_compiler(archives: tuple[Path, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "bare")
    environment.install(archives[0], CC=str(tmp_path / "no-compiler"))
    assert environment.extensions == []
    environment.check()
    for example in ("tree_lstm", "parser", "deep_sets"):  # batched, gradients too, and compared with the loop
        assert "equal: " in environment.run("fxbatch", "check", f"fxbatch_examples.{example}:minibatch")
    assert "times as fast" in environment.run("fxbatch", "bench", "fxbatch_examples.tree_lstm:minibatch")
    environment.run("fxbatch", "demo", "--epochs", "1", "--limit", "32")


def test_a_wheel_for_other_machines(tmp_path: Path) -> None:
    """What `python -m tools.wheels` builds is named for an old glibc, and has every extension."""
    look = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "auditwheel"]
    if subprocess.run(look, capture_output=True, check=False).returncode:
        pytest.skip("no package index here that has auditwheel")
    done = subprocess.run(
        [sys.executable, "-m", "tools.wheels", "--to", tmp_path / "dist"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wheel = Path(done.stdout.strip())
    assert "manylinux" in wheel.name
    environment = Environment.make(tmp_path / "manylinux")
    environment.install(wheel)
    assert environment.extensions == ["_fast", "_native", *TYPED]
    environment.check()
