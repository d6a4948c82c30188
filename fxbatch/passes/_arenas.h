/* A plan as it is made, for the files that make it. */

#ifndef FXBATCH_ARENAS_H
#define FXBATCH_ARENAS_H

#include "_arrays.h"

typedef struct {
    const int32_t *sig, *output_types;
    const int64_t *order, *first, *inputs, *outputs, *arity, *width, *first_output, *first_slot, *prior, *size;
    const int64_t *member, *first_group, *group_size, *group_type, *known_rows, *used, *before;
    const uint8_t *constant;
    int64_t calls, steps, entries, results, signatures, known, types, values, gathers, blocks, indexed;
    int32_t *value, *begin; /* of each call its first value, its first input */
    int64_t *capacity, *step_signature, *step_rows, *step_offset, *first_gather, *gather_arena, *kind, *start;
    int64_t *gather_rows, *first_block, *block_arena, *block_start, *entry_offsets, *row, *entry, *indices;
} Plan;

/* Blocks anew, in rows whose last reader has run. 1, 0 for a wrong column, -1 without memory. */
int reuse_rows(Plan *p);

#endif
