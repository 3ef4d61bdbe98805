/* Decodes the blocks of several checkpoints for verification. Internal to engine/integrity/. */
#ifndef ENGINE_VERIFY_VALUES_H
#define ENGINE_VERIFY_VALUES_H

#include "engine/decode/decode.h"

/* The outcome of decoding a block or a blob. */
typedef struct value_finding {
    const view_block *block;
    ckd_status status;
    ckd_error *why; /* NULL: intact */
} value_finding;

/* A checkpoint whose values are to be decoded. */
typedef struct value_target {
    const view *view;
    /* its blocks may be decoded from values of other targets that share, and these from its blocks */
    bool shares;
    value_finding *findings; /* of the blocks to decode, then of the blobs, in the order of the view */
    size_t block_count, count;
} value_target;

/* Decoders and their buffers, one for each worker. */
typedef struct value_checker {
    ckd_store *store;
    decoder *decoders;
    bytes *buffers;
    uint32_t count;
    columns_cache *columns;
} value_checker;

/* views: of all targets; must outlive it. Release with value_checker_free, also after failures. Errors: NOMEM. */
ckd_status value_checker_init(value_checker *out, ckd_store *store, view_cache *views, ckd_error *err);
void value_checker_free(value_checker *c);
/* Called after some blocks with the bytes of their values. A status other than CKD_OK ends the check. */
typedef ckd_status (*value_progress_fn)(void *context, uint64_t bytes, ckd_error *err);
/*
 * Decodes everything that the targets list, on all threads, and sets the findings. Targets are in the order of their
 * steps. If targets share a chain, their blocks with the same tensor and region are decoded one after the other. The
 * chain is then read once. A finding does not depend on the number of threads. Errors: those of `progress`, NOMEM.
 */
ckd_status value_check(value_checker *c, value_target *targets, size_t count, value_progress_fn progress,
                       void *context, ckd_error *err);

/*
 * verify_sharing.c: Which file holds each record that was looked at. A block may be decoded from another checkpoint's
 * values only if both checkpoints find the records below it in the same files.
 */
typedef struct record_places {
    hash_set records; /* that are known */
    hash_set places;  /* each with its file */
} record_places;
void record_places_free(record_places *p);
/*
 * Whether all that a load of the checkpoint reads is there, once, and where other checkpoints found it. If so, adds its
 * records. views: a cache for this alone. Errors: NOMEM.
 */
ckd_status record_places_agree(bool *agree, record_places *p, view_cache *views, const ckd_id *checkpoint,
                               ckd_error *err);

#endif
