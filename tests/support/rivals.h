/*
 * Processes that work on one store of scenes at a time, each killed at some step of its files, or at some time, or not at all; and which steps these were. Failures
 * fail the running cmocka test.
 */
#ifndef TESTS_SUPPORT_RIVALS_H
#define TESTS_SUPPORT_RIVALS_H

#include <stdbool.h>
#include <sys/types.h>

#include "include/ckptdelta.h"

/* Fault points by what is done and in which folder, as all processes together came upon them, and died at them. */
enum { RIVAL_STEPS = 16, RIVAL_PLACES = 8 };
typedef struct rival_sites {
    unsigned long seen[RIVAL_STEPS][RIVAL_PLACES], killed[RIVAL_STEPS][RIVAL_PLACES];
} rival_sites;
rival_sites *rival_sites_new(void); /* in memory that children share */
void rival_sites_free(rival_sites *s);
/* How many there are, and of how many of them somebody died. */
unsigned rival_sites_count(const rival_sites *s, unsigned *killed);
/* One line for each. */
void rival_sites_print(const rival_sites *s);

typedef struct rival {
    const char *dir;       /* holds the store */
    unsigned long kill_at; /* the step to die at, from 1 on; 0: none */
    bool torn;             /* and if that writes, after a part of it */
    bool at_site;          /* count only steps of this kind: */
    unsigned step, place;
    rival_sites *sites;             /* NULL: not counted */
    const char *run;                /* a saver's */
    uint64_t first, count;          /* its steps */
    ckd_compact_options compaction; /* a compactor's */
} rival;

/* Starts a process that saves the steps; each that is committed is a byte in `report`, its number from 0 on. One that fails cleanly is no news. */
pid_t rival_saves(const rival *r, int report);
/* Starts one that compacts. What others were quicker with may be left. */
pid_t rival_compacts(const rival *r, int report);
/*
 * Has it die at the n-th fault point of a kind: of those kinds that were seen, about half of which `lot` leaves out, the one at which fewest have. (One that hardly ever comes would
 * stand in front of all others else.)
 */
void rival_at_rarest(rival *r, unsigned long n, uint64_t lot);
/* Waits for its end. Was it killed? That, or a good end: nothing else may be. */
bool rival_was_killed(const char *what, pid_t pid);

/* The number in the environment, or the usual one. */
uint64_t rival_number(const char *name, uint64_t usual);

#endif
