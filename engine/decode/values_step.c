/*
 * Values that are one optimizer step after another checkpoint's: their inputs, and the prediction.
 *
 * A chain of such blocks leads to the moments of every ancestor, and each of those to its own ancestors. Naive decoding
 * would decode the same blocks again and again. So the inputs decoded last stay in decoder.cached during a step. The
 * values of the previous checkpoint are decoded first. So ancestors are decoded from the oldest on, each once, and few
 * cached blocks suffice. Blocks of several checkpoints are decoded in the same way, with the same cache.
 */
#include <stdlib.h>

#include "codec/metadata/metadata.h"
#include "engine/decode/internal.h"

#define MAX_NESTED 16u /* inputs of inputs: each level may hold two arrays of values */

/* ---- cached blocks ---- */

static cached_block *find_cached(decoder *d, const record *r) {
    for (size_t i = 0; i < CACHED_BLOCKS && d->sharing; i++) {
        if (d->cached[i].record == r) {
            d->cached[i].used = ++d->cache_clock;
            return &d->cached[i];
        }
    }
    return NULL;
}

/* The least recently used slot; NULL if all are in use. */
static cached_block *free_slot(decoder *d) {
    cached_block *oldest = NULL;
    for (size_t i = 0; i < CACHED_BLOCKS; i++) {
        cached_block *k = &d->cached[i];
        if (k->pins == 0 && (!oldest || k->used < oldest->used)) {
            oldest = k;
        }
    }
    return oldest;
}

bool values_cached(decoder *d, const view_block *b, void *to) {
    const cached_block *k = find_cached(d, b->record);
    if (k) {
        memcpy(to, k->values.data, b->record->raw_size);
    }
    return k != NULL;
}

void values_cache_begin(decoder *d) {
    d->sharing++;
}

void values_cache_end(decoder *d) {
    if (--d->sharing == 0) {
        for (size_t i = 0; i < CACHED_BLOCKS; i++) { /* the views may be closed before the next step */
            d->cached[i].record = NULL;
            d->cached[i].used = 0;
        }
    }
}

/* ---- the step ---- */

ckd_status values_group(decoder *d, const view *v, const view_block *b, optimizer_group *out,
                        ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    const dependency *last = &r->dependencies[r->dependency_count - 1];
    memset(out, 0, sizeof(*out));
    if (last->kind != DEPENDS_GROUP || !id_equal(&last->checkpoint, &v->manifest.checkpoint.id)) {
        return err_corrupt(err, file, r->offset, "the block names no optimizer of its checkpoint");
    }
    const view_block *g = view_find_shared(v, RECORD_GROUP, &last->content);
    if (!g) {
        return view_lacks(
            v, err_corrupt(err, file, r->offset, "the optimizer that the block names is missing"), err);
    }
    void *raw = malloc(g->record->raw_size + 1);
    if (!raw) {
        return err_nomem(err, g->record->raw_size, "a group record");
    }
    ckd_status status = shared_bytes(d, g, raw, err);
    if (status == CKD_OK) {
        status =
            group_decode(out, raw, g->record->raw_size, file_path(g->chunk->file), g->record->offset, err);
    }
    free(raw);
    return status;
}

/* The values of one dependency: in a cached block, shared with other blocks of the load, or in memory of their own. */
typedef struct input {
    const void *values;
    cached_block *cached;
    stored_values *shared;
    void *own;
} input;

static void release_input(input *in, decoder *d) {
    if (in->cached) {
        in->cached->pins--;
    }
    if (in->shared) {
        values_store_release(d->shared_values, in->shared);
    }
    free(in->own);
    *in = (input){.values = NULL};
}

static void use_cached(input *in, cached_block *k) {
    k->pins++;
    *in = (input){.values = k->values.data, .cached = k};
}

/* Finds the block's values among those that are at hand, or decodes them to be shared. */
static ckd_status find_input(input *in, decoder *d, const view *v, const view_block *b, ckd_error *err) {
    cached_block *k = find_cached(d, b->record);
    if (k) {
        use_cached(in, k);
        return CKD_OK;
    }
    ckd_status status = values_shared(&in->shared, d, v, b, err);
    in->values = in->shared ? in->shared->values : NULL;
    return status;
}

/* Decodes straight into a slot. */
static ckd_status cache_block(input *in, decoder *d, const view *v, const view_block *b, cached_block *slot,
                              ckd_error *err) {
    slot->record = NULL;
    void *to = bytes_scratch(&slot->values, b->record->raw_size + 1, "decoding scratch", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    slot->pins++;
    ckd_status status = values_of_input(d, v, b, to, err);
    slot->pins--;
    if (status == CKD_OK) {
        slot->record = b->record;
        slot->used = ++d->cache_clock;
        use_cached(in, slot);
    }
    return status;
}

static ckd_status read_input(input *in, decoder *d, const view *v, const view_block *b, uint32_t index,
                             ckd_error *err) {
    view_source s;
    ckd_status status = view_source_of(&s, d->views, v, b, index, err);
    THEN(status, view_source_check_dtype(&s, b, CKD_F32, err));
    if (status != CKD_OK) {
        return status;
    }
    const view_block *exact = view_source_block(&s);
    status = exact ? find_input(in, d, s.view, exact, err) : CKD_OK;
    if (status != CKD_OK || in->values) {
        return status;
    }
    cached_block *k = exact ? free_slot(d) : NULL;
    if (k) {
        return cache_block(in, d, s.view, exact, k, err);
    }
    in->values = in->own = malloc(b->record->raw_size + 1);
    return in->own ? span_values(d, &s, in->own, err)
                   : err_nomem(err, b->record->raw_size, "values to predict from");
}

/*
 * Reads x0 from the cache, or decodes it into `to`. It comes first, so that ancestors are decoded from the oldest on.
 */
static ckd_status read_before(input *in, decoder *d, const view *v, const view_block *b, void *to,
                              ckd_error *err) {
    view_source s;
    ckd_status status = view_source_of(&s, d->views, v, b, 0, err);
    THEN(status, view_source_check_dtype(&s, b, CKD_F32, err));
    const view_block *exact = status == CKD_OK ? view_source_block(&s) : NULL;
    status = exact ? find_input(in, d, s.view, exact, err) : status;
    if (status != CKD_OK || in->values) {
        return status;
    }
    in->values = to;
    return span_values(d, &s, to, err);
}

static ckd_status read_inputs(decoder *d, const view *v, const view_block *b, input inputs[3], void *to,
                              ckd_error *err) {
    uint32_t count = b->record->dependency_count - 2; /* without the values before the step and the group */
    ckd_status status = read_before(&inputs[0], d, v, b, to, err);
    if (status == CKD_OK && d->nested >= MAX_NESTED) {
        return err_corrupt(err, file_path(b->chunk->file), b->record->offset,
                           "optimizer steps that predict each other are nested too deep");
    }
    d->nested++;
    for (uint32_t i = 1; i <= count && status == CKD_OK; i++) {
        status = read_input(&inputs[i], d, v, b, i, err);
    }
    d->nested--;
    return status;
}

static ckd_status predict(decoder *d, const view *v, const view_block *b, const optimizer_group *g, void *to,
                          ckd_error *err) {
    input inputs[3] = {{.values = NULL}};
    ckd_status status = read_inputs(d, v, b, inputs, to, err);
    step_rule rule = {.rule = g->rule};
    memcpy(rule.coefficients, g->coefficients, sizeof(rule.coefficients));
    if (status == CKD_OK && !d->kernels->optimizer_step(&rule, to, inputs[0].values, inputs[1].values,
                                                        inputs[2].values, b->record->count)) {
        status = err_unsupported(err, file_path(b->chunk->file), b->record->offset,
                                 "this build cannot compute rule %u", (unsigned)g->rule);
    }
    for (size_t i = 0; i < 3; i++) {
        release_input(&inputs[i], d);
    }
    return status;
}

ckd_status values_predict(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    if (r->tensor->dtype != CKD_F32 || r->dependency_count < 2) {
        return err_corrupt(err, file, r->offset,
                           "the block cannot be an optimizer step: its dtype or its dependencies do not fit");
    }
    optimizer_group g;
    ckd_status status = values_group(d, v, b, &g, err);
    group_inputs inputs = status == CKD_OK ? group_rule_inputs(g.rule) : INPUTS_NONE;
    if (status == CKD_OK &&
        (inputs == INPUTS_GRADIENT || r->dependency_count != group_input_count(inputs) + 2)) {
        status =
            err_corrupt(err, file, r->offset, "the optimizer step needs other values than the block names");
    }
    if (status != CKD_OK) {
        return status;
    }
    uint32_t waiting = d->waiting;
    d->waiting = 0; /* inputs are cached for other blocks, so each is checked against its own hash */
    values_cache_begin(d);
    status = predict(d, v, b, &g, to, err);
    values_cache_end(d);
    d->waiting = waiting;
    return status;
}

/* ---- blocks of several checkpoints, in series: each is decoded after those that it builds on ---- */

void block_series_begin(decoder *d) {
    values_cache_begin(d);
}

void block_series_end(decoder *d) {
    values_cache_end(d);
}

ckd_status block_series_next(const void **values, decoder *d, const view *v, const view_block *b,
                             ckd_error *err) {
    input in = {.values = NULL};
    cached_block *k = find_cached(d, b->record); /* decoded and verified for an earlier block */
    ckd_status status = CKD_OK;
    if (k) {
        use_cached(&in, k);
    } else {
        d->blocks_decoded = 0;
        status = cache_block(&in, d, v, b, free_slot(d), err);
    }
    if (values) {
        *values = in.values;
    }
    release_input(&in, d);
    return status;
}

/* Optimizer steps are predicted from tensors with these prefixes. */
static const struct {
    const char *prefix;
    uint32_t rank;
} moments[] = {{"exp_avg.", 0}, {"exp_avg_sq.", 1}, {"master.", 2}};

static void set_name(series_block *b) {
    b->name = b->block->record->tensor->name;
    b->rank = 3;
    for (size_t i = 0; i < sizeof(moments) / sizeof(*moments); i++) {
        size_t length = strlen(moments[i].prefix);
        if (strncmp(b->name, moments[i].prefix, length) == 0) {
            b->name += length;
            b->rank = moments[i].rank;
            return;
        }
    }
}

static int compare_numbers(uint64_t a, uint64_t b) {
    return (a > b) - (a < b);
}

/* 0: both are of the same series. */
static int by_series(const series_block *a, const series_block *b) {
    const record *x = a->block->record, *y = b->block->record;
    int order = strcmp(a->name, b->name);
    order = order || !x->region || !y->region ? order : memcmp(x->region, y->region, sizeof(*x->region));
    order = order ? order : compare_numbers(x->first, y->first);
    return order ? order : compare_numbers(x->count, y->count);
}

static int by_place(const void *a, const void *b) {
    const series_block *x = a, *y = b;
    int order = by_series(x, y);
    order = order ? order : compare_numbers(x->checkpoint, y->checkpoint);
    order = order ? order : compare_numbers(x->rank, y->rank);
    return order ? order : compare_numbers(x->tag, y->tag);
}

size_t block_series_sort(series_block *blocks, size_t *begins, size_t count) {
    size_t series = 0;
    for (size_t i = 0; i < count; i++) {
        set_name(&blocks[i]);
    }
    qsort(blocks, count, sizeof(*blocks), by_place);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || by_series(&blocks[i - 1], &blocks[i]) != 0) {
            begins[series++] = i;
        }
    }
    begins[series] = count;
    return series;
}
