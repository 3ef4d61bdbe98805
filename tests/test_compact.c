/* Compaction: the same bits whatever was rewritten, chains as short as asked for, and only what stays is needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/chunk.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static ckd_compaction *compact_with(ckd_store *store, const ckd_compact_options *o) {
    ckd_compaction *done;
    ckd_error err = {0};
    if (ckd_compact(&done, store, o, &err) != CKD_OK) {
        fail_msg("compact: %s (%s)", err.message, err.file);
    }
    return done;
}

static ckd_compact_options options_for(uint32_t max_depth) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = max_depth;
    o.pack_below = CKD_NO_PACKS;
    return o;
}

/* Depths as the catalog has them, and after a rebuild: the files say the same. */
static uint32_t deepest(ckd_store *store) {
    ckd_checkpoint_list *list;
    uint32_t depth = 0;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        depth = list->items[i].depth > depth ? list->items[i].depth : depth;
    }
    ckd_checkpoint_list_free(list);
    return depth;
}

static void check_items(const ckd_compaction *done) {
    for (size_t i = 0; i < done->count; i++) {
        if (done->items[i].left.status != CKD_OK) {
            fail_msg("step %llu was left: %s", (unsigned long long)done->items[i].checkpoint.step,
                     done->items[i].left.message);
        }
    }
    assert_int_equal(done->left, 0);
}

static size_t files_in(const char *dir, const char *folder) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

#define PACK_BELOW (UINT64_C(512) << 10)

/* What was rewritten can be packed, and then there is nothing more to do. */
static void pack_the_rest(ckd_store *store, uint32_t max_depth) {
    ckd_compact_options o = options_for(max_depth);
    ckd_compaction *again = compact_with(store, &o);
    assert_int_equal(again->count, 0);
    ckd_compaction_free(again);
    o.pack_below = PACK_BELOW;
    again = compact_with(store, &o);
    check_items(again);
    for (size_t i = 0; i < again->count; i++) {
        assert_int_equal(again->items[i].why & ~(unsigned)CKD_COMPACT_STALE, CKD_COMPACT_PACK);
        assert_int_equal(again->items[i].depth, again->items[i].checkpoint.depth);
    }
    ckd_compaction_free(again);
    again = compact_with(store, &o);
    assert_int_equal(again->count, 0);
    ckd_compaction_free(again);
}

/* Everything is as it should be: values, depths, files, a catalog made anew, and there is nothing more to do. */
static void check_store(const char *dir, ckd_store *store, const fingerprints *before, size_t count,
                        uint32_t max_depth) {
    assert_int_equal(fingerprints_check(store, before), count);
    assert_true(deepest(store) <= max_depth);
    assert_int_equal(verify_damage(store), 0);
    store_check_clean(dir);
    assert_int_equal(files_in(dir, "data/m"), count);
    pack_the_rest(store, max_depth);
    assert_int_equal(fingerprints_check(store, before), count);
    assert_int_equal(verify_damage(store), 0);
    store_check_clean(dir);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL), CKD_OK);
    store = store_reopen(dir, CKD_OPEN_READ);
    assert_int_equal(fingerprints_check(store, before), count);
    assert_true(deepest(store) <= max_depth);
    ckd_store_close(store);
}

/* ---- chains ---- */

static void make_chain(ckd_store *store, const char *run, ckd_fidelity fidelity, uint64_t first,
                       uint64_t count) {
    drift d = drift_new(96, 64, 7);
    for (uint64_t step = 0; step < first + count; step++, drift_step(&d)) {
        if (step < first) {
            continue;
        }
        ckd_save_options o = lossy_options(run, step, fidelity);
        o.max_load_cost = o.newest_load_cost = 1000;
        save_drift(store, &o, &d);
    }
    drift_free(&d);
}

static void shorten(const char *dir, ckd_fidelity fidelity) {
    ckd_store *store = store_create(dir);
    make_chain(store, "run", fidelity, 0, 24);
    assert_true(fidelity == CKD_EXACT || deepest(store) >= 20);
    fingerprints before = fingerprints_of(store);
    ckd_compact_options o = options_for(5);
    o.max_load_cost = 1000;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 0);
    ckd_compaction_free(done);
    check_store(dir, store, &before, 24, 5);
    fingerprints_free(&before);
}

static void test_near_chains_are_shortened(void **state) {
    shorten(*state, CKD_NEAR);
}
static void test_compact_chains_are_shortened(void **state) {
    shorten(*state, CKD_COMPACT);
}

/* Masters and their casts, copies, what never changes, optimizer steps, ranks: as saves make them. */
static void test_exact_chains_are_shortened(void **state) {
    scene_make(*state, 0, 9);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    assert_true(deepest(store) >= 2);
    fingerprints before = fingerprints_of(store);
    ckd_compact_options o = options_for(1);
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 0 && done->items[0].recoded > 0);
    ckd_compaction_free(done);
    check_store(*state, store, &before, 9, 1);
    fingerprints_free(&before);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    scene next = scene_of(9);
    assert_int_equal(scene_save(NULL, store, &next, NULL), CKD_OK);
    scene_check(store, 0, 10);
    ckd_store_close(store);
}

static void test_ranks_keep_their_files(void **state) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < 6; step++) {
        scene s = scene_of(step);
        assert_int_equal(scene_save_ranks(NULL, store, &s, NULL), CKD_OK);
    }
    fingerprints before = fingerprints_of(store);
    ckd_compact_options o = options_for(1);
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 0);
    ckd_compaction_free(done);
    assert_int_equal(files_in(*state, "data/c"), 12);
    check_store(*state, store, &before, 6, 1);
    fingerprints_free(&before);
}

/* ---- what goes is folded into what stays ---- */

static void fold(const char *dir, ckd_fidelity fidelity, uint64_t every) {
    ckd_store *store = store_create(dir);
    make_chain(store, "run", fidelity, 0, 17);
    ckd_save_options b = lossy_options("branch", 12, fidelity); /* of a step that goes */
    b.parent_run = "run";
    b.parent_step = 11;
    drift d = drift_new(96, 64, 7);
    for (int i = 0; i < 13; i++) {
        drift_step(&d);
    }
    save_drift(store, &b, &d);
    drift_free(&d);
    fingerprints before = fingerprints_of(store);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.run = "run";
    policy.keep_every = every;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    ckd_compact_options o = options_for(16);
    o.policy = &policy;
    o.deletion = &now;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_non_null(done->pruned);
    for (size_t i = 0; i < done->pruned->count; i++) {
        assert_false(done->pruned->items[i].kept & CKD_KEPT_NEEDED);
    }
    size_t left = done->pruned->count - done->pruned->deleted + 1;
    assert_int_equal(left, 16 / every + 1 + 1 + 1); /* multiples of it, the newest two, the branch */
    ckd_compaction_free(done);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    check_store(dir, store, &before, left, 16);
    fingerprints_free(&before);
}

static void test_near_is_folded(void **state) {
    fold(*state, CKD_NEAR, 4);
}
static void test_compact_is_folded(void **state) {
    fold(*state, CKD_COMPACT, 8);
}
static void test_exact_is_folded(void **state) {
    fold(*state, CKD_EXACT, 8);
}

/* The first checkpoint holds what never changes: the oldest that stays takes it over, the others name that one. */
static void test_the_base_goes(void **state) {
    scene_make(*state, 0, 8);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    fingerprints before = fingerprints_of(store);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 4;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    ckd_compact_options o = options_for(16);
    o.policy = &policy;
    o.deletion = &now;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_int_equal(done->pruned->deleted, 4);
    ckd_compaction_free(done);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_checkpoint first, last;
    assert_int_equal(ckd_store_find(&first, store, SCENE_RUN, 4, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&last, store, SCENE_RUN, 7, NULL), CKD_OK);
    assert_true(first.kind == CKD_BASE && last.kind == CKD_DELTA);
    assert_true(last.stored_bytes < first.stored_bytes);
    check_store(*state, store, &before, 4, 16);
    fingerprints_free(&before);
}

/* ---- only looking ---- */

static void test_a_dry_run_is_exact_and_changes_nothing(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_COMPACT, 0, 12);
    char *files = tree_describe(store_path_of(*state, "data/c")),
         *manifests = tree_describe(store_path_of(*state, "data/m"));
    ckd_compact_options o = options_for(4);
    o.pack_below = PACK_BELOW;
    o.dry_run = 1;
    ckd_compaction *would = compact_with(store, &o);
    o.dry_run = 0;
    o.estimate = 1;
    ckd_compaction *about = compact_with(store, &o);
    o.estimate = 0;
    store_check_clean(*state);
    char *files_now = tree_describe(store_path_of(*state, "data/c")),
         *manifests_now = tree_describe(store_path_of(*state, "data/m"));
    assert_string_equal(files_now, files);
    assert_string_equal(manifests_now, manifests);
    free(files_now);
    free(manifests_now);
    free(files);
    free(manifests);
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 4);
    assert_int_equal(would->count, done->count);
    assert_int_equal(about->count, done->count);
    for (size_t i = 0; i < done->count; i++) {
        assert_int_equal(would->items[i].bytes, done->items[i].bytes);
        assert_int_equal(would->items[i].depth, done->items[i].depth);
        assert_int_equal(would->items[i].recoded, done->items[i].recoded);
        assert_true(about->items[i].bytes > done->items[i].bytes / 2 &&
                    about->items[i].bytes < 2 * done->items[i].bytes);
    }
    assert_int_equal(would->after, done->after);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "run", done->items[0].checkpoint.step, NULL), CKD_OK);
    assert_int_equal(c.stored_bytes, done->items[0].bytes);
    ckd_compaction_free(would);
    ckd_compaction_free(about);
    ckd_compaction_free(done);
    ckd_store_close(store);
}

/* ---- cold data ---- */

static uint64_t bytes_of_all(ckd_store *store) {
    ckd_checkpoint_list *list;
    uint64_t sum = 0;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        sum += list->items[i].stored_bytes;
    }
    ckd_checkpoint_list_free(list);
    return sum;
}

static void make_fast(ckd_store *store, uint64_t steps) {
    drift d = drift_new(96, 64, 7);
    for (uint64_t step = 0; step < steps; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("run", step, CKD_EXACT);
        o.codec = CKD_CODEC_LZ4;
        o.max_load_cost = o.newest_load_cost = 1000;
        save_drift(store, &o, &d);
    }
    drift_free(&d);
}

/* The same values in fewer bytes, and never in more; what is not cold, or not exact, stays as it is. */
static void check_recoded(const char *dir, bool by_age) {
    enum { STEPS = 8, NEWEST = 3 };
    ckd_store *store = store_create(dir);
    make_fast(store, STEPS);
    make_chain(store, "near", CKD_NEAR, 0, 4);
    fingerprints before = fingerprints_of(store);
    uint64_t was = bytes_of_all(store);
    ckd_compact_options o = options_for(100);
    o.cold_but_newest = by_age ? 0 : NEWEST;
    o.cold_after_s = by_age ? 3600 : 0;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_int_equal(done->count, by_age ? 0 : STEPS - NEWEST);
    for (size_t i = 0; i < done->count; i++) {
        const ckd_compacted *x = &done->items[i];
        assert_string_equal(x->checkpoint.run, "run");
        assert_true(x->checkpoint.step < STEPS - NEWEST && x->why & CKD_COMPACT_COLD);
        assert_true(x->bytes <= x->checkpoint.stored_bytes && x->recoded > 0);
    }
    assert_true(by_age || bytes_of_all(store) < was);
    ckd_compaction_free(done);
    assert_int_equal(fingerprints_check(store, &before), STEPS + 4);
    assert_int_equal(verify_damage(store), 0);
    uint64_t once = bytes_of_all(store);
    done = compact_with(store, &o); /* there is nothing more to gain */
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    assert_int_equal(bytes_of_all(store), once);
    assert_int_equal(fingerprints_check(store, &before), STEPS + 4);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(dir);
}

static void test_cold_data_is_recoded(void **state) {
    check_recoded(*state, false);
}

static void test_young_data_is_not(void **state) {
    check_recoded(*state, true);
}

/* ---- damage ---- */

/* Flips a bit in the middle of what the checkpoint's file holds. */
static void damage_file_of(const char *dir, const ckd_checkpoint *c) {
    dir_list list;
    bool found = false;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !found; i++) {
        char path[1024];
        snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, "data/c"), list.names[i]);
        chunk *file;
        assert_int_equal(chunk_open(&file, path, NULL), CKD_OK);
        found = memcmp(&file->records[0].tensor->checkpoint, &c->id, sizeof(c->id)) == 0;
        uint64_t at = (88 + file->index_offset) / 2;
        chunk_close(file);
        if (found) {
            size_t size;
            unsigned char *data = read_whole_file(path, &size);
            data[at] ^= 0x10;
            write_whole_file(path, data, size);
            free(data);
        }
    }
    assert_true(found);
    dir_list_free(&list);
}

/* One bit of a file that is to be rewritten: that checkpoint stays, damaged as it is, and the others are done. */
static void test_damage_is_not_laundered(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_EXACT, 0, 1);
    make_chain(store, "a", CKD_COMPACT, 0, 6);
    make_chain(store, "b", CKD_COMPACT, 0, 6);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "a", 4, NULL), CKD_OK);
    ckd_store_close(store);
    damage_file_of(*state, &c);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_compact_options o = options_for(3);
    ckd_compaction *done = compact_with(store, &o);
    assert_true(done->left >= 1);
    size_t fine = 0;
    for (size_t i = 0; i < done->count; i++) {
        const ckd_compacted *x = &done->items[i];
        bool after_damage = strcmp(x->checkpoint.run, "a") == 0 && x->checkpoint.step >= 4;
        assert_true(x->left.status == CKD_OK || after_damage);
        fine += x->left.status == CKD_OK;
        if (x->left.status != CKD_OK) {
            assert_int_equal(x->left.status, CKD_E_CORRUPT);
            assert_true(strlen(x->left.message) > 0);
        }
    }
    assert_true(fine >= 2);
    ckd_compaction_free(done);
    ckd_checkpoint again;
    assert_int_equal(ckd_store_find(&again, store, "a", 4, NULL), CKD_OK);
    assert_int_equal(again.generation, 0);
    assert_true(verify_damage(store) > 0);
    ckd_store_close(store);
}

/* ---- a full disk ---- */

static void test_a_full_disk_is_told_before_it_hurts(void **state) {
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/small", (const char *)*state);
    assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
    if (!scratch_mount(dir, 12ul << 20)) {
        print_message("SKIP: no file system may be mounted here\n");
        return;
    }
    scene_make(dir, 0, 6);
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    fingerprints before = fingerprints_of(store);
    void *filler = calloc(1, 8u << 20);
    char path[600];
    snprintf(path, sizeof(path), "%s/filler", dir);
    write_whole_file(path, filler, 8u << 20);
    free(filler);
    ckd_compact_options o = options_for(1);
    ckd_error err = {0};
    assert_int_equal(ckd_compact(NULL, store, &o, &err), CKD_E_NOSPACE);
    assert_non_null(strstr(err.message, "must be free"));
    store_check_clean(dir);
    assert_int_equal(fingerprints_check(store, &before), 6);
    assert_int_equal(file_remove(path, false, NULL), CKD_OK);
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 0);
    ckd_compaction_free(done);
    check_store(dir, store, &before, 6, 1);
    fingerprints_free(&before);
    scratch_unmount(dir);
}

/* ---- packs ---- */

static ckd_compaction *pack(ckd_store *store) {
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    return done;
}

/* All but the newest four come into one file, and load as before; they go one by one. */
static void test_small_files_become_one(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_NEAR, 0, 24);
    fingerprints before = fingerprints_of(store);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 20);
    ckd_compaction_free(done);
    assert_int_equal(files_in(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 24);
    done = pack(store);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);

    /* A save goes on from it, and there is one file more that is old, and none that is worth packing. */
    make_chain(store, "run", CKD_NEAR, 24, 2);
    assert_int_equal(files_in(*state, "data/c"), 7);
    done = pack(store);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    make_chain(store, "run", CKD_NEAR, 26, 2);
    fingerprints_free(&before);
    before = fingerprints_of(store);
    done = pack(store);
    assert_int_equal(done->count, 24);
    ckd_compaction_free(done);
    assert_int_equal(files_in(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 28);
    assert_int_equal(verify_damage(store), 0);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A lossy checkpoint that nothing builds on. */
static void save_alone(ckd_store *store, uint64_t step) {
    drift d = drift_new(96, 64, (unsigned)step);
    ckd_save_options o = lossy_options("run", step, CKD_NEAR);
    o.base = 1;
    save_drift(store, &o, &d);
    drift_free(&d);
}

/* What most have gone from is written anew. */
static void test_packs_shrink(void **state) {
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < 24; step++) {
        save_alone(store, step);
    }
    fingerprints before = fingerprints_of(store);
    ckd_compaction_free(pack(store));
    assert_int_equal(files_in(*state, "data/c"), 5);
    uint64_t all = bytes_of_all(store);
    ckd_id gone[12];
    for (uint64_t step = 0; step < 12; step++) {
        gone[step] = checkpoint_at(store, "run", step).id;
    }
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    assert_int_equal(ckd_store_delete(store, gone, 12, &now, NULL), CKD_OK);
    ckd_collect_options everything = CKD_COLLECT_OPTIONS_INIT;
    everything.all = 1;
    assert_int_equal(ckd_store_collect(NULL, store, &everything, NULL), CKD_OK);
    assert_int_equal(files_in(*state, "data/c"), 5); /* what stays needs the file */
    assert_int_equal(fingerprints_check(store, &before), 12);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 8);
    ckd_compaction_free(done);
    assert_int_equal(files_in(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 12);
    assert_true(bytes_of_all(store) < all * 11 / 20);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* One file for each rank's; and one checkpoint of them can be copied elsewhere. */
static void test_ranks_are_packed(void **state) {
    ckd_store *store, *other;
    char path[512];
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < 12; step++) {
        scene s = scene_of(step);
        s.base = step % 3 == 0;
        assert_int_equal(scene_save_ranks(NULL, store, &s, NULL), CKD_OK);
    }
    fingerprints before = fingerprints_of(store);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 8);
    ckd_compaction_free(done);
    assert_int_equal(files_in(*state, "data/c"), 2 + 4 * 2);
    scene_check(store, 0, 12);
    snprintf(path, sizeof(path), "%s/copy", (const char *)*state);
    assert_int_equal(ckd_store_open(&other, path, CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    ckd_id one = checkpoint_at(store, SCENE_RUN, 4).id;
    ckd_copy_result *copied;
    assert_int_equal(ckd_copy(&copied, other, store, &one, 1, NULL, NULL), CKD_OK);
    assert_int_equal(copied->files, 2);
    ckd_copy_result_free(copied);
    assert_true(fingerprints_check(other, &before) >= 1);
    assert_int_equal(verify_damage(other), 0);
    assert_int_equal(ckd_copy(&copied, other, store, NULL, 0, NULL, NULL), CKD_OK);
    assert_int_equal(copied->files, 8); /* what the first one brought is there for the others */
    ckd_copy_result_free(copied);
    assert_int_equal(fingerprints_check(other, &before), 12);
    fingerprints_free(&before);
    ckd_store_close(other);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Where the file with a checkpoint's bundle has its heads, and a block's payload. */
static void find_bundle(char path[512], uint64_t *heads, uint64_t *payload, const char *dir,
                        const ckd_id *id) {
    dir_list list;
    bool found = false;
    *heads = *payload = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !found; i++) {
        chunk *c;
        const chunk_part *part;
        snprintf(path, 512, "%s/%s", store_path_of(dir, "data/c"), list.names[i]);
        assert_int_equal(chunk_open_outer(&c, path, NULL), CKD_OK);
        assert_int_equal(chunk_part_of(&part, c, id, NULL), CKD_OK);
        for (size_t k = 0; k < part->count && !found; k++) {
            const record *r = &part->records[k];
            found = r->kind == RECORD_BLOCK && r->bundle && r->stored_size;
            *heads = found ? r->bundle->payload_offset + 20 : 0;
            *payload = r->payload_offset;
        }
        chunk_close(c);
    }
    assert_true(found);
    dir_list_free(&list);
}

static void flip(const char *path, uint64_t at) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[at] ^= 1;
    write_whole_file(path, data, size);
    free(data);
}

/* All but step 5 load; a verification names that, and nothing else. */
static void check_only_five_suffers(ckd_store *store, const fingerprints *before) {
    for (size_t i = 0; i < before->count; i++) {
        ckd_checkpoint c = checkpoint_at(store, "run", i);
        fingerprint now;
        ckd_error err = {0};
        ckd_status status = fingerprint_of(&now, store, &c, &err);
        assert_int_equal(status, i == 5 ? CKD_E_CORRUPT : CKD_OK);
        assert_true(i == 5 || now.hash == before->items[i].hash);
    }
    for (int quick = 0; quick < 2; quick++) {
        ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
        ckd_verify_result *found;
        o.quick = quick;
        assert_int_equal(ckd_store_verify(&found, store, &o, NULL), CKD_OK);
        assert_true(found->damage_count >= 1);
        for (size_t i = 0; i < found->damage_count; i++) {
            assert_int_equal(found->damage[i].checkpoint_count, 1);
            assert_string_equal(found->damage[i].checkpoints[0], "run@5");
        }
        ckd_verify_result_free(found);
    }
}

/* What stays is told, and only that: the others are packed with new ones. */
static void check_others_are_packed(const char *dir, ckd_store *store) {
    for (uint64_t step = 12; step < 16; step++) {
        save_alone(store, step);
    }
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    size_t told = 0;
    for (size_t i = 0; i < done->count; i++) {
        bool five = done->items[i].checkpoint.step == 5;
        told += five;
        assert_int_equal(done->items[i].left.status, five ? CKD_E_CORRUPT : CKD_OK);
    }
    assert_int_equal(done->count - told, 11);
    assert_int_equal(done->left, told);
    ckd_compaction_free(done);
    assert_int_equal(files_in(dir, "data/c"), 2 + 4);
}

/* One bit in what a pack has of a checkpoint, in the heads of its bundle or in a payload, concerns that checkpoint. */
static void test_damage_in_a_pack_stays_with_its_checkpoint(void **state) {
    for (int payload = 0; payload < 2; payload++) {
        char dir[512], path[512];
        uint64_t heads, block;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, payload);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = store_create(dir);
        for (uint64_t step = 0; step < 12; step++) {
            save_alone(store, step);
        }
        ckd_compaction_free(pack(store));
        assert_int_equal(files_in(dir, "data/c"), 5);
        fingerprints before = fingerprints_of(store);
        ckd_checkpoint five = checkpoint_at(store, "run", 5);
        ckd_store_close(store);
        find_bundle(path, &heads, &block, dir, &five.id);
        flip(path, payload ? block : heads);
        store = store_reopen(dir, CKD_OPEN_WRITE);
        check_only_five_suffers(store, &before);
        check_others_are_packed(dir, store);
        fingerprints_free(&before);
        ckd_store_close(store);
    }
}

/* A pack that is damaged is no pack to copy from: what it was stays, and is told. */
static void test_damaged_packs_stay(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_NEAR, 0, 12);
    ckd_compaction_free(pack(store));
    dir_list list;
    char path[512] = "";
    size_t largest = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(*state, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char name[512];
        snprintf(name, sizeof(name), "%s/%s", store_path_of(*state, "data/c"), list.names[i]);
        if (file_bytes(name) > largest) {
            largest = (size_t)file_bytes(name);
            memcpy(path, name, sizeof(path));
        }
    }
    dir_list_free(&list);
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 1;
    write_whole_file(path, data, size);
    free(data);
    make_chain(store, "run", CKD_NEAR, 12, 4); /* enough files for another pack */
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    size_t left = 0;
    for (size_t i = 0; i < done->count; i++) {
        left += done->items[i].left.status == CKD_E_CORRUPT;
    }
    assert_true(left > 0 && left == done->left);
    assert_int_equal(file_bytes(path), size);
    ckd_compaction_free(done);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_near_chains_are_shortened),
        tempdir_test(test_compact_chains_are_shortened),
        tempdir_test(test_exact_chains_are_shortened),
        tempdir_test(test_ranks_keep_their_files),
        tempdir_test(test_near_is_folded),
        tempdir_test(test_compact_is_folded),
        tempdir_test(test_exact_is_folded),
        tempdir_test(test_the_base_goes),
        tempdir_test(test_a_dry_run_is_exact_and_changes_nothing),
        tempdir_test(test_cold_data_is_recoded),
        tempdir_test(test_young_data_is_not),
        tempdir_test(test_damage_is_not_laundered),
        tempdir_test(test_a_full_disk_is_told_before_it_hurts),
        tempdir_test(test_small_files_become_one),
        tempdir_test(test_packs_shrink),
        tempdir_test(test_ranks_are_packed),
        tempdir_test(test_damage_in_a_pack_stays_with_its_checkpoint),
        tempdir_test(test_damaged_packs_stay),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact", tests, NULL, NULL);
    scratch_end();
    return failed;
}
