/* Opens a chunk file and reads from it. Trusts nothing in the file: see codec/FORMAT.md, "Chunk files". */
#include <stdlib.h>

#include "codec/chunk/wire.h"
#include "codec/common/common.h"

#define COMPARE_SLICE 4096u
/*
 * Files up to this size are read whole when opened. A load through a long chain needs a little of many small files, and
 * separate reads would take longer.
 */
#define CHUNK_KEEP (1u << 18)

static uint64_t footer_offset(const chunk *c) {
    return c->size - CHUNK_FOOTER_SIZE;
}

/* ---- header and footer ---- */

static ckd_status read_file_header(chunk *c, uint64_t *features, ckd_error *err) {
    const char *path = file_path(c->file);
    uint8_t data[CHUNK_HEADER_SIZE];
    ckd_status status = file_read_at(c->file, 0, data, sizeof(data), err);
    if (status != CKD_OK) {
        return status;
    }
    if (memcmp(data, CHUNK_MAGIC, 8) != 0) {
        return err_corrupt(err, path, 0, "this is not a chunk file, or its beginning is damaged");
    }
    reader in = reader_of(data + 8, sizeof(data) - 8);
    unsigned major = reader_u16(&in);
    unsigned minor = reader_u16(&in);
    uint32_t header_size = reader_u32(&in);
    uint64_t required = *features = reader_u64(&in);
    reader_u64(&in); /* optional features, which a reader may ignore */
    c->identity.store = wire_id(&in);
    c->identity.file = wire_id(&in);
    c->identity.writer = wire_id(&in);
    if (header_size == CHUNK_HEADER_SIZE &&
        !wire_hash_matches(reader_u64(&in), hash64(data, sizeof(data) - 8))) {
        return err_corrupt(err, path, 0, "the file header's checksum does not match");
    }
    if (major != CHUNK_VERSION_MAJOR) {
        return err_unsupported(
            err, path, 8, "the chunk file has format version %u.%u, but this build reads %u: use a newer one",
            major, minor, CHUNK_VERSION_MAJOR);
    }
    if (header_size != CHUNK_HEADER_SIZE) {
        return err_corrupt(err, path, 12, "a file header of %u bytes is impossible", header_size);
    }
    if (required & ~CHUNK_FEATURES) {
        return err_unsupported(
            err, path, 16, "the chunk file needs features 0x%llx, which this build lacks: use a newer one",
            (unsigned long long)(required & ~CHUNK_FEATURES));
    }
    return CKD_OK;
}

/* Checks that the numbers in the footer are possible. The file size then bounds the memory of the index. */
static const char *footer_problem(const chunk *c, const chunk_footer *f) {
    uint64_t end;
    if (f->index_offset < CHUNK_HEADER_SIZE || !size_add(&end, f->index_offset, f->index_stored) ||
        end != footer_offset(c)) {
        return "the index does not lie between records and footer";
    }
    uint64_t records = f->index_offset - CHUNK_HEADER_SIZE;
    if (f->record_count > records / RECORD_HEADER_MIN) {
        return "the file is too small for its number of records";
    }
    /* Every header in the index is also in the file. The gap before it takes at most three bytes in the index. */
    if (f->index_raw > CHUNK_INDEX_MAX || f->index_raw > records + 3 * f->record_count ||
        f->index_raw < f->record_count * (RECORD_HEADER_MIN + 1)) {
        return "the index's size does not fit the number of records";
    }
    if (f->index_coding > INDEX_ZSTD) {
        return "the index's coding is unknown";
    }
    bool plausible =
        f->index_coding == INDEX_RAW ? f->index_stored == f->index_raw : f->index_stored < f->index_raw;
    return plausible ? NULL : "the index's sizes contradict each other";
}

static ckd_status read_footer(chunk *c, chunk_footer *f, ckd_error *err) {
    const char *path = file_path(c->file);
    uint8_t data[CHUNK_FOOTER_SIZE];
    ckd_status status = file_read_at(c->file, footer_offset(c), data, sizeof(data), err);
    if (status != CKD_OK) {
        return status;
    }
    reader in = reader_of(data, sizeof(data));
    f->index_offset = reader_u64(&in);
    f->index_stored = reader_u64(&in);
    f->index_raw = reader_u64(&in);
    f->record_count = reader_u64(&in);
    f->root = wire_hash(&in);
    f->index_hash = reader_u64(&in);
    f->index_coding = reader_u32(&in);
    if (reader_u32(&in) != CHUNK_FOOTER_MAGIC) {
        return err_corrupt(err, path, footer_offset(c),
                           "the chunk file has no footer: it is cut off, or its end is damaged");
    }
    if (!wire_hash_matches(reader_u64(&in), hash64(data, sizeof(data) - 8))) {
        return err_corrupt(err, path, footer_offset(c), "the footer's checksum does not match");
    }
    const char *problem = footer_problem(c, f);
    if (!problem) {
        file_let_close(c->file, footer_offset(c), data, sizeof(data)); /* the root hash identifies the file */
    }
    return problem ? err_corrupt(err, path, footer_offset(c), "%s", problem) : CKD_OK;
}

/* ---- the index ---- */

/* Requires exactly one frame that states the raw size, so every byte of the index has a meaning. */
static ckd_status decompress_index(const char *path, void *raw, const void *stored, const chunk_footer *f,
                                   ckd_error *err) {
    ckd_status status = zstd_once_unpack(raw, f->index_raw, stored, f->index_stored);
    if (status == CKD_E_NOMEM) {
        return err_nomem(err, f->index_raw, "decompressing a chunk file's index");
    }
    return status == CKD_OK
               ? CKD_OK
               : err_corrupt(err, path, f->index_offset, "the index does not decompress to its size");
}

/* Reads the raw index into `raw`, which has f->index_raw bytes. */
static ckd_status unpack_index(const chunk *c, uint8_t *raw, const chunk_footer *f, ckd_error *err) {
    const char *path = file_path(c->file);
    bool packed = f->index_coding == INDEX_ZSTD;
    uint8_t *stored = packed ? malloc(f->index_stored + 1) : raw;
    if (!stored) {
        return err_nomem(err, f->index_stored, "a chunk file's index");
    }
    ckd_status status = file_read_at(c->file, f->index_offset, stored, f->index_stored, err);
    if (status == CKD_OK && !wire_hash_matches(f->index_hash, hash64(stored, f->index_stored))) {
        status = err_corrupt(err, path, f->index_offset, "the index's checksum does not match");
    }
    if (status == CKD_OK && packed) {
        status = decompress_index(path, raw, stored, f, err);
    }
    if (packed) {
        free(stored);
    }
    return status;
}

static bool root_matches(const chunk_footer *f, const uint8_t *raw) {
    hash128 root = hash128_of(raw, f->index_raw);
    return wire_hash_matches(load_le64(f->root.bytes), load_le64(root.bytes)) &&
           wire_hash_matches(load_le64(f->root.bytes + 8), load_le64(root.bytes + 8));
}

/* Parses the raw index into records, which must follow each other in the file, without overlap, up to the index. */
static ckd_status parse_index(chunk *c, const uint8_t *raw, const chunk_footer *f, ckd_error *err) {
    const char *path = file_path(c->file);
    record *records = calloc(f->record_count + 1, sizeof(*records));
    c->outer = records;
    if (!records) {
        return err_nomem(err, f->record_count * sizeof(*records), "records");
    }
    reader in = reader_of(raw, f->index_raw);
    uint64_t end = CHUNK_HEADER_SIZE;
    for (uint64_t i = 0; i < f->record_count; i++) {
        record *r = &records[i];
        uint64_t start = end + wire_varint_max(&in, CHUNK_GAP_MAX);
        if (in.failed) {
            return err_corrupt(err, path, f->index_offset,
                               "the index ends early, or leaves too large a gap in the file");
        }
        ckd_status status =
            record_decode(r, &in, &c->arena, i ? r - 1 : NULL, &(record_place){path, start}, err);
        if (status != CKD_OK) {
            return status;
        }
        /* start is at most index_offset + CHUNK_GAP_MAX, the header at most 1 MiB: only the payload can overflow */
        if (!size_add(&end, start + r->header_size, r->stored_size) || end > f->index_offset) {
            return err_corrupt(err, path, start, "a record does not lie between file header and index");
        }
    }
    if (reader_left(&in) != 0 || end != f->index_offset) {
        return err_corrupt(err, path, f->index_offset, "the index does not end where the records do");
    }
    c->outer_count = f->record_count;
    return CKD_OK;
}

static ckd_status read_index(chunk *c, const chunk_footer *f, ckd_error *err) {
    uint8_t *raw = malloc(f->index_raw + 1);
    if (!raw) {
        return err_nomem(err, f->index_raw, "a chunk file's index");
    }
    ckd_status status = unpack_index(c, raw, f, err);
    if (status == CKD_OK && !root_matches(f, raw)) {
        status =
            err_corrupt(err, file_path(c->file), f->index_offset, "the root hash does not match the index");
    }
    THEN(status, parse_index(c, raw, f, err));
    free(raw);
    return status;
}

ckd_status chunk_check_rows(const chunk *c, const record *r, ckd_error *err) {
    return c->has_shared_rows || !record_shares_rows(r)
               ? CKD_OK
               : err_corrupt(err, file_path(c->file), r->offset,
                             "a block shares its rows, but the file's header does not declare shared rows");
}

/* A reader must learn of an unknown feature from the header, not from a record. */
static ckd_status check_features(chunk *c, uint64_t features, ckd_error *err) {
    ckd_status status = CKD_OK;
    c->has_shared_rows = features & CHUNK_ROW_SIDES;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        status = chunk_check_rows(c, &c->outer[i], err);
        if (c->outer[i].kind == RECORD_BUNDLE && !(features & CHUNK_BUNDLES)) {
            status = err_corrupt(err, file_path(c->file), c->outer[i].offset,
                                 "there is a bundle, but the file's header does not declare bundles");
        }
    }
    return status;
}

static ckd_status open_all(chunk *c, const char *path, ckd_error *err) {
    chunk_footer footer;
    uint64_t features = 0;
    ckd_status status = file_open_read(&c->file, path, err);
    if (status != CKD_OK) {
        return status;
    }
    c->size = file_size(c->file);
    if (c->size < CHUNK_HEADER_SIZE + CHUNK_FOOTER_SIZE) {
        return err_corrupt(err, path, c->size, "%llu bytes are too few for a chunk file: it is cut off",
                           (unsigned long long)c->size);
    }
    status = file_cache(c->file, CHUNK_KEEP, err);
    THEN(status, read_file_header(c, &features, err));
    THEN(status, read_footer(c, &footer, err));
    THEN(status, read_index(c, &footer, err));
    THEN(status, check_features(c, features, err));
    if (status == CKD_OK) {
        c->root = footer.root;
        c->index_offset = footer.index_offset;
        c->index_stored = footer.index_stored;
        c->index_raw = footer.index_raw;
    }
    return status;
}

ckd_status chunk_open_bundled(chunk **out, const char *path, ckd_error *err) {
    *out = NULL;
    chunk *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(err, sizeof(*c), "a chunk file's handle");
    }
    ckd_status status = open_all(c, path, err);
    if (status != CKD_OK) {
        chunk_close(c);
        return status;
    }
    *out = c;
    return CKD_OK;
}

ckd_status chunk_open(chunk **out, const char *path, ckd_error *err) {
    const chunk_records *all;
    ckd_status status = chunk_open_bundled(out, path, err);
    THEN(status, chunk_records_of(&all, *out, NULL, err));
    if (status == CKD_OK) {
        (*out)->records = all->records;
        (*out)->record_count = all->count;
    } else {
        chunk_close(*out);
        *out = NULL;
    }
    return status;
}

chunk *chunk_retain(chunk *c) {
    c->more_holders++;
    return c;
}

void chunk_close(chunk *c) {
    if (!c) {
        return;
    }
    if (c->more_holders) {
        c->more_holders--;
        return;
    }
    if (c->file) {
        file_close_read(c->file);
    }
    arena_free(&c->arena);
    chunk_records_free(c);
    free((void *)c->outer);
    free(c);
}

/* ---- records ---- */

/* Adds the name of the tensor to an error. Bundles have none. */
static ckd_status in_tensor_of(const record *r, ckd_status status, ckd_error *err) {
    return status == CKD_OK || r->kind == RECORD_BUNDLE ? status
                                                        : err_in_tensor(err, status, r->tensor->name);
}

size_t chunk_record_number(const chunk *c, const record *r) {
    size_t low = 0, high = c->outer_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (c->outer[middle].offset < r->offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

ckd_status chunk_check_payload(const chunk *c, const record *r, const void *payload, ckd_error *err) {
    bool unchanged = r->bundle && file_cached(c->file, r->payload_offset, r->stored_size);
    ckd_status status = CKD_OK;
    if (!unchanged && !wire_hash_matches(r->checksum, hash64(payload, r->stored_size))) {
        status = err_corrupt(err, file_path(c->file), r->payload_offset,
                             "the checksum of a record's payload does not match");
    }
    return in_tensor_of(r, status, err);
}

ckd_status chunk_read_payload(const chunk *c, const record *r, void *to, ckd_error *err) {
    ckd_status status = file_read_at(c->file, r->payload_offset, to, r->stored_size, err);
    return status == CKD_OK ? chunk_check_payload(c, r, to, err) : in_tensor_of(r, status, err);
}

/* Checks that `size` bytes of the file at `offset` equal `expected`. */
static ckd_status compare_bytes(const chunk *c, uint64_t offset, const uint8_t *expected, size_t size,
                                const char *what, ckd_error *err) {
    uint8_t slice[COMPARE_SLICE];
    for (size_t done = 0; done < size;) {
        size_t part = size - done < sizeof(slice) ? size - done : sizeof(slice);
        ckd_status status = file_read_at(c->file, offset + done, slice, part, err);
        if (status != CKD_OK) {
            return status;
        }
        for (size_t i = 0; i < part; i++) {
            if (slice[i] != (expected ? expected[done + i] : 0)) {
                return err_corrupt(err, file_path(c->file), offset + done + i, "%s", what);
            }
        }
        done += part;
    }
    return CKD_OK;
}

ckd_status chunk_header_in_store(uint8_t to[CHUNK_FILE_HEADER], const chunk *c, const ckd_id *store,
                                 ckd_error *err) {
    size_t covered = CHUNK_HEADER_SIZE - sizeof(uint64_t);
    ckd_status status = file_read_at(c->file, 0, to, CHUNK_HEADER_SIZE, err);
    if (status == CKD_OK) {
        memcpy(to + CHUNK_HEADER_STORE, store->bytes, sizeof(store->bytes));
        store_le64(to + covered, hash64(to, covered));
    }
    return status;
}

ckd_status chunk_check_record(const chunk *c, const record *r, ckd_error *err) {
    uint64_t gap = CHUNK_HEADER_SIZE;
    if (r > c->outer) {
        gap = r[-1].payload_offset + r[-1].stored_size;
    }
    ckd_status status =
        compare_bytes(c, gap, NULL, r->offset - gap, "the bytes in front of a record are not zero", err);
    bytes header = {0};
    if (status == CKD_OK) {
        record_encode(&header, r);
        status = header.failed ? err_nomem(err, r->header_size, "a record header")
                               : compare_bytes(c, r->offset, header.data, header.size,
                                               "a record's header differs from its copy in the index", err);
    }
    bytes_free(&header);
    return in_tensor_of(r, status, err);
}
