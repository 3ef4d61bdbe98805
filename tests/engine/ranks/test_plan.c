/*
 * Plans for saves by many ranks, compared with marking every element: which layouts fit together, and what is wrong
 * with those that do not.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/ranks/internal.h"
#include "tests/support/holdings.h"
#include "tests/support/xorshift.h"

static uint64_t random_below(uint64_t n) {
    return n ? next_random() % n : 0;
}

/* ---- marking elements ---- */

static void mark(uint8_t *grid, const geometry *g, const ckd_region *region) {
    uint64_t count;
    assert_true(region_count(&count, g, region));
    for (uint64_t i = 0; i < count; i++) {
        grid[region_global(g, region, i)]++;
    }
}

static bool same_elements(const geometry *g, const ckd_region *a, const ckd_region *b) {
    uint64_t x, y;
    assert_true(region_count(&x, g, a) && region_count(&y, g, b));
    bool same = x == y;
    for (uint64_t i = 0; i < x && same; i++) {
        same = region_global(g, a, i) == region_global(g, b, i);
    }
    return same;
}

/* True if the distinct regions cover each element once. */
static bool fits_by_marking(const holdings *h, const ckd_tensor *t, const geometry *g) {
    uint8_t *grid = calloc(g->elements + 1, 1);
    ckd_region distinct[RANKS_MOST * REGIONS_MOST];
    uint64_t last_of[RANKS_MOST * REGIONS_MOST];
    size_t count = 0;
    bool fits = true;
    for (uint32_t r = 0; r < h->world; r++) {
        for (size_t i = 0; i < h->counts[r]; i++) {
            const ckd_tensor *mine = &h->tensors[r][i];
            uint64_t elements;
            if (strcmp(mine->name, t->name) != 0 || !region_count(&elements, g, &mine->region) || !elements) {
                continue;
            }
            size_t at = 0;
            while (at < count && !same_elements(g, &distinct[at], &mine->region)) {
                at++;
            }
            fits = fits && (at == count || last_of[at] != r); /* one rank has the same region twice */
            if (at == count) {
                distinct[count++] = mine->region;
                mark(grid, g, &mine->region);
            }
            last_of[at] = r;
        }
    }
    for (uint64_t i = 0; i < g->elements; i++) {
        fits = fits && grid[i] == 1;
    }
    free(grid);
    return fits;
}

/* The regions that the plan assigns to writers cover each element once. */
static void check_written(const ckd_plan *plan, const holdings *h, const ckd_tensor *t, const geometry *g) {
    uint8_t *grid = calloc(g->elements + 1, 1);
    size_t writers = 0;
    for (uint32_t r = 0; r < h->world; r++) {
        for (size_t i = 0; i < h->counts[r]; i++) {
            if (strcmp(h->tensors[r][i].name, t->name) == 0 && ckd_plan_writes(plan, r, i)) {
                mark(grid, g, &h->tensors[r][i].region);
                writers++;
            }
        }
    }
    assert_true(writers > 0); /* also if the tensor has no elements */
    for (uint64_t i = 0; i < g->elements; i++) {
        assert_int_equal(grid[i], 1);
    }
    free(grid);
}

/* ---- random layouts ---- */

typedef struct layout {
    geometry g;
    ckd_region regions[REGIONS_MOST];
    size_t count;
} layout;

static void cut_box(layout *l, const ckd_region *box, unsigned depth) {
    uint32_t d = (uint32_t)random_below(l->g.ndim);
    if (depth == 0 || l->count + 2 > REGIONS_MOST / 2 || box->lengths[d] < 2) {
        l->regions[l->count++] = *box;
        return;
    }
    ckd_region low = *box, high = *box;
    low.lengths[d] = 1 + random_below(box->lengths[d] - 1);
    high.offsets[d] += low.lengths[d];
    high.lengths[d] -= low.lengths[d];
    cut_box(l, &low, depth - 1);
    cut_box(l, &high, depth - 1);
}

/* Five boxes around a middle, in two dimensions, which no plane separates. */
static bool pinwheel(layout *l) {
    if (l->g.ndim < 2 || l->g.shape[0] < 3 || l->g.shape[1] < 3) {
        return false;
    }
    uint64_t h = l->g.shape[0], w = l->g.shape[1];
    const uint64_t corners[5][4] = {
        {0, 0, 1, w - 1}, {0, w - 1, h - 1, 1}, {h - 1, 1, 1, w - 1}, {1, 0, h - 1, 1}, {1, 1, h - 2, w - 2}};
    for (size_t i = 0; i < 5; i++) {
        ckd_region *r = &l->regions[l->count++];
        *r = (ckd_region){.kind = CKD_REGION_BOX};
        for (uint32_t d = 0; d < l->g.ndim; d++) {
            r->offsets[d] = d < 2 ? corners[i][d] : 0;
            r->lengths[d] = d < 2 ? corners[i][2 + d] : l->g.shape[d];
        }
    }
    return true;
}

static void cut_flat(layout *l, uint64_t from, uint64_t to) {
    while (from < to) {
        uint64_t n = l->count + 1 >= REGIONS_MOST / 2 ? to - from : 1 + random_below(to - from);
        l->regions[l->count++] = region_flat(from, n);
        from += n;
    }
}

static layout random_layout(void) {
    layout l = {.count = 0};
    uint64_t shape[4] = {0};
    uint32_t ndim = (uint32_t)random_below(5);
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = random_below(12) ? 1 + random_below(7) : 0;
    }
    geometry_init(&l.g, ndim, shape);
    ckd_region all = {.kind = CKD_REGION_BOX};
    memcpy(all.lengths, l.g.shape, sizeof(all.lengths));
    uint64_t how = random_below(4);
    if (ndim == 0 || l.g.elements == 0 || how == 0) {
        l.regions[l.count++] = region_whole();
    } else if (how == 1) {
        cut_flat(&l, 0, l.g.elements);
    } else if (how != 2 || !pinwheel(&l)) {
        cut_box(&l, &all, 5);
    }
    return l;
}

/* Describes the same elements with another kind of region, if possible. */
static ckd_region redescribe(const geometry *g, const ckd_region *r) {
    ckd_region boxes[2 * CKD_MAX_DIMS];
    uint64_t count;
    assert_true(region_count(&count, g, r));
    if (count == 0 || g->ndim == 0) {
        return *r;
    }
    if (r->kind == CKD_REGION_BOX) {
        ckd_region as_flat = region_flat(region_global(g, r, 0), count);
        return same_elements(g, &as_flat, r) ? as_flat : *r;
    }
    uint64_t start = r->kind == CKD_REGION_FLAT ? r->start : 0;
    return flat_boxes(boxes, g, start, count) == 1 ? boxes[0] : *r;
}

/* Makes a change that may leave a gap, an overlap or a duplicate. */
static void disturb(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    uint32_t d = l->g.ndim ? (uint32_t)random_below(l->g.ndim) : 0;
    switch (random_below(6)) {
    case 0: /* keep one region: without any there is no tensor */
        l->count -= l->count > 1;
        *r = l->regions[l->count];
        break;
    case 1:
        l->regions[l->count] = *r;
        l->count++;
        break;
    case 2:
        if (r->kind == CKD_REGION_BOX && r->lengths[d] > 1) {
            r->lengths[d]--;
        }
        break;
    case 3:
        if (r->kind == CKD_REGION_BOX && r->offsets[d] > 0) {
            r->offsets[d]--;
        }
        break;
    case 4:
        if (r->kind == CKD_REGION_FLAT && r->start > 0) {
            r->start--;
        }
        break;
    default:
        if (r->kind == CKD_REGION_FLAT) {
            r->count--;
        }
    }
}

static void give_out(holdings *h, const ckd_tensor *t, const layout *l) {
    for (size_t i = 0; i < l->count; i++) {
        uint32_t rank = (uint32_t)random_below(h->world);
        hold(h, rank, t, &l->regions[i]);
        for (uint32_t r = 0; r < h->world; r++) {
            if (r != rank && random_below(5) == 0) {
                ckd_region other = redescribe(&l->g, &l->regions[i]);
                hold(h, r, t, random_below(2) ? &other : &l->regions[i]);
            }
        }
    }
    if (l->g.ndim && l->g.elements) { /* an empty region for some rank */
        ckd_region none = region_flat(random_below(l->g.elements), 0);
        hold(h, (uint32_t)random_below(h->world), t, &none);
    }
}

static void check_summary(const ckd_plan *plan, const holdings *h, const layout *layouts, size_t count) {
    ckd_plan_summary s = ckd_plan_summarise(plan);
    uint64_t regions = 0, written = 0, raw = 0;
    for (uint32_t r = 0; r < h->world; r++) {
        regions += h->counts[r];
        for (size_t i = 0; i < h->counts[r] + 3; i++) {
            written += (uint64_t)ckd_plan_writes(plan, r, i);
        }
    }
    for (size_t i = 0; i < count; i++) {
        raw += layouts[i].g.elements * 4;
    }
    assert_int_equal(s.world, h->world);
    assert_int_equal(s.tensors, count);
    assert_int_equal(s.regions, regions);
    assert_int_equal(s.written, written);
    assert_int_equal(s.written + s.replicas + s.empty, regions);
    assert_int_equal(s.raw_bytes, raw);
    assert_true(s.min_bytes <= raw / h->world && s.max_bytes >= (raw + h->world - 1) / h->world);
}

static void test_against_marking(void **state) {
    (void)state;
    static const char *const names[TENSOR_COUNT_MAX] = {"a", "b", "exp_avg.a", "deep/er", "e", "f"};
    unsigned accepted = 0, turned_down = 0;
    holdings *h = malloc(sizeof(*h));
    for (int i = 0; i < 20000; i++) {
        layout layouts[TENSOR_COUNT_MAX];
        ckd_tensor tensors[TENSOR_COUNT_MAX];
        size_t count = 1 + random_below(TENSOR_COUNT_MAX), bad = 0;
        memset(h->counts, 0, sizeof(h->counts));
        h->world = 1 + (uint32_t)random_below(RANKS_MOST);
        for (size_t k = 0; k < count; k++) {
            layouts[k] = random_layout();
            tensors[k] = holdings_tensor(names[k], CKD_F32, layouts[k].g.ndim, layouts[k].g.shape);
            if (layouts[k].g.elements && random_below(4) == 0) {
                disturb(&layouts[k]);
            }
            size_t most = 0;
            for (uint32_t r = 0; r < h->world; r++) {
                most = h->counts[r] > most ? h->counts[r] : most;
            }
            if (most + layouts[k].count + 3 > REGIONS_MOST) {
                count = k;
                break;
            }
            give_out(h, &tensors[k], &layouts[k]);
            bad += !fits_by_marking(h, &tensors[k], &layouts[k].g);
        }
        ckd_plan *plan;
        ckd_error err = {0};
        ckd_status status = holdings_plan(&plan, h, &err);
        assert_int_equal(status, bad ? CKD_E_MISMATCH : CKD_OK);
        turned_down += bad != 0;
        accepted += !bad;
        for (size_t k = 0; k < count && !bad; k++) {
            check_written(plan, h, &tensors[k], &layouts[k].g);
        }
        if (!bad) {
            check_summary(plan, h, layouts, count);
        }
        ckd_plan_free(plan);
    }
    free(h);
    print_message("%u plans, %u refused\n", accepted, turned_down);
    assert_true(accepted > 5000 && turned_down > 3000);
}

/* ---- defects ---- */

static void region_at(ckd_region *out, const void *context, size_t index) {
    *out = ((const ckd_region *)context)[index];
}

/* All elements of the reported box are in both regions, or in none. */
static void check_defect(const layout *l, const plan_defect *defect, const uint8_t *grid) {
    uint64_t count;
    assert_true(l->g.ndim == 0 || (region_count(&count, &l->g, &defect->box) && count > 0));
    uint8_t *box = calloc(l->g.elements, 1), *a = calloc(l->g.elements, 1), *b = calloc(l->g.elements, 1);
    mark(box, &l->g, &defect->box);
    if (defect->overlap) {
        assert_true(defect->a != defect->b);
        mark(a, &l->g, &l->regions[defect->a]);
        mark(b, &l->g, &l->regions[defect->b]);
    }
    for (uint64_t i = 0; i < l->g.elements; i++) {
        if (box[i]) {
            assert_true(defect->overlap ? a[i] && b[i] : !grid[i]);
        }
    }
    free(box);
    free(a);
    free(b);
}

static void test_defects_are_real(void **state) {
    (void)state;
    unsigned found_some = 0, none = 0;
    for (int i = 0; i < 40000; i++) {
        layout l = random_layout();
        if (l.g.elements == 0) {
            continue;
        }
        for (uint64_t n = random_below(3); n > 0 && l.count > 0; n--) {
            disturb(&l);
        }
        for (size_t k = l.count; k-- > 0;) { /* planning removes these too */
            uint64_t count;
            if (!region_count(&count, &l.g, &l.regions[k]) || count == 0) {
                l.regions[k] = l.regions[--l.count];
            }
        }
        uint8_t *grid = calloc(l.g.elements, 1);
        bool bad = false;
        for (size_t k = 0; k < l.count; k++) {
            mark(grid, &l.g, &l.regions[k]);
        }
        for (uint64_t k = 0; k < l.g.elements; k++) {
            bad = bad || grid[k] != 1;
        }
        plan_defect defect;
        assert_int_equal(plan_find_defect(&defect, &l.g, region_at, l.regions, l.count, NULL), CKD_OK);
        assert_int_equal(defect.found, bad);
        if (defect.found) {
            check_defect(&l, &defect, grid);
        }
        found_some += defect.found;
        none += !defect.found;
        free(grid);
    }
    assert_true(found_some > 5000 && none > 5000);
}

static void test_flat_ranges_become_few_boxes(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) {
        uint64_t shape[4];
        uint32_t ndim = 1 + (uint32_t)random_below(4);
        for (uint32_t d = 0; d < ndim; d++) {
            shape[d] = 1 + random_below(6);
        }
        geometry g;
        geometry_init(&g, ndim, shape);
        uint64_t start = random_below(g.elements), count = 1 + random_below(g.elements - start);
        ckd_region boxes[2 * CKD_MAX_DIMS], r = region_flat(start, count);
        size_t n = flat_boxes(boxes, &g, start, count);
        assert_true(n >= 1 && n <= 2 * ndim - 1);
        uint64_t at = start;
        for (size_t k = 0; k < n; k++) { /* in the order of the range */
            uint64_t size;
            assert_true(region_count(&size, &g, &boxes[k]));
            for (uint64_t e = 0; e < size; e++) {
                assert_int_equal(region_global(&g, &boxes[k], e), at++);
            }
        }
        assert_int_equal(at, start + count);
        ckd_region as_box = region_as_box(&g, &r);
        assert_int_equal(as_box.kind == CKD_REGION_BOX, n == 1);
        assert_true(same_elements(&g, &as_box, &r));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_marking),
        cmocka_unit_test(test_defects_are_real),
        cmocka_unit_test(test_flat_ranges_become_few_boxes),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
