/*
 * Finds the records that a load of a checkpoint reads, and so the files that its manifest must name. This reads no
 * payloads; only chain_is_intact and the functions below it check stored bytes.
 */
#include "engine/store/view.h"

#include <stdlib.h>

#define CHECK_AGAIN_NS (UINT64_C(3600) * 1000000000)

typedef struct item {
    const view *view;
    const view_block *block;
    bool entered; /* its dependencies are above it in the stack, or done */
} item;

typedef enum visited { NOT_VISITED, FOLLOWING, FOLLOWED } visited;

typedef struct slot {
    const record *record;
    visited state;
} slot;

/*
 * A depth-first search without recursion, because chains can be long. Records are put into a hash table by address
 * (open addressing) when they are entered. A record that is met again while its dependencies are still being followed
 * is in a cycle.
 */
typedef struct walk {
    view_cache *cache;
    closure_fn visit;
    void *context;
    slot *slots;
    size_t count, capacity;
    item *todo; /* a stack; a record that several others build on may be there several times */
    size_t todo_count, todo_capacity;
    slot inline_slots[32]; /* so that the walk along one block's chain allocates nothing */
    item inline_todo[8];
} walk;

static void walk_begin(walk *w, view_cache *cache, closure_fn visit, void *context) {
    *w = (walk){.cache = cache, .visit = visit, .context = context};
    w->slots = w->inline_slots;
    w->capacity = sizeof(w->inline_slots) / sizeof(*w->inline_slots);
    w->todo = w->inline_todo;
    w->todo_capacity = sizeof(w->inline_todo) / sizeof(*w->inline_todo);
}

static void walk_end(walk *w) {
    free(w->slots == w->inline_slots ? NULL : w->slots);
    free(w->todo == w->inline_todo ? NULL : w->todo);
}

static slot *slot_of(slot *slots, size_t capacity, const record *r) {
    uintptr_t address = (uintptr_t)r;
    for (size_t at = hash64(&address, sizeof(address));; at++) {
        slot *s = &slots[at & (capacity - 1)];
        if (!s->record || s->record == r) {
            return s;
        }
    }
}

static ckd_status grow_slots(walk *w, ckd_error *err) {
    size_t capacity = 2 * w->capacity;
    slot *slots = calloc(capacity, sizeof(*slots));
    if (!slots) {
        return err_nomem(err, capacity * sizeof(*slots), "the records of a load");
    }
    for (size_t i = 0; i < w->capacity; i++) {
        if (w->slots[i].record) {
            *slot_of(slots, capacity, w->slots[i].record) = w->slots[i];
        }
    }
    free(w->slots == w->inline_slots ? NULL : w->slots);
    w->slots = slots;
    w->capacity = capacity;
    return CKD_OK;
}

static visited state_of(const walk *w, const record *r) {
    return slot_of(w->slots, w->capacity, r)->state;
}

static ckd_status push(walk *w, const view *v, const view_block *b, ckd_error *err) {
    if (w->todo_count == w->todo_capacity) {
        size_t capacity = 2 * w->todo_capacity;
        bool is_inline = w->todo == w->inline_todo;
        item *grown = realloc(is_inline ? NULL : w->todo, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "the records of a load");
        }
        if (is_inline) {
            memcpy(grown, w->inline_todo, sizeof(w->inline_todo));
        }
        w->todo = grown;
        w->todo_capacity = capacity;
    }
    w->todo[w->todo_count++] = (item){v, b, false};
    return CKD_OK;
}

/* Pushes b, on which x builds. */
static ckd_status push_base(walk *w, const item *x, const view *v, const view_block *b, ckd_error *err) {
    visited state = state_of(w, b->record);
    if (state == FOLLOWING) {
        return view_block_corrupt(x->block, err, "the block's chain of deltas contains a cycle");
    }
    return state == NOT_VISITED ? push(w, v, b, err) : CKD_OK;
}

/* Pushes the blocks that hold the values of a dependency; all of them must be there. */
static ckd_status follow_values(walk *w, const item *x, uint32_t index, ckd_error *err) {
    view_source s;
    ckd_status status = view_source_of(&s, w->cache, x->view, x->block, index, err);
    uint64_t found = 0;
    size_t k, last;
    if (status != CKD_OK) {
        return status;
    }
    for (view_shards_for(&k, &last, s.tensor, &s.span); k < last; k++) {
        const view_shard *shard = &s.tensor->shards[k];
        size_t first, end;
        view_shard_range(&first, &end, shard, s.tensor->shape, &s.span);
        for (; first < end && status == CKD_OK; first++) {
            const view_block *b = &shard->blocks[first];
            region_span have = {b->record->region, b->record->first, b->record->count};
            uint64_t common = span_common(s.tensor->shape, &s.span, &have);
            bool all = span_equal(&have, &s.span, s.tensor->shape->ndim);
            found += common;
            if (all && !hash128_equal(&b->record->content, s.content)) {
                return view_block_corrupt(x->block, err, "the values that the block depends on have changed");
            }
            status = common ? push_base(w, x, s.view, b, err) : CKD_OK;
        }
    }
    return status == CKD_OK && found != s.span.count
               ? view_lacks(s.view,
                            view_block_corrupt(x->block, err, "values that the block builds on are missing"),
                            err)
               : status;
}

static ckd_status visit_dependency(walk *w, const item *x, uint32_t index, ckd_error *err) {
    const record *r = x->block->record;
    const dependency *d = &r->dependencies[index];
    const view *v = x->view;
    const view_block *b = NULL;
    if (d->kind == DEPENDS_VALUES) {
        return follow_values(w, x, index, err);
    }
    if (d->kind == DEPENDS_LINK) {
        ckd_status status = view_parent_block(&b, &v, w->cache, x->view, x->block, err);
        return status == CKD_OK ? push_base(w, x, v, b, err) : status;
    }
    if (d->kind == DEPENDS_SIDE || d->kind == DEPENDS_GROUP) {
        b = view_find_shared(v, d->kind == DEPENDS_SIDE ? RECORD_SIDE : RECORD_GROUP, &d->content);
        return b ? push_base(w, x, v, b, err)
                 : view_lacks(v,
                              view_block_corrupt(x->block, err,
                                                 "a record that the block shares with others is missing"),
                              err);
    }
    return CKD_OK; /* a kind that only newer versions know */
}

/* Visits the record on top of the stack, and pushes its dependencies. It stays below them until all are done. */
static ckd_status enter(walk *w, ckd_error *err) {
    item *top = &w->todo[w->todo_count - 1], x = *top;
    const record *r = x.block->record;
    ckd_status status = 2 * (w->count + 1) > w->capacity ? grow_slots(w, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    top->entered = true;
    *slot_of(w->slots, w->capacity, r) = (slot){r, FOLLOWING};
    w->count++;
    status = w->visit ? w->visit(w->context, x.view, x.block, err) : CKD_OK;
    for (uint32_t k = 0; k < r->dependency_count && status == CKD_OK; k++) {
        status = visit_dependency(w, &x, k, err);
    }
    return status;
}

static ckd_status walk_from(walk *w, const view *v, const view_block *b, ckd_error *err) {
    ckd_status status = state_of(w, b->record) == NOT_VISITED ? push(w, v, b, err) : CKD_OK;
    while (w->todo_count && status == CKD_OK) {
        const item *top = &w->todo[w->todo_count - 1];
        const record *r = top->block->record;
        if (top->entered) {
            slot_of(w->slots, w->capacity, r)->state = FOLLOWED;
            w->todo_count--;
        } else if (state_of(w, r) != NOT_VISITED) { /* it was in the stack twice */
            w->todo_count--;
        } else {
            status = enter(w, err);
        }
    }
    return status;
}

ckd_status closure_visit(view_cache *cache, const view *root, closure_fn visit, void *context,
                         ckd_error *err) {
    walk w;
    walk_begin(&w, cache, visit, context);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < root->block_count && status == CKD_OK; i++) {
        status = walk_from(&w, root, &root->blocks[i], err);
    }
    walk_end(&w);
    return status;
}

ckd_status closure_visit_block(view_cache *cache, const view *v, const view_block *b, closure_fn visit,
                               void *context, ckd_error *err) {
    walk w;
    walk_begin(&w, cache, visit, context);
    ckd_status status = walk_from(&w, v, b, err);
    walk_end(&w);
    return status;
}

ckd_status closure_visit_source(view_cache *cache, const view_source *from, closure_fn visit, void *context,
                                ckd_error *err) {
    const view_tensor *t = from->tensor;
    walk w;
    walk_begin(&w, cache, visit, context);
    ckd_status status = CKD_OK;
    uint64_t found = 0;
    size_t s, last;
    for (view_shards_for(&s, &last, t, &from->span); s < last; s++) {
        size_t i, end;
        view_shard_range(&i, &end, &t->shards[s], t->shape, &from->span);
        for (; i < end && status == CKD_OK; i++) {
            const view_block *b = &t->shards[s].blocks[i];
            region_span block = {b->record->region, b->record->first, b->record->count};
            uint64_t common = span_common(t->shape, &from->span, &block);
            found += common;
            status = common ? walk_from(&w, from->view, b, err) : CKD_OK;
        }
    }
    walk_end(&w);
    if (status != CKD_OK || found == from->span.count) {
        return status;
    }
    return view_lacks(from->view,
                      err_set(err, CKD_E_CORRUPT, "the checkpoint does not have all of the tensor"), err);
}

/* ---- whose records a load reads ---- */

bool id_list_has(const bytes *ids, const ckd_id *id) {
    bool found = false;
    for (size_t at = 0; at < ids->size && !found; at += sizeof(ckd_id)) {
        found = memcmp(ids->data + at, id, sizeof(ckd_id)) == 0;
    }
    return found;
}

static ckd_status add_owner(void *context, const view *v, const view_block *b, ckd_error *err) {
    bytes *ids = context;
    const ckd_id *id = &b->record->tensor->checkpoint;
    (void)v;
    if (!id_list_has(ids, id)) {
        bytes_put(ids, id, sizeof(*id));
    }
    return ids->failed ? err_nomem(err, ids->size, "what a checkpoint builds on") : CKD_OK;
}

ckd_status closure_owners(bytes *ids, view_cache *cache, const view *root, ckd_error *err) {
    return closure_visit(cache, root, add_owner, ids, err);
}

/* ---- files ---- */

static ckd_status mark_file(void *context, const view *v, const view_block *b, ckd_error *err) {
    (void)v;
    (void)err;
    ((bool *)context)[b->file] = true;
    return CKD_OK;
}

ckd_status closure_prove_files(manifest *m, view_cache *cache, const view *root, ckd_error *err) {
    const manifest *all = &root->manifest;
    bool *used = calloc(all->file_count + 1, sizeof(*used));
    if (!used) {
        return err_nomem(err, all->file_count, "a manifest's files");
    }
    ckd_status status = closure_visit(cache, root, mark_file, used, err);
    size_t kept = m->own_count;
    for (size_t i = m->own_count; i < m->file_count && status == CKD_OK; i++) {
        bool wanted = false;
        for (size_t k = all->own_count; k < all->file_count && !wanted; k++) {
            wanted = used[k] && id_equal(&all->files[k].id, &m->files[i].id);
        }
        if (wanted) {
            m->files[kept++] = m->files[i];
        }
    }
    m->file_count = status == CKD_OK ? kept : m->file_count;
    free(used);
    return status;
}

/* ---- the stored bytes of a chain, which is not decoded ---- */

/* Whether the record was read and intact within the last hour. */
static bool is_known(intact_records *all, uint64_t key) {
    pthread_mutex_lock(&all->mutex);
    uint64_t now = clock_monotonic_ns();
    if (now - all->since_ns > CHECK_AGAIN_NS) {
        free(all->records.slots);
        all->records = (hash_set){.slots = NULL};
        all->since_ns = now;
    }
    bool known = hash_set_has(&all->records, key);
    pthread_mutex_unlock(&all->mutex);
    return known;
}

static ckd_status record_known(intact_records *all, uint64_t key, ckd_error *err) {
    pthread_mutex_lock(&all->mutex);
    ckd_status status = hash_set_add(&all->records, key, err);
    pthread_mutex_unlock(&all->mutex);
    return status;
}

typedef struct chain_reading {
    intact_records *known;
    bytes *payload;
} chain_reading;

/* Reads a record's payload. The payload of a bundled one is covered by its bundle's checksum, not by its own. */
static ckd_status check_payload(void *context, const view *in, const view_block *b, ckd_error *err) {
    const chain_reading *reading = context;
    const chunk *c = b->chunk;
    const record *r = b->record->bundle ? b->record->bundle : b->record;
    uint64_t place[3] = {0, 0, r->offset};
    memcpy(place, c->identity.file.bytes, sizeof(c->identity.file.bytes));
    uint64_t key = hash64(place, sizeof(place));
    (void)in;
    if (r->stored_size == 0 || is_known(reading->known, key)) {
        return CKD_OK;
    }
    void *to = bytes_scratch(reading->payload, r->stored_size, "a payload", err);
    ckd_status status = to ? chunk_read_payload(c, r, to, err) : CKD_E_NOMEM;
    return status == CKD_OK ? record_known(reading->known, key, err) : status;
}

bool chain_is_intact(view_cache *cache, const view_source *from, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return closure_visit_source(cache, from, check_payload, &reading, NULL) == CKD_OK;
}

bool copy_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return b->materialized && (!cache->copies_need_chains ||
                               closure_visit_block(cache, v, b, check_payload, &reading, NULL) == CKD_OK);
}

bool cached_record_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return !cache->copies_need_chains || check_payload(&reading, v, b, NULL) == CKD_OK;
}
