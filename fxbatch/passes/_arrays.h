/* What all loops share: arrays taken through the buffer protocol, columns that are handed out. */

#ifndef FXBATCH_ARRAYS_H
#define FXBATCH_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#pragma GCC visibility push(hidden) /* the files share functions with nobody else */
#endif

#define MOST 24

typedef struct {
    Py_buffer views[MOST];
    int64_t lengths[MOST]; /* items */
    int taken;
} Arrays;

#define LENGTH(k) (a.lengths[k])
#define I64(k) ((int64_t *)a.views[k].buf)
#define I32(k) ((int32_t *)a.views[k].buf)
#define U8(k) ((uint8_t *)a.views[k].buf)

static inline void release(Arrays *a)
{
    while (a->taken)
        PyBuffer_Release(&a->views[--a->taken]);
}

/* One array more. A letter: q int64, i int32, b bool or uint8; upper case when it is written to. */
static inline int take_one(Arrays *a, PyObject *array, char kind)
{
    int writes = kind < 'a', letter = kind | 32, k = a->taken;
    Py_ssize_t size = letter == 'q' ? 8 : letter == 'i' ? 4 : 1;
    Py_buffer *view = &a->views[k];
    if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0)) < 0)
        return -1;
    a->taken++;
    if (view->itemsize != size) {
        PyErr_Format(PyExc_TypeError, "array %d has items of %zd bytes, not %zd", k, view->itemsize, size);
        return -1;
    }
    a->lengths[k] = view->len / size;
    return 0;
}

/* The arrays of a call, a letter each. */
static inline int take(Arrays *a, PyObject *const *args, Py_ssize_t given, const char *kinds)
{
    Py_ssize_t wanted = (Py_ssize_t)strlen(kinds);
    a->taken = 0;
    if (given < wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arrays, not %zd", wanted, given);
        return -1;
    }
    for (Py_ssize_t k = 0; k < wanted; k++)
        if (take_one(a, args[k], kinds[k]) < 0) {
            release(a);
            return -1;
        }
    return 0;
}

/* The number that follows the arrays; 0 where it is left out. */
static inline int number(Arrays *a, PyObject *const *args, Py_ssize_t given, Py_ssize_t at, Py_ssize_t *out)
{
    *out = given > at ? PyLong_AsSsize_t(args[at]) : 0;
    if (*out == -1 && PyErr_Occurred()) {
        release(a);
        return -1;
    }
    return 0;
}

static inline void not_there(void)
{
    PyErr_SetString(PyExc_IndexError, "a column names a call or a value that is not there");
}

static inline PyObject *finish(Arrays *a, int good)
{
    release(a);
    if (!good) {
        not_there();
        return NULL;
    }
    Py_RETURN_NONE;
}

/* As `finish`, with a number in place of None. */
static inline PyObject *finish_with(Arrays *a, int good, int64_t result)
{
    PyObject *none = finish(a, good);
    Py_XDECREF(none);
    return none ? PyLong_FromLongLong(result) : NULL;
}

/* For each call the first of the numbers that `per` counts a signature, which begin at `at`: values made or inputs
   read. NULL, with an exception set, where a column is out of range. */
static inline int32_t *first_of(const int32_t *sig, int64_t calls, const int64_t *per, int64_t signatures, int64_t at)
{
    int32_t *first = PyMem_Malloc((calls + 1) * sizeof(int32_t));
    int good = 1;
    if (!first)
        return (int32_t *)PyErr_NoMemory();
    for (int64_t c = 0; good && c < calls; c++) {
        int32_t s = sig[c];
        first[c] = (int32_t)at;
        good = s >= 0 && s < signatures && at <= INT32_MAX;
        at += good ? per[s] : 0;
    }
    first[calls] = (int32_t)at;
    if (good && at <= INT32_MAX)
        return first;
    PyMem_Free(first);
    not_there();
    return NULL;
}

/* As `first_of`; the arrays are released where it gives NULL. */
static inline int32_t *running(Arrays *a, const int32_t *sig, int64_t calls, const int64_t *per,
                               int64_t signatures, int64_t known)
{
    int32_t *first = first_of(sig, calls, per, signatures, known);
    if (!first)
        release(a);
    return first;
}

/* The call that makes each value from `known` on; `values` is set to how many values there are. */
static inline int32_t *makers(Arrays *a, const int32_t *sig, int64_t calls, const int64_t *width,
                              int64_t signatures, int64_t *values)
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

/* A count sort's offsets from its counts, which stand one place up: offsets[k] is where key k begins. */
static inline void add_up(int64_t *offsets, int64_t keys)
{
    for (int64_t i = 0; i < keys; i++)
        offsets[i + 1] += offsets[i];
}

/* Filling in has moved each offset to the next key's: back again. */
static inline void move_back(int64_t *offsets, int64_t keys)
{
    memmove(offsets + 1, offsets, keys * sizeof(int64_t));
    offsets[0] = 0;
}

/* int64 columns that are handed out: pieces of one array of as many items as all of them, which `empty(items)`
   makes. They are written through `next_column`, then cut off in the same order. */
typedef struct {
    PyObject *array;
    Py_buffer view;
    int64_t *at, cut;
} Columns;

static inline int make_columns(Columns *made, PyObject *empty, int64_t items)
{
    made->cut = 0;
    made->array = PyObject_CallFunction(empty, "L", (long long)items);
    if (!made->array)
        return -1;
    if (PyObject_GetBuffer(made->array, &made->view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0 ||
        made->view.len != items * 8) {
        Py_CLEAR(made->array);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "empty() gave an array of another size");
        return -1;
    }
    made->at = made->view.buf;
    return 0;
}

/* Room for `items` numbers, in the order in which `cut_column` gives them out. */
static inline int64_t *next_column(Columns *made, int64_t items)
{
    int64_t *column = made->at;
    made->at += items;
    return column;
}

/* The next column as an array. */
static inline PyObject *cut_column(Columns *made, int64_t items)
{
    made->cut += items;
    return PySequence_GetSlice(made->array, made->cut - items, made->cut);
}

static inline void drop_columns(Columns *made)
{
    if (made->array)
        PyBuffer_Release(&made->view);
    Py_CLEAR(made->array);
}

#endif
