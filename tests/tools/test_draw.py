"""`fxbatch draw`: a page, an SVG, a PNG."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.tools.running import BAGS, ITEMS, TARGET, run


def test_page_has_all_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    status, out, _ = run(capsys, "draw", TARGET, "-o", file)
    assert (status, out.strip()) == (0, str(file))
    page = file.read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data = json.loads(found[1])
    names = ["trace", "merged", "deduplicated", "fused", "pass-through", "batched", "gathered", "plan"]
    names += ["source", "time"]
    assert [stage["name"] for stage in data["stages"]] == names
    assert set(data["pictures"]) == {*names, "timeline"}
    assert str(file.parent) not in page
    lines = {s["location"] for s in data["signatures"] if s["name"] == "out"}
    assert all("target_model.py" in line for line in lines)


def test_page_of_sizes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, stages in ((BAGS, ["packed"]), (ITEMS, ["plan", "packed inner"])):
        page = run(capsys, "draw", target, "-o", "-")[1]
        found = re.search(r'id="data">(.*?)</script>', page, re.S)
        assert found is not None
        data = json.loads(found[1])
        names = [stage["name"] for stage in data["stages"]]
        assert [name for name in names if name not in ("source", "time")][-2:] == stages
        assert {"f32[*,3]"} in [set(s["outputs"]) for s in data["signatures"]]
    assert run(capsys, "draw", BAGS, "--format", "svg", "-o", "-")[1].startswith("<svg")


def test_default_file_stands_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "draw", TARGET, "--format", "svg", "--stage", "schedule")
    assert (status, out.strip()) == (0, "minibatch.svg")
    ElementTree.fromstring((tmp_path / "minibatch.svg").read_text())


def test_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "draw", TARGET, "--format", "svg", "--stage", "trace", "-o", "-")
    assert (status, err) == (0, "")
    ElementTree.fromstring(out)


def test_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib, of the extra `bench`")
    file = tmp_path / "batched.png"
    status, _, _ = run(capsys, "draw", TARGET, "--format", "png", "--stage", "batched", "-o", file)
    assert status == 0
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_instances_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("draw", TARGET, "--format", "svg", "--stage", "trace", "-o", "-", "--instances")
    _, out, _ = run(capsys, *arguments, "1,3")
    assert re.findall(r">instance (\d)", out) == ["1", "3"]
    assert run(capsys, *arguments, "7")[0] == 2
    assert run(capsys, *arguments, "x")[0] == 2
