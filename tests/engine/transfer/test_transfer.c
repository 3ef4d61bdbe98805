/*
 * Copies between stores: the destination gets the same checkpoints and all files that they need. Files are identical
 * except for the store's id, and only missing ones are copied.
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
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/early.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"

/* ---- what is copied ---- */

/* The files are the same, except for the store's id in the header and the header's checksum. */
static void check_same_file(const pair *p, const char *name) {
    char path[128];
    size_t size_a, size_b;
    snprintf(path, sizeof(path), "data/c/%s", name);
    unsigned char *a = read_whole_file(store_path_of(p->a, path), &size_a);
    unsigned char *b = read_whole_file(store_path_of(p->b, path), &size_b);
    assert_int_equal(size_a, size_b);
    assert_memory_equal(a, b, 32);
    assert_memory_not_equal(a + 32, b + 32, 16);
    assert_memory_equal(a + 48, b + 48, 32);
    assert_memory_equal(a + 88, b + 88, size_a - 88);
    free(a);
    free(b);
}

/* Every file is copied and verified. A second copy moves nothing. */
static void test_all_of_a_store(void **state) {
    pair *p = *state;
    dir_list files;
    pair_make_source(p);
    pair_open(p);
    pair_counts(pair_copy(p, NULL, 0, NULL), 4, 5);
    pair_check_lists(p);
    scene_check(p->to, 0, 4);
    pair_check_clean(p);
    ckd_scrub_options week = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *scrubbed;
    week.older_than_s = 7 * 24 * 3600;
    assert_int_equal(ckd_store_scrub(&scrubbed, p->to, &week, NULL), CKD_OK);
    assert_int_equal(scrubbed->found->files, 0); /* they were verified when they arrived */
    ckd_scrub_result_free(scrubbed);
    assert_int_equal(dir_list_read(&files, store_path_of(p->a, DIR_CHUNKS), NULL), CKD_OK);
    assert_int_equal(files.count, 5);
    for (size_t i = 0; i < files.count; i++) {
        check_same_file(p, files.names[i]);
    }
    dir_list_free(&files);
    pair_counts(pair_copy(p, NULL, 0, NULL), 0, 0);

    /* The run continues in both stores. A checkpoint that came from one can be the parent of a delta in the other. */
    ckd_store_close(p->from);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    pair_save(p->from, SCENE_RUN, 4, false);
    pair_counts(pair_copy(p, NULL, 0, NULL), 1, 1);
    pair_save(p->to, SCENE_RUN, 5, false);
    pair_close(p);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    scene_check(p->to, 0, 6);
    store_check_clean(p->b);
}

/* A single checkpoint is copied with all files that it reads, and without any other checkpoint. */
static void test_a_single_checkpoint(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_id second = pair_id(p->from, SCENE_RUN, 2), last = pair_id(p->from, SCENE_RUN, 3);
    ckd_copy_result *r = pair_copy(p, &second, 1, NULL);
    assert_int_equal(r->count, 1);
    assert_int_equal(r->items[0].checkpoint.step, 2);
    assert_int_equal(r->items[0].state, CKD_COPY_MOVED);
    pair_counts(r, 1, 4);
    scene_check(p->to, 2, 1);
    pair_counts(pair_copy(p, &last, 1, NULL), 1, 1);
    scene_check(p->to, 2, 2);
    r = pair_copy(p, &second, 1, NULL);
    assert_int_equal(r->count, 1);
    assert_int_equal(r->items[0].state, CKD_COPY_PRESENT);
    pair_counts(r, 0, 0);
    assert_int_equal(verify_damage(p->to), 0);
}

/* A branch can be copied without the run that it branched off, and keeps its lineage. */
static void test_branches_and_lineage(void **state) {
    pair *p = *state;
    pair_make_source(p);
    ckd_store *store;
    ckd_save_options o = options_of("tuned", 7);
    scene s = scene_of(7);
    o.parent_run = SCENE_RUN;
    o.parent_step = 1;
    o.resumed_from_run = SCENE_RUN;
    o.resumed_from_step = 1;
    o.max_load_cost = 1000;
    s.run = "tuned";
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_save *branch = begin_with(store, &o);
    assert_int_equal(scene_finish(NULL, branch, &s, NULL), CKD_OK);
    ckd_store_close(store);
    pair_open(p);
    ckd_id tuned = pair_id(p->from, "tuned", 7);
    /* Including the records of steps 0 and 1 that it reads. */
    pair_counts(pair_copy(p, &tuned, 1, NULL), 1, 3);
    ckd_checkpoint a, b;
    assert_int_equal(ckd_store_find(&a, p->from, "tuned", 7, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&b, p->to, "tuned", 7, NULL), CKD_OK);
    assert_memory_equal(&a.resumed_from, &b.resumed_from, sizeof(ckd_id));
    assert_memory_equal(&a.parent, &b.parent, sizeof(ckd_id));
    assert_int_equal(scene_load(p->to, &s, NULL), CKD_OK);
    pair_counts(pair_copy(p, NULL, 0, NULL), 4, 5); /* and the other records of those */
    scene_check(p->to, 0, 4);
    assert_int_equal(verify_damage(p->to), 0);
}

static void test_lossy_chains(void **state) {
    pair *p = *state;
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_CREATE, NULL), CKD_OK);
    drift d = drift_new(64, 48, 3);
    for (uint64_t step = 0; step < 4; step++) {
        ckd_save_options o = lossy_options("lossy", step, CKD_COARSE);
        save_drift(store, &o, &d);
        drift_step(&d);
    }
    drift_free(&d);
    ckd_store_close(store);
    pair_open(p);
    pair_counts(pair_copy(p, NULL, 0, NULL), 4, 4);
    pair_check_lists(p);
    static const char *const names[] = {"w", "exp_avg.w", "exp_avg_sq.w"};
    for (uint64_t step = 0; step < 4; step++) {
        for (size_t i = 0; i < 3; i++) {
            size_t size = 64 * 48 * 4;
            void *a = load_whole(p->from, "lossy", step, names[i], size);
            void *b = load_whole(p->to, "lossy", step, names[i], size);
            assert_memory_equal(a, b, size);
            free(a);
            free(b);
        }
        assert_true(tensor_info(p->to, "lossy", step, "w").rel_l2 ==
                    tensor_info(p->from, "lossy", step, "w").rel_l2);
    }
    assert_int_equal(verify_damage(p->to), 0);
}

/* ---- compacted stores ---- */

static void compact(ckd_store *store, const ckd_policy *policy) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_error err = {0};
    o.max_depth = 1;
    o.policy = policy;
    if (ckd_compact(NULL, store, &o, &err) != CKD_OK) {
        fail_msg("compact: %s (%s)", err.message, err.file);
    }
}

/* Checkpoints of different generations are the same checkpoint. Each store may be compacted independently. */
static void test_compacted_stores(void **state) {
    pair *p = *state;
    ckd_store *store;
    ckd_checkpoint there;
    pair_make_source(p);
    pair_open(p);
    ckd_id second = pair_id(p->from, SCENE_RUN, 2);
    pair_counts(pair_copy(p, &second, 1, NULL), 1, 4);
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    compact(store, NULL);
    assert_int_equal(ckd_store_find(&there, store, SCENE_RUN, 3, NULL), CKD_OK);
    assert_true(there.generation > 0);
    ckd_store_close(store);
    ckd_store_close(p->from);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_READ, NULL), CKD_OK);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    assert_int_equal(ckd_store_find(&there, p->to, SCENE_RUN, 3, NULL), CKD_OK);
    assert_int_equal(there.generation, 0);
    scene_check(p->to, 0, 4);
    compact(p->to, NULL);
    pair_counts(pair_copy(p, NULL, 0, NULL), 0, 0);
    scene_check(p->to, 0, 4);

    /* Copies a compacted store, where deleted steps were folded into the remaining ones. */
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 2;
    pair_renew(p);
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    compact(store, &policy);
    ckd_store_close(store);
    pair_close(p);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    scene_check(p->to, 2, 2);
    ckd_checkpoint_list *a, *b;
    assert_int_equal(ckd_store_list(&a, p->from, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_store_list(&b, p->to, NULL, NULL), CKD_OK);
    assert_int_equal(a->count, b->count);
    ckd_checkpoint_list_free(a);
    ckd_checkpoint_list_free(b);
    pair_check_clean(p);
}

/* ---- names ---- */

/* A checkpoint can be copied to another run name. It counts as present under whatever name. */
static void test_other_names(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_copy_options as = CKD_COPY_OPTIONS_INIT;
    ckd_id first = pair_id(p->from, SCENE_RUN, 0), second = pair_id(p->from, SCENE_RUN, 1);
    as.as_run = "copied";
    ckd_copy_result *r = pair_copy(p, &second, 1, &as);
    assert_string_equal(r->items[0].checkpoint.run, "copied");
    pair_counts(r, 1, 2);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, p->to, "copied", 1, NULL), CKD_OK);
    assert_memory_equal(&c.id, &second, sizeof(second));
    scene s = scene_of(1);
    assert_int_equal(scene_load_id(p->to, &second, &s, NULL), CKD_OK);

    pair_counts(pair_copy(p, &second, 1, NULL), 0, 0); /* already there, under another name */
    as.as_run = "again";
    pair_refused(p, &second, 1, &as, CKD_E_EXISTS, "as copied@1");
    as.as_run = "no/name";
    pair_refused(p, &first, 1, &as, CKD_E_INVALID, "'no/name' is not a valid run name");
    ckd_id twice[] = {first, first}, none = {{1}};
    pair_refused(p, twice, 2, NULL, CKD_E_INVALID, "given twice");
    pair_refused(p, &none, 1, NULL, CKD_E_NOT_FOUND, "there is no checkpoint 01");

    /* Stored sizes include the manifests, whose sizes differ by the lengths of the names. */
    ckd_checkpoint a;
    assert_int_equal(ckd_store_find(&a, p->from, SCENE_RUN, 1, NULL), CKD_OK);
    assert_int_equal(c.stored_bytes, a.stored_bytes + strlen("copied") - strlen(SCENE_RUN));
}

static void test_conflicts(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    pair_save(p->to, SCENE_RUN, 1, false);
    char *before = tree_describe(store_path_of(p->b, "data/m"));
    pair_refused(p, NULL, 0, NULL, CKD_E_EXISTS, SCENE_RUN "@1 is another checkpoint");
    char *after = tree_describe(store_path_of(p->b, "data/m"));
    assert_string_equal(before, after);
    free(before);
    free(after);
    pair_check_clean(p);
    ckd_copy_options as = CKD_COPY_OPTIONS_INIT;
    as.as_run = "theirs";
    pair_counts(pair_copy(p, NULL, 0, &as), 4, 5);
    assert_int_equal(verify_damage(p->to), 0);
}

/* Tags are copied with the requested checkpoints. A tag on another checkpoint is a conflict. */
static void test_tags(void **state) {
    pair *p = *state;
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    ckd_checkpoint found;
    o.tags = 1;
    pair_make_source(p);
    pair_open(p);
    ckd_store_close(p->from);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_id first = pair_id(p->from, SCENE_RUN, 0), second = pair_id(p->from, SCENE_RUN, 1);
    assert_int_equal(ckd_store_set_tag(p->from, "start", &first, 0, NULL), CKD_OK);
    assert_int_equal(ckd_store_set_tag(p->from, "best", &second, 0, NULL), CKD_OK);
    ckd_copy_result *r = pair_copy(p, &second, 1, &o);
    assert_int_equal(r->tags, 1); /* step 0 was not requested */
    ckd_copy_result_free(r);
    assert_int_equal(ckd_store_find_tag(&found, p->to, "best", NULL), CKD_OK);
    assert_int_equal(found.step, 1);
    assert_int_equal(ckd_store_find_tag(&found, p->to, "start", NULL), CKD_E_NOT_FOUND);
    assert_int_equal(ckd_store_set_tag(p->to, "start", &second, 0, NULL), CKD_OK);
    pair_refused(p, NULL, 0, &o, CKD_E_EXISTS, "the tag start on another checkpoint");
    assert_int_equal(ckd_store_find(&found, p->to, SCENE_RUN, 3, NULL), CKD_E_NOT_FOUND);
    pair_counts(pair_copy(p, &first, 1, NULL), 1, 1); /* what step 1 does not read of it */
    assert_int_equal(ckd_store_set_tag(p->to, "start", &first, 1, NULL), CKD_OK);
    r = pair_copy(p, NULL, 0, &o);
    assert_int_equal(r->tags, 0);
    ckd_copy_result_free(r);
}

static void test_the_same_store(void **state) {
    pair *p = *state;
    char link[600];
    ckd_error err;
    pair_make_source(p);
    pair_open(p);
    snprintf(link, sizeof(link), "%s/link", p->a);
    assert_int_equal(symlink(store_path_of(p->a, ""), link), 0);
    ckd_store *same;
    assert_int_equal(ckd_store_open(&same, link, CKD_OPEN_WRITE, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_copy(NULL, same, p->from, NULL, &err), CKD_E_INVALID);
    assert_int_equal(ckd_copy(NULL, p->from, p->to, NULL, &err), CKD_E_READ_ONLY);
    ckd_store_close(same);
}

/* ---- dry runs ---- */

static void test_dry_runs_are_exact(void **state) {
    pair *p = *state;
    ckd_copy_options dry = CKD_COPY_OPTIONS_INIT;
    dry.dry_run = 1;
    pair_make_source(p);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_READ, NULL), CKD_OK);
    ckd_copy_result *planned = pair_copy(p, NULL, 0, &dry), *done; /* to a store that does not exist */
    ckd_store_close(p->from);
    pair_open(p);
    ckd_id first = pair_id(p->from, SCENE_RUN, 0);
    pair_counts(pair_copy(p, &first, 1, NULL), 1, 1);
    uint64_t had = folder_bytes(p->b, DIR_CHUNKS) + folder_bytes(p->b, DIR_MANIFESTS);
    char *before = tree_describe(store_path_of(p->b, ""));
    ckd_copy_result *rest = pair_copy(p, NULL, 0, &dry);
    char *after = tree_describe(store_path_of(p->b, ""));
    assert_string_equal(before, after);
    done = pair_copy(p, NULL, 0, NULL);
    uint64_t has = folder_bytes(p->b, DIR_CHUNKS) + folder_bytes(p->b, DIR_MANIFESTS);
    assert_int_equal(rest->bytes, has - had);
    assert_int_equal(planned->bytes, has);
    assert_int_equal(done->bytes, rest->bytes);
    assert_int_equal(planned->files, rest->files + 1);
    assert_int_equal(rest->checkpoints, 3);
    free(before);
    free(after);
    ckd_copy_result_free(planned);
    ckd_copy_result_free(rest);
    ckd_copy_result_free(done);
}

/* ---- checkpoints deleted in the destination ---- */

/* A copy restores checkpoints from the destination's trash instead of transferring them. */
static void test_copies_restore_from_the_trash(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    pair_counts(pair_copy(p, NULL, 0, NULL), 4, 5);
    ckd_store_close(p->to);
    scene_trash(p->b, 2, 2);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_id last = pair_id(p->from, SCENE_RUN, 3);
    ckd_copy_options dry = CKD_COPY_OPTIONS_INIT;
    dry.dry_run = 1;
    for (int real = 0; real < 2; real++) {
        ckd_copy_result *r = pair_copy(p, &last, 1, real ? NULL : &dry);
        assert_int_equal(r->items[r->count - 1].state, CKD_COPY_RESTORED);
        assert_int_equal(r->items[r->count - 1].checkpoint.step, 3);
        pair_counts(r, 0, 0);
    }
    scene_check(p->to, 3, 1);
    pair_counts(pair_copy(p, NULL, 0, NULL), 0, 0);
    pair_check_lists(p);
    scene_check(p->to, 0, 4);

    /* Deleted for good, it is copied again. */
    ckd_store_close(p->to);
    scene_trash(p->b, 3, 1);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    all.all = 1;
    assert_int_equal(ckd_store_collect(NULL, p->to, &all, NULL), CKD_OK);
    pair_counts(pair_copy(p, NULL, 0, NULL), 1, 1);
    pair_check_lists(p);
}

/*
 * Step 3 of the source is in the destination's trash, and another step 3 was saved there since. The others are restored
 * and copied, whether that one is listed or was deleted as well.
 */
static void test_one_that_cannot_be_restored(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_id some[2] = {pair_id(p->from, SCENE_RUN, 2), pair_id(p->from, SCENE_RUN, 3)};
    pair_counts(pair_copy(p, some, 2, NULL), 2, 5);
    ckd_store_close(p->to);
    scene_trash(p->b, 3, 1);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    pair_save(p->to, SCENE_RUN, 3, false);
    for (int deleted = 0; deleted < 2; deleted++) {
        ckd_store_close(p->to);
        scene_trash(p->b, deleted ? 3 : 2, 1);
        if (deleted) {
            scene_trash(p->b, 2, 1);
        }
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
        for (int real = 0; real < 2; real++) {
            ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
            ckd_copy_result *r;
            ckd_error err = {0};
            o.dry_run = !real;
            assert_int_equal(ckd_copy(&r, p->to, p->from, &o, &err), CKD_E_EXISTS);
            assert_non_null(strstr(err.message, SCENE_RUN "@3 was not copied: it is in the trash of"));
            assert_int_equal(r->left, 1);
            assert_int_equal(r->checkpoints, deleted ? 0 : 2);
            assert_int_equal(r->items[2].state, CKD_COPY_RESTORED);
            assert_int_equal(r->items[3].state, CKD_COPY_LEFT);
            ckd_copy_result_free(r);
        }
        scene_check(p->to, 0, deleted ? 3 : 4);
        pair_check_clean(p);
    }
}

typedef struct way {
    ckd_store *to, *from;
    ckd_status status;
} way;

static void *copy_often(void *context) {
    way *w = context;
    for (int i = 0; i < 400 && w->status == CKD_OK; i++) {
        w->status = ckd_copy(NULL, w->to, w->from, NULL, NULL);
    }
    return NULL;
}

/* Copies in opposite directions at the same time do not block each other. */
static void test_opposite_copies_at_once(void **state) {
    pair *p = *state;
    pthread_t thread;
    pair_make_source(p);
    ckd_store_close(p->from);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
    pair_save(p->to, "other", 1, false);
    way there = {p->to, p->from, CKD_OK}, back = {p->from, p->to, CKD_OK};
    assert_int_equal(pthread_create(&thread, NULL, copy_often, &there), 0);
    copy_often(&back);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(there.status, CKD_OK);
    assert_int_equal(back.status, CKD_OK);
    pair_check_lists(p);
    pair_check_clean(p);
}

/* A hook makes both copies wait for each other just before they read the first manifest of their source. */
static pthread_barrier_t meeting;
static _Thread_local const char *source_manifests; /* NULL: this thread has already waited */

static int meeting_hook(void *context, file_op step, const char *path) {
    (void)context;
    if (source_manifests && step == FILE_OP_OPEN && strstr(path, source_manifests)) {
        source_manifests = NULL;
        pthread_barrier_wait(&meeting);
    }
    return 0;
}

static void *copy_once(void *context) {
    way *w = context;
    char manifests[1100];
    snprintf(manifests, sizeof(manifests), "%s/" DIR_MANIFESTS "/", w->from->path);
    source_manifests = manifests;
    w->status = ckd_copy(NULL, w->to, w->from, NULL, NULL);
    assert_null(source_manifests);
    return NULL;
}

/*
 * A manifest of an early version is completed with other manifests of its store. A copy that does this must not hold a
 * lock that the opposite copy needs.
 */
static void test_opposite_copies_of_early_stores(void **state) {
    pair *p = *state;
    pthread_t thread;
    pair_make_source(p);
    ckd_store_close(p->from);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < 3; step++) {
        pair_save(p->to, "other", step, false);
    }
    ckd_store_close(p->to);
    early_store(p->a);
    early_store(p->b);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    way there = {p->to, p->from, CKD_OK}, back = {p->from, p->to, CKD_OK};
    assert_int_equal(pthread_barrier_init(&meeting, NULL, 2), 0);
    file_set_fault_hook(meeting_hook, NULL);
    alarm(300); /* a deadlock would never end */
    assert_int_equal(pthread_create(&thread, NULL, copy_once, &there), 0);
    copy_once(&back);
    assert_int_equal(pthread_join(thread, NULL), 0);
    alarm(0);
    file_set_fault_hook(NULL, NULL);
    pthread_barrier_destroy(&meeting);
    assert_int_equal(there.status, CKD_OK);
    assert_int_equal(back.status, CKD_OK);
    pair_check_lists(p);
    pair_check_clean(p);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_all_of_a_store),
                                       TEST(test_a_single_checkpoint),
                                       TEST(test_branches_and_lineage),
                                       TEST(test_lossy_chains),
                                       TEST(test_compacted_stores),
                                       TEST(test_other_names),
                                       TEST(test_conflicts),
                                       TEST(test_tags),
                                       TEST(test_the_same_store),
                                       TEST(test_dry_runs_are_exact),
                                       TEST(test_copies_restore_from_the_trash),
                                       TEST(test_one_that_cannot_be_restored),
                                       TEST(test_opposite_copies_at_once),
                                       TEST(test_opposite_copies_of_early_stores)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
