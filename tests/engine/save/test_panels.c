/* A save that cuts a matrix into panels asks the read function for everything, once, in large slices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/store/paths.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/records.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

enum { ROWS = 1100, COLUMNS = 1200, PART = 150, ROOM = 1 << 20 };
#define COUNT ((uint64_t)ROWS * COLUMNS)

typedef struct source {
    const float *values;
    uint8_t *asked; /* how often for each element */
    uint64_t calls;
} source;

static ckd_status read_values(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    source *s = context;
    assert_true(count > 0 && first + count <= COUNT);
    memcpy(to, s->values + first, count * sizeof(float));
    for (uint64_t i = first; i < first + count; i++) {
        s->asked[i]++;
    }
    s->calls++;
    return CKD_OK;
}

typedef struct how {
    const char *run;
    uint64_t step, staging;
    uint64_t times; /* at most so often is an element asked for */
} how;

/* Saves the matrix through the read function. Returns the number of calls. */
static uint64_t save_read(const stored *f, const how *h, const float *values) {
    const uint64_t shape[2] = {ROWS, COLUMNS};
    source s = {.values = values, .asked = calloc(COUNT, 1)};
    ckd_save_options o = options_of(h->run, h->step);
    o.staging_bytes = h->staging;
    ckd_save *save = begin_with(f->store, &o);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.read = read_values;
    t.read_context = &s;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    commit_save(save);
    for (uint64_t i = 0; i < COUNT; i++) {
        assert_in_range(s.asked[i], 1, h->times);
    }
    free(s.asked);
    return s.calls;
}

static void check_loaded(const stored *f, const char *run, uint64_t step, const float *values) {
    float *loaded = load_whole(f->store, run, step, "w", COUNT * sizeof(float));
    assert_memory_equal(loaded, values, COUNT * sizeof(float));
    free(loaded);
}

/* A base and a delta on it. With room for all rows, there is one call for the rows of a block. */
static void check_calls(const stored *f, const char *run, uint64_t staging, uint64_t most) {
    float *values = random_values(CKD_F32, COUNT, 1);
    for (uint64_t step = 1; step <= 2; step++) {
        assert_in_range(save_read(f, &(how){run, step, staging, 1}, values), 1, most);
        check_loaded(f, run, step, values);
        change_values(CKD_F32, values, COUNT, 2);
    }
    free(values);
}

static void test_all_rows(void **state) {
    check_calls(*state, "all", 0, ROWS / 100);
}

/* Room for two thirds of the rows. */
static void test_bands(void **state) {
    check_calls(*state, "bands", 4 * COUNT * sizeof(float) / 3 * 2, ROWS / 100);
}

/* Room for some columns only: slices of rows are as long as some panels are wide. */
static void test_groups(void **state) {
    check_calls(*state, "groups", UINT64_C(8) << 20, (uint64_t)ROWS * 2);
}

/* Less than a block of each panel: a panel at a time, by rows. */
static void test_little_room(void **state) {
    check_calls(*state, "little", UINT64_C(1) << 18, (uint64_t)ROWS * COLUMNS / 100);
}

/*
 * The parent has other blocks: a part of the columns in one of all rows. If that is longer than a band, it is read
 * alone, and again with the rows that other panels need.
 */
static void test_other_cuts(void **state) {
    const stored *f = *state;
    const uint64_t shape[2] = {ROWS, COLUMNS};
    float *values = random_values(CKD_F32, COUNT, 3);
    float *part = malloc(COUNT * sizeof(float));
    ckd_save *save = begin_save(f->store, "cuts", 1);
    for (uint64_t first = 0, width = PART; first < COLUMNS; first += width) {
        width = first ? COLUMNS - PART : PART;
        for (uint64_t row = 0; row < ROWS; row++) {
            memcpy(part + row * width, values + row * COLUMNS + first, width * sizeof(float));
        }
        ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {0, first}, .lengths = {ROWS, width}};
        add_tensor(save, "w", CKD_F32, 2, shape, &r, part);
    }
    commit_save(save);
    free(part);
    for (uint64_t step = 2; step <= 4; step++) {
        static const uint64_t staging[] = {0, UINT64_C(8) << 20, UINT64_C(1) << 18};
        change_values(CKD_F32, values, COUNT, 4);
        save_read(f, &(how){"cuts", step, staging[step - 2], step == 2 ? 1 : 2}, values);
        check_loaded(f, "cuts", step, values);
    }
    free(values);
}

/* Where the values are makes no difference to what is stored, however little of them can be held. */
static void test_same_records(void **state) {
    (void)state;
    const uint64_t shape[2] = {ROWS, COLUMNS};
    static const uint64_t staging[] = {0, UINT64_C(8) << 20, UINT64_C(1) << 18};
    for (size_t k = 0; k < sizeof(staging) / sizeof(staging[0]); k++) {
        char *described[2];
        for (uint32_t read = 0; read < 2; read++) {
            stored *f = stored_make(read ? 1 : 3, COUNT);
            for (uint64_t step = 1; step <= 2; step++) {
                ckd_save_options o = options_of("run", step);
                o.staging_bytes = staging[k];
                if (read) {
                    save_read(f, &(how){"run", step, staging[k], 1}, f->values);
                } else {
                    ckd_save *save = begin_with(f->store, &o);
                    add_tensor(save, "w", CKD_F32, 2, shape, NULL, f->values);
                    commit_save(save);
                }
                change_values(CKD_F32, f->values, COUNT, 7);
            }
            described[read] = malloc(ROOM);
            records_describe(described[read], ROOM, f->store, path_in(f->dir, "store").text, 1, 2);
            void *made = f;
            stored_remove(&made);
        }
        records_check_same(described[0], described[1], 3);
        free(described[0]);
        free(described[1]);
    }
}

static int make_store(void **state) {
    *state = stored_make(2, 1);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_rows),   cmocka_unit_test(test_bands),
        cmocka_unit_test(test_groups),     cmocka_unit_test(test_little_room),
        cmocka_unit_test(test_other_cuts), cmocka_unit_test(test_same_records),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
