/*
 * Compacts a run after a policy has deleted checkpoints, if too much of its files is dead. It runs at the end of a
 * save, so its work is bounded, and it waits for no lock.
 */
#include <inttypes.h>
#include <stdio.h>

#include "engine/compact/internal.h"
#include "engine/retain/retain.h"
#include "engine/store/store.h"

/*
 * After a save, the rewrites of a compaction move at most this many times the raw size of the newest state, and its
 * merges as much. A single checkpoint may take more. Rewriting a base and reading it back takes about half of this.
 * Rewrites that made nothing smaller, and were dropped, do not count.
 */
#define STATES 4

/* Measures live and dead bytes in the run's chunk files, and the raw bytes of its newest state. */
static ckd_status measure(chunk_waste *out, uint64_t *state, ckd_store *store, const char *run,
                          ckd_error *err) {
    manifest_set n = {0};
    uint64_t newest = 0;
    *state = 0;
    ckd_status status = manifest_set_read(&n, store, err);
    THEN(status, chunk_waste_of(out, &n, run, err));
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &n.items[i].m.checkpoint;
        if (!n.items[i].in_trash && c->step >= newest && strcmp(c->run, run) == 0) {
            newest = c->step;
            *state = c->raw_bytes;
        }
    }
    manifest_set_free(&n);
    return status;
}

/*
 * The dead bytes that the last compaction of the run left. The catalog keeps them, as each save may be a process of its
 * own. If they are lost, one compaction is wasted.
 */
typedef struct left_over {
    /*
     * Dead bytes that a compaction cannot usefully free: they are damaged, or recoding their readers would take more
     * bytes. The next compaction waits until there are more dead bytes.
     */
    uint64_t dead;
    bool reported; /* the user was told that they exceed the policy's limit */
} left_over;

static void key_of(char out[CATALOG_META], const char *run) {
    snprintf(out, CATALOG_META, "compaction left, %s", run);
}

typedef struct dead_query {
    left_over out;
    const char *run;
} dead_query;

static ckd_status query_dead(void *context, catalog *c, ckd_error *err) {
    dead_query *q = context;
    char key[CATALOG_META], text[CATALOG_META], reported[8];
    key_of(key, q->run);
    ckd_status status = catalog_meta(text, c, key, err);
    int fields = status == CKD_OK ? sscanf(text, "%" SCNu64 " %7s", &q->out.dead, reported) : 0;
    q->out.dead = fields >= 1 ? q->out.dead : 0;
    q->out.reported = fields == 2;
    return status;
}

/* The caller holds no locks. If another writer holds the publish lock, nothing is recorded. */
static void record_left(ckd_store *store, const char *run, const left_over *left) {
    char key[CATALOG_META], text[CATALOG_META];
    file_lock *lock;
    if (store_lock_publish_within(&lock, store, 0, NULL) != CKD_OK) {
        return;
    }
    key_of(key, run);
    snprintf(text, sizeof(text), "%" PRIu64 "%s", left->dead, left->reported ? " told" : "");
    pthread_mutex_lock(&store->mutex);
    if (store_refresh_catalog_locked(store, NULL) == CKD_OK) {
        (void)store_record_meta(store, key, text, NULL);
    }
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
}

/* Are there more dead bytes than the policy allows, and clearly more than the last compaction left? */
static bool is_worth_it(left_over *last, ckd_store *store, const char *run, uint64_t dead, double allowed) {
    dead_query q = {.run = run};
    if (store_query(store, query_dead, &q, NULL) == CKD_OK &&
        (double)q.out.dead > (double)dead + allowed / 4) {
        q.out.dead = dead; /* some of them were freed otherwise */
        record_left(store, run, &q.out);
    }
    *last = q.out;
    return (double)dead > allowed && (double)dead > (double)q.out.dead + allowed / 4;
}

typedef struct outcome {
    chunk_waste before, after;
    uint32_t percent; /* the policy's limit */
    bool over;        /* work is left for later */
} outcome;

/*
 * Says once that the share of dead bytes stays above the limit. An incomplete compaction goes on after the next save,
 * unless it makes no progress.
 */
static void report_excess(left_over *now, ckd_store *store, const char *run, const outcome *o) {
    double allowed = (double)o->after.bytes * o->percent / 100;
    bool above = (double)o->after.dead > allowed;
    bool stuck = above && (!o->over || (double)o->after.dead + allowed / 4 > (double)o->before.dead);
    if (stuck && !now->reported) {
        store_message(
            store,
            "deleted checkpoints of %s take %.0f%% of its chunk files, more than the %u%% of its policy: %s",
            run, 100 * (double)o->after.dead / (double)o->after.bytes, (unsigned)o->percent,
            o->over ? "there is more to rewrite than a save is allowed to, so run ckptdelta compact"
                    : "checkpoints that stay build on them, and would take more space on their own");
    }
    now->reported = stuck || (above && now->reported);
}

static void report_result(ckd_store *store, const ckd_compaction *c, const char *run, uint64_t freed) {
    for (size_t i = 0; i < c->count && c->left; i++) {
        const ckd_compacted *k = &c->items[i];
        if (k->left.status != CKD_OK) {
            store_message(store, "%s@%llu is not compacted: %s%s%s%s", k->checkpoint.run,
                          (unsigned long long)k->checkpoint.step, k->left.message,
                          k->left.file[0] ? " (" : "", k->left.file, k->left.file[0] ? ")" : "");
        }
    }
    if (freed) {
        store_info(store, "compacted %s, by its policy: its chunk files are %llu bytes smaller", run,
                   (unsigned long long)freed);
    }
}

static ckd_status compact_by_share(ckd_store *store, const ckd_policy *p, ckd_error *err) {
    outcome f = {.percent = p->compact_share ? p->compact_share : CKD_COMPACT_SHARE};
    ckd_compaction *done = NULL;
    left_over left;
    compact_limits limits = {.waste_run = p->run, .dead_percent = f.percent};
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = MAX_SAVE_DEPTH; /* chains as long as a save makes them are no waste */
    if (p->compact_share == CKD_NO_COMPACTION) {
        return CKD_OK;
    }
    ckd_status status = measure(&f.before, &limits.move_max, store, p->run, err);
    limits.move_max *= STATES;
    double allowed = (double)f.before.bytes * f.percent / 100;
    if (status != CKD_OK || !is_worth_it(&left, store, p->run, f.before.dead, allowed)) {
        return status;
    }
    status = compact_within(&done, &f.over, store, &o, &limits, err);
    if (status == CKD_OK) {
        uint64_t unused;
        status = measure(&f.after, &unused, store, p->run, err);
    }
    if (status == CKD_OK) {
        uint64_t freed = f.after.bytes < f.before.bytes ? f.before.bytes - f.after.bytes : 0;
        report_result(store, done, p->run, freed);
        report_excess(&left, store, p->run, &f);
        left.dead = f.over ? 0 : f.after.dead;
        record_left(store, p->run, &left);
    }
    ckd_compaction_free(done);
    return status;
}

void compact_after_deletion(ckd_store *store, const ckd_policy *applied) {
    ckd_error why = {0};
    ckd_status status = compact_by_share(store, applied, &why);
    retain_report_failure(store, applied->run, status, &why);
}
