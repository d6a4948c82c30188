/* Products of float32 matrices: by BLAS as torch's library has it, or by loops of ours, as was chosen for a layout and
   a number of rows. Which it is depends on the whole product, never on the piece of it that a thread does. */

#include "_native.h"

/* sgemm_ of BLAS, Fortran's calling convention, 32-bit integers. */
typedef void (*Sgemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                      const int *, const float *, const int *, const float *, float *, const int *);
static Sgemm sgemm;

typedef struct {
    void (*panels)(const Product *), (*by_panels)(const Product *), (*dots)(const Product *);
    void (*pack)(float *, const float *, int64_t, int64_t, int64_t, int64_t);
    void (*clear)(float *, int64_t);
} Tiles;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#define VECTORISED
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define TILE_OF(name) avx2_##name
#define MM(name) _mm256_##name
#define LANES 8
#define V __m256
#define MASK __m256i
#define LOAD_SOME(at, mask) _mm256_maskload_ps(at, mask)
#define STORE_SOME(at, mask, v) _mm256_maskstore_ps(at, mask, v)
static inline MASK avx2_some(int64_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline __m128 avx2_sum4(V a, V b, V c, V d)
{
    V all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
/* Quarters and halves of a transpose change places: those of r to t. */
static inline void avx2_across(V *r, V *t)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
    }
}
#include "_native_tiles.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma,prefer-vector-width=512")
#define TILE_OF(name) avx512_##name
#define MM(name) _mm512_##name
#define LANES 16
#define V __m512
#define MASK __mmask16
#define LOAD_SOME(at, mask) _mm512_maskz_loadu_ps(mask, at)
#define STORE_SOME(at, mask, v) _mm512_mask_storeu_ps(at, mask, v)
static inline MASK avx512_some(int64_t count)
{
    return (MASK)((1u << count) - 1);
}
static inline __m128 avx512_sum4(V a, V b, V c, V d)
{
    V ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    V cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    V all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1)); /* each quarter is one sum */
    __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(first, all));
}
static inline void avx512_across(V *r, V *t)
{
    V s[16];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
        s[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
        s[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
        s[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[i] = _mm512_shuffle_f32x4(s[i], s[8 + i], 0x88);
        t[8 + i] = _mm512_shuffle_f32x4(s[i], s[8 + i], 0xdd);
    }
}
#include "_native_tiles.h"
#pragma GCC pop_options
#endif

enum { PAST_CACHES = 1 << 20, MOST_TERMS = 512 }; /* floats; of a sum that BLAS adds up at once */
static const Tiles *tiles;
static int8_t chosen[LAYOUTS][ROW_CLASSES]; /* 1: BLAS */

/* The loops of a level of the processor that is known to be there; none for "plain". */
void choose_tiles(const char *level)
{
    tiles = NULL;
#ifdef VECTORISED
    tiles = !strcmp(level, "avx512") ? &avx512_level : !strcmp(level, "avx2") ? &avx2_level : NULL;
#endif
}

void set_products(void *single)
{
    memcpy(&sgemm, &single, sizeof sgemm);
}

int has_products(void)
{
    return (sgemm != NULL) + 2 * (tiles != NULL);
}

void set_choice(const int8_t *choice)
{
    memcpy(chosen, choice, sizeof chosen);
}

/* Not where BLAS does many rows better by weights as they are. */
int can_pack(void)
{
    return tiles && !(chosen[PACKED_B][ROW_CLASSES - 2] && chosen[PACKED_B][ROW_CLASSES - 1]);
}

void pack_weights(float *to, const float *b, int64_t row, int64_t column, int64_t width, int64_t depth)
{
    tiles->pack(to, b, row, column, width, depth);
}

/* Zero floats; more of them than a cache keeps anyway go past it. */
void clear_floats(float *to, int64_t count)
{
    int64_t first = (int64_t)(aligned((size_t)to) - (size_t)to) / 4, lines = (count - first) / 16 * 16;
    if (!tiles || count < PAST_CACHES) {
        memset(to, 0, (size_t)count * 4);
        return;
    }
    memset(to, 0, (size_t)first * 4);
    tiles->clear(to + first, lines);
    memset(to + first + lines, 0, (size_t)(count - first - lines) * 4);
}

static int class_of(int64_t rows)
{
    return rows <= 4 ? 0 : rows <= 24 ? 1 : rows <= 96 ? 2 : 3;
}

/* Row-major products by Fortran's column-major one: out' = b' a'. A matrix read along its columns is transposed. MKL adds
   up more than 768 terms in parts that depend on the size of the result: it is given fewer at once, so that a piece of a
   result, which a thread does, has the numbers of the whole. */
static void blas(const Product *x)
{
    int ta = x->step_of_a != 1, tb = x->step_of_b != 1;
    int m = (int)x->width, n = (int)x->rows, ldo = (int)x->row_of_out;
    int lda = (int)(ta ? x->step_of_a : x->row_of_a), ldb = (int)(tb ? x->step_of_b : x->row_of_b);
    float one = 1.0f, rest = x->start ? 1.0f : 0.0f;
    /* A stride over a single row or column says nothing. */
    int least_a = ta ? n : (int)x->depth, least_b = tb ? (int)x->depth : m;
    lda = lda < least_a ? least_a : lda;
    ldb = ldb < least_b ? least_b : ldb;
    ldo = ldo < m ? m : ldo;
    for (int64_t i = 0; i < x->rows && x->start && x->start != x->out; i++)
        memcpy(x->out + i * x->row_of_out, x->start + i * x->row_of_start, (size_t)x->width * 4);
    int64_t parts = x->depth ? (x->depth + MOST_TERMS - 1) / MOST_TERMS : 1;
    for (int64_t i = 0; i < parts; i++, rest = 1.0f) {
        int64_t first = x->depth * i / parts;
        int k = (int)(x->depth * (i + 1) / parts - first);
        sgemm(tb ? "T" : "N", ta ? "T" : "N", &m, &n, &k, &one, x->b + first * x->row_of_b, &ldb, x->a + first * x->step_of_a,
              &lda, &rest, x->out, &ldo);
    }
}

static void ours(const Product *x)
{
    if (x->row_of_b == BY_PANELS)
        tiles->by_panels(x);
    else if (x->step_of_b != 1 && x->step_of_a == 1 && x->whole <= DOTS_MOST)
        tiles->dots(x);
    else
        tiles->panels(x);
}

void multiply(const Product *x)
{
    int layout = x->step_of_a != 1 ? TURNED_A : x->step_of_b != 1 ? TURNED_B : AS_THEY_LIE;
    int by_blas = chosen[layout][class_of(layout == TURNED_A ? x->depth : x->whole)];
    if (x->rows && x->width) {
        if (sgemm && (by_blas || !tiles) && x->row_of_b != BY_PANELS)
            blas(x);
        else
            ours(x);
    }
}

/* product(a, b, out, rows, width, depth, layout, library, repeats): addresses of dense matrices, each of its layout: bits
   TURNED_B, TURNED_A, and 4 where b is panels for our loops. */
PyObject *native_product(PyObject *module, PyObject *args)
{
    unsigned long long a, b, out;
    long long rows, width, depth, layout, library, repeats;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKLLLLLL", &a, &b, &out, &rows, &width, &depth, &layout, &library, &repeats))
        return NULL;
    if (library ? !sgemm : !tiles)
        return PyErr_Format(PyExc_ValueError, "no such library of products here");
    if (rows < 1 || width < 1 || depth < 1 || rows > MOST_ROWS || width > MOST_ROWS || depth > MOST_ROWS)
        return PyErr_Format(PyExc_ValueError, "sizes of a product");
    Product x = {(float *)(uintptr_t)out, NULL, (const float *)(uintptr_t)a, (const float *)(uintptr_t)b, width, 0, depth, 1,
                 width, 1, rows, width, depth, rows};
    if (layout & 4 && !library)
        x.row_of_b = BY_PANELS;
    if (layout & TURNED_B) {
        x.row_of_b = 1;
        x.step_of_b = depth;
    }
    if (layout & TURNED_A) {
        x.row_of_a = 1;
        x.step_of_a = rows;
    }
    Py_BEGIN_ALLOW_THREADS
    int before = products_alone(2);
    for (long long i = 0; i < repeats; i++) {
        if (library)
            blas(&x);
        else
            ours(&x);
    }
    products_as_before(before);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
