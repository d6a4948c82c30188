"""A reference execution: runs programs call by call, eagerly, differentiable by ordinary autograd.

It shares no code with the runtime, so that recordings can be tested (and plans compared) against it.

    execution = ReferenceExecution()
    recording = record_minibatch(fn, [((tree,), {})], table, execution)
    results = execution.results(recording)     # per-instance pytrees with real tensors
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fxbatch.ir import Modes, Program
from fxbatch.torch_private import tree_map


@contextlib.contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """The grad and autocast modes of a signature, as they were where the call was made."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        kinds = dict(modes.autocast)
        for kind in ("cpu", "cuda"):
            if kind in kinds:
                stack.enter_context(torch.autocast(kind, dtype=kinds[kind]))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class ReferenceExecution:
    """Interprets each phase's Program with `Signature.run`; keeps every value."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.programs: list[Program] = []
        self.reads: list[int] = []  # how many values each read asked for

    def run(self, program: Program) -> None:
        """Run the calls of one phase in recorded order."""
        assert program.known == len(self.values), f"{program.known} known, {len(self.values)} kept"
        self.programs.append(program)
        payload = {sid: iter(items) for sid, items in program.constants.items()}
        offsets = program.input_offsets
        for call, sid in enumerate(program.sig.tolist()):
            signature = program.signatures[sid]
            ids = program.inputs[offsets[call] : offsets[call + 1]].tolist()
            assert all(i < len(self.values) for i in ids), "an input comes after its reader"
            inputs = [self.values[i] for i in ids]
            if signature.operation.kind == "constant":
                outputs = [next(payload[sid])]
            elif signature.operation.kind == "number":
                (t,) = signature.outputs
                outputs = [torch.tensor(next(payload[sid]), dtype=t.dtype, device=t.device)]
            else:
                with applied(signature.modes):
                    outputs = signature.run(inputs, [s.resolve() for s in signature.shared])
            assert len(outputs) == len(signature.outputs), signature
            for out, t in zip(outputs, signature.outputs, strict=True):
                assert (tuple(out.shape), out.dtype) == (t.shape, t.dtype), f"{signature}: got {out.shape}"
            self.values += outputs
        for sid, left in payload.items():
            assert next(left, None) is None, f"constants of signature {sid} left over"

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """Real detached tensors of the values."""
        self.reads.append(len(values))
        return [self.values[i].detach() for i in values]

    def numbers(self, values: Sequence[int]) -> list[Any]:
        """The values as Python numbers."""
        return [t.tolist() for t in self.read(values)]

    def settled(self, base: int) -> Any:
        """C finds none."""
        return None

    def materialise(self, values: Sequence[int]) -> list[torch.Tensor]:
        """Real tensors that carry gradients."""
        return [self.values[i] for i in values]

    def results(self, recording: Any) -> list[Any]:
        """The per-instance results of a recording, Value leaves replaced by real tensors."""
        self.run(recording.pending_program(recording.output_ids()))
        return [tree_map(self._real, r) for r in recording.results]

    def _real(self, leaf: Any) -> Any:
        from fxbatch.trace.values import Value

        return self.values[leaf.id] if type(leaf) is Value else leaf
