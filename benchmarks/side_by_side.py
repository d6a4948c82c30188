"""Models beside the same by hand and the loop, in CPU time of one thread: for loaded machines.

    python -m benchmarks.side_by_side --batches 8           # Tree-LSTM on SST: ms a minibatch, ratios pair by pair
    python -m benchmarks.side_by_side --model parser        # one of the four of Neubig et al., training

All do the same work on the same new minibatch, one after the other, and take turns in who is first: in training the
loss of every node and its gradients, in inference the scores of the roots. Others are compared there too: with DyNet,
`python -m benchmarks --task peers`; in wall time, `python -m benchmarks --task figures`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.contenders import Batches, Inference, Training
from benchmarks.correctness import check_outcome
from benchmarks.measure import Clock, Contender, in_turn
from benchmarks.models import TreeLSTM
from benchmarks.task import Settings
from benchmarks.tasks.neubig_table_1 import MODELS
from fxbatch.data.paths import find_data
from fxbatch.data.sst import read_sst
from fxbatch.data.vocabulary import Vocabulary


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
        settings = Settings(data=Path(options.data) if options.data else None)
        show(f"{name}, training", update_contenders(name, settings), options.batches)
        return 0
    trees = read_sst(find_data("sst", options.data))["train"][::9]
    vocabulary = Vocabulary.build(leaf.word or "" for tree in trees for leaf in tree.leaves())
    batches = Batches.of([vocabulary.encode_tree(tree) for tree in trees], options.batch_size)
    torch.manual_seed(0)
    model = TreeLSTM(len(vocabulary), embedding=300, hidden=options.hidden, classes=5)
    for title, contenders in tree_contenders(model, batches).items():
        show(title, contenders, options.batches)
    return 0


def tree_contenders(model: TreeLSTM, batches: Batches[Any]) -> dict[str, list[Contender]]:
    """Who takes part, fxbatch first: each does the same."""
    hand = LevelTreeLSTM(model)
    found: dict[str, list[Contender]] = {}
    for work in (Training(model, batches), Inference(model, batches)):
        title = "training, loss of every node" if isinstance(work, Training) else "inference, scores of roots"
        found[title] = [work.batched("fxbatch"), work.by_hand("by hand", hand), work.one_by_one("one by one")]
    return found


def update_contenders(name: str, settings: Settings) -> list[Contender]:
    """A model of Neubig et al.'s table 1 in training, an SGD update included."""
    made = MODELS[name](settings)
    train = Training(made.model, made.batches, update=1e-5)
    return [train.batched("fxbatch"), train.by_hand("by hand", made.hand), made.one(train)]


def show(title: str, contenders: Sequence[Contender], batches: int) -> None:
    """Check that all give the same; print each one's median and the median of its ratios to the first."""
    outcomes = {c.name: c.outcome() for c in contenders if c.outcome is not None}
    first = contenders[0].name
    for name, outcome in outcomes.items():
        if name != first:
            check_outcome(name, outcome, outcomes[first])
    times = timed(contenders, batches)
    print(title)
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times[first], strict=True))
        print(f"  {name:11} {statistics.median(found) * 1e3:8.1f} ms  {ratio:6.2f} x {first}")


def timed(contenders: Sequence[Contender], batches: int) -> dict[str, list[float]]:
    """CPU seconds of this thread for each minibatch but the first, which is not timed. They take turns."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(batches + 1):
        for contender in in_turn(contenders, number):
            if contender.prepare is not None:
                contender.prepare(number)
            clock = Clock(torch.device("cpu"), number)
            gc.collect()
            start = time.thread_time()
            contender.run(clock)
            if number:
                times[contender.name].append(time.thread_time() - start)
    return times


if __name__ == "__main__":
    raise SystemExit(main())
