/* Shared by all metadata files: the envelope, and fields that several kinds have. codec/FORMAT.md, "Metadata files". */
#ifndef CODEC_METADATA_WIRE_H
#define CODEC_METADATA_WIRE_H

#include "codec/metadata/metadata.h"
#include "codec/common/wire.h"

#define METADATA_MAGIC \
    "\x89"             \
    "CKN\r\n\x1a\n"
#define METADATA_VERSION 1
/* Required features. */
#define METADATA_LOSSY      UINT32_C(1) /* manifest: its fidelity is near or coarse */
#define METADATA_OLDER      UINT32_C(2) /* manifest: it ends with the older files that a load reads */
#define METADATA_TIMES      UINT32_C(1) /* part: it ends with the rank's stage times */
#define METADATA_OPTIONS    UINT32_C(2) /* part: it contains the options passed to the rank */
#define METADATA_CALENDAR   UINT32_C(2) /* policy: it has rules about the newest checkpoint and periods */
#define METADATA_COMPACTION UINT32_C(1) /* policy: it ends with when to compact */

#define METADATA_ENVELOPE_FRONT 40u /* bytes before the payload */
#define METADATA_ENVELOPE_MIN   48u /* with the checksum behind the payload */
#define METADATA_ID_SIZE        16u
#define METADATA_FILE_SIZE      44u /* bytes of a file_ref */
#define METADATA_ROLE_SIZE      28u /* bytes of a role_total */

/* Appends the front of the envelope. Returns the metadata file's offset in the buffer. */
size_t metadata_begin(bytes *to, metadata_kind kind, const ckd_id *store, uint32_t generation,
                      uint32_t features);
/* Fills in payload size and checksum. A metadata file above METADATA_MAX sets `failed`. */
void metadata_end(bytes *to, size_t start);

/* A metadata file being decoded. */
typedef struct metadata_reader {
    reader in; /* the payload */
    ckd_id store;
    uint32_t generation;
    uint32_t features; /* required features; this kind of metadata file knows them all */
    const char *path;
    ckd_error *err;
    ckd_status status; /* the first problem; then `in` has failed, too */
} metadata_reader;

/*
 * Checks the envelope. `store` NULL: any store. After a failure all fields read as zeros, and metadata_close reports
 * it.
 */
metadata_reader metadata_open(metadata_kind kind, const ckd_id *store, const void *data, size_t size,
                              const char *path, ckd_error *err);
/*
 * Ends decoding. Returns CORRUPT if the payload was too short or too long, else the first problem of the envelope or a
 * field. After a failure the `size` bytes of `out` are zero.
 */
ckd_status metadata_close(metadata_reader *n, void *out, size_t size);
/* Records a problem with the field just read, unless there is one already. */
void metadata_fail(metadata_reader *n, ckd_status status, const char *problem);

void metadata_put_ids(bytes *to, const ckd_id *ids, size_t count);
void metadata_put_file(bytes *to, const file_ref *f);
void metadata_put_files(bytes *to, const file_ref *files, size_t count);

/* Reads an id; zero is invalid. */
ckd_id metadata_take_id(metadata_reader *n);
/* Reads a run name: 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. */
void metadata_take_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* As metadata_take_run, or an empty name. */
void metadata_take_any_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* As metadata_take_run, for a tag. */
void metadata_take_tag(metadata_reader *n, char tag[CKD_RUN_MAX + 1]);
/* Reads a step, at most INT64_MAX, which the catalog can hold. */
uint64_t metadata_take_step(metadata_reader *n);
file_ref metadata_take_file(metadata_reader *n);
/*
 * Arrays preceded by their count. The result is malloc'ed; if empty it is NULL with *count = 0. Memory is bounded by
 * the bytes left in the metadata file.
 */
ckd_id *metadata_take_ids(metadata_reader *n, size_t *count);
file_ref *metadata_take_files(metadata_reader *n, size_t *count);
/*
 * Reads an array's count and returns zeroed memory for elements of `size`. Each element takes `each` bytes in the
 * metadata file.
 */
void *metadata_take_array(metadata_reader *n, size_t *count, size_t each, size_t size);
/* Fails if a kind that is not published by generation has one. */
void metadata_check_no_generation(metadata_reader *n);
/* Checks that rank < world; so world is at least 1. */
void metadata_check_rank(metadata_reader *n, uint32_t rank, uint32_t world);

#endif
