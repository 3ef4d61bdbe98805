#include "tests/support/agents.h"

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
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

char store[600], agent_socket[600], said_path[600], full_path[600], full_chunks_path[600], slow_path[600];
const char *agent_local, *agent_unread;
double agent_store_every_s;

static void on_ready(void *context, const char *path) {
    (void)path;
    (void)!write(*(int *)context, "r", 1);
}

/* What agents and sessions say goes to one file, a line each. */
void say(void *context, const char *message) {
    FILE *f = fopen(said_path, "a");
    (void)context;
    if (f) {
        fprintf(f, "%s\n", message);
        fclose(f);
    }
}

unsigned times_said(const char *text) {
    char line[2048];
    unsigned count = 0;
    FILE *f = fopen(said_path, "r");
    while (f && fgets(line, sizeof(line), f)) {
        count += strstr(line, text) != NULL;
    }
    if (f) {
        fclose(f);
    }
    return count;
}

static bool is_unread(file_op step, const char *path) {
    size_t length = strlen(path), end = agent_unread ? strlen(agent_unread) : length + 1;
    return step == FILE_OP_OPEN && end < length && strstr(path, "/data/r/") &&
           strcmp(path + length - end, agent_unread) == 0;
}

/* The disk is full as long as a file says so, and takes no values as long as another one does. */
static int full_disk(void *context, file_op step, const char *path) {
    (void)context;
    if (is_unread(step, path)) {
        agent_unread = NULL;
        return EIO;
    }
    while (step == FILE_OP_WRITE && strstr(path, "/data/c/") && access(slow_path, F_OK) == 0) {
        clock_sleep_ns(UINT64_C(5000000));
    }
    bool full =
        access(full_path, F_OK) == 0 || (strstr(path, "/data/c/") && access(full_chunks_path, F_OK) == 0);
    return step == FILE_OP_WRITE && full ? ENOSPC : 0;
}

pid_t start_agent(uint64_t budget) {
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t agent = fork();
    if (agent == 0) {
        ckd_agent_options o = CKD_AGENT_OPTIONS_INIT;
        o.socket = agent_socket;
        o.memory_bytes = budget;
        o.local = agent_local;
        o.store_every_s = agent_store_every_s;
        o.threads = 1;
        o.on_message = say;
        o.on_ready = on_ready;
        o.ready_context = &ready[1];
        close(ready[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that aborts leaves nothing behind */
        file_set_fault_hook(full_disk, NULL);
        _exit(ckd_agent_run(store, &o, NULL) == CKD_OK ? 0 : 1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return agent;
}

void end_process(pid_t process, int number) {
    int status;
    if (number) {
        kill(process, number);
    }
    assert_int_equal(waitpid(process, &status, 0), process);
    assert_true(number ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void stop_agent(pid_t agent) {
    ckd_error err;
    must(ckd_agent_drain(store, agent_socket, 1, &err), &err);
    end_process(agent, 0);
}

ckd_session_options options_with(const char *agent) {
    static ckd_store_options said;
    ckd_session_options o = session_options();
    said = *o.store;
    said.on_message = say;
    o.store = &said;
    o.agent = agent;
    return o;
}

/* As trainer_check, in a process that must not run on with the test when it fails. */
static bool has_state(const trainer *t, uint64_t step) {
    trainer *other = trainer_new(ROWS);
    trainer_set(other, step);
    bool same = other->step == t->step && memcmp(other->loader, t->loader, sizeof(t->loader)) == 0;
    for (unsigned i = 0; i < TRAINER_TENSORS; i++) {
        same = same && memcmp(other->layers[i], t->layers[i], ROWS * 64 * sizeof(float)) == 0;
    }
    trainer_free(other);
    return same;
}

/*
 * A trainer in a process of its own: it goes on from the newest state, and saves until it is killed. It reports its
 * steps. `until`: the last step, after which it closes its session.
 */
pid_t start_trainer(int *steps, uint64_t until) {
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    pid_t process = fork();
    if (process == 0) {
        ckd_session_options o = options_with(agent_socket);
        ckd_session *s;
        ckd_checkpoint from = {.step = 0};
        ckd_error err;
        trainer *t = trainer_new(ROWS);
        bool good = ckd_session_open(&s, store, &o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK;
        ckd_status status = good ? ckd_session_restore(&from, s, CKD_LATEST, &err) : CKD_E_STATE;
        good = status == CKD_OK || status == CKD_E_NOT_FOUND;
        good = good && (from.step == 0 || has_state(t, from.step));
        for (uint64_t step = from.step + 1; good && step <= until; step++) {
            trainer_set(t, step);
            good = ckd_session_step(s, step, &err) == CKD_OK;
            (void)!write(pipes[1], &step, sizeof(step));
        }
        good = good && ckd_session_close(s, &err) == CKD_OK;
        if (!good) {
            say(NULL, err.message);
        }
        _exit(good ? 0 : 1);
    }
    close(pipes[1]);
    *steps = pipes[0];
    return process;
}

uint64_t await_step(int steps, uint64_t step) {
    uint64_t seen = 0;
    while (seen < step && read(steps, &seen, sizeof(seen)) == sizeof(seen)) {
    }
    assert_true(seen >= step);
    return seen;
}

/* Returns the last step that it reported before it ended. */
uint64_t last_step(int steps, uint64_t seen) {
    uint64_t step;
    while (read(steps, &step, sizeof(step)) == sizeof(step)) {
        seen = step;
    }
    close(steps);
    return seen;
}

int agent_set_up(void **state) {
    int code = tempdir_setup(state);
    snprintf(store, sizeof(store), "%s/store", (char *)*state);
    snprintf(agent_socket, sizeof(agent_socket), "%s/agent", (char *)*state);
    snprintf(full_path, sizeof(full_path), "%s/full", (char *)*state);
    snprintf(full_chunks_path, sizeof(full_chunks_path), "%s/full-chunks", (char *)*state);
    snprintf(slow_path, sizeof(slow_path), "%s/slow", (char *)*state);
    snprintf(said_path, sizeof(said_path), "%s/said", (char *)*state);
    return code;
}

void restore_and_check(const char *dir, const char *agent, uint64_t step) {
    ckd_session_options o = options_with(agent);
    ckd_checkpoint from;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(dir, &o, t);
    trainer_spoil(t);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_true(from.step >= step);
    trainer_check(t, from.step);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

ckd_agent_session session_shown(size_t *count) {
    ckd_agent_session first = {.connected = 0};
    ckd_agent_state *about;
    ckd_error err;
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    *count = about->count;
    if (about->count) {
        first = about->sessions[0];
    }
    ckd_agent_state_free(about);
    return first;
}

void make_file(const char *path) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
}
