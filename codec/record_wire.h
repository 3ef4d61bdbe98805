/* What the record writer and the record decoder share. */
#ifndef CODEC_RECORD_WIRE_H
#define CODEC_RECORD_WIRE_H

#include "codec/record.h"
#include "codec/wire.h"

#define WIRE_ENUM_MAX 0xffffu /* largest kind, coding, predictor, role, dtype */

/* What a dependency says itself; what it does not say is as in its record. */
#define DEPENDENCY_OTHER_CHECKPOINT 1u
#define DEPENDENCY_OTHER_TENSOR     2u
#define DEPENDENCY_OTHER_SPAN       4u
#define DEPENDENCY_FLAGS            7u

/* The only flags that a dependency may be written with. */
uint32_t record_dependency_flags(const record *r, const dependency *d);
/* Equality of the numbers that the kind of region has. */
bool record_same_region(const ckd_region *a, const ckd_region *b, uint32_t ndim);

#endif
