/* The new files of a checkpoint: one for each that it has, with its records in their order. What another checkpoint has in the same file stays there. */
#include <stdlib.h>

#include "engine/compact.h"
#include "engine/totals.h"

#define BATCH_ITEMS 256u
#define BATCH_BYTES (UINT64_C(16) << 20) /* of values, or one block */

typedef struct batch {
    rewrite *r;
    compact_item *items;
    size_t count;
} batch;

/* ---- what is still needed ---- */

static bool is_ours(const rewrite *r, const record *from) {
    return id_equal(&from->tensor->checkpoint, &r->plan->view->manifest.checkpoint.id);
}

static bool names(const rewrite *r, size_t block, const hash128 *content) {
    const record *b = r->plan->view->blocks[block].record;
    for (uint32_t k = 0; k < b->dependency_count && !r->coded[block]; k++) {
        const dependency *d = &b->dependencies[k];
        if (d->kind != DEPENDS_VALUES && hash128_equal(&d->content, content)) {
            return true;
        }
    }
    return false;
}

/* Links stay: other checkpoints may build on them. Those that were written anew are there already. */
static bool link_stays(const rewrite *r, const record *link) {
    for (size_t i = 0; i + sizeof(known_link) <= r->links.size; i += sizeof(known_link)) {
        known_link written;
        memcpy(&written, r->links.data + i, sizeof(written));
        if (hash128_equal(&written.content, &link->content)) {
            return false;
        }
    }
    return true;
}

static bool named_by_link(const rewrite *r, const record *shared) {
    const view *v = r->plan->view;
    for (size_t i = 0; i < v->shared_count; i++) {
        const record *l = v->shared[i].record;
        for (uint32_t k = 0; k < l->dependency_count && l->kind == RECORD_LINK; k++) {
            if (l->dependencies[k].kind != DEPENDS_VALUES &&
                hash128_equal(&l->dependencies[k].content, &shared->content) && link_stays(r, l)) {
                return true;
            }
        }
    }
    return false;
}

static bool is_written(const rewrite *r, const hash128 *content) {
    for (size_t i = 0; i + sizeof(*content) <= r->sides.size; i += sizeof(*content)) {
        if (memcmp(r->sides.data + i, content, sizeof(*content)) == 0) {
            return true;
        }
    }
    return false;
}

/* Is a side or group record still named by a block that is copied? Sides have the name of their tensor; its blocks lie together. */
static bool is_named(const rewrite *r, const record *shared) {
    const view *v = r->plan->view;
    const view_tensor *t = shared->kind == RECORD_SIDE ? view_find(v, shared->tensor->name) : NULL;
    size_t first = t ? (size_t)(t->shards[0].blocks - v->blocks) : 0;
    for (size_t i = first; i < v->block_count; i++) {
        if (t && strcmp(v->blocks[i].record->tensor->name, t->tensor->name) != 0) {
            return false;
        }
        if (names(r, i, &shared->content)) {
            return true;
        }
    }
    return false;
}

static bool is_left_out(const rewrite *r, const record *from) {
    if (from->kind == RECORD_LINK) {
        return !link_stays(r, from);
    }
    bool shared = from->kind == RECORD_SIDE || from->kind == RECORD_GROUP;
    return shared && (is_written(r, &from->content) || !(is_named(r, from) || named_by_link(r, from)));
}

/* ---- one batch ---- */

static ckd_status prepare(void *context, size_t index, uint32_t worker, ckd_error *err) {
    batch *b = context;
    compact_item *item = &b->items[index];
    compaction *c = b->r->c;
    const rewrite_plan *p = b->r->plan;
    item->is_coded = false;
    if (item->block != SIZE_MAX && p->fates[item->block].why) {
        ckd_status status = compact_code(item, c, p, &c->workers[worker], err);
        if (status != CKD_OK || item->is_coded) {
            return status;
        }
    }
    item->to = *item->from;
    void *to = bytes_scratch(&item->payload, item->from->stored_size + 1, "a payload", err);
    return to ? chunk_read_payload(item->chunk, item->from, to, err) : CKD_E_NOMEM;
}

static ckd_status depend(rewrite *r, const ckd_id *on, ckd_error *err) {
    manifest *m = &r->m;
    for (size_t i = 0; i < m->dependency_count; i++) {
        if (id_equal(&m->dependencies[i], on)) {
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
    m->dependencies[m->dependency_count++] = *on;
    return CKD_OK;
}

/* What a copied block takes to be loaded may have changed with what it builds on. */
static ckd_status set_load(rewrite *r, compact_item *item, ckd_error *err) {
    block_fate *f = &r->plan->fates[item->block];
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
    if (item->links) {
        status = compact_write_links(&item->to, item->dependencies, r, w, item->links, item->from, err);
        if (status == CKD_OK && item->links->ends_on_values) {
            status = depend(r, &item->links->end.checkpoint, err);
        }
        free(item->links);
        item->links = NULL;
    }
    if (item->block != SIZE_MAX && status == CKD_OK) {
        status = set_load(r, item, err);
    }
    for (uint32_t i = 0; i < item->to.dependency_count && status == CKD_OK; i++) {
        const ckd_id *on = &item->to.dependencies[i].checkpoint;
        status = id_equal(on, &r->m.checkpoint.id) ? CKD_OK : depend(r, on, err);
    }
    return status == CKD_OK ? chunk_writer_append(w, &item->to, item->payload.data, err) : status;
}

static ckd_status write_batch(batch *b, chunk_writer *w, ckd_error *err) {
    uint64_t before = chunk_writer_size(w), taken = 0;
    ckd_status status = pool_run(b->r->c->store->pool, b->count, prepare, b, err);
    for (size_t i = 0; i < b->count && status == CKD_OK; i++) {
        taken += b->items[i].from->stored_size;
        status = append(b->r, w, &b->items[i], err);
    }
    b->count = 0;
    return status == CKD_OK ? compact_pace(b->r->c, taken + chunk_writer_size(w) - before, taken, err)
                            : status;
}

/* ---- one file ---- */

/* Numbers of the view's blocks, by record of the file. */
static size_t *number_blocks(const view *v, const chunk *c, ckd_error *err) {
    size_t *numbers = malloc((c->record_count + 1) * sizeof(*numbers));
    if (!numbers) {
        err_nomem(err, c->record_count * sizeof(*numbers), "the records of a file");
        return NULL;
    }
    for (size_t i = 0; i < c->record_count; i++) {
        numbers[i] = SIZE_MAX;
    }
    for (size_t i = 0; i < v->block_count; i++) {
        if (v->blocks[i].chunk == c) {
            numbers[v->blocks[i].record - c->records] = i;
        }
    }
    return numbers;
}

/* Records in a bundle have no checksums of their own that damage before the file was opened would show in. */
static ckd_status check_bundles(const chunk *c, bytes *room, bool *any, ckd_error *err) {
    for (size_t i = 0; i < c->outer_count; i++) {
        const record *r = &c->outer[i];
        if (r->kind != RECORD_BUNDLE) {
            continue;
        }
        *any = true;
        void *to = bytes_scratch(room, r->stored_size + 1, "a bundle", err);
        ckd_status status = to ? chunk_read_payload(c, r, to, err) : CKD_E_NOMEM;
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

static ckd_status write_records(rewrite *r, const chunk *c, chunk_writer *w, batch *b, const size_t *numbers,
                                ckd_error *err) {
    ckd_status status = CKD_OK;
    uint64_t raw = 0;
    for (int sides = 0; sides < 2;
         sides++) { /* what blocks share comes last: only then it is known who needs it */
        for (size_t i = 0; i < c->record_count && status == CKD_OK; i++) {
            const record *from = &c->records[i];
            bool is_side =
                from->kind == RECORD_SIDE || from->kind == RECORD_GROUP || from->kind == RECORD_LINK;
            if (!is_ours(r, from) || is_side != (sides == 1) || (is_side && is_left_out(r, from))) {
                continue;
            }
            compact_item *item = &b->items[b->count++];
            item->from = from;
            item->chunk = c;
            item->block = numbers[i];
            raw += from->raw_size;
            if (b->count == BATCH_ITEMS || raw >= BATCH_BYTES) {
                status = write_batch(b, w, err);
                raw = 0;
            }
        }
        status = status == CKD_OK ? write_batch(b, w, err) : status;
    }
    return status;
}

static ckd_status fill_file(rewrite *r, const chunk *c, chunk_writer *w, ckd_error *err) {
    batch b = {.r = r, .items = calloc(BATCH_ITEMS, sizeof(compact_item))};
    size_t *numbers = number_blocks(r->plan->view, c, err);
    ckd_status status = !b.items  ? err_nomem(err, BATCH_ITEMS * sizeof(compact_item), "records")
                        : numbers ? CKD_OK
                                  : CKD_E_NOMEM;
    bool bundles = false;
    bytes room = {0};
    if (status == CKD_OK) {
        status = check_bundles(c, &room, &bundles, err);
    }
    if (status == CKD_OK) {
        if (bundles || r->m.checkpoint.fidelity != CKD_EXACT) {
            chunk_writer_gather(w);
        }
        status = write_records(r, c, w, &b, numbers, err);
    }
    for (size_t i = 0; b.items && i < BATCH_ITEMS; i++) {
        bytes_free(&b.items[i].payload);
        free(b.items[i].links);
    }
    bytes_free(&room);
    free(b.items);
    free(numbers);
    return status;
}

static ckd_status write_file(rewrite *r, size_t number, ckd_error *err) {
    const char *root = r->c->store->path;
    note_file *file = &r->m.files[number];
    chunk_identity identity = {r->c->store->id, file->id, r->writer};
    pathname temp = path_chunk(root, &file->id, ".tmp");
    chunk_writer *w;
    ckd_status status = chunk_writer_create(&w, temp.text, &identity, err);
    if (status != CKD_OK) {
        return status;
    }
    status = fill_file(r, r->plan->view->chunks[number], w, err);
    if (status != CKD_OK) {
        chunk_writer_abort(w);
        return status;
    }
    status = chunk_writer_finish(w, &file->root, &file->size, err);
    if (status == CKD_OK) {
        status = file_publish(temp.text, path_chunk(root, &file->id, "").text, err);
    }
    return status;
}

ckd_status compact_write_files(rewrite *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->m.file_count && status == CKD_OK; i++) {
        status = write_file(r, i, err);
    }
    return status == CKD_OK ? dir_sync(path_in(r->c->store->path, DIR_CHUNKS).text, err) : status;
}

/* ---- reading back ---- */

typedef struct reading {
    rewrite *r;
    const view *written;
} reading;

static ckd_status read_back(void *context, size_t index, uint32_t worker, ckd_error *err) {
    reading *x = context;
    compact_worker *w = &x->r->c->workers[worker];
    const view_block *b = &x->written->blocks[index], *old = &x->r->plan->view->blocks[index];
    const record *r = b->record;
    bool same = hash128_equal(&r->content, &old->record->content) && r->first == old->record->first &&
                r->count == old->record->count && strcmp(r->tensor->name, old->record->tensor->name) == 0;
    if (!same) {
        err_corrupt(err, file_path(b->chunk->file), r->offset, "a block was not written as it was");
        return CKD_E_CORRUPT;
    }
    /* In a dry run, links that others are to have are not there. */
    bool coded = x->r->coded[index] && !x->r->c->options.dry_run;
    void *to = bytes_scratch(&w->values, (coded ? r->raw_size : r->stored_size) + 1, "a block's values", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    return coded ? block_values(&w->job.decoder, &x->r->c->views, x->written, b, to, err)
                 : chunk_read_payload(b->chunk, r, to, err);
}

/* The manifest's copy goes to the view, which frees it. */
static ckd_status copy_for_view(manifest *out, const manifest *m, ckd_error *err) {
    *out = *m;
    out->dependencies = NULL;
    out->roles = NULL;
    out->dependency_count = out->role_count = 0;
    out->files = calloc(m->file_count + 1, sizeof(*out->files));
    if (!out->files) {
        return err_nomem(err, m->file_count * sizeof(*out->files), "a manifest's files");
    }
    memcpy(out->files, m->files, m->file_count * sizeof(*out->files));
    return CKD_OK;
}

ckd_status compact_verify(rewrite *r, ckd_error *err) {
    manifest copy;
    view *written = NULL;
    ckd_status status = copy_for_view(&copy, &r->m, err);
    if (status == CKD_OK) {
        status = view_open(&written, r->c->store, &copy, r->plan->view, CKD_E_CORRUPT, err);
    }
    if (status == CKD_OK) {
        status = view_attach_measures(written, CKD_E_CORRUPT, err);
    }
    if (status == CKD_OK && (written->block_count != r->plan->view->block_count ||
                             written->blob_count != r->plan->view->blob_count)) {
        status = err_set(err, CKD_E_CORRUPT, "blocks were lost on the way");
    }
    reading x = {r, written};
    if (status == CKD_OK) {
        status = pool_run(r->c->store->pool, written->block_count, read_back, &x, err);
    }
    if (status == CKD_OK) {
        status = totals_set(&r->m, written, err);
    }
    view_close(written);
    return status;
}
