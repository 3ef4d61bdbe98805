/*
 * Values that are one optimizer step from those of another checkpoint: what they depend on, the prediction, the residual.
 *
 * A chain of such blocks leads to every ancestor's moments, and each of them to its own ancestors: decoded naively, the same blocks
 * again and again. So while one is decoded, the blocks decoded last are kept (decoder.kept): weights before moments and from the oldest
 * on, each is decoded once, and a few are enough.
 */
#include <stdlib.h>

#include "codec/group.h"
#include "engine/values.h"

#define MAX_NESTED 16u /* inputs of inputs: each level holds two arrays of values */

/* ---- blocks kept ---- */

bool values_kept(decoder *d, const view_block *b, void *to) {
    for (size_t i = 0; i < KEPT_BLOCKS && d->sharing; i++) {
        kept_block *k = &d->kept[i];
        if (k->record == b->record) {
            memcpy(to, k->values.data, b->record->raw_size);
            k->used = ++d->kept_clock;
            return true;
        }
    }
    return false;
}

/* Without memory for it, it is decoded again. */
void values_keep(decoder *d, const view_block *b, const void *values) {
    if (!d->sharing || b->record->raw_size == 0) {
        return;
    }
    kept_block *oldest = &d->kept[0];
    for (size_t i = 1; i < KEPT_BLOCKS; i++) {
        oldest = d->kept[i].used < oldest->used ? &d->kept[i] : oldest;
    }
    void *to = bytes_scratch(&oldest->values, b->record->raw_size, "decoding scratch", NULL);
    oldest->record = to ? b->record : NULL;
    oldest->used = to ? ++d->kept_clock : 0;
    if (to) {
        memcpy(to, values, b->record->raw_size);
    }
}

static void stop_sharing(decoder *d) {
    if (--d->sharing == 0) {
        for (size_t i = 0; i < KEPT_BLOCKS; i++) { /* their views may be closed before the next one */
            d->kept[i].record = NULL;
            d->kept[i].used = 0;
        }
    }
}

/* ---- the step ---- */

static ckd_status read_group(decoder *d, const view *v, const view_block *b, group *out, ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    const dependency *on = &r->dependencies[r->dependency_count - 1];
    memset(out, 0, sizeof(*out));
    if (on->kind != DEPENDS_GROUP || !id_equal(&on->checkpoint, &v->manifest.checkpoint.id)) {
        return err_corrupt(err, file, r->offset, "the block names no optimizer of its checkpoint");
    }
    const view_block *g = view_find_group(v, &on->content);
    if (!g) {
        return err_corrupt(err, file, r->offset, "the optimizer that the block names is missing");
    }
    void *raw = malloc(g->record->raw_size + 1);
    if (!raw) {
        return err_nomem(err, g->record->raw_size, "a group record");
    }
    ckd_status status = blob_bytes(d, g, raw, err);
    if (status == CKD_OK) {
        status =
            group_decode(out, raw, g->record->raw_size, file_path(g->chunk->file), g->record->offset, err);
    }
    free(raw);
    return status;
}

static ckd_status read_inputs(decoder *d, view_cache *cache, const view *v, const view_block *b,
                              void *inputs[2], uint32_t count, ckd_error *err) {
    if (d->nested >= MAX_NESTED) {
        return err_corrupt(err, file_path(b->chunk->file), b->record->offset,
                           "optimizer steps are predicted from each other too often");
    }
    d->nested++;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
        inputs[i] = malloc(b->record->raw_size + 1);
        status = inputs[i] ? values_dependency(d, cache, v, b, i + 1, CKD_F32, inputs[i], err)
                           : err_nomem(err, b->record->raw_size, "values to predict from");
    }
    d->nested--;
    return status;
}

ckd_status values_predict(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                          ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    if (r->tensor->dtype != CKD_F32 || r->dependency_count < 2) {
        return err_corrupt(err, file, r->offset,
                           "the block cannot be an optimizer step: its dtype or what it builds on");
    }
    group g;
    ckd_status status = read_group(d, v, b, &g, err);
    if (status != CKD_OK) {
        return status;
    }
    uint32_t count = group_input_count(group_rule_inputs(g.rule));
    if (r->dependency_count != count + 2) {
        return err_corrupt(err, file, r->offset,
                           "the optimizer step needs other values than the block names");
    }
    void *inputs[2] = {NULL, NULL};
    d->sharing++;
    status = values_dependency(d, cache, v, b, 0, CKD_F32, to, err);
    if (status == CKD_OK) {
        status = read_inputs(d, cache, v, b, inputs, count, err);
    }
    stop_sharing(d);
    if (status == CKD_OK) {
        step_rule rule = {.rule = g.rule};
        memcpy(rule.coefficients, g.coefficients, sizeof(rule.coefficients));
        if (!d->kernels->optimizer_step(&rule, to, to, inputs[0], inputs[1], r->count)) {
            status =
                err_unsupported(err, file, r->offset, "this build cannot compute rule %u", (unsigned)g.rule);
        }
    }
    free(inputs[0]);
    free(inputs[1]);
    return status;
}
