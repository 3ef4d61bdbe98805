/* What blocks of a matrix share is kept for other blocks, as much of it as the limits of number and size allow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/decode/internal.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

/* Three blocks per tensor, and 256 KiB of column steps: more than is kept in total. */
enum { ROWS = 9, COLUMNS = 1 << 16, COUNT = ROWS * COLUMNS, TENSORS = 66 };

static void fill(uint16_t *values, size_t n) {
    for (size_t i = 0; i < n; i++) { /* bf16 with magnitudes from 2^-14 to 2^-7 */
        values[i] = (uint16_t)(0x3880 + (next_random() & 0x83ff));
    }
}

static void name_of(char name[32], int i) {
    snprintf(name, 32, "exp_avg.%d", i);
}

/* Each tensor has its own window of the same values. */
static void save_all(ckd_store *store, const uint16_t *values) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    o.run = "run";
    o.fidelity = CKD_COARSE;
    o.effort = 1;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    const uint64_t shape[2] = {ROWS, COLUMNS};
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        name_of(name, i);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = name;
        t.role = CKD_ROLE_EXP_AVG;
        t.dtype = CKD_BF16;
        t.ndim = 2;
        t.shape = shape;
        t.data = values + i * 16;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    }
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
}

/* The columns of all tensors together exceed the limit of what is kept. */
static void test_more_columns_than_are_kept(void **state) {
    (void)state;
    assert_true((uint64_t)TENSORS * COLUMNS * 4 > CACHED_COLUMN_BYTES);
    char *dir = tempdir_create();
    uint16_t *values = malloc((COUNT + TENSORS * 16) * sizeof(*values)), *got = malloc(COUNT * sizeof(*got));
    assert_non_null(values);
    assert_non_null(got);
    fill(values, COUNT + TENSORS * 16);
    ckd_store *store;
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = 1;
    assert_int_equal(ckd_store_open(&store, dir, CKD_OPEN_CREATE, &options, NULL), CKD_OK);
    save_all(store, values);
    ckd_checkpoint found;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&found, store, "run", 0, NULL), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &found.id, NULL), CKD_OK);
    assert_true(found.stored_bytes <
                (uint64_t)TENSORS * COUNT / 2); /* of 2 bytes each, which shows that they are lossy */
    for (int round = 0; round < 2; round++) {
        for (int i = TENSORS - 1; i >= 0; i -= 1 + 20 * round) {
            char name[32];
            name_of(name, i);
            ckd_load_request request = CKD_LOAD_REQUEST_INIT;
            request.name = name;
            request.data = got;
            request.size = COUNT * sizeof(*got);
            assert_int_equal(ckd_load_tensor(load, &request, NULL), CKD_OK); /* its hashes are checked */
        }
    }
    ckd_load_end(load);
    ckd_store_close(store);
    free(values);
    free(got);
    tempdir_remove(dir);
}

/* More entries than places: the least recently used are replaced, except those in use. */
static void test_more_entries_than_places(void **state) {
    (void)state;
    columns_cache *c = malloc(sizeof(*c));
    assert_non_null(c);
    columns_cache_init(c);
    cached_columns *held = NULL;
    bool mine;
    for (uint64_t i = 0; i < 2 * CACHED_COLUMNS; i++) {
        hash128 content = content_hash(&i, sizeof(i));
        cached_columns *k = columns_claim(c, &mine, &content);
        assert_true(mine && k != held);
        k->columns = (lattice_columns){.columns = i};
        columns_filled(c, k, true);
        if (i == 0) {
            held = k;
        } else {
            columns_release(c, k);
        }
    }
    for (uint64_t i = 0; i < 2 * CACHED_COLUMNS; i++) { /* the first, which was in use, and the last ones */
        hash128 content = content_hash(&i, sizeof(i));
        if (i == 0 || i > CACHED_COLUMNS) {
            cached_columns *k = columns_claim(c, &mine, &content);
            assert_true(!mine && k->columns.columns == i);
            columns_release(c, k);
        }
    }
    columns_release(c, held);
    columns_cache_free(c, false);
    free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_more_columns_than_are_kept),
                                       cmocka_unit_test(test_more_entries_than_places)};
    return cmocka_run_group_tests_name("lossy shared", tests, NULL, NULL);
}
