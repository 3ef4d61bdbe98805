/* The list of damage a verification finds, one entry a place, with all checkpoints it makes unloadable. */
#ifndef ENGINE_DAMAGE_H
#define ENGINE_DAMAGE_H

#include "engine/store/view.h"

typedef struct damage_list {
    ckd_verify_result *result;
    const char *store_path; /* cut from file names */
    size_t capacity;
} damage_list;

/*
 * Adds what `why` tells (file, offset, tensor, message), or only the checkpoint ("" for none) to what is known of the same place.
 * block: record number in the file, CKD_NO_OFFSET if unknown.
 */
ckd_status damage_add(damage_list *list, const ckd_error *why, uint64_t block, const char *checkpoint,
                      ckd_error *err);

/* Damage, or a file that cannot be read (file_is_unreadable)? Other troubles (too many open files, no memory) are ours. */
bool is_damage(ckd_status status, const ckd_error *why);
/* Adds damage; what is none is the error. */
ckd_status damage_record(damage_list *list, ckd_status status, const ckd_error *why, uint64_t block,
                         const char *checkpoint, ckd_error *err);

/* Takes all damage of a file (a path inside the store) off the list: it was repaired. */
void damage_drop_file(damage_list *list, const char *file);
/* Appends a sentence to what is told of a file's damage, unless it is there already. Without memory for it, it is left out. */
void damage_explain(damage_list *list, const char *file, const char *more);

/* How damage names a checkpoint: RUN@STEP, and whether it is in the trash. */
#define CHECKPOINT_TEXT (CKD_RUN_MAX + 48)
void checkpoint_text(char out[CHECKPOINT_TEXT], const char *run, uint64_t step, bool in_trash);

/* Makes data/q, the folder for what was put aside, if it is not there; its name is durable. Errors: IO, NOSPACE. */
ckd_status damage_make_folder(const ckd_store *store, ckd_error *err);

/* A checkpoint, and what its manifest says that a load needs. */
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
/* Adds to each entry the checkpoints that depend on those it names, directly or through others; then as damage_name_trash. */
ckd_status damage_spread(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);
/* Adds to each entry the checkpoints in the trash whose manifests name its file: their values are not decoded. */
ckd_status damage_name_trash(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);

#endif
