"""Ways to compile a Tree-LSTM cell's graphs: microseconds per launch, seconds to compile.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_cost --hidden 150 --rows 1 2 8 64 512

Ways, all writing to given rows, interleaved, medians of CPU time: the emitted kernel (`native=False`); the native
program (the default); Inductor without Dynamo (`compile=True`); with the C++ wrapper; torch.compile(dynamic=True) with
its guards, on the same graph. The first line is the graph's products alone, to memory that is there already.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import fx

from benchmarks.kernel_cost import Cell, graphs_of, native
from fxbatch.codegen.inductor import CompiledGraph, CompileOptions, compile_graph
from fxbatch.codegen.kernel import Kernel, Workspace, emit_kernel

PRODUCTS, KERNEL, NATIVE = "products alone", "kernel", "native"
DIRECT, WRAPPER, GUARDED = "inductor", "inductor, cpp_wrapper", "torch.compile"


def ways_of(module: fx.GraphModule, cell: Cell) -> dict[str, Kernel | CompiledGraph]:
    """The graph, made in each way; a line a way says how long it took."""
    kernel = emit_kernel(module)
    shared = [p.detach() for p in cell.parameters()]
    found: dict[str, Kernel | CompiledGraph] = {KERNEL: kernel}
    options = {DIRECT: CompileOptions(), WRAPPER: CompileOptions(given=(("cpp_wrapper", True),)),
               GUARDED: CompileOptions(guarded_inductor)}  # fmt: skip
    for name, chosen in options.items():
        made = compile_graph(module, kernel, chosen, shared, name=name)
        found[name] = made
        print(f"  {name}: compiled in {made.seconds:.1f} s", flush=True)
    return found


def guarded_inductor(graph: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
    """Inductor as torch.compile calls it, behind Dynamo's guards."""
    return torch._inductor.compile(graph, examples)


def products_alone(name: str, cell: Cell, n: int) -> Callable[[], object]:
    """The products of the cell's forward, backward or parameter graph, once each."""
    weight = cell.gates.weight.detach()
    x, gates, sums = (
        torch.randn(n, weight.shape[1]),
        torch.randn(n, weight.shape[0]),
        torch.empty_like(weight),
    )
    return {
        "forward": lambda: torch.mm(x, weight.t(), out=gates),
        "backward": lambda: torch.mm(gates, weight, out=x),
        "parameters": lambda: torch.mm(gates.t(), x, out=sums),
    }[name]


@torch.no_grad()
def measure(
    name: str, graph: fx.GraphModule, ways: dict[str, Kernel | CompiledGraph], cell: Cell, n: int, rounds: int
) -> dict[str, float]:
    """Median microseconds of CPU time a call of each way, interleaved."""
    shared = [p.detach() for p in cell.parameters()]
    compiled = ways[DIRECT]
    assert isinstance(compiled, CompiledGraph)
    inputs = [form.filled(n, seed) for seed, form in enumerate(compiled.ins)]
    given = [form.empty(n) for form in compiled.outs]
    outs: list[torch.Tensor | None] = list(given)
    ins, workspace = [*inputs, *shared], Workspace()
    calls: dict[str, Callable[[], object]] = {
        PRODUCTS: products_alone(name, cell, n),
        NATIVE: native(graph, compiled.kernel, n, inputs, shared, given),
    }
    for way, run in ways.items():
        calls[way] = lambda run=run: run(n, ins, outs, workspace)  # type: ignore[misc]  # bound now
    repeat = max(2, 200 // n)
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for way, call in calls.items():
            start = time.process_time()
            for _ in range(repeat):
                call()
            times[way].append((time.process_time() - start) / repeat * 1e6)
    return {way: statistics.median(column) for way, column in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cell = Cell(options.hidden)
    graphs = graphs_of(cell, options.hidden, grad=True)
    for name, module in (
        ("forward", graphs.forward), ("backward", graphs.backward), ("parameters", graphs.parameters)
    ):  # fmt: skip
        assert module is not None
        print(f"{name}, hidden {options.hidden}, us a launch")
        ways = ways_of(module, cell)
        table = {n: measure(name, module, ways, cell, n, options.rounds) for n in options.rows}
        print(f"  {'rows':24s}" + "".join(f"{n:>10d}" for n in table))
        for way in (PRODUCTS, KERNEL, NATIVE, DIRECT, WRAPPER, GUARDED):
            print(f"  {way:24s}" + "".join(f"{column[way]:10.1f}" for column in table.values()), flush=True)


if __name__ == "__main__":
    main()
