"""Tests that only raise where they fail, for which no instance waits: they are looked at once for all.

    assert not torch.isnan(h).any()
    Categorical(probs=p)     # `if not valid.all(): raise ValueError(...)`, in torch's code, of the p of each instance

Such a test is taken to pass, and what it asked is read as soon as it was computed, at the latest when the minibatch is
over. Where one fails the call raises: what the minibatch raises that is recorded anew with waits, else an error of the
same class, without its text. Code of users that raises otherwise may end a loop so, and within a `try` it may go on:
these are waited for.
"""

from __future__ import annotations

import builtins
import dis
import os
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import numpy as np
import torch

from fxbatch.caches import cached
from fxbatch.errors import TraceError
from fxbatch.signature import Numbers
from fxbatch.trace.user_line import UserPlace, line_of, user_place
from fxbatch.trace.values import Value

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_TURNS = os.path.join(os.path.dirname(__file__), "minibatch.py")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_MOST = 4096  # tests that are taken to pass before they are looked at: code may go on until one fails


class AssumptionError(TraceError):
    """A test that was taken to pass does not (fails), or something else failed before it was looked at. error: what the
    call raises where nothing says more."""

    def __init__(self, error: Exception, *, fails: bool) -> None:
        super().__init__("a test was taken to pass, which may not")
        self.error, self.fails = error, fails


class _Test(NamedTuple):
    number: int  # of the value
    answer: bool  # what it was taken to be
    kind: type[Exception]
    instance: int
    place: UserPlace


class Assumed:
    """The tests of one recording that were taken to pass. first: the number of its first instance, in messages."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.tests: list[_Test] = []

    def answer(self, v: Value, instance: int, caller: FrameType) -> bool | None:
        """What a value is taken to be that this code asks for; None where it is to be waited for."""
        test = _test_of(caller.f_code, caller.f_lasti)
        if test is None or v.numel() != 1 or len(self.tests) >= _MOST or _may_be_caught(caller):
            return None
        self.tests.append(_Test(v.id, *test, self.first + instance, user_place()))
        return test[0]

    def with_values(self, others: np.ndarray) -> np.ndarray:
        """Distinct ids of these and of other values, others first."""
        mine = [test.number for test in self.tests]
        return np.array(list(dict.fromkeys([*others.tolist(), *mine])), dtype=np.int64) if mine else others

    def verify(self, numbers: Callable[[Sequence[int]], Sequence[Numbers]]) -> None:
        """AssumptionError where one fails. numbers: gives those of values, all of which have run."""
        tests, self.tests = self.tests, []
        for test, number in zip(tests, numbers([x.number for x in tests]), strict=True):
            while type(number) is list:
                (number,) = number
            if bool(number) is not test.answer:
                error = test.kind(
                    f"a test fails for which the instances did not wait ({line_of(test.place)})"
                )
                error.add_note(f"fxbatch: in instance {test.instance} of the minibatch")
                raise AssumptionError(error, fails=True)


def _may_be_caught(frame: FrameType | None) -> bool:
    """Whether an error in code of users that runs here, or what this calls, is in a `try` of theirs."""
    while frame is not None and frame.f_code.co_filename != _TURNS:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OURS)) and any(
            frame.f_lasti in x for x in _facts_of(code, -1)[1]
        ):
            return True
        frame = frame.f_back
    return False


def _test_of(code: CodeType, instruction: int) -> tuple[bool, type[Exception]] | None:
    """What the jump at this instruction must be given not to come where code only raises, and what that raises: in an
    `assert`, or in torch's own code. None for others."""
    return _facts_of(code, instruction)[0]


@cached("tests that only raise")
def _facts_of(
    code: CodeType, instruction: int
) -> tuple[tuple[bool, type[Exception]] | None, tuple[range, ...]]:
    """`_test_of` an instruction; for -1 where in the code an error is in a `try`."""
    instructions = list(dis.get_instructions(code))
    if instruction < 0:
        return None, _in_tries(code, instructions)
    after = [x for x in instructions if x.offset >= instruction]
    jump = next((x for x in after if x.opname not in ("TO_BOOL", "CACHE")), None)
    if (
        jump is None
        or not jump.opname.startswith("POP_JUMP")
        or not jump.opname.endswith(("IF_TRUE", "IF_FALSE"))
    ):
        return None, ()
    goes_on = jump.opname.endswith("IF_TRUE")
    in_torch = code.co_filename.startswith(_TORCH)
    for answer, first in ((goes_on, jump.offset + 1), (not goes_on, jump.argval)):
        kind = _raised([x for x in after if x.offset >= first], in_torch)
        if kind is not None:
            return (answer, kind), ()
    return None, ()


def _raised(instructions: Sequence[dis.Instruction], in_torch: bool) -> type[Exception] | None:
    """The class of what these raise, without a jump before; None where they do not."""
    kind: type[Exception] = RuntimeError
    for x in instructions:
        if x.opname == "LOAD_ASSERTION_ERROR" or (
            x.opname == "LOAD_COMMON_CONSTANT" and x.argval is AssertionError
        ):
            return AssertionError
        if x.opname == "LOAD_GLOBAL" and isinstance(named := getattr(builtins, x.argval, None), type):
            kind = named if issubclass(named, Exception) and kind is RuntimeError else kind
        if in_torch and x.opname == "RAISE_VARARGS":
            return kind
        if x.opcode in dis.hasjrel or x.opcode in dis.hasjabs or x.opname.startswith("RETURN"):
            return None
    return None


def _in_tries(code: CodeType, instructions: Sequence[dis.Instruction]) -> tuple[range, ...]:
    """Offsets from which an error comes to an `except` or a `finally`, not to a `with` alone."""
    places = {x.offset: i for i, x in enumerate(instructions)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # since Python 3.11

    def is_try(target: int, met: tuple[int, ...]) -> bool:
        handler = [x.opname for x in instructions[places[target] :][:2]]
        if handler[0] == "PUSH_EXC_INFO" and handler[1:] != ["WITH_EXCEPT_START"]:
            return True
        around = [x.target for x in entries if x.start <= target < x.end and x.target not in met]
        return bool(around) and is_try(around[0], (*met, target))

    return tuple(range(x.start, x.end) for x in entries if is_try(x.target, (x.target,)))
