/* Compares two checkpoints tensor by tensor, a block at a time. */
#include <math.h>
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/common/common.h"
#include "engine/decode/decode.h"

typedef struct comparison {
    ckd_load *a, *b;
    const ckd_tensor_list *in_a, *in_b;
    const ckd_tensor_info **names_a, **names_b; /* the same tensors, sorted by name */
    void *values_a, *values_b;                  /* room for one block of the widest dtype */
    ckd_diff_options options;
    uint64_t done, total;
    float_mode callers_mode;
} comparison;

/* Adds sums of squares; compare_values takes the roots. */
static void add_block(ckd_tensor_diff *d, const comparison *c, uint64_t count) {
    size_t size = ckd_dtype_size(d->dtype);
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *a = (const uint8_t *)c->values_a + i * size,
                      *b = (const uint8_t *)c->values_b + i * size;
        d->changed += memcmp(a, b, size) != 0;
        double x = element_to_double(d->dtype, c->values_a, i),
               y = element_to_double(d->dtype, c->values_b, i);
        if (isfinite(x)) {
            d->norm_a += x * x;
        }
        if (isfinite(y)) {
            d->norm_b += y * y;
        }
        if (isfinite(x) && isfinite(y)) {
            double difference = fabs(x - y);
            d->norm_diff += difference * difference;
            d->max_diff = difference > d->max_diff ? difference : d->max_diff;
        }
    }
}

static ckd_status load_piece(ckd_load *load, const ckd_tensor_info *t, uint64_t first, uint64_t count,
                             void *to, ckd_error *err) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.region.kind = CKD_REGION_FLAT;
    q.region.start = first;
    q.region.count = count;
    q.data = to;
    q.size = count * ckd_dtype_size(t->dtype);
    return ckd_load_tensor(load, &q, err);
}

static ckd_status progress(comparison *c, uint64_t done, ckd_error *err) {
    c->done += done;
    if (!c->options.on_progress) {
        return CKD_OK;
    }
    float_mode_leave(c->callers_mode);
    int stop = c->options.on_progress(c->options.progress_context, c->done, c->total);
    c->callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the comparison was cancelled") : CKD_OK;
}

static ckd_status compare_values(ckd_tensor_diff *d, comparison *c, const ckd_tensor_info *t,
                                 ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < t->elements && status == CKD_OK; at += CKD_BLOCK_ELEMENTS) {
        uint64_t count = t->elements - at < CKD_BLOCK_ELEMENTS ? t->elements - at : CKD_BLOCK_ELEMENTS;
        status = load_piece(c->a, t, at, count, c->values_a, err);
        THEN(status, load_piece(c->b, t, at, count, c->values_b, err));
        if (status == CKD_OK) {
            add_block(d, c, count);
            status = progress(c, count * ckd_dtype_size(t->dtype), err);
        }
    }
    d->norm_a = sqrt(d->norm_a);
    d->norm_b = sqrt(d->norm_b);
    d->norm_diff = sqrt(d->norm_diff);
    return status;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const ckd_tensor_info *const *)a)->name, (*(const ckd_tensor_info *const *)b)->name);
}

/* The tensors sorted by name; NULL when out of memory. */
static const ckd_tensor_info **sorted(const ckd_tensor_list *list) {
    const ckd_tensor_info **out = calloc(list->count + 1, sizeof(*out));
    for (size_t i = 0; out && i < list->count; i++) {
        out[i] = &list->items[i];
    }
    if (out) {
        qsort(out, list->count, sizeof(*out), by_name);
    }
    return out;
}

static const ckd_tensor_info *find(const ckd_tensor_info *const *tensors, size_t count, const char *name) {
    ckd_tensor_info key = {.name = name};
    const ckd_tensor_info *sought = &key, *const *found =
                                              bsearch(&sought, tensors, count, sizeof(*tensors), by_name);
    return found ? *found : NULL;
}

static ckd_status compare_tensor(ckd_tensor_diff *d, comparison *c, const ckd_tensor_info *a,
                                 const ckd_tensor_info *b, ckd_error *err) {
    const ckd_tensor_info *t = a ? a : b;
    *d = (ckd_tensor_diff){.name = strdup(t->name), .role = t->role, .dtype = t->dtype, .why = ""};
    if (!d->name) {
        return err_nomem(err, strlen(t->name), "a tensor's name");
    }
    if (!a || !b) {
        d->why = a ? "only in A" : "only in B";
    } else if (a->dtype != b->dtype) {
        d->why = "dtype";
    } else if (a->ndim != b->ndim || memcmp(a->shape, b->shape, a->ndim * sizeof(uint64_t)) != 0) {
        d->why = "shape";
    } else {
        d->comparable = 1;
        d->elements = t->elements;
        return compare_values(d, c, t, err);
    }
    return CKD_OK;
}

static ckd_status compare_all(ckd_diff *diff, comparison *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->in_a->count && status == CKD_OK; i++) {
        const ckd_tensor_info *a = &c->in_a->items[i];
        status =
            compare_tensor(&diff->items[diff->count++], c, a, find(c->names_b, c->in_b->count, a->name), err);
    }
    for (size_t i = 0; i < c->in_b->count && status == CKD_OK; i++) {
        const ckd_tensor_info *b = &c->in_b->items[i];
        if (!find(c->names_a, c->in_a->count, b->name)) {
            status = compare_tensor(&diff->items[diff->count++], c, NULL, b, err);
        }
    }
    return status;
}

static ckd_status run_comparison(ckd_diff *diff, comparison *c, ckd_error *err) {
    c->in_a = ckd_load_tensors(c->a);
    c->in_b = ckd_load_tensors(c->b);
    c->total = ckd_load_checkpoint(c->a)->raw_bytes;
    c->values_a = malloc(CKD_BLOCK_ELEMENTS * sizeof(double));
    c->values_b = malloc(CKD_BLOCK_ELEMENTS * sizeof(double));
    c->names_a = sorted(c->in_a);
    c->names_b = sorted(c->in_b);
    diff->items = calloc(c->in_a->count + c->in_b->count + 1, sizeof(*diff->items));
    ckd_status status = c->values_a && c->values_b && c->names_a && c->names_b && diff->items
                            ? compare_all(diff, c, err)
                            : err_nomem(err, CKD_BLOCK_ELEMENTS * sizeof(double), "a comparison");
    free(c->values_a);
    free(c->values_b);
    free(c->names_a);
    free(c->names_b);
    return status;
}

ckd_status ckd_store_diff(ckd_diff **out, ckd_store *store, const ckd_id *a, const ckd_id *b,
                          const ckd_diff_options *options, ckd_error *err) {
    *out = NULL;
    comparison c = {.options = {0}};
    ckd_status status = COPY_OPTIONS(&c.options, options, "ckd_diff_options", err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_diff *diff = calloc(1, sizeof(*diff));
    if (!diff) {
        return err_nomem(err, sizeof(*diff), "a comparison");
    }
    status = ckd_load_begin(&c.a, store, a, err);
    THEN(status, ckd_load_begin(&c.b, store, b, err));
    if (status == CKD_OK) {
        c.callers_mode = float_mode_enter();
        status = run_comparison(diff, &c, err);
        float_mode_leave(c.callers_mode);
    }
    ckd_load_end(c.a);
    ckd_load_end(c.b);
    if (status != CKD_OK) {
        ckd_diff_free(diff);
        return status;
    }
    *out = diff;
    return CKD_OK;
}

void ckd_diff_free(ckd_diff *diff) {
    if (!diff) {
        return;
    }
    for (size_t i = 0; i < diff->count; i++) {
        free((char *)diff->items[i].name);
    }
    free(diff->items);
    free(diff);
}
