"""What an operation is made into: the contract between operation graphs and the runtime.

graphs = build_operation(signature, input_needs=needs, shared_needs=shared_needs, shared=shared)
if isinstance(graphs, Unbatched):
    kernel = UnbatchedKernel(signature)      # call by call; graphs.reason says why
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from fxbatch.ir import Layout, Signature, TensorSpec


@dataclass(frozen=True, slots=True)
class Ref:
    """A row-wise tensor of an operation, named by where it comes from.

    group: a gathered input group; output: what forward returns; saved: an intermediate that forward
    saves; extra: a tensor that backward makes for the parameter graph.
    """

    kind: Literal["group", "output", "saved", "extra"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Flows:
    """What flows between the three graphs of an operation, and out of them."""

    saved_types: tuple[TensorSpec, ...]
    grad_outputs: tuple[int, ...]
    grad_groups: tuple[int, ...]
    backward_inputs: tuple[Ref, ...]
    extra_types: tuple[TensorSpec, ...]
    parameter_inputs: tuple[Ref, ...]
    grad_shared: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class OperationGraphs(Flows):
    """The three graphs of one signature.

    A group of one input is `[n, *shape]`; a group of several is `[n, members, *shape]`.

    * `forward(n, *groups, *shared) -> (*outputs [n, *shape], *saved)`
    * `backward(n, *grad_outputs, *backward_inputs, *shared) -> (*gradients of grad_groups, *extra)`
    * `parameters(N, *parameter_inputs, *shared) -> gradients of grad_shared`, with the rows of all steps
      of the minibatch one after another; it sums over rows, so once is enough.

    `grad_outputs` are the outputs whose gradients backward takes; a differentiable output that is missing
    there has no path to what needs gradients. `grad_groups` and `grad_shared` have gradients; the others
    of the needed ones have none (None in autograd's terms).
    """

    signature: Signature
    layout: Layout
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    parameters: fx.GraphModule | None
    random: bool = False
    checked: bool = True  # compared with per-row eager on real numbers (never when random)

    def group_type(self, group: int) -> TensorSpec:
        """The type of the rows of an input group's members."""
        return self.signature.inputs[self.layout.groups[group][0]]

    def in_parameters(self, group: int) -> bool:
        """Whether the parameter graph reads the rows of a group: then those of all steps lie together."""
        return Ref("group", group) in self.parameter_inputs


@dataclass(frozen=True, slots=True)
class Unbatched:
    """An operation that can't be batched, and why; it runs call by call."""

    reason: str


class NotBatchable(Exception):
    """Raised inside codegen, with the reason; `build_operation` turns it into `Unbatched`."""
