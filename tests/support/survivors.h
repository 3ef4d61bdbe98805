/*
 * What must be true of a store after a process died, or the power failed, while it saved steps of SCENE_RUN.
 */
#ifndef TESTS_SUPPORT_SURVIVORS_H
#define TESTS_SUPPORT_SURVIVORS_H

#include <stdint.h>

#include "include/ckptdelta.h"

/* Returns bits of the steps that are listed. Each must load with the right values. */
uint64_t survivors_listed(ckd_store *store);

/*
 * Opens DIR/store for reading, which must change nothing, and for writing. Checks all listed steps, saves
 * `next`, and checks that there are no leftover files. The steps in `committed` must be there; of the others
 * only those in `possible` may be. If nothing was committed, there need not be a store. Failures fail the
 * running test.
 */
void survivors_check(const char *dir, uint64_t committed, uint64_t possible, uint64_t next);
/* The same without the reading handle, the verification and the next save. Takes a third of the time. */
void survivors_glance(const char *dir, uint64_t committed, uint64_t possible);

#endif
