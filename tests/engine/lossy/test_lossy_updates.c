/*
 * The updates that an optimizer would make of lossy moments, |m| / (sqrt(v) + eps), are never much larger than those
 * of the saved moments.
 */
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

#include "engine/save/save.h"
#include "kernels/cpu.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* The linker redirects the library's calls to this function (mk/test.mk). */
static bool portable;
const kernels *__real_kernels_cpu(void);
const kernels *__wrap_kernels_cpu(void);
const kernels *__wrap_kernels_cpu(void) {
    return portable ? &kernels_cpu_portable : __real_kernels_cpu();
}

/*
 * The moments of an embedding. A few tokens occur in every batch, most of them hardly ever. For the rare ones the
 * first moments have decayed, but the second moments hardly have: these are the squares of a single gradient, and the
 * smallest are a million times smaller than their mean. Some of their roots are below eps.
 */
enum { ROWS = 1500, COLUMNS = 96, ELEMENTS = ROWS * COLUMNS, DIRECTIONS = 6, OFTEN = 60, SAVES = 4 };
static const double usual_eps = 1e-8;
static const char *const names[2] = {"exp_avg.w", "exp_avg_sq.w"};

typedef struct embedding {
    float moment[2][ELEMENTS]; /* first, second */
    const float *directions;   /* DIRECTIONS x COLUMNS of gradients, then ROWS x DIRECTIONS */
    const float *noise;        /* ELEMENTS values */
} embedding;

static double scale_of(uint64_t row) {
    return row < OFTEN ? 1 : row % 3 ? 1e-3 : row % 2 ? 1e-6 : row % 4 ? 1e-7 : 1e-9;
}

static void embedding_train(embedding *e, unsigned steps, unsigned from) {
    for (unsigned step = from; step < from + steps; step++) {
        for (uint64_t row = 0; row < ROWS; row++) {
            bool comes = row < OFTEN || (row * 2654435761u >> 7) % 97 == step % 97;
            double scale = scale_of(row);
            for (uint64_t c = 0; c < COLUMNS; c++) {
                uint64_t i = row * COLUMNS + c, turn = (i + 7919u * step) % ELEMENTS;
                double g = 0.1 * (double)e->noise[turn];
                for (unsigned k = 0; comes && k < DIRECTIONS; k++) {
                    g += (double)e->noise[(row * DIRECTIONS + k + 31u * step) % ELEMENTS] *
                         (double)e->directions[k * COLUMNS + c];
                }
                g = comes ? g * scale : 0;
                e->moment[0][i] = (float)(0.9 * (double)e->moment[0][i] + 0.1 * g);
                e->moment[1][i] = (float)(0.999 * (double)e->moment[1][i] + 0.001 * g * g);
            }
        }
    }
}

static embedding *embedding_new(void) {
    static float trained[2][ELEMENTS]; /* all begin with the same steps */
    static bool is_trained;
    embedding *e = calloc(1, sizeof(*e));
    e->directions = random_values(CKD_F32, DIRECTIONS * COLUMNS, 1);
    e->noise = random_values(CKD_F32, ELEMENTS, 2);
    if (!is_trained) {
        embedding_train(e, 97, 0);
        memcpy(trained, e->moment, sizeof(trained));
        is_trained = true;
    }
    memcpy(e->moment, trained, sizeof(trained));
    return e;
}

/*
 * Only rows with tiny second moments still move. The largest update is small with the optimizer's eps, and normal with
 * a smaller eps.
 */
static void embedding_fade(embedding *e) {
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        e->moment[0][i] *= scale_of(i / COLUMNS) < 1e-6 ? 1 : 0.02f;
    }
}

static void embedding_free(embedding *e) {
    free((void *)(uintptr_t)e->directions);
    free((void *)(uintptr_t)e->noise);
    free(e);
}

static double largest_update(const float *first, const float *second, double eps) {
    double largest = 0;
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        double update = fabs((double)first[i]) / (sqrt((double)second[i]) + eps);
        largest = update > largest || isnan(update) ? update : largest;
    }
    return largest;
}

enum { FIRST_MOMENT = 1, SECOND_MOMENT = 2, BOTH_MOMENTS = 3 };

typedef struct saving {
    ckd_fidelity fidelity;
    bool second_first;         /* the second moment is saved first */
    bool bf16;                 /* the first moment is bf16 */
    bool cells;                /* the tensors are cut into cells */
    bool file;                 /* what is kept of the first one exceeds the staging memory */
    bool faded;                /* use embedding_fade */
    const ckd_optimizer *rule; /* NULL: the save does not name one */
    ckd_role exact;            /* the role that is stored exactly; CKD_ROLE_AUTO: none */
    unsigned on_device;        /* FIRST_MOMENT, SECOND_MOMENT: in device memory */
} saving;

static ckd_status add_moment(ckd_save *save, const char *name, ckd_dtype dtype, const void *values,
                             const saving *how, bool there, ckd_error *err) {
    static const uint64_t shape[2] = {ROWS, COLUMNS};
    void *memory = there ? to_device(values, ELEMENTS * ckd_dtype_size(dtype)) : NULL;
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = dtype;
    t.ndim = 2;
    t.shape = shape;
    t.data = there ? memory : values;
    t.device = there ? &on_device : NULL;
    t.optimizer = how->rule;
    ckd_status status = ckd_save_tensor(save, &t, err);
    backend->release(0, memory);
    return status;
}

static ckd_status try_to_save(ckd_store *store, const char *run, uint64_t step, const embedding *e,
                              saving how) {
    ckd_error err;
    ckd_save_options o = lossy_options(run, step, how.fidelity);
    if (how.exact != CKD_ROLE_AUTO) {
        o.role_fidelity[how.exact] = CKD_EXACT;
    }
    ckd_save *save = begin_with(store, &o);
    if (how.cells) {
        save->coding.grid = (save_grid){
            .row_sides = {96, 16, 64}, .column_sides = {48, 16, 32}, .elements = 4096, .columns = 64};
    }
    save->coding.staging = how.file ? 1 : save->coding.staging;
    uint16_t *half = how.bf16 ? round_to_bf16(e->moment[0], ELEMENTS) : NULL;
    ckd_status status = CKD_OK;
    for (int turn = 0; turn < 2 && status == CKD_OK; turn++) {
        int which = turn ^ how.second_first;
        bool is_half = half && which == 0;
        status = add_moment(save, names[which], is_half ? CKD_BF16 : CKD_F32,
                            is_half ? (const void *)half : e->moment[which], &how, how.on_device >> which & 1,
                            &err);
    }
    free(half);
    if (status != CKD_OK) {
        ckd_save_abort(save);
        return status;
    }
    return ckd_save_commit(NULL, save, &err);
}

static void save_moments(ckd_store *store, const char *run, uint64_t step, const embedding *e, saving how) {
    assert_int_equal(try_to_save(store, run, step, e, how), CKD_OK);
}

/*
 * No update is much larger than the largest of the saved moments. An optimizer with bias correction has a smaller
 * effective eps in early steps: the smallest in the first step, or in the step that its rule names. The bound holds
 * for the largest and the smallest eps. In between, an update may be at most 1 + sqrt(largest / smallest) times too
 * large, and less for ordinary moments.
 */
static void compare_updates(const char *run, uint64_t step, const float *const given[2],
                            const float *const got[2], saving how) {
    double eps = usual_eps, low = eps * sqrt(1 - 0.999);
    if (how.rule) {
        eps = how.rule->eps;
        low = eps * sqrt(1 - pow(how.rule->beta2, (double)how.rule->step));
    }
    const struct {
        double eps, most;
    } bounds[] = {{eps, 2}, {0.24 * eps, how.faded ? 1 + sqrt(eps / low) : 2.5}, {low, 2}};
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        double was = largest_update(given[0], given[1], bounds[i].eps),
               is = largest_update(got[0], got[1], bounds[i].eps);
        if (!(is <= bounds[i].most * was)) {
            fail_msg("%s, step %u: with eps %g the largest update is %g, and was %g", run, (unsigned)step,
                     bounds[i].eps, is, was);
        }
    }
}

/* Checks the largest updates of the loaded moments, and those that the store reports. */
static void check_updates(ckd_store *store, const char *run, uint64_t step, const embedding *e, saving how) {
    ckd_dtype dtype = how.bf16 ? CKD_BF16 : CKD_F32;
    float *given = malloc(ELEMENTS * sizeof(float));
    uint16_t *half = round_to_bf16(e->moment[0], ELEMENTS);
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        uint32_t bits = (uint32_t)half[i] << 16;
        memcpy(&given[i], how.bf16 ? (const void *)&bits : (const void *)&e->moment[0][i], sizeof(float));
    }
    double eps = how.rule ? how.rule->eps : usual_eps, was = largest_update(given, e->moment[1], eps);
    for (int turn = 0; turn < 2; turn++) {
        portable = turn;
        float *first = load_floats(store, run, step, names[0], dtype, ELEMENTS),
              *second = load_floats(store, run, step, names[1], CKD_F32, ELEMENTS);
        double is = largest_update(first, second, eps);
        compare_updates(run, step, (const float *[]){given, e->moment[1]}, (const float *[]){first, second},
                        how);
        for (uint64_t i = 0; i < ELEMENTS; i++) {
            assert_true(second[i] >= 0 && isfinite(second[i]) && (second[i] > 0 || e->moment[1][i] == 0));
        }
        ckd_tensor_info reported = tensor_info(store, run, step, names[!how.second_first]);
        assert_true(reported.largest_update_given > 0.98 * was && reported.largest_update_given < 1.01 * was);
        assert_true(reported.largest_update >= is && reported.largest_update <= 1.02 * is);
        free(first);
        free(second);
    }
    portable = false;
    free(given);
    free(half);
}

static void run_saves(ckd_store *store, const char *run, saving how) {
    embedding *e = embedding_new();
    for (unsigned step = 0; step < SAVES; step++) {
        if (how.faded) {
            embedding_fade(e);
        }
        save_moments(store, run, step, e, how);
        check_updates(store, run, step, e, how);
        embedding_train(e, 20, 97 + 20 * step);
    }
    embedding_free(e);
}

static void test_rare_rows(void **state) {
    ckd_store *store = store_create(*state);
    ckd_optimizer rule = CKD_OPTIMIZER_INIT;
    rule.kind = CKD_ADAMW;
    rule.beta1 = 0.9;
    rule.beta2 = 0.999999;
    rule.eps = 1e-5;
    rule.step = 2;
    const struct {
        const char *run;
        saving how;
    } runs[] = {
        {"near", {.fidelity = CKD_NEAR}},
        {"near-second-first", {.fidelity = CKD_NEAR, .second_first = true}},
        {"coarse", {.fidelity = CKD_COARSE}},
        {"coarse-second-first", {.fidelity = CKD_COARSE, .second_first = true}},
        {"near-bf16", {.fidelity = CKD_NEAR, .second_first = true, .bf16 = true}},
        {"coarse-bf16", {.fidelity = CKD_COARSE, .bf16 = true}},
        {"cells", {.fidelity = CKD_NEAR, .cells = true}},
        {"cells-second-first", {.fidelity = CKD_NEAR, .second_first = true, .cells = true, .file = true}},
        {"file", {.fidelity = CKD_NEAR, .file = true}},
        {"faded", {.fidelity = CKD_NEAR, .faded = true}},
        {"faded-second-first", {.fidelity = CKD_NEAR, .second_first = true, .faded = true}},
        {"rule", {.fidelity = CKD_NEAR, .rule = &rule}},
        {"rule-second-first", {.fidelity = CKD_NEAR, .second_first = true, .rule = &rule}},
        {"rule-exact",
         {.fidelity = CKD_COARSE, .exact = CKD_ROLE_EXP_AVG_SQ, .second_first = true, .rule = &rule}},
        {"first-exact", {.fidelity = CKD_NEAR, .exact = CKD_ROLE_EXP_AVG}},
        {"first-exact-bf16", {.fidelity = CKD_COARSE, .exact = CKD_ROLE_EXP_AVG, .bf16 = true}},
        {"second-exact", {.fidelity = CKD_NEAR, .exact = CKD_ROLE_EXP_AVG_SQ, .second_first = true}},
        {"second-exact-cells",
         {.fidelity = CKD_COARSE,
          .exact = CKD_ROLE_EXP_AVG_SQ,
          .second_first = true,
          .cells = true,
          .file = true}},
    };
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        if (test_draws("rare rows", i, 2)) {
            run_saves(store, runs[i].run, runs[i].how);
        }
    }
    ckd_store_close(store);
}

/* The same bound for moments in device memory. */
static void test_rare_rows_on_a_device(void **state) {
    ckd_store *store = store_create(*state);
    const struct {
        const char *run;
        saving how;
    } runs[] = {
        {"near", {.fidelity = CKD_NEAR, .on_device = BOTH_MOMENTS}},
        {"near-second-first", {.fidelity = CKD_NEAR, .second_first = true, .on_device = BOTH_MOMENTS}},
        {"coarse", {.fidelity = CKD_COARSE, .on_device = BOTH_MOMENTS}},
        {"coarse-bf16",
         {.fidelity = CKD_COARSE, .bf16 = true, .second_first = true, .on_device = BOTH_MOMENTS}},
        {"cells", {.fidelity = CKD_NEAR, .cells = true, .on_device = BOTH_MOMENTS}},
        {"file", {.fidelity = CKD_NEAR, .second_first = true, .file = true, .on_device = BOTH_MOMENTS}},
        {"faded", {.fidelity = CKD_NEAR, .faded = true, .on_device = BOTH_MOMENTS}},
        {"first-there", {.fidelity = CKD_NEAR, .on_device = FIRST_MOMENT}},
        {"second-there", {.fidelity = CKD_NEAR, .on_device = SECOND_MOMENT}},
        {"first-exact", {.fidelity = CKD_NEAR, .exact = CKD_ROLE_EXP_AVG, .on_device = BOTH_MOMENTS}},
        {"second-exact",
         {.fidelity = CKD_COARSE,
          .exact = CKD_ROLE_EXP_AVG_SQ,
          .second_first = true,
          .on_device = BOTH_MOMENTS}},
    };
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        if (test_draws("rare rows on a device", i, 2)) {
            run_saves(store, runs[i].run, runs[i].how);
        }
    }
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* A device call that fails may fail the save, but no stored moments have too large updates. */
static void test_failing_devices(void **state) {
    ckd_store *store = store_create(*state);
    embedding *e = embedding_new();
    const uint64_t each = test_stride(11, 3, 1);
    unsigned failed = 0, recovered = 0;
    bool happened = true;
    for (uint64_t n = test_first("updates of failing devices", each); happened; n += each) {
        saving how = {.fidelity = CKD_NEAR, .second_first = n % 4 < 2, .on_device = BOTH_MOMENTS};
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        emulated_fail_after = (int)n;
        ckd_status status = try_to_save(store, "run", n, e, how);
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        assert_true(status == CKD_OK || (happened && (status == CKD_E_DEVICE || status == CKD_E_NOMEM)));
        failed += status != CKD_OK;
        recovered += status == CKD_OK && happened;
        if (status == CKD_OK) {
            check_updates(store, "run", n, e, how);
        }
    }
    assert_true(failed > 0 && recovered > 0);
    embedding_free(e);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* The position of the largest update. */
static uint64_t place_of_largest(const embedding *e) {
    uint64_t place = 0;
    double largest = 0;
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        double update = fabs((double)e->moment[0][i]) / (sqrt((double)e->moment[1][i]) + usual_eps);
        place = update > largest ? i : place;
        largest = update > largest ? update : largest;
    }
    return place;
}

/*
 * A block with many NaNs is coded exactly, although the rest of its tile stays on the device. Its largest update is
 * that of the saved values.
 */
static void test_exact_blocks_on_a_device(void **state) {
    enum { NONE = 480 }; /* more than 1/16 of a cell, less than 1/256 of the tensor */
    ckd_store *store = store_create(*state);
    embedding *e = embedding_new();
    uint64_t spared = place_of_largest(e), row = spared / COLUMNS, column = spared % COLUMNS, none = 0;
    for (uint64_t r = row / 96 * 96; r < row / 96 * 96 + 96 && r < ROWS; r++) {
        for (uint64_t c = column / 48 * 48; c < column / 48 * 48 + 48; c++) {
            bool takes = (r * 48 + c) % 8 == 0 && r * COLUMNS + c != spared && none < NONE;
            e->moment[0][r * COLUMNS + c] = takes ? NAN : e->moment[0][r * COLUMNS + c];
            none += takes;
        }
    }
    for (unsigned turn = 0; turn < 4; turn++) {
        saving how = {.fidelity = turn & 1 ? CKD_NEAR : CKD_COARSE,
                      .second_first = turn & 2,
                      .cells = true,
                      .on_device = BOTH_MOMENTS};
        save_moments(store, "exact", turn, e, how);
        float *first = load_floats(store, "exact", turn, names[0], CKD_F32, ELEMENTS),
              *second = load_floats(store, "exact", turn, names[1], CKD_F32, ELEMENTS);
        assert_memory_equal(&first[row * COLUMNS + column / 48 * 48],
                            &e->moment[0][row * COLUMNS + column / 48 * 48], 48 * sizeof(float));
        double is = 0, was = 0;
        for (uint64_t i = 0; i < ELEMENTS; i++) {
            is = fmax(is, fabs((double)first[i]) / (sqrt((double)second[i]) + usual_eps));
            was = fmax(was, fabs((double)e->moment[0][i]) / (sqrt((double)e->moment[1][i]) + usual_eps));
        }
        ckd_tensor_info reported = tensor_info(store, "exact", turn, names[!how.second_first]);
        assert_true(reported.largest_update_given > 0.98 * was && reported.largest_update_given < 1.01 * was);
        assert_true(reported.largest_update >= is && reported.largest_update <= 1.02 * is);
        free(first);
        free(second);
    }
    embedding_free(e);
    ckd_store_close(store);
}

/*
 * The exact moment is saved last, so neither can be adjusted any more. The update that both make together is reported.
 */
static void test_exact_moments_saved_last(void **state) {
    ckd_store *store = store_create(*state);
    for (unsigned step = 0; step < 2; step++) {
        embedding *e = embedding_new();
        saving how = {.fidelity = CKD_NEAR,
                      .second_first = step,
                      .exact = step ? CKD_ROLE_EXP_AVG : CKD_ROLE_EXP_AVG_SQ};
        save_moments(store, "last", step, e, how);
        float *first = load_floats(store, "last", step, names[0], CKD_F32, ELEMENTS),
              *second = load_floats(store, "last", step, names[1], CKD_F32, ELEMENTS);
        double was = largest_update(e->moment[0], e->moment[1], usual_eps),
               is = largest_update(first, second, usual_eps);
        ckd_tensor_info reported = tensor_info(store, "last", step, names[!step]);
        assert_memory_equal(step ? first : second, e->moment[!step], sizeof(e->moment[0]));
        assert_true(reported.largest_update_given > 0.98 * was && reported.largest_update_given < 1.01 * was);
        assert_true(reported.largest_update >= is && reported.largest_update <= 1.02 * is);
        assert_true(reported.rel_l2 == 0 && reported.max_error == 0);
        free(first);
        free(second);
        embedding_free(e);
    }
    ckd_store_close(store);
}

/* Negative second moments, infinities and NaNs are stored exactly. */
static void test_odd_seconds(void **state) {
    static const float odd[] = {-1.5f, INFINITY, NAN, -0x1p-140f, 0x1p-149f, 0, 3e38f};
    ckd_store *store = store_create(*state);
    embedding *e = embedding_new();
    for (uint64_t i = 0; i < 700; i++) {
        e->moment[1][i * 201] = odd[i % 7];
    }
    for (unsigned turn = 0; turn < 4; turn++) {
        saving how = {.fidelity = turn & 1 ? CKD_NEAR : CKD_COARSE, .second_first = turn & 2};
        save_moments(store, "odd", turn, e, how);
        float *got = load_floats(store, "odd", turn, names[1], CKD_F32, ELEMENTS);
        for (uint64_t i = 0; i < ELEMENTS; i++) {
            float was = e->moment[1][i];
            bool same = memcmp(&got[i], &was, sizeof(was)) == 0;
            assert_true(was >= 0 && isfinite(was)
                            ? got[i] >= 0 && isfinite(got[i]) && (got[i] > 0 || was == 0)
                            : same);
        }
        free(got);
    }
    embedding_free(e);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_rare_rows),
        tempdir_test(test_rare_rows_on_a_device),
        tempdir_test(test_failing_devices),
        tempdir_test(test_exact_blocks_on_a_device),
        tempdir_test(test_exact_moments_saved_last),
        tempdir_test(test_odd_seconds),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return cmocka_run_group_tests_name("lossy_updates", tests, NULL, NULL);
}
