/*
 * Tensors in device memory, at every fidelity: a save from the device stores what a save from host memory stores, and
 * a load to the device gives what a load to host memory gives. A failing device fails the save and nothing else. The
 * device is emulated; tests/engine/device/test_cuda_store.c includes this file for a real one.
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
#include "engine/save/device.h"
#include "engine/save/save.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/thread_ranks.h"

enum { TENSORS = 7 };

typedef struct tensor {
    const char *name;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[2], elements;
    void *host, *device;
} tensor;

static size_t size_of(const tensor *t) {
    return t->elements * ckd_dtype_size(t->dtype);
}

/* Tensors of many kinds. One is cut into panels and needs several buffers of pinned memory, unless `small`. */
static void model(tensor *t, bool small) {
    const tensor all[TENSORS] = {
        {"layers.0.exp_avg_sq", CKD_F32, 2, {300, 260}, 0, NULL, NULL},
        {"layers.0.exp_avg", CKD_F32, 2, {300, 260}, 0, NULL, NULL},
        {"layers.0.weight", CKD_F32, 2, {300, 260}, 0, NULL, NULL},
        {"wide.weight", CKD_BF16, 2, {small ? 1030 : 2050, small ? 1031 : 2111}, 0, NULL, NULL},
        {"bias", CKD_F16, 1, {77, 0}, 0, NULL, NULL},
        {"count", CKD_I64, 0, {0, 0}, 0, NULL, NULL},
        {"none", CKD_F32, 2, {0, 5}, 0, NULL, NULL},
    };
    for (unsigned i = 0; i < TENSORS; i++) {
        t[i] = all[i];
        t[i].elements = 1;
        for (uint32_t d = 0; d < t[i].ndim; d++) {
            t[i].elements *= t[i].shape[d];
        }
        t[i].host = random_values(t[i].dtype, t[i].elements, i + 1);
        for (uint64_t j = 0; i == 0 && j < t[i].elements; j++) { /* second moments are never negative */
            ((float *)t[i].host)[j] *= ((float *)t[i].host)[j];
        }
        t[i].device = to_device(t[i].host, size_of(&t[i]));
    }
}

static void change(tensor *t, unsigned seed) {
    for (unsigned i = 0; i < TENSORS; i++) {
        if (i != 4 && t[i].elements) {
            change_values(t[i].dtype, t[i].host, t[i].elements, seed + i);
        }
        backend->release(0, t[i].device);
        t[i].device = to_device(t[i].host, size_of(&t[i]));
    }
}

static void model_free(tensor *t) {
    for (unsigned i = 0; i < TENSORS; i++) {
        free(t[i].host);
        backend->release(0, t[i].device);
    }
}

static ckd_tensor description(const tensor *t, const ckd_device *device) {
    ckd_tensor d = CKD_TENSOR_INIT;
    d.name = t->name;
    d.dtype = t->dtype;
    d.ndim = t->ndim;
    d.shape = t->shape;
    d.data = device ? t->device : t->host;
    d.device = device;
    return d;
}

static ckd_status save_model(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                             ckd_fidelity fidelity, ckd_codec codec, const tensor *t,
                             const ckd_device *device, ckd_error *err) {
    ckd_save_options o = options_of(run, step);
    o.fidelity = fidelity;
    o.codec = codec;
    ckd_save *save = begin_with(store, &o);
    for (unsigned i = 0; i < TENSORS; i++) {
        ckd_tensor d = description(&t[i], device);
        ckd_status status = ckd_save_tensor(save, &d, err);
        if (status != CKD_OK) {
            ckd_save_abort(save);
            return status;
        }
    }
    return ckd_save_commit(out, save, err);
}

static ckd_load_request request_of(const tensor *t, void *to, const ckd_device *device) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.data = to;
    q.size = size_of(t);
    q.device = device;
    return q;
}

/* Loads everything to host memory and to the device, tensor by tensor and all at once, and compares the bytes. */
static void check_loads(ckd_store *store, const ckd_checkpoint *c, const tensor *t, bool exact) {
    ckd_error err;
    ckd_load *load;
    ckd_load_request all[TENSORS];
    assert_int_equal(ckd_load_begin(&load, store, &c->id, &err), CKD_OK);
    void *host[TENSORS], *device[TENSORS];
    for (unsigned i = 0; i < TENSORS; i++) {
        size_t size = size_of(&t[i]);
        host[i] = malloc(size + 1);
        void *back = calloc(1, size + 1);
        assert_true(host[i] && back);
        device[i] = to_device(back, size);
        ckd_load_request q = request_of(&t[i], host[i], NULL), to = request_of(&t[i], device[i], &on_device);
        assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
        assert_int_equal(ckd_load_tensor(load, &to, &err), CKD_OK);
        from_device(back, device[i], size);
        assert_memory_equal(host[i], back, size);
        assert_true(!exact || memcmp(host[i], t[i].host, size) == 0);
        memset(back, 0, size);
        backend->release(0, device[i]);
        device[i] = to_device(back, size);
        all[i] = request_of(&t[i], device[i], &on_device);
        free(back);
    }
    assert_int_equal(ckd_load_all(load, all, TENSORS, 0, &err), CKD_OK);
    for (unsigned i = 0; i < TENSORS; i++) {
        void *back = malloc(size_of(&t[i]) + 1);
        assert_non_null(back);
        from_device(back, device[i], size_of(&t[i]));
        assert_memory_equal(host[i], back, size_of(&t[i]));
        free(back);
        free(host[i]);
        backend->release(0, device[i]);
    }
    ckd_load_end(load);
}

/*
 * Two chains are saved side by side and contain the same. Each of their steps comes alternately from host and device
 * memory.
 */
static void test_the_same_bytes(void **state) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR, CKD_COARSE, CKD_EXACT};
    const unsigned steps = (unsigned)test_pick(2, 4, 4);
    ckd_store *store = store_create(*state);
    ckd_error err;
    for (unsigned f = 0; f < 4; f++) {
        tensor t[TENSORS];
        char host[16], device[16];
        snprintf(host, sizeof(host), "host-%u", f);
        snprintf(device, sizeof(device), "device-%u", f);
        model(t, false);
        for (unsigned step = 0; step < steps; step++) {
            ckd_codec codec = f == 3 ? CKD_CODEC_RAW : CKD_CODEC_AUTO;
            ckd_checkpoint a, b;
            bool turned = step % 2;
            assert_int_equal(
                save_model(&a, store, host, step, fidelities[f], codec, t, turned ? &on_device : NULL, &err),
                CKD_OK);
            uint64_t copied = emulated_copied[DEVICE_TO_HOST], raw = 0;
            assert_int_equal(save_model(&b, store, device, step, fidelities[f], codec, t,
                                        turned ? NULL : &on_device, &err),
                             CKD_OK);
            for (unsigned i = 0; i < TENSORS; i++) {
                raw += size_of(&t[i]);
            }
            assert_true(turned || backend != emulated_device() ||
                        emulated_copied[DEVICE_TO_HOST] - copied <= raw + raw / 8);
            /* Ids are random, so the index may be a few bytes larger or smaller. */
            assert_true(llabs((long long)a.stored_bytes - (long long)b.stored_bytes) <
                        64 + (long long)a.stored_bytes / 20000);
            assert_int_equal(a.raw_bytes, b.raw_bytes);
            check_loads(store, &b, t, fidelities[f] == CKD_EXACT);
            change(t, 10 * step);
        }
        model_free(t);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* Reads columns of a tall matrix, more than fits into a buffer of pinned memory, in portions of many sizes. */
static void test_reader(void **state) {
    enum { ROWS = 9001, COLUMNS = 301, FIRST = 70, WIDTH = 149 };
    ckd_store *store = store_create(*state);
    uint64_t *values = malloc(ROWS * COLUMNS * sizeof(*values)), *got = malloc(ROWS * WIDTH * sizeof(*got));
    assert_true(values && got);
    for (uint64_t i = 0; i < ROWS * COLUMNS; i++) {
        values[i] = i * UINT64_C(0x9e3779b97f4a7c15);
    }
    void *device = to_device(values, ROWS * COLUMNS * sizeof(*values));
    device_lease *lease;
    ckd_error err;
    assert_int_equal(device_acquire(&lease, store, &on_device, device, &err), CKD_OK);
    device_reader whole = device_reader_of(lease, device, sizeof(*values), ROWS * COLUMNS),
                  some = device_reader_columns(&whole, FIRST, WIDTH, COLUMNS);
    uint64_t copied = emulated_copied[DEVICE_TO_HOST];
    for (uint64_t at = 0, n = 1; at < ROWS * WIDTH; at += n, n = n * 7 % 100003 + 1) {
        n = n < ROWS * WIDTH - at ? n : ROWS * WIDTH - at;
        assert_int_equal(device_read(&some, at, n, got + at, &err), CKD_OK);
    }
    /* Each element is copied once. */
    assert_true(backend != emulated_device() ||
                emulated_copied[DEVICE_TO_HOST] - copied == ROWS * WIDTH * sizeof(*got));
    for (uint64_t i = 0; i < ROWS * WIDTH; i++) {
        assert_true(got[i] == values[i / WIDTH * COLUMNS + FIRST + i % WIDTH]);
    }
    assert_int_equal(device_read(&some, 5, 300, got, &err), CKD_OK); /* reading back at the start works too */
    for (uint64_t i = 0; i < 300; i++) {
        assert_true(got[i] == values[(5 + i) / WIDTH * COLUMNS + FIRST + (5 + i) % WIDTH]);
    }
    device_release(store, lease);
    backend->release(0, device);
    free(values);
    free(got);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* Saves parts of a tensor from the device, and loads a part to it. */
static void test_regions(void **state) {
    ckd_store *store = store_create(*state);
    ckd_error err;
    const uint64_t shape[2] = {64, 48}, elements = 64 * 48;
    float *values = random_values(CKD_F32, elements, 3);
    float *parts = malloc(elements * sizeof(float));
    assert_non_null(parts);
    for (uint64_t i = 0; i < 64; i++) { /* the left half, then the right one */
        memcpy(parts + i * 16, values + i * 48, 16 * sizeof(float));
        memcpy(parts + 64 * 16 + i * 32, values + i * 48 + 16, 32 * sizeof(float));
    }
    float *device = to_device(parts, elements * sizeof(float));
    ckd_save *save = begin_save(store, "run", 1);
    for (int i = 0; i < 2; i++) {
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "w";
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.region =
            (ckd_region){.kind = CKD_REGION_BOX, .offsets = {0, i ? 16 : 0}, .lengths = {64, i ? 32 : 16}};
        t.data = device + (i ? 64 * 16 : 0);
        t.device = &on_device;
        assert_int_equal(ckd_save_tensor(save, &t, &err), CKD_OK);
    }
    ckd_checkpoint c;
    assert_int_equal(ckd_save_commit(&c, save, &err), CKD_OK);
    float *whole = load_whole(store, "run", 1, "w", elements * sizeof(float));
    assert_memory_equal(whole, values, elements * sizeof(float));
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {3, 10}, .lengths = {5, 20}};
    q.data = device;
    q.size = 100 * sizeof(float);
    q.device = &on_device;
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    from_device(parts, device, q.size);
    for (uint64_t i = 0; i < 100; i++) {
        assert_true(parts[i] == values[(3 + i / 20) * 48 + 10 + i % 20]);
    }
    ckd_load_end(load);
    free(values);
    free(parts);
    free(whole);
    backend->release(0, device);
    ckd_store_close(store);
}

/* ---- loads by several ranks ---- */

typedef struct loading_ranks {
    ckd_store *store;
    const ckd_checkpoint *c;
    const tensor *t;
    void *to[2][TENSORS];
} loading_ranks;

static ckd_status load_to_devices(void *context, thread_rank *rank, ckd_error *err) {
    loading_ranks *r = context;
    ckd_load *load;
    ckd_load_request requests[TENSORS];
    ckd_status status = ckd_load_begin(&load, r->store, &r->c->id, err);
    for (unsigned i = 0; i < TENSORS; i++) { /* tensor 1 goes to host memory */
        requests[i] = request_of(&r->t[i], r->to[rank->rank][i], i == 1 ? NULL : &on_device);
    }
    if (status == CKD_OK) {
        status = ckd_load_all_together(load, &rank->transport, requests, TENSORS, 0, err);
        ckd_load_end(load);
    }
    return status;
}

/* Two ranks load to device memory together. */
static void test_together(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    ckd_error err;
    ckd_checkpoint c;
    model(t, false);
    assert_int_equal(save_model(&c, store, "run", 1, CKD_EXACT, CKD_CODEC_AUTO, t, NULL, &err), CKD_OK);
    loading_ranks r = {.store = store, .c = &c, .t = t};
    for (unsigned i = 0; i < 2 * TENSORS; i++) {
        size_t size = size_of(&t[i % TENSORS]);
        void *garbage = random_bits(size + 8, i);
        r.to[i / TENSORS][i % TENSORS] = i % TENSORS == 1 ? garbage : to_device(garbage, size);
        if (i % TENSORS != 1) {
            free(garbage);
        }
    }
    thread_ranks ranks = {0};
    thread_ranks_run(&ranks, 2, load_to_devices, &r);
    for (unsigned i = 0; i < 2 * TENSORS; i++) {
        const tensor *at = &t[i % TENSORS];
        void *to = r.to[i / TENSORS][i % TENSORS], *got = i % TENSORS == 1 ? to : malloc(size_of(at) + 1);
        assert_int_equal(ranks.ranks[i / TENSORS].status, CKD_OK);
        if (got != to) {
            from_device(got, to, size_of(at));
            backend->release(0, to);
        }
        assert_memory_equal(got, at->host, size_of(at));
        free(got);
    }
    /* An address outside device memory is refused on all ranks before anything is loaded. */
    for (unsigned i = 0; i < 2 * TENSORS; i++) {
        r.to[i / TENSORS][i % TENSORS] = t[i % TENSORS].host;
    }
    thread_ranks_run(&ranks, 2, load_to_devices, &r);
    assert_int_equal(ranks.ranks[0].status, CKD_E_INVALID);
    assert_int_equal(ranks.ranks[1].status, CKD_E_INVALID);
    assert_non_null(strstr(ranks.ranks[0].err.message, "host memory"));
    model_free(t);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- errors ---- */

static void refused(ckd_store *store, const ckd_tensor *t, ckd_status status, const char *says) {
    ckd_error err;
    ckd_save *save = begin_save(store, "refused", 1);
    assert_int_equal(ckd_save_tensor(save, t, &err), status);
    assert_non_null(strstr(err.message, says));
    assert_string_equal(err.tensor, t->name);
    ckd_save_abort(save);
}

static void test_refused(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    model(t, false);
    ckd_device other = CKD_DEVICE_INIT;
    other.device = 1;
    ckd_tensor d = description(&t[0], &other);
    refused(store, &d, CKD_E_DEVICE, "there is no such device");
    emulated_devices = 2;
    refused(store, &d, CKD_E_INVALID, "declared to be on device 1, but is on device 0");
    emulated_devices = 1;
    d = description(&t[0], &on_device);
    d.data = t[0].host;
    refused(store, &d, CKD_E_INVALID, "but is in host memory");
    d.data = NULL;
    refused(store, &d, CKD_E_INVALID, "neither data nor a read function");
    /* The backend cannot be opened. */
    device_backend_use(NULL);
    setenv("CKD_CUDA", "/nowhere/libckptdelta_cuda.so", 1);
    d = description(&t[0], &on_device);
    refused(store, &d, CKD_E_DEVICE, "/nowhere/libckptdelta_cuda.so");
    unsetenv("CKD_CUDA");
    device_backend_use(emulated_device());
    model_free(t);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/*
 * Each device call fails once. The save or load fails with that error, or does without the device, and the next one
 * works.
 */
static void test_failures(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    model(t, test_level_now() == TEST_QUICK);
    ckd_error err;
    ckd_checkpoint c;
    /* recovered: saves that succeeded although a call failed, as they read the blocks they could not hash. */
    int failed = 0, recovered = 0;
    /* Odd strides make both kinds of failure occur. They are larger where emulated kernels take minutes. */
    const bool few = under_sanitizer() || test_level_now() == TEST_QUICK;
    const int all = few ? 8 : 40, stride = under_sanitizer() ? 13 : few ? 9 : 3;
    for (int n = 1;; n += n < all ? 1 : stride) {
        emulated_fail_after = n;
        emulated_fail_as = n % 2 ? DEVICE_FAILED : DEVICE_FULL;
        change(t, (unsigned)n); /* unchanged tensors would not be read at all */
        ckd_status status =
            save_model(&c, store, "run", (uint64_t)n, CKD_EXACT, CKD_CODEC_AUTO, t, &on_device, &err);
        bool happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (status == CKD_OK) {
            check_loads(store, &c, t, true);
            if (!happened) {
                break;
            }
            recovered++;
        } else {
            assert_int_equal(status, n % 2 ? CKD_E_DEVICE : CKD_E_NOMEM);
            assert_non_null(strstr(err.message, "told to fail"));
            failed++;
        }
    }
    const int least = few ? 3 : 15;
    assert_true(failed > least && recovered > least && failed + recovered > 2 * least);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    void *to = to_device(t[3].host, size_of(&t[3]));
    const int every = (int)test_stride(3, 1, 1);
    for (int n = (int)test_first("calls of a load", (unsigned)every);; n += every) {
        ckd_load_request q = request_of(&t[3], to, &on_device);
        emulated_fail_after = n;
        emulated_fail_as = DEVICE_FAILED;
        ckd_status status = ckd_load_tensor(load, &q, &err);
        bool happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (!happened) {
            assert_int_equal(status, CKD_OK);
            break;
        }
        assert_true(status == CKD_E_DEVICE || status == CKD_OK); /* OK if returning the queue failed */
    }
    backend->release(0, to);
    ckd_load_end(load);
    assert_int_equal(verify_damage(store), 0);
    model_free(t);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- unchanged blocks ---- */

enum { STAYING = 3, TALL = 1700, WIDE = 1300 };

/* A tensor that is cut into panels, one of several blocks, and a small one. */
static void staying_model(tensor *t) {
    const tensor all[STAYING] = {{"tall", CKD_F32, 2, {TALL, WIDE}, (uint64_t)TALL * WIDE, NULL, NULL},
                                 {"long", CKD_BF16, 1, {1300000, 0}, 1300000, NULL, NULL},
                                 {"short", CKD_F64, 1, {321, 0}, 321, NULL, NULL}};
    for (unsigned i = 0; i < STAYING; i++) {
        t[i] = all[i];
        t[i].host = random_values(t[i].dtype, t[i].elements, 70 + i);
        t[i].device = to_device(t[i].host, size_of(&t[i]));
    }
}

static void staying_free(ckd_store *store, tensor *t, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        free(t[i].host);
        backend->release(0, t[i].device);
    }
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

static void set_byte(tensor *t, uint64_t at, uint8_t value) {
    ((uint8_t *)t->host)[at] = value;
    backend->release(0, t->device);
    t->device = to_device(t->host, size_of(t));
}

static const ckd_optimizer adam = {.struct_size = sizeof(ckd_optimizer),
                                   .kind = CKD_ADAMW,
                                   .lr = 1e-3,
                                   .beta1 = 0.9,
                                   .beta2 = 0.95,
                                   .eps = 1e-8,
                                   .step = 5};

/*
 * Saves from host memory and, in another chain, from the device; both must store the same. Returns how many bytes were
 * copied from the device.
 */
static uint64_t save_staying(ckd_store *store, uint64_t step, tensor *t, unsigned count) {
    ckd_checkpoint of[2];
    ckd_error err;
    uint64_t copied = 0;
    for (unsigned d = 0; d < 2; d++) {
        ckd_save_options o = options_of(d ? "device" : "host", step);
        ckd_save *save = begin_with(store, &o);
        copied = emulated_copied[DEVICE_TO_HOST];
        for (unsigned i = 0; i < count; i++) {
            ckd_tensor one = description(&t[i], d ? &on_device : NULL);
            one.role = strncmp(t[i].name, "master", 6) == 0 ? CKD_ROLE_MASTER : CKD_ROLE_AUTO;
            one.optimizer = strstr(t[i].name, "layer") ? &adam : NULL;
            assert_int_equal(ckd_save_tensor(save, &one, &err), CKD_OK);
        }
        assert_int_equal(ckd_save_commit(&of[d], save, &err), CKD_OK);
    }
    copied = emulated_copied[DEVICE_TO_HOST] - copied;
    assert_int_equal(of[0].raw_bytes, of[1].raw_bytes);
    assert_true(llabs((long long)of[0].stored_bytes - (long long)of[1].stored_bytes) <
                64 + (long long)of[0].stored_bytes / 20000);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &of[1].id, &err), CKD_OK);
    for (unsigned i = 0; i < count; i++) {
        void *got = malloc(size_of(&t[i]));
        assert_non_null(got);
        ckd_load_request q = request_of(&t[i], got, NULL);
        assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
        assert_memory_equal(got, t[i].host, size_of(&t[i]));
        free(got);
    }
    ckd_load_end(load);
    return copied;
}

/*
 * If a block is unchanged since its parent, only hashes are copied from the device. This needs a parent that stores
 * the block itself.
 */
static void test_unchanged_blocks(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[STAYING];
    uint64_t raw = 0, block = CKD_BLOCK_ELEMENTS * 4, step = 1;
    bool counted = backend == emulated_device();
    staying_model(t);
    for (unsigned i = 0; i < STAYING; i++) {
        raw += size_of(&t[i]);
    }
    uint64_t hashes = raw / 512 + 4096; /* 8 bytes per 4096, the ends of blocks, and a margin */
    assert_true(!counted || save_staying(store, step++, t, STAYING) >= raw);
    for (unsigned i = 0; i < 2; i++) {
        uint64_t copied = save_staying(store, step++, t, STAYING);
        assert_true(!counted || (copied > 0 && copied < hashes));
    }
    set_byte(&t[0], size_of(&t[0]) / 2, 7);
    set_byte(&t[1], size_of(&t[1]) / 2, 7);
    /*
     * In the second round the blocks are not stored in the parent itself, and the save may need them for a
     * materialized copy.
     */
    for (unsigned i = 0; i < 2; i++) {
        uint64_t copied = save_staying(store, step++, t, STAYING);
        assert_true(!counted || (copied > block / 8 && copied < hashes + 2 * block));
    }
    assert_int_equal(verify_damage(store), 0);
    staying_free(store, t, STAYING);
}

/*
 * Values that other tensors are computed from are read even if the device finds them unchanged: masters of rounded
 * copies, inputs of optimizer steps.
 */
static void test_values_that_others_need(void **state) {
    enum { NEEDED = 5, EACH = 5000 };
    ckd_store *store = store_create(*state);
    tensor t[NEEDED] = {{"exp_avg_sq.layer", CKD_F32, 1, {EACH, 0}, EACH, NULL, NULL},
                        {"exp_avg.layer", CKD_F32, 1, {EACH, 0}, EACH, NULL, NULL},
                        {"layer", CKD_F32, 1, {EACH, 0}, EACH, NULL, NULL},
                        {"master", CKD_F32, 1, {EACH, 0}, EACH, NULL, NULL},
                        {"rounded", CKD_BF16, 1, {EACH, 0}, EACH, NULL, NULL}};
    for (unsigned i = 0; i < NEEDED; i++) {
        t[i].host = i == 4 ? malloc(size_of(&t[i])) : random_values(t[i].dtype, EACH, 90 + i);
        assert_non_null(t[i].host);
        if (i == 4) {
            kernels_cpu()->cast(CKD_BF16, t[i].host, CKD_F32, t[3].host, EACH);
        }
        t[i].device = to_device(t[i].host, size_of(&t[i]));
    }
    save_staying(store, 1, t, NEEDED - 1);
    save_staying(store, 2, t, NEEDED); /* the rounded copy is new, its master is unchanged */
    save_staying(store, 3, t, NEEDED);
    assert_int_equal(verify_damage(store), 0);
    staying_free(store, t, NEEDED);
}

/*
 * Each of many tensors last changed in another checkpoint. A block of copies cannot name so many, so some values are
 * read after all.
 */
static void test_many_that_stay(void **state) {
    enum { MANY = 80, EACH = 600 };
    ckd_store *store = store_create(*state);
    static tensor t[MANY];
    char names[MANY][16];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof(names[i]), "t%u", i);
        t[i] = (tensor){names[i], CKD_F32, 1, {EACH, 0}, EACH, random_values(CKD_F32, EACH, i), NULL};
        t[i].device = to_device(t[i].host, size_of(&t[i]));
    }
    for (unsigned i = 0; i <= MANY; i++) {
        save_staying(store, i, t, MANY);
        if (i < MANY) {
            free(t[i].host);
            backend->release(0, t[i].device);
            t[i].host = random_values(CKD_F32, EACH, 1000 + i);
            t[i].device = to_device(t[i].host, size_of(&t[i]));
        }
    }
    assert_int_equal(verify_damage(store), 0);
    staying_free(store, t, MANY);
}

static void note_message(void *context, const char *message) {
    *(bool *)context |=
        strstr(message, "is copied to the host, as the device could not tell which blocks have changed") !=
        NULL;
}

/* If hashing fails, the values are read. */
static void test_hashes_that_fail(void **state) {
    bool reported = false;
    ckd_store *store = store_create(*state);
    tensor t[STAYING];
    unsigned recovered = 0, failed = 0;
    staying_model(t);
    save_staying(store, 1, t, STAYING);
    ckd_store_close(store);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    char path[512];
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    o.on_message = note_message;
    o.message_context = &reported;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_WRITE, &o, NULL), CKD_OK);
    const int every = (int)test_stride(3, 1, 1);
    for (int n = (int)test_first("hashes", (unsigned)every);; n += every) {
        ckd_save_options options = options_of("device", (uint64_t)n + 1);
        ckd_save *save = begin_with(store, &options);
        ckd_tensor one = description(&t[0], &on_device);
        ckd_error err;
        reported = false;
        uint64_t copied = emulated_copied[DEVICE_TO_HOST];
        emulated_fail_after = n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status = ckd_save_tensor(save, &one, &err);
        bool happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        copied = emulated_copied[DEVICE_TO_HOST] - copied;
        assert_true(status == CKD_OK || happened);
        assert_true(!reported || status != CKD_OK || copied > size_of(&t[0]) / 16); /* a panel was read */
        recovered += reported && status == CKD_OK;
        failed += status != CKD_OK;
        ckd_save_abort(save);
        if (!happened) {
            break;
        }
    }
    assert_true(recovered > (every > 1 ? 2 : 10) && failed >= (every > 1 ? 0 : 3));
    staying_free(store, t, STAYING);
}

#ifndef DEVICE_STORE_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_same_bytes),   tempdir_test(test_reader),
        tempdir_test(test_regions),          tempdir_test(test_refused),
        tempdir_test(test_failures),         tempdir_test(test_unchanged_blocks),
        tempdir_test(test_many_that_stay),   tempdir_test(test_together),
        tempdir_test(test_hashes_that_fail), tempdir_test(test_values_that_others_need),
    };
    backend = emulated_device();
    device_backend_use(backend);
    save_device_use(true);
    return run_sampled("device_store", tests, 2, NULL, NULL);
}
#endif
