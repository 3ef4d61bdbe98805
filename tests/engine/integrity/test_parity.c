/*
 * Parity: a lost or damaged file of a group is rebuilt bit for bit, and so are several if their damage is in different
 * places. What cannot be repaired is reported and left as it is. Parity keeps working while others delete and save.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <unistd.h>

#include "base/file.h"
#include "codec/parity/parity.h"
#include "tests/support/actions.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define ROWS_LARGE 6000 /* rows of a scene whose chunk files have several pieces */

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    must(scene_open(&store, dir, mode, &err), &err);
    return store;
}

static void save_bases(ckd_store *store, uint64_t first, uint64_t end, uint64_t rows) {
    for (uint64_t step = first; step < end; step++) {
        scene s = scene_of(step);
        ckd_error err = {0};
        s.base = true;
        s.rows = rows;
        must(scene_save(NULL, store, &s, &err), &err);
    }
}

/* Makes parity and returns the result. The call must find no damage. */
static ckd_parity_result make_parity(ckd_store *store, uint32_t data, uint32_t parity) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r, out;
    ckd_error err = {0};
    o.data = data;
    o.parity = parity;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    assert_int_equal(r->found->damage_count, 0);
    out = *r;
    out.found = NULL;
    ckd_parity_result_free(r);
    return out;
}

static ckd_parity_status status_of(ckd_store *store) {
    ckd_parity_status *s, out;
    ckd_error err = {0};
    must(ckd_store_parity_status(&s, store, &err), &err);
    out = *s;
    out.settings = NULL;
    ckd_parity_status_free(s);
    return out;
}

/* How many files were repaired, and how many places stay damaged. */
typedef struct repaired {
    size_t files, left;
    char first[128], aside[128], why[512]; /* of the first repaired file; of the first place left */
} repaired;

static repaired repair(ckd_store *store, bool dry_run) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    repaired out = {0};
    o.dry_run = dry_run;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    out.files = r->repaired_count;
    out.left = r->left->damage_count;
    if (out.files) {
        snprintf(out.first, sizeof(out.first), "%s", r->repaired[0].file);
        snprintf(out.aside, sizeof(out.aside), "%s", r->repaired[0].aside);
    }
    if (out.left) {
        snprintf(out.why, sizeof(out.why), "%s", r->left->damage[0].what);
    }
    ckd_repair_result_free(r);
    return out;
}

static uint64_t weak_groups; /* as the last verification counted them */

static size_t damage_of(ckd_store *store) {
    ckd_verify_result *r;
    ckd_error err = {0};
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    size_t count = r->damage_count;
    weak_groups = r->weak_groups;
    ckd_verify_result_free(r);
    return count;
}

typedef struct kept_file {
    char path[512];
    unsigned char *data;
    size_t size;
} kept_file;

/* Reads all files of a folder of the store whose names end in `end`. */
static size_t keep_files(kept_file *out, size_t most, const char *dir, const char *folder, const char *end) {
    dir_list list;
    size_t count = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        size_t length = strlen(list.names[i]);
        if (length > strlen(end) && strcmp(list.names[i] + length - strlen(end), end) == 0) {
            assert_true(count < most);
            snprintf(out[count].path, sizeof(out[count].path), "%s/%s", store_path_of(dir, folder),
                     list.names[i]);
            out[count].data = read_whole_file(out[count].path, &out[count].size);
            count++;
        }
    }
    dir_list_free(&list);
    return count;
}

static void check_file(const kept_file *f) {
    size_t size;
    unsigned char *data = read_whole_file(f->path, &size);
    assert_int_equal(size, f->size);
    assert_memory_equal(data, f->data, size);
    free(data);
}

static void free_files(kept_file *files, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(files[i].data);
    }
}

static void flip(const kept_file *f, size_t at) {
    size_t size;
    unsigned char *data = read_whole_file(f->path, &size);
    assert_true(at < size);
    data[at] ^= 0x10;
    write_whole_file(f->path, data, size);
    free(data);
}

/* ---- one damaged file at a time ---- */

/*
 * Removes, truncates, empties and damages each file in turn. Each time a verification finds it and a repair restores
 * it.
 */
static void lose_each(const char *dir, ckd_store *store, const char *folder, const char *end) {
    kept_file files[32];
    size_t count = keep_files(files, 32, dir, folder, end);
    assert_true(count > 0);
    for (size_t i = 0; i < count; i++) {
        kept_file *f = &files[i];
        for (int how = 0; how < 4; how++) {
            if (how == 0) {
                assert_int_equal(unlink(f->path), 0);
            } else if (how == 1) {
                write_whole_file(f->path, f->data, f->size / 2);
            } else if (how == 2) {
                write_whole_file(f->path, f->data, 0);
            } else {
                flip(f, f->size * i / count);
            }
            assert_true(damage_of(store) > 0);
            repaired r = repair(store, true);
            assert_true(r.files == 1 && r.left == 0);
            assert_true(damage_of(store) > 0);
            r = repair(store, false);
            assert_true(r.files == 1 && r.left == 0);
            check_file(f);
            assert_int_equal(damage_of(store), 0);
        }
    }
    free_files(files, count);
}

/*
 * A damaged parity file is restored. If it is the only one of its group and no longer says what it covers, repair
 * removes it, and the next call makes parity for those files again.
 */
static void lose_parity(const char *dir, ckd_store *store) {
    kept_file files[4];
    assert_int_equal(keep_files(files, 4, dir, "data/p", ".ckp"), 2);
    for (size_t i = 0; i < 2; i++) {
        flip(&files[i], files[i].size / 3);
        assert_int_equal(damage_of(store), 1);
        repaired r = repair(store, false);
        assert_true(r.files == 1 && r.left == 0);
        check_file(&files[i]);
        write_whole_file(files[i].path, files[i].data, files[i].size / 2);
        r = repair(store, false);
        assert_true(r.files == 1 && r.left == 0);
        check_file(&files[i]);
        write_whole_file(files[i].path, files[i].data, i);
        assert_int_equal(damage_of(store), 1);
        r = repair(store, false);
        assert_true(r.files == 1 && r.left == 0);
        assert_int_equal(damage_of(store), 0);
        ckd_parity_status s = status_of(store);
        assert_true(s.groups == 1 && s.covered_files < s.files);
        assert_int_equal(make_parity(store, 0, 0).groups, 1);
        s = status_of(store);
        assert_true(s.groups == 2 && s.covered_files == s.files);
    }
    free_files(files, 2);
}

static void test_any_file_comes_back(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 8, 2);
    save_bases(store, 8, 11, ROWS_LARGE);
    ckd_parity_result made = make_parity(store, 8, 1);
    assert_true(made.groups == 2 && made.files == 11);
    assert_int_equal(damage_of(store), 0);
    made = make_parity(store, 0, 0);
    assert_true(made.groups == 0 && made.removed_groups == 0);
    lose_each(*state, store, "data/c", ".ckd");
    lose_parity(*state, store);
    scene s = scene_of(9);
    s.rows = ROWS_LARGE;
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- damage in several files ---- */

/* One parity file repairs several damaged files if no two are damaged in the same place. */
static void test_damage_in_different_places(void **state) {
    kept_file files[8], parity[8];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 3, ROWS_LARGE);
    assert_int_equal(make_parity(store, 4, 1).groups, 1);
    assert_int_equal(keep_files(files, 8, *state, "data/c", ".ckd"), 3);
    assert_int_equal(keep_files(parity, 8, *state, "data/p", ".ckp"), 1);
    assert_true(files[0].size > 3 * PARITY_PIECE);
    flip(&files[0], 10); /* the header: the file cannot even be opened */
    flip(&files[1], PARITY_PIECE + 10);
    flip(&files[2], 2 * PARITY_PIECE + 10);
    flip(&parity[0], 3 * PARITY_PIECE + PARITY_PIECE / 2);
    flip(&parity[0], 20); /* the first of two copies of the head */
    repaired r = repair(store, true);
    assert_true(r.files == 4 || r.files == 3);
    r = repair(store, false);
    assert_true(r.files == 4 && r.left == 0);
    for (size_t i = 0; i < 3; i++) {
        check_file(&files[i]);
    }
    check_file(&parity[0]);
    /* Two files are damaged in the same place, which is one too many. */
    flip(&files[0], PARITY_PIECE + 10);
    flip(&files[1], PARITY_PIECE + 30);
    r = repair(store, false);
    assert_true(r.files == 0 && r.left >= 2);
    assert_non_null(strstr(r.why, "2 files of parity group"));
    write_whole_file(files[0].path, files[0].data, files[0].size);
    r = repair(store, false);
    assert_true(r.files == 1 && r.left == 0);
    check_file(&files[1]);
    free_files(files, 3);
    free_files(parity, 1);
    ckd_store_close(store);
}

/*
 * Two parity files repair any two lost files of seven: five chunk files and two of parity. They cannot repair three.
 */
static void test_two_parity_files_repair_two_losses(void **state) {
    kept_file files[16];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    save_bases(store, 0, 5, 500);
    ckd_parity_result made = make_parity(store, 5, 2);
    assert_true(made.groups == 1 && made.files == 5);
    size_t count = keep_files(files, 8, *state, "data/c", ".ckd");
    count += keep_files(files + count, 8, *state, "data/p", ".ckp");
    assert_int_equal(count, 7);
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < i; k++) {
            assert_int_equal(unlink(files[i].path), 0);
            flip(&files[k], files[k].size / 2);
            repaired r = repair(store, false);
            assert_true(r.files == 2 && r.left == 0);
            check_file(&files[i]);
            check_file(&files[k]);
        }
    }
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(unlink(files[i].path), 0);
    }
    repaired r = repair(store, false);
    assert_true(r.files == 0 && r.left == 3);
    free_files(files, count);
    ckd_store_close(store);
}

/* A run of parity that ended early may leave two groups. Any of them may be the one that brings a lost file back. */
static void test_two_groups_of_a_lost_file(void **state) {
    kept_file chunks[4], old, all[4];
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *made;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 2, 10);
    make_parity(store, 2, 1);
    assert_int_equal(keep_files(chunks, 4, *state, "data/c", ".ckd"), 2);
    assert_int_equal(keep_files(&old, 1, *state, "data/p", ".ckp"), 1);
    assert_int_equal(unlink(old.path), 0);
    assert_int_equal(make_parity(store, 0, 0).groups, 1);
    write_whole_file(old.path, old.data, old.size);
    assert_int_equal(unlink(chunks[0].path), 0);
    assert_int_equal(ckd_store_parity(&made, store, &o, NULL), CKD_OK);
    ckd_parity_result_free(made);
    size_t count = keep_files(all, 4, *state, "data/p", ".ckp");
    assert_int_equal(count, 3); /* and one of the file that is left, which these cannot rebuild now */
    for (size_t i = 0; i < count; i++) {
        assert_true(strcmp(all[i].path, old.path) == 0 || unlink(all[i].path) == 0);
    }
    repaired r = repair(store, false);
    assert_true(r.files == 1 && r.left == 0);
    check_file(&chunks[0]);
    free_files(chunks, 2);
    free_files(&old, 1);
    free_files(all, count);
    ckd_store_close(store);
}

/* A process that died while it made parity leaves temporary files. The next writer removes them. */
static void test_leftovers_are_removed(void **state) {
    file_lock *lock;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 2, 10);
    make_parity(store, 2, 1);
    ckd_store_close(store);
    char path[512];
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "data/p/1.0.ckp.tmp"));
    write_whole_file(path, "part", 4);
    assert_int_equal(lock_acquire(&lock, store_path_of(*state, "data/p/lock"), LOCK_EXCLUSIVE, true, 0, NULL),
                     CKD_OK);
    ckd_store_close(open_store(*state, CKD_OPEN_WRITE));
    assert_true(file_exists(path)); /* it may belong to the lock's holder */
    lock_release(lock);
    ckd_store_close(open_store(*state, CKD_OPEN_WRITE));
    assert_false(file_exists(path));
    store_check_clean(*state);
}

/* ---- what a repair reports, and files without parity ---- */

/* A repair keeps the damaged file aside until a purge, and reports files that no parity covers. */
static void test_repair_reports_what_it_did(void **state) {
    kept_file files[8];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 2, 10);
    make_parity(store, 2, 1);
    save_bases(store, 2, 3, 10);
    ckd_parity_status s = status_of(store);
    assert_true(s.files == 3 && s.covered_files == 2 && s.groups == 1 && s.weak_groups == 0);
    assert_int_equal(keep_files(files, 8, *state, "data/c", ".ckd"), 3);
    for (size_t i = 0; i < 3; i++) { /* two of them are covered, one is not */
        flip(&files[i], files[i].size / 2);
        repaired r = repair(store, false);
        if (r.files == 1) {
            size_t size;
            unsigned char *old = read_whole_file(store_path_of(*state, r.aside), &size);
            assert_int_equal(size, files[i].size);
            assert_int_equal(old[size / 2], files[i].data[size / 2] ^ 0x10);
            free(old);
        } else {
            assert_non_null(strstr(r.why, "no parity covers it"));
            write_whole_file(files[i].path, files[i].data, files[i].size);
        }
        check_file(&files[i]);
    }
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    o.purge = 1;
    assert_int_equal(ckd_store_repair(&r, store, &o, NULL), CKD_OK);
    assert_true(r->purged_files == 2 && r->purged_bytes > 0);
    ckd_repair_result_free(r);
    free_files(files, 3);
    ckd_store_close(store);
}

/* Parity is not computed from a damaged file: it would make the damage permanent. */
static void test_damaged_files_are_left_out(void **state) {
    kept_file files[8];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    assert_int_equal(ckd_store_parity(&r, store, NULL, &err), CKD_E_NOT_FOUND);
    save_bases(store, 0, 4, 10);
    assert_int_equal(keep_files(files, 8, *state, "data/c", ".ckd"), 4);
    flip(&files[2], files[2].size / 2);
    o.data = 4;
    o.parity = 1;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    assert_true(r->groups == 1 && r->files == 3 && r->found->damage_count == 1);
    ckd_parity_result_free(r);
    write_whole_file(files[2].path, files[2].data, files[2].size);
    ckd_parity_result made = make_parity(store, 0, 0);
    assert_true(made.groups == 1 && made.files == 4 && made.removed_groups == 1);
    free_files(files, 4);
    ckd_store_close(store);
}

/* ---- growing groups, deleting members ---- */

/* New files join the last group until it is full. Full groups stay as they are. */
static void test_groups_grow(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_parity_options off = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    save_bases(store, 0, 1, 10);
    assert_int_equal(make_parity(store, 4, 1).groups, 1);
    for (uint64_t step = 1; step < 9; step++) {
        save_bases(store, step, step + 1, 10);
        ckd_parity_result made = make_parity(store, 0, 0);
        assert_int_equal(made.groups, 1);
        assert_int_equal(made.files, step % 4 + 1); /* full groups are not rewritten */
        assert_int_equal(made.removed_groups, step % 4 > 0);
    }
    ckd_parity_status s = status_of(store);
    assert_true(s.groups == 3 && s.files == 9 && s.covered_files == 9 && s.weak_groups == 0);
    assert_true(make_parity(store, 3, 1).groups == 3);
    assert_int_equal(status_of(store).groups, 3);
    off.off = 1;
    assert_int_equal(ckd_store_parity(&r, store, &off, NULL), CKD_OK);
    assert_true(r->groups == 0 && r->removed_groups == 3);
    ckd_parity_result_free(r);
    s = status_of(store);
    assert_true(s.parity_bytes == 0 && s.covered_files == 0);
    ckd_store_close(store);
}

static void delete_step(ckd_store *store, uint64_t step, uint64_t undo_s) {
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    o.undo_s = undo_s;
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
}

static void collect(ckd_store *store) {
    ckd_error err = {0};
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
}

static void test_deletion_regroups_the_rest(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 8, 10);
    make_parity(store, 4, 1);
    delete_step(store, 1, 3600); /* in the trash: parity still covers it and the others */
    ckd_parity_status s = status_of(store);
    assert_true(s.files == 8 && s.covered_files == 8 && s.weak_groups == 0);
    ckd_parity_result made = make_parity(store, 0, 0);
    assert_true(made.groups == 0 && made.removed_groups == 0);
    delete_step(store, 2, 0);
    /* Before the old group is removed, the remaining files get a new one, and the file in the trash gets its own. */
    collect(store);
    s = status_of(store);
    assert_true(s.groups == 3 && s.files == 7 && s.covered_files == 7 && s.weak_groups == 0);
    assert_int_equal(damage_of(store), 0);
    assert_int_equal(repair(store, false).left, 0);
    made = make_parity(store, 0, 0);
    assert_true(made.groups == 0 && made.removed_groups == 0);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A group with more parity files than deleted members stays. It reports that it is weaker. */
static void test_weak_group(void **state) {
    kept_file files[8];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    save_bases(store, 0, 4, 10);
    make_parity(store, 4, 2);
    delete_step(store, 1, 0);
    collect(store);
    ckd_parity_status s = status_of(store);
    assert_true(s.groups == 1 && s.weak_groups == 1 && s.spent_groups == 0 && s.covered_files == 3);
    assert_true(damage_of(store) == 0 && weak_groups == 1);
    assert_int_equal(keep_files(files, 8, *state, "data/c", ".ckd"), 3);
    assert_int_equal(unlink(files[0].path), 0);
    assert_int_equal(status_of(store).spent_groups, 1);
    repaired r = repair(store, false);
    assert_true(r.files == 1 && r.left == 0);
    check_file(&files[0]);
    s = status_of(store);
    assert_true(s.covered_files == 3 && s.files == 3); /* the deleted file is not restored */
    free_files(files, 3);
    ckd_store_close(store);
}

/*
 * A damaged parity file cannot be rebuilt once a member is deleted. The collection notices and makes a new group of
 * the rest.
 */
static void test_deletion_finds_damaged_parity(void **state) {
    kept_file rows[2];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    save_bases(store, 0, 4, 10);
    make_parity(store, 4, 2);
    assert_int_equal(keep_files(rows, 2, *state, "data/p", ".ckp"), 2);
    rows[0].data[rows[0].size / 2] ^= 1;
    write_whole_file(rows[0].path, rows[0].data, rows[0].size);
    assert_int_equal(damage_of(store), 1);
    delete_step(store, 1, 0);
    collect(store);
    ckd_parity_status s = status_of(store);
    assert_true(s.groups == 1 && s.weak_groups == 0 && s.covered_files == 3);
    assert_int_equal(damage_of(store), 0);
    assert_int_equal(repair(store, false).left, 0);
    free_files(rows, 2);
    ckd_store_close(store);
}

/* A file that only the deleted member and the parity can rebuild must be repaired before that member is removed. */
typedef enum loss { LOST, ROTTEN } loss;
static void lose_and_delete(const char *dir, uint32_t parity, loss how, ckd_status expected) {
    kept_file kept[1];
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    ckd_error err = {0};
    save_bases(store, 0, 1, 10);
    assert_int_equal(keep_files(kept, 1, dir, "data/c", ".ckd"), 1);
    save_bases(store, 1, 4, 10);
    make_parity(store, 4, parity);
    delete_step(store, 1, 0);
    if (how == LOST) {
        assert_int_equal(unlink(kept[0].path), 0);
    } else {
        flip(&kept[0], kept[0].size / 2);
    }
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), expected);
    if (expected != CKD_OK) {
        assert_non_null(strstr(err.message, "repair"));
        assert_non_null(strstr(kept[0].path, strrchr(err.file, '/')));
    }
    assert_int_equal(status_of(store).groups, 1);
    repaired r = repair(store, false);
    assert_true(r.files == 1 && r.left == 0);
    check_file(&kept[0]);
    collect(store);
    assert_int_equal(damage_of(store), 0);
    free_files(kept, 1);
    ckd_store_close(store);
    store_check_clean(dir);
}

static size_t scrubbed(ckd_store *store, const char *inside) {
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    o.older_than_s = 3600;
    assert_int_equal(ckd_store_scrub(&r, store, &o, NULL), CKD_OK);
    size_t count = r->found->damage_count;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(r->found->damage[i].checkpoint_count, 0);
        assert_non_null(strstr(r->found->damage[i].file, inside));
    }
    ckd_scrub_result_free(r);
    return count;
}

static size_t scrubbed_trash(ckd_store *store) {
    ckd_scrub_result *r;
    assert_int_equal(ckd_store_scrub(&r, store, NULL, NULL), CKD_OK);
    size_t count = r->found->damage_count;
    ckd_scrub_result_free(r);
    return count;
}

/* Each scrub checks parity, also when no chunk file is due. */
static void test_scrub_reads_parity(void **state) {
    kept_file parity[1];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 4, 10);
    make_parity(store, 4, 1);
    assert_int_equal(keep_files(parity, 1, *state, "data/p", ".ckp"), 1);
    assert_int_equal(scrubbed(store, ""), 0);
    flip(&parity[0], parity[0].size / 2);
    assert_int_equal(scrubbed(store, "data/p/"), 1);
    flip(&parity[0], parity[0].size / 2);
    flip(&parity[0], 20); /* the head */
    assert_int_equal(scrubbed(store, "data/p/"), 1);
    flip(&parity[0], 20);
    assert_int_equal(scrubbed(store, ""), 0);
    free_files(parity, 1);
    ckd_store_close(store);
}

/* A collection refuses to remove a member that an unrepairable file needs, unless the operator passes --give-up. */
static void test_give_up_removes_what_repair_needs(void **state) {
    kept_file kept[1], rest[8];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    save_bases(store, 0, 1, 10);
    assert_int_equal(keep_files(kept, 1, *state, "data/c", ".ckd"), 1);
    save_bases(store, 1, 4, 10);
    make_parity(store, 4, 1);
    delete_step(store, 1, 0);
    assert_int_equal(unlink(kept[0].path), 0);
    assert_int_equal(ckd_store_collect(NULL, store, &o, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "--give-up"));
    o.force = 1;
    ckd_collected gone;
    assert_int_equal(ckd_store_collect(&gone, store, &o, &err), CKD_OK);
    assert_int_equal(gone.checkpoints, 1);
    ckd_parity_status status = status_of(store);
    assert_true(status.groups == 1 && status.covered_files == 2); /* the intact files are still covered */
    size_t left = keep_files(rest, 8, *state, "data/c", ".ckd");
    assert_int_equal(left, 2);
    repaired r = repair(store, false);
    assert_true(r.files == 0 && r.left == 1);
    delete_step(store, 0, 0); /* the checkpoint that needs the lost file can be deleted */
    collect(store);
    assert_int_equal(damage_of(store), 0);
    free_files(rest, left);
    free_files(kept, 1);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * While another process makes parity, a collection cannot make a new group. It gives up without removing any file, so
 * that no member loses its cover.
 */
static void test_deletion_waits_for_parity(void **state) {
    kept_file files[4];
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE), *impatient;
    file_lock *lock;
    ckd_error err = {0};
    save_bases(store, 0, 4, 10);
    make_parity(store, 4, 1);
    delete_step(store, 1, 0);
    assert_int_equal(lock_acquire(&lock, store_path_of(*state, "data/p/lock"), LOCK_EXCLUSIVE, true, 0, NULL),
                     CKD_OK);
    o.lock_timeout_ms = 1;
    must(ckd_store_open(&impatient, store_path_of(*state, ""), CKD_OPEN_WRITE, &o, &err), &err);
    assert_int_equal(ckd_store_collect(NULL, impatient, NULL, &err), CKD_E_BUSY);
    ckd_store_close(impatient);
    assert_int_equal(keep_files(files, 4, *state, "data/c", ".ckd"), 4);
    free_files(files, 4);
    assert_int_equal(status_of(store).groups, 1);
    lock_release(lock);
    collect(store);
    ckd_parity_status s = status_of(store);
    assert_true(s.files == 3 && s.covered_files == 3);
    ckd_store_close(store);
    store_check_clean(*state);
}

static void test_deletion_waits_for_repair(void **state) {
    lose_and_delete(*state, 1, LOST, CKD_E_STATE);
}

/* Nobody has noticed the damage yet. The collection reads the remaining members before it removes their parity. */
static void test_deletion_finds_damaged_members(void **state) {
    lose_and_delete(*state, 1, ROTTEN, CKD_E_STATE);
}

/* More files are damaged than the parity can repair, so keeping the deleted member would not help. It is removed. */
static void test_deletion_of_members_that_repair_nothing(void **state) {
    kept_file files[4];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 4, 10);
    make_parity(store, 4, 1);
    delete_step(store, 1, 0);
    scene s = scene_of(1);
    assert_int_equal(scene_load(store, &s, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(keep_files(files, 4, *state, "data/c", ".ckd"), 4);
    for (size_t i = 0; i < 4; i++) {
        flip(&files[i], files[i].size / 2);
    }
    collect(store);
    assert_int_equal(status_of(store).groups, 0);
    assert_int_equal(repair(store, false).left, 3);
    free_files(files, 4);
    ckd_store_close(store);
}

/* Damage to a file in the trash is found and repaired. A verification marks its checkpoint as being in the trash. */
static void test_trash_is_covered(void **state) {
    kept_file kept[1];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_checkpoint c;
    ckd_verify_options quick = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *r;
    ckd_error err = {0};
    save_bases(store, 0, 1, 10);
    assert_int_equal(keep_files(kept, 1, *state, "data/c", ".ckd"), 1);
    save_bases(store, 1, 5, 10);
    make_parity(store, 4, 1);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    delete_step(store, 0, 3600);
    for (int how = 0; how < 3; how++) {
        if (how == 0) {
            assert_int_equal(unlink(kept[0].path), 0);
        } else {
            flip(&kept[0], how == 1 ? 10 : kept[0].size / 2);
        }
        for (quick.quick = 0; quick.quick < 2; quick.quick++) {
            must(ckd_store_verify(&r, store, &quick, &err), &err);
            assert_int_equal(r->damage_count, 1);
            assert_int_equal(r->damage[0].checkpoint_count, 1);
            assert_string_equal(r->damage[0].checkpoints[0], SCENE_RUN "@0 (in the trash)");
            ckd_verify_result_free(r);
        }
        assert_int_equal(scrubbed_trash(store), 1);
        repaired back = repair(store, false);
        assert_true(back.files == 1 && back.left == 0);
        check_file(&kept[0]);
    }
    must(ckd_store_undelete(store, &c.id, 1, &err), &err);
    scene s = scene_of(0);
    s.rows = 10;
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    delete_step(store, 0, 0); /* without undo time it is deleted at once, and its loss is no damage */
    assert_int_equal(unlink(kept[0].path), 0);
    assert_int_equal(damage_of(store), 0);
    free_files(kept, 1);
    ckd_store_close(store);
}

/* The group can repair the lost file without the deleted member. It cannot lose another one after that. */
static void test_deletion_leaves_enough_for_repair(void **state) {
    if (erasure_ready(NULL) != CKD_OK) {
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    lose_and_delete(*state, 2, LOST, CKD_OK);
}

/*
 * A group 4+2 that lost a parity file, and whose chunk file of step 0 is damaged. The checkpoint `gone` was deleted
 * and cannot be restored, but its file is still there.
 */
typedef struct broken_group {
    kept_file damaged, rows[2];
} broken_group;

static ckd_store *break_group(broken_group *b, const char *dir, uint64_t gone) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    save_bases(store, 0, 1, 10);
    assert_int_equal(keep_files(&b->damaged, 1, dir, "data/c", ".ckd"), 1);
    save_bases(store, 1, 4, 10);
    make_parity(store, 4, 2);
    assert_int_equal(keep_files(b->rows, 2, dir, "data/p", ".ckp"), 2);
    delete_step(store, gone, 0);
    flip(&b->damaged, b->damaged.size / 2);
    assert_int_equal(unlink(b->rows[1].path), 0);
    return store;
}

static void check_covered(broken_group *b, const char *dir, ckd_store *store) {
    collect(store);
    ckd_parity_status s = status_of(store);
    assert_true(s.files == 3 && s.covered_files == 3 && s.spent_groups == 0);
    assert_int_equal(damage_of(store), 0);
    assert_int_equal(repair(store, false).left, 0);
    free_files(&b->damaged, 1);
    free_files(b->rows, 2);
    ckd_store_close(store);
    store_check_clean(dir);
}

/*
 * The collection refuses until a repair has run. The repair rebuilds the lost parity file, although one member is to
 * be removed.
 */
static void test_parity_with_a_deleted_member_comes_back(void **state) {
    broken_group b;
    ckd_error err = {0};
    ckd_store *store = break_group(&b, *state, 1);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_STATE);
    for (int dry_run = 1; dry_run >= 0; dry_run--) {
        repaired r = repair(store, dry_run);
        assert_true(r.files == 2 && r.left == 0);
    }
    check_file(&b.damaged);
    check_file(&b.rows[1]);
    check_covered(&b, *state, store);
}

/* The deleted member itself is damaged. No parity is computed from it, and the collection replaces the group. */
static void test_parity_is_not_made_of_a_damaged_member(void **state) {
    broken_group b;
    ckd_store *store = break_group(&b, *state, 0);
    repaired r = repair(store, false);
    assert_true(r.files == 0 && r.left == 1);
    assert_non_null(strstr(r.why, "missing or damaged"));
    assert_false(file_exists(b.rows[1].path));
    check_covered(&b, *state, store);
}

typedef struct meanwhile {
    ckd_store *other; /* another handle of the store */
    const char *dir;
    bool done;
} meanwhile;

/* Deletes and collects all members of the group once a parity file is being rebuilt. */
static int delete_member(void *context, uint64_t done, uint64_t total) {
    meanwhile *m = context;
    dir_list list;
    (void)done;
    (void)total;
    bool writing = false;
    assert_int_equal(dir_list_read(&list, store_path_of(m->dir, "data/p"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        writing = writing || strstr(list.names[i], ".tmp");
    }
    dir_list_free(&list);
    if (writing && !m->done) {
        m->done = true;
        /* The whole group, as a remaining member would need parity. */
        for (uint64_t step = 0; step < 4; step++) {
            delete_step(m->other, step, 0);
        }
        collect(m->other);
    }
    return 0;
}

/* The group's members are deleted while a repair rebuilds its parity. */
static void test_members_go_during_repair(void **state) {
    kept_file rows[1];
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    meanwhile m = {open_store(*state, CKD_OPEN_WRITE), *state, false};
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    save_bases(store, 0, 4, ROWS_LARGE);
    make_parity(store, 4, 1);
    assert_int_equal(keep_files(rows, 1, *state, "data/p", ".ckp"), 1);
    flip(&rows[0], rows[0].size / 3);
    o.on_progress = delete_member;
    o.progress_context = &m;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_true(m.done);
    assert_int_equal(r->repaired_count, 0);
    assert_int_equal(r->left->damage_count, 1);
    assert_non_null(strstr(r->left->damage[0].what, "removed meanwhile"));
    ckd_repair_result_free(r);
    assert_int_equal(keep_files(rows, 0, *state, "data/p", ".ckp"), 0);
    free_files(rows, 1);
    ckd_store_close(m.other);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * A file that a delta builds on goes during the save. The commit says so, and the save can be repeated after a repair.
 */
static void test_file_goes_during_a_save(void **state) {
    kept_file files[2];
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_error err = {0};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 1, 6);
    scene s = scene_of(1);
    must(scene_save(NULL, store, &s, &err), &err);
    make_parity(store, 2, 1);
    assert_int_equal(keep_files(files, 2, *state, "data/c", ".ckd"), 2);
    for (size_t i = 0; i < 2; i++) {
        s = scene_of(2 + i);
        o.run = s.run;
        o.step = s.step;
        must(ckd_save_begin(&save, store, &o, &err), &err);
        must(scene_share(save, &s, 0, 1, &err), &err);
        assert_int_equal(unlink(files[i].path), 0);
        assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_E_NOT_FOUND);
        assert_non_null(strstr(err.message, "builds on is gone"));
        assert_string_equal(err.file, files[i].path);
        repaired r = repair(store, false);
        assert_true(r.files == 1 && r.left == 0);
        must(scene_save(NULL, store, &s, &err), &err);
    }
    scene_check(store, 0, 4);
    free_files(files, 2);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- repairs while a run saves ---- */

typedef struct saver {
    const char *dir;
    pthread_t thread;
    ckd_status status;
    ckd_error err;
} saver;

static void *save_on(void *context) {
    saver *s = context;
    ckd_store *store;
    s->status = scene_open(&store, s->dir, CKD_OPEN_WRITE, &s->err);
    for (uint64_t step = 4; step < 24 && s->status == CKD_OK; step++) {
        scene x = scene_of(step); /* some of them are deltas */
        do {                      /* the parent's file may be missing at the commit, until it is repaired */
            s->status = scene_save(NULL, store, &x, &s->err);
        } while (s->status == CKD_E_NOT_FOUND);
    }
    ckd_store_close(store);
    return NULL;
}

static void test_repair_while_a_run_saves(void **state) {
    kept_file files[4];
    saver s = {.dir = *state};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 4, 6);
    assert_int_equal(keep_files(files, 4, *state, "data/c", ".ckd"), 4);
    make_parity(store, 4, 1);
    assert_int_equal(pthread_create(&s.thread, NULL, save_on, &s), 0);
    for (size_t i = 0; i < 10; i++) {
        make_parity(store, 0, 0);
        assert_int_equal(unlink(files[i % 4].path), 0);
        repaired r = repair(store, false);
        assert_true(r.files == 1 && r.left == 0);
        check_file(&files[i % 4]);
    }
    assert_int_equal(pthread_join(s.thread, NULL), 0);
    must(s.status, &s.err);
    make_parity(store, 0, 0);
    ckd_parity_status status = status_of(store);
    assert_true(status.files == 24 && status.covered_files == 24);
    assert_int_equal(damage_of(store), 0);
    scene_check(store, 4, 20);
    free_files(files, 4);
    ckd_store_close(store);
    store_check_clean(*state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_any_file_comes_back),
        tempdir_test(test_damage_in_different_places),
        tempdir_test(test_two_parity_files_repair_two_losses),
        tempdir_test(test_two_groups_of_a_lost_file),
        tempdir_test(test_leftovers_are_removed),
        tempdir_test(test_repair_reports_what_it_did),
        tempdir_test(test_damaged_files_are_left_out),
        tempdir_test(test_groups_grow),
        tempdir_test(test_deletion_regroups_the_rest),
        tempdir_test(test_weak_group),
        tempdir_test(test_deletion_finds_damaged_parity),
        tempdir_test(test_deletion_waits_for_parity),
        tempdir_test(test_deletion_waits_for_repair),
        tempdir_test(test_deletion_finds_damaged_members),
        tempdir_test(test_deletion_of_members_that_repair_nothing),
        tempdir_test(test_trash_is_covered),
        tempdir_test(test_give_up_removes_what_repair_needs),
        tempdir_test(test_scrub_reads_parity),
        tempdir_test(test_deletion_leaves_enough_for_repair),
        tempdir_test(test_parity_with_a_deleted_member_comes_back),
        tempdir_test(test_parity_is_not_made_of_a_damaged_member),
        tempdir_test(test_members_go_during_repair),
        tempdir_test(test_file_goes_during_a_save),
        tempdir_test(test_repair_while_a_run_saves),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
