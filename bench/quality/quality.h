/*
 * bench_quality's parts: states, training runs, coders, chains, results. Functions exit with a message when something fails.
 *
 *   series (train_gpt) -> states -> for each coder: encode -> file -> decode -> ... -> last state -> store -> resume -> losses
 *
 * Other modes use the same parts in other orders: save -> load -> train -> save ... (resumes.c), chains of every 2nd, 4th and 8th state
 * (merge.c), and one long chain (drift.c).
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
    QUALITY_MAX_MERGED = 8, /* saves */
    QUALITY_MIN_DRIFT = 16, /* deltas of a chain that can show a drift */
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
    int resumes; /* in a row */
    double
        load_cost; /* bound on loads of the library's chains without a bound of their own; 0: the default */
    int seeds;
    int start, every, deltas; /* the chain: states at start, start + every, ... */
    int resumed;              /* steps trained on from the last state */
    int orders;               /* batch orders besides that of the series, for the noise */
    int threads;              /* of train_gpt; 0: its default */
    int full;
    int width;
    double beta2;
    const char *only; /* names of coders; NULL: all */
    const char *json, *svg;
} quality_options;

/* ---- states (state.c) ---- */

typedef struct quality_tensor {
    char name[128];
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    size_t count;
    float *parts[QUALITY_PARTS];
} quality_tensor;

/* A few bytes, such as counters, that every coder keeps. */
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

/* Loads a checkpoint; `bytes` (or NULL) becomes its stored size. */
quality_state quality_load(uint64_t *bytes, const char *store, const char *run, uint64_t step);
typedef struct quality_library {
    ckd_fidelity fidelity;
    int effort;           /* 0: the default */
    double max_load_cost; /* 0: the default */
    double step_scale;    /* 0: 1 */
} quality_library;
/*
 * Saves a state as a base of a new run, or as a delta on the last state of the run. resumed_from: the step of the same run from which
 * training was resumed, or NULL. Returns the number of lossy resumes behind it, from the catalog.
 */
uint32_t quality_save(const char *store, const char *run, const quality_state *s, const quality_library *how,
                      int base, const uint64_t *resumed_from);
/* The same tensors with NaN values, so that values which a decoder leaves out are found. */
quality_state quality_blank(const quality_state *like);
int quality_same(const quality_state *a, const quality_state *b);
void quality_free(quality_state *s);

/* ---- training (train.c) ---- */

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

/* Means of the losses (the file's second column) of each segment; false: the file has another number of lines. */
int quality_mean_losses(double *means, const char *path, int segments, int steps);
/* The last `count` validation losses that train_gpt printed into a file, in order; false: there are fewer. */
int quality_validation_losses(double *losses, const char *path, int count);
/* Trains it, or continues after an interruption. */
void quality_make_series(quality_series *out, const quality_options *o, int width, double beta2, int seed);
uint64_t quality_last_step(const quality_options *o);
/* Loads the states of the chain; release them with quality_free. */
void quality_load_chain(quality_state *states, const quality_series *s);
/*
 * Saves the state as an exact checkpoint and trains on from it for `segments` times `steps` steps: mean training loss of each segment,
 * and validation loss at its end. batch_seed 0: on the batches of the series. end: NULL, or becomes the last state, the caller's.
 */
void quality_train_on(double *training, double *after, quality_state *end, const quality_series *s,
                      const char *name, const quality_state *from, int segments, int steps, int batch_seed);
/* The same for the steps of one resume, with the loss at load. */
quality_losses quality_resume(const quality_series *series, const char *name, const quality_state *s,
                              int batch_seed);

/* ---- coders (coders.c) ---- */

/*
 * A way to code a state given the reconstructed previous one (NULL: the first state of a chain, to be coded exactly). encode runs in a
 * process of its own, so that decode knows only the files of `dir`.
 */
typedef struct quality_coder quality_coder;
struct quality_coder {
    const char *name, *what;
    void (*encode)(const quality_coder *coder, const char *dir, const quality_state *now,
                   const quality_state *before);
    /* Fills `now`, a blank; returns the bytes of this state's files. */
    uint64_t (*decode)(const quality_coder *coder, const char *dir, quality_state *now,
                       const quality_state *before);
    int bit_exact; /* decoded states must be equal to the encoded ones */
    int unsized;   /* its size means nothing */
    quality_library library;
    double alpha, most; /* of ExCP: medians at most */
    const char *curve;  /* the rate/gap curve that it is a point of; NULL: none */
    double knob;        /* times the fidelity's steps, or medians; 0: alpha's */
    int curve_only;
};
extern const quality_coder quality_coders[];
extern const size_t quality_coder_count;

/* The first coder from `from` on that the mode measures; quality_coder_count: none. Resumes, merges and drift measure lossy ones. */
size_t quality_next(const quality_options *o, size_t from);
/* The coder with the options' bound on loads, if it is the library and has no bound of its own. */
quality_coder quality_with_load_cost(const quality_coder *coder, const quality_options *o);

/* ---- results (report.c, svg.c) ---- */

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

/* Codes a chain of `count` states with one coder; the last reconstructed state is the caller's. */
/* The same in a folder of the series' own, with the losses after a resume from the last state. */
void quality_measure_coder(quality_result *r, const quality_coder *coder, const quality_series *series,
                           const quality_state *states, int count);
quality_state quality_run_chain(quality_result *r, const quality_coder *coder, const char *dir,
                                const quality_state *states, int count);
quality_row quality_summary(const quality_group *g, int coder, int deltas);
/* Deviation over batch orders of the exact resume, pooled over seeds: only `training` and `after` are set. */
quality_losses quality_noise(const quality_group *g, int orders);
void quality_print(const quality_group *g, const quality_options *o);
void quality_write_json(const quality_group *groups, int count, const quality_options *o);
/* The ratio in the second half of the chain against the gap of the validation loss after the resume. */
void quality_write_svg(const quality_group *groups, int count, const quality_options *o);

/* ---- many resumes, merged deltas, drift (resumes.c, merge.c, drift.c): measured, printed, written to o->json ---- */

void quality_measure_resumes(const quality_options *o);
void quality_measure_merges(const quality_options *o);
void quality_measure_drift(const quality_options *o);

/* Bits a parameter of saving every `stride`-th state over `span` saves: mean and sum of the deltas. */
typedef struct quality_merged {
    double one, sum;
} quality_merged;
quality_merged quality_merge_bits(const double *bits, int stride, int span);

#endif
