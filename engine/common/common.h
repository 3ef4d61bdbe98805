/* The interface of engine/common/ for other rooms. README.md has an overview. */
#ifndef ENGINE_COMMON_COMMON_H
#define ENGINE_COMMON_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/file.h"
#include "include/ckptdelta.h"

/*
 * Cancellation. Long work asks regularly whether to continue: between blocks, and within steps that take longer than a
 * block.
 */

#define CANCEL_SHARE \
    20 /* polling may take one part in this many of the elapsed time, as some file systems are slow */

/* Used by one thread at a time. */
typedef struct cancel_check {
    /* Returns CKD_OK, or the error with which the work must end. NULL: the work is never cancelled. */
    ckd_status (*poll)(void *context, ckd_error *err);
    void *context;
    uint64_t every_ns; /* minimum time between polls */
    uint64_t next_ns;
} cancel_check; /* zero-initialise */

/*
 * Returns CKD_OK if the work may continue. Cheap enough to call often: most calls only read the clock. s may be NULL.
 */
static inline ckd_status cancel_poll(cancel_check *s, ckd_error *err) {
    if (!s || !s->poll) {
        return CKD_OK;
    }
    uint64_t begun = clock_monotonic_ns();
    if (begun < s->next_ns) {
        return CKD_OK;
    }
    ckd_status status = s->poll(s->context, err);
    uint64_t now = clock_monotonic_ns(), pause = CANCEL_SHARE * (now - begun);
    s->next_ns = now + (pause > s->every_ns ? pause : s->every_ns);
    return status;
}

/*
 * Shard geometry: pure arithmetic on regions of a tensor. A region's elements have an order of their own: row-major
 * inside the box, or along the flat range. A span is a contiguous part of that order. Every span is a sequence of runs,
 * each contiguous in the tensor's global row-major order, and ascending in it. Two spans intersect by merging their
 * runs.
 */

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
typedef struct region_span {
    const ckd_region *region;
    uint64_t first, count;
} region_span;

/* Checks the region against the shape and counts its elements. Returns false if it lies outside, or on overflow. */
bool region_count(uint64_t *elements, const geometry *g, const ckd_region *region);
/*
 * Converts a valid region to its canonical form: unused fields are zero, and a box or range that covers everything is
 * WHOLE.
 */
ckd_region region_canonical(const geometry *g, const ckd_region *region);
/* Both regions must be canonical. */
bool region_equal(const ckd_region *a, const ckd_region *b, uint32_t ndim);
/* Orders canonical regions, by their first element first. */
int region_compare(const ckd_region *a, const ckd_region *b, const geometry *g);
/*
 * Finds the position, in the region's order, of its first element at or after `global`; the region's count if there is
 * none.
 */
uint64_t region_lower_bound(const geometry *g, const ckd_region *region, uint64_t global);
/* Returns the global position of element `local` of the region. */
uint64_t region_global(const geometry *g, const ckd_region *region, uint64_t local);
bool regions_overlap(const geometry *g, const ckd_region *a, const ckd_region *b);

static inline bool span_equal(const region_span *a, const region_span *b, uint32_t ndim) {
    return a->first == b->first && a->count == b->count && region_equal(a->region, b->region, ndim);
}

/* Counts the elements that both spans hold. */
uint64_t span_common(const geometry *g, const region_span *a, const region_span *b);
/*
 * Copies the common elements from `from` (span `source`, contiguous) to `to` (span `target`, contiguous). Returns how
 * many.
 */
uint64_t span_copy(const geometry *g, size_t element_size, void *to, const region_span *target,
                   const void *from, const region_span *source);

/* A stretch that two spans share, contiguous in both. */
typedef struct span_run {
    uint64_t to, from, count; /* in elements: offset in the target, offset in the source, length */
} span_run;
/*
 * Fills `out` with the shared runs, ascending. Returns their number, or capacity + 1 if there are more than
 * `capacity`; `out` is unusable then.
 */
size_t span_runs(span_run *out, size_t capacity, const geometry *g, const region_span *target,
                 const region_span *source);

/*
 * Checks whether regions tile a tensor, that is, whether every element is in exactly one of them.
 *
 * Takes boxes and flat ranges in any number, order and mixture, in time linear in their number. A region stands for the
 * sum of a weight over its elements. Element (x0, x1, ...) has the weight of the product of P0(x0 + 1) - P0(x0),
 * P1(x1 + 1) - P1(x1), ... in the integers modulo 2^61 - 1, where every Pd(x) is a hash of d, x and a seed. Such sums
 * telescope, so a box or a flat range of any size costs a few multiplications. Regions that tile the tensor always
 * add up to the tensor's weight. Other regions do so only if a nonzero polynomial of degree at most 16 in the Pd(x)
 * happens to vanish there. The probability is 2^-57 (Schwartz, "Fast probabilistic algorithms for verification of
 * polynomial identities", JACM 1980, lemma 1). This assumes that nobody chose the regions to fit the seed.
 */

typedef struct coverage {
    const geometry *g; /* belongs to the caller */
    uint64_t seed;
    /* tails[d]: weight of dimensions d and later, over their whole extent */
    uint64_t tails[CKD_MAX_DIMS + 1];
    uint64_t sum;      /* sum of the regions' weights */
    uint64_t elements; /* elements of all regions, overlaps counted repeatedly */
} coverage;

coverage coverage_begin(const geometry *g, uint64_t seed);
/* Adds a region, which must be valid for the shape (region_count). */
void coverage_add(coverage *t, const ckd_region *region);
/* Removes a region that was added before. At most UINT64_MAX elements in all. */
void coverage_remove(coverage *t, const ckd_region *region);
bool coverage_complete(const coverage *t);

/* A set of 64-bit hashes. */

/* Open addressing; 0 is a free slot. Zero-initialise; free the slots. */
typedef struct hash_set {
    uint64_t *slots;
    size_t count, capacity;
} hash_set;

bool hash_set_has(const hash_set *s, uint64_t hash);
ckd_status hash_set_add(hash_set *s, uint64_t hash, ckd_error *err);

/* Limits the bytes read and written per second, with progress and cancellation. */

/* Reports progress. Returns CANCELLED if the caller wants to stop. */
typedef ckd_status (*rate_report_fn)(void *context, ckd_error *err);
/*
 * Calls `report`, then waits until `byte_count` bytes since begun_ns are within the rate. Calls `report` at least every
 * 0.1 s meanwhile. bytes_per_s 0: no limit.
 */
ckd_status rate_wait(uint64_t bytes_per_s, uint64_t begun_ns, uint64_t byte_count, rate_report_fn report,
                     void *context, ckd_error *err);

typedef struct rate_limiter {
    uint64_t bytes_per_s; /* 0: no limit */
    ckd_progress_fn on_progress;
    void *context;
    const char *cancelled; /* message of the CANCELLED error */
    uint64_t begun_ns, done, total;
} rate_limiter;
/* Counts `bytes` and waits until they are within the rate. Errors: CANCELLED. */
ckd_status rate_limiter_add(rate_limiter *p, uint64_t bytes, ckd_error *err);

/*
 * Derives a tensor's role from its name. Knows the names that optimizers and checkpoint writers give to a parameter's
 * state, as prefix, suffix or path component. docs/cli.md lists them.
 */

typedef enum name_slot {
    SLOT_NONE = 0,       /* by its name, no state of a parameter */
    SLOT_FIRST,          /* first moment, or momentum */
    SLOT_SECOND,         /* second moment */
    SLOT_LARGEST_SECOND, /* running maximum of the second moment (AMSGrad) */
    SLOT_MASTER,         /* the parameter in higher precision */
    SLOT_SMALL           /* a counter or a factor: known, and never lossy */
} name_slot;

#define ROLE_MIN        64u  /* elements; smaller tensors are exact in any fidelity (lossy/tile_steps.c) */
#define NAME_COMPONENTS 512u /* maximum: CKD_NAME_MAX bytes, with a separator between any two */

typedef struct role_name {
    name_slot slot;
    bool sure;   /* the name alone decides the slot; false: only if a weight matches */
    bool marked; /* the name contains an optimizer's word: without a slot, the role is unknown */
    /*
     * The parameter's name starts at a component from `first` to `latest`, and ends before `last`. The number of
     * components to skip depends on all names of the state; `likely` is the best guess. first == last: no parameter
     * name.
     */
    uint32_t first, likely, latest, last;
    bool by_index;  /* the parameter is named by its number in the optimizer's order */
    uint64_t index; /* that number */
    uint32_t count; /* number of components */
    /* start of each component; at[count] is where the next one would start */
    uint16_t at[NAME_COMPONENTS + 1];
} role_name;

/* Parses a name of `size` bytes, at most CKD_NAME_MAX. */
void role_name_read(role_name *out, const char *name, size_t size);
ckd_role role_of_slot(name_slot slot);
/* The parameter's name, *size bytes, if it begins at component `from`. */
const char *role_name_parameter(const role_name *r, const char *name, uint32_t from, size_t *size);
/*
 * Returns the name of the parameter that this tensor belongs to, by its name alone; *family_size bytes. Other tensors
 * keep their own name, which may be a parameter's. NULL: only the parameter's number is known.
 */
const char *role_name_family(const char *name, size_t size, size_t *family_size);

/* Names of runs that branch off other runs: RUN~K. Thread-safe. */

/* Splits RUN~K into RUN and K. Returns false if the name is not a branch's; the run is then its own root, number 1. */
bool branch_root(char root[CKD_RUN_MAX + 1], unsigned *number, const char *run);
/* The inverse; number 1 gives the root itself. Errors: INVALID (too long). */
ckd_status branch_name(char out[CKD_RUN_MAX + 1], const char *root, unsigned number, ckd_error *err);

/*
 * Names the run of lost checkpoints that a repair brings back after their names were taken: RUN.lost, or RUN.lostK for
 * numbers above 1. Errors: INVALID (too long).
 */
ckd_status returned_name(char out[CKD_RUN_MAX + 1], const char *run, unsigned number, ckd_error *err);
/* Tells whether a run has such a name. */
bool is_returned_name(const char *run);

/* Validates a caller's description of a tensor. */

/*
 * Copies a caller's description, of any struct_size, into this version's struct. Errors: INVALID (NULL, or too small).
 */
ckd_status tensor_copy(ckd_tensor *out, const ckd_tensor *from, ckd_error *err);
/* Does the same for an optimizer. Errors: INVALID (too small); *out then has no kind. */
ckd_status optimizer_copy(ckd_optimizer *out, const ckd_optimizer *from, ckd_error *err);
/*
 * Checks name, dtype, shape and region, and counts the region's elements. t comes from tensor_copy, so it is complete.
 * Errors: INVALID, MISMATCH (the region lies outside the shape).
 */
ckd_status tensor_check(uint64_t *elements, const ckd_tensor *t, ckd_error *err);

#endif
