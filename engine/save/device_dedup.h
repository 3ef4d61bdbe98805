/*
 * Blocks of a tensor on a device that are as in the parent, or masters of this save rounded: the device's hashes say so, and their values never cross the bus. Of masters themselves it makes the
 * hashes by which such copies are known. Internal to engine/.
 */
#ifndef ENGINE_SAVE_DEVICE_DEDUP_H
#define ENGINE_SAVE_DEVICE_DEDUP_H

#include "engine/save/save.h"

/* Of the blocks of a span, one after the other. Zero-initialise; release with device_dedup_free. */
typedef struct unchanged_blocks {
    hash128 *content; /* NULL: nothing is known, and all are read */
    bool *same;       /* as the parent's */
    hash128 *rounded; /* of a master: of each block two, as bf16 and as f16 has it; else NULL */
    bool *named;      /* this save has it: its values are not wanted, unless a materialized copy is */
    bool *unread;     /* coded by the device (device.h), which needs no values here */
    bool hashed;      /* all of them */
    uint32_t count, next;
    uint32_t looked; /* blocks that the device has coded or left to the host, if it is to code them; else 0 */
} unchanged_blocks;

/* Elements of the block that begins at element `first` of a span that ends at `end`. */
uint64_t save_block_at(const tensor_context *t, uint64_t first, uint64_t end);

/*
 * Hashes the blocks from element `first` up to `end`, if the tensor is on a device and there is something to compare them with. What may be a rounded master waits for all blocks under
 * way. What the device cannot do is told, and no failure: the values are read then. Errors: NOMEM, those of save_await.
 */
ckd_status device_dedup_begin(unchanged_blocks *u, ckd_save *save, const ckd_tensor *tensor,
                              const tensor_context *t, uint64_t first, uint64_t end, ckd_error *err);
void device_dedup_free(unchanged_blocks *u, const ckd_tensor *tensor);
/*
 * The next block, which the job says. true: it is known, and there is nothing to read. Otherwise it is going to be read, and those behind it up to the next
 * one that need not be may be on their way.
 */
bool device_dedup_next(unchanged_blocks *u, ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                       block_job *job);

#endif
