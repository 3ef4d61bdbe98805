/*
 * A lineage with branches, where a compaction and a training that saves run side by side and are killed again and
 * again. No checkpoint that should be kept is lost, and all load with their values. CKD_TEST_LINEAGE=1000
 * CKD_TEST_INTERLEAVINGS=10000 makes this a campaign of an hour or two; CKD_TEST_SEED makes it another one.
 *
 * The compaction dies at a file operation: at each number in turn, at the kind where it has died least often, or at a
 * random one. Or it dies at a random time, or not at all. The saver dies at random operations. After each round the
 * test loads what was rewritten or added, and all that depends on it. Chunk files never change, so any other
 * checkpoint is as it was if its files and those it depends on exist, which is checked for all. Every FULL rounds, and
 * at the end, everything is loaded.
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
#include <unistd.h>

#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/rivals.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { RUNS = 8, FEW = 40, FULL = 1000, SWEEP = 400, FAR = 3000, SAVES = 2, LONGEST_US = 150000 };
static const char *const runs[RUNS] = {"run", "run~2", "run~3", "run~4", "run~5", "run~6", "run~7", "run~8"};

/* A checkpoint as it was last loaded. */
typedef struct known {
    ckd_checkpoint c;
    file_ref *files;
    ckd_id *on; /* the checkpoints it depends on */
    size_t file_count, on_count;
    bool suspect; /* must be loaded again */
} known;

typedef struct lineage {
    const char *dir;
    uint64_t length; /* approximate number of checkpoints */
    known *all;      /* sorted by id */
    size_t count;
    uint64_t next[RUNS]; /* next step of each run */
    unsigned long loads;
} lineage;

/* ---- what the store has ---- */

static int by_id(const void *a, const void *b) {
    return memcmp(&((const known *)a)->c.id, &((const known *)b)->c.id, sizeof(ckd_id));
}

static known *find(const lineage *l, const ckd_id *id) {
    known key = {.c.id = *id};
    return l->count ? bsearch(&key, l->all, l->count, sizeof(key), by_id) : NULL;
}

static void forget(known *k) {
    free(k->files);
    free(k->on);
}

static void look_at(known *k, const ckd_store *store) {
    manifest m;
    ckd_error err = {0};
    if (store_read_manifest(&m, store, k->c.run, k->c.step, k->c.generation, &err) != CKD_OK) {
        fail_msg("%s@%llu: %s (%s)", k->c.run, (unsigned long long)k->c.step, err.message, err.file);
    }
    k->files = m.files;
    k->file_count = m.file_count;
    k->on = m.dependencies;
    k->on_count = m.dependency_count;
    k->suspect = true;
    m.files = NULL;
    m.dependencies = NULL;
    m.file_count = m.dependency_count = 0;
    manifest_free(&m);
}

/* Keeps what was known, unless the checkpoint has another generation. */
static void take_over(known *k, const lineage *before, const ckd_store *store) {
    known *old = find(before, &k->c.id);
    if (old && old->c.generation == k->c.generation) {
        ckd_checkpoint c = k->c;
        *k = *old;
        k->c = c;
        old->files = NULL;
        old->on = NULL;
    } else {
        look_at(k, store);
    }
}

/* Marks everything that builds on a rewritten checkpoint. */
static void spread(const lineage *l) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < l->count; i++) {
            known *k = &l->all[i];
            for (size_t d = 0; d < k->on_count && !k->suspect; d++) {
                const known *on = find(l, &k->on[d]);
                k->suspect = on && on->suspect; /* it may have been deleted, but its files stay */
                changed = changed || k->suspect;
            }
        }
    }
}

static void check_files(const lineage *l, const known *k) {
    pathname m = path_manifest(store_path_of(l->dir, ""), k->c.run, k->c.step, k->c.generation);
    assert_true(file_exists(m.text));
    for (size_t i = 0; i < k->file_count; i++) {
        pathname p = path_chunk(store_path_of(l->dir, ""), &k->files[i].id, "");
        if (file_bytes(p.text) != k->files[i].size) {
            fail_msg("%s@%llu has lost its file %s", k->c.run, (unsigned long long)k->c.step, p.text);
        }
    }
}

static void load(lineage *l, ckd_store *store, known *k) {
    scene s = scene_of(k->c.step);
    ckd_error err = {0};
    s.run = k->c.run;
    if (scene_load_id(store, &k->c.id, &s, &err) != CKD_OK) {
        fail_msg("%s@%llu is listed, but: %s (%s)", k->c.run, (unsigned long long)k->c.step, err.message,
                 err.file);
    }
    k->suspect = false;
    l->loads++;
}

/* ---- what the store should have ---- */

/* How many checkpoints of its run are newer, and whether it is the first. */
static uint64_t newer_in(const lineage *l, const ckd_checkpoint *c, bool *first) {
    uint64_t newer = 0;
    *first = true;
    for (size_t i = 0; i < l->count; i++) {
        const ckd_checkpoint *other = &l->all[i].c;
        if (strcmp(other->run, c->run) == 0) {
            newer += other->step > c->step;
            *first = *first && other->step >= c->step;
        }
    }
    return newer;
}

/* Nothing is missing except what the policy does not keep. The saver may have added SAVES steps to its run. */
static void check_kept(const lineage *before, const lineage *now, const ckd_policy *policy) {
    for (size_t i = 0; i < before->count; i++) {
        const ckd_checkpoint *c = &before->all[i].c;
        bool first;
        if (find(now, &c->id)) {
            continue;
        }
        uint64_t newer = newer_in(before, c, &first) + SAVES;
        bool kept = !policy || first || newer < policy->keep_last ||
                    (policy->keep_every && c->step % policy->keep_every == 0);
        if (kept) {
            fail_msg("%s@%llu is lost", c->run, (unsigned long long)c->step);
        }
    }
}

static void check_newest(lineage *l, unsigned run, uint64_t committed) {
    uint64_t newest[RUNS] = {0};
    for (size_t i = 0; i < l->count; i++) {
        for (unsigned r = 0; r < RUNS; r++) {
            bool mine = strcmp(runs[r], l->all[i].c.run) == 0;
            newest[r] = mine && l->all[i].c.step > newest[r] ? l->all[i].c.step : newest[r];
        }
    }
    for (unsigned r = 0; r < RUNS; r++) {
        uint64_t wanted = l->next[r] - 1 + (r == run ? committed : 0);
        if (newest[r] < wanted) {
            fail_msg("%s ends at %llu, and %llu was committed", runs[r], (unsigned long long)newest[r],
                     (unsigned long long)wanted);
        }
        l->next[r] = newest[r] + 1;
    }
}

/* Opens the store, which recovers it, and checks it. all: also loads what cannot have changed. */
static void check(lineage *l, const ckd_policy *policy, unsigned run, uint64_t committed, bool all) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (scene_open(&store, l->dir, CKD_OPEN_WRITE, &err) != CKD_OK) {
        fail_msg("open: %s (%s)", err.message, err.file);
    }
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    lineage now = *l;
    now.count = list->count;
    now.all = calloc(list->count + 1, sizeof(*now.all));
    for (size_t i = 0; i < list->count; i++) {
        now.all[i].c = list->items[i];
        take_over(&now.all[i], l, store);
    }
    qsort(now.all, now.count, sizeof(*now.all), by_id);
    spread(&now);
    check_kept(l, &now, policy);
    for (size_t i = 0; i < now.count; i++) {
        check_files(&now, &now.all[i]);
        if (all || now.all[i].suspect) {
            load(&now, store, &now.all[i]);
        }
    }
    check_newest(&now, run, committed);
    for (size_t i = 0; i < l->count; i++) {
        forget(&l->all[i]);
    }
    free(l->all);
    *l = now;
    ckd_checkpoint_list_free(list);
    if (all) {
        assert_int_equal(verify_damage(store), 0);
    }
    ckd_store_close(store);
    if (all || next_random() % 8 == 0) { /* leftovers stay until they are looked for */
        store_check_clean(l->dir);
    }
}

/* ---- a round ---- */

typedef struct round_plan {
    rival saver, compactor;
    unsigned run;
    unsigned long kill_after_us; /* when to kill the compaction; 0: not by time */
    unsigned long sweep;         /* the next operation of the sweep */
    bool swept;                  /* the compaction dies at that one */
    ckd_policy policy;
    ckd_delete_options deletion;
} round_plan;

/*
 * Chooses a depth that leaves something to do. If there are too many checkpoints, old ones are deleted, except the
 * first of each run.
 */
static void choose_work(round_plan *p, const lineage *l) {
    uint64_t r = next_random();
    ckd_compact_options *o = &p->compactor.compaction;
    *o = (ckd_compact_options)CKD_COMPACT_OPTIONS_INIT;
    o->max_depth = 1 + (uint32_t)(r >> 8) % 6;
    o->pack_below = (r >> 32) % 2 ? UINT64_C(1) << 18 : CKD_NO_PACKS;
    p->policy = (ckd_policy)CKD_POLICY_INIT;
    p->policy.keep_first = 1;
    p->policy.keep_last = (uint32_t)(l->length / RUNS) - 4 + (uint32_t)(r >> 20) % 8;
    p->policy.keep_every = l->count < l->length * 21 / 20 ? 3 + (r >> 26) % 4 : 0;
    o->policy = l->count >= l->length || (r >> 16) % 3 == 0 ? &p->policy : NULL;
    p->deletion = (ckd_delete_options)CKD_DELETE_OPTIONS_INIT;
    p->deletion.undo_s = 0;
    o->deletion = &p->deletion;
    p->run = (unsigned)(r % RUNS);
    p->saver.run = runs[p->run];
    p->saver.first = l->next[p->run];
    p->saver.count = SAVES;
}

static void choose_deaths(round_plan *p) {
    uint64_t r = next_random();
    unsigned way = (unsigned)(r % 8);
    p->swept = way < 3;
    p->compactor.at_site = false;
    p->kill_after_us = way == 6 ? 1 + (r >> 8) % LONGEST_US : 0;
    p->compactor.kill_at = way < 3    ? p->sweep
                           : way == 4 ? 1 + (r >> 8) % SWEEP
                           : way == 5 ? 1 + (r >> 8) % FAR
                                      : 0;
    p->compactor.torn = r >> 40 & 1;
    if (way == 3) {
        rival_at_rarest(&p->compactor, 1 + (r >> 8) % 3, next_random());
    }
    r = next_random();
    p->saver.kill_at = r % 2 ? 1 + (r >> 8) % 130 : 0;
    p->saver.torn = r >> 40 & 1;
}

/* Runs a round. Returns how many saves were reported as committed. */
static uint64_t play(const round_plan *p, unsigned long killed[2]) {
    int ends[2];
    uint8_t byte;
    uint64_t committed = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t compactor = rival_compacts(&p->compactor, ends[1]);
    pid_t saver = rival_saves(&p->saver, ends[1]);
    close(ends[1]);
    if (p->kill_after_us) {
        usleep((useconds_t)p->kill_after_us);
        kill(compactor, SIGKILL);
    }
    while (read(ends[0], &byte, 1) == 1) {
        committed = byte + 1u;
    }
    close(ends[0]);
    bool died = rival_was_killed("the compaction", compactor);
    killed[0] += died;
    killed[1] += rival_was_killed("the saver", saver);
    return committed;
}

/* Makes the runs. Each branches off the previous one. */
static void make(lineage *l) {
    ckd_store *store;
    uint64_t each = l->length / RUNS;
    assert_int_equal(scene_open(&store, l->dir, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (unsigned r = 0; r < RUNS; r++) {
        for (uint64_t i = 0; i < each; i++) {
            scene s = scene_of(1 + r * (each / 2) + i);
            s.run = runs[r];
            s.base = i && i % 25 == 0;
            assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
            l->next[r] = s.step + 1;
        }
    }
    ckd_store_close(store);
}

static void print_end(const lineage *l, uint64_t rounds, const unsigned long killed[2],
                      const rival_sites *s) {
    unsigned died, all = rival_sites_count(s, &died);
    rival_sites_print(s);
    print_message(
        "%llu rounds, %zu checkpoints: %lu compactions and %lu savers were killed, at %u of %u kinds of fault "
        "points; %lu loads\n",
        (unsigned long long)rounds, l->count, killed[0], killed[1], died, all, l->loads);
}

static void test_lineage(void **state) {
    seed ^= rival_number("CKD_TEST_SEED", 20) * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t few = under_sanitizer() ? FEW / 2 : FEW, rounds = rival_number("CKD_TEST_INTERLEAVINGS", few);
    lineage l = {.dir = *state, .length = rival_number("CKD_TEST_LINEAGE", 80)};
    round_plan p = {.saver.dir = *state, .compactor.dir = *state, .sweep = 1};
    unsigned long killed[2] = {0, 0};
    p.compactor.sites = rival_sites_new();
    make(&l);
    check(&l, NULL, 0, 0, true);
    for (uint64_t i = 1; i <= rounds; i++) {
        choose_work(&p, &l);
        choose_deaths(&p);
        unsigned long before = killed[0];
        uint64_t committed = play(&p, killed);
        bool wrap = killed[0] == before || p.sweep == SWEEP;
        p.sweep = !p.swept ? p.sweep : wrap ? 1 : p.sweep + 1;
        check(&l, p.compactor.compaction.policy, p.run, committed, i % FULL == 0 || i == rounds);
        if (i % FULL == 0) {
            print_message("%llu rounds\n", (unsigned long long)i);
        }
    }
    print_end(&l, rounds, killed, p.compactor.sites);
    assert_true(killed[0] >= rounds / 8 && killed[1] > rounds / 10);
    assert_true(l.count >= l.length / 2);
    unsigned died, all = rival_sites_count(p.compactor.sites, &died);
    assert_true(died >= 5 && (rounds < 1000 || died >= all * 9 / 10));
    for (size_t i = 0; i < l.count; i++) {
        forget(&l.all[i]);
    }
    free(l.all);
    rival_sites_free(p.compactor.sites);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_lineage)};
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact_lineage", tests, NULL, NULL);
    scratch_end();
    return failed;
}
