/* A fixture for tests that share one store. */
#ifndef TESTS_SUPPORT_STORED_H
#define TESTS_SUPPORT_STORED_H

#include "include/ckptdelta.h"

typedef struct stored {
    char *dir;
    ckd_store *store; /* DIR/store, created */
    float *values;    /* of the newest checkpoint */
} stored;

/*
 * Creates the store with `count` random values. threads 0: the default number. For the setup of a group;
 * stored_remove is its teardown.
 */
stored *stored_make(uint32_t threads, uint64_t count);
int stored_remove(void **state);
/* Opens DIR/store once more, with another number of threads. */
ckd_store *stored_open(const char *dir, uint32_t threads);

/* Begins a load. options may be NULL. */
ckd_load *stored_load(ckd_store *store, const char *run, uint64_t step, const ckd_load_options *options);

#endif
