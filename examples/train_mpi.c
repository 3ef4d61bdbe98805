/*
 * train_mpi: train_gpt on the ranks of an MPI job. Each rank computes the gradients of its share of the batch; their
 * mean updates the same weights everywhere. All ranks register the whole state, and the library has each tensor written
 * once, by the rank that has the least to write. Any number of ranks can go on from a checkpoint.
 *
 *     mpirun -n 4 train_mpi --store ckpts --save-every 10 --resume [options of train_gpt]
 *
 * The same number of ranks gives the same bits, interrupted and resumed or not. The ranks meet for saves through the store's directory, so no
 * thread but this one calls MPI.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt_options.h"

typedef struct trainer {
    const gpt_options *options; /* the batch is that of all ranks */
    int rank, world;
    gpt_pool *pool;
    gpt_model *model;
    gpt_text text;
    uint8_t *tokens, *targets; /* of the whole batch */
    char group[32];
    ckd_ranks_options ranks;
    ckd_store *store; /* for resuming; the session opens its own */
    gpt_session *session;
    FILE *losses; /* rank 0 only */
    gpt_position at;
} trainer;

/* ------------------------------------------------------------------------------------------------------- ranks */

/* Sums up on rank 0 and sends the result, so that all ranks have the same bits. */
static void mean_of_ranks(float *values, size_t count, int world) {
    for (size_t first = 0; first < count; first += 1 << 24) {
        int n = (int)(count - first < 1 << 24 ? count - first : 1 << 24), rank;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Reduce(rank ? values + first : MPI_IN_PLACE, values + first, n, MPI_FLOAT, MPI_SUM, 0,
                   MPI_COMM_WORLD);
        MPI_Bcast(values + first, n, MPI_FLOAT, 0, MPI_COMM_WORLD);
    }
    for (size_t i = 0; i < count; i++)
        values[i] /= (float)world;
}

static double sum_of_ranks(double value) {
    double sum = 0;
    MPI_Reduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Bcast(&sum, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return sum;
}

static int max_of_ranks(int value) {
    int max = 0;
    MPI_Allreduce(&value, &max, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return max;
}

/* Whether all ranks go on from the same step. */
static int ranks_agree(uint64_t step) {
    uint64_t of_rank_0 = step;
    MPI_Bcast(&of_rank_0, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    return !max_of_ranks(step != of_rank_0);
}

/* ------------------------------------------------------------------------------------------------------- setup */

static void store_says(void *context, const char *message) {
    (void)context;
    fprintf(stderr, "store: %s\n", message);
}

/* Rank 0 opens the store first: it creates it, or cleans up after a job that died. */
static int open_store(trainer *t) {
    ckd_error err = {0};
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.on_message = t->rank == 0 ? store_says : NULL;
    ckd_status status = CKD_OK;
    for (int turn = 0; turn < 2; turn++) {
        if ((t->rank > 0) == turn)
            status = ckd_store_open(&t->store, t->options->store, CKD_OPEN_CREATE, &options, &err);
        if (max_of_ranks(status != CKD_OK)) {
            if (status != CKD_OK)
                fprintf(stderr, "train_mpi: rank %d cannot open the store %s: %s (%s)\n", t->rank,
                        t->options->store, err.message, ckd_status_name(err.status));
            return -1;
        }
    }
    return 0;
}

static int resume(trainer *t) {
    const gpt_options *o = t->options;
    if (max_of_ranks(gpt_resume(&t->at, t->store, o, t->model, &t->text) != 0))
        return -1;
    if (!ranks_agree(t->at.progress.step)) {
        fprintf(stderr, "train_mpi: rank %d would go on from step %" PRIu64 ", and rank 0 from another\n",
                t->rank, t->at.progress.step);
        return -1;
    }
    return 0;
}

static int open_session(trainer *t) {
    const gpt_options *o = t->options;
    gpt_background with = {.store = o->store,
                           .lineage = &t->at.lineage,
                           .model = t->model,
                           .text = &t->text,
                           .progress = &t->at.progress,
                           .lazy = o->background && strcmp(o->background, "lazy") == 0,
                           .save_every = o->save_every ? o->save_every : o->steps,
                           .ranks = &t->ranks};
    /* one name for each launch, which a dead one does not share */
    if (t->rank == 0) {
        gpt_rng rng;
        gpt_rng_seed(&rng, (uint64_t)(1e9 * MPI_Wtime()), (uint64_t)(uintptr_t)t);
        snprintf(t->group, sizeof t->group, "%016" PRIx64, gpt_rng_next(&rng));
    }
    MPI_Bcast(t->group, sizeof t->group, MPI_CHAR, 0, MPI_COMM_WORLD);
    t->ranks = (ckd_ranks_options)CKD_RANKS_OPTIONS_INIT;
    t->ranks.rank = (uint32_t)t->rank;
    t->ranks.world = (uint32_t)t->world;
    t->ranks.group = t->group;
    return gpt_session_new(&t->session, &with);
}

static int set_up(trainer *t) {
    const gpt_options *o = t->options;
    size_t batch_bytes = (size_t)o->model.batch * (size_t)o->model.context;
    if (o->model.batch % t->world != 0 || !o->store) {
        if (t->rank == 0)
            fprintf(stderr, "train_mpi: %s\n",
                    o->store ? "--batch must be a multiple of the number of ranks" : "--store is needed");
        return -1;
    }
    t->at.progress.seed = o->seed;
    t->at.lineage.run = o->run;
    t->pool = gpt_pool_new(o->threads ? o->threads : 1);
    t->tokens = malloc(batch_bytes);
    t->targets = malloc(batch_bytes);
    if (!t->pool || !t->tokens || !t->targets) {
        fprintf(stderr, "train_mpi: out of memory, or threads cannot be started\n");
        return -1;
    }
    if (gpt_text_load(&t->text, o->text) || gpt_model_new(&t->model, &o->model, t->pool, o->seed) ||
        open_store(t) || (o->resume && resume(t)) || open_session(t))
        return -1;
    if (t->rank == 0) {
        printf("text: %zu bytes, %s; model: %zu parameters in %zu tensors; %d rank(s)\n", t->text.size,
               t->text.source, t->model->parameter_count, t->model->tensor_count, t->world);
        gpt_resume_report(&t->at, o);
    }
    if (t->rank == 0 && o->losses && !(t->losses = fopen(o->losses, "a"))) {
        fprintf(stderr, "train_mpi: cannot write %s: %s\n", o->losses, strerror(errno));
        return -1;
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- training */

/* The mean loss of the batch. The gradients are those of the whole batch afterwards. */
static double forward_backward(trainer *t) {
    gpt_config *c = &t->model->config;
    int share = c->batch / t->world;
    size_t first = (size_t)t->rank * (size_t)share * (size_t)c->context;
    gpt_text_batch(&t->text, c, t->at.progress.seed, t->at.progress.step + 1, t->tokens, t->targets, NULL);
    c->batch = share; /* checkpoints say the batch of all ranks, so the model has that one otherwise */
    double loss = gpt_forward(t->model, t->tokens + first, t->targets + first);
    gpt_backward(t->model, t->tokens + first);
    c->batch = t->options->model.batch;
    mean_of_ranks(t->model->tensors[0].grad, t->model->parameter_count, t->world);
    return sum_of_ranks(loss) / t->world;
}

static int report_loss(trainer *t, double loss, double norm) {
    const gpt_options *o = t->options;
    uint64_t step = t->at.progress.step;
    if (t->losses &&
        (fprintf(t->losses, "%" PRIu64 " %a %.6f\n", step, loss, loss) < 0 || fflush(t->losses) != 0)) {
        fprintf(stderr, "train_mpi: cannot write %s: %s\n", o->losses, strerror(errno));
        return -1;
    }
    if (t->rank == 0 && o->log_every && step % o->log_every == 0)
        printf("step %" PRIu64 "  loss %.4f  gradient norm %.3f\n", step, loss, norm);
    fflush(stdout);
    return 0;
}

static int train(trainer *t) {
    const gpt_options *o = t->options;
    int stop = 0;
    while (t->at.progress.step < o->steps && !stop) {
        double loss = forward_backward(t);
        if (!isfinite(loss)) {
            fprintf(stderr, "train_mpi: the loss is not finite; try a smaller --lr\n");
            return -1;
        }
        gpt_session_fence(t->session);
        double norm = gpt_adamw_step(t->model, &o->adamw, ++t->at.progress.step);
        /* a signal reaches the ranks at different steps */
        int asked = max_of_ranks(gpt_session_asked(t->session)), ignored;
        stop = asked == 2;
        if (report_loss(t, loss, norm) ||
            gpt_session_step(&ignored, t->session, loss, asked || t->at.progress.step == o->steps))
            return -1;
    }
    gpt_session *session = t->session;
    t->session = NULL;
    return gpt_session_end(session);
}

int main(int argc, char **argv) {
    int threads;
    gpt_options options;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &threads);
    gpt_options_parse(&options, argc, argv);
    trainer t = {.options = &options};
    MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &t.world);
    if (set_up(&t) || train(&t)) {
        fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE); /* others may wait for this rank */
    }
    ckd_store_close(t.store);
    if (t.losses)
        fclose(t.losses);
    gpt_model_free(t.model);
    gpt_text_free(&t.text);
    gpt_pool_free(t.pool);
    free(t.tokens);
    free(t.targets);
    MPI_Finalize();
    return EXIT_SUCCESS;
}
