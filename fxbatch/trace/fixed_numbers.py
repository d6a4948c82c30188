"""Lifted numbers that turn out to be one number: put it back into the operation.

In: the columns of a phase. Out: the columns with, for each lifted signature whose number was the same in
every
call that the table has seen, the signature with the number fixed (`h * 0.5`, `1 - z`, `h[0]`).

    mul(h, n) with n = 0.5 in all calls   =>   mul(h; 0.5)
    mul(h, n) with n = 0.5 and 0.7        =>   unchanged: one batch
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fxbatch.trace.keys import static_key
from fxbatch.trace.table import SignatureTable

_VARIED = object()


def fix_uniform_numbers(
    table: SignatureTable,
    sig: np.ndarray,
    inputs: np.ndarray,
    lifted_here: Iterable[int],
    numbers: Mapping[int, Any],
    base: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The signature and input columns with uniform numbers fixed; value ids stay.

    lifted_here: the lifted signatures of the phase; numbers: those of lifted values, which are counted from `base`.
    """
    arity = table.arity()[sig]
    first = arity.cumsum() - arity
    keep = np.ones(len(inputs), dtype=bool)
    changed = sig.copy()
    for sid in lifted_here:
        rows = (sig == sid).nonzero()[0]
        lifted = table.lifted[sid]
        places = first[rows] + lifted.position
        used = inputs[places]
        number = numbers[int(used[0]) + base]
        if not _stays_uniform(table.uniform, sid, number, bool((used == used[0]).all())):
            continue
        changed[rows] = lifted.fixed(number).sid
        keep[places] = False
    if keep.all():
        return sig, inputs
    return changed, inputs[keep]


def _stays_uniform(uniform: dict[int, Any], sid: int, number: Any, same: bool) -> bool:
    key = static_key(number) if same else _VARIED
    before = uniform.setdefault(sid, key)
    if before is not _VARIED and before != key:
        uniform[sid] = _VARIED
    return uniform[sid] is not _VARIED
