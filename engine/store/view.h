/*
 * A view: one checkpoint opened for reading, its tensors, shards and blocks looked up by name and place. Immutable once
 * open, so threads share it. Internal to engine/.
 */
#ifndef ENGINE_VIEW_H
#define ENGINE_VIEW_H

#include "codec/chunk/measures.h"
#include "engine/common/region.h"
#include "engine/store/store.h"

typedef struct view_block {
    const record *record;
    const chunk *chunk;
    const record *materialized; /* a copy that needs nothing else, or NULL (materialized.h) */
    const chunk *materialized_chunk;
    uint32_t file; /* number of its file in the manifest of the view's root */
} view_block;

/* Its blocks lie in the region's order and tile it. */
typedef struct view_shard {
    const ckd_region *region; /* canonical */
    uint64_t elements;
    const view_block *blocks;
    size_t block_count;
    measures
        measures; /* all 0 in an exact checkpoint, and of a region kept exactly in a lossy one; NaN: not known */
} view_shard;

typedef struct view_tensor {
    const record_tensor *tensor;
    geometry shape;
    size_t order;             /* position among the tensors in the order saved */
    const view_shard *shards; /* ascending by first element; they tile the tensor */
    size_t shard_count;
    bool in_sequence; /* each shard begins where the one before it ends */
} view_tensor;

/* The same values as `block` of a view has, in another record: compaction may have written them again. */
typedef struct view_other {
    view_block *block; /* of the view's blocks: the one that is read */
    view_block other;
} view_other;

/*
 * A view of an own checkpoint is a root. Another checkpoint that its blocks build on is seen within it: as far as the files that the
 * root's manifest names hold it, which may be a part of it only.
 */
typedef struct view {
    manifest manifest;       /* within a root: the checkpoint's id, and nothing else */
    const struct view *root; /* NULL: it is one */
    uint64_t serial;         /* of its root: no two roots of a process have the same */
    bool is_draft;           /* of a manifest that is not published: not found by its checkpoint */
    chunk **chunks;
    const chunk_part **parts; /* of each: what it has of this checkpoint */
    size_t chunk_count;
    view_block *blocks;
    size_t *collected; /* of each block: its place among all before they were sorted */
    view_shard *shards;
    view_tensor *tensors; /* by name */
    size_t block_count, shard_count, tensor_count;
    struct view_other *others; /* within a root: blocks with the values of another one */
    size_t other_count;
    bool chosen; /* between a block and its others */
    view_block *blobs,
        *shared; /* shared: groups, sides and links, which blocks name by their content; by kind and content */
    size_t blob_count, shared_count;
    chunk **materialized_chunks;
    size_t materialized_count;
} view;

/*
 * Opens the chunk files of a manifest and arranges what they hold of its checkpoint. Takes over what m points to (also on
 * failure). `inconsistent` is the status for records that contradict each other, or leave something of a tensor out:
 * CORRUPT for a stored checkpoint, MISMATCH for one about to be committed. `like` (may be NULL) is a view whose blocks may be in the
 * same order, which then need not be found anew, or whose files may be the same, which then need not be opened again; nobody else may open or close a
 * view meanwhile that has such a file, too.
 */
ckd_status view_open(view **out, const ckd_store *store, manifest *m, const view *like,
                     ckd_status inconsistent, ckd_error *err);
/* view_arrange.c: sorts what was collected into tensors and shards; of a root they must tile what they belong to. As view_open. */
ckd_status view_arrange(view *v, const view *like, ckd_status inconsistent, ckd_error *err);
/* One chunk file, as the manifest of `of` names it. Errors: CORRUPT (missing, or another file), UNSUPPORTED, IO, NOMEM. */
ckd_status view_open_chunk(chunk **out, const ckd_store *store, const file_ref *file,
                           const ckd_checkpoint *of, ckd_error *err);
void view_close(view *v); /* accepts NULL */
/*
 * What the chunks hold of checkpoint `id`, seen within `root`: blocks may be missing. Of blocks that are there twice the one in the first chunk is read, and v->others has
 * the rest. Holds the chunks; files: the number of each in the root's manifest. Errors: CORRUPT (records that contradict each other), UNSUPPORTED, IO, NOMEM.
 */
ckd_status view_open_within(view **out, const view *root, const ckd_id *id, chunk *const *chunks,
                            const uint32_t *files, size_t count, ckd_error *err);
/* Closes its materialized copies (materialized.h). */
void view_drop_materialized(view *v);

/*
 * view_measures.c: gives the shards of a lossy checkpoint their measures; without it they are all 0. They only inform: if they are damaged, figures are
 * not known, and that is all. Errors: `inconsistent` (two records of them in a file), NOMEM.
 */
ckd_status view_attach_measures(view *v, ckd_status inconsistent, ckd_error *err);
/* Relative L2 error of these sums; NaN if not known. */
double measures_rel_l2(const measures *m);

/* NULL if there is none. */
const view_tensor *view_find(const view *v, const char *tensor);
const view_block *view_find_blob(const view *v, const char *name);
/* The group or side record with this content; NULL if there is none. */
const view_block *view_find_shared(const view *v, record_kind kind, const hash128 *content);
/* The link with this content that has the dtype and count of the record which builds on it; NULL if there is none. */
const view_block *view_find_link(const view *v, const record *of, const hash128 *content);

/* ---- view_shards.c ---- */
/* Does each shard begin where the one before it ends? */
bool view_in_sequence(const view_tensor *t);
/* Shards first ... end - 1 of the tensor are those that can intersect the span: few, if shards are rows or ranges, or cut as the span is. */
void view_shards_for(size_t *first, size_t *end, const view_tensor *t, const span *want);
/* Blocks first ... end - 1 of the shard are those that can intersect the span (of the same tensor). */
void view_shard_range(size_t *first, size_t *end, const view_shard *shard, const geometry *shape,
                      const span *want);

/* Sums over a shard's blocks; coding is "mixed" if they differ. */
typedef struct view_totals {
    uint64_t stored_bytes;
    uint32_t depth;
    const char *coding;
    measures measures; /* sums add, maxima are maxima; the direction's change is weighted by elements */
    double direction_squares; /* elements times its square */
    uint64_t elements;
} view_totals;
void view_add_shard(view_totals *totals, const view_shard *shard); /* start from zero */
/* One tensor as the public API shows it; its strings live as long as the view. */
void view_tensor_info(ckd_tensor_info *out, const view_tensor *t);

/* What a record adds to its checkpoint: payload, header (its share of its bundle's), and its share of the index. */
uint64_t view_stored_bytes(const view_block *b);
/* "raw", "standalone", "delta", "step", "same", "copy", "cast". */
const char *view_block_coding(const view_block *b);

/* ---- view_cache.c: views of several checkpoints, opened as chains lead to them; thread-safe ---- */
/* A chunk file of an older checkpoint, and the checkpoints that it has records of. */
typedef struct older_file {
    ckd_id id;
    chunk *chunk;
    ckd_id *checkpoints;
    size_t count;
} older_file;
typedef struct view_cache {
    ckd_store *store;
    pthread_mutex_t mutex;
    bool use_materialized; /* set by views_init; verification wants the blocks themselves */
    bool
        deleted_too; /* set while the reader lock keeps the files of what was deleted since the first view was opened */
    bool values_only; /* set for views of which only values are wanted: they are opened without measures */
    view **views;
    size_t count, capacity;
    struct older_file *older; /* that are open */
    size_t older_count, older_capacity;
} view_cache;
void views_init(view_cache *cache, ckd_store *store);
/*
 * The root view of a checkpoint, by its own manifest; that of an early version is given the files that the manifests of its dependencies name. The
 * view lives as long as the cache. Errors name the checkpoint.
 */
ckd_status views_get(const view **out, view_cache *cache, const ckd_id *checkpoint, ckd_error *err);
/*
 * A root view of this manifest, which may name other files than the published one, or stand for one that is still to be published. Takes over what m points to,
 * also on failure. The view lives as long as the cache, and views_get never finds it. Errors: as view_open.
 */
ckd_status views_add(const view **out, view_cache *cache, manifest *m, ckd_error *err);
/*
 * The checkpoint that a block of `own` builds on, as far as the files of own's root hold it. Lives as long as the cache; not to be asked for when that root
 * has been closed. Errors: NOT_FOUND (the files hold nothing of it), CORRUPT (a file is missing, or another one), UNSUPPORTED, IO, NOMEM.
 */
ckd_status views_within(const view **out, view_cache *cache, const view *own, const ckd_id *checkpoint,
                        ckd_error *err);
/* Closes the materialized copies of all views and does without from now on. Not while another thread uses the cache. */
void views_drop_materialized(view_cache *cache);
void views_free(view_cache *cache);

/* ---- view_source.c: what a block builds on; no payload is read ---- */
/* Where the values of a dependency of kind VALUES stand. */
typedef struct view_source {
    const view *view;
    const view_tensor *tensor;
    span want;
    const hash128 *content;
} view_source;
/*
 * Finds the values of dependency `index` of the block; they have as many elements as the block. dtype NONE: any. Errors: CORRUPT, which names the block, those of
 * views_within.
 */
ckd_status view_source_of(view_source *out, view_cache *cache, const view *own, const view_block *b,
                          uint32_t index, ckd_dtype dtype, ckd_error *err);
/* The block that holds exactly these values; NULL if there is none. */
const view_block *view_source_block(const view_source *s);
/* Does the block build on a link, which only early versions wrote? */
bool view_builds_on_link(const record *r);
/*
 * Finds the block that holds the values that this one is a delta of or rounds, and the view it is in. *out is NULL if these values stand in several blocks, or in parts of
 * them. Errors: as view_source_of.
 */
ckd_status view_parent_block(const view_block **out, const view **in, view_cache *cache, const view *own,
                             const view_block *b, ckd_error *err);
/* CORRUPT, naming the block. */
ckd_status view_block_corrupt(const view_block *b, ckd_error *err, const char *what);

#endif
