/*
 * How much more than needed is read to load a part of a large matrix, whole or from the end of a chain, and that the
 * parts have the right values.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { SIDE = 4096, DEPTH = 16 };

typedef struct fixture {
    char *dir;
    ckd_store *store;
    float *values;
} fixture;

static int make_fixture(void **state) {
    fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    f->dir = tempdir_create();
    f->store = store_create(f->dir);
    f->values = random_values(CKD_F32, (uint64_t)SIDE * SIDE, 1);
    *state = f;
    return 0;
}

static int free_fixture(void **state) {
    fixture *f = *state;
    ckd_store_close(f->store);
    tempdir_remove(f->dir);
    free(f->values);
    free(f);
    return 0;
}

static void save_matrix(const fixture *f, const char *run, uint64_t step, ckd_codec codec, uint64_t rows,
                        uint64_t columns) {
    ckd_save_options o = options_of(run, step);
    uint64_t shape[2] = {rows, columns};
    o.codec = codec;
    o.max_load_cost = o.newest_load_cost = 1000;
    ckd_save *save = begin_with(f->store, &o);
    add_tensor(save, "w", CKD_F32, 2, shape, NULL, f->values);
    commit_save(save);
}

static ckd_load *begin(const fixture *f, const char *run, uint64_t step) {
    ckd_checkpoint c = checkpoint_at(f->store, run, step);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, f->store, &c.id, NULL), CKD_OK);
    return load;
}

static ckd_load_reads reads_of(ckd_load *load, const ckd_region *region) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    ckd_load_explanation *e;
    q.name = "w";
    q.region = *region;
    assert_int_equal(ckd_load_explain(&e, load, &q, 1, NULL), CKD_OK);
    ckd_load_reads all = e->all;
    ckd_load_explanation_free(e);
    return all;
}

/* Where cut `i` of `n` is: as in torch.chunk, or evenly spaced. */
static uint64_t cut(uint64_t i, uint64_t n, bool chunk) {
    uint64_t each = (SIDE + n - 1) / n;
    return !chunk ? SIDE * i / n : i * each < SIDE ? i * each : SIDE;
}

/* Part `i` of a grid of rows x columns parts. With rows 0: of `columns` flat ranges. */
static ckd_region part(uint64_t i, uint64_t rows, uint64_t columns, bool chunk) {
    if (rows == 0) {
        uint64_t all = (uint64_t)SIDE * SIDE, start = all * i / columns;
        return (ckd_region){
            .kind = CKD_REGION_FLAT, .start = start, .count = all * (i + 1) / columns - start};
    }
    uint64_t row = i / columns, column = i % columns;
    ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {cut(row, rows, chunk), cut(column, columns, chunk)}};
    r.lengths[0] = cut(row + 1, rows, chunk) - r.offsets[0];
    r.lengths[1] = cut(column + 1, columns, chunk) - r.offsets[1];
    return r;
}

/* No rank reads more than `bound` times what it needs, and all ranks together no more than `together` times. */
static void check_layout(ckd_load *load, const uint64_t layout[2], bool chunk, double bound,
                         double together) {
    uint64_t rows = layout[0], columns = layout[1], read = 0, needed = 0;
    for (uint64_t k = 0; k < (rows ? rows : 1) * columns; k++) {
        ckd_region r = part(k, rows, columns, chunk);
        ckd_load_reads reads = reads_of(load, &r);
        double over = (double)reads.read_bytes / (double)reads.needed_bytes;
        if (!(over >= 1 && over <= bound)) {
            fail_msg("part %u of %u x %u: %.3f times what is needed", (unsigned)k, (unsigned)rows,
                     (unsigned)columns, over);
        }
        read += reads.read_bytes;
        needed += reads.needed_bytes;
    }
    assert_true((double)read <= together * (double)needed);
}

/* Parts of usual layouts are read exactly. Parts of other layouts read a little more than they need. */
static void check_over_read(ckd_load *load, double bound) {
    static const uint64_t usual[][2] = {{1, 1}, {2, 1},  {4, 1}, {8, 1}, {16, 1}, {1, 2}, {1, 4},
                                        {1, 8}, {1, 16}, {2, 2}, {4, 2}, {3, 1},  {1, 3}, {5, 1},
                                        {1, 5}, {3, 3},  {5, 3}, {8, 5}, {7, 1},  {1, 7}, {7, 2}};
    for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]); i++) {
        check_layout(load, usual[i], true, 1, 1);
    }
    static const uint64_t others[][2] = {{3, 1}, {1, 3}, {3, 2}, {0, 3}, {0, 4}, {0, 8}};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        check_layout(load, others[i], false, bound, bound);
    }
    check_layout(load, (const uint64_t[2]){6, 1}, true, 1.4, bound);
    check_layout(load, (const uint64_t[2]){1, 6}, true, 1.4, bound);
    check_layout(load, (const uint64_t[2]){5, 1}, false, bound + 0.02, bound);
}

static void test_raw(void **state) {
    fixture *f = *state;
    save_matrix(f, "raw", 1, CKD_CODEC_RAW, SIDE, SIDE);
    ckd_load *load = begin(f, "raw", 1);
    ckd_region third = part(1, 1, 3, false);
    ckd_load_reads reads = reads_of(load, &third);
    assert_int_equal(reads.needed_bytes, reads.raw_bytes);
    check_over_read(load, 1.05);
    ckd_load_end(load);
}

static void test_compressed(void **state) {
    fixture *f = *state;
    save_matrix(f, "auto", 1, CKD_CODEC_AUTO, SIDE, SIDE);
    ckd_load *load = begin(f, "auto", 1);
    assert_true(ckd_load_tensors(load)->items[0].stored_bytes < 0.9 * 4 * SIDE * SIDE);
    check_over_read(load, 1.25);
    check_layout(load, (const uint64_t[2]){1, 7}, false, 1.4, 1.25);
    ckd_load_end(load);
}

static void check_loaded(const fixture *f, ckd_load *load, const ckd_region *r, uint64_t columns) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region = *r;
    q.size = r->lengths[0] * r->lengths[1] * sizeof(float);
    uint8_t *to = malloc(q.size);
    assert_non_null(to);
    q.data = to;
    assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
    for (uint64_t row = 0; row < r->lengths[0]; row++) {
        assert_memory_equal(to + row * r->lengths[1] * sizeof(float),
                            f->values + (r->offsets[0] + row) * columns + r->offsets[1],
                            r->lengths[1] * sizeof(float));
    }
    free(to);
}

/*
 * Loading an eighth of the matrix from the end of a chain reads at most a sixth of the whole, by rows, by columns and
 * by both.
 */
static void test_parts_of_a_chain(void **state) {
    fixture *f = *state;
    const uint64_t columns = 2 * DEPTH * 64, rows = SIDE; /* half the matrix, to save time */
    const uint64_t depth = under_sanitizer() ? 2 : test_pick(3, DEPTH, DEPTH);
    for (uint64_t step = 0; step <= depth; step++) {
        change_values(CKD_F32, f->values, rows * columns, (unsigned)step);
        save_matrix(f, "chain", step, CKD_CODEC_AUTO, rows, columns);
    }
    ckd_load *load = begin(f, "chain", depth);
    ckd_region whole = {.kind = CKD_REGION_BOX, .lengths = {rows, columns}};
    ckd_load_reads all = reads_of(load, &whole);
    assert_int_equal(all.depth, depth);
    assert_int_equal(all.read_bytes, all.needed_bytes);
    for (unsigned by = 0; by < 3; by++) {
        uint64_t down = by == 0 ? 8 : by == 1 ? 1 : 2, across = 8 / down;
        for (uint64_t i = 0; i < 8; i++) {
            ckd_region r = {.kind = CKD_REGION_BOX, .lengths = {rows / down, columns / across}};
            r.offsets[0] = i / across * r.lengths[0];
            r.offsets[1] = i % across * r.lengths[1];
            ckd_load_reads reads = reads_of(load, &r);
            assert_int_equal(reads.depth, depth);
            assert_true(6 * reads.read_bytes <= all.read_bytes);
        }
    }
    ckd_region odd = {.kind = CKD_REGION_BOX, .offsets = {1001, 777}, .lengths = {515, 519}};
    uint64_t before = ckd_load_bytes_read(load);
    check_loaded(f, load, &odd, columns);
    assert_int_equal(ckd_load_bytes_read(load) - before, reads_of(load, &odd).read_bytes);
    check_loaded(f, load, &whole, columns);
    ckd_load_end(load);
    assert_int_equal(verify_damage(f->store), 0);
}

/*
 * Tensors that are no large matrices, that are lossy, or that an optimizer predicts, are stored whole. So is a
 * tensor whose parent is whole.
 */
static void test_tensors_stored_whole(void **state) {
    fixture *f = *state;
    const uint64_t rows = 2048, columns = 2048, narrow[2] = {rows * 8, columns / 8}, line = rows * columns;
    ckd_optimizer step = CKD_OPTIMIZER_INIT;
    step.kind = CKD_ADAMW;
    step.lr = 1e-3;
    step.beta1 = 0.9;
    step.beta2 = 0.99;
    step.eps = 1e-8;
    step.step = 1;
    uint64_t shape[2] = {rows, columns};
    ckd_save *save = begin_save(f->store, "whole", 1);
    add_tensor(save, "cut", CKD_F32, 2, shape, NULL, f->values);
    add_tensor(save, "narrow", CKD_F32, 2, narrow, NULL, f->values + 1);
    add_tensor(save, "line", CKD_F32, 1, &line, NULL, f->values + 2);
    add_tensor(save, "least", CKD_F32, 2, (const uint64_t[2]){1024, 1024}, NULL, f->values);
    add_tensor(save, "less", CKD_F32, 2, (const uint64_t[2]){1023, 1024}, NULL, f->values);
    add_tensor(save, "shorter", CKD_BF16, 2, (const uint64_t[2]){1023, 1024}, NULL, f->values);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "stepped";
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = f->values + 3;
    t.optimizer = &step;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    commit_save(save);
    assert_int_equal(tensor_info(f->store, "whole", 1, "cut").shards, 14);
    assert_int_equal(tensor_info(f->store, "whole", 1, "least").shards, 6);
    assert_int_equal(tensor_info(f->store, "whole", 1, "less").shards, 1);
    assert_int_equal(tensor_info(f->store, "whole", 1, "shorter").shards, 1);
    assert_int_equal(tensor_info(f->store, "whole", 1, "narrow").shards, 1);
    assert_int_equal(tensor_info(f->store, "whole", 1, "line").shards, 1);
    assert_int_equal(tensor_info(f->store, "whole", 1, "stepped").shards, 1);
    save = begin_save(f->store, "whole", 2);
    add_tensor(save, "stepped", CKD_F32, 2, shape, NULL, f->values + 3);
    commit_save(save);
    assert_int_equal(tensor_info(f->store, "whole", 2, "stepped").shards, 1);
    ckd_save_options o = lossy_options("lossy", 1, CKD_NEAR);
    o.role_fidelity[CKD_ROLE_EXP_AVG] = CKD_EXACT;
    save = begin_with(f->store, &o);
    add_tensor(save, "exp_avg.w", CKD_F32, 2, shape, NULL, f->values);
    commit_save(save);
    assert_int_equal(tensor_info(f->store, "lossy", 1, "exp_avg.w").shards, 1);
}

/* A rounded copy is cut like its master, whatever its size, and takes almost no space. */
static void test_rounded_copies_are_cut_alike(void **state) {
    fixture *f = *state;
    ckd_optimizer rule = CKD_OPTIMIZER_INIT;
    rule.kind = CKD_ADAMW;
    rule.lr = 1e-3;
    rule.beta1 = 0.9;
    rule.beta2 = 0.99;
    rule.eps = 1e-8;
    rule.step = 1;
    static const uint64_t shapes[][2] = {{1000, 1000}, {1024, 1024}, {1200, 1300}, {1448, 1449}};
    for (size_t i = 0; i < 8; i++) {
        const uint64_t *shape = shapes[i / 2], n = shape[0] * shape[1];
        uint16_t *rounded = to_dtype(f->values, CKD_BF16, n);
        char run[32];
        snprintf(run, sizeof(run), "rounded%zu", i);
        ckd_save *save = begin_save(f->store, run, 1);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "master.w";
        t.role = CKD_ROLE_MASTER;
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = f->values;
        t.optimizer = i % 2 ? &rule : NULL;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        add_tensor(save, "w", CKD_BF16, 2, shape, NULL, rounded);
        commit_save(save);
        ckd_tensor_info w = tensor_info(f->store, run, 1, "w");
        print_message("%zu: %s, %llu bytes\n", i, w.method, (unsigned long long)w.stored_bytes);
        assert_string_equal(w.method, "cast");
        assert_true(w.stored_bytes < n / 50);
        free(rounded);
    }
}

/*
 * A chain keeps the panels of its base, whoever chose them. If a later save uses other regions, its values are still
 * right.
 */
static void test_parents_with_other_cuts(void **state) {
    fixture *f = *state;
    const uint64_t rows = 2048, columns = 2048, shape[2] = {rows, columns}, wide = 320;
    float *panel = malloc(rows * wide * sizeof(float));
    assert_non_null(panel);
    ckd_save *save = begin_save(f->store, "cuts", 1);
    for (uint64_t at = 0; at < columns; at += wide) {
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {0, at}, .lengths = {rows, wide}};
        r.lengths[1] = columns - at < wide ? columns - at : wide;
        for (uint64_t row = 0; row < rows; row++) {
            memcpy(panel + row * r.lengths[1], f->values + row * columns + at, r.lengths[1] * sizeof(float));
        }
        add_tensor(save, "w", CKD_F32, 2, shape, &r, panel);
    }
    commit_save(save);
    assert_int_equal(tensor_info(f->store, "cuts", 1, "w").shards, 7);
    change_values(CKD_F32, f->values, rows * columns, 1);
    save_matrix(f, "cuts", 2, CKD_CODEC_AUTO, rows, columns);
    assert_int_equal(tensor_info(f->store, "cuts", 2, "w").shards, 7);
    assert_string_equal(tensor_info(f->store, "cuts", 2, "w").method, "delta");
    change_values(CKD_F32, f->values, rows * columns, 2);
    save = begin_save(f->store, "cuts", 3);
    for (uint64_t half = 0; half < 2; half++) { /* not the regions of any earlier save */
        ckd_region r = {
            .kind = CKD_REGION_BOX, .offsets = {half * rows / 2, 0}, .lengths = {rows / 2, columns}};
        add_tensor(save, "w", CKD_F32, 2, shape, &r, f->values + half * rows / 2 * columns);
    }
    commit_save(save);
    ckd_load *load = begin(f, "cuts", 3);
    ckd_region whole = {.kind = CKD_REGION_BOX, .lengths = {rows, columns}};
    check_loaded(f, load, &whole, columns);
    ckd_load_end(load);
    free(panel);
    assert_int_equal(verify_damage(f->store), 0);
}

/* Lossy matrices of 2048 x 2048 or more are cut into quarters of both sides. Smaller ones stay whole. */
static void test_lossy(void **state) {
    fixture *f = *state;
    const uint64_t side = 2048, shape[2] = {side, side}, less[2] = {side, side - 1};
    const uint64_t more[2] = {2560, 2560}; /* too long for blocks of a quarter of both sides */
    for (uint64_t step = 0; step < 4; step++) {
        uint64_t random = 11 + step;
        for (uint64_t i = 0; i < side * side; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            f->values[i] += (float)(1e-3 * ((double)(random >> 33) / (1u << 30) - 1));
        }
        ckd_save_options o = lossy_options("near", step, CKD_NEAR);
        o.max_load_cost = o.newest_load_cost = 1000;
        ckd_save *save = begin_with(f->store, &o);
        add_tensor(save, "w", CKD_F32, 2, shape, NULL, f->values);
        if (step == 0) {
            add_tensor(save, "less", CKD_F32, 2, less, NULL, f->values);
            add_tensor(save, "more", CKD_F32, 2, more, NULL, f->values);
        }
        commit_save(save);
    }
    assert_int_equal(tensor_info(f->store, "near", 3, "w").shards, 4);
    assert_int_equal(tensor_info(f->store, "near", 0, "less").shards, 1);
    assert_int_equal(tensor_info(f->store, "near", 0, "more").shards, 4);
    ckd_load *load = begin(f, "near", 3);
    ckd_region whole = {.kind = CKD_REGION_BOX, .lengths = {side, side}};
    double all = (double)reads_of(load, &whole).read_bytes;
    for (uint64_t i = 0; i < 8; i++) {
        ckd_region column = {.kind = CKD_REGION_BOX, .offsets = {0, i / 2 * 512}, .lengths = {side, 512}};
        ckd_region row = {.kind = CKD_REGION_BOX, .offsets = {i / 2 * 512, 0}, .lengths = {512, side}};
        ckd_region cell = {
            .kind = CKD_REGION_BOX, .offsets = {i / 4 * 1024, i % 4 * 512}, .lengths = {1024, 512}};
        assert_int_equal(reads_of(load, &column).depth, 3);
        assert_true(3.5 * (double)reads_of(load, &column).read_bytes < all);
        assert_true(3.5 * (double)reads_of(load, &row).read_bytes < all);
        assert_true(6 * (double)reads_of(load, &cell).read_bytes < all);
    }
    ckd_load_end(load);
}

/* Sides that are no multiples of usual numbers of shards have many cuts close to each other. */
static void test_odd_sides(void **state) {
    fixture *f = *state;
    const uint64_t rows = 3067, columns = 4093;
    for (int raw = 0; raw < 2; raw++) {
        const char *run = raw ? "odd-raw" : "odd";
        save_matrix(f, run, 1, raw ? CKD_CODEC_RAW : CKD_CODEC_AUTO, rows, columns);
        ckd_load *load = begin(f, run, 1);
        ckd_region whole = {.kind = CKD_REGION_BOX, .lengths = {rows, columns}};
        ckd_region third = {.kind = CKD_REGION_BOX, .offsets = {1023, 1365}, .lengths = {1023, 1365}};
        check_loaded(f, load, &whole, columns);
        check_loaded(f, load, &third, columns);
        ckd_load_reads reads = reads_of(load, &third);
        assert_true((double)reads.read_bytes <= (raw ? 1.05 : 1.25) * (double)reads.needed_bytes);
        ckd_load_end(load);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw),
        cmocka_unit_test(test_compressed),
        cmocka_unit_test(test_parts_of_a_chain),
        cmocka_unit_test(test_tensors_stored_whole),
        cmocka_unit_test(test_rounded_copies_are_cut_alike),
        cmocka_unit_test(test_parents_with_other_cuts),
        cmocka_unit_test(test_lossy),
        cmocka_unit_test(test_odd_sides),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("over_read", tests, make_fixture, free_fixture);
    scratch_end();
    return failed;
}
