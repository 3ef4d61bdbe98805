/* What a load of a checkpoint reads. Internal to engine/. */
#ifndef ENGINE_CLOSURE_H
#define ENGINE_CLOSURE_H

#include "engine/store/view.h"

/* Called with each record that a load reads, once. `in`: the view that it is seen in. */
typedef ckd_status (*closure_fn)(void *context, const view *in, const view_block *b, ckd_error *err);

/*
 * Follows what the blocks of a root build on, to the last record, in the files that its manifest names. No payload is read. Errors: CORRUPT (values or a
 * record that something builds on are not there, or have another content hash), those of views_within and `visit`, NOMEM.
 */
ckd_status closure_visit(view_cache *cache, const view *root, closure_fn visit, void *context,
                         ckd_error *err);

/* The same of one block of a view, which need not be a root. */
ckd_status closure_visit_block(view_cache *cache, const view *in, const view_block *b, closure_fn visit,
                               void *context, ckd_error *err);

/*
 * Proves by closure_visit that all of it is there, and leaves in m->files, which are those of root's manifest or more, own ones and such as hold a record of
 * the closure. Errors: as closure_visit.
 */
ckd_status closure_name_files(manifest *m, view_cache *cache, const view *root, ckd_error *err);

#endif
