"""An operation graph through Inductor, or another backend of torch.compile: a CompiledGraph, called as a Kernel is.

In: an operation graph `(n, *ins) -> outs`. Out: the same for any number of rows, compiled once, the whole graph;
results are written to the memory that the caller gives (arena rows), as the compiled code's last act.

    compiled = compile_graph(graphs.forward, kernel, CompileOptions("inductor"), shared)
    compiled(n, (*groups, *shared), (h, c), workspace)

Inductor is called without Dynamo: an operation graph is ATen already, its one dynamic size is n, and what Dynamo's
guards check is in the signature. Any other backend goes through torch.compile itself. docs/compiled.md has more.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxbatch.caches import Cache, guard
from fxbatch.codegen.kernel import Kernel, Workspace
from fxbatch.codegen.operation_graphs import Shape, device_of, is_tensor, shape
from fxbatch.errors import CompileWarning
from fxbatch.judge import differences, draws
from fxbatch.torch_private import compile_symbolic, inductor_mode_options
from fxbatch.trace.torch_patches import patching

aten = torch.ops.aten
Backend = str | Callable[..., Any]
GraphRun = Callable[[list[Any]], Any]  # on (n, *outs, *ins)
_OURS = ("dynamic", "fullgraph")  # options that are not handed on
_ROWS = (61, 64, 2, 1)  # numbers of rows at which a compiled graph is compared with the kernel


class NotCompilable(Exception):
    """This operation graph can't go through the backend; the message says why."""


@dataclass(frozen=True)
class CompileOptions:
    """Arguments for torch.compile: the backend and its options (`mode`, `options`, or Inductor's own).

    rest: compile only what has no native program.
    """

    backend: Backend = "inductor"
    given: tuple[tuple[str, Any], ...] = ()
    rest: bool = False

    @staticmethod
    def of(compile: bool | Backend, options: Sequence[tuple[str, object]] = ()) -> CompileOptions | None:
        """The options of `compile=` and `compile_options=`; None where nothing is to be compiled."""
        if compile is False:
            return None
        rest = isinstance(compile, str) and compile == "auto"
        return CompileOptions("inductor" if compile is True or rest else compile, tuple(options), rest)

    def patches(self) -> dict[str, object]:
        """Inductor's configuration: of the mode, of `options`, and of what is no word of torch.compile."""
        options = self.backend_options()
        mode = inductor_mode_options(options.pop("mode", None))
        return {key.replace("-", "_"): value for key, value in {**mode, **options}.items()}

    def backend_options(self) -> dict[str, Any]:
        """The options that go to the backend unchanged."""
        options = {k: v for k, v in self.given if k not in _OURS}
        return {**dict(options.pop("options", None) or ()), **options}


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
        return InputForm(shape(node), value.dtype, device_of(node))

    def empty(self, n: int) -> torch.Tensor:
        return torch.empty([n if a else b for a, b in self.sizes], dtype=self.dtype, device=self.device)

    def filled(self, n: int, seed: int) -> torch.Tensor:
        """Numbers between 0 and 1, the same each time; integers and bools are 0 or 1, and 0 where an index that is out
        of range is no exception but the end of the device's use."""
        gen, tensor = torch.Generator().manual_seed(seed), self.empty(n)
        if tensor.is_floating_point() or tensor.is_complex():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            return tensor.copy_(torch.rand(tensor.shape, generator=gen, dtype=wide, device="cpu"))
        if tensor.device.type != "cpu":
            return tensor.zero_()
        return tensor.copy_(torch.randint(0, 2, tensor.shape, generator=gen, device="cpu"))


@dataclass(eq=False)
class CompiledGraph:
    """`compiled(n, ins, outs, workspace) -> list of results`, as a Kernel."""

    name: str
    kernel: Kernel  # the uncompiled one: the reference of the check, and for rows that what was compiled is not for
    ins: tuple[InputForm, ...]  # of those with rows: shared operands come behind them
    outs: tuple[InputForm, ...]
    run: GraphRun
    fits: Callable[[int], bool]  # whether what was compiled is for n rows
    seconds: float = 0.0  # that compiling took
    _fitting: Cache[int, bool] = field(default_factory=lambda: Cache("compiled rows"))

    @property
    def source(self) -> str:
        return self.kernel.source

    def __call__(
        self, n: int, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None], workspace: Workspace
    ) -> list[torch.Tensor]:
        if n == 0 or not self._fits(n):
            return self.kernel(n, ins, outs, workspace)
        rows = len(self.ins)
        contiguous = [x if x.is_contiguous() else x.contiguous() for x in ins[:rows]]
        results = [form.empty(n) if x is None else x for form, x in zip(self.outs, outs, strict=True)]
        self.run([n, *results, *contiguous, *ins[rows:]])
        return results

    @guard("sizes")
    def _fits(self, n: int) -> bool:
        fits = self._fitting.get(n)
        if fits is None:
            fits = self._fitting.put(n, self.fits(n))
            if not fits:
                warn_uncompiled(self.name, f"what was compiled is not for {n} rows")
        return fits

    def check(self, module: fx.GraphModule, shared: Sequence[torch.Tensor]) -> None:
        """Compare with the uncompiled graph at several numbers of rows. Raises NotCompilable."""
        nothing = [None] * len(self.outs)
        for n in _ROWS:
            ins = [*(form.filled(n, seed) for seed, form in enumerate(self.ins)), *shared]
            drawn = draws(functools.partial(_run, module, n), ins)
            wanted = self.kernel(n, ins, nothing, Workspace())
            for i, judged in differences(self(n, ins, nothing, Workspace()), wanted, drawn).items():
                raise NotCompilable(
                    f"result {i} at {n} rows differs from the uncompiled graph: {judged.message}"
                )


def compile_graph(
    module: fx.GraphModule,
    kernel: Kernel,
    options: CompileOptions,
    shared: Sequence[torch.Tensor],
    *,
    name: str = "operation",
    random: bool = False,
) -> CompiledGraph:
    """Compile a graph whose last inputs are `shared`. Raises NotCompilable or the backend's error."""
    places = [x for x in module.graph.nodes if x.op == "placeholder"][1:]
    ins = tuple(map(InputForm.of, places[: len(places) - len(shared)]))
    outs = tuple(map(InputForm.of, module.graph.output_node().args[0]))
    writing, start = with_ends(module), time.perf_counter()
    with patching, torch.no_grad(), torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own use of torch.jit
        if options.backend == "inductor":
            run, fits = _through_inductor(writing, (*outs, *ins), shared, options, random)
        else:
            run, fits = _through_dynamo(writing, options), lambda n: True
        compiled = CompiledGraph(name, kernel, ins, outs, run, fits)
        if not random:
            compiled.check(module, shared)  # Dynamo traces when it is called first
    compiled.seconds = time.perf_counter() - start
    return compiled


def try_to_compile(module: fx.GraphModule, kernel: Kernel, *args: Any, name: str, random: bool) -> object:
    """`compile_graph`, or the reason why there is nothing compiled, which is warned of."""
    try:
        return compile_graph(module, kernel, *args, name=name, random=random)
    except Exception as error:  # noqa: BLE001 compilers raise anything; the warning says what
        reason = str(error) if isinstance(error, NotCompilable) else first_line(error)
        warn_uncompiled(name, reason)
        return reason


def _through_inductor(
    module: fx.GraphModule,
    forms: Sequence[InputForm],
    shared: Sequence[torch.Tensor],
    options: CompileOptions,
    random: bool,
) -> tuple[GraphRun, Callable[[int], bool]]:
    n = _ROWS[0]
    samples = [form.filled(n, seed) for seed, form in enumerate(forms)]
    dynamic = [[bool(a) for a, _ in form.sizes] for form in forms] + [[False] * t.dim() for t in shared]
    patches = {"fallback_random": random, "assert_indirect_indexing": False, **options.patches()}
    run, fits = compile_symbolic(module, [*samples, *shared], dynamic, n, patches)
    reads_n = any(map(any, dynamic)) or next(iter(module.graph.nodes)).users
    return run, fits if reads_n else lambda count: True


def _through_dynamo(module: fx.GraphModule, options: CompileOptions) -> GraphRun:
    """torch.compile with the backend that was asked for."""
    backend, settings = options.backend, options.backend_options()
    compiled = functools.partial(torch.compile, module.forward, dynamic=True, fullgraph=True)
    if isinstance(backend, str):
        run = compiled(backend=backend, mode=settings.pop("mode", None), options=settings or None)
    else:
        run = compiled(backend=functools.partial(backend, **settings))
    # Parameters as plain tensors: Dynamo compiles again for another class.
    return lambda args: run(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))


def with_ends(module: fx.GraphModule) -> fx.GraphModule:
    """`(n, *outs, *ins) -> ()`: results are copied to the memory that is given for them."""
    graph = fx.Graph()
    places = [x for x in module.graph.nodes if x.op == "placeholder"]
    results = list(module.graph.output_node().args[0])
    node_of: dict[fx.Node, fx.Node] = {places[0]: graph.placeholder("n")}
    outs = [graph.placeholder(f"out{i}") for i in range(len(results))]
    for node in module.graph.nodes:
        if node not in node_of and node.op != "output":
            node_of[node] = graph.node_copy(node, lambda x: node_of[x])
    for out, node in zip(outs, results, strict=True):
        graph.call_function(aten.copy_.default, (out, node_of[node]))
    graph.output(())
    graph.lint()
    return fx.GraphModule(module, graph, "Writing")


def _run(module: fx.GraphModule, n: int, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(module(n, *ins))


def warn_uncompiled(name: str, reason: str) -> None:
    """Say that a graph runs uncompiled, and why."""
    warnings.warn(f"{name} runs uncompiled: {reason}", CompileWarning, stacklevel=2)


def first_line(error: BaseException) -> str:
    """An exception in one line: its first, and the second where the first only introduces it."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
