"""Tests that only raise where they fail, for which no instance waits: they are looked at once for all.

    assert not torch.isnan(h).any()
    Categorical(probs=p)     # `if not valid.all(): raise ValueError(...)`, in torch's code, of the p of each instance

Such a test is taken to pass, and what it asked is read as soon as it was computed, at the latest when the minibatch is
over. Where one fails, or anything else does in between, the minibatch is recorded anew with waits: the error is the one
that the plain loop gives. Code of users that raises otherwise may end a loop so: it is waited for.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

import numpy as np
import torch

from fxbatch.caches import cached
from fxbatch.errors import TraceError
from fxbatch.signature import Numbers
from fxbatch.trace.values import Value

_TORCH = os.path.dirname(torch.__file__)
_MOST = 4096  # tests that are taken to pass before they are looked at: code may go on until one fails


class AssumptionError(TraceError):
    """A test that was taken to pass does not, or something failed before it was looked at."""

    def __init__(self) -> None:
        super().__init__("a test was taken to pass, which may not")


class Assumed:
    """The tests of one recording that were taken to pass."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.answers: list[bool] = []  # what they were taken to be

    def answer(self, v: Value, caller: FrameType) -> bool | None:
        """What a value is taken to be that this code asks for; None where it is to be waited for."""
        answer = _passes(caller.f_code, caller.f_lasti)
        if answer is None or v.numel() != 1 or len(self.values) >= _MOST:
            return None
        self.values.append(v)
        self.answers.append(answer)
        return answer

    def with_values(self, others: np.ndarray) -> np.ndarray:
        """Distinct ids of these and of other values, others first."""
        mine = [v.id for v in self.values]
        return np.array(list(dict.fromkeys([*others.tolist(), *mine])), dtype=np.int64) if mine else others

    def verify(self, numbers: Callable[[Sequence[int]], Sequence[Numbers]]) -> None:
        """AssumptionError where one fails. numbers: gives those of values, all of which have run."""
        read = numbers([v.id for v in self.values])
        answers, self.values, self.answers = self.answers, [], []
        for number, answer in zip(read, answers, strict=True):
            while type(number) is list:
                (number,) = number
            if bool(number) is not answer:
                raise AssumptionError


@cached("tests that only raise")
def _passes(code: CodeType, instruction: int) -> bool | None:
    """What the jump at this instruction must be given not to come where code only raises: in an `assert`, or in torch's
    own code. None for others."""
    after = [x for x in dis.get_instructions(code) if x.offset >= instruction]
    jump = next(x for x in after if x.opname not in ("TO_BOOL", "CACHE"))
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    goes_on = jump.opname.endswith("IF_TRUE")
    in_torch = code.co_filename.startswith(_TORCH)
    if _only_raises([x for x in after if x.offset > jump.offset], in_torch):
        return goes_on
    return not goes_on if _only_raises([x for x in after if x.offset >= jump.argval], in_torch) else None


def _only_raises(instructions: Sequence[dis.Instruction], in_torch: bool) -> bool:
    """Whether these raise, without a jump before."""
    for x in instructions:
        if x.opname == "LOAD_ASSERTION_ERROR" or (in_torch and x.opname == "RAISE_VARARGS"):
            return True
        if x.opcode in dis.hasjrel or x.opcode in dis.hasjabs or x.opname.startswith("RETURN"):
            return False
    return False
