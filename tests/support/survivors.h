/* What must be true of a store after a process died, or the power failed, while steps of SCENE_RUN were being saved. */
#ifndef TESTS_SUPPORT_SURVIVORS_H
#define TESTS_SUPPORT_SURVIVORS_H

#include <stdint.h>

#include "include/ckptdelta.h"

/* Bits of the steps that are listed, each of which must load to the right values. */
uint64_t survivors_listed(ckd_store *store);

/*
 * Opens DIR/store for reading (which must change nothing) and for writing, checks all that is listed, saves `next`, and
 * checks that nothing is left over. The steps whose bits are in `committed` must be there, of all others only those in
 * `possible` may. No store at all is fine if nothing was committed. Failures fail the running test.
 */
void survivors_check(const char *dir, uint64_t committed, uint64_t possible, uint64_t next);
/* The same without the reading handle, the verification and the next save: a third of the time. */
void survivors_glance(const char *dir, uint64_t committed, uint64_t possible);

#endif
