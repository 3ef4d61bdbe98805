/* Tensors that move as training moves them, and saving and loading them in lossy fidelities. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_DRIFT_H
#define TESTS_SUPPORT_DRIFT_H

#include "include/ckptdelta.h"

/*
 * A weight with its moments. Every step moves the weight by a low-rank part and noise, always by as much; first moments are drawn anew but
 * for a third, with scales by row; second moments stay nearly what they are.
 */
typedef struct drift {
    uint64_t rows, columns, count;
    float *weight, *first, *second;
    float *usual; /* what second moments vary around */
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

/* As floats: what is stored as f32, bf16 or f16. malloc'ed. */
float *load_floats(ckd_store *store, const char *run, uint64_t step, const char *name, ckd_dtype dtype,
                   uint64_t count);
/* The values in the dtype, rounded to nearest; malloc'ed. */
void *to_dtype(const float *values, ckd_dtype dtype, uint64_t count);
void widen_to(float *out, const void *values, ckd_dtype dtype, uint64_t count);

/* Over finite values of `wanted`. */
double relative_error(const float *got, const float *wanted, uint64_t count);
double largest_error(const float *got, const float *wanted, uint64_t count);
double root_mean_square(const float *values, uint64_t count);
/* Standard normal. */
double drift_normal(uint64_t *random);

/* What the list of a checkpoint says of a tensor; fails the test if it has none of this name. */
ckd_tensor_info tensor_info(ckd_store *store, const char *run, uint64_t step, const char *name);
ckd_checkpoint checkpoint_at(ckd_store *store, const char *run, uint64_t step);

#endif
