/* What follows an attempt: a table of histories and decisions. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "supervise/internal.h"

#define NONE SUPERVISE_NO_STEP

/* Short forms of attempts: from a step to the last step, and how they ended. */
typedef struct short_attempt {
    uint64_t from, first, last;
    attempt_end end;
    int code, stopped_by, status;
    uint64_t seconds;
    bool hung;
} short_attempt;

static attempt widen(const short_attempt *s) {
    attempt a = {.from_step = s->from,
                 .first_step = s->first,
                 .last_step = s->last,
                 .end = s->end,
                 .code = s->code,
                 .stopped_by = s->stopped_by,
                 .status = s->status,
                 .hung = s->hung,
                 .start_ns = SECOND,
                 .end_ns = SECOND + s->seconds * SECOND};
    if (s->from != NONE) {
        snprintf(a.from, sizeof(a.from), "gpt@%llu", (unsigned long long)s->from);
    }
    return a;
}

#define FAILED(from, first, last) \
    { from, first, last, ATTEMPT_EXITED, 1, 0, -1, 100, false }
#define KILLED(from, first, last) \
    { from, first, last, ATTEMPT_KILLED, SIGKILL, 0, -1, 100, false }
#define CRASHED(from, first, last) \
    { from, first, last, ATTEMPT_KILLED, SIGSEGV, 0, -1, 100, false }
#define LOST(from, first, last) \
    { from, first, last, ATTEMPT_LOST, 0, 0, -1, 100, false }
#define EXITED(code, from, first, last) \
    { from, first, last, ATTEMPT_EXITED, code, 0, -1, 100, false }
#define HUNG(code, from, first, last) \
    { from, first, last, ATTEMPT_EXITED, code, 0, -1, 100, true }
#define STOPPED(from, first, last) \
    { from, first, last, ATTEMPT_EXITED, 0, SIGTERM, 128 + SIGTERM, 100, false }
#define GAVE_UP(from, first, last) \
    { from, first, last, ATTEMPT_EXITED, 1, 0, 93, 100, false }
#define AT_ONCE(end, code) \
    { NONE, NONE, NONE, end, code, 0, -1, 3, false }

typedef struct expectation {
    const char *name;
    short_attempt history[8];
    size_t count;
    uint64_t started_here; /* 0: count */
    bool older, disk_full;
    int status; /* -1: restart */
    const char *reason;
} expectation;

#define H(...) {__VA_ARGS__}, sizeof((short_attempt[]){__VA_ARGS__}) / sizeof(short_attempt)

static const expectation table[] = {
    {"done", H(EXITED(0, 10, 10, 20)), 0, false, false, 0, "done"},
    {"done without a checkpoint", H(EXITED(0, NONE, NONE, NONE)), 0, false, false, 0, "done"},
    {"stopped, though the command was done", H(STOPPED(10, 10, 20)), 0, false, false, 143, "SIGTERM"},
    {"failed after progress", H(FAILED(10, 10, 20)), 0, false, false, -1, ""},
    {"failed before the first checkpoint", H(FAILED(NONE, NONE, NONE)), 0, false, false, -1, ""},
    {"failed twice before the first checkpoint", H(FAILED(NONE, NONE, NONE), FAILED(NONE, NONE, NONE)), 0,
     false, false, 93, "exit status 1 twice before the first checkpoint"},
    {"another exit status", H(FAILED(NONE, NONE, NONE), EXITED(3, NONE, NONE, NONE)), 0, false, false, -1,
     ""},
    {"crashed twice", H(CRASHED(10, 10, 10), CRASHED(10, 10, 10)), 0, false, false, 93,
     "killed by SIGSEGV twice"},
    {"killed twice from outside", H(KILLED(10, 10, 10), KILLED(10, 10, 10)), 0, false, false, -1, ""},
    {"a rank killed twice, as mpirun reports it", H(EXITED(137, 10, 10, 10), EXITED(137, 10, 10, 10)), 0,
     false, false, -1, ""},
    {"ended twice by SIGTERM, as a shell reports it", H(EXITED(143, 10, 10, 10), EXITED(143, 10, 10, 10)), 0,
     false, false, -1, ""},
    {"crashed twice, as a shell reports it", H(EXITED(139, 10, 10, 10), EXITED(139, 10, 10, 10)), 0, false,
     false, 93, "exit status 139 twice"},
    {"killed three times", H(KILLED(10, 10, 10), KILLED(10, 10, 10), KILLED(10, 10, 10)), 0, false, false, 93,
     "no newer checkpoint in 3 attempts"},
    {"failed twice, but there is an older checkpoint", H(FAILED(10, 10, 10), FAILED(10, 10, 10)), 0, true,
     false, -1, ""},
    {"failed after going back, as before", H(FAILED(10, 10, 10), FAILED(10, 10, 10), FAILED(5, 10, 10)), 0,
     true, false, 93, "gave up"},
    {"the same with checkpoints in between", H(FAILED(10, 10, 20), FAILED(20, 20, 30), FAILED(30, 30, 40)), 0,
     true, false, -1, ""},
    {"progress starts the count again",
     H(KILLED(10, 10, 10), KILLED(10, 10, 10), KILLED(10, 10, 20), KILLED(20, 20, 20), KILLED(20, 20, 20)), 0,
     true, false, -1, ""},
    {"only steps that are newer than all count",
     H(KILLED(20, 20, 20), KILLED(20, 20, 20), KILLED(10, 20, 20)), 0, true, false, 93, "3 attempts"},
    {"stopped attempts do not count",
     H(KILLED(10, 10, 10), STOPPED(10, 10, 10), STOPPED(10, 10, 10), KILLED(10, 10, 10)), 2, true, false, -1,
     ""},
    {"nor do they start the count again",
     H(KILLED(10, 10, 10), STOPPED(10, 10, 10), KILLED(10, 10, 10), KILLED(10, 10, 10)), 2, true, false, 93,
     "3 attempts"},
    {"a supervisor that died counts", H(LOST(10, 10, 10), LOST(10, 10, 10), KILLED(10, 10, 10)), 1, true,
     false, 93, "3 attempts"},
    {"after giving up it begins anew", H(FAILED(10, 10, 10), GAVE_UP(10, 10, 10), FAILED(10, 10, 10)), 1,
     false, false, -1, ""},
    {"no such program", H(AT_ONCE(ATTEMPT_REFUSED, ENOENT)), 0, false, false, 127, "No such file"},
    {"not executable", H(AT_ONCE(ATTEMPT_REFUSED, EACCES)), 0, false, false, 126, "Permission denied"},
    {"wrong usage at once", H(AT_ONCE(ATTEMPT_EXITED, 2)), 0, false, false, 2,
     "exit status 2; not tried again"},
    {"not found by a shell", H(AT_ONCE(ATTEMPT_EXITED, 127)), 0, false, false, 127, "not tried again"},
    {"status 2 after a while", H(EXITED(2, NONE, NONE, NONE)), 0, false, false, -1, ""},
    {"status 2, but with a checkpoint", H({NONE, NONE, 10, ATTEMPT_EXITED, 2, 0, -1, 3, false}), 0, false,
     false, -1, ""},
    {"status 1 at once", H(AT_ONCE(ATTEMPT_EXITED, 1)), 0, false, false, -1, ""},
    {"the program is gone later",
     H(KILLED(10, 10, 10), {10, 10, 10, ATTEMPT_REFUSED, ENOENT, 0, -1, 0, false}), 0, false, false, -1, ""},
    {"hung, but ended well when it was told to", H(HUNG(0, 10, 10, 20)), 0, true, false, -1, ""},
    {"hung twice", H(HUNG(1, 10, 10, 10), HUNG(1, 10, 10, 10)), 0, false, false, -1, ""},
    {"hung three times", H(HUNG(1, 10, 10, 10), HUNG(0, 10, 10, 10), HUNG(1, 10, 10, 10)), 0, true, false, 93,
     "3 attempts"},
    {"full disk", H(FAILED(10, 10, 10)), 0, true, true, 1, "disk is full"},
    {"full disk after progress", H(FAILED(10, 10, 20)), 0, true, true, -1, ""},
    {"restarts used up", H(FAILED(10, 10, 20)), 6, true, false, 1, "--max-restarts"},
    {"the last restart", H(FAILED(10, 10, 20)), 5, true, false, -1, ""},
};

static decision decide_case(const expectation *e, double chance) {
    attempt history[8];
    for (size_t i = 0; i < e->count; i++) {
        history[i] = widen(&e->history[i]);
    }
    decide_rules rules = {.pause_s = 4, .max_pause_s = 30, .max_restarts = 5, .max_futile = 3};
    return decide(&rules, &(decide_facts){.history = history,
                                          .count = e->count,
                                          .started_here = e->started_here ? e->started_here : e->count,
                                          .older = e->older,
                                          .disk_full = e->disk_full,
                                          .chance = chance});
}

static void test_table(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        const expectation *e = &table[i];
        decision d = decide_case(e, 0);
        int status = d.restart ? -1 : d.status;
        if (status != e->status || !strstr(d.reason, e->reason)) {
            fail_msg("%s: status %d, \"%s\"", e->name, status, d.reason);
        }
        assert_int_equal(d.kind == CKD_OK, d.restart || d.status == 0);
    }
}

/* Pauses double from attempt to attempt without progress, up to the limit, and are halved at most by chance. */
static void test_pauses(void **state) {
    (void)state;
    attempt history[12];
    decide_rules rules = {.pause_s = 4, .max_pause_s = 30, .max_restarts = 100, .max_futile = 100};
    static const double pauses[] = {4, 8, 16, 30, 30, 30};
    for (size_t count = 1; count <= 6; count++) {
        history[count - 1] = widen(&(short_attempt)KILLED(10, 10, 10));
        for (int half = 0; half < 2; half++) {
            decision d = decide(&rules, &(decide_facts){.history = history,
                                                        .count = count,
                                                        .started_here = count,
                                                        .older = true,
                                                        .chance = half ? 0 : 1});
            assert_true(d.restart);
            assert_float_equal(d.pause_s, half ? pauses[count - 1] / 2 : pauses[count - 1], 1e-9);
        }
    }
    history[6] = widen(&(short_attempt)KILLED(10, 10, 20));
    decision d =
        decide(&rules, &(decide_facts){.history = history, .count = 7, .started_here = 7, .chance = 1});
    assert_float_equal(d.pause_s, 4, 1e-9);
}

/* Two failures in a row from a checkpoint, without a newer one, are enough to go back. */
static void test_failures(void **state) {
    (void)state;
    attempt h[5];
    h[0] = widen(&(short_attempt)KILLED(10, 10, 10));
    h[1] = widen(&(short_attempt)KILLED(10, 10, 20));
    h[2] = widen(&(short_attempt)KILLED(20, 20, 20));
    h[3] = widen(&(short_attempt)STOPPED(20, 20, 20));
    h[4] = widen(&(short_attempt)FAILED(20, 20, 20));
    assert_int_equal(decide_failures(h, 5, "gpt@10"), 0);
    assert_int_equal(decide_failures(h, 5, "gpt@20"), 2);
    assert_int_equal(decide_failures(h, 5, "gpt@30"), 0);
    size_t count = 5;
    assert_ptr_equal(decide_current(h, &count), h);
    assert_int_equal(count, 5);
    h[2].status = 93;
    assert_ptr_equal(decide_current(h, &count), h + 3);
    assert_int_equal(count, 2);
}

/* An attempt with a suspect checkpoint has failed, however it ended, but not by itself. */
static void test_unhealthy(void **state) {
    (void)state;
    decide_rules rules = {.pause_s = 4, .max_pause_s = 30, .max_restarts = 100, .max_futile = 3};
    attempt h[3];
    char reason[SUPERVISE_TEXT_MAX];
    for (int i = 0; i < 3; i++) {
        h[i] = widen(&(short_attempt)EXITED(i == 0 ? 0 : 5, 10, 10, 10));
        h[i].unhealthy = true;
        h[i].first_save_ns = SECOND;
        snprintf(h[i].anomaly, sizeof(h[i].anomaly), "gpt@12");
    }
    decide_reason(reason, &h[1]);
    assert_string_equal(reason, "gpt@12 is suspect: exit status 5");
    for (size_t count = 1; count <= 3; count++) {
        decision d =
            decide(&rules, &(decide_facts){.history = h, .count = count, .started_here = count, .chance = 1});
        assert_int_equal(d.restart, count < 3);
        assert_true(d.restart || (d.status == 93 && strstr(d.reason, "3 attempts")));
    }
    rules.stop_unhealthy = true;
    decision d = decide(&rules, &(decide_facts){.history = h, .count = 1, .started_here = 1});
    assert_true(d.status == 93 && strcmp(d.reason, "gave up: gpt@12 is suspect") == 0);
    h[0].unhealthy = false;
    assert_int_equal(decide(&rules, &(decide_facts){.history = h, .count = 1, .started_here = 1}).status, 0);

    assert_null(decide_anomaly(h, 0));
    assert_null(decide_anomaly(h, 1));
    assert_string_equal(decide_anomaly(h, 2), "gpt@12");
    h[2].unhealthy = false;
    assert_null(decide_anomaly(h, 3));
    h[2].first_save_ns = 0; /* there is nothing newer than what was left before */
    assert_string_equal(decide_anomaly(h, 3), "gpt@12");
}

/* An alarm without a suspect checkpoint: what was made before its step is what to go back to. */
static void test_alarm(void **state) {
    (void)state;
    decide_rules rules = {.pause_s = 4, .max_pause_s = 30, .max_restarts = 100, .max_futile = 3};
    attempt h[2];
    char reason[SUPERVISE_TEXT_MAX];
    for (int i = 0; i < 2; i++) {
        h[i] = widen(&(short_attempt)EXITED(0, 10, 10, 10));
        h[i].alarm_step = SUPERVISE_NO_STEP;
    }
    h[0].unhealthy = true;
    h[0].first_save_ns = SECOND;
    h[0].alarm_step = 12;
    h[0].alarm_acts = true;
    snprintf(h[0].alarm, sizeof(h[0].alarm), "rank 1, step 12: text");
    decide_reason(reason, &h[0]);
    assert_string_equal(reason, "rank 1, step 12: text: exit status 0");
    assert_true(
        decide(&rules, &(decide_facts){.history = h, .count = 1, .started_here = 1, .chance = 1}).restart);
    assert_ptr_equal(decide_alarm(h, 1), &h[0]);
    assert_null(decide_anomaly(h, 1));
    assert_ptr_equal(decide_alarm(h, 2), &h[0]); /* the second attempt made nothing */
    h[1].first_save_ns = SECOND;
    assert_null(decide_alarm(h, 2));
    h[0].first_step = 10; /* what was saved from the alarm on is no progress */
    h[0].last_step = 20;
    assert_true(attempt_progressed(&h[0]));
    h[0].first_step = 11;
    assert_false(attempt_progressed(&h[0]));
    h[0].first_step = h[0].last_step = 10;
    rules.stop_unhealthy = true;
    decision d = decide(&rules, &(decide_facts){.history = h, .count = 1, .started_here = 1});
    assert_true(d.status == 93 && strcmp(d.reason, "gave up: rank 1, step 12: text") == 0);
    snprintf(h[0].anomaly, sizeof(h[0].anomaly), "gpt@15"); /* both exclude checkpoints */
    assert_string_equal(decide_anomaly(h, 1), "gpt@15");
    assert_ptr_equal(decide_alarm(h, 1), &h[0]);
    h[0].alarm_acts = false; /* a save was slow */
    assert_null(decide_alarm(h, 1));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),     cmocka_unit_test(test_pauses), cmocka_unit_test(test_failures),
        cmocka_unit_test(test_unhealthy), cmocka_unit_test(test_alarm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
