/* The files of the directory's implementation share this. */
#ifndef OBJECTS_DIRECTORY_H
#define OBJECTS_DIRECTORY_H

#include "objects/backend.h"

typedef struct directory {
    char *root;
    object_rate rate;
} directory;

/* Temporary files are in the root. No key begins with a dot. */
#define DIRECTORY_TEMP ".unfinished-"

/* Release it with free. NULL on failure. */
char *directory_path(const directory *d, const char *key, ckd_error *err);

bool directory_is_folder(const char *path);

ckd_status directory_list(void *place, const object_query *query, object_page *out, const object_call *call,
                          ckd_error *err);
ckd_status directory_abort_uploads(void *place, uint64_t age_s, uint64_t *count, const object_call *call,
                                   ckd_error *err);

#endif
