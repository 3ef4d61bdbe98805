#include "engine/view.h"

#include "engine/tiling.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- collecting: all records of this checkpoint, from all files ---- */

/* Compaction puts several checkpoints into one file: who has opened one of them need not open it again. */
static chunk *opened_by(const view *like, size_t i, const note_file *file) {
    bool same = like && i < like->chunk_count && id_equal(&like->manifest.files[i].id, &file->id) &&
                hash128_equal(&like->manifest.files[i].root, &file->root) &&
                like->manifest.files[i].size == file->size;
    return same ? like->chunks[i] : NULL;
}

static ckd_status open_chunks(view *v, const ckd_store *store, const view *like, ckd_error *err) {
    v->chunks = calloc(v->manifest.file_count + 1, sizeof(chunk *));
    v->parts = calloc(v->manifest.file_count + 1, sizeof(*v->parts));
    if (!v->chunks || !v->parts) {
        return err_nomem(err, v->manifest.file_count * sizeof(chunk *), "chunk handles");
    }
    for (size_t i = 0; i < v->manifest.file_count; i++) {
        const note_file *file = &v->manifest.files[i];
        chunk *opened = opened_by(like, i, file);
        if (opened) {
            v->chunks[v->chunk_count++] = chunk_hold(opened);
            continue;
        }
        pathname p = path_chunk(store->path, &file->id, "");
        ckd_status status = chunk_open_outer(&v->chunks[i], p.text, err);
        if (status == CKD_E_NOT_FOUND) {
            return err_corrupt(err, p.text, CKD_NO_OFFSET, "a chunk file of %s@%llu is missing",
                               v->manifest.checkpoint.run, (unsigned long long)v->manifest.checkpoint.step);
        }
        if (status != CKD_OK) {
            return err_in_file(err, status, p.text);
        }
        v->chunk_count++;
        const chunk_identity *identity = &v->chunks[i]->identity;
        if (!hash128_equal(&v->chunks[i]->root, &file->root) || v->chunks[i]->size != file->size ||
            !id_equal(&identity->file, &file->id) || !id_equal(&identity->store, &store->id)) {
            return err_corrupt(err, p.text, CKD_NO_OFFSET,
                               "this is not the chunk file that %s@%llu was committed with",
                               v->manifest.checkpoint.run, (unsigned long long)v->manifest.checkpoint.step);
        }
    }
    return CKD_OK;
}

/* Of a file that others are in, too, only what is this checkpoint's. */
static ckd_status find_parts(view *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->chunk_count && status == CKD_OK; i++) {
        status = chunk_part_of(&v->parts[i], v->chunks[i], &v->manifest.checkpoint.id, err);
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

/* What is the same to readers stands in the order of the files. */
static int by_content(const void *a, const void *b) {
    const view_block *x = a, *y = b;
    int order = (x->record->kind > y->record->kind) - (x->record->kind < y->record->kind);
    order = order ? order : memcmp(&x->record->content, &y->record->content, sizeof(hash128));
    return order ? order : (x->record > y->record) - (x->record < y->record);
}

static ckd_status collect_records(view *v, ckd_error *err) {
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
    v->blobs = calloc(blobs + 1, sizeof(*v->blobs));
    v->shared = calloc(shared + 1, sizeof(*v->shared));
    if (!v->blobs || !v->shared) {
        return err_nomem(err, (blobs + shared) * sizeof(*v->blobs), "references of shared records");
    }
    for (size_t i = 0; i < v->chunk_count; i++) {
        for (size_t k = 0; k < v->parts[i]->count; k++) {
            const record *r = &v->parts[i]->records[k];
            view_block b = {.record = r, .chunk = v->chunks[i]};
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

/* ---- arranging: by tensor, region, place ---- */

static int by_name(const void *a, const void *b) {
    const view_block *x = a, *y = b;
    if (x->record->tensor == y->record->tensor) {
        return x->record < y->record ? -1 : x->record > y->record;
    }
    int order = strcmp(x->record->tensor->name, y->record->tensor->name);
    return order ? order : x->record < y->record ? -1 : x->record > y->record;
}

static int by_name_of(const void *a, const void *b, void *blocks) {
    const view_block *all = blocks;
    return by_name(&all[*(const size_t *)a], &all[*(const size_t *)b]);
}

/* The order of another checkpoint of as many blocks: mostly of the same ones. */
static bool order_fits(const view *v, const view *like) {
    if (!like || like->block_count != v->block_count) {
        return false;
    }
    for (size_t i = 1; i < v->block_count; i++) {
        if (by_name(&v->blocks[like->collected[i - 1]], &v->blocks[like->collected[i]]) >= 0) {
            return false;
        }
    }
    return true;
}

static ckd_status sort_blocks(view *v, const view *like, ckd_error *err) {
    size_t count = v->block_count;
    view_block *sorted = calloc(count + 1, sizeof(*sorted));
    v->collected = malloc((count + 1) * sizeof(*v->collected));
    if (!sorted || !v->collected) {
        free(sorted);
        return err_nomem(err, count * sizeof(*sorted), "block references");
    }
    bool known = order_fits(v, like);
    for (size_t i = 0; i < count; i++) {
        v->collected[i] = known ? like->collected[i] : i;
    }
    if (!known) {
        qsort_r(v->collected, count, sizeof(*v->collected), by_name_of, v->blocks);
    }
    for (size_t i = 0; i < count; i++) {
        sorted[i] = v->blocks[v->collected[i]];
    }
    free(v->blocks);
    v->blocks = sorted;
    return CKD_OK;
}

static int by_place(const void *a, const void *b, void *shape) {
    const record *x = ((const view_block *)a)->record, *y = ((const view_block *)b)->record;
    int order = region_compare(x->region, y->region, shape);
    return order ? order : x->first < y->first ? -1 : x->first > y->first;
}

static ckd_status inconsistent_at(const view_block *b, ckd_status status, ckd_error *err, const char *what) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "%s", what);
    if (err) {
        err->status = status;
    }
    return err_in_tensor(err, status, b->record->tensor->name);
}

static bool same_tensor(const record_tensor *a, const record_tensor *b) {
    return a == b || (a->dtype == b->dtype && a->role == b->role && a->ndim == b->ndim &&
                      memcmp(a->shape, b->shape, a->ndim * sizeof(uint64_t)) == 0);
}

/* Cuts the blocks of one tensor, sorted by place, into shards, and checks that each shard's blocks tile it. */
static ckd_status arrange_shards(view *v, view_tensor *t, view_block *blocks, size_t count,
                                 ckd_status inconsistent, ckd_error *err) {
    t->shards = &v->shards[v->shard_count];
    for (size_t i = 0; i < count;) {
        view_shard *s = &v->shards[v->shard_count++];
        t->shard_count++;
        s->region = blocks[i].record->region;
        s->blocks = &blocks[i];
        if (!region_count(&s->elements, &t->shape, s->region)) {
            return inconsistent_at(&blocks[i], inconsistent, err,
                                   "the region does not lie inside the tensor");
        }
        uint64_t next = 0;
        do {
            if (blocks[i].record->first != next) {
                return inconsistent_at(&blocks[i], inconsistent, err,
                                       "blocks of a shard overlap or leave a gap");
            }
            next += blocks[i].record->count;
            s->block_count++;
            i++;
        } while (i < count && next < s->elements &&
                 region_equal(blocks[i].record->region, s->region, t->shape.ndim));
        if (next != s->elements) {
            return inconsistent_at(&blocks[i - 1], inconsistent, err,
                                   "blocks of a shard are missing at its end");
        }
    }
    return CKD_OK;
}

static ckd_status arrange_tensor(view *v, view_block *blocks, size_t count, ckd_status inconsistent,
                                 ckd_error *err) {
    view_tensor *t = &v->tensors[v->tensor_count++];
    t->tensor = blocks[0].record->tensor;
    t->order = (size_t)-1;
    for (size_t i = 0; i < count; i++) {
        if (!same_tensor(t->tensor, blocks[i].record->tensor)) {
            return inconsistent_at(&blocks[i], inconsistent, err,
                                   "saved with another shape, dtype or role under the same name");
        }
    }
    if (!geometry_init(&t->shape, t->tensor->ndim, t->tensor->shape)) {
        return inconsistent_at(&blocks[0], inconsistent, err, "the shape has too many elements");
    }
    qsort_r(blocks, count, sizeof(*blocks), by_place, &t->shape);
    ckd_status status = arrange_shards(v, t, blocks, count, inconsistent, err);
    t->in_sequence = status == CKD_OK && view_in_sequence(t);
    return status;
}

static ckd_status arrange_blobs(view *v, ckd_status inconsistent, ckd_error *err) {
    qsort(v->blobs, v->blob_count, sizeof(*v->blobs), by_name);
    for (size_t i = 1; i < v->blob_count; i++) {
        if (strcmp(v->blobs[i - 1].record->tensor->name, v->blobs[i].record->tensor->name) == 0) {
            return inconsistent_at(&v->blobs[i], inconsistent, err, "two blobs have this name");
        }
    }
    return CKD_OK;
}

static ckd_status arrange(view *v, const view *like, ckd_status inconsistent, ckd_error *err) {
    ckd_status sorted = sort_blocks(v, like, err);
    if (sorted != CKD_OK) {
        return sorted;
    }
    v->shards = calloc(v->block_count + 1, sizeof(*v->shards));
    v->tensors = calloc(v->block_count + 1, sizeof(*v->tensors));
    if (!v->shards || !v->tensors) {
        return err_nomem(err, v->block_count * sizeof(*v->tensors), "tensor and shard tables");
    }
    for (size_t i = 0, end; i < v->block_count; i = end) {
        const char *name = v->blocks[i].record->tensor->name;
        for (end = i + 1; end < v->block_count && strcmp(v->blocks[end].record->tensor->name, name) == 0;) {
            end++;
        }
        ckd_status status = arrange_tensor(v, &v->blocks[i], end - i, inconsistent, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* ---- do the shards of every tensor tile it? ---- */

#define PAIRS_MAX (1u << 22) /* compared at most to find a culprit */

/* A shard that overlaps one before it. Of very many shards only those that begin near each other are compared. */
static const view_shard *find_overlap(const view_tensor *t) {
    size_t reach = 1 + PAIRS_MAX / (t->shard_count + 1);
    for (size_t a = 0; a < t->shard_count; a++) {
        for (size_t b = a + 1; b < t->shard_count && b - a <= reach; b++) {
            if (regions_overlap(&t->shape, t->shards[a].region, t->shards[b].region)) {
                return &t->shards[b];
            }
        }
    }
    return NULL;
}

static ckd_status not_tiled(const view_tensor *t, uint64_t held, ckd_status inconsistent, ckd_error *err) {
    const view_shard *second = find_overlap(t);
    if (second || held == t->shape.elements) {
        return inconsistent_at(&(second ? second : &t->shards[0])->blocks[0], inconsistent, err,
                               "two saved regions of the tensor overlap");
    }
    char what[128];
    snprintf(what, sizeof(what), "the saved regions hold %llu of the tensor's %llu elements",
             (unsigned long long)held, (unsigned long long)t->shape.elements);
    return inconsistent_at(&t->shards[0].blocks[0], inconsistent, err, what);
}

static ckd_status check_tiling(const view *v, ckd_status inconsistent, ckd_error *err) {
    uint64_t seed = load_le64(v->manifest.checkpoint.id.bytes); /* random, and older than the regions */
    for (size_t i = 0; i < v->tensor_count; i++) {
        const view_tensor *t = &v->tensors[i];
        if (t->shard_count == 1 && t->shards[0].elements == t->shape.elements) {
            continue;
        }
        tiling cover = tiling_begin(&t->shape, seed);
        for (size_t s = 0; s < t->shard_count; s++) {
            tiling_add(&cover, t->shards[s].region);
        }
        if (!tiling_complete(&cover)) {
            return not_tiled(t, cover.elements, inconsistent, err);
        }
    }
    return CKD_OK;
}

/* ---- order saved: files by rank, records as they were given to the writer ---- */

typedef struct place {
    size_t file, record;
    view_tensor *tensor;
} place;

static int by_file_and_record(const void *a, const void *b) {
    const place *x = a, *y = b;
    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    return x->record < y->record ? -1 : x->record > y->record;
}

static size_t file_number(const view *v, const chunk *c) {
    size_t i = 0;
    while (i < v->chunk_count && v->chunks[i] != c) {
        i++;
    }
    return i;
}

static place first_place(const view *v, view_tensor *t) {
    place first = {(size_t)-1, (size_t)-1, t};
    for (size_t s = 0; s < t->shard_count; s++) {
        for (size_t b = 0; b < t->shards[s].block_count; b++) {
            const view_block *block = &t->shards[s].blocks[b];
            size_t file = file_number(v, block->chunk);
            place p = {file, (size_t)(block->record - v->parts[file]->records), t};
            if (by_file_and_record(&p, &first) < 0) {
                first = p;
            }
        }
    }
    return first;
}

static ckd_status number_tensors(view *v, ckd_error *err) {
    place *places = calloc(v->tensor_count + 1, sizeof(*places));
    if (!places) {
        return err_nomem(err, v->tensor_count * sizeof(*places), "tensor order");
    }
    for (size_t i = 0; i < v->tensor_count; i++) {
        places[i] = first_place(v, &v->tensors[i]);
    }
    qsort(places, v->tensor_count, sizeof(*places), by_file_and_record);
    for (size_t i = 0; i < v->tensor_count; i++) {
        places[i].tensor->order = i;
    }
    free(places);
    return CKD_OK;
}

ckd_status view_open(view **out, const ckd_store *store, manifest *m, const view *like,
                     ckd_status inconsistent, ckd_error *err) {
    *out = NULL;
    view *v = calloc(1, sizeof(*v));
    if (!v) {
        manifest_free(m);
        return err_nomem(err, sizeof(*v), "a checkpoint's view");
    }
    v->manifest = *m;
    memset(m, 0, sizeof(*m));
    ckd_status status = open_chunks(v, store, like, err);
    if (status == CKD_OK) {
        status = find_parts(v, err);
    }
    if (status == CKD_OK) {
        status = collect_records(v, err);
    }
    if (status == CKD_OK) {
        status = arrange_blobs(v, inconsistent, err);
    }
    if (status == CKD_OK) {
        status = arrange(v, like, inconsistent, err);
    }
    if (status == CKD_OK) {
        status = check_tiling(v, inconsistent, err);
    }
    if (status == CKD_OK) {
        status = number_tensors(v, err);
    }
    if (status != CKD_OK) {
        view_close(v);
        return status;
    }
    *out = v;
    return CKD_OK;
}

void view_drop_ready(view *v) {
    for (size_t i = 0; i < v->block_count && v->ready_count; i++) {
        v->blocks[i].ready = NULL;
        v->blocks[i].ready_chunk = NULL;
    }
    for (size_t i = 0; i < v->ready_count; i++) {
        chunk_close(v->ready_chunks[i]);
    }
    v->ready_count = 0;
}

void view_close(view *v) {
    if (!v) {
        return;
    }
    for (size_t i = 0; i < v->chunk_count; i++) {
        chunk_close(v->chunks[i]);
    }
    view_drop_ready(v);
    free(v->chunks);
    free(v->parts);
    free(v->ready_chunks);
    free(v->blocks);
    free(v->collected);
    free(v->blobs);
    free(v->shared);
    free(v->shards);
    free(v->tensors);
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

/* The first of those with this content. */
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

const view_block *view_find_link(const view *v, const record *of, const hash128 *content) {
    for (size_t at = find_shared(v, RECORD_LINK, content); is_shared_at(v, at, RECORD_LINK, content); at++) {
        const record *r = v->shared[at].record;
        if (r->tensor->dtype == of->tensor->dtype && r->count == of->count) {
            return &v->shared[at];
        }
    }
    return NULL;
}

uint64_t view_stored_bytes(const view_block *b) {
    const chunk *c = b->chunk;
    uint64_t headers = 0;
    if (c->index_raw && !b->record->bundle) { /* a bundle's is shared by so many that it hardly counts */
        headers = (uint64_t)((double)b->record->header_size * (double)c->index_stored / (double)c->index_raw);
    }
    return b->record->stored_size + b->record->header_size + headers;
}

const char *view_block_coding(const view_block *b) {
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

/* What is not known of one shard is not known of all. */
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
    totals->elements += shard->elements;
    totals->direction_squares += (double)shard->elements * from->direction_change * from->direction_change;
    to->direction_change = totals->elements ? sqrt(totals->direction_squares / (double)totals->elements)
                                            : from->direction_change;
}

void view_add_shard(view_totals *totals, const view_shard *shard) {
    add_measures(totals, shard);
    for (size_t i = 0; i < shard->block_count; i++) {
        const view_block *b = &shard->blocks[i];
        const char *coding = view_block_coding(b);
        totals->stored_bytes += view_stored_bytes(b);
        totals->depth = b->record->depth > totals->depth ? b->record->depth : totals->depth;
        if (!totals->coding) {
            totals->coding = coding;
        } else if (strcmp(totals->coding, coding) != 0) {
            totals->coding = "mixed";
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
                             .ndim = t->shape.ndim,
                             .elements = t->shape.elements,
                             .shards = (uint32_t)t->shard_count,
                             .raw_bytes = t->shape.elements * ckd_dtype_size(t->tensor->dtype),
                             .stored_bytes = totals.stored_bytes,
                             .coding = totals.coding,
                             .depth = totals.depth,
                             .rel_l2 = measures_rel_l2(&totals.measures),
                             .max_error = totals.measures.max_error,
                             .direction_change = totals.measures.direction_change,
                             .nonfinite = totals.measures.nonfinite};
    memcpy(out->shape, t->shape.shape, sizeof(out->shape));
}
