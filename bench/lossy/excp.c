#include "bench/lossy/excp.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

/* ---- pruning ---- */

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

double excp_threshold(const float *residual, const float *v, size_t count, double alpha, double most) {
    float *magnitudes = malloc((count + !count) * sizeof(*magnitudes));
    if (!magnitudes) {
        return -1;
    }
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        magnitudes[i] = fabsf(residual[i]);
        sum += (double)v[i];
    }
    qsort(magnitudes, count, sizeof(*magnitudes), by_value);
    double median = count ? (double)magnitudes[(count - 1) / 2] : 0,
           root = sqrt(sum / (double)(count + !count));
    double factor = root > 0 ? alpha / root : most;
    free(magnitudes);
    return median * (factor < most ? factor : most);
}

void excp_prune_weights(float *residual, size_t count, double threshold) {
    for (size_t i = 0; i < count; i++) {
        if (!(fabs((double)residual[i]) > threshold)) {
            residual[i] = 0;
        }
    }
}

void excp_prune_moments(float *m, float *v, const float *pruned, size_t count, double beta) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += fabs((double)m[i]);
    }
    double threshold = beta * sum / (double)(count + !count);
    for (size_t i = 0; i < count; i++) {
        if (pruned[i] == 0 || !(fabs((double)m[i]) > threshold)) {
            m[i] = v[i] = 0;
        }
    }
}

/* ---- k-means ---- */

/* How many of the ascending values lie below x. */
static size_t below(const float *sorted, size_t count, double x) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((double)sorted[middle] < x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* One round: every centroid goes to the mean of the values nearest to it. Returns whether any has moved. */
static int lloyd(double centroids[EXCP_CENTROIDS], const float *sorted, const double *sums, size_t count) {
    int moved = 0;
    size_t first = 0;
    double next[EXCP_CENTROIDS];
    for (int k = 0; k < EXCP_CENTROIDS; k++) {
        size_t end =
            k + 1 < EXCP_CENTROIDS ? below(sorted, count, (centroids[k] + centroids[k + 1]) / 2) : count;
        next[k] = end > first ? (sums[end] - sums[first]) / (double)(end - first) : centroids[k];
        moved |= next[k] != centroids[k];
        first = end > first ? end : first;
    }
    memcpy(centroids, next, sizeof(next));
    return moved;
}

int excp_kmeans(excp_table *out, const float *sorted, size_t count) {
    *out = (excp_table){0};
    if (count <= EXCP_CENTROIDS) {
        out->count = (unsigned)count;
        memcpy(out->values, sorted, count * sizeof(*sorted));
        return 0;
    }
    double *sums = malloc((count + 1) * sizeof(*sums)), centroids[EXCP_CENTROIDS];
    if (!sums) {
        return -1;
    }
    sums[0] = 0;
    for (size_t i = 0; i < count; i++) {
        sums[i + 1] = sums[i] + (double)sorted[i];
    }
    for (size_t k = 0; k < EXCP_CENTROIDS; k++) {
        centroids[k] = (double)sorted[(2 * k + 1) * count / (2 * EXCP_CENTROIDS)];
    }
    for (int round = 0; round < EXCP_KMEANS_ROUNDS && lloyd(centroids, sorted, sums, count); round++) {
    }
    free(sums);
    out->count = EXCP_CENTROIDS;
    for (int k = 0; k < EXCP_CENTROIDS; k++) {
        out->values[k] = (float)centroids[k];
    }
    return 0;
}

unsigned excp_label(const excp_table *table, float value) {
    if (value == 0 || table->count == 0) {
        return 0;
    }
    unsigned low = 0, high = table->count - 1; /* the first k whose upper border is not below the value */
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if ((double)value > ((double)table->values[middle] + (double)table->values[middle + 1]) / 2) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low + 1;
}

/* ---- bytes ---- */

static uint8_t *append(excp_bytes *out, size_t size) {
    if (out->capacity - out->size < size) {
        size_t capacity = 2 * out->capacity + size + 4096;
        uint8_t *data = realloc(out->data, capacity);
        if (!data) {
            return NULL;
        }
        out->data = data;
        out->capacity = capacity;
    }
    out->size += size;
    return out->data + out->size - size;
}

static const uint8_t *take(excp_input *in, size_t size) {
    if (in->size < size) {
        return NULL;
    }
    in->data += size;
    in->size -= size;
    return in->data - size;
}

void excp_pack(uint8_t *packed, const uint8_t *labels, size_t count) {
    for (size_t i = 0; i < count; i += 2) {
        packed[i / 2] = (uint8_t)(labels[i] << 4 | (i + 1 < count ? labels[i + 1] : 0));
    }
}

void excp_unpack(uint8_t *labels, const uint8_t *packed, size_t count) {
    for (size_t i = 0; i < count; i++) {
        labels[i] = i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
    }
}

/* Halves of centroid x 2^shift, the shift such that the largest lies just below 2^15. */
static void to_halves(uint16_t halves[EXCP_CENTROIDS], int *shift, const excp_table *table) {
    float largest = 0, scaled[EXCP_CENTROIDS];
    for (unsigned k = 0; k < table->count; k++) {
        largest = fmaxf(largest, fabsf(table->values[k]));
    }
    int exponent = 0;
    (void)frexpf(largest, &exponent);
    *shift = 15 - exponent;
    for (unsigned k = 0; k < table->count; k++) {
        scaled[k] = (float)ldexp((double)table->values[k], *shift);
    }
    (void)kernels_cpu()->cast(CKD_F16, halves, CKD_F32, scaled, table->count); /* a supported pair of types */
}

static double half_value(uint16_t half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double magnitude = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return half >> 15 ? -magnitude : magnitude;
}

static void from_halves(excp_table *table, const uint16_t halves[EXCP_CENTROIDS], int shift) {
    for (unsigned k = 0; k < table->count; k++) {
        table->values[k] = (float)ldexp(half_value(halves[k]), -shift);
    }
}

/*
 * A byte: how many centroids, + 128 if they are few enough to be the values themselves. Then these as floats, or two
 * bytes of shift and a half each. `table` becomes what the decoder sees.
 */
static int write_table(excp_bytes *out, excp_table *table, int exact) {
    uint8_t *at = append(out, exact ? 1 + 4 * (size_t)table->count : 3 + 2 * (size_t)table->count);
    if (!at) {
        return -1;
    }
    at[0] = (uint8_t)(table->count | (exact ? 128u : 0));
    if (exact) {
        memcpy(at + 1, table->values, 4 * (size_t)table->count);
        return 0;
    }
    uint16_t halves[EXCP_CENTROIDS];
    int shift = 0;
    to_halves(halves, &shift, table);
    int16_t stored = (int16_t)shift;
    memcpy(at + 1, &stored, 2);
    memcpy(at + 3, halves, 2 * (size_t)table->count);
    from_halves(table, halves, shift);
    return 0;
}

static int read_table(excp_table *table, excp_input *in) {
    *table = (excp_table){0};
    const uint8_t *head = take(in, 1), *at;
    if (!head || (*head & 127) > EXCP_CENTROIDS) {
        return -1;
    }
    int exact = *head >> 7;
    table->count = *head & 127;
    at = take(in, exact ? 4 * (size_t)table->count : 2 + 2 * (size_t)table->count);
    if (!at) {
        return -1;
    }
    if (exact) {
        memcpy(table->values, at, 4 * (size_t)table->count);
        return 0;
    }
    uint16_t halves[EXCP_CENTROIDS];
    int16_t shift;
    memcpy(&shift, at, 2);
    memcpy(halves, at + 2, 2 * (size_t)table->count);
    from_halves(table, halves, shift);
    return 0;
}

/* The table of the values that are not zero. */
static int make_table(excp_table *table, int *exact, const float *values, size_t count) {
    float *sorted = malloc((count + !count) * sizeof(*sorted));
    if (!sorted) {
        return -1;
    }
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (values[i] != 0) {
            sorted[kept++] = values[i];
        }
    }
    qsort(sorted, kept, sizeof(*sorted), by_value);
    *exact = kept <= EXCP_CENTROIDS;
    int failed = excp_kmeans(table, sorted, kept);
    free(sorted);
    return failed;
}

int excp_write(excp_bytes *out, const float *values, size_t count) {
    excp_table table;
    int exact = 0;
    if (make_table(&table, &exact, values, count) || write_table(out, &table, exact)) {
        return -1;
    }
    uint8_t *labels = malloc(count + !count), *packed = labels ? append(out, (count + 1) / 2) : NULL;
    if (packed) {
        for (size_t i = 0; i < count; i++) {
            labels[i] = (uint8_t)excp_label(&table, values[i]);
        }
        excp_pack(packed, labels, count);
    }
    free(labels);
    return packed ? 0 : -1;
}

int excp_read(float *values, size_t count, excp_input *in) {
    excp_table table;
    if (read_table(&table, in)) {
        return -1;
    }
    const uint8_t *packed = take(in, (count + 1) / 2);
    uint8_t *labels = packed ? malloc(count + !count) : NULL;
    int failed = !labels;
    if (labels) {
        excp_unpack(labels, packed, count);
    }
    for (size_t i = 0; !failed && i < count; i++) {
        failed = labels[i] > table.count;
        values[i] = labels[i] && !failed ? table.values[labels[i] - 1] : 0;
    }
    free(labels);
    return failed ? -1 : 0;
}
