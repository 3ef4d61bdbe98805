/* Sessions of several ranks restore the same checkpoint, or all fail. The ranks are threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>

#include "base/file.h"
#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { WORLD = 3, N = 64, TIMEOUT_MS = 20000 };

typedef struct team team;
typedef struct member {
    const char *dir;
    team *team;
    uint32_t rank;
    ckd_session *session;
    float values[N];
    ckd_status status;
    ckd_checkpoint from;
    ckd_error err;
    pthread_t thread;
} member;

typedef void (*member_fn)(member *me);
struct team {
    member members[WORLD];
    pthread_barrier_t meet;
    member_fn act; /* after the steps 1, 2 and 3 were saved */
};

static _Thread_local bool sees_damage;

static int fail_chunks(void *context, file_op step, const char *path) {
    (void)context;
    return sees_damage && step == FILE_OP_OPEN && strstr(path, "/data/c/") ? EIO : 0;
}

static int fail_manifests(void *context, file_op step, const char *path) {
    (void)context;
    return sees_damage && step == FILE_OP_OPEN && strstr(path, "/data/m/run.3.") ? EIO : 0;
}

static ckd_status save_steps(member *me) {
    ckd_tensor tensor = CKD_TENSOR_INIT;
    char name[16];
    snprintf(name, sizeof(name), "w%u", (unsigned)me->rank);
    tensor.name = name;
    tensor.dtype = CKD_F32;
    tensor.ndim = 1;
    tensor.shape = (uint64_t[]){N};
    ckd_status status = ckd_session_add(me->session, &tensor, me->values, 0, &me->err);
    for (uint64_t step = 1; step <= 3 && status == CKD_OK; step++) {
        me->values[0] = (float)step;
        status = ckd_session_save(me->session, step, &me->err);
    }
    status = status == CKD_OK ? ckd_session_wait(me->session, CKD_DURABLE, &me->err) : status;
    me->values[0] = -1;
    return status;
}

static void open_session(member *me, ckd_on_duplicate on_duplicate) {
    ckd_ranks_options ranks = CKD_RANKS_OPTIONS_INIT;
    ranks.rank = me->rank;
    ranks.world = WORLD;
    ranks.timeout_ms = TIMEOUT_MS;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = "run";
    save.on_duplicate = on_duplicate;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    o.save = &save;
    o.ranks = &ranks;
    o.every_steps = 1000;
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", me->dir);
    me->status = ckd_session_open(&me->session, path, &o, &me->err);
}

static void *member_main(void *context) {
    member *me = context;
    open_session(me, CKD_DUPLICATE_ERROR);
    me->status = me->status == CKD_OK ? save_steps(me) : me->status;
    pthread_barrier_wait(&me->team->meet);
    if (me->status == CKD_OK) {
        me->team->act(me);
    }
    pthread_barrier_wait(&me->team->meet);
    ckd_session_close(me->session, NULL);
    return NULL;
}

static void run_team(team *t, const char *dir, member_fn act) {
    memset(t, 0, sizeof(*t));
    t->act = act;
    assert_int_equal(pthread_barrier_init(&t->meet, NULL, WORLD), 0);
    ckd_store_close(store_create(dir));
    for (uint32_t r = 0; r < WORLD; r++) {
        t->members[r] = (member){.dir = dir, .team = t, .rank = r};
        assert_int_equal(pthread_create(&t->members[r].thread, NULL, member_main, &t->members[r]), 0);
    }
    for (uint32_t r = 0; r < WORLD; r++) {
        pthread_join(t->members[r].thread, NULL);
    }
    pthread_barrier_destroy(&t->meet);
    file_set_fault_hook(NULL, NULL);
}

static void expect_step(const team *t, uint64_t step) {
    for (uint32_t r = 0; r < WORLD; r++) {
        const member *m = &t->members[r];
        if (m->status != CKD_OK) {
            fail_msg("rank %u: %s", (unsigned)r, m->err.message);
        }
        assert_int_equal(m->from.step, step);
        assert_true(m->values[0] == (float)step);
    }
}

static void expect_error(const team *t, ckd_status status, const char *what) {
    for (uint32_t r = 0; r < WORLD; r++) {
        const member *m = &t->members[r];
        assert_int_equal(m->status, status);
        assert_non_null(strstr(m->err.message, what));
        assert_int_equal(m->from.step, 0);
    }
}

/* ---- opening ---- */

static _Atomic uint32_t failures;
static const char *failing;

static int fail_one_message(void *context, file_op step, const char *path) {
    (void)context;
    const char *end = strstr(path, "/data/r/") ? strrchr(path, '/') + CKD_ID_TEXT : "";
    return step == FILE_OP_WRITE && strcmp(end, failing) == 0 && failures++ == 0 ? ENOSPC : 0;
}

/* A rank that cannot send its part, or rank 0 its answer, does not go on: the others would wait for it. */
static void test_an_opening_without_room(void **state) {
    static const char *const messages[] = {".1.tmp", ".2.tmp"};
    char dir[4096];
    for (size_t i = 0; i < 2; i++) {
        team t;
        uint32_t without_room = 0;
        failing = messages[i];
        failures = 0;
        snprintf(dir, sizeof(dir), "%s/%zu", (char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        file_set_fault_hook(fail_one_message, NULL);
        run_team(&t, dir, NULL);
        for (uint32_t r = 0; r < WORLD; r++) {
            const member *m = &t.members[r];
            bool own = m->status == CKD_E_NOSPACE;
            assert_true(own || m->status == CKD_E_STATE);
            assert_non_null(strstr(m->err.message, own ? "No space left" : "has died or left"));
            assert_true(!own || (r == 0) == (i == 1));
            without_room += own;
        }
        assert_int_equal(without_room, 1);
    }
}

/*
 * Nor do the others wait if the session stays open: run_team lets none close before all have saved. The first save has the
 * messages 3 to 16, the second one those from 17 on. Once the ranks have lost each other, all saves fail.
 */
static void test_a_save_without_room(void **state) {
    static const struct {
        const char *message;
        uint64_t saved;
    } cases[] = {{".3.tmp", 0}, {".4.tmp", 0}, {".8.tmp", 0}, {".15.tmp", 0}, {".16.tmp", 1}, {".23.tmp", 1}};
    char dir[4096];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        team t;
        failing = cases[i].message;
        failures = 0;
        snprintf(dir, sizeof(dir), "%s/%zu", (char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        file_set_fault_hook(fail_one_message, NULL);
        uint64_t begun_ns = clock_monotonic_ns();
        run_team(&t, dir, NULL);
        assert_true(failures > 0 && clock_monotonic_ns() - begun_ns < TIMEOUT_MS * UINT64_C(1000000));
        for (uint32_t r = 0; r < WORLD; r++) {
            ckd_status status = t.members[r].status;
            if (status != CKD_E_NOSPACE && status != CKD_E_STATE) {
                fail_msg("%s, rank %u: %s", failing, (unsigned)r, t.members[r].err.message);
            }
        }
        ckd_checkpoint newest = {.step = 0};
        ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
        (void)ckd_store_find(&newest, store, "run", CKD_LATEST, NULL);
        assert_int_equal(newest.step, cases[i].saved);
        ckd_store_close(store);
    }
}

static void restore(member *me, uint64_t step) {
    me->status = ckd_session_restore(&me->from, me->session, step, &me->err);
}

static void restore_newest(member *me) {
    restore(me, CKD_LATEST);
}

static void restore_first(member *me) {
    restore(me, 1);
}

static void restore_none(member *me) {
    restore(me, 7);
}

static void test_all_restore(void **state) {
    team t;
    run_team(&t, *state, restore_newest);
    expect_step(&t, 3);
}

static void test_a_step(void **state) {
    team t;
    run_team(&t, *state, restore_first);
    expect_step(&t, 1);
}

static void test_a_step_that_does_not_exist(void **state) {
    team t;
    run_team(&t, *state, restore_none);
    expect_error(&t, CKD_E_NOT_FOUND, "rank 0: ");
}

/* The store of another launch of the run, which commits when rank 0 has chosen. */
static void commit_meanwhile(member *me) {
    if (me->rank == 1) {
        float values[N] = {4};
        uint64_t n = N;
        clock_sleep_ns(300000000);
        ckd_store *store = store_reopen(me->dir, CKD_OPEN_CREATE);
        ckd_save *save = begin_save(store, "run", 4);
        for (unsigned r = 0; r < WORLD; r++) {
            char name[16];
            snprintf(name, sizeof(name), "w%u", r);
            add_tensor(save, name, CKD_F32, 1, &n, NULL, values);
        }
        assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
        ckd_store_close(store);
    }
    restore_newest(me);
}

static void test_rank_0_chooses(void **state) {
    team t;
    run_team(&t, *state, commit_meanwhile);
    expect_step(&t, t.members[0].from.step);
}

/* Rank 2 cannot read what the others can. Then no rank goes on, and all may restore an older checkpoint. */
static void see_damage(member *me) {
    sees_damage = me->rank == 2;
    restore_newest(me);
    sees_damage = false;
}

static void test_a_rank_that_cannot_read(void **state) {
    team t;
    file_set_fault_hook(fail_chunks, NULL);
    run_team(&t, *state, see_damage);
    expect_error(&t, CKD_E_IO, "rank 2: ");
}

static void see_damage_then_restore(member *me) {
    see_damage(me);
    restore_first(me);
}

static void test_all_go_back(void **state) {
    team t;
    file_set_fault_hook(fail_chunks, NULL);
    run_team(&t, *state, see_damage_then_restore);
    expect_step(&t, 1);
}

/* Only rank 0 reads manifests to find the newest. */
static void test_a_rank_that_finds_another(void **state) {
    team t;
    file_set_fault_hook(fail_manifests, NULL);
    run_team(&t, *state, see_damage);
    expect_error(&t, CKD_E_IO, "rank 2: ");
}

/* The next saves agree on what they continue. */
static void restore_and_save(member *me) {
    restore_first(me);
    if (me->status == CKD_OK) {
        me->status = ckd_session_save(me->session, 2, &me->err);
    }
    if (me->status == CKD_OK) {
        me->status = ckd_session_wait(me->session, CKD_DURABLE, &me->err);
    }
}

static void test_saves_continue_in_a_branch(void **state) {
    team t;
    ckd_checkpoint saved;
    run_team(&t, *state, restore_and_save);
    expect_step(&t, 1);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&saved, store, "run~2", 2, NULL), CKD_OK);
    assert_int_equal(saved.world, WORLD);
    ckd_store_close(store);
}

/* Another launch, of which only rank 1 finds that the run has gone further, and minds. */
static void save_again(member *me) {
    ckd_session_close(me->session, NULL);
    pthread_barrier_wait(&me->team->meet);
    open_session(me, me->rank == 1 ? CKD_DUPLICATE_ERROR : CKD_DUPLICATE_BRANCH);
    if (me->status == CKD_OK) {
        me->status = save_steps(me);
    }
}

static void test_a_rank_that_finds_another_launch(void **state) {
    team t;
    run_team(&t, *state, save_again);
    expect_error(&t, CKD_E_EXISTS, "rank 1: ");
}

/* ---- the restored checkpoint goes before the first save ---- */

static bool renames;

static void save_without_origin(member *me) {
    restore(me, 3);
    pthread_barrier_wait(&me->team->meet);
    if (me->rank == 0) {
        ckd_store *store = store_reopen(me->dir, CKD_OPEN_WRITE);
        assert_int_equal(renames ? ckd_store_rename_run(NULL, store, "run", "old", NULL, NULL)
                                 : ckd_store_delete(store, &me->from.id, 1, NULL, NULL),
                         CKD_OK);
        ckd_store_close(store);
    }
    pthread_barrier_wait(&me->team->meet);
    me->values[0] = 4;
    me->status = me->status == CKD_OK ? ckd_session_save(me->session, 4, &me->err) : me->status;
    me->status = me->status == CKD_OK ? ckd_session_wait(me->session, CKD_DURABLE, &me->err) : me->status;
    me->from.step = 4;
}

static void test_the_origin_is_gone(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        team t;
        char *dir = tempdir_create();
        ckd_checkpoint four;
        ckd_id none = {{0}};
        renames = i;
        run_team(&t, dir, save_without_origin);
        expect_step(&t, 4);
        ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
        assert_int_equal(ckd_store_find(&four, store, "run", 4, NULL), CKD_OK);
        assert_memory_equal(&four.resumed_from, renames ? &t.members[0].from.id : &none, sizeof(none));
        assert_int_equal(verify_damage(store), 0);
        ckd_store_close(store);
        tempdir_remove(dir);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_an_opening_without_room),
        tempdir_test(test_a_save_without_room),
        tempdir_test(test_all_restore),
        tempdir_test(test_a_step),
        tempdir_test(test_a_step_that_does_not_exist),
        tempdir_test(test_rank_0_chooses),
        tempdir_test(test_a_rank_that_cannot_read),
        tempdir_test(test_all_go_back),
        tempdir_test(test_a_rank_that_finds_another),
        tempdir_test(test_saves_continue_in_a_branch),
        tempdir_test(test_a_rank_that_finds_another_launch),
        tempdir_test(test_the_origin_is_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
