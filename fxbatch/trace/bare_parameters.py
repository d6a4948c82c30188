"""Functions of bare parameters are heard of while a forward is recorded: `self.weight @ row`, `self.table[word]`.

A function is recorded when it meets a value, and what modules give are values. Where a forward uses parameters by
themselves and is given plain tensors, nothing would ever be a value. So, while users' code runs, parameters are of a
class with a `__torch_function__`:

    recorder.heard.begin()
    weight @ row                # recorded: row is the instance's own; the weight is a shared operand
    table[3]                    # recorded: a row, looked up with those of other instances
    weight.t() @ row            # recorded: a view of a parameter is heard of as well
    weight.exp(), weight.shape  # run as they are: no tensor of an instance is in them
    recorder.heard.end()

Objects keep their identity, and are plain parameters again where fxbatch itself computes, so in each phase.

Compiled by Cython (see uncompiled.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class BareParameter(torch.nn.Parameter):
    """A parameter while users' code runs that is recorded. Its `__torch_function__`: `arguments`."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        copied = super().__deepcopy__(memo)
        copied.__class__ = torch.nn.Parameter
        return copied


class BareView(torch.Tensor):
    """A view of a bare parameter."""


BARE = (BareParameter, BareView)
VIEW_KEY = "_fxbatch_view"  # what a call that was met before is compared by, in C


class Heard:
    """The bare parameters of a recording: of class BareParameter between `begin` and `end`."""

    __slots__ = ("again", "changed", "computed", "parameters", "views")

    def __init__(self) -> None:
        self.parameters: Sequence[torch.nn.Parameter] = ()
        self.computed = False  # whether tensors were computed of parameters alone
        self.again: dict[object, torch.Tensor] = {}  # views by what was asked
        self.changed: list[torch.nn.Parameter] = []  # by this recording: another thread's may be at it too
        self.views: list[torch.Tensor] = []

    def forget(self) -> None:
        """Parameters may be others than they were."""
        self.again = {}

    def begin(self) -> None:
        """Users' code runs from here on."""
        self.forget()
        for p in self.parameters:
            if type(p) is torch.nn.Parameter:
                p.__class__ = BareParameter
                self.changed.append(p)

    def end(self) -> None:
        """Computation runs from here on."""
        for p in self.changed:
            p.__class__ = torch.nn.Parameter
        self.changed.clear()

    def close(self) -> None:
        """No more code of users runs."""
        self.end()
        for view in self.views:
            view.__class__ = torch.Tensor
            vars(view).pop(VIEW_KEY, None)
        self.views.clear()


@contextlib.contextmanager
def unheard(recorder: Any) -> Iterator[None]:
    """While inside, parameters are plain."""
    recorder.heard.end()
    try:
        yield
    finally:
        recorder.heard.begin()


def bare_parameters(modules: Iterable[torch.nn.Module]) -> tuple[torch.nn.Parameter, ...]:
    """The parameters of these modules: users' code may read `self.linear.weight` as well as its own."""
    return tuple(p for m in modules for p in m._parameters.values() if type(p) is torch.nn.Parameter)
