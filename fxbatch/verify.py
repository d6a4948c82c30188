"""One checker a form: what must be true of a Program, Schedule, BatchedGraph and Plan.

Comes in: a form. Goes out: nothing, or a VerifyError that shows the offending line of the form.

    verify_program(program)                    # bounds, types along edges, order, payloads
    verify_schedule(program, schedule)         # each call once, equal signatures, no dependencies
    verify_batched_graph(graph)                # acyclic, every input row read exactly once
    verify_plan(program, schedule, plan)       # gathers read the right, written rows; no overlaps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from fxbatch.errors import VerifyError
from fxbatch.ir import CONSTANT_KINDS, Plan, Program, Schedule
from fxbatch.on_demand import networkx as nx
from fxbatch.text import step_text


def verify_program(program: Program) -> None:
    """Bounds of every column, inputs before readers, types along edges, a payload a constant."""
    _columns(program)
    reads, first = program.inputs, program.first_value[:-1]
    wrong = reads >= first[program.reader]
    if wrong.any():
        at = int(np.argmax(wrong))
        c = int(program.reader[at])
        _fail(program, c, f"input v{reads[at]} is not computed before its reader: the graph has a cycle")
    expected = _input_types(program)
    wrong = program.type_of_value[reads] != expected
    if wrong.any():
        at = int(np.argmax(wrong))
        c = int(program.reader[at])
        signature = program.signatures[program.sig[c]]
        i = at - int(program.input_offsets[c])
        got = program.types[program.type_of_value[reads[at]]]
        place = f" ({signature.location})" if signature.location else ""
        _fail(program, c, f"{signature.name}: input {i} takes {signature.inputs[i]}, got {got}{place}")
    _payloads(program)


def _columns(program: Program) -> None:
    calls, sig = len(program.sig), program.sig
    if calls and not (int(sig.min()) >= 0 and int(sig.max()) < len(program.signatures)):
        c = int(np.argmax((sig < 0) | (sig >= len(program.signatures))))
        _fail(program, c, f"call {c} has signature {sig[c]}, of {len(program.signatures)}")
    if len(program.instance) != calls:
        raise VerifyError(f"{calls} calls, but {len(program.instance)} instance entries")
    if len(program.inputs) != int(program.input_offsets[-1]):
        taken = int(program.input_offsets[-1])
        raise VerifyError(f"the calls take {taken} inputs, but there are {len(program.inputs)} entries")
    known = 0 if program.known_types is None else len(program.known_types)
    if known != program.known:
        raise VerifyError(f"{program.known} known values, but types for {known}")
    if known and not (program.known_types.min() >= 0 and program.known_types.max() < len(program.types)):  # type: ignore[union-attr]  # known > 0
        raise VerifyError(f"a known value has a type that is none of the {len(program.types)} types")
    wrong = (program.inputs < 0) | (program.inputs >= program.values)
    if wrong.any():
        at = int(np.argmax(wrong))
        _fail(
            program,
            int(program.reader[at]),
            f"input v{program.inputs[at]} does not exist: there are {program.values} values",
        )
    wrong = (program.instance < 0) | (program.instance >= max(program.instances, 1))
    if wrong.any():
        c = int(np.argmax(wrong))
        _fail(program, c, f"instance {program.instance[c]} does not exist: there are {program.instances}")
    wrong = (program.outputs < 0) | (program.outputs >= program.values)
    if wrong.any():
        bad = program.outputs[int(np.argmax(wrong))]
        raise VerifyError(f"output v{bad} is not reachable: there are {program.values} values")


def _input_types(program: Program) -> np.ndarray:
    """The type that each input entry should have; -1 for a type that no signature makes."""
    table = [[program.type_ids.get(t, -1) for t in s.inputs] for s in program.signatures]
    flat = np.array([t for row in table for t in row], dtype=np.int64)
    if not len(program.inputs):
        return flat[:0]
    start = np.concatenate([[0], np.cumsum(program.arity)])[:-1]
    within = np.arange(len(program.inputs)) - program.input_offsets[program.reader]
    return flat[start[program.sig[program.reader]] + within]


def _payloads(program: Program) -> None:
    counts = np.bincount(program.sig, minlength=len(program.signatures))
    for s, signature in enumerate(program.signatures):
        constant = signature.operation.kind in CONSTANT_KINDS
        have = len(program.constants.get(s, ()))
        if have != (int(counts[s]) if constant else 0):
            raise VerifyError(f"s{s} {signature}: {counts[s]} calls, but a payload of {have}")
        if constant and (signature.inputs or len(signature.outputs) != 1):
            raise VerifyError(f"s{s} {signature}: a constant has no inputs and one output")
        if signature.operation.kind == "constant":
            for payload in program.constants.get(s, ()):
                type_ = signature.outputs[0]
                if tuple(payload.shape) != type_.shape or payload.dtype != type_.dtype:
                    got = f"shape {tuple(payload.shape)} and dtype {payload.dtype}"
                    raise VerifyError(f"s{s} {signature}: a payload has {got}")


def verify_schedule(program: Program, schedule: Schedule) -> None:
    """Every call in exactly one step; calls of a step share the signature and don't depend on each other."""
    calls, order, offsets = len(program), schedule.order, schedule.offsets
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(order) or (np.diff(offsets) <= 0).any():
        raise VerifyError(
            f"schedule offsets must rise from 0 to {len(order)}, no step empty:\n    {offsets[:20].tolist()}"
        )
    if ((order < 0) | (order >= calls)).any():
        raise VerifyError(f"the schedule has call {order[(order < 0) | (order >= calls)][0]}, of {calls}")
    times = np.bincount(order, minlength=calls)
    if (times != 1).any():
        c = int(np.argmax(times != 1))
        _fail(program, c, f"call {c} is in {times[c]} steps, expected exactly one")
    step_of_call = np.empty(calls, dtype=np.int64)
    step_of_call[order] = np.repeat(np.arange(len(schedule)), np.diff(offsets))
    first = program.sig[order[offsets[:-1]]][step_of_call]
    if (first != program.sig).any():
        c = int(np.argmax(first != program.sig))
        _fail(program, c, f"step {step_of_call[c]} mixes signatures s{first[c]} and s{program.sig[c]}")
    edge = program.inputs >= program.known
    source = np.full(len(edge), -1)
    source[edge] = program.call_of_value[program.inputs[edge] - program.known]
    wrong = np.zeros(len(source), bool)
    reader = program.reader
    wrong[edge] = step_of_call[source[edge]] >= step_of_call[reader[edge]]
    if wrong.any():
        at = int(np.argmax(wrong))
        c, p = int(reader[at]), int(source[at])
        relation = "the same step as" if step_of_call[c] == step_of_call[p] else "an earlier step than"
        _fail(
            program, c, f"call {c} (step {step_of_call[c]}) is in {relation} call {p}, whose value it reads"
        )


def verify_batched_graph(batched: Any) -> None:
    """Acyclic; each call in one batch; every input row of a node read once, and of the right value."""
    graph = batched.graph
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(graph))
        raise VerifyError(f"the {batched.stage} graph has a cycle: {cycle}")
    program = batched.program
    times = np.zeros(len(program), dtype=np.int64)
    for name, node in graph.nodes(data="node"):
        if node.kind == "batch":
            np.add.at(times, node.calls, 1)
            if len(node.calls) and (program.sig[node.calls] != node.signature).any():
                _fail_node(batched, name, f"node {name} mixes signatures")
        _verify_reads(batched, name)
    if (times != 1).any():
        c = int(np.argmax(times != 1))
        _fail(program, c, f"call {c} is in {times[c]} batches, expected exactly one")


def _verify_reads(batched: Any, name: str) -> None:
    graph, node = batched.graph, batched.graph.nodes[name]["node"]
    seen = [np.zeros(len(wanted), dtype=np.int64) for wanted in node.wants]
    for before, _, reads in graph.in_edges(name, data="reads"):
        source = graph.nodes[before]["node"]
        for read in reads:
            if not (0 <= read.output < len(source.gives) and 0 <= read.input < len(node.wants)):
                _fail_node(
                    batched,
                    name,
                    f"node {name} reads output {read.output} of {before}, which has {len(source.gives)}",
                )
            given, wanted = source.gives[read.output], node.wants[read.input]
            if len(read.rows) != len(read.places) or ((read.rows < 0) | (read.rows >= len(given))).any():
                _fail_node(batched, name, f"node {name} reads rows outside the {len(given)} rows of {before}")
            if ((read.places < 0) | (read.places >= len(wanted))).any():
                _fail_node(batched, name, f"node {name} places rows outside its {len(wanted)} rows")
            if (given[read.rows] != wanted[read.places]).any():
                _fail_node(
                    batched, name, f"node {name} reads wrong values from {before} for input {read.input}"
                )
            np.add.at(seen[read.input], read.places, 1)
    for i, times in enumerate(seen):
        if (times != 1).any():
            row = int(np.argmax(times != 1))
            _fail_node(
                batched,
                name,
                f"node {name}: row {row} of input {i} is read {times[row]} times, expected once",
            )


def verify_plan(
    program: Program, schedule: Schedule, plan: Plan, groups: Sequence[Sequence[Sequence[int]]] | None = None
) -> None:
    """Every gather reads rows that hold the wanted values, written by earlier steps and not yet reused.

    The plan is run on value ids instead of tensors: arenas hold ids, each step checks what it reads and
    writes what it makes. `groups[s]` are the input groups of signature s (default: one an input).
    Known values must have been put where `plan.row_of_value` says.
    """
    _plan_bounds(program, plan)
    contents = [np.full(rows, -1, dtype=np.int64) for rows in plan.capacity]
    arena_of = {t: i for i, t in enumerate(plan.arenas)}
    for v in range(program.known):
        arena = arena_of[program.types[program.type_of_value[v]]]
        contents[arena][plan.row_of_value[v]] = v
    if len(plan.steps) != len(schedule):
        raise VerifyError(f"the plan has {len(plan.steps)} steps, the schedule {len(schedule)}")
    calls = schedule.steps()
    run: dict[int, int] = {}
    for k in range(len(plan.steps)):
        _verify_step(program, plan, k, calls[k], contents, run, groups)
    for v in program.outputs.tolist():
        arena = arena_of[program.types[program.type_of_value[v]]]
        row = plan.row_of_value[v]
        if contents[arena][row] != v:
            held = contents[arena][row]
            raise VerifyError(f"output v{v} is not in row {row} of a{arena} at the end: it holds v{held}")


def _plan_bounds(program: Program, plan: Plan) -> None:
    if len(plan.row_of_value) != program.values:
        raise VerifyError(f"rows for {len(plan.row_of_value)} values, of {program.values}")
    arena_of = {t: i for i, t in enumerate(plan.arenas)}
    for t in program.types:
        if t not in arena_of:
            raise VerifyError(f"no arena for {t}")
    for k, step in enumerate(plan.steps):
        for gather in step.inputs:
            end = gather.start + (1 if gather.kind == "broadcast" else gather.rows)
            if not 0 <= gather.arena < len(plan.arenas):
                _fail_step(program, plan, k, f"step {k} reads arena a{gather.arena}, of {len(plan.arenas)}")
            limit = len(plan.indices) if gather.kind == "index" else plan.capacity[gather.arena]
            if not (gather.start >= 0 and end <= limit):
                what = "the index buffer" if gather.kind == "index" else f"a{gather.arena}"
                _fail_step(
                    program, plan, k, f"step {k} reads {gather.start}:{end} of {what}, which has {limit}"
                )
            if gather.kind == "index":
                rows = plan.indices[gather.start : end]
                if ((rows < 0) | (rows >= plan.capacity[gather.arena])).any():
                    limit = plan.capacity[gather.arena]
                    message = f"step {k} has an index outside the {limit} rows of a{gather.arena}"
                    _fail_step(program, plan, k, message)
        for arena, row in step.outputs:
            if not (0 <= arena < len(plan.arenas) and row >= 0 and row + step.rows <= plan.capacity[arena]):
                _fail_step(program, plan, k, f"step {k} writes outside a{arena}")


def _verify_step(
    program: Program,
    plan: Plan,
    k: int,
    calls: np.ndarray,
    contents: list[np.ndarray],
    run: dict[int, int],
    groups: Any,
) -> None:
    step = plan.steps[k]
    signature = program.signatures[step.signature]
    if step.rows != len(calls):
        _fail_step(program, plan, k, f"step {k} has {step.rows} rows for {len(calls)} calls")
    if (program.sig[calls] != step.signature).any():
        _fail_step(program, plan, k, f"step {k} mixes signatures")
    before = run.get(step.signature, step.offset if program.known else 0)
    if step.offset != before:
        _fail_step(program, plan, k, f"step {k} has offset {step.offset}, expected {before}")
    run[step.signature] = step.offset + step.rows
    made = program.first_value[calls]
    if signature.operation.kind in CONSTANT_KINDS:
        _verify_payload_order(program, plan, k, calls, before)
    layout = groups[step.signature] if groups is not None else [[i] for i in range(len(signature.inputs))]
    if len(step.inputs) != len(layout):
        _fail_step(program, plan, k, f"step {k} reads {len(step.inputs)} groups, expected {len(layout)}")
    for gather, members in zip(step.inputs, layout, strict=True):
        wanted = np.stack(
            [program.inputs[program.input_offsets[calls] + i] for i in members], axis=1
        ).reshape(-1)
        if plan.arenas[gather.arena] != signature.inputs[members[0]]:
            have, takes = plan.arenas[gather.arena], signature.inputs[members[0]]
            _fail_step(program, plan, k, f"step {k} reads a{gather.arena} of {have}, takes {takes}")
        if gather.rows != len(wanted):
            _fail_step(program, plan, k, f"step {k} gathers {gather.rows} rows, expected {len(wanted)}")
        found = contents[gather.arena][_rows_of(gather, plan)]
        if (found != wanted).any():
            at = int(np.argmax(found != wanted))
            held = f"v{found[at]}" if found[at] >= 0 else "nothing yet"
            _fail_step(
                program,
                plan,
                k,
                f"step {k} wants v{wanted[at]} in row {at} of input {members}, but finds {held}",
            )
    if len(step.outputs) != len(signature.outputs):
        _fail_step(
            program, plan, k, f"step {k} writes {len(step.outputs)} blocks, expected {len(signature.outputs)}"
        )
    for j, (arena, row) in enumerate(step.outputs):
        if plan.arenas[arena] != signature.outputs[j]:
            _fail_step(
                program,
                plan,
                k,
                f"step {k} writes {signature.outputs[j]} into a{arena} of {plan.arenas[arena]}",
            )
        contents[arena][row : row + step.rows] = made + j
        if (plan.row_of_value[made + j] != np.arange(row, row + step.rows)).any():
            _fail_step(program, plan, k, f"step {k}: row_of_value disagrees with its block in a{arena}")


def _verify_payload_order(program: Program, plan: Plan, k: int, calls: np.ndarray, before: int) -> None:
    """Payload `constant_order[s][i]` is that of the i-th row of signature s, over its steps."""
    step = plan.steps[k]
    payload = np.flatnonzero(program.sig == step.signature)
    order = plan.constant_order.get(step.signature)
    payload = payload if order is None else payload[order]
    start = step.offset - (before if program.known else 0)
    if not np.array_equal(payload[start : start + step.rows], calls):
        _fail_step(program, plan, k, f"step {k} stacks its constants in another order than its rows")


def _rows_of(gather: Any, plan: Plan) -> np.ndarray:
    if gather.kind == "broadcast":
        return np.full(gather.rows, gather.start)
    rows = np.arange(gather.start, gather.start + gather.rows)
    return plan.indices[rows] if gather.kind == "index" else rows


def _fail(program: Program, call: int, message: str) -> NoReturn:
    raise VerifyError(f"{message}\n    {_call_line(program, call)}")


def _call_line(program: Program, c: int) -> str:
    """The call as text, as far as it can be read: the form may be broken."""
    s = int(program.sig[c])
    if not 0 <= s < len(program.signatures):
        return f"call {c} = s{s}"
    begin = int(program.input_offsets[c]) if _bounded(program) else 0
    width, arity = len(program.signatures[s].outputs), len(program.signatures[s].inputs)
    first = int(program.first_value[c]) if _bounded(program) else 0
    made = ", ".join(f"v{v}" for v in range(first, first + width))
    read = ", ".join(f"v{v}" for v in program.inputs[begin : begin + arity].tolist())
    instance = program.instance[c] if c < len(program.instance) else "?"
    return f"{made} = s{s} {program.signatures[s].name}({read}) @{instance}"


def _bounded(program: Program) -> bool:
    return bool(((program.sig >= 0) & (program.sig < len(program.signatures))).all())


def _fail_step(program: Program, plan: Plan, k: int, message: str) -> NoReturn:
    raise VerifyError(f"{message}\n    {step_text(plan, k, plan.steps[k], program.signatures)}")


def _fail_node(batched: Any, name: str, message: str) -> NoReturn:
    raise VerifyError(f"{message}\n    {batched.node_line(name)}")
