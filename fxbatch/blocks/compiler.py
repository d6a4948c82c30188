"""`fb.compile`: a block that takes a minibatch.

In: a block (or block-like). Out: an nn.Module from a list of instances to batched results.

    model = fb.compile(fb.Map(fb.Scalar()) >> fb.Sum())
    model([[1, 2], [3, 4, 5]])          # tensor([ 3., 12.])

Source: Looks et al. 2017, section 3.1 (Compiler).
"""

from __future__ import annotations

from fxbatch.blocks.block import Block, Typed
from fxbatch.blocks.build import walk
from fxbatch.blocks.infer import complain, give
from fxbatch.blocks.types import PyObjectType


def resolve(root: Block) -> None:
    """Settle all types of an expression: its input is a Python object when nothing says otherwise.

    BlockTypeError names the first block whose type stays unknown, or a declaration that was never resolved.
    """
    if root.input_type is None:
        give(root, "input", PyObjectType(), root)
    blocks = [m for m in walk(root) if isinstance(m, Typed)]
    for block in blocks:
        block.infer_types()
        if hasattr(block, "declaration"):
            _ = block.declaration.target  # raises when it was never resolved
    for block in blocks:
        for side in ("input", "output"):
            if block.type_at(side) is None:  # type: ignore[arg-type]  # a literal of the tuple above
                raise complain(
                    block, f"the {side} type is unknown: nothing around it implies it; call set_{side}_type()"
                )
