/* The state of a repair, for repair.c and repair_lost.c. */
#ifndef ENGINE_INTEGRITY_REPAIR_H
#define ENGINE_INTEGRITY_REPAIR_H

#include "engine/integrity/internal.h"

typedef struct bad_file {
    file_ref file;
    const live_file *f; /* NULL: no manifest names it */
    bool repaired;
} bad_file;

typedef struct bad_row {
    const parity_set *s;
    uint32_t rows; /* bit set */
} bad_row;

typedef struct repairing {
    ckd_store *store;
    const ckd_repair_options *options;
    ckd_repair_result *result;
    size_t repaired_capacity;
    damage_list damage;
    live_files files;
    parity_sets sets;
    throttled_check check;
    rate_limiter limiter;
    bad_file *bad;
    size_t bad_count;
    bad_row *rows;
    size_t row_count;
} repairing;

/* ---- repair.c ---- */

/* The path inside the store. */
const char *repair_inside(const repairing *r, const char *path);
/* Adds a repaired file to the result, and drops its damage. aside: "" for none. Errors: NOMEM. */
ckd_status repair_report(repairing *r, const char *path, const char *aside, uint64_t size, ckd_error *err);

/* ---- repair_identity.c ---- */

/*
 * Writes data/store again if it is damaged or missing. One that cannot be read now, or that another version wrote,
 * stays. Takes the publish lock. Errors: BUSY, READ_ONLY, NOSPACE, IO, NOMEM.
 */
ckd_status repair_identity(repairing *r, ckd_error *err);

/* ---- repair_aside.c: intact files in data/q ---- */

/* Looks for the file in data/q. Errors: NOMEM. */
ckd_status repair_find_aside(bool *found, pathname *out, const ckd_store *store, const file_ref *file,
                             ckd_error *err);
/*
 * Moves files with records of lost checkpoints back to data/c, where a repair of manifests finds them. *any: set if
 * there was one. Takes the publish lock. Errors: BUSY, IO, NOMEM.
 */
ckd_status repair_return_aside(bool *any, ckd_store *store, const vanished *v, ckd_error *err);

/* ---- repair_lost.c: checkpoints whose manifests are lost ---- */

/*
 * Reads the files that no manifest names, if parity covers them, and adds the damaged ones to the bad files. Errors: as
 * vanished_find; those of the rate limiter.
 */
ckd_status repair_look_at_strays(repairing *r, ckd_error *err);
/*
 * Lists lost checkpoints again, as far as their files are there or can be rebuilt. Errors: NOT_FOUND (the checkpoint
 * that the options name is not lost), those of repair_rebuild and repair_manifest.
 */
ckd_status repair_lost(repairing *r, ckd_error *err);

#endif
