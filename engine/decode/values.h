/*
 * Rebuilding values: reads the blocks that intersect a span, walks each block's chain to its root, decodes the root and
 * applies the deltas on the way back, verifying every block's content hash. Internal to engine/.
 */
#ifndef ENGINE_VALUES_H
#define ENGINE_VALUES_H

#include "codec/entropy/codings.h"
#include "engine/decode/columns_cache.h"
#include "engine/decode/load_plan.h"
#include "engine/decode/values_store.h"
#include "engine/store/view.h"
#include "kernels/kernels.h"

#define MAX_STEPS      4096u /* blocks decoded for one block; a chain has a handful */
#define MAX_SAVE_STEPS 1024u /* the same for the parent of a delta */
#define MAX_DEPTH      256u  /* nesting of blocks */
#define MAX_SAVE_DEPTH 128u

/* A block that optimizer steps were predicted from recently. */
#define CACHED_BLOCKS 8
typedef struct cached_block {
    const record *record; /* NULL: none */
    bytes values;
    uint64_t used;
    uint32_t pins; /* current uses */
} cached_block;

/* Scratch of one worker. */
typedef struct decoder {
    coder *coder;
    const kernels *kernels;
    view_cache *views; /* views of the checkpoints that chains lead to */
    bytes stored;      /* payload as read */
    bytes integers;    /* decoded residuals */
    bytes context;
    lattice_work lattice;
    columns_cache *columns; /* shared by the load or save, or the decoder's own */
    bool own_columns;
    /* lossy blocks waiting for their parent's values; these values need no hash of their own */
    uint32_t lossy_depth;
    bool verify_chain; /* a chain gave wrong values: compare every hash on the way */
    uint32_t steps;    /* blocks decoded for the current top-level block: bounds hostile fan-out */
    uint32_t depth;    /* of the current recursion: bounds circles, and the stack */
    /* MAX_STEPS; a save uses less, so that every load of its blocks stays within the limit */
    uint32_t step_limit;
    uint32_t sharing; /* nested optimizer steps in progress: blocks stay cached meanwhile */
    uint32_t nested;  /* nesting of inputs */
    cached_block cached[CACHED_BLOCKS];
    uint64_t cache_clock;
    values_store *store;      /* the load's; NULL: no store */
    uint32_t filling;         /* smallest depth of the blocks being decoded into it; UINT32_MAX: none */
    const load_plan *plan;    /* of the whole load, or NULL; then the next two decide */
    const view *top;          /* the load's view, or NULL */
    const bool *has_derived;  /* by tensor of `top`: other tensors of the checkpoint are built from it */
    const payloads *payloads; /* payloads in memory; or NULL */
    uint64_t bytes_read;      /* of payloads */
} decoder;
/*
 * Creates a decoder. views: must outlive it; NULL: the caller sets it before the decoder decodes. columns: shared with
 * other workers, must outlive it; NULL: it gets its own.
 */
ckd_status decoder_init(decoder *d, view_cache *views, columns_cache *columns, ckd_error *err);
void decoder_free(decoder *d);

/* Decodes one block of `v` to `to` (raw_size bytes, any alignment). */
ckd_status block_values(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);

/* Memory for the values of a span of a tensor, contiguous. */
typedef struct span_target {
    const view_tensor *tensor;
    const span *want;
    void *to;
} span_target;
/* Copies a block's part of the span from the block's values. Returns the number of elements. */
static inline uint64_t span_target_copy(const span_target *target, const view_block *b, const void *values) {
    const view_tensor *t = target->tensor;
    span have = {b->record->region, b->record->first, b->record->count};
    return span_copy(&t->shape, ckd_dtype_size(t->tensor->dtype), target->to, target->want, values, &have);
}
/* Places one block's part of the span into the target. Adds the number of elements to *copied. */
ckd_status block_into_span(decoder *d, const view *v, const view_block *b, const span_target *target,
                           uint64_t *copied, ckd_error *err);

/*
 * Decodes a span of a tensor to `to`, contiguous. from->content: the content hash, or NULL if the caller does not know
 * it. Errors: CORRUPT (the stored regions do not cover the span, or the hash differs), those of decoding.
 */
ckd_status span_values(decoder *d, const view_source *from, void *to, ckd_error *err);

/* Decodes and verifies a blob or a group (raw_size bytes). */
ckd_status blob_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);
/* The same for a record that many blocks name; a load reads it once. */
ckd_status shared_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);

/* Between these calls, blocks that optimizer steps are predicted from stay cached, a few of them. Calls nest. */
void values_share_begin(decoder *d);
void values_share_end(decoder *d);
/* Copies a cached block's values. Returns false if the block is not cached. */
bool values_cached(decoder *d, const view_block *b, void *to);

/* ---- shared by values.c, values_step.c, values_lattice.c and device/chain.c ---- */
/* Errors: UNSUPPORTED (this version does not know the block's coding or predictor). */
ckd_status values_known(const view_block *b, ckd_error *err);
/* The block's verified payload, valid until the decoder reads the next one. */
ckd_status values_payload(decoder *d, const view_block *b, const void **payload, ckd_error *err);
/*
 * A lossy block's integers, valid until the decoder decodes another block. Shared parts stay until
 * values_lattice_release.
 */
typedef struct lattice_parts {
    lattice_block block;
    cached_columns *columns, *rows; /* NULL: none */
} lattice_parts;
ckd_status values_lattice_read(lattice_parts *out, decoder *d, const view *v, const view_block *b,
                               ckd_error *err);
void values_lattice_release(decoder *d, lattice_parts *p);
/*
 * Decodes a lossy block; `to` holds the parent's values, if it has one. v NULL: a materialized copy, which depends on
 * nothing.
 */
ckd_status values_decode_lattice(decoder *d, const view *v, const view_block *b, bool has_parent, void *to,
                                 ckd_error *err);
/* Decodes one block that another block needs. */
ckd_status values_of_block(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);
/* The same for a block that others may need, too. Uses the load's values_store if the plan says so. */
ckd_status values_of_input(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);
/* Decodes the values that the block is a delta on, copies or rounds, wherever they are. */
ckd_status values_dependency(decoder *d, const view *own, const view_block *b, void *to, ckd_error *err);
/* Predicts an optimizer step into `to`; the caller then applies the residual. */
ckd_status values_predict(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);

#endif
