/*
 * Chains of lossy checkpoints: errors do not accumulate, the values do not depend on how checkpoints are stored, and
 * error bounds and size targets are met.
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
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

static const ckd_fidelity fidelities[2] = {CKD_NEAR, CKD_COARSE};
static const char *const names[3] = {"exp_avg_sq.w", "exp_avg.w", "w"};

static const float *part_of(const drift *d, int part) {
    return part == 0 ? d->second : part == 1 ? d->first : d->weight;
}

static double error_at(ckd_store *store, const char *run, uint64_t step, const drift *d, int part) {
    float *got = load_floats(store, run, step, names[part], CKD_F32, d->count);
    double error = relative_error(got, part_of(d, part), d->count);
    free(got);
    return error;
}

/* ---- errors along a chain ---- */

/* Sums of the errors of the three tensors, at steps 5 to 12 (around depth 8) and at steps 57 to 64. */
typedef double chain_errors[2][3];

static void long_chain(ckd_store *store, const char *run, ckd_fidelity fidelity, uint64_t seed,
                       chain_errors errors) {
    static const uint64_t from[2] = {5, 57};
    drift d = drift_new(96, 64, seed);
    for (uint64_t step = 0; step <= 64; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options(run, step, fidelity);
        o.max_load_cost = o.newest_load_cost = 1000; /* keeps everything in one long chain */
        save_drift(store, &o, &d);
        for (int when = 0; when < 2; when++) {
            for (int part = 0; part < 3 && step >= from[when] && step < from[when] + 8; part++) {
                errors[when][part] += error_at(store, run, step, &d, part);
            }
        }
    }
    assert_true(checkpoint_at(store, run, 64).depth >= 48);
    drift_free(&d);
}

/* Compares sums over four chains, because errors within one chain vary by 3 % at any depth. */
static void test_errors_do_not_add_up(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        chain_errors errors = {{0}};
        for (unsigned chain = 1; chain <= 4; chain++) {
            char run[32];
            snprintf(run, sizeof(run), "%s%u", ckd_fidelity_name(fidelities[f]), chain);
            long_chain(store, run, fidelities[f], chain, errors);
        }
        for (int part = 0; part < 3; part++) {
            double early = errors[0][part], late = errors[1][part];
            print_message("%s, %s: error %.4f at steps 5 to 12, %.4f at 57 to 64\n",
                          ckd_fidelity_name(fidelities[f]), names[part], early / 32, late / 32);
            assert_true(late <= 1.05 * early);
        }
    }
    ckd_store_close(store);
}

/* Saves a drift whose second moments are nearly 0 in the lower half of the rows. */
static void save_rare(ckd_store *store, const ckd_save_options *o, const drift *d) {
    drift rare = *d;
    rare.second = malloc(d->count * sizeof(float));
    assert_non_null(rare.second);
    for (uint64_t i = 0; i < d->count; i++) {
        rare.second[i] = i < d->count / 2 ? d->second[i] : 1e-9f * d->second[i];
    }
    save_drift(store, o, &rare);
    free(rare.second);
}

/*
 * Rows of an output layer whose tokens hardly ever occur: their second moments are nearly 0, but their weights move as
 * far as others. Their error must stay small.
 */
static void test_rare_rows_are_as_precise(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        drift d = drift_new(96, 64, 7);
        const char *run = ckd_fidelity_name(fidelities[f]);
        for (uint64_t step = 0; step <= 24; step++) {
            ckd_save_options o = lossy_options(run, step, fidelities[f]);
            o.max_load_cost = o.newest_load_cost = 1000;
            if (step) {
                drift_step(&d);
            }
            save_rare(store, &o, &d);
        }
        float *got = load_floats(store, run, 24, "w", CKD_F32, d.count);
        uint64_t half = d.count / 2;
        double usual = relative_error(got, d.weight, half);
        double rare = relative_error(got + half, d.weight + half, half);
        print_message("%s: error %.4f, of rare rows %.4f\n", run, usual, rare);
        assert_true(rare <= 4 * usual);
        free(got);
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* ---- independent of how checkpoints are stored ---- */

/* Chains with deltas, with materialized copies and with little of either: the same states give the same values. */
static void test_deltas_and_copies_give_the_same_values(void **state) {
    ckd_store *store = store_create(*state);
    static const struct {
        const char *run;
        double load, newest;
    } ways[] = {{"plain", 1000, 1000}, {"ready", 1000, 1}, {"short", 1, 1}};
    float *first[3][5] = {{0}};
    for (int w = 0; w < 3; w++) {
        drift d = drift_new(96, 64, 2);
        for (uint64_t step = 0; step < 5; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(ways[w].run, step, CKD_COARSE);
            o.max_load_cost = ways[w].load;
            o.newest_load_cost = ways[w].newest;
            save_drift(store, &o, &d);
            for (int part = 0; part < 3; part++) {
                float *got = load_floats(store, ways[w].run, step, names[part], CKD_F32, d.count);
                if (w == 0) {
                    first[part][step] = got;
                    continue;
                }
                if (w == 1) { /* a limited load cost leads to other quantizer steps */
                    assert_memory_equal(got, first[part][step], d.count * sizeof(float));
                }
                assert_true(relative_error(got, part_of(&d, part), d.count) < (part < 2 ? 1.01 : 0.04));
                free(got);
            }
        }
        drift_free(&d);
    }
    ckd_report *report;
    assert_int_equal(ckd_store_report(&report, store, NULL), CKD_OK);
    assert_true(report->materialized_bytes > 0);
    ckd_report_free(report);
    assert_int_equal(checkpoint_at(store, "plain", 4).depth, 4);
    for (int i = 0; i < 15; i++) {
        free(first[i / 5][i % 5]);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/*
 * Checkpoint ids are random but do not influence which ancestor a delta builds on. The same saves give the same
 * values.
 */
static void test_the_same_saves_give_the_same_values(void **state) {
    ckd_store *store = store_create(*state);
    static const char *const runs[2] = {"a", "b"};
    float *got[2][40];
    for (int r = 0; r < 2; r++) {
        drift d = drift_new(96, 64, 13);
        for (uint64_t step = 0; step < 40; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(runs[r], step, CKD_NEAR);
            save_drift(store, &o, &d);
            got[r][step] = load_floats(store, runs[r], step, "w", CKD_F32, d.count);
        }
        drift_free(&d);
    }
    assert_true(checkpoint_at(store, runs[0], 39).depth < 30); /* some deltas build on older ancestors */
    for (int step = 0; step < 40; step++) {
        assert_memory_equal(got[0][step], got[1][step], 96 * 64 * sizeof(float));
        free(got[0][step]);
        free(got[1][step]);
    }
    ckd_store_close(store);
}

static void test_base_of_a_lossy_run(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(96, 64, 3);
    for (uint64_t step = 0; step < 4; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, CKD_NEAR);
        o.base = step == 2;
        ckd_checkpoint c = save_drift(store, &o, &d);
        assert_int_equal(c.kind, step % 2 ? CKD_DELTA : CKD_LOSSY_BASE);
        assert_true(error_at(store, "r", step, &d, 2) < 0.01);
    }
    drift_free(&d);
    ckd_store_close(store);
}

/* From exact to lossy and back, and between fidelities. */
static void test_fidelities_follow_each_other(void **state) {
    ckd_store *store = store_create(*state);
    static const ckd_fidelity order[] = {CKD_EXACT,  CKD_COARSE, CKD_EXACT, CKD_NEAR,
                                         CKD_COARSE, CKD_NEAR,   CKD_EXACT, CKD_EXACT};
    drift d = drift_new(96, 64, 4);
    for (uint64_t step = 0; step < 8; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, order[step]);
        ckd_checkpoint c = save_drift(store, &o, &d);
        assert_int_equal(c.fidelity, order[step]);
        for (int part = 0; part < 3; part++) {
            double error = error_at(store, "r", step, &d, part);
            bool exact = order[step] == CKD_EXACT;
            assert_true(exact ? error == 0 : error > 0 && error < (part < 2 ? 1.01 : 0.04));
            ckd_tensor_info info = tensor_info(store, "r", step, names[part]);
            assert_true(exact ? info.rel_l2 == 0 : fabs(info.rel_l2 / error - 1) < 4e-3);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    drift_free(&d);
    ckd_store_close(store);
}

/* ---- error bounds, size targets, quantizer steps, effort ---- */

static void check_bound(ckd_store *store, const char *run, uint64_t step, const drift *d, double bound) {
    for (int part = 0; part < 3; part++) {
        float *got = load_floats(store, run, step, names[part], CKD_F32, d->count);
        double largest = largest_error(got, part_of(d, part), d->count);
        double most = bound * root_mean_square(part_of(d, part), d->count);
        if (!(largest <= most * (1 + 1e-6))) {
            fail_msg("%s, %s, step %u: off by %g, %g is allowed", names[part], run, (unsigned)step, largest,
                     most);
        }
        free(got);
    }
}

static void test_the_largest_error_is_bounded(void **state) {
    ckd_store *store = store_create(*state);
    static const double bounds[] = {0.5, 0.05, 1e-3, 1e-6, 1e-12};
    for (int b = 0; b < 10; b++) {
        char run[32];
        snprintf(run, sizeof(run), "bound%d", b);
        drift d = drift_new(96, 64, 5);
        for (uint64_t step = 0; step < 4; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, fidelities[b % 2]);
            o.max_error = step == 1 && b < 4 ? 0 : bounds[b / 2]; /* the parent has no bound */
            save_drift(store, &o, &d);
            if (o.max_error > 0) {
                check_bound(store, run, step, &d, o.max_error);
                assert_true(b >= 6 || tensor_info(store, run, step, "w").rel_l2 > 0); /* not stored exactly */
            }
        }
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* A bf16 copy of a bounded master meets the bound too. */
static void test_rounded_copies_keep_the_bound(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(96, 64, 6);
    uint64_t shape[2] = {96, 64};
    for (uint64_t step = 0; step < 3; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, CKD_NEAR);
        o.max_error = 1e-3;
        void *bf16 = to_dtype(d.weight, CKD_BF16, d.count);
        float *given = malloc(d.count * sizeof(float));
        widen_to(given, bf16, CKD_BF16, d.count);
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "master.w", CKD_F32, 2, shape, NULL, d.weight);
        add_tensor(save, "w", CKD_BF16, 2, shape, NULL, bf16);
        commit_save(save);
        float *got = load_floats(store, "r", step, "w", CKD_BF16, d.count);
        assert_true(largest_error(got, given, d.count) <= 1e-3 * root_mean_square(given, d.count));
        free(got);
        free(given);
        free(bf16);
    }
    drift_free(&d);
    ckd_store_close(store);
}

/* Bits per element of the weight and both moments of a step. */
static double bits_at(ckd_store *store, const char *run, uint64_t step, const drift *d) {
    double bits = 0;
    for (int part = 0; part < 3; part++) {
        bits += 8 * (double)tensor_info(store, run, step, names[part]).stored_bytes / (double)d->count;
    }
    return bits;
}

static void test_targets_are_met(void **state) {
    ckd_store *store = store_create(*state);
    static const double targets[] = {0.3, 0.6, 1.2, 3, 6};
    for (unsigned t = 0; t < 10; t++) {
        if (!test_draws("targets", t, 3)) {
            continue;
        }
        char run[32];
        double bits = 0, target = targets[t / 2];
        snprintf(run, sizeof(run), "target%u", t);
        drift d = drift_new(512, 384, 7);
        for (uint64_t step = 0; step < 3; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, fidelities[1]);
            o.target_bits = t % 2 ? 0 : target;
            o.target_ratio = t % 2 ? 96 / target : 0;
            save_drift(store, &o, &d);
            bits = bits_at(store, run, step, &d);
        }
        print_message("%s %.2f: %.3f bits, of first moments %.3f, of weights %.3f, error of weights %.4f\n",
                      t % 2 ? "ratio" : "bits ", target, bits,
                      8 * (double)tensor_info(store, run, 2, names[1]).stored_bytes / (double)d.count,
                      8 * (double)tensor_info(store, run, 2, names[2]).stored_bytes / (double)d.count,
                      tensor_info(store, run, 2, "w").rel_l2);
        if (!(bits <= 1.15 * target + 0.05)) {
            fail_msg("%g bits for a target of %g", bits, target);
        }
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* Begins anew, as a layer does that is initialised again. */
static void replace_weights(drift *d, unsigned seed) {
    drift other = drift_new(256, 200, seed);
    memcpy(d->weight, other.weight, d->count * sizeof(float));
    drift_free(&other);
}

/*
 * A delta that keeps to the target could not hold values that were replaced altogether. It takes more bits, and the
 * next one makes up for what it leaves out: the errors are those without a target. Then the target is met again.
 */
static void test_targets_do_not_keep_replaced_values(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        drift d = drift_new(256, 200, 11);
        for (uint64_t step = 0; step < 6; step++, drift_step(&d)) {
            double error[2];
            if (step == 2) {
                replace_weights(&d, 12);
            }
            for (int target = 0; target < 2; target++) {
                char run[32];
                snprintf(run, sizeof(run), "%s%d", ckd_fidelity_name(fidelities[f]), target);
                ckd_save_options o = lossy_options(run, step, fidelities[f]);
                o.target_bits = target ? 0.5 : 0;
                save_drift(store, &o, &d);
                error[target] = error_at(store, run, step, &d, 2);
                print_message("%s, step %d: error of weights %.4f, %.3f bits\n", run, (int)step,
                              error[target], bits_at(store, run, step, &d));
                assert_true(step < 5 || !target || bits_at(store, run, step, &d) <= 1.15 * 0.5 + 0.05);
            }
            assert_true((step != 2 && step != 3) || error[1] < 1.1 * error[0]);
        }
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* A larger step_scale takes fewer bits and gives larger errors. */
static void test_steps_are_scaled(void **state) {
    ckd_store *store = store_create(*state);
    static const double scales[] = {1.0 / 64, 0.5, 0, 1, 1.4, 64};
    double bits[6], errors[6][2];
    for (int i = 0; i < 6; i++) {
        char run[32];
        snprintf(run, sizeof(run), "scale%d", i);
        drift d = drift_new(256, 200, 8);
        for (uint64_t step = 0; step < 2; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, CKD_COARSE);
            o.step_scale = scales[i];
            save_drift(store, &o, &d);
            bits[i] = bits_at(store, run, step, &d);
            errors[i][0] = error_at(store, run, step, &d, 2);
            errors[i][1] = error_at(store, run, step, &d, 1);
        }
        print_message("scale %.3f: %.3f bits, error of weights %.5f, of first moments %.5f\n", scales[i],
                      bits[i], errors[i][0], errors[i][1]);
        drift_free(&d);
    }
    for (int part = 0; part < 2; part++) {
        assert_true(errors[2][part] == errors[3][part]); /* 0 means the default, 1 */
    }
    for (int i = 1; i < 6; i++) {
        assert_true(i == 3 || (bits[i] < bits[i - 1] && errors[i][0] > errors[i - 1][0]));
        assert_true(i < 3 ? errors[i][1] > errors[i - 1][1] : errors[i][1] >= errors[i - 1][1]);
    }
    static const double refused[] = {-1, 0.01, 65, NAN, INFINITY};
    ckd_save *save;
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        ckd_save_options o = lossy_options("scale0", 9, CKD_NEAR);
        o.step_scale = refused[i];
        assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_E_INVALID);
    }
    ckd_save_options both = lossy_options("scale0", 9, CKD_NEAR);
    both.step_scale = 2;
    both.target_bits = 1;
    assert_int_equal(ckd_save_begin(&save, store, &both, NULL), CKD_E_INVALID);
    ckd_store_close(store);
}

static void test_efforts(void **state) {
    ckd_store *store = store_create(*state);
    static const int efforts[] = {1, 3, 5, 7, 9};
    double bits[5], errors[5];
    for (int e = 0; e < 5; e++) {
        char run[32];
        snprintf(run, sizeof(run), "effort%d", efforts[e]);
        drift d = drift_new(256, 200, 8);
        for (uint64_t step = 0; step < 3; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, CKD_COARSE);
            o.effort = efforts[e];
            save_drift(store, &o, &d);
            bits[e] = bits_at(store, run, step, &d);
            errors[e] = error_at(store, run, step, &d, 2);
        }
        print_message("effort %d: %.3f bits, error %.4f\n", efforts[e], bits[e], errors[e]);
        drift_free(&d);
    }
    assert_true(bits[4] < bits[0] && errors[4] < 1.05 * errors[0]);
    ckd_store_close(store);
}

/* ---- resumed runs ---- */

/* lossy_resumes counts how often a checkpoint's history was resumed from a lossy checkpoint. */
static void test_lossy_resumes_are_counted(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(96, 64, 9);
    static const struct {
        ckd_fidelity fidelity;
        uint64_t from;
        uint32_t resumes;
    } saves[] = {{CKD_EXACT, UINT64_MAX, 0}, {CKD_NEAR, 0, 0},   {CKD_COARSE, 1, 1}, {CKD_NEAR, 2, 2},
                 {CKD_EXACT, 3, 3},          {CKD_COARSE, 4, 3}, {CKD_NEAR, 5, 4}};
    for (uint64_t step = 0; step < 7; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, saves[step].fidelity);
        o.resumed_from_run = saves[step].from == UINT64_MAX ? NULL : "r";
        o.resumed_from_step = saves[step].from;
        assert_int_equal(save_drift(store, &o, &d).lossy_resumes, saves[step].resumes);
    }
    ckd_save_options next = lossy_options("r", 7, CKD_NEAR);
    assert_int_equal(save_drift(store, &next, &d).lossy_resumes, 4); /* not resumed from a checkpoint */
    ckd_save_options branch = lossy_options("r", 3, CKD_COARSE);
    branch.on_duplicate = CKD_DUPLICATE_BRANCH;
    ckd_checkpoint c = save_drift(store, &branch, &d);
    assert_string_equal(c.run, "r~2");
    assert_true(error_at(store, "r~2", 3, &d, 2) < 0.1);
    drift_free(&d);
    ckd_store_close(store);
}

/*
 * The first save after a resume is finer if the save names the checkpoint it resumed from. Repeated resumes then lose
 * little of the training's progress.
 */
static void test_the_first_save_after_a_resume_is_finer(void **state) {
    ckd_store *store = store_create(*state);
    for (int f = 0; f < 2; f++) {
        const char *run = ckd_fidelity_name(fidelities[f]);
        drift d = drift_new(96, 64, 12);
        for (uint64_t step = 0; step < 5; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, fidelities[f]);
            save_drift(store, &o, &d);
        }
        float *resumed = load_floats(store, run, 4, "w", CKD_F32, d.count);
        memcpy(d.weight, resumed, d.count * sizeof(float));
        drift_step(&d);
        double moved = relative_error(resumed, d.weight, d.count);
        double lost[2];
        for (int named = 0; named < 2; named++) {
            char name[32];
            snprintf(name, sizeof(name), "%s-%d", run, named);
            ckd_save_options o = lossy_options(name, 5, fidelities[f]);
            o.parent_run = run;
            o.parent_step = 4;
            o.resumed_from_run = named ? run : NULL;
            o.resumed_from_step = 4;
            save_drift(store, &o, &d);
            lost[named] = error_at(store, name, 5, &d, 2) / moved;
            print_message("%s: %.3f of the movement is lost\n", name, lost[named]);
        }
        assert_true(lost[1] < 0.15 && lost[1] < 0.6 * lost[0]);
        free(resumed);
        drift_free(&d);
    }
    ckd_store_close(store);
}

static void test_saving_the_same_step_again(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(96, 64, 10);
    ckd_save_options o = lossy_options("r", 1, CKD_NEAR);
    save_drift(store, &o, &d);
    ckd_checkpoint_list *before, *after;
    assert_int_equal(ckd_store_list(&before, store, NULL, NULL), CKD_OK);
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    ckd_save *save;
    ckd_error err = {0};
    uint64_t shape[2] = {96, 64};
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_OK);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = names[2];
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = d.weight;
    assert_int_equal(ckd_save_tensor(save, &t, &err), CKD_E_EXISTS);
    assert_true(strstr(err.message, names[2]));
    ckd_save_abort(save);
    /* The values that were loaded from the checkpoint count as the same content. */
    float *back[3];
    for (int part = 0; part < 3; part++) {
        back[part] = load_floats(store, "r", 1, names[part], CKD_F32, d.count);
    }
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_OK);
    for (int part = 0; part < 3; part++) {
        add_tensor(save, names[part], CKD_F32, 2, shape, NULL, back[part]);
        free(back[part]);
    }
    assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
    assert_int_equal(ckd_store_list(&after, store, NULL, NULL), CKD_OK);
    assert_int_equal(before->count, after->count);
    ckd_checkpoint_list_free(before);
    ckd_checkpoint_list_free(after);
    drift_free(&d);
    ckd_store_close(store);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_errors_do_not_add_up),
        TEST(test_rare_rows_are_as_precise),
        TEST(test_deltas_and_copies_give_the_same_values),
        TEST(test_the_same_saves_give_the_same_values),
        TEST(test_base_of_a_lossy_run),
        TEST(test_fidelities_follow_each_other),
        TEST(test_the_largest_error_is_bounded),
        TEST(test_rounded_copies_keep_the_bound),
        TEST(test_targets_are_met),
        TEST(test_targets_do_not_keep_replaced_values),
        TEST(test_steps_are_scaled),
        TEST(test_efforts),
        TEST(test_lossy_resumes_are_counted),
        TEST(test_the_first_save_after_a_resume_is_finer),
        TEST(test_saving_the_same_step_again),
    };
    return run_sampled("lossy_chain", tests, 2, NULL, NULL);
}
