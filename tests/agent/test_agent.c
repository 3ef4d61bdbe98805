/* An agent and its trainers, as processes that are killed: the newest complete state survives and comes back. */
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
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

/* ---- tests ---- */

static void test_a_session_with_an_agent(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_agent_state *about;
    ckd_session_state figures;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 5);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_poll(&figures, s);
    assert_true(figures.saved == 5 && figures.durable_step == 5 && figures.failed == 0);
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    assert_int_equal(about->process, agent);
    assert_int_equal(about->count, 1);
    assert_true(about->sessions[0].connected && about->sessions[0].process == getpid());
    assert_true(about->sessions[0].newest_step == 5 && about->sessions[0].durable_step == 5);
    assert_true(about->sessions[0].saved == 5 && about->memory_bytes > 0);
    ckd_agent_state_free(about);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 5; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
    stop_agent(agent);
    assert_int_equal(times_said(""), 0);
}

/* The agent sees when training is busy, unless it waits for a save. */
static void test_the_phase_of_training(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    ckd_session_phase(s, CKD_PHASE_BUSY); /* before it has memory of the agent */
    iterate_through(s, t, 1, 2);
    assert_true(slot_is_busy(&s->agent.slots[0]));
    ckd_session_phase(s, CKD_PHASE_IDLE);
    assert_false(slot_is_busy(&s->agent.slots[0]));
    ckd_session_phase(s, CKD_PHASE_BUSY);
    assert_true(slot_is_busy(&s->agent.slots[0]));
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    assert_true(slot_is_busy(&s->agent.slots[0]));
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stop_agent(agent);
}

/* A kill at any moment: every state that was handed over whole is durable afterwards, and the newest comes back. */
static void test_killed_trainers(void **state) {
    pid_t agent = start_agent(0);
    uint64_t reached = 0;
    for (unsigned i = 0; i < 12; i++) {
        int steps;
        pid_t process = start_trainer(&steps, UINT64_MAX);
        uint64_t seen = await_step(steps, reached + 2 + i % 3);
        clock_sleep_ns(i * UINT64_C(700000));
        end_process(process, SIGKILL);
        seen = last_step(steps, seen);
        ckd_error err;
        must(ckd_agent_drain(store, agent_socket, 0, &err), &err);
        ckd_checkpoint newest;
        ckd_store *opened = store_reopen(*state, CKD_OPEN_READ);
        must(ckd_store_find(&newest, opened, TRAINER_RUN, CKD_LATEST, &err), &err);
        ckd_store_close(opened);
        /* the newest state that ckd_session_step returned from may not have its hashes yet */
        assert_true(newest.step + 1 >= seen && newest.step <= seen + 1);
        stored_check(*state, TRAINER_RUN, newest.step, ROWS);
        reached = newest.step;
    }
    int steps;
    end_process(start_trainer(&steps, reached + 3), 0);
    assert_int_equal(last_step(steps, 0), reached + 3);
    stop_agent(agent);
    restore_and_check(*state, "", reached + 3);
    assert_int_equal(times_said("lost"), 0);
    assert_int_equal(times_said("saves by itself"), 0);
}

/* A checkpoint whose chunk files are gone can only come from memory. */
static void hide_chunks(const char *from, const char *to) {
    char path[700], other[700];
    ckd_error err;
    snprintf(path, sizeof(path), "%s/data/%s", store, from);
    snprintf(other, sizeof(other), "%s/data/%s", store, to);
    must(file_rename(path, other, &err), &err);
}

static void test_a_restart_takes_values_from_memory(void **state) {
    (void)state;
    pid_t agent = start_agent(0);
    int steps;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    (void)await_step(steps, 4);
    end_process(process, SIGKILL);
    close(steps);
    ckd_session_options o = options_with(agent_socket);
    ckd_checkpoint from;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s;
    must(ckd_session_open(&s, store, &o, &err), &err); /* waits until the agent has saved what is left */
    must(session_register(s, t, &err), &err);
    trainer_spoil(t);
    hide_chunks("c", "hidden");
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    hide_chunks("hidden", "c");
    assert_true(from.step >= 3);
    trainer_check(t, from.step);
    /* it takes the memory over, and goes on */
    uint64_t next = from.step + 1;
    ckd_agent_state *about;
    iterate_through(s, t, next, next + 3);
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    assert_true(about->count == 1 && about->memory_bytes == about->sessions[0].memory_bytes);
    ckd_agent_state_free(about);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, next + 3, ROWS);
    stop_agent(agent);
}

/*
 * A launch that goes on from the newest step, finds its metric wrong some steps after it, and is killed. It makes no
 * save, so that the values it began with stay in memory. Returns their step.
 */
static uint64_t go_wrong(uint64_t after) {
    int pipes[2];
    ckd_checkpoint from = {.step = 0};
    assert_int_equal(pipe(pipes), 0);
    pid_t process = fork();
    if (process == 0) {
        ckd_session_options o = options_with(agent_socket);
        ckd_session *s;
        trainer *t = trainer_new(ROWS);
        o.every_steps = 1000;
        bool good = ckd_session_open(&s, store, &o, NULL) == CKD_OK &&
                    session_register(s, t, NULL) == CKD_OK &&
                    ckd_session_restore(&from, s, CKD_LATEST, NULL) == CKD_OK;
        for (uint64_t step = 1; good && step <= after; step++) {
            good = ckd_session_step(s, from.step + step, NULL) == CKD_OK;
        }
        if (good) {
            ckd_session_alarm(s, CKD_ALARM_METRIC, from.step + after, NULL);
            (void)!write(pipes[1], &from.step, sizeof(from.step));
            pause();
        }
        _exit(1);
    }
    close(pipes[1]);
    assert_int_equal(read(pipes[0], &from.step, sizeof(from.step)), sizeof(from.step));
    end_process(process, SIGKILL);
    close(pipes[0]);
    return from.step;
}

/* A restart that finds the values of this step nowhere but in memory. */
static ckd_status restore_from_memory(uint64_t step, ckd_error *err) {
    ckd_session_options o = options_with(agent_socket);
    ckd_session *s;
    trainer *t = trainer_new(ROWS);
    must(ckd_session_open(&s, store, &o, err), err);
    must(session_register(s, t, err), err);
    trainer_spoil(t);
    hide_chunks("c", "hidden");
    ckd_status status = ckd_session_restore(NULL, s, step, err);
    hide_chunks("hidden", "c");
    if (status == CKD_OK) {
        trainer_check(t, step);
    } else {
        ckd_error why;
        must(ckd_session_restore(NULL, s, step, &why), &why); /* from the store */
        trainer_check(t, step);
    }
    must(ckd_session_close(s, &(ckd_error){0}), err);
    trainer_free(t);
    return status;
}

/* The session itself remembers it, too: it has no memory of the agent's before its first step. */
static void test_training_goes_wrong_before_the_first_step(void **state) {
    (void)state;
    pid_t agent = start_agent(0);
    int steps;
    ckd_session_options o = options_with(agent_socket);
    ckd_checkpoint from;
    ckd_error err;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    (void)await_step(steps, 20);
    end_process(process, SIGKILL);
    close(steps);
    ckd_session *s;
    trainer *t = trainer_new(ROWS);
    must(ckd_session_open(&s, store, &o, &err), &err);
    must(session_register(s, t, &err), &err);
    hide_chunks("c", "hidden");
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    trainer_check(t, from.step);
    ckd_session_alarm(s, CKD_ALARM_TIME, from.step + 1, NULL); /* says nothing of the values */
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    ckd_session_alarm(s, CKD_ALARM_METRIC, from.step + 40,
                      NULL); /* saves may be behind, and an earlier alarm follow */
    ckd_session_alarm(s, CKD_ALARM_METRIC, from.step + 1, NULL);
    assert_int_equal(times_said("training went wrong at step"), 1);
    assert_int_not_equal(ckd_session_restore(NULL, s, from.step, &err), CKD_OK);
    hide_chunks("hidden", "c");
    must(ckd_session_restore(NULL, s, from.step, &err), &err);
    trainer_check(t, from.step);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stop_agent(agent);
}

/* Values that may have been damaged before they were hashed are not taken from memory once more. */
static void test_training_goes_wrong_after_a_restart(void **state) {
    (void)state;
    static const struct {
        uint64_t after;
        bool trusted;
    } cases[] = {{1, false}, {32, false}, {33, true}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        pid_t agent = start_agent(0);
        int steps;
        ckd_error err;
        pid_t process = start_trainer(&steps, UINT64_MAX);
        (void)await_step(steps, 50 * (i + 1));
        end_process(process, SIGKILL);
        close(steps);
        ckd_status status = restore_from_memory(go_wrong(cases[i].after), &err);
        assert_int_equal(status == CKD_OK, cases[i].trusted);
        assert_int_equal(times_said("training went wrong at step"), i < 2 ? i + 1 : 2);
        assert_int_equal(times_said("are not used, so the checkpoint is loaded"), i < 2 ? 2 * (i + 1) : 4);
        stop_agent(agent);
    }
}

static void test_the_agent_is_killed(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 3);
    end_process(agent, SIGKILL);
    iterate_through(s, t, 4, 9);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 9; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
    assert_int_equal(times_said("the agent has gone"), 1);
    /* another one takes the place of the socket that nobody serves; nothing was lost */
    agent = start_agent(0);
    restore_and_check(*state, agent_socket, 9);
    stop_agent(agent);
    assert_int_equal(times_said("lost"), 0);
}

/* Both are killed, as when a node fails: only what was in memory alone is lost, and the next agent says it. */
static void test_an_agent_that_restarts_says_what_was_lost(void **state) {
    (void)state;
    char path[700];
    ckd_error err;
    bytes text = {.size = 0};
    pid_t agent = start_agent(0);
    trainer_run(*state, ROWS, 1, 2);
    end_process(agent, SIGKILL);
    snprintf(path, sizeof(path), "%s.held", agent_socket);
    bytes_put(&text, "2 run\n3 run\n7 other\n", 20);
    file_writer *f;
    must(file_create(&f, path, 0, &err), &err);
    must(file_append(f, text.data, text.size, &err), &err);
    must(file_close(f, &err), &err);
    bytes_free(&text);
    agent = start_agent(0);
    assert_int_equal(times_said("lost step 3 of run 'run'"), 1);
    assert_int_equal(times_said("lost step 7 of run 'other'"), 1);
    assert_int_equal(times_said("lost"), 2);
    stop_agent(agent);
    assert_false(file_exists(path));
}

static void test_no_agent_and_too_little_memory(void **state) {
    ckd_error err;
    ckd_agent_state *about;
    trainer_run(*state, ROWS, 1, 1);
    assert_int_equal(ckd_agent_ask(&about, store, agent_socket, &err), CKD_E_NOT_FOUND);
    restore_and_check(*state, agent_socket, 1);
    assert_int_equal(times_said("no agent takes this session"), 1);
    pid_t agent = start_agent(1000);
    ckd_session_options o = options_with(agent_socket);
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    must(ckd_session_restore(NULL, s, CKD_LATEST, &err), &err);
    iterate_through(s, t, 2, 4);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, 4, ROWS);
    assert_int_equal(times_said("--budget"), 1);
    /* a second agent */
    ckd_agent_options two = CKD_AGENT_OPTIONS_INIT;
    two.socket = agent_socket;
    assert_int_equal(ckd_agent_run(store, &two, &err), CKD_E_BUSY);
    stop_agent(agent);
}

/* The options that change how slots are used: lazy copies, two saves under way, losses. */
static void test_kinds_of_sessions(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_save_options save = *o.save;
    ckd_error err;
    ckd_session_state figures;
    save.fidelity = CKD_COARSE;
    o.save = &save;
    o.snapshot = CKD_SNAPSHOT_LAZY;
    o.saves_under_way = 2;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 6);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_poll(&figures, s);
    assert_true(figures.saved == 6 && figures.failed == 0);
    /* values in memory are those that were saved */
    ckd_checkpoint from;
    trainer_spoil(t);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 6);
    assert_int_equal(from.fidelity, CKD_COARSE);
    trainer_check(t, 6);
    iterate_through(s, t, 7, 8);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(*state, TRAINER_RUN), 8);
    ckd_agent_state *about;
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    assert_true(about->count == 0 && about->memory_bytes == 0);
    ckd_agent_state_free(about);
    stop_agent(agent);
    assert_int_equal(times_said(""), 0);
}

/* The restart has other tensors: the old memory is no use to it, and does not stay beside the new one. */
static void test_a_restart_with_another_layout(void **state) {
    pid_t agent = start_agent(0);
    int steps;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    (void)await_step(steps, 3);
    end_process(process, SIGKILL);
    close(steps);
    ckd_session_options o = options_with(agent_socket);
    ckd_checkpoint from;
    ckd_error err;
    ckd_agent_state *about;
    trainer *t = trainer_new(2 * ROWS);
    ckd_session *s = session_of(*state, &o, t);
    assert_int_equal(ckd_session_restore(&from, s, CKD_LATEST, &err), CKD_E_MISMATCH);
    uint64_t reached = checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step;
    ckd_session_close(s, NULL);
    ckd_save_options save = *o.save;
    save.run = "wider";
    o.save = &save;
    s = session_of(*state, &o, t);
    iterate_through(s, t, reached + 1, reached + 2);
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    assert_int_equal(about->count, 2);
    assert_int_equal(about->memory_bytes, about->sessions[0].memory_bytes + about->sessions[1].memory_bytes);
    ckd_agent_state_free(about);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stop_agent(agent);
}

/* A connection that breaks while the trainer lives: nobody gets the memory that it still writes to. */
static void test_memory_of_a_live_trainer_is_not_taken_over(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS), *u = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 2);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    shutdown(s->agent.link.fd, SHUT_RDWR);
    ckd_session *v = session_of(*state, &o, u);
    must(ckd_session_restore(NULL, v, CKD_LATEST, &err), &err);
    trainer_check(u, 2);
    iterate_through(v, u, 3, 3);
    must(ckd_session_wait(v, CKD_DURABLE, &err), &err);
    assert_int_equal(v->agent.count, 2);
    /* the memory of the two is not the same */
    uint8_t before = slot_data(&v->agent.slots[0])[0];
    for (unsigned i = 0; i < 2; i++) {
        memset(slot_data(&s->agent.slots[i]), before ^ 0xff, 1);
    }
    assert_int_equal(slot_data(&v->agent.slots[0])[0], before);
    /* the first one notices, and finds that another launch goes on */
    assert_int_equal(iterate_and_wait(s, t, 3, &err), CKD_E_EXISTS);
    (void)ckd_session_close(s, NULL);
    must(ckd_session_close(v, &err), &err);
    trainer_free(t);
    trainer_free(u);
    stop_agent(agent);
}

static void test_what_is_left_waits_for_space(void **state) {
    pid_t agent = start_agent(0);
    int steps;
    ckd_error err;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    uint64_t seen = await_step(steps, 3);
    fclose(fopen(full_path, "w"));
    seen = last_step(steps, seen); /* its next save fails, and it ends with an error */
    int how;
    assert_int_equal(waitpid(process, &how, 0), process);
    assert_true(WIFEXITED(how));
    for (unsigned i = 0; i < 3000 && times_said("the agent tries again") == 0; i++) {
        clock_sleep_ns(UINT64_C(10000000));
    }
    assert_int_equal(ckd_agent_drain(store, agent_socket, 1, &err), CKD_E_BUSY);
    restore_and_check(*state, agent_socket, 1); /* it works without the agent meanwhile */
    assert_int_equal(times_said("no agent takes this session"), 1);
    uint64_t before = checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step;
    assert_int_equal(unlink(full_path), 0);
    for (unsigned i = 0; i < 3000 && ckd_agent_drain(store, agent_socket, 0, &err) != CKD_OK; i++) {
        clock_sleep_ns(UINT64_C(10000000));
    }
    assert_true(checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step > before);
    stop_agent(agent);
    restore_and_check(*state, "", before + 1);
}

/* A file system that is not mounted comes back. */
static void test_what_is_left_waits_for_the_store(void **state) {
    char away[sizeof(store) + 8];
    pid_t agent = start_agent(0);
    int steps, how;
    ckd_error err;
    pid_t process = start_trainer(&steps, UINT64_MAX);
    uint64_t seen = await_step(steps, 3);
    snprintf(away, sizeof(away), "%s.away", store);
    assert_int_equal(rename(store, away), 0);
    seen = last_step(steps, seen);
    assert_int_equal(waitpid(process, &how, 0), process);
    for (unsigned i = 0; i < 3000 && times_said("the agent tries again") == 0; i++) {
        clock_sleep_ns(UINT64_C(10000000));
    }
    assert_int_equal(rename(away, store), 0);
    uint64_t before = checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step;
    for (unsigned i = 0; i < 3000 && ckd_agent_drain(store, agent_socket, 0, &err) != CKD_OK; i++) {
        clock_sleep_ns(UINT64_C(10000000));
    }
    assert_int_equal(times_said("is lost"), 0);
    assert_true(checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step > before);
    stop_agent(agent);
    restore_and_check(*state, "", before + 1);
}

/*
 * A save that failed was reported, and a later one succeeded: the failed one is not tried again after the session's
 * end.
 */
static void test_a_failed_save_is_not_tried_again_later(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 1);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    make_file(full_path);
    assert_int_equal(iterate_and_wait(s, t, 2, &err), CKD_E_NOSPACE);
    assert_int_equal(unlink(full_path), 0);
    iterate_through(s, t, 3, 3);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    shutdown(s->agent.link.fd, SHUT_RDWR);
    stop_agent(agent);
    assert_int_equal(times_said("lost"), 0);
    assert_int_equal(count_of(*state, TRAINER_RUN), 2);
    (void)ckd_session_close(s, NULL);
    trainer_free(t);
}

/* Puts a catalog of a later version in the place of the store's, as its rebuild does. */
static void replace_catalog(void) {
    static const char table[] = "CHECK (reasons BETWEEN 1 AND";
    char path[640], other[640];
    size_t size;
    snprintf(path, sizeof(path), "%s/catalog.db", store);
    snprintf(other, sizeof(other), "%s/other.db", store);
    unsigned char *data = read_whole_file(path, &size);
    unsigned char *found = memmem(data, size, table, strlen(table));
    assert_non_null(found);
    found[23] = '2'; /* its tables are not ours */
    data[63] = 200;  /* its version */
    write_whole_file(other, data, size);
    free(data);
    assert_int_equal(rename(other, path), 0);
}

/* The agent cannot save any more, but it keeps what it has. */
static void test_a_later_version_rebuilds_the_catalog(void **state) {
    pid_t agent = start_agent(0);
    ckd_session_options o = options_with(agent_socket);
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    iterate_through(s, t, 1, 1);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    replace_catalog();
    assert_int_equal(iterate_and_wait(s, t, 2, &err), CKD_E_UNSUPPORTED);
    assert_int_equal(iterate_and_wait(s, t, 3, &err), CKD_E_UNSUPPORTED);
    assert_int_equal(times_said("the agent has gone"), 0);
    (void)ckd_session_close(s, NULL);
    stop_agent(agent);
    trainer_free(t);
}

/* The agent cannot save a state whose origin has another name by now, or is gone. The session then does. */
static void test_the_origin_is_gone(void **state) {
    for (int renamed = 0; renamed < 2; renamed++) {
        ckd_error err;
        ckd_checkpoint from;
        trainer_run(*state, ROWS, renamed ? 6 : 1, renamed ? 8 : 3);
        pid_t agent = start_agent(0);
        ckd_session_options o = options_with(agent_socket);
        trainer *t = trainer_new(ROWS);
        ckd_session *s = session_of(*state, &o, t);
        must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
        ckd_store *opened = store_reopen(*state, CKD_OPEN_WRITE);
        must(renamed ? ckd_store_rename_run(NULL, opened, TRAINER_RUN, "old", NULL, &err)
                     : ckd_store_delete(opened, &from.id, 1, NULL, &err),
             &err);
        ckd_store_close(opened);
        iterate_through(s, t, from.step + 1, from.step + 2);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
        stop_agent(agent);
        for (uint64_t step = from.step + 1; step <= from.step + 2; step++) {
            stored_check(*state, TRAINER_RUN, step, ROWS);
        }
        ckd_checkpoint first = checkpoint_of(*state, TRAINER_RUN, from.step + 1);
        assert_int_equal(memcmp(&first.resumed_from, &from.id, sizeof(from.id)) == 0, renamed);
        assert_int_equal(times_said("is saved without it"), 1);
        assert_int_equal(times_said("is now called old@8"), renamed);
        assert_int_equal(times_said("lost"), 0);
    }
}

/* Somebody has removed the lock file, so that another agent has taken the name. */
static void test_the_socket_of_another_agent_stays(void **state) {
    char lock[sizeof(agent_socket) + 8], first[sizeof(agent_socket) + 8];
    (void)state;
    pid_t agent = start_agent(0);
    snprintf(lock, sizeof(lock), "%s.lock", agent_socket);
    snprintf(first, sizeof(first), "%s.first", agent_socket);
    assert_int_equal(unlink(lock), 0);
    assert_int_equal(rename(agent_socket, first), 0); /* it still leads to the first one */
    pid_t other = start_agent(0);
    ckd_error err;
    must(ckd_agent_drain(store, first, 1, &err), &err);
    end_process(agent, 0);
    stop_agent(other);
    assert_false(file_exists(agent_socket));
}

/* A launch that ends without closing its session, as if it was killed. */
typedef bool (*launch_fn)(ckd_session *s, trainer *t);
static void launch(launch_fn call) {
    pid_t process = fork();
    if (process == 0) {
        ckd_session_options o = options_with(agent_socket);
        ckd_save_options save = *o.save;
        ckd_session *s;
        ckd_error err;
        save.on_duplicate = CKD_DUPLICATE_BRANCH;
        o.save = &save;
        o.saves_under_way = 2;
        o.snapshot = CKD_SNAPSHOT_LAZY;
        trainer *t = trainer_new(ROWS);
        bool opened =
            ckd_session_open(&s, store, &o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK;
        _exit(opened && call(s, t) ? 0 : 1);
    }
    end_process(process, 0);
}

static bool fail_twice(ckd_session *s, trainer *t) {
    ckd_error err;
    bool good = iterate_and_wait(s, t, 1, &err) == CKD_OK;
    fclose(fopen(full_path, "w"));
    good = good && iterate_and_wait(s, t, 2, &err) == CKD_E_NOSPACE &&
           iterate_and_wait(s, t, 3, &err) == CKD_E_NOSPACE;
    return unlink(full_path) == 0 && good && iterate_and_wait(s, t, 4, &err) == CKD_OK;
}

/* Takes the memory over, and ends while its first state is copied. */
static bool take_memory(ckd_session *s, trainer *t) {
    ckd_error err;
    return ckd_session_restore(NULL, s, CKD_LATEST, &err) == CKD_OK && iterate(s, t, 5, &err) == CKD_OK;
}

/* Nor is it tried again when a restart has taken over its slot. */
static void test_a_failed_save_is_not_tried_again_by_a_restart(void **state) {
    pid_t agent = start_agent(0);
    launch(fail_twice);
    launch(take_memory);
    stop_agent(agent);
    restore_and_check(*state, "", 4);
    assert_int_equal(count_of(*state, TRAINER_RUN), 2);
    assert_int_equal(count_of(*state, TRAINER_RUN "~2"), 0);
    restore_and_check(*state, "", 4);
    assert_int_equal(times_said("lost"), 0);
}

int main(void) {
    signal(SIGPIPE, SIG_DFL);
#define agent_test(test) cmocka_unit_test_setup_teardown(test, agent_set_up, tempdir_teardown)
    const struct CMUnitTest tests[] = {
        agent_test(test_a_session_with_an_agent),
        agent_test(test_the_phase_of_training),
        agent_test(test_killed_trainers),
        agent_test(test_a_restart_takes_values_from_memory),
        agent_test(test_training_goes_wrong_before_the_first_step),
        agent_test(test_training_goes_wrong_after_a_restart),
        agent_test(test_the_agent_is_killed),
        agent_test(test_an_agent_that_restarts_says_what_was_lost),
        agent_test(test_no_agent_and_too_little_memory),
        agent_test(test_kinds_of_sessions),
        agent_test(test_a_restart_with_another_layout),
        agent_test(test_memory_of_a_live_trainer_is_not_taken_over),
        agent_test(test_what_is_left_waits_for_space),
        agent_test(test_what_is_left_waits_for_the_store),
        agent_test(test_a_failed_save_is_not_tried_again_later),
        agent_test(test_a_later_version_rebuilds_the_catalog),
        agent_test(test_a_failed_save_is_not_tried_again_by_a_restart),
        agent_test(test_the_origin_is_gone),
        agent_test(test_the_socket_of_another_agent_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
