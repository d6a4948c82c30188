"""The examples as commands: options are checked, wrong data is one line, an interrupted training goes on."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import bilstm_tagger, char_tagger, parser
from examples.command import device, positive, resume, run
from fxbatch.errors import DataError
from tests.examples.test_training import FILES, data, short_name

__all__ = ["data"]  # the fixture
TRAININGS = [
    (main, options) for main, options in FILES if main in (bilstm_tagger.main, char_tagger.main, parser.main)
]


@pytest.mark.parametrize(("main", "options"), TRAININGS, ids=short_name)
def test_a_training_goes_on_from_its_checkpoint(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    main: Callable[..., Any],
    options: list[str],
) -> None:
    options = ["--data", str(data), "--batch-size", "4", "--disabled", *options]
    whole = main([*options, "--epochs", "2"])
    last = capsys.readouterr().out.splitlines()[-1].rpartition(", ")[0]  # without the seconds
    kept = [*options, "--checkpoint", str(tmp_path / "half.pt")]
    main([*kept, "--epochs", "1"])
    assert main([*kept, "--epochs", "2"]) == whole
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].rpartition(", ")[0] == last
    assert any(line.startswith("going on after epoch 1") for line in shown)
    assert main([*kept, "--epochs", "2"]) == whole  # nothing is left to do: measured again
    with pytest.raises(DataError, match="of other options"):
        main([*kept, "--epochs", "3", "--seed", "1"])


def test_no_checkpoint_is_a_start_and_a_broken_one_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    start = functools.partial(
        resume, args=argparse.Namespace(), model=model, optimizer=torch.optim.Adam(model.parameters())
    )
    assert start(None) == start(tmp_path / "none.pt") == 0
    (tmp_path / "broken.pt").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match="no readable checkpoint"):
        start(tmp_path / "broken.pt")


def test_wrong_data_is_one_line_and_status_2(
    data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "ud_ewt"
    folder.mkdir()
    for part in ("train", "dev", "test"):
        (folder / f"en_ewt-ud-{part}.conllu").write_text("1\tonly\tthree\n")
    for place, message in (
        (tmp_path, "conllu:1: expected 10 tab-separated columns, got 3"),
        (folder, "ud_ewt"),
    ):
        with pytest.raises(SystemExit) as left:
            run(lambda place=place: parser.main(["--data", str(place)]))
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_an_interrupt_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        run(interrupted)
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--epochs", "0"], "argument --epochs: at least 1, not 0"),
        (["--batch-size", "-3"], "argument --batch-size: at least 1, not -3"),
        (["--limit", "x"], "argument --limit: invalid positive value: 'x'"),
        (["--device", "abacus"], "argument --device: abacus: "),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    for main, _ in FILES:
        with pytest.raises(SystemExit) as left:
            main(option)
        assert left.value.code == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert shown.startswith("usage: ")


def test_values_of_options() -> None:
    assert positive("12") == 12
    assert device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError):
        device("cuda:99")
