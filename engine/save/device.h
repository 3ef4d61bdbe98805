/*
 * Exact blocks of a tensor on a device, with deltas that the device codes. It codes batches ahead of the pipeline,
 * which the blocks enter with their payload. Their values are read only if the host needs them. The results are the
 * same as the host's: the device leaves a block to the host if its delta does not clearly win, or another stream or a
 * byte codec may be better. Internal to engine/.
 */
#ifndef ENGINE_SAVE_DEVICE_H
#define ENGINE_SAVE_DEVICE_H

#include "engine/save/device_dedup.h"

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
bool save_device_give(ckd_save *save, block_job *job, const unchanged_blocks *u);

/*
 * For tests: the device codes deltas only, and never reads values ahead, because the pipeline seldom decides
 * otherwise than expected. Not while a save is in progress.
 */
void save_device_unprepared(bool yes);

#endif
