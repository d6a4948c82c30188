/* Running a program by blocks of rows.

   Most programs treat each row by itself: what they read of inputs, products with weights and pointwise work. Their rows
   are cut into blocks; a block's inputs are put together, multiplied and worked on by one thread, while they are in its
   cache. No result depends on which thread that is. Instructions that sum over rows divide their results' columns. */

#include "_native.h"

enum { LEAST_ROWS = 16, USUAL_ROWS = 128, BLOCK_COST = 1 << 16, LEAST_APART = 1 << 14 };

/* Whether an instruction reads and writes, for each row of the program, that row alone, and what is the same for all. */
static int keeps_to_rows(const Program *p, const Instruction *x)
{
    const int8_t *size = element_bytes(x->code);
    if (x->code == CALL || x->per_row < 1 || x->rest || x->code == SUM_ROWS || x->code == TABLE_GRADIENT || x->depth_per_row)
        return 0;
    for (int k = 0; k < 4; k++) {
        const Operand *o = &operands_of(x)[k];
        if (!size[k] || o->base < 0)
            continue;
        const Base *base = &p->bases[o->base];
        int64_t row = base->per_row * base->row_bytes, width = width_of(x, k, 1);
        int same = (x->code == LOOKUP && k == 1) || (x->code == PRODUCT && k == 2);
        if (!base->per_row) {
            if (!k || (o->stride && !same))
                return 0;
        } else if (same || base->rest || o->stride * x->per_row * size[k] != row ||
                   (o->offset + (x->per_row - 1) * o->stride + reach(x, k, width)) * size[k] > row)
            return 0;
    }
    return 1;
}

static int64_t cost_of(const Instruction *x)
{
    int64_t each = element_cost(x->code) * (reduces(x->code) ? x->depth_rest : 1);
    each += x->code == PRODUCT ? x->depth_rest / 16 : 0;
    return x->per_row * (8 + x->width * each);
}

/* Whether an instruction writes a base (operands 0 to 1), or reads it. */
static int uses(const Program *p, const Instruction *x, int64_t base, int first, int last)
{
    if (x->code == CALL)
        return call_uses(p, x, base, last == 1);
    for (int k = first; k < last; k++)
        if (element_bytes(x->code)[k] && operands_of(x)[k].base == base)
            return 1;
    return 0;
}

/* Memory of the program's own that one segment alone uses, row by row, exists for one block at a time. */
static void find_block_memory(Program *p)
{
    for (int64_t b = 0; b < p->base_count; b++) {
        Base *base = &p->bases[b];
        int64_t mine = -1;
        if (base->kind != OWN || !base->per_row || base->rest)
            continue;
        for (int64_t s = 0; s < p->segment_count && mine >= -1; s++)
            for (int64_t i = p->segments[s].first; i < p->segments[s].last; i++)
                if (uses(p, &p->code[i], b, 0, 4))
                    mine = p->segments[s].rowwise > 0 && (mine == -1 || mine == s) ? s : -2;
        if (mine >= 0)
            base->kind = BLOCK;
    }
}

int find_segments(Program *p)
{
    p->segments = PyMem_Calloc((size_t)p->length + 1, sizeof(Segment));
    if (!p->segments)
        return -1;
    for (int64_t i = 0; i < p->length;) {
        int64_t last = i + 1, good = p->code[i].code == CALL ? -1 : keeps_to_rows(p, &p->code[i]), cost = cost_of(&p->code[i]);
        for (; p->code[i].group >= 0 && last < p->length && p->code[last].group == p->code[i].group; last++) {
            good = good && keeps_to_rows(p, &p->code[last]); /* a fused group stays together */
            cost += cost_of(&p->code[last]);
        }
        Segment *before = p->segment_count ? &p->segments[p->segment_count - 1] : NULL;
        if (before && before->rowwise == good) {
            before->last = last;
            before->cost += cost;
        } else
            p->segments[p->segment_count++] = (Segment){i, last, good, cost};
        i = last;
    }
    find_block_memory(p);
    return 0;
}

/* Whether instruction i is a product by weights. */
static int may_be_packed(const Program *p, int64_t i)
{
    const Instruction *x = &p->code[i];
    return x->code == PRODUCT && keeps_to_rows(p, x) && x->width * x->depth_rest >= LEAST_APART &&
           p->bases[x->b.base].kind == INPUT;
}

/* Whether such a product is of what the step reads whole, row by row; or of what it writes whole, into
   rows that nothing else of the program uses. */
static int may_be_apart(const Program *p, int64_t i)
{
    const Instruction *x = &p->code[i];
    if (!may_be_packed(p, i) || x->per_row != 1)
        return 0;
    const Base *a = &p->bases[x->a.base], *out = &p->bases[x->out.base];
    if (x->a.inner != 1 || x->a.stride * 4 != a->row_bytes || a->per_row != 1)
        return 0;
    if (a->kind == INPUT)
        return x->a.base < p->source_count && out->kind != INPUT;
    if (a->kind != OUTPUT || out->kind != OUTPUT || x->c.base >= 0 || x->out.offset || x->out.stride != x->width ||
        out->row_bytes != x->width * 4)
        return 0;
    for (int64_t j = 0; j < p->length; j++)
        if ((j != i && uses(p, &p->code[j], x->out.base, 0, 4)) || (j > i && uses(p, &p->code[j], x->a.base, 0, 1)))
            return 0;
    return 1;
}

int find_apart(Program *p)
{
    for (int64_t i = 0; i < p->length && p->apart_count < MOST_APART; i++)
        if (p->base_count + p->apart_count < MOST_BASES && may_be_apart(p, i))
            p->apart[p->apart_count++] = i;
    for (int64_t i = 0; i < p->length && p->packed_count < MOST_APART; i++)
        if (p->base_count + p->apart_count + p->packed_count < MOST_BASES && may_be_packed(p, i))
            p->packed[p->packed_count++] = i;
    Base *bases = PyMem_Realloc(p->bases, (size_t)(p->base_count + p->apart_count + p->packed_count) * sizeof(Base));
    if (!bases)
        return -1;
    p->bases = bases;
    for (int64_t c = 0; c < p->apart_count; c++) {
        Instruction *x = &p->code[p->apart[c]];
        x->apart = p->base_count;
        p->bases[p->base_count++] = (Base){1, 0, x->width * 4, APART};
    }
    for (int64_t c = 0; c < p->packed_count; c++) {
        Instruction *x = &p->code[p->packed[c]];
        x->packed = p->base_count;
        p->bases[p->base_count++] = (Base){0, x->depth_rest, panels_width(x->width) * 4, APART};
    }
    return 0;
}

static int is_rowwise(const Program *p)
{
    return p->segment_count == 1 && p->segments[0].rowwise > 0;
}

typedef struct {
    const Program *p;
    const Segment *segment;
    char **bases;
    const Fill *fills;
    int64_t fill_count, n, rows, threads; /* rows: of a block */
    char *memory;
    size_t each; /* bytes of a thread's */
    int failed;
} Job;

static size_t row_memory(const Program *p, int64_t rows, int64_t kind, int64_t count)
{
    size_t bytes = 0;
    for (int64_t b = 0; b < count; b++)
        if (p->bases[b].kind == kind)
            bytes += aligned((size_t)(rows_of(p->bases[b].per_row, p->bases[b].rest, rows) * p->bases[b].row_bytes));
    return bytes;
}

static int index_rows(const Fill *fill, const int64_t *index, int64_t count, char *to)
{
    int64_t bytes = fill->row_bytes;
    for (int64_t i = 0; i < count; i++) {
        if ((uint64_t)index[i] >= (uint64_t)fill->rows)
            return 1;
        if (bytes == 8)
            memcpy(to + i * 8, fill->from + index[i] * 8, 8);
        else
            memcpy(to + i * bytes, fill->from + index[i] * bytes, (size_t)bytes);
    }
    return 0;
}

static int sum_bags(const Fill *fill, int64_t first, int64_t count, char *to)
{
    for (int64_t b = first; b < first + count; b++, to += fill->row_bytes) {
        int64_t begin = fill->bags[b], end = b + 1 < fill->bag_count ? fill->bags[b + 1] : fill->count;
        if (begin < 0 || end > fill->count || begin > end)
            return 1;
        memset(to, 0, (size_t)fill->row_bytes);
        for (int64_t j = begin; j < end; j++) {
            if ((uint64_t)fill->index[j] >= (uint64_t)fill->rows)
                return 1;
            accumulate((float *)to, (const float *)(fill->from + fill->index[j] * fill->row_bytes), fill->row_bytes / 4);
        }
    }
    return 0;
}

int fill_rows(const Fill *fill, int64_t from, int64_t count, char *to)
{
    int64_t first = from * fill->size, rows = count * fill->size;
    switch (fill->kind) {
    case COPY_ROWS:
        memcpy(to, fill->from + first * fill->row_bytes, (size_t)(rows * fill->row_bytes));
        return 0;
    case REPEAT_ROW:
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + r * fill->row_bytes, fill->from, (size_t)fill->row_bytes);
        return 0;
    case INDEX_ROWS:
        return index_rows(fill, fill->index + first, rows, to);
    case SUM_BAGS:
        return sum_bags(fill, first, rows, to);
    default:
        memset(to, 0, (size_t)(rows * fill->row_bytes));
        return 0;
    }
}

/* Rows [from, from + rows) on the memory of one thread; 1 where an index is out of range. */
static int run_block(const Job *job, int64_t from, int64_t rows, char *memory, int64_t threads)
{
    const Program *p = job->p;
    char *bases[MOST_BASES], *own = memory + SPREAD_BYTES;
    for (int64_t b = 0; b < p->base_count; b++) {
        const Base *base = &p->bases[b];
        if (base->kind == BLOCK) {
            bases[b] = own;
            own += aligned((size_t)(base->per_row * job->rows * base->row_bytes));
        } else if (base->kind == APART && !job->bases[b])
            bases[b] = NULL;
        else
            bases[b] = job->bases[b] + (base->rest ? 0 : from * base->per_row * base->row_bytes);
    }
    for (int64_t i = 0; i < job->fill_count; i++) {
        const Fill *fill = &job->fills[i];
        int64_t bytes = fill->size * fill->row_bytes;
        char *to = fill->to ? fill->to + from * bytes : own;
        if (!fill->to)
            own += aligned((size_t)(job->rows * bytes));
        bases[fill->base] = to;
        if (fill_rows(fill, from, rows, to))
            return 1;
    }
    return job->segment && run_instructions(p, job->segment->first, job->segment->last, rows, job->n, bases, memory, threads);
}

static void run_blocks(void *data, int64_t thread, int64_t threads)
{
    Job *job = data;
    int64_t blocks = (job->n + job->rows - 1) / job->rows;
    for (int64_t i = blocks * thread / threads; i < blocks * (thread + 1) / threads; i++) {
        int64_t from = i * job->rows, rows = job->n - from < job->rows ? job->n - from : job->rows;
        if (__atomic_load_n(&job->failed, __ATOMIC_RELAXED))
            return;
        if (run_block(job, from, rows, job->memory + (size_t)thread * job->each, threads > 1 ? 1 : job->threads))
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    }
}

/* Rows of a block: of equal size, no larger than the cache holds, as many for each thread where it is worth one. */
static int64_t rows_of_block(int64_t cost, int64_t n, int64_t threads)
{
    int64_t most = BLOCK_COST / cost > USUAL_ROWS ? BLOCK_COST / cost : USUAL_ROWS, count = (n + most - 1) / most;
    if (n >= 2 * LEAST_ROWS && worth_threads(n * cost, threads)) {
        int64_t use = n / LEAST_ROWS < threads ? n / LEAST_ROWS : threads;
        count = (count + use - 1) / use * use;
    }
    int64_t rows = (n + count - 1) / count;
    return rows < n ? (rows + 3) / 4 * 4 : n;
}

static int64_t fill_cost(const Fill *fills, int64_t count)
{
    int64_t cost = 1;
    for (int64_t i = 0; i < count; i++)
        cost += fills[i].size * (8 + fills[i].row_bytes / 4);
    return cost;
}

/* What a row of a segment costs, of a program that does nothing else its inputs included. */
static int64_t segment_cost(const Program *p, int64_t s, const Fill *fills, int64_t fill_count)
{
    return p->segments[s].cost + fill_cost(fills, is_rowwise(p) ? fill_count : 0);
}

static int run_segment(Job *job, int64_t cost)
{
    job->rows = rows_of_block(cost, job->n, job->threads);
    in_parallel(job->rows < job->n && worth_threads(job->n * cost, job->threads) ? job->threads : 1, run_blocks, job);
    return job->failed;
}

/* Bytes of one thread: what exists for one block. */
static size_t thread_memory(const Program *p, const Fill *fills, int64_t fill_count, int64_t n, int64_t threads)
{
    size_t most = 0;
    for (int64_t s = 0; s < p->segment_count; s++) {
        int64_t rows = rows_of_block(segment_cost(p, s, fills, fill_count), n, threads);
        size_t bytes = row_memory(p, p->segments[s].rowwise > 0 ? rows : 1, BLOCK, p->base_count);
        for (int64_t i = 0; i < fill_count && is_rowwise(p); i++)
            bytes += aligned((size_t)(rows * fills[i].size * fills[i].row_bytes));
        most = bytes > most ? bytes : most;
    }
    return SPREAD_BYTES + most;
}

int run_program(const Program *p, int64_t n, char **bases, Fill *fills, int64_t fill_count, Room *room)
{
    int64_t threads = usable_threads(room->threads);
    int whole = is_rowwise(p);
    Job job = {p, NULL, bases, fills, fill_count, n, n, threads, NULL, thread_memory(p, fills, fill_count, n, threads), 0};
    size_t shared = row_memory(p, n, OWN, p->base_count) + (whole ? 0 : row_memory(p, n, INPUT, p->source_count));
    if (room_reserve(room, (size_t)threads * job.each + shared))
        return 1;
    job.memory = (char *)aligned((size_t)room->memory);
    char *own = job.memory + (size_t)threads * job.each;
    for (int64_t b = 0; b < p->base_count; b++)
        if (p->bases[b].kind == OWN) {
            bases[b] = own;
            own += aligned((size_t)(rows_of(p->bases[b].per_row, p->bases[b].rest, n) * p->bases[b].row_bytes));
        } else if (p->bases[b].kind > OWN && p->bases[b].kind != APART)
            bases[b] = job.memory;
    for (int64_t i = 0; i < fill_count; i++) {
        if (!whole && !fills[i].to) {
            fills[i].to = own;
            own += aligned((size_t)(n * fills[i].size * fills[i].row_bytes));
        }
        bases[fills[i].base] = fills[i].to ? fills[i].to : job.memory;
    }
    int before = products_alone(room->threads), failed = 0;
    if (!whole && fill_count) {
        failed = run_segment(&job, fill_cost(fills, fill_count));
        job.fill_count = 0;
    }
    for (int64_t s = 0; s < p->segment_count && !failed; s++) {
        job.segment = &p->segments[s];
        if (job.segment->rowwise > 0)
            failed = run_segment(&job, segment_cost(p, s, fills, fill_count));
        else if (job.segment->rowwise) { /* torch's calls run on its own threads, and may run anything */
            products_as_before(before);
            room->busy = 1;
            for (int64_t i = job.segment->first; i < job.segment->last && !failed; i++)
                failed = run_call(p, &p->code[i], n, bases);
            room->busy = 0;
            before = products_alone(room->threads);
        }
        else
            failed = run_instructions(p, job.segment->first, job.segment->last, n, n, bases, job.memory, threads);
    }
    products_as_before(before);
    return failed;
}
