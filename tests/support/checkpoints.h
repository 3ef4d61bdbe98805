/* Making, saving and loading small checkpoints in tests. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_CHECKPOINTS_H
#define TESTS_SUPPORT_CHECKPOINTS_H

#include "include/ckptdelta.h"

/* DIR/store, created. */
ckd_store *store_create(const char *dir);
ckd_store *store_reopen(const char *dir, ckd_open_mode mode);

/* malloc'ed. Floats: weights as training leaves them (normal, scales that vary by row); integers: small numbers. */
void *random_values(ckd_dtype dtype, uint64_t count, unsigned seed);
/* Incompressible bytes. */
void *random_bits(uint64_t count, unsigned seed);
/* A small step: floats move by a few ulp of their lower half, integers now and then by one. */
void change_values(ckd_dtype dtype, void *values, uint64_t count, unsigned seed);
uint16_t *round_to_bf16(const float *values, uint64_t count);

/* Defaults, for a step of a run. */
ckd_save_options options_of(const char *run, uint64_t step);
ckd_save *begin_with(ckd_store *store, const ckd_save_options *o);
ckd_save *begin_save(ckd_store *store, const char *run, uint64_t step);
/* region NULL: the whole tensor. */
void add_tensor(ckd_save *save, const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                const ckd_region *region, const void *data);
/* A checkpoint of one tensor. */
ckd_checkpoint save_one(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                        uint32_t ndim, const uint64_t *shape, const void *data);
/* An f32 tensor in several regions: flat ranges, rows or a grid, by `layout`. */
void save_sharded(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                  const uint64_t *shape, const float *values, uint64_t layout);
/* malloc'ed. */
void *load_whole(ckd_store *store, const char *run, uint64_t step, const char *name, size_t size);
/* Loads a random box or range of an f32 tensor and compares it with `values`. */
void check_random_region(ckd_store *store, const char *run, uint64_t step, const char *name, uint32_t ndim,
                         const uint64_t *shape, const float *values, unsigned seed);
/* Number of damaged places that a full verification finds. */
size_t verify_damage(ckd_store *store);

#endif
