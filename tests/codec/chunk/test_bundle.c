/*
 * Bundles: records are read back in their order; every flipped bit is found; damage of a payload affects only
 * its record; and bundles with right checksums and wrong contents are refused.
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

#include "codec/chunk/bundle.h"
#include "codec/chunk/wire.h"
#include "codec/chunk/record_wire.h"
#include "tests/support/samples.h"
#include "tests/support/tempdir.h"

#define LARGE    5000u /* bytes of a payload that is too large for a bundle */
#define RECORDS  (SAMPLE_COUNT + 1)
#define LARGE_AT 3 /* its index in the records */

typedef struct fixture {
    char *dir;
    char path[512];
    record records[RECORDS];
    uint8_t payloads[RECORDS][LARGE];
    bytes data; /* the contents of the file */
} fixture;

static chunk_writer *writer_at(const char *path, bool gathers) {
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &identity, NULL), CKD_OK);
    if (gathers) {
        chunk_writer_gather(w);
    }
    return w;
}

static void finish(chunk_writer *w) {
    hash128 root;
    uint64_t size;
    assert_int_equal(chunk_writer_finish_durable(w, &root, &size, NULL), CKD_OK);
}

/* Makes the samples, and a large record of an unknown kind in between. */
static void make_records(fixture *f) {
    record samples[SAMPLE_COUNT];
    uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES];
    sample_records(samples, payloads);
    for (size_t i = 0, from = 0; i < RECORDS; i++) {
        if (i == LARGE_AT) {
            f->records[i] = samples[SAMPLE_COUNT - 1];
            f->records[i].stored_size = LARGE;
            for (size_t k = 0; k < LARGE; k++) {
                f->payloads[i][k] = (uint8_t)(k * k >> 3);
            }
        } else {
            f->records[i] = samples[from];
            memcpy(f->payloads[i], payloads[from++], SAMPLE_BYTES);
        }
    }
}

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof(*f));
    f->dir = tempdir_create();
    snprintf(f->path, sizeof(f->path), "%s/bundle.ckd", f->dir);
    make_records(f);
    chunk_writer *w = writer_at(f->path, true);
    for (size_t i = 0; i < RECORDS; i++) {
        assert_int_equal(chunk_writer_append(w, &f->records[i], f->payloads[i], NULL), CKD_OK);
    }
    finish(w);
    assert_int_equal(file_read_all(&f->data, f->path, 1 << 20, NULL), CKD_OK);
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
    unlink(path); /* some file systems write a file to disk at once if it is truncated and rewritten */
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
}

static chunk *open_chunk(const char *path) {
    chunk *c;
    ckd_error err;
    if (chunk_open(&c, path, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    return c;
}

/* Runs everything that finds damage. */
static ckd_status check_all(const char *path, ckd_error *err) {
    chunk *c;
    ckd_status status = chunk_open(&c, path, err);
    for (size_t i = 0; status == CKD_OK && i < c->outer_count; i++) {
        uint8_t *payload = malloc(c->outer[i].stored_size + 1);
        status = chunk_check_record(c, &c->outer[i], err);
        if (status == CKD_OK) {
            status = chunk_read_payload(c, &c->outer[i], payload, err);
        }
        free(payload);
    }
    chunk_close(c);
    return status;
}

/* Hints are rounded up to three digits. */
static void expect_hint(uint64_t got, uint64_t want) {
    assert_true(got >= want && (double)got <= (double)want * (1 + 1.0 / 256));
}

static void expect_same(const record *got, const record *want) {
    ckd_id owner = want->tensor->checkpoint;
    assert_int_equal(got->kind, want->kind);
    assert_int_equal(got->coding, want->coding);
    assert_int_equal(got->predictor, want->predictor);
    assert_string_equal(got->tensor->name, want->tensor->name);
    assert_memory_equal(&got->tensor->checkpoint, &owner, sizeof(owner));
    assert_true(got->tensor->role == want->tensor->role && got->tensor->dtype == want->tensor->dtype);
    assert_int_equal(got->tensor->ndim, want->tensor->ndim);
    assert_memory_equal(got->tensor->shape, want->tensor->shape, want->tensor->ndim * sizeof(uint64_t));
    assert_memory_equal(got->region, want->region, sizeof(*got->region));
    assert_true(got->first == want->first && got->count == want->count);
    assert_true(got->raw_size == want->raw_size && got->stored_size == want->stored_size);
    assert_true(got->checksum == (got->bundle ? 0 : want->checksum) &&
                hash128_equal(&got->content, &want->content));
    assert_int_equal(got->depth, want->depth);
    assert_int_equal(got->dependency_count, want->dependency_count);
    for (uint32_t i = 0; i < want->dependency_count; i++) {
        const dependency *a = &got->dependencies[i], *b = &want->dependencies[i];
        assert_int_equal(a->kind, b->kind);
        assert_memory_equal(&a->checkpoint, &b->checkpoint, sizeof(ckd_id));
        assert_int_equal(record_dependency_flags(got, a), record_dependency_flags(want, b));
        assert_string_equal(a->tensor,
                            record_dependency_flags(want, b) & DEPENDENCY_OTHER_TENSOR ? b->tensor : "");
        if (!a->same_span) {
            assert_memory_equal(a->region, b->region, sizeof(*a->region));
            assert_true(a->first == b->first && a->count == b->count);
        }
        assert_true(hash128_equal(&a->content, &b->content));
    }
}

/* ---- writing and reading ---- */

static void test_round_trip(void **state) {
    fixture *f = *state;
    chunk *c = open_chunk(f->path);
    assert_int_equal(load_le64(f->data.data + 16), CHUNK_BUNDLES);
    assert_int_equal(c->outer_count, 2); /* the large record, and the bundle of all others */
    assert_int_equal(c->outer[1].kind, RECORD_BUNDLE);
    assert_int_equal(c->record_count, RECORDS);
    for (size_t i = 0; i < RECORDS; i++) {
        const record *r = &c->records[i], *want = &f->records[i];
        uint8_t payload[LARGE];
        expect_same(r, want);
        assert_int_equal(chunk_read_payload(c, r, payload, NULL), CKD_OK);
        assert_memory_equal(payload, f->payloads[i], r->stored_size);
        assert_ptr_equal(r->bundle, i == LARGE_AT ? NULL : &c->outer[1]);
        assert_int_equal(r->offset, c->outer[i != LARGE_AT].offset);
        assert_int_equal(chunk_record_number(c, r), i != LARGE_AT);
        if (i == LARGE_AT) {
            assert_true(r->chain_work == want->chain_work && r->base_stored == want->base_stored);
        } else { /* at least its own bytes */
            uint64_t least = r->stored_size;
            expect_hint(r->chain_work, want->chain_work);
            assert_true(r->chain_stored >= (want->chain_stored > least ? want->chain_stored : least));
        }
    }
    assert_ptr_equal(c->records[0].tensor, c->records[1].tensor);
    chunk_close(c);
}

static void test_hints(void **state) {
    fixture *f = *state;
    char path[600];
    static const uint64_t values[] = {0,
                                      1,
                                      511,
                                      512,
                                      513,
                                      1023,
                                      1025,
                                      65535,
                                      1000001,
                                      UINT64_C(1) << 40,
                                      (UINT64_C(1) << 40) + 1,
                                      UINT64_C(511) << 55,
                                      UINT64_MAX};
    enum { COUNT = sizeof(values) / sizeof(values[0]) };
    snprintf(path, sizeof(path), "%s/hints", f->dir);
    chunk_writer *w = writer_at(path, true);
    for (size_t i = 0; i < COUNT; i++) {
        record r = sample_block();
        r.chain_work = values[i];
        r.chain_stored = 96 + values[i] / 2;
        r.base_stored = values[i] / 3; /* less than its own bytes, for small values */
        assert_int_equal(chunk_writer_append(w, &r, f->payloads[0], NULL), CKD_OK);
    }
    finish(w);
    chunk *c = open_chunk(path);
    for (size_t i = 0; i < COUNT - 1; i++) {
        const record *r = &c->records[i];
        expect_hint(r->chain_work, values[i]);
        expect_hint(r->chain_stored - 96, values[i] / 2);
        uint64_t base = values[i] / 3 > 96 ? values[i] / 3 - 96 : 0;
        expect_hint(r->base_stored - 96, base);
    }
    assert_true(c->records[COUNT - 1].chain_work == UINT64_C(511) << 55); /* the largest possible value */
    chunk_close(c);
}

static void expect_same_file(const char *a, const char *b) {
    bytes x = {0}, y = {0};
    assert_int_equal(file_read_all(&x, a, 1 << 24, NULL), CKD_OK);
    assert_int_equal(file_read_all(&y, b, 1 << 24, NULL), CKD_OK);
    assert_int_equal(x.size, y.size);
    assert_memory_equal(x.data, y.data, x.size);
    bytes_free(&x);
    bytes_free(&y);
}

/* A file without two small records has no bundle, so that readers need not support bundles. */
static void test_files_without_bundles_need_no_feature(void **state) {
    fixture *f = *state;
    static const size_t choices[][4] = {{LARGE_AT, LARGE_AT}, {1}, {LARGE_AT, 1}, {0}};
    static const size_t counts[] = {2, 1, 2, 0};
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        char path[2][600];
        for (int gathers = 0; gathers < 2; gathers++) {
            snprintf(path[gathers], sizeof(path[0]), "%s/plain-%zu-%d", f->dir, k, gathers);
            chunk_writer *w = writer_at(path[gathers], gathers);
            for (size_t i = 0; i < counts[k]; i++) {
                size_t n = choices[k][i];
                assert_int_equal(chunk_writer_append(w, &f->records[n], f->payloads[n], NULL), CKD_OK);
            }
            finish(w);
        }
        expect_same_file(path[0], path[1]);
    }
}

/* A single small record before a large one becomes a bundle, so that it keeps its place. */
static void test_order_is_kept(void **state) {
    fixture *f = *state;
    char path[600];
    static const size_t order[] = {0, LARGE_AT, LARGE_AT, 1, 2, LARGE_AT, 4};
    enum { COUNT = sizeof(order) / sizeof(order[0]) };
    for (size_t count = 1; count <= COUNT; count++) {
        snprintf(path, sizeof(path), "%s/order-%zu", f->dir, count);
        chunk_writer *w = writer_at(path, true);
        for (size_t i = 0; i < count; i++) {
            record r = f->records[order[i]];
            r.depth = (uint32_t)i;
            assert_int_equal(chunk_writer_append(w, &r, f->payloads[order[i]], NULL), CKD_OK);
        }
        finish(w);
        assert_int_equal(check_all(path, NULL), CKD_OK);
        chunk *c = open_chunk(path);
        assert_int_equal(c->record_count, count);
        for (size_t i = 0; i < count; i++) {
            assert_int_equal(c->records[i].depth, i);
        }
        chunk_close(c);
    }
}

/* Many small records of one checkpoint, and then of another, are in several bundles. */
static void test_bundles_are_bounded(void **state) {
    fixture *f = *state;
    char path[600];
    enum { COUNT = 5000 };
    snprintf(path, sizeof(path), "%s/many", f->dir);
    chunk_writer *w = writer_at(path, true);
    record_tensor other = *f->records[0].tensor;
    other.checkpoint = sample_id(0x77);
    for (uint32_t i = 0; i < COUNT + 300; i++) {
        record r = f->records[0];
        r.depth = i;
        if (i >= COUNT) { /* 4 KiB each */
            r.kind = 9;
            r.tensor = &other;
            r.stored_size = 4096;
        }
        assert_int_equal(chunk_writer_append(w, &r, f->payloads[LARGE_AT], NULL), CKD_OK);
    }
    assert_in_range(chunk_writer_size(w), 4096 * 300, UINT64_MAX);
    finish(w);
    assert_int_equal(check_all(path, NULL), CKD_OK);
    chunk *c = open_chunk(path);
    assert_int_equal(c->outer_count, 4);
    assert_int_equal(c->record_count, COUNT + 300);
    for (uint32_t i = 0; i < COUNT + 300; i++) {
        const record *r = &c->records[i];
        assert_int_equal(r->depth, i);
        assert_int_equal(chunk_record_number(c, r), i < 4096 ? 0 : i < COUNT ? 1 : i < COUNT + 256 ? 2 : 3);
        assert_int_equal(r->tensor->checkpoint.bytes[0], i < COUNT ? 0xc1 : 0x77);
        assert_true(r->bundle->stored_size <= RECORD_BUNDLE_MAX);
    }
    chunk_close(c);
}

/*
 * The bytes of a record other than its payload. The records are those of a model with many layers, and each
 * block has its parent's hash.
 */
static void test_overhead(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/overhead", f->dir);
    enum { COUNT = 150 };
    chunk_writer *w = writer_at(path, true);
    uint64_t payload_bytes = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        static const char *const prefixes[] = {"", "exp_avg.", "exp_avg_sq."};
        static const char *const parts[] = {"attn.qkv.weight", "attn.qkv.bias", "mlp.fc.weight",
                                            "mlp.fc.bias", "ln.bias"};
        char name[96];
        snprintf(name, sizeof(name), "%sblocks.%d.%s", prefixes[i / 50], (int)(i % 50 / 5), parts[i % 5]);
        record_tensor t = {name, sample_id(5), CKD_ROLE_WEIGHT, CKD_F32, 2, {384, 128}};
        ckd_region whole = {.kind = CKD_REGION_WHOLE};
        hash128 content = hash128_of(&i, sizeof(i)), other = hash128_of(&content, sizeof(content));
        dependency d = {DEPENDS_VALUES, sample_id(4), "", true, NULL, 0, 0, other};
        record r = {.kind = RECORD_BLOCK,
                    .coding = 5,
                    .predictor = PREDICT_PARENT,
                    .tensor = &t,
                    .region = &whole,
                    .count = 384 * 128,
                    .raw_size = 4 * 384 * 128,
                    .stored_size = 50 + load_le16(content.bytes) % 3000,
                    .content = content,
                    .chain_stored = 60000 + load_le16(content.bytes + 2),
                    .chain_work = 700000 + load_le16(content.bytes + 4),
                    .base_stored = 60000 + load_le16(content.bytes + 6) / 16,
                    .depth = 3,
                    .dependencies = &d,
                    .dependency_count = 1};
        payload_bytes += r.stored_size;
        assert_int_equal(chunk_writer_append(w, &r, f->payloads[LARGE_AT], NULL), CKD_OK);
    }
    hash128 root;
    uint64_t size;
    assert_int_equal(chunk_writer_finish_durable(w, &root, &size, NULL), CKD_OK);
    /* Includes the header and the footer of the file. */
    assert_in_range((size - payload_bytes) / COUNT, 32, 45);
}

/* ---- damage ---- */

static void poke(int fd, size_t at, uint8_t byte) {
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
}

static void test_every_flipped_bit_is_found(void **state) {
    fixture *f = *state;
    assert_int_equal(check_all(f->path, NULL), CKD_OK);
    int fd = open(f->path, O_WRONLY);
    chunk *c = open_chunk(f->path);
    /* The large record is like any other, so only some of its bits are tested. */
    uint64_t large = c->outer[0].payload_offset;
    chunk_close(c);
    for (size_t bit = 0; bit < 8 * f->data.size; bit++) {
        ckd_error err;
        bit = bit == 8 * (large + 8) ? 8 * (large + LARGE - 8) : bit;
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

static void test_every_truncation_is_found(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/cut", f->dir);
    for (size_t size = 0; size < f->data.size; size++) {
        put_file(path, f->data.data, size);
        assert_int_equal(chunk_open(&(chunk *){NULL}, path, NULL), CKD_E_CORRUPT);
    }
}

/*
 * The file opens, and its other records are unchanged. The damaged payload no longer matches its content
 * hash.
 */
static void test_damage_affects_only_its_record(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/hurt", f->dir);
    chunk *c = open_chunk(f->path);
    const record *hurt = &c->records[5];
    assert_true(hurt->bundle && hurt->stored_size == 150);
    uint64_t at = hurt->payload_offset + 149;
    chunk_close(c);
    f->data.data[at] ^= 0x40;
    put_file(path, f->data.data, f->data.size);
    c = open_chunk(path);
    for (size_t i = 0; i < RECORDS; i++) {
        uint8_t payload[LARGE];
        assert_int_equal(chunk_read_payload(c, &c->records[i], payload, NULL), CKD_OK);
        assert_int_equal(memcmp(payload, f->payloads[i], c->records[i].stored_size) == 0, i != 5);
    }
    ckd_error err;
    uint8_t *payload = malloc(c->outer[1].stored_size);
    assert_int_equal(chunk_read_payload(c, &c->outer[1], payload, &err), CKD_E_CORRUPT);
    assert_string_equal(err.tensor, "");
    free(payload);
    /* A small file is read whole when it is opened, so that later changes have no effect. */
    int fd = open(path, O_WRONLY);
    poke(fd, c->records[0].payload_offset, (uint8_t)~f->payloads[0][0]);
    close(fd);
    uint8_t first[LARGE];
    assert_int_equal(chunk_read_payload(c, &c->records[0], first, &err), CKD_OK);
    assert_memory_equal(first, f->payloads[0], c->records[0].stored_size);
    chunk_close(c);
}

/* A file that is too large to be kept in memory changes while it is open. The checksum detects that. */
static void test_changes_while_open_are_found(void **state) {
    fixture *f = *state;
    enum { HUGE_PAYLOAD = 300000 };
    char path[600];
    snprintf(path, sizeof(path), "%s/huge", f->dir);
    chunk_identity id = {sample_id(1), sample_id(2), sample_id(3)};
    uint8_t *huge = calloc(HUGE_PAYLOAD, 1), first[LARGE];
    record_tensor name = {
        .name = "huge", .checkpoint = f->records[0].tensor->checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    record blob = {.kind = RECORD_BLOB,
                   .tensor = &name,
                   .region = &whole,
                   .raw_size = HUGE_PAYLOAD,
                   .stored_size = HUGE_PAYLOAD};
    record small = f->records[0];
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &id, NULL), CKD_OK);
    chunk_writer_gather(w);
    assert_int_equal(chunk_writer_append(w, &small, f->payloads[0], NULL), CKD_OK);
    assert_int_equal(chunk_writer_append(w, &blob, huge, NULL), CKD_OK);
    assert_int_equal(chunk_writer_finish_durable(w, &(hash128){{0}}, &(uint64_t){0}, NULL), CKD_OK);
    free(huge);
    chunk *c = open_chunk(path);
    ckd_error err;
    assert_true(c->records[0].bundle && c->records[0].checksum == small.checksum);
    assert_int_equal(chunk_read_payload(c, &c->records[0], first, &err), CKD_OK);
    assert_memory_equal(first, f->payloads[0], small.stored_size);
    int fd = open(path, O_WRONLY);
    poke(fd, c->records[0].payload_offset, (uint8_t)~first[0]);
    close(fd);
    assert_int_equal(chunk_read_payload(c, &c->records[0], first, &err), CKD_E_CORRUPT);
    assert_string_equal(err.tensor, "layer.0.weight");
    chunk_close(c);
}

/* ---- two checkpoints in one file ---- */

/*
 * Writes three rounds of a large and two small records for each of two checkpoints, so that bundles of both
 * alternate.
 */
static void write_two(const char *path, const fixture *f, const ckd_id ids[2]) {
    chunk_writer *w = writer_at(path, true);
    for (size_t i = 0; i < 18; i++) {
        bool large = i % 3 == 1;
        record r = f->records[large ? LARGE_AT : 0];
        record_tensor t = *r.tensor;
        t.checkpoint = ids[i / 3 % 2];
        r.tensor = &t;
        r.depth = (uint32_t)i;
        r.dependency_count = 0;
        assert_int_equal(chunk_writer_append(w, &r, f->payloads[large ? LARGE_AT : 0], NULL), CKD_OK);
    }
    finish(w);
}

/* The records of one checkpoint are in order and can be read. */
static void check_part(chunk *c, const ckd_id *id, size_t first, const fixture *f) {
    const chunk_records *part, *again;
    assert_int_equal(chunk_records_of(&part, c, id, NULL), CKD_OK);
    assert_int_equal(part->count, 9);
    for (size_t i = 0; i < 9; i++) {
        const record *r = &part->records[i];
        uint8_t payload[LARGE];
        assert_memory_equal(&r->tensor->checkpoint, id, sizeof(*id));
        assert_int_equal(r->depth, 3 * first + i % 3 + 6 * (i / 3));
        assert_true((i % 3 == 1) == !r->bundle);
        assert_int_equal(chunk_read_payload(c, r, payload, NULL), CKD_OK);
        assert_memory_equal(payload, f->payloads[i % 3 == 1 ? LARGE_AT : 0], r->stored_size);
    }
    assert_int_equal(chunk_records_of(&again, c, id, NULL), CKD_OK);
    assert_ptr_equal(part, again);
}

static void test_parts(void **state) {
    fixture *f = *state;
    char path[600];
    ckd_id ids[2] = {sample_id(21), sample_id(22)}, neither = sample_id(23);
    snprintf(path, sizeof(path), "%s/two", f->dir);
    write_two(path, f, ids);
    chunk *c;
    assert_int_equal(chunk_open_bundled(&c, path, NULL), CKD_OK);
    assert_null(c->records);
    check_part(c, &ids[1], 1, f);
    check_part(c, &ids[0], 0, f);
    const chunk_records *none;
    assert_int_equal(chunk_records_of(&none, c, &neither, NULL), CKD_OK);
    assert_int_equal(none->count, 0);
    uint64_t heads = 0;
    for (size_t i = 0; i < c->outer_count; i++) {
        bool second = memcmp(&c->outer[i].tensor->checkpoint, &ids[1], sizeof(ckd_id)) == 0;
        heads = c->outer[i].kind == RECORD_BUNDLE && second ? c->outer[i].payload_offset + 17 : heads;
    }
    chunk_close(c);

    /* Damage to the heads of one checkpoint does not affect the other. */
    bytes data = {0};
    assert_int_equal(file_read_all(&data, path, 1 << 20, NULL), CKD_OK);
    data.data[heads] ^= 1;
    put_file(path, data.data, data.size);
    bytes_free(&data);
    assert_int_equal(chunk_open(&c, path, NULL), CKD_E_CORRUPT);
    assert_int_equal(chunk_open_bundled(&c, path, NULL), CKD_OK);
    assert_int_equal(chunk_records_of(&none, c, &ids[1], NULL), CKD_E_CORRUPT);
    assert_null(none);
    check_part(c, &ids[0], 0, f);
    chunk_close(c);
}

/* ---- bundles with wrong contents ---- */

/* Writes a file with a bundle of this payload. All checksums of the file are right. */
static void put_bundle(const char *path, const bytes *payload, uint64_t features) {
    chunk_identity id = {sample_id(1), sample_id(2), sample_id(3)};
    record_tensor tensor = {.name = BUNDLE_NAME, .checkpoint = sample_id(5), .role = CKD_ROLE_OTHER};
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    record r = {.kind = RECORD_BUNDLE,
                .tensor = &tensor,
                .region = &whole,
                .raw_size = payload->size,
                .stored_size = payload->size,
                .checksum = hash64(payload->data, payload->size)};
    bytes b = {0}, index = {0};
    bytes_put(&b, CHUNK_MAGIC, 8);
    bytes_put_u16(&b, 1);
    bytes_put_u16(&b, 0);
    bytes_put_u32(&b, CHUNK_HEADER_SIZE);
    bytes_put_u64(&b, features);
    bytes_put_u64(&b, 0);
    bytes_put(&b, &id, sizeof(id));
    bytes_put_u64(&b, hash64(b.data, b.size));
    record_encode(&b, &r);
    bytes_put(&b, payload->data, payload->size);
    uint64_t offset = b.size;
    wire_put_varint(&index, 0);
    record_encode(&index, &r);
    bytes_put(&b, index.data, index.size);
    hash128 root = hash128_of(index.data, index.size);
    bytes_put_u64(&b, offset);
    bytes_put_u64(&b, index.size);
    bytes_put_u64(&b, index.size);
    bytes_put_u64(&b, 1);
    bytes_put(&b, root.bytes, 16);
    bytes_put_u64(&b, hash64(index.data, index.size));
    bytes_put_u32(&b, INDEX_RAW);
    bytes_put_u32(&b, CHUNK_FOOTER_MAGIC);
    bytes_put_u64(&b, hash64(b.data + b.size - 64, 64));
    put_file(path, b.data, b.size);
    bytes_free(&b);
    bytes_free(&index);
}

/* A crafted bundle: two u8 blocks of 3 elements with payloads of 3 bytes, the second with a dependency. */
typedef struct craft {
    uint32_t count, raw_more, hashes_more; /* 0: the right values */
    uint8_t heads[160];
    size_t heads_size;
    size_t payload_size;
    bool packed;
    int frames; /* of the compressed heads */
} craft;

enum {
    AT_PLACE = 0,
    AT_KIND = 2,
    AT_PREDICTOR = 6,
    AT_REGION = 16,
    AT_LEFT = 20,
    AT_SIZE = 22,
    AT_HIGH = 28,
    AT_FLAGS = 45
};

static craft sound(void) {
    static const uint8_t heads[] = {
        0, 0,   1, 1,   0, 0, 0, 1, 1, 1, 14, 14, 1, 1,
        3, 3,                       /* places, kinds, codings, predictors, roles, dtypes, ndims, shapes */
        0, 0,   0, 0,   0, 0, 3, 3, /* regions, firsts, left, stored sizes (no raw ones) */
        1, 1,   0, 0,   0, 0, 9, 9, 0, 0, 0,  0,  0, 0, /* depths, chain stored, chain work, base stored */
        1, 'a', 1, 'b', 0, 1, 1, 1, /* names, dependencies, kind, flags: another checkpoint */
        7, 7,   7, 7,   7, 7, 7, 7, 7, 7, 7,  7,  7, 7,
        7, 7,
    };
    craft c = {.heads_size = sizeof(heads), .payload_size = 6};
    memcpy(c.heads, heads, sizeof(heads));
    return c;
}

static ckd_status try_craft(fixture *f, const craft *c, uint64_t features, ckd_error *err) {
    char path[600];
    bytes payload = {0};
    uint8_t packed[1024];
    size_t size = c->heads_size;
    snprintf(path, sizeof(path), "%s/crafted", f->dir);
    memcpy(packed, c->heads, size);
    if (c->packed) {
        size = ZSTD_compress(packed, sizeof(packed), c->heads, c->heads_size, 3);
        for (int i = 1; i < c->frames; i++) { /* adds an empty frame */
            size += ZSTD_compress(packed + size, sizeof(packed) - size, "", 0, 3);
        }
    }
    bytes_put_u32(&payload, c->count ? c->count : 2);
    bytes_put_u32(&payload, (uint32_t)c->heads_size + c->raw_more);
    bytes_put_u32(&payload, (uint32_t)size);
    bytes_put_u32(&payload, 3 + c->hashes_more);
    bytes_put(&payload, packed, size);
    for (int i = 0; i < 3 * 16; i++) {
        bytes_put_u8(&payload, (uint8_t)i);
    }
    bytes_put_u64(&payload, hash64(payload.data, payload.size));
    bytes_put(&payload, "abcdefghi", c->payload_size);
    put_bundle(path, &payload, features);
    bytes_free(&payload);
    return check_all(path, err);
}

#define EXPECT(expected, ...)                                                          \
    do {                                                                               \
        craft c = sound();                                                             \
        ckd_error err = {0};                                                           \
        __VA_ARGS__;                                                                   \
        ckd_status got = try_craft(*state, &c, CHUNK_BUNDLES, &err);                   \
        if (got != (expected) || (got != CKD_OK && err.offset != CHUNK_HEADER_SIZE)) { \
            fail_msg("line %d: %s at %llu: %s", __LINE__, ckd_status_name(got),        \
                     (unsigned long long)err.offset, err.message);                     \
        }                                                                              \
    } while (0)

static void test_bundles_with_wrong_heads(void **state) {
    EXPECT(CKD_OK, (void)c);
    EXPECT(CKD_E_CORRUPT, c.count = 4);
    EXPECT(CKD_E_CORRUPT, c.count = 4097);
    EXPECT(CKD_E_CORRUPT, c.count = UINT32_MAX);
    EXPECT(CKD_E_CORRUPT, c.raw_more = 1);
    EXPECT(CKD_E_CORRUPT, c.raw_more = UINT32_MAX - 200);
    EXPECT(CKD_E_CORRUPT, c.raw_more = (uint32_t)-1);
    EXPECT(CKD_E_CORRUPT, c.hashes_more = 1);
    EXPECT(CKD_E_CORRUPT, c.hashes_more = (uint32_t)-1);
    EXPECT(CKD_E_CORRUPT, c.hashes_more = UINT32_MAX / 16);
    EXPECT(CKD_E_CORRUPT, c.heads_size++);
    EXPECT(CKD_E_CORRUPT, c.heads_size--);
    EXPECT(CKD_E_CORRUPT, c.payload_size++);
    EXPECT(CKD_E_CORRUPT, c.payload_size--);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_PLACE] = 1);     /* there is no record before the bundle */
    EXPECT(CKD_E_CORRUPT, c.heads[AT_KIND] = 5);      /* a bundle within a bundle */
    EXPECT(CKD_E_CORRUPT, c.heads[AT_PREDICTOR] = 1); /* it lacks a dependency */
    EXPECT(CKD_E_CORRUPT, c.heads[AT_LEFT] = 4);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_LEFT] = 1); /* two elements with three bytes of payload */
    EXPECT(CKD_E_CORRUPT, c.heads[AT_LEFT] = 1; c.heads[AT_SIZE] = 2);
    EXPECT(CKD_OK, c.heads[AT_LEFT] = 1; c.heads[AT_SIZE] = 2; c.payload_size = 5);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_SIZE] = 4);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_HIGH] = 57);
    EXPECT(CKD_OK, c.heads[AT_HIGH] = 56);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_FLAGS] = 8);
    EXPECT(CKD_E_CORRUPT, c.heads[AT_FLAGS] = 0);
    EXPECT(CKD_E_CORRUPT, memset(&c.heads[AT_FLAGS + 1], 0, 16)); /* no checkpoint */
    EXPECT(CKD_E_CORRUPT, memset(&c.heads[AT_FLAGS + 1], 5, 16)); /* its own checkpoint */
    EXPECT(CKD_E_UNSUPPORTED, c.heads[AT_REGION] = 3);
    EXPECT(CKD_E_UNSUPPORTED, c.heads[10] = 77); /* dtype */
    EXPECT(CKD_OK, c.packed = true; c.frames = 1);
    EXPECT(CKD_E_CORRUPT, c.packed = true; c.frames = 2);
    EXPECT(CKD_E_CORRUPT, c.packed = true; c.frames = 1; c.raw_more = 1);
}

/* A bundle with one record that is a bundle itself. */
static void test_no_bundle_in_a_bundle(void **state) {
    fixture *f = *state;
    for (uint8_t kind = 5; kind < 9; kind += 3) { /* kind 8 is unknown, so it may be there */
        const uint8_t heads[] = {0, kind, 0, 0, 5, 0, 0,   0,   0,   1,   3,   3,   0, 0,
                                 0, 0,    0, 0, 0, 6, 'b', 'u', 'n', 'd', 'l', 'e', 0};
        bytes payload = {0};
        char path[600];
        ckd_error err = {0};
        snprintf(path, sizeof(path), "%s/nested", f->dir);
        bytes_put_u32(&payload, 1);
        bytes_put_u32(&payload, sizeof(heads));
        bytes_put_u32(&payload, sizeof(heads));
        bytes_put_u32(&payload, 1);
        bytes_put(&payload, heads, sizeof(heads));
        bytes_put(&payload, &(hash128){{0}}, sizeof(hash128));
        bytes_put_u64(&payload, hash64(payload.data, payload.size));
        bytes_put(&payload, "abc", 3);
        put_bundle(path, &payload, CHUNK_BUNDLES);
        bytes_free(&payload);
        assert_int_equal(check_all(path, &err), kind == 5 ? CKD_E_CORRUPT : CKD_OK);
        assert_true(kind != 5 || strstr(err.message, "a bundle contains another bundle"));
    }
}

/* Sets each byte of the heads to many values. Nothing crashes, and accepted records are valid. */
static void test_heads_with_any_bytes(void **state) {
    size_t accepted = 0;
    for (size_t at = 0; at < sound().heads_size - 16; at++) {
        for (unsigned value = 0; value < 256; value += value < 8 || value > 250 ? 1 : 11) {
            craft c = sound();
            c.heads[at] = (uint8_t)value;
            ckd_status status = try_craft(*state, &c, CHUNK_BUNDLES, NULL);
            assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
            accepted += status == CKD_OK;
        }
    }
    assert_in_range(accepted, 100, 1000);
}

static void test_a_bundle_needs_its_feature(void **state) {
    craft c = sound();
    ckd_error err;
    assert_int_equal(try_craft(*state, &c, 0, &err), CKD_E_CORRUPT);
    assert_int_equal(err.offset, CHUNK_HEADER_SIZE);
}

/* No field of a bundle's header may have another value. */
static void test_bundles_with_wrong_headers(void **state) {
    (void)state;
    for (int field = 0; field < 14; field++) {
        ckd_status status;
        record_tensor tensor = {.name = BUNDLE_NAME, .checkpoint = sample_id(5), .role = CKD_ROLE_OTHER};
        ckd_region region = {.kind = CKD_REGION_WHOLE};
        dependency d = {DEPENDS_VALUES, sample_id(4), "", true, NULL, 0, 0, {{0}}};
        record r = {
            .kind = RECORD_BUNDLE, .tensor = &tensor, .region = &region, .raw_size = 99, .stored_size = 99};
        assert_null(record_problem(&r, &status));
        r.coding = field == 0;
        r.predictor = field == 1;
        tensor.role = field == 2 ? CKD_ROLE_WEIGHT : CKD_ROLE_OTHER;
        tensor.dtype = field == 3 ? CKD_U8 : CKD_DTYPE_NONE;
        tensor.ndim = field == 4;
        tensor.shape[0] = 5;
        r.count = field == 5;
        r.first = field == 6;
        r.raw_size += field == 7;
        r.depth = field == 8;
        r.chain_stored = field == 9;
        r.chain_work = field == 10;
        r.base_stored = field == 11;
        tensor.name = field == 12 ? "bundles" : BUNDLE_NAME;
        r.dependencies = &d;
        r.dependency_count = field == 13;
        assert_non_null(record_problem(&r, &status));
        assert_int_equal(status, CKD_E_CORRUPT);
    }
}

static void test_the_writer_makes_bundles(void **state) {
    fixture *f = *state;
    char path[600];
    snprintf(path, sizeof(path), "%s/refused", f->dir);
    chunk *c = open_chunk(f->path);
    for (int gathers = 0; gathers < 2; gathers++) {
        chunk_writer *w = writer_at(path, gathers);
        record r = c->outer[1];
        assert_int_equal(chunk_writer_append(w, &r, f->data.data + r.payload_offset, NULL), CKD_E_INVALID);
        chunk_writer_abort(w);
    }
    chunk_close(c);
}

/* ---- a failing disk ---- */

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
    bool done = false;
    int steps = 0;
    for (; !done && steps < 100; steps++) {
        nth_fault fault = {steps, 28 /* ENOSPC */};
        chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
        chunk_writer *w;
        hash128 root;
        uint64_t size;
        file_set_fault_hook(fail_nth, &fault);
        ckd_status status = chunk_writer_create(&w, path, &identity, NULL);
        if (status == CKD_OK) {
            chunk_writer_gather(w);
            for (size_t i = 0; i < RECORDS; i++) {
                (void)chunk_writer_append(w, &f->records[i], f->payloads[i], NULL);
            }
            status = chunk_writer_finish_durable(w, &root, &size, NULL);
        }
        file_set_fault_hook(NULL, NULL);
        done = fault.left >= 0;
        assert_int_equal(status, done ? CKD_OK : CKD_E_NOSPACE);
        assert_int_equal(file_exists(path), done);
    }
    /* Create, write, rewriting the header, sync and close failed at least once each. */
    assert_in_range(steps, 5, 99);
    expect_same_file(path, f->path);
}

#define WITH_FILE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_FILE(test_round_trip),
        WITH_FILE(test_hints),
        WITH_FILE(test_files_without_bundles_need_no_feature),
        WITH_FILE(test_order_is_kept),
        WITH_FILE(test_bundles_are_bounded),
        WITH_FILE(test_overhead),
        WITH_FILE(test_every_flipped_bit_is_found),
        WITH_FILE(test_every_truncation_is_found),
        WITH_FILE(test_damage_affects_only_its_record),
        WITH_FILE(test_changes_while_open_are_found),
        WITH_FILE(test_parts),
        WITH_FILE(test_bundles_with_wrong_heads),
        WITH_FILE(test_no_bundle_in_a_bundle),
        WITH_FILE(test_heads_with_any_bytes),
        WITH_FILE(test_a_bundle_needs_its_feature),
        WITH_FILE(test_bundles_with_wrong_headers),
        WITH_FILE(test_the_writer_makes_bundles),
        WITH_FILE(test_failing_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
