/*
 * The safetensors format, reader and writer: 8 bytes little endian header length, a JSON object, the tensors' bytes.
 * Source: github.com/huggingface/safetensors, README ("Format") and safetensors/src/tensor.rs.
 *
 * A file is read as hostile: everything its header says is checked against the file's size before it is used, and data is
 * read in pieces by pread. Errors name the file, the tensor and the offset. What a file gets wrong is CORRUPT; what it gets
 * right but this program does not know (a dtype, a field) is UNSUPPORTED.
 */
#ifndef CLI_SAFETENSORS_H
#define CLI_SAFETENSORS_H

#include <sys/types.h>
#include <time.h>

#include <jansson.h>

#include "ckptdelta.h"

/* The reference implementation reads no longer headers. */
#define SAFETENSORS_HEADER_MAX 100000000u

typedef struct safetensors_tensor {
    const char *name;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t elements;
    uint64_t begin, size; /* bytes; begin counts from the first byte of data, behind the header */
    size_t number;        /* the writer's own: which of its tensors this is */
} safetensors_tensor;

/* What a header says: tensors in the order of their data, without overlaps or holes. */
typedef struct safetensors_header {
    safetensors_tensor *tensors;
    size_t count;
    json_t *metadata; /* string -> string; NULL if there is none */
} safetensors_header;

/* "F32", "F8_E4M3", ...: the format's names. NULL and CKD_DTYPE_NONE for unknown ones. */
const char *safetensors_dtype_name(ckd_dtype dtype);
ckd_dtype safetensors_dtype(const char *name);

/*
 * Reads `length` bytes of header of a file with `data_size` bytes behind it. `path` is for messages. Release with
 * safetensors_header_free, which accepts what a failure has left.
 */
ckd_status safetensors_parse(safetensors_header *out, const char *json, size_t length, uint64_t data_size,
                             const char *path, ckd_error *err);
void safetensors_header_free(safetensors_header *header);

typedef struct safetensors_file {
    char *path;
    int fd;
    uint64_t data_begin; /* offset of the first byte of data in the file */
    uint64_t size;       /* of the whole file */
    struct timespec modified;
    dev_t device;
    ino_t inode;
    safetensors_header header;
} safetensors_file;

/*
 * Opens and checks a file. "-" is standard input. What comes through a pipe is copied into an unnamed file in TMPDIR (/tmp) first, as
 * values are read out of order. Errors: NOT_FOUND, IO, CORRUPT, UNSUPPORTED, NOMEM. */
ckd_status safetensors_open(safetensors_file **out, const char *path, ckd_error *err);
void safetensors_close(safetensors_file *file); /* accepts NULL */
/* `count` elements of a tensor of this file from `first` on. IO if the file has become shorter. */
ckd_status safetensors_read(const safetensors_file *file, const safetensors_tensor *tensor, uint64_t first,
                            uint64_t count, void *to, ckd_error *err);
/* IO if the file was written to since it was opened: what was read may be a mixture. */
ckd_status safetensors_check_unchanged(const safetensors_file *file, ckd_error *err);

/*
 * Sorts tensors into the order they are written in (larger elements first, as the reference writer does, so that every
 * tensor is aligned; else as they come), sets their `size` and `begin`, and adds up `data_size`.
 */
ckd_status safetensors_arrange(uint64_t *data_size, safetensors_tensor *tensors, size_t count,
                               ckd_error *err);
/*
 * All that comes before the data: length, JSON, and spaces up to a multiple of 8 bytes. metadata may be NULL. The bytes are
 * the caller's: free(). UNSUPPORTED if a tensor cannot be said in this format.
 */
ckd_status safetensors_format_header(char **out, size_t *size, const safetensors_tensor *tensors,
                                     size_t count, json_t *metadata, ckd_error *err);

/* Metadata as canonical JSON text (sorted keys, no spaces); free() it. NULL if out of memory. */
char *safetensors_metadata_text(json_t *metadata);
/* The opposite, checked. UNSUPPORTED if it is not an object of strings. */
ckd_status safetensors_metadata_parse(json_t **out, const char *text, size_t size, ckd_error *err);

#endif
