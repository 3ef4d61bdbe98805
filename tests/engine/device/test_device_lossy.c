/*
 * Lossy tensors in device memory. They are coded on the device, with the result that coding in host memory would have,
 * and little data crosses the bus. The device is emulated; tests/engine/device/test_cuda_lossy.c includes this file
 * for a real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "engine/device/device.h"
#include "engine/save/save.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

/* ---- lossy tiles ---- */

enum { SIDE = 640, LAYER = SIDE * SIDE, OF_LAYER = 3 };
static const char *const layer_names[OF_LAYER] = {"exp_avg_sq.w", "exp_avg.w", "w"};

/*
 * A step that resembles training: weights move in a few directions, and a little in all others. Moments are new in
 * each step.
 */
static void train(float *const layer[OF_LAYER], unsigned step) {
    float *noise = random_values(CKD_F32, LAYER, 100 + step),
          *sides = random_values(CKD_F32, 8 * SIDE, 200 + step);
    float *moments = random_values(CKD_F32, LAYER, 300 + step);
    for (uint64_t i = 0; i < LAYER; i++) {
        float low = 0;
        for (unsigned k = 0; k < 4; k++) {
            low += sides[k * SIDE + i / SIDE] * sides[(4 + k) * SIDE + i % SIDE];
        }
        /* Low-rank factors cannot express this. */
        float alone = fabsf(noise[i]) > 0.05f ? 0.2f * noise[i] : 0;
        layer[2][i] += 0.3f * low + 0.003f * noise[i] + alone;
        layer[1][i] = (low + 0.1f * moments[i]) * 1e-3f;
        layer[0][i] =
            (1 + (float)(i % SIDE % 7)) * (1 + (float)(i / SIDE % 5)) * (1 + moments[i] * moments[i]) * 1e-6f;
    }
    free(noise);
    free(sides);
    free(moments);
}

/*
 * A tensor of a saved state. sent, got: bytes that its save copies to the device and to the host; largest: the largest
 * copy to the host.
 */
typedef struct lossy_tensor {
    const char *name;
    ckd_dtype dtype;
    const void *values;
    uint64_t sent, got, largest;
} lossy_tensor;

static ckd_status save_lossy_one(ckd_save *save, lossy_tensor *t, const ckd_device *device, ckd_error *err) {
    static const uint64_t shape[2] = {SIDE, SIDE};
    void *there = device ? to_device(t->values, LAYER * ckd_dtype_size(t->dtype)) : NULL;
    ckd_tensor one = CKD_TENSOR_INIT;
    one.name = t->name;
    one.dtype = t->dtype;
    one.ndim = 2;
    one.shape = shape;
    one.data = device ? there : t->values;
    one.device = device;
    uint64_t sent = emulated_copied[DEVICE_TO_DEVICE], got = emulated_copied[DEVICE_TO_HOST],
             largest = emulated_largest;
    emulated_largest = 0;
    ckd_status status = ckd_save_tensor(save, &one, err);
    t->sent = emulated_copied[DEVICE_TO_DEVICE] - sent;
    t->got = emulated_copied[DEVICE_TO_HOST] - got;
    t->largest = emulated_largest;
    emulated_largest = t->largest > largest ? t->largest : largest;
    backend->release(0, there);
    return status;
}

static ckd_status save_lossy_state(ckd_store *store, const char *run, uint64_t step, ckd_fidelity fidelity,
                                   lossy_tensor *t, unsigned count, const ckd_device *device, bool cells) {
    ckd_error err;
    ckd_save_options o = options_of(run, step);
    o.fidelity = fidelity;
    ckd_save *save = begin_with(store, &o);
    ckd_status status = CKD_OK;
    if (cells) {
        save->coding.grid = (save_grid){
            .row_sides = {96, 16, 64}, .column_sides = {128, 16, 101}, .elements = 4096, .columns = 64};
    }
    for (unsigned i = 0; i < count && status == CKD_OK; i++) {
        status = save_lossy_one(save, &t[i], device, &err);
    }
    if (status != CKD_OK) {
        ckd_save_abort(save);
        return status;
    }
    return ckd_save_commit(NULL, save, &err);
}

static ckd_status save_layer(ckd_store *store, const char *run, uint64_t step, ckd_fidelity fidelity,
                             ckd_dtype dtype, float *const layer[OF_LAYER], const ckd_device *device,
                             bool cells) {
    lossy_tensor t[OF_LAYER];
    void *half[OF_LAYER] = {NULL};
    for (int i = 0; i < OF_LAYER; i++) {
        half[i] = dtype == CKD_BF16 && i ? round_to_bf16(layer[i], LAYER) : NULL;
        t[i] = (lossy_tensor){
            layer_names[i], half[i] ? CKD_BF16 : CKD_F32, half[i] ? half[i] : layer[i], 0, 0, 0};
    }
    ckd_status status = save_lossy_state(store, run, step, fidelity, t, OF_LAYER, device, cells);
    for (int i = 0; i < OF_LAYER; i++) {
        free(half[i]);
    }
    return status;
}

enum { MOST_TENSORS = 4 };
typedef struct figures {
    double rel_l2[MOST_TENSORS], direction;
    double update_given, update; /* of both moments */
    uint64_t stored[MOST_TENSORS];
} figures;

static figures figures_of(ckd_store *store, const char *run, uint64_t step, unsigned count) {
    figures f = {.direction = 0};
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err;
    assert_int_equal(ckd_store_find(&c, store, run, step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    const ckd_tensor_list *all = ckd_load_tensors(load);
    assert_int_equal(all->count, count);
    for (unsigned i = 0; i < count; i++) {
        f.rel_l2[i] = all->items[i].rel_l2;
        f.stored[i] = all->items[i].stored_bytes;
    }
    f.direction = count > 1 ? all->items[1].direction_change : 0;
    f.update_given = count > 1 ? all->items[1].largest_update_given : 0;
    f.update = count > 1 ? all->items[1].largest_update : 0;
    ckd_load_end(load);
    return f;
}

static bool near_by(double a, double b, double share) {
    return fabs(a - b) <= share * fabs(b);
}

/*
 * Saves from the device have the errors and sizes of saves from host memory, except for the rounding of sums. Only
 * integers and sums leave the device.
 */
static void compare_lossy(ckd_store *store, ckd_fidelity fidelity, ckd_dtype dtype, bool cells) {
    float *layer[OF_LAYER];
    char host[32], device[32];
    snprintf(host, sizeof(host), "host-%d-%d-%d", (int)fidelity, (int)dtype, cells);
    snprintf(device, sizeof(device), "device-%d-%d-%d", (int)fidelity, (int)dtype, cells);
    for (int i = 0; i < OF_LAYER; i++) {
        layer[i] = random_values(CKD_F32, LAYER, 50 + (unsigned)i);
    }
    for (unsigned step = 0; step < 4; step++) {
        train(layer, step);
        assert_int_equal(save_layer(store, host, step, fidelity, dtype, layer, NULL, cells), CKD_OK);
        emulated_largest = 0;
        assert_int_equal(save_layer(store, device, step, fidelity, dtype, layer, &on_device, cells), CKD_OK);
        uint64_t smallest = LAYER * (dtype == CKD_BF16 ? 2 : 4);
        figures a = figures_of(store, host, step, OF_LAYER), b = figures_of(store, device, step, OF_LAYER);
        assert_true(step == 0 ||
                    emulated_largest < smallest); /* the first weights have no parent and are read */
        for (int i = 0; i < OF_LAYER; i++) {
            assert_true(near_by(b.rel_l2[i], a.rel_l2[i], 0.02));
            assert_true(near_by((double)b.stored[i], (double)a.stored[i], 0.03));
        }
        assert_true(near_by(b.direction, a.direction, 0.02));
        assert_true(a.update_given > 0 && near_by(b.update_given, a.update_given, 1e-12));
        assert_true(near_by(b.update, a.update, 0.02) && b.update <= 2 * a.update_given);
    }
    for (int i = 0; i < OF_LAYER; i++) {
        free(layer[i]);
    }
}

typedef struct state_kind {
    ckd_fidelity fidelity;
    ckd_dtype dtype;
    bool cells;
} state_kind;

static void test_lossy_tiles(void **state) {
    ckd_store *store = store_create(*state);
    static const state_kind kinds[] = {{CKD_COARSE, CKD_F32, false},
                                       {CKD_COARSE, CKD_F32, true},
                                       {CKD_NEAR, CKD_F32, true},
                                       {CKD_COARSE, CKD_BF16, true}};
    for (unsigned i = 0; i < 4; i++) {
        if (test_draws("lossy tiles", i, 2)) {
            compare_lossy(store, kinds[i].fidelity, kinds[i].dtype, kinds[i].cells);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- second moments that row and column scales describe badly ---- */

/* Some rows hardly ever have a gradient, some never. Zeros of both signs occur. */
static float *odd_seconds(unsigned seed) {
    float *values = random_values(CKD_F32, LAYER, seed);
    for (uint64_t i = 0; i < LAYER; i++) {
        float by = (float)((i * UINT64_C(0x9e3779b97f4a7c15)) >> 40) / 16777216;
        values[i] = (values[i] * values[i] + 0.1f) * exp2f(-12 * by);
        values[i] = by > 0.99f ? 0.0f : values[i];
    }
    memset(values + 5 * SIDE, 0, 3 * SIDE * sizeof(float));
    values[77] = -0.0f;
    return values;
}

static void compare_seconds(ckd_store *store, ckd_fidelity fidelity, ckd_dtype dtype, bool cells) {
    float *values = odd_seconds(7 + (unsigned)fidelity);
    void *half = dtype == CKD_BF16 ? round_to_bf16(values, LAYER) : NULL;
    size_t size = LAYER * ckd_dtype_size(dtype);
    figures f[2];
    void *loaded[2];
    lossy_tensor t = {"exp_avg_sq.w", dtype, half ? half : values, 0, 0, 0};
    for (int device = 0; device < 2; device++) {
        char run[32];
        snprintf(run, sizeof(run), "%d-%d-%d-%d", device, (int)fidelity, (int)dtype, cells);
        const ckd_device *on = device ? &on_device : NULL;
        assert_int_equal(save_lossy_state(store, run, 1, fidelity, &t, 1, on, cells), CKD_OK);
        f[device] = figures_of(store, run, 1, 1);
        loaded[device] = load_whole(store, run, 1, t.name, size);
    }
    /*
     * One byte per element, if many are neither 0 nor 1; and, for the other moment, the upper halves of values in
     * slices.
     */
    assert_true(backend != emulated_device() || t.largest < 2 * LAYER);
    assert_true(near_by(f[1].rel_l2[0], f[0].rel_l2[0], 0.001));
    assert_true(near_by((double)f[1].stored[0], (double)f[0].stored[0], 0.01));
    uint64_t other = 0; /* the levels of rows and columns are rounded from sums */
    for (size_t i = 0; i < size; i++) {
        other += ((uint8_t *)loaded[0])[i] != ((uint8_t *)loaded[1])[i];
    }
    assert_true(other <= size / 100);
    free(loaded[0]);
    free(loaded[1]);
    free(values);
    free(half);
}

static void test_second_moments(void **state) {
    ckd_store *store = store_create(*state);
    compare_seconds(store, CKD_NEAR, CKD_F32, false);
    compare_seconds(store, CKD_NEAR, CKD_BF16, true);
    compare_seconds(store, CKD_COARSE, CKD_F32, true);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- masters and their rounded copies ---- */

/*
 * The tensors of a layer. Returns the weights in a narrower dtype, which the caller frees. With `off`, one element
 * differs from the rounded master.
 */
static void *mixed_state(lossy_tensor t[MOST_TENSORS], float *const layer[OF_LAYER], ckd_dtype dtype,
                         bool off) {
    uint16_t *copy = malloc(LAYER * sizeof(*copy));
    assert_non_null(copy);
    kernels_cpu()->cast(dtype, copy, CKD_F32, layer[2], LAYER);
    copy[LAYER / 2] += off;
    for (int i = 0; i < OF_LAYER; i++) {
        t[i] = (lossy_tensor){i == 2 ? "master.w" : layer_names[i], CKD_F32, layer[i], 0, 0, 0};
    }
    t[OF_LAYER] = (lossy_tensor){"w", dtype, copy, 0, 0, 0};
    return copy;
}

/* The loaded copy must be the loaded master, rounded. */
static void is_rounded(ckd_store *store, const char *run, uint64_t step, ckd_dtype dtype) {
    uint16_t *copy = load_whole(store, run, step, "w", LAYER * sizeof(*copy)), *rounded = malloc(LAYER * 2);
    float *master = load_whole(store, run, step, "master.w", LAYER * sizeof(float));
    assert_non_null(rounded);
    kernels_cpu()->cast(dtype, rounded, CKD_F32, master, LAYER);
    assert_memory_equal(copy, rounded, LAYER * 2);
    free(copy);
    free(rounded);
    free(master);
}

/* Of the copy, only hashes are copied from the device, and nothing to it. The master costs what any weights cost. */
static void crosses_little(const lossy_tensor t[MOST_TENSORS], unsigned step, bool off) {
    /* 8 bytes per 4096, and per end of a block. */
    const uint64_t raw = LAYER * 2, hashes = raw / 512 + 1024 * 8;
    if (backend != emulated_device()) {
        return;
    }
    assert_true(step == 0 || t[2].largest < 2 * raw); /* a block is read if a materialized copy is needed */
    if (off) {
        assert_true(t[3].sent >= LAYER); /* what the parent's values are computed from */
    } else {
        assert_true(t[3].got > 0 && t[3].got < hashes && t[3].sent == 0);
    }
}

static void compare_masters(ckd_store *store, ckd_fidelity fidelity, ckd_dtype dtype, bool cells) {
    float *layer[OF_LAYER];
    char runs[2][32];
    for (int i = 0; i < OF_LAYER; i++) {
        layer[i] = random_values(CKD_F32, LAYER, 50 + (unsigned)i);
    }
    for (int device = 0; device < 2; device++) {
        snprintf(runs[device], sizeof(runs[device]), "%d-%d-%d-%d", device, (int)fidelity, (int)dtype, cells);
    }
    for (unsigned step = 0; step < 4; step++) {
        lossy_tensor t[MOST_TENSORS];
        figures f[2];
        bool off = step == 2;
        train(layer, step);
        void *copy = mixed_state(t, layer, dtype, off);
        for (int device = 0; device < 2; device++) {
            assert_int_equal(save_lossy_state(store, runs[device], step, fidelity, t, MOST_TENSORS,
                                              device ? &on_device : NULL, cells),
                             CKD_OK);
            f[device] = figures_of(store, runs[device], step, MOST_TENSORS);
        }
        crosses_little(t, step, off);
        if (fidelity == CKD_COARSE && backend == emulated_device()) {
            /*
             * The search for factors sends its vectors once, 32 per side at first, and gets the factors back. It does
             * not transfer them for each of its ten products.
             */
            const uint64_t side = 32 * SIDE * sizeof(float);
            const uint64_t halves = LAYER * 4; /* of the second moments, as input and decoded */
            assert_true(t[1].sent < 5 * side + halves && t[1].got < 12 * side);
        }
        for (int i = 0; i < MOST_TENSORS; i++) {
            assert_true(near_by(f[1].rel_l2[i], f[0].rel_l2[i], 0.02));
            /* Ids are stored with each block, and compress differently. */
            assert_true(llabs((long long)f[1].stored[i] - (long long)f[0].stored[i]) <
                        256 + (long long)f[0].stored[i] / 50);
        }
        if (!off) {
            is_rounded(store, runs[1], step, dtype);
        }
        free(copy);
    }
    for (int i = 0; i < OF_LAYER; i++) {
        free(layer[i]);
    }
}

static void test_masters(void **state) {
    ckd_store *store = store_create(*state);
    static const state_kind kinds[] = {
        {CKD_COARSE, CKD_BF16, false}, {CKD_COARSE, CKD_F16, true}, {CKD_NEAR, CKD_BF16, true}};
    for (unsigned i = 0; i < 3; i++) {
        if (test_draws("lossy masters", i, 3)) {
            compare_masters(store, kinds[i].fidelity, kinds[i].dtype, kinds[i].cells);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- elements that are stored exactly ---- */

/*
 * Spikes in weights and first moments are 10^3 to 10^30 times the usual change, or no numbers at all. Returns the
 * position of the k-th one.
 */
static uint64_t spike_at(unsigned step, unsigned k) {
    return ((uint64_t)step * 7919 + (uint64_t)k * UINT64_C(0x9e3779b97f4a7c15)) % LAYER;
}

static void put_spikes(float *const layer[OF_LAYER], unsigned step, unsigned count, bool numbers) {
    static const float none[] = {INFINITY, NAN, -INFINITY};
    for (unsigned k = 0; k < count; k++) {
        float by = powf(10, 3 + 27 * (float)k / (float)count), sign = k % 2 ? -1 : 1;
        uint64_t at = spike_at(step, k);
        layer[2][at] = numbers ? 0.003f * sign * by : none[k % 3];
        layer[1][at] = numbers ? 1e-3f * sign * by : none[k % 3];
    }
}

/* The device stores spikes exactly, as the host does, and the rest of the tile stays on the device. */
static void compare_spikes(ckd_store *store, unsigned count, ckd_dtype dtype, bool cells, bool numbers) {
    float *layer[OF_LAYER];
    char runs[2][32];
    for (int i = 0; i < OF_LAYER; i++) {
        layer[i] = random_values(CKD_F32, LAYER, 50 + (unsigned)i);
    }
    for (int device = 0; device < 2; device++) {
        snprintf(runs[device], sizeof(runs[device]), "%d-%u-%d-%d-%d", device, count, (int)dtype, cells,
                 numbers);
    }
    for (unsigned step = 0; step < 4; step++) {
        train(layer, step);
        if (step) {
            put_spikes(layer, step, count, numbers);
        }
        figures f[2];
        for (int device = 0; device < 2; device++) {
            emulated_largest = 0;
            assert_int_equal(save_layer(store, runs[device], step, CKD_COARSE, dtype, layer,
                                        device ? &on_device : NULL, cells),
                             CKD_OK);
            f[device] = figures_of(store, runs[device], step, OF_LAYER);
        }
        assert_true(step == 0 || emulated_largest < LAYER * (dtype == CKD_BF16 ? 2 : 4));
        for (int i = 0; i < OF_LAYER; i++) {
            size_t size = i && dtype == CKD_BF16 ? 2 : 4;
            /* Squares of the largest values exceed what the recorded errors can express, so those are unknown. */
            assert_true(near_by(f[1].rel_l2[i], f[0].rel_l2[i], 0.02) ||
                        (isnan(f[1].rel_l2[i]) && isnan(f[0].rel_l2[i])));
            assert_true(near_by((double)f[1].stored[i], (double)f[0].stored[i], 0.03));
            uint8_t *a = load_whole(store, runs[0], step, layer_names[i], LAYER * size),
                    *b = load_whole(store, runs[1], step, layer_names[i], LAYER * size);
            for (unsigned k = 0; k < count && step && i; k++) {
                uint64_t at = spike_at(step, k) * size;
                assert_memory_equal(a + at, b + at, size);
                assert_true(size == 2 || memcmp(b + at, (uint8_t *)layer[i] + at, size) == 0);
            }
            free(a);
            free(b);
        }
    }
    for (int i = 0; i < OF_LAYER; i++) {
        free(layer[i]);
    }
}

static void test_spikes(void **state) {
    ckd_store *store = store_create(*state);
    static const struct {
        unsigned count;
        ckd_dtype dtype;
        bool cells, numbers;
    } kinds[] = {{1, CKD_F32, false, true},  {10, CKD_F32, true, true}, {10, CKD_BF16, true, true},
                 {60, CKD_F32, false, true}, {5, CKD_F32, true, false}, {5, CKD_BF16, false, false}};
    for (unsigned i = 0; i < 6; i++) {
        if (test_draws("spikes", i, 3)) {
            compare_spikes(store, kinds[i].count, kinds[i].dtype, kinds[i].cells, kinds[i].numbers);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- tiles that the host codes ---- */

/*
 * Several tiles in a row cannot be coded on the device. What was read ahead of the first one must not be taken from
 * pinned memory that was reused since.
 */
static void test_tiles_of_the_host(void **state) {
    enum { ROWS = 4096, COLUMNS = 1024 };
    static const uint64_t shape[2] = {ROWS, COLUMNS};
    ckd_store *store = store_create(*state);
    ckd_error err;
    float *values = random_values(CKD_F32, ROWS * COLUMNS, 9);
    for (uint64_t step = 0; step < 3; step++) {
        change_values(CKD_F32, values, ROWS * COLUMNS, (unsigned)step);
        for (uint64_t i = 0; i < ROWS * COLUMNS && step;
             i += 200) { /* in each tile more than the device can list */
            values[i] = step == 1 ? NAN : INFINITY;
        }
        float *there = to_device(values, ROWS * COLUMNS * sizeof(float));
        for (int device = 0; device < 2; device++) {
            ckd_save_options o = options_of(device ? "device" : "host", step);
            o.fidelity = CKD_COARSE;
            o.staging_bytes = 1 << 24; /* tiles of 1 Mi elements, two per buffer of pinned memory */
            ckd_save *save = begin_with(store, &o);
            ckd_tensor t = CKD_TENSOR_INIT;
            t.name = "w";
            t.dtype = CKD_F32;
            t.ndim = 2;
            t.shape = shape;
            t.data = device ? there : values;
            t.device = device ? &on_device : NULL;
            assert_int_equal(ckd_save_tensor(save, &t, &err), CKD_OK);
            assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
        }
        backend->release(0, there);
        float *a = load_whole(store, "host", step, "w", ROWS * COLUMNS * sizeof(float)),
              *b = load_whole(store, "device", step, "w", ROWS * COLUMNS * sizeof(float));
        assert_memory_equal(a, b, ROWS * COLUMNS * sizeof(float)); /* the host coded everything */
        free(a);
        free(b);
    }
    assert_int_equal(verify_damage(store), 0);
    free(values);
    ckd_store_close(store);
}

/* ---- references kept on the device between saves ---- */

static void spoil_references(const ckd_store *store) {
    const float nonsense[4] = {1, 2, 3, 4};
    device_queue queue = {.device = 0};
    assert_non_null(store->references);
    assert_int_equal(
        backend->copy(&queue, store->references->memory, nonsense, sizeof(nonsense), DEVICE_TO_DEVICE, &why),
        DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
}

static uint64_t bytes_sent(ckd_store *store, uint64_t step, ckd_dtype dtype, float *const layer[OF_LAYER],
                           bool cells) {
    uint64_t before = emulated_copied[DEVICE_TO_DEVICE];
    assert_int_equal(save_layer(store, "run", step, CKD_COARSE, dtype, layer, &on_device, cells), CKD_OK);
    return emulated_copied[DEVICE_TO_DEVICE] - before;
}

/*
 * References do not change the stored bytes. The data that the parent's values are computed from is sent only
 * if no reference is kept, or if it does not match the parent.
 */
static void compare_references(const char *dir, ckd_dtype dtype, bool cells) {
    const uint64_t size = LAYER * (dtype == CKD_BF16 ? 2 : 4);
    char folder[2][600];
    ckd_store *store[2];
    float *layer[OF_LAYER];
    for (int i = 0; i < 2; i++) {
        snprintf(folder[i], sizeof(folder[i]), "%s/%d-%d-%d", dir, (int)dtype, cells, i);
        assert_int_equal(mkdir(folder[i], 0777), 0);
        store[i] = store_create(folder[i]);
    }
    for (int i = 0; i < OF_LAYER; i++) {
        layer[i] = random_values(CKD_F32, LAYER, 50 + (unsigned)i);
    }
    for (unsigned step = 0; step < 6; step++) {
        store[1]->device_reference_bytes = step ? size : size - 1; /* one byte too few at first */
        train(layer, step);
        if (step == 4) {
            spoil_references(store[1]);
        }
        uint64_t plain = bytes_sent(store[0], step, dtype, layer, cells),
                 sent = bytes_sent(store[1], step, dtype, layer, cells);
        bool known =
            step >= 2 && step != 4; /* step 1 is the first with a parent, and the first that is kept */
        assert_in_range(plain - sent, known ? LAYER : 0, known ? LAYER * sizeof(float) : 0);
        assert_int_equal(store[1]->device_references_held, step ? size : 0);
        figures a = figures_of(store[0], "run", step, OF_LAYER),
                b = figures_of(store[1], "run", step, OF_LAYER);
        assert_memory_equal(a.rel_l2, b.rel_l2, sizeof(a.rel_l2));
        for (int i = 0; i < OF_LAYER; i++) { /* ids are stored too, and compress differently */
            assert_in_range(b.stored[i] + 64, a.stored[i], a.stored[i] + 128);
        }
        void *one = load_whole(store[0], "run", step, "w", size),
             *other = load_whole(store[1], "run", step, "w", size);
        assert_memory_equal(one, other, size);
        free(one);
        free(other);
    }
    for (int i = 0; i < OF_LAYER; i++) {
        free(layer[i]);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(verify_damage(store[i]), 0);
        ckd_store_close(store[i]);
    }
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

static void test_references(void **state) {
    if (test_draws("references", 0, 2)) {
        compare_references(*state, CKD_F32, true);
    }
    if (test_draws("references", 1, 2)) {
        compare_references(*state, CKD_BF16, false);
    }
}

/* ---- errors ---- */

/* If device memory runs out, the host takes over. Any other error fails this save, but not the next one. */
static void fail_everywhere(ckd_store *store, uint64_t first, uint64_t each) {
    float *layer[OF_LAYER];
    for (int i = 0; i < OF_LAYER; i++) {
        layer[i] = random_values(CKD_F32, LAYER, 50 + (unsigned)i);
    }
    lossy_tensor t[MOST_TENSORS];
    train(layer, 0);
    void *copy = mixed_state(t, layer, CKD_BF16, false);
    assert_int_equal(save_lossy_state(store, "run", first, CKD_COARSE, t, MOST_TENSORS, NULL, false), CKD_OK);
    train(layer, 1);
    kernels_cpu()->cast(CKD_BF16, copy, CKD_F32, layer[2], LAYER);
    unsigned failed = 0, recovered = 0;
    bool happened = true;
    const unsigned long stride = test_stride(9, 1, 1);
    each *= stride;
    for (uint64_t n = test_first("lossy failures", each); happened; n += each) {
        emulated_fail_after = (int)n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status =
            save_lossy_state(store, "run", first + n, CKD_COARSE, t, MOST_TENSORS, &on_device, false);
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        assert_true(status == CKD_OK || (happened && (status == CKD_E_DEVICE || status == CKD_E_NOMEM)));
        failed += status != CKD_OK;
        recovered += status == CKD_OK && happened;
    }
    assert_true(failed >= (stride > 1 ? 0 : 4) && recovered > (stride > 1 ? 1 : 30));
    free(copy);
    for (int i = 0; i < OF_LAYER; i++) {
        free(layer[i]);
    }
}

static void test_lossy_failures(void **state) {
    ckd_store *store = store_create(*state);
    fail_everywhere(store, 1, 3);
    store->device_reference_bytes = LAYER * sizeof(float);
    fail_everywhere(store, 10001, 5);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

#ifndef DEVICE_LOSSY_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_lossy_tiles),
        tempdir_test(test_second_moments),
        tempdir_test(test_masters),
        tempdir_test(test_lossy_failures),
        tempdir_test(test_tiles_of_the_host),
        tempdir_test(test_references),
        tempdir_test(test_spikes),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return run_sampled("device_lossy", tests, 2, NULL, NULL);
}
#endif
