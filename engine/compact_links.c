/*
 * What a block is a delta on, where that goes: the deltas below it become links of its own checkpoint, payload by payload. A difference to what is further down, as one
 * delta, would have to tell every last bit of values that several coarse deltas told in a fraction of that.
 */
#include <stdlib.h>

#include "engine/compact.h"

#define LINK_BYTES 100u /* of a link's header and its part of the index, about */

/* Where the walk is. */
typedef struct place {
    const view *view;
    const view_block *at;
} place;

/* The side records that it needs, in the order of its dependencies. false: one is missing. */
static bool sides_of(compact_link *link) {
    const record *r = link->from->record;
    for (uint32_t k = 0; k < r->dependency_count; k++) {
        const dependency *on = &r->dependencies[k];
        if (on->kind == DEPENDS_SIDE) {
            const view_block *side = view_find_shared(link->view, RECORD_SIDE, &on->content);
            if (!side || link->side_count == COMPACT_SIDES) {
                return false;
            }
            link->sides[link->side_count++] = side;
        }
    }
    return true;
}

/* The block or link becomes one of the list. A side record is shared by the blocks of its span: their parts of it add up. */
static bool add(compact_links *l, const place *p) {
    const record *r = p->at->record;
    if (l->count == COMPACT_LINKS) {
        return false;
    }
    compact_link link = {.view = p->view, .from = p->at};
    if (!sides_of(&link)) {
        return false;
    }
    l->items[l->count++] = link;
    l->bytes += r->stored_size + LINK_BYTES;
    for (uint32_t i = 0; i < link.side_count; i++) {
        const record *side = link.sides[i]->record;
        double share = side->count ? (double)r->count / (double)side->count : 0;
        l->bytes += (uint64_t)((double)side->stored_size * share);
    }
    l->load.depth += r->predictor == PREDICT_PARENT;
    l->load.chain.stored += (double)r->stored_size;
    l->load.chain.work += compact_own_work(r);
    return true;
}

/* ---- links that there are ---- */

static known_link *slot_of(known_link *links, size_t capacity, const known_link *key) {
    uint64_t at;
    memcpy(&at, &key->content, sizeof(at));
    for (size_t i = (size_t)at & (capacity - 1);; i = (i + 1) & (capacity - 1)) {
        bool same = hash128_equal(&links[i].content, &key->content) && links[i].count == key->count &&
                    links[i].dtype == key->dtype;
        if (id_is_zero(&links[i].owner) || same) {
            return &links[i];
        }
    }
}

/* The first that has it stays: it is the oldest. */
ckd_status compact_know_link(compaction *c, const known_link *link, ckd_error *err) {
    if (2 * (c->link_count + 1) > c->link_capacity) {
        size_t capacity = c->link_capacity ? 2 * c->link_capacity : 1024;
        known_link *grown = calloc(capacity, sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "links");
        }
        for (size_t i = 0; i < c->link_capacity; i++) {
            if (!id_is_zero(&c->links[i].owner)) {
                *slot_of(grown, capacity, &c->links[i]) = c->links[i];
            }
        }
        free(c->links);
        c->links = grown;
        c->link_capacity = capacity;
    }
    known_link *slot = slot_of(c->links, c->link_capacity, link);
    if (id_is_zero(&slot->owner)) {
        *slot = *link;
        c->link_count++;
    }
    return CKD_OK;
}

static int by_id(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}

/* Of a checkpoint that this one came from; NULL: there is none. */
static const known_link *find_known(const compaction *c, const rewrite_plan *p, const record *r) {
    known_link key = {.content = r->content, .count = r->count, .dtype = (uint32_t)r->tensor->dtype};
    const known_link *l = c->link_capacity ? slot_of(c->links, c->link_capacity, &key) : NULL;
    bool known = l && !id_is_zero(&l->owner) && p->lineage_count &&
                 bsearch(&l->owner, p->lineage, p->lineage_count, sizeof(ckd_id), by_id);
    return known ? l : NULL;
}

static void end_on(compact_links *l, const dependency *on, const block_load *below) {
    l->possible = true;
    l->end = *on;
    l->end.tensor = "";
    l->ends_on_values = true;
    l->load.depth += below->depth;
    l->load.chain.stored += below->chain.stored;
    l->load.chain.work += below->chain.work;
}

/* The walk ends where the nearest checkpoint that stays has the same values: what is below them is its own. */
static bool ends_on_kept(compact_links *l, const block_fate *f, const record *block, const record *r) {
    values_source s = {.view = f->onto,
                       .tensor = f->onto_tensor,
                       .want = {block->region, block->first, block->count},
                       .content = &r->content};
    bool same = f->onto && values_source_block(&s);
    if (same) {
        dependency on = {.kind = DEPENDS_VALUES,
                         .checkpoint = f->onto->manifest.checkpoint.id,
                         .same_span = true,
                         .content = r->content};
        end_on(l, &on, &f->onto_load);
    }
    return same;
}

/* The walk ends where a checkpoint that stays has what comes next as a link. */
static bool ends_on_link(compact_links *l, const compaction *c, const rewrite_plan *p, const record *r) {
    const known_link *known = find_known(c, p, r);
    if (known) {
        dependency on = {
            .kind = DEPENDS_LINK, .checkpoint = known->owner, .same_span = true, .content = r->content};
        end_on(l, &on, &known->load);
    }
    return known != NULL;
}

/* ---- the walk ---- */

/* From a block to what it builds on. false: there is no such block, or this is where the walk ends. */
static bool step(place *p, compact_links *l, compaction *c, const view *from) {
    const record *r = p->at->record;
    const dependency *on = r->dependency_count ? &r->dependencies[0] : NULL;
    values_source s;
    if (on && on->kind == DEPENDS_LINK) {
        bool own = id_equal(&on->checkpoint, &p->view->manifest.checkpoint.id);
        const view *in = p->view;
        if (!own && views_get(&in, &c->views, &on->checkpoint, NULL) != CKD_OK) {
            return false;
        }
        p->view = in;
        p->at = view_find_link(in, r, &on->content);
        if (p->at && !own && !compact_is_unwanted(c, &on->checkpoint)) {
            block_load below = {p->at->record->depth, record_chain(p->at->record)};
            end_on(l, on, &below);
            return false;
        }
        return p->at != NULL;
    }
    if (!on || !on->same_span || (on->tensor && *on->tensor && strcmp(on->tensor, r->tensor->name) != 0) ||
        values_source_of(&s, &c->views, p->view, p->at, 0, r->tensor->dtype, NULL) != CKD_OK) {
        return false;
    }
    if (s.view != from && !compact_is_unwanted(c, &on->checkpoint)) {
        block_load below = {0, {0, 0}};
        if (compact_source_load(&below, c, &s) == CKD_OK) {
            end_on(l, on, &below);
        }
        return false;
    }
    p->view = s.view;
    p->at = values_source_block(&s);
    return p->at != NULL;
}

void compact_find_links(compact_links *out, compaction *c, const rewrite_plan *plan, size_t block) {
    place p = {plan->view, &plan->view->blocks[block]};
    *out = (compact_links){.possible = false};
    for (uint32_t steps = 0; steps < 4 * COMPACT_LINKS; steps++) {
        uint32_t how = p.at->record->predictor;
        bool delta = how == PREDICT_PARENT || how == PREDICT_NONE;
        const block_fate *fate = &plan->fates[block];
        if (out->count && (ends_on_kept(out, fate, plan->view->blocks[block].record, p.at->record) ||
                           ends_on_link(out, c, plan, p.at->record))) {
            return;
        }
        if ((!delta && how != PREDICT_COPY) || (delta && !add(out, &p))) {
            return;
        }
        if (how == PREDICT_NONE) {
            out->possible = true;
            return;
        }
        if (!step(&p, out, c, plan->view)) {
            break;
        }
    }
    out->possible = out->possible && out->count > 0; /* a copy of what stays is no delta */
}

bool compact_links_fit(const compact_links *l, const compaction *c, const record *r) {
    load_cost base = base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
    return l->possible && l->load.depth <= c->options.max_depth &&
           l->load.chain.stored <= c->options.max_load_cost * base.stored;
}

/* ---- writing them ---- */

static ckd_status copy_record(chunk_writer *w, const view_block *from, record *to, bytes *payload,
                              ckd_error *err) {
    void *room = bytes_scratch(payload, from->record->stored_size + 1, "a payload", err);
    ckd_status status = room ? chunk_read_payload(from->chunk, from->record, room, err) : CKD_E_NOMEM;
    return status == CKD_OK ? chunk_writer_append(w, to, payload->data, err) : status;
}

/* Of the block's tensor, unless it is in the new files already. */
static ckd_status write_shared(rewrite *r, chunk_writer *w, const view_block *from, record *to,
                               const record *block, ckd_error *err) {
    to->tensor = block->tensor;
    to->bundle = NULL;
    if (compact_written_has(&r->written, to)) {
        return CKD_OK;
    }
    ckd_status status = compact_written_add(&r->written, to, err);
    return status == CKD_OK ? copy_record(w, from, to, &r->room, err) : status;
}

static ckd_status write_sides(rewrite *r, chunk_writer *w, const compact_link *l, const record *block,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < l->side_count && status == CKD_OK; i++) {
        record to = *l->sides[i]->record;
        status = write_shared(r, w, l->sides[i], &to, block, err);
    }
    return status;
}

/* What link `at` builds on: the next one, or where the list ends. Returns the number of dependencies. */
static uint32_t dependencies_of(dependency to[COMPACT_DEPENDENCIES], const rewrite *r, const compact_links *l,
                                size_t at) {
    const compact_link *link = &l->items[at];
    const record *from = link->from->record;
    uint32_t count = 0;
    if (at + 1 < l->count) {
        to[count++] = (dependency){.kind = DEPENDS_LINK,
                                   .checkpoint = r->m.checkpoint.id,
                                   .tensor = "",
                                   .same_span = true,
                                   .content = l->items[at + 1].from->record->content};
    } else if (l->ends_on_values) {
        to[count++] = l->end;
    }
    for (uint32_t i = link->side_count; i > 0; i--) {
        to[count] = from->dependencies[from->dependency_count - i];
        to[count].tensor = "";
        to[count++].checkpoint = r->m.checkpoint.id;
    }
    return count;
}

/* What is below a link, its own payload included. */
static void set_link_load(record *to, const compact_links *l, size_t at) {
    double stored = l->load.chain.stored, work = l->load.chain.work;
    uint32_t depth = l->load.depth;
    for (size_t i = 0; i < at; i++) {
        const record *above = l->items[i].from->record;
        stored -= (double)above->stored_size;
        work -= compact_own_work(above);
        depth -= above->predictor == PREDICT_PARENT;
    }
    to->depth = depth;
    to->chain_stored = (uint64_t)(stored > 0 ? stored : 0);
    to->chain_work = (uint64_t)(work > 0 ? work : 0);
}

/* What others that came from the checkpoint may build on. */
static known_link known_of(const ckd_id *owner, const compact_links *l, size_t at) {
    record as = *l->items[at].from->record;
    set_link_load(&as, l, at);
    return (known_link){
        as.content, *owner, as.count, (uint32_t)as.tensor->dtype, {as.depth, record_chain(&as)}};
}

ckd_status compact_know_planned(compaction *c, const rewrite_plan *p, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < p->view->block_count && status == CKD_OK; i++) {
        compact_links l;
        if (!p->fates[i].linked) {
            continue;
        }
        compact_find_links(&l, c, p, i);
        for (size_t k = 1; k < l.count && l.possible && status == CKD_OK; k++) {
            known_link link = known_of(&p->view->manifest.checkpoint.id, &l, k);
            status = compact_know_link(c, &link, err);
        }
    }
    return status;
}

ckd_status compact_write_links(record *out, dependency dependencies[COMPACT_DEPENDENCIES], rewrite *r,
                               chunk_writer *w, const compact_links *l, const record *block, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < l->count && status == CKD_OK; i++) {
        status = write_sides(r, w, &l->items[i], block, err);
    }
    for (size_t i = l->count; i-- > 1 && status == CKD_OK;) {
        dependency on[COMPACT_DEPENDENCIES];
        record to = *l->items[i].from->record;
        to.kind = RECORD_LINK;
        to.dependencies = on;
        to.dependency_count = dependencies_of(on, r, l, i);
        set_link_load(&to, l, i);
        status = write_shared(r, w, l->items[i].from, &to, block, err);
        known_link known = known_of(&r->m.checkpoint.id, l, i);
        bytes_put(&r->links, &known, sizeof(known));
    }
    if (r->links.failed) {
        return err_nomem(err, r->links.size, "links");
    }
    const record *own = l->items[0].from->record;
    *out = *block;
    out->bundle = NULL;
    out->coding = own->coding;
    out->predictor = own->predictor;
    out->stored_size = own->stored_size;
    out->base_stored = own->base_stored;
    out->dependencies = dependencies;
    out->dependency_count = dependencies_of(dependencies, r, l, 0);
    set_link_load(out, l, 0);
    return status;
}
