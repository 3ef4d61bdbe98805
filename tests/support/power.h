/*
 * Simulates power cuts. The power fails after any operation of a scenario. Every disk that may result is
 * made, opened and checked in a process of its own. Then each place in the code that syncs is left out in
 * turn: at least one disk must be wrong without it.
 */
#ifndef TESTS_SUPPORT_POWER_H
#define TESTS_SUPPORT_POWER_H

#include "include/ckptdelta.h"
#include "tests/support/recorder.h"

/* What must be true of a disk. Masks belong to the scenario: bits of steps, or of fingerprints. */
typedef struct expectation {
    uint64_t committed, possible; /* what must be there, and what may be there */
    unsigned marks;               /* changes of tests/support/marks.h that were made */
    unsigned flags;               /* defined by the scenario */
} expectation;

/*
 * Checks `dir`, the recorded directory after a power cut. Fails the running test. thorough: includes checks
 * that take long.
 */
typedef void (*power_check_fn)(const char *dir, const expectation *e, bool thorough, void *context);

typedef struct power {
    const char *dir; /* the directory that is recorded; everything in it is durable at the beginning */
    const char *name;
    power_check_fn check;
    void *context;
    op_record record;
    expectation now, *expected;
    size_t expected_count;
} power;

/* Starts to record. `lost` is a name, or a path below the directory, that may not be durable; or NULL. */
void power_begin(power *p, const char *lost);
/* From here on, p->now must be true. */
void power_expect(power *p);
/*
 * Stops recording and checks. States that are not simple are sampled: CKD_POWER_STATES is their number (100;
 * 0: all), and CKD_POWER_SEED selects them. Then each place that syncs is left out in turn, unless it was
 * found to be needed before or CKD_POWER_SITES is 0.
 */
void power_end(power *p, const char *name);

/*
 * Sets the places that need not be needed. A label is "file:function", "file:function#2" for the second place
 * of the function, or "file:*". A space and the reason follow. The list ends with NULL.
 */
void power_spare(const char *const *labels);
/* Fails the test for each place that syncs, is not spared, and was never reached or never needed. */
void power_check_sites(void);

#endif
