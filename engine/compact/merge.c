/*
 * Copies live records from several chunk files into one for each rank, unchanged. Then each manifest that names an
 * old file gets a next generation that names the new one.
 */
#include <stdlib.h>

#include "engine/compact/internal.h"
#include "engine/store/store.h"
#include "engine/compact/gather.h"
#include "engine/decode/decode.h"

static uint64_t file_hash(const file_ref *f) {
    return hash64(&f->id, sizeof(ckd_id));
}

uint64_t compact_record_hash(const chunk *c, const record *r) {
    struct {
        ckd_id file;
        hash128 content;
        uint64_t offset, payload, first;
    } key = {c->identity.file, r->content, r->offset, r->payload_offset, r->first};
    return hash64(&key, sizeof(key));
}

/* Identifies the position of a record, or of the bundle that holds it. */
static uint64_t place_hash(const chunk *c, uint64_t offset) {
    struct {
        ckd_id file;
        uint64_t offset;
    } key = {c->identity.file, offset};
    return hash64(&key, sizeof(key));
}

/* ---- copying live records ---- */

static bool in_group(const merge_set *x, const file_ref *f) {
    return hash_set_has(&x->files, file_hash(f));
}

static bool names_any(const merge_set *x, const manifest *m, size_t first, size_t end) {
    bool any = false;
    for (size_t i = first; i < end && !any; i++) {
        any = in_group(x, &m->files[i]);
    }
    return any;
}

typedef struct marking {
    merge_set *x;
    const view *root;
    hash_set live;
    bool is_damaged;
} marking;

static ckd_status mark_record(void *context, const view *v, const view_block *b, ckd_error *err) {
    marking *k = context;
    (void)v;
    if (!in_group(k->x, &k->root->manifest.files[b->file])) {
        return CKD_OK;
    }
    k->is_damaged = k->is_damaged || hash_set_has(&k->x->damaged, place_hash(b->chunk, b->record->offset));
    return hash_set_add(&k->live, compact_record_hash(b->chunk, b->record), err);
}

/* Marks all records of the checkpoint in its own files, and everything else that a load of it reads. */
static ckd_status mark_reads(marking *k, ckd_error *err) {
    const view *v = k->root;
    ckd_status status = CKD_OK;
    for (size_t i = 0; status == CKD_OK && i < v->chunk_count; i++) {
        for (size_t r = 0; r < v->parts[i]->count && status == CKD_OK; r++) {
            view_block b = {.record = &v->parts[i]->records[r], .chunk = v->chunks[i], .file = (uint32_t)i};
            status = mark_record(k, v, &b, err);
        }
    }
    return status == CKD_OK ? closure_visit(&k->x->g->c->views, v, mark_record, k, err) : status;
}

/* Adds the checkpoint's records to the live ones. CORRUPT: some of them cannot be read. */
static ckd_status mark_live(merge_set *x, const manifest_entry *n, ckd_error *err) {
    marking k = {.x = x};
    ckd_status status = views_get(&k.root, &x->g->c->views, &n->m.checkpoint.id, err);
    THEN(status, mark_reads(&k, err));
    if (status == CKD_OK && k.is_damaged) {
        status = err_set(err, CKD_E_CORRUPT, "records that the checkpoint reads are damaged");
    }
    for (size_t i = 0; i < k.live.capacity && status == CKD_OK; i++) {
        status = k.live.slots[i] ? hash_set_add(&x->live, k.live.slots[i], err) : CKD_OK;
    }
    free(k.live.slots);
    return status;
}

/* Records a damaged record for the next attempt. */
static ckd_status record_damage(merge_set *x, const chunk *c, uint64_t offset, ckd_status status,
                                ckd_error *err) {
    ckd_error full = {.offset = CKD_NO_OFFSET};
    if (status == CKD_E_CORRUPT && hash_set_add(&x->damaged, place_hash(c, offset), &full) != CKD_OK) {
        return err_from(err, CKD_E_NOMEM, &full);
    }
    return status;
}

/* Copies the live records of one source. */
typedef struct copying {
    merge_set *x;
    chunk_writer *to;
    record_copier copier;
} copying;

static ckd_status copy_live(void *context, const chunk *c, const record *r, ckd_error *err) {
    copying *k = context;
    if (!hash_set_has(&k->x->live, compact_record_hash(c, r))) {
        return CKD_OK;
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = record_copy(&k->copier, k->to, c, r, &why);
    err_from(err, status, &why);
    return record_damage(k->x, c, r->offset, status, err);
}

static ckd_status copy_source(merge_set *x, const merge_source *s, chunk_writer *w, ckd_error *err) {
    chunk *c;
    copying k = {.x = x, .to = w};
    ckd_status status = view_open_chunk(&c, x->g->c->store, &s->file, &s->first->m.checkpoint, err);
    if (status != CKD_OK) {
        return status;
    }
    status = chunk_each_record(c, copy_live, &k, err);
    bytes_free(&k.copier.payload);
    chunk_close(c);
    return status == CKD_OK ? compact_throttle(x->g->c, 2 * s->file.size, 0, err) : status;
}

static ckd_status write_merged_file(merge_set *x, file_ref *to, const compact_intent *i, ckd_error *err) {
    const ckd_store *store = x->g->c->store;
    chunk_identity identity = {store->id, to->id, i->writer};
    pathname temp = path_chunk(store->path, &to->id, ".tmp");
    chunk_writer *w;
    ckd_status status = chunk_writer_create(&w, temp.text, &identity, err);
    if (status != CKD_OK) {
        return status;
    }
    chunk_writer_gather(w);
    for (size_t k = 0; k < x->count && status == CKD_OK; k++) {
        status = x->sources[k]->file.rank == to->rank ? copy_source(x, x->sources[k], w, err) : CKD_OK;
    }
    if (status != CKD_OK) {
        chunk_writer_abort(w);
        return status;
    }
    status = chunk_writer_finish_durable(w, &to->root, &to->size, err);
    return status == CKD_OK ? file_rename_noreplace(temp.text, path_chunk(store->path, &to->id, "").text, err)
                            : status;
}

/* Reads the new file through, and compares its payloads with their checksums. */
static ckd_status check_merged_file(const merge_set *x, const file_ref *file, ckd_error *err) {
    chunk *c = NULL;
    bytes payload = {0};
    ckd_status status = view_open_chunk(&c, x->g->c->store, file, &x->sources[0]->first->m.checkpoint, err);
    THEN(status, chunk_read_in_order(c, err));
    for (size_t i = 0; status == CKD_OK && i < c->outer_count; i++) {
        status = record_read_through(&payload, c, &c->outer[i], err);
    }
    bytes_free(&payload);
    chunk_close(c);
    return status;
}

static ckd_status write_and_check_files(merge_set *x, const compact_intent *i, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < x->output_count && status == CKD_OK; k++) {
        status = write_merged_file(x, &x->outputs[k], i, err);
    }
    THEN(status, dir_sync(path_in(x->g->c->store->path, DIR_CHUNKS).text, err));
    for (size_t k = 0; k < x->output_count && status == CKD_OK; k++) {
        status = check_merged_file(x, &x->outputs[k], err);
    }
    return status;
}

/* ---- manifests that name the new files ---- */

static const file_ref *output_for(const merge_set *x, uint32_t rank) {
    const file_ref *found = &x->outputs[0];
    for (size_t i = 0; i < x->output_count; i++) {
        found = x->outputs[i].rank == rank ? &x->outputs[i] : found;
    }
    return found;
}

/* Puts the new file in the place of the first file that it replaces. Own files stay in front. */
static ckd_status name_new(manifest *to, const merge_set *x, const manifest *m, ckd_error *err) {
    *to = (manifest){.checkpoint = m->checkpoint};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        const file_ref *f = in_group(x, &m->files[i]) ? output_for(x, m->files[i].rank) : &m->files[i];
        status = manifest_add_files(to, f, 1, err);
        to->own_count = i < m->own_count ? to->file_count : to->own_count;
    }
    if (status != CKD_OK) {
        manifest_free(to);
    }
    return status;
}

/*
 * Proves that the files hold everything that a load reads, and publishes the manifest that names them. named: by new
 * file; set for those that it names. A manifest that named an old file without needing it then names neither file.
 */
static ckd_status publish_merged(uint64_t *stored, bool *named, bool *undecided, const merge_set *x,
                                 const manifest_entry *n, ckd_error *err) {
    compaction *c = x->g->c;
    const view *draft, *old;
    manifest wide, tight = {.files = NULL};
    ckd_status status = views_get(&old, &c->views, &n->m.checkpoint.id, err);
    THEN(status, name_new(&tight, x, &old->manifest, err));
    THEN(status, name_new(&wide, x, &old->manifest, err));
    THEN(status, views_add(&draft, &c->views, &wide, err));
    if (status == CKD_OK &&
        (draft->block_count != old->block_count || draft->blob_count != old->blob_count)) {
        status = err_set(err, CKD_E_CORRUPT, "the merged files lack blocks of the checkpoint");
    }
    THEN(status, closure_prove_files(&tight, &c->views, draft, err));
    THEN(status, compact_read_moved(c, draft, x->outputs, x->output_count, err));
    if (status == CKD_OK && old->manifest.checkpoint.generation == UINT32_MAX) {
        status = err_set(err, CKD_E_UNSUPPORTED, "its generation number is already the largest possible");
    }
    if (status == CKD_OK) {
        manifest m = old->manifest; /* dependencies stay the view's; totals_set makes new roles */
        m.files = tight.files;
        m.file_count = tight.file_count;
        m.own_count = tight.own_count;
        m.roles = NULL;
        m.role_count = 0;
        status = totals_set(&m, draft, err);
        m.checkpoint.generation++;
        THEN(status, compact_publish_manifest(stored, undecided, c, &m, err));
        for (size_t i = 0; i < m.file_count && status == CKD_OK; i++) {
            for (size_t k = 0; k < x->output_count; k++) {
                named[k] = named[k] || id_equal(&m.files[i].id, &x->outputs[k].id);
            }
        }
        free(m.roles);
    }
    manifest_free(&tight);
    return status;
}

static ckd_status report_item(const merge_set *x, const manifest_entry *n, uint64_t stored, ckd_status left,
                              const ckd_error *why, ckd_error *err) {
    bool is_owner = names_any(x, &n->m, 0, n->m.own_count);
    return left == CKD_OK && !is_owner
               ? CKD_OK
               : x->g->gathered(x->g->context, &n->m.checkpoint, stored, left, why, err);
}

static ckd_status publish_all(bool *named, bool *undecided, const merge_set *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->g->count && status == CKD_OK; i++) {
        const manifest_entry *n = x->g->order[i];
        uint64_t stored = 0;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (!x->excluded[i] && names_any(x, &n->m, 0, n->m.file_count)) {
            ckd_status done = publish_merged(&stored, named, undecided, x, n, &why);
            /* After a failure, a file may remain that only this manifest would have named. */
            *undecided = *undecided || done != CKD_OK;
            status = report_item(x, n, stored, done, &why, err);
        }
    }
    return status;
}

/* ---- a set of files ---- */

/* Marks the live records of all checkpoints. One that reads damaged records is reported, and stays as it is. */
static ckd_status mark_all(merge_set *x, bytes *ids, ckd_error *err) {
    ckd_status status = CKD_OK;
    free(x->live.slots);
    x->live = (hash_set){.slots = NULL};
    for (size_t i = 0; i < x->g->count && status == CKD_OK; i++) {
        const manifest_entry *n = x->g->order[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (x->excluded[i] || !names_any(x, &n->m, 0, n->m.file_count)) {
            continue;
        }
        bytes_put(ids, &n->m.checkpoint.id, sizeof(ckd_id));
        status = ids->failed ? err_nomem(&why, ids->size, "checkpoints") : mark_live(x, n, &why);
        x->excluded[i] = is_damage(status, &why) || status == CKD_E_UNSUPPORTED;
        status = x->excluded[i] ? report_item(x, n, 0, status, &why, err) : err_from(err, status, &why);
    }
    return status;
}

static ckd_status name_outputs(merge_set *x, compact_intent *i, ckd_error *err) {
    manifest like = {.files = NULL};
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < x->count && status == CKD_OK; k++) {
        bool has_rank = false;
        for (size_t f = 0; f < like.file_count && !has_rank; f++) {
            has_rank = like.files[f].rank == x->sources[k]->file.rank;
        }
        status = has_rank ? CKD_OK : manifest_add_files(&like, &x->sources[k]->file, 1, err);
    }
    like.own_count = like.file_count;
    THEN(status, compact_intent_make_ids(i, &like, err));
    x->outputs = i->files;
    x->output_count = i->file_count;
    manifest_free(&like);
    return status;
}

static ckd_status gather_group(merge_set *x, ckd_error *err) {
    compaction *c = x->g->c;
    compact_intent i = {.lock = NULL};
    bytes ids = {0};
    x->damaged_before = x->damaged.count;
    ckd_status status = name_outputs(x, &i, err);
    THEN(status, mark_all(x, &ids, err));
    if (status == CKD_OK) {
        status =
            compact_intent_begin_for(&i, c, &x->sources[0]->first->m.checkpoint,
                                     (const ckd_id *)(const void *)ids.data, ids.size / sizeof(ckd_id), err);
    }
    THEN(status, write_and_check_files(x, &i, err));
    THEN(status, compact_record_proven(c, x->outputs, x->output_count, err));
    THEN(status, publish_all(i.named, &i.undecided, x, err));
    compact_intent_end(&i, c->store);
    bytes_free(&ids);
    return status;
}

static ckd_status report_only(const merge_set *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < x->g->count && status == CKD_OK; i++) {
        const manifest_entry *n = x->g->order[i];
        if (names_any(x, &n->m, 0, n->m.own_count)) {
            status = report_item(x, n, n->m.checkpoint.stored_bytes, CKD_OK, NULL, err);
        }
    }
    return status;
}

/* The compaction goes on after damage, and if another process was quicker. */
ckd_status compact_merge(merge_set *x, ckd_error *err) {
    compaction *c = x->g->c;
    file_lock *readers;
    uint64_t moved_before = c->moved;
    x->excluded = calloc(x->g->count + 1, sizeof(*x->excluded));
    ckd_status status = x->excluded ? CKD_OK : err_nomem(err, x->g->count, "checkpoints");
    for (size_t i = 0; i < x->count && status == CKD_OK; i++) {
        status = hash_set_add(&x->files, file_hash(&x->sources[i]->file), err);
    }
    if (status == CKD_OK && (c->options.dry_run || c->options.estimate)) {
        status = report_only(x, err);
    } else if (status == CKD_OK) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = store_lock_reader_within(&readers, c->store, c->limits.timeout_ms, err);
        if (status == CKD_OK) {
            ckd_status done = gather_group(x, &why);
            while (done == CKD_E_CORRUPT && x->damaged.count > x->damaged_before) {
                done = gather_group(x, &why); /* without the checkpoints that read the damage just found */
            }
            bool passes = done == CKD_E_CORRUPT || done == CKD_E_UNSUPPORTED || done == CKD_E_NOT_FOUND ||
                          done == CKD_E_EXISTS;
            status = passes ? CKD_OK : err_from(err, done, &why);
            if (passes) {
                store_message(c->store, "chunk files of %s are not merged: %s%s%s%s",
                              x->sources[0]->first->m.checkpoint.run, why.message, why.file[0] ? " (" : "",
                              why.file, why.file[0] ? ")" : "");
            }
            compact_close_views(c);
            lock_release(readers);
        }
    }
    c->spent += c->moved - moved_before;
    free(x->live.slots);
    free(x->files.slots);
    free(x->damaged.slots);
    free(x->excluded);
    return status;
}
