/* Tensors that change much more than they used to: found where one does, and never where training is healthy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "engine/session/changes.h"

enum { TENSORS = 40, BAD = 17 };

static double draw(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(*seed >> 40) * 0x1p-24;
}

/* Slices lie inside the tensor, in order, and do not overlap. */
static void test_slices(void **state) {
    static const uint64_t sizes[] = {256, 257, 511, 4096, 1000003, UINT64_C(1) << 40};
    (void)state;
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        uint64_t end = 0, columns = 0;
        for (size_t i = 0; i < CHANGE_SLICES; i++) {
            uint64_t at = change_slice(sizes[k], i);
            assert_true(at >= end);
            end = at + CHANGE_SLICE;
            columns |= UINT64_C(1) << (at >> 6) % 64; /* of a matrix that is 4096 wide */
        }
        assert_true(end <= sizes[k]);
        if (sizes[k] > 1000000) {
            assert_true(__builtin_popcountll(columns) > 8);
        }
    }
}

static void test_samples(void **state) {
    double sample[CHANGE_SAMPLE], now[CHANGE_SAMPLE];
    (void)state;
    for (size_t i = 0; i < CHANGE_SAMPLE; i++) {
        sample[i] = (double)i;
        now[i] = (double)i + (i % 2 ? 3 : -3);
    }
    assert_true(change_replace(sample, now) == 3);
    assert_memory_equal(sample, now, sizeof(now));
    assert_true(change_replace(sample, now) == 0);
    for (size_t i = 0; i < 31; i++) { /* as if the rest were lost in rounding */
        now[i] += 1000;
    }
    assert_true(change_replace(sample, now) == 0);
    for (size_t i = 0; i < 32; i++) {
        now[i] += 8;
    }
    assert_true(fabs(change_replace(sample, now) - sqrt(8)) < 1e-12);
    now[0] = NAN;
    assert_true(isnan(change_replace(sample, now)));
    now[0] = 1; /* the sample has the NaN */
    assert_true(isnan(change_replace(sample, now)));
    assert_true(change_replace(sample, now) == 0);
}

/* Changes of `count` tensors, each of its own scale, and varied a little. */
static void train(changes *c, uint64_t *seed, double rate) {
    for (size_t i = 0; i < c->count; i++) {
        c->found[i] = rate * pow(1.2, (double)i - TENSORS / 2.0) * (0.7 + 0.6 * draw(seed));
    }
}

static changes make(size_t count) {
    changes c;
    assert_true(changes_make(&c, count));
    return c;
}

/* Warm-up, a long decay to nearly nothing, a restart of the rate, and distances between saves that vary. */
static void test_schedules(void **state) {
    changes c = make(TENSORS);
    change_alarm alarm;
    uint64_t seed = 3;
    (void)state;
    for (int k = 1; k <= 600; k++) {
        int t = k % 200;
        double rate = t < 20 ? (t + 1) / 20.0 : 1e-4 + 0.5 * (1 + cos(3.14159265358979 * (t - 20) / 180));
        double distance = k % 7 ? 100 : 1 + 500 * draw(&seed);
        train(&c, &seed, 1e-3 * rate * distance);
        assert_false(changes_judge(&alarm, &c));
    }
    changes_free(&c);
}

/* One tensor that changes much more than before is found in each phase of a schedule, once. */
static void test_one_tensor(void **state) {
    (void)state;
    for (int phase = 9; phase < 200; phase += 38) {
        changes c = make(TENSORS);
        change_alarm alarm;
        uint64_t seed = 5;
        for (int k = 1; k < phase; k++) {
            train(&c, &seed, 1.0 / k);
            assert_false(changes_judge(&alarm, &c));
        }
        for (int again = 0; again < 3; again++) {
            train(&c, &seed, 1.0 / phase);
            c.found[BAD] *= 30;
            assert_int_equal(changes_judge(&alarm, &c), again == 0);
        }
        assert_true(alarm.tensor == BAD && alarm.others == 0);
        assert_true(alarm.ratio > alarm.reading.limit && alarm.reading.verdict == SENSOR_HIGH);
        changes_free(&c);
    }
}

/* The worst one is named, and the others are counted. */
static void test_several_tensors(void **state) {
    changes c = make(TENSORS);
    change_alarm alarm;
    uint64_t seed = 7;
    (void)state;
    for (int k = 0; k < 8; k++) {
        train(&c, &seed, 1);
        assert_false(changes_judge(&alarm, &c));
    }
    train(&c, &seed, 1);
    c.found[2] *= 5000;
    c.found[BAD] *= 10000;
    c.found[30] *= 1000;
    assert_true(changes_judge(&alarm, &c));
    assert_true(alarm.tensor == BAD && alarm.others == 2);
    changes_free(&c);
}

/* All tensors alike: a rate that jumps is a matter of the metric. */
static void test_all_tensors(void **state) {
    changes c = make(TENSORS);
    change_alarm alarm;
    uint64_t seed = 11;
    (void)state;
    for (int k = 0; k < 60; k++) {
        train(&c, &seed, k == 40 ? 1000 : 1);
        assert_false(changes_judge(&alarm, &c));
    }
    changes_free(&c);
}

/* A layer that was frozen begins with a history of its own. An expert that rested changes like the others again. */
static void test_layers_that_come_late(void **state) {
    changes c = make(TENSORS);
    change_alarm alarm;
    uint64_t seed = 13;
    (void)state;
    for (int k = 0; k < 120; k++) {
        train(&c, &seed, 1);
        c.found[0] = k < 60 ? 0 : 50; /* frozen */
        c.found[25] = k < 60 ? 1e-4 : 3 + draw(&seed);
        c.found[26] = k == 50 ? NAN : c.found[26];
        assert_false(changes_judge(&alarm, &c));
    }
    c.found[25] = 60;
    assert_true(changes_judge(&alarm, &c));
    assert_int_equal(alarm.tensor, 25);
    changes_free(&c);
}

/* Of three tensors that change, the median says little. */
static void test_few_tensors(void **state) {
    (void)state;
    for (size_t count = 3; count < 6; count++) {
        changes c = make(count);
        change_alarm alarm;
        uint64_t seed = 17;
        for (int k = 0; k < 30; k++) {
            train(&c, &seed, 1);
            c.found[1] *= k == 29 ? 1000 : 1;
            c.found[4 % count] = count == 5 ? 0 : c.found[4 % count];
            assert_int_equal(changes_judge(&alarm, &c), k == 29 && count > 3);
        }
        changes_free(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_samples),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_one_tensor),
        cmocka_unit_test(test_several_tensors),
        cmocka_unit_test(test_all_tensors),
        cmocka_unit_test(test_layers_that_come_late),
        cmocka_unit_test(test_few_tensors),
    };
    return cmocka_run_group_tests_name("changes of tensors", tests, NULL, NULL);
}
