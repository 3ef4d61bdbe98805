/* The call: its options, the order of work, and the removal of old files. */
#include "engine/compact/internal.h"
#include "engine/store/store.h"

#include <stdlib.h>

#include "engine/retain/retain.h"

#define DEFAULT_DEPTH     16
#define DEFAULT_LOAD_COST 4.0
#define DEFAULT_PACK      (UINT64_C(256) << 10)
#define OLD_BYTES         (UINT64_C(16) << 20)
#define ROOM_FOR_OLD      (8 * OLD_BYTES)
#define LAST_TIMEOUT_MS   1000 /* for readers of replaced files, at the end */

/* One call of ckd_compact: a compaction and its result. */
typedef struct compact_call {
    compaction c;
    ckd_compaction *out;
    size_t capacity;
    manifest_set all;
    manifest_entry **order; /* dependents before what they depend on */
    size_t count;
    hash_set current;   /* own files of the checkpoints listed at the beginning */
    uint64_t old_bytes; /* size of replaced generations that may still exist */
    bool over;          /* the rewrites reached the limit */
} compact_call;

/* ---- what to do ---- */

static ckd_status check_options(const ckd_compact_options *o, ckd_error *err) {
    if (o->max_depth > MAX_SAVE_DEPTH) {
        return err_set(
            err, CKD_E_INVALID,
            "max_depth is %u, but checkpoints with chains of more than %u deltas could not be loaded",
            (unsigned)o->max_depth, MAX_SAVE_DEPTH);
    }
    if (!(o->max_load_cost >= 0) || (o->max_load_cost > 0 && o->max_load_cost < 1)) {
        return err_set(err, CKD_E_INVALID,
                       "max_load_cost must be at least 1 (the load of a base), or 0 for the default");
    }
    return o->policy && o->stored_policies
               ? err_set(err, CKD_E_INVALID, "set policy or stored_policies, not both")
               : CKD_OK;
}

static bool plan_deletes_id(const ckd_prune *plan, const ckd_id *id) {
    bool found = false;
    for (size_t i = 0; plan && i < plan->count && !found; i++) {
        found = !plan->items[i].kept && id_equal(&plan->items[i].checkpoint.id, id);
    }
    return found;
}

/* Stored policies are applied only to the run that is compacted. */
static prune_request request_of(const compaction *c) {
    prune_request request = prune_request_of(c->options.policy);
    request.policy.run = request.stored ? c->options.run : request.policy.run;
    return request;
}

/* All listed checkpoints except those that the policy deletes. */
static ckd_status find_remaining(compact_call *x, ckd_error *err) {
    compaction *c = &x->c;
    ckd_prune *plan = NULL;
    uint64_t undo_s;
    if (c->options.policy || c->options.stored_policies) {
        prune_request request = request_of(c);
        ckd_status status = retain_plan(&plan, &undo_s, c->store, &request, err);
        if (status != CKD_OK) {
            return status;
        }
        x->out->pruned = plan;
    }
    c->remaining = calloc(x->all.count + 1, sizeof(*c->remaining));
    if (!c->remaining) {
        return err_nomem(err, x->all.count * sizeof(*c->remaining), "checkpoints");
    }
    for (size_t i = 0; i < x->all.count; i++) {
        const manifest_entry *n = &x->all.items[i];
        if (!n->in_trash && !n->superseded && !plan_deletes_id(plan, &n->m.checkpoint.id)) {
            c->remaining[c->remaining_count++] = n->m.checkpoint.id;
        }
    }
    if (c->remaining_count) {
        qsort(c->remaining, c->remaining_count, sizeof(*c->remaining), id_compare);
    }
    return CKD_OK;
}

/* ---- the order of work ---- */

#define LEVEL_ROUNDS 256

typedef struct level {
    manifest_entry *n;
    size_t level, place; /* level: above those it builds on or descends from; place: its old index */
} level;

static int by_level(const void *a, const void *b) {
    const level *x = a, *y = b;
    int order = (x->level < y->level) - (x->level > y->level);
    return order ? order : (x->place > y->place) - (x->place < y->place);
}

/* Checkpoints are created after those that they build on, so one round in this order is usually enough. */
static int by_creation(const void *a, const void *b) {
    const level *x = a, *y = b;
    uint64_t before = x->n->m.checkpoint.created_ns, after = y->n->m.checkpoint.created_ns;
    int order = (before > after) - (before < after);
    return order ? order : (x->place > y->place) - (x->place < y->place);
}

static bool raise_above(level *to, const level *all, const manifest_set *n, const ckd_id *id) {
    const manifest_entry *base = id_is_zero(id) ? NULL : manifest_set_find(n, id);
    size_t at = base ? base->order_index : SIZE_MAX;
    bool higher = at != SIZE_MAX && all[at].level >= to->level && &all[at] != to;
    to->level = higher ? all[at].level + 1 : to->level;
    return higher;
}

/*
 * Sorts `count` entries of n so that each checkpoint comes before its parent and its dependencies. If they form a
 * cycle, the order stays as it is. Overwrites `order_index` of all entries. Errors: NOMEM.
 */
static ckd_status sort_by_level(manifest_entry **order, size_t count, manifest_set *n, ckd_error *err) {
    level *all = calloc(count + 1, sizeof(*all));
    if (!all) {
        return err_nomem(err, count * sizeof(*all), "an order of checkpoints");
    }
    for (size_t i = 0; i < n->count; i++) {
        n->items[i].order_index = SIZE_MAX;
    }
    for (size_t i = 0; i < count; i++) {
        all[i] = (level){order[i], 0, i};
    }
    qsort(all, count, sizeof(*all), by_creation);
    for (size_t i = 0; i < count; i++) {
        all[i].n->order_index = i;
    }
    bool changed = true;
    for (int rounds = 0; changed && rounds < LEVEL_ROUNDS; rounds++) {
        changed = false;
        for (size_t i = 0; i < count; i++) {
            const manifest *m = &all[i].n->m;
            changed = raise_above(&all[i], all, n, &m->checkpoint.parent) || changed;
            for (size_t k = 0; k < m->dependency_count; k++) {
                changed = raise_above(&all[i], all, n, &m->dependencies[k]) || changed;
            }
        }
    }
    qsort(all, count, sizeof(*all), by_level);
    for (size_t i = 0; i < count && !changed; i++) { /* still changing: they form a cycle */
        order[i] = all[i].n;
    }
    free(all);
    return CKD_OK;
}

/* All listed checkpoints, dependents first. */
static ckd_status find_order(compact_call *x, ckd_error *err) {
    x->order = calloc(x->all.count + 1, sizeof(*x->order));
    if (!x->order) {
        return err_nomem(err, x->all.count * sizeof(*x->order), "an order of checkpoints");
    }
    for (size_t i = 0; i < x->all.count; i++) {
        if (!x->all.items[i].in_trash && !x->all.items[i].superseded) {
            x->order[x->count++] = &x->all.items[i];
        }
    }
    return sort_by_level(x->order, x->count, &x->all, err);
}

/* Several checkpoints that stay may read the same record of a victim. */
static ckd_status count_readers(compact_call *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->count && status == CKD_OK; i++) {
        if (!compact_is_victim(&x->c, &x->order[i]->m.checkpoint.id)) {
            status = compact_count_readers(&x->c, &x->order[i]->m, err);
        }
        if (views_are_many(&x->c.views, COMPACT_VIEWS_MAX)) {
            compact_close_views(&x->c);
        }
    }
    compact_close_views(&x->c); /* no lock keeps their files */
    return status;
}

/* Own files of the listed checkpoints. */
static ckd_status find_current(compact_call *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->count; i++) {
        const manifest *m = &x->order[i]->m;
        for (size_t k = 0; k < m->own_count && status == CKD_OK; k++) {
            status = hash_set_add(&x->current, hash64(&m->files[k].id, sizeof(ckd_id)), err);
        }
    }
    return status;
}

/* Is the checkpoint older than cold_after_s, or not among the newest cold_but_newest of its run? */
static bool is_cold(const compact_call *x, const ckd_checkpoint *k) {
    const ckd_compact_options *o = &x->c.options;
    uint64_t now = clock_wall_ns(), newer = 0;
    if (o->cold_after_s && (now - k->created_ns) / UINT64_C(1000000000) >= o->cold_after_s &&
        k->created_ns < now) {
        return true;
    }
    for (size_t i = 0; i < x->count && o->cold_but_newest; i++) {
        const ckd_checkpoint *other = &x->order[i]->m.checkpoint;
        newer += other->step > k->step && strcmp(other->run, k->run) == 0;
    }
    return o->cold_but_newest && newer >= o->cold_but_newest;
}

/*
 * Can there be work on this checkpoint, judging by its manifest alone? At the limit, only manifests that name a file
 * replaced by this compaction get a next generation.
 */
static bool may_need_work(const compact_call *x, const manifest_entry *n) {
    const compaction *c = &x->c;
    const manifest *m = &n->m;
    const ckd_checkpoint *k = &m->checkpoint;
    bool folds = false, at_limit = compact_limit_reached(c),
         selected = !c->options.run || strcmp(c->options.run, k->run) == 0;
    if (!compact_allows_run(c, k->run)) {
        return false;
    }
    for (size_t i = 0; i < m->dependency_count && !folds && !at_limit; i++) {
        folds = compact_is_victim(c, &m->dependencies[i]);
    }
    /* Does it name a file of a replaced generation, or one that is no listed checkpoint's own? */
    for (size_t i = m->own_count; i < m->file_count && !folds; i++) {
        uint64_t hash = hash64(&m->files[i].id, sizeof(ckd_id));
        folds = (!at_limit && !hash_set_has(&x->current, hash)) || hash_set_has(&c->replaced, hash);
    }
    return !n->is_protected && !compact_is_victim(c, &k->id) &&
           (folds || (!at_limit && selected && (k->depth > c->options.max_depth || is_cold(x, k))));
}

/* ---- one checkpoint ---- */

static ckd_status add_item(ckd_compacted **item, compact_call *x, const ckd_checkpoint *k, ckd_error *err) {
    ckd_compaction *out = x->out;
    if (ARRAY_GROW(out->items, x->capacity, out->count + 1, "a list of checkpoints", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    *item = &out->items[out->count++];
    **item = (ckd_compacted){.checkpoint = *k, .bytes = k->stored_bytes, .depth = k->depth};
    return CKD_OK;
}

static ckd_status finish_item(compact_call *x, const ckd_checkpoint *k, const rewrite_plan *p,
                              ckd_status status, const ckd_error *why, ckd_error *err) {
    ckd_compacted *item = NULL;
    if (status != CKD_OK && !compact_is_local_error(status, why)) {
        return err_from(err, status, why);
    }
    if (status == CKD_OK && !p->why) {
        return CKD_OK;
    }
    ckd_status added = add_item(&item, x, k, err);
    if (added != CKD_OK) {
        return added;
    }
    item->why = p->why;
    item->blocks = p->view ? p->view->block_count : 0;
    item->recoded = p->recoded;
    if (status != CKD_OK) {
        item->left = *why;
        item->left.status = status;
        x->out->left++;
        return CKD_OK;
    }
    item->bytes = p->estimated_bytes;
    item->depth = p->depth;
    x->out->before += k->stored_bytes;
    x->out->after += p->estimated_bytes;
    return CKD_OK;
}

static ckd_status record_estimate(compaction *c, const rewrite_plan *p, ckd_error *err) {
    size_t count = p->view->block_count;
    block_load *blocks = calloc(count + 1, sizeof(*blocks));
    if (!blocks) {
        return err_nomem(err, count * sizeof(*blocks), "the blocks of a checkpoint");
    }
    for (size_t i = 0; i < count; i++) {
        blocks[i] = p->rewrites[i].load;
    }
    return compact_record_loads(c, &p->view->manifest.checkpoint.id, blocks, count, err);
}

/*
 * Removes replaced generations. Other processes may prevent that; then the next open for writing, or the next call,
 * removes them.
 */
static ckd_status remove_old(compact_call *x, uint32_t timeout_ms, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = trash_remove_replaced(&x->out->old_files, x->c.store, &x->c.checked,
                                              x->c.limits.timeout_ms, timeout_ms, &why);
    if (status == CKD_E_BUSY) { /* the files could not even be counted */
        x->out->old_files = x->c.replaced.count;
        return CKD_OK;
    }
    return err_from(err, status, &why);
}

/*
 * Removes replaced generations from time to time. Finding them reads all manifests, which takes longer than
 * rewriting a small checkpoint. So it waits until they are large, or space is short.
 */
static ckd_status remove_some_old(compact_call *x, uint64_t added_bytes, ckd_error *err) {
    x->old_bytes += added_bytes;
    uint64_t available = dir_free_space(path_in(x->c.store->path, DIR_CHUNKS).text);
    if (x->old_bytes < OLD_BYTES && available >= ROOM_FOR_OLD) {
        return CKD_OK;
    }
    x->old_bytes = 0;
    return remove_old(x, 0, err);
}

/*
 * Rewrites the checkpoint, or only publishes a manifest that names newer files. The latter costs little and releases
 * the old files.
 */
static ckd_status carry_out(compaction *c, rewrite_plan *p, ckd_error *err) {
    p->why = compact_limit_reached(c) ? 0 : p->why;
    if (c->options.estimate) {
        return p->why ? record_estimate(c, p, err) : CKD_OK;
    }
    uint64_t stored = p->estimated_bytes;
    ckd_status status = p->why ? compact_rewrite(&stored, c, p, err) : CKD_OK;
    if (status == CKD_OK && !p->why && compact_is_stale(p)) {
        status = compact_update_manifest(&stored, c, p, err);
    }
    p->estimated_bytes = stored;
    return status;
}

static ckd_status compact_one(compact_call *x, const manifest_entry *n, ckd_error *err) {
    compaction *c = &x->c;
    const ckd_checkpoint *k = &n->m.checkpoint;
    rewrite_plan p = {.view = NULL};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    file_lock *readers;
    uint64_t done = c->done, moved_before = c->moved;
    ckd_status status = store_lock_reader_within(&readers, c->store, c->limits.timeout_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = compact_plan_rewrite(&p, c, &k->id, is_cold(x, k), &why);
    bool writes = status == CKD_OK && (p.why || compact_is_stale(&p)) && !c->options.estimate;
    if (status == CKD_OK) {
        status = carry_out(c, &p, &why);
        c->spent += p.why ? c->moved - moved_before : 0;
    }
    status = finish_item(x, k, &p, status, &why, err);
    rewrite_plan_free(&p);
    compact_close_views(c); /* without the lock, another compaction may remove their files */
    lock_release(readers);
    c->done = done + k->stored_bytes;
    if (status == CKD_OK && writes && !c->options.dry_run) {
        status = remove_some_old(x, k->stored_bytes, err);
    }
    return status == CKD_OK ? compact_report_progress(c, err) : status;
}

/* ---- merging files ---- */

static ckd_status record_gathered(void *context, const ckd_checkpoint *old, uint64_t stored, ckd_status left,
                                  const ckd_error *why, ckd_error *err) {
    rewrite_plan p = {.why = CKD_COMPACT_PACK, .depth = old->depth, .estimated_bytes = stored};
    return finish_item(context, old, &p, left, why, err);
}

/* Reads the manifests again: the rewrites have replaced them. */
static ckd_status gather(compact_call *x, ckd_error *err) {
    manifest_set now = {0};
    size_t count = 0;
    if (x->c.options.pack_below == CKD_NO_PACKS) {
        return CKD_OK;
    }
    ckd_status status = manifest_set_read(&now, x->c.store, err);
    manifest_entry **order = status == CKD_OK ? calloc(now.count + 1, sizeof(*order)) : NULL;
    if (status == CKD_OK && !order) {
        status = err_nomem(err, now.count * sizeof(*order), "an order of checkpoints");
    }
    for (size_t i = 0; i < now.count && status == CKD_OK; i++) {
        manifest_entry *n = &now.items[i];
        if (!n->in_trash && !n->superseded && !n->is_protected &&
            !compact_is_victim(&x->c, &n->m.checkpoint.id)) {
            order[count++] = n;
        }
    }
    THEN(status, compact_gather(&x->c, order, count, record_gathered, x, err));
    free(order);
    manifest_set_free(&now);
    return status;
}

/* ---- all checkpoints ---- */

static ckd_status compact_each(compact_call *x, bool first, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->count; i++) {
        x->c.to_be_done += may_need_work(x, x->order[i]) ? x->order[i]->m.checkpoint.stored_bytes : 0;
    }
    for (size_t i = x->count; i-- > 0 && status == CKD_OK;) {
        x->out->checkpoints += first;
        if (may_need_work(x, x->order[i])) {
            status = compact_one(x, x->order[i], err);
        }
    }
    return status;
}

/* Starts over with the manifests as they are now. */
static ckd_status restart(compact_call *x, ckd_error *err) {
    free(x->order);
    free(x->current.slots);
    free(x->c.readers.slots);
    x->order = NULL;
    x->count = 0;
    x->current = x->c.readers = (hash_set){.slots = NULL};
    manifest_set_free(&x->all);
    compact_close_views(&x->c);
    ckd_status status = manifest_set_read(&x->all, x->c.store, err);
    THEN(status, find_order(x, err));
    THEN(status, find_current(x, err));
    return status == CKD_OK ? count_readers(x, err) : status;
}

/*
 * A rewrite leaves fewer readers for a victim's records. Keeping the records may then no longer pay for the other
 * readers, so these get another pass.
 */
#define PASSES 3

static ckd_status compact_all(compact_call *x, ckd_error *err) {
    bool writes = !x->c.options.dry_run && !x->c.options.estimate, repeat = true;
    ckd_status status = CKD_OK;
    for (int pass = 0; pass < PASSES && repeat && status == CKD_OK; pass++) {
        size_t before = x->out->count;
        status = pass ? restart(x, err) : CKD_OK;
        THEN(status, compact_each(x, pass == 0, err));
        repeat = writes && x->out->count > before + x->out->left && !compact_limit_reached(&x->c);
    }
    /*
     * Merging has a separate limit of the same size. Rewrites release files; but if a single record of a file is still
     * read, only a merge frees the file. If rewrites could use up the limit of merges, such files would accumulate.
     */
    x->over = compact_limit_reached(&x->c);
    x->c.spent = 0;
    return status == CKD_OK ? gather(x, err) : status;
}

/* Deletes the checkpoints that the policy does not keep. */
static ckd_status prune(compact_call *x, ckd_error *err) {
    const ckd_compact_options *o = &x->c.options;
    if ((!o->policy && !o->stored_policies) || o->dry_run || o->estimate) {
        return CKD_OK;
    }
    ckd_prune_free(x->out->pruned);
    x->out->pruned = NULL;
    prune_request request = request_of(&x->c);
    return retain_prune(&x->out->pruned, x->c.store, &request, o->deletion, err);
}

static ckd_status begin(compact_call *x, ckd_error *err) {
    compaction *c = &x->c;
    uint32_t workers = pool_threads(c->store->pool);
    c->begun_ns = clock_monotonic_ns();
    c->workers = calloc(workers, sizeof(*c->workers));
    if (!c->workers) {
        return err_nomem(err, workers * sizeof(*c->workers), "workers");
    }
    ckd_status status = CKD_OK;
    for (; c->worker_count < workers && status == CKD_OK; c->worker_count++) {
        status = compact_worker_init(&c->workers[c->worker_count], c, err);
    }
    c->all = &x->all;
    bool writes = !c->options.dry_run && !c->options.estimate;
    if (status == CKD_OK && writes) {
        status = vanished_check_none(c->store, err);
    }
    if (status == CKD_OK && writes) {
        status = compact_upgrade_early(c, err);
    }
    THEN(status, manifest_set_read(&x->all, c->store, err));
    THEN(status, find_remaining(x, err));
    THEN(status, find_order(x, err));
    THEN(status, find_current(x, err));
    return status == CKD_OK ? count_readers(x, err) : status;
}

static ckd_status compact(compact_call *x, ckd_error *err) {
    ckd_status status = begin(x, err);
    THEN(status, compact_all(x, err));
    THEN(status, compact_join_items(x->out, err));
    THEN(status, prune(x, err));
    bool wrote = !x->c.options.dry_run && !x->c.options.estimate;
    uint32_t timeout_ms = x->c.limits.timeout_ms < LAST_TIMEOUT_MS ? x->c.limits.timeout_ms : LAST_TIMEOUT_MS;
    if (status == CKD_E_NOSPACE && wrote) { /* removing the replaced files makes room */
        (void)remove_old(x, 0, NULL);
    }
    return status == CKD_OK && wrote ? remove_old(x, timeout_ms, err) : status;
}

static void end(compact_call *x) {
    compaction *c = &x->c;
    for (uint32_t i = 0; i < c->worker_count; i++) {
        compact_worker_free(&c->workers[i]);
    }
    for (size_t i = 0; i < c->table_count; i++) {
        free(c->tables[i].blocks);
    }
    free(c->workers);
    free(c->tables);
    free(c->remaining);
    free(c->readers.slots);
    free(c->replaced.slots);
    free(c->intact.slots);
    checked_files_free(&c->checked);
    free(x->current.slots);
    free(x->order);
    manifest_set_free(&x->all);
    views_free(&c->views);
    columns_cache_free(&c->columns, false);
}

ckd_status compact_within(ckd_compaction **out, bool *over, ckd_store *store,
                          const ckd_compact_options *options, const compact_limits *limits, ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    if (out) {
        *out = NULL;
    }
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_compact_options", err);
    o.max_depth = o.max_depth ? o.max_depth : DEFAULT_DEPTH;
    o.pack_below = o.pack_below ? o.pack_below : DEFAULT_PACK;
    o.max_load_cost = o.max_load_cost > 0 ? o.max_load_cost : DEFAULT_LOAD_COST;
    THEN(status, check_options(&o, err));
    THEN(status, store_check_writable(store, err));
    if (status != CKD_OK) {
        return status;
    }
    compact_call x = {.c = {.store = store, .options = o, .limits = *limits},
                      .out = calloc(1, sizeof(ckd_compaction))};
    if (!x.out) {
        return err_nomem(err, sizeof(*x.out), "a compaction");
    }
    views_init(&x.c.views, store);
    x.c.views.use_materialized = false;
    columns_cache_init(&x.c.columns);
    x.c.callers_mode = float_mode_enter();
    status = compact(&x, err);
    float_mode_leave(x.c.callers_mode);
    *over = x.over || compact_limit_reached(&x.c);
    end(&x);
    if (status != CKD_OK || !out) {
        ckd_compaction_free(x.out);
        return status;
    }
    *out = x.out;
    return CKD_OK;
}

ckd_status ckd_compact(ckd_compaction **out, ckd_store *store, const ckd_compact_options *options,
                       ckd_error *err) {
    bool over;
    compact_limits limits = {.dead_percent = CKD_COMPACT_SHARE,
                             .timeout_ms = store->options.lock_timeout_ms,
                             .move_max = UINT64_MAX};
    return compact_within(out, &over, store, options, &limits, err);
}

void ckd_compaction_free(ckd_compaction *c) {
    if (c) {
        ckd_prune_free(c->pruned);
        free(c->items);
        free(c);
    }
}
