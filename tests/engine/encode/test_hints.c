/*
 * The costs in records are those of what was written, whatever was expected of a block before. Later saves rely on
 * them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { COUNT = 65536, STEPS = 6 };
static const uint64_t shape[] = {256, 256};

static uint64_t state = 88172645463325252u;
static uint32_t random_word(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/*
 * Saves the next step. The parent's records give the expected size, and the limit of the load cost may exclude a
 * delta.
 */
static ckd_checkpoint save_next(ckd_store *store, uint64_t step, double max_load_cost,
                                const uint32_t *values) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = step;
    o.max_load_cost = max_load_cost;
    ckd_save *save;
    ckd_checkpoint saved;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    add_tensor(save, "t", CKD_U32, 2, shape, NULL, values);
    assert_int_equal(ckd_save_commit(&saved, save, NULL), CKD_OK);
    return saved;
}

/* Checks the blocks of all chunk files. Returns how many are coded without a parent. */
static size_t check_records(const char *dir) {
    char root[4096];
    snprintf(root, sizeof(root), "%s/store", dir);
    dir_list list;
    size_t alone = 0;
    assert_int_equal(dir_list_read(&list, path_in(root, DIR_CHUNKS).text, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        chunk *c;
        assert_int_equal(chunk_open(&c, path_of(root, DIR_CHUNKS, list.names[i]).text, NULL), CKD_OK);
        for (size_t k = 0; k < c->record_count; k++) {
            const record *r = &c->records[k];
            if (r->predictor == PREDICT_NONE) {
                alone++;
                assert_int_equal(r->chain_stored, r->stored_size);
                assert_int_equal(r->base_stored, r->stored_size);
            }
            assert_true(r->base_stored <= r->raw_size);
        }
        chunk_close(c);
    }
    dir_list_free(&list);
    return alone;
}

static int setup(void **dir) {
    *dir = tempdir_create();
    return 0;
}

static int teardown(void **dir) {
    tempdir_remove(*dir);
    return 0;
}

/* Values have `before` random bits in the first step, and `after` from the second step on. */
static void check_change(const char *dir, unsigned before, unsigned after) {
    uint32_t *values = malloc(sizeof(uint32_t) * COUNT);
    assert_non_null(values);
    ckd_store *store = store_create(dir);
    for (uint64_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < COUNT; i++) {
            uint32_t word = random_word();
            values[i] = step < 2 ? word >> (32 - (step ? after : before)) : values[i] + (word >> 16);
        }
        ckd_checkpoint saved = save_next(store, step, step == 1 ? 1 : 4, values);
        assert_true(saved.load_cost <= (step == 1 ? 1 : 4));
        uint32_t *back = load_whole(store, "run", step, "t", sizeof(uint32_t) * COUNT);
        assert_memory_equal(back, values, sizeof(uint32_t) * COUNT);
        free(back);
    }
    assert_true(check_records(dir) >= 2);
    ckd_store_close(store);
    free(values);
}

static void test_far_more_than_expected(void **dir) {
    check_change(*dir, 10, 32); /* stored raw: the parent's records expect less */
}

static void test_more_than_expected(void **dir) {
    check_change(*dir, 10, 25);
}

static void test_less_than_expected(void **dir) {
    check_change(*dir, 29, 25);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_far_more_than_expected),
        TEST(test_more_than_expected),
        TEST(test_less_than_expected),
    };
    return cmocka_run_group_tests_name("hints", tests, NULL, NULL);
}
