/* Opens the chunk files of a checkpoint, and makes a view_block of each of its records. */
#include "engine/store/view.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- collecting: all records of this checkpoint, from all files ---- */

/*
 * Finds a file that `like` has open. Compaction puts several checkpoints into one file, which need not be opened again.
 */
static chunk *opened_by(const view *like, size_t i, const file_ref *file) {
    bool same = like && i < like->chunk_count && id_equal(&like->manifest.files[i].id, &file->id) &&
                hash128_equal(&like->manifest.files[i].root, &file->root) &&
                like->manifest.files[i].size == file->size;
    return same ? like->chunks[i] : NULL;
}

ckd_status view_open_chunk(chunk **out, const ckd_store *store, const file_ref *file,
                           const ckd_checkpoint *checkpoint, ckd_error *err) {
    pathname p = path_chunk(store->path, &file->id, "");
    ckd_status status = chunk_open_bundled(out, p.text, err);
    if (status == CKD_E_NOT_FOUND) {
        return err_corrupt(err, p.text, CKD_NO_OFFSET, "a chunk file of %s@%llu is missing", checkpoint->run,
                           (unsigned long long)checkpoint->step);
    }
    if (status != CKD_OK) {
        return err_in_file(err, status, p.text);
    }
    const chunk_identity *identity = &(*out)->identity;
    if (!hash128_equal(&(*out)->root, &file->root) || (*out)->size != file->size ||
        !id_equal(&identity->file, &file->id) || !id_equal(&identity->store, &store->id)) {
        chunk_close(*out);
        *out = NULL;
        return err_corrupt(err, p.text, CKD_NO_OFFSET,
                           "this is not the chunk file that %s@%llu was committed with", checkpoint->run,
                           (unsigned long long)checkpoint->step);
    }
    return CKD_OK;
}

static ckd_status allocate_chunks(view *v, size_t count, ckd_error *err) {
    v->chunks = calloc(count + 1, sizeof(*v->chunks) + sizeof(*v->parts));
    v->parts = v->chunks ? (const chunk_records **)(void *)(v->chunks + count + 1) : NULL;
    return v->chunks ? CKD_OK : err_nomem(err, count * sizeof(chunk *), "chunk handles");
}

static ckd_status open_chunks(view *v, const ckd_store *store, const view *like, ckd_error *err) {
    ckd_status status = allocate_chunks(v, v->manifest.own_count, err);
    for (size_t i = 0; i < v->manifest.own_count && status == CKD_OK; i++) {
        const file_ref *file = &v->manifest.files[i];
        chunk *opened = opened_by(like, i, file);
        if (opened) {
            v->chunks[v->chunk_count++] = chunk_retain(opened);
            continue;
        }
        status = view_open_chunk(&v->chunks[i], store, file, &v->manifest.checkpoint, err);
        v->chunk_count += status == CKD_OK;
    }
    return status;
}

/* Takes only this checkpoint's records of files with several checkpoints. */
static ckd_status find_parts(view *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->chunk_count && status == CKD_OK; i++) {
        status = chunk_records_of(&v->parts[i], v->chunks[i], &v->manifest.checkpoint.id, err);
        if (status != CKD_OK) {
            err_in_file(err, status, file_path(v->chunks[i]->file));
        }
    }
    return status;
}

static size_t count_kind(const view *v, record_kind kind) {
    size_t count = 0;
    for (size_t i = 0; i < v->chunk_count; i++) {
        for (size_t k = 0; k < v->parts[i]->count; k++) {
            count += v->parts[i]->records[k].kind == (uint32_t)kind;
        }
    }
    return count;
}

/* Orders records with equal content by file, then by record. */
static int by_content(const void *a, const void *b) {
    const view_block *x = a, *y = b;
    int order = (x->record->kind > y->record->kind) - (x->record->kind < y->record->kind);
    order = order ? order : memcmp(&x->record->content, &y->record->content, sizeof(hash128));
    order = order ? order : (x->file > y->file) - (x->file < y->file);
    return order ? order : (x->record > y->record) - (x->record < y->record);
}

/* files: the index of each chunk in the root's manifest; NULL: its own. */
static ckd_status collect_records(view *v, const uint32_t *files, ckd_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < v->chunk_count; i++) {
        total += v->parts[i]->count;
    }
    v->blocks = calloc(total + 1, sizeof(*v->blocks));
    if (!v->blocks) {
        return err_nomem(err, total * sizeof(*v->blocks), "block references");
    }
    size_t blobs = count_kind(v, RECORD_BLOB);
    size_t shared = count_kind(v, RECORD_GROUP) + count_kind(v, RECORD_SIDE) + count_kind(v, RECORD_LINK);
    v->blobs = calloc(blobs + shared + 1, sizeof(*v->blobs));
    if (!v->blobs) {
        return err_nomem(err, (blobs + shared) * sizeof(*v->blobs), "references of shared records");
    }
    v->shared = v->blobs + blobs;
    for (size_t i = 0; i < v->chunk_count; i++) {
        for (size_t k = 0; k < v->parts[i]->count; k++) {
            const record *r = &v->parts[i]->records[k];
            view_block b = {.record = r, .chunk = v->chunks[i], .file = files ? files[i] : (uint32_t)i};
            if (r->kind == RECORD_BLOCK) {
                v->blocks[v->block_count++] = b;
            } else if (r->kind == RECORD_BLOB) {
                v->blobs[v->blob_count++] = b;
            } else if (r->kind == RECORD_GROUP || r->kind == RECORD_SIDE || r->kind == RECORD_LINK) {
                v->shared[v->shared_count++] = b;
            }
        }
    }
    if (v->shared_count) {
        qsort(v->shared, v->shared_count, sizeof(*v->shared), by_content);
    }
    return CKD_OK;
}

/*
 * A save without tensors writes a chunk file without records. So a file with records cannot belong to an empty
 * checkpoint.
 */
static bool files_are_empty(const view *v) {
    bool empty = v->chunk_count > 0;
    for (size_t i = 0; i < v->chunk_count; i++) {
        empty = empty && v->chunks[i]->outer_count == 0;
    }
    return empty;
}

/*
 * Checks that the files hold the tensors and bytes that the manifest states. Otherwise a manifest whose id differs from
 * that of its records would find none of them, and pass as that of an empty checkpoint. Must not be called for a
 * manifest without final totals. Errors: CORRUPT.
 */
static ckd_status check_totals(const view *v, const ckd_store *store, ckd_error *err) {
    const ckd_checkpoint *c = &v->manifest.checkpoint;
    uint64_t raw = 0;
    for (size_t i = 0; i < v->block_count; i++) {
        raw += v->blocks[i].record->raw_size;
    }
    for (size_t i = 0; i < v->blob_count; i++) {
        raw += v->blobs[i].record->raw_size;
    }
    /* otherwise the byte count is only informative */
    bool no_records = v->block_count + v->blob_count == 0 && (c->raw_bytes > 0 || !files_are_empty(v));
    if (c->tensors == v->tensor_count && !no_records) {
        return CKD_OK;
    }
    err_set(
        err, CKD_E_CORRUPT,
        "the manifest declares %llu tensors and %llu bytes, but its chunk files hold %zu tensors and %llu "
        "bytes of this checkpoint",
        (unsigned long long)c->tensors, (unsigned long long)c->raw_bytes, v->tensor_count,
        (unsigned long long)raw);
    return err_in_file(err, CKD_E_CORRUPT, path_manifest(store->path, c->run, c->step, c->generation).text);
}

ckd_status view_open(view **out, const ckd_store *store, manifest *m, const view *like,
                     ckd_status inconsistent, ckd_error *err) {
    *out = NULL;
    view *v = calloc(1, sizeof(*v));
    if (!v) {
        manifest_free(m);
        return err_nomem(err, sizeof(*v), "a checkpoint's view");
    }
    static atomic_uint_fast64_t serials;
    v->serial = atomic_fetch_add(&serials, 1) + 1;
    v->manifest = *m;
    memset(m, 0, sizeof(*m));
    ckd_status status = open_chunks(v, store, like, err);
    THEN(status, find_parts(v, err));
    THEN(status, collect_records(v, NULL, err));
    THEN(status, view_arrange(v, like, inconsistent, err));
    if (status == CKD_OK && inconsistent == CKD_E_CORRUPT) { /* else the manifest has no final totals yet */
        status = check_totals(v, store, err);
    }
    if (status != CKD_OK) {
        view_close(v);
        return status;
    }
    *out = v;
    return CKD_OK;
}

ckd_status view_open_within(view **out, const view *root, const ckd_id *id, const view_files *files,
                            ckd_error *err) {
    view *v = calloc(1, sizeof(*v));
    *out = NULL;
    if (!v) {
        return err_nomem(err, sizeof(*v), "a checkpoint's view");
    }
    v->manifest.checkpoint.id = *id;
    v->root = root;
    v->serial = root->serial;
    ckd_status status = allocate_chunks(v, files->count, err);
    if (status == CKD_OK && files->lost.status != CKD_OK) {
        v->lost = malloc(sizeof(*v->lost));
        status = v->lost ? CKD_OK : err_nomem(err, sizeof(*v->lost), "a checkpoint's view");
    }
    if (v->lost) {
        *v->lost = files->lost;
    }
    for (size_t i = 0; i < files->count && status == CKD_OK; i++) {
        v->chunks[v->chunk_count++] = chunk_retain(files->chunks[i]);
    }
    THEN(status, find_parts(v, err));
    THEN(status, collect_records(v, files->numbers, err));
    THEN(status, view_arrange(v, NULL, CKD_E_CORRUPT, err));
    if (status != CKD_OK) {
        view_close(v);
        return status;
    }
    *out = v;
    return CKD_OK;
}

void view_drop_materialized(view *v) {
    for (size_t i = 0; i < v->block_count && v->materialized_count; i++) {
        v->blocks[i].materialized = NULL;
        v->blocks[i].materialized_chunk = NULL;
    }
    for (size_t i = 0; i < v->materialized_count; i++) {
        chunk_close(v->materialized_chunks[i]);
    }
    v->materialized_count = 0;
}

void view_close(view *v) {
    if (!v) {
        return;
    }
    for (size_t i = 0; i < v->chunk_count; i++) {
        chunk_close(v->chunks[i]);
    }
    view_drop_materialized(v);
    free(v->chunks);
    free(v->materialized_chunks);
    free(v->blocks);
    free(v->collected);
    free(v->duplicates);
    free(v->blobs);
    free(v->shards);
    arena_free(&v->shapes);
    free(v->lost);
    manifest_free(&v->manifest);
    free(v);
}

/* ---- looking up ---- */

static int name_against_tensor(const void *name, const void *tensor) {
    return strcmp(name, ((const view_tensor *)tensor)->tensor->name);
}

const view_tensor *view_find(const view *v, const char *tensor) {
    return v->tensor_count
               ? bsearch(tensor, v->tensors, v->tensor_count, sizeof(*v->tensors), name_against_tensor)
               : NULL;
}

const view_block *view_find_blob(const view *v, const char *name) {
    for (size_t i = 0; i < v->blob_count; i++) {
        if (strcmp(v->blobs[i].record->tensor->name, name) == 0) {
            return &v->blobs[i];
        }
    }
    return NULL;
}

/* The index of the first with this content. */
static size_t find_shared(const view *v, record_kind kind, const hash128 *content) {
    size_t low = 0, high = v->shared_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const record *r = v->shared[middle].record;
        bool before = r->kind != (uint32_t)kind ? r->kind < (uint32_t)kind
                                                : memcmp(&r->content, content, sizeof(*content)) < 0;
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    return low;
}

static bool is_shared_at(const view *v, size_t at, record_kind kind, const hash128 *content) {
    return at < v->shared_count && v->shared[at].record->kind == (uint32_t)kind &&
           hash128_equal(&v->shared[at].record->content, content);
}

const view_block *view_find_shared(const view *v, record_kind kind, const hash128 *content) {
    size_t at = find_shared(v, kind, content);
    return is_shared_at(v, at, kind, content) ? &v->shared[at] : NULL;
}

const view_block *view_find_link(const view *v, const record *like, const hash128 *content) {
    for (size_t at = find_shared(v, RECORD_LINK, content); is_shared_at(v, at, RECORD_LINK, content); at++) {
        const record *r = v->shared[at].record;
        if (r->tensor->dtype == like->tensor->dtype && r->count == like->count) {
            return &v->shared[at];
        }
    }
    return NULL;
}

uint64_t view_stored_bytes(const view_block *b) {
    const chunk *c = b->chunk;
    uint64_t headers = 0;
    if (c->index_raw && !b->record->bundle) {
        /* many records share a bundle's entry, so its share hardly counts */
        headers = (uint64_t)((double)b->record->header_size * (double)c->index_stored / (double)c->index_raw);
    }
    return b->record->stored_size + b->record->header_size + headers;
}

const char *view_method_name(const view_block *b) {
    const record *r = b->record;
    switch (r->predictor) {
    case PREDICT_PARENT:
        return "delta";
    case PREDICT_STEP:
        return "step";
    case PREDICT_CAST:
        return "cast";
    case PREDICT_COPY:
        return r->dependency_count && id_equal(&r->dependencies[0].checkpoint, &r->tensor->checkpoint)
                   ? "copy"
                   : "same";
    default:
        return r->coding == 0 ? "raw" : "standalone";
    }
}

/* If one shard's value is unknown (NaN), the maximum is unknown. */
static double larger(double a, double b) {
    return a > b || a != a ? a : b;
}

static void add_measures(view_totals *totals, const view_shard *shard) {
    const measures *from = &shard->measures;
    measures *to = &totals->measures;
    to->error_squares += from->error_squares;
    to->value_squares += from->value_squares;
    to->max_error = larger(to->max_error, from->max_error);
    to->nonfinite += from->nonfinite;
    to->update_given = larger(to->update_given, from->update_given);
    to->update = larger(to->update, from->update);
    totals->elements += shard->elements;
    totals->direction_squares += (double)shard->elements * from->direction_change * from->direction_change;
    to->direction_change = totals->elements ? sqrt(totals->direction_squares / (double)totals->elements)
                                            : from->direction_change;
}

void view_add_shard(view_totals *totals, const view_shard *shard) {
    add_measures(totals, shard);
    for (size_t i = 0; i < shard->block_count; i++) {
        const view_block *b = &shard->blocks[i];
        const char *method = view_method_name(b);
        totals->stored_bytes += view_stored_bytes(b);
        totals->depth = b->record->depth > totals->depth ? b->record->depth : totals->depth;
        if (!totals->method) {
            totals->method = method;
        } else if (strcmp(totals->method, method) != 0) {
            totals->method = "mixed";
        }
    }
}

void view_tensor_info(ckd_tensor_info *out, const view_tensor *t) {
    view_totals totals = {0};
    for (size_t i = 0; i < t->shard_count; i++) {
        view_add_shard(&totals, &t->shards[i]);
    }
    *out = (ckd_tensor_info){.name = t->tensor->name,
                             .role = t->tensor->role,
                             .dtype = t->tensor->dtype,
                             .ndim = t->shape->ndim,
                             .elements = t->shape->elements,
                             .shards = (uint32_t)t->shard_count,
                             .raw_bytes = t->shape->elements * ckd_dtype_size(t->tensor->dtype),
                             .stored_bytes = totals.stored_bytes,
                             .method = totals.method,
                             .depth = totals.depth,
                             .rel_l2 = measures_rel_l2(&totals.measures),
                             .max_error = totals.measures.max_error,
                             .direction_change = totals.measures.direction_change,
                             .nonfinite = totals.measures.nonfinite,
                             .largest_update_given = totals.measures.update_given,
                             .largest_update = totals.measures.update};
    memcpy(out->shape, t->shape->shape, sizeof(out->shape));
}
