/*
 * The power fails after any operation of a scenario: every disk that there may be then is made, opened and checked, each in a process of its own.
 * And then once more for every place in the code that syncs, as if it did not: one of those disks must be wrong.
 */
#ifndef TESTS_SUPPORT_POWER_H
#define TESTS_SUPPORT_POWER_H

#include "include/ckptdelta.h"
#include "tests/support/recorder.h"

/* What must be true of a disk. Masks are the scenario's: bits of steps, or of fingerprints. */
typedef struct expectation {
    uint64_t committed, possible; /* what must be there, and what may be */
    unsigned marks;               /* changes of tests/support/marks.h that were made */
    unsigned flags;               /* the scenario's own */
} expectation;

/* `dir` is what was recorded, after a power cut. Fails the running test. thorough: also what takes long. */
typedef void (*power_check_fn)(const char *dir, const expectation *e, bool thorough, void *context);

typedef struct power {
    const char *dir; /* holds what is recorded: all of it is durable at the beginning */
    const char *name;
    power_check_fn check;
    void *context;
    op_record record;
    expectation now, *expected;
    size_t expected_count;
} power;

/* `lost`: a name that may be lost yet, or NULL. */
void power_begin(power *p, const char *lost);
/* p->now holds from here on. */
void power_expect(power *p);
/*
 * Stops recording and checks. States that are not simple are sampled: CKD_POWER_STATES of them (100), all with 0; CKD_POWER_SEED. Each place that syncs and was
 * not found needed yet is left out in turn, but with CKD_POWER_SITES=0.
 */
void power_end(power *p, const char *name);

/* Those that need not be needed: "file:function", or "file:function#2" for the second one in it, or "file:*", each with its reason behind a space; ends with NULL. */
void power_spare(const char *const *labels);
/* Fails the test if a place in the sources that syncs was never reached, or no disk was wrong without it, and it is not spared. */
void power_check_sites(void);

#endif
