/* One strongly connected component of the signature graph, cut out of a program: the calls of its signatures,
   who of them reads whom, the longest paths from each. search_steps.py has the twin in Python. */

#include "_arrays.h"

typedef struct {
    const int32_t *sig, *maker;
    const int64_t *arity, *inputs, *number; /* number: of each signature within the component, -1 outside */
    int64_t calls, entries, values, known, members;
    int32_t *local, *paths; /* of each call its number; [members + 1] a call: the most of each member, and of all */
    int64_t n, edges;
} Cut;

/* The calls of the component, in order; 0 where there are others than `room` of them. */
static int number_calls(Cut *p, int64_t room, int64_t signatures, int64_t *calls, int32_t *sig)
{
    for (int64_t c = 0; c < p->calls; c++) {
        int64_t kind = p->sig[c] >= 0 && p->sig[c] < signatures ? p->number[p->sig[c]] : p->members;
        p->local[c] = -1;
        if (kind < 0)
            continue;
        if (kind >= p->members || p->n == room)
            return 0;
        calls[p->n] = c;
        sig[p->n] = (int32_t)kind;
        p->local[c] = (int32_t)p->n++;
    }
    return p->n == room;
}

/* The call of the component that makes a value: -1 where none does, -2 for no value of the program. */
static inline int64_t made_by(const Cut *p, int64_t value)
{
    value -= p->known;
    if (value >= p->values || value < -p->known)
        return -2;
    return value < 0 ? -1 : p->local[p->maker[value]];
}

/* From the last call to the first: longest paths, and how many readers each call has, one place up. */
static int follow_paths(Cut *p, const int32_t *sig, int32_t *chain, int64_t *height, int64_t *offsets)
{
    int64_t at = p->entries, wide = p->members + 1;
    for (int64_t c = p->calls - 1; c >= 0; c--) {
        int64_t reads = p->arity[p->sig[c]], l = p->local[c];
        at -= reads;
        if (at < 0)
            return 0;
        if (l < 0)
            continue;
        int32_t *mine = p->paths + l * wide;
        mine[sig[l]]++;
        mine[p->members]++;
        chain[l] = mine[sig[l]];
        height[l] = mine[p->members];
        for (int64_t i = 0; i < reads; i++) {
            int64_t source = made_by(p, p->inputs[at + i]);
            if (source < -1 || source >= l)
                return 0;
            if (source < 0)
                continue;
            int32_t *before = p->paths + source * wide;
            for (int64_t k = 0; k < wide; k++)
                before[k] = mine[k] > before[k] ? mine[k] : before[k];
            offsets[source + 1]++;
            p->edges++;
        }
    }
    return at == 0;
}

static void list_readers(const Cut *p, const int64_t *calls, int64_t *offsets, int64_t *readers)
{
    int64_t at = 0, l = 0;
    add_up(offsets, p->n);
    for (int64_t c = 0; c < p->calls && l < p->n; c++) {
        int64_t reads = p->arity[p->sig[c]];
        if (c == calls[l]) {
            for (int64_t i = 0; i < reads; i++) {
                int64_t source = made_by(p, p->inputs[at + i]);
                if (source >= 0)
                    readers[offsets[source]++] = l;
            }
            l++;
        }
        at += reads;
    }
    move_back(offsets, p->n);
}

/* cut(sig i32, width, arity, inputs, number, CALLS, SIG i32, CHAIN i32, HEIGHT, OFFSETS, READERS, known, members)
   -> edges. CHAIN: calls of its own signature on the longest path from each call on; HEIGHT: of all signatures. */
PyObject *cut(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    Py_ssize_t known = 0, members = 0;
    if (take(&a, args, n, "iqqqqQIIQQQ") < 0 || number(&a, args, n, 11, &known) < 0 || number(&a, args, n, 12, &members) < 0)
        return NULL;
    Cut p = {.sig = I32(0), .arity = I64(2), .inputs = I64(3), .number = I64(4), .calls = LENGTH(0),
             .entries = LENGTH(3), .known = known, .members = members};
    int64_t room = LENGTH(5), *offsets = I64(9);
    int good = members > 0 && known >= 0 && LENGTH(2) == LENGTH(1) && LENGTH(4) == LENGTH(1) && LENGTH(6) == room &&
               LENGTH(7) == room && LENGTH(8) == room && LENGTH(9) == room + 1;
    int32_t *maker = makers(&a, p.sig, p.calls, I64(1), LENGTH(1), &p.values);
    if (!maker)
        return NULL;
    p.maker = maker;
    p.local = PyMem_Malloc((p.calls + 1) * sizeof(int32_t));
    p.paths = good ? PyMem_Calloc(room * (members + 1) + 1, sizeof(int32_t)) : NULL;
    if (p.local && p.paths) {
        memset(offsets, 0, (room + 1) * sizeof(int64_t));
        good = number_calls(&p, room, LENGTH(1), I64(5), I32(6)) &&
               follow_paths(&p, I32(6), I32(7), I64(8), offsets) && p.edges <= LENGTH(10);
        if (good)
            list_readers(&p, I64(5), offsets, I64(10));
    }
    int memory = !good || (p.local && p.paths);
    PyMem_Free(maker);
    PyMem_Free(p.local);
    PyMem_Free(p.paths);
    PyObject *none = finish(&a, good);
    Py_XDECREF(none);
    if (none && !memory)
        return PyErr_NoMemory();
    return none ? PyLong_FromLongLong(p.edges) : NULL;
}
