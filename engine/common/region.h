/*
 * Shard geometry: pure arithmetic on regions of a tensor. A region's elements have an order of their own (row-major
 * inside the box, or along the flat range); a span is a part of that order. Every span is a sequence of runs, contiguous
 * in the tensor's global row-major order and ascending in it, so two spans intersect by merging their runs.
 */
#ifndef ENGINE_REGION_H
#define ENGINE_REGION_H

#include <stdbool.h>

#include "include/ckptdelta.h"

/* A tensor's shape and strides (in elements, row-major). */
typedef struct geometry {
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t strides[CKD_MAX_DIMS];
    uint64_t elements;
} geometry;

/* false: more than CKD_MAX_DIMS dimensions or CKD_MAX_ELEMENTS elements. A scalar has one element. */
bool geometry_init(geometry *g, uint32_t ndim, const uint64_t *shape);

/* Elements first ... first + count - 1 of a region's order. The region belongs to the caller. */
typedef struct span {
    const ckd_region *region;
    uint64_t first, count;
} span;

/* Checks the region against the shape and counts its elements. false: outside, or overflow. */
bool region_count(uint64_t *elements, const geometry *g, const ckd_region *region);
/*
 * The one way to write a region: fields that do not apply are zero, a box or range that covers everything is WHOLE. The
 * region must be valid.
 */
ckd_region region_canonical(const geometry *g, const ckd_region *region);
/* Equality of canonical regions. */
bool region_equal(const ckd_region *a, const ckd_region *b, uint32_t ndim);
/* A total order of canonical regions, by their first element first. */
int region_compare(const ckd_region *a, const ckd_region *b, const geometry *g);
/* The position in the region's order of its first element at or behind `global`; the region's count if there is none. */
uint64_t region_lower_bound(const geometry *g, const ckd_region *region, uint64_t global);
/* The global position of element `local` of the region. */
uint64_t region_global(const geometry *g, const ckd_region *region, uint64_t local);
bool regions_overlap(const geometry *g, const ckd_region *a, const ckd_region *b);

static inline bool span_equal(const span *a, const span *b, uint32_t ndim) {
    return a->first == b->first && a->count == b->count && region_equal(a->region, b->region, ndim);
}

/* Elements that both spans hold. */
uint64_t span_common(const geometry *g, const span *a, const span *b);
/*
 * Copies the common elements from `from` (the elements of span `source`, contiguous) into `to` (those of `target`).
 * Returns how many.
 */
uint64_t span_copy(const geometry *g, size_t element_size, void *to, const span *target, const void *from,
                   const span *source);

/* Stretches that two spans have in common, contiguous in both of them. */
typedef struct span_run {
    uint64_t to, from, count; /* elements: of the target, of the source */
} span_run;
/* Fills `out`, ascending. Returns how many there are; more than `room`: room + 1, and those that are there are of no use. */
size_t span_runs(span_run *out, size_t room, const geometry *g, const span *target, const span *source);

#endif
