#include "samples.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

ckd_id sample_id(uint8_t fill) {
    ckd_id id;
    memset(id.bytes, fill, sizeof(id.bytes));
    return id;
}

static const record_tensor weight = {
    .name = "layer.0.weight",
    .checkpoint = {{0xc1, 2, 3}},
    .role = CKD_ROLE_WEIGHT,
    .dtype = CKD_F32,
    .ndim = 2,
    .shape = {6, 4},
};
static const record_tensor moment = {
    .name = "exp_avg.layer.0.weight",
    .checkpoint = {{0xc1, 2, 3}},
    .role = CKD_ROLE_EXP_AVG,
    .dtype = CKD_BF16,
    .ndim = 2,
    .shape = {6, 4},
};
static const record_tensor blob = {.name = "rng/\xc3\xa9tat", .checkpoint = {{0xc1, 2, 3}}};
static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
static const ckd_region box = {.kind = CKD_REGION_BOX, .offsets = {2, 1}, .lengths = {4, 3}};
static const ckd_region flat = {.kind = CKD_REGION_FLAT, .start = 5, .count = 19};

static const dependency to_parent[] = {
    {.kind = DEPENDS_VALUES, .checkpoint = {{0xc0}}, .tensor = "", .same_span = true, .content = {{9, 8, 7}}},
    {.kind = DEPENDS_SIDE,
     .checkpoint = {{0xc1, 2, 3}},
     .tensor = "stats",
     .same_span = true,
     .content = {{1}}},
    {.kind = DEPENDS_VALUES,
     .checkpoint = {{0xc1, 2, 3}},
     .tensor = "layer.0.weight",
     .region = &(const ckd_region){.kind = CKD_REGION_BOX, .offsets = {1, 0}, .lengths = {2, 4}},
     .first = 2,
     .count = 5,
     .content = {{2}}},
    {.kind = 77,
     .checkpoint = {{0xc5}},
     .tensor = "else.where",
     .region = &(const ckd_region){.kind = CKD_REGION_FLAT, .start = 300, .count = 1000},
     .first = 200,
     .count = 800,
     .content = {{3}}},
};

record sample_block(void) {
    record r = {
        .kind = RECORD_BLOCK,
        .tensor = &weight,
        .region = &whole,
        .count = 24,
        .raw_size = 96,
        .stored_size = 96,
        .chain_stored = 96,
        .chain_work = 1000,
        .base_stored = 96,
    };
    return r;
}

void sample_records(record records[SAMPLE_COUNT], uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES]) {
    for (size_t i = 0; i < SAMPLE_COUNT; i++) {
        records[i] = sample_block();
        for (size_t k = 0; k < SAMPLE_BYTES; k++) {
            payloads[i][k] = (uint8_t)(i * 37 + k * k);
        }
    }
    /* Two blocks of one shard. */
    records[0].count = 20;
    records[0].raw_size = records[0].stored_size = 80;
    records[1].first = 20;
    records[1].count = 4;
    records[1].raw_size = 16;
    records[1].stored_size = 11;
    records[1].coding = 1;
    /* A delta on a flat range, with dependencies of all kinds. */
    records[2].tensor = &moment;
    records[2].region = &flat;
    records[2].first = 4;
    records[2].count = 15;
    records[2].raw_size = 30;
    records[2].stored_size = 7;
    records[2].coding = 5;
    records[2].predictor = PREDICT_PARENT;
    records[2].depth = 3;
    records[2].dependencies = to_parent;
    records[2].dependency_count = 4;
    /* A copy of a box. */
    records[3].region = &box;
    records[3].count = 12;
    records[3].raw_size = 48;
    records[3].stored_size = 0;
    records[3].predictor = PREDICT_COPY;
    records[3].dependencies = to_parent;
    records[3].dependency_count = 1;
    records[4].kind = RECORD_SIDE;
    records[4].raw_size = 200;
    records[4].stored_size = 150;
    records[5].kind = RECORD_BLOB;
    records[5].tensor = &blob;
    records[5].count = 0;
    records[5].raw_size = records[5].stored_size = 5;
    records[6].kind = 9;
    records[6].coding = 4711;
    records[6].predictor = 65535;
    records[6].raw_size = UINT64_MAX;
    records[6].stored_size = 256;
    for (size_t i = 0; i < SAMPLE_COUNT; i++) {
        records[i].content = hash128_of(payloads[i], SAMPLE_BYTES);
    }
}

void sample_write(const char *path, record *records, uint8_t (*payloads)[SAMPLE_BYTES], size_t count,
                  hash128 *root, uint64_t *size) {
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    ckd_error err;
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &identity, &err), CKD_OK);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(chunk_writer_append(w, &records[i], payloads[i], &err), CKD_OK);
    }
    assert_int_equal(chunk_writer_finish_durable(w, root, size, &err), CKD_OK);
}
