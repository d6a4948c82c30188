/* A gradient plan as it is made, for the files that make it. */

#ifndef FXBATCH_GRADIENTS_H
#define FXBATCH_GRADIENTS_H

#include "_arrays.h"

/* A tuple a signature, flat: those of signature s are items[first[s] : first[s + 1]]. */
typedef struct {
    int64_t *first, *items;
} Choices;

/* One phase: its columns, and what it asks for. */
typedef struct {
    Arrays arrays;
    const int32_t *sig, *output_types;
    const int64_t *first_output, *width, *step_signature, *step_rows, *first_gather, *gather_arena, *gather_rows;
    const int64_t *entry_offsets, *entries, *first_block, *block_arena, *block_start, *capacity, *row, *arena_ids;
    int64_t known, values, calls, steps, signatures, arenas;
    Choices groups, outputs;
    uint8_t *hands_on, *passed; /* of each signature; of each step */
    int32_t *made;              /* the values of all blocks, row by row, and where each block begins among them */
    int64_t *block;
    int64_t reads, writes; /* pairs of steps that aren't passed */
    int64_t *kind, *start, *stop, *bag, *write_arena, *write_start, *write_rows, *read_arena, *first_read, *first_write;
} Phase;

typedef struct {
    int64_t phases, requests, types, values, uses, followed, indices, bags;
    Phase *phase;
    int64_t *request_type, *request_rows, *request_start, askings, *asked; /* the values of all requests, flat */
    int64_t *total;          /* rows an arena, without row 0 */
    int32_t *value;          /* of each use */
    int64_t *row;            /* of each use: where its gradient is */
    int64_t *first_use, *row_by_value;
} Gradients;

/* Read the requests, then the phases: 1, 0 for a wrong column, -1 with an exception set. `drop_phase` in any case. */
int take_requests(Gradients *g, PyObject *sequence);
int take_phases(Gradients *g, PyObject *sequence);
void drop_phase(Phase *p);

#endif
