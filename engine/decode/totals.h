/* The totals that a manifest states for its checkpoint. Internal to engine/. */
#ifndef ENGINE_TOTALS_H
#define ENGINE_TOTALS_H

#include "engine/store/view.h"

/*
 * Sets tensors, depth, raw_bytes, stored_bytes and load_cost of m->checkpoint, and m->roles, from the records in the
 * checkpoint's files. v is opened from the same files. A file with other checkpoints' records counts by the share of
 * this checkpoint's records. Errors: NOMEM.
 */
ckd_status totals_set(manifest *m, const view *v, ckd_error *err);

#endif
