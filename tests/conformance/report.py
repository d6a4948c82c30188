"""The verdicts as a table: docs/conformance.md.

text = report(lines)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

RIGHT = ("batched", "partly batched", "one by one", "no call", "refused")


def share(lines: Sequence[dict[str, Any]], verdicts: Sequence[str]) -> float:
    """Which part of the entries has one of the verdicts, in per cent."""
    return 100.0 * sum(line["verdict"] in verdicts for line in lines) / max(len(lines), 1)


def report(lines: Sequence[dict[str, Any]], *, samples: int | None, seconds: float) -> str:
    """The page."""
    lines = sorted((x for x in lines if x["verdict"] != "no tensors"), key=lambda x: x["entry"])
    bound = "all samples" if samples is None else f"up to {samples} samples a dtype, spread over the list"
    out = [
        "# Conformance with PyTorch's own databases",
        "",
        "Made by `make conformance`; not written by hand. Each entry of `op_db` and `module_db` that takes",
        "tensors is called per instance inside an autobatched function, with three instances: other values,",
        "and for half of the samples another sample's shapes and arguments. Results equal the loop's, and",
        "gradients too where PyTorch defines them (float32, and one integer, bool or complex dtype).",
        "The same with a leading size that differs between instances: `python -m tests.ragged.sized_operators` and",
        "`python -m tests.ragged.sized_modules`, whose counts are in [sizes](sizes-inside.md): none differs from the",
        "loop.",
        f"This run: torch {torch.__version__}, {bound}, at most {seconds:.0f} seconds an entry.",
        "",
        "| verdict | means |",
        "|---|---|",
        "| batched | all of it, in batched launches |",
        "| partly batched | some samples in batched launches, the others one by one or refused |",
        "| one by one | right, but call by call, with the reason |",
        "| no call | the result follows from types alone, or nothing is recorded |",
        "| refused | a clear error (or the loop raises too) |",
        "| slow | not judged in the time |",
        "| crash, wrong | faults |",
        "",
        "| database | entries | right | batched at least in part | batched whole | faults |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("op", "module"):
        found = [x for x in lines if x["kind"] == kind]
        faults = sum(x["verdict"] in ("crash", "wrong") for x in found)
        out.append(
            f"| {kind}_db | {len(found)} | {share(found, RIGHT):.1f} % | "
            f"{share(found, ('batched', 'partly batched')):.1f} % | {share(found, ('batched',)):.1f} % | {faults} |"
        )
    reasons = Counter(r for x in lines if x["verdict"] != "batched" for r in x["reasons"])
    out += ["", "## Most frequent reasons", "", "| entries | reason |", "|---|---|"]
    out += [f"| {n} | {_cell(reason)} |" for reason, n in reasons.most_common(25)]
    out += ["", "## Entries", "", "| entry | verdict | samples | reasons |", "|---|---|---|---|"]
    for x in lines:
        counts = ", ".join(f"{n} {verdict}" for verdict, n in x["counts"].items())
        if x["left_out"]:
            counts += f", {x['left_out']} left out for time"
        why = "; ".join(x["bad"] or x["reasons"][:2])
        out.append(f"| {_cell(x['entry'])} | {x['verdict']} | {counts} | {_cell(why)} |")
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
