/*
 * Deduplicates blocks in device memory. Hashes computed on the device show that a block equals the parent's, or a
 * rounded master of this save; its values are then not copied to the host. Also makes the hashes of masters by which
 * such copies are found. Internal to engine/.
 */
#ifndef ENGINE_SAVE_DEVICE_DEDUP_H
#define ENGINE_SAVE_DEVICE_DEDUP_H

#include "engine/save/save.h"

/* State of the blocks of a span, visited in order. Zero-initialise; release with device_dedup_free. */
typedef struct unchanged_blocks {
    const exact_span *span;
    hash128 *content; /* NULL: nothing is known, and all blocks are read */
    bool *same;       /* equals the parent's block */
    hash128 *rounded; /* of masters: two hashes per block, as bf16 and as f16; else NULL */
    bool *named;      /* this save has it: its values are needed only for a materialized copy */
    bool *unread;     /* coded by the device (device.h), so its values are not read */
    bool hashed;      /* all hashes are set */
    uint32_t count, next;
    uint32_t looked; /* blocks that the device has coded or left to the host, if it is to code any; else 0 */
} unchanged_blocks;

/* Elements of the block that begins at element `first` of a span that ends at `end`. */
uint64_t save_block_at(const tensor_context *t, uint64_t first, uint64_t end);

/*
 * Hashes the blocks of a span, if the tensor is on a device and there is anything to compare them with. If they may be rounded masters, waits for all blocks in progress. If the device fails, that is reported, and
 * all values are read. Errors: NOMEM, those of save_await.
 */
ckd_status device_dedup_begin(unchanged_blocks *u, ckd_save *save, const exact_span *of, ckd_error *err);
void device_dedup_free(unchanged_blocks *u);
/*
 * Visits the job's block, which is the next one. true: it is known, and nothing is read. false: it will be read.
 * The blocks behind it may be read ahead, up to the next known one.
 */
bool device_dedup_next(unchanged_blocks *u, ckd_save *save, block_job *job);

#endif
