/* The damage that a verification finds: one entry per place, with every checkpoint that it makes unloadable. */
#ifndef ENGINE_DAMAGE_H
#define ENGINE_DAMAGE_H

#include "engine/store/view.h"

typedef struct damage_list {
    ckd_verify_result *result;
    const char *store_path; /* removed from file names */
    size_t capacity;
} damage_list;

/*
 * Adds the damage that `why` describes (file, offset, tensor, message). If the place has an entry, adds only the
 * checkpoint to it ("" for none). block: record number in the file, CKD_NO_OFFSET if unknown.
 */
ckd_status damage_add(damage_list *list, const ckd_error *why, uint64_t block, const char *checkpoint,
                      ckd_error *err);

/*
 * Whether it is damage, or a file that cannot be read (file_is_unreadable). Other failures (too many open files, no
 * memory) are the process's own.
 */
bool is_damage(ckd_status status, const ckd_error *why);
/* Adds damage to the list; returns any other failure as the error. */
ckd_status damage_record(damage_list *list, ckd_status status, const ckd_error *why, uint64_t block,
                         const char *checkpoint, ckd_error *err);

/* Removes all entries of a file (a path inside the store), after its repair. */
void damage_drop_file(damage_list *list, const char *file);
/* Appends a sentence to the description of a file's damage, once. Without memory it is left out. */
void damage_explain(damage_list *list, const char *file, const char *more);

/* Names a checkpoint in damage reports: RUN@STEP, and whether it is in the trash. */
#define CHECKPOINT_TEXT (CKD_RUN_MAX + 48)
void checkpoint_text(char out[CHECKPOINT_TEXT], const char *run, uint64_t step, bool in_trash);

/* Makes data/q, the folder for files that are put aside, and makes its name durable. Errors: IO, NOSPACE. */
ckd_status damage_make_folder(const ckd_store *store, ckd_error *err);

/* A checkpoint, and what its manifest says it depends on. */
typedef struct dependency_info {
    ckd_id id;
    char name[CHECKPOINT_TEXT];
    ckd_id *dependencies;
    size_t dependency_count;
    file_ref *files;
    size_t file_count;
    bool in_trash;
} dependency_info;
dependency_info dependency_info_of(manifest *m, bool in_trash); /* takes over m->dependencies and m->files */
void dependency_infos_free(dependency_info *all, size_t count);
/*
 * Adds to each entry the checkpoints that depend, directly or indirectly, on those it names. Then does
 * damage_name_trash.
 */
ckd_status damage_spread(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);
/* Adds to each entry the checkpoints in the trash whose manifests name its file, as their values are not decoded. */
ckd_status damage_name_trash(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);

/* Adds unreadable settings to the damage. They harm no checkpoint, but block deletions. Errors: IO, NOMEM. */
ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err);

#endif
