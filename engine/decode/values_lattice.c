/* Lossy blocks: their integers, the side records they share with other blocks, and the values. */
#include "engine/decode/internal.h"

static ckd_status read_columns(cached_columns *to, decoder *d, const view_block *side, ckd_error *err) {
    uint64_t size = side->record->raw_size;
    bytes raw = {0};
    void *at = bytes_scratch(&raw, size + 1, "a matrix's columns", err);
    ckd_status status = at ? shared_bytes(d, side, at, err) : CKD_E_NOMEM;
    if (status == CKD_OK) {
        lattice_scratch *s = &d->lattice.scratch;
        status = lattice_columns_decode(&to->columns, at, size, s, coder_symbols(d->coder), err);
        /* take the buffers behind the columns; the rest of the scratch stays the worker's */
        to->step = s->step;
        to->shift = s->shift;
        to->factor = s->factor;
        s->step = s->shift = s->factor = (bytes){0};
    }
    bytes_free(&raw);
    return status;
}

/*
 * Loads the side record that the block's dependency number dependency_count - 1 - back names, through the cache. The
 * caller releases it. *out = NULL if that dependency is no side record.
 */
static ckd_status shared_side(cached_columns **out, decoder *d, const view *v, const view_block *b,
                              uint32_t back, ckd_error *err) {
    const record *r = b->record;
    const dependency *ref =
        r->dependency_count > back ? &r->dependencies[r->dependency_count - 1 - back] : NULL;
    *out = NULL;
    if (!ref || ref->kind != DEPENDS_SIDE) {
        return CKD_OK;
    }
    /* The cache may have equal content under another name. The record that the block names must exist nevertheless. */
    bool must_fill, own = v && id_equal(&ref->checkpoint, &v->manifest.checkpoint.id);
    const view_block *side = own ? view_find_shared(v, RECORD_SIDE, &ref->content) : NULL;
    if (!side) {
        return view_lacks(
            v,
            view_block_corrupt(b, err, "the rows or columns that the block shares with others are missing"),
            err);
    }
    cached_columns *cached = columns_claim(d->columns, &must_fill, &ref->content);
    if (must_fill) {
        ckd_status status = read_columns(cached, d, side, err);
        columns_filled(d->columns, cached, status == CKD_OK);
        if (status != CKD_OK) {
            return status;
        }
    } else if (!cached_record_counts(d->views, v, side, &d->stored)) {
        columns_release(d->columns, cached);
        return view_block_corrupt(b, err,
                                  "the rows or columns that the block shares with others are damaged");
    }
    *out = cached;
    return CKD_OK;
}

ckd_status values_lattice_read(lattice_parts *out, decoder *d, const view *v, const view_block *b,
                               bool as_masks, ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    out->columns = out->rows = NULL;
    if (!lattice_dtype(r->tensor->dtype)) {
        return view_block_corrupt(b, err, "a lossy block has a dtype that is always stored exactly");
    }
    ckd_status status = shared_side(&out->columns, d, v, b, 0, err);
    if (status == CKD_OK && out->columns) {
        status = shared_side(&out->rows, d, v, b, 1, err);
    }
    THEN(status, values_payload(d, b, &payload, err));
    THEN(status, lattice_decode(&out->block,
                                &(lattice_payload){payload, r->stored_size, r->count,
                                                   out->columns ? &out->columns->columns : NULL,
                                                   out->rows ? &out->rows->columns : NULL, as_masks},
                                &d->lattice.scratch, coder_symbols(d->coder), err));
    if (status != CKD_OK) {
        values_lattice_release(d, out);
    }
    return status;
}

void values_lattice_release(decoder *d, lattice_parts *p) {
    if (p->rows) {
        columns_release(d->columns, p->rows);
    }
    if (p->columns) {
        columns_release(d->columns, p->columns);
    }
    p->columns = p->rows = NULL;
}

ckd_status values_decode_lattice(decoder *d, const view *v, const view_block *b, bool has_parent, void *to,
                                 ckd_error *err) {
    lattice_parts parts;
    ckd_status status = values_lattice_read(&parts, d, v, b, has_parent, err);
    if (status == CKD_OK) {
        const lattice_target target = {to, b->record->tensor->dtype, has_parent};
        status = lattice_rebuild_values(&target, &parts.block, &d->lattice, d->kernels, err);
        values_lattice_release(d, &parts);
    }
    return status;
}
