/* Whole saves and loads of a synthetic training state, one core, against an exact base of the same state. */
#include <ckptdelta.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/float_mode.h"
#include "bench/kernels/kernels.h"
#include "bench/support/support.h"
#include "engine/lossy/lossy.h"

enum { PARTS = 3, DELTAS = 4, RANK = 16 };

static const char *const part_names[PARTS] = {"exp_avg_sq.w", "exp_avg.w", "w"};
static const ckd_role part_roles[PARTS] = {CKD_ROLE_EXP_AVG_SQ, CKD_ROLE_EXP_AVG, CKD_ROLE_WEIGHT};

/* A matrix and its moments. Rows and columns differ in scale. Movement has a few strong directions, and noise. */
typedef struct state {
    size_t side;
    float *part[PARTS], *row, *column, *left, *right;
    uint64_t seed;
} state;

static float *floats(size_t n) {
    return bench_allocated(calloc(n, sizeof(float)));
}

static state state_new(size_t side) {
    state s = {.side = side, .seed = 88172645463325252u};
    for (int p = 0; p < PARTS; p++) {
        s.part[p] = floats(side * side);
    }
    s.row = floats(side);
    s.column = floats(side);
    s.left = floats(side * RANK);
    s.right = floats(RANK * side);
    for (size_t i = 0; i < side; i++) {
        s.row[i] = exp2f(0.5f * bench_normal(&s.seed));
        s.column[i] = exp2f(0.5f * bench_normal(&s.seed));
    }
    for (size_t i = 0; i < side * side; i++) {
        s.part[2][i] = 0.02f * bench_normal(&s.seed);
    }
    return s;
}

/* Some tens of steps of training. */
static void move_on(state *s) {
    size_t n = s->side;
    for (size_t i = 0; i < n * RANK; i++) {
        s->left[i] = bench_normal(&s->seed);
        s->right[i] = bench_normal(&s->seed);
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++) {
            float moved = 0, scale = s->row[i] * s->column[j], noise = bench_normal(&s->seed);
            for (size_t k = 0; k < RANK; k++) {
                moved += s->left[i * RANK + k] * s->right[k * n + j];
            }
            s->part[2][i * n + j] += 3e-4f * (0.25f * moved + 0.5f * bench_normal(&s->seed));
            s->part[1][i * n + j] = 1e-4f * scale * noise;
            s->part[0][i * n + j] = 1e-8f * scale * scale * (0.25f + noise * noise);
        }
    }
}

static void state_free(state *s) {
    for (int p = 0; p < PARTS; p++) {
        free(s->part[p]);
    }
    free(s->row);
    free(s->column);
    free(s->left);
    free(s->right);
}

/* ---- saves and loads ---- */

static ckd_store *open_store(const char *folder) {
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    ckd_error err = {0};
    ckd_store *store;
    options.threads = 1;
    bench_check(ckd_store_open(&store, folder, CKD_OPEN_CREATE, &options, &err), &err);
    return store;
}

/* Processor seconds of a whole save. */
static double save(ckd_store *store, const char *run, uint64_t step, const state *s, ckd_fidelity fidelity,
                   int effort) {
    ckd_error err = {0};
    ckd_save_options options = CKD_SAVE_OPTIONS_INIT;
    options.run = run;
    options.step = step;
    options.fidelity = fidelity;
    options.effort = effort;
    options.max_load_cost = options.newest_load_cost = 16; /* one chain, and no materialized copies */
    double start = bench_cpu_seconds();
    ckd_save *saving;
    bench_check(ckd_save_begin(&saving, store, &options, &err), &err);
    for (int p = 0; p < PARTS; p++) {
        uint64_t shape[2] = {s->side, s->side};
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = part_names[p];
        t.role = part_roles[p];
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = s->part[p];
        bench_check(ckd_save_tensor(saving, &t, &err), &err);
    }
    bench_check(ckd_save_commit(NULL, saving, &err), &err);
    return bench_cpu_seconds() - start;
}

/* Processor seconds of loading one tensor, with the opening of files. */
static double load(ckd_store *store, const char *run, uint64_t step, int which_part, const state *s,
                   float *to) {
    ckd_error err = {0};
    ckd_checkpoint c;
    ckd_load *loading;
    bench_check(ckd_store_find(&c, store, run, step, &err), &err);
    bench_check(ckd_load_begin(&loading, store, &c.id, &err), &err);
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = part_names[which_part];
    request.data = to;
    request.size = s->side * s->side * sizeof(float);
    double start = bench_cpu_seconds();
    bench_check(ckd_load_tensor(loading, &request, &err), &err);
    double seconds = bench_cpu_seconds() - start;
    ckd_load_end(loading);
    return seconds;
}

/* ---- the share of products ---- */

static const kernels *plain;
static double in_gemm; /* seconds; this part has one thread */

static void timed_gemm(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                       size_t columns) {
    double start = bench_cpu_seconds();
    plain->gemm(sums, left, right, rows, rank, columns);
    in_gemm += bench_cpu_seconds() - start;
}

/* Seconds that a save of a delta spends on matrix products, which find factors, in all three parts. */
static double gemm_seconds(const state *s, const float *parent_values, int effort) {
    static const lossy_part parts[PARTS] = {LOSSY_SECOND, LOSSY_MOMENT, LOSSY_WEIGHT};
    ckd_error err = {0};
    quant_params params = quant_params_of(CKD_COARSE, effort);
    lossy_scales scales = {0};
    plain = kernels_cpu();
    kernels timed = *plain;
    timed.gemm = timed_gemm;
    in_gemm = 0;
    float_mode mode = float_mode_enter();
    for (int p = 0; p < PARTS; p++) {
        lossy_tile t = {.part = parts[p],
                        .dtype = CKD_F32,
                        .params = &params,
                        .shape.count = s->side * s->side,
                        .shape.columns = s->side,
                        .input.values = s->part[p],
                        .input.now = s->part[p],
                        .input.parent_values = p == 2 ? parent_values : NULL,
                        .found = p == 0 ? &scales : NULL,
                        .context.scales = p == 0 ? NULL : &scales,
                        .context.expected_movement = NAN};
        bool worth;
        bench_check(lossy_tile_prepare(&t, &worth, &timed, &err), &err);
        lossy_tile_free(&t);
    }
    float_mode_leave(mode);
    lossy_scales_free(&scales);
    return in_gemm;
}

/* ---- one size and effort ---- */

typedef struct figures {
    double copy, lossy_base, delta; /* seconds of all three parts */
    double exact[PARTS], lossy[PARTS],
        one[PARTS];    /* of loading: an exact base, a lossy base, one delta more */
    double bits, gemm; /* gemm: share of the seconds of a delta */
    uint32_t depth;
} figures;

static double copy_seconds(const state *s, float *to) {
    double start = bench_cpu_seconds();
    for (int p = 0; p < PARTS; p++) {
        memcpy(to, s->part[p], s->side * s->side * sizeof(float));
    }
    return bench_cpu_seconds() - start;
}

static void measure_loads(figures *f, ckd_store *store, const state *s, float *to, int repeats) {
    for (int p = 0; p < PARTS; p++) {
        double exact[BENCH_MAX_REPEATS], lossy[BENCH_MAX_REPEATS], last[BENCH_MAX_REPEATS];
        for (int r = 0; r < repeats; r++) {
            exact[r] = load(store, "exact", DELTAS, p, s, to);
            lossy[r] = load(store, "lossy", 0, p, s, to);
            last[r] = load(store, "lossy", DELTAS, p, s, to);
        }
        f->exact[p] = bench_median(exact, repeats);
        f->lossy[p] = bench_median(lossy, repeats);
        /* Almost nothing for moments, which do not depend on their parent. */
        f->one[p] = (bench_median(last, repeats) - f->lossy[p]) / DELTAS;
    }
}

static figures measure(const bench_plan *plan, size_t side, int effort) {
    figures f = {0};
    double copies[BENCH_MAX_REPEATS], deltas[DELTAS];
    state s = state_new(side);
    float *to = floats(side * side), *parent_values = floats(side * side);
    bench_remove_tree(plan->folder);
    mkdir("bench/series", 0777);
    ckd_store *store = open_store(plan->folder);
    move_on(&s);
    f.lossy_base = save(store, "lossy", 0, &s, CKD_COARSE, effort);
    for (int d = 0; d < DELTAS; d++) {
        memcpy(parent_values, s.part[2], side * side * sizeof(float));
        move_on(&s);
        deltas[d] = save(store, "lossy", (uint64_t)d + 1, &s, CKD_COARSE, effort);
    }
    save(store, "exact", DELTAS, &s, CKD_EXACT, 0);
    f.gemm = gemm_seconds(&s, parent_values, effort);
    for (int r = 0; r < plan->repeats; r++) {
        copies[r] = copy_seconds(&s, to);
    }
    ckd_error err = {0};
    ckd_checkpoint last;
    bench_check(ckd_store_find(&last, store, "lossy", DELTAS, &err), &err);
    f.copy = bench_median(copies, plan->repeats);
    f.delta = bench_median(deltas, DELTAS);
    f.gemm /= f.delta;
    f.bits = 8 * (double)last.stored_bytes / (double)(side * side);
    f.depth = last.depth;
    measure_loads(&f, store, &s, to, plan->repeats);
    ckd_store_close(store);
    bench_remove_tree(plan->folder);
    state_free(&s);
    free(to);
    free(parent_values);
    return f;
}

/* ---- results ---- */

/* What one delta more adds to loading all parts, in base loads of them. */
static double of_state(const figures *f) {
    double one = 0, base = 0;
    for (int p = 0; p < PARTS; p++) {
        one += f->one[p];
        base += f->exact[p];
    }
    return one / base;
}

static void print(const bench_plan *plan, const figures *f, size_t side, int effort, bool first) {
    double part_mb = (double)(side * side * sizeof(float)) * 1e-6, raw = PARTS * part_mb; /* MB */
    printf("| %zu | %d | %.3f | %u | %.0f | %.0f | %.3f | %.2f | %.0f | %.0f | %.3f |", side, effort, f->bits,
           f->depth, raw / f->lossy_base, raw / f->delta, f->copy / f->delta, f->gemm, part_mb / f->lossy[2],
           part_mb / f->exact[2], part_mb / f->lossy[2] * f->copy / raw);
    printf(" %.0f | %.2f | %.2f |\n", part_mb / f->one[2], f->one[2] / f->exact[2], of_state(f));
    fprintf(plan->json,
            "%s\n  {\"side\": %zu, \"effort\": %d, \"bits\": %.4f, \"depth\": %u, \"memcpy_mb_per_s\": %.1f, "
            "\"keyframe_mb_per_s\": %.1f, \"encode_mb_per_s\": %.1f, \"gemm_share\": %.3f, "
            "\"delta_of_base\": %.4f",
            first ? "" : ",", side, effort, f->bits, f->depth, raw / f->copy, raw / f->lossy_base,
            raw / f->delta, f->gemm, of_state(f));
    for (int p = 0; p < PARTS; p++) {
        fprintf(plan->json, ", \"%s\": {\"base_mb_per_s\": %.1f, \"keyframe_mb_per_s\": %.1f}", part_names[p],
                part_mb / f->exact[p], part_mb / f->lossy[p]);
    }
    fprintf(plan->json, "}");
}

void bench_paths(const bench_plan *plan) {
    printf(
        "\ncoarse, W, m and v (fp32), one core, MB/s of raw state; decode and delta: of W\n\n| side | effort | "
        "bits/parameter | depth | lossy base | encode | of memcpy | GEMM | decode lossy base | exact base | of "
        "memcpy | one delta W | of a base W | of a base state |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
        "---|\n");
    fprintf(plan->json, ",\n \"paths\": [");
    bool first = true;
    for (size_t i = 0; i < 4 && plan->sizes[i]; i++) {
        for (size_t e = 0; e < 3 && plan->efforts[e]; e++) {
            figures f = measure(plan, plan->sizes[i], plan->efforts[e]);
            print(plan, &f, plan->sizes[i], plan->efforts[e], first);
            fflush(stdout);
            first = false;
        }
    }
    fprintf(plan->json, "]");
}
