/*
 * Before the commit, the host decodes one block of each kind that a device made, from the written files. Hashes
 * describe the device's values, payloads decode to the host's. If they differ, the device's arithmetic, or its
 * compiler's, is not the host's, and no load could use the checkpoint. With several ranks, rank 0 checks the blocks
 * of its own device. Internal to engine/.
 */
#ifndef ENGINE_SAVE_SELF_CHECK_H
#define ENGINE_SAVE_SELF_CHECK_H

#include "engine/save/pipeline.h"

#define SELF_CHECK_KINDS \
    16u /* role, dtype, coding (or rounded master), delta or not, coded there or not; others go unchecked */

typedef struct self_check_block {
    const record_tensor *tensor; /* the save's */
    ckd_region region;
    uint64_t first, count;
    uint32_t kind;
} self_check_block;

typedef struct self_check_list {
    self_check_block blocks[SELF_CHECK_KINDS];
    uint32_t count;
} self_check_list;

/* Records a decided block of the region job. Called by one thread at a time. */
void self_check_record(ckd_save *save, const block_job *job, const region_job *rj);
/*
 * Checks the recorded blocks. v: everything that the save has written, not committed yet. Errors: DEVICE (this
 * handle's later saves then read values from devices and code them on the host), NOMEM, IO.
 */
ckd_status self_check_run(ckd_save *save, const view *v, ckd_error *err);

#endif
