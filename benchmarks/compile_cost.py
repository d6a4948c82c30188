"""What compiling a Tree-LSTM cell's graphs gains, way by way: microseconds a launch, seconds to compile.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_cost --hidden 150 --rows 1 2 8 64 512

Ways, all writing to given rows: the emitted kernel; Inductor without Dynamo (`compile=True`); with the C++
wrapper; torch.compile(dynamic=True) with its guards, on the same graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import fx

from benchmarks.kernel_cost import Cell, graphs_of
from fxbatch.codegen.compile_graph import CompiledGraph, CompileOptions, compile_graph
from fxbatch.codegen.kernels import Kernel, Workspace, emit_kernel
from fxbatch.torch_private import compile_guarded

KERNEL, DIRECT, WRAPPER, GUARDED = "kernel", "inductor", "inductor, cpp_wrapper", "torch.compile"


def ways_of(module: fx.GraphModule, cell: Cell, *, returning: bool) -> dict[str, Kernel | CompiledGraph]:
    """The graph, made in each way; a line a way says how long it took."""
    kernel = emit_kernel(module)
    shared = [p.detach() for p in cell.parameters()]
    found: dict[str, Kernel | CompiledGraph] = {KERNEL: kernel}
    options = {DIRECT: CompileOptions(), WRAPPER: CompileOptions(given=(("cpp_wrapper", True),)),
               GUARDED: CompileOptions(guarded_inductor)}  # fmt: skip
    for name, chosen in options.items():
        made = compile_graph(module, kernel, chosen, shared, name=name, returning=returning)
        found[name] = made
        print(f"  {name}: compiled in {made.seconds:.1f} s", flush=True)
    return found


def guarded_inductor(graph: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
    """Inductor as torch.compile calls it, behind Dynamo's guards."""
    return compile_guarded(graph, examples)


@torch.no_grad()
def measure(
    ways: dict[str, Kernel | CompiledGraph], cell: Cell, n: int, rounds: int, *, returning: bool
) -> dict[str, float]:
    """Microseconds a call of each way, interleaved; the fastest round: other load only adds."""
    shared = [p.detach() for p in cell.parameters()]
    compiled = ways[DIRECT]
    assert isinstance(compiled, CompiledGraph)
    width = len(compiled.sizes)
    samples, _ = compiled._samples(n, shared)
    outs: list[torch.Tensor | None] = [None] * width if returning else list(samples[:width])
    ins, workspace = samples[0 if returning else width :], Workspace()
    repeat = max(2, 200 // n)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(n, ins, outs, workspace)
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(repeat):
                way(n, ins, outs, workspace)
            times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return {name: min(column) for name, column in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=15)
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
        ways = ways_of(module, cell, returning=name == "parameters")
        table = {
            n: measure(ways, cell, n, options.rounds, returning=name == "parameters") for n in options.rows
        }
        print(f"  {'rows':24s}" + "".join(f"{n:>10d}" for n in table))
        for way in ways:
            print(f"  {way:24s}" + "".join(f"{column[way]:10.1f}" for column in table.values()), flush=True)


if __name__ == "__main__":
    main()
