/*
 * Ranks that save together, one of which hangs: its process does nothing any more, but has its lock. A watch knows that,
 * as an agent's does by the signs of life of its node.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "engine/ranks/ranks.h"
#include "engine/store/store.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"
#include "tests/support/worlds.h"

static uint32_t hung; /* of the next world */

/* Knows that this rank's process does nothing any more, though it has its lock. */
static ckd_status look(void *context, uint32_t rank, uint64_t waited_ns, ckd_error *err) {
    (void)context;
    return rank == hung && waited_ns > UINT64_C(100000000)
               ? err_set(err, CKD_E_STATE, "rank %u does not come", (unsigned)rank)
               : CKD_OK;
}

/* The rank hangs before its commit, and goes on when all others have ended. */
static ckd_status act_hangs(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store, const world *w,
                            uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    uint32_t all[WORLD_MOST], own = rank * 3;
    (void)store;
    ckd_status status = ranks_collect(all, ranks, &own, sizeof(own), err);
    for (uint32_t r = 0; r < w->size && status == CKD_OK; r++) {
        status = all[r] == r * 3 ? CKD_OK : CKD_E_INVALID;
    }
    ranks_watch(ranks, &(rank_watch){.look = look});
    THEN(status, begin_share(&save, ranks, &s, w, rank, err));
    if (status != CKD_OK) {
        return CKD_E_INVALID;
    }
    await_told(rank == hung ? w->size - 1 : 0);
    status = ckd_ranks_commit(info, ranks, save, err);
    tell();
    return status;
}

/* No rank waits for one that hangs, and none commits anything when that one goes on. */
static void test_a_rank_hangs(void **state) {
    for (hung = 0; hung < 3; hung++) {
        outcome out[WORLD_MOST];
        char *dir = tempdir_create(), whose[32];
        scene_make(dir, 0, 2);
        worlds_forget();
        run_world(out, &(world){.dir = dir, .size = 3, .step = 2, .act = act_hangs});
        snprintf(whose, sizeof(whose), "rank %u does not come", (unsigned)hung);
        for (uint32_t r = 0; r < 3; r++) {
            if (out[r].status != CKD_E_STATE || (r != hung && !strstr(out[r].message, whose))) {
                fail_msg("rank %u hung; rank %u: %d, %s", hung, r, out[r].status, out[r].message);
            }
        }
        assert_int_equal(told(), 3); /* the others were through before it went on */
        survivors_check(dir, 3, 3, 2);
        all_went_well(&(world){.dir = dir, .size = 3, .step = 3, .act = act_saves});
        tempdir_remove(dir);
    }
    (void)state;
}

/*
 * What the processes of the next world tell: two that they are about to commit, rank 0 that it hangs, and two that they
 * have ended.
 */
enum { ABOUT_TO_COMMIT = 2, RANK_0_HANGS, OTHERS_HAVE_ENDED = 5 };

/* Hangs before an operation on a file, until all others have ended. */
static int hanging_hook(void *context, file_op step, const char *path) {
    unsigned long *left = context;
    (void)step;
    (void)path;
    if (*left > 0 && --*left == 0) {
        tell();
        await_told(OTHERS_HAVE_ENDED);
    }
    return 0;
}

static ckd_status look_at_rank_0(void *context, uint32_t rank, uint64_t waited_ns, ckd_error *err) {
    (void)context;
    (void)waited_ns;
    return rank == 0 && told() >= RANK_0_HANGS ? err_set(err, CKD_E_STATE, "rank 0 does not come") : CKD_OK;
}

static unsigned long hangs_at; /* in the next world: the number of an operation of rank 0's commit */

static ckd_status act_hangs_in_its_commit(ckd_checkpoint *info, ckd_ranks *ranks, ckd_store *store,
                                          const world *w, uint32_t rank, ckd_error *err) {
    ckd_save *save;
    scene s = scene_of(w->step);
    unsigned long left = hangs_at;
    store->options.lock_timeout_ms = 100; /* rank 0 may hang while it holds the publish lock */
    ranks_watch(ranks, &(rank_watch){.look = look_at_rank_0});
    ckd_status status = begin_share(&save, ranks, &s, w, rank, err);
    if (status != CKD_OK) {
        return CKD_E_INVALID;
    }
    if (rank == 0) {
        await_told(ABOUT_TO_COMMIT);
        file_set_fault_hook(hanging_hook, &left);
    } else {
        tell();
    }
    status = ckd_ranks_commit(info, ranks, save, err);
    file_set_fault_hook(NULL, NULL);
    if (rank != 0) {
        tell();
    }
    return status;
}

/* Wherever rank 0 hangs, and then goes on, either it has committed for all, or for none. */
static void test_rank_0_hangs_anywhere_in_its_commit(void **state) {
    const unsigned long stride = test_stride(11, 3, 1);
    unsigned committed = 0, given_up = 0, unknown = 0;
    bool hung_then = true;
    (void)state;
    for (hangs_at = test_first("operations", stride); hung_then; hangs_at += stride) {
        char *dir = tempdir_create();
        outcome out[WORLD_MOST];
        scene_make(dir, 0, 2);
        worlds_forget();
        run_world(out, &(world){.dir = dir, .size = 3, .step = 2, .act = act_hangs_in_its_commit});
        hung_then = told() == OTHERS_HAVE_ENDED;
        bool well = out[0].status == CKD_OK;
        for (uint32_t r = 1; r < 3; r++) {
            bool known = !strstr(out[r].message, "does not know whether");
            unknown += !known;
            if (known && (out[r].status == CKD_OK) != well) {
                fail_msg("at %lu: rank 0: %d (%s), rank %u: %d (%s)", hangs_at, (int)out[0].status,
                         out[0].message, r, (int)out[r].status, out[r].message);
            }
        }
        survivors_check(dir, well ? 7 : 3, well ? 7 : 3, well ? 3 : 2);
        committed += hung_then && well;
        given_up += hung_then && !well;
        tempdir_remove(dir);
    }
    print_message("%u were committed, %u given up; %u ranks did not know\n", committed, given_up, unknown);
    assert_true(given_up > 0 && (committed > 0 || stride > 1));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rank_hangs),
        cmocka_unit_test(test_rank_0_hangs_anywhere_in_its_commit),
    };
    worlds_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    worlds_end();
    return failed;
}
