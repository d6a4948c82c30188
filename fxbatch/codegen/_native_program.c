/* Running instructions on rows: pointwise ones fused in blocks that stay in the first cache, products and what sums
   over rows on several threads, each with columns or rows of the result for itself, so that nothing is added in another
   order. */

#include "_native.h"

typedef void (*Loop)(void *, const void *, const void *, const void *, int64_t, double);
typedef struct {
    const char *level;
    Loop pointwise[POINTWISE];
    void (*accumulate)(float *, const float *, int64_t);
    void (*sum_rows)(float *, const float *, int64_t, int64_t, int64_t);
    void (*log_softmax)(float *, const float *, int64_t, int);
    void (*log_softmax_backward)(float *, const float *, const float *, int64_t, int);
    void (*log_sum_exp)(float *, const float *, int64_t, int64_t, int64_t);
} Loops;

#define LEVEL "plain"
#define LOOP(name) plain_##name
#include "_native_loops.h"
#undef LOOP
#undef LEVEL

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCHED
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LEVEL "avx2"
#define LOOP(name) avx2_##name
#include "_native_loops.h"
#undef LOOP
#undef LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma,prefer-vector-width=512")
#define LEVEL "avx512"
#define LOOP(name) avx512_##name
#include "_native_loops.h"
#undef LOOP
#undef LEVEL
#pragma GCC pop_options
#endif

static const Loops *loops = &plain_loops;

int choose_loops(const char *level)
{
    const Loops *levels[3] = {&plain_loops, NULL, NULL};
#ifdef DISPATCHED
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        levels[1] = &avx2_loops;
    if (levels[1] && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        levels[2] = &avx512_loops;
#endif
    for (int k = 2; k >= 0; k--)
        if (levels[k] && (!*level || !strcmp(level, levels[k]->level))) {
            loops = levels[k];
            choose_tiles(loops->level);
            return 0;
        }
    return -1;
}

const char *chosen_loops(void)
{
    return loops->level;
}

void accumulate(float *out, const float *row, int64_t count)
{
    loops->accumulate(out, row, count);
}

const int8_t *element_bytes(int64_t code)
{
    static const int8_t loop_bytes[POINTWISE][4] = {LOOP_BYTES}, row_bytes[END - PRODUCT][4] = {ROW_BYTES};
    if (code >= 0 && code < POINTWISE)
        return loop_bytes[code];
    return code >= PRODUCT && code < END ? row_bytes[code - PRODUCT] : NULL;
}

int64_t element_cost(int64_t code)
{
    static const int8_t loop_costs[POINTWISE] = {LOOP_COSTS}, row_costs[END - PRODUCT] = {ROW_COSTS};
    return code < POINTWISE ? loop_costs[code] : row_costs[code - PRODUCT];
}

#define BLOCK_BYTES (24 * 1024)

/* Instructions [first, last) of the group that begins at `first`, and how many rows a block has. */
static int64_t group_end(const Program *p, int64_t first)
{
    int64_t last = first + 1;
    while (last < p->length && p->code[last].group == p->code[first].group)
        last++;
    return last;
}

static int64_t block_rows(const Program *p, int64_t first, int64_t last)
{
    int64_t bytes = 0, widest = 1;
    for (int64_t i = first; i < last; i++) {
        const Instruction *x = &p->code[i];
        const int8_t *size = element_bytes(x->code);
        bytes += x->width * size[0] * 2;
        widest = x->width > widest ? x->width : widest;
    }
    int64_t rows = BLOCK_BYTES / (bytes ? bytes : 1), most = SPREAD / widest;
    rows = rows < most || most < 1 ? rows : most;
    return rows < 1 ? 1 : rows;
}

static void spread(char *to, const char *number, int bytes, int64_t count)
{
    if (bytes == 4) {
        float value, *out = (float *)to;
        memcpy(&value, number, 4);
        for (int64_t i = 0; i < count; i++)
            out[i] = value;
    } else if (bytes == 8) {
        int64_t value, *out = (int64_t *)to;
        memcpy(&value, number, 8);
        for (int64_t i = 0; i < count; i++)
            out[i] = value;
    } else
        memset(to, number[0], (size_t)count);
}

/* One pointwise instruction on rows [from, from + rows) of its operands. */
static void run_pointwise(const Program *p, const Instruction *x, char **bases, int64_t from, int64_t rows, char *spare)
{
    const int8_t *size = element_bytes(x->code);
    const Operand *operands = operands_of(x);
    char *at[4] = {NULL, NULL, NULL, NULL};
    int64_t step[4] = {0, 0, 0, 0};
    char *room[4] = {NULL, spare, spare + SPREAD * 8, spare + SPREAD * 16};
    int spreading[4] = {0, 0, 0, 0}, dense = 1;
    double number;
    memcpy(&number, &x->number, 8);
    for (int k = 0; k < 4; k++) {
        if (!size[k])
            continue;
        const Operand *o = &operands[k];
        if (o->base < 0) {
            spreading[k] = 1; /* the same number everywhere */
            at[k] = (char *)&o->offset;
            continue;
        }
        at[k] = bases[o->base] + (o->offset + from * o->stride) * size[k];
        step[k] = o->stride * size[k];
        spreading[k] = o->inner == 0 && x->width > 1 ? 2 : 0;
        if (spreading[k] == 2 || (rows > 1 && o->stride != x->width))
            dense = 0;
    }
    int64_t lines = dense ? 1 : rows, width = dense ? rows * x->width : x->width;
    int64_t chunk = width;
    for (int k = 1; k < 4; k++)
        if (spreading[k] && chunk > SPREAD)
            chunk = SPREAD;
    for (int k = 1; k < 4; k++)
        if (spreading[k] == 1)
            spread(room[k], at[k], size[k], chunk);
    for (int64_t r = 0; r < lines; r++) {
        for (int k = 1; k < 4; k++)
            if (spreading[k] == 2)
                spread(room[k], at[k] + r * step[k], size[k], chunk);
        for (int64_t c = 0; c < width; c += chunk) {
            const char *in[4];
            for (int k = 0; k < 4; k++)
                in[k] = spreading[k] ? room[k] : at[k] ? at[k] + r * step[k] + c * size[k] : NULL;
            loops->pointwise[x->code]((char *)in[0], in[1], in[2], in[3], width - c < chunk ? width - c : chunk, number);
        }
    }
}

static void run_group(const Program *p, int64_t first, int64_t last, int64_t n, char **bases, char *spare)
{
    int64_t rows = rows_of(p->code[first].per_row, p->code[first].rest, n), block = block_rows(p, first, last);
    for (int64_t from = 0; from < rows; from += block)
        for (int64_t i = first; i < last; i++)
            run_pointwise(p, &p->code[i], bases, from, rows - from < block ? rows - from : block, spare);
}

/* Something over columns or rows of a result, of which each thread takes a piece: pieces of about the same size that begin
   at multiples of 16 (by packed weights: of a panel), as a line of the cache is long and as libraries add up fewer than 16
   rows in another order. */
enum { UNIT = 16, LEAST_UNITS = 2 };
typedef struct {
    const Instruction *x;
    char **at;
    int64_t rows, depth, items;
    int bad;
    int64_t whole; /* rows of the product that these are a block of */
    int64_t unit;
} Pieces;

static int64_t piece_start(int64_t items, int64_t unit, int64_t thread, int64_t threads)
{
    int64_t near = (items * thread / threads + unit / 2) / unit * unit;
    return thread == threads || near > items ? items : near;
}

static void product(const Instruction *x, float *out, const float *start, const float *a, const float *b, int64_t rows,
                    int64_t width, int64_t depth, int64_t whole)
{
    Product job = {out, start, a, b, x->out.stride, x->c.stride, x->a.stride, x->a.inner, x->b.stride,
                   x->b.inner, rows, width, depth, whole};
    multiply(&job);
}

static void product_piece(void *job, int64_t thread, int64_t threads)
{
    const Pieces *p = job;
    const Instruction *x = p->x;
    int64_t first = piece_start(p->items, p->unit, thread, threads);
    int64_t count = piece_start(p->items, p->unit, thread + 1, threads) - first;
    float *out = (float *)p->at[0];
    const float *a = (const float *)p->at[1], *b = (const float *)p->at[2], *start = (const float *)p->at[3];
    if (p->items == x->width)
        product(x, out + first, start ? start + first : NULL, a, b + first * x->b.inner, p->rows, count, p->depth, p->whole);
    else
        product(x, out + first * x->out.stride, start ? start + first * x->c.stride : NULL, a + first * x->a.stride, b,
                count, x->width, p->depth, p->whole);
}

static void run_product(const Instruction *x, char **at, int64_t rows, int64_t depth, int64_t whole, int64_t threads)
{
    Pieces job = {x, at, rows, depth, x->width >= rows ? x->width : rows, 0, whole, x->b.stride == BY_PANELS ? PANEL : UNIT};
    if (worth_threads(rows * x->width * depth / 16, threads) && job.items >= LEAST_UNITS * job.unit * threads)
        in_parallel(threads, product_piece, &job);
    else
        product(x, (float *)at[0], (const float *)at[3], (const float *)at[1], (const float *)at[2], rows, x->width, depth, whole);
}

/* A product by packed weights. */
static Instruction by_panels(const Instruction *x)
{
    Instruction packed = *x;
    packed.b = (Operand){x->packed, 0, BY_PANELS, x->depth_rest};
    return packed;
}

void product_apart(const Instruction *x, char *out, char *a, char *b, const char *packed, int64_t rows, int64_t threads)
{
    Instruction whole = packed ? by_panels(x) : *x;
    char *at[] = {out, a + x->a.offset * 4, packed ? (char *)packed : b + x->b.offset * 4, NULL};
    whole.out.stride = x->width;
    run_product(&whole, at, rows, x->depth_rest, rows, threads);
}

/* What was multiplied before is added to where it lies, and taken for the result, if that is memory of this block's alone;
   else it goes to its place. What is multiplied later waits. */
static void take_product(const Program *p, const Instruction *x, char **bases, char **at, int64_t rows)
{
    const Base *base = &p->bases[x->out.base];
    const float *start = (const float *)at[3];
    float *from = (float *)bases[x->apart], *out = (float *)at[0];
    int there = base->kind == BLOCK && base->per_row == 1 && base->row_bytes == x->width * 4;
    if (p->bases[x->a.base].kind != INPUT)
        return;
    if (there)
        bases[x->out.base] = (char *)from;
    for (int64_t r = 0; r < rows; r++, from += x->width, out += x->out.stride) {
        if (start)
            loops->accumulate(from, start + r * x->c.stride, x->width);
        if (!there)
            memcpy(out, from, (size_t)x->width * 4);
    }
}

static void sum_piece(void *job, int64_t thread, int64_t threads)
{
    const Pieces *p = job;
    int64_t first = piece_start(p->items, UNIT, thread, threads);
    int64_t last = piece_start(p->items, UNIT, thread + 1, threads);
    loops->sum_rows((float *)p->at[0] + first, (const float *)p->at[1] + first, p->x->a.stride, p->rows, last - first);
}

/* Columns of the gradient of a table: each thread adds all rows, in their order. */
static void table_piece(void *job, int64_t thread, int64_t threads)
{
    Pieces *p = job;
    const Instruction *x = p->x;
    int64_t first = piece_start(x->width, UNIT, thread, threads);
    int64_t count = piece_start(x->width, UNIT, thread + 1, threads) - first;
    const int64_t *index = (const int64_t *)p->at[2];
    for (int64_t r = 0; r < p->rows && count; r++) {
        int64_t i = index[r * x->b.stride];
        if ((uint64_t)i >= (uint64_t)x->depth_rest) {
            __atomic_store_n(&p->bad, 1, __ATOMIC_RELAXED);
            return;
        }
        if (i != x->padding)
            loops->accumulate((float *)p->at[0] + i * x->out.stride + first,
                              (const float *)p->at[1] + r * x->a.stride + first, count);
    }
}

static void zero_piece(void *job, int64_t thread, int64_t threads)
{
    const Pieces *p = job;
    const Instruction *x = p->x;
    int64_t first = p->items * thread / threads, last = p->items * (thread + 1) / threads, stride = x->out.stride;
    float *out = (float *)p->at[0];
    if (stride == x->width)
        clear_floats(out + first * stride, (last - first) * stride);
    else
        for (int64_t r = first; r < last; r++)
            memset(out + r * stride, 0, (size_t)x->width * 4);
}

/* The largest (least: smallest) of elements that are `step` apart, the first of equal ones, and NaN before all. */
static int64_t extreme(const float *a, int64_t step, int64_t count, int least)
{
    int64_t found = 0;
    float best = a[0];
    for (int64_t i = 1; i < count && best == best; i++)
        if (least ? !(a[i * step] >= best) : !(a[i * step] <= best)) {
            found = i;
            best = a[i * step];
        }
    return found;
}

/* What is neither pointwise nor a product; 1 where an index is out of range. */
static int run_rows(const Instruction *x, char **at, int64_t rows, int64_t threads)
{
    const int64_t so = x->out.stride, sa = x->a.stride, sb = x->b.stride, sc = x->c.stride;
    const int64_t width = x->width, most = x->depth_rest;
    float *out = (float *)at[0];
    const float *a = (const float *)at[1], *c = (const float *)at[3];
    const int64_t *index = (const int64_t *)at[2];
    Pieces job = {x, at, rows, 0, width, 0, rows, UNIT};
    switch (x->code) {
    case LOOKUP:
        for (int64_t r = 0; r < rows; r++) {
            if ((uint64_t)index[r * sb] >= (uint64_t)most)
                return 1;
            memcpy(out + r * so, a + index[r * sb] * sa, (size_t)width * 4);
        }
        return 0;
    case SUM_ROWS:
        in_parallel(worth_threads(rows * width, threads) ? threads : 1, sum_piece, &job);
        return 0;
    case SUM_LAST:
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0.0;
            for (int64_t i = 0; i < width; i++)
                sum += a[r * sa + i];
            out[r * so] = (float)sum;
        }
        return 0;
    case LOG_SOFTMAX:
        for (int64_t r = 0; r < rows; r++)
            loops->log_softmax(out + r * so, a + r * sa, width, (int)x->logarithm);
        return 0;
    case LOG_SOFTMAX_BACKWARD:
        for (int64_t r = 0; r < rows; r++)
            loops->log_softmax_backward(out + r * so, a + r * sa, (const float *)at[2] + r * sb, width, (int)x->logarithm);
        return 0;
    case PICK:
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < width; j++) {
                if ((uint64_t)index[r * sb + j] >= (uint64_t)most)
                    return 1;
                out[r * so + j] = a[r * sa + index[r * sb + j]];
            }
        return 0;
    case PUT:
        for (int64_t r = 0, column = x->column; r < rows; r++)
            for (int64_t j = 0; j < width; j++) {
                if ((uint64_t)index[r * sb + j] >= (uint64_t)(most / column))
                    return 1;
                float *to = out + r * so + index[r * sb + j] * column + j % column;
                *to = x->replaces ? c[r * sc + j] : *to + c[r * sc + j];
            }
        return 0;
    case EXTREME:
    case PLACE_OF_EXTREME:
        for (int64_t r = 0, step = x->a.inner; r < rows; r++)
            for (int64_t j = 0; j < width; j++) {
                int64_t place = extreme(a + r * sa + j, step, most, (int)x->least);
                if (x->code == EXTREME)
                    out[r * so + j] = a[r * sa + j + place * step];
                else
                    ((int64_t *)at[0])[r * so + j] = place;
            }
        return 0;
    case LOG_SUM_EXP:
        for (int64_t r = 0; r < rows; r++)
            loops->log_sum_exp(out + r * so, a + r * sa, x->a.inner, most, width);
        return 0;
    case TABLE_GRADIENT:
        job.items = most;
        in_parallel(worth_threads(most * width, threads) ? threads : 1, zero_piece, &job);
        in_parallel(worth_threads(rows * width, threads) ? threads : 1, table_piece, &job);
        return job.bad;
    }
    return 1;
}

int run_instructions(const Program *p, int64_t first, int64_t last, int64_t n, int64_t all, char **bases, char *spare,
                     int64_t threads)
{
    for (int64_t i = first; i < last;) {
        const Instruction *x = &p->code[i];
        if (x->group >= 0) {
            int64_t end = group_end(p, i);
            run_group(p, i, end, n, bases, spare);
            i = end;
            continue;
        }
        const Operand *operands = operands_of(x);
        const int8_t *size = element_bytes(x->code);
        char *at[4] = {NULL, NULL, NULL, NULL};
        for (int k = 0; k < 4; k++)
            if (size[k] && operands[k].base >= 0)
                at[k] = bases[operands[k].base] + operands[k].offset * size[k];
        int64_t rows = rows_of(x->per_row, x->rest, n);
        if (x->code == PRODUCT && !has_products())
            return 1;
        if (x->apart && bases[x->apart])
            take_product(p, x, bases, at, rows);
        else if (x->code == PRODUCT) {
            Instruction packed;
            if (x->packed && bases[x->packed]) {
                at[2] = bases[x->packed];
                packed = by_panels(x);
                x = &packed;
            }
            run_product(x, at, rows, rows_of(x->depth_per_row, x->depth_rest, n), rows_of(x->per_row, x->rest, all), threads);
        } else if (run_rows(x, at, rows, threads))
            return 1;
        i++;
    }
    return 0;
}
