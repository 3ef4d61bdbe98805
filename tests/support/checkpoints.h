/* Makes, saves and loads small checkpoints in tests. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_CHECKPOINTS_H
#define TESTS_SUPPORT_CHECKPOINTS_H

#include "include/ckptdelta.h"

/* Creates DIR/store; opens it again. */
ckd_store *store_create(const char *dir);
ckd_store *store_reopen(const char *dir, ckd_open_mode mode);

/*
 * Random values; malloc'ed. Floats of 32 and 64 bits are like trained weights (normal, with scales that vary by row);
 * those of 8 and 16 are random bits, but finite, as a checkpoint with NaNs is suspect. Integers are small.
 */
void *random_values(ckd_dtype dtype, uint64_t count, unsigned seed);
/* Incompressible bytes; malloc'ed. */
void *random_bits(uint64_t count, unsigned seed);
/* Makes a small step: floats change by a few ulp of their lower half, and some integers by one. */
void change_values(ckd_dtype dtype, void *values, uint64_t count, unsigned seed);
uint16_t *round_to_bf16(const float *values, uint64_t count);

/* Default options for a step of a run. */
ckd_save_options options_of(const char *run, uint64_t step);
ckd_save *begin_with(ckd_store *store, const ckd_save_options *o);
ckd_save *begin_save(ckd_store *store, const char *run, uint64_t step);
/* Saves a tensor, or with `region` a part of it. */
void add_tensor(ckd_save *save, const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                const ckd_region *region, const void *data);
/* Saves a checkpoint with one tensor. */
ckd_checkpoint save_one(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                        uint32_t ndim, const uint64_t *shape, const void *data);
/* Saves an f32 tensor in several regions: flat ranges, rows or a grid, depending on `layout`. */
void save_sharded(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                  const uint64_t *shape, const float *values, uint64_t layout);
/* Loads a whole tensor; malloc'ed. */
void *load_whole(ckd_store *store, const char *run, uint64_t step, const char *name, size_t size);
/* Loads a random box or range of an f32 tensor and compares it with `values`. */
void check_random_region(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                         const uint64_t *shape, const float *values, unsigned seed);
/* Returns the number of damaged places that a full verification finds. */
size_t verify_damage(ckd_store *store);

#endif
