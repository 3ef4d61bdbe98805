/* A save by ranks that have different parents, as one was deleted between their beginnings. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"

enum { N = 20000 };
static const uint64_t shape = N;

static void delete_for_good(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    assert_int_equal(ckd_store_find(&c, store, run, step, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &c.id, 1, &o, NULL), CKD_OK);
}

/* Saves a checkpoint with one tensor, which depends on no other checkpoint if `base`. */
static void save_tensor(ckd_store *store, uint64_t step, const char *name, const float *values, bool base) {
    ckd_save_options o = options_of("run", step);
    o.base = base;
    ckd_save *save = begin_with(store, &o);
    add_tensor(save, name, CKD_F32, 1, &shape, NULL, values);
    commit_save(save);
}

/*
 * The parent of rank 1 is step 2, whose tensor is a copy of the one of step 1. The manifest of that is gone, and rank
 * 0's parent does not name its file.
 */
static void test_copies_of_deleted_checkpoints(void **state) {
    ckd_store *store = store_create(*state);
    float *frozen = random_values(CKD_F32, N, 1), *other = random_values(CKD_F32, N, 2);
    save_tensor(store, 1, "frozen", frozen, true);
    save_tensor(store, 2, "frozen", frozen, false);
    save_tensor(store, 3, "other", other, true);
    delete_for_good(store, "run", 1);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_save_options o = options_of("run", 4);
    ckd_save *saves[2];
    ckd_part parts[2];
    ckd_error err = {0};
    o.world = 2;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    saves[0] = begin_with(store, &o);
    delete_for_good(store, "run", 3);
    o.rank = 1;
    saves[1] = begin_with(store, &o);
    add_tensor(saves[0], "other", CKD_F32, 1, &shape, NULL, other);
    add_tensor(saves[1], "frozen", CKD_F32, 1, &shape, NULL, frozen);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(ckd_save_seal(&parts[rank], saves[rank], NULL), CKD_OK);
    }
    if (ckd_save_publish(NULL, saves[0], parts, 2, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    ckd_save_end(saves[1]);
    for (int rank = 0; rank < 2; rank++) {
        ckd_part_free(&parts[rank]);
    }
    float *got = load_whole(store, "run", 4, "frozen", N * sizeof(float));
    assert_memory_equal(got, frozen, N * sizeof(float));
    assert_int_equal(verify_damage(store), 0);
    free(got);
    free(frozen);
    free(other);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_copies_of_deleted_checkpoints)};
    return cmocka_run_group_tests_name("parents of ranks", tests, NULL, NULL);
}
