/*
 * Exact blocks on their way through a save, several at once, of one tensor or of several. Internal to engine/.
 *
 *   fetched -> analysed -> decided -> encoded -> written
 *
 * In each round the pool writes what the last round encoded, encodes what was decided, and analyses what was fetched, all at the same time; between
 * rounds the saving thread decides, in order. The bytes written are those that one block after the other would give, whatever the number of
 * threads: what an analysis may not have known yet, as it ran beside the blocks before it, is looked at again before the decision (save_pipeline.c).
 */
#ifndef ENGINE_SAVE_PIPELINE_H
#define ENGINE_SAVE_PIPELINE_H

#include "engine/save_append.h"

/* How the deltas of one tensor fare, so that one which never wins is not tried at every block. */
typedef struct delta_record {
    uint32_t lost, since;
} delta_record;

/* Blocks that share a region: of a tensor, or of a panel of it. Lives as long as the save. */
typedef struct save_piece {
    tensor_context context;
    step_tensor *step; /* the caller's, who flushes before he ends it; NULL: none */
    delta_record tried;
    double
        share; /* of the tensor, whose expected cost leaves the budget with the first block; 0: nothing does */
} save_piece;

/* One block's place; its job has the same number. */
typedef struct save_slot {
    save_piece *piece;
    bool borrowed;      /* its values are where the caller has them */
    save_append append; /* once encoded */
    uint64_t analyse_ns, encode_ns;
} save_slot;

/* A ring: the oldest slots are encoded, then come decided, analysed and fetched ones. */
typedef struct save_pipeline {
    save_slot *slots;
    uint32_t slot_count, batch; /* at most so many are fetched for a round */
    uint32_t oldest, encoded, decided, analysed, fetched;
    const block_job **coming; /* those decided, for coding_context */
    uint64_t write_ns;        /* of the last round */
} save_pipeline;

/* Places, and so jobs, that a pool of so many threads is kept busy with. */
uint32_t pipeline_slots(uint32_t threads);
ckd_status pipeline_init(save_pipeline *p, uint32_t slots, ckd_error *err);
void pipeline_free(save_pipeline *p);

/* Elements first ... end - 1 of the region, bit for bit; one empty block if there are none. They may still be under way when it returns. */
ckd_status save_exact_span(struct ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                           uint64_t first, uint64_t end, step_tensor *step, ckd_error *err);
/* Returns when all blocks are written. The jobs have nothing else to do then. */
ckd_status save_flush(struct ckd_save *save, ckd_error *err);
/* Copies what is still needed of the caller's memory. */
ckd_status save_let_go(struct ckd_save *save, ckd_error *err);

#endif
