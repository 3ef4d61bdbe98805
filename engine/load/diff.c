/* Compares two checkpoints block by block, on all threads. */
#include <math.h>
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/common/common.h"
#include "engine/decode/decode.h"
#include "engine/load/diff.h"

#define ROUND_BYTES (UINT64_C(16) << 20) /* bytes of values for each thread between two progress reports */
/* If B was cut in another way than A, its blocks are kept for the next block of A, up to this many bytes. */
#define CACHED_BYTES (UINT64_C(32) << 20)

/* A block of A, and its differences from the values of B. */
typedef struct block_pair {
    const view_tensor *a, *b;
    size_t item; /* of the result */
    diff_sums sums;
} block_pair;

/* One thread's decoder, and room for a block of each checkpoint. */
typedef struct diff_worker {
    decoder decoder;
    bytes first, second;
} diff_worker;

typedef struct comparison {
    ckd_store *store;
    view_cache views;
    const view *a, *b;
    const view_tensor **in_a, **in_b; /* in the order in which they were saved */
    block_pair *pairs;                /* in the order of the tensors and their blocks */
    series_block *blocks;             /* a pair's block of A; `tag` is the pair */
    size_t *series;
    size_t pair_count, pair_capacity;
    diff_worker *workers;
    uint32_t worker_count;
    columns_cache columns;
    values_store cached;
    ckd_diff_options options;
    uint64_t done, total;
    float_mode callers_mode;
} comparison;

/* ---- values ---- */

/* The block that is this span; NULL: the tensor was cut in another way. */
static const view_block *find_block(const view_source *s) {
    const geometry *shape = s->tensor->shape;
    size_t k, last;
    for (view_shards_for(&k, &last, s->tensor, &s->span); k < last; k++) {
        const view_shard *shard = &s->tensor->shards[k];
        size_t first, end;
        for (view_shard_range(&first, &end, shard, shape, &s->span); first < end; first++) {
            const record *r = shard->blocks[first].record;
            const region_span have = {r->region, r->first, r->count};
            if (span_equal(&have, &s->span, shape->ndim)) {
                return &shard->blocks[first];
            }
        }
    }
    return NULL;
}

/* Decodes the values of a span, which in most checkpoints are one block. *values is valid until the next call. */
static ckd_status decode_span(const void **values, decoder *d, const view_source *s, bytes *room,
                              ckd_error *err) {
    const view_block *exact = find_block(s);
    if (exact) {
        return block_series_next(values, d, s->view, exact, err);
    }
    size_t size = s->span.count * ckd_dtype_size(s->tensor->tensor->dtype);
    void *to = bytes_scratch(room, size + 1, "a block's values", err);
    *values = to;
    d->blocks_decoded = 0;
    return to ? span_values(d, s, to, err) : CKD_E_NOMEM;
}

/* The older checkpoint is decoded first: the other one may build on it. */
static ckd_status compare_pair(comparison *c, diff_worker *w, const series_block *s, ckd_error *err) {
    block_pair *p = &c->pairs[s->tag];
    const record *r = s->block->record;
    ckd_dtype dtype = r->tensor->dtype;
    const view_source sources[2] = {{c->a, p->a, {r->region, r->first, r->count}, NULL},
                                    {c->b, p->b, {r->region, r->first, r->count}, NULL}};
    bool b_first = c->b->manifest.checkpoint.step < c->a->manifest.checkpoint.step;
    const void *values, *other;
    ckd_status status = decode_span(&values, &w->decoder, &sources[b_first], &w->second, err);
    void *first =
        status == CKD_OK ? bytes_scratch(&w->first, r->raw_size + 1, "a block's values", err) : NULL;
    if (!first) {
        return status == CKD_OK ? CKD_E_NOMEM : status;
    }
    memcpy(first, values, r->raw_size);
    status = decode_span(&other, &w->decoder, &sources[!b_first], &w->second, err);
    if (status == CKD_OK) {
        diff_values(&p->sums, dtype, b_first ? other : first, b_first ? first : other, r->count);
    }
    return status;
}

static ckd_status compare_series(void *context, size_t index, uint32_t worker, ckd_error *err) {
    comparison *c = context;
    diff_worker *w = &c->workers[worker];
    ckd_status status = CKD_OK;
    block_series_begin(&w->decoder);
    for (size_t i = c->series[index]; i < c->series[index + 1] && status == CKD_OK; i++) {
        status = compare_pair(c, w, &c->blocks[i], err);
        err_in_tensor(err, status, c->blocks[i].block->record->tensor->name);
    }
    block_series_end(&w->decoder);
    return status;
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

/* Compares the next few series, advances `series`, and reports progress. */
static ckd_status compare_some(comparison *c, size_t *left, ckd_error *err) {
    size_t count = 0;
    uint64_t size = 0;
    while (count < *left && size < c->worker_count * ROUND_BYTES) {
        for (size_t i = c->series[count]; i < c->series[count + 1]; i++) {
            size += c->blocks[i].block->record->raw_size;
        }
        count++;
    }
    ckd_status status = pool_run(c->store->pool, count, compare_series, c, err);
    c->series += count;
    *left -= count;
    return status == CKD_OK ? progress(c, size, err) : status;
}

static ckd_status compare_values(comparison *c, ckd_error *err) {
    size_t *series = c->series = calloc(c->pair_count + 2, sizeof(*series));
    ckd_status status = series ? CKD_OK : err_nomem(err, c->pair_count * sizeof(*series), "a comparison");
    size_t left = series ? block_series_sort(c->blocks, series, c->pair_count) : 0;
    while (left > 0 && status == CKD_OK) {
        status = compare_some(c, &left, err);
    }
    free(series);
    return status;
}

/* Adds up in the order of the blocks, so that the sums do not depend on the threads. */
static void sum_up(ckd_diff *diff, const comparison *c) {
    for (size_t i = 0, end; i < c->pair_count; i = end) {
        diff_sums sums = {0};
        for (end = i; end < c->pair_count && c->pairs[end].item == c->pairs[i].item; end++) {
            diff_sums_add(&sums, &c->pairs[end].sums);
        }
        ckd_tensor_diff *d = &diff->items[c->pairs[i].item];
        d->changed = sums.changed;
        d->norm_a = sqrt(sums.squares_a);
        d->norm_b = sqrt(sums.squares_b);
        d->norm_diff = sqrt(sums.squares_diff);
        d->max_diff = sums.max_diff;
    }
}

/* ---- tensors ---- */

/* The view's tensors in the order in which they were saved; NULL when out of memory. */
static const view_tensor **as_saved(const view *v) {
    const view_tensor **out = calloc(v->tensor_count + 1, sizeof(*out));
    for (size_t i = 0; out && i < v->tensor_count; i++) {
        out[v->tensors[i].order] = &v->tensors[i];
    }
    return out;
}

static ckd_status list_pairs(comparison *c, const view_tensor *a, const view_tensor *b, size_t item,
                             ckd_error *err) {
    for (size_t s = 0; s < a->shard_count; s++) {
        const view_shard *shard = &a->shards[s];
        size_t capacity = c->pair_capacity;
        ckd_status status =
            ARRAY_GROW(c->pairs, c->pair_capacity, c->pair_count + shard->block_count, "a comparison", err);
        THEN(status,
             ARRAY_GROW(c->blocks, capacity, c->pair_count + shard->block_count, "a comparison", err));
        if (status != CKD_OK) {
            return status;
        }
        for (size_t k = 0; k < shard->block_count; k++) {
            if (shard->blocks[k].record->count > 0) {
                c->blocks[c->pair_count] = (series_block){.block = &shard->blocks[k], .tag = c->pair_count};
                c->pairs[c->pair_count++] = (block_pair){.a = a, .b = b, .item = item};
            }
        }
    }
    return CKD_OK;
}

static ckd_status compare_tensor(ckd_diff *diff, comparison *c, const view_tensor *a, const view_tensor *b,
                                 ckd_error *err) {
    const record_tensor *t = a ? a->tensor : b->tensor;
    size_t item = diff->count++;
    ckd_tensor_diff *d = &diff->items[item];
    *d = (ckd_tensor_diff){.name = strdup(t->name), .role = t->role, .dtype = t->dtype, .why = ""};
    if (!d->name) {
        return err_nomem(err, strlen(t->name), "a tensor's name");
    }
    if (!a || !b) {
        d->why = a ? "only in A" : "only in B";
    } else if (a->tensor->dtype != b->tensor->dtype) {
        d->why = "dtype";
    } else if (a->shape->ndim != b->shape->ndim ||
               memcmp(a->shape->shape, b->shape->shape, a->shape->ndim * sizeof(uint64_t)) != 0) {
        d->why = "shape";
    } else {
        d->comparable = 1;
        d->elements = a->shape->elements;
        return list_pairs(c, a, b, item, err);
    }
    return CKD_OK;
}

static ckd_status compare_all(ckd_diff *diff, comparison *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->a->tensor_count && status == CKD_OK; i++) {
        const view_tensor *a = c->in_a[i];
        status = compare_tensor(diff, c, a, view_find(c->b, a->tensor->name), err);
    }
    for (size_t i = 0; i < c->b->tensor_count && status == CKD_OK; i++) {
        const view_tensor *b = c->in_b[i];
        if (!view_find(c->a, b->tensor->name)) {
            status = compare_tensor(diff, c, NULL, b, err);
        }
    }
    THEN(status, compare_values(c, err));
    if (status == CKD_OK) {
        sum_up(diff, c);
    }
    return status;
}

/* ---- begin and end ---- */

static ckd_status make_workers(comparison *c, ckd_error *err) {
    uint32_t count = pool_threads(c->store->pool);
    c->workers = calloc(count, sizeof(*c->workers));
    if (!c->workers) {
        return err_nomem(err, count * sizeof(*c->workers), "decoders");
    }
    ckd_status status = CKD_OK;
    for (; c->worker_count < count && status == CKD_OK; c->worker_count++) {
        decoder *d = &c->workers[c->worker_count].decoder;
        status = decoder_init(d, &c->views, &c->columns, err);
        d->shared_values = &c->cached;
    }
    return status;
}

static ckd_status run_comparison(ckd_diff *diff, comparison *c, ckd_error *err) {
    c->total = c->a->manifest.checkpoint.raw_bytes;
    c->in_a = as_saved(c->a);
    c->in_b = as_saved(c->b);
    size_t count = c->a->tensor_count + c->b->tensor_count;
    diff->items = calloc(count + 1, sizeof(*diff->items));
    ckd_status status = c->in_a && c->in_b && diff->items
                            ? make_workers(c, err)
                            : err_nomem(err, count * sizeof(*diff->items), "a comparison");
    THEN(status, compare_all(diff, c, err));
    return status;
}

static void comparison_free(comparison *c) {
    for (uint32_t i = 0; i < c->worker_count; i++) {
        decoder_free(&c->workers[i].decoder);
        bytes_free(&c->workers[i].first);
        bytes_free(&c->workers[i].second);
    }
    free(c->workers);
    free(c->pairs);
    free(c->blocks);
    free((void *)c->in_a);
    free((void *)c->in_b);
    values_store_free(&c->cached);
    columns_cache_free(&c->columns, false);
    views_free(&c->views);
    free(c);
}

/* Opens both checkpoints and compares them. The caller holds the reader lock. */
static ckd_status open_and_compare(ckd_diff *diff, comparison *c, const ckd_id *a, const ckd_id *b,
                                   ckd_error *err) {
    c->views.values_only = true;
    ckd_status status = views_get(&c->a, &c->views, a, err);
    THEN(status, views_get(&c->b, &c->views, b, err));
    c->views.deleted_too = true; /* a compaction may give a checkpoint other ancestors meanwhile */
    if (status == CKD_OK) {
        c->callers_mode = float_mode_enter();
        status = run_comparison(diff, c, err);
        float_mode_leave(c->callers_mode);
    }
    return status;
}

ckd_status ckd_store_diff(ckd_diff **out, ckd_store *store, const ckd_id *a, const ckd_id *b,
                          const ckd_diff_options *options, ckd_error *err) {
    *out = NULL;
    ckd_diff_options o = {0};
    ckd_status status = store && a && b
                            ? COPY_OPTIONS(&o, options, "ckd_diff_options", err)
                            : err_set(err, CKD_E_INVALID, "a comparison needs a store and two checkpoints");
    if (status != CKD_OK) {
        return status;
    }
    ckd_diff *diff = calloc(1, sizeof(*diff));
    comparison *c = calloc(1, sizeof(*c));
    if (!diff || !c) {
        free(diff);
        free(c);
        return err_nomem(err, sizeof(*c), "a comparison");
    }
    c->store = store;
    c->options = o;
    views_init(&c->views, store);
    columns_cache_init(&c->columns);
    values_store_init(&c->cached, CACHED_BYTES);
    file_lock *lock = NULL;
    status = store_lock_reader(&lock, store, err);
    THEN(status, open_and_compare(diff, c, a, b, err));
    comparison_free(c);
    lock_release(lock);
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
