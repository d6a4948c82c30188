"""The cost of one batched launch: a Tree-LSTM cell's kernels, hand-written eager, the product alone.

    OMP_NUM_THREADS=1 python benchmarks/kernel_cost.py --hidden 150 --rows 1 8 64 512

Prints microseconds of process time (median of interleaved rounds): forward with the gathers of its inputs and
writing to given rows, native and by the emitted kernel; backward likewise; parameter gradients; eager's forward with
the same gathers; the product alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from fxbatch import ir
from fxbatch.codegen.build_operation import build_operation
from fxbatch.codegen.kernel import Kernel, Workspace, emit_kernel
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_programs import make_step
from fxbatch.codegen.operation_graphs import OperationGraphs


class Cell(nn.Module):
    """The binary Tree-LSTM cell of Tai et al. 2015, its five gates as one product."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(
        self, hl: torch.Tensor, cl: torch.Tensor, hr: torch.Tensor, cr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, fl, fr, o, u = self.gates(torch.cat([hl, hr], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


def graphs_of(cell: Cell, hidden: int, *, grad: bool) -> OperationGraphs:
    """The cell's operation graphs, with every gradient or with none."""
    kind = ir.tensor_spec((hidden,), torch.float32, torch.device("cpu"))
    names = tuple(name for name, _ in cell.named_parameters())
    owners = [(cell.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]
    signature = ir.Signature(
        operation=ir.Operation("cell", "module", cell),
        inputs=(kind,) * 4,
        outputs=(kind,) * 2,
        shared=tuple(ir.SharedOperand(owner, name) for owner, name in owners),
        arguments=ir.Template.of((tuple(ir.Slot("input", i) for i in range(4)), {})),
        shared_names=names,
    )
    shared = list(cell.parameters())
    graphs = build_operation(
        signature, input_needs=[grad] * 4, shared_needs=[grad] * len(shared), shared=shared
    )
    assert isinstance(graphs, OperationGraphs), graphs
    return graphs


def native(
    module: fx.GraphModule,
    kernel: Kernel,
    n: int,
    inputs: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> Callable[[], object]:
    """The native program of a kernel on given memory; nothing where it has none."""
    step = make_step("cell", module, shared, ())
    if isinstance(step, str):
        return lambda: None
    memory = array("q", [x for t in (*inputs, *shared, *outs) for x in (t.data_ptr(), t.nbytes)])
    room, programs, rows = extension.Room(), (step.program,), array("q", [n])
    return lambda: extension.run_all(programs, room, rows, memory, 0, 1)


def candidates(cell: Cell, hidden: int, n: int) -> dict[str, Callable[[], object]]:
    """The functions to time, by name; all on n rows gathered from an arena of 4n."""
    arena_h, arena_c = torch.randn(4 * n, hidden), torch.randn(4 * n, hidden)
    pairs = torch.randint(0, 4 * n, (n, 2))
    both, left, right = pairs.flatten(), pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    shared = [p.detach() for p in cell.parameters()]
    hs, cl, cr = torch.empty(2 * n, hidden), torch.empty(n, hidden), torch.empty(n, hidden)
    wide = hs.view(n, 2, hidden)
    train, infer = graphs_of(cell, hidden, grad=True), graphs_of(cell, hidden, grad=False)
    forward, inference = emit_kernel(train.forward), emit_kernel(infer.forward)
    assert train.backward is not None and train.parameters is not None
    backward, parameters = emit_kernel(train.backward), emit_kernel(train.parameters)
    workspace = Workspace()
    workspace.enter_run("measured")
    kept = [torch.empty(n, hidden), torch.empty(n, hidden)]
    kept += [torch.empty((n, *t.shape)) for t in train.saved_types]
    grads = [torch.randn(n, hidden) for _ in train.grad_outputs]
    made = [torch.empty(n, 2, hidden), torch.empty(n, hidden), torch.empty(n, hidden)]
    made += [torch.empty((n, *t.shape)) for t in train.extra_types]
    sums = [torch.empty_like(p) for p in shared]
    tensors = {"group": [wide, cl, cr], "output": kept[:2], "saved": kept[2:], "extra": made[3:]}

    def gather() -> None:
        torch.index_select(arena_h, 0, both, out=hs)
        torch.index_select(arena_c, 0, left, out=cl)
        torch.index_select(arena_c, 0, right, out=cr)

    def run_forward() -> None:
        gather()
        forward(n, (wide, cl, cr, *shared), kept, workspace)

    def run_inference() -> None:
        gather()
        inference(n, (wide, cl, cr, *shared), kept[:2], workspace)

    starts = [*grads, *(tensors[r.kind][r.index] for r in train.backward_inputs), *shared]
    ends = [*(tensors[r.kind][r.index] for r in train.parameter_inputs), *shared]
    x, weight, z = hs.view(n, 2 * hidden), cell.gates.weight.detach(), torch.empty(n, 5 * hidden)
    run_forward()
    native_forward = native(train.forward, forward, n, (wide, cl, cr), shared, kept)
    native_backward = native(train.backward, backward, n, starts[: -len(shared)], shared, made)

    def run_native() -> None:
        gather()
        native_forward()

    return {
        "forward, native": run_native,
        "backward, native": native_backward,
        "forward, training": run_forward,
        "forward, inference": run_inference,
        "backward": lambda: backward(n, starts, made, workspace),
        "parameters": lambda: parameters(n, ends, sums, workspace),
        "eager forward": lambda: cell(arena_h[left], arena_c[left], arena_h[right], arena_c[right]),
        "product alone": lambda: torch.mm(x, weight.t(), out=z),
    }


@torch.no_grad()
def measure(hidden: int, n: int, rounds: int) -> dict[str, float]:
    """Median microseconds a call of each candidate, the candidates interleaved."""
    torch.manual_seed(0)
    calls = candidates(Cell(hidden), hidden, n)
    repeat = max(1, 200 // n)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeat):
                call()
            times[name].append((time.process_time() - start) / repeat * 1e6)
    return {name: statistics.median(column) for name, column in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = {n: measure(options.hidden, n, options.rounds) for n in options.rows}
    names = list(next(iter(table.values())))
    print(f"{'us, hidden ' + str(options.hidden):20s}" + "".join(f"{n:>10d}" for n in table))
    for name in names:
        print(f"{name:20s}" + "".join(f"{column[name]:10.1f}" for column in table.values()))


if __name__ == "__main__":
    main()
