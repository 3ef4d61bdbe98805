/* A safetensors file made from a checkpoint: tensors are loaded piece by piece, verified, and written. */
#ifndef CLI_TENSOR_FILE_H
#define CLI_TENSOR_FILE_H

#include "cli/output/progress.h"
#include "cli/convert/rank_content.h"
#include "cli/files/safetensors.h"

/* The content to write. Names belong to the load. Zero-initialise; release with file_content_free. */
typedef struct file_content {
    safetensors_tensor *tensors; /* `number` is their index in the arrays below */
    size_t count;
    ckd_region *regions;  /* a box per tensor; NULL: whole tensors */
    rank_content of_rank; /* with a layout; then there are no regions */
    ckd_dtype *stored;    /* dtypes to cast from; NULL: no casts */
    uint64_t data_size;
    char *header;
    size_t header_size;
} file_content;
void file_content_free(file_content *c);

/* Assigns the tensors' offsets in the file and makes its header. Errors: UNSUPPORTED, NOMEM. */
ckd_status file_content_arrange(file_content *c, json_t *metadata, ckd_error *err);
/* Loads the files' metadata stored by `save`; NULL if there is none. */
#define METADATA_BLOB "safetensors.metadata"
ckd_status file_metadata(json_t **out, ckd_load *load, ckd_error *err);

/* Writes files, one after the other. Signals are caught from the start. verb: for the progress line. */
typedef struct file_writing {
    ckd_load *load;
    cli_progress progress;
    uint64_t done, total; /* bytes of data */
    void *buffer, *room;  /* 16 MiB each */
} file_writing;
ckd_status file_writing_begin(file_writing *w, ckd_load *load, const char *verb, uint64_t total, bool quiet,
                              ckd_error *err);
/*
 * Writes a file, which appears complete or not at all. Errors: those of ckd_load_tensor and of cli_output_*; CANCELLED.
 */
ckd_status file_content_write(file_writing *w, const file_content *c, const char *path, bool force,
                              ckd_error *err);
void file_writing_end(file_writing *w);

#endif
