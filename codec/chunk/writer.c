/* Writes a chunk file: header, records in the order of their appends, index, footer. */
#include <stdlib.h>

#include "codec/chunk/wire.h"
#include "codec/chunk/record_wire.h"
#include "codec/common/common.h"

#define WRITE_BUFFER       (1u << 20)
#define INDEX_LEVEL        3
#define INDEX_ZSTD_MINIMUM 64u /* smaller indexes are not compressed */
/* bytes of payload; the header and index entry of a record take about half as much */
#define TINY 512u
#define MANY 64u /* tiny records per file */

struct chunk_scratch {
    bytes file;   /* the file writer's buffer */
    bytes header; /* the record header being written */
    bytes index;  /* raw */
    bytes packed; /* the packed index, or a bundle's payload */
    chunk_gathered gathered;
    bytes shards, key; /* keys of the shards, u64 each; memory for one key */
};

struct chunk_writer {
    file_writer *file;
    char *path;
    chunk_identity identity;
    chunk_scratch *scratch, *own; /* own: allocated by this writer, or NULL */
    uint64_t count;
    uint64_t given;    /* number of unbundled records */
    bool gathers;      /* small records are held back */
    bool gathers_many; /* tiny records are held back once there are many */
    uint64_t tiny;     /* number of tiny records so far */
    uint64_t features; /* required features of the records so far */
    ckd_status failed; /* the first failure, after which records would have wrong offsets */
};

static void put_file_header(bytes *to, const chunk_identity *identity, uint64_t features) {
    bytes_put(to, CHUNK_MAGIC, 8);
    bytes_put_u16(to, CHUNK_VERSION_MAJOR);
    bytes_put_u16(to, CHUNK_VERSION_MINOR);
    bytes_put_u32(to, CHUNK_HEADER_SIZE);
    bytes_put_u64(to, features);
    bytes_put_u64(to, 0); /* optional features */
    wire_put_id(to, &identity->store);
    wire_put_id(to, &identity->file);
    wire_put_id(to, &identity->writer);
    bytes_put_u64(to, to->failed ? 0 : hash64(to->data, to->size));
}

static void put_footer(bytes *to, const chunk_footer *f) {
    size_t start = to->size;
    bytes_put_u64(to, f->index_offset);
    bytes_put_u64(to, f->index_stored);
    bytes_put_u64(to, f->index_raw);
    bytes_put_u64(to, f->record_count);
    wire_put_hash(to, &f->root);
    bytes_put_u64(to, f->index_hash);
    bytes_put_u32(to, f->index_coding);
    bytes_put_u32(to, CHUNK_FOOTER_MAGIC);
    bytes_put_u64(to, to->failed ? 0 : hash64(to->data + start, to->size - start));
}

chunk_scratch *chunk_scratch_create(void) {
    return calloc(1, sizeof(chunk_scratch));
}

void chunk_scratch_free(chunk_scratch *scratch) {
    if (scratch) {
        bytes *const all[] = {&scratch->file,   &scratch->header, &scratch->index,
                              &scratch->packed, &scratch->shards, &scratch->key};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
            bytes_free(all[i]);
        }
        gather_free(&scratch->gathered);
        free(scratch);
    }
}

static void begin_scratch(chunk_scratch *scratch) {
    bytes *const all[] = {&scratch->header, &scratch->index, &scratch->packed, &scratch->shards,
                          &scratch->key};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_reset(all[i]);
    }
    gather_clear(&scratch->gathered);
}

static void writer_free(chunk_writer *w) {
    chunk_scratch_free(w->own);
    free(w->path);
    free(w);
}

ckd_status chunk_writer_create(chunk_writer **out, const char *path, const chunk_identity *identity,
                               ckd_error *err) {
    return chunk_writer_create_in(out, path, identity, NULL, err);
}

ckd_status chunk_writer_create_in(chunk_writer **out, const char *path, const chunk_identity *identity,
                                  chunk_scratch *scratch, ckd_error *err) {
    *out = NULL;
    chunk_writer *w = calloc(1, sizeof(*w));
    if (w) {
        w->path = strdup(path);
        w->identity = *identity;
        w->own = scratch ? NULL : chunk_scratch_create();
        w->scratch = scratch ? scratch : w->own;
    }
    if (w && w->scratch) {
        begin_scratch(w->scratch);
        put_file_header(&w->scratch->header, identity, 0);
    }
    if (!w || !w->path || !w->scratch || w->scratch->header.failed) {
        if (w) {
            writer_free(w);
        }
        return err_nomem(err, sizeof(*w), "a chunk writer");
    }
    ckd_status status = file_create_in(&w->file, path, WRITE_BUFFER, &w->scratch->file, err);
    THEN(status, file_append(w->file, w->scratch->header.data, w->scratch->header.size, err));
    if (status != CKD_OK) {
        chunk_writer_abort(w);
        return status;
    }
    *out = w;
    return CKD_OK;
}

void chunk_writer_gather(chunk_writer *w) {
    w->gathers = true;
}

void chunk_writer_gather_many(chunk_writer *w) {
    w->gathers_many = true;
}

/* Also counts tiny records. The first MANY are written directly. */
static bool decide_to_hold_back(chunk_writer *w, const record *r) {
    bool tiny = w->gathers_many && r->stored_size <= TINY;
    w->tiny += tiny;
    return (w->gathers || (tiny && w->tiny > MANY)) && gather_takes(r, w->scratch->header.size);
}

static ckd_status too_large(const chunk_writer *w, ckd_error *err) {
    return err_set(err, CKD_E_INVALID,
                   "a record header of %zu bytes, or an index of %zu, is more than the format allows",
                   w->scratch->header.size, w->scratch->index.size);
}

/* Encodes the header into w->scratch->header. */
static ckd_status encode_record(chunk_writer *w, const record *r, ckd_error *err) {
    ckd_status ignored;
    const char *problem = record_problem(r, &ignored);
    if (problem) {
        return err_in_tensor(err, err_set(err, CKD_E_INVALID, "a record cannot be written: %s", problem),
                             r->tensor->name);
    }
    bytes_clear(&w->scratch->header);
    record_encode(&w->scratch->header, r);
    if (w->scratch->header.failed) {
        return err_nomem(err, w->scratch->header.size, "a record header");
    }
    return w->scratch->header.size > RECORD_HEADER_MAX
               ? err_in_tensor(err, too_large(w, err), r->tensor->name)
               : CKD_OK;
}

/* Writes a record and adds it to the index. */
static ckd_status write_record(chunk_writer *w, const void *header, size_t header_size, const void *payload,
                               size_t payload_size, ckd_error *err) {
    wire_put_varint(&w->scratch->index, 0); /* no gap before it */
    bytes_put(&w->scratch->index, header, header_size);
    if (w->scratch->index.failed) {
        return err_nomem(err, w->scratch->index.size, "a chunk file's index");
    }
    if (w->scratch->index.size > CHUNK_INDEX_MAX) {
        return too_large(w, err);
    }
    ckd_status status = file_append(w->file, header, header_size, err);
    THEN(status, file_append(w->file, payload, payload_size, err));
    w->count += status == CKD_OK;
    return status;
}

static ckd_status write_bundle(chunk_writer *w, ckd_error *err) {
    record bundle;
    record_tensor tensor;
    bytes *payload = bytes_reset(&w->scratch->packed);
    ckd_status status = gather_bundle(&bundle, &tensor, payload, &w->scratch->gathered, err);
    if (status == CKD_OK) {
        bundle.checksum = hash64(payload->data, payload->size);
        status = encode_record(w, &bundle, err);
    }
    if (status == CKD_OK) {
        w->features |= CHUNK_BUNDLES;
        status = write_record(w, w->scratch->header.data, w->scratch->header.size, payload->data,
                              payload->size, err);
    }
    return status;
}

/*
 * Writes the held-back records. Several become a bundle. A single one is written directly, unless that would change the
 * order. Uses w->scratch->header.
 */
static ckd_status flush_gathered(chunk_writer *w, ckd_error *err) {
    chunk_gathered *g = &w->scratch->gathered;
    ckd_status status = CKD_OK;
    if (g->count == 1 && g->before[0] == w->given) {
        status = write_record(w, g->headers.data, g->headers.size, g->payloads.data, g->payloads.size, err);
        w->given++;
    } else if (g->count) {
        status = write_bundle(w, err);
    }
    gather_clear(g);
    return status;
}

static ckd_status hold_back(chunk_writer *w, const record *r, const void *payload, ckd_error *err) {
    ckd_status status = CKD_OK;
    if (!gather_fits(&w->scratch->gathered, r)) {
        status = flush_gathered(w, err);
        if (status == CKD_OK) {
            status = encode_record(w, r, err); /* write_bundle overwrote its header */
        }
    }
    return status == CKD_OK
               ? gather_add(&w->scratch->gathered, r, &w->scratch->header, payload, w->given, err)
               : status;
}

uint64_t chunk_shard_key(bytes *scratch, const char *tensor, const ckd_region *region, uint32_t ndim) {
    bytes_clear(scratch);
    record_put_name(scratch, tensor);
    record_put_region(scratch, region, ndim);
    return scratch->failed ? 0 : hash64(scratch->data, scratch->size);
}

const uint64_t *chunk_writer_shards(const chunk_writer *w, size_t *count) {
    *count = w->scratch->shards.size / sizeof(uint64_t);
    return (const uint64_t *)(const void *)w->scratch->shards.data;
}

static ckd_status record_shard(chunk_writer *w, const record *r, ckd_error *err) {
    if (r->kind != RECORD_BLOCK || r->first != 0) {
        return CKD_OK;
    }
    uint64_t key = chunk_shard_key(&w->scratch->key, r->tensor->name, r->region, r->tensor->ndim);
    bytes_put(&w->scratch->shards, &key, sizeof(key));
    return w->scratch->key.failed || w->scratch->shards.failed
               ? err_nomem(err, w->scratch->shards.size, "the shards of a chunk file")
               : CKD_OK;
}

ckd_status chunk_writer_append(chunk_writer *w, record *r, const void *payload, ckd_error *err) {
    if (w->failed != CKD_OK) {
        return err_in_file(
            err,
            err_set(err, w->failed, "an earlier write of %s failed: drop it and write a new file", w->path),
            w->path);
    }
    r->checksum = hash64(payload, r->stored_size);
    r->offset = r->payload_offset = r->header_size = 0; /* unknown while it is held back */
    ckd_status status =
        r->kind == RECORD_BUNDLE
            ? err_set(err, CKD_E_INVALID, "a bundle cannot be appended: the writer makes bundles itself")
            : encode_record(w, r, err);
    if (status == CKD_OK && decide_to_hold_back(w, r)) {
        status = hold_back(w, r, payload, err);
    } else if (status == CKD_OK) {
        r->offset = file_written(w->file);
        r->header_size = (uint32_t)w->scratch->header.size;
        r->payload_offset = r->offset + r->header_size;
        status =
            write_record(w, w->scratch->header.data, w->scratch->header.size, payload, r->stored_size, err);
        w->given += status == CKD_OK;
    }
    if (status == CKD_OK) {
        w->features |= record_shares_rows(r) ? CHUNK_ROW_SIDES : 0;
        status = record_shard(w, r, err);
    }
    w->failed = status;
    return status;
}

uint64_t chunk_writer_size(const chunk_writer *w) {
    return file_written(w->file) + w->scratch->gathered.headers.size + w->scratch->gathered.payloads.size;
}

/* Appends the index, compressed if that is smaller, and describes it in the footer. */
static ckd_status append_index(chunk_writer *w, chunk_footer *footer, ckd_error *err) {
    footer->index_offset = file_written(w->file);
    footer->index_raw = footer->index_stored = w->scratch->index.size;
    footer->record_count = w->count;
    footer->root = hash128_of(w->scratch->index.data, w->scratch->index.size);
    footer->index_coding = INDEX_RAW;
    const void *stored = w->scratch->index.data;
    if (w->scratch->index.size >= INDEX_ZSTD_MINIMUM) {
        size_t bound = zstd_once_bound(w->scratch->index.size);
        void *to = bytes_extend(bytes_reset(&w->scratch->packed), bound);
        size_t size =
            to ? zstd_once_pack(to, bound, w->scratch->index.data, w->scratch->index.size, INDEX_LEVEL) : 0;
        if (size == 0) {
            return err_nomem(err, bound, "a compressed index");
        }
        if (size < w->scratch->index.size) {
            footer->index_coding = INDEX_ZSTD;
            footer->index_stored = size;
            stored = to;
        }
    }
    footer->index_hash = hash64(stored, footer->index_stored);
    return file_append(w->file, stored, footer->index_stored, err);
}

/* Rewrites the header: the required features are known only at the end. */
static ckd_status rewrite_file_header(chunk_writer *w, ckd_error *err) {
    bytes_clear(&w->scratch->header);
    put_file_header(&w->scratch->header, &w->identity, w->features);
    return w->scratch->header.failed
               ? err_nomem(err, CHUNK_HEADER_SIZE, "a chunk file's header")
               : file_write_at(w->file, 0, w->scratch->header.data, w->scratch->header.size, err);
}

static ckd_status append_end(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err) {
    chunk_footer footer;
    if (w->failed != CKD_OK) {
        return err_in_file(err, err_set(err, w->failed, "an earlier write of %s failed", w->path), w->path);
    }
    ckd_status status = flush_gathered(w, err);
    THEN(status, append_index(w, &footer, err));
    if (status != CKD_OK) {
        return status;
    }
    bytes_clear(&w->scratch->header);
    put_footer(&w->scratch->header, &footer);
    if (w->scratch->header.failed) {
        return err_nomem(err, CHUNK_FOOTER_SIZE, "a chunk file's footer");
    }
    status = file_append(w->file, w->scratch->header.data, w->scratch->header.size, err);
    if (status == CKD_OK && w->features) {
        status = rewrite_file_header(w, err);
    }
    if (status == CKD_OK) {
        *root = footer.root;
        *size = file_written(w->file);
    }
    return status;
}

static ckd_status close_file(chunk_writer *w, ckd_error *err) {
    ckd_status status = file_close(w->file, err);
    w->file = NULL;
    if (status != CKD_OK) {
        file_remove(w->path, true, NULL); /* report the first error */
    }
    return status;
}

ckd_status chunk_writer_close(chunk_writer *w, uint64_t *size, ckd_error *err) {
    hash128 root;
    *size = 0;
    ckd_status status = append_end(w, &root, size, err);
    THEN(status, close_file(w, err));
    if (status != CKD_OK) {
        file_discard(w->file);
        *size = 0;
    }
    writer_free(w);
    return status;
}

ckd_status chunk_writer_finish_durable(chunk_writer *w, hash128 *root, uint64_t *size, ckd_error *err) {
    *root = (hash128){{0}};
    *size = 0;
    ckd_status status = append_end(w, root, size, err);
    THEN(status, file_sync(w->file, err));
    THEN(status, close_file(w, err));
    if (status != CKD_OK) {
        file_discard(w->file);
        *root = (hash128){{0}};
        *size = 0;
    }
    writer_free(w);
    return status;
}

void chunk_writer_abort(chunk_writer *w) {
    if (w) {
        file_discard(w->file);
        writer_free(w);
    }
}
