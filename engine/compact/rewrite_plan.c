/* Plans one checkpoint: which of its blocks can be copied, and what the others may build on. */
#include <math.h>
#include <stdlib.h>

#include "engine/compact/internal.h"

#define MAX_NESTED 64u /* blocks of one checkpoint that build on each other */

typedef struct planning {
    compaction *c;
    rewrite_plan *plan;
    bool cold;
    bool retains; /* victims' records are kept wherever that is allowed */
    uint32_t nested;
} planning;

static ckd_status plan_block(planning *x, size_t i, ckd_error *err);

/* ---- the load of a block ---- */

static ckd_status cycle_error(const view_block *b, ckd_error *err) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "blocks depend on each other in a cycle");
    return err_in_tensor(err, CKD_E_CORRUPT, b->record->tensor->name);
}

/* The index of a block in the root view of its checkpoint; SIZE_MAX: unknown. */
static size_t number_of(compaction *c, const view *v, const view_block *b) {
    const record *r = b->record;
    const view *root = v;
    if (!v->root) {
        return (size_t)(b - v->blocks);
    }
    if (views_get(&root, &c->views, &v->manifest.checkpoint.id, NULL) != CKD_OK) {
        return SIZE_MAX;
    }
    view_source s = {.view = root,
                     .tensor = view_find(root, r->tensor->name),
                     .span = {r->region, r->first, r->count},
                     .content = &r->content};
    const view_block *same = s.tensor ? view_source_block(&s) : NULL;
    return same ? (size_t)(same - root->blocks) : SIZE_MAX;
}

/* The load stated by the record or, if a dry run would have rewritten the checkpoint, the load after that. */
static block_load known_load(compaction *c, const view *v, const view_block *b) {
    const load_table *t = compact_table(c, &v->manifest.checkpoint.id);
    size_t number = t ? number_of(c, v, b) : SIZE_MAX;
    return t && number < t->count ? t->blocks[number]
                                  : (block_load){b->record->depth, record_chain(b->record)};
}

/* Whose loads are counted. */
typedef struct load_query {
    compaction *c;
    const rewrite_plan *p;
    planning *x; /* plans blocks that are not planned yet; NULL: uses the rewrites as planned so far */
} load_query;

/* Adds the load of the values that a dependency names. A block that is needed only in part counts in full. */
static ckd_status add_source(block_load *to, const load_query *q, const view_source *s, ckd_error *err) {
    size_t k, last;
    for (view_shards_for(&k, &last, s->tensor, &s->span); k < last; k++) {
        const view_shard *shard = &s->tensor->shards[k];
        size_t first, end;
        view_shard_range(&first, &end, shard, s->tensor->shape, &s->span);
        for (; first < end; first++) {
            const view_block *b = &shard->blocks[first];
            bool own = s->view == q->p->view;
            size_t number = (size_t)(b - s->view->blocks);
            ckd_status status = own && q->x ? plan_block(q->x, number, err) : CKD_OK;
            if (status != CKD_OK) {
                return status;
            }
            block_load load = own ? q->p->rewrites[number].load : known_load(q->c, s->view, b);
            to->depth = load.depth > to->depth ? load.depth : to->depth;
            to->chain.stored += load.chain.stored;
            to->chain.work += load.chain.work;
        }
    }
    return CKD_OK;
}

double compact_own_work(const record *r) {
    if (r->coding == CODING_LATTICE) {
        return (double)r->chain_work / (r->depth + 1);
    }
    size_t size = ckd_dtype_size(r->tensor->dtype);
    double max = decode_work((predictor)r->predictor, (coding)r->coding, size, r->raw_size, r->stored_size,
                             r->raw_size / size);
    if (r->predictor != PREDICT_PARENT || r->coding != CODING_SYMBOLS || r->depth == 0) {
        return max;
    }
    double links = (double)r->chain_work - record_base(r).work;
    return fmin(max, fmax(0, links) / r->depth);
}

static ckd_status load_of(block_load *out, const load_query *q, const view_block *b, uint32_t nested,
                          ckd_error *err);

static ckd_status add_link(block_load *to, const load_query *q, const view_block *b, const dependency *on,
                           uint32_t nested, ckd_error *err) {
    const view *in = q->p->view;
    bool own = id_equal(&on->checkpoint, &in->manifest.checkpoint.id);
    ckd_status status = own ? CKD_OK : views_within(&in, &q->c->views, q->p->view, &on->checkpoint, err);
    const view_block *link = status == CKD_OK ? view_find_link(in, b->record, &on->content) : NULL;
    if (status != CKD_OK || !link || nested >= 4 * MAX_NESTED) {
        return status != CKD_OK ? status : cycle_error(b, err);
    }
    block_load load = {link->record->depth, record_chain(link->record)};
    if (own) {
        status = load_of(&load, q, link, nested + 1, err);
    }
    to->depth = load.depth > to->depth ? load.depth : to->depth;
    to->chain.stored += load.chain.stored;
    to->chain.work += load.chain.work;
    return status;
}

static ckd_status load_of(block_load *out, const load_query *q, const view_block *b, uint32_t nested,
                          ckd_error *err) {
    const record *r = b->record;
    bool delta = r->predictor == PREDICT_PARENT || r->predictor == PREDICT_STEP;
    *out = (block_load){0, {0, 0}};
    if (r->predictor != PREDICT_COPY && r->predictor != PREDICT_CAST && !delta) {
        *out = (block_load){r->depth, record_chain(r)}; /* standalone, or an unknown predictor */
        return CKD_OK;
    }
    for (uint32_t k = 0; k < r->dependency_count; k++) {
        view_source s;
        const dependency *d = &r->dependencies[k];
        if (d->kind != DEPENDS_VALUES && d->kind != DEPENDS_LINK) {
            continue;
        }
        bool link = d->kind == DEPENDS_LINK;
        ckd_status status = link ? add_link(out, q, b, d, nested, err)
                                 : view_source_of(&s, &q->c->views, q->p->view, b, k, err);
        if (status == CKD_OK && !link) {
            status = add_source(out, q, &s, err);
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    if (delta) {
        out->depth++;
        out->chain.stored += (double)r->stored_size;
        out->chain.work += compact_own_work(r);
    }
    return CKD_OK;
}

ckd_status compact_load_of(block_load *out, compaction *c, const rewrite_plan *p, size_t i, ckd_error *err) {
    return load_of(out, &(load_query){c, p, NULL}, &p->view->blocks[i], 0, err);
}

/* ---- a new base ---- */

/* The tensor of the checkpoint that matches the block's in name, dtype and shape; NULL: none does. */
static const view_tensor *same_kind(const view *v, const record *r) {
    const view_tensor *t = view_find(v, r->tensor->name);
    bool same = t && t->tensor->dtype == r->tensor->dtype && t->shape->ndim == r->tensor->ndim &&
                memcmp(t->shape->shape, r->tensor->shape, t->shape->ndim * sizeof(uint64_t)) == 0;
    return same ? t : NULL;
}

static bool allows(const compaction *c, const block_load *new_base, const record *r) {
    size_t size = ckd_dtype_size(r->tensor->dtype);
    load_cost base = base_cost(size, r->raw_size, r->base_stored);
    return new_base->depth + 1 <= c->options.max_depth &&
           new_base->chain.stored <= c->options.max_load_cost * base.stored;
}

/*
 * Chooses the nearest ancestor that stays. If its chain is too long, chooses the nearest one that is not a delta:
 * one in between would soon be too deep again. If an ancestor is damaged, the block is coded standalone.
 */
static ckd_status find_new_base(block_rewrite *f, compaction *c, const rewrite_plan *p, const record *r,
                                ckd_error *err) {
    for (size_t i = 0; i < p->ancestor_count; i++) {
        const view *older;
        ckd_status status = views_get(&older, &c->views, &p->ancestors[i], err);
        if (status == CKD_E_NOMEM) {
            return status;
        }
        if (status != CKD_OK) {
            return CKD_OK;
        }
        const view_tensor *t = same_kind(older, r);
        if (!t) {
            return CKD_OK;
        }
        block_load load = {0, {0, 0}};
        rewrite_plan no_plan = {.view = NULL};
        view_source s = {.view = older, .tensor = t, .span = {r->region, r->first, r->count}};
        status = add_source(&load, &(load_query){c, &no_plan, NULL}, &s, err);
        if (status == CKD_OK && (i == 0 || load.depth == 0) && allows(c, &load, r)) {
            f->new_base = older;
            f->new_base_tensor = t;
            f->new_base_load = load;
            return CKD_OK;
        }
    }
    return CKD_OK;
}

/* ---- blocks ---- */

bool compact_builds_on_victim(const compaction *c, const view *v, const record *r) {
    bool any = false;
    for (uint32_t k = 0; k < r->dependency_count && !any; k++) {
        const ckd_id *id = &r->dependencies[k].checkpoint;
        any = !id_equal(id, &v->manifest.checkpoint.id) && compact_is_victim(c, id);
    }
    return any;
}

/* If a block's share of victims' bytes is below this fraction of its raw bytes, no recoding could take less. */
#define SURELY 12u /* divisor of the raw bytes */

static bool allowed_as_it_is(const compaction *c, const block_load *now, const record *r) {
    load_cost base = base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
    return now->depth <= c->options.max_depth && now->chain.stored <= c->options.max_load_cost * base.stored;
}

/* Can exact values be coded smaller? Only standalone blocks and deltas are tried. */
static bool worth_recoding(const record *r) {
    return r->coding != CODING_LATTICE && r->stored_size >= 512 &&
           (r->predictor == PREDICT_NONE || r->predictor == PREDICT_PARENT);
}

static ckd_status plan_block(planning *x, size_t i, ckd_error *err) {
    rewrite_plan *p = x->plan;
    block_rewrite *f = &p->rewrites[i];
    const view_block *b = &p->view->blocks[i];
    const record *r = b->record;
    if (f->state == REWRITE_KNOWN) {
        return CKD_OK;
    }
    if (f->state == REWRITE_ASKED || x->nested >= MAX_NESTED) {
        return cycle_error(b, err);
    }
    f->state = REWRITE_ASKED;
    x->nested++;
    ckd_status status = load_of(&f->load, &(load_query){x->c, p, x}, b, 0, err);
    x->nested--;
    if (status != CKD_OK) {
        return status;
    }
    f->why = compact_builds_on_victim(x->c, p->view, r) ? CKD_COMPACT_FOLD : 0;
    f->why |= f->load.depth > x->c->options.max_depth ? CKD_COMPACT_DEPTH : 0;
    f->why |= x->cold && worth_recoding(r) ? CKD_COMPACT_COLD : 0;
    if (f->why) {
        block_load now = f->load;
        f->retained_bytes = UINT64_MAX;
        if (f->why == CKD_COMPACT_FOLD && allowed_as_it_is(x->c, &now, r)) {
            status = compact_retained_bytes(&f->retained_bytes, x->c, p->view, b, err);
        }
        bool retained = x->retains && f->retained_bytes != UINT64_MAX;
        if (status == CKD_OK && (retained || f->retained_bytes < r->raw_size / SURELY)) {
            f->why = 0;
            f->state = REWRITE_KNOWN;
            return CKD_OK;
        }
        THEN(status, find_new_base(f, x->c, p, r, err));
        load_cost base = base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
        f->load = f->new_base ? (block_load){f->new_base_load.depth + 1, f->new_base_load.chain}
                              : (block_load){0, base};
    }
    f->state = REWRITE_KNOWN;
    return status;
}

/* A lossy block takes about nine bits a value when coded standalone. */
static uint64_t estimate_bytes(const record *r, const block_rewrite *f) {
    bool lossy = r->coding == CODING_LATTICE;
    uint64_t coded = lossy ? r->count * 9 / 8 : r->base_stored;
    return !f->why || f->retained_bytes < coded ? r->stored_size : coded;
}

/*
 * A rewrite after a save copies the whole checkpoint. That is worth it only if enough is released: a merge brings a few
 * records of victims together at less cost. The share of dead bytes stays well below the limit.
 */
#define NEGLIGIBLE 4 /* divisor of the share of dead bytes that is allowed */

static bool releases_too_little(const rewrite_plan *p, const compaction *c) {
    double released = 0, stored = (double)p->view->manifest.checkpoint.stored_bytes;
    for (size_t i = 0; i < p->view->block_count; i++) {
        const block_rewrite *f = &p->rewrites[i];
        released += f->why ? (double)f->retained_bytes : 0;
    }
    return c->limits.waste_run && released > 0 &&
           released < stored * c->limits.dead_percent / 100 / NEGLIGIBLE;
}

static ckd_status plan_blocks(planning *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->plan->view->block_count && status == CKD_OK; i++) {
        status = plan_block(x, i, err);
    }
    return status;
}

static void sum_up(rewrite_plan *p, uint32_t max_depth) {
    p->estimated_bytes = p->view->manifest.checkpoint.stored_bytes;
    for (size_t i = 0; i < p->view->block_count; i++) {
        const record *r = p->view->blocks[i].record;
        const block_rewrite *f = &p->rewrites[i];
        p->why |= f->why;
        p->recoded += f->why != 0;
        p->depth = f->load.depth > p->depth ? f->load.depth : p->depth;
        p->estimated_bytes = p->estimated_bytes -
                             (r->stored_size < p->estimated_bytes ? r->stored_size : p->estimated_bytes) +
                             estimate_bytes(r, f);
        p->why |= !f->why && r->depth > max_depth && f->load.depth < r->depth ? CKD_COMPACT_STALE : 0;
    }
}

/* ---- the ancestors ---- */

/* A search for a checkpoint among the parents and dependencies of others, down to the last, by their manifests. */
typedef struct search {
    const manifest_set *all;
    const ckd_id *sought;
    bool found;
    bool *seen;                  /* by manifest: it does not lead there, or was already visited */
    const manifest_entry **todo; /* has room for all, because each is met once */
    size_t count;
} search;

static void visit(search *s, const ckd_id *id) {
    const manifest_entry *n = id_is_zero(id) ? NULL : manifest_set_find(s->all, id);
    s->found = s->found || id_equal(id, s->sought);
    if (n && !s->seen[n - s->all->items]) {
        s->seen[n - s->all->items] = true;
        s->todo[s->count++] = n;
    }
}

/* Is the checkpoint the one sought, or does it descend from that or build on it? */
static bool leads_there(search *s, const ckd_id *from) {
    s->found = false;
    s->count = 0;
    visit(s, from);
    while (s->count && !s->found) {
        const manifest *m = &s->todo[--s->count]->m;
        visit(s, &m->checkpoint.parent);
        for (size_t i = 0; i < m->dependency_count; i++) {
            visit(s, &m->dependencies[i]);
        }
    }
    if (s->found) {
        memset(s->seen, 0, s->all->count * sizeof(*s->seen));
    }
    return s->found;
}

/* The newest remaining step of k's run below this one that was saved before k. */
static const manifest_entry *step_before(const compaction *c, const ckd_checkpoint *k, uint64_t step) {
    const manifest_entry *found = NULL;
    for (const manifest_entry *n = c->all->items; n < c->all->items + c->all->count; n++) {
        const ckd_checkpoint *o = &n->m.checkpoint;
        bool older = !n->in_trash && !n->superseded && o->step < step && o->created_ns < k->created_ns &&
                     strcmp(o->run, k->run) == 0 && !compact_is_victim(c, &o->id);
        found = older && (!found || o->step > found->m.checkpoint.step) ? n : found;
    }
    return found;
}

/*
 * Returns the parent of k. If it is gone, or descends from the checkpoint sought, the run's step before k takes its
 * place. A later step may have been saved first, and be the parent of an earlier one. Every checkpoint builds only on
 * checkpoints saved before it, in all stores and whatever other compactions do. So no copying and no joining of files
 * can close a circle.
 */
static const manifest_entry *next_ancestor(search *s, const compaction *c, const ckd_checkpoint *k) {
    const manifest_entry *n = id_is_zero(&k->parent) ? NULL : manifest_set_find(c->all, &k->parent);
    if (id_is_zero(&k->parent) || (n && !leads_there(s, &k->parent))) {
        return n;
    }
    n = step_before(c, k, k->step);
    while (n && leads_there(s, &n->m.checkpoint.id)) {
        n = step_before(c, k, n->m.checkpoint.step);
    }
    return n;
}

/*
 * Uses the manifests as they were at the beginning. The list ends with the last ancestor that find_new_base would look
 * at, so that a run of n checkpoints takes n short searches.
 */
static ckd_status find_ancestors(rewrite_plan *p, const compaction *c, ckd_error *err) {
    const ckd_id *id = &p->view->manifest.checkpoint.id;
    const manifest_entry *n = manifest_set_find(c->all, id);
    size_t all = c->all->count, max = compact_max_ancestors(c), count = max < all ? max : all;
    search s = {.all = c->all, .sought = id};
    p->ancestors = calloc(count + 1, sizeof(*p->ancestors));
    s.seen = calloc(all + 1, sizeof(*s.seen));
    s.todo = calloc(all + 1, sizeof(*s.todo));
    bool has_room = p->ancestors && s.seen && s.todo;
    for (size_t steps = 0; has_room && n && p->ancestor_count < count && steps < all; steps++) {
        n = next_ancestor(&s, c, &n->m.checkpoint);
        if (n && !n->in_trash && !compact_is_victim(c, &n->m.checkpoint.id)) {
            p->ancestors[p->ancestor_count++] = n->m.checkpoint.id;
        }
    }
    free(s.seen);
    free(s.todo);
    return has_room ? CKD_OK : err_nomem(err, all * sizeof(*s.todo), "a checkpoint's ancestors");
}

/* ---- the plan ---- */

ckd_status compact_plan_rewrite(rewrite_plan *out, compaction *c, const ckd_id *checkpoint, bool cold,
                                ckd_error *err) {
    *out = (rewrite_plan){.view = NULL};
    ckd_status status = compact_open(&out->view, &out->published, c, checkpoint, err);
    if (status != CKD_OK) {
        return status;
    }
    out->rewrites = calloc(out->view->block_count + 1, sizeof(*out->rewrites));
    if (!out->rewrites) {
        return err_nomem(err, out->view->block_count * sizeof(*out->rewrites), "the blocks of a checkpoint");
    }
    status = find_ancestors(out, c, err);
    if (status != CKD_OK) {
        return status;
    }
    planning x = {.c = c, .plan = out, .cold = cold};
    status = plan_blocks(&x, err);
    if (status == CKD_OK && releases_too_little(out, c)) {
        memset(out->rewrites, 0, out->view->block_count * sizeof(*out->rewrites));
        x.retains = true;
        status = plan_blocks(&x, err);
    }
    if (status == CKD_OK) {
        sum_up(out, c->options.max_depth);
    }
    return status;
}

void rewrite_plan_free(rewrite_plan *p) {
    free(p->rewrites);
    free(p->ancestors);
    *p = (rewrite_plan){.view = NULL};
}
