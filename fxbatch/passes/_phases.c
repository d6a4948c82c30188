/* What _gradients.c reads: the requests; the phases, their columns checked once, choices flat, blocks' values. */

#include "_gradients.h"

enum { SIG, WIDTH, FIRST_OUTPUT, OUTPUT_TYPES, STEP_SIGNATURE, STEP_ROWS, FIRST_GATHER, GATHER_ARENA, GATHER_ROWS,
       ENTRY_OFFSETS, ENTRIES, FIRST_BLOCK, BLOCK_ARENA, BLOCK_START, CAPACITY, ROW, ARENA_IDS, ARRAYS };
static const char kinds[] = "iqqiqqqqqqqqqqqqq";

/* A sequence of tuples of small numbers, one a signature. */
static int take_choices(Choices *out, PyObject *sequence, int64_t signatures)
{
    PyObject *fast = PySequence_Fast(sequence, "choices are a sequence of tuples");
    int64_t total = 0;
    if (!fast || PySequence_Fast_GET_SIZE(fast) != signatures) {
        if (fast)
            not_there();
        Py_XDECREF(fast);
        return -1;
    }
    PyObject **items = PySequence_Fast_ITEMS(fast);
    for (int64_t s = 0; s < signatures; s++)
        total += PyTuple_Check(items[s]) ? PyTuple_GET_SIZE(items[s]) : 0;
    out->first = PyMem_Malloc((signatures + 1 + total) * sizeof(int64_t));
    if (!out->first) {
        Py_DECREF(fast);
        PyErr_NoMemory();
        return -1;
    }
    out->items = out->first + signatures + 1;
    out->first[0] = 0;
    for (int64_t s = 0; s < signatures; s++) {
        Py_ssize_t count = PyTuple_Check(items[s]) ? PyTuple_GET_SIZE(items[s]) : 0;
        for (Py_ssize_t i = 0; i < count; i++)
            out->items[out->first[s] + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(items[s], i));
        out->first[s + 1] = out->first[s] + count;
    }
    Py_DECREF(fast);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether operations hand gradients on: a sequence of bools, one a signature, or an empty one. */
static int take_flags(Phase *p, PyObject *sequence)
{
    PyObject *fast = PySequence_Fast(sequence, "hands_on is a sequence");
    if (!fast)
        return -1;
    Py_ssize_t given = PySequence_Fast_GET_SIZE(fast);
    p->hands_on = PyMem_Calloc(p->signatures + p->steps + 1, 1);
    if (!p->hands_on) {
        Py_DECREF(fast);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t s = 0; s < given && s < p->signatures; s++)
        p->hands_on[s] = PyObject_IsTrue(PySequence_Fast_GET_ITEM(fast, s)) == 1;
    p->passed = p->hands_on + p->signatures;
    Py_DECREF(fast);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the columns belong to each other: what follows reads them without looking. */
static int columns_fit(const Phase *p, int64_t types)
{
    const int64_t *n = p->arrays.lengths, *g = p->first_gather, *b = p->first_block;
    if (n[WIDTH] != p->signatures || n[FIRST_OUTPUT] != p->signatures + 1 || n[STEP_ROWS] != p->steps ||
        n[FIRST_GATHER] != p->steps + 1 || n[FIRST_BLOCK] != p->steps + 1 || n[GATHER_ROWS] != n[GATHER_ARENA] ||
        n[ENTRY_OFFSETS] != n[GATHER_ARENA] + 1 || n[BLOCK_START] != n[BLOCK_ARENA] || n[ARENA_IDS] != p->arenas ||
        n[OUTPUT_TYPES] != p->first_output[p->signatures] || g[0] || b[0] || g[p->steps] != n[GATHER_ARENA] ||
        b[p->steps] != n[BLOCK_ARENA])
        return 0;
    for (int64_t k = 0; k < p->steps; k++) {
        int64_t s = p->step_signature[k];
        if (s < 0 || s >= p->signatures || p->step_rows[k] < 1 || g[k + 1] < g[k] || b[k + 1] - b[k] != p->width[s])
            return 0;
        for (int64_t i = p->groups.first[s]; i < p->groups.first[s + 1]; i++)
            if (p->groups.items[i] < 0 || p->groups.items[i] >= g[k + 1] - g[k])
                return 0;
        for (int64_t i = p->outputs.first[s]; i < p->outputs.first[s + 1]; i++)
            if (p->outputs.items[i] < 0 || p->outputs.items[i] >= b[k + 1] - b[k])
                return 0;
        if (p->hands_on[s] && b[k] == b[k + 1])
            return 0;
    }
    for (int64_t i = 0; i < n[GATHER_ARENA]; i++)
        if (p->gather_arena[i] < 0 || p->gather_arena[i] >= p->arenas || p->gather_rows[i] < 0 ||
            p->entry_offsets[i] < 0 || p->entry_offsets[i] + p->gather_rows[i] > n[ENTRIES])
            return 0;
    for (int64_t i = 0; i < n[BLOCK_ARENA]; i++)
        if (p->block_arena[i] < 0 || p->block_arena[i] >= p->arenas)
            return 0;
    for (int64_t i = 0; i < n[ENTRIES]; i++)
        if (p->entries[i] < 0 || p->entries[i] >= p->values)
            return 0;
    for (int64_t i = 0; i < p->arenas; i++)
        if (p->arena_ids[i] < 0 || p->arena_ids[i] >= types)
            return 0;
    return 1;
}

/* Each row of each arena has the value that was put there: 0 where rows of this phase are not dense. */
static int invert(Phase *p, int64_t *base, int32_t *by_row)
{
    int64_t v = p->known;
    for (int64_t pass = 0; pass < 2; pass++) {
        v = p->known;
        for (int64_t c = 0; c < p->calls; c++)
            for (int64_t j = p->first_output[p->sig[c]]; j < p->first_output[p->sig[c] + 1]; j++, v++) {
                int32_t t = p->output_types[j];
                if (!pass) {
                    if (t < 0 || t >= p->arenas)
                        return 0;
                    base[t + 1]++;
                    continue;
                }
                int64_t count = base[t + 1] - base[t], at = p->row[v] - (p->capacity[t] - count);
                if (at < 0 || at >= count)
                    return 0;
                by_row[base[t] + at] = (int32_t)v;
            }
        for (int64_t t = 0; !pass && t < p->arenas; t++)
            base[t + 1] += base[t];
    }
    return 1;
}

/* The values of all blocks, row by row. 1, 0 for a wrong column, -1 without memory. */
static int find_made(Phase *p)
{
    int64_t made = p->values - p->known, at = 0, blocks = p->first_block[p->steps];
    int64_t *base = PyMem_Calloc(p->arenas + 1, sizeof(int64_t));
    int32_t *by_row = PyMem_Malloc((made + 1) * sizeof(int32_t));
    p->made = PyMem_Malloc((made + 1) * sizeof(int32_t));
    p->block = PyMem_Malloc((blocks + 1) * sizeof(int64_t));
    int good = base && by_row && p->made && p->block ? invert(p, base, by_row) : -1;
    for (int64_t k = 0; good == 1 && k < p->steps; k++)
        for (int64_t b = p->first_block[k]; good == 1 && b < p->first_block[k + 1]; b++) {
            int64_t t = p->block_arena[b], count = base[t + 1] - base[t], rows = p->step_rows[k];
            int64_t begin = p->block_start[b] - (p->capacity[t] - count);
            p->block[b] = at;
            good = begin >= 0 && begin + rows <= count && at + rows <= made;
            if (good)
                memcpy(p->made + at, by_row + base[t] + begin, rows * sizeof(int32_t));
            at += rows;
        }
    if (good == 1)
        p->block[blocks] = at;
    PyMem_Free(base);
    PyMem_Free(by_row);
    return good;
}

static int count_values(Phase *p)
{
    p->values = p->known;
    for (int64_t c = 0; c < p->calls; c++) {
        if (p->sig[c] < 0 || p->sig[c] >= p->signatures)
            return 0;
        p->values += p->width[p->sig[c]];
    }
    for (int64_t s = 0; s < p->signatures; s++)
        if (p->width[s] < 0 || p->first_output[s + 1] - p->first_output[s] != p->width[s])
            return 0;
    return p->known >= 0 && p->values < INT32_MAX && p->values <= p->arrays.lengths[ROW];
}

/* The tuple: 17 arrays, in the order above; known; grad_groups, grad_outputs, hands_on. */
static int take_phase(Phase *p, PyObject *tuple, int64_t types)
{
    Arrays *a = &p->arrays;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != ARRAYS + 4) {
        PyErr_Format(PyExc_TypeError, "a phase is a tuple of %d", ARRAYS + 4);
        return -1;
    }
    PyObject **items = ((PyTupleObject *)tuple)->ob_item;
    if (take(a, items, ARRAYS, kinds) < 0)
        return -1;
#define OF(k) (a->views[k].buf)
    p->sig = OF(SIG), p->width = OF(WIDTH), p->first_output = OF(FIRST_OUTPUT), p->output_types = OF(OUTPUT_TYPES);
    p->step_signature = OF(STEP_SIGNATURE), p->step_rows = OF(STEP_ROWS), p->first_gather = OF(FIRST_GATHER);
    p->gather_arena = OF(GATHER_ARENA), p->gather_rows = OF(GATHER_ROWS), p->entry_offsets = OF(ENTRY_OFFSETS);
    p->entries = OF(ENTRIES), p->first_block = OF(FIRST_BLOCK), p->block_arena = OF(BLOCK_ARENA);
    p->block_start = OF(BLOCK_START), p->capacity = OF(CAPACITY), p->row = OF(ROW), p->arena_ids = OF(ARENA_IDS);
    p->calls = a->lengths[SIG], p->steps = a->lengths[STEP_SIGNATURE], p->signatures = a->lengths[WIDTH];
    p->arenas = a->lengths[CAPACITY], p->known = PyLong_AsLongLong(items[ARRAYS]);
    if (PyErr_Occurred() || take_choices(&p->groups, items[ARRAYS + 1], p->signatures) < 0 ||
        take_choices(&p->outputs, items[ARRAYS + 2], p->signatures) < 0 || take_flags(p, items[ARRAYS + 3]) < 0)
        return -1;
    int good = a->lengths[FIRST_OUTPUT] == p->signatures + 1 && count_values(p) && columns_fit(p, types);
    good = good ? find_made(p) : 0;
    if (good == 0)
        not_there();
    if (good < 0)
        PyErr_NoMemory();
    return good == 1 ? 0 : -1;
}

void drop_phase(Phase *p)
{
    release(&p->arrays);
    PyMem_Free(p->groups.first);
    PyMem_Free(p->outputs.first);
    PyMem_Free(p->hands_on);
    PyMem_Free(p->made);
    PyMem_Free(p->block);
}

/* The type and values of each request, a pair: 1, 0 for a wrong one, -1 with an exception set. */
int take_requests(Gradients *g, PyObject *sequence)
{
    int64_t room = 0;
    g->requests = PySequence_Fast_GET_SIZE(sequence);
    g->request_type = PyMem_Malloc((3 * g->requests + 1) * sizeof(int64_t));
    if (!g->request_type) {
        PyErr_NoMemory();
        return -1;
    }
    g->request_rows = g->request_type + g->requests;
    g->request_start = g->request_rows + g->requests;
    for (int64_t r = 0; r < g->requests; r++) {
        Arrays a = {.taken = 0};
        PyObject *pair = PySequence_Fast_GET_ITEM(sequence, r);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "a request is a pair (type id, value ids)");
            return -1;
        }
        g->request_type[r] = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, 0));
        if (PyErr_Occurred() || take(&a, &PyTuple_GET_ITEM(pair, 1), 1, "q") < 0)
            return -1;
        int64_t rows = g->request_rows[r] = LENGTH(0);
        if (g->askings + rows > room) {
            room = 2 * room + rows;
            int64_t *grown = PyMem_Realloc(g->asked, room * sizeof(int64_t));
            if (!grown) {
                release(&a);
                PyErr_NoMemory();
                return -1;
            }
            g->asked = grown;
        }
        if (rows)
            memcpy(g->asked + g->askings, I64(0), rows * sizeof(int64_t));
        g->askings += rows;
        release(&a);
        if (g->request_type[r] < 0 || g->request_type[r] >= g->types)
            return 0;
    }
    return 1;
}

int take_phases(Gradients *g, PyObject *sequence)
{
    int64_t phases = PySequence_Fast_GET_SIZE(sequence);
    g->phase = PyMem_Calloc(phases + 1, sizeof(Phase));
    if (!g->phase) {
        PyErr_NoMemory();
        return -1;
    }
    for (; g->phases < phases; g->phases++) {
        Phase *p = &g->phase[g->phases];
        if (take_phase(p, PySequence_Fast_GET_ITEM(sequence, g->phases), g->types) < 0) {
            g->phases++;
            return -1;
        }
        g->values = p->values > g->values ? p->values : g->values;
    }
    for (int64_t i = 0; i < g->askings; i++)
        if (g->asked[i] < 0 || g->asked[i] >= g->values)
            return 0;
    return 1;
}
