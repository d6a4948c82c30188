"""Memory that kernels reuse: buffers grown to the largest number of rows, with views kept per number.

workspace = Workspace()                    # one a thread and run; never shared between threads
a, b = workspace.views(kernel, n)          # the kernel's intermediates for n rows, ready made
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.codegen.native import extension

if TYPE_CHECKING:
    from fxbatch.codegen.kernels import Kernel

_KEPT = 256  # numbers of rows whose views are kept, a kernel


class Workspace:
    """Buffers by (device, dtype, slot), and each kernel's views of them by number of rows."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
        self._views: dict[Kernel, dict[int, tuple[torch.Tensor, ...]]] = {}
        self._run: object = None
        self._room: Any = None
        self._prepared: dict[
            Kernel, tuple[tuple[torch.Tensor, ...], list[int], tuple[torch.Tensor, ...]]
        ] = {}

    def enter_run(self, run: object) -> None:
        """From here on kernels are called for this run; what they prepared for another is forgotten.

        Until it is called, and after `enter_run(None)`, kernels prepare anew at each call.
        """
        if run is not self._run:
            self._run = run
            self._prepared.clear()

    def prepared(self, kernel: Kernel, shared: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What a kernel computes of shared operands alone: once a run, and again where one was written to."""
        if self._run is None or any(x.is_inference() for x in shared):
            return kernel.prepare(*shared)
        versions = [x._version for x in shared]
        found = self._prepared.get(kernel)
        if found is not None and found[1] == versions and all(map(operator.is_, found[0], shared)):
            return found[2]
        made = kernel.prepare(*shared)
        self._prepared[kernel] = (shared, versions, made)
        return made

    def views(self, kernel: Kernel, n: int) -> tuple[torch.Tensor, ...]:
        """The intermediates of a kernel for n rows (made once, then found)."""
        table = self._views.get(kernel)
        if table is None:
            table = self._views[kernel] = {}
        views = table.get(n)
        if views is None:
            if len(table) >= _KEPT:
                table.clear()
            views = table[n] = self._make(kernel, n)
        return views

    def _make(self, kernel: Kernel, n: int) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False):
            return kernel.make_views(n, self._alloc)

    def _alloc(
        self, slot: int, dtype: torch.dtype, device: torch.device, sizes: Sequence[int]
    ) -> torch.Tensor:
        count = 1
        for size in sizes:
            count *= size
        key = (device, dtype, slot)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < count:
            flat = self._flat[key] = torch.empty(count + count // 4, dtype=dtype, device=device)
            self._forget()
        return flat[:count].view(tuple(sizes))

    def _forget(self) -> None:
        """A buffer has moved: views of the old one still work, but would keep its memory."""
        for table in self._views.values():
            table.clear()

    def native_room(self) -> Any:
        """Where native programs of this thread write their intermediates, and on how many threads they run: torch's."""
        if self._room is None:
            self._room = extension.Room()
        self._room.threads = torch.get_num_threads()
        return self._room

    def clear(self) -> None:
        """Give all memory back."""
        self._room = None
        self._flat.clear()
        self._views.clear()
        self._prepared.clear()
