"""Blocks: concise, statically typed models over structured data, batched by the engine.

In: blocks, composed. Out: `compile(block)`, an nn.Module over minibatches of Python objects.

    import fxbatch.blocks as fb
    model = fb.compile(fb.Map(fb.Scalar()) >> fb.Sum())
    model([[1, 2], [3, 4, 5]])          # tensor([ 3., 12.])

Source: Looks et al. 2017, section 3; the names are those of TensorFlow Fold's `td`.
"""

from fxbatch.blocks.block import (
    Block,
    Composition,
    GetItem,
    Identity,
    Output,
    Pipe,
    convert_to_block,
)
from fxbatch.blocks.compiler import CompiledBlock, compile
from fxbatch.blocks.control import ForwardDeclaration, Metric, OneOf, Optional
from fxbatch.blocks.fractal import FractalNet
from fxbatch.blocks.function import Function, Layer, ScopedLayer
from fxbatch.blocks.layers import FC, Embedding
from fxbatch.blocks.leaves import (
    FromTensor,
    InputTransform,
    OneHot,
    OneHotFromList,
    Scalar,
    Tensor,
    Vector,
    Void,
    Zeros,
)
from fxbatch.blocks.records import AllOf, Record
from fxbatch.blocks.reductions import Max, Mean, Min, Sum
from fxbatch.blocks.sequences import RNN, Broadcast, Fold, Map, NGrams, Reduce, Zip, ZipWith
from fxbatch.blocks.training import build_optimizer_from_params, epochs, group_by_batches, parse_spec
from fxbatch.blocks.tuples import Concat, Length, Nth, Slice
from fxbatch.blocks.typed import Typed
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
from fxbatch.errors import BlockTypeError, BlockValueError, UnorderedRecordError

__all__ = [
    "AllOf",
    "Block",
    "BlockTypeError",
    "BlockValueError",
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
    "UnorderedRecordError",
    "Vector",
    "Void",
    "VoidType",
    "Zeros",
    "Zip",
    "ZipWith",
    "build_optimizer_from_params",
    "canonicalize_type",
    "compile",
    "convert_to_block",
    "convert_to_type",
    "epochs",
    "group_by_batches",
    "parse_spec",
]
