"""Types of a decorated function, for type checkers: the minibatches that it takes, and the results that it gives.

In: the types of a function of one instance. Out: those of the decorated one, as protocols; nothing here runs.

    @autobatch
    def forward(self, tree: Tree) -> Tensor: ...      # Batched[Model, Tree, [], Tensor, Tensor]

    model.forward(trees)                              # takes Instances[Tree], gives Tensor

The first argument is checked. Others may be a minibatch or, by `shared=`, one for all instances, and named ones have
no name in a type: they are Any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from fxbatch.runtime.engine import ReadyMinibatch, TracedInstance

P = ParamSpec("P")
A = TypeVar("A")
S = TypeVar("S")
R = TypeVar("R")
Item = TypeVar("Item")
Owner_contra = TypeVar("Owner_contra", contravariant=True)
First_contra = TypeVar("First_contra", contravariant=True)
One_co = TypeVar("One_co", covariant=True)
Many_co = TypeVar("Many_co", covariant=True)

Instances = (
    Iterable[Item] | Iterable[TracedInstance] | ReadyMinibatch | torch.Tensor | np.ndarray[Any, Any]
    | Mapping[str, Any] | Dataset[Item]
)  # fmt: skip


class BatchedMethod(Protocol[First_contra, Many_co]):
    """A decorated method of an object, `model.forward`."""

    @overload
    def __call__(self, instances: Instances[First_contra], /, *others: Any, **named: Any) -> Many_co: ...

    @overload
    def __call__(self, **named: Any) -> Many_co: ...


class BatchedFunction(Protocol[First_contra, P, One_co, Many_co]):
    """A decorated function of one argument. `__wrapped__` is the function of one instance."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[First_contra, P], One_co]: ...

    @overload
    def __call__(self, instances: Instances[First_contra], /, *others: Any, **named: Any) -> Many_co: ...

    @overload
    def __call__(self, **named: Any) -> Many_co: ...


class Batched(Protocol[Owner_contra, First_contra, P, One_co, Many_co]):
    """A decorated function of two arguments or more: of an object and an instance, where it is a method."""

    @property
    def __wrapped__(self) -> Callable[Concatenate[Owner_contra, First_contra, P], One_co]: ...

    @overload
    def __get__(
        self, owner: None, kind: type, /
    ) -> Batched[Owner_contra, First_contra, P, One_co, Many_co]: ...

    @overload
    def __get__(
        self, owner: Owner_contra, kind: type | None = None, /
    ) -> BatchedMethod[First_contra, Many_co]: ...

    @overload
    def __call__(
        self, owner: Owner_contra, instances: Instances[First_contra], /, *others: Any, **named: Any
    ) -> Many_co: ...

    @overload
    def __call__(self, instances: Instances[Owner_contra], /, *others: Any, **named: Any) -> Many_co: ...

    @overload
    def __call__(self, **named: Any) -> Many_co: ...


class Stacked(Protocol):
    """`@autobatch(...)` that gives the structure of one result, numbers as a tensor."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a result that is a number is an object, too
        self, fn: Callable[Concatenate[S, A, P], float], /
    ) -> Batched[S, A, P, float, torch.Tensor]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # see above
        self, fn: Callable[Concatenate[A, P], float], /
    ) -> BatchedFunction[A, P, float, torch.Tensor]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[S, A, P], R], /) -> Batched[S, A, P, R, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[A, P], R], /) -> BatchedFunction[A, P, R, R]: ...


class Listed(Protocol):
    """`@autobatch(out="list")`: a list with one result per instance."""

    @overload
    def __call__(self, fn: Callable[Concatenate[S, A, P], R], /) -> Batched[S, A, P, R, list[R]]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[A, P], R], /) -> BatchedFunction[A, P, R, list[R]]: ...


class ListedWithExceptions(Protocol):
    """`@autobatch(out="list", return_exceptions=True)`: an instance's exception in the place of its result."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[S, A, P], R], /
    ) -> Batched[S, A, P, R, list[R | Exception]]: ...

    @overload
    def __call__(
        self, fn: Callable[Concatenate[A, P], R], /
    ) -> BatchedFunction[A, P, R, list[R | Exception]]: ...
