"""`fb.compile`: a block that takes a minibatch.

In: a block (or block-like). Out: an nn.Module from a list of instances to batched results.

    model = fb.compile(fb.Map(fb.Scalar()) >> fb.Sum())
    model([[1, 2], [3, 4, 5]])          # tensor([ 3., 12.])

Source: Looks et al. 2017, section 3.1 (Compiler).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fxbatch.blocks.block import (
    Block,
    collected,
    collecting_metrics,
    convert_to_block,
    metrics_of,
    resolve,
    stack_metric,
)
from fxbatch.blocks.build import Run, walk
from fxbatch.blocks.record_builder import RecordBuilder, RowWriter
from fxbatch.blocks.typed import complain
from fxbatch.blocks.types import ResultType, TensorType, TupleType, VoidType
from fxbatch.decorator import autobatch
from fxbatch.runtime.autograd import take_results
from fxbatch.runtime.engine import is_traced
from fxbatch.runtime.options import Options
from fxbatch.runtime.results import Results, nest, separate, stack
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import current_recorder


class CompiledBlock(nn.Module):
    """A block over minibatches. Make it with `fb.compile`; `forward(instances)` takes a list of Python objects.

    Any other iterable of them is taken as well: a range, a generator, an array.

    `root` is the block, with its parameters. `forward` gives the root's output with tensors stacked on a new
    first dimension (`out="stack"`); with metrics in the block, `(output, metrics)`, and with
    `metric_labels=True` `(output, metrics, labels)`. metrics: name -> tensor [values, *shape] over all instances
    in order; labels: name -> list.
    """

    def __init__(self, root: Block, options: Options, metric_labels: bool) -> None:
        super().__init__()
        self.root = root
        self.options = options
        self.metric_labels = metric_labels
        self.has_metrics = bool(metrics_of(root))
        registered = [id(m) for m in root.modules()]
        declared = [m for m in walk(root) if isinstance(m, Block) and id(m) not in registered]
        self.declared = nn.ModuleList(
            m for m in declared if not any(_holds(d, m) for d in declared if d is not m)
        )
        self._local = _PerThread()

    @property
    def metric_types(self) -> dict[str, TensorType]:
        """The metrics: name -> type of one value."""
        return metrics_of(self.root)

    def run_instance(self, instance: Any) -> Any:
        """The root's output for one instance: rows of the recording that is going on, else tensors.

        With metrics, the pair of it and {name: (values, labels)}.
        """
        if not self.has_metrics:
            return self._run(instance)
        with collecting_metrics() as found:
            return self._run(instance), found

    def _run(self, instance: Any) -> Any:
        recorder = current_recorder()
        if recorder is None or not recorder.knowledge.roots or recorder.knowledge.roots[0] is not self:
            return self.root(instance)
        run, wrap = self._local.direct(self, recorder)
        tape = self._local.tape
        tape.attach(recorder)
        try:
            return wrap(run(instance))
        finally:
            tape.pause()

    def call_with_metrics(self, instances: Any) -> Any:
        """`forward` of a block with metrics."""
        batched = type(self).forward.__fxbatch__  # type: ignore[attr-defined]  # made by compile
        engine, split = batched.engine(self), batched.split(self, (instances,), {})
        run = engine.execution()
        recording = engine.record(batched.fn, split, run)
        outputs = [r[0] for r in recording.results]
        found = {name: _collect(recording.results, name) for name in self.metric_types}
        results = Results(outputs)
        ids = [v.id for values, _ in found.values() for v in values]
        values = np.array(list(dict.fromkeys([*results.values.tolist(), *ids])), dtype=np.int64)
        renumber = run.finish(recording.pending_program(values), values)
        asked = {n: [v.id for v in vs] for n, (vs, _) in found.items() if vs}
        metrics = {n: stack_metric(t, [], self.root.device) for n, t in self.metric_types.items()}

        def take(requests: list[np.ndarray]) -> list[torch.Tensor]:
            extra = [renumber(np.array(i, dtype=np.int64)) for i in asked.values()]
            rows = take_results(run, [*requests, *extra])
            metrics.update(zip(asked, rows[len(requests) :], strict=True))
            return rows[: len(requests)]

        if self.options.out == "stack":
            output = stack(results, renumber, take)
        else:
            output = separate(results, renumber, take)
            output = nest(output) if self.options.out == "nested" else output
        labels = {n: ls for n, (_, ls) in found.items()}
        return (output, metrics, labels) if self.metric_labels else (output, metrics)

    def empty(self) -> Any:
        """The result for no instances: tensors [0, *shape] of the root's types."""
        t, device = self.root.output_type, self.root.device
        assert t is not None
        output = _empty(t, device)
        if not self.has_metrics:
            return output
        metrics = {n: stack_metric(m, [], device) for n, m in self.metric_types.items()}
        return (output, metrics, {n: [] for n in metrics}) if self.metric_labels else (output, metrics)

    def extra_repr(self) -> str:
        return f"{self.root.input_type!r} -> {self.root.output_type!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_local", "_fxbatch_engines")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = _PerThread()

    def __reduce__(self) -> Any:
        return _rebuild, (self.options,), self.__getstate__()


def _empty(t: ResultType, device: torch.device) -> Any:
    if isinstance(t, TupleType):
        return tuple(_empty(x, device) for x in t.items)
    return stack_metric(t, [], device) if isinstance(t, TensorType) else None


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(m is part for m in module.modules())


def _collect(results: list[Any], name: str) -> tuple[list[Any], list[Any]]:
    """The values and labels of a metric over all instances, in order."""
    found = [r[1].get(name, ([], [])) for r in results]
    return [v for values, _ in found for v in values], [x for _, labels in found for x in labels]


class _PerThread(threading.local):
    """The tape of this thread, and the root as a function over it, for the modes and parameters of now."""

    def __init__(self) -> None:
        self.tape = RowWriter()
        self.recorder: Recorder | None = None
        self.made: tuple[Run, Run] | None = None
        self.runs: dict[Any, tuple[Run, Run]] = {}
        self.table: Any = None

    def direct(self, compiled: CompiledBlock, recorder: Recorder) -> tuple[Run, Run]:
        """The function from an instance to handles, and the one from handles to Values."""
        if recorder is self.recorder and self.made is not None:
            return self.made
        if self.table is not recorder.table:
            self.table, self.runs = recorder.table, {}
        key = (recorder.modes(), _state_of(compiled))
        made = self.runs.get(key)
        if made is None:
            if len(self.runs) > 16:
                self.runs.clear()
            to = RecordBuilder(self.tape, recorder.table)
            assert compiled.root.output_type is not None
            metrics = compiled.has_metrics
            run = compiled.root.runnable(to)
            made = self.runs[key] = (run, self._wrapper(to, compiled, metrics))
        self.recorder, self.made = recorder, made
        return made

    def _wrapper(self, to: RecordBuilder, compiled: CompiledBlock, metrics: bool) -> Run:
        t = compiled.root.output_type
        assert t is not None
        wrap = _wrap(to, t, compiled.root.device)
        if not metrics:
            return wrap
        wraps = {n: _wrap(to, m, compiled.root.device) for n, m in compiled.metric_types.items()}

        def both(x: Any) -> Any:
            for name, (values, _) in (collected.get() or {}).items():
                values[:] = [wraps[name](v) for v in values]
            return wrap(x)

        return both


def _wrap(to: RecordBuilder, t: ResultType, device: torch.device) -> Run:
    """From handles of a type to Values."""
    if isinstance(t, TensorType):
        type_id = to.table.constant(to.type_of(t, device)).types[0]
        tape = to.tape
        return lambda n: tape.recorder.value(n, type_id)  # type: ignore[union-attr]  # attached while it runs
    if isinstance(t, TupleType):
        items = [_wrap(to, x, device) for x in t.items]
        return lambda x: tuple([item(y) for item, y in zip(items, x, strict=True)])
    return lambda x: None


def _state_of(module: nn.Module) -> tuple[Any, ...]:
    """The state that templates depend on, besides modes: training flags, hooks, shapes and dtypes of parameters."""
    return tuple(
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        + tuple(
            (n, p.shape, p.dtype, p.device, p.requires_grad)
            for n, p in m._parameters.items()
            if p is not None
        )
        for m in module.modules()
    )


@functools.lru_cache(maxsize=256)
def _class_of(options: Options) -> type[CompiledBlock]:
    """CompiledBlock with a forward that is decorated with these options."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    batched = autobatch(**given)(CompiledBlock.run_instance)

    @functools.wraps(batched)
    def forward(self: CompiledBlock, instances: Any) -> Any:
        if current_recorder() is None:
            instances = _listed(instances)
        if isinstance(instances, (list, tuple)) and not instances and options.out == "stack":
            return self.empty()
        if self.has_metrics and current_recorder() is None:
            return self.call_with_metrics(instances)
        return batched(self, instances)

    return type("CompiledBlock", (CompiledBlock,), {"forward": forward, "__module__": __name__})


def _listed(instances: Any) -> Any:
    """The instances of a range, a generator, an array, ... as a list; other minibatches are taken as they are."""
    taken = (list, tuple, torch.Tensor, str, bytes, Mapping)
    if isinstance(instances, taken) or is_traced(instances) or not isinstance(instances, Iterable):
        return instances
    return list(instances)


def _rebuild(options: Options) -> CompiledBlock:
    cls = _class_of(options)
    return cls.__new__(cls)


def compile(block_like: Any, *, metric_labels: bool = False, **options: Any) -> CompiledBlock:
    """An nn.Module that runs a block on a minibatch (the paper's Compiler); options as for `@autobatch`.

    Settles and checks all types: the root's input is a Python object when nothing says otherwise; its output
    must be made of tensors (a tensor, a tuple of them, nested), or be VoidType when there are metrics. Sequences
    and Python objects can't be stacked: pipe them into a reduction, a Metric, or Void().

    Raises BlockTypeError, OptionError.

    >>> model = compile(Map(Scalar()) >> Sum())
    >>> model([[1, 2], [3, 4, 5], []])
    tensor([ 3., 12.,  0.])
    """
    root = convert_to_block(block_like)
    resolve(root)
    metrics = metrics_of(root)
    t = root.output_type
    assert t is not None
    wrong = _first_unstackable(t)
    if wrong is not None:
        raise complain(
            root,
            f"a compiled block's output is made of tensors, but the root gives {t!r}, with {wrong!r} in it: "
            "reduce it, collect it with Metric, or drop it with Void()",
        )
    if not metrics and not any(isinstance(x, TensorType) for x in t.terminal_types()):
        raise complain(
            root, f"a compiled block gives tensors or metrics, but the root gives {t!r} and has no Metric"
        )
    return _class_of(Options.of(**options))(root, Options.of(**options), metric_labels)


def _first_unstackable(t: ResultType) -> ResultType | None:
    if isinstance(t, TupleType):
        return next((w for w in map(_first_unstackable, t.items) if w is not None), None)
    return None if isinstance(t, (TensorType, VoidType)) else t
