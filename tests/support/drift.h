/*
 * Tensors that change as in training, and functions to save and load them in lossy fidelities. Failures fail
 * the running cmocka test.
 */
#ifndef TESTS_SUPPORT_DRIFT_H
#define TESTS_SUPPORT_DRIFT_H

#include "include/ckptdelta.h"

/*
 * A weight and its moments. Each step changes the weight by a low-rank part and noise, of the same size each
 * time. A third of each first moment stays, the rest is new; their scales differ by row. Second moments
 * change little.
 */
typedef struct drift {
    uint64_t rows, columns, count;
    float *weight, *first, *second;
    float *usual; /* the mean of each second moment */
    uint64_t random;
} drift;
drift drift_new(uint64_t rows, uint64_t columns, unsigned seed);
void drift_step(drift *d);
void drift_free(drift *d);

/* Options of a lossy save. */
ckd_save_options lossy_options(const char *run, uint64_t step, ckd_fidelity fidelity);
/* Saves exp_avg_sq.NAME, exp_avg.NAME and NAME as rows x columns, f32. */
void add_drift(ckd_save *save, const char *name, const drift *d);
ckd_checkpoint commit_save(ckd_save *save);
/* A checkpoint of one weight named "w" and its moments. */
ckd_checkpoint save_drift(ckd_store *store, const ckd_save_options *o, const drift *d);

/* Loads a tensor that is stored as f32, bf16 or f16, as floats; malloc'ed. */
float *load_floats(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                   uint64_t count);
/* The values in the dtype, rounded to nearest; malloc'ed. */
void *to_dtype(const float *values, ckd_dtype dtype, uint64_t count);
void widen_to(float *out, const void *values, ckd_dtype dtype, uint64_t count);

/* The relative error over the values of `wanted` that are finite. */
double relative_error(const float *got, const float *wanted, uint64_t count);
double largest_error(const float *got, const float *wanted, uint64_t count);
double root_mean_square(const float *values, uint64_t count);
/* A number of the standard normal distribution. */
double drift_normal(uint64_t *random);

/* The entry of a tensor in a checkpoint's list. Fails the test if there is none of this name. */
ckd_tensor_info tensor_info(ckd_store *store, const char *run, uint64_t step, const char *name);
ckd_checkpoint checkpoint_at(ckd_store *store, const char *run, uint64_t step);

#endif
