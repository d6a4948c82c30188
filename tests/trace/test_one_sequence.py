"""Packed sequences of one sequence: equal to the loop, packed where the forward is, and recorded where it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import fxbatch
from fxbatch.runtime.forward_code import ForwardCode
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_forward import PackedForward
from fxbatch.trace import calls
from tests.oracle import check_equal

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(4, 5, 2, proj_size=2, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 3, 2, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 3, bias=False),
}


def _by_length(self: Any, x: torch.Tensor) -> Any:
    outputs, state = self.rnn(pack_padded_sequence(self.e(x).unsqueeze(1), [len(x)]))
    padded, lengths = pad_packed_sequence(outputs)
    return padded.squeeze(1), lengths, state


def _batch_first(self: Any, x: torch.Tensor) -> Any:
    lengths = torch.tensor([x.shape[0]])
    packed = pack_padded_sequence(self.e(x)[None], lengths, batch_first=True, enforce_sorted=False)
    outputs, state = self.rnn(packed)
    padded, lengths = pad_packed_sequence(outputs, batch_first=True, total_length=12, padding_value=0.5)
    return padded[0], lengths, state


def _shorter(self: Any, x: torch.Tensor) -> Any:
    outputs, state = self.rnn(pack_padded_sequence(self.e(x).unsqueeze(1), torch.LongTensor([len(x) - 1])))
    return outputs.data, outputs.batch_sizes, state


def _written(self: Any, x: torch.Tensor) -> Any:
    """What torch copies is no view: writes to it don't reach what it is made of."""
    steps = self.e(x).unsqueeze(1)
    packed = pack_padded_sequence(steps, [len(x)])
    packed.data.mul_(2)
    outputs, state = self.rnn(packed)
    padded, _ = pad_packed_sequence(outputs)
    padded += 1
    return outputs.data, steps, padded, state


def _unpacked(self: Any, x: torch.Tensor) -> Any:
    outputs, state = self.rnn(pack_sequence([self.e(x)]))
    return unpack_sequence(outputs)[0], state


def _sorted_by_hand(self: Any, x: torch.Tensor) -> Any:
    lengths = torch.tensor([len(x)])
    order = torch.sort(lengths).indices
    packed = pack_padded_sequence(self.e(x).unsqueeze(1)[:, order], lengths[order])
    outputs, state = self.rnn(packed)
    return pad_packed_sequence(outputs)[0].index_select(1, order), state


def _shortened(self: Any, x: torch.Tensor) -> Any:
    lengths = torch.tensor([len(x)])
    lengths -= 1
    outputs, state = self.rnn(pack_padded_sequence(self.e(x).unsqueeze(1), lengths))
    return pad_packed_sequence(outputs)[0], state


def _two(self: Any, x: torch.Tensor) -> Any:
    outputs, state = self.rnn(pack_sequence([self.e(x), self.e(x[:2])]))
    return *pad_packed_sequence(outputs), state


FORWARDS = (_batch_first, _shorter, _written, _unpacked, _sorted_by_hand, _shortened, _two)


def _model(forward: Callable[..., Any], rnn: nn.Module, *, waits: bool, **options: Any) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.rnn = nn.Linear(4, 4), rnn

    def run(self: Any, x: torch.Tensor) -> Any:
        result = forward(self, x)
        return None if waits and result[0].sum().item() > 1e9 else result

    Model.forward = fxbatch.autobatch(  # type: ignore[method-assign]
        run if waits else forward, out="list", adaptive=False, **options
    )
    torch.manual_seed(0)
    return Model()


def _sequences(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("forward", "layer"), [*((_by_length, x) for x in LAYERS), *((f, "GRU") for f in FORWARDS)]
)
def test_as_the_loop(forward: Callable[..., Any], layer: str, waits: bool) -> None:
    model = _model(forward, LAYERS[layer](), waits=waits)
    check_equal(model, _sequences(3, 7, 2, 5, 7))


def test_a_length_that_torch_refuses_is_its_error() -> None:
    model = _model(_shorter, nn.GRU(4, 3), waits=False)
    with pytest.raises(RuntimeError, match="greater than 0"):
        model(_sequences(3, 1))


@pytest.mark.parametrize("waits", [False, True])
def test_nothing_waits_for_batch_sizes(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_values(*_: object) -> object:
        raise AssertionError("a call needs values")

    monkeypatch.setattr(calls, "_run_on_values", needs_values)
    model = _model(_batch_first, nn.LSTM(4, 3), waits=waits)
    check_equal(model, _sequences(3, 7, 2, 5))
    told = str(fxbatch.explain(model, _sequences(4, 6, 2, 9)))
    assert "instance by instance" not in told


@pytest.mark.parametrize("forward", [_by_length, _batch_first])
def test_a_forward_with_packed_sequences_is_packed(forward: Callable[..., Any]) -> None:
    model = _model(forward, nn.GRU(4, 3), waits=False)
    packed = PackedForward(ForwardCode(Options(), model))
    plain: Any = type(model).forward.__wrapped__  # type: ignore[attr-defined]
    assert packed.call(plain, [((model, x), {}) for x in _sequences(3, 7, 2, 5)], "list") is not None
    (family,) = packed.families.values()
    assert len(family.variants) == 1


def test_rows_picked_by_other_indices_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.rnn(self.e(x).index_select(0, torch.tensor([1, 0])))

    monkeypatch.setattr(calls, "_run_on_values", lambda *_: pytest.fail("a call needs values"))
    check_equal(_model(forward, nn.GRU(4, 3), waits=True), _sequences(3, 7, 2, 5))


def test_what_was_asked_for_may_be_written_to() -> None:
    """What packed calls gave is read as a copy."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.rnn(self.e(x))[0].sum(0)
        read = h.detach().tolist()
        array = torch.tensor(read)
        array += 1
        rows = h.detach().numpy()
        return h * 2, array, torch.as_tensor(rows.copy())

    check_equal(_model(forward, nn.GRU(4, 3), waits=False), _sequences(3, 7, 2, 5, 9))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_state_beside_a_packed_sequence(layer: Callable[..., nn.RNNBase]) -> None:
    """Results with a PackedSequence, whose class looks at what it is made of; lengths that are given."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = layer(4, 5, batch_first=True)

        @fxbatch.autobatch(out="list", adaptive=False)
        def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            state = x.new_zeros(1, 1, 5)
            packed = pack_padded_sequence(x[None], length, batch_first=True)
            found, _ = self.rnn(packed, (state, state) if layer is nn.LSTM else state)
            return pad_packed_sequence(found, batch_first=True)[0].sum(1)

    model, xs = Encoder(), [torch.randn(n, 4) for n in (3, 9, 3, 5, 9, 3, 5, 8, 7)]
    for _ in range(2):
        check_equal(model, xs, [torch.tensor([len(x)]) for x in xs])
