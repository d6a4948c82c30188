"""Contenders that not every machine can run: other libraries, and torch.compile; left out with the reason.

In: a Training or Inference and its model. Out: contenders, and for those left out why, by name.

    contenders, skipped = tree_options(Training(model, batches), model, settings)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks.competitors.peers import PeerUnavailable, find_peer
from benchmarks.compiled_levels import CompiledLevels
from benchmarks.contenders import Inference, Training
from benchmarks.measure import Clock, Contender
from benchmarks.models import TreeLSTM
from benchmarks.task import Settings

Options = tuple[list[Contender], dict[str, str]]
COMPILED, DGL, DYNET, PYG = "by hand, torch.compile", "DGL", "DyNet", "PyTorch Geometric"


def tree_options(
    work: Training | Inference, model: TreeLSTM, settings: Settings, *, compiled: bool = True
) -> Options:
    """DGL, DyNet (training on a CPU) and, with `compiled`, hand-batched levels under torch.compile."""
    makers: dict[str, Callable[[], Contender]] = {}
    if settings.compiled and compiled:
        makers[COMPILED] = lambda: work.by_hand(COMPILED, CompiledLevels(model))
    if settings.peers:
        makers[DGL] = lambda: work.by_hand(DGL, find_peer("dgl").DGLTreeLSTM(model))
        if isinstance(work, Training) and settings.device.type == "cpu":
            makers[DYNET] = lambda: dynet_contender(work, find_peer("dynet").DyNetTreeLSTM(model))
    return made(makers)


def tagger_options(work: Training, settings: Settings) -> Options:
    """DyNet's own tagger (on a CPU)."""
    makers: dict[str, Callable[[], Contender]] = {}
    if settings.peers and settings.device.type == "cpu":
        makers[DYNET] = lambda: dynet_contender(work, find_peer("dynet").DyNetTagger(work.model))
    return made(makers)


def molecule_options(work: Training, settings: Settings) -> Options:
    """PyTorch Geometric."""

    def pyg() -> Contender:
        hand: nn.Module = find_peer("pyg").PyGMolecules(work.model)
        return work.contender(PYG, lambda batch: hand(batch).sum())

    return made({PYG: pyg} if settings.peers else {})


def made(makers: dict[str, Callable[[], Contender]]) -> Options:
    """The contenders that can be made here."""
    contenders, skipped = [], {}
    for name, make in makers.items():
        try:
            contenders.append(make())
        except PeerUnavailable as error:
            skipped[name] = str(error)
    return contenders, skipped


def dynet_contender(work: Training, hand: Any) -> Contender:
    """DyNet's model: forward and backward in one call, with parameters of its own."""

    def run(clock: Clock) -> None:
        hand.loss(work.batches[clock.round], train=True)

    def outcome() -> dict[str, Tensor]:
        for parameter in work.model.parameters():
            parameter.grad = None
        hand.clear()
        hand.loss(work.batches[0], train=True)
        return {f"gradient of {n}": g.clone() for n, g in hand.gradients().items() if g is not None}

    return Contender(DYNET, run, outcome, work.batches.prepare)
