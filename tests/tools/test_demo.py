"""`fxbatch demo` from the outside: what it prints, what it leaves, how it stops and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fxbatch_cli import demo, demo_measure
from fxbatch_cli.main import main

from fxbatch import decorator
from fxbatch.runtime.strategy import AdaptiveSwitch

Captured = pytest.CaptureFixture[str]
SMALL = ["--hidden", "8", "--embedding", "8", "--batch-size", "20", "--limit", "60"]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, without data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FXBATCH_DATA", raising=False)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison on the first minibatch, which compiles everything once more."""
    monkeypatch.setattr(demo, "first_minibatch", lambda *_: None)


def test_a_whole_run_on_the_generated_treebank(empty: Path, capsys: Captured) -> None:
    assert main(["demo", "--epochs", "2", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "no treebank found: training on a small generated one with a learnable rule" in out
    launches = re.search(r"(\d+) launches one by one, (\d+) batched", out)
    assert launches is not None
    assert int(launches[1]) > 3 * int(launches[2])
    assert re.search(r"\d+ ms one by one, [\d.]+ ms batched: [\d.]+ times as fast", out)
    assert len(re.findall(r"^epoch \d/2  loss \d+\.\d+  dev accuracy .*trees/s$", out, re.MULTILINE)) == 2
    assert re.search(r"^test  accuracy [\d.]+% \(five classes\)", out, re.MULTILINE)
    assert (empty / "checkpoints" / "demo.pt").is_file()


@pytest.mark.usefixtures("started")
def test_it_learns_the_rule(capsys: Captured) -> None:
    arguments = ["--hidden", "24", "--embedding", "24", "--batch-size", "25", "--limit", "600"]
    assert main(["demo", "--epochs", "6", *arguments]) == 0
    test = re.search(r"^test  accuracy ([\d.]+)%", capsys.readouterr().out, re.MULTILINE)
    assert test is not None
    assert float(test[1]) > 60  # the most frequent label has 31 %


@pytest.mark.usefixtures("started")
def test_resume_after_the_end_and_with_more_epochs(capsys: Captured) -> None:
    assert main(["demo", "--epochs", "2", *SMALL]) == 0
    whole = torch.load("checkpoints/demo.pt", weights_only=True)
    assert main(["demo", "--epochs", "1", *SMALL]) == 0
    assert main(["demo", "--resume", "--epochs", "2", "--limit", "60"]) == 0
    assert "resumed at epoch 2, tree 0" in capsys.readouterr().out
    resumed = torch.load("checkpoints/demo.pt", weights_only=True)
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name])
    assert resumed["history"] == whole["history"]
    assert main(["demo", "--resume", "--limit", "60"]) == 0
    out = capsys.readouterr().out
    assert "epoch 2/2" not in out
    assert "test  accuracy" in out


@pytest.mark.usefixtures("started")
def test_ctrl_c_leaves_a_checkpoint_that_resumes_exactly(empty: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fxbatch",
        "demo",
        "--hidden",
        "8",
        "--embedding",
        "8",
        "--batch-size",
        "5",
    ]
    settings = ["--limit", "150", "--epochs", "2"]
    # Bit by bit only where no clock chooses between batches and the loop: here, and below by the fixture of all tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FXBATCH_ADAPTIVE": "0"}
    process = subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training"):
            break
    # The step that runs is finished, whenever the signal comes.
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "--resume" in err
    stopped = torch.load("checkpoints/demo.pt", weights_only=True)
    assert (stopped["epoch"], stopped["position"]) != (2, 0)
    assert main([command[3], "--resume", "--limit", "150"]) == 0
    assert main([*command[3:], *settings, "--checkpoint", "whole.pt"]) == 0
    a, b = (torch.load(p, weights_only=True) for p in ("checkpoints/demo.pt", "whole.pt"))
    assert a["history"] == b["history"]
    for name, value in a["model"].items():
        assert torch.equal(value, b["model"][name])


def test_compare_prints_both_curves(capsys: Captured) -> None:
    assert main(["demo", "--epochs", "0", "--compare", "4", *SMALL]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(\d+) +(\d+\.\d+) +(\d+\.\d+) +\d+\.\d+ +\d\.\de-?\+?\d+", out, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    assert "agree to float32 rounding" in out
    assert float(rows[0][1]) != float(rows[3][1])
    assert "test  accuracy" not in out


@pytest.mark.usefixtures("started")
def test_compare_batches_however_few_minibatches(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    looped: list[int] = []
    by_the_loop, curve = decorator.loop_over, demo_measure._curve

    def counted(fn: Any, instances: Any, **options: Any) -> Any:
        looped.append(len(instances))
        return by_the_loop(fn, instances, **options)

    def watched(*args: Any, batch: bool) -> Any:
        looped.clear()
        found = curve(*args, batch=batch)
        assert looped == []
        return found

    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(decorator, "loop_over", counted)
    monkeypatch.setattr(demo_measure, "_curve", watched)
    assert main(["demo", "--epochs", "0", "--compare", "2", *SMALL]) == 0
    assert "batched and one by one by at most" in " ".join(capsys.readouterr().out.split())


def test_compare_sees_a_difference(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    step = demo.Trainer.step

    def wrong(trainer: demo.Trainer) -> float:
        nonlocal calls
        calls += 1
        return step(trainer) * (1.001 if calls == 2 else 1.0)

    monkeypatch.setattr(demo.Trainer, "step", wrong)
    assert main(["demo", "--epochs", "0", "--compare", "2", *SMALL]) == 1
    assert "differ by more than" in capsys.readouterr().out


@pytest.mark.usefixtures("started")
def test_real_files_and_a_malformed_tree(empty: Path, capsys: Captured) -> None:
    folder = empty / "data" / "sst"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"{split}.txt").write_text("(3 (2 It) (4 works))\n(1 (2 It) (1 fails))\n" * 4)
    assert main(["demo", "--epochs", "1", *SMALL]) == 0
    assert "data/sst: 8 train, 8 dev, 8 test trees, 4 words" in capsys.readouterr().out
    with (folder / "dev.txt").open("a") as stream:
        stream.write("(3 (2 It) (4 works)\n")
    assert main(["demo", "--epochs", "1", *SMALL]) == 3
    assert re.search(r"fxbatch: data/sst/dev\.txt:9:20: .*'\)' is missing", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--schedule", "magic"], 2, "magic"),
        (["--device", "toaster"], 2, "no device 'toaster'"),
        (["--hidden", "0"], 2, "expected 1 or more, got 0"),
        (["--dropout", "1"], 2, "expected a number from 0 to below 1"),
        (["--epochs", "many"], 2, "argument --epochs"),
        (["--data", "nowhere"], 3, "nowhere: no sst here"),
        (["--resume"], 3, "--resume: there is no "),
    ],
)
def test_mistakes(arguments: list[str], status: int, message: str, capsys: Captured) -> None:
    assert main(["demo", *arguments]) == status
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 2


@pytest.mark.usefixtures("started")
def test_resume_refuses_other_settings_and_data(empty: Path, capsys: Captured) -> None:
    assert main(["demo", "--epochs", "1", *SMALL]) == 0
    assert main(["demo", "--resume", "--hidden", "9"]) == 2
    assert "--hidden differs from the checkpoint's, 8" in capsys.readouterr().err
    assert main(["demo", "--resume"]) == 3
    assert "60 training trees" in capsys.readouterr().err
    folder = empty / "data" / "sst"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (folder / f"{split}.txt").write_text("(3 (2 It) (4 works))\n")
    assert main(["demo", "--resume"]) == 3
    assert "was made on the treebank 'generated', found is 'sst'" in capsys.readouterr().err


def test_a_limit_is_spread_evenly() -> None:
    """The treebank is sorted by sentiment: its first trees are nearly all positive, no fair sample."""
    assert demo.spread(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert demo.spread(list(range(7)), 3) == [0, 2, 4]
    assert demo.spread([1, 2], 5) == demo.spread([1, 2], None) == [1, 2]


def test_options_are_known_to_the_help(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    out = capsys.readouterr().out
    for option in (
        "--epochs",
        "--hidden",
        "--batch-size",
        "--schedule",
        "--device",
        "--data",
        "--seed",
        "--compare",
    ):
        assert option in out


@pytest.mark.gpu
def test_on_a_gpu(capsys: Captured) -> None:
    assert main(["demo", "--epochs", "1", "--device", "cuda", "--compare", "2", *SMALL]) == 0
    assert "agree to float32 rounding" in capsys.readouterr().out


def test_the_checkpoint_is_checked_before_anything_runs(empty: Path, capsys: Captured) -> None:
    (empty / "file").touch()
    for arguments, message in (
        (["--checkpoint", str(empty)], "is a folder"),
        (["--checkpoint", str(empty / "file" / "demo.pt")], "can't be written"),
        (["--resume"], f"there is no {empty / 'checkpoints' / 'demo.pt'}"),
    ):
        assert main(["demo", *SMALL, *arguments]) != 0
        shown = capsys.readouterr()
        assert message in shown.err
        assert "data list" not in shown.err
        assert shown.out == ""
