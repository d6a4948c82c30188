"""Text of the forms: what it looks like, that it reads back, and what is said about lines that don't."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given

from fxbatch.ir import Modes, Operation, Program, SharedOperand, Signature, Slot, Template, tensor_spec
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.schedule import batch_by_agenda
from fxbatch.text import ParseError, parse_program, parse_type, print_plan, print_schedule
from fxbatch.verify import verify_program
from tests.programs import F4, ProgramBuilder, programs, tree_lstm_program

TEXT = """program instances=1
  s0 constant constant() -> (i64[])
  s1 function embed(i64[]) -> (f32[4])
  s2 function leaf(f32[4]) -> (f32[4], f32[4])
  s3 function cell(f32[4], f32[4], f32[4], f32[4]) -> (f32[4], f32[4])
  s4 function out(f32[4]) -> (f32[4])
  v0 = s0 constant() = 7 @0
  v1 = s1 embed(v0) @0
  v2, v3 = s2 leaf(v1) @0
  v4 = s0 constant() = 8 @0
  v5 = s1 embed(v4) @0
  v6, v7 = s2 leaf(v5) @0
  v8, v9 = s3 cell(v2, v3, v6, v7) @0
  v10 = s4 out(v8) @0
  return v10"""


def test_a_tree_as_text() -> None:
    assert str(tree_lstm_program([(7, 8)])) == TEXT
    assert str(parse_program(TEXT)) == TEXT


@given(programs())
def test_text_reads_back(program: Program) -> None:
    text = str(program)
    for parsed in (parse_program(text), parse_program(text, program.signatures)):
        verify_program(parsed)
        assert str(parsed) == text
        for name in ("sig", "inputs", "instance", "outputs"):
            assert getattr(parsed, name).tolist() == getattr(program, name).tolist()
    assert parse_program(text, program.signatures).signatures == program.signatures


def test_everything_a_signature_says_reads_back() -> None:
    device = torch.device("cuda", 1)
    kinds = (
        F4,
        tensor_spec((2, 3), torch.bfloat16, device),
        tensor_spec((), torch.bool, torch.device("cpu")),
    )
    modes = Modes(True, False, (("cpu", torch.bfloat16),), torch.float64)
    shared = (SharedOperand(None, "weight", torch.zeros(1)), SharedOperand(None, "a.bias", torch.zeros(1)))
    arguments = Template.of(((Slot("input", 0), 0.5, "sum", None), {"dim": -1}))
    signature = Signature(
        Operation('odd name ("x")', "module", None, random=True, identity=True),
        kinds, kinds, shared, arguments, None, modes, reason='it says "no"',
    )  # fmt: skip
    build = ProgramBuilder()
    text = str(dataclasses.replace(build.program(), signatures=(signature,)))
    assert "f32[4], bf16[2,3]@cuda:1, b8[]" in text
    for word in ("shared=", "static=", "modes=", " random", " identity", "reason="):
        assert word in text
    parsed = parse_program(text)
    assert str(parsed) == text
    got = parsed.signatures[0]
    assert (got.name, got.inputs, got.outputs, got.modes) == (signature.name, kinds, kinds, modes)
    assert got.operation.random and got.operation.identity and got.reason == signature.reason


def test_numbers_and_small_constants_are_shown() -> None:
    build = ProgramBuilder()
    values = [
        build.constant(p)
        for p in (3, -1.5, float("inf"), float("nan"), torch.tensor(True), torch.tensor(2.5), torch.zeros(3))
    ]
    text = str(build.program(*values))
    for shown in ("= 3 @0", "= -1.5 @0", "= inf @0", "= nan @0", "= True @0", "= 2.5 @0"):
        assert shown in text
    assert str(parse_program(text)) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  v10 = s4 out(v8)", r"line 14: expected `v2, v3 = s1 name\(v0, v1\) @0`"),
        ("  v10 = s9 out(v8) @0", "no signature s9"),
        ("  v10 = s4 embed(v8) @0", "s4 is out, not embed"),
        ("  v10 = s4 out(v8, v9) @0", "out takes 1 inputs, got 2"),
        ("  v11 = s4 out(v8) @0", "expected it to make v10"),
        ("  s5 function out(f33[4]) -> (f32[4])", "no dtype: f33"),
        ("  s7 function out(f32[4]) -> (f32[4])", "expected signature s5, got s7"),
        ("  s5 function out(f32[4]) -> (f32[4]) randon", "unknown word 'randon'"),
    ],
)
def test_lines_that_are_no_program(line: str, message: str) -> None:
    lines = TEXT.splitlines()
    lines[13] = line
    with pytest.raises(ParseError, match=message) as caught:
        parse_program("\n".join(lines))
    assert line in str(caught.value)


def test_texts_that_are_no_program() -> None:
    with pytest.raises(ParseError, match="expected `program instances=N`"):
        parse_program("v0 = s0 f() @0")
    with pytest.raises(ParseError, match=r"a last line `return \.\.\.`"):
        parse_program("program instances=1")
    with pytest.raises(ParseError, match="the signature given for s1"):
        parse_program(TEXT, parse_program(TEXT.replace("embed", "other")).signatures)
    with pytest.raises(ValueError, match="no tensor type: f32"):
        parse_type("f32")


def test_schedule_and_plan_as_text() -> None:
    program = tree_lstm_program([(7, 8)])
    schedule = batch_by_agenda(program)
    assert print_schedule(program, schedule).splitlines() == [
        "schedule agenda steps=5 calls=8",
        "  step 0: s0 constant x2: v0, v4",
        "  step 1: s1 embed x2: v1, v5",
        "  step 2: s2 leaf x2: v2, v6",
        "  step 3: s3 cell x1: v8",
        "  step 4: s4 out x1: v10",
    ]
    plan = plan_arenas(program, schedule, [None] * len(program.signatures))
    lines = print_plan(plan, program.signatures).splitlines()
    assert lines[0] == "plan arenas=2 steps=5 indices=0"
    assert lines[4] == "  step 1: s1 embed x2 (a0 view 0:2) -> a1[0:2]"
    assert lines[6].startswith("  step 3: s3 cell x1 (a1 view 2:3, a1 view 4:5, a1 view 3:4, a1 view 5:6)")


def test_long_schedules_are_cut() -> None:
    program = tree_lstm_program([random.Random(0).randrange(9) for _ in range(20)])
    assert "... 12 more" in print_schedule(program, batch_by_agenda(program))
