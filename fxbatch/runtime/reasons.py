"""Why batching gains little on a minibatch, in lines that name the user's code and say what to write.

reasons(phases, statistics, forward)
# ["13 phases because of `float(best)` (model.py:88): all instances wait there, each time: ...",
#  "118 of 130 signatures are of add: `h = h + self.rows[tag]` (model.py:91) takes another part of a parameter each
#   time: write the index as a tensor, `table[torch.tensor(i)]`"]
recording_share(recording=0.012, step=0.02)         # "recording takes 60 % of a step"
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Sequence

from fxbatch.ir import Signature
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.forward import Phase
from fxbatch.signature import Slot
from fxbatch.trace.minibatch import Statistics
from fxbatch.trace.user_line import line_of, source_of

MANY_PHASES = 8  # from which on phases are a reason
MANY_SIGNATURES = 8  # of one operation on one line
LARGE_SHARE = 0.3  # of a step, from which on recording is one


def reasons(
    phases: Sequence[Phase], statistics: Statistics | None, forward: Callable[..., object] | None
) -> list[str]:
    """A line about phases and one about signatures, where there are many. forward: the user's, whose file is read."""
    lines = []
    if len(phases) >= MANY_PHASES and statistics is not None:
        place = statistics.asked_most
        text = source_of(place)
        where = f"`{text}` ({line_of(place)})" if text else line_of(place)
        hint = (
            statistics.hint()
            or "all instances wait there, each time: ask for several values at once, or later"
        )
        lines.append(f"{len(phases)} phases because of {where}: {hint}")
    groups: dict[tuple[str, str], dict[Signature, None]] = {}
    for phase in phases:
        for s in dict.fromkeys(phase.plan.step_signature.tolist()):
            signature = phase.program.signatures[s]
            if signature.location and not is_constant(signature):
                groups.setdefault((signature.name, signature.location), {})[signature] = None
    largest = max(groups, key=lambda key: len(groups[key]), default=("", ""))
    signatures = list(groups.get(largest, ()))
    if len(signatures) >= MANY_SIGNATURES:
        every = sum(map(len, groups.values()))
        text = _line_text(largest[1], forward)
        where = f"`{text}` ({largest[1]})" if text else largest[1]
        lines.append(
            f"{len(signatures)} of {every} signatures are of {largest[0]}: {where} {_advice(signatures)}"
        )
    return lines


def recording_share(*, recording: float, step: float) -> str:
    """A line about what recording takes of a step's seconds, "" where that is little."""
    share = recording / step if step > 0 else 0.0
    return f"recording takes {100 * share:.0f} % of a step" if share >= LARGE_SHARE else ""


def _advice(signatures: Sequence[Signature]) -> str:
    """In words: how the signatures of one operation on one line differ, and what to write instead."""
    half = len(signatures) // 2
    if len({tuple(t.shape for t in s.inputs) for s in signatures}) > half:
        return "meets another shape each time: tensors of sizes of their own batch as docs/sizes.md says"
    leaves = [() if s.arguments is None else s.arguments.leaves for s in signatures]
    static = [tuple(repr(x) for x in each if type(x) is not Slot) for each in leaves]
    if len(set(static)) > half:
        if any(callable(x) for each in leaves for x in each):
            return "takes another part of a parameter each time: write the index as a tensor, `table[torch.tensor(i)]`"
        return "is given another number each time: give it as a tensor"
    if len({tuple(map(id, s.shared)) for s in signatures}) > half:
        return "uses another parameter each time: stack them, and choose a row by a tensor"
    return "differs each time"


def _line_text(location: str, forward: Callable[..., object] | None) -> str:
    """The text of a line of the file that `forward` is in, "" for another file."""
    path = getattr(getattr(forward, "__code__", None), "co_filename", "")
    name, _, number = location.rpartition(":")
    return linecache.getline(path, int(number)).strip() if name and os.path.basename(path) == name else ""
