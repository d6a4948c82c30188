"""One tree at a time, on one thread: what each way of running it costs, in CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.small_batches --leaves 20 --hidden 150

Ways: the loop; fxbatch with emitted Python kernels (`native=False`); as it is, native; with traces made before;
compiled, compiled with the C++ wrapper; the unrolled module of that one tree, as it is and as one compiled graph (both
run that tree only); and one compiled `while_loop` over the nodes with the plan as data (any tree of up to as many
nodes; where torch differentiates it, in training too).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxbatch
from benchmarks.models import Node, TreeLSTM, gated, losses_once, random_trees

Work = Callable[[int], Any]


def model_of(hidden: int, words: int = 1000, **options: Any) -> TreeLSTM:
    """A model decorated with these options; its parameters are equal each time."""
    torch.manual_seed(0)

    class Model(TreeLSTM):
        @fxbatch.autobatch(**options)
        def forward(self, tree: Node) -> Tensor:
            return self.out(self.encode(tree)[0])

        @fxbatch.autobatch(**options)
        def loss(self, tree: Node) -> Tensor:
            return self.loss_of(tree)

    return Model(words, embedding=300, hidden=hidden)


def plan_as_data(tree: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Words `[leaves]`, the children `[inner nodes, 2]` of each inner node, labels `[nodes]`: leaves come first."""
    nodes = list(tree.postorder())
    leaves = [x for x in nodes if x.left is None]
    ordered = leaves + [x for x in nodes if x.left is not None]
    places = {id(x): i for i, x in enumerate(ordered)}
    pairs = [[places[id(x.left)], places[id(x.right)]] for x in nodes if x.left is not None]
    words = torch.stack([x.word for x in leaves if x.word is not None])
    return words, torch.tensor(pairs), torch.stack([x.label for x in ordered])


def looping(model: TreeLSTM, *, training: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The whole tree as one graph: a while_loop whose body composes one inner node. Losses of all nodes, or scores."""

    def run(words: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
        h, c = model.leaf(model.embed(words))
        rows = torch.zeros(pairs.shape[0], h.shape[1])
        weight, bias = model.cell.gates.weight, model.cell.gates.bias

        def more(i: Tensor, h: Tensor, c: Tensor) -> Tensor:
            return (i < pairs.shape[0]).all()

        def step(i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            children = pairs.index_select(0, i).view(2)
            gates = torch.addmm(bias, h.index_select(0, children).view(1, -1), weight.t())
            left, right = c.index_select(0, children).split(1)
            new_h, new_c = gated(gates, left, right)
            at = i + words.shape[0]
            return i + 1, h.index_copy(0, at, new_h), c.index_copy(0, at, new_c)

        start = torch.zeros(1, dtype=torch.int64)
        _, h, _ = torch.while_loop(more, step, (start, torch.cat([h, rows]), torch.cat([c, rows])))
        if training:
            return nn.functional.cross_entropy(model.out(h), labels, reduction="none")
        return model.out(h[-1:])

    return torch.compile(run, fullgraph=True)


def compare_gradients(model: TreeLSTM, found: Tensor, wanted: Tensor) -> None:
    leaves = list(model.parameters())
    ours, theirs = (torch.autograd.grad(x.sum(), leaves) for x in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def traced(method: Callable[..., Any], trees: Sequence[Node]) -> list[list[Any]]:
    data = fxbatch.TracedDataset(method, trees)
    return [[data[i]] for i in range(len(data))]


def ways_of(trees: Sequence[Node], hidden: int, *, training: bool) -> dict[str, Work]:
    """The functions to time: each takes the number of a tree."""
    plain, python = model_of(hidden), model_of(hidden, native=False)
    compiled = model_of(hidden, compile=True)
    wrapped = model_of(hidden, compile=True, compile_options={"cpp_wrapper": True})
    ways: dict[str, Work] = {}

    def add(name: str, call: Callable[[int], Tensor], model: TreeLSTM) -> None:
        def work(k: int) -> None:
            model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(training):
                found = call(k)
                if training:
                    found.sum().backward()

        ways[name] = work

    def undecorated(k: int) -> Tensor:
        with fxbatch.disabled():
            return losses_once(plain, [trees[k]]) if training else plain([trees[k]])

    add("one by one", undecorated, plain)
    looped = {"looped, Python kernels": python, "looped": plain, "compiled": compiled}
    for name, model in {**looped, "compiled, cpp_wrapper": wrapped}.items():
        method = model.loss if training else model.forward
        add(name, lambda k, method=method: method([trees[k]]), model)  # type: ignore[misc]  # bound now
        if model in (plain, compiled):
            known = traced(method, trees)
            add(f"{name}, traces warm", lambda k, m=method, t=known: m(t[k]), model)  # type: ignore[misc]
    with torch.set_grad_enabled(training):
        minibatch = fxbatch.compile_minibatch(plain.loss if training else plain, [trees[0]])
    module = minibatch.graph_module
    arguments = minibatch.unrolled.arguments([], minibatch.rewritten.constants)
    one_graph = torch.compile(module, fullgraph=True)
    total = lambda found: torch.stack([x.sum() for x in found]).sum()  # noqa: E731
    add("unrolled (one tree)", lambda k: total(module(*arguments)), plain)
    add("unrolled, one compiled graph (one tree)", lambda k: total(one_graph(*arguments)), plain)
    loop, plans = looping(plain, training=training), [plan_as_data(tree) for tree in trees]
    with torch.set_grad_enabled(training):
        wanted = plain.loss([trees[1]]) if training else plain([trees[1]])
        try:
            found = loop(*plans[1])
            torch.testing.assert_close(found.sum(), wanted.sum(), rtol=1e-4, atol=1e-4)
            if training:
                compare_gradients(plain, found, wanted)
        except RuntimeError as error:  # torch that can't differentiate it
            print(f"while_loop, {'training' if training else 'inference'}: {str(error).splitlines()[0]}")
        else:
            add("while_loop, plan as data", lambda k: loop(*plans[k]), plain)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--leaves", type=int, default=20)
    parser.add_argument("--trees", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    trees = random_trees(options.trees, leaves=options.leaves, seed=1)
    for training in (True, False):
        ways = ways_of(trees, options.hidden, training=training)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for k in range(len(trees)):
            for name, work in ways.items():
                start = time.thread_time()
                work(k)
                if k > 3:
                    times[name].append(time.thread_time() - start)
        print("training" if training else "inference")
        for name, found in times.items():
            ratios = [a / b for a, b in zip(times["one by one"], found, strict=True)]
            print(
                f"  {name:42} {statistics.median(found) * 1e3:7.2f} ms {statistics.median(ratios):6.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
