/* The interface of codec/chunk/ for other rooms. README.md has an overview. */
#ifndef CODEC_CHUNK_CHUNK_H
#define CODEC_CHUNK_CHUNK_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"

/*
 * Records: the units of a chunk file. A record describes its payload completely, so it can be found without an index,
 * checked on its own, and moved by compaction. codec/FORMAT.md, "Records", is normative.
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
    RECORD_BUNDLE = 5,   /* records with small payloads (in chunk files only; readers see the members) */
    RECORD_MEASURES = 6, /* errors of the values of a lossy checkpoint */
    /* like a block, but of no listed tensor: values that a block of its checkpoint builds on */
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

/* A dependency is named by content, never by file and offset, because compaction moves records. */
typedef struct dependency {
    uint32_t kind; /* dependency_kind or unknown */
    ckd_id checkpoint;
    const char *tensor; /* NUL-terminated; "": the name of the record itself, which decoders give as "" */
    bool same_span;     /* the span is that of the record; otherwise region, first and count apply */
    /* a region of a tensor with the record's ndim, or WHOLE or FLAT of one with another ndim; NULL if same_span */
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
 * A block holds elements first ... first + count - 1 of the region of its shard, in row-major order. The chain_* fields
 * give the cost of loading it with all its dependencies. They are hints for planning, not needed to decode.
 */
typedef struct record {
    uint32_t kind;      /* record_kind or unknown */
    uint32_t coding;    /* codec/entropy/entropy.h or unknown */
    uint32_t predictor; /* predictor or unknown */
    const record_tensor *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint64_t raw_size, stored_size; /* bytes of the values; of the payload */
    uint64_t checksum;              /* hash64 of the payload; 0: unused, since the payload is in memory */
    /* content hash of the values, or of the raw bytes of side, group and blob records */
    hash128 content;
    uint32_t depth;        /* largest number of deltas to apply */
    uint64_t chain_stored; /* payload bytes to read, including this block's own */
    uint64_t chain_work;   /* estimated nanoseconds to decode, including this block's own */
    uint64_t base_stored;  /* estimated payload bytes if coded standalone */
    const dependency *dependencies;
    uint32_t dependency_count;
    /* location: set by the chunk reader and writer, not part of the header */
    const struct record *bundle; /* the bundle that holds it; NULL: stored directly in the file */
    uint64_t offset;             /* offset of its header in the file; for a bundled record, of the bundle */
    /* bytes of its header; for a bundled record, its share of the bundle without payloads */
    uint32_t header_size;
    uint64_t payload_offset; /* offset of its payload in the file */
} record;

#define RECORD_MAGIC            UINT32_C(0x52444b43) /* "CKDR" */
#define RECORD_HEADER_MIN       74u                  /* bytes of the smallest possible header */
#define RECORD_HEADER_MAX       (1u << 20)
#define RECORD_MAX_DEPENDENCIES 1024
#define RECORD_SIDE_MAX         (UINT64_C(1) << 26) /* raw bytes of a record, by kind */
#define RECORD_GROUP_MAX        (UINT64_C(1) << 20)
#define RECORD_BLOB_MAX         (UINT64_C(1) << 30)
#define RECORD_BUNDLE_MAX       (UINT64_C(1) << 24)
#define RECORD_MEASURES_MAX     (UINT64_C(1) << 24)

/* Returns true for a lossy block whose columns and rows are in two side records, which are its last dependencies. */
static inline bool record_shares_rows(const record *r) {
    uint32_t n = r->dependency_count;
    return (r->kind == RECORD_BLOCK || r->kind == RECORD_LINK) && n >= 2 &&
           r->dependencies[n - 1].kind == DEPENDS_SIDE && r->dependencies[n - 2].kind == DEPENDS_SIDE;
}

/*
 * Checks the fields of a record. Returns NULL, or a sentence and a status: CORRUPT, or UNSUPPORTED for a dtype, role or
 * region kind unknown to this build. Decoding and chunk_writer_append call it.
 */
const char *record_problem(const record *r, ckd_status *status);

/* Appends the record header with its checksum. record_problem must accept the record. */
void record_encode(bytes *to, const record *r);

/* Owns the memory that decoded records point to. Zero-initialise. Freed as a whole. */
typedef struct record_arena {
    void **slabs;
    size_t count, capacity;
    size_t used, size; /* of the newest slab */
} record_arena;
void *arena_alloc(record_arena *a, size_t size); /* aligned to 16, zeroed; NULL if out of memory */
/* Empties the arena for reuse. Keeps the newest slab, which up to 1 MiB is as large as all earlier ones together. */
void arena_clear(record_arena *a);
void arena_free(record_arena *a);

/* The file of a record, and its offset there. The path only serves error messages. */
typedef struct record_place {
    const char *path;
    uint64_t offset;
} record_place;

/*
 * Decodes one header from the cursor and validates it: lengths, counts, caps, dtype against sizes, region inside shape,
 * span inside region, raw size = count x dtype size (blocks), header checksum. Shares tensor and region with `previous`
 * (may be NULL) if equal. Accepts an unknown kind, coding, predictor or dependency kind, which the decoder of the block
 * reports. place: of the next byte. Encoding the result gives the same bytes. On failure the position of the cursor is
 * undefined. Errors: CORRUPT, UNSUPPORTED (a dtype, role or region kind), NOMEM.
 */
ckd_status record_decode(record *out, reader *from, record_arena *arena, const record *previous,
                         const record_place *place, ckd_error *err);

/*
 * Counts the elements of a region of a tensor. Gives 0 and returns false if the region is not inside the shape, or on
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
/* Allocates the scratch memory of a writer, which the next writer can reuse. NULL: out of memory. */
typedef struct chunk_scratch chunk_scratch;
chunk_scratch *chunk_scratch_create(void);
void chunk_scratch_free(chunk_scratch *scratch); /* accepts NULL */
/* Creates `path` (which must not exist) and writes the file header. Errors: EXISTS, NOSPACE, READ_ONLY, IO, NOMEM. */
ckd_status chunk_writer_create(chunk_writer **out, const char *path, const chunk_identity *identity,
                               ckd_error *err);
/* As chunk_writer_create, but the writer uses `scratch` until it ends. scratch NULL: it allocates its own. */
ckd_status chunk_writer_create_in(chunk_writer **out, const char *path, const chunk_identity *identity,
                                  chunk_scratch *scratch, ckd_error *err);
/*
 * Bundles small records (payloads up to 4 KiB) from now on. They wait in memory, up to 1 MiB of payloads, until the
 * next bundle is full or the file ends. An error may therefore show later than at the append of its record.
 */
void chunk_writer_gather(chunk_writer *w);
/*
 * As chunk_writer_gather, but only for payloads up to 512 bytes, from the 65th such record on. A file with few of them
 * gets no bundles, and a damaged bundle costs no large record.
 */
void chunk_writer_gather_many(chunk_writer *w);
/*
 * Appends a record and its payload of r->stored_size bytes. Sets r->checksum and, unless the record is gathered,
 * r->offset, r->header_size and r->payload_offset. The caller may free what r points to afterwards. After a failure
 * every further call except chunk_writer_abort fails with the same status. Errors: INVALID (record_problem, a bundle,
 * above the limits of the format), NOSPACE, IO, NOMEM.
 */
ckd_status chunk_writer_append(chunk_writer *w, record *r, const void *payload, ckd_error *err);
/*
 * Returns the shard keys written so far: chunk_shard_key for each block with first = 0, in order. Valid until the next
 * append.
 */
const uint64_t *chunk_writer_shards(const chunk_writer *w, size_t *count);
/* Returns a hash that identifies a shard within a checkpoint. NOMEM sets scratch->failed. */
uint64_t chunk_shard_key(bytes *scratch, const char *tensor, const ckd_region *region, uint32_t ndim);
uint64_t chunk_writer_size(const chunk_writer *w); /* approximate while records are gathered */
/*
 * Writes index and footer, makes the file durable, closes it and frees the writer. On failure it also removes the file.
 * The name becomes durable when the caller syncs the directory.
 */
ckd_status chunk_writer_finish_durable(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err);
/* As chunk_writer_finish_durable, but the file is not durable: for copies that nothing depends on. */
ckd_status chunk_writer_close(chunk_writer *w, uint64_t *size, ckd_error *err);
void chunk_writer_abort(chunk_writer *w); /* removes the file; accepts NULL */

/* ---- reading: several threads may call everything but open, part and close ---- */

/* The records of one checkpoint in a file, or of all, in the order of the appends. Members replace their bundles. */
typedef struct chunk_records {
    const record *records;
    size_t count;
} chunk_records;

typedef struct chunk {
    file_reader *file;
    chunk_identity identity;
    hash128 root;
    uint64_t size;
    /* bytes of the index; callers divide index_raw among the records */
    uint64_t index_offset, index_stored, index_raw;
    const record *records; /* with chunk_open: the records of all checkpoints; else NULL */
    size_t record_count;
    /* records stored directly in the file, in file order: bundles, but not their members */
    const record *outer;
    size_t outer_count;
    struct chunk_unpacked *parts; /* parts that were requested */
    bool has_shared_rows;         /* the file header says that blocks may share rows */
    record_arena arena;
    size_t more_holders; /* references beyond the opener's */
} chunk;
/*
 * Opens a file and checks header, footer and index: all checksums, and that offsets are sorted, disjoint and inside the
 * file. Errors: NOT_FOUND, CORRUPT, UNSUPPORTED (version or feature bits), IO, NOMEM.
 */
ckd_status chunk_open(chunk **out, const char *path, ckd_error *err);
/*
 * As chunk_open, without unpacking bundles. Damage inside them stays unseen, c->records is NULL, and chunk_records_of
 * gives the records. For files with many checkpoints of which only a few are needed.
 */
ckd_status chunk_open_bundled(chunk **out, const char *path, ckd_error *err);
/*
 * Returns the file's records of one checkpoint (NULL: all), possibly none. Unpacks the bundles of that checkpoint once.
 * *out belongs to the chunk and lives as long. Only one thread may call it at a time; others may keep using earlier
 * results. Errors: CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status chunk_records_of(const chunk_records **out, chunk *c, const ckd_id *checkpoint, ckd_error *err);
/*
 * Drops one reference; the last one closes the file. Accepts NULL. Callers that use chunk_retain serialise it with
 * chunk_close.
 */
void chunk_close(chunk *c);
chunk *chunk_retain(chunk *c);
/*
 * Reads a payload (stored_size bytes) and checks its checksum. r is a record of the chunk, or a copy of one. The
 * checksum of a bundled record is computed when its bundle is unpacked. So it only reveals later changes; the content
 * hash reveals earlier damage. It is 0 if the file is small enough to be read whole on opening.
 */
ckd_status chunk_read_payload(const chunk *c, const record *r, void *to, ckd_error *err);
/* Checks a payload that was read in another way. CORRUPT if it does not match the checksum of the record. */
ckd_status chunk_check_payload(const chunk *c, const record *r, const void *payload, ckd_error *err);
/*
 * Checks that the header in front of the payload equals its copy in the index, and that the gap before the record is
 * zero. r must point into c->outer. Loads do not need this, verify does. After chunk_open_bundled, this and
 * chunk_read_payload on all of c->outer cover every byte of the file.
 */
ckd_status chunk_check_record(const chunk *c, const record *r, ckd_error *err);

#define CHUNK_FILE_HEADER 88u /* bytes of a chunk file before its records */
/*
 * Makes the file header for a copy in another store. Only the id of the store and the checksum change; all bytes behind
 * the header stay the same. Errors: those of file_read_at.
 */
ckd_status chunk_header_in_store(uint8_t to[CHUNK_FILE_HEADER], const chunk *c, const ckd_id *store,
                                 ckd_error *err);

/* Returns the index in c->outer of the record, or of the bundle that holds it. */
size_t chunk_record_number(const chunk *c, const record *r);

/*
 * Measures: errors of the values of a lossy checkpoint, compared with the values passed to the save. One entry per
 * region of a tensor, in a record of kind 6. They are informative; no decoder uses them. codec/FORMAT.md, "Measures",
 * is normative.
 */

/*
 * Measures of one region. NaN: unknown; none is negative. Stored with eight significant bits; max_error and update are
 * rounded up.
 */
typedef struct measures {
    double error_squares, value_squares; /* sums over the elements of the region, without non-finite ones */
    double max_error;
    double direction_change; /* relative L2 change of the Adam direction m / (sqrt(v) + eps) */
    double movement;         /* rms of the change since the parent, estimated by the encoder */
    /* largest |m| / (sqrt(v) + eps) of the original values; of the stored ones */
    double update_given, update;
    uint64_t nonfinite; /* number of NaNs and infinities, all stored exactly */
} measures;

#define MEASURES_ENTRIES (1u << 20) /* per record */

typedef struct measures_entry {
    /* index among the file's shards of this checkpoint: its block records with first = 0, in order */
    uint64_t shard;
    measures measures;
} measures_entry;

/* Appends the raw bytes of a record. There are 1 to MEASURES_ENTRIES entries, which ascend by shard. */
void measures_encode(bytes *to, const measures_entry *entries, size_t count);
/* Decodes the entries. *entries is malloc'ed. place: of the record. Errors: CORRUPT, NOMEM. */
ckd_status measures_decode(measures_entry **entries, size_t *count, const void *raw, size_t size,
                           const record_place *place, ckd_error *err);

/*
 * Writes the record, at most one per checkpoint and file, after the blocks. Writes nothing without entries. Errors:
 * those of chunk_writer_append.
 */
ckd_status measures_write(chunk_writer *w, const ckd_id *checkpoint, const measures_entry *entries,
                          size_t count, ckd_error *err);
/*
 * Reads and decodes record r of the file and checks all its hashes. Errors: CORRUPT, UNSUPPORTED (the coding), IO,
 * NOMEM.
 */
ckd_status measures_read(measures_entry **entries, size_t *count, const chunk *c, const record *r,
                         ckd_error *err);

#endif
