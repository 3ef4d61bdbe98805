/* Two stores for tests of copying. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_PAIRS_H
#define TESTS_SUPPORT_PAIRS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

typedef struct pair {
    char *a, *b; /* folders; the stores are in A/store and B/store, as scene_open opens them */
    ckd_store *from, *to;
} pair;

/* Setup and teardown of a cmocka test. The state is a pair of empty folders. */
int pair_setup(void **state);
int pair_teardown(void **state);
/* Opens the source for reading, and creates the destination. */
void pair_open(pair *p);
void pair_close(pair *p);
/* Closes and removes the destination. B is a new empty folder then. */
void pair_renew(pair *p);

/* Saves the scene at (run, step). ranks: by two ranks. */
void pair_save(ckd_store *store, const char *run, uint64_t step, bool ranks);
/* Saves in A the steps 0 ... 3 of SCENE_RUN, each a delta, step 2 by two ranks. These are five files. */
void pair_make_source(const pair *p);
ckd_id pair_id(ckd_store *store, const char *run, uint64_t step);

/* Copies these checkpoints; all if ids is NULL. Fails the test on an error. */
ckd_copy_result *pair_copy(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o);
/* Checks how many were moved, and frees the result. */
void pair_counts(ckd_copy_result *r, uint64_t checkpoints, uint64_t files);
/* Copies, and expects this failure. Its message must contain `what`. */
void pair_refused(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o, ckd_status wanted,
                  const char *what);
/*
 * The same for a call that copies as much as possible, and leaves `left` checkpoints. Returns the result,
 * which the caller frees.
 */
ckd_copy_result *pair_leaves(pair *p, const ckd_id *ids, size_t count, ckd_status wanted, uint64_t left,
                             const char *what);
/* Checks that both stores list the same. */
void pair_check_lists(pair *p);
/* Checks that the destination has no leftover files. */
void pair_check_clean(const pair *p);

uint64_t folder_bytes(const char *dir, const char *folder);
/* Counts the names in DIR/store/FOLDER; 0 if the folder does not exist. */
size_t folder_count(const char *dir, const char *folder);

#endif
