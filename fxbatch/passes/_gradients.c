/* Where gradients of uses are written and how gradients of values are read, of all phases in one call.
   plan_gradients.py has the twin in numpy, and says what is what.

   In: the phases, the values whose gradients are given. Out: the columns of the gradient plan. */

#include "_gradients.h"

enum { NOTHING, VIEW, INDEX, SUM };

typedef struct {
    Phase *p;
    int64_t k, s, rows;
} Step;

/* Phases step by step: 0 at the end. Begin with k = -1. */
static inline int next_step(Step *at)
{
    if (++at->k >= at->p->steps)
        return 0;
    at->s = at->p->step_signature[at->k];
    at->rows = at->p->step_rows[at->k];
    return 1;
}

static inline int64_t gather_of(const Step *at, int64_t i)
{
    return at->p->first_gather[at->k] + at->p->groups.items[i];
}

/* The block whose gradient a step hands on. */
static inline int64_t handed_on(const Step *at)
{
    const Choices *outputs = &at->p->outputs;
    int64_t first = outputs->first[at->s];
    return at->p->first_block[at->k] + (first < outputs->first[at->s + 1] ? outputs->items[first] : 0);
}

#define EACH_GROUP(at, i) for (int64_t i = at.p->groups.first[at.s]; i < at.p->groups.first[at.s + 1]; i++)
#define EACH_OUTPUT(at, i) for (int64_t i = at.p->outputs.first[at.s]; i < at.p->outputs.first[at.s + 1]; i++)

/* Which steps hand gradients on while each of their outputs has one use at most. */
static int find_passed(Gradients *g)
{
    int any = 0;
    for (int64_t f = 0; f < g->phases; f++)
        for (int64_t s = 0; s < g->phase[f].signatures; s++)
            any |= g->phase[f].hands_on[s];
    uint8_t *used = any ? PyMem_Calloc(g->values + 1, 1) : NULL;
    if (!used)
        return any ? -1 : 1;
    for (int64_t i = 0; i < g->askings; i++)
        used[g->asked[i]] += used[g->asked[i]] < 2;
    for (int64_t f = 0; f < g->phases; f++)
        for (Step at = {&g->phase[f], -1}; next_step(&at);)
            EACH_GROUP(at, i) {
                const int64_t *entry = at.p->entries + at.p->entry_offsets[gather_of(&at, i)];
                for (int64_t e = 0; e < at.p->gather_rows[gather_of(&at, i)]; e++)
                    used[entry[e]] += used[entry[e]] < 2;
            }
    for (int64_t f = 0; f < g->phases; f++)
        for (Step at = {&g->phase[f], -1}; next_step(&at);)
            if (at.p->hands_on[at.s]) {
                const int32_t *made = at.p->made + at.p->block[handed_on(&at)];
                int shared = 0;
                for (int64_t r = 0; r < at.rows; r++)
                    shared |= used[made[r]] > 1;
                at.p->passed[at.k] = !shared;
            }
    PyMem_Free(used);
    return 1;
}

/* How many pairs and uses there are. */
static int count_pairs(Gradients *g)
{
    g->uses = g->askings;
    for (int64_t f = 0; f < g->phases; f++)
        for (Step at = {&g->phase[f], -1}; next_step(&at);) {
            int skip = at.p->passed[at.k];
            EACH_GROUP(at, i) {
                int64_t rows = at.p->gather_rows[gather_of(&at, i)], b = skip ? at.p->block[handed_on(&at)] : 0;
                g->followed += skip ? rows : 0;
                g->uses += skip ? 0 : rows;
                if (skip && b + rows > at.p->values - at.p->known)
                    return 0;
            }
            at.p->reads += skip ? 0 : at.p->outputs.first[at.s + 1] - at.p->outputs.first[at.s];
            at.p->writes += skip ? 0 : at.p->groups.first[at.s + 1] - at.p->groups.first[at.s];
        }
    return 1;
}

static int64_t put_uses(Gradients *g, int64_t n, const int64_t *values, int64_t rows, int64_t start)
{
    for (int64_t e = 0; e < rows; e++) {
        g->value[n + e] = (int32_t)values[e];
        g->row[n + e] = start + e;
    }
    return n + rows;
}

/* Give each request and each pair that is written its rows; each use the row that is its own. */
static void place_uses(Gradients *g)
{
    int64_t n = 0;
    for (int64_t r = 0; r < g->requests; r++) {
        int64_t t = g->request_type[r], rows = g->request_rows[r];
        g->request_start[r] = g->total[t] + 1; /* row 0 is zero */
        g->total[t] += rows;
        n = put_uses(g, n, g->asked + n, rows, g->request_start[r]);
    }
    for (int64_t f = 0; f < g->phases; f++) {
        int64_t w = 0;
        for (Step at = {&g->phase[f], -1}; next_step(&at); at.p->first_write[at.k + 1] = w)
            if (!at.p->passed[at.k])
                EACH_GROUP(at, i) {
                    int64_t gather = gather_of(&at, i), rows = at.p->gather_rows[gather];
                    int64_t t = at.p->arena_ids[at.p->gather_arena[gather]], start = g->total[t] + 1;
                    at.p->write_arena[w] = t;
                    at.p->write_start[w] = start;
                    at.p->write_rows[w++] = rows;
                    g->total[t] += rows;
                    n = put_uses(g, n, at.p->entries + at.p->entry_offsets[gather], rows, start);
                }
    }
}

/* The uses by passed steps, behind the others: their rows are those of the one use of what the step made. From the
   last step to the first, so that chains are followed as they come; they are written in step order. */
static int follow(Gradients *g)
{
    int64_t *row = g->followed ? PyMem_Calloc(g->values + 1, sizeof(int64_t)) : NULL; /* unused: row 0, zero */
    int64_t end = g->uses + g->followed;
    if (!g->followed)
        return 1;
    if (!row)
        return -1;
    for (int64_t u = 0; u < g->uses; u++)
        row[g->value[u]] = g->row[u];
    for (int64_t f = g->phases - 1; f >= 0; f--)
        for (Step at = {&g->phase[f], g->phase[f].steps}; at.k-- > 0;) {
            at.s = at.p->step_signature[at.k];
            if (!at.p->passed[at.k])
                continue;
            const int32_t *made = at.p->made + at.p->block[handed_on(&at)];
            int64_t rows = 0, n;
            EACH_GROUP(at, i)
                rows += at.p->gather_rows[gather_of(&at, i)];
            n = end -= rows;
            EACH_GROUP(at, i) {
                const int64_t *entry = at.p->entries + at.p->entry_offsets[gather_of(&at, i)];
                for (int64_t e = 0; e < at.p->gather_rows[gather_of(&at, i)]; e++, n++) {
                    g->value[n] = (int32_t)entry[e];
                    g->row[n] = row[made[e]];
                }
            }
            for (n = end; n < end + rows; n++)
                row[g->value[n]] = g->row[n];
        }
    PyMem_Free(row);
    g->uses += g->followed;
    return 1;
}

static void sort_uses(Gradients *g)
{
    for (int64_t u = 0; u < g->uses; u++)
        g->first_use[g->value[u] + 1]++;
    add_up(g->first_use, g->values);
    for (int64_t u = 0; u < g->uses; u++)
        g->row_by_value[g->first_use[g->value[u]]++] = g->row[u];
    move_back(g->first_use, g->values);
}

/* The row of a value's first use; 0, which is zero, without uses. */
static inline int64_t single(const Gradients *g, int32_t v)
{
    return g->first_use[v] < g->first_use[v + 1] ? g->row_by_value[g->first_use[v]] : 0;
}

/* How the gradients of a block are read; how many indices that takes is added to `taken`. */
static int64_t kind_of(const Gradients *g, const int32_t *value, int64_t rows, int64_t *taken)
{
    int64_t most = 0, least = INT64_MAX, all = 0;
    int consecutive = 1;
    for (int64_t r = 0; r < rows; r++) {
        int64_t uses = g->first_use[value[r] + 1] - g->first_use[value[r]];
        most = uses > most ? uses : most;
        least = uses < least ? uses : least;
        all += uses;
        consecutive &= !r || single(g, value[r]) == single(g, value[r - 1]) + 1;
    }
    if (most > 1) {
        *taken += all;
        return SUM;
    }
    if (most == 0)
        return NOTHING;
    if (consecutive && least == 1)
        return VIEW;
    *taken += rows;
    return INDEX;
}

/* Kind, start and stop of each read, and how long indices and bags are. */
static void find_reads(Gradients *g)
{
    for (int64_t f = 0; f < g->phases; f++) {
        int64_t r = 0, taken = 0;
        for (Step at = {&g->phase[f], -1}; next_step(&at); at.p->first_read[at.k + 1] = r)
            if (!at.p->passed[at.k])
                EACH_OUTPUT(at, i) {
                    int64_t block = at.p->first_block[at.k] + at.p->outputs.items[i];
                    const int32_t *made = at.p->made + at.p->block[block];
                    at.p->read_arena[r] = at.p->arena_ids[at.p->block_arena[block]];
                    int64_t before = taken, kind = kind_of(g, made, at.rows, &taken);
                    int64_t base = kind == VIEW ? single(g, made[0]) : before + (kind > VIEW ? g->indices : 0);
                    at.p->kind[r] = kind;
                    at.p->start[r] = base;
                    at.p->stop[r] = base + (kind == VIEW ? at.rows : taken - before);
                    at.p->bag[r++] = g->bags;
                    g->bags += kind == SUM ? at.rows : 0;
                }
        g->indices += taken;
    }
}

static void fill_indices(const Gradients *g, int64_t *indices, int64_t *bags)
{
    for (int64_t f = 0; f < g->phases; f++) {
        int64_t r = 0;
        for (Step at = {&g->phase[f], -1}; next_step(&at);)
            if (!at.p->passed[at.k])
                EACH_OUTPUT(at, i) {
                    const int32_t *made = at.p->made + at.p->block[at.p->first_block[at.k] + at.p->outputs.items[i]];
                    int64_t kind = at.p->kind[r], start = at.p->start[r], to = start;
                    for (int64_t row = 0; kind == INDEX && row < at.rows; row++)
                        indices[to++] = single(g, made[row]);
                    for (int64_t row = 0; kind == SUM && row < at.rows; row++) {
                        bags[at.p->bag[r] + row] = to - start;
                        for (int64_t u = g->first_use[made[row]]; u < g->first_use[made[row] + 1]; u++)
                            indices[to++] = g->row_by_value[u];
                    }
                    r++;
                }
    }
}

static void next_columns(Phase *p, Columns *made)
{
    p->kind = next_column(made, p->reads);
    p->start = next_column(made, p->reads);
    p->stop = next_column(made, p->reads);
    p->bag = next_column(made, p->reads);
    p->write_arena = next_column(made, p->writes);
    p->write_start = next_column(made, p->writes);
    p->write_rows = next_column(made, p->writes);
    p->read_arena = next_column(made, p->reads);
    p->first_read = next_column(made, p->steps + 1);
    p->first_write = next_column(made, p->steps + 1);
    p->first_read[0] = p->first_write[0] = 0;
}

/* All columns: 1, 0 for a wrong column, -1 with an exception set. */
static int fill(Gradients *g, Columns *pairs, Columns *lists, PyObject *empty)
{
    int passed = find_passed(g), good = passed == 1 && count_pairs(g);
    int64_t items = g->types, most = g->uses + g->followed;
    for (int64_t f = 0; f < g->phases; f++)
        items += 5 * g->phase[f].reads + 3 * g->phase[f].writes + 2 * (g->phase[f].steps + 1);
    if (good && make_columns(pairs, empty, items) < 0)
        return -1;
    g->value = PyMem_Malloc((most + 1) * sizeof(int32_t));
    g->row = PyMem_Malloc((2 * most + 1) * sizeof(int64_t));
    g->first_use = PyMem_Calloc(g->values + 2, sizeof(int64_t));
    if (passed < 0 || !g->value || !g->row || !g->first_use) {
        PyErr_NoMemory();
        return -1;
    }
    if (!good)
        return 0;
    g->row_by_value = g->row + most;
    g->total = next_column(pairs, g->types);
    memset(g->total, 0, g->types * sizeof(int64_t));
    for (int64_t f = 0; f < g->phases; f++)
        next_columns(&g->phase[f], pairs);
    place_uses(g);
    if (follow(g) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    sort_uses(g);
    find_reads(g);
    for (int64_t t = 0; t < g->types; t++)
        g->total[t]++;
    if (make_columns(lists, empty, g->indices + g->bags) < 0)
        return -1;
    int64_t *indices = next_column(lists, g->indices), *bags = next_column(lists, g->bags);
    fill_indices(g, indices, bags);
    return 1;
}

/* A list of bytes, one a step: what `passed` is made of. */
static PyObject *passed_of(const Phase *p)
{
    return PyBytes_FromStringAndSize((const char *)p->passed, p->steps);
}

static PyObject *starts_of(const Gradients *g)
{
    PyObject *out = PyList_New(g->requests);
    for (int64_t r = 0; out && r < g->requests; r++) {
        PyObject *start = PyLong_FromLongLong(g->request_start[r]);
        if (start)
            PyList_SET_ITEM(out, r, start);
        else
            Py_CLEAR(out);
    }
    return out;
}

/* (capacity, passed, 4 columns of reads, 3 of writes, the arenas of reads, where the reads and the writes of each step
   begin, request_start, indices, bags): a list a phase but for the first and the last three. */
static PyObject *as_tuple(const Gradients *g, Columns *pairs, Columns *lists)
{
    PyObject *out = PyTuple_New(15), *capacity = out ? cut_column(pairs, g->types) : NULL;
    if (!capacity)
        goto failed;
    PyTuple_SET_ITEM(out, 0, capacity);
    for (int k = 1; k < 12; k++) {
        PyObject *list = PyList_New(g->phases);
        if (!list)
            goto failed;
        PyTuple_SET_ITEM(out, k, list);
    }
    for (int64_t f = 0; f < g->phases; f++)
        for (int k = 1; k < 12; k++) {
            const Phase *p = &g->phase[f];
            int64_t items = k > 9 ? p->steps + 1 : k < 6 || k == 9 ? p->reads : p->writes;
            PyObject *column = k == 1 ? passed_of(p) : cut_column(pairs, items);
            if (!column)
                goto failed;
            PyList_SET_ITEM(PyTuple_GET_ITEM(out, k), f, column);
        }
    PyObject *last[] = {starts_of(g), cut_column(lists, g->indices), cut_column(lists, g->bags)};
    for (int k = 0; k < 3; k++)
        PyTuple_SET_ITEM(out, 12 + k, last[k]);
    if (last[0] && last[1] && last[2])
        return out;
failed:
    Py_XDECREF(out);
    return NULL;
}

/* plan_gradients(phases, requests, types, empty): see `take_phase`, `take_requests`, `as_tuple`. */
PyObject *plan_gradients(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Gradients g = {.phases = 0};
    Columns pairs = {NULL}, lists = {NULL};
    PyObject *phases, *requests, *out = NULL;
    if (n != 4)
        return PyErr_Format(PyExc_TypeError, "4 arguments, not %zd", n);
    phases = PySequence_Fast(args[0], "phases are a sequence");
    requests = phases ? PySequence_Fast(args[1], "requests are a sequence") : NULL;
    g.types = requests ? PyLong_AsLongLong(args[2]) : 0;
    int good = requests && !PyErr_Occurred() ? take_requests(&g, requests) : -1;
    good = good == 1 ? take_phases(&g, phases) : good;
    good = good == 1 ? fill(&g, &pairs, &lists, args[3]) : good;
    if (good == 1)
        out = as_tuple(&g, &pairs, &lists);
    if (good == 0)
        not_there();
    for (int64_t f = 0; f < g.phases; f++)
        drop_phase(&g.phase[f]);
    PyMem_Free(g.phase);
    PyMem_Free(g.request_type);
    PyMem_Free(g.asked);
    PyMem_Free(g.value);
    PyMem_Free(g.row);
    PyMem_Free(g.first_use);
    drop_columns(&pairs);
    drop_columns(&lists);
    Py_XDECREF(phases);
    Py_XDECREF(requests);
    return out;
}
