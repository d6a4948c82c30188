/* Loops over the columns of a program, one pass each: what numpy needs a dozen temporary arrays for.

   Every function has a numpy or Python twin beside its caller, which runs where this was not built and
   which tests compare it with. Arguments are contiguous arrays, taken through the buffer protocol; sizes
   are those of the callers' docstrings, and value and call numbers are checked against them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST 20

typedef struct {
    Py_buffer views[MOST];
    int64_t lengths[MOST]; /* items */
    int taken;
} Arrays;

static void release(Arrays *a)
{
    while (a->taken)
        PyBuffer_Release(&a->views[--a->taken]);
}

/* One letter an array: q int64, i int32, b bool or uint8; upper case when it is written to. */
static int take(Arrays *a, PyObject *const *args, Py_ssize_t given, const char *kinds)
{
    Py_ssize_t wanted = (Py_ssize_t)strlen(kinds);
    a->taken = 0;
    if (given < wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arrays, not %zd", wanted, given);
        return -1;
    }
    for (Py_ssize_t k = 0; k < wanted; k++) {
        int writes = kinds[k] < 'a', letter = kinds[k] | 32;
        Py_ssize_t size = letter == 'q' ? 8 : letter == 'i' ? 4 : 1;
        Py_buffer *view = &a->views[k];
        if (PyObject_GetBuffer(args[k], view, PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0)) < 0) {
            release(a);
            return -1;
        }
        a->taken++;
        if (view->itemsize != size) {
            PyErr_Format(PyExc_TypeError, "array %zd has items of %zd bytes, not %zd", k, view->itemsize, size);
            release(a);
            return -1;
        }
        a->lengths[k] = view->len / size;
    }
    return 0;
}

/* The number that follows the arrays; 0 where it is left out. */
static int number(Arrays *a, PyObject *const *args, Py_ssize_t given, Py_ssize_t at, Py_ssize_t *out)
{
    *out = given > at ? PyLong_AsSsize_t(args[at]) : 0;
    if (*out == -1 && PyErr_Occurred()) {
        release(a);
        return -1;
    }
    return 0;
}

#define LENGTH(k) (a.lengths[k])
#define I64(k) ((int64_t *)a.views[k].buf)
#define I32(k) ((int32_t *)a.views[k].buf)
#define U8(k) ((uint8_t *)a.views[k].buf)

static PyObject *finish(Arrays *a, int good)
{
    release(a);
    if (!good) {
        PyErr_SetString(PyExc_IndexError, "a column names a call or a value that is not there");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* For each call the first of the numbers that `per` counts a signature: values made or inputs read, known first.
   NULL, with an exception set, where a column is out of range. */
static int32_t *running(Arrays *a, const int32_t *sig, int64_t calls, const int64_t *per, int64_t signatures,
                        int64_t known)
{
    int32_t *first = PyMem_Malloc((calls + 1) * sizeof(int32_t));
    int64_t at = known;
    if (!first) {
        release(a);
        PyErr_NoMemory();
        return NULL;
    }
    for (int64_t c = 0; c < calls; c++) {
        int32_t s = sig[c];
        if (s < 0 || s >= signatures || at > INT32_MAX) {
            PyMem_Free(first);
            finish(a, 0);
            return NULL;
        }
        first[c] = (int32_t)at;
        at += per[s];
    }
    first[calls] = (int32_t)at;
    if (at > INT32_MAX) {
        PyMem_Free(first);
        finish(a, 0);
        return NULL;
    }
    return first;
}

/* The call that makes each value from `known` on; `values` is set to how many values there are. */
static int32_t *makers(Arrays *a, const int32_t *sig, int64_t calls, const int64_t *width, int64_t signatures,
                       int64_t *values)
{
    int32_t *first = running(a, sig, calls, width, signatures, 0);
    int32_t *maker = first ? PyMem_Malloc((first[calls] + 1) * sizeof(int32_t)) : NULL;
    if (first && !maker) {
        release(a);
        PyErr_NoMemory();
    }
    if (maker) {
        *values = first[calls];
        for (int64_t c = 0; c < calls; c++)
            for (int64_t v = first[c]; v < first[c + 1]; v++)
                maker[v] = (int32_t)c;
    }
    PyMem_Free(first);
    return maker;
}

/* source_calls(sig i32, width, inputs, OUT): the call that makes each input; all values are of this program. */
static PyObject *source_calls(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqQ") < 0)
        return NULL;
    int64_t entries = LENGTH(2), *inputs = I64(2), *out = I64(3), values = 0;
    int good = LENGTH(3) >= entries;
    int32_t *maker = makers(&a, I32(0), LENGTH(0), I64(1), LENGTH(1), &values);
    if (!maker)
        return NULL;
    for (int64_t e = 0; e < entries && good; e++) {
        good = inputs[e] >= 0 && inputs[e] < values;
        out[e] = good ? maker[inputs[e]] : 0;
    }
    PyMem_Free(maker);
    return finish(&a, good);
}

/* longest_before(source, target, DEPTH i32): depth of each call is above those of what it reads. */
static PyObject *longest_before(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqI") < 0)
        return NULL;
    int64_t *source = I64(0), *target = I64(1), edges = LENGTH(0), calls = LENGTH(2);
    int32_t *depth = I32(2);
    int good = edges == LENGTH(1);
    for (int64_t e = 0; good && e < edges; e++) {
        int64_t s = source[e], t = target[e];
        good = s >= 0 && s < calls && t >= 0 && t < calls;
        if (good && depth[s] >= depth[t])
            depth[t] = depth[s] + 1;
    }
    return finish(&a, good);
}

/* longest_after(source, target, own i32, CHAIN i32): chain of each call is its own more than its readers'. */
static PyObject *longest_after(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqiI") < 0)
        return NULL;
    int64_t *source = I64(0), *target = I64(1), edges = LENGTH(0), calls = LENGTH(3);
    int32_t *own = I32(2), *chain = I32(3);
    int good = edges == LENGTH(1) && LENGTH(2) == calls;
    for (int64_t e = edges - 1; good && e >= 0; e--) {
        int64_t s = source[e], t = target[e];
        good = s >= 0 && s < calls && t >= 0 && t < calls;
        if (good && chain[t] + own[s] > chain[s])
            chain[s] = chain[t] + own[s];
    }
    return finish(&a, good);
}

/* live(sig i32, width, arity, inputs, outputs, stays bool, ALIVE bool, known) -> dead calls. Alive are calls of
   signatures that stay, calls that make outputs, and what a live call reads. */
static PyObject *live(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iqqqqbB") < 0 || number(&a, args, n, 7, &known) < 0)
        return NULL;
    int32_t *sig = I32(0);
    int64_t calls = LENGTH(0), *arity = I64(2), *inputs = I64(3), at = LENGTH(3), *outputs = I64(4);
    int64_t results = LENGTH(4), values = 0, dead = 0;
    uint8_t *stays = U8(5), *alive = U8(6);
    int good = LENGTH(6) == calls && LENGTH(2) == LENGTH(1) && LENGTH(5) == LENGTH(1);
    int32_t *maker = makers(&a, sig, calls, I64(1), LENGTH(1), &values);
    if (!maker)
        return NULL;
    if (good)
        memset(alive, 0, calls);
    for (int64_t i = 0; good && i < results; i++) {
        int64_t v = outputs[i] - known;
        good = v >= -known && v < values;
        if (good && v >= 0)
            alive[maker[v]] = 1;
    }
    for (int64_t c = calls - 1; good && c >= 0; c--) {
        int64_t reads = arity[sig[c]];
        at -= reads;
        good = at >= 0;
        alive[c] |= stays[sig[c]];
        dead += !alive[c];
        for (int64_t i = 0; good && alive[c] && i < reads; i++) {
            int64_t v = inputs[at + i] - known;
            good = v >= -known && v < values;
            if (good && v >= 0)
                alive[maker[v]] = 1;
        }
    }
    PyMem_Free(maker);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    return none ? PyLong_FromLongLong(dead) : NULL;
}

/* A count sort's offsets from its counts, which stand one place up: offsets[k] is where key k begins. */
static void add_up(int64_t *offsets, int64_t keys)
{
    for (int64_t i = 0; i < keys; i++)
        offsets[i + 1] += offsets[i];
}

/* Filling in has moved each offset to the next key's: back again. */
static void move_back(int64_t *offsets, int64_t keys)
{
    memmove(offsets + 1, offsets, keys * sizeof(int64_t));
    offsets[0] = 0;
}

/* group(key, OFFSETS, ORDER): the positions of each key in order; offsets has one item more than keys. */
static PyObject *group(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qQQ") < 0)
        return NULL;
    int64_t *key = I64(0), *offsets = I64(1), *order = I64(2), items = LENGTH(0), keys = LENGTH(1) - 1;
    int good = keys >= 0 && items == LENGTH(2);
    if (good)
        memset(offsets, 0, (keys + 1) * sizeof(int64_t));
    for (int64_t i = 0; good && i < items; i++) {
        good = key[i] >= 0 && key[i] < keys;
        if (good)
            offsets[key[i] + 1]++;
    }
    if (good)
        add_up(offsets, keys);
    for (int64_t i = 0; good && i < items; i++)
        order[offsets[key[i]]++] = i;
    if (good)
        move_back(offsets, keys);
    return finish(&a, good);
}

/* arrange(sig i32, before i32, first, OFFSETS, ORDER): as group, by the key first[sig] + before of each call. */
static PyObject *arrange(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iiqQQ") < 0)
        return NULL;
    int32_t *sig = I32(0), *before = I32(1);
    int64_t *first = I64(2), *offsets = I64(3), *order = I64(4);
    int64_t calls = LENGTH(0), signatures = LENGTH(2), keys = LENGTH(3) - 1;
    int good = keys >= 0 && LENGTH(1) == calls && LENGTH(4) == calls;
    if (good)
        memset(offsets, 0, (keys + 1) * sizeof(int64_t));
    for (int64_t c = 0; good && c < calls; c++) {
        int64_t key = sig[c] >= 0 && sig[c] < signatures ? first[sig[c]] + before[c] : -1;
        good = key >= 0 && key < keys;
        if (good)
            offsets[key + 1]++;
    }
    if (good)
        add_up(offsets, keys);
    for (int64_t c = 0; good && c < calls; c++)
        order[offsets[first[sig[c]] + before[c]]++] = c;
    if (good)
        move_back(offsets, keys);
    return finish(&a, good);
}

/* peak(key i32, number i32, PEAK): the largest number of each key, at least what is there. */
static PyObject *peak(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iiQ") < 0)
        return NULL;
    int32_t *key = I32(0), *number = I32(1);
    int64_t *most = I64(2), items = LENGTH(0), keys = LENGTH(2);
    int good = items == LENGTH(1);
    for (int64_t i = 0; good && i < items; i++) {
        good = key[i] >= 0 && key[i] < keys;
        if (good && number[i] > most[key[i]])
            most[key[i]] = number[i];
    }
    return finish(&a, good);
}

/* count(key i32, COUNT): how often each key occurs, added to what is there. */
static PyObject *count(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iQ") < 0)
        return NULL;
    int32_t *key = I32(0);
    int64_t *counts = I64(1), items = LENGTH(0), keys = LENGTH(1);
    int good = 1;
    for (int64_t i = 0; good && i < items; i++) {
        good = key[i] >= 0 && key[i] < keys;
        if (good)
            counts[key[i]]++;
    }
    return finish(&a, good);
}

/* own_chains(sig i32, arity, width, inputs, BEFORE i32, LENGTH, known): of each call, how many of its signature
   are before it on a path of such calls alone; of each signature, its longest such path. */
static PyObject *own_chains(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iqqqIQ") < 0 || number(&a, args, n, 6, &known) < 0)
        return NULL;
    int32_t *sig = I32(0), *before = I32(4);
    int64_t calls = LENGTH(0), *arity = I64(1), *inputs = I64(3), entries = LENGTH(3), *longest = I64(5);
    int64_t values = 0, at = 0;
    int good = LENGTH(4) == calls && LENGTH(1) == LENGTH(2) && LENGTH(5) == LENGTH(1);
    int32_t *maker = makers(&a, sig, calls, I64(2), LENGTH(2), &values);
    if (!maker)
        return NULL;
    for (int64_t c = 0; c < calls && good; c++) {
        int32_t s = sig[c], own = 0;
        int64_t end = at + arity[s];
        good = end <= entries;
        for (; good && at < end; at++) {
            int64_t v = inputs[at] - known;
            good = v >= -known && v < values && (v < 0 || maker[v] < c);
            if (good && v >= 0 && sig[maker[v]] == s && before[maker[v]] >= own)
                own = before[maker[v]] + 1;
        }
        before[c] = own;
        if (own >= longest[s])
            longest[s] = own + 1;
    }
    PyMem_Free(maker);
    return finish(&a, good);
}

/* advance(calls, offsets, readers, INDEGREE, READY) -> how many calls became ready. */
static PyObject *advance(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqqQQ") < 0)
        return NULL;
    int64_t *run = I64(0), *offsets = I64(1), *readers = I64(2), *indegree = I64(3), *ready = I64(4);
    int64_t running = LENGTH(0), calls = LENGTH(3), found = 0, room = LENGTH(4);
    int good = LENGTH(1) == calls + 1;
    for (int64_t k = 0; good && k < running; k++) {
        good = run[k] >= 0 && run[k] < calls;
        for (int64_t e = good ? offsets[run[k]] : 0; good && e < offsets[run[k] + 1]; e++)
            if (--indegree[readers[e]] == 0) {
                good = found < room;
                if (good)
                    ready[found++] = readers[e];
            }
    }
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    return none ? PyLong_FromLongLong(found) : NULL;
}

/* feeding(sig i32, inputs, arity, width, first_slot, first_out, SEEN bool): marks the pairs (slot, output). */
static PyObject *feeding(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqqqqB") < 0)
        return NULL;
    int32_t *sig = I32(0), *flat = NULL;
    int64_t *inputs = I64(1), *arity = I64(2), *width = I64(3), *slot = I64(4), *out = I64(5);
    int64_t calls = LENGTH(0), entries = LENGTH(1), at = 0, values = 0, room = 0;
    int64_t signatures = LENGTH(2), outs = signatures ? out[signatures] : 0;
    uint8_t *seen = U8(6);
    int good = LENGTH(6) >= (signatures ? slot[signatures] * outs : 0);
    for (int64_t c = 0; c < calls && good; c++) {
        good = sig[c] >= 0 && sig[c] < signatures;
        room += good ? width[sig[c]] : 0;
    }
    if (good && !(flat = PyMem_Malloc((room + 1) * sizeof(int32_t)))) {
        release(&a);
        return PyErr_NoMemory();
    }
    for (int64_t c = 0; c < calls && good; c++) {
        int32_t s = sig[c];
        int64_t reads = arity[s], makes = width[s];
        uint8_t *pairs = seen + slot[s] * outs;
        good = at + reads <= entries;
        for (int64_t i = 0; good && i < reads; i++, at++, pairs += outs) {
            good = inputs[at] >= 0 && inputs[at] < values;
            if (good)
                pairs[flat[inputs[at]]] = 1;
        }
        for (int64_t j = 0; j < makes; j++)
            flat[values++] = (int32_t)(out[s] + j);
    }
    PyMem_Free(flat);
    return finish(&a, good);
}

/* place(sig i32, order, first, width, first_block, block_start, ROW, known): the row of each value. */
static PyObject *place(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iqqqqqQ") < 0 || number(&a, args, n, 7, &known) < 0)
        return NULL;
    int32_t *sig = I32(0);
    int64_t *order = I64(1), *first = I64(2), *width = I64(3), *block = I64(4), *start = I64(5), *row = I64(6);
    int64_t values = LENGTH(6), calls = LENGTH(0), steps = LENGTH(2) - 1, blocks = LENGTH(5);
    int good = steps < 1 || (first[0] >= 0 && first[steps] <= LENGTH(1) && LENGTH(4) > steps);
    int32_t *value = running(&a, sig, calls, width, LENGTH(3), known);
    if (!value)
        return NULL;
    good = good && value[calls] <= values;
    for (int64_t k = 0; good && k < steps; k++) {
        int64_t b = block[k], room = block[k + 1] - b;
        good = b >= 0 && b + room <= blocks;
        for (int64_t p = first[k]; good && p < first[k + 1]; p++) {
            int64_t c = order[p];
            good = c >= 0 && c < calls && value[c + 1] - value[c] <= room;
            for (int64_t v = good ? value[c] : 0, j = b; good && v < value[c + 1]; v++, j++)
                row[v] = start[j] + (p - first[k]);
        }
    }
    PyMem_Free(value);
    return finish(&a, good);
}

/* What an input group finds: rows in a row (0), one row (1), or neither (2); the rows go to `indices`. */
static int classify(const int64_t *entries, int64_t length, int one, const int64_t *row, int64_t *indices)
{
    int64_t next = 0, same = 0;
    for (int64_t i = 0; i < length; i++)
        indices[i] = row[entries[i]];
    for (int64_t i = 1; i < length; i++) {
        next += indices[i] != indices[i - 1] + 1;
        same += indices[i] != indices[i - 1];
    }
    return !next ? 0 : !same && one ? 1 : 2;
}

/* gather(sig i32, order, first, arity, inputs, first_slot, prior, size, member, first_group, group_size, row,
   ENTRIES, KIND, START, INDICES) -> how many indices: the values that each step reads, in the order of its
   gathers, and of each gather its kind and where its rows begin. */
static PyObject *gather(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqqqqqqqqqqQQQQ") < 0)
        return NULL;
    int32_t *sig = I32(0);
    int64_t *order = I64(1), *first = I64(2), *arity = I64(3), *inputs = I64(4), *first_slot = I64(5);
    int64_t *prior = I64(6), *size = I64(7), *member = I64(8), *first_group = I64(9), *group_size = I64(10);
    int64_t *row = I64(11), *entries = I64(12), *kind = I64(13), *start = I64(14), *indices = I64(15);
    int64_t calls = LENGTH(0), steps = LENGTH(2) - 1, total = LENGTH(12), values = LENGTH(11);
    int64_t gathers = LENGTH(13), base = 0, found = 0, at = 0;
    int good = LENGTH(4) == total && LENGTH(15) >= total && LENGTH(14) == gathers;
    good = good && (steps < 1 || (first[0] >= 0 && first[steps] <= LENGTH(1)));
    int32_t *begin = running(&a, sig, calls, arity, LENGTH(3), 0);
    if (!begin)
        return NULL;
    good = good && begin[calls] == total;
    for (int64_t k = 0; good && k < steps; k++) {
        int64_t rows = first[k + 1] - first[k], s = rows > 0 ? order[first[k]] : -1;
        good = s >= 0 && s < calls;
        if (!good)
            break;
        s = sig[s];
        int64_t reads = arity[s], end = base + rows * reads;
        good = end <= total;
        for (int64_t p = 0; good && p < rows; p++) {
            int64_t c = order[first[k] + p];
            good = c >= 0 && c < calls && sig[c] == s;
            for (int64_t i = 0; good && i < reads; i++) {
                int64_t slot = first_slot[s] + i, value = inputs[begin[c] + i];
                int64_t to = base + prior[slot] * rows + p * size[slot] + member[slot];
                good = to >= base && to < end && value >= 0 && value < values;
                if (good)
                    entries[to] = value;
            }
        }
        for (int64_t g = first_group[s]; good && g < first_group[s + 1]; g++, at++) {
            int64_t length = rows * group_size[g];
            good = at < gathers && base + length <= end;
            if (!good)
                break;
            kind[at] = classify(entries + base, length, group_size[g] == 1, row, indices + found);
            start[at] = kind[at] == 2 ? found : indices[found];
            found += kind[at] == 2 ? length : 0;
            base += length;
        }
    }
    PyMem_Free(begin);
    PyObject *none = finish(&a, good && at == gathers);
    Py_XDECREF(none);
    return none ? PyLong_FromLongLong(found) : NULL;
}

/* agenda(sig i32, depth i32, offsets, readers, cost, INDEGREE, TOTAL, COUNT, STEP, first) -> steps: the ready
   signature of the lowest average depth first; constants have their steps already and an indegree of -1. */
static PyObject *agenda(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t steps = 0;
    if (take(&a, args, n, "iiqqqQQQQ") < 0 || number(&a, args, n, 9, &steps) < 0)
        return NULL;
    int32_t *sig = I32(0), *depth = I32(1);
    int64_t *offsets = I64(2), *readers = I64(3), *cost = I64(4), *indegree = I64(5), *total = I64(6);
    int64_t *left = I64(7), *step = I64(8), calls = LENGTH(0), edges = LENGTH(3), signatures = LENGTH(4);
    int good = LENGTH(1) == calls && LENGTH(2) == calls + 1 && LENGTH(5) == calls && LENGTH(8) == calls &&
               LENGTH(6) == signatures && LENGTH(7) == signatures;
    int32_t *head = PyMem_Malloc((signatures + calls + 1) * sizeof(int32_t)), *next = head + signatures;
    if (!head) {
        release(&a);
        return PyErr_NoMemory();
    }
    for (int64_t s = 0; s < signatures; s++)
        head[s] = -1;
    for (int64_t c = 0; good && c < calls; c++) {
        good = sig[c] >= 0 && sig[c] < signatures && offsets[c] >= 0 && offsets[c] <= offsets[c + 1] &&
               offsets[c + 1] <= edges;
        if (good && indegree[c] == 0) {
            next[c] = head[sig[c]];
            head[sig[c]] = (int32_t)c;
        }
    }
    while (good) {
        int64_t chosen = -1;
        double lowest = 0;
        for (int64_t s = 0; s < signatures; s++)
            if (head[s] >= 0) {
                double mean = (double)total[s] / (double)left[s];
                if (chosen < 0 || mean < lowest || (mean == lowest && cost[s] < cost[chosen])) {
                    chosen = s;
                    lowest = mean;
                }
            }
        if (chosen < 0)
            break;
        int64_t c = head[chosen];
        head[chosen] = -1;
        while (good && c >= 0) {
            int64_t after = next[c];
            step[c] = steps;
            left[chosen]--;
            total[chosen] -= depth[c];
            for (int64_t e = offsets[c]; good && e < offsets[c + 1]; e++) {
                int64_t r = readers[e];
                good = r >= 0 && r < calls;
                if (good && --indegree[r] == 0) {
                    next[r] = head[sig[r]];
                    head[sig[r]] = (int32_t)r;
                }
            }
            c = after;
        }
        steps++;
    }
    PyMem_Free(head);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    return none ? PyLong_FromSsize_t(steps) : NULL;
}

/* The search for a schedule of one component: see the Python twin for what it does. */

typedef struct {
    int64_t lb, value; /* steps that must follow at least; weight of the calls that have not run */
    uint64_t hash;
    int32_t ready;     /* calls in `list` */
    char *memory;      /* one block: what follows */
    int64_t *weight;   /* [signatures] of ready calls, together */
    uint64_t *mark;    /* [signatures] */
    int32_t *top;      /* [signatures]: above the longest chain that remains */
    int32_t *remaining, *waiting; /* [places]: calls that have not run; of those, ready ones */
    int32_t *list;     /* [calls] ready calls */
    uint16_t *before;  /* [calls]: inputs that have not been made */
} State;

typedef struct {
    int64_t lb, value;
    uint64_t hash;
    int32_t parent, action;
} Choice;

typedef struct {
    int64_t calls, signatures, places;
    const int32_t *sig, *place;
    const int64_t *offsets, *readers, *weight, *mark;
    size_t head, size; /* bytes of a state: all but the lists; all */
} Search;

static int by_choice(const void *x, const void *y)
{
    const Choice *a = x, *b = y;
    if (a->lb != b->lb)
        return a->lb < b->lb ? -1 : 1;
    if (a->value != b->value)
        return a->value < b->value ? -1 : 1;
    if (a->parent != b->parent)
        return a->parent < b->parent ? -1 : 1;
    return a->action < b->action ? -1 : a->action > b->action;
}

static int make_state(const Search *p, State *s)
{
    if (!(s->memory = PyMem_Calloc(1, p->size)))
        return -1;
    s->weight = (int64_t *)s->memory;
    s->mark = (uint64_t *)(s->weight + p->signatures);
    s->top = (int32_t *)(s->mark + p->signatures);
    s->remaining = s->top + p->signatures;
    s->waiting = s->remaining + p->places;
    s->before = (uint16_t *)(s->waiting + p->places);
    s->list = (int32_t *)(s->memory + p->head);
    return 0;
}

static void copy_state(const Search *p, State *to, const State *from)
{
    memcpy(to->memory, from->memory, p->head);
    memcpy(to->list, from->list, from->ready * sizeof(int32_t));
    to->lb = from->lb, to->value = from->value, to->hash = from->hash, to->ready = from->ready;
}

static void make_ready(const Search *p, State *s, int32_t c)
{
    s->list[s->ready++] = c;
    s->waiting[p->place[c]]++;
    s->weight[p->sig[c]] += p->weight[c];
    s->mark[p->sig[c]] ^= (uint64_t)p->mark[c];
}

/* Run all ready calls of a signature; `base` is the place of its shortest chain. */
static void run_action(const Search *p, State *s, int32_t action, int64_t base, int64_t *step, int64_t now)
{
    int32_t kept = 0, ready = s->ready;
    s->value -= s->weight[action];
    s->hash ^= s->mark[action];
    s->weight[action] = 0;
    s->mark[action] = 0;
    int32_t *run = s->list + p->calls; /* the second half of the list is scratch */
    int32_t running = 0;
    for (int32_t i = 0; i < ready; i++) {
        int32_t c = s->list[i];
        if (p->sig[c] == action)
            run[running++] = c;
        else
            s->list[kept++] = c;
    }
    s->ready = kept;
    for (int32_t i = 0; i < running; i++) {
        int32_t c = run[i];
        s->remaining[p->place[c]]--;
        s->waiting[p->place[c]]--;
        if (step)
            step[c] = now;
        for (int64_t e = p->offsets[c]; e < p->offsets[c + 1]; e++)
            if (--s->before[p->readers[e]] == 0)
                make_ready(p, s, (int32_t)p->readers[e]);
    }
    while (s->top[action] > base && !s->remaining[s->top[action] - 1])
        s->top[action]--, s->lb--;
}

static void start(const Search *p, State *s, const int64_t *base, const uint16_t *indegree)
{
    memset(s->memory, 0, p->head);
    s->lb = p->places, s->value = 0, s->hash = 0, s->ready = 0;
    memcpy(s->before, indegree, p->calls * sizeof(uint16_t));
    for (int64_t k = 0; k < p->signatures; k++)
        s->top[k] = (int32_t)base[k + 1];
    for (int64_t c = 0; c < p->calls; c++) {
        s->remaining[p->place[c]]++;
        s->value += p->weight[c];
        if (!indegree[c])
            make_ready(p, s, (int32_t)c);
    }
}

/* The choices of all states, best first; returns how many. */
static int64_t choose(const Search *p, State *const *states, int64_t n, const int64_t *base, Choice *choices)
{
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        const State *s = states[k];
        for (int32_t g = 0; g < p->signatures; g++) {
            int64_t top = s->top[g];
            if (!s->weight[g])
                continue;
            while (top > base[g] && s->remaining[top - 1] == s->waiting[top - 1])
                top--;
            Choice *x = &choices[found++];
            x->lb = s->lb - (s->top[g] - top);
            x->value = s->value - s->weight[g];
            x->hash = s->hash ^ s->mark[g];
            x->parent = (int32_t)k, x->action = g;
        }
    }
    qsort(choices, found, sizeof(Choice), by_choice);
    return found;
}

/* The first `width` choices whose states differ, in place; returns how many. */
static int64_t distinct(Choice *choices, int64_t found, int64_t width)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < found && kept < width; i++) {
        int64_t j = 0;
        while (j < kept && choices[j].hash != choices[i].hash)
            j++;
        if (j == kept)
            choices[kept++] = choices[i];
    }
    return kept;
}

/* From level to level; `trail` gets (parent, action) a kept state and level. -> levels, -1 without memory */
static int64_t descend(const Search *p, State *pool, int64_t width, const int64_t *base, const uint16_t *indegree,
                       Choice *choices, State **now, State **next, int32_t *children, int32_t **trail)
{
    int64_t states = 1, level = 0, room = 0, spare = 2 * width;
    State **free_ones = next + width; /* [2 * width] */
    for (int64_t i = 0; i < spare; i++)
        free_ones[i] = &pool[i];
    now[0] = free_ones[--spare];
    start(p, now[0], base, indegree);
    while (now[0]->lb > 0) {
        int64_t kept = distinct(choices, choose(p, now, states, base, choices), width);
        if (level == room) {
            room = 2 * room + 256;
            int32_t *grown = PyMem_Realloc(*trail, room * width * 2 * sizeof(int32_t));
            if (!grown)
                return -1;
            *trail = grown;
        }
        memset(children, 0, states * sizeof(int32_t));
        for (int64_t k = 0; k < kept; k++)
            children[choices[k].parent]++;
        for (int64_t k = 0; k < states; k++)
            if (!children[k])
                free_ones[spare++] = now[k];
        for (int64_t k = 0; k < kept; k++) {
            int32_t parent = choices[k].parent, action = choices[k].action;
            next[k] = now[parent];
            if (--children[parent]) {
                next[k] = free_ones[--spare];
                copy_state(p, next[k], now[parent]);
            }
            run_action(p, next[k], action, base[action], NULL, 0);
            (*trail)[(level * width + k) * 2] = parent;
            (*trail)[(level * width + k) * 2 + 1] = action;
        }
        memcpy(now, next, kept * sizeof(State *));
        states = kept;
        level++;
    }
    return level;
}

static int64_t search_all(const Search *p, int64_t width, const int64_t *base, const uint16_t *indegree,
                          int64_t *step)
{
    int64_t level = -1, made = 0;
    State *pool = PyMem_Calloc(2 * width, sizeof(State)), **pointers = PyMem_Calloc(4 * width, sizeof(State *));
    Choice *choices = PyMem_Malloc((width * p->signatures + 1) * sizeof(Choice));
    int32_t *children = PyMem_Malloc(width * sizeof(int32_t)), *trail = NULL, *actions = NULL;
    if (pool && pointers && choices && children) {
        while (made < 2 * width && make_state(p, &pool[made]) == 0)
            made++;
        if (made == 2 * width)
            level = descend(p, pool, width, base, indegree, choices, pointers, pointers + width, children, &trail);
    }
    if (level > 0 && (actions = PyMem_Malloc(level * sizeof(int32_t)))) {
        for (int64_t l = level - 1, k = 0; l >= 0; l--) {
            actions[l] = trail[(l * width + k) * 2 + 1];
            k = trail[(l * width + k) * 2];
        }
        start(p, &pool[0], base, indegree);
        for (int64_t l = 0; l < level; l++)
            run_action(p, &pool[0], actions[l], base[actions[l]], step, l);
    } else if (level > 0)
        level = -1;
    for (int64_t i = 0; i < made; i++)
        PyMem_Free(pool[i].memory);
    PyMem_Free(pool);
    PyMem_Free(pointers);
    PyMem_Free(choices);
    PyMem_Free(children);
    PyMem_Free(trail);
    PyMem_Free(actions);
    return level;
}

/* search(sig i32, place i32, offsets, readers, weight, mark, base, STEP, width) -> steps */
static PyObject *search(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t width = 1;
    if (take(&a, args, n, "iiqqqqqQ") < 0 || number(&a, args, n, 8, &width) < 0)
        return NULL;
    Search p = {.calls = LENGTH(0), .signatures = LENGTH(6) - 1, .sig = I32(0), .place = I32(1),
                .offsets = I64(2), .readers = I64(3), .weight = I64(4), .mark = I64(5)};
    const int64_t *base = I64(6);
    p.places = p.signatures >= 0 ? base[p.signatures] : 0;
    int good = width > 0 && p.signatures > 0 && p.calls > 0 && p.calls < INT32_MAX && LENGTH(1) == p.calls &&
               LENGTH(2) == p.calls + 1 && LENGTH(4) == p.calls && LENGTH(5) == p.calls && LENGTH(7) == p.calls;
    uint16_t *indegree = PyMem_Calloc(p.calls + 1, sizeof(uint16_t));
    if (!indegree) {
        release(&a);
        return PyErr_NoMemory();
    }
    for (int64_t s = 0; good && s < p.signatures; s++)
        good = base[s] >= 0 && base[s] <= base[s + 1];
    for (int64_t c = 0; good && c < p.calls; c++) {
        good = p.sig[c] >= 0 && p.sig[c] < p.signatures && p.weight[c] > 0 && p.place[c] >= base[p.sig[c]] &&
               p.place[c] < base[p.sig[c] + 1] && p.offsets[c] >= 0 && p.offsets[c] <= p.offsets[c + 1] &&
               p.offsets[c + 1] <= LENGTH(3);
        for (int64_t e = good ? p.offsets[c] : 0; good && e < p.offsets[c + 1]; e++) {
            good = p.readers[e] > c && p.readers[e] < p.calls && indegree[p.readers[e]] < UINT16_MAX;
            if (good)
                indegree[p.readers[e]]++;
        }
    }
    p.head = p.signatures * 20 + p.places * 8 + p.calls * 2;
    p.head = (p.head + 7) / 8 * 8;
    p.size = p.head + p.calls * 8;
    int64_t steps = good ? search_all(&p, width, base, indegree, I64(7)) : 0;
    PyMem_Free(indegree);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    if (none && steps < 0)
        return PyErr_NoMemory();
    return none ? PyLong_FromLongLong(steps) : NULL;
}

PyObject *merge_equal(PyObject *, PyObject *const *, Py_ssize_t); /* _deduplicate.c */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION(source_calls), FUNCTION(longest_before), FUNCTION(longest_after), FUNCTION(live),
    FUNCTION(group), FUNCTION(arrange), FUNCTION(peak), FUNCTION(count), FUNCTION(own_chains), FUNCTION(advance),
    FUNCTION(feeding), FUNCTION(place), FUNCTION(gather), FUNCTION(agenda), FUNCTION(search),
    FUNCTION(merge_equal), {NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_doc = "Loops over the columns of a program.", .m_size = -1,
    .m_methods = functions};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModule_Create(&definition);
}
