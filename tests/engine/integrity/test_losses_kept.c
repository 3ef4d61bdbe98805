/* What is known of lost checkpoints stays until their fate is known, whatever cannot be read or written meanwhile. */
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
#include <unistd.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "engine/store/manifests.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"
#include "tests/support/tempdir.h"

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static char messages[8192];

static void remember(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    ckd_error err = {0};
    o.threads = 1;
    o.on_message = remember;
    messages[0] = '\0';
    must(ckd_store_open(&store, store_path_of(dir, ""), mode, &o, &err), &err);
    return store;
}

static void open_and_close(const char *dir) {
    ckd_store_close(open_store(dir, CKD_OPEN_WRITE));
}

static void save(ckd_store *store, uint64_t step, bool base) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.base = base;
    must(scene_save(NULL, store, &s, &err), &err);
}

static void remove_manifest(const char *dir, unsigned long long step) {
    char name[64];
    snprintf(name, sizeof(name), "data/m/%s.%llu.0", SCENE_RUN, step);
    assert_int_equal(unlink(store_path_of(dir, name)), 0);
}

static size_t files_in(const char *dir, const char *folder) {
    dir_list list;
    if (dir_list_read(&list, store_path_of(dir, folder), NULL) != CKD_OK) {
        return 0;
    }
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

/* Verify reports the lost manifest of this checkpoint and no other damage. */
static void check_named(const char *dir, const char *checkpoint) {
    ckd_verify_result *r;
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    assert_int_equal(r->damage_count, 1);
    assert_non_null(strstr(r->damage[0].what, "the manifest is lost: it is missing"));
    assert_int_equal(r->damage[0].checkpoint_count, 1);
    assert_string_equal(r->damage[0].checkpoints[0], checkpoint);
    ckd_verify_result_free(r);
    ckd_store_close(store);
}

static void repair_all(const char *dir, size_t files) {
    ckd_repair_result *r;
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    assert_int_equal(r->left->damage_count, 0);
    assert_int_equal(r->repaired_count, files);
    ckd_repair_result_free(r);
    ckd_store_close(store);
}

static void check_steps(const char *dir, uint64_t first, uint64_t count) {
    ckd_store *store = open_store(dir, CKD_OPEN_READ);
    scene_check(store, first, count);
    ckd_store_close(store);
}

/* ---- operations that fail ---- */

typedef struct fault {
    const char *path; /* a part of it */
    int errnum;
    int first, last; /* the operations on it that fail, from 1 */
    int seen;
    bool reads_work;
} fault;

static int fail_here(void *context, file_op step, const char *path) {
    fault *f = context;
    bool reads = step == FILE_OP_OPEN || step == FILE_OP_READ;
    if (step == FILE_OP_LOCK || (f->errnum == EMFILE && !reads) || (f->reads_work && reads) ||
        !strstr(path, f->path)) {
        return 0;
    }
    f->seen++;
    return f->seen >= f->first && f->seen <= f->last ? f->errnum : 0;
}

typedef enum naming { UNNAMED, NAMED, FAILED } naming;

/* The first sync of the folder fails after a manifest got its name. */
static int fail_to_make_durable(void *context, file_op step, const char *path) {
    naming *n = context;
    bool named = step == FILE_OP_RENAME_NOREPLACE && strstr(path, "/data/m/");
    const char *name = strrchr(path, '/');
    bool synced = step == FILE_OP_DIR_SYNC && name && strcmp(name, "/m") == 0;
    if (*n == NAMED && synced) {
        *n = FAILED;
        return EIO;
    }
    *n = *n == UNNAMED && named ? NAMED : *n;
    return 0;
}

/*
 * The manifest that a repair writes has a name that may not last. It is withdrawn, and the next repair writes it again.
 */
static void test_failed_repair_is_withdrawn(void **state) {
    naming n = UNNAMED;
    ckd_repair_result *r;
    scene_make(*state, 0, 3);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    remove_manifest(*state, 2);
    file_set_fault_hook(fail_to_make_durable, &n);
    ckd_status status = ckd_store_repair(&r, store, NULL, NULL);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(n, FAILED);
    assert_int_equal(status, CKD_OK);
    assert_true(r->repaired_count == 0 && r->left->damage_count == 1);
    ckd_repair_result_free(r);
    assert_int_equal(files_in(*state, "data/m"), 2);
    ckd_store_close(store);
    repair_all(*state, 1);
    check_steps(*state, 0, 3);
}

/* ---- a lost checkpoint without files: the catalog's row is all that is left ---- */

/* Step 2 is a base, and the last one. Its manifest and its file are lost. */
static void lose_all_of_a_step(const char *dir) {
    dir_list before;
    scene_make(dir, 0, 2);
    assert_int_equal(dir_list_read(&before, store_path_of(dir, "data/c"), NULL), CKD_OK);
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    save(store, 2, true);
    ckd_store_close(store);
    dir_list after;
    assert_int_equal(dir_list_read(&after, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < after.count; i++) {
        bool old = false;
        for (size_t k = 0; k < before.count; k++) {
            old = old || strcmp(before.names[k], after.names[i]) == 0;
        }
        if (!old) {
            char name[128];
            snprintf(name, sizeof(name), "data/c/%s", after.names[i]);
            assert_int_equal(unlink(store_path_of(dir, name)), 0);
        }
    }
    dir_list_free(&before);
    dir_list_free(&after);
    remove_manifest(dir, 2);
}

static const char *make_folder(const char *dir, int number) {
    static char path[600];
    snprintf(path, sizeof(path), "%s/%d", dir, number);
    assert_int_equal(mkdir(path, 0700), 0);
    return path;
}

/* Step 2 of three is lost, and what data/q keeps of it is damaged. Returns the catalog from before. */
static unsigned char *lose_and_damage(const char *dir, size_t *size) {
    char name[300];
    dir_list list;
    scene_make(dir, 0, 3);
    unsigned char *old = read_whole_file(store_path_of(dir, "catalog.db"), size);
    remove_manifest(dir, 2);
    open_and_close(dir);
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/q"), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    snprintf(name, sizeof(name), "data/q/%s", list.names[0]);
    dir_list_free(&list);
    write_whole_file(store_path_of(dir, name), "noise", 5);
    return old;
}

/* The name of the file still tells what is lost, and a repair does not guess. */
static void test_what_was_kept_is_damaged(void **state) {
    ckd_repair_result *r;
    ckd_error err = {0};
    size_t size;
    free(lose_and_damage(*state, &size));
    check_named(*state, SCENE_RUN "@2");
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    assert_true(r->repaired_count == 0 && r->left->damage_count == 1);
    assert_non_null(strstr(r->left->damage[0].what, "what data/q keeps of it is damaged"));
    ckd_repair_result_free(r);
    assert_int_equal(ckd_compact(NULL, store, NULL, NULL), CKD_E_STATE);
    ckd_store_close(store);
    assert_int_equal(files_in(*state, "data/c"), 3);
}

/* The next writer keeps again what a catalog of a backup knows. So does one that a rebuild has put aside. */
static void test_a_catalog_knows_more_than_a_damaged_file(void **state) {
    static const char *const names[] = {"catalog.db", "catalog.db.old"};
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        size_t size;
        unsigned char *old = lose_and_damage(dir, &size);
        write_whole_file(store_path_of(dir, names[i]), old, size);
        free(old);
        open_and_close(dir);
        check_named(dir, SCENE_RUN "@2");
        repair_all(dir, 1);
        check_steps(dir, 0, 3);
        assert_int_equal(files_in(dir, "data/q"), 0);
    }
}

/* Any read of the deletion mark fails, or all do. */
static void test_the_deletion_mark_cannot_be_read(void **state) {
    static const int errnums[] = {EIO, EMFILE};
    bool failed = true;
    for (int at = 0; at == 0 || failed; at++) {
        const char *dir = make_folder(*state, at);
        fault f = {.path = "data/deletions", .errnum = errnums[at % 2], .first = at, .last = at ? at : 1000};
        lose_all_of_a_step(dir);
        file_set_fault_hook(fail_here, &f);
        open_and_close(dir);
        file_set_fault_hook(NULL, NULL);
        failed = f.seen >= f.first;
        assert_true(at > 0 || strstr(messages, "continuing without the catalog"));
        check_named(dir, SCENE_RUN "@2");
    }
}

/* Nor can a rebuild on request do without it. */
static void test_a_rebuild_cannot_read_the_deletion_mark(void **state) {
    fault f = {.path = "data/deletions", .errnum = EIO, .first = 1, .last = 1000};
    lose_all_of_a_step(*state);
    file_set_fault_hook(fail_here, &f);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    check_named(*state, SCENE_RUN "@2");
}

/* Saves go on meanwhile. */
static void test_data_q_cannot_be_written(void **state) {
    fault f = {.path = "data/q", .errnum = EACCES, .first = 1, .last = 1000, .reads_work = true};
    lose_all_of_a_step(*state);
    file_set_fault_hook(fail_here, &f);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_non_null(strstr(messages, "the manifest of " SCENE_RUN "@2 is gone"));
    assert_non_null(strstr(messages, "cannot be saved"));
    save(store, 3, false);
    scene s = scene_of(3);
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    check_named(*state, SCENE_RUN "@2");
    assert_int_equal(files_in(*state, "data/q"), 1);
    check_named(*state, SCENE_RUN "@2");
}

/* A deletion, after which the row would be doubtful, tries again to keep it. */
static void test_a_deletion_meanwhile(void **state) {
    fault f = {.path = "data/deletions", .errnum = EIO, .first = 1, .last = 1000};
    ckd_checkpoint c;
    ckd_error err = {0};
    lose_all_of_a_step(*state);
    file_set_fault_hook(fail_here, &f);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    file_set_fault_hook(NULL, NULL);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, NULL, &err), &err);
    ckd_store_close(store);
    check_named(*state, SCENE_RUN "@2");
}

/* ---- the catalog cannot be read ---- */

/* A writer of step 2 died when it had committed, but its intent was still there. */
static void leave_an_intent(const char *dir) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *saving;
    ckd_error err = {0};
    dir_list list;
    scene s = scene_of(2);
    char path[600];
    size_t size;
    scene_make(dir, 0, 2);
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    o.run = SCENE_RUN;
    o.step = 2;
    must(ckd_save_begin(&saving, store, &o, &err), &err);
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/i"), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, "data/i"), list.names[0]);
    dir_list_free(&list);
    unsigned char *data = read_whole_file(path, &size);
    must(scene_finish(NULL, saving, &s, &err), &err);
    ckd_store_close(store);
    write_whole_file(path, data, size);
    free(data);
}

/* Then its manifest is lost. */
static void lose_behind_an_intent(const char *dir) {
    leave_an_intent(dir);
    remove_manifest(dir, 2);
}

/* The manifest names these files, so recovery needs no catalog to keep them. */
static void test_recovery_of_committed_files(void **state) {
    fault f = {.path = "catalog.db", .errnum = EIO, .first = 1, .last = 1000};
    leave_an_intent(*state);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    assert_null(strstr(messages, "are kept for now"));
    assert_int_equal(files_in(*state, "data/i"), 0);
    check_steps(*state, 0, 3);
}

/* Its files stay until the catalog can be read, and then it is known that they are of a lost checkpoint. */
static void test_recovery_cannot_read_the_catalog(void **state) {
    static const int errnums[] = {EIO, EMFILE};
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        fault f = {.path = "catalog.db", .errnum = errnums[i], .first = 1, .last = 1000};
        lose_behind_an_intent(dir);
        file_set_fault_hook(fail_here, &f);
        open_and_close(dir);
        file_set_fault_hook(NULL, NULL);
        assert_non_null(strstr(messages, "are kept for now, as the catalog cannot be read"));
        assert_int_equal(files_in(dir, "data/c"), 3);
        assert_int_equal(files_in(dir, "data/i"), 1);
        check_named(dir, SCENE_RUN "@2");
        assert_int_equal(files_in(dir, "data/i"), 0);
        repair_all(dir, 1);
        check_steps(dir, 0, 3);
    }
}

/* The same for the deletion mark. */
static void test_recovery_cannot_read_the_deletion_mark(void **state) {
    fault f = {.path = "data/deletions", .errnum = EIO, .first = 1, .last = 1000};
    lose_behind_an_intent(*state);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(files_in(*state, "data/c"), 3);
    repair_all(*state, 1);
    check_steps(*state, 0, 3);
}

/* A catalog that is damaged or missing never tells. The file is moved, and nothing else is made of it. */
static void test_recovery_without_a_catalog(void **state) {
    static const char noise[4096] = "this is not a database";
    for (int missing = 0; missing < 2; missing++) {
        const char *dir = make_folder(*state, missing);
        lose_behind_an_intent(dir);
        assert_int_equal(unlink(store_path_of(dir, "catalog.db")), 0);
        if (!missing) {
            write_whole_file(store_path_of(dir, "catalog.db"), noise, sizeof(noise));
        }
        open_and_close(dir);
        assert_non_null(strstr(messages, "are in data/q"));
        assert_int_equal(files_in(dir, "data/c"), 2);
        assert_int_equal(files_in(dir, "data/q"), 1);
        assert_int_equal(files_in(dir, "data/i"), 0);
        check_steps(dir, 0, 2);
    }
}

/*
 * A file that recovery moved to data/q, as there was no catalog, is of a checkpoint that the catalog of a backup knows.
 * A repair takes it back.
 */
static void test_a_catalog_comes_back(void **state) {
    for (int doubtful = 0; doubtful < 2; doubtful++) {
        const char *dir = make_folder(*state, doubtful);
        ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
        ckd_repair_result *r;
        ckd_error err = {0};
        char path[600];
        size_t size;
        lose_behind_an_intent(dir);
        snprintf(path, sizeof(path), "%s", store_path_of(dir, "catalog.db"));
        unsigned char *old = read_whole_file(path, &size);
        assert_int_equal(unlink(path), 0);
        open_and_close(dir);
        assert_int_equal(files_in(dir, "data/c"), 2);
        write_whole_file(path, old, size);
        free(old);
        if (doubtful) {
            write_whole_file(store_path_of(dir, "data/deletions"), "", 0);
        }
        ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
        o.manifest_run = SCENE_RUN;
        o.manifest_step = 2;
        must(ckd_store_repair(&r, store, &o, &err), &err);
        assert_true(r->repaired_count == 1 && r->left->damage_count == 0);
        ckd_repair_result_free(r);
        ckd_store_close(store);
        check_steps(dir, 0, 3);
        assert_int_equal(files_in(dir, "data/q"), 0);
    }
}

/* Once the catalog says that something is lost. */
static void test_a_file_that_cannot_be_read_may_be_of_a_lost_checkpoint(void **state) {
    fault f = {.path = ".ckd", .errnum = EMFILE, .first = 1, .last = 1000};
    lose_behind_an_intent(*state);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(files_in(*state, "data/c"), 3);
    repair_all(*state, 1);
    check_steps(*state, 0, 3);
}

/* No deletion mark: the row of the lost checkpoint is doubtful, but it is that of the very writer that died. */
static void test_the_file_of_a_doubtful_checkpoint_stays_with_its_writer(void **state) {
    lose_behind_an_intent(*state);
    write_whole_file(store_path_of(*state, "data/deletions"), "", 0);
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/c"), 3);
    assert_int_equal(files_in(*state, "data/i"), 0);
    repair_all(*state, 1);
    check_steps(*state, 0, 3);
}

/* While a chunk file cannot be read, nobody knows whether it has records of a doubtful checkpoint. */
static void test_doubtful_rows_stay_while_a_file_cannot_be_read(void **state) {
    fault f = {.path = ".ckd", .errnum = EMFILE, .first = 1, .last = 1000};
    scene_make(*state, 0, 2);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    save(store, 2, true);
    ckd_store_close(store);
    remove_manifest(*state, 2);
    write_whole_file(store_path_of(*state, "data/deletions"), "", 0);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    repair_all(*state, 1);
    check_steps(*state, 0, 3);
}

/* The disk is full, and what the writer left cannot be moved: it stays, and the store can be opened and emptied. */
static void test_leftovers_that_cannot_be_moved_stay(void **state) {
    fault f = {.path = "data/q", .errnum = ENOSPC, .first = 1, .last = 1000, .reads_work = true};
    lose_behind_an_intent(*state);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(strstr(messages, "are kept for now, as they cannot be moved to data/q"));
    assert_int_equal(files_in(*state, "data/c"), 3);
    assert_int_equal(files_in(*state, "data/i"), 1);
    open_and_close(*state); /* the new catalog does not tell either */
    assert_non_null(strstr(messages, "no catalog shows whether it had finished"));
    assert_int_equal(files_in(*state, "data/c"), 2);
    assert_int_equal(files_in(*state, "data/q"), 1);
    assert_int_equal(files_in(*state, "data/i"), 0);
}

/* The intent stays for another reason while the new catalog is made. The old one is missing, or empty. */
static void test_a_new_catalog_does_not_know_what_an_older_writer_did(void **state) {
    static const char *const unreadable[] = {"data/i/", "data/m/" SCENE_RUN ".1.0"};
    for (int i = 0; i < 4; i++) {
        const char *dir = make_folder(*state, i);
        fault f = {.path = unreadable[i % 2], .errnum = EIO, .first = 1, .last = 1000};
        lose_behind_an_intent(dir);
        const char *path = store_path_of(dir, "catalog.db");
        assert_int_equal(i < 2 ? unlink(path) : truncate(path, 0), 0);
        file_set_fault_hook(fail_here, &f);
        open_and_close(dir);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(files_in(dir, "data/i"), 1);
        open_and_close(dir);
        assert_int_equal(files_in(dir, "data/i"), 0);
        assert_int_equal(files_in(dir, "data/c") + files_in(dir, "data/q"), 3);
    }
}

/* SQLite takes the journal of an empty file for one of a file that was there before. */
static void test_an_empty_catalog_with_a_journal(void **state) {
    lose_behind_an_intent(*state);
    assert_int_equal(truncate(store_path_of(*state, "catalog.db"), 0), 0);
    write_whole_file(store_path_of(*state, "catalog.db-journal"), "a journal", 9);
    open_and_close(*state); /* makes a new catalog */
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/i"), 0);
    assert_int_equal(files_in(*state, "data/c") + files_in(*state, "data/q"), 3);
}

/* Step 2 builds on a deleted step 1, and its manifest is lost. While the catalog cannot be read, the trash stays. */
static void test_a_collection_cannot_read_the_catalog(void **state) {
    fault f = {.path = "catalog.db", .errnum = EIO, .first = 1, .last = 1000};
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_checkpoint c;
    ckd_error err = {0};
    scene_make(*state, 0, 3);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    o.undo_s = 0;
    must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    ckd_store_close(store);
    remove_manifest(*state, 2);
    file_set_fault_hook(fail_here, &f);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_non_null(strstr(messages, "the trash is not emptied: "));
    assert_int_not_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_store_close(store);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(files_in(*state, "data/c"), 3);
    repair_all(*state, 1);
    store = open_store(*state, CKD_OPEN_WRITE);
    scene s = scene_of(2);
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    ckd_store_close(store);
}

/* ---- data/q cannot be read ---- */

static const int unreadable[] = {EIO, EMFILE};

/* Step 2 builds on a deleted step 1, and data/q alone knows that its manifest is lost. The trash stays. */
static void test_a_collection_cannot_read_what_was_kept(void **state) {
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        fault f = {.path = "data/q", .errnum = unreadable[i], .first = 1, .last = 1000};
        ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
        ckd_checkpoint c;
        ckd_error err = {0};
        scene_make(dir, 0, 3);
        ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
        o.undo_s = 0;
        must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
        must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
        ckd_store_close(store);
        remove_manifest(dir, 2);
        open_and_close(dir);
        file_set_fault_hook(fail_here, &f);
        store = open_store(dir, CKD_OPEN_WRITE);
        assert_int_not_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
        ckd_store_close(store);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(files_in(dir, "data/c"), 3);
        repair_all(dir, 1);
    }
}

/* The removal of a dead writer's intent was not durable. The file of its lost checkpoint stays. */
static void test_recovery_cannot_read_what_was_kept(void **state) {
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        fault f = {.path = "data/q", .errnum = unreadable[i], .first = 1, .last = 1000};
        char path[600];
        size_t size;
        dir_list list;
        lose_behind_an_intent(dir);
        assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/i"), NULL), CKD_OK);
        snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, "data/i"), list.names[0]);
        dir_list_free(&list);
        unsigned char *data = read_whole_file(path, &size);
        open_and_close(dir);
        write_whole_file(path, data, size);
        free(data);
        file_set_fault_hook(fail_here, &f);
        open_and_close(dir);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(files_in(dir, "data/c"), 3);
        repair_all(dir, 1);
        check_steps(dir, 0, 3);
    }
}

/*
 * Step 2 is lost, and saved again. While data/q cannot be read, its generation is unknown: the lost
 * manifest could take its place.
 */
static void test_a_save_cannot_read_what_was_kept(void **state) {
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        fault f = {.path = "data/q", .errnum = unreadable[i], .first = 1, .last = 1000};
        scene s = scene_of(2);
        ckd_checkpoint c;
        ckd_error err = {0};
        scene_make(dir, 0, 3);
        remove_manifest(dir, 2);
        ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
        s.base = true;
        file_set_fault_hook(fail_here, &f);
        assert_int_equal(scene_save(NULL, store, &s, &err), CKD_E_IO);
        file_set_fault_hook(NULL, NULL);
        assert_non_null(strstr(err.file, "data/q"));
        must(scene_save(&c, store, &s, &err), &err);
        assert_int_equal(c.generation, 1);
        ckd_store_close(store);
    }
}

/* ---- intents and manifests that are damaged ---- */

static const char damaged_intent[] = "data/i/0123456789abcdef0123456789abcdef";

/* The newest checkpoint lost its manifest, which nothing else hinders from being repaired. */
static void lose_the_newest(const char *dir) {
    scene_make(dir, 0, 3);
    remove_manifest(dir, 2);
}

/* It may name any file. Verify says so, and the next writer moves it aside, so that a repair is possible. */
static void test_a_damaged_intent(void **state) {
    ckd_verify_result *r;
    ckd_error err = {0};
    lose_the_newest(*state);
    write_whole_file(store_path_of(*state, damaged_intent), "noise", 5);
    write_whole_file(store_path_of(*state, "data/c/0123456789abcdef0123456789abcdef.ckd.tmp"), "noise", 5);
    ckd_store *store = open_store(*state, CKD_OPEN_READ);
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    bool named = false;
    for (size_t i = 0; i < r->damage_count; i++) {
        named = named || strcmp(r->damage[i].file, damaged_intent) == 0;
    }
    assert_true(named && r->damage_count == 2);
    ckd_verify_result_free(r);
    ckd_store_close(store);
    repair_all(*state, 1);
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/i"), 0);
    assert_int_equal(files_in(*state, "data/q"), 1);
    assert_int_equal(files_in(*state, "data/c"), 3);
    check_steps(*state, 0, 3);
}

/* The writer of a damaged intent lives: it stays. So does one that cannot be read now, or is of a newer version. */
static void test_an_intent_that_stays(void **state) {
    fault f = {.path = damaged_intent, .errnum = EIO, .first = 1, .last = 1000};
    file_lock *lock;
    scene_make(*state, 0, 1);
    write_whole_file(store_path_of(*state, damaged_intent), "noise", 5);
    file_set_fault_hook(fail_here, &f);
    open_and_close(*state);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(strstr(messages, "is left alone"));
    assert_int_equal(lock_acquire(&lock, store_path_of(*state, damaged_intent), LOCK_SHARED, false, 0, NULL),
                     CKD_OK);
    open_and_close(*state);
    lock_release(lock);
    assert_int_equal(files_in(*state, "data/i"), 1);
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/i"), 0);
}

/* A lost checkpoint builds on one whose manifest is damaged, so that nothing readable names the files of either. */
static void test_a_damaged_manifest_beside_a_lost_one(void **state) {
    ckd_repair_result *r;
    ckd_error err = {0};
    lose_the_newest(*state);
    write_whole_file(store_path_of(*state, "data/m/" SCENE_RUN ".1.0"), "noise", 5);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    assert_true(r->repaired_count == 1 && r->left->damage_count == 1);
    assert_string_equal(r->left->damage[0].file, "data/m/" SCENE_RUN ".1.0");
    ckd_repair_result_free(r);
    scene s = scene_of(2);
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    ckd_store_close(store);
    assert_int_equal(files_in(*state, "data/c"), 3);
}

static int count_manifests(void *context, file_op step, const char *path) {
    *(size_t *)context += step == FILE_OP_OPEN && strstr(path, "data/m/") != NULL;
    return 0;
}

/* However many writers died, their fates are looked up once. */
static void test_recovery_reads_the_manifests_once(void **state) {
    size_t seen[2] = {0};
    for (int i = 0; i < 2; i++) {
        const char *dir = make_folder(*state, i);
        lose_behind_an_intent(dir);
        dir_list list;
        assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/i"), NULL), CKD_OK);
        char from[600], to[128];
        size_t size;
        snprintf(from, sizeof(from), "%s/%s", store_path_of(dir, "data/i"), list.names[0]);
        dir_list_free(&list);
        unsigned char *data = read_whole_file(from, &size);
        for (int k = 0; k < (i ? 20 : 1); k++) {
            snprintf(to, sizeof(to), "data/i/%032x", k + 1);
            write_whole_file(store_path_of(dir, to), data, size);
        }
        free(data);
        file_set_fault_hook(count_manifests, &seen[i]);
        open_and_close(dir);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(files_in(dir, "data/i"), 0);
        assert_int_equal(files_in(dir, "data/c"), 3);
        repair_all(dir, 1);
        check_steps(dir, 0, 3);
    }
    assert_true(seen[0] > 0);
    assert_int_equal(seen[0], seen[1]);
}

/* ---- a deletion that died ---- */

/* It had made its tombstone, and had not reached the catalog. The next writer removes the checkpoint for good. */
static void test_a_deletion_died_before_the_catalog(void **state) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_checkpoint c;
    ckd_error err = {0};
    char path[600];
    size_t size;
    scene_make(*state, 0, 3);
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "catalog.db"));
    unsigned char *old = read_whole_file(path, &size);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    o.undo_s = 0;
    must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    ckd_store_close(store);
    write_whole_file(path, old, size);
    free(old);
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/t"), 0);
    assert_null(strstr(messages, "which has no manifest"));
    assert_int_equal(files_in(*state, "data/q"), 0);
    check_steps(*state, 2, 1);
}

/* While the catalog cannot be written, nothing but the tombstone says that its row is of a deleted checkpoint. */
static void test_a_deletion_without_the_catalog(void **state) {
    fault f = {.path = "catalog.db", .errnum = EIO, .first = 1, .last = 1000, .reads_work = true};
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_checkpoint c;
    ckd_error err = {0};
    scene_make(*state, 0, 3);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    o.undo_s = 0;
    file_set_fault_hook(fail_here, &f);
    save(store, 3, false);
    must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    ckd_store_close(store);
    file_set_fault_hook(NULL, NULL);
    open_and_close(*state);
    assert_null(strstr(messages, "which has no manifest"));
    open_and_close(*state);
    assert_int_equal(files_in(*state, "data/q"), 0);
    assert_int_equal(files_in(*state, "data/t"), 0);
    check_steps(*state, 2, 2);
}

/* ---- a manifest lost from the trash ---- */

static void delete_step(const char *dir, uint64_t step, uint64_t undo_s) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_checkpoint c;
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    o.undo_s = undo_s;
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    ckd_store_close(store);
}

static void collect(const char *dir, bool all) {
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    o.all = all;
    must(ckd_store_collect(NULL, store, &o, &err), &err);
    ckd_store_close(store);
}

/* lost: the step that cannot be restored; NULL: there is no damage. */
static void check_trash(const char *dir, const char *lost) {
    ckd_verify_result *r;
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    assert_int_equal(r->damage_count, lost != NULL);
    if (lost) {
        assert_non_null(strstr(r->damage[0].what, "the manifest of a deleted checkpoint is lost"));
        assert_int_equal(r->damage[0].checkpoint_count, 1);
        assert_non_null(strstr(r->damage[0].checkpoints[0], lost));
    }
    ckd_verify_result_free(r);
    ckd_store_close(store);
}

static void check_loads(const char *dir, uint64_t step) {
    ckd_store *store = open_store(dir, CKD_OPEN_READ);
    scene s = scene_of(step);
    assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    ckd_store_close(store);
}

/* It is damage until the checkpoint could no longer be restored, whatever is collected meanwhile. */
static void test_a_manifest_lost_from_the_trash(void **state) {
    scene_make(*state, 0, 4);
    delete_step(*state, 3, 3600);
    check_trash(*state, NULL);
    remove_manifest(*state, 3);
    check_trash(*state, SCENE_RUN "@3");
    delete_step(*state, 1, 0);
    collect(*state, false);
    assert_int_equal(files_in(*state, "data/t"), 1);
    check_trash(*state, SCENE_RUN "@3");
    check_loads(*state, 2);
    collect(*state, true);
    assert_int_equal(files_in(*state, "data/t"), 0);
}

/* Its chunk files are needed by others, so that nothing but the tombstone tells of it. */
static void test_a_manifest_of_a_parent_lost_from_the_trash(void **state) {
    scene_make(*state, 0, 3);
    delete_step(*state, 1, 3600);
    remove_manifest(*state, 1);
    check_trash(*state, SCENE_RUN "@1");
    check_loads(*state, 2);
}

static int tombstones_stay(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_REMOVE && strstr(path, "data/t/" SCENE_RUN) ? EACCES : 0;
}

/* A collection has died before it removed the tombstone; the run has another name now. */
static void test_tombstones_without_a_manifest_that_are_no_loss(void **state) {
    const char *dir = make_folder(*state, 0);
    ckd_error err = {0};
    scene_make(dir, 0, 4);
    delete_step(dir, 3, 3600);
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = true;
    file_set_fault_hook(tombstones_stay, NULL);
    assert_int_not_equal(ckd_store_collect(NULL, store, &o, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    ckd_store_close(store);
    assert_int_equal(files_in(dir, "data/m"), 3);
    assert_int_equal(files_in(dir, "data/t"), 1);
    check_trash(dir, NULL);

    dir = make_folder(*state, 1);
    scene_make(dir, 0, 4);
    delete_step(dir, 3, 3600);
    store = open_store(dir, CKD_OPEN_WRITE);
    must(ckd_store_rename_run(NULL, store, SCENE_RUN, "another", NULL, &err), &err);
    ckd_store_close(store);
    check_trash(dir, NULL);
}

/*
 * A deletion without a grace period, by a process whose clock was ten minutes ahead. It has died after it removed the
 * manifest.
 */
static void test_a_deletion_in_the_future_that_is_no_loss(void **state) {
    manifest_list tombstones = {0};
    tombstone t;
    ckd_error err = {0};
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = true;
    scene_make(*state, 0, 4);
    delete_step(*state, 3, 3600);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    file_set_fault_hook(tombstones_stay, NULL);
    assert_int_not_equal(ckd_store_collect(NULL, store, &o, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    must(manifests_tombstones(&tombstones, store, &err), &err);
    assert_int_equal(tombstones.count, 1);
    must(tombstone_read(&t, store, &tombstones.items[0], &err), &err);
    t.deleted_ns = t.until_ns = clock_wall_ns() + UINT64_C(600000000000);
    must(tombstone_write(store, &t, true, &err), &err);
    manifests_free(&tombstones);
    ckd_store_close(store);
    check_trash(*state, NULL);
    collect(*state, false);
    assert_int_equal(files_in(*state, "data/t"), 0);
    check_loads(*state, 2);
}

/* A grace period that is over by the clock of a collection goes on by one that is behind. */
static void test_a_collection_with_a_clock_that_is_ahead(void **state) {
    manifest_list tombstones = {0};
    tombstone t;
    ckd_error err = {0};
    scene_make(*state, 0, 4);
    delete_step(*state, 3, 3600);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(manifests_tombstones(&tombstones, store, &err), &err);
    assert_int_equal(tombstones.count, 1);
    must(tombstone_read(&t, store, &tombstones.items[0], &err), &err);
    t.until_ns = clock_wall_ns() - 1;
    t.deleted_ns = t.until_ns - UINT64_C(60000000000);
    must(tombstone_write(store, &t, true, &err), &err);
    file_set_fault_hook(tombstones_stay, NULL);
    assert_int_not_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(files_in(*state, "data/m"), 3);
    must(tombstone_read(&t, store, &tombstones.items[0], &err), &err);
    assert_false(tombstone_in_grace(&t, t.deleted_ns));
    manifests_free(&tombstones);
    ckd_store_close(store);
    check_loads(*state, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_failed_repair_is_withdrawn),
        tempdir_test(test_what_was_kept_is_damaged),
        tempdir_test(test_a_catalog_knows_more_than_a_damaged_file),
        tempdir_test(test_the_deletion_mark_cannot_be_read),
        tempdir_test(test_a_rebuild_cannot_read_the_deletion_mark),
        tempdir_test(test_data_q_cannot_be_written),
        tempdir_test(test_a_deletion_meanwhile),
        tempdir_test(test_recovery_of_committed_files),
        tempdir_test(test_recovery_cannot_read_the_catalog),
        tempdir_test(test_recovery_cannot_read_the_deletion_mark),
        tempdir_test(test_recovery_without_a_catalog),
        tempdir_test(test_a_catalog_comes_back),
        tempdir_test(test_a_file_that_cannot_be_read_may_be_of_a_lost_checkpoint),
        tempdir_test(test_the_file_of_a_doubtful_checkpoint_stays_with_its_writer),
        tempdir_test(test_doubtful_rows_stay_while_a_file_cannot_be_read),
        tempdir_test(test_leftovers_that_cannot_be_moved_stay),
        tempdir_test(test_a_new_catalog_does_not_know_what_an_older_writer_did),
        tempdir_test(test_an_empty_catalog_with_a_journal),
        tempdir_test(test_a_collection_cannot_read_the_catalog),
        tempdir_test(test_a_collection_cannot_read_what_was_kept),
        tempdir_test(test_recovery_cannot_read_what_was_kept),
        tempdir_test(test_a_save_cannot_read_what_was_kept),
        tempdir_test(test_a_damaged_intent),
        tempdir_test(test_an_intent_that_stays),
        tempdir_test(test_a_damaged_manifest_beside_a_lost_one),
        tempdir_test(test_recovery_reads_the_manifests_once),
        tempdir_test(test_a_deletion_died_before_the_catalog),
        tempdir_test(test_a_deletion_without_the_catalog),
        tempdir_test(test_a_manifest_lost_from_the_trash),
        tempdir_test(test_a_manifest_of_a_parent_lost_from_the_trash),
        tempdir_test(test_tombstones_without_a_manifest_that_are_no_loss),
        tempdir_test(test_a_deletion_in_the_future_that_is_no_loss),
        tempdir_test(test_a_collection_with_a_clock_that_is_ahead),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
