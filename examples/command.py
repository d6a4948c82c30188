"""What the examples' command lines share: checked options, errors in one line, checkpoints after each epoch.

In: an example's `main`, its options, its model and optimizer. Out: an exit status; a training that goes on.

    options.add_argument("--epochs", type=positive, default=3)
    done = resume(args.checkpoint, settings, model, optimizer)           # epochs that the checkpoint has
    run(main)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fxbatch_examples.train_sentiment import FORMAT, load_checkpoint, save_checkpoint
from torch import nn

from fxbatch.errors import DataError

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
