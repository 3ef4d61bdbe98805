/*
 * Processes that save together and communicate only through the store's directory: what they agree on, and worlds
 * whose size changes within a chain. test_ranks_failed and test_ranks_killed test what happens if one fails or is
 * killed.
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
#include <unistd.h>

#include "engine/ranks/internal.h"
#include "tests/support/checkpoints.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

static void test_saves_together(void **state) {
    scene_make(*state, 0, 1);
    all_went_well(&(world){.dir = *state, .size = 4, .step = 1, .act = act_saves_thrice});
    all_went_well(&(world){.dir = *state, .size = 1, .step = 4, .act = act_saves});
    survivors_check(*state, 31, 31, 5);
}

/* The stages of a rank must be in order. Returns a bit mask of them. */
static uint64_t check_rank_times(const ckd_stage_times *s, size_t count, uint32_t rank) {
    uint64_t seen = 0, before = 0;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(s[i].rank, rank);
        assert_true(s[i].begin_ns <= s[i].end_ns);
        seen |= UINT64_C(1) << s[i].stage;
        if (s[i].stage >= CKD_STAGE_SYNC) { /* these follow one another */
            assert_true(s[i].begin_ns >= before);
        } else {
            assert_true(s[i].work_ns > 0 && s[i].bytes > 0);
        }
        before = s[i].end_ns > before ? s[i].end_ns : before;
    }
    return seen;
}

static void test_each_rank_reports_its_times(void **state) {
    enum { SIZE = 3 };
    scene_make(*state, 0, 1);
    all_went_well(&(world){.dir = *state, .size = SIZE, .step = 1, .act = act_saves});
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    ckd_timeline *t;
    assert_int_equal(ckd_store_timeline(&t, store, NULL, NULL), CKD_OK);
    size_t save = t->count - 1, at = 0; /* the previous save was made by one rank */
    while (at < t->stage_count && t->stages[at].save < save) {
        at++;
    }
    const uint64_t all = 1u << CKD_STAGE_ANALYSE | 1u << CKD_STAGE_ENCODE | 1u << CKD_STAGE_WRITE |
                         1u << CKD_STAGE_SYNC | 1u << CKD_STAGE_WAIT;
    uint64_t ready = 0, waited = 0;
    for (uint32_t rank = 0; rank < SIZE; rank++) {
        size_t count = rank == 0 ? 6 : 5;
        assert_true(at + count <= t->stage_count);
        assert_int_equal(check_rank_times(t->stages + at, count, rank),
                         rank == 0 ? all | 1u << CKD_STAGE_COMMIT : all);
        const ckd_stage_times *wait = &t->stages[at + 4];
        ready = wait->begin_ns > ready ? wait->begin_ns : ready;
        assert_true(rank == 0 || wait->end_ns == waited); /* all wait until the last rank has arrived */
        waited = wait->end_ns;
        at += count;
    }
    assert_true(ready <= waited);
    assert_int_equal(at, t->stage_count);
    ckd_timeline_free(t);
    ckd_store_close(store);
}

static ckd_status act_other_steps(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    (void)store;
    return save_share(info, ranks, w, rank == 2 ? 3 : 2, rank, err);
}

static void test_other_steps(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 3, .act = act_other_steps});
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, CKD_E_INVALID);
        assert_non_null(strstr(out[r].message, "rank 2 saves with step '3', rank 0 with '2'"));
    }
    survivors_check(*state, 3, 3, 2);
}

/* A rank that waits for others in vain gives up, names the first one missing, and leaves no files. */
static void test_missing_ranks(void **state) {
    ckd_store *store;
    ckd_ranks *ranks;
    ckd_error err = {0};
    scene_make(*state, 0, 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, &err), CKD_OK);
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.world = 3;
    o.timeout_ms = 50;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_BUSY);
    assert_null(ranks);
    assert_non_null(strstr(err.message, "2 of 3 ranks have not joined, the first of them rank 1"));
    o.rank = 1;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "rank 0 of 3"));
    o.rank = 3;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_INVALID);
    ckd_ranks_leave(NULL);
    store_check_clean(*state); /* no file is left */
    ckd_store_close(store);
}

/* A world of one rank: saving the same content twice, and an abort without an error. */
static void test_one_rank(void **state) {
    ckd_store *store = store_create(*state);
    ckd_ranks *ranks;
    ckd_save *save;
    ckd_checkpoint first, second;
    ckd_ranks_options alone = CKD_RANKS_OPTIONS_INIT;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    float values[64] = {1};
    const uint64_t shape[1] = {64};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.data = values;
    o.run = "run";
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    assert_int_equal(ckd_ranks_join(&ranks, store, &alone, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_save(&first, ranks, &o, &t, 1, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_save(&second, ranks, &o, &t, 1, NULL), CKD_OK);
    assert_memory_equal(&first.id, &second.id, sizeof(ckd_id));
    o.step = 1;
    assert_int_equal(ckd_ranks_begin(&save, ranks, &o, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_abort(ranks, save, &(ckd_error){0}), CKD_E_STATE);
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Messages between ranks may contain file names that are not valid UTF-8. */
static void test_errors_of_any_bytes(void **state) {
    ckd_error why = {.status = CKD_E_IO, .sys_errno = EIO, .offset = 7}, received;
    (void)state;
    snprintf(why.message, sizeof(why.message), "cannot read /caf\xe9/x");
    snprintf(why.file, sizeof(why.file), "/caf\xe9/x");
    ckd_bytes m = rank_message_write(CKD_E_IO, &why, true, NULL, 0);
    rank_message got = rank_message_read(&m, &received);
    assert_true(got.readable && got.over);
    assert_int_equal(got.status, CKD_E_IO);
    assert_int_equal(received.sys_errno, EIO);
    assert_int_equal(received.offset, 7);
    assert_string_equal(received.message, why.message);
    assert_string_equal(received.file, why.file);
    ckd_bytes_free(&m);
}

/* ---- worlds whose size changes ---- */

enum { ROWS = 256, COLUMNS = 384, WHOLE = 40 };

static float value_at(uint64_t step, uint64_t element) {
    uint64_t noise =
        (element + 1) * UINT64_C(0x9e3779b97f4a7c15); /* random, so that a base is much larger than a delta */
    noise = (noise ^ noise >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(noise >> 40) + (float)(step * (element % 31 == 0));
}

/* Each rank saves its rows of "w" and all of "bias". */
static ckd_status act_plans(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = CKD_OK;
    const uint64_t shape[2] = {ROWS, COLUMNS}, length[1] = {WHOLE};
    uint64_t first = ROWS * rank / w->size, end = ROWS * (rank + 1) / w->size;
    for (uint64_t step = w->step; step < w->step + 3 && status == CKD_OK; step++) {
        float *values = malloc((end - first) * COLUMNS * sizeof(float) + 4), bias[WHOLE];
        for (uint64_t i = 0; i < (end - first) * COLUMNS; i++) {
            values[i] = value_at(step, first * COLUMNS + i);
        }
        for (uint64_t i = 0; i < WHOLE; i++) {
            bias[i] = value_at(step, i);
        }
        ckd_tensor t[2] = {CKD_TENSOR_INIT, CKD_TENSOR_INIT};
        t[0].name = "w";
        t[0].dtype = CKD_F32;
        t[0].ndim = 2;
        t[0].shape = shape;
        t[0].region =
            (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {end - first, COLUMNS}};
        t[0].data = values;
        t[1].name = "bias";
        t[1].dtype = CKD_F32;
        t[1].ndim = 1;
        t[1].shape = length;
        t[1].data = bias;
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.step = step;
        o.max_load_cost = 100; /* no chain ends because of its load cost */
        status = ckd_ranks_save(info, ranks, &o, t, 2, err);
        free(values);
    }
    return status;
}

static void check_shard(ckd_store *store, uint64_t step, uint32_t rank, uint32_t size) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err = {0};
    uint64_t first = ROWS * rank / size, count = ROWS * (rank + 1) / size - first;
    float *got = malloc(count * COLUMNS * sizeof(float));
    assert_int_equal(ckd_store_find(&c, store, "run", step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {count, COLUMNS}};
    q.data = got;
    q.size = count * COLUMNS * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    for (uint64_t i = 0; i < count * COLUMNS; i++) {
        assert_true(got[i] == value_at(step, first * COLUMNS + i));
    }
    ckd_load_end(load);
    free(got);
}

/* Four ranks save, two continue the chain, then one, then eight. Loads by any number of ranks get the right values. */
static void test_worlds_change_in_mid_chain(void **state) {
    static const uint32_t sizes[] = {4, 2, 1, 8};
    ckd_store_close(store_create(*state));
    for (uint64_t i = 0; i < 4; i++) {
        all_went_well(&(world){.dir = *state, .size = sizes[i], .step = 3 * i, .act = act_plans});
    }
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    for (uint64_t step = 0; step < 12; step++) {
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, store, "run", step, NULL), CKD_OK);
        assert_int_equal(c.world, sizes[step / 3]);
        assert_int_equal(c.raw_bytes, (ROWS * COLUMNS + WHOLE) * sizeof(float)); /* "bias" is stored once */
        if (step > 0) { /* a change of shards does not lead to a base */
            if (c.kind != CKD_DELTA || c.stored_bytes > c.raw_bytes / 3) {
                fail_msg("step %u by %u ranks: %s of %u bytes", (unsigned)step, (unsigned)c.world,
                         ckd_kind_name(c.kind), (unsigned)c.stored_bytes);
            }
        }
        for (uint32_t size = 1; size <= 8; size++) {
            for (uint32_t rank = 0; rank < size; rank++) {
                check_shard(store, step, rank, size);
            }
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    store_check_clean(*state);
    ckd_store_close(store);
}

/* Tensors that the parent does not have in this form start without a parent, and are listed. */
static void test_tensors_without_parent(void **state) {
    static const char *const names[] = {"same", "taller", "rounded", "new"};
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, 4096, 1);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save *save = begin_save(store, "run", step);
        uint64_t shape[2] = {32, 64}, taller[2] = {step ? 64 : 32, 64};
        add_tensor(save, names[0], CKD_F32, 2, shape, NULL, values);
        add_tensor(save, names[1], CKD_F32, 2, taller, NULL, values);
        add_tensor(save, names[2], step ? CKD_BF16 : CKD_F32, 2, shape, NULL, values);
        if (step) {
            add_tensor(save, names[3], CKD_F32, 2, shape, NULL, values);
        }
        values[0] += 1;
        assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    }
    ckd_checkpoint c;
    ckd_tensor_list *without_parent;
    assert_int_equal(ckd_store_find(&c, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(ckd_store_tensors_without_parent(&without_parent, store, &c.id, NULL), CKD_OK);
    assert_int_equal(without_parent->count, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(without_parent->items[i].name, names[i + 1]);
    }
    ckd_tensor_list_free(without_parent);
    assert_int_equal(ckd_store_find(&c, store, "run", 0, NULL), CKD_OK);
    assert_int_equal(ckd_store_tensors_without_parent(&without_parent, store, &c.id, NULL), CKD_OK);
    assert_int_equal(without_parent->count, 3); /* a base: all of them */
    ckd_tensor_list_free(without_parent);
    free(values);
    ckd_store_close(store);
}

/* If the parent's file cannot be read, its tensors are unknown. So it is unknown which ones it lacks. */
static void test_tensors_on_a_damaged_parent(void **state) {
    static const uint64_t shape[1] = {4096};
    static float values[4096];
    ckd_tensor_list *without_parent;
    ckd_store *store = store_create(*state);
    ckd_checkpoint parent = save_one(store, "run", 0, "w", CKD_F32, 1, shape, values);
    values[7] = 1;
    ckd_checkpoint c = save_one(store, "run", 1, "w", CKD_F32, 1, shape, values);
    assert_memory_equal(&c.parent, &parent.id, sizeof(ckd_id));
    ckd_store_close(store);
    manifest m;
    store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(store_read_manifest(&m, store, "run", 0, 0, NULL), CKD_OK);
    pathname p = path_chunk(store->path, &m.files[0].id, "");
    manifest_free(&m);
    ckd_store_close(store);
    write_whole_file(p.text, "damaged", 7);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    store = store_reopen(*state, CKD_OPEN_READ);
    ckd_error err = {0};
    assert_int_equal(ckd_store_tensors_without_parent(&without_parent, store, &c.id, &err), CKD_E_CORRUPT);
    assert_null(without_parent);
    assert_non_null(strstr(err.message, "the tensors of run@0 cannot be read"));
    ckd_store_close(store);
}

/* Both ranks save row 4. */
static ckd_status act_overlaps(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err) {
    (void)store;
    (void)w;
    const uint64_t shape[2] = {9, 4};
    float values[20] = {0};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {rank ? 4 : 0, 0}, .lengths = {5, 4}};
    t.data = values;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    return ckd_ranks_save(info, ranks, &o, &t, 1, err);
}

static void test_overlapping_layouts(void **state) {
    outcome out[WORLD_MOST];
    ckd_store_close(store_create(*state));
    run_world(out, &(world){.dir = *state, .size = 2, .act = act_overlaps});
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(out[r].status, CKD_E_MISMATCH);
        assert_non_null(strstr(out[r].message, "ranks 0 and 1 both hold its elements [4:5, 0:4]"));
    }
}

/* Saves bases, so that earlier steps can be deleted. */
static ckd_status act_saves_bases(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = CKD_OK;
    for (uint64_t step = 0; step < 5 && status == CKD_OK; step++) {
        ckd_save *save;
        ckd_save_options o = options_of(SCENE_RUN, step);
        scene s = scene_of(step);
        o.base = 1;
        status = ckd_ranks_begin(&save, ranks, &o, err);
        if (status == CKD_OK && scene_share(save, &s, rank, w->size, err) != CKD_OK) {
            return ckd_ranks_abort(ranks, save, err);
        }
        status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    }
    return status;
}

/* Rank 0 applies the store's policy once the other ranks have finished the commit. */
static void test_policy_after_each_commit(void **state) {
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_checkpoint_list *list;
    ckd_trash *trash;
    policy.keep_last = policy.automatic = 1;
    ckd_store *store = store_create(*state);
    assert_int_equal(ckd_store_set_policy(store, &policy, NULL), CKD_OK);
    ckd_store_close(store);
    all_went_well(&(world){.dir = *state, .size = 3, .act = act_saves_bases});
    store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_store_trash(&trash, store, NULL), CKD_OK);
    assert_int_equal(list->count + trash->count, 5);
    assert_true(trash->count >= 1); /* rank 0 does not wait for ranks that still hold locks */
    assert_int_equal(list->items[list->count - 1].step, 4);
    ckd_checkpoint_list_free(list);
    ckd_trash_free(trash);
    scene_check(store, 3, 2);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_saves_together),
        tempdir_test(test_missing_ranks),
        tempdir_test(test_other_steps),
        tempdir_test(test_each_rank_reports_its_times),
        cmocka_unit_test(test_errors_of_any_bytes),
        tempdir_test(test_one_rank),
        tempdir_test(test_overlapping_layouts),
        tempdir_test(test_worlds_change_in_mid_chain),
        tempdir_test(test_tensors_without_parent),
        tempdir_test(test_tensors_on_a_damaged_parent),
        tempdir_test(test_policy_after_each_commit),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
    worlds_end();
    return failed;
}
