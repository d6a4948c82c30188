"""An operation graph as straight-line Python that writes into given memory and reused workspaces.

In: an operation graph `(n, *ins) -> outs`. Out: a Kernel: emitted source, compiled.

    kernel = emit_kernel(graphs.forward)
    kernel(n, (*groups, *shared), (h, c, None), workspace)   # h, c are written, the third is made
    print(kernel.source)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.assign_memory import Memory, Place, assign_memory
from fxbatch.codegen.clean import slice_bounds
from fxbatch.codegen.kernel_calls import is_cast, is_view, out_call, split_text, view_text
from fxbatch.codegen.sizes import is_tensor, shape
from fxbatch.codegen.workspace import Workspace

__all__ = ["Kernel", "Workspace", "emit_kernel"]
aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Kernel:
    """`kernel(n, ins, outs, workspace) -> list of results`, to be run under `torch.no_grad()`.

    `outs[i]` is contiguous memory that result i is written to, or None: then it is made. Results don't
    alias the workspace. `launches` counts the calls that do work (views are free).
    """

    source: str
    launches: int
    run: Callable[..., list[torch.Tensor]]
    make_views: Callable[..., tuple[torch.Tensor, ...]]
    prepare: Callable[..., tuple[torch.Tensor, ...]]  # what depends on shared operands alone

    def __call__(
        self,
        n: int,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        workspace: Workspace,
    ) -> list[torch.Tensor]:
        return self.run(n, ins, outs, workspace)

    def __str__(self) -> str:
        return self.source


def emit_kernel(module: fx.GraphModule, *, name: str = "kernel") -> Kernel:
    """Emit and compile the source of an operation graph."""
    emitter = _Emitter(module, assign_memory(module.graph))
    emitter.emit()
    source = emitter.source(name)
    scope: dict[str, Any] = dict(emitter.scope)
    exec(compile(source, f"<fxbatch {name}>", "exec"), scope)
    kernel = Kernel(source, emitter.launches, scope[name], scope["make_views"], scope["prepare"])
    scope["kernel_id"] = kernel
    return kernel


@dataclass
class _Emitter:
    module: fx.GraphModule
    memory: Memory
    body: list[str] = field(default_factory=list)
    views: list[str] = field(default_factory=list)  # made once per number of rows
    ready: list[str] = field(default_factory=list)  # their names
    prepared: list[str] = field(default_factory=list)  # made once a run, of shared operands
    names: dict[fx.Node, str] = field(default_factory=dict)
    scope: dict[str, Any] = field(default_factory=lambda: {"torch": torch, "empty": torch.empty})
    launches: int = 0

    def emit(self) -> None:
        self._places()
        for node in self.module.graph.nodes:
            if node in self.memory.hoisted:
                self.names[node] = node.name
                self.prepared.append(f"{node.name} = {self._call(node)}")
            elif node.op == "call_function":
                self._node(node)
            elif node.op == "get_attr":
                self.names[node] = self._constant(_attribute(self.module, str(node.target)))
        self._copy_results()

    # -- names and literals

    def _constant(self, value: Any) -> str:
        for name, known in self.scope.items():
            if known is value or (type(known) is type(value) is torch.device and known == value):
                return name
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self._argument(x) for x in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if isinstance(value, torch.dtype):
            self.scope["torch"] = torch
            return str(value)
        return self._constant(value)

    def _function(self, name: str, function: Callable[..., Any]) -> str:
        if self.scope.get(name, function) is not function:
            return self._constant(function)
        self.scope[name] = function
        return name

    # -- memory

    def _places(self) -> None:
        """Names of placeholders and of the memory that nodes are written to."""
        places = [x for x in self.module.graph.nodes if x.op == "placeholder"]
        self.names[places[0]] = "n"
        for node in places[1:]:
            self.names[node] = node.name
        read = "".join(f"{node.name}, " for node in places[1:])
        if read:
            self.body.append(f"{read}= ins" if len(places) > 2 else f"{places[1].name}, = ins")
        outputs = self.memory.outputs
        if outputs:
            self.body.append("".join(f"o{i}, " for i in range(len(outputs))) + "= outs")
        self.body.append("if n == 0:")
        self.body.append(f"    return no_rows(outs, {self._constant(result_forms(outputs))})")
        self.scope["no_rows"] = no_rows
        self.body.append("")  # the line that fetches ready-made views goes here
        self.fetch = len(self.body) - 1
        for i, node in enumerate(outputs):
            if i in self.memory.returned or i in self.memory.fresh:
                continue
            kind = node.meta["values"][0]
            sizes = self._sizes(node)
            device = self._constant(kind.device)
            self.body.append(f"if o{i} is None:")
            self.body.append(
                f"    o{i} = empty({sizes}, dtype={self._argument(kind.dtype)}, device={device})"
            )

    def _sizes(self, node: fx.Node) -> str:
        text = [_size_text(a, b) for a, b in shape(node)]
        return f"({', '.join(text)}{',' if len(text) == 1 else ''})"

    def _memory_of(self, node: fx.Node) -> str:
        """The name of the memory that the node is written to, made where it isn't yet."""
        place = self.memory.place[node]
        name = f"{node.name}"
        if place.kind == "slot":
            kind = node.meta["values"][0]
            self.views.append(
                f"{name} = alloc({place.index}, {self._constant(kind.dtype)}, {self._constant(kind.device)}, "
                f"{self._sizes(node)})"
            )
            self.ready.append(name)
        elif place.kind == "output":
            out = f"o{place.index}"
            if shape(self.memory.outputs[place.index]) == shape(node):
                return out
            self.body.append(f"{name} = {out}.view({self._sizes(node)})")
        else:
            self._piece(node, place, name)
        return name

    def _piece(self, node: fx.Node, place: Place, name: str) -> None:
        assert place.parent is not None
        parent = self.names[place.parent]
        index = f"[{':, ' * place.dim}{place.start}:{place.start + place.size}]"
        if self.memory.is_slot(node):
            self.views.append(f"{name} = {parent}{index}")
            self.ready.append(name)
        else:
            self.body.append(f"{name} = {parent}{index}")

    # -- nodes

    def _node(self, node: fx.Node) -> None:
        if not is_tensor(node) and not isinstance(node.meta["values"][0], (tuple, list)):
            self.names[node] = self._number(node)
            return
        for waiting in self.memory.opens.get(node, ()):
            self.names[waiting] = self._memory_of(waiting)
        if node in self.memory.views:
            self._view(node)
        elif node in self.memory.copies:
            self._cat(node)
        elif node in self.memory.place:
            self._write(node)
        else:
            if self.memory.is_fill(node):
                return
            self.names[node] = node.name
            self.body.append(f"{node.name} = {self._call(node)}")
            self.launches += 0 if _is_getitem(node) else 1

    def _number(self, node: fx.Node) -> str:
        symbol = {"mul": "*", "add": "+", "sub": "-", "floordiv": "//"}.get(
            getattr(node.target, "__name__", "")
        )
        if symbol is None:
            return f"{self._function(node.name, node.target)}({', '.join(map(self._argument, node.args))})"
        left, right = map(self._argument, node.args)
        return f"({left} {symbol} {right})"

    def _slices_beside(self, node: fx.Node) -> dict[fx.Node, None]:
        """The plain slices of the same source and dimension, itself among them, if they don't overlap."""
        if node.target is not aten.slice.Tensor or (mine := slice_bounds(node)) is None:
            return {}
        others: dict[fx.Node, None] = {}
        spans: dict[tuple[int, int], None] = {}
        for user in node.args[0].users:
            if user.target is aten.slice.Tensor and user in self.memory.views:
                bounds = slice_bounds(user)
                if bounds is not None and bounds[0] == mine[0] and bounds[1:] not in spans:
                    others[user] = None
                    spans[bounds[1], bounds[2]] = None
        ordered = sorted(spans)
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
        return others if apart and node in others else {}

    def _view(self, node: fx.Node) -> None:
        if node in self.names:
            return  # split off together with its neighbours
        slot = self.memory.is_slot(node)
        text = view_text(node, self.names[node.args[0]], self._argument, owned=slot)
        if text == self.names[node.args[0]]:
            self.names[node] = text
            return
        self.names[node] = node.name
        together = {} if slot else self._slices_beside(node)
        if len(together) > 2:
            bounds = {slice_bounds(x)[1:]: x.name for x in together}
            self.names.update((x, x.name) for x in together)
            dim, size = slice_bounds(node)[0], shape(node.args[0])
            self.body.append(split_text(self.names[node.args[0]], bounds, size[dim][1], dim))
            return
        (self.views if slot else self.body).append(f"{node.name} = {text}")
        if slot:
            self.ready.append(node.name)

    def _cat(self, node: fx.Node) -> None:
        """Pieces that were not written in place are copied."""
        if node not in self.names:
            self.names[node] = self._memory_of(node)
        for piece in self.memory.copies[node]:
            name = f"part{len(self.ready) + len(self.body)}"
            index = f"[{':, ' * piece.dim}{piece.start}:{piece.start + piece.size}]"
            line = f"{name} = {self.names[node]}{index}"
            if self.memory.is_slot(node):
                self.views.append(line)
                self.ready.append(name)
            else:
                self.body.append(line)
            filled = piece.fill is not None
            self.body.append(
                f"{name}.fill_({piece.fill})" if filled else f"{name}.copy_({self.names[piece.source]})"
            )
            self.launches += 1

    def _write(self, node: fx.Node) -> None:
        if node not in self.names:
            self.names[node] = self._memory_of(node)
        target = self.names[node]
        if is_cast(node):
            self.body.append(f"{target}.copy_({self._argument(node.args[0])})")
            self.launches += 1
            return
        found = out_call(node.target)
        if found is None:
            self.body.append(f"{target}.copy_({self._call(node)})")
            self.launches += 2
            return
        word, out, function = found
        args = [self._argument(x) for x in node.args]
        args += [f"{key}={self._argument(x)}" for key, x in node.kwargs.items()]
        self.body.append(f"{self._function(word, function)}({', '.join(args)}, {out}={target})")
        self.launches += 1

    def _call(self, node: fx.Node) -> str:
        if _is_getitem(node):
            return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
        if is_view(node):
            return view_text(node, self.names[node.args[0]], self._argument, owned=False)
        args = [self._argument(x) for x in node.args]
        args += [f"{key}={self._argument(x)}" for key, x in node.kwargs.items()]
        word = re.sub(r"\W+", "_", getattr(node.target, "__name__", str(node.target)))
        return f"{self._function(f'aten_{word}', node.target)}({', '.join(args)})"

    def _copy_results(self) -> None:
        results = []
        for i, node in enumerate(self.memory.outputs):
            if i in self.memory.returned:
                results.append(self.names[node])
                continue
            results.append(f"o{i}")
            if i in self.memory.fresh:
                name = self.names[node]
                self.body.append(f"o{i} = {name} if o{i} is None else o{i}.copy_({name})")
                self.launches += 1
            elif not self.memory.written_in_place(i):
                self.body.append(f"o{i}.copy_({self.names[node]})")
                self.launches += 1
        self.body.append(f"return [{', '.join(results)}]")

    def source(self, name: str) -> str:
        if self.ready:
            names = "".join(f"{x}, " for x in self.ready)
            self.body[self.fetch] = f"{names}= workspace.views(kernel_id, n)"
        prepare = "def prepare():\n    return ()\n"
        if self.prepared:
            prepare = self._prepare()
        body = [line for line in self.body if line]
        views = [*self.views, f"return ({', '.join(self.ready)}{',' if self.ready else ''})"]
        return (
            f"def {name}(n, ins, outs, workspace):\n    "
            + "\n    ".join(body)
            + "\n\n\ndef make_views(n, alloc):\n    "
            + "\n    ".join(views)
            + f"\n\n\n{prepare}"
        )

    def _prepare(self) -> str:
        """The function that is run once a run, and the line of the kernel that fetches what it made."""
        hoisted = self.memory.hoisted
        sources = [
            x for x in self.module.graph.nodes if x.op == "placeholder" and any(u in hoisted for u in x.users)
        ]
        kept = [x for x in hoisted if any(u not in hoisted for u in x.users)]
        given = "".join(f"{self.names[x]}, " for x in sources)
        made = "".join(f"{self.names[x]}, " for x in kept)
        line = f"{made}= workspace.prepared(kernel_id, ({given}))"
        self.body[self.fetch] = f"{self.body[self.fetch]}\n    {line}" if self.body[self.fetch] else line
        inner = "\n    ".join([*self.prepared, f"return ({made})"])
        return f"def prepare({given}):\n    {inner}\n"


Form = tuple[tuple[int, ...], torch.dtype, torch.device, torch.layout]


def result_forms(outputs: Sequence[fx.Node]) -> tuple[Form, ...]:
    """Shape with n = 0, dtype, device and layout of each result."""
    values = [(node, node.meta["values"][0]) for node in outputs]
    return tuple((tuple(b for _, b in shape(x)), v.dtype, v.device, v.layout) for x, v in values)


def no_rows(outs: Sequence[torch.Tensor | None], forms: Sequence[Form]) -> list[torch.Tensor]:
    """The results for no rows: nothing in each, and sums of nothing are zero."""
    results = []
    for out, (sizes, dtype, device, layout) in zip(outs, forms, strict=True):
        made = torch.zeros(sizes, dtype=dtype, device=device, layout=layout)
        results.append(made if out is None else out.zero_())
    return results


def _size_text(a: int, b: int) -> str:
    if a == 0:
        return str(b)
    product = "n" if a == 1 else f"{a} * n"
    return product if b == 0 else f"{product} + {b}"


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
