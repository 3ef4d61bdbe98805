/* When sessions save: the arithmetic, with simulated times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "engine/session/interval.h"
#include "tests/support/xorshift.h"

/* A simulated training and the cost of its saves. */
typedef struct world {
    double step_s, stall_s, slower,
        persist_s; /* slower: factor by which iterations are slower during a save */
    double noise;  /* iterations vary by up to this share */
    double left_s; /* time left of the save in progress */
} world;

typedef struct outcome {
    uint64_t saves, first, last, last_gap;
    double pure_s, lost_s; /* time of training alone, and the real cost of the saves */
} outcome;

static double uniform(void) {
    return (double)(next_random() >> 11) / (double)(UINT64_C(1) << 53);
}

/* Simulates steps `first` to `end`. The world may change between calls. */
static void train(outcome *o, interval *v, world *w, uint64_t first, uint64_t end) {
    for (uint64_t step = first; step < end; step++) {
        bool saving = w->left_s > 0;
        double pure = w->step_s * (1 + w->noise * (2 * uniform() - 1));
        double slowed = saving ? fmin(w->left_s, pure * w->slower) * (1 - 1 / w->slower) : 0;
        interval_iteration(v, pure + slowed, saving);
        o->pure_s += pure;
        o->lost_s += slowed;
        w->left_s -= pure + slowed;
        if (saving && w->left_s <= 0) {
            interval_ended(v, w->persist_s);
        }
        if (w->left_s <= 0 && interval_due(v, step)) {
            interval_begun(v);
            interval_stalled(v, w->stall_s);
            o->lost_s += w->stall_s;
            w->left_s = w->persist_s;
            o->first = o->saves ? o->first : step;
            o->last_gap = step - o->last;
            o->last = step;
            o->saves++;
        }
    }
}

static world usual(void) {
    return (world){.step_s = .1, .stall_s = .05, .slower = 1.3, .persist_s = 1, .noise = .1};
}

/*
 * A save stalls training for 0.05 s and slows it for 1.3 s, which costs 0.28 s in all. At 3.5 % there is a save every
 * 8 s.
 */
static void test_saves_cost_the_given_share(void **state) {
    (void)state;
    static const double asked[] = {0.01, 0.035, 0.1};
    for (size_t i = 0; i < 3; i++) {
        interval v;
        outcome o = {0};
        world w = usual();
        interval_init(&v, 0, 0, asked[i], 0);
        train(&o, &v, &w, 0, 50000);
        double share = o.lost_s / o.pure_s;
        if (!(share < 1.1 * asked[i] && share > 0.8 * asked[i])) {
            fail_msg("%g asked for, %g lost in %llu saves", asked[i], share, (unsigned long long)o.saves);
        }
        assert_true(o.first < 20);
        double figure = (double)interval_steps(&v), gap = 5000 / (double)(o.saves / 10);
        assert_true(figure > 0.7 * gap && figure < 1.4 * gap);
    }
}

static void test_the_default_is_three_and_a_half_percent(void **state) {
    (void)state;
    interval v;
    outcome o = {0};
    world w = usual();
    interval_init(&v, 0, 0, 0, 0);
    train(&o, &v, &w, 0, 20000);
    assert_true(fabs(o.lost_s / o.pure_s - 0.035) < 0.005);
}

/*
 * The disk becomes three times slower, so saves last and slow training three times as long. Within three saves the
 * gaps are right again.
 */
static void test_intervals_follow_a_slower_disk(void **state) {
    (void)state;
    interval v;
    outcome before = {0}, after = {0};
    world w = usual();
    w.noise = 0.02;
    interval_init(&v, 0, 0, 0.035, 0);
    train(&before, &v, &w, 0, 5000);
    w.persist_s *= 3;
    uint64_t step = 5000;
    for (; after.saves < 4; step++) {
        train(&after, &v, &w, step, step + 1);
    }
    outcome late = {.last = 0};
    train(&late, &v, &w, step, step + 20000);
    assert_true(late.lost_s / late.pure_s < 0.05 && late.lost_s / late.pure_s > 0.025);
    assert_true((double)late.last_gap > 1.8 * (double)before.last_gap);
    w.persist_s /= 3; /* and fast again */
    outcome again = {.last = 0};
    train(&again, &v, &w, step + 20000, step + 30000);
    assert_true((double)again.last_gap < 1.4 * (double)before.last_gap);
}

/*
 * Saves without cost begin only after the last one is durable, and after some iterations without a save, for
 * comparison.
 */
static void test_free_saves_leave_iterations_to_measure(void **state) {
    (void)state;
    interval v;
    outcome o = {0};
    world w = {.step_s = .1, .slower = 1, .persist_s = 4};
    interval_init(&v, 0, 0, 0.035, 0);
    train(&o, &v, &w, 0, 1000);
    assert_in_range(o.last_gap, 50, 53);
}

/* sqrt(2 x 0.28 s x 3600 s) = 45 s. */
static void test_failure_rates_set_the_optimum(void **state) {
    (void)state;
    interval v;
    outcome o = {0};
    world w = usual();
    interval_init(&v, 0, 0, 0, 3600);
    train(&o, &v, &w, 0, 20000);
    assert_in_range(o.last_gap, 360, 540);
    interval_init(&v, 0, 0, 0.001, 3600); /* the optimum exceeds the allowed share */
    outcome bound = {0};
    train(&bound, &v, &w, 0, 40000);
    assert_true(bound.last_gap > 2000);
}

static void test_steps_and_seconds(void **state) {
    (void)state;
    interval v;
    interval_init(&v, 50, 0, 0, 0);
    assert_false(interval_due(&v, 49));
    assert_true(interval_due(&v, 50));
    assert_int_equal(interval_steps(&v), 50);
    interval_init(&v, 0, 30, 0, 0);
    interval_iteration(&v, 29.5, false);
    assert_false(interval_due(&v, 1));
    interval_iteration(&v, 1, false);
    assert_true(interval_due(&v, 2));
    interval_begun(&v);
    assert_false(interval_due(&v, 3));
}

/* A pause of half a minute, such as a validation, is not counted as an iteration, and not as a cost of a save. */
static void test_pauses_are_not_counted(void **state) {
    (void)state;
    interval v;
    outcome o = {0};
    world w = usual();
    interval_init(&v, 0, 0, 0.035, 0);
    train(&o, &v, &w, 0, 1000);
    double step_s = v.step_s, account_s = v.account_s, interference_s = v.interference_s;
    interval_iteration(&v, 30, false);
    assert_true(v.step_s == step_s);
    interval_iteration(&v, 30, true);
    assert_true(v.interference_s == interference_s);
    assert_true(v.account_s >= account_s && v.account_s <= v.cost_s);
}

/* If iterations become eight times longer for good, the estimate follows. */
static void test_longer_iterations_are_noticed(void **state) {
    (void)state;
    interval v;
    outcome before = {0}, after = {0};
    world w = usual();
    interval_init(&v, 0, 0, 0.035, 0);
    train(&before, &v, &w, 0, 2000);
    w.step_s = 2.5;
    train(&after, &v, &w, 2000, 6000);
    assert_true(fabs(v.step_s - 2.5) < 0.2);
    assert_true(fabs(after.lost_s / after.pure_s - 0.035) < 0.01);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_saves_cost_the_given_share),
        cmocka_unit_test(test_the_default_is_three_and_a_half_percent),
        cmocka_unit_test(test_intervals_follow_a_slower_disk),
        cmocka_unit_test(test_free_saves_leave_iterations_to_measure),
        cmocka_unit_test(test_failure_rates_set_the_optimum),
        cmocka_unit_test(test_steps_and_seconds),
        cmocka_unit_test(test_pauses_are_not_counted),
        cmocka_unit_test(test_longer_iterations_are_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
