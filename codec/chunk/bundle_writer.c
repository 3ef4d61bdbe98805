/*
 * Writes the payload of a bundle: front, heads by columns, hashes, their checksum, payloads. codec/FORMAT.md,
 * "Bundles".
 */

#include "codec/chunk/bundle.h"
#include "codec/chunk/record_wire.h"
#include "codec/common/common.h"

#define HEADS_LEVEL 19 /* zstd level, since the heads are a few kilobytes, written once */

/* ---- heads: the fields of the records, by columns ---- */

static uint64_t elements_left(const record *r) {
    uint64_t elements;
    region_elements(&elements, r->region, r->tensor->ndim, r->tensor->shape);
    return elements - r->first - r->count;
}

static void put_tensor_field(bytes *to, bundle_column column, const record *r) {
    const record_tensor *t = r->tensor;
    switch (column) {
    case COLUMN_ROLE:
        wire_put_varint(to, t->role);
        break;
    case COLUMN_DTYPE:
        wire_put_varint(to, t->dtype);
        break;
    case COLUMN_NDIM:
        wire_put_varint(to, t->ndim);
        break;
    case COLUMN_SHAPE:
        for (uint32_t d = 0; d < t->ndim; d++) {
            wire_put_varint(to, t->shape[d]);
        }
        break;
    case COLUMN_REGION:
        record_put_region(to, r->region, t->ndim);
        break;
    default:
        record_put_name(to, t->name);
    }
}

static void put_dependency_field(bytes *to, bundle_column column, const record *r, const dependency *d) {
    uint32_t flags = record_dependency_flags(r, d);
    if (column == COLUMN_ON_KIND) {
        wire_put_varint(to, d->kind);
    } else if (column == COLUMN_ON_FLAGS) {
        bytes_put_u8(to, (uint8_t)flags);
    } else if (column == COLUMN_ON_CHECKPOINT && flags & DEPENDENCY_OTHER_CHECKPOINT) {
        wire_put_id(to, &d->checkpoint);
    } else if (column == COLUMN_ON_TENSOR && flags & DEPENDENCY_OTHER_TENSOR) {
        record_put_name(to, d->tensor);
    } else if (column == COLUMN_ON_SPAN && flags & DEPENDENCY_OTHER_SPAN) {
        record_put_region(to, d->region, r->tensor->ndim);
        wire_put_varint(to, d->first);
        wire_put_varint(to, d->count);
    }
}

static void put_dependencies(bytes *to, bundle_column column, const record *r) {
    for (uint32_t i = 0; i < r->dependency_count; i++) {
        put_dependency_field(to, column, r, &r->dependencies[i]);
    }
}

/* Returns the code of the smallest hint that is not below v. Since it rounds up, sums along a chain always grow. */
static uint32_t hint_code(uint64_t v) {
    if (v < 512) {
        return (uint32_t)v;
    }
    unsigned shift = 64 - 9 - (unsigned)__builtin_clzll(v);
    uint64_t mantissa = (v >> shift) + ((v & ((UINT64_C(1) << shift) - 1)) != 0);
    uint64_t code = 256 * shift + mantissa;
    return code > BUNDLE_HINT_MAX ? BUNDLE_HINT_MAX : (uint32_t)code;
}

static uint64_t above(uint64_t v, uint64_t base) {
    return v > base ? v - base : 0;
}

static void put_hint(bytes *to, bundle_column column, const record *r) {
    switch (column) {
    case COLUMN_CHAIN_STORED:
        bytes_put_u8(to, (uint8_t)hint_code(above(r->chain_stored, r->stored_size)));
        break;
    case COLUMN_CHAIN_STORED_HIGH:
        bytes_put_u8(to, (uint8_t)(hint_code(above(r->chain_stored, r->stored_size)) >> 8));
        break;
    case COLUMN_CHAIN_WORK:
        bytes_put_u8(to, (uint8_t)hint_code(r->chain_work));
        break;
    case COLUMN_CHAIN_WORK_HIGH:
        bytes_put_u8(to, (uint8_t)(hint_code(r->chain_work) >> 8));
        break;
    case COLUMN_BASE_STORED:
        bytes_put_u8(to, (uint8_t)hint_code(above(r->base_stored, r->stored_size)));
        break;
    default:
        bytes_put_u8(to, (uint8_t)(hint_code(above(r->base_stored, r->stored_size)) >> 8));
    }
}

static void put_number(bytes *to, bundle_column column, const record *r) {
    switch (column) {
    case COLUMN_KIND:
        wire_put_varint(to, r->kind);
        break;
    case COLUMN_CODING:
        wire_put_varint(to, r->coding);
        break;
    case COLUMN_PREDICTOR:
        wire_put_varint(to, r->predictor);
        break;
    case COLUMN_FIRST:
        wire_put_varint(to, r->first);
        break;
    case COLUMN_LEFT:
        wire_put_varint(to, elements_left(r));
        break;
    case COLUMN_STORED_SIZE:
        wire_put_varint(to, r->stored_size);
        break;
    case COLUMN_DEPTH:
        wire_put_varint(to, r->depth);
        break;
    default:
        wire_put_varint(to, r->dependency_count);
    }
}

static void put_field(bytes *to, bundle_column column, const record *r) {
    switch (column) {
    case COLUMN_ROLE:
    case COLUMN_DTYPE:
    case COLUMN_NDIM:
    case COLUMN_SHAPE:
    case COLUMN_REGION:
    case COLUMN_NAME:
        put_tensor_field(to, column, r);
        break;
    case COLUMN_RAW_SIZE:
        if (r->kind != RECORD_BLOCK) {
            wire_put_varint(to, r->raw_size);
        }
        break;
    case COLUMN_CHAIN_STORED:
    case COLUMN_CHAIN_STORED_HIGH:
    case COLUMN_CHAIN_WORK:
    case COLUMN_CHAIN_WORK_HIGH:
    case COLUMN_BASE_STORED:
    case COLUMN_BASE_STORED_HIGH:
        put_hint(to, column, r);
        break;
    case COLUMN_ON_KIND:
    case COLUMN_ON_FLAGS:
    case COLUMN_ON_CHECKPOINT:
    case COLUMN_ON_TENSOR:
    case COLUMN_ON_SPAN:
        put_dependencies(to, column, r);
        break;
    default:
        put_number(to, column, r);
    }
}

static void put_heads(bytes *to, const bundle_member *members, size_t count) {
    for (size_t i = 0; i < count; i++) {
        wire_put_varint(to, members[i].before - (i ? members[i - 1].before : 0));
    }
    for (bundle_column column = COLUMN_PLACE + 1; column < BUNDLE_COLUMNS; column++) {
        for (size_t i = 0; i < count; i++) {
            put_field(to, column, &members[i].record);
        }
    }
}

/* ---- the whole payload ---- */

/* Appends the heads, compressed if that is smaller. Returns their stored size. */
static size_t put_stored_heads(bytes *to, const bytes *heads) {
    size_t start = to->size, bound = zstd_once_bound(heads->size);
    void *packed = heads->failed ? NULL : bytes_extend(to, bound);
    size_t size = packed ? zstd_once_pack(packed, bound, heads->data, heads->size, HEADS_LEVEL) : 0;
    if (size == 0) {
        to->failed = true;
        return 0;
    }
    to->size = start + size;
    if (size >= heads->size) {
        to->size = start;
        bytes_put(to, heads->data, heads->size);
    }
    return to->size - start;
}

static uint32_t put_hashes(bytes *to, const bundle_member *members, size_t count) {
    size_t before = to->size;
    for (size_t i = 0; i < count; i++) {
        wire_put_hash(to, &members[i].record.content);
    }
    for (size_t i = 0; i < count; i++) {
        const record *r = &members[i].record;
        for (uint32_t k = 0; k < r->dependency_count; k++) {
            wire_put_hash(to, &r->dependencies[k].content);
        }
    }
    return (uint32_t)((to->size - before) / sizeof(hash128));
}

void bundle_encode(bytes *to, const bundle_member *members, size_t count, const bytes *payloads,
                   bytes *heads) {
    put_heads(bytes_reset(heads), members, count);
    size_t start = to->size;
    bytes_put_u32(to, (uint32_t)count);
    bytes_put_u32(to, (uint32_t)heads->size);
    bytes_put_u32(to, 0); /* stored size of the heads and number of hashes, filled in below */
    bytes_put_u32(to, 0);
    uint32_t stored = (uint32_t)put_stored_heads(to, heads);
    uint32_t hashes = put_hashes(to, members, count);
    if (!to->failed) {
        store_le32(to->data + start + 8, stored);
        store_le32(to->data + start + 12, hashes);
        bytes_put_u64(to, hash64(to->data + start, to->size - start));
    }
    bytes_put(to, payloads->data, payloads->size);
}
