"""An operation graph through Inductor, or another backend of torch.compile: a CompiledGraph, called as a Kernel is.

In: an operation graph `(n, *ins) -> outs`. Out: the same for any number of rows, compiled once, the whole graph;
results are written to the memory that the caller gives (arena rows), as the compiled code's last act.

    compiled = compile_graph(graphs.forward, kernel, CompileOptions("inductor"), shared)
    compiled(n, (*groups, *shared), (h, c), workspace)

Inductor is called without Dynamo: an operation graph is ATen already, its one dynamic size is n, and what Dynamo's
guards check is in the signature. Any other backend goes through torch.compile itself. docs/compiled.md has more.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.kernel import Kernel, Workspace
from fxbatch.codegen.shapes import Shape, is_tensor, is_view, shape
from fxbatch.errors import CompileWarning
from fxbatch.torch_private import compile_symbolic, find_backend, inductor_mode_options
from fxbatch.trace.torch_patches import patching

aten = torch.ops.aten
Backend = str | Callable[..., Any]
GraphRun = Callable[[list[Any]], Any]  # on (n, *outs, *ins), or (n, *ins) where results are returned
RECOMPILE_LIMIT = 8
_OURS = ("recompile_limit", "dynamic", "fullgraph")  # options that are not handed on
_ROWS = (61, 64, 2, 1)  # numbers of rows at which a compiled graph is compared with the kernel
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float64: 1e-10, torch.complex128: 1e-10}


class NotCompilable(Exception):
    """This operation graph can't go through the backend; the message says why."""


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile is told: the backend and its options (`mode`, `options`, or Inductor's own).

    recompile_limit: how often one graph may be compiled again because rows broke an assumption. rest: compile only
    what has no native program.
    """

    backend: Backend = "inductor"
    given: tuple[tuple[str, Any], ...] = ()
    rest: bool = False

    @staticmethod
    def of(compile: bool | Backend, given: Sequence[tuple[str, Any]] = ()) -> CompileOptions | None:
        """The options of `compile=` and `compile_options=`; None where nothing is to be compiled."""
        if compile is False:
            return None
        rest = isinstance(compile, str) and compile == "auto"
        return CompileOptions("inductor" if compile is True or rest else compile, tuple(given), rest)

    @property
    def limit(self) -> int:
        return int(dict(self.given).get("recompile_limit", RECOMPILE_LIMIT))

    def patches(self) -> dict[str, Any]:
        """Inductor's configuration: of the mode, of `options`, and of what is no word of torch.compile."""
        given = self.backend_options()
        mode = inductor_mode_options(given.pop("mode", None))
        return {key.replace("-", "_"): value for key, value in {**mode, **given}.items()}

    def backend_options(self) -> dict[str, Any]:
        """What is passed through to the backend."""
        given = {k: v for k, v in self.given if k not in _OURS}
        return {**dict(given.pop("options", None) or ()), **given}


@dataclass(frozen=True, eq=False)
class InputForm:
    """Shape for any number of rows, dtype and device of an input or result."""

    sizes: Shape
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(node: fx.Node) -> InputForm:
        value = node.meta["values"][0]
        if not is_tensor(node) or value.layout is not torch.strided:
            raise NotCompilable(f"{node.name} is no dense tensor")
        if any(a not in (0, 1) or (a and b) for a, b in shape(node)):
            raise NotCompilable(f"{node.name} has a size that is neither fixed nor the number of rows")
        return InputForm(shape(node), value.dtype, value.device)

    def empty(self, n: int) -> torch.Tensor:
        return torch.empty([n if a else b for a, b in self.sizes], dtype=self.dtype, device=self.device)

    def filled(self, n: int, seed: int) -> torch.Tensor:
        """Numbers between 0 and 1, the same each time; integers and bools are 0 or 1."""
        gen, made = torch.Generator().manual_seed(seed), self.empty(n)
        if made.is_floating_point() or made.is_complex():
            wide = torch.complex128 if made.is_complex() else torch.float64
            return made.copy_(torch.rand(made.shape, generator=gen, dtype=wide))
        return made.copy_(torch.randint(0, 2, made.shape, generator=gen))


@dataclass(eq=False)
class CompiledGraph:
    """`compiled(n, ins, outs, workspace) -> list of results`, as a Kernel; counted.

    Results for which nobody ever gives memory (`returning`: gradients of parameters) are the compiled code's own.
    """

    name: str
    kernel: Kernel  # the uncompiled one: the fallback, and the reference of the check
    module: fx.GraphModule  # (n, *outs, *ins) -> (), results written to outs; or (n, *ins) -> results
    options: CompileOptions
    ins: tuple[InputForm, ...]  # of those with rows: shared operands come behind them
    outs: tuple[InputForm, ...]
    random: bool = False
    returning: bool = False
    compilations: int = 0
    seconds: float = 0.0
    gave_up: bool = False
    _entries: list[tuple[GraphRun, Callable[[int], bool]]] = field(default_factory=list)
    _by_rows: dict[int, GraphRun] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return self.kernel.source

    @property
    def launches(self) -> int:
        return self.kernel.launches

    @property
    def recompilations(self) -> int:
        """Compilations after the first."""
        return max(0, self.compilations - 1)

    def __call__(
        self,
        n: int,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor | None],
        workspace: Workspace,
    ) -> list[torch.Tensor]:
        rows = len(self.ins)
        run = None if n == 0 else self._by_rows.get(n) or self._find(n, ins[rows:])
        if run is None:
            return self.kernel(n, ins, outs, workspace)
        own = [x if x.is_contiguous() else x.contiguous() for x in ins[:rows]]
        if self.returning:
            found = run([n, *own, *ins[rows:]])
            return [y if x is None else x.copy_(y) for x, y in zip(outs, found, strict=True)]
        made = [form.empty(n) if x is None else x for form, x in zip(self.outs, outs, strict=True)]
        run([n, *made, *own, *ins[rows:]])
        return made

    def _find(self, n: int, shared: Sequence[torch.Tensor]) -> GraphRun | None:
        """The compiled code that fits n rows; compiles again while the limit allows, else None."""
        found = next((run for run, fits in self._entries if fits(n)), None)
        if found is None and not self.gave_up:
            if self.recompilations >= self.options.limit:
                self._give_up(f"compiled again {self.recompilations} times (recompile_limit)")
                return None
            try:
                found = self.compile(n, shared)
            except Exception as error:  # noqa: BLE001 compilers raise anything; the warning says what
                self._give_up(first_line(error))
        if found is not None:
            if len(self._by_rows) >= 4096:
                self._by_rows.clear()
            self._by_rows[n] = found
        return found

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        warn_uncompiled(self.name, reason)

    def compile(self, n: int, shared: Sequence[torch.Tensor]) -> GraphRun:
        """Compile for n rows and all numbers of rows that are like it. Raises what the backend raises."""
        start = time.perf_counter()
        with patching, torch.no_grad(), torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own use of torch.jit
            if self.options.backend == "inductor":
                run, fits = self._through_inductor(n, shared)
            else:
                run, fits = self._through_dynamo(), lambda count: True
        self.compilations += 1
        self._entries.append((run, fits))
        self.seconds += time.perf_counter() - start
        return run

    def _through_inductor(
        self, n: int, shared: Sequence[torch.Tensor]
    ) -> tuple[GraphRun, Callable[[int], bool]]:
        given = self.ins if self.returning else (*self.outs, *self.ins)
        samples = [form.filled(n, seed) for seed, form in enumerate(given)]
        dynamic = [[bool(a) for a, _ in form.sizes] for form in given] + [[False] * t.dim() for t in shared]
        patches = {
            "fallback_random": self.random,
            "assert_indirect_indexing": False,
            **self.options.patches(),
        }
        run, fits = compile_symbolic(self.module, [*samples, *shared], dynamic, n, patches)
        reads_n = any(map(any, dynamic)) or next(iter(self.module.graph.nodes)).users
        return run, fits if reads_n else lambda count: True

    def _through_dynamo(self) -> GraphRun:
        """torch.compile with the backend that was asked for; each of its compilations is counted."""
        name = self.options.backend
        backend = find_backend(name) if isinstance(name, str) else name
        options = self.options.backend_options()

        def counting(graph: fx.GraphModule, examples: Any) -> Any:
            self.compilations += 1
            return backend(graph, examples, **options)

        self.compilations -= 1  # `compile` counts the first too
        compiled = torch.compile(self.module.forward, backend=counting, dynamic=True, fullgraph=True)
        # Parameters as plain tensors: Dynamo compiles again for another class.
        return lambda args: compiled(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))

    def check(self, shared: Sequence[torch.Tensor]) -> None:
        """Compare with the uncompiled kernel at several numbers of rows. Raises NotCompilable."""
        nothing = [None] * len(self.outs)
        for n in () if self.random else _ROWS:
            ins = [*(form.filled(n, seed) for seed, form in enumerate(self.ins)), *shared]
            wanted = self.kernel(n, ins, nothing, Workspace())
            for i, (a, b) in enumerate(zip(self(n, ins, nothing, Workspace()), wanted, strict=True)):
                _compare(a, b, f"result {i} at {n} rows")


def compile_graph(
    module: fx.GraphModule,
    kernel: Kernel,
    options: CompileOptions,
    shared: Sequence[torch.Tensor],
    *,
    name: str = "operation",
    random: bool = False,
    returning: bool = False,
) -> CompiledGraph:
    """Compile a graph whose last inputs are `shared`. Raises NotCompilable or the backend's error."""
    places = [x for x in module.graph.nodes if x.op == "placeholder"][1:]
    results = list(module.graph.output_node().args[0])
    ins = tuple(map(InputForm.of, places[: len(places) - len(shared)]))
    outs = tuple(map(InputForm.of, results))
    ends = with_ends(module, writing=not returning)
    compiled = CompiledGraph(name, kernel, ends, options, ins, outs, random, returning)
    start = time.perf_counter()
    with patching:  # Dynamo traces when it is called first
        compiled.compile(_ROWS[0], shared)
        compiled.check(shared)
    compiled.seconds = time.perf_counter() - start  # Dynamo compiles in the first call, not before
    return compiled


def with_ends(module: fx.GraphModule, *, writing: bool) -> fx.GraphModule:
    """`(n, *ins) -> outs` with results that share no memory with an input.

    writing: `(n, *outs, *ins) -> ()`, results are copied to the memory that is given for them.
    """
    graph = fx.Graph()
    places = [x for x in module.graph.nodes if x.op == "placeholder"]
    results = list(module.graph.output_node().args[0])
    known: dict[fx.Node, fx.Node] = {places[0]: graph.placeholder("n")}
    outs = [graph.placeholder(f"out{i}") for i in range(len(results) if writing else 0)]
    for node in module.graph.nodes:
        if node not in known and node.op != "output":
            known[node] = graph.node_copy(node, lambda x: known[x])
    for out, node in zip(outs, results, strict=writing):
        graph.call_function(aten.copy_.default, (out, known[node]))
    copied = [graph.call_function(aten.clone.default, (known[x],)) if _reads_input(x) else known[x]
              for x in results if not writing]  # fmt: skip
    graph.output(tuple(copied))
    graph.lint()
    return fx.GraphModule(module, graph, "Writing" if writing else "Returning")


def _reads_input(node: fx.Node) -> bool:
    """Whether a result may share memory with an input: it is one, or views lead to one."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # the viewed node
    return node.op != "call_function"


def warn_uncompiled(name: str, reason: str) -> None:
    """Say that a graph runs uncompiled, and why."""
    warnings.warn(f"{name} runs uncompiled: {reason}", CompileWarning, stacklevel=2)


def first_line(error: BaseException) -> str:
    """An exception in one line: its first, and the second where the first only introduces it."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _compare(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    if b.is_floating_point() or b.is_complex():
        tolerance, wide = _TOLERANCE.get(b.dtype, 2e-5), torch.promote_types(b.dtype, torch.float64)
        x, y = a.to(wide), b.to(wide)
        finite = y.abs()[torch.isfinite(y)]
        scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
        same = torch.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    else:
        same = torch.equal(a, b)
    if not same:
        raise NotCompilable(f"{what} differs from the uncompiled graph")
