/*
 * Copies to a store with damaged files. Files of checkpoints that it already has are replaced, or the checkpoint is
 * reported.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/early.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

typedef enum harm { REMOVED, CUT, INDEX_FLIPPED, HEADER_FLIPPED, PAYLOAD_FLIPPED, A_DIRECTORY, HARMS } harm;

static void flip(const char *path, size_t from_end) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size - from_end] ^= 4;
    write_whole_file(path, data, size);
    free(data);
}

static void do_harm(const char *path, harm how) {
    size_t size = file_bytes(path);
    switch (how) {
    case REMOVED:
        assert_int_equal(unlink(path), 0);
        break;
    case CUT:
        assert_int_equal(truncate(path, (off_t)(size / 2)), 0);
        break;
    case INDEX_FLIPPED:
        flip(path, 400);
        break;
    case HEADER_FLIPPED:
        flip(path, size - 10);
        break;
    case PAYLOAD_FLIPPED:
        flip(path, size / 2);
        break;
    default:
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkdir(path, 0700), 0);
    }
}

/* The chunk file of a step in one of the stores. */
static pathname file_of(const pair *p, const char *dir, uint64_t step) {
    manifest m;
    assert_int_equal(store_read_manifest(&m, p->from, SCENE_RUN, step, 0, NULL), CKD_OK);
    ckd_id file = m.files[0].id;
    manifest_free(&m);
    return path_chunk(store_path_of(dir, ""), &file, "");
}

static void reopen(pair *p) {
    pair_close(p);
    pair_open(p);
}

/*
 * A file in the middle of the chain is damaged. All damage except in payloads is found, and only that file is copied.
 */
static void test_damaged_files_are_replaced(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    ckd_copy_options dry = CKD_COPY_OPTIONS_INIT;
    dry.dry_run = 1;
    for (harm how = 0; how < HARMS; how++) {
        pathname there = file_of(p, p->b, 1), source = file_of(p, p->a, 1);
        uint64_t size = file_bytes(source.text), wanted = how == PAYLOAD_FLIPPED ? 0 : 1;
        do_harm(there.text, how);
        assert_true(verify_damage(p->to) > 0);
        for (int again = 0; again < 2; again++) { /* the dry run reports the same and changes nothing */
            ckd_copy_result *r = pair_copy(p, NULL, 0, again ? NULL : &dry);
            assert_int_equal(r->checkpoints, 0);
            assert_int_equal(r->files, wanted);
            assert_int_equal(r->bytes, wanted * size);
            uint64_t sum = 0;
            for (size_t i = 0; i < r->count; i++) {
                assert_int_equal(r->items[i].state, CKD_COPY_PRESENT);
                sum += r->items[i].bytes;
            }
            assert_int_equal(sum, wanted * size);
            ckd_copy_result_free(r);
            assert_true(again || verify_damage(p->to) > 0);
        }
        if (how == PAYLOAD_FLIPPED) { /* a copy does not read payloads in the destination */
            do_harm(there.text, how);
        }
        assert_int_equal(verify_damage(p->to), 0);
        reopen(p);
        scene_check(p->to, 0, 4);
        pair_check_clean(p);
        assert_int_equal(folder_count(p->b, "data/x"), 0);
    }
}

/* The source cannot replace the file, because its own is damaged too. The other checkpoints are not affected. */
static void test_damaged_files_in_both_stores(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    do_harm(file_of(p, p->b, 3).text, REMOVED);
    do_harm(file_of(p, p->a, 3).text, PAYLOAD_FLIPPED);
    ckd_copy_result *r = pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 1, "the source cannot replace it");
    for (size_t i = 0; i < r->count; i++) {
        bool left = r->items[i].checkpoint.step == 3;
        assert_int_equal(r->items[i].state, left ? CKD_COPY_LEFT : CKD_COPY_PRESENT);
    }
    ckd_copy_result_free(r);
    assert_int_equal(folder_count(p->b, "data/x"), 0);
    do_harm(file_of(p, p->a, 3).text, PAYLOAD_FLIPPED);
    r = pair_copy(p, NULL, 0, NULL);
    assert_int_equal(r->files, 1);
    ckd_copy_result_free(r);
    scene_check(p->to, 0, 4);
    pair_check_clean(p);
}

static void delete_in_destination(pair *p, uint64_t step) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_id id = pair_id(p->to, SCENE_RUN, step);
    o.undo_s = 3600;
    assert_int_equal(ckd_store_delete(p->to, &id, 1, &o, NULL), CKD_OK);
}

/* A checkpoint is restored from the trash, and its damaged files are replaced. */
static void test_restored_checkpoints_are_repaired(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    for (harm how = 0; how < HARMS; how++) {
        delete_in_destination(p, 3);
        do_harm(file_of(p, p->b, 3).text, how);
        ckd_copy_result *r = pair_copy(p, NULL, 0, NULL);
        assert_int_equal(r->checkpoints, 0);
        assert_int_equal(r->files, 1);
        for (size_t i = 0; i < r->count; i++) {
            bool back = r->items[i].checkpoint.step == 3;
            assert_int_equal(r->items[i].state, back ? CKD_COPY_RESTORED : CKD_COPY_PRESENT);
        }
        ckd_copy_result_free(r);
        reopen(p);
        assert_int_equal(verify_damage(p->to), 0);
        scene_check(p->to, 0, 4);
        pair_check_clean(p);
    }
}

/*
 * A manifest of an early version does not name the files that its checkpoint builds on. The oldest of them is damaged
 * in its payload, which only the restoring of a checkpoint looks for.
 */
static void test_restored_checkpoints_of_early_stores_are_repaired(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    delete_in_destination(p, 3);
    ckd_store_close(p->to);
    early_store(p->b);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    do_harm(file_of(p, p->b, 0).text, PAYLOAD_FLIPPED);
    ckd_copy_result *r = pair_copy(p, NULL, 0, NULL);
    assert_int_equal(r->files, 1);
    assert_int_equal(r->items[r->count - 1].state, CKD_COPY_RESTORED);
    ckd_copy_result_free(r);
    reopen(p);
    assert_int_equal(verify_damage(p->to), 0);
    scene_check(p->to, 0, 4);
    pair_check_clean(p);
}

/* A checkpoint whose file neither store has intact stays in the trash. Another one is restored. */
static void test_restored_and_damaged_in_both_stores(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    delete_in_destination(p, 3);
    delete_in_destination(p, 2);
    do_harm(file_of(p, p->b, 3).text, PAYLOAD_FLIPPED);
    do_harm(file_of(p, p->a, 3).text, REMOVED);
    ckd_copy_result *r = pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 1, "the source cannot replace it");
    for (size_t i = 0; i < r->count; i++) {
        uint64_t step = r->items[i].checkpoint.step;
        assert_int_equal(r->items[i].state, step == 3   ? CKD_COPY_LEFT
                                            : step == 2 ? CKD_COPY_RESTORED
                                                        : CKD_COPY_PRESENT);
    }
    ckd_copy_result_free(r);
    assert_int_equal(ckd_store_find(&(ckd_checkpoint){.step = 0}, p->to, SCENE_RUN, 3, NULL),
                     CKD_E_NOT_FOUND);
    for (uint64_t step = 0; step < 3; step++) {
        scene s = scene_of(step);
        assert_int_equal(scene_load(p->to, &s, NULL), CKD_OK);
    }
    pair_check_clean(p);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_damaged_files_are_replaced),
        TEST(test_damaged_files_in_both_stores),
        TEST(test_restored_checkpoints_are_repaired),
        TEST(test_restored_checkpoints_of_early_stores_are_repaired),
        TEST(test_restored_and_damaged_in_both_stores),
    };
    return cmocka_run_group_tests_name("copies that mend", tests, NULL, NULL);
}
