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

#endif
