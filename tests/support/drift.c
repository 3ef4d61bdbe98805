#include "tests/support/drift.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"

enum { RANK = 3 };

static double uniform(uint64_t *random) {
    uint64_t z = *random += 0x9e3779b97f4a7c15u; /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

double drift_normal(uint64_t *random) {
    double radius = sqrt(-2 * log(uniform(random)));
    return radius * cos(6.283185307179586 * uniform(random));
}

static float *floats(uint64_t count) {
    float *out = calloc(count + 1, sizeof(float));
    assert_non_null(out);
    return out;
}

drift drift_new(uint64_t rows, uint64_t columns, unsigned seed) {
    drift d = {rows, columns, rows * columns, NULL, NULL, NULL, NULL, seed * 1000003u + 17};
    d.weight = floats(d.count);
    d.first = floats(d.count);
    d.second = floats(d.count);
    d.usual = floats(d.count);
    double scale = 1;
    for (uint64_t i = 0; i < d.count; i++) {
        scale = i % columns == 0 ? exp(drift_normal(&d.random)) : scale;
        double a = drift_normal(&d.random), b = drift_normal(&d.random);
        d.weight[i] = (float)(0.02 * drift_normal(&d.random));
        d.first[i] = (float)(1e-4 * scale * drift_normal(&d.random));
        d.second[i] = d.usual[i] = (float)(1e-8 * scale * scale * (a * a + b * b));
    }
    return d;
}

void drift_step(drift *d) {
    float *factors = floats((d->rows + d->columns) * RANK);
    for (uint64_t i = 0; i < (d->rows + d->columns) * RANK; i++) {
        factors[i] = (float)drift_normal(&d->random);
    }
    for (uint64_t i = 0; i < d->count; i++) {
        const float *row = factors + i / d->columns * RANK,
                    *column = factors + (d->rows + i % d->columns) * RANK;
        double low = 0, size = sqrt(d->usual[i]);
        for (int k = 0; k < RANK; k++) {
            low += row[k] * column[k];
        }
        d->weight[i] += (float)(2e-4 * low + 1e-4 * drift_normal(&d->random));
        d->first[i] = (float)(d->first[i] / 3 + size * drift_normal(&d->random));
        d->second[i] = (float)(0.9 * d->second[i] + 0.1 * d->usual[i] * exp(0.5 * drift_normal(&d->random)));
    }
    free(factors);
}

void drift_free(drift *d) {
    free(d->weight);
    free(d->first);
    free(d->second);
    free(d->usual);
    *d = (drift){0};
}

ckd_save_options lossy_options(const char *run, uint64_t step, ckd_fidelity fidelity) {
    ckd_save_options o = options_of(run, step);
    o.fidelity = fidelity;
    return o;
}

void add_drift(ckd_save *save, const char *name, const drift *d) {
    char moment[128];
    uint64_t shape[2] = {d->rows, d->columns};
    snprintf(moment, sizeof(moment), "exp_avg_sq.%s", name);
    add_tensor(save, moment, CKD_F32, 2, shape, NULL, d->second);
    snprintf(moment, sizeof(moment), "exp_avg.%s", name);
    add_tensor(save, moment, CKD_F32, 2, shape, NULL, d->first);
    add_tensor(save, name, CKD_F32, 2, shape, NULL, d->weight);
}

ckd_checkpoint commit_save(ckd_save *save) {
    ckd_checkpoint info;
    ckd_error err = {0};
    if (ckd_save_commit(&info, save, &err) != CKD_OK) {
        fail_msg("commit: %s (%s, tensor %s)", err.message, err.file, err.tensor);
    }
    return info;
}

ckd_checkpoint save_drift(ckd_store *store, const ckd_save_options *o, const drift *d) {
    ckd_save *save = begin_with(store, o);
    add_drift(save, "w", d);
    return commit_save(save);
}

void widen_to(float *out, const void *values, ckd_dtype dtype, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = 0;
        uint32_t bits = 0;
        if (dtype == CKD_F32) {
            memcpy(&bits, (const uint8_t *)values + 4 * i, 4);
        } else {
            memcpy(&half, (const uint8_t *)values + 2 * i, 2);
            bits = (uint32_t)half << 16;
        }
        memcpy(&out[i], &bits, 4);
        if (dtype == CKD_F16) {
            int exponent = half >> 10 & 31, mantissa = half & 1023;
            double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                         : ldexp(mantissa, -24);
            out[i] = (float)(half & 0x8000 ? -size : size);
        }
    }
}

static uint16_t to_f16(float value) {
    double size = fabs((double)value);
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) {
        return (uint16_t)(sign | 0x7e00);
    }
    int exponent = size > 0 ? ilogb(size) : -15;
    exponent = exponent < -14 ? -14 : exponent;
    double units = nearbyint(ldexp(size, 10 - exponent)); /* in units of the last place */
    double bits = units + (exponent + 14) * 1024.0;
    return (uint16_t)(sign | (bits < 0x7c00 ? (uint16_t)bits : 0x7c00));
}

void *to_dtype(const float *values, ckd_dtype dtype, uint64_t count) {
    if (dtype == CKD_BF16) {
        return round_to_bf16(values, count);
    }
    void *out = calloc(count + 1, 8);
    assert_non_null(out);
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = to_f16(values[i]);
        double wide = values[i];
        if (dtype == CKD_F64) {
            memcpy((uint8_t *)out + 8 * i, &wide, 8);
        } else if (dtype == CKD_F16) {
            memcpy((uint8_t *)out + 2 * i, &half, 2);
        } else {
            memcpy((uint8_t *)out + 4 * i, &values[i], 4);
        }
    }
    return out;
}

float *load_floats(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                   uint64_t count) {
    void *raw = load_whole(store, run, step, name, count * ckd_dtype_size(dtype));
    float *out = floats(count);
    widen_to(out, raw, dtype, count);
    free(raw);
    return out;
}

double relative_error(const float *got, const float *wanted, uint64_t count) {
    double error = 0, all = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(wanted[i])) {
            double e = (double)got[i] - wanted[i];
            error += e * e;
            all += (double)wanted[i] * wanted[i];
        }
    }
    return error == 0 ? 0 : sqrt(error / all);
}

double largest_error(const float *got, const float *wanted, uint64_t count) {
    double largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        double e = fabs((double)got[i] - wanted[i]);
        largest = isfinite(wanted[i]) && !(e <= largest) ? e : largest;
    }
    return largest;
}

double root_mean_square(const float *values, uint64_t count) {
    double all = 0, n = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(values[i])) {
            all += (double)values[i] * values[i];
            n++;
        }
    }
    return n > 0 ? sqrt(all / n) : 0;
}

ckd_checkpoint checkpoint_at(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint found;
    ckd_error err = {0};
    if (ckd_store_find(&found, store, run, step, &err) != CKD_OK) {
        fail_msg("find %s@%llu: %s", run, (unsigned long long)step, err.message);
    }
    return found;
}

ckd_tensor_info tensor_info(ckd_store *store, const char *run, uint64_t step, const char *name) {
    ckd_checkpoint c = checkpoint_at(store, run, step);
    ckd_tensor_list *list;
    assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
    ckd_tensor_info found = {0};
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->items[i].name, name) == 0) {
            found = list->items[i];
        }
    }
    if (!found.name) {
        fail_msg("no tensor %s", name);
    }
    found.name = name;
    /* The list owns the text, so return a constant. */
    found.method = strcmp(found.method, "same") == 0         ? "same"
                   : strcmp(found.method, "copy") == 0       ? "copy"
                   : strcmp(found.method, "cast") == 0       ? "cast"
                   : strcmp(found.method, "delta") == 0      ? "delta"
                   : strcmp(found.method, "standalone") == 0 ? "standalone"
                                                             : "other";
    ckd_tensor_list_free(list);
    return found;
}
