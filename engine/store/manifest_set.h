/*
 * All manifests of a store, those of deleted checkpoints included, and what writers at work name. Internal to engine/.
 */
#ifndef ENGINE_STORE_MANIFEST_SET_H
#define ENGINE_STORE_MANIFEST_SET_H

#include "engine/store/store.h"

typedef struct manifest_entry {
    manifest m;
    tombstone tombstone; /* if in_trash */
    bool in_trash;       /* in the trash */
    bool chosen;         /* by the caller, of whom this is */
    bool superseded;     /* a newer generation of the same checkpoint counts */
    bool in_use;         /* a writer at work may read its files (manifest_set_mark_in_use) */
    bool was_own_only;   /* an early version wrote it, and its older files were found by its dependencies */
    bool lacks;          /* and one of these has no manifest, so that some of its files are not known */
    bool held;           /* one that lacks a manifest depends on it: it is neither removed nor rewritten */
    size_t order_index;  /* scratch of compact_order */
} manifest_entry;

typedef struct manifest_set {
    manifest_entry
        *items; /* by checkpoint id; several generations of one stand together, the highest first */
    size_t count;
} manifest_set;

/*
 * Reads all manifests and tombstones; manifests of early versions are given the files of what they depend on. Under the publish lock. Errors: CORRUPT and UNSUPPORTED (of one that cannot be read: nothing is
 * known about what it needs), IO, NOMEM.
 */
ckd_status manifest_set_read(manifest_set *out, const ckd_store *store, ckd_error *err);
void manifest_set_free(manifest_set *n);

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err);
/*
 * Makes a tombstone durable. replaces: in place of the one of this run, step and generation; else none may be there. Under the
 * publish lock. Errors: EXISTS, IO, NOSPACE, NOMEM.
 */
ckd_status tombstone_write(const ckd_store *store, const tombstone *t, bool replaces, ckd_error *err);

/* The first of the checkpoint's generations; NULL: there is none. */
manifest_entry *manifest_set_find(const manifest_set *n, const ckd_id *id);
/* Chooses the checkpoints, all generations of them. NOT_FOUND unless each is there and dead or not, as asked for; INVALID if one is there twice. */
ckd_status manifest_set_choose(manifest_set *n, const ckd_id *ids, size_t count, bool dead, ckd_error *err);
/*
 * Sets in_use of every generation of the checkpoints that the intents of living writers name: their files stay, whatever becomes of the checkpoints. Under the
 * publish lock, so that no writer begins meanwhile. Errors: IO, CORRUPT and UNSUPPORTED (an intent that cannot be read: what it names is not known), NOMEM.
 */
ckd_status manifest_set_mark_in_use(manifest_set *n, const ckd_store *store, ckd_error *err);

/* ---- early_manifests.c: manifests of early versions, which name own files only ---- */
/* For manifest_set_read: gives them the files that the newest manifests of their dependencies name, and sets was_own_only, lacks and held. Errors: NOMEM. */
ckd_status manifest_set_complete(manifest_set *n, ckd_error *err);
/*
 * Publishes a manifest that names all files of x, which must not lack any: a next generation, or in the trash one in place of the old one. Under the publish lock; the catalog is the
 * caller's. Errors: UNSUPPORTED (the last generation), IO, NOSPACE, NOMEM.
 */
ckd_status manifest_entry_name_files(manifest_entry *x, const ckd_store *store, ckd_error *err);
/* Does that for all that have one of an early version and lack none, so that what they depend on can be rewritten. Errors: as manifest_entry_name_files. */
ckd_status manifest_set_name_all(manifest_set *n, const ckd_store *store, ckd_error *err);
/* Does that for those that depend on chosen ones, so that these can go. Errors: as manifest_entry_name_files. */
ckd_status manifest_set_name_older_files(manifest_set *n, const ckd_store *store, ckd_error *err);

#endif
