/*
 * Suspect checkpoints: which saves are marked, what the mark survives, and what passes marked checkpoints over.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <unistd.h>

#include "include/ckptdelta_compact.h"
#include "include/ckptdelta_loads.h"
#include "include/ckptdelta_retain.h"
#include "include/ckptdelta_transfer.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define N 5000

static char messages[8192]; /* one per line */

static void on_message(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
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
    o.threads = 2;
    o.on_message = on_message;
    must(ckd_store_open(&store, store_path_of(dir, ""), mode, &o, &err), &err);
    messages[0] = '\0';
    return store;
}

/* One tensor of a state: `bad` of its values are NaN or infinite. */
typedef struct one_tensor {
    const char *name;
    ckd_role role;
    ckd_dtype dtype;
    uint64_t bad;
} one_tensor;

/* Finite values of any float dtype that change with the step, behind `bad` ones that are not. */
static void fill(void *to, const one_tensor *t, uint64_t step) {
    size_t width = ckd_dtype_size(t->dtype);
    for (uint64_t i = 0; i < N; i++) {
        static const uint64_t bad[] = {
            [CKD_F64] = 0xfff0000000000000, [CKD_F32] = 0x7fc00001, [CKD_F16] = 0xfc00, [CKD_BF16] = 0x7f80,
            [CKD_F8_E4M3] = 0x7f,           [CKD_F8_E5M2] = 0x7d};
        static const uint64_t one[] = {
            [CKD_F64] = 0x3ff0000000000000, [CKD_F32] = 0x3f800000, [CKD_F16] = 0x3c00, [CKD_BF16] = 0x3f80,
            [CKD_F8_E4M3] = 0x38,           [CKD_F8_E5M2] = 0x3c};
        /* noise that stays, so that f32 values are saved as deltas */
        uint64_t noise = t->dtype == CKD_F32 ? i * 2654435761u % 0x3fffff : i * 7 % 3;
        uint64_t bits = i < t->bad ? bad[t->dtype] : one[t->dtype] + noise + step % 2;
        memcpy((uint8_t *)to + i * width, &bits, width);
    }
}

static ckd_save_options options_of(const char *run, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    return o;
}

static ckd_checkpoint save_with(ckd_store *store, const ckd_save_options *o, const one_tensor *tensors,
                                size_t count) {
    static uint64_t values[N];
    ckd_save *save;
    ckd_checkpoint saved;
    ckd_error err = {0};
    const uint64_t shape[1] = {N};
    must(ckd_save_begin(&save, store, o, &err), &err);
    for (size_t i = 0; i < count; i++) {
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = tensors[i].name;
        t.role = tensors[i].role;
        t.dtype = tensors[i].dtype;
        t.ndim = 1;
        t.shape = shape;
        t.data = values;
        fill(values, &tensors[i], o->step);
        must(ckd_save_tensor(save, &t, &err), &err);
    }
    must(ckd_save_commit(&saved, save, &err), &err);
    return saved;
}

/* Saves a weight with `bad` values, whatever its moments. */
static ckd_checkpoint save_weight(ckd_store *store, const char *run, uint64_t step, uint64_t bad) {
    ckd_save_options o = options_of(run, step);
    return save_with(store, &o, &(one_tensor){"w", CKD_ROLE_WEIGHT, CKD_F32, bad}, 1);
}

static uint64_t nonfinite_of(ckd_store *store, const ckd_checkpoint *c, size_t tensor) {
    ckd_tensor_list *list;
    ckd_error err = {0};
    must(ckd_store_tensors(&list, store, &c->id, &err), &err);
    uint64_t found = list->items[tensor].nonfinite;
    ckd_tensor_list_free(list);
    return found;
}

static ckd_checkpoint found(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    ckd_error err = {0};
    must(ckd_store_find(&c, store, run, step, &err), &err);
    return c;
}

/* ---- the verdict ---- */

static void test_every_float_dtype(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (int d = CKD_F64; d <= CKD_F8_E5M2; d++) {
        char run[32];
        snprintf(run, sizeof(run), "r%d", d);
        ckd_save_options o = options_of(run, 1);
        one_tensor t = {"w", CKD_ROLE_WEIGHT, (ckd_dtype)d, 0};
        assert_int_equal(save_with(store, &o, &t, 1).suspect, 0);
        t.bad = 3;
        o.step = 2;
        ckd_checkpoint c = save_with(store, &o, &t, 1);
        assert_int_equal(c.suspect, CKD_SUSPECT_NONFINITE);
        assert_int_equal(nonfinite_of(store, &c, 0), 3);
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

static void test_message(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    one_tensor t[] = {{"w", CKD_ROLE_WEIGHT, CKD_F32, 0}, {"a", CKD_ROLE_EXP_AVG, CKD_F32, 0}};
    ckd_save_options o = options_of("gpt", 1);
    save_with(store, &o, t, 2);
    assert_string_equal(messages, "");
    t[0].bad = 40;
    t[1].bad = N;
    o.step = 2;
    save_with(store, &o, t, 2);
    assert_string_equal(messages,
                        "gpt@2: 2 tensors have become NaN or infinite (first: w, 40 of 5000 values); the "
                        "checkpoint is marked suspect\n");
    ckd_store_close(store);
}

/* Values that were not finite from the start are meant so; more of them are not. Other tensors never count. */
static void test_what_was_there_from_the_start(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    one_tensor t[] = {{"mask", CKD_ROLE_WEIGHT, CKD_F32, 100}, {"best", CKD_ROLE_OTHER, CKD_F32, 0}};
    ckd_save_options o = options_of("gpt", 1);
    assert_int_equal(save_with(store, &o, t, 2).suspect, 0);
    t[1].bad = N;
    o.step = 2;
    assert_int_equal(save_with(store, &o, t, 2).suspect, 0);
    t[0].bad = 101;
    o.step = 3;
    assert_true(save_with(store, &o, t, 2).suspect);
    o.step = 4; /* the same as in a suspect checkpoint is no excuse */
    assert_true(save_with(store, &o, t, 2).suspect);
    t[0].bad = 100;
    o.step = 5;
    o.base = 1;
    assert_int_equal(save_with(store, &o, t, 2).suspect, 0);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A mask that becomes larger has more minus infinities. */
static void test_another_shape(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    static float values[2 * N];
    for (uint64_t step = 1; step <= 4; step++) {
        ckd_save_options o = options_of("gpt", step);
        ckd_save *save;
        ckd_checkpoint c;
        ckd_error err = {0};
        uint64_t count = step == 1 ? N : 2 * N, infinite = count / 2 + (step == 4);
        for (uint64_t i = 0; i < count; i++) {
            values[i] = i < infinite ? -INFINITY : 0;
        }
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "mask";
        t.dtype = CKD_F32;
        t.ndim = 1;
        t.shape = &count;
        t.data = values;
        must(ckd_save_begin(&save, store, &o, &err), &err);
        must(ckd_save_tensor(save, &t, &err), &err);
        must(ckd_save_commit(&c, save, &err), &err);
        assert_int_equal(c.suspect, step == 4 ? CKD_SUSPECT_NONFINITE : 0);
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A moment or a master is never meant so, not even in the first checkpoint. */
static void test_moments_from_the_start(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    static const ckd_role roles[] = {CKD_ROLE_EXP_AVG, CKD_ROLE_EXP_AVG_SQ, CKD_ROLE_MASTER};
    for (size_t i = 0; i < 3; i++) {
        char run[32];
        snprintf(run, sizeof(run), "r%zu", i);
        ckd_save_options o = options_of(run, 1);
        one_tensor t = {"a", roles[i], CKD_F32, 1};
        assert_true(save_with(store, &o, &t, 1).suspect);
        o.step = 2; /* it comes from a suspect checkpoint, and there is no healthy one */
        assert_true(save_with(store, &o, &t, 1).suspect);
    }
    ckd_store_close(store);
}

static void test_lossy(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    one_tensor t[] = {{"w", CKD_ROLE_WEIGHT, CKD_F32, 0}, {"fixed", CKD_ROLE_OTHER, CKD_F32, 7}};
    ckd_save_options o = options_of("gpt", 1);
    o.fidelity = CKD_NEAR;
    ckd_checkpoint c = save_with(store, &o, t, 2);
    assert_true(!c.suspect && nonfinite_of(store, &c, 0) == 0 && nonfinite_of(store, &c, 1) == 7);
    t[0].bad = 5;
    o.step = 2;
    c = save_with(store, &o, t, 2);
    assert_true(c.suspect && nonfinite_of(store, &c, 0) == 5 && nonfinite_of(store, &c, 1) == 7);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Each rank saves its part; one of them has a NaN. */
static void test_ranks(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    static float values[2][N];
    const uint64_t shape[1] = {2 * N};
    for (uint64_t step = 1; step <= 3; step++) {
        ckd_save *saves[2];
        ckd_part parts[2];
        ckd_checkpoint c;
        ckd_error err = {0};
        ckd_save_options o = options_of("gpt", step);
        o.world = 2;
        must(ckd_id_new(&o.checkpoint_id, &err), &err);
        for (uint32_t rank = 0; rank < 2; rank++) {
            for (size_t i = 0; i < N; i++) {
                values[rank][i] = step == 2 && rank == 1 && i == 4000 ? NAN : (float)(i + step);
            }
            ckd_tensor t = CKD_TENSOR_INIT;
            t.name = "w";
            t.dtype = CKD_F32;
            t.ndim = 1;
            t.shape = shape;
            t.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = rank * (uint64_t)N, .count = N};
            t.data = values[rank];
            o.rank = rank;
            must(ckd_save_begin(&saves[rank], store, &o, &err), &err);
            must(ckd_save_tensor(saves[rank], &t, &err), &err);
            must(ckd_save_seal(&parts[rank], saves[rank], &err), &err);
        }
        must(ckd_save_publish(&c, saves[0], parts, 2, &err), &err);
        ckd_save_end(saves[1]);
        ckd_part_free(&parts[0]);
        ckd_part_free(&parts[1]);
        assert_int_equal(c.suspect, step == 2 ? CKD_SUSPECT_NONFINITE : 0);
        assert_int_equal(nonfinite_of(store, &c, 0), step == 2);
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- what becomes of it ---- */

/* Runs of a healthy, a suspect and again a healthy checkpoint. */
static void make_three(ckd_store *store) {
    save_weight(store, "gpt", 1, 0);
    save_weight(store, "gpt", 2, 9);
    save_weight(store, "gpt", 3, 0);
}

static void expect_marks(ckd_store *store, const char *run) {
    for (uint64_t step = 1; step <= 3; step++) {
        ckd_checkpoint c = found(store, run, step);
        assert_int_equal(c.suspect, step == 2 ? CKD_SUSPECT_NONFINITE : 0);
        assert_int_equal(nonfinite_of(store, &c, 0), step == 2 ? 9 : 0);
    }
}

/* The mark is in the manifest: a lost catalog, a compaction, a new name and a copy keep it. */
static void test_the_mark_is_durable(void **state) {
    ckd_error err = {0};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE), *other;
    make_three(store);
    expect_marks(store, "gpt");
    ckd_store_close(store);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    store = open_store(*state, CKD_OPEN_READ);
    expect_marks(store, "gpt");
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    expect_marks(store, "gpt");
    ckd_checkpoint c = found(store, "gpt", 2);
    must(ckd_store_pin(store, &c.id, NULL, &err), &err);
    save_weight(store, "gpt", 4, 0);
    ckd_policy p = CKD_POLICY_INIT;
    p.keep_last = 2;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.policy = &p; /* deletes the first, on which the others are deltas */
    must(ckd_compact(NULL, store, &o, &err), &err);
    c = found(store, "gpt", 2);
    assert_true(c.suspect && !found(store, "gpt", 3).suspect);
    assert_int_equal(nonfinite_of(store, &c, 0), 9);
    must(ckd_store_rename_run(NULL, store, "gpt", "new", NULL, &err), &err);
    assert_true(found(store, "new", 2).suspect && !found(store, "new", 3).suspect);
    char path[256];
    snprintf(path, sizeof(path), "%s/other", (const char *)*state);
    must(ckd_store_open(&other, path, CKD_OPEN_CREATE, NULL, &err), &err);
    must(ckd_copy(NULL, other, store, NULL, &err), &err);
    c = found(other, "new", 2);
    assert_true(c.suspect && nonfinite_of(other, &c, 0) == 9 && !found(other, "new", 3).suspect);
    ckd_store_close(other);
    ckd_store_close(store);
    store_check_clean(*state);
}

static bool same_id(const ckd_id *a, const ckd_id *b) {
    return memcmp(a, b, sizeof(*a)) == 0;
}

/* Saves are deltas on the last healthy checkpoint, as long as there is one. */
static void test_parent(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_checkpoint first = save_weight(store, "gpt", 1, 0);
    for (uint64_t step = 2; step <= 4; step++) {
        ckd_checkpoint c = save_weight(store, "gpt", step, step == 4 ? 0 : 9);
        assert_true(same_id(&c.parent, &first.id));
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

static void test_newest_healthy(void **state) {
    ckd_error err = {0};
    ckd_checkpoint c;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 1; step <= 4; step++) {
        save_weight(store, "gpt", step, step >= 3 ? 9 : 0);
    }
    ckd_checkpoint newest = found(store, "gpt", CKD_LATEST);
    assert_int_equal(newest.step, 4);
    messages[0] = '\0';
    must(ckd_store_healthy(&c, store, &newest, &err), &err);
    assert_int_equal(c.step, 2);
    assert_string_equal(messages, "gpt@4 is suspect and passed over: gpt@2 is used instead\n");
    messages[0] = '\0';
    must(ckd_store_healthy(&c, store, &c, &err), &err);
    assert_int_equal(c.step, 2);
    assert_string_equal(messages, "");
    must(ckd_store_previous(&c, store, "gpt", 4, &err), &err);
    assert_int_equal(c.step, 2);
    ckd_save_options o = options_of("bad", 5);
    save_with(store, &o, &(one_tensor){"a", CKD_ROLE_EXP_AVG, CKD_F32, 1}, 1);
    newest = found(store, "bad", CKD_LATEST);
    assert_int_equal(ckd_store_healthy(&c, store, &newest, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "name its step, 5"));
    ckd_store_close(store);
}

/* A manifest that is damaged may be that of a later healthy checkpoint, so it is not passed over without a word. */
static void test_a_damaged_manifest_among_suspect_ones(void **state) {
    static const struct {
        const char *run;
        uint64_t step, bad;
    } saved[] = {{"gpt", 1, 0}, {"gpt", 2, 0},   {"gpt", 3, 9},
                 {"gpt", 4, 9}, {"gpt~2", 2, 0}, {"gpt~2", 3, 9}};
    ckd_error err = {0};
    ckd_checkpoint c;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (size_t i = 0; i < sizeof(saved) / sizeof(saved[0]); i++) {
        save_weight(store, saved[i].run, saved[i].step, saved[i].bad);
    }
    ckd_store_close(store);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")),
                     0); /* it would still list what is damaged */
    for (int branch = 0; branch < 2; branch++) {
        const char *run = branch ? "gpt~2" : "gpt";
        char name[64];
        size_t size;
        snprintf(name, sizeof(name), "data/m/%s.2.0", run);
        unsigned char *data = read_whole_file(store_path_of(*state, name), &size);
        data[size / 2] ^= 1;
        write_whole_file(store_path_of(*state, name), data, size);
        store = open_store(*state, CKD_OPEN_READ);
        ckd_checkpoint newest = found(store, run, CKD_LATEST);
        assert_true(newest.suspect);
        assert_int_equal(ckd_store_healthy(&c, store, &newest, &err), CKD_E_CORRUPT);
        assert_non_null(strstr(err.message, branch ? "gpt~2@2 is of a later branch than gpt@2"
                                                   : "gpt@2 is newer than gpt@1 and cannot be read"));
        assert_true(strcmp(c.run, "gpt") == 0 && c.step == (branch ? 2 : 1));
        ckd_store_close(store);
        data[size / 2] ^= 1;
        write_whole_file(store_path_of(*state, name), data, size);
        free(data);
    }
}

/* ---- retention ---- */

/* Which of the steps a policy keeps; bit i: step i. */
static unsigned kept_steps(ckd_store *store, const ckd_policy *p) {
    ckd_prune *plan;
    ckd_error err = {0};
    must(ckd_store_plan_prune(&plan, store, p, &err), &err);
    unsigned steps = 0;
    for (size_t i = 0; i < plan->count; i++) {
        steps |= plan->items[i].kept ? 1u << plan->items[i].checkpoint.step : 0;
    }
    ckd_prune_free(plan);
    return steps;
}

static void test_policies_do_not_count_them(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < 12; step++) { /* suspect: 3, and from 8 on */
        save_weight(store, "gpt", step, step == 3 || step >= 8 ? 9 : 0);
    }
    ckd_policy p = CKD_POLICY_INIT;
    p.keep_last = 3;
    assert_int_equal(kept_steps(store, &p), 1u << 5 | 1u << 6 | 1u << 7 | 1u << 11);
    p.keep_last = 1;
    assert_int_equal(kept_steps(store, &p), 1u << 6 | 1u << 7 | 1u << 11);
    p = (ckd_policy)CKD_POLICY_INIT;
    p.keep_every = 3;
    assert_int_equal(kept_steps(store, &p), 1u << 0 | 1u << 6 | 1u << 7 | 1u << 11);
    p = (ckd_policy)CKD_POLICY_INIT;
    p.keep_new_s = p.keep_within_s = 3600;
    p.keep_daily = 4;
    assert_int_equal(kept_steps(store, &p), 0xf7 | 1u << 11);
    save_weight(store, "gpt", 12, 0);
    p = (ckd_policy)CKD_POLICY_INIT;
    p.keep_last = 2;
    assert_int_equal(kept_steps(store, &p), 1u << 7 | 1u << 12);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * Random runs under random policies: of the healthy checkpoints those stay that would stay in a run without the suspect
 * ones, and of these only the newest of the run.
 */
static void test_random_policies(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    srand(7);
    for (int round = 0; round < 12; round++) {
        char mixed[32], pure[32];
        snprintf(mixed, sizeof(mixed), "mixed%d", round);
        snprintf(pure, sizeof(pure), "pure%d", round);
        unsigned suspect = 0;
        int count = 1 + rand() % 14;
        for (int step = 0; step < count; step++) {
            bool bad = step > 0 && rand() % 3 == 0;
            suspect |= bad ? 1u << step : 0;
            save_weight(store, mixed, (uint64_t)step, bad ? 1 : 0);
            if (!bad) {
                save_weight(store, pure, (uint64_t)step, 0);
            }
        }
        ckd_policy p = CKD_POLICY_INIT;
        p.keep_last = (uint32_t)(rand() % 4);
        p.keep_every = (uint64_t)(1 + rand() % 5);
        p.keep_first = rand() % 2;
        p.run = pure;
        unsigned want = kept_steps(store, &p) | (suspect & 1u << (count - 1));
        p.run = mixed;
        assert_int_equal(kept_steps(store, &p), want);
    }
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A run that stays NaN, under a policy that each save applies: the store keeps its size, and the healthy ones stay. */
static void test_a_run_that_stays_nan(void **state) {
    ckd_error err = {0};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_policy p = CKD_POLICY_INIT;
    p.run = "gpt";
    p.keep_last = 2;
    p.automatic = 1;
    p.undo_s = 0;
    must(ckd_store_set_policy(store, &p, &err), &err);
    for (uint64_t step = 1; step <= 20; step++) {
        save_weight(store, "gpt", step, step >= 6 ? N : 0);
    }
    ckd_checkpoint_list *list;
    must(ckd_store_list(&list, store, "gpt", &err), &err);
    assert_int_equal(list->count, 3);
    assert_true(list->items[0].step == 4 && list->items[1].step == 5 && list->items[2].step == 20);
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    store_check_clean(*state);
}

int main(void) {
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(every_float_dtype),
        TEST(message),
        TEST(what_was_there_from_the_start),
        TEST(another_shape),
        TEST(moments_from_the_start),
        TEST(lossy),
        TEST(ranks),
        TEST(the_mark_is_durable),
        TEST(parent),
        TEST(newest_healthy),
        TEST(a_damaged_manifest_among_suspect_ones),
        TEST(policies_do_not_count_them),
        TEST(random_policies),
        TEST(a_run_that_stays_nan),
    };
    return cmocka_run_group_tests_name("suspect checkpoints", tests, NULL, NULL);
}
