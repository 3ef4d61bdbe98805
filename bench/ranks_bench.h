/* What bench_ranks consists of, and the state that its ranks save. */
#ifndef BENCH_RANKS_BENCH_H
#define BENCH_RANKS_BENCH_H

#include <ckptdelta.h>
#include <stdbool.h>
#include <stdio.h>

enum { RANKS = 4 };

/* ---- ranks_state.c ---- */
/*
 * Matrices of 4096 x 1024 in f32 with both moments (48 MiB each), drawn at random; from step to step all values move a little. Values follow from
 * tensor, step and element, and are made when they are read, so that no rank needs memory for them.
 */
typedef struct ranks_state ranks_state;
/* What a rank has of it: its rows of every tensor. */
ranks_state *ranks_state_of(unsigned matrices, uint64_t step, uint32_t rank, uint32_t world);
const ckd_tensor *ranks_state_tensors(size_t *count, const ranks_state *s);
void ranks_state_free(ranks_state *s);
enum { MATRIX_MIB = 48 };

/* ---- one part each; a field of the JSON, without a comma behind it ---- */
typedef struct ranks_options {
    unsigned kills, matrices;
    unsigned tensors, shards; /* of the store whose loads are planned: tensors x shards blocks */
    const char *dir;          /* where stores may be made, and are removed again */
} ranks_options;
void bench_kills(FILE *json, const ranks_options *o);
void bench_watching(FILE *json, const ranks_options *o);
void bench_bytes(FILE *json, const ranks_options *o);
void bench_load_plans(FILE *json, const ranks_options *o);

/* ---- ranks_support.c ---- */
/* Exits with what went wrong. */
void ranks_must(ckd_status status, const char *what, const ckd_error *err);
/* One thread. */
ckd_store *ranks_open(const char *path, ckd_open_mode mode);
/* Runs act(context, rank) in processes of its own, one for each rank, and waits; returns how many ended with 0. */
unsigned ranks_run(uint32_t world, int (*act)(void *context, uint32_t rank), void *context);
/* DIR/NAME, removed if it is there; static. */
const char *ranks_new_path(const ranks_options *o, const char *name);
double ranks_share(const double *sorted, size_t count, double share); /* 0.5: the median */
void ranks_sort(double *values, size_t count);
/* Sizes of all files below. */
double ranks_tree_bytes(const char *path);

#endif
