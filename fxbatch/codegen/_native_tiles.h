/* Products of float32 matrices, compiled once a level of the processor: whoever includes this defines TILE_OF(name),
   MM(name) of an intrinsic, LANES, the vector V, MASK, and what differs between levels.

   Each element is one chain of multiplications and additions in the order of the depth, however many rows or threads
   there are, so that no piece of a result depends on how it was cut. Only `dots`, for few rows of a product with
   weights as nn.Linear has them, adds up in lanes. */

#define TILE_ROWS 6
#define VECTORS (LANES == 16 ? 4 : 2) /* of a tile: its sums fill the registers */
#define COLUMNS (VECTORS * LANES)
#define PANEL_DEPTH 128 /* of a panel of b, which stays in the first cache */
#define AHEAD 8 /* rows of a panel that are fetched into the first cache before they are read */
#define LARGE 400000 /* elements of a beyond which it is read by blocks */
#define DOT_ROWS (LANES == 16 ? 4 : 2)

/* rows x (vectors x LANES) elements of out, from what is at `start` on, or from zero; of the last vector those that the mask
   says. Of a panel, whose rows are COLUMNS apart, what is ahead is fetched into the first cache, and into the second
   `lines` of the cache for each step of the depth from `next` on. */
static inline __attribute__((always_inline)) void TILE_OF(tile)(
    const int rows, const int vectors, const int panel, float *out, int64_t so, const float *start, int64_t row_of_start,
    const float *a, int64_t row_of_a, int64_t step_of_a, const float *b, int64_t sb, int64_t depth, MASK last,
    const char *next, int64_t lines)
{
    V sum[TILE_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const float *at = start + i * row_of_start + v * LANES;
            sum[i][v] = !start ? MM(setzero_ps)() : v < vectors - 1 ? MM(loadu_ps)(at) : LOAD_SOME(at, last);
        }
    for (int64_t p = 0; p < depth; p++, a += step_of_a, b += panel ? COLUMNS : sb) {
        V row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            row[v] = panel || v < vectors - 1 ? MM(loadu_ps)(b + v * LANES) : LOAD_SOME(b + v * LANES, last);
            if (panel)
                _mm_prefetch((const char *)(b + AHEAD * COLUMNS + v * LANES), _MM_HINT_T0);
        }
        for (int64_t line = 0; panel && line < lines; line++, next += 64)
            _mm_prefetch(next, _MM_HINT_T1);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            V x = MM(set1_ps)(a[i * row_of_a]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[i][v] = MM(fmadd_ps)(x, row[v], sum[i][v]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *at = out + i * so + v * LANES;
            if (v < vectors - 1)
                MM(storeu_ps)(at, sum[i][v]);
            else
                STORE_SOME(at, last, sum[i][v]);
        }
}

typedef void (*TILE_OF(Tile))(float *, int64_t, const float *, int64_t, const float *, int64_t, int64_t, const float *, int64_t,
                              int64_t, MASK, const char *, int64_t);
#define TILE(rows, vectors, panel)                                                                                 \
    static void TILE_OF(tile_##rows##_##vectors##_##panel)(                                                         \
        float *out, int64_t so, const float *start, int64_t row_of_start, const float *a, int64_t row_of_a,         \
        int64_t step_of_a, const float *b, int64_t sb, int64_t depth, MASK last, const char *next, int64_t lines)   \
    {                                                                                                              \
        TILE_OF(tile)(rows, vectors, panel, out, so, start, row_of_start, a, row_of_a, step_of_a, b, sb, depth,     \
                      last, next, lines);                                                                          \
    }
#define TILES_OF(vectors, panel)                                                                                   \
    TILE(1, vectors, panel) TILE(2, vectors, panel) TILE(3, vectors, panel)                                         \
    TILE(4, vectors, panel) TILE(5, vectors, panel) TILE(6, vectors, panel)
#define TILES(vectors) TILES_OF(vectors, 0) TILES_OF(vectors, 1)
#define NAMES(vectors, panel)                                                                                      \
    {                                                                                                              \
        TILE_OF(tile_1_##vectors##_##panel), TILE_OF(tile_2_##vectors##_##panel),                                   \
            TILE_OF(tile_3_##vectors##_##panel), TILE_OF(tile_4_##vectors##_##panel),                               \
            TILE_OF(tile_5_##vectors##_##panel), TILE_OF(tile_6_##vectors##_##panel)                                \
    }
TILES(1)
TILES(2)
#if LANES == 16
TILES(3)
TILES(4)
#define EACH_NAMES(panel) {NAMES(1, panel), NAMES(2, panel), NAMES(3, panel), NAMES(4, panel)}
#else
#define EACH_NAMES(panel) {NAMES(1, panel), NAMES(2, panel)}
#endif
static const TILE_OF(Tile) TILE_OF(tiles)[2][VECTORS][TILE_ROWS] = {EACH_NAMES(0), EACH_NAMES(1)};
#undef TILE
#undef TILES_OF
#undef TILES
#undef NAMES
#undef EACH_NAMES

/* to[j][i] = from[i][j] of lines x depth elements, both at most LANES; `past` the caches, whole lines of them. */
static inline __attribute__((always_inline)) void TILE_OF(transpose)(float *to, int64_t st, const float *from, int64_t sf,
                                                                     int64_t lines, int64_t depth, int past)
{
    V r[LANES], t[LANES];
    MASK some = TILE_OF(some)(depth);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        r[i] = i < lines ? LOAD_SOME(from + i * sf, some) : MM(setzero_ps)();
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
        t[2 * i] = MM(unpacklo_ps)(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = MM(unpackhi_ps)(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) {
        r[4 * i] = MM(shuffle_ps)(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = MM(shuffle_ps)(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = MM(shuffle_ps)(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = MM(shuffle_ps)(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    TILE_OF(across)(r, t);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < depth && past)
            MM(stream_ps)(to + i * st, t[i]);
        else if (i < depth)
            MM(storeu_ps)(to + i * st, t[i]);
}

/* b [width, depth], rows ldb apart, turned: whole vectors of rows st apart are written. */
static inline __attribute__((always_inline)) void TILE_OF(turned)(float *to, int64_t st, const float *b, int64_t ldb,
                                                                  int64_t width, int64_t depth, int past)
{
    for (int64_t j = 0; j < width; j += LANES)
        for (int64_t p = 0; p < depth; p += LANES)
            TILE_OF(transpose)(to + p * st + j, st, b + j * ldb + p, ldb, width - j < LANES ? width - j : LANES,
                               depth - p < LANES ? depth - p : LANES, past);
}

/* Whole weights as panels, one after another. Lines that aren't in a cache need not be read to be written. */
static void TILE_OF(pack)(float *to, const float *b, int64_t row, int64_t column, int64_t width, int64_t depth)
{
    for (int64_t j = 0; j < width && column != 1; j += COLUMNS)
        TILE_OF(turned)(to + j * depth, COLUMNS, b + j * column, column, width - j < COLUMNS ? width - j : COLUMNS, depth,
                        LANES == 16);
    for (int64_t p = 0; p < depth && column == 1; p++)
        for (int64_t j = 0; j < width; j += LANES) {
            float *at = to + j / COLUMNS * COLUMNS * depth + p * COLUMNS + j % COLUMNS;
            MM(stream_ps)(at, LOAD_SOME(b + p * row + j, TILE_OF(some)(width - j < LANES ? width - j : LANES)));
        }
    _mm_sfence();
}

/* Columns of out by rows of b that are sb apart, COLUMNS in a panel, of which `next` is the next, as long, or NULL. A few
   rows read as fast as can be. */
static void TILE_OF(strip)(float *out, int64_t so, const float *start, int64_t row_of_start, const float *a, int64_t row_of_a,
                           int64_t step_of_a, const float *b, int64_t sb, int64_t rows, int64_t wide, int64_t depth,
                           const float *next)
{
    int64_t vectors = (wide + LANES - 1) / LANES, count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t all = COLUMNS * 4 / 64, lines = next && count > 1 ? (all + count - 1) / count : 0;
    MASK last = TILE_OF(some)(wide - (vectors - 1) * LANES);
    const char *line = (const char *)next;
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        int64_t tall = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
        TILE_OF(tiles)[next != NULL][vectors - 1][tall - 1](out + i * so, so, start ? start + i * row_of_start : NULL,
                                                            row_of_start, a + i * row_of_a, row_of_a, step_of_a, b, sb, depth,
                                                            last, line, lines);
        line += lines * depth * 64;
        lines = line < (const char *)(next + COLUMNS * depth) ? lines : 0;
    }
}

/* out[i][j] = start[i][j] + sum of a[i][p] b[p][j]; with `turned` b[j][p]. b is read a panel at a time. */
static void TILE_OF(block)(float *out, int64_t so, const float *start, int64_t row_of_start, const float *a, int64_t row_of_a,
                           int64_t step_of_a, const float *b, int64_t ldb, int turned, int64_t rows, int64_t width,
                           int64_t depth)
{
    float panel[PANEL_DEPTH * COLUMNS] __attribute__((aligned(64)));
    for (int64_t p = 0; p < depth; p += PANEL_DEPTH, start = out, row_of_start = so) {
        int64_t deep = depth - p < PANEL_DEPTH ? depth - p : PANEL_DEPTH;
        for (int64_t j = 0; j < width; j += COLUMNS) {
            int64_t wide = width - j < COLUMNS ? width - j : COLUMNS;
            const float *from = turned ? b + j * ldb + p : b + p * ldb + j;
            if (turned)
                TILE_OF(turned)(panel, COLUMNS, from, ldb, wide, deep, 0);
            TILE_OF(strip)(out + j, so, start ? start + j : NULL, row_of_start, a + p * step_of_a, row_of_a, step_of_a,
                           turned ? panel : from, turned ? COLUMNS : ldb, rows, wide, deep, NULL);
        }
    }
}

/* The same of whole panels that lie one after another: the next is fetched while one is multiplied. */
static void TILE_OF(by_panels)(const Product *x)
{
    for (int64_t j = 0; j < x->width; j += COLUMNS) {
        int64_t wide = x->width - j < COLUMNS ? x->width - j : COLUMNS;
        const float *panel = x->b + j * x->depth;
        TILE_OF(strip)(x->out + j, x->row_of_out, x->start ? x->start + j : NULL, x->row_of_start, x->a, x->row_of_a,
                       x->step_of_a, panel, COLUMNS, x->rows, wide, x->depth, panel + COLUMNS * x->depth);
    }
}

/* The same, where a is larger than the second cache by blocks of its rows, so that they and the result stay there. */
static void TILE_OF(panels)(const Product *x)
{
    int64_t most = x->rows;
    int turned = x->step_of_b != 1;
    if (!turned && x->rows * x->depth > LARGE)
        most = LARGE / 3 / x->depth > 8 * TILE_ROWS ? LARGE / 3 / x->depth / TILE_ROWS * TILE_ROWS : 8 * TILE_ROWS;
    for (int64_t i = 0; i < x->rows; i += most)
        TILE_OF(block)(x->out + i * x->row_of_out, x->row_of_out, x->start ? x->start + i * x->row_of_start : NULL,
                       x->row_of_start, x->a + i * x->row_of_a, x->row_of_a, x->step_of_a, x->b,
                       turned ? x->step_of_b : x->row_of_b, turned, x->rows - i < most ? x->rows - i : most, x->width,
                       x->depth);
}

/* rows x 4 elements of out: rows of a by rows of b, added up in lanes and then across them. */
static inline __attribute__((always_inline)) void TILE_OF(dot)(const int rows, float *out, int64_t so, const float *start,
                                                               int64_t row_of_start, const float *a, int64_t lda,
                                                               const float *b, int64_t ldb, int64_t depth, int64_t columns)
{
    V sum[DOT_ROWS][4];
    const float *b1 = columns > 1 ? b + ldb : b, *b2 = columns > 2 ? b + 2 * ldb : b, *b3 = columns > 3 ? b + 3 * ldb : b;
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = MM(setzero_ps)();
    int64_t p = 0;
    for (; p + LANES <= depth; p += LANES) {
        V w[4] = {MM(loadu_ps)(b + p), MM(loadu_ps)(b1 + p), MM(loadu_ps)(b2 + p), MM(loadu_ps)(b3 + p)};
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            V x = MM(loadu_ps)(a + i * lda + p);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                sum[i][v] = MM(fmadd_ps)(x, w[v], sum[i][v]);
        }
    }
    if (p < depth) {
        MASK last = TILE_OF(some)(depth - p);
        V w[4] = {LOAD_SOME(b + p, last), LOAD_SOME(b1 + p, last), LOAD_SOME(b2 + p, last), LOAD_SOME(b3 + p, last)};
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            V x = LOAD_SOME(a + i * lda + p, last);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                sum[i][v] = MM(fmadd_ps)(x, w[v], sum[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        __m128 four = TILE_OF(sum4)(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        float *at = out + i * so;
        const float *from = start + i * row_of_start;
        if (columns >= 4)
            _mm_storeu_ps(at, start ? _mm_add_ps(four, _mm_loadu_ps(from)) : four);
        else
            for (int v = 0; v < columns; v++)
                at[v] = start ? from[v] + four[v] : four[v];
    }
}

static void TILE_OF(dots)(const Product *x)
{
    const int64_t rows = x->rows;
#define DOT(count)                                                                                                       \
    TILE_OF(dot)(count, x->out + i * x->row_of_out + j, x->row_of_out, x->start ? x->start + i * x->row_of_start + j : NULL, \
                 x->row_of_start, x->a + i * x->row_of_a, x->row_of_a, w, x->step_of_b, x->depth, columns)
    for (int64_t j = 0; j < x->width; j += 4) {
        int64_t columns = x->width - j < 4 ? x->width - j : 4, i = 0;
        const float *w = x->b + j * x->step_of_b;
        for (; i + DOT_ROWS <= rows; i += DOT_ROWS)
            DOT(DOT_ROWS);
#if LANES == 16
        if (rows - i == 3)
            DOT(3);
        if (rows - i == 2)
            DOT(2);
#endif
        if (rows - i == 1)
            DOT(1);
    }
#undef DOT
}

/* Zeros for whole lines of the caches, which need not be read to be written. */
static void TILE_OF(clear)(float *to, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        MM(stream_ps)(to + i, MM(setzero_ps)());
    _mm_sfence();
}

static const Tiles TILE_OF(level) = {TILE_OF(panels), TILE_OF(by_panels), TILE_OF(dots), TILE_OF(pack), TILE_OF(clear)};

#undef TILE_ROWS
#undef VECTORS
#undef COLUMNS
#undef PANEL_DEPTH
#undef AHEAD
#undef LARGE
#undef DOT_ROWS
#undef TILE_OF
#undef MM
#undef LANES
#undef V
#undef MASK
#undef LOAD_SOME
#undef STORE_SOME
