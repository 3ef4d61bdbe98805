/*
 * What devices have made is decoded by the host before it is committed: of each kind of block one, out of the files that were written. Hashes say what a device
 * holds, payloads what a load makes; where these differ, the arithmetic of this device, or of its compiler, is not the host's, and no checkpoint
 * from there could be loaded. Of several ranks it is rank 0 who tries what its own device made. Internal to engine/.
 */
#ifndef ENGINE_SAVE_TRIAL_H
#define ENGINE_SAVE_TRIAL_H

#include "engine/save/save_pipeline.h"

#define TRIAL_KINDS \
    16u /* by role, dtype, coding (or that it is a rounded master), whether it is a delta and whether the device coded it; others are not tried */

typedef struct trial_block {
    const record_tensor *tensor; /* the save's */
    ckd_region region;
    uint64_t first, count;
    uint32_t kind;
} trial_block;

typedef struct save_trials {
    trial_block blocks[TRIAL_KINDS];
    uint32_t count;
} save_trials;

/* A block of the piece that has been decided on. By one thread at a time. */
void save_trial_note(ckd_save *save, const block_job *job, const save_piece *piece);
/* v: of all that the save has written, which is not committed yet. Errors: DEVICE, and from now on this handle's saves read what lies on devices; NOMEM, IO. */
ckd_status save_trial_run(ckd_save *save, const view *v, ckd_error *err);

#endif
