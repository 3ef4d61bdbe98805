/* Lossy saves of values that are rare in training: what is committed can be loaded and is right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"

enum { N = 64 * 64 };

static void add_matrix(ckd_save *save, const char *name, ckd_dtype dtype, const void *values) {
    const uint64_t shape[2] = {64, 64};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = dtype;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
}

/* Saves one matrix and returns what a load of it gives. */
static float *save_and_load(ckd_store *store, const ckd_save_options *o, const char *name, ckd_dtype dtype,
                            const float *values) {
    void *given = to_dtype(values, dtype, N);
    ckd_save *save = begin_with(store, o);
    add_matrix(save, name, dtype, given);
    commit_save(save);
    free(given);
    return load_floats(store, o->run, o->step, name, dtype, N);
}

static void fill(float *values, uint64_t seed, double scale) {
    for (int i = 0; i < N; i++) {
        values[i] = (float)(scale * drift_normal(&seed));
    }
}

/* A rounded copy whose master is itself stored as a copy. */
static void test_copies_of_zeros(void **state) {
    ckd_store *store = store_create(*state);
    static const float zeros[N];
    static const char *const names[] = {"exp_avg_sq.w", "exp_avg.w", "master.w"};
    float ones[N];
    fill(ones, 3, 1);
    for (int round = 0; round < 2; round++) { /* the result must not depend on earlier jobs */
        ckd_save_options o = lossy_options("zeros", (uint64_t)round, CKD_NEAR);
        ckd_save *save = begin_with(store, &o);
        add_matrix(save, "master.other", CKD_F32, ones);
        for (int i = 0; i < 3; i++) {
            add_matrix(save, names[i], CKD_F32, zeros);
        }
        add_matrix(save, "w", CKD_BF16, zeros);
        commit_save(save);
        float *got = load_floats(store, "zeros", (uint64_t)round, "w", CKD_BF16, N);
        assert_memory_equal(got, zeros, sizeof(zeros));
        free(got);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* Half of an exact parent is -0, which no lattice can represent. */
static void test_negative_zeros_in_the_parent(void **state) {
    ckd_store *store = store_create(*state);
    static const double costs[] = {1, 4};
    for (int c = 0; c < 2; c++) {
        const char *run = c ? "masked4" : "masked1";
        float values[N];
        for (uint64_t step = 0; step < 6; step++) {
            uint64_t seed = 100 + step;
            for (int i = 0; i < N; i++) {
                float moved = (step ? values[i] : 0) + (float)((step ? 0.002 : 0.02) * drift_normal(&seed));
                values[i] = i % 2 ? moved : -0.0f;
            }
            ckd_save_options o = lossy_options(run, step, step ? CKD_NEAR : CKD_EXACT);
            o.max_load_cost = costs[c];
            free(save_and_load(store, &o, "w", CKD_BF16, values));
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* Values that were huge and are ordinary again are stored as such. */
static void test_after_huge_values(void **state) {
    ckd_store *store = store_create(*state);
    static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16};
    for (int d = 0; d < 2; d++) {
        float values[N];
        fill(values, 5, 0.02);
        for (int i = 0; i < N; i += 50) {
            values[i] = 1e10f;
        }
        ckd_save_options o = lossy_options(d ? "blown16" : "blown", 0, CKD_EXACT);
        o.max_load_cost = d ? 1 : 0;
        free(save_and_load(store, &o, "w", dtypes[d], values));
        fill(values, 6, 0.02);
        o.step = 1;
        o.fidelity = CKD_NEAR;
        float *got = save_and_load(store, &o, "w", dtypes[d], values);
        assert_true(largest_error(got, values, N) < 0.1);
        free(got);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* A size target that would need a finer lattice than the format has. */
static void test_targets_of_tiny_values(void **state) {
    ckd_store *store = store_create(*state);
    static const double scales[] = {1e-32, 1e-36};
    for (int i = 0; i < 2; i++) {
        float values[N];
        fill(values, 7, scales[i]);
        ckd_save_options o = lossy_options(i ? "tinier" : "tiny", 0, CKD_NEAR);
        o.target_bits = 64;
        free(save_and_load(store, &o, "exp_avg.w", CKD_F32, values));
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

static void count_damage(void *context, const char *message) {
    *(int *)context += strstr(message, "damage") != NULL;
}

/* Saves each half of a tensor as a region: as it was, moved a little, or replaced, which makes it no delta. */
static void save_halves(ckd_store *store, uint64_t step, float *values, bool replace_first,
                        bool replace_second) {
    const uint64_t shape = N;
    bool replace[2] = {replace_first, replace_second};
    ckd_save_options o = options_of("halves", step);
    o.max_load_cost = 100;
    ckd_save *save = begin_with(store, &o);
    for (uint64_t half = 0; half < 2; half++) {
        float *of = values + half * (N / 2),
              *moved = random_values(CKD_F32, N / 2, (unsigned)(2 * step + half));
        for (int i = 0; i < N / 2; i++) {
            of[i] = step == 0 || replace[half] ? moved[i] : i % 64 ? of[i] : of[i] + 1e-3f * moved[i];
        }
        ckd_region region = {.kind = CKD_REGION_FLAT, .start = half * (N / 2), .count = N / 2};
        add_tensor(save, "w", CKD_F32, 1, &shape, &region, of);
        free(moved);
    }
    commit_save(save);
}

/*
 * The delta goes back to an ancestor that the parent's files hold only in part: the parent's second half is a block of
 * its own, so they lack what the ancestor's builds on. That is no damage.
 */
static void test_ancestors_in_part(void **state) {
    char path[4096];
    int damage_messages = 0;
    float values[N];
    ckd_store *store;
    ckd_store_options s = CKD_STORE_OPTIONS_INIT;
    s.on_message = count_damage;
    s.message_context = &damage_messages;
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &s, NULL), CKD_OK);
    save_halves(store, 0, values, false, false);
    save_halves(store, 1, values, true, false);
    save_halves(store, 2, values, false, true);
    const uint64_t shape = N;
    ckd_save_options o = lossy_options("halves", 3, CKD_NEAR);
    o.max_load_cost = 1;
    ckd_save *save = begin_with(store, &o);
    add_tensor(save, "w", CKD_F32, 1, &shape, NULL, values);
    commit_save(save);
    assert_int_equal(damage_messages, 0);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copies_of_zeros),   tempdir_test(test_negative_zeros_in_the_parent),
        tempdir_test(test_after_huge_values), tempdir_test(test_targets_of_tiny_values),
        tempdir_test(test_ancestors_in_part),
    };
    return cmocka_run_group_tests_name("lossy odd", tests, NULL, NULL);
}
