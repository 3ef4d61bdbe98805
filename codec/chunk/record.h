/*
 * Records: the self-describing unit of a chunk file. codec/FORMAT.md, "Records", is normative.
 * A record says everything about its payload, so that it can be found without an index, checked on its own, and moved by compaction.
 */
#ifndef CODEC_RECORD_H
#define CODEC_RECORD_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"

/* Stored in files: stable, appended only. Unknown ones are kept, named in errors, and never deleted. */
typedef enum record_kind {
    RECORD_BLOCK = 1,    /* values of a span of one shard */
    RECORD_SIDE = 2,     /* what several blocks need to be decoded (tables, statistics, factors) */
    RECORD_GROUP = 3,    /* optimizer kind and hyper-parameters of a group of tensors */
    RECORD_BLOB = 4,     /* named bytes */
    RECORD_BUNDLE = 5,   /* records with small payloads (chunk files only: a reader sees what is in it) */
    RECORD_MEASURES = 6, /* how far a lossy checkpoint's values are from what was to be saved (measures.h) */
    RECORD_LINK =
        7 /* like a block, but of no tensor that is listed: values that a block of its checkpoint builds on */
} record_kind;

typedef enum predictor {
    PREDICT_NONE = 0,   /* the payload holds the values */
    PREDICT_PARENT = 1, /* the payload holds differences to the bits of the first dependency's values */
    PREDICT_COPY = 2,   /* no payload: the values are the first dependency's */
    PREDICT_CAST = 3,   /* no payload: the first dependency's values, rounded to this dtype */
    PREDICT_STEP =
        4 /* the payload holds differences to what an optimizer step is expected to give (codec/metadata/group.h) */
} predictor;

typedef enum dependency_kind {
    DEPENDS_VALUES = 1, /* a tensor's values over a region, in this or another checkpoint */
    DEPENDS_SIDE = 2,
    DEPENDS_GROUP = 3,
    DEPENDS_LINK = 4 /* the values of a link of the same checkpoint, over the same span */
} dependency_kind;

/* Named by content, never by file and offset: compaction moves records. */
typedef struct dependency {
    uint32_t kind; /* dependency_kind or unknown */
    ckd_id checkpoint;
    const char
        *tensor;    /* NUL-terminated; "" means the record's own name (and is what a decoder gives for it) */
    bool same_span; /* the span is the record's own; else region, first, count are given */
    ckd_region region; /* of a tensor with the record's ndim: one of another ndim is named by WHOLE or FLAT */
    uint64_t first, count;
    hash128 content;
} dependency;

/* What all records of one tensor (of one checkpoint) share. */
typedef struct record_tensor {
    const char *name;
    ckd_id checkpoint;
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
} record_tensor;

/*
 * A block holds elements first ... first + count - 1 of its shard's region, in the region's row-major order.
 * The chain_* fields are hints for planning, not needed to decode: what loading this block costs with all it depends on.
 */
typedef struct record {
    uint32_t kind;      /* record_kind or unknown */
    uint32_t coding;    /* codec/entropy/codings.h or unknown */
    uint32_t predictor; /* predictor or unknown */
    const record_tensor *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint64_t raw_size, stored_size; /* bytes of the values and of the payload */
    uint64_t checksum;     /* hash64 of the payload; 0: of no use, the payload is in memory (chunk.h) */
    hash128 content;       /* content hash of the values; of the raw bytes for side, group and blob */
    uint32_t depth;        /* deltas to apply at most */
    uint64_t chain_stored; /* payload bytes to read, own ones included */
    uint64_t chain_work;   /* estimated nanoseconds to decode, own included */
    uint64_t base_stored;  /* estimated payload bytes if it were coded on its own */
    const dependency *dependencies;
    uint32_t dependency_count;
    /* where it stands; set by the chunk reader and writer, not part of the header */
    const struct record *bundle; /* the record that holds it; NULL: it stands in the file by itself */
    uint64_t offset;             /* of its header in the file; in a bundle: of the bundle's */
    uint32_t header_size; /* of its header; in a bundle: its share of what the bundle has besides payloads */
    uint64_t payload_offset; /* of its payload in the file */
} record;

#define RECORD_MAGIC            UINT32_C(0x52444b43) /* "CKDR" */
#define RECORD_HEADER_MIN       74u                  /* bytes of the smallest header there can be */
#define RECORD_HEADER_MAX       (1u << 20)
#define RECORD_MAX_DEPENDENCIES 1024
#define RECORD_SIDE_MAX         (UINT64_C(1) << 26) /* raw bytes of a side record, of a group, of a blob */
#define RECORD_GROUP_MAX        (UINT64_C(1) << 20)
#define RECORD_BLOB_MAX         (UINT64_C(1) << 30)
#define RECORD_BUNDLE_MAX       (UINT64_C(1) << 24)
#define RECORD_MEASURES_MAX     (UINT64_C(1) << 24)

/* A lossy block whose rows' part is in a side record, next to that with its columns' part: its last two dependencies. */
static inline bool record_shares_rows(const record *r) {
    uint32_t n = r->dependency_count;
    return (r->kind == RECORD_BLOCK || r->kind == RECORD_LINK) && n >= 2 &&
           r->dependencies[n - 1].kind == DEPENDS_SIDE && r->dependencies[n - 2].kind == DEPENDS_SIDE;
}

/*
 * What is wrong with a record's fields: NULL, or a sentence and the status (CORRUPT, or UNSUPPORTED for a dtype, role or
 * region kind of a block that this build does not know). Decoding checks it; chunk_writer_append too.
 */
const char *record_problem(const record *r, ckd_status *status);

/* Appends the record header, its own checksum included. The record must have no problem. */
void record_encode(bytes *to, const record *r);

/* Owns what decoded records point to. Zero-initialise; freed as a whole. */
typedef struct record_arena {
    void **pieces;
    size_t count, capacity;
    size_t used, room; /* of the last piece */
} record_arena;
void *arena_alloc(record_arena *a, size_t size); /* aligned to 16, zeroed; NULL when out of memory */
/* Nothing of it is needed any more. Its last piece, up to 1 MiB as large as all before it, stays for what comes. */
void arena_clear(record_arena *a);
void arena_free(record_arena *a);

/*
 * Decodes one header from the cursor. Validates lengths, counts, caps, dtype against sizes, region inside shape, span
 * inside region, raw size = count x dtype size (blocks), and the header checksum. Shares tensor and region with
 * `previous` (may be NULL) where equal. Unknown kind, coding, predictor or dependency kind are accepted here: the decoder of the block
 * names them. path and base_offset (where in the file the cursor's next byte belongs) only serve error messages.
 * Encoding what was decoded gives the same bytes. On failure the cursor's place is undefined.
 * Errors: CORRUPT, UNSUPPORTED (a dtype, role or region kind), NOMEM.
 */
ckd_status record_decode(record *out, reader *from, record_arena *arena, const record *previous,
                         const char *path, uint64_t base_offset, ckd_error *err);

/*
 * Elements of a region of a tensor; 0 and false if the region does not lie inside the shape, or on overflow. A tensor
 * has at most CKD_MAX_ELEMENTS elements, dimensions of size 0 not counted.
 */
bool region_elements(uint64_t *out, const ckd_region *region, uint32_t ndim, const uint64_t *shape);

#endif
