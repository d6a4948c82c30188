/* Shared by the files of the extension: what a program is, and how one is run. */

#ifndef FXBATCH_NATIVE_H
#define FXBATCH_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST_ROWS ((int64_t)1 << 20) /* programs with more rows run in Python */

/* A piece of memory that instructions name by its number. */
enum { INPUT, OUTPUT, FIXED, OWN, LOCAL };
typedef struct {
    int64_t per_row, rest; /* it has per_row * n + rest rows */
    int64_t row_bytes;
    int64_t kind;
} Base;

typedef struct {
    int64_t base, offset, stride, inner; /* all counted in elements; base -1: a number, its bits in offset */
} Operand;

/* 32 int64 as codegen/native_program.py writes them. */
typedef struct {
    int64_t code, per_row, rest, width;
    Operand out, in[3];
    int64_t number; /* bits of a double */
    int64_t depth_per_row, depth_rest; /* of a product; else the rows or columns that an index chooses from */
    int64_t flag;
    int64_t group; /* pointwise instructions of one number run fused, -1: none */
    int64_t spare[7];
} Instruction;

typedef struct {
    int64_t kind, index, kept, copied, size;
} Source;

typedef struct {
    PyObject_HEAD
    Base *bases;
    Instruction *code;
    Source *sources; /* where the step finds the inputs that are not shared */
    int64_t base_count, length, source_count, inputs, outputs, fixed;
} Program;

/* Memory of one thread that programs write their intermediates to. */
typedef struct {
    PyObject_HEAD
    char *memory;
    size_t size;
} Room;

extern PyTypeObject ProgramType, RoomType;

size_t room_needed(const Program *program, int64_t n);
int room_reserve(Room *room, size_t bytes); /* 0 or -1, without an exception */
int run_program(const Program *program, int64_t n, char **bases, char *own); /* 0, or 1: an index is out of range */
void accumulate(float *out, const float *row, int64_t count);
void choose_loops(void);
void set_products(void *single);
int has_products(void);

static inline size_t aligned(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static inline int64_t rows_of(int64_t per_row, int64_t rest, int64_t n)
{
    return per_row * n + rest;
}

#define POINTWISE 32
enum { PRODUCT = 64, LOOKUP, SUM_ROWS, SUM_LAST, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, PICK, PUT_ADD, TABLE_GRADIENT, END };

/* Bytes an element of (out, a, b, c) of an instruction; 0 where it has no such operand. */
const int8_t *element_bytes(int64_t code);

#endif
