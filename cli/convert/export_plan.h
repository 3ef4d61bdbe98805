/* The plan of an export: which tensors go into which file, and the total size, before anything is written. */
#ifndef CLI_EXPORT_PLAN_H
#define CLI_EXPORT_PLAN_H

#include <regex.h>

#include "cli/convert/tensor_file.h"

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
bool export_replaceable(const char *name, bool folder);

#endif
