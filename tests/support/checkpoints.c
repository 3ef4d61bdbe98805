#include "tests/support/checkpoints.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/common/common.h"

static uint64_t next_random(uint64_t *state) { /* splitmix64 (Steele, Lea, Flood 2014) */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

ckd_store *store_reopen(const char *dir, ckd_open_mode mode) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", dir);
    ckd_store *store;
    ckd_error err = {0};
    if (ckd_store_open(&store, path, mode, NULL, &err) != CKD_OK) {
        fail_msg("open: %s (%s)", err.message, err.file);
    }
    return store;
}

ckd_store *store_create(const char *dir) {
    return store_reopen(dir, CKD_OPEN_CREATE);
}

void *random_bits(uint64_t count, unsigned seed) {
    uint64_t state = seed * 7919u + 1;
    uint8_t *out = malloc(count + 8);
    assert_non_null(out);
    for (uint64_t i = 0; i < count; i += 8) {
        uint64_t z = next_random(&state);
        memcpy(out + i, &z, 8);
    }
    return out;
}

static double normal(uint64_t *state) {
    double u = ((double)(next_random(state) >> 11) + 1) / 9007199254740994.0;
    double v = (double)(next_random(state) >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Clears the top bit of the exponent of a NaN or an infinity of 8 or 16 bits. */
static void make_finite(ckd_dtype dtype, uint8_t *value) {
    uint8_t *top = value + ckd_dtype_size(dtype) - 1;
    bool special = dtype == CKD_BF16      ? (*top & 0x7f) == 0x7f && *value >= 0x80
                   : dtype == CKD_F8_E4M3 ? (*top & 0x7f) == 0x7f
                                          : (*top & 0x7c) == 0x7c;
    *top = special ? *top & 0xbf : *top;
}

void *random_values(ckd_dtype dtype, uint64_t count, unsigned seed) {
    size_t size = ckd_dtype_size(dtype);
    uint8_t *out = random_bits(count * size, seed);
    uint64_t state = seed + 99u;
    for (uint64_t i = 0; i < count; i++) {
        if (dtype == CKD_F32) {
            float f = (float)(0.02 * (1 + (double)(i / 256 % 7)) * normal(&state));
            memcpy(out + i * 4, &f, 4);
        } else if (dtype == CKD_F64) {
            double f = 0.02 * normal(&state);
            memcpy(out + i * 8, &f, 8);
        } else if (dtype < CKD_I64) {
            make_finite(dtype, out + i * size);
        } else {
            memset(out + i * size, 0, size);
            out[i * size] = (uint8_t)(next_random(&state) % (dtype == CKD_BOOL ? 2 : 50));
        }
    }
    return out;
}

void change_values(ckd_dtype dtype, void *values, uint64_t count, unsigned seed) {
    size_t size = ckd_dtype_size(dtype);
    uint64_t state = seed + 12345u;
    for (uint64_t i = 0; i < count; i++) {
        uint8_t *p = (uint8_t *)values + i * size;
        uint64_t z = next_random(&state);
        if (dtype == CKD_F32 || dtype == CKD_F64) {
            p[0] = (uint8_t)(p[0] + z % 255);
            p[1] = (uint8_t)(p[1] ^ (z >> 8) % 16);
        } else if (dtype == CKD_BOOL) {
            p[0] ^= z % 20 == 0;
        } else {
            p[0] = (uint8_t)(p[0] + (z % 8 == 0));
        }
        if (dtype >= CKD_F16 && dtype < CKD_I64) {
            make_finite(dtype, p);
        }
    }
}

uint16_t *round_to_bf16(const float *values, uint64_t count) {
    uint16_t *out = malloc(count * 2);
    assert_non_null(out);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        out[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return out;
}

ckd_save_options options_of(const char *run, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    return o;
}

ckd_save *begin_with(ckd_store *store, const ckd_save_options *o) {
    ckd_save *save;
    ckd_error err = {0};
    if (ckd_save_begin(&save, store, o, &err) != CKD_OK) {
        fail_msg("begin: %s (%s)", err.message, err.file);
    }
    return save;
}

ckd_save *begin_save(ckd_store *store, const char *run, uint64_t step) {
    ckd_save_options o = options_of(run, step);
    return begin_with(store, &o);
}

void add_tensor(ckd_save *save, const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                const ckd_region *region, const void *data) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = dtype;
    t.ndim = ndim;
    t.shape = shape;
    t.data = data;
    if (region) {
        t.region = *region;
    }
    ckd_error err = {0};
    if (ckd_save_tensor(save, &t, &err) != CKD_OK) {
        fail_msg("save %s: %s (%s at %llu)", name, err.message, err.file, (unsigned long long)err.offset);
    }
}

static ckd_checkpoint commit(ckd_save *save) {
    ckd_checkpoint info;
    ckd_error err = {0};
    if (ckd_save_commit(&info, save, &err) != CKD_OK) {
        fail_msg("commit: %s (%s, tensor %s)", err.message, err.file, err.tensor);
    }
    return info;
}

ckd_checkpoint save_one(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                        uint32_t ndim, const uint64_t *shape, const void *data) {
    ckd_save *save = begin_save(store, run, step);
    add_tensor(save, name, dtype, ndim, shape, NULL, data);
    return commit(save);
}

/* Gathers the region's elements from the whole tensor; malloc'ed. */
static float *gather(const geometry *g, const ckd_region *r, const float *values, uint64_t *count) {
    assert_true(region_count(count, g, r));
    float *out = malloc(*count * 4 + 4);
    assert_non_null(out);
    for (uint64_t i = 0; i < *count; i++) {
        out[i] = values[region_global(g, r, i)];
    }
    return out;
}

static void region_job(ckd_save *save, const char *name, const geometry *g, const ckd_region *r,
                       const float *values) {
    uint64_t count;
    float *slice = gather(g, r, values, &count);
    add_tensor(save, name, CKD_F32, g->ndim, g->shape, r, slice);
    free(slice);
}

void save_sharded(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                  const uint64_t *shape, const float *values, uint64_t layout) {
    geometry g;
    assert_true(geometry_init(&g, ndim, shape));
    ckd_save *save = begin_save(store, run, step);
    for (uint64_t part = 0; part < 4; part++) {
        ckd_region r = {.kind = CKD_REGION_BOX};
        memcpy(r.lengths, shape, ndim * sizeof(*shape));
        if (layout % 3 == 0) { /* split the flat range in quarters */
            r = (ckd_region){.kind = CKD_REGION_FLAT, .start = g.elements * part / 4};
            r.count = g.elements * (part + 1) / 4 - r.start;
        } else { /* split into slabs of the last dimension, or a grid of the last two */
            uint32_t last = ndim - 1;
            uint64_t slices = layout % 3 == 1 ? 4 : 2, at = part % slices;
            r.offsets[last] = shape[last] * at / slices;
            r.lengths[last] = shape[last] * (at + 1) / slices - r.offsets[last];
            if (slices == 2) {
                r.offsets[last - 1] = shape[last - 1] * (part / 2) / 2;
                r.lengths[last - 1] = shape[last - 1] * (part / 2 + 1) / 2 - r.offsets[last - 1];
            }
        }
        region_job(save, name, &g, &r, values);
    }
    commit(save);
}

static ckd_load *begin_load(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint found;
    ckd_error err = {0};
    ckd_load *load = NULL;
    if (ckd_store_find(&found, store, run, step, &err) != CKD_OK ||
        ckd_load_begin(&load, store, &found.id, &err) != CKD_OK) {
        fail_msg("load of %s@%llu: %s (%s)", run, (unsigned long long)step, err.message, err.file);
    }
    return load;
}

static void load_region(ckd_load *load, const char *name, const ckd_region *region, void *to, size_t size) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.region = *region;
    q.data = to;
    q.size = size;
    ckd_error err = {0};
    if (ckd_load_tensor(load, &q, &err) != CKD_OK) {
        fail_msg("load %s: %s (%s at %llu)", name, err.message, err.file, (unsigned long long)err.offset);
    }
}

void *load_whole(ckd_store *store, const char *run, uint64_t step, const char *name, size_t size) {
    ckd_load *load = begin_load(store, run, step);
    void *to = malloc(size + 1);
    assert_non_null(to);
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    load_region(load, name, &whole, to, size);
    ckd_load_end(load);
    return to;
}

void check_random_region(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                         const uint64_t *shape, const float *values, unsigned seed) {
    uint64_t state = seed + 4242u, count;
    geometry g;
    assert_true(geometry_init(&g, ndim, shape));
    ckd_region r = {.kind = next_random(&state) % 3 ? CKD_REGION_BOX : CKD_REGION_FLAT};
    if (r.kind == CKD_REGION_FLAT) {
        r.start = next_random(&state) % g.elements;
        r.count = next_random(&state) % (g.elements - r.start + 1);
    }
    for (uint32_t d = 0; d < ndim && r.kind == CKD_REGION_BOX; d++) {
        r.offsets[d] = next_random(&state) % shape[d];
        r.lengths[d] = 1 + next_random(&state) % (shape[d] - r.offsets[d]);
    }
    float *expected = gather(&g, &r, values, &count);
    float *back = malloc(count * 4 + 4);
    assert_non_null(back);
    ckd_load *load = begin_load(store, run, step);
    load_region(load, name, &r, back, count * 4);
    ckd_load_end(load);
    assert_memory_equal(back, expected, count * 4);
    free(back);
    free(expected);
}

size_t verify_damage(ckd_store *store) {
    ckd_verify_result *result;
    ckd_error err = {0};
    if (ckd_store_verify(&result, store, NULL, &err) != CKD_OK) {
        fail_msg("verify: %s (%s)", err.message, err.file);
    }
    size_t count = result->damage_count;
    ckd_verify_result_free(result);
    return count;
}
