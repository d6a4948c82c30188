"""The example of the demo: its equations, its training loop, its checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fxbatch_examples.train_sentiment import Settings, Trainer, accuracy, load_checkpoint, save_checkpoint
from fxbatch_examples.tree_lstm import TreeLSTM, minibatch

import fxbatch
from fxbatch.data.generated import generate_treebank
from fxbatch.data.sst import parse_tree
from fxbatch.data.vocabulary import Vocabulary
from fxbatch.errors import DataError

SETTINGS = Settings(epochs=2, batch_size=8, hidden=6, embedding=5)


def encoded(count: int) -> tuple[list[Any], int]:
    trees = generate_treebank(0, {"train": count, "dev": 1, "test": 1})["train"]
    vocabulary = Vocabulary.build(leaf.word for tree in trees for leaf in tree.leaves())
    return [vocabulary.encode_tree(tree) for tree in trees], len(vocabulary)


def make_trainer(settings: Settings = SETTINGS, trees: int = 20, seed: int = 0) -> Trainer:
    found, words = encoded(trees)
    torch.manual_seed(seed)
    model = TreeLSTM(words, embedding=settings.embedding, hidden=settings.hidden)
    return Trainer(model, found, settings)


def advance(trainer: Trainer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(trainer.step())
        if trainer.epoch_is_over:
            trainer.next_epoch((0.5, 0.5))
    return losses


def test_equations_of_the_paper() -> None:
    """Section 3.2 with N = 2, written out for one tree of three nodes, in float64."""
    vocabulary = Vocabulary.build(["a", "b"])
    tree = vocabulary.encode_tree(parse_tree("(3 (1 a) (4 b))"))
    model = TreeLSTM(3, embedding=4, hidden=3, dropout=0.0).double().eval()

    def leaf(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = model.embed.weight[word]
        c = model.leaf.cell.weight @ x + model.leaf.cell.bias
        o = torch.sigmoid(model.leaf.gate.weight @ x + model.leaf.gate.bias)
        return o * torch.tanh(c), c

    (hl, cl), (hr, cr) = leaf(tree.left.word), leaf(tree.right.word)
    weights, biases = model.compose.gates.weight.split(3), model.compose.gates.bias.split(3)
    i, fl, fr, o, u = (w @ torch.cat([hl, hr]) + b for w, b in zip(weights, biases, strict=True))
    c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
    h = o.sigmoid() * c.tanh()
    linear = model.classify[1]
    scores = [linear.weight @ state + linear.bias for state in (hl, hr, h)]
    expected = sum(-F.log_softmax(s, dim=0)[label] for s, label in zip(scores, (1, 4, 3), strict=True))

    loss, root = model([tree])
    assert (loss.shape, root.shape) == ((1,), (1, 5))
    torch.testing.assert_close(loss[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(root[0], scores[2], rtol=1e-12, atol=1e-12)


def test_batched_training_equals_one_by_one() -> None:
    settings = Settings(epochs=1, batch_size=8, hidden=6, embedding=5, dropout=0.0)

    def run() -> list[float]:
        trainer = make_trainer(settings, trees=24)
        for part in trainer.model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        return advance(trainer, 3)

    batched = run()
    with fxbatch.disabled():
        single = run()
    assert batched == pytest.approx(single, rel=1e-5)
    assert batched[0] != batched[2]


def test_an_epoch_visits_each_tree_once_in_another_order() -> None:
    trainer = make_trainer()
    orders = []
    for _ in range(2):
        seen: list[Any] = []
        while not trainer.epoch_is_over:
            seen += trainer.minibatch()
            trainer.position += len(trainer.minibatch())
        trainer.next_epoch((0.0, 0.0))
        orders.append([trainer.trees.index(tree) for tree in seen])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]
    assert trainer.done


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_resumed_training_is_exact(stop: int, tmp_path: Path) -> None:
    """In the middle of an epoch (three steps have one), at its end, and after the last step."""
    whole = make_trainer()
    losses = advance(whole, 6)

    first = make_trainer()
    before = advance(first, stop)
    save_checkpoint(tmp_path / "a" / "c.pt", first.state())
    torch.manual_seed(99)
    second = make_trainer(seed=7)
    second.load_state(load_checkpoint(tmp_path / "a" / "c.pt"))
    after = advance(second, 6 - stop)

    assert before + after == losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert second.history == whole.history
    assert second.done


def test_the_random_state_matters() -> None:
    """The test above would fail if the checkpoint lacked the random state: dropout draws from it."""
    first = make_trainer()
    advance(first, 1)
    state = first.state()
    a = first.step()
    first.load_state(state | {"random": torch.Generator().manual_seed(5).get_state()})
    assert first.step() != a


def test_state_of_other_data_is_refused() -> None:
    state = make_trainer().state()
    with pytest.raises(ValueError, match="made with 20 training trees, here are 12"):
        make_trainer(trees=12).load_state(state)


def test_the_best_parameters_are_kept() -> None:
    trainer = make_trainer()
    trainer.step()
    best = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.next_epoch((0.6, 0.6))
    trainer.step()
    trainer.next_epoch((0.5, 0.9))
    assert not torch.equal(trainer.model.state_dict()["compose.gates.weight"], best["compose.gates.weight"])
    trainer.restore_best()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, best[name])


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


@pytest.mark.parametrize("content", ["nothing", "text", "cut", "pickle", "other", "other format"])
def test_unreadable_checkpoints(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"format": 2} if content == "other format" else {"weights": torch.zeros(1000)})
    if content == "nothing":
        path.unlink()
    elif content == "text":
        path.write_text("hello")
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "pickle":
        path.write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(DataError, match=r"c\.pt: no (such|readable)? ?checkpoint"):
        load_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"format": 1})
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"format": 1, "bad": lambda: None})
    assert load_checkpoint(path) == {"format": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


class _Fixed(torch.nn.Module):
    """Scores that put all weight on the word's number: a model whose accuracy is known."""

    def forward(self, trees: list[Any]) -> tuple[None, torch.Tensor]:
        return None, torch.stack([F.one_hot(tree.word, 5) * 9.0 for tree in trees])


def test_accuracy() -> None:
    vocabulary = Vocabulary(list("01234"))
    pairs = [(0, 0), (1, 0), (2, 2), (3, 1), (4, 4), (4, 3)]  # label, prediction
    trees = [vocabulary.encode_tree(parse_tree(f"({label} {word})")) for label, word in pairs]
    fine, binary = accuracy(_Fixed(), trees, batch_size=4)
    assert fine == 3 / 6
    assert binary == 4 / 5  # one root is neutral, one of the five others has the wrong sign


def test_the_target_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FXBATCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, trees = minibatch(trees=3, hidden=8, embedding=4)
    assert len(trees) == 3
    assert model(trees)[1].shape == (3, 5)
