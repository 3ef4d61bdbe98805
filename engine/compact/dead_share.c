#include <inttypes.h>
#include <stdio.h>

#include "engine/compact/internal.h"
#include "engine/retain/retain.h"
#include "engine/store/store.h"

/*
 * After a save, a compaction moves at most this many times the raw size of the newest state, unless a single
 * checkpoint takes more. Rewriting a base and reading it back takes about half of it.
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
 * Dead bytes that the last compaction of the run left, because recoding would make them larger or they are damaged.
 * The next compaction waits until there are more. The catalog keeps the number, as each save may be a process of its
 * own. If it is lost, one compaction is wasted.
 */
static void key_of(char out[CATALOG_META], const char *run) {
    snprintf(out, CATALOG_META, "compaction left, %s", run);
}

typedef struct left_question {
    uint64_t out;
    const char *run;
} left_question;

static ckd_status ask_left(void *context, catalog *c, ckd_error *err) {
    left_question *q = context;
    char key[CATALOG_META], text[CATALOG_META];
    key_of(key, q->run);
    ckd_status status = catalog_meta(text, c, key, err);
    q->out = status == CKD_OK && sscanf(text, "%" SCNu64, &q->out) == 1 ? q->out : 0;
    return status;
}

/* The caller holds no locks. If another writer holds the publish lock, nothing is recorded. */
static void record_dead_left(ckd_store *store, const char *run, uint64_t left) {
    char key[CATALOG_META], text[CATALOG_META];
    file_lock *lock;
    if (store_lock_publish_within(&lock, store, 0, NULL) != CKD_OK) {
        return;
    }
    key_of(key, run);
    snprintf(text, sizeof(text), "%" PRIu64, left);
    pthread_mutex_lock(&store->mutex);
    if (store_sync_catalog(store, NULL) == CKD_OK) {
        (void)store_record_meta(store, key, text, NULL);
    }
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
}

/* Are there more dead bytes than the policy allows, and enough more than the last compaction left to try again? */
static bool is_worth_it(ckd_store *store, const char *run, uint64_t dead, double allowed) {
    left_question q = {0, run};
    if (store_query(store, ask_left, &q, NULL) == CKD_OK && (double)q.out > (double)dead + allowed / 4) {
        q.out = dead; /* some were removed in other ways */
        record_dead_left(store, run, dead);
    }
    return (double)dead > allowed && (double)dead > (double)q.out + allowed / 4;
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
    chunk_waste before, after;
    ckd_compaction *done = NULL;
    bool over;
    compact_limits limits = {.waste_run = p->run,
                             .dead_percent = p->compact_share ? p->compact_share : CKD_COMPACT_SHARE};
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = MAX_SAVE_DEPTH; /* the chain that a save made is no waste */
    if (p->compact_share == CKD_NO_COMPACTION) {
        return CKD_OK;
    }
    ckd_status status = measure(&before, &limits.move_max, store, p->run, err);
    limits.move_max *= STATES;
    double allowed = (double)before.bytes * limits.dead_percent / 100;
    if (status != CKD_OK || !is_worth_it(store, p->run, before.dead, allowed)) {
        return status;
    }
    status = compact_within(&done, &over, store, &o, &limits, err);
    if (status == CKD_OK) {
        uint64_t unused;
        status = measure(&after, &unused, store, p->run, err);
    }
    if (status == CKD_OK) {
        record_dead_left(store, p->run, over ? 0 : after.dead);
        report_result(store, done, p->run, after.bytes < before.bytes ? before.bytes - after.bytes : 0);
    }
    ckd_compaction_free(done);
    return status;
}

void compact_after_deletion(ckd_store *store, const ckd_policy *applied) {
    ckd_error why = {0};
    ckd_status status = compact_by_share(store, applied, &why);
    retain_report_failure(store, applied->run, status, &why);
}
