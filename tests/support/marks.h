/*
 * Pins, tags and policies that are set, changed and removed in turn, and what must be true of them after a
 * crash or a failure.
 */
#ifndef TESTS_SUPPORT_MARKS_H
#define TESTS_SUPPORT_MARKS_H

#include "include/ckptdelta.h"

/* The number of changes. The store has the steps 1 and 2 of SCENE_RUN. */
enum { MARK_CHANGES = 9 };
ckd_status mark_change(ckd_store *store, unsigned which, ckd_error *err);
/* Returns whether the change removes something. If it is repeated, it finds nothing. */
int mark_removes(unsigned which);
/* Fails the test unless DIR/store is as after `changes` changes, or as after one more. */
void marks_check(const char *dir, unsigned changes);

#endif
