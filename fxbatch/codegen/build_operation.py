"""A signature becomes three graphs: batched forward, backward, and parameter gradients.

In: a Signature and what needs gradients. Out: OperationGraphs, or Unbatched with the reason.

    graphs = build_operation(signature, input_needs=(True, True), shared_needs=(True,), shared=[weight])
    print(graphs.forward.code)
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

from fxbatch.codegen.batch import Joint, batch_body, recorded_on
from fxbatch.codegen.body import (
    find_groups,
    group_inputs,
    look_up_densely,
    make_sparse,
    sparse_tables,
    trace_body,
)
from fxbatch.codegen.built import content_of, find, forget, keep, warn_of_folder
from fxbatch.codegen.call_by_call import UnbatchedKernel
from fxbatch.codegen.check import ZeroGradient, check_autograd, check_graphs, refuse_backward_arguments
from fxbatch.codegen.operation_graphs import Large, NotBatchable, OperationGraphs, Ref, Unbatched
from fxbatch.codegen.partition import partition
from fxbatch.codegen.rewrites import rewrite
from fxbatch.codegen.simplify import clean, is_random, mark_kept_detaches
from fxbatch.ir import Layout, Signature
from fxbatch.mistakes import ours, report
from fxbatch.torch_private import FakeTensorMode, LazyGraphModule, fake_mode, forget_traces

__all__ = ["OperationGraphs", "Ref", "Unbatched", "UnbatchedKernel", "build_operation"]


def build_operation(
    signature: Signature,
    *,
    input_needs: Sequence[bool],
    shared_needs: Sequence[bool],
    shared: Sequence[torch.Tensor],
    autograd: bool = False,
    verify: bool = False,
    most: int | None = None,
) -> OperationGraphs | Unbatched | Large:
    """Build and check the graphs of a signature.

    `input_needs`, `shared_needs`: which inputs and shared operands need gradients (all False: inference,
    nothing is saved and there is no backward). `autograd`: autograd will go through the forward graph, which then
    has to give eager's gradients. `most`: where the body is more calls of ATen it is `Large`, and not built. What
    can't be batched is `Unbatched(reason)`, never an exception; so is what a mistake of fxbatch's own keeps from being
    batched, which is warned of, and raised where `verify`.
    """
    if signature.reason:
        return Unbatched(signature.reason)
    try:
        with forget_traces(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            mode = functools.cache(functools.partial(fake_mode, allow_non_fake_inputs=True))
            body = trace_body(signature, shared, mode)
            calls = sum(node.op == "call_function" for node in body.graph.nodes)
            if most is not None and calls > most:
                return Large(calls)
            if autograd:
                refuse_backward_arguments(body)
            graphs = _graphs_of(body, signature, (input_needs, shared_needs), shared, mode)
            if autograd:
                check_autograd(graphs, shared)
            return graphs
    except NotBatchable as error:
        return Unbatched(str(error))
    except (MemoryError, torch.OutOfMemoryError):  # of this moment, not of the operation
        raise
    except Exception as error:  # noqa: BLE001 tracing runs arbitrary code; whatever it raises is the reason
        return Unbatched(report(error, signature.name, verify=verify))
    finally:
        warn_of_folder()


def _graphs_of(
    body: fx.GraphModule,
    signature: Signature,
    needs: tuple[Sequence[bool], Sequence[bool]],
    shared: Sequence[torch.Tensor],
    mode: Callable[[], FakeTensorMode],
) -> OperationGraphs:
    """The graphs of a body, compared with eager. They are built again with a gradient of zeros where eager has one and
    these have none (`x.fill_(1)`), and of more recordings where fewer don't tell."""
    zeros: tuple[tuple[bool, int], ...] = ()
    recordings = 1 if recorded_on(body, signature, shared) is not None else 2
    while True:
        content = content_of(body, signature, needs, shared, zeros)
        try:
            stored = find(content, signature)
            if stored is not None:
                return check_graphs(stored, *needs, shared)
        except Exception:  # noqa: BLE001  # a custom gradient, a file that somebody changed: built like any other
            forget(content)
        try:
            joint, layout, sparse = build_joint(body, signature, needs, shared, mode, zeros, recordings)
            with ours(NotBatchable):
                graphs = _cut(signature, joint, layout, sparse)
            checked = check_graphs(graphs, *needs, shared)
        except ZeroGradient as missing:
            if (missing.shared, missing.index) in zeros:
                raise
            zeros += ((missing.shared, missing.index),)
            continue
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # a number that grows with the rows by chance: two recordings tell
            if recordings > 1:
                raise
            recordings = 2
            continue
        if not checked.checked and not graphs.random and recordings < 3:
            recordings = 3
            continue
        keep(content, graphs)
        return checked


def _cut(signature: Signature, joint: Joint, layout: Layout, sparse: tuple[int, ...]) -> OperationGraphs:
    """The three graphs of a joint one."""
    parts = partition(joint)
    module = joint.module

    def finish(graph: fx.Graph, name: str) -> fx.GraphModule:
        clean(graph)
        rewrite(graph)
        graph.lint()
        return LazyGraphModule(module, graph, name)

    if parts.parameters is not None:
        clean(parts.parameters)
        of = parts.flows.grad_shared
        make_sparse(parts.parameters, [of.index(i) for i in sparse if i in of])
    return OperationGraphs(
        signature=signature,
        layout=layout,
        forward=finish(parts.forward, "Forward"),
        backward=None if parts.backward is None else finish(parts.backward, "Backward"),
        parameters=None if parts.parameters is None else finish(parts.parameters, "Parameters"),
        random=signature.operation.random or any(is_random(x) for x in joint.graph.nodes),
        **vars(parts.flows),
    )


def build_joint(
    body: fx.GraphModule,
    signature: Signature,
    needs: tuple[Sequence[bool], Sequence[bool]],
    shared: Sequence[torch.Tensor],
    mode: Callable[[], FakeTensorMode],
    zeros: Sequence[tuple[bool, int]] = (),
    recordings: int = 3,
) -> tuple[Joint, Layout, tuple[int, ...]]:
    """The cleaned and rewritten joint graph of a body, before it is cut in three, and which gradients are sparse.

    `zeros`: (is a shared operand, index) of those whose gradient is zeros where there is no path to them;
    `recordings`: at how many numbers of rows it is recorded (see `batch_body`).
    """
    sparse = sparse_tables(body, len(signature.inputs))
    if sparse:
        body = copy.deepcopy(body)
        look_up_densely(body)
    layout = find_groups(body, signature)
    body = group_inputs(body, layout, signature)
    joint = batch_body(body, signature, layout, *needs, shared, mode, zeros, recordings)
    with ours(NotBatchable):
        mark_kept_detaches(joint.outputs)
        clean(joint.graph)
        rewrite(joint.graph)
    return joint, layout, sparse
