"""Adapters of other libraries, where they can be imported; what is said where they can't."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import models
from benchmarks.competitors import peers
from examples import bilstm_tagger, molecules


def adapter(name: str) -> ModuleType:
    try:
        return peers.find_peer(name)
    except peers.PeerUnavailable as reason:
        pytest.skip(str(reason))


def loss_and_gradients(model: Any, instances: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the undecorated model."""
    loss = torch.stack([type(model).loss.__wrapped__(model, instance) for instance in instances]).sum()
    model.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def trees() -> list[models.Node]:
    return models.random_trees(5, leaves=9, words=20) + models.random_trees(2, leaves=1, words=20)


def tree_model() -> models.TreeLSTM:
    torch.manual_seed(0)
    return models.TreeLSTM(20, embedding=6, hidden=5)


def test_dynet_trees_and_tagger() -> None:
    dynet = adapter("dynet")
    torch.manual_seed(0)
    tagger = models.Labeller(20, 6, embedding=5, hidden=4, layers=2)
    sentences: list[bilstm_tagger.Sentence] = models.random_sentences(
        5, length=6, words=20, tags=6, ragged=True
    )
    for model, instances, hand in (
        (tree_model(), trees(), dynet.DyNetTreeLSTM),
        (tagger, sentences, dynet.DyNetTagger),
    ):
        loss, gradients = loss_and_gradients(model, instances)
        peer = hand(model)
        for _ in range(2):  # gradients don't add up over calls
            assert peer.loss(instances) == pytest.approx(loss, rel=1e-4)
            for name, gradient in peer.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4)


def test_dgl_trees() -> None:
    dgl = adapter("dgl")
    model = tree_model().double()
    loss, gradients = loss_and_gradients(model, trees())
    model.zero_grad()
    found = dgl.DGLTreeLSTM(model).loss(trees())
    assert found.item() == pytest.approx(loss)
    found.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    expected = torch.stack([models.TreeLSTM.forward.__wrapped__(model, tree) for tree in trees()])
    torch.testing.assert_close(dgl.DGLTreeLSTM(model)(trees()), expected)


def test_pyg_molecules() -> None:
    pyg = adapter("pyg")
    model, instances = molecules.minibatch(molecules=12)
    model = model.double()
    expected = torch.stack([molecules.MoleculeNetwork.forward.__wrapped__(model, m) for m in instances])
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    found = pyg.PyGMolecules(model)(instances)
    torch.testing.assert_close(found, expected)
    for own, gradient in zip(
        torch.autograd.grad(found.square().sum(), list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(own, gradient)


def test_a_missing_peer_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(peers.PeerUnavailable, match=r"dgl: .*No module named 'dgl'.*pip install 'dgl<2'"):
        peers.find_peer("dgl")
