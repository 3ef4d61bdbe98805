/* Shared by the record encoder and the record decoder. */
#ifndef CODEC_RECORD_WIRE_H
#define CODEC_RECORD_WIRE_H

#include "codec/chunk/chunk.h"
#include "codec/common/common.h"

#define WIRE_ENUM_MAX 0xffffu /* largest kind, coding, predictor, role or dtype */

/* Fields that a dependency states itself. The other fields equal those of its record. */
#define DEPENDENCY_OTHER_CHECKPOINT 1u
#define DEPENDENCY_OTHER_TENSOR     2u
#define DEPENDENCY_OTHER_SPAN       4u
#define DEPENDENCY_FLAGS            7u

#define BUNDLE_NAME   "bundle" /* name of every bundle record */
#define MEASURES_NAME "measures"

/* Returns the only valid flags of this dependency. */
uint32_t record_dependency_flags(const record *r, const dependency *d);
/* Compares the fields that this kind of region uses. */
bool record_same_region(const ckd_region *a, const ckd_region *b, uint32_t ndim);

/* ---- fields with the same encoding in headers and bundles ---- */

void record_put_name(bytes *to, const char *name);
void record_put_region(bytes *to, const ckd_region *region, uint32_t ndim);

/* A name in the input, without a NUL. */
typedef struct name_ref {
    const char *text;
    size_t size;
} name_ref;
/* Returns "" on failure. */
name_ref record_take_name(reader *from);
/* Fails at an unknown kind of region and sets *unknown, since the fields behind it cannot be parsed. */
void record_take_region(reader *from, ckd_region *region, uint32_t ndim, bool *unknown);

/* ---- objects of decoded records: those of the previous record if equal, else from the arena. NULL: no memory ---- */

const char *record_keep_name(record_arena *arena, name_ref name);
const record_tensor *record_keep_tensor(record_arena *arena, const record_tensor *t, name_ref name,
                                        const record *previous);
const ckd_region *record_keep_region(record_arena *arena, const ckd_region *region, uint32_t ndim,
                                     const record *previous);

/* Puts a problem found by record_problem into err, and returns the status. */
ckd_status record_problem_at(const record *r, ckd_status status, const char *problem, const char *path,
                             uint64_t offset, ckd_error *err);

#endif
