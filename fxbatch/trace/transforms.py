"""torch.func inside a forward: `functional_call` is one operation, transforms of values are refused.

In: calls of torch.func while a minibatch is recorded. Out: entries for `patched()`, which puts them into torch.

    functional_call(module, {"weight": value}, (x,))     # recorded: the weights are inputs of the operation
    torch.func.grad(energy)(value)                       # TraceError: it would see a tensor without content

Without this, both gave wrong results and no error: a transform wraps what a Value is for C++, an empty tensor, and
a module that is called with other weights for the moment would have been recorded with its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import functorch_transforms, functorch_vmap, stateless, tree_leaves
from fxbatch.trace.calls import examined_function
from fxbatch.trace.operations import Functional
from fxbatch.trace.state import state
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value

_functional_call = stateless._functional_call


def _traced_functional_call(
    module: torch.nn.Module,
    parameters_and_buffers: dict[str, torch.Tensor],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Recorded as one function of all of the module's tensors: those that are given, and its own."""
    recorder = state.recorder
    if recorder is None:
        return _functional_call(
            module, parameters_and_buffers, args, kwargs, tie_weights=tie_weights, strict=strict
        )
    parts = list(module.modules())
    if any(m._forward_hooks or m._forward_pre_hooks for m in parts):
        raise TraceError(f"functional_call of a {type(module).__name__} with hooks{at_line()}")
    args = () if args is None else args if isinstance(args, tuple) else (args,)
    tensors = _all_tensors(module, parameters_and_buffers, tie_weights and not strict)
    examined = examined_function(recorder, module)
    function = Functional(module, tuple(m.training for m in parts), tie_weights, examined.state, examined)
    return recorder.call(function, (tensors, args, kwargs or {}), {})


def _all_tensors(
    module: torch.nn.Module, given: dict[str, torch.Tensor], tied: bool
) -> dict[str, torch.Tensor]:
    """The given tensors, and the module's own for the names that are not given (nor tied to one that is)."""
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    replaced = {id(own[name]) for name in given if name in own} if tied else set()
    rest = {name: t for name, t in own.items() if name not in given and id(t) not in replaced}
    return {**given, **rest}


def _refusing(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A transform's function that wraps a tensor, or takes what was computed out again: a Value is neither."""

    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is Value and state.recorder is not None:
            raise TraceError(
                "a torch.func transform (grad, vmap, ...) met a value: call it inside a submodule, or in a "
                f"function with @fxbatch.operation{at_line()}"
            )
        return wrap(x, *args, **kwargs)

    return functools.wraps(wrap)(wrapped)


_backward = torch.autograd.backward


def _traced_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if state.recorder is not None and any(type(x) is Value for x in tree_leaves(tensors)):
        raise TraceError(f"backward() inside a per-instance forward: call it on the results{at_line()}")
    return _backward(tensors, *args, **kwargs)


_cond = torch.cond


def _traced_cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """The branch that the value chooses: the instance waits for it, as at an `if`."""
    if state.recorder is None:
        return _cond(pred, true_fn, false_fn, operands)
    return true_fn(*operands) if pred else false_fn(*operands)


TRANSFORMS: tuple[tuple[Any, str, Any], ...] = (
    (stateless, "_functional_call", _traced_functional_call),
    (
        functorch_transforms,
        "_wrap_tensor_for_grad",
        _refusing(functorch_transforms._wrap_tensor_for_grad),
    ),
    (functorch_vmap, "_add_batch_dim", _refusing(functorch_vmap._add_batch_dim)),
    (functorch_vmap, "_remove_batch_dim", _refusing(functorch_vmap._remove_batch_dim)),
    (torch, "cond", functools.wraps(_cond)(_traced_cond)),
    (torch.autograd, "backward", functools.wraps(_backward)(_traced_backward)),
)
