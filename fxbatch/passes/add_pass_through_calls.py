"""Program -> (Program, Schedule): Fold's pass-throughs as calls, so that any runtime can run them.

    v1 = s1 f(v0)                        v1 = s1 f(v0)
    v2 = s1 f(v1)             ==>        v2 = s3 pass_through(v0)
    v3 = s2 g(v0, v2)                    v3 = s1 f(v1) ...
                                         v5 = s2 g(v4, v3)

Each depth reads the depth before and no other; results are carried to the last depth. The schedule is by
depth (Looks et al. 2017, section 2). `insert_pass_throughs` does the same on the batched graph.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from fxbatch.ir import Operation, Program, Schedule, Signature, Slot, Template, TensorType
from fxbatch.passes.batch_by_depth import depth_schedule, depths


@functools.lru_cache(maxsize=4096)
def pass_through(type_: TensorType) -> Signature:
    """The identity on values of a type; one Signature a type."""
    operation = Operation(
        "pass_through", "function", torch.clone, rule="carries a value to the next depth", identity=True
    )
    arguments = Template.of(((Slot("input", 0),), {}))
    return Signature(operation, (type_,), (type_,), (), arguments, Template.of(Slot("output", 0)))


def add_pass_through_calls(program: Program) -> tuple[Program, Schedule]:
    """The program with identity calls, and its schedule by depth.

    Output i of the result stands for output i of the program. The new signatures follow the old ones.
    """
    depth = depths(program).astype(np.int64)
    made = np.zeros(program.values, dtype=np.int64)
    made[program.known :] = depth[program.call_of_value]
    last = np.zeros(program.values, dtype=np.int64)
    np.maximum.at(last, program.inputs, depth[program.reader])
    last[program.outputs] = int(depth.max(initial=0)) + 1
    count = np.maximum(last - 1 - made, 0)
    if not count.any():
        return program, depth_schedule(program, depth, "fold")
    return _carry(program, depth, made, count)


def _carry(
    program: Program, depth: np.ndarray, made: np.ndarray, count: np.ndarray
) -> tuple[Program, Schedule]:
    """Add `count[v]` identity calls for each value v, then put all calls in order of depth."""
    calls, added = len(program), int(count.sum())
    value = np.repeat(np.arange(program.values), count)
    start = np.cumsum(count) - count  # of each value's identity calls
    hop = np.arange(added) - np.repeat(start, count)
    types, type_of = np.unique(program.type_of_value[value], return_inverse=True)
    signatures = program.signatures + tuple(pass_through(program.types[t]) for t in types.tolist())
    maker_instance = np.zeros(program.values, dtype=program.instance.dtype)
    maker_instance[program.known :] = program.instance[program.call_of_value]

    all_depth = np.concatenate([depth, made[value] + 1 + hop])
    order = np.argsort(all_depth, kind="stable")
    sig = np.concatenate([program.sig, len(program.signatures) + type_of]).astype(np.int32)[order]
    position = np.empty(calls + added, dtype=np.int64)  # of each call, new ones last, in the new order
    position[order] = np.arange(calls + added)
    width = np.concatenate([program.width[program.sig], np.ones(added, dtype=np.int64)])
    first = np.empty(calls + added, dtype=np.int64)
    first[order] = program.known + np.cumsum(width[order]) - width[order]

    own = np.arange(program.values)  # the new id of each old value
    own[program.known :] = (
        first[program.call_of_value] + own[program.known :] - program.first_value[program.call_of_value]
    )
    carrier = first[calls:]  # the value of each identity call

    def at_depth(values: np.ndarray, below: np.ndarray) -> np.ndarray:
        """The new id of each value as depth `below` has it."""
        hops = below - made[values]
        carried = carrier[np.minimum(start[values] + np.maximum(hops, 1) - 1, added - 1)]
        return np.where(hops > 0, carried, own[values])

    inputs = at_depth(program.inputs, depth[program.reader] - 1)
    before = at_depth(value, made[value] + hop)
    rewritten = dataclasses.replace(
        program,
        signatures=signatures,
        sig=sig,
        inputs=_in_order(program, inputs, before, order),
        instance=np.concatenate([program.instance, maker_instance[value]])[order],
        outputs=at_depth(program.outputs, np.full(len(program.outputs), int(depth.max(initial=0)))),
    )
    return rewritten, depth_schedule(rewritten, all_depth[order], "fold")


def _in_order(program: Program, inputs: np.ndarray, added: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The input entries of old and added calls, in the new order of calls."""
    arity = np.concatenate([program.arity[program.sig], np.ones(len(added), dtype=np.int64)])
    entries = np.concatenate([inputs, added])
    start = (np.cumsum(arity) - arity)[order]
    arity = arity[order]
    within = np.arange(int(arity.sum())) - np.repeat(np.cumsum(arity) - arity, arity)
    return entries[np.repeat(start, arity) + within]
