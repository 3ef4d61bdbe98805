/* Ranks that save together, one of which fails, does not arrive, or gives up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

/* Saves twice. The second time nothing fails. */
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

static void test_failures_of_one_rank_fail_on_all(void **state) {
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

/* Rank 1 is alive but does not save. */
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

/* Rank 1 arrives only after the others have timed out. The group has ended for rank 1 too, and nobody waits. */
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

static void test_groups_end_for_all(void **state) {
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

/* Rank 0 has no space to write its result, and says so. It leaves, and the others notice. */
static void test_rank_0_cannot_write_its_result(void **state) {
    outcome out[WORLD_MOST];
    fate f = {.rank = 0, .step = FILE_OP_CREATE, .where = "data/r", .fail = ENOSPC};
    scene_make(*state, 0, 2);
    run_world(out, &(world){.dir = *state, .size = 4, .step = 2, .fate = &f, .act = act_saves});
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(out[r].status, r == 0 ? CKD_E_NOSPACE : CKD_E_STATE);
        assert_true(r == 0 || strstr(out[r].message, "rank 0 of 4 has died or left"));
    }
    survivors_check(*state, 3, 3, 2);
    /* The result of the commit. */
    f = (fate){.rank = 0, .step = FILE_OP_CREATE, .where = ".6.tmp", .fail = ENOSPC};
    all_went_well(&(world){.dir = *state, .size = 4, .step = 3, .fate = &f, .act = act_saves});
}

/* ---- a full disk ---- */

enum { NOT_LONG_MS = PATIENCE_MS / 4 };

/* The ranks' file operations that need room are counted together. Some of them find none. */
static struct disk {
    _Atomic unsigned long used;
    unsigned long from, until;
    bool holds_all; /* false: messages only */
} * disk;

static int disk_hook(void *context, file_op step, const char *path) {
    (void)context;
    bool needs_room = step == FILE_OP_CREATE || step == FILE_OP_WRITE;
    if (!needs_room || (!disk->holds_all && !strstr(path, "/data/r/"))) {
        return 0;
    }
    unsigned long at = ++disk->used;
    return at >= disk->from && at < disk->until ? ENOSPC : 0;
}

static void meet(uint64_t times, const world *w) {
    tell();
    await_told(times * w->size);
}

/* A trainer goes on when its save has failed. No rank leaves before all have ended, and none has waited for the timeout. */
static ckd_status stay(ckd_status status, uint64_t begun_ns, const world *w, ckd_error *err) {
    uint64_t ms = (clock_monotonic_ns() - begun_ns) / 1000000;
    meet(2, w);
    return ms < NOT_LONG_MS ? status
                            : err_set(err, CKD_E_INVALID, "the save took %llu ms", (unsigned long long)ms);
}

static ckd_status act_saves_and_stays(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                      const world *w, uint32_t rank, ckd_error *err) {
    (void)store;
    meet(1, w); /* one that still joins would not find the group */
    uint64_t begun_ns = clock_monotonic_ns();
    ckd_status status = save_share(info, ranks, w, w->step, rank, err);
    return stay(status, begun_ns, w, err);
}

static ckd_status act_saves_on_the_disk(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                        const world *w, uint32_t rank, ckd_error *err) {
    meet(1, w);
    file_set_fault_hook(disk_hook, NULL);
    uint64_t begun_ns = clock_monotonic_ns();
    ckd_status status = act_plans_and_saves(info, ranks, store, w, rank, err);
    file_set_fault_hook(NULL, NULL);
    return stay(status, begun_ns, w, err);
}

/* One message finds no room: 1 to 4 begin the save, 5 and 6 commit it. Rank 0 sends the even ones. */
static void test_a_message_without_room(void **state) {
    outcome out[WORLD_MOST];
    char where[16], who[64];
    for (uint32_t number = 1; number <= 6; number++) {
        for (uint32_t sender = number % 2; sender < 4; sender += number % 2 ? 2 : 4) {
            char *dir = tempdir_create();
            bool committed = number == 6;
            fate f = {.rank = sender, .step = FILE_OP_WRITE, .where = where, .fail = ENOSPC};
            snprintf(where, sizeof(where), ".%u.tmp", (unsigned)number);
            snprintf(who, sizeof(who), "rank %u of 4 has died or left", (unsigned)sender);
            scene_make(dir, 0, 2);
            worlds_forget();
            run_world(out,
                      &(world){.dir = dir, .size = 4, .step = 2, .fate = &f, .act = act_saves_and_stays});
            for (uint32_t r = 0; r < 4; r++) {
                ckd_status expected = committed ? CKD_OK : r == sender ? CKD_E_NOSPACE : CKD_E_STATE;
                if (out[r].status != expected || (expected == CKD_E_STATE && !strstr(out[r].message, who))) {
                    fail_msg("message %u, rank %u: %s", number, r, out[r].message);
                }
            }
            survivors_check(dir, committed ? 7 : 3, committed ? 7 : 3, committed ? 3 : 2);
            tempdir_remove(dir);
        }
    }
    (void)state;
}

/* A rank cannot read one message. Rank 0 reads the odd ones of all others, they read its even ones. */
static void test_a_message_that_cannot_be_read(void **state) {
    outcome out[WORLD_MOST];
    char where[16], who[64];
    for (uint32_t number = 1; number <= 6; number++) {
        char *dir = tempdir_create();
        bool committed = number == 6;
        uint32_t blind = number % 2 ? 0 : 2;
        fate f = {.rank = blind, .step = FILE_OP_READ, .where = where, .fail = EIO};
        snprintf(where, sizeof(where), ".%u", (unsigned)number);
        snprintf(who, sizeof(who), "rank %u of 4 has died or left", (unsigned)blind);
        scene_make(dir, 0, 2);
        worlds_forget();
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .fate = &f, .act = act_saves_and_stays});
        for (uint32_t r = 0; r < 4; r++) {
            ckd_status expected = committed ? CKD_OK : r == blind || blind == 0 ? CKD_E_IO : CKD_E_STATE;
            if (out[r].status != expected || (expected == CKD_E_STATE && !strstr(out[r].message, who))) {
                fail_msg("message %u, rank %u: %s", number, r, out[r].message);
            }
        }
        survivors_check(dir, committed ? 7 : 3, committed ? 7 : 3, committed ? 3 : 2);
        tempdir_remove(dir);
    }
    (void)state;
}

/*
 * All ranks come to the same end, unless one says that it does not know. A checkpoint that a rank calls committed is there,
 * and one that all call failed is not.
 */
static void judge_full_disk(const char *dir, const outcome out[WORLD_MOST], unsigned long *well,
                            unsigned long *unknown) {
    unsigned good = 0, bad = 0, unsure = 0;
    for (uint32_t r = 0; r < 4; r++) {
        bool knows = !strstr(out[r].message, "does not know whether");
        if (out[r].status != CKD_OK && out[r].status != CKD_E_NOSPACE && out[r].status != CKD_E_STATE) {
            fail_msg("from %lu until %lu, rank %u: %s", disk->from, disk->until, r, out[r].message);
        }
        good += out[r].status == CKD_OK;
        unsure += out[r].status != CKD_OK && !knows;
        bad += out[r].status != CKD_OK && knows;
    }
    if (good && bad) {
        fail_msg("from %lu until %lu: %u ranks say that it was committed, %u that it was not", disk->from,
                 disk->until, good, bad);
    }
    survivors_check(dir, good ? 7 : 3, good || !bad ? 7 : 3, bad ? 2 : 3);
    *well += good > 0;
    *unknown += unsure > 0;
}

/* The disk is full for so many operations, at any moment of the save. */
static void fill_everywhere(const char *template, bool holds_all, unsigned long width) {
    const unsigned long stride = under_sanitizer() ? 23 : test_stride(13, 1, 1);
    unsigned long runs = 0, well = 0, unknown = 0, from;
    for (from = test_first(holds_all ? "all" : "messages", stride);; from += stride) {
        char *dir = tempdir_create(), store[1024];
        outcome out[WORLD_MOST];
        snprintf(store, sizeof(store), "%s/store", dir);
        tree_copy(store_path_of(template, ""), store);
        worlds_forget();
        *disk = (struct disk){.from = from, .until = from + width, .holds_all = holds_all};
        run_world(out, &(world){.dir = dir, .size = 4, .step = 2, .act = act_saves_on_the_disk});
        judge_full_disk(dir, out, &well, &unknown);
        tempdir_remove(dir);
        runs++;
        if (disk->used < from) {
            break;
        }
    }
    print_message("full at %lu moments: %lu times committed, %lu times a rank did not know\n", runs, well,
                  unknown);
    assert_true(well >= 1 && well < runs);
}

static void test_a_full_disk(void **state) {
    scene_make(*state, 0, 2);
    for (unsigned i = 0; i < 2; i++) {
        fill_everywhere(*state, i == 1, 1);
        fill_everywhere(*state, i == 1, 6);
        fill_everywhere(*state, i == 1, 1000000);
    }
}

/* ---- commits that another rank gave up ---- */

/*
 * What goes wrong for the rank that gives up: it cannot take the publish lock, or cannot even write that it gives up.
 */
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

/* Rank 1 times out early and, if in trouble, cannot withdraw its part. Rank 0 commits after that. */
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
    await_told(rank == 1 ? 2 : 0); /* leaving would withdraw the part */
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

static void test_parts_that_cannot_be_withdrawn(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up_silently);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_OK);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "rank 1 does not know whether run@2 was committed"));
    survivors_check(*state, 7, 7, 3);
}

static void test_withdrawn_parts_are_not_committed(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_E_STATE);
    assert_non_null(strstr(out[0].message, "rank 1 of 2 gave up the save"));
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "timed out: rank 0 of 2 is alive but does not answer"));
    survivors_check(*state, 3, 3, 2);
}

/*
 * Rank 0 has claimed the commit and is about to name the manifest when rank 1 gives up. Rank 1 then waits for the
 * publish lock.
 */
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

static void test_giving_up_after_the_commit(void **state) {
    world w = with_an_impatient_rank(*state, act_gives_up_late);
    all_went_well(&w);
    survivors_check(*state, 7, 7, 3);
}

/* It must not say that nothing was committed. */
static void test_manifests_that_cannot_be_read(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_gives_up_late_and_cannot_read);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_OK);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "does not know whether run@2 was committed, as it cannot look: "));
    survivors_check(*state, 7, 7, 3);
}

/*
 * Rank 0 has named the manifest. Its sync fails only after rank 1, which cannot take the publish lock, has seen the
 * name.
 */
static int failing_sync_hook(void *context, file_op step, const char *path) {
    bool *failed = context;
    size_t length = strlen(path), end = strlen("/data/m");
    if (*failed || step != FILE_OP_DIR_SYNC || length < end || strcmp(path + length - end, "/data/m") != 0) {
        return 0;
    }
    *failed = true;
    tell();
    await_told(2);
    return EIO;
}

static ckd_status act_takes_back(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                                 uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    bool failed = false;
    trouble t = {.lock = true};
    (void)store;
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (!save) {
        return status;
    }
    file_set_fault_hook(rank == 0 ? failing_sync_hook : trouble_hook, rank == 0 ? (void *)&failed : &t);
    status = status == CKD_OK ? ckd_ranks_commit(info, ranks, save, err) : status;
    file_set_fault_hook(NULL, NULL);
    if (rank == 1) {
        tell();
    }
    return rank == 1 || failed ? status : CKD_E_INVALID;
}

/* Nothing was committed, whatever rank 1 saw meanwhile. */
static void test_a_commit_that_is_taken_back(void **state) {
    outcome out[WORLD_MOST];
    world w = with_an_impatient_rank(*state, act_takes_back);
    run_world(out, &w);
    assert_int_equal(out[0].status, CKD_E_IO);
    assert_int_equal(out[1].status, CKD_E_BUSY);
    assert_non_null(strstr(out[1].message, "rank 1 does not know whether run@2 was committed"));
    survivors_check(*state, 3, 3, 2);
}

/* Rank 1 times out at about the moment when rank 0 commits. */
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

static void test_giving_up_during_the_commit(void **state) {
    unsigned committed = 0, times = under_sanitizer() ? 8 : 30, not_told = 0;
    (void)state;
    for (unsigned i = 0; i < times; i++) {
        char *dir = tempdir_create();
        outcome out[WORLD_MOST];
        world w = with_an_impatient_rank(dir, act_gives_up_about_now);
        w.timeout_ms = 300; /* also of joining */
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
        tempdir_test(test_groups_end_for_all),
        tempdir_test(test_manifests_that_cannot_be_read),
        tempdir_test(test_rank_0_cannot_write_its_result),
        tempdir_test(test_a_message_without_room),
        tempdir_test(test_a_message_that_cannot_be_read),
        tempdir_test(test_a_full_disk),
        tempdir_test(test_parts_that_cannot_be_withdrawn),
        tempdir_test(test_withdrawn_parts_are_not_committed),
        tempdir_test(test_giving_up_after_the_commit),
        tempdir_test(test_a_commit_that_is_taken_back),
        tempdir_test(test_giving_up_during_the_commit),
        tempdir_test(test_failures_of_one_rank_fail_on_all),
    };
    worlds_begin();
    disk = mmap(NULL, sizeof(*disk), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (disk == MAP_FAILED) {
        perror("no shared memory");
        abort();
    }
    int failed = cmocka_run_group_tests_name("failed ranks", tests, NULL, NULL);
    worlds_end();
    return failed;
}
