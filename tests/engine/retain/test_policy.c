/*
 * Retention policies kept in a store: which policy applies to which run, that a damaged policy is never taken for a
 * missing one, and what applying it after a commit does. It deletes only what the policy allows, never makes a save
 * fail, and never waits for other users of the store.
 */
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
#include "engine/compact/internal.h"
#include "engine/store/manifests.h"
#include "tests/support/drift.h"
#include "tests/support/early.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static char messages[8192]; /* messages of the library, one per line */

static void on_message(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static char infos[8192]; /* the same of on_info */

static void on_info(void *context, const char *message) {
    (void)context;
    size_t used = strlen(infos);
    snprintf(infos + used, sizeof(infos) - used, "%s\n", message);
}

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    o.on_message = on_message;
    o.lock_timeout_ms = 20000;
    must(ckd_store_open(&store, store_path_of(dir, ""), mode, &o, &err), &err);
    messages[0] = '\0';
    return store;
}

static ckd_policy policy_of(const char *run, uint32_t keep_last, uint32_t automatic) {
    ckd_policy p = CKD_POLICY_INIT;
    p.run = run;
    p.keep_last = keep_last;
    p.automatic = automatic;
    return p;
}

static void set_policy(ckd_store *store, const char *run, uint32_t keep_last, uint32_t automatic) {
    ckd_policy p = policy_of(run, keep_last, automatic);
    ckd_error err = {0};
    must(ckd_store_set_policy(store, &p, &err), &err);
}

static void save_base(ckd_store *store, const char *run, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.run = run;
    s.base = true;
    must(scene_save(NULL, store, &s, &err), &err);
}

static void save_bases(ckd_store *store, const char *run, uint64_t first, uint64_t end) {
    for (uint64_t step = first; step < end; step++) {
        save_base(store, run, step);
    }
}

/* The listed steps of a run as a bit mask: bit n is step n. */
static uint64_t steps_of(ckd_store *store, const char *run) {
    ckd_checkpoint_list *list;
    uint64_t bits = 0;
    assert_int_equal(ckd_store_list(&list, store, run, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        bits |= UINT64_C(1) << list->items[i].step;
    }
    ckd_checkpoint_list_free(list);
    return bits;
}

static size_t files_in(const char *dir, const char *folder) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

/* The path of the only chunk file in a store with one checkpoint. */
static void only_chunk(char path[1024], const char *dir) {
    dir_list list;
    char below[128];
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    snprintf(below, sizeof(below), "data/c/%s", list.names[0]);
    snprintf(path, 1024, "%s", store_path_of(dir, below));
    dir_list_free(&list);
}

static void flip_middle(const char *path) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 1;
    write_whole_file(path, data, size);
    free(data);
}

/* ---- setting, reading and clearing ---- */

/* Policies are validated, replaced, listed and cleared. Those of runs and that of the store are independent. */
static void test_set_and_clear(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_stored_policy got;
    ckd_policy_list *list;
    ckd_error err = {0};
    ckd_policy p = policy_of(NULL, 0, 1);
    assert_int_equal(ckd_store_set_policy(store, &p, &err), CKD_E_INVALID);
    p = policy_of("a b", 1, 0);
    assert_int_equal(ckd_store_set_policy(store, &p, &err), CKD_E_INVALID);
    assert_int_equal(ckd_store_policy(&got, store, "a", &err), CKD_E_NOT_FOUND);
    assert_int_equal(ckd_store_clear_policy(store, NULL, &err), CKD_E_NOT_FOUND);

    p = (ckd_policy){.struct_size = sizeof(p),
                     .run = "b",
                     .keep_every = 10,
                     .keep_first = 5,
                     .keep_best = 2,
                     .highest_is_best = 9,
                     .keep_new_s = 60,
                     .automatic = 3,
                     .undo_s = 7};
    must(ckd_store_set_policy(store, &p, &err), &err);
    assert_int_equal(ckd_store_policy(&got, store, "a", &err), CKD_E_NOT_FOUND);
    must(ckd_store_policy(&got, store, "b", &err), &err);
    assert_string_equal(got.run, "b");
    assert_true(got.policy.keep_every == 10 && got.policy.keep_first == 1 && got.policy.keep_best == 2);
    assert_true(got.policy.highest_is_best == 1 && got.policy.keep_new_s == 60 && got.policy.keep_last == 0);
    assert_true(got.policy.automatic == 3 && got.policy.undo_s == 7 && !got.policy.run);
    assert_true(clock_wall_ns() - got.set_ns < UINT64_C(600) * 1000000000);

    set_policy(store, NULL, 4, 0);
    set_policy(store, NULL, 5, 0); /* replaces the previous one */
    set_policy(store, "0", 6, 0);
    must(ckd_store_policy(&got, store, "a", &err), &err);
    assert_true(got.policy.keep_last == 5 && !got.run[0]);
    must(ckd_store_policies(&list, store, &err), &err);
    assert_int_equal(list->count, 3);
    assert_string_equal(list->items[0].run, "");
    assert_string_equal(list->items[1].run, "0");
    assert_string_equal(list->items[2].run, "b");
    ckd_policy_list_free(list);
    assert_int_equal(files_in(*state, "data/n"), 3);

    must(ckd_store_clear_policy(store, NULL, &err), &err);
    assert_int_equal(ckd_store_clear_policy(store, NULL, &err), CKD_E_NOT_FOUND);
    must(ckd_store_policy(&got, store, "b", &err), &err);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_READ);
    p.run = NULL;
    assert_int_equal(ckd_store_set_policy(store, &p, &err), CKD_E_READ_ONLY);
    assert_int_equal(ckd_store_clear_policy(store, "b", &err), CKD_E_READ_ONLY);
    ckd_store_close(store);
}

/*
 * A caller built before `automatic` and `undo_s` were appended passes a smaller struct. Those fields get their
 * defaults.
 */
static void test_older_callers_get_defaults(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_stored_policy got;
    ckd_error err = {0};
    ckd_policy p = policy_of(NULL, 3, 77);
    p.undo_s = 78;
    p.struct_size = offsetof(ckd_policy, automatic);
    must(ckd_store_set_policy(store, &p, &err), &err);
    must(ckd_store_policy(&got, store, NULL, &err), &err);
    assert_true(got.policy.keep_last == 3 && got.policy.automatic == 0 && got.policy.undo_s == 24 * 3600);
    ckd_store_close(store);
}

/* ---- applying a policy on request ---- */

/* A run with a policy of its own follows that one. All other runs follow the policy of the store. */
static void test_a_run_follows_its_own_policy(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_prune *plan;
    ckd_trash *trash;
    ckd_error err = {0};
    static const char *const runs[] = {"a", "b", "c"};
    for (size_t i = 0; i < 3; i++) {
        save_bases(store, runs[i], 0, 6);
    }
    assert_int_equal(ckd_store_plan_prune(&plan, store, NULL, &err), CKD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "the store has no policy"));
    ckd_policy p = policy_of("b", 4, 0);
    p.undo_s = 50;
    must(ckd_store_set_policy(store, &p, &err), &err);
    must(ckd_store_plan_prune(&plan, store, NULL, &err), &err);
    assert_int_equal(plan->count, 6); /* only run b has a policy */
    assert_int_equal(plan->deleted, 2);
    ckd_prune_free(plan);
    p = policy_of(NULL, 2, 0);
    p.undo_s = 3000;
    must(ckd_store_set_policy(store, &p, &err), &err);
    must(ckd_store_prune(&plan, store, NULL, NULL, &err), &err);
    assert_int_equal(plan->count, 18);
    assert_int_equal(plan->deleted, 10);
    ckd_prune_free(plan);
    assert_int_equal(steps_of(store, "a"), 48);
    assert_int_equal(steps_of(store, "b"), 60);
    assert_int_equal(steps_of(store, "c"), 48);
    must(ckd_store_trash(&trash, store, &err), &err);
    assert_int_equal(trash->count, 10);
    for (size_t i = 0; i < trash->count; i++) { /* of two policies, the longer undo_s applies */
        assert_int_equal(trash->items[i].until_ns - trash->items[i].deleted_ns, UINT64_C(3000000000000));
    }
    ckd_trash_free(trash);
    ckd_store_close(store);
    assert_string_equal(messages, "");
}

/* ---- applying a policy after each commit ---- */

/* Only runs with an automatic policy are pruned. */
static void test_after_each_commit(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_trash *trash;
    ckd_error err = {0};
    set_policy(store, "a", 2, 1);
    set_policy(store, "c", 2, 0);
    save_bases(store, "a", 0, 6);
    save_bases(store, "b", 0, 6);
    save_bases(store, "c", 0, 6);
    assert_int_equal(steps_of(store, "a"), 48);
    assert_int_equal(steps_of(store, "b"), 63);
    assert_int_equal(steps_of(store, "c"), 63);
    assert_non_null(strstr(messages, "deleted 1 checkpoint of a, by its policy\n"));
    assert_null(strstr(messages, " of b"));
    must(ckd_store_trash(&trash, store, &err), &err);
    assert_int_equal(trash->count, 4);
    ckd_trash_free(trash);
    assert_int_equal(files_in(*state, "data/c"), 18);

    ckd_policy p = policy_of("a", 2, 1);
    p.undo_s = 0;
    must(ckd_store_set_policy(store, &p, &err), &err);
    save_base(store, "a", 6);
    /* Step 6 came and one file went; the trash still holds the files deleted with the default undo_s. */
    assert_int_equal(files_in(*state, "data/c"), 18);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* automatic = 3: the policy is applied when at least three checkpoints can be deleted. */
static void test_automatic_waits_for_a_number_of_deletions(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    set_policy(store, NULL, 2, 3);
    static const uint64_t listed[] = {1, 3, 7, 15, 24, 56, 120, 192};
    for (uint64_t step = 0; step < 8; step++) {
        save_base(store, "a", step);
        assert_int_equal(steps_of(store, "a"), listed[step]);
    }
    ckd_store_close(store);
}

/*
 * Steps of a delta chain are deleted like bases, except those that a remaining checkpoint needs. The pinned one still
 * loads.
 */
static void test_chains_are_pruned(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    set_policy(store, NULL, 1, 1);
    for (uint64_t step = 0; step < 5; step++) {
        scene s = scene_of(step);
        must(scene_save(NULL, store, &s, &err), &err);
    }
    assert_int_equal(steps_of(store, SCENE_RUN), 8 | 16);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 3, NULL), CKD_OK);
    must(ckd_store_pin(store, &c.id, NULL, &err), &err);
    save_bases(store, SCENE_RUN, 5, 7);
    assert_int_equal(steps_of(store, SCENE_RUN), 8 | 32 | 64); /* step 3 is pinned */
    scene_check(store, 3, 1);
    ckd_store_close(store);
}

/* A damaged tag or policy keeps the policy from being applied. The save succeeds and a message names the file. */
static void test_a_policy_never_makes_a_save_fail(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    char path[1024];
    set_policy(store, NULL, 1, 1);
    save_base(store, "a", 0);
    only_chunk(path, *state);
    write_whole_file(store_path_of(*state, "data/n/tag.best.0"), "x", 1);
    save_bases(store, "a", 1, 4);
    assert_int_equal(steps_of(store, "a"), 15);
    assert_non_null(strstr(messages, "the policy of a was not applied: "));
    assert_non_null(strstr(messages, "data/n/tag.best.0"));
    assert_int_equal(unlink(store_path_of(*state, "data/n/tag.best.0")), 0);

    messages[0] = '\0';
    size_t size;
    const char *note = store_path_of(*state, "data/n/policy.-.0");
    unsigned char *policy = read_whole_file(note, &size);
    write_whole_file(note, policy, size - 1);
    save_base(store, "a", 4);
    assert_int_equal(steps_of(store, "a"), 31);
    assert_non_null(strstr(messages, "policy.-.0"));
    write_whole_file(store_path_of(*state, "data/n/policy.-.0"), policy, size);
    free(policy);
    save_base(store, "a", 5);
    assert_int_equal(steps_of(store, "a"), 48);
    ckd_store_close(store);
}

/* Damages the chunk file of the newest checkpoint between its commit and the deletions. */
static int damage_hook(void *context, file_op step, const char *path) {
    char *victim = context;
    if (step == FILE_OP_RENAME_NOREPLACE && strstr(path, "data/c/") && !victim[0]) {
        snprintf(victim, 1024, "%s", path);
    }
    if (step == FILE_OP_RENAME_NOREPLACE && strstr(path, "data/m/") &&
        victim[0]) { /* by now the chunk file is complete */
        char copy[1024];
        snprintf(copy, sizeof(copy), "%s", victim);
        file_set_fault_hook(NULL, NULL);
        flip_middle(copy);
    }
    return 0;
}

static void test_nothing_is_deleted_while_the_newest_are_damaged(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    char victim[1024] = "";
    save_bases(store, "a", 0, 4);
    set_policy(store, NULL, 1, 1);
    file_set_fault_hook(damage_hook, victim);
    save_base(store, "a", 4);
    file_set_fault_hook(NULL, NULL);
    assert_string_not_equal(victim, "");
    assert_int_equal(steps_of(store, "a"), 31);
    assert_non_null(strstr(messages, "a@4, which the newest remaining checkpoints need, is damaged"));
    save_base(store, "a", 5); /* step 4 is still one of the newest two */
    assert_int_equal(steps_of(store, "a"), 63);
    save_base(store, "a", 6);
    assert_int_equal(steps_of(store, "a"), 96);
    ckd_store_close(store);
}

/* ---- what applying a policy reads ---- */

static struct {
    const char *where;
    unsigned long reads;
} watched;

static int count_reads(void *context, file_op step, const char *path) {
    (void)context;
    watched.reads += step == FILE_OP_READ && strstr(path, watched.where);
    return 0;
}

/* Damages a file after the commit, when the policy is read. */
static int damage_then_hook(void *context, file_op step, const char *path) {
    if (step == FILE_OP_OPEN && strstr(path, "data/n")) {
        file_set_fault_hook(NULL, NULL);
        flip_middle(context);
    }
    return 0;
}

/*
 * Saves a delta on step 0. The chunk file of step 0 is damaged while the policy is applied, and restored afterwards.
 */
static void save_on_zero(ckd_store *store, uint64_t step, char *file_of_zero) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_error err = {0};
    scene s = scene_of(step);
    o.run = o.parent_run = SCENE_RUN; /* parent_step is 0 */
    o.step = step;
    o.max_load_cost = o.newest_load_cost = 1000;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    file_set_fault_hook(damage_then_hook, file_of_zero);
    ckd_status status = scene_finish(NULL, save, &s, &err);
    file_set_fault_hook(NULL, NULL);
    must(status, &err);
    flip_middle(file_of_zero);
}

/*
 * A chunk file that was verified once is not read again after a commit, until the catalog is lost. A prune on request
 * reads it every time.
 */
static void test_files_are_verified_once(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    char path[1024];
    ckd_error err = {0};
    ckd_policy p = policy_of(NULL, 1, 0);
    save_base(store, SCENE_RUN, 0);
    ckd_checkpoint zero;
    assert_int_equal(ckd_store_find(&zero, store, SCENE_RUN, 0, NULL), CKD_OK);
    must(ckd_store_pin(store, &zero.id, NULL, &err), &err);
    only_chunk(path, *state);
    set_policy(store, NULL, 1, 1);
    save_on_zero(store, 1, path);
    save_on_zero(store, 2, path);
    assert_string_equal(messages, "");
    /* Step 1 could go, but the file of step 0 has not been verified and is damaged. */
    save_on_zero(store, 3, path);
    assert_int_equal(steps_of(store, SCENE_RUN), 15);
    assert_non_null(strstr(messages, "which the newest remaining checkpoints need, is damaged"));
    must(ckd_store_prune(NULL, store, &p, NULL, &err), &err);
    assert_int_equal(steps_of(store, SCENE_RUN), 13);

    set_policy(store, NULL, 1, 1);
    save_on_zero(store, 4, path);
    assert_int_equal(steps_of(store, SCENE_RUN), 25); /* the prune on request has verified the file */
    set_policy(store, NULL, 1, 9);
    save_on_zero(store, 5, path);
    assert_int_equal(steps_of(store, SCENE_RUN), 57);
    flip_middle(path);
    assert_int_equal(ckd_store_prune(NULL, store, &p, NULL, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "is damaged"));
    flip_middle(path);
    ckd_store_close(store);

    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_WRITE);
    set_policy(store, NULL, 1, 1);
    save_on_zero(store, 6, path);
    assert_int_equal(steps_of(store, SCENE_RUN), 121);
    assert_non_null(strstr(messages, "which the newest remaining checkpoints need, is damaged"));
    ckd_store_close(store);
}

static void scrub_all(ckd_store *store) {
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    ckd_error err = {0};
    o.older_than_s = 0;
    must(ckd_store_scrub(&r, store, &o, &err), &err);
    ckd_scrub_result_free(r);
}

static void repair_all(ckd_store *store) {
    ckd_repair_result *r;
    ckd_error err = {0};
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    ckd_repair_result_free(r);
}

/*
 * Step 3 was verified before its file is damaged or removed. Once this is known, because a scrub or a repair has found
 * it or the file is gone, a save deletes nothing.
 */
static void test_damage_since_the_verification(void **state) {
    static const char *const runs[] = {"scrubbed", "repaired", "removed"};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    for (int k = 0; k < 3; k++) {
        ckd_checkpoint c;
        manifest m;
        save_bases(store, runs[k], 0, 4);
        scrub_all(store);
        must(ckd_store_find(&c, store, runs[k], 3, &err), &err);
        must(store_read_manifest(&m, store, runs[k], 3, c.generation, &err), &err);
        pathname path = path_chunk(store->path, &m.files[0].id, "");
        manifest_free(&m);
        if (k == 2) {
            assert_int_equal(unlink(path.text), 0);
        } else {
            flip_middle(path.text);
            k ? repair_all(store) : scrub_all(store);
        }
        set_policy(store, runs[k], 2, 1);
        messages[0] = '\0';
        save_base(store, runs[k], 4);
        assert_int_equal(steps_of(store, runs[k]), 31);
        assert_non_null(strstr(messages, "@3, which the newest remaining checkpoints need, is damaged"));
    }
    ckd_store_close(store);
}

/* A save reads other manifests only if the policy has something to delete. */
static void test_a_save_reads_little(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, "a", 0, 3);
    set_policy(store, NULL, 50, 1);
    watched.where = "data/m/";
    watched.reads = 0;
    file_set_fault_hook(count_reads, NULL);
    save_base(store, "a", 3);
    file_set_fault_hook(NULL, NULL);
    unsigned long idle = watched.reads;
    set_policy(store, NULL, 1, 1);
    watched.reads = 0;
    file_set_fault_hook(count_reads, NULL);
    save_base(store, "a", 4);
    file_set_fault_hook(NULL, NULL);
    assert_true(watched.reads > idle + 4); /* the policy read all manifests and deleted */
    assert_true(idle <= 2);                /* no more than a save without a policy reads */
    ckd_store_close(store);
}

/* ---- locks ---- */

static struct {
    const char *lock; /* taken when the policy is read; NULL: none, or already taken */
    bool published;   /* the manifest is; the next settings that are read are the policy */
    file_lock *held;
    char store[1024];
} rival;

static int rival_hook(void *context, file_op step, const char *path) {
    (void)context;
    rival.published |= step == FILE_OP_RENAME_NOREPLACE && strstr(path, "data/m/");
    if (rival.published && step == FILE_OP_OPEN && strstr(path, "data/n") && rival.lock) {
        char lock[1100];
        snprintf(lock, sizeof(lock), "%s/%s", rival.store, rival.lock);
        file_set_fault_hook(NULL, NULL);
        rival.lock = NULL;
        assert_int_equal(lock_acquire(&rival.held, lock, LOCK_EXCLUSIVE, true, 5000, NULL), CKD_OK);
    }
    return 0;
}

/* A policy does not wait for a lock that somebody else holds. The next save applies it. */
static void test_a_policy_does_not_wait(void **state) {
    static const char *const locks[] = {"data/lock", "data/readers"};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    save_bases(store, "a", 0, 4);
    ckd_policy p = policy_of(NULL, 1, 1);
    p.undo_s = 0;
    must(ckd_store_set_policy(store, &p, &err), &err);
    uint64_t begun = clock_monotonic_ns();
    for (uint64_t i = 0; i < 2; i++) {
        snprintf(rival.store, sizeof(rival.store), "%s", store_path_of(*state, ""));
        rival.lock = locks[i];
        rival.held = NULL;
        rival.published = false;
        file_set_fault_hook(rival_hook, NULL);
        save_base(store, "a", 4 + i);
        file_set_fault_hook(NULL, NULL);
        assert_non_null(rival.held);
        assert_int_equal(steps_of(store, "a"), i ? 63 : 31);
        lock_release(rival.held);
    }
    assert_string_equal(messages, "");
    ckd_load *load; /* a reader does not block deletions, only the removal of files */
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "a", 5, NULL), CKD_OK);
    must(ckd_load_begin(&load, store, &c.id, &err), &err);
    save_base(store, "a", 6);
    assert_int_equal(steps_of(store, "a"), 96);
    assert_int_equal(files_in(*state, "data/c"), 7);
    ckd_load_end(load);
    save_base(store, "a", 7);
    assert_int_equal(files_in(*state, "data/c"), 2);
    assert_true(clock_monotonic_ns() - begun < UINT64_C(15000000000)); /* lock_timeout_ms is 20 s */
    ckd_store_close(store);
}

/* ---- compaction after a commit ---- */

static void save_delta(ckd_store *store, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    must(scene_save(NULL, store, &s, &err), &err);
}

static void set_compacting(ckd_store *store, uint32_t automatic, uint32_t share) {
    ckd_policy p = policy_of(NULL, 2, automatic);
    ckd_error err = {0};
    p.undo_s = 0;
    p.compact_share = share;
    must(ckd_store_set_policy(store, &p, &err), &err);
}

static void check_bits(ckd_store *store, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    must(scene_load(store, &s, &err), &err);
}

/* The share of dead bytes in the run's chunk files, in percent: bytes that only deleted checkpoints used. */
static uint64_t dead_percent(ckd_store *store, const char *run) {
    manifest_set n = {0};
    chunk_waste w;
    assert_int_equal(manifest_set_read(&n, store, NULL), CKD_OK);
    assert_int_equal(chunk_waste_of(&w, &n, run, NULL), CKD_OK);
    manifest_set_free(&n);
    return w.bytes ? 100 * w.dead / w.bytes : 0;
}

/* After its deletions a policy also compacts the run, if the share of dead bytes exceeds the limit. */
static void test_a_policy_compacts(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    ckd_policy p = policy_of(NULL, 2, 1);
    p.compact_share = 100;
    assert_int_equal(ckd_store_set_policy(store, &p, &err), CKD_E_INVALID);
    save_delta(store, 0);
    save_delta(store, 1);
    set_compacting(store, 1, CKD_NO_COMPACTION);
    save_delta(store, 2);
    save_delta(store, 3);
    assert_true(dead_percent(store, SCENE_RUN) > CKD_COMPACT_SHARE);
    assert_int_equal(dead_percent(store, "b"), 0);
    assert_null(strstr(messages, "compacted"));
    set_compacting(store, 1, 99);
    save_delta(store, 4);
    assert_null(strstr(messages, "compacted"));
    set_compacting(store, 1, 0);
    save_base(store, "b", 0); /* the policy deletes nothing of b */
    assert_null(strstr(messages, "compacted"));
    save_delta(store, 5);
    assert_non_null(strstr(messages, "compacted " SCENE_RUN ", by its policy"));
    assert_int_equal(steps_of(store, SCENE_RUN), 48);
    assert_true(dead_percent(store, SCENE_RUN) <= CKD_COMPACT_SHARE);
    check_bits(store, 4);
    check_bits(store, 5);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * A compaction that reaches its limit stops after the checkpoint that exceeded it. Manifests already stop naming old
 * files, and the next call continues.
 */
static void test_compacting_in_parts(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_checkpoint_list *list;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    compact_limits limits = {.waste_run = SCENE_RUN, .dead_percent = 25, .timeout_ms = 20000, .move_max = 0};
    ckd_delete_options at_once = {.struct_size = sizeof(at_once)};
    ckd_error err = {0};
    bool over = false;
    o.max_depth = 128;
    for (uint64_t step = 0; step < 9; step++) {
        save_delta(store, step);
    }
    must(ckd_store_list(&list, store, SCENE_RUN, &err), &err);
    for (size_t i = 0; i < 8; i += 1 + (i == 3)) { /* keep steps 4 and 8 */
        must(ckd_store_delete(store, &list->items[i].id, 1, &at_once, &err), &err);
    }
    ckd_checkpoint_list_free(list);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    uint64_t before = dead_percent(store, SCENE_RUN), calls = 0;
    for (over = true; over && calls < 10; calls++) {
        ckd_compaction *done;
        must(compact_within(&done, &over, store, &o, &limits, &err), &err);
        assert_int_equal(done->count, over); /* the checkpoint that exceeded the limit */
        ckd_compaction_free(done);
    }
    assert_true(calls > 1 && !over && dead_percent(store, SCENE_RUN) < before);
    check_bits(store, 4);
    check_bits(store, 8);
    ckd_store_close(store);
    store_check_clean(*state);
}

typedef struct written {
    uint64_t intents; /* a save creates one, each rewrite of a compaction another */
} written;

static int written_hook(void *context, file_op step, const char *path) {
    written *w = context;
    w->intents += step == FILE_OP_CREATE && strstr(path, "data/i/");
    return 0;
}

/*
 * Saves with a store handle of its own, as the command does. Returns how many rewrites the policy's compaction began.
 */
static uint64_t save_drifting(const char *dir, drift *d, uint64_t step) {
    written w = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    ckd_save_options o = lossy_options(SCENE_RUN, step, CKD_NEAR);
    drift_step(d);
    file_set_fault_hook(written_hook, &w);
    save_drift(store, &o, d);
    file_set_fault_hook(NULL, NULL);
    ckd_store_close(store);
    return w.intents - 1;
}

/*
 * Lossy checkpoints that are far apart need the deleted ones between them, because recoding the difference would make
 * them larger. Once a compaction has found this, the next saves do not try it again, although the share of dead bytes
 * exceeds what the policy allows. A message says so once, and again only if the share was within the limit in between.
 */
static void test_useless_compactions_are_not_repeated(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_policy p = policy_of(NULL, 0, 1);
    ckd_error err = {0};
    drift d = drift_new(64, 64, 8);
    uint64_t idle = 0, told = 0, recovered = 0;
    bool was_above = false;
    p.undo_s = 0;
    p.keep_every = 10;
    must(ckd_store_set_policy(store, &p, &err), &err);
    ckd_store_close(store);
    for (uint64_t step = 1; step <= 60; step++) {
        uint64_t rewrites = save_drifting(*state, &d, step);
        told += strstr(messages, "of its chunk files, more than the 25%") != NULL;
        store = open_store(*state, CKD_OPEN_READ);
        bool above = dead_percent(store, SCENE_RUN) > CKD_COMPACT_SHARE;
        ckd_store_close(store);
        idle += above && rewrites == 0;
        recovered += was_above && !above;
        was_above = above;
    }
    drift_free(&d);
    assert_true(idle >= 10); /* 20 of 60; it would be 5 if each save tried again */
    assert_in_range(told, 1, 1 + recovered);
}

static struct {
    char lock[1100];
    const char *before; /* saver.lock is taken just before this one */
    bool is_near;       /* the deleted files have been removed: the compaction is next */
    file_lock *held;
} saver;

/* Takes a lock, as another process would, once the compaction has begun. */
static int saver_hook(void *context, file_op step, const char *path) {
    (void)context;
    saver.is_near = saver.is_near || (step == FILE_OP_REMOVE && strstr(path, "data/t/" SCENE_RUN));
    if (saver.is_near && step == FILE_OP_LOCK && strstr(path, saver.before)) {
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(lock_acquire(&saver.held, saver.lock, LOCK_EXCLUSIVE, true, 5000, NULL), CKD_OK);
    }
    return 0;
}

static void arm_saver(const char *dir, const char *lock, const char *before) {
    snprintf(saver.lock, sizeof(saver.lock), "%s", store_path_of(dir, lock));
    saver.before = before;
    saver.is_near = false;
    saver.held = NULL;
}

/*
 * The compaction does not wait for readers or savers, and does not fail because of them. Readers only delay the
 * removal of old files.
 */
static void test_compaction_does_not_wait(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_load *load;
    ckd_checkpoint c;
    ckd_error err = {0};
    for (uint64_t step = 0; step < 4; step++) {
        save_delta(store, step);
    }
    set_compacting(store, 1, 0);
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 3, NULL), CKD_OK);
    must(ckd_load_begin(&load, store, &c.id, &err), &err);
    save_delta(store, 4);
    assert_null(strstr(messages, "waiting"));
    assert_int_equal(steps_of(store, SCENE_RUN), 24);
    ckd_load_end(load);
    arm_saver(*state, "data/lock", "data/readers");
    messages[0] = '\0';
    file_set_fault_hook(saver_hook, NULL);
    save_delta(store, 5);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(saver.held);
    lock_release(saver.held);
    assert_null(strstr(messages, "waiting"));
    assert_null(strstr(messages, "not applied"));
    assert_true(dead_percent(store, SCENE_RUN) > CKD_COMPACT_SHARE);
    save_delta(store, 6);
    assert_true(dead_percent(store, SCENE_RUN) <= CKD_COMPACT_SHARE);
    check_bits(store, 5);
    check_bits(store, 6);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * Early manifests are converted before a compaction. A listed one needs the readers' lock, one in the trash the
 * publish lock. The conversion waits for neither lock.
 */
static void check_conversion_does_not_wait(const char *dir, const char *lock, bool deleted) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    ckd_policy p = policy_of(SCENE_RUN, 2, 1);
    ckd_checkpoint c;
    ckd_error err = {0};
    p.undo_s = 0;
    for (uint64_t step = 0; step < 4; step++) {
        scene s = scene_of(step);
        save_delta(store, step);
        s.run = "early";
        must(scene_save(NULL, store, &s, &err), &err);
    }
    must(ckd_store_set_policy(store, &p, &err), &err);
    ckd_store_close(store);
    early_store(dir);
    store = open_store(dir, CKD_OPEN_WRITE);
    for (uint64_t step = 1; step < 4; step++) {
        must(ckd_store_find(&c, store, "early", step, &err), &err);
        must(deleted ? ckd_store_delete(store, &c.id, 1, NULL, &err) : CKD_OK, &err);
    }
    arm_saver(dir, lock, lock);
    messages[0] = '\0';
    file_set_fault_hook(saver_hook, NULL);
    save_delta(store, 4);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(saver.held);
    lock_release(saver.held);
    assert_null(strstr(messages, "waiting"));
    assert_null(strstr(messages, "not applied"));
    save_delta(store, 5);
    assert_non_null(strstr(messages, "compacted " SCENE_RUN ", by its policy"));
    check_bits(store, 5);
    ckd_store_close(store);
}

static void test_conversion_does_not_wait_for_readers(void **state) {
    check_conversion_does_not_wait(*state, "data/readers", false);
}

static void test_conversion_does_not_wait_for_savers(void **state) {
    check_conversion_does_not_wait(*state, "data/lock", true);
}

/* ---- concurrent deletions ---- */

static struct {
    ckd_store *store; /* another handle; NULL once it has deleted */
    uint64_t first, end;
} other;

/* Deletes steps of run a when the first chunk file is read. */
static int other_hook(void *context, file_op step, const char *path) {
    (void)context;
    if (step == FILE_OP_READ && strstr(path, "data/c/") && other.store) {
        ckd_store *store = other.store;
        ckd_error err = {0};
        file_set_fault_hook(NULL, NULL);
        other.store = NULL;
        for (uint64_t at = other.first; at < other.end; at++) {
            ckd_checkpoint c;
            assert_int_equal(ckd_store_find(&c, store, "a", at, NULL), CKD_OK);
            must(ckd_store_delete(store, &c.id, 1, NULL, &err), &err);
        }
    }
    return 0;
}

static ckd_status prune_during_deletions(ckd_prune **plan, ckd_store *store, ckd_store *rival_store,
                                         uint64_t first, uint64_t end, const ckd_policy *p, ckd_error *err) {
    other.store = rival_store;
    other.first = first;
    other.end = end;
    file_set_fault_hook(other_hook, NULL);
    ckd_status status = ckd_store_prune(plan, store, p, NULL, err);
    file_set_fault_hook(NULL, NULL);
    assert_null(other.store);
    return status;
}

/* A prune decides again if checkpoints were deleted while it verified: it deletes by what is listed at that moment. */
static void test_prune_decides_by_the_current_list(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_store *beside = open_store(*state, CKD_OPEN_WRITE);
    ckd_error err = {0};
    ckd_prune *plan;
    save_bases(store, "a", 0, 9);
    ckd_policy p = policy_of(NULL, 5, 0);
    must(prune_during_deletions(&plan, store, beside, 6, 9, &p, &err), &err);
    assert_int_equal(steps_of(store, "a"), 62); /* the newest five of steps 0 to 5 */
    assert_int_equal(plan->deleted, 1);
    assert_int_equal(plan->count, 6);
    assert_int_equal(plan->items[0].kept, 0);
    assert_true(plan->items[1].kept & CKD_KEPT_LAST);
    assert_true(plan->items[5].kept & CKD_KEPT_SAFETY);
    ckd_prune_free(plan);
    p.keep_last = 2; /* the other handle deletes everything that the policy would */
    must(prune_during_deletions(&plan, store, beside, 1, 5, &p, &err), &err);
    assert_int_equal(steps_of(store, "a"), 32);
    assert_int_equal(plan->deleted, 0);
    ckd_prune_free(plan);
    ckd_store_close(beside);
    ckd_store_close(store);
    store_check_clean(*state);
}

static void flip_file_of(ckd_store *store, const char *dir, uint64_t step) {
    ckd_checkpoint c;
    manifest m;
    char hex[CKD_ID_TEXT], below[128];
    assert_int_equal(ckd_store_find(&c, store, "a", step, NULL), CKD_OK);
    assert_int_equal(store_read_manifest(&m, store, "a", step, c.generation, NULL), CKD_OK);
    ckd_id_text(hex, &m.files[0].id);
    snprintf(below, sizeof(below), "data/c/%s.ckd", hex);
    flip_middle(store_path_of(dir, below));
    manifest_free(&m);
}

/* If the newest checkpoints were deleted meanwhile, the prune also verifies those that are now the newest. */
static void test_prune_verifies_the_current_newest(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_store *beside = open_store(*state, CKD_OPEN_WRITE);
    ckd_error err = {0};
    ckd_prune *plan;
    save_bases(store, "a", 0, 6);
    flip_file_of(store, *state, 3);
    ckd_policy p = policy_of(NULL, 1, 0);
    assert_int_equal(prune_during_deletions(&plan, store, beside, 4, 6, &p, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "a@3, which the newest remaining checkpoints need, is damaged"));
    assert_int_equal(steps_of(store, "a"), 15);
    ckd_store_close(beside);
    ckd_store_close(store);
}

/* ---- damaged policies and a lost catalog ---- */

/* While a policy is damaged nothing is deleted. Setting it again repairs this. */
static void test_nothing_is_deleted_while_a_policy_is_damaged(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    ckd_prune *plan;
    ckd_policy_list *list;
    size_t size, stride = under_sanitizer() ? 7 : 1;
    save_bases(store, "a", 0, 4);
    set_policy(store, "b", 2, 1);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "a", 0, NULL), CKD_OK);
    char path[1024];
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "data/n/policy.b.0"));
    unsigned char *note = read_whole_file(path, &size);
    for (size_t bit = 0; bit < 8 * size; bit += stride) {
        note[bit / 8] ^= (unsigned char)(1u << bit % 8);
        write_whole_file(path, note, size);
        if (ckd_store_delete(store, &c.id, 1, NULL, &err) != CKD_E_CORRUPT ||
            !strstr(err.file, "policy.b.0")) {
            fail_msg("bit %zu: %s (%s)", bit, err.message, err.file);
        }
        note[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    write_whole_file(path, note, size / 2);
    ckd_policy p = policy_of("a", 1, 0);
    assert_int_equal(ckd_store_prune(&plan, store, &p, NULL, &err), CKD_E_CORRUPT);
    assert_int_equal(ckd_store_prune(&plan, store, NULL, NULL, &err), CKD_E_CORRUPT);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_CORRUPT);
    ckd_stored_policy got;
    assert_int_equal(ckd_store_policy(&got, store, "b", &err), CKD_E_CORRUPT);
    must(ckd_store_policies(&list, store, &err), &err);
    assert_int_equal(list->items[0].status, CKD_E_CORRUPT);
    assert_string_equal(list->items[0].run, "b");
    ckd_policy_list_free(list);
    set_policy(store, "b", 2, 1);
    must(ckd_store_delete(store, &c.id, 1, NULL, &err), &err);
    free(note);
    ckd_store_close(store);
}

/* A policy still applies after the catalog was lost and rebuilt. */
static void test_policies_survive_a_lost_catalog(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    set_policy(store, NULL, 1, 1);
    save_bases(store, "a", 0, 3);
    ckd_store_close(store);
    assert_int_equal(remove(store_path_of(*state, "catalog.db")), 0);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_WRITE);
    save_base(store, "a", 3);
    assert_int_equal(steps_of(store, "a"), 12);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A program that shows warnings need not show what a policy does all the time. */
static void test_what_policies_do_goes_to_on_info(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_error err = {0};
    set_policy(store, "a", 2, 1);
    ckd_store_close(store);
    o.on_message = on_message;
    o.on_info = on_info;
    must(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_WRITE, &o, &err), &err);
    messages[0] = infos[0] = '\0';
    save_bases(store, "a", 0, 6);
    ckd_store_close(store);
    assert_string_equal(messages, "");
    assert_non_null(strstr(infos, "deleted 1 checkpoint of a, by its policy\n"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_set_and_clear),
        tempdir_test(test_older_callers_get_defaults),
        tempdir_test(test_a_run_follows_its_own_policy),
        tempdir_test(test_after_each_commit),
        tempdir_test(test_what_policies_do_goes_to_on_info),
        tempdir_test(test_automatic_waits_for_a_number_of_deletions),
        tempdir_test(test_chains_are_pruned),
        tempdir_test(test_a_policy_never_makes_a_save_fail),
        tempdir_test(test_nothing_is_deleted_while_the_newest_are_damaged),
        tempdir_test(test_files_are_verified_once),
        tempdir_test(test_damage_since_the_verification),
        tempdir_test(test_a_save_reads_little),
        tempdir_test(test_a_policy_does_not_wait),
        tempdir_test(test_a_policy_compacts),
        tempdir_test(test_compacting_in_parts),
        tempdir_test(test_useless_compactions_are_not_repeated),
        tempdir_test(test_compaction_does_not_wait),
        tempdir_test(test_conversion_does_not_wait_for_readers),
        tempdir_test(test_conversion_does_not_wait_for_savers),
        tempdir_test(test_prune_decides_by_the_current_list),
        tempdir_test(test_prune_verifies_the_current_newest),
        tempdir_test(test_nothing_is_deleted_while_a_policy_is_damaged),
        tempdir_test(test_policies_survive_a_lost_catalog),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("policy", tests, NULL, NULL);
    scratch_end();
    return failed;
}
