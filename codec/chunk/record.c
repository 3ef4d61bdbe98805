/* Validates and writes records. codec/FORMAT.md, "Records". */
#include "codec/chunk/chunk.h"

#include "base/vocabulary.h"
#include "codec/chunk/record_wire.h"

static bool box_elements(uint64_t *out, const ckd_region *box, uint32_t ndim, const uint64_t *shape) {
    for (uint32_t d = 0; d < ndim; d++) {
        if (box->offsets[d] > shape[d] || box->lengths[d] > shape[d] - box->offsets[d]) {
            return false;
        }
    }
    return shape_elements(out, ndim, box->lengths);
}

bool region_elements(uint64_t *out, const ckd_region *region, uint32_t ndim, const uint64_t *shape) {
    uint64_t all, elements = 0;
    bool inside = shape_elements(&all, ndim, shape);
    if (inside) {
        switch (region->kind) {
        case CKD_REGION_WHOLE:
            elements = all;
            break;
        case CKD_REGION_BOX:
            inside = box_elements(&elements, region, ndim, shape);
            break;
        case CKD_REGION_FLAT:
            inside = region->start <= all && region->count <= all - region->start;
            elements = region->count;
            break;
        default:
            inside = false;
        }
    }
    *out = inside ? elements : 0;
    return inside;
}

/* ---- validation ---- */

static const char *block_problem(const record *r, uint64_t elements, ckd_status *status) {
    const record_tensor *t = r->tensor;
    uint64_t raw;
    if (ckd_dtype_size(t->dtype) == 0 || t->role < CKD_ROLE_WEIGHT || t->role > CKD_ROLE_OTHER) {
        *status = CKD_E_UNSUPPORTED;
        return "a block's dtype or role is unknown to this version";
    }
    if (r->count > CKD_BLOCK_ELEMENTS || (r->count == 0 && elements != 0)) {
        return "a block's number of elements is impossible";
    }
    if (!size_mul(&raw, r->count, ckd_dtype_size(t->dtype)) || raw != r->raw_size) {
        return "a block's raw size is not its number of elements times the size of its dtype";
    }
    bool bare = r->predictor == PREDICT_COPY || r->predictor == PREDICT_CAST;
    if (bare && (r->stored_size != 0 || r->coding != 0)) {
        return "a copy has a payload or a coding";
    }
    bool builds = bare || r->predictor == PREDICT_PARENT || r->predictor == PREDICT_STEP;
    if (builds && r->dependency_count == 0) {
        return "a block predicted from other values does not say from which";
    }
    return NULL;
}

/* Returns true for a record that has no tensor and this name. */
static bool bare(const record *r, const char *name) {
    const record_tensor *t = r->tensor;
    return r->predictor == 0 && r->dependency_count == 0 && t->role == CKD_ROLE_OTHER &&
           t->dtype == CKD_DTYPE_NONE && t->ndim == 0 && r->region->kind == CKD_REGION_WHOLE &&
           r->first == 0 && r->count == 0 && strcmp(t->name, name) == 0;
}

/* The header of a bundle has no free field: its payload has all information. */
static const char *bundle_problem(const record *r) {
    bool empty = r->coding == 0 && r->depth == 0 && r->chain_stored == 0 && r->chain_work == 0 &&
                 r->base_stored == 0 && r->raw_size == r->stored_size;
    return empty && bare(r, BUNDLE_NAME) ? NULL : "a bundle's header has fields that it must not have";
}

static const char *measures_problem(const record *r) {
    return bare(r, MEASURES_NAME) ? NULL : "the header of measures has fields that it must not have";
}

static const char *size_problem(const record *r) {
    static const uint64_t caps[] = {
        [RECORD_BLOCK] = UINT64_MAX,         [RECORD_SIDE] = RECORD_SIDE_MAX,
        [RECORD_GROUP] = RECORD_GROUP_MAX,   [RECORD_BLOB] = RECORD_BLOB_MAX,
        [RECORD_BUNDLE] = RECORD_BUNDLE_MAX, [RECORD_MEASURES] = RECORD_MEASURES_MAX,
        [RECORD_LINK] = UINT64_MAX};
    bool known = r->kind >= RECORD_BLOCK && r->kind <= RECORD_LINK;
    uint64_t cap = known ? caps[r->kind] : UINT64_MAX;
    if (r->raw_size > cap) {
        return "the raw size is above what this kind of record may have";
    }
    return known && r->stored_size > r->raw_size ? "the payload is larger than what it stands for" : NULL;
}

/* A dependency's tensor may have another shape, so only the limits can be checked. */
static const char *dependency_problem(const dependency *d, uint32_t ndim) {
    if (d->kind > WIRE_ENUM_MAX || wire_id_zero(&d->checkpoint)) {
        return "a dependency names no checkpoint, or its kind is out of range";
    }
    if (d->tensor[0] && (strlen(d->tensor) > CKD_NAME_MAX || !utf8_valid(d->tensor, strlen(d->tensor)))) {
        return "a dependency's tensor name is not valid";
    }
    uint64_t elements = CKD_MAX_ELEMENTS, end = 0;
    if (d->same_span) {
        return NULL;
    }
    if (d->region->kind == CKD_REGION_BOX) {
        uint64_t shape[CKD_MAX_DIMS];
        for (uint32_t i = 0; i < ndim; i++) {
            if (!size_add(&shape[i], d->region->offsets[i], d->region->lengths[i])) {
                return "a dependency's region overflows";
            }
        }
        if (!region_elements(&elements, d->region, ndim, shape)) {
            return "a dependency's region is too large";
        }
    } else if (d->region->kind == CKD_REGION_FLAT) {
        elements = d->region->count;
        if (!size_add(&end, d->region->start, elements) || end > CKD_MAX_ELEMENTS) {
            return "a dependency's region is too large";
        }
    }
    bool inside = size_add(&end, d->first, d->count) && end <= elements;
    return inside ? NULL : "a dependency's elements do not lie inside its region";
}

static const char *field_problem(const record *r) {
    const record_tensor *t = r->tensor;
    size_t name = strlen(t->name);
    if (name == 0 || name > CKD_NAME_MAX || !utf8_valid(t->name, name)) {
        return "the name is not 1 to 1023 bytes of UTF-8";
    }
    if (r->kind > WIRE_ENUM_MAX || r->coding > WIRE_ENUM_MAX || r->predictor > WIRE_ENUM_MAX ||
        (uint32_t)t->role > WIRE_ENUM_MAX || (uint32_t)t->dtype > WIRE_ENUM_MAX) {
        return "a kind, coding, predictor, role or dtype is out of range";
    }
    if (wire_id_zero(&t->checkpoint)) {
        return "the record names no checkpoint";
    }
    if (t->ndim > CKD_MAX_DIMS) {
        return "the tensor has more than 16 dimensions";
    }
    return r->dependency_count > RECORD_MAX_DEPENDENCIES ? "the record has more than 1024 dependencies"
                                                         : NULL;
}

const char *record_problem(const record *r, ckd_status *status) {
    *status = CKD_E_CORRUPT;
    const char *problem = field_problem(r);
    if (problem) {
        return problem;
    }
    if ((uint32_t)r->region->kind > CKD_REGION_FLAT) {
        *status = CKD_E_UNSUPPORTED;
        return "the kind of region is unknown to this version";
    }
    uint64_t elements, end;
    if (!region_elements(&elements, r->region, r->tensor->ndim, r->tensor->shape)) {
        return "the region does not lie inside the tensor, or the tensor is too large";
    }
    if (!size_add(&end, r->first, r->count) || end > elements) {
        return "the elements do not lie inside the region";
    }
    for (uint32_t i = 0; i < r->dependency_count && !problem; i++) {
        const dependency *d = &r->dependencies[i];
        if (!d->same_span && (uint32_t)d->region->kind > CKD_REGION_FLAT) {
            *status = CKD_E_UNSUPPORTED;
            return "a dependency's kind of region is unknown to this version";
        }
        problem = dependency_problem(d, r->tensor->ndim);
    }
    if (!problem) {
        problem = size_problem(r);
    }
    if (problem) {
        return problem;
    }
    return r->kind == RECORD_BLOCK || r->kind == RECORD_LINK ? block_problem(r, elements, status)
           : r->kind == RECORD_BUNDLE                        ? bundle_problem(r)
           : r->kind == RECORD_MEASURES                      ? measures_problem(r)
                                                             : NULL;
}

/* ---- writing ---- */

bool record_same_region(const ckd_region *a, const ckd_region *b, uint32_t ndim) {
    if (a->kind != b->kind) {
        return false;
    }
    switch (a->kind) {
    case CKD_REGION_BOX:
        return memcmp(a->offsets, b->offsets, ndim * sizeof(uint64_t)) == 0 &&
               memcmp(a->lengths, b->lengths, ndim * sizeof(uint64_t)) == 0;
    case CKD_REGION_FLAT:
        return a->start == b->start && a->count == b->count;
    default:
        return true;
    }
}

uint32_t record_dependency_flags(const record *r, const dependency *d) {
    uint32_t flags = 0;
    if (memcmp(&d->checkpoint, &r->tensor->checkpoint, sizeof(ckd_id)) != 0) {
        flags |= DEPENDENCY_OTHER_CHECKPOINT;
    }
    if (d->tensor[0] && strcmp(d->tensor, r->tensor->name) != 0) {
        flags |= DEPENDENCY_OTHER_TENSOR;
    }
    if (!d->same_span && !(d->first == r->first && d->count == r->count &&
                           record_same_region(d->region, r->region, r->tensor->ndim))) {
        flags |= DEPENDENCY_OTHER_SPAN;
    }
    return flags;
}

void record_put_name(bytes *to, const char *name) {
    size_t size = strlen(name);
    wire_put_varint(to, size);
    bytes_put(to, name, size);
}

void record_put_region(bytes *to, const ckd_region *region, uint32_t ndim) {
    wire_put_varint(to, region->kind);
    if (region->kind == CKD_REGION_BOX) {
        for (uint32_t d = 0; d < ndim; d++) {
            wire_put_varint(to, region->offsets[d]);
        }
        for (uint32_t d = 0; d < ndim; d++) {
            wire_put_varint(to, region->lengths[d]);
        }
    } else if (region->kind == CKD_REGION_FLAT) {
        wire_put_varint(to, region->start);
        wire_put_varint(to, region->count);
    }
}

static void put_dependency(bytes *to, const record *r, const dependency *d) {
    uint32_t flags = record_dependency_flags(r, d);
    wire_put_varint(to, d->kind);
    bytes_put_u8(to, (uint8_t)flags);
    if (flags & DEPENDENCY_OTHER_CHECKPOINT) {
        wire_put_id(to, &d->checkpoint);
    }
    if (flags & DEPENDENCY_OTHER_TENSOR) {
        record_put_name(to, d->tensor);
    }
    if (flags & DEPENDENCY_OTHER_SPAN) {
        record_put_region(to, d->region, r->tensor->ndim);
        wire_put_varint(to, d->first);
        wire_put_varint(to, d->count);
    }
    wire_put_hash(to, &d->content);
}

static void put_tensor(bytes *to, const record_tensor *t) {
    wire_put_varint(to, t->role);
    wire_put_varint(to, t->dtype);
    wire_put_varint(to, t->ndim);
    for (uint32_t d = 0; d < t->ndim; d++) {
        wire_put_varint(to, t->shape[d]);
    }
}

void record_encode(bytes *to, const record *r) {
    size_t start = to->size;
    bytes_put_u32(to, RECORD_MAGIC);
    bytes_put_u32(to, 0); /* the size, filled in below */
    wire_put_varint(to, r->kind);
    wire_put_varint(to, r->coding);
    wire_put_varint(to, r->predictor);
    put_tensor(to, r->tensor);
    record_put_region(to, r->region, r->tensor->ndim);
    wire_put_varint(to, r->first);
    wire_put_varint(to, r->count);
    wire_put_varint(to, r->raw_size);
    wire_put_varint(to, r->stored_size);
    bytes_put_u64(to, r->checksum);
    wire_put_hash(to, &r->content);
    wire_put_id(to, &r->tensor->checkpoint);
    wire_put_varint(to, r->depth);
    wire_put_varint(to, r->chain_stored);
    wire_put_varint(to, r->chain_work);
    wire_put_varint(to, r->base_stored);
    record_put_name(to, r->tensor->name);
    wire_put_varint(to, r->dependency_count);
    for (uint32_t i = 0; i < r->dependency_count; i++) {
        put_dependency(to, r, &r->dependencies[i]);
    }
    if (!to->failed) {
        store_le32(to->data + start + 4, (uint32_t)(to->size - start + 8));
        bytes_put_u64(to, hash64(to->data + start, to->size - start));
    }
}
