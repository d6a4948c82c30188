"""An operation graph as a list of instructions, each a call of torch: what runs where there is no native program.

In: an operation graph `(n, *ins) -> outs`. Out: a Kernel, for any number of rows. Calls that make a result write
it to the memory that is given for it; what depends on shared operands alone is a list of its own, run once a run.

    kernel = emit_kernel(graphs.forward)
    kernel(n, (*groups, *shared), (h, c, None), workspace)   # h, c are written, the third is made
    print(kernel.body.instructions[0])         # addmm_default = addmm(weights_2, groups_1, permute_default)
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from fxbatch.codegen.native import extension
from fxbatch.codegen.operation_graphs import Shape, device_of, is_cast, is_tensor, is_view, shape
from fxbatch.codegen.simplify import constant_value, is_random
from fxbatch.torch_private import direct_call, tree_leaves

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
class Register:
    """Where a run of a kernel keeps a tensor or a number."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Instruction:
    """`output = call(*arguments, **keywords)`, of registers, lists of these, and what is known beforehand."""

    operation: str
    call: Callable[..., object]
    arguments: tuple[object, ...]
    output: Register
    keywords: tuple[tuple[str, object], ...] = ()
    out: Register | None = None  # the tensor that the call writes its result to

    def reads(self) -> list[Register]:
        """All registers that it reads."""
        operands = self.arguments, self.keywords, self.out
        return [x for x in tree_leaves(operands) if isinstance(x, Register)]

    def __str__(self) -> str:
        named = [f"{k}={_text(x)}" for k, x in self.keywords] + ([f"out={self.out}"] if self.out else [])
        return f"{self.output} = {self.operation}({', '.join([*map(_text, self.arguments), *named])})"


@dataclass(frozen=True, eq=False)
class InstructionList:
    """Instructions that read `inputs`, and give `results`."""

    instructions: tuple[Instruction, ...]
    inputs: tuple[Register, ...]
    results: tuple[Register, ...]

    def bind(self) -> Callable[[Sequence[object]], list[Any]]:
        """The function of what is in the inputs. It is compiled: a loop over the list took 1.1 to 1.3 of its time."""
        scope: dict[str, Any] = {}
        lines = [f"{''.join(f'{x}, ' for x in self.inputs)}= given"] if self.inputs else []
        last = {x: k for k, item in enumerate(self.instructions) for x in item.reads()}
        names_left = {*self.inputs, *self.results}
        for k, x in enumerate(self.instructions):
            named = [f"{name}={_code(value, scope)}" for name, value in x.keywords]
            named += [] if x.out is None else [f"out={x.out}"]
            arguments = [*(_code(value, scope) for value in x.arguments), *named]
            if x.call is operator.getitem:
                call = f"{arguments[0]}[{arguments[1]}]"
            elif getattr(torch.Tensor, x.operation, None) is x.call:
                call = f"{arguments[0]}.{x.operation}({', '.join(arguments[1:])})"
            else:
                call = f"{_code(x.call, scope)}({', '.join(arguments)})"
            lines.append(f"{x.output} = {call}")
            dead = [str(r) for r in dict.fromkeys(x.reads()) if last[r] == k and r not in names_left]
            lines += [f"del {', '.join(dead)}"] if dead else []
        lines.append(f"return [{', '.join(_code(x, scope) for x in self.results)}]")
        exec("\n    ".join(["def run(given):", *lines]) + "\n", scope)
        return scope["run"]

    def __str__(self) -> str:
        lines = (*self.instructions, f"return {', '.join(map(str, self.results))}")
        return "\n    ".join(map(str, lines)) + "\n"


def _code(value: object, scope: dict[str, object]) -> str:
    """A register, a number, a list of these as code; all else by a name in `scope`."""
    if isinstance(value, (list, tuple)) and any(isinstance(x, Register) for x in tree_leaves(value)):
        inner = ", ".join(_code(x, scope) for x in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    if isinstance(value, Register) or value is None or type(value) in (bool, int):
        return str(value)
    name = next((name for name, x in scope.items() if x is value), f"known__{len(scope)}")
    scope[name] = value
    return name


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    return str(value) if isinstance(value, (Register, torch.dtype)) else repr(value)


@dataclass(frozen=True, eq=False)
class Kernel:
    """`kernel(n, ins, outs, workspace) -> list of results`, to be run under `torch.no_grad()`.

    `outs[i]` is contiguous memory that result i is written to, or None: then it is made. `launches` counts the calls
    that do work (views are free).
    """

    body: InstructionList  # of n, ins, outs and what was prepared
    preparation: InstructionList | None  # of some inputs: what depends on shared operands alone
    prepared_of: tuple[int, ...]  # which inputs
    forms: tuple[Form, ...]  # of the results for no rows
    launches: int
    run: Callable[[Sequence[object]], list[torch.Tensor]]
    prepare: Callable[[Sequence[object]], Sequence[torch.Tensor]] | None  # `preparation` as a function

    @property
    def source(self) -> str:
        """The instructions, one a line."""
        inputs = ", ".join(map(str, self.body.inputs))
        source = f"kernel({inputs}):\n    {self.body}"
        if self.preparation is not None:
            read = ", ".join(map(str, self.preparation.inputs))
            source += f"\n\nprepare({read}):\n    {self.preparation}"
        return source

    def __call__(
        self, n: int, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None], workspace: Workspace
    ) -> list[torch.Tensor]:
        if n == 0:
            return no_rows(outs, self.forms)
        if self.prepare is None:
            return self.run((n, *ins, *outs))
        return self.run(
            (n, *ins, *outs, *workspace.prepared(self, tuple([ins[i] for i in self.prepared_of])))
        )


class Workspace:
    """What kernels use again from call to call, one workspace per thread.

    workspace.enter_run(memory.shared)
    workspace.prepared(kernel, shared)    # made once a run
    """

    def __init__(self) -> None:
        self.keeps_graphs = False  # whether another backward pass may come
        self._run: object = None
        self._room: Any = None
        self._prepared: dict[Kernel, tuple[tuple[torch.Tensor, ...], list[int], Sequence[torch.Tensor]]] = {}

    def enter_run(self, run: object) -> None:
        """From here on kernels are called for this run; what they prepared for another is forgotten.

        Until it is called, and after `enter_run(None)`, kernels prepare anew at each call.
        """
        if run is not self._run:
            self._run = run
            self._prepared.clear()

    def prepared(self, kernel: Kernel, shared: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        """The tensors that a kernel computes of shared operands alone: once per run, and again after a write to one."""
        assert kernel.prepare is not None
        if self._run is None or any(x.is_inference() for x in shared):
            return kernel.prepare(shared)
        versions = [x._version for x in shared]
        before = self._prepared.get(kernel)
        if before is not None and before[1] == versions and all(map(operator.is_, before[0], shared)):
            return before[2]
        tensors = kernel.prepare(shared)
        self._prepared[kernel] = (shared, versions, tensors)
        return tensors

    def native_room(self) -> object:
        """Where native programs of this thread write their intermediates, and on how many threads they run: torch's."""
        if self._room is None:
            self._room = extension.Room()
        self._room.threads = torch.get_num_threads()
        return self._room


def emit_kernel(module: fx.GraphModule) -> Kernel:
    """The instructions of an operation graph."""
    graph = module.graph
    places = [x for x in graph.nodes if x.op == "placeholder"]
    nodes: list[fx.Node] = list(graph.output_node().args[0])
    hoisted, hoisted_nodes = find_prepared(graph)
    positions = tuple(i for i, x in enumerate(places[1:]) if any(u in hoisted for u in x.users))
    outs = [Register(f"o{i}") for i in range(len(nodes))]
    emitter = _KernelEmitter({x: Register(x.name) for x in places}, nodes, outs)
    for node in graph.nodes:
        if node in hoisted:
            emitter._call(node, emitter.prepared)
        elif node.op == "call_function":
            emitter._node(node)
        elif node.op == "get_attr":
            emitter.registers[node] = operator.attrgetter(str(node.target))(module)
    results = tuple(emitter._result(i, node) for i, node in enumerate(nodes))
    read = tuple(emitter.registers[x] for x in hoisted_nodes)
    inputs = (*(emitter.registers[x] for x in places), *outs, *read)
    body = InstructionList(tuple(emitter.body), inputs, results)
    preparation = None
    if hoisted:
        prepared_inputs = tuple(emitter.registers[places[1 + i]] for i in positions)
        preparation = InstructionList(tuple(emitter.prepared), prepared_inputs, read)
    prepare = None if preparation is None else preparation.bind()
    forms = tuple(map(_form, nodes))
    return Kernel(body, preparation, positions, forms, emitter.launches, body.bind(), prepare)


def call_alone(node: fx.Node, results: Sequence[fx.Node]) -> Callable[[Sequence[object]], object]:
    """One call as a function of the tensors that it reads and the memory that its results are written to, in a row.
    results: the call, or the items of what it gives."""
    outs = [Register(f"o{i}") for i in range(len(results))]
    emitter = _KernelEmitter({x: Register(x.name) for x in node.all_input_nodes}, results, outs)
    read = (*emitter.registers.values(), *outs)
    direct = list(results) == [node] and _torch_function(node) is not None
    emitter._call(node, emitter.body, outs[0] if direct else None)
    for out, x in () if direct else zip(outs, results, strict=True):
        if x is not node:
            emitter._call(x, emitter.body)
        emitter.body.append(
            Instruction("into", torch.Tensor.copy_, (out, emitter.registers[x]), Register(f"{out}_there"))
        )
    return InstructionList(tuple(emitter.body), read, ()).bind()


def find_prepared(graph: fx.Graph) -> tuple[dict[fx.Node, None], list[fx.Node]]:
    """The nodes that depend on shared operands alone (casts, sums of biases), and those of them that other nodes read.

    In graph order. Views alone are as cheap to make as to fetch: then nothing is prepared.
    """
    hoisted: dict[fx.Node, None] = {}
    results = dict.fromkeys(graph.output_node().all_input_nodes)
    launches = False
    for node in graph.nodes:
        if node.op == "placeholder":
            first, second = node.meta["values"]
            same = isinstance(first, torch.Tensor) and first.shape == second.shape
            if same and first.layout is torch.strided:
                hoisted[node] = None
        elif node.op == "get_attr":
            hoisted[node] = None
        elif node.op == "call_function" and not is_random(node) and is_tensor(node):
            inside = all(x in hoisted for x in node.all_input_nodes)
            if inside and node not in results and not _only_filled(node) and not _ends_in(node, results):
                hoisted[node] = None
                launches |= not is_view(node)
    calls = {node: None for node in hoisted if node.op == "call_function"} if launches else {}
    return calls, [x for x in calls if any(u not in calls for u in x.users)]


def _only_filled(node: fx.Node) -> bool:
    return constant_value(node) is not None and all(x.target is aten.cat.default for x in node.users)


def _ends_in(node: fx.Node, results: dict[fx.Node, None]) -> bool:
    """Whether a result is a view of the node: a result's memory is the caller's."""
    return any(x in results or _ends_in(x, results) for x in node.users if is_view(x))


@dataclass
class _KernelEmitter:
    """Instructions as they are written."""

    registers: dict[fx.Node, Any]  # or what is known of a node beforehand
    results: Sequence[fx.Node]
    outs: Sequence[Register]  # memory that is given for each
    body: list[Instruction] = field(default_factory=list)
    prepared: list[Instruction] = field(default_factory=list)  # run once a run, of shared operands
    written: dict[fx.Node, int] = field(default_factory=dict)  # node -> the result that its call writes
    launches: int = 0

    def _node(self, node: fx.Node) -> None:
        work = is_tensor(node) or isinstance(node.meta["values"][0], (tuple, list))
        work = work and not is_view(node) and not _is_getitem(node)
        self.launches += work
        if is_cast(node) and node in self.results:
            out, source = self.outs[self.results.index(node)], self._argument(node.args[0])
            function, arguments, keywords = self._aten(node)
            cast = functools.partial(_cast_into, function, arguments[1:], keywords)
            output = self.registers[node] = Register(node.name)
            self.body.append(Instruction("aten__to_copy_default", cast, (source, out), output))
            return
        self._call(node, self.body, self._direct(node) if work else None)

    def _direct(self, node: fx.Node) -> Register | None:
        """Where the call writes a result, or what a result is a reshape of; None: then the call makes it."""
        for i, result in enumerate(self.results if _torch_function(node) is not None else ()):
            reshaped = result.target is aten.reshape.default and result.args[0] is node
            if i not in self.written.values() and (result is node or reshaped):
                self.written[node] = i
                if not reshaped:
                    return self.outs[i]
                view = Register(f"o{i}_as_{node.name}")
                n = next(iter(self.registers.values()))
                as_node = functools.partial(_viewed, shape(node))
                self.body.append(Instruction("reshaped", as_node, (self.outs[i], n), view))
                return view
        return None

    def _result(self, i: int, node: fx.Node) -> Register:
        """Where a result is at last: copied to the memory that was given what isn't there yet."""
        register, out = self.registers[node], self.outs[i]
        if is_cast(node) and self.results.index(node) == i and node.op == "call_function":
            return cast(Register, register)  # written there
        reshaped = node.target is aten.reshape.default and self.written.get(node.args[0]) == i
        if not reshaped and (
            self.written.get(node) == i or not is_tensor(node) or node.meta["values"][0].is_sparse
        ):
            return cast(Register, register)
        last = Register(f"result_{i}")
        if reshaped:
            self.body.append(Instruction("given_or", _given_or, (out, register), last))
            return last
        new = _is_new(node) and self.results.count(node) == 1
        self.body.append(Instruction("into", _into if new else _copy_into, (register, out), last))
        self.launches += 1
        return last

    # -- calls

    def _call(self, node: fx.Node, to: list[Instruction], out: Register | None = None) -> None:
        if node.target is aten.detach.default:
            source = self.registers[node] = self._argument(node.args[0])
            if to is not self.body:  # what is prepared has names of its own
                output = self.registers[node] = Register(node.name)
                to.append(Instruction("detach", torch.Tensor.detach, (source,), output))
            return
        keywords: dict[str, object] = {}
        target: object = node.target
        if _is_getitem(node):
            operation, call, arguments = "getitem", operator.getitem, tuple(map(self._argument, node.args))
        elif is_view(node):
            operation, call, arguments = self._view(node)
        else:
            call, arguments, keywords = self._aten(node)
            operation = getattr(_torch_function(node), "__name__", None) or re.sub(
                r"\W+", "_", ("aten_" if is_tensor(node) else "") + getattr(target, "__name__", str(target))
            )
        output = self.registers[node] = Register(node.name)
        to.append(Instruction(operation, call, tuple(arguments), output, tuple(keywords.items()), out))

    def _aten(self, node: fx.Node) -> tuple[Callable[..., Any], tuple[object, ...], dict[str, object]]:
        """The function of a call, its arguments and keywords."""
        target: Any = node.target
        function = _torch_function(node)
        if function is None:
            function = direct_call(target) if isinstance(target, torch._ops.OpOverload) else target
        keywords = {k: self._argument(x) for k, x in node.kwargs.items()}
        return function, tuple(map(self._argument, node.args)), keywords

    def _view(self, node: fx.Node) -> tuple[str, Callable[..., Any], tuple[object, ...]]:
        source: Any = node.args[0]
        read, args = self._argument(source), list(node.args[1:])
        if node.target is aten.slice.Tensor:
            filled: list[Any] = [*args, *[None] * (4 - len(args))]
            dim, bounds = (filled[0] or 0) % len(shape(source)), list(map(self._argument, filled[1:]))
            if isinstance(bounds[1], int) and bounds[1] >= 2**62:
                bounds[1] = None
            if any(isinstance(x, Register) for x in bounds):
                return "slice", *self._aten(node)[:2]
            return "getitem", operator.getitem, (read, (*[slice(None)] * dim, slice(*bounds)))
        word = str(node.target).split(".")[1]
        sizes: Sequence[object] = args[0] if args and isinstance(args[0], (list, tuple)) else args
        sizes_and_more = tuple(map(self._argument, sizes)) or ((),)  # 0.5 us cheaper than a tuple
        return word, getattr(torch.Tensor, word), (read, *sizes_and_more)

    def _argument(self, value: object) -> object:
        if isinstance(value, fx.Node):
            return self.registers[value]
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(map(self._argument, value))
        return value


def _viewed(dims: Shape, out: torch.Tensor | None, n: int) -> torch.Tensor | None:
    return None if out is None else out.view([a * n + b for a, b in dims])


def _cast_into(
    call: Callable[..., object],
    rest: Sequence[object],
    keywords: dict[str, object],
    x: torch.Tensor,
    out: torch.Tensor | None,
) -> object:
    return call(x, *rest, **keywords) if out is None else out.copy_(x)


def _given_or(out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if out is None else out


def _into(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return x if out is None else out.copy_(x)


def _copy_into(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


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
    begins = node.args[0] if node.args else None
    with_number = isinstance(begins, (int, float)) and word != "pow"
    of_all = word in _REDUCTIONS and "dim" not in dict(plain)
    if with_number or of_all:  # torch's functions take no `out=` there
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
    is_fresh = bool(returns) and all(r.alias_info is None for r in returns)
    return is_fresh and node.op == "call_function" and target is not aten.reshape.default


def _form(node: fx.Node) -> Form:
    value = node.meta["values"][0]
    return tuple(b for _, b in shape(node)), value.dtype, device_of(node), value.layout


def no_rows(outs: Sequence[torch.Tensor | None], forms: Sequence[Form]) -> list[torch.Tensor]:
    """The results for no rows: nothing in each, and sums of nothing are zero."""
    results = []
    for out, (sizes, dtype, device, layout) in zip(outs, forms, strict=True):
        empty_rows = torch.zeros(sizes, dtype=dtype, device=device, layout=layout)
        results.append(empty_rows if out is None else out.zero_())
    return results
