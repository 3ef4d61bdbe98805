#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "examples/mpi_job.h"

int mpi_job_max(int value) {
    int max = 0;
    MPI_Allreduce(&value, &max, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return max;
}

/* Whether all ranks go on from the same step. */
static int ranks_agree(uint64_t step) {
    uint64_t of_rank_0 = step;
    MPI_Bcast(&of_rank_0, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    return !mpi_job_max(step != of_rank_0);
}

/* ------------------------------------------------------------------------------------------------------- setup */

int mpi_job_begin(mpi_job *job, const char *program, const gpt_options *o) {
    *job = (mpi_job){.program = program, .options = o};
    MPI_Comm_rank(MPI_COMM_WORLD, &job->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job->world);
    if (!o->store) {
        if (job->rank == 0)
            fprintf(stderr, "%s: --store is needed\n", program);
        return -1;
    }
    size_t batch_bytes = (size_t)o->model.batch * (size_t)o->model.context;
    job->at.progress.seed = o->seed;
    job->at.lineage.run = o->run;
    job->at.lineage.fidelity = o->fidelity;
    job->at.lineage.adamw = o->save_every == 1 ? &o->adamw : NULL;
    job->pool = gpt_pool_new(o->threads ? o->threads : 1);
    job->tokens = malloc(batch_bytes);
    job->targets = malloc(batch_bytes);
    if (!job->pool || !job->tokens || !job->targets) {
        fprintf(stderr, "%s: out of memory, or threads cannot be started\n", program);
        return -1;
    }
    return gpt_text_load(&job->text, o->text);
}

static void store_says(void *context, const char *message) {
    (void)context;
    fprintf(stderr, "store: %s\n", message);
}

/* Rank 0 opens the store first: it creates it, or cleans up after a job that died. */
static int open_store(mpi_job *job) {
    ckd_error err = {0};
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.on_message = job->rank == 0 ? store_says : NULL;
    ckd_status status = CKD_OK;
    for (int turn = 0; turn < 2; turn++) {
        if ((job->rank > 0) == turn)
            status = ckd_store_open(&job->store, job->options->store, CKD_OPEN_CREATE, &options, &err);
        if (mpi_job_max(status != CKD_OK)) {
            if (status != CKD_OK)
                fprintf(stderr, "%s: rank %d cannot open the store %s: %s (%s)\n", job->program, job->rank,
                        job->options->store, err.message, ckd_status_name(err.status));
            return -1;
        }
    }
    return 0;
}

static int resume(mpi_job *job) {
    if (mpi_job_max(gpt_resume(&job->at, job->store, job->options, job->model, &job->text) != 0))
        return -1;
    if (!ranks_agree(job->at.progress.step)) {
        fprintf(stderr, "%s: rank %d would go on from step %" PRIu64 ", and rank 0 from another\n",
                job->program, job->rank, job->at.progress.step);
        return -1;
    }
    return 0;
}

static int open_session(mpi_job *job) {
    const gpt_options *o = job->options;
    gpt_background with = {.store = o->store,
                           .lineage = &job->at.lineage,
                           .model = job->model,
                           .text = &job->text,
                           .progress = &job->at.progress,
                           .lazy = o->background && strcmp(o->background, "lazy") == 0,
                           .save_every = o->save_every ? o->save_every : o->steps,
                           .ranks = &job->ranks};
    /* one name for each launch, which a dead one does not share */
    if (job->rank == 0) {
        gpt_rng rng;
        gpt_rng_seed(&rng, (uint64_t)(1e9 * MPI_Wtime()), (uint64_t)(uintptr_t)job);
        snprintf(job->group, sizeof job->group, "%016" PRIx64, gpt_rng_next(&rng));
    }
    MPI_Bcast(job->group, sizeof job->group, MPI_CHAR, 0, MPI_COMM_WORLD);
    job->ranks = (ckd_ranks_options)CKD_RANKS_OPTIONS_INIT;
    job->ranks.rank = (uint32_t)job->rank;
    job->ranks.world = (uint32_t)job->world;
    job->ranks.group = job->group;
    job->ranks.timeout_ms = (uint32_t)(o->ranks_wait_s * 1000);
    return gpt_session_new(&job->session, &with);
}

int mpi_job_open(mpi_job *job, size_t parameters) {
    const gpt_options *o = job->options;
    if (o->resume) { /* another rank's agent may still store what all ranks resume from */
        gpt_session_await_agent(o->store, o->run);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (open_store(job) || (o->resume && resume(job)) || open_session(job))
        return -1;
    if (job->rank > 0)
        return 0;
    printf("text: %zu bytes, %s; model: %zu parameters; %d rank(s)\n", job->text.size, job->text.source,
           parameters, job->world);
    gpt_resume_report(&job->at, o);
    if (o->losses && !(job->losses = fopen(o->losses, "a"))) {
        fprintf(stderr, "%s: cannot write %s: %s\n", job->program, o->losses, strerror(errno));
        return -1;
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- training */

void mpi_job_batch(mpi_job *job) {
    gpt_text_batch(&job->text, &job->options->model, job->at.progress.seed, job->at.progress.step + 1,
                   job->tokens, job->targets, NULL);
}

static int report_loss(mpi_job *job, double loss, double norm) {
    const gpt_options *o = job->options;
    uint64_t step = job->at.progress.step;
    if (job->losses &&
        (fprintf(job->losses, "%" PRIu64 " %a %.6f\n", step, loss, loss) < 0 || fflush(job->losses) != 0)) {
        fprintf(stderr, "%s: cannot write %s: %s\n", job->program, o->losses, strerror(errno));
        return -1;
    }
    if (job->rank == 0 && o->log_every && step % o->log_every == 0)
        printf("step %" PRIu64 "  loss %.4f  gradient norm %.3f\n", step, loss, norm);
    fflush(stdout);
    return 0;
}

int mpi_job_step(int *stop, mpi_job *job, double loss, double norm) {
    /* a signal reaches the ranks at different steps */
    int asked = mpi_job_max(gpt_session_asked(job->session)), ignored;
    int last = job->at.progress.step == job->options->steps;
    *stop = asked == 2;
    if (!isfinite(loss)) {
        fprintf(stderr, "%s: the loss is not finite; try a smaller --lr\n", job->program);
        return -1;
    }
    if (report_loss(job, loss, norm))
        return -1;
    return gpt_session_step(&ignored, job->session, loss, asked || last);
}

int mpi_job_close(mpi_job *job) {
    gpt_session *session = job->session;
    job->session = NULL;
    return gpt_session_end(session);
}

void mpi_job_end(mpi_job *job, int failed) {
    if (failed) {
        fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }
    ckd_store_close(job->store);
    if (job->losses)
        fclose(job->losses);
    gpt_model_free(job->model);
    gpt_text_free(&job->text);
    gpt_pool_free(job->pool);
    free(job->tokens);
    free(job->targets);
}
