"""Reasons why minibatches run the plain loop: each is noted, and warned of once, with the user's line.

In: the errors of recordings; what is active around a call. Out: why minibatches run the loop, "" where they may be
batched.

    refusals = Refusals()
    refusals.add("BatchNorm1d in training would mix instances (model.py:12)", training=True)
    refusals.reason(training=True)       # that, for minibatches with gradients as this one; "" in evaluation
    surroundings()                       # "a torch function mode (Doubling) is active around the call"

Where batching is asked for (`adaptive=False`) the same is an error, in each call.
"""

from __future__ import annotations

import torch

from fxbatch.torch_private import (
    dispatch_mode_count,
    function_mode_count,
    function_modes,
    has_global_hooks,
    inside_functorch,
)


class Refusals:
    """Why minibatches of one callable can't be batched: noticed in one, and true for all after it."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[bool, bool], str] = {}  # by whether with gradients, and in training
        self._said: set[str] = set()  # only looked up

    def add(self, reason: str, *, training: bool) -> None:
        """Minibatches with gradients (or without) as now, of a model in this mode, run the loop from here on."""
        self._reasons[torch.is_grad_enabled(), training] = reason

    def reason(self, *, training: bool) -> str:
        """Why a minibatch of now runs the loop."""
        return self._reasons.get((torch.is_grad_enabled(), training), "") if self._reasons else ""

    def is_new(self, reason: str) -> bool:
        """Whether this was not said before; it is said now."""
        was_said = reason in self._said
        self._said.add(reason)
        return not was_said


def unheard_mode() -> str:
    """Why recorded calls would be others than the loop's, as what is active around this call does not meet them, or
    meets batched kernels."""
    if dispatch_mode_count():
        return "a torch dispatch mode (FlopCounterMode and its like) is active around the call"
    if has_global_hooks():
        return "hooks on all modules (torch.nn.modules.module.register_module_forward_hook) are called for each module"
    for mode in function_modes() if function_mode_count() else ():
        if not _is_torchs(mode):
            return f"a torch function mode ({type(mode).__name__}) is active around the call"
    return ""


def surroundings() -> str:
    """Why the loop runs here, whatever the forward does: `unheard_mode`, and transforms of torch.func, which can't go
    through a compiled backward."""
    return "the call is inside a torch.func transform" if inside_functorch() else unheard_mode()


def _is_torchs(mode: object) -> bool:
    return type(mode).__module__.partition(".")[0] == "torch"
