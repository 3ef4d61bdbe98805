/*
 * What lossy saves do to each kind of tensor, through the public interface: which are lossy, how large the errors are,
 * and what stays exact.
 */
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

enum { ROWS = 48, COLUMNS = 40, N = ROWS * COLUMNS, STEPS = 3 };
static const uint64_t shape[2] = {ROWS, COLUMNS};
static const ckd_fidelity fidelities[2] = {CKD_NEAR, CKD_COARSE};

static const char *run_of(ckd_fidelity f) {
    return f == CKD_NEAR ? "near" : "coarse";
}

static const float *part_of(const drift *d, ckd_role role) {
    return role == CKD_ROLE_EXP_AVG ? d->first : role == CKD_ROLE_EXP_AVG_SQ ? d->second : d->weight;
}

static void add_as(ckd_save *save, const char *name, ckd_dtype dtype, ckd_role role, const float *values) {
    void *data = to_dtype(values, dtype, N);
    ckd_tensor t = CKD_TENSOR_INIT;
    ckd_error err = {0};
    t.name = name;
    t.dtype = dtype;
    t.role = role;
    t.ndim = 2;
    t.shape = shape;
    t.data = data;
    if (ckd_save_tensor(save, &t, &err) != CKD_OK) {
        fail_msg("%s: %s", name, err.message);
    }
    free(data);
}

/* ---- every dtype in every role ---- */

static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16, CKD_F64};
enum { DTYPES = 4 };

static const struct {
    ckd_role role;
    const char *prefix;
    double most[2]; /* largest relative error, near and coarse */
} kinds[] = {{CKD_ROLE_EXP_AVG_SQ, "exp_avg_sq.", {0.7, 1}},
             {CKD_ROLE_EXP_AVG_SQ, "max_exp_avg_sq.", {0.7, 1}},
             {CKD_ROLE_EXP_AVG, "exp_avg.", {1, 1.01}},
             {CKD_ROLE_MASTER, "master.", {0.02, 0.04}},
             {CKD_ROLE_WEIGHT, "", {0.02, 0.04}},
             {CKD_ROLE_OTHER, "other.", {0, 0}}};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static const char *name_of(char name[64], size_t kind, size_t dtype) {
    snprintf(name, 64, "%s%s", kinds[kind].prefix, ckd_dtype_name(dtypes[dtype]));
    return name;
}

static void save_every_kind(ckd_store *store, ckd_fidelity fidelity, uint64_t step, const drift d[KINDS]) {
    char name[64];
    ckd_save_options o = lossy_options(run_of(fidelity), step, fidelity);
    ckd_save *save = begin_with(store, &o);
    for (size_t dtype = 0; dtype < DTYPES; dtype++) {
        for (size_t k = 0; k < KINDS; k++) {
            add_as(save, name_of(name, k, dtype), dtypes[dtype], kinds[k].role,
                   part_of(&d[k], kinds[k].role));
        }
    }
    commit_save(save);
}

static void check_kind(ckd_store *store, ckd_fidelity fidelity, uint64_t step, const drift *d, size_t k,
                       size_t dtype) {
    char name[64];
    name_of(name, k, dtype);
    ckd_dtype as = dtypes[dtype];
    void *given = to_dtype(part_of(d, kinds[k].role), as, N);
    void *raw = load_whole(store, run_of(fidelity), step, name, N * ckd_dtype_size(as));
    ckd_tensor_info info = tensor_info(store, run_of(fidelity), step, name);
    /* without a parent, 16-bit weights are exact; such masters are rounded copies of the f32 ones */
    bool exact_base = kinds[k].role == CKD_ROLE_WEIGHT && as != CKD_F32 && step == 0;
    if (as == CKD_F64 || kinds[k].role == CKD_ROLE_OTHER ||
        (as == CKD_F16 && kinds[k].role == CKD_ROLE_EXP_AVG_SQ) || exact_base) {
        assert_memory_equal(raw, given, N * ckd_dtype_size(as));
        assert_true(info.rel_l2 == 0 && info.max_error == 0);
    } else {
        float *got = calloc(N, 4), *wanted = calloc(N, 4);
        widen_to(got, raw, as, N);
        widen_to(wanted, given, as, N);
        double rms = root_mean_square(wanted, N), error = relative_error(got, wanted, N);
        if (!(error > 0) || !(error < kinds[k].most[fidelity == CKD_COARSE])) {
            fail_msg("%s, %s, step %u: error %g", name, run_of(fidelity), (unsigned)step, error);
        }
        assert_true(rms > 0);
        double largest = largest_error(got, wanted, N); /* reported rounded up */
        if (!(fabs(info.rel_l2 / error - 1) < 4e-3) || !(info.max_error >= largest) ||
            !(info.max_error <= 1.008 * largest)) {
            fail_msg("%s: told %g and %g, is %g and %g", name, info.rel_l2, info.max_error, error, largest);
        }
        free(got);
        free(wanted);
    }
    free(given);
    free(raw);
}

static void test_every_dtype_and_role(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        drift d[KINDS];
        for (size_t k = 0; k < KINDS; k++) {
            d[k] = drift_new(ROWS, COLUMNS, (unsigned)k);
        }
        for (uint64_t step = 0; step < STEPS; step++) {
            save_every_kind(store, fidelities[f], step, d);
            for (size_t k = 0; k < KINDS * DTYPES; k++) {
                check_kind(store, fidelities[f], step, &d[k % KINDS], k % KINDS, k / KINDS);
            }
            for (size_t k = 0; k < KINDS; k++) {
                drift_step(&d[k]);
            }
        }
        for (size_t k = 0; k < KINDS; k++) {
            drift_free(&d[k]);
        }
        ckd_checkpoint first = checkpoint_at(store, run_of(fidelities[f]), 0),
                       last = checkpoint_at(store, run_of(fidelities[f]), STEPS - 1);
        assert_true(first.kind == CKD_LOSSY_BASE && last.kind == CKD_DELTA && last.fidelity == fidelities[f]);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* ---- optimizers ---- */

/*
 * `parts` is a bit mask of weight, first and second moment: AdamW has all; SGD and Lion have no second moment; and
 * weights or moments alone.
 */
static void test_any_optimizer(void **state) {
    ckd_store *store = store_create(*state);
    for (unsigned parts = 1; parts < 8; parts++) {
        drift d = drift_new(ROWS, COLUMNS, parts);
        char run[16];
        snprintf(run, sizeof(run), "parts%u", parts);
        for (uint64_t step = 0; step < STEPS; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, CKD_NEAR);
            ckd_save *save = begin_with(store, &o);
            for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_EXP_AVG_SQ; role++) {
                const char *name = role == CKD_ROLE_WEIGHT    ? "w"
                                   : role == CKD_ROLE_EXP_AVG ? "exp_avg.w"
                                                              : "exp_avg_sq.w";
                if (parts >> (role - CKD_ROLE_WEIGHT) & 1u) {
                    add_as(save, name, CKD_F32, CKD_ROLE_AUTO, part_of(&d, role));
                }
            }
            commit_save(save);
            for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_EXP_AVG_SQ; role++) {
                const char *name = role == CKD_ROLE_WEIGHT    ? "w"
                                   : role == CKD_ROLE_EXP_AVG ? "exp_avg.w"
                                                              : "exp_avg_sq.w";
                if (parts >> (role - CKD_ROLE_WEIGHT) & 1u) {
                    float *got = load_floats(store, run, step, name, CKD_F32, N);
                    double error = relative_error(got, part_of(&d, role), N);
                    if (!(error > 0 && error < (role == CKD_ROLE_WEIGHT ? 0.015 : 1))) {
                        fail_msg("%s of %s, step %u: %g", name, run, (unsigned)step, error);
                    }
                    free(got);
                }
            }
        }
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* ---- tensors that are never lossy ---- */

static void test_integers_scalars_and_small_tensors_are_exact(void **state) {
    ckd_store *store = store_create(*state);
    static const ckd_dtype exact[] = {CKD_I64, CKD_I32,  CKD_I16, CKD_I8,     CKD_U64,
                                      CKD_U8,  CKD_BOOL, CKD_F64, CKD_F8_E4M3};
    enum { EXACT = sizeof(exact) / sizeof(exact[0]) };
    uint64_t small[1] = {63}, none[2] = {0, 5};
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_save_options o = lossy_options("r", step, CKD_COARSE);
        ckd_save *save = begin_with(store, &o);
        float scalar = 0.1f * (float)step, *values = random_values(CKD_F32, 63, (unsigned)step);
        for (size_t i = 0; i < EXACT; i++) {
            void *data = random_values(exact[i], N, (unsigned)(i + step));
            add_tensor(save, ckd_dtype_name(exact[i]), exact[i], 2, shape, NULL, data);
            free(data);
        }
        add_tensor(save, "scalar", CKD_F32, 0, NULL, NULL, &scalar);
        add_tensor(save, "small", CKD_F32, 1, small, NULL, values);
        add_tensor(save, "none", CKD_F32, 2, none, NULL, NULL);
        commit_save(save);
        for (size_t i = 0; i < EXACT; i++) {
            void *data = random_values(exact[i], N, (unsigned)(i + step));
            void *got = load_whole(store, "r", step, ckd_dtype_name(exact[i]), N * ckd_dtype_size(exact[i]));
            assert_memory_equal(got, data, N * ckd_dtype_size(exact[i]));
            free(data);
            free(got);
        }
        void *one = load_whole(store, "r", step, "scalar", 4),
             *few = load_whole(store, "r", step, "small", 63 * 4);
        assert_memory_equal(one, &scalar, 4);
        assert_memory_equal(few, values, 63 * 4);
        free(load_whole(store, "r", step, "none", 0));
        free(one);
        free(few);
        free(values);
    }
    ckd_store_close(store);
}

/* ---- copies ---- */

/* Rounded copies, tied tensors and frozen tensors are stored as copies and stay equal to what they copy. */
static void test_copies_of_lossy_tensors(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(ROWS, COLUMNS, 1), still = drift_new(ROWS, COLUMNS, 2);
    void *first = NULL;
    for (uint64_t step = 0; step < 5; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, CKD_COARSE);
        ckd_save *save = begin_with(store, &o);
        add_as(save, "exp_avg_sq.w", CKD_F32, CKD_ROLE_AUTO, d.second);
        add_as(save, "master.w", CKD_F32, CKD_ROLE_AUTO, d.weight);
        add_as(save, "w", CKD_BF16, CKD_ROLE_AUTO, d.weight);
        add_as(save, "half", CKD_F16, CKD_ROLE_AUTO, d.weight);
        add_as(save, "head", CKD_F32, CKD_ROLE_AUTO, d.weight);
        add_as(save, "frozen", CKD_F32, CKD_ROLE_AUTO, still.weight);
        commit_save(save);
        float *master = load_floats(store, "r", step, "master.w", CKD_F32, N);
        assert_true(relative_error(master, d.weight, N) > 0);
        void *got[] = {load_whole(store, "r", step, "w", N * 2), load_whole(store, "r", step, "half", N * 2),
                       load_whole(store, "r", step, "head", N * 4),
                       load_whole(store, "r", step, "frozen", N * 4)};
        void *bf16 = to_dtype(master, CKD_BF16, N), *f16 = to_dtype(master, CKD_F16, N);
        assert_memory_equal(got[0], bf16, N * 2);
        assert_memory_equal(got[1], f16, N * 2);
        assert_memory_equal(got[2], master, N * 4);
        static const char *const names[] = {"w", "half", "head", "frozen"};
        for (size_t i = 0; i < 4; i++) {
            ckd_tensor_info info = tensor_info(store, "r", step, names[i]);
            if (info.stored_bytes >= 300 && (i < 3 || step > 0)) {
                fail_msg("%s, step %u: %s, %u bytes", names[i], (unsigned)step, info.method,
                         (unsigned)info.stored_bytes);
            }
        }
        assert_string_equal(tensor_info(store, "r", step, "w").method, "cast");
        assert_string_equal(tensor_info(store, "r", step, "head").method, "copy");
        if (first) {
            assert_memory_equal(got[3], first, N * 4); /* repeated saves do not change it */
        } else {
            first = load_whole(store, "r", step, "frozen", N * 4);
        }
        void *const all[] = {got[0], got[1], got[2], got[3], bf16, f16, master};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
            free(all[i]);
        }
    }
    free(first);
    drift_free(&d);
    drift_free(&still);
    ckd_store_close(store);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_every_dtype_and_role),
        TEST(test_any_optimizer),
        TEST(test_integers_scalars_and_small_tensors_are_exact),
        TEST(test_copies_of_lossy_tensors),
    };
    return cmocka_run_group_tests_name("lossy", tests, NULL, NULL);
}
