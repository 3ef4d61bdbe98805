/*
 * The published competitor in bench/: its thresholds, masks, k-means, labels and arrays are compared with
 * results from other calculations.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "bench/lossy/excp.h"

/* ---- pruning ---- */

static void threshold_is_medians_up_to_a_bound(void **state) {
    (void)state;
    /* |residual| is 1 2 3 4 5 100 with the lower median 3. The mean of v is 4e-10, and its root 2e-5. */
    const float residual[] = {-1, 5, 2, -100, 4, 3}, v[] = {0, 8e-10f, 4e-10f, 4e-10f, 4e-10f, 4e-10f},
                zeros[6] = {0};
    assert_true(fabs(excp_threshold(residual, v, 6, 2e-5, EXCP_MAX_FACTOR) - 3.0) < 1e-6); /* factor 1 */
    assert_true(fabs(excp_threshold(residual, v, 6, 3e-5, EXCP_MAX_FACTOR) - 4.5) < 1e-6); /* factor 1.5 */
    /* 2.5, exactly at the bound. */
    assert_true(fabs(excp_threshold(residual, v, 6, EXCP_ALPHA, EXCP_MAX_FACTOR) - 7.5) < 1e-6);
    assert_true(fabs(excp_threshold(residual, v, 6, 1, EXCP_MAX_FACTOR) - 7.5) < 1e-6);
    assert_true(fabs(excp_threshold(residual, v, 6, INFINITY, EXCP_MAX_FACTOR) - 7.5) < 1e-6);
    /* Without v: the bound. */
    assert_true(fabs(excp_threshold(residual, zeros, 6, EXCP_ALPHA, EXCP_MAX_FACTOR) - 7.5) < 1e-6);
    assert_true(excp_threshold(residual, v, 5, 0, EXCP_MAX_FACTOR) == 0);
    assert_true(fabs(excp_threshold(residual, v, 6, INFINITY, 4) - 12.0) < 1e-6); /* other bounds */
    assert_true(fabs(excp_threshold(residual, zeros, 6, EXCP_ALPHA, 1.5) - 4.5) < 1e-6);
    assert_true(fabs(excp_threshold(residual, v, 6, 3e-5, 1) - 3.0) < 1e-6);
}

static void weights_keep_what_exceeds_the_threshold(void **state) {
    (void)state;
    float residual[] = {1, -2, 2.5f, -2.5f, 0, 3, -4};
    const float expected[] = {0, 0, 0, 0, 0, 3, -4};
    excp_prune_weights(residual, 7, 2.5);
    assert_memory_equal(residual, expected, sizeof(expected));
}

static void moments_need_the_mean_and_the_weight(void **state) {
    (void)state;
    /*
     * The mean of |m| over all seven values, kept or not, is 2. The values -5 and 6 are above 4; one of these
     * has no weight.
     */
    float m[] = {-5, 6, 1, 0, 1, 1, 0}, v[] = {1, 2, 3, 4, 5, 6, 7};
    const float pruned[] = {0.1f, 0, 1, 1, -1, 0, 1}, m_expected[] = {-5, 0, 0, 0, 0, 0, 0},
                v_expected[] = {1, 0, 0, 0, 0, 0, 0};
    excp_prune_moments(m, v, pruned, 7, EXCP_BETA);
    assert_memory_equal(m, m_expected, sizeof(m_expected));
    assert_memory_equal(v, v_expected, sizeof(v_expected));
    /* A value of exactly twice the mean does not exceed it. */
    float border[] = {4, 2, 1, 1}, border_v[] = {1, 1, 1, 1};
    const float all[] = {1, 1, 1, 1};
    excp_prune_moments(border, border_v, all, 4, EXCP_BETA);
    assert_true(border[0] == 0 && border_v[0] == 0);
}

/* ---- k-means ---- */

static void few_values_are_their_own_centroids(void **state) {
    (void)state;
    float values[EXCP_CENTROIDS];
    excp_table table;
    for (int i = 0; i < EXCP_CENTROIDS; i++) {
        values[i] = (float)(i * i) - 50.5f;
    }
    assert_int_equal(excp_kmeans(&table, values, EXCP_CENTROIDS), 0);
    assert_int_equal(table.count, EXCP_CENTROIDS);
    assert_memory_equal(table.values, values, sizeof(values));
    assert_int_equal(excp_kmeans(&table, values, 0), 0);
    assert_int_equal(table.count, 0);
}

static void separate_clusters_are_found(void **state) {
    (void)state;
    /* Fifteen clusters of 40 values around multiples of 100, without 0. Each one's mean is known. */
    float values[EXCP_CENTROIDS * 40];
    excp_table table;
    size_t n = 0;
    for (int k = 0; k < EXCP_CENTROIDS; k++) {
        int centre = k < 7 ? k - 7 : k - 6; /* -7 ... -1, 1 ... 8 */
        for (int i = 0; i < 40; i++) {
            values[n++] = (float)(100 * centre) + (float)i / 4;
        }
    }
    assert_int_equal(excp_kmeans(&table, values, n), 0);
    for (int k = 0; k < EXCP_CENTROIDS; k++) {
        float centre = (float)(100 * (k < 7 ? k - 7 : k - 6));
        assert_true(fabsf(table.values[k] - (centre + 39.0f / 8)) < 1e-3f);
    }
}

/*
 * The result depends on where it begins. But in the end every centroid is the mean of the values nearest to
 * it.
 */
static void centroids_are_means_of_their_cells(void **state) {
    (void)state;
    enum { N = 3000 };
    float *values = malloc(N * sizeof(*values));
    double sums[EXCP_CENTROIDS + 1] = {0}, counts[EXCP_CENTROIDS + 1] = {0};
    excp_table table;
    assert_non_null(values);
    for (int i = 0; i < N; i++) {
        double x = (i + 0.5) / N * 2 - 1; /* heavy tails, no zeros */
        values[i] = (float)(x * x * x + (x < 0 ? -0.01 : 0.01));
    }
    assert_int_equal(excp_kmeans(&table, values, N), 0);
    for (int i = 0; i < N; i++) {
        unsigned nearest = 0, label = excp_label(&table, values[i]);
        for (unsigned k = 1; k < table.count; k++) {
            if (fabsf(values[i] - table.values[k]) < fabsf(values[i] - table.values[nearest])) {
                nearest = k;
            }
        }
        assert_int_equal(label, nearest + 1);
        sums[label] += (double)values[i];
        counts[label]++;
    }
    for (int k = 0; k < EXCP_CENTROIDS; k++) {
        assert_true(counts[k + 1] > 0);
        assert_true(fabs(sums[k + 1] / counts[k + 1] - (double)table.values[k]) < 2e-4);
        assert_true(k == 0 || table.values[k] > table.values[k - 1]);
    }
    assert_int_equal(excp_label(&table, 0), 0);
    free(values);
}

/* ---- labels and arrays ---- */

static void labels_pack_two_a_byte(void **state) {
    (void)state;
    const uint8_t labels[] = {1, 15, 0, 8, 7}, expected[] = {0x1f, 0x08, 0x70};
    uint8_t packed[3], back[5];
    excp_pack(packed, labels, 5);
    assert_memory_equal(packed, expected, sizeof(expected));
    excp_unpack(back, packed, 5);
    assert_memory_equal(back, labels, sizeof(labels));
    excp_pack(packed, labels, 4);
    excp_unpack(back, packed, 4);
    assert_memory_equal(back, labels, 4);
}

/* Second moments of a late training step would be zero in half precision. */
static void arrays_are_read_back_as_centroids(void **state) {
    (void)state;
    enum { N = 1001 };
    static const double scales[] = {1, 1e-3, 1e-12, 1e6};
    for (size_t s = 0; s < sizeof(scales) / sizeof(scales[0]); s++) {
        float values[N], back[N];
        for (int i = 0; i < N; i++) {
            values[i] = i % 3 ? (float)((1 + i % 29) * (i % 2 ? scales[s] : -scales[s])) : 0;
        }
        excp_bytes bytes = {0};
        assert_int_equal(excp_write(&bytes, values, N), 0);
        assert_int_equal(bytes.size, 3 + 2 * EXCP_CENTROIDS + (N + 1) / 2);
        excp_input in = {bytes.data, bytes.size};
        assert_int_equal(excp_read(back, N, &in), 0);
        assert_int_equal(in.size, 0);
        for (int i = 0; i < N; i++) {
            assert_true((values[i] == 0) == (back[i] == 0));
            assert_true(fabs((double)(back[i] - values[i])) <= 4 * scales[s]);
        }
        free(bytes.data);
    }
}

static void few_values_are_read_back_exactly(void **state) {
    (void)state;
    float values[64] = {0}, back[64];
    for (int i = 0; i < EXCP_CENTROIDS; i++) {
        values[4 * i + 1] = 0.1f * (float)(i - 20);
    }
    excp_bytes bytes = {0};
    assert_int_equal(excp_write(&bytes, values, 64), 0);
    excp_input in = {bytes.data, bytes.size};
    assert_int_equal(excp_read(back, 64, &in), 0);
    assert_memory_equal(back, values, sizeof(values));
    free(bytes.data);
}

static void damaged_arrays_are_refused(void **state) {
    (void)state;
    const float values[8] = {0, 1, 0, 2, 0, 3, 0, 4};
    float back[8];
    excp_bytes bytes = {0};
    assert_int_equal(excp_write(&bytes, values, 8), 0);
    for (size_t size = 0; size < bytes.size; size++) {
        excp_input cut = {bytes.data, size};
        assert_int_equal(excp_read(back, 8, &cut), -1);
    }
    bytes.data[bytes.size - 1] = 0x0f; /* a label without a centroid */
    excp_input stray = {bytes.data, bytes.size};
    assert_int_equal(excp_read(back, 8, &stray), -1);
    free(bytes.data);
    const uint8_t many[256] = {128 | 16}, more[256] = {127}; /* more centroids than are possible */
    excp_input crowded[] = {{many, sizeof(many)}, {more, sizeof(more)}};
    assert_int_equal(excp_read(back, 8, &crowded[0]), -1);
    assert_int_equal(excp_read(back, 8, &crowded[1]), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threshold_is_medians_up_to_a_bound),
        cmocka_unit_test(weights_keep_what_exceeds_the_threshold),
        cmocka_unit_test(moments_need_the_mean_and_the_weight),
        cmocka_unit_test(few_values_are_their_own_centroids),
        cmocka_unit_test(separate_clusters_are_found),
        cmocka_unit_test(centroids_are_means_of_their_cells),
        cmocka_unit_test(labels_pack_two_a_byte),
        cmocka_unit_test(arrays_are_read_back_as_centroids),
        cmocka_unit_test(few_values_are_read_back_exactly),
        cmocka_unit_test(damaged_arrays_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
