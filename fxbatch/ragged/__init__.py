"""Operations on tensors whose sizes are the instance's own: `[T, 64]`, with another T in each instance.

In: a per-instance body and which dimensions differ. Out: a PackedFunction, which runs all instances at once on packed
rows: a tensor [T, ...rest] of each instance is T consecutive rows of one tensor [sum of T, ...rest].
"""
