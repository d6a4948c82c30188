/* Loops over the columns of a program, one pass each: what numpy needs a dozen temporary arrays for.

   Every function has a numpy or Python twin beside its caller, which runs where this was not built and
   which tests compare it with. Arguments are contiguous arrays, taken through the buffer protocol; sizes
   are those of the callers' docstrings, and value and call numbers are checked against them. */

#include "_arrays.h"

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

static inline uint64_t mixed(uint64_t hash, uint64_t item)
{
    hash = (hash ^ item) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
}

/* checksum(bytes, ...) -> a number of 63 bits; four chains at once, for one waits for its multiplications. */
static PyObject *checksum(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    uint64_t chain[4] = {1, 2, 3, 4};
    for (Py_ssize_t k = 0; k < n; k++) {
        Py_buffer view;
        if (PyObject_GetBuffer(args[k], &view, PyBUF_SIMPLE) < 0)
            return NULL;
        const char *from = view.buf;
        Py_ssize_t left = view.len;
        chain[0] = mixed(chain[0], (uint64_t)left);
        for (; left >= 32; left -= 32, from += 32) {
            uint64_t items[4];
            memcpy(items, from, 32);
            for (int i = 0; i < 4; i++)
                chain[i] = mixed(chain[i], items[i]);
        }
        for (; left > 0; left -= 8, from += 8) {
            uint64_t item = 0;
            memcpy(&item, from, left < 8 ? left : 8);
            chain[1] = mixed(chain[1], item);
        }
        PyBuffer_Release(&view);
    }
    uint64_t hash = mixed(mixed(chain[0], chain[1]), mixed(chain[2], chain[3]));
    return PyLong_FromLongLong((int64_t)(hash >> 1));
}

#define DECLARE(name) PyObject *name(PyObject *, PyObject *const *, Py_ssize_t);
DECLARE(agenda)      /* _agenda.c */
DECLARE(cut)         /* _component.c */
DECLARE(merge_equal) /* _deduplicate.c */
DECLARE(plan)        /* _arenas.c */
DECLARE(plan_gradients) /* _gradients.c */
DECLARE(reached)     /* _survey.c */
DECLARE(search)      /* _search.c */
DECLARE(keep_calls)  /* _select.c */
DECLARE(spread)      /* _select.c */
DECLARE(survey)      /* _survey.c */
DECLARE(in_turn)     /* _survey.c */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION(source_calls), FUNCTION(longest_before), FUNCTION(longest_after), FUNCTION(live),
    FUNCTION(group), FUNCTION(peak), FUNCTION(advance),
    FUNCTION(agenda), FUNCTION(cut), FUNCTION(search), FUNCTION(merge_equal), FUNCTION(plan),
    FUNCTION(plan_gradients), FUNCTION(survey), FUNCTION(in_turn), FUNCTION(reached),
    FUNCTION(keep_calls), FUNCTION(spread), FUNCTION(checksum), {NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_doc = "Loops over the columns of a program.", .m_size = -1,
    .m_methods = functions};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModule_Create(&definition);
}
