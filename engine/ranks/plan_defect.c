/*
 * Finds where the regions of a save do not tile a tensor, for the error message. It is slower than
 * common/coverage_check.c, and runs only if that has failed.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* qsort_r */
#endif
#include <stdio.h>
#include <stdlib.h>

#include "engine/ranks/internal.h"
#include "engine/common/common.h"

/* ---- regions as boxes ---- */

/* Returns the largest box that consists of the range's first elements. */
static ckd_region first_box(const geometry *g, uint64_t start, uint64_t count) {
    ckd_region box = {.kind = CKD_REGION_BOX};
    uint64_t rest = start;
    uint32_t along = g->ndim - 1;
    for (uint32_t d = 0; d < g->ndim; d++) {
        box.offsets[d] = rest / g->strides[d];
        rest %= g->strides[d];
        box.lengths[d] = 1;
        if (rest == 0 && g->strides[d] <= count) {
            along = d;
            break;
        }
    }
    uint64_t left = g->shape[along] - box.offsets[along], whole = count / g->strides[along];
    box.lengths[along] = whole < left ? whole : left;
    for (uint32_t d = along + 1; d < g->ndim; d++) {
        box.offsets[d] = 0;
        box.lengths[d] = g->shape[d];
    }
    return box;
}

static uint64_t box_count(const ckd_region *box, uint32_t ndim) {
    uint64_t count = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        count *= box->lengths[d];
    }
    return count;
}

size_t flat_boxes(ckd_region boxes[2 * CKD_MAX_DIMS], const geometry *g, uint64_t start, uint64_t count) {
    size_t used = 0;
    if (g->ndim == 0) {
        boxes[0] = (ckd_region){.kind = CKD_REGION_BOX};
        return 1;
    }
    while (count > 0) {
        boxes[used] = first_box(g, start, count);
        uint64_t done = box_count(&boxes[used++], g->ndim);
        start += done;
        count -= done;
    }
    return used;
}

ckd_region region_as_box(const geometry *g, const ckd_region *region) {
    ckd_region r = *region;
    if (r.kind == CKD_REGION_WHOLE) {
        r = (ckd_region){.kind = CKD_REGION_FLAT, .count = g->elements};
    }
    if (r.kind == CKD_REGION_BOX) {
        return region_canonical(g, &r).kind == CKD_REGION_WHOLE
                   ? region_as_box(g, &(ckd_region){.kind = CKD_REGION_WHOLE})
                   : r;
    }
    if (g->ndim == 0) {
        return (ckd_region){.kind = CKD_REGION_BOX};
    }
    ckd_region box = first_box(g, r.start, r.count);
    return box_count(&box, g->ndim) == r.count ? box : r;
}

void region_text(char *text, size_t size, const ckd_region *box, uint32_t ndim) {
    size_t at = (size_t)snprintf(text, size, "[");
    for (uint32_t d = 0; d < ndim && at < size; d++) {
        at += (size_t)snprintf(text + at, size - at, d ? ", %llu:%llu" : "%llu:%llu",
                               (unsigned long long)box->offsets[d],
                               (unsigned long long)(box->offsets[d] + box->lengths[d]));
    }
    if (at < size) {
        snprintf(text + at, size - at, "]");
    }
}

/* ---- the sweep ---- */

typedef struct owned_box {
    ckd_region box;
    size_t region;
} owned_box;

/* The boxes that cross the current slab, by start and by end in the current dimension. */
typedef struct sweep {
    const geometry *g;
    uint32_t d;
    owned_box **by_start, **by_end;
    size_t count;
    plan_defect *found;
} sweep;

static int compare(uint64_t a, uint64_t b) {
    return a < b ? -1 : a > b;
}
static int start_order(const void *a, const void *b, void *dimension) {
    uint32_t d = *(uint32_t *)dimension;
    const owned_box *x = *(owned_box *const *)a, *y = *(owned_box *const *)b;
    int order = compare(x->box.offsets[d], y->box.offsets[d]);
    return order ? order : compare(x->region, y->region);
}
static int end_order(const void *a, const void *b, void *dimension) {
    uint32_t d = *(uint32_t *)dimension;
    const owned_box *x = *(owned_box *const *)a, *y = *(owned_box *const *)b;
    int order = compare(x->box.offsets[d] + x->box.lengths[d], y->box.offsets[d] + y->box.lengths[d]);
    return order ? order : compare(x->region, y->region);
}

static void narrow(sweep *s, uint64_t from, uint64_t to) {
    s->found->box.offsets[s->d] = from;
    s->found->box.lengths[s->d] = to - from;
}

/* The last dimension: intervals. */
static bool find_in_line(sweep *s) {
    uint64_t end = 0;
    for (size_t i = 0; i <= s->count; i++) {
        const owned_box *b = i < s->count ? s->by_start[i] : NULL;
        uint64_t start = b ? b->box.offsets[s->d] : s->g->shape[s->d];
        if (start > end) {
            narrow(s, end, start);
            return true;
        }
        uint64_t stop = b ? start + b->box.lengths[s->d] : start;
        if (b && start < end) {
            narrow(s, start, stop < end ? stop : end);
            s->found->overlap = true;
            s->found->a = s->by_start[i - 1]->region;
            s->found->b = b->region;
            return true;
        }
        end = b ? stop : end;
    }
    return false;
}

/* The dimensions behind the current one. */
static geometry cross_section(const geometry *g, uint32_t d) {
    geometry section;
    geometry_init(&section, g->ndim - d - 1, g->shape + d + 1);
    return section;
}

static ckd_region behind(const ckd_region *box, uint32_t d, uint32_t ndim) {
    ckd_region r = {.kind = CKD_REGION_BOX};
    for (uint32_t i = d + 1; i < ndim; i++) {
        r.offsets[i - d - 1] = box->offsets[i];
        r.lengths[i - d - 1] = box->lengths[i];
    }
    return r;
}

/* Keeps the boxes that cross the slab, for the next dimension. */
static void descend(sweep *s, uint64_t from) {
    size_t kept = 0;
    for (size_t i = 0; i < s->count; i++) {
        owned_box *b = s->by_start[i];
        if (b->box.offsets[s->d] <= from && from < b->box.offsets[s->d] + b->box.lengths[s->d]) {
            s->by_start[kept++] = b;
        }
    }
    s->count = kept;
    s->d++;
}

/* Finds the first slab along the current dimension whose cross-section is not tiled. */
static bool find_slab(sweep *s) {
    geometry section = cross_section(s->g, s->d);
    coverage cover = coverage_begin(&section, s->g->elements);
    uint64_t at = 0;
    for (size_t begun = 0, ended = 0; at < s->g->shape[s->d];) {
        uint64_t next = s->g->shape[s->d];
        for (; begun < s->count && s->by_start[begun]->box.offsets[s->d] == at; begun++) {
            ckd_region r = behind(&s->by_start[begun]->box, s->d, s->g->ndim);
            coverage_add(&cover, &r);
        }
        for (; ended < s->count; ended++) {
            const ckd_region *box = &s->by_end[ended]->box;
            uint64_t end = box->offsets[s->d] + box->lengths[s->d];
            if (end > at) {
                next = end < next ? end : next;
                break;
            }
            ckd_region r = behind(box, s->d, s->g->ndim);
            coverage_remove(&cover, &r);
        }
        if (begun < s->count && s->by_start[begun]->box.offsets[s->d] < next) {
            next = s->by_start[begun]->box.offsets[s->d];
        }
        if (!coverage_complete(&cover)) {
            narrow(s, at, next);
            descend(s, at);
            return true;
        }
        at = next;
    }
    return false;
}

static bool find(sweep *s) {
    for (;;) {
        qsort_r(s->by_start, s->count, sizeof(*s->by_start), start_order, &s->d);
        if (s->d + 1 == s->g->ndim) {
            return find_in_line(s);
        }
        for (size_t i = 0; i < s->count; i++) {
            s->by_end[i] = s->by_start[i];
        }
        qsort_r(s->by_end, s->count, sizeof(*s->by_end), end_order, &s->d);
        if (!find_slab(s)) {
            return false;
        }
    }
}

static size_t boxes_of(ckd_region *boxes, const geometry *g, region_fn region, const void *context,
                       size_t index) {
    ckd_region r;
    region(&r, context, index);
    if (r.kind == CKD_REGION_BOX) {
        boxes[0] = r;
        return 1;
    }
    return r.kind == CKD_REGION_WHOLE ? flat_boxes(boxes, g, 0, g->elements)
                                      : flat_boxes(boxes, g, r.start, r.count);
}

ckd_status plan_find_defect(plan_defect *out, const geometry *g, region_fn region, const void *context,
                            size_t count, ckd_error *err) {
    *out = (plan_defect){.box = {.kind = CKD_REGION_BOX}};
    if (g->ndim == 0) { /* one element */
        out->found = count != 1;
        out->overlap = count > 1;
        out->b = count > 1;
        return CKD_OK;
    }
    ckd_region boxes[2 * CKD_MAX_DIMS];
    size_t total = 0, used = 0;
    for (size_t i = 0; i < count; i++) {
        total += boxes_of(boxes, g, region, context, i);
    }
    owned_box *owned = malloc((total + 1) * sizeof(*owned));
    owned_box **orders = malloc((2 * total + 1) * sizeof(*orders));
    if (owned && orders) {
        for (size_t i = 0; i < count; i++) {
            size_t n = boxes_of(boxes, g, region, context, i);
            for (size_t k = 0; k < n; k++, used++) {
                owned[used] = (owned_box){boxes[k], i};
                orders[used] = &owned[used];
            }
        }
        sweep s = {g, 0, orders, orders + total, total, out};
        out->found = find(&s);
    }
    ckd_status status = owned && orders ? CKD_OK : err_nomem(err, total * sizeof(*owned), "regions");
    free(owned);
    free(orders);
    return status;
}
