/*
 * Processes that save together, through nothing but the store's directory: what they agree on, what becomes of it when one of them fails
 * or is killed at any step, and worlds that change in the midst of a chain.
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
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/ranks.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

enum { WORLD_MOST = 8, PATIENCE_MS = 120000 };

/* ---- processes ---- */

/* In memory that all processes share: when a rank was killed, and how many survivors know how it went. */
static uint64_t *death_ns;
static _Atomic uint64_t *informed;

/* How it went for a rank. */
typedef struct outcome {
    bool killed;
    uint64_t ended_ns;
    ckd_status status;
    char message[256];
    ckd_checkpoint info;
} outcome;

/* What happens to a rank: killed before the step, or in the midst of a write; or its steps fail. */
typedef struct fate {
    uint32_t rank;
    unsigned long at; /* which step, from 1; 0: the first that matches */
    file_step step;
    const char *where; /* part of the path; NULL: none */
    int fail;          /* with this errno, instead of being killed */
    bool torn;
    unsigned long seen;
    bool dying;
} fate;

static int fate_hook(void *context, file_step step, const char *path) {
    fate *f = context;
    if (step == STEP_READ || step == STEP_OPEN || (step == STEP_LOCK && f->step != STEP_LOCK)) {
        return 0; /* waiting does these, so their number is not the same twice */
    }
    bool now = f->at ? ++f->seen == f->at : f->where && step == f->step && strstr(path, f->where);
    if (now && f->fail) {
        return f->fail;
    }
    if (f->dying || (now && !(f->torn && step == STEP_WRITE))) {
        *death_ns = clock_monotonic_ns();
        raise(SIGKILL);
    }
    f->dying = now;
    return now ? -4 : 0;
}

typedef struct world {
    const char *dir;
    uint32_t size;
    uint64_t step;
    const fate *fate; /* NULL: nothing happens */
    uint32_t timeout_ms;
    uint32_t first_timeout_ms; /* of rank 0; 0: the same */
    /* Between joining and leaving. */
    ckd_status (*act)(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const struct world *w,
                      uint32_t rank, ckd_error *err);
} world;

static ckd_status be_rank(outcome *out, const world *w, uint32_t rank, ckd_error *err) {
    ckd_store *store;
    ckd_ranks *ranks;
    fate mine = w->fate ? *w->fate : (fate){.rank = UINT32_MAX};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = rank;
    o.world = w->size;
    o.group = "a launch";
    o.timeout_ms = w->timeout_ms ? w->timeout_ms : PATIENCE_MS;
    o.timeout_ms = rank == 0 && w->first_timeout_ms ? w->first_timeout_ms : o.timeout_ms;
    ckd_status status = scene_open(&store, w->dir, CKD_OPEN_WRITE, err);
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_ranks_join(&ranks, store, &o, err);
    if (status == CKD_OK) {
        if (mine.rank == rank) {
            file_set_fault_hook(fate_hook, &mine);
        }
        status = w->act(&out->info, ranks, store, w, rank, err);
    }
    out->ended_ns = clock_monotonic_ns();
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    return status;
}

static void run_world(outcome out[WORLD_MOST], const world *w) {
    int ends[WORLD_MOST][2], state;
    pid_t pids[WORLD_MOST];
    fflush(NULL);
    memset(out, 0, WORLD_MOST * sizeof(out[0]));
    for (uint32_t r = 0; r < w->size; r++) {
        assert_int_equal(pipe(ends[r]), 0);
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) {
            ckd_error err = {0};
            outcome mine = {0};
            alarm(PATIENCE_MS / 1000 * 2);
            mine.status = be_rank(&mine, w, r, &err);
            snprintf(mine.message, sizeof(mine.message), "%.255s", err.message);
            _exit(write(ends[r][1], &mine, sizeof(mine)) != sizeof(mine));
        }
        close(ends[r][1]);
    }
    for (uint32_t r = 0; r < w->size; r++) {
        bool told = read(ends[r][0], &out[r], sizeof(out[r])) == sizeof(out[r]);
        close(ends[r][0]);
        assert_int_equal(waitpid(pids[r], &state, 0), pids[r]);
        out[r].killed = WIFSIGNALED(state);
        if (told ? !WIFEXITED(state) || WEXITSTATUS(state) : !out[r].killed || WTERMSIG(state) != SIGKILL) {
            fail_msg("rank %u ended with %d, signal %d", r, WEXITSTATUS(state), WTERMSIG(state));
        }
    }
}

static void all_went_well(const world *w) {
    outcome out[WORLD_MOST];
    run_world(out, w);
    for (uint32_t r = 0; r < w->size; r++) {
        if (out[r].killed || out[r].status != CKD_OK) {
            fail_msg("rank %u: %s", r, out[r].message);
        }
        assert_memory_equal(&out[r].info.id, &out[0].info.id, sizeof(ckd_id));
        assert_int_equal(out[r].info.stored_bytes, out[0].info.stored_bytes);
        assert_int_equal(out[r].info.world, w->size);
    }
}

/* ---- what ranks do ---- */

static ckd_status save_share(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint64_t step,
                             uint32_t rank, ckd_error *err) {
    ckd_save *save;
    ckd_error why = {0};
    scene s = scene_of(step);
    ckd_save_options o = options_of(s.run, s.step);
    ckd_status status = ckd_ranks_begin(&save, ranks, &o, err);
    if (status != CKD_OK) {
        return status;
    }
    if (scene_share(save, &s, rank, w->size, &why) != CKD_OK) {
        if (err) {
            *err = why;
        }
        return ckd_ranks_abort(ranks, save, &why);
    }
    return ckd_ranks_commit(info, ranks, save, err);
}

static ckd_status act_saves(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err) {
    (void)store;
    return save_share(info, ranks, w, w->step, rank, err);
}

static ckd_status act_saves_thrice(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                   uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = CKD_OK;
    for (uint64_t i = 0; i < 3 && status == CKD_OK; i++) {
        status = save_share(info, ranks, w, w->step + i, rank, err);
    }
    return status;
}

static int setup(void **state) {
    *state = tempdir_create();
    return 0;
}
static int teardown(void **state) {
    tempdir_remove(*state);
    return 0;
}

static void test_saves_together(void **state) {
    scene_make(*state, 0, 1);
    all_went_well(&(world){.dir = *state, .size = 4, .step = 1, .act = act_saves_thrice});
    all_went_well(&(world){.dir = *state, .size = 1, .step = 4, .act = act_saves});
    survivors_check(*state, 31, 31, 5);
}

/* ---- killed ---- */

/* Returns false when the rank came to its end without being killed. */
static bool kill_once(const char *template, uint32_t victim, unsigned long at, unsigned *late,
                      double *longest) {
    char *dir = tempdir_create(), store[1024];
    outcome out[WORLD_MOST];
    fate f = {.rank = victim, .at = at, .torn = at % 2};
    snprintf(store, sizeof(store), "%s/store", dir);
    tree_copy(store_path_of(template, ""), store);
    run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .fate = &f, .act = act_saves});
    unsigned well = 0, badly = 0;
    for (uint32_t r = 0; r < 4; r++) {
        double seconds = out[victim].killed && !out[r].killed && out[r].ended_ns > *death_ns
                             ? (double)(out[r].ended_ns - *death_ns) / 1e9
                             : 0;
        *longest = seconds > *longest ? seconds : *longest;
        well += !out[r].killed && out[r].status == CKD_OK;
        badly += !out[r].killed && out[r].status != CKD_OK;
        if (!out[r].killed && out[r].status != CKD_OK && !strstr(out[r].message, "rank ")) {
            fail_msg("rank %u does not say whose fault it was: %s", r, out[r].message);
        }
    }
    assert_true(well == 0 || badly == 0); /* all survivors know the same */
    *late += well > 0 && out[victim].killed;
    survivors_check(dir, well ? 7 : 3, 7, 2);
    assert_true(well > 0 || !out[victim].killed || badly == 3);
    tempdir_remove(dir);
    return out[victim].killed;
}

static void kill_everywhere(const char *template, uint32_t victim) {
    unsigned long at = 1, stride = under_sanitizer() ? 7 : 1, kills = 0;
    unsigned late = 0;
    double longest = 0;
    for (; kill_once(template, victim, at, &late, &longest); at += stride) {
        kills++;
    }
    print_message(
        "rank %u killed at %lu steps, after the commit at %u; the others knew after %.2f s at most\n", victim,
        kills, late, longest);
    assert_true(kills >= (under_sanitizer() ? 3 : 20));
    assert_true(under_sanitizer() || late >= 1);
}

static void test_rank_0_is_killed(void **state) {
    scene_make(*state, 0, 2);
    kill_everywhere(*state, 0);
}

static void test_another_rank_is_killed(void **state) {
    scene_make(*state, 0, 2);
    kill_everywhere(*state, 1);
}

static void test_the_last_rank_is_killed(void **state) {
    scene_make(*state, 0, 2);
    kill_everywhere(*state, 3);
}

/* The commit point is the manifest, whoever lives to tell. */
static void test_coordinator_dies_behind_the_commit_point(void **state) {
    outcome out[WORLD_MOST];
    static const struct {
        file_step step;
        const char *where;
        bool committed;
    } deaths[] = {{STEP_PUBLISH, "data/m/run", false},
                  {STEP_DIR_SYNC, "data/m", true},
                  {STEP_SYNC, "catalog.db", true}};
    for (size_t i = 0; i < 3; i++) {
        char *dir = tempdir_create();
        scene_make(dir, 0, 2);
        fate f = {.rank = 0, .step = deaths[i].step, .where = deaths[i].where};
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .fate = &f, .act = act_saves});
        assert_true(out[0].killed);
        for (uint32_t r = 1; r < 4; r++) {
            assert_int_equal(out[r].status, deaths[i].committed ? CKD_OK : CKD_E_STATE);
            assert_true(deaths[i].committed || strstr(out[r].message, "rank 0 of 4 has died"));
        }
        survivors_check(dir, deaths[i].committed ? 7 : 3, 7, 2);
        tempdir_remove(dir);
    }
    (void)state;
}

/* *save: NULL if it did not begin, else the caller's, whatever the status. */
static ckd_status begin_share(ckd_save **save, ckd_ranks *ranks, const scene *s, const world *w,
                              uint32_t rank, ckd_error *err) {
    ckd_save_options o = options_of(s->run, s->step);
    ckd_status status = ckd_ranks_begin(save, ranks, &o, err);
    if (status != CKD_OK) {
        *save = NULL;
        return status;
    }
    return scene_share(*save, s, rank, w->size, err);
}

/* Until so many ranks know their outcome, or patience ends: what is asserted afterwards tells which. */
static void await_informed(uint64_t ranks) {
    for (int i = 0; i < PATIENCE_MS && *informed < ranks; i++) {
        usleep(1000);
    }
}

/* Rank 0 has much to save: it comes to the commit only when the others know already that rank 3 is dead. */
static ckd_status act_with_a_busy_coordinator(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                              const world *w, uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    ckd_save_options o = options_of(s.run, s.step);
    (void)store;
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    await_informed(rank == 0 ? 2 : 0);
    if (rank == 3 && status == CKD_OK) {
        raise(SIGKILL);
    }
    bool busy = rank != 0 || *informed == 2;
    status = ckd_ranks_commit(info, ranks, save, err);
    ++*informed;
    ckd_error again = {0}; /* without the dead one, nobody knows what comes next */
    bool over =
        ckd_ranks_begin(&save, ranks, &o, &again) == CKD_E_STATE && strstr(again.message, "join again");
    return busy && over ? status : CKD_E_INVALID;
}

static void test_survivors_do_not_wait_for_a_busy_coordinator(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    *informed = 0;
    run_world(out, &(world){.dir = *state, .size = 4, .step = 2, .act = act_with_a_busy_coordinator});
    assert_true(out[3].killed);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_non_null(strstr(out[r].message, "has died or left before its part was there"));
    }
    survivors_check(*state, 3, 3, 2);
}

/* ---- failed ---- */

/* Twice: the second time nothing fails any more. */
static ckd_status act_tries_again(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = save_share(info, ranks, w, w->step, rank, err);
    file_set_fault_hook(NULL, NULL);
    ckd_error again = {0};
    if (status == CKD_OK || save_share(info, ranks, w, w->step, rank, &again) != CKD_OK) {
        if (err) {
            *err = again;
        }
        return CKD_E_INVALID;
    }
    return status;
}

static void test_what_one_cannot_do_fails_on_all(void **state) {
    outcome out[WORLD_MOST];
    static const fate fates[] = {{.rank = 2, .step = STEP_SYNC, .where = ".ckd.tmp", .fail = ENOSPC},
                                 {.rank = 3, .step = STEP_CREATE, .where = ".ckd.tmp", .fail = ENOSPC},
                                 {.rank = 1, .step = STEP_CREATE, .where = "data/i", .fail = ENOSPC},
                                 {.rank = 0, .step = STEP_CREATE, .where = "data/i", .fail = ENOSPC},
                                 {.rank = 0, .step = STEP_CREATE, .where = "data/m", .fail = ENOSPC}};
    for (size_t i = 0; i < sizeof(fates) / sizeof(fates[0]); i++) {
        char *dir = tempdir_create();
        scene_make(dir, 0, 2);
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .fate = &fates[i], .act = act_tries_again});
        char whose[16];
        snprintf(whose, sizeof(whose), "rank %u: ", fates[i].rank);
        for (uint32_t r = 0; r < 4; r++) {
            if (out[r].status != CKD_E_NOSPACE) {
                fail_msg("fate %zu, rank %u: %s", i, r, out[r].message);
            }
            assert_true(fates[i].rank == 0 || strstr(out[r].message, whose));
        }
        survivors_check(dir, 7, 7, 3);
        tempdir_remove(dir);
    }
    (void)state;
}

static ckd_status act_other_steps(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    (void)store;
    return save_share(info, ranks, w, rank == 2 ? 3 : 2, rank, err);
}

static void test_other_steps(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 3, .act = act_other_steps});
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, CKD_E_INVALID);
        assert_non_null(
            strstr(out[r].message, "rank 2 saves another run or step than rank 0, which saves run@2"));
    }
    survivors_check(*state, 3, 3, 2);
}

static void test_who_does_not_come(void **state) {
    ckd_store *store;
    ckd_ranks *ranks;
    ckd_error err = {0};
    scene_make(*state, 0, 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, &err), CKD_OK);
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.world = 3;
    o.timeout_ms = 50;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_BUSY);
    assert_null(ranks);
    assert_non_null(strstr(err.message, "2 of 3 ranks have not joined, the first of them rank 1"));
    o.rank = 1;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_BUSY);
    assert_non_null(strstr(err.message, "rank 0 of 3"));
    o.rank = 3;
    assert_int_equal(ckd_ranks_join(&ranks, store, &o, &err), CKD_E_INVALID);
    ckd_ranks_leave(NULL);
    store_check_clean(*state); /* who gave up has left nothing */
    ckd_store_close(store);
}

/* One rank lives and does not save. */
static ckd_status act_sleeps(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                             uint32_t rank, ckd_error *err) {
    if (rank != 1) {
        return act_saves(info, ranks, store, w, rank, err);
    }
    usleep(1500000);
    return CKD_OK;
}

static void test_deadline(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 3, .step = 2, .timeout_ms = 300, .act = act_sleeps});
    assert_int_equal(out[0].status, CKD_E_BUSY);
    assert_non_null(strstr(out[0].message, "1 of 3 ranks live and do not come, the first of them rank 1"));
    assert_int_not_equal(out[2].status, CKD_OK);
    survivors_check(*state, 3, 3, 2);
}

/* Rank 1 does not come until the others know: for them, too, the group is over, and nobody waits for anybody. */
static ckd_status act_comes_late(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                 uint32_t rank, ckd_error *err) {
    await_informed(rank == 1 ? 2 : 0);
    ckd_status status = act_saves(info, ranks, store, w, rank, err);
    ckd_error again = {0};
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = w->step;
    bool over =
        ckd_ranks_begin(&save, ranks, &o, &again) == CKD_E_STATE && strstr(again.message, "join again");
    ++*informed;
    return over ? status : CKD_E_INVALID;
}

static void test_a_group_is_over_for_all(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    *informed = 0;
    run_world(out,
              &(world){.dir = *state, .size = 3, .step = 2, .first_timeout_ms = 2000, .act = act_comes_late});
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, CKD_E_BUSY);
        assert_non_null(strstr(out[r].message, "the first of them rank 1"));
    }
    survivors_check(*state, 3, 3, 2);
}

/* There is no room for rank 0 to say how it went: it leaves, and the others find out. */
static void test_rank_0_cannot_tell(void **state) {
    outcome out[WORLD_MOST];
    fate f = {.rank = 0, .step = STEP_CREATE, .where = "data/r", .fail = ENOSPC};
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 4, .step = 2, .fate = &f, .act = act_saves});
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_true(r == 0 || strstr(out[r].message, "rank 0 of 4 has died or left"));
    }
    survivors_check(*state, 3, 3, 2);
    f = (fate){.rank = 0, .step = STEP_CREATE, .where = ".6.tmp", .fail = ENOSPC}; /* of the commit */
    all_went_well(&(world){.dir = *state, .size = 4, .step = 3, .fate = &f, .act = act_saves});
}

/* Rank 1 gives up, and cannot take its part back; then rank 0 commits. */
static ckd_status act_gives_up(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    fate stuck = {.step = STEP_LOCK, .where = "data/lock", .fail = EIO};
    (void)store;
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    await_informed(rank == 0 ? 1 : 0);
    if (rank == 1 && status == CKD_OK) {
        file_set_fault_hook(fate_hook, &stuck);
    }
    status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    file_set_fault_hook(NULL, NULL);
    ++*informed;
    await_informed(rank == 1 ? 2 : 0); /* leaving would take it back */
    return status;
}

static void test_what_cannot_be_taken_back(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    *informed = 0;
    run_world(out, &(world){.dir = *state,
                            .size = 2,
                            .step = 2,
                            .timeout_ms = 2000,
                            .first_timeout_ms = PATIENCE_MS,
                            .act = act_gives_up});
    assert_int_equal(out[0].status, CKD_OK);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "rank 1 was not told whether run@2 was committed"));
    survivors_check(*state, 7, 7, 3);
}

/* What is there already and the same, aborted without a reason, and said in bytes that are no UTF-8. */
static void test_one_rank(void **state) {
    ckd_store *store = store_create(*state);
    ckd_ranks *ranks;
    ckd_save *save;
    ckd_checkpoint first, second;
    ckd_ranks_options alone = CKD_RANKS_OPTIONS_INIT;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    float values[64] = {1};
    const uint64_t shape[1] = {64};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.data = values;
    o.run = "run";
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    assert_int_equal(ckd_ranks_join(&ranks, store, &alone, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_save(&first, ranks, &o, &t, 1, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_save(&second, ranks, &o, &t, 1, NULL), CKD_OK);
    assert_memory_equal(&first.id, &second.id, sizeof(ckd_id));
    o.step = 1;
    assert_int_equal(ckd_ranks_begin(&save, ranks, &o, NULL), CKD_OK);
    assert_int_equal(ckd_ranks_abort(ranks, save, &(ckd_error){0}), CKD_E_STATE);
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    store_check_clean(*state);
}

static void test_errors_of_any_bytes(void **state) {
    ckd_error why = {.status = CKD_E_IO, .sys_errno = EIO, .offset = 7}, told;
    (void)state;
    snprintf(why.message, sizeof(why.message), "cannot read /caf\xe9/x");
    snprintf(why.file, sizeof(why.file), "/caf\xe9/x");
    ckd_bytes m = rank_message_write(CKD_E_IO, &why, true, NULL, 0);
    rank_message got = rank_message_read(&m, &told);
    assert_true(got.readable && got.over);
    assert_int_equal(got.status, CKD_E_IO);
    assert_int_equal(told.sys_errno, EIO);
    assert_int_equal(told.offset, 7);
    assert_string_equal(told.message, why.message);
    assert_string_equal(told.file, why.file);
    ckd_bytes_free(&m);
}

/* ---- worlds that change ---- */

enum { ROWS = 256, COLUMNS = 384, WHOLE = 40 };

static float value_at(uint64_t step, uint64_t element) {
    uint64_t noise =
        (element + 1) * UINT64_C(0x9e3779b97f4a7c15); /* so that no base is as small as a delta */
    noise = (noise ^ noise >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(noise >> 40) + (float)(step * (element % 31 == 0));
}

/* Rank's rows of "w", and all of "bias", which every rank has; values are where they were last, or not. */
static ckd_status act_plans(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err) {
    (void)store;
    ckd_status status = CKD_OK;
    const uint64_t shape[2] = {ROWS, COLUMNS}, length[1] = {WHOLE};
    uint64_t first = ROWS * rank / w->size, end = ROWS * (rank + 1) / w->size;
    for (uint64_t step = w->step; step < w->step + 3 && status == CKD_OK; step++) {
        float *values = malloc((end - first) * COLUMNS * sizeof(float) + 4), bias[WHOLE];
        for (uint64_t i = 0; i < (end - first) * COLUMNS; i++) {
            values[i] = value_at(step, first * COLUMNS + i);
        }
        for (uint64_t i = 0; i < WHOLE; i++) {
            bias[i] = value_at(step, i);
        }
        ckd_tensor t[2] = {CKD_TENSOR_INIT, CKD_TENSOR_INIT};
        t[0].name = "w";
        t[0].dtype = CKD_F32;
        t[0].ndim = 2;
        t[0].shape = shape;
        t[0].region =
            (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {end - first, COLUMNS}};
        t[0].data = values;
        t[1].name = "bias";
        t[1].dtype = CKD_F32;
        t[1].ndim = 1;
        t[1].shape = length;
        t[1].data = bias;
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.step = step;
        o.max_load_cost = 100; /* chains end for other shards, if at all */
        status = ckd_ranks_save(info, ranks, &o, t, 2, err);
        free(values);
    }
    return status;
}

static void check_shard(ckd_store *store, uint64_t step, uint32_t rank, uint32_t size) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err = {0};
    uint64_t first = ROWS * rank / size, count = ROWS * (rank + 1) / size - first;
    float *got = malloc(count * COLUMNS * sizeof(float));
    assert_int_equal(ckd_store_find(&c, store, "run", step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {count, COLUMNS}};
    q.data = got;
    q.size = count * COLUMNS * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    for (uint64_t i = 0; i < count * COLUMNS; i++) {
        assert_true(got[i] == value_at(step, first * COLUMNS + i));
    }
    ckd_load_end(load);
    free(got);
}

/* 4 ranks save, 2 go on with the chain, then 1 and 8; any number loads any of it. */
static void test_worlds_change_in_mid_chain(void **state) {
    static const uint32_t sizes[] = {4, 2, 1, 8};
    ckd_store_close(store_create(*state));
    for (uint64_t i = 0; i < 4; i++) {
        all_went_well(&(world){.dir = *state, .size = sizes[i], .step = 3 * i, .act = act_plans});
    }
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    for (uint64_t step = 0; step < 12; step++) {
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, store, "run", step, NULL), CKD_OK);
        assert_int_equal(c.world, sizes[step / 3]);
        assert_int_equal(c.raw_bytes, (ROWS * COLUMNS + WHOLE) * sizeof(float)); /* "bias" once */
        if (step > 0) { /* the first of each world, too: other shards are no reason for a base */
            if (c.kind != CKD_DELTA || c.stored_bytes > c.raw_bytes / 3) {
                fail_msg("step %u by %u ranks: %s of %u bytes", (unsigned)step, (unsigned)c.world,
                         ckd_kind_name(c.kind), (unsigned)c.stored_bytes);
            }
        }
        for (uint32_t size = 1; size <= 8; size++) {
            for (uint32_t rank = 0; rank < size; rank++) {
                check_shard(store, step, rank, size);
            }
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    store_check_clean(*state);
    ckd_store_close(store);
}

/* What the parent has otherwise begins anew, and is told. */
static void test_what_begins_anew(void **state) {
    static const char *const names[] = {"same", "taller", "rounded", "new"};
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, 4096, 1);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save *save = begin_save(store, "run", step);
        uint64_t shape[2] = {32, 64}, taller[2] = {step ? 64 : 32, 64};
        add_tensor(save, names[0], CKD_F32, 2, shape, NULL, values);
        add_tensor(save, names[1], CKD_F32, 2, taller, NULL, values);
        add_tensor(save, names[2], step ? CKD_BF16 : CKD_F32, 2, shape, NULL, values);
        if (step) {
            add_tensor(save, names[3], CKD_F32, 2, shape, NULL, values);
        }
        values[0] += 1;
        assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    }
    ckd_checkpoint c;
    ckd_tensor_list *anew;
    assert_int_equal(ckd_store_find(&c, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(ckd_store_begun_anew(&anew, store, &c.id, NULL), CKD_OK);
    assert_int_equal(anew->count, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_string_equal(anew->items[i].name, names[i + 1]);
    }
    ckd_tensor_list_free(anew);
    assert_int_equal(ckd_store_find(&c, store, "run", 0, NULL), CKD_OK);
    assert_int_equal(ckd_store_begun_anew(&anew, store, &c.id, NULL), CKD_OK);
    assert_int_equal(anew->count, 3); /* a base: all */
    ckd_tensor_list_free(anew);
    free(values);
    ckd_store_close(store);
}

/* The row in the middle twice. */
static ckd_status act_overlaps(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err) {
    (void)store;
    (void)w;
    const uint64_t shape[2] = {9, 4};
    float values[20] = {0};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {rank ? 4 : 0, 0}, .lengths = {5, 4}};
    t.data = values;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    return ckd_ranks_save(info, ranks, &o, &t, 1, err);
}

static void test_layouts_that_do_not_fit(void **state) {
    outcome out[WORLD_MOST];
    ckd_store_close(store_create(*state));
    run_world(out, &(world){.dir = *state, .size = 2, .act = act_overlaps});
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(out[r].status, CKD_E_MISMATCH);
        assert_non_null(strstr(out[r].message, "ranks 0 and 1 both hold its elements [4:5, 0:4]"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_saves_together, setup, teardown),
        cmocka_unit_test_setup_teardown(test_who_does_not_come, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_steps, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deadline, setup, teardown),
        cmocka_unit_test(test_errors_of_any_bytes),
        cmocka_unit_test_setup_teardown(test_one_rank, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_group_is_over_for_all, setup, teardown),
        cmocka_unit_test_setup_teardown(test_rank_0_cannot_tell, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_cannot_be_taken_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_layouts_that_do_not_fit, setup, teardown),
        cmocka_unit_test_setup_teardown(test_worlds_change_in_mid_chain, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_begins_anew, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_one_cannot_do_fails_on_all, setup, teardown),
        cmocka_unit_test_setup_teardown(test_coordinator_dies_behind_the_commit_point, setup, teardown),
        cmocka_unit_test_setup_teardown(test_survivors_do_not_wait_for_a_busy_coordinator, setup, teardown),
        cmocka_unit_test_setup_teardown(test_rank_0_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_another_rank_is_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_last_rank_is_killed, setup, teardown),
    };
    death_ns = mmap(NULL, 2 * sizeof(*death_ns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (death_ns == MAP_FAILED) {
        return 1;
    }
    informed = (_Atomic uint64_t *)(death_ns + 1);
    scratch_begin();
    int failed = cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
    scratch_end();
    return failed;
}
