"""Neuro-symbolic concept learner (Mao et al. 2019): programs over the objects of a picture, run softly.

The repository's executor and concept embeddings with one picture and its program: 3 to 8 objects with features of 256,
programs of 2 to 6 operations, CLEVR's concepts. The author's library is not installed; what the executor takes from it
stands here.
"""

from __future__ import annotations

import functools
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

ATTRIBUTES = {
    "color": ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"],
    "material": ["rubber", "metal"],
    "shape": ["cube", "sphere", "cylinder"],
    "size": ["small", "large"],
}
CONCEPTS = [concept for concepts in ATTRIBUTES.values() for concept in concepts]
RELATIONS = ["left", "right", "front", "behind"]
FEATURES, HIDDEN = 256, 64
SETS = ["object_set"]
INPUTS = {
    "scene": [], "filter": SETS, "relate": ["object"], "intersect": SETS * 2, "union": SETS * 2,
    "query": ["object"], "exist": SETS, "count": SETS, "count_greater": SETS * 2,
}  # fmt: skip

SOURCE = Source(
    "vacancy/NSCL-PyTorch-Release",
    "ef493d58a986dcb1ea16a23183a57119abeaff34",
    stubs={
        "jacinle": (), "jacinle.utils": (), "jacinle.logging": (), "jacinle.utils.enum": (), "jacinle.utils.cache": (),
        "jactorch": (), "jactorch.nn": (), "jactorch.nn.functional": (), "six": (), "PIL": ("Image",),
        "nscl.datasets": (), "nscl.datasets.definition": (), "nscl.datasets.common": (),
        "nscl.datasets.common.program_executor": (),
    },
)  # fmt: skip


class LinearLayer(nn.Sequential):
    """Of the author's library: a layer, and no activation after it."""

    def __init__(self, inputs: int, outputs: int, activation: Any = None) -> None:
        super().__init__(nn.Linear(inputs, outputs))


def add_dim_as_except(tensor: Tensor, like: Tensor, *dims: int) -> Tensor:
    """The tensor's dimensions stand where `dims` of `like` are, all others have size one."""
    shape = [1] * like.dim()
    for own, dim in zip(tensor.shape, sorted(d % like.dim() for d in dims), strict=True):
        shape[dim] = own
    return tensor.view(shape)


def meshgrid(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """All pairs along a dimension."""
    dim %= tensor.dim()
    size = tensor.size(dim)
    first = tensor.unsqueeze(dim + 1).expand(*tensor.shape[: dim + 1], size, *tensor.shape[dim + 1 :])
    return first, first.transpose(dim, dim + 1)


def general_softmax(logits: Tensor, impl: str = "standard", training: bool = False) -> Tensor:
    """The executor's choice of one object: soft, or the best one."""
    if impl == "standard":
        return F.softmax(logits, dim=-1)
    return F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)


def library() -> None:
    """Fill the stubs."""
    mode = SimpleNamespace(from_string=lambda name: name)
    fill = {
        "jacinle.logging": {"get_logger": lambda file: SimpleNamespace(warning=print)},
        "jacinle.utils.cache": {"cached_property": functools.cached_property},
        "jacinle.utils.enum": {"JacEnum": __import__("enum").Enum},
        "jactorch": {
            "add_dim_as_except": add_dim_as_except,
            "broadcast": lambda t, dim, size: t.expand(size, *t.shape[1:]),
            "logsumexp": lambda t, dim: t.logsumexp(dim),
            "meshgrid": meshgrid,
        },
        "jactorch.nn": {"LinearLayer": LinearLayer},
        "jactorch.nn.functional": {"general_softmax": general_softmax},
        "six": {"string_types": str},
        "nscl.datasets.common.program_executor": {"ParameterResolutionMode": mode},
        "nscl.datasets.definition": {
            "gdef": SimpleNamespace(
                operation_signatures_dict={name: ([], inputs, "") for name, inputs in INPUTS.items()}
            )
        },
    }
    for module, names in fill.items():
        for name, value in names.items():
            setattr(sys.modules[module], name, value)
        parent, _, child = module.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, sys.modules[module])


def build(load: Load) -> Driver:
    library()
    reasoning = load("nscl.nn.reasoning_v1.quasi_symbolic")

    class Executor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            concepts = {
                "attribute": {
                    "attributes": list(ATTRIBUTES),
                    "concepts": [(c, a) for a, names in ATTRIBUTES.items() for c in names],
                },
                "relation": {
                    "attributes": ["spatial_relation"],
                    "concepts": [(c, "spatial_relation") for c in RELATIONS],
                },
            }
            dims = [None, FEATURES, FEATURES]
            self.net = reasoning.DifferentiableReasoning(concepts, dims, [None, HIDDEN, HIDDEN])

        def forward(self, objects: Tensor, pairs: Tensor, program: Any, wanted: Tensor) -> Tensor:
            _, _, ((operation, answer),) = self.net([[None, objects, pairs]], [program])
            scores = answer[0] if operation == "query" else answer
            if not self.training:
                return scores.argmax() if operation == "query" else scores
            if operation == "query":
                return F.cross_entropy(scores[None], wanted)
            return F.smooth_l1_loss(scores, wanted[0].to(scores.dtype))

    return Driver(Executor, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Features of objects and pairs, a program, an answer."""
    choose, generator = random.Random(number), torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        size = choose.randint(3, 8)
        objects = torch.randn(size, FEATURES, generator=generator)
        pairs = torch.randn(size, size, FEATURES, generator=generator)
        found.append((objects, pairs, program(choose), torch.tensor([choose.randrange(len(CONCEPTS))])))
    return found


def program(choose: random.Random) -> list[dict[str, Any]]:
    """Scene; filters and relations, one after another; a question."""
    blocks: list[dict[str, Any]] = [{"op": "scene", "inputs": []}]

    def add(op: str, inputs: list[int]) -> int:
        block: dict[str, Any] = {"op": op, "inputs": inputs}
        if op == "filter":
            block |= {"concept_idx": choose.randrange(len(CONCEPTS)), "concept_values": CONCEPTS}
        if op == "relate":
            block |= {
                "relational_concept_idx": choose.randrange(len(RELATIONS)),
                "relational_concept_values": RELATIONS,
            }
        if op == "query":
            block |= {
                "attribute_idx": choose.randrange(len(ATTRIBUTES)),
                "attribute_values": list(ATTRIBUTES),
            }
        blocks.append(block)
        return len(blocks) - 1

    ends = []
    for _ in range(choose.randint(1, 2)):
        at = 0
        for _ in range(choose.randint(1, 2)):
            at = add(choose.choice(["filter", "relate"]), [at])
        ends.append(at)
    if len(ends) == 2 and choose.random() < 0.5:
        ends = [add(choose.choice(["intersect", "union"]), ends)]
    add("count_greater" if len(ends) == 2 else choose.choice(["query", "exist", "count"]), ends)
    return blocks


MODEL = PublicModel("NSCL executor", "program over entities", SOURCE, build, {"out": "list"})
