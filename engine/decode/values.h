/*
 * Rebuilding values: reads the blocks that intersect a span, walks each block's chain to its root, decodes the root and
 * applies the deltas on the way back, verifying every block's content hash. Internal to engine/.
 */
#ifndef ENGINE_VALUES_H
#define ENGINE_VALUES_H

#include "codec/entropy/codings.h"
#include "engine/decode/columns_cache.h"
#include "engine/decode/load_plan.h"
#include "engine/decode/payloads.h"
#include "engine/decode/values_store.h"
#include "engine/store/view.h"
#include "kernels/kernels.h"

#define MAX_STEPS      4096u /* blocks read for one block; a chain is a handful */
#define MAX_SAVE_STEPS 1024u /* the same for a parent that a delta is made on */
#define MAX_DEPTH      256u  /* blocks on blocks */
#define MAX_SAVE_DEPTH 128u

/* A block that optimizer steps were predicted from a moment ago. */
#define CACHED_BLOCKS 8
typedef struct cached_block {
    const record *record; /* NULL: none */
    bytes values;
    uint64_t used;
    uint32_t pins; /* uses at this moment */
} cached_block;

/* Scratch of one worker. */
typedef struct decoder {
    coder *coder;
    const kernels *kernels;
    bytes stored;   /* payload as read */
    bytes integers; /* decoded residuals */
    bytes context;
    lattice_work lattice;
    columns_cache *columns; /* the load's or the save's, or its own */
    bool own_columns;
    uint32_t
        lossy_depth;   /* lossy blocks that wait for their parent's values: these need no hash of their own */
    bool verify_chain; /* a chain did not give what it should: compare every hash on the way */
    uint32_t steps;    /* blocks decoded for the present top-level block: bounds hostile fan-out */
    uint32_t depth;    /* of the present recursion: bounds circles, and the stack */
    uint32_t step_limit; /* MAX_STEPS; a save stays far below, so that what it commits can be loaded */
    uint32_t sharing;    /* optimizer steps being decoded: blocks are kept meanwhile */
    uint32_t nested;     /* inputs of inputs */
    cached_block cached[CACHED_BLOCKS];
    uint64_t cache_clock;
    values_store *store;      /* the load's; NULL: nothing is stored */
    uint32_t filling;         /* the least depth of blocks that are being decoded into it; UINT32_MAX: none */
    const load_plan *plan;    /* of all that is being loaded; or NULL, and: */
    const view *top;          /* the load's, or NULL */
    const bool *has_derived;  /* by tensor of it: others of the same checkpoint are made from it */
    const payloads *payloads; /* that need not be read; or NULL */
    uint64_t bytes_read;      /* payloads */
} decoder;
/* columns: shared with other workers, and to outlive it; NULL: it gets one of its own. */
ckd_status decoder_init(decoder *d, columns_cache *columns, ckd_error *err);
void decoder_free(decoder *d);

/* The values of one block of `v` into `to` (raw_size bytes, any alignment). */
ckd_status block_values(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                        ckd_error *err);

/*
 * One block's share of a span: its values that the span wants, into their places in `to`. Adds to *copied how many.
 */
ckd_status block_into_span(decoder *d, view_cache *cache, const view *v, const view_tensor *t,
                           const view_block *b, const span *want, void *to, uint64_t *copied, ckd_error *err);

/*
 * The values of a span of a tensor of `v` into `to`, contiguous. CORRUPT if the stored regions do not cover the span,
 * MISMATCH if dtype is not the stored one. expected: their content hash, if the caller knows it.
 */
ckd_status span_values(decoder *d, view_cache *cache, const view *v, const view_tensor *t, const span *want,
                       void *to, const hash128 *expected, ckd_error *err);

/* The bytes of a blob or a group (raw_size of them), verified. */
ckd_status blob_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);
/* The same of a record that many blocks name, which is read once for a load. */
ckd_status shared_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);

/* Blocks that optimizer steps are predicted from are kept for those that build on them, a few of them; calls nest. */
void values_share_begin(decoder *d);
void values_share_end(decoder *d);
/* While blocks are kept: the values of one of them. false: it is none. */
bool values_cached(decoder *d, const view_block *b, void *to);

/* ---- between values.c, values_step.c, values_lattice.c and device/chain.c ---- */
/* UNSUPPORTED, if this version does not know the block's coding or predictor. */
ckd_status values_known(const view_block *b, ckd_error *err);
/* The block's payload, verified: until the decoder reads the next one. */
ckd_status values_payload(decoder *d, const view_block *b, const void **payload, ckd_error *err);
/* A lossy block's integers, until the decoder decodes another one; what others share is there until values_lattice_release. */
typedef struct lattice_parts {
    lattice_block block;
    cached_columns *columns, *rows; /* NULL: none */
} lattice_parts;
ckd_status values_lattice_read(lattice_parts *out, decoder *d, const view *v, const view_block *b,
                               ckd_error *err);
void values_lattice_release(decoder *d, lattice_parts *p);
/* A lossy block; `to` holds the parent's values, if it has one. v NULL: a copy that needs nothing else. */
ckd_status values_decode_lattice(decoder *d, const view *v, const view_block *b, bool has_parent, void *to,
                                 ckd_error *err);
/* Decodes one block on the way to another one. */
ckd_status values_of_block(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                           ckd_error *err);
/* The same of a block that others may want, too: from the load's store of values, or into it, if its plan says so. */
ckd_status values_of_input(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                           ckd_error *err);
/* The values of a dependency, wherever they stand. */
ckd_status values_dependency(decoder *d, view_cache *cache, const view *own, const view_block *b,
                             uint32_t index, ckd_dtype dtype, void *to, ckd_error *err);
/* What an optimizer step is expected to give: `to` then wants the residual. */
ckd_status values_predict(decoder *d, view_cache *cache, const view *v, const view_block *b, void *to,
                          ckd_error *err);

#endif
