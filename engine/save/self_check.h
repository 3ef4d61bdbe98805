/*
 * What devices have made is decoded by the host before it is committed: of each kind of block one, out of the files that were written. Hashes say what a device
 * holds, payloads what a load makes; where these differ, the arithmetic of this device, or of its compiler, is not the host's, and no checkpoint
 * from there could be loaded. Of several ranks it is rank 0 who tries what its own device made. Internal to engine/.
 */
#ifndef ENGINE_SAVE_SELF_CHECK_H
#define ENGINE_SAVE_SELF_CHECK_H

#include "engine/save/pipeline.h"

#define SELF_CHECK_KINDS \
    16u /* by role, dtype, coding (or that it is a rounded master), whether it is a delta and whether the device coded it; others are not tried */

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

/* A block of the piece that has been decided on. By one thread at a time. */
void self_check_record(ckd_save *save, const block_job *job, const region_job *rj);
/* v: of all that the save has written, which is not committed yet. Errors: DEVICE, and from now on this handle's saves read what lies on devices; NOMEM, IO. */
ckd_status self_check_run(ckd_save *save, const view *v, ckd_error *err);

#endif
