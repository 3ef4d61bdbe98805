/*
 * A chain loads to the bits that were saved, even if it mixes kinds of deltas: lists of changes by context, one list of
 * all changes, dense deltas.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { N = 60000, STEPS = 16 };

/* A bf16 value from 2^-e, with a random mantissa and sign. */
static uint16_t value_of(unsigned e) {
    uint64_t bits = next_random();
    return (uint16_t)((bits & 1) << 15 | (127 - e) << 7 | (bits >> 1 & 127));
}

static bool is_small(uint64_t i) {
    return i % 10 == 0;
}

/* Half of the small values get new magnitudes, so that their contexts change. Few of the others move. */
static void change_small(uint16_t *values) {
    for (uint64_t i = 0; i < N; i++) {
        uint64_t draw = next_random() >> 8;
        if (is_small(i) && draw % 2) {
            values[i] = value_of(6 + (unsigned)(draw / 2 % 10));
        } else if (!is_small(i) && draw % 500 == 0) {
            values[i]++;
        }
    }
}

/* Few values move, whatever their magnitude: one list is best. Some get another context. */
static void change_evenly(uint16_t *values) {
    for (uint64_t i = 0; i < N; i++) {
        values[i] = (uint16_t)(values[i] + (next_random() % 30 == 0 ? 40 : 0));
    }
}

/* All values move: a dense delta. Small ones get other magnitudes. */
static void change_all(uint16_t *values) {
    for (uint64_t i = 0; i < N; i++) {
        values[i] = is_small(i) ? value_of(6 + (unsigned)(next_random() % 10)) : (uint16_t)(values[i] + 1);
    }
}

static void test_mixed_chain(void **state) {
    static void (*const changes[])(uint16_t *) = {change_small, change_small,  change_all,  change_small,
                                                  change_small, change_evenly, change_small};
    ckd_store *store = store_create(*state);
    uint16_t *values[STEPS];
    const uint64_t n = N;
    ckd_checkpoint last = {.depth = 0};
    for (uint64_t step = 0; step < STEPS; step++) {
        values[step] = malloc(N * sizeof(uint16_t));
        for (uint64_t i = 0; i < N; i++) {
            values[step][i] = step > 0 ? values[step - 1][i] : value_of(is_small(i) ? 12 : 0);
        }
        if (step > 0) {
            changes[step % (sizeof(changes) / sizeof(changes[0]))](values[step]);
        }
        ckd_save_options o = options_of("run", step);
        o.max_load_cost = 1000;
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "t", CKD_BF16, 1, &n, NULL, values[step]);
        assert_int_equal(ckd_save_commit(&last, save, NULL), CKD_OK);
    }
    assert_int_equal(last.depth, STEPS - 1);
    for (uint64_t step = 0; step < STEPS; step++) {
        void *back = load_whole(store, "run", step, "t", N * sizeof(uint16_t));
        assert_memory_equal(back, values[step], N * sizeof(uint16_t));
        free(back);
        free(values[step]);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_mixed_chain)};
    return cmocka_run_group_tests_name("chain_kinds", tests, NULL, NULL);
}
