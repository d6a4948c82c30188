"""Shared by the examples' command lines: checked options, errors in one line, checkpoints after each epoch.

In: an example's `main`, its options, its model and optimizer. Out: an exit status; a training that goes on.

    options = training_options("Train on EWT.", "ud_ewt", epochs=3)
    done = resume(args.checkpoint, args, model, optimizer)           # epochs that the checkpoint has
    loss, seconds = train_epoch(1, batches, model.loss, optimizer)
    run(main)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from fxbatch_examples.train_sentiment import FORMAT, load_checkpoint, save_checkpoint
from rich.progress import track
from torch import Tensor, nn

import fxbatch
from fxbatch.errors import DataError

T = TypeVar("T")

# Options that a training may be gone on with other values of.
FREE = ("epochs", "checkpoint", "data", "device", "disabled")


def positive(text: str) -> int:
    """A whole number from 1 on; for `type=` of an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def device(text: str) -> str:
    """A device that torch has here; for `type=` of an option."""
    try:
        found = torch.device(text)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error
    return text


def training_options(
    description: str | None, folder: str, *, epochs: int, rate: float = 1e-3
) -> argparse.ArgumentParser:
    """The options that each training has; `folder` of the data folder is read, `rate` is Adam's."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--data", help=f"folder that holds {folder}/")
    options.add_argument("--epochs", type=positive, default=epochs)
    options.add_argument("--limit", type=positive, help="train on the first LIMIT instances, test on as many")
    options.add_argument("--batch-size", type=positive, default=64)
    options.add_argument("--rate", type=float, default=rate, help="Adam's")
    options.add_argument("--device", type=device, default="cpu")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--disabled", action="store_true", help="one instance at a time, undecorated")
    return options


def loop_if(disabled: bool) -> contextlib.AbstractContextManager[None]:
    """Within it one instance is run at a time where that was asked for."""
    return fxbatch.disabled() if disabled else contextlib.nullcontext()


def in_batches(data: Sequence[T], size: int) -> list[Sequence[T]]:
    """The data cut into minibatches; the last may be smaller."""
    return [data[i : i + size] for i in range(0, len(data), size)]


def train_epoch(
    epoch: int,
    batches: Sequence[Sequence[T]],
    losses: Callable[[Sequence[T]], Tensor],
    optimizer: torch.optim.Optimizer,
) -> tuple[float, float]:
    """One step a minibatch on the mean of its losses, with a bar; the mean loss of an instance, and the seconds."""
    begin, total = time.perf_counter(), 0.0
    for batch in track(batches, description=f"epoch {epoch}"):
        loss = losses(batch).sum()
        optimizer.zero_grad()
        (loss / len(batch)).backward()
        optimizer.step()
        total += loss.item()
    return total / sum(map(len, batches)), time.perf_counter() - begin


def add_checkpoint(options: argparse.ArgumentParser) -> None:
    """The option `--checkpoint`."""
    options.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="kept after each epoch; gone on with if it is there"
    )


def resume(
    path: Path | None, args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Put model and optimizer where the checkpoint has them; its number of epochs, 0 where there is none.

    DataError where it is no checkpoint, or one of other options.
    """
    if path is None or not path.exists():
        return 0
    state = load_checkpoint(path)
    wanted = _settings(args)
    if state.get("settings") != wanted:
        raise DataError(f"{path}: a checkpoint of other options: {state.get('settings')}, here {wanted}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    print(f"going on after epoch {state['epoch']} ({path})")
    return int(state["epoch"])


def keep(
    path: Path | None,
    epoch: int,
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the checkpoint after an epoch, whole or not at all; nothing without a path."""
    if path is None:
        return
    state: dict[str, Any] = {"format": FORMAT, "epoch": epoch, "settings": _settings(args)}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_checkpoint(path, {**state, "random": torch.get_rng_state()})


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in FREE}


def run(main: Callable[[], Any]) -> None:
    """`main()` as a command: data that is missing or malformed is one line and exit status 2."""
    try:
        main()
    except DataError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
