/*
 * bench_quality's parts: states, training runs, coders, chains, results. Functions exit with a message when something
 * fails.
 *
 *   series (train_gpt) -> states -> for each coder: encode -> file -> decode -> ... -> last state -> store -> resume -> losses -> steps lost
 *
 * Other modes use the same parts in other orders: save -> load -> train -> save ... (resumes.c), chains of every 2nd,
 * 4th and 8th state (merge.c), and one long chain (drift.c).
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
    QUALITY_EVALS = 5,      /* validation losses of a resume, evenly spaced */
    QUALITY_LATE_EVALS = 3, /* the last of them, in the second half: they count */
    QUALITY_MAX_CURVE = 256,
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
    int resumed;              /* steps trained on from the last state; a multiple of QUALITY_EVALS */
    int eval_batches;         /* of a validation loss */
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
    ckd_fidelity moments; /* of first moments; 0: `fidelity` */
} quality_library;
/*
 * Saves a state as a base of a new run, or as a delta on the last state of the run. resumed_from: the step of the same
 * run from which training was resumed, or NULL. Returns the number of lossy resumes behind it, from the catalog.
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
    char dir[QUALITY_PATH], store[QUALITY_PATH];
    char run[64];            /* has the states of the chain */
    uint64_t spine;          /* last step of the run "gpt"; another run begins there */
    char work[QUALITY_PATH]; /* of this process, removed afterwards */
} quality_series;

typedef struct quality_losses {
    double at_load;  /* validation loss */
    double training; /* mean over the resumed steps */
    double after;    /* validation loss: mean of the late evaluations */
} quality_losses;

/* Means of the losses (the file's second column) of each segment; false: the file has another number of lines. */
int quality_mean_losses(double *means, const char *path, int segments, int steps);
/* The last `count` validation losses that train_gpt printed into a file, in order; false: there are fewer. */
int quality_validation_losses(double *losses, const char *path, int count);
/*
 * Trains the states of the chain, or continues after an interruption. Series that differ in the chain only share a
 * store. Its run "gpt" has a state every hundred steps. States less far apart are made from one of these, which gives
 * the same bits.
 */
void quality_make_series(quality_series *out, const quality_options *o, int width, double beta2, int seed);
uint64_t quality_last_step(const quality_options *o);
quality_state quality_load_step(const quality_series *s, uint64_t step);
/* The newest step up to this one that the series has; its first if there is none. */
uint64_t quality_state_before(const quality_series *s, uint64_t step);
/* Loads the states of the chain; release them with quality_free. */
void quality_load_chain(quality_state *states, const quality_series *s);
/*
 * Saves the state as an exact checkpoint and trains on from it for `segments` times `steps` steps: mean training loss
 * of each segment, and validation loss at its end. batch_seed 0: on the batches of the series. end: NULL, or becomes
 * the last state, the caller's.
 */
void quality_train_on(double *training, double *after, quality_state *end, const quality_series *s,
                      const char *name, const quality_state *from, int segments, int steps, int batch_seed);
/* The same for the steps of one resume, with the loss at load, and with late evaluations. */
quality_losses quality_resume(const quality_series *series, const char *name, const quality_state *s,
                              int batch_seed);

/* ---- the curve of validation loss (slope.c) ---- */

/* Median of the slopes of all pairs of points: one that single losses, which fluctuate, hardly change. */
double quality_robust_slope(const double *x, const double *y, int count);
/*
 * Fall of the exact run's validation loss in one step, around `step`. A gap divided by it is the number of steps lost:
 * how many steps earlier the exact run had that loss. The curve stays in the series' folder. Exits if the loss does not
 * fall.
 */
double quality_fall(const quality_series *s, uint64_t step);
/* The middle of the late evaluations after a resume from the last state. */
uint64_t quality_judged_step(const quality_options *o);

/* ---- coders (coders.c) ---- */

/*
 * A way to code a state given the reconstructed previous one (NULL: the first state of a chain, to be coded exactly).
 * encode runs in a process of its own, so that decode knows only the files of `dir`.
 */
typedef struct quality_coder quality_coder;
/*
 * The weights to resume from, other than the decoded ones. Their error has a part along the difference between the true
 * weights and the decoded ones of the parent: they lag behind. The rest of the error points elsewhere.
 */
typedef enum quality_mix {
    QUALITY_DECODED,
    QUALITY_LAG,   /* exact but for the lag */
    QUALITY_REST,  /* exact but for the rest */
    QUALITY_SCALED /* the delta is scaled up until nothing lags */
} quality_mix;
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
    quality_mix mix;    /* of the weights to resume from */
    unsigned lossy;     /* bits of the parts that are lossy in the state to resume from; 0: all */
    double alpha, most; /* of ExCP: medians at most */
    const char *curve;  /* the rate/gap curve that it is a point of; NULL: none */
    double knob;        /* times the fidelity's steps, or medians; 0: alpha's */
    int curve_only;
    int named_only; /* measured only if --only names it */
};
extern const quality_coder quality_coders[];
extern const size_t quality_coder_count;

/*
 * The first coder from `from` on that the mode measures; quality_coder_count: none. Resumes, merges and drift measure
 * lossy ones.
 */
size_t quality_next(const quality_options *o, size_t from);
/* The coder with the options' bound on loads, if it is the library and has no bound of its own. */
quality_coder quality_with_load_cost(const quality_coder *coder, const quality_options *o);

/* ---- results (report.c, svg.c) ---- */

typedef struct quality_result {
    double first;                    /* bits per parameter of the first state */
    double bits[QUALITY_MAX_DELTAS]; /* of each delta */
    double moved,
        kept; /* shares of the last state: weights that the delta changes, first moments that are not zero */
    double lag; /* share of the weights' way since the decoded parent that is left out; of the last state */
    quality_losses losses;
} quality_result;

/* All seeds of one model. */
typedef struct quality_group {
    int width, seeds;
    double beta2;
    size_t parameters;
    quality_result results[QUALITY_MAX_CODERS][QUALITY_MAX_SEEDS];
    quality_losses orders[QUALITY_MAX_ORDERS][QUALITY_MAX_SEEDS]; /* exact resumes on other batches */
    double fall[QUALITY_MAX_SEEDS];                               /* of validation loss in one step */
} quality_group;

/* Mean and sample deviation over seeds (0 for one). */
typedef struct quality_figure {
    double mean, spread;
} quality_figure;
quality_figure quality_figure_of(const double *values, int count);

typedef struct quality_row {
    quality_figure bits, late_bits, first, at_load, training, after, moved,
        kept;             /* losses: minus the exact resume's */
    quality_figure steps; /* lost */
    quality_figure lag;
} quality_row;

/*
 * Codes a chain of `count` states with one coder. The last two reconstructed states are the caller's; parent NULL: only
 * the last one is.
 */
quality_state quality_run_chain(quality_result *r, quality_state *parent, const quality_coder *coder,
                                const char *dir, const quality_state *states, int count);
/* The same in a folder of the series' own, with the losses after a resume from the last state. */
void quality_measure_coder(quality_result *r, const quality_coder *coder, const quality_series *series,
                           const quality_state *states, int count);
/* Makes parts exact, except for those whose bits are set in `lossy`; 0: changes nothing. */
void quality_restore(quality_state *s, const quality_state *exact, unsigned lossy);
/* The share of the way from the parent to the exact weights that decoded ones leave out. parent: decoded, too. */
double quality_lag(const quality_state *s, const quality_state *exact, const quality_state *parent);
/* Changes decoded weights. */
void quality_mix_weights(quality_state *s, const quality_state *exact, const quality_state *parent,
                         quality_mix mix);
quality_row quality_summary(const quality_group *g, int coder, int deltas);
/* Deviation over batch orders of the exact resume, pooled over seeds: only `training` and `after` are set. */
quality_losses quality_noise(const quality_group *g, int orders);
void quality_print(const quality_group *g, const quality_options *o);
void quality_write_json(const quality_group *groups, int count, const quality_options *o);
/* The ratio in the second half of the chain against the steps lost. */
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
