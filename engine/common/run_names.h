/* Names of runs that branch off others: RUN~K. Internal to engine/. Thread-safe. */
#ifndef ENGINE_RUN_NAMES_H
#define ENGINE_RUN_NAMES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

/* Splits RUN~K into RUN and K. A run that is no branch by its name is its own root, with number 1: returns false. */
bool branch_root(char root[CKD_RUN_MAX + 1], unsigned *number, const char *run);
/* The reverse; number 1 gives the root itself. Errors: INVALID (too long). */
ckd_status branch_name(char out[CKD_RUN_MAX + 1], const char *root, unsigned number, ckd_error *err);

#endif
