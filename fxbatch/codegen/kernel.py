"""An operation graph as straight-line Python: what runs where there is no native program.

In: an operation graph `(n, *ins) -> outs`. Out: a Kernel: emitted source, compiled. Calls that make a result write it
to the memory that is given for it; what depends on shared operands alone is a function of its own, run once a run.

    kernel = emit_kernel(graphs.forward)
    kernel(n, (*groups, *shared), (h, c, None), workspace)   # h, c are written, the third is made
    print(kernel.source)
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.native import extension
from fxbatch.codegen.operation_graphs import Size, is_cast, is_tensor, is_view, shape
from fxbatch.codegen.simplify import constant_value, is_random
from fxbatch.ir import TensorSpec
from fxbatch.torch_private import direct_call

aten = torch.ops.aten
Form = tuple[tuple[int, ...], torch.dtype, torch.device, torch.layout]

# Functions of torch with the arguments of their ATen namesakes, and `out=`: 0.9 us a call, by torch.ops 2.0.
_TORCH = frozenset((
    "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "erf", "sin", "cos", "reciprocal",
    "log1p", "expm1", "exp2", "log2",
    "mul", "add", "sub", "div", "pow", "maximum", "minimum", "mm", "bmm", "addmm",
    "baddbmm", "addcmul", "addcdiv", "where", "sum", "mean", "amax", "amin", "index_select", "gather", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "clamp", "clamp_min",
    "clamp_max", "sign", "cumsum", "floor", "ceil", "round", "atan2", "fmod", "remainder", "bitwise_and",
    "bitwise_or", "bitwise_not", "prod", "argmax", "argmin", "matmul", "lerp", "floor_divide", "cat",
))  # fmt: skip
_REDUCTIONS = ("sum", "mean", "prod", "amax", "amin")
# The torch functions take a number for a tensor, and then do what these do.
_SCALARS = {
    aten.mul.Scalar: torch.mul, aten.div.Scalar: torch.div, aten.add.Scalar: torch.add,
    aten.sub.Scalar: torch.sub, aten.div.Scalar_mode: torch.div,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Kernel:
    """`kernel(n, ins, outs, workspace) -> list of results`, to be run under `torch.no_grad()`.

    `outs[i]` is contiguous memory that result i is written to, or None: then it is made. `launches` counts the calls
    that do work (views are free).
    """

    source: str
    launches: int
    run: Callable[..., list[torch.Tensor]]
    prepare: Callable[
        ..., tuple[torch.Tensor, ...]
    ]  # of the inputs `given`: what depends on shared operands alone
    given: tuple[int, ...]

    def __call__(
        self,
        n: int,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        workspace: Workspace,
    ) -> list[torch.Tensor]:
        made = () if self.prepare is None else workspace.prepared(self, tuple([ins[i] for i in self.given]))
        return self.run(n, ins, outs, made)

    def __str__(self) -> str:
        return self.source


class Workspace:
    """What kernels keep from call to call: one a thread.

    workspace.enter_run(memory.shared)
    workspace.prepared(kernel, shared)    # made once a run
    workspace.rows(0, kind, 12)           # rows for input group 0, to be used up within a step
    """

    def __init__(self) -> None:
        self._run: object = None
        self._room: Any = None
        self._prepared: dict[
            Kernel, tuple[tuple[torch.Tensor, ...], list[int], tuple[torch.Tensor, ...]]
        ] = {}
        # By input group and type: the memory, and views of it by the number of rows.
        self._rows: dict[tuple[int, int], tuple[TensorSpec, torch.Tensor, dict[int, torch.Tensor]]] = {}

    def enter_run(self, run: object) -> None:
        """From here on kernels are called for this run; what they prepared for another is forgotten.

        Until it is called, and after `enter_run(None)`, kernels prepare anew at each call.
        """
        if run is not self._run:
            self._run = run
            self._prepared.clear()

    def prepared(self, kernel: Kernel, shared: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What a kernel computes of shared operands alone: once a run, and again where one was written to."""
        assert kernel.prepare is not None
        if self._run is None or any(x.is_inference() for x in shared):
            return kernel.prepare(*shared)
        versions = [x._version for x in shared]
        found = self._prepared.get(kernel)
        if found is not None and found[1] == versions and all(map(operator.is_, found[0], shared)):
            return found[2]
        made = kernel.prepare(*shared)
        self._prepared[kernel] = (shared, versions, made)
        return made

    def rows(self, group: int, kind: TensorSpec, n: int) -> torch.Tensor:
        """Rows [n, *shape] of a step's input group, which nobody reads after the step."""
        found = self._rows.get((group, id(kind)))
        view = None if found is None else found[2].get(n)
        if view is not None:
            return view
        if found is None or len(found[1]) < n or len(found[2]) > 512:
            if len(self._rows) > 512:
                self._rows.clear()
            with torch.inference_mode(False):
                made = torch.empty((n + n // 4, *kind.shape), dtype=kind.dtype, device=kind.device)
            found = self._rows[group, id(kind)] = kind, made, {}
        view = found[2][n] = found[1][:n]
        return view

    def native_room(self) -> Any:
        """Where native programs of this thread write their intermediates, and on how many threads they run: torch's."""
        if self._room is None:
            self._room = extension.Room()
        self._room.threads = torch.get_num_threads()
        return self._room

    def clear(self) -> None:
        """Give all memory back."""
        self._room = None
        self._prepared.clear()
        self._rows.clear()


def emit_kernel(module: fx.GraphModule, *, name: str = "kernel") -> Kernel:
    """Emit and compile the source of an operation graph."""
    return _KernelEmitter(module, name).emit()


def find_prepared(graph: fx.Graph) -> tuple[dict[fx.Node, None], list[fx.Node]]:
    """What depends on shared operands alone (casts, sums of biases, products with zeros), and what others read of it.

    In graph order. Views alone are as cheap to make as to fetch: then nothing is prepared.
    """
    found: dict[fx.Node, None] = {}
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    launches = False
    for node in graph.nodes:
        if node.op == "placeholder":
            first, second = node.meta["values"]
            same = isinstance(first, torch.Tensor) and first.shape == second.shape
            if same and first.layout is torch.strided:
                found[node] = None
        elif node.op == "get_attr":
            found[node] = None
        elif node.op == "call_function" and not is_random(node) and is_tensor(node):
            inside = all(x in found for x in node.all_input_nodes)
            if inside and node not in results and not _only_filled(node) and not _ends_in(node, results):
                found[node] = None
                launches |= not is_view(node)
    calls = {node: None for node in found if node.op == "call_function"} if launches else {}
    return calls, [x for x in calls if any(u not in calls for u in x.users)]


def _only_filled(node: fx.Node) -> bool:
    return constant_value(node) is not None and all(x.target is aten.cat.default for x in node.users)


def _ends_in(node: fx.Node, results: dict[fx.Node, None]) -> bool:
    """Whether a result is a view of the node: a result's memory is the caller's."""
    return any(x in results or _ends_in(x, results) for x in node.users if is_view(x))


@dataclass
class _KernelEmitter:
    module: fx.GraphModule
    name: str
    body: list[str] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)  # run once a run, of shared operands
    names: dict[fx.Node, str] = field(default_factory=dict)
    scope: dict[str, Any] = field(default_factory=dict)
    written: dict[fx.Node, int] = field(default_factory=dict)  # node -> the result that its call writes
    launches: int = 0

    def emit(self) -> Kernel:
        graph = self.module.graph
        places = [x for x in graph.nodes if x.op == "placeholder"]
        self.results: list[fx.Node] = list(graph.output_node().args[0])
        hoisted, kept = find_prepared(graph)
        given = tuple(i for i, x in enumerate(places[1:]) if any(u in hoisted for u in x.users))
        self.names = {x: x.name for x in places}
        self._unpack([x.name for x in places[1:]], "ins")
        self._unpack([f"o{i}" for i in range(len(self.results))], "outs")
        forms = self._constant(tuple(map(_form, self.results)))
        self.body += ["if n == 0:", f"    return {self._function('no_rows', no_rows)}(outs, {forms})"]
        self._unpack([x.name for x in kept], "prepared")
        last = {source: node for node in graph.nodes for source in node.all_input_nodes}
        for node in graph.nodes:
            if node in hoisted:
                self.names[node] = node.name
                self.prepared.append(f"{node.name} = {self._call(node)}")
            elif node.op == "call_function":
                self._node(node)
                dead = [self.names[x] for x in node.all_input_nodes if last[x] is node and x.op == "call_function"
                        and x not in hoisted and self.names[x] == x.name]  # fmt: skip
                self.body += [f"del {', '.join(dead)}"] if dead else []
            elif node.op == "get_attr":
                self.names[node] = self._constant(operator.attrgetter(str(node.target))(self.module))
        for i, node in enumerate(self.results):
            self._result(i, node)
        self.body.append(f"return [{', '.join(f'o{i}' for i in range(len(self.results)))}]")
        self.prepared.append(f"return ({''.join(f'{x.name}, ' for x in kept)})")
        source = _define(self.name, "n, ins, outs, prepared", self.body)
        read = ", ".join(places[1 + i].name for i in given)
        source += "\n\n" + _define("prepare", read, self.prepared) if hoisted else ""
        exec(compile(source, f"<fxbatch {self.name}>", "exec"), self.scope)
        return Kernel(source, self.launches, self.scope[self.name], self.scope.get("prepare"), given)

    def _unpack(self, names: Sequence[str], source: str) -> None:
        if names:
            self.body.append(f"{''.join(f'{x}, ' for x in names)}= {source}")

    def _node(self, node: fx.Node) -> None:
        """A call as a line; sizes, and what only changes no view, are expressions or names."""
        if not is_tensor(node) and not isinstance(node.meta["values"][0], (tuple, list)):
            self.names[node] = self._number(node)
            return
        work = not is_view(node) and not _is_getitem(node)
        self.launches += work
        if is_cast(node) and node in self.results:
            out, source = f"o{self.results.index(node)}", self._argument(node.args[0])
            self.names[node] = out
            self.body.append(f"{out} = {self._call(node)} if {out} is None else {out}.copy_({source})")
            return
        self.names[node] = node.name
        self.body.append(f"{node.name} = {self._call(node, self._direct(node) if work else '')}")

    def _direct(self, node: fx.Node) -> str:
        """`, out=o0` where the call writes a result, or what a result is a reshape of; None: then the call makes it."""
        for i, result in enumerate(self.results if _torch_function(node) is not None else ()):
            reshaped = result.target is aten.reshape.default and result.args[0] is node
            if i not in self.written.values() and (result is node or reshaped):
                self.written[node] = i
                view = f"o{i} if o{i} is None else o{i}.view({', '.join(map(_size, shape(node)))})"
                return f", out={view if reshaped else f'o{i}'}"
        return ""

    def _result(self, i: int, node: fx.Node) -> None:
        """Copy to the memory that was given what isn't there yet; where none was, it is made."""
        name, out = self.names[node], f"o{i}"
        if name == out:
            return  # a cast that was written there
        reshaped = node.target is aten.reshape.default and self.written.get(node.args[0]) == i
        if reshaped or self.written.get(node) == i:
            self.body.append(f"{out} = {name} if {out} is None else {out}" if reshaped else f"{out} = {name}")
            return
        if not is_tensor(node) or node.meta["values"][0].is_sparse:
            self.body.append(f"{out} = {name}")
            return
        new = (
            name
            if _is_new(node) and self.results.count(node) == 1
            else f"{name}.clone(memory_format=contiguous)"
        )
        self.scope["contiguous"] = torch.contiguous_format
        self.body.append(f"{out} = {new} if {out} is None else {out}.copy_({name})")
        self.launches += 1

    # -- text

    def _call(self, node: fx.Node, out: str = "") -> str:
        if _is_getitem(node):
            return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
        if is_view(node):
            return self._view(node)
        args = ", ".join(
            [*map(self._argument, node.args), *(f"{k}={self._argument(x)}" for k, x in node.kwargs.items())]
        )
        function = _torch_function(node)
        if function is not None:
            return f"{self._function(function.__name__, function)}({args}{out})"
        word = re.sub(r"\W+", "_", getattr(node.target, "__name__", str(node.target)))
        target: Any = node.target
        made = direct_call(target) if isinstance(target, torch._ops.OpOverload) else target
        return f"{self._function(f'aten_{word}', made)}({args})"

    def _view(self, node: fx.Node) -> str:
        source: Any = node.args[0]
        name, args = self._argument(source), list(node.args[1:])
        if node.target is aten.detach.default:
            return name
        if node.target is aten.slice.Tensor:
            filled: list[Any] = [*args, *[None] * (4 - len(args))]
            dim, bounds = filled[0], filled[1:]
            if isinstance(bounds[1], int) and bounds[1] >= 2**62:
                bounds[1] = None
            text = ":".join("" if x is None else self._argument(x) for x in bounds)
            return f"{name}[{':, ' * ((dim or 0) % len(shape(source)))}{text}]"
        sizes: Sequence[Any] = args[0] if args and isinstance(args[0], (list, tuple)) else args
        given = ", ".join(map(self._argument, sizes)) or "()"  # 0.5 us cheaper than a tuple
        return f"{name}.{str(node.target).split('.')[1]}({given})"

    def _number(self, node: fx.Node) -> str:
        word = getattr(node.target, "__name__", "")
        symbol = {"mul": "*", "add": "+", "sub": "-", "floordiv": "//"}.get(word)
        if symbol is None:
            return f"{self._function(node.name, node.target)}({', '.join(map(self._argument, node.args))})"
        left, right = map(self._argument, node.args)
        return f"({left} {symbol} {right})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(self._argument, value))
            return (
                f"[{inner}]"
                if isinstance(value, list)
                else f"({inner},)"
                if len(value) == 1
                else f"({inner})"
            )
        finite = isinstance(value, float) and value == value and abs(value) != float("inf")
        if value is None or isinstance(value, (bool, int, str)) or finite:
            return repr(value)
        if isinstance(value, torch.dtype):
            self.scope["torch"] = torch
            return str(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        for name, known in self.scope.items():
            if known is value or (type(known) is type(value) is torch.device and known == value):
                return name
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def _function(self, name: str, function: Any) -> str:
        if self.scope.get(name, function) is not function:
            return self._constant(function)
        self.scope[name] = function
        return name


def _size(size: Size) -> str:
    a, b = size
    return str(b) if not a else f"{a} * n + {b}" if b else f"{a} * n"


def _define(name: str, arguments: str, body: Sequence[str]) -> str:
    return "\n    ".join([f"def {name}({arguments}):", *body]) + "\n"


def _torch_function(node: fx.Node) -> Callable[..., Any] | None:
    """The function of the torch namespace that is this call, with an `out=`."""
    target = node.target
    if target in _SCALARS:
        return _SCALARS[target]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    word = target._schema.name.removeprefix("aten::")
    outs = [getattr(target.overloadpacket, x)._schema.arguments for x in target.overloadpacket.overloads()]
    plain = [(a.name, str(a.type)) for a in target._schema.arguments]
    of_everything = word in _REDUCTIONS and "dim" not in dict(plain)  # torch's functions take no `out=` there
    if of_everything:
        return None
    same = any(
        [(a.name, str(a.type)) for a in x if not a.is_out] == plain and len(x) == len(plain) + 1 for x in outs
    )
    return getattr(torch, word) if word in _TORCH and same else None


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_new(node: fx.Node) -> bool:
    """Whether a value is its call's own new tensor."""
    target = node.target
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    own = bool(returns) and all(r.alias_info is None for r in returns)
    return own and node.op == "call_function" and target is not aten.reshape.default


def _form(node: fx.Node) -> Form:
    value = node.meta["values"][0]
    return tuple(b for _, b in shape(node)), value.dtype, value.device, value.layout


def no_rows(outs: Sequence[torch.Tensor | None], forms: Sequence[Form]) -> list[torch.Tensor]:
    """The results for no rows: nothing in each, and sums of nothing are zero."""
    results = []
    for out, (sizes, dtype, device, layout) in zip(outs, forms, strict=True):
        made = torch.zeros(sizes, dtype=dtype, device=device, layout=layout)
        results.append(made if out is None else out.zero_())
    return results
