/*
 * Checkpoints whose manifests vanished, though nobody deleted them. Internal to engine/.
 *
 * A chunk file gets its name when an intent names it, and loses it before the last manifest that names it goes. So one that neither names is what is left of a
 * checkpoint. Its records say which; of what a manifest adds, run and step above all, the catalog knows most.
 */
#ifndef ENGINE_VANISHED_H
#define ENGINE_VANISHED_H

#include "engine/damage.h"

#define VANISHED_END ".lost" /* what is kept of a vanished checkpoint: data/q/RUN.STEP.GENERATION.lost */

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
    ckd_checkpoint *items; /* that strays have records of, no manifest has, and a catalog knew */
    size_t count, capacity;
} vanished;

/*
 * Looks for them; nothing is found where a manifest or an intent cannot be read, as that may name the files. Writers may be at work. Release with vanished_free, also after failures. Errors: IO, NOMEM.
 */
ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err);
void vanished_free(vanished *v);
/* Adds them to the damage: manifests of checkpoints that are known, other files by their own names. Errors: NOMEM. */
ckd_status vanished_note(const vanished *v, const ckd_store *store, damage_list *damage, ckd_error *err);

/*
 * Under the publish lock, before the catalog drops checkpoints that have no manifest: what it knows of those that vanished is kept in data/q, for vanished_find. Not to keep it
 * is told, and no failure. Errors: NOMEM.
 */
ckd_status vanished_keep(const ckd_store *store, const ckd_checkpoint *const *known, size_t count,
                         ckd_error *err);

/* It is listed again. */
void vanished_forget(const ckd_store *store, const ckd_checkpoint *known);

#endif
