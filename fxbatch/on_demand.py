"""Libraries that take long to import and that few processes need: imported at the first look at one of their names.

from fxbatch.on_demand import networkx as nx     # 0.16 s, not paid by `import fxbatch`
nx.DiGraph()                                     # is networkx.DiGraph()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class OnDemand:
    """Stands for a library until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self._name), name)
        self.__dict__[name] = found
        return found


if TYPE_CHECKING:
    import networkx
    import rich.console as rich_console
    import rich.table as rich_table
    import rich.text as rich_text

    prometheus_parser: Any  # has no types of its own
else:
    networkx = OnDemand("networkx")
    rich_console, rich_table = OnDemand("rich.console"), OnDemand("rich.table")
    rich_text = OnDemand("rich.text")
    prometheus_parser = OnDemand("prometheus_client.parser")

__all__ = ["networkx", "prometheus_parser", "rich_console", "rich_table", "rich_text"]
