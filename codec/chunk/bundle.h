/*
 * Bundles: many small records stored as one record, so that their headers compress together. A header, its copy in the
 * index and two checksums take 240 bytes, as much as the payload of a block that hardly changed. In a bundle they take
 * about 45 bytes, nearly all of them hashes. codec/FORMAT.md, "Bundles", is normative.
 *
 * Private to codec/chunk/: readers of a chunk file see members like other records.
 */
#ifndef CODEC_CHUNK_BUNDLE_H
#define CODEC_CHUNK_BUNDLE_H

#include "codec/chunk/chunk.h"

#define BUNDLE_FRONT       16u        /* bytes in front of the heads */
#define BUNDLE_RECORDS_MAX 4096u      /* per bundle */
#define BUNDLE_HEADS_MAX   (1u << 24) /* bytes of heads before compression, per bundle */
#define BUNDLE_HASHES_MAX  (1u << 18) /* content hashes per bundle */

/*
 * Columns of the heads of a bundle, stored one after the other. A column has one value per record or per dependency.
 * The order is part of the format.
 */
typedef enum bundle_column {
    COLUMN_PLACE, /* unbundled records passed to the writer since the previous member */
    COLUMN_KIND,
    COLUMN_CODING,
    COLUMN_PREDICTOR,
    COLUMN_ROLE,
    COLUMN_DTYPE,
    COLUMN_NDIM,
    COLUMN_SHAPE,
    COLUMN_REGION,
    COLUMN_FIRST,
    COLUMN_LEFT,     /* elements of the region behind the record's last element */
    COLUMN_RAW_SIZE, /* not for blocks, where count and dtype imply it */
    COLUMN_STORED_SIZE,
    COLUMN_DEPTH,
    COLUMN_CHAIN_STORED, /* hints, coded as in bundle_hint, less the stored size: the low byte */
    COLUMN_CHAIN_STORED_HIGH,
    COLUMN_CHAIN_WORK,
    COLUMN_CHAIN_WORK_HIGH,
    COLUMN_BASE_STORED, /* less the stored size */
    COLUMN_BASE_STORED_HIGH,
    COLUMN_NAME,
    COLUMN_DEPENDENCIES, /* number of dependencies */
    COLUMN_ON_KIND,
    COLUMN_ON_FLAGS,
    COLUMN_ON_CHECKPOINT,
    COLUMN_ON_TENSOR,
    COLUMN_ON_SPAN,
    BUNDLE_COLUMNS
} bundle_column;

/* Decodes a hint code, up to BUNDLE_HINT_MAX. Hints only serve planning, so three digits are enough. */
#define BUNDLE_HINT_MAX 14591u
static inline uint64_t bundle_hint(uint32_t code) {
    return code < 512 ? code : (uint64_t)(256 + code % 256) << (code / 256 - 1);
}

/* A member of a bundle, and its position: the number of unbundled records before it. */
typedef struct bundle_member {
    record record;
    uint64_t before;
} bundle_member;

/* A bundle to decode. */
typedef struct bundle_source {
    const record *bundle;
    const uint8_t *payload; /* bundle->stored_size bytes */
    uint64_t outside;       /* number of unbundled records before the bundle in the file */
    const char *path;       /* for messages */
} bundle_source;

/*
 * Appends the payload of a bundle to `to`; NOMEM sets to->failed. `heads` is scratch. The members belong to one
 * checkpoint, have no record_problem, and ascend by position. `payloads` holds their payloads back to back.
 */
void bundle_encode(bytes *to, const bundle_member *members, size_t count, const bytes *payloads,
                   bytes *heads);

/*
 * Decodes the payload of a bundle. *members is malloc'ed; its pointers belong to the arena. Each member gets the offset
 * of the bundle, and checksum 0. Checks only the checksum of front, heads and hashes; damage in payloads shows when
 * values are decoded. Errors: CORRUPT, UNSUPPORTED (a dtype, role or region kind), NOMEM.
 */
ckd_status bundle_decode(bundle_member **members, size_t *count, const bundle_source *from,
                         record_arena *arena, ckd_error *err);

#endif
