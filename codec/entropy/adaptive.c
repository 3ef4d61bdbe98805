/* Adaptive streams of integers with contexts. */
#include "codec/entropy/entropy.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "codec/entropy/adaptive_coder.h"
#include "codec/entropy/adaptive_size.h"

/* ---- models ---- */

typedef struct value_models {
    adaptive_bit nonzero, negative;
    adaptive_size_models size;
    unsigned plain; /* lowest bits of a size that are not modelled */
} value_models;

typedef struct value_coder {
    adaptive_coder coder;
    adaptive_start start;
    bool ready[ADAPTIVE_CONTEXTS];
    value_models models[ADAPTIVE_CONTEXTS]; /* initialised on first use */
} value_coder;

static const adaptive_pace pace = {64, 1024};

#define SCALED_ROWS  32
#define SCALED_PLAIN 28 /* from this context on, sizes are large and their lowest bits are not modelled */
#define SCALED_SURE  30
#define SCALED_TAIL  96

/*
 * Probabilities for rounded Gaussians, in 1/256: that an integer is not zero; then, for j = 0 ... 13, that a size known
 * to be at least j is larger. Rows are contexts. In the last four rows sizes lack their `plain` lowest bits.
 */
static const uint8_t scaled[SCALED_ROWS][1 + ADAPTIVE_UNARY] = {
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {12, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {24, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {40, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {60, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {81, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {103, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {123, 18, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {141, 35, 10, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {158, 55, 24, 10, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {173, 79, 44, 23, 12, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
    {185, 102, 68, 44, 28, 18, 11, 8, 8, 8, 8, 8, 8, 8, 8},
    {196, 124, 94, 70, 51, 37, 26, 19, 13, 10, 8, 8, 8, 8, 8},
    {205, 145, 119, 97, 78, 62, 50, 39, 31, 24, 19, 15, 12, 9, 8},
    {213, 162, 142, 123, 106, 91, 77, 66, 56, 47, 40, 34, 28, 24, 20},
    {220, 177, 162, 147, 132, 119, 106, 95, 85, 76, 67, 60, 53, 47, 42},
    {226, 190, 179, 167, 155, 144, 134, 124, 114, 105, 97, 89, 82, 76, 70},
    {231, 201, 192, 184, 175, 166, 158, 149, 141, 134, 126, 119, 113, 106, 100},
    {235, 210, 204, 197, 191, 184, 178, 171, 165, 159, 152, 147, 141, 135, 130},
    {238, 218, 213, 208, 204, 199, 194, 189, 184, 179, 174, 170, 165, 161, 156},
    {241, 224, 221, 217, 214, 210, 207, 203, 199, 196, 192, 189, 185, 182, 178},
    {243, 204, 196, 187, 178, 169, 161, 152, 144, 137, 129, 122, 115, 109, 102},
    {245, 213, 206, 200, 193, 187, 180, 174, 167, 161, 155, 149, 143, 137, 132},
    {247, 220, 215, 210, 205, 201, 196, 191, 186, 181, 176, 172, 167, 162, 158},
    {248, 225, 222, 219, 215, 212, 208, 204, 201, 197, 194, 190, 186, 183, 179},
};

static void begin_even(value_models *m) {
    m->nonzero = m->negative = adaptive_bit_of(128, 0);
    m->plain = 0;
    adaptive_size_begin(&m->size, 128, 0);
}

static void begin_scaled(value_models *m, unsigned context) {
    unsigned beyond = context < SCALED_PLAIN ? 0 : (context - SCALED_PLAIN) / 4;
    const uint8_t *row = scaled[context < SCALED_ROWS ? context : SCALED_PLAIN + context % 4];
    unsigned zero = (256u - row[0]) >> beyond;
    m->nonzero = adaptive_bit_of(256 - (zero ? zero : 1), SCALED_SURE);
    m->plain = context < SCALED_PLAIN ? 0 : 1 + beyond;
    adaptive_size_begin(&m->size, SCALED_TAIL, SCALED_SURE / 4);
    for (unsigned j = 0; j < ADAPTIVE_UNARY; j++) {
        m->size.more[j] = adaptive_bit_of(row[1 + j], SCALED_SURE);
    }
}

void adaptive_scratch_free(adaptive_scratch *scratch) {
    bytes_free(&scratch->models);
    bytes_free(&scratch->tried);
}

/* NULL: out of memory. */
static value_coder *coder_of_values(adaptive_scratch *scratch, ckd_error *err) {
    value_coder *v = bytes_scratch(&scratch->models, sizeof(*v), "the models of an adaptive stream", err);
    if (v) {
        memset(v, 0, offsetof(value_coder, models));
    }
    return v;
}

static value_models *models_of(value_coder *v, const uint8_t *contexts, size_t i) {
    unsigned context = contexts ? contexts[i] % ADAPTIVE_CONTEXTS : 0;
    value_models *m = &v->models[context];
    if (!v->ready[context]) {
        v->ready[context] = true;
        if (v->start == ADAPTIVE_SCALED) {
            begin_scaled(m, context);
        } else {
            begin_even(m);
        }
    }
    return m;
}

/* ---- integers ---- */

/* Returns false if the value does not fit 32 bits (decoding). */
CPU_INLINE bool code_value(value_coder *v, bool decoding, value_models *m, int32_t *value) {
    adaptive_coder *c = &v->coder;
    if (!adaptive_code_bit(c, decoding, &m->nonzero, pace, *value != 0)) {
        *value = 0;
        return true;
    }
    unsigned negative = *value < 0;
    if (v->start == ADAPTIVE_EVEN) {
        negative = adaptive_code_bit(c, decoding, &m->negative, pace, negative);
    } else {
        negative = adaptive_code_few(c, decoding, 1, negative);
    }
    uint32_t magnitude = *value < 0 ? 0 - (uint32_t)*value : (uint32_t)*value;
    uint64_t size = adaptive_code_size(c, decoding, &m->size, pace, m->plain, magnitude - 1);
    if (decoding) {
        *value = adaptive_value(size, negative);
    }
    return size < (uint64_t)INT32_MAX + negative;
}

unsigned adaptive_context_of(double deviation) {
    double context = 16.0 + 4.0 * log2(deviation);
    if (!(context > 0)) {
        return 0;
    }
    return context < ADAPTIVE_CONTEXTS - 1 ? (unsigned)(context + 0.5) : ADAPTIVE_CONTEXTS - 1;
}

void adaptive_encode(bytes *to, adaptive_start start, const adaptive_sequence *sequence,
                     const int32_t *values, adaptive_scratch *scratch) {
    const size_t n = sequence->count;
    const uint8_t *const contexts = sequence->contexts;
    if (n == 0) {
        return;
    }
    value_coder *v = coder_of_values(scratch, NULL);
    if (!v) {
        to->failed = true;
        return;
    }
    v->start = start;
    adaptive_begin_encoding(&v->coder, to);
    adaptive_code_plain(&v->coder, false, 2, (unsigned)start);
    for (size_t i = 0; i < n; i++) {
        int32_t value = values[i];
        code_value(v, false, models_of(v, contexts, i), &value);
    }
    adaptive_end_encoding(&v->coder);
}

static ckd_status decode(value_coder *v, int32_t *values, const adaptive_sequence *sequence, const void *from,
                         size_t size, ckd_error *err) {
    const size_t n = sequence->count;
    const uint8_t *const contexts = sequence->contexts;
    adaptive_begin_decoding(&v->coder, from, size);
    unsigned kind = 0;
    ckd_status status = adaptive_check_kind(&v->coder, ADAPTIVE_EVEN, ADAPTIVE_SCALED, err, &kind);
    if (status != CKD_OK) {
        return status;
    }
    v->start = (adaptive_start)kind;
    bool good = true;
    for (size_t i = 0; i < n && good; i++) {
        values[i] = 0;
        good = code_value(v, true, models_of(v, contexts, i), &values[i]) && adaptive_sound(&v->coder);
    }
    return good && adaptive_end_decoding(&v->coder)
               ? CKD_OK
               : err_corrupt(err, NULL, CKD_NO_OFFSET, "an adaptive stream does not end where it should");
}

ckd_status adaptive_decode(int32_t *values, const adaptive_sequence *sequence, const void *from, size_t size,
                           adaptive_scratch *scratch, ckd_error *err) {
    if (sequence->count == 0) {
        return adaptive_check_empty(size, err);
    }
    value_coder *v = coder_of_values(scratch, err);
    ckd_status status = v ? decode(v, values, sequence, from, size, err) : CKD_E_NOMEM;
    if (status != CKD_OK) {
        memset(values, 0, sequence->count * sizeof(*values));
    }
    return status;
}
