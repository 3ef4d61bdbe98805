/* Ranks that save together, one of which cannot, or does not come, or gives up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <unistd.h>

#include "tests/support/checkpoints.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

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
    static const fate fates[] = {{.rank = 2, .step = FILE_OP_SYNC, .where = ".ckd.tmp", .fail = ENOSPC},
                                 {.rank = 3, .step = FILE_OP_CREATE, .where = ".ckd.tmp", .fail = ENOSPC},
                                 {.rank = 1, .step = FILE_OP_CREATE, .where = "data/i", .fail = ENOSPC},
                                 {.rank = 0, .step = FILE_OP_CREATE, .where = "data/i", .fail = ENOSPC},
                                 {.rank = 0, .step = FILE_OP_CREATE, .where = "data/m", .fail = ENOSPC}};
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
    assert_non_null(strstr(
        out[0].message,
        "timed out: 1 of 3 ranks are alive but have not joined this exchange, the first of them rank 1"));
    assert_int_not_equal(out[2].status, CKD_OK);
    survivors_check(*state, 3, 3, 2);
}

/* Rank 1 does not come until the others know: for them, too, the group is over, and nobody waits for anybody. */
static ckd_status act_comes_late(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                 uint32_t rank, ckd_error *err) {
    await_told(rank == 1 ? 2 : 0);
    ckd_status status = act_saves(info, ranks, store, w, rank, err);
    ckd_error again = {0};
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = w->step;
    bool over = ckd_ranks_begin(&save, ranks, &o, &again) == CKD_E_STATE &&
                strstr(again.message, "call ckd_ranks_leave, then ckd_ranks_join");
    tell();
    return over ? status : CKD_E_INVALID;
}

static void test_a_group_is_over_for_all(void **state) {
    outcome out[WORLD_MOST];
    scene_make(*state, 0, 2);
    worlds_forget();
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
    fate f = {.rank = 0, .step = FILE_OP_CREATE, .where = "data/r", .fail = ENOSPC};
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 4, .step = 2, .fate = &f, .act = act_saves});
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(out[r].status, CKD_E_STATE);
        assert_true(r == 0 || strstr(out[r].message, "rank 0 of 4 has died or left"));
    }
    survivors_check(*state, 3, 3, 2);
    f = (fate){.rank = 0, .step = FILE_OP_CREATE, .where = ".6.tmp", .fail = ENOSPC}; /* of the commit */
    all_went_well(&(world){.dir = *state, .size = 4, .step = 3, .fate = &f, .act = act_saves});
}

/* ---- a commit that others have given up ---- */

/* Of the rank that gives up: it cannot get the publish lock, or not even say that it gives up. */
typedef struct trouble {
    bool lock, saying;
} trouble;

static int trouble_hook(void *context, file_op step, const char *path) {
    const trouble *t = context;
    bool decision = strstr(path, "data/r/") && strlen(strrchr(path, '/')) > 2 * (CKD_ID_TEXT - 1);
    return (t->lock && step == FILE_OP_LOCK && strstr(path, "data/lock")) ||
                   (t->saying && step == FILE_OP_CREATE && decision)
               ? EIO
               : 0;
}

/* Rank 1 does not wait long, and in trouble cannot take its part back; rank 0 comes when it has given up. */
static ckd_status give_up(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint32_t rank, trouble t,
                          ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    await_told(rank == 0 ? 1 : 0);
    if (rank == 1 && status == CKD_OK) {
        file_set_fault_hook(trouble_hook, &t);
    }
    status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    file_set_fault_hook(NULL, NULL);
    tell();
    await_told(rank == 1 ? 2 : 0); /* leaving would take it back */
    return status;
}

static ckd_status act_gives_up_silently(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                        const world *w, uint32_t rank, ckd_error *err) {
    (void)store;
    return give_up(info, ranks, w, rank, (trouble){.lock = true, .saying = true}, err);
}

static ckd_status act_gives_up(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                               uint32_t rank, ckd_error *err) {
    (void)store;
    return give_up(info, ranks, w, rank, (trouble){.lock = true}, err);
}

static world with_an_impatient_rank(const char *dir,
                                    ckd_status (*act)(ckd_checkpoint *, ckd_ranks *, ckd_store *,
                                                      const world *, uint32_t, ckd_error *)) {
    scene_make(dir, 0, 2);
    worlds_forget();
    return (world){
        .dir = dir, .size = 2, .step = 2, .timeout_ms = 2000, .first_timeout_ms = PATIENCE_MS, .act = act};
}

static void test_what_cannot_be_taken_back(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up_silently);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_OK);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "rank 1 does not know whether run@2 was committed"));
    survivors_check(*state, 7, 7, 3);
}

static void test_what_was_given_up_is_not_committed(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_E_STATE);
    assert_non_null(strstr(out[0].message, "rank 1 of 2 gave up the save"));
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "timed out: rank 0 of 2 is alive but does not answer"));
    survivors_check(*state, 3, 3, 2);
}

/* Rank 0 has claimed the commit, and is about to name the manifest, when rank 1 gives up, and then waits for the publish lock. */
static int claimed_hook(void *context, file_op step, const char *path) {
    (void)context;
    if (step == FILE_OP_RENAME_NOREPLACE && strstr(path, "data/m/")) {
        tell();
        await_told(2);
    }
    return 0;
}

static int waiting_hook(void *context, file_op step, const char *path) {
    bool *said = context;
    if (step == FILE_OP_LOCK && strstr(path, "data/lock") && !*said) {
        *said = true;
        tell();
    }
    return 0;
}

static int waiting_without_reading_hook(void *context, file_op step, const char *path) {
    return step == FILE_OP_OPEN && strstr(path, "data/m/" SCENE_RUN ".2.")
               ? EIO
               : waiting_hook(context, step, path);
}

static ckd_status give_up_late(ckd_checkpoint *info, ckd_ranks *ranks, const world *w, uint32_t rank,
                               file_fault_fn waiting, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    bool said = false;
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    file_set_fault_hook(rank == 0 ? claimed_hook : waiting, &said);
    status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    file_set_fault_hook(NULL, NULL);
    return rank == 0 || said ? status : CKD_E_INVALID;
}

static ckd_status act_gives_up_late(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                    uint32_t rank, ckd_error *err) {
    (void)store;
    return give_up_late(info, ranks, w, rank, waiting_hook, err);
}

static ckd_status act_gives_up_late_and_cannot_read(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                                    const world *w, uint32_t rank, ckd_error *err) {
    (void)store;
    return give_up_late(info, ranks, w, rank, waiting_without_reading_hook, err);
}

static void test_who_comes_too_late_to_give_up_is_told(void **state) {
    world w = with_an_impatient_rank(*state, act_gives_up_late);
    all_went_well(&w);
    survivors_check(*state, 7, 7, 3);
}

/* It must not say that nothing was committed. */
static void test_who_cannot_read_the_manifest_does_not_know(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up_late_and_cannot_read);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_OK);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(
        strstr(out[1].message, "does not know whether run@2 was committed, as a manifest cannot be read"));
    survivors_check(*state, 7, 7, 3);
}

/* Rank 1's time is over when rank 0 comes to the commit, or is not, by chance. */
static ckd_status act_gives_up_about_now(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                         const world *w, uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    trouble t = {.lock = true};
    (void)store;
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    if (rank == 0) {
        usleep((useconds_t)(270 + clock_monotonic_ns() % 60) * 1000);
    } else {
        file_set_fault_hook(trouble_hook, &t);
    }
    status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    file_set_fault_hook(NULL, NULL);
    tell();
    await_told(2);
    return status;
}

static void test_both_know_the_same_however_late(void **state) {
    unsigned committed = 0, times = under_sanitizer() ? 8 : 30, not_told = 0;
    (void)state;
    for (unsigned i = 0; i < times; i++) {
        char *dir = tempdir_create();
        outcome out[WORLD_MOST];
        world w = with_an_impatient_rank(dir, act_gives_up_about_now);
        w.timeout_ms = 300; /* of joining, too */
        run_world(out, &w);
        bool known = !strstr(out[1].message, "rank 1 does not know whether");
        if (known && (out[0].status == CKD_OK) != (out[1].status == CKD_OK)) {
            fail_msg("rank 0: %d (%s), rank 1: %d (%s)", (int)out[0].status, out[0].message,
                     (int)out[1].status, out[1].message);
        }
        bool well = out[0].status == CKD_OK;
        survivors_check(dir, well ? 7 : 3, well ? 7 : 3, well ? 3 : 2);
        committed += well;
        not_told += !known;
        tempdir_remove(dir);
    }
    print_message("%u of %u were committed, of %u of them rank 1 did not know\n", committed, times, not_told);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_deadline),
        tempdir_test(test_a_group_is_over_for_all),
        tempdir_test(test_rank_0_cannot_tell),
        tempdir_test(test_what_cannot_be_taken_back),
        tempdir_test(test_what_was_given_up_is_not_committed),
        tempdir_test(test_who_comes_too_late_to_give_up_is_told),
        tempdir_test(test_who_cannot_read_the_manifest_does_not_know),
        tempdir_test(test_both_know_the_same_however_late),
        tempdir_test(test_what_one_cannot_do_fails_on_all),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests_name("failed ranks", tests, NULL, NULL);
    worlds_end();
    return failed;
}
