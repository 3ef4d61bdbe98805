/*
 * Processes that save a scene together, each a child of the test's own, through nothing but the store's directory; and what is done to one of
 * them at some step. Of DIR/store (scenes.h).
 */
#ifndef TESTS_SUPPORT_WORLDS_H
#define TESTS_SUPPORT_WORLDS_H

#include <stdbool.h>

#include "base/file.h"
#include "tests/support/scenes.h"

enum { WORLD_MOST = 8, PATIENCE_MS = 120000 };

/* How it went for a rank. */
typedef struct outcome {
    bool killed;
    uint64_t ended_ns;
    ckd_status status;
    char message[256];
    ckd_checkpoint info;
} outcome;

/* What happens to a rank: killed before the step, or in the midst of a write; or its steps fail. */
typedef struct fate {
    uint32_t rank;
    unsigned long at; /* which step, from 1; 0: the first that matches */
    file_op step;
    const char *where; /* part of the path; NULL: none */
    int fail;          /* with this errno, instead of being killed */
    bool torn;
    unsigned long seen;
    bool dying;
} fate;
/* For file_set_fault_hook; the context is a fate. */
int fate_hook(void *context, file_op step, const char *path);

typedef struct world {
    const char *dir;
    uint32_t size;
    uint64_t step;
    const fate *fate; /* NULL: nothing happens */
    uint32_t timeout_ms;
    uint32_t first_timeout_ms; /* of rank 0; 0: the same */
    /* Between joining and leaving. */
    ckd_status (*act)(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const struct world *w,
                      uint32_t rank, ckd_error *err);
    /* Before that; NULL: nothing. */
    void (*before)(const struct world *w, uint32_t rank);
    uint32_t started; /* only so many of its ranks come at all; 0: all */
} world;

/* Around a program's tests, which have their directories in memory (scratch.h). */
void worlds_begin(void);
void worlds_end(void);

/* All ranks of the world, from joining to leaving. */
void run_world(outcome out[WORLD_MOST], const world *w);
/* The same, and none fails. */
void all_went_well(const world *w);

/* ---- what ranks do ---- */
ckd_status save_share(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint64_t step, uint32_t rank,
                      ckd_error *err);
/* The world's step. */
ckd_status act_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w, uint32_t rank,
                     ckd_error *err);
/* It, and the two behind it. */
ckd_status act_saves_thrice(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err);
/* *save: NULL if it did not begin, else the caller's, whatever the status. */
ckd_status begin_share(ckd_save **save, ckd_ranks *ranks, const scene *s, const world *w, uint32_t rank,
                       ckd_error *err);

/* ---- what all processes know; worlds_forget: nothing any more ---- */
void worlds_forget(void);
/* Kills this process, and notes when. */
_Noreturn void die_now(void);
void die_in(uint64_t ns);     /* so much later, wherever it is then */
uint64_t death_time_ns(void); /* the last one's; clock_monotonic_ns */
void tell(void);              /* one more process knows what it waited for */
uint64_t told(void);          /* how many have */
/* Until so many have, or patience ends: what is asserted afterwards tells which. */
void await_told(uint64_t count);

#endif
