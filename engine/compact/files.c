/*
 * Writes the new chunk files of a checkpoint: one for each own file, with the checkpoint's records in the same
 * order. Records of other checkpoints stay in the old file.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/compact/internal.h"
#include "engine/decode/decode.h"

#define BATCH_ITEMS 256u
#define BATCH_BYTES (UINT64_C(16) << 20) /* of values, or one block */

typedef struct batch {
    rewrite *r;
    compact_item *items;
    size_t count;
} batch;

/* ---- records that are still needed ---- */

/*
 * The shared records that copied blocks build on. Links, which early versions wrote, build on further shared
 * records.
 */
typedef struct needed_records {
    const view *v;
    bool *is_needed; /* by index in v->shared */
    size_t *todo;    /* links whose dependencies were not visited yet */
    size_t todo_count;
} needed_records;

static void need_all_of(needed_records *n, const record *r) {
    for (uint32_t k = 0; k < r->dependency_count; k++) {
        const dependency *d = &r->dependencies[k];
        const view_block *b = d->kind == DEPENDS_VALUES ? NULL
                              : d->kind == DEPENDS_LINK ? view_find_link(n->v, r, &d->content)
                              : d->kind == DEPENDS_SIDE ? view_find_shared(n->v, RECORD_SIDE, &d->content)
                                                        : view_find_shared(n->v, RECORD_GROUP, &d->content);
        if (b && !n->is_needed[b - n->v->shared]) {
            n->is_needed[b - n->v->shared] = true;
            n->todo[n->todo_count++] = (size_t)(b - n->v->shared);
        }
    }
}

/* *out: by record of the part. Blocks of later files are not decided yet, and count as copied. */
static ckd_status find_needed(bool **out, const rewrite *r, size_t number, ckd_error *err) {
    const view *v = r->plan->view;
    const chunk_records *records = v->parts[number];
    needed_records n = {.v = v,
                        .is_needed = calloc(v->shared_count + 1, sizeof(bool)),
                        .todo = calloc(v->shared_count + 1, sizeof(size_t))};
    bool *needed = calloc(records->count + 1, sizeof(*needed));
    ckd_status status = n.is_needed && n.todo && needed
                            ? CKD_OK
                            : err_nomem(err, v->shared_count * sizeof(size_t), "records that blocks share");
    for (size_t i = 0; i < v->block_count && status == CKD_OK; i++) {
        if (!r->coded[i]) {
            need_all_of(&n, v->blocks[i].record);
        }
    }
    while (n.todo_count) {
        need_all_of(&n, v->shared[n.todo[--n.todo_count]].record);
    }
    for (size_t i = 0; i < v->shared_count && status == CKD_OK; i++) {
        if (v->shared[i].chunk == v->chunks[number]) {
            needed[v->shared[i].record - records->records] = n.is_needed[i];
        }
    }
    free(n.todo);
    free(n.is_needed);
    *out = needed;
    return status;
}

static bool is_shared(const record *r) {
    return r->kind == RECORD_SIDE || r->kind == RECORD_GROUP || r->kind == RECORD_LINK;
}

/* ---- one batch ---- */

static ckd_status prepare(void *context, size_t index, uint32_t worker, ckd_error *err) {
    batch *b = context;
    compact_item *item = &b->items[index];
    compaction *c = b->r->c;
    const rewrite_plan *p = b->r->plan;
    item->is_coded = false;
    if (item->block != SIZE_MAX && p->rewrites[item->block].why) {
        ckd_status status = compact_recode_block(item, c, p, &c->workers[worker], err);
        if (status != CKD_OK || item->is_coded) {
            return status;
        }
    }
    item->to = *item->from;
    void *to = bytes_scratch(&item->payload, item->from->stored_size + 1, "a payload", err);
    return to ? chunk_read_payload(item->chunk, item->from, to, err) : CKD_E_NOMEM;
}

static ckd_status depend(rewrite *r, const ckd_id *id, ckd_error *err) {
    manifest *m = &r->m;
    for (size_t i = 0; i < m->dependency_count; i++) {
        if (id_equal(&m->dependencies[i], id)) {
            return CKD_OK;
        }
    }
    if (m->dependency_count == r->dependency_capacity) {
        size_t capacity = 2 * r->dependency_capacity + 8;
        ckd_id *grown = realloc(m->dependencies, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "dependencies");
        }
        m->dependencies = grown;
        r->dependency_capacity = capacity;
    }
    m->dependencies[m->dependency_count++] = *id;
    return CKD_OK;
}

/* Sets the load of a block. A copied block's load may have changed with the blocks that it builds on. */
static ckd_status set_load(rewrite *r, compact_item *item, ckd_error *err) {
    block_rewrite *f = &r->plan->rewrites[item->block];
    if (!item->is_coded) {
        ckd_status status = compact_load_of(&f->load, r->c, r->plan, item->block, err);
        if (status != CKD_OK) {
            return status;
        }
        item->to.depth = f->load.depth;
        item->to.chain_stored = (uint64_t)f->load.chain.stored;
        item->to.chain_work = (uint64_t)f->load.chain.work;
        return CKD_OK;
    }
    f->load = (block_load){item->to.depth, record_chain(&item->to)};
    r->coded[item->block] = true;
    return CKD_OK;
}

static ckd_status append(rewrite *r, chunk_writer *w, compact_item *item, ckd_error *err) {
    ckd_status status = CKD_OK;
    if (item->block != SIZE_MAX) {
        status = set_load(r, item, err);
    }
    for (uint32_t i = 0; i < item->to.dependency_count && status == CKD_OK; i++) {
        const ckd_id *id = &item->to.dependencies[i].checkpoint;
        status = id_equal(id, &r->m.checkpoint.id) ? CKD_OK : depend(r, id, err);
    }
    return status == CKD_OK ? chunk_writer_append(w, &item->to, item->payload.data, err) : status;
}

static ckd_status write_batch(batch *b, chunk_writer *w, ckd_error *err) {
    uint64_t before = chunk_writer_size(w), read_bytes = 0;
    ckd_status status = pool_run(b->r->c->store->pool, b->count, prepare, b, err);
    for (size_t i = 0; i < b->count && status == CKD_OK; i++) {
        read_bytes += b->items[i].from->stored_size;
        status = append(b->r, w, &b->items[i], err);
    }
    b->count = 0;
    return status == CKD_OK
               ? compact_throttle(b->r->c, read_bytes + chunk_writer_size(w) - before, read_bytes, err)
               : status;
}

/* ---- shared records that were written ---- */

static written_record key_of(const record *r) {
    return (written_record){r->content, r->kind};
}

static bool same_record(const written_record *a, const written_record *b) {
    return a->kind == b->kind && hash128_equal(&a->content, &b->content);
}

/* The slot of the key, or a free one for it. There is always a free slot. */
static written_record *slot_of(const compact_written *w, const written_record *key) {
    uint64_t at;
    memcpy(&at, &key->content, sizeof(at));
    for (;; at++) {
        written_record *slot = &w->slots[at & (w->capacity - 1)];
        if (!slot->kind || same_record(slot, key)) {
            return slot;
        }
    }
}

/* Was a group or side record written that a reader would find instead of r? */
static bool was_written(const compact_written *w, const record *r) {
    written_record key = key_of(r);
    return w->count && slot_of(w, &key)->kind;
}

static ckd_status grow_written(compact_written *w, ckd_error *err) {
    compact_written wider = {.capacity = w->capacity ? 2 * w->capacity : 256, .count = w->count};
    wider.slots = calloc(wider.capacity, sizeof(*wider.slots));
    if (!wider.slots) {
        return err_nomem(err, wider.capacity * sizeof(*wider.slots), "what was written");
    }
    for (size_t i = 0; i < w->capacity; i++) {
        if (w->slots[i].kind) {
            *slot_of(&wider, &w->slots[i]) = w->slots[i];
        }
    }
    free(w->slots);
    *w = wider;
    return CKD_OK;
}

static ckd_status set_written(compact_written *w, const record *r, ckd_error *err) {
    written_record key = key_of(r);
    ckd_status status = 2 * (w->count + 1) > w->capacity ? grow_written(w, err) : CKD_OK;
    if (status == CKD_OK) {
        written_record *slot = slot_of(w, &key);
        w->count += !slot->kind;
        *slot = key;
    }
    return status;
}

void compact_written_free(compact_written *w) {
    free(w->slots);
    *w = (compact_written){.slots = NULL};
}

/* ---- one file ---- */

/* Indices of the view's blocks, by record of the part. SIZE_MAX: not a block. */
static size_t *number_blocks(const view *v, size_t number, ckd_error *err) {
    const chunk_records *records = v->parts[number];
    size_t *numbers = malloc((records->count + 1) * sizeof(*numbers));
    if (!numbers) {
        err_nomem(err, records->count * sizeof(*numbers), "the records of a file");
        return NULL;
    }
    for (size_t i = 0; i < records->count; i++) {
        numbers[i] = SIZE_MAX;
    }
    for (size_t i = 0; i < v->block_count; i++) {
        if (v->blocks[i].chunk == v->chunks[number]) {
            numbers[v->blocks[i].record - records->records] = i;
        }
    }
    return numbers;
}

/*
 * Reads the bundles through. Records in a bundle have no checksums of their own, so copying them would not notice
 * damage from before the file was opened.
 */
static ckd_status check_bundles(const view *v, size_t number, bytes *scratch, bool *any, ckd_error *err) {
    const chunk *c = v->chunks[number];
    for (size_t i = 0; i < c->outer_count; i++) {
        const record *r = &c->outer[i];
        if (r->kind != RECORD_BUNDLE || !id_equal(&r->tensor->checkpoint, &v->manifest.checkpoint.id)) {
            continue;
        }
        *any = true;
        void *to = bytes_scratch(scratch, r->stored_size + 1, "a bundle", err);
        ckd_status status = to ? chunk_read_payload(c, r, to, err) : CKD_E_NOMEM;
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* The rewriting of one own file. */
typedef struct file_rewrite {
    rewrite *r;
    size_t number; /* of the file in the view */
    chunk_writer *to;
    batch b;
    size_t *blocks; /* as number_blocks returns */
} file_rewrite;

/* Writes the shared records of the file, or all others. needed: by record of the part; NULL: all. */
static ckd_status write_records(file_rewrite *x, bool shared, const bool *needed, ckd_error *err) {
    rewrite *r = x->r;
    batch *b = &x->b;
    const chunk_records *records = r->plan->view->parts[x->number];
    ckd_status status = CKD_OK;
    uint64_t raw = 0;
    for (size_t i = 0; i < records->count && status == CKD_OK; i++) {
        const record *from = &records->records[i];
        if (is_shared(from) != shared || (needed && !needed[i]) ||
            (shared && was_written(&r->written, from))) {
            continue;
        }
        compact_item *item = &b->items[b->count++];
        item->from = from;
        item->chunk = r->plan->view->chunks[x->number];
        item->block = x->blocks[i];
        raw += from->raw_size;
        if (shared) {
            status = set_written(&r->written, from, err);
        }
        if (status == CKD_OK && (b->count == BATCH_ITEMS || raw >= BATCH_BYTES)) {
            status = write_batch(b, x->to, err);
            raw = 0;
        }
    }
    return status == CKD_OK ? write_batch(b, x->to, err) : status;
}

/* Shared records come last, when it is known which of them are needed. */
static ckd_status write_blocks_then_shared(file_rewrite *x, ckd_error *err) {
    bool *needed = NULL;
    ckd_status status = write_records(x, false, NULL, err);
    THEN(status, find_needed(&needed, x->r, x->number, err));
    THEN(status, write_records(x, true, needed, err));
    free(needed);
    return status;
}

static ckd_status fill_file(rewrite *r, size_t number, chunk_writer *w, ckd_error *err) {
    file_rewrite x = {.r = r,
                      .number = number,
                      .to = w,
                      .b = {.r = r, .items = calloc(BATCH_ITEMS, sizeof(compact_item))},
                      .blocks = number_blocks(r->plan->view, number, err)};
    compact_item *items = x.b.items;
    ckd_status status = !items     ? err_nomem(err, BATCH_ITEMS * sizeof(compact_item), "records")
                        : x.blocks ? CKD_OK
                                   : CKD_E_NOMEM;
    bool bundles = false;
    bytes scratch = {0};
    THEN(status, check_bundles(r->plan->view, number, &scratch, &bundles, err));
    if (status == CKD_OK) {
        if (bundles || r->m.checkpoint.fidelity != CKD_EXACT) {
            chunk_writer_gather(w);
        }
        status = write_blocks_then_shared(&x, err);
    }
    for (size_t i = 0; items && i < BATCH_ITEMS; i++) {
        bytes_free(&items[i].payload);
    }
    bytes_free(&scratch);
    free(items);
    free(x.blocks);
    return status;
}

static ckd_status write_rewritten_file(rewrite *r, size_t number, ckd_error *err) {
    const char *root = r->c->store->path;
    file_ref *file = &r->m.files[number];
    chunk_identity identity = {r->c->store->id, file->id, r->intent->writer};
    pathname temp = path_chunk(root, &file->id, ".tmp");
    chunk_writer *w;
    ckd_status status = chunk_writer_create(&w, temp.text, &identity, err);
    if (status != CKD_OK) {
        return status;
    }
    status = fill_file(r, number, w, err);
    if (status != CKD_OK) {
        chunk_writer_abort(w);
        return status;
    }
    status = chunk_writer_finish_durable(w, &file->root, &file->size, err);
    return status == CKD_OK ? file_rename_noreplace(temp.text, path_chunk(root, &file->id, "").text, err)
                            : status;
}

ckd_status compact_write_files(rewrite *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->m.own_count && status == CKD_OK; i++) {
        status = write_rewritten_file(r, i, err);
    }
    return status == CKD_OK ? dir_sync(path_in(r->c->store->path, DIR_CHUNKS).text, err) : status;
}

/* ---- reading back ---- */

typedef struct reading {
    rewrite *r;
    const view *written;
} reading;

/* Compares the block with the original. If it was recoded, decodes it, which compares its content hash. */
static ckd_status check_rewritten_block(void *context, size_t index, uint32_t worker, ckd_error *err) {
    reading *x = context;
    compact_worker *w = &x->r->c->workers[worker];
    const view_block *b = &x->written->blocks[index], *old = &x->r->plan->view->blocks[index];
    const record *r = b->record;
    bool same = hash128_equal(&r->content, &old->record->content) && r->first == old->record->first &&
                r->count == old->record->count && strcmp(r->tensor->name, old->record->tensor->name) == 0;
    if (!same) {
        err_corrupt(err, file_path(b->chunk->file), r->offset,
                    "a rewritten block does not match the original");
        return CKD_E_CORRUPT;
    }
    if (!x->r->coded[index]) {
        return CKD_OK;
    }
    void *to = bytes_scratch(&w->values, r->raw_size + 1, "a block's values", err);
    return to ? block_values(&w->job.decoder, x->written, b, to, err) : CKD_E_NOMEM;
}

/* All records of the new files: blocks that were copied, blobs, and what blocks share. */
static ckd_status check_rewritten_file(void *context, size_t index, uint32_t worker, ckd_error *err) {
    const rewrite *r = context;
    (void)worker;
    return read_named_file(r->c->store, &r->m.files[index], err);
}

/*
 * Names all files that a load may read: the new files, the files of new bases, and all files from before. An old own
 * file may also hold records of other checkpoints.
 */
static ckd_status name_candidates(rewrite *r, ckd_error *err) {
    const view *v = r->plan->view, *last = NULL;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->block_count && status == CKD_OK; i++) {
        const view *new_base = r->coded[i] ? r->plan->rewrites[i].new_base : NULL;
        if (new_base && new_base != last) {
            status = manifest_add_files(&r->m, new_base->manifest.files, new_base->manifest.file_count, err);
            last = new_base;
        }
    }
    return status == CKD_OK ? manifest_add_files(&r->m, v->manifest.files, v->manifest.file_count, err)
                            : status;
}

/* The view takes over the copy. */
static ckd_status copy_for_view(manifest *out, const manifest *m, ckd_error *err) {
    *out = (manifest){.checkpoint = m->checkpoint, .own_count = m->own_count};
    ckd_status status = manifest_add_files(out, m->files, m->file_count, err);
    if (status != CKD_OK) {
        manifest_free(out);
    }
    return status;
}

static ckd_status check_written(rewrite *r, const view *written, ckd_error *err) {
    const view *old = r->plan->view;
    if (written->block_count != old->block_count || written->blob_count != old->blob_count) {
        return err_set(err, CKD_E_CORRUPT, "the rewritten files lack blocks of the checkpoint");
    }
    reading x = {r, written};
    ckd_status status = pool_run(r->c->store->pool, r->m.own_count, check_rewritten_file, r, err);
    THEN(status, pool_run(r->c->store->pool, written->block_count, check_rewritten_block, &x, err));
    THEN(status, closure_prove_files(&r->m, &r->c->views, written, err));
    THEN(status, compact_read_moved(r->c, written, r->m.files, r->m.own_count, err));
    return status == CKD_OK ? totals_set(&r->m, written, err) : status;
}

ckd_status compact_verify(rewrite *r, ckd_error *err) {
    manifest copy;
    const view *written;
    ckd_status status = name_candidates(r, err);
    THEN(status, copy_for_view(&copy, &r->m, err));
    THEN(status, views_add(&written, &r->c->views, &copy, err));
    return status == CKD_OK ? check_written(r, written, err) : status;
}
