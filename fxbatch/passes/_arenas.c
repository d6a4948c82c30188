/* The plan of a scheduled program in one call: blocks, rows, gathers. plan_arenas.py has the twin in numpy.

   In: the columns of program, schedule and slot table. Out: those of the plan, pieces of one array. */

#include "_arenas.h"

enum { SIG, ORDER, FIRST, INPUTS, OUTPUTS, ARITY, WIDTH, FIRST_OUTPUT, OUTPUT_TYPES, CONSTANT, FIRST_SLOT, PRIOR,
       SIZE, MEMBER, FIRST_GROUP, GROUP_SIZE, GROUP_TYPE, ARRAYS };

/* Steps hold calls of one signature, each call once or not at all; how many gathers and blocks they have. */
static int count_pieces(Plan *p)
{
    if (p->steps < 0 || (p->steps && p->first[0] != 0) || (p->steps && p->first[p->steps] > p->calls))
        return 0;
    for (int64_t k = 0; k < p->steps; k++) {
        int64_t at = p->first[k], end = p->first[k + 1], c = at < end ? p->order[at] : -1;
        if (c < 0 || c >= p->calls)
            return 0;
        int32_t s = p->sig[c];
        for (; at < end; at++) {
            c = p->order[at];
            if (c < 0 || c >= p->calls || p->sig[c] != s)
                return 0;
        }
        p->gathers += p->first_group[s + 1] - p->first_group[s];
        p->blocks += p->width[s];
    }
    return 1;
}

static int lay_out_steps(Plan *p)
{
    int64_t g = 0, b = 0, entry = 0;
    int64_t *run = PyMem_Calloc(p->signatures + 1, sizeof(int64_t));
    if (!run)
        return -1;
    if (p->before)
        memcpy(run, p->before, p->signatures * sizeof(int64_t));
    for (int64_t t = 0; t < p->types; t++)
        p->capacity[t] = p->used ? p->used[t] : 0;
    for (int64_t k = 0; k < p->steps; k++) {
        int64_t s = p->sig[p->order[p->first[k]]], rows = p->first[k + 1] - p->first[k];
        p->step_signature[k] = s;
        p->step_rows[k] = rows;
        p->step_offset[k] = run[s];
        run[s] += rows;
        p->first_gather[k] = g;
        for (int64_t group = p->first_group[s]; group < p->first_group[s + 1]; group++, g++) {
            p->gather_arena[g] = p->group_type[group];
            p->gather_rows[g] = rows * p->group_size[group];
            p->entry_offsets[g] = entry;
            entry += p->gather_rows[g];
        }
        p->first_block[k] = b;
        for (int64_t j = 0; j < p->width[s]; j++, b++) {
            int32_t arena = p->output_types[p->first_output[s] + j];
            p->block_arena[b] = arena;
            p->block_start[b] = p->capacity[arena];
            p->capacity[arena] += rows;
        }
    }
    p->first_gather[p->steps] = g;
    p->first_block[p->steps] = b;
    p->entry_offsets[g] = entry;
    PyMem_Free(run);
    return 0;
}

static void place_values(Plan *p)
{
    for (int64_t k = 0; k < p->steps; k++)
        for (int64_t at = p->first[k]; at < p->first[k + 1]; at++) {
            int64_t c = p->order[at], b = p->first_block[k];
            for (int64_t v = p->value[c]; v < p->value[c + 1]; v++)
                p->row[v] = p->block_start[b++] + (at - p->first[k]);
        }
}

/* What an input group finds: rows in a row (0), one row (1), or neither (2); the rows go to `indices`. */
static int classify(const int64_t *entries, int64_t length, int one, const int64_t *row, int64_t *indices)
{
    int64_t next = 0, same = 0;
    for (int64_t i = 0; i < length; i++)
        indices[i] = row[entries[i]];
    for (int64_t i = 1; i < length; i++) {
        next += indices[i] != indices[i - 1] + 1;
        same += indices[i] != indices[i - 1];
    }
    return !next ? 0 : !same && one ? 1 : 2;
}

/* The values that each step reads, in the order of its gathers; of each gather its kind, where its rows begin. */
static int read_inputs(Plan *p)
{
    int64_t base = 0;
    for (int64_t k = 0; k < p->steps; k++) {
        int64_t rows = p->step_rows[k], s = p->step_signature[k], reads = p->arity[s], end = base + rows * reads;
        if (end > p->entries || (p->first_gather[k] < p->first_gather[k + 1] &&
                                 p->entry_offsets[p->first_gather[k]] != base))
            return 0;
        for (int64_t at = 0; at < rows; at++) {
            int64_t c = p->order[p->first[k] + at];
            for (int64_t i = 0; i < reads; i++) {
                int64_t slot = p->first_slot[s] + i, value = p->inputs[p->begin[c] + i];
                int64_t to = base + p->prior[slot] * rows + at * p->size[slot] + p->member[slot];
                if (to < base || to >= end || value < 0 || value >= p->values)
                    return 0;
                p->entry[to] = value;
            }
        }
        for (int64_t g = p->first_gather[k]; g < p->first_gather[k + 1]; g++) {
            int64_t length = p->gather_rows[g], group = p->first_group[s] + g - p->first_gather[k];
            int64_t *rows_of = p->indices + p->indexed;
            if (base + length > end)
                return 0;
            p->kind[g] = classify(p->entry + base, length, p->group_size[group] == 1, p->row, rows_of);
            p->start[g] = p->kind[g] == 2 ? p->indexed : rows_of[0];
            p->indexed += p->kind[g] == 2 ? length : 0;
            base += length;
        }
        if (base != end)
            return 0;
    }
    return 1;
}

/* Signatures of constants whose calls don't run in recorded order. */
static PyObject *out_of_order(const Plan *p)
{
    PyObject *found = PyList_New(0);
    int64_t *last = PyMem_Calloc(p->signatures + 1, sizeof(int64_t)); /* one more than a call; -1: noted */
    if (!found || !last) {
        PyMem_Free(last);
        Py_XDECREF(found);
        return last ? NULL : PyErr_NoMemory();
    }
    for (int64_t k = 0; found && k < p->steps; k++) {
        int64_t s = p->step_signature[k];
        for (int64_t at = p->first[k]; p->constant[s] && last[s] >= 0 && at < p->first[k + 1]; at++)
            last[s] = p->order[at] < last[s] ? -1 : p->order[at] + 1;
        if (last[s] < 0 && last[s]-- == -1) {
            PyObject *number = PyLong_FromLongLong(s);
            if (!number || PyList_Append(found, number) < 0)
                Py_CLEAR(found);
            Py_XDECREF(number);
        }
    }
    PyMem_Free(last);
    return found;
}

/* 1, 0 for a wrong column, -1 without memory. */
static int fill(Plan *p, Columns *made, int again, int64_t *rows)
{
    p->capacity = next_column(made, p->types);
    p->step_signature = next_column(made, p->steps);
    p->step_rows = next_column(made, p->steps);
    p->step_offset = next_column(made, p->steps);
    p->first_gather = next_column(made, p->steps + 1);
    p->gather_arena = next_column(made, p->gathers);
    p->kind = next_column(made, p->gathers);
    p->start = next_column(made, p->gathers);
    p->gather_rows = next_column(made, p->gathers);
    p->first_block = next_column(made, p->steps + 1);
    p->block_arena = next_column(made, p->blocks);
    p->block_start = next_column(made, p->blocks);
    p->entry_offsets = next_column(made, p->gathers + 1);
    p->entry = next_column(made, p->entries);
    p->row = rows ? rows : next_column(made, p->values);
    p->indices = next_column(made, p->entries);
    if (p->known_rows && p->row != p->known_rows)
        memcpy(p->row, p->known_rows, p->known * sizeof(int64_t));
    int good = lay_out_steps(p) < 0 ? -1 : again ? reuse_rows(p) : 1;
    if (good == 1) {
        place_values(p);
        good = read_inputs(p);
    }
    return good;
}

static PyObject *as_tuple(const Plan *p, Columns *made, PyObject *rows)
{
    int64_t sizes[] = {p->types, p->steps, p->steps, p->steps, p->steps + 1, p->gathers, p->gathers, p->gathers,
                       p->gathers, p->steps + 1, p->blocks, p->blocks, p->gathers + 1, p->entries,
                       rows ? 0 : p->values, p->indexed};
    enum { COLUMNS = sizeof sizes / sizeof *sizes, ROWS = 14 };
    PyObject *out = PyTuple_New(COLUMNS + 1);
    for (int k = 0; out && k < COLUMNS; k++) {
        PyObject *column = k == ROWS && rows ? PySequence_GetSlice(rows, 0, p->values) : cut_column(made, sizes[k]);
        if (column)
            PyTuple_SET_ITEM(out, k, column);
        else
            Py_CLEAR(out);
    }
    PyObject *constants = out ? out_of_order(p) : NULL;
    if (constants)
        PyTuple_SET_ITEM(out, COLUMNS, constants);
    else
        Py_CLEAR(out);
    return out;
}

/* Whether the columns belong to each other. */
static int lengths_fit(const Arrays *of, const Plan *p)
{
    const int64_t *n = of->lengths, signatures = p->signatures;
    if (n[WIDTH] != signatures || n[CONSTANT] != signatures || n[FIRST_OUTPUT] != signatures + 1 ||
        n[FIRST_SLOT] != signatures + 1 || n[FIRST_GROUP] != signatures + 1 || n[ORDER] != p->calls)
        return 0;
    if (p->first_slot[0] || p->first_output[0] || p->first_group[0])
        return 0;
    for (int64_t s = 0; s < signatures; s++)
        if (p->first_slot[s + 1] - p->first_slot[s] != p->arity[s] || p->arity[s] < 0 || p->width[s] < 0 ||
            p->first_output[s + 1] - p->first_output[s] != p->width[s] || p->first_group[s + 1] < p->first_group[s])
            return 0;
    int64_t slots = p->first_slot[signatures], groups = p->first_group[signatures];
    if (n[PRIOR] != slots || n[SIZE] != slots || n[MEMBER] != slots || n[GROUP_SIZE] != groups ||
        n[GROUP_TYPE] != groups || n[OUTPUT_TYPES] != p->first_output[signatures])
        return 0;
    for (int64_t g = 0; g < groups; g++)
        if (p->group_size[g] < 1)
            return 0;
    for (int64_t o = 0; o < n[OUTPUT_TYPES]; o++)
        if (p->output_types[o] < 0 || p->output_types[o] >= p->types)
            return 0;
    return 1;
}

/* An array that may be None: its numbers, of which there must be `items` at least. */
static int take_optional(Arrays *a, PyObject *array, char kind, int64_t items, int64_t **out)
{
    *out = NULL;
    if (array == Py_None)
        return 0;
    if (take_one(a, array, kind) < 0)
        return -1;
    *out = a->views[a->taken - 1].buf;
    if (a->lengths[a->taken - 1] >= items)
        return 0;
    not_there();
    return -1;
}

/* What follows the arrays of each program: see `plan`. The plan, or NULL with an exception set. */
static PyObject *make_plan(Plan *p, Arrays *a, PyObject *const *more)
{
    int64_t *known_rows, *used, *before, *rows, again = PyObject_IsTrue(more[7]);
    Columns made = {NULL};
    p->known = PyLong_AsLongLong(more[5]);
    p->types = PyLong_AsLongLong(more[6]);
    if (PyErr_Occurred() || take_optional(a, more[0], 'q', p->known, &known_rows) < 0 ||
        take_optional(a, more[1], 'q', p->types, &used) < 0 ||
        take_optional(a, more[2], 'q', p->signatures, &before) < 0)
        return NULL;
    p->known_rows = known_rows, p->used = used, p->before = before;
    int good = p->known >= 0 && p->types >= 0 && lengths_fit(a, p);
    if (good && !(p->value = first_of(p->sig, p->calls, p->width, p->signatures, p->known)))
        return NULL;
    if (good && !(p->begin = first_of(p->sig, p->calls, p->arity, p->signatures, 0)))
        return NULL;
    p->values = good ? p->value[p->calls] : 0;
    good = good && p->begin[p->calls] == p->entries && count_pieces(p);
    if (good && take_optional(a, more[3], 'Q', p->values, &rows) < 0)
        return NULL;
    int64_t items = p->types + 5 * p->steps + 2 + 5 * p->gathers + 1 + 2 * p->blocks + 2 * p->entries;
    if (good && make_columns(&made, more[4], items + (rows ? 0 : p->values)) < 0)
        return NULL;
    good = good ? fill(p, &made, again, rows) : 0;
    PyObject *out = good == 1 ? as_tuple(p, &made, rows ? more[3] : NULL) : NULL;
    drop_columns(&made);
    if (good == 0)
        not_there();
    return good < 0 ? PyErr_NoMemory() : out;
}

/* plan(sig i32, order, first, inputs, outputs, arity, width, first_output, output_types i32, constant bool,
   first_slot, prior, size, member, first_group, group_size, group_type, known_rows, used, run_before, ROWS, empty,
   known, types, reuse): the columns of the plan, then the constants whose calls are out of order. ROWS has room for
   the row of each value, or is None; so may be known_rows (`known` of them), used and run_before. */
PyObject *plan(PyObject *Py_UNUSED(m), PyObject *const *args, Py_ssize_t n)
{
    Arrays a;
    if (take(&a, args, n, "iqqqqqqqibqqqqqqq") < 0)
        return NULL;
    Plan p = {.sig = I32(SIG), .output_types = I32(OUTPUT_TYPES), .order = I64(ORDER), .first = I64(FIRST),
              .inputs = I64(INPUTS), .outputs = I64(OUTPUTS), .arity = I64(ARITY), .width = I64(WIDTH),
              .first_output = I64(FIRST_OUTPUT), .first_slot = I64(FIRST_SLOT), .prior = I64(PRIOR),
              .size = I64(SIZE), .member = I64(MEMBER), .first_group = I64(FIRST_GROUP),
              .group_size = I64(GROUP_SIZE), .group_type = I64(GROUP_TYPE), .constant = U8(CONSTANT),
              .calls = LENGTH(SIG), .steps = LENGTH(FIRST) - 1, .entries = LENGTH(INPUTS),
              .results = LENGTH(OUTPUTS), .signatures = LENGTH(ARITY)};
    PyObject *out = NULL;
    if (n == ARRAYS + 8)
        out = make_plan(&p, &a, args + ARRAYS);
    else
        PyErr_Format(PyExc_TypeError, "%d arguments, not %zd", ARRAYS + 8, n);
    PyMem_Free(p.value);
    PyMem_Free(p.begin);
    release(&a);
    return out;
}
