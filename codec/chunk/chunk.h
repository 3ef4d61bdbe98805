/*
 * Chunk files: header, records, index, footer. Immutable once written. codec/FORMAT.md, "Chunk files", is normative.
 * The index is the sequence of all record headers with their offsets, compressed; the footer's root hash covers it, and
 * through the checksums and content hashes in it everything else.
 */
#ifndef CODEC_CHUNK_H
#define CODEC_CHUNK_H

#include "base/file.h"
#include "codec/chunk/record.h"

typedef struct chunk_identity {
    ckd_id store, file, writer;
} chunk_identity;

/* ---- writing: one thread ---- */
typedef struct chunk_writer chunk_writer;
/* What a writer works with, and the next one can have. NULL: out of memory. */
typedef struct chunk_scratch chunk_scratch;
chunk_scratch *chunk_scratch_create(void);
void chunk_scratch_free(chunk_scratch *scratch); /* accepts NULL */
/* Creates `path` (which must not exist) and writes the file header. Errors: EXISTS, NOSPACE, READ_ONLY, IO, NOMEM. */
ckd_status chunk_writer_create(chunk_writer **out, const char *path, const chunk_identity *identity,
                               ckd_error *err);
/* The same with the memory of `scratch`, which is this writer's until it ends. NULL: the writer allocates its own. */
ckd_status chunk_writer_create_in(chunk_writer **out, const char *path, const chunk_identity *identity,
                                  chunk_scratch *scratch, ckd_error *err);
/*
 * From now on records with small payloads (up to 4 KiB) are gathered, and written together, as bundles. Up to 1 MiB of
 * payloads waits in memory for the next bundle, or for the file's end; so errors may show later than at the record's own append.
 */
void chunk_writer_gather(chunk_writer *w);
/*
 * The same for records with payloads of up to 512 bytes, and only from the 65th of them on. A file that has few of them stays without bundles, and a damaged
 * bundle costs no large record.
 */
void chunk_writer_gather_many(chunk_writer *w);
/*
 * Appends a record and its payload of r->stored_size bytes. Fills r->checksum and, unless it is gathered, r->offset,
 * r->header_size and r->payload_offset. What r points to may be freed afterwards. After a failure every further call but abort fails with the same status.
 * Errors: INVALID (record_problem, above the format's limits, a bundle), NOSPACE, IO, NOMEM.
 */
ckd_status chunk_writer_append(chunk_writer *w, record *r, const void *payload, ckd_error *err);
/*
 * The shards written so far: for each block with first = 0, in order, chunk_shard_key of its tensor's name and its region. Valid until
 * the next append.
 */
const uint64_t *chunk_writer_shards(const chunk_writer *w, size_t *count);
/* A hash that tells the shards of a checkpoint apart. `scratch` is the caller's, and fails if memory ends. */
uint64_t chunk_shard_key(bytes *scratch, const char *tensor, const ckd_region *region, uint32_t ndim);
uint64_t chunk_writer_size(const chunk_writer *w); /* about, as long as records are gathered */
/*
 * Writes index and footer, makes the file durable and closes it. The writer is freed, also on failure (the file is removed then).
 * The name is durable only once its directory has been synced.
 */
ckd_status chunk_writer_finish(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err);
/* The same without making it durable: for copies that nothing depends on. */
ckd_status chunk_writer_close(chunk_writer *w, ckd_error *err);
void chunk_writer_abort(chunk_writer *w); /* removes the file; accepts NULL */

/* ---- reading: all but open, part and close may be called by several threads ---- */

/* What a file holds of one checkpoint, or of all, in the order given to the writer; no bundles. */
typedef struct chunk_part {
    const record *records;
    size_t count;
} chunk_part;

typedef struct chunk {
    file_reader *file;
    chunk_identity identity;
    hash128 root;
    uint64_t size;
    uint64_t index_offset, index_stored,
        index_raw;         /* bytes; for sharing out the index's size among its records */
    const record *records; /* of chunk_open: the part of all checkpoints; else NULL */
    size_t record_count;
    const record
        *outer; /* what stands in the file by itself, in file order: bundles, but not what is in them */
    size_t outer_count;
    struct chunk_unpacked *parts; /* that were asked for */
    bool has_shared_rows;         /* its header says that blocks may share rows */
    record_arena arena;
    size_t more_holders; /* besides who opened it */
} chunk;
/*
 * Opens and checks header, footer and index (every checksum, all offsets sorted, disjoint and inside the file).
 * Errors: NOT_FOUND, CORRUPT, UNSUPPORTED (version or feature bits), IO, NOMEM.
 */
ckd_status chunk_open(chunk **out, const char *path, ckd_error *err);
/*
 * The same without unpacking any bundle: damage inside of them does not show, c->records is NULL, and records come from chunk_part_of. For files that may hold
 * many checkpoints, of which few are wanted.
 */
ckd_status chunk_open_outer(chunk **out, const char *path, ckd_error *err);
/*
 * What the file has of a checkpoint (NULL: of all), which may be nothing: unpacks bundles of that checkpoint only, once. *out is the chunk's, and lives as
 * long. One thread at a time; others may use what they were given before. Errors: CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status chunk_part_of(const chunk_part **out, chunk *c, const ckd_id *checkpoint, ckd_error *err);
void chunk_close(
    chunk *
        c); /* accepts NULL. The last holder's closes it; with chunk_hold, callers see to it that only one of them holds or closes at a time */
chunk *chunk_hold(chunk *c);
/*
 * Reads a payload (stored_size bytes) and checks its checksum; that of a record in a bundle was computed when the bundle was unpacked
 * (or is 0, if the file is so small that it was read whole when it was opened): it tells what changed since, and the content hash what was damaged then. r is a record of the chunk, or a copy of one.
 */
ckd_status chunk_read_payload(const chunk *c, const record *r, void *to, ckd_error *err);
/* Its second half, for a payload that came in another way: CORRUPT if it is not what the record's checksum says. */
ckd_status chunk_check_payload(const chunk *c, const record *r, const void *payload, ckd_error *err);
/*
 * Checks that the header in front of the payload equals the index's copy, and that the bytes between it and the record
 * before are zero. (A load does not need it; verify does.) r must point into c->outer.
 * With chunk_open_outer, this and chunk_read_payload on all of c->outer, every byte of the file has been looked at.
 */
ckd_status chunk_check_record(const chunk *c, const record *r, ckd_error *err);

#define CHUNK_FILE_HEADER 88u /* bytes of a chunk file in front of its records */
/*
 * The file header of a copy in another store: as it is, but for the store's id and the checksum. All that follows stays the same, byte for
 * byte. Errors: those of file_read_at.
 */
ckd_status chunk_header_in_store(uint8_t to[CHUNK_FILE_HEADER], const chunk *c, const ckd_id *store,
                                 ckd_error *err);

/* The number in c->outer of the record, or of the bundle that holds it. */
size_t chunk_record_number(const chunk *c, const record *r);

#endif
