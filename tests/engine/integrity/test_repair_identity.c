/*
 * A store whose identity (data/store) is damaged or lost: nothing replaces it but a repair, which writes the same id.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "codec/metadata/metadata.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { STEPS = 3 };

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

static void expect_no_open(const char *dir, ckd_open_mode mode, ckd_status expected, const char *text) {
    ckd_store *store;
    ckd_error err = {0};
    assert_int_equal(scene_open(&store, dir, mode, &err), expected);
    if (!strstr(err.message, text)) {
        fail_msg("'%s' does not say '%s'", err.message, text);
    }
}

static ckd_id id_of(const char *dir) {
    size_t size;
    store_identity identity;
    ckd_error err = {0};
    unsigned char *data = read_whole_file(store_path_of(dir, "data/store"), &size);
    must(store_identity_decode(&identity, data, size, "data/store", &err), &err);
    free(data);
    return identity.id;
}

static void expect_id(const char *dir, const ckd_id *id) {
    ckd_id now = id_of(dir);
    assert_memory_equal(&now, id, sizeof(now));
}

static void change_byte(const char *dir, size_t at) {
    size_t size;
    unsigned char *data = read_whole_file(store_path_of(dir, "data/store"), &size);
    data[at] ^= 1;
    write_whole_file(store_path_of(dir, "data/store"), data, size);
    free(data);
}

static void lose(const char *dir, const char *name) {
    assert_int_equal(unlink(store_path_of(dir, name)), 0);
}

static void empty_folder(const char *dir, const char *folder) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char name[512];
        snprintf(name, sizeof(name), "%s/%s", folder, list.names[i]);
        lose(dir, name);
    }
    dir_list_free(&list);
}

typedef struct repaired {
    size_t files, left;
} repaired;

static repaired repair(ckd_store *store, int dry_run) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    o.dry_run = dry_run;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    repaired out = {r->repaired_count, r->left->damage_count};
    if (out.files) {
        assert_string_equal(r->repaired[0].file, "data/store");
    }
    ckd_repair_result_free(r);
    return out;
}

/* Verify names the identity and nothing else. */
static void expect_named(ckd_store *store) {
    ckd_verify_result *r;
    ckd_error err = {0};
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    assert_int_equal(r->damage_count, 1);
    assert_string_equal(r->damage[0].file, "data/store");
    assert_non_null(strstr(r->damage[0].what, "ckptdelta repair writes it again"));
    ckd_verify_result_free(r);
}

static void load_all(ckd_store *store) {
    for (uint64_t step = 0; step < STEPS; step++) {
        scene s = scene_of(step);
        ckd_error err = {0};
        must(scene_load(store, &s, &err), &err);
    }
}

/* Readers go on, savers are refused, a repair writes the same id, and then all is as before. */
static void check_cycle(const char *dir, const ckd_id *id, bool missing) {
    ckd_checkpoint c;
    ckd_error err = {0};
    scene next = scene_of(STEPS);
    expect_no_open(dir, CKD_OPEN_CREATE, CKD_E_CORRUPT, "run ckptdelta repair");
    ckd_store *store = open_store(dir, CKD_OPEN_READ);
    load_all(store);
    expect_named(store);
    repaired r = repair(store, 1);
    assert_true(r.files == 1 && r.left == 0);
    ckd_store_close(store);
    assert_int_equal(file_exists(store_path_of(dir, "data/store")), !missing);
    store = open_store(dir, CKD_OPEN_WRITE);
    assert_int_equal(scene_save(&c, store, &next, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "run ckptdelta repair"));
    r = repair(store, 0);
    assert_true(r.files == 1 && r.left == 0);
    expect_id(dir, id);
    must(scene_save(&c, store, &next, &err), &err); /* the same handle may save now */
    ckd_store_close(store);
    store = open_store(dir, CKD_OPEN_CREATE);
    assert_int_equal(repair(store, 0).files, 0);
    scene_check(store, 0, STEPS + 1);
    ckd_store_close(store);
}

static void test_damaged(void **state) {
    static const size_t offsets[] = {0, 8, 10, 12, 20, 33, 44, 55};
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        change_byte(*state, offsets[i]);
        ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
        load_all(store);
        assert_int_equal(repair(store, 0).files, 1);
        expect_id(*state, &id);
        ckd_store_close(store);
    }
    change_byte(*state, 20);
    check_cycle(*state, &id, false);
}

static void test_missing(void **state) {
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    lose(*state, "data/store");
    lose(*state, "catalog.db"); /* nothing in the root but data, as after an interrupted creation */
    check_cycle(*state, &id, true);
}

static void test_a_directory_in_its_place(void **state) {
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    lose(*state, "data/store");
    assert_int_equal(mkdir(store_path_of(*state, "data/store"), 0700), 0);
    check_cycle(*state, &id, false);
}

/* ---- which files tell the id ---- */

/* Without manifests the chunk files tell it, without these the deletion mark. */
static void test_other_files_tell_it(void **state) {
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    static const char *const gone[] = {"data/m", "data/c"};
    for (int i = 0; i < 2; i++) {
        empty_folder(*state, gone[i]);
        lose(*state, "data/store");
        expect_no_open(*state, CKD_OPEN_CREATE, CKD_E_CORRUPT, "run ckptdelta repair");
        ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
        assert_true(repair(store, 0).files >= 1); /* lost manifests come back, too */
        ckd_store_close(store);
        expect_id(*state, &id);
        empty_folder(*state, "data/m");
    }
}

/* Only empty folders are left: an interrupted creation looks like that, and the next one completes it. */
static void test_nothing_is_cut_off(void **state) {
    ckd_store_close(open_store(*state, CKD_OPEN_CREATE));
    lose(*state, "data/store");
    lose(*state, "catalog.db");
    expect_no_open(*state, CKD_OPEN_CREATE, CKD_E_CORRUPT, "run ckptdelta repair");
    write_whole_file(store_path_of(*state, "data/deletions"), "?", 1);
    for (ckd_open_mode mode = CKD_OPEN_READ; mode <= CKD_OPEN_CREATE; mode++) {
        expect_no_open(*state, mode, CKD_E_CORRUPT, "no other file of the store has its id");
    }
    lose(*state, "data/deletions");
    expect_no_open(*state, CKD_OPEN_READ, CKD_E_NOT_FOUND, "no ckptdelta store");
    ckd_store_close(open_store(*state, CKD_OPEN_CREATE));
    assert_true(file_exists(store_path_of(*state, "data/store")));
}

/* A manifest of another store: nobody can tell which one is right. */
static void test_manifests_that_disagree(void **state) {
    char other[512];
    size_t size;
    snprintf(other, sizeof(other), "%s/other", (const char *)*state);
    assert_int_equal(mkdir(other, 0700), 0);
    scene_make(*state, 0, STEPS);
    scene_make(other, 0, 1);
    ckd_id id = id_of(*state);
    unsigned char *data = read_whole_file(store_path_of(other, "data/m/run.0.0"), &size);
    write_whole_file(store_path_of(*state, "data/m/run.9.0"), data, size);
    free(data);
    lose(*state, "data/store");
    for (ckd_open_mode mode = CKD_OPEN_READ; mode <= CKD_OPEN_CREATE; mode++) {
        expect_no_open(*state, mode, CKD_E_CORRUPT, "run.9.0");
    }
    assert_false(file_exists(store_path_of(*state, "data/store")));
    lose(*state, "data/m/run.9.0");
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(repair(store, 0).files, 1);
    ckd_store_close(store);
    expect_id(*state, &id);
}

/* A damaged manifest has no vote, and does not hide that of the others. */
static void test_a_damaged_manifest(void **state) {
    size_t size;
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    unsigned char *data = read_whole_file(store_path_of(*state, "data/m/run.0.0"), &size);
    data[16] ^= 1;
    write_whole_file(store_path_of(*state, "data/m/run.0.0"), data, size);
    free(data);
    lose(*state, "data/store");
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_true(repair(store, 0).files >= 1);
    ckd_store_close(store);
    expect_id(*state, &id);
}

/* ---- what must stay ---- */

static void test_a_later_version_stays(void **state) {
    size_t size, after;
    scene_make(*state, 0, STEPS);
    unsigned char *data = read_whole_file(store_path_of(*state, "data/store"), &size);
    data[8] = 2;
    store_le64(data + size - 8, hash64(data, size - 8));
    write_whole_file(store_path_of(*state, "data/store"), data, size);
    for (ckd_open_mode mode = CKD_OPEN_READ; mode <= CKD_OPEN_CREATE; mode++) {
        expect_no_open(*state, mode, CKD_E_UNSUPPORTED, "version 2");
    }
    unsigned char *now = read_whole_file(store_path_of(*state, "data/store"), &after);
    assert_int_equal(after, size);
    assert_memory_equal(now, data, size);
    free(now);
    free(data);
}

static int unreadable(void *context, file_op step, const char *path) {
    return step == FILE_OP_OPEN && strstr(path, "data/store") ? *(const int *)context : 0;
}

/* It may be intact. Readers go on, but a repair leaves it alone. */
static void test_an_unreadable_one_stays(void **state) {
    static const int reasons[] = {EIO, EACCES};
    scene_make(*state, 0, STEPS);
    for (int i = 0; i < 2; i++) {
        int why = reasons[i];
        uint64_t inode = file_inode(store_path_of(*state, "data/store"));
        file_set_fault_hook(unreadable, &why);
        expect_no_open(*state, CKD_OPEN_CREATE, CKD_E_IO, "data/store");
        expect_no_open(*state, CKD_OPEN_WRITE, CKD_E_IO, "data/store");
        ckd_store *store = open_store(*state, CKD_OPEN_READ);
        load_all(store);
        ckd_store_close(store);
        file_set_fault_hook(NULL, NULL);
        store = open_store(*state, CKD_OPEN_WRITE);
        file_set_fault_hook(unreadable, &why);
        repaired r = repair(store, 0);
        file_set_fault_hook(NULL, NULL);
        assert_true(r.files == 0 && r.left == 1);
        assert_int_equal(file_inode(store_path_of(*state, "data/store")), inode);
        r = repair(store, 0);
        assert_true(r.files == 0 && r.left == 0);
        ckd_store_close(store);
    }
}

static void test_a_reader_repairs_nothing(void **state) {
    ckd_repair_result *r;
    scene_make(*state, 0, STEPS);
    lose(*state, "data/store");
    ckd_store *store = open_store(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_repair(&r, store, NULL, NULL), CKD_E_READ_ONLY);
    ckd_store_close(store);
    assert_false(file_exists(store_path_of(*state, "data/store")));
}

/* ---- beside others, and cut off ---- */

static void test_beside_a_save(void **state) {
    scene_make(*state, 0, STEPS);
    ckd_id id = id_of(*state);
    ckd_store *saving = open_store(*state, CKD_OPEN_CREATE);
    ckd_save_options o = options_of(SCENE_RUN, STEPS);
    ckd_save *save = begin_with(saving, &o);
    scene s = scene_of(STEPS);
    ckd_error err = {0};
    change_byte(*state, 50);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(repair(store, 0).files, 1);
    expect_id(*state, &id);
    must(scene_finish(NULL, save, &s, &err), &err);
    ckd_store_close(saving);
    scene_check(store, 0, STEPS + 1);
    ckd_store_close(store);
}

typedef struct saboteur {
    size_t at, steps;
    bool kill;
} saboteur;

static int sabotage(void *context, file_op step, const char *path) {
    saboteur *s = context;
    bool ours = strstr(path, "data/store") || strstr(path, "data/.tmp") || strstr(path, "data/q");
    if (!ours || step == FILE_OP_OPEN || step == FILE_OP_READ || ++s->steps != s->at) {
        return 0;
    }
    if (s->kill) {
        _exit(77);
    }
    return ENOSPC;
}

static int repair_in_a_child(saboteur *s, const char *dir) {
    pid_t child = fork();
    if (child == 0) {
        ckd_store *store;
        ckd_repair_result *r = NULL;
        ckd_status status = scene_open(&store, dir, CKD_OPEN_WRITE, NULL);
        file_set_fault_hook(sabotage, s);
        status = status == CKD_OK ? ckd_store_repair(&r, store, NULL, NULL) : CKD_E_INVALID;
        file_set_fault_hook(NULL, NULL);
        _exit(status == CKD_OK ? 0 : status == CKD_E_NOSPACE ? 1 : 2);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    return WEXITSTATUS(how);
}

/* Wherever a repair ends, all loads go on, and the next repair completes it. */
static void sweep(const char *dir, bool kill, bool missing) {
    scene_make(dir, 0, STEPS);
    ckd_id id = id_of(dir);
    int ended = -1;
    size_t cut = 0;
    for (saboteur s = {.at = 1, .kill = kill}; ended != 0; s.at++) {
        ended = 0;
        if (missing) {
            lose(dir, "data/store");
        } else {
            change_byte(dir, 30);
        }
        ended = repair_in_a_child(&s, dir);
        assert_int_not_equal(ended, 2);
        cut += ended != 0;
        ckd_store *store = open_store(dir, CKD_OPEN_READ);
        load_all(store);
        ckd_store_close(store);
        store = open_store(dir, CKD_OPEN_WRITE);
        assert_int_equal(repair(store, 0).left, 0);
        expect_id(dir, &id);
        scene_check(store, 0, STEPS);
        ckd_store_close(store);
        store_check_clean(dir);
    }
    assert_in_range(cut, 5, 40);
}

static void test_cut_off(void **state) {
    for (int i = 0; i < 4; i++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0700), 0);
        sweep(dir, i & 1, i & 2);
    }
}

typedef struct rival {
    const char *dir;
    ckd_id id;
    bool done;
} rival;

/* Another repair writes the identity when this one has looked, and waits for the publish lock. */
static int quicker(void *context, file_op step, const char *path) {
    rival *r = context;
    if (step == FILE_OP_LOCK && strstr(path, "data/lock") && !r->done) {
        bytes data = {0};
        store_identity identity = {.id = r->id, .created_ns = 1};
        r->done = true;
        store_identity_encode(&data, &identity);
        write_whole_file(store_path_of(r->dir, "data/store"), data.data, data.size);
        bytes_free(&data);
    }
    return 0;
}

static void test_another_repair_was_quicker(void **state) {
    scene_make(*state, 0, STEPS);
    rival other = {.dir = *state, .id = id_of(*state)};
    change_byte(*state, 30);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    repaired dry = repair(store, 1);
    assert_int_equal(dry.files, 1);
    file_set_fault_hook(quicker, &other);
    repaired r = repair(store, 0);
    file_set_fault_hook(NULL, NULL);
    assert_true(other.done && r.files == 0 && r.left == 0);
    ckd_store_close(store);
    assert_false(dir_exists(store_path_of(*state, "data/q")));
    expect_id(*state, &other.id);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_damaged),
        tempdir_test(test_missing),
        tempdir_test(test_a_directory_in_its_place),
        tempdir_test(test_other_files_tell_it),
        tempdir_test(test_nothing_is_cut_off),
        tempdir_test(test_manifests_that_disagree),
        tempdir_test(test_a_damaged_manifest),
        tempdir_test(test_a_later_version_stays),
        tempdir_test(test_an_unreadable_one_stays),
        tempdir_test(test_a_reader_repairs_nothing),
        tempdir_test(test_beside_a_save),
        tempdir_test(test_cut_off),
        tempdir_test(test_another_repair_was_quicker),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
