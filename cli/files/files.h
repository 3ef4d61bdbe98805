/* The interface of cli/files/ for other rooms. README.md has an overview. */
#ifndef CLI_FILES_FILES_H
#define CLI_FILES_FILES_H

#include <jansson.h>
#include <sys/types.h>
#include <time.h>

#include "ckptdelta.h"
#include "cli/output/output.h"

typedef struct cli_outputs cli_outputs;

/* --blob NAME=FILE: files saved as blobs, and blobs loaded into files. FILE - is standard input or output. */

/* The blob in which `save` stores its files' metadata. No --blob may have this name. */
#define METADATA_BLOB "safetensors.metadata"

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
/* Loads all blobs into memory. Blobs loaded before are released. */
ckd_status cli_blobs_load(cli_blobs *blobs, ckd_load *load, ckd_error *err);
/*
 * Writes the loaded blobs, those to standard output last, and adds their files to those that appear together (see
 * below).
 */
ckd_status cli_blobs_write(const cli_blobs *blobs, bool force, cli_outputs *set, ckd_error *err);
/* Returns how many of them have the FILE -. */
size_t cli_blobs_standard(const cli_blobs *blobs);
void cli_blobs_free(cli_blobs *blobs);

/* Casts between f64, f32, f16 and bf16, and means of them; rounded once, to nearest even. */

/* Is it one of these four? */
bool cli_is_float(ckd_dtype dtype);
/* Reads one value at any alignment. A NaN stays a NaN. */
double cli_float_read(const void *from, ckd_dtype dtype);
void cli_float_write(void *to, double value, ckd_dtype dtype);
void cli_cast(void *to, ckd_dtype to_dtype, const void *from, ckd_dtype from_dtype, size_t count);

/*
 * Means are summed in double in the given order, divided, and rounded once to the dtype. The first function adds
 * `count` values to the sums; the second computes the means over `copies` values each.
 */
void cli_mean_add(double *sums, const void *values, ckd_dtype dtype, size_t count);
void cli_mean_end(void *values, const double *sums, ckd_dtype dtype, size_t count, size_t copies);

/* Roles of tensors: --role PATTERN=ROLE, the first match; otherwise from the names of all tensors together. */

typedef struct cli_role_rule {
    char *pattern; /* glob; * also matches dots and slashes */
    ckd_role role;
    bool used;
} cli_role_rule;

typedef struct cli_roles {
    cli_role_rule *rules;
    size_t count;
} cli_roles;

/* Returns AUTO for an unknown name. */
ckd_role cli_role_by_name(const char *name);
/* Adds "PATTERN=ROLE". INVALID if it is malformed. */
ckd_status cli_roles_add(cli_roles *roles, const char *text, ckd_error *err);
/* Returns the role by --role; AUTO: no rule matches. Marks the rule as used. */
ckd_role cli_roles_given(cli_roles *roles, const char *tensor);
/*
 * Finds the roles of a checkpoint's tensors from names, dtypes and shapes. metadata (may be NULL) may give the order of
 * optimizers' parameters, under PREFIX.param_groups or PREFIX.param_names. Marks rules as used. Errors: NOMEM.
 */
ckd_status cli_roles_find(ckd_tensor_role *out, cli_roles *roles, ckd_tensor_name *tensors, size_t count,
                          json_t *metadata, ckd_error *err);
void cli_roles_free(cli_roles *roles);

/*
 * Reader and writer of the safetensors format: an 8-byte little-endian header length, a JSON object, the tensors'
 * bytes. Source: github.com/huggingface/safetensors, README ("Format") and safetensors/src/tensor.rs.
 *
 * Files are hostile input. Everything in a header is checked against the file's size before it is used; data is read in
 * slices with pread. Errors name the file, the tensor and the offset. A violation of the format is CORRUPT; valid
 * content unknown to this program (a dtype, a field) is UNSUPPORTED.
 */

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
/* Reads exactly `size` bytes of the file. IO if it has become shorter since it was opened. */
ckd_status safetensors_read_bytes(const safetensors_file *file, uint64_t offset, void *to, size_t size,
                                  ckd_error *err);
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

/* Reads small values in large slices, 1 MiB at a time in total (read_ahead.c). Returns NULL if out of memory. */
typedef struct cli_read_ahead cli_read_ahead;
cli_read_ahead *cli_read_ahead_new(void);
/* As safetensors_read_bytes; the bytes must exist in the file. */
ckd_status cli_read_ahead_read(cli_read_ahead *a, const safetensors_file *file, uint64_t begin, void *to,
                               size_t size, ckd_error *err);
void cli_read_ahead_free(cli_read_ahead *a); /* accepts NULL */

/* The files of one save, combined: every tensor once, and the metadata of all. */

typedef struct cli_input {
    const safetensors_file *file;
    const safetensors_tensor *tensor;
    ckd_role role;
    const char *weight;             /* the tensor that it belongs to; NULL: unknown */
    bool largest;                   /* an exp_avg_sq that is AMSGrad's running maximum */
    bool in_doubt;                  /* its name looks like optimizer state, but no weight belongs to it */
    const ckd_optimizer *optimizer; /* NULL: none */
    cli_read_ahead *ahead;          /* shared by all inputs; NULL: no read is small */
    ckd_read_fn read;               /* NULL: the values come from the file's tensor */
    void *context;
} cli_input;

typedef struct cli_inputs {
    safetensors_file **files;
    size_t file_count;
    cli_input *tensors; /* in save order: masters first, so that their copies are recognised */
    size_t count;
    json_t *metadata; /* of all files; NULL if none has any */
    uint64_t bytes;   /* of all tensors */
    cli_read_ahead *ahead;
} cli_inputs;

/*
 * Opens and checks all files. INVALID if two files have the same tensor, or different values for the same metadata key.
 * Release with cli_inputs_close, also after a failure.
 */
ckd_status cli_inputs_open(cli_inputs *out, char *const *paths, size_t count, cli_roles *roles,
                           ckd_error *err);
/* Reads `count` elements of a file's tensor from `first` on. IO if the file has been truncated. */
ckd_status cli_input_read(const cli_input *input, uint64_t first, uint64_t count, void *to, ckd_error *err);
/* Sets the roles of all tensors together, then moves masters to the front. */
ckd_status cli_inputs_set_roles(cli_inputs *inputs, cli_roles *roles, ckd_error *err);
/* Returns what determines the role of a file's tensor. */
ckd_tensor_name cli_tensor_name(const safetensors_tensor *tensor);
/* IO if a file was modified meanwhile. */
ckd_status cli_inputs_check_unchanged(const cli_inputs *inputs, ckd_error *err);
void cli_inputs_close(cli_inputs *inputs);

/*
 * A file that appears complete or not at all. It is written under the temporary name .FILE.tmp-PID-N beside it, synced,
 * then renamed. Dropping it leaves nothing behind. It takes over the mode of a file that it replaces, and its owner and
 * group if that is allowed.
 */

typedef struct cli_output cli_output;

/* Is the output standard output? It receives bytes immediately, so it is incomplete after a failure. */
bool cli_output_is_standard(const char *path);
/*
 * EXISTS if `path` exists, unless `force` is set and it is a regular file. Call it first, so that no time is spent on a
 * load that cannot be stored.
 */
ckd_status cli_output_check(const char *path, bool force, ckd_error *err);
/* INVALID if the file or folder would be inside the store. Its folders need not exist. */
ckd_status cli_output_check_outside(const char *path, const char *store, ckd_error *err);
/* INVALID if two of the paths name one file. */
ckd_status cli_outputs_check_distinct(const char *const *paths, size_t count, ckd_error *err);
/* Creates all missing parent folders of the path, durably. */
ckd_status cli_output_make_folders(const char *path, ckd_error *err);
/* Creates the temporary file, and reserves `size` bytes if the file system can. Removes those of killed processes. */
ckd_status cli_output_open(cli_output **out, const char *path, bool force, uint64_t size, ckd_error *err);
/* CANCELLED if a signal was caught while standard output took nothing. */
ckd_status cli_output_write(cli_output *output, const void *data, size_t size, ckd_error *err);
/* Returns CANCELLED; the message says what a signal has left of the output. */
ckd_status cli_output_interrupted(const cli_output *output, ckd_error *err);
/*
 * Syncs the file, renames it (replacing an existing file only with `force`), and syncs the directory. Always frees it.
 */
ckd_status cli_output_commit(cli_output *output, ckd_error *err);
/* Does all of this for bytes in memory. set: add the file to it; NULL: commit it. */
ckd_status cli_output_bytes(const char *path, bool force, const void *data, size_t size, cli_outputs *set,
                            ckd_error *err);
/* Makes the names in a folder durable. */
ckd_status cli_output_sync_folder(const char *path, ckd_error *err);
/* Removes the temporary file. Accepts NULL. */
void cli_output_drop(cli_output *output);

/*
 * Files of one command, which appear together: all are complete and durable before the first one gets its name. Only a
 * crash between two renames leaves some of them. Zero-initialise; end with cli_outputs_publish or cli_outputs_drop.
 */
struct cli_outputs {
    cli_output **items;
    size_t count;
};

/* Syncs the file and adds it under its temporary name. After a failure it is dropped. */
ckd_status cli_outputs_add(cli_outputs *set, cli_output *output, ckd_error *err);
/*
 * Renames all files, then syncs each folder once. After a failure, none of the files is there, except those that have
 * replaced others. Always frees them.
 */
ckd_status cli_outputs_publish(cli_outputs *set, ckd_error *err);
void cli_outputs_drop(cli_outputs *set);

/*
 * A thread that writes to outputs, one buffer at a time, while its owner fills another one. Returns NULL if it has
 * none.
 */
typedef struct cli_writer cli_writer;
cli_writer *cli_writer_new(void);
/*
 * Begins to write once the write before is complete, and returns its error if it failed. The data must not change
 * before the next call.
 */
ckd_status cli_writer_write(cli_writer *w, cli_output *output, const void *data, size_t size, ckd_error *err);
/* Returns when nothing is being written: before the output ends. */
ckd_status cli_writer_wait(cli_writer *w, ckd_error *err);
void cli_writer_free(cli_writer *w); /* accepts NULL */

/* Waits until poll() finds one of the events. False: a signal was caught. */
bool cli_wait_for(int fd, short events);

/*
 * Creates a file or folder (by the type in `mode`) named .NAME.KIND-PID-N beside the path, and locks it. *name is
 * malloc'ed. The writer keeps *fd, and so the lock, until the file is renamed.
 */
ckd_status cli_temporary_create(char **name, int *fd, const char *path, const char *kind, mode_t mode,
                                ckd_error *err);
/*
 * Removes temporary files, or folders, of the kind "tmp" beside the path that nobody has locked, and that have not
 * changed for min_age seconds. A killed process leaves one as large as its output.
 */
void cli_temporaries_remove(const char *path, bool folders, int min_age);
/* Removes a folder with all that is in it. */
void cli_remove_folder(const char *path);

/* The part of each tensor to load: --shard I/N --dim D, --region NAME=[a:b,c:d]. */

/* first ... end - 1 of each of the first `ndim` dimensions; later dimensions are whole. */
typedef struct cli_region {
    char *tensor;
    uint32_t ndim;
    uint64_t first[CKD_MAX_DIMS], end[CKD_MAX_DIMS]; /* UINT64_MAX: to the end */
    bool used;
} cli_region;

/*
 * Parses a dimension: from 0, or counted back from the last one, which is -1. Returns false if no tensor can have it.
 * For a tensor of ndim dimensions, cli_dim_of gives its index; CKD_MAX_DIMS: there is none.
 */
bool cli_parse_dim(int32_t *out, const char *text);
uint32_t cli_dim_of(int32_t dim, uint32_t ndim);

typedef struct cli_regions {
    uint64_t shard, shards; /* shards 0: no --shard */
    int32_t dim;
    bool dim_given;
    cli_region *items;
    size_t count;
} cli_regions;

/*
 * Parsers of options. INVALID, with the expected form, for any other text, and for a second region of the same tensor.
 */
ckd_status cli_regions_set_shard(cli_regions *r, const char *text, ckd_error *err); /* "I/N", I from 0 */
ckd_status cli_regions_set_dim(cli_regions *r, const char *text, ckd_error *err);
ckd_status cli_regions_add(cli_regions *r, const char *text, ckd_error *err); /* "NAME=[a:b,c:d]" */
void cli_regions_free(cli_regions *r);

/* Does the tensor have its own --region? Marks it as used. */
bool cli_regions_names(cli_regions *r, const char *tensor);
/*
 * Finds the part of a tensor to load. This is its own region; else the shard, cut as torch.chunk does (may be empty),
 * if the tensor has the dimension; else the whole tensor. `lengths` gets info->ndim lengths. INVALID if the region is
 * not inside the tensor.
 */
ckd_status cli_regions_find(ckd_region *out, uint64_t lengths[CKD_MAX_DIMS], const cli_regions *r,
                            const ckd_tensor_info *info, ckd_error *err);

/*
 * Cuts a box into slices of at most `max` elements, but at least one, in row-major order. Calls `each` until it fails.
 */
typedef ckd_status (*cli_box_fn)(void *context, const ckd_region *slice, uint64_t elements, ckd_error *err);
ckd_status cli_cut_box(const ckd_region *box, uint32_t ndim, uint64_t max, cli_box_fn visit, void *context,
                       ckd_error *err);

#endif
