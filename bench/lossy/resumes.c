/*
 * Many lossy resumes in a row: save, load, train, save ... Each save is a delta on the one before, each training
 * continues from what was loaded. For comparison the same steps run without an interruption, on the same batches, and
 * on others, whose difference is noise.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

/* One run of `resumes` segments. */
typedef struct resumed_run {
    double training[QUALITY_MAX_RESUMES], after[QUALITY_MAX_RESUMES];
    uint32_t lossy_resumes; /* of the last state, from the catalog */
} resumed_run;

static double fall[QUALITY_MAX_SEEDS]; /* of validation loss in one step, in the end */
static resumed_run exact[QUALITY_MAX_SEEDS], orders[QUALITY_MAX_ORDERS][QUALITY_MAX_SEEDS];
static resumed_run lossy[QUALITY_MAX_CODERS][QUALITY_MAX_SEEDS];

/* ---- runs ---- */

static void run_exactly(resumed_run *run, const quality_series *s, const quality_state *start,
                        int batch_seed) {
    const quality_options *o = s->options;
    quality_train_on(run->training, run->after, NULL, s, "plain", start, o->resumes, o->every, batch_seed);
}

/* Saves a state and returns what a resume loads. resumed_from: the step from which its training was resumed. */
static quality_state through_store(resumed_run *run, const char *store, const quality_state *s,
                                   const quality_library *how, const uint64_t *resumed_from) {
    run->lossy_resumes = quality_save(store, "run", s, how, !resumed_from, resumed_from);
    return quality_load(NULL, store, "run", s->step);
}

static void run_lossy(resumed_run *run, const quality_series *s, const quality_state *start,
                      const quality_coder *coder) {
    const quality_options *o = s->options;
    char store[QUALITY_PATH];
    snprintf(store, sizeof(store), "%.400s/lossy", s->work);
    quality_state now = through_store(run, store, start, &coder->library, NULL);
    for (int i = 0; i < o->resumes; i++) {
        quality_state end;
        uint64_t from = now.step;
        quality_train_on(&run->training[i], &run->after[i], &end, s, "segment", &now, 1, o->every, 0);
        quality_free(&now);
        now = through_store(run, store, &end, &coder->library, &from);
        quality_free(&end);
        if (run->lossy_resumes != (uint32_t)i + 1) {
            bench_die(coder->name, "the catalog has another number of lossy resumes");
        }
    }
    quality_free(&now);
    bench_remove_tree(store);
}

static void measure_seed(int seed, const quality_options *o) {
    quality_series series;
    quality_make_series(&series, o, o->width, o->beta2, seed + 1);
    quality_state start = quality_load_step(&series, (uint64_t)o->start);
    fall[seed] = quality_fall(&series, quality_last_step(o));
    fprintf(stderr, "seed %d: without resumes\n", seed + 1);
    run_exactly(&exact[seed], &series, &start, 0);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_coder coder = quality_with_load_cost(&quality_coders[c], o);
        fprintf(stderr, "seed %d: %s, %d resumes\n", seed + 1, coder.name, o->resumes);
        run_lossy(&lossy[c][seed], &series, &start, &coder);
    }
    for (int i = 0; i < o->orders; i++) {
        fprintf(stderr, "seed %d: other batches %d\n", seed + 1, i + 1);
        run_exactly(&orders[i][seed], &series, &start, 1000 * (seed + 1) + i);
        if (orders[i][seed].training[0] == exact[seed].training[0]) {
            bench_die("noise", "other batches gave the same losses");
        }
    }
    quality_free(&start);
    bench_remove_tree(series.work);
}

/* ---- figures ---- */

/* A run in three numbers. */
typedef enum summary {
    ALL_TRAINING, /* mean training loss over all steps */
    LAST_TRAINING,
    LAST_AFTER, /* validation loss in the end */
    STEPS_LOST, /* the same over its fall in one step */
    SUMMARIES
} summary;

static double summary_of(const resumed_run *run, summary what, int resumes) {
    return what == ALL_TRAINING    ? quality_figure_of(run->training, resumes).mean
           : what == LAST_TRAINING ? run->training[resumes - 1]
                                   : run->after[resumes - 1];
}

static quality_figure gap_of(const resumed_run *runs, summary what, const quality_options *o) {
    double gaps[QUALITY_MAX_SEEDS];
    for (int seed = 0; seed < o->seeds; seed++) {
        gaps[seed] = summary_of(&runs[seed], what, o->resumes) - summary_of(&exact[seed], what, o->resumes);
        gaps[seed] /= what == STEPS_LOST ? fall[seed] : 1;
    }
    return quality_figure_of(gaps, o->seeds);
}

/* Deviation over batch orders, the series' own among them, pooled over seeds. */
static double noise_of(summary what, const quality_options *o) {
    double squares = 0;
    for (int seed = 0; seed < o->seeds; seed++) {
        double values[QUALITY_MAX_ORDERS + 1] = {summary_of(&exact[seed], what, o->resumes)};
        for (int i = 0; i < o->orders; i++) {
            values[i + 1] = summary_of(&orders[i][seed], what, o->resumes);
        }
        double scale = what == STEPS_LOST ? fall[seed] : 1;
        squares += pow(quality_figure_of(values, o->orders + 1).spread / scale, 2);
    }
    return sqrt(squares / o->seeds);
}

static void print(const quality_options *o) {
    printf("\nwidth %d, beta2 %g, %d seed%s: %d resumes in a row, every %d steps from step %d\n", o->width,
           o->beta2, o->seeds, o->seeds > 1 ? "s" : "", o->resumes, o->every, o->start);
    printf("%-12s  loss minus that without resumes: mean (spread over seeds)\n", "");
    printf("%-12s %20s %20s %20s %20s  %s\n", "coder", "training, all steps", "training, last",
           "validation after", "steps lost", "lossy resumes in the catalog");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        printf("%-12s", quality_coders[c].name);
        for (summary what = 0; what < SUMMARIES; what++) {
            quality_figure gap = gap_of(lossy[c], what, o);
            printf("   %+8.4f (%.4f) ", gap.mean, gap.spread);
        }
        printf("  %" PRIu32 "\n", lossy[c][0].lossy_resumes);
    }
    printf("%-12s", "noise");
    for (summary what = 0; what < SUMMARIES; what++) {
        printf("   %8.4f          ", noise_of(what, o));
    }
    printf("  (%d other batch order%s)\n", o->orders, o->orders == 1 ? "" : "s");
    fflush(stdout);
}

/* ---- JSON ---- */

static void write_losses(FILE *f, const char *name, const double *losses, int count, const char *end) {
    fprintf(f, "\"%s\": [", name);
    for (int i = 0; i < count; i++) {
        fprintf(f, "%s%.5f", i ? ", " : "", losses[i]);
    }
    fprintf(f, "]%s", end);
}

static void write_run(FILE *f, const char *name, int seed, const resumed_run *run, const quality_options *o,
                      int last) {
    fprintf(f, "    {\"run\": \"%s\", \"seed\": %d, \"lossy_resumes\": %" PRIu32 ", ", name, seed + 1,
            run->lossy_resumes);
    write_losses(f, "training", run->training, o->resumes, ", ");
    write_losses(f, "validation_after", run->after, o->resumes, last ? "}\n" : "},\n");
}

static void write_gaps(FILE *f, const quality_options *o) {
    static const char *const names[SUMMARIES] = {"training_all", "training_last", "validation_after",
                                                 "steps_lost"};
    fprintf(f, "  \"noise\": {");
    for (summary what = 0; what < SUMMARIES; what++) {
        fprintf(f, "\"%s\": %.5f%s", names[what], noise_of(what, o), what + 1 < SUMMARIES ? ", " : "},\n");
    }
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        fprintf(f, "  \"%s\": {", quality_coders[c].name);
        for (summary what = 0; what < SUMMARIES; what++) {
            quality_figure gap = gap_of(lossy[c], what, o);
            fprintf(f, "\"%s\": %.5f, \"%s_spread\": %.5f%s", names[what], gap.mean, names[what], gap.spread,
                    what + 1 < SUMMARIES ? ", " : "},\n");
        }
    }
}

static void write_json(const quality_options *o) {
    FILE *f = bench_open_output(o->json);
    fprintf(f, "{\n  \"benchmark\": \"quality, resumes in a row\",\n  \"machine\": \"%s\",\n",
            bench_machine());
    fprintf(
        f,
        "  \"width\": %d, \"beta2\": %g, \"start\": %d, \"every\": %d, \"resumes\": %d, \"load_cost\": %g,\n",
        o->width, o->beta2, o->start, o->every, o->resumes, o->load_cost);
    write_gaps(f, o);
    fprintf(f, "  \"runs\": [\n");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        for (int seed = 0; seed < o->seeds; seed++) {
            write_run(f, quality_coders[c].name, seed, &lossy[c][seed], o, 0);
        }
    }
    for (int i = 0; i < o->orders * o->seeds; i++) {
        write_run(f, "other batches", i % o->seeds, &orders[i / o->seeds][i % o->seeds], o, 0);
    }
    for (int seed = 0; seed < o->seeds; seed++) {
        write_run(f, "without resumes", seed, &exact[seed], o, seed + 1 == o->seeds);
    }
    fprintf(f, "  ]\n}\n");
    bench_close_output(f, o->json);
}

void quality_measure_resumes(const quality_options *o) {
    for (int seed = 0; seed < o->seeds; seed++) {
        measure_seed(seed, o);
    }
    print(o);
    write_json(o);
}
