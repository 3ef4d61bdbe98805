/*
 * bench_quality's parts: states, training runs, coders, chains, results. Everything exits with a message when something fails.
 *
 *   series (train_gpt) -> states -> for each coder: encode -> file -> decode -> ... -> last state -> store -> resume -> losses
 *
 * The same parts in other orders: save -> load -> train -> save ... (quality_resumes.c), and chains of every 2nd, 4th and 8th state
 * (quality_merge.c), and one long chain (quality_drift.c).
 */
#ifndef BENCH_QUALITY_H
#define BENCH_QUALITY_H

#include <ckptdelta.h>
#include <stdio.h>

enum {
    QUALITY_PARTS = 3, /* weight, exp_avg, exp_avg_sq */
    QUALITY_MAX_CODERS = 40,
    QUALITY_MAX_SEEDS = 8,
    QUALITY_MAX_DELTAS = 64,
    QUALITY_MAX_ORDERS = 8,
    QUALITY_MAX_GROUPS = 8,
    QUALITY_MAX_RESUMES = 32,
    QUALITY_MOST_MERGED = 8,  /* saves */
    QUALITY_LEAST_DRIFT = 16, /* deltas of a chain to tell a drift from */
    QUALITY_PATH = 512
};

typedef enum quality_mode {
    QUALITY_TABLE,   /* the coders of the table */
    QUALITY_CURVES,  /* several steps of each */
    QUALITY_RESUMES, /* many lossy resumes in a row */
    QUALITY_MERGE,   /* deltas over several saves */
    QUALITY_DRIFT    /* errors along a long chain */
} quality_mode;

typedef struct quality_options {
    quality_mode mode;
    int resumes;      /* in a row */
    double load_cost; /* of the library's chains that have no bound of their own; 0: the library's default */
    int seeds;
    int start, every, deltas; /* the chain: states at start, start + every, ... */
    int resumed;              /* steps trained on from the last state */
    int orders;               /* batch orders besides the series' own, for the noise */
    int threads;              /* of train_gpt; 0: its default */
    int full;
    int width;
    double beta2;
    const char *only; /* names of coders; NULL: all */
    const char *json, *svg;
} quality_options;

void quality_die(const char *what, const char *why) __attribute__((noreturn));

/* ---- states (quality_state.c) ---- */

typedef struct quality_tensor {
    char name[128];
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    size_t count;
    float *parts[QUALITY_PARTS];
} quality_tensor;

/* Counters and the like: a few bytes that every coder keeps as they are. */
typedef struct quality_small {
    char name[128];
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    size_t size;
    uint8_t data[64];
} quality_small;

typedef struct quality_state {
    uint64_t step;
    size_t count, parameters;
    quality_tensor *tensors;
    size_t small_count;
    quality_small smalls[8];
    char config[256]; /* train_gpt's blob */
    size_t config_size;
} quality_state;

/* Loads a checkpoint; `bytes` (or NULL) becomes what it takes in the store. */
quality_state quality_load(uint64_t *bytes, const char *store, const char *run, uint64_t step);
typedef struct quality_library {
    ckd_fidelity fidelity;
    int effort;           /* 0: the default */
    double max_load_cost; /* 0: the default */
    double step_scale;    /* 0: 1 */
} quality_library;
/*
 * Saves one, as a base of a new run or as a delta on the run's last one; resumed_from: step of the same run from which training was
 * resumed, or NULL. Returns how many lossy resumes the catalog then says are behind it.
 */
uint32_t quality_save(const char *store, const char *run, const quality_state *s, const quality_library *how,
                      int base, const uint64_t *resumed_from);
/* The same tensors, their values NaN: whoever fills it has to fill all of it. */
quality_state quality_blank(const quality_state *like);
int quality_same(const quality_state *a, const quality_state *b);
void quality_free(quality_state *s);

/* ---- training (quality_train.c) ---- */

typedef struct quality_series {
    const quality_options *options;
    int width, seed;
    double beta2;
    char dir[QUALITY_PATH], store[QUALITY_PATH]; /* of the training run "gpt" */
    char work[QUALITY_PATH];                     /* of this process, removed afterwards */
} quality_series;

typedef struct quality_losses {
    double at_load, training,
        after; /* validation loss, mean training loss over the resumed steps, validation loss */
} quality_losses;

/* Means of the losses (the file's second column) of each segment; false: the file has not as many lines. */
int quality_mean_losses(double *means, const char *path, int segments, int steps);
/* The last `count` validation losses that train_gpt printed into a file, in order; false: it has not as many. */
int quality_validation_losses(double *losses, const char *path, int count);
/* Trains it, or goes on where an interruption left it. */
void quality_make_series(quality_series *out, const quality_options *o, int width, double beta2, int seed);
uint64_t quality_last_step(const quality_options *o);
/* Copies of the states that the chain has; release them with quality_free. */
void quality_load_chain(quality_state *states, const quality_series *s);
/*
 * Puts the state into a store as an exact checkpoint and trains on from it, `steps` steps, `segments` times: mean training loss of
 * each segment and validation loss at its end. batch_seed 0: on the series' own batches. end: NULL, or the state at the end, the caller's.
 */
void quality_train_on(double *training, double *after, quality_state *end, const quality_series *s,
                      const char *name, const quality_state *from, int segments, int steps, int batch_seed);
/* The same over the steps to be resumed, once, with the loss at load. */
quality_losses quality_resume(const quality_series *series, const char *name, const quality_state *s,
                              int batch_seed);

/* ---- coders (quality_coders.c) ---- */

/*
 * A way to code a state given the reconstructed previous one (NULL: the first state of a chain, to be coded exactly). encode runs in a
 * process of its own, which ends with it: all that decode can know is what stands in the files of `dir`.
 */
typedef struct quality_coder quality_coder;
struct quality_coder {
    const char *name, *what;
    void (*encode)(const quality_coder *coder, const char *dir, const quality_state *now,
                   const quality_state *before);
    /* Fills `now`, a blank; returns the bytes of this state's files. */
    uint64_t (*decode)(const quality_coder *coder, const char *dir, quality_state *now,
                       const quality_state *before);
    int bit_exact; /* what comes back must be what went in */
    int unsized;   /* its size means nothing */
    quality_library library;
    double alpha, most; /* of ExCP: medians at most */
    const char *curve;  /* it is a point of this rate/gap curve; NULL: of none */
    double knob;        /* times the fidelity's steps, or medians; 0: alpha's */
    int curve_only;
};
extern const quality_coder quality_coders[];
extern const size_t quality_coder_count;

/* The first coder from `from` on that is to be measured (modes of resumes and merges: lossy ones); quality_coder_count: none. */
size_t quality_next(const quality_options *o, size_t from);
/* The coder with o's bound on loads, if it is the library's and has none of its own. */
quality_coder quality_with_load_cost(const quality_coder *coder, const quality_options *o);

/* ---- results (quality_report.c, quality_svg.c) ---- */

typedef struct quality_result {
    double first;                    /* bits per parameter of the first state */
    double bits[QUALITY_MAX_DELTAS]; /* of each delta */
    double moved,
        kept; /* shares of the last state: weights that the delta changes, first moments that are not zero */
    quality_losses losses;
} quality_result;

/* All seeds of one model. */
typedef struct quality_group {
    int width, seeds;
    double beta2;
    size_t parameters;
    quality_result results[QUALITY_MAX_CODERS][QUALITY_MAX_SEEDS];
    quality_losses orders[QUALITY_MAX_ORDERS][QUALITY_MAX_SEEDS]; /* exact resumes on other batches */
} quality_group;

/* Mean and sample deviation over seeds (0 for one). */
typedef struct quality_figure {
    double mean, spread;
} quality_figure;
quality_figure quality_figure_of(const double *values, int count);

typedef struct quality_row {
    quality_figure bits, late_bits, first, at_load, training, after, moved,
        kept; /* losses: minus the exact resume's */
} quality_row;

/* Codes the chain with one coder; the last reconstructed state is the caller's. */
quality_state quality_run_chain(quality_result *r, const quality_coder *coder, const char *dir,
                                const quality_state *states, int count);
quality_row quality_summary(const quality_group *g, int coder, int deltas);
/* Deviation over batch orders of the exact resume, pooled over seeds: only `training` and `after` are set. */
quality_losses quality_noise(const quality_group *g, int orders);
void quality_print(const quality_group *g, const quality_options *o);
void quality_write_json(const quality_group *groups, int count, const quality_options *o);
/* The ratio in the second half of the chain against the gap of the validation loss after the resume. */
void quality_write_svg(const quality_group *groups, int count, const quality_options *o);

/* ---- many resumes, merged deltas, drift (quality_resumes.c, quality_merge.c, quality_drift.c): measured, printed, written to o->json ---- */

void quality_measure_resumes(const quality_options *o);
void quality_measure_merges(const quality_options *o);
void quality_measure_drift(const quality_options *o);

/* What saving every `stride`-th state takes over `span` saves, in bits a parameter: of the deltas there, mean of one and sum of all. */
typedef struct quality_merged {
    double one, sum;
} quality_merged;
quality_merged quality_merge_bits(const double *bits, int stride, int span);

#endif
