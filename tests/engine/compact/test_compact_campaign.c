/*
 * A compaction and a training that saves run side by side, and each may be killed at some step. Committed checkpoints
 * that should be kept are there, everything listed has the right values, nothing is left over, and the next round
 * continues. CKD_TEST_INTERLEAVINGS=10000 makes this a campaign; CKD_TEST_SEED makes it another one.
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

#include "tests/support/rivals.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { RUNS = 3, FEW = 60, MOST_STEPS = 300 };
static const char *const runs[RUNS] = {"run", "run~2", "run~3"};

/* What one round does. */
typedef struct round_plan {
    unsigned run;
    uint64_t step[RUNS]; /* the next step of each run */
    rival saver, compactor;
    ckd_policy policy;
    ckd_delete_options deletion;
} round_plan;

/* Everything listed is right. The newest step of each run, and what the saver reported, is there. */
static size_t check(round_plan *p, uint64_t committed) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (scene_open(&store, p->saver.dir, CKD_OPEN_WRITE, &err) != CKD_OK) {
        fail_msg("open: %s (%s)", err.message, err.file);
    }
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    uint64_t newest[RUNS] = {0};
    for (size_t i = 0; i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        scene s = scene_of(c->step);
        s.run = c->run;
        if (scene_load_id(store, &c->id, &s, &err) != CKD_OK) {
            fail_msg("%s@%llu is listed, but: %s (%s)", c->run, (unsigned long long)c->step, err.message,
                     err.file);
        }
        for (unsigned r = 0; r < RUNS; r++) {
            newest[r] = strcmp(runs[r], c->run) == 0 && c->step > newest[r] ? c->step : newest[r];
        }
    }
    for (unsigned r = 0; r < RUNS; r++) {
        uint64_t wanted = p->step[r] - 1 + (r == p->run ? committed : 0);
        if (newest[r] < wanted) {
            fail_msg("%s ends at %llu, and %llu was committed", runs[r], (unsigned long long)newest[r],
                     (unsigned long long)wanted);
        }
        p->step[r] = newest[r] + 1;
    }
    size_t count = list->count;
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    store_check_clean(p->saver.dir);
    return count;
}

static void choose(round_plan *p, size_t count) {
    uint64_t r = next_random();
    p->run = (unsigned)(r % RUNS);
    ckd_compact_options *o = &p->compactor.compaction;
    *o = (ckd_compact_options)CKD_COMPACT_OPTIONS_INIT;
    o->max_depth = 1 + (uint32_t)(r >> 8) % 3;
    o->pack_below = (r >> 32) % 2 ? UINT64_C(1) << 19 : CKD_NO_PACKS;
    bool folds = count > 24 || (r >> 16) % 3 == 0;
    p->policy = (ckd_policy)CKD_POLICY_INIT;
    p->policy.keep_last = 2 + (uint32_t)(r >> 20) % 3;
    p->policy.keep_every = (r >> 24) % 2 ? 3 + (uint32_t)(r >> 26) % 4 : 0;
    o->policy = folds ? &p->policy : NULL;
    p->deletion = (ckd_delete_options)CKD_DELETE_OPTIONS_INIT;
    p->deletion.undo_s = 0;
    o->deletion = &p->deletion;
    r = next_random();
    p->compactor.kill_at = r % 4 ? 1 + (r >> 8) % MOST_STEPS : 0;
    p->compactor.torn = r >> 40 & 1;
    r = next_random();
    p->saver.kill_at = r % 2 ? 1 + (r >> 8) % 130 : 0;
    p->saver.torn = r >> 40 & 1;
    p->saver.run = runs[p->run];
    p->saver.first = p->step[p->run];
    p->saver.count = 2;
}

static void make_lineage(const char *dir, uint64_t step[RUNS]) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (unsigned r = 0; r < RUNS; r++) {
        for (uint64_t i = 0; i < 5; i++) { /* each run branches off the previous one, at its third step */
            scene s = scene_of(1 + 2 * r + i);
            s.run = runs[r];
            assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
            step[r] = s.step + 1;
        }
    }
    ckd_store_close(store);
}

static void test_killed_side_by_side(void **state) {
    seed ^= rival_number("CKD_TEST_SEED", 20) * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t rounds = rival_number("CKD_TEST_INTERLEAVINGS", under_sanitizer() ? FEW / 6 : FEW);
    unsigned long killed[2] = {0, 0};
    round_plan p = {.saver.dir = *state, .compactor.dir = *state};
    make_lineage(*state, p.step);
    size_t count = check(&p, 0);
    for (uint64_t i = 0; i < rounds; i++) {
        int ends[2];
        uint8_t byte;
        uint64_t committed = 0;
        choose(&p, count);
        assert_int_equal(pipe(ends), 0);
        pid_t compactor = rival_compacts(&p.compactor, ends[1]);
        pid_t saver = rival_saves(&p.saver, ends[1]);
        close(ends[1]);
        while (read(ends[0], &byte, 1) == 1) {
            committed = byte + 1u;
        }
        close(ends[0]);
        killed[0] += rival_was_killed("the compaction", compactor);
        killed[1] += rival_was_killed("the saver", saver);
        count = check(&p, committed);
    }
    print_message("%llu rounds: %lu compactions and %lu savers were killed; %zu checkpoints are left\n",
                  (unsigned long long)rounds, killed[0], killed[1], count);
    assert_true(killed[0] > rounds / 4 && killed[1] > rounds / 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_killed_side_by_side)};
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact_campaign", tests, NULL, NULL);
    scratch_end();
    return failed;
}
