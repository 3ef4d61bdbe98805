/* Promises of the public header that are easy to break: identities, branches, duplicates, lost origins. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { N = 4096 };
static const uint64_t shape_n = N;

static void test_an_id_is_used_once(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    ckd_save_options o = options_of("run", 2);
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    ckd_save *first = begin_with(store, &o);
    o.step = 1;
    ckd_save *second = begin_with(store, &o); /* neither save is committed yet */
    add_tensor(first, "t", CKD_F32, 1, &shape_n, NULL, values);
    add_tensor(second, "t", CKD_F32, 1, &shape_n, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, first, NULL), CKD_OK);
    assert_int_equal(ckd_save_commit(NULL, second, NULL), CKD_E_INVALID);
    ckd_save *third;
    assert_int_equal(ckd_save_begin(&third, store, &o, NULL), CKD_E_INVALID);
    assert_null(third);
    free(values);
    ckd_store_close(store);
}

static void test_ranks_that_see_different_parents(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    ckd_save_options o = options_of("run", 2);
    o.world = 2;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    ckd_save *ranks[2];
    ckd_part parts[2];
    ranks[0] = begin_with(store, &o);
    save_one(store, "run", 1, "w", CKD_F32, 1, &shape_n, values); /* rank 1 has a parent, rank 0 has none */
    o.rank = 1;
    ranks[1] = begin_with(store, &o);
    add_tensor(ranks[0], "x", CKD_F32, 1, &shape_n, NULL, values);
    add_tensor(ranks[1], "w", CKD_F32, 1, &shape_n, NULL, values);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ckd_save_seal(&parts[i], ranks[i], NULL), CKD_OK);
    }
    ckd_checkpoint info;
    assert_int_equal(ckd_save_publish(&info, ranks[0], parts, 2, NULL), CKD_OK);
    ckd_save_abort(ranks[1]); /* too late, as its file is part of the checkpoint */
    ckd_part_free(&parts[0]);
    ckd_part_free(&parts[1]);
    ckd_store_close(store);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    void *back = load_whole(store, "run", 2, "w", N * 4);
    assert_memory_equal(back, values, N * 4);
    free(back);
    free(values);
    ckd_store_close(store);
}

/* Step 2 is deleted after one rank began on it, and before the other began, which builds on step 1. */
static void begin_around_a_deletion(ckd_save *ranks[2], ckd_store *store, uint32_t first) {
    ckd_save_options o = options_of("run", 3);
    ckd_checkpoint parent;
    o.world = 2;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    o.rank = first;
    ranks[first] = begin_with(store, &o);
    assert_int_equal(ckd_store_find(&parent, store, "run", 2, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &parent.id, 1, NULL, NULL), CKD_OK);
    o.rank = 1 - first;
    ranks[1 - first] = begin_with(store, &o);
}

static void test_ranks_that_begin_around_a_deletion(void **state) {
    static const char *const names[2] = {"a", "b"};
    for (uint32_t first = 0; first < 2; first++) {
        char *dir = tempdir_create();
        ckd_store *store = store_create(dir);
        float *values = random_values(CKD_F32, N, 1);
        ckd_save *ranks[2];
        ckd_part parts[2];
        ckd_checkpoint info;
        ckd_error err = {0};
        for (uint64_t step = 1; step < 3; step++) { /* step 2 does not build on step 1 */
            ckd_save_options o = options_of("run", step);
            o.base = true;
            ckd_save *save = begin_with(store, &o);
            add_tensor(save, names[0], CKD_F32, 1, &shape_n, NULL, values);
            change_values(CKD_F32, values, N, 5);
            add_tensor(save, names[1], CKD_F32, 1, &shape_n, NULL, values);
            change_values(CKD_F32, values, N, 6);
            assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
        }
        begin_around_a_deletion(ranks, store, first);
        for (int i = 0; i < 2; i++) {
            add_tensor(ranks[i], names[i], CKD_F32, 1, &shape_n, NULL, values);
            assert_int_equal(ckd_save_seal(&parts[i], ranks[i], NULL), CKD_OK);
        }
        if (ckd_save_publish(&info, ranks[0], parts, 2, &err) != CKD_OK) {
            fail_msg("%s (%s)", err.message, err.file);
        }
        assert_int_equal(info.kind, CKD_DELTA);
        ckd_save_end(ranks[1]);
        for (int i = 0; i < 2; i++) {
            ckd_part_free(&parts[i]);
            float *back = load_whole(store, "run", 3, names[i], N * 4);
            assert_memory_equal(back, values, N * 4);
            free(back);
        }
        assert_int_equal(verify_damage(store), 0);
        free(values);
        ckd_store_close(store);
        tempdir_remove(dir);
    }
    (void)state;
}

static void test_names_that_cannot_be_stored(void **state) {
    ckd_store *store = store_create(*state);
    ckd_save_options o = options_of("run", 1);
    ckd_save *save;
    o.metric_name = "loss\xff";
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_E_INVALID);
    o.metric_name = NULL;
    save = begin_with(store, &o);
    assert_int_equal(ckd_save_blob(save, "rng", "a", 1, NULL), CKD_OK);
    ckd_error err;
    assert_int_equal(ckd_save_blob(save, "rng", "b", 1, &err), CKD_E_MISMATCH);
    assert_string_equal(err.tensor, "rng");
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_E_STATE);
    ckd_store_close(store);
}

static void test_same_ok_needs_the_whole_checkpoint(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    ckd_save_options o = options_of("run", 1);
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK); /* a retry uses the same id */
    for (int attempt = 0; attempt < 4; attempt++) {
        ckd_save *save = begin_with(store, &o);
        ckd_region half = {.kind = CKD_REGION_FLAT, .start = 0, .count = N / 2};
        ckd_region rest = {.kind = CKD_REGION_FLAT, .start = N / 2, .count = N / 2};
        add_tensor(save, "a", CKD_F32, 1, &shape_n, &half, values);
        add_tensor(save, "a", CKD_F32, 1, &shape_n, &rest, values + N / 2);
        if (attempt != 1) {
            add_tensor(save, "b", CKD_F32, 1, &shape_n, NULL, values);
        }
        ckd_status blob = ckd_save_blob(save, "x", attempt == 2 ? "2" : "1", 1, NULL);
        assert_int_equal(blob, attempt == 2 ? CKD_E_EXISTS : CKD_OK);
        ckd_status commit = ckd_save_commit(NULL, save, NULL);
        assert_int_equal(commit, attempt == 1 ? CKD_E_EXISTS : attempt == 2 ? CKD_E_STATE : CKD_OK);
    }
    free(values);
    ckd_store_close(store);
}

/* A comparison needs what a save needs: every element, blob and empty tensor, each once. */
static void test_same_ok_needs_each_part_once(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    memcpy(values + N / 2, values, N / 2 * 4);
    ckd_save_options o = options_of("run", 1);
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    ckd_region half = {.kind = CKD_REGION_FLAT, .start = 0, .count = N / 2};
    ckd_region rest = {.kind = CKD_REGION_FLAT, .start = N / 2, .count = N / 2};
    uint64_t none = 0;
    static const struct {
        bool without_empty, without_blob;
        ckd_status expected;
        const char *tensor;
    } cases[] = {{false, false, CKD_OK, ""}, /* the first one saves */
                 {false, false, CKD_OK, ""},
                 {true, false, CKD_E_EXISTS, "empty"},
                 {false, true, CKD_E_EXISTS, "y"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "a", CKD_F32, 1, &shape_n, &half, values);
        add_tensor(save, "a", CKD_F32, 1, &shape_n, &rest, values);
        if (!cases[i].without_empty) {
            add_tensor(save, "empty", CKD_F32, 1, &none, NULL, NULL);
        }
        assert_int_equal(ckd_save_blob(save, "x", "1", 1, NULL), CKD_OK);
        if (!cases[i].without_blob) {
            assert_int_equal(ckd_save_blob(save, "y", "2", 1, NULL), CKD_OK);
        }
        ckd_error err = {0};
        assert_int_equal(ckd_save_commit(NULL, save, &err), cases[i].expected);
        assert_string_equal(err.tensor, cases[i].tensor);
    }
    ckd_save *save = begin_with(store, &o);
    assert_int_equal(ckd_save_blob(save, "x", "1", 1, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(save, "x", "1", 1, NULL), CKD_E_MISMATCH);
    ckd_save_abort(save);
    save = begin_with(store, &o);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "a";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = &shape_n;
    t.region = half;
    t.data = values;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_E_MISMATCH);
    ckd_save_abort(save);
    free(values);
    ckd_store_close(store);
}

static void test_branches_of_the_longest_names(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    char run[CKD_RUN_MAX + 1];
    memset(run, 'r', CKD_RUN_MAX);
    run[CKD_RUN_MAX] = '\0';
    ckd_save_options o = options_of(run, 1);
    o.on_duplicate = CKD_DUPLICATE_BRANCH;
    for (; o.step < 4; o.step++) {
        assert_int_equal(ckd_save_commit(NULL, begin_with(store, &o), NULL), CKD_OK);
    }
    o.step = 2; /* a branch would need a longer name, so it fails */
    ckd_save *save;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_E_INVALID);
    free(values);
    ckd_store_close(store);
}

static void remove_largest_chunk(const char *dir) {
    char folder[2048], path[4096], largest[4096] = "";
    off_t most = -1;
    snprintf(folder, sizeof(folder), "%s/store/data/c", dir);
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        struct stat info;
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.' && stat(path, &info) == 0 && info.st_size > most) {
            most = info.st_size;
            snprintf(largest, sizeof(largest), "%s", path);
        }
    }
    closedir(d);
    assert_int_equal(unlink(largest), 0);
}

static void test_a_lost_origin_does_not_prevent_saving(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    for (uint64_t step = 1; step < 3; step++) {
        save_one(store, "run", step, "frozen", CKD_F32, 1, &shape_n, values);
    }
    remove_largest_chunk(*state);
    save_one(store, "run", 3, "frozen", CKD_F32, 1, &shape_n, values);
    void *back = load_whole(store, "run", 3, "frozen", N * 4);
    assert_memory_equal(back, values, N * 4);
    free(back);
    free(values);
    ckd_store_close(store);
}

/* Periodic residuals: the coded size exceeds the size that the symbol coder planned. */
static void test_residuals_that_exceed_their_plan(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t n = CKD_BLOCK_ELEMENTS;
    uint8_t *values = random_bits(n, 3);
    static const unsigned periods[] = {31, 59, 120};
    for (size_t p = 0; p < 3; p++) {
        char run[16];
        snprintf(run, sizeof(run), "p%u", periods[p]);
        for (uint64_t i = 0; i < n; i++) {
            values[i] |= 128;
        }
        save_one(store, run, 1, "t", CKD_U8, 1, &n, values);
        for (uint64_t i = 0; i < n; i++) {
            values[i] = (uint8_t)(values[i] + i % periods[p]);
        }
        save_one(store, run, 2, "t", CKD_U8, 1, &n, values);
        void *back = load_whole(store, run, 2, "t", n);
        assert_memory_equal(back, values, n);
        free(back);
    }
    free(values);
    ckd_store_close(store);
}

/*
 * Each tensor's last values are in a different checkpoint. The newest checkpoint refers to as many files as
 * there are tensors, and a load opens few of them at once.
 */
static void test_loads_open_few_files(void **state) {
    enum { TENSORS = 150, SIZE = 64 };
    ckd_store *store = store_create(*state);
    uint64_t n = SIZE;
    float *values = random_values(CKD_F32, TENSORS * SIZE, 1);
    for (uint64_t step = 0; step < TENSORS; step++) {
        change_values(CKD_F32, values + step * SIZE, SIZE, (unsigned)step);
        ckd_save *save = begin_save(store, "run", step);
        for (unsigned t = 0; t < TENSORS; t++) {
            char name[32];
            snprintf(name, sizeof(name), "t%u", t);
            add_tensor(save, name, CKD_F32, 1, &n, NULL, values + t * SIZE);
        }
        assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    }
    struct rlimit before, few;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = 128;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (unsigned t = 0; t < TENSORS; t += 7) {
        char name[32];
        snprintf(name, sizeof(name), "t%u", t);
        void *back = load_whole(store, "run", TENSORS - 1, name, SIZE * 4);
        assert_memory_equal(back, values + t * SIZE, SIZE * 4);
        free(back);
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    free(values);
    ckd_store_close(store);
}

static void test_handles_follow_a_rebuilt_catalog(void **state) {
    ckd_store *writer = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    save_one(writer, "run", 1, "t", CKD_F32, 1, &shape_n, values);
    ckd_store *reader = store_reopen(*state, CKD_OPEN_READ);
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", (char *)*state);
    assert_int_equal(ckd_store_rebuild(NULL, path, NULL, NULL), CKD_OK);
    ckd_store *other = store_reopen(*state, CKD_OPEN_WRITE);
    save_one(other, "run", 2, "t", CKD_F32, 1, &shape_n, values);
    ckd_checkpoint found;
    ckd_store *const handles[] = {writer, reader, other};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(ckd_store_find(&found, handles[i], "run", CKD_LATEST, NULL), CKD_OK);
        assert_int_equal(found.step, 2);
        ckd_store_close(handles[i]);
    }
    free(values);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_an_id_is_used_once),
        TEST(test_ranks_that_see_different_parents),
        TEST(test_ranks_that_begin_around_a_deletion),
        TEST(test_names_that_cannot_be_stored),
        TEST(test_same_ok_needs_the_whole_checkpoint),
        TEST(test_same_ok_needs_each_part_once),
        TEST(test_branches_of_the_longest_names),
        TEST(test_a_lost_origin_does_not_prevent_saving),
        TEST(test_residuals_that_exceed_their_plan),
        TEST(test_loads_open_few_files),
        TEST(test_handles_follow_a_rebuilt_catalog),
    };
    return cmocka_run_group_tests_name("contract", tests, NULL, NULL);
}
