/*
 * Compaction: it changes no value, makes chains as short as requested, and makes the remaining checkpoints independent
 * of deleted ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

/* The greatest depth in the catalog. Callers also check it after a rebuild, when it comes from the files. */
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

/* A further compaction finds nothing to do, except to pack small files if it is asked to. */
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

/* Checks values, depths, files and a rebuilt catalog, and that there is nothing left to compact. */
static void check_store(const char *dir, ckd_store *store, const fingerprints *before, size_t count,
                        uint32_t max_depth) {
    assert_int_equal(fingerprints_check(store, before), count);
    assert_true(deepest(store) <= max_depth);
    assert_int_equal(verify_damage(store), 0);
    store_check_clean(dir);
    assert_int_equal(folder_count(dir, "data/m"), count);
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

/* ---- shortening chains ---- */

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
static void test_coarse_chains_are_shortened(void **state) {
    shorten(*state, CKD_COARSE);
}

/*
 * With everything that saves produce: masters and their rounded copies, copies, unchanged tensors, optimizer steps,
 * ranks.
 */
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
    assert_int_equal(folder_count(*state, "data/c"), 12);
    check_store(*state, store, &before, 6, 1);
    fingerprints_free(&before);
}

/* ---- folding deleted checkpoints into the remaining ones ---- */

/* Compacts with a policy, which deletes at once and without undo. */
static ckd_compaction *compact_to(ckd_store *store, const ckd_policy *policy) {
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    ckd_compact_options o = options_for(16);
    o.policy = policy;
    o.deletion = &now;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    return done;
}

static void fold(const char *dir, ckd_fidelity fidelity, uint64_t every) {
    ckd_store *store = store_create(dir);
    make_chain(store, "run", fidelity, 0, 17);
    ckd_save_options b = lossy_options("branch", 12, fidelity); /* branches off a step that will be deleted */
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
    ckd_compaction *done = compact_to(store, &policy);
    assert_non_null(done->pruned);
    size_t left = done->pruned->count - done->pruned->deleted + 1;
    assert_int_equal(left, 16 / every + 1 + 1 + 1); /* multiples of `every`, the newest two, the branch */
    ckd_compaction_free(done);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    check_store(dir, store, &before, left, 16);
    fingerprints_free(&before);
}

static void test_near_chains_are_folded(void **state) {
    fold(*state, CKD_NEAR, 4);
}
static void test_coarse_chains_are_folded(void **state) {
    fold(*state, CKD_COARSE, 8);
}
static void test_exact_chains_are_folded(void **state) {
    fold(*state, CKD_EXACT, 8);
}

enum { SMALLEST = 60, SMALLEST_STEPS = 9 };

/* Adds tensor i, whose values walk randomly, as it is at a step. */
static void add_smallest(ckd_save *save, unsigned i, uint64_t step) {
    uint64_t random = i + 1, shape[1] = {4 + i};
    float values[4 + SMALLEST] = {0};
    char name[32];
    for (uint64_t s = 0; s <= step; s++) {
        double far = s ? (i % 4 + 1) * 0.05 : 1;
        for (uint64_t k = 0; k < shape[0]; k++) {
            values[k] += (float)(far * drift_normal(&random));
        }
    }
    void *halves = to_dtype(values, CKD_BF16, shape[0]);
    snprintf(name, sizeof(name), "tensor.%u", i);
    add_tensor(save, name, CKD_BF16, 1, shape, NULL, halves);
    free(halves);
}

/*
 * Tensors of about a hundred bytes: coded on a lattice, neither their values nor a difference may come out smaller
 * than before. Those blocks are copied as they are, next to others that are recoded.
 */
static void test_tiny_lossy_tensors_are_folded(void **state) {
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < SMALLEST_STEPS; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.max_load_cost = 20;
        ckd_save *save = begin_with(store, &o);
        for (unsigned i = 0; i < SMALLEST; i++) {
            add_smallest(save, i, step);
        }
        commit_save(save);
    }
    fingerprints before = fingerprints_of(store);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_every = SMALLEST_STEPS - 1;
    ckd_compaction *done = compact_to(store, &policy);
    assert_int_equal(done->pruned->deleted, SMALLEST_STEPS - 3); /* the first and the last two stay */
    ckd_compaction_free(done);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    check_store(*state, store, &before, 3, 16);
    fingerprints_free(&before);
}

/*
 * The base is deleted, which holds what never changes. The oldest remaining checkpoint takes it over, and the others
 * refer to that one.
 */
static void test_deleted_base_is_folded(void **state) {
    scene_make(*state, 0, 8);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    fingerprints before = fingerprints_of(store);
    uint64_t all = folder_bytes(*state, "data/c");
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 4;
    ckd_compaction *done = compact_to(store, &policy);
    assert_int_equal(done->pruned->deleted, 4);
    ckd_compaction_free(done);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_checkpoint first, last;
    assert_int_equal(ckd_store_find(&first, store, SCENE_RUN, 4, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&last, store, SCENE_RUN, 7, NULL), CKD_OK);
    assert_true(last.kind == CKD_DELTA && last.stored_bytes < first.stored_bytes + 2048);
    assert_true(folder_bytes(*state, "data/c") < all);
    check_store(*state, store, &before, 4, 16);
    fingerprints_free(&before);
}

/* ---- dry runs ---- */

/* A dry run predicts exactly what is rewritten. With `estimate`, sizes are right within a factor of two. */
static void test_dry_runs_are_exact_and_change_nothing(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_COARSE, 0, 12);
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
    size_t same =
        0; /* packed checkpoints are only estimated, and the lengths of file lists in manifests are unknown */
    for (size_t i = 0; i < done->count && i < would->count && i < about->count; i++) {
        if (done->items[i].why & CKD_COMPACT_PACK) {
            continue;
        }
        uint64_t a = would->items[i].bytes, b = done->items[i].bytes;
        same++;
        assert_true(a < b + 2048 && b < a + 2048);
        assert_int_equal(would->items[i].why, done->items[i].why);
        assert_int_equal(would->items[i].depth, done->items[i].depth);
        assert_int_equal(would->items[i].recoded, done->items[i].recoded);
        assert_true(about->items[i].bytes > done->items[i].bytes / 2 &&
                    about->items[i].bytes < 2 * done->items[i].bytes);
    }
    assert_true(same > 2);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "run", done->items[0].checkpoint.step, NULL), CKD_OK);
    ckd_compaction_free(would);
    ckd_compaction_free(about);
    ckd_compaction_free(done);
    ckd_store_close(store);
}

/* ---- recoding cold data ---- */

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

/*
 * Which checkpoints are cold: all but the newest, those at least an hour old (none), those at least a second old (all).
 */
typedef enum coldness { NOT_NEWEST, HOUR_OLD, SECOND_OLD } coldness;

/* Cold exact checkpoints take fewer bytes afterwards, never more. Other checkpoints are not touched. */
static void check_recoded(const char *dir, coldness how) {
    enum { STEPS = 8, NEWEST = 3 };
    const uint64_t cold = how == NOT_NEWEST ? STEPS - NEWEST : how == HOUR_OLD ? 0 : STEPS;
    ckd_store *store = store_create(dir);
    make_fast(store, STEPS);
    make_chain(store, "near", CKD_NEAR, 0, 4);
    fingerprints before = fingerprints_of(store);
    uint64_t was = bytes_of_all(store);
    ckd_compact_options o = options_for(100);
    o.cold_but_newest = how == NOT_NEWEST ? NEWEST : 0;
    o.cold_after_s = how == HOUR_OLD ? 3600 : how == SECOND_OLD ? 1 : 0;
    if (how == SECOND_OLD) { /* the newest are less than two seconds old then, unless the machine is slow */
        usleep(1050 * 1000);
    }
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_int_equal(done->count, cold);
    for (size_t i = 0; i < done->count; i++) {
        const ckd_compacted *x = &done->items[i];
        assert_string_equal(x->checkpoint.run, "run");
        assert_true(x->checkpoint.step < cold && x->why & CKD_COMPACT_COLD);
        assert_true(x->bytes <= x->checkpoint.stored_bytes && x->recoded > 0);
    }
    assert_true(cold == 0 || bytes_of_all(store) < was);
    ckd_compaction_free(done);
    assert_int_equal(fingerprints_check(store, &before), STEPS + 4);
    assert_int_equal(verify_damage(store), 0);
    uint64_t once = bytes_of_all(store);
    done = compact_with(store, &o); /* nothing more to gain */
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    assert_int_equal(bytes_of_all(store), once);
    assert_int_equal(fingerprints_check(store, &before), STEPS + 4);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(dir);
}

static void test_cold_data_is_recoded(void **state) {
    check_recoded(*state, NOT_NEWEST);
}

static void test_young_data_is_not_recoded(void **state) {
    check_recoded(*state, HOUR_OLD);
}

static void test_data_is_cold_from_its_age_on(void **state) {
    check_recoded(*state, SECOND_OLD);
}

/* ---- damage ---- */

/* Flips a bit in the middle of the payloads of the checkpoint's file. */
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

/*
 * A checkpoint whose file is damaged is not rewritten: that would give the damage valid checksums. The others are
 * compacted.
 */
static void test_damaged_checkpoints_are_not_rewritten(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_EXACT, 0, 1);
    make_chain(store, "a", CKD_COARSE, 0, 6);
    make_chain(store, "b", CKD_COARSE, 0, 6);
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

/* ---- what was written is read back ---- */

typedef struct harm {
    size_t record; /* which record of the first chunk file that gets its name is harmed */
    bool in_work, done, beyond;
} harm;

static void flip_byte(const char *path, uint64_t offset) {
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)offset, SEEK_SET), 0);
    int byte = fgetc(f);
    assert_int_equal(fseek(f, (long)offset, SEEK_SET), 0);
    assert_true(fputc(byte ^ 4, f) != EOF && fclose(f) == 0);
}

static int flip_a_record(void *context, file_op step, const char *path) {
    harm *h = context;
    if (step != FILE_OP_RENAME_NOREPLACE || !strstr(path, "/data/c/") || h->in_work || h->done) {
        return 0;
    }
    h->in_work = h->done = true;
    char temp[600];
    snprintf(temp, sizeof(temp), "%s.tmp", path);
    chunk *c;
    assert_int_equal(chunk_open_bundled(&c, file_exists(temp) ? temp : path, NULL), CKD_OK);
    while (h->record < c->outer_count && c->outer[h->record].stored_size == 0) {
        h->record++;
    }
    h->beyond = h->record >= c->outer_count;
    if (!h->beyond) {
        flip_byte(file_path(c->file), c->outer[h->record].payload_offset);
    }
    chunk_close(c);
    h->in_work = false;
    return 0;
}

/* A bit flips on the way to the disk: nothing old may go, whatever kind of record it is in. */
static void test_what_is_written_is_read_back(void **state) {
    size_t harmed = 0;
    for (harm h = {0}; !h.beyond; h.record++) {
        h.done = false;
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, h.record);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        scene_make(dir, 0, 6);
        ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
        fingerprints before = fingerprints_of(store);
        ckd_compact_options o = options_for(1);
        file_set_fault_hook(flip_a_record, &h);
        ckd_compaction *done = compact_with(store, &o);
        file_set_fault_hook(NULL, NULL);
        size_t left = 0;
        for (size_t i = 0; i < done->count; i++) {
            left += done->items[i].left.status == CKD_E_CORRUPT;
        }
        assert_true(h.done);
        assert_int_equal(left, h.beyond ? 0 : 1);
        harmed += left;
        ckd_compaction_free(done);
        assert_int_equal(fingerprints_check(store, &before), 6);
        assert_int_equal(verify_damage(store), 0);
        fingerprints_free(&before);
        ckd_store_close(store);
    }
    assert_true(harmed >= 2);
}

/* ---- a full disk ---- */

/* A compaction that would not fit on the disk is refused before it writes anything. */
static void test_full_disk_is_noticed_in_advance(void **state) {
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

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_near_chains_are_shortened),
        tempdir_test(test_coarse_chains_are_shortened),
        tempdir_test(test_exact_chains_are_shortened),
        tempdir_test(test_ranks_keep_their_files),
        tempdir_test(test_near_chains_are_folded),
        tempdir_test(test_coarse_chains_are_folded),
        tempdir_test(test_exact_chains_are_folded),
        tempdir_test(test_tiny_lossy_tensors_are_folded),
        tempdir_test(test_deleted_base_is_folded),
        tempdir_test(test_dry_runs_are_exact_and_change_nothing),
        tempdir_test(test_cold_data_is_recoded),
        tempdir_test(test_young_data_is_not_recoded),
        tempdir_test(test_data_is_cold_from_its_age_on),
        tempdir_test(test_damaged_checkpoints_are_not_rewritten),
        tempdir_test(test_what_is_written_is_read_back),
        tempdir_test(test_full_disk_is_noticed_in_advance),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact", tests, NULL, NULL);
    scratch_end();
    return failed;
}
