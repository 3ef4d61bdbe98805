/*
 * Calls write to the caller's ckd_error only if they fail. If they succeed, they leave it unchanged, even
 * after errors that they handled.
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

#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

static ckd_error err;

/* Makes a call that uses &err, and checks that it succeeds and leaves err unchanged. */
#define SUCCEEDS(call)                                                         \
    do {                                                                       \
        memset(&err, 0x5a, sizeof(err));                                       \
        ckd_status made = (call);                                              \
        if (made != CKD_OK) {                                                  \
            fail_msg("%s: %s, %s", #call, ckd_status_name(made), err.message); \
        }                                                                      \
        check_untouched(#call);                                                \
    } while (0)

static void check_untouched(const char *what) {
    const unsigned char *bytes_of = (const unsigned char *)&err;
    for (size_t i = 0; i < sizeof(err); i++) {
        if (bytes_of[i] != 0x5a) {
            fail_msg("%s succeeds, and leaves status %d, '%.200s'", what, (int)err.status, err.message);
        }
    }
}

enum { LENGTH = 40000 };
static const uint64_t shape[1] = {LENGTH};
static float values[LENGTH];

static ckd_tensor tensor_of(uint64_t step) {
    ckd_tensor t = CKD_TENSOR_INIT;
    for (size_t i = 0; i < LENGTH; i++) {
        values[i] = (float)((i * 7919) % 1000) / 500 - 1 + (float)(step * (i % 13 == 0)) / 1000;
    }
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.data = values;
    return t;
}

static ckd_checkpoint save_step(ckd_store *store, ckd_save_options *o) {
    ckd_save *save;
    ckd_checkpoint info;
    ckd_tensor t = tensor_of(o->step);
    SUCCEEDS(ckd_save_begin(&save, store, o, &err));
    SUCCEEDS(ckd_save_tensor(save, &t, &err));
    SUCCEEDS(ckd_save_blob(save, "rng", "1", 1, &err));
    SUCCEEDS(ckd_save_commit(&info, save, &err));
    return info;
}

static void load_step(ckd_store *store, const ckd_id *id) {
    static float got[LENGTH];
    ckd_load *load;
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    ckd_load_explanation *explanation;
    ckd_blob_list *blobs;
    void *blob;
    size_t size;
    q.name = "w";
    q.data = got;
    q.size = sizeof(got);
    SUCCEEDS(ckd_load_begin(&load, store, id, &err));
    SUCCEEDS(ckd_load_explain(&explanation, load, &q, 1, &err));
    SUCCEEDS(ckd_load_tensor(load, &q, &err));
    SUCCEEDS(ckd_load_all(load, &q, 1, 0, &err));
    SUCCEEDS(ckd_load_blobs(&blobs, load, &err));
    SUCCEEDS(ckd_load_blob(&blob, &size, load, "rng", &err));
    ckd_load_explanation_free(explanation);
    ckd_blob_list_free(blobs);
    ckd_blob_free(blob);
    ckd_load_end(load);
}

static void ask_about(ckd_store *store, const ckd_checkpoint *first, const ckd_checkpoint *last) {
    ckd_checkpoint_list *list;
    ckd_checkpoint found;
    ckd_tensor_list *tensors, *without_parent;
    ckd_report *report;
    ckd_diff *diff;
    ckd_timeline *timeline;
    ckd_trash *trash;
    ckd_verify_result *verified;
    ckd_verify_options quick = CKD_VERIFY_OPTIONS_INIT;
    quick.quick = 1;
    SUCCEEDS(ckd_store_list(&list, store, NULL, &err));
    SUCCEEDS(ckd_store_find(&found, store, "run", CKD_LATEST, &err));
    SUCCEEDS(ckd_store_previous(&found, store, "run", last->step, &err));
    SUCCEEDS(ckd_store_check_newest(store, last, &err));
    SUCCEEDS(ckd_store_tensors(&tensors, store, &last->id, &err));
    SUCCEEDS(ckd_store_tensors_without_parent(&without_parent, store, &last->id, &err));
    SUCCEEDS(ckd_store_report(&report, store, &err));
    SUCCEEDS(ckd_store_diff(&diff, store, &first->id, &last->id, NULL, &err));
    SUCCEEDS(ckd_store_timeline(&timeline, store, NULL, &err));
    SUCCEEDS(ckd_store_trash(&trash, store, &err));
    ckd_checkpoint_list_free(list);
    ckd_tensor_list_free(tensors);
    ckd_tensor_list_free(without_parent);
    ckd_report_free(report);
    ckd_diff_free(diff);
    ckd_timeline_free(timeline);
    ckd_trash_free(trash);
    SUCCEEDS(ckd_store_verify(&verified, store, NULL, &err));
    ckd_verify_result_free(verified);
    SUCCEEDS(ckd_store_verify(&verified, store, &quick, &err));
    ckd_verify_result_free(verified);
}

static void mark(ckd_store *store, const ckd_id *id) {
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_stored_policy stored;
    ckd_policy_list *policies;
    ckd_pin_list *pins;
    ckd_tag_list *tags;
    ckd_checkpoint found;
    policy.keep_last = 3;
    SUCCEEDS(ckd_store_pin(store, id, "kept", &err));
    SUCCEEDS(ckd_store_pins(&pins, store, &err));
    SUCCEEDS(ckd_store_unpin(store, id, &err));
    SUCCEEDS(ckd_store_set_tag(store, "best", id, 0, &err));
    SUCCEEDS(ckd_store_set_tag(store, "best", id, 1, &err));
    SUCCEEDS(ckd_store_find_tag(&found, store, "best", &err));
    SUCCEEDS(ckd_store_tags(&tags, store, &err));
    SUCCEEDS(ckd_store_remove_tag(store, "best", &err));
    SUCCEEDS(ckd_store_set_policy(store, &policy, &err));
    SUCCEEDS(ckd_store_policy(&stored, store, "run", &err));
    SUCCEEDS(ckd_store_policies(&policies, store, &err));
    SUCCEEDS(ckd_store_clear_policy(store, NULL, &err));
    ckd_pin_list_free(pins);
    ckd_tag_list_free(tags);
    ckd_policy_list_free(policies);
}

static void remove_some(ckd_store *store, const ckd_id *last) {
    ckd_error left;
    ckd_delete_options undo = CKD_DELETE_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    ckd_compaction *compaction;
    ckd_prune *prune;
    ckd_collected collected;
    ckd_scrub_result *scrub;
    ckd_repair_result *repaired;
    undo.undo_s = 3600;
    policy.keep_last = 2;
    all.all = 1;
    SUCCEEDS(ckd_store_delete(store, last, 1, &undo, &err));
    SUCCEEDS(ckd_store_undelete(store, last, 1, &err));
    SUCCEEDS(ckd_store_delete(store, last, 1, &undo, &err));
    SUCCEEDS(ckd_store_undelete_each(&left, store, last, 1, &err));
    SUCCEEDS(ckd_store_plan_prune(&prune, store, &policy, &err));
    ckd_prune_free(prune);
    SUCCEEDS(ckd_compact(&compaction, store, NULL, &err));
    ckd_compaction_free(compaction);
    SUCCEEDS(ckd_store_prune(&prune, store, &policy, &undo, &err));
    ckd_prune_free(prune);
    SUCCEEDS(ckd_store_collect(&collected, store, &all, &err));
    SUCCEEDS(ckd_store_scrub(&scrub, store, NULL, &err));
    ckd_scrub_result_free(scrub);
    SUCCEEDS(ckd_store_repair(&repaired, store, NULL, &err));
    ckd_repair_result_free(repaired);
}

static const char *path_named(const char *dir, const char *name) {
    static char path[1024];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return path;
}

static void open_as(ckd_store **store, const char *dir, const char *name, ckd_open_mode mode) {
    SUCCEEDS(ckd_store_open(store, path_named(dir, name), mode, NULL, &err));
}

static void test_calls_of_a_store(void **state) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR, CKD_COARSE};
    for (size_t f = 0; f < 3; f++) {
        char name[20];
        ckd_store *store, *copy;
        ckd_checkpoint saved[5];
        ckd_copy_result *copied;
        snprintf(name, sizeof(name), "store%zu", f);
        open_as(&store, *state, name, CKD_OPEN_CREATE);
        for (uint64_t step = 0; step < 5; step++) {
            ckd_save_options o = options_of("run", step);
            o.fidelity = fidelities[f];
            saved[step] = save_step(store, &o);
        }
        load_step(store, &saved[4].id);
        ask_about(store, &saved[0], &saved[4]);
        mark(store, &saved[2].id);
        snprintf(name, sizeof(name), "copy%zu", f);
        open_as(&copy, *state, name, CKD_OPEN_CREATE);
        SUCCEEDS(ckd_copy(&copied, copy, store, NULL, &err));
        ckd_copy_result_free(copied);
        ckd_store_close(copy);
        remove_some(store, &saved[4].id);
        ckd_store_close(store);
    }
}

static void test_other_ways_to_save(void **state) {
    ckd_store *store;
    open_as(&store, *state, "store", CKD_OPEN_CREATE);
    ckd_save_options o = options_of("run", 1);
    (void)save_step(store, &o);
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    (void)save_step(store, &o);
    o.on_duplicate = CKD_DUPLICATE_BRANCH;
    ckd_checkpoint branch = save_step(store, &o);
    assert_string_equal(branch.run, "run~2");
    o.step = 9;
    o.resumed_from_run = "run";
    o.resumed_from_step = 1;
    (void)save_step(store, &o);
    ckd_store_close(store);
}

/* The calls succeed without a catalog, with a file that is no catalog, and with a damaged parent. */
static void test_calls_beside_damage(void **state) {
    for (int kind = 0; kind < 4; kind++) {
        char name[20];
        ckd_store *store;
        ckd_rebuild_result rebuilt;
        snprintf(name, sizeof(name), "store%d", kind);
        open_as(&store, *state, name, CKD_OPEN_CREATE);
        ckd_save_options o = options_of("run", 1);
        ckd_checkpoint first = save_step(store, &o);
        manifest m;
        assert_int_equal(store_read_manifest(&m, store, "run", 1, 0, NULL), CKD_OK);
        pathname chunk = path_chunk(store->path, &m.files[0].id, ""),
                 listing = path_in(store->path, FILE_CATALOG);
        manifest_free(&m);
        ckd_store_close(store);
        if (kind == 1) {
            assert_int_equal(unlink(listing.text), 0);
        } else if (kind == 2) {
            write_whole_file(listing.text, "no database", 11);
        } else if (kind == 3) {
            write_whole_file(chunk.text, "damaged", 7);
        }
        open_as(&store, *state, name, CKD_OPEN_READ);
        if (kind < 3) {
            load_step(store, &first.id);
        }
        ckd_store_close(store);
        open_as(&store, *state, name, CKD_OPEN_WRITE);
        o.step = 2;
        ckd_checkpoint second = save_step(store, &o);
        load_step(store, &second.id);
        ckd_store_close(store);
        SUCCEEDS(ckd_store_rebuild(&rebuilt, path_named(*state, name), NULL, &err));
    }
}

static void test_calls_of_a_session(void **state) {
    ckd_save_options save = options_of("run", 0);
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    o.save = &save;
    o.every_steps = 2;
    o.restore_older = 1;
    for (uint64_t launch = 0; launch < 3; launch++) {
        ckd_session *session;
        ckd_checkpoint from;
        uint64_t number = launch;
        ckd_tensor t = tensor_of(launch);
        o.snapshot = launch == 1 ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
        SUCCEEDS(ckd_session_open(&session, store_path_of(*state, ""), &o, &err));
        SUCCEEDS(ckd_session_add(session, &t, values, 0, &err));
        SUCCEEDS(ckd_session_add_bytes(session, "number", &number, sizeof(number), &err));
        if (launch > 0) { /* the newest checkpoint, then an older one, which begins a branch */
            SUCCEEDS(ckd_session_restore(&from, session, launch == 1 ? CKD_LATEST : 2, &err));
        }
        for (uint64_t step = 10 * launch + 1; step < 10 * launch + 5; step++) {
            SUCCEEDS(ckd_session_step(session, step, &err));
            ckd_session_fence(session);
        }
        SUCCEEDS(ckd_session_wait(session, CKD_DURABLE, &err));
        SUCCEEDS(ckd_session_save(session, 10 * launch + 5, &err));
        SUCCEEDS(ckd_session_close(session, &err));
    }
}

/* Runs in a child. A failure is reported by its status. */
static ckd_status check_call(ckd_status made, const char *call, ckd_error *out) {
    const unsigned char *bytes_of = (const unsigned char *)&err;
    for (size_t i = 0; made == CKD_OK && i < sizeof(err); i++) {
        made = bytes_of[i] == 0x5a ? CKD_OK : CKD_E_CORRUPT;
    }
    if (made != CKD_OK) {
        *out = err;
        snprintf(out->message, sizeof(out->message), "%s: %.300s", call, err.message);
    }
    memset(&err, 0x5a, sizeof(err));
    return made;
}

static ckd_status act_joins_and_saves(ckd_checkpoint *info, ckd_ranks *outer, ckd_store *store,
                                      const world *w, uint32_t rank, ckd_error *out) {
    (void)outer;
    ckd_ranks *ranks;
    const ckd_plan *plan;
    ckd_save *save;
    ckd_ranks_options group_of = CKD_RANKS_OPTIONS_INIT;
    ckd_save_options o = options_of("run", 1);
    ckd_tensor t = tensor_of(1);
    t.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = LENGTH / 2 * rank, .count = LENGTH / 2};
    group_of.rank = rank;
    group_of.world = w->size;
    group_of.group = "inner";
    memset(&err, 0x5a, sizeof(err));
    if (rank == 1) {
        usleep(50000); /* rank 0 has to look for it several times */
    }
    ckd_status status = check_call(ckd_ranks_join(&ranks, store, &group_of, &err), "join", out);
    if (status != CKD_OK) {
        return status;
    }
    status = check_call(ckd_ranks_plan(&plan, ranks, &t, 1, &err), "plan", out);
    if (rank == 0) {
        usleep(50000); /* the other rank has to wait */
    }
    status = status == CKD_OK ? check_call(ckd_ranks_begin(&save, ranks, &o, &err), "begin", out) : status;
    if (status == CKD_OK) {
        status = check_call(ckd_save_tensor(save, &t, &err), "tensor", out);
        ckd_status committed = check_call(ckd_ranks_commit(info, ranks, save, &err), "commit", out);
        status = status == CKD_OK ? committed : status;
        o.step = 2;
    }
    if (status == CKD_OK) {
        status = check_call(ckd_ranks_save(info, ranks, &o, &t, 1, &err), "save", out);
    }
    ckd_ranks_leave(ranks);
    return status;
}

static void test_calls_of_ranks(void **state) {
    ckd_store_close(store_create(*state));
    all_went_well(&(world){.dir = *state, .size = 2, .step = 1, .act = act_joins_and_saves});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_calls_of_a_store),    tempdir_test(test_other_ways_to_save),
        tempdir_test(test_calls_beside_damage), tempdir_test(test_calls_of_a_session),
        tempdir_test(test_calls_of_ranks),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests_name("err untouched", tests, NULL, NULL);
    worlds_end();
    return failed;
}
