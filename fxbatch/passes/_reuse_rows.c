/* Where output blocks begin when rows are used again. reuse_rows.py has the twin in Python, and says why.

   In: a plan whose steps and blocks are laid out. Out: the blocks' first rows and the capacities, in place. */

#include "_arenas.h"

typedef struct {
    int64_t a, b;
} Rows;

typedef struct {
    Rows *items;
    int64_t count, room, end; /* free rows in order; above `end` all is free */
} Free;

/* The first free rows that are enough, else rows at the end. */
static int64_t take_rows(Free *f, int64_t rows)
{
    for (int64_t i = 0; i < f->count; i++) {
        Rows *r = &f->items[i];
        if (r->b - r->a < rows)
            continue;
        int64_t a = r->a;
        r->a += rows;
        if (r->a == r->b)
            memmove(r, r + 1, (--f->count - i) * sizeof(Rows));
        return a;
    }
    int64_t a = f->count && f->items[f->count - 1].b == f->end ? f->items[--f->count].a : f->end;
    f->end = a + rows;
    return a;
}

/* Put rows back, joined with free neighbours; -1 without memory. */
static int give_rows(Free *f, int64_t a, int64_t b)
{
    int64_t i = f->count;
    if (f->count == f->room) {
        Rows *grown = PyMem_Realloc(f->items, (2 * f->room + 8) * sizeof(Rows));
        if (!grown)
            return -1;
        f->items = grown;
        f->room = 2 * f->room + 8;
    }
    while (i && f->items[i - 1].a >= a)
        i--;
    int before = i && f->items[i - 1].b == a, after = i < f->count && f->items[i].a == b;
    if (before && after) {
        f->items[i - 1].b = f->items[i].b;
        memmove(&f->items[i], &f->items[i + 1], (--f->count - i) * sizeof(Rows));
    } else if (before) {
        f->items[i - 1].b = b;
    } else if (after) {
        f->items[i].a = a;
    } else {
        memmove(&f->items[i + 1], &f->items[i], (f->count++ - i) * sizeof(Rows));
        f->items[i] = (Rows){a, b};
    }
    return 1;
}

/* The step that reads any value of each block last; its own without readers, the number of steps for results. */
static int last_readers(const Plan *p, int64_t *dies)
{
    int32_t *block = PyMem_Malloc((p->values - p->known + 1) * sizeof(int32_t));
    if (!block)
        return -1;
    int good = 1;
    for (int64_t k = 0; k < p->steps; k++)
        for (int64_t at = p->first[k]; at < p->first[k + 1]; at++) {
            int64_t c = p->order[at], b = p->first_block[k];
            for (int64_t v = p->value[c]; v < p->value[c + 1]; v++)
                block[v - p->known] = (int32_t)b++;
        }
    for (int64_t k = 0; good && k < p->steps; k++) {
        for (int64_t b = p->first_block[k]; b < p->first_block[k + 1]; b++)
            dies[b] = dies[b] > k ? dies[b] : k;
        for (int64_t at = p->first[k]; good && at < p->first[k + 1]; at++)
            for (int64_t i = p->begin[p->order[at]]; good && i < p->begin[p->order[at] + 1]; i++) {
                good = p->inputs[i] >= 0 && p->inputs[i] < p->values;
                if (good && p->inputs[i] >= p->known)
                    dies[block[p->inputs[i] - p->known]] = k;
            }
    }
    for (int64_t i = 0; good && i < p->results; i++) {
        good = p->outputs[i] >= 0 && p->outputs[i] < p->values;
        if (good && p->outputs[i] >= p->known)
            dies[block[p->outputs[i] - p->known]] = p->steps;
    }
    PyMem_Free(block);
    return good;
}

/* Blocks anew, in rows whose last reader has run. 1, 0 for a wrong column, -1 without memory. */
int reuse_rows(Plan *p)
{
    int64_t *dies = PyMem_Calloc(3 * p->blocks + p->steps + 2, sizeof(int64_t));
    Free *frees = PyMem_Calloc(p->types + 1, sizeof(Free));
    int good = dies && frees ? last_readers(p, dies) : -1;
    int64_t *next = dies + p->blocks, *size = next + p->blocks, *ending = size + p->blocks;
    for (int64_t k = 0; good == 1 && k < p->steps; k++) { /* `ending` and `next`: one more than a block */
        for (int64_t b = p->first_block[k]; b < p->first_block[k + 1]; b++) {
            size[b] = p->step_rows[k];
            p->block_start[b] = take_rows(&frees[p->block_arena[b]], size[b]);
            next[b] = ending[dies[b]];
            ending[dies[b]] = b + 1;
        }
        for (int64_t b = ending[k] - 1; good == 1 && b >= 0; b = next[b] - 1)
            good = give_rows(&frees[p->block_arena[b]], p->block_start[b], p->block_start[b] + size[b]);
    }
    for (int64_t t = 0; good == 1 && t < p->types; t++)
        p->capacity[t] = frees[t].end;
    for (int64_t t = 0; frees && t < p->types; t++)
        PyMem_Free(frees[t].items);
    PyMem_Free(frees);
    PyMem_Free(dies);
    return good;
}
