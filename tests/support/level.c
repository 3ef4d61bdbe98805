#include "tests/support/level.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/*
 * The same tests also run without sanitizers, and check the same. Under sanitizers, with which they take four times
 * as long, the quick level draws half as many.
 */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED_EVERY 2
#else
#define SANITIZED_EVERY 1
#endif

test_level test_level_now(void) {
    static const char *const names[] = {"quick", "full", "big"};
    const char *text = getenv("CKD_TEST_LEVEL");
    if (text == NULL || text[0] == '\0') {
        return TEST_FULL;
    }
    for (int i = TEST_QUICK; i <= TEST_BIG; i++) {
        if (strcmp(text, names[i]) == 0) {
            return (test_level)i;
        }
    }
    fprintf(stderr, "CKD_TEST_LEVEL is quick, full or big, not '%s'\n", text);
    abort();
}

unsigned long test_pick(unsigned long quick, unsigned long full, unsigned long big) {
    test_level level = test_level_now();
    return level == TEST_QUICK ? quick : level == TEST_FULL ? full : big;
}

/* CKD_FULL_EVERY, or 1. */
static unsigned long full_every(void) {
    const char *text = getenv("CKD_FULL_EVERY");
    unsigned long every = text ? strtoul(text, NULL, 10) : 1;
    return every > 1 ? every : 1;
}

unsigned long test_stride(unsigned long quick, unsigned long full, unsigned long big) {
    if (full_every() > 1 && full < quick) {
        full = (full * full_every()) | 1;
        full = full < quick ? full : quick;
    }
    return test_pick(quick, full, big);
}

unsigned long test_first(const char *sweep, unsigned long stride) {
    const char *text = getenv("CKD_SWEEP_SEED");
    if (text == NULL || text[0] == '\0') {
        return 1;
    }
    uint64_t hash = strtoull(text, NULL, 10) ^ UINT64_C(0xcbf29ce484222325);
    for (; *sweep; sweep++) {
        hash = (hash ^ (uint8_t)*sweep) * UINT64_C(0x100000001b3);
    }
    hash ^= hash >> 29; /* the low bits of an FNV hash are mixed badly */
    return 1 + (unsigned long)((hash * UINT64_C(0x9e3779b97f4a7c15) >> 32) % stride);
}

/* The quick level draws one case in `every`. Returns how many cases the present level draws one from. */
static unsigned long drawn_from(unsigned long every) {
    return test_pick(every, full_every() < every ? full_every() : every, 1);
}

bool test_draws(const char *list, unsigned long i, unsigned long every) {
    every = drawn_from(every);
    return i % every == test_first(list, every) - 1;
}

/* Copies the tests that run to `drawn`, which has space for all. Returns how many there are. */
size_t sample_tests(struct CMUnitTest *drawn, const char *name, const struct CMUnitTest *tests, size_t count,
                    unsigned long every) {
    size_t drawn_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (test_draws(name, i, every < count ? every : count)) {
            drawn[drawn_count++] = tests[i];
        }
    }
    return drawn_count;
}

int run_sampled_tests(const char *name, const struct CMUnitTest *tests, size_t count, unsigned long every,
                      int (*setup)(void **), int (*teardown)(void **)) {
    struct CMUnitTest *drawn = malloc(count * sizeof(*drawn));
    assert_non_null(drawn);
    size_t drawn_count = sample_tests(drawn, name, tests, count, every * SANITIZED_EVERY);
    int failed = _cmocka_run_group_tests(name, drawn, drawn_count, setup, teardown);
    free(drawn);
    return failed;
}
