/* Operations on a store of scenes, for tests in which files or memory fail. */
#ifndef TESTS_SUPPORT_ACTIONS_H
#define TESTS_SUPPORT_ACTIONS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

/* The fault that is injected. */
typedef struct trouble {
    unsigned long hits; /* how often it has happened */
    bool once;          /* it happens once: a call that fails is repeated, and must work then */
    /* Fails the test unless a call may fail like this. */
    void (*check_failure)(const char *call, ckd_status status, const ckd_error *err);
} trouble;

typedef struct action {
    const char *dir;    /* holds the store */
    const char *source; /* another store, for act_copies */
    const trouble *trouble;
    ckd_store *store; /* actions may leave it open */
    ckd_open_mode mode;
    uint64_t step, committed; /* committed: bits of the steps whose saves succeeded */
    uint64_t gone;            /* bits of the steps whose deletion succeeded */
    unsigned marks;           /* changes of tests/support/marks.h that were made */
} action;

/* Each fails the test if a call fails without a fault, or gives wrong results. */
typedef void (*act_fn)(action *a);
void act_creates(action *a);     /* creates a store, and saves step 0 as a base */
void act_saves_delta(action *a); /* saves step 2, in a store with steps 0 and 1; the next three do so, too */
void act_saves_ready(action *a); /* saves it with materialized copies */
void act_saves_ranks(action *a); /* saves it by two ranks */
void act_aborts(action *a);      /* begins a save of step 2, and aborts it */
void act_deletes(action *a);     /* deletes steps 1 and 2 of 0, 1 and 2, and collects */
void act_undeletes(action *a);   /* restores steps 1 and 2 from the trash */
void act_prunes(action *a);      /* saves step 4 as a base, in a store of scene_make_pruning with 4 steps */
void act_compacts(action *a);    /* compacts steps 0 to 3 to a depth of 1 */
void act_folds(action *a);       /* folds steps 0 and 1 into 2 and 3, and collects */
void act_packs(action *a);       /* packs all but the newest four of 8 steps */
void act_recodes(action *a);     /* recodes all but the newest of 4 steps, for the smallest size */
void act_copies(action *a);      /* copies all 4 steps of the source into a new store */
void act_marks(action *a);       /* changes pins, tags and policies of steps 1 and 2 */
void act_opens(action *a);       /* opens the store for writing */
void act_rebuilds(action *a);
void act_reads(action *a); /* lists, loads, verifies and reports the steps 0, 1 and 2 */

/* Single calls, with the same rules. */
ckd_status call_open(action *a, ckd_error *err); /* opens the store in a->mode */
ckd_status call_save(action *a, ckd_error *err); /* saves a->step */

/* Counts the open file descriptors of this process. */
size_t open_descriptors(void);

#endif
