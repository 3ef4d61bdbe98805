/*
 * train_mpi: train_gpt on the ranks of an MPI job. Each rank computes the gradients of its share of the batch; their
 * mean updates the same weights everywhere. All ranks register the whole state, and the library has each tensor written
 * once, by the rank that has the least to write. Any number of ranks can go on from a checkpoint.
 *
 *     mpirun -n 4 train_mpi --store ckpts --save-every 10 --resume [options of train_gpt]
 *
 * The same number of ranks gives the same bits, interrupted and resumed or not. The ranks meet for saves through the
 * store's directory, so no thread but this one calls MPI.
 */
#include <math.h>
#include <mpi.h>
#include <stdlib.h>

#include "examples/mpi_job.h"

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

static int set_up(mpi_job *job, const gpt_options *o) {
    if (mpi_job_begin(job, "train_mpi", o))
        return -1;
    if (o->model.batch % job->world != 0) {
        if (job->rank == 0)
            fprintf(stderr, "train_mpi: --batch must be a multiple of the number of ranks\n");
        return -1;
    }
    if (gpt_model_new(&job->model, &o->model, job->pool, o->seed))
        return -1;
    return mpi_job_open(job, job->model->parameter_count);
}

/* The mean loss of the batch. The gradients are those of the whole batch afterwards. */
static double forward_backward(mpi_job *job) {
    gpt_config *c = &job->model->config;
    int share = c->batch / job->world;
    size_t first = (size_t)job->rank * (size_t)share * (size_t)c->context;
    mpi_job_batch(job);
    c->batch = share; /* checkpoints say the batch of all ranks, so the model has that one otherwise */
    double loss = gpt_forward(job->model, job->tokens + first, job->targets + first);
    gpt_backward(job->model, job->tokens + first);
    c->batch = job->options->model.batch;
    mean_of_ranks(job->model->tensors[0].grad, job->model->parameter_count, job->world);
    return sum_of_ranks(loss) / job->world;
}

static int train(mpi_job *job) {
    const gpt_options *o = job->options;
    int stop = 0;
    while (job->at.progress.step < o->steps && !stop) {
        double loss = forward_backward(job);
        gpt_session_fence(job->session);
        double norm = gpt_adamw_step(job->model, &o->adamw, ++job->at.progress.step);
        gpt_fault_spoil(job->model, o, job->at.progress.step);
        if (mpi_job_step(&stop, job, loss, norm))
            return -1;
    }
    return mpi_job_close(job);
}

int main(int argc, char **argv) {
    int threads;
    gpt_options options;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &threads);
    gpt_options_parse(&options, argc, argv);
    mpi_job job;
    mpi_job_end(&job, set_up(&job, &options) || train(&job));
    MPI_Finalize();
    return EXIT_SUCCESS;
}
