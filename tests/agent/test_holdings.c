/* The memory of sessions, without an agent around it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent/internal.h"
#include "tests/support/trainers.h"

/* The ranks of a lost node leave a state that cannot be stored yet. It stays, however much memory others need. */
static void test_what_waits_for_other_nodes_is_not_forgotten(void **state) {
    (void)state;
    agent a = {.options = {.memory_bytes = 10000}};
    ckd_error err;
    pthread_mutex_init(&a.mutex, NULL);
    holding *left = holding_add(&a, &(slot_hello){.run = "ranks", .world = 2}, -1, -1);
    holding *h = holding_add(&a, &(slot_hello){.run = "another"}, -1, -1);
    assert_true(left && h);
    slot_layout layout = {.size = 6000};
    must(holding_give_memory(&a, left, &layout, 1, &err), &err);
    left->settled = true;
    left->deferred = 1;
    layout.size = 6000;
    assert_int_equal(holding_give_memory(&a, h, &layout, 1, &err), CKD_E_NOMEM);
    assert_int_equal(a.used_bytes, 8192); /* two pages */
    left->deferred = 0;
    must(holding_give_memory(&a, h, &layout, 1, &err), &err);
    assert_ptr_equal(a.holdings, h);
    assert_null(h->next);
    holding_remove(&a, h);
    pthread_mutex_destroy(&a.mutex);
}

/* A session saves one state after the other. A drain waits only for those of its beginning. */
static void test_a_drain_ends_while_a_session_saves(void **state) {
    (void)state;
    agent a = {.options = {.memory_bytes = 10000}};
    ckd_error err;
    int ends[2];
    pthread_mutex_init(&a.mutex, NULL);
    pthread_cond_init(&a.changed, NULL);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    holding *h = holding_add(&a, &(slot_hello){.run = "gpt"}, ends[0], -1);
    assert_non_null(h);
    slot_layout layout = {.size = 600};
    must(holding_give_memory(&a, h, &layout, 1, &err), &err);
    h->saving = true;
    h->set->saved_ns = UINT64_MAX;
    alarm(30);
    pthread_mutex_lock(&a.mutex);
    must(holdings_drain(&a, &err), &err);
    pthread_mutex_unlock(&a.mutex);
    alarm(0);
    holding_remove(&a, h);
    close(ends[0]);
    close(ends[1]);
    pthread_cond_destroy(&a.changed);
    pthread_mutex_destroy(&a.mutex);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_waits_for_other_nodes_is_not_forgotten),
        cmocka_unit_test(test_a_drain_ends_while_a_session_saves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
