/* The interface of codec/chunk/ for other rooms. README.md has an overview. */
#ifndef CODEC_CHUNK_CHUNK_H
#define CODEC_CHUNK_CHUNK_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"

/*
 * Records: the self-describing unit of a chunk file. A record describes its payload completely. So it can be found
 * without an index, checked on its own, and moved by compaction. codec/FORMAT.md, "Records", is normative.
 */

/*
 * Stored in files: numbers are stable, new ones are appended. Unknown kinds are kept, named in errors, and never
 * deleted.
 */
typedef enum record_kind {
    RECORD_BLOCK = 1,    /* values of a span of one shard */
    RECORD_SIDE = 2,     /* data that several blocks need to be decoded (tables, statistics, factors) */
    RECORD_GROUP = 3,    /* optimizer kind and hyper-parameters of a group of tensors */
    RECORD_BLOB = 4,     /* named bytes */
    RECORD_BUNDLE = 5,   /* records with small payloads (chunk files only; readers see its members) */
    RECORD_MEASURES = 6, /* how far a lossy checkpoint's values are from the originals */
    /* like a block, but not of a listed tensor: values that a block of its checkpoint builds on */
    RECORD_LINK = 7
} record_kind;

typedef enum predictor {
    PREDICT_NONE = 0,   /* the payload holds the values */
    PREDICT_PARENT = 1, /* the payload holds bit differences from the first dependency's values */
    PREDICT_COPY = 2,   /* no payload: the values equal the first dependency's */
    PREDICT_CAST = 3,   /* no payload: the first dependency's values rounded to this dtype */
    /* the payload holds differences from a predicted optimizer step (codec/metadata/metadata.h) */
    PREDICT_STEP = 4
} predictor;

typedef enum dependency_kind {
    DEPENDS_VALUES = 1, /* values of a tensor over a region, in this or another checkpoint */
    DEPENDS_SIDE = 2,
    DEPENDS_GROUP = 3,
    DEPENDS_LINK = 4 /* values of a link in the same checkpoint, over the same span */
} dependency_kind;

/* A dependency is named by content, never by file and offset, since compaction moves records. */
typedef struct dependency {
    uint32_t kind; /* dependency_kind or unknown */
    ckd_id checkpoint;
    const char *tensor; /* NUL-terminated; "" means the record's own name (decoders return "" for it) */
    bool same_span;     /* the span equals the record's; otherwise region, first and count apply */
    /*
     * region of a tensor with the record's ndim; a tensor of another ndim is named by WHOLE or FLAT. NULL if same_span
     */
    const ckd_region *region;
    uint64_t first, count;
    hash128 content;
} dependency;

/* Fields shared by all records of one tensor (in one checkpoint). */
typedef struct record_tensor {
    const char *name;
    ckd_id checkpoint;
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
} record_tensor;

/*
 * A block holds elements first ... first + count - 1 of its shard's region, in row-major order. The chain_* fields are
 * hints for planning, not needed to decode: the cost of loading this block with all its dependencies.
 */
typedef struct record {
    uint32_t kind;      /* record_kind or unknown */
    uint32_t coding;    /* codec/entropy/entropy.h or unknown */
    uint32_t predictor; /* predictor or unknown */
    const record_tensor *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint64_t raw_size, stored_size; /* bytes of the values, bytes of the payload */
    uint64_t checksum;              /* hash64 of the payload; 0: unused, the payload is in memory */
    /* content hash of the values; for side, group and blob records, of the raw bytes */
    hash128 content;
    uint32_t depth;        /* most deltas to apply */
    uint64_t chain_stored; /* payload bytes to read, including this block's own */
    uint64_t chain_work;   /* estimated nanoseconds to decode, including this block's own */
    uint64_t base_stored;  /* estimated payload bytes if coded standalone */
    const dependency *dependencies;
    uint32_t dependency_count;
    /* location; set by the chunk reader and writer, not part of the header */
    const struct record *bundle; /* the bundle that holds it; NULL: stored directly in the file */
    uint64_t offset;             /* of its header in the file; for a bundled record, the bundle's */
    /* bytes of its header; for a bundled record, its share of the bundle's bytes besides payloads */
    uint32_t header_size;
    uint64_t payload_offset; /* offset of its payload in the file */
} record;

#define RECORD_MAGIC            UINT32_C(0x52444b43) /* "CKDR" */
#define RECORD_HEADER_MIN       74u                  /* bytes of the smallest possible header */
#define RECORD_HEADER_MAX       (1u << 20)
#define RECORD_MAX_DEPENDENCIES 1024
#define RECORD_SIDE_MAX         (UINT64_C(1) << 26) /* raw bytes: of a side record, a group, a blob */
#define RECORD_GROUP_MAX        (UINT64_C(1) << 20)
#define RECORD_BLOB_MAX         (UINT64_C(1) << 30)
#define RECORD_BUNDLE_MAX       (UINT64_C(1) << 24)
#define RECORD_MEASURES_MAX     (UINT64_C(1) << 24)

/*
 * Is it a lossy block whose row part is in a side record, next to the one with its column part? These two are its last
 * dependencies.
 */
static inline bool record_shares_rows(const record *r) {
    uint32_t n = r->dependency_count;
    return (r->kind == RECORD_BLOCK || r->kind == RECORD_LINK) && n >= 2 &&
           r->dependencies[n - 1].kind == DEPENDS_SIDE && r->dependencies[n - 2].kind == DEPENDS_SIDE;
}

/*
 * Checks a record's fields. Returns NULL, or a sentence and a status: CORRUPT, or UNSUPPORTED for a block's dtype, role
 * or region kind unknown to this build. Decoding and chunk_writer_append call it.
 */
const char *record_problem(const record *r, ckd_status *status);

/* Appends the record header with its checksum. The record must have no problem (record_problem). */
void record_encode(bytes *to, const record *r);

/* Owns the memory that decoded records point to. Zero-initialise; freed as a whole. */
typedef struct record_arena {
    void **slabs;
    size_t count, capacity;
    size_t used, size; /* of the newest slab */
} record_arena;
void *arena_alloc(record_arena *a, size_t size); /* aligned to 16, zeroed; NULL if out of memory */
/* Empties the arena for reuse. Keeps the newest slab: up to 1 MiB it is as large as all earlier ones together. */
void arena_clear(record_arena *a);
void arena_free(record_arena *a);

/* The place of a record: its file, and its offset in it. The path only serves error messages. */
typedef struct record_place {
    const char *path;
    uint64_t offset;
} record_place;

/*
 * Decodes one header from the cursor and validates it: lengths, counts, caps, dtype against sizes, region inside shape,
 * span inside region, raw size = count x dtype size (blocks), header checksum. Shares tensor and region with `previous`
 * (may be NULL) if equal. Accepts an unknown kind, coding, predictor or dependency kind: the block's decoder reports
 * it. place: that of the cursor's next byte. Encoding the result gives the same bytes. On failure the cursor's position
 * is undefined. Errors: CORRUPT, UNSUPPORTED (a dtype, role or region kind), NOMEM.
 */
ckd_status record_decode(record *out, reader *from, record_arena *arena, const record *previous,
                         const record_place *place, ckd_error *err);

/*
 * Computes the elements of a region of a tensor. Gives 0 and returns false if the region is not inside the shape, or on
 * overflow. A tensor has at most CKD_MAX_ELEMENTS elements, not counting dimensions of size 0.
 */
bool region_elements(uint64_t *out, const ckd_region *region, uint32_t ndim, const uint64_t *shape);

/*
 * Chunk files: header, records, index, footer. Immutable once written. codec/FORMAT.md, "Chunk files", is normative.
 * The index holds all record headers with their offsets, compressed. The footer's root hash covers the index; the
 * checksums and content hashes in the index cover everything else.
 */

typedef struct chunk_identity {
    ckd_id store, file, writer;
} chunk_identity;

/* ---- writing: by one thread ---- */
typedef struct chunk_writer chunk_writer;
/* Allocates scratch memory of a writer, which the next writer can reuse. NULL: out of memory. */
typedef struct chunk_scratch chunk_scratch;
chunk_scratch *chunk_scratch_create(void);
void chunk_scratch_free(chunk_scratch *scratch); /* accepts NULL */
/* Creates `path` (which must not exist) and writes the file header. Errors: EXISTS, NOSPACE, READ_ONLY, IO, NOMEM. */
ckd_status chunk_writer_create(chunk_writer **out, const char *path, const chunk_identity *identity,
                               ckd_error *err);
/*
 * As chunk_writer_create, with the memory of `scratch`, which this writer uses until it ends. scratch NULL: the writer
 * allocates its own.
 */
ckd_status chunk_writer_create_in(chunk_writer **out, const char *path, const chunk_identity *identity,
                                  chunk_scratch *scratch, ckd_error *err);
/*
 * Bundles small records (payloads up to 4 KiB) from now on. Up to 1 MiB of payloads waits in memory until the next
 * bundle is full or the file ends. So an error may show later than at the append of its record.
 */
void chunk_writer_gather(chunk_writer *w);
/*
 * As chunk_writer_gather, but for payloads up to 512 bytes, and only from the 65th such record on. A file with few of
 * them gets no bundles, and a damaged bundle costs no large record.
 */
void chunk_writer_gather_many(chunk_writer *w);
/*
 * Appends a record and its payload of r->stored_size bytes. Sets r->checksum and, unless the record is gathered,
 * r->offset, r->header_size and r->payload_offset. The caller may free what r points to afterwards. After a failure
 * every further call except abort fails with the same status. Errors: INVALID (record_problem, above the format's
 * limits, a bundle), NOSPACE, IO, NOMEM.
 */
ckd_status chunk_writer_append(chunk_writer *w, record *r, const void *payload, ckd_error *err);
/*
 * Returns the shard keys written so far: chunk_shard_key for each block with first = 0, in order. Valid until the next
 * append.
 */
const uint64_t *chunk_writer_shards(const chunk_writer *w, size_t *count);
/* Returns a hash that identifies a shard within a checkpoint. On NOMEM scratch->failed is set. */
uint64_t chunk_shard_key(bytes *scratch, const char *tensor, const ckd_region *region, uint32_t ndim);
uint64_t chunk_writer_size(const chunk_writer *w); /* approximate while records are gathered */
/*
 * Writes index and footer, makes the file durable and closes it. Frees the writer, also on failure; then the file is
 * removed. The name becomes durable when the caller syncs its directory.
 */
ckd_status chunk_writer_finish_durable(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err);
/* As chunk_writer_finish_durable, without making the file durable: for copies that nothing depends on. */
ckd_status chunk_writer_close(chunk_writer *w, uint64_t *size, ckd_error *err);
void chunk_writer_abort(chunk_writer *w); /* removes the file; accepts NULL */

/* ---- reading: several threads may call everything but open, part and close ---- */

/* The records of one checkpoint in a file, or of all, in the writer's order. Bundles are replaced by their members. */
typedef struct chunk_records {
    const record *records;
    size_t count;
} chunk_records;

typedef struct chunk {
    file_reader *file;
    chunk_identity identity;
    hash128 root;
    uint64_t size;
    /* bytes of the index; with index_raw, callers divide its size among the records */
    uint64_t index_offset, index_stored, index_raw;
    const record *records; /* with chunk_open: the records of all checkpoints; else NULL */
    size_t record_count;
    /* records stored directly in the file, in file order: includes bundles, excludes their members */
    const record *outer;
    size_t outer_count;
    struct chunk_unpacked *parts; /* parts that were requested */
    bool has_shared_rows;         /* the header says that blocks may share rows */
    record_arena arena;
    size_t more_holders; /* references beyond the opener's */
} chunk;
/*
 * Opens a file and checks header, footer and index: every checksum, and that offsets are sorted, disjoint and inside
 * the file. Errors: NOT_FOUND, CORRUPT, UNSUPPORTED (version or feature bits), IO, NOMEM.
 */
ckd_status chunk_open(chunk **out, const char *path, ckd_error *err);
/*
 * As chunk_open, without unpacking bundles. Damage inside them stays unseen, c->records is NULL, and records come from
 * chunk_records_of. For files with many checkpoints of which few are needed.
 */
ckd_status chunk_open_bundled(chunk **out, const char *path, ckd_error *err);
/*
 * Returns the file's records of one checkpoint (NULL: all); there may be none. Unpacks that checkpoint's bundles, once.
 * *out belongs to the chunk and lives as long. Only one thread may call it at a time; others may keep using earlier
 * results. Errors: CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status chunk_records_of(const chunk_records **out, chunk *c, const ckd_id *checkpoint, ckd_error *err);
/*
 * Drops one reference; the last one closes the file. Accepts NULL. With chunk_retain, the callers serialise hold and
 * close.
 */
void chunk_close(chunk *c);
chunk *chunk_retain(chunk *c);
/*
 * Reads a payload (stored_size bytes) and checks its checksum. r is a record of the chunk, or a copy of one. For a
 * bundled record the checksum was computed when the bundle was unpacked. So it only reveals later changes; the content
 * hash reveals earlier damage. It is 0 if the file is so small that it was read whole on opening.
 */
ckd_status chunk_read_payload(const chunk *c, const record *r, void *to, ckd_error *err);
/* Checks a payload that was read some other way. CORRUPT if it does not match the record's checksum. */
ckd_status chunk_check_payload(const chunk *c, const record *r, const void *payload, ckd_error *err);
/*
 * Checks that the header in front of the payload equals the index's copy, and that the gap before the record is zero. r
 * must point into c->outer. Loads do not need this; verify does. chunk_open_bundled, plus this and chunk_read_payload
 * on all of c->outer, covers every byte of the file.
 */
ckd_status chunk_check_record(const chunk *c, const record *r, ckd_error *err);

#define CHUNK_FILE_HEADER 88u /* bytes of a chunk file before its records */
/*
 * Makes the file header for a copy in another store. Only the store's id and the checksum change; everything behind the
 * header stays the same, byte for byte. Errors: those of file_read_at.
 */
ckd_status chunk_header_in_store(uint8_t to[CHUNK_FILE_HEADER], const chunk *c, const ckd_id *store,
                                 ckd_error *err);

/* Returns the index in c->outer of the record, or of the bundle that holds it. */
size_t chunk_record_number(const chunk *c, const record *r);

/*
 * Measures: how far the values of a lossy checkpoint are from the values passed to the save. One entry per region of a
 * tensor, in a record of kind 6. They are informative; no decoder uses them. codec/FORMAT.md, "Measures", is normative.
 */

/* Measures of one region. NaN: unknown; none is negative. Stored to three digits (2^-8); the maximum is rounded up. */
typedef struct measures {
    double error_squares, value_squares; /* sums over the region's elements, without non-finite ones */
    double max_error;
    double direction_change; /* relative L2 change of the Adam direction m / (sqrt(v) + eps) */
    double movement;         /* rms of the change since the parent, as estimated by the encoder */
    /* largest |m| / (sqrt(v) + eps): of the original values, and of the stored ones */
    double update_given, update;
    uint64_t nonfinite; /* number of NaNs and infinities, all stored exactly */
} measures;

#define MEASURES_ENTRIES (1u << 20) /* per record */

typedef struct measures_entry {
    /* index among the file's shards of this checkpoint: its block records with first = 0, in order */
    uint64_t shard;
    measures measures;
} measures_entry;

/* Appends the raw bytes of a record. The entries ascend by shard; there is at least one, at most MEASURES_ENTRIES. */
void measures_encode(bytes *to, const measures_entry *entries, size_t count);
/* Decodes the entries. *entries is malloc'ed. place: the record's. Errors: CORRUPT, NOMEM. */
ckd_status measures_decode(measures_entry **entries, size_t *count, const void *raw, size_t size,
                           const record_place *place, ckd_error *err);

/*
 * Writes the record, at most one per checkpoint and file, after its blocks. Writes nothing if there are no entries.
 * Errors: those of chunk_writer_append.
 */
ckd_status measures_write(chunk_writer *w, const ckd_id *checkpoint, const measures_entry *entries,
                          size_t count, ckd_error *err);
/*
 * Reads and decodes record r of the file, and checks all hashes. Errors: CORRUPT, UNSUPPORTED (its coding), IO, NOMEM.
 */
ckd_status measures_read(measures_entry **entries, size_t *count, const chunk *c, const record *r,
                         ckd_error *err);

#endif
