#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

enum { MAX_ARGUMENTS = 48, SPINE_EVERY = 100 /* steps */ };
#define SPINE "gpt"

/* A command line for train_gpt. */
typedef struct command {
    int count;
    char text[MAX_ARGUMENTS][QUALITY_PATH];
    const char *list[MAX_ARGUMENTS + 1];
} command;

static void add(command *c, const char *name, const char *value) {
    if (c->count + 2 > MAX_ARGUMENTS) {
        bench_die(name, "too many arguments");
    }
    snprintf(c->text[c->count++], QUALITY_PATH, "%s", name);
    if (value) {
        snprintf(c->text[c->count++], QUALITY_PATH, "%s", value);
    }
}

static void add_number(command *c, const char *name, uint64_t value) {
    char text[32];
    snprintf(text, sizeof(text), "%" PRIu64, value);
    add(c, name, text);
}

static const char *const *arguments(command *c) {
    for (int i = 0; i < c->count; i++) {
        c->list[i] = c->text[i];
    }
    c->list[c->count] = NULL;
    return c->list;
}

/*
 * The options that all runs of a series share. The schedule is constant, so that it does not depend on the last step.
 */
static command training(const quality_series *s) {
    command c = {0};
    char beta[32];
    snprintf(beta, sizeof(beta), "%g", s->beta2);
    add_number(&c, "--width", (uint64_t)s->width);
    add_number(&c, "--seed", (uint64_t)s->seed);
    add(&c, "--beta2", beta);
    add(&c, "--schedule", "constant");
    if (s->options->threads) {
        add_number(&c, "--threads", (uint64_t)s->options->threads);
    }
    return c;
}

uint64_t quality_last_step(const quality_options *o) {
    return (uint64_t)(o->start + o->every * o->deltas);
}

static bool has_step(const char *path, const char *run, uint64_t step) {
    ckd_store *store;
    ckd_checkpoint found;
    if (ckd_store_open(&store, path, CKD_OPEN_READ, NULL, NULL) != CKD_OK) {
        return false;
    }
    bool has = ckd_store_find(&found, store, run, step, NULL) == CKD_OK;
    ckd_store_close(store);
    return has;
}

static void train_series(const quality_series *s, const char *run, uint64_t from, uint64_t last, int every) {
    if (has_step(s->store, run, last)) {
        return;
    }
    command c = training(s);
    add(&c, "--store", s->store);
    add(&c, "--run", run);
    add_number(&c, "--steps", last);
    add_number(&c, "--save-every", (uint64_t)every);
    if (from && !has_step(s->store, run, CKD_LATEST)) {
        add(&c, "--resume-run", SPINE);
        add_number(&c, "--resume-step", from);
    } else {
        add(&c, "--resume", NULL);
    }
    bench_run_trainer(arguments(&c));
}

void quality_make_series(quality_series *out, const quality_options *o, int width, double beta2, int seed) {
    *out = (quality_series){.options = o, .width = width, .seed = seed, .beta2 = beta2};
    snprintf(out->dir, sizeof(out->dir), "bench/series/quality-w%d-b%g-s%d", width, beta2, seed);
    snprintf(out->store, sizeof(out->store), "%.400s/store", out->dir);
    snprintf(out->work, sizeof(out->work), "%.400s/work-%ld", out->dir, (long)getpid());
    mkdir("bench/series", 0777);
    mkdir(out->dir, 0777);
    bench_remove_tree(out->work);
    if (mkdir(out->work, 0777) != 0) {
        bench_die(out->work, "cannot be created; run the benchmark in the root of the sources");
    }
    uint64_t last = quality_last_step(o);
    bool all_on_spine = o->start % SPINE_EVERY == 0 && o->every % SPINE_EVERY == 0;
    out->spine = all_on_spine ? last : (uint64_t)(o->start / SPINE_EVERY * SPINE_EVERY);
    snprintf(out->run, sizeof(out->run), SPINE);
    if (out->spine) {
        train_series(out, SPINE, 0, out->spine, SPINE_EVERY);
    }
    if (!all_on_spine) {
        snprintf(out->run, sizeof(out->run), "every%d-from%" PRIu64, o->every, out->spine);
        train_series(out, out->run, out->spine, last, o->every);
    }
}

quality_state quality_load_step(const quality_series *s, uint64_t step) {
    return quality_load(NULL, s->store, has_step(s->store, s->run, step) ? s->run : SPINE, step);
}

uint64_t quality_state_before(const quality_series *s, uint64_t step) {
    uint64_t start = (uint64_t)s->options->start, every = (uint64_t)s->options->every;
    uint64_t spine = step / SPINE_EVERY * SPINE_EVERY;
    uint64_t chain = step < start ? 0 : start + (step - start) / every * every;
    chain = chain > quality_last_step(s->options) ? quality_last_step(s->options) : chain;
    return spine > chain && has_step(s->store, SPINE, spine) ? spine : chain ? chain : start;
}

void quality_load_chain(quality_state *states, const quality_series *s) {
    const quality_options *o = s->options;
    for (int i = 0; i <= o->deltas; i++) {
        states[i] = quality_load_step(s, (uint64_t)(o->start + i * o->every));
    }
}

/* ---- resumes ---- */

int quality_validation_losses(double *losses, const char *path, int count) {
    FILE *f = fopen(path, "r");
    char line[512];
    int found = 0;
    while (f && fgets(line, sizeof(line), f)) {
        const char *at = strstr(line, "validation loss ");
        if (at) {
            found++;
            memmove(losses, losses + 1, (size_t)(count - 1) * sizeof(*losses));
            losses[count - 1] = strtod(at + strlen("validation loss "), NULL);
        }
    }
    if (f) {
        fclose(f);
    }
    int good = found >= count;
    for (int i = 0; i < count && good; i++) {
        good = isfinite(losses[i]);
    }
    return good;
}

int quality_mean_losses(double *means, const char *path, int segments, int steps) {
    FILE *f = fopen(path, "r");
    unsigned long long step;
    double loss, rounded;
    int lines = 0;
    memset(means, 0, (size_t)segments * sizeof(*means));
    for (; f && lines < segments * steps && fscanf(f, "%llu %la %lf", &step, &loss, &rounded) == 3; lines++) {
        means[lines / steps] += loss / steps;
    }
    int good = f && lines == segments * steps && fscanf(f, "%llu", &step) != 1;
    if (f) {
        fclose(f);
    }
    return good;
}

/* How to train on from the checkpoint in work/NAME. */
typedef struct going_on {
    const char *name, *run;
    uint64_t from;
    int segments, steps, batch_seed;
    const char *rate, *losses; /* or NULL */
} going_on;

static void train_on(double *after, const quality_series *s, const going_on *g) {
    char store[QUALITY_PATH], output[QUALITY_PATH];
    snprintf(store, sizeof(store), "%.400s/%.60s", s->work, g->name);
    snprintf(output, sizeof(output), "%.400s/%.60s.txt", s->work, g->name);
    command c = training(s);
    add(&c, "--store", store);
    add(&c, "--resume-run", "state");
    add_number(&c, "--resume-step", g->from);
    add(&c, "--run", g->run);
    add_number(&c, "--steps", g->from + (uint64_t)(g->segments * g->steps));
    if (g->segments > 1) {
        add_number(&c, "--eval-every", (uint64_t)g->steps);
    }
    add_number(&c, "--eval-batches", (uint64_t)s->options->eval_batches);
    if (g->rate) {
        add(&c, "--lr", g->rate);
    }
    if (g->batch_seed) {
        add_number(&c, "--batch-seed", (uint64_t)g->batch_seed);
    }
    if (g->losses) {
        remove(g->losses);
        add(&c, "--losses", g->losses);
    }
    bench_run_trainer_into(output, arguments(&c));
    if (!quality_validation_losses(after, output, g->segments)) {
        bench_die(output, "validation losses are missing");
    }
}

void quality_train_on(double *mean_training, double *after, quality_state *end, const quality_series *s,
                      const char *name, const quality_state *from, int segments, int steps, int batch_seed) {
    char store[QUALITY_PATH], losses[QUALITY_PATH];
    snprintf(store, sizeof(store), "%.400s/%.60s", s->work, name);
    snprintf(losses, sizeof(losses), "%.400s/%.60s.losses", s->work, name);
    const quality_library exactly = {.fidelity = CKD_EXACT};
    bench_remove_tree(store);
    quality_save(store, "state", from, &exactly, 1, NULL);
    const going_on g = {.name = name,
                        .run = "after",
                        .from = from->step,
                        .segments = segments,
                        .steps = steps,
                        .batch_seed = batch_seed,
                        .losses = losses};
    train_on(after, s, &g);
    if (!quality_mean_losses(mean_training, losses, segments, steps)) {
        bench_die(losses, "lines of steps are missing");
    }
    if (end) {
        *end = quality_load(NULL, store, "after", from->step + (uint64_t)(segments * steps));
    }
    bench_remove_tree(store);
}

quality_losses quality_resume(const quality_series *s, const char *name, const quality_state *state,
                              int batch_seed) {
    double training[QUALITY_EVALS], after[QUALITY_EVALS];
    quality_train_on(training, after, NULL, s, name, state, QUALITY_EVALS,
                     s->options->resumed / QUALITY_EVALS, batch_seed);
    quality_losses r = {
        NAN, quality_figure_of(training, QUALITY_EVALS).mean,
        quality_figure_of(after + QUALITY_EVALS - QUALITY_LATE_EVALS, QUALITY_LATE_EVALS).mean};
    if (!batch_seed) { /* the loss of a step with learning rate 0 */
        char store[QUALITY_PATH];
        snprintf(store, sizeof(store), "%.400s/%.60s", s->work, name);
        const quality_library exactly = {.fidelity = CKD_EXACT};
        quality_save(store, "state", state, &exactly, 1, NULL);
        const going_on g = {
            .name = name, .run = "load", .from = state->step, .segments = 1, .steps = 1, .rate = "0"};
        train_on(&r.at_load, s, &g);
        bench_remove_tree(store);
    }
    return r;
}
