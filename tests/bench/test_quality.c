/*
 * Parts of bench_quality: which coders are measured, how losses are read and averaged, what saves report, and
 * ExCP's bound.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "bench/lossy/quality.h"
#include "tests/support/tempdir.h"

static int near_to(double a, double b) {
    return fabs(a - b) <= 1e-9;
}

static void write_text(char path[600], const char *dir, const char *text) {
    snprintf(path, 600, "%s/file", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* ---- output of the trainer ---- */

static void losses_are_averaged_by_segment(void **state) {
    (void)state;
    char *dir = tempdir_create(), path[600];
    double means[3];
    write_text(path, dir, "51 0x1p+1 2.0\n52 0x1p+0 1.0\n53 0x1.8p+1 3.0\n54 0x1p+2 4.0\n");
    assert_true(quality_mean_losses(means, path, 2, 2));
    assert_true(near_to(means[0], 1.5) && near_to(means[1], 3.5));
    assert_true(quality_mean_losses(means, path, 1, 4) && near_to(means[0], 2.5));
    assert_false(quality_mean_losses(means, path, 1, 3)); /* one line too many */
    assert_false(quality_mean_losses(means, path, 3, 2)); /* two too few */
    assert_false(quality_mean_losses(means, "/nowhere/losses", 1, 1));
    tempdir_remove(dir);
}

static void last_validation_losses_are_found(void **state) {
    (void)state;
    char *dir = tempdir_create(), path[600];
    double losses[3];
    write_text(path, dir,
               "text\nstep 50  validation loss 3.5\nstep 60  loss 9\nstep 100  validation loss 2.5\n");
    assert_true(quality_validation_losses(losses, path, 1) && near_to(losses[0], 2.5));
    assert_true(quality_validation_losses(losses, path, 2));
    assert_true(near_to(losses[0], 3.5) && near_to(losses[1], 2.5));
    assert_false(quality_validation_losses(losses, path, 3));
    write_text(path, dir, "step 50  validation loss nan\n");
    assert_false(quality_validation_losses(losses, path, 1));
    assert_false(quality_validation_losses(losses, "/nowhere/output", 1));
    tempdir_remove(dir);
}

/* ---- selection of coders ---- */

/* The names of the selected coders, each with a space after it. */
static const char *chosen(const quality_options *o) {
    static char names[2000];
    names[0] = '\0';
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        strcat(strcat(names, quality_coders[c].name), " ");
    }
    return names;
}

static void modes_choose_coders(void **state) {
    (void)state;
    quality_options o = {.mode = QUALITY_TABLE};
    assert_string_equal(chosen(&o),
                        "exact near near-16 coarse coarse-1 coarse-16 excp excp-2.5 no-moments perturbed ");
    o.only = "coarse,excp-2.5"; /* only whole names match */
    assert_string_equal(chosen(&o), "exact coarse excp-2.5 ");
    o.only = "near-w,coarse-v"; /* parts are measured only by name */
    assert_string_equal(chosen(&o), "exact near-w coarse-v ");
    o = (quality_options){.mode = QUALITY_RESUMES};
    assert_string_equal(chosen(&o), "near coarse ");
    o.only = "coarse-16,excp,perturbed";
    assert_string_equal(chosen(&o), "coarse-16 ");
    o = (quality_options){.mode = QUALITY_MERGE};
    assert_string_equal(chosen(&o), "near coarse ");
}

static void curves_have_all_points(void **state) {
    (void)state;
    quality_options o = {.mode = QUALITY_CURVES};
    static const double medians[] = {0, 1, 1.5, 2, 2.5, 3, 4};
    size_t found = 0, scales = 0;
    for (size_t c = quality_next(&o, 0); c < quality_coder_count; c = quality_next(&o, c + 1)) {
        const quality_coder *coder = &quality_coders[c];
        if (coder->curve && strcmp(coder->curve, "excp") == 0) {
            assert_true(found < 7 && coder->knob == medians[found]);
            assert_true(coder->most == (found ? medians[found] : 2.5));
            assert_true(isinf(coder->alpha) == (found > 0));
            found++;
        } else if (coder->curve) {
            double scale = coder->library.step_scale > 0 ? coder->library.step_scale : 1;
            assert_true(scale == coder->knob && coder->library.max_load_cost == 0);
            assert_true(coder->library.fidelity ==
                        (strcmp(coder->curve, "near") == 0 ? CKD_NEAR : CKD_COARSE));
            scales++;
        }
    }
    assert_true(found == 7 && scales >= 12);
}

static void load_cost_options_keep_the_coders_own(void **state) {
    (void)state;
    quality_options o = {.load_cost = 8};
    for (size_t c = 0; c < quality_coder_count; c++) {
        quality_coder with = quality_with_load_cost(&quality_coders[c], &o);
        double own = quality_coders[c].library.max_load_cost;
        assert_true(with.library.max_load_cost == (own > 0 ? own : 8));
        assert_ptr_equal(with.name, quality_coders[c].name);
    }
    o.load_cost = 0;
    assert_true(quality_with_load_cost(&quality_coders[1], &o).library.max_load_cost == 0);
}

/* ---- figures ---- */

static void figures_and_noise(void **state) {
    (void)state;
    const double values[] = {1, 2, 6};
    quality_figure f = quality_figure_of(values, 3);
    assert_true(near_to(f.mean, 3) && near_to(f.spread, sqrt(7)));
    assert_true(quality_figure_of(values, 1).spread == 0);
    static quality_group g = {.seeds = 2};
    const double own[2] = {2, 5}, other[2] = {4, 5}; /* with deviations sqrt(2) and 0 */
    for (int seed = 0; seed < 2; seed++) {
        g.results[0][seed].losses = (quality_losses){0, own[seed], 10 * own[seed]};
        g.orders[0][seed] = (quality_losses){0, other[seed], 10 * other[seed]};
    }
    quality_losses noise = quality_noise(&g, 1);
    assert_true(near_to(noise.training, 1) && near_to(noise.after, 10));
}

static void steps_lost_are_gaps_over_the_fall(void **state) {
    (void)state;
    static quality_group g = {.seeds = 2, .fall = {0.5, 0.25}};
    const double gaps[2] = {1, -0.75}; /* 2 and -3 steps */
    for (int seed = 0; seed < 2; seed++) {
        g.results[0][seed].losses = (quality_losses){0, 0, 3};
        g.results[1][seed].losses = (quality_losses){0, 0, 3 + gaps[seed]};
    }
    quality_row row = quality_summary(&g, 1, 2);
    assert_true(near_to(row.steps.mean, -0.5) && near_to(row.steps.spread, 5 / sqrt(2)));
    assert_true(near_to(row.after.mean, 0.125));
}

/* A line of slope -2 on which every fourth value is far off. */
static void single_losses_do_not_change_the_slope(void **state) {
    (void)state;
    double x[40], y[40];
    for (int i = 0; i < 40; i++) {
        x[i] = 5 * i;
        y[i] = 7 - 2 * x[i] + (i % 4 == 1 ? 100 * i : 0);
    }
    assert_true(near_to(quality_robust_slope(x, y, 40), -2));
    assert_true(near_to(quality_robust_slope(x, y, 1 + 1), -2 + 100.0 / 5));
    for (int i = 0; i < 40; i++) {
        y[i] = 7 - 2 * x[i];
    }
    assert_true(near_to(quality_robust_slope(x, y, 40), -2));
}

/* Evaluations at 1008, 1016, ..., 1040: the last three count. */
static void losses_are_judged_late_in_a_resume(void **state) {
    (void)state;
    quality_options o = {.start = 500, .every = 50, .deltas = 10, .resumed = 40};
    assert_int_equal(quality_judged_step(&o), 1032);
    o.resumed = 5;
    assert_int_equal(quality_judged_step(&o), 1004);
}

static void merged_bits(void **state) {
    (void)state;
    const double bits[] = {1, 2, 3, 6, 100};
    quality_merged all = quality_merge_bits(bits, 1, 4), pairs = quality_merge_bits(bits, 2, 4),
                   one = quality_merge_bits(bits, 4, 4);
    assert_true(near_to(all.one, 3) && near_to(all.sum, 12));
    assert_true(near_to(pairs.one, 1.5) && near_to(pairs.sum, 3)); /* chains of two deltas */
    assert_true(near_to(one.one, 1) && near_to(one.sum, 1));
}

/* ---- states ---- */

enum { ROWS = 96, COLUMNS = 64 };

static double uniform(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(*seed >> 11) / 9007199254740992.0;
}

static float normal(uint64_t *seed) {
    double radius = sqrt(-2 * log(1 - uniform(seed)));
    return (float)(radius * cos(6.283185307179586 * uniform(seed)));
}

/* A state with one matrix, which each step changes. */
static quality_state made_state(uint64_t step) {
    quality_state s = {.step = step, .count = 1, .parameters = ROWS * COLUMNS, .config_size = 4};
    s.tensors = calloc(1, sizeof(*s.tensors));
    assert_non_null(s.tensors);
    *s.tensors = (quality_tensor){.name = "w", .ndim = 2, .shape = {ROWS, COLUMNS}, .count = ROWS * COLUMNS};
    memcpy(s.config, "test", 4);
    for (int part = 0; part < QUALITY_PARTS; part++) {
        s.tensors->parts[part] = malloc(ROWS * COLUMNS * sizeof(float));
        assert_non_null(s.tensors->parts[part]);
    }
    uint64_t seed = 1;
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        float w = 0.02f * normal(&seed);
        for (uint64_t k = 0; k < step; k++) {
            uint64_t move = (uint64_t)i * 1000 + k;
            (void)uniform(&move);
            w += 1e-3f * normal(&move);
        }
        s.tensors->parts[0][i] = w;
        s.tensors->parts[1][i] = 1e-4f * normal(&seed);
        s.tensors->parts[2][i] = 1e-8f * (0.5f + (float)uniform(&seed));
    }
    return s;
}

static void saves_count_lossy_resumes(void **state) {
    (void)state;
    char *dir = tempdir_create(), store[600];
    snprintf(store, sizeof(store), "%s/store", dir);
    const quality_library near = {.fidelity = CKD_NEAR}, exactly = {.fidelity = CKD_EXACT};
    for (uint64_t step = 0; step < 4; step++) {
        quality_state s = made_state(step);
        uint64_t before = step - 1;
        const quality_library *how = step == 3 ? &exactly : &near;
        assert_int_equal(quality_save(store, "r", &s, how, step == 0, step ? &before : NULL), step);
        quality_state back = quality_load(NULL, store, "r", step);
        assert_int_equal(quality_same(&back, &s), step == 3);
        quality_free(&back);
        quality_free(&s);
    }
    quality_state s = made_state(5);
    /* It continued from there without a resume. */
    assert_int_equal(quality_save(store, "r", &s, &near, 0, NULL), 3);
    quality_free(&s);
    tempdir_remove(dir);
}

/* Runs a chain of two states through a coder. The result has the share of moved weights, and bits. */
static quality_result chain_of(const char *name, double step_scale, const char *dir) {
    for (size_t c = 0; c < quality_coder_count; c++) {
        if (strcmp(quality_coders[c].name, name) == 0) {
            quality_coder coder = quality_coders[c];
            coder.library.step_scale = step_scale;
            quality_state states[] = {made_state(0), made_state(1)};
            char own[600];
            quality_result r;
            snprintf(own, sizeof(own), "%s/%s%g", dir, name, step_scale);
            assert_int_equal(mkdir(own, 0777), 0);
            quality_state last = quality_run_chain(&r, NULL, &coder, own, states, 2);
            quality_free(&last);
            quality_free(&states[0]);
            quality_free(&states[1]);
            return r;
        }
    }
    fail_msg("there is no coder %s", name);
    return (quality_result){0};
}

static void options_reach_the_coders(void **state) {
    (void)state;
    char *dir = tempdir_create();
    quality_result fine = chain_of("near", 0.25, dir), coarse = chain_of("near", 1, dir);
    assert_true(fine.bits[0] > 1.5 * coarse.bits[0]);
    if (system("xz --version >/dev/null 2>&1") == 0) {
        /* Half of a Gaussian's values exceed the median. 2.5 and 4 medians are 1.69 and 2.70 deviations. */
        assert_true(fabs(chain_of("excp-1", 0, dir).moved - 0.5) < 0.01);
        assert_true(fabs(chain_of("excp-2.5", 0, dir).moved - 0.0917) < 0.015);
        assert_true(fabs(chain_of("excp-4", 0, dir).moved - 0.007) < 0.004);
    }
    tempdir_remove(dir);
}

static const quality_coder *coder_named(const char *name) {
    for (size_t c = 0; c < quality_coder_count; c++) {
        if (strcmp(quality_coders[c].name, name) == 0) {
            return &quality_coders[c];
        }
    }
    fail_msg("there is no coder %s", name);
    return NULL;
}

static void perturbed_weights_differ_by_1e_5(void **state) {
    (void)state;
    char *dir = tempdir_create();
    quality_state states[] = {made_state(0), made_state(1)};
    quality_result r;
    if (system("xz --version >/dev/null 2>&1") == 0) {
        quality_state last = quality_run_chain(&r, NULL, coder_named("perturbed"), dir, states, 2);
        double squares = 0;
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            double ratio = last.tensors->parts[0][i] / states[1].tensors->parts[0][i] - 1;
            squares += ratio * ratio / (ROWS * COLUMNS);
        }
        assert_true(fabs(sqrt(squares) / 1e-5 - 1) < 0.1);
        quality_restore(&last, &states[1], 1u); /* moments were exact already */
        quality_restore(&last, &states[1], 0);
        assert_false(quality_same(&last, &states[1]));
        quality_restore(&last, &states[1], 1u << 1);
        assert_true(quality_same(&last, &states[1]));
        quality_free(&last);
    }
    quality_free(&states[0]);
    quality_free(&states[1]);
    tempdir_remove(dir);
}

static void parts_are_lossy_alone(void **state) {
    (void)state;
    quality_state exact = made_state(1), other = made_state(2), s = made_state(2);
    for (int part = 0; part < QUALITY_PARTS; part++) {
        other.tensors->parts[part][5] = s.tensors->parts[part][5] = 1;
    }
    quality_restore(&s, &exact, 1u << 2); /* second moments */
    assert_memory_equal(s.tensors->parts[2], other.tensors->parts[2], ROWS * COLUMNS * sizeof(float));
    assert_memory_equal(s.tensors->parts[0], exact.tensors->parts[0], ROWS * COLUMNS * sizeof(float));
    assert_memory_equal(s.tensors->parts[1], exact.tensors->parts[1], ROWS * COLUMNS * sizeof(float));
    assert_int_equal(coder_named("near-w")->lossy, 1);
    assert_int_equal(coder_named("coarse-m")->lossy, 2);
    assert_int_equal(coder_named("coarse")->lossy, 0);
    quality_free(&exact);
    quality_free(&other);
    quality_free(&s);
}

/* A delta that keeps half of the movement, and has an error of the same size across it. */
static void errors_are_split_into_lag_and_rest(void **state) {
    (void)state;
    static const struct {
        quality_mix mix;
        float along, across; /* of the result, in movements */
    } expected[] = {{QUALITY_DECODED, 0.5f, 0.5f},
                    {QUALITY_LAG, 0.5f, 0},
                    {QUALITY_REST, 1, 0.5f},
                    {QUALITY_SCALED, 1, 1}};
    quality_state parent = made_state(0), exact = made_state(0);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        exact.tensors->parts[0][i] += i % 2 == 0;
    }
    for (size_t e = 0; e < sizeof(expected) / sizeof(expected[0]); e++) {
        quality_state s = made_state(0);
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            s.tensors->parts[0][i] += 0.5f;
        }
        assert_true(fabs(quality_lag(&s, &exact, &parent) - 0.5) < 1e-4);
        quality_mix_weights(&s, &exact, &parent, expected[e].mix);
        assert_true(fabs(quality_lag(&s, &exact, &parent) - (1 - (double)expected[e].along)) < 1e-4);
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            float moved = s.tensors->parts[0][i] - parent.tensors->parts[0][i];
            assert_true(fabsf(moved - (i % 2 == 0 ? expected[e].along : expected[e].across)) < 1e-4f);
        }
        quality_free(&s);
    }
    assert_int_equal(coder_named("near-lag")->mix, QUALITY_LAG);
    assert_int_equal(coder_named("coarse-scaled")->lossy, 1);
    quality_free(&exact);
    quality_free(&parent);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_are_averaged_by_segment),
        cmocka_unit_test(last_validation_losses_are_found),
        cmocka_unit_test(modes_choose_coders),
        cmocka_unit_test(curves_have_all_points),
        cmocka_unit_test(load_cost_options_keep_the_coders_own),
        cmocka_unit_test(figures_and_noise),
        cmocka_unit_test(steps_lost_are_gaps_over_the_fall),
        cmocka_unit_test(single_losses_do_not_change_the_slope),
        cmocka_unit_test(losses_are_judged_late_in_a_resume),
        cmocka_unit_test(merged_bits),
        cmocka_unit_test(perturbed_weights_differ_by_1e_5),
        cmocka_unit_test(parts_are_lossy_alone),
        cmocka_unit_test(errors_are_split_into_lag_and_rest),
        cmocka_unit_test(saves_count_lossy_resumes),
        cmocka_unit_test(options_reach_the_coders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
