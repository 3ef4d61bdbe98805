/* How thorough a test is to be, and which points a sweep takes that does not take all of them. */
#ifndef TESTS_SUPPORT_LEVEL_H
#define TESTS_SUPPORT_LEVEL_H

#include <stdbool.h>
#include <stddef.h>

/*
 * CKD_TEST_LEVEL: "quick" (`make test`), "full" (`make test-full`, and a program run by itself), or "big" (every point of
 * every sweep, states of gigabytes: hours). Any other value ends the program.
 */
typedef enum test_level { TEST_QUICK, TEST_FULL, TEST_BIG } test_level;
test_level test_level_now(void);

/* The argument of the level. */
unsigned long test_pick(unsigned long quick, unsigned long full, unsigned long big);

/*
 * Where a sweep begins that takes every stride-th point: from 1 to stride, drawn by CKD_SWEEP_SEED and the sweep's name. The
 * runner draws the seed from the commit, so that other commits test other points. Without a seed it is 1.
 */
unsigned long test_first(const char *sweep, unsigned long stride);

/* Is case `i` of a list to be tested? At the quick level one of each `every` is, beginning with test_first(). */
bool test_draws(const char *list, unsigned long i, unsigned long every);

/*
 * Runs a group of tests like cmocka_run_group_tests_name(). At the quick level only one of each `every` tests runs, drawn
 * like the cases of a list. For groups that take seconds and whose tests go through much of the same code.
 */
#define run_sampled(name, tests, every, setup, teardown) \
    run_sampled_tests(name, tests, sizeof(tests) / sizeof((tests)[0]), every, setup, teardown)
struct CMUnitTest;
size_t sample_tests(struct CMUnitTest *drawn, const char *name, const struct CMUnitTest *tests, size_t count,
                    unsigned long every);
int run_sampled_tests(const char *name, const struct CMUnitTest *tests, size_t count, unsigned long every,
                      int (*setup)(void **), int (*teardown)(void **));

#endif
