/* The options of train_gpt, train_mpi and train_pipeline. Strings point into argv or the environment. */
#ifndef CKPTDELTA_EXAMPLES_GPT_OPTIONS_H
#define CKPTDELTA_EXAMPLES_GPT_OPTIONS_H

#include "examples/gpt.h"

enum { GPT_DUMP_STEPS_MAX = 64, GPT_EVAL_BATCHES_MAX = 4096 };

/* From a step on, or in it, training does not work as it should (gpt_fault.c). */
typedef enum gpt_fault_kind {
    GPT_FAULT_NONE,
    GPT_FAULT_SPIKE,  /* the learning rate of the step is 100 times as high */
    GPT_FAULT_FREEZE, /* the weights are not updated any more */
    GPT_FAULT_STUCK,  /* only those of rank 1 are not */
    GPT_FAULT_NAN,    /* a weight becomes NaN */
    GPT_FAULT_ZERO    /* a matrix of weights becomes zeros */
} gpt_fault_kind;
typedef struct gpt_fault {
    gpt_fault_kind kind;
    uint64_t step;
} gpt_fault;

typedef struct gpt_options {
    gpt_config model;
    gpt_adamw adamw;
    uint64_t steps, seed;
    int reseed; /* after a resume, batches come from batch_seed, and saves record that */
    uint64_t batch_seed;
    int threads; /* 0: one per core */
    const char *text;
    int keep_text;                  /* write it first if it does not exist */
    uint64_t log_every, eval_every; /* eval_every 0: at the end only */
    size_t eval_batches;            /* of one validation loss */
    int micro_batches;              /* of train_pipeline */
    int no_phases;                  /* train_pipeline does not say when it is idle */
    const char *losses;             /* file for every step's loss; NULL: none */
    const char *store, *run;
    uint64_t save_every; /* 0: at the end only */
    ckd_fidelity fidelity;
    const char *background; /* "copy" or "lazy"; NULL: training waits for saves */
    /* with background and save_every 0: a share of the time; 0: the library's default */
    double overhead;
    uint64_t ranks_wait_s;  /* of ranks for each other; 0: the library's default */
    int resume;             /* from resume_run at resume_step */
    const char *resume_run; /* NULL: same as run */
    uint64_t resume_step;   /* CKD_LATEST: the newest */
    gpt_fault fault;        /* train_mpi has nan and zero only */
    const char *dump;       /* directory of raw tensors; NULL: none */
    uint64_t dump_steps[GPT_DUMP_STEPS_MAX];
    size_t dump_step_count; /* 0: dump at every save_every steps */
} gpt_options;

/* Parses the options. Invalid options end the process with a message (this belongs to a program, not to a library). */
void gpt_options_parse(gpt_options *out, int argc, char **argv);

/* Parses KIND@STEP. Returns -1 if that is none. */
int gpt_fault_parse(gpt_fault *out, const char *text);
/* The optimizer of a step, and what happens to the weights after it. */
gpt_adamw gpt_fault_adamw(const gpt_options *options, uint64_t step, int rank);
void gpt_fault_spoil(gpt_model *model, const gpt_options *options, uint64_t step);

/* Where a training is, and where it came from. */
typedef struct gpt_position {
    gpt_progress progress;
    gpt_lineage lineage;
    char run[CKD_RUN_MAX + 1]; /* storage for lineage.run, if it is not the run of the options */
} gpt_position;
/*
 * Loads the checkpoint to go on from (gpt_resume.c): the one that `ckptdelta run` has chosen, or the options name, or
 * the newest. Without any, training starts from scratch, so the same command line works for every restart.
 */
int gpt_resume(gpt_position *at, ckd_store *store, const gpt_options *options, gpt_model *model,
               const gpt_text *text);
/* Prints what gpt_resume found. */
void gpt_resume_report(const gpt_position *at, const gpt_options *options);

#endif
