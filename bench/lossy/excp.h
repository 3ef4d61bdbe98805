/*
 * ExCP, the published competitor of lossy checkpoint deltas, written from its description for comparison only:
 *
 *   W. Li, X. Chen, H. Shu, Y. Tang, Y. Wang, "ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum Joint
 *   Shrinking", ICML 2024, arXiv:2406.11257, sections 3.2 to 3.4, with the defaults of the authors' released program.
 *
 * Per tensor, matrices and vectors alike (as the released program does): the residual of the weights to the
 * reconstructed parent is pruned by a threshold, the first moment by its mean and by the residual's mask, the second
 * moment by the first one's mask. What is not zero is quantised by k-means: label 0 is zero, labels 1 to 15 are
 * centroids, two labels a byte.
 *
 * Each choice that the description leaves open is made in its favour. k-means sees all values (not a sample), starts at
 * quantiles and runs until it converges. Centroids take 16 bits as in the released program, but with a common power of
 * two, so that small second moments do not underflow. Up to 15 values are stored as they are. Functions that return int
 * return 0, or -1 when memory or input is missing. Thread-safe.
 */
#ifndef BENCH_EXCP_H
#define BENCH_EXCP_H

#include <stddef.h>
#include <stdint.h>

enum { EXCP_CENTROIDS = 15, EXCP_KMEANS_ROUNDS = 300 };

#define EXCP_ALPHA      5e-5 /* of the weights' threshold */
#define EXCP_MAX_FACTOR 2.5  /* medians, the limit of its authors; an infinite alpha always reaches it */
#define EXCP_BETA       2.0  /* of the moments' threshold: this many means */

/* A byte buffer that grows; release `data` with free(). */
typedef struct excp_bytes {
    uint8_t *data;
    size_t size, capacity;
} excp_bytes;

/* What remains to be read. */
typedef struct excp_input {
    const uint8_t *data;
    size_t size;
} excp_input;

/* 15 centroids or fewer, ascending, as a decoder sees them. */
typedef struct excp_table {
    unsigned count;
    float values[EXCP_CENTROIDS];
} excp_table;

/*
 * Median of |residual| x min(most, alpha / sqrt(mean of v)). The median of an even count is the lower one. Negative: no
 * memory.
 */
double excp_threshold(const float *residual, const float *v, size_t count, double alpha, double most);
/* Sets values that do not exceed the threshold to zero. */
void excp_prune_weights(float *residual, size_t count, double threshold);
/* Keeps m, and v with it, where |m| > beta x mean of |m| and the pruned residual is not zero. */
void excp_prune_moments(float *m, float *v, const float *pruned, size_t count, double beta);

/* One-dimensional k-means of ascending values: quantiles first, then Lloyd's rounds. */
int excp_kmeans(excp_table *out, const float *sorted, size_t count);
/* 1 + the nearest centroid, 0 for zero. */
unsigned excp_label(const excp_table *table, float value);

/* Two labels a byte, the first in the high half: (count + 1) / 2 bytes. */
void excp_pack(uint8_t *packed, const uint8_t *labels, size_t count);
void excp_unpack(uint8_t *labels, const uint8_t *packed, size_t count);

/* Appends an array: its table, then its labels. */
int excp_write(excp_bytes *out, const float *values, size_t count);
/* Reads an array and advances. -1 also for an invalid table or labels. */
int excp_read(float *values, size_t count, excp_input *in);

#endif
