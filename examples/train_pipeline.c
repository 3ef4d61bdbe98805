/*
 * train_pipeline: train_gpt as a pipeline over the ranks of an MPI job. Each rank has a stage, some blocks of the
 * model, and registers only the state of these. A batch goes through the stages in micro-batches, in the order 1F1B
 * (Narayanan et al., "PipeDream", SOSP 2019, section 3.2; flushed after each step). A stage runs as many forward passes
 * ahead as there are stages behind it, and then one backward pass for each forward pass.
 *
 *     mpirun -n 4 train_pipeline --store ckpts --save-every 10 --background lazy --resume [options of train_gpt]
 *
 * A stage waits while a pipeline fills and drains: its bubbles. ckd_session_phase says so. With --background lazy the
 * library then makes its copies, encodes and writes there, and leaves the processor to the stage otherwise.
 *
 * Any number of stages gives the same bits, interrupted and resumed or not, and can go on from a checkpoint.
 */
#include <math.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples/mpi_job.h"

/* Activations of a micro-batch on its way through the stage, and what is being sent of them. */
typedef struct flight {
    gpt_model *acts;
    MPI_Request forward, backward;
} flight;

typedef struct stage {
    mpi_job job;
    int micro_batches, windows; /* of a micro-batch */
    flight *flights;
    int flight_count;
    float *sum;      /* of the micro-batches' gradients */
    double *squares; /* of each tensor of the whole model */
    size_t tensor_count;
    double loss;     /* of the batch so far; last stage only */
    double waited_s; /* for other stages */
    double begun_s;
} stage;

/* ------------------------------------------------------------------------------------------------------- setup */

static int make_flights(stage *s) {
    int behind = s->job.world - s->job.rank;
    s->flight_count = behind < s->micro_batches ? behind : s->micro_batches;
    s->flights = calloc((size_t)s->flight_count, sizeof *s->flights);
    if (!s->flights)
        return -1;
    for (int i = 0; i < s->flight_count; i++) {
        s->flights[i].forward = s->flights[i].backward = MPI_REQUEST_NULL;
        if (gpt_stage_acts(&s->flights[i].acts, s->job.model, s->windows))
            return -1;
    }
    return 0;
}

static int set_up(stage *s, const gpt_options *o) {
    mpi_job *job = &s->job;
    if (mpi_job_begin(job, "train_pipeline", o))
        return -1;
    s->micro_batches = o->micro_batches;
    s->windows = o->model.batch / o->micro_batches;
    if (o->model.batch % o->micro_batches != 0 || job->world > o->model.layers) {
        if (job->rank == 0)
            fprintf(stderr, "train_pipeline: %s\n",
                    job->world > o->model.layers ? "there are more ranks than --layers"
                                                 : "--batch must be a multiple of --micro-batches");
        return -1;
    }
    int begin = job->rank * o->model.layers / job->world,
        end = (job->rank + 1) * o->model.layers / job->world;
    if (gpt_stage_new(&job->model, &o->model, begin, end, job->pool, o->seed) || make_flights(s))
        return -1;
    uint64_t tensors = gpt_first_tensor(job->model) + job->model->tensor_count,
             parameters = job->model->parameter_count;
    MPI_Bcast(&tensors, 1, MPI_UINT64_T, job->world - 1, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &parameters, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    s->tensor_count = (size_t)tensors;
    s->sum = gpt_floats(job->model->parameter_count);
    s->squares = calloc(s->tensor_count, sizeof *s->squares);
    if (!s->sum || !s->squares) {
        fprintf(stderr, "train_pipeline: out of memory\n");
        return -1;
    }
    return mpi_job_open(job, (size_t)parameters);
}

static void release(stage *s) {
    for (int i = 0; i < s->flight_count; i++)
        gpt_model_free(s->flights[i].acts);
    free(s->flights);
    free(s->sum);
    free(s->squares);
}

/* ------------------------------------------------------------------------------------------------------ waiting */

static void say(stage *s, ckd_phase phase) {
    if (!s->job.options->no_phases)
        gpt_session_phase(s->job.session, phase);
}

/* Waits for another stage. MPI_Wait would keep the processor busy, and leave none of the bubble to the library. */
static void await(stage *s, MPI_Request *request) {
    int done;
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (done)
        return;
    double begun = MPI_Wtime();
    say(s, CKD_PHASE_IDLE);
    while (!done) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
    }
    say(s, CKD_PHASE_BUSY);
    s->waited_s += MPI_Wtime() - begun;
}

static void receive(stage *s, float *values, int from, int tag) {
    MPI_Request request;
    int count = s->windows * s->job.options->model.context * s->job.options->model.width;
    MPI_Irecv(values, count, MPI_FLOAT, from, tag, MPI_COMM_WORLD, &request);
    await(s, &request);
}

static void send(stage *s, const float *values, int to, int tag, MPI_Request *request) {
    int count = s->windows * s->job.options->model.context * s->job.options->model.width;
    MPI_Isend(values, count, MPI_FLOAT, to, tag, MPI_COMM_WORLD, request);
}

/* ----------------------------------------------------------------------------------------------------- schedule */

static flight *flight_of(const stage *s, int micro) {
    return &s->flights[micro % s->flight_count];
}

static size_t first_token(const stage *s, int micro) {
    return (size_t)micro * (size_t)s->windows * (size_t)s->job.options->model.context;
}

static void forward(stage *s, int micro) {
    flight *f = flight_of(s, micro);
    size_t first = first_token(s, micro);
    await(s, &f->forward); /* of the micro-batch that had this memory before */
    if (!gpt_is_first(f->acts))
        receive(s, f->acts->embedded, s->job.rank - 1, 2 * micro);
    s->loss += gpt_forward(f->acts, s->job.tokens + first, s->job.targets + first);
    if (!gpt_is_last(f->acts))
        send(s, gpt_output(f->acts), s->job.rank + 1, 2 * micro, &f->forward);
}

static void backward(stage *s, int micro) {
    flight *f = flight_of(s, micro);
    await(s, &f->backward);
    if (!gpt_is_last(f->acts))
        receive(s, f->acts->d_out, s->job.rank + 1, 2 * micro + 1);
    gpt_backward(f->acts, s->job.tokens + first_token(s, micro));
    const float *grad = f->acts->tensors[0].grad;
    for (size_t i = 0; i < f->acts->parameter_count; i++)
        s->sum[i] += grad[i];
    if (!gpt_is_first(f->acts))
        send(s, f->acts->d_out, s->job.rank - 1, 2 * micro + 1, &f->backward);
}

static void run_schedule(stage *s) {
    int ahead = s->flight_count - 1;
    mpi_job_batch(&s->job);
    memset(s->sum, 0, s->job.model->parameter_count * sizeof *s->sum);
    s->loss = 0;
    for (int i = 0; i < ahead; i++)
        forward(s, i);
    for (int i = ahead; i < s->micro_batches; i++) {
        forward(s, i);
        backward(s, i - ahead);
    }
    for (int i = s->micro_batches - ahead; i < s->micro_batches; i++)
        backward(s, i);
    for (int i = 0; i < s->flight_count; i++) {
        await(s, &s->flights[i].forward);
        await(s, &s->flights[i].backward);
    }
}

/* Sets the stage's gradients and returns the norm of all stages': the same bits however many there are. */
static double finish_gradients(stage *s) {
    const gpt_model *model = s->job.model;
    float *grad = model->tensors[0].grad;
    for (size_t i = 0; i < model->parameter_count; i++)
        grad[i] = s->sum[i] / (float)s->micro_batches;
    memset(s->squares, 0, s->tensor_count * sizeof *s->squares);
    for (size_t i = 0; i < model->tensor_count; i++)
        s->squares[gpt_first_tensor(model) + i] =
            gpt_sum_of_squares(model->tensors[i].grad, model->tensors[i].count);
    MPI_Request request;
    /* each is 0 on all ranks but one */
    MPI_Iallreduce(MPI_IN_PLACE, s->squares, (int)s->tensor_count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD,
                   &request);
    await(s, &request);
    double total = 0;
    for (size_t i = 0; i < s->tensor_count; i++)
        total += s->squares[i];
    return sqrt(total);
}

/* ----------------------------------------------------------------------------------------------------- training */

/* For each stage: how much of the time it waited for others, and how long it stood still for saves. */
static void report(stage *s) {
    enum { FIGURES = 3, STAGES_MAX = 100 }; /* each has a layer */
    ckd_session_state state;
    gpt_session_poll(&state, s->job.session);
    double own[FIGURES] = {s->waited_s, MPI_Wtime() - s->begun_s, (double)state.stall_ns / 1e9};
    double all[FIGURES * STAGES_MAX];
    MPI_Gather(own, FIGURES, MPI_DOUBLE, all, FIGURES, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    for (int i = 0; s->job.rank == 0 && i < s->job.world; i++) {
        const double *of = all + (size_t)i * FIGURES;
        printf("stage %d: %.3f s, of which %.1f %% in bubbles; stood still for saves for %.2f ms\n", i, of[1],
               100 * of[0] / of[1], 1e3 * of[2]);
    }
}

static int train(stage *s) {
    mpi_job *job = &s->job;
    const gpt_options *o = job->options;
    int stop = 0;
    s->begun_s = MPI_Wtime();
    say(s, CKD_PHASE_BUSY);
    while (job->at.progress.step < o->steps && !stop) {
        run_schedule(s);
        double norm = finish_gradients(s), loss = s->loss / s->micro_batches;
        MPI_Bcast(&loss, 1, MPI_DOUBLE, job->world - 1, MPI_COMM_WORLD);
        gpt_session_fence(job->session);
        gpt_adamw adamw = gpt_fault_adamw(o, ++job->at.progress.step, job->rank);
        gpt_adamw_apply(job->model, &adamw, job->at.progress.step, norm);
        if (mpi_job_step(&stop, job, loss, norm))
            return -1;
    }
    report(s);
    return mpi_job_close(job);
}

int main(int argc, char **argv) {
    int threads;
    gpt_options options;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &threads);
    gpt_options_parse(&options, argc, argv);
    stage s = {.flights = NULL};
    int failed = set_up(&s, &options) || train(&s);
    mpi_job_end(&s.job, failed);
    release(&s);
    MPI_Finalize();
    return EXIT_SUCCESS;
}
