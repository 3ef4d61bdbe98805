#include "engine/compact.h"

#include <stdlib.h>

#include "engine/damage.h"
#include "engine/retain.h"

#define DEFAULT_DEPTH     16
#define DEFAULT_LOAD_COST 4.0
#define DEFAULT_PACK      (UINT64_C(256) << 10)
#define VIEWS_AT_MOST     256 /* open at a time */
#define NAP_NS            UINT64_C(100000000)
#define OLD_BYTES         (UINT64_C(16) << 20)
#define ROOM_FOR_OLD      (8 * OLD_BYTES)
#define LAST_PATIENCE_MS  1000 /* for readers of what was replaced */

/* The call: a compaction, and what is told of it. */
typedef struct compacting {
    compaction c;
    ckd_compaction *out;
    size_t capacity;
    needs all;
    need **order; /* dependents first */
    size_t count;
    uint64_t old_bytes; /* of generations that were replaced, and may still be there */
} compacting;

/* ---- what the parts ask for ---- */

static int by_id(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}

bool compact_is_unwanted(const compaction *c, const ckd_id *checkpoint) {
    return c->unwanted_count &&
           bsearch(checkpoint, c->unwanted, c->unwanted_count, sizeof(ckd_id), by_id) != NULL;
}

/* The place of the table, or where it belongs. */
static size_t table_place(const compaction *c, const ckd_id *checkpoint) {
    size_t low = 0, high = c->table_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (by_id(&c->tables[middle].checkpoint, checkpoint) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const load_table *compact_table(const compaction *c, const ckd_id *checkpoint) {
    size_t at = table_place(c, checkpoint);
    return at < c->table_count && id_equal(&c->tables[at].checkpoint, checkpoint) ? &c->tables[at] : NULL;
}

ckd_status compact_note(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                        ckd_error *err) {
    if (c->table_count == c->table_capacity) {
        size_t capacity = 2 * c->table_capacity + 16;
        load_table *grown = realloc(c->tables, capacity * sizeof(*grown));
        if (!grown) {
            free(blocks);
            return err_nomem(err, capacity * sizeof(*grown), "checkpoints");
        }
        c->tables = grown;
        c->table_capacity = capacity;
    }
    size_t at = table_place(c, checkpoint);
    memmove(c->tables + at + 1, c->tables + at, (c->table_count - at) * sizeof(*c->tables));
    c->tables[at] = (load_table){*checkpoint, count, blocks};
    c->table_count++;
    return CKD_OK;
}

void compact_forget_views(compaction *c) {
    views_free(&c->views);
    views_init(&c->views, c->store);
    c->views.use_ready = false; /* damage is to be found, not to be hidden */
}

static ckd_status tell(compaction *c, ckd_error *err) {
    if (!c->options.on_progress) {
        return CKD_OK;
    }
    float_mode_leave(c->callers_mode);
    int stop = c->options.on_progress(c->options.progress_context,
                                      c->done < c->to_be_done ? c->done : c->to_be_done, c->to_be_done);
    c->callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the compaction was cancelled; what was done stays done")
                : CKD_OK;
}

ckd_status compact_pace(compaction *c, uint64_t size, uint64_t done, ckd_error *err) {
    c->moved += size;
    c->done += done;
    ckd_status status = tell(c, err);
    double rate = (double)c->options.bytes_per_s;
    uint64_t until = rate > 0 ? c->begun_ns + (uint64_t)((double)c->moved / rate * 1e9) : 0;
    for (uint64_t now = clock_monotonic_ns(); now < until && status == CKD_OK; now = clock_monotonic_ns()) {
        clock_sleep_ns(until - now < NAP_NS ? until - now : NAP_NS);
        status = tell(c, err);
    }
    return status;
}

/* ---- what is wanted ---- */

static ckd_status check_options(const ckd_compact_options *o, ckd_error *err) {
    if (o->max_depth > MAX_SAVE_DEPTH) {
        return err_set(err, CKD_E_INVALID, "a depth of %u is above what can be loaded, %u",
                       (unsigned)o->max_depth, MAX_SAVE_DEPTH);
    }
    if (!(o->max_load_cost >= 0) || (o->max_load_cost > 0 && o->max_load_cost < 1)) {
        return err_set(err, CKD_E_INVALID, "load costs are in base loads: 1 or more, or 0 for the default");
    }
    return o->policy && o->stored_policies ? err_set(err, CKD_E_INVALID, "either a policy or the stored ones")
                                           : CKD_OK;
}

static bool only_needed(const ckd_retained *r) {
    return (r->kept & ~(unsigned)CKD_KEPT_NEEDED) == 0;
}

/* What the policy lets go, also if others are deltas on it now. The plan then says so. */
static ckd_status find_unwanted(compacting *x, ckd_error *err) {
    compaction *c = &x->c;
    ckd_prune *plan;
    uint64_t undo_s;
    if (!c->options.policy && !c->options.stored_policies) {
        return CKD_OK;
    }
    prune_request request = prune_request_of(c->options.policy);
    ckd_status status = retain_plan(&plan, &undo_s, c->store, &request, err);
    if (status != CKD_OK) {
        return status;
    }
    x->out->pruned = plan;
    c->unwanted = calloc(plan->count + 1, sizeof(*c->unwanted));
    if (!c->unwanted) {
        return err_nomem(err, plan->count * sizeof(*c->unwanted), "what is not wanted");
    }
    plan->deleted = plan->bytes = 0;
    for (size_t i = 0; i < plan->count; i++) {
        ckd_retained *r = &plan->items[i];
        if (only_needed(r)) {
            r->kept = 0;
            plan->deleted++;
            plan->bytes += r->checkpoint.stored_bytes;
            c->unwanted[c->unwanted_count++] = r->checkpoint.id;
        }
    }
    if (c->unwanted_count) {
        qsort(c->unwanted, c->unwanted_count, sizeof(*c->unwanted), by_id);
    }
    return CKD_OK;
}

/* All that is listed, dependents first. */
static ckd_status find_order(compacting *x, ckd_error *err) {
    ckd_status status = needs_read(&x->all, x->c.store, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < x->all.count; i++) {
        x->all.items[i].chosen = !x->all.items[i].is_dead;
    }
    x->c.all = &x->all;
    status = needs_order(&x->order, &x->count, &x->all, err);
    return status == CKD_OK ? compact_order(x->order, x->count, &x->all, err) : status;
}

/* Is it older than so long, or not of the newest of its run? */
static bool is_cold(const compacting *x, const ckd_checkpoint *k) {
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

/* By its manifest alone: may there be something to do? */
static bool may_need_work(const compacting *x, const manifest *m) {
    const compaction *c = &x->c;
    const ckd_checkpoint *k = &m->checkpoint;
    bool folds = false;
    for (size_t i = 0; i < m->dependency_count && !folds; i++) {
        folds = compact_is_unwanted(c, &m->dependencies[i]);
    }
    bool asked = !c->options.run || strcmp(c->options.run, k->run) == 0;
    return !compact_is_unwanted(c, &k->id) &&
           (folds || (asked && (k->depth > c->options.max_depth || is_cold(x, k))));
}

/* ---- one checkpoint ---- */

static ckd_status add_item(ckd_compacted **item, compacting *x, const ckd_checkpoint *k, ckd_error *err) {
    ckd_compaction *out = x->out;
    if (out->count == x->capacity) {
        size_t capacity = 2 * x->capacity + 16;
        ckd_compacted *grown = realloc(out->items, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "a list of checkpoints");
        }
        out->items = grown;
        x->capacity = capacity;
    }
    *item = &out->items[out->count++];
    **item = (ckd_compacted){.checkpoint = *k, .bytes = k->stored_bytes, .depth = k->depth};
    return CKD_OK;
}

/* Damage, or others were quicker: that is this checkpoint's matter, and the rest can go on. */
static bool concerns_one(ckd_status status, const ckd_error *why) {
    return status == CKD_E_NOT_FOUND || status == CKD_E_EXISTS || status == CKD_E_UNSUPPORTED ||
           is_damage(status, why);
}

static ckd_status finish_item(compacting *x, const ckd_checkpoint *k, const rewrite_plan *p, uint64_t stored,
                              ckd_status status, const ckd_error *why, ckd_error *err) {
    ckd_compacted *item = NULL;
    if (status != CKD_OK && !concerns_one(status, why)) {
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
    item->bytes = stored;
    item->depth = p->depth;
    x->out->before += k->stored_bytes;
    x->out->after += stored;
    return CKD_OK;
}

static ckd_status note_estimate(compaction *c, const rewrite_plan *p, ckd_error *err) {
    size_t count = p->view->block_count;
    block_load *blocks = calloc(count + 1, sizeof(*blocks));
    if (!blocks) {
        return err_nomem(err, count * sizeof(*blocks), "the blocks of a checkpoint");
    }
    for (size_t i = 0; i < count; i++) {
        blocks[i] = p->fates[i].load;
    }
    ckd_status status = compact_note(c, &p->view->manifest.checkpoint.id, blocks, count, err);
    return status == CKD_OK ? compact_know_planned(c, p, err) : status;
}

static ckd_status rewrite_one(uint64_t *stored, compaction *c, rewrite_plan *p, ckd_error *err) {
    compact_done done = {.stored = 0};
    ckd_status status = compact_rewrite(&done, c, p, 1, err);
    *stored = done.stored;
    return status == CKD_OK ? err_from(err, done.left.status, &done.left) : status;
}

/* To look for them reads all manifests, which takes longer than rewriting a small checkpoint: they wait for each other, unless there is little room. */
static ckd_status remove_some_old(compacting *x, uint64_t more, ckd_error *err) {
    x->old_bytes += more;
    uint64_t room = dir_room(path_in(x->c.store->path, DIR_CHUNKS).text);
    if (x->old_bytes < OLD_BYTES && room >= ROOM_FOR_OLD) {
        return CKD_OK;
    }
    x->old_bytes = 0;
    return compact_remove_old(&x->out->old_files, x->c.store, 0, err);
}

static ckd_status compact_one(compacting *x, const need *n, ckd_error *err) {
    compaction *c = &x->c;
    const ckd_checkpoint *k = &n->m.checkpoint;
    rewrite_plan p = {.view = NULL};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    file_lock *readers;
    uint64_t stored = 0, done = c->done;
    ckd_status status = store_lock_reader(&readers, c->store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = compact_examine(&p, c, &k->id, is_cold(x, k), &why);
    bool rewrites = status == CKD_OK && p.why && !c->options.estimate;
    if (status == CKD_OK && p.why) {
        stored = p.about;
        status = rewrites ? rewrite_one(&stored, c, &p, &why) : note_estimate(c, &p, &why);
    }
    status = finish_item(x, k, &p, stored, status, &why, err);
    rewrite_plan_free(&p);
    lock_release(readers);
    if ((rewrites && !c->options.dry_run) || c->views.count > VIEWS_AT_MOST) {
        compact_forget_views(c);
    }
    c->done = done + k->stored_bytes;
    if (status == CKD_OK && rewrites && !c->options.dry_run) {
        status = remove_some_old(x, k->stored_bytes, err);
    }
    return status == CKD_OK ? tell(c, err) : status;
}

/* ---- several into the same files ---- */

/* Plans of those that can only be copied; others are left to the next call. */
static ckd_status plan_pack(rewrite_plan *plans, size_t *count, compacting *x, const compact_pack *g,
                            ckd_error *err) {
    *count = 0;
    for (size_t i = 0; i < g->count; i++) {
        const ckd_checkpoint *k = &g->items[i]->m.checkpoint;
        rewrite_plan *p = &plans[*count];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status status = compact_examine(p, &x->c, &k->id, false, &why);
        if (status == CKD_OK && !(p->why & ~(unsigned)CKD_COMPACT_STALE)) {
            p->why |= CKD_COMPACT_PACK;
            p->about = k->stored_bytes;
            ++*count;
            continue;
        }
        rewrite_plan_free(p);
        if (status != CKD_OK && !concerns_one(status, &why)) {
            return err_from(err, status, &why);
        }
    }
    return CKD_OK;
}

/* The one that cannot be read stays where it is, and is told. *dropped: there was one. */
static ckd_status drop_failed(bool *dropped, compacting *x, rewrite_plan *plans, size_t *count,
                              const compact_done *done, ckd_status why_status, const ckd_error *why,
                              ckd_error *err) {
    size_t at = 0;
    while (at < *count && !done[at].failed) {
        at++;
    }
    *dropped = at < *count;
    if (!*dropped) {
        return CKD_OK;
    }
    ckd_status status =
        finish_item(x, &plans[at].view->manifest.checkpoint, &plans[at], 0, why_status, why, err);
    rewrite_plan_free(&plans[at]);
    --*count;
    memmove(&plans[at], &plans[at + 1], (*count - at) * sizeof(*plans));
    plans[*count] = (rewrite_plan){.view = NULL};
    return status;
}

/* Those that can be read: one that is damaged is no reason to leave the others. */
static ckd_status rewrite_readable(ckd_status *packed, ckd_error *why, compact_done *done, compacting *x,
                                   rewrite_plan *plans, size_t *count, ckd_error *err) {
    ckd_status status = CKD_OK;
    bool again = true;
    while (again && status == CKD_OK) {
        *why = (ckd_error){.offset = CKD_NO_OFFSET};
        *packed = *count ? compact_rewrite(done, &x->c, plans, *count, why) : CKD_OK;
        again = false;
        if (*packed != CKD_OK && concerns_one(*packed, why)) {
            status = drop_failed(&again, x, plans, count, done, *packed, why, err);
        }
    }
    return status;
}

static ckd_status rewrite_pack(compacting *x, rewrite_plan *plans, size_t *count, ckd_error *err) {
    compact_done done[COMPACT_PACK_MOST] = {{.stored = 0}};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK, packed = CKD_OK;
    if (x->c.options.estimate) {
        for (size_t i = 0; i < *count; i++) {
            done[i].stored = plans[i].about;
        }
    } else {
        status = rewrite_readable(&packed, &why, done, x, plans, count, err);
    }
    for (size_t i = 0; i < *count && status == CKD_OK; i++) {
        bool mine = packed == CKD_OK && done[i].left.status != CKD_OK;
        status = finish_item(x, &plans[i].view->manifest.checkpoint, &plans[i], done[i].stored,
                             mine ? done[i].left.status : packed, mine ? &done[i].left : &why, err);
    }
    return status;
}

static ckd_status pack(compacting *x, const compact_pack *g, ckd_error *err) {
    compaction *c = &x->c;
    rewrite_plan plans[COMPACT_PACK_MOST] = {{.view = NULL}};
    size_t count = 0;
    file_lock *readers;
    uint64_t done = c->done;
    ckd_status status = store_lock_reader(&readers, c->store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = plan_pack(plans, &count, x, g, err);
    if (status == CKD_OK && count) {
        status = rewrite_pack(x, plans, &count, err);
    }
    for (size_t i = 0; i < count; i++) {
        rewrite_plan_free(&plans[i]);
    }
    compact_forget_views(c);
    lock_release(readers);
    c->done = done + g->bytes;
    if (status == CKD_OK && !c->options.dry_run && !c->options.estimate) {
        status = remove_some_old(x, g->bytes, err);
    }
    return status == CKD_OK ? tell(c, err) : status;
}

/* What is not rewritten anyway. */
static ckd_status find_packs(compact_packs *out, compacting *x, ckd_error *err) {
    const need **rest = calloc(x->count + 1, sizeof(*rest));
    size_t count = 0;
    *out = (compact_packs){.items = NULL};
    if (!rest) {
        return err_nomem(err, x->count * sizeof(*rest), "checkpoints");
    }
    for (size_t i = 0; i < x->count; i++) {
        const need *n = x->order[i];
        const char *run = x->c.options.run;
        bool asked = !run || strcmp(run, n->m.checkpoint.run) == 0;
        if (asked && !compact_is_unwanted(&x->c, &n->m.checkpoint.id) && !may_need_work(x, &n->m)) {
            rest[count++] = n;
        }
    }
    ckd_status status = compact_find_packs(out, &x->c, &x->all, rest, count, err);
    free(rest);
    return status;
}

/* ---- all of them ---- */

static ckd_status compact_all(compacting *x, ckd_error *err) {
    compact_packs packs;
    ckd_status status = find_packs(&packs, x, err);
    x->c.to_be_done += packs.bytes;
    for (size_t i = 0; i < x->count; i++) {
        x->c.to_be_done += may_need_work(x, &x->order[i]->m) ? x->order[i]->m.checkpoint.stored_bytes : 0;
    }
    for (size_t i = x->count; i-- > 0 && status == CKD_OK;) {
        x->out->checkpoints++;
        if (may_need_work(x, &x->order[i]->m)) {
            status = compact_one(x, x->order[i], err);
        }
    }
    for (size_t i = 0; i < packs.count && status == CKD_OK; i++) {
        status = pack(x, &packs.items[i], err);
    }
    compact_packs_free(&packs);
    return status;
}

/* What nothing builds on any more goes, as the policy says. */
static ckd_status prune(compacting *x, ckd_error *err) {
    const ckd_compact_options *o = &x->c.options;
    if ((!o->policy && !o->stored_policies) || o->dry_run || o->estimate) {
        return CKD_OK;
    }
    ckd_prune_free(x->out->pruned);
    x->out->pruned = NULL;
    return ckd_store_prune(&x->out->pruned, x->c.store, o->policy, o->deletion, err);
}

static ckd_status begin(compacting *x, ckd_error *err) {
    compaction *c = &x->c;
    uint32_t workers = pool_threads(c->store->pool);
    c->begun_ns = clock_monotonic_ns();
    c->workers = calloc(workers, sizeof(*c->workers));
    if (!c->workers) {
        return err_nomem(err, workers * sizeof(*c->workers), "workers");
    }
    ckd_status status = CKD_OK;
    for (; c->worker_count < workers && status == CKD_OK; c->worker_count++) {
        status = compact_worker_init(&c->workers[c->worker_count], &c->columns, err);
    }
    if (status == CKD_OK) {
        status = find_unwanted(x, err);
    }
    return status == CKD_OK ? find_order(x, err) : status;
}

static ckd_status compact(compacting *x, ckd_error *err) {
    ckd_status status = begin(x, err);
    if (status == CKD_OK) {
        status = compact_all(x, err);
    }
    if (status == CKD_OK) {
        status = prune(x, err);
    }
    bool wrote = !x->c.options.dry_run && !x->c.options.estimate;
    return status == CKD_OK && wrote
               ? compact_remove_old(&x->out->old_files, x->c.store, LAST_PATIENCE_MS, err)
               : status;
}

static void end(compacting *x) {
    compaction *c = &x->c;
    for (uint32_t i = 0; i < c->worker_count; i++) {
        compact_worker_free(&c->workers[i]);
    }
    for (size_t i = 0; i < c->table_count; i++) {
        free(c->tables[i].blocks);
    }
    free(c->workers);
    free(c->tables);
    free(c->unwanted);
    free(c->links);
    free(x->order);
    needs_free(&x->all);
    views_free(&c->views);
    columns_cache_free(&c->columns, false);
}

ckd_status ckd_compact(ckd_compaction **out, ckd_store *store, const ckd_compact_options *options,
                       ckd_error *err) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    if (out) {
        *out = NULL;
    }
    if (options) {
        memcpy(&o, options, options->struct_size < sizeof(o) ? options->struct_size : sizeof(o));
    }
    o.max_depth = o.max_depth ? o.max_depth : DEFAULT_DEPTH;
    o.pack_below = o.pack_below ? o.pack_below : DEFAULT_PACK;
    o.max_load_cost = o.max_load_cost > 0 ? o.max_load_cost : DEFAULT_LOAD_COST;
    ckd_status status = check_options(&o, err);
    if (status == CKD_OK) {
        status = store_check_writable(store, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    compacting x = {.c = {.store = store, .options = o}, .out = calloc(1, sizeof(ckd_compaction))};
    if (!x.out) {
        return err_nomem(err, sizeof(*x.out), "a compaction");
    }
    views_init(&x.c.views, store);
    x.c.views.use_ready = false;
    columns_cache_init(&x.c.columns);
    x.c.callers_mode = float_mode_enter();
    status = compact(&x, err);
    float_mode_leave(x.c.callers_mode);
    end(&x);
    if (status != CKD_OK || !out) {
        ckd_compaction_free(x.out);
        return status;
    }
    *out = x.out;
    return CKD_OK;
}

void ckd_compaction_free(ckd_compaction *c) {
    if (c) {
        ckd_prune_free(c->pruned);
        free(c->items);
        free(c);
    }
}
