"""Which signatures run call by call for now, because building their graphs would cost more than it saves.

    postponed = Postponed()
    late = postponed.choose(program.signatures, counts)       # those whose graphs are not to be built yet

Building an operation's graphs takes as long as running some hundred calls of it one by one. A model whose tensors have
another shape for every instance (whole graphs, whole sentences at once) has hundreds of signatures with a few calls
each. Where many are new at once, each is built when it has run so many calls as building it costs: at worst that is
twice the time of the better choice, as for who rents skis before buying them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fxbatch.ir import CONSTANT_KINDS, Signature

MANY = 64  # new signatures in one program from which on building is put off
ENOUGH = 500  # calls that cost about as much as building: 75 ms at 0.15 ms a call, forwards and backwards
REASON = "met too few times so far for building its graphs to pay"


class Postponed:
    """Counts the calls of signatures that came many at once; bounded."""

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._calls: OrderedDict[Signature, int] = OrderedDict()  # of those that wait
        self._built: OrderedDict[Signature, None] = OrderedDict()

    def choose(self, signatures: Sequence[Signature], counts: Sequence[int]) -> frozenset[int]:
        """Positions of the signatures that run call by call in this program; `counts`: their calls in it."""
        new = [
            s
            for s, signature in enumerate(signatures)
            if counts[s] and signature not in self._built and signature not in self._calls
            and not signature.reason and signature.operation.kind not in CONSTANT_KINDS
        ]  # fmt: skip
        many = len(new) > MANY or bool(self._calls)  # a model that has had many will have more
        for s in new:
            if many:
                self._calls[signatures[s]] = 0
            else:
                self._built[signatures[s]] = None
        late = []
        if self._calls:
            for s, signature in enumerate(signatures):
                calls = self._calls.get(signature)
                if calls is None or not counts[s]:
                    continue
                if calls >= ENOUGH:
                    self._calls.pop(signature, None)  # another thread may have been quicker
                    self._built[signature] = None
                else:
                    self._calls[signature] = calls + counts[s]
                    late.append(s)
        for table in (self._calls, self._built):
            while len(table) > self.capacity:
                table.popitem(last=False)
        return frozenset(late)
