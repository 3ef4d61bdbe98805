/* Two stores to copy between. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_PAIRS_H
#define TESTS_SUPPORT_PAIRS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

typedef struct pair {
    char *a, *b; /* folders: the stores are in A/store and B/store, as scene_open has them */
    ckd_store *from, *to;
} pair;

/* Setup and teardown of a cmocka test: the state is a pair of two empty folders. */
int pair_setup(void **state);
int pair_teardown(void **state);
/* The source for reading, the destination created. */
void pair_open(pair *p);
void pair_close(pair *p);
/* Closes and drops the destination: B is another empty folder then. */
void pair_renew(pair *p);

/* The scene at (run, step); ranks: by two of them. */
void pair_save(ckd_store *store, const char *run, uint64_t step, bool ranks);
/* In A: steps 0 ... 3 of SCENE_RUN, each a delta, step 2 by two ranks. Five files. */
void pair_make_source(const pair *p);
ckd_id pair_id(ckd_store *store, const char *run, uint64_t step);

/* All if ids is NULL; fails the test unless it works. */
ckd_copy_result *pair_copy(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o);
/* So many were moved; frees it. */
void pair_counts(ckd_copy_result *r, uint64_t checkpoints, uint64_t files);
/* The copy fails so, and the message says `what`. */
void pair_refused(pair *p, const ckd_id *ids, size_t count, const ckd_copy_options *o, ckd_status wanted,
                  const char *what);
/* The same, but for a call that copies what it can: so many were left. The result is the caller's. */
ckd_copy_result *pair_leaves(pair *p, const ckd_id *ids, size_t count, ckd_status wanted, uint64_t left,
                             const char *what);
/* Both list the same. */
void pair_check_lists(pair *p);
/* Nothing is left over in the destination. */
void pair_check_clean(const pair *p);

uint64_t folder_bytes(const char *dir, const char *folder);
/* Names in DIR/store/FOLDER; 0 if it is not there. */
size_t folder_count(const char *dir, const char *folder);

#endif
