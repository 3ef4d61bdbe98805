/* Looking for damage in a chunk file, all of it: of verify and scrub. Internal to engine/. */
#ifndef ENGINE_FILE_CHECK_H
#define ENGINE_FILE_CHECK_H

#include "engine/store/damage.h"

typedef struct file_check {
    const ckd_store *store;
    damage_list *damage;
    const dependency_info *lineages; /* to name who needs damaged records; may be none */
    size_t lineage_count;
    bytes *payload;   /* to work with */
    const char *path; /* NULL: where its name says; else where a file stands that is to get the name */
    /* NULL, or told of every record that was read, with what it takes; what it returns but CKD_OK ends the check. */
    ckd_status (*pace)(void *context, uint64_t stored_bytes, ckd_error *err);
    void *throttle_context;
} file_check;

/*
 * Whether it is the file that a manifest names, and all in it is right. Damage goes into the list; `checkpoint` is named where a file cannot be opened. Nothing is
 * decoded. Errors: those of pace, IO, NOMEM.
 */
ckd_status check_named_file(const file_check *f, const file_ref *file, const char *checkpoint,
                            ckd_error *err);

#endif
