"""torch's recurrent layers as one node of a traced body, whatever the number of steps.

In: a call of nn.LSTM, nn.GRU or nn.RNN on fake tensors. Out: a node, which has a rule in `rules_sequences.py`.
Torch runs these layers on fake tensors step by step, which needs the number of steps as a plain number.

    OneSymbolicSequence()(torch.gru, (x, hx, ...))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxbatch.torch_private import FakeTensor
from fxbatch.trace.one_sequence import RECURRENT, Arguments, Layer, OneSequenceOfForm

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, "
    "bool batch_first"
)
_library = torch.library.Library("fxbatch_ragged", "DEF")
_library.define(f"lstm(Tensor input, Tensor[] hx, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
for _name in NAMES[1:]:
    _library.define(f"{_name}(Tensor input, Tensor hx, {_ARGUMENTS}) -> (Tensor, Tensor)")


def _fake(
    x: torch.Tensor, hx: torch.Tensor | Sequence[torch.Tensor], params: object, has_biases: object, num_layers: object,
    dropout: object, train: object, bidirectional: bool, batch_first: object,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    states = [hx] if isinstance(hx, torch.Tensor) else hx
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty((*x.shape[:-1], features)), *[torch.empty_like(h) for h in states])


for _name in NAMES:
    torch.library.register_fake(f"fxbatch_ragged::{_name}", _fake)

NODES: dict[object, torch._ops.OpOverload] = {
    getattr(torch.ops.fxbatch_ragged, name).default: getattr(torch.ops.aten, name).input for name in NAMES
}  # the node in a graph -> what runs
_NODE_OF: dict[object, torch._ops.OpOverload] = dict(zip(RECURRENT, NODES, strict=True))


class OneSymbolicSequence(OneSequenceOfForm):
    """Recurrent layers as nodes."""

    def layer(self, func: object) -> Layer:
        return _NODE_OF[func]

    def __call__(self, func: object, args: Arguments) -> object:
        plain = func in RECURRENT and len(args) == 9 and type(args[3]) is bool and type(args[0]) is FakeTensor
        return _NODE_OF[func](*args) if plain else super().__call__(func, args)
