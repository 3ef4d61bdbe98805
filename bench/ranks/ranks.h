/* The parts of bench_ranks, and the state that its ranks save. */
#ifndef BENCH_RANKS_H
#define BENCH_RANKS_H

#include <ckptdelta.h>
#include <stdbool.h>
#include <stdio.h>

enum { RANKS = 4 };

/* ---- state.c ---- */
/*
 * Random matrices of 4096 x 1024 in f32 with both moments (48 MiB each). From step to step all values move a little.
 * They are computed from tensor, step and element when they are read, so that ranks need no memory for them.
 */
typedef struct ranks_state ranks_state;
/* The part of a rank: its rows of every tensor. */
ranks_state *ranks_state_of(unsigned matrices, uint64_t step, uint32_t rank, uint32_t world);
const ckd_tensor *ranks_state_tensors(size_t *count, const ranks_state *s);
void ranks_state_free(ranks_state *s);
enum { MATRIX_MIB = 48 };

/* ---- the parts; each writes a field of the JSON without a comma after it ---- */
typedef struct ranks_options {
    int kills, matrices;
    int tensors, shards; /* of the store whose loads are planned: tensors x shards blocks */
    const char *dir;     /* of the temporary stores */
} ranks_options;
void bench_kills(FILE *json, const ranks_options *o);
void bench_watching(FILE *json, const ranks_options *o);
void bench_bytes(FILE *json, const ranks_options *o);
void bench_load_plans(FILE *json, const ranks_options *o);

/* ---- support.c ---- */
/* One thread. */
ckd_store *ranks_open(const char *path, ckd_open_mode mode);
/* Runs act(context, rank) in processes of its own, one for each rank, and waits; returns how many ended with 0. */
unsigned ranks_run(uint32_t world, int (*act)(void *context, uint32_t rank), void *context);
/* DIR/NAME, removed if it is there; static. */
const char *ranks_new_path(const ranks_options *o, const char *name);
double ranks_quantile(const double *sorted, size_t count, double share); /* 0.5: the median; 0 of none */
/* The sum of the sizes of all files in a folder and below. */
double ranks_tree_bytes(const char *path);

#endif
