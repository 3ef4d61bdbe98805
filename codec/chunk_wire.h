/* What the chunk writer and the chunk reader share: file header and footer. codec/FORMAT.md, "Chunk files". */
#ifndef CODEC_CHUNK_WIRE_H
#define CODEC_CHUNK_WIRE_H

#include "codec/chunk.h"
#include "codec/wire.h"

#define CHUNK_MAGIC \
    "\x89"          \
    "CKD\r\n\x1a\n" /* survives neither text mode nor a seven-bit channel unnoticed */
#define CHUNK_VERSION_MAJOR 1
#define CHUNK_VERSION_MINOR 0
#define CHUNK_FEATURES      UINT64_C(0) /* required feature bits that this version knows */
#define CHUNK_HEADER_SIZE   88u
#define CHUNK_FOOTER_SIZE   72u
#define CHUNK_FOOTER_MAGIC  UINT32_C(0x46444b43) /* "CKDF" */
#define CHUNK_INDEX_MAX     (UINT64_C(1) << 31)  /* bytes of the raw index */
#define CHUNK_GAP_MAX       65535u               /* zero bytes in front of a record */

typedef enum index_coding { INDEX_RAW = 0, INDEX_ZSTD = 1 } index_coding;

typedef struct chunk_footer {
    uint64_t index_offset, index_stored, index_raw;
    uint64_t record_count;
    hash128 root;        /* hash128_of the raw index */
    uint64_t index_hash; /* hash64 of the stored index */
    uint32_t index_coding;
} chunk_footer;

#endif
