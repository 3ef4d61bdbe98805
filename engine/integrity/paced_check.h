/* Looking for damage in listed chunk files, slowly, and without keeping collections waiting. Internal to engine/. */
#ifndef ENGINE_PACED_CHECK_H
#define ENGINE_PACED_CHECK_H

#include "engine/store/listed_files.h"
#include "engine/common/pace.h"

typedef struct paced_check {
    ckd_store *store;
    damage_list *damage;
    const listed_files *files;
    pace *pace;
    bytes payload;     /* released with bytes_free */
    file_lock *reader; /* until a file is open; NULL between calls */
} paced_check;

/*
 * Reads a file through. *right: it is still needed, there and undamaged; *listed: it is still needed. Both may be NULL. Errors: those of the pace, BUSY, IO,
 * NOMEM.
 */
ckd_status paced_check_file(bool *right, bool *listed, paced_check *c, const listed_file *f, ckd_error *err);

#endif
