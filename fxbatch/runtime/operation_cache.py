"""Signature + which gradients it needs -> CompiledOperation: graphs, kernels and the emitted step functions.

>>> cache = OperationCache()                                           # doctest: +SKIP
>>> compiled = cache.get(signature, (True, True), (True,), shared)      # doctest: +SKIP
>>> compiled.layout.groups                                             # doctest: +SKIP
((0, 1),)
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.build_operation import OperationGraphs, Ref, Unbatched, UnbatchedKernel, build_operation
from fxbatch.codegen.inductor import (
    CompiledGraph,
    CompileOptions,
    try_to_compile,
)
from fxbatch.codegen.kernel import Kernel, emit_kernel
from fxbatch.codegen.native_programs import NativeStep, backward_step, forward_step, parameters_step
from fxbatch.codegen.step_functions import emit_backward_step, emit_forward_step
from fxbatch.ir import Layout, Signature, TensorType
from fxbatch.runtime.postponed import REASON
from fxbatch.torch_private import without_saved_tensor_hooks
from fxbatch.trace.torch_patches import patched, patching

NeededGradients = tuple[tuple[bool, ...], tuple[bool, ...]]


@dataclass(eq=False)
class CompiledOperation:
    """One signature, ready to run, forwards and backwards. `reason` is set where it runs call by call."""

    signature: Signature
    needs: NeededGradients
    graphs: OperationGraphs | None = None  # None: a constant, or it runs call by call
    unbatched: UnbatchedKernel | None = None
    reason: str = ""
    forward: Callable[..., Any] | None = None  # emitted step functions, see codegen/step_functions.py
    backward: Callable[..., Any] | None = None
    parameters: Kernel | CompiledGraph | None = None
    kept_groups: tuple[int, ...] = ()  # input groups whose rows are kept for backward
    source: str = ""
    native_forward: NativeStep | None = None  # see codegen/native_programs.py
    native_backward: NativeStep | None = None
    native_parameters: NativeStep | None = None
    not_native: tuple[str, ...] = ()  # which kernels run in Python, and why
    compiled: tuple[CompiledGraph, ...] = ()  # what `compile=` made, of forward, backward and parameters
    uncompiled: tuple[str, ...] = ()  # why a graph runs uncompiled although `compile=` asked for more

    # What the runtime reads of the graphs; call by call, each input and shared operand that needs a gradient has one.

    @functools.cached_property
    def layout(self) -> Layout:
        if self.graphs is not None:
            return self.graphs.layout
        return Layout(tuple((i,) for i in range(0 if self.unbatched is None else len(self.signature.inputs))))

    @functools.cached_property
    def kept_members(self) -> tuple[int, ...]:
        """How many inputs each kept group has."""
        return tuple(len(self.layout.groups[g]) for g in self.kept_groups)

    @functools.cached_property
    def grad_groups(self) -> tuple[int, ...]:
        return self._needed(0) if self.graphs is None else self.graphs.grad_groups

    @functools.cached_property
    def grad_shared(self) -> tuple[int, ...]:
        return self._needed(1) if self.graphs is None else self.graphs.grad_shared

    def _needed(self, which: int) -> tuple[int, ...]:
        return () if self.unbatched is None else tuple(i for i, need in enumerate(self.needs[which]) if need)

    @functools.cached_property
    def grad_outputs(self) -> tuple[int, ...]:
        if self.graphs is not None:
            return self.graphs.grad_outputs
        outputs = self.signature.outputs if self.needs_gradient else ()
        return tuple(j for j, t in enumerate(outputs) if t.differentiable)

    @functools.cached_property
    def passes_gradient_through(self) -> bool:
        """Whether each input's gradient is the output's gradient as it is."""
        return self.graphs is not None and self.graphs.passes_gradient_through

    @functools.cached_property
    def extra_given(self) -> tuple[int, ...]:
        """Where all that backward does is to keep output gradients: which."""
        return () if self.graphs is None else self.graphs.extra_given

    @functools.cached_property
    def parameter_inputs(self) -> tuple[Ref, ...]:
        return () if self.graphs is None else self.graphs.parameter_inputs

    @functools.cached_property
    def saved_types(self) -> tuple[TensorType, ...]:
        return () if self.graphs is None else self.graphs.saved_types

    @functools.cached_property
    def extra_types(self) -> tuple[TensorType, ...]:
        return () if self.graphs is None else self.graphs.extra_types

    @property
    def compile_seconds(self) -> float:
        """What compiling took: the cold start of this operation."""
        return sum(graph.seconds for graph in self.compiled)

    @property
    def needs_gradient(self) -> bool:
        return bool(self.grad_groups or self.grad_shared)


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
    if signature.operation.kind in ("constant", "number"):
        return CompiledOperation(signature, needs)
    if signature.reason:
        return _call_by_call(signature, needs, signature.reason)
    if late:
        return _call_by_call(signature, needs, REASON)
    # A run is under no_grad; torch.fx keeps global flags while it traces, so one thread traces at a time.
    with patching, patched(), torch.inference_mode(False), torch.enable_grad():
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
    forward_step, forward_source = emit_forward_step(built, tuple(kept), forward)
    backward_step, backward_source = emit_backward_step(built, tuple(kept), backward)
    steps = _native_steps(built, tuple(kept), (forward, backward, parameters), maker.shared, native)
    return CompiledOperation(
        signature,
        needs,
        built,
        forward=forward_step,
        backward=backward_step,
        parameters=parameters,
        kept_groups=tuple(kept),
        source="\n".join(x for x in (forward_source, backward_source) if x),
        **steps,
        compiled=tuple(maker.compiled),
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
        made = try_to_compile(module, kernel, self.options, self.shared, name=full, random=self.graphs.random)
        if isinstance(made, str):
            self.uncompiled.append(f"{name}: {made}")
            return kernel
        self.compiled.append(made)
        return made

    def _is_native(self, name: str, kernel: Kernel) -> bool:
        """Whether a kernel has a native program, which is never slower than a compiled one."""
        if self.kept is None:
            return False
        return isinstance(_native_step(name, self.graphs, tuple(self.kept), kernel, self.shared), NativeStep)


def _call_by_call(signature: Signature, needs: NeededGradients, reason: str) -> CompiledOperation:
    return CompiledOperation(signature, needs, unbatched=UnbatchedKernel(signature), reason=reason)


class OperationCache:
    """Compiled operations by (signature, needs, types of shared operands, options); the least recently used go."""

    def __init__(self, size: int = 4096) -> None:
        self._entries: OrderedDict[tuple[Any, ...], CompiledOperation] = OrderedDict()
        self.size = size
        self.hits = 0
        self.misses = 0

    def get(
        self, signature: Signature, needs: NeededGradients, shared: Sequence[torch.Tensor], **options: Any
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
            self._entries[key] = self._entries.pop(
                key, found
            )  # to the end; another thread may have dropped it
            return found
        self.misses += 1
        with without_saved_tensor_hooks():
            made = compile_operation(signature, needs, shared, **options)
        self._entries[key] = made
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return made

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
