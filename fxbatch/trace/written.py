"""Real tensors that a forward writes values into: from the write on they stand for values, until the call is over.

In: a write of a value to a tensor that the forward made or was given (`t += h`, `buffer[i] = h`). Out: the same object
as a WrittenTensor, whose uses are recorded; at the end of the call it is a plain tensor again, with its content.

    total = torch.zeros(())
    for word in words:
        total += self.loss(word)        # from here on `total` is a WrittenTensor

Its memory is taken away meanwhile, so that nothing reads the old numbers. That takes a tensor with which nothing else
shares memory; else the write is refused.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from fxbatch.trace.instances import Instances
from fxbatch.trace.user_line import at_line, user_frame
from fxbatch.trace.values import Value, set_attribute

RECORD = "_fxbatch_written"


class Runs(Protocol):
    """What a written tensor asks of the recorder."""

    running: int  # the instance whose code runs
    waiting: Instances | None


@dataclass(eq=False)
class Written:
    """A tensor that was written to: what it stands for, and what it was."""

    recorder: Runs
    tensor: torch.Tensor  # the user's object
    before: torch.Tensor  # what it was, with its memory
    value: Value
    instance: int  # who used it last

    def used(self) -> Value:
        """Its value, for the instance that runs; TraceError where instances would see each other's."""
        running = self.recorder.running
        if self.instance != running:
            if self.recorder.waiting is not None:
                raise TraceError(
                    "a tensor that several instances share is written to, and one of them waits for a value, so that "
                    f"others run before it has read or written: make it in the forward{at_line()}"
                )
            self.instance = running
        return self.value

    def give_back(self, content: torch.Tensor | None) -> None:
        """Make the user's object a plain tensor: with this content, or None: as it was."""
        new = self.before
        if content is not None:
            new = content.clone()
            vars(new).update(vars(self.before))
        self.tensor.__class__ = torch.Tensor
        torch.utils.swap_tensors(self.tensor, new)


class WrittenTensor(torch.Tensor):
    """What a user's tensor is between a write of a value to it and the end of the call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__hash__":
            return object.__hash__(args[0])
        pairs = [(x, value_of(x)) for x in tree_leaves((args, kwargs or {})) if type(x) is WrittenTensor]
        args, kwargs = with_values(tuple(args), kwargs or {})
        if name == "__get__":
            return getattr(args[0], _attribute(func))
        if name in ("__set__", "__delete__"):
            return set_attribute(func, args)
        own = Value.__dict__.get(name) if getattr(torch.Tensor, name, None) is func else None
        result = func(*args, **kwargs) if own is None else own(*args, **kwargs)
        return next((x for x, v in pairs if result is v), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TraceError(
            f"{func} met a tensor that a value was written to inside C++, where it has no content yet: use Python's "
            f"torch functions there{at_line()}"
        )


def _attribute(asked: Any) -> str:
    """The name of the attribute that a `__get__` asks for: of a property, of what that calls, of an attribute of C."""
    while getattr(asked, "__name__", "__get__") == "__get__":
        asked = asked.fget if isinstance(asked, property) else asked.__self__
    return str(asked.__name__)


def value_of(t: torch.Tensor) -> Value:
    """What a WrittenTensor stands for."""
    record: Written = vars(t)[RECORD]
    return record.used()


def with_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with values in place of WrittenTensors."""
    leaves, spec = tree_flatten((args, kwargs))
    given: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(
        [value_of(x) if type(x) is WrittenTensor else x for x in leaves], spec
    )
    return given


def result_with_values(result: Any) -> Any:
    """An instance's result with values in place of WrittenTensors."""
    return tree_map(lambda x: value_of(x) if type(x) is WrittenTensor else x, result)


# What follows the addition in `t[i] += h` and `x.t += h`.
_STORES = ("STORE_SUBSCR", "STORE_ATTR")


def stored_next() -> bool:
    """Whether the user's code is at an augmented assignment to an item, which stores the result where it read it."""
    frame = user_frame()
    return frame is not None and _after(frame.f_code, frame.f_lasti) in _STORES


@functools.lru_cache(maxsize=4096)
def _after(code: CodeType, at: int) -> str:
    """The name of the first instruction after an augmented assignment's operator that is no shuffling of the stack."""
    steps: Sequence[dis.Instruction] = list(dis.get_instructions(code))
    k = next((k for k, i in enumerate(steps) if i.offset == at), -1)
    if k < 0 or steps[k].opname != "BINARY_OP" or "=" not in steps[k].argrepr:
        return ""
    return next((i.opname for i in steps[k + 1 :] if i.opname not in ("SWAP", "CACHE")), "")
