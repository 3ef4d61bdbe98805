#include "tests/support/survivors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/scenes.h"

/* A catalog may be rebuilt at any time, but it must list all tensors of each checkpoint that can be read. */
static void check_tensors_known(ckd_store *store, const ckd_checkpoint *c) {
    ckd_tensor_list *known;
    ckd_error err = {0};
    if (ckd_store_tensors(&known, store, &c->id, &err) != CKD_OK) {
        fail_msg("tensors of step %llu: %s (%s)", (unsigned long long)c->step, err.message, err.file);
    }
    if (known->count != c->tensors) {
        fail_msg("step %llu: the catalog knows %zu of its %llu tensors", (unsigned long long)c->step,
                 known->count, (unsigned long long)c->tensors);
    }
    ckd_tensor_list_free(known);
}

uint64_t survivors_listed(ckd_store *store) {
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (ckd_store_list(&list, store, NULL, &err) != CKD_OK) {
        fail_msg("list: %s", err.message);
    }
    uint64_t mask = 0;
    for (size_t i = 0; i < list->count; i++) {
        scene s = scene_of(list->items[i].step);
        if (scene_load_id(store, &list->items[i].id, &s, &err) != CKD_OK) {
            fail_msg("step %llu is listed, but: %s (%s)", (unsigned long long)s.step, err.message, err.file);
        }
        check_tensors_known(store, &list->items[i]);
        mask |= UINT64_C(1) << s.step;
    }
    ckd_checkpoint_list_free(list);
    return mask;
}

static uint64_t check_reading(const char *dir) {
    ckd_store *store;
    ckd_error err = {0};
    char *before = tree_describe(dir);
    ckd_status status = scene_open(&store, dir, CKD_OPEN_READ, &err);
    if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        fail_msg("open for reading: %s", err.message);
    }
    uint64_t mask = status == CKD_OK ? survivors_listed(store) : 0;
    ckd_store_close(store);
    char *after = tree_describe(dir);
    assert_string_equal(before, after);
    free(before);
    free(after);
    return mask;
}

static void check_writing(const char *dir, uint64_t mask, uint64_t next) {
    ckd_store *store;
    ckd_error err = {0};
    if (scene_open(&store, dir, CKD_OPEN_CREATE, &err) != CKD_OK) {
        fail_msg("open for writing: %s (%s)", err.message, err.file);
    }
    assert_int_equal(survivors_listed(store), mask);
    store_check_files(dir);
    scene s = scene_of(next);
    ckd_status status = scene_save(NULL, store, &s, &err);
    if (status != ((mask >> next & 1) ? CKD_E_EXISTS : CKD_OK)) {
        fail_msg("the next save: %s: %s", ckd_status_name(status), err.message);
    }
    assert_int_equal(scene_load(store, &s, &err), CKD_OK);
    scene_check(store, 0, 0);
    ckd_store_close(store);
    store_check_clean(dir);
}

void survivors_check(const char *dir, uint64_t committed, uint64_t possible, uint64_t next) {
    uint64_t mask = check_reading(dir);
    assert_int_equal(mask & committed, committed);
    assert_int_equal(mask & ~(committed | possible), 0);
    check_writing(dir, mask, next);
}

void survivors_glance(const char *dir, uint64_t committed, uint64_t possible) {
    ckd_store *store;
    ckd_error err = {0};
    if (scene_open(&store, dir, CKD_OPEN_CREATE, &err) != CKD_OK) {
        fail_msg("open for writing: %s (%s)", err.message, err.file);
    }
    uint64_t mask = survivors_listed(store);
    ckd_store_close(store);
    assert_int_equal(mask & committed, committed);
    assert_int_equal(mask & ~(committed | possible), 0);
    store_check_files(dir);
}
