/* Shared by the chunk writer and the chunk reader: file header and footer. codec/FORMAT.md, "Chunk files". */
#ifndef CODEC_CHUNK_WIRE_H
#define CODEC_CHUNK_WIRE_H

#include "codec/chunk/chunk.h"
#include "codec/common/common.h"

#define CHUNK_MAGIC \
    "\x89"          \
    "CKD\r\n\x1a\n" /* reveals damage by text mode or a seven-bit channel */
#define CHUNK_VERSION_MAJOR 1
#define CHUNK_VERSION_MINOR 0
#define CHUNK_BUNDLES       UINT64_C(1) /* required feature: records may be in bundles */
#define CHUNK_ROW_SIDES     UINT64_C(2) /* required feature: blocks may have rows in side records */
#define CHUNK_FEATURES      (CHUNK_BUNDLES | CHUNK_ROW_SIDES)
#define CHUNK_HEADER_SIZE   CHUNK_FILE_HEADER
#define CHUNK_HEADER_STORE  32u /* offset of the store's id in the header */
#define CHUNK_FOOTER_SIZE   72u
#define CHUNK_FOOTER_MAGIC  UINT32_C(0x46444b43) /* "CKDF" */
#define CHUNK_INDEX_MAX     (UINT64_C(1) << 31)  /* bytes of the raw index */
#define CHUNK_GAP_MAX       65535u               /* zero bytes before a record */

typedef enum index_coding { INDEX_RAW = 0, INDEX_ZSTD = 1 } index_coding;

typedef struct chunk_footer {
    uint64_t index_offset, index_stored, index_raw;
    uint64_t record_count;
    hash128 root;        /* hash128_of the raw index */
    uint64_t index_hash; /* hash64 of the stored index */
    uint32_t index_coding;
} chunk_footer;

/* ---- writing: small records that writer.c holds back for a bundle ---- */

typedef struct chunk_gathered {
    bytes headers;    /* encoded as in the file */
    bytes payloads;   /* payloads back to back */
    uint64_t *before; /* per record: unbundled records passed to the writer before it */
    size_t count, capacity;
    ckd_id checkpoint;    /* all records belong to it */
    bytes members, heads; /* scratch for encoding the bundle */
    record_arena arena;
} chunk_gathered;

/* Returns true if the record is small enough to gather. */
bool gather_takes(const record *r, size_t header_size);
/* Errors: NOMEM. */
ckd_status gather_add(chunk_gathered *g, const record *r, const bytes *header, const void *payload,
                      uint64_t before, ckd_error *err);
/* Returns true if the record can join the bundle being gathered. */
bool gather_fits(const chunk_gathered *g, const record *r);
/* Makes the bundle of all gathered records: its payload, and its record, which points to *tensor. Errors: NOMEM. */
ckd_status gather_bundle(record *bundle, record_tensor *tensor, bytes *payload, chunk_gathered *g,
                         ckd_error *err);
void gather_clear(chunk_gathered *g);
void gather_free(chunk_gathered *g);

/* ---- reading ---- */

/* The records of a checkpoint, in the list of their chunk. */
typedef struct chunk_unpacked {
    chunk_records part;
    ckd_id checkpoint; /* zero: all checkpoints */
    struct chunk_unpacked *next;
} chunk_unpacked;
/* Frees all parts when the chunk closes. */
void chunk_records_free(chunk *c);

/* Returns CORRUPT if the record shares rows although the file header says that none does. */
ckd_status chunk_check_rows(const chunk *c, const record *r, ckd_error *err);

#endif
