/* What every pass asks of a program first, in one pass over its calls; the steps of signatures one after another;
   which signatures a gradient is wanted of. find_needs.py, lower_bound.py and batch_by_lookahead.py have the twins. */

#include "_arrays.h"

typedef struct {
    const int32_t *sig;
    const int64_t *inputs, *arity, *width, *slot, *out;
    int64_t calls, entries, signatures, known, slots, outs;
    int32_t *before;
    int32_t *maker, *flat; /* of each value: the call that makes it, its number among all outputs */
    uint8_t *seen;
    int64_t *counts, *longest;
} Survey;

/* Pairs (slot, output) are marked; chains of calls of one signature are counted. */
static int walk(Survey *w)
{
    int64_t values = 0, at = 0;
    for (int64_t c = 0; c < w->calls; c++) {
        int32_t s = w->sig[c], own = 0;
        if (at + w->arity[s] > w->entries)
            return 0;
        uint8_t *pairs = w->seen + w->slot[s] * w->outs;
        for (int64_t i = 0; i < w->arity[s]; i++, at++, pairs += w->outs) {
            int64_t v = w->inputs[at] - w->known;
            if (v < -w->known || v >= values)
                return 0;
            if (v < 0)
                continue;
            int32_t source = w->maker[v];
            pairs[w->flat[v]] = 1;
            if (w->sig[source] == s && w->before[source] >= own)
                own = w->before[source] + 1;
        }
        w->before[c] = own;
        w->counts[s]++;
        if (own >= w->longest[s])
            w->longest[s] = own + 1;
        for (int64_t j = 0; j < w->width[s]; j++, values++) {
            w->maker[values] = (int32_t)c;
            w->flat[values] = (int32_t)(w->out[s] + j);
        }
    }
    return 1;
}

static PyObject *tell(Survey *w, PyObject *empty)
{
    Columns made = {NULL};
    int64_t pairs = 0, room = w->slots * w->outs, s = w->signatures;
    for (int64_t i = 0; i < room; i++)
        pairs += w->seen[i];
    if (make_columns(&made, empty, pairs + 2 * s) < 0)
        return NULL;
    memcpy(next_column(&made, s), w->counts, s * sizeof(int64_t));
    memcpy(next_column(&made, s), w->longest, s * sizeof(int64_t));
    int64_t *key = next_column(&made, pairs);
    for (int64_t i = 0; i < room; i++)
        if (w->seen[i])
            *key++ = i;
    PyObject *counts = cut_column(&made, s), *longest = cut_column(&made, s), *keys = cut_column(&made, pairs);
    drop_columns(&made);
    PyObject *out = counts && longest && keys ? PyTuple_Pack(3, keys, counts, longest) : NULL;
    Py_XDECREF(counts);
    Py_XDECREF(longest);
    Py_XDECREF(keys);
    return out;
}

/* survey(sig i32, inputs, arity, width, first_slot, first_out, BEFORE i32, empty, known) -> (pairs, counts, longest):
   pairs slot * outputs + output that occur, ascending; of each signature its calls, and those on the longest path of
   such calls alone, of which `before` a call there are BEFORE. */
PyObject *survey(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0;
    if (take(&a, args, n, "iqqqqqI") < 0 || number(&a, args, n, 8, &known) < 0)
        return NULL;
    Survey w = {.sig = I32(0), .inputs = I64(1), .arity = I64(2), .width = I64(3), .slot = I64(4), .out = I64(5),
                .calls = LENGTH(0), .entries = LENGTH(1), .signatures = LENGTH(2), .known = known,
                .before = I32(6)};
    int64_t values = 0, s = w.signatures;
    int good = n > 7 && LENGTH(3) == s && LENGTH(4) == s + 1 && LENGTH(5) == s + 1 && LENGTH(6) == w.calls;
    for (int64_t c = 0; good && c < w.calls; c++) {
        good = w.sig[c] >= 0 && w.sig[c] < s && values < INT32_MAX;
        values += good ? w.width[w.sig[c]] : 0;
    }
    w.slots = good ? w.slot[s] : 0, w.outs = good ? w.out[s] : 0;
    w.maker = PyMem_Malloc((2 * values + 1) * sizeof(int32_t));
    w.flat = w.maker + values;
    w.counts = PyMem_Calloc(2 * s + 1, sizeof(int64_t));
    w.longest = w.counts + s;
    w.seen = PyMem_Calloc(w.slots * w.outs + 1, 1);
    PyObject *out = NULL;
    if (!w.maker || !w.counts || !w.seen)
        PyErr_NoMemory();
    else if (good && walk(&w))
        out = tell(&w, args[7]);
    else
        not_there();
    PyMem_Free(w.maker);
    PyMem_Free(w.counts);
    PyMem_Free(w.seen);
    release(&a);
    return out;
}

/* The first step of each signature, parts one after another; -> steps, -1 for a wrong column. */
static int64_t first_steps(const int64_t *longest, const int64_t *member, int64_t members, const int64_t *part,
                           int64_t parts, int64_t signatures, int64_t *first)
{
    int64_t steps = 0;
    for (int64_t p = 0; p + 1 < parts; p++) {
        int64_t begin = steps;
        for (int64_t i = part[p]; i < part[p + 1]; i++) {
            if (i < 0 || i >= members || member[i] < 0 || member[i] >= signatures || longest[member[i]] < 0)
                return -1;
            first[member[i]] = begin;
            steps += longest[member[i]];
        }
    }
    return steps;
}

/* in_turn(sig i32, before i32, longest, members, parts, empty) -> (offsets, order): part after part of the
   signatures, those of part p are members[parts[p] : parts[p + 1]]; `before` is a call's step in its part, `longest`
   how many steps a signature adds to its part. */
PyObject *in_turn(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Columns made = {NULL};
    if (take(&a, args, n, "iiqqq") < 0)
        return NULL;
    const int32_t *sig = I32(0), *before = I32(1);
    int64_t calls = LENGTH(0), signatures = LENGTH(2), steps = -1;
    int64_t *first = PyMem_Calloc(signatures + 1, sizeof(int64_t)), *offsets, *order;
    PyObject *out = NULL;
    if (first && n > 5 && LENGTH(1) == calls)
        steps = first_steps(I64(2), I64(3), LENGTH(3), I64(4), LENGTH(4), signatures, first);
    int good = steps >= 0;
    for (int64_t c = 0; good && c < calls; c++) {
        good = sig[c] >= 0 && sig[c] < signatures && before[c] >= 0;
        good = good && first[sig[c]] + before[c] < steps;
    }
    if (!first)
        PyErr_NoMemory();
    else if (!good)
        not_there();
    else if (make_columns(&made, args[5], steps + 1 + calls) == 0) {
        offsets = next_column(&made, steps + 1), order = next_column(&made, calls);
        memset(offsets, 0, (steps + 1) * sizeof(int64_t));
        for (int64_t c = 0; c < calls; c++)
            offsets[first[sig[c]] + before[c] + 1]++;
        add_up(offsets, steps);
        for (int64_t c = 0; c < calls; c++)
            order[offsets[first[sig[c]] + before[c]]++] = c;
        move_back(offsets, steps);
        PyObject *x = cut_column(&made, steps + 1), *y = cut_column(&made, calls);
        out = x && y ? PyTuple_Pack(2, x, y) : NULL;
        Py_XDECREF(x);
        Py_XDECREF(y);
        drop_columns(&made);
    }
    PyMem_Free(first);
    release(&a);
    return out;
}

typedef struct {
    Arrays a;
    int64_t known;
} Calls;

/* Mark the outputs whose values are marked, then the earlier values that are read; bytes, one an output. */
static PyObject *reach(const Calls *calls, uint8_t *marked, int64_t values)
{
    const int64_t *lengths = calls->a.lengths, *first = calls->a.views[1].buf, *inputs = calls->a.views[2].buf;
    const int32_t *sig = calls->a.views[0].buf;
    int64_t signatures = lengths[1] - 1, outs = signatures >= 0 ? first[signatures] : 0, v = calls->known;
    PyObject *out = PyBytes_FromStringAndSize(NULL, outs);
    if (!out)
        return NULL;
    char *hit = PyBytes_AS_STRING(out);
    int good = 1;
    memset(hit, 0, outs);
    for (int64_t c = 0; good && c < lengths[0]; c++) {
        good = sig[c] >= 0 && sig[c] < signatures && v + first[sig[c] + 1] - first[sig[c]] <= values;
        for (int64_t j = good ? first[sig[c]] : 0; good && j < first[sig[c] + 1]; j++, v++)
            hit[j] |= marked[v];
    }
    for (int64_t i = 0; good && i < lengths[2]; i++) {
        good = inputs[i] >= 0 && inputs[i] < values;
        if (good && inputs[i] < calls->known)
            marked[inputs[i]] = 1;
    }
    if (good)
        return out;
    Py_DECREF(out);
    not_there();
    return NULL;
}

/* reached(phases, results, values) -> list of bytes a phase, one an output of its signatures: whether a value of it
   is a result or read by a later phase. A phase is (sig i32, first_output, inputs, known). */
PyObject *reached(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t values = 0, phases = n > 2 && PyList_Check(args[0]) ? PyList_GET_SIZE(args[0]) : -1;
    if (phases < 0) {
        PyErr_SetString(PyExc_TypeError, "reached(list of phases, results, values)");
        return NULL;
    }
    if (take(&a, args + 1, n - 1, "q") < 0 || number(&a, args, n, 2, &values) < 0)
        return NULL;
    uint8_t *marked = PyMem_Calloc(values > 0 ? values : 1, 1);
    PyObject *out = marked ? PyList_New(phases) : PyErr_NoMemory();
    for (int64_t i = 0; out && i < LENGTH(0); i++) {
        if (I64(0)[i] >= 0 && I64(0)[i] < values)
            marked[I64(0)[i]] = 1;
        else {
            not_there();
            Py_CLEAR(out);
        }
    }
    for (Py_ssize_t p = phases - 1; out && p >= 0; p--) {
        PyObject *tuple = PyList_GET_ITEM(args[0], p), *found = NULL;
        Calls calls;
        if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4)
            PyErr_SetString(PyExc_TypeError, "a phase is a tuple of 4");
        else if (take(&calls.a, ((PyTupleObject *)tuple)->ob_item, 3, "iqq") == 0) {
            calls.known = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 3));
            if (calls.known >= 0)
                found = reach(&calls, marked, values);
            else if (!PyErr_Occurred())
                not_there();
            release(&calls.a);
        }
        if (found)
            PyList_SET_ITEM(out, p, found);
        else
            Py_CLEAR(out);
    }
    PyMem_Free(marked);
    release(&a);
    return out;
}
