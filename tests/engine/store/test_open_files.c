/* A process may have fewer files open than a checkpoint has chunk files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "tests/support/actions.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { WORLD = 8, SAVES = 10, FILES = WORLD * SAVES, LARGE = 80000, SMALL = 1000 };

static struct rlimit allowed;

/* Leaves `more` descriptors besides those that are open. */
static void allow_descriptors(size_t more) {
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &allowed), 0);
    struct rlimit few = {open_descriptors() + more, allowed.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
}

static int restore_limit(void **state) {
    if (allowed.rlim_max) {
        setrlimit(RLIMIT_NOFILE, &allowed);
    }
    return tempdir_teardown(state);
}

static const char *name_of(unsigned rank) {
    static char name[16];
    snprintf(name, sizeof(name), "rank%u", rank);
    return name;
}

/* Each rank saves a tensor of its own, and so a file. */
static void save_jointly(ckd_store *store, uint64_t step, float *values, uint64_t count) {
    ckd_save_options o = options_of("run", step);
    ckd_save *saves[WORLD];
    ckd_part parts[WORLD];
    o.world = WORLD;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    for (o.rank = 0; o.rank < WORLD; o.rank++) {
        float *own = values + o.rank * count;
        change_values(CKD_F32, own, count / 16, (unsigned)step);
        saves[o.rank] = begin_with(store, &o);
        add_tensor(saves[o.rank], name_of(o.rank), CKD_F32, 1, &count, NULL, own);
        assert_int_equal(ckd_save_seal(&parts[o.rank], saves[o.rank], NULL), CKD_OK);
    }
    assert_int_equal(ckd_save_publish(NULL, saves[0], parts, WORLD, NULL), CKD_OK);
    for (unsigned rank = 0; rank < WORLD; rank++) {
        ckd_part_free(&parts[rank]);
        if (rank) {
            ckd_save_end(saves[rank]);
        }
    }
}

static void check_newest(ckd_store *store, const float *values, uint64_t count) {
    for (unsigned rank = 0; rank < WORLD; rank++) {
        void *back = load_whole(store, "run", SAVES - 1, name_of(rank), count * sizeof(float));
        assert_memory_equal(back, values + rank * count, count * sizeof(float));
        free(back);
    }
}

static void joint_saves(const char *dir, uint64_t count) {
    ckd_store *store = store_create(dir);
    float *values = random_values(CKD_F32, WORLD * count, 1);
    /* two locks for each rank, the pool's least size, the catalog, the file that is written */
    allow_descriptors(2 * WORLD + 16 + 12);
    for (uint64_t step = 0; step < SAVES; step++) {
        save_jointly(store, step, values, count);
    }
    check_newest(store, values, count);
    assert_int_equal(verify_damage(store), 0);
    free(values);
    ckd_store_close(store);
}

static void test_joint_saves_of_large_files(void **state) {
    joint_saves(*state, LARGE);
}

static void test_joint_saves_of_small_files(void **state) {
    joint_saves(*state, SMALL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_joint_saves_of_large_files, tempdir_setup, restore_limit),
        cmocka_unit_test_setup_teardown(test_joint_saves_of_small_files, tempdir_setup, restore_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
