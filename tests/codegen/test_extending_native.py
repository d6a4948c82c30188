"""docs/extending-native.md, done: its row is added to a copy of the table, built, and runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fxbatch import ir
from fxbatch.codegen import native_calls, native_table
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_lower import records
from fxbatch.passes import gradients

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch, fxbatch

@fxbatch.operation
def wave(x):
    return torch.sin(x) * x

gain = torch.nn.Identity()

@fxbatch.autobatch
def forward(x):
    return wave(gain(x))

xs = torch.randn(5, 40)
with torch.no_grad():
    print([row.python for row in fxbatch.explain(forward, list(xs)).operations if "wave" in row.operation])
    torch.testing.assert_close(forward(list(xs)), torch.sin(xs) * xs)
"""


def run(folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    script = folder / "wave.py"  # a body is read in its source
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script)], env=environment, cwd=folder, capture_output=True,
                         text=True, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.skipif(extension is None or shutil.which("cc") is None, reason="no compiler here")
def test_a_row_of_the_table_is_a_native_operation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fxbatch", tmp_path / "fxbatch", ignore=shutil.ignore_patterns("__pycache__"))
    assert not any("sin.default" in x.aten for x in native_table.LOOPS), "the page would show nothing"
    row = re.search(r"^ *(Loop\(.*\))$", (ROOT / "docs" / "extending-native.md").read_text(), re.MULTILINE)
    assert row is not None
    codegen = tmp_path / "fxbatch" / "codegen"
    table = codegen / "native_table.py"
    table.write_text(table.read_text().replace("\n)\nROWS = (", f"\n    {row[1]},\n)\nROWS = ("))
    made: dict[str, object] = {"__name__": "native_table"}
    exec(compile(table.read_text(), str(table), "exec", dont_inherit=True), made)
    (codegen / "_native_operations.h").write_text(made["header"]())  # type: ignore[operator]  # a function
    built = codegen / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted(map(str, codegen.glob("_native*.c")))
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", include, *sources, "-lm", "-o", str(built)], check=True)
    assert run(tmp_path) == "['']", "nothing of it runs in Python"


def test_what_was_built_is_of_this_table() -> None:
    header = ROOT / "fxbatch" / "codegen" / "_native_operations.h"
    if header.exists():
        assert header.read_text() == native_table.header(), "build again: python setup.py build_ext --inplace"


def test_gathers_and_reads_of_gradients_have_the_numbers_of_the_passes() -> None:
    assert [*native_table.Gather] == [ir.VIEW, ir.BROADCAST, ir.INDEX]
    read = native_table.Read
    assert (read.NOTHING, read.READ_VIEW) == (gradients.NOTHING, gradients.GRADIENT_VIEW)
    assert (read.READ_INDEX, read.READ_SUM) == (gradients.GRADIENT_INDEX, gradients.GRADIENT_SUM)


@pytest.mark.skipif(extension is None, reason="the extension was not built")
@pytest.mark.parametrize("record", [native_table.Base, native_table.Instruction, native_table.Source])
def test_a_record_of_other_fields_is_refused(record: type) -> None:
    kinds = (native_table.Base, native_table.Instruction, native_table.Source)
    given = [
        np.zeros(1, [("a", "i8"), ("b", "i8")]) if kind is record else records(kind, ()) for kind in kinds
    ]
    with pytest.raises(TypeError, match="records of"):
        extension.Program(*given)


def test_each_operation_has_a_code_of_its_own() -> None:
    assert len(native_calls.CODES) == len(native_table.LOOPS) + len(native_table.ROWS)
    assert len(set(native_calls.CODES.values())) == len(native_calls.CODES)
