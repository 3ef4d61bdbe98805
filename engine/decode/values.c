#include "engine/decode/values.h"

#include <stdlib.h>

#include "base/vocabulary.h"
#include "codec/common/wire.h"

ckd_status decoder_init(decoder *d, columns_cache *columns, ckd_error *err) {
    memset(d, 0, sizeof(*d));
    d->columns = columns ? columns : malloc(sizeof(*columns));
    if (!d->columns) {
        return err_nomem(err, sizeof(*columns), "a decoder");
    }
    if (!columns) {
        columns_cache_init(d->columns);
        d->own_columns = true;
    }
    d->kernels = kernels_cpu();
    d->step_limit = MAX_STEPS;
    d->filling = UINT32_MAX;
    return coder_create(&d->coder, err);
}

void decoder_free(decoder *d) {
    coder_free(d->coder);
    bytes_free(&d->stored);
    bytes_free(&d->integers);
    bytes_free(&d->context);
    for (size_t i = 0; i < KEPT_BLOCKS; i++) {
        bytes_free(&d->kept[i].values);
    }
    lattice_work_free(&d->lattice);
    if (d->own_columns) {
        columns_cache_free(d->columns, false);
        free(d->columns);
    }
    memset(d, 0, sizeof(*d));
}

/* Every failure on the way names the block it happened at, unless it names another file: the damage is there. */
static ckd_status at_block(const view_block *b, ckd_status status, ckd_error *err) {
    if (err && status != CKD_OK && !err->file[0]) {
        err_in_file(err, status, file_path(b->chunk->file));
        err->offset = b->record->offset;
        err_in_tensor(err, status, b->record->tensor->name);
    }
    return status;
}

ckd_status values_corrupt(const view_block *b, ckd_error *err, const char *what) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "%s", what);
    return err_in_tensor(err, CKD_E_CORRUPT, b->record->tensor->name);
}

/* However damage of a payload shows, it is reported at its record. */
static ckd_status read_payload_into(decoder *d, const view_block *b, void *to, ckd_error *err) {
    const void *here = payloads_find(d->payloads, b->record);
    if (here) {
        memcpy(to, here, b->record->stored_size);
        return CKD_OK;
    }
    d->bytes_read += b->record->stored_size;
    ckd_status status = chunk_read_payload(b->chunk, b->record, to, err);
    if (status == CKD_E_CORRUPT && err) {
        err->offset = b->record->offset;
    }
    return status;
}

ckd_status values_payload(decoder *d, const view_block *b, const void **payload, ckd_error *err) {
    *payload = payloads_find(d->payloads, b->record);
    if (*payload) {
        return CKD_OK;
    }
    void *stored = bytes_scratch(&d->stored, b->record->stored_size, "decoding scratch", err);
    *payload = stored;
    return stored ? read_payload_into(d, b, stored, err) : CKD_E_NOMEM;
}

/* Those of a record that many blocks name. */
ckd_status shared_bytes(decoder *d, const view_block *b, void *to, ckd_error *err) {
    bool mine = false; /* whoever reads one waits for nothing: there is no circle to fear */
    stored_values *v =
        d->store ? values_store_claim(d->store, &mine, b->record, b->record->raw_size, UINT32_MAX) : NULL;
    ckd_status status = v && !mine ? CKD_OK : blob_bytes(d, b, to, err);
    if (v && mine) {
        memcpy(v->values, to, status == CKD_OK ? b->record->raw_size : 0);
        values_store_filled(d->store, v, status == CKD_OK);
    } else if (v) {
        memcpy(to, v->values, b->record->raw_size);
    }
    if (v && status == CKD_OK) {
        values_store_release(d->store, v);
    }
    return status;
}

/* The payload holds the values. */
static ckd_status decode_standalone(decoder *d, const view *v, const view_block *b, void *to,
                                    ckd_error *err) {
    const record *r = b->record;
    ckd_dtype dtype = r->tensor->dtype;
    if (r->coding == CODING_LATTICE) {
        return values_decode_lattice(d, v, b, false, to, err);
    }
    if (r->coding == CODING_RAW) {
        return r->stored_size == r->raw_size ? read_payload_into(d, b, to, err)
                                             : values_corrupt(b, err, "a raw block of the wrong size");
    }
    const void *payload;
    ckd_status status = values_payload(d, b, &payload, err);
    if (status == CKD_OK) {
        status = coder_decode(d->coder, (coding)r->coding, (unsigned)ckd_dtype_size(dtype), to, r->raw_size,
                              NULL, payload, r->stored_size, err);
    }
    if (status == CKD_OK && r->coding == CODING_SYMBOLS && dtype_is_float(dtype)) {
        d->kernels->unrotate_sign(dtype, to, to, r->count);
    }
    return status;
}

/* `to` holds the parent's or the predicted values and becomes this block's. */
static ckd_status apply_delta(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    ckd_dtype dtype = r->tensor->dtype;
    const void *payload;
    if (r->coding == CODING_LATTICE) {
        return values_decode_lattice(d, v, b, true, to, err);
    }
    ckd_status status = values_payload(d, b, &payload, err);
    void *residual =
        status == CKD_OK ? bytes_scratch(&d->integers, r->raw_size, "decoding scratch", err) : NULL;
    uint8_t *context = residual ? bytes_scratch(&d->context, r->count, "decoding scratch", err) : NULL;
    if (!context) {
        return status != CKD_OK ? status : CKD_E_NOMEM;
    }
    d->kernels->magnitude_context(dtype, context, to, r->count);
    status = coder_decode(d->coder, (coding)r->coding, (unsigned)ckd_dtype_size(dtype), residual, r->raw_size,
                          context, payload, r->stored_size, err);
    if (status == CKD_OK) {
        d->kernels->ordered_apply(dtype, to, to, residual, r->count);
    }
    return status;
}

/* The tensor that a VALUES dependency names, and the view it lies in. */
static ckd_status find_dependency(const view **v, const view_tensor **t, view_cache *cache, const view *own,
                                  const view_block *b, const dependency *on, ckd_error *err) {
    ckd_status status = CKD_OK;
    *v = own;
    if (!id_equal(&on->checkpoint, &own->manifest.checkpoint.id)) {
        status = views_within(v, cache, own, &on->checkpoint, err);
        if (status == CKD_E_NOT_FOUND) {
            char hex[CKD_ID_TEXT];
            ckd_id_text(hex, &on->checkpoint);
            err_corrupt(
                err, file_path(b->chunk->file), b->record->offset,
                "the block builds on checkpoint %s, of which the files that its manifest names hold nothing",
                hex);
            return CKD_E_CORRUPT;
        }
    }
    if (status != CKD_OK) {
        return status;
    }
    const char *name = on->tensor && *on->tensor ? on->tensor : b->record->tensor->name;
    *t = view_find(*v, name);
    return *t ? CKD_OK : values_corrupt(b, err, "the block builds on a tensor that is not in its checkpoint");
}

ckd_status values_source_of(values_source *out, view_cache *cache, const view *own, const view_block *b,
                            uint32_t index, ckd_dtype dtype, ckd_error *err) {
    const record *r = b->record;
    *out = (values_source){.view = NULL};
    if (r->dependency_count <= index || r->dependencies[index].kind != DEPENDS_VALUES) {
        return values_corrupt(b, err, "the block names nothing to build on");
    }
    const dependency *on = &r->dependencies[index];
    ckd_status status = find_dependency(&out->view, &out->tensor, cache, own, b, on, err);
    if (status != CKD_OK) {
        return status;
    }
    const view_tensor *t = out->tensor;
    bool same_shape = t->shape.ndim == r->tensor->ndim &&
                      memcmp(t->shape.shape, r->tensor->shape, t->shape.ndim * sizeof(uint64_t)) == 0;
    span want =
        on->same_span ? (span){r->region, r->first, r->count} : (span){&on->region, on->first, on->count};
    uint64_t elements;
    if ((on->same_span && !same_shape) || (dtype != CKD_DTYPE_NONE && t->tensor->dtype != dtype) ||
        want.count != r->count || !region_count(&elements, &t->shape, want.region) || want.first > elements ||
        want.count > elements - want.first) {
        return values_corrupt(b, err, "the block builds on values of another shape or dtype");
    }
    out->want = want;
    out->content = &on->content;
    return CKD_OK;
}

const view_block *values_source_block(const values_source *s) {
    size_t i, last;
    for (view_shards_for(&i, &last, s->tensor, &s->want); i < last; i++) {
        size_t first, end;
        view_shard_range(&first, &end, &s->tensor->shards[i], &s->tensor->shape, &s->want);
        for (; first < end; first++) {
            const view_block *b = &s->tensor->shards[i].blocks[first];
            span have = {b->record->region, b->record->first, b->record->count};
            if (span_equal(&have, &s->want, s->tensor->shape.ndim)) {
                return hash128_equal(&b->record->content, s->content) ? b : NULL;
            }
        }
    }
    return NULL;
}

/* Values that stand in the checkpoint only for what builds on them. */
static ckd_status find_link(const view_block **out, const view **in, view_cache *cache, const view *own,
                            const view_block *b, const dependency *on, ckd_error *err) {
    const record *r = b->record;
    bool elsewhere = !id_equal(&on->checkpoint, &own->manifest.checkpoint.id);
    *in = own;
    ckd_status status = elsewhere ? views_within(in, cache, own, &on->checkpoint, err) : CKD_OK;
    if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        return status;
    }
    *out = status == CKD_OK && on->same_span ? view_find_link(*in, r, &on->content) : NULL;
    return *out ? CKD_OK : values_corrupt(b, err, "the link that the block builds on is missing");
}

static bool builds_on_link(const record *r, uint32_t index) {
    return index < r->dependency_count && r->dependencies[index].kind == DEPENDS_LINK &&
           r->predictor == PREDICT_PARENT;
}

ckd_status values_parent_block(const view_block **out, const view **in, view_cache *cache, const view *own,
                               const view_block *b, ckd_error *err) {
    const record *r = b->record;
    values_source s;
    if (builds_on_link(r, 0)) {
        return find_link(out, in, cache, own, b, &r->dependencies[0], err);
    }
    ckd_dtype dtype = r->predictor == PREDICT_CAST ? CKD_DTYPE_NONE : r->tensor->dtype;
    ckd_status status = values_source_of(&s, cache, own, b, 0, dtype, err);
    *out = status == CKD_OK ? values_source_block(&s) : NULL;
    *in = s.view;
    return status;
}

ckd_status values_dependency(decoder *d, view_cache *cache, const view *own, const view_block *b,
                             uint32_t index, ckd_dtype dtype, void *to, ckd_error *err) {
    const record *r = b->record;
    if (builds_on_link(r, index)) {
        const view_block *link;
        const view *in;
        ckd_status status = find_link(&link, &in, cache, own, b, &r->dependencies[index], err);
        return status == CKD_OK ? values_of_block(d, cache, in, link, to, err) : status;
    }
    values_source s;
    ckd_status status = values_source_of(&s, cache, own, b, index, dtype, err);
    return status == CKD_OK ? span_values(d, cache, s.view, s.tensor, &s.want, to, s.content, err) : status;
}

static ckd_status cast_dependency(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                                  ckd_error *err) {
    const record *r = b->record;
    const view_tensor *t = NULL;
    const view *other;
    ckd_status status = r->dependency_count
                            ? find_dependency(&other, &t, cache, v, b, &r->dependencies[0], err)
                            : values_corrupt(b, err, "the block names nothing to build on");
    if (status != CKD_OK) {
        return status;
    }
    size_t size = r->count * ckd_dtype_size(t->tensor->dtype);
    void *wide = malloc(size ? size : 1);
    if (!wide) {
        return err_nomem(err, size, "values to be rounded");
    }
    status = values_dependency(d, cache, v, b, 0, CKD_DTYPE_NONE, wide, err);
    if (status == CKD_OK && !d->kernels->cast(r->tensor->dtype, to, t->tensor->dtype, wide, r->count)) {
        status = values_corrupt(b, err, "the block rounds a dtype that cannot be rounded to its own");
    }
    free(wide);
    return status;
}

ckd_status values_known(const view_block *b, ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    if (!coding_known(r->coding) && r->coding != CODING_LATTICE) {
        return err_unsupported(err, file, r->offset,
                               "the block has coding %u, which this version does not know; load "
                               "it with a newer ckptdelta",
                               (unsigned)r->coding);
    }
    if (r->coding == CODING_LATTICE && r->predictor > PREDICT_PARENT) {
        return err_unsupported(err, file, r->offset,
                               "the block has coding %u with predictor %u, which this version does not "
                               "know; load it with a newer ckptdelta",
                               (unsigned)r->coding, (unsigned)r->predictor);
    }
    if (r->predictor > PREDICT_STEP) {
        return err_unsupported(err, file, r->offset,
                               "the block has predictor %u, which this version does not know; "
                               "load it with a newer ckptdelta",
                               (unsigned)r->predictor);
    }
    return CKD_OK;
}

static ckd_status decode_block(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                               ckd_error *err) {
    if (++d->steps > d->step_limit || d->depth >= MAX_DEPTH) {
        return values_corrupt(b, err, "the block's chain is too long or runs in a circle");
    }
    ckd_dtype dtype = b->record->tensor->dtype;
    ckd_status status = values_known(b, err);
    if (status != CKD_OK) {
        return status;
    }
    bool lossy = b->record->coding == CODING_LATTICE && !d->suspicious;
    switch (b->record->predictor) {
    case PREDICT_NONE:
        status = decode_standalone(d, v, b, to, err);
        break;
    case PREDICT_PARENT:
    case PREDICT_STEP:
        d->inside += lossy;
        status = b->record->predictor == PREDICT_STEP ? values_predict(d, cache, v, b, to, err)
                                                      : values_dependency(d, cache, v, b, 0, dtype, to, err);
        d->inside -= lossy;
        if (status == CKD_OK) {
            status = apply_delta(d, v, b, to, err);
        }
        break;
    case PREDICT_COPY:
        status = values_dependency(d, cache, v, b, 0, dtype, to, err);
        break;
    default:
        status = cast_dependency(d, cache, v, b, to, err);
        break;
    }
    if (status != CKD_OK || (lossy && d->inside)) {
        return status; /* the block that wants these values is compared with its own hash, which they decide */
    }
    hash128 content = content_hash(to, b->record->raw_size);
    if (wire_content_matches(&b->record->content, &content)) {
        return CKD_OK;
    }
    if (lossy && b->record->predictor == PREDICT_PARENT) { /* whose fault is it? */
        d->suspicious = true;
        status = decode_block(d, cache, v, b, to, err);
        d->suspicious = false;
        return status;
    }
    return values_corrupt(b, err, "the rebuilt values do not have the content hash they were saved with");
}

/* From the ready copy, if there is one and it is intact. */
static bool ready_values(decoder *d, const view_block *b, void *to) {
    view_block copy = {.record = b->ready, .chunk = b->ready_chunk};
    if (!b->ready || values_known(&copy, NULL) != CKD_OK ||
        decode_standalone(d, NULL, &copy, to, NULL) != CKD_OK) {
        return false;
    }
    hash128 content = content_hash(to, b->record->raw_size);
    return wire_content_matches(&b->record->content, &content);
}

ckd_status values_of_block(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                           ckd_error *err) {
    if (values_kept(d, b, to) || ready_values(d, b, to)) {
        return CKD_OK;
    }
    d->depth++;
    ckd_status status = decode_block(d, cache, v, b, to, err);
    d->depth--;
    return status == CKD_OK ? CKD_OK : at_block(b, status, err);
}

ckd_status block_values(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                        ckd_error *err) {
    d->steps = 0;
    return values_of_block(d, cache, v, b, to, err);
}

/*
 * The block's values from the store, or decoded into it; release them. *out NULL, and CKD_OK: they are to be decoded elsewhere. Others may use
 * them, so that they are compared with their own hash even inside a lossy chain.
 */
static ckd_status values_in_store(stored_values **out, decoder *d, view_cache *cache, const view *v,
                                  const view_block *b, ckd_error *err) {
    bool mine = false;
    *out = values_store_claim(d->store, &mine, b->record, b->record->raw_size, d->filling);
    if (!mine) {
        return CKD_OK;
    }
    uint32_t filling = d->filling, inside = d->inside;
    d->filling = b->record->depth < filling ? b->record->depth : filling;
    d->inside = 0;
    ckd_status status = values_of_block(d, cache, v, b, (*out)->values, err);
    d->filling = filling;
    d->inside = inside;
    values_store_filled(d->store, *out, status == CKD_OK);
    *out = status == CKD_OK ? *out : NULL;
    return status;
}

ckd_status values_of_input(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                           ckd_error *err) {
    bool again = d->plan && load_plan_uses(d->plan, b->ready ? b->ready : b->record) > 1;
    stored_values *stored = NULL;
    ckd_status status = again ? values_in_store(&stored, d, cache, v, b, err) : CKD_OK;
    if (stored) {
        memcpy(to, stored->values, b->record->raw_size);
        values_store_release(d->store, stored);
        return CKD_OK;
    }
    return status == CKD_OK ? values_of_block(d, cache, v, b, to, err) : status;
}

/* Through a buffer. */
static ckd_status place_part(decoder *d, view_cache *cache, const view *v, const view_tensor *t,
                             const view_block *b, const span *want, void *to, uint64_t *copied,
                             ckd_error *err) {
    span have = {b->record->region, b->record->first, b->record->count};
    void *values = malloc(b->record->raw_size + 1);
    if (!values) {
        return err_nomem(err, b->record->raw_size, "a block's values");
    }
    ckd_status status = values_of_block(d, cache, v, b, values, err);
    if (status == CKD_OK) {
        *copied += span_copy(&t->shape, ckd_dtype_size(t->tensor->dtype), to, want, values, &have);
    }
    free(values);
    return status;
}

/* Will the block be asked for again? Without a plan: if only a part is wanted now, or another tensor is known to be made from it. */
static bool wanted_again(const decoder *d, const view *v, const view_tensor *t, const view_block *b,
                         bool all) {
    if (d->plan) {
        return load_plan_uses(d->plan, b->ready ? b->ready : b->record) > 1;
    }
    return d->store && (!all || (v == d->top && d->again[t - v->tensors]));
}

/* One block's share of a span: straight into place if it is all that is wanted, by now and by others. */
static ckd_status place_block(decoder *d, view_cache *cache, const view *v, const view_tensor *t,
                              const view_block *b, const span *want, void *to, uint64_t *copied,
                              ckd_error *err) {
    span have = {b->record->region, b->record->first, b->record->count};
    bool all = span_equal(&have, want, t->shape.ndim);
    uint64_t common = all ? have.count : span_common(&t->shape, want, &have);
    if (common == 0) {
        return CKD_OK;
    }
    stored_values *stored = NULL;
    ckd_status status = wanted_again(d, v, t, b, common == have.count)
                            ? values_in_store(&stored, d, cache, v, b, err)
                            : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    if (stored) {
        *copied += span_copy(&t->shape, ckd_dtype_size(t->tensor->dtype), to, want, stored->values, &have);
        values_store_release(d->store, stored);
        return CKD_OK;
    }
    if (!all) {
        return place_part(d, cache, v, t, b, want, to, copied, err);
    }
    *copied += have.count;
    return values_of_block(d, cache, v, b, to, err);
}

ckd_status block_into_span(decoder *d, view_cache *cache, const view *v, const view_tensor *t,
                           const view_block *b, const span *want, void *to, uint64_t *copied,
                           ckd_error *err) {
    d->steps = 0;
    return place_block(d, cache, v, t, b, want, to, copied, err);
}

ckd_status span_values(decoder *d, view_cache *cache, const view *v, const view_tensor *t, const span *want,
                       void *to, const hash128 *expected, ckd_error *err) {
    uint64_t copied = 0;
    const view_block *exact =
        NULL; /* the one block that is all that is wanted: its hash is checked already */
    size_t s, last;
    for (view_shards_for(&s, &last, t, want); s < last; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &t->shards[s], &t->shape, want);
        for (size_t i = first; i < end; i++) {
            const view_block *b = &t->shards[s].blocks[i];
            ckd_status status = place_block(d, cache, v, t, b, want, to, &copied, err);
            if (status != CKD_OK) {
                return status;
            }
            span have = {b->record->region, b->record->first, b->record->count};
            exact = span_equal(&have, want, t->shape.ndim) ? b : exact;
        }
    }
    if (copied != want->count) {
        return err_in_tensor(err,
                             err_set(err, CKD_E_CORRUPT, "the checkpoint holds %llu of %llu elements wanted",
                                     (unsigned long long)copied, (unsigned long long)want->count),
                             t->tensor->name);
    }
    if (expected && !(exact && hash128_equal(&exact->record->content, expected))) {
        hash128 content = content_hash(to, want->count * ckd_dtype_size(t->tensor->dtype));
        if (!wire_content_matches(expected, &content)) {
            return err_in_tensor(err,
                                 err_set(err, CKD_E_CORRUPT, "the values built on are not those that were"),
                                 t->tensor->name);
        }
    }
    return CKD_OK;
}

ckd_status blob_bytes(decoder *d, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    ckd_status status = values_known(b, err);
    if (status == CKD_OK) {
        status = values_payload(d, b, &payload, err);
    }
    if (status == CKD_OK) {
        status =
            coder_decode(d->coder, (coding)r->coding, 1, to, r->raw_size, NULL, payload, r->stored_size, err);
    }
    hash128 content = status == CKD_OK ? content_hash(to, r->raw_size) : (hash128){0};
    if (status == CKD_OK && !wire_content_matches(&r->content, &content)) {
        status = values_corrupt(b, err, "the bytes do not have the content hash they were saved with");
    }
    return status == CKD_OK ? CKD_OK : at_block(b, status, err);
}
