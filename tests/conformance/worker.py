"""A worker: names of entries on standard input, a line of JSON for each on standard output."""

from __future__ import annotations

import contextlib
import json
import sys

import torch

from tests.conformance.databases import entries
from tests.conformance.judge import judge


def main() -> None:
    torch.set_num_threads(1)
    samples = int(sys.argv[1]) or None
    seconds = float(sys.argv[2])
    known = entries()
    answers = sys.stdout
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found = judge(known[line.rstrip("\n")], samples=samples, seconds=seconds)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
