/* Progress in shared memory: who takes which slot, what a step writes, and what sessions say by themselves. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "include/ckptdelta.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define SLOTS 4
#define TOKEN UINT64_C(0x0123456789abcdef)

/* A supervisor's segment. The process attaches to one segment only, so each test has its trainers in children. */
typedef struct shared {
    ckd_progress_header *header;
    ckd_progress_slot *slots;
} shared;

static shared make_segment(void) {
    size_t size = CKD_PROGRESS_SLOTS_AT + SLOTS * sizeof(ckd_progress_slot);
    int id = shmget(IPC_PRIVATE, size, IPC_CREAT | 0600);
    assert_true(id >= 0);
    shared s = {.header = shmat(id, NULL, 0)};
    assert_ptr_not_equal(s.header, (void *)-1);
    assert_int_equal(shmctl(id, IPC_RMID, NULL),
                     0); /* it goes with the last process, and may be attached until then */
    *s.header = (ckd_progress_header){.magic = CKD_PROGRESS_MAGIC,
                                      .token = TOKEN,
                                      .version = CKD_PROGRESS_VERSION,
                                      .slot_size = sizeof(ckd_progress_slot),
                                      .slot_count = SLOTS};
    s.slots = (ckd_progress_slot *)(void *)((uint8_t *)s.header + CKD_PROGRESS_SLOTS_AT);
    char name[64];
    snprintf(name, sizeof(name), "%d:%016" PRIx64, id, TOKEN);
    setenv("CKPTDELTA_PROGRESS", name, 1);
    setenv("CKPTDELTA_RUN", TRAINER_RUN, 1);
    return s;
}

static void sleep_ms(long ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Runs a trainer in a child. Returns its process number when it has ended well. */
static uint64_t in_child(void (*body)(const char *dir), const char *dir) {
    pid_t pid = fork();
    if (pid == 0) {
        body(dir);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return (uint64_t)pid;
}

/* In a child a failed assertion would go on with the parent's tests. */
static void expect(bool condition, int line) {
    if (!condition) {
        fprintf(stderr, "line %d\n", line);
        _exit(1);
    }
}
#define EXPECT(condition) expect(condition, __LINE__)

static void nobody_watches(const char *dir) {
    (void)dir;
    EXPECT(!ckd_progress_begin(NULL, 0));
    ckd_progress_step(1);
    EXPECT(ckd_progress_enter(CKD_PROGRESS_EVALUATION) == CKD_PROGRESS_START);
}

static void test_without_a_supervisor(void **state) {
    unsetenv("CKPTDELTA_PROGRESS");
    in_child(nobody_watches, *state);
    shared s = make_segment();
    char right[64];
    snprintf(right, sizeof(right), "%s", getenv("CKPTDELTA_PROGRESS"));
    static const char *const wrong[] = {"", "x", "1", "-1:0123456789abcdef", "2147483647:0123456789abcdef"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        setenv("CKPTDELTA_PROGRESS", wrong[i], 1);
        in_child(nobody_watches, *state);
    }
    /* A segment of another job, of another version, or too small for its slots. */
    setenv("CKPTDELTA_PROGRESS", right, 1);
    s.header->token++;
    in_child(nobody_watches, *state);
    s.header->token--;
    s.header->version++;
    in_child(nobody_watches, *state);
    s.header->version--;
    s.header->slot_count = SLOTS + 1;
    in_child(nobody_watches, *state);
    assert_int_equal(s.slots[0].pid, 0);
    shmdt(s.header);
}

static void trains(const char *dir) {
    (void)dir;
    static const char *const others[] = {"another", "ru", "run2", "run~", "run~x", "run~2x", ""};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        EXPECT(!ckd_progress_begin(others[i], 7));
    }
    EXPECT(ckd_progress_begin(TRAINER_RUN "~12", 7));
    EXPECT(ckd_progress_begin(TRAINER_RUN, 7));
    EXPECT(ckd_progress_begin(NULL, CKD_PROGRESS_NO_RANK));
    EXPECT(ckd_progress_enter(CKD_PROGRESS_TRAINING) == CKD_PROGRESS_START);
    ckd_progress_step(11);
    for (uint64_t step = 12; step <= 14; step++) {
        ckd_progress_enter(CKD_PROGRESS_EVALUATION);
        sleep_ms(300);
        EXPECT(ckd_progress_enter(CKD_PROGRESS_TRAINING) == CKD_PROGRESS_EVALUATION);
        sleep_ms(1);
        ckd_progress_step(step);
        ckd_progress_step(step); /* a save says the same again */
    }
    EXPECT(ckd_progress_enter(CKD_PROGRESS_SAVING) == CKD_PROGRESS_TRAINING);
    pid_t worker = fork();
    if (worker == 0) { /* it has no slot, and leaves its parent's alone */
        ckd_progress_step(99);
        _exit(0);
    }
    EXPECT(worker > 0 && waitpid(worker, NULL, 0) == worker);
}

static void test_steps_and_phases(void **state) {
    shared s = make_segment();
    uint64_t pid = in_child(trains, *state);
    ckd_progress_slot *slot = &s.slots[0];
    assert_int_equal(slot->pid, pid);
    assert_int_equal(slot->rank, 7);
    assert_int_equal(slot->phase, CKD_PROGRESS_SAVING);
    assert_int_equal(slot->steps, 4);
    assert_int_equal(slot->step, 14);
    assert_int_equal(slot->first_step, 11);
    assert_int_equal(slot->timed, 3);
    assert_true(slot->first_ns < slot->step_ns && slot->step_ns <= slot->phase_ns);
    /* Evaluation is not part of a step. */
    for (size_t i = 0; i < slot->timed; i++) {
        assert_true(slot->took_ms[i] >= 1 && slot->took_ms[i] < slot->step_ns / 1000000);
    }
    assert_true((slot->step_ns - slot->first_ns) / 1000000 >=
                900 + slot->took_ms[0] + slot->took_ms[1] + slot->took_ms[2]);
    shmdt(s.header);
}

static void begins(const char *dir) {
    (void)dir;
    ckd_progress_begin(NULL, 1);
    ckd_progress_step(5);
}

static void test_slots_run_out(void **state) {
    shared s = make_segment();
    for (size_t i = 0; i < SLOTS + 1; i++) {
        uint64_t pid = in_child(begins, *state);
        assert_true(i == SLOTS || s.slots[i].pid == pid);
    }
    shmdt(s.header);
}

static void *begins_as_thread(void *gate) {
    pthread_barrier_wait(gate);
    return ckd_progress_begin(NULL, 3) ? gate : NULL;
}

static void threads_begin(const char *dir) {
    (void)dir;
    pthread_t threads[3];
    pthread_barrier_t gate;
    pthread_barrier_init(&gate, NULL, 3);
    for (size_t i = 0; i < 3; i++) {
        EXPECT(pthread_create(&threads[i], NULL, begins_as_thread, &gate) == 0);
    }
    for (size_t i = 0; i < 3; i++) {
        void *begun;
        EXPECT(pthread_join(threads[i], &begun) == 0 && begun);
    }
    ckd_progress_step(1);
}

/* A process has one slot. Another one that it took at the same time must not look like a rank that stands still. */
static void test_threads_share_a_slot(void **state) {
    for (int round = 0; round < 200; round++) {
        shared s = make_segment();
        in_child(threads_begin, *state);
        size_t steps = 0;
        for (size_t i = 0; i < SLOTS && s.slots[i].pid; i++) {
            steps += s.slots[i].steps;
            assert_true(s.slots[i].steps == 1 || s.slots[i].phase == CKD_PROGRESS_ENDED);
        }
        assert_int_equal(steps, 1);
        shmdt(s.header);
    }
}

static uint64_t phase_of_own; /* what the session's thread saw while it saved */
static const ckd_progress_slot *watched;
static void note_phase(void *context, const ckd_saved *saved) {
    (void)context;
    (void)saved;
    sleep_ms(50);
    phase_of_own = watched->phase;
}

static void session_trains(const char *dir) {
    trainer *t = trainer_new(100);
    ckd_session_options o = session_options();
    ckd_save_options other = *o.save;
    ckd_error err = {0};
    const ckd_progress_slot *slot = watched;
    other.run = "another";
    o.save = &other;
    ckd_session *aside = session_of(dir, &o, t);
    EXPECT(slot->pid == 0);
    o = session_options();
    o.every_steps = 1000;
    o.on_saved = note_phase;
    ckd_session *s = session_of(dir, &o, t);
    EXPECT(slot->pid == (uint64_t)getpid() && slot->phase == CKD_PROGRESS_START && slot->rank == UINT32_MAX);
    EXPECT(ckd_session_restore(NULL, s, CKD_LATEST, &err) == CKD_E_NOT_FOUND);
    iterate_through(aside, t, 1, 3);
    EXPECT(slot->steps == 0);
    iterate_through(s, t, 1, 3);
    EXPECT(slot->steps == 3 && slot->step == 3 && slot->first_step == 1 &&
           slot->phase == CKD_PROGRESS_TRAINING);
    ckd_session_phase(s, CKD_PHASE_EVALUATION);
    EXPECT(slot->phase == CKD_PROGRESS_EVALUATION);
    ckd_session_phase(s, CKD_PHASE_ANY);
    EXPECT(slot->phase == CKD_PROGRESS_TRAINING);
    must(ckd_session_save(s, 4, &err), &err);
    EXPECT(slot->phase == CKD_PROGRESS_TRAINING && slot->steps == 4);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    EXPECT(phase_of_own == CKD_PROGRESS_SAVING && slot->phase == CKD_PROGRESS_TRAINING);
    /* A checkpoint is restored: the time until the next step is not one of a step. */
    must(ckd_session_restore(NULL, s, CKD_LATEST, &err), &err);
    EXPECT(slot->phase == CKD_PROGRESS_START && slot->timed == 3);
    iterate_through(s, t, 5, 5);
    EXPECT(slot->phase == CKD_PROGRESS_TRAINING && slot->timed == 3 && slot->steps == 5);
    must(ckd_session_close(s, &err), &err);
    EXPECT(slot->phase == CKD_PROGRESS_ENDED && slot->step == 5);
    /* Another session of the same process has the same slot. */
    s = session_of(dir, &o, t);
    EXPECT(slot->phase == CKD_PROGRESS_START && slot[1].pid == 0);
    must(ckd_session_close(s, &err), &err);
    must(ckd_session_close(aside, &err), &err);
    trainer_free(t);
}

static void test_sessions_report_by_themselves(void **state) {
    shared s = make_segment();
    watched = &s.slots[0];
    in_child(session_trains, *state);
    shmdt(s.header);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_without_a_supervisor),
        tempdir_test(test_steps_and_phases),
        tempdir_test(test_slots_run_out),
        tempdir_test(test_threads_share_a_slot),
        tempdir_test(test_sessions_report_by_themselves),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("progress", tests, NULL, NULL);
    scratch_end();
    return failed;
}
