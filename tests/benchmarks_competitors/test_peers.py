"""Adapters of other libraries, where they can be imported; what is said where they can't."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import models
from benchmarks.competitors import peer_process, peers
from benchmarks.contenders import Batches
from benchmarks.measure import Clock, Contender
from benchmarks.results import CaseResult, Entry, Spread
from benchmarks.task import Settings
from benchmarks.tasks.peers import Cell, builds, in_turns, tables
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
        for _ in range(2):
            peer.clear()
            assert peer.loss(instances) == pytest.approx(loss, rel=1e-4)
            for name, gradient in peer.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4)


def test_dynet_gives_scores_and_the_loss_of_roots() -> None:
    dynet = adapter("dynet")
    torch.manual_seed(0)
    model = models.TreeLSTM(20, embedding=6, hidden=5, all_nodes=False)
    loss, gradients = loss_and_gradients(model, trees())
    peer = dynet.DyNetTreeLSTM(model)
    assert peer.loss(trees()) == pytest.approx(loss, rel=1e-4)
    for name, gradient in peer.gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-4)
    wanted = torch.stack([models.TreeLSTM.forward.__wrapped__(model, tree) for tree in trees()])
    torch.testing.assert_close(peer(trees()), wanted, rtol=1e-4, atol=1e-5)
    tagger = models.Labeller(20, 6, embedding=5, hidden=4, layers=2)
    sentences = models.random_sentences(3, length=6, words=20, tags=6, ragged=True)
    scores = [torch.stack(models.Labeller.forward.__wrapped__(tagger, s)) for s in sentences]
    torch.testing.assert_close(dynet.DyNetTagger(tagger)(sentences), torch.cat(scores), rtol=1e-4, atol=1e-5)


class Doubling:
    """A peer's work that is known: round n takes no time and gives 2 n."""

    def __init__(self, module: ModuleType, start: float) -> None:
        self.start = start
        self.ready = -1

    def prepare(self, number: int) -> None:
        self.ready = number

    def run(self, kind: str, number: int) -> None:
        assert self.ready == number
        if number == 7:
            raise ValueError("seven")

    def outcome(self, kind: str) -> dict[str, Any]:
        return {kind: torch.tensor([self.start, 2.0]).numpy()}


def test_a_peer_answers_from_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "math", peers.Peer("math", "math", "math"))
    here, there = multiprocessing.Pipe()
    serve = threading.Thread(target=peer_process.serve, args=(there, "math", None, Doubling, 1, 1.0))
    serve.start()
    assert here.recv() == (True, None)
    here.send(("outcome", "train", 0))
    good, found = here.recv()
    assert good and found["train"].tolist() == [1.0, 2.0]
    here.send(("run", "train", 3))
    good, (wall, cpu) = here.recv()
    assert good and cpu >= 0 and wall >= 0
    here.send(("run", "train", 7))
    assert here.recv() == (False, "ValueError: seven")
    serve.join()


def test_a_peer_that_is_missing_says_so_from_its_process() -> None:
    try:
        peers.find_peer("dynet")
    except peers.PeerUnavailable:
        with pytest.raises(peers.PeerUnavailable, match=r"dynet.*pip install dyNET38"):
            peer_process.PeerProcess("dynet", Doubling, 1.0)
    else:
        with peer_process.PeerProcess("dynet", Doubling, 3.0) as peer:
            contender = peer.contender("DyNet", "infer")
            assert contender.outcome is not None
            torch.testing.assert_close(contender.outcome()["infer"], torch.tensor([3.0, 2.0]))
            with pytest.raises(peer_process.PeerError, match="seven"):
                contender.run(Clock(torch.device("cpu"), 7))


class Answer:
    """A peer's work that gives what its library says."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def prepare(self, number: int) -> None: ...

    def run(self, kind: str, number: int) -> None: ...

    def outcome(self, kind: str) -> dict[str, Any]:
        return {kind: torch.tensor(float(self.module.ANSWER)).numpy()}


def test_a_peer_is_imported_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built_here.py").write_text("ANSWER = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(peers.PEERS, "built", peers.Peer("built", "built_here", "nothing"))
    here, there = multiprocessing.Pipe()
    serve = threading.Thread(target=peer_process.serve, args=(there, "built", tmp_path, Answer, 1))
    serve.start()
    assert here.recv() == (True, None)
    here.send(("outcome", "infer", 0))
    good, found = here.recv()
    assert good and found["infer"] == 42
    here.close()
    serve.join()


class Configured:
    """A peer's work that gives how DyNet had been configured when it was imported."""

    def __init__(self, module: ModuleType) -> None:
        self.given: dict[str, int] = module.dy.GIVEN

    def prepare(self, number: int) -> None: ...

    def run(self, kind: str, number: int) -> None: ...

    def outcome(self, kind: str) -> dict[str, Any]:
        return {name: torch.tensor(value).numpy() for name, value in self.given.items()}


def test_dynet_batches_on_its_own(tmp_path: Path) -> None:
    """It reads its configuration when it is imported, once: the adapter's must come first."""
    (tmp_path / "dynet_config.py").write_text("given = {}\nset = given.update\n")
    (tmp_path / "dynet.py").write_text("import dynet_config\nGIVEN = dict(dynet_config.given)\n")
    with peer_process.PeerProcess("dynet", Configured, folder=tmp_path) as peer:
        contender = peer.contender("DyNet", "infer")
        assert contender.outcome is not None
        assert contender.outcome()["autobatch"] == 1


def test_the_best_build_of_each_cell_is_shown() -> None:
    folders = (Path("/a/dynet-eigen"), Path("/a/dynet-mkl"))
    eigen, mkl = named = builds(Settings(dynet=folders))
    assert named == {"DyNet eigen": folders[0], "DyNet mkl": folders[1]}
    assert builds(Settings()) == {"DyNet": None}
    assert builds(Settings(dynet=folders, peers=False)) == {}

    def case(name: str, count: int, **seconds: float) -> CaseResult:
        entries = {n: Entry(Spread.of([1.0]), Spread.of([s, s])) for n, s in seconds.items()}
        return CaseResult(name, {"batch": count}, "tree", count, entries, {}, [], {})

    cases = [
        case("x b8 train", 8, **{"by hand": 2.0, "fxbatch": 1.0, eigen: 1.1, mkl: 1.5}),
        case("x b8 infer", 8, **{"by hand": 2.0, "fxbatch": 1.0, eigen: 1.3, mkl: 0.9}),
        case("x b9 train", 9, **{"by hand": 1.4, "fxbatch": 1.0}),
    ]
    small, large = tables(cases, Settings())[0].rows
    assert small == [
        "x b8", 8.0, "2x (2-2)", "1.1x (1.1-1.1) eigen", "1.10 +", 8.0, "2x (2-2)", "0.9x (0.9-0.9) mkl", "0.90 -",
    ]  # fmt: skip
    assert large == ["x b9", 9.0, "1.4x (1.4-1.4)", None, "1.40 -", *[None] * 4]


def test_small_minibatches_take_their_turn_together() -> None:
    ran: list[int] = []
    batches = Batches(lambda number: [number], kept=16)
    once = Contender("x", lambda clock: ran.extend(batches[clock.round]), prepare=batches.prepare)
    small = in_turns(once, Cell("trees", 150, 1), batches)
    assert small.prepare is not None
    for number in (0, 1):
        small.prepare(number)
        assert list(batches._made) == list(range(16 * number, 16 * number + 16))  # made outside the timing
        small.run(Clock(torch.device("cpu"), number))
    assert ran == list(range(32))
    assert [Cell("trees", 150, b).minibatches for b in (8, 16, 64)] == [2, 1, 1]


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
    with pytest.raises(peers.PeerUnavailable, match=r"dgl: .*No module named .*dgl.*pip install 'dgl<2'"):
        peers.find_peer("dgl")
