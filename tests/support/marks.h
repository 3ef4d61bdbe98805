/* Pins and tags that are set, changed and taken away in turn, and what must be true of them after a crash or a failure in between. */
#ifndef TESTS_SUPPORT_MARKS_H
#define TESTS_SUPPORT_MARKS_H

#include "engine/ckptdelta.h"

/* So many changes; one takes a pin away, one a tag. The store has the steps 1 and 2 of SCENE_RUN. */
enum { MARK_CHANGES = 6 };
ckd_status mark_change(ckd_store *store, unsigned which, ckd_error *err);
/* Fails the test unless DIR/store is as after so many changes, or as after one more. */
void marks_check(const char *dir, unsigned changes);

#endif
