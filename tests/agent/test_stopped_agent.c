/*
 * An agent that is stopped or slow, and trainers that end while they wait for it: nobody is held up, nothing is saved
 * twice.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/session/session.h"
#include "tests/support/agents.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

/* All threads are stopped when it returns. */
static void await_stop(pid_t process) {
    int status;
    assert_int_equal(waitpid(process, &status, WUNTRACED), process);
    assert_true(WIFSTOPPED(status));
}

/* kill() alone is not enough: a thread of the process may go on, and end a save, until another one takes the signal. */
static void stop_process(pid_t process) {
    kill(process, SIGSTOP);
    await_stop(process);
}

/*
 * From now on the session gives an agent up so soon. Before, it waits as usual: on a loaded machine an agent that is not
 * stopped may take long to answer.
 */
static void wait_no_longer_than(ckd_session *s, uint32_t wait_ms) {
    assert_true(s->agent.connected);
    s->agent.link.wait_ms = wait_ms;
}

/* Trainers that die while they wait for what another one has left do not wait for each other for ever. */
static void test_trainers_that_die_at_their_open(void **state) {
    (void)state;
    pid_t agent = start_agent(0), waiting[2];
    int steps, others[2];
    size_t count;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    uint64_t seen = await_step(steps, 3);
    make_file(slow_path);
    clock_sleep_ns(UINT64_C(100000000));
    end_process(process, SIGKILL);
    seen = last_step(steps, seen);
    for (size_t i = 0; i < 2; i++) {
        waiting[i] = start_trainer(&others[i], UINT64_MAX);
        do {
            clock_sleep_ns(UINT64_C(5000000));
            (void)session_shown(&count);
        } while (count < i + 2);
    }
    for (size_t i = 0; i < 2; i++) {
        end_process(waiting[i], SIGKILL);
        close(others[i]);
    }
    alarm(60); /* instead of waiting for ever */
    assert_int_equal(unlink(slow_path), 0);
    restore_and_check(*state, agent_socket, seen - 1);
    alarm(0);
    stop_agent(agent);
    assert_int_equal(times_said("no agent"), 0);
}

/* Waits until everything that the agent is told to do was done, and checks that steps 1 ... last were saved once. */
static void check_saved_once(const char *dir, pid_t agent, uint64_t last) {
    stop_agent(agent);
    assert_int_equal(count_of(dir, TRAINER_RUN), last);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 0);
    for (uint64_t step = 1; step <= last; step++) {
        stored_check(dir, TRAINER_RUN, step, ROWS);
    }
    assert_int_equal(times_said("lost"), 0);
    assert_int_equal(times_said("dropped"), 0);
}

/*
 * An agent that is stopped, between saves or in the middle of one, holds nobody up for long. When it goes on, it finds
 * that the session has saved by itself.
 */
static void test_a_stopped_agent(void **state) {
    for (uint64_t in_save = 0; in_save < 2; in_save++) {
        uint64_t last = 7 * in_save;
        pid_t agent = start_agent(0);
        ckd_session_options o = options_with(agent_socket);
        ckd_error err;
        trainer *t = trainer_new(ROWS);
        ckd_session *s = session_of(*state, &o, t);
        if (last) {
            must(ckd_session_restore(NULL, s, CKD_LATEST, &err), &err);
        }
        iterate_through(s, t, last + 1, last + 2);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        wait_no_longer_than(s, 1000);
        setenv("CKPTDELTA_AGENT_WAIT", "1", 1);
        if (in_save) {
            make_file(slow_path);
            iterate_through(s, t, last + 3, last + 3);
            clock_sleep_ns(UINT64_C(1500000000)); /* it works, so it is given its time */
            assert_int_equal(times_said("no sign of life"), 2);
        }
        stop_process(agent);
        iterate_through(s, t, last + 3 + in_save, last + 4);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        assert_int_equal(times_said("no sign of life for 1 s: this session saves by itself"), 1 + in_save);
        restore_and_check(*state, agent_socket, last + 4); /* another one, at its open */
        iterate_through(s, t, last + 5, last + 7);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
        unlink(slow_path);
        kill(agent, SIGCONT);
        unsetenv("CKPTDELTA_AGENT_WAIT");
        check_saved_once(*state, agent, last + 7);
    }
}

/* The agent goes on, and commits the state, while the session saves it by itself. */
static pid_t stopped;
static int agent_is_faster(void *context, file_op step, const char *path) {
    size_t count;
    if (step == FILE_OP_WRITE && stopped && strstr(path, "/data/c/")) {
        kill(stopped, SIGCONT);
        stopped = 0;
        while (session_shown(&count).durable_step != *(uint64_t *)context) {
            clock_sleep_ns(UINT64_C(5000000));
        }
    }
    return 0;
}

static void test_a_state_is_saved_once(void **state) {
    uint64_t step = 3;
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 2);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    wait_no_longer_than(s, 500);
    stop_process(agent);
    stopped = agent;
    file_set_fault_hook(agent_is_faster, &step);
    iterate_through(s, t, 3, 3);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(stopped, 0);
    iterate_through(s, t, 4, 5);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    check_saved_once(*state, agent, 5);
}

/* A launch whose saves may begin branches. */
static ckd_session *branching_session(trainer *t, double agent_wait_s) {
    static ckd_save_options save;
    ckd_session_options o = options_with(agent_socket);
    ckd_session *s;
    ckd_error err;
    save = *o.save;
    save.on_duplicate = CKD_DUPLICATE_BRANCH;
    o.save = &save;
    o.agent_wait_s = agent_wait_s;
    o.snapshot = CKD_SNAPSHOT_LAZY;
    return ckd_session_open(&s, store, &o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK ? s
                                                                                                     : NULL;
}

/* Waits until the state of this step is whole in memory that the agent has. */
static void await_in_memory(const ckd_session *s, uint64_t step) {
    for (bool there = false; !there;) {
        clock_sleep_ns(UINT64_C(5000000));
        for (uint32_t i = 0; i < s->agent.count && !there; i++) {
            slot_content content;
            there = slot_read(&content, &s->agent.slots[i], NULL) == CKD_OK &&
                    content.request.options.step == step;
            slot_content_free(&content);
        }
    }
}

/* Comes to the step that it leaves behind. Snapshots are lazy, so nobody saves that one before the fence. */
typedef bool comes_to(ckd_session *s, trainer *t, uint64_t step);

/* It stops itself where the agent is to be stopped. It waits so long for the agent that it never saves by itself. */
static void die_with_state(comes_to *come_to, uint64_t step) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nothing behind */
    alarm(60);                        /* instead of waiting for ever */
    trainer *t = trainer_new(ROWS);
    ckd_session *s = branching_session(t, 1000);
    if (!s || !come_to(s, t, step)) {
        _exit(1);
    }
    raise(SIGSTOP);
    ckd_session_fence(s);
    await_in_memory(s, step);
    _exit(0);
}

/* Stops the agent. A trainer has died then, and left a state that the agent has not saved. */
static void stop_with_state(pid_t agent, comes_to *come_to, uint64_t step) {
    pid_t process = fork();
    if (process == 0) {
        die_with_state(come_to, step);
    }
    await_stop(process);
    stop_process(agent);
    kill(process, SIGCONT);
    end_process(process, 0);
}

static bool go_on(ckd_session *s, trainer *t, uint64_t step) {
    ckd_error err;
    bool good = true;
    for (uint64_t i = 1; i < step && good; i++) {
        good = iterate_and_wait(s, t, i, &err) == CKD_OK;
    }
    return good && iterate(s, t, step, &err) == CKD_OK;
}

/* What the agent saves late does not become the newest state: a restart has gone further. */
static void test_a_late_state_is_not_the_newest(void **state) {
    ckd_error err;
    ckd_checkpoint from;
    pid_t agent = start_agent(0);
    stop_with_state(agent, go_on, 3);
    trainer *t = trainer_new(ROWS);
    ckd_session *s = branching_session(t, 1);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 2);
    iterate_through(s, t, 3, 6);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    kill(agent, SIGCONT);
    stop_agent(agent);
    assert_int_equal(count_of(*state, TRAINER_RUN), 6);
    assert_int_equal(count_of(*state, TRAINER_RUN "~2"), 1);
    restore_and_check(*state, "", 6);
}

static bool go_back(ckd_session *s, trainer *t, uint64_t step) {
    ckd_error err;
    return ckd_session_restore(NULL, s, step - 1, &err) == CKD_OK && iterate(s, t, step, &err) == CKD_OK;
}

/* The checkpoint from which a state comes is deleted before the agent saves the state, which needs it no more. */
static void test_a_parent_is_deleted(void **state) {
    ckd_error err;
    trainer_run(*state, ROWS, 1, 3);
    pid_t agent = start_agent(0);
    stop_with_state(agent, go_back, 2);
    ckd_checkpoint first = checkpoint_of(*state, TRAINER_RUN, 1);
    assert_int_equal(count_of(*state, TRAINER_RUN "~2"), 0);
    ckd_store *opened = store_reopen(*state, CKD_OPEN_WRITE);
    must(ckd_store_delete(opened, &first.id, 1, NULL, &err), &err);
    ckd_store_close(opened);
    kill(agent, SIGCONT);
    stop_agent(agent);
    assert_int_equal(times_said("lost"), 0);
    assert_int_equal(count_of(*state, TRAINER_RUN), 2);
    assert_int_equal(count_of(*state, TRAINER_RUN "~2"), 1);
    stored_check(*state, TRAINER_RUN "~2", 2, ROWS);
}

int main(void) {
    signal(SIGPIPE, SIG_DFL);
#define agent_test(test) cmocka_unit_test_setup_teardown(test, agent_set_up, tempdir_teardown)
    const struct CMUnitTest tests[] = {
        agent_test(test_trainers_that_die_at_their_open),
        agent_test(test_a_stopped_agent),
        agent_test(test_a_state_is_saved_once),
        agent_test(test_a_late_state_is_not_the_newest),
        agent_test(test_a_parent_is_deleted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
