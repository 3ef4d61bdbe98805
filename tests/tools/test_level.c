/* Levels and samples: other seeds select the tests that the quick level leaves out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/level.h"

static void set_seed(unsigned seed) {
    char text[16];
    snprintf(text, sizeof(text), "%u", seed);
    setenv("CKD_SWEEP_SEED", text, 1);
}

static void test_levels(void **state) {
    (void)state;
    static const struct {
        const char *text;
        test_level level;
    } levels[] = {{"quick", TEST_QUICK}, {"full", TEST_FULL}, {"big", TEST_BIG}, {"", TEST_FULL}};
    for (size_t i = 0; i < 4; i++) {
        setenv("CKD_TEST_LEVEL", levels[i].text, 1);
        assert_int_equal(test_level_now(), levels[i].level);
        assert_int_equal(test_pick(7, 8, 9), 7 + (int)levels[i].level);
    }
    unsetenv("CKD_TEST_LEVEL");
    assert_int_equal(test_level_now(), TEST_FULL);
}

static void test_each_point_is_first_for_some_seed(void **state) {
    (void)state;
    for (unsigned long stride = 1; stride <= 41; stride += 4) {
        bool seen[42] = {false};
        for (unsigned seed = 0; seed < 1000; seed++) {
            set_seed(seed);
            unsigned long first = test_first("sweep", stride);
            assert_in_range(first, 1, stride);
            assert_int_equal(test_first("sweep", stride), first);
            seen[first] = true;
        }
        for (unsigned long i = 1; i <= stride; i++) {
            assert_true(seen[i]);
        }
    }
    set_seed(5);
    unsigned other = 0;
    for (unsigned seed = 0; seed < 100; seed++) { /* sweeps have different starting points */
        set_seed(seed);
        other += test_first("sweep", 5) != test_first("another", 5);
    }
    assert_true(other > 50);
    unsetenv("CKD_SWEEP_SEED");
    assert_int_equal(test_first("sweep", 100), 1);
}

static void test_one_case_in_n_is_drawn(void **state) {
    (void)state;
    for (unsigned seed = 0; seed < 100; seed++) {
        set_seed(seed);
        unsigned drawn[4] = {0, 0, 0, 0};
        for (unsigned i = 0; i < 12; i++) {
            setenv("CKD_TEST_LEVEL", "quick", 1);
            drawn[0] += test_draws("list", i, 4);
            setenv("CKD_TEST_LEVEL", "full", 1);
            unsetenv("CKD_FULL_EVERY");
            drawn[1] += test_draws("list", i, 4);
            setenv("CKD_FULL_EVERY", "2", 1);
            drawn[2] += test_draws("list", i, 4);
            setenv("CKD_FULL_EVERY", "9", 1);
            drawn[3] += test_draws("list", i, 4);
        }
        assert_int_equal(drawn[0], 3);
        assert_int_equal(drawn[1], 12);
        assert_int_equal(drawn[2], 6);
        assert_int_equal(drawn[3], 3);
    }
}

/* At the full level, CKD_FULL_EVERY makes strides larger, odd, and never larger than at the quick level. */
static void test_strides(void **state) {
    (void)state;
    static const struct {
        const char *level, *every;
        unsigned long quick, full, big, expected;
    } cases[] = {
        {"quick", "3", 13, 2, 1, 13}, {"full", NULL, 13, 2, 1, 2}, {"full", "1", 13, 2, 1, 2},
        {"full", "3", 13, 2, 1, 7},   {"full", "9", 13, 2, 1, 13}, {"full", "2", 5, 1, 1, 3},
        {"full", "9", 5, 5, 1, 5},    {"big", "3", 13, 2, 1, 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("CKD_TEST_LEVEL", cases[i].level, 1);
        if (cases[i].every != NULL) {
            setenv("CKD_FULL_EVERY", cases[i].every, 1);
        } else {
            unsetenv("CKD_FULL_EVERY");
        }
        assert_int_equal(test_stride(cases[i].quick, cases[i].full, cases[i].big), cases[i].expected);
    }
    unsetenv("CKD_FULL_EVERY");
}

/* Groups are sampled, too: other tests for other seeds, at least one, and all at the full level. */
static void test_groups_are_sampled(void **state) {
    (void)state;
    const struct CMUnitTest tests[5] = {
        {.name = "0"}, {.name = "1"}, {.name = "2"}, {.name = "3"}, {.name = "4"}};
    struct CMUnitTest drawn[5];
    unsigned times[5] = {0};
    setenv("CKD_TEST_LEVEL", "quick", 1);
    for (unsigned seed = 0; seed < 100; seed++) {
        set_seed(seed);
        size_t count = sample_tests(drawn, "group", tests, 5, 2);
        assert_in_range(count, 2, 3);
        for (size_t i = 0; i < count; i++) {
            times[drawn[i].name[0] - '0']++;
        }
        assert_int_equal(sample_tests(drawn, "group", tests, 2, 3), 1);
    }
    for (size_t i = 0; i < 5; i++) {
        assert_in_range(times[i], 25, 75);
    }
    setenv("CKD_TEST_LEVEL", "full", 1);
    unsetenv("CKD_FULL_EVERY");
    assert_int_equal(sample_tests(drawn, "group", tests, 5, 2), 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels), cmocka_unit_test(test_each_point_is_first_for_some_seed),
        cmocka_unit_test(test_one_case_in_n_is_drawn), cmocka_unit_test(test_strides),
        cmocka_unit_test(test_groups_are_sampled)};
    return cmocka_run_group_tests_name("level", tests, NULL, NULL);
}
