/* Places in change streams: each way to find them gives the same elements, and refuses places that are not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/entropy/symbols_work.h"
#include "tests/support/xorshift.h"

enum { LOW = 40, HIGH = 60 };

/* Contexts of which one in `sparse` is in the list. */
static uint8_t *contexts_new(size_t n, unsigned sparse) {
    uint8_t *contexts = malloc(n + 1);
    assert_non_null(contexts);
    for (size_t i = 0; i < n; i++) {
        unsigned draw = (unsigned)(next_random() >> 16);
        contexts[i] =
            (uint8_t)(draw % sparse == 0 ? LOW + draw / 256 % (HIGH - LOW + 1) : HIGH + 1 + draw % 100);
    }
    return contexts;
}

/* Draws places among the members, and lists the elements that they are. Returns their number. */
static size_t draw_places(uint32_t *place, uint32_t *element, const uint8_t *contexts, size_t n,
                          unsigned rare) {
    size_t count = 0;
    uint32_t members = 0;
    for (size_t i = 0; i < n; i++) {
        if (contexts[i] < LOW || contexts[i] > HIGH) {
            continue;
        }
        if ((next_random() >> 16) % rare == 0) {
            place[count] = members;
            element[count++] = (uint32_t)i;
        }
        members++;
    }
    return count;
}

static void check_finders(size_t n, unsigned sparse, unsigned rare) {
    uint8_t *contexts = contexts_new(n, sparse);
    uint32_t *place = malloc((n + 1) * sizeof(*place)), *element = malloc((n + 1) * sizeof(*element));
    uint32_t *at = malloc((n + 1) * sizeof(*at)), members = 0;
    symbols_members *m = malloc(sizeof(*m));
    const symbols_listed in = {LOW, HIGH, contexts, n};
    assert_true(place && element && at && m);
    size_t count = draw_places(place, element, contexts, n, rare);
    for (size_t i = 0; i < n; i++) {
        members += contexts[i] >= LOW && contexts[i] <= HIGH;
    }
    for (unsigned way = 0; symbols_finder_at(way); way++) {
        if (count) {
            memcpy(at, place, count * sizeof(*at));
            assert_true(symbols_finder_at(way)(at, count, &in, m));
            assert_memory_equal(at, element, count * sizeof(*at));
        }
        memcpy(at, place, count * sizeof(*at));
        at[count] = members; /* one more than there are */
        assert_false(symbols_finder_at(way)(at, count + 1, &in, m));
    }
    free(contexts);
    free(place);
    free(element);
    free(at);
    free(m);
}

static void test_all_ways_find_the_same(void **state) {
    (void)state;
    assert_non_null(symbols_finder_at(0));
    const size_t sizes[] = {1, 63, 64, 65, 1000, 4097, 60000, SYMBOLS_MAX_COUNT};
    const unsigned shares[] = {1, 2, 5, 64, 1000};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (size_t k = 0; k < sizeof(shares) / sizeof(shares[0]); k++) {
            check_finders(sizes[s], shares[k], 1);
            check_finders(sizes[s], shares[k], 7);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_ways_find_the_same)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
