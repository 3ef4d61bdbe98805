/* Scenarios of steps of SCENE_RUN, in a store DIR/store. Failures fail the running test. */
#ifndef TESTS_SUPPORT_POWER_DISK_H
#define TESTS_SUPPORT_POWER_DISK_H

#include "tests/support/power.h"

/* Flags of an expectation: what else must be true. */
enum {
    MARKED = 1,         /* marks are as marks.h says */
    PROTECTED = 2,      /* any lost chunk file can be repaired */
    DAMAGED = 4,        /* everything loads only after a repair */
    KEPT = 8,           /* damaged files are in the quarantine */
    PURGED = 16,        /* the quarantine is empty */
    COPIED = 32,        /* DIR/from/store has steps 0 to 3 */
    UNPINNED = 64,      /* nothing is pinned */
    PINNED = 128,       /* something is pinned */
    PINNED_AGAIN = 256, /* all pins have the reason PIN_AGAIN */
    WHOLE = 512         /* verify finds no damage once a process has opened the store for writing */
};
#define PIN_AGAIN "again"

typedef struct disk {
    power p;
    uint64_t next; /* a step that the checks save */
} disk;

int disk_setup(void **state);
int disk_teardown(void **state);
#define disk_test(test) cmocka_unit_test_setup_teardown(test, disk_setup, disk_teardown)

/*
 * Starts to record. From here on, the steps in `committed` must be there, and those in `possible` may be.
 * Masks are bits of steps.
 */
void disk_begin(disk *d, uint64_t committed, uint64_t possible);
/* Changes what must be true from here on. */
void disk_expect(disk *d, uint64_t committed, uint64_t possible);
void disk_flags(disk *d, unsigned flags);
/* Stops recording and checks all disks. `next` is a step that was not saved. */
void disk_end(const char *what, disk *d, uint64_t next);

ckd_store *disk_open(disk *d, ckd_open_mode mode);
void disk_save(disk *d, ckd_store *store, uint64_t step, bool ranks);
void disk_must(ckd_status status, const ckd_error *err);

#endif
