/*
 * Shard geometry: pure arithmetic on regions of a tensor. A region's elements have an order of their own: row-major
 * inside the box, or along the flat range. A span is a contiguous part of that order. Every span is a sequence of runs,
 * each contiguous in the tensor's global row-major order, and ascending in it. So two spans intersect by merging their
 * runs.
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

/*
 * Returns false if there are more than CKD_MAX_DIMS dimensions or CKD_MAX_ELEMENTS elements. A scalar has one element.
 */
bool geometry_init(geometry *g, uint32_t ndim, const uint64_t *shape);

/* Elements first ... first + count - 1 of a region's order. The region belongs to the caller. */
typedef struct span {
    const ckd_region *region;
    uint64_t first, count;
} span;

/* Checks the region against the shape and counts its elements. Returns false if it lies outside, or on overflow. */
bool region_count(uint64_t *elements, const geometry *g, const ckd_region *region);
/*
 * Converts a valid region to its canonical form: unused fields are zero, and a box or range that covers everything is
 * WHOLE.
 */
ckd_region region_canonical(const geometry *g, const ckd_region *region);
/* Equality of canonical regions. */
bool region_equal(const ckd_region *a, const ckd_region *b, uint32_t ndim);
/* A total order of canonical regions; the first element decides first. */
int region_compare(const ckd_region *a, const ckd_region *b, const geometry *g);
/*
 * Finds the position, in the region's order, of its first element at or after `global`; the region's count if there is
 * none.
 */
uint64_t region_lower_bound(const geometry *g, const ckd_region *region, uint64_t global);
/* The global position of element `local` of the region. */
uint64_t region_global(const geometry *g, const ckd_region *region, uint64_t local);
bool regions_overlap(const geometry *g, const ckd_region *a, const ckd_region *b);

static inline bool span_equal(const span *a, const span *b, uint32_t ndim) {
    return a->first == b->first && a->count == b->count && region_equal(a->region, b->region, ndim);
}

/* Counts the elements that both spans hold. */
uint64_t span_common(const geometry *g, const span *a, const span *b);
/*
 * Copies the common elements from `from` (span `source`, contiguous) to `to` (span `target`, contiguous). Returns how
 * many.
 */
uint64_t span_copy(const geometry *g, size_t element_size, void *to, const span *target, const void *from,
                   const span *source);

/* A stretch that two spans share, contiguous in both. */
typedef struct span_run {
    uint64_t to, from, count; /* in elements: offset in the target, offset in the source, length */
} span_run;
/*
 * Fills `out` with the shared runs, ascending. Returns their number, or room + 1 if there are more than `room`; `out`
 * is unusable then.
 */
size_t span_runs(span_run *out, size_t room, const geometry *g, const span *target, const span *source);

#endif
