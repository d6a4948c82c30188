"""Helpers of a training loop under their names in TensorFlow Fold: minibatches, epochs, optimizers from a line of text.

In: any iterable; text like `optimizer=momentum,learning_rate=0.1,momentum=0.9`. Out: lists; an optimizer.

    for epoch in fb.epochs(data, 3):
        for minibatch in fb.group_by_batches(epoch, 32):
            model(minibatch)
    fb.build_optimizer_from_params(parameters=..., **fb.parse_spec("optimizer=momentum,momentum=0.9,learning_rate=0.1"))
"""

from __future__ import annotations

import ast
import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from fxbatch.errors import BlockValueError

T = TypeVar("T")


def group_by_batches(iterable: Iterable[T], batch_size: int, truncate: bool = False) -> Iterator[list[T]]:
    """Successive lists of `batch_size` items; the last has fewer, or with `truncate` is left out when it has.

    ValueError when batch_size is not positive.

    >>> list(group_by_batches(range(5), 2)), list(group_by_batches(range(5), 2, truncate=True))
    ([[0, 1], [2, 3], [4]], [[0, 1], [2, 3]])
    """
    if batch_size <= 0:
        raise BlockValueError(f"batch_size is positive, got {batch_size!r}")
    return _batches(iter(iterable), batch_size, truncate)


def _batches(items: Iterator[T], size: int, truncate: bool) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        if len(batch) == size or not truncate:
            yield batch


def epochs(
    items: Iterable[T], n: int | None = None, shuffle: bool = True, prng: Callable[[], float] | None = None
) -> Iterator[Iterable[T]]:
    """The items again and again: `n` times, or without end for None and 0.

    The first time they come as they are, so that what computes them need not be done; then as one list, shuffled in
    place after each time. For n = 1, `items` itself.

    prng: gives random numbers in [0, 1) for the shuffling; `random.random` by default. TypeError when items is no
    iterable, ValueError for a negative n.

    >>> [list(epoch) for epoch in epochs(range(3), 2, shuffle=False)]
    [[0, 1, 2], [0, 1, 2]]
    """
    if not isinstance(items, Iterable):
        raise TypeError(f"epochs takes an iterable, got {items!r}")
    if n is not None and n < 0:
        raise BlockValueError(f"the number of epochs is not negative, got {n!r}")
    return iter([items]) if n == 1 else _epochs(items, n, shuffle, prng or random.random)


def _epochs(
    items: Iterable[T], n: int | None, shuffle: bool, prng: Callable[[], float]
) -> Iterator[Iterable[T]]:
    first, second = itertools.tee(items)
    yield first
    listed = list(second)
    for _ in range(n - 1) if n else itertools.count():
        if shuffle:
            _shuffle(listed, prng)
        yield listed


def _shuffle(items: list[Any], prng: Callable[[], float]) -> None:
    """Fisher and Yates's shuffle, in place."""
    for i in range(len(items) - 1, 0, -1):
        j = int(prng() * (i + 1))
        items[i], items[j] = items[j], items[i]


_PAIR = re.compile(r"\s*([^=,]+?)\s*=\s*(\[[^\[\]=]*\]|[^=,\[\]]*?)\s*(?:,|$)")


def parse_spec(spec: str | None) -> dict[str, Any]:
    """A dict from text: keys and values, `key=value`, with commas between them.

    A value is a Python literal where it is one (a number, True, a list), else text. ValueError for text of another
    form, an empty value, a key that comes twice.

    >>> parse_spec("optimizer=adam, learning_rate=1e-3, sizes=[1, 2]")
    {'optimizer': 'adam', 'learning_rate': 0.001, 'sizes': [1, 2]}
    """
    found: dict[str, Any] = {}
    place, spec = 0, spec or ""
    while place < len(spec.rstrip()):
        pair = _PAIR.match(spec, place)
        if pair is None:
            raise BlockValueError(f'Spec "{spec}" doesn\'t contain any key value pair at {spec[place:]!r}')
        key, value = pair.groups()
        if not value:
            raise BlockValueError(f"Empty value for key {key}")
        if key in found:
            raise BlockValueError(f"Duplicate key {key}")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
        place = pair.end()
    return found


_NEEDED = object()  # for an argument that has no default
# By TensorFlow's names: optimizers, and their arguments with TensorFlow's defaults.
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-8}),
    "adagrad": (torch.optim.Adagrad, {"learning_rate": _NEEDED, "initial_accumulator_value": 0.1}),
    "adam": (torch.optim.Adam, {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    "gradientdescent": (torch.optim.SGD, {"learning_rate": _NEEDED}),
    "momentum": (torch.optim.SGD, {"learning_rate": _NEEDED, "momentum": _NEEDED, "use_nesterov": False}),
    "rmsprop": (
        torch.optim.RMSprop,
        {"learning_rate": _NEEDED, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10, "centered": False},
    ),
}
# TensorFlow's name of an argument -> PyTorch's, where they differ.
_ARGUMENTS = {"learning_rate": "lr", "epsilon": "eps", "use_nesterov": "nesterov", "decay": "alpha"}


def build_optimizer_from_params(
    optimizer: str = "adam", parameters: Iterable[Any] | None = None, **kwargs: Any
) -> torch.optim.Optimizer:
    """An optimizer of `parameters` by its name and arguments, as `parse_spec` gives them.

    optimizer: adadelta, adagrad, adam, gradientdescent, momentum or rmsprop; capitals and underscores don't matter.
    kwargs: arguments by TensorFlow's names (learning_rate, beta1, epsilon, ...) or PyTorch's (lr, weight_decay, ...);
    those left out are TensorFlow's defaults. ValueError for an unknown name, an argument that the optimizer doesn't
    take, one that it needs and that is left out.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = build_optimizer_from_params("momentum", layer.parameters(), momentum=0.9, learning_rate=1e-3)
    >>> type(optimizer).__name__, optimizer.defaults["lr"], optimizer.defaults["momentum"]
    ('SGD', 0.001, 0.9)
    """
    name = optimizer.replace("_", "").lower()
    if name not in _OPTIMIZERS:
        raise BlockValueError(f"Unrecognized optimizer: {name}; there are {', '.join(_OPTIMIZERS)}")
    kind, arguments = _OPTIMIZERS[name]
    settings = {_ARGUMENTS.get(k, k): default for k, default in arguments.items()}
    of_torch = [k for k in inspect.signature(kind).parameters if k != "params"]
    for argument, value in kwargs.items():
        if argument not in arguments and argument not in of_torch:
            raise BlockValueError(f"The {name} optimizer doesn't take an argument named {argument}")
        settings[_ARGUMENTS.get(argument, argument) if argument in arguments else argument] = value
    for argument in arguments:
        if settings[_ARGUMENTS.get(argument, argument)] is _NEEDED:
            raise BlockValueError(f"The {name} optimizer requires {argument} to be set.")
    if "beta1" in settings:
        settings.setdefault("betas", (settings["beta1"], settings["beta2"]))
        del settings["beta1"], settings["beta2"]
    if parameters is None:
        raise BlockValueError(f"The {name} optimizer requires parameters to be set: model.parameters()")
    return kind(parameters, **settings)
