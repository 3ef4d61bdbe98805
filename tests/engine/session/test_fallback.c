/* If the newest checkpoint is damaged, a session restores an older one only if asked to, and reports it. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { COUNT = 5000 };
static float values[COUNT];
static char messages[2048];

static void keep_message(void *unused, const char *message) {
    (void)unused;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_session *open_session(const char *dir, int restore_older) {
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    ckd_store_options store = CKD_STORE_OPTIONS_INIT;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    ckd_tensor t = CKD_TENSOR_INIT;
    ckd_session *s;
    ckd_error err = {0};
    save.run = "run";
    save.base = 1;
    store.on_message = keep_message;
    o.save = &save;
    o.store = &store;
    o.every_steps = 1;
    o.restore_older = restore_older;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = (uint64_t[]){COUNT};
    must(ckd_session_open(&s, store_path_of(dir, ""), &o, &err), &err);
    must(ckd_session_add(s, &t, values, 0, &err), &err);
    return s;
}

static void fill(uint64_t step) {
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = (float)(step * 1000 + i);
    }
}

static void save_steps(const char *dir, uint64_t count) {
    ckd_session *s = open_session(dir, 0);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= count; step++) {
        ckd_session_fence(s);
        fill(step);
        must(ckd_session_save(s, step, &err), &err);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
}

static void flip(const char *path, size_t from_end) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size - from_end] ^= 1;
    write_whole_file(path, data, size);
    free(data);
}

/* Damages the chunk file of a step, which is found by its manifest. */
static void damage_chunk(const char *dir, uint64_t step) {
    char below[128];
    size_t size;
    snprintf(below, sizeof(below), "data/m/run.%llu.0", (unsigned long long)step);
    unsigned char *text = read_whole_file(store_path_of(dir, below), &size);
    dir_list list;
    bool found = false;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !found; i++) {
        unsigned char id[16];
        for (size_t k = 0; k < 16; k++) {
            unsigned byte;
            assert_int_equal(sscanf(list.names[i] + 2 * k, "%2x", &byte), 1);
            id[k] = (unsigned char)byte;
        }
        found = memmem(text, size, id, 16) != NULL;
        if (found) {
            snprintf(below, sizeof(below), "data/c/%s", list.names[i]);
            const char *path = store_path_of(dir, below);
            flip(path, (size_t)file_bytes(path) / 2);
        }
    }
    assert_true(found);
    dir_list_free(&list);
    free(text);
}

static ckd_status restore(const char *dir, int older, uint64_t step, ckd_checkpoint *from) {
    ckd_session *s = open_session(dir, older);
    ckd_error err = {0};
    messages[0] = '\0';
    memset(values, 0, sizeof(values));
    ckd_status status = ckd_session_restore(from, s, step, &err);
    assert_int_equal(status, err.status);
    assert_int_equal(ckd_session_close(s, NULL), CKD_OK);
    return status;
}

static void check_restored(uint64_t step) {
    for (size_t i = 0; i < COUNT; i++) {
        assert_true(values[i] == (float)(step * 1000 + i));
    }
}

static void test_payloads(void **state) {
    ckd_checkpoint from;
    save_steps(*state, 4);
    damage_chunk(*state, 4);
    damage_chunk(*state, 3);
    assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_E_CORRUPT);
    assert_int_equal(from.step, 0);
    assert_string_equal(messages, "");
    assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_OK);
    assert_int_equal(from.step, 2);
    check_restored(2);
    assert_non_null(strstr(messages, "run@4 is damaged"));
    assert_non_null(strstr(messages, "run@2 is restored instead"));
    assert_int_equal(restore(*state, 0, 1, &from), CKD_OK);
    check_restored(1);
    damage_chunk(*state, 2);
    damage_chunk(*state, 1);
    assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_E_CORRUPT);
}

static void test_manifests(void **state) {
    ckd_checkpoint from;
    save_steps(*state, 2);
    flip(store_path_of(*state, "data/m/run.2.0"), 20);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_E_CORRUPT);
    assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_OK);
    assert_int_equal(from.step, 1);
    check_restored(1);
    assert_non_null(strstr(messages, "run@2 is newer than run@1 and cannot be read"));
}

/*
 * After a restore of step 1, the run continued in a branch. Its only manifest is damaged. The newest checkpoint that is
 * left is one that training went back from.
 */
static void test_only_manifest_of_a_branch(void **state) {
    ckd_checkpoint from;
    ckd_error err = {0};
    save_steps(*state, 3);
    ckd_session *s = open_session(*state, 0);
    must(ckd_session_restore(NULL, s, 1, &err), &err);
    fill(2);
    must(ckd_session_save(s, 2, &err), &err);
    must(ckd_session_close(s, &err), &err);
    assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_OK);
    assert_string_equal(from.run, "run~2");
    flip(store_path_of(*state, "data/m/run~2.2.0"), 20);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_E_CORRUPT);
    assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_OK);
    assert_int_equal(from.step, 3);
    assert_non_null(strstr(messages, "run~2@2 is of a later branch than run@3 and cannot be read"));
}

/* It is no new run, whose training would begin at its first step. */
static void test_all_manifests(void **state) {
    ckd_checkpoint from;
    assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_E_NOT_FOUND);
    save_steps(*state, 1);
    flip(store_path_of(*state, "data/m/run.1.0"), 20);
    for (int older = 0; older < 2; older++) {
        assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
        assert_int_equal(restore(*state, older, CKD_LATEST, &from), CKD_E_CORRUPT);
    }
}

/* A lost newest checkpoint is passed over, and each restore says so. */
static void test_lost_manifests(void **state) {
    save_steps(*state, 2);
    for (uint64_t left = 2; left-- > 0;) {
        char name[32], said[64];
        ckd_checkpoint from;
        snprintf(name, sizeof(name), "data/m/run.%u.0", (unsigned)left + 1);
        snprintf(said, sizeof(said), "run@%u was committed and is lost", (unsigned)left + 1);
        assert_int_equal(unlink(store_path_of(*state, name)), 0);
        for (unsigned again = 0; again < 2; again++) {
            ckd_status status = restore(*state, 0, CKD_LATEST, &from);
            assert_int_equal(status, left ? CKD_OK : CKD_E_NOT_FOUND);
            assert_int_equal(from.step, left);
            assert_non_null(strstr(messages, said));
        }
    }
}

/* A lost checkpoint that is older than the newest one, or of another run, is of no concern to whoever restores. */
static void test_lost_manifests_of_no_concern(void **state) {
    static const char *const lost[] = {"data/m/run.2.0", "data/m/other.9.0"};
    ckd_checkpoint from;
    save_steps(*state, 3);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_save *save = begin_save(store, "other", 9);
    add_tensor(save, "w", CKD_F32, 1, (uint64_t[]){COUNT}, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    ckd_store_close(store);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(unlink(store_path_of(*state, lost[i])), 0);
        assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_OK);
        assert_int_equal(from.step, 3);
        assert_null(strstr(messages, "is lost"));
    }
}

static void save_value(ckd_store *store, uint64_t step, float value) {
    ckd_save *save = begin_save(store, "run", step);
    values[7] = value;
    add_tensor(save, "w", CKD_F32, 1, (uint64_t[]){COUNT}, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
}

/* Of a suspect checkpoint and the healthy one before it, a manifest between them may be that of a later healthy one. */
static void test_unreadable_manifest_before_a_suspect_one(void **state) {
    ckd_checkpoint newest, healthy;
    ckd_store *store = store_create(*state);
    for (uint64_t step = 1; step <= 4; step++) {
        save_value(store, step, step < 4 ? (float)step : NAN);
    }
    assert_int_equal(ckd_store_find(&newest, store, "run", CKD_LATEST, NULL), CKD_OK);
    assert_true(newest.step == 4 && newest.suspect);
    assert_int_equal(ckd_store_healthy(&healthy, store, &newest, NULL), CKD_OK);
    assert_int_equal(healthy.step, 3);
    ckd_store_close(store);
    flip(store_path_of(*state, "data/m/run.3.0"), 20);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    store = store_reopen(*state, CKD_OPEN_READ);
    ckd_error err = {0};
    assert_int_equal(ckd_store_healthy(&healthy, store, &newest, &err), CKD_E_CORRUPT);
    assert_int_equal(healthy.step, 2);
    assert_non_null(strstr(err.message, "run@3 is newer than run@2 and cannot be read"));
    ckd_store_close(store);
}

/* Makes reads or opens of one file fail. */
typedef struct unreadable {
    const char *name;
    int errnum;
    file_op step;
} unreadable;

static int refuse_file(void *context, file_op step, const char *path) {
    const unreadable *u = context;
    return step == u->step && strstr(path, u->name) ? u->errnum : 0;
}

/* The newest manifest cannot be read, and there is no catalog. */
static void test_unreadable_manifests(void **state) {
    static const struct {
        int errnum;
        file_op step;
    } ways[] = {{EIO, FILE_OP_READ},
                {EUCLEAN, FILE_OP_OPEN},
                {EBADMSG, FILE_OP_OPEN},
                {EACCES, FILE_OP_OPEN},
                {ESTALE, FILE_OP_OPEN}};
    ckd_checkpoint from;
    save_steps(*state, 2);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        unreadable u = {"data/m/run.2.0", ways[i].errnum, ways[i].step};
        assert_int_equal(file_remove(store_path_of(*state, "catalog.db"), true, NULL), CKD_OK);
        file_set_fault_hook(refuse_file, &u);
        assert_int_equal(restore(*state, 0, CKD_LATEST, &from), CKD_E_IO);
        assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_OK);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(from.step, 1);
        check_restored(1);
        assert_non_null(strstr(messages, "run@2 is newer than run@1 and cannot be read"));
    }
    unreadable ours = {"data/m/run.2.0", EMFILE, FILE_OP_OPEN}; /* EMFILE says nothing about the file */
    file_set_fault_hook(refuse_file, &ours);
    assert_int_equal(restore(*state, 1, CKD_LATEST, &from), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_payloads),
                                       tempdir_test(test_manifests),
                                       tempdir_test(test_only_manifest_of_a_branch),
                                       tempdir_test(test_all_manifests),
                                       tempdir_test(test_lost_manifests),
                                       tempdir_test(test_lost_manifests_of_no_concern),
                                       tempdir_test(test_unreadable_manifest_before_a_suspect_one),
                                       tempdir_test(test_unreadable_manifests)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
