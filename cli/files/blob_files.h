/* --blob NAME=FILE: files that go into a checkpoint as blobs, and blobs that come out as files. */
#ifndef CLI_BLOB_FILES_H
#define CLI_BLOB_FILES_H

#include "cli/output/errors.h"

typedef struct cli_blob {
    char *name;
    const char *path;
    void *data; /* of a loaded one: release with ckd_blob_free */
    size_t size;
} cli_blob;

/* Zero-initialise; release with cli_blobs_free. */
typedef struct cli_blobs {
    cli_blob *items;
    size_t count;
} cli_blobs;

/* Adds NAME=FILE; the text must stay. Errors: INVALID (no NAME or FILE, a name that is taken), NOMEM. */
ckd_status cli_blobs_add(cli_blobs *blobs, const char *text, ckd_error *err);
/* Reads each file and stores it. Errors: those of the files and of ckd_save_blob. */
ckd_status cli_blobs_save(const cli_blobs *blobs, ckd_save *save, ckd_error *err);
/* EXISTS if one of the files exists, unless `force`. */
ckd_status cli_blobs_check_outputs(const cli_blobs *blobs, bool force, ckd_error *err);
/* Loads all of them into memory; those that were loaded before are released. */
ckd_status cli_blobs_load(cli_blobs *blobs, ckd_load *load, ckd_error *err);
/* Writes those that were loaded; each file appears complete or not at all. */
ckd_status cli_blobs_write(const cli_blobs *blobs, bool force, ckd_error *err);
void cli_blobs_free(cli_blobs *blobs);

#endif
