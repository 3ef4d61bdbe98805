/* Record headers: they can be read back, have one encoding, and nothing else is accepted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "codec/chunk/record_wire.h"
#include "tests/support/samples.h"

/* Offsets of the fields in the header of sample_block. */
enum {
    AT_SIZE = 4,
    AT_KIND = 8,
    AT_PREDICTOR = 10,
    AT_ROLE = 11,
    AT_DTYPE = 12,
    AT_NDIM = 13,
    AT_SHAPE = 14,
    AT_REGION = 16,
    AT_FIRST = 17,
    AT_COUNT = 18,
    AT_RAW = 19,
    AT_STORED = 20,
    AT_CHECKPOINT = 45,
    AT_NAME_SIZE = 66,
    AT_NAME = 67,
    AT_DEPENDENCIES = 81
};

static void reseal(bytes *b) {
    store_le32(b->data + AT_SIZE, (uint32_t)b->size);
    store_le64(b->data + b->size - 8, hash64(b->data, b->size - 8));
}

/* Replaces the bytes at `at`, and corrects size and checksum. */
static void splice(bytes *b, size_t at, size_t removed, const uint8_t *put, size_t added) {
    bytes old = {0};
    bytes_put(&old, b->data, b->size);
    bytes_clear(b);
    bytes_put(b, old.data, at);
    bytes_put(b, put, added);
    bytes_put(b, old.data + at + removed, old.size - at - removed);
    assert_false(b->failed);
    bytes_free(&old);
    reseal(b);
}

static ckd_status decode(const bytes *b, ckd_error *err) {
    record_arena arena = {0};
    record r;
    /* The copy has the exact size, for the address sanitizer. */
    uint8_t *copy = malloc(b->size);
    memcpy(copy, b->data, b->size);
    reader in = reader_of(copy, b->size);
    ckd_status status = record_decode(&r, &in, &arena, NULL, &(record_place){"a/file", 500}, err);
    if (status != CKD_OK) {
        static const record zero;
        assert_memory_equal(&r, &zero, sizeof(r));
    }
    arena_free(&arena);
    free(copy);
    return status;
}

static bytes encode(const record *r) {
    bytes b = {0};
    record_encode(&b, r);
    assert_false(b.failed);
    return b;
}

static void test_varints(void **state) {
    (void)state;
    static const uint64_t values[] = {0,         1, 127, 128, 300, 16383, 16384, UINT32_MAX, UINT64_MAX >> 1,
                                      UINT64_MAX};
    static const size_t sizes[] = {1, 1, 1, 2, 2, 2, 3, 5, 9, 10};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        bytes b = {0};
        wire_put_varint(&b, values[i]);
        assert_int_equal(b.size, sizes[i]);
        reader in = reader_of(b.data, b.size);
        assert_true(wire_varint(&in) == values[i] && !in.failed && reader_left(&in) == 0);
        for (size_t cut = 0; cut < b.size; cut++) {
            reader part = reader_of(b.data, cut);
            wire_varint(&part);
            assert_true(part.failed);
        }
        bytes_free(&b);
    }
    static const char *const bad[] = {
        "\x80\x00",                                 /* 0 in two bytes */
        "\xff\x80\x00",                             /* 127 in three */
        "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", /* 65 bits */
        "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x81\x01",
    };
    static const size_t bad_sizes[] = {2, 3, 10, 11};
    for (size_t i = 0; i < 4; i++) {
        reader in = reader_of(bad[i], bad_sizes[i]);
        assert_true(wire_varint(&in) == 0);
        assert_true(in.failed);
    }
    reader in = reader_of("\x05", 1);
    assert_true(wire_varint_max(&in, 4) == 0 && in.failed);
}

static bool elements_are(uint64_t expected, ckd_region region, uint32_t ndim, const uint64_t *shape) {
    uint64_t n = 99;
    return region_elements(&n, &region, ndim, shape) && n == expected;
}

static bool refused(ckd_region region, uint32_t ndim, const uint64_t *shape) {
    uint64_t n = 99;
    return !region_elements(&n, &region, ndim, shape) && n == 0;
}

static void test_regions(void **state) {
    (void)state;
    const ckd_region all = {.kind = CKD_REGION_WHOLE};
    const uint64_t matrix[] = {6, 4}, empty[] = {6, 0, 4}, cap[] = {1u << 20, 1u << 20},
                   ones[17] = {1, 1, 1, 1, 1, 1};
    const uint64_t wrap[] = {UINT64_C(1) << 32, UINT64_C(1) << 32}, over[] = {1u << 20, 1u << 20, 2};
    const uint64_t hidden[] = {UINT64_C(1) << 40, 0, UINT64_C(1) << 40};
    uint64_t all_ones[17];
    for (size_t i = 0; i < 17; i++) {
        all_ones[i] = ones[i] ? ones[i] : 1;
    }
    assert_true(elements_are(24, all, 2, matrix));
    assert_true(elements_are(1, all, 0, NULL));
    assert_true(elements_are(0, all, 3, empty));
    assert_true(elements_are(UINT64_C(1) << 40, all, 2, cap));
    assert_true(elements_are(1, all, 16, all_ones));
    assert_true(refused(all, 17, all_ones));
    assert_true(refused(all, 2, wrap));
    assert_true(refused(all, 3, over));
    assert_true(refused(all, 3, hidden));
    assert_true(refused((ckd_region){.kind = (ckd_region_kind)3}, 2, matrix));

    assert_true(elements_are(6, (ckd_region){.kind = CKD_REGION_BOX, .offsets = {4, 1}, .lengths = {2, 3}}, 2,
                             matrix));
    assert_true(elements_are(0, (ckd_region){.kind = CKD_REGION_BOX, .offsets = {6, 4}}, 2, matrix));
    assert_true(elements_are(1, (ckd_region){.kind = CKD_REGION_BOX}, 0, NULL));
    assert_true(
        refused((ckd_region){.kind = CKD_REGION_BOX, .offsets = {4, 1}, .lengths = {3, 3}}, 2, matrix));
    assert_true(
        refused((ckd_region){.kind = CKD_REGION_BOX, .offsets = {7, 0}, .lengths = {0, 1}}, 2, matrix));
    assert_true(refused((ckd_region){.kind = CKD_REGION_BOX, .offsets = {2, 0}, .lengths = {UINT64_MAX, 1}},
                        2, matrix));
    assert_true(refused((ckd_region){.kind = CKD_REGION_BOX, .offsets = {UINT64_MAX, 0}, .lengths = {2, 1}},
                        2, matrix));

    assert_true(elements_are(19, (ckd_region){.kind = CKD_REGION_FLAT, .start = 5, .count = 19}, 2, matrix));
    assert_true(elements_are(0, (ckd_region){.kind = CKD_REGION_FLAT, .start = 24}, 2, matrix));
    assert_true(refused((ckd_region){.kind = CKD_REGION_FLAT, .start = 5, .count = 20}, 2, matrix));
    assert_true(refused((ckd_region){.kind = CKD_REGION_FLAT, .start = 25}, 2, matrix));
    assert_true(
        refused((ckd_region){.kind = CKD_REGION_FLAT, .start = 5, .count = UINT64_MAX - 2}, 2, matrix));
}

static void assert_same_dependency(const dependency *a, const dependency *b, const record *of) {
    assert_int_equal(a->kind, b->kind);
    assert_memory_equal(&a->checkpoint, &b->checkpoint, sizeof(ckd_id));
    assert_string_equal(a->tensor, b->tensor);
    assert_int_equal(a->same_span, b->same_span);
    assert_memory_equal(&a->content, &b->content, sizeof(hash128));
    if (!a->same_span) {
        assert_true(a->first == b->first && a->count == b->count);
        assert_true(record_same_region(a->region, b->region, of->tensor->ndim));
    }
}

static void test_round_trip(void **state) {
    (void)state;
    record records[SAMPLE_COUNT];
    uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES];
    sample_records(records, payloads);
    for (size_t i = 0; i < SAMPLE_COUNT; i++) {
        record_arena arena = {0};
        record r;
        ckd_error err;
        records[i].checksum = 0x0123456789abcdef + i;
        bytes b = encode(&records[i]);
        reader in = reader_of(b.data, b.size);
        assert_int_equal(record_decode(&r, &in, &arena, NULL, &(record_place){"f", 0}, &err), CKD_OK);
        assert_int_equal(reader_left(&in), 0);
        assert_int_equal(r.header_size, b.size);
        assert_int_equal(r.kind, records[i].kind);
        assert_int_equal(r.coding, records[i].coding);
        assert_int_equal(r.predictor, records[i].predictor);
        assert_string_equal(r.tensor->name, records[i].tensor->name);
        assert_int_equal(r.tensor->role, records[i].tensor->role);
        assert_int_equal(r.tensor->dtype, records[i].tensor->dtype);
        assert_int_equal(r.tensor->ndim, records[i].tensor->ndim);
        assert_memory_equal(r.tensor->shape, records[i].tensor->shape, sizeof(r.tensor->shape));
        assert_memory_equal(&r.tensor->checkpoint, &records[i].tensor->checkpoint, sizeof(ckd_id));
        assert_memory_equal(r.region, records[i].region, sizeof(ckd_region));
        assert_true(r.first == records[i].first && r.count == records[i].count);
        assert_true(r.raw_size == records[i].raw_size && r.stored_size == records[i].stored_size);
        assert_true(r.checksum == records[i].checksum);
        assert_memory_equal(&r.content, &records[i].content, sizeof(hash128));
        assert_true(r.depth == records[i].depth && r.chain_stored == records[i].chain_stored);
        assert_true(r.chain_work == records[i].chain_work && r.base_stored == records[i].base_stored);
        assert_int_equal(r.dependency_count, records[i].dependency_count);
        for (uint32_t d = 0; d < r.dependency_count; d++) {
            assert_same_dependency(&r.dependencies[d], &records[i].dependencies[d], &r);
        }
        bytes again = encode(&r);
        assert_int_equal(again.size, b.size);
        assert_memory_equal(again.data, b.data, b.size);
        bytes_free(&again);
        bytes_free(&b);
        arena_free(&arena);
    }
}

/* Fields of a dependency that equal those of its record are omitted, however the caller gives them. */
static void test_dependency_is_written_one_way(void **state) {
    (void)state;
    record r = sample_block();
    r.predictor = PREDICT_COPY;
    r.stored_size = 0;
    r.dependency_count = 1;
    dependency d = {.kind = DEPENDS_VALUES, .checkpoint = sample_id(4), .tensor = "", .same_span = true};
    r.dependencies = &d;
    bytes brief = encode(&r);
    d.tensor = r.tensor->name;
    d.same_span = false;
    d.region = r.region;
    d.count = 24;
    bytes verbose = encode(&r);
    assert_int_equal(brief.size, verbose.size);
    assert_memory_equal(brief.data, verbose.data, brief.size);
    d.count = 23;
    bytes other = encode(&r);
    assert_int_equal(other.size, brief.size + 3);
    bytes_free(&brief);
    bytes_free(&verbose);
    bytes_free(&other);
}

static void test_header_sizes(void **state) {
    (void)state;
    record_tensor t = *sample_block().tensor;
    t.name = "model.layers.31.mlp.down_proj.weight.0000"; /* 41 bytes */
    t.shape[0] = 14336;
    t.shape[1] = 4096;
    record r = sample_block();
    r.tensor = &t;
    r.first = 14336 * 4096 - CKD_BLOCK_ELEMENTS;
    r.count = CKD_BLOCK_ELEMENTS;
    r.raw_size = 1 << 20;
    r.stored_size = r.chain_stored = 800000;
    r.base_stored = 900000;
    r.chain_work = 30000000;
    bytes b = encode(&r);
    assert_in_range(b.size, 100, 140);
    bytes_free(&b);
    dependency d = {.kind = DEPENDS_VALUES, .checkpoint = sample_id(4), .tensor = "", .same_span = true};
    r.dependencies = &d;
    r.dependency_count = 1;
    r.predictor = PREDICT_PARENT;
    b = encode(&r);
    assert_in_range(b.size, 100, 190);
    bytes_free(&b);

    record_tensor small = {.name = "x", .checkpoint = sample_id(1), .role = CKD_ROLE_OTHER, .dtype = CKD_U8};
    record least = {.kind = RECORD_BLOCK, .tensor = &small, .region = r.region, .count = 1, .raw_size = 1};
    b = encode(&least);
    assert_int_equal(b.size, RECORD_HEADER_MIN);
    ckd_error err;
    assert_int_equal(decode(&b, &err), CKD_OK);
    bytes_free(&b);
}

static void test_damage_is_found(void **state) {
    (void)state;
    record records[SAMPLE_COUNT];
    uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES];
    sample_records(records, payloads);
    bytes b = encode(&records[2]);
    ckd_error err;
    for (size_t bit = 0; bit < 8 * b.size; bit++) {
        b.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(decode(&b, &err), CKD_E_CORRUPT);
        assert_int_equal(err.offset, 500);
        assert_string_equal(err.file, "a/file");
        b.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    size_t size = b.size;
    for (b.size = 0; b.size < size; b.size++) {
        assert_int_equal(decode(&b, NULL), CKD_E_CORRUPT);
    }
    assert_int_equal(decode(&b, NULL), CKD_OK);
    bytes_free(&b);
}

/* Fields with senseless values are refused even if the checksum is right. */
static void test_fields_are_checked(void **state) {
    (void)state;
    static const struct {
        size_t at, removed, added;
        uint8_t put[12];
        ckd_status expected;
    } cases[] = {
        {AT_KIND, 1, 1, {1}, CKD_OK},
        {AT_KIND, 1, 1, {9}, CKD_OK}, /* an unknown kind is accepted here */
        {AT_KIND, 1, 2, {0x81, 0x00}, CKD_E_CORRUPT},
        {AT_KIND, 1, 3, {0x80, 0x80, 0x04}, CKD_E_CORRUPT}, /* 65536 */
        {AT_PREDICTOR, 1, 1, {72}, CKD_OK},
        {AT_PREDICTOR, 1, 1, {PREDICT_COPY}, CKD_E_CORRUPT},   /* has a payload */
        {AT_PREDICTOR, 1, 1, {PREDICT_PARENT}, CKD_E_CORRUPT}, /* it lacks a dependency */
        {AT_ROLE, 1, 1, {0}, CKD_E_UNSUPPORTED},
        {AT_ROLE, 1, 1, {6}, CKD_E_UNSUPPORTED},
        {AT_DTYPE, 1, 1, {0}, CKD_E_UNSUPPORTED},
        {AT_DTYPE, 1, 1, {16}, CKD_E_UNSUPPORTED},
        {AT_DTYPE, 1, 1, {CKD_I32}, CKD_OK},
        {AT_DTYPE, 1, 1, {CKD_F64}, CKD_E_CORRUPT}, /* the raw size does not fit */
        {AT_NDIM, 1, 1, {17}, CKD_E_CORRUPT},
        {AT_SHAPE, 1, 1, {7}, CKD_OK},
        {AT_SHAPE, 1, 1, {5}, CKD_E_CORRUPT}, /* fewer elements than the block */
        {AT_SHAPE, 1, 6, {0x80, 0x80, 0x80, 0x80, 0x80, 0x20}, CKD_E_CORRUPT},
        {AT_REGION, 1, 1, {3}, CKD_E_UNSUPPORTED},
        {AT_REGION, 1, 3, {CKD_REGION_FLAT, 0, 24}, CKD_OK},
        {AT_REGION, 1, 3, {CKD_REGION_FLAT, 1, 24}, CKD_E_CORRUPT},
        {AT_REGION, 1, 5, {CKD_REGION_BOX, 0, 0, 6, 4}, CKD_OK},
        {AT_REGION, 1, 5, {CKD_REGION_BOX, 0, 1, 6, 4}, CKD_E_CORRUPT},
        {AT_FIRST, 1, 1, {1}, CKD_E_CORRUPT},
        {AT_FIRST, 1, 10, {0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, CKD_E_CORRUPT},
        {AT_COUNT, 1, 1, {23}, CKD_E_CORRUPT},
        {AT_COUNT, 3, 3, {0, 0, 0}, CKD_E_CORRUPT}, /* an empty block, but the tensor is not empty */
        {AT_RAW, 1, 1, {97}, CKD_E_CORRUPT},
        {AT_STORED, 1, 1, {95}, CKD_OK},
        {AT_STORED, 1, 1, {97}, CKD_E_CORRUPT},
        {AT_CHECKPOINT, 3, 3, {0, 0, 0}, CKD_E_CORRUPT}, /* the zero id */
        {AT_NAME_SIZE, 1, 1, {13}, CKD_E_CORRUPT},
        {AT_NAME_SIZE, 1, 1, {0}, CKD_E_CORRUPT},
        {AT_NAME, 1, 1, {0}, CKD_E_CORRUPT},
        {AT_NAME + 3, 1, 1, {0}, CKD_E_CORRUPT}, /* a NUL inside of the name */
        {AT_NAME, 1, 1, {0xff}, CKD_E_CORRUPT},
        {AT_NAME, 1, 1, {'"'}, CKD_OK},
        {AT_DEPENDENCIES, 1, 1, {1}, CKD_E_CORRUPT},
        {AT_DEPENDENCIES, 1, 2, {0x81, 0x08}, CKD_E_CORRUPT},
        {AT_DEPENDENCIES, 1, 2, {0, 0}, CKD_E_CORRUPT}, /* a byte without meaning */
    };
    record r = sample_block();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bytes b = encode(&r);
        splice(&b, cases[i].at, cases[i].removed, cases[i].put, cases[i].added);
        ckd_error err = {0};
        ckd_status status = decode(&b, &err);
        if (status != cases[i].expected) {
            fail_msg("case %zu: %s, not %s: %s", i, ckd_status_name(status),
                     ckd_status_name(cases[i].expected), err.message);
        }
        bytes_free(&b);
    }
}

static void test_sizes_in_front(void **state) {
    (void)state;
    record r = sample_block();
    bytes b = encode(&r);
    static const uint32_t sizes[] = {0, 8, RECORD_HEADER_MIN - 1, RECORD_HEADER_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        store_le32(b.data + AT_SIZE, sizes[i]);
        assert_int_equal(decode(&b, NULL), CKD_E_CORRUPT);
    }
    bytes_free(&b);
}

static const uint8_t *dependency_flags_of(const bytes *b, size_t tail) {
    return b->data + b->size - 8 - tail;
}

static void test_dependency_encoding_is_checked(void **state) {
    (void)state;
    record r = sample_block();
    dependency d = {.kind = DEPENDS_VALUES, .checkpoint = sample_id(4), .tensor = "", .same_span = true};
    r.dependencies = &d;
    r.dependency_count = 1;
    ckd_error err;
    /* kind, flags, checkpoint, content */
    for (unsigned flags = 0; flags < 256; flags++) {
        bytes b = encode(&r);
        size_t at = (size_t)(dependency_flags_of(&b, 16 + 16 + 1) - b.data);
        assert_int_equal(b.data[at], DEPENDENCY_OTHER_CHECKPOINT);
        b.data[at] = (uint8_t)flags;
        reseal(&b);
        assert_int_equal(decode(&b, &err) == CKD_OK, flags == DEPENDENCY_OTHER_CHECKPOINT);
        bytes_free(&b);
    }
    /* The record's own checkpoint, written in full. */
    bytes b = encode(&r);
    memcpy(b.data + b.size - 8 - 16 - 16, r.tensor->checkpoint.bytes, 16);
    reseal(&b);
    assert_int_equal(decode(&b, &err), CKD_E_CORRUPT);
    bytes_free(&b);

    /* Spans that no tensor can have. */
    static const struct {
        ckd_region region;
        uint64_t first, count;
    } spans[] = {
        {{.kind = CKD_REGION_FLAT, .start = 1, .count = UINT64_MAX}, 0, 1},
        {{.kind = CKD_REGION_FLAT, .start = UINT64_C(1) << 40, .count = 1}, 0, 1},
        {{.kind = CKD_REGION_FLAT, .start = 0, .count = 10}, 5, 6},
        {{.kind = CKD_REGION_FLAT, .start = 0, .count = 10}, UINT64_MAX, 2},
        {{.kind = CKD_REGION_BOX, .offsets = {1, UINT64_MAX}, .lengths = {1, 1}}, 0, 1},
        {{.kind = CKD_REGION_BOX, .lengths = {UINT64_C(1) << 32, UINT64_C(1) << 32}}, 0, 1},
        {{.kind = CKD_REGION_BOX, .lengths = {2, 2}}, 0, 5},
        {{.kind = CKD_REGION_WHOLE}, 0, (UINT64_C(1) << 40) + 1},
    };
    for (size_t i = 0; i < sizeof(spans) / sizeof(spans[0]); i++) {
        ckd_status status;
        d.same_span = false;
        d.region = &spans[i].region;
        d.first = spans[i].first;
        d.count = spans[i].count;
        assert_non_null(record_problem(&r, &status));
        b = encode(&r);
        assert_int_equal(decode(&b, &err), CKD_E_CORRUPT);
        bytes_free(&b);
    }
    d.region = &(ckd_region){.kind = (ckd_region_kind)7};
    b = encode(&r);
    assert_int_equal(decode(&b, &err), CKD_E_UNSUPPORTED);
    bytes_free(&b);
}

static void test_many_dependencies(void **state) {
    (void)state;
    static dependency many[RECORD_MAX_DEPENDENCIES + 1];
    record r = sample_block();
    for (size_t i = 0; i < RECORD_MAX_DEPENDENCIES + 1; i++) {
        many[i] = (dependency){
            .kind = DEPENDS_SIDE, .checkpoint = r.tensor->checkpoint, .tensor = "", .same_span = true};
        many[i].content.bytes[0] = (uint8_t)i;
    }
    r.dependencies = many;
    r.dependency_count = RECORD_MAX_DEPENDENCIES;
    bytes b = encode(&r);
    assert_int_equal(decode(&b, NULL), CKD_OK);
    bytes_free(&b);
    r.dependency_count++;
    b = encode(&r);
    assert_int_equal(decode(&b, NULL), CKD_E_CORRUPT);
    bytes_free(&b);
}

/* Many dependencies with long names: more than a header may have. */
static void test_largest_header(void **state) {
    (void)state;
    static dependency many[RECORD_MAX_DEPENDENCIES];
    static char name[CKD_NAME_MAX + 1];
    memset(name, 'n', CKD_NAME_MAX);
    record r = sample_block();
    for (size_t i = 0; i < RECORD_MAX_DEPENDENCIES; i++) {
        many[i] = (dependency){
            .kind = DEPENDS_SIDE, .checkpoint = r.tensor->checkpoint, .tensor = name, .same_span = true};
    }
    r.dependencies = many;
    for (r.dependency_count = 1004; r.dependency_count <= 1006; r.dependency_count++) {
        bytes b = encode(&r);
        assert_int_equal(decode(&b, NULL), b.size <= RECORD_HEADER_MAX ? CKD_OK : CKD_E_CORRUPT);
        assert_in_range(b.size, RECORD_HEADER_MAX - 3000, RECORD_HEADER_MAX + 3000);
        bytes_free(&b);
    }
}

static void test_sizes_by_kind(void **state) {
    (void)state;
    static const struct {
        uint32_t kind;
        uint64_t cap;
    } caps[] = {
        {RECORD_SIDE, RECORD_SIDE_MAX},
        {RECORD_GROUP, RECORD_GROUP_MAX},
        {RECORD_BLOB, RECORD_BLOB_MAX},
    };
    for (size_t i = 0; i < 3; i++) {
        ckd_status status;
        record r = sample_block();
        r.kind = caps[i].kind;
        r.raw_size = caps[i].cap;
        assert_null(record_problem(&r, &status));
        r.raw_size++;
        assert_non_null(record_problem(&r, &status));
        r.raw_size = 95;
        assert_non_null(record_problem(&r, &status)); /* the payload has 96 bytes */
    }
}

static void test_unsupported_names_the_tensor(void **state) {
    (void)state;
    record_tensor t = *sample_block().tensor;
    t.dtype = (ckd_dtype)99;
    record r = sample_block();
    r.tensor = &t;
    bytes b = encode(&r);
    ckd_error err;
    assert_int_equal(decode(&b, &err), CKD_E_UNSUPPORTED);
    assert_string_equal(err.tensor, "layer.0.weight");
    assert_non_null(strstr(err.message, "99"));
    bytes_free(&b);
}

static void test_equal_parts_are_shared(void **state) {
    (void)state;
    record_arena arena = {0};
    record a = sample_block(), got[3];
    record_tensor other = *a.tensor;
    other.checkpoint = sample_id(8);
    bytes b = {0};
    record_encode(&b, &a);
    record_encode(&b, &a);
    a.tensor = &other;
    record_encode(&b, &a);
    reader in = reader_of(b.data, b.size);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(
            record_decode(&got[i], &in, &arena, i ? &got[i - 1] : NULL, &(record_place){"f", 0}, NULL),
            CKD_OK);
    }
    assert_int_equal(reader_left(&in), 0);
    assert_ptr_equal(got[0].tensor, got[1].tensor);
    assert_ptr_equal(got[0].region, got[2].region);
    assert_ptr_not_equal(got[1].tensor, got[2].tensor);
    arena_free(&arena);
    bytes_free(&b);
}

static void test_arena(void **state) {
    (void)state;
    record_arena arena = {0};
    for (size_t i = 0; i < 3000; i++) {
        size_t size = i % 100 == 99 ? 100000 : i % 57;
        uint8_t *p = arena_alloc(&arena, size);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        for (size_t k = 0; k < size; k++) {
            assert_int_equal(p[k], 0);
            p[k] = 0xff;
        }
    }
    assert_null(arena_alloc(&arena, SIZE_MAX - 3));
    arena_free(&arena);
    assert_null(arena.slabs);
    arena_free(&arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_varints),
        cmocka_unit_test(test_regions),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_dependency_is_written_one_way),
        cmocka_unit_test(test_header_sizes),
        cmocka_unit_test(test_damage_is_found),
        cmocka_unit_test(test_fields_are_checked),
        cmocka_unit_test(test_sizes_in_front),
        cmocka_unit_test(test_dependency_encoding_is_checked),
        cmocka_unit_test(test_many_dependencies),
        cmocka_unit_test(test_largest_header),
        cmocka_unit_test(test_sizes_by_kind),
        cmocka_unit_test(test_unsupported_names_the_tensor),
        cmocka_unit_test(test_equal_parts_are_shared),
        cmocka_unit_test(test_arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
