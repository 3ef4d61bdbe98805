/*
 * Copies between stores under trouble: damage, full disks, concurrent saves and deletions, failing steps and killed
 * processes. The destination is always consistent, nothing is left over, and the next copy continues.
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
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "engine/store/handle.h"
#include "tests/support/actions.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* ---- damage in the source ---- */

static void flip(const char *path, size_t from_end) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size - from_end] ^= 4;
    write_whole_file(path, data, size);
    free(data);
}

/* The chunk file of a step that was saved by one rank. */
static pathname file_of(const pair *p, uint64_t step) {
    manifest m;
    assert_int_equal(store_read_manifest(&m, p->from, SCENE_RUN, step, 0, NULL), CKD_OK);
    ckd_id file = m.files[0].id;
    manifest_free(&m);
    return path_chunk(store_path_of(p->a, ""), &file, "");
}

/*
 * Damage in the payload, the index and the header. The error names the file, and only the checkpoints before it are
 * copied.
 */
static void test_damage_in_the_source(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    pathname file = file_of(p, 1);
    const char *path = file.text;
    size_t size = file_bytes(path), places[] = {size - 40, size - 400, 100, 10};
    for (size_t i = 0; i < 4; i++) {
        ckd_error err = {0};
        flip(path, places[i]);
        assert_int_equal(ckd_copy(NULL, p->to, p->from, NULL, &err), CKD_E_CORRUPT);
        assert_non_null(strstr(err.message, SCENE_RUN "@1 in "));
        assert_string_equal(err.file, path);
        ckd_checkpoint_list *list;
        assert_int_equal(ckd_store_list(&list, p->to, NULL, NULL), CKD_OK);
        assert_int_equal(list->count, 1);
        ckd_checkpoint_list_free(list);
        pair_check_clean(p);
        flip(path, places[i]);
    }
    assert_int_equal(rename(path, store_path_of(p->a, "gone")), 0);
    ckd_copy_result_free(pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 3, "is damaged"));
    assert_int_equal(rename(store_path_of(p->a, "gone"), path), 0);
    pair_counts(pair_copy(p, NULL, 0, NULL), 3, 4);
    scene_check(p->to, 0, 4);
}

/* Runs that branch off at different steps. Only the damaged checkpoint and those that build on it are left out. */
static void test_damage_leaves_out_only_dependents(void **state) {
    pair *p = *state;
    pair_make_source(p);
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    for (uint64_t step = 1; step < 4; step++) { /* run ~2 branches off step 0 */
        pair_save(store, SCENE_RUN "~2", step, false);
    }
    scene alone = scene_of(7);
    alone.run = "other";
    alone.base = true;
    assert_int_equal(scene_save(NULL, store, &alone, NULL), CKD_OK);
    ckd_id two = pair_id(store, SCENE_RUN, 2), other = pair_id(store, "other", 7);
    assert_int_equal(ckd_store_set_tag(store, "lost", &two, 0, NULL), CKD_OK);
    assert_int_equal(ckd_store_set_tag(store, "kept", &other, 0, NULL), CKD_OK);
    ckd_store_close(store);
    pair_open(p);
    pathname file = file_of(p, 1);
    flip(file.text, file_bytes(file.text) / 2);
    ckd_copy_options with_tags = CKD_COPY_OPTIONS_INIT;
    with_tags.tags = 1;
    ckd_copy_result *r;
    ckd_error err;
    assert_int_equal(ckd_copy(&r, p->to, p->from, &with_tags, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "3 checkpoints were not copied; the first: " SCENE_RUN "@1 in "));
    for (size_t i = 0; i < r->count; i++) {
        const ckd_copied *c = &r->items[i];
        bool left = strcmp(c->checkpoint.run, SCENE_RUN) == 0 && c->checkpoint.step > 0;
        assert_int_equal(c->state, left ? CKD_COPY_LEFT : CKD_COPY_MOVED);
        assert_true(!left || strstr(c->left.message, "is damaged"));
    }
    assert_int_equal(r->checkpoints, 5);
    assert_int_equal(r->files, 5);
    ckd_copy_result_free(r);
    ckd_checkpoint found;
    assert_int_equal(ckd_store_find_tag(&found, p->to, "kept", NULL), CKD_OK);
    assert_int_equal(ckd_store_find_tag(&found, p->to, "lost", NULL), CKD_E_NOT_FOUND);
    scene_check(p->to, 0, 1);
    assert_int_equal(scene_load(p->to, &alone, NULL), CKD_OK);
    pair_check_clean(p);
    assert_int_equal(folder_count(p->b, "data/x"), 0);

    /* If a manifest cannot be read, the checkpoints that build on it are copied nevertheless. */
    flip(file.text, file_bytes(file.text) / 2);
    pair_close(p);
    pair_renew(p);
    pair_open(p);
    pathname unread = path_manifest(store_path_of(p->a, ""), SCENE_RUN "~2", 2, 0);
    flip(unread.text, 20);
    ckd_id third = pair_id(p->from, SCENE_RUN "~2", 3), first = pair_id(p->from, SCENE_RUN, 3);
    ckd_id both[] = {third, first};
    r = pair_copy(p, both, 2, NULL);
    assert_int_equal(r->checkpoints, 2);
    ckd_copy_result_free(r);
    scene_check(p->to, 3, 1);
    assert_int_equal(verify_damage(p->to), 0);
    pair_check_clean(p);
}

/* ---- packs ---- */

/* Makes bases, or a chain, and has a compaction pack them into one file, except for the newest four. */
static void make_pack(const pair *p, ckd_id *ids, size_t count, bool bases) {
    ckd_store *store = store_create(p->a);
    drift d = drift_new(64, 48, 0);
    for (uint64_t step = 0; step < count; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.base = bases;
        if (bases) {
            drift_free(&d);
            d = drift_new(64, 48, (unsigned)step);
        }
        save_drift(store, &o, &d);
        drift_step(&d);
        ids[step] = pair_id(store, "run", step);
    }
    drift_free(&d);
    assert_int_equal(ckd_compact(NULL, store, NULL, NULL), CKD_OK);
    ckd_store_close(store);
}

/* The position of a byte in the file that belongs to a checkpoint's payloads. */
static uint64_t place_in(const char *path, const ckd_id *id) {
    chunk *c;
    uint64_t at = 0;
    assert_int_equal(chunk_open_bundled(&c, path, NULL), CKD_OK);
    for (size_t i = 0; i < c->outer_count; i++) {
        const record *r = &c->outer[i];
        at = memcmp(&r->tensor->checkpoint, id, sizeof(*id)) == 0 ? r->payload_offset + r->stored_size / 2
                                                                  : at;
    }
    chunk_close(c);
    assert_true(at > 0);
    return at;
}

static pathname pack_in(const char *dir, ckd_store *store, const ckd_id *one) {
    ckd_checkpoint_list *list;
    pathname path = {""};
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        manifest m;
        if (memcmp(&c->id, one, sizeof(*one)) == 0) {
            assert_int_equal(store_read_manifest(&m, store, c->run, c->step, c->generation, NULL), CKD_OK);
            path = path_chunk(store_path_of(dir, ""), &m.files[0].id, "");
            manifest_free(&m);
        }
    }
    ckd_checkpoint_list_free(list);
    assert_true(path.text[0]);
    return path;
}

/*
 * Damage in one checkpoint's part of a pack is reported for that checkpoint alone, in whatever order they are copied.
 * Once repaired, it is copied too.
 */
static void test_damage_in_a_pack(void **state) {
    pair *p = *state;
    enum { COUNT = 12, HURT = 3 };
    ckd_id ids[COUNT];
    make_pack(p, ids, COUNT, true);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    pathname pack = pack_in(p->a, p->from, &ids[HURT]);
    uint64_t at = file_bytes(pack.text) - place_in(pack.text, &ids[HURT]);
    flip(pack.text, at);
    ckd_copy_result_free(pair_leaves(p, &ids[HURT], 1, CKD_E_CORRUPT, 1, "run@3 in "));
    assert_int_equal(folder_count(p->b, "data/c"), 0);
    assert_int_equal(folder_count(p->b, "data/x"), 0);
    pair_counts(pair_copy(p, &ids[5], 1, NULL), 1, 1); /* brings its part of the pack */
    ckd_copy_result *r = pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 1, "run@3 in ");
    assert_int_equal(r->checkpoints, COUNT - 2);
    assert_int_equal(r->items[HURT].state, CKD_COPY_LEFT);
    ckd_copy_result_free(r);
    assert_int_equal(fingerprints_check(p->to, &before), COUNT - 1);
    pair_check_clean(p);

    flip(pack.text, at); /* undo the damage, as a repair would */
    pair_counts(pair_copy(p, NULL, 0, NULL), 1, 1);
    assert_int_equal(fingerprints_check(p->to, &before), COUNT);
    assert_int_equal(verify_damage(p->to), 0);
    pair_check_clean(p);
    fingerprints_free(&before);
}

/*
 * Deltas in a pack build on a record of a deleted checkpoint, in the same file. If that is damaged, none of them is
 * copied.
 */
static void test_damage_below_deltas_of_a_pack(void **state) {
    pair *p = *state;
    enum { COUNT = 12 };
    ckd_id ids[COUNT];
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    ckd_store *store;
    make_pack(p, ids, COUNT, false);
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &ids[0], 1, &now, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_store_close(store);
    pair_open(p);
    pathname pack = pack_in(p->a, p->from, &ids[1]);
    uint64_t at = file_bytes(pack.text) - place_in(pack.text, &ids[0]);
    flip(pack.text, at);
    size_t left = 0; /* those that cannot be loaded */
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, p->from, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        fingerprint one;
        left += fingerprint_of(&one, p->from, &list->items[i], NULL) != CKD_OK;
    }
    ckd_checkpoint_list_free(list);
    assert_true(left > 0);
    ckd_copy_result *r;
    assert_int_equal(ckd_copy(&r, p->to, p->from, NULL, NULL), CKD_E_CORRUPT);
    assert_true(r->checkpoints <= COUNT - 1 - left);
    ckd_copy_result_free(r);
    assert_int_equal(verify_damage(p->to), 0);
    pair_check_clean(p);
    flip(pack.text, at); /* undo the damage, as a repair would */
    r = pair_copy(p, NULL, 0, NULL);
    assert_true(r->checkpoints >= left);
    ckd_copy_result_free(r);
    assert_int_equal(verify_damage(p->to), 0);
    pair_check_clean(p);
}

/* A pack that is copied with the damage of one of its checkpoints does not count as verified. */
static void test_a_copied_pack_with_damage_is_scrubbed(void **state) {
    pair *p = *state;
    enum { COUNT = 12, HURT = 3 };
    ckd_id ids[COUNT];
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    make_pack(p, ids, COUNT, true);
    pair_open(p);
    pathname pack = pack_in(p->a, p->from, &ids[HURT]);
    flip(pack.text, file_bytes(pack.text) - place_in(pack.text, &ids[HURT]));
    ckd_copy_result_free(pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 1, "run@3 in "));
    o.older_than_s = 3600;
    assert_int_equal(ckd_store_scrub(&r, p->to, &o, NULL), CKD_OK);
    assert_int_equal(r->found->files, 1);
    assert_int_equal(r->found->damage_count, 1);
    ckd_scrub_result_free(r);
}

/* Each store has a pack with other damage. What is intact in the destination must not be replaced. */
static void test_packs_that_are_damaged_in_both_stores(void **state) {
    pair *p = *state;
    enum { COUNT = 12, HURT_HERE = 3, HURT_THERE = 5 };
    ckd_id ids[COUNT];
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    make_pack(p, ids, COUNT, true);
    pair_open(p);
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    fingerprints before = fingerprints_of(p->to);
    pathname from = pack_in(p->a, p->from, &ids[0]), to = pack_in(p->b, p->to, &ids[0]);
    assert_int_equal(ckd_store_delete(p->to, &ids[HURT_HERE], 1, &now, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, p->to, NULL, NULL), CKD_OK);
    flip(to.text, file_bytes(to.text) - place_in(to.text, &ids[HURT_HERE]));
    uint64_t at = file_bytes(from.text) - place_in(from.text, &ids[HURT_THERE]);
    flip(from.text, at);
    ckd_copy_result_free(pair_leaves(p, NULL, 0, CKD_E_CORRUPT, 1, "is damaged"));
    assert_int_equal(fingerprints_check(p->to, &before), COUNT - 1);
    assert_int_equal(folder_count(p->b, "data/x"), 0);
    flip(from.text, at); /* undo the damage, as a repair would */
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    assert_int_equal(fingerprints_check(p->to, &before), COUNT);
    assert_int_equal(verify_damage(p->to), 0);
    assert_int_equal(folder_count(p->b, "data/q"), 1); /* the damaged pack was put aside */
    fingerprints_free(&before);
}

/*
 * If few checkpoints of a pack are copied, its records are read before the files are chosen. A checkpoint whose pack
 * is lost is left out then.
 */
static void test_a_lost_pack(void **state) {
    pair *p = *state;
    enum { COUNT = 12, HURT = 3 };
    ckd_id ids[COUNT];
    make_pack(p, ids, COUNT, true);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    assert_int_equal(unlink(pack_in(p->a, p->from, &ids[HURT]).text), 0);
    ckd_id both[] = {ids[HURT], ids[COUNT - 1]};
    ckd_copy_result *r = pair_leaves(p, both, 2, CKD_E_CORRUPT, 1, "run@3 in ");
    assert_int_equal(r->checkpoints, 1);
    ckd_copy_result_free(r);
    assert_int_equal(fingerprints_check(p->to, &before), 1);
    pair_check_clean(p);
    fingerprints_free(&before);
}

/* ---- continuing a cancelled copy ---- */

typedef struct stopper {
    uint64_t after, first, last, total;
    bool begun;
} stopper;

static int stop(void *context, uint64_t done, uint64_t total) {
    stopper *s = context;
    s->first = s->begun ? s->first : done;
    s->begun = true;
    s->last = done;
    s->total = total;
    return done >= s->after;
}

/*
 * Cancels the copy of a large file halfway. The next copy does not transfer what arrived again, unless it was damaged.
 */
static void test_cancelled_copy_continues(void **state) {
    enum { N = 1 << 21 };
    pair *p = *state;
    uint64_t n = N;
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_CREATE, NULL), CKD_OK);
    uint8_t *noise = random_bits(N, 9);
    ckd_save *big = begin_save(store, "big", 1);
    add_tensor(big, "t", CKD_U8, 1, &n, NULL, noise);
    commit_save(big);
    ckd_store_close(store);
    pair_open(p);
    for (int damaged = 0; damaged < 2; damaged++) {
        stopper s = {.after = N / 2};
        ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
        o.on_progress = stop;
        o.progress_context = &s;
        pair_refused(p, NULL, 0, &o, CKD_E_CANCELLED, "the next copy continues");
        assert_true(s.last >= N / 2 && s.last < N);
        assert_int_equal(folder_count(p->b, DIR_INCOMING), 2);
        assert_int_equal(folder_count(p->b, DIR_CHUNKS), 0);
        dir_list list;
        assert_int_equal(dir_list_read(&list, store_path_of(p->b, DIR_INCOMING), NULL), CKD_OK);
        char path[256];
        snprintf(path, sizeof(path), "data/x/%s", list.names[1]);
        dir_list_free(&list);
        if (damaged) {
            flip(store_path_of(p->b, path), 1000);
        }
        ckd_store_close(p->to); /* recovery keeps incomplete files */
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
        stopper all = {.after = UINT64_MAX};
        o.progress_context = &all;
        pair_counts(pair_copy(p, NULL, 0, &o), 1, 1);
        assert_true(all.first >= N / 2);
        assert_int_equal(all.last, all.total);
        void *back = load_whole(p->to, "big", 1, "t", N);
        assert_memory_equal(back, noise, N);
        free(back);
        pair_check_clean(p);
        ckd_id id = pair_id(p->to, "big", 1);
        ckd_delete_options now = {.struct_size = sizeof(now)};
        assert_int_equal(ckd_store_delete(p->to, &id, 1, &now, NULL), CKD_OK);
        assert_int_equal(ckd_store_collect(NULL, p->to, NULL, NULL), CKD_OK);
        assert_int_equal(folder_count(p->b, DIR_CHUNKS), 0);
    }
    free(noise);
}

/* Incomplete files of a copy that nobody continues are removed after a week. */
static void test_abandoned_copies_are_removed(void **state) {
    pair *p = *state;
    stopper s = {.after = 1};
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    o.on_progress = stop;
    o.progress_context = &s;
    pair_make_source(p);
    pair_open(p);
    pair_refused(p, NULL, 0, &o, CKD_E_CANCELLED, "cancelled");
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(p->b, DIR_INCOMING), NULL), CKD_OK);
    assert_int_equal(list.count, 2);
    for (int days = 6; days <= 8; days += 2) {
        char path[256];
        struct timespec old[2] = {{.tv_sec = time(NULL) - days * 86400},
                                  {.tv_sec = time(NULL) - days * 86400}};
        snprintf(path, sizeof(path), "data/x/%s", list.names[1]);
        assert_int_equal(utimensat(AT_FDCWD, store_path_of(p->b, path), old, 0), 0);
        ckd_store_close(p->to);
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
        assert_int_equal(folder_count(p->b, DIR_INCOMING), days == 6 ? 2 : 0);
    }
    dir_list_free(&list);
}

/* ---- concurrent use ---- */

typedef struct meddler {
    pair *p;
    ckd_store *other; /* another handle of the destination */
    ckd_store *source;
    int calls;
} meddler;

/* While the last checkpoint is copied, others delete, undelete, save and copy. */
static int meddle(void *context, uint64_t done, uint64_t total) {
    meddler *m = context;
    ckd_id first = pair_id(m->p->from, SCENE_RUN, 0);
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    ckd_error err;
    (void)total;
    all.all = 1;
    if (m->calls++ || !done) {
        return 0;
    }
    assert_int_equal(ckd_store_delete(m->other, &first, 1, NULL, &err), CKD_OK);
    assert_int_equal(ckd_store_undelete(m->other, &first, 1, &err), CKD_OK);
    assert_int_equal(ckd_copy(NULL, m->other, m->p->from, NULL, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "another copy"));
    ckd_id gone = pair_id(m->source, "other", 0);
    assert_int_equal(ckd_store_delete(m->source, &gone, 1, NULL, &err), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, m->source, &all, &err), CKD_E_BUSY);
    pair_save(m->other, "beside", 1, false);
    pair_save(m->source, SCENE_RUN, 9, false);
    return 0;
}

/* During a copy, others save and delete in both stores. A second copy into the same store is refused. */
static void test_concurrent_saves_and_deletions(void **state) {
    pair *p = *state;
    ckd_store_options quick = CKD_STORE_OPTIONS_INIT;
    quick.lock_timeout_ms = 20;
    pair_make_source(p);
    pair_open(p);
    ckd_id first = pair_id(p->from, SCENE_RUN, 0), last = pair_id(p->from, SCENE_RUN, 3);
    pair_counts(pair_copy(p, &first, 1, NULL), 1, 1);
    meddler m = {.p = p};
    assert_int_equal(ckd_store_open(&m.other, store_path_of(p->b, ""), CKD_OPEN_WRITE, &quick, NULL), CKD_OK);
    assert_int_equal(ckd_store_open(&m.source, store_path_of(p->a, ""), CKD_OPEN_WRITE, &quick, NULL),
                     CKD_OK);
    pair_save(m.source, "other", 0, false);
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    o.on_progress = meddle;
    o.progress_context = &m;
    pair_counts(pair_copy(p, &last, 1, &o), 1, 4);
    assert_true(m.calls > 0);
    ckd_store_close(m.other);
    ckd_store_close(m.source);
    scene_check(p->to, 0, 1);
    scene_check(p->to, 3, 1);
    scene beside = scene_of(1);
    beside.run = "beside";
    assert_int_equal(scene_load(p->to, &beside, NULL), CKD_OK);
    pair_close(p);
    pair_open(p);
    pair_check_clean(p);
    pair_counts(pair_copy(p, NULL, 0, NULL), 3,
                4); /* steps 1, 2 and 9: what step 3 does not read of the first two, and a file */
}

/* While the first file is copied, another copy brings all checkpoints from a second source. */
static int overtake(void *context, uint64_t done, uint64_t total) {
    meddler *m = context;
    ckd_error err = {0};
    (void)done;
    (void)total;
    if (!m->calls++ && ckd_copy(NULL, m->other, m->source, NULL, &err) != CKD_OK) {
        fail_msg("the other copy: %s (%s)", err.message, err.file);
    }
    return 0;
}

/* Two copies of the same checkpoints from different sources. The slower one finds nothing left to do. */
static void test_two_sources(void **state) {
    pair *p = *state;
    meddler m = {.p = p};
    char *folder = tempdir_create();
    pair_make_source(p);
    pair_open(p);
    assert_int_equal(scene_open(&m.source, folder, CKD_OPEN_CREATE, NULL), CKD_OK);
    assert_int_equal(ckd_copy(NULL, m.source, p->from, NULL, NULL), CKD_OK);
    assert_int_equal(scene_open(&m.other, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    o.on_progress = overtake;
    o.progress_context = &m;
    ckd_copy_result *r = pair_copy(p, NULL, 0, &o);
    assert_int_equal(r->checkpoints + r->files + r->bytes, 0);
    for (size_t i = 0; i < r->count; i++) {
        assert_int_equal(r->items[i].state, CKD_COPY_PRESENT);
    }
    ckd_copy_result_free(r);
    ckd_store_close(m.other);
    ckd_store_close(m.source);
    pair_check_lists(p);
    scene_check(p->to, 0, 4);
    pair_check_clean(p);
    tempdir_remove(folder);
}

/* ---- failing steps, killed processes ---- */

typedef struct fault {
    unsigned long at, seen, hits; /* at: number of the step in the destination, from 1 */
    int answer;                   /* errno; 0: kill the process */
    bool lasting;
    const char *where;
} fault;

static int fault_hook(void *context, file_op step, const char *path) {
    fault *f = context;
    if (!strstr(path, f->where) || (!f->answer && (step == FILE_OP_READ || step == FILE_OP_OPEN))) {
        return 0;
    }
    bool now = ++f->seen == f->at || (f->lasting && f->hits);
    if (now && !f->answer) {
        raise(SIGKILL);
    }
    f->hits += now;
    return now ? f->answer : 0;
}

static size_t check_rest(pair *p) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, p->to, NULL, NULL), CKD_OK);
    size_t count = list->count;
    ckd_checkpoint_list_free(list);
    scene_check(p->to, 0, count);
    ckd_copy_result *r = pair_copy(p, NULL, 0, NULL);
    assert_int_equal(r->checkpoints, 4 - count);
    ckd_copy_result_free(r);
    pair_check_lists(p);
    return count;
}

/* Kills the copy at every third step that changes the destination, and then copies again. */
static void test_killed_anywhere(void **state) {
    pair *p = *state;
    unsigned long stride = 3, killed = 0, committed[5] = {0};
    pair_make_source(p);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_READ, NULL), CKD_OK);
    for (bool finished = false; !finished; killed++) {
        fault f = {.at = 1 + killed * stride, .where = p->b};
        int ended;
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            ckd_store *from, *to = NULL;
            ckd_error err = {0};
            file_set_fault_hook(fault_hook, &f);
            bool done = scene_open(&from, p->a, CKD_OPEN_READ, &err) == CKD_OK &&
                        scene_open(&to, p->b, CKD_OPEN_CREATE, &err) == CKD_OK &&
                        ckd_copy(NULL, to, from, NULL, &err) == CKD_OK;
            if (!done) {
                fprintf(stderr, "in the child: %s (%s)\n", err.message, err.file);
            }
            ckd_store_close(from);
            ckd_store_close(to);
            _exit(done ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &ended, 0), pid);
        finished = WIFEXITED(ended);
        assert_true(finished ? WEXITSTATUS(ended) == 0 : WTERMSIG(ended) == SIGKILL);
        ckd_error err = {0};
        if (scene_open(&p->to, p->b, CKD_OPEN_CREATE, &err) != CKD_OK) {
            fail_msg("%s (%s)", err.message, err.file);
        }
        committed[check_rest(p)]++;
        pair_check_clean(p);
        pair_renew(p);
    }
    assert_true(killed * stride > 120);
    for (size_t i = 0; i < 5; i++) {
        assert_true(committed[i] > 0);
    }
}

/*
 * Every `stride`-th step fails, once or from then on. The call reports the error, the destination is consistent, and
 * the next copy succeeds.
 */
static void fail_everywhere(pair *p, int answer, bool lasting, unsigned long stride) {
    bool more = true;
    for (unsigned long at = 1; more; at += stride) {
        fault f = {.at = at, .answer = answer, .lasting = lasting, .where = p->b};
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
        size_t descriptors = open_descriptors();
        ckd_error err = {0};
        file_set_fault_hook(fault_hook, &f);
        ckd_status status = ckd_copy(NULL, p->to, p->from, NULL, &err);
        file_set_fault_hook(NULL, NULL);
        assert_true(open_descriptors() <= descriptors); /* fewer if the catalog's file was closed */
        bool unread = status == CKD_E_STATE && strstr(err.message, "its manifest cannot be read");
        if (status != CKD_OK &&
            (!f.hits || !(unread || status == (answer == EIO ? CKD_E_IO : CKD_E_NOSPACE)))) {
            fail_msg("step %lu: %s: %s (%s)", at, ckd_status_name(status), err.message, err.file);
        }
        more = f.hits > 0;
        ckd_copy_result_free(pair_copy(p, NULL, 0, NULL)); /* on the same handle */
        pair_close(p);
        pair_open(p);
        scene_check(p->to, 0, 4);
        pair_check_lists(p);
        pair_check_clean(p);
        pair_renew(p);
    }
}

static void test_failing_anywhere(void **state) {
    pair *p = *state;
    unsigned long factor = under_sanitizer() ? 6 : 1;
    pair_make_source(p);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_READ, NULL), CKD_OK);
    fail_everywhere(p, EIO, false, 7 * factor);
    fail_everywhere(p, EIO, true, 11 * factor);
    fail_everywhere(p, ENOSPC, false, 13 * factor);
}

/* A copy that does not fit on the disk leaves nothing behind. */
static void test_a_full_disk(void **state) {
    pair *p = *state;
    fault f = {.at = 3, .answer = ENOSPC, .lasting = true, .where = "data/x/"};
    pair_make_source(p);
    pair_open(p);
    file_set_fault_hook(fault_hook, &f);
    pair_refused(p, NULL, 0, NULL, CKD_E_NOSPACE, "No space left");
    file_set_fault_hook(NULL, NULL);
    pair_close(p);
    pair_open(p);
    assert_int_equal(folder_count(p->b, DIR_INCOMING), 0);
    check_rest(p);
    pair_check_clean(p);
}

/* Chunk files that already have their final names are removed if no manifest can be written. */
static void test_full_disk_at_the_manifests(void **state) {
    pair *p = *state;
    fault f = {.at = 1, .answer = ENOSPC, .lasting = true, .where = "data/m/.tmp-"};
    pair_make_source(p);
    pair_open(p);
    file_set_fault_hook(fault_hook, &f);
    pair_refused(p, NULL, 0, NULL, CKD_E_NOSPACE, "No space left");
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(folder_count(p->b, DIR_CHUNKS), 0);
    pair_check_clean(p);
    check_rest(p);
    pair_check_clean(p);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_damage_in_the_source),
                                       TEST(test_damage_leaves_out_only_dependents),
                                       TEST(test_damage_in_a_pack),
                                       TEST(test_damage_below_deltas_of_a_pack),
                                       TEST(test_packs_that_are_damaged_in_both_stores),
                                       TEST(test_a_copied_pack_with_damage_is_scrubbed),
                                       TEST(test_a_lost_pack),
                                       TEST(test_cancelled_copy_continues),
                                       TEST(test_abandoned_copies_are_removed),
                                       TEST(test_concurrent_saves_and_deletions),
                                       TEST(test_two_sources),
                                       TEST(test_killed_anywhere),
                                       TEST(test_failing_anywhere),
                                       TEST(test_a_full_disk),
                                       TEST(test_full_disk_at_the_manifests)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
