#include "tests/support/cells.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

const char *const cells_names[3] = {"w", "exp_avg.w", "exp_avg_sq.w"};
const save_grid cells_small = {
    .row_sides = {32, 4, 16}, .column_sides = {32, 4, 20}, .elements = 4096, .columns = 32};
const save_grid cells_other = {
    .row_sides = {64, 4, 48}, .column_sides = {80, 4, 60}, .elements = 4096, .columns = 32};
const save_grid cells_none = {.row_sides = {64, 4, 48}, .column_sides = {64, 4, 48}, .elements = UINT64_MAX};

/* ---- saving ---- */

drift cells_state(void) {
    drift d = drift_new(CELLS_ROWS, CELLS_COLUMNS, 7);
    for (uint64_t i = 0; i < CELLS_COUNT; i++) {
        int scale = (int)(i % CELLS_COLUMNS * 7 % 9) - 4;
        d.first[i] = ldexpf(d.first[i], scale);
        d.second[i] = ldexpf(d.second[i], 2 * scale);
        d.usual[i] = ldexpf(d.usual[i], 2 * scale);
    }
    return d;
}

int cells_begin(void **state) {
    cells_scene *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->dir = tempdir_create();
    f->store = store_create(f->dir);
    f->d = cells_state();
    *state = f;
    return 0;
}

int cells_end(void **state) {
    cells_scene *f = *state;
    ckd_store_close(f->store);
    tempdir_remove(f->dir);
    drift_free(&f->d);
    free(f);
    return 0;
}

ckd_save *cells_save(const cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid) {
    ckd_save_options o = lossy_options("run", step, fidelity);
    o.max_load_cost = o.newest_load_cost = 1000;
    ckd_save *save = begin_with(f->store, &o);
    save->coding.grid = *grid;
    return save;
}

void cells_save_next(cells_scene *f, uint64_t step, ckd_fidelity fidelity, const save_grid *grid) {
    for (int i = 0; i < 4 && step; i++) {
        drift_step(&f->d);
    }
    f->d.weight[5 * CELLS_COLUMNS + 77] = NAN;
    if (!f->finite_moments) {
        f->d.first[CELLS_COUNT - 1] = INFINITY;
    }
    ckd_save *save = cells_save(f, step, fidelity, grid);
    add_drift(save, "w", &f->d);
    commit_save(save);
}

uint64_t cells_shards(const cells_scene *f, uint64_t step, const char *name) {
    return tensor_info(f->store, "run", step, name).shards;
}

/* ---- loading ---- */

ckd_load *cells_load(const cells_scene *f, uint64_t step) {
    ckd_checkpoint c = checkpoint_at(f->store, "run", step);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, f->store, &c.id, NULL), CKD_OK);
    return load;
}

void cells_check_box(ckd_load *load, const char *name, const float *whole, uint64_t columns,
                     const ckd_region *r) {
    uint64_t count = r->lengths[0] * r->lengths[1];
    float *slice = malloc(count * sizeof(float) + 1);
    assert_non_null(slice);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.region = *r;
    q.data = slice;
    q.size = count * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
    for (uint64_t row = 0; row < r->lengths[0]; row++) {
        assert_memory_equal(slice + row * r->lengths[1],
                            whole + (r->offsets[0] + row) * columns + r->offsets[1],
                            r->lengths[1] * sizeof(float));
    }
    free(slice);
}

static void check_grid(ckd_load *load, const char *name, const float *whole, uint64_t down, uint64_t across) {
    for (uint64_t i = 0; i < down * across; i++) {
        uint64_t row = i / across, column = i % across;
        ckd_region r = {.kind = CKD_REGION_BOX,
                        .offsets = {CELLS_ROWS * row / down, CELLS_COLUMNS * column / across}};
        r.lengths[0] = CELLS_ROWS * (row + 1) / down - r.offsets[0];
        r.lengths[1] = CELLS_COLUMNS * (column + 1) / across - r.offsets[1];
        cells_check_box(load, name, whole, CELLS_COLUMNS, &r);
    }
}

static void check_flat(ckd_load *load, const char *name, const float *whole, uint64_t parts) {
    for (uint64_t i = 0; i < parts; i++) {
        ckd_region r = {.kind = CKD_REGION_FLAT, .start = CELLS_COUNT * i / parts};
        r.count = CELLS_COUNT * (i + 1) / parts - r.start;
        float *slice = malloc(r.count * sizeof(float));
        assert_non_null(slice);
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = name;
        q.region = r;
        q.data = slice;
        q.size = r.count * sizeof(float);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        assert_memory_equal(slice, whole + r.start, q.size);
        free(slice);
    }
}

void cells_check_parts(const cells_scene *f, uint64_t step) {
    static const uint64_t grids[][2] = {{1, 2}, {1, 3}, {1, 5}, {1, 7}, {1, 8}, {2, 1}, {3, 1},
                                        {7, 1}, {8, 1}, {2, 2}, {3, 3}, {5, 3}, {4, 8}};
    ckd_load *load = cells_load(f, step);
    for (size_t n = 0; n < 3; n++) {
        float *whole = load_floats(f->store, "run", step, cells_names[n], CKD_F32, CELLS_COUNT);
        for (size_t i = 0; i < sizeof(grids) / sizeof(grids[0]); i++) {
            check_grid(load, cells_names[n], whole, grids[i][0], grids[i][1]);
        }
        check_flat(load, cells_names[n], whole, 3);
        check_flat(load, cells_names[n], whole, 8);
        ckd_region odd = {.kind = CKD_REGION_BOX, .offsets = {17, 39}, .lengths = {51, 3}};
        cells_check_box(load, cells_names[n], whole, CELLS_COLUMNS, &odd);
        free(whole);
    }
    ckd_load_end(load);
}

/* ---- records in the files ---- */

static void look_at(cells_found *out, const chunk *c, const ckd_id *of, const char *name) {
    for (size_t i = 0; i < c->record_count; i++) {
        const record *r = &c->records[i];
        if (strcmp(r->tensor->name, name) != 0 || !id_equal(&r->tensor->checkpoint, of)) {
            continue;
        }
        out->links += r->kind == RECORD_LINK && record_shares_rows(r);
        if (r->kind != RECORD_BLOCK) {
            continue;
        }
        out->blocks++;
        if (!record_shares_rows(r)) {
            continue;
        }
        uint8_t *payload = malloc(r->stored_size);
        assert_non_null(payload);
        assert_int_equal(chunk_read_payload(c, r, payload, NULL), CKD_OK);
        assert_int_equal(payload[0] & 0xa4, 0xa4);
        out->sharing++;
        out->with_factor += payload[0] >> 3 & 1;
        free(payload);
        for (size_t k = 0; k < c->record_count; k++) {
            const record *side = &c->records[k];
            if (side->kind == RECORD_SIDE &&
                hash128_equal(&side->content, &r->dependencies[r->dependency_count - 2].content)) {
                out->side = *side;
            }
        }
    }
}

cells_found cells_look(const cells_scene *f, uint64_t step, const char *name) {
    cells_found out = {0};
    char folder[4096];
    dir_list list;
    ckd_checkpoint at = checkpoint_at(f->store, "run", step);
    snprintf(folder, sizeof(folder), "%s/store/data/c", f->dir);
    assert_int_equal(dir_list_read(&list, folder, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char path[4600];
        chunk *c;
        snprintf(path, sizeof(path), "%s/%s", folder, list.names[i]);
        assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
        size_t before = out.blocks;
        look_at(&out, c, &at.id, name);
        if (out.blocks > before) {
            snprintf(out.path, sizeof(out.path), "%s", path);
        }
        chunk_close(c);
    }
    dir_list_free(&list);
    return out;
}
