/* Chooses how thorough a test is, and where a sweep begins that takes only some of its points. */
#ifndef TESTS_SUPPORT_LEVEL_H
#define TESTS_SUPPORT_LEVEL_H

#include <stdbool.h>
#include <stddef.h>

/*
 * CKD_TEST_LEVEL is "quick" (`make test`), "full" (`make test-full`, and programs run by themselves) or "big"
 * (every point of every sweep, states of gigabytes; takes hours). Any other value ends the program.
 */
typedef enum test_level { TEST_QUICK, TEST_FULL, TEST_BIG } test_level;
test_level test_level_now(void);

/* Returns the argument for the present level. */
unsigned long test_pick(unsigned long quick, unsigned long full, unsigned long big);

/*
 * Returns the stride of a sweep at the present level. At the full level, CKD_FULL_EVERY makes it so many times as
 * large, but no larger than `quick`. It is odd then, as sweeps alternate between two kinds of failure.
 */
unsigned long test_stride(unsigned long quick, unsigned long full, unsigned long big);

/*
 * Returns where a sweep begins that takes every stride-th point: a number from 1 to stride, which depends on
 * CKD_SWEEP_SEED and the sweep's name. The runner derives the seed from the commit, so each commit tests
 * other points. Without a seed it is 1.
 */
unsigned long test_first(const char *sweep, unsigned long stride);

/*
 * Returns whether to test case `i` of a list. At the quick level one case in `every` is tested, beginning
 * with test_first(). At the full level, one in CKD_FULL_EVERY is, but no fewer than at the quick one; without it, all.
 */
bool test_draws(const char *list, unsigned long i, unsigned long every);

/*
 * Runs a group of tests like cmocka_run_group_tests_name(), but only those that test_draws() chooses from this list.
 * Use it for groups that take seconds and whose tests run much of the same code.
 */
#define run_sampled(name, tests, every, setup, teardown) \
    run_sampled_tests(name, tests, sizeof(tests) / sizeof((tests)[0]), every, setup, teardown)
struct CMUnitTest;
size_t sample_tests(struct CMUnitTest *drawn, const char *name, const struct CMUnitTest *tests, size_t count,
                    unsigned long every);
int run_sampled_tests(const char *name, const struct CMUnitTest *tests, size_t count, unsigned long every,
                      int (*setup)(void **), int (*teardown)(void **));

#endif
