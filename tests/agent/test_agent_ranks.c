/* Sessions of several ranks with agents: joint saves by the agents, ranks and agents that are killed. */
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
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/slots/slots.h"
#include "tests/support/agents.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define WORLD 3

/* A launch: so many ranks with equal states, each a process. */
typedef struct launch {
    uint32_t world;
    pid_t ranks[WORLD];
    int steps[WORLD]; /* pipes on which they report */
} launch;

static unsigned launches;
static bool only_layers;

/* Without bytes, which other ranks than the first take from the store. */
static bool layers_are_right(const trainer *t, uint64_t step) {
    trainer *other = trainer_new(ROWS);
    trainer_set(other, step);
    bool same = true;
    for (unsigned i = 0; i < TRAINER_TENSORS; i++) {
        same = same && memcmp(other->layers[i], t->layers[i], ROWS * 64 * sizeof(float)) == 0;
    }
    trainer_free(other);
    return same;
}

static ckd_status register_layers(ckd_session *s, trainer *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < TRAINER_TENSORS && status == CKD_OK; i++) {
        char name[16];
        snprintf(name, sizeof(name), "layer%u", (unsigned)i);
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = name;
        tensor.dtype = CKD_F32;
        tensor.ndim = 2;
        tensor.shape = (uint64_t[]){t->rows, 64};
        status = ckd_session_add(s, &tensor, t->layers[i], i, err);
    }
    return status;
}

/* Goes on from the newest state, and saves each step. Reports the restored step, then each that it has made. */
static bool train(const ckd_session_options *o, int to, uint64_t until) {
    ckd_session *s;
    ckd_checkpoint from = {.step = 0};
    ckd_error err = {.message = "the restored state is wrong"};
    trainer *t = trainer_new(ROWS);
    bool good = ckd_session_open(&s, store, o, &err) == CKD_OK &&
                (only_layers ? register_layers : session_register)(s, t, &err) == CKD_OK;
    ckd_status status = good ? ckd_session_restore(&from, s, CKD_LATEST, &err) : CKD_E_STATE;
    good = status == CKD_OK || status == CKD_E_NOT_FOUND;
    good = good && (from.step == 0 || layers_are_right(t, from.step));
    (void)!write(to, &from.step, good ? sizeof(from.step) : 0);
    for (uint64_t step = from.step + 1; good && step <= until; step++) {
        trainer_set(t, step);
        good = ckd_session_step(s, step, &err) == CKD_OK;
        (void)!write(to, &step, good ? sizeof(step) : 0);
    }
    good = good && ckd_session_close(s, &err) == CKD_OK;
    if (!good) {
        say(NULL, err.message);
    }
    return good;
}

/* Rank 1 has copied a state whole when it is killed, or has begun to: the others have not come so far. */
static bool one_has_more;

/* Step 1 is durable. The saves of so many more fail, and then rank 1 has begun one that the others have not. */
static bool train_on_a_full_disk(const ckd_session_options *from, int to, uint64_t failing) {
    ckd_session_options o = *from;
    ckd_session *s;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    o.snapshot = CKD_SNAPSHOT_LAZY;
    bool good = ckd_session_open(&s, store, &o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK;
    uint64_t step = 1;
    for (; good && step <= 1 + failing; step++) {
        trainer_set(t, step);
        (void)ckd_session_step(s, step, &err);
        good = (ckd_session_wait(s, CKD_DURABLE, &err) == CKD_OK) == (step == 1);
        (void)!write(to, &step, good ? sizeof(step) : 0);
        while (access(full_chunks_path, F_OK) != 0) {
            clock_sleep_ns(UINT64_C(1000000));
        }
    }
    if (good && o.ranks->rank == 1) {
        trainer_set(t, step);
        (void)ckd_session_step(s, step, &err);
        if (one_has_more) {
            ckd_session_fence(s);
            clock_sleep_ns(UINT64_C(300000000));
        }
    }
    (void)!write(to, &step, good ? sizeof(step) : 0);
    return good && pause() == 0;
}

/* Goes on from the newest state. Rank 0 passes no fence after the first step, whose save fails. */
static bool train_and_tear(const ckd_session_options *from, int to, uint64_t until) {
    ckd_session_options o = *from;
    ckd_session *s;
    ckd_checkpoint at;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    o.snapshot = CKD_SNAPSHOT_LAZY;
    bool good = ckd_session_open(&s, store, &o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK &&
                ckd_session_restore(&at, s, CKD_LATEST, &err) == CKD_OK;
    for (uint64_t step = at.step + 1; good && step <= until; step++) {
        trainer_set(t, step);
        (void)ckd_session_step(s, step, &err);
        if (o.ranks->rank == 1 || step > at.step + 1) {
            (void)ckd_session_wait(s, CKD_DURABLE, &err);
        }
    }
    (void)to;
    return good && ckd_session_close(s, &err) == CKD_OK;
}

static const char *unsent;

static int fail_message(void *context, file_op step, const char *path) {
    (void)context;
    const char *end = strstr(path, "/data/r/") ? strrchr(path, '/') + CKD_ID_TEXT : "";
    return step == FILE_OP_WRITE && strcmp(end, unsent) == 0 ? ENOSPC : 0;
}

/* The first step fails on all ranks: on one as its message to the others finds no room. No rank waits for another one. */
static bool train_without_a_message(const ckd_session_options *o, int to, uint64_t until) {
    ckd_session *s;
    ckd_error err;
    trainer *t = trainer_new(ROWS);
    (void)until;
    bool good = ckd_session_open(&s, store, o, &err) == CKD_OK && session_register(s, t, &err) == CKD_OK;
    file_set_fault_hook(fail_message, NULL);
    trainer_set(t, 1);
    ckd_status status = good ? ckd_session_step(s, 1, &err) : CKD_OK;
    uint64_t step = status == CKD_E_NOSPACE || status == CKD_E_STATE;
    if (!step) {
        say(NULL, err.message);
    }
    (void)!write(to, &step, sizeof(step));
    return pause() == 0;
}

static bool (*trains)(const ckd_session_options *o, int to, uint64_t until) = train;

/* without: the rank that has no agent; others, as WORLD: none. */
static launch start(uint32_t world, uint64_t until, uint32_t without) {
    static char group[32];
    launch l = {.world = world};
    snprintf(group, sizeof(group), "launch-%u", ++launches);
    for (uint32_t r = 0; r < world; r++) {
        int pipes[2];
        assert_int_equal(pipe(pipes), 0);
        l.ranks[r] = fork();
        if (l.ranks[r] == 0) {
            ckd_ranks_options ranks = CKD_RANKS_OPTIONS_INIT;
            ranks.rank = r;
            ranks.world = world;
            ranks.group = group;
            ranks.timeout_ms = 60000;
            ckd_session_options o = options_with(r == without ? NULL : agent_socket);
            o.ranks = &ranks;
            close(pipes[0]);
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(trains(&o, pipes[1], until) ? 0 : 1);
        }
        close(pipes[1]);
        l.steps[r] = pipes[0];
    }
    return l;
}

static uint64_t restored_step(const launch *l, uint32_t rank) {
    uint64_t step = 0;
    assert_int_equal(read(l->steps[rank], &step, sizeof(step)), sizeof(step));
    return step;
}

static void kill_all(launch *l) {
    for (uint32_t r = 0; r < l->world; r++) {
        kill(l->ranks[r], SIGKILL);
    }
    for (uint32_t r = 0; r < l->world; r++) {
        int status;
        assert_int_equal(waitpid(l->ranks[r], &status, 0), l->ranks[r]);
    }
}

/* Returns the last step that all ranks have made. Closes the pipes. */
static uint64_t last_of_all(launch *l) {
    uint64_t least = UINT64_MAX;
    for (uint32_t r = 0; r < l->world; r++) {
        uint64_t last = last_step(l->steps[r], 0);
        least = last < least ? last : least;
    }
    return least;
}

static void await_end(launch *l) {
    for (uint32_t r = 0; r < l->world; r++) {
        end_process(l->ranks[r], 0);
    }
    (void)last_of_all(l);
}

static void test_ranks_with_an_agent(void **state) {
    pid_t agent = start_agent(0);
    launch l = start(WORLD, 6, WORLD);
    await_end(&l);
    stop_agent(agent);
    assert_int_equal(count_of(*state, TRAINER_RUN), 6);
    for (uint64_t step = 1; step <= 6; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
    assert_int_equal(checkpoint_of(*state, TRAINER_RUN, 6).world, WORLD);
    assert_int_equal(times_said("saves by itself"), 0);
}

/* A step whose copy all ranks had completed is durable, and in memory for the restart. */
static void test_killed_ranks(void **state) {
    pid_t agent = start_agent(0);
    uint64_t before = 0;
    for (unsigned i = 0; i < test_pick(4, 12, 40); i++) {
        launch l = start(WORLD, UINT64_MAX, WORLD);
        uint64_t first = restored_step(&l, 0);
        assert_true(first >= before);
        for (uint32_t r = 1; r < WORLD; r++) {
            assert_int_equal(restored_step(&l, r), first);
        }
        (void)await_step(l.steps[i % WORLD], first + 3);
        clock_sleep_ns(UINT64_C(1700000) * (i * 7 % 11));
        kill_all(&l);
        uint64_t made = last_of_all(&l);
        ckd_error err;
        must(ckd_agent_drain(store, agent_socket, 0, &err), &err);
        ckd_checkpoint newest = checkpoint_of(*state, TRAINER_RUN, CKD_LATEST);
        /* one step may be copied while the one before it is being saved */
        assert_true(newest.step + 1 >= made);
        stored_check(*state, TRAINER_RUN, newest.step, ROWS);
        before = newest.step;
    }
    assert_int_equal(times_said("restored state is wrong"), 0);
    stop_agent(agent);
}

static void rename_in_store(const char *from, const char *to) {
    char path[700], other[700];
    snprintf(path, sizeof(path), "%s/data/%s", store, from);
    snprintf(other, sizeof(other), "%s/data/%s", store, to);
    assert_int_equal(rename(path, other), 0);
}

/* No chunk file is there while they are restored. */
static void test_values_from_memory(void **state) {
    pid_t agent = start_agent(0);
    only_layers = true;
    launch l = start(2, UINT64_MAX, WORLD);
    (void)await_step(l.steps[0], 4);
    (void)await_step(l.steps[1], 4);
    kill_all(&l);
    (void)last_of_all(&l);
    ckd_error err;
    ckd_agent_state *about;
    must(ckd_agent_settle(store, agent_socket, TRAINER_RUN, &err), &err);
    must(ckd_agent_ask(&about, store, agent_socket, &err), &err);
    assert_int_equal(about->count, 2);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(about->sessions[i].world, 2);
        assert_false(about->sessions[i].connected);
    }
    assert_int_equal(about->sessions[0].rank + about->sessions[1].rank, 1);
    ckd_agent_state_free(about);
    uint64_t newest = checkpoint_of(*state, TRAINER_RUN, CKD_LATEST).step;
    rename_in_store("c", "hidden");
    launch next = start(2, 0, WORLD);
    uint64_t restored = restored_step(&next, 0);
    assert_int_equal(restored, restored_step(&next, 1));
    await_end(&next);
    rename_in_store("hidden", "c");
    assert_int_equal(restored, newest);
    only_layers = false;
    stop_agent(agent);
}

/* One rank is killed: what it left is not lost, and the others are told. */
static void test_one_rank_is_killed(void **state) {
    pid_t agent = start_agent(0);
    launch l = start(WORLD, UINT64_MAX, WORLD);
    (void)await_step(l.steps[2], 4);
    kill(l.ranks[1], SIGKILL);
    int status;
    for (uint32_t r = 0; r < WORLD; r++) { /* the others end with an error: they save no more */
        assert_int_equal(waitpid(l.ranks[r], &status, 0), l.ranks[r]);
        assert_true(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 1);
    }
    (void)last_of_all(&l);
    launch next = start(WORLD, 12, WORLD);
    assert_true(restored_step(&next, 1) >= 3);
    await_end(&next);
    stop_agent(agent);
    stored_check(*state, TRAINER_RUN, 12, ROWS);
}

static void test_the_agent_is_killed(void **state) {
    pid_t agent = start_agent(0);
    launch l = start(WORLD, 40, WORLD);
    (void)await_step(l.steps[0], 5);
    end_process(agent, SIGKILL);
    await_end(&l);
    assert_int_equal(times_said("this session saves by itself from now on"), WORLD);
    stored_check(*state, TRAINER_RUN, 40, ROWS);
    assert_true(count_of(*state, TRAINER_RUN) >= 39);
}

static void test_one_rank_without_an_agent(void **state) {
    pid_t agent = start_agent(0);
    launch l = start(WORLD, 4, 1);
    await_end(&l);
    assert_int_equal(times_said("rank 1: it was not told to use an agent"), WORLD - 1);
    stored_check(*state, TRAINER_RUN, 4, ROWS);
    stop_agent(agent);
}

/* Ranks of another number take no values from memory, but their checkpoint. */
static void test_another_world(void **state) {
    pid_t agent = start_agent(0);
    launch l = start(WORLD, UINT64_MAX, WORLD);
    (void)await_step(l.steps[0], 4);
    kill_all(&l);
    (void)last_of_all(&l);
    launch fewer = start(2, 12, WORLD);
    assert_true(restored_step(&fewer, 0) >= 3);
    await_end(&fewer);
    stored_check(*state, TRAINER_RUN, 12, ROWS);
    stop_agent(agent);
}

/* The newest state that all ranks had completed becomes durable, once there is space again. */
static void check_full_disk(const char *dir, uint64_t failing) {
    pid_t agent = start_agent(0);
    ckd_error err;
    trains = train_on_a_full_disk;
    launch l = start(2, failing, WORLD);
    trains = train;
    (void)await_step(l.steps[0], 1);
    (void)await_step(l.steps[1], 1);
    make_file(full_chunks_path);
    (void)await_step(l.steps[0], failing + 2);
    (void)await_step(l.steps[1], failing + 2);
    kill_all(&l);
    (void)last_of_all(&l);
    clock_sleep_ns(UINT64_C(1000000000)); /* the agent tries meanwhile */
    assert_int_equal(unlink(full_chunks_path), 0);
    for (unsigned i = 0; i < 300 && ckd_agent_drain(store, agent_socket, 0, &err) == CKD_E_BUSY; i++) {
        clock_sleep_ns(UINT64_C(100000000));
    }
    stored_check(dir, TRAINER_RUN, failing + 1, ROWS);
    stop_agent(agent);
}

/* Messages 1 and 2 are those of the opening, 3 to 6 say that all ranks have memory, and that their agents have joined. */
static void test_ranks_that_lose_each_other(void **state) {
    static const char *const messages[] = {".3.tmp", ".4.tmp", ".5.tmp", ".6.tmp"};
    pid_t agent = start_agent(0);
    (void)state;
    for (unsigned i = 0; i < sizeof(messages) / sizeof(messages[0]); i++) {
        unsent = messages[i];
        trains = train_without_a_message;
        launch l = start(2, 0, WORLD);
        trains = train;
        assert_int_equal(restored_step(&l, 0), 1);
        assert_int_equal(restored_step(&l, 1), 1);
        kill_all(&l);
        (void)last_of_all(&l);
    }
    stop_agent(agent);
}

/* The saves after one that one rank could not take part in have the same parent on all ranks. */
static void test_a_torn_state_after_a_restore(void **state) {
#ifdef __SANITIZE_THREAD__
    printf("SKIP: the trainer writes to what is being copied, on purpose\n");
    skip();
#endif
    pid_t agent = start_agent(0);
    launch l = start(2, 3, WORLD);
    await_end(&l);
    trains = train_and_tear;
    l = start(2, 6, WORLD);
    trains = train;
    await_end(&l);
    assert_int_equal(count_of(*state, TRAINER_RUN), 5); /* without step 4 */
    stored_check(*state, TRAINER_RUN, 6, ROWS);
    stop_agent(agent);
}

static void test_a_rank_is_ahead_on_a_full_disk(void **state) {
    one_has_more = true;
    check_full_disk(*state, 1);
}

static void test_a_rank_copies_on_a_full_disk(void **state) {
    one_has_more = false;
    check_full_disk(*state, 2);
}

/* The plan of a save fails, as one rank lacks the state. All ranks go on with the same exchange. */
static void test_a_rank_lacks_a_state_that_others_copy(void **state) {
    char local[600];
    snprintf(local, sizeof(local), "%s/local", (const char *)*state);
    agent_local = local;
    one_has_more = false;
    check_full_disk(*state, 2);
    agent_local = NULL;
    assert_int_equal(times_said("something else than this rank expects"), 0);
    assert_int_equal(times_said("an earlier exchange"), 0);
}

/* The newest step of which all ranks' parts are on the local disk; 0: there is none. */
static uint64_t step_on_disk(uint32_t world) {
    ckd_agent_state *shown;
    ckd_error err;
    must(ckd_agent_ask(&shown, store, agent_socket, &err), &err);
    uint64_t least = shown->count == world ? UINT64_MAX : 0;
    for (size_t i = 0; i < shown->count; i++) {
        uint64_t step = shown->sessions[i].local_step;
        step = step == CKD_LATEST ? 0 : step;
        least = step < least ? step : least;
    }
    ckd_agent_state_free(shown);
    return least;
}

/*
 * One rank cannot read what the ranks have agreed on, at any point of a save. If the others have deferred the state,
 * its part is still needed.
 */
static void test_a_rank_does_not_hear_of_the_others(void **state) {
    char local[600], unread[16];
    ckd_error err;
    snprintf(local, sizeof(local), "%s/local", (const char *)*state);
    agent_local = local;
    agent_store_every_s = 3600;
    unsigned broken = 0, stride = (unsigned)test_stride(9, 1, 1);
    for (unsigned n = 21 + (unsigned)test_first("unread messages", stride); n < 42; n += stride) {
        snprintf(unread, sizeof(unread), ".%u", n);
        agent_unread = unread;
        pid_t agent = start_agent(0);
        agent_unread = NULL;
        unsigned said = times_said("this session saves by itself from now on");
        launch l = start(2, UINT64_MAX, WORLD);
        uint64_t first = restored_step(&l, 0), begun = clock_monotonic_ns(), promised = 0;
        while (times_said("this session saves by itself from now on") == said &&
               clock_monotonic_ns() - begun < UINT64_C(10000000000) && promised < first + 6) {
            uint64_t step = step_on_disk(2);
            promised = step > promised ? step : promised;
        }
        broken += times_said("this session saves by itself from now on") > said;
        kill_all(&l);
        (void)last_of_all(&l);
        launch next = start(2, UINT64_MAX, WORLD);
        assert_true(restored_step(&next, 0) >= promised);
        kill_all(&next);
        (void)last_of_all(&next);
        (void)ckd_agent_drain(store, agent_socket, 0, &err);
        end_process(agent, SIGKILL);
    }
    assert_true(broken > 0);
    agent_local = NULL;
    agent_store_every_s = 0;
}

/* A rank by hand: gets memory, and waits for the others unless it dies before. */
static pid_t start_joining(uint32_t rank, bool joins) {
    int pipes[2];
    char byte;
    assert_int_equal(pipe(pipes), 0);
    pid_t process = fork();
    if (process == 0) {
        slot_link link;
        slot_message memory = {.kind = SLOT_MEMORY}, wanted = {.kind = SLOT_JOIN}, answer;
        slot_reply reply;
        slot_layout layout;
        slot_join group = {.group = {{1}}, .timeout_ms = 60000};
        ckd_error err;
        uint32_t count = 2;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)slot_layout_make(&layout, &(slot_item){.is_bytes = true, .bytes = 8, .tensor.name = "b"}, 1,
                               &err);
        bytes_put(&memory.body, &count, sizeof(count));
        bytes_put(&memory.body, layout.encoded.data, layout.encoded.size);
        bytes_put(&wanted.body, &group, sizeof(group));
        bool good =
            slots_connect(&link, agent_socket, &(slot_peer){TRAINER_RUN, rank, 2}, 20000, &err) == CKD_OK &&
            slots_ask(&answer, &reply, &link, &memory, &err) == CKD_OK;
        (void)!write(pipes[1], "m", good);
        if (joins) {
            (void)slots_ask(&answer, &reply, &link, &wanted, &err);
        }
        _exit(pause());
    }
    close(pipes[1]);
    assert_int_equal(read(pipes[0], &byte, 1), 1);
    close(pipes[0]);
    return process;
}

/* No restart, and no end of the agent, waits for a rank that died before it had joined. */
static void test_a_rank_dies_before_it_joins(void **state) {
    (void)state;
    pid_t agent = start_agent(0);
    ckd_error err;
    for (uint32_t joins = 0; joins < 2; joins++) {
        pid_t ranks[] = {start_joining(0, joins == 0), start_joining(1, joins == 1)};
        clock_sleep_ns(UINT64_C(300000000));
        end_process(ranks[0], SIGKILL);
        end_process(ranks[1], SIGKILL);
        uint64_t begun = clock_monotonic_ns();
        must(ckd_agent_settle(store, agent_socket, TRAINER_RUN, &err), &err);
        assert_true(clock_monotonic_ns() - begun < UINT64_C(30000000000));
    }
    pid_t waiting = start_joining(0, true), rank = start_joining(1, false);
    clock_sleep_ns(UINT64_C(300000000));
    uint64_t begun = clock_monotonic_ns();
    stop_agent(agent);
    assert_true(clock_monotonic_ns() - begun < UINT64_C(30000000000));
    end_process(waiting, SIGKILL);
    end_process(rank, SIGKILL);
}

int main(void) {
    signal(SIGPIPE, SIG_DFL);
#define agent_test(test) cmocka_unit_test_setup_teardown(test, agent_set_up, tempdir_teardown)
    const struct CMUnitTest tests[] = {
        agent_test(test_ranks_with_an_agent),
        agent_test(test_killed_ranks),
        agent_test(test_values_from_memory),
        agent_test(test_one_rank_is_killed),
        agent_test(test_the_agent_is_killed),
        agent_test(test_one_rank_without_an_agent),
        agent_test(test_a_torn_state_after_a_restore),
        agent_test(test_ranks_that_lose_each_other),
        agent_test(test_a_rank_dies_before_it_joins),
        agent_test(test_another_world),
        agent_test(test_a_rank_is_ahead_on_a_full_disk),
        agent_test(test_a_rank_copies_on_a_full_disk),
        agent_test(test_a_rank_lacks_a_state_that_others_copy),
        agent_test(test_a_rank_does_not_hear_of_the_others),
    };
    return cmocka_run_group_tests_name("agent_ranks", tests, NULL, NULL);
}
