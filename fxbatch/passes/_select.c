/* Programs with fewer calls, and what is the same for all values of an output: select_calls.py and survey.py have the
   twins in numpy. */

#include "_arrays.h"

/* The number of each value among those of kept calls, -1 where its call goes; known ones keep theirs. */
static int32_t *renumbered(const int32_t *sig, const uint8_t *keep, int64_t calls, const int64_t *width,
                           int64_t signatures, int64_t known, int64_t *values)
{
    int32_t *first = first_of(sig, calls, width, signatures, known), *number;
    if (!first)
        return NULL;
    *values = first[calls];
    number = PyMem_Malloc((*values + 1) * sizeof(int32_t));
    if (!number)
        PyErr_NoMemory();
    for (int64_t v = 0; number && v < known; v++)
        number[v] = (int32_t)v;
    int32_t next = (int32_t)known;
    for (int64_t c = 0; number && c < calls; c++)
        for (int64_t v = first[c]; v < first[c + 1]; v++)
            number[v] = keep[c] ? next++ : -1;
    PyMem_Free(first);
    return number;
}

/* keep_calls(sig i32, instance i32, inputs, outputs, width, arity, keep bool, SIG i32, INSTANCE i32, INPUTS, OUTPUTS,
   known) -> (calls, inputs) that are kept; an input or output that is not kept becomes -1. */
PyObject *keep_calls(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iiqqqqbIIQQ") < 0 || number(&a, args, n, 11, &known) < 0)
        return NULL;
    const int32_t *sig = I32(0), *instance = I32(1);
    const int64_t *inputs = I64(2), *outputs = I64(3), *arity = I64(5);
    const uint8_t *keep = U8(6);
    int64_t calls = LENGTH(0), kept = 0, entries = 0, at = 0, values = 0;
    int good = known >= 0 && LENGTH(1) == calls && LENGTH(6) == calls && LENGTH(7) >= calls && LENGTH(8) >= calls &&
               LENGTH(9) >= LENGTH(2) && LENGTH(10) == LENGTH(3) && LENGTH(4) == LENGTH(5);
    int32_t *new_number = good ? renumbered(sig, keep, calls, I64(4), LENGTH(4), known, &values) : NULL;
    if (good && !new_number) {
        release(&a);
        return NULL;
    }
    for (int64_t c = 0; good && c < calls; c++) {
        int64_t end = at + arity[sig[c]];
        good = end <= LENGTH(2);
        for (; good && at < end; at++)
            if (keep[c]) {
                good = inputs[at] >= 0 && inputs[at] < values;
                if (good)
                    I64(9)[entries++] = new_number[inputs[at]];
            }
        if (good && keep[c]) {
            I32(7)[kept] = sig[c];
            I32(8)[kept++] = instance[c];
        }
    }
    for (int64_t i = 0; good && i < LENGTH(3); i++) {
        good = outputs[i] >= 0 && outputs[i] < values;
        if (good)
            I64(10)[i] = new_number[outputs[i]];
    }
    PyMem_Free(new_number);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    return none ? Py_BuildValue("LL", (long long)kept, (long long)entries) : NULL;
}

/* spread(sig i32, first_output, types, needs bool, TYPES, NEEDS bool, known) -> values: what stands for each output,
   at each of its values from `known` on. */
PyObject *spread(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iqqbQB") < 0 || number(&a, args, n, 6, &known) < 0)
        return NULL;
    const int32_t *sig = I32(0);
    const int64_t *first = I64(1), *types = I64(2);
    const uint8_t *needs = U8(3);
    int64_t calls = LENGTH(0), signatures = LENGTH(1) - 1, room = LENGTH(4), v = known;
    int good = signatures >= 0 && known >= 0 && LENGTH(5) == room && LENGTH(2) == first[signatures] &&
               LENGTH(3) == LENGTH(2);
    for (int64_t c = 0; good && c < calls; c++) {
        int32_t s = sig[c];
        good = s >= 0 && s < signatures && v + first[s + 1] - first[s] <= room;
        for (int64_t j = good ? first[s] : 0; good && j < first[s + 1]; j++, v++) {
            I64(4)[v] = types[j];
            U8(5)[v] = needs[j];
        }
    }
    return finish_with(&a, good, v);
}
