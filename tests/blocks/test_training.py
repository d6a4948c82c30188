"""Helpers of a training loop by Fold's names: batches, epochs, specifications of optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fxbatch.blocks as fb


def test_group_by_batches() -> None:
    assert list(fb.group_by_batches([], 2)) == []
    assert list(fb.group_by_batches([1, 2, 3], 1)) == [[1], [2], [3]]
    assert list(fb.group_by_batches(iter([1, 2, 3]), 2)) == [[1, 2], [3]]
    assert list(fb.group_by_batches([1, 2, 3], 2, truncate=True)) == [[1, 2]]
    assert list(fb.group_by_batches([1, 2], 2, truncate=True)) == [[1, 2]]
    assert next(fb.group_by_batches(itertools.count(), 3)) == [0, 1, 2]
    for size in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            fb.group_by_batches([1], size)


def test_epochs() -> None:
    assert [list(x) for x in fb.epochs((0 for _ in range(2)), 5)] == [[0, 0]] * 5
    forever = fb.epochs(range(5), shuffle=False)
    assert [list(next(forever)) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    shuffled = fb.epochs(range(50), 0)
    first, second, third = (list(next(shuffled)) for _ in range(3))
    assert (
        first == sorted(second) == sorted(third) == list(range(50))
        and len({*map(tuple, (first, second, third))}) == 3
    )
    (items,) = fb.epochs(given := [1], 1)
    assert items is given
    assert [list(x) for x in fb.epochs("abc", 2, prng=lambda: 0.0)] == [["a", "b", "c"], ["b", "c", "a"]]


def test_the_first_epoch_is_not_waited_for() -> None:
    seen: list[int] = []
    first = next(fb.epochs((seen.append(i) or i for i in range(9)), 2))
    assert next(iter(first)) == 0 and seen == [0]


@pytest.mark.parametrize(("items", "n", "error"), [(3, 2, TypeError), ([1], -1, ValueError)])
def test_what_has_no_epochs(items: Any, n: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        fb.epochs(items, n)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("", {}),
        ("str=str,three=3,half=0.5", {"str": "str", "three": 3, "half": 0.5}),
        ("foo=True", {"foo": True}),
        ("foo=[1,2],bar=[True,False], par=[3.5, 4]", {"foo": [1, 2], "bar": [True, False], "par": [3.5, 4]}),
        ("meh=mehmeh,foo=[1,2],bar=a b", {"meh": "mehmeh", "foo": [1, 2], "bar": "a b"}),
        (" lr = 1e-3 , name='x' ", {"lr": 1e-3, "name": "x"}),
    ],
)
def test_parse_spec(spec: str, found: dict[str, Any]) -> None:
    assert fb.parse_spec(spec) == found


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("foo", 'Spec "foo" doesn\'t contain any key value pair'),
        ("a=1,foo", "key value pair"),
        ("=3", "key value pair"),
        ("foo=3.0,foo=bar", "Duplicate key foo"),
        ("foo=3.0,bar=", "Empty value for key bar"),
    ],
)
def test_what_is_no_spec(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fb.parse_spec(spec)


def test_optimizers_by_name() -> None:
    w = [torch.nn.Parameter(torch.zeros(2))]
    for name in ("adagrad", "ada_grad", "ADAGRAD"):
        made = fb.build_optimizer_from_params(name, w, learning_rate=1e-3)
        assert isinstance(made, torch.optim.Adagrad) and made.defaults["lr"] == 1e-3
    adam = fb.build_optimizer_from_params(parameters=w, beta1=0.8, weight_decay=0.1)
    assert isinstance(adam, torch.optim.Adam)
    assert adam.defaults["betas"] == (0.8, 0.999) and adam.defaults["weight_decay"] == 0.1
    spec = fb.parse_spec("optimizer=momentum,learning_rate=0.5,momentum=0.9,use_nesterov=True")
    sgd = fb.build_optimizer_from_params(parameters=w, **spec)
    assert sgd.defaults["nesterov"] and sgd.defaults["momentum"] == 0.9 and sgd.defaults["lr"] == 0.5
    rms = fb.build_optimizer_from_params("rmsprop", w, lr=0.1, decay=0.7)
    assert rms.defaults["alpha"] == 0.7 and rms.defaults["eps"] == 1e-10
    for name in ("gradientdescent", "adadelta"):
        fb.build_optimizer_from_params(name, w, learning_rate=0.1).step()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("magic", {}, "Unrecognized optimizer: magic"),
        ("adam", {"magic_flag": 3}, "The adam optimizer doesn't take an argument named magic_flag"),
        ("adagrad", {}, "The adagrad optimizer requires learning_rate to be set."),
        ("momentum", {"learning_rate": 0.1}, "requires momentum"),
        ("adam", {}, "requires parameters"),
    ],
)
def test_what_is_no_optimizer(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fb.build_optimizer_from_params(name, **arguments)
