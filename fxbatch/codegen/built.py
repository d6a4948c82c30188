"""Graphs of operations that were built before, found by the content of their bodies.

In: the body of an operation as ATen calls, and whatever else building reads. Out: the operation's three graphs, kept
in memory, and in a folder where `FXBATCH_CACHE` names one.

    key = content_of(body, signature, needs, shared, zeros)    # "" where the body holds what has no text
    parts = find(key)                                          # of another module, of another process
    keep(key, parts)

A hundred `nn.Linear(4, 4)` have bodies of one content: their graphs are made once, which is four fifths of what
building costs. What is found is compared with the operation's own eager run all the same (check.py), so a file that
is wrong costs time and no result. Files hold names of ATen calls and numbers: nothing in them is run or imported.
A folder's files are named by content, Python, torch and this package's own code, and written under another name first,
so that neither other processes nor other versions matter. What another user owns or may write is not read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxbatch.caches import Cache
from fxbatch.codegen import body as _body
from fxbatch.codegen.operation_graphs import Flows, OperationGraphs, Ref
from fxbatch.ir import Layout, Signature, TensorSpec
from fxbatch.signature import tensor_spec
from fxbatch.torch_private import FakeTensor, LazyGraphModule, fake_mode

Fields = dict[str, Any]  # of OperationGraphs, but for its signature

_IN_FOLDER = 4096  # files
_MODULES = ("forward", "backward", "parameters")
_FIELDS = ("layout", "random", *Flows.__dataclass_fields__)  # what else is kept of OperationGraphs
_READ = ("ir.py", "signature.py", "torch_private.py")  # what building reads besides this folder
_graphs: Cache[str, Fields] = Cache("graphs")


class _NoText(Exception):
    """Something in a graph has no text that tells all of it."""


def content_of(
    body: fx.GraphModule,
    signature: Signature,
    needs: tuple[Sequence[bool], Sequence[bool]],
    shared: Sequence[torch.Tensor],
    zeros: Sequence[tuple[bool, int]],
) -> str:
    """A digest of all that the graphs of a body depend on; "" where it can't be told."""
    try:
        told = [
            _nodes(body.graph, values=False),
            _text((*signature.inputs, *signature.outputs), {}),
            len(signature.inputs),
            str(signature.modes),
            str(signature.modes.default_dtype),
            signature.operation.random,
            [list(map(bool, n)) for n in needs],
            [_form(x) for x in shared],
            _text(zeros, {}),
            torch.are_deterministic_algorithms_enabled(),
        ]
    except _NoText:
        return ""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def find(key: str, signature: Signature) -> OperationGraphs | None:
    """The graphs that were kept under this content, as this signature's."""
    if not key:
        return None
    fields = _graphs.get(key)
    if fields is None:
        fields = _read(key)
        if fields is None:
            return None
        _graphs.put(key, fields)
    return OperationGraphs(signature=signature, **fields)


def keep(key: str, graphs: OperationGraphs) -> None:
    """Keep graphs that were built and checked."""
    if not key:
        return
    fields = {x: getattr(graphs, x) for x in (*_MODULES, *_FIELDS)}
    if any(_constants(fields[x]) for x in _MODULES):
        return
    _graphs.put(key, fields)
    _write(key, fields)


def forget(key: str = "") -> None:
    """Let go of what is kept in memory, under one content or all."""
    if key:
        _graphs.pop(key)
    else:
        _graphs.clear()


def _constants(module: fx.GraphModule | None) -> bool:
    return module is not None and any(node.op == "get_attr" for node in module.graph.nodes)


# Graphs as text: a list of [op, target, args, kwargs, values, kept, device]; nodes are told by their number.


def _nodes(graph: fx.Graph, *, values: bool = True) -> list[object]:
    number = {node: i for i, node in enumerate(graph.nodes)}
    return [
        [
            node.op,
            node.target if node.op in ("placeholder", "output") else _name_of(node.target),
            _text(node.args, number),
            _text(node.kwargs, number),
            [_text(x, number) for x in node.meta.get("values", ())] if values else _value(node),
            bool(node.meta.get("keep")),
            str(node.meta.get("device", "")),
        ]
        for node in graph.nodes
    ]


def _value(node: fx.Node) -> object:
    """The type of a placeholder of a body."""
    value = node.meta.get("val") if node.op == "placeholder" else None
    return _form(value) if isinstance(value, torch.Tensor) else None


# What graphs call besides ATen.
_FUNCTIONS: dict[str, Callable[..., object]] = {
    **{f"operator.{f.__name__}": f for f in (operator.mul, operator.add, operator.sub, operator.getitem)},
    "embedding_sparse_gradient": _body.embedding_sparse_gradient,
}
_NAMES = {f: name for name, f in _FUNCTIONS.items()}


def _name_of(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return str(target)
    if callable(target) and target in _NAMES:
        return _NAMES[target]
    raise _NoText(target)


def _call_of(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, packet, overload = name.split(".")
    if namespace not in ("aten", "prims"):
        raise ValueError(name)
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


# dtypes, layouts and memory formats are told by name
_WORDS = {
    str(x): x for x in vars(torch).values() if isinstance(x, (torch.dtype, torch.layout, torch.memory_format))
}


def _text(x: Any, number: dict[fx.Node, int]) -> object:
    """JSON that tells all of an argument."""
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) in _KINDS:
        kind, write, _ = _KINDS[type(x)]
        return {kind: write(x)}
    if type(x) in (list, tuple) or type(x).__name__ == "immutable_list":
        return {type(x).__name__ if type(x) is tuple else "list": [_text(y, number) for y in x]}
    if isinstance(x, dict):
        return {"dict": [[k, _text(y, number)] for k, y in x.items()]}
    if isinstance(x, fx.Node):
        return {"node": number[x]}
    if isinstance(x, torch.Tensor):
        return {"tensor": _form(x)}
    if type(x) is torch.Size:
        return {"list": list(x)}
    raise _NoText(x)


def _form(x: torch.Tensor) -> list[object]:
    """The form of a tensor, as graphs depend on it: shape, strides, dtype, device, layout."""
    if x.layout is not torch.strided:
        return [list(x.shape), None, str(x.dtype), str(x.device), str(x.layout)]
    return [list(x.shape), list(x.stride()), str(x.dtype), str(x.device), ""]


def _tensor_spec(told: list[Any]) -> TensorSpec:
    shape, dtype, device = told
    return tensor_spec(tuple(shape), _WORDS[dtype], torch.device(device))


# By type of what holds no node: its word, how it is written, and how it is read.
_KINDS: dict[type, tuple[str, Callable[[Any], object], Callable[[Any], object]]] = {
    float: ("float", float.hex, float.fromhex),
    torch.device: ("device", str, torch.device),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), ("word", str, _WORDS.__getitem__)),
    Ref: ("ref", lambda r: [r.kind, r.index], lambda told: Ref(*told)),
    TensorSpec: ("type", lambda t: [list(t.shape), str(t.dtype), str(t.device)], _tensor_spec),
    Layout: ("layout", lambda x: x.groups, lambda groups: Layout(tuple(map(tuple, groups)))),
}
_READERS = {kind: read for kind, _, read in _KINDS.values()}


class _Reader:
    """Graphs of their text."""

    def __init__(self) -> None:
        self.mode = fake_mode()

    def module(self, rows: list[Any] | None, name: str) -> fx.GraphModule | None:
        if rows is None:
            return None
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        for op, target, args, kwargs, values, is_kept, device in rows:
            called = target if op in ("placeholder", "output") else _call_of(target)
            node = graph.create_node(op, called, self.read(args, nodes), self.read(kwargs, nodes))
            if values:
                node.meta["values"] = tuple(self.read(x, nodes) for x in values)
            if is_kept:
                node.meta["keep"] = True
            if device:
                node.meta["device"] = torch.device(device)
            nodes.append(node)
        graph.lint()
        return LazyGraphModule({}, graph, name)

    def read(self, x: object, nodes: list[fx.Node]) -> Any:
        if not isinstance(x, dict):
            return x
        ((kind, y),) = x.items()
        if kind in ("list", "tuple"):
            read = [self.read(z, nodes) for z in y]
            return read if kind == "list" else tuple(read)
        if kind == "dict":
            return {k: self.read(z, nodes) for k, z in y}
        if kind == "node":
            return nodes[y]
        return self.tensor(y) if kind == "tensor" else _READERS[kind](y)

    def tensor(self, form: list[Any]) -> torch.Tensor:
        shape, strides, dtype, device, layout = form
        if layout:
            with self.mode:
                return torch.zeros(shape, dtype=_WORDS[dtype], device=device).to_sparse()
        of_meta = torch.empty_strided(shape, strides, dtype=_WORDS[dtype], device="meta")
        return of_meta if device == "meta" else FakeTensor(self.mode, of_meta, torch.device(device))


# The folder


@functools.cache
def _version() -> str:
    """A digest of Python's and torch's versions and of the code that builds graphs: another digest, other graphs."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {torch.__version__}".encode())
    folder = Path(__file__).parent
    for path in (*sorted(folder.glob("*.py")), *(folder.parent / name for name in _READ)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path | None:
    """The folder of FXBATCH_CACHE, made now if it isn't there; None where there is none that is this user's alone."""
    named = os.environ.get("FXBATCH_CACHE", "")
    if not named:
        return None
    path = Path(named).expanduser() / _version()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all(map(_is_ours, (path, path.parent))):
            return path
        why = "another user owns it or may write to it"
    except OSError as error:
        why = str(error)
    _warn(f"FXBATCH_CACHE={named} is not used: {why}")
    return None


_told: dict[str, bool] = {}  # what is to be warned of, and whether it was


def _warn(text: str) -> None:
    _told.setdefault(text, False)


def warn_of_folder() -> None:
    """Say once why a folder is not used. Apart, since warnings of what bodies run are ignored while they are built."""
    for text in [x for x, told in _told.items() if not told]:
        _told[text] = True
        warnings.warn(text, stacklevel=2)


def _is_ours(path: Path) -> bool:
    """Whether a file or folder is this user's, and nobody else may write to it."""
    status = path.stat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(key: str) -> Fields | None:
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{key}.json"
    try:
        if not _is_ours(path):
            return None
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            return None
        fields: dict[str, Any] = json.loads(text)
        reader = _Reader()
        modules = {x: reader.module(fields[x], x.capitalize()) for x in _MODULES}
        return {**modules, **{x: reader.read(fields[x], []) for x in _FIELDS}}
    except FileNotFoundError:
        return None
    except Exception:  # noqa: BLE001  # a file that can't be read is built again, and written anew
        return None


def _write(key: str, fields: Fields) -> None:
    folder = _folder()
    if folder is None:
        return
    try:
        told = {
            **{x: None if fields[x] is None else _nodes(fields[x].graph) for x in _MODULES},
            **{x: _text(fields[x], {}) for x in _FIELDS},
        }
    except _NoText:
        return
    try:
        handle, name = tempfile.mkstemp(dir=folder, suffix=".new")  # this user's alone
        text = json.dumps(told)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        os.replace(name, folder / f"{key}.json")
        _prune(folder)
    except OSError as error:
        _warn(f"FXBATCH_CACHE is not written: {error}")


def _prune(folder: Path) -> None:
    """Once in a while the files that were written first go. Other processes may do the same at this moment."""
    names = os.listdir(folder)
    if len(names) <= _IN_FOLDER:
        return
    written: list[tuple[float, str]] = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            written.append(((folder / name).stat().st_mtime, name))
    for _, name in sorted(written)[: max(len(written) - _IN_FOLDER * 3 // 4, 0)]:
        (folder / name).unlink(missing_ok=True)
