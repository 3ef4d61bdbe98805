/*
 * A trainer is killed during its saves. Of the states it has handed over, at most the newest is lost, or as many as
 * may be in progress. Nothing keeps the next trainer from using the store.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/paths.h"
#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

enum { ROWS = 40, EVERY = 3, MESSAGES = 33 };

/* What the trainer had done when a step returned. */
typedef struct progress {
    uint64_t step, staged; /* staged: CKD_LATEST before the first one */
} progress;

typedef struct way_to_save {
    ckd_snapshot snapshot;
    uint32_t under_way; /* saves_under_way */
    uint64_t snapshot_bytes;
    ckd_fidelity fidelity;
} way_to_save;

/* Simulates a slow disk: a save takes longer than an interval, so the trainer gets as far ahead as it may. */
static int slowly(void *context, file_op step, const char *path) {
    (void)context;
    if (step == FILE_OP_SYNC && strstr(path, "/data/c/")) {
        usleep(4000);
    }
    return 0;
}

/* The child trains until it is killed. */
static void train(const char *dir, const way_to_save *how, int to) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    save.fidelity = how->fidelity;
    o.save = &save;
    o.every_steps = EVERY;
    o.snapshot = how->snapshot;
    o.snapshot_bytes = how->snapshot_bytes;
    o.saves_under_way = how->under_way;
    ckd_error err = {0};
    file_set_fault_hook(slowly, NULL);
    ckd_session *s = session_of(dir, &o, t);
    for (uint64_t step = 1;; step++) {
        ckd_session_state now;
        ckd_session_fence(s);
        trainer_set(t, step);
        if (ckd_session_step(s, step, &err) != CKD_OK) {
            _exit(1);
        }
        ckd_session_poll(&now, s);
        progress p = {step, now.staged_step};
        if (write(to, &p, sizeof(p)) != (ssize_t)sizeof(p)) {
            _exit(2);
        }
    }
}

/* Kills the child once it has reported so many steps. Returns its last report. */
static progress kill_after(const char *dir, const way_to_save *how, int messages) {
    int ends[2];
    progress last = {0, CKD_LATEST};
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        train(dir, how, ends[1]);
    }
    close(ends[1]);
    for (int i = 0; i < messages; i++) {
        assert_int_equal(read(ends[0], &last, sizeof(last)), sizeof(last));
    }
    assert_int_equal(kill(child, SIGKILL), 0);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    while (read(ends[0], &last, sizeof(last)) == (ssize_t)sizeof(last)) { /* reports sent before it died */
    }
    close(ends[0]);
    return last;
}

/* A lock ends with its process, so nothing has to wait. */
static void expect_free_locks(const char *dir) {
    file_lock *lock;
    ckd_error err = {0};
    pathname p = path_in(store_path_of(dir, ""), FILE_PUBLISH_LOCK);
    if (lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, true, 0, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    lock_release(lock);
}

/* By how many intervals the last state handed over is ahead of the durable one. */
static uint64_t intervals_lost(const char *dir, const progress *p, const way_to_save *how) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_checkpoint newest = {.step = 0};
    ckd_status status = ckd_store_find(&newest, store, TRAINER_RUN, CKD_LATEST, NULL);
    assert_true(status == CKD_OK || status == CKD_E_NOT_FOUND);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    store_check_clean(dir);
    uint64_t staged = p->staged == CKD_LATEST ? 0 : p->staged, at_once = how->under_way ? how->under_way : 1;
    if (newest.step > 0 && how->fidelity <= CKD_EXACT) {
        stored_check(dir, TRAINER_RUN, newest.step, ROWS);
    }
    assert_int_equal(newest.step % EVERY, 0);
    assert_true(newest.step + at_once * EVERY >= staged);
    assert_true(p->step < staged + EVERY); /* training did not go on any further */
    return newest.step < staged ? (staged - newest.step) / EVERY : 0;
}

/* Kills trainers at all steps of some intervals. Returns the greatest loss. */
static uint64_t kill_everywhere(const char *dir, const way_to_save *how) {
    uint64_t most = 0;
    for (int messages = 1; messages <= MESSAGES; messages += messages < 12 ? 1 : 5) {
        static unsigned folders;
        char here[512];
        snprintf(here, sizeof(here), "%s/%u", dir, folders++);
        assert_int_equal(mkdir(here, 0777), 0);
        progress p = kill_after(here, how, messages);
        expect_free_locks(here);
        uint64_t lost = intervals_lost(here, &p, how);
        most = lost > most ? lost : most;
    }
    return most;
}

static void test_at_most_one_state_is_lost(void **state) {
    way_to_save copy = {.snapshot = CKD_SNAPSHOT_COPY}, lazy = {.snapshot = CKD_SNAPSHOT_LAZY};
    assert_int_equal(kill_everywhere(*state, &copy), 1); /* the disk is slow enough to lose one */
    assert_int_equal(kill_everywhere(*state, &lazy), 1);
}

static void test_more_memory_loses_no_more(void **state) {
    way_to_save exact = {.snapshot_bytes = UINT64_C(1) << 30},
                lossy = {.snapshot_bytes = UINT64_C(1) << 30, .fidelity = CKD_NEAR};
    assert_int_equal(kill_everywhere(*state, &exact), 1);
    assert_int_equal(kill_everywhere(*state, &lossy), 1);
}

static void test_two_saves_under_way_may_lose_two(void **state) {
    way_to_save two = {.snapshot_bytes = UINT64_C(1) << 30, .under_way = 2};
    assert_int_equal(kill_everywhere(*state, &two), 2);
    way_to_save no_memory = {.under_way = 2}; /* memory for one snapshot only */
    assert_true(kill_everywhere(*state, &no_memory) <= 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_at_most_one_state_is_lost),
        tempdir_test(test_more_memory_loses_no_more),
        tempdir_test(test_two_saves_under_way_may_lose_two),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("killed sessions", tests, NULL, NULL);
    scratch_end();
    return failed;
}
