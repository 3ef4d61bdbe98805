/* The interface of cli/convert/ for other rooms. README.md has an overview. */
#ifndef CLI_CONVERT_CONVERT_H
#define CLI_CONVERT_CONVERT_H

#include <regex.h>

#include "cli/convert/rank_content.h"
#include "cli/files/files.h"
#include "cli/layout/layout.h"
#include "cli/output/output.h"

/* A safetensors file made from a checkpoint: tensors are loaded slice by slice, verified, and written. */

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
ckd_status file_metadata(json_t **out, ckd_load *load, ckd_error *err);

/*
 * Writes files, one after the other. Signals are caught from the start. verb: for the progress line. With several
 * threads, one buffer is written while the other one is filled.
 */
typedef struct file_writing {
    ckd_load *load;
    cli_progress progress;
    uint64_t done, total; /* bytes of data */
    char *memory;         /* of both buffers and of `scratch`, 16 MiB each */
    char *buffer, *other, *scratch;
    size_t filled;      /* bytes of `buffer` */
    cli_writer *writer; /* NULL: none */
    cli_output *output; /* of the file in progress, and whether the writer writes it */
    bool behind;
} file_writing;
ckd_status file_writing_begin(file_writing *w, ckd_load *load, const char *verb, uint64_t total,
                              const cli_options *options, ckd_error *err);
/*
 * Writes a file, which appears complete or not at all: at once, or with the others of `set` unless that is NULL.
 * Errors: those of ckd_load_tensor and of cli_output_*; CANCELLED.
 */
ckd_status file_content_write(file_writing *w, const file_content *c, const char *path, bool force,
                              cli_outputs *set, ckd_error *err);
void file_writing_end(file_writing *w);

/* The plan of an export: which tensors go into which file, and the total size, before anything is written. */

/* Which tensors to export, and in which dtype. */
typedef struct export_choice {
    bool roles[CKD_ROLE_OTHER + 1]; /* --only; none set: every role */
    regex_t *patterns;              /* --match; none: every name */
    size_t pattern_count;
    ckd_dtype dtype; /* of weights; NONE: as stored */
    uint64_t max;    /* bytes of tensors per file */
    bool some;       /* --only or --match was given: blobs are left out */
} export_choice;
/* Parses roles such as "weight,other". INVALID if one is unknown. */
ckd_status export_choice_roles(export_choice *c, const char *text, ckd_error *err);
/* Adds an extended regular expression. INVALID if it does not compile. */
ckd_status export_choice_match(export_choice *c, const char *text, ckd_error *err);
/* Parses "bf16", "f16" or "f32". */
ckd_status export_choice_dtype(export_choice *c, const char *text, ckd_error *err);
void export_choice_free(export_choice *c);

typedef struct export_file {
    char *name; /* inside the folder */
    uint64_t bytes;
    size_t tensors;       /* number of tensors in it */
    const char *blob;     /* the blob's name in the checkpoint; NULL: not a blob */
    file_content content; /* of a file with tensors */
} export_file;

typedef struct export_plan {
    export_file *files; /* tensors first, then blobs; at the end the index, which is written last */
    size_t count, tensors, left_out, cast;
    uint64_t bytes;        /* of all files */
    uint64_t tensor_bytes; /* of all tensors: total_size in the index */
    char *index;           /* NULL: no index, since there is one file with tensors */
    ckd_blob_list *blobs;
} export_plan;
/*
 * Makes the plan. Names belong to the load. Errors: NOT_FOUND (nothing matches), UNSUPPORTED, NOMEM, those of
 * ckd_load_blob.
 */
ckd_status export_plan_make(export_plan *out, const export_choice *choice, ckd_load *load, ckd_error *err);
void export_plan_free(export_plan *p);

/* May an export replace this file, because an earlier export wrote it? A cli_replaceable_fn. */
bool export_replaceable(const char *path, const char *name, bool folder);

/*
 * Turns ranks' files into the tensors of one checkpoint, and finds where their elements are.
 *
 * import_plan_make   opens the files, identifies their tensors and checks that everything fits together
 *                    (import_plan.c, import_flat.c, import_check.c, import_tile.c)
 * import_fragments_make finds the elements of one tensor in the files
 * import_read        reads its values; all copies are compared or averaged (import_read.c)
 *
 * Memory: a few hundred bytes per tensor and rank; no values.
 */

/* A rank's tensor, or a part of it that is a separate tensor in the checkpoint. */
typedef struct import_entry {
    char *name; /* in the checkpoint */
    const layout_rule *rule;
    size_t part; /* LAYOUT_NONE: kept together, or there are no parts */
    uint32_t rank;
    /* the rank with all cut axes set to 0: entries with the same rule and set form one copy of the tensor */
    uint32_t set;
    const safetensors_file *file; /* NULL: the rank has no flat buffer, and would have nothing in it */
    /* the rank's tensor; for a parameter in a flat buffer, its equivalent */
    const safetensors_tensor *tensor;
    /* rule of the flat buffer that contains it; NULL: not in a flat buffer */
    const layout_rule *flat;
    const safetensors_tensor *stored; /* the file's tensor with its elements: the same, or the buffer */
    layout_range range;               /* which elements, and their position: all, or some */
    size_t order;                     /* input order */
    size_t member;                    /* index in the buffer */
} import_entry;

/* A parameter as if it were a rank's tensor. */
typedef struct import_parameter {
    safetensors_tensor tensor; /* it owns its name */
    const layout_rule *flat;
    uint32_t rank;
} import_parameter;

typedef struct import_tensor {
    safetensors_tensor tensor;   /* of the checkpoint; its name is the first entry's */
    const import_entry *entries; /* sorted by rule, set, rank */
    size_t count;
    size_t copies; /* largest number of copies, if parts are repeated */
} import_tensor;

/* A tensor that a rule skips. */
typedef struct import_skipped {
    const char *name; /* in the files */
    uint32_t rank, line;
} import_skipped;

typedef struct import_plan {
    const layout *layout;
    safetensors_file **files;
    uint32_t *ranks; /* ranks of the files */
    size_t file_count;
    import_entry *entries;
    size_t entry_count;
    import_tensor *tensors; /* in the order of their first entries */
    size_t count;
    import_skipped *skipped;
    size_t skipped_count;
    import_parameter **parameters; /* of flat buffers */
    size_t parameter_count;
    uint64_t *matched; /* per rule: number of matching rank tensors */
    json_t *metadata;  /* metadata on which all files with the key agree; NULL if none */
    char **disagreed;  /* keys on which they disagree */
    size_t disagreed_count;
    uint64_t bytes;
} import_plan;

/*
 * Makes the plan. Release with import_plan_free, also after a failure. Errors: MISMATCH and INVALID (the message has
 * the rule's file and line), NOT_FOUND, CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status import_plan_make(import_plan *out, const layout *l, char *const *paths, size_t count,
                            ckd_error *err);
void import_plan_free(import_plan *plan);

/* Reads values, one tensor after the other. */
typedef struct import_reader import_reader;
ckd_status import_reader_new(import_reader **out, const import_plan *plan, ckd_error *err);
void import_reader_free(import_reader *reader);
/* Reads elements first ... first + count - 1 of the tensor. MISMATCH if copies differ. */
ckd_status import_read(import_reader *reader, const import_tensor *t, uint64_t first, uint64_t count,
                       void *to, ckd_error *err);

/* Reports what an import would do, as text or JSON. */

/* Prints on stderr rules that match nothing and metadata that is left out. */
void import_report_remarks(const import_plan *plan);
/* Prints on stdout the origin of each tensor; with --json as described in docs/cli.md. */
ckd_status import_report_plan(const import_plan *plan, const cli_options *options, cli_roles *roles,
                              ckd_error *err);

/*
 * The optimizer update that led to the saved state: --adamw, --adam, --sgd [GLOB:]NAME=VALUE,... The first rule that
 * matches a weight's name applies.
 */

typedef struct cli_optimizer_rule {
    char *pattern; /* glob for the weight's name; * also matches dots and slashes */
    ckd_optimizer optimizer;
    bool used;
} cli_optimizer_rule;

typedef struct cli_optimizers {
    cli_optimizer_rule *rules;
    size_t count;
} cli_optimizers;

/* Adds "[GLOB:]NAME=VALUE,...". INVALID if it is malformed, or lacks lr or step. */
ckd_status cli_optimizers_add(cli_optimizers *optimizers, ckd_optimizer_kind kind, const char *text,
                              ckd_error *err);
void cli_optimizers_free(cli_optimizers *optimizers);

/*
 * Attaches the optimizer to the f32 tensors of each matching weight. Orders them as the library requires: exp_avg.X,
 * exp_avg_sq.X, then X or its master; masters precede the rest, which keeps its order.
 */
ckd_status cli_optimizers_apply(cli_optimizers *optimizers, cli_inputs *inputs, ckd_error *err);

/*
 * A folder that appears complete or not at all. Files are written into .FOLDER.tmp-PID-N beside it, which is renamed
 * when all of them are durable. Dropping it leaves nothing behind.
 */

typedef struct cli_folder cli_folder;

/*
 * May a file with this name inside the folder `path` be replaced? `folder`: the name is a folder. Then the files in it
 * are asked for, too, by names such as "blobs/config".
 */
typedef bool (*cli_replaceable_fn)(const char *path, const char *name, bool folder);

/*
 * EXISTS unless `path` is free or an empty folder. With `replaceable`, a folder that holds only replaceable files is
 * allowed, too. Call it before any work.
 */
ckd_status cli_folder_check(const char *path, cli_replaceable_fn replaceable, ckd_error *err);
/* Creates the parent folders and the temporary folder. NOSPACE unless the file system has `size` bytes left. */
ckd_status cli_folder_open(cli_folder **out, const char *path, cli_replaceable_fn replaceable, uint64_t size,
                           ckd_error *err);
/*
 * Returns the path of a future file in the folder; free() it. Creates folders in between. NULL, with an error, on
 * failure.
 */
char *cli_folder_inside(const cli_folder *folder, const char *name, ckd_error *err);
/* Renames the folder to its final name, replacing what cli_folder_check allows. Always frees it. */
ckd_status cli_folder_commit(cli_folder *folder, ckd_error *err);
/* Removes everything. Accepts NULL. */
void cli_folder_drop(cli_folder *folder);

#endif
