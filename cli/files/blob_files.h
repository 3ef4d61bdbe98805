/* --blob NAME=FILE: files saved as blobs, and blobs loaded into files. */
#ifndef CLI_BLOB_FILES_H
#define CLI_BLOB_FILES_H

#include "cli/output/errors.h"

typedef struct cli_blob {
    char *name;
    const char *path;
    void *data; /* if loaded: release with ckd_blob_free */
    size_t size;
} cli_blob;

/* Zero-initialise; release with cli_blobs_free. */
typedef struct cli_blobs {
    cli_blob *items;
    size_t count;
} cli_blobs;

/* Adds NAME=FILE; the text must stay valid. Errors: INVALID (no NAME or FILE, a duplicate name), NOMEM. */
ckd_status cli_blobs_add(cli_blobs *blobs, const char *text, ckd_error *err);
/* Reads each file and saves it as a blob. Errors: those of the files and of ckd_save_blob. */
ckd_status cli_blobs_save(const cli_blobs *blobs, ckd_save *save, ckd_error *err);
/* EXISTS if one of the files exists, unless `force`. */
ckd_status cli_blobs_check_outputs(const cli_blobs *blobs, bool force, ckd_error *err);
/* Loads all blobs into memory. Blobs loaded before are released. */
ckd_status cli_blobs_load(cli_blobs *blobs, ckd_load *load, ckd_error *err);
/* Writes the loaded blobs. Each file appears complete or not at all. */
ckd_status cli_blobs_write(const cli_blobs *blobs, bool force, ckd_error *err);
void cli_blobs_free(cli_blobs *blobs);

#endif
