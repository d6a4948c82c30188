"""An operation's per-instance body as an ATen graph, without composites, mutations or Python.

In: a Signature and its shared operands. Out: an fx.GraphModule `(*inputs, *shared) -> (*outputs)`.

    body = trace_body(signature, shared, mode)   # aten.cat, aten.mm, aten.sigmoid, ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fxbatch.codegen.contract import NotBatchable
from fxbatch.codegen.decompose import decompositions
from fxbatch.ir import Modes, Signature, TensorType
from fxbatch.torch_private import FakeTensorMode, TorchDispatchMode, native_kernels

aten = torch.ops.aten


@contextlib.contextmanager
def entered_modes(modes: Modes, devices: Sequence[str]) -> Iterator[None]:
    """Grad, autocast and default dtype as they were when the operation was recorded."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        wanted = dict(modes.autocast)
        for device in dict.fromkeys([*devices, *wanted]):
            if device in wanted:
                cast = torch.autocast(device, dtype=wanted[device], cache_enabled=False)
                stack.enter_context(cast)
            elif device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        torch.set_default_dtype(modes.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def devices_of(signature: Signature) -> list[str]:
    return list(dict.fromkeys(t.device.type for t in (*signature.inputs, *signature.outputs)))


def fake_rows(mode: FakeTensorMode, kind: TensorType, *lead: int) -> torch.Tensor:
    """A fake tensor `[*lead, *shape]` of a tensor type."""
    with mode:
        return torch.empty((*lead, *kind.shape), dtype=kind.dtype, device=kind.device)


def fake_shared(mode: FakeTensorMode, shared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [mode.from_tensor(x.detach()) for x in shared]


class _DetachUnderNoGrad(TorchDispatchMode):
    """Marks what the body computes under `torch.no_grad()` with a detach, which the graph keeps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or func.is_view or func._schema.is_mutable:
            return out
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return aten.detach.default(out)
        return out


class _IndexByTensor(TorchFunctionMode):
    """`w[i]` with a 0-dim integer tensor i stays an index: PyTorch would ask for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_position(x) for x in indices) and all(
                _is_position(x) or x == slice(None) for x in indices
            ):
                return aten.index.Tensor(
                    args[0], [x if isinstance(x, torch.Tensor) else None for x in indices]
                )
        return func(*args, **(kwargs or {}))


def _is_position(index: Any) -> bool:
    integral = isinstance(index, torch.Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    return integral and index.dim() == 0


def trace_body(signature: Signature, shared: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace the body on fake tensors. Raises NotBatchable when it writes to what it was given."""
    inputs = [fake_rows(mode, kind) for kind in signature.inputs]
    count = len(inputs)

    def body(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with entered_modes(signature.modes, devices_of(signature)):
            watch = _DetachUnderNoGrad() if signature.modes.grad else contextlib.nullcontext()
            with watch, _IndexByTensor(), sdpa_kernel(SDPBackend.MATH), native_kernels():
                return signature.run(tensors[:count], tensors[count:])

    fakes = [*inputs, *fake_shared(mode, shared)]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mode:
            graph = make_fx(torch.func.functionalize(body), decompositions())(*fakes)
            if any(mutates(node) for node in graph.graph.nodes):
                graph = make_fx(torch.func.functionalize(graph), decompositions())(*fakes)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in graph.graph.nodes:
        if mutates(node):
            raise NotBatchable(f"it writes to {_named(node.args[0], places, signature)} ({node.target})")
    graph.graph.eliminate_dead_code()
    return graph


def _named(written: Any, places: list[fx.Node], signature: Signature) -> str:
    """An operand of the body, in words."""
    index = places.index(written) if written in places else -1
    if index < 0:
        return "a tensor that it was given"
    first = len(signature.inputs)
    return f"its input {index}" if index < first else f"shared operand {signature.shared[index - first].name}"


def mutates(node: fx.Node) -> bool:
    """Whether the node writes to memory (squeezing in place moves nothing)."""
    if node.target in (aten.squeeze_.dim, aten.squeeze_.dims):
        return False
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable
