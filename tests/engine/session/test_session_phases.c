/* Lazy snapshots wait for phases in which training is idle, if training has such phases. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <unistd.h>

#include "engine/session/session.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

/* Is the newest snapshot copied within this time, without a fence? */
static bool copied_within(ckd_session *s, unsigned ms) {
    bool copied = false;
    for (unsigned waited = 0; !copied && waited < ms; waited++) {
        usleep(1000);
        pthread_mutex_lock(&s->shared.mutex);
        uint32_t at = s->shared.used ? s->shared.first + s->shared.used - 1 : s->shared.first;
        copied = snapshot_is_complete(s->shared.slots[at % s->shared.slot_count].snapshot);
        pthread_mutex_unlock(&s->shared.mutex);
    }
    return copied;
}

static void idle_for_a_moment(ckd_session *s) {
    ckd_session_phase(s, CKD_PHASE_IDLE);
    ckd_session_phase(s, CKD_PHASE_BUSY);
}

static ckd_session *lazy_session(const char *dir, trainer *t, ckd_snapshot how) {
    ckd_session_options o = session_options();
    o.snapshot = how;
    ckd_session *s = session_of(dir, &o, t);
    ckd_session_phase(s, CKD_PHASE_BUSY);
    return s;
}

static void test_copies_wait_for_idle_time(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session *s = lazy_session(*state, t, CKD_SNAPSHOT_LAZY);
    ckd_error err = {0};
    must(iterate(s, t, 1, &err), &err);
    assert_true(copied_within(s, 20000)); /* no iteration had idle time so far */

    idle_for_a_moment(s);
    must(iterate(s, t, 2, &err), &err);
    assert_false(copied_within(s, 100));
    ckd_session_phase(s, CKD_PHASE_IDLE);
    assert_true(copied_within(s, 20000));

    ckd_session_phase(s, CKD_PHASE_BUSY);
    must(iterate(s, t, 3, &err), &err);
    assert_false(copied_within(s, 100));
    ckd_session_fence(s); /* copies everything */
    assert_true(copied_within(s, 1));
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 3; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
}

/* After a fence that had to copy, the next snapshot does not wait, and the one after it does again. */
static void test_too_little_idle_time(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session *s = lazy_session(*state, t, CKD_SNAPSHOT_LAZY);
    ckd_error err = {0};
    idle_for_a_moment(s);
    must(iterate(s, t, 1, &err), &err);
    assert_false(copied_within(s, 100));
    ckd_session_fence(s);
    idle_for_a_moment(s);
    must(iterate(s, t, 2, &err), &err);
    assert_true(copied_within(s, 20000));
    idle_for_a_moment(s);
    must(iterate(s, t, 3, &err), &err);
    assert_false(copied_within(s, 100));
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 3; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
}

/* Training stands still for these: nothing may keep the threads from copying. */
static void test_snapshots_that_are_not_lazy(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session *s = lazy_session(*state, t, CKD_SNAPSHOT_COPY);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= 2; step++) {
        idle_for_a_moment(s);
        must(iterate(s, t, step, &err), &err);
        assert_true(copied_within(s, 1));
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, 2, ROWS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copies_wait_for_idle_time),
        tempdir_test(test_too_little_idle_time),
        tempdir_test(test_snapshots_that_are_not_lazy),
    };
    return cmocka_run_group_tests_name("session phases", tests, NULL, NULL);
}
