/*
 * Ranks that save together, one of which is killed: at any file operation, at any time, and while the others are busy.
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
#include <unistd.h>

#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

/*
 * All survivors agree, and the store agrees with them: the earlier checkpoints exist, and step 2 if the survivors say
 * so.
 */
static void judge(const char *dir, const outcome out[WORLD_MOST], uint32_t victim, unsigned *late,
                  double *longest) {
    unsigned well = 0, badly = 0;
    for (uint32_t r = 0; r < 4; r++) {
        double seconds = out[victim].killed && !out[r].killed && out[r].ended_ns > death_time_ns()
                             ? (double)(out[r].ended_ns - death_time_ns()) / 1e9
                             : 0;
        *longest = seconds > *longest ? seconds : *longest;
        well += !out[r].killed && out[r].status == CKD_OK;
        badly += !out[r].killed && out[r].status != CKD_OK;
        if (!out[r].killed && out[r].status != CKD_OK && !strstr(out[r].message, "rank ")) {
            fail_msg("rank %u does not say whose fault it was: %s", r, out[r].message);
        }
    }
    assert_true(well == 0 || badly == 0);
    *late += well > 0 && out[victim].killed;
    survivors_check(dir, well ? 7 : 3, 7, 2);
    assert_true(well > 0 || !out[victim].killed || badly == 3);
}

/* Returns false if the rank finished without being killed. */
static bool kill_once(const char *template, uint32_t victim, unsigned long at, unsigned *late,
                      double *longest) {
    char *dir = tempdir_create(), store[1024];
    outcome out[WORLD_MOST];
    fate f = {.rank = victim, .at = at, .torn = at % 2};
    snprintf(store, sizeof(store), "%s/store", dir);
    tree_copy(store_path_of(template, ""), store);
    run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .fate = &f, .act = act_plans_and_saves});
    judge(dir, out, victim, late, longest);
    tempdir_remove(dir);
    return out[victim].killed;
}

static void kill_everywhere(const char *template, uint32_t victim) {
    const unsigned long stride = under_sanitizer() ? 7 : test_stride(5, 1, 1);
    unsigned long at = test_first(victim ? "another rank" : "rank 0", stride), kills = 0;
    unsigned late = 0;
    double longest = 0;
    for (; kill_once(template, victim, at, &late, &longest); at += stride) {
        kills++;
    }
    print_message(
        "rank %u killed at %lu steps, after the commit at %u; the others knew after %.2f s at most\n", victim,
        kills, late, longest);
    assert_true(kills >= (stride > 1 ? 3 : 20));
    assert_true(stride > 1 || late >= 1);
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

/* The manifest is the commit point, whichever rank survives it. */
static void test_coordinator_dies_after_the_commit_point(void **state) {
    outcome out[WORLD_MOST];
    static const struct {
        file_op step;
        const char *where;
        bool committed;
    } deaths[] = {{FILE_OP_RENAME_NOREPLACE, "data/m/run", false},
                  {FILE_OP_DIR_SYNC, "data/m", true},
                  {FILE_OP_SYNC, "catalog.db", true}};
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

static int unsyncable_hook(void *context, file_op step, const char *path) {
    (void)context;
    size_t length = strlen(path), end = strlen("/data/m");
    return step == FILE_OP_DIR_SYNC && length > end && strcmp(path + length - end, "/data/m") == 0 ? EIO : 0;
}

static ckd_status act_cannot_sync(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                  uint32_t rank, ckd_error *err) {
    if (rank == 1) {
        file_set_fault_hook(unsyncable_hook, NULL);
    }
    return act_saves(info, ranks, store, w, rank, err);
}

/* Rank 0 died when it had named the manifest. Nobody has made the name durable, so that nothing is promised. */
static void test_coordinator_dies_before_its_sync(void **state) {
    outcome out[WORLD_MOST];
    fate f = {.rank = 0, .step = FILE_OP_DIR_SYNC, .where = "data/m"};
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 2, .step = 2, .fate = &f, .act = act_cannot_sync});
    assert_true(out[0].killed);
    assert_int_equal(out[1].status, CKD_E_STATE);
    assert_non_null(strstr(out[1].message, "rank 1 does not know whether run@2 was committed"));
    survivors_check(*state, 3, 7, 2);
}

/* Rank 0 has much to save, and commits only after the others know that rank 3 is dead. */
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
    await_told(rank == 0 ? 2 : 0);
    if (rank == 3 && status == CKD_OK) {
        raise(SIGKILL);
    }
    bool busy = rank != 0 || told() == 2;
    status = ckd_ranks_commit(info, ranks, save, err);
    tell();
    ckd_error again = {0}; /* after a death the group cannot continue */
    bool over = ckd_ranks_begin(&save, ranks, &o, &again) == CKD_E_STATE &&
                strstr(again.message, "call ckd_ranks_leave, then ckd_ranks_join");
    return busy && over ? status : CKD_E_INVALID;
}

static void test_survivors_do_not_wait_for_a_busy_coordinator(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    worlds_forget();
    run_world(out, &(world){.dir = *state, .size = 4, .step = 2, .act = act_with_a_busy_coordinator});
    assert_true(out[3].killed);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_non_null(strstr(out[r].message, "has died or left before it had sent its part"));
    }
    survivors_check(*state, 3, 3, 2);
}

/* ---- killed at any time ---- */

static uint32_t victim; /* of the next world */

static ckd_status act_may_die_soon(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                   uint32_t rank, ckd_error *err) {
    if (rank == victim) {
        die_in(clock_monotonic_ns() % 64 * 1000000); /* roughly as long as the whole save takes */
    }
    return act_plans_and_saves(info, ranks, store, w, rank, err);
}

static void test_killed_at_any_time(void **state) {
    unsigned late = 0, kills = 0, times = under_sanitizer() ? 8 : (unsigned)test_pick(12, 40, 40);
    double longest = 0;
    scene_make(*state, 0, 2);
    for (unsigned i = 0; i < times; i++) {
        char *dir = tempdir_create(), store[1024];
        outcome out[WORLD_MOST];
        snprintf(store, sizeof(store), "%s/store", dir);
        tree_copy(store_path_of(*state, ""), store);
        victim = i % 4;
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .act = act_may_die_soon});
        judge(dir, out, victim, &late, &longest);
        all_went_well(&(world){.dir = dir, .size = 4, .step = 3, .act = act_saves}); /* a new group */
        kills += out[victim].killed;
        tempdir_remove(dir);
    }
    print_message("killed %u times of %u, after the commit %u; the others knew after %.2f s at most\n", kills,
                  times, late, longest);
    assert_true(kills > 0);
}

/* ---- killed while the others are busy ---- */

/* A tensor so large that no rank finishes it before it learns that the save has failed. */
#define ENDLESS (UINT64_C(1) << 33)

static ckd_status read_endless(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    float *out = to;
    uint64_t *end = context;
    (void)err;
    for (uint64_t i = 0; i < count; i++) {
        out[i] = (float)((first + i) % 251);
    }
    if (*end == 0) {
        tell();
    }
    *end = first + count;
    return CKD_OK;
}

static ckd_fidelity busy_with; /* of the next world */

static uint64_t die_at; /* the victim's death waits for so many calls of tell */

/* The victim waits until all other ranks are saving a tensor. */
static ckd_status act_is_busy(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                              uint32_t rank, ckd_error *err) {
    ckd_save *save;
    ckd_save_options o = options_of("run", w->step);
    const uint64_t shape[2] = {ENDLESS >> 12, 1 << 12};
    char name[32];
    uint64_t end = 0;
    ckd_tensor t = CKD_TENSOR_INIT;
    (void)info;
    (void)store;
    o.fidelity = busy_with;
    ckd_status status = ckd_ranks_begin(&save, ranks, &o, err);
    if (status != CKD_OK) {
        return status;
    }
    if (rank == victim) {
        await_told(die_at);
        die_now();
    }
    snprintf(name, sizeof(name), "long.%u.weight", (unsigned)rank);
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.read = read_endless;
    t.read_context = &end;
    status = ckd_save_tensor(save, &t, err);
    return end == ENDLESS ? CKD_E_INVALID : ckd_ranks_abort(ranks, save, err);
}

static void test_survivors_stop_within_a_tensor(void **state) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR};
    outcome out[WORLD_MOST];
    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        char *dir = tempdir_create(), whose[64];
        scene_make(dir, 0, 2);
        worlds_forget();
        victim = i < 2 ? 2 : 0;
        die_at = 3;
        busy_with = fidelities[i % 2];
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .act = act_is_busy});
        double longest = 0;
        snprintf(whose, sizeof(whose), "rank %u of 4 has died or left", (unsigned)victim);
        for (uint32_t r = 0; r < 4; r++) {
            double seconds = r == victim ? 0 : (double)(out[r].ended_ns - death_time_ns()) / 1e9;
            longest = seconds > longest ? seconds : longest;
            if (r != victim && (out[r].status != CKD_E_STATE || !strstr(out[r].message, whose))) {
                fail_msg("rank %u: %d, %s", r, (int)out[r].status, out[r].message);
            }
        }
        print_message("rank %u killed, the others knew after %.2f s\n", (unsigned)victim, longest);
        survivors_check(dir, 3, 3, 2);
        all_went_well(&(world){.dir = dir, .size = 4, .step = 3, .act = act_saves});
        tempdir_remove(dir);
    }
}

/* Rank 2 has seen rank 0 alive, and looks at rank 1 only when rank 1 has left because rank 0 died. */
static int slow_look_hook(void *context, file_op step, const char *path) {
    static bool was_slow;
    const char *end = path + strlen(path);
    (void)context;
    if (!was_slow && step == FILE_OP_LOCK && told() == 3 && end - path > 4 && strcmp(end - 4, "-1-4") == 0) {
        was_slow = true;
        tell();
        for (unsigned i = 0; i < 20000 && access(path, F_OK) == 0; i++) {
            usleep(1000);
        }
    }
    return 0;
}

static void before_a_slow_look(const world *w, uint32_t rank) {
    (void)w;
    file_set_fault_hook(rank == 2 ? slow_look_hook : NULL, NULL);
}

static void test_a_rank_that_leaves_is_not_taken_for_the_dead_one(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    worlds_forget();
    victim = 0;
    die_at = 4;
    busy_with = CKD_EXACT;
    run_world(
        out, &(world){.dir = *state, .size = 4, .step = 2, .before = before_a_slow_look, .act = act_is_busy});
    assert_int_equal(told(), 4);
    for (uint32_t r = 1; r < 4; r++) {
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_non_null(strstr(out[r].message, "rank 0 of 4 has died or left"));
    }
    survivors_check(*state, 3, 3, 2);
}

/* ---- killed while they join ---- */

/* The rank has looked for another rank twice, so that one was there at least the first time. */
static int joining_hook(void *context, file_op step, const char *path) {
    static unsigned times;
    const char *peer = context, *end = path + strlen(path);
    if (step == FILE_OP_LOCK && end - path > 4 && strcmp(end - 4, peer) == 0 && ++times == 2) {
        tell();
    }
    return 0;
}

static int seen_hook(void *context, file_op step, const char *path) {
    (void)context;
    (void)step;
    (void)path;
    if (told() == 2) {
        die_now();
    }
    return 0;
}

/* Rank 0 looks for rank 2, rank 1 looks for rank 0, rank 3 never joins. */
static void before_joining(const world *w, uint32_t rank) {
    static char peers[2][5] = {"-2-4", "-0-4"};
    (void)w;
    file_set_fault_hook(rank == 2 ? seen_hook : joining_hook, peers[rank % 2]);
}

static void test_killed_while_others_join(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    worlds_forget();
    run_world(
        out,
        &(world){
            .dir = *state, .size = 4, .started = 3, .step = 2, .before = before_joining, .act = act_saves});
    assert_true(out[2].killed);
    for (uint32_t r = 0; r < 2; r++) {
        char whose[64];
        snprintf(whose, sizeof(whose), "rank %u of 4 has died or left before all had joined",
                 r == 0 ? 2u : 0u);
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_non_null(strstr(out[r].message, whose));
    }
    all_went_well(&(world){.dir = *state, .size = 4, .step = 2, .act = act_saves});
    survivors_check(*state, 7, 7, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_coordinator_dies_after_the_commit_point),
        tempdir_test(test_coordinator_dies_before_its_sync),
        tempdir_test(test_survivors_do_not_wait_for_a_busy_coordinator),
        tempdir_test(test_killed_while_others_join),
        tempdir_test(test_survivors_stop_within_a_tensor),
        tempdir_test(test_a_rank_that_leaves_is_not_taken_for_the_dead_one),
        tempdir_test(test_killed_at_any_time),
        tempdir_test(test_rank_0_is_killed),
        tempdir_test(test_another_rank_is_killed),
        tempdir_test(test_the_last_rank_is_killed),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests_name("killed ranks", tests, NULL, NULL);
    worlds_end();
    return failed;
}
