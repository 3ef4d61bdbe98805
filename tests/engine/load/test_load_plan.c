/*
 * Planned loads: they read exactly what they explained, each byte once, and find differences before anything is
 * written.
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
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

/*
 * The thread sanitizer is fifty times slower. For it, three blocks and a chain that goes on after the change of ranks
 * are enough.
 */
#ifdef __SANITIZE_THREAD__
enum { ROWS = 600, COLUMNS = 1100 };
#else
enum { ROWS = 1200, COLUMNS = 1100 };
#endif

/* The last step. Each save takes longer than the one before. */
static uint64_t last(void) {
    return under_sanitizer() ? 5 : 16;
}

static const uint64_t shape[2] = {ROWS, COLUMNS};

/*
 * Adds a tensor in three shards of rows or of columns. Switching between them within the chain looks like a change of
 * ranks.
 */
static void add_cut(ckd_save *save, const float *values, bool by_rows) {
    float *slice = malloc(sizeof(float) * ROWS * COLUMNS);
    assert_non_null(slice);
    for (uint64_t i = 0; i < 3; i++) {
        ckd_region r = {.kind = CKD_REGION_BOX, .lengths = {ROWS, COLUMNS}};
        uint64_t all = shape[by_rows ? 0 : 1], at = by_rows ? 0 : 1;
        r.offsets[at] = all * i / 3;
        r.lengths[at] = all * (i + 1) / 3 - r.offsets[at];
        for (uint64_t row = 0; row < r.lengths[0]; row++) {
            memcpy(slice + row * r.lengths[1], values + (r.offsets[0] + row) * COLUMNS + r.offsets[1],
                   r.lengths[1] * sizeof(float));
        }
        add_tensor(save, "cut", CKD_F32, 2, shape, &r, slice);
    }
    free(slice);
}

static void save_step(ckd_store *store, const char *run, uint64_t step, ckd_codec codec,
                      const float *values) {
    ckd_save_options o = options_of(run, step);
    o.codec = codec;
    o.max_load_cost = o.newest_load_cost = 1000;
    ckd_save *save = begin_with(store, &o);
    uint16_t *half = round_to_bf16(values, ROWS * COLUMNS);
    add_tensor(save, "master.w", CKD_F32, 2, shape, NULL, values);
    add_tensor(save, "w", CKD_BF16, 2, shape, NULL, half);
    add_cut(save, values, step % 8 < 4);
    add_tensor(save, "twin", CKD_F32, 2, shape, NULL, values);
    commit_save(save);
    free(half);
}

static int make_store(void **state) {
    stored *f = stored_make(3, ROWS * COLUMNS);
    for (uint64_t step = 0; step <= last(); step++) {
        change_values(CKD_F32, f->values, ROWS * COLUMNS, (unsigned)step);
        save_step(f->store, "chain", step, CKD_CODEC_AUTO, f->values);
    }
    save_step(f->store, "raw", last(), CKD_CODEC_RAW, f->values);
    *state = f;
    return 0;
}

static ckd_load *begin(ckd_store *store, const char *run, uint64_t step, uint64_t staging) {
    ckd_load_options o = CKD_LOAD_OPTIONS_INIT;
    o.staging_bytes = staging;
    return stored_load(store, run, step, &o);
}

static ckd_load_request request_of(const char *name, const ckd_region *region) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.region = *region;
    uint64_t elements =
        region->kind == CKD_REGION_WHOLE ? ROWS * COLUMNS : region->lengths[0] * region->lengths[1];
    q.size = elements * (strcmp(name, "w") == 0 ? 2 : 4);
    return q;
}

static ckd_region part(unsigned dim, uint64_t i, uint64_t n) {
    ckd_region r = {.kind = CKD_REGION_BOX, .lengths = {ROWS, COLUMNS}};
    r.offsets[dim] = shape[dim] * i / n;
    r.lengths[dim] = shape[dim] * (i + 1) / n - r.offsets[dim];
    return r;
}

static void check_values(const stored *f, const ckd_load_request *q) {
    const ckd_region *r = &q->region;
    uint16_t *half = round_to_bf16(f->values, ROWS * COLUMNS);
    size_t size = strcmp(q->name, "w") == 0 ? 2 : 4, at = 0;
    const uint8_t *from = size == 2 ? (const void *)half : (const void *)f->values;
    uint64_t rows = r->kind == CKD_REGION_BOX ? r->lengths[0] : ROWS;
    uint64_t columns = r->kind == CKD_REGION_BOX ? r->lengths[1] : COLUMNS;
    for (uint64_t row = 0; row < rows; row++, at += columns * size) {
        assert_memory_equal((const uint8_t *)q->data + at,
                            from + ((r->offsets[0] + row) * COLUMNS + r->offsets[1]) * size, columns * size);
    }
    free(half);
}

/* Loads all requests. Returns the explanation, whose parts must add up. */
static ckd_load_reads load_planned(const stored *f, ckd_load *load, ckd_load_request *q, size_t count) {
    ckd_load_explanation *e;
    assert_int_equal(ckd_load_explain(&e, load, q, count, NULL), CKD_OK);
    assert_int_equal(ckd_load_bytes_read(load), 0);
    ckd_load_reads all = e->all, sum = {0};
    for (size_t i = 0; i < count; i++) {
        sum.raw_bytes += e->requests[i].raw_bytes;
        sum.needed_bytes += e->requests[i].needed_bytes;
        sum.read_bytes += e->requests[i].read_bytes;
        sum.blocks += e->requests[i].blocks;
        assert_int_equal(e->requests[i].raw_bytes, q[i].size);
    }
    assert_int_equal(sum.raw_bytes, all.raw_bytes);
    assert_int_equal(sum.needed_bytes, all.needed_bytes);
    assert_int_equal(sum.read_bytes, all.read_bytes);
    assert_int_equal(sum.blocks, all.blocks);
    assert_true(all.needed_bytes <= all.read_bytes);
    ckd_load_explanation_free(e);
    for (size_t i = 0; i < count; i++) {
        q[i].data = malloc(q[i].size + 1);
        assert_non_null(q[i].data);
    }
    ckd_error err = {0};
    if (ckd_load_all(load, q, count, CKD_DIFFERS_UNEXPECTED, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.file);
    }
    for (size_t i = 0; i < count; i++) {
        check_values(f, &q[i]);
        free(q[i].data);
    }
    return all;
}

/*
 * Rounded copies, twins, blocks cut in another way, regions in slices: with any number of threads, no stored byte is
 * read twice.
 */
static void test_each_byte_is_read_once(void **state) {
    stored *f = *state;
    bool slow = under_sanitizer();
    for (uint32_t threads = slow ? 3 : 1; threads <= 5; threads += slow ? 4 : 2) {
        ckd_store *store = stored_open(f->dir, threads);
        for (unsigned what = 0; what < 4; what++) {
            ckd_load_request q[12];
            size_t count = 0;
            ckd_region whole = {.kind = CKD_REGION_WHOLE};
            static const char *const names[] = {"master.w", "w", "cut", "twin"};
            for (size_t i = 0; i < 4; i++) {
                if (what == 0) {
                    q[count++] = request_of(names[i], &whole);
                }
                for (uint64_t k = 0; k < 3 && what > 0; k++) {
                    ckd_region r = part(what - 1 < 2 ? what - 1 : 0, what == 3 ? 0 : k, 3);
                    q[count++] = request_of(names[i], &r);
                }
            }
            ckd_load *load = begin(store, "chain", last(), 0);
            ckd_load_reads all = load_planned(f, load, q, count);
            assert_int_equal(ckd_load_bytes_read(load), all.read_bytes);
            assert_int_equal(all.depth, last());
            if (what < 3) { /* all values are requested */
                assert_int_equal(all.needed_bytes, all.read_bytes);
            }
            ckd_load_end(load);
        }
        ckd_store_close(store);
    }
}

/* With too little staging memory, some bytes are read again. The values are right. */
static void test_little_staging(void **state) {
    stored *f = *state;
    ckd_load_request q[2] = {{0}};
    ckd_region a = part(1, 0, 2), b = part(1, 1, 2);
    q[0] = request_of("cut", &a);
    q[1] = request_of("cut", &b);
    ckd_load *load = begin(f->store, "chain", last(), 1);
    ckd_load_reads all = load_planned(f, load, q, 2);
    assert_true(ckd_load_bytes_read(load) > all.read_bytes);
    ckd_load_end(load);
}

/* Of a raw block, only the bytes of the requested elements are needed. */
static void test_needed_bytes_of_raw_blocks(void **state) {
    stored *f = *state;
    ckd_region third = part(0, 0, 3);
    ckd_load_request q = request_of("master.w", &third);
    ckd_load *load = begin(f->store, "raw", last(), 0);
    ckd_load_explanation *e;
    assert_int_equal(ckd_load_explain(&e, load, &q, 1, NULL), CKD_OK);
    assert_int_equal(e->all.needed_bytes, e->all.raw_bytes);
    assert_int_equal(e->all.raw_bytes, ROWS / 3 * COLUMNS * 4);
    assert_int_equal(e->all.depth, 0);
    assert_int_equal(e->checkpoints, 1);
    ckd_load_explanation_free(e);
    ckd_load_end(load);
}

/* ---- differences ---- */

/* An explanation lists every difference between the requests and the checkpoint. */
static void test_differences_are_explained(void **state) {
    stored *f = *state;
    ckd_load *load = begin(f->store, "chain", last(), 0);
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    const uint64_t other[2] = {COLUMNS, ROWS};
    ckd_load_request q[4] = {request_of("master.w", &whole), request_of("w", &whole),
                             request_of("nix", &whole), request_of("cut", &whole)};
    q[0].dtype = CKD_BF16;
    q[1].ndim = 2;
    q[1].shape = other;
    ckd_load_explanation *e;
    assert_int_equal(ckd_load_explain(&e, load, q, 4, NULL), CKD_OK);
    char rows_by_columns[32];
    snprintf(rows_by_columns, sizeof(rows_by_columns), "%d x %d", ROWS, COLUMNS);
    const struct {
        ckd_difference kind;
        const char *tensor, *what;
    } want[] = {{CKD_DIFFERS_DTYPE, "master.w", "bf16"},
                {CKD_DIFFERS_SHAPE, "w", rows_by_columns},
                {CKD_DIFFERS_MISSING, "nix", "no such tensor"},
                {CKD_DIFFERS_UNEXPECTED, "twin", "not requested"}};
    assert_int_equal(e->difference_count, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(e->differences[i].kind, want[i].kind);
        assert_string_equal(e->differences[i].tensor, want[i].tensor);
        assert_non_null(strstr(e->differences[i].what, want[i].what));
    }
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(e->requests[i].read_bytes + e->requests[i].raw_bytes, 0);
    }
    assert_true(e->requests[3].read_bytes > 0);
    ckd_load_explanation_free(e);
    ckd_load_end(load);
}

static void check_untouched(const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        assert_int_equal(data[i], 0x5a);
    }
}

/* If the last request differs in some way, the memory of the first one stays untouched. */
static void test_nothing_is_written_if_anything_differs(void **state) {
    stored *f = *state;
    ckd_load *load = begin(f->store, "raw", last(), 0);
    ckd_region one = {.kind = CKD_REGION_BOX, .lengths = {1, 5}};
    uint8_t first[20], second[40];
    const uint64_t other[1] = {ROWS * COLUMNS};
    for (unsigned wrong = 0; wrong < 6; wrong++) {
        memset(first, 0x5a, sizeof(first));
        memset(second, 0x5a, sizeof(second));
        ckd_load_request q[2] = {request_of("cut", &one), request_of(wrong == 0 ? "nix" : "twin", &one)};
        q[0].data = first;
        q[1].data = second;
        q[1].dtype = wrong == 1 ? CKD_F64 : CKD_DTYPE_NONE;
        q[1].shape = wrong == 2 ? other : NULL;
        q[1].ndim = 1;
        q[1].size += wrong == 3;
        q[1].region.offsets[0] = wrong == 4 ? ROWS : 0;
        unsigned allowed = wrong == 5 ? 0 : CKD_DIFFERS_UNEXPECTED;
        ckd_error err;
        ckd_status status = ckd_load_all(load, q, 2, allowed, &err);
        assert_int_equal(status, wrong == 3 || wrong == 4 ? CKD_E_INVALID : CKD_E_MISMATCH);
        assert_string_equal(err.tensor, wrong == 0 ? "nix" : wrong == 5 ? "master.w" : "twin");
        check_untouched(first, sizeof(first));
        check_untouched(second, sizeof(second));
        if (wrong < 3) { /* if the difference is allowed, the other request is loaded */
            allowed |= wrong == 0 ? CKD_DIFFERS_MISSING : wrong == 1 ? CKD_DIFFERS_DTYPE : CKD_DIFFERS_SHAPE;
            assert_int_equal(ckd_load_all(load, q, 2, allowed, &err), CKD_OK);
            assert_memory_equal(first, f->values, sizeof(first));
            check_untouched(second, sizeof(second));
        }
    }
    ckd_load_end(load);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_byte_is_read_once),
        cmocka_unit_test(test_little_staging),
        cmocka_unit_test(test_needed_bytes_of_raw_blocks),
        cmocka_unit_test(test_differences_are_explained),
        cmocka_unit_test(test_nothing_is_written_if_anything_differs),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("load_plan", tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
