/* Scenarios of steps of SCENE_RUN, in a store DIR/store. Failures fail the running test. */
#ifndef TESTS_SUPPORT_POWER_DISK_H
#define TESTS_SUPPORT_POWER_DISK_H

#include "tests/support/power.h"

/* Of an expectation: what else is true. */
enum {
    MARKED = 1,        /* as marks.h says */
    PROTECTED = 2,     /* any chunk file that is lost can be repaired */
    DAMAGED = 4,       /* not before it is repaired all is right */
    KEPT = 8,          /* what was damaged is kept */
    PURGED = 16,       /* it is no more */
    COPIED = 32,       /* DIR/from/store has steps 0 to 3 */
    UNPINNED = 64,     /* nothing is pinned */
    PINNED = 128,      /* something is */
    PINNED_AGAIN = 256 /* for no other reason than PIN_AGAIN */
};
#define PIN_AGAIN "again"

typedef struct disk {
    power p;
    uint64_t next; /* the step that is saved on a disk */
} disk;

int disk_setup(void **state);
int disk_teardown(void **state);
#define disk_test(test) cmocka_unit_test_setup_teardown(test, disk_setup, disk_teardown)

/* Records from here on. What there is must be there, and stays. Bits of steps. */
void disk_begin(disk *d, uint64_t committed, uint64_t possible);
/* With what lies in the store being true from here on. */
void disk_expect(disk *d, uint64_t committed, uint64_t possible);
void disk_flags(disk *d, unsigned flags);
/* Checks. `next` is a step that is not saved. */
void disk_end(const char *what, disk *d, uint64_t next);

ckd_store *disk_open(disk *d, ckd_open_mode mode);
void disk_save(disk *d, ckd_store *store, uint64_t step, bool ranks);
void disk_must(ckd_status status, const ckd_error *err);

#endif
