"""`python -m tests.soak [--examples 2000] [--steps 5000] [--requests 100000]`: random models, long runs.

Examples come from a seed that is printed, so that a failure can be had again; a failure is shrunk and
printed as a Case for a named test in tests/trust/test_generated.py. `--examples 0`, `--steps 0` or `--requests 0`
leaves one out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.live import long_runs
from tests.trust.generated import Case, cases, check
from tests.trust.long_runs import train


def generated(examples: int, number: int) -> None:
    """That many generated minibatches against the loop."""
    begin, count, equal = time.monotonic(), [0], [0]

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        print_blob=True,
    )  # fmt: skip
    @given(case=cases(max_instances=5, max_steps=9))
    def every(case: Case) -> None:
        count[0] += 1
        if count[0] % 200 == 0:
            print(f"  {count[0]} examples, {time.monotonic() - begin:.0f} s", flush=True)
        check(case)
        equal[0] += 1

    every()
    print(f"{equal[0]} generated minibatches equal the loop ({time.monotonic() - begin:.0f} s)", flush=True)


def long_run(steps: int) -> None:
    """Training with ever-new structures."""
    begin = time.monotonic()
    report = train(steps, samples=20)
    for s in report.samples:
        print(
            f"  step {s.step}: {s.resident >> 20} MB, {s.seconds * 1e3:.1f} ms a step, {s.tensors} tensors, "
            f"{s.graphs} graphs, {s.greenlets} greenlets, {s.operations} operations, {s.signatures} signatures"
        )
    report.assert_flat()
    print(f"{steps} steps: memory and caches are flat ({time.monotonic() - begin:.0f} s)")


def live(requests: int) -> None:
    """A server of live batches that is never without a request."""
    begin = time.monotonic()
    samples = long_runs.serve(requests)
    for s in samples[:: max(1, len(samples) // 20)]:
        print(f"  {s.resident >> 20} MB, {s.values} values, {s.rows} rows, {s.calls} calls")
    long_runs.assert_flat(samples)
    print(f"{requests} requests: what a server holds is flat ({time.monotonic() - begin:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    if args.examples:
        generated(args.examples, args.seed)
    if args.steps:
        long_run(args.steps)
    if args.requests:
        live(args.requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
