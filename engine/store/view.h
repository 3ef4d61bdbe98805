/*
 * Views: checkpoints opened for reading, what their records build on, and copying of records. Loads, saves,
 * verification and compaction all read checkpoints through these.
 */
#ifndef ENGINE_STORE_VIEW_H
#define ENGINE_STORE_VIEW_H

#include "codec/chunk/chunk.h"
#include "engine/common/common.h"
#include "engine/store/handle.h"

/*
 * A view: one checkpoint opened for reading. Finds its tensors, shards and blocks by name and position. Immutable once
 * open, so threads share it.
 */

typedef struct view_block {
    const record *record;
    const chunk *chunk;
    /* the materialized copy, which depends on nothing, or NULL */
    const record *materialized;
    const chunk *materialized_chunk;
    uint32_t file; /* index of its file in the manifest of the view's root */
} view_block;

/* The blocks lie in the region's order and tile it. */
typedef struct view_shard {
    const ckd_region *region; /* canonical */
    uint64_t elements;
    const view_block *blocks;
    size_t block_count;
    /* of an exact region all 0 but the values that are not finite, if these were counted; NaN: unknown */
    measures measures;
} view_shard;

typedef struct view_tensor {
    const record_tensor *tensor;
    const geometry *shape;    /* the view's; several tensors may have the same */
    size_t order;             /* position in the order in which the tensors were saved */
    const view_shard *shards; /* ascending by first element; they tile the tensor */
    size_t shard_count;
    bool in_sequence; /* each shard begins where the previous one ends */
} view_tensor;

/* Another record with the same values as `block`: compaction may have written them again. */
typedef struct view_duplicate {
    view_block *block; /* the view's block with these values, which is the one that is read */
    view_block other;
} view_duplicate;

/*
 * A view of a checkpoint's own files is a root. Its blocks may build on another checkpoint, which is then seen within
 * the root. Only the records in files that the root's manifest names are seen, and so perhaps a part of that
 * checkpoint.
 */
typedef struct view {
    manifest manifest;       /* within a root: only the checkpoint's id */
    const struct view *root; /* NULL: this view is a root */
    /* within a root: why a file that may hold more of the checkpoint was left out; or NULL */
    ckd_error *lost;
    uint64_t serial; /* of its root; unique among the roots of the process */
    bool is_draft;   /* the manifest is not published: lookups by checkpoint skip this view */
    chunk **chunks;
    const chunk_records **parts; /* for each chunk: its records of this checkpoint; behind the chunks */
    size_t chunk_count;
    view_block *blocks;
    size_t *collected; /* for each block: its index before sorting */
    view_shard *shards;
    view_tensor *tensors; /* sorted by name; behind the shards */
    record_arena shapes;
    size_t block_count, shard_count, tensor_count;
    struct view_duplicate *duplicates; /* within a root: duplicates of blocks of this view */
    size_t duplicate_count;
    bool duplicates_resolved; /* the choice between duplicates was made */
    /* shared: groups, sides and links, which blocks name by content; sorted by kind and content; behind the blobs */
    view_block *blobs, *shared;
    size_t blob_count, shared_count;
    chunk **materialized_chunks;
    size_t materialized_count;
} view;

/*
 * Opens the chunk files of a manifest and arranges its checkpoint's records. Takes over what m points to, also on
 * failure. `inconsistent` is the status for records that contradict each other or leave part of a tensor out: CORRUPT
 * for a stored checkpoint, MISMATCH for one about to be committed. `like` (may be NULL) is a view that may have the
 * same block order or the same files. The order is then not sorted, and the files are not opened, again. No other
 * thread may open or close a view with such a file meanwhile.
 */
ckd_status view_open(view **out, const ckd_store *store, manifest *m, const view *like,
                     ckd_status inconsistent, ckd_error *err);
/*
 * view_arrange.c: sorts the collected records into tensors and shards. In a root, they must tile their tensors. Errors:
 * as view_open.
 */
ckd_status view_arrange(view *v, const view *like, ckd_status inconsistent, ckd_error *err);
/*
 * Opens one chunk file that the manifest of `checkpoint` names. Errors: CORRUPT (missing, or another file),
 * UNSUPPORTED, IO, NOMEM.
 */
ckd_status view_open_chunk(chunk **out, const ckd_store *store, const file_ref *file,
                           const ckd_checkpoint *checkpoint, ckd_error *err);
void view_close(view *v); /* accepts NULL */
/* Chunk files of a root that have records of one checkpoint. */
typedef struct view_files {
    chunk **chunks;
    uint32_t *numbers; /* the index of each in the root's manifest */
    size_t count;
    ckd_error lost; /* status CKD_OK: no file was left out */
} view_files;
/*
 * Opens the records of checkpoint `id` in these files, within `root`; blocks may be missing. If a block is there twice,
 * the one in the first file is read and v->duplicates lists the rest. Holds the chunks. Errors: CORRUPT (records that
 * contradict each other), UNSUPPORTED, IO, NOMEM.
 */
ckd_status view_open_within(view **out, const view *root, const ckd_id *id, const view_files *files,
                            ckd_error *err);
/* Closes its materialized copies. */
void view_drop_materialized(view *v);

/*
 * view_measures.c: attaches the measures of a checkpoint to its shards; without this call they are all 0.
 * Measures only inform, so damaged ones become unknown. Errors: `inconsistent` (a file has two measures records),
 * NOMEM.
 */
ckd_status view_attach_measures(view *v, ckd_status inconsistent, ckd_error *err);
/* Values that are not finite, as far as they were counted. */
uint64_t view_tensor_nonfinite(const view_tensor *t);
/* Relative L2 error of these sums; NaN if unknown. */
double measures_rel_l2(const measures *m);

/* Both return NULL if there is none. */
const view_tensor *view_find(const view *v, const char *tensor);
const view_block *view_find_blob(const view *v, const char *name);
/* Finds the group or side record with this content; NULL if there is none. */
const view_block *view_find_shared(const view *v, record_kind kind, const hash128 *content);
/*
 * Finds the link with this content, and with the dtype and count of the record that builds on it; NULL if there is
 * none.
 */
const view_block *view_find_link(const view *v, const record *like, const hash128 *content);

/* ---- view_shards.c ---- */
/* Whether each shard begins where the previous one ends. */
bool view_in_sequence(const view_tensor *t);
/*
 * Finds shards first ... end - 1, the only ones that can intersect the span. These are few if shards are rows or
 * ranges, or are cut as the span is.
 */
void view_shards_for(size_t *first, size_t *end, const view_tensor *t, const region_span *span);
/* Finds blocks first ... end - 1 of the shard, the only ones that can intersect the span (of the same tensor). */
void view_shard_range(size_t *first, size_t *end, const view_shard *shard, const geometry *shape,
                      const region_span *span);

/* Sums over the blocks of shards; method is "mixed" if they differ. */
typedef struct view_totals {
    uint64_t stored_bytes;
    uint32_t depth;
    const char *method;
    measures measures; /* sums are added, maxima are maxima; the direction's change is weighted by elements */
    double direction_squares; /* sum of elements times squared direction change */
    uint64_t elements;
} view_totals;
void view_add_shard(view_totals *totals, const view_shard *shard); /* start from zero */
/* Describes one tensor for the public API. The strings live as long as the view. */
void view_tensor_info(ckd_tensor_info *out, const view_tensor *t);

/*
 * Bytes that a record adds to its checkpoint: payload, header (or its share of its bundle's), and its share of the
 * index.
 */
uint64_t view_stored_bytes(const view_block *b);
/* "raw", "standalone", "delta", "step", "same", "copy", "cast". */
const char *view_method_name(const view_block *b);

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
    bool use_materialized; /* set by views_init; verification clears it, to check the blocks themselves */
    /* set while the reader lock keeps the files of checkpoints that were deleted since the first view was opened */
    bool deleted_too;
    bool values_only; /* set for callers that want only values: views are opened without measures */
    /* set for saves, which build on the chain: a materialized copy counts only while that is intact */
    bool copies_need_chains;
    view **views;
    size_t count, capacity;
    size_t block_count;       /* of all views */
    struct older_file *older; /* older files that are open */
    size_t older_count, older_capacity;
} view_cache;
void views_init(view_cache *cache, ckd_store *store);
/*
 * Gets the root view of a checkpoint, from its own manifest. A manifest of an early version is first given the files
 * that the manifests of its dependencies name. The view lives as long as the cache. Errors name the checkpoint.
 */
ckd_status views_get(const view **out, view_cache *cache, const ckd_id *checkpoint, ckd_error *err);
/*
 * Opens a root view of this manifest, which may name other files than the published one, or may not be published yet.
 * Takes over what m points to, also on failure. The view lives as long as the cache, and views_get never finds it.
 * Errors: as view_open.
 */
ckd_status views_add(const view **out, view_cache *cache, manifest *m, ckd_error *err);
/*
 * Gets the checkpoint that a block of `own` builds on, as far as the files of own's root hold it. A missing or damaged
 * file is left out, so blocks that do not need it can still be read. The view lives as long as the cache. Must not be
 * called after that root was closed. Errors: NOT_FOUND (the files hold none of its records), CORRUPT (they hold none,
 * and one file was left out), UNSUPPORTED, IO, NOMEM.
 */
ckd_status views_within(const view **out, view_cache *cache, const view *own, const ckd_id *checkpoint,
                        ckd_error *err);
/*
 * Are there more than `max` views, or so many blocks in them that they take half a gigabyte or more? Callers that look
 * at one checkpoint after the other then free the cache between two.
 */
bool views_are_many(const view_cache *cache, size_t max);
/* Closes the materialized copies of all views and uses none from now on. Not while another thread uses the cache. */
void views_drop_materialized(view_cache *cache);
void views_free(view_cache *cache);

/* ---- view_source.c: finds what a block builds on; reads no payload ---- */
/* The location of the values of a dependency of kind VALUES. */
typedef struct view_source {
    const view *view;
    const view_tensor *tensor;
    region_span span;
    const hash128 *content;
} view_source;
/*
 * Finds the values of dependency `index` of the block; they have as many elements as the block. Errors: CORRUPT (names
 * the block), those of views_within.
 */
ckd_status view_source_of(view_source *out, view_cache *cache, const view *own, const view_block *b,
                          uint32_t index, ckd_error *err);
/* Returns CORRUPT and names the block if what it builds on has another dtype. */
ckd_status view_source_check_dtype(const view_source *s, const view_block *b, ckd_dtype dtype,
                                   ckd_error *err);
/* Returns the block with exactly these values; NULL: they are spread over several, or are a part of one. */
const view_block *view_source_block(const view_source *s);
/* Whether the block builds on a link, which only early versions wrote. */
bool view_builds_on_link(const record *r);
/*
 * Finds the block that this one rounds or is a delta on, and its view. *out is NULL if the values are spread over
 * several blocks or are only a part of one. Errors: as view_source_of.
 */
ckd_status view_parent_block(const view_block **out, const view **in, view_cache *cache, const view *own,
                             const view_block *b, ckd_error *err);
/* Returns CORRUPT and names the block. */
ckd_status view_block_corrupt(const view_block *b, ckd_error *err, const char *what);
/*
 * Returns `status` for something that v (may be NULL) lacks, which *err describes. If a file was left out of v, that is
 * the reason: it replaces both.
 */
ckd_status view_lacks(const view *v, ckd_status status, ckd_error *err);

/* The closure of a checkpoint: all records that a load of it reads. */

/* Called once for each record of the closure. `in`: the view that holds it. */
typedef ckd_status (*closure_fn)(void *context, const view *in, const view_block *b, ckd_error *err);

/*
 * Visits everything that the blocks of a root build on, down to the last record, in the files that its manifest names.
 * Reads no payload. Errors: CORRUPT (a record or values that something builds on are missing, or have another content
 * hash; records build on each other in a cycle), those of views_within and `visit`, NOMEM.
 */
ckd_status closure_visit(view_cache *cache, const view *root, closure_fn visit, void *context,
                         ckd_error *err);

/* The same for one block of a view, which need not be a root. */
ckd_status closure_visit_block(view_cache *cache, const view *v, const view_block *b, closure_fn visit,
                               void *context, ckd_error *err);

/*
 * The same for the blocks that hold the values of a source. Errors: CORRUPT, too, if they do not hold all of them.
 */
ckd_status closure_visit_source(view_cache *cache, const view_source *from, closure_fn visit, void *context,
                                ckd_error *err);

/*
 * Appends the checkpoints whose records a load of root reads, each once, as ckd_ids. Even in its own files it may read
 * records of other checkpoints, which may be deleted by now: compaction packs several checkpoints into a file. Errors:
 * as closure_visit.
 */
ckd_status closure_owners(bytes *ids, view_cache *cache, const view *root, ckd_error *err);
bool id_list_has(const bytes *ids, const ckd_id *id);

/*
 * Proves with closure_visit that the closure is complete. Then removes from m->files every older file without a record
 * of the closure. m->files are those of root's manifest, or more; own files stay. Errors: as closure_visit.
 */
ckd_status closure_prove_files(manifest *m, view_cache *cache, const view *root, ckd_error *err);

/* Reads chunk files in full and compares every stored byte with its checksum, without decoding. */

/*
 * From now on small records are read together, with the gaps and headers in between: for one thread, which reads all
 * records in order. Errors: NOMEM.
 */
ckd_status chunk_read_in_order(const chunk *c, ckd_error *err);
/* Checks one record of c->outer: its header, and its payload, which stays in `payload`. Errors: CORRUPT, IO, NOMEM. */
ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err);

/*
 * Whether all that a load of these values reads is there, and its stored bytes match their checksums. Reads a record
 * once an hour for all saves of the store's handle. For saves that have the values in memory, and so would not notice
 * that nobody else can decode them. false also if memory is short.
 */
bool chain_is_intact(view_cache *cache, const view_source *from, bytes *scratch);
/* Whether the block has a materialized copy that counts (cache->copies_need_chains). Its values are not checked yet. */
bool copy_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch);
/* The same for a record whose content is in memory, as that of a side record of an earlier save. */
bool cached_record_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch);

/* Checkpoints that were read in full before a deletion. Zero-initialise; release with safety_reading_free. */
typedef struct safety_reading {
    ckd_id *checkpoints;
    size_t count, capacity;
    scrubbed_files files;
} safety_reading;
void safety_reading_free(safety_reading *r);
/*
 * Ensures that a policy leaves intact checkpoints behind. For every run that loses a checkpoint, reads the newest that
 * stay (CKD_KEPT_SAFETY) and everything they depend on. Skips files that the catalog says were read within the last
 * `trusted_s` seconds, and those in *done. Adds the rest to *done. Waits up to timeout_ms for the reader lock. Errors:
 * CORRUPT (one of them is damaged), UNSUPPORTED, BUSY, IO, NOMEM.
 */
ckd_status read_safety_set(safety_reading *done, ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                           uint32_t timeout_ms, ckd_error *err);
/* Whether *done has every checkpoint that read_safety_set would read for the plan. */
bool safety_set_is_read(const safety_reading *done, const ckd_prune *plan);

/* ---- copying records unchanged from one chunk file to another ---- */
/*
 * Called for each record of a file in copying order, one checkpoint after the other. Bundles are replaced by their
 * members.
 */
typedef ckd_status (*record_fn)(void *context, const chunk *c, const record *r, ckd_error *err);

/*
 * Skips bundles that cannot be unpacked, as no reader could open their checkpoints. Errors: those of `visit`, IO,
 * NOMEM.
 */
ckd_status chunk_each_record(chunk *c, record_fn visit, void *context, ckd_error *err);

/* State between copied records. Zero-initialise for each source file; the caller frees the payload. */
typedef struct record_copier {
    bytes payload;
    const record *checked; /* the last bundle that was verified */
} record_copier;
/* Appends a record of c. Errors: CORRUPT (its payload or its bundle is damaged), IO, NOSPACE, NOMEM. */
ckd_status record_copy(record_copier *k, chunk_writer *to, const chunk *c, const record *r, ckd_error *err);

/* Equal for records of the same values with the same predictor and coding, in any file. */
uint64_t record_hash(const record *r);

/*
 * Materialized copies: blocks of a run's newest checkpoint stored once more, coded on their own, so that a restart and
 * the next save need not walk their chains. They lie in data/k, named by the checkpoint, and are written without
 * syncing. They are removed when the run's next checkpoint has its own, or when a save needs their space. Nothing
 * depends on them, and any may be missing or damaged. A reader uses a copy only if its content hash is that of the
 * block.
 */

/* STORE/data/k/CHECKPOINT.RANK.ckd. writer: gives its temporary name instead; NULL: the final name. */
pathname path_materialized(const char *store, const ckd_id *checkpoint, uint32_t rank, const ckd_id *writer);

/* Attaches the materialized copies that exist to the view's blocks. Errors: NOMEM. */
ckd_status materialized_attach(view *v, const char *store_path, ckd_error *err);

/*
 * Removes copies of checkpoints that are no longer the newest of their run or not in the catalog, and leftovers of dead
 * writers. Under the publish lock and the store's mutex.
 */
void materialized_evict(ckd_store *store);

/*
 * Removes all copies, also those being written, as nobody depends on them. Needs no lock. Returns whether there were
 * any. Space of copies that a view has open is freed only after views_drop_materialized.
 */
bool materialized_drop_all(const ckd_store *store);

#endif
