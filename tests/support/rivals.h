/*
 * Processes that work on the same store of scenes at the same time. Each may be killed at a step of its
 * files, or at some time. These steps are counted. Failures fail the running cmocka test.
 */
#ifndef TESTS_SUPPORT_RIVALS_H
#define TESTS_SUPPORT_RIVALS_H

#include <stdbool.h>
#include <sys/types.h>

#include "include/ckptdelta.h"

/* Fault points by operation and folder: how often all processes together reached them, and died there. */
enum { RIVAL_STEPS = 16, RIVAL_PLACES = 8 };
typedef struct rival_sites {
    unsigned long seen[RIVAL_STEPS][RIVAL_PLACES], killed[RIVAL_STEPS][RIVAL_PLACES];
} rival_sites;
rival_sites *rival_sites_new(void); /* in memory shared with children */
void rival_sites_free(rival_sites *s);
/* Returns how many fault points were reached. *killed: at how many of them a process died. */
unsigned rival_sites_count(const rival_sites *s, unsigned *killed);
/* Prints one line for each. */
void rival_sites_print(const rival_sites *s);

typedef struct rival {
    const char *dir;       /* holds the store */
    unsigned long kill_at; /* the step at which it dies, from 1; 0: never */
    bool torn;             /* if this step is a write, it dies in the middle of it */
    bool at_site;          /* only steps of this kind count: */
    unsigned step, place;
    rival_sites *sites;             /* NULL: not counted */
    const char *run;                /* for a saver */
    uint64_t first, count;          /* the steps it saves */
    ckd_compact_options compaction; /* for a compactor */
} rival;

/*
 * Starts a process that saves the steps. For each committed step it writes a byte to `report`: its number
 * from 0. A save that fails without damage is not reported.
 */
pid_t rival_saves(const rival *r, int report);
/* Starts a process that compacts. It may leave checkpoints that others changed first. */
pid_t rival_compacts(const rival *r, int report);
/*
 * Lets it die at the n-th fault point of the kind at which the fewest processes have died. `lot` excludes
 * about half of the kinds, as otherwise a kind that hardly ever occurs would always be chosen.
 */
void rival_at_rarest(rival *r, unsigned long n, uint64_t lot);
/*
 * Waits for the end of the process. Returns whether it was killed. Fails the test unless it was, or
 * succeeded.
 */
bool rival_was_killed(const char *what, pid_t pid);

/* The number in an environment variable, or `usual`. */
uint64_t rival_number(const char *name, uint64_t usual);

#endif
