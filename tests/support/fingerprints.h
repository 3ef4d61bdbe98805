/* What checkpoints load to, so that two states of a store can be compared. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_FINGERPRINTS_H
#define TESTS_SUPPORT_FINGERPRINTS_H

#include <stddef.h>
#include <stdint.h>

#include "include/ckptdelta.h"

typedef struct fingerprint {
    ckd_id checkpoint;
    char name[CKD_RUN_MAX + 32]; /* RUN@STEP */
    uint64_t hash; /* of all values, with names, roles, dtypes, shapes and what is known of errors */
} fingerprint;
typedef struct fingerprints {
    fingerprint *items; /* by run, then step */
    size_t count;
} fingerprints;

/* Loads everything that is listed. */
fingerprints fingerprints_of(ckd_store *store);
void fingerprints_free(fingerprints *f);
/* CKD_OK, or why the checkpoint does not load. */
ckd_status fingerprint_of(fingerprint *out, ckd_store *store, const ckd_checkpoint *c, ckd_error *err);
/* All that the store lists must be in `before`, and the same; returns how many there are. */
size_t fingerprints_check(ckd_store *store, const fingerprints *before);

#endif
