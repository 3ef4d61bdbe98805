/* Names of runs that branch off other runs: RUN~K. Internal to engine/. Thread-safe. */
#ifndef ENGINE_RUN_NAMES_H
#define ENGINE_RUN_NAMES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

/*
 * Splits RUN~K into RUN and K. Returns false if the name is no branch's; the run is its own root then, with number 1.
 */
bool branch_root(char root[CKD_RUN_MAX + 1], unsigned *number, const char *run);
/* The inverse; number 1 gives the root itself. Errors: INVALID (too long). */
ckd_status branch_name(char out[CKD_RUN_MAX + 1], const char *root, unsigned number, ckd_error *err);

#endif
