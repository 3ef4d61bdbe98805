#include "tests/support/pairs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/paths.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

int pair_setup(void **state) {
    pair *p = calloc(1, sizeof(*p));
    p->a = tempdir_create();
    p->b = tempdir_create();
    *state = p;
    return 0;
}

void pair_close(pair *p) {
    ckd_store_close(p->from);
    ckd_store_close(p->to);
    p->from = p->to = NULL;
}

int pair_teardown(void **state) {
    pair *p = *state;
    file_set_fault_hook(NULL, NULL);
    pair_close(p);
    tempdir_remove(p->a);
    tempdir_remove(p->b);
    free(p);
    return 0;
}

void pair_renew(pair *p) {
    ckd_store_close(p->to);
    p->to = NULL;
    tempdir_remove(p->b);
    p->b = tempdir_create();
}

void pair_open(pair *p) {
    ckd_error err = {0};
    if (scene_open(&p->from, p->a, CKD_OPEN_READ, &err) != CKD_OK ||
        scene_open(&p->to, p->b, CKD_OPEN_CREATE, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.file);
    }
}

void pair_save(ckd_store *store, const char *run, uint64_t step, bool ranks) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.run = run;
    if ((ranks ? scene_save_ranks(NULL, store, &s, &err) : scene_save(NULL, store, &s, &err)) != CKD_OK) {
        fail_msg("%s", err.message);
    }
}

void pair_make_source(const pair *p) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < 4; step++) {
        pair_save(store, SCENE_RUN, step, step == 2);
    }
    ckd_store_close(store);
}

static ckd_copy_options options_of(const ckd_id *ids, size_t count, const ckd_copy_options *o) {
    ckd_copy_options all = CKD_COPY_OPTIONS_INIT;
    all = o ? *o : all;
    all.checkpoints = ids;
    all.count = count;
    return all;
}

ckd_copy_result *pair_copy(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o) {
    ckd_copy_result *r;
    ckd_error err = {0};
    ckd_copy_options all = options_of(ids, count, o);
    if (ckd_copy(&r, p->to, p->from, &all, &err) != CKD_OK) {
        fail_msg("copy: %s (%s)", err.message, err.file);
    }
    return r;
}

void pair_counts(ckd_copy_result *r, uint64_t checkpoints, uint64_t files) {
    assert_int_equal(r->checkpoints, checkpoints);
    assert_int_equal(r->files, files);
    assert_int_equal(r->bytes == 0, checkpoints == 0);
    ckd_copy_result_free(r);
}

void pair_refused(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o, ckd_status wanted,
                  const char *what) {
    ckd_copy_result *r = (ckd_copy_result *)p;
    ckd_error err = {0};
    ckd_copy_options all = options_of(ids, count, o);
    assert_int_equal(ckd_copy(&r, p->to, p->from, &all, &err), wanted);
    assert_null(r);
    assert_int_equal(err.status, wanted);
    if (!strstr(err.message, what)) {
        fail_msg("the message does not say '%s': %s", what, err.message);
    }
}

ckd_copy_result *pair_leaves(pair *p, const ckd_id *ids, size_t count, ckd_status wanted, uint64_t left,
                             const char *what) {
    ckd_copy_result *r;
    ckd_error err = {0};
    assert_int_equal(
        ckd_copy(
            &r, p->to, p->from,
            &(ckd_copy_options){.struct_size = sizeof(ckd_copy_options), .checkpoints = ids, .count = count},
            &err),
        wanted);
    assert_non_null(r);
    assert_int_equal(r->left, left);
    if (!strstr(err.message, what)) {
        fail_msg("the message does not say '%s': %s", what, err.message);
    }
    for (size_t i = 0; i < r->count; i++) {
        bool is_left = r->items[i].state == CKD_COPY_LEFT;
        assert_int_equal(r->items[i].left.status != CKD_OK, is_left);
        left -= is_left;
    }
    assert_int_equal(left, 0);
    return r;
}

ckd_id pair_id(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, run, step, NULL), CKD_OK);
    return c.id;
}

uint64_t folder_bytes(const char *dir, const char *folder) {
    uint64_t total = 0;
    assert_int_equal(dir_bytes(&total, store_path_of(dir, folder), NULL), CKD_OK);
    return total;
}

size_t folder_count(const char *dir, const char *folder) {
    dir_list list;
    ckd_status status = dir_list_read(&list, store_path_of(dir, folder), NULL);
    size_t count = status == CKD_OK ? list.count : 0;
    dir_list_free(&list);
    return count;
}

void pair_check_lists(pair *p) {
    ckd_checkpoint_list *a, *b;
    assert_int_equal(ckd_store_list(&a, p->from, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_store_list(&b, p->to, NULL, NULL), CKD_OK);
    lists_check_equal(a, b);
    ckd_checkpoint_list_free(a);
    ckd_checkpoint_list_free(b);
}

void pair_check_clean(const pair *p) {
    store_check_clean(p->b);
    assert_int_equal(folder_count(p->b, DIR_INCOMING), 0);
}
