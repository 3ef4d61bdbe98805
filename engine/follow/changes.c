/* The elements of a tensor that changed between two checkpoints. */
#include <stdlib.h>

#include "engine/follow/follow.h"

#define SLICE       (UINT64_C(1) << 22) /* elements compared at a time: blocks of columns reach over many rows */
#define CHANGES_MAX ((size_t)65536)

typedef struct comparison {
    ckd_load *before, *after;
    const view_tensor *old, *tensor; /* in the earlier checkpoint, in the later one */
    follow_ranges ranges;
    uint8_t *old_values, *new_values; /* of a slice */
    uint64_t *positions;
    uint8_t *values; /* of the changes */
    ckd_changes_fn visit;
    void *context;
} comparison;

static ckd_status load_slice(void *to, ckd_load *load, const comparison *c, const ckd_region *slice,
                             uint64_t count, ckd_error *err) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = c->tensor->tensor->name;
    q.region = *slice;
    q.data = to;
    q.size = (size_t)(count * ckd_dtype_size(c->tensor->tensor->dtype));
    return ckd_load_tensor(load, &q, err);
}

static ckd_status compare(comparison *c, const ckd_region *slice, uint64_t count, ckd_error *err) {
    size_t element = ckd_dtype_size(c->tensor->tensor->dtype), found = 0;
    follow_known old = {.now = c->tensor,
                        .before = c->old,
                        .values = c->old_values,
                        .range = {.first = slice->start, .count = count}};
    const known_values known = {follow_known_copy, &old};
    ckd_status status = load_slice(c->old_values, c->before, c, slice, count, err);
    load_set_known(c->after, slice->kind == CKD_REGION_FLAT ? &known : NULL);
    THEN(status, load_slice(c->new_values, c->after, c, slice, count, err));
    load_set_known(c->after, NULL);
    for (uint64_t i = 0; i < count && status == CKD_OK; i++) {
        const uint8_t *value = c->new_values + i * element;
        if (memcmp(c->old_values + i * element, value, element) != 0) {
            c->positions[found] = region_global(c->tensor->shape, slice, i);
            memcpy(c->values + found * element, value, element);
            found++;
        }
        if (found == CHANGES_MAX) {
            status = c->visit(c->context, c->positions, c->values, found, err);
            found = 0;
        }
    }
    return status == CKD_OK && found ? c->visit(c->context, c->positions, c->values, found, err) : status;
}

/* Whether a changed block has elements from `first` up to `end`. */
static bool has_changes(const comparison *c, uint64_t first, uint64_t end) {
    size_t low = 0, high = c->ranges.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const follow_range *r = &c->ranges.items[middle];
        if (r->first + r->count <= first) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < c->ranges.count && c->ranges.items[low].first < end;
}

static ckd_status compare_flat(comparison *c, uint64_t first, uint64_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->ranges.count && status == CKD_OK; i++) {
        follow_range r = c->ranges.items[i];
        uint64_t at = r.first > first ? r.first : first;
        uint64_t end = r.first + r.count < first + count ? r.first + r.count : first + count;
        while (at < end && status == CKD_OK) {
            ckd_region slice = {.kind = CKD_REGION_FLAT, .start = at};
            slice.count = end - at < SLICE ? end - at : SLICE;
            status = compare(c, &slice, slice.count, err);
            at += slice.count;
        }
    }
    return status;
}

/* Cuts a box along dimension `dim`, and along the next ones until a part has at most SLICE elements. */
static ckd_status compare_box(comparison *c, const ckd_region *box, uint32_t dim, ckd_error *err) {
    uint64_t inner = 1;
    for (uint32_t d = dim + 1; d < c->tensor->shape->ndim; d++) {
        inner *= box->lengths[d];
    }
    uint64_t rows = inner < SLICE ? SLICE / inner : 1;
    ckd_region part = *box;
    ckd_status status = CKD_OK;
    for (uint64_t done = 0; done < box->lengths[dim] && status == CKD_OK; done += rows) {
        uint64_t left = box->lengths[dim] - done, count = 1;
        part.offsets[dim] = box->offsets[dim] + done;
        part.lengths[dim] = left < rows ? left : rows;
        for (uint32_t d = 0; d < c->tensor->shape->ndim; d++) {
            count *= part.lengths[d];
        }
        uint64_t first = region_global(c->tensor->shape, &part, 0);
        if (!has_changes(c, first, region_global(c->tensor->shape, &part, count - 1) + 1)) {
            continue;
        }
        status = inner > SLICE ? compare_box(c, &part, dim + 1, err) : compare(c, &part, count, err);
    }
    return status;
}

static ckd_status prepare(comparison *c, ckd_error *err) {
    size_t element = ckd_dtype_size(c->tensor->tensor->dtype);
    uint64_t all = c->tensor->shape->elements, slice = all < SLICE ? all + 1 : SLICE;
    c->old_values = malloc(slice * element);
    c->new_values = malloc(slice * element);
    c->values = malloc(CHANGES_MAX * element);
    c->positions = malloc(CHANGES_MAX * sizeof(*c->positions));
    return c->old_values && c->new_values && c->values && c->positions
               ? CKD_OK
               : err_nomem(err, 2 * slice * element, "a comparison");
}

static ckd_status compare_region(comparison *c, const ckd_region *region, ckd_error *err) {
    const geometry *shape = c->tensor->shape;
    uint64_t count;
    if (!region_count(&count, shape, region)) {
        return err_set(err, CKD_E_INVALID, "the region lies outside its tensor");
    }
    ckd_region r = region_canonical(shape, region);
    if (count == 0 || !c->ranges.count) {
        return CKD_OK;
    }
    if (r.kind == CKD_REGION_BOX) {
        return compare_box(c, &r, 0, err);
    }
    return compare_flat(c, r.kind == CKD_REGION_FLAT ? r.start : 0, count, err);
}

/* Finds the tensor in both checkpoints. Errors: NOT_FOUND, MISMATCH (dtype or shape differ). */
static ckd_status find_tensors(const view_tensor **old, const view_tensor **now, const ckd_load *loads[2],
                               const char *name, ckd_error *err) {
    *old = view_find(loads[0]->view, name);
    *now = view_find(loads[1]->view, name);
    if (!*old || !*now) {
        return err_set(err, CKD_E_NOT_FOUND, "the %s checkpoint has no tensor '%s'", *old ? "newer" : "older",
                       name);
    }
    if (!follow_same_form(*old, *now)) {
        return err_set(err, CKD_E_MISMATCH, "dtype or shape of '%s' differ between the checkpoints", name);
    }
    return CKD_OK;
}

ckd_status ckd_follow_changes(ckd_load *before, ckd_load *after, const ckd_changes_request *request,
                              ckd_error *err) {
    ckd_changes_request q = {0};
    ckd_status status = before && after && request
                            ? COPY_OPTIONS(&q, request, "ckd_changes_request", err)
                            : err_set(err, CKD_E_INVALID, "changes need two loads and a request");
    if (status == CKD_OK && (!q.tensor || !q.visit)) {
        status = err_set(err, CKD_E_INVALID, "changes need a tensor and a function that receives them");
    }
    if (status != CKD_OK) {
        return status;
    }
    comparison c = {.before = before, .after = after, .visit = q.visit, .context = q.context};
    status = find_tensors(&c.old, &c.tensor, (const ckd_load *[2]){before, after}, q.tensor, err);
    THEN(status, follow_ranges_find(&c.ranges, c.tensor, c.old, NULL, err));
    THEN(status, prepare(&c, err));
    THEN(status, compare_region(&c, &q.region, err));
    free(c.old_values);
    free(c.new_values);
    free(c.values);
    free(c.positions);
    free(c.ranges.items);
    return err_in_tensor(err, status, q.tensor);
}
