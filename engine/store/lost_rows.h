/* Records in data/q of lost checkpoints that a catalog knew. For vanished.c and fallback.c. */
#ifndef ENGINE_STORE_LOST_ROWS_H
#define ENGINE_STORE_LOST_ROWS_H

#include "engine/store/damage.h"

/* end: VANISHED_END or DOUBTFUL_END. */

/* Keeps a checkpoint. Under the publish lock. Errors: NOSPACE, IO (also for a missing permission), NOMEM. */
ckd_status lost_row_keep(const ckd_store *store, const ckd_checkpoint *c, const char *end, ckd_error *err);
/*
 * Reads a file of data/q; false unless its name has this suffix. If the file is damaged, only run, step, generation and
 * id are known: created_ns is 0. Release *out with manifest_free.
 */
bool lost_row_read(manifest *out, const ckd_store *store, const char *name, const char *end);
/* Sets the error that nothing may be removed while this checkpoint is lost. Returns STATE. */
ckd_status lost_row_refuse(const ckd_store *store, const ckd_checkpoint *c, ckd_error *err);

#endif
