/* The list of damage a verification finds, one entry a place, with all checkpoints it makes unloadable. */
#ifndef ENGINE_DAMAGE_H
#define ENGINE_DAMAGE_H

#include "engine/view.h"

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

/* Damage, also what the disk cannot read any more? Other troubles (no permission, too many open files) are ours. */
bool is_damage(ckd_status status, const ckd_error *why);
/* Adds damage; what is none is the error. */
ckd_status damage_note(damage_list *list, ckd_status status, const ckd_error *why, uint64_t block,
                       const char *checkpoint, ckd_error *err);

/* Takes all damage of a file (a path inside the store) off the list: it was repaired. */
void damage_drop_file(damage_list *list, const char *file);
/* Appends a sentence to what is told of a file's damage, unless it is there already. Without memory for it, it is left out. */
void damage_explain(damage_list *list, const char *file, const char *more);

/* A checkpoint and what its manifest says that it depends on. */
typedef struct lineage {
    ckd_id id;
    char name[CKD_RUN_MAX + 32]; /* RUN@STEP */
    ckd_id *dependencies;
    size_t dependency_count;
} lineage;
lineage lineage_of(manifest *m); /* takes over m->dependencies */
void lineages_free(lineage *all, size_t count);
/* Adds to each entry the checkpoints that depend on those it names, directly or through others. */
ckd_status damage_spread(damage_list *list, const lineage *all, size_t count, ckd_error *err);

#endif
