/*
 * Records: the self-describing unit of a chunk file. A record describes its payload completely. So it can be found
 * without an index, checked on its own, and moved by compaction. codec/FORMAT.md, "Records", is normative.
 */
#ifndef CODEC_RECORD_H
#define CODEC_RECORD_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

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
    RECORD_MEASURES = 6, /* how far a lossy checkpoint's values are from the originals (measures.h) */
    /* like a block, but not of a listed tensor: values that a block of its checkpoint builds on */
    RECORD_LINK = 7
} record_kind;

typedef enum predictor {
    PREDICT_NONE = 0,   /* the payload holds the values */
    PREDICT_PARENT = 1, /* the payload holds bit differences from the first dependency's values */
    PREDICT_COPY = 2,   /* no payload: the values equal the first dependency's */
    PREDICT_CAST = 3,   /* no payload: the first dependency's values rounded to this dtype */
    /* the payload holds differences from a predicted optimizer step (codec/metadata/group.h) */
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
    /* region of a tensor with the record's ndim; a tensor of another ndim is named by WHOLE or FLAT */
    ckd_region region;
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
    uint32_t coding;    /* codec/entropy/codings.h or unknown */
    uint32_t predictor; /* predictor or unknown */
    const record_tensor *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint64_t raw_size, stored_size; /* bytes of the values, bytes of the payload */
    uint64_t checksum;              /* hash64 of the payload; 0: unused, the payload is in memory (chunk.h) */
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
    void **pieces;
    size_t count, capacity;
    size_t used, size; /* of the newest piece */
} record_arena;
void *arena_alloc(record_arena *a, size_t size); /* aligned to 16, zeroed; NULL if out of memory */
/* Empties the arena for reuse. Keeps the newest piece: up to 1 MiB it is as large as all earlier ones together. */
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

#endif
