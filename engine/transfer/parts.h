/*
 * Chooses the files that a copy fetches, and which of them only in parts. Internal to engine/transfer/parts.c and
 * existing_parts.c.
 */
#ifndef ENGINE_TRANSFER_PARTS_H
#define ENGINE_TRANSFER_PARTS_H

#include "base/file.h"
#include "engine/transfer/transfer.h"

/* A file of the source that the destination does not have. */
typedef struct part_source {
    file_ref file;
    uint64_t own;       /* estimated bytes of the records of items whose own file it is */
    uint64_t read, all; /* bytes of records that items read, and of all; all is 0 until one is seen */
    bool is_whole;      /* it is copied unchanged */
    bool may_have_parts;
    hash_set records; /* records that items read, by record_hash */
    transfer_owner *owners;
    size_t owner_count;
    size_t first_part, part_count;
} part_source;

typedef struct choosing {
    transfer *t;
    part_source *sources; /* sorted by id */
    size_t count;
    dir_list named, arrived; /* file names in data/c and data/x of the destination */
    bytes payload;
} choosing;

/* ---- existing_parts.c ---- */
/* Makes an id for a new part of the file. */
ckd_status transfer_name_part(ckd_id *out, const ckd_id *file, ckd_error *err);
/* Adds a part. Takes over the memory of *p, unless it fails. *out is valid until the next part is added. */
ckd_status transfer_add_part(transfer_part **out, transfer *t, const transfer_part *p, ckd_error *err);
ckd_status transfer_add_record(transfer_part *p, const record *r, ckd_error *err);
void transfer_free_part(transfer_part *p);
/* Returns NULL if no owner is this checkpoint. */
transfer_owner *transfer_find_owner(transfer_owner *owners, size_t count, const ckd_id *checkpoint);
/* Counts the record for its checkpoint. */
ckd_status transfer_count_owner(transfer_owner **owners, size_t *count, const record *r, ckd_error *err);
/* Whether the destination has files with names of parts of this file. */
bool transfer_may_have_parts(const choosing *c, const part_source *s);
/*
 * Adds existing parts of the file that are intact and needed: first those in data/c, then those that an interrupted
 * copy left complete in data/x. Adds their records to `have`. Sets has_all of owners of the file whose records are all
 * in one part. Errors: NOMEM.
 */
ckd_status transfer_use_parts(choosing *c, part_source *s, hash_set *have, ckd_error *err);

#endif
