"""Train the Tree-LSTM of Tai et al. 2015 on the Stanford Sentiment Treebank.

examples:
  fxbatch demo                           all of it, some minutes on 2 cores
  fxbatch demo --epochs 1 --hidden 64    a quick one
  fxbatch demo --resume                  go on after Ctrl-C, where it stopped
  fxbatch demo --epochs 0 --compare 20   20 steps batched and one by one
  fxbatch demo --schedule depth --device cuda

Without the treebank (see `fxbatch data get sst`) it trains on small generated
trees. Ctrl-C ends the run after the current step and writes a checkpoint; a
second one ends it at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fxbatch_examples.train_sentiment import Settings, Trainer, accuracy, load_checkpoint, save_checkpoint
from fxbatch_examples.tree_lstm import TreeLSTM, model_class
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxbatch.data.generated import generate_treebank
from fxbatch.data.paths import locate
from fxbatch.data.sst import SPLITS, Tree, read_sst
from fxbatch.data.vocabulary import Vocabulary
from fxbatch.runtime.options import Options

from .demo_measure import always_batched, compare_losses, first_minibatch
from .errors import CommandError, Status
from .terminal import notices, output

CHECKPOINT = Path("checkpoints/demo.pt")
SAVE_EVERY = 30.0  # seconds between checkpoints within an epoch
Splits = dict[str, list[Tree[torch.Tensor, torch.Tensor]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = Settings()
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of the treebank (default: see `fxbatch data list`)",
    )
    add("--epochs", type=_count, metavar="N", help=f"passes over the training trees (default: {d.epochs})")
    add("--hidden", type=_positive, metavar="N", help=f"size of the states (default: {d.hidden})")
    add("--embedding", type=_positive, metavar="N", help=f"size of the word vectors (default: {d.embedding})")
    add("--batch-size", type=_positive, metavar="N", help=f"trees per step (default: {d.batch_size})")
    add("--dropout", type=_share, metavar="P", help=f"of the input of the classifier (default: {d.dropout})")
    add("--schedule", help=f"batching policy (default: {d.schedule})")
    add("--seed", type=int, metavar="N", help=f"of parameters, order and dropout (default: {d.seed})")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    # At these sizes a second thread saves a tenth of a step on an idle machine and costs ten steps on a busy one.
    add(
        "--threads", type=_positive, default=1, metavar="N", help="of torch on the CPU (default: %(default)s)"
    )
    add(
        "--checkpoint",
        type=Path,
        default=CHECKPOINT,
        metavar="FILE",
        help="where it is written (default: %(default)s in the current folder)",
    )
    add("--resume", action="store_true", help="go on from the checkpoint")
    add(
        "--compare",
        type=_count,
        default=0,
        metavar="N",
        help="first N steps batched and one by one, side by side",
    )
    add("--limit", type=_positive, metavar="N", help="use N trees of each split only, evenly spread")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


_positive.__name__ = "whole number"  # as argparse says what "x" is not


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, got {text}")
    return number


def run(options: argparse.Namespace) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with always_batched():
            return _run(options)
    finally:
        torch.set_num_threads(before)


def _run(options: argparse.Namespace) -> int:
    device = _device(options.device)
    checkpoint = _checked_place(options.checkpoint)
    stored = _stored(checkpoint) if options.resume else None
    splits, vocabulary, treebank = load_splits(options.data, options.limit, device)
    settings = _settings(options, stored, treebank)

    def build(dropout: float = settings.dropout) -> TreeLSTM:
        torch.manual_seed(settings.seed)
        sizes = {"embedding": settings.embedding, "hidden": settings.hidden}
        return model_class(settings.schedule)(len(vocabulary), dropout=dropout, **sizes).to(device)

    first_minibatch(build(), splits["train"][: settings.batch_size], output())
    agree = True
    if options.compare:
        agree = compare_losses(lambda: build(0.0), splits["train"], settings, options.compare, output())
    trainer = Trainer(build(), splits["train"], settings)
    if stored is not None:
        try:
            trainer.load_state(stored)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise CommandError(
                f"{options.checkpoint}: can't be resumed: {reason}", status=Status.DATA
            ) from error
        output().print(f"resumed at epoch {trainer.epoch + 1}, tree {trainer.position}")
    finished = train(trainer, splits["dev"], checkpoint)
    if not finished:
        again = "" if options.checkpoint == CHECKPOINT else f" --checkpoint {shlex.quote(str(checkpoint))}"
        notices().print(f"stopped; `fxbatch demo --resume{again}` goes on from {checkpoint}", soft_wrap=True)
        return Status.INTERRUPTED
    if trainer.history:
        trainer.restore_best()
        fine, binary = accuracy(trainer.model, splits["test"])
        output().print(f"test  accuracy {fine:.1%} (five classes), {binary:.1%} (negative or positive)")
    return Status.OK if agree else Status.DIFFERENCE


def _checked_place(path: Path) -> Path:
    """The whole path of the checkpoint; an error now, not after the first epoch, where it can't be written."""
    path = path.resolve()
    if path.is_dir():
        raise CommandError(
            f"--checkpoint {path} is a folder", hint=f"for example: --checkpoint {path / 'demo.pt'}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise CommandError(f"--checkpoint: {path.parent} can't be written", hint="--checkpoint FILE")
    return path


def _stored(checkpoint: Path) -> dict[str, Any]:
    if not checkpoint.exists():
        raise CommandError(
            f"--resume: there is no {checkpoint}",
            hint="leave out --resume to begin, or name the file: --checkpoint FILE",
            status=Status.DATA,
        )
    return load_checkpoint(checkpoint)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"no device {name!r}", hint="cpu, cuda, cuda:1, ...") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("there is no CUDA device here", hint="--device cpu")
    return device


def _settings(options: argparse.Namespace, stored: dict[str, Any] | None, treebank: str) -> Settings:
    """The stored settings, else the defaults, changed by what the command line says."""
    base = Settings(**stored["settings"]) if stored else Settings(treebank=treebank)
    given = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(Settings)
        if getattr(options, f.name, None) is not None
    }
    Options.of(schedule=given.get("schedule", base.schedule))  # an OptionError lists the known ones
    if stored:
        changed = [name for name, value in given.items() if value != getattr(base, name) and name != "epochs"]
        if changed:
            name = changed[0].replace("_", "-")
            raise CommandError(
                f"--{name} differs from the checkpoint's, {getattr(base, changed[0])}",
                hint="leave it out, or start anew without --resume; --epochs may differ",
            )
        if base.treebank != treebank:
            raise CommandError(
                f"the checkpoint was made on the treebank {base.treebank!r}, found is {treebank!r}",
                hint="--data",
                status=Status.DATA,
            )
    return dataclasses.replace(base, **given)


def load_splits(data: Path | None, limit: int | None, device: torch.device) -> tuple[Splits, Vocabulary, str]:
    """The encoded trees, their words, and the treebank: `sst`, or `generated` where there is none."""
    folder = locate("sst", data)
    if folder is None:
        output().print("no treebank found: training on a small generated one with a learnable rule")
        output().print("`fxbatch data get sst` downloads the Stanford Sentiment Treebank", style="dim")
        raw, treebank = generate_treebank(), "generated"
    else:
        raw, treebank = read_sst(folder), "sst"
    vocabulary = Vocabulary.build(
        (leaf.word or "" for tree in raw["train"] for leaf in tree.leaves()), device=device
    )
    splits = {split: [vocabulary.encode_tree(tree) for tree in spread(raw[split], limit)] for split in SPLITS}
    counts = ", ".join(f"{len(splits[split])} {split}" for split in SPLITS)
    output().print(
        f"{folder or 'generated treebank'}: {counts} trees, {len(vocabulary)} words", soft_wrap=True
    )
    return splits, vocabulary, treebank


def spread(trees: list[Any], limit: int | None) -> list[Any]:
    """`limit` of the trees, evenly spread: the treebank's files have the positive reviews first."""
    if limit is None or limit >= len(trees):
        return trees
    return [trees[i * len(trees) // limit] for i in range(limit)]


def train(trainer: Trainer, dev: list[Any], checkpoint: Path) -> bool:
    """Train to the last epoch, saving as it goes; False when it was interrupted."""
    saved = time.monotonic()
    with _stop_on_signal() as stop, _progress() as progress:
        if not trainer.done:
            output().print(f"training; Ctrl-C leaves a checkpoint, {checkpoint}", style="dim", soft_wrap=True)
        while not trainer.done:
            title = f"epoch {trainer.epoch + 1}/{trainer.settings.epochs}"
            task = progress.add_task(
                title, total=len(trainer.trees), completed=trainer.position, loss="", speed=""
            )
            started, first = time.monotonic(), trainer.position
            while not trainer.epoch_is_over and not stop:
                trainer.step()
                speed = (trainer.position - first) / (time.monotonic() - started)
                progress.update(
                    task,
                    completed=trainer.position,
                    loss=f"loss {trainer.mean_loss:.3f}",
                    speed=f"{speed:.0f} trees/s",
                )
                if time.monotonic() - saved > SAVE_EVERY:
                    save_checkpoint(checkpoint, trainer.state())
                    saved = time.monotonic()
            if stop:
                save_checkpoint(checkpoint, trainer.state())
                return False
            seconds = time.monotonic() - started
            loss, count = trainer.mean_loss, len(trainer.trees) - first
            fine, binary = accuracy(trainer.model, dev)
            trainer.next_epoch((fine, binary))
            save_checkpoint(checkpoint, trainer.state())
            saved = time.monotonic()
            progress.remove_task(task)
            output().print(
                f"{title}  loss {loss:.3f}  dev accuracy {fine:.1%} (five classes), {binary:.1%} (two)"
                f"  {count / max(seconds, 1e-9):.0f} trees/s",
                soft_wrap=True,
            )
    return True


def _progress() -> Progress:
    console = notices()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """A list that gets an entry at Ctrl-C (or SIGTERM); a second Ctrl-C raises KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
