/*
 * A process is killed at any file operation: write, sync, rename, link, unlink, mkdir, directory sync and lock,
 * including SQLite's. What it had reported as committed is there and right, nothing incomplete is listed, and reading
 * changes nothing. The next writer removes what was left over and continues.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/level.h"
#include "tests/support/marks.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

/* ---- the child ---- */

/* Kills the process before an operation, or in the middle of a write. */
typedef struct killer {
    unsigned long at; /* number of the operation, from 1; 0: the first that matches */
    bool torn;
    file_op step;
    const char *where; /* part of the path */
    unsigned long seen;
    bool dying;
    bool full; /* nothing new can be created until a chunk file or the deletion mark is gone */
} killer;

static bool is_full(killer *k, file_op step, const char *path) {
    bool frees = strstr(path, "/data/c/") || strstr(path, "/data/deletions");
    k->full = k->full && !(step == FILE_OP_REMOVE && frees && file_exists(path));
    return k->full && step == FILE_OP_CREATE && strstr(path, "/.tmp-");
}

static int kill_hook(void *context, file_op step, const char *path) {
    killer *k = context;
    if (step == FILE_OP_READ || step == FILE_OP_OPEN) {
        return 0; /* reading changes nothing, so being killed here equals being killed at the next change */
    }
    bool now = k->at ? ++k->seen == k->at : step == k->step && strstr(path, k->where);
    if (k->dying || (now && !(k->torn && step == FILE_OP_WRITE))) {
        raise(SIGKILL);
    }
    if (is_full(k, step, path)) {
        return ENOSPC;
    }
    k->dying = now;
    return now ? -4 : 0; /* writes three bytes */
}

/* What a child does. It reports each commit through `report`. Returns 0 if everything worked. */
typedef int (*child_fn)(const char *dir, int report);

static int report_commit(int report, uint64_t step) {
    uint8_t byte = (uint8_t)step;
    return write(report, &byte, 1) == 1 ? 0 : 3;
}

static int save_step(ckd_store *store, uint64_t step, bool ranks, int report) {
    scene s = scene_of(step);
    ckd_status status = ranks ? scene_save_ranks(NULL, store, &s, NULL) : scene_save(NULL, store, &s, NULL);
    return status == CKD_OK ? report_commit(report, step) : 2;
}

static int save_steps(const char *dir, uint64_t first, uint64_t count, bool ranks, int report) {
    ckd_store *store;
    int code = scene_open(&store, dir, CKD_OPEN_CREATE, NULL) == CKD_OK ? 0 : 1;
    for (uint64_t i = 0; i < count && code == 0; i++) {
        code = save_step(store, first + i, ranks, report);
    }
    ckd_store_close(store);
    return code;
}

static int child_creates(const char *dir, int report) {
    return save_steps(dir, 0, 1, false, report);
}
static int child_saves_delta(const char *dir, int report) {
    return save_steps(dir, 2, 1, false, report);
}
static int child_saves_ranks(const char *dir, int report) {
    return save_steps(dir, 2, 1, true, report);
}
static int child_opens(const char *dir, int report) {
    return save_steps(dir, 0, 0, false, report);
}
static int child_rebuilds(const char *dir, int report) {
    (void)report;
    return ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL) == CKD_OK ? 0 : 1;
}
static int child_aborts(const char *dir, int report) {
    (void)report;
    ckd_store *store;
    ckd_save *save = NULL;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 2;
    if (scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    int code =
        ckd_save_begin(&save, store, &o, NULL) == CKD_OK && ckd_save_blob(save, "b", "x", 1, NULL) == CKD_OK
            ? 0
            : 2;
    ckd_save_abort(save);
    ckd_store_close(store);
    return code;
}

static int child_deletes(const char *dir, int report) {
    ckd_store *store;
    ckd_checkpoint c[2];
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    (void)report;
    if (scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    int code = ckd_store_find(&c[0], store, SCENE_RUN, 1, NULL) == CKD_OK &&
                       ckd_store_find(&c[1], store, SCENE_RUN, 2, NULL) == CKD_OK
                   ? 0
                   : 2;
    ckd_id ids[] = {c[0].id, c[1].id};
    if (code == 0 && (ckd_store_delete(store, ids, 2, &o, NULL) != CKD_OK ||
                      ckd_store_collect(NULL, store, NULL, NULL) != CKD_OK)) {
        code = 3;
    }
    ckd_store_close(store);
    return code;
}
static int child_empties(const char *dir, int report) {
    ckd_store *store;
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = 1;
    (void)report;
    int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK &&
                       ckd_store_collect(NULL, store, &o, NULL) == CKD_OK
                   ? 0
                   : 1;
    ckd_store_close(store);
    return code;
}
static int child_undeletes(const char *dir, int report) {
    ckd_store *store;
    ckd_trash *trash = NULL;
    int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK &&
                       ckd_store_trash(&trash, store, NULL) == CKD_OK && trash->count == 2
                   ? 0
                   : 1;
    if (code == 0) {
        ckd_id ids[] = {trash->items[0].checkpoint.id, trash->items[1].checkpoint.id};
        code = ckd_store_undelete(store, ids, 2, NULL) == CKD_OK && report_commit(report, 1) == 0 &&
                       report_commit(report, 2) == 0
                   ? 0
                   : 2;
    }
    ckd_trash_free(trash);
    ckd_store_close(store);
    return code;
}

static int child_prunes(const char *dir, int report) {
    ckd_store *store;
    scene s = scene_of(4);
    s.base = true;
    int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK ? 0 : 1;
    if (code == 0) {
        code = scene_save(NULL, store, &s, NULL) == CKD_OK ? report_commit(report, 4) : 2;
    }
    ckd_store_close(store);
    return code;
}

/*
 * Compacts to a depth of 1. With `folds` only the newest two steps are kept, and take over what they need of the
 * others.
 */
static int compact(const char *dir, bool folds) {
    ckd_store *store;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    policy.keep_last = 2;
    now.undo_s = 0;
    o.max_depth = folds ? 0 : 1;
    o.policy = folds ? &policy : NULL;
    o.deletion = &now;
    int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK ? 0 : 1;
    if (code == 0) {
        code = ckd_compact(NULL, store, &o, NULL) == CKD_OK &&
                       ckd_store_collect(NULL, store, NULL, NULL) == CKD_OK
                   ? 0
                   : 2;
    }
    ckd_store_close(store);
    return code;
}
static int child_compacts(const char *dir, int report) {
    (void)report;
    return compact(dir, false);
}
static int child_folds(const char *dir, int report) {
    (void)report;
    return compact(dir, true);
}

enum { MARKED = 32 }; /* from this number on, reports are changes of pins and tags instead of steps */

static int child_marks(const char *dir, int report) {
    ckd_store *store;
    int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK ? 0 : 1;
    for (unsigned i = 0; i < MARK_CHANGES && code == 0; i++) {
        code = mark_change(store, i, NULL) == CKD_OK ? report_commit(report, MARKED + i) : 2;
    }
    ckd_store_close(store);
    return code;
}

/* Returns the bit mask of the reported steps. *finished: the child was not killed. */
static uint64_t run_child(bool *finished, child_fn act, const char *dir, killer *k) {
    int ends[2], state;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(ends[0]);
        file_set_fault_hook(kill_hook, k);
        _exit(act(dir, ends[1]));
    }
    close(ends[1]);
    uint64_t committed = 0;
    uint8_t byte;
    while (read(ends[0], &byte, 1) == 1) {
        committed |= UINT64_C(1) << byte;
    }
    close(ends[0]);
    assert_int_equal(waitpid(pid, &state, 0), pid);
    *finished = WIFEXITED(state) && WEXITSTATUS(state) == 0;
    if (!*finished && !(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL)) {
        fail_msg("the child ended with %d, signal %d", WEXITSTATUS(state), WTERMSIG(state));
    }
    return committed;
}

/* ---- sweeps ---- */

typedef struct sweep {
    const char *template; /* directory with a store; NULL: an empty directory */
    child_fn act;
    uint64_t before;    /* bit mask of the steps in the template */
    uint64_t attempted; /* the step that the child or its predecessor saves */
    uint64_t moved;     /* bit mask of the steps that the child deletes or undeletes */
    bool full;          /* the disk is */
} sweep;

static void empty_and_verify(const char *dir) {
    ckd_store *store;
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = 1;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, &o, NULL), CKD_OK);
    scene_check(store, 0, 1);
    ckd_store_close(store);
    store_check_clean(dir);
}

static bool kill_once(const sweep *w, unsigned long at, bool torn, bool all) {
    char *dir = tempdir_create(), store[1024];
    killer k = {.at = at, .torn = torn, .full = w->full};
    bool finished;
    snprintf(store, sizeof(store), "%s/store", dir);
    if (w->template) {
        tree_copy(store_path_of(w->template, ""), store);
    }
    uint64_t reported = run_child(&finished, w->act, dir, &k);
    uint64_t committed = w->before | (reported & ((UINT64_C(1) << MARKED) - 1));
    if (w->act == child_marks) {
        marks_check(dir, (unsigned)__builtin_popcountll(reported >> MARKED));
    }
    uint64_t possible = UINT64_C(1) << w->attempted | w->moved;
    if (w->full && w->act == child_empties && !file_exists(store_path_of(w->template, "data/deletions"))) {
        survivors_glance(dir, committed, possible);
        empty_and_verify(dir);
    } else if (all) {
        survivors_check(dir, committed, possible, w->attempted);
    } else {
        survivors_glance(dir, committed, possible);
    }
    tempdir_remove(dir);
    return finished;
}

/* Kills a child at each operation, or at a sample of them. Returns the number of operations. */
static unsigned long kill_everywhere(const char *what, const sweep *w) {
    unsigned long stride = under_sanitizer() ? 7 : test_stride(5, 2, 1), at = test_first(what, stride),
                  kills = 0;
    for (; !kill_once(w, at, kills % 2, stride <= 2 || kills % 3 == 0); at += stride) {
        kills++;
    }
    print_message("%s: killed at %lu steps\n", what, kills);
    return at - 1;
}

static void test_killed_while_creating_a_store_and_saving_a_base(void **state) {
    (void)state;
    sweep w = {.act = child_creates};
    assert_true(kill_everywhere("new store", &w) >= 15);
}

static void test_killed_while_saving_a_delta(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {.template = *state, .act = child_saves_delta, .before = 3, .attempted = 2};
    assert_true(kill_everywhere("delta", &w) >= 10);
}

static void test_killed_while_two_ranks_save(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {.template = *state, .act = child_saves_ranks, .before = 3, .attempted = 2};
    assert_true(kill_everywhere("two ranks", &w) >= 10);
}

static void test_killed_while_aborting(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {.template = *state, .act = child_aborts, .before = 3, .attempted = 2};
    assert_true(kill_everywhere("abort", &w) >= 5);
}

static void test_killed_while_deleting_and_collecting(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {.template = *state, .act = child_deletes, .before = 1, .attempted = 3, .moved = 6};
    assert_true(kill_everywhere("delete", &w) >= 10);
}

/* The trash is emptied before its time. An entry that is half removed must not look as if it could be undeleted. */
static void test_killed_while_emptying_the_trash(void **state) {
    scene_make(*state, 0, 3);
    scene_trash(*state, 1, 2);
    sweep w = {.template = *state, .act = child_empties, .before = 1, .attempted = 3};
    assert_true(kill_everywhere("empty", &w) >= 10);
}

static void test_killed_while_deleting_on_a_full_disk(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {
        .template = *state, .act = child_deletes, .before = 1, .attempted = 3, .moved = 6, .full = true};
    assert_true(kill_everywhere("delete, full disk", &w) >= 10);
}

/*
 * The deletion mark goes first. Without one, an entry of the trash may lack a file afterwards, but nothing else is
 * lost, and the trash can be emptied.
 */
static void test_killed_while_emptying_the_trash_of_a_full_disk(void **state) {
    scene_make(*state, 0, 3);
    scene_trash(*state, 1, 2);
    sweep w = {.template = *state, .act = child_empties, .before = 1, .attempted = 3, .full = true};
    assert_true(kill_everywhere("empty, full disk", &w) >= 10);
    assert_int_equal(unlink(store_path_of(*state, "data/deletions")), 0);
    assert_true(kill_everywhere("empty, full disk without a mark", &w) >= 10);
}

static void test_killed_while_undeleting(void **state) {
    scene_make(*state, 0, 3);
    scene_trash(*state, 1, 2);
    sweep w = {.template = *state, .act = child_undeletes, .before = 1, .attempted = 3, .moved = 6};
    assert_true(kill_everywhere("undelete", &w) >= 6);
}

static void test_killed_while_pinning_and_tagging(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {.template = *state, .act = child_marks, .before = 7, .attempted = 3};
    assert_true(kill_everywhere("pins and tags", &w) >= 30);
}

/* By an automatic policy, after a save. */
static void test_killed_while_pruning(void **state) {
    scene_make_pruning(*state, 4, 0);
    sweep w = {.template = *state, .act = child_prunes, .before = 8, .attempted = 4, .moved = 7};
    assert_true(kill_everywhere("prune", &w) >= 45);
}

static void test_killed_while_compacting(void **state) {
    scene_make(*state, 0, 5);
    sweep w = {.template = *state, .act = child_compacts, .before = 31, .attempted = 5};
    assert_true(kill_everywhere("compact", &w) >= 60);
}

static void test_killed_while_folding(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {.template = *state, .act = child_folds, .before = 12, .attempted = 4, .moved = 3};
    assert_true(kill_everywhere("fold", &w) >= 60);
}

/* Makes DIR/store as it is left by a writer of step 2 that is killed at some operation. */
static uint64_t make_killed(const char *dir, file_op step, const char *where) {
    killer k = {.step = step, .where = where};
    bool finished;
    scene_make(dir, 0, 2);
    uint64_t committed = run_child(&finished, child_saves_delta, dir, &k);
    assert_false(finished);
    return 3 | committed;
}

static const struct {
    const char *what;
    file_op step;
    const char *where;
    bool published; /* the manifest is */
} deaths[] = {
    {"chunk file not named", FILE_OP_SYNC, ".ckd.tmp", false},
    {"no manifest", FILE_OP_CREATE, "data/m/.tmp-", false},
    {"manifest not named", FILE_OP_RENAME_NOREPLACE, "data/m/run", false},
    {"manifest not synced", FILE_OP_DIR_SYNC, "data/m", true},
    {"catalog half written", FILE_OP_SYNC, "catalog.db", true},
    {"intent not removed", FILE_OP_REMOVE, "data/i", true},
};
enum { DEATHS = sizeof(deaths) / sizeof(deaths[0]) };

static void kill_after_deaths(const char *what, child_fn act) {
    for (size_t i = 0; i < DEATHS; i++) {
        char *dir = tempdir_create(), label[96];
        uint64_t before = make_killed(dir, deaths[i].step, deaths[i].where);
        sweep w = {
            .template = dir, .act = act, .before = before | (deaths[i].published ? 4 : 0), .attempted = 2};
        snprintf(label, sizeof(label), "%s, %s", what, deaths[i].what);
        assert_true(kill_everywhere(label, &w) >= 2);
        tempdir_remove(dir);
    }
}

static void test_killed_in_recovery(void **state) {
    (void)state;
    kill_after_deaths("recovery", child_opens);
}

static void test_killed_in_rebuild(void **state) {
    (void)state;
    kill_after_deaths("rebuild", child_rebuilds);
}

static void test_killed_while_repairing_the_catalog(void **state) {
    static const char noise[4096] = "this is not a database";
    scene_make(*state, 0, 3);
    write_whole_file(store_path_of(*state, "catalog.db"), noise, sizeof(noise));
    sweep w = {.template = *state, .act = child_opens, .before = 7, .attempted = 3};
    assert_true(kill_everywhere("mending", &w) >= 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_killed_while_creating_a_store_and_saving_a_base),
        tempdir_test(test_killed_while_saving_a_delta),
        tempdir_test(test_killed_while_two_ranks_save),
        tempdir_test(test_killed_while_aborting),
        tempdir_test(test_killed_while_deleting_and_collecting),
        tempdir_test(test_killed_while_emptying_the_trash),
        tempdir_test(test_killed_while_deleting_on_a_full_disk),
        tempdir_test(test_killed_while_emptying_the_trash_of_a_full_disk),
        tempdir_test(test_killed_while_undeleting),
        tempdir_test(test_killed_while_pinning_and_tagging),
        tempdir_test(test_killed_while_pruning),
        tempdir_test(test_killed_while_compacting),
        tempdir_test(test_killed_while_folding),
        tempdir_test(test_killed_in_recovery),
        tempdir_test(test_killed_in_rebuild),
        tempdir_test(test_killed_while_repairing_the_catalog),
    };
    scratch_begin();
    int failed = run_sampled("crash", tests, 2, NULL, NULL);
    scratch_end();
    return failed;
}
