/* Traces joined to one recording. Part of _fast.c, whose names it uses; trace/traces.py has the twin. */

#ifndef FXBATCH_FAST_TRACES_H
#define FXBATCH_FAST_TRACES_H

/* Append one trace's columns; 0 where one names a signature or a value that is not there. */
static int join_one(const Py_buffer *column, int64_t values, int64_t start, int32_t *sig, int64_t *inputs)
{
    const int32_t *from = column[0].buf, *ids = column[1].buf;
    const int64_t *read = column[2].buf;
    int64_t calls = column[0].len / 4, known = column[1].len / 4, entries = column[2].len / 8;
    for (int64_t i = 0; i < calls; i++) {
        if (from[i] < 0 || from[i] >= known)
            return 0;
        sig[i] = ids[from[i]];
    }
    for (int64_t i = 0; i < entries; i++) {
        if (read[i] < 0 || read[i] >= values)
            return 0;
        inputs[i] = start + read[i];
    }
    return 1;
}

/* join(traces, sig i32, inputs i64): traces is a list of (sig i32, ids i32, inputs i64, values), one behind the
   other; values are counted from 0. */
static PyObject *join(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *traces;
    Py_buffer out[2];
    if (!PyArg_ParseTuple(args, "O!w*w*", &PyList_Type, &traces, &out[0], &out[1]))
        return NULL;
    int64_t calls = 0, entries = 0, start = 0;
    int good = 1;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(traces); i++) {
        Py_buffer column[3];
        long long values;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(traces, i), "y*y*y*L", &column[0], &column[1], &column[2], &values)) {
            good = 0;
            break;
        }
        good = 4 * calls + column[0].len <= out[0].len && 8 * entries + column[2].len <= out[1].len &&
               join_one(column, values, start, (int32_t *)out[0].buf + calls, (int64_t *)out[1].buf + entries);
        calls += column[0].len / 4;
        entries += column[2].len / 8;
        start += values;
        for (int k = 0; k < 3; k++)
            PyBuffer_Release(&column[k]);
    }
    if (good)
        good = 4 * calls == out[0].len && 8 * entries == out[1].len;
    PyBuffer_Release(&out[0]);
    PyBuffer_Release(&out[1]);
    if (!good && !PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "a trace names a signature or a value that it does not have");
    return good ? Py_NewRef(Py_None) : NULL;
}

#endif
