"""Softmax and weighted sums over the rows of each instance, and their gradients, in one loop each.

In: addresses of contiguous float32 rows, the sizes of the instances, how many elements a row has. Out: written to the
last addresses. Torch does the same in more launches, each of which costs 20 to 40 us where caches are cold, as they are
between two minibatches; so does taking the memory of a tensor as an array, and hence addresses.

    softmax(rows.data_ptr(), np.array([2, 0, 1]), 1, made.data_ptr())     # rows [0, 0, 0] give [0.5, 0.5, 1]

Compiled by Cython; without it torch does it (COMPILED, `lengths.py`).
"""

from __future__ import annotations

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

if cython.compiled:
    from cython.cimports.libc.math import expf

COMPILED = bool(cython.compiled)
Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Address = cython.typedef(cython.size_t)
Floats = cython.typedef(cython.p_float)


def weighted_sums(weights: Address, rows: Address, sizes: Ints, width: Int, out: Address) -> None:
    """[total], [total, width] => [n, width]: the sums of each row times its weight."""
    factor = cython.cast(Floats, weights)
    read = cython.cast(Floats, rows)
    result = cython.cast(Floats, out)
    for i in range(len(sizes)):
        for k in range(width):
            result[k] = 0
        for _ in range(sizes[i]):
            weight = factor[0]
            for k in range(width):
                result[k] += weight * read[k]
            factor += 1
            read += width
        result += width


def weighted_gradients(
    gradient: Address,
    weights: Address,
    rows: Address,
    sizes: Ints,
    width: Int,
    of_weights: Address,
    of_rows: Address,
) -> None:
    """The gradients of `weighted_sums`, from that of what it gives."""
    grad = cython.cast(Floats, gradient)
    factor = cython.cast(Floats, weights)
    read = cython.cast(Floats, rows)
    result = cython.cast(Floats, of_rows)
    for_factor = cython.cast(Floats, of_weights)
    for i in range(len(sizes)):
        for _ in range(sizes[i]):
            weight = factor[0]
            product = cython.cast(cython.float, 0)
            for k in range(width):
                result[k] = weight * grad[k]
            for k in range(width):
                product += read[k] * grad[k]
            for_factor[0] = product
            factor += 1
            for_factor += 1
            read += width
            result += width
        grad += width


def softmax(rows: Address, sizes: Ints, width: Int, out: Address) -> None:
    """[total, width] => the same: what the rows of an instance have at one place adds up to 1."""
    read = cython.cast(Floats, rows)
    result = cython.cast(Floats, out)
    for i in range(len(sizes)):
        for k in range(width if sizes[i] else 0):
            top = read[k]
            total = cython.cast(cython.float, 0)
            for r in range(sizes[i]):
                top = top if read[k + r * width] <= top else read[k + r * width]
            for r in range(sizes[i]):
                result[k + r * width] = expf(read[k + r * width] - top)
                total += result[k + r * width]
            for r in range(sizes[i]):
                result[k + r * width] /= total
        read += sizes[i] * width
        result += sizes[i] * width


def softmax_gradients(gradient: Address, weights: Address, sizes: Ints, width: Int, out: Address) -> None:
    """The gradient of `softmax`, from that of what it gave."""
    grad = cython.cast(Floats, gradient)
    read = cython.cast(Floats, weights)
    result = cython.cast(Floats, out)
    for i in range(len(sizes)):
        for k in range(width):
            total = cython.cast(cython.float, 0)
            for r in range(sizes[i]):
                total += grad[k + r * width] * read[k + r * width]
            for r in range(sizes[i]):
                result[k + r * width] = read[k + r * width] * (grad[k + r * width] - total)
        grad += sizes[i] * width
        read += sizes[i] * width
        result += sizes[i] * width
