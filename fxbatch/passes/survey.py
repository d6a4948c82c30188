"""Program -> Survey: what every policy and pass asks first, answered in one pass over the calls.

Comes in: a Program. Goes out: how often each signature is called, chains of calls of one signature, and the
SignatureGraph: which output feeds which slot. A model has few signature graphs, so what follows from one (its
strongly connected components, who may run before whom) is worked out once.

    found = survey(program)
    found.counts                 # int64 [signatures]
    found.graph.parts            # [[0], [2, 5], [3]]: components as they feed each other, constants first
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import networkx as nx
import numpy as np

from fxbatch.ir import Program, SignatureColumns, offsets
from fxbatch.passes.native import Native, empty_column

_DENSE_LIMIT = 1 << 22
_KEPT = 256  # signature graphs, a tuple of signatures


class SignatureGraph:
    """Distinct pairs (slot, output), both flat over signatures, such that some call reads such an output there."""

    def __init__(self, columns: SignatureColumns, pairs: np.ndarray) -> None:
        """pairs: slot * outputs + output, ascending."""
        outs = max(int(columns.first_output[-1]), 1)
        self.columns = columns
        self.slots, self.outs = pairs // outs, pairs % outs
        self.key = self.slots.tobytes(), self.outs.tobytes()

    @functools.cached_property
    def networkx(self) -> nx.DiGraph:
        """Which signature's calls read which other's: numbers of signatures as nodes; constants feed nobody."""
        c = self.columns
        numbers = np.arange(len(c.arity))
        reader, source = numbers.repeat(c.arity)[self.slots], numbers.repeat(c.width)[self.outs]
        edges = ~c.constant[source]
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(numbers)))
        graph.add_edges_from(sorted(zip(source[edges].tolist(), reader[edges].tolist(), strict=True)))
        return graph

    @functools.cached_property
    def parts(self) -> list[list[int]]:
        """The strongly connected components, each sorted: constants, then as they feed."""
        condensed = nx.condensation(self.networkx)
        members = [sorted(condensed.nodes[node]["members"]) for node in range(len(condensed))]
        ranked = nx.lexicographical_topological_sort(condensed, key=lambda node: members[node][0])
        constants = self.columns.constant.tolist()
        return sorted((members[node] for node in ranked), key=lambda part: not constants[part[0]])

    @functools.cached_property
    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """The parts as columns: members of part p are `members[first[p] : first[p + 1]]` -> (members, first)."""
        sizes = np.array([len(part) for part in self.parts], dtype=np.int64)
        return np.array([s for part in self.parts for s in part], dtype=np.int64), offsets(sizes)

    @functools.cached_property
    def several(self) -> list[list[int]]:
        """The parts of several signatures, which wait for each other in turn."""
        return [part for part in self.parts if len(part) > 1]

    @functools.cached_property
    def components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [signatures] each: its component, its position in it, the component's size."""
        component, column, size = (np.zeros(len(self.columns.arity), dtype=np.int64) for _ in range(3))
        for number, part in enumerate(self.parts):
            component[part], size[part] = number, len(part)
            column[part] = np.arange(len(part))
        return component, column, size


@dataclass(frozen=True, eq=False)
class Survey:
    """What is known of a program; arrays are not to be written to."""

    counts: np.ndarray  # int64 [signatures]: calls of each
    before: np.ndarray  # int32 [calls]: calls of its signature before it on a path of such calls alone
    longest: np.ndarray  # int64 [signatures]: calls on the longest such path
    graph: SignatureGraph


def count_values(program: Program) -> int:
    """How many values there are, without numbering them call by call."""
    return program.known + int(survey(program).counts @ program.width)


def spread_outputs(
    program: Program, types: np.ndarray, needs: np.ndarray, type_of: np.ndarray, needed: np.ndarray
) -> None:
    """Write what stands for each output of the signatures (int64, bool) at each of its values, from `known` on."""
    c = program.columns
    if Native.loops is not None:
        Native.loops.spread(program.sig, c.first_output, types, needs, type_of, needed, program.known)
        return
    type_of[program.known : program.values] = types[program.output_of_value]
    needed[program.known : program.values] = needs[program.output_of_value]


# Several passes ask this of one program; programs are immutable.
_SURVEYS: weakref.WeakKeyDictionary[Program, Survey] = weakref.WeakKeyDictionary()
_GRAPHS: weakref.WeakKeyDictionary[SignatureColumns, dict[bytes, SignatureGraph]] = (
    weakref.WeakKeyDictionary()
)


def survey(program: Program) -> Survey:
    """The survey of a program, made once."""
    found = _SURVEYS.get(program)
    if found is None:
        found = _SURVEYS[program] = _survey(program)
    return found


def _survey(program: Program) -> Survey:
    c = program.columns
    if Native.loops is None or int(c.first_slot[-1] * c.first_output[-1]) > _DENSE_LIMIT:
        counts = np.bincount(program.sig, minlength=len(program.signatures))
        return Survey(counts, *_own_chains(program), _graph(c, _find_pairs(program)))
    before = np.empty(len(program), dtype=np.int32)
    pairs, counts, longest = Native.loops.survey(
        program.sig, program.inputs, c.arity, c.width, c.first_slot, c.first_output,
        before, empty_column, program.known,
    )  # fmt: skip
    return Survey(counts, before, longest, _graph(c, pairs))


def _graph(columns: SignatureColumns, pairs: np.ndarray) -> SignatureGraph:
    graphs = _GRAPHS.get(columns)
    if graphs is None:
        graphs = _GRAPHS[columns] = {}
    key = pairs.tobytes()
    found = graphs.get(key)
    if found is None:
        if len(graphs) >= _KEPT:
            graphs.clear()
        found = graphs[key] = SignatureGraph(columns, pairs)
    return found


def source_calls(program: Program) -> np.ndarray:
    """int64 [len(inputs)]: the call that makes each input entry, -1 for values of earlier phases."""
    if Native.loops is not None and not program.known:
        out = np.empty(len(program.inputs), dtype=np.int64)
        Native.loops.source_calls(program.sig, program.width, program.inputs, out)
        return out
    made = program.inputs - program.known if program.known else program.inputs
    if program.values - program.known == len(program) and (
        not len(program.width) or (int(program.width.min()) == int(program.width.max()) == 1)
    ):
        return np.where(made < 0, -1, made) if program.known else made
    if not program.known:
        return program.call_of_value[made]
    return np.where(made < 0, -1, np.append(program.call_of_value, -1)[np.maximum(made, -1)])


def flat_slots(program: Program) -> np.ndarray:
    """int64 [len(inputs)]: each entry's slot among those of all signatures."""
    arity = program.arity[program.sig]
    first = program.input_offsets
    within = np.arange(first[-1]) - np.repeat(first[:-1], arity)
    return np.repeat(program.columns.first_slot[program.sig], arity) + within


def _find_pairs(program: Program) -> np.ndarray:
    slots, outs = int(program.arity.sum()), int(program.width.sum())
    slot = flat_slots(program)
    made = program.inputs >= program.known
    value = program.inputs if made.all() else program.inputs[made]
    if not made.all():
        slot = slot[made]
    key = slot * outs + program.output_of_value[value - program.known]
    if slots * outs > _DENSE_LIMIT:
        return np.unique(key)
    seen = np.zeros(slots * outs, dtype=bool)
    seen[key] = True
    return np.flatnonzero(seen)


def _own_chains(program: Program) -> tuple[np.ndarray, np.ndarray]:
    before = np.zeros(len(program), dtype=np.int32)
    source = source_calls(program)
    edges = source >= 0
    source, target = source[edges], program.reader[edges]
    own = program.sig[source] == program.sig[target]
    counts = before.tolist()
    for read, reader in zip(source[own].tolist(), target[own].tolist(), strict=True):
        if counts[read] >= counts[reader]:
            counts[reader] = counts[read] + 1
    before = np.array(counts, dtype=np.int32)
    longest = np.zeros(len(program.signatures), dtype=np.int64)
    np.maximum.at(longest, program.sig, before + 1)
    return before, longest
