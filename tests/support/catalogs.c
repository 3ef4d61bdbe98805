#include "tests/support/catalogs.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

ckd_id catalog_sample_id(uint64_t seed) {
    ckd_id id;
    for (size_t i = 0; i < sizeof(id.bytes); i++) {
        id.bytes[i] = (uint8_t)(i < 8 ? seed >> (8 * i) : 0xa0 + i);
    }
    return id;
}

static void fill_shards(catalog_shard *s, uint64_t seed) {
    static const uint64_t matrix[] = {768, 3072}, empty[] = {0, 5};
    static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
    static const ckd_region boxes[] = {
        {.kind = CKD_REGION_BOX, .offsets = {0, 0}, .lengths = {384, 3072}},
        {.kind = CKD_REGION_BOX, .offsets = {384, 0}, .lengths = {384, 3072}},
    };
    static const ckd_region flats[] = {
        {.kind = CKD_REGION_FLAT, .start = 0, .count = 1000000},
        {.kind = CKD_REGION_FLAT, .start = 1000000, .count = 1359296},
    };
    static const struct {
        const char *tensor;
        uint32_t ordinal, index, ndim;
        ckd_role role;
        ckd_dtype dtype;
        const uint64_t *shape;
        const ckd_region *region;
        uint64_t elements, raw_bytes;
        const char *coding;
        uint32_t depth;
        double rel_l2, max_error;
    } rows[SAMPLE_SHARDS] = {
        {"layers.0.weight", 0, 0, 2, CKD_ROLE_WEIGHT, CKD_F32, matrix, &boxes[0], 1179648, 4718592, "delta",
         3, 0.25, 1e-3},
        {"layers.0.weight", 0, 1, 2, CKD_ROLE_WEIGHT, CKD_F32, matrix, &boxes[1], 1179648, 4718592,
         "standalone", 0, 0.5, 1e-4},
        {"exp_avg.layers.0.weight", 1, 0, 2, CKD_ROLE_EXP_AVG, CKD_F32, matrix, &flats[0], 1000000, 4000000,
         "delta", 1, (double)NAN, 0},
        {"exp_avg.layers.0.weight", 1, 1, 2, CKD_ROLE_EXP_AVG, CKD_F32, matrix, &flats[1], 1359296, 5437184,
         "delta", 2, 0.125, 0},
        {"a.step", 2, 0, 0, CKD_ROLE_OTHER, CKD_I64, NULL, &whole, 1, 8, "raw", 0, 0, 0},
        {"größe", 3, 7, 2, CKD_ROLE_WEIGHT, CKD_BF16, empty, &whole, 0, 0, "same", 1, 0, 0},
    };
    for (size_t i = 0; i < SAMPLE_SHARDS; i++) {
        s[i] = (catalog_shard){
            .tensor = rows[i].tensor,
            .ordinal = rows[i].ordinal,
            .index = rows[i].index,
            .role = rows[i].role,
            .dtype = rows[i].dtype,
            .ndim = rows[i].ndim,
            .shape = rows[i].shape,
            .region = rows[i].region,
            .elements = rows[i].elements,
            .raw_bytes = rows[i].raw_bytes,
            .stored_bytes = rows[i].raw_bytes / 4 + seed + i,
            .coding = rows[i].coding,
            .depth = rows[i].depth,
            .rel_l2 = rows[i].rel_l2,
            .max_error = rows[i].max_error,
        };
    }
}

void catalog_sample_init(catalog_sample *s, const char *run, uint64_t step, uint64_t seed) {
    memset(s, 0, sizeof(*s));
    s->checkpoint = (ckd_checkpoint){
        .id = catalog_sample_id(seed),
        .parent = catalog_sample_id(seed - 1),
        .resumed_from = catalog_sample_id(seed + 1000000),
        .step = step,
        .kind = CKD_DELTA,
        .fidelity = CKD_EXACT,
        .lossy_resumes = 2,
        .depth = 3,
        .world = 4,
        .tensors = SAMPLE_TENSORS,
        .raw_bytes = 18874376 + seed,
        .stored_bytes = 4718594 + seed,
        .load_cost = 1.75,
        .created_ns = UINT64_C(1700000000123456789) + seed,
        .metric = -3.0625,
        .metric_name = "val_loss",
    };
    snprintf(s->checkpoint.run, sizeof(s->checkpoint.run), "%s", run);
    for (uint32_t i = 0; i < SAMPLE_FILES; i++) {
        catalog_file *f = &s->files[i];
        snprintf(f->name, sizeof(f->name), "%016llx.%u", (unsigned long long)seed, i);
        f->rank = i;
        f->size = 1000 * (i + 1) + seed;
        memset(f->root.bytes, (int)(i + 1), sizeof(f->root.bytes));
    }
    fill_shards(s->shards, seed);
    s->entry = (catalog_entry){
        .checkpoint = &s->checkpoint,
        .manifest_bytes = 512 + seed,
        .files = s->files,
        .file_count = SAMPLE_FILES,
        .shards = s->shards,
        .shard_count = SAMPLE_SHARDS,
    };
}

ckd_id catalog_sample_store(void) {
    return catalog_sample_id(0x5357);
}

const char *catalog_sample_path(const char *dir, const char *name) {
    static char paths[2][1024];
    static int next;
    next = !next;
    snprintf(paths[next], sizeof(paths[next]), "%s/%s", dir, name);
    return paths[next];
}

catalog *catalog_sample_open(const char *dir, catalog_mode mode) {
    catalog *c = NULL;
    ckd_error err = {0};
    ckd_id store = catalog_sample_store();
    if (catalog_open(&c, catalog_sample_path(dir, "catalog.db"), mode, &store, 0, &err) != CKD_OK) {
        fail_msg("catalog_open: %s", err.message);
    }
    return c;
}

void catalog_sample_add(catalog *c, const char *run, uint64_t step, uint64_t seed) {
    catalog_sample s;
    ckd_error err = {0};
    catalog_sample_init(&s, run, step, seed);
    if (catalog_begin(c, &err) != CKD_OK || catalog_add(c, &s.entry, &err) != CKD_OK ||
        catalog_commit(c, &err) != CKD_OK) {
        fail_msg("adding %s@%llu: %s", run, (unsigned long long)step, err.message);
    }
}

unsigned char *catalog_sample_read(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long end = ftell(f);
    assert_true(end >= 0);
    rewind(f);
    unsigned char *data = malloc((size_t)end + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, (size_t)end, f), (size_t)end);
    fclose(f);
    *size = (size_t)end;
    return data;
}

void catalog_sample_write(const char *path, const unsigned char *data, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

void catalog_sample_roles(ckd_usage rows[8], size_t *count, catalog *c) {
    ckd_checkpoint_list list;
    ckd_checkpoint_roles *roles;
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    assert_int_equal(catalog_usage_by_checkpoint(&roles, &list, c, NULL), CKD_OK);
    memset(rows, 0, 8 * sizeof(*rows));
    *count = 0;
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        ckd_usage *u = &rows[*count];
        for (size_t i = 0; i < list.count; i++) {
            const ckd_role_bytes *b = &roles[i].roles[role];
            u->checkpoints += b->elements || b->stored_bytes;
            u->raw_bytes += b->raw_bytes;
            u->stored_bytes += b->stored_bytes;
        }
        snprintf(u->name, sizeof(u->name), "%s", ckd_role_name(role));
        *count += u->checkpoints > 0;
    }
    free(roles);
    catalog_list_free(&list);
}
