"""A phase, and an instance in it, run so many lines of Python, and no more after many phases than after few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fxbatch_examples import parser, serve

import fxbatch
from fxbatch.trace.state import _fast
from tests.lines import lines_of

# Lines of fxbatch's Python for the decoder of examples/serve.py: to be lowered only.
A_PHASE = 296
AN_INSTANCE = 93
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    _fast is None, reason="calls are recorded by Python where there is no extension"
)


def lines_a_phase(model: Any, batches: dict[int, Any]) -> float:
    """Lines of each phase by which the minibatch with more phases has more. batches: by the number of phases."""
    batched = fxbatch.autobatch(out="list", adaptive=False)(type(model).forward)
    lines = {}
    with torch.no_grad():
        for phases, batch in batches.items():
            for _ in range(2):
                batched(model, batch)
            lines[phases] = lines_of(lambda batch=batch: batched(model, batch))  # type: ignore[misc]
    few, many = lines
    return (lines[many] - lines[few]) / (many - few)


def of_decoder(instances: int, few: int, many: int) -> float:
    torch.manual_seed(0)
    model = serve.Decoder(50, 16).eval()
    batches = {n: [serve.Request(torch.randn(16), n)] * instances for n in (few, many)}
    return lines_a_phase(model, batches)


def of_parser(few: int, many: int) -> float:
    """Of a parser that reads 2 n - 1 values of a sentence of n words; what encodes the words comes with it."""
    torch.manual_seed(0)
    model = parser.Parser(20, 5, 3, hidden=8, embedding=8, tag_embedding=4, classifier=8).eval()
    batches = {}
    for n in (few, many):
        ids = [torch.tensor(i % 5) for i in range(n)]
        batches[2 * n - 1] = [parser.Sentence(ids, ids, [0] * n, [0] * n)] * 3
    return lines_a_phase(model, batches)


def test_lines_of_a_phase_and_of_an_instance() -> None:
    """In a process of its own: after other tests, a phase has once run two lines more."""
    code = f"from {__name__} import of_decoder; print(of_decoder(4, 16, 32), of_decoder(16, 16, 32))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    few, many = map(float, ran.stdout.split())
    an_instance = (many - few) / 12
    assert an_instance <= AN_INSTANCE
    assert few - 4 * an_instance <= A_PHASE


def test_a_phase_costs_the_same_after_many_as_after_few() -> None:
    assert of_decoder(4, 240, 256) == pytest.approx(of_decoder(4, 16, 32), rel=0.01)
    assert of_parser(110, 120) <= 1.05 * of_parser(10, 20)
