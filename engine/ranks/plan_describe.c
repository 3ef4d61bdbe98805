/*
 * Descriptions: what a rank holds, as bytes. They are not stored anywhere, so both ends must have the same version,
 * which is checked.
 *
 *   "ckdd", u32 version, u32 rank, u32 world, u64 count, the entries, u64 hash of everything before
 *   entry: u16 length and name; u8 role, u8 dtype, u8 dimensions, the shape; u8 kind of region; then offsets and
 *   lengths of a box, or start and count of a flat range. Element counts are varints (codec/common/common.h).
 */
#include <stdlib.h>
#include <string.h>

#include "base/vocabulary.h"
#include "codec/common/common.h"
#include "engine/ranks/internal.h"
#include "engine/common/common.h"

#define MAGIC   "ckdd"
#define VERSION 1
#define HEAD    24u

void ckd_bytes_free(ckd_bytes *b) {
    if (b) {
        free(b->data);
        *b = (ckd_bytes){NULL, 0};
    }
}

/* ---- writing ---- */

static void put_region(bytes *to, const ckd_region *region, uint32_t ndim) {
    bytes_put_u8(to, (uint8_t)region->kind);
    for (uint32_t d = 0; region->kind == CKD_REGION_BOX && d < ndim; d++) {
        wire_put_varint(to, region->offsets[d]);
    }
    for (uint32_t d = 0; region->kind == CKD_REGION_BOX && d < ndim; d++) {
        wire_put_varint(to, region->lengths[d]);
    }
    if (region->kind == CKD_REGION_FLAT) {
        wire_put_varint(to, region->start);
        wire_put_varint(to, region->count);
    }
}

static ckd_status put_tensor(bytes *to, const ckd_tensor *tensor, ckd_error *err) {
    ckd_tensor t = CKD_TENSOR_INIT;
    uint64_t elements;
    ckd_status status = tensor_copy(&t, tensor, err);
    THEN(status, tensor_check(&elements, &t, err));
    if (status != CKD_OK) {
        return status;
    }
    bytes_put_string(to, t.name);
    bytes_put_u8(to, (uint8_t)(t.role == CKD_ROLE_AUTO ? ckd_role_of(t.name, t.dtype) : t.role));
    bytes_put_u8(to, (uint8_t)t.dtype);
    bytes_put_u8(to, (uint8_t)t.ndim);
    for (uint32_t d = 0; d < t.ndim; d++) {
        wire_put_varint(to, t.shape[d]);
    }
    put_region(to, &t.region, t.ndim);
    return CKD_OK;
}

static ckd_status check_rank(uint32_t rank, uint32_t world, ckd_error *err) {
    if (world == 0 || world > CKD_WORLD_MAX || rank >= world) {
        return err_set(err, CKD_E_INVALID, "rank %u of %u: ranks are 0 ... world - 1, at most %d",
                       (unsigned)rank, (unsigned)world, CKD_WORLD_MAX);
    }
    return CKD_OK;
}

ckd_status ckd_plan_describe(ckd_bytes *out, uint32_t rank, uint32_t world, const ckd_tensor *tensors,
                             size_t count, ckd_error *err) {
    *out = (ckd_bytes){NULL, 0};
    ckd_status status = check_rank(rank, world, err);
    bytes data = {0};
    bytes_put(&data, MAGIC, 4);
    bytes_put_u32(&data, VERSION);
    bytes_put_u32(&data, rank);
    bytes_put_u32(&data, world);
    bytes_put_u64(&data, count);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = put_tensor(&data, &tensors[i], err);
        if (status != CKD_OK && tensors[i].name) {
            err_in_tensor(err, status, tensors[i].name);
        }
    }
    bytes_put_u64(&data, data.failed ? 0 : hash64(data.data, data.size));
    if (status == CKD_OK && data.failed) {
        status = err_nomem(err, data.size, "a description");
    }
    if (status != CKD_OK) {
        bytes_free(&data);
        return status;
    }
    *out = (ckd_bytes){data.data, data.size};
    return CKD_OK;
}

/* ---- reading ---- */

ckd_status description_open(description *out, const ckd_bytes *bytes_of, ckd_error *err) {
    *out = (description){0};
    const uint8_t *data = bytes_of->data;
    size_t size = bytes_of->size;
    if (size < HEAD + 8 || memcmp(data, MAGIC, 4) != 0) {
        return err_set(err, CKD_E_CORRUPT, "not the description of a rank");
    }
    if (load_le32(data + 4) != VERSION) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "a rank's description is of version %u, this library knows %d: all ranks must use the same",
            (unsigned)load_le32(data + 4), VERSION);
    }
    if (!wire_hash_matches(load_le64(data + size - 8), hash64(data, size - 8))) {
        return err_set(err, CKD_E_CORRUPT, "the description of a rank was damaged on its way");
    }
    out->rank = load_le32(data + 8);
    out->world = load_le32(data + 12);
    out->count = load_le64(data + 16);
    out->hash = hash128_of(data, size);
    out->at = reader_of(data + HEAD, size - HEAD - 8);
    if (check_rank(out->rank, out->world, NULL) != CKD_OK || out->count > size) {
        return err_set(err, CKD_E_CORRUPT, "the description of a rank makes no sense");
    }
    return CKD_OK;
}

bool description_traits(described *out, reader *at) {
    size_t begin = at->at;
    out->traits = at->data + begin;
    out->role = (ckd_role)reader_u8(at);
    out->dtype = (ckd_dtype)reader_u8(at);
    uint32_t ndim = reader_u8(at);
    uint64_t shape[CKD_MAX_DIMS];
    for (uint32_t d = 0; d < ndim && d < CKD_MAX_DIMS; d++) {
        shape[d] = wire_varint(at);
    }
    out->traits_size = at->at - begin;
    return !at->failed && out->role >= CKD_ROLE_WEIGHT && out->role <= CKD_ROLE_OTHER &&
           ckd_dtype_size(out->dtype) != 0 && geometry_init(&out->shape, ndim, shape);
}

bool description_region(described *out, reader *at) {
    ckd_region *r = &out->region;
    r->kind = (ckd_region_kind)reader_u8(at);
    r->start = r->count = 0;
    for (uint32_t d = 0; r->kind == CKD_REGION_BOX && d < out->shape.ndim; d++) {
        r->offsets[d] = wire_varint(at);
    }
    for (uint32_t d = 0; r->kind == CKD_REGION_BOX && d < out->shape.ndim; d++) {
        r->lengths[d] = wire_varint(at);
    }
    if (r->kind == CKD_REGION_FLAT) {
        r->start = wire_varint(at);
        r->count = wire_varint(at);
    }
    return !at->failed;
}

bool description_name_valid(const described *d) {
    return d->name_size > 0 && d->name_size <= CKD_NAME_MAX && utf8_valid(d->name, d->name_size);
}
