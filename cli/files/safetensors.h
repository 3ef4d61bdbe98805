/*
 * Reader and writer of the safetensors format: an 8-byte little-endian header length, a JSON object, the tensors'
 * bytes. Source: github.com/huggingface/safetensors, README ("Format") and safetensors/src/tensor.rs.
 *
 * Files are hostile input. Everything in a header is checked against the file's size before it is used; data is read in
 * pieces with pread. Errors name the file, the tensor and the offset. A violation of the format is CORRUPT; valid
 * content unknown to this program (a dtype, a field) is UNSUPPORTED.
 */
#ifndef CLI_SAFETENSORS_H
#define CLI_SAFETENSORS_H

#include <sys/types.h>
#include <time.h>

#include <jansson.h>

#include "ckptdelta.h"

/* The reference implementation rejects longer headers. */
#define SAFETENSORS_HEADER_MAX 100000000u

typedef struct safetensors_tensor {
    const char *name;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t elements;
    uint64_t begin, size; /* bytes; begin counts from the first byte of data, after the header */
    size_t number;        /* for the writer: index among its tensors */
} safetensors_tensor;

/* A parsed header: tensors in the order of their data, without overlaps or gaps. */
typedef struct safetensors_header {
    safetensors_tensor *tensors;
    size_t count;
    json_t *metadata; /* string -> string; NULL if absent */
} safetensors_header;

/* The format's names: "F32", "F8_E4M3", ... NULL and CKD_DTYPE_NONE for unknown ones. */
const char *safetensors_dtype_name(ckd_dtype dtype);
ckd_dtype safetensors_dtype(const char *name);

/*
 * Parses a header of `length` bytes from a file with `data_size` bytes of data. `path` is for messages. Release with
 * safetensors_header_free, also after a failure.
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
 * Opens and checks a file. "-" is standard input. Values are read out of order, so input from a pipe is first copied
 * into an unnamed file in TMPDIR (/tmp). Errors: NOT_FOUND, IO, CORRUPT, UNSUPPORTED, NOMEM.
 */
ckd_status safetensors_open(safetensors_file **out, const char *path, ckd_error *err);
void safetensors_close(safetensors_file *file); /* accepts NULL */
/* Reads `count` elements of a tensor of this file from `first` on. IO if the file has been truncated. */
ckd_status safetensors_read(const safetensors_file *file, const safetensors_tensor *tensor, uint64_t first,
                            uint64_t count, void *to, ckd_error *err);
/* IO if the file was modified after it was opened: the values read may be a mixture. */
ckd_status safetensors_check_unchanged(const safetensors_file *file, ckd_error *err);

/*
 * Sorts tensors into writing order: larger elements first, as in the reference writer, so that every tensor is aligned;
 * otherwise in input order. Sets their `size` and `begin`, and sums up `data_size`.
 */
ckd_status safetensors_arrange(uint64_t *data_size, safetensors_tensor *tensors, size_t count,
                               ckd_error *err);
/*
 * Makes everything before the data: length, JSON, and spaces up to a multiple of 8 bytes. metadata may be NULL. The
 * caller frees the bytes with free(). UNSUPPORTED if the format cannot express a tensor.
 */
ckd_status safetensors_format_header(char **out, size_t *size, const safetensors_tensor *tensors,
                                     size_t count, json_t *metadata, ckd_error *err);

/* Returns metadata as canonical JSON (sorted keys, no spaces); free() it. NULL if out of memory. */
char *safetensors_metadata_text(json_t *metadata);
/* Parses and checks such text. UNSUPPORTED if it is not an object of strings. */
ckd_status safetensors_metadata_parse(json_t **out, const char *text, size_t size, ckd_error *err);

#endif
