/*
 * Writes and reads the payload of a lossy block: lattice_encode and lattice_decode. put_q picks the coding of its
 * integers, get_q reads them. columns.c has the data that blocks of a matrix share, masks.c integers as masks.
 * kernels/scalar_lattice.h defines what the integers mean.
 */
#include "codec/lattice/lattice.h"

#include "codec/common/common.h"
#include "codec/lattice/masks.h"
#include "codec/lattice/wire.h"

/* Bits of the first byte. */
enum {
    FORM_LEVELS = 1,
    FORM_ROWS = 2,
    FORM_GRID = 4, /* columns and phase are present */
    FORM_FACTOR = 8,
    FORM_EXCEPTIONS = 16,
    FORM_SHARED = 32,
    FORM_SYMBOLS = 64,      /* the rows' factor is coded as symbols */
    FORM_SHARED_ROWS = 128, /* rows and the rows' factor are in a side record */
};
#define MASKS_WORTH 4         /* masks are tried if at most one integer in this many is nonzero */
#define MASKS_SURE  (1 << 15) /* for at least this many integers, masks are used without trying symbols */
/* How q is stored: omitted, as symbols of 1, 2 or 4 bytes, adaptively, or as masks. */
enum { Q_NONE = 0, Q_ADAPTIVE = 8, Q_MASKS = 16 };

void lattice_scratch_free(lattice_scratch *s) {
    bytes *const all[] = {&s->row, &s->step, &s->shift, &s->factor,   &s->own_factor, &s->q,    &s->narrow,
                          &s->at,  &s->bits, &s->q8,    &s->contexts, &s->stream,     &s->tried};
    adaptive_scratch_free(&s->adaptive);
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
}

uint64_t lattice_rows(const lattice_block *b) {
    return b->columns ? (b->phase + b->count + b->columns - 1) / b->columns : 1;
}

/* ---- small parts ---- */

static void put_signed(bytes *to, int32_t v) {
    wire_put_varint(to, (uint64_t)(uint32_t)((uint32_t)v << 1 ^ (uint32_t)(v >> 31)));
}
static int32_t get_signed(reader *from) {
    uint32_t v = (uint32_t)wire_varint_max(from, UINT32_MAX);
    return (int32_t)(v >> 1 ^ (0u - (v & 1)));
}

/* ---- q ---- */

CPU_PLAIN unsigned lattice_width(const int32_t *q, size_t n, bool levels) {
    int32_t min = 0, max = 0;
    for (size_t i = 0; i < n; i++) {
        /* INT32_MIN marks a zero value and becomes the lowest integer of any width. */
        int32_t v = levels && q[i] == INT32_MIN ? 0 : q[i];
        min = v < min ? v : min;
        max = v > max ? v : max;
    }
    return min > INT8_MIN && max <= INT8_MAX ? 1 : (min > INT16_MIN && max <= INT16_MAX ? 2 : 4);
}

#define LOWEST_OF(q, lowest) ((q) == INT32_MIN ? (lowest) : (q))
CPU_PLAIN void lattice_narrow(void *to, const int32_t *q, size_t n, unsigned width) {
    if (width == 1) {
        int8_t *narrow = to;
        for (size_t i = 0; i < n; i++) {
            narrow[i] = (int8_t)LOWEST_OF(q[i], INT8_MIN);
        }
    } else if (width == 2) {
        int16_t *narrow = to;
        for (size_t i = 0; i < n; i++) {
            narrow[i] = (int16_t)LOWEST_OF(q[i], INT16_MIN);
        }
    } else {
        memcpy(to, q, n * sizeof(*q));
    }
}

CPU_PLAIN void lattice_widen(int32_t *q, const void *from, size_t n, unsigned width, bool levels) {
    if (width == 4) {
        memcpy(q, from, n * sizeof(*q));
        return;
    }
    const int8_t *narrow = from;
    const int16_t *wider = from;
    const int32_t lowest = width == 1 ? INT8_MIN : INT16_MIN, meant = levels ? INT32_MIN : lowest;
    for (size_t i = 0; i < n; i++) {
        int32_t v = width == 1 ? narrow[i] : wider[i];
        q[i] = v == lowest ? meant : v;
    }
}

static void put_stream(bytes *to, symbols_mode mode, unsigned width, const void *values, size_t n,
                       symbols_workspace *work) {
    symbols_plan(work, 0, mode, &(symbols_input){width, n, values, NULL}, NULL);
    size_t bound = symbols_bound(work, 0);
    uint8_t *at = bytes_extend(to, bound + 1);
    if (at) {
        to->size -= bound + 1 - symbols_encode(work, 0, values, NULL, at, bound);
    }
}

/* Masks need an eighth of the symbols, hence of the time, and capture what neighbours have in common. */
static ckd_status put_masks(const lattice_output *out, const int8_t *q, size_t n) {
    bytes *to = out->to;
    size_t groups = (n + MASK_OF - 1) / MASK_OF;
    uint8_t *masks = bytes_scratch(&out->scratch->at, groups + n + MASK_OF, "coding scratch", out->err);
    if (!masks) {
        return CKD_E_NOMEM;
    }
    int8_t *others = (int8_t *)masks + groups;
    size_t count = lattice_to_masks(masks, others, q, n);
    bytes *stream = bytes_reset(&out->scratch->stream);
    put_stream(stream, SYMBOLS_SPLIT, 1, masks, groups, out->work);
    bytes_put_u8(to, Q_MASKS);
    wire_put_varint(to, stream->size);
    bytes_put(to, stream->data, stream->size);
    to->failed |= stream->failed;
    put_stream(to, SYMBOLS_CLASS, 1, others, count, out->work);
    return CKD_OK;
}

/* Writes integers of `width` bytes. `linear`: masks are allowed. */
static ckd_status put_symbols(const lattice_output *out, const void *q, unsigned width, size_t n,
                              bool linear) {
    bytes *to = out->to;
    size_t start = to->size;
    bool sparse = linear && width == 1 && lattice_nonzeros(q, n) <= n / MASKS_WORTH;
    ckd_status status = sparse ? put_masks(out, q, n) : CKD_OK;
    if (status != CKD_OK || (sparse && n >= MASKS_SURE)) {
        return status;
    }
    bytes *plain = bytes_reset(&out->scratch->tried);
    bytes_put_u8(plain, (uint8_t)width);
    put_stream(plain, SYMBOLS_CLASS, width, q, n, out->work);
    if (!sparse || plain->size < to->size - start) {
        to->size = start;
        bytes_put(to, plain->data, plain->size);
    }
    to->failed |= plain->failed;
    return CKD_OK;
}

CPU_PLAIN static bool all_zero(const int32_t *q, size_t n) {
    int32_t any = 0;
    for (size_t i = 0; q && i < n; i++) {
        any |= q[i];
    }
    return any == 0;
}

static ckd_status put_q(const lattice_output *out, const lattice_block *b, lattice_effort effort) {
    bytes *to = out->to;
    bool linear = b->map == LATTICE_LINEAR;
    if (b->q8 ? lattice_nonzeros(b->q8, b->count) == 0 : all_zero(b->q, b->count)) {
        bytes_put_u8(to, Q_NONE);
        return CKD_OK;
    }
    if (b->q8) {
        return put_symbols(out, b->q8, 1, b->count, linear);
    }
    size_t start = to->size;
    unsigned width = lattice_width(b->q, b->count, !linear);
    void *narrow = bytes_scratch(&out->scratch->narrow, b->count * width + 1, "coding scratch", out->err);
    if (!narrow) {
        return CKD_E_NOMEM;
    }
    lattice_narrow(narrow, b->q, b->count, width);
    ckd_status status = put_symbols(out, narrow, width, b->count, linear);
    if (status != CKD_OK || effort == LATTICE_FAST) {
        return status;
    }
    bytes *plane = bytes_reset(&out->scratch->tried);
    adaptive_plane shape = {b->count, b->columns, b->phase, NULL};
    adaptive_plane_encode(plane, &shape, b->q, &out->scratch->adaptive);
    if (!plane->failed && plane->size < to->size - start - 1) {
        to->size = start;
        bytes_put_u8(to, Q_ADAPTIVE);
        bytes_put(to, plane->data, plane->size);
    }
    to->failed |= plane->failed;
    return CKD_OK;
}

static ckd_status get_masks(lattice_block *b, lattice_input *from) {
    size_t n = b->count, groups = (n + MASK_OF - 1) / MASK_OF, count = 0;
    uint64_t size = wire_varint_max(&from->in, reader_left(&from->in));
    const void *stream = reader_take(&from->in, (size_t)size);
    uint8_t *masks =
        bytes_scratch(&from->scratch->narrow, groups + n + MASK_OF, "decoding scratch", from->err);
    if (!masks) {
        return CKD_E_NOMEM;
    }
    ckd_status status = from->in.failed
                            ? err_set(from->err, CKD_E_CORRUPT, "a lossy block's masks go beyond its end")
                            : symbols_decode(from->work, &(symbols_output){1, groups, masks, NULL}, stream,
                                             (size_t)size, from->err);
    if (status == CKD_OK) {
        count = lattice_masks_bits(masks, groups);
    }
    int8_t *others = (int8_t *)masks + groups;
    size_t left = reader_left(&from->in);
    if (status == CKD_OK && count <= n) {
        status = symbols_decode(from->work, &(symbols_output){1, count, others, NULL},
                                reader_take(&from->in, left), left, from->err);
    }
    if (status == CKD_OK && (count > n || !lattice_masks_valid(masks, others, count, n))) {
        status = err_set(from->err, CKD_E_CORRUPT, "a lossy block's masks are not those of its integers");
    }
    if (status != CKD_OK) {
        return status;
    }
    if (from->as_masks && !b->factor && count <= n / LATTICE_FEW) {
        b->masks = masks;
        b->others = others;
        b->other_count = count;
        return CKD_OK;
    }
    int8_t *q8 = bytes_scratch(&from->scratch->q8, n + 1, "decoding scratch", from->err);
    if (!q8) {
        return CKD_E_NOMEM;
    }
    lattice_from_masks(q8, masks, others, n);
    b->q8 = q8;
    return CKD_OK;
}

static ckd_status get_q(lattice_block *b, lattice_input *from) {
    uint8_t form = reader_u8(&from->in);
    size_t size = reader_left(&from->in), n = b->count;
    if (form == Q_NONE) {
        return size ? err_set(from->err, CKD_E_CORRUPT, "a lossy block ends in the wrong place") : CKD_OK;
    }
    if (form == Q_MASKS && b->map == LATTICE_LINEAR) {
        return get_masks(b, from);
    }
    const void *stream = reader_take(&from->in, size);
    int32_t *q = bytes_scratch(&from->scratch->q, n * sizeof(int32_t) + 1, "decoding scratch", from->err);
    if (!q) {
        return CKD_E_NOMEM;
    }
    b->q = q;
    if (form == Q_ADAPTIVE) {
        adaptive_plane shape = {n, b->columns, b->phase, NULL};
        return adaptive_plane_decode(q, &shape, stream, size, &from->scratch->adaptive, from->err);
    }
    if (form == 4) {
        return symbols_decode(from->work, &(symbols_output){4, n, q, NULL}, stream, size, from->err);
    }
    if (form != 1 && form != 2) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's integers have an unknown form");
    }
    bytes *buffer = form == 1 ? &from->scratch->q8 : &from->scratch->narrow;
    void *narrow = bytes_scratch(buffer, n * form + 1, "decoding scratch", from->err);
    if (form == 1 && b->map == LATTICE_LINEAR) {
        b->q = NULL;
        b->q8 = narrow;
        return narrow ? symbols_decode(from->work, &(symbols_output){form, n, narrow, NULL}, stream, size,
                                       from->err)
                      : CKD_E_NOMEM;
    }
    ckd_status status =
        narrow ? symbols_decode(from->work, &(symbols_output){form, n, narrow, NULL}, stream, size, from->err)
               : CKD_E_NOMEM;
    if (status == CKD_OK) {
        lattice_widen(q, narrow, n, form, b->map == LATTICE_LEVELS);
    }
    return status;
}

/* ---- values stored verbatim ---- */

static void put_exceptions(bytes *to, const lattice_block *b) {
    wire_put_varint(to, b->exceptions);
    uint32_t next = 0;
    for (uint32_t i = 0; i < b->exceptions; i++) {
        wire_put_varint(to, b->exception_at[i] - next);
        bytes_put_u32(to, b->exception_bits[i]);
        next = b->exception_at[i] + 1;
    }
}

static ckd_status get_exceptions(lattice_block *b, lattice_input *from) {
    b->exceptions = (uint32_t)wire_varint_max(
        &from->in, b->count < reader_left(&from->in) ? b->count : reader_left(&from->in));
    uint32_t *at =
        bytes_scratch(&from->scratch->at, b->exceptions * sizeof(*at) + 1, "decoding scratch", from->err);
    uint32_t *bits = at ? bytes_scratch(&from->scratch->bits, b->exceptions * sizeof(*bits) + 1,
                                        "decoding scratch", from->err)
                        : NULL;
    if (!bits) {
        return CKD_E_NOMEM;
    }
    uint64_t next = 0;
    if (b->exceptions == 0) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's list of verbatim values is empty");
    }
    for (uint32_t i = 0; i < b->exceptions; i++) {
        uint64_t place = next + wire_varint_max(&from->in, b->count);
        bits[i] = reader_u32(&from->in);
        if (place >= b->count) {
            return err_set(from->err, CKD_E_CORRUPT, "a lossy block's verbatim value lies beyond its end");
        }
        at[i] = (uint32_t)place;
        next = place + 1;
    }
    b->exception_at = at;
    b->exception_bits = bits;
    return CKD_OK;
}

/* ---- the payload ---- */

static bool has_grid(const lattice_block *b) {
    return b->row || b->factor || b->shared || b->own.step || b->own.rank;
}

ckd_status lattice_encode(bytes *to, const lattice_block *b, lattice_effort effort, lattice_scratch *scratch,
                          symbols_workspace *work, ckd_error *err) {
    bool grid = has_grid(b) || effort == LATTICE_SMALL, symbols = false;
    size_t start = to->size;
    lattice_output out = {to, scratch, work, err};
    bytes_put_u8(to, (uint8_t)((b->map == LATTICE_LEVELS ? FORM_LEVELS : 0) | (b->row ? FORM_ROWS : 0) |
                               (grid ? FORM_GRID : 0) | (b->factor ? FORM_FACTOR : 0) |
                               (b->exceptions ? FORM_EXCEPTIONS : 0) | (b->shared ? FORM_SHARED : 0) |
                               (b->shared_rows ? FORM_SHARED_ROWS : 0)));
    put_signed(to, b->step);
    if (b->map == LATTICE_LINEAR) {
        put_signed(to, b->exponent);
        bytes_put(to, b->offset, sizeof(b->offset));
    } else {
        put_signed(to, b->birth);
    }
    ckd_status status = CKD_OK;
    if (grid) {
        wire_put_varint(to, b->columns);
        wire_put_varint(to, b->phase);
        if (!b->shared) {
            status = lattice_put_columns(&out, &b->own);
        }
    }
    if (b->row && !b->shared_rows) {
        lattice_put_integers(&out, b->row, lattice_rows(b), NULL);
    }
    if (b->factor) {
        put_signed(to, b->low_rank_exponent);
    }
    if (status == CKD_OK && b->factor && !b->shared_rows) {
        status = lattice_put_factor(&out, &symbols, b->factor, lattice_rows(b), b->own.rank);
        if (symbols && !to->failed) {
            to->data[start] |= FORM_SYMBOLS;
        }
    }
    if (b->exceptions) {
        put_exceptions(to, b);
    }
    THEN(status, put_q(&out, b, effort));
    return status == CKD_OK && to->failed ? err_nomem(err, to->size, "a lossy block") : status;
}

static ckd_status get_grid(lattice_block *b, lattice_input *from, uint8_t form,
                           const lattice_columns *shared) {
    b->columns = wire_varint_max(&from->in, UINT64_C(1) << 40);
    b->phase = wire_varint_max(&from->in, UINT64_C(1) << 40);
    if (b->columns == 0 || b->phase >= b->columns || (form & FORM_SHARED && !shared) ||
        (form & FORM_SHARED && shared->columns != b->columns)) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's rows and columns do not fit together");
    }
    if (form & FORM_SHARED) {
        b->shared = true;
        b->own = *shared;
        return CKD_OK;
    }
    b->own.columns = b->columns;
    return lattice_get_columns(&b->own, from, b->columns);
}

/* Takes rows from a side record, which may have more of them than the block needs. */
static ckd_status take_rows(lattice_block *b, uint8_t form, const lattice_columns *rows, ckd_error *err) {
    bool steps = form & FORM_ROWS, factor = form & FORM_FACTOR;
    if (!rows || rows->columns != lattice_rows(b) || !b->shared || form & FORM_SYMBOLS ||
        !(steps || factor) || (steps && !rows->step) || (factor && rows->rank != b->own.rank)) {
        return err_set(err, CKD_E_CORRUPT, "a lossy block and the rows that it shares do not fit together");
    }
    b->shared_rows = true;
    b->row = steps ? rows->step : NULL;
    b->factor = factor ? rows->factor : NULL;
    return CKD_OK;
}

static ckd_status get_factor(lattice_block *b, lattice_input *from, uint8_t form) {
    b->low_rank_exponent = get_signed(&from->in);
    if (!b->own.rank || b->low_rank_exponent < -64 || b->low_rank_exponent > 64) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block has only one of the two factors");
    }
    return form & FORM_SHARED_ROWS ? CKD_OK
                                   : lattice_get_factor(&b->factor, from, lattice_rows(b), b->own.rank,
                                                        form & FORM_SYMBOLS, &from->scratch->own_factor);
}

static ckd_status get_parts(lattice_block *b, lattice_input *from, uint8_t form,
                            const lattice_payload *payload) {
    ckd_status status = CKD_OK;
    if (form & FORM_GRID) {
        status = get_grid(b, from, form, payload->columns);
    } else if (form & (FORM_ROWS | FORM_FACTOR | FORM_SHARED | FORM_SHARED_ROWS)) {
        status = err_set(from->err, CKD_E_CORRUPT, "a lossy block has rows but no columns");
    }
    if (status == CKD_OK && (form & FORM_SHARED_ROWS || payload->rows)) {
        status = form & FORM_SHARED_ROWS
                     ? take_rows(b, form, payload->rows, from->err)
                     : err_set(from->err, CKD_E_CORRUPT,
                               "a lossy block has shared rows that its form does not name");
    } else if (status == CKD_OK && form & FORM_ROWS) {
        status = lattice_get_steps(&b->row, from, lattice_rows(b), &from->scratch->row);
    }
    if (status == CKD_OK && !(form & FORM_FACTOR) && b->own.rank && !b->shared) {
        status = err_set(from->err, CKD_E_CORRUPT, "a lossy block has only one of the two factors");
    }
    if (status == CKD_OK && form & FORM_FACTOR) {
        status = get_factor(b, from, form);
    }
    return status == CKD_OK && form & FORM_EXCEPTIONS ? get_exceptions(b, from) : status;
}

ckd_status lattice_decode(lattice_block *out, const lattice_payload *from, lattice_scratch *scratch,
                          symbols_workspace *work, ckd_error *err) {
    lattice_input input = {reader_of(from->data, from->size), scratch, work, err, from->as_masks};
    reader *r = &input.in;
    uint8_t form = reader_u8(r);
    *out = (lattice_block){.map = form & FORM_LEVELS ? LATTICE_LEVELS : LATTICE_LINEAR,
                           .count = from->count,
                           .columns = from->count ? from->count : 1,
                           .step = get_signed(r)};
    if (out->map == LATTICE_LINEAR) {
        out->exponent = get_signed(r);
        const void *offset = reader_take(r, sizeof(out->offset));
        if (offset) {
            memcpy(out->offset, offset, sizeof(out->offset));
        }
    } else {
        out->birth = get_signed(r);
    }
    bool fits = out->map == LATTICE_LINEAR
                    ? out->step >= -400 && out->step <= 400 && out->exponent >= -120 && out->exponent <= 120
                    : out->step >= 1 && out->step <= 4096 && out->birth >= 1 && out->birth <= 2039 &&
                          !(form & FORM_FACTOR);
    if (r->failed || (form & FORM_SYMBOLS && !(form & FORM_FACTOR)) || !fits) {
        return err_set(err, CKD_E_CORRUPT, "a lossy block's form or scale is out of range");
    }
    ckd_status status = get_parts(out, &input, form, from);
    THEN(status,
         r->failed ? err_set(err, CKD_E_CORRUPT, "a lossy block ends too early") : get_q(out, &input));
    return status;
}
