"""The forms as text, and the program back from its text.

Comes in: a Program, Schedule, BatchedGraph or Plan. Goes out: lines, one a signature, call or step.

    print_program(program)                  # str(program)
    parse_program(text)                     # placeholder operations, equal text
    parse_program(text, program.signatures) # the operations themselves

A program looks so; `s` numbers signatures, `v` values, `@` is the instance, `=` a payload:

    program instances=1
      s0 constant constant() -> (i64[])
      s1 function embed(i64[]) -> (f32[4])
      v0 = s0 constant() = 17 @0
      v1 = s1 embed(v0) @0
      return v1
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import FxbatchError
from fxbatch.ir import (
    Modes,
    Operation,
    Program,
    Schedule,
    SharedOperand,
    Signature,
    Slot,
    Template,
    TensorSpec,
    tensor_spec,
)
from fxbatch.ir import (
    print_plan as print_plan,
)
from fxbatch.ir import (
    step_text as step_text,
)
from fxbatch.signature import dtype_name, quoted, signature_text
from fxbatch.torch_private import tree_flatten

_VALUES = re.compile(r"v(\d+)")
_NAME = r"(\"(?:[^\"\\]|\\.)*\"|[^\s()\"=;@]+)"
_CALL = re.compile(rf"(?:((?:v\d+(?:, )?)+) = )?s(\d+) {_NAME}\(([v\d, ]*)\)(?: = (.*))? @(\d+)")


class ParseError(FxbatchError, ValueError):
    """A text is no program; the message shows the line and what was expected."""


def print_schedule(program: Program, schedule: Schedule) -> str:
    """One line a step: its signature, how many calls, which values they make."""
    lines = [f"schedule {schedule.policy} steps={len(schedule)} calls={len(schedule.order)}"]
    for k, calls in enumerate(schedule.steps()):
        made = ", ".join(_ranges([f"v{program.first_value[c]}" for c in calls[:8]], len(calls)))
        kinds = sorted({int(s) for s in program.sig[calls]})
        names = " | ".join(f"s{s} {quoted(program.signatures[s].name)}" for s in kinds) or "nothing"
        lines.append(f"  step {k}: {names} x{len(calls)}: {made}")
    return "\n".join(lines)


def _ranges(names: list[str], total: int) -> list[str]:
    return names if len(names) == total else [*names, f"... {total - len(names)} more"]


class _Static:
    """Static arguments of a parsed signature, kept as the text they were printed as."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def parse_program(text: str, signatures: Sequence[Signature] | None = None) -> Program:
    """The program that prints as `text`.

    Without `signatures`, operations are placeholders of the printed name and kind; payloads that the
    text does not show (tensors with dimensions) are zeros. ParseError names the offending line.
    """
    reader = _Reader(signatures)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                reader.read(line.strip())
            except (ValueError, KeyError, IndexError) as error:
                raise ParseError(f"line {number}: {error}\n    {line}") from error
    return reader.program()


class _Reader:
    """Reads a program line by line."""

    def __init__(self, given: Sequence[Signature] | None) -> None:
        self.given = given
        self.instances: int | None = None
        self.signatures: list[Signature] = []
        self.types: list[TensorSpec] = []
        self.known = 0
        self.sig: list[int] = []
        self.inputs: list[int] = []
        self.instance: list[int] = []
        self.constants: dict[int, list[Any]] = {}
        self.outputs: list[int] | None = None

    def read(self, line: str) -> None:
        if self.instances is None:
            found = re.fullmatch(r"program instances=(\d+)", line)
            if not found:
                raise ValueError("expected `program instances=N`")
            self.instances = int(found[1])
        elif line.startswith("known "):
            self.types = [parse_type(t) for t in re.findall(r"v\d+: ([^\]]*\](?:@[\w:]+)?)", line)]
            self.known = len(self.types)
        elif line == "return" or line.startswith("return "):
            self.outputs = [int(v) for v in _VALUES.findall(line)]
        elif re.match(r"s\d+ (constant|number|module|function|graph) \S", line):
            self._signature(line)
        else:
            self._call(line)

    def _signature(self, line: str) -> None:
        index, rest = line.split(" ", 1)
        if index != f"s{len(self.signatures)}":
            raise ValueError(f"expected signature s{len(self.signatures)}, got {index}")
        if self.given is not None:
            given = self.given[len(self.signatures)]
            if signature_text(given) != rest:
                raise ValueError(f"expected `{signature_text(given)}`, the signature given for {index}")
            self.signatures.append(given)
        else:
            self.signatures.append(_parse_signature(rest))

    def _call(self, line: str) -> None:
        found = _CALL.fullmatch(line)
        if not found:
            raise ValueError("expected `v2, v3 = s1 name(v0, v1) @0`")
        made, s = [int(v) for v in _VALUES.findall(found[1] or "")], int(found[2])
        if s >= len(self.signatures):
            raise ValueError(f"no signature s{s}")
        signature = self.signatures[s]
        if quoted(signature.name) != found[3]:
            raise ValueError(f"s{s} is {quoted(signature.name)}, not {found[3]}")
        expected = list(range(len(self.types), len(self.types) + len(signature.outputs)))
        if made != expected:
            raise ValueError(f"expected it to make {', '.join(f'v{v}' for v in expected)}")
        inputs = [int(v) for v in _VALUES.findall(found[4])]
        if len(inputs) != len(signature.inputs):
            raise ValueError(f"{signature.name} takes {len(signature.inputs)} inputs, got {len(inputs)}")
        self.sig.append(s)
        self.inputs.extend(inputs)
        self.instance.append(int(found[6]))
        self.types.extend(signature.outputs)
        if signature.operation.kind in ("constant", "number"):
            self.constants.setdefault(s, []).append(_payload(signature, found[5]))

    def program(self) -> Program:
        if self.instances is None or self.outputs is None:
            raise ParseError("expected a first line `program ...` and a last line `return ...`")
        known_types = None
        if self.known:
            types = list(dict.fromkeys(t for s in self.signatures for t in s.outputs))
            missing = [t for t in self.types[: self.known] if t not in types]
            if missing:
                raise ParseError(f"known values of type {missing[0]}, which no signature makes")
            known_types = np.array([types.index(t) for t in self.types[: self.known]], dtype=np.int32)
        return Program(
            tuple(self.signatures),
            np.array(self.sig, dtype=np.int32),
            np.array(self.inputs, dtype=np.int64),
            np.array(self.instance, dtype=np.int32),
            np.array(self.outputs, dtype=np.int64),
            self.constants,
            self.known,
            known_types,
            self.instances,
        )


def _payload(signature: Signature, text: str | None) -> Any:
    type_ = signature.outputs[0]
    if text is None:
        return torch.zeros(type_.shape, dtype=type_.dtype)
    if type_.dtype == torch.bool:
        number: Any = {"True": True, "False": False}[text]
    elif type_.dtype.is_complex:
        number = complex(text)
    else:
        number = float(text) if type_.dtype.is_floating_point else int(text)
    return number if signature.operation.kind == "number" else torch.tensor(number, dtype=type_.dtype)


def parse_type(text: str) -> TensorSpec:
    """`f32[4,5]@cuda:0` as a TensorSpec."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\](?:@([\w:]+))?", text)
    if not found:
        raise ValueError(f"no tensor type: {text}")
    return tensor_spec(
        tuple(int(n) for n in found[2].split(",") if n), _dtype(found[1]), torch.device(found[3] or "cpu")
    )


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _dtype(name: str) -> torch.dtype:
    if name not in _dtypes():
        raise ValueError(f"no dtype: {name}")
    return _dtypes()[name]


def _parse_signature(text: str) -> Signature:
    found = re.match(rf"(\w+) {_NAME}\(([^()]*)\) -> \(([^()]*)\)", text)
    if not found:
        raise ValueError("expected `s0 kind name(types) -> (types)`")
    fields = dict.fromkeys(("shared", "static", "modes", "reason"), "")
    rest, flags = text[found.end() :].strip(), []
    while rest:
        if match := re.match(r"(shared|static|modes|reason)=", rest):
            value, end = json.JSONDecoder().raw_decode(rest, match.end())
            fields[match[1]] = value
            rest = rest[end:].strip()
        else:
            flag, _, rest = rest.partition(" ")
            flags.append(flag)
    if unknown := [f for f in flags if f not in ("random", "identity")]:
        raise ValueError(f"unknown word {unknown[0]!r}")
    inputs, outputs = (_types(found[i]) for i in (3, 4))
    kind: Any = found[1]
    operation = Operation(
        json.loads(found[2]) if found[2].startswith('"') else found[2],
        kind, rule="parsed from text", random="random" in flags, identity="identity" in flags,
    )  # fmt: skip
    slots: list[Any] = [Slot("input", i) for i in range(len(inputs))]
    slots += [_Static(fields["static"])] if fields["static"] else []
    return Signature(
        operation, inputs, outputs,
        tuple(SharedOperand(None, n) for n in fields["shared"]),
        Template(tuple(slots), tree_flatten(tuple(slots))[1]),
        Template.of(tuple(Slot("output", i) for i in range(len(outputs)))),
        _parse_modes(fields["modes"]) if fields["modes"] else Modes(),
        reason=fields["reason"],
    )  # fmt: skip


def _types(text: str) -> tuple[TensorSpec, ...]:
    return tuple(parse_type(t) for t in re.findall(r"\w+\[[\d,]*\](?:@[\w:]+)?", text))


def _parse_modes(text: str) -> Modes:
    words = text.split()
    autocast = tuple((d, _dtype(t)) for d, t in re.findall(r"autocast\((\w+),(\w+)\)", text))
    default = re.search(r"default\((\w+)\)", text)
    return Modes(
        "train" in words, "no_grad" not in words, autocast, _dtype(default[1]) if default else torch.float32
    )
