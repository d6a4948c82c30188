"""Run an operation's body once on fake tensors, to learn what it gives and what it does.

In: a body and the types of its inputs. Out: an BodyRun (output types, result pytree, aliases, writes,
randomness), or the exception that says why the body can't be run without values.

    outcome = run_on_fakes(lambda inputs, shared: torch.add(*inputs), (f32_3, f32_3), ())
    outcome.outputs      # (f32[3],)
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fxbatch.ir import Slot, Template, TensorSpec
from fxbatch.torch_fakes import FakeMode, no_collections
from fxbatch.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    QuietDispatchMode,
    UnsupportedOperatorException,
    is_wrapped,
    outside_functorch,
    tree_flatten,
    without_saved_tensor_hooks,
)
from fxbatch.trace.operations import named_functions, on_views

# What a body raises on fake tensors when it needs values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


_NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
_LOG = logging.getLogger(FakeMode.__mro__[1].__module__)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class BodyError(Exception):
    """The body can't be an operation; the message is the reason."""


@dataclass(frozen=True)
class BodyRun:
    """What one run of a body on fake tensors told."""

    outputs: tuple[TensorSpec, ...]
    result: Template  # output slots where the tensors are
    gradients: tuple[bool, ...]  # per output: whether it would carry a gradient to differentiable inputs
    aliases: tuple[int, ...]  # per output: the input whose memory it shares, -1 for none
    same: tuple[int, ...]  # per output: the input that it is, -1 for none
    written: tuple[int, ...] = ()  # inputs that the body writes to
    reshaped: bool = False  # the body changes the shape of an input
    written_shared: tuple[int, ...] = ()  # shared operands that the body writes to
    random: bool = False  # draws torch random numbers

    def detaches(self, inputs: Sequence[TensorSpec]) -> bool:
        """Whether gradients could go through by the types, and don't."""
        through = any(t.differentiable for t in inputs) and any(t.differentiable for t in self.outputs)
        return through and not any(self.gradients)


class _RandomWatch(QuietDispatchMode):
    """Sees whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = True
        return self.call(func, args, kwargs)


# What a tensor is besides its type and content: the fakes here don't say it as the real ones will.
_OF_MEMORY = named_functions(
    "stride storage_offset is_contiguous dim_order data_ptr const_data_ptr as_strided as_strided_ as_strided_copy "
    "as_strided_scatter storage untyped_storage set_ is_set_to is_shared is_pinned is_conj is_neg is_inference _is_view"
) | {getattr(torch.Tensor, name).__get__ for name in ("_version", "_base", "_cdata", "output_nr")}


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _has_steps(x: Any, *rest: Any) -> bool:
    """Whether a recurrent layer is given several steps; the fourth argument of a packed sequence is its weights."""
    return len(rest) == 8 and type(rest[2]) is bool and x.dim() == 3 and x.shape[rest[-1]] > 1


def _by_one_step(layer: Any, x: torch.Tensor, *rest: Any) -> Any:
    """A recurrent layer's result, of which all steps are like one: on fakes torch runs them one by one, in Python."""
    along = int(rest[-1])  # batch_first
    first, *states = layer(x.narrow(along, 0, 1), *rest)
    shape = [*first.shape[:along], x.shape[along], *first.shape[along + 1 :]]
    return (first.expand(shape).clone(), *states)


class _MemoryWatch(TorchFunctionMode):
    """Refuses what the user's code asks about a tensor's memory. Torch's own code only chooses a faster way by it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RECURRENT and _has_steps(*args):
            return _by_one_step(func, *args)
        if func in _OF_MEMORY:
            asking = sys._getframe(1)
            torchs = asking.f_globals.get("__name__", "").split(".")[0] == "torch"
            if not torchs and asking.f_code is not on_views.__code__:
                name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
                raise BodyError(
                    f"{name} asks for the memory of a tensor, which batched tensors don't have one by one; clone(), "
                    "reshape() and contiguous() need not know it"
                )
        return func(*args, **(kwargs or {}))


def run_on_fakes(
    body: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any],
    inputs: Sequence[TensorSpec],
    shared: Sequence[torch.Tensor],
    *,
    grad: bool = True,
) -> BodyRun:
    """Run `body(inputs, shared)` on fake tensors under the modes that are on.

    Raises what the body raises; BodyError when it draws Python or numpy random numbers or returns objects.
    """
    with without_saved_tensor_hooks(), no_collections(), outside_functorch():
        try:
            return _run_on_fakes(body, inputs, shared, grad=grad, differentiable=True)
        except RuntimeError as error:
            if _NOT_DIFFERENTIABLE not in str(error):
                raise
        # An argument that takes no gradients (`running_mean`): whether this one needs one is not known here.
        outcome = _run_on_fakes(body, inputs, shared, grad=grad, differentiable=False)
        return replace(outcome, gradients=tuple(t.differentiable for t in outcome.outputs))


def _run_on_fakes(
    body: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any],
    inputs: Sequence[TensorSpec],
    shared: Sequence[torch.Tensor],
    *,
    grad: bool,
    differentiable: bool,
) -> BodyRun:
    watch = _RandomWatch()
    with torch.inference_mode(False), FakeMode() as mode, torch.set_grad_enabled(grad):
        fakes = [_fake(t, differentiable) for t in inputs]
        fake_shared = [_fake_shared(mode, s) for s in shared]
        before = [f._version for f in fakes]
        shared_before = [f._version for f in fake_shared]
        states = _python_random_states()
        quiet, _LOG.disabled = _LOG.disabled, True  # what fails here fails again for the user, or is handled
        try:
            with watch, _MemoryWatch():
                result = body(list(fakes), fake_shared)
        finally:
            _LOG.disabled = quiet
            drew = _restore_python_random(states)
        if drew:
            raise BodyError("draws Python or numpy random numbers")
        return _outcome(result, inputs, fakes, list(fake_shared), before, shared_before, watch.random)


def _fake(t: TensorSpec, differentiable: bool) -> torch.Tensor:
    grad = differentiable and t.differentiable
    return torch.empty(t.shape, dtype=t.dtype, device=t.device, requires_grad=grad).clone()


def _fake_shared(mode: FakeMode, s: torch.Tensor) -> torch.Tensor:
    if not is_wrapped(s):
        found: torch.Tensor = mode.from_tensor(s)
        return found
    return torch.empty(s.shape, dtype=s.dtype, device=s.device, requires_grad=s.requires_grad)


def _outcome(
    result: Any,
    types: Sequence[TensorSpec],
    fakes: list[torch.Tensor],
    fake_shared: list[torch.Tensor],
    before: list[int],
    shared_before: list[int],
    drew_random: bool,
) -> BodyRun:
    leaves, spec = tree_flatten(result)
    storages = {f.untyped_storage()._cdata: i for i, f in reversed(list(enumerate(fakes)))}
    outputs: list[TensorSpec] = []
    aliases: list[int] = []
    same: list[int] = []
    gradients: list[bool] = []
    slots: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise BodyError(f"gives a {leaf.layout} tensor")
            slots.append(Slot("output", len(outputs)))
            outputs.append(TensorSpec.of(leaf))
            aliases.append(storages.get(leaf.untyped_storage()._cdata, -1))
            same.append(next((i for i, f in enumerate(fakes) if f is leaf), -1))
            gradients.append(leaf.requires_grad)
        elif leaf is None or isinstance(leaf, _PLAIN):
            slots.append(leaf)
        else:
            raise BodyError(f"returns a {type(leaf).__name__}")
    reshaped = [i for i, f in enumerate(fakes) if TensorSpec.of(f) != types[i]]
    return BodyRun(
        outputs=tuple(outputs),
        result=Template(tuple(slots), spec),
        aliases=tuple(aliases),
        same=tuple(same),
        written=tuple(i for i, f in enumerate(fakes) if f._version != before[i] or i in reshaped),
        reshaped=bool(reshaped),
        written_shared=tuple(i for i, f in enumerate(fake_shared) if f._version != shared_before[i]),
        random=drew_random,
        gradients=tuple(gradients),
    )


def _python_random_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from it


def _restore_python_random(states: tuple[Any, Any]) -> bool:
    """Put Python's and numpy's generators back; whether either had moved."""
    moved = random.getstate() != states[0]
    name, keys, position, *rest = np.random.get_state()  # noqa: NPY002 - users draw from it
    old_name, old_keys, old_position, *old_rest = states[1]
    moved |= (name, position, rest) != (old_name, old_position, old_rest) or not np.array_equal(
        keys, old_keys
    )
    if moved:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - users draw from it
    return moved
