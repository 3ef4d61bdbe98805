/* Declarations that only the files of engine/save/ use. */
#ifndef ENGINE_SAVE_INTERNAL_H
#define ENGINE_SAVE_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>

#include "engine/save/save.h"

/* How a save ends, as far as its files are concerned. */
typedef enum save_end {
    SAVE_DROPPED,   /* no manifest names its chunk file */
    SAVE_COMMITTED, /* a manifest names its chunk file */
    SAVE_UNDECIDED  /* a manifest may name it: the intent stays, and recovery finds out */
} save_end;

/* Returns INVALID if a checkpoint of the store has this save's id. The caller holds the store's mutex. */
ckd_status save_check_id_unused(const ckd_save *save, ckd_error *err);

/* ---- begin.c ---- */
/* Returns STATE unless the save is open. Every public call on a save begins with it. */
ckd_status save_check_open(const ckd_save *save, ckd_error *err);
/* Releases everything, and removes the files that must go. If a removal fails, the intent stays, for recovery. */
void save_close(ckd_save *save, save_end end);

/* ---- values.c ---- */
/* Elements of a tensor, counted in its region. */
typedef struct tensor_elements {
    const ckd_tensor *tensor;
    uint64_t first, count;
} tensor_elements;
/* Returns elements: in the caller's memory, or read into `scratch` by the tensor's read function. */
ckd_status save_fetch(const void **values, ckd_save *save, bytes *scratch, const tensor_elements *elements,
                      ckd_error *err);
/* Keeps the place of values on a device for save_device_fetch. Errors: NOMEM. */
ckd_status save_device_remember(ckd_save *save, region_job *rj, const ckd_tensor *tensor, ckd_error *err);
/*
 * Reads the values of a block after all. Called on any thread, while the tensor's memory is valid. Errors: DEVICE,
 * NOMEM.
 */
ckd_status save_device_fetch(ckd_save *save, block_job *job, const region_job *rj, ckd_error *err);

/* ---- tensor.c ---- */
/* Writes all blocks in progress. The save must be open; an error fails it. */
ckd_status save_finish_blocks(ckd_save *save, ckd_error *err);
/* Returns when all lossy tiles are written (lossy.c). */
ckd_status save_end_tiles(ckd_save *save, ckd_error *err);

/* ---- target.c ---- */
/*
 * Dates a checkpoint before it is published: later than its parent and the newest checkpoints of its run and the run's
 * branches, even if the clock was set back. A restore compares these times. The caller holds the store's mutex and the
 * publish lock.
 */
ckd_status save_date(ckd_checkpoint *c, const ckd_save *save, ckd_error *err);
/*
 * For a session's save: returns EXISTS if the run's newest checkpoint belongs to another launch. Called when the save
 * begins, and before its manifest is published. The caller holds the store's mutex and the publish lock.
 */
ckd_status launch_check_begin(ckd_save *save, ckd_error *err);
ckd_status launch_check_publish(const ckd_save *save, ckd_error *err);

/* ---- suspect.c ---- */
typedef struct suspect_verdict {
    uint32_t reasons;    /* ckd_suspect; 0: the checkpoint is not suspect */
    uint64_t tensors;    /* that have become NaN or infinite */
    uint64_t values, of; /* of the first one: those that are not finite, and all */
    char first[CKD_NAME_MAX + 1];
} suspect_verdict;
/*
 * Judges the checkpoint that is to be committed, from the files of all ranks (v, with measures). Called without locks.
 * A tensor of the reference that cannot be decoded counts as finite there.
 */
void suspect_judge(suspect_verdict *out, const ckd_save *save, const view *v);
/* Says so, once the checkpoint is committed. */
void suspect_report(const suspect_verdict *v, const ckd_store *store, const ckd_checkpoint *c);

/* ---- names.c ---- */
/*
 * Records a region before it is coded. Tensor and region live as long as the save; the region is canonical. Errors:
 * MISMATCH (it overlaps a saved region, or the tensor has another dtype, shape or role there), NOMEM.
 */
ckd_status save_record_region(save_registry *registry, const record_tensor *tensor, const geometry *shape,
                              const ckd_region *region, uint64_t elements, ckd_error *err);
/* Records a blob before it is written. Errors: MISMATCH (the name was saved before), NOMEM. */
ckd_status save_record_blob(save_registry *registry, const char *name, ckd_error *err);
void save_names_free(saved_names *n);

/* ---- order.c ---- */
/*
 * Removes a share of the tensor's expected cost (in the parent `v`) from the budget, as its real figures follow.
 * share <= 0: does nothing.
 */
void save_remove_expected(load_budget *budget, const view *v, const view_tensor *parent, double share);

/* ---- times.c ---- */
/* Adds the time of an analysis outside the pipeline's stage. */
void save_add_analysis(ckd_save *save, uint64_t ns);
/* Adds this rank's times to its part, which is about to be sent. */
void save_put_times(rank_part *to, const ckd_save *save);
/* Keeps the times that a part reports, this rank's or another's. Errors: NOMEM. */
ckd_status save_take_times(ckd_save *save, const rank_part *reported, ckd_error *err);
/* Stores the times in the catalog. The caller has begun a transaction. */
ckd_status save_store_times(const ckd_save *save, const ckd_checkpoint *saved, ckd_error *err);

/* ---- writer.c ---- */
/* Records that the save depends on another checkpoint. */
ckd_status save_depend(save_output *out, const ckd_id *checkpoint, ckd_error *err);
/*
 * Returns true if the disk has space for `payload` bytes in the chunk file and `copies` bytes in the materialized copy.
 * added: how many of these the last call did not know of. While there is plenty of space, the disk is asked again only
 * after a second or 64 MiB: on network file systems each question is a round trip. One thread at a time.
 */
bool save_has_space(ckd_save *save, uint64_t payload, uint64_t copies, uint64_t added);
/* The rest of this section is called while nobody else works on the save. */
/*
 * Makes space for bytes of payload in the chunk file, and of copies in the materialized copy. Materialized copies are
 * removed if need be.
 */
void save_free_space(ckd_save *save, uint64_t payload, uint64_t copies);
/* Removes all materialized copies, this save's included. false: there were none. */
bool save_drop_copies(ckd_save *save);
/*
 * After a write ended with `status`: if the disk is full, removes all materialized copies. Returns true if that made
 * space for another try, in a new file.
 */
bool save_make_room(ckd_save *save, ckd_status status);

/* ---- comparison.c: SAME_OK on a checkpoint that exists ---- */
ckd_status save_compare_begin(ckd_save *save, ckd_error *err);
/* Returns EXISTS, naming the tensor, if the block's values differ from the existing checkpoint's. */
ckd_status save_compare_block(ckd_save *save, block_job *job, const tensor_context *tensor, ckd_error *err);
/* Records that all blocks of the tensor's region were equal. */
void save_compared_region(save_sources *from, const tensor_context *tensor);
ckd_status save_compare_blob(ckd_save *save, const char *name, const void *data, size_t size, ckd_error *err);
/* Returns EXISTS unless everything in the existing checkpoint was compared, once. */
ckd_status save_compare_end(const ckd_save *save, ckd_error *err);
void save_compare_free(comparison *compared);

#endif
