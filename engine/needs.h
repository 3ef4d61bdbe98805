/*
 * Which checkpoints need which: all manifests of a store, those of deleted checkpoints included. Internal to engine/.
 */
#ifndef ENGINE_NEEDS_H
#define ENGINE_NEEDS_H

#include "engine/store.h"

typedef struct need {
    manifest m;
    tombstone dead;         /* if is_dead */
    bool is_dead;           /* in the trash */
    bool chosen;            /* by the caller, of whom this is */
    bool superseded;        /* a newer generation of the same checkpoint counts */
    size_t dependents_left; /* scratch of needs_order */
    bool in_use, looked_at; /* scratch of needs_visit_in_use */
} need;

typedef struct needs {
    need *items; /* by checkpoint id; several generations of one stand together, the highest first */
    size_t count;
} needs;

/*
 * Reads all manifests and tombstones. Under the publish lock. Errors: CORRUPT and UNSUPPORTED (of one that cannot be read: nothing is
 * known about what it needs), IO, NOMEM.
 */
ckd_status needs_read(needs *out, const ckd_store *store, ckd_error *err);
void needs_free(needs *n);

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err);

/* The first of the checkpoint's generations; NULL: there is none. */
need *needs_find(const needs *n, const ckd_id *id);
/* Chooses the checkpoints, all generations of them. NOT_FOUND unless each is there and dead or not, as asked for; INVALID if one is there twice. */
ckd_status needs_choose(needs *n, const ckd_id *ids, size_t count, bool dead, ckd_error *err);
/* The chosen ones, newest generations only, dependents before what they depend on. NOMEM; CORRUPT if they depend on each other in a circle. */
ckd_status needs_order(need ***out, size_t *count, needs *n, ckd_error *err);
/*
 * Calls `visit` with every checkpoint that a living writer may come to depend on, each once: what its intent names, and all that this
 * builds on, down to bases. Where a compaction has replaced a generation since the writer began, the writer may have opened the old one, which builds on
 * more. `named`: by the intent itself. Under the publish lock no writer begins meanwhile. Errors: those of `visit`; IO, CORRUPT and
 * UNSUPPORTED (an intent that cannot be read: what it needs is not known), NOMEM.
 */
typedef ckd_status (*in_use_fn)(void *context, need *used, bool named, const intent *live, ckd_error *err);
ckd_status needs_visit_in_use(needs *n, const ckd_store *store, in_use_fn visit, void *context,
                              ckd_error *err);

#endif
