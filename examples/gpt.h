/*
 * A byte-level GPT trained on the CPU: the real trainer that shows, and tests, what ckptdelta is for.
 *
 * Learned token and position embeddings, pre-LN blocks (causal multi-head attention, GELU MLP), a final LN and an
 * untied head (GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"); fp32; gradients by
 * a hand-written backward pass; AdamW (Loshchilov and Hutter 2019).
 *
 * Everything is deterministic, bit for bit, for any number of threads: work is split into tasks that write disjoint
 * outputs, each sum has one fixed order, and the split does not depend on the number of threads. Only + - * / and sqrt
 * touch the state (exp is a polynomial here), so one x86-64 machine gives the bits of another as well; what libm
 * computes (the schedule's cosine, beta^step, the loss's logarithm) is double precision rounded to float.
 *
 * Functions that can fail return 0, or -1 after a message on stderr. Nothing here is thread-safe from outside: one
 * thread owns a model and its pool. Sizes are elements unless a name says bytes.
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
/* One task of a parallel loop; `worker` is below gpt_pool_threads and picks scratch memory, nothing else. */
typedef void (*gpt_task_fn)(void *context, size_t index, int worker);

/* A pool of `threads` workers, the caller among them. NULL on failure. */
gpt_pool *gpt_pool_new(int threads);
void gpt_pool_free(gpt_pool *pool);
int gpt_pool_threads(const gpt_pool *pool);
/* Runs fn(context, 0 ... count - 1, worker) in any order, on all workers; returns when all are done. */
void gpt_pool_run(gpt_pool *pool, size_t count, gpt_task_fn fn, void *context);

/* ---------------------------------------------------------------------------------------- matrices (gpt_math.c) */

/* A view: element (i, j) is data[i * row_step + j * col_step], so that a transpose is an exchange of steps. */
typedef struct gpt_matrix {
    const float *data;
    size_t row_step, col_step;
} gpt_matrix;

/* c = a b, + bias (of n, to every row; or NULL), + what c held (if add). a is m x k, b is k x n, c rows are contiguous. */
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
/* The same bits, on the calling thread; for use inside a task. */
void gpt_gemm_serial(const gpt_gemm *gemm, float *scratch);
/* x = exp(x), relative error about 1e-7; x is clamped to [-87, 87]. */
void gpt_exp(float *x, size_t count);
/* 64-byte aligned zeroed floats, or NULL. free() releases them. */
float *gpt_floats(size_t count);

/* ------------------------------------------------------------------------------------------- model (gpt_model.c) */

typedef struct gpt_config {
    int width, layers, heads, context, batch;
} gpt_config;

/* One row of the state table: all that a checkpoint has to hold for one parameter tensor. */
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

/* What the forward pass of a block leaves for its backward pass; rows = batch x context. */
typedef struct gpt_block_acts {
    float *ln1, *ln1_stat, *qkv, *att, *atty, *mid, *ln2, *ln2_stat, *fc, *gelu, *out;
} gpt_block_acts;

typedef struct gpt_model {
    gpt_config config;
    gpt_pool *pool; /* the caller's */
    size_t tensor_count;
    gpt_tensor *tensors; /* wte, wpe, blocks ..., ln_f.weight, ln_f.bias, lm_head.weight */
    size_t parameter_count;
    float *state; /* weights, gradients, exp_avg, exp_avg_sq of all tensors */
    float *acts;  /* one allocation behind the pointers below */
    float *embedded, *lnf, *lnf_stat, *logits;
    gpt_block_acts *blocks;
    float *d_out, *d_row, *d_wide, *d_scores; /* gradients on the way back; d_scores: one per worker */
    float *scratch, *worker_scratch;          /* of the matrix products */
    size_t worker_scratch_count;
} gpt_model;

/* Allocates and initialises (N(0, 0.02), residual projections smaller) from `seed`. gpt_model_free takes half-made ones. */
int gpt_model_new(gpt_model **out, const gpt_config *config, gpt_pool *pool, uint64_t seed);
void gpt_model_free(gpt_model *model);
/* Mean cross entropy (nats per byte) of targets[batch * context] given tokens; keeps what gpt_backward needs. */
double gpt_forward(gpt_model *model, const uint8_t *tokens, const uint8_t *targets);
/* Fills every tensor's grad, after gpt_forward with the same tokens and targets. */
void gpt_backward(gpt_model *model, const uint8_t *tokens);

/* ------------------------------------------------------------------------------------------ layers (gpt_layers.c) */

void gpt_embed(const gpt_model *model, const uint8_t *tokens);
void gpt_embed_back(const gpt_model *model, const uint8_t *tokens, const float *d_x);
/* y = normalised x * gain + bias; stat receives mean and reciprocal deviation of each row. */
void gpt_layernorm(gpt_pool *pool, float *y, float *stat, const float *x, const gpt_tensor *gain,
                   const gpt_tensor *bias, size_t rows);
/* d_x = (or +=, if add) gradient of x; the tensors' grads are set. */
void gpt_layernorm_back(gpt_pool *pool, float *d_x, const float *d_y, const float *x, const float *stat,
                        gpt_tensor *gain, gpt_tensor *bias, size_t rows, int add);
void gpt_gelu(gpt_pool *pool, float *y, const float *x, size_t count);
/* d *= gelu'(x) */
void gpt_gelu_back(gpt_pool *pool, float *d, const float *x, size_t count);
/* Mean cross entropy; logits become their gradient. */
double gpt_cross_entropy(const gpt_model *model, const uint8_t *targets);
/* sums[j] = sum of x(i, j) over rows, in order of rows. */
void gpt_column_sums(gpt_pool *pool, float *sums, const float *x, size_t rows, size_t columns);

/* ------------------------------------------------------------------------------------ attention (gpt_attention.c) */

/* qkv -> att (the probabilities), atty; and back: d_atty -> d_qkv. */
void gpt_attention(const gpt_model *model, const gpt_block_acts *acts);
void gpt_attention_back(const gpt_model *model, const gpt_block_acts *acts, const float *d_atty,
                        float *d_qkv);

/* -------------------------------------------------------------------------------------- optimizer (gpt_adamw.c) */

typedef struct gpt_adamw {
    double lr, min_lr; /* min_lr: where the cosine ends */
    double beta1, beta2, eps, weight_decay;
    double clip;     /* bound on the gradient's global L2 norm; 0: none */
    uint64_t warmup; /* steps of linear warm-up */
    uint64_t steps;  /* where the cosine ends */
    int cosine;      /* else constant after the warm-up */
} gpt_adamw;

/* The learning rate of step 1, 2, ... */
double gpt_adamw_rate(const gpt_adamw *options, uint64_t step);
/* Applies one step (the step-th, from 1) with the gradients in place. Returns the gradient norm before clipping. */
double gpt_adamw_step(gpt_model *model, const gpt_adamw *options, uint64_t step);

/* ------------------------------------------------------------------------------------ text and RNG (gpt_data.c) */

/* xoshiro256** (Blackman and Vigna 2018), seeded through splitmix64. */
typedef struct gpt_rng {
    uint64_t s[4];
} gpt_rng;
void gpt_rng_seed(gpt_rng *rng, uint64_t seed, uint64_t stream);
uint64_t gpt_rng_next(gpt_rng *rng);
/* About N(0, 1): the sum of twelve uniforms, which needs no libm. */
float gpt_rng_normal(gpt_rng *rng);

typedef struct gpt_text {
    uint8_t *bytes;
    size_t size;      /* of all */
    size_t train;     /* the first nine tenths; every tenth page lies behind them, for validation */
    uint64_t hash;    /* FNV-1a of all bytes: a resume on another text must not go unseen */
    char source[256]; /* where it came from, for people */
} gpt_text;

/* Reads `path`, or, if NULL, text that is found on the machine (gpt_data.c says where). Needs at least 200 kB. */
int gpt_text_load(gpt_text *out, const char *path);
/* Unless there is such a file, writes the text that would be read without one to it: what is found changes with the machine's packages. */
int gpt_text_keep(const char *path);
void gpt_text_free(gpt_text *text);
/* The batch of a step: windows drawn by a generator that depends on (seed, step) only. rng: its state, before. */
void gpt_text_batch(const gpt_text *text, const gpt_config *config, uint64_t seed, uint64_t step,
                    uint8_t *tokens, uint8_t *targets, gpt_rng *rng);
/* The index-th of `count` validation batches: evenly spaced windows. */
void gpt_text_validation(const gpt_text *text, const gpt_config *config, size_t index, size_t count,
                         uint8_t *tokens, uint8_t *targets);

/* --------------------------------------------------------------------------------- checkpoints (gpt_state.c) */

/* Everything besides the table that training needs to go on as if nothing had happened. */
typedef struct gpt_progress {
    uint64_t step; /* optimizer steps done */
    uint64_t seed;
} gpt_progress;

/* Where to save and where training was resumed from; strings are the caller's. */
typedef struct gpt_lineage {
    const char *run;
    const char *resumed_run; /* NULL: not resumed */
    uint64_t resumed_step;
    int branch; /* the first save of a run that goes on from another run: what it is to be a delta on */
    const struct gpt_adamw *adamw; /* what every step is made with, if every step is saved; else NULL */
} gpt_lineage;

/* Saves one checkpoint; metric (the loss, or NaN) goes into the catalog. */
int gpt_state_save(ckd_store *store, const gpt_lineage *lineage, const gpt_model *model, const gpt_text *text,
                   const gpt_progress *progress, double metric, ckd_checkpoint *info);
/* Fills the model from a checkpoint; refuses another architecture, seed or text. progress->seed is the caller's. */
int gpt_state_load(ckd_store *store, const char *run, uint64_t step, gpt_model *model, const gpt_text *text,
                   gpt_progress *progress);

/* ---- saves while training goes on (gpt_session.c) ---- */
typedef struct gpt_session gpt_session;
typedef struct gpt_background {
    const char *store;
    const gpt_lineage *lineage;
    const gpt_model *model;
    const gpt_text *text;
    const gpt_progress *progress;
    int lazy;
    uint64_t save_every; /* 0: as often as costs no more than `overhead`, a share of the time */
    double overhead;
} gpt_background;
/* What `with` points to must live as long as the session. SIGUSR1 then asks for a save, SIGTERM for one and to stop. */
int gpt_session_new(gpt_session **out, const gpt_background *with);
/* Before the optimizer writes. */
void gpt_session_fence(gpt_session *s);
/* After each step. `last`: saves in any case. *stop: SIGTERM has come. -1 if an earlier save failed, which was told. */
int gpt_session_step(int *stop, gpt_session *s, double loss, int last);
/* Waits for saves, says what they cost, and frees the session; accepts NULL. */
int gpt_session_end(gpt_session *s);

/* Writes every tensor of the state as DIR/<step>/<name>.f32: raw little-endian fp32, for benchmarks. */
int gpt_state_dump(const char *dir, const gpt_model *model, uint64_t step);

#endif
