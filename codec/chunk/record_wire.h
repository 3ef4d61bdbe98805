/* What the record writer and the record decoder share. */
#ifndef CODEC_RECORD_WIRE_H
#define CODEC_RECORD_WIRE_H

#include "codec/chunk/record.h"
#include "codec/common/wire.h"

#define WIRE_ENUM_MAX 0xffffu /* largest kind, coding, predictor, role, dtype */

/* What a dependency says itself; what it does not say is as in its record. */
#define DEPENDENCY_OTHER_CHECKPOINT 1u
#define DEPENDENCY_OTHER_TENSOR     2u
#define DEPENDENCY_OTHER_SPAN       4u
#define DEPENDENCY_FLAGS            7u

#define BUNDLE_NAME   "bundle" /* the name of every bundle */
#define MEASURES_NAME "measures"

/* The only flags that a dependency may be written with. */
uint32_t record_dependency_flags(const record *r, const dependency *d);
/* Equality of the numbers that the kind of region has. */
bool record_same_region(const ckd_region *a, const ckd_region *b, uint32_t ndim);

/* ---- fields that headers and bundles write in the same way ---- */

void record_put_name(bytes *to, const char *name);
void record_put_region(bytes *to, const ckd_region *region, uint32_t ndim);

/* A name's place in what is read, without a NUL. */
typedef struct name_ref {
    const char *text;
    size_t size;
} name_ref;
/* "" if it fails. */
name_ref record_take_name(reader *from);
/* What follows an unknown kind of region cannot be told apart: reading fails there, and *unknown is set. */
void record_take_region(reader *from, ckd_region *region, uint32_t ndim, bool *unknown);

/* ---- what decoded records point to: the arena's, or that of the record before, if equal. NULL: no memory ---- */

const char *record_keep_name(record_arena *arena, name_ref name);
const record_tensor *record_keep_tensor(record_arena *arena, const record_tensor *t, name_ref name,
                                        const record *previous);
const ckd_region *record_keep_region(record_arena *arena, const ckd_region *region, uint32_t ndim,
                                     const record *previous);

/* Tells in err what record_problem found, and returns the status. */
ckd_status record_problem_at(const record *r, ckd_status status, const char *problem, const char *path,
                             uint64_t offset, ckd_error *err);

#endif
