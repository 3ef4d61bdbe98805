/*
 * Ranks load together to device memory. Payloads are exchanged as usual, and each rank's device decodes what the rank
 * requested. The result is that of loads to host memory. If a device fails, its host takes over and other ranks do not
 * notice. The device is emulated.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/ranks/collective_load.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"
#include "tests/support/thread_ranks.h"

enum { ROWS = 610, COLUMNS = 700, COUNT = ROWS * COLUMNS, STEPS = 4, PARTS = 3, WORLD = 2 };
static const char *const names[PARTS] = {"exp_avg_sq.w", "exp_avg.w", "w"};

static void save_steps(ckd_store *store) {
    drift d = drift_new(ROWS, COLUMNS, 7);
    for (uint64_t step = 1; step <= STEPS; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_COARSE);
        save_drift(store, &o, &d);
        drift_step(&d);
    }
    drift_free(&d);
}

typedef struct job {
    ckd_store *store;
    ckd_checkpoint c;
    uint64_t staging;
    void *there[WORLD][PARTS];
    void *host; /* memory for all tensors of rank 1, which then loads nothing to a device */
    uint64_t first[WORLD], rows[WORLD]; /* what the rank requests of each tensor */
    uint64_t decoded[WORLD], given_up[WORLD];
} job;

static ckd_region region_of(const job *j, uint32_t rank) {
    return (ckd_region){
        .kind = CKD_REGION_BOX, .offsets = {j->first[rank], 0}, .lengths = {j->rows[rank], COLUMNS}};
}

static size_t size_of(const job *j, uint32_t rank) {
    return j->rows[rank] * COLUMNS * sizeof(float);
}

static ckd_status load_to_device(void *context, thread_rank *rank, ckd_error *err) {
    job *j = context;
    uint32_t me = rank->rank;
    ckd_load *load;
    ckd_load_request q[PARTS];
    ckd_load_options o = CKD_LOAD_OPTIONS_INIT;
    o.staging_bytes = j->staging;
    ckd_status status = ckd_load_begin_with(&load, j->store, &j->c.id, &o, err);
    for (int i = 0; i < PARTS; i++) {
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = names[i];
        q[i].data = j->there[me][i];
        q[i].size = size_of(j, me);
        q[i].region = region_of(j, me);
        q[i].device = &on_device;
        if (j->host && me == 1) {
            q[i].data = (uint8_t *)j->host + (size_t)i * size_of(j, me);
            q[i].device = NULL;
        }
    }
    if (status == CKD_OK) {
        status = collective_load_run(load, &rank->transport, &(collective_request){q, PARTS, 0, 1000}, err);
        j->decoded[me] = load->device.decoded;
        j->given_up[me] = load->device.given_up;
        ckd_load_end(load);
    }
    return status;
}

static job new_job(ckd_store *store, uint64_t step, uint32_t world, bool replicas) {
    job j = {.store = store};
    ckd_error err;
    assert_int_equal(ckd_store_find(&j.c, store, "run", step, &err), CKD_OK);
    for (uint32_t r = 0; r < world; r++) {
        j.first[r] = replicas ? 0 : r * (ROWS / 2 - 7);
        j.rows[r] = replicas ? ROWS : ROWS / 2 + 7;
        for (int i = 0; i < PARTS; i++) {
            void *garbage = random_bits(size_of(&j, r), r);
            j.there[r][i] = to_device(garbage, size_of(&j, r));
            free(garbage);
        }
    }
    return j;
}

static void check(const job *j, uint32_t world) {
    for (int i = 0; i < PARTS; i++) {
        float *whole = load_floats(j->store, "run", j->c.step, names[i], CKD_F32, COUNT);
        for (uint32_t r = 0; r < world; r++) {
            void *got = malloc(size_of(j, r));
            assert_non_null(got);
            from_device(got, j->there[r][i], size_of(j, r));
            assert_memory_equal(got, whole + j->first[r] * COLUMNS, size_of(j, r));
            free(got);
        }
        free(whole);
    }
}

static void end_job(job *j, uint32_t world) {
    for (uint32_t r = 0; r < world; r++) {
        for (int i = 0; i < PARTS; i++) {
            backend->release(0, j->there[r][i]);
        }
    }
}

static void loads_well(ckd_store *store, uint64_t step, bool replicas, uint64_t staging) {
    job j = new_job(store, step, WORLD, replicas);
    thread_ranks ranks = {0};
    uint64_t values = 0, before = emulated_copied[DEVICE_TO_DEVICE];
    j.staging = staging;
    thread_ranks_run(&ranks, WORLD, load_to_device, &j);
    uint64_t sent = emulated_copied[DEVICE_TO_DEVICE] - before;
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(ranks.ranks[r].status, CKD_OK);
        assert_true(j.decoded[r] > 0);
        assert_int_equal(j.given_up[r], 0);
        values += PARTS * size_of(&j, r);
    }
    assert_true(2 * sent < values);
    check(&j, WORLD);
    end_job(&j, WORLD);
}

static void test_values(void **state) {
    ckd_store *store = store_create(*state);
    save_steps(store);
    for (uint64_t step = 2; step <= STEPS; step += 2) {
        loads_well(store, step, true, 0);
        loads_well(store, step, false, 0);
        loads_well(store, step, false, 1 << 16); /* in many rounds */
    }
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/*
 * Each device call fails once, in any round. The values are right or the load reports that the device failed. The
 * other rank, which has no device, does not notice.
 */
static void test_failures(void **state) {
    ckd_store *store = store_create(*state);
    save_steps(store);
    unsigned recovered = 0;
    bool happened = true;
    for (int n = 1; happened; n += 3) {
        job j = new_job(store, STEPS - 1, WORLD, true);
        thread_ranks ranks = {0};
        j.staging = 1 << 16;
        j.host = malloc(PARTS * size_of(&j, 1));
        assert_non_null(j.host);
        emulated_fail_after = n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        thread_ranks_run(&ranks, WORLD, load_to_device, &j);
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (ranks.ranks[0].status == CKD_OK) {
            check(&j, 1);
            recovered += j.given_up[0] > 0;
        } else {
            assert_int_equal(ranks.ranks[0].status, n % 2 ? CKD_E_NOMEM : CKD_E_DEVICE);
        }
        /* addresses are checked before anything is loaded, and then all ranks get the error */
        assert_true(ranks.ranks[1].status == CKD_OK || n < PARTS + 2);
        free(j.host);
        end_job(&j, WORLD);
    }
    assert_true(recovered > 5);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_values),
        tempdir_test(test_failures),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return cmocka_run_group_tests_name("device_contiguous", tests, NULL, NULL);
}
