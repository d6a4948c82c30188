"""Models beside the same by hand and the loop, in CPU time of one thread: for loaded machines.

    python -m benchmarks.side_by_side --batches 8           # Tree-LSTM: ms a minibatch, ratios pair by pair
    python -m benchmarks.side_by_side --model parser        # one of the four of Neubig et al., training

The full comparison, in wall time and with checks, is `python -m benchmarks --task figures`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fxbatch
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.contenders import Training
from benchmarks.measure import Clock
from benchmarks.models import TreeLSTM, losses_once
from benchmarks.task import Settings
from benchmarks.tasks.neubig_table_1 import MODELS
from fxbatch.data.paths import find_data
from fxbatch.data.sst import read_sst
from fxbatch.data.vocabulary import Vocabulary

Run = Callable[[Sequence[Any]], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Print medians and ratios for training and inference."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--batches", type=int, default=8, help="minibatches timed (default: 8)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--data", default=None, help="folder of the data")
    names = [name.rpartition(" ")[2] for name in MODELS]
    parser.add_argument("--model", choices=names, help="train one of Neubig et al.'s models instead")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.model:
        name = next(name for name in MODELS if name.endswith(options.model))
        train_beside(name, Settings(data=Path(options.data) if options.data else None), options.batches)
        return 0
    trees = read_sst(find_data("sst", options.data))["train"][::9]
    vocabulary = Vocabulary.build(leaf.word or "" for tree in trees for leaf in tree.leaves())
    encoded = [vocabulary.encode_tree(tree) for tree in trees]
    torch.manual_seed(0)
    model = TreeLSTM(len(vocabulary), embedding=300, hidden=options.hidden, classes=5)
    by_hand = LevelTreeLSTM(model)
    size = options.batch_size
    batches = [encoded[i * size : (i + 1) * size] for i in range(options.batches + 1)]

    def one_by_one(batch: Sequence[Any]) -> torch.Tensor:
        with fxbatch.disabled():
            return losses_once(model, batch).sum()

    runs: dict[str, Run] = {
        "fxbatch": lambda batch: model(batch).sum(),
        "by hand": by_hand.loss,
        "one by one": one_by_one,
    }
    for training in (True, False):
        times = {name: [seconds(run, model, b, training) for b in batches][1:] for name, run in runs.items()}
        print("training" if training else "inference")
        for name, found in times.items():
            ratios = [a / b for a, b in zip(found, times["fxbatch"], strict=True)]
            print(
                f"  {name:11} {statistics.median(found) * 1e3:8.1f} ms  {statistics.median(ratios):6.2f} x fxbatch"
            )
    return 0


def train_beside(name: str, settings: Settings, batches: int) -> None:
    """Print a model's training steps of 64 instances, an SGD update included, after one untimed each."""
    made = MODELS[name](settings)
    train = Training(made.model, made.batches, update=1e-5)
    contenders = [train.batched("fxbatch"), train.by_hand("by hand", made.hand), made.one(train)]
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(batches + 1):
        for contender in contenders if number % 2 else contenders[::-1]:
            made.batches.prepare(number)
            clock = Clock(torch.device("cpu"), number)
            gc.collect()
            start = time.thread_time()
            contender.run(clock)
            times[contender.name].append(time.thread_time() - start)
    print(f"{name}, training")
    for other, found in times.items():
        pairs = zip(found[1:], times["fxbatch"][1:], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"  {other:11} {statistics.median(found[1:]) * 1e3:8.1f} ms  {ratio:6.2f} x fxbatch")


def seconds(run: Run, model: torch.nn.Module, batch: Sequence[Any], training: bool) -> float:
    """CPU seconds of this thread for one minibatch."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        start = time.thread_time()
        loss = run(batch)
        if training:
            loss.backward()
        return time.thread_time() - start


if __name__ == "__main__":
    raise SystemExit(main())
