/*
 * Renaming a run: what moves with it, what keeps the old name, and what is refused. A rename that is interrupted at
 * any point lists every checkpoint once, and the next writer completes it.
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
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
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

static ckd_status rename_run(ckd_store *store, const char *from, const char *to, ckd_error *err) {
    uint64_t count = 77;
    ckd_status status = ckd_store_rename_run(&count, store, from, to, NULL, err);
    assert_int_equal(count == 0, status != CKD_OK);
    return status;
}

static ckd_id id_of(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    ckd_error err = {0};
    must(ckd_store_find(&c, store, run, step, &err), &err);
    return c.id;
}

static size_t listed(ckd_store *store, const char *run) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, run, NULL), CKD_OK);
    size_t count = list->count;
    ckd_checkpoint_list_free(list);
    return count;
}

static void check_values(ckd_store *store, const ckd_id *id, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    must(scene_load_id(store, id, &s, &err), &err);
}

/* Counts the files of a folder whose names begin with the prefix. */
static size_t files_like(const char *dir, const char *folder, const char *prefix) {
    dir_list list;
    size_t count = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        count += strncmp(list.names[i], prefix, strlen(prefix)) == 0;
    }
    dir_list_free(&list);
    return count;
}

static void set_policy(ckd_store *store, const char *run, uint32_t keep_last) {
    ckd_policy p = CKD_POLICY_INIT;
    ckd_error err = {0};
    p.run = run;
    p.keep_last = keep_last;
    must(ckd_store_set_policy(store, &p, &err), &err);
}

static uint32_t policy_of(ckd_store *store, const char *run) {
    ckd_stored_policy p;
    return ckd_store_policy(&p, store, run, NULL) == CKD_OK ? p.policy.keep_last : 0;
}

static void set_parity(ckd_store *store, const char *run) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_error err = {0};
    o.run = run;
    o.data = 2;
    o.parity = 1;
    ckd_parity_result *made;
    must(ckd_store_parity(&made, store, &o, &err), &err);
    ckd_parity_result_free(made);
}

/* ---- what moves with a run ---- */

static void check_same_as_rebuilt(const char *dir) {
    ckd_store *store = open_store(dir, CKD_OPEN_READ);
    ckd_checkpoint_list *before, *after;
    assert_int_equal(ckd_store_list(&before, store, NULL, NULL), CKD_OK);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL), CKD_OK);
    store = open_store(dir, CKD_OPEN_READ);
    assert_int_equal(ckd_store_list(&after, store, NULL, NULL), CKD_OK);
    lists_check_equal(before, after);
    ckd_checkpoint_list_free(before);
    ckd_checkpoint_list_free(after);
    ckd_store_close(store);
}

/*
 * Checkpoints keep their ids. The run's policy, parity setting and tags follow. A handle that was open before the
 * rename finds the new name.
 */
static void test_checkpoints_settings_and_tags_move(void **state) {
    ckd_store *store, *seen;
    ckd_id ids[STEPS];
    ckd_checkpoint c;
    ckd_error err = {0};
    scene_make(*state, 0, STEPS);
    store = open_store(*state, CKD_OPEN_WRITE);
    seen = open_store(*state, CKD_OPEN_READ);
    for (uint64_t i = 0; i < STEPS; i++) {
        ids[i] = id_of(store, SCENE_RUN, i);
    }
    set_policy(store, SCENE_RUN, 5);
    set_policy(store, NULL, 9);
    set_parity(store, SCENE_RUN);
    must(ckd_store_set_tag(store, "best", &ids[1], 0, &err), &err);
    must(rename_run(store, SCENE_RUN, "other.1", &err), &err);
    for (uint64_t i = 0; i < STEPS; i++) {
        ckd_id id = id_of(store, "other.1", i);
        assert_memory_equal(&id, &ids[i], sizeof(id));
        id = id_of(seen, "other.1", i); /* this handle was opened before the rename */
        assert_memory_equal(&id, &ids[i], sizeof(id));
        check_values(seen, &id, i);
    }
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, CKD_LATEST, &err), CKD_E_NOT_FOUND);
    must(ckd_store_find_tag(&c, store, "best", &err), &err);
    assert_string_equal(c.run, "other.1");
    assert_int_equal(policy_of(store, "other.1"), 5);
    assert_int_equal(policy_of(store, SCENE_RUN), 9); /* the policy of the store */
    assert_int_equal(files_like(*state, "data/n", "parity.other.1."), 1);
    assert_int_equal(files_like(*state, "data/n", "parity." SCENE_RUN "."), 0);
    assert_int_equal(files_like(*state, "data/n", "rename."), 0);
    assert_int_equal(files_like(*state, "data/m", SCENE_RUN "."), 0);
    ckd_store_close(seen);
    ckd_store_close(store);
    store_check_clean(*state);
    check_same_as_rebuilt(*state);
}

/* The renamed run continues with deltas on its checkpoints. The old name is free for a new run. */
static void test_saves_after_a_rename(void **state) {
    ckd_checkpoint c;
    ckd_error err = {0};
    scene s = scene_of(STEPS);
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    ckd_id last = id_of(store, SCENE_RUN, STEPS - 1);
    must(rename_run(store, SCENE_RUN, "b", &err), &err);
    s.run = "b";
    must(scene_save(&c, store, &s, &err), &err);
    assert_int_equal(c.kind, CKD_DELTA);
    assert_memory_equal(&c.parent, &last, sizeof(last));
    s.run = SCENE_RUN; /* a new run starts under the old name */
    must(scene_save(&c, store, &s, &err), &err);
    assert_int_equal(c.kind, CKD_BASE);
    assert_int_equal(rename_run(store, "b", SCENE_RUN, &err), CKD_E_EXISTS);
    must(rename_run(store, SCENE_RUN, "c", &err), &err);
    must(rename_run(store, "b", SCENE_RUN, &err), &err); /* back to the first name */
    assert_int_equal(listed(store, SCENE_RUN), STEPS + 1);
    assert_int_equal(listed(store, "c"), 1);
    for (uint64_t i = 0; i < STEPS; i++) {
        ckd_id id = id_of(store, SCENE_RUN, i);
        check_values(store, &id, i);
    }
    ckd_store_close(store);
    store_check_clean(*state);
    check_same_as_rebuilt(*state);
}

/* Deleted checkpoints stay in the trash under the old name, and can be undeleted under it. */
static void test_the_trash_keeps_the_old_name(void **state) {
    ckd_trash *trash;
    ckd_error err = {0};
    scene_make(*state, 0, STEPS);
    scene_trash(*state, 1, 1);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(rename_run(store, SCENE_RUN, "b", &err), &err);
    assert_int_equal(listed(store, NULL), 2);
    assert_int_equal(ckd_store_trash(&trash, store, &err), CKD_OK);
    assert_int_equal(trash->count, 1);
    assert_string_equal(trash->items[0].checkpoint.run, SCENE_RUN);
    ckd_id id = trash->items[0].checkpoint.id;
    ckd_trash_free(trash);
    must(ckd_store_undelete(store, &id, 1, &err), &err);
    check_values(store, &id, 1);
    must(rename_run(store, SCENE_RUN, "c", &err), &err);
    /* A deleted step of run b does not prevent the rename, and does not hide the step that replaces it. */
    id = id_of(store, "b", 2);
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_id both[] = {id_of(store, "b", 0), id};
    must(ckd_store_delete(store, both, 2, &o, &err), &err);
    scene s = scene_of(2);
    must(scene_save(NULL, store, &s, &err), &err);
    must(rename_run(store, SCENE_RUN, "b", &err), &err);
    id = id_of(store, "b", 2);
    check_values(store, &id, 2);
    assert_int_equal(listed(store, NULL), 2);
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

/* ---- what is refused ---- */

static void expect(ckd_store *store, const char *from, const char *to, ckd_status expected,
                   const char *text) {
    ckd_error err = {0};
    if (rename_run(store, from, to, &err) != expected) {
        fail_msg("%s to %s: %s", from, to, err.message);
    }
    if (!strstr(err.message, text)) {
        fail_msg("'%s' does not say '%s'", err.message, text);
    }
}

static void test_refusals(void **state) {
    char longest[CKD_RUN_MAX + 2];
    ckd_error err = {0};
    scene s = scene_of(0);
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    s.run = "b";
    must(scene_save(NULL, store, &s, &err), &err);
    set_policy(store, SCENE_RUN, 5);
    set_policy(store, "c", 5);
    ckd_store_close(store);
    char *before = tree_describe(store_path_of(*state, "data/m"));
    store = open_store(*state, CKD_OPEN_WRITE);
    expect(store, SCENE_RUN, "b", CKD_E_EXISTS, "has a run 'b' already");
    expect(store, "nobody", "d", CKD_E_NOT_FOUND, "no run 'nobody'");
    expect(store, SCENE_RUN, SCENE_RUN, CKD_E_INVALID, "already");
    expect(store, SCENE_RUN, "", CKD_E_INVALID, "not a valid run name");
    expect(store, SCENE_RUN, "-", CKD_E_INVALID, "not a valid run name");
    expect(store, SCENE_RUN, longest, CKD_E_INVALID, "not a valid run name");
    expect(store, SCENE_RUN, "c", CKD_E_EXISTS, "both have a policy");
    ckd_rename_options dry = CKD_RENAME_OPTIONS_INIT;
    uint64_t count = 0;
    dry.dry_run = 1;
    must(ckd_store_rename_run(&count, store, SCENE_RUN, "d", &dry, &err), &err);
    assert_int_equal(count, STEPS);
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = STEPS;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    expect(store, SCENE_RUN, "d", CKD_E_BUSY, "is using run");
    ckd_save_abort(save);
    o.parent_run = SCENE_RUN; /* a save of another run builds on it */
    o.parent_step = 0;
    o.run = "e";
    must(ckd_save_begin(&save, store, &o, &err), &err);
    expect(store, SCENE_RUN, "d", CKD_E_BUSY, "is using run");
    ckd_save_abort(save);
    o.run = "d"; /* a run that only has a save in progress, without a manifest */
    o.parent_run = NULL;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    expect(store, SCENE_RUN, "d", CKD_E_BUSY, "to run 'd' has begun");
    ckd_save_abort(save);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_READ);
    expect(store, SCENE_RUN, "d", CKD_E_READ_ONLY, "");
    ckd_store_close(store);
    char *after = tree_describe(store_path_of(*state, "data/m"));
    assert_string_equal(before, after);
    free(before);
    free(after);
}

/* ---- interruptions ---- */

typedef struct interruption {
    unsigned long at, seen;
    bool dies;          /* kill the process at the step; otherwise that step and all later ones fail */
    const char *within; /* only steps whose path contains this count; NULL: all */
} interruption;

static int interrupt_hook(void *context, file_op step, const char *path) {
    interruption *i = context;
    bool counts = step != FILE_OP_READ && step != FILE_OP_OPEN && (!i->within || strstr(path, i->within));
    if (!counts || ++i->seen < i->at) {
        return 0;
    }
    if (i->dies) {
        raise(SIGKILL);
    }
    return 28; /* ENOSPC */
}

/* Renames the run of DIR/store in a child process and interrupts it at a step. Returns whether the rename finished. */
static bool rename_until(const char *dir, interruption *i) {
    int state;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        int code = scene_open(&store, dir, CKD_OPEN_WRITE, NULL) == CKD_OK ? 0 : 1;
        file_set_fault_hook(interrupt_hook, i);
        if (code == 0) {
            code = ckd_store_rename_run(NULL, store, SCENE_RUN, "b", NULL, NULL) == CKD_OK ? 0 : 2;
        }
        file_set_fault_hook(NULL, NULL);
        ckd_store_close(store);
        _exit(code);
    }
    assert_int_equal(waitpid(pid, &state, 0), pid);
    if (!WIFEXITED(state) && !(i->dies && WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL)) {
        fail_msg("the child ended with status %d", state);
    }
    return WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

/* Every checkpoint is listed once, under one of the two names, and loads. */
static void check_each_once(ckd_store *store, const ckd_id ids[STEPS]) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, STEPS);
    for (size_t i = 0; i < STEPS; i++) {
        const ckd_checkpoint *c = &list->items[i];
        assert_true(strcmp(c->run, SCENE_RUN) == 0 || strcmp(c->run, "b") == 0);
        assert_memory_equal(&c->id, &ids[c->step], sizeof(ckd_id));
        check_values(store, &c->id, c->step);
    }
    ckd_checkpoint_list_free(list);
}

static void check_completed(const char *dir, const ckd_id ids[STEPS], bool finished) {
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    check_each_once(store, ids);
    size_t moved = listed(store, "b");
    assert_true(moved == STEPS || (moved == 0 && !finished));
    assert_int_equal(policy_of(store, moved ? "b" : SCENE_RUN), 5);
    assert_int_equal(policy_of(store, moved ? SCENE_RUN : "b"), 0);
    assert_int_equal(files_like(dir, "data/n", "rename."), 0);
    assert_int_equal(files_like(dir, "data/m", ""), STEPS);
    ckd_store_close(store);
    store_check_clean(dir);
    check_same_as_rebuilt(dir);
}

/*
 * Interrupts a rename at one step, and checks the store before and after the next writer. Returns whether the rename
 * finished.
 */
static bool interrupt_once(const char *template, const ckd_id ids[STEPS], unsigned long at, bool dies) {
    char *dir = tempdir_create(), store[1024];
    interruption i = {.at = at, .dies = dies};
    snprintf(store, sizeof(store), "%s/store", dir);
    tree_copy(store_path_of(template, ""), store);
    bool finished = rename_until(dir, &i);
    if (at % 2) { /* at every other step the catalog is lost as well */
        unlink(store_path_of(dir, "catalog.db"));
    }
    ckd_store *seen = open_store(dir, CKD_OPEN_READ);
    check_each_once(seen, ids);
    ckd_store_close(seen);
    check_completed(dir, ids, finished);
    tempdir_remove(dir);
    return finished;
}

static void interrupt_everywhere(const char *dir, bool dies) {
    ckd_id ids[STEPS];
    scene_make(dir, 0, STEPS);
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    for (uint64_t i = 0; i < STEPS; i++) {
        ids[i] = id_of(store, SCENE_RUN, i);
    }
    set_policy(store, SCENE_RUN, 5);
    ckd_store_close(store);
    unsigned long stride = under_sanitizer() ? 7 : test_stride(3, 1, 1), at = test_first("rename", stride);
    unsigned long count = 0;
    for (; !interrupt_once(dir, ids, at, dies); at += stride) {
        count++;
    }
    print_message("interrupted at %lu steps\n", count);
    assert_true(count * stride >= 20);
}

static void test_killed_anywhere(void **state) {
    interrupt_everywhere(*state, true);
}

static void test_failing_anywhere(void **state) {
    interrupt_everywhere(*state, false);
}

/*
 * Fails when the first manifest with the old name is removed. By then every checkpoint has manifests with both names.
 */
static int keep_old_names(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_REMOVE && strstr(path, "data/m/" SCENE_RUN ".") ? 5 : 0; /* EIO */
}

/* A checkpoint that has manifests with both names is deleted. It is not listed under either of them again. */
static void test_deletion_before_a_rename_is_completed(void **state) {
    ckd_error err = {0};
    ckd_trash *trash;
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    file_set_fault_hook(keep_old_names, NULL);
    assert_int_equal(rename_run(store, SCENE_RUN, "b", &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(strstr(err.message, "completes the rename"));
    assert_int_equal(files_like(*state, "data/m", ""), 2 * STEPS);
    assert_int_equal(listed(store, "b"), STEPS);
    assert_int_equal(listed(store, NULL), STEPS);
    ckd_id id = id_of(store, "b", 0);
    must(ckd_store_delete(store, &id, 1, NULL, &err), &err);
    /* The manifest with the old name does not bring it back. */
    assert_int_equal(listed(store, NULL), STEPS - 1);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(listed(store, "b"), STEPS - 1);
    assert_int_equal(listed(store, NULL), STEPS - 1);
    assert_int_equal(ckd_store_trash(&trash, store, &err), CKD_OK);
    assert_int_equal(trash->count, 1);
    ckd_trash_free(trash);
    assert_int_equal(files_like(*state, "data/n", "rename."), 0);
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

/* ---- renames while somebody reads ---- */

static ckd_store *open_impatient(const char *dir) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    o.lock_timeout_ms = 100;
    must(ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_WRITE, &o, &err), &err);
    return store;
}

static ckd_load *begin_load(ckd_store *store, const char *run, uint64_t step) {
    ckd_load *load;
    ckd_error err = {0};
    ckd_id id = id_of(store, run, step);
    must(ckd_load_begin(&load, store, &id, &err), &err);
    return load;
}

static void test_nothing_is_renamed_while_somebody_reads(void **state) {
    ckd_error err = {0};
    scene_make(*state, 0, STEPS);
    ckd_store *other = open_store(*state, CKD_OPEN_READ), *store = open_impatient(*state);
    ckd_load *load = begin_load(other, SCENE_RUN, 1);
    char *before = tree_describe(store_path_of(*state, "data"));
    expect(store, SCENE_RUN, "b", CKD_E_BUSY, "running loads");
    char *after = tree_describe(store_path_of(*state, "data"));
    assert_string_equal(before, after);
    free(before);
    free(after);
    ckd_load_end(load);
    must(rename_run(store, SCENE_RUN, "b", &err), &err);
    ckd_store_close(store);
    ckd_store_close(other);
    store_check_clean(*state);
}

#define AT_A_MANIFEST ((interruption){.at = 2, .dies = true, .within = "data/m/b."})

/*
 * While somebody reads, a rename is not completed, and some checkpoints have two names. A deletion covers both of
 * them.
 */
static void test_a_rename_is_completed_when_nobody_reads(void **state) {
    ckd_error err = {0};
    interruption dies = AT_A_MANIFEST;
    scene_make(*state, 0, STEPS);
    assert_false(rename_until(*state, &dies));
    ckd_store *other = open_store(*state, CKD_OPEN_READ);
    size_t moved = listed(other, "b");
    assert_true(moved > 0 && moved < STEPS);
    assert_int_equal(listed(other, NULL), STEPS);
    ckd_load *load = begin_load(other, moved ? "b" : SCENE_RUN, CKD_LATEST);
    ckd_store *store = open_impatient(*state);
    assert_int_equal(files_like(*state, "data/n", "rename." SCENE_RUN "."), 1);
    assert_int_equal(listed(store, "b"), moved);
    expect(store, SCENE_RUN, "c", CKD_E_STATE, "is being renamed to 'b'");
    ckd_checkpoint c;
    must(ckd_store_find(&c, store, "b", CKD_LATEST, &err), &err);
    scene s = scene_of(c.step);
    assert_int_equal(scene_save(NULL, store, &s, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "was renamed to 'b'"));
    for (int i = 0; i < 2; i++) { /* the second time after it was undeleted */
        must(ckd_store_delete(store, &c.id, 1, NULL, &err), &err);
        assert_int_equal(listed(store, NULL), STEPS - 1);
        must(ckd_store_undelete(store, &c.id, 1, &err), &err);
        assert_int_equal(listed(store, NULL), STEPS);
    }
    ckd_load_end(load);
    ckd_store_close(other);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(listed(store, "b"), STEPS);
    assert_int_equal(listed(store, NULL), STEPS);
    assert_int_equal(files_like(*state, "data/n", ""), 0);
    for (uint64_t i = 0; i < STEPS; i++) {
        ckd_id id = id_of(store, "b", i);
        check_values(store, &id, i);
    }
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

static char messages[2048];

static void keep_message(void *unused, const char *message) {
    size_t used = strlen(messages);
    (void)unused;
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static void check_copies_refused(ckd_store *store, ckd_store *source) {
    ckd_error err = {0};
    ckd_copy_options as_b = CKD_COPY_OPTIONS_INIT;
    as_b.as_run = "b";
    assert_int_equal(ckd_copy(NULL, store, source, NULL, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "is being renamed to 'b'"));
    assert_int_equal(ckd_copy(NULL, store, source, &as_b, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "is being renamed to 'b'"));
}

/*
 * A state is saved under the old name, and renamed with the others. Copies and other renames can be repeated, so they are
 * refused. A handle that has long been open completes the rename with its next save.
 */
static void test_a_save_before_a_rename_is_completed(void **state) {
    ckd_error err = {0};
    ckd_store *store, *source;
    interruption dies = AT_A_MANIFEST;
    scene late = scene_of(STEPS), later = scene_of(STEPS + 1), of_c = scene_of(0);
    char *elsewhere = tempdir_create();
    scene_make(elsewhere, STEPS + 2, 1);
    scene_make(*state, 0, STEPS);
    store = open_store(*state, CKD_OPEN_WRITE);
    of_c.run = "c";
    must(scene_save(NULL, store, &of_c, &err), &err);
    ckd_store_close(store);
    assert_false(rename_until(*state, &dies));
    ckd_store *other = open_store(*state, CKD_OPEN_READ);
    source = open_store(elsewhere, CKD_OPEN_READ);
    ckd_load *load = begin_load(other, "b", CKD_LATEST);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.lock_timeout_ms = 100;
    o.on_message = keep_message;
    messages[0] = '\0';
    must(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_WRITE, &o, &err), &err);
    check_copies_refused(store, source);
    expect(store, "b", "d", CKD_E_BUSY, "is being renamed to 'b'");
    expect(store, "c", SCENE_RUN, CKD_E_BUSY, "is being renamed to 'b'");
    assert_string_equal(messages, "");
    must(scene_save(NULL, store, &late, &err), &err);
    assert_non_null(strstr(messages, "step 3 is saved to run '" SCENE_RUN "' meanwhile"));
    ckd_load_end(load);
    ckd_store_close(other);
    must(scene_save(NULL, store, &later, &err), &err);
    assert_int_equal(files_like(*state, "data/n", "rename."), 0);
    must(ckd_copy(NULL, store, source, NULL, &err), &err);
    ckd_store_close(source);
    assert_int_equal(listed(store, "b"), STEPS + 1);
    ckd_id id = id_of(store, "b", STEPS);
    check_values(store, &id, STEPS);
    assert_int_equal(listed(store, SCENE_RUN), 2);
    ckd_store_close(store);
    store_check_clean(*state);
    tempdir_remove(elsewhere);
}

/* A copy may be the only writer for as long. */
static void test_a_copy_completes_a_rename(void **state) {
    ckd_error err = {0};
    interruption dies = AT_A_MANIFEST;
    char *elsewhere = tempdir_create();
    scene_make(elsewhere, STEPS, 1);
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE), *source = open_store(elsewhere, CKD_OPEN_READ);
    assert_false(rename_until(*state, &dies));
    must(ckd_copy(NULL, store, source, NULL, &err), &err);
    assert_int_equal(listed(store, "b"), STEPS);
    assert_int_equal(listed(store, SCENE_RUN), 1);
    ckd_store_close(source);
    ckd_store_close(store);
    store_check_clean(*state);
    tempdir_remove(elsewhere);
}

/*
 * A policy is applied to a run half of which has the new name. Both halves keep what the run's policy keeps, not only
 * what the store's does.
 */
static void test_policies_between_two_names(void **state) {
    enum { MANY = 6 };
    ckd_error err = {0};
    ckd_prune *pruned;
    interruption dies = {.at = MANY - 1, .dies = true, .within = "data/m/b."};
    scene_make(*state, 0, MANY);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    set_policy(store, NULL, 2);
    set_policy(store, SCENE_RUN, 100);
    set_parity(store, SCENE_RUN);
    ckd_store_close(store);
    assert_false(rename_until(*state, &dies));
    ckd_store *other = open_store(*state, CKD_OPEN_READ);
    size_t moved = listed(other, "b");
    assert_true(moved > 2 && moved < MANY);
    ckd_load *load = begin_load(other, "b", CKD_LATEST);
    store = open_impatient(*state);
    assert_int_equal(listed(store, "b"), moved);
    must(ckd_store_prune(&pruned, store, NULL, NULL, &err), &err);
    assert_int_equal(pruned->deleted, 0);
    ckd_prune_free(pruned);
    assert_int_equal(listed(store, NULL), MANY);
    assert_int_equal(files_like(*state, "data/n", "parity.b."), 1);
    ckd_load_end(load);
    ckd_store_close(other);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(listed(store, "b"), MANY);
    assert_int_equal(policy_of(store, "b"), 100);
    assert_int_equal(policy_of(store, SCENE_RUN), 2);
    assert_int_equal(files_like(*state, "data/n", "parity.b."), 1);
    assert_int_equal(files_like(*state, "data/n", ""), 3);
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

/* The policy is changed meanwhile, under either name. The change counts, and the rename may be asked for again. */
static void test_a_policy_changed_between_two_names(void **state) {
    (void)state;
    static const char *const changed[] = {"b", SCENE_RUN};
    for (size_t i = 0; i < 2; i++) {
        char *dir = tempdir_create();
        interruption dies = AT_A_MANIFEST;
        scene_make(dir, 0, STEPS);
        ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
        set_policy(store, SCENE_RUN, 100);
        ckd_store_close(store);
        assert_false(rename_until(dir, &dies));
        ckd_store *other = open_store(dir, CKD_OPEN_READ);
        ckd_load *load = begin_load(other, "b", CKD_LATEST);
        store = open_impatient(dir);
        set_policy(store, changed[i], 50);
        expect(store, SCENE_RUN, "b", CKD_E_BUSY, "");
        ckd_load_end(load);
        ckd_store_close(other);
        expect(store, SCENE_RUN, "b", CKD_E_NOT_FOUND, "it has: b");
        assert_int_equal(policy_of(store, "b"), 50);
        assert_int_equal(policy_of(store, SCENE_RUN), 0);
        ckd_store_close(store);
        store_check_clean(dir);
        tempdir_remove(dir);
    }
}

/* All checkpoints have the new name; only the setting that records the rename is left. */
static void test_a_rename_repeated_while_somebody_reads(void **state) {
    interruption dies = {.at = 1, .dies = true, .within = "data/n/policy." SCENE_RUN};
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_impatient(*state);
    set_policy(store, SCENE_RUN, 100);
    assert_false(rename_until(*state, &dies));
    ckd_store *other = open_store(*state, CKD_OPEN_READ);
    ckd_load *load = begin_load(other, "b", CKD_LATEST);
    assert_int_equal(listed(store, "b"), STEPS);
    expect(store, SCENE_RUN, "b", CKD_E_BUSY, "will be completed when all loads have ended");
    ckd_load_end(load);
    ckd_store_close(other);
    expect(store, SCENE_RUN, "b", CKD_E_NOT_FOUND, "it has: b");
    assert_int_equal(files_like(*state, "data/n", "rename."), 0);
    assert_int_equal(policy_of(store, "b"), 100);
    ckd_store_close(store);
    store_check_clean(*state);
}

static int fail_at_second(void *context, file_op step, const char *path) {
    unsigned *count = context;
    return step == FILE_OP_RENAME_NOREPLACE && strstr(path, "data/t/") && ++*count == 2 ? 5 : 0; /* EIO */
}

/* A deletion fails after it made a tombstone for only one of the two names. The checkpoint stays listed. */
static void test_failed_deletion_of_two_names(void **state) {
    ckd_error err = {0};
    unsigned count = 0;
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    file_set_fault_hook(keep_old_names, NULL);
    assert_int_equal(rename_run(store, SCENE_RUN, "b", &err), CKD_E_IO);
    ckd_id id = id_of(store, "b", 0);
    file_set_fault_hook(fail_at_second, &count);
    assert_int_equal(ckd_store_delete(store, &id, 1, NULL, &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(listed(store, "b"), STEPS);
    must(ckd_store_delete(store, &id, 1, NULL, &err), &err);
    assert_int_equal(listed(store, NULL), STEPS - 1);
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

/*
 * A recovery removes the old manifests and dies before it updates the catalog. A reader of the old catalog still finds
 * the checkpoint.
 */
static void test_load_after_a_killed_recovery(void **state) {
    interruption dies = AT_A_MANIFEST, dies_again = {.at = 1, .dies = true, .within = "data/n/"};
    scene_make(*state, 0, STEPS);
    ckd_store *other = open_store(*state, CKD_OPEN_READ);
    ckd_id id = id_of(other, SCENE_RUN, 0);
    assert_false(rename_until(*state, &dies));
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        file_set_fault_hook(interrupt_hook, &dies_again);
        scene_open(&store, *state, CKD_OPEN_WRITE, NULL);
        _exit(1);
    }
    int how;
    assert_int_equal(waitpid(pid, &how, 0), pid);
    assert_true(WIFSIGNALED(how));
    assert_int_equal(files_like(*state, "data/m", SCENE_RUN "."), 0);
    check_values(other, &id, 0);
    ckd_store_close(other);
}

/* A rename to another name first completes the one that was interrupted. Then no run has the old name. */
static void test_rename_to_another_name_after_an_interruption(void **state) {
    interruption dies = AT_A_MANIFEST;
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_false(rename_until(*state, &dies));
    expect(store, SCENE_RUN, "c", CKD_E_NOT_FOUND, "it has: b");
    assert_int_equal(listed(store, "b"), STEPS);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * A damaged rename setting does not block the run. A rebuild lists each checkpoint once, a verification reports the
 * setting, and another rename to the same name repairs it.
 */
static void test_a_damaged_rename_setting_is_repaired(void **state) {
    size_t size;
    ckd_error err = {0};
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    file_set_fault_hook(keep_old_names, NULL);
    assert_int_equal(rename_run(store, SCENE_RUN, "z", &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    ckd_store_close(store);
    char path[1024];
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "data/n/rename." SCENE_RUN ".0"));
    unsigned char *data = read_whole_file(path, &size);
    data[45] ^= 1;
    write_whole_file(path, data, size);
    free(data);
    /* Of two manifests of a checkpoint, the one with the higher generation wins. It has the new name. */
    ckd_rebuild_result rebuilt;
    must(ckd_store_rebuild(&rebuilt, store_path_of(*state, ""), NULL, &err), &err);
    assert_true(rebuilt.checkpoints == STEPS && rebuilt.skipped == 0);
    ckd_verify_result *found;
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(listed(store, "z"), STEPS);
    assert_int_equal(listed(store, NULL), STEPS);
    must(ckd_store_verify(&found, store, NULL, &err), &err);
    assert_int_equal(found->damage_count, 1);
    assert_non_null(strstr(found->damage[0].file, "rename." SCENE_RUN ".0"));
    ckd_verify_result_free(found);
    scene other = scene_of(9);
    other.run = "y";
    must(scene_save(NULL, store, &other, &err), &err);
    expect(store, SCENE_RUN, "y", CKD_E_EXISTS, "has a run 'y' already");
    must(ckd_store_rename_run(NULL, store, SCENE_RUN, "z", NULL, &err), &err);
    assert_int_equal(listed(store, "z"), STEPS);
    assert_int_equal(files_like(*state, "data/m", ""), STEPS + 1);
    assert_int_equal(files_like(*state, "data/n", ""), 0);
    ckd_store_close(store);
    check_same_as_rebuilt(*state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_checkpoints_settings_and_tags_move),
        tempdir_test(test_saves_after_a_rename),
        tempdir_test(test_the_trash_keeps_the_old_name),
        tempdir_test(test_refusals),
        tempdir_test(test_killed_anywhere),
        tempdir_test(test_failing_anywhere),
        tempdir_test(test_deletion_before_a_rename_is_completed),
        tempdir_test(test_nothing_is_renamed_while_somebody_reads),
        tempdir_test(test_a_rename_is_completed_when_nobody_reads),
        tempdir_test(test_a_save_before_a_rename_is_completed),
        tempdir_test(test_a_copy_completes_a_rename),
        tempdir_test(test_policies_between_two_names),
        tempdir_test(test_a_policy_changed_between_two_names),
        tempdir_test(test_a_rename_repeated_while_somebody_reads),
        tempdir_test(test_failed_deletion_of_two_names),
        tempdir_test(test_load_after_a_killed_recovery),
        tempdir_test(test_rename_to_another_name_after_an_interruption),
        tempdir_test(test_a_damaged_rename_setting_is_repaired),
    };
    return cmocka_run_group_tests_name("rename", tests, NULL, NULL);
}
