/*
 * Random layouts of random tensors: saved in one layout and loaded in others, from within chains. test_reshard does
 * this with known layouts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/layouts.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

/*
 * Each tensor is loaded at four depths, in layouts that are drawn again each time: 3 x 300 x 4 x 3 = 10800. Fewer
 * under a sanitizer.
 */
enum { TENSORS = 300, FEWER = 40, TARGETS = 3 };

static uint64_t below(uint64_t *random, uint64_t n) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random % n;
}

static void add_random(reshard_cases *all, ckd_fidelity fidelity, uint64_t *random) {
    static const ckd_dtype dtypes[] = {CKD_F32, CKD_F32, CKD_BF16, CKD_F64, CKD_I64, CKD_U8, CKD_BOOL};
    static const char *const roles[] = {"", "", "exp_avg.", "exp_avg_sq."};
    uint64_t shape[CKD_MAX_DIMS];
    uint32_t ndim = (uint32_t)below(random, 6);
    uint64_t most = (uint64_t[]){1, 400, 24, 9, 5, 4}[ndim];
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = below(random, 40) ? 1 + below(random, most) : 0;
    }
    ckd_dtype dtype = fidelity == CKD_EXACT ? dtypes[below(random, 7)] : CKD_F32;
    char name[64];
    snprintf(name, sizeof(name), "%st%zu", dtype == CKD_F32 ? roles[below(random, 4)] : "", all->count);
    reshard_case *c = reshard_add(all, dtype, ndim, shape, name);
    layout_random(&c->from, c, random);
    for (size_t i = 0; i < TARGETS; i++) {
        layout_random(reshard_target(c), c, random);
    }
}

/* Draws new layouts for loads, and for every third tensor also for the next save. */
static void new_layouts(reshard_cases *all, uint64_t *random) {
    for (size_t i = 0; i < all->count; i++) {
        reshard_case *c = &all->items[i];
        for (size_t k = 0; k < c->to_count; k++) {
            layout_free(&c->to[k]);
            layout_random(&c->to[k], c, random);
        }
        if (i % 3 == 0) {
            layout_free(&c->from);
            layout_random(&c->from, c, random);
        }
    }
}

static void check_random(ckd_fidelity fidelity, uint64_t seed) {
    reshard_cases all = {0};
    uint64_t random = seed;
    while (all.count < (under_sanitizer() ? FEWER : test_pick(FEWER, TENSORS, TENSORS))) {
        add_random(&all, fidelity, &random);
    }
    char *dir = tempdir_create();
    ckd_store *store = store_create(dir);
    reshard_check(store, "run", &all, fidelity, new_layouts, seed);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    tempdir_remove(dir);
    reshard_free(&all);
}

/* CKD_TEST_SEED gives another seed. */
static uint64_t seed_of(unsigned which) {
    const char *given = getenv("CKD_TEST_SEED");
    return given ? strtoull(given, NULL, 10) : 20261121 + which;
}

static void test_exact(void **unused) {
    (void)unused;
    check_random(CKD_EXACT, seed_of(0));
}

static void test_near(void **unused) {
    (void)unused;
    check_random(CKD_NEAR, seed_of(1));
}

static void test_coarse(void **unused) {
    (void)unused;
    check_random(CKD_COARSE, seed_of(2));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_near),
        cmocka_unit_test(test_coarse),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("reshard_random", tests, NULL, NULL);
    scratch_end();
    return failed;
}
