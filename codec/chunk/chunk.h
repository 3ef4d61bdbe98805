/*
 * Chunk files: header, records, index, footer. Immutable once written. codec/FORMAT.md, "Chunk files", is normative.
 * The index holds all record headers with their offsets, compressed. The footer's root hash covers the index; the
 * checksums and content hashes in the index cover everything else.
 */
#ifndef CODEC_CHUNK_H
#define CODEC_CHUNK_H

#include "base/file.h"
#include "codec/chunk/record.h"

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
ckd_status chunk_writer_finish(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err);
/* As chunk_writer_finish, without making the file durable: for copies that nothing depends on. */
ckd_status chunk_writer_close(chunk_writer *w, ckd_error *err);
void chunk_writer_abort(chunk_writer *w); /* removes the file; accepts NULL */

/* ---- reading: several threads may call everything but open, part and close ---- */

/* The records of one checkpoint in a file, or of all, in the writer's order. Bundles are replaced by their members. */
typedef struct chunk_part {
    const record *records;
    size_t count;
} chunk_part;

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
 * chunk_part_of. For files with many checkpoints of which few are needed.
 */
ckd_status chunk_open_outer(chunk **out, const char *path, ckd_error *err);
/*
 * Returns the file's records of one checkpoint (NULL: all); there may be none. Unpacks that checkpoint's bundles, once.
 * *out belongs to the chunk and lives as long. Only one thread may call it at a time; others may keep using earlier
 * results. Errors: CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
ckd_status chunk_part_of(const chunk_part **out, chunk *c, const ckd_id *checkpoint, ckd_error *err);
/*
 * Drops one reference; the last one closes the file. Accepts NULL. With chunk_hold, the callers serialise hold and
 * close.
 */
void chunk_close(chunk *c);
chunk *chunk_hold(chunk *c);
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
 * must point into c->outer. Loads do not need this; verify does. chunk_open_outer, plus this and chunk_read_payload on
 * all of c->outer, covers every byte of the file.
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

#endif
