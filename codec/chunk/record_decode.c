/*
 * Reads record headers into an arena. Trusts nothing in them, even if the checksum matches. codec/FORMAT.md, "Records".
 */
#include <stdlib.h>
#include <string.h>

#include "codec/chunk/chunk.h"

#include "codec/chunk/record_wire.h"

/* ---- the arena: slabs of growing size, freed together ---- */

#define SLAB_MIN  4096u
#define SLAB_MAX  (1u << 20)
#define ALIGNMENT 16u

static bool add_slab(record_arena *a, size_t at_least) {
    if (ARRAY_GROW(a->slabs, a->capacity, a->count + 1, "records", NULL) != CKD_OK) {
        return false;
    }
    /* Each slab is twice the last one, so small files stay small and the number of slabs stays low. */
    size_t size = a->size < SLAB_MIN / 2 ? SLAB_MIN : a->size < SLAB_MAX / 2 ? 2 * a->size : SLAB_MAX;
    if (size < at_least) {
        size = at_least;
    }
    void *slab = calloc(1, size);
    if (!slab) {
        return false;
    }
    a->slabs[a->count++] = slab;
    a->used = 0;
    a->size = size;
    return true;
}

void *arena_alloc(record_arena *a, size_t size) {
    if (size > SIZE_MAX - ALIGNMENT) {
        return NULL;
    }
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (a->count == 0 || a->size - a->used < size) {
        if (!add_slab(a, size)) {
            return NULL;
        }
    }
    void *out = (char *)a->slabs[a->count - 1] + a->used;
    a->used += size;
    return out;
}

void arena_clear(record_arena *a) {
    if (a->count == 0) {
        return;
    }
    void *last = a->slabs[--a->count];
    for (size_t i = 0; i < a->count; i++) {
        free(a->slabs[i]);
    }
    memset(last, 0, a->used);
    a->slabs[0] = last;
    a->count = 1;
    a->used = 0;
}

void arena_free(record_arena *a) {
    for (size_t i = 0; i < a->count; i++) {
        free(a->slabs[i]);
    }
    free(a->slabs);
    *a = (record_arena){0};
}

/* ---- fields ---- */

#define DEPENDENCY_MIN 18u /* bytes of the smallest dependency: kind, flags, content hash */

typedef struct header_reader {
    reader in; /* the fields, without the checksum */
    record_arena *arena;
    const record *previous;
    bool no_memory, unknown_region;
} header_reader;

name_ref record_take_name(reader *in) {
    name_ref name = {"", 0};
    size_t size = (size_t)wire_varint_max(in, CKD_NAME_MAX);
    const char *text = reader_take(in, size);
    if (!text || in->failed) {
        return name;
    }
    if (size == 0 || !utf8_valid(text, size)) {
        in->failed = true;
        return name;
    }
    return (name_ref){text, size};
}

static bool name_is(name_ref name, const char *text) {
    return strlen(text) == name.size && memcmp(text, name.text, name.size) == 0;
}

const char *record_keep_name(record_arena *arena, name_ref name) {
    char *copy = arena_alloc(arena, name.size + 1);
    if (copy) {
        memcpy(copy, name.text, name.size);
    }
    return copy;
}

void record_take_region(reader *in, ckd_region *region, uint32_t ndim, bool *unknown) {
    region->kind = (ckd_region_kind)wire_varint_max(in, WIRE_ENUM_MAX);
    if (region->kind == CKD_REGION_BOX) {
        for (uint32_t d = 0; d < ndim; d++) {
            region->offsets[d] = wire_varint(in);
        }
        for (uint32_t d = 0; d < ndim; d++) {
            region->lengths[d] = wire_varint(in);
        }
    } else if (region->kind == CKD_REGION_FLAT) {
        region->start = wire_varint(in);
        region->count = wire_varint(in);
    } else if (region->kind != CKD_REGION_WHOLE) {
        *unknown = !in->failed;
        in->failed = true;
    }
}

static void take_tensor(reader *in, record_tensor *t) {
    t->role = (ckd_role)wire_varint_max(in, WIRE_ENUM_MAX);
    t->dtype = (ckd_dtype)wire_varint_max(in, WIRE_ENUM_MAX);
    t->ndim = (uint32_t)wire_varint_max(in, CKD_MAX_DIMS);
    for (uint32_t d = 0; d < t->ndim; d++) {
        t->shape[d] = wire_varint(in);
    }
}

const record_tensor *record_keep_tensor(record_arena *arena, const record_tensor *t, name_ref name,
                                        const record *previous) {
    const record_tensor *p = previous ? previous->tensor : NULL;
    if (p && name_is(name, p->name) && memcmp(&p->checkpoint, &t->checkpoint, sizeof(ckd_id)) == 0 &&
        p->role == t->role && p->dtype == t->dtype && p->ndim == t->ndim &&
        memcmp(p->shape, t->shape, t->ndim * sizeof(uint64_t)) == 0) {
        return p;
    }
    record_tensor *copy = arena_alloc(arena, sizeof(*copy));
    if (!copy) {
        return NULL;
    }
    copy->checkpoint = t->checkpoint;
    copy->role = t->role;
    copy->dtype = t->dtype;
    copy->ndim = t->ndim;
    memcpy(copy->shape, t->shape, t->ndim * sizeof(uint64_t));
    copy->name = record_keep_name(arena, name);
    return copy->name ? copy : NULL;
}

const ckd_region *record_keep_region(record_arena *arena, const ckd_region *region, uint32_t ndim,
                                     const record *previous) {
    if (previous && previous->tensor->ndim == ndim && record_same_region(previous->region, region, ndim)) {
        return previous->region;
    }
    ckd_region *copy = arena_alloc(arena, sizeof(*copy));
    if (!copy) {
        return NULL;
    }
    copy->kind = region->kind;
    if (region->kind == CKD_REGION_BOX) {
        memcpy(copy->offsets, region->offsets, ndim * sizeof(uint64_t));
        memcpy(copy->lengths, region->lengths, ndim * sizeof(uint64_t));
    } else if (region->kind == CKD_REGION_FLAT) {
        copy->start = region->start;
        copy->count = region->count;
    }
    return copy;
}

static void take_dependency(header_reader *h, const record *r, dependency *d) {
    reader *in = &h->in;
    d->kind = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
    uint32_t flags = reader_u8(in);
    if (flags > DEPENDENCY_FLAGS) {
        in->failed = true;
        return;
    }
    d->checkpoint = flags & DEPENDENCY_OTHER_CHECKPOINT ? wire_id(in) : r->tensor->checkpoint;
    d->tensor = "";
    if (flags & DEPENDENCY_OTHER_TENSOR) {
        name_ref name = record_take_name(in);
        const char *name_copy = in->failed ? "" : record_keep_name(h->arena, name);
        h->no_memory = h->no_memory || !name_copy;
        d->tensor = name_copy ? name_copy : "";
    }
    d->same_span = !(flags & DEPENDENCY_OTHER_SPAN);
    if (!d->same_span) {
        ckd_region region = {.kind = CKD_REGION_WHOLE};
        record_take_region(in, &region, r->tensor->ndim, &h->unknown_region);
        d->region = record_keep_region(h->arena, &region, r->tensor->ndim, r);
        h->no_memory = h->no_memory || !d->region;
        d->first = wire_varint(in);
        d->count = wire_varint(in);
    }
    d->content = wire_hash(in);
    if (!in->failed && !h->no_memory && flags != record_dependency_flags(r, d)) {
        in->failed = true; /* it states a field that equals its record's */
    }
}

static void take_dependencies(header_reader *h, record *r) {
    reader *in = &h->in;
    r->dependency_count = (uint32_t)wire_varint_max(in, RECORD_MAX_DEPENDENCIES);
    if (r->dependency_count > reader_left(in) / DEPENDENCY_MIN) {
        in->failed = true;
    }
    if (in->failed || r->dependency_count == 0) {
        return;
    }
    dependency *all = arena_alloc(h->arena, r->dependency_count * sizeof(*all));
    if (!all) {
        h->no_memory = true;
        return;
    }
    r->dependencies = all;
    for (uint32_t i = 0; i < r->dependency_count && !in->failed && !h->no_memory; i++) {
        take_dependency(h, r, &all[i]);
    }
}

static void take_fields(header_reader *h, record *r) {
    reader *in = &h->in;
    record_tensor tensor = {0};
    ckd_region region = {0};
    r->kind = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
    r->coding = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
    r->predictor = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
    take_tensor(in, &tensor);
    record_take_region(in, &region, tensor.ndim, &h->unknown_region);
    r->first = wire_varint(in);
    r->count = wire_varint(in);
    r->raw_size = wire_varint(in);
    r->stored_size = wire_varint(in);
    r->checksum = reader_u64(in);
    r->content = wire_hash(in);
    tensor.checkpoint = wire_id(in);
    r->depth = (uint32_t)wire_varint_max(in, UINT32_MAX);
    r->chain_stored = wire_varint(in);
    r->chain_work = wire_varint(in);
    r->base_stored = wire_varint(in);
    name_ref name = record_take_name(in);
    if (in->failed) {
        return;
    }
    r->tensor = record_keep_tensor(h->arena, &tensor, name, h->previous);
    r->region = record_keep_region(h->arena, &region, tensor.ndim, h->previous);
    h->no_memory = !r->tensor || !r->region;
    if (!h->no_memory) {
        take_dependencies(h, r);
    }
    if (reader_left(in) != 0) {
        in->failed = true;
    }
}

/* Finds the end of the header and checks its checksum. `fields` becomes the bytes between size and checksum. */
static const char *take_frame(reader *from, reader *fields, uint32_t *header_size) {
    if (reader_left(from) < RECORD_HEADER_MIN) {
        return "the file ends inside a record header";
    }
    const uint8_t *start = from->data + from->at;
    if (load_le32(start) != RECORD_MAGIC) {
        return "there is no record header here";
    }
    uint32_t size = load_le32(start + 4);
    if (size < RECORD_HEADER_MIN || size > RECORD_HEADER_MAX || size > reader_left(from)) {
        return "the record header's size is impossible";
    }
    if (!wire_hash_matches(load_le64(start + size - 8), hash64(start, size - 8))) {
        return "the record header's checksum does not match";
    }
    reader_take(from, size);
    *fields = reader_of(start + 8, size - 16);
    *header_size = size;
    return NULL;
}

ckd_status record_problem_at(const record *r, ckd_status status, const char *problem, const char *path,
                             uint64_t offset, ckd_error *err) {
    if (status == CKD_E_UNSUPPORTED) {
        err_unsupported(err, path, offset, "%s (dtype %u, role %u): read it with a newer version", problem,
                        (unsigned)r->tensor->dtype, (unsigned)r->tensor->role);
    } else {
        err_corrupt(err, path, offset, "%s", problem);
    }
    return err_in_tensor(err, status, r->tensor->name);
}

ckd_status record_decode(record *out, reader *from, record_arena *arena, const record *previous,
                         const record_place *place, ckd_error *err) {
    const char *path = place->path;
    uint64_t base_offset = place->offset;
    header_reader h = {.arena = arena, .previous = previous};
    record r = {.offset = base_offset};
    *out = (record){0};
    const char *problem = take_frame(from, &h.in, &r.header_size);
    if (problem) {
        return err_corrupt(err, path, base_offset, "%s", problem);
    }
    take_fields(&h, &r);
    if (h.no_memory) {
        return err_nomem(err, r.header_size, "a record header");
    }
    if (h.unknown_region) {
        return err_unsupported(
            err, path, base_offset,
            "a record names a kind of region that is unknown to this version: read it with a newer one");
    }
    if (h.in.failed) {
        return err_corrupt(err, path, base_offset, "the record header's fields are invalid");
    }
    ckd_status status;
    problem = record_problem(&r, &status);
    if (problem) {
        return record_problem_at(&r, status, problem, path, base_offset, err);
    }
    r.payload_offset = base_offset + r.header_size; /* files end below 2^63 */
    *out = r;
    return CKD_OK;
}
