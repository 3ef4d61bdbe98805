/*
 * objects/ in a directory whose steps fail: an object is there as a whole or not at all, and messages say which. The
 * limit of bytes per second.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <errno.h>
#include <stdio.h>

#include <cmocka.h>

#include "objects/backend.h"
#include "tests/support/tempdir.h"

typedef struct faults {
    long left; /* steps until the one that fails */
    int errnum;
} faults;

static int fail_one(void *context, file_op step, const char *path) {
    faults *f = context;
    (void)step, (void)path;
    return f->left-- == 0 ? f->errnum : 0;
}

static const char content[] = "what a commit says";

static bool has_content(object_store *store, const char *key) {
    char there[sizeof(content)] = {0};
    object_range range = {0, there, sizeof(content)};
    ckd_status status = objects_get(store, key, &range, NULL, NULL);
    assert_true(status == CKD_OK || status == CKD_E_NOT_FOUND);
    assert_true(status != CKD_OK || strcmp(there, content) == 0);
    return status == CKD_OK;
}

/* Puts with one failing step after the other, until a put has no such step. Returns how many failed. */
static size_t sweep(object_store *store, int errnum, bool only_new) {
    object_source from = {.data = content, .size = sizeof(content)};
    for (size_t i = 0;; i++) {
        char key[64];
        ckd_error err = {0};
        uint64_t left = 0;
        faults f = {(long)i, errnum};
        snprintf(key, sizeof(key), "c%zu.%d/%d/key", i, errnum, only_new);
        file_set_fault_hook(fail_one, &f);
        ckd_status status = (only_new ? objects_put_new : objects_put)(store, key, &from, NULL, &err);
        file_set_fault_hook(NULL, NULL);
        bool there = has_content(store, key);
        assert_true(there || status != CKD_OK);
        assert_int_equal(there && status != CKD_OK, strstr(err.message, "may have been written") != NULL);
        assert_int_equal(objects_abort_uploads(store, 0, &left, NULL, NULL), CKD_OK);
        assert_int_equal(left, 0);
        if (f.left >= 0) {
            assert_int_equal(status, CKD_OK);
            return i;
        }
        assert_true(status == CKD_E_IO || status == CKD_E_NOSPACE);
    }
}

static void test_each_step_of_a_put_may_fail(void **state) {
    object_store *store = NULL;
    assert_int_equal(objects_open(&store, *state, NULL, NULL), CKD_OK);
    for (int only_new = 0; only_new < 2; only_new++) {
        assert_true(sweep(store, EIO, only_new) >= 8);
        assert_true(sweep(store, -5, only_new) >= 8); /* a write that ends after 4 bytes on a full disk */
    }
    objects_close(store);
}

/* A disk that is no longer mounted: nobody must take its objects for deleted. */
static void test_a_directory_that_is_gone_has_no_empty_list(void **state) {
    object_store *store = NULL;
    object_page page;
    object_query query = {0};
    char path[4096];
    snprintf(path, sizeof(path), "%s/root", (const char *)*state);
    assert_int_equal(dir_create(path, false, NULL), CKD_OK);
    assert_int_equal(objects_open(&store, path, NULL, NULL), CKD_OK);
    assert_int_equal(objects_list(store, &query, &page, NULL, NULL), CKD_OK);
    object_page_free(&page);
    assert_int_equal(dir_remove(path, NULL), CKD_OK);
    assert_int_equal(objects_list(store, &query, &page, NULL, NULL), CKD_E_NOT_FOUND);
    objects_close(store);
}

static void test_a_rate_is_kept_on_average(void **state) {
    (void)state;
    object_rate r;
    uint64_t now = 1000, sent = 0;
    object_rate_init(&r, 1000000, now);
    assert_int_equal(object_rate_take(&r, 250000, now), 0); /* a debt of 0.15 s */
    uint64_t wait = object_rate_take(&r, 1, now);
    assert_true(wait > 149999000 && wait < 150001000);
    assert_true(object_rate_take(&r, 1, now - 500) == wait); /* a thread whose clock was read earlier */
    assert_int_equal(object_rate_take(&r, 0, now), 0);
    now += wait + 1000;
    for (uint64_t until = now + UINT64_C(10000000000); now < until;) {
        wait = object_rate_take(&r, 70000, now);
        sent += wait == 0 ? 70000 : 0;
        now += wait;
    }
    assert_true(sent > 9800000 && sent < 10200000);
    now += UINT64_C(100000000000); /* what was not used does not add up */
    assert_int_equal(object_rate_take(&r, 99999, now), 0);
    assert_int_equal(object_rate_take(&r, 2, now), 0);
    assert_true(object_rate_take(&r, 1, now) > 0);
    object_rate_destroy(&r);
    object_rate_init(&r, 0, now);
    assert_int_equal(object_rate_take(&r, UINT64_MAX, now), 0);
    assert_int_equal(object_rate_take(&r, UINT64_MAX, now), 0);
    object_rate_destroy(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rate_is_kept_on_average),
        tempdir_test(test_a_directory_that_is_gone_has_no_empty_list),
        tempdir_test(test_each_step_of_a_put_may_fail),
    };
    return cmocka_run_group_tests_name("objects_faults", tests, NULL, NULL);
}
