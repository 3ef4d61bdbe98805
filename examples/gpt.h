/*
 * A byte-level GPT trained on the CPU: a real trainer that demonstrates and tests ckptdelta.
 *
 * Learned token and position embeddings, pre-LN blocks (causal multi-head attention, GELU MLP), a final LN and an
 * untied head (GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"). fp32, with a
 * hand-written backward pass and AdamW (Loshchilov and Hutter 2019).
 *
 * Everything is deterministic, bit for bit, for any number of threads. Work is split into tasks that write disjoint
 * outputs; each sum has one fixed order; the split does not depend on the number of threads. Only + - * / and sqrt
 * touch the state (exp is a polynomial here), so all x86-64 machines give the same bits. Values from libm (the
 * schedule's cosine, beta^step, the loss's logarithm) are computed in double precision and rounded to float.
 *
 * Functions that can fail return 0, or -1 after a message on stderr. Nothing here is thread-safe: one thread owns a
 * model and its pool. Sizes are elements unless a name says bytes.
 */
#ifndef CKPTDELTA_EXAMPLES_GPT_H
#define CKPTDELTA_EXAMPLES_GPT_H

#include <stddef.h>
#include <stdint.h>

#include "ckptdelta.h"

#define GPT_VOCAB    256 /* a token is a byte */
#define GPT_NAME_MAX 64

/* ---------------------------------------------------------------------------------------- threads (gpt_pool.c) */

typedef struct gpt_pool gpt_pool;
/* One task of a parallel loop. `worker` is below gpt_pool_threads; use it only to choose scratch memory. */
typedef void (*gpt_task_fn)(void *context, size_t index, int worker);

/* Creates a pool of `threads` workers, including the caller. NULL on failure. */
gpt_pool *gpt_pool_new(int threads);
void gpt_pool_free(gpt_pool *pool);
int gpt_pool_threads(const gpt_pool *pool);
/* Runs fn(context, 0 ... count - 1, worker) in any order, on all workers; returns when all are done. */
void gpt_pool_run(gpt_pool *pool, size_t count, gpt_task_fn fn, void *context);

/* ---------------------------------------------------------------------------------------- matrices (gpt_math.c) */

/* A view: element (i, j) is data[i * row_step + j * col_step]. A transpose exchanges the steps. */
typedef struct gpt_matrix {
    const float *data;
    size_t row_step, col_step;
} gpt_matrix;

/*
 * c = a b, plus bias (n elements, added to every row; or NULL), plus the old c (if add). a is m x k, b is k x n; rows
 * of c are contiguous.
 */
typedef struct gpt_gemm {
    size_t m, n, k;
    gpt_matrix a, b;
    float *c;
    size_t c_step;
    const float *bias;
    int add;
} gpt_gemm;

/* Floats of scratch that gpt_gemm_run and gpt_gemm_serial need. */
size_t gpt_gemm_scratch(size_t m, size_t n, size_t k);
void gpt_gemm_run(gpt_pool *pool, const gpt_gemm *gemm, float *scratch);
/* As gpt_gemm_run, with the same bits, on the calling thread; for use inside a task. */
void gpt_gemm_serial(const gpt_gemm *gemm, float *scratch);
/* x = exp(x), relative error about 1e-7; x is clamped to [-87, 87]. */
void gpt_exp(float *x, size_t count);
/* Allocates 64-byte aligned zeroed floats; NULL on failure. Release with free(). */
float *gpt_floats(size_t count);

/* ------------------------------------------------------------------------------------------- model (gpt_model.c) */

typedef struct gpt_config {
    int width, layers, heads, context, batch;
} gpt_config;

/* One row of the state table: everything that a checkpoint must hold for one parameter tensor. */
typedef struct gpt_tensor {
    char name[GPT_NAME_MAX]; /* FQN, e.g. "blocks.0.attn.qkv.weight" */
    uint32_t ndim;
    uint64_t shape[2];
    size_t count;
    float *weight, *grad, *exp_avg, *exp_avg_sq;
} gpt_tensor;

/* Parameters of a block, in the order of the table. */
enum {
    GPT_LN1_W,
    GPT_LN1_B,
    GPT_QKV_W,
    GPT_QKV_B,
    GPT_ATTN_W,
    GPT_ATTN_B,
    GPT_LN2_W,
    GPT_LN2_B,
    GPT_FC_W,
    GPT_FC_B,
    GPT_MLP_W,
    GPT_MLP_B,
    GPT_BLOCK_TENSORS
};

/* Values that a block's forward pass stores for its backward pass; rows = batch x context. */
typedef struct gpt_block_acts {
    float *ln1, *ln1_stat, *qkv, *att, *atty, *mid, *ln2, *ln2_stat, *fc, *gelu, *out;
} gpt_block_acts;

typedef struct gpt_model {
    gpt_config config; /* of the whole model */
    gpt_pool *pool;    /* owned by the caller */
    /* Blocks begin to end - 1: all, or those of a stage. The first stage embeds, the last one has the head. */
    int begin, end;
    int shares; /* tensors and state are another model's */
    size_t tensor_count;
    gpt_tensor
        *tensors; /* wte, wpe, blocks ..., ln_f.weight, ln_f.bias, lm_head.weight: those of the stage */
    size_t parameter_count;
    float *state;                              /* weights, gradients, exp_avg, exp_avg_sq of all tensors */
    float *acts;                               /* one allocation; the pointers below point into it */
    float *embedded, *lnf, *lnf_stat, *logits; /* embedded: what the first block is given */
    gpt_block_acts *blocks;
    float *d_out, *d_row, *d_wide, *d_scores; /* gradients of the backward pass; d_scores: one per worker */
    float *scratch, *worker_scratch;          /* for the matrix products */
    size_t worker_scratch_count;
} gpt_model;

/*
 * Allocates and initialises a model from `seed` (N(0, 0.02), smaller for residual projections). gpt_model_free accepts
 * partly built models.
 */
int gpt_model_new(gpt_model **out, const gpt_config *config, gpt_pool *pool, uint64_t seed);
void gpt_model_free(gpt_model *model);
/* The state of the blocks of one stage of a pipeline, as gpt_model_new would initialise it, without activations. */
int gpt_stage_new(gpt_model **out, const gpt_config *config, int begin, int end, gpt_pool *pool,
                  uint64_t seed);
/* Activations for a micro-batch of `batch` windows. The state is that of `stage`, which must live longer. */
int gpt_stage_acts(gpt_model **out, const gpt_model *stage, int batch);
int gpt_is_first(const gpt_model *model);
int gpt_is_last(const gpt_model *model);
/* The number of the stage's first tensor among those of the whole model. */
size_t gpt_first_tensor(const gpt_model *model);
/* The output of the last block: batch x context x width. */
float *gpt_output(const gpt_model *model);

/*
 * A stage that is not the first one reads `embedded` instead of the tokens. One that is not the last one returns 0, and
 * ignores the targets; gpt_backward then begins with the gradient of its output in d_out. On return d_out is that of
 * `embedded`.
 *
 * Returns the mean cross entropy (nats per byte) of targets[batch * context] given tokens. Stores what gpt_backward
 * needs.
 */
double gpt_forward(gpt_model *model, const uint8_t *tokens, const uint8_t *targets);
/* Computes every tensor's grad. Call it after gpt_forward with the same tokens and targets. */
void gpt_backward(gpt_model *model, const uint8_t *tokens);

/* ------------------------------------------------------------------------------------------ layers (gpt_layers.c) */

void gpt_embed(const gpt_model *model, const uint8_t *tokens);
void gpt_embed_back(const gpt_model *model, const uint8_t *tokens, const float *d_x);
/* y = normalised x * gain + bias; stat receives the mean and the reciprocal deviation of each row. */
void gpt_layernorm(gpt_pool *pool, float *y, float *stat, const float *x, const gpt_tensor *gain,
                   const gpt_tensor *bias, size_t rows);
/* d_x = (or +=, if add) the gradient of x. Also sets the tensors' grads. */
void gpt_layernorm_back(gpt_pool *pool, float *d_x, const float *d_y, const float *x, const float *stat,
                        gpt_tensor *gain, gpt_tensor *bias, size_t rows, int add);
void gpt_gelu(gpt_pool *pool, float *y, const float *x, size_t count);
/* d *= gelu'(x) */
void gpt_gelu_back(gpt_pool *pool, float *d, const float *x, size_t count);
/* Returns the mean cross entropy; logits become their gradient. */
double gpt_cross_entropy(const gpt_model *model, const uint8_t *targets);
/* sums[j] = sum of x(i, j) over rows, in order of rows. */
void gpt_column_sums(gpt_pool *pool, float *sums, const float *x, size_t rows, size_t columns);

/* ------------------------------------------------------------------------------------ attention (gpt_attention.c) */

/* Forward: qkv -> att (the probabilities), atty. Backward: d_atty -> d_qkv. */
void gpt_attention(const gpt_model *model, const gpt_block_acts *acts);
void gpt_attention_back(const gpt_model *model, const gpt_block_acts *acts, const float *d_atty,
                        float *d_qkv);

/* -------------------------------------------------------------------------------------- optimizer (gpt_adamw.c) */

typedef struct gpt_adamw {
    double lr, min_lr; /* min_lr: final value of the cosine */
    double beta1, beta2, eps, weight_decay;
    double clip;     /* limit of the gradient's global L2 norm; 0: none */
    uint64_t warmup; /* steps of linear warm-up */
    uint64_t steps;  /* the cosine ends at this step */
    int cosine;      /* 0: constant after the warm-up */
} gpt_adamw;

/* Returns the learning rate of step 1, 2, ... */
double gpt_adamw_rate(const gpt_adamw *options, uint64_t step);
/* Applies update `step` (counted from 1) with the current gradients. Returns the gradient norm before clipping. */
double gpt_adamw_step(gpt_model *model, const gpt_adamw *options, uint64_t step);
/* The same for a stage: the norm is that of all stages. */
void gpt_adamw_apply(gpt_model *model, const gpt_adamw *options, uint64_t step, double norm);
/* The sum of squares, always in the same order. */
double gpt_sum_of_squares(const float *x, size_t count);

/* ------------------------------------------------------------------------------------ text and RNG (gpt_data.c) */

/* xoshiro256** (Blackman and Vigna 2018), seeded through splitmix64. */
typedef struct gpt_rng {
    uint64_t s[4];
} gpt_rng;
void gpt_rng_seed(gpt_rng *rng, uint64_t seed, uint64_t stream);
uint64_t gpt_rng_next(gpt_rng *rng);
/* Returns about N(0, 1): the sum of twelve uniforms, which needs no libm. */
float gpt_rng_normal(gpt_rng *rng);

typedef struct gpt_text {
    uint8_t *bytes;
    size_t size;      /* of the whole text */
    size_t train;     /* the first nine tenths; every tenth page was moved behind them, for validation */
    uint64_t hash;    /* FNV-1a of all bytes, so that a resume on another text is noticed */
    char source[256]; /* human-readable origin */
} gpt_text;

/* Reads `path`, or, if NULL, text found on the machine (see gpt_data.c). Needs at least 200 kB. */
int gpt_text_load(gpt_text *out, const char *path);
/*
 * If `path` does not exist, writes to it the text found on the machine, since that changes with the installed packages.
 */
int gpt_text_keep(const char *path);
void gpt_text_free(gpt_text *text);
/* Makes the batch of a step. The windows depend on (seed, step) only. rng: the generator's state before the batch. */
void gpt_text_batch(const gpt_text *text, const gpt_config *config, uint64_t seed, uint64_t step,
                    uint8_t *tokens, uint8_t *targets, gpt_rng *rng);
/* Makes validation batch `index` of `count`: evenly spaced windows. */
void gpt_text_validation(const gpt_text *text, const gpt_config *config, size_t index, size_t count,
                         uint8_t *tokens, uint8_t *targets);

/* --------------------------------------------------------------------------------- checkpoints (gpt_state.c) */

/* State besides the table that training needs to continue as if uninterrupted. */
typedef struct gpt_progress {
    uint64_t step; /* completed optimizer steps */
    uint64_t seed;
} gpt_progress;

/* Where to save, and where training resumed from. The caller owns the strings. */
typedef struct gpt_lineage {
    ckd_fidelity fidelity; /* of the saves */
    const char *run;
    const char *resumed_run; /* NULL: not resumed */
    uint64_t resumed_step;
    int branch;  /* the first save of a run that continues another run: its checkpoint becomes the parent */
    int rewound; /* the run has later steps, which were given up: saves of the same steps branch off */
    const struct gpt_adamw *adamw; /* the optimizer of every step, if every step is saved; else NULL */
} gpt_lineage;

/* Saves one checkpoint. The metric (the loss, or NaN) goes into the catalog. */
int gpt_state_save(ckd_store *store, const gpt_lineage *lineage, const gpt_model *model, const gpt_text *text,
                   const gpt_progress *progress, double metric, ckd_checkpoint *info);
/* Loads the model from a checkpoint. Refuses another architecture, seed or text. The caller sets progress->seed. */
int gpt_state_load(ckd_store *store, const char *run, uint64_t step, gpt_model *model, const gpt_text *text,
                   gpt_progress *progress);

/* ---- background saves (gpt_session.c) ---- */
typedef struct gpt_session gpt_session;
typedef struct gpt_background {
    const char *store;
    const gpt_lineage *lineage;
    const gpt_model *model;
    const gpt_text *text;
    const gpt_progress *progress;
    int lazy;
    /* 0: choose the interval so that saves cost at most `overhead`, a share of the time */
    uint64_t save_every;
    double overhead;
    const ckd_ranks_options *ranks; /* NULL: one process */
} gpt_background;
/*
 * Waits until the newest state of a trainer that died is in the store. Opening a session waits for it, too, but these
 * programs look for their checkpoint before they open one.
 */
void gpt_session_await_agent(const char *store, const char *run);
/*
 * Opens a session. The objects that `with` points to must live as long as the session. SIGUSR1 then requests a save;
 * SIGTERM requests a save and a stop.
 */
int gpt_session_new(gpt_session **out, const gpt_background *with);
/* Call it before the optimizer writes. */
void gpt_session_fence(gpt_session *s);
void gpt_session_phase(gpt_session *s, ckd_phase phase);
void gpt_session_poll(ckd_session_state *out, gpt_session *s);
/* Returns what signals asked of this process since its last save: 0, 1 (a save), or 2 (a save and a stop). */
int gpt_session_asked(gpt_session *s);
/*
 * Call it after each step. `last`: always saves. *stop: SIGTERM was received. Returns -1 if an earlier save failed,
 * after a message.
 */
int gpt_session_step(int *stop, gpt_session *s, double loss, int last);
/* Waits for saves, prints their cost, and frees the session. Accepts NULL. */
int gpt_session_end(gpt_session *s);

/* Writes every state tensor as DIR/<step>/<name>.f32: raw little-endian fp32, for benchmarks. */
int gpt_state_dump(const char *dir, const gpt_model *model, uint64_t step);

#endif
