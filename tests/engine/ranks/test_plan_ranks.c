/*
 * Plans for saves by many ranks: who writes what, the errors if ranks do not fit together, and plans as bytes, as keys
 * and in a cache.
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

/* ---- who writes what ---- */

/* Replicas are distributed so that all ranks write about the same number of bytes. */
static void test_replicas_are_spread(void **state) {
    (void)state;
    static holdings h;
    static char names[16][16];
    const uint64_t shape[1] = {1000};
    memset(&h, 0, sizeof(h));
    h.world = 4;
    ckd_region all = region_whole(), quarter;
    for (int i = 0; i < 16; i++) {
        snprintf(names[i], sizeof(names[i]), "t%d", i);
        ckd_tensor t = holdings_tensor(names[i], CKD_F32, 1, shape);
        for (uint32_t r = 0; r < 4; r++) {
            hold(&h, r, &t, &all);
        }
    }
    /* Rank 3 alone has 2000 bytes more than each of the others. */
    ckd_tensor own = holdings_tensor("own", CKD_F32, 1, shape);
    for (uint32_t r = 0; r < 4; r++) {
        quarter = r < 3 ? region_flat(r * 125, 125) : region_flat(375, 625);
        hold(&h, r, &own, &quarter);
    }
    ckd_plan *plan = holdings_planned(&h);
    ckd_plan_summary s = ckd_plan_summarise(plan);
    assert_int_equal(s.raw_bytes, 17 * 4000);
    assert_int_equal(s.replicas, 16 * 3);
    /* 68000 bytes in all, of which 17000 per rank would be even. */
    assert_int_equal(s.max_bytes, 4 * 4000 + 2500);
    assert_int_equal(s.min_bytes, 4 * 4000 + 500);
    ckd_plan_free(plan);
}

/* Tensors that predict each other are written by the same rank. */
static void test_parameters_stay_together(void **state) {
    (void)state;
    static holdings h;
    static char names[8][3][24];
    static const char *const prefixes[3] = {"exp_avg.", "exp_avg_sq.", ""};
    memset(&h, 0, sizeof(h));
    h.world = 3;
    uint64_t shapes[8][1];
    ckd_region all = region_whole();
    for (uint64_t i = 0; i < 8; i++) {
        shapes[i][0] = 100 + 17 * i;
        for (size_t k = 0; k < 3; k++) {
            snprintf(names[i][k], sizeof(names[i][k]), "%sp%d", prefixes[k], (int)i);
            ckd_tensor t = holdings_tensor(names[i][k], CKD_F32, 1, shapes[i]);
            for (uint32_t r = 0; r < 3; r++) {
                hold(&h, r, &t, &all);
            }
        }
    }
    ckd_plan *plan = holdings_planned(&h);
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

/* A box and a range with the same elements are replicas of each other. */
static void test_same_elements_are_replicas(void **state) {
    (void)state;
    static holdings h;
    memset(&h, 0, sizeof(h));
    h.world = 3;
    const uint64_t shape[2] = {4, 5};
    ckd_tensor t = holdings_tensor("w", CKD_BF16, 2, shape);
    ckd_region top = region_rows(0, 2, 5), same = region_flat(0, 10), rest = region_flat(10, 10);
    hold(&h, 0, &t, &top);
    hold(&h, 1, &t, &same);
    hold(&h, 2, &t, &rest);
    ckd_plan *plan = holdings_planned(&h);
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
    ckd_tensor t = holdings_tensor("layer.w", CKD_F32, 2, shape);
    ckd_region top = region_rows(0, 5, 6), bottom = region_rows(4, 4, 6), lowest = region_rows(6, 2, 6),
               beyond = region_rows(4, 5, 6);

    memset(&h, 0, sizeof(h));
    h.world = 3;
    hold(&h, 0, &t, &top);
    hold(&h, 2, &t, &bottom);
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w", "ranks 0 and 2 both hold its elements [4:5, 0:6]");
    h.tensors[2][0].region = lowest;
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w", "no rank holds its elements [5:6, 0:6]");
    h.tensors[2][0].region = beyond;
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w", "does not lie in its shape");
    h.tensors[2][0].region = bottom;
    h.tensors[2][0].shape = other;
    h.tensors[2][0].region.lengths[1] = 7;
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w",
                     "to rank 0 the tensor is weight f32 [8, 6], to rank 2 it is weight f32 [8, 7]");
    h.tensors[2][0] = t;
    h.tensors[2][0].dtype = CKD_BF16;
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w", "to rank 2 it is weight bf16 [8, 6]");
    h.tensors[2][0] = h.tensors[0][0];
    h.tensors[0][0].region = region_whole();
    hold(&h, 0, &t, &h.tensors[0][0].region);
    h.counts[2] = 0;
    holdings_refused(&h, CKD_E_MISMATCH, "layer.w", "rank 0 describes the same region of it twice");
    h.counts[0] = 1;
    h.tensors[0][0].name = "";
    holdings_refused(&h, CKD_E_INVALID, "", "1 to 1023 bytes");
}

static void test_worlds_must_fit(void **state) {
    (void)state;
    ckd_bytes d[2];
    ckd_plan *plan;
    ckd_error err;
    ckd_tensor t = holdings_tensor("w", CKD_F32, 0, NULL);
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
    assert_int_equal(ckd_plan_describe(&d[1], 1, 2, NULL, 0, &err), CKD_OK); /* a rank without tensors */
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
    ckd_tensor t = holdings_tensor("w", CKD_F32, 2, shape);
    ckd_region halves[2] = {region_rows(0, 3, 5), region_rows(3, 3, 5)}, all = region_whole();
    ckd_tensor v = holdings_tensor("v", CKD_F32, 2, shape);
    for (uint32_t r = 0; r < 2; r++) {
        hold(h, r, &t, &halves[r]);
        hold(h, r, &v, &all);
    }
}

static void test_plans_round_trip(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {6, 5};
    small_holdings(&h, shape);
    ckd_plan *plan = holdings_planned(&h), *back;
    ckd_bytes text;
    ckd_error err;
    assert_int_equal(plan_bytes(&text, plan, &err), CKD_OK);
    assert_int_equal(plan_read(&back, text.data, text.size, &err), CKD_OK);
    ckd_plan_summary a = ckd_plan_summarise(plan), b = ckd_plan_summarise(back);
    assert_memory_equal(&a, &b, sizeof(a));
    hash128 x = plan->key, y = back->key;
    assert_memory_equal(&x, &y, sizeof(x));
    for (uint32_t r = 0; r < 2; r++) {
        for (size_t i = 0; i < 3; i++) {
            assert_int_equal(ckd_plan_writes(plan, r, i), ckd_plan_writes(back, r, i));
        }
    }
    ckd_plan_free(back);
    for (size_t i = 0; i < text.size; i++) { /* a changed byte or a missing end is detected */
        ((uint8_t *)text.data)[i] ^= 0x10;
        assert_int_not_equal(plan_read(&back, text.data, text.size, &err), CKD_OK);
        assert_null(back);
        ((uint8_t *)text.data)[i] ^= 0x10;
        assert_int_not_equal(plan_read(&back, text.data, i, &err), CKD_OK);
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
    h.tensors[0][0].region = region_whole();
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

static hash128 key_of(const holdings *h) {
    ckd_plan *plan = holdings_planned(h);
    hash128 key = plan->key, hashes[2];
    for (uint32_t r = 0; r < 2; r++) {
        ckd_bytes d;
        assert_int_equal(ckd_plan_describe(&d, r, 2, h->tensors[r], h->counts[r], NULL), CKD_OK);
        hashes[r] = plan_description_hash(&d);
        ckd_bytes_free(&d);
    }
    hash128 exchanged = plan_key_of_hashes(hashes, 2);
    assert_memory_equal(&key, &exchanged, sizeof(key));
    ckd_plan_free(plan);
    return key;
}

/* A plan's key covers regions, ranks, names, dtypes and shapes, but not addresses. */
static void test_keys_cover_all_that_plans_depend_on(void **state) {
    (void)state;
    static holdings h;
    const uint64_t shape[2] = {6, 5}, taller[2] = {12, 5};
    float values[60];
    small_holdings(&h, shape);
    hash128 first = key_of(&h), other;
    h.tensors[0][0].data = values; /* addresses do not matter */
    h.tensors[1][1].data = values + 1;
    other = key_of(&h);
    assert_memory_equal(&first, &other, sizeof(first));
    h.tensors[0][0].region = region_rows(0, 2, 5);
    h.tensors[1][0].region = region_rows(2, 4, 5);
    other = key_of(&h);
    assert_memory_not_equal(&first, &other, sizeof(first));
    small_holdings(&h, shape);
    h.tensors[0][0].region = region_rows(3, 3, 5); /* the two ranks' regions are exchanged */
    h.tensors[1][0].region = region_rows(0, 3, 5);
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

/* The cache holds three plans. A fourth one replaces the least recently used. */
static void test_cache(void **state) {
    (void)state;
    static holdings h;
    plan_cache *cache;
    hash128 keys[4];
    uint64_t shapes[4][2] = {{6, 5}, {6, 6}, {6, 7}, {6, 8}};
    assert_int_equal(plan_cache_new(&cache, 3, NULL), CKD_OK);
    for (size_t i = 0; i < 4; i++) {
        small_holdings(&h, shapes[i]);
        for (uint32_t r = 0; r < 2; r++) {
            h.tensors[r][0].region.lengths[1] = shapes[i][1];
        }
        ckd_plan *plan = holdings_planned(&h);
        keys[i] = plan->key;
        if (i == 3) { /* makes the second plan the least recently used */
            assert_non_null(plan_cache_find(cache, &keys[0]));
        }
        plan_cache_add(cache, plan);
        assert_ptr_equal(plan_cache_find(cache, &keys[i]), plan);
    }
    assert_null(plan_cache_find(cache, &keys[1]));
    assert_non_null(plan_cache_find(cache, &keys[0]));
    assert_non_null(plan_cache_find(cache, &keys[2]));
    ckd_plan *again = holdings_planned(&h); /* replaces the plan with the same key */
    plan_cache_add(cache, again);
    assert_ptr_equal(plan_cache_find(cache, &keys[3]), again);
    assert_non_null(plan_cache_find(cache, &keys[0]));
    plan_cache_free(cache);
    plan_cache_free(NULL);
    ckd_plan_free(NULL);
    ckd_bytes_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_replicas_are_spread),
        cmocka_unit_test(test_parameters_stay_together),
        cmocka_unit_test(test_same_elements_are_replicas),
        cmocka_unit_test(test_refusals_name_ranks_and_elements),
        cmocka_unit_test(test_worlds_must_fit),
        cmocka_unit_test(test_plans_round_trip),
        cmocka_unit_test(test_damaged_descriptions),
        cmocka_unit_test(test_keys_cover_all_that_plans_depend_on),
        cmocka_unit_test(test_cache),
    };
    return cmocka_run_group_tests_name("plan of ranks", tests, NULL, NULL);
}
