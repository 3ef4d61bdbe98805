/* The data that blocks of a matrix share, and the parts that it has in common with blocks: integers and factors. */
#include "codec/lattice/wire.h"

#include <math.h>
#include <string.h>

#include "codec/common/common.h"

enum { COLUMNS_STEP = 1, COLUMNS_FACTOR = 2, COLUMNS_SYMBOLS = 4, COLUMNS_KNOWN = 7 };
enum { SHIFT_MAX = 24 };
#define FACTOR_MANY  16384 /* integers; from here on, adaptive coding is not tried */
#define FACTOR_WORTH 16
#define SYMBOLS_MAX  (1u << 18)

void lattice_put_integers(const lattice_output *out, const int32_t *values, size_t n,
                          const uint8_t *contexts) {
    bytes *to = out->to;
    bytes *stream = bytes_reset(&out->scratch->stream);
    adaptive_encode(stream, contexts ? ADAPTIVE_SCALED : ADAPTIVE_EVEN, &(adaptive_sequence){n, contexts},
                    values, &out->scratch->adaptive);
    wire_put_varint(to, stream->size);
    bytes_put(to, stream->data, stream->size);
    to->failed |= stream->failed;
}

static ckd_status get_integers(const int32_t **out, lattice_input *from, size_t n, const uint8_t *contexts,
                               bytes *buffer) {
    uint64_t size = wire_varint_max(&from->in, reader_left(&from->in));
    const void *stream = reader_take(&from->in, (size_t)size);
    if (from->in.failed) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's parts go beyond its end");
    }
    int32_t *values = bytes_scratch(buffer, n * sizeof(int32_t) + 1, "decoding scratch", from->err);
    if (!values) {
        return CKD_E_NOMEM;
    }
    *out = values;
    return adaptive_decode(values, &(adaptive_sequence){n, contexts}, stream, (size_t)size,
                           &from->scratch->adaptive, from->err);
}

/* Reads integers, each of which must be in min ... max. */
static ckd_status get_bounded(const int32_t **out, lattice_input *from, size_t n, int32_t min, int32_t max,
                              bytes *buffer) {
    ckd_status status = get_integers(out, from, n, NULL, buffer);
    for (size_t i = 0; i < n && status == CKD_OK; i++) {
        if ((*out)[i] < min || (*out)[i] > max) {
            status = err_set(from->err, CKD_E_CORRUPT, "a lossy block's scale is out of range");
        }
    }
    return status;
}
ckd_status lattice_get_steps(const int32_t **values, lattice_input *from, size_t n, bytes *buffer) {
    return get_bounded(values, from, n, -LATTICE_MAX_STEP, LATTICE_MAX_STEP, buffer);
}

/* ---- factors: rows x rank; each component (column) has its own scale ---- */

static int32_t component_scale(const int32_t *factor, size_t rows, uint32_t rank, uint32_t k) {
    double energy = 0;
    for (size_t i = 0; i < rows; i++) {
        double v = factor[i * rank + k];
        energy += v * v;
    }
    return (int32_t)adaptive_context_of(sqrt(energy / (double)(rows ? rows : 1)));
}

static uint8_t *factor_contexts(const int32_t *scale, size_t rows, uint32_t rank, bytes *buffer,
                                ckd_error *err) {
    size_t n = rows * rank, have = n < rank ? n : rank;
    uint8_t *contexts = bytes_scratch(buffer, n + 1, "coding scratch", err);
    for (size_t k = 0; contexts && k < have; k++) {
        contexts[k] = (uint8_t)scale[k];
    }
    while (contexts && have < n) { /* repeated for every row */
        size_t more = have < n - have ? have : n - have;
        memcpy(contexts + have, contexts, more);
        have += more;
    }
    return contexts;
}

static void differences(int32_t *values, size_t n, bool undo) {
    int32_t before = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t v = values[i];
        values[i] = undo ? (int32_t)((uint32_t)before + (uint32_t)v) : v - before;
        before = undo ? values[i] : v;
    }
}

/* Writes integers of `width` bytes as symbol streams of at most SYMBOLS_MAX integers, each preceded by its size. */
static void put_streams(const lattice_output *out, const int32_t *values, size_t n, unsigned width,
                        const uint8_t *contexts) {
    lattice_scratch *scratch = out->scratch;
    symbols_workspace *work = out->work;
    bytes *to = out->to;
    for (size_t at = 0; at < n; at += SYMBOLS_MAX) {
        size_t length = n - at < SYMBOLS_MAX ? n - at : SYMBOLS_MAX;
        void *narrow = bytes_scratch(&scratch->narrow, length * width + 1, "coding scratch", NULL);
        uint8_t *stream = NULL;
        if (narrow) {
            lattice_narrow(narrow, values + at, length, width);
            symbols_plan(work, 0, SYMBOLS_CLASS, &(symbols_input){width, length, narrow, contexts + at},
                         NULL);
            stream = bytes_scratch(&scratch->q8, symbols_bound(work, 0) + 1, "coding scratch", NULL);
        }
        if (!stream) {
            to->failed = true;
            return;
        }
        size_t size = symbols_encode(work, 0, narrow, contexts + at, stream, symbols_bound(work, 0));
        wire_put_varint(to, size);
        bytes_put(to, stream, size);
    }
}

static ckd_status get_streams(int32_t *values, lattice_input *from, size_t n, unsigned width,
                              const uint8_t *contexts) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < n && status == CKD_OK; at += SYMBOLS_MAX) {
        size_t length = n - at < SYMBOLS_MAX ? n - at : SYMBOLS_MAX;
        uint64_t size = wire_varint_max(&from->in, reader_left(&from->in));
        const void *stream = reader_take(&from->in, (size_t)size);
        void *narrow =
            bytes_scratch(&from->scratch->narrow, length * width + 1, "decoding scratch", from->err);
        if (!narrow) {
            return CKD_E_NOMEM;
        }
        status = from->in.failed
                     ? err_set(from->err, CKD_E_CORRUPT, "a lossy block's factor goes beyond its end")
                     : symbols_decode(from->work, &(symbols_output){width, length, narrow, contexts + at},
                                      stream, (size_t)size, from->err);
        if (status == CKD_OK) {
            lattice_widen(values + at, narrow, length, width, false);
        }
    }
    return status;
}

/*
 * Writes the integers adaptively, which is smaller, or as symbols, which are ten times as fast: if there are many, or
 * if symbols cost hardly more. Returns true for symbols.
 */
static bool put_scaled(const lattice_output *out, const int32_t *values, size_t n, const uint8_t *contexts) {
    bytes *to = out->to, *fast = bytes_reset(&out->scratch->tried);
    lattice_output symbols_out = {fast, out->scratch, out->work, out->err};
    size_t start = to->size;
    unsigned width = lattice_width(values, n, false);
    bytes_put_u8(fast, (uint8_t)width);
    put_streams(&symbols_out, values, n, width, contexts);
    if (n < FACTOR_MANY) {
        lattice_put_integers(out, values, n, contexts);
    }
    size_t small = to->size - start;
    bool symbols = n >= FACTOR_MANY || fast->size <= small + small / FACTOR_WORTH;
    if (symbols) {
        to->size = start;
        bytes_put(to, fast->data, fast->size);
    }
    to->failed |= fast->failed;
    return symbols;
}

static ckd_status get_scaled(const int32_t **out, lattice_input *from, size_t n, bool symbols,
                             const uint8_t *contexts, bytes *buffer) {
    if (!symbols) {
        return get_integers(out, from, n, contexts, buffer);
    }
    uint8_t width = reader_u8(&from->in);
    if (width != 1 && width != 2 && width != 4) {
        return err_set(from->err, CKD_E_CORRUPT,
                       "a lossy block's factor has integers of an impossible width");
    }
    int32_t *values = bytes_scratch(buffer, n * sizeof(int32_t) + 1, "decoding scratch", from->err);
    *out = values;
    return values ? get_streams(values, from, n, width, contexts) : CKD_E_NOMEM;
}

ckd_status lattice_put_factor(const lattice_output *out, bool *symbols, const int32_t *factor, size_t rows,
                              uint32_t rank) {
    int32_t scale[LATTICE_MAX_RANK] = {0}, steps[LATTICE_MAX_RANK] = {0};
    for (uint32_t k = 0; k < rank; k++) {
        scale[k] = steps[k] = component_scale(factor, rows, rank, k);
    }
    differences(steps, rank, false);
    lattice_put_integers(out, steps, rank, NULL);
    uint8_t *contexts = factor_contexts(scale, rows, rank, &out->scratch->contexts, out->err);
    if (!contexts) {
        return CKD_E_NOMEM;
    }
    *symbols = put_scaled(out, factor, rows * rank, contexts);
    return CKD_OK;
}

ckd_status lattice_get_factor(const int32_t **factor, lattice_input *from, uint64_t rows, uint32_t rank,
                              bool symbols, bytes *buffer) {
    const int32_t *steps;
    if (rows * rank > LATTICE_MAX_FACTOR) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's factor is too large");
    }
    ckd_status status = get_integers(&steps, from, rank, NULL, &from->scratch->narrow);
    if (status != CKD_OK) {
        return status;
    }
    int32_t scale[LATTICE_MAX_RANK];
    memcpy(scale, steps, rank * sizeof(int32_t));
    differences(scale, rank, true);
    for (uint32_t k = 0; k < rank; k++) {
        if (scale[k] < 0 || scale[k] >= (int32_t)ADAPTIVE_CONTEXTS) {
            return err_set(from->err, CKD_E_CORRUPT, "the scale of a lossy block's factor is out of range");
        }
    }
    uint8_t *contexts = factor_contexts(scale, rows, rank, &from->scratch->contexts, from->err);
    return contexts ? get_scaled(factor, from, rows * rank, symbols, contexts, buffer) : CKD_E_NOMEM;
}

/* ---- shared data of a matrix ---- */

ckd_status lattice_put_columns(const lattice_output *out, const lattice_columns *c) {
    bytes *to = out->to;
    size_t form = to->size;
    bytes_put_u8(to, (uint8_t)((c->step ? COLUMNS_STEP : 0) | (c->rank ? COLUMNS_FACTOR : 0)));
    if (c->step) {
        lattice_put_integers(out, c->step, c->columns, NULL);
    }
    if (c->rank == 0) {
        return CKD_OK;
    }
    wire_put_varint(to, c->rank);
    lattice_put_integers(out, c->shift, c->rank, NULL);
    bool symbols = false;
    ckd_status status = lattice_put_factor(out, &symbols, c->factor, c->columns, c->rank);
    if (symbols && !to->failed) {
        to->data[form] |= COLUMNS_SYMBOLS;
    }
    return status;
}

ckd_status lattice_get_columns(lattice_columns *c, lattice_input *from, uint64_t max_rank) {
    uint8_t form = reader_u8(&from->in);
    ckd_status status = CKD_OK;
    if (form & ~COLUMNS_KNOWN || (form & COLUMNS_SYMBOLS && !(form & COLUMNS_FACTOR)) ||
        (form && c->columns > LATTICE_MAX_COLUMNS)) {
        return err_set(from->err, CKD_E_CORRUPT, "a lossy block's columns have an unknown form");
    }
    if (form & COLUMNS_STEP) {
        status = lattice_get_steps(&c->step, from, c->columns, &from->scratch->step);
    }
    if (status != CKD_OK || !(form & COLUMNS_FACTOR)) {
        return status;
    }
    c->rank = (uint32_t)wire_varint_max(&from->in, LATTICE_MAX_RANK);
    if (c->rank == 0 || c->rank > max_rank) {
        return err_set(from->err, CKD_E_CORRUPT,
                       "a lossy block's factor has an impossible number of components");
    }
    status = get_bounded(&c->shift, from, c->rank, 0, SHIFT_MAX, &from->scratch->shift);
    return status == CKD_OK ? lattice_get_factor(&c->factor, from, c->columns, c->rank,
                                                 form & COLUMNS_SYMBOLS, &from->scratch->factor)
                            : status;
}

ckd_status lattice_columns_encode(bytes *to, const lattice_columns *c, lattice_scratch *scratch,
                                  symbols_workspace *work, ckd_error *err) {
    wire_put_varint(to, c->columns);
    ckd_status status = lattice_put_columns(&(lattice_output){to, scratch, work, err}, c);
    return status == CKD_OK && to->failed ? err_nomem(err, to->size, "a lossy block") : status;
}

ckd_status lattice_columns_decode(lattice_columns *out, const void *from, size_t size,
                                  lattice_scratch *scratch, symbols_workspace *work, ckd_error *err) {
    lattice_input r = {reader_of(from, size), scratch, work, err, false};
    *out = (lattice_columns){.columns = wire_varint_max(&r.in, LATTICE_MAX_COLUMNS)};
    ckd_status status = lattice_get_columns(out, &r, LATTICE_MAX_RANK);
    return status == CKD_OK && (r.in.failed || reader_left(&r.in))
               ? err_set(err, CKD_E_CORRUPT, "a matrix's columns end in the wrong place")
               : status;
}
