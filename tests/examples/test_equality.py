"""Each example on a minibatch equals its undecorated forward in a loop: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from examples import (
    bilstm_tagger,
    char_tagger,
    childsum_tree_lstm,
    deep_sets,
    graph_attention,
    language_model,
    lattice_lstm,
    mixture_of_experts,
    module_networks,
    molecules,
    parser,
    rnng,
    seq2seq,
    transformer_parser,
    transformer_tagger,
    tree_lstm,
)
from tests.oracle import check_equal

WITH_LOSS = [
    *(bilstm_tagger, char_tagger, childsum_tree_lstm, lattice_lstm, parser),
    *(transformer_parser, transformer_tagger),
]
FORWARD_TOO = (bilstm_tagger, char_tagger, childsum_tree_lstm, lattice_lstm)
WITH_FORWARD = [
    *(language_model, mixture_of_experts, module_networks, molecules, rnng, graph_attention),
    deep_sets,
]


def name(module: Any) -> str:
    return module.__name__.rpartition(".")[2]


def assert_batched(fn: Any, instances: Any) -> None:
    """All of it runs batched: nothing call by call."""
    report = fxbatch.explain(fn, instances)
    assert [(row.signature, row.reason) for row in report.unbatched] == []
    assert report.launches_after < report.launches_before


@pytest.mark.parametrize("example", WITH_LOSS, ids=name)
def test_loss(example: Any) -> None:
    model, instances = example.minibatch()
    check_equal(model.loss, instances)
    check_equal(model.loss, instances[:1])
    assert_batched(model.loss, instances)
    if example in FORWARD_TOO:
        check_equal(model, instances, gradients=False)  # those of the same layers are compared above


@pytest.mark.parametrize("example", WITH_FORWARD, ids=name)
def test_forward(example: Any) -> None:
    """What the command takes as a target: a model and the instances that it can be called with."""
    model, instances = example.minibatch()
    assert isinstance(model, nn.Module)
    check_equal(model, instances)
    check_equal(model, instances[:1])


def test_the_demos_model_is_batched_sparse_look_ups_too() -> None:
    model, trees = tree_lstm.minibatch(trees=4, hidden=8, embedding=8)
    model(trees)[0].sum().backward()
    assert_batched(model, trees)


def test_parser_loss_with_exploration_over_rounds() -> None:
    model, sentences = parser.minibatch(sentences=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for model.round in range(3):
        with fxbatch.disabled():
            expected = model.loss(sentences)
        found = model.loss(sentences)
        torch.testing.assert_close(found, expected)
        optimizer.zero_grad()
        found.sum().backward()
        optimizer.step()


def test_parses() -> None:
    model, sentences = parser.minibatch(sentences=6)
    model.eval()
    with fxbatch.disabled():
        expected = model(sentences)
    found = model(sentences)
    assert [(p.heads, p.relations) for p in found] == [(p.heads, p.relations) for p in expected]


def test_sequence_to_sequence() -> None:
    model, pairs = seq2seq.minibatch()
    check_equal(model, [pair.source for pair in pairs], [pair.target for pair in pairs])


def test_decoding() -> None:
    model, pairs = seq2seq.minibatch()
    sources = [pair.source for pair in pairs]
    with torch.no_grad():
        with fxbatch.disabled():
            greedy, beam = model.greedy(sources), model.beam(sources)
        assert model.greedy(sources) == greedy
        found = model.beam(sources)
    assert [h.output for h in found] == [h.output for h in beam]
    assert [h.score for h in found] == pytest.approx([h.score for h in beam], rel=1e-5)
