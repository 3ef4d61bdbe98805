/*
 * Exact chains that are too long end in a delta on the block that they begin with, not in a new base. Which ones do
 * does not depend on the number of threads.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/store/store.h"
#include "engine/store/view.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 8, ROWS = 128, COLUMNS = 512, EACH = ROWS * COLUMNS, COUNT = TENSORS * EACH, STEPS = 24 };
static const uint64_t shape[] = {ROWS, COLUMNS};
static const char *const names[TENSORS] = {"a", "b", "c", "d", "e", "f", "g", "h"};

/* Moves one value in 25 by one unit in the last place. */
static void tune(uint16_t *values, unsigned step) {
    uint32_t state = 12345 + step;
    for (uint64_t i = 0; i < COUNT; i++) {
        state = state * 1664525 + 1013904223;
        if (state >> 16 < 65536 / 25) {
            values[i] = (uint16_t)(values[i] + (state >> 8 & 1 ? 1 : -1));
        }
    }
}

static ckd_store *open_with(const char *dir, uint32_t threads) {
    char path[512];
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    snprintf(path, sizeof(path), "%s/%u", dir, threads);
    o.threads = threads;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    return store;
}

static ckd_checkpoint save_step(ckd_store *store, uint64_t step, double max_load_cost,
                                const uint16_t *values) {
    ckd_checkpoint saved;
    ckd_save_options o = options_of("run", step);
    o.max_load_cost = max_load_cost;
    o.newest_load_cost = 1000;
    ckd_save *save = begin_with(store, &o);
    for (unsigned i = 0; i < TENSORS; i++) {
        add_tensor(save, names[i], CKD_BF16, 2, shape, NULL, values + i * EACH);
    }
    assert_int_equal(ckd_save_commit(&saved, save, NULL), CKD_OK);
    return saved;
}

static void loads_as(ckd_store *store, uint64_t step, const uint16_t *values) {
    for (unsigned i = 0; i < TENSORS; i++) {
        void *got = load_whole(store, "run", step, names[i], EACH * sizeof(*values));
        assert_memory_equal(got, values + i * EACH, EACH * sizeof(*values));
        free(got);
    }
}

typedef struct ways {
    unsigned links, merged, alone; /* blocks by what they build on */
    uint64_t bytes;
} ways;

/* Every block of a checkpoint builds on the parent, on a block that depends on nothing, or on nothing. */
static void count_ways(ways *to, ckd_store *store, const ckd_checkpoint *c, const ckd_checkpoint *parent) {
    view_cache views;
    const view *v, *owner;
    views_init(&views, store);
    assert_int_equal(views_get(&v, &views, &c->id, NULL), CKD_OK);
    for (size_t i = 0; i < v->block_count; i++) {
        const record *r = v->blocks[i].record;
        to->bytes += r->stored_size;
        if (r->predictor == PREDICT_NONE) {
            to->alone++;
            continue;
        }
        const view_block *before;
        assert_int_equal(r->predictor, PREDICT_PARENT);
        assert_int_equal(view_parent_block(&before, &owner, &views, v, &v->blocks[i], NULL), CKD_OK);
        assert_non_null(before);
        bool link = id_equal(&r->dependencies[0].checkpoint, &parent->id);
        assert_true(link || before->record->predictor == PREDICT_NONE);
        assert_int_equal(r->depth, before->record->depth + 1);
        to->links += link;
        to->merged += !link;
    }
    views_free(&views);
}

static uint16_t *first_values(void) {
    float *first = random_values(CKD_F32, COUNT, 1);
    uint16_t *values = round_to_bf16(first, COUNT);
    free(first);
    return values;
}

static ways run(const char *dir, uint32_t threads, double max_load_cost) {
    ckd_store *store = open_with(dir, threads);
    ways all = {0};
    ckd_checkpoint parent = {0};
    uint16_t *values = first_values(), *was = NULL;
    for (unsigned step = 0; step < STEPS; step++) {
        ckd_checkpoint c = save_step(store, step, max_load_cost, values);
        assert_true(c.load_cost <= max_load_cost);
        if (step > 0) {
            count_ways(&all, store, &c, &parent);
        }
        if (step == STEPS / 2) {
            was = malloc(COUNT * sizeof(*was));
            assert_non_null(was);
            memcpy(was, values, COUNT * sizeof(*was));
        }
        parent = c;
        if (step % 8 == 7) {
            loads_as(store, step, values);
        }
        tune(values, step);
    }
    loads_as(store, STEPS / 2, was);
    free(was);
    free(values);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    return all;
}

/* ---- two ranks: one has three quarters of each tensor ---- */

typedef struct rank_run {
    const char *dir;
    uint32_t rank;
    ckd_status status;
} rank_run;

static void add_rows(ckd_save *save, const char *name, const uint16_t *values, uint32_t rank) {
    ckd_region rows = {.kind = CKD_REGION_BOX, .lengths = {ROWS / 4, COLUMNS}};
    rows.lengths[0] = rank ? ROWS / 4 : ROWS * 3 / 4;
    rows.offsets[0] = rank ? ROWS * 3 / 4 : 0;
    add_tensor(save, name, CKD_BF16, 2, shape, &rows, values + rows.offsets[0] * COLUMNS);
}

static void *save_as_rank(void *context) {
    rank_run *r = context;
    ckd_ranks *ranks;
    ckd_ranks_options join = CKD_RANKS_OPTIONS_INIT;
    ckd_checkpoint saved;
    ckd_store *store = open_with(r->dir, 1);
    uint16_t *values = first_values();
    join.rank = r->rank;
    join.world = 2;
    r->status = ckd_ranks_join(&ranks, store, &join, NULL);
    for (unsigned step = 0; step < STEPS && r->status == CKD_OK; step++) {
        ckd_save_options o = options_of("run", step);
        ckd_save *save;
        o.newest_load_cost = 1000;
        r->status = ckd_ranks_begin(&save, ranks, &o, NULL);
        for (unsigned i = 0; i < TENSORS && r->status == CKD_OK; i++) {
            add_rows(save, names[i], values + i * EACH, r->rank);
        }
        r->status = r->status == CKD_OK ? ckd_ranks_commit(&saved, ranks, save, NULL) : r->status;
        tune(values, step);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    free(values);
    return NULL;
}

static void test_ranks_merge_their_own_chains(void **state) {
    rank_run ranks[2] = {{.dir = *state, .rank = 0}, {.dir = *state, .rank = 1}};
    pthread_t other;
    ways all = {0};
    assert_int_equal(pthread_create(&other, NULL, save_as_rank, &ranks[1]), 0);
    save_as_rank(&ranks[0]);
    assert_int_equal(pthread_join(other, NULL), 0);
    assert_true(ranks[0].status == CKD_OK && ranks[1].status == CKD_OK);
    ckd_store *store = open_with(*state, 1);
    uint16_t *values = first_values();
    ckd_checkpoint parent = {0}, c;
    for (unsigned step = 0; step < STEPS; step++) {
        assert_int_equal(ckd_store_find(&c, store, "run", step, NULL), CKD_OK);
        assert_true(c.load_cost <= 4);
        if (step > 0) {
            count_ways(&all, store, &c, &parent);
        }
        if (step % 8 == 7) {
            loads_as(store, step, values);
        }
        parent = c;
        tune(values, step);
    }
    assert_true(all.merged > all.alone && all.links > 4 * all.merged);
    free(values);
    ckd_store_close(store);
}

static void test_long_chains_are_merged(void **state) {
    ways one = run(*state, 1, 4), three = run(*state, 3, 4);
    assert_true(one.merged > 0 && one.links > 4 * one.merged);
    assert_int_equal(one.alone, 0);
    assert_memory_equal(&one, &three, sizeof(one));
}

/* Under this bound no chain gets as long as those that are merged. */
static void test_bound_too_low_for_merging(void **state) {
    ways tight = run(*state, 2, 1.6);
    assert_true(tight.merged == 0 && tight.alone > 0 && tight.links > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_long_chains_are_merged),
        tempdir_test(test_bound_too_low_for_merging),
        tempdir_test(test_ranks_merge_their_own_chains),
    };
    return cmocka_run_group_tests_name("merge", tests, NULL, NULL);
}
