/* Arithmetic on regions and spans: compares them, intersects them, and copies the elements that they share. */
#include "engine/common/common.h"

#include <string.h>

#include "base/vocabulary.h"
#include "codec/chunk/chunk.h"

bool geometry_init(geometry *g, uint32_t ndim, const uint64_t *shape) {
    memset(g, 0, sizeof(*g));
    if (!shape_elements(&g->elements, ndim, shape)) {
        return false;
    }
    g->ndim = ndim;
    uint64_t stride = 1;
    for (uint32_t d = ndim; d-- > 0;) {
        g->shape[d] = shape[d];
        g->strides[d] = stride;
        stride *= shape[d] ? shape[d] : 1;
    }
    return true;
}

bool region_count(uint64_t *elements, const geometry *g, const ckd_region *region) {
    return region_elements(elements, region, g->ndim, g->shape);
}

ckd_region region_canonical(const geometry *g, const ckd_region *region) {
    ckd_region out = {.kind = region->kind};
    bool whole = true;
    if (region->kind == CKD_REGION_BOX) {
        for (uint32_t d = 0; d < g->ndim; d++) {
            out.offsets[d] = region->offsets[d];
            out.lengths[d] = region->lengths[d];
            whole = whole && region->lengths[d] == g->shape[d];
        }
    } else if (region->kind == CKD_REGION_FLAT) {
        out.start = region->start;
        out.count = region->count;
        whole = region->count == g->elements;
    }
    return whole ? (ckd_region){.kind = CKD_REGION_WHOLE} : out;
}

bool region_equal(const ckd_region *a, const ckd_region *b, uint32_t ndim) {
    if (a == b) {
        return true;
    }
    if (a->kind != b->kind) {
        return false;
    }
    if (a->kind == CKD_REGION_FLAT) {
        return a->start == b->start && a->count == b->count;
    }
    return a->kind == CKD_REGION_WHOLE || (memcmp(a->offsets, b->offsets, ndim * sizeof(uint64_t)) == 0 &&
                                           memcmp(a->lengths, b->lengths, ndim * sizeof(uint64_t)) == 0);
}

/*
 * The runs of a region: `count` runs of `length` elements each, contiguous in global order. In a box, a run covers the
 * innermost dimension that is not complete, and all below it; `outer` dimensions lie above.
 */
typedef struct runs {
    const geometry *g;
    const ckd_region *region;
    uint32_t outer;
    uint64_t count, length;
} runs;

static runs runs_of(const geometry *g, const ckd_region *region) {
    runs r = {g, region, 0, 0, 0};
    uint64_t elements;
    if (!region_count(&elements, g, region) || elements == 0) {
        return r;
    }
    r.count = 1;
    r.length = elements;
    if (region->kind != CKD_REGION_BOX || g->ndim == 0) {
        return r;
    }
    uint32_t inner = g->ndim - 1;
    while (inner > 0 && region->lengths[inner] == g->shape[inner]) {
        inner--;
    }
    r.outer = inner;
    for (uint32_t d = 0; d < inner; d++) {
        r.count *= region->lengths[d];
    }
    r.length = elements / r.count;
    return r;
}

static uint64_t run_start(const runs *r, uint64_t index) {
    const ckd_region *region = r->region;
    if (region->kind != CKD_REGION_BOX) {
        return region->kind == CKD_REGION_FLAT ? region->start : 0;
    }
    if (r->g->ndim == 0) {
        return 0;
    }
    uint64_t global = region->offsets[r->outer] * r->g->strides[r->outer];
    for (uint32_t d = r->outer; d-- > 0;) {
        global += (region->offsets[d] + index % region->lengths[d]) * r->g->strides[d];
        index /= region->lengths[d];
    }
    return global;
}

/* Finds the first run that ends after `global`; r->count if there is none. */
static uint64_t run_seek(const runs *r, uint64_t global) {
    const ckd_region *region = r->region;
    uint64_t prefix = 0, below = r->count, rest = global;
    for (uint32_t d = 0; d < r->outer; d++) {
        uint64_t at = rest / r->g->strides[d];
        rest -= at * r->g->strides[d];
        below /= region->lengths[d];
        if (at < region->offsets[d]) {
            return prefix * region->lengths[d] * below;
        }
        if (at >= region->offsets[d] + region->lengths[d]) {
            return (prefix + 1) * region->lengths[d] * below;
        }
        prefix = prefix * region->lengths[d] + (at - region->offsets[d]);
    }
    if (prefix < r->count && run_start(r, prefix) + r->length <= global) {
        prefix++;
    }
    return prefix;
}

uint64_t region_lower_bound(const geometry *g, const ckd_region *region, uint64_t global) {
    runs r = runs_of(g, region);
    if (r.count == 0) {
        return 0;
    }
    uint64_t index = run_seek(&r, global);
    if (index >= r.count) {
        return r.count * r.length;
    }
    uint64_t start = run_start(&r, index);
    return index * r.length + (global > start ? global - start : 0);
}

uint64_t region_global(const geometry *g, const ckd_region *region, uint64_t local) {
    runs r = runs_of(g, region);
    return r.length == 0 ? 0 : run_start(&r, local / r.length) + local % r.length;
}

int region_compare(const ckd_region *a, const ckd_region *b, const geometry *g) {
    uint64_t first_a = region_global(g, a, 0), first_b = region_global(g, b, 0);
    if (first_a != first_b) {
        return first_a < first_b ? -1 : 1;
    }
    if (a->kind != b->kind) {
        return a->kind < b->kind ? -1 : 1;
    }
    if (a->start != b->start || a->count != b->count) { /* empty ranges have no first element */
        return a->start != b->start ? (a->start < b->start ? -1 : 1) : a->count < b->count ? -1 : 1;
    }
    for (uint32_t d = 0; a->kind == CKD_REGION_BOX && d < g->ndim; d++) {
        if (a->offsets[d] != b->offsets[d]) {
            return a->offsets[d] < b->offsets[d] ? -1 : 1;
        }
        if (a->lengths[d] != b->lengths[d]) {
            return a->lengths[d] < b->lengths[d] ? -1 : 1;
        }
    }
    return 0;
}

/*
 * Walks the runs of a span. `global`, `local` (from the span's first element) and `length` describe the rest of the
 * current run.
 */
typedef struct walk {
    runs r;
    uint64_t first, end; /* the span's limits, in the region's order */
    uint64_t global, local, length;
    uint64_t index;
    bool done;
} walk;

/* Makes run `index`, clipped to the span, the current run. */
static void walk_to(walk *w, uint64_t index) {
    w->index = index;
    uint64_t begin = index * w->r.length, end = begin + w->r.length;
    if (index >= w->r.count || begin >= w->end) {
        w->done = true;
        return;
    }
    uint64_t from = begin < w->first ? w->first : begin;
    uint64_t to = end > w->end ? w->end : end;
    w->global = run_start(&w->r, index) + (from - begin);
    w->local = from - w->first;
    w->length = to - from;
}

static walk walk_begin(const geometry *g, const region_span *s) {
    walk w = {.r = runs_of(g, s->region), .first = s->first, .end = s->first + s->count};
    if (w.r.count == 0 || s->count == 0) {
        w.done = true;
    } else {
        walk_to(&w, s->first / w.r.length);
    }
    return w;
}

/* Skips everything before `global`, which must not lie before the current position. */
static void walk_seek(walk *w, uint64_t global) {
    if (global >= w->global + w->length) {
        uint64_t index = run_seek(&w->r, global);
        walk_to(w, index > w->index ? index : w->index + 1);
    }
    if (!w->done && global > w->global) {
        uint64_t skip = global - w->global;
        w->global += skip;
        w->local += skip;
        w->length -= skip;
    }
}

/* Finds the next stretch that both walks share, and moves both to its start. Returns false at the end. */
static bool walk_meet(walk *a, walk *b, uint64_t *length) {
    while (!a->done && !b->done) {
        if (a->global + a->length <= b->global) {
            walk_seek(a, b->global);
        } else if (b->global + b->length <= a->global) {
            walk_seek(b, a->global);
        } else {
            uint64_t start = a->global > b->global ? a->global : b->global;
            walk_seek(a, start);
            walk_seek(b, start);
            *length = a->length < b->length ? a->length : b->length;
            return true;
        }
    }
    return false;
}

uint64_t span_copy(const geometry *g, size_t element_size, void *to, const region_span *target,
                   const void *from, const region_span *source) {
    walk a = walk_begin(g, target), b = walk_begin(g, source);
    uint64_t copied = 0, length;
    while (walk_meet(&a, &b, &length)) {
        if (to) {
            memcpy((char *)to + a.local * element_size, (const char *)from + b.local * element_size,
                   length * element_size);
        }
        copied += length;
        uint64_t next = a.global + length;
        walk_seek(&a, next);
        walk_seek(&b, next);
    }
    return copied;
}

size_t span_runs(span_run *out, size_t capacity, const geometry *g, const region_span *target,
                 const region_span *source) {
    walk a = walk_begin(g, target), b = walk_begin(g, source);
    size_t count = 0;
    uint64_t length;
    while (walk_meet(&a, &b, &length)) {
        span_run *last = count ? &out[count - 1] : NULL;
        if (last && last->to + last->count == a.local && last->from + last->count == b.local) {
            last->count += length;
        } else if (count == capacity) {
            return capacity + 1;
        } else {
            out[count++] = (span_run){a.local, b.local, length};
        }
        uint64_t next = a.global + length;
        walk_seek(&a, next);
        walk_seek(&b, next);
    }
    return count;
}

/* Boxes of elements overlap if their intervals do in every dimension. */
static bool boxes_overlap(const geometry *g, const ckd_region *a, const ckd_region *b) {
    for (uint32_t d = 0; d < g->ndim; d++) {
        if (a->offsets[d] + a->lengths[d] <= b->offsets[d] ||
            b->offsets[d] + b->lengths[d] <= a->offsets[d] || a->lengths[d] == 0 || b->lengths[d] == 0) {
            return false;
        }
    }
    return true;
}

/* A quick test for the common case. True means that a holds every element of b, which is not empty. */
static bool holds_all(const geometry *g, const region_span *a, const region_span *b) {
    uint64_t elements;
    if (a->region->kind != CKD_REGION_BOX) {
        uint64_t start = (a->region->kind == CKD_REGION_FLAT ? a->region->start : 0) + a->first;
        return region_global(g, b->region, b->first) >= start &&
               region_global(g, b->region, b->first + b->count - 1) - start < a->count;
    }
    if (b->region->kind != CKD_REGION_BOX || !region_count(&elements, g, a->region) || a->count != elements) {
        return false;
    }
    for (uint32_t d = 0; d < g->ndim; d++) {
        if (b->region->offsets[d] < a->region->offsets[d] ||
            b->region->offsets[d] + b->region->lengths[d] > a->region->offsets[d] + a->region->lengths[d]) {
            return false;
        }
    }
    return true;
}

uint64_t span_common(const geometry *g, const region_span *a, const region_span *b) {
    if (a->count && b->count && holds_all(g, a, b)) {
        return b->count;
    }
    if (a->region->kind == CKD_REGION_BOX && b->region->kind == CKD_REGION_BOX &&
        !boxes_overlap(g, a->region, b->region)) {
        return 0;
    }
    return span_copy(g, 0, NULL, a, NULL, b);
}

bool regions_overlap(const geometry *g, const ckd_region *a, const ckd_region *b) {
    region_span whole_a = {a, 0, 0}, whole_b = {b, 0, 0};
    if (!region_count(&whole_a.count, g, a) || !region_count(&whole_b.count, g, b)) {
        return false;
    }
    if (a->kind == CKD_REGION_BOX && b->kind == CKD_REGION_BOX) {
        return boxes_overlap(g, a, b);
    }
    walk wa = walk_begin(g, &whole_a), wb = walk_begin(g, &whole_b);
    uint64_t length;
    return walk_meet(&wa, &wb, &length);
}
