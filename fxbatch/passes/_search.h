/* The search of a component, for those who cut one. */

#ifndef FXBATCH_SEARCH_H
#define FXBATCH_SEARCH_H

#include "_arrays.h"

typedef struct {
    int64_t calls, signatures, places;
    const int32_t *sig, *place;
    const int64_t *offsets, *readers, *weight, *mark;
    size_t head, size; /* bytes of a state: all but the lists; all */
} Search;

/* Give each call its step; `base` is where the places of each signature begin, `indegree` how many inputs of a call
   are made inside. -> steps, -1 without memory */
int64_t search_all(const Search *p, int64_t width, const int64_t *base, const uint16_t *indegree, int64_t *step);

#endif
