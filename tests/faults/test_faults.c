/*
 * Failing operations, one at a time: every create, write, sync, close, rename, unlink, mkdir, directory sync, open,
 * read and lock, including SQLite's, fails with EIO or ENOSPC, and writes also halfway; once, or from then on. A call
 * that fails says why and leaks no descriptor. After a temporary failure the same call works on the same handle.
 * Nothing committed is lost or wrong, and the next open for writing removes what was left over.
 */
#include <errno.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/actions.h"
#include "tests/support/level.h"
#include "tests/support/marks.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

/* ---- faults ---- */

enum { TORN = -4 }; /* three bytes are written, then ENOSPC */

typedef enum counted { ALL_STEPS, CHANGES, WRITES } counted;

/* THERE: permanently, but only in the folder of the first fault */
typedef enum lasting { ONCE, THERE, EVERYWHERE } lasting;

typedef struct faulter {
    unsigned long at; /* number of the counted operation, from 1; 0: the first that matches */
    counted counted;
    int fault; /* what the hook returns */
    lasting lasting;
    file_op step;
    const char *where; /* part of the path */
    unsigned long seen;
    trouble trouble;
    file_op hit_step; /* the first operation that failed */
    char hit_path[512];
} faulter;

static faulter current; /* printed when a test fails: see teardown */

static bool counts(const faulter *f, file_op step) {
    return f->counted == ALL_STEPS || step == FILE_OP_WRITE ||
           (f->counted == CHANGES && step != FILE_OP_READ && step != FILE_OP_OPEN && step != FILE_OP_LOCK);
}

static bool same_folder(const char *a, const char *b) {
    const char *slash = strrchr(a, '/');
    size_t length = slash ? (size_t)(slash - a) : 0;
    return slash && strncmp(a, b, length) == 0 && strrchr(b, '/') == b + length;
}

/* True if the operation falls under a fault that has begun and lasts. */
static bool lasts(const faulter *f, const char *path) {
    return f->trouble.hits &&
           (f->lasting == EVERYWHERE || (f->lasting == THERE && same_folder(path, f->hit_path)));
}

static int fault_hook(void *context, file_op step, const char *path) {
    faulter *f = context;
    bool now = f->at ? counts(f, step) && ++f->seen == f->at
                     : !f->trouble.hits && step == f->step && strstr(path, f->where);
    if (!now && !lasts(f, path)) {
        return 0;
    }
    if (f->trouble.hits++ == 0) {
        f->hit_step = step;
        snprintf(f->hit_path, sizeof(f->hit_path), "%s", path);
    }
    return f->fault;
}

/* A call that failed under a fault must report it. */
static void check_failure(const char *call, ckd_status status, const ckd_error *err) {
    int fault = current.fault == TORN ? ENOSPC : current.fault;
    if (status != err->status || err->sys_errno != fault || !err->file[0] ||
        status != (fault == ENOSPC ? CKD_E_NOSPACE : CKD_E_IO)) {
        fail_msg("%s: %s, errno %d, file '%s', message '%s'", call, ckd_status_name(status), err->sys_errno,
                 err->file, err->message);
    }
    const char *reason = fault == ENOSPC ? "No space left" : "Input/output error";
    if (!strstr(err->message, reason)) {
        fail_msg("%s: the message does not say why: %s", call, err->message);
    }
}

/* ---- sweeps ---- */

typedef struct sweep {
    const char *template; /* directory with a store; NULL: an empty directory */
    act_fn act;
    uint64_t before;   /* bit mask of the steps in the template */
    uint64_t possible; /* bit mask of the steps that are tried */
    uint64_t next;     /* the step to save afterwards */
    bool reads;        /* it only reads */
} sweep;

static void act_under_fault(action *a, const sweep *w) {
    size_t descriptors = open_descriptors();
    file_set_fault_hook(fault_hook, &current);
    w->act(a);
    ckd_store_close(a->store);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(open_descriptors(), descriptors);
}

/*
 * Which operations fail, and how: a sample with alternating errors; at the big level every operation with each error.
 */
typedef struct manner {
    counted counted;
    lasting lasting;
    int faults[2];        /* alternating */
    unsigned long stride; /* from one operation to the next */
} manner;
static const manner few[] = {
    {ALL_STEPS, ONCE, {EIO, ENOSPC}, 3},
    {CHANGES, EVERYWHERE, {ENOSPC, EIO}, 5},
    {CHANGES, THERE, {ENOSPC, EIO}, 4},
    {WRITES, ONCE, {TORN, TORN}, 3},
};
static const manner of_reads[] = {
    {ALL_STEPS, ONCE, {EIO, ENOSPC}, 2},
    {ALL_STEPS, EVERYWHERE, {ENOSPC, EIO}, 3},
};
static const manner many[] = {
    {ALL_STEPS, ONCE, {EIO, EIO}, 1},       {ALL_STEPS, EVERYWHERE, {EIO, EIO}, 1},
    {ALL_STEPS, ONCE, {ENOSPC, ENOSPC}, 1}, {ALL_STEPS, EVERYWHERE, {ENOSPC, ENOSPC}, 1},
    {CHANGES, THERE, {EIO, EIO}, 1},        {WRITES, ONCE, {TORN, TORN}, 1},
};

static bool thorough(void) {
    return test_level_now() == TEST_BIG;
}

/* Returns false if there are fewer operations. */
static bool fail_at(const sweep *w, const manner *how, unsigned long at, bool all) {
    char *dir = tempdir_create();
    action a = {.dir = dir, .trouble = &current.trouble};
    current = (faulter){.at = at,
                        .counted = how->counted,
                        .fault = how->faults[at / how->stride % 2],
                        .lasting = how->lasting,
                        .trouble = {.once = how->lasting == ONCE, .check_failure = check_failure}};
    if (w->template) {
        tree_copy(store_path_of(w->template, ""), store_path_of(dir, ""));
    }
    char *before = w->reads ? tree_describe(dir) : NULL;
    act_under_fault(&a, w);
    if (w->reads) {
        char *after = tree_describe(dir);
        assert_string_equal(before, after);
        free(before);
        free(after);
        tempdir_remove(dir);
        return current.trouble.hits > 0;
    }
    /*
     * After a temporary failure the call was repeated and worked. After a permanent one a file may already have got
     * its name, which is never undone.
     */
    assert_true(how->lasting != ONCE || (a.committed | a.gone) == (w->act == act_prunes ? 16 : w->possible));
    if (all) {
        survivors_check(dir, w->before | a.committed, w->possible & ~a.gone, w->next);
    } else {
        survivors_glance(dir, w->before | a.committed, w->possible & ~a.gone);
    }
    if (w->act == act_marks) {
        assert_true(how->lasting != ONCE || a.marks == MARK_CHANGES);
        marks_check(dir, a.marks);
    }
    tempdir_remove(dir);
    return current.trouble.hits > 0;
}

/* Returns the number of operations. */
static unsigned long fail_everywhere(const char *what, const sweep *w) {
    const manner *hows = thorough() ? many : w->reads ? of_reads : few;
    size_t count = thorough() ? sizeof(many) / sizeof(many[0])
                   : w->reads ? sizeof(of_reads) / sizeof(of_reads[0])
                              : sizeof(few) / sizeof(few[0]);
    unsigned long steps = 0, points = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned long stride = hows[i].stride * (under_sanitizer() ? 2 : 1) * test_stride(5, 1, 1);
        unsigned long at = test_first(what, stride);
        for (; fail_at(w, &hows[i], at, thorough() || points % 4 == 0); at += stride) {
            points++;
        }
        steps = at > steps ? at - 1 : steps;
    }
    current = (faulter){0};
    print_message("%s: %lu steps, %lu faults\n", what, steps, points);
    return steps;
}

static int teardown(void **state) {
    file_set_fault_hook(NULL, NULL);
    if (current.trouble.hits) {
        print_message("the fault: %d at step %lu (kind %d of %s)%s\n", current.fault, current.at,
                      (int)current.hit_step, current.hit_path,
                      current.lasting == ONCE    ? ""
                      : current.lasting == THERE ? ", for ever there"
                                                 : ", for ever");
    }
    current = (faulter){0};
    tempdir_remove(*state);
    return 0;
}

static void test_creating_a_store_and_saving_a_base(void **state) {
    (void)state;
    sweep w = {.act = act_creates, .possible = 1, .next = 1};
    assert_true(fail_everywhere("new store", &w) >= 100);
}

static void test_saving_a_delta(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {*state, act_saves_delta, .before = 3, .possible = 4, .next = 3};
    assert_true(fail_everywhere("delta", &w) >= 100);
}

/* A failure to write a materialized copy does not fail the save. */
static void test_saving_with_ready_copies(void **state) {
    dir_list copies;
    scene_make(*state, 0, 2);
    sweep w = {*state, act_saves_ready, .before = 3, .possible = 4, .next = 3};
    assert_true(fail_everywhere("materialized copies", &w) >= 100);
    action a = {.dir = *state, .trouble = &current.trouble};
    act_saves_ready(&a);
    ckd_store_close(a.store);
    assert_int_equal(dir_list_read(&copies, store_path_of(*state, "data/k"), NULL), CKD_OK);
    assert_int_equal(copies.count, 1);
    dir_list_free(&copies);
}

static void test_reading(void **state) {
    scene_make(*state, 0, 2);
    action a = {.dir = *state, .trouble = &current.trouble};
    act_saves_ready(&a);
    ckd_store_close(a.store);
    sweep w = {*state, act_reads, .reads = true};
    assert_true(fail_everywhere("reading", &w) >= 60);
}

static void test_saving_by_two_ranks(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {*state, act_saves_ranks, .before = 3, .possible = 4, .next = 3};
    assert_true(fail_everywhere("two ranks", &w) >= 100);
}

static void test_deleting_and_collecting(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {*state, act_deletes, .before = 1, .possible = 6, .next = 3};
    assert_true(fail_everywhere("delete", &w) >= 60);
}

static void test_undeleting(void **state) {
    scene_make(*state, 0, 3);
    scene_trash(*state, 1, 2);
    sweep w = {*state, act_undeletes, .before = 1, .possible = 6, .next = 3};
    assert_true(fail_everywhere("undelete", &w) >= 40);
}

static void test_pinning_and_tagging(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {*state, act_marks, .before = 7, .next = 3};
    assert_true(fail_everywhere("pins and tags", &w) >= 60);
}

/* After a save, by an automatic policy: its failure does not fail the save. */
static void test_pruning_after_a_save(void **state) {
    scene_make_pruning(*state, 4, 0);
    sweep w = {*state, act_prunes, .before = 8, .possible = 16 + 7, .next = 5};
    assert_true(fail_everywhere("prune", &w) >= 150);
}

static void test_compacting(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {*state, act_compacts, .before = 15, .next = 4};
    assert_true(fail_everywhere("compact", &w) >= 150);
}

static void test_folding(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {*state, act_folds, .before = 12, .possible = 3, .next = 4};
    assert_true(fail_everywhere("fold", &w) >= 150);
}

static void test_aborting(void **state) {
    scene_make(*state, 0, 2);
    sweep w = {*state, act_aborts, .before = 3, .possible = 0, .next = 2};
    assert_true(fail_everywhere("abort", &w) >= 30);
}

/* ---- leftovers of a writer ---- */

static const struct {
    const char *what;
    file_op step;
    const char *where;
    bool published; /* the manifest is */
} leftovers[] = {
    {"chunk file not named", FILE_OP_SYNC, ".ckd.tmp", false},
    {"no manifest", FILE_OP_CREATE, "data/m/.tmp-", false},
    {"manifest not named", FILE_OP_RENAME_NOREPLACE, "data/m/run", false},
    {"manifest not synced", FILE_OP_DIR_SYNC, "data/m", true},
    {"catalog half written", FILE_OP_SYNC, "catalog.db", true},
    {"intent not removed", FILE_OP_REMOVE, "data/i", true},
};
enum { LEFTOVERS = sizeof(leftovers) / sizeof(leftovers[0]) };

/* Makes DIR/store as it is left by a writer of step 2 for which, from some operation on, everything failed. */
static void make_leftover(const char *dir, size_t i) {
    scene_make(dir, 0, 2);
    action a = {.dir = dir, .mode = CKD_OPEN_WRITE, .step = 2};
    assert_int_equal(call_open(&a, NULL), CKD_OK);
    faulter f = {.step = leftovers[i].step, .where = leftovers[i].where, .fault = EIO, .lasting = EVERYWHERE};
    file_set_fault_hook(fault_hook, &f);
    (void)call_save(&a, NULL);
    ckd_store_close(a.store);
    file_set_fault_hook(NULL, NULL);
    assert_true(f.trouble.hits > 0);
}

static void fail_after_leftovers(const char *what, act_fn act, size_t stride, unsigned long least) {
    for (size_t i = 0; i < LEFTOVERS; i += stride) {
        char *dir = tempdir_create(), label[96];
        make_leftover(dir, i);
        sweep w = {dir, act, .before = leftovers[i].published ? 7 : 3, .possible = 0, .next = 3};
        snprintf(label, sizeof(label), "%s, %s", what, leftovers[i].what);
        assert_true(fail_everywhere(label, &w) >= least);
        tempdir_remove(dir);
    }
}

static void test_recovering(void **state) {
    (void)state;
    fail_after_leftovers("recovery", act_opens, 1, 20);
}

static void test_rebuilding(void **state) {
    (void)state;
    fail_after_leftovers("rebuild", act_rebuilds, thorough() ? 1 : 4, 50);
}

static void test_repairing_the_catalog(void **state) {
    static const char noise[4096] = "this is not a database";
    scene_make(*state, 0, 3);
    write_whole_file(store_path_of(*state, "catalog.db"), noise, sizeof(noise));
    sweep w = {*state, act_opens, .before = 7, .next = 3};
    assert_true(fail_everywhere("mending", &w) >= 50);
}

/* ---- a file that cannot be read ---- */

static int bad_file_hook(void *context, file_op step, const char *path) {
    return (step == FILE_OP_OPEN || step == FILE_OP_READ) && strstr(path, context) ? EIO : 0;
}

/* The name of the file in data/c that is not in `known`. */
static void new_chunk_file(char name[64], const char *dir, const dir_list *known) {
    dir_list now;
    assert_int_equal(dir_list_read(&now, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_int_equal(now.count, known->count + 1);
    size_t i = 0;
    while (i < known->count && strcmp(now.names[i], known->names[i]) == 0) {
        i++;
    }
    snprintf(name, 64, "%s", now.names[i]);
    dir_list_free(&now);
}

/*
 * The newest checkpoint's file has a bad sector. Everything else works, and the checkpoint's tensors are listed again
 * once the file can be read.
 */
static void test_a_file_that_cannot_be_read(void **state) {
    char bad[64];
    dir_list known;
    action a = {.dir = *state, .mode = CKD_OPEN_WRITE, .step = 2};
    scene unreadable = scene_of(2);
    ckd_rebuild_result rebuilt;
    ckd_error err;
    scene_make(*state, 0, 2);
    assert_int_equal(dir_list_read(&known, store_path_of(*state, "data/c"), NULL), CKD_OK);
    scene_make(*state, 2, 1);
    new_chunk_file(bad, *state, &known);
    dir_list_free(&known);
    assert_int_equal(remove(store_path_of(*state, "catalog.db")), 0);

    file_set_fault_hook(bad_file_hook, bad);
    assert_int_equal(call_open(&a, NULL), CKD_OK);
    assert_int_equal(scene_load(a.store, &unreadable, &err), CKD_E_IO);
    assert_non_null(strstr(err.file, bad));
    a.step = 3;
    assert_int_equal(call_save(&a, NULL), CKD_OK);
    ckd_store_close(a.store);
    file_set_fault_hook(NULL, NULL);
    survivors_glance(*state, 15, 0);

    file_set_fault_hook(bad_file_hook, bad);
    assert_int_equal(ckd_store_rebuild(&rebuilt, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    assert_int_equal(rebuilt.checkpoints, 4);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(ckd_store_rebuild(&rebuilt, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    survivors_check(*state, 15, 0, 4);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, tempdir_setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_creating_a_store_and_saving_a_base),
        TEST(test_saving_a_delta),
        TEST(test_saving_with_ready_copies),
        TEST(test_saving_by_two_ranks),
        TEST(test_deleting_and_collecting),
        TEST(test_undeleting),
        TEST(test_pinning_and_tagging),
        TEST(test_pruning_after_a_save),
        TEST(test_compacting),
        TEST(test_folding),
        TEST(test_aborting),
        TEST(test_recovering),
        TEST(test_rebuilding),
        TEST(test_repairing_the_catalog),
        TEST(test_reading),
        TEST(test_a_file_that_cannot_be_read),
    };
    (void)mallopt(M_MMAP_THRESHOLD,
                  1 << 30); /* keep freed memory: otherwise page faults take most of the time */
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    scratch_begin();
    int failed = run_sampled("faults", tests, 3, NULL, NULL);
    scratch_end();
    return failed;
}
