/*
 * Codes the values of a lossy checkpoint again, without another loss. recode.c calls compact_lattice.
 *
 * Values of lossy chains lie on a lattice whose spacing is a power of two. They are stored exactly as integers of this
 * lattice, and so are differences to any other values of the chain. The format's linear map with a step of one unit is
 * then lossless. Each payload is decoded again and compared, and values that are off the lattice are stored verbatim.
 */
#include <math.h>
#include <string.h>

#include "engine/compact/internal.h"
#include "kernels/scalar_lattice.h"

#define LOWEST       (-149) /* exponent of the lowest bit of a float */
#define EXPONENTS    (128 - LOWEST)
#define UNITS_MAX    (1 << 24) /* with larger integers, every float would lie on the lattice */
#define STRAY_MAX    64        /* one in this many values may be off the lattice; it becomes an exception */
#define EXPONENT_MIN (-120)    /* range of exponents in the format */
#define EXPONENT_MAX 120

/* ---- the spacing ---- */

static bool is_ordinary(uint32_t bits) {
    return (bits << 1) != 0 && (bits >> 23 & 0xff) != 0xff;
}

/* The exponent of the lowest bit that is set. */
static int lowest_exponent(uint32_t bits) {
    uint32_t exponent = bits >> 23 & 0xff, mantissa = bits & 0x7fffff;
    mantissa |= exponent ? 0x800000 : 0;
    return (int)(exponent ? exponent : 1) - 150 + __builtin_ctz(mantissa);
}

/* Finds the lattice's spacing. At most one in STRAY_MAX values is finer. */
static int find_spacing(const float *values, uint64_t n) {
    uint32_t count[EXPONENTS] = {0};
    uint64_t below = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = scalar_bits(values[i]);
        if (is_ordinary(bits)) {
            count[lowest_exponent(bits) - LOWEST]++;
        }
    }
    for (int e = 0; e < EXPONENTS; e++) {
        below += count[e];
        if (below > n / STRAY_MAX) {
            return e + LOWEST;
        }
    }
    return below ? EXPONENT_MIN - 1 : 0; /* nearly all values are zero: not worth coding as a lattice */
}

/* ---- integers ---- */

/* Is the value on the lattice? Zero is, -0 is not. */
static bool units_of(int32_t *q, float value, int spacing, float per_unit) {
    uint32_t bits = scalar_bits(value);
    *q = 0;
    if (!is_ordinary(bits)) {
        return bits == 0;
    }
    if (lowest_exponent(bits) < spacing) {
        return false;
    }
    float units = value * per_unit;
    if (!(fabsf(units) < (float)UNITS_MAX)) {
        return false;
    }
    *q = (int32_t)units;
    return true;
}

/* Values that are off the lattice. */
typedef struct strays {
    bytes *at, *bits;
    const lattice_try *of;
} strays;

static void add_stray(strays *s, uint64_t i) {
    uint32_t bits = 0;
    size_t size = ckd_dtype_size(s->of->dtype);
    memcpy(&bits, (const uint8_t *)s->of->values + i * size, size);
    uint32_t at = (uint32_t)i;
    bytes_put(s->at, &at, sizeof(at));
    bytes_put(s->bits, &bits, sizeof(bits));
}

/* A block's values, and the lattice on which they lie. */
typedef struct lattice_floats {
    const float *now;
    const float *base_values; /* NULL: zeros */
    int spacing;              /* exponent */
} lattice_floats;

/* q: integers of the values, minus those of `base_values`. Returns false if too many values are off the lattice. */
static bool integers(int32_t *q, strays *s, const lattice_try *t, const lattice_floats *f) {
    const float *now = f->now, *base_values = f->base_values;
    int spacing = f->spacing;
    uint64_t count = 0;
    float per_unit = ldexpf(1, -spacing);
    for (uint64_t i = 0; i < t->count; i++) {
        int32_t old = base_values ? scalar_units(base_values[i] * per_unit) : 0;
        bool on_lattice = units_of(&q[i], now[i], spacing, per_unit);
        q[i] = on_lattice ? q[i] - old : 0;
        /* For a zero difference a decoder returns the bits of `base_values`, which may be off the lattice. */
        if (!on_lattice || (base_values && q[i] == 0 && scalar_bits(base_values[i]) != scalar_bits(now[i]))) {
            q[i] = 0;
            add_stray(s, i);
            count++;
        }
    }
    return count <= t->count / STRAY_MAX && !s->at->failed && !s->bits->failed;
}

/* ---- payloads ---- */

static ckd_status check(bool *good, const lattice_try *t, const bytes *payload, compact_worker *w,
                        ckd_error *err) {
    size_t raw = t->count * ckd_dtype_size(t->dtype);
    void *to = bytes_scratch(&w->check, raw + 1, "coding scratch", err);
    lattice_block b;
    if (!to) {
        return CKD_E_NOMEM;
    }
    if (t->base_values && payload == &w->delta) {
        memcpy(to, t->base_values, raw);
    }
    const lattice_target target = {to, t->dtype, payload == &w->delta};
    ckd_error why = {0};
    ckd_status status =
        lattice_decode(&b, &(lattice_payload){payload->data, payload->size, t->count, NULL, NULL, false},
                       &w->lattice.scratch, coder_symbols(w->job.decoder.coder), &why);
    THEN(status, lattice_rebuild_values(&target, &b, &w->lattice, w->job.decoder.kernels, &why));
    *good = status == CKD_OK && memcmp(to, t->values, raw) == 0;
    return err_except(err, status, CKD_E_CORRUPT, &why);
}

/* *possible is false if these values cannot be stored as integers. */
static ckd_status encode(bool *possible, bytes *payload, const lattice_try *t, const lattice_floats *f,
                         compact_worker *w, ckd_error *err) {
    strays s = {&w->at, &w->bits, t};
    bytes_clear(&w->at);
    bytes_clear(&w->bits);
    int32_t *q = bytes_scratch(&w->q, t->count * sizeof(int32_t) + 1, "coding scratch", err);
    *possible = false;
    if (!q) {
        return CKD_E_NOMEM;
    }
    if (!integers(q, &s, t, f)) {
        return CKD_OK;
    }
    lattice_block b = {.map = LATTICE_LINEAR,
                       .count = t->count,
                       .columns = t->small ? t->grid.columns : t->count,
                       .phase = t->small ? t->grid.phase : 0,
                       .exponent = f->spacing,
                       .q = q,
                       .exceptions = (uint32_t)(w->at.size / sizeof(uint32_t)),
                       .exception_at = (const uint32_t *)(const void *)w->at.data,
                       .exception_bits = (const uint32_t *)(const void *)w->bits.data};
    bytes_clear(payload);
    ckd_status status = lattice_encode(payload, &b, t->small ? LATTICE_SMALL : LATTICE_FAST,
                                       &w->lattice.scratch, coder_symbols(w->job.decoder.coder), err);
    return status == CKD_OK ? check(possible, t, payload, w, err) : status;
}

/* Widens the values to floats in `scratch`. NULL: out of memory. */
static const float *floats_of(bytes *scratch, const void *values, const lattice_try *t, const kernels *k,
                              ckd_error *err) {
    float *to = bytes_scratch(scratch, t->count * sizeof(float) + 1, "coding scratch", err);
    if (to) {
        k->widen(to, t->dtype, values, t->count);
    }
    return to;
}

ckd_status compact_lattice(lattice_try *t, compact_worker *w, ckd_error *err) {
    const kernels *k = w->job.decoder.kernels;
    t->standalone_possible = t->delta_possible = false;
    if (!lattice_dtype(t->dtype) || t->count == 0) {
        return CKD_OK;
    }
    lattice_floats f = {.now = floats_of(&w->now_floats, t->values, t, k, err)};
    if (!f.now) {
        return CKD_E_NOMEM;
    }
    f.spacing = find_spacing(f.now, t->count);
    if (f.spacing < EXPONENT_MIN || f.spacing > EXPONENT_MAX) {
        return CKD_OK;
    }
    ckd_status status = encode(&t->standalone_possible, &w->standalone, t, &f, w, err);
    if (status != CKD_OK || !t->base_values) {
        return status;
    }
    f.base_values = floats_of(&w->base_floats, t->base_values, t, k, err);
    return f.base_values ? encode(&t->delta_possible, &w->delta, t, &f, w, err) : CKD_E_NOMEM;
}
