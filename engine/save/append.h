/*
 * Encoded blocks into the chunk file. What later blocks have to know of one is registered first, by the saving thread; its bytes may then be written by
 * any thread, in order. Internal to engine/.
 */
#ifndef ENGINE_SAVE_APPEND_H
#define ENGINE_SAVE_APPEND_H

#include "engine/encode/block_coder.h"

struct ckd_save;

/* A side record, which a block needs, and which is written before it. Its data is used again by later ones. */
typedef struct save_side {
    record record;
    bytes data;
} save_side;

typedef struct save_append {
    record record;
    bool group; /* its optimizer's group comes before it */
    save_side before[2];
    uint32_t before_count;
    uint64_t before_bytes;
} save_append;
void save_append_free(save_append *a);
/* An encoded block, before it is written: its record, what it depends on, and its values, for blocks behind it. */
ckd_status save_register(save_append *out, struct ckd_save *save, const block_job *job,
                         const tensor_context *t, step_tensor *step, ckd_error *err);
/* By one thread at a time, in the order in which they were registered; beside jobs of other blocks. What comes before it is written, too. */
ckd_status save_write_block(struct ckd_save *save, const block_job *job, save_append *a, ckd_error *err);

/* What blocks take on the disk: added up, then given to save_free_space before they are written. */
typedef struct disk_space {
    uint64_t payload, copies;
} disk_space;
void save_free_space_for(struct ckd_save *save, const block_job *job, const tensor_context *t,
                         disk_space *space);

#endif
