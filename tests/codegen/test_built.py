"""Graphs are built once a content, in a process and, where FXBATCH_CACHE names a folder, once a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.codegen import build_operation, built
from tests.oracle import check_equal
from tests.trust.programs import model, vectors


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FXBATCH_CACHE", raising=False)
    built.forget()
    built._told.clear()
    yield
    built.forget()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations whose joint graphs were traced."""
    made: list[str] = []
    plain = build_operation.batch_body

    def counted(body: Any, signature: Any, *rest: Any) -> Any:
        made.append(type(signature.operation.target).__name__)
        return plain(body, signature, *rest)

    monkeypatch.setattr(build_operation, "batch_body", counted)
    return made


def right(fn: Callable[[Any, Any], Any], **parts: nn.Module) -> None:
    check_equal(model(fn, dict(parts)), vectors(4, 4, 4, grad=False))


class Gated(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.LeakyReLU(slope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.a(x)) * torch.sigmoid(self.b(x))


def test_equal_bodies_are_built_once(builds: list[str]) -> None:
    for _ in range(3):
        right(lambda self, x: self.g(x), g=Gated())
    assert builds == ["Gated"]


def test_what_differs_is_built(builds: list[str]) -> None:
    right(lambda self, x: self.g(x), g=Gated())
    right(lambda self, x: self.g(x), g=Gated(0.3))
    right(lambda self, x: self.g(x), g=Gated().requires_grad_(False))
    right(lambda self, x: self.g(x), g=nn.Linear(4, 5))
    right(lambda self, x: self.g(x), g=nn.Linear(4, 5, bias=False))
    right(lambda self, x: self.g(x.double()), g=nn.Linear(4, 5).double())
    with torch.no_grad():
        right(lambda self, x: self.g(x), g=Gated())
    assert len([n for n in builds if n in ("Gated", "Linear")]) == 7


class _Hundredfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 100


class Doubled(nn.Module):
    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.l, self.custom = nn.Linear(4, 4), custom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        return _Hundredfold.apply(y) if self.custom else y * 2  # type: ignore[no-untyped-call]


def test_bodies_of_one_content_and_other_gradients_are_told_apart(builds: list[str]) -> None:
    for custom in (False, True, False):
        right(lambda self, x: self.d(x), d=Doubled(custom))
    assert len(builds) == 2


def test_nothing_of_a_model_is_held() -> None:
    right(lambda self, x: self.g(x), g=Gated())
    assert built._graphs
    for fields in built._graphs.values():
        for name in ("forward", "backward", "parameters"):
            held = fields[name]
            assert held is None or not list(held.parameters()) + list(held.buffers())
        assert "signature" not in fields


def test_another_process_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[str]
) -> None:
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path / "new" / "folder"))
    tables = {"e": nn.Embedding(9, 4, sparse=True), "g": Gated(), "n": nn.LayerNorm(4), "d": nn.Dropout(0.0)}
    forward = lambda self, x: self.d(self.n(self.g(x) + self.e(torch.tensor(3)))).sum()  # noqa: E731
    right(forward, **tables)
    first = len(builds)
    assert first
    program = "import sys; sys.path.insert(0, '.'); from tests.codegen.test_built import *; "
    program += "from fxbatch.codegen import build_operation as b; b.batch_body = None; "
    program += "right(lambda self, x: self.g(x), g=Gated()); print('found')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "found\n", done.stderr
    built.forget()
    right(forward, **tables)
    assert len(builds) == first


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


def test_what_was_changed_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[str]
) -> None:
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path))
    right(lambda self, x: self.g(x), g=Gated())
    whole = {path: path.read_text() for path in files(tmp_path)}
    count = len(builds)
    damages = [lambda t: t[: len(t) // 2], lambda t: "", lambda t: t.replace("sigmoid", "tanh"), _resigned]
    for damage in damages:
        for path, text in whole.items():
            path.write_text(damage(text))
        built.forget()
        right(lambda self, x: self.g(x), g=Gated())
        assert len(builds) == count + len(whole)
        assert {path: path.read_text() for path in files(tmp_path)} == whole
        count = len(builds)


def _resigned(text: str) -> str:
    """A file that is whole, and wrong."""
    changed = text.partition("\n")[2].replace("aten.sigmoid.default", "aten.tanh.default")
    return f"{built.hashlib.sha256(changed.encode()).hexdigest()}\n{changed}"


def test_files_name_only_calls_that_are_known(tmp_path: Path) -> None:
    reader = built._Reader()
    for name in ("os.system.x", "builtins.eval.x", "eval", "aten.nothing.default", "fxbatch.x.y"):
        with pytest.raises((ValueError, AttributeError, KeyError)):
            reader.module([["call_function", name, {"tuple": []}, {"dict": []}, [], False, ""]], "Forward")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="another user owns it or may write to it"):
        right(lambda self, x: self.g(x), g=Gated())
    assert not files(tmp_path)


def test_a_folder_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.warns(UserWarning, match="is not used"):
        right(lambda self, x: self.g(x), g=Gated())


def test_files_are_this_users_alone_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(built, "_IN_FOLDER", 4)
    for n in range(1, 9):
        right(lambda self, x: self.l(x), l=nn.Linear(4, n))
    found = files(tmp_path)
    assert 0 < len(found) <= 4 and not list(tmp_path.glob("*/*.new"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in found)
    assert all(json.loads(path.read_text().partition("\n")[2])["forward"] for path in found)


def test_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXBATCH_CACHE", str(tmp_path))
    right(lambda self, x: self.g(x), g=Gated())
    ((key, fields), *_) = built._graphs.items()
    threads = [
        threading.Thread(target=lambda: [built._write(key, fields) for _ in range(20)]) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for _ in range(50):
        assert built._read(key) is not None
    for t in threads:
        t.join()
    assert built._read(key) is not None


def test_who_deletes_a_file_that_another_process_has_deleted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "_IN_FOLDER", 4)
    for n in range(8):
        (tmp_path / f"{n}.json").write_text("")
    listed = [*os.listdir(tmp_path), "gone.json"]
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    built._prune(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 3
