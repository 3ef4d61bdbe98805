/*
 * Chunk files: round trips, every flipped bit and every truncation, and files with right checksums and wrong
 * contents.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>
#include <zstd.h>

#include "codec/chunk/wire.h"
#include "tests/support/samples.h"
#include "tests/support/tempdir.h"

typedef struct fixture {
    char *dir;
    char path[512];
    record records[SAMPLE_COUNT];
    uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES];
    hash128 root;
    uint64_t size;
    bytes data; /* the contents of the file */
} fixture;

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof(*f));
    f->dir = tempdir_create();
    snprintf(f->path, sizeof(f->path), "%s/sample.ckd", f->dir);
    sample_records(f->records, f->payloads);
    sample_write(f->path, f->records, f->payloads, SAMPLE_COUNT, &f->root, &f->size);
    assert_int_equal(file_read_all(&f->data, f->path, 1 << 20, NULL), CKD_OK);
    assert_int_equal(f->data.size, f->size);
    *state = f;
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    bytes_free(&f->data);
    tempdir_remove(f->dir);
    free(f);
    return 0;
}

static void put_file(const char *path, const void *data, size_t size) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
}

/* Opens a file, checks every record and reads every payload: all checks that find damage. */
static ckd_status check_all(const char *path, ckd_error *err) {
    chunk *c;
    ckd_status status = chunk_open(&c, path, err);
    if (status != CKD_OK) {
        assert_null(c);
        return status;
    }
    for (size_t i = 0; i < c->record_count && status == CKD_OK; i++) {
        status = chunk_check_record(c, &c->records[i], err);
        uint8_t *payload = malloc(c->records[i].stored_size + 1);
        if (status == CKD_OK) {
            status = chunk_read_payload(c, &c->records[i], payload, err);
        }
        free(payload);
    }
    chunk_close(c);
    return status;
}

static void test_round_trip(void **state) {
    fixture *f = *state;
    chunk *c;
    ckd_error err;
    assert_int_equal(chunk_open(&c, f->path, &err), CKD_OK);
    ckd_id store = sample_id(1), file = sample_id(2), writer = sample_id(3);
    assert_memory_equal(&c->identity.store, &store, 16);
    assert_memory_equal(&c->identity.file, &file, 16);
    assert_memory_equal(&c->identity.writer, &writer, 16);
    assert_true(hash128_equal(&c->root, &f->root));
    assert_int_equal(c->size, f->size);
    assert_int_equal(c->record_count, SAMPLE_COUNT);
    assert_int_equal(c->index_offset + c->index_stored + CHUNK_FOOTER_SIZE, f->size);
    uint64_t headers = 0;
    for (size_t i = 0; i < SAMPLE_COUNT; i++) {
        const record *r = &c->records[i];
        uint8_t payload[SAMPLE_BYTES];
        assert_int_equal(r->offset, f->records[i].offset);
        assert_int_equal(r->header_size, f->records[i].header_size);
        assert_int_equal(r->kind, f->records[i].kind);
        assert_true(r->checksum == f->records[i].checksum);
        assert_string_equal(r->tensor->name, f->records[i].tensor->name);
        assert_int_equal(chunk_check_record(c, r, &err), CKD_OK);
        assert_int_equal(chunk_read_payload(c, r, payload, &err), CKD_OK);
        assert_memory_equal(payload, f->payloads[i], r->stored_size);
        headers += r->header_size;
    }
    assert_int_equal(c->index_raw, headers + SAMPLE_COUNT);
    assert_int_equal(c->records[0].offset, CHUNK_HEADER_SIZE);
    assert_ptr_equal(c->records[0].tensor, c->records[1].tensor);
    chunk_close(c);
    chunk_close(NULL);
}

/* Overwrites one byte of a file. */
static void poke(int fd, size_t at, uint8_t byte) {
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
}

static void test_every_flipped_bit_is_found(void **state) {
    fixture *f = *state;
    assert_int_equal(check_all(f->path, NULL), CKD_OK);
    int fd = open(f->path, O_WRONLY);
    for (size_t bit = 0; bit < 8 * f->data.size; bit++) {
        ckd_error err;
        uint8_t old = f->data.data[bit / 8];
        poke(fd, bit / 8, old ^ (uint8_t)(1u << bit % 8));
        ckd_status status = check_all(f->path, &err);
        if (status != CKD_E_CORRUPT || err.status != CKD_E_CORRUPT || err.file[0] == '\0') {
            fail_msg("bit %zu of byte %zu: %s", bit % 8, bit / 8, ckd_status_name(status));
        }
        poke(fd, bit / 8, old);
    }
    close(fd);
    assert_int_equal(check_all(f->path, NULL), CKD_OK);
}

static void test_every_replaced_byte_is_found(void **state) {
    fixture *f = *state;
    int fd = open(f->path, O_WRONLY);
    for (size_t at = 0; at < f->data.size; at++) {
        static const uint8_t values[] = {0x00, 0xff, 0x7f, 0x20};
        for (size_t v = 0; v < sizeof(values); v++) {
            if (f->data.data[at] != values[v]) {
                poke(fd, at, values[v]);
                assert_int_equal(check_all(f->path, NULL), CKD_E_CORRUPT);
            }
        }
        poke(fd, at, f->data.data[at]);
    }
    close(fd);
    assert_int_equal(check_all(f->path, NULL), CKD_OK);
}

static void test_every_truncation_is_found(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/cut", f->dir);
    for (size_t size = 0; size < f->data.size; size++) {
        ckd_error err;
        put_file(path, f->data.data, size);
        assert_int_equal(chunk_open(&(chunk *){NULL}, path, &err), CKD_E_CORRUPT);
        assert_string_equal(err.file, path);
    }
    /* Added bytes, or bytes missing at the beginning, are found, too. */
    uint8_t *longer = calloc(1, f->data.size + 1);
    memcpy(longer, f->data.data, f->data.size);
    put_file(path, longer, f->data.size + 1);
    assert_int_equal(check_all(path, NULL), CKD_E_CORRUPT);
    free(longer);
    put_file(path, f->data.data + 1, f->data.size - 1);
    assert_int_equal(check_all(path, NULL), CKD_E_CORRUPT);
}

static void test_errors_say_where(void **state) {
    fixture *f = *state;
    ckd_error err;
    chunk *c;
    char path[600];
    snprintf(path, sizeof(path), "%s/where", f->dir);
    uint64_t at = f->records[2].offset + f->records[2].header_size;
    f->data.data[at + 3] ^= 1;
    put_file(path, f->data.data, f->data.size);
    assert_int_equal(chunk_open(&c, path, &err), CKD_OK);
    uint8_t payload[SAMPLE_BYTES];
    assert_int_equal(chunk_read_payload(c, &c->records[1], payload, &err), CKD_OK);
    assert_int_equal(chunk_read_payload(c, &c->records[2], payload, &err), CKD_E_CORRUPT);
    assert_string_equal(err.tensor, "exp_avg.layer.0.weight");
    assert_string_equal(err.file, path);
    assert_int_equal(err.offset, at);
    chunk_close(c);
    f->data.data[at + 3] ^= 1;
    assert_int_equal(chunk_open(&c, "/nowhere/at/all.ckd", &err), CKD_E_NOT_FOUND);
    assert_null(c);
}

static void reseal_header(bytes *b) {
    store_le64(b->data + 80, hash64(b->data, 80));
}

static void reseal_footer(bytes *b) {
    uint8_t *footer = b->data + b->size - CHUNK_FOOTER_SIZE;
    store_le64(footer + 64, hash64(footer, 64));
}

static void test_versions_and_features(void **state) {
    fixture *f = *state;
    char path[600];
    ckd_error err;
    snprintf(path, sizeof(path), "%s/newer", f->dir);
    f->data.data[8] = 2; /* major version */
    reseal_header(&f->data);
    put_file(path, f->data.data, f->data.size);
    assert_int_equal(check_all(path, &err), CKD_E_UNSUPPORTED);
    assert_non_null(strstr(err.message, "2.0"));
    f->data.data[8] = 1;
    f->data.data[10] = 9; /* another minor version can be read */
    reseal_header(&f->data);
    put_file(path, f->data.data, f->data.size);
    assert_int_equal(check_all(path, &err), CKD_OK);
    f->data.data[10] = 0;
    for (size_t bit = 0; bit < 64; bit++) { /* required features */
        f->data.data[16 + bit / 8] = (uint8_t)(1u << bit % 8);
        reseal_header(&f->data);
        put_file(path, f->data.data, f->data.size);
        bool known = CHUNK_FEATURES >> bit & 1; /* and need not be in use */
        assert_int_equal(check_all(path, &err), known ? CKD_OK : CKD_E_UNSUPPORTED);
        f->data.data[16 + bit / 8] = 0;
    }
    memset(f->data.data + 24, 0xff, 8); /* optional features */
    reseal_header(&f->data);
    put_file(path, f->data.data, f->data.size);
    assert_int_equal(check_all(path, &err), CKD_OK);
    store_le32(f->data.data + 12, 97); /* header size */
    reseal_header(&f->data);
    put_file(path, f->data.data, f->data.size);
    assert_int_equal(check_all(path, &err), CKD_E_CORRUPT);
}

static void test_footers_with_wrong_fields(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/lying", f->dir);
    bytes original = {0};
    bytes_put(&original, f->data.data, f->data.size);
    /* The last value times the smallest size of an index entry is 59 modulo 2^64. */
    static const uint64_t values[] = {
        0,
        1,
        95,
        1000,
        UINT32_MAX,
        UINT64_C(1) << 31,
        UINT64_MAX - 71,
        UINT64_MAX,
        UINT64_C(245956587649460689),
    };
    for (size_t field = 0; field < 4; field++) { /* index offset, stored, raw, record count */
        for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
            memcpy(f->data.data, original.data, original.size);
            store_le64(f->data.data + f->data.size - CHUNK_FOOTER_SIZE + 8 * field, values[v]);
            reseal_footer(&f->data);
            put_file(path, f->data.data, f->data.size);
            assert_int_equal(check_all(path, NULL), CKD_E_CORRUPT);
        }
    }
    for (uint32_t coding = 0; coding < 5; coding++) {
        memcpy(f->data.data, original.data, original.size);
        store_le32(f->data.data + f->data.size - 16, coding);
        reseal_footer(&f->data);
        put_file(path, f->data.data, f->data.size);
        assert_int_equal(check_all(path, NULL), coding == INDEX_ZSTD ? CKD_OK : CKD_E_CORRUPT);
    }
    bytes_free(&original);
}

/* Writes a crafted file: `record_bytes` between header and index, a raw `index`, all checksums right. */
static void put_crafted(const char *path, const bytes *original, const bytes *records, const bytes *index,
                        uint64_t count) {
    bytes b = {0};
    bytes_put(&b, original->data, CHUNK_HEADER_SIZE);
    bytes_put(&b, records->data, records->size);
    uint64_t offset = b.size;
    bytes_put(&b, index->data, index->size);
    hash128 root = hash128_of(index->data, index->size);
    bytes_put_u64(&b, offset);
    bytes_put_u64(&b, index->size);
    bytes_put_u64(&b, index->size);
    bytes_put_u64(&b, count);
    bytes_put(&b, root.bytes, 16);
    bytes_put_u64(&b, hash64(index->data, index->size));
    bytes_put_u32(&b, INDEX_RAW);
    bytes_put_u32(&b, CHUNK_FOOTER_MAGIC);
    bytes_put_u64(&b, hash64(b.data + b.size - 64, 64));
    assert_false(b.failed);
    put_file(path, b.data, b.size);
    bytes_free(&b);
}

typedef struct crafted {
    /* gap: zero bytes before the second record; declared_gap: as the index says */
    uint64_t gap, declared_gap;
    size_t junk;       /* bytes after the last record */
    size_t index_tail; /* bytes after the last index entry */
    int gap_byte;
    ckd_status expected;
} crafted;

static void try_crafted(fixture *f, const crafted *how) {
    char path[600];
    snprintf(path, sizeof(path), "%s/crafted", f->dir);
    bytes records = {0}, index = {0};
    record r = sample_block();
    uint8_t payload[96] = {1, 2, 3};
    r.checksum = hash64(payload, sizeof(payload));
    for (int i = 0; i < 2; i++) {
        for (uint64_t k = 0; i == 1 && k < how->gap; k++) {
            bytes_put_u8(&records, (uint8_t)how->gap_byte);
        }
        wire_put_varint(&index, i ? how->declared_gap : 0);
        record_encode(&records, &r);
        record_encode(&index, &r);
        bytes_put(&records, payload, sizeof(payload));
    }
    for (size_t i = 0; i < how->junk; i++) {
        bytes_put_u8(&records, 0);
    }
    for (size_t i = 0; i < how->index_tail; i++) {
        bytes_put_u8(&index, 0);
    }
    put_crafted(path, &f->data, &records, &index, 2);
    assert_int_equal(check_all(path, NULL), how->expected);
    bytes_free(&records);
    bytes_free(&index);
}

static void test_records_must_tile_the_file(void **state) {
    static const crafted cases[] = {
        {.expected = CKD_OK},
        {.gap = 40, .declared_gap = 40, .expected = CKD_OK},
        {.gap = 65535, .declared_gap = 65535, .expected = CKD_OK},
        {.gap = 65536, .declared_gap = 65536, .expected = CKD_E_CORRUPT},
        {.gap = 40, .declared_gap = 40, .gap_byte = 1, .expected = CKD_E_CORRUPT},
        {.gap = 40, .declared_gap = 39, .expected = CKD_E_CORRUPT},
        {.declared_gap = 1, .expected = CKD_E_CORRUPT},
        {.declared_gap = UINT64_MAX, .expected = CKD_E_CORRUPT},
        {.junk = 1, .expected = CKD_E_CORRUPT},
        {.junk = 300, .expected = CKD_E_CORRUPT},
        {.index_tail = 1, .expected = CKD_E_CORRUPT},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        try_crafted(*state, &cases[i]);
    }
}

static void test_payload_that_leaves_the_file(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/outside", f->dir);
    static const uint64_t sizes[] = {97, 1000, UINT64_C(1) << 40, UINT64_MAX - 500, UINT64_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        bytes records = {0}, index = {0};
        record r = sample_block();
        r.kind = 9; /* for this kind only the file limits the payload */
        r.stored_size = sizes[i];
        record_encode(&records, &r);
        bytes_put(&records, f->payloads[0], 96);
        wire_put_varint(&index, 0);
        record_encode(&index, &r);
        put_crafted(path, &f->data, &records, &index, 1);
        ckd_error err;
        assert_int_equal(check_all(path, &err), CKD_E_CORRUPT);
        assert_int_equal(err.offset, CHUNK_HEADER_SIZE);
        bytes_free(&records);
        bytes_free(&index);
    }
}

/* The same index, compressed in ways that leave space for bytes without meaning. */
static void test_index_is_one_frame(void **state) {
    fixture *f = *state;
    char path[600];
    uint8_t raw[2048], packed[4096];
    snprintf(path, sizeof(path), "%s/frames", f->dir);
    const uint8_t *footer = f->data.data + f->data.size - CHUNK_FOOTER_SIZE;
    uint64_t offset = load_le64(footer), raw_size = load_le64(footer + 16);
    assert_int_equal(load_le32(footer + 56), INDEX_ZSTD);
    assert_int_equal(ZSTD_decompress(raw, sizeof(raw), f->data.data + offset, load_le64(footer + 8)),
                     raw_size);
    for (int how = 0; how < 4; how++) {
        size_t half = how == 1 ? raw_size / 2 : raw_size;
        size_t size = ZSTD_compress(packed, sizeof(packed), raw, half, 3);
        if (how == 1) { /* two frames */
            size += ZSTD_compress(packed + size, sizeof(packed) - size, raw + half, raw_size - half, 3);
        } else if (how == 2) { /* a skippable frame after it */
            memcpy(packed + size, "\x50\x2a\x4d\x18\x01\x00\x00\x00x", 9);
            size += 9;
        } else if (how == 3) { /* no content size */
            ZSTD_CCtx *context = ZSTD_createCCtx();
            ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
            size = ZSTD_compress2(context, packed, sizeof(packed), raw, raw_size);
            ZSTD_freeCCtx(context);
        }
        assert_false(ZSTD_isError(size));
        bytes b = {0};
        bytes_put(&b, f->data.data, offset);
        bytes_put(&b, packed, size);
        bytes_put(&b, footer, CHUNK_FOOTER_SIZE);
        store_le64(b.data + b.size - CHUNK_FOOTER_SIZE + 8, size);
        store_le64(b.data + b.size - CHUNK_FOOTER_SIZE + 48, hash64(packed, size));
        reseal_footer(&b);
        put_file(path, b.data, b.size);
        assert_true(size < raw_size);
        assert_int_equal(check_all(path, NULL), how ? CKD_E_CORRUPT : CKD_OK);
        bytes_free(&b);
    }
}

static void test_empty_file(void **state) {
    fixture *f = *state;
    char path[600];
    hash128 root, nothing = hash128_of("", 0);
    uint64_t size;
    chunk *c;
    snprintf(path, sizeof(path), "%s/empty", f->dir);
    sample_write(path, NULL, NULL, 0, &root, &size);
    assert_int_equal(size, CHUNK_HEADER_SIZE + CHUNK_FOOTER_SIZE);
    assert_true(hash128_equal(&root, &nothing));
    assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
    assert_int_equal(c->record_count, 0);
    chunk_close(c);
}

static void test_overhead(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/overhead", f->dir);
    enum { COUNT = 400 };
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &identity, NULL), CKD_OK);
    for (uint64_t i = 0; i < COUNT; i++) {
        char name[64];
        snprintf(name, sizeof(name), "transformer.layers.%03d.attention.wqkv.wt", (int)i / 20);
        assert_int_equal(strlen(name), 40);
        record_tensor t = {name, sample_id(5), CKD_ROLE_WEIGHT, CKD_F32, 2, {81920, 4096}};
        ckd_region whole = {.kind = CKD_REGION_WHOLE};
        /* Hashes are as random as real ones. Everything else in a header can be compressed. */
        hash128 content = hash128_of(&i, sizeof(i)), other = hash128_of(&content, sizeof(content));
        dependency d = {DEPENDS_VALUES, sample_id(4), "", true, NULL, 0, 0, other};
        record r = {.kind = RECORD_BLOCK,
                    .coding = 5,
                    .predictor = PREDICT_PARENT,
                    .tensor = &t,
                    .region = &whole,
                    .first = i % 20 * CKD_BLOCK_ELEMENTS,
                    .count = CKD_BLOCK_ELEMENTS,
                    .raw_size = 4 * CKD_BLOCK_ELEMENTS,
                    .stored_size = sizeof(content),
                    .content = content,
                    .chain_stored = 900000 + i,
                    .chain_work = 30000000 + i,
                    .base_stored = 900000,
                    .depth = 3,
                    .dependencies = &d,
                    .dependency_count = 1};
        assert_int_equal(chunk_writer_append(w, &r, &content, NULL), CKD_OK);
    }
    uint64_t headers = chunk_writer_size(w) - CHUNK_HEADER_SIZE - COUNT * 16;
    assert_in_range(headers / COUNT, 150, 170);
    hash128 root;
    uint64_t size;
    assert_int_equal(chunk_writer_finish_durable(w, &root, &size, NULL), CKD_OK);
    uint64_t overhead = size - CHUNK_HEADER_SIZE - CHUNK_FOOTER_SIZE - COUNT * 16;
    assert_in_range(overhead / COUNT, 180, 256);
    assert_int_equal(check_all(path, NULL), CKD_OK);
}

static void test_writer_refuses_nonsense(void **state) {
    fixture *f = *state;
    char path[600];
    ckd_error err;
    snprintf(path, sizeof(path), "%s/refused", f->dir);
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &identity, NULL), CKD_OK);
    record r = sample_block();
    r.count++;
    assert_int_equal(chunk_writer_append(w, &r, f->payloads[0], &err), CKD_E_INVALID);
    assert_string_equal(err.tensor, "layer.0.weight");
    /* After a failure no call succeeds, and no file is left. */
    r.count--;
    assert_int_equal(chunk_writer_append(w, &r, f->payloads[0], &err), CKD_E_INVALID);
    hash128 root;
    uint64_t size;
    assert_int_equal(chunk_writer_finish_durable(w, &root, &size, &err), CKD_E_INVALID);
    assert_int_equal(size, 0);
    assert_false(file_exists(path));
    /* An existing file is not changed. */
    assert_int_equal(chunk_writer_create(&w, f->path, &identity, &err), CKD_E_EXISTS);
    assert_null(w);
    assert_int_equal(check_all(f->path, NULL), CKD_OK);
    assert_int_equal(chunk_writer_create(&w, path, &identity, NULL), CKD_OK);
    assert_true(file_exists(path));
    chunk_writer_abort(w);
    assert_false(file_exists(path));
    chunk_writer_abort(NULL);
}

/* Lets the n-th step on files fail, once. */
typedef struct nth_fault {
    int left, errnum;
} nth_fault;

static int fail_nth(void *context, file_op step, const char *path) {
    nth_fault *fault = context;
    (void)path;
    return step != FILE_OP_REMOVE && fault->left-- == 0 ? fault->errnum : 0;
}

static void test_failing_disk(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/full", f->dir);
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    bool done = false;
    int steps = 0;
    for (; !done && steps < 100; steps++) {
        nth_fault fault = {steps, 28 /* ENOSPC */};
        ckd_error err;
        hash128 root;
        uint64_t size;
        chunk_writer *w;
        file_set_fault_hook(fail_nth, &fault);
        ckd_status status = chunk_writer_create(&w, path, &identity, &err);
        for (size_t i = 0; i < SAMPLE_COUNT && status == CKD_OK; i++) {
            ckd_status appended = chunk_writer_append(w, &f->records[i], f->payloads[i], &err);
            assert_true(appended == CKD_OK || appended == CKD_E_NOSPACE);
        }
        if (status == CKD_OK) {
            status = chunk_writer_finish_durable(w, &root, &size, &err);
        }
        file_set_fault_hook(NULL, NULL);
        done = fault.left >= 0;
        assert_int_equal(status, done ? CKD_OK : CKD_E_NOSPACE);
        assert_int_equal(file_exists(path), done);
    }
    assert_true(done);
    assert_in_range(steps, 4, 99); /* create, write, sync and close failed at least once each */
    assert_int_equal(check_all(path, NULL), CKD_OK);
}

#define WITH_FILE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FILE(test_round_trip),
        WITH_FILE(test_every_flipped_bit_is_found),
        WITH_FILE(test_every_replaced_byte_is_found),
        WITH_FILE(test_every_truncation_is_found),
        WITH_FILE(test_errors_say_where),
        WITH_FILE(test_versions_and_features),
        WITH_FILE(test_footers_with_wrong_fields),
        WITH_FILE(test_records_must_tile_the_file),
        WITH_FILE(test_payload_that_leaves_the_file),
        WITH_FILE(test_index_is_one_frame),
        WITH_FILE(test_empty_file),
        WITH_FILE(test_overhead),
        WITH_FILE(test_writer_refuses_nonsense),
        WITH_FILE(test_failing_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
