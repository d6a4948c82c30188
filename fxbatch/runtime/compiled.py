"""Signature + which gradients it needs -> CompiledOperation: graphs, kernels and the emitted step functions.

>>> cache = OperationCache()                                           # doctest: +SKIP
>>> compiled = cache.get(signature, (True, True), (True,), shared)      # doctest: +SKIP
>>> compiled.layout.groups                                             # doctest: +SKIP
((0, 1),)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.compile_graph import (
    CompiledGraph,
    CompileOptions,
    NotCompilable,
    compile_graph,
    first_line,
    warn_uncompiled,
)
from fxbatch.codegen.gather_inside import Gathering, make_gathering
from fxbatch.codegen.kernels import Kernel, emit_kernel
from fxbatch.codegen.looped import emit_backward_step, emit_forward_step
from fxbatch.codegen.native_steps import NativeStep, backward_step, forward_step, parameters_step
from fxbatch.codegen.operation import OperationGraphs, Ref, Unbatched, UnbatchedKernel, build_operation
from fxbatch.ir import Layout, Signature, TensorType
from fxbatch.runtime.postponed import REASON
from fxbatch.trace.patch import patching

Needs = tuple[tuple[bool, ...], tuple[bool, ...]]


@dataclass(eq=False)
class CompiledOperation:
    """One signature, ready to run, forwards and backwards. `reason` is set where it runs call by call."""

    signature: Signature
    needs: Needs
    layout: Layout
    reason: str = ""
    graphs: OperationGraphs | None = None
    forward: Callable[..., Any] | None = None  # emitted step functions, see codegen/looped.py
    backward: Callable[..., Any] | None = None
    parameters: Kernel | CompiledGraph | None = None
    unbatched: UnbatchedKernel | None = None
    grad_groups: tuple[int, ...] = ()
    grad_outputs: tuple[int, ...] = ()
    grad_shared: tuple[int, ...] = ()
    hands_on: bool = False  # each input's gradient is the output's gradient as it is
    extra_given: tuple[int, ...] = ()  # all that backward does is to keep these of the output gradients
    parameter_inputs: tuple[Ref, ...] = ()
    kept_groups: tuple[int, ...] = ()  # input groups whose rows are kept for backward
    saved_types: tuple[TensorType, ...] = ()
    extra_types: tuple[TensorType, ...] = ()
    source: str = ""
    native_forward: NativeStep | None = None  # see codegen/native_steps.py
    native_backward: NativeStep | None = None
    native_parameters: NativeStep | None = None
    not_native: tuple[str, ...] = ()  # which kernels run in Python, and why
    compiled: tuple[CompiledGraph, ...] = ()  # what `compile=` made, of forward, backward and parameters
    gathering: Gathering | None = None  # forward with some of its gathers inside, compiled when it is met
    uncompiled: tuple[str, ...] = ()  # why a graph runs uncompiled although `compile=` asked for more

    @property
    def recompilations(self) -> int:
        """How often a graph was compiled again because the number of rows broke an assumption."""
        return sum(graph.recompilations for graph in self._compiled_graphs())

    @property
    def compile_seconds(self) -> float:
        """What compiling took: the cold start of this operation."""
        return sum(graph.seconds for graph in self._compiled_graphs())

    def _compiled_graphs(self) -> tuple[CompiledGraph, ...]:
        found = None if self.gathering is None else self.gathering.compiled
        return self.compiled if found is None else (*self.compiled, found)

    @property
    def needs_gradient(self) -> bool:
        return bool(self.grad_groups or self.grad_shared)


def _singles(signature: Signature) -> Layout:
    return Layout(tuple((i,) for i in range(len(signature.inputs))))


def compile_operation(
    signature: Signature,
    needs: Needs,
    shared: Sequence[torch.Tensor],
    *,
    compile: CompileOptions | None = None,
    native: bool = True,
    late: bool = False,
    **options: Any,
) -> CompiledOperation:
    """Build the graphs of a signature and emit its kernels; what can't be batched runs call by call, and what is
    to be built later."""
    if signature.operation.kind in ("constant", "number"):
        return CompiledOperation(signature, needs, Layout(()))
    if signature.reason:
        return _call_by_call(signature, needs, signature.reason)
    if late:
        return _call_by_call(signature, needs, REASON)
    # A run is under no_grad; torch.fx keeps global flags while it traces, so one thread traces at a time.
    with patching, torch.inference_mode(False), torch.enable_grad():
        built = build_operation(
            signature, input_needs=needs[0], shared_needs=needs[1], shared=shared, **options
        )
    if isinstance(built, Unbatched):
        return _call_by_call(signature, needs, built.reason)
    kept = sorted({r.index for r in (*built.backward_inputs, *built.parameter_inputs) if r.kind == "group"})
    maker = _KernelMaker(built, compile, shared, kept if native else None)
    forward = maker.make("forward", built.forward)
    backward = None if built.backward is None else maker.make("backward", built.backward)
    parameters = None if built.parameters is None else maker.make("parameters", built.parameters)
    gathering = make_gathering(built, kept, forward)
    forward_step, forward_source = emit_forward_step(built, tuple(kept), forward, gathering)
    backward_step, backward_source = emit_backward_step(built, tuple(kept), backward)
    steps = _native_steps(built, tuple(kept), (forward, backward, parameters), maker.shared, native)
    return CompiledOperation(
        signature,
        needs,
        built.layout,
        graphs=built,
        forward=forward_step,
        backward=backward_step,
        parameters=parameters,
        grad_groups=built.grad_groups,
        grad_outputs=built.grad_outputs,
        grad_shared=built.grad_shared,
        hands_on=built.hands_on,
        extra_given=built.extra_given,
        parameter_inputs=built.parameter_inputs,
        kept_groups=tuple(kept),
        saved_types=built.saved_types,
        extra_types=built.extra_types,
        source="\n".join(x for x in (forward_source, backward_source) if x),
        **steps,
        compiled=tuple(maker.compiled),
        gathering=gathering,
        uncompiled=tuple(maker.uncompiled),
    )


def _native_steps(
    graphs: OperationGraphs,
    kept: tuple[int, ...],
    kernels: tuple[Kernel | CompiledGraph | None, ...],
    shared: Sequence[torch.Tensor],
    wanted: bool,
) -> dict[str, Any]:
    """The native programs of an operation's kernels, and why some have none."""
    if not wanted:
        return {"not_native": ("switched off",)}
    names = ("forward", "backward", "parameters")
    made = {
        x: _native_step(x, graphs, kept, kernel, shared) for x, kernel in zip(names, kernels, strict=True)
    }
    found: dict[str, Any] = {f"native_{k}": x for k, x in made.items() if isinstance(x, NativeStep)}
    present = zip(made.items(), kernels, strict=True)
    found["not_native"] = tuple(
        f"{name}: {step}" for (name, step), kernel in present if isinstance(step, str) and kernel is not None
    )
    return found


def _native_step(
    name: str,
    graphs: OperationGraphs,
    kept: tuple[int, ...],
    kernel: Kernel | CompiledGraph | None,
    shared: Sequence[torch.Tensor],
) -> NativeStep | str:
    if name == "parameters":
        return parameters_step(graphs, kernel, shared)
    return (forward_step if name == "forward" else backward_step)(graphs, kept, kernel, shared)


class _KernelMaker:
    """Emits the kernels of an operation, and compiles them where that was asked for and works."""

    def __init__(
        self,
        graphs: OperationGraphs,
        options: CompileOptions | None,
        shared: Sequence[torch.Tensor],
        kept: Sequence[int] | None,
    ) -> None:
        self.kept = kept  # None: nothing is native
        self.graphs = graphs
        self.options = options
        self.shared = [t.detach() for t in shared]
        self.compiled: list[CompiledGraph] = []
        self.uncompiled: list[str] = []

    def make(self, name: str, module: fx.GraphModule) -> Kernel | CompiledGraph:
        kernel = emit_kernel(module)
        if self.options is None or (self.options.rest and self._is_native(name, kernel)):
            return kernel
        full = f"{self.graphs.signature.name}: {name}"
        try:
            made = compile_graph(
                module,
                kernel,
                self.options,
                self.shared,
                name=full,
                random=self.graphs.random,
                returning=name == "parameters",
            )
        except Exception as error:  # noqa: BLE001 compilers raise anything; the warning says what
            reason = str(error) if isinstance(error, NotCompilable) else first_line(error)
            self.uncompiled.append(f"{name}: {reason}")
            warn_uncompiled(full, reason)
            return kernel
        self.compiled.append(made)
        return made

    def _is_native(self, name: str, kernel: Kernel) -> bool:
        """Whether a kernel has a native program, which is never slower than a compiled one."""
        if self.kept is None:
            return False
        return isinstance(_native_step(name, self.graphs, tuple(self.kept), kernel, self.shared), NativeStep)


def _call_by_call(signature: Signature, needs: Needs, reason: str) -> CompiledOperation:
    grads = any(needs[0]) or any(needs[1])
    return CompiledOperation(
        signature,
        needs,
        _singles(signature),
        reason=reason,
        unbatched=UnbatchedKernel(signature),
        grad_groups=tuple(i for i, need in enumerate(needs[0]) if need),
        grad_outputs=tuple(j for j, t in enumerate(signature.outputs) if t.differentiable) if grads else (),
        grad_shared=tuple(k for k, need in enumerate(needs[1]) if need),
    )


class OperationCache:
    """Compiled operations by (signature, needs, types of shared operands, options); bounded, counted."""

    def __init__(self, size: int = 4096) -> None:
        self._entries: OrderedDict[tuple[Any, ...], CompiledOperation] = OrderedDict()
        self.size = size
        self.hits = 0
        self.misses = 0

    def get(
        self, signature: Signature, needs: Needs, shared: Sequence[torch.Tensor], **options: Any
    ) -> CompiledOperation:
        """The compiled operation, made now if it is new."""
        state = tuple(
            (t.shape, t.stride(), t.dtype, t.device) if t.layout is torch.strided else (t.shape, t.layout)
            for t in shared
        )
        key = (id(signature), needs, state, tuple(sorted(options.items(), key=lambda x: x[0])))
        found = self._entries.get(key)
        if found is not None and found.signature is signature:
            self.hits += 1
            return found
        self.misses += 1
        made = compile_operation(signature, needs, shared, **options)
        self._entries[key] = made
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return made

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
