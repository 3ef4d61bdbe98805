#include "tests/support/layouts.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"

enum { WORLD = 9, GUARD = 32 };

/* ---- layouts ---- */

void layout_add(layout *l, uint32_t rank, const ckd_region *region) {
    if (l->count == l->capacity) {
        l->capacity = 2 * l->capacity + 4;
        l->regions = realloc(l->regions, l->capacity * sizeof(*l->regions));
        assert_non_null(l->regions);
    }
    l->regions[l->count].rank = rank;
    l->regions[l->count++].region = *region;
}

void layout_free(layout *l) {
    free(l->regions);
    *l = (layout){0};
}

static ckd_region whole_box(const reshard_case *c) {
    ckd_region r = {.kind = CKD_REGION_BOX};
    memcpy(r.lengths, c->shape, c->ndim * sizeof(uint64_t));
    return r;
}

void layout_whole(layout *l, uint32_t ranks) {
    ckd_region r = {.kind = CKD_REGION_WHOLE};
    for (uint32_t i = 0; i < ranks; i++) {
        layout_add(l, i, &r);
    }
}

void layout_split(layout *l, const reshard_case *c, uint32_t dim, const uint64_t *lengths, uint32_t ranks) {
    ckd_region r = whole_box(c);
    uint64_t at = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        r.offsets[dim] = at;
        r.lengths[dim] = lengths[i];
        at += lengths[i];
        layout_add(l, i, &r);
    }
    assert_int_equal(at, c->shape[dim]);
}

void layout_chunk(layout *l, const reshard_case *c, uint32_t dim, uint32_t ranks) {
    ckd_region r = whole_box(c);
    uint64_t all = c->shape[dim], each = (all + ranks - 1) / ranks;
    for (uint32_t i = 0; i < ranks; i++) {
        uint64_t first = i * each < all ? i * each : all;
        r.offsets[dim] = first;
        r.lengths[dim] = all - first < each ? all - first : each;
        layout_add(l, i, &r);
    }
}

void layout_grid(layout *l, const reshard_case *c, uint32_t rows, uint32_t columns) {
    ckd_region r = whole_box(c);
    for (uint32_t i = 0; i < rows * columns; i++) {
        uint32_t row = i / columns, column = i % columns;
        r.offsets[0] = c->shape[0] * row / rows;
        r.lengths[0] = c->shape[0] * (row + 1) / rows - r.offsets[0];
        r.offsets[1] = c->shape[1] * column / columns;
        r.lengths[1] = c->shape[1] * (column + 1) / columns - r.offsets[1];
        layout_add(l, i, &r);
    }
}

void layout_flat(layout *l, const reshard_case *c, const uint64_t *counts, uint32_t ranks) {
    ckd_region r = {.kind = CKD_REGION_FLAT};
    for (uint32_t i = 0; i < ranks; i++) {
        r.count = counts[i];
        layout_add(l, i, &r);
        r.start += r.count;
    }
    assert_int_equal(r.start, c->elements);
}

static uint64_t below(uint64_t *random, uint64_t n) { /* splitmix64 (Steele, Lea, Flood 2014) */
    uint64_t z = *random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return n ? z % n : 0;
}

static void random_cuts(layout *l, const ckd_region *box, uint32_t ndim, unsigned cuts, uint64_t *random) {
    if (cuts == 0 || ndim == 0) {
        layout_add(l, (uint32_t)below(random, WORLD), box);
        return;
    }
    uint32_t dim = (uint32_t)below(random, ndim);
    uint64_t at = below(random, box->lengths[dim] + 1);
    unsigned left = (unsigned)below(random, cuts);
    ckd_region a = *box, b = *box;
    a.lengths[dim] = at;
    b.offsets[dim] += at;
    b.lengths[dim] -= at;
    random_cuts(l, &a, ndim, left, random);
    random_cuts(l, &b, ndim, cuts - 1 - left, random);
}

static void random_ranges(layout *l, const reshard_case *c, unsigned cuts, uint64_t *random) {
    uint64_t at = 0;
    for (unsigned i = 0; i <= cuts; i++) {
        uint64_t left = c->elements - at;
        ckd_region r = {.kind = CKD_REGION_FLAT, .start = at, .count = left};
        if (i < cuts) {
            r.count = below(random, 4) ? below(random, left / (cuts - i) + 2) : 0;
            r.count = r.count > left ? left : r.count;
        }
        at += r.count;
        layout_add(l, (uint32_t)below(random, WORLD), &r);
    }
}

void layout_random(layout *l, const reshard_case *c, uint64_t *random) {
    unsigned cuts = (unsigned)below(random, WORLD - 1);
    if (below(random, 16) == 0) {
        layout_whole(l, 1);
    } else if (below(random, 2)) {
        random_ranges(l, c, cuts, random);
    } else {
        ckd_region box = whole_box(c);
        random_cuts(l, &box, c->ndim, cuts, random);
    }
    for (size_t i = l->count; i > 1; i--) {
        size_t k = (size_t)below(random, i);
        struct layout_region p = l->regions[i - 1];
        l->regions[i - 1] = l->regions[k];
        l->regions[k] = p;
    }
}

/* ---- cases ---- */

reshard_case *reshard_add(reshard_cases *all, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                          const char *name) {
    if (all->count == all->capacity) {
        all->capacity = 2 * all->capacity + 16;
        all->items = realloc(all->items, all->capacity * sizeof(*all->items));
        assert_non_null(all->items);
    }
    reshard_case *c = &all->items[all->count++];
    memset(c, 0, sizeof(*c));
    snprintf(c->name, sizeof(c->name), "%s", name);
    c->dtype = dtype;
    c->ndim = ndim;
    c->elements = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        c->shape[d] = shape[d];
        c->elements *= shape[d];
    }
    c->values = random_values(dtype, c->elements, (unsigned)all->count);
    if (ckd_role_of(c->name, dtype) == CKD_ROLE_EXP_AVG_SQ) {
        for (uint64_t i = 0; i < c->elements; i++) {
            float f;
            memcpy(&f, c->values + 4 * i, 4);
            f *= f;
            memcpy(c->values + 4 * i, &f, 4);
        }
    }
    return c;
}

layout *reshard_target(reshard_case *c) {
    c->to = realloc(c->to, (c->to_count + 1) * sizeof(*c->to));
    assert_non_null(c->to);
    c->to[c->to_count] = (layout){0};
    return &c->to[c->to_count++];
}

void reshard_free(reshard_cases *all) {
    for (size_t i = 0; i < all->count; i++) {
        reshard_case *c = &all->items[i];
        layout_free(&c->from);
        for (size_t k = 0; k < c->to_count; k++) {
            layout_free(&c->to[k]);
        }
        free(c->to);
        free(c->values);
    }
    free(all->items);
    *all = (reshard_cases){0};
}

/* Floats change a little at each step, as in training. Integers change in some steps. */
static void move_values(reshard_case *c, uint64_t *random) {
    size_t size = ckd_dtype_size(c->dtype);
    for (uint64_t i = 0; i < c->elements; i++) {
        uint8_t *at = c->values + i * size;
        uint64_t z = below(random, UINT64_MAX);
        if (c->dtype == CKD_F32) {
            float f;
            memcpy(&f, at, 4);
            f *= 1 + 0.001f * ((float)(z % 2001) / 1000 - 1);
            memcpy(at, &f, 4);
        } else if (c->dtype == CKD_BOOL) {
            at[0] ^= z % 20 == 0;
        } else {
            at[0] = (uint8_t)(at[0] + (z % 8 == 0));
        }
    }
}

/* ---- a region's elements one by one, by the definition of regions ---- */

/* Lists the global positions of a region's elements in order. Returns how many there are. */
static uint64_t positions_of(uint64_t *out, const reshard_case *c, const ckd_region *r) {
    uint64_t count = 0;
    if (r->kind != CKD_REGION_BOX) {
        uint64_t start = r->kind == CKD_REGION_FLAT ? r->start : 0;
        for (count = 0; count < (r->kind == CKD_REGION_FLAT ? r->count : c->elements); count++) {
            out[count] = start + count;
        }
        return count;
    }
    uint64_t at[CKD_MAX_DIMS], elements = 1;
    memcpy(at, r->offsets, sizeof(at));
    for (uint32_t d = 0; d < c->ndim; d++) {
        elements *= r->lengths[d];
    }
    while (count < elements) {
        uint64_t global = 0;
        for (uint32_t d = 0; d < c->ndim; d++) {
            global = global * c->shape[d] + at[d];
        }
        out[count++] = global;
        for (uint32_t d = c->ndim; d-- > 0 && ++at[d] == r->offsets[d] + r->lengths[d];) {
            at[d] = r->offsets[d];
        }
    }
    return count;
}

/* Copies a region's elements from the whole tensor; malloc'ed. */
static uint8_t *gather(uint64_t *count, const reshard_case *c, const ckd_region *r, const uint8_t *values) {
    size_t size = ckd_dtype_size(c->dtype);
    uint64_t *positions = malloc((c->elements + 1) * sizeof(*positions));
    assert_non_null(positions);
    *count = positions_of(positions, c, r);
    uint8_t *out = malloc(*count * size + 1);
    assert_non_null(out);
    for (uint64_t i = 0; i < *count; i++) {
        memcpy(out + i * size, values + positions[i] * size, size);
    }
    free(positions);
    return out;
}

/* ---- saving: each rank saves its regions ---- */

static void save_rank(ckd_save *save, const reshard_cases *all, uint32_t rank) {
    for (size_t i = 0; i < all->count; i++) {
        const reshard_case *c = &all->items[i];
        for (size_t p = 0; p < c->from.count; p++) {
            if (c->from.regions[p].rank % WORLD == rank) {
                uint64_t count;
                uint8_t *values = gather(&count, c, &c->from.regions[p].region, c->values);
                add_tensor(save, c->name, c->dtype, c->ndim, c->shape, &c->from.regions[p].region, values);
                free(values);
            }
        }
    }
}

static ckd_checkpoint save_step(ckd_store *store, const char *run, const reshard_cases *all, uint64_t step,
                                ckd_fidelity fidelity) {
    ckd_save *saves[WORLD];
    ckd_part parts[WORLD];
    ckd_save_options o = options_of(run, step);
    o.world = WORLD;
    o.fidelity = fidelity;
    o.max_load_cost = o.newest_load_cost = 1e6;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    ckd_error err = {0};
    for (o.rank = 0; o.rank < WORLD; o.rank++) {
        saves[o.rank] = begin_with(store, &o);
        save_rank(saves[o.rank], all, o.rank);
        if (ckd_save_seal(&parts[o.rank], saves[o.rank], &err) != CKD_OK) {
            fail_msg("seal: %s (%s)", err.message, err.file);
        }
    }
    ckd_checkpoint info;
    if (ckd_save_publish(&info, saves[0], parts, WORLD, &err) != CKD_OK) {
        fail_msg("publish: %s (%s, tensor %s)", err.message, err.file, err.tensor);
    }
    for (uint32_t i = 0; i < WORLD; i++) {
        if (i > 0) {
            ckd_save_end(saves[i]);
        }
        ckd_part_free(&parts[i]);
    }
    return info;
}

/* ---- loading ---- */

typedef struct checking {
    ckd_load *load;
    uint64_t step, seed;
    ckd_fidelity fidelity;
} checking;

/* Loads a region; malloc'ed. Checks that nothing was written around it. */
static uint8_t *load_region(const checking *k, const reshard_case *c, const ckd_region *r, uint64_t count) {
    size_t size = (size_t)count * ckd_dtype_size(c->dtype);
    uint8_t *buffer = malloc(size + 2 * GUARD), guard[GUARD];
    assert_non_null(buffer);
    memset(buffer, 0xa5, size + 2 * GUARD);
    memset(guard, 0xa5, GUARD);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = c->name;
    q.dtype = c->dtype;
    q.ndim = c->ndim;
    q.shape = c->shape;
    q.region = *r;
    q.data = buffer + GUARD;
    q.size = size;
    ckd_error err = {0};
    if (ckd_load_tensor(k->load, &q, &err) != CKD_OK) {
        fail_msg("%s at depth %u, seed %llu: %s (%s)", c->name, (unsigned)k->step,
                 (unsigned long long)k->seed, err.message, err.file);
    }
    assert_memory_equal(buffer, guard, GUARD);
    assert_memory_equal(buffer + GUARD + size, guard, GUARD);
    memmove(buffer, buffer + GUARD, size);
    return buffer;
}

/* Values of a lossy checkpoint must be close to the saved ones. */
static void check_near(const reshard_case *c, const uint8_t *got) {
    double error = 0, all = 0;
    for (uint64_t i = 0; i < c->elements && c->dtype == CKD_F32; i++) {
        float a, b;
        memcpy(&a, got + 4 * i, 4);
        memcpy(&b, c->values + 4 * i, 4);
        error += ((double)a - b) * ((double)a - b);
        all += (double)b * b;
    }
    if (c->dtype != CKD_F32 || c->elements < 64) {
        assert_memory_equal(got, c->values, c->elements * ckd_dtype_size(c->dtype));
    } else if (ckd_role_of(c->name, c->dtype) == CKD_ROLE_WEIGHT) {
        assert_true(error <= 0.02 * 0.02 * all);
    }
}

static void check_case(const checking *k, const reshard_case *c) {
    ckd_region everything = {.kind = CKD_REGION_WHOLE};
    size_t size = ckd_dtype_size(c->dtype);
    uint8_t *whole = load_region(k, c, &everything, c->elements);
    if (k->fidelity == CKD_EXACT) {
        assert_memory_equal(whole, c->values, c->elements * size);
    } else {
        check_near(c, whole);
    }
    for (size_t i = 0; i < c->to_count; i++) {
        for (size_t p = 0; p < c->to[i].count; p++) {
            uint64_t count;
            uint8_t *want = gather(&count, c, &c->to[i].regions[p].region, whole);
            uint8_t *got = load_region(k, c, &c->to[i].regions[p].region, count);
            if (memcmp(want, got, count * size) != 0) {
                fail_msg("%s, layout %zu, region %zu, depth %u, seed %llu: not what the whole tensor holds",
                         c->name, i, p, (unsigned)k->step, (unsigned long long)k->seed);
            }
            free(want);
            free(got);
        }
    }
    free(whole);
}

/* In lossy checkpoints the depths of single tensors may differ. */
static void check_depths(const reshard_cases *all, const ckd_load *load, uint64_t step, bool exact) {
    const ckd_tensor_list *list = ckd_load_tensors(load);
    assert_int_equal(list->count, all->count);
    assert_int_equal(ckd_load_checkpoint(load)->depth, step);
    size_t found = 0;
    for (size_t i = 0; i < list->count; i++) {
        for (size_t k = 0; k < all->count; k++) {
            if (strcmp(all->items[k].name, list->items[i].name) == 0) {
                found++;
                if (all->items[k].deep && exact && list->items[i].depth != step) {
                    fail_msg("%s: depth %u at step %u", list->items[i].name, list->items[i].depth,
                             (unsigned)step);
                }
            }
        }
    }
    assert_int_equal(found, all->count);
}

static void check_step(ckd_store *store, const reshard_cases *all, const ckd_checkpoint *info,
                       ckd_fidelity fidelity, uint64_t seed) {
    checking k = {.step = info->step, .seed = seed, .fidelity = fidelity};
    ckd_error err = {0};
    if (ckd_load_begin(&k.load, store, &info->id, &err) != CKD_OK) {
        fail_msg("load: %s (%s)", err.message, err.file);
    }
    check_depths(all, k.load, info->step, fidelity == CKD_EXACT);
    for (size_t i = 0; i < all->count; i++) {
        check_case(&k, &all->items[i]);
    }
    ckd_load_end(k.load);
}

void reshard_check(ckd_store *store, const char *run, reshard_cases *all, ckd_fidelity fidelity,
                   void (*change)(reshard_cases *all, uint64_t *random), uint64_t seed) {
    uint64_t random = seed;
    for (uint64_t step = 0; step <= RESHARD_LAST_STEP; step++) {
        for (size_t i = 0; i < all->count && step > 0; i++) {
            move_values(&all->items[i], &random);
        }
        if (change) {
            change(all, &random);
        }
        ckd_checkpoint info = save_step(store, run, all, step, fidelity);
        if (step == 0 || step == 1 || step == 4 || step == RESHARD_LAST_STEP) {
            check_step(store, all, &info, fidelity, seed);
        }
    }
}
