/* What all notes share: the envelope, and fields that several kinds have. codec/FORMAT.md, "Notes". */
#ifndef CODEC_NOTE_WIRE_H
#define CODEC_NOTE_WIRE_H

#include "codec/metadata/note.h"
#include "codec/common/wire.h"

#define NOTE_MAGIC \
    "\x89"         \
    "CKN\r\n\x1a\n"
#define NOTE_VERSION        1
#define NOTE_LOSSY          UINT32_C(1) /* required feature of a manifest: its fidelity is near or compact */
#define NOTE_OLDER          UINT32_C(2) /* the same: it ends with the older files that a load reads */
#define NOTE_TIMES          UINT32_C(1) /* the same of a part: it ends with when the rank did what */
#define NOTE_OPTIONS        UINT32_C(2) /* the same: it tells the options that the rank was given */
#define NOTE_CALENDAR       UINT32_C(2) /* of a policy: it has rules about the newest checkpoint and periods */
#define NOTE_COMPACTION     UINT32_C(1) /* the same of a policy: it ends with when a compaction follows it */
#define NOTE_ENVELOPE_FRONT 40u         /* bytes in front of the payload */
#define NOTE_ENVELOPE_MIN   48u         /* with the checksum behind it */
#define NOTE_ID_SIZE        16u
#define NOTE_FILE_SIZE      44u /* bytes of a note_file */
#define NOTE_ROLE_SIZE      28u /* bytes of a role_total */

/* Appends the envelope's front; returns where the note begins in the buffer. */
size_t note_begin(bytes *to, note_kind kind, const ckd_id *store, uint32_t generation, uint32_t features);
/* Completes payload size and checksum. A note above NOTE_MAX sets `failed`. */
void note_end(bytes *to, size_t start);

/* A note being decoded. */
typedef struct note_in {
    reader in; /* the payload */
    ckd_id store;
    uint32_t generation;
    uint32_t features; /* required; all are known for this kind of note */
    const char *path;
    ckd_error *err;
    ckd_status status; /* the first problem; the reader has failed then, too */
} note_in;

/* Checks the envelope. `store` NULL: any. After a failure all fields read as zeros, and note_close tells of it. */
void note_open(note_in *n, note_kind kind, const ckd_id *store, const void *data, size_t size,
               const char *path, ckd_error *err);
/*
 * Ends decoding. CORRUPT if the payload was too short or too long; else the first problem of the envelope or of a field. After a
 * failure the `size` bytes of `out` are zero.
 */
ckd_status note_close(note_in *n, void *out, size_t size);
/* Notes a problem with the field just read, unless there was one before. */
void note_fail(note_in *n, ckd_status status, const char *problem);

void note_put_ids(bytes *to, const ckd_id *ids, size_t count);
void note_put_file(bytes *to, const note_file *f);
void note_put_files(bytes *to, const note_file *files, size_t count);

/* An id that must not be zero. */
ckd_id note_take_id(note_in *n);
/* 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. */
void note_take_run(note_in *n, char run[CKD_RUN_MAX + 1]);
/* The same, or nothing. */
void note_take_any_run(note_in *n, char run[CKD_RUN_MAX + 1]);
/* As a run's name, for a tag. */
void note_take_tag(note_in *n, char tag[CKD_RUN_MAX + 1]);
/* At most INT64_MAX, which the catalog can hold. */
uint64_t note_take_step(note_in *n);
note_file note_take_file(note_in *n);
/*
 * Arrays with their count in front. The result is malloc'ed, NULL if empty; *count is 0 then. The memory is bounded by
 * what is left of the note.
 */
ckd_id *note_take_ids(note_in *n, size_t *count);
note_file *note_take_files(note_in *n, size_t *count);
/* The count of an array whose elements take `each` bytes in the note, and zeroed memory for elements of `size`. */
void *note_take_array(note_in *n, size_t *count, size_t each, size_t size);
/* Only notes that are published by generation have one. */
void note_check_no_generation(note_in *n);
/* rank < world, world at least 1. */
void note_check_rank(note_in *n, uint32_t rank, uint32_t world);

#endif
