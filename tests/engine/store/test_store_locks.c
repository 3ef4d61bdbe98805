/*
 * A process may be stopped while it holds a lock of a store. Whoever waits for the lock gets a message naming that
 * process, and gives up after the store's timeout.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define PATIENCE_MS 1200 /* just above the second after which a message comes */

static char messages[4096];

static void keep_message(void *unused, const char *message) {
    (void)unused;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static ckd_status open_store(ckd_store **out, const char *dir, ckd_open_mode mode, ckd_error *err) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.lock_timeout_ms = PATIENCE_MS;
    o.on_message = keep_message;
    messages[0] = '\0';
    return ckd_store_open(out, store_path_of(dir, ""), mode, &o, err);
}

static void make_store(const char *dir, uint64_t steps) {
    ckd_store *store = store_create(dir);
    for (uint64_t step = 1; step <= steps; step++) {
        scene s = scene_of(step);
        s.base = true;
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

/* Starts a process that takes a lock of the store and is then stopped. */
static pid_t stopped_holder(const char *dir, const char *name, lock_kind kind) {
    const char *path = store_path_of(dir, name);
    pid_t child = fork();
    if (child == 0) {
        file_lock *lock;
        ckd_status status = lock_acquire(&lock, path, kind, true, 0, NULL);
        raise(SIGSTOP);
        lock_release(lock);
        _exit(status == CKD_OK ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, WUNTRACED), child);
    assert_true(WIFSTOPPED(how));
    return child;
}

static void let_go(pid_t child) {
    int how;
    assert_int_equal(kill(child, SIGCONT), 0);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
}

static void assert_names(const char *text, pid_t child) {
    char stopped[96];
    snprintf(stopped, sizeof(stopped), "which is stopped (kill -CONT %d resumes it)", (int)child);
    if (!strstr(text, stopped)) {
        fail_msg("'%s' is not in '%s'", stopped, text);
    }
}

static void test_the_publish_lock(void **state) {
    ckd_store *store;
    ckd_error err = {0};
    make_store(*state, 1);
    pid_t child = stopped_holder(*state, "data/lock", LOCK_EXCLUSIVE);
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE, &err), CKD_E_BUSY);
    assert_non_null(strstr(messages, "for the lock data/lock, held by process"));
    assert_names(messages, child);
    assert_names(err.message, child);
    assert_non_null(strstr(err.message, "then try again"));
    assert_non_null(strstr(err.file, "data/lock"));
    let_go(child);
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE, &err), CKD_OK);
    assert_string_equal(messages, "");
    ckd_store_close(store);
}

/* A process that removes files holds the reader lock exclusively. Loads, saves and verifications wait for it. */
static void test_stopped_while_removing_files(void **state) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_verify_result *result = NULL;
    scene first = scene_of(1);
    make_store(*state, 1);
    assert_int_equal(open_store(&store, *state, CKD_OPEN_READ, &err), CKD_OK);
    pid_t child = stopped_holder(*state, "data/readers", LOCK_EXCLUSIVE);
    assert_int_equal(scene_load(store, &first, &err), CKD_E_BUSY);
    assert_names(messages, child);
    assert_names(err.message, child);
    messages[0] = '\0';
    assert_int_equal(ckd_store_verify(&result, store, NULL, &err), CKD_E_BUSY);
    assert_names(messages, child);
    assert_names(err.message, child);
    let_go(child);
    assert_int_equal(scene_load(store, &first, &err), CKD_OK);
    ckd_store_close(store);
}

/* A stopped load keeps files from being removed. */
static void test_stopped_while_loading(void **state) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_checkpoint_list *list;
    ckd_collected result;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    all.all = 1;
    make_store(*state, 2);
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE, &err), CKD_OK);
    pid_t child = stopped_holder(*state, "data/readers", LOCK_SHARED);
    assert_int_equal(ckd_store_list(&list, store, NULL, &err), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &list->items[0].id, 1, NULL, &err), CKD_OK);
    ckd_checkpoint_list_free(list);
    assert_int_equal(ckd_store_collect(&result, store, &all, &err), CKD_E_BUSY);
    assert_non_null(strstr(messages, "waiting for loads and saves that may read the files to be removed"));
    assert_names(messages, child);
    let_go(child);
    assert_int_equal(ckd_store_collect(&result, store, &all, &err), CKD_OK);
    assert_int_equal(result.checkpoints, 1);
    ckd_store_close(store);
}

/* ---- a list of the trash tests the lock of a new intent ---- */

typedef struct tester {
    file_lock *lock;
    pthread_t thread;
} tester;

static void *test_for_a_moment(void *context) {
    tester *t = context;
    clock_sleep_ns(20000000);
    lock_release(t->lock);
    return NULL;
}

static int test_first(void *context, file_op step, const char *path) {
    tester *t = context;
    if (step == FILE_OP_LOCK && strstr(path, "/data/i/") && !t->lock) {
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(lock_acquire(&t->lock, path, LOCK_EXCLUSIVE, false, 0, NULL), CKD_OK);
        assert_int_equal(pthread_create(&t->thread, NULL, test_for_a_moment, t), 0);
    }
    return 0;
}

static void end_testing(const tester *t) {
    file_set_fault_hook(NULL, NULL);
    assert_non_null(t->lock);
    assert_int_equal(pthread_join(t->thread, NULL), 0);
}

/* A save, a compaction and a copy wait until the test is over. */
static void test_the_lock_of_an_intent(void **state) {
    ckd_store *store, *copy;
    ckd_error err = {0};
    tester saving = {.lock = NULL}, compacting = {.lock = NULL}, copying = {.lock = NULL};
    char other[1024];
    make_store(*state, 1);
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE, &err), CKD_OK);
    for (uint64_t step = 2; step < 5; step++) {
        scene s = scene_of(step);
        if (step == 4) {
            file_set_fault_hook(test_first, &saving);
        }
        assert_int_equal(scene_save(NULL, store, &s, &err), CKD_OK);
    }
    end_testing(&saving);
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_compaction *done;
    o.max_depth = 1;
    file_set_fault_hook(test_first, &compacting);
    assert_int_equal(ckd_compact(&done, store, &o, &err), CKD_OK);
    end_testing(&compacting);
    check_items(done);
    ckd_compaction_free(done);
    snprintf(other, sizeof(other), "%s/copy", (const char *)*state);
    assert_int_equal(ckd_store_open(&copy, other, CKD_OPEN_CREATE, NULL, &err), CKD_OK);
    file_set_fault_hook(test_first, &copying);
    assert_int_equal(ckd_copy(NULL, copy, store, NULL, &err), CKD_OK);
    end_testing(&copying);
    ckd_store_close(copy);
    ckd_store_close(store);
}

/* ---- threads of one store ---- */

typedef struct refresh_call {
    ckd_store *store;
    atomic_uint lists; /* of manifests that it has read */
    ckd_status status;
} refresh_call;

static int count_lists(void *context, file_op step, const char *path) {
    refresh_call *r = context;
    size_t length = strlen(path);
    if (step == FILE_OP_OPEN && length > 7 && strcmp(path + length - 7, "/data/m") == 0) {
        atomic_fetch_add(&r->lists, 1);
    }
    return 0;
}

static void *refresh(void *context) {
    refresh_call *r = context;
    r->status = store_refresh_catalog(r->store, NULL);
    return NULL;
}

/* The catalog belongs to whoever has the store's mutex. */
static void test_a_refresh_waits_for_the_mutex(void **state) {
    pthread_t thread;
    scene_make(*state, 0, 1);
    refresh_call r = {.store = store_reopen(*state, CKD_OPEN_WRITE)};
    pthread_mutex_lock(&r.store->mutex);
    file_set_fault_hook(count_lists, &r);
    assert_int_equal(pthread_create(&thread, NULL, refresh, &r), 0);
    clock_sleep_ns(UINT64_C(100000000));
    unsigned before = atomic_load(&r.lists);
    pthread_mutex_unlock(&r.store->mutex);
    assert_int_equal(pthread_join(thread, NULL), 0);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(r.status, CKD_OK);
    assert_int_equal(before, 0);
    assert_true(atomic_load(&r.lists) > 0);
    ckd_store_close(r.store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_publish_lock), tempdir_test(test_stopped_while_removing_files),
        tempdir_test(test_stopped_while_loading), tempdir_test(test_the_lock_of_an_intent),
        tempdir_test(test_a_refresh_waits_for_the_mutex)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
