"""Batch normalisation over all rows of a minibatch: `batch_norm="minibatch"`.

In: a body whose BatchNorm layers are in training, on fake tensors. Out: a node in place of each, and the rule that
runs it once over the rows of all instances, as code that batches by hand does; running statistics are updated once.

    with batch_norm_as_nodes():
        trace(body)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from fxbatch.ragged.lower import DENSE, PACKED, WHOLE, Arguments, Given, Packed, PackedTape, Traced
from fxbatch.ragged.rules import normalised_channels, rule, weights_of
from fxbatch.ragged.symbolic import NoPackedForm
from fxbatch.torch_private import FakeTensor

_library = torch.library.Library("fxbatch_rows", "DEF")
_library.define(
    "batch_norm(Tensor x, Tensor? mean, Tensor? var, Tensor? weight, Tensor? bias, float momentum, float eps) -> Tensor"
)
_lock = threading.RLock()


def _fake(
    x: torch.Tensor, mean: object, var: object, weight: object, bias: object, momentum: object, eps: object
) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_fake("fxbatch_rows::batch_norm", _fake)


@contextlib.contextmanager
def batch_norm_as_nodes() -> Iterator[None]:
    """Batch normalisation in training on fake tensors is one node; on others what it always is, in any thread."""
    with _lock:
        plain = F.batch_norm

        def call(
            input: torch.Tensor,
            running_mean: torch.Tensor | None = None,
            running_var: torch.Tensor | None = None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            if not training or not isinstance(input, FakeTensor):
                return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
            return torch.ops.fxbatch_rows.batch_norm(
                input, running_mean, running_var, weight, bias, momentum, eps
            )

        F.batch_norm = call
        try:
            yield
        finally:
            F.batch_norm = plain


@rule("batch_norm", space="fxbatch_rows")
def _batch_norm(tape: PackedTape, node: fx.Node, a: Arguments, val: Traced) -> Given:
    x = a["x"]
    parts = [a[name] for name in ("mean", "var", "weight", "bias")]
    if x.layout not in (DENSE, PACKED) or any(isinstance(p, Packed) and p.layout != WHOLE for p in parts):
        raise NoPackedForm("batch normalisation of this form")
    if x.rank < 2 or 1 in x.axes:
        raise NoPackedForm("batch normalisation whose channels are not the second dimension")
    return normalised_channels(tape, x, [*weights_of(*parts), True, a["momentum"], a["eps"]], val)


def trackers(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The counters of minibatches of a module's BatchNorm layers, by name, where they are in training."""
    trackers_by_name = {}
    for name, m in root.named_modules():
        tracked = getattr(m, "num_batches_tracked", None)
        if m.training and isinstance(tracked, torch.Tensor):
            if getattr(m, "momentum", 0) is None:
                raise NoPackedForm("batch normalisation without a momentum")
            trackers_by_name[f"{name}.num_batches_tracked" if name else "num_batches_tracked"] = tracked
    return trackers_by_name
