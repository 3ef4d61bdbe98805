/*
 * Loads to device memory, where blocks are decoded on the device. The values are those of a load to host memory, bit
 * for bit, and stored bytes cross the bus instead of values. Damage is reported as on the host, and the host does what
 * the device cannot. The device is emulated; tests/engine/device/test_cuda_load.c includes this file for a real one.
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

#include "engine/load/load.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/emulated_device.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

static const ckd_device on_device = CKD_DEVICE_INIT;
static const device_backend *backend;
static device_failure why;

/* Allocates device memory. The allocation does not count as the call that is to fail. */
static void *allocate_on_device(size_t size) {
    void *memory = NULL;
    int fail_after = emulated_fail_after;
    emulated_fail_after = 0;
    assert_int_equal(backend->allocate(&memory, 0, size + 1, &why), DEVICE_DONE);
    emulated_fail_after = fail_after;
    return memory;
}

static void from_device(void *to, const void *memory, size_t size) {
    device_queue queue = {.device = 0};
    assert_int_equal(backend->copy(&queue, to, memory, size, DEVICE_TO_HOST, &why), DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
}

/*
 * With so many threads, however many cores there are: the device reads streams only if there are enough for each
 * thread.
 */
static ckd_store *create_with(const char *dir, uint32_t threads) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", dir);
    o.threads = threads;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    return store;
}

static ckd_store *create_store(const char *dir) {
    return create_with(dir, 2);
}

static ckd_load *begin_load(ckd_store *store, uint64_t step, uint64_t staging) {
    ckd_load *load;
    ckd_error err;
    ckd_load_options o = CKD_LOAD_OPTIONS_INIT;
    o.staging_bytes = staging;
    ckd_checkpoint c = checkpoint_at(store, "run", step);
    assert_int_equal(ckd_load_begin_with(&load, store, &c.id, &o, &err), CKD_OK);
    return load;
}

/* What a load to the device did. */
typedef struct seen {
    uint64_t decoded, sent, given_up, bytes; /* numbers of blocks and tensors; bytes copied to the device */
} seen;

/* Loads a tensor, or a region of it, to the host and to the device, and compares the bytes. */
static seen check_loads(ckd_load *load, const char *name, const ckd_region *region, size_t size) {
    ckd_error err;
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.size = size;
    if (region) {
        q.region = *region;
    }
    void *host = malloc(size), *got = malloc(size), *there = allocate_on_device(size);
    assert_true(host && got);
    q.data = host;
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    uint64_t copied = emulated_copied[DEVICE_TO_DEVICE];
    seen before = {load->device.decoded, load->device.sent, load->device.given_up, 0};
    q.data = there;
    q.device = &on_device;
    ckd_status status = ckd_load_tensor(load, &q, &err);
    if (status != CKD_OK) {
        print_message("%s\n", err.message);
    }
    assert_int_equal(status, CKD_OK);
    seen s = {load->device.decoded - before.decoded, load->device.sent - before.sent,
              load->device.given_up - before.given_up, emulated_copied[DEVICE_TO_DEVICE] - copied};
    from_device(got, there, size);
    assert_memory_equal(got, host, size);
    backend->release(0, there);
    free(host);
    free(got);
    return s;
}

/* Only the emulation counts bytes. */
static bool sent_less(const seen *s, size_t size, double share) {
    return backend != emulated_device() || (double)s->bytes < share * (double)size;
}

static void end(ckd_store *store) {
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- exact blocks ---- */

enum { BANDS = 66, BAND = 17000, LONG = BANDS * BAND };

/* Saves so many regions that decoding their streams on a device pays off. */
static void save_bands(ckd_store *store, uint64_t step, ckd_dtype dtype, const void *values) {
    const uint64_t shape[2] = {BANDS, BAND};
    ckd_save_options o = options_of("run", step);
    o.max_load_cost = 1000; /* every band is a delta */
    ckd_save *save = begin_with(store, &o);
    for (uint64_t i = 0; i < BANDS; i++) {
        ckd_region band = {.kind = CKD_REGION_BOX, .offsets = {i, 0}, .lengths = {1, BAND}};
        add_tensor(save, "w", dtype, 2, shape, &band,
                   (const uint8_t *)values + i * BAND * ckd_dtype_size(dtype));
    }
    ckd_error err;
    assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
}

/* Changes the values so that few differences are zero and the streams are dense. */
static void move_all(ckd_dtype dtype, void *values, unsigned seed) {
    size_t size = ckd_dtype_size(dtype);
    for (uint64_t i = 0; i < LONG; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (uint8_t *)values + i * size, size);
        uint64_t random = (i + 1 + seed * UINT64_C(1000003)) * UINT64_C(0x9e3779b97f4a7c15);
        random = (random ^ random >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        random ^= random >> 27;
        bits += 1 + random % (random >> 32 & 1 ? 3 : 60);
        memcpy((uint8_t *)values + i * size, &bits, size);
    }
}

static void test_exact(void **state) {
    const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16, CKD_I32, CKD_F64};
    uint64_t held = 0;
    for (unsigned i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%u", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0700), 0);
        ckd_store *store = create_with(dir, 1);
        size_t size = LONG * ckd_dtype_size(dtypes[i]);
        void *values = random_values(dtypes[i], LONG, i + 1);
        for (uint64_t step = 1; step <= 4; step++) {
            save_bands(store, step, dtypes[i], values);
            move_all(dtypes[i], values, (unsigned)step);
        }
        for (uint64_t step = 1; step <= 4; step++) {
            ckd_load *load = begin_load(store, step, 0);
            seen s = check_loads(load, "w", NULL, size);
            assert_int_equal(s.given_up, 0);
            assert_int_equal(s.decoded + s.sent, BANDS);
            if (step > 1) {
                assert_int_equal(s.decoded, BANDS);
            }
            held = emulated_memory > held ? emulated_memory : held;
            ckd_load_end(load);
            assert_int_equal(emulated_memory, 0); /* although the store is open */
        }
        free(values);
        end(store);
    }
    assert_true(held > 0 || backend != emulated_device());
}

/* Loads master and rounded copy in one call. */
static void check_both(ckd_load *load, size_t size) {
    static const char *const names[2] = {"master.w", "w"};
    ckd_load_request q[2];
    ckd_error err;
    uint8_t *got = malloc(size), *host = malloc(size);
    void *there[2];
    uint64_t decoded = load->device.decoded;
    assert_true(got && host);
    for (int i = 0; i < 2; i++) {
        there[i] = allocate_on_device(size);
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = names[i];
        q[i].data = there[i];
        q[i].size = i ? size / 2 : size;
        q[i].device = &on_device;
    }
    assert_int_equal(ckd_load_all(load, q, 2, 0, &err), CKD_OK);
    assert_int_equal(load->device.decoded - decoded, 2 * BANDS);
    for (int i = 0; i < 2; i++) {
        from_device(got, there[i], q[i].size);
        q[i].data = host;
        q[i].device = NULL;
        assert_int_equal(ckd_load_tensor(load, &q[i], &err), CKD_OK);
        assert_memory_equal(got, host, q[i].size);
        backend->release(0, there[i]);
    }
    free(got);
    free(host);
}

/* Copies rounded from masters, which change with each step, loaded one by one and in one call. */
static void test_rounded(void **state) {
    const ckd_dtype dtypes[] = {CKD_BF16, CKD_F16};
    const uint64_t shape[2] = {BANDS, BAND};
    for (int i = 0; i < 2; i++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0700), 0);
        ckd_store *store = create_with(dir, 1);
        float *master = random_values(CKD_F32, LONG, 5);
        for (uint64_t step = 1; step <= 3; step++) {
            uint8_t *rounded = to_dtype(master, dtypes[i], LONG);
            ckd_save *save = begin_save(store, "run", step);
            for (uint64_t band = 0; band < BANDS; band++) {
                ckd_region region = {.kind = CKD_REGION_BOX, .offsets = {band, 0}, .lengths = {1, BAND}};
                add_tensor(save, "master.w", CKD_F32, 2, shape, &region, master + band * BAND);
                add_tensor(save, "w", dtypes[i], 2, shape, &region, rounded + band * BAND * 2);
            }
            commit_save(save);
            free(rounded);
            move_all(CKD_F32, master, (unsigned)step);
        }
        for (uint64_t step = 1; step <= 3; step++) {
            ckd_load *load = begin_load(store, step, 0);
            const view_tensor *w = view_find(load->view, "w");
            assert_int_equal(w->shards[0].blocks[0].record->predictor, PREDICT_CAST);
            seen a = check_loads(load, "master.w", NULL, LONG * sizeof(float)),
                 b = check_loads(load, "w", NULL, LONG * sizeof(uint16_t));
            assert_true(a.decoded == BANDS && b.decoded == BANDS && a.given_up + b.given_up == 0);
            check_both(load, LONG * sizeof(float));
            ckd_load_end(load);
        }
        free(master);
        end(store);
    }
}

/* ---- lossy blocks ---- */

enum { ROWS = 610, COLUMNS = 700, COUNT = ROWS * COLUMNS, STEPS = 4 };
static const char *const parts[3] = {"exp_avg_sq.w", "exp_avg.w", "w"};

static void save_steps(ckd_store *store, uint64_t steps, ckd_fidelity fidelity, ckd_dtype dtype) {
    drift d = drift_new(ROWS, COLUMNS, 7);
    const uint64_t shape[2] = {ROWS, COLUMNS};
    for (uint64_t step = 1; step <= steps; step++) {
        ckd_save_options o = lossy_options("run", step, fidelity);
        ckd_save *save = begin_with(store, &o);
        const float *values[3] = {d.second, d.first, d.weight};
        for (int i = 0; i < 3; i++) {
            void *typed = to_dtype(values[i], dtype, COUNT);
            add_tensor(save, parts[i], dtype, 2, shape, NULL, typed);
            free(typed);
        }
        commit_save(save);
        drift_step(&d);
    }
    drift_free(&d);
}

/* Loads every tensor as a whole and by several regions. */
static void check_lossy(ckd_store *store, ckd_fidelity fidelity, ckd_dtype dtype, uint64_t step) {
    size_t element = ckd_dtype_size(dtype), size = COUNT * element;
    ckd_region regions[4] = {{.kind = CKD_REGION_BOX, .offsets = {100, 0}, .lengths = {400, COLUMNS}},
                             {.kind = CKD_REGION_BOX, .offsets = {3, 333}, .lengths = {ROWS - 3, 99}},
                             {.kind = CKD_REGION_FLAT, .start = 12345, .count = COUNT - 23456},
                             {.kind = CKD_REGION_BOX, .offsets = {0, COLUMNS - 1}, .lengths = {ROWS, 1}}};
    const uint64_t counts[4] = {400 * COLUMNS, (ROWS - 3) * 99, COUNT - 23456, ROWS};
    ckd_load *load = begin_load(store, step, 0);
    for (int i = 0; i < 3; i++) {
        seen s = check_loads(load, parts[i], NULL, size);
        assert_int_equal(s.given_up, 0);
        bool exact_base = i == 2 && dtype != CKD_F32; /* its two bytes an element are sent */
        bool exact = (i == 0 && dtype == CKD_F16) || (exact_base && step == 1);
        assert_true(exact ? s.sent == 2 : s.decoded == 2);
        if (i == 0) { /* by rows and columns; if stored as integers, some bits per element */
            assert_true(sent_less(&s, COUNT, exact ? 2.01 : fidelity == CKD_COARSE ? 0.02 : 0.44));
        } else if (i == 1) { /* by integers and factors */
            assert_true(sent_less(&s, COUNT, 0.3));
        } else if (exact_base) {
            assert_true(sent_less(&s, COUNT, 2.1));
        } else {
            bool newest = step == STEPS; /* the newest step has a lossy base, which is finer */
            assert_true(sent_less(&s, COUNT, newest ? 1.7 : 1.37));
        }
        for (int j = 0; j < 4; j++) {
            seen some = check_loads(load, parts[i], &regions[j], counts[j] * element);
            assert_int_equal(some.given_up, 0);
            assert_true(s.decoded ? some.decoded > 0 : some.sent > 0);
        }
    }
    ckd_load_end(load);
}

static void lossy_in(const char *dir, ckd_fidelity fidelity, ckd_dtype dtype) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%d-%d", dir, (int)fidelity, (int)dtype);
    assert_int_equal(mkdir(path, 0700), 0);
    ckd_store *store = create_store(path);
    save_steps(store, STEPS, fidelity, dtype);
    for (uint64_t step = 1; step <= STEPS; step++) {
        check_lossy(store, fidelity, dtype, step);
    }
    end(store);
}

static void test_coarse(void **state) {
    lossy_in(*state, CKD_COARSE, CKD_F32);
    lossy_in(*state, CKD_COARSE, CKD_BF16);
    lossy_in(*state, CKD_COARSE, CKD_F16);
}

static void test_near(void **state) {
    lossy_in(*state, CKD_NEAR, CKD_F32);
    lossy_in(*state, CKD_NEAR, CKD_BF16);
}

/* Saved in flat ranges that begin within rows. */
static void test_ranges(void **state) {
    ckd_store *store = create_store(*state);
    const uint64_t shape[2] = {ROWS, COLUMNS}, cut[4] = {0, 100123, 300001, COUNT};
    drift d = drift_new(ROWS, COLUMNS, 8);
    for (uint64_t step = 1; step <= 3; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_COARSE);
        ckd_save *save = begin_with(store, &o);
        const float *values[3] = {d.second, d.first, d.weight};
        for (int i = 0; i < 9; i++) {
            uint64_t first = cut[i / 3];
            ckd_region range = {.kind = CKD_REGION_FLAT, .start = first, .count = cut[i / 3 + 1] - first};
            add_tensor(save, parts[i % 3], CKD_F32, 2, shape, &range, values[i % 3] + first);
        }
        commit_save(save);
        drift_step(&d);
    }
    for (uint64_t step = 1; step <= 3; step++) {
        ckd_load *load = begin_load(store, step, 0);
        for (int i = 0; i < 3; i++) {
            seen s = check_loads(load, parts[i], NULL, COUNT * sizeof(float));
            assert_true(s.given_up == 0 && s.decoded + s.sent >= 3 && (step < 2 || s.decoded > 0));
        }
        ckd_load_end(load);
    }
    drift_free(&d);
    end(store);
}

/*
 * A region that lies in some of the blocks, in more stretches than a device fills. The host decodes those blocks, each
 * once.
 */
static void test_many_stretches(void **state) {
    enum { PLANES = 3, DEEP = 8492, WIDE = 128 };
    ckd_store *store = create_store(*state);
    const uint64_t shape[3] = {PLANES, DEEP, WIDE};
    const ckd_region box = {
        .kind = CKD_REGION_BOX, .offsets = {0, 1348, 0}, .lengths = {PLANES, 1400, WIDE / 2}};
    void *values = random_values(CKD_F32, (uint64_t)PLANES * DEEP * WIDE, 9);
    ckd_save *save = begin_save(store, "run", 1);
    add_tensor(save, "w", CKD_F32, 3, shape, NULL, values);
    commit_save(save);
    ckd_load *load = begin_load(store, 1, 0);
    seen s = check_loads(load, "w", &box, (size_t)PLANES * 1400 * (WIDE / 2) * sizeof(float));
    assert_int_equal(s.decoded, 0);
    ckd_load_end(load);
    free(values);
    end(store);
}

/* The smallest staging limit: one block at a time. */
static void test_little_staging(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, STEPS, CKD_COARSE, CKD_F32);
    ckd_load *load = begin_load(store, STEPS - 1, 1);
    for (int i = 0; i < 3; i++) {
        seen s = check_loads(load, parts[i], NULL, COUNT * sizeof(float));
        assert_int_equal(s.decoded, 2);
    }
    ckd_load_end(load);
    end(store);
}

/*
 * Blocks of a wide matrix are some columns of many rows. One copy moves them to their places, however many rows there
 * are.
 */
static void test_columns(void **state) {
    enum { SIDE = 2048 };
    ckd_store *store = create_store(*state);
    const uint64_t shape[2] = {SIDE, SIDE};
    drift d = drift_new(SIDE, SIDE, 8);
    for (uint64_t step = 1; step <= 2; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_COARSE);
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, d.weight);
        commit_save(save);
        drift_step(&d);
    }
    ckd_load *load = begin_load(store, 2, 0);
    size_t blocks = load->view->block_count;
    emulated_calls before = emulated_called();
    seen s = check_loads(load, "w", NULL, (size_t)SIDE * SIDE * sizeof(float));
    emulated_calls after = emulated_called();
    assert_true(blocks > 4 && s.decoded == blocks);
    assert_true(backend != emulated_device() || after.launches - before.launches < 8 * blocks);
    drift_free(&d);
    ckd_load_end(load);
    end(store);
}

/* All parts in one call: while the device works on some, the host makes what to send for others. */
typedef struct together {
    void *there[3], *host[3];
    size_t size; /* of each part */
    ckd_load_request to_device[3];
} together;

/* region NULL: all of each part. */
static together together_new(ckd_store *store, uint64_t step, const ckd_region *region) {
    uint64_t count = region ? region->lengths[0] * region->lengths[1] : COUNT;
    together t = {.size = count * sizeof(float)};
    ckd_load *load = begin_load(store, step, 0);
    for (int i = 0; i < 3; i++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        ckd_error err;
        t.there[i] = allocate_on_device(t.size);
        t.host[i] = malloc(t.size);
        assert_non_null(t.host[i]);
        q.name = parts[i];
        q.size = t.size;
        q.region = region ? *region : q.region;
        q.data = t.host[i];
        assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
        q.data = t.there[i];
        q.device = &on_device;
        t.to_device[i] = q;
    }
    ckd_load_end(load);
    return t;
}

/* Spoils what is on the device, so that the next load has to write all of it. */
static void together_spoil(const together *t) {
    device_queue queue = {.device = 0};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(backend->zero(&queue, t->there[i], t->size, &why), DEVICE_DONE);
    }
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
}

static void together_check(const together *t) {
    void *got = malloc(t->size);
    assert_non_null(got);
    for (int i = 0; i < 3; i++) {
        from_device(got, t->there[i], t->size);
        assert_memory_equal(got, t->host[i], t->size);
    }
    free(got);
}

static void together_free(together *t) {
    for (int i = 0; i < 3; i++) {
        backend->release(0, t->there[i]);
        free(t->host[i]);
    }
}

static void test_together(void **state) {
    const uint64_t staging[] = {0, UINT64_C(12) << 20, 1}; /* one group, several, none */
    ckd_store *store = create_store(*state);
    save_steps(store, STEPS, CKD_COARSE, CKD_F32);
    for (size_t i = 0; i < 3; i++) {
        together t = together_new(store, STEPS - 1, NULL);
        ckd_load *load = begin_load(store, STEPS - 1, staging[i]);
        ckd_error err;
        assert_int_equal(ckd_load_all(load, t.to_device, 3, CKD_DIFFERS_UNEXPECTED, &err), CKD_OK);
        assert_true(load->device.decoded >= 6 && load->device.given_up == 0);
        ckd_load_end(load);
        together_check(&t);
        together_free(&t);
    }
    end(store);
}

/* ---- errors ---- */

static ckd_status load_to_device(ckd_load *load, const char *name, void *there, ckd_error *err) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.size = COUNT * sizeof(float);
    q.data = there;
    q.device = &on_device;
    return ckd_load_tensor(load, &q, err);
}

/* Loads to the host and to the device must report the same damage. */
static void check_damage_report(ckd_load *load, const char *name, void *host, void *there) {
    ckd_error a = {0}, b = {0};
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.size = COUNT * sizeof(float);
    q.data = host;
    assert_int_equal(ckd_load_tensor(load, &q, &a), CKD_E_CORRUPT);
    assert_int_equal(load_to_device(load, name, there, &b), CKD_E_CORRUPT);
    assert_string_equal(a.message, b.message);
    assert_string_equal(a.file, b.file);
    assert_string_equal(a.tensor, b.tensor);
    assert_true(a.offset == b.offset);
}

static void flip(const view_block *b) {
    const record *r = b->record;
    FILE *f = fopen(file_path(b->chunk->file), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)(r->payload_offset + r->stored_size / 2), SEEK_SET), 0);
    int byte = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_CUR), 0);
    assert_int_equal(fputc(byte ^ 0x21, f), byte ^ 0x21);
    assert_int_equal(fclose(f), 0);
}

/* Damages each block of a checkpoint in turn: first its payload, then its recorded content hash. */
static void test_damage(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, STEPS, CKD_COARSE, CKD_F32);
    ckd_load *load = begin_load(store, STEPS - 1, 0);
    void *host = malloc(COUNT * sizeof(float)), *there = allocate_on_device(COUNT * sizeof(float));
    assert_non_null(host);
    unsigned deltas = 0, flipped = 0;
    for (size_t i = 0; i < load->view->block_count; i++) {
        const view_block *b = &load->view->blocks[i];
        const char *name = b->record->tensor->name;
        deltas += b->record->predictor == PREDICT_PARENT;
        if (!b->record->bundle) { /* bundles are in memory already */
            flip(b);
            check_damage_report(load, name, host, there);
            flip(b);
        }
        hash128 *content = (hash128 *)(uintptr_t)&b->record->content, kept = *content;
        ((uint8_t *)content)[3] ^= 1;
        check_damage_report(load, name, host, there);
        *content = kept;
        ckd_error err;
        assert_int_equal(load_to_device(load, name, there, &err), CKD_OK);
    }
    ckd_load *root = begin_load(store, 1, 0);
    /* The first checkpoint, on which the chain is built. */
    for (size_t i = 0; i < root->view->block_count; i++) {
        const view_block *b = &root->view->blocks[i];
        if (strcmp(b->record->tensor->name, "w") == 0 && !b->record->bundle) {
            flip(b);
            check_damage_report(load, "w", host, there);
            flip(b);
            flipped++;
        }
    }
    assert_true(deltas >= 2 && flipped >= 2);
    ckd_load_end(root);
    ckd_load_end(load);
    free(host);
    backend->release(0, there);
    end(store);
}

static unsigned message_count;
static void note_message(void *context, const char *message) {
    message_count += strstr(message, context) != NULL;
}

static ckd_store *reopen_with_messages(ckd_store *store, const char *dir, const char *what) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    char path[512];
    ckd_store_close(store);
    snprintf(path, sizeof(path), "%s/store", dir);
    o.on_message = note_message;
    o.message_context = (void *)(uintptr_t)what;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_READ, &o, NULL), CKD_OK);
    message_count = 0;
    return store;
}

/*
 * Each device call fails once. The load gives the right values or reports that the device failed, and the next load
 * works.
 */
static void test_failures(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, 3, CKD_COARSE, CKD_F32);
    store = reopen_with_messages(store, *state, "is decoded on the host");
    float *values = load_floats(store, "run", 2, "w", CKD_F32, COUNT);
    float *got = malloc(COUNT * sizeof(float));
    void *there = allocate_on_device(COUNT * sizeof(float));
    ckd_load *load = begin_load(store, 2, 0);
    unsigned failed = 0, recovered = 0;
    for (int n = 1;; n++) {
        ckd_error err;
        uint64_t given_up = load->device.given_up;
        unsigned messages_before = message_count;
        emulated_fail_after = n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status = load_to_device(load, "w", there, &err);
        bool happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (status == CKD_OK) {
            from_device(got, there, COUNT * sizeof(float));
            assert_memory_equal(got, values, COUNT * sizeof(float));
            assert_int_equal(load->device.given_up - given_up, message_count - messages_before);
            recovered += message_count > messages_before;
        } else {
            assert_int_equal(status, n % 2 ? CKD_E_NOMEM : CKD_E_DEVICE);
            assert_non_null(strstr(err.message, "told to fail"));
            failed++;
        }
        memset(got, 0, COUNT * sizeof(float));
        if (!happened) {
            break;
        }
    }
    assert_true(recovered > 15 && failed > 0); /* only a failing check of the address ends a load */
    ckd_load_end(load);
    backend->release(0, there);
    free(values);
    free(got);
    end(store);
}

/* The same, with several tensors in one call, or parts of them, which are copied to their places after their hashes. */
static void fail_together(ckd_store *store, const ckd_region *region) {
    together t = together_new(store, 2, region);
    ckd_load *load = begin_load(store, 2, UINT64_C(12) << 20);
    unsigned failed = 0, recovered = 0;
    const int every = (int)test_stride(3, 1, 1);
    for (int n = (int)test_first("together", (unsigned)every) + 1;; n += every) {
        ckd_error err;
        uint64_t given_up = load->device.given_up;
        unsigned messages_before = message_count;
        together_spoil(&t);
        emulated_fail_after = n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status = ckd_load_all(load, t.to_device, 3, CKD_DIFFERS_UNEXPECTED, &err);
        bool happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (status == CKD_OK) {
            together_check(&t);
            assert_int_equal(load->device.given_up - given_up, message_count - messages_before);
            recovered += message_count > messages_before;
        } else {
            assert_int_equal(status, n % 2 ? CKD_E_NOMEM : CKD_E_DEVICE);
            assert_non_null(strstr(err.message, "told to fail"));
            failed++;
        }
        if (!happened) {
            break;
        }
    }
    assert_true(recovered > 10);
    assert_true(failed > 0 ||
                every > 1); /* only a failing check of an address ends a load; a sample may leave it out */
    ckd_load_end(load);
    together_free(&t);
}

static void test_failures_together(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, 3, CKD_COARSE, CKD_F32);
    store = reopen_with_messages(store, *state, "is decoded on the host");
    const ckd_region box = {.kind = CKD_REGION_BOX, .offsets = {3, 11}, .lengths = {ROWS - 5, COLUMNS / 2}};
    fail_together(store, NULL);
    fail_together(store, &box);
    end(store);
}

/* Damage of the first checkpoint is found by a load of a later one, whatever the device does with the other tensors. */
static void test_damage_together(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, STEPS, CKD_COARSE, CKD_F32);
    together t = together_new(store, STEPS - 1, NULL);
    ckd_load *load = begin_load(store, STEPS - 1, UINT64_C(12) << 20), *root = begin_load(store, 1, 0);
    unsigned damaged = 0;
    for (size_t i = 0; i < root->view->block_count; i++) {
        const view_block *b = &root->view->blocks[i];
        ckd_error err = {0};
        if (b->record->bundle || strcmp(b->record->tensor->name, "w") != 0) {
            continue;
        }
        flip(b);
        assert_int_equal(ckd_load_all(load, t.to_device, 3, CKD_DIFFERS_UNEXPECTED, &err), CKD_E_CORRUPT);
        assert_string_equal(err.tensor, "w");
        flip(b);
        assert_int_equal(ckd_load_all(load, t.to_device, 3, CKD_DIFFERS_UNEXPECTED, &err), CKD_OK);
        together_check(&t);
        damaged++;
    }
    assert_true(damaged > 0);
    ckd_load_end(root);
    ckd_load_end(load);
    together_free(&t);
    end(store);
}

static device_result move_wrongly(const device_queue *queue, const device_tile *tile,
                                  device_failure *failure) {
    device_tile wrong = *tile;
    wrong.unit *= 2;
    return emulated_device()->move(queue, &wrong, failure);
}

/* A wrong result of the device is detected by its hash, and the host decodes the block. */
static void test_wrong_device(void **state) {
    ckd_store *store = create_store(*state);
    save_steps(store, 3, CKD_COARSE, CKD_F32);
    store = reopen_with_messages(store, *state, "the device's result does not match its content hash");
    device_backend wrong = *emulated_device();
    wrong.move = move_wrongly;
    device_backend_use(&wrong);
    ckd_load *load = begin_load(store, 2, 0);
    seen s = check_loads(load, "w", NULL, COUNT * sizeof(float));
    assert_true(s.given_up == 1 && s.decoded == 0 && message_count == 1);
    ckd_load_end(load);
    ckd_store_close(store);
    device_backend_use(backend);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

#ifndef DEVICE_LOAD_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_exact),
        tempdir_test(test_rounded),
        tempdir_test(test_coarse),
        tempdir_test(test_many_stretches),
        tempdir_test(test_near),
        tempdir_test(test_little_staging),
        tempdir_test(test_ranges),
        tempdir_test(test_damage),
        tempdir_test(test_failures),
        tempdir_test(test_wrong_device),
        tempdir_test(test_columns),
        tempdir_test(test_together),
        tempdir_test(test_failures_together),
        tempdir_test(test_damage_together),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return run_sampled("device_write_once", tests, 2, NULL, NULL);
}
#endif
