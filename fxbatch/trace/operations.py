"""What is one operation: the marker, the names, and which Python numbers are lifted.

In: torch functions, modules, what the user marks. Out: `ir.Operation`s with the rule that made them so.

    @operation
    def attend(query, keys):
        return torch.softmax(keys @ query, 0) @ keys
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fxbatch.torch_private import reparametrized, tree_flatten, tree_unflatten

TORCH_MODULE = "a torch.nn module (rule 1)"
PLAIN_MODULE = "a submodule called with tensors and plain scalars (rule 2)"
MARKED = "marked @fxbatch.operation (rule 3)"
FUNCTION = "a torch function that met a value (rule 4)"


def is_marked(module: torch.nn.Module) -> bool:
    """Whether this module or its class is marked @operation."""
    return getattr(module, "__fxbatch_operation__", False) is True


class Attribute:
    """A tensor attribute as a function: `Attribute("T")(x)` is `x.T`; picklable."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, x: torch.Tensor) -> Any:
        return getattr(x, self.name)

    def __repr__(self) -> str:
        return f"Attribute({self.name!r})"

    def __reduce__(self) -> Any:
        return attribute, (self.name,)


@functools.cache
def attribute(name: str) -> Attribute:
    """The one Attribute of a name."""
    return Attribute(name)


class CustomFunction:
    """A `torch.autograd.Function` as a plain function: `CustomFunction(cls)(x)` is `cls.apply(x)`.

    examined: what its code reads, of which there is one CustomFunction for each content; None: not looked at yet.
    """

    def __init__(self, cls: type[torch.autograd.Function], examined: Any = None) -> None:
        self.cls = cls
        self.examined = examined
        self.__name__ = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __reduce__(self) -> Any:
        return CustomFunction, (self.cls,)


@dataclass(frozen=True)
class Functional:
    """A module as a function of all of its tensors: equal for one module in one mode that reads the same."""

    module: torch.nn.Module
    training: tuple[bool, ...]
    tie_weights: bool
    state: int = 0  # a number for the content of what its code reads
    examined: Any = field(default=None, compare=False, repr=False)

    @property
    def __name__(self) -> str:
        return f"functional_call_{type(self.module).__name__}"

    def __call__(
        self, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with reparametrized(self.module, tensors, tie_weights=self.tie_weights):
            return self.module(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "examined": None}


def plain_function(func: Any) -> Any:
    """The function to call for what `__torch_function__` was given: getters become Attributes."""
    owner = getattr(func, "__self__", None)
    if owner is not None and getattr(func, "__name__", "") == "__get__" and hasattr(owner, "__name__"):
        return attribute(owner.__name__)
    if isinstance(owner, property) and getattr(func, "__name__", "") == "__get__":
        assert owner.fget is not None
        return attribute(owner.fget.__name__)
    return func


def function_name(func: Any) -> str:
    """A short name: "add", "softmax", "T"."""
    name = getattr(func, "__name__", None) or type(func).__name__
    return name.strip("_") if name.startswith("__") else name


def take_row(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x[index]` for an integer tensor of shape []: the lifted form of `h[node.index]`."""
    return x.index_select(0, index.reshape(1)).squeeze(0)


def take_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x[index]` for an integer tensor of shape [] that may count from the end."""
    index = torch.where(index < 0, index + x.shape[0], index)
    return x.index_select(0, index.reshape(1)).squeeze(0)


def embedding_of_rows(
    index: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` in a table of the instance's own: under vmap, an index out of range reads another's row."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    rows = weight.index_select(0, index.reshape(-1)).reshape(*index.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    padding = padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx
    return torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)


def one_hot_within(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`, which under vmap gives zeros for a class out of range."""
    if num_classes < 1:
        return F.one_hot(index, num_classes)
    zeros = torch.zeros(*index.shape, num_classes, dtype=torch.int64, device=index.device)
    return zeros.scatter(-1, index.unsqueeze(-1), 1)


# Functions whose rules under vmap miss an index that is out of range, and what is recorded in their place.
WITHIN_RANGE: dict[Any, Callable[..., torch.Tensor]] = {
    F.embedding: embedding_of_rows,
    F.one_hot: one_hot_within,
}


# argument leaf, size, stride, offset, conjugated, negated
View = tuple[int, tuple[int, ...], tuple[int, ...], int, bool, bool]


def on_views(func: Callable[..., Any], views: tuple[View, ...], *args: Any, **kwargs: Any) -> Any:
    """Call `func` with some tensor arguments seen through a view: `x @ weight.T` for `weight`."""
    leaves, spec = tree_flatten((args, kwargs))
    for leaf, size, stride, offset, conjugated, negated in views:
        base = leaves[leaf]
        if len(size) == 2 and (size, stride) == (base.shape[::-1], base.stride()[::-1]):
            view = base.t()
        else:
            view = base.as_strided(size, stride, offset)
        view = view.conj() if conjugated else view
        leaves[leaf] = view.neg() if negated else view
    args, kwargs = tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def named_functions(names: str) -> frozenset[Any]:
    """The functions of torch, and the methods of tensors, that have these names."""
    places = (torch, torch.Tensor)
    return frozenset(getattr(where, n) for n in names.split() for where in places if hasattr(where, n))


# Functions of two arguments whose number may be a tensor of shape []; the same, for floating-point tensors only.
LIFTS = named_functions(
    "add sub rsub mul div true_divide floor_divide remainder fmod eq ne lt le gt ge greater less greater_equal "
    "less_equal not_equal subtract multiply divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __div__ "
    "__rdiv__"
)
LIFTS_FLOAT = named_functions("pow float_power __pow__ __rpow__")


def lifted_dtype(func: Any, t: Any, number: Any) -> torch.dtype | None:
    """The dtype of a lifted number beside a tensor of type t, None when it must stay static.

    Exact only: eager casts the number to the computation's dtype, so a [] tensor of that dtype is the same.
    """
    dtype = t.dtype
    floats = dtype in (torch.float32, torch.float64)
    if not (func in LIFTS and (floats or dtype is torch.int64)) and not (func in LIFTS_FLOAT and floats):
        return None
    if type(number) is int:
        return dtype if -(2**63) <= number < 2**63 else None
    if type(number) is float:
        return dtype if floats else torch.get_default_dtype()
    return None
