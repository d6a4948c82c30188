/* Equal calls found, and the program without them, in one pass over the calls in recorded order.

   In: the columns of a program, what each constant holds. Out: the columns of the smaller program.
   What a call reads is renumbered before it is looked up, so what was merged earlier is equal here; inputs
   come before their readers, so one pass finds all. deduplicate.py has the twin in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ARRAYS 14

typedef struct {
    uint32_t hash;
    int32_t call; /* one more than the kept call's number; 0: free */
} Place;

typedef struct {
    const int32_t *sig, *instance;
    const int64_t *width, *arity, *inputs, *outputs, *begin, *content;
    const uint8_t *merges;
    int64_t calls, signatures, entries, results, contents, values, known;
    int32_t *sig_out, *instance_out;
    int64_t *inputs_out, *outputs_out;
    uint8_t *keep;
    /* its own */
    int32_t *value, *place, *first; /* of each value the new one; of each kept call its inputs, its first value */
    int64_t *held, *cursor;         /* of each kept constant what it holds; of each signature the next content */
    Place *table;
    uint64_t mask;
} Merge;

static inline uint64_t mix(uint64_t hash, uint64_t item)
{
    hash = (hash ^ item) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

/* Whether kept call k is equal to a call of this signature, which reads `count` values or holds `held`. */
static inline int equal(const Merge *m, int64_t k, int32_t s, const int64_t *read, int64_t count, int64_t held)
{
    if (m->sig_out[k] != s || m->held[k] != held)
        return 0;
    const int64_t *other = m->inputs_out + m->place[k];
    for (int64_t i = 0; i < count; i++)
        if (other[i] != read[i])
            return 0;
    return 1;
}

/* The kept call that a call is equal to, or -1 where it is the first: then it is entered as call k. */
static inline int64_t look_up(Merge *m, int64_t k, int32_t s, const int64_t *read, int64_t count, int64_t held)
{
    uint64_t hash = mix(mix(0x243F6A8885A308D3u, (uint64_t)s), (uint64_t)held);
    for (int64_t i = 0; i < count; i++)
        hash = mix(hash, (uint64_t)read[i]);
    uint32_t high = (uint32_t)(hash >> 32);
    for (uint64_t at = high & m->mask;; at = (at + 1) & m->mask) {
        Place *p = &m->table[at];
        if (!p->call) {
            p->hash = high;
            p->call = (int32_t)k + 1;
            return -1;
        }
        if (p->hash == high && equal(m, p->call - 1, s, read, count, held))
            return p->call - 1;
    }
}

/* The number of calls that stay; -1 where a column names what is not there. */
static int64_t merge_all(Merge *m)
{
    int64_t kept = 0, entry = 0, next = m->known, at = 0, value = m->known;
    for (int64_t v = 0; v < m->known; v++)
        m->value[v] = (int32_t)v;
    for (int64_t c = 0; c < m->calls; c++) {
        int32_t s = m->sig[c];
        if (s < 0 || s >= m->signatures || at + m->arity[s] > m->entries || value + m->width[s] > m->values)
            return -1;
        int64_t count = m->arity[s], *read = m->inputs_out + entry, held = 0, found = -1;
        for (int64_t i = 0; i < count; i++, at++) {
            if (m->inputs[at] < 0 || m->inputs[at] >= value)
                return -1;
            read[i] = m->value[m->inputs[at]];
        }
        if (m->begin[s] >= 0) {
            int64_t where = m->begin[s] + m->cursor[s]++;
            if (where >= m->contents)
                return -1;
            held = m->content[where];
        }
        m->sig_out[kept] = s;
        m->held[kept] = held;
        m->place[kept] = (int32_t)entry;
        if (m->merges[s])
            found = look_up(m, kept, s, read, count, held);
        m->keep[c] = found < 0;
        if (found < 0) {
            m->instance_out[kept] = m->instance[c];
            m->first[kept] = (int32_t)next;
            found = kept++;
            next += m->width[s];
            entry += count;
        }
        for (int64_t i = 0; i < m->width[s]; i++)
            m->value[value++] = m->first[found] + (int32_t)i;
    }
    for (int64_t i = 0; i < m->results; i++) {
        if (m->outputs[i] < 0 || m->outputs[i] >= value)
            return -1;
        m->outputs_out[i] = m->value[m->outputs[i]];
    }
    return at == m->entries && value == m->values ? kept : -1;
}

/* -2 where memory is short */
static int64_t with_room(Merge *m)
{
    uint64_t places = 64;
    while (places < 2 * (uint64_t)m->calls)
        places *= 2;
    m->mask = places - 1;
    m->value = PyMem_Malloc((m->values + 1) * sizeof(int32_t));
    m->place = PyMem_Malloc((m->calls + 1) * sizeof(int32_t));
    m->first = PyMem_Malloc((m->calls + 1) * sizeof(int32_t));
    m->held = PyMem_Malloc((m->calls + 1) * sizeof(int64_t));
    m->cursor = PyMem_Calloc(m->signatures + 1, sizeof(int64_t));
    m->table = PyMem_Calloc(places, sizeof(Place));
    int64_t kept = -2;
    if (m->value && m->place && m->first && m->held && m->cursor && m->table)
        kept = merge_all(m);
    PyMem_Free(m->value);
    PyMem_Free(m->place);
    PyMem_Free(m->first);
    PyMem_Free(m->held);
    PyMem_Free(m->cursor);
    PyMem_Free(m->table);
    return kept;
}

/* merge_equal(sig i32, width, arity, inputs, instance i32, outputs, merges b, begin, content,
               SIG, INPUTS, INSTANCE, OUTPUTS, KEEP, values, known) -> calls that stay
   merges: whether calls of a signature may be one; begin: where its contents start, -1 for what is no constant. */
PyObject *merge_equal(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    static const char kinds[] = "iqqqiqbqqIQIQB"; /* q int64, i int32, b bool; upper case is written to */
    Py_buffer views[ARRAYS];
    int64_t length[ARRAYS], kept = -1;
    int taken = 0, good = given == ARRAYS + 2;
    if (!good)
        PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", ARRAYS + 2, given);
    for (; good && taken < ARRAYS; taken += good) {
        int writes = kinds[taken] < 'a', letter = kinds[taken] | 32;
        Py_ssize_t size = letter == 'q' ? 8 : letter == 'i' ? 4 : 1;
        if (PyObject_GetBuffer(args[taken], &views[taken], PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0)) < 0)
            good = 0;
        else if (views[taken].itemsize != size) {
            PyErr_Format(PyExc_TypeError, "array %d has items of %zd bytes", taken, views[taken].itemsize);
            PyBuffer_Release(&views[taken]);
            good = 0;
        } else
            length[taken] = views[taken].len / size;
    }
    Py_ssize_t values = good ? PyLong_AsSsize_t(args[ARRAYS]) : 0;
    Py_ssize_t known = good ? PyLong_AsSsize_t(args[ARRAYS + 1]) : 0;
    if (good && !PyErr_Occurred()) {
        Merge m = {.sig = views[0].buf, .width = views[1].buf, .arity = views[2].buf, .inputs = views[3].buf,
                   .instance = views[4].buf, .outputs = views[5].buf, .merges = views[6].buf,
                   .begin = views[7].buf, .content = views[8].buf, .sig_out = views[9].buf,
                   .inputs_out = views[10].buf, .instance_out = views[11].buf, .outputs_out = views[12].buf,
                   .keep = views[13].buf, .calls = length[0], .signatures = length[1], .entries = length[3],
                   .results = length[5], .contents = length[8], .values = values, .known = known};
        if (known >= 0 && values >= known && values < INT32_MAX && m.entries < INT32_MAX && m.calls < INT32_MAX &&
            length[2] == m.signatures && length[4] == m.calls && length[6] == m.signatures &&
            length[7] == m.signatures && length[9] >= m.calls && length[10] >= m.entries &&
            length[11] >= m.calls && length[12] >= m.results && length[13] >= m.calls)
            kept = with_room(&m);
    }
    while (taken)
        PyBuffer_Release(&views[--taken]);
    if (PyErr_Occurred())
        return NULL;
    if (kept == -2)
        return PyErr_NoMemory();
    if (kept < 0) {
        PyErr_SetString(PyExc_IndexError, "a column names a call or a value that is not there");
        return NULL;
    }
    return PyLong_FromLongLong(kept);
}
