/* The closure of a checkpoint: all records that a load of it reads. Internal to engine/. */
#ifndef ENGINE_CLOSURE_H
#define ENGINE_CLOSURE_H

#include "engine/store/view.h"

/* Called once for each record of the closure. `in`: the view that holds it. */
typedef ckd_status (*closure_fn)(void *context, const view *in, const view_block *b, ckd_error *err);

/*
 * Visits everything that the blocks of a root build on, down to the last record, in the files that its manifest names.
 * Reads no payload. Errors: CORRUPT (a record or values that something builds on are missing, or have another content
 * hash), those of views_within and `visit`, NOMEM.
 */
ckd_status closure_visit(view_cache *cache, const view *root, closure_fn visit, void *context,
                         ckd_error *err);

/* The same for one block of a view, which need not be a root. */
ckd_status closure_visit_block(view_cache *cache, const view *in, const view_block *b, closure_fn visit,
                               void *context, ckd_error *err);

/*
 * Proves with closure_visit that the closure is complete. Then removes from m->files every older file without a record
 * of the closure. m->files are those of root's manifest, or more; own files stay. Errors: as closure_visit.
 */
ckd_status closure_name_files(manifest *m, view_cache *cache, const view *root, ckd_error *err);

#endif
