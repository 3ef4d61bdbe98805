/*
 * Checkpoints whose manifests vanished, though nobody deleted them. Internal to engine/.
 *
 * Two things show such a loss. A chunk file gets its name when an intent names it, and loses it before the last manifest that names it goes, so one that neither
 * names is left of a checkpoint. And the catalog has a row that has neither a manifest nor a tombstone, while no deletion has begun since the catalog was last in
 * step (deletions.h). The records say what the checkpoint holds; the row adds run, step and lineage.
 */
#ifndef ENGINE_VANISHED_H
#define ENGINE_VANISHED_H

#include "engine/store/damage.h"

/* Ends of names in data/q. Such a file, RUN.STEP.GENERATION.lost, is a manifest without files. */
#define VANISHED_END ".lost"
#define DOUBTFUL_END ".doubtful"

/* A chunk file that no manifest and no intent names. */
typedef struct stray_file {
    ckd_id id;
    ckd_id *checkpoints; /* that it has records of; none if it cannot be read */
    size_t checkpoint_count;
    bool explained; /* a checkpoint below is in it */
} stray_file;

typedef struct vanished {
    stray_file *strays; /* by id */
    size_t stray_count;
    ckd_checkpoint *items; /* that no manifest has, and a catalog knew */
    size_t count, capacity;
    ckd_checkpoint *doubtful; /* the same, but that catalog is older than some deletion: lost, or deleted */
    size_t doubtful_count, doubtful_capacity;
} vanished;

/*
 * Looks for them. Where a manifest or an intent cannot be read, which may name any file, no file is a stray. Writers may be at work. Release with vanished_free,
 * also after failures. Errors: IO, NOMEM.
 */
ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err);
void vanished_free(vanished *v);
/* Counts a doubtful checkpoint among the items. false: there is none at this run and step, or no memory (err). */
bool vanished_believe(vanished *v, const char *run, uint64_t step, ckd_error *err);
/* Adds them to the damage: manifests of checkpoints that are known, other files by their own names. Doubtful ones are only a message. Errors: NOMEM. */
ckd_status vanished_record(const vanished *v, const ckd_store *store, damage_list *damage, ckd_error *err);

/*
 * Under the publish lock, before the catalog drops rows that have neither a manifest nor a tombstone: those that vanished are kept in data/q, for vanished_find. current: no deletion has begun
 * since the catalog was last in step. A row that cannot be kept is a message, and no failure. Errors: NOMEM.
 */
ckd_status vanished_keep(const ckd_store *store, const ckd_checkpoint *const *known, size_t count,
                         bool current, ckd_error *err);

/* The same for all that vanished_find finds, before a catalog is made from the manifests alone. Under the publish lock. Errors: NOMEM. */
ckd_status vanished_keep_found(const ckd_store *store, ckd_error *err);

/*
 * For those that remove or rewrite chunk files. STATE: a checkpoint is kept in data/q whose manifest is lost. No manifest names the files that it needs, so they must stay until it
 * is repaired or given up.
 */
ckd_status vanished_check_none(const ckd_store *store, ckd_error *err);

/* The checkpoint is listed again, or deleted: nothing of it is kept any more. */
void vanished_forget(const ckd_store *store, const ckd_id *checkpoint);

#endif
