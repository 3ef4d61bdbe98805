/* Which files a copy brings, and which of them in parts. Internal to engine/transfer/parts.c and existing_parts.c. */
#ifndef ENGINE_TRANSFER_PARTS_H
#define ENGINE_TRANSFER_PARTS_H

#include "base/file.h"
#include "engine/transfer/transfer.h"

/* A file of the source that the destination does not have. */
typedef struct source {
    file_ref file;
    uint64_t own;       /* bytes of records of items that have it as an own file, about */
    uint64_t read, all; /* bytes of records: those that items read, and all; all is 0 until one was seen */
    bool is_whole;      /* it comes as it is */
    bool may_have_parts;
    hash_set records; /* that items read, by record_hash */
    transfer_owner *owners;
    size_t owner_count;
    size_t first_part, part_count;
} source;

typedef struct choosing {
    transfer *t;
    source *sources; /* by id */
    size_t count;
    dir_list named, arrived; /* data/c and data/x of the destination */
    bytes payload;
} choosing;

/* ---- existing_parts.c ---- */
/* A name for a new part of the file. */
ckd_status transfer_name_part(ckd_id *out, const ckd_id *file, ckd_error *err);
/* Takes over what p points to, unless it fails. *out: until the next one is added. */
ckd_status transfer_add_part(transfer_part **out, transfer *t, const transfer_part *p, ckd_error *err);
ckd_status transfer_add_record(transfer_part *p, const record *r, ckd_error *err);
void transfer_free_part(transfer_part *p);
/* NULL: there is none of this checkpoint. */
transfer_owner *transfer_find_owner(transfer_owner *owners, size_t count, const ckd_id *checkpoint);
/* One more record of its checkpoint. */
ckd_status transfer_count_owner(transfer_owner **owners, size_t *count, const record *r, ckd_error *err);
/* Are there files with such names as its parts have? */
bool transfer_may_have_parts(const choosing *c, const source *s);
/*
 * Adds the parts of the file that the destination has, and that are whole and of use: those in data/c first, then those that an interrupted copy has left complete in
 * data/x. Adds their records to `have`, and notes in the file's owners of which checkpoints one of them has all. Errors: NOMEM.
 */
ckd_status transfer_use_parts(choosing *c, source *s, hash_set *have, ckd_error *err);

#endif
