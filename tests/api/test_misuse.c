/* Invalid calls are refused at once. They never result in an incomplete checkpoint. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { ROWS = 12, COLUMNS = 10 };
static const uint64_t shape[2] = {ROWS, COLUMNS};
static float values[ROWS * COLUMNS];

static ckd_tensor tensor_of(const char *name) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    return t;
}

static ckd_region box(uint64_t row, uint64_t column, uint64_t rows, uint64_t columns) {
    return (ckd_region){.kind = CKD_REGION_BOX, .offsets = {row, column}, .lengths = {rows, columns}};
}

static ckd_region range(uint64_t start, uint64_t count) {
    return (ckd_region){.kind = CKD_REGION_FLAT, .start = start, .count = count};
}

/* ---- saves in which a call failed ---- */

static ckd_status fails_to_read(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)context;
    (void)first;
    (void)count;
    (void)to;
    (void)err;
    return CKD_E_IO;
}

typedef ckd_status (*bad_call)(ckd_save *save, ckd_error *err);

static ckd_status blob_without_a_name(ckd_save *save, ckd_error *err) {
    return ckd_save_blob(save, "", "w", 1, err);
}
static ckd_status blob_without_data(ckd_save *save, ckd_error *err) {
    return ckd_save_blob(save, "x", NULL, 4, err);
}
static ckd_status blob_too_large(ckd_save *save, ckd_error *err) {
    return ckd_save_blob(save, "x", "w", (size_t)CKD_BLOB_MAX + 1, err);
}
static ckd_status blob_twice(ckd_save *save, ckd_error *err) {
    return ckd_save_blob(save, "rng", "2", 1, err);
}
static ckd_status tensor_without_a_name(ckd_save *save, ckd_error *err) {
    ckd_tensor t = tensor_of("");
    return ckd_save_tensor(save, &t, err);
}
static ckd_status tensor_without_data(ckd_save *save, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    t.data = NULL;
    return ckd_save_tensor(save, &t, err);
}
static ckd_status tensor_unreadable(ckd_save *save, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    t.data = NULL;
    t.read = fails_to_read;
    return ckd_save_tensor(save, &t, err);
}
static ckd_status tensor_twice(ckd_save *save, ckd_error *err) {
    ckd_tensor t = tensor_of("w");
    return ckd_save_tensor(save, &t, err);
}
static ckd_status tensor_of_no_size(ckd_save *save, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    t.struct_size = 0;
    return ckd_save_tensor(save, &t, err);
}

static const struct {
    bad_call call;
    ckd_status expected;
} bad_calls[] = {
    {blob_without_a_name, CKD_E_INVALID},   {blob_without_data, CKD_E_INVALID},
    {blob_too_large, CKD_E_INVALID},        {blob_twice, CKD_E_MISMATCH},
    {tensor_without_a_name, CKD_E_INVALID}, {tensor_without_data, CKD_E_INVALID},
    {tensor_unreadable, CKD_E_IO},          {tensor_twice, CKD_E_MISMATCH},
    {tensor_of_no_size, CKD_E_INVALID},
};

static void test_no_commit_after_a_failed_call(void **state) {
    ckd_store *store = store_create(*state);
    ckd_checkpoint_list *list;
    for (size_t i = 0; i < sizeof(bad_calls) / sizeof(bad_calls[0]); i++) {
        /* Also with a checkpoint that exists already, which the save is compared with. */
        for (int compared = 0; compared < 2; compared++) {
            ckd_save_options o = options_of(compared ? "there" : "run", 1);
            o.on_duplicate = CKD_DUPLICATE_SAME_OK;
            ckd_checkpoint info;
            ckd_error err = {0};
            ckd_save *save = begin_with(store, &o);
            ckd_tensor t = tensor_of("w");
            assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
            assert_int_equal(ckd_save_blob(save, "rng", "1", 1, NULL), CKD_OK);
            if (i == 0 && compared) { /* saves this checkpoint */
                assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
                continue;
            }
            assert_int_equal(bad_calls[i].call(save, &err), bad_calls[i].expected);
            assert_int_equal(err.status, bad_calls[i].expected);
            assert_int_equal(ckd_save_blob(save, "more", "1", 1, NULL), CKD_E_STATE);
            assert_int_equal(ckd_save_commit(&info, save, &err), CKD_E_STATE);
            assert_non_null(strstr(err.message, "an earlier call on this save failed"));
        }
    }
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, 1);
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- the same region or name twice ---- */

static void test_regions_that_overlap(void **state) {
    ckd_store *store = store_create(*state);
    const struct {
        ckd_region first, second;
        bool overlap;
    } cases[] = {
        {box(0, 0, 4, 10), box(0, 0, 4, 10), true},  {box(0, 0, 4, 10), box(4, 0, 4, 10), false},
        {box(4, 0, 4, 10), box(0, 0, 4, 10), false}, {box(0, 0, 12, 5), box(0, 5, 12, 5), false},
        {box(0, 0, 12, 5), box(0, 4, 12, 5), true},  {box(0, 5, 12, 5), box(11, 0, 1, 6), true},
        {range(0, 40), range(40, 80), false},        {range(40, 80), range(0, 41), true},
        {range(0, 41), box(4, 0, 1, 10), true},      {range(0, 40), box(4, 0, 1, 10), false},
        {range(0, 0), range(0, 120), false},         {range(5, 0), range(5, 0), false},
        {range(0, 120), range(60, 0), false},        {{0}, range(119, 1), true},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckd_save *save = begin_save(store, "run", i);
        ckd_tensor a = tensor_of("a"), other = tensor_of("b");
        ckd_error err = {0};
        a.region = cases[i].first;
        assert_int_equal(ckd_save_tensor(save, &a, NULL), CKD_OK);
        assert_int_equal(ckd_save_tensor(save, &other, NULL), CKD_OK);
        a.region = cases[i].second;
        assert_int_equal(ckd_save_tensor(save, &a, &err), cases[i].overlap ? CKD_E_MISMATCH : CKD_OK);
        assert_string_equal(err.tensor, cases[i].overlap ? "a" : "");
        ckd_save_abort(save);
    }
    ckd_store_close(store);
}

static void test_one_name_for_two_tensors(void **state) {
    ckd_store *store = store_create(*state);
    static const uint64_t other[2] = {COLUMNS, ROWS};
    for (int kind = 0; kind < 4; kind++) {
        ckd_save *save = begin_save(store, "run", 1);
        ckd_tensor t = tensor_of("a");
        t.region = range(0, 60);
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        t.region = range(60, 60);
        t.dtype = kind == 0 ? CKD_I32 : CKD_F32;
        t.shape = kind == 1 ? other : shape;
        t.role = kind == 2 ? CKD_ROLE_MASTER : CKD_ROLE_AUTO;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), kind < 3 ? CKD_E_MISMATCH : CKD_OK);
        ckd_save_abort(save);
    }
    ckd_save *save = begin_save(store, "run", 1); /* a blob may have the name of a tensor */
    ckd_tensor t = tensor_of("a");
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(save, "a", "1", 1, NULL), CKD_OK);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    ckd_store_close(store);
}

/*
 * A new region is compared with a limited number of others. Regions in order all pass; the commit finds an
 * overlap with one far back.
 */
static void test_very_many_regions(void **state) {
    enum { MANY = 3000 };
    static const uint64_t length[1] = {MANY};
    static float zeros[MANY];
    ckd_store *store = store_create(*state);
    for (int overlap = 1; overlap >= 0; overlap--) {
        ckd_save *save = begin_save(store, "run", 1);
        ckd_tensor t = tensor_of("a");
        t.ndim = 1;
        t.shape = length;
        t.data = zeros;
        for (uint64_t i = 0; i < MANY; i++) {
            t.region = range(i, 1);
            assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        }
        t.region = range(0, 1);
        assert_int_equal(overlap ? ckd_save_tensor(save, &t, NULL) : CKD_OK, CKD_OK);
        assert_int_equal(ckd_save_commit(NULL, save, NULL), overlap ? CKD_E_MISMATCH : CKD_OK);
    }
    ckd_store_close(store);
}

/* ---- structs without a size ---- */

typedef struct open_things {
    const char *dir;
    ckd_store *store;
    ckd_save *save; /* begun again for each call */
    ckd_load *load;
    ckd_session *session;
    ckd_id checkpoint;
    size_t size; /* the struct_size to pass */
} open_things;

static ckd_status sized_open(open_things *w, ckd_error *err) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    o.struct_size = w->size;
    return ckd_store_open(&store, store_path_of(w->dir, ""), CKD_OPEN_READ, &o, err);
}
static ckd_status sized_begin(open_things *w, ckd_error *err) {
    ckd_save_options o = options_of("run", 7);
    ckd_save *save;
    o.struct_size = w->size;
    return ckd_save_begin(&save, w->store, &o, err);
}
static ckd_status sized_tensor(open_things *w, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    t.struct_size = w->size;
    return ckd_save_tensor(w->save, &t, err);
}
static ckd_status sized_optimizer(open_things *w, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    ckd_optimizer optimizer = {.struct_size = w->size, .kind = CKD_ADAMW, .step = 1};
    t.optimizer = &optimizer;
    return ckd_save_tensor(w->save, &t, err);
}
static ckd_status sized_device(open_things *w, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    ckd_device device = {.struct_size = w->size};
    t.device = &device;
    return ckd_save_tensor(w->save, &t, err);
}
static ckd_status sized_load(open_things *w, ckd_error *err) {
    ckd_load_options o = {.struct_size = w->size};
    ckd_load *load;
    return ckd_load_begin_with(&load, w->store, &w->checkpoint, &o, err);
}
static ckd_load_request request_of(const open_things *w) {
    ckd_load_request q = {.struct_size = w->size, .name = "w", .data = values, .size = sizeof(values)};
    return q;
}
static ckd_status sized_request(open_things *w, ckd_error *err) {
    ckd_load_request q = request_of(w);
    return ckd_load_tensor(w->load, &q, err);
}
static ckd_status sized_requests(open_things *w, ckd_error *err) {
    ckd_load_request q = request_of(w);
    return ckd_load_all(w->load, &q, 1, 0, err);
}
static ckd_status sized_explain(open_things *w, ckd_error *err) {
    ckd_load_request q = request_of(w);
    ckd_load_explanation *explanation;
    return ckd_load_explain(&explanation, w->load, &q, 1, err);
}
static ckd_status sized_describe(open_things *w, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    ckd_bytes description;
    t.struct_size = w->size;
    return ckd_plan_describe(&description, 0, 1, &t, 1, err);
}
static ckd_status sized_join(open_things *w, ckd_error *err) {
    ckd_ranks_options o = {.struct_size = w->size};
    ckd_ranks *ranks;
    return ckd_ranks_join(&ranks, w->store, &o, err);
}
static ckd_status sized_transport(open_things *w, ckd_error *err) {
    ckd_transport transport = {.struct_size = w->size, .world = 1};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    ckd_ranks *ranks;
    o.world = 1;
    o.transport = &transport;
    return ckd_ranks_join(&ranks, w->store, &o, err);
}
static ckd_status sized_together(open_things *w, ckd_error *err) {
    ckd_transport transport = {.struct_size = w->size, .world = 1};
    ckd_load_request q = request_of(w);
    q.struct_size = sizeof(q);
    return ckd_load_all_together(w->load, &transport, &q, 1, 0, err);
}
static ckd_status sized_session(open_things *w, ckd_error *err) {
    ckd_save_options save = options_of("run", 0);
    ckd_session_options o = {.struct_size = w->size, .save = &save};
    ckd_session *session;
    return ckd_session_open(&session, store_path_of(w->dir, ""), &o, err);
}
static ckd_status sized_session_save(open_things *w, ckd_error *err) {
    ckd_save_options save = options_of("run", 0);
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    ckd_session *session;
    save.struct_size = w->size;
    o.save = &save;
    return ckd_session_open(&session, store_path_of(w->dir, ""), &o, err);
}
static ckd_status sized_session_store(open_things *w, ckd_error *err) {
    ckd_save_options save = options_of("run", 0);
    ckd_store_options store = {.struct_size = w->size};
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    ckd_session *session;
    o.save = &save;
    o.store = &store;
    return ckd_session_open(&session, store_path_of(w->dir, ""), &o, err);
}
static ckd_status sized_add(open_things *w, ckd_error *err) {
    ckd_tensor t = tensor_of("x");
    t.struct_size = w->size;
    return ckd_session_add(w->session, &t, values, 0, err);
}
static ckd_status sized_verify(open_things *w, ckd_error *err) {
    ckd_verify_options o = {.struct_size = w->size};
    ckd_verify_result *result;
    return ckd_store_verify(&result, w->store, &o, err);
}
static ckd_status sized_scrub(open_things *w, ckd_error *err) {
    ckd_scrub_options o = {.struct_size = w->size};
    ckd_scrub_result *result;
    return ckd_store_scrub(&result, w->store, &o, err);
}
static ckd_status sized_parity(open_things *w, ckd_error *err) {
    ckd_parity_options o = {.struct_size = w->size};
    ckd_parity_result *result;
    return ckd_store_parity(&result, w->store, &o, err);
}
static ckd_status sized_repair(open_things *w, ckd_error *err) {
    ckd_repair_options o = {.struct_size = w->size};
    ckd_repair_result *result;
    return ckd_store_repair(&result, w->store, &o, err);
}
static ckd_status sized_compact(open_things *w, ckd_error *err) {
    ckd_compact_options o = {.struct_size = w->size};
    ckd_compaction *compaction;
    return ckd_compact(&compaction, w->store, &o, err);
}
static ckd_status sized_delete(open_things *w, ckd_error *err) {
    ckd_delete_options o = {.struct_size = w->size};
    return ckd_store_delete(w->store, &w->checkpoint, 1, &o, err);
}
static ckd_status sized_collect(open_things *w, ckd_error *err) {
    ckd_collect_options o = {.struct_size = w->size};
    ckd_collected collected;
    return ckd_store_collect(&collected, w->store, &o, err);
}
static ckd_status sized_policy(open_things *w, ckd_error *err) {
    ckd_policy p = {.struct_size = w->size, .keep_last = 1};
    return ckd_store_set_policy(w->store, &p, err);
}
static ckd_status sized_prune(open_things *w, ckd_error *err) {
    ckd_policy p = {.struct_size = w->size, .keep_last = 1};
    ckd_prune *prune;
    return ckd_store_prune(&prune, w->store, &p, NULL, err);
}
static ckd_status sized_prune_delete(open_things *w, ckd_error *err) {
    ckd_policy p = CKD_POLICY_INIT;
    ckd_delete_options o = {.struct_size = w->size};
    ckd_prune *prune;
    p.keep_last = 1;
    return ckd_store_prune(&prune, w->store, &p, &o, err);
}
static ckd_status sized_copy(open_things *w, ckd_error *err) {
    ckd_copy_options o = {.struct_size = w->size};
    ckd_copy_result *result;
    return ckd_copy(&result, w->store, w->store, &o, err);
}

typedef ckd_status (*sized_call)(open_things *w, ckd_error *err);
static const sized_call sized_calls[] = {
    sized_open,     sized_begin,    sized_tensor,       sized_optimizer,     sized_device, sized_load,
    sized_request,  sized_requests, sized_explain,      sized_describe,      sized_join,   sized_transport,
    sized_together, sized_session,  sized_session_save, sized_session_store, sized_add,    sized_verify,
    sized_scrub,    sized_parity,   sized_repair,       sized_compact,       sized_delete, sized_collect,
    sized_policy,   sized_prune,    sized_prune_delete, sized_copy,
};

static void open_all(open_things *w, const char *dir) {
    ckd_save_options save = options_of("session", 0);
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    o.save = &save;
    w->dir = dir;
    w->store = store_create(dir);
    w->checkpoint = save_one(w->store, "run", 1, "w", CKD_F32, 2, shape, values).id;
    assert_int_equal(ckd_load_begin(&w->load, w->store, &w->checkpoint, NULL), CKD_OK);
    assert_int_equal(ckd_session_open(&w->session, store_path_of(dir, ""), &o, NULL), CKD_OK);
}

static void close_all(open_things *w) {
    assert_int_equal(ckd_session_close(w->session, NULL), CKD_OK);
    ckd_load_end(w->load);
    ckd_store_close(w->store);
}

static void test_structs_without_a_size(void **state) {
    static const size_t sizes[] = {0, 5};
    open_things w = {.dir = NULL};
    open_all(&w, *state);
    for (size_t i = 0; i < sizeof(sized_calls) / sizeof(sized_calls[0]); i++) {
        for (size_t k = 0; k < 2; k++) {
            ckd_error err = {0};
            w.size = sizes[k];
            w.save = begin_save(w.store, "run", 2);
            if (sized_calls[i](&w, &err) != CKD_E_INVALID || err.status != CKD_E_INVALID) {
                fail_msg("call %zu with a struct_size of %zu: %s, '%s'", i, w.size,
                         ckd_status_name(err.status), err.message);
            }
            ckd_save_abort(w.save);
        }
    }
    close_all(&w);
}

/* struct_size is smaller or larger than now: the program was compiled for an older or a newer version. */
static void test_structs_of_other_versions(void **state) {
    open_things w = {.dir = NULL};
    open_all(&w, *state);
    struct {
        ckd_load_request q;
        uint64_t more[4];
    } newer = {.q = request_of(&w), .more = {1, 2, 3, 4}};
    newer.q.struct_size = sizeof(newer);
    assert_int_equal(ckd_load_tensor(w.load, &newer.q, NULL), CKD_OK);
    newer.q.struct_size = offsetof(ckd_load_request, device);
    newer.q.device = (const ckd_device *)(uintptr_t)1; /* the older version has no such field */
    assert_int_equal(ckd_load_tensor(w.load, &newer.q, NULL), CKD_OK);
    close_all(&w);
}

/* ---- handles that are NULL ---- */

static void test_handles_that_are_null(void **state) {
    (void)state;
    ckd_error err = {0};
    ckd_save *save;
    ckd_load *load;
    ckd_ranks *ranks;
    ckd_part part;
    ckd_checkpoint info;
    ckd_blob_list *blobs;
    ckd_session_state now;
    ckd_ranks_options alone = CKD_RANKS_OPTIONS_INIT;
    ckd_tensor t = tensor_of("w");
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    ckd_save_options o = options_of("run", 1);
    ckd_id id = {{1}};
    void *data;
    size_t size;
    q.name = "w";
    assert_int_equal(ckd_save_begin(&save, NULL, &o, &err), CKD_E_INVALID);
    assert_int_equal(ckd_ranks_join(&ranks, NULL, &alone, &err), CKD_E_INVALID);
    assert_int_equal(ckd_load_begin(&load, NULL, &id, &err), CKD_E_INVALID);
    assert_int_equal(ckd_save_tensor(NULL, &t, &err), CKD_E_INVALID);
    assert_int_equal(ckd_save_blob(NULL, "b", "1", 1, &err), CKD_E_INVALID);
    assert_int_equal(ckd_save_commit(&info, NULL, &err), CKD_E_INVALID);
    assert_int_equal(ckd_save_seal(&part, NULL, &err), CKD_E_INVALID);
    assert_int_equal(ckd_save_publish(&info, NULL, &part, 1, &err), CKD_E_INVALID);
    assert_int_equal(ckd_load_tensor(NULL, &q, &err), CKD_E_INVALID);
    assert_int_equal(ckd_load_all(NULL, &q, 1, 0, &err), CKD_E_INVALID);
    assert_int_equal(ckd_load_blob(&data, &size, NULL, "b", &err), CKD_E_INVALID);
    assert_int_equal(ckd_load_blobs(&blobs, NULL, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_add(NULL, &t, values, 0, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_add_bytes(NULL, "b", values, 4, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_restore(&info, NULL, CKD_LATEST, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_step(NULL, 1, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_save(NULL, 1, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_wait(NULL, CKD_DURABLE, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_close(NULL, &err), CKD_OK);
    ckd_session_fence(NULL);
    ckd_session_fence_group(NULL, 0);
    ckd_session_metric(NULL, 1);
    ckd_session_phase(NULL, CKD_PHASE_IDLE);
    ckd_session_request(NULL, CKD_REQUEST_SAVE);
    ckd_session_poll(&now, NULL);
    assert_true(now.durable_step == CKD_LATEST && now.saved == 0);
}

static void test_invalid_requests(void **state) {
    open_things w = {.dir = NULL};
    open_all(&w, *state);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    assert_int_equal(ckd_load_tensor(w.load, &q, NULL), CKD_E_INVALID); /* no name */
    assert_int_equal(ckd_load_tensor(w.load, NULL, NULL), CKD_E_INVALID);
    assert_int_equal(ckd_load_all(w.load, NULL, 3, 0, NULL), CKD_E_INVALID);
    close_all(&w);
}

/* ---- steps and paths ---- */

static void test_steps_that_are_too_large(void **state) {
    ckd_session *session;
    ckd_save_options save = options_of("run", 0);
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    ckd_tensor t = tensor_of("w");
    ckd_checkpoint c;
    o.save = &save;
    ckd_store_close(store_create(*state));
    assert_int_equal(ckd_session_open(&session, store_path_of(*state, ""), &o, NULL), CKD_OK);
    assert_int_equal(ckd_session_add(session, &t, values, 0, NULL), CKD_OK);
    assert_int_equal(ckd_session_step(session, UINT64_MAX, NULL), CKD_E_INVALID);
    assert_int_equal(ckd_session_save(session, (uint64_t)INT64_MAX + 1, NULL), CKD_E_INVALID);
    assert_int_equal(ckd_session_save(session, 5, NULL), CKD_OK); /* the refused steps had no effect */
    assert_int_equal(ckd_session_save(session, (uint64_t)INT64_MAX + 1, NULL), CKD_E_INVALID);
    assert_int_equal(ckd_session_save(session, INT64_MAX, NULL), CKD_OK);
    assert_int_equal(ckd_session_close(session, NULL), CKD_OK);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&c, store, "run", CKD_LATEST, NULL), CKD_OK);
    assert_int_equal(c.step, INT64_MAX);
    ckd_store_close(store);
}

static void test_paths_that_are_no_store(void **state) {
    char path[600];
    ckd_store *store;
    ckd_error err;
    ckd_store_close(store_create(*state));
    write_whole_file(store_path_of(*state, "file"), "x", 1);
    for (ckd_open_mode mode = CKD_OPEN_READ; mode <= CKD_OPEN_CREATE; mode++) {
        snprintf(path, sizeof(path), "%s", store_path_of(*state, "file"));
        assert_int_equal(ckd_store_open(&store, path, mode, NULL, &err), CKD_E_INVALID);
        assert_null(store);
        assert_non_null(strstr(err.message, "is not a ckptdelta store"));
        snprintf(path, sizeof(path), "%s/store", store_path_of(*state, "file"));
        assert_int_equal(ckd_store_open(&store, path, mode, NULL, &err), CKD_E_INVALID);
        if (mode != CKD_OPEN_CREATE) {
            assert_int_equal(ckd_store_open(&store, store_path_of(*state, "none"), mode, NULL, &err),
                             CKD_E_NOT_FOUND);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_no_commit_after_a_failed_call), tempdir_test(test_regions_that_overlap),
        tempdir_test(test_one_name_for_two_tensors),      tempdir_test(test_very_many_regions),
        tempdir_test(test_structs_without_a_size),        tempdir_test(test_structs_of_other_versions),
        cmocka_unit_test(test_handles_that_are_null),     tempdir_test(test_invalid_requests),
        tempdir_test(test_steps_that_are_too_large),      tempdir_test(test_paths_that_are_no_store),
    };
    return cmocka_run_group_tests_name("misuse", tests, NULL, NULL);
}
