/* Lossy saves of unusual values that occur in training: zeros, spikes, denormals, NaNs and infinities. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"

enum { ROWS = 64, COLUMNS = 48, N = ROWS * COLUMNS };
static const ckd_fidelity fidelities[2] = {CKD_NEAR, CKD_COARSE};
static const char *const names[3] = {"exp_avg_sq.w", "exp_avg.w", "w"};

/* The three tensors, in the order of `names`. */
typedef struct triple {
    float *values[3];
} triple;

static triple parts_of(drift *d) {
    return (triple){{d->second, d->first, d->weight}};
}

static triple load_triple(ckd_store *store, const char *run, uint64_t step) {
    triple t;
    for (int i = 0; i < 3; i++) {
        t.values[i] = load_floats(store, run, step, names[i], CKD_F32, N);
    }
    return t;
}

static void free_triple(triple *t) {
    for (int i = 0; i < 3; i++) {
        free(t->values[i]);
    }
}

static void save_step(ckd_store *store, const char *run, uint64_t step, ckd_fidelity fidelity,
                      const drift *d) {
    ckd_save_options o = lossy_options(run, step, fidelity);
    save_drift(store, &o, d);
}

/* ---- NaNs and infinities ---- */

enum { ODD = 7 };
static const uint64_t odd_at[ODD] = {0, 1, COLUMNS, 777, 778, 2000, N - 1};
static const uint32_t odd_bits[ODD] = {0x7fc00000, 0xffc12345, 0x7f800000, 0xff800000,
                                       0x7f800001, 0x7fffffff, 0xff800000};

static void make_odd(float *values) {
    for (int i = 0; i < ODD; i++) {
        memcpy(&values[odd_at[i]], &odd_bits[i], 4);
    }
}

static void check_odd(const float *got) {
    for (int i = 0; i < ODD; i++) {
        assert_memory_equal(&got[odd_at[i]], &odd_bits[i], 4);
    }
}

/* Saves steps 0 to 3. Those whose bit is set in odd_steps have NaNs and infinities. */
static void nan_in(ckd_store *store, ckd_fidelity fidelity, unsigned odd_steps, const char *run) {
    drift d = drift_new(ROWS, COLUMNS, 3);
    for (uint64_t step = 0; step < 4; step++, drift_step(&d)) {
        bool odd = odd_steps >> step & 1;
        triple given = parts_of(&d);
        float *clean[3];
        for (int i = 0; i < 3; i++) {
            clean[i] = malloc(N * sizeof(float));
            memcpy(clean[i], given.values[i], N * sizeof(float));
            if (odd) {
                make_odd(given.values[i]);
            }
        }
        save_step(store, run, step, fidelity, &d);
        triple got = load_triple(store, run, step);
        for (int i = 0; i < 3; i++) {
            ckd_tensor_info info = tensor_info(store, run, step, names[i]);
            assert_int_equal(info.nonfinite, odd ? ODD : 0);
            if (odd) {
                check_odd(got.values[i]);
            }
            double error = relative_error(got.values[i], given.values[i], N), most = i < 2 ? 1.01 : 0.04;
            if (!(error < most)) {
                fail_msg("%s, %s, step %u: %g", names[i], run, (unsigned)step, error);
            }
            assert_true(info.rel_l2 >= 0.99 * error && info.rel_l2 <= 1.01 * error);
            memcpy(given.values[i], clean[i], N * sizeof(float));
            free(clean[i]);
        }
        free_triple(&got);
    }
    drift_free(&d);
}

static void test_nonfinite_values_are_exact(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        for (unsigned odd = 1; odd < 16; odd += 2) {
            char run[32];
            snprintf(run, sizeof(run), "%s%u", ckd_fidelity_name(fidelities[f]), odd);
            nan_in(store, fidelities[f], odd, run);
            nan_in(store, fidelities[f], odd ^ 1u, strcat(run, "b"));
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* A NaN changes other values only through statistics of the tensor. */
static void test_neighbours_of_nan(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        for (int odd = 0; odd < 2; odd++) {
            drift d = drift_new(ROWS, COLUMNS, 5);
            save_step(store, odd ? "odd" : "even", (uint64_t)f * 10, fidelities[f], &d);
            drift_step(&d);
            triple given = parts_of(&d);
            for (int i = 0; i < 3 && odd; i++) {
                given.values[i][1000] = NAN;
            }
            save_step(store, odd ? "odd" : "even", (uint64_t)f * 10 + 1, fidelities[f], &d);
            drift_free(&d);
        }
        triple with = load_triple(store, "odd", (uint64_t)f * 10 + 1),
               without = load_triple(store, "even", (uint64_t)f * 10 + 1);
        for (int i = 0; i < 3; i++) {
            with.values[i][1000] = without.values[i][1000];
            double change = relative_error(with.values[i], without.values[i], N);
            if (!(change < (i < 2 ? 0.2 : 0.03))) { /* less than the coder's own error */
                fail_msg("%s: a NaN changes others by %g", names[i], change);
            }
        }
        free_triple(&with);
        free_triple(&without);
    }
    ckd_store_close(store);
}

/* Tensors with so many NaNs that they are stored exactly. */
static void test_tensors_of_nan(void **state) {
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < 3; step++) {
        drift d = drift_new(ROWS, COLUMNS, (unsigned)step);
        triple given = parts_of(&d);
        for (int i = 0; i < 3; i++) {
            for (uint64_t k = 0; k < N && step != 1; k += 1 + step) {
                given.values[i][k] = k % 3 ? NAN : -INFINITY;
            }
        }
        save_step(store, "r", step, CKD_COARSE, &d);
        triple got = load_triple(store, "r", step);
        for (int i = 0; i < 3 && step != 1; i++) {
            assert_memory_equal(got.values[i], given.values[i], N * sizeof(float));
            assert_int_equal(tensor_info(store, "r", step, names[i]).nonfinite, N / (1 + step));
        }
        assert_true(relative_error(got.values[2], given.values[2], N) < 0.04);
        free_triple(&got);
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* ---- zeros and other unusual tensors ---- */

typedef void (*fill_fn)(float *values, uint64_t step);

static void zeros(float *values, uint64_t step) {
    (void)step;
    memset(values, 0, N * sizeof(float));
}
static void negative_zeros(float *values, uint64_t step) {
    (void)step;
    for (int i = 0; i < N; i++) {
        values[i] = -0.0f;
    }
}
static void ones(float *values, uint64_t step) {
    for (int i = 0; i < N; i++) {
        values[i] = 1 + (float)step;
    }
}
static void denormals(float *values, uint64_t step) {
    for (uint32_t i = 0; i < N; i++) {
        uint32_t bits = (i * 977 + (uint32_t)step) & 0x7fffff;
        memcpy(&values[i], &bits, 4);
    }
}
static void largest(float *values, uint64_t step) {
    for (uint32_t i = 0; i < N; i++) {
        values[i] = (i + step) % 5 ? FLT_MAX : FLT_MAX / 3;
    }
}
static void all_scales(float *values, uint64_t step) {
    for (int i = 0; i < N; i++) {
        values[i] = ldexpf(1 + 0.1f * (float)step, i % 250 - 125);
    }
}

static const struct {
    const char *what;
    fill_fn fill;
    double most[3]; /* largest relative error of each tensor */
} fills[] = {
    {"zeros", zeros, {0, 0, 0}},       {"negative", negative_zeros, {0, 0, 0}},
    {"ones", ones, {0.5, 1, 0.3}},     {"denormals", denormals, {5, 1, 1}},
    {"largest", largest, {1, 1, 0.4}}, {"scales", all_scales, {1, 1, 1}},
};
enum { FILLS = sizeof(fills) / sizeof(fills[0]) };

static void test_strange_tensors(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        for (size_t kind = 0; kind < FILLS; kind++) {
            char run[64];
            snprintf(run, sizeof(run), "%s.%s", fills[kind].what, ckd_fidelity_name(fidelities[f]));
            drift d = drift_new(ROWS, COLUMNS, 1);
            for (uint64_t step = 0; step < 4; step++) {
                triple given = parts_of(&d);
                for (int i = 0; i < 3; i++) {
                    fills[step == 2 ? 0 : kind].fill(given.values[i], step + (uint64_t)i);
                }
                save_step(store, run, step, fidelities[f], &d);
                triple got = load_triple(store, run, step);
                for (int i = 0; i < 3; i++) {
                    double error = relative_error(got.values[i], given.values[i], N),
                           most = fills[step == 2 ? 0 : kind].most[i];
                    for (int k = 0; k < N; k++) {
                        if (!isfinite(got.values[i][k])) {
                            fail_msg("%s, %s, step %u: %g became %g", names[i], run, (unsigned)step,
                                     given.values[i][k], got.values[i][k]);
                        }
                        assert_true(i > 0 || (given.values[i][k] == 0) == (got.values[i][k] == 0));
                    }
                    if (!(error <= most + 1e-9)) {
                        fail_msg("%s, %s, step %u: %g", names[i], run, (unsigned)step, error);
                    }
                }
                free_triple(&got);
            }
            drift_free(&d);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* One value jumps and comes back. So does the loaded value, within a few steps, and the other values stay close. */
static void test_a_spike(void **state) {
    static const float spikes[] = {1, 100, 1e10f, -1e30f, FLT_MAX};
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        for (size_t s = 0; s < sizeof(spikes) / sizeof(spikes[0]); s++) {
            char run[64];
            snprintf(run, sizeof(run), "spike%zu.%s", s, ckd_fidelity_name(fidelities[f]));
            drift d = drift_new(ROWS, COLUMNS, 9);
            for (uint64_t step = 0; step < 8; step++, drift_step(&d)) {
                triple given = parts_of(&d);
                float kept[3];
                for (int i = 0; i < 3; i++) {
                    kept[i] = given.values[i][500];
                    given.values[i][500] = step == 3 ? (i == 0 ? fabsf(spikes[s]) : spikes[s]) : kept[i];
                }
                save_step(store, run, step, fidelities[f], &d);
                triple got = load_triple(store, run, step);
                float there = got.values[2][500];
                double others;
                if (step == 3) {
                    assert_true(fabs((double)there - spikes[s]) < 0.3 * fabs((double)spikes[s]));
                    got.values[2][500] = kept[2];
                    given.values[2][500] = kept[2];
                }
                others = relative_error(got.values[2], given.values[2], N);
                if (!(others < (step < 3 ? 0.04 : 0.1))) {
                    fail_msg("%s, step %u: weights are off by %g, the spike by %g", run, (unsigned)step,
                             others, fabs((double)there - given.values[2][500]));
                }
                double second = relative_error(got.values[0], given.values[0], N);
                if (!(second <= 1)) {
                    fail_msg("%s, step %u: second moments are off by %g", run, (unsigned)step, second);
                }
                for (int i = 0; i < 3; i++) {
                    given.values[i][500] = kept[i];
                }
                free_triple(&got);
            }
            drift_free(&d);
        }
    }
    ckd_store_close(store);
}

/*
 * Rows of an embedding whose tokens have not occurred: both moments are zero until their token occurs for the first
 * time.
 */
static void test_unused_embedding_rows(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        drift d = drift_new(ROWS, COLUMNS, 4);
        for (uint64_t step = 0; step < 6; step++, drift_step(&d)) {
            uint64_t awake = (step * ROWS / 8 + 5) * COLUMNS;
            triple given = parts_of(&d);
            float *kept[2];
            for (int i = 0; i < 2; i++) {
                kept[i] = malloc(N * sizeof(float));
                memcpy(kept[i], given.values[i], N * sizeof(float));
                memset(given.values[i] + awake, 0, (N - awake) * sizeof(float));
            }
            save_step(store, ckd_fidelity_name(fidelities[f]), step, fidelities[f], &d);
            triple got = load_triple(store, ckd_fidelity_name(fidelities[f]), step);
            for (uint64_t k = 0; k < N; k++) {
                assert_true((got.values[0][k] == 0) == (k >= awake));
                assert_true(k < awake || got.values[1][k] == 0);
                assert_true(k >= awake || got.values[0][k] > given.values[0][k] / 4096);
            }
            assert_true(relative_error(got.values[2], given.values[2], N) < 0.04);
            for (int i = 0; i < 2; i++) {
                memcpy(given.values[i], kept[i], N * sizeof(float));
                free(kept[i]);
            }
            free_triple(&got);
        }
        drift_free(&d);
    }
    ckd_store_close(store);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_nonfinite_values_are_exact),
        TEST(test_neighbours_of_nan),
        TEST(test_tensors_of_nan),
        TEST(test_strange_tensors),
        TEST(test_a_spike),
        TEST(test_unused_embedding_rows),
    };
    return cmocka_run_group_tests_name("lossy_values", tests, NULL, NULL);
}
