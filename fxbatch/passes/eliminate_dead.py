"""Program -> Program without the calls that no result needs.

    v1 = s1 f(v0)                     v1 = s1 f(v0)
    v2 = s2 g(v0)          ==>        return v1
    return v1

Random calls stay even when nobody reads them, and so does what they read: without them, later calls would
draw other numbers from the same seed.
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program
from fxbatch.passes.frontier import source_calls
from fxbatch.passes.native import Native
from fxbatch.passes.select_calls import select_calls


def eliminate_dead(program: Program) -> Program:
    """The program without dead calls; the same object when there are none."""
    stays = program.columns.random
    if Native.loops is not None:
        live = np.empty(len(program), dtype=bool)
        columns = (program.sig, program.width, program.arity, program.inputs, program.outputs)
        dead = Native.loops.live(*columns, stays, live, program.known)
        return select_calls(program, live) if dead else program
    live = stays[program.sig]
    made = program.outputs[program.outputs >= program.known]
    live[np.searchsorted(program.first_value, made, side="right") - 1] = True
    source = source_calls(program)
    read = live.copy()
    read[source[source >= 0] if program.known else source] = True
    if read.all():
        return program  # every call is read by some other, so every one leads to a result
    edge = source >= 0
    source, reader = source[edge], program.reader[edge]
    alive = live.tolist()
    for before, after in zip(source[::-1].tolist(), reader[::-1].tolist(), strict=True):
        if alive[after]:
            alive[before] = True
    return select_calls(program, np.array(alive, dtype=bool))
