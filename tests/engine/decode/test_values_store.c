/*
 * Values that a load keeps for blocks that need them again: dropped after their last use, and their memory used again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/decode/values_store.h"

enum { SIZE = 4096 };

static const record records[4] = {
    {.raw_size = SIZE}, {.raw_size = SIZE}, {.raw_size = SIZE}, {.raw_size = SIZE / 2}};

/* Claims an entry that is not there, and fills it in. */
static stored_values *filled(values_store *s, size_t i, uint32_t uses) {
    bool must_fill;
    stored_values *v = values_store_claim(s, &must_fill, &records[i], uses, NULL);
    assert_non_null(v);
    assert_true(must_fill);
    memset(v->values, (int)i, records[i].raw_size);
    values_store_filled(s, v, true);
    return v;
}

static stored_values *found(values_store *s, size_t i, uint32_t uses) {
    bool must_fill;
    stored_values *v = values_store_claim(s, &must_fill, &records[i], uses, NULL);
    assert_non_null(v);
    assert_false(must_fill);
    assert_int_equal(*(unsigned char *)v->values, i);
    return v;
}

static void test_the_last_use_frees_the_memory_for_others(void **state) {
    (void)state;
    values_store s;
    values_store_init(&s, 2 * SIZE);
    stored_values *a = filled(&s, 0, 2);
    const void *memory = a->values;
    values_store_release(&s, a);
    a = found(&s, 0, 2);
    stored_values *b = filled(&s, 1, 1);
    assert_ptr_not_equal(b->values, memory); /* a still has one */
    values_store_release(&s, a);
    stored_values *c = filled(&s, 2, 1);
    assert_ptr_equal(c->values, memory);
    assert_int_equal(s.bytes, 2 * SIZE);
    values_store_release(&s, c);
    values_store_release(&s, b);
    filled(&s, 0, 1); /* it was dropped: it must be filled in again */
    values_store_free(&s);
}

/* A second thread may hold an entry while the first one is done with it, even if fewer uses were planned. */
static void test_entries_in_use_stay(void **state) {
    (void)state;
    values_store s;
    values_store_init(&s, 4 * SIZE);
    stored_values *a = filled(&s, 0, 1), *again = found(&s, 0, 1);
    assert_ptr_equal(a, again);
    values_store_release(&s, a);
    assert_ptr_not_equal(filled(&s, 1, 1)->values, a->values);
    assert_int_equal(*(unsigned char *)a->values, 0);
    values_store_release(&s, again);
    assert_ptr_equal(filled(&s, 2, 1)->values, a->values);
    values_store_free(&s);
}

/* Memory that waits for a new use counts, and goes first when another size is wanted. */
static void test_spare_memory_is_bounded(void **state) {
    (void)state;
    values_store s;
    bool must_fill;
    values_store_init(&s, 2 * SIZE);
    for (size_t i = 0; i < 2; i++) {
        values_store_release(&s, filled(&s, i, 1));
    }
    values_store_release(&s, filled(&s, 3, 1));
    assert_true(s.bytes <= 2 * SIZE);
    stored_values *kept = filled(&s, 2, VALUES_USES_UNKNOWN);
    values_store_release(&s, kept);
    found(&s, 2, VALUES_USES_UNKNOWN); /* it stays, as nobody knows who needs it */
    values_store_set_limit(&s, SIZE);
    assert_null(values_store_claim(&s, &must_fill, &records[0], 1, NULL)); /* the only entry is in use */
    assert_false(must_fill);
    values_store_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_last_use_frees_the_memory_for_others),
        cmocka_unit_test(test_entries_in_use_stay),
        cmocka_unit_test(test_spare_memory_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
