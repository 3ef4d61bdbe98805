/*
 * Bundles: records with small payloads in one record, so that what they say about themselves is compressed together. A header,
 * its copy in the index and two checksums take 240 bytes, as much as the payload of a block of which little has changed; in a
 * bundle a record takes about 45, nearly all of them hashes. codec/FORMAT.md, "Bundles", is normative.
 *
 * Private to codec/chunk_*.c: whoever reads a chunk file finds the records of its bundles among the others.
 */
#ifndef CODEC_CHUNK_BUNDLE_H
#define CODEC_CHUNK_BUNDLE_H

#include "codec/chunk/record.h"

#define BUNDLE_FRONT       16u        /* bytes in front of the heads */
#define BUNDLE_RECORDS_MAX 4096u      /* in one bundle */
#define BUNDLE_HEADS_MAX   (1u << 24) /* bytes of heads, before compression */
#define BUNDLE_HASHES_MAX  (1u << 18) /* content hashes in one bundle */

/*
 * What is said of each record of a bundle, one column after the other; those of dependencies are per dependency. Their order
 * is that of the format.
 */
typedef enum bundle_column {
    COLUMN_PLACE, /* records outside of bundles given to the writer since the record before */
    COLUMN_KIND,
    COLUMN_CODING,
    COLUMN_PREDICTOR,
    COLUMN_ROLE,
    COLUMN_DTYPE,
    COLUMN_NDIM,
    COLUMN_SHAPE,
    COLUMN_REGION,
    COLUMN_FIRST,
    COLUMN_LEFT,     /* elements of the region behind the record's last */
    COLUMN_RAW_SIZE, /* not of blocks, whose follows from count and dtype */
    COLUMN_STORED_SIZE,
    COLUMN_DEPTH,
    COLUMN_CHAIN_STORED, /* hints, as bundle_hint has them: less the stored size; the low byte */
    COLUMN_CHAIN_STORED_HIGH,
    COLUMN_CHAIN_WORK,
    COLUMN_CHAIN_WORK_HIGH,
    COLUMN_BASE_STORED, /* less the stored size */
    COLUMN_BASE_STORED_HIGH,
    COLUMN_NAME,
    COLUMN_DEPENDENCIES, /* their number */
    COLUMN_ON_KIND,
    COLUMN_ON_FLAGS,
    COLUMN_ON_CHECKPOINT,
    COLUMN_ON_TENSOR,
    COLUMN_ON_SPAN,
    BUNDLE_COLUMNS
} bundle_column;

/* Hints are for planning: three digits of them are enough. A code's value; codes go up to BUNDLE_HINT_MAX. */
#define BUNDLE_HINT_MAX 14591u
static inline uint64_t bundle_hint(uint32_t code) {
    return code < 512 ? code : (uint64_t)(256 + code % 256) << (code / 256 - 1);
}

/* A record of a bundle, and its place among those outside of bundles: how many of these come before it. */
typedef struct bundle_member {
    record record;
    uint64_t before;
} bundle_member;

/*
 * Appends the payload of a bundle to `to`, which fails if memory ends. heads: scratch. The members belong to one checkpoint, have no problem, and
 * come in ascending order; `payloads` are theirs, one behind the other.
 */
void bundle_encode(bytes *to, const bundle_member *members, size_t count, const bytes *payloads,
                   bytes *heads);

/*
 * Decodes the payload of `bundle`, of bundle->stored_size bytes. The members are malloc'ed; what they point to is the arena's.
 * Their offset is the bundle's, their checksums are left 0. `outside` records outside of bundles stand in front
 * of it in the file. Of checksums only that of front, heads and hashes is compared here: damage behind them shows
 * when the values are decoded. Errors: CORRUPT, UNSUPPORTED (a dtype, role or region kind), NOMEM.
 */
ckd_status bundle_decode(bundle_member **members, size_t *count, const record *bundle, const uint8_t *payload,
                         uint64_t outside, record_arena *arena, const char *path, ckd_error *err);

#endif
