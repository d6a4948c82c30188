"""`python -m tests.conformance [--samples N] [--only TEXT] [--fresh]`: judge, print, write the table.

Takes up where an interrupted run stopped; `--fresh` begins anew. Exits with 1 when an entry is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.conformance.databases import entries
from tests.conformance.pool import judged
from tests.conformance.report import report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--samples", type=int, default=0, help="samples an entry and dtype; 0: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="time bound of an entry")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="entries whose name contains this text; writes no page")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--every", type=int, default=1, help="every n-th entry only; writes no page")
    args = parser.parse_args()
    state = Path(tempfile.gettempdir()) / f"fxbatch-conformance-{torch.__version__}-{args.samples}.jsonl"
    if args.fresh or args.only:
        state.unlink(missing_ok=True) if args.fresh else None
    names = [n for n in entries() if args.only in n][:: args.every]
    found = {}
    if state.exists() and not args.only:
        found = {x["entry"]: x for x in map(json.loads, state.read_text().splitlines())}
    left = [n for n in names if n not in found]
    print(f"{len(names)} entries, {len(names) - len(left)} known from an interrupted run", flush=True)
    with state.open("a") as kept:
        for line in judged(left, workers=args.workers, samples=args.samples or None, seconds=args.seconds):
            found[line["entry"]] = line
            if not args.only:
                print(json.dumps(line), file=kept, flush=True)
            detail = "; ".join(line["bad"] or line["reasons"][:1])
            print(f"{line['entry']:50} {line['verdict']:15} {line['seconds']:6.1f} s  {detail}", flush=True)
    lines = [found[n] for n in names if n in found]
    text = report(lines, samples=args.samples or None, seconds=args.seconds)
    if args.only or args.every > 1:
        print("\n".join(text.splitlines()[20:26]))
    else:
        PAGE.write_text(text)
        state.unlink()
        print("\n".join(text.splitlines()[20:26]), f"\nwritten to {PAGE.name}")
    return int(any(x["verdict"] in ("wrong", "crash") for x in lines))


if __name__ == "__main__":
    sys.exit(main())
