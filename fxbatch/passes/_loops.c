/* Loops over the columns of a program, one pass each: what numpy needs a dozen temporary arrays for.

   Every function has a numpy or Python twin beside its caller, which runs where this was not built and
   which tests compare it with. Arguments are contiguous arrays, taken through the buffer protocol; sizes
   are those of the callers' docstrings, and value and call numbers are checked against them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MOST 16

typedef struct {
    Py_buffer views[MOST];
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
    }
    return 0;
}

#define LENGTH(k) (a.views[k].len / a.views[k].itemsize)
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

/* source_calls(sig i32, width, inputs, OUT): the call that makes each input; all values are of this program. */
static PyObject *source_calls(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqQ") < 0)
        return NULL;
    Py_ssize_t calls = LENGTH(0), entries = LENGTH(2), values = 0;
    int32_t *sig = I32(0);
    int64_t *width = I64(1), *inputs = I64(2), *out = I64(3);
    int good = LENGTH(3) >= entries;
    for (Py_ssize_t c = 0; c < calls && good; c++) {
        good = sig[c] >= 0 && sig[c] < LENGTH(1);
        values += good ? width[sig[c]] : 0;
    }
    int32_t *maker = good ? PyMem_Malloc((values + 1) * sizeof(int32_t)) : NULL;
    if (good && !maker) {
        release(&a);
        return PyErr_NoMemory();
    }
    Py_ssize_t v = 0;
    for (Py_ssize_t c = 0; c < calls && good; c++)
        for (int64_t j = 0; j < width[sig[c]]; j++)
            maker[v++] = (int32_t)c;
    for (Py_ssize_t e = 0; e < entries && good; e++) {
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
    int64_t *source = I64(0), *target = I64(1), calls = LENGTH(2);
    int32_t *depth = I32(2);
    int good = LENGTH(0) == LENGTH(1);
    for (Py_ssize_t e = 0; good && e < LENGTH(0); e++) {
        good = source[e] >= 0 && source[e] < calls && target[e] >= 0 && target[e] < calls;
        if (good && depth[source[e]] >= depth[target[e]])
            depth[target[e]] = depth[source[e]] + 1;
    }
    return finish(&a, good);
}

/* longest_after(source, target, own i32, CHAIN i32): chain of each call is its own more than its readers'. */
static PyObject *longest_after(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqiI") < 0)
        return NULL;
    int64_t *source = I64(0), *target = I64(1), calls = LENGTH(3);
    int32_t *own = I32(2), *chain = I32(3);
    int good = LENGTH(0) == LENGTH(1) && LENGTH(2) == calls;
    for (Py_ssize_t e = LENGTH(0) - 1; good && e >= 0; e--) {
        good = source[e] >= 0 && source[e] < calls && target[e] >= 0 && target[e] < calls;
        if (good && chain[target[e]] + own[source[e]] > chain[source[e]])
            chain[source[e]] = chain[target[e]] + own[source[e]];
    }
    return finish(&a, good);
}

/* spread_back(source, target, ALIVE bool): what a live call reads is alive. */
static PyObject *spread_back(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqB") < 0)
        return NULL;
    int64_t *source = I64(0), *target = I64(1), calls = LENGTH(2);
    uint8_t *alive = U8(2);
    int good = LENGTH(0) == LENGTH(1);
    for (Py_ssize_t e = LENGTH(0) - 1; good && e >= 0; e--) {
        good = source[e] >= -1 && source[e] < calls && target[e] >= 0 && target[e] < calls;
        if (good && source[e] >= 0)
            alive[source[e]] |= alive[target[e]];
    }
    return finish(&a, good);
}

/* group(key, OFFSETS, ORDER): the positions of each key in order; offsets has one item more than keys. */
static PyObject *group(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qQQ") < 0)
        return NULL;
    int64_t *key = I64(0), *offsets = I64(1), *order = I64(2), keys = LENGTH(1) - 1;
    int good = keys >= 0 && LENGTH(0) == LENGTH(2);
    for (Py_ssize_t i = 0; good && i <= keys; i++)
        offsets[i] = 0;
    for (Py_ssize_t i = 0; good && i < LENGTH(0); i++) {
        good = key[i] >= 0 && key[i] < keys;
        if (good)
            offsets[key[i] + 1]++;
    }
    for (Py_ssize_t i = 0; good && i < keys; i++)
        offsets[i + 1] += offsets[i];
    for (Py_ssize_t i = 0; good && i < LENGTH(0); i++)
        order[offsets[key[i]]++] = i; /* moves each offset to the next key's ... */
    for (Py_ssize_t i = keys; good && i > 0; i--)
        offsets[i] = offsets[i - 1]; /* ... so move them back */
    if (good)
        offsets[0] = 0;
    return finish(&a, good);
}

/* peak(key i32, number i32, PEAK): the largest number of each key, at least what is there. */
static PyObject *peak(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iiQ") < 0)
        return NULL;
    int good = LENGTH(0) == LENGTH(1);
    for (Py_ssize_t i = 0; good && i < LENGTH(0); i++) {
        good = I32(0)[i] >= 0 && I32(0)[i] < LENGTH(2);
        if (good && I32(1)[i] > I64(2)[I32(0)[i]])
            I64(2)[I32(0)[i]] = I32(1)[i];
    }
    return finish(&a, good);
}

/* advance(calls, offsets, readers, INDEGREE, READY) -> how many calls became ready. */
static PyObject *advance(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "qqqQQ") < 0)
        return NULL;
    int64_t *run = I64(0), *offsets = I64(1), *readers = I64(2), *indegree = I64(3), *ready = I64(4);
    int64_t calls = LENGTH(3), found = 0, room = LENGTH(4);
    int good = LENGTH(1) == calls + 1;
    for (Py_ssize_t k = 0; good && k < LENGTH(0); k++) {
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
    int32_t *sig = I32(0);
    int64_t *inputs = I64(1), *arity = I64(2), *width = I64(3), *slot = I64(4), *out = I64(5);
    Py_ssize_t calls = LENGTH(0), entries = LENGTH(1), at = 0, values = 0;
    int64_t signatures = LENGTH(2), outs = signatures ? out[signatures] : 0;
    int good = LENGTH(6) >= (signatures ? slot[signatures] * outs : 0);
    int32_t *flat = NULL;
    size_t room = 0;
    for (Py_ssize_t c = 0; c < calls && good; c++) {
        good = sig[c] >= 0 && sig[c] < signatures;
        room += good ? (size_t)width[sig[c]] : 0;
    }
    if (good && !(flat = PyMem_Malloc((room + 1) * sizeof(int32_t)))) {
        release(&a);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t c = 0; c < calls && good; c++) {
        int32_t s = sig[c];
        good = at + arity[s] <= entries;
        for (int64_t i = 0; good && i < arity[s]; i++, at++) {
            good = inputs[at] >= 0 && inputs[at] < values;
            if (good)
                U8(6)[(slot[s] + i) * outs + flat[inputs[at]]] = 1;
        }
        for (int64_t j = 0; j < width[s]; j++)
            flat[values++] = (int32_t)(out[s] + j);
    }
    PyMem_Free(flat);
    return finish(&a, good);
}

/* place(sig i32, order, first, width, first_value, first_block, block_start, ROW): the row of each value. */
static PyObject *place(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqqqqqQ") < 0)
        return NULL;
    int32_t *sig = I32(0);
    int64_t *order = I64(1), *first = I64(2), *width = I64(3), *value = I64(4), *block = I64(5), *start = I64(6);
    int64_t *row = I64(7), values = LENGTH(7), calls = LENGTH(0);
    int good = 1;
    for (Py_ssize_t k = 0; good && k < LENGTH(2) - 1; k++)
        for (int64_t p = first[k]; good && p < first[k + 1]; p++) {
            int64_t c = order[p];
            good = c >= 0 && c < calls && value[c] >= 0 && value[c] + width[sig[c]] <= values;
            for (int64_t j = 0; good && j < width[sig[c]]; j++)
                row[value[c] + j] = start[block[k] + j] + (p - first[k]);
        }
    return finish(&a, good);
}

/* read(sig i32, order, first, arity, input_offsets, inputs, first_slot, prior, size, member, ENTRIES) */
static PyObject *read_inputs(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqqqqqqqqQ") < 0)
        return NULL;
    int32_t *sig = I32(0);
    int64_t *order = I64(1), *first = I64(2), *arity = I64(3), *begin = I64(4), *inputs = I64(5);
    int64_t *first_slot = I64(6), *prior = I64(7), *size = I64(8), *member = I64(9), *entries = I64(10);
    int64_t calls = LENGTH(0), total = LENGTH(10), base = 0;
    int good = LENGTH(5) == total;
    for (Py_ssize_t k = 0; good && k < LENGTH(2) - 1; k++) {
        int64_t rows = first[k + 1] - first[k], s = -1;
        for (int64_t p = 0; good && p < rows; p++) {
            int64_t c = order[first[k] + p];
            if (!(good = c >= 0 && c < calls))
                break;
            s = sig[c];
            for (int64_t i = 0; good && i < arity[s]; i++) {
                int64_t slot = first_slot[s] + i;
                int64_t to = base + prior[slot] * rows + p * size[slot] + member[slot];
                good = to < total;
                if (good)
                    entries[to] = inputs[begin[c] + i];
            }
        }
        base += s < 0 ? 0 : rows * arity[s];
    }
    return finish(&a, good);
}

#define FUNCTION(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION("source_calls", source_calls), FUNCTION("longest_before", longest_before),
    FUNCTION("longest_after", longest_after), FUNCTION("spread_back", spread_back),
    FUNCTION("advance", advance), FUNCTION("group", group), FUNCTION("peak", peak), FUNCTION("feeding", feeding), FUNCTION("place", place),
    FUNCTION("read_inputs", read_inputs), {NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_doc = "Loops over the columns of a program.", .m_size = -1,
    .m_methods = functions};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModule_Create(&definition);
}
