/*
 * train_gpt: a real training run with checkpoints. Flow: options -> text -> model -> (resume) -> for each step: batch,
 * forward, backward, AdamW, and sometimes a save.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "examples/gpt_options.h"

typedef struct trainer {
    const gpt_options *options;
    gpt_pool *pool;
    gpt_model *model;
    gpt_text text;
    uint8_t *tokens, *targets;
    ckd_store *store;
    gpt_session *session; /* NULL: saves block training */
    int stop;             /* requested by a signal */
    FILE *losses;
    gpt_position at;
    double logged_at; /* seconds */
    uint64_t logged_step;
} trainer;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int core_count(void) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : cores > 16 ? 16 : (int)cores;
}

/* ------------------------------------------------------------------------------------------------------- setup */

static void store_says(void *context, const char *message) {
    (void)context;
    fprintf(stderr, "store: %s\n", message);
}

static int open_store(trainer *t) {
    ckd_error err = {0};
    if (t->options->background)
        gpt_session_await_agent(t->options->store, t->options->run);
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = (uint32_t)gpt_pool_threads(t->pool);
    options.on_message = store_says;
    if (ckd_store_open(&t->store, t->options->store, CKD_OPEN_CREATE, &options, &err) == CKD_OK)
        return 0;
    fprintf(stderr, "train_gpt: cannot open the store %s: %s (%s)\n", t->options->store, err.message,
            ckd_status_name(err.status));
    return -1;
}

static int open_session(trainer *t) {
    const gpt_options *o = t->options;
    gpt_background with = {.store = o->store,
                           .lineage = &t->at.lineage,
                           .model = t->model,
                           .text = &t->text,
                           .progress = &t->at.progress,
                           .lazy = strcmp(o->background, "lazy") == 0,
                           .save_every = o->save_every,
                           .overhead = o->overhead};
    return gpt_session_new(&t->session, &with);
}

static int set_up(trainer *t) {
    const gpt_options *o = t->options;
    size_t batch_bytes = (size_t)o->model.batch * (size_t)o->model.context;
    t->at.progress.seed = o->seed;
    t->at.lineage.run = o->run;
    t->at.lineage.fidelity = o->fidelity;
    t->at.lineage.adamw = o->save_every == 1 ? &o->adamw : NULL;
    t->pool = gpt_pool_new(o->threads ? o->threads : core_count());
    t->tokens = malloc(batch_bytes);
    t->targets = malloc(batch_bytes);
    if (!t->pool || !t->tokens || !t->targets) {
        fprintf(stderr, "train_gpt: out of memory, or threads cannot be started\n");
        return -1;
    }
    if (o->keep_text && gpt_text_keep(o->text))
        return -1;
    if (gpt_text_load(&t->text, o->text) || gpt_model_new(&t->model, &o->model, t->pool, o->seed))
        return -1;
    printf("text: %zu bytes, %s; model: %zu parameters in %zu tensors; %d thread(s)\n", t->text.size,
           t->text.source, t->model->parameter_count, t->model->tensor_count, gpt_pool_threads(t->pool));
    if (o->store && open_store(t))
        return -1;
    if (o->resume && gpt_resume(&t->at, t->store, o, t->model, &t->text))
        return -1;
    gpt_resume_report(&t->at, o);
    if (o->background && open_session(t))
        return -1;
    if (o->losses && !(t->losses = fopen(o->losses, "a"))) {
        fprintf(stderr, "train_gpt: cannot write %s: %s\n", o->losses, strerror(errno));
        return -1;
    }
    return 0;
}

static void tear_down(trainer *t) {
    gpt_session_end(t->session);
    if (t->losses)
        fclose(t->losses);
    ckd_store_close(t->store);
    gpt_model_free(t->model);
    gpt_text_free(&t->text);
    gpt_pool_free(t->pool);
    free(t->tokens);
    free(t->targets);
}

/* ---------------------------------------------------------------------------------------------------- training */

static double validation_loss(trainer *t) {
    double sum = 0;
    size_t batches = t->options->eval_batches;
    for (size_t i = 0; i < batches; i++) {
        gpt_text_validation(&t->text, &t->model->config, i, batches, t->tokens, t->targets);
        sum += gpt_forward(t->model, t->tokens, t->targets);
    }
    return sum / (double)batches;
}

static int due(uint64_t step, uint64_t every) {
    return every && step % every == 0;
}

static int dump_due(const gpt_options *o, uint64_t step) {
    if (o->dump_step_count == 0)
        return due(step, o->save_every);
    for (size_t i = 0; i < o->dump_step_count; i++)
        if (o->dump_steps[i] == step)
            return 1;
    return 0;
}

static int save(trainer *t, double loss) {
    ckd_checkpoint info;
    double start = seconds();
    if (gpt_state_save(t->store, &t->at.lineage, t->model, &t->text, &t->at.progress, loss, &info))
        return -1;
    t->at.lineage.branch = 0;
    snprintf(t->at.run, sizeof t->at.run, "%s", info.run); /* a branch, if the run had the step */
    t->at.lineage.run = t->at.run;
    printf("saved step %" PRIu64 ": %s, %.2f MiB for %.2f MiB, %.0f ms\n", info.step,
           ckd_kind_name(info.kind), (double)info.stored_bytes / 1048576, (double)info.raw_bytes / 1048576,
           1e3 * (seconds() - start));
    return 0;
}

/* Does everything after a step besides training. */
static int after_step(trainer *t, double loss, double norm) {
    const gpt_options *o = t->options;
    uint64_t step = t->at.progress.step;
    if (t->losses &&
        (fprintf(t->losses, "%" PRIu64 " %a %.6f\n", step, loss, loss) < 0 || fflush(t->losses) != 0)) {
        fprintf(stderr, "train_gpt: cannot write %s: %s\n", o->losses, strerror(errno));
        return -1;
    }
    if (due(step, o->log_every)) {
        double now = seconds(), tokens = (double)(step - t->logged_step) * o->model.batch * o->model.context;
        printf("step %" PRIu64 "  loss %.4f  gradient norm %.3f  %.0f tokens/s\n", step, loss, norm,
               tokens / (now - t->logged_at));
        t->logged_at = now;
        t->logged_step = step;
    }
    if (t->session && gpt_session_step(&t->stop, t->session, loss, step == o->steps))
        return -1;
    if (t->store && !t->session && (due(step, o->save_every) || step == o->steps) && save(t, loss))
        return -1;
    if (o->dump && dump_due(o, step) && gpt_state_dump(o->dump, t->model, step))
        return -1;
    if (due(step, o->eval_every) || step == o->steps)
        printf("step %" PRIu64 "  validation loss %.6f\n", step, validation_loss(t));
    fflush(stdout);
    return 0;
}

static int train(trainer *t) {
    const gpt_options *o = t->options;
    t->logged_at = seconds();
    t->logged_step = t->at.progress.step;
    if (t->at.progress.step >= o->steps)
        printf("nothing to do: step %" PRIu64 " is reached already\n", o->steps);
    while (t->at.progress.step < o->steps && !t->stop) {
        uint64_t step = t->at.progress.step + 1;
        gpt_text_batch(&t->text, &t->model->config, t->at.progress.seed, step, t->tokens, t->targets, NULL);
        double loss = gpt_forward(t->model, t->tokens, t->targets);
        if (!isfinite(loss)) {
            fprintf(stderr, "train_gpt: the loss of step %" PRIu64 " is not finite; try a smaller --lr\n",
                    step);
            return -1;
        }
        gpt_backward(t->model, t->tokens);
        if (t->session)
            gpt_session_fence(t->session);
        gpt_adamw adamw = gpt_fault_adamw(o, step, 0);
        double norm = gpt_adamw_step(t->model, &adamw, step);
        gpt_fault_spoil(t->model, o, step);
        t->at.progress.step = step;
        if (after_step(t, loss, norm))
            return -1;
    }
    if (t->stop)
        printf("stopped at step %" PRIu64 ", as asked\n", t->at.progress.step);
    gpt_session *session = t->session;
    t->session = NULL;
    return gpt_session_end(session);
}

int main(int argc, char **argv) {
    gpt_options options;
    gpt_options_parse(&options, argc, argv);
    trainer t = {.options = &options};
    int failed = set_up(&t) || train(&t);
    tear_down(&t);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
