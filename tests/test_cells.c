/*
 * Large lossy matrices as cells, some rows of some columns: any part of them is what it is in the whole, whatever their chain went through, and
 * takes little of the rest.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk.h"
#include "engine/ckptdelta_compact.h"
#include "engine/paths.h"
#include "engine/save.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { ROWS = 192, COLUMNS = 160, COUNT = ROWS * COLUMNS, DEPTH = 16 };

static const char *const names[] = {"w", "exp_avg.w", "exp_avg_sq.w"};
/* Cells of some 20 x 20; others; none. */
static const save_cells small = {.down = {32, 4, 16}, .across = {32, 4, 20}, .elements = 4096, .columns = 32};
static const save_cells other = {.down = {64, 4, 48}, .across = {80, 4, 60}, .elements = 4096, .columns = 32};
static const save_cells none = {.down = {64, 4, 48}, .across = {64, 4, 48}, .elements = UINT64_MAX};

/* ---- saving ---- */

typedef struct fixture {
    char *dir;
    ckd_store *store;
    drift d;
} fixture;

/* Columns differ, too: whoever has another one's steps has other errors. */
static drift new_state(void) {
    drift d = drift_new(ROWS, COLUMNS, 7);
    for (uint64_t i = 0; i < COUNT; i++) {
        int scale = (int)(i % COLUMNS * 7 % 9) - 4;
        d.first[i] = ldexpf(d.first[i], scale);
        d.second[i] = ldexpf(d.second[i], 2 * scale);
        d.usual[i] = ldexpf(d.usual[i], 2 * scale);
    }
    return d;
}

static int make_fixture(void **state) {
    fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->dir = tempdir_create();
    f->store = store_create(f->dir);
    f->d = new_state();
    *state = f;
    return 0;
}

static int free_fixture(void **state) {
    fixture *f = *state;
    ckd_store_close(f->store);
    tempdir_remove(f->dir);
    drift_free(&f->d);
    free(f);
    return 0;
}

static ckd_save *begin_cells(const fixture *f, uint64_t step, ckd_fidelity fidelity,
                             const save_cells *cells) {
    ckd_save_options o = lossy_options("run", step, fidelity);
    o.max_load_cost = o.newest_load_cost = 1000;
    ckd_save *save = begin_with(f->store, &o);
    save->cells = *cells;
    return save;
}

/* The next state, as step `step`. */
static void save_next(fixture *f, uint64_t step, ckd_fidelity fidelity, const save_cells *cells) {
    for (int i = 0; i < 4 && step; i++) {
        drift_step(&f->d);
    }
    f->d.weight[5 * COLUMNS + 77] = NAN;
    f->d.first[COUNT - 1] = INFINITY;
    ckd_save *save = begin_cells(f, step, fidelity, cells);
    add_drift(save, "w", &f->d);
    commit_save(save);
}

static uint64_t shards_of(const fixture *f, uint64_t step, const char *name) {
    return tensor_info(f->store, "run", step, name).shards;
}

/* ---- loading ---- */

static ckd_load *begin_load(const fixture *f, uint64_t step) {
    ckd_checkpoint c = checkpoint_at(f->store, "run", step);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, f->store, &c.id, NULL), CKD_OK);
    return load;
}

/* A box of a matrix of f32 against the same of `whole`. */
static void check_box(ckd_load *load, const char *name, const float *whole, uint64_t columns,
                      const ckd_region *r) {
    uint64_t count = r->lengths[0] * r->lengths[1];
    float *piece = malloc(count * sizeof(float) + 1);
    assert_non_null(piece);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.region = *r;
    q.data = piece;
    q.size = count * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
    for (uint64_t row = 0; row < r->lengths[0]; row++) {
        assert_memory_equal(piece + row * r->lengths[1],
                            whole + (r->offsets[0] + row) * columns + r->offsets[1],
                            r->lengths[1] * sizeof(float));
    }
    free(piece);
}

static void check_grid(ckd_load *load, const char *name, const float *whole, uint64_t down, uint64_t across) {
    for (uint64_t i = 0; i < down * across; i++) {
        uint64_t row = i / across, column = i % across;
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {ROWS * row / down, COLUMNS * column / across}};
        r.lengths[0] = ROWS * (row + 1) / down - r.offsets[0];
        r.lengths[1] = COLUMNS * (column + 1) / across - r.offsets[1];
        check_box(load, name, whole, COLUMNS, &r);
    }
}

static void check_flat(ckd_load *load, const char *name, const float *whole, uint64_t parts) {
    for (uint64_t i = 0; i < parts; i++) {
        ckd_region r = {.kind = CKD_REGION_FLAT, .start = COUNT * i / parts};
        r.count = COUNT * (i + 1) / parts - r.start;
        float *piece = malloc(r.count * sizeof(float));
        assert_non_null(piece);
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = name;
        q.region = r;
        q.data = piece;
        q.size = r.count * sizeof(float);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        assert_memory_equal(piece, whole + r.start, q.size);
        free(piece);
    }
}

/* All layouts give what the whole gives. */
static void check_parts(const fixture *f, uint64_t step) {
    static const uint64_t grids[][2] = {{1, 2}, {1, 3}, {1, 5}, {1, 7}, {1, 8}, {2, 1}, {3, 1},
                                        {7, 1}, {8, 1}, {2, 2}, {3, 3}, {5, 3}, {4, 8}};
    ckd_load *load = begin_load(f, step);
    for (size_t n = 0; n < 3; n++) {
        float *whole = load_floats(f->store, "run", step, names[n], CKD_F32, COUNT);
        for (size_t i = 0; i < sizeof(grids) / sizeof(grids[0]); i++) {
            check_grid(load, names[n], whole, grids[i][0], grids[i][1]);
        }
        check_flat(load, names[n], whole, 3);
        check_flat(load, names[n], whole, 8);
        ckd_region odd = {.kind = CKD_REGION_BOX, .offsets = {17, 39}, .lengths = {51, 3}};
        check_box(load, names[n], whole, COLUMNS, &odd);
        free(whole);
    }
    ckd_load_end(load);
}

/* ---- what is in the files ---- */

typedef struct found {
    size_t blocks, sharing, with_factor; /* of one tensor: all; those that share rows; and a factor */
    size_t links;                        /* that share rows */
    char path[4600];                     /* of the file */
    record side, block; /* a side record with rows, and a block that needs it: what they point to is gone */
} found;

static void look_at(found *out, const chunk *c, const ckd_id *of, const char *name) {
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
        out->block = *r;
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

/* The tensor's blocks in all files of a step. */
static found look(const fixture *f, uint64_t step, const char *name) {
    found out = {0};
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

/* ---- parts ---- */

static void check_chain(fixture *f, ckd_fidelity fidelity) {
    for (uint64_t step = 0; step <= DEPTH; step++) {
        save_next(f, step, fidelity, &small);
        assert_int_equal(shards_of(f, step, "w"), shards_of(f, 0, "w"));
        if (step == 0 || step == 1 || step == 4 || step == DEPTH) {
            assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
            check_parts(f, step);
        }
    }
    assert_true(shards_of(f, DEPTH, "w") > 4 && shards_of(f, DEPTH, "exp_avg_sq.w") > 4);
    found w = look(f, DEPTH, "w"), m = look(f, DEPTH, "exp_avg.w");
    assert_true(w.blocks > 40 && w.sharing > 0 && w.with_factor > 0);
    assert_true(m.blocks == w.blocks && m.sharing > 0);
    assert_int_equal(verify_damage(f->store), 0);
}

static void test_near(void **state) {
    check_chain(*state, CKD_NEAR);
}

static void test_compact(void **state) {
    check_chain(*state, CKD_COMPACT);
}

typedef struct told {
    double error, wrong;  /* relative, as the store says and as it is */
    double first, second; /* of the moments, as it is */
    double direction;     /* change of it by the first moments' errors */
    uint64_t stored;
} told;

/* Of the weight after three saves into a store of its own. */
static told series_of(const save_cells *cells, uint32_t threads) {
    fixture f = {.dir = tempdir_create(), .d = new_state()};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = threads;
    assert_int_equal(ckd_store_open(&f.store, store_path_of(f.dir, ""), CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    for (uint64_t step = 0; step < 3; step++) {
        save_next(&f, step, CKD_NEAR, cells);
    }
    check_parts(&f, 2);
    float *got = load_floats(f.store, "run", 2, "w", CKD_F32, COUNT);
    assert_true(isnan(got[5 * COLUMNS + 77]));
    f.d.weight[5 * COLUMNS + 77] = got[5 * COLUMNS + 77] = 0;
    ckd_tensor_info t = tensor_info(f.store, "run", 2, "w");
    assert_int_equal(t.nonfinite, 1);
    float *first = load_floats(f.store, "run", 2, "exp_avg.w", CKD_F32, COUNT);
    float *second = load_floats(f.store, "run", 2, "exp_avg_sq.w", CKD_F32, COUNT);
    f.d.first[COUNT - 1] = first[COUNT - 1] = 0;
    told out = {.error = t.rel_l2,
                .first = relative_error(first, f.d.first, COUNT),
                .second = relative_error(second, f.d.second, COUNT),
                .wrong = relative_error(got, f.d.weight, COUNT),
                .direction = tensor_info(f.store, "run", 2, "exp_avg.w").direction_change,
                .stored = t.stored_bytes};
    free(got);
    free(first);
    free(second);
    ckd_store_close(f.store);
    tempdir_remove(f.dir);
    drift_free(&f.d);
    return out;
}

/* What an error is does not depend on the cut, what is told of it is so of all panels together, and the bytes are those of one thread. */
static void test_figures(void **unused) {
    (void)unused;
    told cut = series_of(&small, 1), whole = series_of(&none, 1), together = series_of(&small, 5);
    assert_true(fabs(cut.error - cut.wrong) < 5e-3 * cut.wrong);
    assert_true(fabs(whole.error - whole.wrong) < 5e-3 * whole.wrong);
    assert_true(fabs(cut.wrong - whole.wrong) < 0.02 * whole.wrong);
    assert_true(fabs(cut.first - whole.first) < 0.02 * whole.first);
    assert_true(fabs(cut.second - whole.second) < 0.02 * whole.second);
    assert_true(fabs(cut.direction - whole.direction) < 0.005 * whole.direction);
    assert_true(memcmp(&cut, &together, sizeof(cut)) == 0);
}

/* Two dtypes of half the size, and a stack of matrices, whose panels go through all of them; from a read function, by several threads. */
static ckd_status read_back(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    memcpy(to, (const uint16_t *)context + first, count * sizeof(uint16_t));
    return CKD_OK;
}

static void save_halves(fixture *f, uint64_t step, ckd_dtype dtype) {
    const uint64_t stack[3] = {3, ROWS / 3, COLUMNS};
    drift_step(&f->d);
    uint16_t *values = to_dtype(f->d.weight, dtype, COUNT), *first = to_dtype(f->d.first, dtype, COUNT);
    ckd_save *save = begin_cells(f, step, CKD_NEAR, &small);
    save->cells.elements = 1024;
    add_tensor(save, "exp_avg.experts", dtype, 3, stack, NULL, first);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "experts";
    t.dtype = dtype;
    t.ndim = 3;
    t.shape = stack;
    t.read = read_back;
    t.read_context = values;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    commit_save(save);
    free(values);
    free(first);
}

static void test_stacks_of_other_dtypes(void **state) {
    fixture *f = *state;
    for (int k = 0; k < 2; k++) {
        ckd_dtype dtype = k ? CKD_F16 : CKD_BF16;
        for (uint64_t step = 0; step < 3; step++) {
            save_halves(f, 10 * (uint64_t)k + step, dtype);
        }
        uint64_t last = 10 * (uint64_t)k + 2;
        found of = look(f, last, "experts");
        assert_true(of.sharing > 10 && shards_of(f, last, "experts") > 3);
        uint16_t *whole = load_whole(f->store, "run", last, "experts", COUNT * 2);
        ckd_load *load = begin_load(f, last);
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {1, 13, 57}, .lengths = {2, 31, 59}};
        uint16_t piece[2 * 31 * 59];
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "experts";
        q.region = r;
        q.data = piece;
        q.size = sizeof(piece);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        for (size_t i = 0; i < 2 * 31; i++) {
            size_t row = (1 + i / 31) * (ROWS / 3) + 13 + i % 31;
            assert_memory_equal(piece + i * 59, whole + row * COLUMNS + 57, 59 * 2);
        }
        ckd_load_end(load);
        free(whole);
    }
    assert_int_equal(verify_damage(f->store), 0);
}

/* ---- other cuts in one chain ---- */

static void test_a_parent_of_whole_rows(void **state) {
    fixture *f = *state;
    for (uint64_t step = 0; step < 5; step++) {
        save_next(f, step, CKD_NEAR, step < 2 ? &none : &small);
        assert_int_equal(shards_of(f, step, "w"), 1);
        assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
    }
    check_parts(f, 4);
}

/* A chain goes on in the cells it was begun in; where ranks save other rows, in others, and values are what they are all the same. */
static void test_a_parent_of_other_cells(void **state) {
    fixture *f = *state;
    const uint64_t shape[2] = {ROWS, COLUMNS};
    for (uint64_t step = 0; step < 3; step++) {
        save_next(f, step, CKD_NEAR, step ? &other : &small);
        assert_int_equal(shards_of(f, step, "w"), shards_of(f, 0, "w"));
        assert_int_equal(look(f, step, "w").blocks, look(f, 0, "w").blocks);
    }
    for (uint64_t step = 3; step < 6; step++) {
        drift_step(&f->d);
        ckd_save *save = begin_cells(f, step, CKD_NEAR, &other);
        for (uint64_t half = 0; half < 2; half++) {
            ckd_region r = {.kind = CKD_REGION_BOX,
                            .offsets = {half * 70, 0},
                            .lengths = {half ? ROWS - 70 : 70, COLUMNS}};
            const char *const given[] = {"exp_avg_sq.w", "exp_avg.w", "w"};
            const float *values[] = {f->d.second, f->d.first, f->d.weight};
            for (int i = 0; i < 3; i++) {
                add_tensor(save, given[i], CKD_F32, 2, shape, &r, values[i] + half * 70 * COLUMNS);
            }
        }
        commit_save(save);
        assert_true(shards_of(f, step, "w") != shards_of(f, 0, "w"));
        assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
        check_parts(f, step);
    }
    save_next(f, 6, CKD_NEAR, &other); /* and in one piece again */
    check_parts(f, 6);
    assert_int_equal(verify_damage(f->store), 0);
}

/* The cells of exact tensors are smaller than is good for lossy ones; the other way round they are taken over. */
static void test_an_exact_parent(void **state) {
    fixture *f = *state;
    const uint64_t rows = 1024, columns = 1024, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    save_cells cells = {.down = {512, 64, 440}, .across = {512, 64, 440}, .elements = 4096, .columns = 32};
    uint64_t shards[4];
    for (uint64_t step = 0; step < 4; step++) {
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-4 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        ckd_save *save = begin_cells(f, step, step % 3 ? CKD_NEAR : CKD_EXACT, &cells);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        shards[step] = shards_of(f, step, "w");
        float *got = load_floats(f->store, "run", step, "w", CKD_F32, rows * columns);
        assert_true(relative_error(got, values, rows * columns) < (step % 3 ? 1e-2 : 1e-30));
        ckd_load *load = begin_load(f, step);
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {100, 300}, .lengths = {701, 333}};
        check_box(load, "w", got, columns, &r);
        ckd_load_end(load);
        free(got);
    }
    assert_int_equal(shards[0], 6);
    assert_int_equal(shards[1], 2);
    assert_int_equal(shards[2], 2);
    assert_int_equal(shards[3], 2);
    free(values);
    assert_int_equal(verify_damage(f->store), 0);
}

/* Tiles of a few rows each: cells end where they do. */
static void test_several_tiles(void **state) {
    fixture *f = *state;
    const uint64_t rows = 2500, columns = 1000, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t step = 0; step < 3; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.staging_bytes = 1;
        ckd_save *save = begin_with(f->store, &o);
        save->cells =
            (save_cells){.down = {300, 32, 200}, .across = {300, 32, 200}, .elements = 4096, .columns = 32};
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-4 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        add_tensor(save, "exp_avg.w", CKD_F32, 2, shape, NULL, values);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        for (int k = 0; k < 2; k++) {
            float *whole = load_floats(f->store, "run", step, names[k], CKD_F32, rows * columns);
            ckd_load *load = begin_load(f, step);
            ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {1001, 333}, .lengths = {1100, 257}};
            check_box(load, names[k], whole, columns, &r);
            assert_true(shards_of(f, step, names[k]) > 3);
            ckd_load_end(load);
            free(whole);
        }
    }
    free(values);
    assert_int_equal(verify_damage(f->store), 0);
}

/* The last tile is so small that it is exact: in the same panels as the rest, as values of the last row. */
static void test_an_exact_tile(void **state) {
    fixture *f = *state;
    const uint64_t columns = 40, rows = (1 << 20) / columns + 1, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        o.staging_bytes = 1;
        ckd_save *save = begin_with(f->store, &o);
        save->cells =
            (save_cells){.down = {400, 32, 300}, .across = {20, 4, 20}, .elements = 4096, .columns = 32};
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-3 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        assert_int_equal(shards_of(f, step, "w"), 2);
        float *whole = load_floats(f->store, "run", step, "w", CKD_F32, rows * columns);
        assert_memory_equal(whole + (rows - 1) * columns, values + (rows - 1) * columns,
                            columns * sizeof(float));
        assert_true(relative_error(whole, values, rows * columns) < 0.05);
        assert_true(memcmp(whole, values, rows * columns * sizeof(float)) != 0);
        free(whole);
    }
    free(values);
}

/* Panels of one block each, whose columns nobody else shares. */
static void test_one_band(void **state) {
    fixture *f = *state;
    const uint64_t rows = 30, columns = 1600, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    for (uint64_t i = 0; i < rows * columns; i++) {
        values[i] = ldexpf(values[i], (int)(i / columns) % 5);
    }
    ckd_save *save = begin_cells(f, 0, CKD_NEAR, &other);
    add_tensor(save, "exp_avg.w", CKD_F32, 2, shape, NULL, values);
    commit_save(save);
    found m = look(f, 0, "exp_avg.w");
    assert_true(m.sharing > 10 && m.sharing == m.blocks && m.blocks == shards_of(f, 0, "exp_avg.w"));
    float *whole = load_floats(f->store, "run", 0, "exp_avg.w", CKD_F32, rows * columns);
    ckd_load *load = begin_load(f, 0);
    ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {3, 777}, .lengths = {20, 333}};
    check_box(load, "exp_avg.w", whole, columns, &r);
    ckd_load_end(load);
    free(values);
    free(whole);
    assert_int_equal(verify_damage(f->store), 0);
}

/* ---- damage, compaction, copies ---- */

static void test_damaged_rows(void **state) {
    fixture *f = *state;
    save_next(f, 0, CKD_NEAR, &small);
    save_next(f, 1, CKD_NEAR, &small);
    found w = look(f, 1, "w");
    assert_true(w.sharing > 0);
    size_t size;
    unsigned char *data = read_whole_file(w.path, &size);
    data[w.side.payload_offset + w.side.stored_size / 2] ^= 1;
    write_whole_file(w.path, data, size);
    free(data);
    assert_true(verify_damage(f->store) > 0);
    ckd_store_close(f->store);
    f->store = store_reopen(f->dir, CKD_OPEN_READ);
    ckd_load *load = begin_load(f, 1);
    float *to = malloc(COUNT * sizeof(float));
    assert_non_null(to);
    ckd_error err = {0};
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.data = to;
    q.size = COUNT * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_E_CORRUPT);
    assert_string_equal(err.file, w.path);
    assert_string_equal(err.tensor, "w");
    /* Whoever does not need these rows does not miss them. */
    uint64_t row = w.side.first / COLUMNS, rows = w.side.count / COLUMNS;
    assert_true(rows < ROWS / 2);
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .lengths = {ROWS - row - rows, COLUMNS}};
    q.region.offsets[0] = row + rows;
    if (row + rows == ROWS) {
        q.region.offsets[0] = 0;
        q.region.lengths[0] = row;
    }
    q.size = q.region.lengths[0] * COLUMNS * sizeof(float);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    ckd_load_end(load);
    free(to);
}

/* Whatever goes, links and keyframes of what stays have the same values. */
static void test_compaction(void **state) {
    fixture *f = *state;
    for (uint64_t step = 0; step < 9; step++) {
        save_next(f, step, CKD_NEAR, &other);
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
    assert_true(done->count > 0);
    ckd_compaction_free(done);
    assert_int_equal(fingerprints_check(f->store, &before), 4);
    fingerprints_free(&before);
    assert_true(look(f, 8, "w").sharing > 0 && look(f, 7, "w").links > 0);
    check_parts(f, 8);
    check_parts(f, 4);
    assert_int_equal(verify_damage(f->store), 0);
    save_next(f, 9, CKD_NEAR, &other);
    assert_int_equal(shards_of(f, 9, "w"), shards_of(f, 8, "w"));
    check_parts(f, 9);
}

/* Copies of long chains, and the same without them. */
static void test_ready_copies(void **state) {
    fixture *f = *state;
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
        save->cells = small;
        add_drift(save, "w", &f->d);
        commit_save(save);
    }
    snprintf(folder, sizeof(folder), "%s/store/data/k", f->dir);
    assert_int_equal(dir_list_read(&copies, folder, NULL), CKD_OK);
    assert_true(copies.count > 0);
    float *with = load_floats(f->store, "run", 5, "w", CKD_F32, COUNT);
    check_parts(f, 5);
    for (size_t i = 0; i < copies.count; i++) {
        char path[4600];
        snprintf(path, sizeof(path), "%s/%s", folder, copies.names[i]);
        assert_int_equal(remove(path), 0);
    }
    dir_list_free(&copies);
    float *without = load_floats(f->store, "run", 5, "w", CKD_F32, COUNT);
    assert_memory_equal(with, without, COUNT * sizeof(float));
    free(with);
    free(without);
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, make_fixture, free_fixture)

/* For tests/golden/make_cells.py: a store in FOLDER/store. */
static int write_store(char *folder) {
    fixture f = {folder, store_create(folder), new_state()};
    for (uint64_t step = 0; step < 3; step++) {
        save_next(&f, step, CKD_NEAR, &small);
    }
    save_next(&f, 3, CKD_COMPACT, &small);
    ckd_store_close(f.store);
    drift_free(&f.d);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2) {
        return write_store(argv[1]);
    }
    const struct CMUnitTest tests[] = {
        WITH_STORE(test_near),
        WITH_STORE(test_compact),
        cmocka_unit_test(test_figures),
        WITH_STORE(test_stacks_of_other_dtypes),
        WITH_STORE(test_a_parent_of_whole_rows),
        WITH_STORE(test_a_parent_of_other_cells),
        WITH_STORE(test_an_exact_parent),
        WITH_STORE(test_several_tiles),
        WITH_STORE(test_an_exact_tile),
        WITH_STORE(test_one_band),
        WITH_STORE(test_damaged_rows),
        WITH_STORE(test_compaction),
        WITH_STORE(test_ready_copies),
    };
    return cmocka_run_group_tests_name("cells", tests, NULL, NULL);
}
