/* Symbol streams: chooses between dense, change, run and framed streams, and also reads sparse ones (FORMAT.md). */
#include "codec/entropy/entropy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/symbols_work.h"

/* A run stream has at most one nonzero integer in this many. With more, it decodes slower than a dense stream. */
#define RUNS_WORTH 40
/* A nonzero integer takes as long to decode as this many symbols of a dense stream. */
#define RUN_SYMBOLS 20
/*
 * A change stream may be larger than a dense one by this share. It decodes several times as fast, so chains may be
 * longer.
 */
#define CHANGES_SHARE 8

ckd_status symbols_workspace_create(symbols_workspace **out, ckd_error *err) {
    symbols_workspace *w = calloc(1, sizeof(*w));
    *out = w;
    if (!w) {
        return err_nomem(err, sizeof(*w), "the symbol coder");
    }
    for (unsigned i = 1; i <= SYMBOLS_MAX_STATES; i++) {
        w->log2_of[i] = log2f((float)i);
    }
    return CKD_OK;
}

void symbols_workspace_free(symbols_workspace *w) {
    if (w) {
        bytes_free(&w->plan[0].encoded);
        bytes_free(&w->plan[1].encoded);
    }
    free(w);
}

/* Tries a change stream for a delta with most integers zero. *planned is the size of the dense stream. */
static void plan_changes(symbols_workspace *w, symbols_plan_slot *p, const symbols_input *in,
                         size_t *planned) {
    const symbols_slot *dense = &p->dense;
    if ((in->context || dense->zeros == dense->count) && dense->header.mode == SYMBOLS_CLASS &&
        !dense->header.table[0].centre && dense->count >= SYMBOLS_FEW_MIN &&
        dense->zeros >= dense->count - dense->count / SYMBOLS_CHANGES_WORTH &&
        symbols_changes_encode(&p->encoded, &p->coded, w, &p->inner, dense->symbols, in) &&
        p->encoded.size <= *planned + *planned / CHANGES_SHARE) {
        p->is_encoded = true;
        *planned = p->encoded.size;
    }
}

CPU_PLAIN static size_t nonzero_bytes(const uint8_t *values, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += values[i] != 0;
    }
    return count;
}

/* Tries a run stream if few integers are nonzero. Only for one-byte integers. */
static bool plan_runs(symbols_plan_slot *p, const symbols_input *in, size_t limit, size_t *planned) {
    size_t n = in->n;
    if (in->width != 1 || n < SYMBOLS_FEW_MIN) {
        return false;
    }
    size_t nonzero = nonzero_bytes(in->values, n);
    if (nonzero == 0 || nonzero > n / RUNS_WORTH ||
        !symbols_runs_encode(&p->encoded, in->width, in->values, n, nonzero, limit)) {
        return false;
    }
    p->is_encoded = true;
    p->coded = nonzero * RUN_SYMBOLS;
    p->dense.count = n;
    *planned = p->encoded.size;
    return true;
}

size_t symbols_plan_frame(symbols_workspace *w, symbols_plan_slot *p) {
    if (!p->is_framed) {
        return 0;
    }
    symbols_groups unused;
    size_t levels = 0;
    if (p->frame.columns) {
        levels =
            symbols_dense_plan(w, &p->inner, &unused, SYMBOLS_SPLIT,
                               &(symbols_input){1, p->frame.rows + p->frame.columns, p->frame.level, NULL});
    }
    uint8_t header[SYMBOLS_FRAMED_HEADER];
    return levels + symbols_frame_write(&p->frame, levels, header);
}

static size_t plan_framed(symbols_workspace *w, symbols_plan_slot *p, const symbols_grid *grid,
                          const symbols_input *in) {
    size_t size = symbols_framed_plan(w, &p->dense, &p->frame, &p->is_framed, grid, in);
    return size + symbols_plan_frame(w, p);
}

size_t symbols_plan(symbols_workspace *w, int slot, symbols_mode mode, const symbols_input *in,
                    const symbols_grid *grid) {
    symbols_plan_slot *p = &w->plan[slot];
    p->dense.count = 0;
    p->is_framed = p->is_encoded = false;
    size_t planned = 0;
    if (in->n == 0 || in->n > SYMBOLS_MAX_COUNT || (!in->context && plan_runs(p, in, in->n / 8, &planned))) {
        return planned;
    }
    bool by_context = false;
    if (mode == SYMBOLS_SPLIT && !in->context) {
        planned = plan_framed(w, p, grid, in);
    } else {
        symbols_groups groups;
        planned = symbols_dense_plan(w, &p->dense, &groups, mode, in);
        by_context = groups.count > 1;
        plan_changes(w, p, in, &planned);
    }
    if (in->context && !by_context && !p->is_encoded) {
        plan_runs(p, in, planned + planned / 64, &planned);
    }
    return planned + planned / 1024;
}

size_t symbols_coded(const symbols_workspace *w, int slot) {
    const symbols_plan_slot *p = &w->plan[slot];
    return p->is_encoded ? p->coded : p->dense.count;
}

size_t symbols_bound(const symbols_workspace *w, int slot) {
    const symbols_plan_slot *p = &w->plan[slot];
    if (p->is_encoded) {
        return p->encoded.size;
    }
    if (p->is_framed) {
        return SYMBOLS_FRAMED_HEADER + (p->frame.columns ? p->inner.bound : 0) + p->dense.bound;
    }
    return p->dense.count ? p->dense.bound : 0;
}

/*
 * Writes the frame and the stream of its levels, if any, and sets the contexts of the elements. Returns 0 if there is
 * no room.
 */
static size_t encode_frame(symbols_workspace *w, const symbols_plan_slot *p, size_t n, uint8_t *to,
                           size_t capacity) {
    uint8_t header[SYMBOLS_FRAMED_HEADER];
    size_t used = symbols_frame_write(&p->frame, 0, header), size = 0;
    if (used > capacity) {
        return 0;
    }
    if (p->frame.columns) { /* the varint of the stream size may be longer than that of 0 */
        uint8_t *levels = to + used;
        size = symbols_dense_encode(w, &p->inner, p->frame.level, NULL, levels, capacity - used);
        used = symbols_frame_write(&p->frame, size, header);
        if (size == 0 || used + size > capacity) {
            return 0;
        }
        memmove(to + used, levels, size);
        symbols_fill_levels(w->level_context, &p->frame, n);
    }
    memcpy(to, header, used);
    return used + size;
}

static size_t encode_framed(symbols_workspace *w, const symbols_plan_slot *p, const void *values, uint8_t *to,
                            size_t capacity) {
    size_t used = encode_frame(w, p, p->dense.count, to, capacity);
    if (used == 0) {
        return 0;
    }
    const uint8_t *context = p->frame.columns ? w->level_context : NULL;
    size_t size = symbols_dense_encode(w, &p->dense, values, context, to + used, capacity - used);
    return size ? used + size : 0;
}

size_t symbols_parts_frame_bound(const symbols_workspace *w, int slot) {
    const symbols_plan_slot *p = &w->plan[slot];
    return p->is_framed ? symbols_bound(w, slot) - p->dense.bound : 0;
}

size_t symbols_parts_frame(symbols_workspace *w, int slot, uint8_t *to) {
    const symbols_plan_slot *p = &w->plan[slot];
    return p->is_framed ? encode_frame(w, p, 0, to, symbols_parts_frame_bound(w, slot)) : 0;
}

size_t symbols_encode(symbols_workspace *w, int slot, const void *values, const uint8_t *context, void *to,
                      size_t capacity) {
    const symbols_plan_slot *p = &w->plan[slot];
    if (p->dense.count == 0) {
        return 0;
    }
    if (p->is_encoded && p->encoded.size > capacity) {
        return 0;
    }
    if (p->is_encoded) {
        memcpy(to, p->encoded.data, p->encoded.size);
        return p->encoded.size;
    }
    return p->is_framed ? encode_framed(w, p, values, to, capacity)
                        : symbols_dense_encode(w, &p->dense, values, context, to, capacity);
}

static ckd_status decode_sparse(symbols_workspace *w, const symbols_output *out, const uint8_t *from,
                                size_t size, ckd_error *err) {
    symbols_sparse *s = &w->decoding_sparse;
    size_t used;
    if (!symbols_sparse_read(s, from, size, out->n, &used)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a sparse symbol stream's header is invalid");
    }
    if (s->ranges > 1 && !out->context) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a symbol stream needs contexts, and the block has none");
    }
    if (s->pairs) {
        ckd_status status =
            symbols_dense_decode(w, &(symbols_output){out->width, 2 * s->pairs, s->integers, s->context},
                                 from + used, size - used, err);
        if (status != CKD_OK) {
            return status;
        }
    } else if (used != size) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a sparse symbol stream does not end where it should");
    }
    if (!symbols_scatter(s, out)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a gap in a sparse symbol stream leads beyond its end");
    }
    return CKD_OK;
}

static ckd_status decode_framed(symbols_workspace *w, const symbols_output *out, const uint8_t *from,
                                size_t size, ckd_error *err) {
    symbols_frame *f = &w->decoding_frame;
    reader r = reader_of(from, size);
    size_t stream_size;
    if (!symbols_frame_read(f, &stream_size, &r, out->width, out->n)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a framed symbol stream's header is invalid");
    }
    ckd_status status = CKD_OK;
    symbols_output framed = {out->width, out->n, out->values, NULL};
    if (f->columns) {
        symbols_output levels = {1, f->rows + f->columns, f->level, NULL};
        status = symbols_dense_decode(w, &levels, from + r.at, stream_size, err);
        r.at += stream_size;
        symbols_fill_levels(w->level_context, f, out->n);
        framed.context = w->level_context;
    }
    THEN(status, symbols_dense_decode(w, &framed, from + r.at, reader_left(&r), err));
    if (status == CKD_OK) {
        symbols_add_shared(f, out->width, out->values, out->n);
    }
    return status;
}

ckd_status symbols_decode(symbols_workspace *w, const symbols_output *out, const void *from, size_t size,
                          ckd_error *err) {
    unsigned width = out->width;
    size_t n = out->n;
    if (n > SYMBOLS_MAX_COUNT || (width != 1 && width != 2 && width != 4 && width != 8)) {
        return err_set(err, CKD_E_INVALID, "a symbol stream cannot have %zu integers of %u bytes", n, width);
    }
    if (n == 0) {
        return size == 0 ? CKD_OK
                         : err_corrupt(err, NULL, CKD_NO_OFFSET,
                                       "a symbol stream of no integers has %zu bytes", size);
    }
    unsigned first = size ? *(const uint8_t *)from : 0;
    if (first == SYMBOLS_SPARSE) {
        return decode_sparse(w, out, from, size, err);
    }
    if (first == SYMBOLS_CHANGES) {
        return symbols_changes_decode(w, out, from, size, err);
    }
    if (first == SYMBOLS_RUNS) {
        return symbols_runs_decode(width, out->values, n, from, size)
                   ? CKD_OK
                   : err_corrupt(err, NULL, CKD_NO_OFFSET, "a run stream does not end where it should");
    }
    return first == SYMBOLS_FRAMED ? decode_framed(w, out, from, size, err)
                                   : symbols_dense_decode(w, out, from, size, err);
}
