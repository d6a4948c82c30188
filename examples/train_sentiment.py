"""Training of the Tree-LSTM as in Tai et al. 2015, section 5: Adagrad, all-node loss; exact checkpoints.

In: a model, encoded trees, Settings. Out: a trained model, a step at a time.

    trainer = Trainer(model, trees, Settings(epochs=5))
    while not trainer.done:
        loss = trainer.step()
    fine, binary = accuracy(model, dev)

A checkpoint holds all that the next step depends on: parameters, optimizer, random state, epoch and position
in the epoch's order. Training that was interrupted and resumed takes the same minibatches as training that was not,
and ends with the same parameters: bit for bit where no clock chooses between batches and the loop
(`FXBATCH_ADAPTIVE=0`, `torch.use_deterministic_algorithms(True)`), else up to rounding, which training amplifies.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxbatch.data.sst import Tree
from fxbatch.errors import DataError

Node = Tree[Tensor, Tensor]

FORMAT = 1  # of checkpoints


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that define a run; stored in its checkpoints."""

    epochs: int = 5
    batch_size: int = 25
    learning_rate: float = 0.05
    embedding_learning_rate: float = 0.1
    weight_decay: float = 1e-4
    hidden: int = 150
    embedding: int = 300
    dropout: float = 0.5
    seed: int = 0
    schedule: str = "lookahead"
    treebank: str = "sst"


class Trainer:
    """A model, its optimizer, and where in the data it stands."""

    def __init__(self, model: nn.Module, trees: Sequence[Node], settings: Settings) -> None:
        self.model = model
        self.trees = trees
        self.settings = settings
        embeddings = [p for name, p in model.named_parameters() if name.startswith("embed.")]
        others = [p for name, p in model.named_parameters() if not name.startswith("embed.")]
        self.optimizer = torch.optim.Adagrad(
            [
                {"params": others, "weight_decay": settings.weight_decay},
                {"params": embeddings, "lr": settings.embedding_learning_rate},
            ],
            lr=settings.learning_rate,
        )
        self.epoch = 0
        self.position = 0
        self.loss_sum = 0.0
        self.best_dev = -1.0
        self.best_model: dict[str, Tensor] = {}
        self.history: list[
            list[float]
        ] = []  # an epoch: mean training loss, dev accuracy, dev binary accuracy
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def done(self) -> bool:
        return self.epoch >= self.settings.epochs

    @property
    def mean_loss(self) -> float:
        """Mean loss a tree of this epoch so far."""
        return self.loss_sum / max(1, self.position)

    def minibatch(self) -> list[Node]:
        """The trees of the next step. The order is a function of seed and epoch alone."""
        if self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.epoch)
            self._order = (self.epoch, torch.randperm(len(self.trees), generator=generator).tolist())
        chosen = self._order[1][self.position : self.position + self.settings.batch_size]
        return [self.trees[i] for i in chosen]

    def step(self) -> float:
        """One step; the minibatch's mean loss a tree, before the step."""
        trees = self.minibatch()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses, _ = self.model(trees)
        loss = losses.mean()
        loss.backward()
        self.optimizer.step()
        value = float(loss.detach())
        self.position += len(trees)
        self.loss_sum += value * len(trees)
        return value

    @property
    def epoch_is_over(self) -> bool:
        return self.position >= len(self.trees)

    def next_epoch(self, dev: tuple[float, float]) -> None:
        """Close an epoch with what was measured after it."""
        self.history.append([self.mean_loss, *dev])
        if dev[0] > self.best_dev:
            self.best_dev = dev[0]
            self.best_model = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        self.epoch, self.position, self.loss_sum = self.epoch + 1, 0, 0.0

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on: tensors, numbers, strings, lists and dicts only."""
        return {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "epoch": self.epoch,
            "position": self.position,
            "loss_sum": self.loss_sum,
            "best_dev": self.best_dev,
            "best_model": self.best_model,
            "history": self.history,
            "trees": len(self.trees),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; ValueError where it is of other data."""
        if state["trees"] != len(self.trees):
            raise ValueError(f"it was made with {state['trees']} training trees, here are {len(self.trees)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        if state["cuda_random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda_random"]])
        self.epoch, self.position = state["epoch"], state["position"]
        self.loss_sum, self.best_dev = state["loss_sum"], state["best_dev"]
        self.best_model, self.history = state["best_model"], state["history"]

    def restore_best(self) -> None:
        """Give the model the parameters of its best epoch on dev, where there was one."""
        if self.best_model:
            self.model.load_state_dict(self.best_model)


@torch.no_grad()
def accuracy(model: nn.Module, trees: Sequence[Node], batch_size: int = 250) -> tuple[float, float]:
    """Of the roots: of five classes; of negative against positive, without neutral roots."""
    model.eval()
    fine = binary = polar = 0
    for start in range(0, len(trees), batch_size):
        chosen = list(trees[start : start + batch_size])
        labels = torch.stack([tree.label for tree in chosen])
        probabilities = model(chosen)[1].softmax(dim=-1)
        fine += int((probabilities.argmax(dim=-1) == labels).sum())
        positive = probabilities[:, 3:].sum(dim=-1) > probabilities[:, :2].sum(dim=-1)
        binary += int(((positive == (labels > 2)) & (labels != 2)).sum())
        polar += int((labels != 2).sum())
    return fine / max(1, len(trees)), binary / max(1, polar)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`: whole or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote; tensors and plain data only. DataError where it is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such checkpoint")
    if not zipfile.is_zipfile(path):  # torch.load would take it for a plain pickle
        raise DataError(
            f"{path}: no readable checkpoint: no file that torch.save writes, or only a part of one"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError) as error:
        raise DataError(f"{path}: no readable checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DataError(f"{path}: no checkpoint of this program (format {FORMAT})")
    return state
