/* What is done to a store of scenes while something fails in it: files, memory. */
#ifndef TESTS_SUPPORT_ACTIONS_H
#define TESTS_SUPPORT_ACTIONS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

/* What fails. */
typedef struct trouble {
    unsigned long hits; /* how often it has */
    bool once;          /* then a call that fails is made again, and must work */
    /* Fails the test unless this is how a call may fail under a fault. */
    void (*check_failure)(const char *call, ckd_status status, const ckd_error *err);
} trouble;

typedef struct action {
    const char *dir;    /* holds the store */
    const char *source; /* another one, of act_copies */
    const trouble *trouble;
    ckd_store *store; /* left open */
    ckd_open_mode mode;
    uint64_t step, committed; /* committed: bits of the steps that were reported so */
    uint64_t gone;            /* of those that were reported deleted */
    unsigned marks;           /* changes of tests/support/marks.h that were made */
} action;

/* Each fails the test if a call fails without a fault in it, or gives wrong results. */
typedef void (*act_fn)(action *a);
void act_creates(action *a);     /* a store, and step 0 as a base */
void act_saves_delta(action *a); /* of step 2, in a store with steps 0 and 1; these three */
void act_saves_ready(action *a); /* with materialized copies */
void act_saves_ranks(action *a); /* by two ranks */
void act_aborts(action *a);      /* a save of step 2 */
void act_deletes(action *a);     /* steps 1 and 2, of 0, 1 and 2, and collects */
void act_undeletes(action *a);   /* the same ones, which are in the trash */
void act_prunes(action *a);      /* saves step 4 as a base, in a store of scene_make_pruning with 4 steps */
void act_compacts(action *a);    /* steps 0 to 3, to a depth of 1 */
void act_folds(action *a);       /* steps 0 and 1, into 2 and 3, and collects */
void act_packs(action *a);       /* all but the newest four of 8 */
void act_recodes(action *a);     /* all but the newest of 4, as small as can be */
void act_copies(action *a);      /* all 4 of the source into a store that is not there yet */
void act_marks(action *a);       /* pins and tags steps 1 and 2 */
void act_opens(action *a);       /* for writing */
void act_rebuilds(action *a);
void act_reads(action *a); /* lists, loads and verifies the steps 0, 1 and 2, reports */

/* Single calls, as above. */
ckd_status call_open(action *a, ckd_error *err); /* in a->mode */
ckd_status call_save(action *a, ckd_error *err); /* a->step */

/* Of this process. */
size_t open_descriptors(void);

#endif
