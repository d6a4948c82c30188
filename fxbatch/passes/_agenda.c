/* Batching by agenda: batch_by_agenda.py has the twins in Python, and says what it does. */

#include "_arrays.h"

/* agenda(sig i32, depth i32, offsets, readers, cost, INDEGREE, TOTAL, COUNT, STEP, first) -> steps: the ready
   signature of the lowest average depth first; constants have their steps already and an indegree of -1. */
PyObject *agenda(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
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

