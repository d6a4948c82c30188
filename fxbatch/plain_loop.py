"""The undecorated forward, one instance at a time: where the user asks for it, and as the short way of a call.

In: a forward, and the arguments of each instance. Out: a list with one result per instance.

    with disabled():                    # decorated callables in this thread are plain loops
        ...
    loop_over(forward, [((model, x), {}), ((model, y), {"scale": 2.0})])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from typing import Any

import torch

from fxbatch.signature import bodies
from fxbatch.torch_private import memory_is_real
from fxbatch.trace.state import current_recorder


class _Switch(threading.local):
    disabled = 0


switch = _Switch()


class disabled(ContextDecorator):
    """Within this block decorated functions run undecorated, one instance at a time, for comparison.

    It applies to the current thread, and may be nested. It is a decorator, too.

    Example:
        >>> batched = model(sentences)
        >>> with fxbatch.disabled():
        ...     one_by_one = model(sentences)
        >>> torch.allclose(batched, one_by_one)
        True
    """

    def __enter__(self) -> None:
        switch.disabled += 1

    def __exit__(self, *_: object) -> None:
        switch.disabled -= 1


def undecorated() -> bool:
    """Whether decorated callables are plain loops here: by the user's wish, inside another decorated callable or an
    operation of it, and where nothing is computed for real (fake tensors, traced graphs)."""
    return bool(switch.disabled or bodies.running or current_recorder() is not None or not memory_is_real())


_LISTS = (list, tuple)


def plain_columns(args: Sequence[Any]) -> list[Sequence[Any]]:
    """Arguments that are lists, tuples or tensors of as many items each; none where one is not."""
    columns: list[Sequence[Any]] = []
    for x in args:
        if type(x) is torch.Tensor and x.dim():
            x = x.unbind(0)
        if type(x) not in _LISTS or not x or (columns and len(x) != len(columns[0])):
            return []
        columns.append(x)
    return columns


def loop_over(
    fn: Callable[..., Any], instances: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], *, first: int = 0
) -> list[Any]:
    """The result of each instance, exactly as the plain loop has it: decorated calls within it undecorated.
    first: the number of the first instance in its minibatch."""
    results: list[Any] = []
    switch.disabled += 1
    try:
        for args, named in instances:
            results.append(fn(*args, **named) if named else fn(*args))
    except BaseException as error:
        error.add_note(f"fxbatch: in instance {first + len(results)} of the minibatch")
        raise
    finally:
        switch.disabled -= 1
    return results
