"""No schedule has fewer steps than this: a signature, the longest chain of its calls on any path.

Comes in: a Program. Goes out: how many steps at least, in all or a signature.

    lower_bound(program)               # int
    longest_chains(program)            # int64 [signatures]
    len(schedule) / lower_bound(program)

Calls of one signature on one path can't share a step, so a signature needs as many steps as its longest
chain; steps of different signatures are different steps. Constants need one step a signature.
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import Program
from fxbatch.passes.frontier import Frontier, peaks, stable_argsort
from fxbatch.passes.native import Native
from fxbatch.passes.survey import survey


def lower_bound(program: Program) -> int:
    """Steps that any schedule of the program has at least, constants included."""
    return int(longest_chains(program).sum())


def longest_chains(program: Program) -> np.ndarray:
    """int64 [signatures]: the most calls of each signature on one path; 1 where it only occurs."""
    frontier = Frontier(program)
    return peaks(program.sig, chain_below(frontier), len(program.signatures))


def chain_below(frontier: Frontier) -> np.ndarray:
    """int32 [calls]: calls of its own signature on the longest chain from each call on, itself included.

    All calls between two calls of one signature belong to its strongly connected component of the
    signature graph, so only edges inside components count, and the first signatures of all components
    are followed together, then the second ones, and so on. In most programs a component is one signature.
    """
    sig = frontier.program.sig
    component, column, size = survey(frontier.program).graph.components
    edges = np.flatnonzero(component[sig[frontier.source]] == component[sig[frontier.target]])
    out = np.ones(frontier.calls, dtype=np.int32)
    for number in range(int(size.max(initial=0))):
        inside = edges if number == 0 else edges[(size > number)[sig[frontier.source[edges]]]]
        counted = (column == number)[sig]
        chains = longest_chain(frontier, inside, counted)
        out[counted] = chains[counted]
    return out


def height(frontier: Frontier) -> np.ndarray:
    """int32 [calls]: calls on the longest path from each call on, itself included."""
    return longest_chain(frontier, np.arange(len(frontier.source)), np.ones(frontier.calls, dtype=bool))


def own_chains(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """int32 [calls]: how many calls of its signature are before each one on a path of such calls alone; int64
    [signatures]: the calls on the longest such path."""
    found = survey(program)
    return found.before, found.longest


def longest_chain(frontier: Frontier, edges: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """int32 [calls]: along `edges`, the most calls that are `counted` on a path from each call on.

    `edges` are positions of `frontier.source`, ascending; `counted` is bool [calls].
    """
    source, target = frontier.source[edges], frontier.target[edges]
    if Native.loops is not None:
        own = counted.astype(np.int32)
        chain = own.copy()
        Native.loops.longest_after(source, target, own, chain)
        return chain
    if frontier.narrow:
        return _chain_by_edges(counted, source, target)
    return _chain_by_arrays(frontier, source, target, counted)


def _chain_by_edges(counted: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Each edge once, from the last reader to the first, since readers are recorded after what they read."""
    own = counted.astype(np.int32).tolist()
    chain = own.copy()
    for before, reader in zip(source[::-1].tolist(), target[::-1].tolist(), strict=True):
        along = chain[reader] + own[before]
        if along > chain[before]:
            chain[before] = along
    return np.array(chain, dtype=np.int32)


def _chain_by_arrays(
    frontier: Frontier, source: np.ndarray, target: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    """By depth from the deepest: a call's chain is the longest of its readers, plus itself."""
    deepest = int(frontier.depth.max(initial=0))
    chain = counted.astype(np.int32)
    order = stable_argsort(source, frontier.calls)
    below = frontier.depth[source[order]]
    by_level = stable_argsort(below, deepest + 1)  # by depth of the source, then by source
    order = order[by_level]
    source, target = source[order], target[order]
    level = np.searchsorted(below[by_level], np.arange(deepest + 2)).tolist()
    first = np.ones(len(source), bool)
    first[1:] = source[1:] != source[:-1]
    starts = np.flatnonzero(first)
    start = np.searchsorted(starts, level).tolist()
    for depth in range(deepest, 0, -1):
        begin, end = level[depth], level[depth + 1]
        if end > begin:
            mine = starts[start[depth] : start[depth + 1]]
            chain[source[mine]] += np.maximum.reduceat(chain[target[begin:end]], mine - begin)
    return chain
