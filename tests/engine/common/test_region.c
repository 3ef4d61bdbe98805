/* Geometry of shards, compared with lists of the elements of each region. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/common/common.h"

static uint64_t state = 88172645463325252u;
static uint64_t random_below(uint64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? state % n : 0;
}

#define MOST 4096

/* Lists the positions in the tensor of a region's elements, in the order of the region. */
static size_t enumerate(uint64_t *out, const geometry *g, const ckd_region *r) {
    size_t n = 0;
    for (uint64_t e = 0; e < g->elements; e++) {
        int inside = 1;
        if (r->kind == CKD_REGION_FLAT) {
            inside = e >= r->start && e < r->start + r->count;
        } else if (r->kind == CKD_REGION_BOX) {
            for (uint32_t d = 0; d < g->ndim; d++) {
                uint64_t at = e / g->strides[d] % g->shape[d];
                inside = inside && at >= r->offsets[d] && at < r->offsets[d] + r->lengths[d];
            }
        }
        if (inside) {
            out[n++] = e;
        }
    }
    return n;
}

static ckd_region random_region(const geometry *g) {
    ckd_region r = {.kind = (ckd_region_kind)random_below(3)};
    if (r.kind == CKD_REGION_FLAT) {
        r.start = random_below(g->elements + 1);
        r.count = random_below(g->elements - r.start + 1);
    } else if (r.kind == CKD_REGION_BOX) {
        for (uint32_t d = 0; d < g->ndim; d++) {
            r.offsets[d] = random_below(4) ? random_below(g->shape[d] + 1) : 0;
            r.lengths[d] =
                random_below(3) ? g->shape[d] - r.offsets[d] : random_below(g->shape[d] - r.offsets[d] + 1);
        }
    }
    return r;
}

static geometry random_geometry(void) {
    geometry g;
    uint64_t shape[CKD_MAX_DIMS];
    uint32_t ndim = (uint32_t)random_below(5);
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = random_below(20) ? 1 + random_below(7) : 0;
    }
    assert_true(geometry_init(&g, ndim, shape));
    return g;
}

static void test_spans_intersect_like_sets(void **unused) {
    (void)unused;
    static uint64_t of_a[MOST], of_b[MOST];
    static uint32_t from[MOST], to[MOST];
    for (int round = 0; round < 20000; round++) {
        geometry g = random_geometry();
        ckd_region ra = random_region(&g), rb = random_region(&g);
        size_t na = enumerate(of_a, &g, &ra), nb = enumerate(of_b, &g, &rb);
        uint64_t count;
        assert_true(region_count(&count, &g, &ra));
        assert_int_equal(count, na);
        region_span a = {&ra, random_below(na + 1), 0}, b = {&rb, random_below(nb + 1), 0};
        a.count = random_below(na - a.first + 1);
        b.count = random_below(nb - b.first + 1);
        for (size_t i = 0; i < b.count; i++) {
            from[i] = (uint32_t)of_b[b.first + i] + 1;
        }
        memset(to, 0, sizeof(to));
        uint64_t copied = span_copy(&g, sizeof(uint32_t), to, &a, from, &b), expected = 0;
        for (size_t i = 0; i < MOST; i++) {
            uint32_t want = 0;
            if (i < a.count) {
                for (size_t k = 0; k < b.count && !want; k++) {
                    want = of_b[b.first + k] == of_a[a.first + i] ? (uint32_t)of_a[a.first + i] + 1 : 0;
                }
            }
            expected += want != 0;
            assert_int_equal(to[i], want);
        }
        assert_int_equal(copied, expected);
        assert_int_equal(span_common(&g, &a, &b), expected);
        span_run runs[MOST];
        size_t count_of_runs = span_runs(runs, MOST, &g, &a, &b);
        /* Runs copy each element from the right place, and adjacent runs are merged. */
        for (size_t i = 0; i < count_of_runs; i++) {
            for (uint64_t k = 0; k < runs[i].count; k++) {
                assert_int_equal(to[runs[i].to + k], from[runs[i].from + k]);
            }
            expected -= runs[i].count;
            assert_true(i == 0 || runs[i].to != runs[i - 1].to + runs[i - 1].count ||
                        runs[i].from != runs[i - 1].from + runs[i - 1].count);
        }
        assert_int_equal(expected, 0);
        assert_int_equal(span_runs(runs, count_of_runs, &g, &a, &b), count_of_runs);
        assert_true(count_of_runs == 0 || span_runs(runs, count_of_runs - 1, &g, &a, &b) == count_of_runs);
    }
}

static void test_bounds_and_order(void **unused) {
    (void)unused;
    static uint64_t of_a[MOST], of_b[MOST];
    for (int round = 0; round < 20000; round++) {
        geometry g = random_geometry();
        ckd_region ra = random_region(&g), rb = random_region(&g);
        size_t na = enumerate(of_a, &g, &ra), nb = enumerate(of_b, &g, &rb);
        uint64_t global = random_below(g.elements + 2);
        size_t bound = 0;
        while (bound < na && of_a[bound] < global) {
            bound++;
        }
        assert_int_equal(region_lower_bound(&g, &ra, global), bound);
        if (na) {
            size_t at = (size_t)random_below(na);
            assert_int_equal(region_global(&g, &ra, at), of_a[at]);
        }
        int overlap = 0;
        for (size_t i = 0; i < na; i++) {
            for (size_t k = 0; k < nb; k++) {
                overlap = overlap || of_a[i] == of_b[k];
            }
        }
        assert_int_equal(regions_overlap(&g, &ra, &rb), overlap);
        ckd_region ca = region_canonical(&g, &ra), cb = region_canonical(&g, &rb);
        assert_int_equal(region_compare(&ca, &cb, &g), -region_compare(&cb, &ca, &g));
        assert_int_equal(region_equal(&ca, &cb, g.ndim), region_compare(&ca, &cb, &g) == 0);
        assert_int_equal(enumerate(of_b, &g, &ca), na);
        assert_memory_equal(of_a, of_b, na * sizeof(of_a[0]));
    }
}

static void test_caps(void **unused) {
    (void)unused;
    geometry g;
    uint64_t most[] = {1u << 20, 1u << 20}, more[] = {1u << 20, 1u << 20, 2},
             overflow[] = {UINT64_MAX, UINT64_MAX, 0};
    uint64_t many[CKD_MAX_DIMS + 1] = {0};
    assert_true(geometry_init(&g, 2, most));
    assert_true(g.elements == CKD_MAX_ELEMENTS);
    assert_false(geometry_init(&g, 3, more));
    assert_false(geometry_init(&g, 3, overflow));
    assert_false(geometry_init(&g, CKD_MAX_DIMS + 1, many));
    assert_false(geometry_init(&g, 1, NULL));
    assert_true(geometry_init(&g, 0, NULL));
    assert_int_equal(g.elements, 1);
    uint64_t count, shape[] = {10, 10};
    assert_true(geometry_init(&g, 2, shape));
    ckd_region outside[] = {
        {.kind = CKD_REGION_FLAT, .start = 50, .count = 51},
        {.kind = CKD_REGION_FLAT, .start = UINT64_MAX, .count = 2},
        {.kind = CKD_REGION_BOX, .offsets = {5, 0}, .lengths = {6, 10}},
        {.kind = CKD_REGION_BOX, .offsets = {UINT64_MAX, 0}, .lengths = {2, 10}},
        {.kind = (ckd_region_kind)7},
    };
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        assert_false(region_count(&count, &g, &outside[i]));
        assert_int_equal(count, 0);
    }
}

/* 2^40 elements: positions far beyond 32 bits are found without walking to them. */
static void test_huge_tensor(void **unused) {
    (void)unused;
    geometry g;
    uint64_t shape[] = {1u << 16, 1u << 12, 1u << 12};
    assert_true(geometry_init(&g, 3, shape));
    ckd_region box = {.kind = CKD_REGION_BOX, .offsets = {65000, 17, 4000}, .lengths = {500, 4000, 96}};
    uint64_t count;
    assert_true(region_count(&count, &g, &box));
    assert_true(count == UINT64_C(500) * 4000 * 96);
    uint64_t last = region_global(&g, &box, count - 1);
    assert_true(last == (UINT64_C(65499) << 24) + (UINT64_C(4016) << 12) + 4095);
    assert_true(region_lower_bound(&g, &box, last) == count - 1);
    assert_true(region_lower_bound(&g, &box, last + 1) == count);
    ckd_region flat = {.kind = CKD_REGION_FLAT, .start = last - 99, .count = 100};
    region_span a = {&box, 0, count}, b = {&flat, 0, 100};
    assert_int_equal(span_common(&g, &a, &b), 96);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spans_intersect_like_sets),
        cmocka_unit_test(test_bounds_and_order),
        cmocka_unit_test(test_caps),
        cmocka_unit_test(test_huge_tensor),
    };
    return cmocka_run_group_tests_name("region", tests, NULL, NULL);
}
