/* Materialized copies: the newest checkpoint loads without its chain, and missing or damaged copies cost nothing. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { STEPS = 6, ELEMENTS = 600000 };

typedef struct chain {
    char *dir;
    uint8_t *values[STEPS];
    ckd_checkpoint checkpoints[STEPS];
} chain;

/* Makes a run whose last checkpoint has deltas on deltas. */
static int setup(void **state) {
    chain *c = calloc(1, sizeof(*c));
    c->dir = tempdir_create();
    ckd_store *store = store_create(c->dir);
    uint64_t n = ELEMENTS;
    for (unsigned s = 0; s < STEPS; s++) {
        c->values[s] = random_values(CKD_F32, n, 5);
        for (unsigned k = 0; k < s; k++) {
            change_values(CKD_F32, c->values[s], n, k);
        }
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.step = s;
        o.max_load_cost = 12; /* allows long chains */
        o.newest_load_cost = 2;
        ckd_save *save;
        assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
        add_tensor(save, "t", CKD_F32, 1, &n, NULL, c->values[s]);
        assert_int_equal(ckd_save_commit(&c->checkpoints[s], save, NULL), CKD_OK);
    }
    ckd_store_close(store);
    *state = c;
    return 0;
}

static int teardown(void **state) {
    chain *c = *state;
    for (unsigned s = 0; s < STEPS; s++) {
        free(c->values[s]);
    }
    tempdir_remove(c->dir);
    free(c);
    return 0;
}

/* The path of the only file in data/k. Returns false if there is none. */
static bool ready_file(char path[4096], const char *dir) {
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s/store/data/k", dir);
    DIR *d = opendir(folder);
    assert_non_null(d);
    unsigned found = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] != '.') {
            snprintf(path, 4096, "%s/%s", folder, e->d_name);
            found++;
        }
    }
    closedir(d);
    assert_true(found <= 1);
    return found == 1;
}

static void check_newest(const chain *c, ckd_open_mode mode) {
    ckd_store *store = store_reopen(c->dir, mode);
    void *back = load_whole(store, "run", STEPS - 1, "t", ELEMENTS * 4);
    assert_memory_equal(back, c->values[STEPS - 1], ELEMENTS * 4);
    free(back);
    ckd_store_close(store);
}

static void change_byte(const char *path, long at) {
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ 0x20, f);
    fclose(f);
}

static long file_length(const char *path) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    long length = ftell(f);
    fclose(f);
    return length;
}

static void test_copy_belongs_to_the_newest_only(void **state) {
    chain *c = *state;
    char path[4096], hex[CKD_ID_TEXT];
    const ckd_checkpoint *newest = &c->checkpoints[STEPS - 1];
    assert_true(newest->depth >= 2);
    assert_true(ready_file(path, c->dir));
    ckd_id_text(hex, &newest->id);
    assert_non_null(strstr(path, hex));
    check_newest(c, CKD_OPEN_READ);
    /* The next save of the run removes it, even if it needs no copy itself. */
    ckd_store *store = store_reopen(c->dir, CKD_OPEN_WRITE);
    uint64_t one = 1;
    save_one(store, "run", STEPS, "other", CKD_F32, 1, &one, c->values[0]);
    ckd_store_close(store);
    assert_false(ready_file(path, c->dir));
    check_newest(c, CKD_OPEN_READ);
}

static void test_loads_without_or_with_a_damaged_copy(void **state) {
    chain *c = *state;
    char path[4096];
    assert_true(ready_file(path, c->dir));
    long length = file_length(path);
    for (long at = 0; at < length; at += length / 97 + 1) {
        change_byte(path, at);
        check_newest(c, CKD_OPEN_READ);
        change_byte(path, at);
    }
    for (long size = length - 1; size > 0; size = size * 2 / 3) {
        assert_int_equal(truncate(path, size), 0);
        check_newest(c, CKD_OPEN_READ);
    }
    assert_int_equal(unlink(path), 0);
    check_newest(c, CKD_OPEN_READ);
}

/* By default a save writes only what it stores. */
static void test_no_copies_by_default(void **state) {
    chain *c = *state;
    char dir[2048], path[4096];
    snprintf(dir, sizeof(dir), "%s/other", c->dir);
    assert_int_equal(mkdir(dir, 0777), 0);
    ckd_store *store = store_create(dir);
    uint64_t n = ELEMENTS;
    uint32_t deepest = 0;
    double dearest = 0;
    for (unsigned s = 0; s < STEPS; s++) {
        ckd_checkpoint saved;
        ckd_save *save = begin_save(store, "run", s);
        add_tensor(save, "t", CKD_F32, 1, &n, NULL, c->values[s]);
        assert_int_equal(ckd_save_commit(&saved, save, NULL), CKD_OK);
        deepest = saved.depth > deepest ? saved.depth : deepest;
        dearest = saved.load_cost > dearest ? saved.load_cost : dearest;
    }
    ckd_store_close(store);
    assert_true(deepest >= 2 && dearest > 2);
    assert_false(ready_file(path, dir));
}

static void test_verification_is_not_fooled_by_a_copy(void **state) {
    chain *c = *state;
    char path[4096], chunk[4096];
    assert_true(ready_file(path, c->dir));
    ckd_store *store = store_reopen(c->dir, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s/store/data/c", c->dir);
    DIR *d = opendir(folder);
    size_t damaged = 0, files = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') {
            continue;
        }
        snprintf(chunk, sizeof(chunk), "%s/%s", folder, e->d_name);
        change_byte(chunk, file_length(chunk) / 2);
        store = store_reopen(c->dir, CKD_OPEN_READ);
        damaged += verify_damage(store) > 0;
        ckd_store_close(store);
        change_byte(chunk, file_length(chunk) / 2);
        files++;
    }
    closedir(d);
    assert_int_equal(files, STEPS);
    assert_int_equal(damaged, STEPS);
}

static void test_opening_for_writing_removes_leftovers(void **state) {
    chain *c = *state;
    char path[4096], stray[4200];
    assert_true(ready_file(path, c->dir));
    static const char *const names[] = {
        "0123456789abcdef0123456789abcdef.0.ckd", /* no such checkpoint */
        "0123456789abcdef0123456789abcdef.0.ckd.tmp-00112233445566778899aabbccddeeff"}; /* its writer died */
    for (size_t i = 0; i < 2; i++) {
        snprintf(stray, sizeof(stray), "%s/store/data/k/%s", c->dir, names[i]);
        FILE *f = fopen(stray, "w");
        assert_non_null(f);
        fclose(f);
    }
    check_newest(c, CKD_OPEN_WRITE);
    char still[4096];
    assert_true(ready_file(still, c->dir)); /* asserts that there is at most one file */
    assert_string_equal(still, path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_copy_belongs_to_the_newest_only, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_copies_by_default, setup, teardown),
        cmocka_unit_test_setup_teardown(test_loads_without_or_with_a_damaged_copy, setup, teardown),
        cmocka_unit_test_setup_teardown(test_verification_is_not_fooled_by_a_copy, setup, teardown),
        cmocka_unit_test_setup_teardown(test_opening_for_writing_removes_leftovers, setup, teardown),
    };
    return cmocka_run_group_tests_name("ready", tests, NULL, NULL);
}
