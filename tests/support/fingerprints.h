/* Hashes of loaded checkpoints, to compare two states of a store. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_FINGERPRINTS_H
#define TESTS_SUPPORT_FINGERPRINTS_H

#include <stddef.h>
#include <stdint.h>

#include "include/ckptdelta.h"

typedef struct fingerprint {
    ckd_id checkpoint;
    char name[CKD_RUN_MAX + 32]; /* RUN@STEP */
    uint64_t hash;               /* of all values, names, roles, dtypes, shapes, and known errors */
} fingerprint;
typedef struct fingerprints {
    fingerprint *items; /* by run, then step */
    size_t count;
} fingerprints;

/* Loads all listed checkpoints. */
fingerprints fingerprints_of(ckd_store *store);
void fingerprints_free(fingerprints *f);
/* Loads one checkpoint. Returns CKD_OK, or why it does not load. */
ckd_status fingerprint_of(fingerprint *out, ckd_store *store, const ckd_checkpoint *c, ckd_error *err);
/* Checks that every listed checkpoint is in `before` with the same hash. Returns how many there are. */
size_t fingerprints_check(ckd_store *store, const fingerprints *before);

#endif
