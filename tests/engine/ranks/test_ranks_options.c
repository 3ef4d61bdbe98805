/*
 * Options that must be equal on all ranks of a save. However ranks save, an option that differs is reported, and
 * nothing is committed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/save/save.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

enum { RANKS = 3, ODD = 1, LENGTH = 600 };

typedef void (*change_fn)(ckd_save_options *o);
static void other_run(ckd_save_options *o) {
    o->run = "other";
}
static void other_step(ckd_save_options *o) {
    o->step++;
}
static void other_fidelity(ckd_save_options *o) {
    o->fidelity = CKD_COARSE;
}
static void other_role(ckd_save_options *o) {
    o->role_fidelity[CKD_ROLE_EXP_AVG_SQ] = CKD_NEAR;
}
static void other_base(ckd_save_options *o) {
    o->base = 1;
}
static void other_parent(ckd_save_options *o) {
    o->parent_run = SCENE_RUN;
}
static void other_parent_step(ckd_save_options *o) {
    o->parent_run = "none";
}
static void other_resume(ckd_save_options *o) {
    o->resumed_from_run = SCENE_RUN;
}
static void other_duplicate(ckd_save_options *o) {
    o->on_duplicate = CKD_DUPLICATE_BRANCH;
}
static void other_codec(ckd_save_options *o) {
    o->codec = CKD_CODEC_RAW;
}
static void other_level(ckd_save_options *o) {
    o->level = 7;
}
static void other_effort(ckd_save_options *o) {
    o->effort = 9;
}
static void other_bits(ckd_save_options *o) {
    o->target_bits = 0.5;
}
static void other_ratio(ckd_save_options *o) {
    o->target_ratio = 100;
}
static void other_error(ckd_save_options *o) {
    o->max_error = 0.01;
}
static void other_scale(ckd_save_options *o) {
    o->step_scale = 2;
}
static void other_cost(ckd_save_options *o) {
    o->max_load_cost = 8;
}
static void other_newest(ckd_save_options *o) {
    o->newest_load_cost = 3;
}
static void other_metric(ckd_save_options *o) {
    o->metric_name = "val\nloss";
}

static const struct {
    const char *option;
    change_fn change;
} changes[] = {
    /* A parent_run that does not exist, which is not the same as none. */
    {"run 'other'", other_run},
    {"step '2'", other_step},
    {"the fidelity of role weight 'coarse'", other_fidelity},
    {"the fidelity of role exp_avg_sq 'near'", other_role},
    {"base 'yes'", other_base},
    {"parent_run 'run'", other_parent},
    {"parent_run 'none'", other_parent_step},
    {"resumed_from_run 'run'", other_resume},
    {"on_duplicate 'branch'", other_duplicate},
    {"codec '1'", other_codec},
    {"level '7'", other_level},
    {"effort '9'", other_effort},
    {"target_bits '0.5'", other_bits},
    {"target_ratio '100'", other_ratio},
    {"max_error '0.01", other_error},
    {"step_scale '2'", other_scale},
    {"max_load_cost '8'", other_cost},
    {"newest_load_cost '3'", other_newest},
    {"metric_name '?'", other_metric},
};
enum { CHANGES = sizeof(changes) / sizeof(changes[0]) };

/* The changed option. Set before the children that are the ranks are forked. */
static size_t chosen;

static ckd_save_options options_for(uint32_t rank) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 1;
    if (rank == ODD) {
        changes[chosen].change(&o);
    }
    return o;
}

static ckd_tensor share_of(uint32_t rank, float values[LENGTH]) {
    static const uint64_t shape[1] = {(uint64_t)LENGTH * RANKS};
    for (size_t i = 0; i < LENGTH; i++) {
        values[i] = (float)(rank * LENGTH + i);
    }
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = (uint64_t)rank * LENGTH, .count = LENGTH};
    t.data = values;
    return t;
}

static void check_message(const char *message, const char *option) {
    char expected[128];
    snprintf(expected, sizeof(expected), "rank %u saves with %s", (unsigned)ODD, option);
    if (!strstr(message, expected)) {
        fail_msg("'%s' does not say '%s'", message, expected);
    }
}

/* ---- ranks that use the store's directory ---- */

static ckd_status act_saves_otherwise(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                      const world *w, uint32_t rank, ckd_error *err) {
    (void)store;
    (void)w;
    float values[LENGTH];
    ckd_save_options o = options_for(rank);
    ckd_tensor t = share_of(rank, values);
    return ckd_ranks_save(info, ranks, &o, &t, 1, err);
}

static void test_each_option(void **state) {
    ckd_store_close(store_create(*state));
    char *chunks = tree_describe(store_path_of(*state, "data/c"));
    for (chosen = 0; chosen < CHANGES; chosen++) {
        outcome out[WORLD_MOST];
        run_world(out, &(world){.dir = *state, .size = RANKS, .act = act_saves_otherwise});
        for (uint32_t r = 0; r < RANKS; r++) {
            assert_int_equal(out[r].status, CKD_E_INVALID);
            check_message(out[r].message, changes[chosen].option);
        }
        char *now = tree_describe(store_path_of(*state, "data/c"));
        assert_string_equal(now, chunks); /* nothing was written: not even the directory changed */
        free(now);
    }
    free(chunks);
    store_check_clean(*state);
}

/*
 * The plan compares roles. ckd_ranks_save and sessions make a plan, so a tensor with different roles is not written by
 * any rank.
 */
static void give_other_role(ckd_tensor *t, uint32_t rank) {
    t->role = rank == ODD ? CKD_ROLE_EXP_AVG : CKD_ROLE_AUTO;
}

static ckd_status act_saves_as_another_role(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                            const world *w, uint32_t rank, ckd_error *err) {
    (void)store;
    (void)w;
    float values[LENGTH];
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_tensor t = share_of(rank, values);
    o.run = SCENE_RUN;
    give_other_role(&t, rank);
    return ckd_ranks_save(info, ranks, &o, &t, 1, err);
}

static ckd_status act_session_of_another_role(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                              const world *w, uint32_t rank, ckd_error *err);

static void test_roles(void **state) {
    ckd_store_close(store_create(*state));
    char *chunks = tree_describe(store_path_of(*state, "data/c"));
    for (int session = 0; session < 2; session++) {
        outcome out[WORLD_MOST];
        run_world(out, &(world){.dir = *state,
                                .size = RANKS,
                                .act = session ? act_session_of_another_role : act_saves_as_another_role});
        for (uint32_t r = 0; r < RANKS; r++) {
            assert_int_equal(out[r].status, CKD_E_MISMATCH);
            assert_non_null(strstr(out[r].message, "to rank 0 the tensor is weight f32"));
            assert_non_null(strstr(out[r].message, "to rank 1 it is exp_avg f32"));
        }
        char *now = tree_describe(store_path_of(*state, "data/c"));
        assert_string_equal(now, chunks);
        free(now);
    }
    free(chunks);
    store_check_clean(*state);
}

/* Only rank 0's metric counts. Memory limits and progress belong to each rank. */
static ckd_status act_saves_alike(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    (void)store;
    (void)w;
    float values[LENGTH];
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_tensor t = share_of(rank, values);
    o.run = SCENE_RUN;
    o.fidelity = rank == 1 ? CKD_EXACT : CKD_FIDELITY_DEFAULT;
    o.metric_name = rank == 1 ? NULL : "loss";
    o.metric = rank;
    o.total_bytes = rank;
    o.staging_bytes = (uint64_t)rank << 26;
    o.parent_step = rank; /* ignored without a parent_run */
    return ckd_ranks_save(info, ranks, &o, &t, 1, err);
}

static void test_options_that_may_differ(void **state) {
    ckd_checkpoint c;
    ckd_store_close(store_create(*state));
    all_went_well(&(world){.dir = *state, .size = RANKS, .act = act_saves_alike});
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 0, NULL), CKD_OK);
    assert_string_equal(c.metric_name, "loss");
    assert_true(c.metric == 0);
    ckd_store_close(store);
}

/* ---- sessions ---- */

static ckd_status save_in_session(const ckd_tensor *t, ckd_save_options save, const world *w, uint32_t rank,
                                  float *values, ckd_error *err) {
    ckd_session *session;
    ckd_ranks_options together = CKD_RANKS_OPTIONS_INIT;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    together.rank = rank;
    together.world = w->size;
    together.group = "sessions";
    o.save = &save;
    o.ranks = &together;
    ckd_status status = ckd_session_open(&session, store_path_of(w->dir, ""), &o, err);
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_session_add(session, t, values, 0, err);
    status = status == CKD_OK ? ckd_session_save(session, 1, err) : status;
    ckd_status closed = ckd_session_close(session, status == CKD_OK ? err : NULL);
    return status == CKD_OK ? closed : status;
}

static ckd_status act_session(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                              uint32_t rank, ckd_error *err) {
    (void)info;
    (void)ranks;
    (void)store;
    float values[LENGTH];
    ckd_tensor t = share_of(rank, values);
    return save_in_session(&t, options_for(rank), w, rank, values, err);
}

static ckd_status act_session_of_another_role(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                              const world *w, uint32_t rank, ckd_error *err) {
    (void)info;
    (void)ranks;
    (void)store;
    float values[LENGTH];
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_tensor t = share_of(rank, values);
    o.run = SCENE_RUN;
    give_other_role(&t, rank);
    return save_in_session(&t, o, w, rank, values, err);
}

static void test_sessions(void **state) {
    for (chosen = 0; changes[chosen].change != other_fidelity; chosen++) {
    }
    outcome out[WORLD_MOST];
    ckd_store_close(store_create(*state));
    run_world(out, &(world){.dir = *state, .size = RANKS, .act = act_session});
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(out[r].status, CKD_E_INVALID);
        check_message(out[r].message, changes[chosen].option);
    }
    store_check_clean(*state);
}

/* ---- parts that the caller transfers ---- */

typedef struct parts {
    ckd_save *saves[RANKS];
    ckd_part parts[RANKS];
} parts;

static void seal_all(parts *p, ckd_store *store) {
    ckd_id id;
    ckd_error err = {0};
    assert_int_equal(ckd_id_new(&id, NULL), CKD_OK);
    for (uint32_t r = 0; r < RANKS; r++) {
        float values[LENGTH];
        ckd_save_options o = options_for(r);
        ckd_tensor t = share_of(r, values);
        o.rank = r;
        o.world = RANKS;
        o.checkpoint_id = id;
        if (ckd_save_begin(&p->saves[r], store, &o, &err) != CKD_OK ||
            ckd_save_tensor(p->saves[r], &t, &err) != CKD_OK ||
            ckd_save_seal(&p->parts[r], p->saves[r], &err) != CKD_OK) {
            fail_msg("%s", err.message);
        }
    }
}

static void end_all(parts *p) {
    for (uint32_t r = 0; r < RANKS; r++) {
        ckd_part_free(&p->parts[r]);
        if (r > 0) { /* rank 0's save was published */
            ckd_save_abort(p->saves[r]);
        }
    }
}

static bool fits_a_part(change_fn change) {
    return change != other_parent && change != other_parent_step &&
           change != other_resume; /* there is no checkpoint to name */
}

static void test_parts_of_other_options(void **state) {
    ckd_store *store = store_create(*state);
    ckd_checkpoint_list *list;
    for (chosen = 0; chosen < CHANGES; chosen++) {
        if (!fits_a_part(changes[chosen].change)) {
            continue;
        }
        parts p;
        ckd_checkpoint info;
        ckd_error err = {0};
        seal_all(&p, store);
        assert_int_equal(ckd_save_publish(&info, p.saves[0], p.parts, RANKS, &err), CKD_E_INVALID);
        check_message(err.message, changes[chosen].option);
        assert_int_equal(info.tensors, 0);
        end_all(&p);
    }
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, 0);
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- parts with invalid options ---- */

/* Replaces the options in a part. The part is well formed, but no rank wrote it. */
static void forge(ckd_part *of, const ckd_id *store, int kind) {
    rank_part p;
    assert_int_equal(part_decode(&p, store, of->data, of->size, NULL), CKD_OK);
    assert_true(p.options_size > 0);
    uint8_t *options = p.options;
    size_t size = p.options_size;
    bytes forged = {0}, data = {0};
    bytes_put(&forged, options, kind == 1 ? size - 1 : size);
    if (kind == 2) {
        bytes_put_string(&forged, "more");
        bytes_put_string(&forged, "1");
    } else if (kind == 3) {
        memset(forged.data, 0xff, size);
    } else if (kind == 4) {
        forged.data[2] ^= 1; /* in the first name */
    } else if (kind == 5) {
        bytes_clear(&forged);
        bytes_put_u8(&forged, 0);
    }
    p.options = kind == 0 ? NULL : forged.data;
    p.options_size = kind == 0 ? 0 : forged.size;
    part_encode(&data, store, &p);
    assert_false(data.failed);
    p.options = options;
    part_free(&p);
    bytes_free(&forged);
    ckd_part_free(of);
    *of = (ckd_part){data.data, data.size};
}

static void test_parts_of_any_options(void **state) {
    ckd_store *store = store_create(*state);
    for (chosen = 0; changes[chosen].change != other_metric; chosen++) {
    }
    for (int kind = 0; kind < 6; kind++) {
        parts p;
        ckd_error err = {0};
        seal_all(&p, store);
        forge(&p.parts[2], &store->id, kind);
        ckd_part swap = p.parts[1]; /* comes before rank 1's part, whose options differ too */
        p.parts[1] = p.parts[2];
        p.parts[2] = swap;
        assert_int_equal(ckd_save_publish(NULL, p.saves[0], p.parts, RANKS, &err), CKD_E_INVALID);
        assert_non_null(strstr(err.message, "the save options of rank 2 cannot be read"));
        end_all(&p);
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_each_option),
        tempdir_test(test_roles),
        tempdir_test(test_options_that_may_differ),
        tempdir_test(test_sessions),
        tempdir_test(test_parts_of_other_options),
        tempdir_test(test_parts_of_any_options),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests_name("options of ranks", tests, NULL, NULL);
    worlds_end();
    return failed;
}
