"""Entity scores by the CoNLL rule, and the beam search."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from examples import char_tagger, lattice_lstm, module_networks, rnng, seq2seq
from examples.char_tagger import EntityScore
from fxbatch.data.ner import entities


@pytest.mark.parametrize(
    ("gold", "predicted", "counts"),
    [
        ("B-A I-A O B-B", "B-A I-A O B-B", (2, 2, 2)),
        ("B-A I-A O", "B-A O O", (1, 1, 0)),  # half an entity is none
        ("B-A I-A", "B-B I-B", (1, 1, 0)),  # of another kind
        ("B-A B-A", "B-A I-A", (2, 1, 0)),  # two neighbours run together
        ("B-A I-A", "I-A I-A", (1, 1, 1)),  # an I- that nothing goes before begins an entity
        ("B-A I-A B-B", "B-A I-B B-B", (2, 3, 1)),  # I- of another kind begins one
        ("O O", "B-A O", (0, 1, 0)),
        ("O O", "O O", (0, 0, 0)),
    ],
)
def test_entities_are_counted_by_the_conll_rule(
    gold: str, predicted: str, counts: tuple[int, int, int]
) -> None:
    score = EntityScore()
    score.add(gold.split(), predicted.split())
    assert (score.gold, score.predicted, score.right) == counts


def test_f1_over_sentences() -> None:
    score = EntityScore()
    assert (score.precision, score.recall, score.f1) == (0.0, 0.0, 0.0)
    score.add(["B-A", "O", "B-B"], ["B-A", "O", "O"])
    score.add(["B-A", "O"], ["O", "B-A"])
    assert score.precision == pytest.approx(1 / 2)
    assert score.recall == pytest.approx(1 / 3)
    assert score.f1 == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))


def chunks_by_the_scorer(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """What conlleval.pl finds, in its own terms: does a chunk end before this tag, does one begin with it?"""
    found, start = set(), 0
    for i, (before, now) in enumerate(itertools.pairwise(["O", *tags, "O"])):
        (last, _, old), (prefix, _, new) = before.partition("-"), now.partition("-")
        if last != "O" and (prefix in "BO" or old != new):
            found.add((old, start, i))
        if prefix == "B" or (prefix == "I" and (last == "O" or old != new)):
            start = i
    return found


def test_entities_are_those_of_the_conll_scorer() -> None:
    alphabet = ["O", "B-A", "I-A", "B-B", "I-B"]
    for length in range(6):
        for tags in itertools.product(alphabet, repeat=length):
            assert set(entities(tags)) == chunks_by_the_scorer(tags), tags


def test_entities_of_kinds_that_training_never_had_count_as_missed(tmp_path: Path) -> None:
    for name, text in (
        *((f"wnut17/{part}", "x\tO\n") for part in ("train", "dev", "test")),
        ("wikiner10k/train", "Rome\tB-LOC\n\nis\tO\n\n"),
        ("wikigold/wikigold", "Ann\tB-PER\nx\tO\n"),
    ):
        path = tmp_path / "ner" / f"{name}.conll"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = char_tagger.load(str(tmp_path), None, 5, "cpu")
    assert "B-PER" not in found.names
    score = char_tagger.evaluate(char_tagger.build(*found.sizes), found.parts["dev"], found.names, 2)
    assert (score.gold, score.right) == (1, 0)


def test_a_share_of_frequent_words_is_spelled_out() -> None:
    frequent = char_tagger.Word(torch.tensor(3), torch.arange(2).unbind())
    rare = char_tagger.Word(None, torch.arange(3).unbind())
    sentence = char_tagger.Sentence([frequent, rare] * 500, torch.zeros(1000).unbind())
    for share in (0.0, 0.1, 1.0):
        found = char_tagger.spell_out(sentence, share, random.Random(0))
        assert found.tags is sentence.tags and all(word is rare for word in found.words[1::2])
        spelled = [word for word in found.words[::2] if word.id is None]
        assert all(word.characters is frequent.characters for word in spelled)
        assert abs(len(spelled) - 500 * share) <= 25


def log_probability(model: seq2seq.Translator, source: list[torch.Tensor], output: tuple[int, ...]) -> float:
    """Of an output with END, by running the model over it."""
    memory, state = model.encode(source)
    letter, context, total = seq2seq.END, torch.zeros_like(state[0]), 0.0
    for wanted in output:
        state, context, scores = model.step(memory, state, context, model.letters[letter])
        total += scores[wanted].item()
        letter = wanted
    return total


@torch.no_grad()
def test_a_beam_wide_enough_finds_the_best_of_all_outputs() -> None:
    torch.manual_seed(0)
    letters, limit = 4, 4
    beam, greedy = seq2seq.Translator.beam.__wrapped__, seq2seq.Translator.greedy.__wrapped__
    for _ in range(5):
        model = seq2seq.build(letters, embedding=4, hidden=6).double()
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform
        source = list(torch.randint(1, letters, (3,)).unbind())
        outputs = [
            (*output, seq2seq.END)
            for length in range(limit)
            for output in itertools.product(range(1, letters), repeat=length)
        ]
        best = max(outputs, key=lambda output: log_probability(model, source, output))
        found = beam(model, source, letters**limit, limit)
        assert (*found.output, seq2seq.END) == best
        assert found.score == pytest.approx(log_probability(model, source, best))
        narrow = beam(model, source, 1, 30)
        if len(narrow.output) < 30:
            assert narrow.output == greedy(model, source, 30)
        assert narrow.score == pytest.approx(
            log_probability(model, source, (*narrow.output, *[seq2seq.END] * (len(narrow.output) < 30)))
        )


def test_module_network_programs_are_executed() -> None:
    make = module_networks.Program
    red, square = (make("find", kind=module_networks.KINDS.index(kind)) for kind in ("red", "square"))
    picture = [(), (0, 3), (), (0, 4), (), (), (1, 3), (), ()]  # red square, red circle, green square
    assert module_networks.execute(picture, red) == [i in (1, 3) for i in range(9)]
    assert module_networks.execute(picture, make("and", (red, square))) == [i == 1 for i in range(9)]
    assert module_networks.execute(picture, make("or", (red, square))) == [i in (1, 3, 6) for i in range(9)]
    assert module_networks.execute(picture, make("left_of", (red,))) == [i == 0 for i in range(9)]
    assert module_networks.execute(picture, make("right_of", (red,))) == [i in (2, 4) for i in range(9)]
    assert module_networks.execute(picture, make("above", (red,))) == [i == 0 for i in range(9)]
    assert module_networks.execute(picture, make("below", (red,))) == [i in (4, 6) for i in range(9)]
    assert str(make("exists", (make("not", (red,)),))) == "exists(not(find(red)))"


def test_lattice_words_end_where_they_are_listed() -> None:
    chance = random.Random(0)
    lexicon = lattice_lstm.draw_lexicon(chance, 30)
    assert len(set(lexicon)) == 30
    for _ in range(20):
        string = lattice_lstm.draw_string(chance, lexicon, 5)
        text = "".join(chr(int(c) + ord("a")) for c in string.characters)
        found = {(first, end + 1) for end, words in enumerate(string.words) for first, _ in words}
        spans = {(a, b) for b in range(len(text) + 1) for a in range(b - 1) if text[a:b] in lexicon}
        assert found == spans
        for end, words in enumerate(string.words):
            assert all(lexicon[int(word)] == text[first : end + 1] for first, word in words)


def test_grammar_trees_come_back_from_their_actions() -> None:
    chance = random.Random(0)
    for _ in range(50):
        tree = rnng.draw_tree(chance)
        stack: list[list[object]] = [[]]
        kinds = []
        for action, word in tree.actions():
            if action == rnng.CLOSE:
                children = tuple(stack.pop())
                stack[-1].append(rnng.Phrase(kinds.pop(), children))  # type: ignore[arg-type]  # built bottom up
            elif action == rnng.GENERATE:
                stack[-1].append(word)
            else:
                kinds.append(action)
                stack.append([])
        assert stack == [[tree]]


def test_grammar_probabilities_of_a_tiny_model_are_uniform_without_weights() -> None:
    model, trees = rnng.minibatch(hidden=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        loss = rnng.Grammar.forward.__wrapped__(model, trees[0])
    actions = list(trees[0].actions())
    words = sum(action == rnng.GENERATE for action, _ in actions)
    expected = len(actions) * math.log(len(rnng.PHRASES) + 2) + words * math.log(len(rnng.WORDS))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
