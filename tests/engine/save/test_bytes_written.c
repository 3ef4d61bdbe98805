/* How many bytes a chain of saves hands to the file system, beside those that its checkpoints take. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "tests/support/counters.h"
#include "tests/support/drift.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { SAVES = 50, WEIGHTS = 50 };

static ckd_checkpoint save_all(ckd_store *store, uint64_t step, ckd_fidelity fidelity, const drift *weights) {
    ckd_save_options o = lossy_options("run", step, fidelity);
    ckd_save *save;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    for (int i = 0; i < WEIGHTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "layers.%d.weight", i);
        add_drift(save, name, &weights[i]);
    }
    return commit_save(save);
}

/*
 * A chain of saves of 150 tensors: bytes written a save, beside those of its checkpoint. The first save also makes the
 * store, so it is not counted.
 */
static uint64_t rest_of(const char *dir, ckd_fidelity fidelity) {
    drift weights[WEIGHTS];
    uint64_t written = 0, stored = 0;
    ckd_store *store;
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i] = drift_new(32, 8, (unsigned)i + 1);
    }
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_CREATE, NULL), CKD_OK);
    save_all(store, 0, fidelity, weights);
    for (uint64_t step = 1; step <= SAVES; step++) {
        for (int i = 0; i < WEIGHTS; i++) {
            drift_step(&weights[i]);
        }
        uint64_t before = bytes_written();
        stored += save_all(store, step, fidelity, weights).stored_bytes;
        written += bytes_written() - before;
    }
    ckd_store_close(store);
    for (int i = 0; i < WEIGHTS; i++) {
        drift_free(&weights[i]);
    }
    assert_true(written > stored);
    print_message("%s: a save takes %llu bytes and writes %llu\n", ckd_fidelity_name(fidelity),
                  (unsigned long long)(stored / SAVES), (unsigned long long)(written / SAVES));
    return (written - stored) / SAVES;
}

/*
 * Besides the checkpoint, a save writes the catalog, its journal and an intent. That does not grow with the tensors. So
 * a checkpoint of 100 KB costs at most a quarter more than it takes, and a larger one less.
 */
static void test_a_save_writes_what_it_stores(void **state) {
    for (ckd_fidelity f = CKD_EXACT; f <= CKD_COARSE; f++) {
        char dir[1100];
        snprintf(dir, sizeof(dir), "%s/%s", (char *)*state, ckd_fidelity_name(f));
        assert_int_equal(mkdir(dir, 0777), 0);
        assert_true(rest_of(dir, f) <= 25000);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_a_save_writes_what_it_stores)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
