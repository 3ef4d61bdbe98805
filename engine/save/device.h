/*
 * Exact blocks of a tensor on a device, whose deltas the device codes: many of them ahead of the pipeline, which they enter with their payload. Their values are not read but where
 * the host wants to see them. What a device says is what the host would have found: a block whose delta does not clearly win, or
 * may be better as another kind of stream or by a byte codec, is left to it. Internal to engine/.
 */
#ifndef ENGINE_SAVE_DEVICE_H
#define ENGINE_SAVE_DEVICE_H

#include "engine/save/device_dedup.h"

/* What a save holds for this; made when it is first needed. */
typedef struct save_device save_device;
void save_device_free(ckd_save *save);

/*
 * Before the next block of a span, which begins at element `first`, is looked at: codes it and some of those behind it, if they were not looked at yet and can be. What the
 * device cannot do is told, once a tensor, and no failure: the host does it then. Errors: those of save_await.
 */
ckd_status save_device_code(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                            unchanged_blocks *u, uint64_t first, uint64_t end, ckd_error *err);
/* Of the block that device_dedup_next has just looked at: the job gets what the device made of it. true: its values are not wanted. */
bool save_device_give(ckd_save *save, block_job *job, const unchanged_blocks *u);

/* Where the values of the piece's blocks are, if they are on a device, for save_device_fetch. Errors: NOMEM. */
ckd_status save_device_remember(ckd_save *save, region_job *rj, const ckd_tensor *tensor, ckd_error *err);
/* The values of a block, after all. On any thread, while what the tensor points to stays. Errors: DEVICE, NOMEM. */
ckd_status save_device_fetch(ckd_save *save, block_job *job, const region_job *rj, ckd_error *err);
/*
 * Nothing but deltas is made ahead, whatever else will be wanted, and no values are brought with them: for tests, as the pipeline otherwise decides differently from what was expected but
 * seldom. Not while a save is under way.
 */
void save_device_unprepared(bool yes);

#endif
