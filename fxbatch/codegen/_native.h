/* Shared by the files of the extension: what a program is, and how one is run. */

#ifndef FXBATCH_NATIVE_H
#define FXBATCH_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST_APART 4

#include "_native_operations.h" /* operations, records and columns, made of native_table.py */

/* Instructions [first, last). Where each keeps to its rows, they run block by block of rows, on several threads. */
typedef struct {
    int64_t first, last;
    int64_t rowwise; /* -1: calls of torch */
    int64_t cost; /* of a row, in additions of two numbers in the cache */
} Segment;

typedef struct {
    PyObject_HEAD
    Base *bases;
    Instruction *code;
    Source *sources; /* where the step finds the inputs that are not shared */
    Segment *segments;
    View *views; /* of calls */
    PyObject *functions; /* a tuple: what they call */
    int64_t view_count, base_count, length, source_count, segment_count, inputs, outputs;
    int64_t apart_count, apart[MOST_APART]; /* instructions that may be done apart */
    int64_t packed_count, packed[MOST_APART]; /* instructions whose weights may be packed */
} Program;

/* Memory of one Python thread that programs write their intermediates to, and how many threads they may run on. */
typedef struct {
    PyObject_HEAD
    char *memory;
    size_t size;
    char **apart; /* what products that are done apart read and write */
    size_t *apart_size;
    int64_t apart_count;
    long shared; /* products that were done for several steps at once, counted a step */
    long packed; /* weights that were packed for a run */
    long threads;
    int busy; /* a program of it is calling torch */
} Room;

/* An input that is put together of rows elsewhere: `size` rows of `row_bytes` for each row of the step. */
enum { COPY_ROWS, REPEAT_ROW, INDEX_ROWS, SUM_BAGS, ZEROS };
typedef struct {
    int64_t base, kind, size, row_bytes;
    const char *from;
    int64_t rows; /* there are at `from` */
    const int64_t *index, *bags;
    int64_t count; /* indices of all bags, bags */
    int64_t bag_count;
    char *to; /* NULL: memory of the program's */
} Fill;

extern PyTypeObject ProgramType, RoomType;

/* _native_blocks.c */
int find_segments(Program *program); /* 0, or -1 without memory */
int find_apart(Program *program); /* likewise */
int room_reserve(Room *room, size_t bytes); /* 0 or -1, without an exception */
char *room_apart(Room *room, int64_t number, size_t bytes); /* of `number` that there are; NULL without memory */
int room_count(Room *room, int64_t count); /* 0 or -1, without an exception */
/* Rows [from, from + count) of the step; 1 where an index is out of range. */
int fill_rows(const Fill *fill, int64_t from, int64_t count, char *to);
/* 0, or 1: an index is out of range, there is no memory, or there is an exception. `fills` are changed. */
int run_program(const Program *program, int64_t n, char **bases, Fill *fills, int64_t fill_count, Room *room);

/* _native_program.c */
#define SPREAD 2048 /* elements of an operand that is spread over a row or a block */
#define SPREAD_BYTES ((size_t)3 * SPREAD * 8)
/* On n rows, of `all` that the step has: a block of them, or all. */
int run_instructions(const Program *program, int64_t first, int64_t last, int64_t n, int64_t all, char **bases, char *spare,
                     int64_t threads);
/* out = a b on all rows of several steps; packed: b as panels, or NULL. */
void product_apart(const Instruction *x, char *out, char *a, char *b, const char *packed, int64_t rows, int64_t threads);
void accumulate(float *out, const float *row, int64_t count);
int choose_loops(const char *level); /* "" for the best; 0, or -1: this processor has none of that name */
const char *chosen_loops(void);

/* _native_calls.c */
const char *call_fault(const Program *program, const Instruction *x);
int call_uses(const Program *program, const Instruction *x, int64_t base, int written); /* reads or writes; or writes */
int run_call(const Program *program, const Instruction *x, int64_t n, char **bases); /* 0, or 1 with an exception */
PyObject *native_set_exchange(PyObject *module, PyObject *capsule);

/* _native_products.c */
/* out[i][j] = start[i][j], if there is a start, + sum of a[i][p] b[p][j]: element (i, p) of a is at i * row_of_a + p *
   step_of_a, element (p, j) of b at p * row_of_b + j * step_of_b. One of the two is 1 in each, the other no less than the
   line is long. Where row_of_b is BY_PANELS, the first of the panels of b is at b. */
typedef struct {
    float *out;
    const float *start; /* out itself, or what is nowhere in it; its lines row_of_start apart, 0: one for all */
    const float *a, *b;
    int64_t row_of_out, row_of_start, row_of_a, step_of_a, row_of_b, step_of_b;
    int64_t rows, width, depth;
    int64_t whole; /* rows of the product that this is a piece of */
} Product;
enum { AS_THEY_LIE, TURNED_B, TURNED_A, PACKED_B, LAYOUTS, ROW_CLASSES = 4 };
#define DOTS_MOST 40 /* rows of a product with turned weights that are dot products: beyond, turning them pays */
void multiply(const Product *product);
void choose_tiles(const char *level);
void set_products(void *single);
PyObject *native_product(PyObject *module, PyObject *args);
/* Weights b [depth, width] as panels: [depth, PANEL] each, on AVX2 four narrower ones. From row to row and from column to
   column of b, one of them 1. */
enum { PANEL = 64, BY_PANELS = -1 };
int can_pack(void);
void pack_weights(float *to, const float *b, int64_t row, int64_t column, int64_t width, int64_t depth);
static inline int64_t panels_width(int64_t width)
{
    return (width + PANEL - 1) / PANEL * PANEL;
}
void clear_floats(float *to, int64_t count);
int has_products(void); /* 1: BLAS, 2: loops of ours, 3: both */
void set_choice(const int8_t *choice);

/* _native_threads.c */
typedef void (*Part)(void *job, int64_t thread, int64_t threads);
void set_threads(void *parallel, void *number, void *count, void *library_threads);
int64_t usable_threads(int64_t threads);
void in_parallel(int64_t threads, Part part, void *job);
int products_alone(int64_t threads);
void products_as_before(int before);

static inline size_t aligned(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static inline int64_t rows_of(int64_t per_row, int64_t rest, int64_t n)
{
    return per_row * n + rest;
}

static inline int rows_fit(int64_t per_row, int64_t rest)
{
    return per_row >= 0 && per_row <= 1024 && rest >= 0 && rest < ((int64_t)1 << 31) && per_row + rest > 0;
}

#define GRAIN 32768 /* additions in the cache that take several times as long as to begin and end on two threads */
static inline int worth_threads(int64_t cost, int64_t threads)
{
    return threads > 1 && cost / GRAIN >= threads / 2;
}

/* The result and what is read: out, a, b, c. */
static inline const Operand *operands_of(const Instruction *x)
{
    return &x->out;
}

/* The width of an operand of a row of an instruction, for n rows. */
static inline int64_t width_of(const Instruction *x, int k, int64_t n)
{
    if (x->code == PRODUCT && k == 1)
        return rows_of(x->depth_per_row, x->depth_rest, n);
    if ((x->code == PICK && k == 1) || (x->code == PUT && k == 0))
        return x->depth_rest;
    return (x->code == SUM_LAST && k == 0) || ((x->code == LOOKUP || x->code == TABLE_GRADIENT) && k == 2) ? 1 : x->width;
}

/* What takes `depth_rest` elements that are `inner` apart, for each of `width` neighbours of a row, to one. */
static inline int reduces(int64_t code)
{
    return code == EXTREME || code == PLACE_OF_EXTREME || code == LOG_SUM_EXP;
}

/* From the first to the last element that operand k, `width` wide, reads or writes of a row. */
static inline int64_t reach(const Instruction *x, int k, int64_t width)
{
    const Operand *o = &operands_of(x)[k];
    return k == 1 && reduces(x->code) ? (x->depth_rest - 1) * o->inner + x->width : (width - 1) * o->inner + 1;
}

/* Bytes an element of (out, a, b, c) of an instruction; 0 where it has no such operand. */
const int8_t *element_bytes(int64_t code);
int64_t element_cost(int64_t code); /* in additions of two numbers in the cache */

#endif
