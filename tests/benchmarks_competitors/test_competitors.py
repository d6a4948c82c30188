"""Every competitor computes what the undecorated model computes: values and gradients, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import models
from benchmarks.competitors.agenda import Agenda, AgendaTagger, AgendaTreeLSTM
from benchmarks.competitors.batched_parser import BatchedParser
from benchmarks.competitors.block_molecules import BlockMolecules
from benchmarks.competitors.equal_trees import EqualTreeLSTM
from benchmarks.competitors.fold import Fold, FoldTreeLSTM
from benchmarks.competitors.level_trees import LevelTreeLSTM
from benchmarks.competitors.limit import tree_limit
from benchmarks.competitors.packed_lstm import PackedCharTagger, PackedTagger, PaddedTagger
from examples import bilstm_tagger, char_tagger, molecules, parser
from fxbatch.data.sst import Tree

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def one_by_one(decorated: Any, model: Any, instances: Any) -> list[Any]:
    """The undecorated method on each instance."""
    return [decorated.__wrapped__(model, instance) for instance in instances]


def named_gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_loss(model: Any, instances: Any, hand: Any) -> None:
    """Equal losses and gradients; `hand` is a competitor, made of the model."""
    model.zero_grad()
    expected = torch.stack(one_by_one(type(model).loss, model, instances)).sum()
    expected.backward()
    wanted = {name: g.clone() for name, g in named_gradients(model).items() if g is not None}
    model.zero_grad()
    found = hand.loss(instances)
    torch.testing.assert_close(found, expected, **CLOSE)
    found.backward()
    gradients = hand.gradients() if hasattr(hand, "gradients") else named_gradients(model)
    for name, gradient in wanted.items():
        own = gradients[name]
        torch.testing.assert_close(torch.zeros_like(gradient) if own is None else own, gradient, **CLOSE)


def trees(count: int = 7, *, leaves: int = 9, equal: bool = False) -> list[models.Node]:
    found = models.random_trees(count, leaves=leaves, words=20, equal=equal, seed=3)
    if not equal:
        found += models.random_trees(2, leaves=1, words=20) + models.random_trees(1, leaves=30, words=20)
    return found


def tree_model(all_nodes: bool = True) -> models.TreeLSTM:
    torch.manual_seed(0)
    return models.TreeLSTM(20, embedding=6, hidden=5, classes=5, all_nodes=all_nodes).double()


@pytest.mark.parametrize("all_nodes", [True, False])
@pytest.mark.parametrize("competitor", [LevelTreeLSTM, FoldTreeLSTM, AgendaTreeLSTM])
def test_trees(competitor: Callable[..., Any], all_nodes: bool) -> None:
    model = tree_model(all_nodes)
    check_loss(model, trees(), competitor(model))
    check_loss(model, trees(1), competitor(model))


@pytest.mark.parametrize("competitor", [LevelTreeLSTM, FoldTreeLSTM])
def test_root_scores(competitor: Callable[..., Any]) -> None:
    model = tree_model()
    expected = torch.stack(one_by_one(models.TreeLSTM.forward, model, trees()))
    torch.testing.assert_close(competitor(model)(trees()), expected, **CLOSE)


@pytest.mark.parametrize("all_nodes", [True, False])
def test_equal_trees(all_nodes: bool) -> None:
    model = tree_model(all_nodes)
    check_loss(model, trees(equal=True), EqualTreeLSTM(model))
    expected = torch.stack(one_by_one(models.TreeLSTM.forward, model, trees(equal=True)))
    torch.testing.assert_close(EqualTreeLSTM(model)(trees(equal=True)), expected, **CLOSE)


def test_equal_trees_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        EqualTreeLSTM(tree_model())(trees())


def test_bare_functions_and_the_embedding_once_are_the_same_model() -> None:
    model = tree_model()
    bare = models.BareTreeLSTM(20, embedding=6, hidden=5).double()
    bare.load_state_dict(model.state_dict())
    expected = torch.stack(one_by_one(models.TreeLSTM.loss, model, trees()))
    torch.testing.assert_close(
        torch.stack(one_by_one(models.TreeLSTM.loss, bare, trees())), expected, **CLOSE
    )
    torch.testing.assert_close(models.losses_once(model, trees()), expected, **CLOSE)


def labeller() -> models.Labeller:
    torch.manual_seed(0)
    return models.Labeller(20, 6, embedding=5, hidden=4, layers=2).double()


def sentences() -> list[bilstm_tagger.Sentence]:
    return models.random_sentences(6, length=7, words=20, tags=6, ragged=True)


@pytest.mark.parametrize("competitor", [PackedTagger, PaddedTagger, AgendaTagger])
def test_taggers(competitor: Callable[..., Any]) -> None:
    model = labeller()
    check_loss(model, sentences(), competitor(model))


def test_tagger_scores_and_the_embedding_once() -> None:
    model = labeller()
    for found, expected in zip(
        PackedTagger(model)(sentences()), one_by_one(type(model).forward, model, sentences()), strict=True
    ):
        torch.testing.assert_close(found, torch.stack(expected), **CLOSE)
    expected = torch.stack(one_by_one(type(model).loss, model, sentences()))
    torch.testing.assert_close(models.losses_once(model, sentences()), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["mixed", "known", "rare"])
def test_char_tagger(kind: str) -> None:
    model, instances = char_tagger.minibatch(sentences=12)
    model = model.double()
    if kind != "mixed":
        rare = kind == "rare"
        instances = [s for s in instances if all((word.id is None) == rare for word in s.words)]
        assert instances, "the draw has sentences of this kind"
    check_loss(model, instances, PackedCharTagger(model))


def test_molecules() -> None:
    model, instances = molecules.minibatch(molecules=10)
    model = model.double()
    expected = torch.stack(one_by_one(molecules.MoleculeNetwork.forward, model, instances))
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    found = BlockMolecules(model)(instances)
    torch.testing.assert_close(found, expected, **CLOSE)
    gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    for own, gradient in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(own, gradient, **CLOSE)


def test_molecules_of_one_atom() -> None:
    model, instances = molecules.minibatch(molecules=30)
    lone = [molecule for molecule in instances if not molecule.bonds]
    assert lone, "the draw has molecules of one atom"
    expected = torch.stack(one_by_one(molecules.MoleculeNetwork.forward, model, lone))
    torch.testing.assert_close(BlockMolecules(model)(lone), expected)


def test_parser() -> None:
    model, instances = parser.minibatch(sentences=6)
    model = model.double()
    for model.round in range(3):
        check_loss(model, instances, BatchedParser(model))
    model.eval()
    assert BatchedParser(model)(instances) == one_by_one(parser.Parser.forward, model, instances)


def test_fold_batches_by_depth_and_method() -> None:
    fold = Fold()
    words = [fold.add("embed", i) for i in range(3)]
    leaves = [fold.add("leaf", word) for word in words]
    node = fold.add("node", leaves[0][0], leaves[0][1], leaves[1][0], leaves[1][1])
    top = fold.add("node", node[0], node[1], leaves[2][0], leaves[2][1])
    assert {d: {m: len(c) for m, c in methods.items()} for d, methods in fold.depths.items()} == {
        0: {"embed": 3},
        1: {"leaf": 3},
        2: {"node": 1},
        3: {"node": 1},
    }
    model = FoldTreeLSTM(tree_model())
    assert fold.apply(model, [[top[0]], [node[0], node[1]]])[1].shape == (2, 5)


def test_agenda_batches_what_depth_cannot() -> None:
    """A function called at several depths waits until all its calls can run (Neubig et al., section 3.2)."""
    batch = Agenda()
    table = torch.eye(3)
    chance = random.Random(0)
    results = []
    for length in (2, 3):
        x = batch.look_up(table, chance.randrange(3))
        for _ in range(length):
            x = x + x
        results.append(x.tanh())
    assert len(batch.values(results)) == 2
    assert batch.launches == 1 + 3 + 1  # one lookup, three additions, ONE tanh


def test_limit_counts_the_products() -> None:
    model = tree_model()
    batch = [t for t in trees() if t.left is not None]
    leaves = sum(len(list(t.leaves())) for t in batch)
    limit = tree_limit(model, batch)
    limit.forward_backward()
    expected = leaves * 6 * 15 + (leaves - len(batch)) * 10 * 25 + (2 * leaves - len(batch)) * 5 * 5
    assert limit.multiplications == expected


def test_random_trees_are_of_the_size_asked_for() -> None:
    def shape(tree: Tree[Any, Any]) -> Any:
        return () if tree.left is None or tree.right is None else (shape(tree.left), shape(tree.right))

    different = models.random_trees(5, leaves=12)
    equal = models.random_trees(5, leaves=12, equal=True)
    assert {len(list(tree.leaves())) for tree in different + equal} == {12}
    assert len({shape(tree) for tree in different}) > 1
    assert len({shape(tree) for tree in equal}) == 1
    assert [int(leaf.word) for leaf in equal[0].leaves()] != [int(leaf.word) for leaf in equal[1].leaves()]
