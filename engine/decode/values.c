/*
 * Rebuilds the values of blocks on the host. Loads enter at block_into_span, other rooms also at block_values and
 * span_values. All come to values_of_block, then decode_block, which follows the chain, decodes and checks hashes.
 * values_lattice.c has lossy blocks, values_step.c and values_gradient.c have optimizer steps.
 */
#include "engine/decode/internal.h"

#include <stdlib.h>

#include "base/vocabulary.h"
#include "codec/common/common.h"

/* Decodes a block: one that was asked for, or one that another builds on. */
static ckd_status values_of_block(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);

ckd_status decoder_init(decoder *d, view_cache *views, columns_cache *columns, ckd_error *err) {
    memset(d, 0, sizeof(*d));
    d->views = views;
    d->columns = columns ? columns : malloc(sizeof(*columns));
    if (!d->columns) {
        return err_nomem(err, sizeof(*columns), "a decoder");
    }
    if (!columns) {
        columns_cache_init(d->columns);
        d->own_columns = true;
    }
    d->kernels = kernels_cpu();
    d->block_limit = MAX_CHAIN_BLOCKS;
    return coder_create(&d->coder, err);
}

void decoder_free(decoder *d) {
    coder_free(d->coder);
    bytes_free(&d->stored);
    for (size_t i = 0; i < PAYLOAD_WINDOWS; i++) {
        bytes_free(&d->windows[i].data);
    }
    bytes_free(&d->integers);
    bytes_free(&d->context);
    for (size_t i = 0; i < CACHED_BLOCKS; i++) {
        bytes_free(&d->cached[i].values);
    }
    lattice_work_free(&d->lattice);
    if (d->own_columns) {
        columns_cache_free(d->columns, false);
        free(d->columns);
    }
    memset(d, 0, sizeof(*d));
}

/* Adds the block to an error that names no file yet. An error that names one already says where the damage is. */
static ckd_status at_block(const view_block *b, ckd_status status, ckd_error *err) {
    if (err && status != CKD_OK && !err->file[0]) {
        err_in_file(err, status, file_path(b->chunk->file));
        err->offset = b->record->offset;
        err_in_tensor(err, status, b->record->tensor->name);
    }
    return status;
}

#define SMALL_PAYLOAD (16u << 10) /* larger payloads are read individually */
#define WINDOW_GAP \
    (1u << 10) /* most bytes between two payloads that are read together: the header of the next record */
#define WINDOW_FIRST (4u << 10)  /* bytes of a window; one that continues the last is twice as large, ... */
#define WINDOW_MAX   (64u << 10) /* ... up to this */

/* The window of the file; if there is none, the least recently used one. */
static payload_window *window_of(decoder *d, const file_reader *file) {
    payload_window *oldest = &d->windows[0];
    for (size_t i = 0; i < PAYLOAD_WINDOWS; i++) {
        payload_window *w = &d->windows[i];
        if (w->file == file) {
            oldest = w;
            break;
        }
        oldest = w->used < oldest->used ? w : oldest;
    }
    oldest->used = ++d->window_clock;
    return oldest;
}

/*
 * Finds the payload in the window. A small one that follows the last one is read into it, with what comes after it.
 * Returns false if the caller must read the payload by itself.
 */
static bool window_fetch(payload_window *w, const chunk *c, const record *r) {
    uint64_t at = r->payload_offset, end = at + r->stored_size, size = file_size(c->file);
    bool same_file = w->file == c->file, follows = same_file && at >= w->next && at - w->next <= WINDOW_GAP;
    if (end > size || file_cached(c->file, at, r->stored_size)) {
        return false;
    }
    w->next = end;
    if (same_file && at >= w->at && end <= w->at + w->data.size) {
        return true;
    }
    bool continues = follows && w->data.size && at <= w->at + w->data.size + WINDOW_GAP;
    uint64_t length = continues ? 2 * w->data.size : WINDOW_FIRST;
    length = length < WINDOW_MAX ? length : WINDOW_MAX;
    length = length < r->stored_size ? r->stored_size : length;
    w->file = c->file;
    bytes_clear(&w->data);
    if (!follows) {
        return false;
    }
    size = size - at < length ? size - at : length;
    void *to = bytes_extend(&w->data, size);
    bool good = to && file_read_at(c->file, at, to, size, NULL) == CKD_OK;
    w->at = at;
    if (!good) { /* the unreadable bytes may lie behind the payload */
        bytes_clear(&w->data);
        w->data.failed = false;
    }
    return good;
}

/*
 * Reads a payload. Loads of many small tensors take one read for neighbours. A payload that does not match its
 * checksum is read again by itself: the window may belong to a file that was closed since.
 */
static ckd_status read_payload(decoder *d, const chunk *c, const record *r, void *to, ckd_error *err) {
    payload_window *w = r->stored_size <= SMALL_PAYLOAD ? window_of(d, c->file) : NULL;
    if (w && window_fetch(w, c, r)) {
        memcpy(to, w->data.data + (r->payload_offset - w->at), r->stored_size);
        if (chunk_check_payload(c, r, to, NULL) == CKD_OK) {
            return CKD_OK;
        }
    }
    return chunk_read_payload(c, r, to, err);
}

/* Damage to a payload is reported at its record, however it was noticed. */
static ckd_status read_payload_into(decoder *d, const view_block *b, void *to, ckd_error *err) {
    const void *in_memory = payloads_find(d->payloads, b->record);
    if (in_memory) {
        memcpy(to, in_memory, b->record->stored_size);
        return CKD_OK;
    }
    d->bytes_read += b->record->stored_size;
    ckd_status status = read_payload(d, b->chunk, b->record, to, err);
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

/* For a record that many blocks name. */
ckd_status shared_bytes(decoder *d, const view_block *b, void *to, ckd_error *err) {
    /* A thread that reads such a record waits for no other thread, so there is no deadlock. */
    bool must_fill = false;
    stored_values *v = d->shared_values ? values_store_claim(d->shared_values, &must_fill, b->record,
                                                             VALUES_USES_UNKNOWN, NULL)
                                        : NULL;
    ckd_status status = v && !must_fill ? CKD_OK : blob_bytes(d, b, to, err);
    if (v && must_fill) {
        memcpy(v->values, to, status == CKD_OK ? b->record->raw_size : 0);
        values_store_filled(d->shared_values, v, status == CKD_OK);
    } else if (v) {
        memcpy(to, v->values, b->record->raw_size);
    }
    if (v && status == CKD_OK) {
        values_store_release(d->shared_values, v);
    }
    return status;
}

/* Decodes a block whose payload holds the values. */
static ckd_status decode_standalone(decoder *d, const view *v, const view_block *b, void *to,
                                    ckd_error *err) {
    const record *r = b->record;
    ckd_dtype dtype = r->tensor->dtype;
    if (r->coding == CODING_LATTICE) {
        return values_decode_lattice(d, v, b, false, to, err);
    }
    if (r->coding == CODING_RAW) {
        return r->stored_size == r->raw_size ? read_payload_into(d, b, to, err)
                                             : view_block_corrupt(b, err, "a raw block has the wrong size");
    }
    const void *payload;
    ckd_status status = values_payload(d, b, &payload, err);
    THEN(status, coder_decode(d->coder, (coding)r->coding,
                              &(coder_target){to, r->raw_size, (unsigned)ckd_dtype_size(dtype), NULL},
                              payload, r->stored_size, err));
    if (status == CKD_OK && r->coding == CODING_SYMBOLS && dtype_is_float(dtype)) {
        d->kernels->unrotate_sign(dtype, to, to, r->count);
    }
    return status;
}

/* Copies the elements at `at` into a list, or back. */
CPU_INLINE void move_each(uint8_t *values, uint8_t *list, size_t size, const symbols_changes *c, bool back) {
    for (size_t i = 0; i < c->count; i++) {
        uint8_t *value = values + size * c->at[i], *listed = list + size * i;
        memcpy(back ? value : listed, back ? listed : value, size);
    }
}

static void move_changes(void *values, void *list, const symbols_changes *c, bool back) {
    switch (c->width) { /* constant sizes are single loads and stores */
    case 2:
        move_each(values, list, 2, c, back);
        break;
    case 4:
        move_each(values, list, 4, c, back);
        break;
    default:
        move_each(values, list, c->width, c, back);
    }
}

/* Applies a delta that lists its changes. The time depends on their number, not on the size of the block. */
static ckd_status apply_changes(decoder *d, const record *r, const coded_residual *by, void *to,
                                ckd_error *err) {
    ckd_dtype dtype = r->tensor->dtype;
    size_t size = ckd_dtype_size(dtype);
    symbols_workspace *w = coder_symbols(d->coder);
    symbols_changes c;
    const symbols_stream stream = {(unsigned)size, r->count, by->data, by->size};
    uint8_t *all_contexts = NULL;
    if (symbols_lists_changes(by->data, by->size) == SYMBOLS_CHANGES_BY_CONTEXT) {
        all_contexts = bytes_scratch(&d->context, r->count, "decoding scratch", err);
        if (!all_contexts) {
            return CKD_E_NOMEM;
        }
        d->kernels->magnitude_context(dtype, all_contexts, to, r->count);
    }
    ckd_status status = symbols_find_changes(&c, w, &stream, all_contexts, err);
    void *values =
        status == CKD_OK ? bytes_scratch(&d->integers, c.count * size, "decoding scratch", err) : NULL;
    uint8_t *context = values ? bytes_scratch(&d->context, c.count, "decoding scratch", err) : NULL;
    if (!context) {
        return status != CKD_OK ? status : CKD_E_NOMEM;
    }
    move_changes(to, values, &c, false);
    d->kernels->magnitude_context(dtype, context, values, c.count);
    status = symbols_read_changes(&c, w, context, err);
    if (status == CKD_OK) {
        d->kernels->ordered_apply(dtype, values, values, c.values, c.count);
        move_changes(to, values, &c, true);
    }
    return status;
}

ckd_status values_apply(decoder *d, const record *r, const coded_residual *by, void *to, ckd_error *err) {
    ckd_dtype dtype = r->tensor->dtype;
    if (by->coding == CODING_SYMBOLS && symbols_lists_changes(by->data, by->size) != SYMBOLS_ALL_INTEGERS) {
        return apply_changes(d, r, by, to, err);
    }
    void *residual = bytes_scratch(&d->integers, r->raw_size, "decoding scratch", err);
    uint8_t *context = residual ? bytes_scratch(&d->context, r->count, "decoding scratch", err) : NULL;
    if (!context) {
        return CKD_E_NOMEM;
    }
    d->kernels->magnitude_context(dtype, context, to, r->count);
    ckd_status status =
        coder_decode(d->coder, by->coding,
                     &(coder_target){residual, r->raw_size, (unsigned)ckd_dtype_size(dtype), context},
                     by->data, by->size, err);
    if (status == CKD_OK) {
        d->kernels->ordered_apply(dtype, to, to, residual, r->count);
    }
    return status;
}

/* Turns the parent's or the predicted values in `to` into this block's. */
static ckd_status apply_delta(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    if (r->coding == CODING_LATTICE) {
        return values_decode_lattice(d, v, b, true, to, err);
    }
    ckd_status status = values_payload(d, b, &payload, err);
    const coded_residual by = {(coding)r->coding, payload, (size_t)r->stored_size};
    return status == CKD_OK ? values_apply(d, r, &by, to, err) : status;
}

ckd_status values_dependency(decoder *d, const view *own, const view_block *b, void *to, ckd_error *err) {
    if (view_builds_on_link(b->record)) {
        const view_block *link;
        const view *owner;
        ckd_status status = view_parent_block(&link, &owner, d->views, own, b, err);
        return status == CKD_OK ? values_of_block(d, owner, link, to, err) : status;
    }
    view_source s;
    ckd_status status = view_source_of(&s, d->views, own, b, 0, err);
    THEN(status, view_source_check_dtype(&s, b, b->record->tensor->dtype, err));
    return status == CKD_OK ? span_values(d, &s, to, err) : status;
}

static ckd_status cast_dependency(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    view_source s;
    ckd_status status = view_source_of(&s, d->views, v, b, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_dtype from = s.tensor->tensor->dtype;
    size_t size = r->count * ckd_dtype_size(from);
    void *wide = malloc(size ? size : 1);
    if (!wide) {
        return err_nomem(err, size, "values to be rounded");
    }
    status = span_values(d, &s, wide, err);
    if (status == CKD_OK && !d->kernels->cast(r->tensor->dtype, to, from, wide, r->count)) {
        status = view_block_corrupt(
            b, err, "the block is to be rounded from a dtype that cannot be rounded to its own");
    }
    free(wide);
    return status;
}

ckd_status values_check_supported(const view_block *b, ckd_error *err) {
    const record *r = b->record;
    const char *file = file_path(b->chunk->file);
    if (!coding_is_array(r->coding) && r->coding != CODING_LATTICE && r->coding != CODING_GRADIENT) {
        return err_unsupported(err, file, r->offset,
                               "the block has coding %u, which this version does not know; load "
                               "it with a newer ckptdelta",
                               (unsigned)r->coding);
    }
    if ((r->coding == CODING_LATTICE && r->predictor > PREDICT_PARENT) ||
        (r->coding == CODING_GRADIENT && r->predictor != PREDICT_STEP)) {
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

static ckd_status rebuild(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    ckd_status status;
    switch (b->record->predictor) {
    case PREDICT_NONE:
        return decode_standalone(d, v, b, to, err);
    case PREDICT_PARENT:
        status = values_dependency(d, v, b, to, err);
        return status == CKD_OK ? apply_delta(d, v, b, to, err) : status;
    case PREDICT_STEP:
        if (b->record->coding == CODING_GRADIENT) {
            return values_by_gradient(d, v, b, to, err);
        }
        status = values_predict(d, v, b, to, err);
        return status == CKD_OK ? apply_delta(d, v, b, to, err) : status;
    case PREDICT_COPY:
        return values_dependency(d, v, b, to, err);
    default:
        return cast_dependency(d, v, b, to, err);
    }
}

static ckd_status decode_block(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    if (++d->blocks_decoded > d->block_limit || d->depth >= MAX_DEPTH) {
        return view_block_corrupt(b, err, "the block's chain of deltas is too long or contains a cycle");
    }
    ckd_status status = values_check_supported(b, err);
    if (status != CKD_OK) {
        return status;
    }
    const record *r = b->record;
    const uint32_t decoded = d->blocks_decoded;
    bool waits = !d->verify_chain && (r->predictor == PREDICT_PARENT || r->predictor == PREDICT_COPY);
    d->waiting += waits;
    status = rebuild(d, v, b, to, err);
    d->waiting -= waits;
    if (d->waiting) {
        return status; /* the block that needs these values compares its own hash, which covers these, too */
    }
    hash128 content = status == CKD_OK ? content_hash(to, r->raw_size) : (hash128){0};
    if (status == CKD_OK && wire_content_matches(&r->content, &content)) {
        return CKD_OK;
    }
    if (waits && (status == CKD_OK || status == CKD_E_CORRUPT)) { /* find the damaged block of the chain */
        d->verify_chain = true;
        d->blocks_decoded = decoded;
        status = decode_block(d, v, b, to, err);
        d->verify_chain = false;
        return status;
    }
    return status != CKD_OK
               ? status
               : view_block_corrupt(b, err,
                                    "the rebuilt values do not have the content hash they were saved with");
}

/* Uses the caller's values, if they are those of the block. */
static bool known_to_caller(const decoder *d, const view_block *b, void *to) {
    if (!d->known || !d->known->copy(d->known->context, to, b->record)) {
        return false;
    }
    hash128 content = content_hash(to, b->record->raw_size);
    return wire_content_matches(&b->record->content, &content);
}

/* Uses the materialized copy, if there is one and it is intact. */
static bool materialized_values(decoder *d, const view *v, const view_block *b, void *to) {
    view_block copy = {.record = b->materialized, .chunk = b->materialized_chunk};
    if (!copy_counts(d->views, v, b, &d->stored) || values_check_supported(&copy, NULL) != CKD_OK ||
        decode_standalone(d, NULL, &copy, to, NULL) != CKD_OK) {
        return false;
    }
    hash128 content = content_hash(to, b->record->raw_size);
    return wire_content_matches(&b->record->content, &content);
}

static ckd_status values_of_block(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    if (values_cached(d, b, to) || known_to_caller(d, b, to) || materialized_values(d, v, b, to)) {
        return CKD_OK;
    }
    d->depth++;
    ckd_status status = decode_block(d, v, b, to, err);
    d->depth--;
    return status == CKD_OK ? CKD_OK : at_block(b, status, err);
}

ckd_status block_values(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    d->blocks_decoded = 0;
    return values_of_block(d, v, b, to, err);
}

/* How often the planned load takes the block from its values_store; VALUES_USES_UNKNOWN: it has no plan. */
static uint32_t planned_uses(const decoder *d, const view_block *b) {
    return d->plan ? load_plan_uses(d->plan, b->materialized ? b->materialized : b->record)
                   : VALUES_USES_UNKNOWN;
}

/*
 * Gets the block's values from the decoder's values_store, or decodes them into it; the caller releases them. *out NULL
 * with CKD_OK: decode elsewhere. Other threads may use the values, so they are checked against their own hash even
 * inside a chain.
 */
static ckd_status claim_shared_values(stored_values **out, decoder *d, const view *v, const view_block *b,
                                      ckd_error *err) {
    bool must_fill = false;
    *out = values_store_claim(d->shared_values, &must_fill, b->record, planned_uses(d, b), d->filling);
    if (!must_fill) {
        return CKD_OK;
    }
    const record *filling = d->filling;
    uint32_t waiting = d->waiting;
    d->filling = !filling || values_store_before(b->record, filling) ? b->record : filling;
    d->waiting = 0;
    ckd_status status = values_of_block(d, v, b, (*out)->values, err);
    d->filling = filling;
    d->waiting = waiting;
    values_store_filled(d->shared_values, *out, status == CKD_OK);
    *out = status == CKD_OK ? *out : NULL;
    return status;
}

ckd_status values_shared(stored_values **out, decoder *d, const view *v, const view_block *b,
                         ckd_error *err) {
    *out = NULL;
    return d->plan && planned_uses(d, b) > 1 ? claim_shared_values(out, d, v, b, err) : CKD_OK;
}

ckd_status values_of_input(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    stored_values *stored;
    ckd_status status = values_shared(&stored, d, v, b, err);
    if (stored) {
        memcpy(to, stored->values, b->record->raw_size);
        values_store_release(d->shared_values, stored);
        return CKD_OK;
    }
    return status == CKD_OK ? values_of_block(d, v, b, to, err) : status;
}

/* Decodes into a buffer, then copies the wanted part. */
static ckd_status scatter_part(decoder *d, const view *v, const view_block *b, const span_target *target,
                               uint64_t *copied, ckd_error *err) {
    void *values = malloc(b->record->raw_size + 1);
    if (!values) {
        return err_nomem(err, b->record->raw_size, "a block's values");
    }
    ckd_status status = values_of_block(d, v, b, values, err);
    if (status == CKD_OK) {
        *copied += span_target_copy(target, b, values);
    }
    free(values);
    return status;
}

/*
 * Whether the block will be needed again. Without a plan: if only a part is needed now, or if another tensor is known
 * to be built from it.
 */
static bool needed_again(const decoder *d, const view *v, const view_tensor *t, const view_block *b,
                         bool all) {
    if (d->plan) {
        return planned_uses(d, b) > 1;
    }
    return d->shared_values && (!all || (v == d->top && d->has_derived[t - v->tensors]));
}

/*
 * Places one block's part of a span. Decodes straight into place if the block fills the span and nobody needs it later.
 */
static ckd_status scatter_block(decoder *d, const view *v, const view_block *b, const span_target *target,
                                uint64_t *copied, ckd_error *err) {
    const geometry *shape = target->tensor->shape;
    region_span have = {b->record->region, b->record->first, b->record->count};
    bool all = span_equal(&have, target->span, shape->ndim);
    uint64_t common = all ? have.count : span_common(shape, target->span, &have);
    if (common == 0) {
        return CKD_OK;
    }
    stored_values *stored = NULL;
    ckd_status status = needed_again(d, v, target->tensor, b, common == have.count)
                            ? claim_shared_values(&stored, d, v, b, err)
                            : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    if (stored) {
        *copied += span_target_copy(target, b, stored->values);
        values_store_release(d->shared_values, stored);
        return CKD_OK;
    }
    if (!all) {
        return scatter_part(d, v, b, target, copied, err);
    }
    *copied += have.count;
    return values_of_block(d, v, b, target->to, err);
}

ckd_status block_into_span(decoder *d, const view *v, const view_block *b, const span_target *target,
                           uint64_t *copied, ckd_error *err) {
    d->blocks_decoded = 0;
    return scatter_block(d, v, b, target, copied, err);
}

ckd_status span_values(decoder *d, const view_source *from, void *to, ckd_error *err) {
    const view_tensor *t = from->tensor;
    const region_span *span = &from->span;
    const span_target target = {t, span, to};
    uint64_t copied = 0;
    const view_block *exact = NULL; /* the one block that equals the span: its hash was checked already */
    size_t s, last;
    for (view_shards_for(&s, &last, t, span); s < last; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &t->shards[s], t->shape, span);
        for (size_t i = first; i < end; i++) {
            const view_block *b = &t->shards[s].blocks[i];
            ckd_status status = scatter_block(d, from->view, b, &target, &copied, err);
            if (status != CKD_OK) {
                return status;
            }
            region_span have = {b->record->region, b->record->first, b->record->count};
            exact = span_equal(&have, span, t->shape->ndim) ? b : exact;
        }
    }
    if (copied != span->count) {
        ckd_status lacks =
            err_set(err, CKD_E_CORRUPT, "the checkpoint holds only %llu of the %llu requested elements",
                    (unsigned long long)copied, (unsigned long long)span->count);
        return err_in_tensor(err, view_lacks(from->view, lacks, err), t->tensor->name);
    }
    if (from->content && !(exact && hash128_equal(&exact->record->content, from->content))) {
        hash128 content = content_hash(to, span->count * ckd_dtype_size(t->tensor->dtype));
        if (!wire_content_matches(from->content, &content)) {
            return err_in_tensor(
                err,
                err_set(err, CKD_E_CORRUPT,
                        "the parent's values are not those that the block was coded against"),
                t->tensor->name);
        }
    }
    return CKD_OK;
}

ckd_status blob_bytes(decoder *d, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    ckd_status status = values_check_supported(b, err);
    THEN(status, values_payload(d, b, &payload, err));
    if (status == CKD_OK) {
        status = coder_decode(d->coder, (coding)r->coding, &(coder_target){to, r->raw_size, 1, NULL}, payload,
                              r->stored_size, err);
    }
    hash128 content = status == CKD_OK ? content_hash(to, r->raw_size) : (hash128){0};
    if (status == CKD_OK && !wire_content_matches(&r->content, &content)) {
        status = view_block_corrupt(b, err, "the bytes do not have the content hash they were saved with");
    }
    return status == CKD_OK ? CKD_OK : at_block(b, status, err);
}
