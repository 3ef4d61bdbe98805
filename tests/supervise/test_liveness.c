/* When training hangs: stories of slots, told to the pure function that judges them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "supervise/internal.h"

#define RANKS   3
#define FLOOR_S 10
#define LOOK_S  0.5

/* A job, and the clock by which its steps are reported. */
typedef struct job {
    liveness live;
    ckd_progress_slot slots[RANKS];
    bool gone[RANKS];
    size_t count;
    uint64_t now_ns;
    char reason[SUPERVISE_TEXT_MAX];
} job;

static job *new_job(size_t ranks) {
    static job j;
    memset(&j, 0, sizeof(j));
    j.live.floor_s = FLOOR_S;
    j.count = ranks;
    j.now_ns = SECOND;
    for (size_t i = 0; i < ranks; i++) {
        j.slots[i] = (ckd_progress_slot){.pid = 100 + i, .rank = i, .phase_ns = j.now_ns};
    }
    return &j;
}

static void enter(job *j, size_t rank, uint64_t phase) {
    j->slots[rank].phase = phase;
    j->slots[rank].phase_ns = j->now_ns;
}

/* Time passes without a step. Returns whether the job hangs by then, or did so before. */
static bool wait_s(job *j, double seconds) {
    for (double waited = 0; waited < seconds; waited += LOOK_S) {
        j->now_ns += (uint64_t)(LOOK_S * 1e9);
        if (liveness_look(&j->live, j->slots, j->gone, j->count, LOOK_S)) {
            liveness_reason(j->reason, &j->live, j->slots, j->gone, j->count);
            return true;
        }
    }
    return false;
}

static void step(job *j, size_t rank, double took_s) {
    ckd_progress_slot *slot = &j->slots[rank];
    if (slot->steps > 0) {
        slot->took_ms[slot->timed++ % CKD_PROGRESS_WINDOW] = (uint32_t)(took_s * 1e3);
    }
    slot->steps++;
    slot->step++;
    slot->step_ns = j->now_ns;
    slot->phase = CKD_PROGRESS_TRAINING;
}

/* All ranks make steps that take so long. */
static bool train(job *j, size_t steps, double took_s) {
    for (size_t i = 0; i < steps; i++) {
        if (wait_s(j, took_s)) {
            return true;
        }
        for (size_t rank = 0; rank < j->count; rank++) {
            step(j, rank, took_s);
        }
    }
    return false;
}

static void test_a_hang_is_noticed(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(train(j, 100, 0.5));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == FLOOR_S);
    assert_false(wait_s(j, FLOOR_S));
    assert_true(wait_s(j, 2 * LOOK_S)); /* the first look has seen the step */
    assert_string_equal(j->reason,
                        "rank 0 (process 100) has made no step after step 100 for 10 s, 10 s are allowed");
}

/* Long steps: the floor says nothing about them. */
static void test_the_limit_is_learned(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(train(j, 20, 20));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == 200);
    assert_false(wait_s(j, 200));
    assert_true(wait_s(j, 1));
    /* Steps of many lengths: a sequence may be long. */
    j = new_job(1);
    for (int i = 0; i < 70; i++) {
        assert_false(train(j, 1, 1 + i * 7 % 11));
    }
    double limit = liveness_limit(&j->live, &j->slots[0]);
    assert_true(limit > 60 && limit < 150);
    /* The newest steps count: they have become slower. */
    assert_false(train(j, 200, 50));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == 500);
}

static void test_the_first_steps_are_left_out(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(wait_s(j, 10000)); /* reads data */
    assert_false(train(j, 3, 900));
    assert_false(train(j, 8, 0.5));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == INFINITY); /* not enough of them */
    assert_false(train(j, 1, 0.5));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == FLOOR_S);
    assert_true(wait_s(j, 11));
}

/* Steps that are reported when they are saved, every other hour. */
static void test_rare_steps(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(train(j, 20, 7200));
    assert_true(liveness_limit(&j->live, &j->slots[0]) == 72000);
}

/* A start is compared with those of earlier attempts. Without any there is nothing to say. */
static void test_a_start_that_takes_too_long(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(wait_s(j, 100000));
    attempt h[3] = {{.resume_ns = 0}, {.resume_ns = 50 * SECOND}, {.resume_ns = SECOND}};
    assert_int_equal(decide_longest_start(h, 3), 50 * SECOND);
    assert_int_equal(decide_longest_start(h, 1), 0);
    j = new_job(1);
    j->live.start_s = 1;
    assert_false(wait_s(j, 119));
    assert_true(wait_s(j, 2));
    assert_string_equal(j->reason, "rank 0 (process 100) has made no step yet for 120 s, 120 s are allowed");
    j = new_job(1);
    j->live.start_s = 50;
    assert_false(wait_s(j, 499));
    assert_true(wait_s(j, 2));
}

/* Of the first one it is known only that it is no step. */
static void test_the_first_evaluation_and_save(void **state) {
    (void)state;
    static const double limits[] = {
        [CKD_PROGRESS_EVALUATION] = 72 * FLOOR_S, [CKD_PROGRESS_SAVING] = 12 * FLOOR_S};
    for (uint64_t phase = CKD_PROGRESS_EVALUATION; phase <= CKD_PROGRESS_SAVING; phase++) {
        job *j = new_job(1);
        enter(j, 0, phase);
        assert_false(wait_s(j, limits[phase]));
        assert_true(wait_s(j, 2));
    }
}

static void test_evaluation_and_saving_are_known(void **state) {
    (void)state;
    for (uint64_t phase = CKD_PROGRESS_EVALUATION; phase <= CKD_PROGRESS_SAVING; phase++) {
        job *j = new_job(1);
        assert_false(train(j, 100, 0.5));
        for (int i = 0; i < 3; i++) {
            enter(j, 0, phase);
            assert_false(wait_s(j, 110)); /* 220 steps */
            enter(j, 0, CKD_PROGRESS_TRAINING);
            assert_false(train(j, 100, 0.5));
        }
        assert_true(liveness_limit(&j->live, &j->slots[0]) == FLOOR_S);
        /* It has taken 110 s, and may take ten times as long. */
        enter(j, 0, phase);
        assert_false(wait_s(j, 1090));
        assert_true(wait_s(j, 20));
        assert_non_null(
            strstr(j->reason, phase == CKD_PROGRESS_SAVING ? "waits for a save for" : "evaluates for"));
    }
}

/* An evaluation that nobody has marked, shorter than the limit. The next one may take a little longer. */
static void test_a_pause_that_ended_was_no_hang(void **state) {
    (void)state;
    job *j = new_job(1);
    assert_false(train(j, 100, 0.5));
    assert_false(train(j, 1, 9));
    assert_false(train(j, 100, 0.5));
    assert_false(wait_s(j, 25));
    assert_true(wait_s(j, 5));
}

static void test_the_slowest_rank_counts(void **state) {
    (void)state;
    job *j = new_job(3);
    assert_false(train(j, 100, 0.5));
    bool hung = false;
    for (int i = 0; i < 40 && !hung; i++) { /* rank 1 stands still */
        step(j, 0, 0.5);
        step(j, 2, 0.5);
        hung = wait_s(j, 0.5);
    }
    assert_true(hung);
    assert_string_equal(j->reason,
                        "rank 1 (process 101) has made no step after step 100 for 10 s, 10 s are allowed; "
                        "others are at step 122");
    /* All wait for each other: nobody is named. */
    j = new_job(3);
    assert_false(train(j, 100, 0.5));
    assert_true(wait_s(j, 11));
    assert_string_equal(j->reason,
                        "each of 3 processes has made no step after step 100 for 10 s, 10 s are allowed");
}

/* Rank 0 evaluates alone, longer than a step may take, and the others wait for it. */
static void test_ranks_wait_for_one_that_evaluates(void **state) {
    (void)state;
    job *j = new_job(3);
    assert_false(train(j, 100, 0.5));
    enter(j, 0, CKD_PROGRESS_EVALUATION);
    assert_false(wait_s(j, 100));
    enter(j, 0, CKD_PROGRESS_TRAINING);
    assert_false(wait_s(j, 5));
    assert_false(train(j, 100, 0.5));
    enter(j, 0, CKD_PROGRESS_EVALUATION);
    assert_true(wait_s(j, 1100));
    assert_non_null(strstr(j->reason, "rank 0 (process 100) evaluates for"));
}

/* Rank 1 stands still, and the others wait for its part of a save. It is not timed meanwhile, but named. */
static void test_the_rank_that_does_not_wait_for_a_save_is_named(void **state) {
    (void)state;
    for (int behind = 0; behind < 2; behind++) {
        job *j = new_job(3);
        assert_false(train(j, 100, 0.5));
        for (size_t rank = 0; rank < 3; rank += 2) {
            if (behind) {
                step(j, rank, 0.5);
            }
            enter(j, rank, CKD_PROGRESS_SAVING);
        }
        assert_true(wait_s(j, 130));
        assert_string_equal(j->reason, "2 of 3 processes wait for a save for 120 s, 120 s are allowed; "
                                       "rank 1 (process 101) does not, and is at step 100");
    }
    /* If all wait, none is to blame alone. */
    job *all = new_job(3);
    assert_false(train(all, 100, 0.5));
    for (size_t rank = 0; rank < 3; rank++) {
        enter(all, rank, CKD_PROGRESS_SAVING);
    }
    assert_true(wait_s(all, 130));
    assert_string_equal(all->reason, "each of 3 processes waits for a save for 120 s, 120 s are allowed");
    /* With two that do not wait, either may be the one. */
    job *j = new_job(3);
    assert_false(train(j, 100, 0.5));
    enter(j, 2, CKD_PROGRESS_SAVING);
    assert_true(wait_s(j, 130));
    assert_string_equal(j->reason, "rank 2 (process 102) waits for a save for 120 s, 120 s are allowed");
}

static void test_a_rank_that_never_steps_is_named(void **state) {
    (void)state;
    job *j = new_job(2);
    j->slots[1].rank = CKD_PROGRESS_NO_RANK;
    bool hung = false;
    for (int i = 0; i < 1000 && !hung; i++) {
        step(j, 0, 0.5);
        hung = wait_s(j, 0.5);
    }
    assert_true(hung);
    assert_non_null(strstr(
        j->reason, "process 101 has made no step yet for 120 s, 120 s are allowed; others are at step 2"));
}

static void test_what_has_ended_is_not_watched(void **state) {
    (void)state;
    job *j = new_job(2);
    assert_false(train(j, 100, 0.5));
    j->gone[0] = true;
    enter(j, 1, CKD_PROGRESS_ENDED);
    assert_false(wait_s(j, 10000));
    /* The process goes on after all. */
    enter(j, 1, CKD_PROGRESS_START);
    assert_false(train(j, 1, 100));
    assert_true(wait_s(j, 20));
    /* Nobody makes steps. */
    j = new_job(0);
    assert_false(wait_s(j, 10000));
}

/* The slots are written by programs. */
static void test_nonsense(void **state) {
    (void)state;
    job *j = new_job(RANKS);
    memset(j->slots, 0xff, sizeof(j->slots));
    assert_false(wait_s(j, 60));
    liveness_reason(j->reason, &j->live, j->slots, j->gone, j->count);
    memset(j->slots, 0x7f, sizeof(j->slots));
    assert_false(wait_s(j, 60));
    liveness_reason(j->reason, &j->live, j->slots, j->gone, j->count);
}

static void test_limits_are_doubled_after_hangs(void **state) {
    (void)state;
    attempt h[5] = {{.hung = true}, {.hung = false}, {.hung = true}, {.hung = true}, {.hung = true}};
    static const uint64_t doublings[] = {0, 1, 0, 1, 2, 2};
    for (size_t count = 0; count <= 5; count++) {
        assert_int_equal(decide_doublings(h, count), doublings[count]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_hang_is_noticed),
        cmocka_unit_test(test_the_limit_is_learned),
        cmocka_unit_test(test_the_first_steps_are_left_out),
        cmocka_unit_test(test_rare_steps),
        cmocka_unit_test(test_a_start_that_takes_too_long),
        cmocka_unit_test(test_the_first_evaluation_and_save),
        cmocka_unit_test(test_evaluation_and_saving_are_known),
        cmocka_unit_test(test_a_pause_that_ended_was_no_hang),
        cmocka_unit_test(test_the_slowest_rank_counts),
        cmocka_unit_test(test_ranks_wait_for_one_that_evaluates),
        cmocka_unit_test(test_the_rank_that_does_not_wait_for_a_save_is_named),
        cmocka_unit_test(test_a_rank_that_never_steps_is_named),
        cmocka_unit_test(test_what_has_ended_is_not_watched),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_limits_are_doubled_after_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
