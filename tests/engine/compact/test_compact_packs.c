/*
 * Packs, which are chunk files of several checkpoints: how they are made, shrunk and copied. Damage to one
 * checkpoint's part concerns only that checkpoint.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static ckd_compaction *pack(ckd_store *store) {
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    return done;
}

/* All but the newest four checkpoints are packed into one file and load as before. */
static void test_small_files_become_one(void **state) {
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_NEAR, 0, 24);
    fingerprints before = fingerprints_of(store);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 20);
    ckd_compaction_free(done);
    assert_int_equal(folder_count(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 24);
    done = pack(store);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);

    /* Later saves build on the pack. Too few further files are not worth another one. */
    make_chain(store, "run", CKD_NEAR, 24, 2);
    assert_int_equal(folder_count(*state, "data/c"), 7);
    done = pack(store);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    make_chain(store, "run", CKD_NEAR, 26, 2);
    fingerprints_free(&before);
    before = fingerprints_of(store);
    done = pack(store);
    assert_int_equal(done->count, 24);
    ckd_compaction_free(done);
    assert_int_equal(folder_count(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 28);
    assert_int_equal(verify_damage(store), 0);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Saves a lossy base. */
static void save_single(ckd_store *store, uint64_t step) {
    drift d = drift_new(96, 64, (unsigned)step);
    ckd_save_options o = lossy_options("run", step, CKD_NEAR);
    o.base = 1;
    save_drift(store, &o, &d);
    drift_free(&d);
}

/* A pack is rewritten when most of its checkpoints are deleted. */
static void test_packs_shrink(void **state) {
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < 24; step++) {
        save_single(store, step);
    }
    fingerprints before = fingerprints_of(store);
    ckd_compaction_free(pack(store));
    assert_int_equal(folder_count(*state, "data/c"), 5);
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
    assert_int_equal(folder_count(*state, "data/c"), 5); /* the remaining checkpoints need the file */
    assert_int_equal(fingerprints_check(store, &before), 12);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 8);
    ckd_compaction_free(done);
    assert_int_equal(folder_count(*state, "data/c"), 5);
    assert_int_equal(fingerprints_check(store, &before), 12);
    assert_true(bytes_of_all(store) < all * 11 / 20);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Ranks get a pack each. A single packed checkpoint can be copied to another store. */
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
    assert_int_equal(folder_count(*state, "data/c"), 2 + 4 * 2);
    scene_check(store, 0, 12);
    snprintf(path, sizeof(path), "%s/copy", (const char *)*state);
    assert_int_equal(ckd_store_open(&other, path, CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    ckd_id one = checkpoint_at(store, SCENE_RUN, 4).id;
    ckd_copy_result *copied;
    assert_int_equal(ckd_copy(&copied, other, store,
                              &(ckd_copy_options){
                                  .struct_size = sizeof(ckd_copy_options), .checkpoints = &one, .count = 1},
                              NULL),
                     CKD_OK);
    assert_int_equal(copied->files, 2);
    ckd_copy_result_free(copied);
    assert_true(fingerprints_check(other, &before) >= 1);
    assert_int_equal(verify_damage(other), 0);
    assert_int_equal(ckd_copy(&copied, other, store, NULL, NULL), CKD_OK);
    /* The first copy brought a part of two files; the rest of them comes now. */
    assert_int_equal(copied->files, 2 + 4 * 2);
    ckd_copy_result_free(copied);
    assert_int_equal(fingerprints_check(other, &before), 12);
    fingerprints_free(&before);
    ckd_store_close(other);
    ckd_store_close(store);
    store_check_clean(*state);
}

enum { FOUR = 4, ROWS = 8, COLUMNS = 32 };

/* Four ranks save some rows each, as a base. */
static void save_four(ckd_store *store, uint64_t step) {
    static const uint64_t shape[] = {FOUR * ROWS, COLUMNS};
    float values[ROWS * COLUMNS];
    ckd_save *saves[FOUR];
    ckd_part parts[FOUR];
    ckd_save_options o = options_of("run", step);
    o.world = FOUR;
    o.base = 1;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    for (o.rank = 0; o.rank < FOUR; o.rank++) {
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            values[i] = (float)((i * 7919 + step * 31 + o.rank) % 1009);
        }
        ckd_region rows = {.kind = CKD_REGION_BOX, .offsets = {o.rank * ROWS, 0}, .lengths = {ROWS, COLUMNS}};
        assert_int_equal(ckd_save_begin(&saves[o.rank], store, &o, NULL), CKD_OK);
        add_tensor(saves[o.rank], "w", CKD_F32, 2, shape, &rows, values);
        assert_int_equal(ckd_save_seal(&parts[o.rank], saves[o.rank], NULL), CKD_OK);
    }
    assert_int_equal(ckd_save_publish(NULL, saves[0], parts, FOUR, NULL), CKD_OK);
    for (size_t i = 0; i < FOUR; i++) {
        ckd_part_free(&parts[i]);
        if (i) {
            ckd_save_end(saves[i]);
        }
    }
}

/* One pack a rank cannot become fewer. */
static void test_packs_of_many_ranks_stay(void **state) {
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < 10; step++) {
        save_four(store, step);
    }
    fingerprints before = fingerprints_of(store);
    ckd_compaction *done = pack(store);
    assert_int_equal(done->count, 6);
    ckd_compaction_free(done);
    assert_int_equal(folder_count(*state, "data/c"), FOUR + 4 * FOUR);
    done = pack(store);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    assert_int_equal(fingerprints_check(store, &before), 10);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Finds the file with a checkpoint's bundle, the position of the bundle's heads, and that of a block's payload. */
static void find_bundle(char path[512], uint64_t *heads, uint64_t *payload, const char *dir,
                        const ckd_id *id) {
    dir_list list;
    bool found = false;
    *heads = *payload = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !found; i++) {
        chunk *c;
        const chunk_records *part;
        snprintf(path, 512, "%s/%s", store_path_of(dir, "data/c"), list.names[i]);
        assert_int_equal(chunk_open_bundled(&c, path, NULL), CKD_OK);
        assert_int_equal(chunk_records_of(&part, c, id, NULL), CKD_OK);
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

/* All checkpoints load except step 5, and verifications report only that one. */
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

/* The damaged checkpoint is reported and stays where it is. The others are packed again together with new ones. */
static void check_others_are_packed(const char *dir, ckd_store *store) {
    for (uint64_t step = 12; step < 16; step++) {
        save_single(store, step);
    }
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    size_t reported = 0;
    for (size_t i = 0; i < done->count; i++) {
        bool five = done->items[i].checkpoint.step == 5;
        reported += five;
        assert_int_equal(done->items[i].left.status, five ? CKD_E_CORRUPT : CKD_OK);
    }
    assert_int_equal(done->count - reported, 11);
    assert_int_equal(done->left, reported);
    ckd_compaction_free(done);
    assert_int_equal(folder_count(dir, "data/c"), 2 + 4);
}

/*
 * A flipped bit in one checkpoint's part of a pack, in the heads of its bundle or in a payload, concerns only that
 * checkpoint.
 */
static void test_damage_in_a_pack_stays_with_its_checkpoint(void **state) {
    for (int payload = 0; payload < 2; payload++) {
        char dir[512], path[512];
        uint64_t heads, block;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, payload);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = store_create(dir);
        for (uint64_t step = 0; step < 12; step++) {
            save_single(store, step);
        }
        ckd_compaction_free(pack(store));
        assert_int_equal(folder_count(dir, "data/c"), 5);
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

/* A damaged pack is not rewritten, but reported. */
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

/* The position of a payload of the checkpoint in a chunk file. */
static uint64_t payload_of(const char *path, const ckd_id *checkpoint) {
    chunk *c;
    const chunk_records *part;
    uint64_t at = 0;
    assert_int_equal(chunk_open_bundled(&c, path, NULL), CKD_OK);
    assert_int_equal(chunk_records_of(&part, c, checkpoint, NULL), CKD_OK);
    for (size_t i = 0; i < part->count; i++) {
        const record *r = &part->records[i];
        at = r->kind == RECORD_BLOCK && r->stored_size ? r->payload_offset : at;
    }
    chunk_close(c);
    assert_true(at > 0);
    return at;
}

/*
 * Only step 5 has a file of rank 1, and that is damaged. The new file of rank 1 is empty; no manifest names it, so it
 * goes.
 */
static void test_rank_of_a_damaged_checkpoint(void **state) {
    ckd_store *store;
    ckd_error err = {0};
    manifest m;
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_CREATE, &err), CKD_OK);
    for (uint64_t step = 0; step < 16; step++) {
        scene s = scene_of(step);
        s.base = true;
        assert_int_equal(
            step == 5 ? scene_save_ranks(NULL, store, &s, &err) : scene_save(NULL, store, &s, &err), CKD_OK);
    }
    fingerprints before = fingerprints_of(store);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 5, 0, &err), CKD_OK);
    for (size_t i = 0; i < m.own_count; i++) {
        if (m.files[i].rank == 1) {
            pathname p = path_chunk(store->path, &m.files[i].id, "");
            flip(p.text, payload_of(p.text, &m.checkpoint.id));
        }
    }
    manifest_free(&m);
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    assert_true(done->left > 0 && done->count > done->left);
    ckd_compaction_free(done);
    check_only_five_suffers(store, &before);
    fingerprints_free(&before);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- two files with the same record ---- */

/* `a` changes little, so that each step builds on the one before. `b` is new each time. */
static void save_two_with(ckd_store *store, const ckd_save_options *o, float *a) {
    const uint64_t shape[1] = {1 << 15};
    void *b = random_bits(shape[0] * sizeof(float), 100 + (unsigned)o->step);
    ckd_save *save;
    ckd_error err = {0};
    change_values(CKD_F32, a, shape[0], 1 + (unsigned)o->step);
    assert_int_equal(ckd_save_begin(&save, store, o, &err), CKD_OK);
    add_tensor(save, "a", CKD_F32, 1, shape, NULL, a);
    add_tensor(save, "b", CKD_I32, 1, shape, NULL, b);
    commit_save(save);
    free(b);
}

static void save_two(ckd_store *store, uint64_t step, float *a) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = step;
    save_two_with(store, &o, a);
}

/* Flips a bit of the checkpoint's record of this tensor in the own file of a generation. */
static void damage_generation(ckd_store *store, uint64_t step, uint32_t generation, const char *tensor) {
    manifest m;
    chunk *c;
    const chunk_records *part;
    uint64_t at = 0;
    assert_int_equal(store_read_manifest(&m, store, "run", step, generation, NULL), CKD_OK);
    pathname p = path_chunk(store->path, &m.files[0].id, "");
    assert_int_equal(chunk_open_bundled(&c, p.text, NULL), CKD_OK);
    assert_int_equal(chunk_records_of(&part, c, &m.checkpoint.id, NULL), CKD_OK);
    for (size_t i = 0; i < part->count; i++) {
        const record *r = &part->records[i];
        bool wanted = r->kind == RECORD_BLOCK && strcmp(r->tensor->name, tensor) == 0;
        at = wanted ? r->payload_offset + r->stored_size / 2 : at;
    }
    chunk_close(c);
    manifest_free(&m);
    assert_true(at > 0);
    flip(p.text, at);
}

static void damage_own(ckd_store *store, uint64_t step, const char *tensor) {
    damage_generation(store, step, checkpoint_at(store, "run", step).generation, tensor);
}

static void pack_damaged(ckd_store *store) {
    ckd_compact_options o = options_for(100);
    o.pack_below = UINT64_C(8) << 20;
    ckd_compaction_free(compact_with(store, &o));
}

/*
 * Step 4 is damaged and stays in its file. The record of it that step 5 needs is copied to the pack. When that record
 * rots in the file of step 4, too, the pack has the only intact one, and step 5 keeps naming the pack.
 */
static void test_the_only_intact_record_stays(void **state) {
    ckd_store *store = store_create(*state);
    float *a = random_values(CKD_F32, 1 << 15, 1);
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    fingerprint before, after;
    ckd_id gone[4];
    now.undo_s = 0;
    for (uint64_t step = 0; step < 9; step++) {
        save_two(store, step, a);
    }
    ckd_checkpoint five = checkpoint_at(store, "run", 5);
    assert_int_equal(fingerprint_of(&before, store, &five, NULL), CKD_OK);
    damage_own(store, 4, "b");
    pack_damaged(store);
    assert_int_equal(checkpoint_at(store, "run", 4).generation, 0);
    assert_int_equal(checkpoint_at(store, "run", 5).generation, 1);
    damage_own(store, 4, "a");
    for (uint64_t step = 0; step < 4; step++) {
        gone[step] = checkpoint_at(store, "run", step).id;
    }
    assert_int_equal(ckd_store_delete(store, gone, 4, &now, NULL), CKD_OK);
    pack_damaged(store);
    five = checkpoint_at(store, "run", 5);
    assert_int_equal(fingerprint_of(&after, store, &five, NULL), CKD_OK);
    assert_true(after.hash == before.hash);
    free(a);
    ckd_store_close(store);
}

typedef struct rot {
    ckd_store *store;
    bool done;
} rot;

/* Damages step 7 as soon as it has been rewritten. */
static int damage_rewritten(void *context, uint64_t done, uint64_t total) {
    rot *r = context;
    manifest m;
    (void)done;
    (void)total;
    if (!r->done && store_read_manifest(&m, r->store, "run", 7, 1, NULL) == CKD_OK) {
        manifest_free(&m);
        damage_generation(r->store, 7, 1, "a");
        r->done = true;
    }
    return 0;
}

/*
 * Step 9 builds on step 7, which a compaction recodes. Then step 7's record rots in its new file. Step 9, which is not
 * recoded, keeps naming the file that it was saved on, and that file stays.
 */
static void test_rotten_records_are_not_named(void **state) {
    ckd_store *store = store_create(*state);
    float *a = random_values(CKD_F32, 1 << 15, 1);
    fingerprint before, after;
    for (uint64_t step = 0; step < 9; step++) {
        save_two(store, step, a);
    }
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "other";
    o.step = 9;
    o.parent_run = "run";
    o.parent_step = 7;
    o.max_load_cost = 1000; /* no shortcut past step 7 */
    save_two_with(store, &o, a);
    ckd_checkpoint nine = checkpoint_at(store, "other", 9);
    assert_int_equal(nine.depth, checkpoint_at(store, "run", 7).depth + 1);
    assert_int_equal(fingerprint_of(&before, store, &nine, NULL), CKD_OK);
    ckd_compact_options only = options_for(100);
    rot r = {.store = store};
    only.pack_below = CKD_NO_PACKS;
    only.run = "run";
    only.cold_but_newest = 1;
    only.on_progress = damage_rewritten;
    only.progress_context = &r;
    ckd_compaction_free(compact_with(store, &only));
    assert_true(r.done);
    nine = checkpoint_at(store, "other", 9);
    assert_int_equal(fingerprint_of(&after, store, &nine, NULL), CKD_OK);
    assert_true(after.hash == before.hash);
    free(a);
    ckd_store_close(store);
}

/* Chains are shortened, and the new files merged. Each checkpoint is one item with both reasons, and counts once. */
static void test_rewritten_and_packed(void **state) {
    ckd_store *store = store_create(*state);
    ckd_compact_options o = options_for(2);
    make_chain(store, "r", CKD_EXACT, 0, 10);
    uint64_t before = 0, after = 0;
    size_t both = 0;
    o.pack_below = PACK_BELOW;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_int_equal(done->checkpoints, 10);
    for (size_t i = 0; i < done->count; i++) {
        const ckd_compacted *item = &done->items[i];
        for (size_t k = 0; k < i; k++) {
            assert_int_not_equal(done->items[k].checkpoint.step, item->checkpoint.step);
        }
        both += item->why & CKD_COMPACT_PACK && item->why & CKD_COMPACT_DEPTH;
        before += item->checkpoint.stored_bytes;
        after += item->bytes;
    }
    assert_true(both > 0);
    assert_int_equal(done->before, before);
    assert_int_equal(done->after, after);
    ckd_compaction_free(done);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_small_files_become_one),
        tempdir_test(test_packs_shrink),
        tempdir_test(test_rewritten_and_packed),
        tempdir_test(test_ranks_are_packed),
        tempdir_test(test_packs_of_many_ranks_stay),
        tempdir_test(test_the_only_intact_record_stays),
        tempdir_test(test_rotten_records_are_not_named),
        tempdir_test(test_damage_in_a_pack_stays_with_its_checkpoint),
        tempdir_test(test_damaged_packs_stay),
        tempdir_test(test_rank_of_a_damaged_checkpoint),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact_packs", tests, NULL, NULL);
    scratch_end();
    return failed;
}
