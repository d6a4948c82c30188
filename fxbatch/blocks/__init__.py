"""Blocks: concise, statically typed models over structured data, batched by the engine.

In: blocks, composed. Out: `compile(block)`, an nn.Module over minibatches of Python objects.

    import fxbatch.blocks as fb
    model = fb.compile(fb.Map(fb.Scalar()) >> fb.Sum())
    model([[1, 2], [3, 4, 5]])          # tensor([ 3., 12.])

Source: Looks et al. 2017, section 3; the names are those of TensorFlow Fold's `td`.
"""

from fxbatch.blocks.block import Block, Output, Typed
from fxbatch.blocks.compiler import CompiledBlock, compile
from fxbatch.blocks.composition import AllOf, Composition, Pipe
from fxbatch.blocks.control import ForwardDeclaration, Metric, OneOf, Optional
from fxbatch.blocks.convert import convert_to_block
from fxbatch.blocks.fractal import FractalNet
from fxbatch.blocks.function import Function
from fxbatch.blocks.layer import Layer, ScopedLayer
from fxbatch.blocks.layers import FC, Embedding
from fxbatch.blocks.leaves import (
    FromTensor,
    Identity,
    InputTransform,
    OneHot,
    OneHotFromList,
    Scalar,
    Tensor,
    Vector,
    Void,
    Zeros,
)
from fxbatch.blocks.records import Record
from fxbatch.blocks.reductions import Max, Mean, Min, Sum
from fxbatch.blocks.sequences import RNN, Broadcast, Fold, Map, NGrams, Reduce, Zip, ZipWith
from fxbatch.blocks.tuples import Concat, GetItem, Length, Nth, Slice
from fxbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    canonicalize_type,
    convert_to_type,
)
from fxbatch.errors import BlockTypeError

__all__ = [
    "AllOf",
    "Block",
    "BlockTypeError",
    "Broadcast",
    "BroadcastSequenceType",
    "CompiledBlock",
    "Composition",
    "Concat",
    "Embedding",
    "FC",
    "Fold",
    "ForwardDeclaration",
    "FractalNet",
    "FromTensor",
    "Function",
    "GetItem",
    "Identity",
    "InputTransform",
    "Layer",
    "Length",
    "Map",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "NGrams",
    "Nth",
    "OneHot",
    "OneHotFromList",
    "OneOf",
    "Optional",
    "Output",
    "Pipe",
    "PyObjectType",
    "RNN",
    "Record",
    "Reduce",
    "ResultType",
    "Scalar",
    "ScopedLayer",
    "SequenceType",
    "Slice",
    "Sum",
    "Tensor",
    "TensorType",
    "TupleType",
    "Typed",
    "Vector",
    "Void",
    "VoidType",
    "Zeros",
    "Zip",
    "ZipWith",
    "canonicalize_type",
    "compile",
    "convert_to_block",
    "convert_to_type",
]
