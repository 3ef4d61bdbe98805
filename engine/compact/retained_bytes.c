/*
 * Is it cheaper to keep the records of deleted checkpoints that a block builds on? Keeping them costs their bytes,
 * divided among all checkpoints that read them, in whatever order these are planned. Recoding the block lets them go,
 * and costs the bytes of the new coding. A single delta on an older base must code the exact values, while several
 * coarse deltas produced them with a fraction of the bytes. So keeping is often cheaper for lossy checkpoints.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/compact/internal.h"

#define READERS_MAX 16u /* readers beyond that are not counted */

/* Identifies a record, whichever file holds it. */
static uint64_t hash_of(const record *r) {
    struct {
        ckd_id checkpoint;
        hash128 content;
        uint64_t name, first, count, kind;
    } key = {r->tensor->checkpoint,
             r->content,
             hash64(r->tensor->name, strlen(r->tensor->name)),
             r->first,
             r->count,
             r->kind};
    uint64_t hash = hash64(&key, sizeof(key));
    return hash ? hash : 1;
}

/* Returns the key that the n-th reader of a record adds to the set. */
static uint64_t reader_key(uint64_t hash, uint32_t n) {
    uint64_t key[2] = {hash, n};
    return n ? hash64(key, sizeof(key)) : hash;
}

static uint32_t readers_of(const compaction *c, uint64_t hash) {
    uint32_t n = 0;
    while (n < READERS_MAX && hash_set_has(&c->readers, reader_key(hash, n))) {
        n++;
    }
    return n;
}

static ckd_status count_reader(void *context, const view *v, const view_block *b, ckd_error *err) {
    compaction *c = context;
    (void)v;
    if (!compact_is_victim(c, &b->record->tensor->checkpoint)) {
        return CKD_OK;
    }
    uint64_t hash = hash_of(b->record);
    uint32_t n = readers_of(c, hash);
    return n < READERS_MAX ? hash_set_add(&c->readers, reader_key(hash, n), err) : CKD_OK;
}

ckd_status compact_count_readers(compaction *c, const manifest *m, ckd_error *err) {
    const view *v;
    bool any = false;
    for (size_t i = 0; i < m->dependency_count && !any; i++) {
        any = compact_is_victim(c, &m->dependencies[i]);
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = any ? views_get(&v, &c->views, &m->checkpoint.id, &why) : CKD_OK;
    if (any && status == CKD_OK) {
        status = closure_visit(&c->views, v, count_reader, c, &why);
    }
    /* Damage is reported when the checkpoint's turn comes. */
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

typedef struct keeping {
    const compaction *c;
    double bytes;
} keeping;

static ckd_status add_up(void *context, const view *v, const view_block *b, ckd_error *err) {
    keeping *k = context;
    (void)v;
    (void)err;
    if (compact_is_victim(k->c, &b->record->tensor->checkpoint)) {
        uint32_t readers = readers_of(k->c, hash_of(b->record));
        k->bytes += (double)view_stored_bytes(b) / (readers ? readers : 1);
    }
    return CKD_OK;
}

ckd_status compact_retained_bytes(uint64_t *cost, compaction *c, const view *v, const view_block *b,
                                  ckd_error *err) {
    keeping k = {.c = c};
    ckd_status status = closure_visit_block(&c->views, v, b, add_up, &k, err);
    *cost = (uint64_t)k.bytes;
    return status;
}
