/*
 * Processes that save a scene together in DIR/store (scenes.h). Each is a child of the test. They share
 * nothing but the store's directory. One of them may be killed or fail at some step.
 */
#ifndef TESTS_SUPPORT_WORLDS_H
#define TESTS_SUPPORT_WORLDS_H

#include <stdbool.h>

#include "base/file.h"
#include "tests/support/scenes.h"

enum { WORLD_MOST = 8, PATIENCE_MS = 120000 };

/* The result of a rank. */
typedef struct outcome {
    bool killed;
    uint64_t ended_ns;
    ckd_status status;
    char message[256];
    ckd_checkpoint info;
} outcome;

/* What happens to a rank: it is killed before a step or in the middle of a write, or its steps fail. */
typedef struct fate {
    uint32_t rank;
    unsigned long at; /* the number of the step, from 1; 0: the first that matches */
    file_op step;
    const char *where; /* part of the path; NULL: any */
    int fail;          /* this errno, instead of being killed */
    bool torn;
    unsigned long seen;
    bool dying;
} fate;
/* A hook for file_set_fault_hook; its context is a fate. */
int fate_hook(void *context, file_op step, const char *path);

typedef struct world {
    const char *dir;
    uint32_t size;
    uint64_t step;
    const fate *fate; /* NULL: nothing happens */
    uint32_t timeout_ms;
    uint32_t first_timeout_ms; /* for rank 0; 0: the same */
    /* Called between joining and leaving. */
    ckd_status (*act)(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const struct world *w,
                      uint32_t rank, ckd_error *err);
    /* Called before joining; NULL: nothing. */
    void (*before)(const struct world *w, uint32_t rank);
    uint32_t started; /* how many of the ranks start at all; 0: all */
} world;

/* Called before and after a program's tests. The tests have their directories in memory (scratch.h). */
void worlds_begin(void);
void worlds_end(void);

/* Runs all ranks of the world, from joining to leaving. */
void run_world(outcome out[WORLD_MOST], const world *w);
/* The same; fails the test if a rank fails. */
void all_went_well(const world *w);

/* ---- actions of ranks ---- */
ckd_status save_share(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint64_t step, uint32_t rank,
                      ckd_error *err);
/* Saves the world's step. */
ckd_status act_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w, uint32_t rank,
                     ckd_error *err);
/* The same after a plan, which the save does not need: so that ranks also die or fail while they plan. */
ckd_status act_plans_and_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err);
/* Saves this step and the next two. */
ckd_status act_saves_thrice(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err);
/* Begins a save. *save is NULL if that failed; else the caller owns it, whatever the status. */
ckd_status begin_share(ckd_save **save, ckd_ranks *ranks, const scene *s, const world *w, uint32_t rank,
                       ckd_error *err);

/* ---- state shared by all processes; worlds_forget resets it ---- */
void worlds_forget(void);
/* Kills this process, and records the time. */
_Noreturn void die_now(void);
void die_in(uint64_t ns);     /* kills this process after this time, wherever it is then */
uint64_t death_time_ns(void); /* the time of the last death, by clock_monotonic_ns */
void tell(void);              /* reports that this process has reached a point others wait for */
uint64_t told(void);          /* how many processes have reported */
/*
 * Waits until `count` processes have reported, or PATIENCE_MS have passed. The caller's assertions show
 * which.
 */
void await_told(uint64_t count);

#endif
