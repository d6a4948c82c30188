/* Consecutive steps of a plan: places from its columns, gathers, one program a step.

   Products by weights whose rows are there before several steps of a signature are done for all of them at once before the
   first, and gradients that nobody reads until later for all of them after the last: weights are read once for all words of
   a sentence, as nn.LSTM does it. Which steps these are depends on the plan alone.

   Whatever is not as expected (no program, a place outside its memory, an index out of range) ends the stretch before
   the step, which Python then runs, raising what it raises. */

#include "_native_steps.h"

typedef struct {
    const int64_t *at[BACKWARD_COLUMNS];
    int64_t length[BACKWARD_COLUMNS];
    Py_buffer views[BACKWARD_COLUMNS];
    int taken;
    PyObject **programs;
    int64_t program_count;
    Room *room;
    int64_t *index_of_gather; /* where the indices of each gather begin */
    struct Apart *apart; /* of each program, MOST_APART; NULL where no product may be done apart */
    char **packed; /* likewise, weights as panels */
    int64_t *nearest; /* of each step, the next one of its signature, for backward the one before; -1: none */
    int64_t *work; /* of each program, 16 for a block of rows whose product gains from packed weights */
    int64_t end; /* the first step from the first on, for backward from the last down, that has no program */
} Steps;

/* An instruction's product on the rows of all steps [first, last) of its signature, done apart from them. */
typedef struct Apart {
    int64_t first, last;
    char *at; /* of the next step's rows; backward: anything but NULL */
} Apart;
/* Rows of a step and of all that are done at once, so that they stay in the cache; rows of a step of which none is waited
   for; how many steps are looked at. */
enum { MOST_APART_ROWS = 96, ALL_APART_ROWS = 256, FEW_ROWS = 32, MOST_APART_STEPS = 1024 };
enum { ROWS_THAT_GAIN = 4, ROWS_OF_BLOCK = 128, WORTH_PACKING = 5 * 16 };

static void release_steps(Steps *s)
{
    while (s->taken)
        PyBuffer_Release(&s->views[--s->taken]);
    PyMem_Free(s->index_of_gather);
    PyMem_Free(s->apart);
    PyMem_Free(s->packed);
    PyMem_Free(s->nearest);
}

static int take_steps(Steps *s, PyObject *columns, int count)
{
    if (!PyTuple_Check(columns) || PyTuple_GET_SIZE(columns) != count) {
        PyErr_Format(PyExc_TypeError, "a tuple of %d columns was expected", count);
        return -1;
    }
    for (int k = 0; k < count; k++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(columns, k), &s->views[k], PyBUF_C_CONTIGUOUS) < 0) {
            release_steps(s);
            return -1;
        }
        s->taken++;
        if (s->views[k].itemsize != 8) {
            release_steps(s);
            PyErr_Format(PyExc_TypeError, "column %d is not int64", k);
            return -1;
        }
        s->at[k] = s->views[k].buf;
        s->length[k] = s->views[k].len / 8;
    }
    int64_t gathers = s->length[GATHER_KIND], steps = s->length[SIGNATURE];
    int good = s->length[ROWS] == steps && s->length[OFFSET] == steps && s->length[FIRST_GATHER] == steps + 1 &&
               s->length[FIRST_BLOCK] == steps + 1 && s->length[GATHER_ARENA] == gathers &&
               s->length[GATHER_START] == gathers && s->length[GATHER_ROWS] == gathers &&
               s->length[BLOCK_ARENA] == s->length[BLOCK_START];
    if (good && count == BACKWARD_COLUMNS) {
        int64_t reads = s->length[READ_KIND], writes = s->length[WRITE_ARENA];
        good = s->length[FIRST_READ] == steps + 1 && s->length[FIRST_WRITE] == steps + 1 && s->length[READ_START] == reads &&
               s->length[READ_STOP] == reads && s->length[READ_BAG] == reads && s->length[READ_ARENA] == reads &&
               s->length[WRITE_START] == writes && s->length[PASSED] == steps;
    }
    if (!good) {
        release_steps(s);
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
        return -1;
    }
    s->index_of_gather = PyMem_Malloc((size_t)(gathers + 1) * 8);
    if (!s->index_of_gather) {
        release_steps(s);
        PyErr_NoMemory();
        return -1;
    }
    int64_t at = 0;
    for (int64_t g = 0; g < gathers; g++) {
        s->index_of_gather[g] = at;
        at += s->at[GATHER_KIND][g] == INDEX ? s->at[GATHER_ROWS][g] : 0;
    }
    return 0;
}

enum { ARENA = sizeof(Arena) / 8, ARRAY = sizeof(Array) / 8 }; /* how many int64 they are */
_Static_assert(sizeof(Counts) == sizeof(Array), "a Counts stands in a row of Arrays");

/* How many arrays the operation of step k has. */
static const Counts *counts_of(const Steps *s, int64_t k)
{
    return (const Counts *)((const Array *)s->at[POINTERS] + s->at[FIRST_POINTER][s->at[SIGNATURE][k]]);
}

/* Rows [start, start + rows) of arena `a` of a table of Arenas; NULL where they aren't there. */
static char *arena_rows(const Steps *s, int table, int64_t a, int64_t start, int64_t rows, int64_t row_bytes)
{
    if (a < 0 || a >= s->length[table] / ARENA)
        return NULL;
    const Arena *arena = (const Arena *)s->at[table] + a;
    if (arena->row_bytes != row_bytes || start < 0 || rows < 0 || (start + rows) * row_bytes > arena->bytes)
        return NULL;
    return (char *)(intptr_t)arena->pointer + start * row_bytes;
}

/* Pointer number i of step k's operation: rows [first, first + rows) of it. */
static char *pointer_rows(const Steps *s, int64_t k, int64_t i, int64_t first, int64_t rows, int64_t row_bytes)
{
    int64_t at = s->at[FIRST_POINTER][s->at[SIGNATURE][k]] + i;
    if (i < 0 || at >= s->at[FIRST_POINTER][s->at[SIGNATURE][k] + 1])
        return NULL;
    const Array *array = (const Array *)s->at[POINTERS] + at;
    if (first < 0 || (first + rows) * row_bytes > array->bytes)
        return NULL;
    return (char *)(intptr_t)array->pointer + first * row_bytes;
}

static int read_in_place(const Steps *s, int64_t k, int64_t i)
{
    return (int)((const Array *)s->at[POINTERS])[s->at[FIRST_POINTER][s->at[SIGNATURE][k]] + i].in_place;
}

/* Where gather g's rows are, or NULL and a fill that puts them together; 1 where something is out of range. */
static int find_gather(const Steps *s, int64_t g, int64_t rows, int copied, char **found, Fill *fill)
{
    int64_t kind = s->at[GATHER_KIND][g], start = s->at[GATHER_START][g], a = s->at[GATHER_ARENA][g];
    int64_t there = kind == VIEW ? rows : kind == INDEX ? 0 : 1;
    char *from = arena_rows(s, ARENAS, a, kind == INDEX ? 0 : start, there, fill->row_bytes);
    if (!from)
        return 1;
    *found = kind == VIEW && !copied ? from : NULL;
    fill->from = from;
    fill->kind = kind == VIEW ? COPY_ROWS : kind == INDEX ? INDEX_ROWS : REPEAT_ROW;
    if (kind != INDEX)
        return 0;
    fill->rows = ((const Arena *)s->at[ARENAS])[a].bytes / fill->row_bytes;
    fill->index = s->at[INDICES] + s->index_of_gather[g];
    return s->at[GATHER_ROWS][g] != rows || s->index_of_gather[g] + rows > s->length[INDICES];
}

/* The program of step k, NULL where Python has to run it. */
static const Program *program_of(const Steps *s, int64_t k)
{
    int64_t signature = s->at[SIGNATURE][k], n = s->at[ROWS][k];
    if (signature < 0 || signature >= s->program_count || s->programs[signature] == Py_None || n > MOST_ROWS || n < 1)
        return NULL;
    return (const Program *)s->programs[signature];
}

/* Where what step k reads is that is the same for all rows: shared operands, and what depends on them alone. */
static char *same_for_all(const Steps *s, const Program *p, int64_t k, int64_t base, int64_t shared)
{
    int64_t number = shared + base - p->source_count - (base < p->inputs ? 0 : p->outputs);
    return pointer_rows(s, k, number, 0, 1, p->bases[base].rest * p->bases[base].row_bytes);
}

/* Whether rows [low, high) are none of gather g's. */
static int is_apart(const Steps *s, int64_t g, int64_t rows, int64_t low, int64_t high)
{
    int64_t start = s->at[GATHER_START][g], end = start + (s->at[GATHER_KIND][g] == VIEW ? rows : 1);
    if (s->at[GATHER_KIND][g] != INDEX)
        return end <= low || start >= high;
    const int64_t *index = s->at[INDICES] + s->index_of_gather[g];
    if (s->index_of_gather[g] + rows > s->length[INDICES])
        return 0;
    for (int64_t i = 0; i < rows && low < high; i++)
        if (index[i] >= low && index[i] < high)
            return 0;
    return 1;
}

/* The steps of one signature from k on whose reads of a source no step from k on writes: the step after them. Their rows. */
static int64_t find_ahead(const Steps *s, const Program *p, int64_t source, int64_t k, int64_t last, int64_t *rows)
{
    int64_t low = INT64_MAX, high = -1, size = p->sources[source].size, end = k, next = k;
    int64_t a = s->at[GATHER_ARENA][s->at[FIRST_GATHER][k] + source];
    last = k + MOST_APART_STEPS < last ? k + MOST_APART_STEPS : last;
    for (int64_t j = k; next >= 0 && next < last; j++) {
        int64_t n = s->at[ROWS][j], g = s->at[FIRST_GATHER][j] + source;
        if (j == next) {
            if (n < 1 || n > MOST_APART_ROWS || *rows + n > ALL_APART_ROWS || g >= s->length[GATHER_KIND] ||
                s->at[GATHER_ARENA][g] != a || !is_apart(s, g, n * size, low, high))
                break;
            *rows += n;
            end = j + 1;
            next = s->nearest[j];
        }
        for (int64_t b = s->at[FIRST_BLOCK][j]; b < s->at[FIRST_BLOCK][j + 1]; b++)
            if (s->at[BLOCK_ARENA][b] == a) {
                int64_t start = s->at[BLOCK_START][b];
                low = start < low ? start : low;
                high = start + n > high ? start + n : high;
            }
    }
    return end;
}

/* The weights of one of step k's instructions as they were packed, or NULL. */
static char *packed_of(const Steps *s, const Program *p, int64_t k, const Instruction *x)
{
    for (int64_t c = 0; c < p->packed_count; c++)
        if (&p->code[p->packed[c]] == x)
            return s->packed[s->at[SIGNATURE][k] * MOST_APART + c];
    return NULL;
}

/* Do an instruction's product for steps from k on, as far as their inputs are there and all is as expected. */
static void multiply_ahead(const Steps *s, const Program *p, int64_t c, int64_t k, Apart *apart)
{
    const Instruction *x = &p->code[p->apart[c]];
    const Counts *counts = counts_of(s, k);
    int64_t source = x->a.base, rows = 0, size = p->sources[source].size, row_bytes = p->bases[source].row_bytes;
    int64_t blocks = s->at[FIRST_BLOCK][k + 1] - s->at[FIRST_BLOCK][k];
    *apart = (Apart){k, k + 1, NULL};
    if (p->bases[source].kind != INPUT || s->nearest[k] < 0 || s->at[FIRST_GATHER][k] + source >= s->length[GATHER_KIND])
        return;
    int64_t end = find_ahead(s, p, source, k, s->end, &rows);
    char *b = end > k + 1 ? same_for_all(s, p, k, x->b.base, 1 + counts->kept + p->outputs - blocks) : NULL;
    char *room = b ? room_apart(s->room, apart - s->apart, (size_t)(rows * (row_bytes + x->width * 4)) + 64) : NULL, *to = room;
    if (!room)
        return;
    for (int64_t j = k; j >= 0 && j < end; j = s->nearest[j]) {
        Fill fill = {.size = size, .row_bytes = row_bytes / size};
        char *found;
        if (find_gather(s, s->at[FIRST_GATHER][j] + source, s->at[ROWS][j] * size, 1, &found, &fill) ||
            fill_rows(&fill, 0, s->at[ROWS][j], to))
            return;
        to += s->at[ROWS][j] * row_bytes;
    }
    *apart = (Apart){k, end, (char *)aligned((size_t)to)};
    int before = products_alone(s->room->threads);
    product_apart(x, apart->at, room, b, packed_of(s, p, k, x), rows, usable_threads(s->room->threads));
    products_as_before(before);
}

/* Pack the weights of step k's program, where the steps of this call gain more by them. */
static void pack(Steps *s, const Program *p, int64_t k)
{
    int64_t signature = s->at[SIGNATURE][k], worth = s->work[signature] >= WORTH_PACKING;
    const Counts *counts = counts_of(s, k);
    s->work[signature] = 0;
    for (int64_t c = 0; worth && c < p->packed_count; c++) {
        const Instruction *x = &p->code[p->packed[c]];
        int64_t number = signature * MOST_APART + c, bytes = x->depth_rest * panels_width(x->width) * 4;
        const char *weights = same_for_all(s, p, k, x->b.base, 1 + counts->kept + counts->saved);
        char *to = weights ? room_apart(s->room, s->program_count * MOST_APART + number, (size_t)bytes) : NULL;
        if (to)
            pack_weights((float *)to, (const float *)weights + x->b.offset, x->b.stride, x->b.inner, x->width,
                         x->depth_rest);
        s->packed[number] = to;
        s->room->packed += to != NULL;
    }
}

/* Where the shared operands of step k are, pointers from `number` on, and its packed weights; 1 where one is out of range. */
static int find_shared(const Steps *s, const Program *p, int64_t k, int64_t number, char **bases)
{
    for (int64_t b = p->source_count; b < p->inputs; b++) {
        int64_t rows = rows_of(p->bases[b].per_row, p->bases[b].rest, s->at[ROWS][k]);
        bases[b] = pointer_rows(s, k, number++, 0, 1, rows * p->bases[b].row_bytes);
        if (!bases[b])
            return 1;
    }
    for (int64_t c = 0; c < p->packed_count; c++)
        bases[p->code[p->packed[c]].packed] = s->packed[s->at[SIGNATURE][k] * MOST_APART + c];
    return 0;
}

static int run_forward_step(const Steps *s, const Program *p, int64_t k)
{
    int64_t n = s->at[ROWS][k], offset = s->at[OFFSET][k];
    const Counts *counts = counts_of(s, k);
    int64_t kept = counts->kept, number = 1 + kept; /* the first row says how many there are of each */
    int64_t gather = s->at[FIRST_GATHER][k], block = s->at[FIRST_BLOCK][k];
    int64_t blocks = s->at[FIRST_BLOCK][k + 1] - block;
    char *bases[MOST_BASES];
    Fill fills[MOST_BASES];
    int64_t fill_count = 0;
    if (gather + p->source_count > s->length[GATHER_KIND])
        return 1;
    for (int64_t i = 0; i < p->source_count; i++) {
        const Source *source = &p->sources[i];
        char *to = NULL;
        int copied = 0;
        if (source->kept >= 0) {
            to = source->kept < kept ? pointer_rows(s, k, 1 + source->kept, offset, n, p->bases[i].row_bytes) : NULL;
            copied = (int)source->copied;
            if (!to)
                return 1;
            if (copied && read_in_place(s, k, 1 + source->kept)) {
                bases[i] = to;
                continue;
            }
        }
        fills[fill_count] = (Fill){.base = i, .size = source->size, .row_bytes = p->bases[i].row_bytes / source->size, .to = to};
        if (find_gather(s, gather + i, n * source->size, copied, &bases[i], &fills[fill_count]))
            return 1;
        fill_count += !bases[i];
    }
    for (int64_t i = 0; i < p->outputs; i++) { /* blocks in arenas, then what is saved */
        int64_t base = p->inputs + i, row_bytes = p->bases[base].row_bytes;
        if (i < blocks)
            bases[base] = arena_rows(s, ARENAS, s->at[BLOCK_ARENA][block + i], s->at[BLOCK_START][block + i], n, row_bytes);
        else
            bases[base] = pointer_rows(s, k, number++, offset, n, row_bytes);
        if (!bases[base])
            return 1;
    }
    if (find_shared(s, p, k, number, bases))
        return 1;
    for (int64_t c = 0; c < p->apart_count; c++) {
        Apart *apart = &s->apart[s->at[SIGNATURE][k] * MOST_APART + c];
        bases[p->code[p->apart[c]].apart] = apart->at;
        s->room->shared += apart->at != NULL;
        if (apart->at)
            apart->at += n * p->code[p->apart[c]].width * 4;
    }
    return run_program(p, n, bases, fills, fill_count, s->room);
}

/* Where the gradient of read i is, or NULL and a fill that puts it together; 1 where something is out of range. */
static int find_gradient(const Steps *s, int64_t i, int64_t n, char **found, Fill *fill)
{
    int64_t kind = s->at[READ_KIND][i], start = s->at[READ_START][i], stop = s->at[READ_STOP][i], a = s->at[READ_ARENA][i];
    *found = NULL;
    fill->kind = ZEROS;
    if (kind == NOTHING)
        return 0;
    if (kind == READ_VIEW) {
        *found = stop - start == n ? arena_rows(s, GRADIENTS, a, start, n, fill->row_bytes) : NULL;
        return !*found;
    }
    fill->from = arena_rows(s, GRADIENTS, a, 0, 0, fill->row_bytes);
    if (!fill->from || start < 0 || stop < start || stop > s->length[GRADIENT_INDICES])
        return 1;
    fill->kind = kind == READ_INDEX ? INDEX_ROWS : SUM_BAGS;
    fill->rows = ((const Arena *)s->at[GRADIENTS])[a].bytes / fill->row_bytes;
    fill->index = s->at[GRADIENT_INDICES] + start;
    fill->count = stop - start;
    if (kind == READ_INDEX)
        return fill->count != n;
    int64_t bag = s->at[READ_BAG][i];
    if (bag < 0 || bag + n > s->length[BAGS] || fill->row_bytes % 4)
        return 1;
    fill->bags = s->at[BAGS] + bag;
    fill->bag_count = n;
    return 0;
}

/* The same of an input that forward kept, made or read. */
static int find_source(const Steps *s, const Source *source, int64_t k, int64_t kept, int64_t row_bytes, char **found,
                       Fill *fill)
{
    int64_t n = s->at[ROWS][k], offset = s->at[OFFSET][k], g = s->at[FIRST_GATHER][k] + source->number;
    if (source->kind == RESULT) {
        int64_t block = s->at[FIRST_BLOCK][k] + source->number;
        if (block >= s->at[FIRST_BLOCK][k + 1])
            return 1;
        *found = arena_rows(s, ARENAS, s->at[BLOCK_ARENA][block], s->at[BLOCK_START][block], n, row_bytes);
    } else if (source->kind == SAVED)
        *found = pointer_rows(s, k, kept + source->number, offset, n, row_bytes);
    else if (g >= s->at[FIRST_GATHER][k + 1])
        return 1;
    else if (source->copied || s->at[GATHER_KIND][g] == INDEX)
        *found = source->kept >= 0 ? pointer_rows(s, k, 1 + source->kept, offset, n, row_bytes) : NULL;
    else
        return find_gather(s, g, n * source->size, 0, found, fill);
    return !*found;
}

/* Whether what step k reads or writes of gradients is in rows [first, last) of an arena, but for its write number `but`. */
static int touches(const Steps *s, int64_t k, int64_t arena, int64_t first, int64_t last, int64_t but)
{
    for (int64_t i = s->at[FIRST_READ][k]; i < s->at[FIRST_READ][k + 1]; i++) {
        int64_t kind = s->at[READ_KIND][i], start = s->at[READ_START][i], stop = s->at[READ_STOP][i];
        if (kind == NOTHING || s->at[READ_ARENA][i] != arena)
            continue;
        if (kind == READ_VIEW ? start < last && stop > first : start < 0 || stop > s->length[GRADIENT_INDICES])
            return 1;
        for (int64_t j = start; kind != READ_VIEW && j < stop; j++)
            if (s->at[GRADIENT_INDICES][j] >= first && s->at[GRADIENT_INDICES][j] < last)
                return 1;
    }
    for (int64_t i = s->at[FIRST_WRITE][k]; i < s->at[FIRST_WRITE][k + 1]; i++)
        if (i != but && s->at[WRITE_ARENA][i] == arena && s->at[WRITE_START][i] < last &&
            s->at[WRITE_START][i] + s->at[ROWS][k] > first)
            return 1;
    return 0;
}

static int has_gradient(const Steps *s, int64_t k)
{
    for (int64_t i = s->at[FIRST_READ][k]; i < s->at[FIRST_READ][k + 1]; i++)
        if (s->at[READ_KIND][i] != NOTHING)
            return 1;
    return 0;
}

/* Result, rows and weights of a product of step k on its rows and those that follow; 1 where something is out of range. */
static int find_product(const Steps *s, const Program *p, const Instruction *x, int64_t k, int64_t rows, char **at)
{
    const Counts *counts = counts_of(s, k);
    int64_t kept = counts->kept + counts->saved, writes = s->at[FIRST_WRITE][k + 1] - s->at[FIRST_WRITE][k], extra = 1 + kept + p->inputs - p->source_count;
    int64_t number = s->at[FIRST_WRITE][k] + x->out.base - p->inputs, a = x->a.base;
    at[0] = arena_rows(s, GRADIENTS, s->at[WRITE_ARENA][number], s->at[WRITE_START][number], rows, x->width * 4);
    at[1] = pointer_rows(s, k, extra + a - p->inputs - writes, s->at[OFFSET][k], rows, p->bases[a].row_bytes);
    at[2] = same_for_all(s, p, k, x->b.base, 1 + kept);
    return !at[0] || !at[1] || !at[2];
}

/* Steps of one signature from k down whose rows of a product's result lie one after another, and which no step from k down
   to the last of them reads. */
static void find_later(const Steps *s, const Program *p, int64_t c, int64_t k, int64_t first, Apart *apart)
{
    const Instruction *x = &p->code[p->apart[c]];
    int64_t low = k, w = x->out.base - p->inputs, a = x->a.base - p->inputs, next = s->nearest[k];
    int64_t writes = s->at[FIRST_WRITE][k + 1] - s->at[FIRST_WRITE][k], number = s->at[FIRST_WRITE][k] + w;
    *apart = (Apart){k, k + 1, NULL};
    if (p->bases[x->a.base].kind != OUTPUT || w >= writes || a < writes || s->at[ROWS][k] > FEW_ROWS || !has_gradient(s, k))
        return;
    int64_t arena = s->at[WRITE_ARENA][number], start = s->at[WRITE_START][number], end = start + s->at[ROWS][k];
    int64_t offset = s->at[OFFSET][k];
    first = k - MOST_APART_STEPS > first ? k - MOST_APART_STEPS : first;
    for (int64_t j = k - 1; j >= first && next >= first; j--) {
        int64_t n = s->at[ROWS][j], but = -1;
        if (s->at[PASSED][j] && j != next)
            continue;
        if (j == next) {
            but = s->at[FIRST_WRITE][j] + w;
            if (s->at[PASSED][j] || n < 1 || n > FEW_ROWS || !has_gradient(s, j) ||
                s->at[FIRST_WRITE][j + 1] - s->at[FIRST_WRITE][j] != writes || s->at[WRITE_ARENA][but] != arena ||
                s->at[WRITE_START][but] + n != start || s->at[OFFSET][j] + n != offset)
                break;
            start -= n;
            offset -= n;
        }
        if (touches(s, j, arena, start, end, but))
            break;
        if (j == next) {
            low = j;
            next = s->nearest[j];
        }
    }
    char *at[3];
    if (low < k && !find_product(s, p, x, low, end - s->at[WRITE_START][s->at[FIRST_WRITE][low] + w], at))
        *apart = (Apart){low, k + 1, at[0]};
}

/* A product for those of the steps that run without it that are not before k. */
static void multiply_later(const Steps *s, const Program *p, int64_t c, int64_t k, Apart *apart)
{
    const Instruction *x = &p->code[p->apart[c]];
    int64_t rows = 0, low = apart->last - 1;
    char *at[3];
    for (int64_t j = low; j >= k && j >= apart->first; j = s->nearest[j]) {
        rows += s->at[ROWS][j];
        low = j;
    }
    apart->at = NULL;
    if (find_product(s, p, x, low, rows, at))
        return;
    int before = products_alone(s->room->threads);
    product_apart(x, at[0], at[1], at[2], packed_of(s, p, k, x), rows, usable_threads(s->room->threads));
    products_as_before(before);
}

static int run_backward_step(const Steps *s, const Program *p, int64_t k)
{
    int64_t n = s->at[ROWS][k], offset = s->at[OFFSET][k], read = s->at[FIRST_READ][k], write = s->at[FIRST_WRITE][k];
    int64_t reads = s->at[FIRST_READ][k + 1] - read, writes = s->at[FIRST_WRITE][k + 1] - write;
    const Counts *counts = counts_of(s, k);
    int64_t kept = counts->kept, saved = counts->saved; /* the first row says how many there are of each */
    int64_t shared = 1 + kept + saved, extra = shared + p->inputs - p->source_count;
    char *bases[MOST_BASES];
    for (int64_t i = 0; i < p->outputs; i++) { /* gradients of groups, then rows for the parameters */
        int64_t base = p->inputs + i, row_bytes = p->bases[base].row_bytes;
        if (i < writes) {
            const Arena *arena = (const Arena *)s->at[GRADIENTS] + s->at[WRITE_ARENA][write + i];
            int64_t size = arena->row_bytes ? row_bytes / arena->row_bytes : 0;
            bases[base] = arena_rows(s, GRADIENTS, s->at[WRITE_ARENA][write + i], s->at[WRITE_START][write + i], n * size,
                                     size ? row_bytes / size : -1);
        } else
            bases[base] = pointer_rows(s, k, extra + i - writes, offset, n, row_bytes);
        if (!bases[base])
            return 1;
    }
    if (!has_gradient(s, k)) {
        for (int64_t b = p->inputs; b < p->inputs + p->outputs; b++)
            memset(bases[b], 0, (size_t)(n * p->bases[b].row_bytes));
        return 0;
    }
    if (reads > p->source_count)
        return 1;
    Fill fills[MOST_BASES];
    int64_t fill_count = 0;
    for (int64_t i = 0; i < p->source_count; i++) {
        int64_t size = p->sources[i].size, row_bytes = p->bases[i].row_bytes;
        Fill *fill = &fills[fill_count];
        *fill = (Fill){.base = i, .size = size, .row_bytes = row_bytes / size};
        if (i < reads ? find_gradient(s, read + i, n, &bases[i], fill)
                      : find_source(s, &p->sources[i], k, 1 + kept, row_bytes, &bases[i], fill))
            return 1;
        fill_count += !bases[i];
    }
    if (find_shared(s, p, k, shared, bases))
        return 1;
    for (int64_t c = 0; c < p->apart_count; c++) {
        char *later = s->apart[s->at[SIGNATURE][k] * MOST_APART + c].at;
        bases[p->code[p->apart[c]].apart] = later;
        s->room->shared += later != NULL;
    }
    return run_program(p, n, bases, fills, fill_count, s->room);
}

/* What products apart and packed weights need, where there may be some; -1 with an exception. */
static int take_apart(Steps *s, int forward, int64_t first, int64_t last)
{
    int64_t steps = s->length[SIGNATURE], count = s->program_count * MOST_APART, some = 0;
    for (int64_t i = 0; i < s->program_count; i++) {
        const Program *p = (const Program *)s->programs[i];
        some |= s->programs[i] != Py_None && (p->apart_count || p->packed_count);
    }
    if (!some)
        return 0;
    s->apart = PyMem_Calloc((size_t)count, sizeof(Apart));
    s->packed = PyMem_Calloc((size_t)count, sizeof(char *));
    s->nearest = PyMem_Calloc((size_t)(steps + 2 * s->program_count), 8);
    if (!s->apart || !s->packed || !s->nearest || room_count(s->room, 2 * count) < 0) {
        release_steps(s);
        PyErr_NoMemory();
        return -1;
    }
    int64_t *met = s->nearest + steps;
    s->work = met + s->program_count;
    for (int64_t i = 0; i < s->program_count; i++)
        met[i] = -1;
    s->end = forward ? first : last;
    while (forward ? s->end < last && program_of(s, s->end) : s->end > first && program_of(s, s->end - 1))
        s->end += forward ? 1 : -1;
    for (int64_t i = 0, all = forward ? s->end - first : last - s->end; i < all; i++) {
        int64_t k = forward ? s->end - 1 - i : s->end + i, signature = s->at[SIGNATURE][k], n = s->at[ROWS][k];
        s->nearest[k] = met[signature];
        met[signature] = k;
        if (n >= ROWS_THAT_GAIN && (forward || !s->at[PASSED][k]) && can_pack())
            s->work[signature] += n < 16 ? n : (n + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK * 16;
    }
    return 0;
}

static int take_arguments(Steps *s, PyObject *args, int count, long long *first, long long *last)
{
    PyObject *programs, *room, *columns;
    if (!PyArg_ParseTuple(args, "O!O!OLL", &PyTuple_Type, &programs, &RoomType, &room, &columns, first, last))
        return -1;
    s->programs = &PyTuple_GET_ITEM(programs, 0);
    s->program_count = PyTuple_GET_SIZE(programs);
    s->room = (Room *)room;
    for (int64_t i = 0; i < s->program_count; i++)
        if (s->programs[i] != Py_None && Py_TYPE(s->programs[i]) != &ProgramType) {
            PyErr_SetString(PyExc_TypeError, "programs and None were expected");
            return -1;
        }
    if (take_steps(s, columns, count) < 0)
        return -1;
    if (*first < 0 || *last < *first || *last > s->length[SIGNATURE] ||
        s->length[FIRST_POINTER] != s->program_count + 1 ||
        s->at[FIRST_POINTER][s->program_count] * ARRAY > s->length[POINTERS]) {
        release_steps(s);
        PyErr_SetString(PyExc_ValueError, "steps or pointers out of range");
        return -1;
    }
    return take_apart(s, count == FORWARD_COLUMNS, *first, *last);
}

/* forward(programs, room, columns, first, last) -> the first step that was not run, `last` if all were. */
PyObject *native_forward(PyObject *module, PyObject *args)
{
    Steps s = {.taken = 0};
    long long first, last;
    (void)module;
    if (take_arguments(&s, args, FORWARD_COLUMNS, &first, &last) < 0)
        return NULL;
    int64_t k = first;
    Py_BEGIN_ALLOW_THREADS
    for (; k < last && !s.room->busy; k++) {
        const Program *p = program_of(&s, k);
        if (p && p->packed_count && s.work[s.at[SIGNATURE][k]])
            pack(&s, p, k);
        for (int64_t c = 0; p && c < p->apart_count; c++) {
            Apart *apart = &s.apart[s.at[SIGNATURE][k] * MOST_APART + c];
            if (k >= apart->last)
                multiply_ahead(&s, p, c, k, apart);
        }
        if (!p || run_forward_step(&s, p, k))
            break;
    }
    Py_END_ALLOW_THREADS
    release_steps(&s);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(k);
}

/* backward(programs, room, columns, first, last) -> the step after the last that was not run: steps last - 1 down
   to it are done; `first` if all are. */
PyObject *native_backward(PyObject *module, PyObject *args)
{
    Steps s = {.taken = 0};
    long long first, last;
    (void)module;
    if (take_arguments(&s, args, BACKWARD_COLUMNS, &first, &last) < 0)
        return NULL;
    int64_t k = last;
    Py_BEGIN_ALLOW_THREADS
    for (; k > first && !s.room->busy; k--) {
        if (s.at[PASSED][k - 1])
            continue;
        const Program *p = program_of(&s, k - 1);
        if (!p || s.at[FIRST_READ][k - 1] == s.at[FIRST_READ][k])
            break;
        if (p->packed_count && s.work[s.at[SIGNATURE][k - 1]])
            pack(&s, p, k - 1);
        Apart *apart = s.apart + s.at[SIGNATURE][k - 1] * MOST_APART;
        for (int64_t c = 0; c < p->apart_count; c++)
            if (!apart[c].last || k - 1 < apart[c].first)
                find_later(&s, p, c, k - 1, s.end, &apart[c]);
        if (run_backward_step(&s, p, k - 1))
            break;
        for (int64_t c = 0; c < p->apart_count; c++)
            if (apart[c].at && k - 1 == apart[c].first)
                multiply_later(&s, p, c, k - 1, &apart[c]);
    }
    for (int64_t i = 0; s.apart && k > first && i < s.program_count * MOST_APART; i++)
        if (s.apart[i].at && k < s.apart[i].last) /* some of its steps ran */
            multiply_later(&s, (const Program *)s.programs[i / MOST_APART], i % MOST_APART, k, &s.apart[i]);
    Py_END_ALLOW_THREADS
    release_steps(&s);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(k);
}
