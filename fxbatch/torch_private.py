"""The only module that imports private torch APIs; each line says the versions it was checked against.

`tests/test_torch_private.py` fails with a clear message when one of them moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Checked against 2.11.0 and 2.13.0: whether any autocast is on, in one call; the stacks of modes of a thread.
from torch._C import (
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled,
)

# Checked against 2.11.0 and 2.13.0.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# Checked against 2.11.0 and 2.13.0: the base class of BatchNorm and InstanceNorm.
from torch.nn.modules.batchnorm import _NormBase as NormBase

# Checked against 2.11.0 and 2.13.0: what torch.func.functional_call does around the call.
from torch.nn.utils.stateless import _reparametrize_module as reparametrized

# Checked against 2.11.0 and 2.13.0.
from torch.utils._python_dispatch import TorchDispatchMode

# Checked against 2.11.0 and 2.13.0: flattening of nested containers, as torch.vmap does it.
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten


def backward_keeps_graph() -> bool:
    """Whether the backward pass under way was asked to retain the graph. Checked: 2.11.0, 2.13.0."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def direct_call(overload: Any) -> Any:
    """The C++ function behind an OpOverload: 0.4-0.7 us a call cheaper. Checked: 2.11.0, 2.13.0."""
    return overload._op


@contextlib.contextmanager
def no_vmap_fallback() -> Iterator[None]:
    """An operation without a batching rule raises, in place of a loop over rows. Checked: 2.11.0, 2.13.0."""
    functorch: Any = torch._C._functorch  # torch's own types lack these two
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def inside_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) is active. Checked: 2.11.0, 2.13.0."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_pytree_node(kind: type) -> bool:
    """Whether tree_flatten takes objects of this type apart."""
    return kind in SUPPORTED_NODES


def swap_function_modes(modes: list[Any]) -> list[Any]:
    """Replace this thread's torch function modes by `modes`; returns what was there, bottom first."""
    before = [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]
    if before != modes:
        for _ in before:
            _pop_torch_function_stack()
        for mode in modes:
            _push_on_torch_function_stack(mode)
    return before


# The cheap form for hot paths: a C function, no Python frame.
any_autocast = _is_any_autocast_enabled
set_grad_enabled = _set_grad_enabled
module_call = torch.nn.Module._wrapped_call_impl

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "any_autocast",
    "module_call",
    "reparametrized",
    "set_grad_enabled",
    "swap_function_modes",
    "TreeSpec",
    "backward_keeps_graph",
    "direct_call",
    "inside_functorch",
    "is_pytree_node",
    "no_vmap_fallback",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
