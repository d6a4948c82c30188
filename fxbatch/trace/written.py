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
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.errors import InPlaceError, TraceError
from fxbatch.torch_private import storage_users, tree_flatten, tree_leaves, tree_map, tree_unflatten
from fxbatch.trace.foreign import is_foreign
from fxbatch.trace.location import at_line, user_frame
from fxbatch.trace.values import Value, set_attribute

if TYPE_CHECKING:
    from fxbatch.trace.record import Recorder

_RECORD = "_fxbatch_written"


@dataclass(eq=False)
class Written:
    """A tensor that was written to: what it stands for, and what it was."""

    recorder: Recorder
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
    record: Written = vars(t)[_RECORD]
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


def becomes_value(recorder: Recorder, t: torch.Tensor, value: Value, name: str) -> Value:
    """A real tensor that is about to be written to stands for a value from here on; `value` is its content until now.

    InPlaceError where something else shares its memory.
    """
    reason = _why_not(t)
    if not reason and t.is_leaf and t.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if not reason:
        stand_in: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            WrittenTensor, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
        )
        stand_in.__class__ = torch.Tensor
        try:
            torch.utils.swap_tensors(t, stand_in)
        except RuntimeError:
            reason = "a view of it, or the graph of its gradient, holds its memory"
    if reason:
        raise InPlaceError(
            f"{name} writes a value into a tensor {tuple(t.shape)} that has to stay as it is: {reason}. Write to a "
            f"clone() of it, or build the result with torch.stack or torch.cat{at_line()}"
        )
    before = stand_in  # the two have changed places
    t.__class__ = WrittenTensor
    _replace(recorder, t, before)
    found = Written(recorder, t, before, recorder.value(value._value, value._type), recorder.running)
    vars(t)[_RECORD] = found
    recorder.written[id(t)] = found
    return found.value


def _why_not(t: torch.Tensor) -> str:
    """Why a tensor can't stand for a value; "" where it can."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_inference():
        return f"it is a {type(t).__name__} of its own kind"
    if is_foreign(t):
        return "numpy or another process shares its memory"
    if t._base is not None:
        return "it is a view of another tensor"
    if weakref.getweakrefcount(t):
        return "something refers to it weakly"
    if storage_users(t) > 1:
        return "another tensor shares its memory"
    return ""


def _replace(recorder: Recorder, t: torch.Tensor, before: torch.Tensor) -> None:
    """What was recorded of the tensor until now is of what it was."""
    known = recorder.constants.pop(id(t), None)
    if known is None:
        return
    v, _, version = known
    kept = recorder.constants[id(before)] = v, before, version
    recorder.unchecked[:] = [kept if x is known else x for x in recorder.unchecked]
    entry = recorder.constant_entries[before.shape, before.dtype, before.device]
    for payload in (*recorder.ran, recorder.payload):
        if entry.sid in payload:
            payload[entry.sid][:] = [before if x is t else x for x in payload[entry.sid]]


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


def finish_written(recorder: Recorder, contents: Sequence[torch.Tensor] | None) -> None:
    """The call is over: all tensors that were written to are plain again, with these contents (None: as before)."""
    found = list(recorder.written.values())
    recorder.written.clear()
    for i, written in enumerate(found):
        written.give_back(None if contents is None else contents[i])
