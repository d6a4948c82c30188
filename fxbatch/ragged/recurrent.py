"""torch's recurrent layers as one node of a traced body, whatever the number of steps.

In: a body that calls nn.LSTM, nn.GRU or nn.RNN on fake tensors. Out: a node, which has a rule in `rules_sequences.py`.
Torch runs these layers on fake tensors step by step, which needs the number of steps as a plain number.

    with recurrent_as_nodes():
        trace(body)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from fxbatch.torch_private import FakeTensor

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, "
    "bool batch_first"
)
_lock = threading.Lock()
_library = torch.library.Library("fxbatch_ragged", "DEF")
_library.define(f"lstm(Tensor input, Tensor[] hx, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
for _name in NAMES[1:]:
    _library.define(f"{_name}(Tensor input, Tensor hx, {_ARGUMENTS}) -> (Tensor, Tensor)")


def _shapes(x: torch.Tensor, states: list[torch.Tensor], bidirectional: bool) -> tuple[torch.Tensor, ...]:
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty((*x.shape[:-1], features)), *[torch.empty_like(h) for h in states])


def _fake(
    x: torch.Tensor, hx: torch.Tensor | Sequence[torch.Tensor], params: object, has_biases: object, num_layers: object,
    dropout: object, train: object, bidirectional: bool, batch_first: object,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _shapes(x, [hx] if isinstance(hx, torch.Tensor) else [*hx], bidirectional)


for _name in NAMES:
    torch.library.register_fake(f"fxbatch_ragged::{_name}", _fake)

NODES: dict[object, torch._ops.OpOverload] = {
    getattr(torch.ops.fxbatch_ragged, name).default: getattr(torch.ops.aten, name).input for name in NAMES
}  # the node in a graph -> what runs


@contextlib.contextmanager
def recurrent_as_nodes() -> Iterator[None]:
    """Recurrent layers on fake tensors are one node; on others what they always are, in any thread."""
    functions: object = torch._VF
    with _lock:
        for name in NAMES:
            setattr(functions, name, _one_node(name, getattr(functions, name)))
        try:
            yield
        finally:
            for name in NAMES:
                delattr(functions, name)


def _one_node(name: str, plain: Callable[..., object]) -> Callable[..., object]:
    node: Callable[..., object] = getattr(torch.ops.fxbatch_ragged, name).default

    def call(*args: object) -> object:
        if isinstance(args[0], FakeTensor) and len(args) == 9 and isinstance(args[2], (list, tuple)):
            return node(*args)
        return plain(*args)

    return call
