/* Decodes the blocks of several checkpoints, series by series (engine/decode/decode.h), on all threads. */
#include "engine/integrity/verify_values.h"

#include <stdlib.h>

#define ROUND_BYTES (UINT64_C(64) << 20) /* of values for each thread, between two reports of progress */

/* ---- buffers ---- */

ckd_status value_checker_init(value_checker *out, ckd_store *store, view_cache *views, ckd_error *err) {
    uint32_t count = pool_threads(store->pool);
    *out = (value_checker){.store = store, .columns = malloc(sizeof(*out->columns))};
    if (!out->columns) {
        return err_nomem(err, sizeof(*out->columns), "decoders");
    }
    columns_cache_init(out->columns);
    out->decoders = calloc(count, sizeof(*out->decoders));
    out->buffers = calloc(count, sizeof(*out->buffers));
    if (!out->decoders || !out->buffers) {
        return err_nomem(err, count * sizeof(*out->decoders), "decoders");
    }
    ckd_status status = CKD_OK;
    for (; out->count < count && status == CKD_OK; out->count++) {
        status = decoder_init(&out->decoders[out->count], views, out->columns, err);
    }
    return status;
}

void value_checker_free(value_checker *c) {
    for (uint32_t i = 0; i < c->count; i++) {
        decoder_free(&c->decoders[i]);
        bytes_free(&c->buffers[i]);
    }
    free(c->decoders);
    free(c->buffers);
    if (c->columns) {
        columns_cache_free(c->columns, false);
    }
    free(c->columns);
    *c = (value_checker){.store = NULL};
}

/* ---- decoding ---- */

typedef struct value_round {
    value_checker *checker;
    value_target *targets;
    const series_block *blocks;
    const size_t *series; /* where each begins in `blocks`, and the end of the last one */
} value_round;

/* Decodes without the values of other blocks. */
static ckd_status decode_alone(value_checker *c, const value_target *t, size_t number, uint32_t worker,
                               ckd_error *err) {
    const view_block *b = t->findings[number].block;
    decoder *d = &c->decoders[worker];
    void *to = bytes_scratch(&c->buffers[worker], b->record->raw_size + 1, "a block's values", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    return number >= t->block_count ? blob_bytes(d, b, to, err) : block_values(d, t->view, b, to, err);
}

static ckd_status check_block(const value_round *round, const series_block *b, uint32_t worker,
                              ckd_error *err) {
    decoder *d = &round->checker->decoders[worker];
    const value_target *t = &round->targets[b->checkpoint];
    value_finding *f = &t->findings[b->tag];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    if (t->shares && b->tag < t->block_count) {
        f->status = block_series_next(NULL, d, t->view, b->block, &why);
    } else {
        block_series_end(d); /* forgets all values */
        f->status = decode_alone(round->checker, t, b->tag, worker, &why);
        block_series_begin(d);
    }
    if (f->status == CKD_OK) {
        return CKD_OK;
    }
    f->why = malloc(sizeof(why));
    if (!f->why) {
        return err_nomem(err, sizeof(why), "the list of damage");
    }
    *f->why = why;
    return CKD_OK;
}

static ckd_status check_series(void *context, size_t index, uint32_t worker, ckd_error *err) {
    const value_round *round = context;
    decoder *d = &round->checker->decoders[worker];
    ckd_status status = CKD_OK;
    block_series_begin(d);
    for (size_t i = round->series[index]; i < round->series[index + 1] && status == CKD_OK; i++) {
        status = check_block(round, &round->blocks[i], worker, err);
    }
    block_series_end(d);
    return status;
}

/* Decodes some series: *done, of so many bytes of values. */
static ckd_status check_some(size_t *done, uint64_t *size, value_round *round, size_t count, ckd_error *err) {
    const value_checker *c = round->checker;
    *done = 0;
    *size = 0;
    while (*done < count && *size < c->count * ROUND_BYTES) {
        for (size_t i = round->series[*done]; i < round->series[*done + 1]; i++) {
            *size += round->blocks[i].block->record->raw_size;
        }
        ++*done;
    }
    return pool_run(c->store->pool, *done, check_series, round, err);
}

static ckd_status check_all_series(value_round round, size_t count, value_progress_fn progress, void *context,
                                   ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t done; count > 0 && status == CKD_OK; count -= done) {
        uint64_t size;
        status = check_some(&done, &size, &round, count, err);
        THEN(status, progress(context, size, err));
        round.series += done;
    }
    return status;
}

static void list_blocks(series_block *to, const value_target *targets, size_t count) {
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < targets[i].count; k++) {
            *to++ = (series_block){.block = targets[i].findings[k].block, .checkpoint = i, .tag = k};
        }
    }
}

ckd_status value_check(value_checker *c, value_target *targets, size_t count, value_progress_fn progress,
                       void *context, ckd_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += targets[i].count;
    }
    series_block *blocks = calloc(total + 1, sizeof(*blocks));
    size_t *series = calloc(total + 2, sizeof(*series));
    ckd_status status =
        blocks && series ? CKD_OK : err_nomem(err, total * sizeof(*blocks), "the blocks of checkpoints");
    if (status == CKD_OK) {
        list_blocks(blocks, targets, count);
        size_t series_count = block_series_sort(blocks, series, total);
        status =
            check_all_series((value_round){c, targets, blocks, series}, series_count, progress, context, err);
    }
    free(blocks);
    free(series);
    return status;
}
