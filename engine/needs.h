/*
 * All manifests of a store, those of deleted checkpoints included, and what writers at work name. Internal to engine/.
 */
#ifndef ENGINE_NEEDS_H
#define ENGINE_NEEDS_H

#include "engine/store.h"

typedef struct need {
    manifest m;
    tombstone dead;    /* if is_dead */
    bool is_dead;      /* in the trash */
    bool chosen;       /* by the caller, of whom this is */
    bool superseded;   /* a newer generation of the same checkpoint counts */
    bool in_use;       /* a writer at work may read its files (needs_mark_in_use) */
    bool was_own_only; /* an early version wrote it, and its older files were found by its dependencies */
    size_t place;      /* scratch of compact_order */
} need;

typedef struct needs {
    need *items; /* by checkpoint id; several generations of one stand together, the highest first */
    size_t count;
} needs;

/*
 * Reads all manifests and tombstones; manifests of early versions are given the files of what they depend on. Under the publish lock. Errors: CORRUPT and UNSUPPORTED (of one that cannot be read: nothing is
 * known about what it needs), IO, NOMEM.
 */
ckd_status needs_read(needs *out, const ckd_store *store, ckd_error *err);
void needs_free(needs *n);

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err);

/* The first of the checkpoint's generations; NULL: there is none. */
need *needs_find(const needs *n, const ckd_id *id);
/* Chooses the checkpoints, all generations of them. NOT_FOUND unless each is there and dead or not, as asked for; INVALID if one is there twice. */
ckd_status needs_choose(needs *n, const ckd_id *ids, size_t count, bool dead, ckd_error *err);
/*
 * Sets in_use of every generation of the checkpoints that the intents of living writers name: their files stay, whatever becomes of the checkpoints. Under the
 * publish lock, so that no writer begins meanwhile. Errors: IO, CORRUPT and UNSUPPORTED (an intent that cannot be read: what it names is not known), NOMEM.
 */
ckd_status needs_mark_in_use(needs *n, const ckd_store *store, ckd_error *err);
/*
 * Manifests of early versions find their older files by the manifests of their dependencies: before chosen ones go, those that build on them are published as a
 * next generation that names these files. Under the publish lock. Errors: IO, NOSPACE, NOMEM.
 */
ckd_status needs_name_older(needs *n, const ckd_store *store, ckd_error *err);

#endif
