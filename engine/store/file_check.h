/* Checks a whole chunk file for damage, for verify and scrub. Internal to engine/. */
#ifndef ENGINE_FILE_CHECK_H
#define ENGINE_FILE_CHECK_H

#include "engine/store/damage.h"

typedef struct file_check {
    const ckd_store *store;
    damage_list *damage;
    const dependency_info *lineages; /* to name the checkpoints that need damaged records; may be empty */
    size_t lineage_count;
    bytes *payload;   /* scratch */
    const char *path; /* NULL: the file under its own name; else a file that is about to get that name */
    /* Called after each record with the bytes read, unless NULL. A status other than CKD_OK ends the check. */
    ckd_status (*pace)(void *context, uint64_t stored_bytes, ckd_error *err);
    void *throttle_context;
} file_check;

/*
 * Opens a chunk file, at this path, that a manifest names. Errors: CORRUPT (also: another file), NOT_FOUND, UNSUPPORTED,
 * IO, NOMEM.
 */
ckd_status open_named_file(chunk **out, const ckd_store *store, const char *path, const file_ref *file,
                           ckd_error *err);

/*
 * Checks that it is the file that the manifest names, and that its contents are intact. Adds damage to the list;
 * `checkpoint` is named if the file cannot be opened. Decodes nothing. Errors: those of pace, IO, NOMEM.
 */
ckd_status check_named_file(const file_check *f, const file_ref *file, const char *checkpoint,
                            ckd_error *err);

#endif
