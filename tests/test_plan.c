/* Plans of saves by many ranks: against painting every element, and what they say when ranks do not fit together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/plan.h"
#include "tests/support/xorshift.h"

enum { RANKS_MOST = 12, REGIONS_MOST = 64, TENSORS_MOST = 6 };

static uint64_t random_below(uint64_t n) {
    return n ? next_random() % n : 0;
}

/* ---- what ranks hold ---- */

typedef struct holdings {
    uint32_t world;
    ckd_tensor tensors[RANKS_MOST][REGIONS_MOST];
    size_t counts[RANKS_MOST];
} holdings;

static void hold(holdings *h, uint32_t rank, const ckd_tensor *t, const ckd_region *region) {
    assert_true(h->counts[rank] < REGIONS_MOST);
    ckd_tensor mine = *t;
    mine.region = *region;
    h->tensors[rank][h->counts[rank]++] = mine;
}

static ckd_tensor tensor_of(const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = dtype;
    t.ndim = ndim;
    t.shape = shape;
    return t;
}

static ckd_region whole(void) {
    return (ckd_region){.kind = CKD_REGION_WHOLE};
}
static ckd_region flat(uint64_t start, uint64_t count) {
    return (ckd_region){.kind = CKD_REGION_FLAT, .start = start, .count = count};
}
static ckd_region rows(uint64_t from, uint64_t count, uint64_t columns) {
    return (ckd_region){.kind = CKD_REGION_BOX, .offsets = {from, 0}, .lengths = {count, columns}};
}

static ckd_status make(ckd_plan **plan, const holdings *h, ckd_error *err) {
    ckd_bytes descriptions[RANKS_MOST] = {{NULL, 0}};
    ckd_status status = CKD_OK;
    for (uint32_t r = 0; r < h->world && status == CKD_OK; r++) { /* handed on in any order */
        status =
            ckd_plan_describe(&descriptions[h->world - 1 - r], r, h->world, h->tensors[r], h->counts[r], err);
    }
    *plan = NULL;
    if (status == CKD_OK) {
        status = ckd_plan_make(plan, descriptions, h->world, err);
    }
    for (uint32_t r = 0; r < h->world; r++) {
        ckd_bytes_free(&descriptions[r]);
    }
    return status;
}

static ckd_plan *planned(const holdings *h) {
    ckd_plan *plan;
    ckd_error err = {0};
    if (make(&plan, h, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.tensor);
    }
    return plan;
}

/* Does not make a plan: `what` is in the message, the tensor is named. */
static void refused(const holdings *h, ckd_status status, const char *tensor, const char *what) {
    ckd_plan *plan;
    ckd_error err = {0};
    assert_int_equal(make(&plan, h, &err), status);
    assert_null(plan);
    assert_string_equal(err.tensor, tensor);
    if (!strstr(err.message, what)) {
        fail_msg("\"%s\" does not say \"%s\"", err.message, what);
    }
}

/* ---- painting ---- */

static void paint(uint8_t *grid, const geometry *g, const ckd_region *region) {
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

/* Distinct regions cover each element once. */
static bool fits_by_painting(const holdings *h, const ckd_tensor *t, const geometry *g) {
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
            fits = fits && (at == count || last_of[at] != r); /* one rank, twice the same */
            if (at == count) {
                distinct[count++] = mine->region;
                paint(grid, g, &mine->region);
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

/* What the plan has written covers each element once. */
static void check_written(const ckd_plan *plan, const holdings *h, const ckd_tensor *t, const geometry *g) {
    uint8_t *grid = calloc(g->elements + 1, 1);
    size_t writers = 0;
    for (uint32_t r = 0; r < h->world; r++) {
        for (size_t i = 0; i < h->counts[r]; i++) {
            if (strcmp(h->tensors[r][i].name, t->name) == 0 && ckd_plan_writes(plan, r, i)) {
                paint(grid, g, &h->tensors[r][i].region);
                writers++;
            }
        }
    }
    assert_true(writers > 0); /* also if it has no elements */
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

/* Boxes that no plane cuts: five in two dimensions, around a middle. */
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
        l->regions[l->count++] = flat(from, n);
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
        l.regions[l.count++] = whole();
    } else if (how == 1) {
        cut_flat(&l, 0, l.g.elements);
    } else if (how != 2 || !pinwheel(&l)) {
        cut_box(&l, &all, 5);
    }
    return l;
}

/* Another way to write the same region. */
static ckd_region in_other_words(const geometry *g, const ckd_region *r) {
    ckd_region boxes[2 * CKD_MAX_DIMS];
    uint64_t count;
    assert_true(region_count(&count, g, r));
    if (count == 0 || g->ndim == 0) {
        return *r;
    }
    if (r->kind == CKD_REGION_BOX) {
        ckd_region as_flat = flat(region_global(g, r, 0), count);
        return same_elements(g, &as_flat, r) ? as_flat : *r;
    }
    uint64_t start = r->kind == CKD_REGION_FLAT ? r->start : 0;
    return flat_boxes(boxes, g, start, count) == 1 ? boxes[0] : *r;
}

/* Now and then something is wrong, or at least different. */
static void disturb(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    uint32_t d = l->g.ndim ? (uint32_t)random_below(l->g.ndim) : 0;
    switch (random_below(6)) {
    case 0: /* a tensor that nobody holds is none */
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
                ckd_region other = in_other_words(&l->g, &l->regions[i]);
                hold(h, r, t, random_below(2) ? &other : &l->regions[i]);
            }
        }
    }
    if (l->g.ndim && l->g.elements) { /* a rank with nothing of it */
        ckd_region none = flat(random_below(l->g.elements), 0);
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
    assert_true(s.least_bytes <= raw / h->world && s.most_bytes >= (raw + h->world - 1) / h->world);
}

static void test_against_painting(void **state) {
    (void)state;
    static const char *const names[TENSORS_MOST] = {"a", "b", "exp_avg.a", "deep/er", "e", "f"};
    unsigned accepted = 0, turned_down = 0;
    holdings *h = malloc(sizeof(*h));
    for (int i = 0; i < 20000; i++) {
        layout layouts[TENSORS_MOST];
        ckd_tensor tensors[TENSORS_MOST];
        size_t count = 1 + random_below(TENSORS_MOST), bad = 0;
        memset(h->counts, 0, sizeof(h->counts));
        h->world = 1 + (uint32_t)random_below(RANKS_MOST);
        for (size_t k = 0; k < count; k++) {
            layouts[k] = random_layout();
            tensors[k] = tensor_of(names[k], CKD_F32, layouts[k].g.ndim, layouts[k].g.shape);
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
            bad += !fits_by_painting(h, &tensors[k], &layouts[k].g);
        }
        ckd_plan *plan;
        ckd_error err = {0};
        ckd_status status = make(&plan, h, &err);
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

/* What is found is really so: all elements of the box in both regions, or in none. */
static void check_defect(const layout *l, const plan_defect *defect, const uint8_t *grid) {
    uint64_t count;
    assert_true(l->g.ndim == 0 || (region_count(&count, &l->g, &defect->box) && count > 0));
    uint8_t *box = calloc(l->g.elements, 1), *a = calloc(l->g.elements, 1), *b = calloc(l->g.elements, 1);
    paint(box, &l->g, &defect->box);
    if (defect->overlap) {
        assert_true(defect->a != defect->b);
        paint(a, &l->g, &l->regions[defect->a]);
        paint(b, &l->g, &l->regions[defect->b]);
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
        for (size_t k = l.count; k-- > 0;) { /* as planning does */
            uint64_t count;
            if (!region_count(&count, &l.g, &l.regions[k]) || count == 0) {
                l.regions[k] = l.regions[--l.count];
            }
        }
        uint8_t *grid = calloc(l.g.elements, 1);
        bool bad = false, found;
        for (size_t k = 0; k < l.count; k++) {
            paint(grid, &l.g, &l.regions[k]);
        }
        for (uint64_t k = 0; k < l.g.elements; k++) {
            bad = bad || grid[k] != 1;
        }
        plan_defect defect;
        assert_int_equal(plan_find_defect(&defect, &found, &l.g, region_at, l.regions, l.count, NULL),
                         CKD_OK);
        assert_int_equal(found, bad);
        if (found) {
            check_defect(&l, &defect, grid);
        }
        found_some += found;
        none += !found;
        free(grid);
    }
    assert_true(found_some > 5000 && none > 5000);
}

static void test_flat_ranges_are_few_boxes(void **state) {
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
        ckd_region boxes[2 * CKD_MAX_DIMS], r = flat(start, count);
        size_t n = flat_boxes(boxes, &g, start, count);
        assert_true(n >= 1 && n <= 2 * ndim - 1);
        uint64_t at = start;
        for (size_t k = 0; k < n; k++) { /* in the range's order */
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

/* ---- who writes ---- */

static void test_replicas_are_spread(void **state) {
    (void)state;
    static holdings h;
    static char names[16][16];
    const uint64_t shape[1] = {1000};
    memset(&h, 0, sizeof(h));
    h.world = 4;
    ckd_region all = whole(), quarter;
    for (int i = 0; i < 16; i++) {
        snprintf(names[i], sizeof(names[i]), "t%d", i);
        ckd_tensor t = tensor_of(names[i], CKD_F32, 1, shape);
        for (uint32_t r = 0; r < 4; r++) {
            hold(&h, r, &t, &all);
        }
    }
    ckd_tensor own =
        tensor_of("own", CKD_F32, 1, shape); /* rank 3 has 2000 bytes of its own more than the others */
    for (uint32_t r = 0; r < 4; r++) {
        quarter = r < 3 ? flat(r * 125, 125) : flat(375, 625);
        hold(&h, r, &own, &quarter);
    }
    ckd_plan *plan = planned(&h);
    ckd_plan_summary s = ckd_plan_summarise(plan);
    assert_int_equal(s.raw_bytes, 17 * 4000);
    assert_int_equal(s.replicas, 16 * 3);
    assert_int_equal(s.most_bytes, 4 * 4000 + 2500); /* 68000 bytes: 17000 each would be even */
    assert_int_equal(s.least_bytes, 4 * 4000 + 500);
    ckd_plan_free(plan);
}

/* What is predicted from each other is saved together. */
static void test_parameters_stay_together(void **state) {
    (void)state;
    static holdings h;
    static char names[8][3][24];
    static const char *const prefixes[3] = {"exp_avg.", "exp_avg_sq.", ""};
    memset(&h, 0, sizeof(h));
    h.world = 3;
    uint64_t shapes[8][1];
    ckd_region all = whole();
    for (uint64_t i = 0; i < 8; i++) {
        shapes[i][0] = 100 + 17 * i;
        for (size_t k = 0; k < 3; k++) {
            snprintf(names[i][k], sizeof(names[i][k]), "%sp%d", prefixes[k], (int)i);
            ckd_tensor t = tensor_of(names[i][k], CKD_F32, 1, shapes[i]);
            for (uint32_t r = 0; r < 3; r++) {
                hold(&h, r, &t, &all);
            }
        }
    }
    ckd_plan *plan = planned(&h);
    for (uint32_t r = 0; r < 3; r++) {
        unsigned written = 0;
        for (size_t i = 0; i < 24; i += 3) {
            assert_int_equal(ckd_plan_writes(plan, r, i), ckd_plan_writes(plan, r, i + 1));
            assert_int_equal(ckd_plan_writes(plan, r, i), ckd_plan_writes(plan, r, i + 2));
            written += (unsigned)ckd_plan_writes(plan, r, i);
        }
        assert_true(written >= 2);
    }
    ckd_plan_free(plan);
}

/* A box and the range of the same elements are replicas of each other. */
static void test_same_elements_are_replicas(void **state) {
    (void)state;
    static holdings h;
    memset(&h, 0, sizeof(h));
    h.world = 3;
    const uint64_t shape[2] = {4, 5};
    ckd_tensor t = tensor_of("w", CKD_BF16, 2, shape);
    ckd_region top = rows(0, 2, 5), same = flat(0, 10), rest = flat(10, 10);
    hold(&h, 0, &t, &top);
    hold(&h, 1, &t, &same);
    hold(&h, 2, &t, &rest);
    ckd_plan *plan = planned(&h);
    assert_int_equal(ckd_plan_summarise(plan).replicas, 1);
    assert_int_equal(ckd_plan_writes(plan, 0, 0) + ckd_plan_writes(plan, 1, 0), 1);
    assert_int_equal(ckd_plan_writes(plan, 2, 0), 1);
    assert_int_equal(ckd_plan_writes(plan, 2, 1), 0);
    assert_int_equal(ckd_plan_writes(plan, 3, 0), 0);
    ckd_plan_free(plan);
}

/* ---- what is refused ---- */

static void test_refusals_name_ranks_and_elements(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {8, 6}, other[2] = {8, 7};
    ckd_tensor t = tensor_of("layer.w", CKD_F32, 2, shape);
    ckd_region top = rows(0, 5, 6), bottom = rows(4, 4, 6), lowest = rows(6, 2, 6), beyond = rows(4, 5, 6);

    memset(&h, 0, sizeof(h));
    h.world = 3;
    hold(&h, 0, &t, &top);
    hold(&h, 2, &t, &bottom);
    refused(&h, CKD_E_MISMATCH, "layer.w", "ranks 0 and 2 both hold its elements [4:5, 0:6]");
    h.tensors[2][0].region = lowest;
    refused(&h, CKD_E_MISMATCH, "layer.w", "no rank holds its elements [5:6, 0:6]");
    h.tensors[2][0].region = beyond;
    refused(&h, CKD_E_MISMATCH, "layer.w", "does not lie in its shape");
    h.tensors[2][0].region = bottom;
    h.tensors[2][0].shape = other;
    h.tensors[2][0].region.lengths[1] = 7;
    refused(&h, CKD_E_MISMATCH, "layer.w",
            "to rank 0 the tensor is weight f32 [8, 6], to rank 2 it is weight f32 [8, 7]");
    h.tensors[2][0] = t;
    h.tensors[2][0].dtype = CKD_BF16;
    refused(&h, CKD_E_MISMATCH, "layer.w", "to rank 2 it is weight bf16 [8, 6]");
    h.tensors[2][0] = h.tensors[0][0];
    h.tensors[0][0].region = whole();
    hold(&h, 0, &t, &h.tensors[0][0].region);
    h.counts[2] = 0;
    refused(&h, CKD_E_MISMATCH, "layer.w", "rank 0 describes the same region of it twice");
    h.counts[0] = 1;
    h.tensors[0][0].name = "";
    refused(&h, CKD_E_INVALID, "", "1 to 1023 bytes");
}

static void test_worlds_must_fit(void **state) {
    (void)state;
    ckd_bytes d[2];
    ckd_plan *plan;
    ckd_error err;
    ckd_tensor t = tensor_of("w", CKD_F32, 0, NULL);
    assert_int_equal(ckd_plan_describe(&d[0], 0, 2, &t, 1, &err), CKD_OK);
    assert_int_equal(ckd_plan_describe(&d[1], 0, 2, &t, 1, &err), CKD_OK);
    assert_int_equal(ckd_plan_make(&plan, d, 2, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "two descriptions of rank 0"));
    ckd_bytes_free(&d[1]);
    assert_int_equal(ckd_plan_describe(&d[1], 1, 3, &t, 1, &err), CKD_OK);
    assert_int_equal(ckd_plan_make(&plan, d, 2, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "rank 1 describes a save of 3 ranks"));
    ckd_bytes_free(&d[1]);
    assert_int_equal(ckd_plan_describe(&d[1], 2, 2, &t, 1, &err), CKD_E_INVALID);
    assert_null(d[1].data);
    assert_int_equal(ckd_plan_describe(&d[1], 1, 2, NULL, 0, &err), CKD_OK); /* a rank with nothing */
    assert_int_equal(ckd_plan_make(&plan, d, 2, &err), CKD_OK);
    assert_int_equal(ckd_plan_writes(plan, 0, 0), 1);
    ckd_plan_free(plan);
    ckd_bytes_free(&d[0]);
    ckd_bytes_free(&d[1]);
}

/* ---- bytes, keys, cache ---- */

static void small_holdings(holdings *h, const uint64_t *shape) {
    memset(h, 0, sizeof(*h));
    h->world = 2;
    ckd_tensor t = tensor_of("w", CKD_F32, 2, shape);
    ckd_region halves[2] = {rows(0, 3, 5), rows(3, 3, 5)}, all = whole();
    ckd_tensor v = tensor_of("v", CKD_F32, 2, shape);
    for (uint32_t r = 0; r < 2; r++) {
        hold(h, r, &t, &halves[r]);
        hold(h, r, &v, &all);
    }
}

static void test_plans_travel(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {6, 5};
    small_holdings(&h, shape);
    ckd_plan *plan = planned(&h), *back;
    ckd_bytes text;
    ckd_error err;
    assert_int_equal(ckd_plan_bytes(&text, plan, &err), CKD_OK);
    assert_int_equal(ckd_plan_read(&back, text.data, text.size, &err), CKD_OK);
    ckd_plan_summary a = ckd_plan_summarise(plan), b = ckd_plan_summarise(back);
    assert_memory_equal(&a, &b, sizeof(a));
    ckd_plan_key x = ckd_plan_key_of(plan), y = ckd_plan_key_of(back);
    assert_memory_equal(&x, &y, sizeof(x));
    for (uint32_t r = 0; r < 2; r++) {
        for (size_t i = 0; i < 3; i++) {
            assert_int_equal(ckd_plan_writes(plan, r, i), ckd_plan_writes(back, r, i));
        }
        assert_int_equal(ckd_plan_check(back, r, h.tensors[r], h.counts[r], &err), CKD_OK);
    }
    assert_int_equal(ckd_plan_check(back, 0, h.tensors[1], h.counts[1], &err), CKD_E_INVALID);
    assert_int_equal(ckd_plan_check(back, 0, h.tensors[0], h.counts[0] - 1, &err), CKD_E_INVALID);
    ckd_plan_free(back);
    for (size_t i = 0; i < text.size; i++) { /* any byte, and any end */
        ((uint8_t *)text.data)[i] ^= 0x10;
        assert_int_not_equal(ckd_plan_read(&back, text.data, text.size, &err), CKD_OK);
        assert_null(back);
        ((uint8_t *)text.data)[i] ^= 0x10;
        assert_int_not_equal(ckd_plan_read(&back, text.data, i, &err), CKD_OK);
    }
    ckd_bytes_free(&text);
    ckd_plan_free(plan);
}

static void test_damaged_descriptions(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {6, 5};
    small_holdings(&h, shape);
    h.world = 1;
    h.tensors[0][0].region = whole();
    ckd_bytes d;
    ckd_plan *plan;
    ckd_error err;
    assert_int_equal(ckd_plan_describe(&d, 0, 1, h.tensors[0], 2, &err), CKD_OK);
    for (size_t i = 0; i < d.size; i++) {
        ((uint8_t *)d.data)[i] ^= 1;
        assert_int_not_equal(ckd_plan_make(&plan, &d, 1, &err), CKD_OK);
        ((uint8_t *)d.data)[i] ^= 1;
        ckd_bytes cut = {d.data, i};
        assert_int_not_equal(ckd_plan_make(&plan, &cut, 1, &err), CKD_OK);
    }
    assert_int_equal(ckd_plan_make(&plan, &d, 1, &err), CKD_OK);
    ckd_plan_free(plan);
    ckd_bytes_free(&d);
}

static ckd_plan_key key_of(const holdings *h) {
    ckd_plan *plan = planned(h);
    ckd_plan_key key = ckd_plan_key_of(plan), hashes[2];
    for (uint32_t r = 0; r < 2; r++) {
        ckd_bytes d;
        assert_int_equal(ckd_plan_describe(&d, r, 2, h->tensors[r], h->counts[r], NULL), CKD_OK);
        hashes[r] = ckd_plan_description_hash(&d);
        ckd_bytes_free(&d);
    }
    ckd_plan_key exchanged = ckd_plan_key_from(hashes, 2);
    assert_memory_equal(&key, &exchanged, sizeof(key));
    ckd_plan_free(plan);
    return key;
}

static void test_keys_are_of_what_plans_depend_on(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {6, 5}, taller[2] = {12, 5};
    float values[60];
    small_holdings(&h, shape);
    ckd_plan_key first = key_of(&h), other;
    h.tensors[0][0].data = values; /* where values lie does not matter */
    h.tensors[1][1].data = values + 1;
    other = key_of(&h);
    assert_memory_equal(&first, &other, sizeof(first));
    h.tensors[0][0].region = rows(0, 2, 5);
    h.tensors[1][0].region = rows(2, 4, 5);
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
    small_holdings(&h, shape);
    h.tensors[0][0].region = rows(3, 3, 5); /* ranks exchanged */
    h.tensors[1][0].region = rows(0, 3, 5);
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
    small_holdings(&h, shape);
    for (uint32_t r = 0; r < 2; r++) {
        h.tensors[r][1].name = "u";
    }
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
    small_holdings(&h, shape);
    for (uint32_t r = 0; r < 2; r++) {
        h.tensors[r][1].dtype = CKD_I32;
    }
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
    small_holdings(&h, shape);
    for (uint32_t r = 0; r < 2; r++) {
        h.tensors[r][1].shape = taller;
    }
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
}

static void test_cache(void **state) {
    (void)state;
    static holdings h;
    ckd_plan_cache *cache;
    ckd_plan_key keys[4];
    uint64_t shapes[4][2] = {{6, 5}, {6, 6}, {6, 7}, {6, 8}};
    assert_int_equal(ckd_plan_cache_new(&cache, 3, NULL), CKD_OK);
    for (size_t i = 0; i < 4; i++) {
        small_holdings(&h, shapes[i]);
        for (uint32_t r = 0; r < 2; r++) {
            h.tensors[r][0].region.lengths[1] = shapes[i][1];
        }
        ckd_plan *plan = planned(&h);
        keys[i] = ckd_plan_key_of(plan);
        if (i == 3) { /* so that the second one is the oldest */
            assert_non_null(ckd_plan_cache_find(cache, &keys[0]));
        }
        ckd_plan_cache_add(cache, plan);
        assert_ptr_equal(ckd_plan_cache_find(cache, &keys[i]), plan);
    }
    assert_null(ckd_plan_cache_find(cache, &keys[1]));
    assert_non_null(ckd_plan_cache_find(cache, &keys[0]));
    assert_non_null(ckd_plan_cache_find(cache, &keys[2]));
    ckd_plan *again = planned(&h); /* takes the place of its like */
    ckd_plan_cache_add(cache, again);
    assert_ptr_equal(ckd_plan_cache_find(cache, &keys[3]), again);
    assert_non_null(ckd_plan_cache_find(cache, &keys[0]));
    ckd_plan_cache_free(cache);
    ckd_plan_cache_free(NULL);
    ckd_plan_free(NULL);
    ckd_bytes_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_painting),
        cmocka_unit_test(test_defects_are_real),
        cmocka_unit_test(test_flat_ranges_are_few_boxes),
        cmocka_unit_test(test_replicas_are_spread),
        cmocka_unit_test(test_parameters_stay_together),
        cmocka_unit_test(test_same_elements_are_replicas),
        cmocka_unit_test(test_refusals_name_ranks_and_elements),
        cmocka_unit_test(test_worlds_must_fit),
        cmocka_unit_test(test_plans_travel),
        cmocka_unit_test(test_damaged_descriptions),
        cmocka_unit_test(test_keys_are_of_what_plans_depend_on),
        cmocka_unit_test(test_cache),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
