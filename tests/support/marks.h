/* Pins, tags and policies that are set, changed and taken away in turn, and what must be true of them after a crash or a failure in between. */
#ifndef TESTS_SUPPORT_MARKS_H
#define TESTS_SUPPORT_MARKS_H

#include "include/ckptdelta.h"

/* So many changes. The store has the steps 1 and 2 of SCENE_RUN. */
enum { MARK_CHANGES = 9 };
ckd_status mark_change(ckd_store *store, unsigned which, ckd_error *err);
/* Does the change take something away? Made again, it finds nothing. */
int mark_removes(unsigned which);
/* Fails the test unless DIR/store is as after so many changes, or as after one more. */
void marks_check(const char *dir, unsigned changes);

#endif
