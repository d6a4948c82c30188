"""What a notebook shows: tables and forms as HTML, and lines by their cell."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.trace.user_line import shown_name
from fxbatch.viz.page import page_of
from fxbatch.viz.report import make_report


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(x))


@pytest.fixture
def minibatch() -> tuple[Any, Any]:
    return Model(), torch.randn(3, 4)


def test_an_explanation_is_a_table(minibatch: tuple[Any, Any]) -> None:
    explanation = fxbatch.explain(*minibatch)
    assert repr(explanation) == str(explanation)  # at a Python prompt
    shown = explanation._repr_html_()
    assert shown.startswith("<table><caption>3 instances: ") and shown.endswith("</details>")
    assert shown.count("<tr>") == 1 + len(explanation.operations)
    for row in explanation.operations:
        assert f"<td>{row.operation}</td>" in shown
        assert row.signature.replace(">", "&gt;") in shown, "as text"


def test_forms_are_text(minibatch: tuple[Any, Any]) -> None:
    run = fxbatch.compile_minibatch(*minibatch)
    assert run.program._repr_html_().startswith("<pre>program instances=3\n")
    assert run.plan._repr_html_().startswith("<pre>plan arenas=")
    many = fxbatch.compile_minibatch(minibatch[0], torch.randn(300, 4)).program
    assert many._repr_html_().count("\n") == 200 and "more lines" in many._repr_html_()


def test_a_page_is_a_frame(minibatch: tuple[Any, Any]) -> None:
    run = fxbatch.compile_minibatch(*minibatch)
    page = page_of(make_report("model", {"merged": run.program}, run.rewritten, run.schedule))
    assert page.startswith("<!DOCTYPE html>")
    shown = page._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;') and shown.count("<") == 2


def test_lines_are_named_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython names them in its own tracebacks."""
    cells = {"/tmp/ipykernel_1/2.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert shown_name("/tmp/ipykernel_1/2.py") == "In[3]"
    assert shown_name("/home/somebody/model.py") == "model.py"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert shown_name("/tmp/ipykernel_1/2.py") == "2.py"
