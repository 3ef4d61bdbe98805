/* What a sensor calls unlike the others, by tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "engine/session/sensors.h"

/*
 * A history of `count` figures around `middle` that vary by `spread` either way. Their median deviation is spread / 2.
 */
static sensor_history history_of(uint64_t count, double middle, double spread) {
    static const double places[] = {0, 1, -1, 0.5, -0.5};
    sensor_history h = {.count = 0};
    sensor_rule none = {.window = SENSOR_WINDOW, .warm_up = 1};
    for (uint64_t i = 0; i < count; i++) {
        assert_false(sensor_observe(NULL, &h, &none, middle + spread * places[i % 5]));
    }
    return h;
}

typedef struct row {
    const char *name;
    uint64_t count;
    double middle, spread, value;
    sensor_verdict verdict;
} row;

static void check_rows(const row *rows, size_t count, const sensor_rule *rule) {
    for (size_t i = 0; i < count; i++) {
        sensor_history h = history_of(rows[i].count, rows[i].middle, rows[i].spread);
        sensor_reading r = sensor_judge(&h, rule, rows[i].value);
        if (r.verdict != rows[i].verdict) {
            fail_msg("row %zu, %s: verdict %d instead of %d; limit %g", i, rows[i].name ? rows[i].name : "",
                     (int)r.verdict, (int)rows[i].verdict, r.limit);
        }
    }
}
#define CHECK(rows, rule) check_rows(rows, sizeof(rows) / sizeof((rows)[0]), rule)

static void test_loss(void **state) {
    (void)state;
    static const row rows[] = {
        {"too few", 15, 2, 0.1, 50, SENSOR_UNKNOWN},
        {"enough", 16, 2, 0.1, 50, SENSOR_HIGH},
        {"none", 0, 2, 0.1, 50, SENSOR_UNKNOWN},
        {"within 16 deviations of .05", 60, 2, 0.1, 2.79, SENSOR_NORMAL},
        {"above them", 60, 2, 0.1, 2.81, SENSOR_HIGH},
        {"a window that went round", 1000, 2, 0.1, 2.81, SENSOR_HIGH},
        {"a low loss is good", 60, 2, 0.1, 0, SENSOR_NORMAL},
        {"constant: a tenth is allowed", 60, 2, 0, 2.19, SENSOR_NORMAL},
        {"constant", 60, 2, 0, 2.21, SENSOR_HIGH},
        {"a negative one", 60, -2, 0, -1.7, SENSOR_HIGH},
        {"infinite", 60, 2, 0.1, INFINITY, SENSOR_HIGH},
        {"NaN", 60, 2, 0.1, NAN, SENSOR_NO_NUMBER},
        {"NaN at once", 0, 2, 0.1, NAN, SENSOR_NO_NUMBER},
        {"infinite at once", 3, 2, 0.1, INFINITY, SENSOR_NO_NUMBER},
    };
    sensor_rule loss = sensor_metric("Validation-Loss");
    CHECK(rows, &loss);
}

static void test_other_metrics(void **state) {
    (void)state;
    static const row accuracy[] = {{"rose", 60, 0.5, 0.01, 0.99, SENSOR_NORMAL},
                                   {"fell", 60, 0.5, 0.01, 0.1, SENSOR_LOW},
                                   {"fell without end", 60, 0.5, 0.01, -INFINITY, SENSOR_LOW}};
    static const row unknown[] = {{"rose", 60, 5, 0.01, 9, SENSOR_HIGH},
                                  {"fell", 60, 5, 0.01, 1, SENSOR_LOW}};
    sensor_rule rule = sensor_metric("accuracy");
    CHECK(accuracy, &rule);
    rule = sensor_metric("tokens");
    CHECK(unknown, &rule);
    rule = sensor_metric("accuracy_loss"); /* a cost, whatever it is of */
    assert_true(rule.high && !rule.low);
}

static void test_sizes_and_times(void **state) {
    (void)state;
    static const row sizes[] = {
        {"too few", 5, 100, 1, 1, SENSOR_UNKNOWN}, {"empty", 6, 100, 1, 5, SENSOR_LOW},
        {"smaller", 6, 100, 1, 15, SENSOR_NORMAL}, {"larger", 6, 100, 1, 190, SENSOR_NORMAL},
        {"huge", 6, 100, 1, 210, SENSOR_HIGH},     {"they vary", 60, 100, 60, 5, SENSOR_NORMAL}};
    static const row times[] = {{"fast", 20, 10, 0.1, 0.01, SENSOR_NORMAL},
                                {"slower", 20, 10, 0.1, 45, SENSOR_NORMAL},
                                {"slow", 20, 10, 0.1, 51, SENSOR_HIGH},
                                {"all are short", 20, 0.01, 0.001, 0.9, SENSOR_NORMAL},
                                {"a second more", 20, 0.01, 0.001, 1.1, SENSOR_HIGH}};
    CHECK(sizes, &sensor_size);
    CHECK(times, &sensor_time);
}

/* Half of the figures may be outliers without a change of what is normal. */
static void test_outliers_in_the_history(void **state) {
    (void)state;
    sensor_rule loss = sensor_metric("loss"), none = {.window = SENSOR_WINDOW, .warm_up = 1};
    sensor_history h = history_of(40, 2, 0.1);
    for (int i = 0; i < 11; i++) { /* of the 24 that count */
        (void)sensor_observe(NULL, &h, &none, 1e6);
    }
    assert_int_equal(sensor_judge(&h, &loss, 9).verdict, SENSOR_HIGH);
    assert_int_equal(sensor_judge(&h, &loss, 2.05).verdict, SENSOR_NORMAL);
}

/* A loss that falls varies much over a long time, and little from step to step. */
static void test_trend(void **state) {
    (void)state;
    sensor_rule loss = sensor_metric("loss");
    sensor_history h = {.count = 0};
    for (int i = 0; i < 100; i++) {
        assert_false(sensor_observe(NULL, &h, &loss, 2 + 4.0 / (i + 1) + 0.03 * (i % 3)));
    }
    assert_int_equal(sensor_judge(&h, &loss, 2.7).verdict, SENSOR_HIGH);
    assert_int_equal(sensor_judge(&h, &loss, 2.2).verdict, SENSOR_NORMAL);
}

/* One alarm for figures in a row that are unlike the others. If they stay, they become normal. */
static void test_one_alarm_in_a_row(void **state) {
    (void)state;
    sensor_rule loss = sensor_metric("loss");
    sensor_history h = history_of(64, 2, 0.1);
    sensor_reading r;
    assert_true(sensor_observe(&r, &h, &loss, 7));
    assert_true(r.verdict == SENSOR_HIGH && r.median > 1.9 && r.median < 2.1 && r.limit > 2.5 && r.limit < 3);
    assert_false(sensor_observe(&r, &h, &loss, 8));
    assert_int_equal(r.verdict, SENSOR_HIGH);
    assert_false(sensor_observe(NULL, &h, &loss, NAN)); /* it neither ends nor begins any */
    assert_false(sensor_observe(NULL, &h, &loss, INFINITY));
    assert_false(sensor_observe(&r, &h, &loss, 2));
    assert_int_equal(r.verdict, SENSOR_NORMAL);
    assert_true(sensor_observe(NULL, &h, &loss, 7));
    unsigned alarms = 0;
    for (int i = 0; i < 200; i++) {
        alarms += sensor_observe(&r, &h, &loss, 7 + 0.01 * (i % 3));
    }
    assert_int_equal(alarms, 0);
    assert_int_equal(r.verdict, SENSOR_NORMAL);
    assert_true(sensor_median(&h) > 6.9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_other_metrics),
        cmocka_unit_test(test_sizes_and_times),
        cmocka_unit_test(test_outliers_in_the_history),
        cmocka_unit_test(test_trend),
        cmocka_unit_test(test_one_alarm_in_a_row),
    };
    return cmocka_run_group_tests_name("sensors", tests, NULL, NULL);
}
