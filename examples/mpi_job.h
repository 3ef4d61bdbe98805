/*
 * train_mpi and train_pipeline share this: the ranks of an MPI job, the text, and a session in which all ranks save
 * together. Functions that can fail return 0, or -1 after a message on stderr.
 */
#ifndef CKPTDELTA_EXAMPLES_MPI_JOB_H
#define CKPTDELTA_EXAMPLES_MPI_JOB_H

#include <stdio.h>

#include "examples/gpt_options.h"

typedef struct mpi_job {
    const char *program; /* for messages */
    const gpt_options *options;
    int rank, world;
    gpt_pool *pool;
    gpt_model *model; /* whose state this rank registers; the trainer makes it */
    gpt_text text;
    uint8_t *tokens, *targets; /* of the whole batch */
    char group[32];
    ckd_ranks_options ranks;
    ckd_store *store; /* for resuming; the session opens its own */
    gpt_session *session;
    FILE *losses; /* rank 0 only */
    gpt_position at;
} mpi_job;

/* The greatest value of all ranks. */
int mpi_job_max(int value);
/* Makes everything but the model. */
int mpi_job_begin(mpi_job *job, const char *program, const gpt_options *options);
/* Resumes if the options say so, and opens the session. parameters: of the whole model. */
int mpi_job_open(mpi_job *job, size_t parameters);
/* Makes the batch of the next step. */
void mpi_job_batch(mpi_job *job);
/*
 * After a step: writes its loss, and saves if a save is due. *stop: some rank was asked to stop. Refuses a loss that is
 * not finite.
 */
int mpi_job_step(int *stop, mpi_job *job, double loss, double norm);
/* Waits for saves. */
int mpi_job_close(mpi_job *job);
/* Ends the whole job if it has failed: other ranks may wait for this one. */
void mpi_job_end(mpi_job *job, int failed);

#endif
