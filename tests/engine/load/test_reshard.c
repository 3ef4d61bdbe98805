/*
 * Checkpoints saved by some ranks are loaded by others, from within chains. The layouts are those that other
 * checkpoint formats test, or fail with. Each tensor is saved in its own size and, with "deep", in a larger one, where
 * each checkpoint is a delta.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"
#include "tests/support/level.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

/* Multiplies all lengths by `by`. Flat ranges grow with the tensor's volume. */
static void enlarge(layout *l, uint32_t ndim, uint64_t by) {
    uint64_t volume = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        volume *= by;
    }
    for (size_t i = 0; i < l->count; i++) {
        ckd_region *r = &l->regions[i].region;
        r->start *= volume;
        r->count *= volume;
        for (uint32_t d = 0; d < ndim && r->kind == CKD_REGION_BOX; d++) {
            r->offsets[d] *= by;
            r->lengths[d] *= by;
        }
    }
}

static void copy_layout(layout *to, const layout *from) {
    for (size_t i = 0; i < from->count; i++) {
        layout_add(to, from->regions[i].rank, &from->regions[i].region);
    }
}

/*
 * Adds a case for each layout, saved in that one and loaded in all of them; and the same again with lengths multiplied
 * by `by`.
 */
static void add_pairs(reshard_cases *all, const char *name, uint32_t ndim, const uint64_t *shape,
                      const layout *layouts, size_t count, uint64_t by) {
    char full[96];
    for (size_t from = 0; from < count; from++) {
        for (unsigned large = 0; large < (by > 1 ? 2 : 1); large++) {
            uint64_t lengths[CKD_MAX_DIMS], factor = large ? by : 1;
            for (uint32_t d = 0; d < ndim; d++) {
                lengths[d] = shape[d] * factor;
            }
            snprintf(full, sizeof(full), "%s.%zu%s", name, from, large ? ".deep" : "");
            reshard_case *c = reshard_add(all, CKD_F32, ndim, lengths, full);
            c->deep = large;
            copy_layout(&c->from, &layouts[from]);
            enlarge(&c->from, ndim, factor);
            if (layouts[from].regions[0].region.kind == CKD_REGION_WHOLE) {
                c->from.count = 1; /* one of the replicas writes it */
            }
            for (size_t k = 0; k < count; k++) {
                layout *to = reshard_target(c);
                copy_layout(to, &layouts[k]);
                enlarge(to, ndim, factor);
            }
        }
    }
}

static void free_layouts(layout *layouts, size_t count) {
    for (size_t i = 0; i < count; i++) {
        layout_free(&layouts[i]);
    }
}

static reshard_case shaped(uint32_t ndim, const uint64_t *shape) {
    reshard_case c = {.ndim = ndim, .elements = 1};
    for (uint32_t d = 0; d < ndim; d++) {
        c.shape[d] = shape[d];
        c.elements *= shape[d];
    }
    return c;
}

/* PyTorch's test_dtensor_resharding: [4, 4] between all pairs of layouts. */
static void four_by_four(reshard_cases *all) {
    const uint64_t shape[] = {4, 4};
    reshard_case c = shaped(2, shape);
    layout l[4] = {{0}};
    layout_whole(&l[0], 4);
    layout_chunk(&l[1], &c, 0, 4);
    layout_chunk(&l[2], &c, 1, 4);
    layout_grid(&l[3], &c, 2, 2);
    add_pairs(all, "four", 2, shape, l, 4, 24);
    free_layouts(l, 4);
}

static void uneven_rows(reshard_cases *all) {
    const uint64_t shape[] = {10, 20}, a[] = {2, 1, 3, 3, 1}, b[] = {8, 2};
    reshard_case c = shaped(2, shape);
    layout l[2] = {{0}};
    layout_split(&l[0], &c, 0, a, 5);
    layout_split(&l[1], &c, 0, b, 2);
    add_pairs(all, "rows", 2, shape, l, 2, 6);
    free_layouts(l, 2);
}

/* In three roles, because lossy fidelities code each differently. */
static void shards_of_128(reshard_cases *all) {
    static const char *const names[] = {"square", "exp_avg.square", "exp_avg_sq.square"};
    const uint64_t shape[] = {128, 128};
    reshard_case c = shaped(2, shape);
    layout l[5] = {{0}};
    layout_chunk(&l[0], &c, 0, 3);
    layout_chunk(&l[1], &c, 0, 5);
    layout_chunk(&l[2], &c, 1, 3);
    layout_chunk(&l[3], &c, 1, 5);
    layout_grid(&l[4], &c, 2, 2);
    for (size_t i = 0; i < 3; i++) {
        add_pairs(all, names[i], 2, shape, l, 5, 1);
        for (size_t k = 1; k <= 5 && i == 0; k++) {
            all->items[all->count - k].deep = true;
        }
    }
    free_layouts(l, 5);
}

static void uneven_lines(reshard_cases *all) {
    static const uint64_t lines[3][2][8] = {{{3, 3, 3, 3, 3, 3, 3, 3}, {1, 1, 1, 1, 1, 1, 2, 16}},
                                            {{5, 5, 5, 5, 5, 5, 0, 0}, {5, 0, 5, 0, 5, 5, 3, 7}},
                                            {{15, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 3, 3, 3, 3, 3}}};
    for (size_t i = 0; i < 3; i++) {
        char name[32];
        uint64_t length = 0;
        for (size_t k = 0; k < 8; k++) {
            length += lines[i][0][k];
        }
        reshard_case c = shaped(1, &length);
        layout l[4] = {{0}};
        for (size_t k = 0; k < 2; k++) {
            layout_split(&l[k], &c, 0, lines[i][k], 8);
            layout_flat(&l[2 + k], &c, lines[i][k], 8);
        }
        snprintf(name, sizeof(name), "line%zu", i);
        add_pairs(all, name, 1, &length, l, 4, 200);
        free_layouts(l, 4);
    }
}

/* ---- tensor and pipeline parallel ---- */

enum { LAYERS = 8, HIDDEN = 8 };

typedef struct parallel {
    uint32_t tensor, pipeline;
} parallel;

/*
 * Cuts a tensor among the ranks of a stage. The vocabulary is padded to a multiple of 128 per rank, and the padding is
 * stripped, so the last ranks may have fewer rows.
 */
static void tensor_parallel(layout *l, const reshard_case *c, int dim, uint64_t padded, uint32_t first_rank,
                            uint32_t ranks) {
    ckd_region r = {.kind = CKD_REGION_BOX};
    memcpy(r.lengths, c->shape, sizeof(r.lengths));
    for (uint32_t i = 0; i < ranks; i++) {
        if (dim >= 0) {
            uint64_t each = (padded ? padded : c->shape[dim]) / ranks, all = c->shape[dim];
            r.offsets[dim] = i * each < all ? i * each : all;
            r.lengths[dim] = all - r.offsets[dim] < each ? all - r.offsets[dim] : each;
        }
        layout_add(l, first_rank + i, &r);
    }
}

static void stage(layout *l, const reshard_case *c, int dim, bool vocabulary, uint32_t layer, parallel p) {
    uint32_t first = layer / (LAYERS / p.pipeline) * p.tensor;
    uint64_t multiple = UINT64_C(128) * p.tensor;
    tensor_parallel(l, c, dim, vocabulary ? (c->shape[0] + multiple - 1) / multiple * multiple : 0, first,
                    p.tensor);
}

static void add_parallel(reshard_cases *all, const char *name, uint64_t rows, uint64_t columns, int dim,
                         bool vocabulary, uint32_t layer, parallel from, parallel to) {
    uint64_t shape[] = {rows, columns};
    reshard_case *c = reshard_add(all, CKD_F32, 2, shape, name);
    stage(&c->from, c, dim, vocabulary, layer, from);
    if (dim < 0) {
        c->from.count = 1;
    }
    stage(reshard_target(c), c, dim, vocabulary, layer, to);
}

static void tensor_and_pipeline(reshard_cases *all) {
    static const parallel pairs[][2] = {
        {{2, 4}, {4, 2}}, {{1, 8}, {8, 1}}, {{2, 1}, {1, 8}}, {{1, 1}, {2, 4}}};
    static const uint64_t vocabularies[] = {17, 127, 128, 31123};
    char name[96];
    for (size_t i = 0; i < 4; i++) {
        parallel from = pairs[i][0], to = pairs[i][1];
        for (size_t v = 0; v < 4; v++) {
            uint64_t columns = vocabularies[v] > 1000 ? 2 : HIDDEN;
            snprintf(name, sizeof(name), "tp%zu.embedding.%u", i, (unsigned)vocabularies[v]);
            add_parallel(all, name, vocabularies[v], columns, 0, true, 0, from, to);
            snprintf(name, sizeof(name), "tp%zu.head.%u", i, (unsigned)vocabularies[v]);
            add_parallel(all, name, vocabularies[v], columns, 0, true, LAYERS - 1, from, to);
        }
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            static const struct {
                const char *name;
                uint64_t rows, columns;
                int dim;
            } parts[] = {
                {"up", 4 * HIDDEN, HIDDEN, 0}, {"down", HIDDEN, 4 * HIDDEN, 1}, {"norm", 1, HIDDEN, -1}};
            for (size_t k = 0; k < 3; k++) {
                snprintf(name, sizeof(name), "tp%zu.layers.%u.%s", i, layer, parts[k].name);
                add_parallel(all, name, parts[k].rows, parts[k].columns, parts[k].dim, false, layer, from,
                             to);
            }
        }
    }
}

/* ---- ZeRO: all parameters in one flat buffer, padded and cut evenly ---- */

static void flat_share(layout *l, uint64_t first, uint64_t count, uint64_t padded, uint32_t ranks) {
    uint64_t each = padded / ranks;
    for (uint32_t i = 0; i < ranks; i++) {
        uint64_t begin = i * each > first ? i * each : first;
        uint64_t end = (i + 1) * each < first + count ? (i + 1) * each : first + count;
        begin = begin > first + count ? first + count : begin;
        ckd_region r = {
            .kind = CKD_REGION_FLAT, .start = begin - first, .count = end > begin ? end - begin : 0};
        layout_add(l, i, &r);
    }
}

static void flat_buffers(reshard_cases *all) {
    static const struct {
        uint32_t ndim;
        uint64_t shape[3];
    } parameters[] = {{3, {53, 47, 5}}, {2, {13, 53}}, {1, {53}}, {3, {1, 53, 1}},
                      {3, {9, 53, 53}}, {2, {7, 3}},   {1, {1}}};
    static const uint32_t ranks[][2] = {{4, 2}, {2, 4}, {4, 3}};
    for (size_t i = 0; i < 3; i++) {
        uint64_t total = 0, first = 0;
        for (size_t k = 0; k < 7; k++) {
            total += shaped(parameters[k].ndim, parameters[k].shape).elements;
        }
        for (size_t k = 0; k < 7; k++) {
            char name[32];
            snprintf(name, sizeof(name), "zero%zu.%zu", i, k);
            reshard_case *c = reshard_add(all, CKD_F32, parameters[k].ndim, parameters[k].shape, name);
            flat_share(&c->from, first, c->elements, (total + ranks[i][0] - 1) / ranks[i][0] * ranks[i][0],
                       ranks[i][0]);
            flat_share(reshard_target(c), first, c->elements,
                       (total + ranks[i][1] - 1) / ranks[i][1] * ranks[i][1], ranks[i][1]);
            c->deep = c->elements > 10000;
            first += c->elements;
        }
    }
}

/* ---- queries, keys and values fused, fewer heads of keys than ranks ---- */

enum { HEAD = 16, QUERIES = 8 };

static void heads(layout *l, const reshard_case *c, uint64_t first, uint64_t count, uint32_t ranks) {
    ckd_region r = {.kind = CKD_REGION_BOX};
    memcpy(r.lengths, c->shape, sizeof(r.lengths));
    for (uint32_t i = 0; i < ranks; i++) {
        uint64_t begin = count * i / ranks, end = count * (i + 1) / ranks;
        r.offsets[0] = (first + begin) * HEAD;
        r.lengths[0] = (end - begin) * HEAD;
        layout_add(l, i, &r);
    }
}

static void grouped_queries(reshard_cases *all) {
    static const uint64_t keys[] = {1, 2, 3};
    static const uint32_t ranks[] = {1, 2, 4, 8};
    for (size_t k = 0; k < 3; k++) {
        for (size_t from = 0; from < 4; from++) {
            char name[32];
            uint64_t shape[] = {(QUERIES + 2 * keys[k]) * HEAD, 32};
            snprintf(name, sizeof(name), "qkv%u.%u", (unsigned)keys[k], ranks[from]);
            reshard_case *c = reshard_add(all, CKD_F32, 2, shape, name);
            for (size_t to = 0; to <= 4; to++) {
                layout *l = to < 4 ? reshard_target(c) : &c->from;
                uint32_t n = ranks[to < 4 ? to : from];
                heads(l, c, 0, QUERIES, n);
                heads(l, c, QUERIES, keys[k], n);
                heads(l, c, QUERIES + keys[k], keys[k], n);
            }
            c->deep = true;
        }
    }
}

/* Eight experts on eight ranks, loaded on two: stacked in one tensor, and as eight tensors. */
static void experts(reshard_cases *all) {
    const uint64_t stack[] = {8, 24, 32}, one[] = {24, 32};
    reshard_case *c = reshard_add(all, CKD_F32, 3, stack, "experts");
    c->deep = true;
    layout_chunk(&c->from, c, 0, 8);
    layout_chunk(reshard_target(c), c, 0, 2);
    for (uint32_t i = 0; i < 8; i++) {
        char name[32];
        snprintf(name, sizeof(name), "experts.%u", i);
        reshard_case *e = reshard_add(all, CKD_F32, 2, one, name);
        ckd_region whole = {.kind = CKD_REGION_WHOLE};
        layout_add(&e->from, i, &whole);
        layout_add(reshard_target(e), i / 4, &whole);
        e->deep = true;
    }
}

static void check_all(ckd_fidelity fidelity) {
    reshard_cases all = {0};
    static void (*const kinds[])(reshard_cases *) = {
        four_by_four,        uneven_rows,  shards_of_128,   uneven_lines,
        tensor_and_pipeline, flat_buffers, grouped_queries, experts};
    for (unsigned i = 0; i < 8; i++) {
        if (test_draws("reshard", i + (unsigned)fidelity, 2)) {
            kinds[i](&all);
        }
    }
    char *dir = tempdir_create();
    ckd_store *store = store_create(dir);
    reshard_check(store, "run", &all, fidelity, NULL, 1);
    ckd_store_close(store);
    tempdir_remove(dir);
    reshard_free(&all);
}

static void test_exact(void **unused) {
    (void)unused;
    check_all(CKD_EXACT);
}

static void test_near(void **unused) {
    (void)unused;
    check_all(CKD_NEAR);
}

static void test_coarse(void **unused) {
    (void)unused;
    check_all(CKD_COARSE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_near),
        cmocka_unit_test(test_coarse),
    };
    scratch_begin();
    int failed = run_sampled("reshard", tests, 2, NULL, NULL);
    scratch_end();
    return failed;
}
