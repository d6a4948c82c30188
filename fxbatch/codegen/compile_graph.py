"""An operation graph through torch.compile or Inductor: a CompiledGraph, called as a Kernel is.

In: an operation graph `(n, *ins) -> outs`. Out: the same for any number of rows, compiled once: results are
written straight to the memory that the caller gives (arena rows), as the compiled code's last act.

    compiled = compile_graph(graphs.forward, CompileOptions("inductor"), shared=2)
    compiled(n, (*groups, *shared), (h, c), workspace)
    print(compiled.recompilations, compiled.seconds)

`inductor` is called without Dynamo: an operation graph is ATen already, its one dynamic size is n, and what
Dynamo's guards check is in the signature. It compiles what is between the products (`cut_at_products`), unless it
was told to tune them (`max_autotune`). docs/compiled.md has the measurements. Any other backend goes through
torch.compile itself.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.cut_at_products import Cut, Region, Uncuttable, cut_at_products
from fxbatch.codegen.fast_pointwise import FAST_POINTWISE
from fxbatch.codegen.kernel_calls import is_view
from fxbatch.codegen.kernels import Form, Kernel, Workspace, no_rows, result_forms
from fxbatch.codegen.sizes import Shape, is_tensor, shape
from fxbatch.codegen.staged import emit_staged
from fxbatch.errors import CompileWarning
from fxbatch.torch_private import compile_symbolic, find_backend, inductor_mode_options
from fxbatch.trace.patch import patching

aten = torch.ops.aten
Backend = str | Callable[..., Any]
Run = Callable[[list[Any], Workspace], Any]
RECOMPILE_LIMIT = 8
ANY_ROWS = 1 << 31  # the length of an arena in a graph that gathers: what is compiled holds for every length
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
        given = dict(self.given)
        inner = dict(given.pop("options", None) or ())
        mode = inductor_mode_options(given.pop("mode", None))
        for word in ("recompile_limit", "dynamic", "fullgraph"):
            given.pop(word, None)
        return {key.replace("-", "_"): value for key, value in {**mode, **inner, **given}.items()}

    def backend_options(self) -> dict[str, Any]:
        """What is passed through to a backend other than Inductor."""
        given = {k: v for k, v in self.given if k not in ("recompile_limit", "dynamic", "fullgraph")}
        return {**dict(given.pop("options", None) or ()), **given}


@dataclass(eq=False)
class CompiledGraph:
    """`compiled(n, ins, outs, workspace) -> list of results`, as a Kernel; counted."""

    name: str
    graph: fx.GraphModule  # (n, *ins) -> results
    module: fx.GraphModule  # (n, *outs, *ins) -> (), results written to outs; or (n, *ins) -> results
    cut: Cut | None  # the graph in stages; None: it is compiled whole
    kernel: Kernel  # the uncompiled one: the fallback, and the reference of the check
    options: CompileOptions
    forms: tuple[Form, ...]
    sizes: tuple[Shape, ...]
    row_inputs: int  # how many of the inputs have rows: the others are shared operands
    random: bool = False
    returning: bool = False  # results are the compiled code's own: nobody gives memory for them
    compilations: int = 0
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    gave_up: bool = False
    _entries: list[tuple[Run, Callable[[int], bool]]] = field(default_factory=list)
    _by_rows: dict[int, Run] = field(default_factory=dict)

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
        if n == 0:
            return no_rows(outs, self.forms)
        run = self._by_rows.get(n)
        if run is None:
            run = self._find(n, ins)
        if run is None:
            return self.kernel(n, ins, outs, workspace)
        rows = self.row_inputs
        own = [x if x.is_contiguous() else x.contiguous() for x in ins[:rows]]
        if self.returning and self.cut is None:
            found = run([n, *own, *ins[rows:]], workspace)
            return [y if x is None else x.copy_(y) for x, y in zip(outs, found, strict=True)]
        made = [x if x is not None else self._allocate(i, n) for i, x in enumerate(outs)]
        run([n, *made, *own, *ins[rows:]], workspace)
        return made

    def _allocate(self, i: int, n: int) -> torch.Tensor:
        _, dtype, device, _ = self.forms[i]
        return torch.empty([a * n + b for a, b in self.sizes[i]], dtype=dtype, device=device)

    def _find(self, n: int, ins: Sequence[torch.Tensor]) -> Run | None:
        """The compiled code that fits n rows; compiles again while the limit allows, else None."""
        found = next((run for run, fits in self._entries if fits(n)), None)
        if found is None and not self.gave_up:
            if self.recompilations >= self.options.limit:
                self._give_up(f"compiled again {self.recompilations} times (recompile_limit)")
                return None
            try:
                found = self.compile(n, ins[self.row_inputs :])
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

    def compile(self, n: int, shared: Sequence[torch.Tensor]) -> Run:
        """Compile for n rows and all numbers of rows that are like it. Raises what the backend raises."""
        start = time.perf_counter()
        run: Run
        with patching, torch.no_grad(), torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own use of torch.jit
            if self.options.backend != "inductor":
                run, fits = self._through_dynamo(), lambda count: True
            elif self.cut is not None:
                run, fits = self._in_stages(self.cut, n, shared)
            else:
                whole, fits = self._through_inductor(self.module, *self._samples(n, shared), n)
                run = lambda args, workspace: whole(args)  # noqa: E731
        self.compilations += 1
        self._entries.append((run, fits))
        self.seconds += time.perf_counter() - start
        return run

    def _through_inductor(
        self,
        module: fx.GraphModule,
        samples: Sequence[torch.Tensor],
        dynamic: list[list[bool | None]],
        n: int,
    ) -> tuple[Callable[[list[Any]], Any], Callable[[int], bool]]:
        patches = {"fallback_random": self.random, **self.options.patches()}
        patches.setdefault("assert_indirect_indexing", False)
        run, fits, file = compile_symbolic(module, samples, dynamic, n, patches, FAST_POINTWISE, ANY_ROWS)
        self.files += [file] if file else []
        uses_rows = any(map(any, dynamic)) or next(iter(module.graph.nodes)).users
        return run, fits if uses_rows else lambda count: True

    def _in_stages(
        self, cut: Cut, n: int, shared: Sequence[torch.Tensor]
    ) -> tuple[Run, Callable[[int], bool]]:
        """Each region compiled, the products as they are."""
        places = [x.name for x in self.graph.graph.nodes if x.op == "placeholder"]
        named = dict(zip(places[len(places) - len(shared) :], shared, strict=True))
        found = []
        for region in (x for x in cut.stages if isinstance(x, Region)):
            samples: list[torch.Tensor] = []
            dynamic: list[list[bool | None]] = []
            for node in [x for x in region.module.graph.nodes if x.op == "placeholder"][1:]:
                sizes, given = node.meta["sizes"], named.get(node.name)
                if given is None:
                    dtype, device = node.meta["kind"]
                    given = _filled(_lengths(sizes, n), dtype, device, seed=len(samples))
                samples.append(given)
                dynamic.append(_flags(sizes))
            found.append(self._through_inductor(region.module, samples, dynamic, n))
        staged = emit_staged(self.graph, cut, [run for run, _ in found])
        return staged, lambda count: all(fits(count) for _, fits in found)

    def _through_dynamo(self) -> Run:
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
        return lambda args, workspace: compiled(
            *(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        )

    def _samples(
        self, n: int, shared: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[list[bool | None]]]:
        """Tensors like those of a call with n rows, and which of their sizes are n."""
        tensors: list[torch.Tensor] = []
        dynamic: list[list[bool | None]] = []
        given = () if self.returning else self.sizes
        for i, sizes in enumerate(given):
            tensors.append(self._allocate(i, n))
            dynamic.append(_flags(sizes))
        places = [x for x in self.module.graph.nodes if x.op == "placeholder"][1 + len(given) :]
        for node in places[: self.row_inputs]:
            sizes, value = node.meta["sizes"], node.meta["kind"]
            tensors.append(_filled(_lengths(sizes, n), value[0], value[1], seed=len(tensors)))
            dynamic.append(_flags(sizes))
        return [*tensors, *shared], dynamic + [[False] * t.dim() for t in shared]

    def check(self, shared: Sequence[torch.Tensor]) -> None:
        """Compare with the uncompiled kernel at several numbers of rows. Raises NotCompilable."""
        if self.random:
            return
        for n in _ROWS:
            samples, _ = self._samples(n, shared)
            ins, nothing = samples[0 if self.returning else len(self.sizes) :], [None] * len(self.sizes)
            wanted = self.kernel(n, ins, nothing, Workspace())
            got = self(n, ins, nothing, Workspace())
            for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
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
    forms = result_forms(_results(module))
    if any(layout is not torch.strided for _, _, _, layout in forms):
        raise NotCompilable("it has sparse results")
    places = [x for x in module.graph.nodes if x.op == "placeholder"]
    rows = len(places) - 1 - len(shared)
    sizes = tuple(shape(x) for x in _results(module))
    for node in (*places[1 : 1 + rows], *_results(module)):
        if any(a not in (0, 1) or (a and b) for a, b in shape(node)):
            raise NotCompilable(f"{node.name} has a size that is neither fixed nor the number of rows")
    made = return_results(module) if returning else write_results(module)
    cut = _cut(module, options, random=random)
    compiled = CompiledGraph(name, module, made, cut, kernel, options, forms, sizes, rows, random, returning)
    start = time.perf_counter()
    with patching:  # Dynamo traces when it is called first
        compiled.compile(_ROWS[0], shared)
        compiled.check(shared)
    compiled.seconds = time.perf_counter() - start  # Dynamo compiles in the first call, not before
    return compiled


def _cut(module: fx.GraphModule, options: CompileOptions, *, random: bool) -> Cut | None:
    """The graph in stages, where Inductor is to leave products alone and the order of draws is no matter."""
    if options.backend != "inductor" or random or options.patches().get("max_autotune"):
        return None
    try:
        cut = cut_at_products(module)
        emit_staged(module, cut, [lambda args: None] * len(cut.stages))
    except Uncuttable:
        return None
    return cut


def write_results(module: fx.GraphModule) -> fx.GraphModule:
    """`(n, *ins) -> outs` => `(n, *outs, *ins) -> ()`: results are copied to the memory given for them."""
    return _with_ends(module, writing=True)


def return_results(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with a copy of each result that is an input or a view of one: results share no memory."""
    return _with_ends(module, writing=False)


def _with_ends(module: fx.GraphModule, *, writing: bool) -> fx.GraphModule:
    graph = fx.Graph()
    places = [x for x in module.graph.nodes if x.op == "placeholder"]
    results = _results(module)
    known: dict[fx.Node, fx.Node] = {places[0]: graph.placeholder("n")}
    outs = [graph.placeholder(f"out{i}") for i in range(len(results) if writing else 0)]
    for node in places[1:]:
        new = known[node] = graph.placeholder(node.name)
        if is_tensor(node):
            value = node.meta["values"][0]
            new.meta.update(sizes=shape(node), kind=(value.dtype, value.device))
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            known[node] = graph.node_copy(node, lambda x: known[x])
    if writing:
        for out, node in zip(outs, results, strict=True):
            graph.call_function(aten.copy_.default, (out, known[node]))
        graph.output(())
    else:
        ends = [known[x] for x in results]
        graph.output(
            tuple(graph.call_function(aten.clone.default, (x,)) if _reads_input(x) else x for x in ends)
        )
    graph.lint()
    return fx.GraphModule(module, graph, "Writing" if writing else "Returning")


def _reads_input(node: fx.Node) -> bool:
    """Whether a result may share memory with an input: it is one, or views lead to one."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # the viewed node
    return node.op != "call_function"


def _results(module: fx.GraphModule) -> list[fx.Node]:
    output = next(x for x in reversed(module.graph.nodes) if x.op == "output")
    found = output.args[0]
    assert isinstance(found, (tuple, list))
    results = [x for x in found if isinstance(x, fx.Node)]
    assert len(results) == len(found)
    return results


def warn_uncompiled(name: str, reason: str) -> None:
    """Say that a graph runs uncompiled, and why."""
    warnings.warn(f"{name} runs uncompiled: {reason}", CompileWarning, stacklevel=2)


def first_line(error: BaseException) -> str:
    """An exception in one line: its first, and the second where the first only introduces it."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _lengths(sizes: Shape, n: int) -> list[int]:
    """A shape at n rows; of an arena some rows."""
    return [8 if b == ANY_ROWS else a * n + b for a, b in sizes]


def _flags(sizes: Shape) -> list[bool | None]:
    """Which dimensions are as long as n; None: as long as any."""
    return [None if b == ANY_ROWS else a != 0 for a, b in sizes]


def _filled(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, *, seed: int) -> torch.Tensor:
    """Numbers between 0 and 1, the same each time; integers and bools are 0 or 1."""
    gen = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.rand(*sizes, generator=gen, dtype=wide).to(device, dtype)
    return torch.randint(0, 2, tuple(sizes), generator=gen).to(device, dtype)


def _compare(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    tolerance = _TOLERANCE.get(b.dtype, 2e-5)
    if not (b.is_floating_point() or b.is_complex()):
        if not torch.equal(a, b):
            raise NotCompilable(f"{what} differs from the uncompiled graph")
        return
    wide = torch.complex128 if b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    finite = y.abs()[torch.isfinite(y.abs())]
    scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
    if not torch.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        raise NotCompilable(f"{what} differs from the uncompiled graph by {float((x - y).abs().max()):.2g}")
