/* Large lossy matrices stored as cells: several tiles, damage, compaction, materialized copies. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "base/file.h"
#include "base/hash.h"
#include "codec/chunk/chunk.h"
#include "tests/support/cells.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* The matrix is coded in tiles of a few rows. Cells end at the ends of tiles. */
static void test_several_tiles(void **state) {
    cells_scene *f = *state;
    const uint64_t rows = 2500, columns = 1000, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t step = 0; step < 3; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.staging_bytes = 1;
        ckd_save *save = begin_with(f->store, &o);
        save->coding.grid = (save_grid){
            .row_sides = {300, 32, 200}, .column_sides = {300, 32, 200}, .elements = 4096, .columns = 32};
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-4 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        add_tensor(save, "exp_avg.w", CKD_F32, 2, shape, NULL, values);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        for (int k = 0; k < 2; k++) {
            float *whole = load_floats(f->store, "run", step, cells_names[k], CKD_F32, rows * columns);
            ckd_load *load = cells_load(f, step);
            ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {1001, 333}, .lengths = {1100, 257}};
            cells_check_box(load, cells_names[k], whole, columns, &r);
            assert_true(cells_shards(f, step, cells_names[k]) > 3);
            ckd_load_end(load);
            free(whole);
        }
    }
    free(values);
    assert_int_equal(verify_damage(f->store), 0);
}

/* The last tile is so small that it is stored exactly. It has the panels of the other tiles. */
static void test_exact_tile(void **state) {
    cells_scene *f = *state;
    const uint64_t columns = 40, rows = (1 << 20) / columns + 1, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.staging_bytes = 1;
        ckd_save *save = begin_with(f->store, &o);
        save->coding.grid = (save_grid){
            .row_sides = {400, 32, 300}, .column_sides = {20, 4, 20}, .elements = 4096, .columns = 32};
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-3 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        assert_int_equal(cells_shards(f, step, "w"), 2);
        float *whole = load_floats(f->store, "run", step, "w", CKD_F32, rows * columns);
        assert_memory_equal(whole + (rows - 1) * columns, values + (rows - 1) * columns,
                            columns * sizeof(float));
        assert_true(relative_error(whole, values, rows * columns) < 0.05);
        assert_true(memcmp(whole, values, rows * columns * sizeof(float)) != 0);
        free(whole);
    }
    free(values);
}

/* Each panel has a single block, so no two blocks share columns. */
static void test_one_band(void **state) {
    cells_scene *f = *state;
    const uint64_t rows = 30, columns = 1600, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t i = 0; i < rows * columns; i++) {
        values[i] = ldexpf(values[i], (int)(i / columns) % 5);
    }
    ckd_save *save = cells_save(f, 0, CKD_NEAR, &cells_other);
    add_tensor(save, "exp_avg.w", CKD_F32, 2, shape, NULL, values);
    commit_save(save);
    cells_found m = cells_look(f, 0, "exp_avg.w");
    assert_true(m.sharing > 10 && m.sharing == m.blocks && m.blocks == cells_shards(f, 0, "exp_avg.w"));
    float *whole = load_floats(f->store, "run", 0, "exp_avg.w", CKD_F32, rows * columns);
    ckd_load *load = cells_load(f, 0);
    ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {3, 777}, .lengths = {20, 333}};
    cells_check_box(load, "exp_avg.w", whole, columns, &r);
    ckd_load_end(load);
    free(values);
    free(whole);
    assert_int_equal(verify_damage(f->store), 0);
}

/* ---- damage, compaction, materialized copies ---- */

/* A record with the rows that several panels share is damaged. The error names the file and the tensor. */
static void test_damaged_rows(void **state) {
    cells_scene *f = *state;
    cells_save_next(f, 0, CKD_NEAR, &cells_small);
    cells_save_next(f, 1, CKD_NEAR, &cells_small);
    cells_found w = cells_look(f, 1, "w");
    assert_true(w.sharing > 0);
    size_t size;
    unsigned char *data = read_whole_file(w.path, &size);
    data[w.side.payload_offset + w.side.stored_size / 2] ^= 1;
    write_whole_file(w.path, data, size);
    free(data);
    assert_true(verify_damage(f->store) > 0);
    ckd_store_close(f->store);
    f->store = store_reopen(f->dir, CKD_OPEN_READ);
    ckd_load *load = cells_load(f, 1);
    float *to = malloc(CELLS_COUNT * sizeof(float));
    assert_non_null(to);
    ckd_error err = {0};
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.data = to;
    q.size = CELLS_COUNT * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_E_CORRUPT);
    assert_string_equal(err.file, w.path);
    assert_string_equal(err.tensor, "w");
    /* Rows that do not need the damaged record still load. */
    uint64_t row = w.side.first / CELLS_COLUMNS, rows = w.side.count / CELLS_COLUMNS;
    assert_true(rows < CELLS_ROWS / 2);
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .lengths = {CELLS_ROWS - row - rows, CELLS_COLUMNS}};
    q.region.offsets[0] = row + rows;
    if (row + rows == CELLS_ROWS) {
        q.region.offsets[0] = 0;
        q.region.lengths[0] = row;
    }
    q.size = q.region.lengths[0] * CELLS_COLUMNS * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    ckd_load_end(load);
    free(to);
}

/* The file's header lacks a feature that its blocks need. */
static void test_missing_feature(void **state) {
    cells_scene *f = *state;
    cells_save_next(f, 0, CKD_NEAR, &cells_small);
    cells_save_next(f, 1, CKD_NEAR, &cells_small);
    cells_found w = cells_look(f, 1, "w");
    size_t size;
    unsigned char *data = read_whole_file(w.path, &size);
    assert_int_equal(data[16], 3); /* the features for bundles and shared rows */
    data[16] = 1;
    store_le64(data + 80, hash64(data, 80));
    write_whole_file(w.path, data, size);
    free(data);
    chunk *c;
    ckd_error err = {0};
    assert_int_equal(chunk_open(&c, w.path, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "shares its rows"));
}

/* The remaining checkpoints keep their values, although deltas and lossy bases were rewritten. */
static void test_compaction(void **state) {
    cells_scene *f = *state;
    f->finite_moments = true; /* an infinite one makes checkpoints suspect, and no rule keeps those */
    for (uint64_t step = 0; step < 9; step++) {
        cells_save_next(f, step, CKD_NEAR, &cells_other);
    }
    fingerprints before = fingerprints_of(f->store);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 2;
    policy.keep_every = 4;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.policy = &policy;
    o.max_depth = 64;
    ckd_compaction *done;
    ckd_error err = {0};
    if (ckd_compact(&done, f->store, &o, &err) != CKD_OK) {
        fail_msg("compact: %s (%s)", err.message, err.file);
    }
    assert_int_equal(done->left, 0);
    ckd_compaction_free(done);
    assert_int_equal(fingerprints_check(f->store, &before), 4);
    fingerprints_free(&before);
    assert_true(cells_look(f, 8, "w").sharing > 0);
    cells_check_parts(f, 8);
    cells_check_parts(f, 4);
    assert_int_equal(verify_damage(f->store), 0);
    cells_save_next(f, 9, CKD_NEAR, &cells_other);
    assert_int_equal(cells_shards(f, 9, "w"), cells_shards(f, 8, "w"));
    cells_check_parts(f, 9);
}

/* The values are the same with and without materialized copies. */
static void test_ready_copies(void **state) {
    cells_scene *f = *state;
    char folder[4096];
    dir_list copies;
    for (uint64_t step = 0; step < 6; step++) {
        for (int i = 0; i < 4 && step; i++) {
            drift_step(&f->d);
        }
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.max_load_cost = 1000;
        o.newest_load_cost = 1;
        ckd_save *save = begin_with(f->store, &o);
        save->coding.grid = cells_small;
        add_drift(save, "w", &f->d);
        commit_save(save);
    }
    snprintf(folder, sizeof(folder), "%s/store/data/k", f->dir);
    assert_int_equal(dir_list_read(&copies, folder, NULL), CKD_OK);
    assert_true(copies.count > 0);
    float *with = load_floats(f->store, "run", 5, "w", CKD_F32, CELLS_COUNT);
    cells_check_parts(f, 5);
    for (size_t i = 0; i < copies.count; i++) {
        char path[4600];
        snprintf(path, sizeof(path), "%s/%s", folder, copies.names[i]);
        assert_int_equal(remove(path), 0);
    }
    dir_list_free(&copies);
    float *without = load_floats(f->store, "run", 5, "w", CKD_F32, CELLS_COUNT);
    assert_memory_equal(with, without, CELLS_COUNT * sizeof(float));
    free(with);
    free(without);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, cells_begin, cells_end)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_STORE(test_several_tiles), WITH_STORE(test_exact_tile),      WITH_STORE(test_one_band),
        WITH_STORE(test_damaged_rows),  WITH_STORE(test_missing_feature), WITH_STORE(test_compaction),
        WITH_STORE(test_ready_copies),
    };
    return cmocka_run_group_tests_name("cells kept", tests, NULL, NULL);
}
