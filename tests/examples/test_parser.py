"""The parser's transition system and its dynamic oracle, checked by brute force on random small trees."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from examples import parser
from examples.parser import LEFT, MASKS, RIGHT, SHIFT, Configuration, Parse


def random_projective_heads(chance: random.Random, words: int) -> list[int]:
    """Heads (1-based, 0 = root) of a random projective tree."""
    heads = [0] * words

    def attach(first: int, last: int, head: int) -> None:
        """Words first .. last - 1 as ONE subtree under `head`."""
        if first == last:
            return
        top = chance.randrange(first, last)
        heads[top] = head
        spread(first, top, top + 1)
        spread(top + 1, last, top + 1)

    def spread(first: int, last: int, head: int) -> None:
        """Words first .. last - 1 as one or more neighbouring subtrees under `head`."""
        while first < last:
            end = chance.randint(first + 1, last)
            attach(first, end, head)
            first = end

    attach(0, words, 0)
    return heads


def to_gold(heads: list[int]) -> list[int]:
    """Heads counted from 0, the root is n."""
    return [head - 1 if head else len(heads) for head in heads]


def fewest_lost(state: Configuration, gold: list[int]) -> int:
    """The fewest gold arcs missed by any way to the end, by trying all of them."""
    if state.done:
        return sum(state.heads[word] != head for word, head in enumerate(gold))
    return min(fewest_lost(after(state, transition), gold) for transition in state.legal())


def after(state: Configuration, transition: str) -> Configuration:
    new = copy.deepcopy(state)
    new.take(transition)
    return new


def test_oracle_costs_are_exact() -> None:
    chance = random.Random(1)
    checked = 0
    for _ in range(60):
        heads = random_projective_heads(chance, chance.randint(1, 5))
        assert parser.projective(heads)
        gold = to_gold(heads)
        state = Configuration(len(gold))
        while not state.done:
            now = fewest_lost(state, gold)
            costs = state.costs(gold)
            assert list(costs) == state.legal()
            for transition, cost in costs.items():
                assert fewest_lost(after(state, transition), gold) - now == cost, (heads, state, transition)
                checked += 1
            assert min(costs.values()) == 0, "some action is always free"
            state.take(chance.choice(state.legal()))  # off the best path too
    assert checked > 500


def test_following_the_oracle_gives_the_gold_tree() -> None:
    chance = random.Random(2)
    for _ in range(50):
        heads = random_projective_heads(chance, chance.randint(1, 30))
        state = Configuration(len(heads))
        while not state.done:
            costs = state.costs(to_gold(heads))
            state.take(chance.choice([transition for transition, cost in costs.items() if cost == 0]))
        assert state.parse().heads == heads


def test_transitions() -> None:
    state = Configuration(2)
    assert state.legal() == [SHIFT]
    state.take(SHIFT)
    assert state.legal() == [SHIFT, LEFT]
    state.take(SHIFT)
    assert state.legal() == [LEFT, RIGHT]  # no word is left to shift
    state.take(RIGHT, 3)
    state.take(LEFT, 1)
    assert state.done
    assert state.parse() == Parse(heads=[0, 1], relations=[1, 3])


def test_masks_are_all_the_legal_sets() -> None:
    met = set()
    chance = random.Random(3)
    for _ in range(200):
        state = Configuration(chance.randint(1, 5))
        while not state.done:
            met.add(tuple(state.legal()))
            state.take(chance.choice(state.legal()))
    assert met == set(MASKS)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([0], True),
        ([2, 0, 2], True),
        ([3, 4, 0, 3], False),  # 1-3 crosses 2-4
        ([0, 0], False),  # two roots
        ([2, 3, 0, 2], False),  # 4 hangs on 2 across the root's word 3
    ],
)
def test_projective(heads: list[int], expected: bool) -> None:
    assert parser.projective(heads) is expected


def test_judge_wants_the_relation_only_on_gold_arcs() -> None:
    model, _ = parser.minibatch()
    state = Configuration(2, stack=[0], buffer=1)
    scores = [float(i) for i in range(len(model.actions))]
    right, wrong = model.judge(state, [1, 2], [3, 0], scores)  # word 0 hangs on word 1 by relation 3
    assert model.actions[right][1:] == (LEFT, 3)
    assert wrong is not None
    assert model.actions[wrong][1:] == (LEFT, 2)


def test_judge_takes_any_relation_where_the_head_is_lost() -> None:
    model, _ = parser.minibatch()
    state = Configuration(3, stack=[1], buffer=2, heads={0: 1}, relations={0: 0})
    scores = [float(i) for i in range(len(model.actions))]
    right, _ = model.judge(state, [1, 0, 3], [0, 0, 0], scores)  # word 1's head, word 0, has gone
    best_left = max(action for action, side, _ in model.actions if side == LEFT)
    assert right == best_left


def test_learns_to_parse() -> None:
    model, sentences = parser.minibatch(sentences=4, hidden=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for model.round in range(40):
        loss = torch.stack([parser.Parser.loss.__wrapped__(model, s) for s in sentences]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    heads = [parser.Parser.forward.__wrapped__(model, sentence).heads for sentence in sentences]
    assert heads == [list(sentence.heads) for sentence in sentences]


def test_attachment_counts_words() -> None:
    _, sentences = parser.minibatch(sentences=3)
    gold = [Parse(list(s.heads), list(s.relations)) for s in sentences]
    words = sum(len(s.words) for s in sentences)

    class Answers(torch.nn.Module):
        def forward(self, batch: list[parser.Sentence]) -> list[Parse]:
            return [gold[sentence.number] for sentence in batch]

    assert parser.attachment(Answers(), sentences, 2) == (1.0, 1.0)
    gold[0].relations[0] += 1
    assert parser.attachment(Answers(), sentences, 2) == (1.0, (words - 1) / words)
    gold[0].heads[0] += 1
    assert parser.attachment(Answers(), sentences, 2) == ((words - 1) / words, (words - 1) / words)
