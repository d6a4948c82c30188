"""Explanation: what batching did to a minibatch, as data and as a table."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fxbatch.caches import described
from fxbatch.on_demand import rich_console, rich_table, rich_text
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.reasons import MANY_SIGNATURES
from fxbatch.trace.minibatch import Statistics

NARROW = 110  # columns; below, the table has fewer


@dataclass
class OperationRow:
    """One row of the table of `explain`: an operation with the types that it met.

    Fields:
        operation: its name.
        signature: the operation with types and shapes of inputs and outputs, as text.
        rule: why it is an operation.
        location: your line that called it first, "model.py:31".
        calls: how often it was called, over all instances.
        steps: how many batched steps these calls became.
        launches: `steps`, or `calls` where it runs call by call.
        largest: how many calls the largest step has.
        batched: False where it runs call by call.
        compiled: what `compile=` made of it, or why nothing; "" without `compile=`.
        compile_seconds: how long that took.
        python: what of it runs in Python or calls torch although `native=True`, and why.
    """

    operation: str
    signature: str
    rule: str
    location: str
    calls: int = 0
    steps: int = 0
    launches: int = 0
    largest: int = 0
    batched: bool = True
    compiled: str = ""
    compile_seconds: float = 0.0
    python: str = ""


@dataclass
class UnbatchedRow:
    """An operation that runs call by call.

    Fields:
        signature: the operation with types and shapes of inputs and outputs, as text.
        reason: why it can't be batched.
        location: your line that called it first.
        calls: how often it was called, over all instances.
    """

    signature: str
    reason: str
    location: str
    calls: int


def describe_operations(phases: Sequence[Phase]) -> list[OperationRow]:
    """One row per signature, in order of first use."""
    rows: dict[Any, OperationRow] = {}
    for phase in phases:
        for s, n in zip(phase.plan.step_signature.tolist(), phase.plan.step_rows.tolist(), strict=True):
            compiled = phase.compiled[s]
            assert compiled is not None
            signature = compiled.signature
            if is_constant(signature):
                continue
            row = rows.get(signature)
            if row is None:
                row = rows[signature] = OperationRow(
                    signature.name,
                    str(signature),
                    signature.operation.rule,
                    signature.location,
                    batched=not compiled.reason,
                    compiled=describe_compiled(compiled),
                    python="; ".join(compiled.not_native),
                    compile_seconds=compiled.compile_seconds,
                )
            row.calls += n
            row.steps += 1
            row.launches += n if compiled.reason else 1
            row.largest = max(row.largest, n)
    return list(rows.values())


def _folded(rows: Sequence[OperationRow]) -> list[OperationRow]:
    """One row for all signatures of an operation on one line, where there are many, in place of the first."""
    groups: dict[tuple[str, str], list[OperationRow]] = {}
    for row in rows:
        groups.setdefault((row.operation, row.location), []).append(row)
    folded: list[OperationRow] = []
    for group in groups.values():
        if len(group) < MANY_SIGNATURES:
            folded += group
        else:
            calls, steps, launches = (
                sum(getattr(x, name) for x in group) for name in ("calls", "steps", "launches")
            )
            largest = max(x.largest for x in group)
            text = f"{len(group)} signatures, the first of them {group[0].signature}"
            folded.append(
                dataclasses.replace(
                    group[0], signature=text, calls=calls, steps=steps, launches=launches, largest=largest
                )
            )
    return folded


def describe_compiled(compiled: CompiledOperation) -> str:
    """The graphs of an operation that `compile=` compiled ("forward, backward"), and why others are not; or ""."""
    names = ", ".join(graph.name.rpartition(": ")[2] for graph in compiled.compiled)
    return "; ".join(x for x in (names, *(f"not {reason}" for reason in compiled.uncompiled)) if x)


@dataclass(repr=False)
class Explanation:
    """The result of `fxbatch.explain`: the operations of one minibatch, and how they were batched. Prints as a table.

    Fields:
        instances: how many instances the minibatch has.
        operations: a list with one `OperationRow` per signature.
        launches_before: how many calls there are, run one by one.
        launches_after: how many batched launches run instead.
        steps: how many batched steps; `launches_after` counts those that run call by call as often as they are called.
        lower_bound: the least number of steps that any order needs.
        ratio: `steps / lower_bound`.
        phases: 1, and one more for each time that all unfinished instances waited for a value.
        reasons: a list of why batching gains little here, if it does: phases, signatures, recording.
        advice: a list of what would help.
        unbatched: a list with one `UnbatchedRow` per operation that runs call by call.
        traced_through: submodules that were recorded by their parts, each with name, reason and location.
        deduplicated: how many calls, constants apart, were equal to others, and ran once with them.
        strategy: whether such minibatches are batched or run the plain loop, and why.
        packed: lines about forwards or submodules that run on tensors with sizes of their own.
        gathers_elided: inputs of steps that are read where they lie.
        gathers_indexed: inputs of steps that are copied together first.
        bytes_gathered: how many bytes these copies are.
        bytes_read: how many they would be if nothing were read where it lies.
        bytes_held: memory for values, at most.
        kept: how many plans and the like are kept for structures that come again, by kind.
        kept_bytes: about how many bytes these take.
        products: which library multiplies matrices, and why.
        statistics: counts of the phases, and the lines that asked for values.
        details: further lines for printing, as `fxbatch explain --verbose` does.

    Example:
        >>> for row in fxbatch.explain(model, sentences).operations:
        ...     print(row.signature, row.calls, row.launches)
        embed(i64[]) -> (f32[4]) 4 1
        cell(f32[4], f32[4]) -> (f32[4]) 4 3
    """

    instances: int
    operations: list[OperationRow]
    launches_before: int
    launches_after: int
    steps: int
    lower_bound: int
    gathers_indexed: int
    gathers_elided: int
    bytes_gathered: int
    packed: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_held: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    kept_bytes: int = 0
    deduplicated: int = 0
    unbatched: list[UnbatchedRow] = field(default_factory=list)
    traced_through: list[dict[str, Any]] = field(default_factory=list)
    phases: int = 1
    products: str = ""
    statistics: Statistics | None = None
    strategy: str = ""
    reasons: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Steps over the lower bound (the sum over signatures of the longest chain of its calls)."""
        return self.steps / self.lower_bound if self.lower_bound else 1.0

    @property
    def advice(self) -> list[str]:
        """Lines that say what would help."""
        found = [
            f"{row.signature} runs call by call ({row.calls} calls): {row.reason} ({row.location})"
            for row in self.unbatched
        ]
        by_operation: dict[str, int] = {}
        for row in self.operations:
            by_operation[row.operation] = by_operation.get(row.operation, 0) + 1
        found += [
            f"{name} has {count} signatures: calls with different shapes or plain arguments can't share a launch"
            for name, count in by_operation.items()
            if count > 4 and not any(f" signatures are of {name}: " in line for line in self.reasons)
        ]
        hint = self.statistics.hint() if self.statistics is not None else ""
        return found + ([hint] if hint and not any(hint in line for line in self.reasons) else [])

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        data = dataclasses.asdict(dataclasses.replace(self, statistics=None))
        del data["statistics"]
        if self.statistics is not None:
            data["suspended"] = [p.instances for p in self.statistics.phases]
            data["lines"] = dict(self.statistics.lines)
        return {**data, "ratio": self.ratio, "advice": self.advice}

    def __rich_console__(
        self, console: rich_console.Console, options: rich_console.ConsoleOptions
    ) -> rich_console.RenderResult:
        if self.reasons:
            yield rich_text.Text("\n".join(self.reasons))
        yield self._table(narrow=options.max_width < NARROW)
        yield rich_text.Text("\n".join(self._lines(narrow=options.max_width < NARROW)))

    def _repr_html_(self) -> str:
        """The table and the lines as a notebook shows them."""
        names = ("operation", "signature", "calls", "launches", "largest", "why an operation", "line")
        head = "".join(f"<th>{name}</th>" for name in names)
        rows = [
            (r.operation, r.signature, r.calls, r.launches, r.largest, r.rule, r.location)
            for r in _folded(self.operations)
        ]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
        )
        lines, details = ("<br>".join(map(html.escape, x)) for x in (self._lines(narrow=False), self.details))
        reasons = "".join(f"<p>{html.escape(line)}</p>" for line in self.reasons)
        return (
            f"{reasons}<table><caption>{html.escape(self._title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{lines}</p><details><summary>more</summary>{details}</details>"
        )

    @property
    def _title(self) -> str:
        return f"{self.instances} instances: {self.launches_before} launches one by one, {self.launches_after} batched"

    def _table(self, *, narrow: bool) -> rich_table.Table:
        """One row per signature. narrow: the line stands below the operation, and the rules below the table."""
        table = rich_table.Table(title=self._title, pad_edge=not narrow, padding=(0, 0 if narrow else 1))
        table.add_column("operation\nline" if narrow else "operation", overflow="fold")
        table.add_column("signature", ratio=1 if narrow else None, overflow="fold")
        for name in ("calls", "launches", "largest"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in () if narrow else ("why an operation", "line"):
            table.add_column(name, overflow="fold")
        for row in _folded(self.operations):
            name, rest = row.operation, [row.rule, row.location]
            if narrow:
                name, rest = f"{name}\n{row.location}", []
            cells = [name, row.signature, str(row.calls), str(row.launches), str(row.largest), *rest]
            table.add_row(*map(rich_text.Text, cells))
        return table

    def _lines(self, *, narrow: bool) -> list[str]:
        """The lines below the table."""
        waits = f"; {self.phases} phases, as instances waited for values" if self.phases > 1 else ""
        least = "no order needs fewer" if self.ratio == 1 else f"at least {self.lower_bound} in any order"
        lines = [f"{self.steps} batched launches, {least}{waits}", *self.packed]
        if narrow:
            why: dict[str, list[str]] = {}
            for row in self.operations:
                why.setdefault(row.rule, []).append(row.operation)
            lines += [
                f"why an operation: {', '.join(dict.fromkeys(names))}: {rule}" for rule, names in why.items()
            ]
        if self.deduplicated:
            lines += [
                f"deduplicated: {self.deduplicated} calls were equal to others, and are not in the table"
            ]
        lines += [
            f"recorded by its parts: {t['name']}: {t['reason']} ({t['location']})"
            for t in self.traced_through
        ]
        if any(row.compiled for row in self.operations):
            seconds = sum(row.compile_seconds for row in self.operations)
            lines.append(f"compiled in {seconds:.1f} s")
            lines += [f"compiled: {row.signature}: {row.compiled}" for row in self.operations if row.compiled]
        lines += [f"would help: {line}" for line in self.advice]
        if self.strategy:
            lines += [f"such minibatches run as {self.strategy}"]
        return [*lines, "the columns and the rules: docs/explain.md"]

    @property
    def details(self) -> list[str]:
        """Lines for who wants to know more: copies, memory, what runs in Python, which library multiplies.

        `fxbatch explain --verbose` prints them below the others.
        """
        lines = [
            f"inputs of launches: {self.gathers_elided} read in place, {self.gathers_indexed} copied "
            f"({self.bytes_gathered / 1e6:.1f} MB; {self.bytes_read / 1e6:.1f} if none were read in place)",
            f"memory for values: {self.bytes_held / 1e6:.1f} MB at most",
        ]
        if self.kept:
            kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(self.kept.items()))
            lines += [f"kept for structures that come again: {kinds} (about {self.kept_bytes / 1e6:.1f} MB)"]
        if self.products:
            lines += [f"products: {self.products}"]
        lines += [f"not in C: {row.signature}: {row.python}" for row in self.operations if row.python]
        return lines + described()

    def __str__(self) -> str:
        console = rich_console.Console(width=140, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __repr__(self) -> str:  # at a Python prompt
        return str(self)
