"""Signature + which gradients it needs -> CompiledOperation: graphs, kernels and step functions.

>>> cache = OperationCache()                                           # doctest: +SKIP
>>> compiled = cache.get(signature, (True, True), (True,), shared)      # doctest: +SKIP
>>> compiled.layout.groups                                             # doctest: +SKIP
((0, 1),)

Building an operation's graphs takes as long as running some hundred calls of it one by one. A model whose tensors have
another shape for every instance (whole graphs, whole sentences at once) has hundreds of signatures with a few calls
each. Where many are new at once, each runs call by call until it has run so many calls as building it costs: at worst
that is twice the time of the better choice, as for who rents skis before buying them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.caches import Cache
from fxbatch.codegen.build_operation import OperationGraphs, Ref, Unbatched, UnbatchedKernel, build_operation
from fxbatch.codegen.check import inputs_without_gradient
from fxbatch.codegen.inductor import CompiledGraph, CompileOptions, try_to_compile
from fxbatch.codegen.kernel import Kernel, emit_kernel
from fxbatch.codegen.native_programs import NativeStep, make_step, sources_of
from fxbatch.codegen.operation_graphs import Large
from fxbatch.codegen.step_functions import StepFunction, backward_function, forward_function, row_functions
from fxbatch.ir import CONSTANT_KINDS, Layout, Signature, TensorSpec
from fxbatch.stopwatch import building, count_late
from fxbatch.torch_private import without_saved_tensor_hooks
from fxbatch.trace.operations import CustomFunction
from fxbatch.trace.torch_patches import patched, patching

MANY_NEW = 64  # new signatures in one program from which on building is put off
ENOUGH_CALLS = 200  # that cost about as much as building: 25 ms at 0.12 ms a call, forwards and backwards
NEW = -1  # calls of what was neither built nor put off so far
SECONDS_A_CALL = 2e-3  # of building, for each call of ATen in the body
REASON = "met too few times so far, or too lately, for its graphs to be built"


@dataclass(slots=True)
class Met:
    """What an engine knows of a signature."""

    calls: int = NEW  # that ran call by call, while its graphs wait; ENOUGH_CALLS where they don't
    inputs: tuple[bool, ...] = ()  # which needed gradients, once some did
    late: bool = True  # whether it ran call by call last
    is_large: bool = False  # whether it was tried to be built, and is of too many calls


class MetSignatures:
    """The signatures that an engine has met; the least recently used are forgotten."""

    def __init__(self, most: int | None = None) -> None:
        self._met: Cache[Signature, Met] = Cache("signatures that were met", most)
        self._waiting = 0  # how many are put off

    def of(self, signature: Signature) -> Met:
        """What is known of one."""
        return self._met.get(signature) or self._met.put(signature, Met())

    def __len__(self) -> int:
        return len(self._met)

    def put_off(self, signatures: Sequence[Signature], counts: Sequence[int]) -> frozenset[int]:
        """Positions of the signatures that run call by call in this program, for many were new at once; `counts`: their
        calls in it."""
        mine = {
            s: self.of(signature)
            for s, signature in enumerate(signatures)
            if counts[s] and not signature.reason and signature.operation.kind not in CONSTANT_KINDS
        }
        new = [met for met in mine.values() if met.calls == NEW]
        many = len(new) > MANY_NEW or self._waiting > 0  # a model that has had many will have more
        for met in new:
            met.calls = 0 if many else ENOUGH_CALLS
        self._waiting += sum(met.calls < ENOUGH_CALLS for met in new)
        late = [s for s, met in mine.items() if met.calls < ENOUGH_CALLS] if self._waiting else []
        for s in late:
            mine[s].calls += counts[s]
            self._waiting -= mine[s].calls >= ENOUGH_CALLS
        return frozenset(late)


# -- the cache

NeededGradients = tuple[tuple[bool, ...], tuple[bool, ...]]


@dataclass(eq=False)
class CompiledOperation:
    """One signature, ready to run, forwards and backwards. `reason` is set where it runs call by call."""

    signature: Signature
    needs: NeededGradients
    graphs: OperationGraphs | None = None  # None: a constant, or it runs call by call
    unbatched: UnbatchedKernel | None = None
    reason: str = ""
    forward: StepFunction | None = None  # see codegen/step_functions.py
    backward: StepFunction | None = None
    parameters: Kernel | CompiledGraph | None = None
    kept_groups: tuple[int, ...] = ()  # input groups whose rows are kept for backward
    source: str = ""  # of the kernels
    native_forward: NativeStep | None = None  # see codegen/native_programs.py
    native_backward: NativeStep | None = None
    native_parameters: NativeStep | None = None
    seconds: float = 0.0  # that its calls have taken, one by one, beyond what one call for all would have
    expected: float = 0.0  # seconds that building it takes, where it is a large one that is not built yet
    not_native: tuple[str, ...] = ()  # which kernels run in Python, and why
    compiled: tuple[CompiledGraph, ...] = ()  # what `compile=` made, of forward, backward and parameters
    uncompiled: tuple[str, ...] = ()  # why a graph runs uncompiled although `compile=` asked for more
    # What the runtime reads of the graphs; call by call, each input and shared operand that needs a gradient has one.
    layout: Layout = field(init=False)
    kept_members: tuple[int, ...] = field(init=False)  # how many inputs each kept group has
    grad_groups: tuple[int, ...] = field(init=False)
    grad_shared: tuple[int, ...] = field(init=False)
    grad_outputs: tuple[int, ...] = field(init=False)
    parameter_inputs: tuple[Ref, ...] = ()
    saved_types: tuple[TensorSpec, ...] = ()
    extra_types: tuple[TensorSpec, ...] = ()
    without_gradient: tuple[int, ...] = ()  # inputs that eager gives none

    def __post_init__(self) -> None:
        graphs, signature = self.graphs, self.signature
        if graphs is not None:
            self.layout, self.grad_outputs = graphs.layout, graphs.grad_outputs
            self.grad_groups, self.grad_shared = graphs.grad_groups, graphs.grad_shared
            self.parameter_inputs = graphs.parameter_inputs
            self.saved_types, self.extra_types = graphs.saved_types, graphs.extra_types
            self.without_gradient = graphs.without_gradient
        else:
            runs = self.unbatched is not None
            self.layout = Layout(tuple((i,) for i in range(len(signature.inputs) if runs else 0)))
            if self.unbatched is not None:
                self.forward, self.backward = row_functions(self.unbatched, self.needs)
            self.grad_groups, self.grad_shared = (
                tuple(i for i, need in enumerate(needs) if need and runs) for needs in self.needs
            )
            outputs = signature.outputs if self.needs_gradient else ()
            self.grad_outputs = tuple(j for j, t in enumerate(outputs) if t.differentiable)
        self.kept_members = tuple(len(self.layout.groups[g]) for g in self.kept_groups)

    @property
    def is_late(self) -> bool:
        """Whether it runs call by call because its graphs are not built yet."""
        return self.reason == REASON

    def count_late(self, seconds: float, n: int) -> None:
        """A launch of n calls, one by one, took so long; a batched one of two takes little more than one call."""
        self.seconds += (late := seconds * n / (n + 1))
        count_late(late)

    @property
    def compile_seconds(self) -> float:
        """Seconds that torch.compile took for this operation."""
        return sum(graph.seconds for graph in self.compiled)

    @functools.cached_property
    def behind(self) -> tuple[frozenset[int], ...]:
        """By output: the shared operands whose gradients are made of that output's; call by call, all."""
        outputs, graphs = range(len(self.signature.outputs)), self.graphs
        every = frozenset(range(len(self.signature.shared)))
        if graphs is None or graphs.backward is None or graphs.parameters is None:
            return tuple(every for _ in outputs)
        made_by_backward = _made_of(graphs.backward, [frozenset([j]) for j in graphs.grad_outputs])
        sources = made_by_backward[len(graphs.grad_groups) :]
        none: frozenset[int] = frozenset()
        read = [sources[ref.index] if ref.kind == "extra" else none for ref in graphs.parameter_inputs]
        of = dict(zip(graphs.grad_shared, _made_of(graphs.parameters, read), strict=True))
        return tuple(
            frozenset(i for i, outputs_of in of.items() if j in outputs_of or not outputs_of) for j in outputs
        )

    @functools.cached_property
    def is_selective(self) -> bool:
        """Whether some of its outputs lead to the gradients of other shared operands than others."""
        return len({self.behind[j] for j in self.grad_outputs}) > 1

    @property
    def needs_gradient(self) -> bool:
        return bool(self.grad_groups or self.grad_shared)


def _made_of(module: fx.GraphModule, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The sources of each result of a graph: those of all inputs that it is computed from. inputs: of each input."""
    sources: dict[fx.Node, frozenset[int]] = {}
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources.update(zip(places[1:], inputs, strict=False))
    for node in module.graph.nodes:
        if node not in sources:
            sources[node] = frozenset().union(*[sources[x] for x in node.all_input_nodes])
    (results,) = module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    return [sources[x] if isinstance(x, fx.Node) else frozenset() for x in results]


def compile_operation(
    signature: Signature,
    needs: NeededGradients,
    shared: Sequence[torch.Tensor],
    *,
    compile: CompileOptions | None = None,
    native: bool = True,
    late: bool = False,
    **options: Any,
) -> CompiledOperation:
    """Build the graphs of a signature and emit its kernels; what can't be batched runs call by call, and what is
    to be built later."""
    if signature.operation.kind in CONSTANT_KINDS:
        return CompiledOperation(signature, needs)
    reason = signature.reason or (REASON if late else "")
    if not reason:
        # A run is under no_grad; torch.fx keeps global flags while it traces, so one thread traces at a time.
        with patching, patched(), torch.inference_mode(False), torch.enable_grad():
            built = build_operation(
                signature, input_needs=needs[0], shared_needs=needs[1], shared=shared, **options
            )
        if isinstance(built, Large):
            kernel, expected = UnbatchedKernel(signature), SECONDS_A_CALL * built.calls
            return CompiledOperation(signature, needs, unbatched=kernel, reason=REASON, expected=expected)
        if not isinstance(built, Unbatched):
            return _emit(signature, needs, built, [t.detach() for t in shared], compile, native=native)
        reason = built.reason
    without: tuple[int, ...] = ()
    # Others may take what random numbers are not: the batch sizes of a packed sequence.
    if type(signature.operation.target) is CustomFunction:
        with patching, patched(), torch.inference_mode(False), torch.enable_grad():
            without = inputs_without_gradient(signature, *needs, shared)
    kernel = UnbatchedKernel(signature)
    return CompiledOperation(signature, needs, unbatched=kernel, reason=reason, without_gradient=without)


def _emit(
    signature: Signature,
    needs: NeededGradients,
    graphs: OperationGraphs,
    shared: Sequence[torch.Tensor],
    compile: CompileOptions | None,
    *,
    native: bool,
) -> CompiledOperation:
    """The kernels of an operation's graphs: emitted, compiled where that was asked for and works, native otherwise."""
    read = (*graphs.backward_inputs, *graphs.parameter_inputs)
    groups = tuple(sorted({r.index for r in read if r.kind == "group"}))
    kernels: dict[str, Kernel | CompiledGraph] = {}
    steps: dict[str, NativeStep] = {}
    not_native: list[str] = [] if native else ["switched off"]
    compiled: list[CompiledGraph] = []
    uncompiled: list[str] = []
    for name in ("forward", "backward", "parameters"):
        module: fx.GraphModule | None = getattr(graphs, name)
        if module is None:
            continue
        kernel = kernels[name] = emit_kernel(module)
        sources, sums = sources_of(graphs, groups, name), name == "parameters"
        lower = functools.partial(make_step, signature.name, module, shared, sources, sums=sums)
        step = lower() if native and (compile is None or compile.rest) else "compiled otherwise"
        if compile is not None and (not isinstance(step, NativeStep) or step.calls):
            label = f"{signature.name}: {name}"
            compiled_graph = try_to_compile(module, kernel, compile, shared, name=label, random=graphs.random)
            if isinstance(compiled_graph, CompiledGraph):
                kernels[name] = compiled_graph
                compiled.append(compiled_graph)
                step = step.calls[0] if isinstance(step, NativeStep) else step
            else:
                uncompiled.append(f"{name}: {compiled_graph}")
                step = lower() if native else step
        if isinstance(step, NativeStep):
            steps[name] = step
            not_native += [f"{name}: torch's {call}" for call in dict.fromkeys(step.calls)]
        elif native:
            not_native.append(f"{name}: {step}")
    back = kernels.get("backward")
    return CompiledOperation(
        signature,
        needs,
        graphs,
        forward=forward_function(graphs, groups, kernels["forward"]),
        backward=None if back is None else backward_function(graphs, groups, back),
        parameters=kernels.get("parameters"),
        kept_groups=groups,
        source="\n".join(
            f"# {name}: {signature}\n{k.source}" for name, k in kernels.items() if name != "parameters"
        ),
        not_native=tuple(not_native),
        compiled=tuple(compiled),
        uncompiled=tuple(uncompiled),
        native_forward=steps.get("forward"),
        native_backward=steps.get("backward"),
        native_parameters=steps.get("parameters"),
    )


class OperationCache:
    """Compiled operations by (signature, needs, types of shared operands, options); the least recently used go."""

    def __init__(self, most: int | None = None) -> None:
        self._entries: Cache[tuple[object, ...], CompiledOperation] = Cache("operations", most)
        self.hits = 0
        self.misses = 0

    def get(
        self,
        signature: Signature,
        needs: NeededGradients,
        shared: Sequence[torch.Tensor],
        *,
        may_build: Callable[[], bool] = lambda: True,
        late: bool = False,
        most: int | None = None,
        **options: Any,
    ) -> CompiledOperation:
        """The compiled operation, made now if it is new; one that runs call by call, for now, if it is `late`, may not
        be built, or is of more than `most` calls."""
        forms = [
            (t.shape, t.stride(), t.dtype, t.device) if t.layout is torch.strided else (t.shape, t.layout)
            for t in shared
        ]
        state, named = tuple(forms), tuple(options.items())
        key = signature, needs, state, late, named
        compiled = self._entries.get(key)
        if compiled is not None:
            self.hits += 1
            return compiled
        self.misses += 1
        waiting_key = signature, needs, state, True, named
        waiting = self._entries.get(waiting_key)
        expected = 0.0 if waiting is None else waiting.expected
        is_large = most is not None and expected > SECONDS_A_CALL * most
        if not late and (is_large or not may_build()):
            return self.get(signature, needs, shared, late=True, **options)
        with building(), without_saved_tensor_hooks():
            compiled = compile_operation(signature, needs, shared, late=late, most=most, **options)
        return self._entries.put(waiting_key if compiled.is_late else key, compiled)

    def __len__(self) -> int:
        return len(self._entries)
