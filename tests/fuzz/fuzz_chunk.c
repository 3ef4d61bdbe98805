/*
 * Chunk files, record headers, bundles and measures from any bytes. In fuzz builds all checksums match, so
 * that the parsing is tested. It must stay within the file and the memory it allocated, and accepted values
 * must be valid.
 */
#include <stdlib.h>

#include "codec/chunk/bundle.h"
#include "codec/chunk/wire.h"
#include "codec/chunk/chunk.h"
#include "codec/chunk/record_wire.h"
#include "tests/support/fuzz.h"
#include "tests/support/fuzz_file.h"

#define PAYLOAD_MAX (1u << 20)

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

/* Encoding a decoded header gives the same bytes. In a fuzz build the checksum may be any. */
static void check_canonical(const record *r, const uint8_t *header) {
    bytes again = {0};
    record_encode(&again, r);
    require(!again.failed && again.size == r->header_size);
    require(memcmp(again.data, header, again.size - 8) == 0);
    bytes_free(&again);
}

static void check_record(const record *r) {
    uint64_t elements, end;
    ckd_status status;
    require(record_problem(r, &status) == NULL);
    require(r->tensor->name[0] && strlen(r->tensor->name) <= CKD_NAME_MAX);
    require(region_elements(&elements, r->region, r->tensor->ndim, r->tensor->shape));
    require(size_add(&end, r->first, r->count) && end <= elements);
    if (r->kind == RECORD_BLOCK) {
        require(r->count <= CKD_BLOCK_ELEMENTS && r->raw_size <= 8 * CKD_BLOCK_ELEMENTS);
        require(r->stored_size <= r->raw_size);
    }
    for (uint32_t i = 0; i < r->dependency_count; i++) {
        require(strlen(r->dependencies[i].tensor) <= CKD_NAME_MAX);
    }
}

static void try_headers(const uint8_t *data, size_t size) {
    record_arena arena = {0};
    reader in = reader_of(data, size);
    record records[2], *r = &records[0], *previous = NULL;
    for (size_t at = 0; record_decode(r, &in, &arena, previous, &(record_place){"fuzz", at}, NULL) == CKD_OK;
         at = in.at) {
        require(r->header_size == in.at - at);
        check_record(r);
        check_canonical(r, data + at);
        previous = r;
        r = r == &records[0] ? &records[1] : &records[0];
    }
    arena_free(&arena);
}

/* Parses the payload of a bundle. Its records are within it, and in order. */
static void try_bundle(const uint8_t *data, size_t size) {
    record_arena arena = {0};
    bundle_member *members;
    size_t count;
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    record_tensor tensor = {.name = BUNDLE_NAME, .checkpoint = {{5}}, .role = CKD_ROLE_OTHER};
    record r = {.kind = RECORD_BUNDLE, .tensor = &tensor, .region = &whole, .stored_size = size};
    ckd_status status = bundle_decode(&members, &count, &(bundle_source){&r, data, 3, "fuzz"}, &arena, NULL);
    require((status == CKD_OK) == (members != NULL) && (count > 0) == (members != NULL));
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        const record *m = &members[i].record;
        check_record(m);
        require(m->payload_offset >= end && members[i].before <= 3);
        require(i == 0 || members[i].before >= members[i - 1].before);
        end = m->payload_offset + m->stored_size;
        require(end <= size);
    }
    require(count == 0 || end == size);
    free(members);
    arena_free(&arena);
}

/*
 * Parses a table of measures. An accepted one ascends, has no negative numbers, and survives being written
 * again.
 */
static void try_measures(const uint8_t *data, size_t size) {
    measures_entry *entries, *again;
    size_t count, count_again;
    if (measures_decode(&entries, &count, data, size, &(record_place){"fuzz", 0}, NULL) != CKD_OK) {
        require(entries == NULL && count == 0);
        return;
    }
    bytes raw = {0};
    for (size_t i = 0; i < count; i++) {
        const measures *m = &entries[i].measures;
        require(i == 0 || entries[i].shard > entries[i - 1].shard);
        require(!(m->error_squares < 0) && !(m->value_squares < 0) && !(m->max_error < 0));
        require(!(m->direction_change < 0) && !(m->movement < 0));
    }
    measures_encode(&raw, entries, count);
    require(!raw.failed);
    require(measures_decode(&again, &count_again, raw.data, raw.size, &(record_place){"fuzz", 0}, NULL) ==
            CKD_OK);
    require(count_again == count && again[count - 1].shard == entries[count - 1].shard);
    free(entries);
    free(again);
    bytes_free(&raw);
}

static void try_payload(const chunk *c, const record *r) {
    ckd_error err;
    if (r->stored_size <= PAYLOAD_MAX) {
        void *payload = malloc(r->stored_size + 1);
        require(payload != NULL);
        (void)chunk_read_payload(c, r, payload, &err);
        free(payload);
    }
}

static void try_file(const char *path) {
    chunk *c;
    ckd_error err;
    if (chunk_open(&c, path, &err) != CKD_OK) {
        require(c == NULL && err.message[0]);
        return;
    }
    uint64_t end = CHUNK_HEADER_SIZE;
    for (size_t i = 0; i < c->outer_count; i++) {
        const record *r = &c->outer[i];
        require(r->offset >= end && r->payload_offset == r->offset + r->header_size && !r->bundle);
        end = r->payload_offset + r->stored_size;
        require(end <= c->index_offset);
        check_record(r);
        (void)chunk_check_record(c, r, &err);
        try_payload(c, r);
    }
    for (size_t i = 0; i < c->record_count; i++) {
        const record *r = &c->records[i], *b = r->bundle;
        require(r->kind != RECORD_BUNDLE && chunk_record_number(c, r) < c->outer_count);
        check_record(r);
        if (b) {
            require(b >= c->outer && b < c->outer + c->outer_count && b->kind == RECORD_BUNDLE);
            require(r->offset == b->offset && r->payload_offset >= b->payload_offset);
            require(r->payload_offset + r->stored_size <= b->payload_offset + b->stored_size);
        }
        try_payload(c, r);
    }
    chunk_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    try_file(fuzz_file(data, size));
    try_headers(data, size);
    if (size <= RECORD_BUNDLE_MAX) {
        try_bundle(data, size);
        try_measures(data, size);
    }
    return 0;
}
