/*
 * Checkpoints whose manifests disappeared without a deletion. Internal to engine/.
 *
 * Two things show such a loss. First, a chunk file has a name only while an intent or a manifest names it. So a file
 * that neither names is the rest of a lost checkpoint. Second, a catalog row with neither a manifest nor a tombstone is
 * a loss if no deletion has begun since the catalog was last in step (deletions.h). The records give the checkpoint's
 * contents; the row adds run, step and lineage.
 */
#ifndef ENGINE_VANISHED_H
#define ENGINE_VANISHED_H

#include "engine/store/damage.h"

/* Suffixes in data/q. Such a file, RUN.STEP.GENERATION.lost, is a manifest without files. */
#define VANISHED_END ".lost"
#define DOUBTFUL_END ".doubtful"

/* A chunk file that no manifest and no intent names. */
typedef struct stray_file {
    ckd_id id;
    ckd_id *checkpoints; /* the checkpoints that it has records of; none if it cannot be read */
    size_t checkpoint_count;
    bool explained; /* a checkpoint in `items` has records in it */
} stray_file;

typedef struct vanished {
    stray_file *strays; /* sorted by id */
    size_t stray_count;
    ckd_checkpoint *items; /* lost checkpoints: known to a catalog, without a manifest */
    size_t count, capacity;
    ckd_checkpoint *doubtful; /* the same, but the catalog is older than some deletion: lost or deleted */
    size_t doubtful_count, doubtful_capacity;
} vanished;

/*
 * Finds lost checkpoints. If a manifest or an intent is unreadable, it may name any file, so no file counts as stray.
 * Writers may be at work. Release with vanished_free, also after failures. Errors: IO, NOMEM.
 */
ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err);
void vanished_free(vanished *v);
/* Moves a doubtful checkpoint to the items. Returns false if there is none at this run and step, or on NOMEM (err). */
bool vanished_believe(vanished *v, const char *run, uint64_t step, ckd_error *err);
/*
 * Adds them to the damage: known checkpoints under their manifests, other files under their own names. Doubtful ones
 * only cause a message. Errors: NOMEM.
 */
ckd_status vanished_record(const vanished *v, const ckd_store *store, damage_list *damage, ckd_error *err);

/*
 * Keeps lost checkpoints in data/q, for vanished_find, before the catalog drops rows that have neither a manifest nor a
 * tombstone. current: no deletion has begun since the catalog was last in step. A row that cannot be kept causes a
 * message, not a failure. Under the publish lock. Errors: NOMEM.
 */
ckd_status vanished_keep(const ckd_store *store, const ckd_checkpoint *const *known, size_t count,
                         bool current, ckd_error *err);

/*
 * Does the same for all that vanished_find finds, before a catalog is made from the manifests alone. Under the publish
 * lock. Errors: NOMEM.
 */
ckd_status vanished_keep_found(const ckd_store *store, ckd_error *err);

/*
 * Called before chunk files are removed or rewritten. The files of a lost checkpoint must stay until it is repaired or
 * given up, but no manifest names them. Errors: STATE (data/q keeps a checkpoint whose manifest is lost).
 */
ckd_status vanished_check_none(const ckd_store *store, ckd_error *err);

/* Removes what data/q keeps of a checkpoint that is listed again, or deleted. */
void vanished_forget(const ckd_store *store, const ckd_id *checkpoint);

#endif
