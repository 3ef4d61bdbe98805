/*
 * Checks that regions tile a tensor, by sums of random weights. It needs neither sorting nor memory, but only says
 * whether they do; ranks/plan_defect.c says where they do not.
 */
#include "engine/common/common.h"

#include "base/bytes.h"
#include "base/hash.h"

/* ---- integers modulo 2^61 - 1 ---- */

#define MODULUS ((UINT64_C(1) << 61) - 1)
__extension__ typedef unsigned __int128 product;

static uint64_t reduce(uint64_t x) {
    x = (x & MODULUS) + (x >> 61);
    return x >= MODULUS ? x - MODULUS : x;
}

static uint64_t times(uint64_t a, uint64_t b) {
    product p = (product)a * b;
    return reduce((uint64_t)(p & MODULUS) + (uint64_t)(p >> 61));
}

static uint64_t plus(uint64_t a, uint64_t b) {
    return reduce(a + b);
}

static uint64_t minus(uint64_t a, uint64_t b) {
    return reduce(a + MODULUS - b);
}

/* ---- weights ---- */

static uint64_t at(const coverage *t, uint32_t d, uint64_t x) {
    uint8_t text[24];
    store_le64(text, t->seed);
    store_le64(text + 8, d);
    store_le64(text + 16, x);
    return reduce(hash64(text, sizeof(text)));
}

/* Weight of coordinates from ... to - 1 in dimension d. */
static uint64_t interval(const coverage *t, uint32_t d, uint64_t from, uint64_t to) {
    return minus(at(t, d, to), at(t, d, from));
}

static uint64_t box(const coverage *t, const ckd_region *r) {
    uint64_t weight = 1;
    for (uint32_t d = 0; d < t->g->ndim; d++) {
        weight = times(weight, interval(t, d, r->offsets[d], r->offsets[d] + r->lengths[d]));
    }
    return weight;
}

/* Weight of the first `count` elements in row-major order: a sum of one box per dimension. */
static uint64_t first_elements(const coverage *t, uint64_t count) {
    const geometry *g = t->g;
    uint64_t weight = g->ndim == 0 ? count : 0, lead = 1;
    for (uint32_t d = 0; d < g->ndim; d++) {
        uint64_t x = count / g->strides[d];
        count -= x * g->strides[d];
        weight = plus(weight, times(lead, times(interval(t, d, 0, x), t->tails[d + 1])));
        lead = times(lead, interval(t, d, x, x + 1));
    }
    return weight;
}

coverage coverage_begin(const geometry *g, uint64_t seed) {
    coverage t = {.g = g, .seed = seed};
    t.tails[g->ndim] = 1;
    for (uint32_t d = g->ndim; d-- > 0;) {
        t.tails[d] = times(t.tails[d + 1], interval(&t, d, 0, g->shape[d]));
    }
    return t;
}

/* Returns false if the region has no elements. */
static bool measure(uint64_t *weight, uint64_t *elements, const coverage *t, const ckd_region *region) {
    if (!region_count(elements, t->g, region) || *elements == 0) {
        return false;
    }
    *weight = t->tails[0];
    if (region->kind == CKD_REGION_BOX) {
        *weight = box(t, region);
    } else if (region->kind == CKD_REGION_FLAT) {
        *weight = minus(first_elements(t, region->start + region->count), first_elements(t, region->start));
    }
    return true;
}

void coverage_add(coverage *t, const ckd_region *region) {
    uint64_t weight, elements;
    if (measure(&weight, &elements, t, region)) {
        t->sum = plus(t->sum, weight);
        t->elements = elements > UINT64_MAX - t->elements ? UINT64_MAX : t->elements + elements;
    }
}

void coverage_remove(coverage *t, const ckd_region *region) {
    uint64_t weight, elements;
    if (measure(&weight, &elements, t, region)) {
        t->sum = minus(t->sum, weight);
        t->elements -= elements;
    }
}

bool coverage_complete(const coverage *t) {
    return t->elements == t->g->elements && (t->elements == 0 || t->sum == t->tails[0]);
}
