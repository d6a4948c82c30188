"""The shape of the code: imports point one way, private torch APIs live in one module, files are short."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fxbatch"
LONGEST = 1500

# What a module stands on: it may import its own layer and lower ones. A module is placed by the longest
# name that it starts with. Modules above the decorator (`blocks`, `data`, `viz`) don't import each other's
# rooms by accident either: they share the highest layer, and nothing below may import them.
LAYERS = {
    "fxbatch.caches": 0,
    "fxbatch.errors": 0,
    "fxbatch.extensions": 0,
    "fxbatch.mistakes": 0,
    "fxbatch.on_demand": 0,
    "fxbatch.shared_state": 0,
    "fxbatch.stopwatch": 0,
    "fxbatch.tensor_memory": 0,
    "fxbatch.torch_private": 0,
    "fxbatch.uncompiled": 0,
    "fxbatch.user_cache": 0,
    "fxbatch.judge": 0,
    "fxbatch.signature": 1,
    "fxbatch.ir": 1,
    "fxbatch.batched_graph": 2,
    "fxbatch.text": 2,
    "fxbatch.views": 2,
    "fxbatch.verify": 2,
    "fxbatch.trace": 3,
    "fxbatch.passes": 4,
    "fxbatch.codegen": 5,
    "fxbatch.ragged": 5,
    "fxbatch.runtime": 6,
    "fxbatch.batched_types": 7,
    "fxbatch.checking": 7,
    "fxbatch.instances": 7,
    "fxbatch.decorator": 7,
    "fxbatch.plain_loop": 7,
    "fxbatch.inspection": 7,
    "fxbatch.explanation": 7,
    "fxbatch.packed_explanation": 7,
    "fxbatch.traced": 7,
    "fxbatch.server": 7,
    "fxbatch.server_stats": 7,
    "fxbatch": 8,
    "fxbatch.blocks": 9,
    "fxbatch.data": 9,
    "fxbatch.viz": 9,
    "fxbatch.__main__": 10,
}


def layer_of(module: str) -> int:
    """The layer of `module`; an unplaced module directly in fxbatch/ is an error that names it."""
    known = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    best = max(known, key=len, default="")
    if not best or (best == "fxbatch" and module != "fxbatch"):
        raise AssertionError(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")
    return LAYERS[best]


def imports_of(source: str, module: str, is_package: bool = False) -> list[tuple[str, int]]:
    """(imported module or module.name, line) of every import in `source`, relative ones resolved."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def modules(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def module_of(name: str, known: set[str]) -> str:
    """`fxbatch.ir.Program` -> `fxbatch.ir`: the longest prefix that is a module."""
    found = name
    while found not in known and "." in found:
        found = found.rpartition(".")[0]
    placed = max((n for n in LAYERS if name == n or name.startswith(n + ".")), key=len, default=found)
    return max(found, placed, key=len)  # a module that LAYERS places counts, even before it is written


def upward_imports(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Imports of `sources` (module -> source, is a package) that point to a higher layer."""
    wrong = []
    known = set(sources)
    for module, (source, is_package) in sources.items():
        for name, line in imports_of(source, module, is_package):
            if name.split(".")[0] != "fxbatch":
                continue
            target = module_of(name, known)
            if target == module:
                continue
            if layer_of(target) > layer_of(module):
                wrong.append(f"{module}:{line} imports {name}, which stands above it")
    return wrong


def circles(sources: dict[str, tuple[str, bool]]) -> list[list[str]]:
    """Modules of `sources` that import each other, however far around: imports inside functions count, and those that
    only type checkers see."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, (source, is_package) in sources.items():
        found = (module_of(name, set(sources)) for name, _ in imports_of(source, module, is_package))
        graph.add_edges_from((module, target) for target in found if target in sources and target != module)
    return [sorted(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]


def private_imports(source: str, module: str) -> list[str]:
    """Imports of `source` that reach into torch's private modules or names."""
    return [
        f"{module}:{line} imports {name}"
        for name, line in imports_of(source, module)
        if name.split(".")[0] == "torch" and any(part.startswith("_") for part in name.split(".")[1:])
    ]


def test_imports_point_one_way() -> None:
    sources = {m: (p.read_text(), p.name == "__init__.py") for m, p in modules(PACKAGE, "fxbatch")}
    assert upward_imports(sources) == []


@pytest.mark.parametrize("folder", ["trace", "passes", "codegen", "runtime", "blocks"])
def test_no_circles(folder: str) -> None:
    room = f"fxbatch.{folder}"
    sources = {m: (p.read_text(), p.name == "__init__.py") for m, p in modules(PACKAGE / folder, room)}
    assert circles(sources) == []


def test_no_circles_among_the_forms() -> None:
    found = {m: (p.read_text(), False) for m, p in modules(PACKAGE, "fxbatch") if layer_of(m) <= 2}
    assert circles(found) == []


def test_every_module_has_a_layer() -> None:
    for module, _ in modules(PACKAGE, "fxbatch"):
        layer_of(module)


def test_private_torch_is_imported_in_one_module() -> None:
    wrong = []
    for module, path in modules(PACKAGE, "fxbatch"):
        if module != "fxbatch.torch_private":
            wrong += private_imports(path.read_text(), module)
    for folder in ("tools", "examples", "benchmarks"):
        for module, path in modules(ROOT / folder, folder):
            wrong += private_imports(path.read_text(), module)
    assert wrong == []


@pytest.mark.parametrize("folder", ["fxbatch", "tools", "examples", "benchmarks", "tests"])
def test_files_stay_short(folder: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for _, path in modules(ROOT / folder, folder)
        if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}


def test_every_folder_is_packaged() -> None:
    """A new folder that pyproject.toml doesn't list would be missing from the wheel only."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    renamed = {"fxbatch": "fxbatch", "tools": "fxbatch_cli", "examples": "fxbatch_examples"}
    folders = sorted(
        ".".join([renamed[folder], *path.relative_to(ROOT / folder).parts])
        for folder in renamed
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_dir() and any(path.glob("*.py"))
    )
    assert folders == sorted(setuptools["packages"])


# The checkers themselves, on wrong data.


def test_upward_import_is_found() -> None:
    sources = {
        "fxbatch.ir": ("from fxbatch.passes.fuse import fuse\n", False),
        "fxbatch.passes.fuse": ("", False),
    }
    assert upward_imports(sources) == ["fxbatch.ir:1 imports fxbatch.passes.fuse.fuse, which stands above it"]


def test_upward_relative_import_is_found() -> None:
    sources = {
        "fxbatch.trace": ("from ..runtime import executor\n", True),
        "fxbatch.runtime": ("", True),
        "fxbatch.runtime.executor": ("", False),
    }
    # `..` of the package fxbatch.trace is nothing above fxbatch: the resolved name must still be seen.
    sources["fxbatch.trace.record"] = ("from ..runtime import executor\n", False)
    wrong = "fxbatch.trace.record:1 imports fxbatch.runtime.executor, which stands above it"
    assert wrong in upward_imports(sources)


def test_circles_are_found() -> None:
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fxbatch.c import run\n"
    inside = "def f():\n    from fxbatch.a import g\n"
    sources = {
        "fxbatch.a": (hidden, False),
        "fxbatch.b": ("import fxbatch.a\n", False),
        "fxbatch.c": (inside, False),
    }
    assert circles(sources) == [["fxbatch.a", "fxbatch.c"]]


def test_module_without_a_layer_is_found() -> None:
    with pytest.raises(AssertionError, match=r"fxbatch\.misc is in no layer"):
        layer_of("fxbatch.misc")


def test_private_import_is_found() -> None:
    source = "import torch\nfrom torch._subclasses import fake_tensor\nfrom torch.utils import _pytree\n"
    assert private_imports(source, "fxbatch.x") == [
        "fxbatch.x:2 imports torch._subclasses.fake_tensor",
        "fxbatch.x:3 imports torch.utils._pytree",
    ]
