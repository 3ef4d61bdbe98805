#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench/quality.h"
#include "bench/support.h"

enum { MAX_ARGUMENTS = 48 };

/* A command line for train_gpt. */
typedef struct command {
    int count;
    char text[MAX_ARGUMENTS][QUALITY_PATH];
    const char *list[MAX_ARGUMENTS + 1];
} command;

static void add(command *c, const char *name, const char *value) {
    if (c->count + 2 > MAX_ARGUMENTS) {
        quality_die(name, "too many arguments");
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

/* What all runs of a series have in common; the schedule is constant, so that runs may end where they like. */
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

/* Series of other lengths share the run: it is trained on where it ends. */
static int has_step(const char *path, uint64_t step) {
    ckd_store *store;
    ckd_checkpoint found;
    if (ckd_store_open(&store, path, CKD_OPEN_READ, NULL, NULL) != CKD_OK) {
        return 0;
    }
    int has = ckd_store_find(&found, store, "gpt", step, NULL) == CKD_OK;
    ckd_store_close(store);
    return has;
}

void quality_make_series(quality_series *out, const quality_options *o, int width, double beta2, int seed) {
    *out = (quality_series){.options = o, .width = width, .seed = seed, .beta2 = beta2};
    snprintf(out->dir, sizeof(out->dir), "bench/series/quality-w%d-b%g-every%d-s%d", width, beta2, o->every,
             seed);
    snprintf(out->store, sizeof(out->store), "%.400s/store", out->dir);
    snprintf(out->work, sizeof(out->work), "%.400s/work", out->dir);
    mkdir("bench/series", 0777);
    mkdir(out->dir, 0777);
    bench_remove_tree(out->work);
    if (mkdir(out->work, 0777) != 0) {
        quality_die(out->work, "cannot be created; run it from the root of the sources");
    }
    if (has_step(out->store, quality_last_step(o))) {
        return;
    }
    command c = training(out);
    add(&c, "--store", out->store);
    add(&c, "--run", "gpt");
    add_number(&c, "--steps", quality_last_step(o));
    add_number(&c, "--save-every", (uint64_t)o->every);
    add(&c, "--resume", NULL);
    bench_run_trainer(arguments(&c));
}

/* ---- resumes ---- */

/* The last "validation loss" that train_gpt printed. */
static double validation_loss(const char *output) {
    FILE *f = fopen(output, "r");
    char line[512];
    double loss = NAN;
    while (f && fgets(line, sizeof(line), f)) {
        const char *at = strstr(line, "validation loss ");
        if (at) {
            loss = strtod(at + strlen("validation loss "), NULL);
        }
    }
    if (!f || isnan(loss)) {
        quality_die(output, "no validation loss that is a number in it");
    }
    fclose(f);
    return loss;
}

static double mean_loss(const char *losses, int steps) {
    FILE *f = fopen(losses, "r");
    unsigned long long step;
    double loss, rounded, sum = 0;
    int lines = 0;
    for (; f && fscanf(f, "%llu %la %lf", &step, &loss, &rounded) == 3; lines++) {
        sum += loss;
    }
    if (lines != steps) {
        quality_die(losses, "not a line for every step in it");
    }
    fclose(f);
    return sum / steps;
}

/* Resumes from the checkpoint in work/NAME, trains for `steps`; rate "0" trains without moving anything. */
static double train_on(const quality_series *s, const char *name, uint64_t from, int steps, const char *rate,
                       int batch_seed, const char *losses) {
    char store[QUALITY_PATH], output[QUALITY_PATH], run[64];
    snprintf(store, sizeof(store), "%.400s/%.60s", s->work, name);
    snprintf(output, sizeof(output), "%.400s/%.60s.txt", s->work, name);
    snprintf(run, sizeof(run), "%s-%d", rate ? "load" : "after", batch_seed);
    command c = training(s);
    add(&c, "--store", store);
    add(&c, "--resume-run", "state");
    add_number(&c, "--resume-step", from);
    add(&c, "--run", run);
    add_number(&c, "--steps", from + (uint64_t)steps);
    if (rate) {
        add(&c, "--lr", rate);
    }
    if (batch_seed) {
        add_number(&c, "--batch-seed", (uint64_t)batch_seed);
    }
    if (losses) {
        remove(losses);
        add(&c, "--losses", losses);
    }
    bench_run_trainer_into(output, arguments(&c));
    return validation_loss(output);
}

quality_losses quality_resume(const quality_series *s, const char *name, const quality_state *state,
                              int batch_seed) {
    char store[QUALITY_PATH], losses[QUALITY_PATH];
    snprintf(store, sizeof(store), "%.400s/%.60s", s->work, name);
    snprintf(losses, sizeof(losses), "%.400s/%.60s.losses", s->work, name);
    int steps = s->options->resumed;
    const quality_library exactly = {CKD_EXACT, 0, 0};
    quality_save(store, "state", state, &exactly, 1);
    quality_losses r = {.at_load = NAN};
    if (!batch_seed) {
        r.at_load = train_on(s, name, state->step, 1, "0", 0, NULL);
    }
    r.after = train_on(s, name, state->step, steps, NULL, batch_seed, losses);
    r.training = mean_loss(losses, steps);
    bench_remove_tree(store);
    return r;
}
