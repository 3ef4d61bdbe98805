/* What a manifest says of its checkpoint in sums. Internal to engine/. */
#ifndef ENGINE_TOTALS_H
#define ENGINE_TOTALS_H

#include "engine/store/view.h"

/*
 * Sets tensors, depth, raw_bytes, stored_bytes and load_cost of m->checkpoint, and m->roles, from what the files of the checkpoint hold, whoever wrote
 * them. v is opened from the same files. Of a file that holds records of others as well, the checkpoint takes its records' share. Errors: NOMEM.
 */
ckd_status totals_set(manifest *m, const view *v, ckd_error *err);

#endif
