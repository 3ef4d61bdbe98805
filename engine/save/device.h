/*
 * Exact blocks of a tensor on a device. Internal to engine/.
 *
 * Deduplication in device memory (device_dedup.c): hashes computed on the device show that a block equals the parent's,
 * or a rounded master of this save. Its values are then not copied to the host. This also makes the hashes of masters
 * by which such copies are found.
 *
 * Blocks that the device codes (device.c), if it is used for that: it codes batches ahead of the pipeline, which the
 * blocks enter with their payload. Their values are read only if the host needs them. The results are the same as the
 * host's. The device leaves a block to the host if its delta does not clearly win, or another stream or a byte codec
 * may be better.
 */
#ifndef ENGINE_SAVE_DEVICE_H
#define ENGINE_SAVE_DEVICE_H

#include "engine/save/save.h"

/* ---- device_dedup.c ---- */
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
uint64_t save_block_length(const tensor_context *t, uint64_t first, uint64_t end);

/*
 * Hashes the blocks of a span, if the tensor is on a device and there is anything to compare them with. If they may be
 * rounded masters, waits for all blocks in progress. If the device fails, that is reported, and all values are read.
 * Errors: NOMEM, those of save_await.
 */
ckd_status device_dedup_begin(unchanged_blocks *u, ckd_save *save, const exact_span *span, ckd_error *err);
void device_dedup_free(unchanged_blocks *u);
/*
 * Visits the job's block, which is the next one. true: it is known, and nothing is read. false: it will be read.
 * The blocks behind it may be read ahead, up to the next known one.
 */
bool device_dedup_next(unchanged_blocks *u, ckd_save *save, block_job *job);

/* ---- device.c ---- */
/* State of device coding in a save; made when first needed. */
typedef struct save_device save_device;
void save_device_free(ckd_save *save);

/*
 * Called before the block at element `first` of the span is taken. Codes that block and some behind it, unless they
 * were looked at already or cannot be coded there. If the device fails, the host codes the blocks; that is reported
 * once a tensor. Errors: those of save_await.
 */
ckd_status save_device_code(ckd_save *save, unchanged_blocks *u, uint64_t first, ckd_error *err);
/*
 * Gives the job what the device made of the block that device_dedup_next has just returned. true: its values need not
 * be read.
 */
bool save_device_take_result(ckd_save *save, block_job *job, const unchanged_blocks *u);

/*
 * Whether devices code blocks at all. They do not by default: the host is faster (DECISIONS.md). For tests, and to
 * measure it. Not while a save is in progress.
 */
void save_device_use(bool yes);
bool save_device_is_used(void);
/*
 * For tests: the device codes deltas only, and never reads values ahead, because the pipeline seldom decides
 * otherwise than expected. Not while a save is in progress.
 */
void save_device_unprepared(bool yes);

#endif
