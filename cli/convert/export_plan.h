/* What an export consists of: which tensors go into which file, and how large all of them will be, before anything is written. */
#ifndef CLI_EXPORT_PLAN_H
#define CLI_EXPORT_PLAN_H

#include <regex.h>

#include "cli/convert/tensor_file.h"

/* Which tensors are wanted, and as what. */
typedef struct export_choice {
    bool roles[CKD_ROLE_OTHER + 1]; /* --only; none of them: every role */
    regex_t *patterns;              /* --match; none: every name */
    size_t pattern_count;
    ckd_dtype dtype; /* of weights; NONE: as stored */
    uint64_t max;    /* bytes of tensors in a file */
    bool some;       /* --only or --match was given: blobs are left out */
} export_choice;
/* "weight,other". INVALID if a role is none. */
ckd_status export_choice_roles(export_choice *c, const char *text, ckd_error *err);
/* An extended regular expression. INVALID if it is none. */
ckd_status export_choice_match(export_choice *c, const char *text, ckd_error *err);
/* "bf16", "f16" or "f32". */
ckd_status export_choice_dtype(export_choice *c, const char *text, ckd_error *err);
void export_choice_free(export_choice *c);

typedef struct export_file {
    char *name; /* inside the folder */
    uint64_t bytes;
    size_t tensors;       /* in it */
    const char *blob;     /* its name in the checkpoint; NULL: it is none */
    file_content content; /* of a file of tensors */
} export_file;

typedef struct export_plan {
    export_file *files; /* tensors first, then blobs; the index, which is written last, at the end */
    size_t count, tensors, left_out, cast;
    uint64_t bytes;        /* of all files */
    uint64_t tensor_bytes; /* of all tensors: what the index calls total_size */
    char *index;           /* NULL: there is one file of tensors, which needs none */
    ckd_blob_list *blobs;
} export_plan;
/* Names belong to the load. Errors: NOT_FOUND (nothing is wanted), UNSUPPORTED, NOMEM, those of ckd_load_blob. */
ckd_status export_plan_make(export_plan *out, const export_choice *choice, ckd_load *load, ckd_error *err);
void export_plan_free(export_plan *p);

/* May an export replace this, as one that came before wrote it? cli_replaceable_fn. */
bool export_replaceable(const char *name, bool folder);

#endif
