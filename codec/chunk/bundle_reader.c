/* Reads the payload of a bundle. Trusts nothing in it, even if the checksum matches. codec/FORMAT.md, "Bundles". */
#include <stdlib.h>

#include "codec/chunk/bundle.h"
#include "codec/chunk/record_wire.h"
#include "codec/common/common.h"

/*
 * Values of the columns that have no field in a record. Shape and region are set only as far as the bundle states them.
 */
typedef struct head {
    record_tensor tensor;
    ckd_region region;
    name_ref name;
    dependency *on; /* the record's dependencies */
    uint64_t left, before;
    uint32_t hints[3]; /* codes: chain stored, chain work, base stored */
} head;

typedef struct bundle_in {
    const record *bundle;
    const char *path;
    ckd_error *err;
    record_arena *arena;
    reader in; /* the raw heads */
    head *heads;
    bundle_member *members; /* one per head */
    size_t count;
    uint32_t hash_count;
    uint8_t *raw;             /* raw heads if they are compressed, else NULL */
    uint8_t *flags, *flag_at; /* one per dependency */
    const uint8_t *hashes, *payloads;
    uint64_t payload_size;
    bool no_memory, unknown_region;
} bundle_in;

static ckd_status corrupt(const bundle_in *b, const char *what) {
    return err_corrupt(b->err, b->path, b->bundle->offset, "%s", what);
}

/* ---- front ---- */

static ckd_status unpack_heads(bundle_in *b, const uint8_t *stored, uint32_t stored_size, uint32_t raw_size) {
    if (stored_size == raw_size) {
        b->in = reader_of(stored, raw_size);
        return CKD_OK;
    }
    b->raw = malloc((size_t)raw_size + 1);
    if (!b->raw) {
        return err_nomem(b->err, raw_size, "the heads of a bundle");
    }
    ckd_status status = zstd_once_unpack(b->raw, raw_size, stored, stored_size);
    if (status == CKD_E_NOMEM) {
        return err_nomem(b->err, raw_size, "decompressing the heads of a bundle");
    }
    if (status != CKD_OK) {
        return corrupt(b, "the heads of a bundle do not decompress to their size");
    }
    b->in = reader_of(b->raw, raw_size);
    return CKD_OK;
}

/* The size of the payload bounds the memory of the heads, since each record has a hash there. */
static ckd_status read_front(bundle_in *b, const uint8_t *payload) {
    uint64_t size = b->bundle->stored_size;
    if (size < BUNDLE_FRONT + 8) {
        return corrupt(b, "a bundle ends inside its front");
    }
    uint32_t count = load_le32(payload), raw = load_le32(payload + 4), stored = load_le32(payload + 8);
    b->hash_count = load_le32(payload + 12);
    if (count == 0 || count > BUNDLE_RECORDS_MAX || raw > BUNDLE_HEADS_MAX || stored > raw ||
        b->hash_count < count || b->hash_count > BUNDLE_HASHES_MAX) {
        return corrupt(b, "the numbers in the front of a bundle are impossible");
    }
    uint64_t end = BUNDLE_FRONT + stored + sizeof(hash128) * (uint64_t)b->hash_count;
    if (end + 8 > size) {
        return corrupt(b, "a bundle ends inside its heads");
    }
    if (!wire_hash_matches(load_le64(payload + end), hash64(payload, end))) {
        return corrupt(b, "the checksum of a bundle's heads does not match");
    }
    b->count = count;
    b->hashes = payload + BUNDLE_FRONT + stored;
    b->payloads = payload + end + 8;
    b->payload_size = size - end - 8;
    return unpack_heads(b, payload + BUNDLE_FRONT, stored, raw);
}

/* ---- columns ---- */

static void take_tensor_field(bundle_in *b, bundle_column column, head *h) {
    reader *in = &b->in;
    record_tensor *t = &h->tensor;
    switch (column) {
    case COLUMN_ROLE:
        t->role = (ckd_role)wire_varint_max(in, WIRE_ENUM_MAX);
        break;
    case COLUMN_DTYPE:
        t->dtype = (ckd_dtype)wire_varint_max(in, WIRE_ENUM_MAX);
        break;
    case COLUMN_NDIM:
        t->ndim = (uint32_t)wire_varint_max(in, CKD_MAX_DIMS);
        break;
    case COLUMN_SHAPE:
        for (uint32_t d = 0; d < t->ndim; d++) {
            t->shape[d] = wire_varint(in);
        }
        break;
    case COLUMN_REGION:
        record_take_region(in, &h->region, t->ndim, &b->unknown_region);
        break;
    default:
        h->name = record_take_name(in);
    }
}

/* Fails if there are fewer hashes than dependencies. */
static void take_dependency_count(bundle_in *b, head *h, record *r, uint32_t *total) {
    r->dependency_count = (uint32_t)wire_varint_max(&b->in, RECORD_MAX_DEPENDENCIES);
    if (r->dependency_count > b->hash_count - b->count - *total) {
        b->in.failed = true;
        r->dependency_count = 0;
    }
    *total += r->dependency_count;
    if (r->dependency_count) {
        h->on = arena_alloc(b->arena, r->dependency_count * sizeof(*h->on));
        b->no_memory = b->no_memory || !h->on;
        r->dependency_count = h->on ? r->dependency_count : 0;
        r->dependencies = h->on;
    }
}

static void take_dependency_field(bundle_in *b, bundle_column column, head *h, dependency *d) {
    reader *in = &b->in;
    uint32_t flags = *b->flag_at;
    if (column == COLUMN_ON_KIND) {
        d->kind = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
        d->tensor = "";
    } else if (column == COLUMN_ON_FLAGS) {
        *b->flag_at = reader_u8(in);
        in->failed = in->failed || *b->flag_at > DEPENDENCY_FLAGS;
        d->same_span = !(*b->flag_at & DEPENDENCY_OTHER_SPAN);
    } else if (column == COLUMN_ON_CHECKPOINT) {
        d->checkpoint = flags & DEPENDENCY_OTHER_CHECKPOINT ? wire_id(in) : b->bundle->tensor->checkpoint;
    } else if (column == COLUMN_ON_TENSOR && flags & DEPENDENCY_OTHER_TENSOR) {
        name_ref name = record_take_name(in);
        const char *name_copy = in->failed ? "" : record_keep_name(b->arena, name);
        b->no_memory = b->no_memory || !name_copy;
        d->tensor = name_copy ? name_copy : "";
    } else if (column == COLUMN_ON_SPAN && flags & DEPENDENCY_OTHER_SPAN) {
        ckd_region region = {.kind = CKD_REGION_WHOLE};
        record_take_region(in, &region, h->tensor.ndim, &b->unknown_region);
        d->region = record_same_region(&region, &h->region, h->tensor.ndim)
                        ? &h->region /* until store_member */
                        : record_keep_region(b->arena, &region, h->tensor.ndim, NULL);
        b->no_memory = b->no_memory || !d->region;
        d->first = wire_varint(in);
        d->count = wire_varint(in);
    }
    b->flag_at++;
}

static void take_number(bundle_in *b, bundle_column column, head *h, record *r) {
    reader *in = &b->in;
    switch (column) {
    case COLUMN_PLACE:
        h->before = wire_varint(in);
        break;
    case COLUMN_KIND:
        r->kind = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
        break;
    case COLUMN_CODING:
        r->coding = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
        break;
    case COLUMN_PREDICTOR:
        r->predictor = (uint32_t)wire_varint_max(in, WIRE_ENUM_MAX);
        break;
    case COLUMN_FIRST:
        r->first = wire_varint(in);
        break;
    case COLUMN_LEFT:
        h->left = wire_varint(in);
        break;
    case COLUMN_RAW_SIZE:
        r->raw_size = r->kind == RECORD_BLOCK ? 0 : wire_varint(in);
        break;
    case COLUMN_STORED_SIZE:
        r->stored_size = wire_varint(in);
        break;
    case COLUMN_DEPTH:
        r->depth = (uint32_t)wire_varint_max(in, UINT32_MAX);
        break;
    default: {
        unsigned byte = (unsigned)(column - COLUMN_CHAIN_STORED);
        h->hints[byte / 2] |= (uint32_t)reader_u8(in) << 8 * (byte % 2);
        in->failed = in->failed || h->hints[byte / 2] > BUNDLE_HINT_MAX;
    }
    }
}

static void take_column(bundle_in *b, bundle_column column) {
    uint32_t dependencies = 0;
    b->flag_at = b->flags;
    for (size_t i = 0; i < b->count && !b->in.failed && !b->no_memory; i++) {
        head *h = &b->heads[i];
        record *r = &b->members[i].record;
        switch (column) {
        case COLUMN_ROLE:
        case COLUMN_DTYPE:
        case COLUMN_NDIM:
        case COLUMN_SHAPE:
        case COLUMN_REGION:
        case COLUMN_NAME:
            take_tensor_field(b, column, h);
            break;
        case COLUMN_DEPENDENCIES:
            take_dependency_count(b, h, r, &dependencies);
            break;
        case COLUMN_ON_KIND:
        case COLUMN_ON_FLAGS:
        case COLUMN_ON_CHECKPOINT:
        case COLUMN_ON_TENSOR:
        case COLUMN_ON_SPAN:
            for (uint32_t k = 0; k < r->dependency_count; k++) {
                take_dependency_field(b, column, h, &h->on[k]);
            }
            break;
        default:
            take_number(b, column, h, r);
        }
    }
    if (column == COLUMN_DEPENDENCIES && dependencies != b->hash_count - b->count) {
        b->in.failed = true;
    }
}

static ckd_status take_heads(bundle_in *b) {
    b->heads = malloc(b->count * sizeof(*b->heads));
    b->members = calloc(b->count, sizeof(*b->members));
    b->flags = calloc((size_t)(b->hash_count - b->count) + 1, 1);
    if (!b->heads || !b->members || !b->flags) {
        return err_nomem(b->err, b->count * sizeof(*b->heads), "the records of a bundle");
    }
    for (size_t i = 0; i < b->count; i++) {
        b->heads[i].on = NULL;
        memset(b->heads[i].hints, 0, sizeof(b->heads[i].hints));
    }
    for (bundle_column column = 0; column < BUNDLE_COLUMNS; column++) {
        take_column(b, column);
    }
    if (b->no_memory) {
        return err_nomem(b->err, b->count * sizeof(*b->heads), "the records of a bundle");
    }
    if (b->unknown_region) {
        return err_unsupported(
            b->err, b->path, b->bundle->offset,
            "a record names a kind of region that is unknown to this version: read it with a newer one");
    }
    return b->in.failed || reader_left(&b->in) != 0 ? corrupt(b, "the heads of a bundle are invalid")
                                                    : CKD_OK;
}

/* ---- from columns to records ---- */

static uint64_t sum_at_most(uint64_t a, uint64_t b) {
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Derives the remaining fields. */
static const char *complete(const head *h, record *r) {
    uint64_t elements;
    if (r->kind == RECORD_BUNDLE) {
        return "a bundle contains another bundle";
    }
    if (!region_elements(&elements, &h->region, h->tensor.ndim, h->tensor.shape) || r->first > elements ||
        h->left > elements - r->first) {
        return "the elements do not lie inside the region, or the region not inside the tensor";
    }
    r->count = elements - r->first - h->left;
    r->chain_stored = sum_at_most(r->stored_size, bundle_hint(h->hints[0]));
    r->chain_work = bundle_hint(h->hints[1]);
    r->base_stored = sum_at_most(r->stored_size, bundle_hint(h->hints[2]));
    size_t element = ckd_dtype_size(h->tensor.dtype);
    if (r->kind == RECORD_BLOCK && element == 0) {
        r->raw_size = r->stored_size; /* record_problem reports the unknown dtype */
    } else if (r->kind == RECORD_BLOCK && !size_mul(&r->raw_size, r->count, element)) {
        return "a block's size is impossible";
    }
    return NULL;
}

static ckd_status store_member(bundle_in *b, head *h, record *r, const record *previous) {
    h->tensor.checkpoint = b->bundle->tensor->checkpoint;
    r->tensor = record_keep_tensor(b->arena, &h->tensor, h->name, previous);
    r->region = record_keep_region(b->arena, &h->region, h->tensor.ndim, previous);
    if (!r->tensor || !r->region) {
        return err_nomem(b->err, sizeof(h->tensor), "the records of a bundle");
    }
    for (uint32_t i = 0; i < r->dependency_count; i++) {
        h->on[i].region = h->on[i].region == &h->region ? r->region : h->on[i].region;
    }
    return CKD_OK;
}

/* A dependency must not state a field that equals that of its record. */
static bool flags_right(bundle_in *b, const record *r) {
    bool right = true;
    for (uint32_t i = 0; i < r->dependency_count; i++, b->flag_at++) {
        right = right && *b->flag_at == record_dependency_flags(r, &r->dependencies[i]);
    }
    return right;
}

static ckd_status check_member(bundle_in *b, const head *h, record *r, uint64_t payload_at) {
    ckd_status status = CKD_E_CORRUPT;
    const char *problem = complete(h, r);
    if (!problem) {
        problem = record_problem(r, &status);
    }
    if (!problem && !flags_right(b, r)) {
        problem = "a dependency repeats a field of its record";
    }
    if (!problem && r->stored_size > b->payload_size - payload_at) {
        problem = "a bundle ends inside the payload of one of its records";
    }
    return problem ? record_problem_at(r, status, problem, b->path, b->bundle->offset, b->err) : CKD_OK;
}

static void place_member(bundle_in *b, const head *h, record *r, size_t i, uint64_t payload_at,
                         uint32_t *hash) {
    memcpy(r->content.bytes, b->hashes + sizeof(hash128) * i, sizeof(hash128));
    for (uint32_t k = 0; k < r->dependency_count; k++) {
        memcpy(h->on[k].content.bytes, b->hashes + sizeof(hash128) * (b->count + (*hash)++), sizeof(hash128));
    }
    const record *bundle = b->bundle;
    uint64_t front = bundle->stored_size - b->payload_size;
    r->bundle = bundle;
    r->offset = bundle->offset;
    r->header_size = (uint32_t)((bundle->header_size + front) / b->count);
    r->payload_offset = bundle->payload_offset + front + payload_at;
}

static ckd_status finish_members(bundle_in *b, uint64_t outside) {
    uint64_t payload_at = 0, before = 0;
    uint32_t hash = 0;
    b->flag_at = b->flags;
    for (size_t i = 0; i < b->count; i++) {
        head *h = &b->heads[i];
        record *r = &b->members[i].record;
        ckd_status status = store_member(b, h, r, i ? &b->members[i - 1].record : NULL);
        THEN(status, check_member(b, h, r, payload_at));
        if (status != CKD_OK) {
            return status;
        }
        if (h->before > outside - before) {
            return corrupt(b, "a record of a bundle has a position beyond the end of the file's records");
        }
        before += h->before;
        place_member(b, h, r, i, payload_at, &hash);
        payload_at += r->stored_size;
        b->members[i].before = before;
    }
    return payload_at == b->payload_size
               ? CKD_OK
               : corrupt(b, "a bundle has bytes that belong to none of its records");
}

ckd_status bundle_decode(bundle_member **members, size_t *count, const bundle_source *from,
                         record_arena *arena, ckd_error *err) {
    bundle_in b = {.bundle = from->bundle, .path = from->path, .err = err, .arena = arena};
    *members = NULL;
    *count = 0;
    ckd_status status = read_front(&b, from->payload);
    THEN(status, take_heads(&b));
    THEN(status, finish_members(&b, from->outside));
    free(b.heads);
    free(b.flags);
    free(b.raw);
    if (status != CKD_OK) {
        free(b.members);
        return status;
    }
    *members = b.members;
    *count = b.count;
    return CKD_OK;
}
