/* Sorts a view's records by tensor, region and position, and checks that they tile their tensors. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/common/common.h"
#include "engine/store/view.h"

/* ---- arranging: by tensor, region, position ---- */

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

/* Whether the block order of another checkpoint with as many blocks fits. It usually does. */
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
    bool same_order = order_fits(v, like);
    for (size_t i = 0; i < count; i++) {
        v->collected[i] = same_order ? like->collected[i] : i;
    }
    if (!same_order) {
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
    const view_block *p = a, *q = b;
    const record *x = p->record, *y = q->record;
    int order = region_compare(x->region, y->region, shape);
    order = order ? order : (x->first > y->first) - (x->first < y->first);
    order = order ? order : (p->file > q->file) - (p->file < q->file);
    return order ? order : (x > y) - (x < y);
}

static ckd_status inconsistent_at(const view_block *b, ckd_status status, ckd_error *err,
                                  const char *message) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "%s", message);
    if (err) {
        err->status = status;
    }
    return err_in_tensor(err, status, b->record->tensor->name);
}

static bool same_shape(const record_tensor *a, const record_tensor *b) {
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, a->ndim * sizeof(uint64_t)) == 0;
}

static bool same_tensor(const record_tensor *a, const record_tensor *b) {
    return a == b || (a->dtype == b->dtype && a->role == b->role && same_shape(a, b));
}

/* Records of a chunk are an array, so within a file the first record comes first. */
static ckd_status add_duplicate(view *v, view_block *block, const view_block *duplicate, ckd_error *err) {
    if (!v->duplicates) {
        v->duplicates = calloc(v->block_count, sizeof(*v->duplicates));
    }
    if (!v->duplicates) {
        return err_nomem(err, v->block_count * sizeof(*v->duplicates), "block references");
    }
    v->duplicates[v->duplicate_count++] = (view_duplicate){block, *duplicate};
    return CKD_OK;
}

/* Arranges a tensor within a root: blocks may be missing, and some may be duplicates. */
static ckd_status arrange_partly(view *v, view_tensor *t, view_block *blocks, size_t count, ckd_error *err) {
    t->shards = &v->shards[v->shard_count];
    for (size_t i = 0, kept = 0; i < count; kept = i) {
        view_shard *s = &v->shards[v->shard_count++];
        t->shard_count++;
        s->region = blocks[i].record->region;
        s->blocks = &blocks[kept];
        if (!region_count(&s->elements, t->shape, s->region)) {
            return inconsistent_at(&blocks[i], CKD_E_CORRUPT, err,
                                   "the region does not lie inside the tensor");
        }
        uint64_t next = 0;
        for (; i < count && region_equal(blocks[i].record->region, s->region, t->shape->ndim); i++) {
            const record *r = blocks[i].record;
            const record *last = s->block_count ? s->blocks[s->block_count - 1].record : NULL;
            if (last && last->first == r->first && last->count == r->count) {
                ckd_status status = add_duplicate(v, &blocks[kept - 1], &blocks[i], err);
                if (status != CKD_OK) {
                    return status;
                }
                continue;
            }
            if (r->first < next) {
                return inconsistent_at(&blocks[i], CKD_E_CORRUPT, err, "blocks of a shard overlap");
            }
            next = r->first + r->count;
            blocks[kept++] = blocks[i];
            s->block_count++;
        }
    }
    return CKD_OK;
}

/* Cuts the blocks of one tensor, sorted by position, into shards. Checks that each shard's blocks tile it. */
static ckd_status arrange_shards(view *v, view_tensor *t, view_block *blocks, size_t count,
                                 ckd_status inconsistent, ckd_error *err) {
    t->shards = &v->shards[v->shard_count];
    for (size_t i = 0; i < count;) {
        view_shard *s = &v->shards[v->shard_count++];
        t->shard_count++;
        s->region = blocks[i].record->region;
        s->blocks = &blocks[i];
        if (!region_count(&s->elements, t->shape, s->region)) {
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
                 region_equal(blocks[i].record->region, s->region, t->shape->ndim));
        if (next != s->elements) {
            return inconsistent_at(&blocks[i - 1], inconsistent, err,
                                   "blocks of a shard are missing at its end");
        }
    }
    return CKD_OK;
}

/*
 * Neighbours by name often have the same few shapes. Sharing a geometry saves memory, because it is as large as a
 * tensor's other data.
 */
#define NEIGHBOURS 8u

/* Within a root, the root's tensor of that name usually has the shape. No view is used after its root was closed. */
static const geometry *find_shape(const view *v, size_t at) {
    const record_tensor *is = v->tensors[at].tensor;
    const view_tensor *of_root = v->root ? view_find(v->root, is->name) : NULL;
    if (of_root && same_shape(of_root->tensor, is)) {
        return of_root->shape;
    }
    for (size_t i = at; i-- > 0 && at - i <= NEIGHBOURS;) {
        if (same_shape(v->tensors[i].tensor, is)) {
            return v->tensors[i].shape;
        }
    }
    return NULL;
}

static ckd_status set_shape(view *v, view_tensor *t, const view_block *first, ckd_status inconsistent,
                            ckd_error *err) {
    t->shape = find_shape(v, (size_t)(t - v->tensors));
    if (t->shape) {
        return CKD_OK;
    }
    geometry *shape = arena_alloc(&v->shapes, sizeof(*shape));
    if (!shape) {
        return err_nomem(err, sizeof(*shape), "the shape of a tensor");
    }
    t->shape = shape;
    return geometry_init(shape, t->tensor->ndim, t->tensor->shape)
               ? CKD_OK
               : inconsistent_at(first, inconsistent, err, "the shape has too many elements");
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
    ckd_status status = set_shape(v, t, &blocks[0], inconsistent, err);
    if (status != CKD_OK) {
        return status;
    }
    geometry shape = *t->shape; /* for qsort_r, which takes no const */
    qsort_r(blocks, count, sizeof(*blocks), by_place, &shape);
    status = v->root ? arrange_partly(v, t, blocks, count, err)
                     : arrange_shards(v, t, blocks, count, inconsistent, err);
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
    v->shards = calloc(v->block_count + 1, sizeof(*v->shards) + sizeof(*v->tensors));
    if (!v->shards) {
        return err_nomem(err, v->block_count * sizeof(*v->tensors), "tensor and shard tables");
    }
    v->tensors = (view_tensor *)(void *)(v->shards + v->block_count + 1);
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

#define PAIRS_MAX (1u << 22) /* limit of comparisons to find the overlap */

/* Finds a shard that overlaps an earlier one. With very many shards, compares only those that begin near each other. */
static const view_shard *find_overlap(const view_tensor *t) {
    size_t reach = 1 + PAIRS_MAX / (t->shard_count + 1);
    for (size_t a = 0; a < t->shard_count; a++) {
        for (size_t b = a + 1; b < t->shard_count && b - a <= reach; b++) {
            if (regions_overlap(t->shape, t->shards[a].region, t->shards[b].region)) {
                return &t->shards[b];
            }
        }
    }
    return NULL;
}

static ckd_status not_tiled(const view_tensor *t, uint64_t elements, ckd_status inconsistent,
                            ckd_error *err) {
    const view_shard *second = find_overlap(t);
    if (second || elements == t->shape->elements) {
        return inconsistent_at(&(second ? second : &t->shards[0])->blocks[0], inconsistent, err,
                               "two saved regions of the tensor overlap");
    }
    char message[128];
    snprintf(message, sizeof(message), "the saved regions hold %llu of the tensor's %llu elements",
             (unsigned long long)elements, (unsigned long long)t->shape->elements);
    return inconsistent_at(&t->shards[0].blocks[0], inconsistent, err, message);
}

static ckd_status check_coverage(const view *v, ckd_status inconsistent, ckd_error *err) {
    uint64_t seed = load_le64(
        v->manifest.checkpoint.id
            .bytes); /* random, and fixed before the regions were chosen, so that these cannot deceive the check */
    for (size_t i = 0; i < v->tensor_count; i++) {
        const view_tensor *t = &v->tensors[i];
        if (t->shard_count == 1 && t->shards[0].elements == t->shape->elements) {
            continue;
        }
        coverage cover = coverage_begin(t->shape, seed);
        for (size_t s = 0; s < t->shard_count; s++) {
            coverage_add(&cover, t->shards[s].region);
        }
        if (!coverage_complete(&cover)) {
            return not_tiled(t, cover.elements, inconsistent, err);
        }
    }
    return CKD_OK;
}

/* ---- order of saving: files by rank, records in the order written ---- */

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

ckd_status view_arrange(view *v, const view *like, ckd_status inconsistent, ckd_error *err) {
    ckd_status status = v->root ? CKD_OK : arrange_blobs(v, inconsistent, err);
    THEN(status, arrange(v, like, inconsistent, err));
    if (status == CKD_OK && !v->root) {
        status = check_coverage(v, inconsistent, err);
    }
    return status == CKD_OK && !v->root ? number_tensors(v, err) : status;
}
