"""A form as DOT, the language of Graphviz: for those who lay out graphs with their own tools.

Comes in: a Program or a BatchedGraph, or a Schedule or Plan with its Program. Goes out: DOT text.

    form_to_dot(program)      # dot -Tsvg merged.dot
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fxbatch.batched_graph import BatchedGraph
from fxbatch.errors import FxbatchError
from fxbatch.ir import Plan, Program, Schedule
from fxbatch.passes.schedule import depths
from fxbatch.viz.palette import colour
from fxbatch.viz.picture import SignatureKey

_HEAD = [
    "  rankdir=LR;",
    '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=11];',
    '  edge [color="#69707d", arrowsize=0.6];',
]


def form_to_dot(form: Program | BatchedGraph | Schedule | Plan, program: Program | None = None) -> str:
    """A digraph, from leaves (left) to results (right)."""
    if isinstance(form, Program):
        lines = _program(form)
    elif isinstance(form, BatchedGraph):
        lines = _batched(form)
    elif program is None:
        raise FxbatchError(f"a {type(form).__name__} is drawn with its program")
    else:
        lines = _steps(form, program)
    return "\n".join(["digraph fxbatch {", *_HEAD, *lines, "}"])


def _node(name: str, label: str, key: SignatureKey, number: int, more: str = "") -> str:
    shade = colour(key.colour(number))
    return (
        f"  {quote(name)} [label={quote(label)}, fillcolor={quote(shade.fill)}, color={quote(shade.stroke)}, "
        f"fontcolor={quote(shade.text)}{more}];"
    )


def _program(program: Program) -> Iterator[str]:
    key = SignatureKey.of(program)
    results = frozenset(program.outputs.tolist())
    first = program.first_value.tolist()
    for v in np.unique(program.inputs[program.inputs < program.known]).tolist():
        yield _node(f"v{v}", f"v{v}", key, -1)
    for c, (s, i) in enumerate(zip(program.sig.tolist(), program.instance.tolist(), strict=True)):
        signature = program.signatures[s]
        bold = ", penwidth=2" if any(v in results for v in range(first[c], first[c + 1])) else ""
        tip = f", tooltip={quote(f'{signature} {signature.location}')}"
        yield _node(f"c{c}", f"{signature.name}\n@{i}", key, key.number(signature), bold + tip)
    columns = (program.inputs.tolist(), program.makers(program.inputs).tolist(), program.reader.tolist())
    for value, source, reader in zip(*columns, strict=True):
        yield f"  {f'c{source}' if source >= 0 else f'v{value}'} -> c{reader};"
    by_depth: dict[int, list[str]] = {}
    for c, d in enumerate(depths(program).tolist()):
        by_depth.setdefault(d, []).append(f"c{c}")
    for d in sorted(by_depth):
        yield f"  {{ rank=same; {'; '.join(by_depth[d])}; }}"


def _batched(batched: BatchedGraph) -> Iterator[str]:
    key = SignatureKey.of(batched.program)
    for name, node in batched.nodes():
        number, label = -1, node.kind
        if node.kind == "batch":
            signature = batched.program.signatures[node.signature]
            number, label = key.number(signature), signature.name  # type: ignore[assignment]  # text
        dashed = ', style="rounded,filled,dashed"' if node.kind == "pass" else ""
        yield _node(name, f"{label}\n×{node.rows}", key, number, dashed)
    for name, node in batched.nodes():
        for before in dict.fromkeys(b for b, _ in batched.reads(name)):
            style = " [style=dashed]" if "pass" in (node.kind, batched.node(before).kind) else ""
            yield f"  {quote(before)} -> {quote(name)}{style};"


def _steps(form: Schedule | Plan, program: Program) -> Iterator[str]:
    """Steps one after another, in order of execution."""
    key = SignatureKey.of(program)
    if isinstance(form, Plan):
        steps = list(zip(form.step_signature.tolist(), form.step_rows.tolist(), strict=True))
    else:
        steps = [(int(program.sig[calls[0]]), len(calls)) for calls in form.steps() if len(calls)]
    for k, (s, rows) in enumerate(steps):
        signature = program.signatures[s]
        yield _node(f"step{k}", f"step {k}: {signature.name}\n×{rows}", key, key.number(signature))
    for k in range(1, len(steps)):
        yield f"  step{k - 1} -> step{k};"


def quote(text: str) -> str:
    """A DOT string: quotes and backslashes escaped, new lines as `\\n`."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
