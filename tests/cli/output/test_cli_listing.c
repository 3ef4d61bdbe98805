/* A checkpoint that is deleted after the list was read is left out of the output. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cli/output/output.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { COUNT = 4096, STEPS = 3 };

static void save_lossy(ckd_store *store, uint64_t step) {
    uint64_t shape[] = {COUNT};
    float *values = random_values(CKD_F32, COUNT, (unsigned)step);
    ckd_save_options o = options_of("run", step);
    o.fidelity = CKD_NEAR;
    o.base = 1;
    ckd_save *save = begin_with(store, &o);
    add_tensor(save, "w", CKD_F32, 1, shape, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    free(values);
}

static void check(ckd_store *store, ckd_checkpoint_list *list, size_t count) {
    json_t *errors;
    ckd_error err = {0};
    assert_int_equal(cli_lossy_errors(&errors, store, list, &err), CKD_OK);
    assert_int_equal(list->count, count);
    assert_int_equal(json_array_size(errors), count);
    for (size_t i = 0; i < count; i++) {
        const char *place = json_string_value(json_object_get(json_array_get(errors, i), "checkpoint"));
        char expected[64];
        snprintf(expected, sizeof(expected), "run@%llu", (unsigned long long)list->items[i].step);
        assert_string_equal(place, expected);
    }
    json_decref(errors);
}

static void test_deleted_meanwhile(void **state) {
    ckd_store *store = store_create(*state), *reader;
    for (uint64_t step = 1; step <= STEPS; step++) {
        save_lossy(store, step);
    }
    reader = store_reopen(*state, CKD_OPEN_READ);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, reader, NULL, NULL), CKD_OK);
    check(reader, list, STEPS);
    /* Deletes step 2, then 1, then 3: these are their indices in the list at that time. */
    static const size_t deleted[] = {1, 0, 0};
    static const uint64_t left[] = {1, 3}; /* steps after the first deletion */
    for (size_t i = 0; i < STEPS; i++) {
        ckd_id id = list->items[deleted[i]].id;
        assert_int_equal(ckd_store_delete(store, &id, 1, NULL, NULL), CKD_OK);
        check(reader, list, STEPS - 1 - i);
        for (size_t k = 0; k < list->count && i == 0; k++) {
            assert_int_equal(list->items[k].step, left[k]);
        }
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(reader);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_deleted_meanwhile)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
