"""A stand-in for `torch_geometric.data.Data`, which the tests do not depend on: attributes live in a mapping of a
storage object that knows its parent by a weak reference, and are found by `__getattr__`.

    data = Data(x=torch.randn(3, 8), edge_index=edges, smiles="CCO")
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

_OF_NODES = {"x", "pos", "batch", "node_type"}


class Storage(MutableMapping[str, Any]):
    def __init__(self, parent: Any) -> None:
        self.__dict__["_mapping"] = {}
        self.__dict__["_parent"] = weakref.ref(parent)

    def __len__(self) -> int:
        return len(self._mapping)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{key}'") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.__dict__["_mapping"][key]

    def __setitem__(self, key: str, value: Any) -> None:
        if value is None and key in self.__dict__["_mapping"]:
            del self.__dict__["_mapping"][key]
        elif value is not None:
            self.__dict__["_mapping"][key] = value

    def __delitem__(self, key: str) -> None:
        del self.__dict__["_mapping"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_mapping"])

    def to_dict(self) -> dict[str, Any]:
        return copy.copy(self.__dict__["_mapping"])

    @property
    def num_nodes(self) -> int | None:
        if "num_nodes" in self:
            found: int = self["num_nodes"]
            return found
        for key, value in self.items():
            if isinstance(value, torch.Tensor) and key in _OF_NODES:
                return value.size(0)
        return None


class Data:
    def __init__(self, x: Any = None, edge_index: Any = None, edge_attr: Any = None, **kwargs: Any) -> None:
        self.__dict__["_store"] = Storage(self)
        for key, value in {"x": x, "edge_index": edge_index, "edge_attr": edge_attr, **kwargs}.items():
            if value is not None:
                setattr(self, key, value)

    def __getattr__(self, key: str) -> Any:
        if "_store" not in self.__dict__:
            raise RuntimeError("the data object has no store")
        return getattr(self._store, key)

    def __setattr__(self, key: str, value: Any) -> None:
        setattr(self._store, key, value)

    def __getitem__(self, key: str) -> Any:
        return self._store[key]

    def __contains__(self, key: str) -> bool:
        return key in self._store

    @property
    def x(self) -> Any:
        return self["x"] if "x" in self._store else None

    @property
    def edge_index(self) -> Any:
        return self["edge_index"] if "edge_index" in self._store else None

    @property
    def batch(self) -> Any:
        return self["batch"] if "batch" in self._store else None

    @property
    def num_nodes(self) -> int | None:
        return self._store.num_nodes

    def keys(self) -> list[str]:
        return list(self._store)

    def to_dict(self) -> dict[str, Any]:
        return self._store.to_dict()

    @classmethod
    def from_dict(cls, mapping: dict[str, Any]) -> Data:
        return cls(**mapping)
