/*
 * Large lossy matrices stored as cells, each with some rows of some columns. Loads of any part give the values of the
 * whole, whatever the chain consists of, and read little of the rest.
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

#include "tests/support/cells.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { DEPTH = 16 };

/* ---- parts ---- */

static void check_chain(cells_scene *f, ckd_fidelity fidelity) {
    for (uint64_t step = 0; step <= DEPTH; step++) {
        cells_save_next(f, step, fidelity, &cells_small);
        assert_int_equal(cells_shards(f, step, "w"), cells_shards(f, 0, "w"));
        if (step == 0 || step == 1 || step == 4 || step == DEPTH) {
            assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
            cells_check_parts(f, step);
        }
    }
    assert_true(cells_shards(f, DEPTH, "w") > 4 && cells_shards(f, DEPTH, "exp_avg_sq.w") > 4);
    cells_found w = cells_look(f, DEPTH, "w"), m = cells_look(f, DEPTH, "exp_avg.w");
    assert_true(w.blocks > 40 && w.sharing > 0 && w.with_factor > 0);
    assert_true(m.blocks == w.blocks && m.sharing > 0);
    assert_int_equal(verify_damage(f->store), 0);
}

static void test_near(void **state) {
    check_chain(*state, CKD_NEAR);
}

static void test_coarse(void **state) {
    check_chain(*state, CKD_COARSE);
}

typedef struct figures {
    double error, wrong;  /* relative error, as reported and as measured */
    double first, second; /* measured errors of the moments */
    double direction;     /* the change of direction caused by the first moments' errors */
    uint64_t stored;
} figures;

/* Saves three steps into a new store. Returns the figures of the last weight. */
static figures series_of(const save_grid *grid, uint32_t threads) {
    cells_scene f = {.dir = tempdir_create(), .d = cells_state()};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = threads;
    assert_int_equal(ckd_store_open(&f.store, store_path_of(f.dir, ""), CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    for (uint64_t step = 0; step < 3; step++) {
        cells_save_next(&f, step, CKD_NEAR, grid);
    }
    cells_check_parts(&f, 2);
    float *got = load_floats(f.store, "run", 2, "w", CKD_F32, CELLS_COUNT);
    assert_true(isnan(got[5 * CELLS_COLUMNS + 77]));
    f.d.weight[5 * CELLS_COLUMNS + 77] = got[5 * CELLS_COLUMNS + 77] = 0;
    ckd_tensor_info t = tensor_info(f.store, "run", 2, "w");
    assert_int_equal(t.nonfinite, 1);
    float *first = load_floats(f.store, "run", 2, "exp_avg.w", CKD_F32, CELLS_COUNT);
    float *second = load_floats(f.store, "run", 2, "exp_avg_sq.w", CKD_F32, CELLS_COUNT);
    f.d.first[CELLS_COUNT - 1] = first[CELLS_COUNT - 1] = 0;
    figures out = {.error = t.rel_l2,
                   .first = relative_error(first, f.d.first, CELLS_COUNT),
                   .second = relative_error(second, f.d.second, CELLS_COUNT),
                   .wrong = relative_error(got, f.d.weight, CELLS_COUNT),
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

/*
 * Errors do not depend on the cells, the reported error is that of all panels together, and several threads store the
 * same bytes as one.
 */
static void test_figures(void **unused) {
    (void)unused;
    figures cut = series_of(&cells_small, 1), whole = series_of(&cells_none, 1),
            together = series_of(&cells_small, 5);
    assert_true(fabs(cut.error - cut.wrong) < 5e-3 * cut.wrong);
    assert_true(fabs(whole.error - whole.wrong) < 5e-3 * whole.wrong);
    assert_true(fabs(cut.wrong - whole.wrong) < 0.02 * whole.wrong);
    assert_true(fabs(cut.first - whole.first) < 0.02 * whole.first);
    assert_true(fabs(cut.second - whole.second) < 0.02 * whole.second);
    assert_true(fabs(cut.direction - whole.direction) < 0.005 * whole.direction);
    assert_true(memcmp(&cut, &together, sizeof(cut)) == 0);
}

/*
 * A stack of matrices in a 16-bit dtype, whose panels extend through all matrices, saved with a read function by
 * several threads.
 */
static ckd_status read_back(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    memcpy(to, (const uint16_t *)context + first, count * sizeof(uint16_t));
    return CKD_OK;
}

static void save_halves(cells_scene *f, uint64_t step, ckd_dtype dtype) {
    const uint64_t stack[3] = {3, CELLS_ROWS / 3, CELLS_COLUMNS};
    drift_step(&f->d);
    uint16_t *values = to_dtype(f->d.weight, dtype, CELLS_COUNT),
             *first = to_dtype(f->d.first, dtype, CELLS_COUNT);
    ckd_save *save = cells_save(f, step, CKD_NEAR, &cells_small);
    save->coding.grid.elements = 1024;
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
    cells_scene *f = *state;
    for (int k = 0; k < 2; k++) {
        ckd_dtype dtype = k ? CKD_F16 : CKD_BF16;
        for (uint64_t step = 0; step < 3; step++) {
            save_halves(f, 10 * (uint64_t)k + step, dtype);
        }
        uint64_t last = 10 * (uint64_t)k + 2;
        cells_found of = cells_look(f, last, "experts");
        assert_true(of.sharing > 10 && cells_shards(f, last, "experts") > 3);
        uint16_t *whole = load_whole(f->store, "run", last, "experts", CELLS_COUNT * 2);
        ckd_load *load = cells_load(f, last);
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {1, 13, 57}, .lengths = {2, 31, 59}};
        uint16_t slice[2 * 31 * 59];
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "experts";
        q.region = r;
        q.data = slice;
        q.size = sizeof(slice);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        for (size_t i = 0; i < 2 * 31; i++) {
            size_t row = (1 + i / 31) * (CELLS_ROWS / 3) + 13 + i % 31;
            assert_memory_equal(slice + i * 59, whole + row * CELLS_COLUMNS + 57, 59 * 2);
        }
        ckd_load_end(load);
        free(whole);
    }
    assert_int_equal(verify_damage(f->store), 0);
}

/* ---- other cells within a chain ---- */

static void test_parent_of_whole_rows(void **state) {
    cells_scene *f = *state;
    for (uint64_t step = 0; step < 5; step++) {
        cells_save_next(f, step, CKD_NEAR, step < 2 ? &cells_none : &cells_small);
        assert_int_equal(cells_shards(f, step, "w"), 1);
        assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
    }
    cells_check_parts(f, 4);
}

/*
 * A chain keeps the cells of its base. If a later save has other regions, it uses other cells, and the values are
 * still right.
 */
static void test_parent_with_other_cells(void **state) {
    cells_scene *f = *state;
    const uint64_t shape[2] = {CELLS_ROWS, CELLS_COLUMNS};
    for (uint64_t step = 0; step < 3; step++) {
        cells_save_next(f, step, CKD_NEAR, step ? &cells_other : &cells_small);
        assert_int_equal(cells_shards(f, step, "w"), cells_shards(f, 0, "w"));
        assert_int_equal(cells_look(f, step, "w").blocks, cells_look(f, 0, "w").blocks);
    }
    for (uint64_t step = 3; step < 6; step++) {
        drift_step(&f->d);
        ckd_save *save = cells_save(f, step, CKD_NEAR, &cells_other);
        for (uint64_t half = 0; half < 2; half++) {
            ckd_region r = {.kind = CKD_REGION_BOX,
                            .offsets = {half * 70, 0},
                            .lengths = {half ? CELLS_ROWS - 70 : 70, CELLS_COLUMNS}};
            const char *const given[] = {"exp_avg_sq.w", "exp_avg.w", "w"};
            const float *values[] = {f->d.second, f->d.first, f->d.weight};
            for (int i = 0; i < 3; i++) {
                add_tensor(save, given[i], CKD_F32, 2, shape, &r, values[i] + half * 70 * CELLS_COLUMNS);
            }
        }
        commit_save(save);
        assert_true(cells_shards(f, step, "w") != cells_shards(f, 0, "w"));
        assert_int_equal(tensor_info(f->store, "run", step, "w").depth, step);
        cells_check_parts(f, step);
    }
    cells_save_next(f, 6, CKD_NEAR, &cells_other); /* whole again */
    cells_check_parts(f, 6);
    assert_int_equal(verify_damage(f->store), 0);
}

/*
 * Cells of an exact parent are too small for lossy blocks and are not kept. An exact save keeps the cells of a lossy
 * parent.
 */
static void test_exact_parent(void **state) {
    cells_scene *f = *state;
    const uint64_t rows = 1024, columns = 1024, shape[2] = {rows, columns};
    float *values = random_values(CKD_F32, rows * columns, 3);
    save_grid grid = {
        .row_sides = {512, 64, 440}, .column_sides = {512, 64, 440}, .elements = 4096, .columns = 32};
    uint64_t shards[4];
    for (uint64_t step = 0; step < 4; step++) {
        for (uint64_t i = 0; i < rows * columns; i++) {
            values[i] += (float)(1e-4 * ((double)(i * 7919 % 1000) / 500 - 1));
        }
        ckd_save *save = cells_save(f, step, step % 3 ? CKD_NEAR : CKD_EXACT, &grid);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
        commit_save(save);
        shards[step] = cells_shards(f, step, "w");
        float *got = load_floats(f->store, "run", step, "w", CKD_F32, rows * columns);
        assert_true(relative_error(got, values, rows * columns) < (step % 3 ? 1e-2 : 1e-30));
        ckd_load *load = cells_load(f, step);
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {100, 300}, .lengths = {701, 333}};
        cells_check_box(load, "w", got, columns, &r);
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

/* For tests/golden/make_cells.py: makes a store in FOLDER/store. */
static int write_store(char *folder) {
    cells_scene f = {folder, store_create(folder), cells_state(), false};
    for (uint64_t step = 0; step < 3; step++) {
        cells_save_next(&f, step, CKD_NEAR, &cells_small);
    }
    cells_save_next(&f, 3, CKD_COARSE, &cells_small);
    ckd_store_close(f.store);
    drift_free(&f.d);
    return 0;
}

#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, cells_begin, cells_end)

int main(int argc, char **argv) {
    if (argc == 2) {
        return write_store(argv[1]);
    }
    const struct CMUnitTest tests[] = {
        WITH_STORE(test_near),
        WITH_STORE(test_coarse),
        cmocka_unit_test(test_figures),
        WITH_STORE(test_stacks_of_other_dtypes),
        WITH_STORE(test_parent_of_whole_rows),
        WITH_STORE(test_parent_with_other_cells),
        WITH_STORE(test_exact_parent),
    };
    return cmocka_run_group_tests_name("cells", tests, NULL, NULL);
}
