/*
 * Writes encoded blocks into the chunk file. A block is registered first, in order: later blocks then know it. Its
 * bytes may then be written by any thread, in order. Internal to engine/.
 */
#ifndef ENGINE_SAVE_WRITER_H
#define ENGINE_SAVE_WRITER_H

#include "engine/encode/encode.h"

struct ckd_save;

/* A side record that a block needs, written before it. Later blocks use its memory again. */
typedef struct save_side {
    record record;
    bytes data;
} save_side;

typedef struct save_append {
    record record;
    bool group; /* write its optimizer's group before it */
    save_side sides[2];
    uint32_t side_count;
    uint64_t side_bytes;
} save_append;
void save_append_free(save_append *a);
/*
 * Registers an encoded block before it is written: makes its record, records its dependencies, and makes its values
 * known to later blocks.
 */
ckd_status save_register(save_append *out, struct ckd_save *save, const block_job *job,
                         const tensor_context *t, step_tensor *step, ckd_error *err);
/*
 * Writes a registered block, and the records that come before it. Called by one thread at a time, in the order of
 * registration; jobs of other blocks may run meanwhile.
 */
ckd_status save_write_block(struct ckd_save *save, const block_job *job, save_append *a, ckd_error *err);

/* Disk space that blocks need: added up, then passed to save_free_space before they are written. */
typedef struct disk_space {
    uint64_t payload, copies;
} disk_space;
void save_free_space_for(struct ckd_save *save, const block_job *job, const tensor_context *t,
                         disk_space *space);

#endif
