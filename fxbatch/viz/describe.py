"""A form as plain data for JSON: documented in docs/schema.md, versioned.

Comes in: a Program, BatchedGraph, Schedule or Plan. Goes out: dictionaries, lists, numbers and strings.

    describe_form(program)["calls"]["signature"]      # a column
    json.dumps(describe_form(schedule, program))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fxbatch.batched_graph import BatchedGraph
from fxbatch.ir import GATHER_KINDS, Plan, Program, Schedule, Signature
from fxbatch.passes.schedule import depths

SCHEMA_VERSION = 1


def describe_form(form: Any, program: Program | None = None) -> dict[str, Any]:
    """The form with `schema`, `version` and `form` in front; `program`: that of a schedule or plan."""
    if isinstance(form, Program):
        name, data = "program", describe_program(form)
    elif isinstance(form, BatchedGraph):
        name, data = "batched_graph", describe_batched_graph(form)
    elif isinstance(form, Schedule):
        name, data = "schedule", describe_schedule(form, program)
    elif isinstance(form, Plan):
        name, data = "plan", describe_plan(form, program)
    else:
        raise TypeError(f"{type(form).__name__} is no form")
    return {"schema": "fxbatch", "version": SCHEMA_VERSION, "form": name, **data}


def describe_signature(signature: Signature) -> dict[str, Any]:
    """One signature; `text` is how messages write it."""
    return {
        "name": signature.name,
        "text": str(signature),
        "kind": signature.operation.kind,
        "rule": signature.operation.rule,
        "inputs": [str(t) for t in signature.inputs],
        "outputs": [str(t) for t in signature.outputs],
        "shared": [f"{s.name}" for s in signature.shared],
        "modes": str(signature.modes),
        "location": signature.location,
        "reason": signature.reason,
    }


def _signatures(signatures: Sequence[Signature]) -> list[dict[str, Any]]:
    return [describe_signature(s) for s in signatures]


def describe_program(program: Program) -> dict[str, Any]:
    """Columns, one entry per call."""
    types = [str(t) for t in program.types]
    known = program.known_types.tolist() if program.known_types is not None else []
    return {
        "instances": program.instances,
        "signatures": _signatures(program.signatures),
        "known": [types[t] for t in known],
        "calls": {
            "signature": program.sig.tolist(),
            "instance": program.instance.tolist(),
            "depth": depths(program).tolist(),
            "first_value": program.first_value.tolist(),
            "first_input": program.input_offsets.tolist(),
        },
        "inputs": program.inputs.tolist(),
        "results": program.outputs.tolist(),
    }


def describe_schedule(schedule: Schedule, program: Program | None) -> dict[str, Any]:
    """Steps in order of execution, each with its calls."""
    steps = [
        {
            "signature": int(program.sig[calls[0]]) if program is not None and len(calls) else None,
            "calls": calls.tolist(),
        }
        for calls in schedule.steps()
    ]
    out: dict[str, Any] = {"policy": schedule.policy, "steps": steps}
    return {**out, "signatures": _signatures(program.signatures)} if program is not None else out


def describe_batched_graph(batched: BatchedGraph) -> dict[str, Any]:
    """Nodes in order of execution and edges with the rows they carry."""
    nodes, edges = [], []
    for name, node in batched.nodes():
        nodes.append(
            {
                "name": name,
                "kind": node.kind,
                "depth": node.depth,
                "rows": node.rows,
                "types": [str(t) for t in node.types],
                "signature": node.signature if node.kind == "batch" else None,
                "calls": node.calls.tolist(),
                "gives": [v.tolist() for v in node.gives],
            }
        )
        edges += [
            {
                "from": before,
                "to": name,
                "output": read.output,
                "input": read.input,
                "rows": np.asarray(read.rows).tolist(),
                "places": np.asarray(read.places).tolist(),
            }
            for before, read in batched.reads(name)
        ]
    return {
        "stage": batched.stage,
        "signatures": _signatures(batched.program.signatures),
        "nodes": nodes,
        "edges": edges,
    }


def describe_plan(plan: Plan, program: Program | None) -> dict[str, Any]:
    """Arenas and steps with where each input is read and each output written."""
    g, entries = plan.first_gather.tolist(), plan.indices
    steps = []
    for k, step in enumerate(plan.steps):
        inputs = []
        for gather in step.inputs:
            one: dict[str, Any] = {"arena": gather.arena, "kind": gather.kind, "rows": gather.rows}
            if gather.kind == GATHER_KINDS[2]:
                one["indices"] = entries[gather.start : gather.start + gather.rows].tolist()
            else:
                one["start"] = gather.start
            inputs.append(one)
        outputs = [{"arena": a, "start": row, "rows": step.rows} for a, row in step.outputs]
        steps.append(
            {
                "signature": step.signature,
                "rows": step.rows,
                "inputs": inputs,
                "outputs": outputs,
                "first_gather": g[k],
            }
        )
    arenas = [{"type": str(t), "rows": int(n)} for t, n in zip(plan.arenas, plan.capacity, strict=True)]
    out: dict[str, Any] = {"arenas": arenas, "steps": steps}
    return {**out, "signatures": _signatures(program.signatures)} if program is not None else out
