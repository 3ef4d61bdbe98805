/*
 * Compaction and a training that saves, two processes at a time, each killed at some step or none: whatever was reported committed and is wanted is there, everything that is listed loads to the
 * right values, nothing is left over, and it goes on from there. CKD_TEST_INTERLEAVINGS=10000 for a campaign; CKD_TEST_SEED for another one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { RUNS = 3, FEW = 60, MOST_STEPS = 300 };
static const char *const runs[RUNS] = {"run", "run~2", "run~3"};

typedef struct killer {
    unsigned long at, seen;
    bool torn, dying;
} killer;

static int kill_hook(void *context, file_step step, const char *path) {
    killer *k = context;
    (void)path;
    if (step == STEP_READ || step == STEP_OPEN) {
        return 0;
    }
    bool now = ++k->seen == k->at;
    if (k->dying || (now && !(k->torn && step == STEP_WRITE))) {
        raise(SIGKILL);
    }
    k->dying = now;
    return now ? -4 : 0;
}

/* What one round does; both children are made of it. */
typedef struct round_plan {
    const char *dir;
    unsigned run;
    uint64_t step[RUNS];                       /* the next of each run */
    uint32_t max_depth, keep_last, keep_every; /* keep_last 0: all stay */
    uint64_t pack_below;
    killer saver, compactor;
} round_plan;

/* Two saves; one that fails cleanly is no news. */
static int saves(const round_plan *p, int report) {
    ckd_store *store;
    if (scene_open(&store, p->dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    for (uint64_t i = 0; i < 2; i++) {
        scene s = scene_of(p->step[p->run] + i);
        s.run = runs[p->run];
        ckd_error err = {0};
        ckd_status status = scene_save(NULL, store, &s, &err);
        uint8_t byte = (uint8_t)i;
        bool clean = status == CKD_E_NOT_FOUND || status == CKD_E_BUSY;
        if (status != CKD_OK && !clean) {
            fprintf(stderr, "save of %s@%llu: %s (%s)\n", s.run, (unsigned long long)s.step, err.message,
                    err.file);
            return 2;
        }
        if (status == CKD_OK && write(report, &byte, 1) != 1) {
            return 3;
        }
    }
    ckd_store_close(store);
    return 0;
}

static int compacts(const round_plan *p, int report) {
    ckd_store *store;
    ckd_compaction *done;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    (void)report;
    now.undo_s = 0;
    policy.keep_last = p->keep_last;
    policy.keep_every = p->keep_every;
    o.max_depth = p->max_depth;
    o.pack_below = p->pack_below;
    o.policy = p->keep_last ? &policy : NULL;
    o.deletion = &now;
    if (scene_open(&store, p->dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    ckd_status status = ckd_compact(&done, store, &o, &err);
    if (status != CKD_OK && status != CKD_E_BUSY && status != CKD_E_NOT_FOUND && status != CKD_E_STATE) {
        fprintf(stderr, "compact: %s: %s (%s)\n", ckd_status_name(status), err.message, err.file);
        return 2;
    }
    for (size_t i = 0; status == CKD_OK && i < done->count; i++) {
        ckd_status left = done->items[i].left.status;
        if (left != CKD_OK && left != CKD_E_NOT_FOUND && left != CKD_E_EXISTS) {
            fprintf(stderr, "left: %s (%s)\n", done->items[i].left.message, done->items[i].left.file);
            return 3;
        }
    }
    if (status == CKD_OK) {
        ckd_compaction_free(done);
    }
    ckd_store_close(store);
    return 0;
}

typedef int (*child_fn)(const round_plan *p, int report);
static pid_t start(child_fn act, const round_plan *p, killer k, int report) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        file_set_fault_hook(kill_hook, &k);
        _exit(act(p, report));
    }
    return pid;
}

static bool finish(const char *what, pid_t pid) {
    int state;
    assert_int_equal(waitpid(pid, &state, 0), pid);
    bool finished = WIFEXITED(state) && WEXITSTATUS(state) == 0;
    if (!finished && !(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL)) {
        fail_msg("%s ended with %d, signal %d", what, WEXITSTATUS(state), WTERMSIG(state));
    }
    return !finished;
}

/* Everything that is listed is right; the newest of each run, and what the saver reported, is there. */
static size_t check(round_plan *p, uint64_t committed) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (scene_open(&store, p->dir, CKD_OPEN_WRITE, &err) != CKD_OK) {
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
    store_check_clean(p->dir);
    return count;
}

static void choose(round_plan *p, size_t count) {
    uint64_t r = next_random();
    p->run = (unsigned)(r % RUNS);
    p->max_depth = 1 + (uint32_t)(r >> 8) % 3;
    p->keep_last = count > 24 || (r >> 16) % 3 == 0 ? 2 + (uint32_t)(r >> 20) % 3 : 0;
    p->pack_below = (r >> 32) % 2 ? UINT64_C(1) << 19 : CKD_NO_PACKS;
    p->keep_every = (r >> 24) % 2 ? 3 + (uint32_t)(r >> 26) % 4 : 0;
    r = next_random();
    p->compactor = (killer){.at = (r % 4 ? 1 + (r >> 8) % MOST_STEPS : 0), .torn = r >> 40 & 1};
    r = next_random();
    p->saver = (killer){.at = (r % 2 ? 1 + (r >> 8) % 130 : 0), .torn = r >> 40 & 1};
}

static uint64_t number_of(const char *name, uint64_t usual) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : usual;
}

static void make_lineage(const char *dir, uint64_t step[RUNS]) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (unsigned r = 0; r < RUNS; r++) {
        for (uint64_t i = 0; i < 5; i++) { /* each branches off the run before, at its third step */
            scene s = scene_of(1 + 2 * r + i);
            s.run = runs[r];
            assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
            step[r] = s.step + 1;
        }
    }
    ckd_store_close(store);
}

static void test_killed_side_by_side(void **state) {
    seed ^= number_of("CKD_TEST_SEED", 20) * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t rounds = number_of("CKD_TEST_INTERLEAVINGS", under_sanitizer() ? FEW / 6 : FEW);
    unsigned long killed[2] = {0, 0};
    round_plan p = {.dir = *state};
    make_lineage(*state, p.step);
    size_t count = check(&p, 0);
    for (uint64_t i = 0; i < rounds; i++) {
        int ends[2];
        uint8_t byte;
        uint64_t committed = 0;
        choose(&p, count);
        assert_int_equal(pipe(ends), 0);
        pid_t compactor = start(compacts, &p, p.compactor, ends[1]);
        pid_t saver = start(saves, &p, p.saver, ends[1]);
        close(ends[1]);
        while (read(ends[0], &byte, 1) == 1) {
            committed = byte + 1u;
        }
        close(ends[0]);
        killed[0] += finish("the compaction", compactor);
        killed[1] += finish("the saver", saver);
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
