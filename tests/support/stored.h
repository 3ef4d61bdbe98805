/* The fixture of tests that share one store: it, and what is saved in it. */
#ifndef TESTS_SUPPORT_STORED_H
#define TESTS_SUPPORT_STORED_H

#include "include/ckptdelta.h"

typedef struct stored {
    char *dir;
    ckd_store *store; /* DIR/store, created */
    float *values;    /* of the newest checkpoint */
} stored;

/* threads 0: as many as usual. `count` random values. The first half of a group's setup; stored_remove is the teardown. */
stored *stored_make(uint32_t threads, uint64_t count);
int stored_remove(void **state);
/* Once more, DIR/store with other threads. */
ckd_store *stored_open(const char *dir, uint32_t threads);

/* options may be NULL. */
ckd_load *stored_load(ckd_store *store, const char *run, uint64_t step, const ckd_load_options *options);

#endif
