/* What all metadata files share: the envelope, and fields that several kinds have. codec/FORMAT.md, "Metadata files". */
#ifndef CODEC_METADATA_WIRE_H
#define CODEC_METADATA_WIRE_H

#include "codec/metadata/metadata.h"
#include "codec/common/wire.h"

#define METADATA_MAGIC \
    "\x89"             \
    "CKN\r\n\x1a\n"
#define METADATA_VERSION        1
#define METADATA_LOSSY          UINT32_C(1) /* required feature of a manifest: its fidelity is near or coarse */
#define METADATA_OLDER          UINT32_C(2) /* the same: it ends with the older files that a load reads */
#define METADATA_TIMES          UINT32_C(1) /* the same of a part: it ends with when the rank did what */
#define METADATA_OPTIONS        UINT32_C(2) /* the same: it tells the options that the rank was given */
#define METADATA_CALENDAR       UINT32_C(2) /* of a policy: it has rules about the newest checkpoint and periods */
#define METADATA_COMPACTION     UINT32_C(1) /* the same of a policy: it ends with when a compaction follows it */
#define METADATA_ENVELOPE_FRONT 40u         /* bytes in front of the payload */
#define METADATA_ENVELOPE_MIN   48u         /* with the checksum behind it */
#define METADATA_ID_SIZE        16u
#define METADATA_FILE_SIZE      44u /* bytes of a file_ref */
#define METADATA_ROLE_SIZE      28u /* bytes of a role_total */

/* Appends the envelope's front; returns where the metadata file begins in the buffer. */
size_t metadata_begin(bytes *to, metadata_kind kind, const ckd_id *store, uint32_t generation,
                      uint32_t features);
/* Completes payload size and checksum. A metadata file above METADATA_MAX sets `failed`. */
void metadata_end(bytes *to, size_t start);

/* A metadata file being decoded. */
typedef struct metadata_reader {
    reader in; /* the payload */
    ckd_id store;
    uint32_t generation;
    uint32_t features; /* required; all are known for this kind of metadata file */
    const char *path;
    ckd_error *err;
    ckd_status status; /* the first problem; the reader has failed then, too */
} metadata_reader;

/* Checks the envelope. `store` NULL: any. After a failure all fields read as zeros, and metadata_close tells of it. */
void metadata_open(metadata_reader *n, metadata_kind kind, const ckd_id *store, const void *data, size_t size,
                   const char *path, ckd_error *err);
/*
 * Ends decoding. CORRUPT if the payload was too short or too long; else the first problem of the envelope or of a field. After a
 * failure the `size` bytes of `out` are zero.
 */
ckd_status metadata_close(metadata_reader *n, void *out, size_t size);
/* Records a problem with the field just read, unless there was one before. */
void metadata_fail(metadata_reader *n, ckd_status status, const char *problem);

void metadata_put_ids(bytes *to, const ckd_id *ids, size_t count);
void metadata_put_file(bytes *to, const file_ref *f);
void metadata_put_files(bytes *to, const file_ref *files, size_t count);

/* An id that must not be zero. */
ckd_id metadata_take_id(metadata_reader *n);
/* 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. */
void metadata_take_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* The same, or nothing. */
void metadata_take_any_run(metadata_reader *n, char run[CKD_RUN_MAX + 1]);
/* As a run's name, for a tag. */
void metadata_take_tag(metadata_reader *n, char tag[CKD_RUN_MAX + 1]);
/* At most INT64_MAX, which the catalog can hold. */
uint64_t metadata_take_step(metadata_reader *n);
file_ref metadata_take_file(metadata_reader *n);
/*
 * Arrays with their count in front. The result is malloc'ed, NULL if empty; *count is 0 then. The memory is bounded by
 * what is left of the metadata file.
 */
ckd_id *metadata_take_ids(metadata_reader *n, size_t *count);
file_ref *metadata_take_files(metadata_reader *n, size_t *count);
/* The count of an array whose elements take `each` bytes in the metadata file, and zeroed memory for elements of `size`. */
void *metadata_take_array(metadata_reader *n, size_t *count, size_t each, size_t size);
/* Only metadata files that are published by generation have one. */
void metadata_check_no_generation(metadata_reader *n);
/* rank < world, world at least 1. */
void metadata_check_rank(metadata_reader *n, uint32_t rank, uint32_t world);

#endif
