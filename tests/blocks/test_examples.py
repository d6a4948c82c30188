"""The examples: compiled blocks against plain PyTorch loops in float64, values and gradients; training; lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch.blocks as fb
from examples.fold import (
    attention,
    calculator,
    count_lines,
    fizzbuzz,
    language_id,
    text2vec,
    text_pipeline,
    tree_lstm,
    weave,
)
from fxbatch.data.molecules import read_molecules
from fxbatch.data.sst import parse_tree


def molecule(n: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    atoms = torch.rand(n, weave.ATOM, generator=g).tolist()
    pairs = torch.rand(n, n, weave.PAIR, generator=g).tolist()
    return (atoms, pairs), [float(seed)]


TREES = ["(3 (2 It) (4 (2 's) (3 good)))", "(2 Fine)", "(1 (1 (2 not) (3 good)) (2 (2 at) (1 all)))"]


def case(name: str) -> tuple[Any, Any, Any, list[Any]]:
    """(layers, block, plain, instances), all in float64."""
    if name in ("text_pipeline", "text2vec"):
        module = text_pipeline if name == "text_pipeline" else text2vec
        layers: Any = module.Layers(["a", "good", "film"], size=5, hidden=6)
        instances: list[Any] = [("a good film", 4), ("", 0), ("an unknown word", 2), ("good", 3)]
        return layers, module.build(layers), module.plain, instances
    if name == "attention":
        layers = attention.Layers(6)
        return layers, attention.build(layers), attention.plain, attention.adding_task(6, 8, 0)
    if name == "tree_lstm":
        layers = tree_lstm.Layers(["It", "good", "not"], n=5)
        return layers, tree_lstm.build(layers), tree_lstm.plain, [parse_tree(t) for t in TREES]
    if name == "weave":
        layers = weave.Layers(2, 5)
        return layers, weave.build(layers), weave.plain, [molecule(n, n) for n in (1, 2, 4, 3)]
    if name == "calculator":
        layers = calculator.Layers(5)
        nest = {"op": "*", "left": {"op": "+", "left": 3, "right": 9}, "right": 7}
        return (
            layers,
            calculator.build(layers),
            calculator.plain,
            [4, nest, {"op": "-", "left": 1, "right": nest}],
        )
    if name == "fizzbuzz":
        layers = fizzbuzz.Layers(8)
        return layers, fizzbuzz.build(layers), fizzbuzz.plain, [1, 3, 5, 15, 1023]
    layers = language_id.Layers(5, 6)
    words = [("one", "english"), ("", "dutch"), ("fünf", "german")]
    return layers, language_id.build(layers), language_id.plain, words


NAMES = [name for name, _, _ in count_lines.table()]


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_plain_loop_in_values_and_gradients(name: str) -> None:
    layers, block, plain, instances = case(name)
    model = fb.compile(block).double()
    losses, outputs = model(instances)
    expected = [plain(layers, x) for x in instances]
    torch.testing.assert_close(losses, torch.stack([e[0] for e in expected]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, torch.stack([e[1] for e in expected]), rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    weights = torch.linspace(0.5, 1.5, len(instances), dtype=torch.float64)
    got = torch.autograd.grad((losses * weights).sum(), parameters, materialize_grads=True)
    total = (torch.stack([e[0] for e in expected]) * weights).sum()
    want = torch.autograd.grad(total, parameters, materialize_grads=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)
    assert any(float(g.abs().max()) > 1e-6 for g in got)


@pytest.mark.parametrize("name", NAMES)
def test_equals_eval_of_the_block(name: str) -> None:
    _, block, _, instances = case(name)
    model = fb.compile(block)
    losses, outputs = model(instances)
    for i, x in enumerate(instances):
        loss, output = block.eval(x)
        torch.testing.assert_close(losses[i], loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs[i], output, rtol=1e-4, atol=1e-5)


def test_the_losses_of_a_changed_model_differ() -> None:
    """The check above can fail: with other parameters it does."""
    _, block, _, instances = case("calculator")
    model = fb.compile(block).double()
    before = model(instances)[0]
    with torch.no_grad():
        nn.init.normal_(next(model.parameters()))
    assert (model(instances)[0] - before).abs().max() > 1e-3


def test_calculator_learns() -> None:
    assert calculator.main(["--instances", "600", "--epochs", "4", "--depth", "1"]) > 0.3


def test_language_id_learns() -> None:
    assert language_id.main(["--epochs", "5"]) > 0.35


def test_fizzbuzz_learns() -> None:
    assert fizzbuzz.main(["--epochs", "10"]) > 0.45


def test_attention_reduces_the_error() -> None:
    assert attention.main(["--length", "6", "--instances", "400", "--epochs", "8"]) > 0.1


def test_text_pipelines_and_tree_lstm_train_on_the_treebank(data_root: Path) -> None:
    for pipeline in (text_pipeline, text2vec):
        assert pipeline.main(["--data", str(data_root / "sst"), "--sentences", "60", "--epochs", "1"]) > 0.1
    assert tree_lstm.main(["--data", str(data_root / "sst"), "--trees", "60", "--epochs", "1"]) > 0.1


def test_weave_trains_on_molecules(data_root: Path) -> None:
    folder = str(data_root / "molecules")
    assert weave.main(["--data", folder, "--molecules", "40", "--epochs", "2"]) < 3
    found = weave.main(
        ["--data", folder, "--set", "qm9", "--target", "2", "--molecules", "40", "--epochs", "2"]
    )
    assert found < 3


def test_features_of_a_molecule(data_root: Path) -> None:
    molecules = read_molecules(data_root / "molecules" / "graphs_delaney.npz")
    atoms, pairs = weave.features(molecules[1])
    n = len(molecules[1])
    assert len(atoms) == n and all(len(a) == weave.ATOM for a in atoms)
    assert sum(sum(p[:4]) for row in pairs for p in row) == 2 * len(molecules[1].bonds)
    assert all(pairs[i][j] == pairs[j][i] for i in range(n) for j in range(n))


def test_lines_are_counted_as_in_table_3() -> None:
    rows = {name: (blocks, plain) for name, blocks, plain in count_lines.table()}
    assert set(rows) == set(NAMES) and all(0 < b < 40 and 0 < p < 40 for b, p in rows.values())
    source = '# [blocks\ndef f():\n    """Doc\n    string."""\n    # comment\n\n    return (\n        1)\n# blocks]'
    assert count_lines.count(source, "blocks") == 3
    with pytest.raises(ValueError, match="plain"):
        count_lines.count(source, "plain")
