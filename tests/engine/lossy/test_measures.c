/*
 * Measures of errors: tables decode to three digits, and invalid ones are refused. A store reports its errors the same
 * from files and from the catalog, and damage to measures costs no values.
 */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "codec/common/common.h"
#include "engine/save/measures.h"
#include "engine/store/view.h"
#include "tests/support/bundled.h"
#include "tests/support/checkpoints.h"
#include "tests/support/samples.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* ---- tables ---- */

static void expect_near(double got, double want) {
    if (!(fabs(got - want) <= want / 256)) {
        fail_msg("%g instead of %g", got, want);
    }
}

static void expect_figures(const measures *got, const measures *want) {
    expect_near(got->error_squares, want->error_squares);
    expect_near(got->value_squares, want->value_squares);
    assert_true(got->max_error >= want->max_error && got->max_error <= want->max_error * (1 + 1.0 / 128));
    assert_true(isnan(got->direction_change) == isnan(want->direction_change));
    if (!isnan(want->direction_change)) {
        expect_near(got->direction_change, want->direction_change);
    }
    expect_near(got->movement, want->movement);
    assert_true(isnan(got->update) == isnan(want->update));
    if (!isnan(want->update)) {
        assert_true(got->update >= want->update && got->update <= want->update * (1 + 1.0 / 128));
        expect_near(got->update_given, want->update_given);
    }
    assert_int_equal(got->nonfinite, want->nonfinite);
}

static measures_entry entry_of(uint64_t shard, double scale) {
    return (measures_entry){
        shard,
        {3.3 * scale, 7e3 * scale, 1.23456789 * scale, 0.001 * scale, 9.99 * scale, NAN, NAN, shard % 7}};
}

static void test_tables_round_trip(void **state) {
    (void)state;
    measures_entry entries[300], *got;
    size_t count;
    for (uint64_t i = 0; i < 300; i++) {
        entries[i] = entry_of(i * (i + 1) / 2, exp((double)i * 0.1 - 15));
        entries[i].measures.direction_change = i % 3 ? entries[i].measures.direction_change : NAN;
    }
    entries[299].shard = UINT64_MAX - 1;
    bytes raw = {0};
    measures_encode(&raw, entries, 300);
    assert_false(raw.failed);
    assert_in_range(raw.size, 300 * 12, 300 * 12 + 300 + 16);
    assert_int_equal(measures_decode(&got, &count, raw.data, raw.size, &(record_place){"p", 0}, NULL),
                     CKD_OK);
    assert_int_equal(count, 300);
    for (size_t i = 0; i < count; i++) {
        assert_true(got[i].shard == entries[i].shard);
        expect_figures(&got[i].measures, &entries[i].measures);
    }
    free(got);
    bytes_free(&raw);
}

/* Optional figures: those of updates, and those that later versions may add. */
static void test_further_figures(void **state) {
    (void)state;
    measures_entry entries[3] = {entry_of(0, 1), entry_of(1, 2), entry_of(4, 3)}, *got;
    size_t count;
    entries[1].measures.update_given = 3.1;
    entries[1].measures.update = 5.7;
    bytes raw = {0}, longer = {0};
    measures_encode(&raw, entries, 3);
    assert_true(raw.size == 2 + 3 + 3 + 7 * 2 * 3 && raw.data[1] == (2 | 2 << 4));
    bytes_put(&longer, raw.data, raw.size);
    bytes_put(&longer, raw.data + raw.size - 6, 6);
    longer.data[1] = 2 | 3 << 4;
    for (int turn = 0; turn < 2; turn++) {
        const bytes *b = turn ? &longer : &raw;
        assert_int_equal(measures_decode(&got, &count, b->data, b->size, &(record_place){"p", 0}, NULL),
                         CKD_OK);
        assert_int_equal(count, 3);
        for (size_t i = 0; i < count; i++) {
            expect_figures(&got[i].measures, &entries[i].measures);
        }
        free(got);
    }
    bytes_free(&raw);
    bytes_free(&longer);
}

static double through(double v, bool largest) {
    measures_entry e = {.measures = {.error_squares = v, .max_error = v, .update = NAN, .update_given = NAN}},
                   *got;
    size_t count;
    bytes raw = {0};
    measures_encode(&raw, &e, 1);
    assert_int_equal(measures_decode(&got, &count, raw.data, raw.size, &(record_place){"p", 0}, NULL),
                     CKD_OK);
    double out = largest ? got->measures.max_error : got->measures.error_squares;
    free(got);
    bytes_free(&raw);
    return out;
}

static void test_single_figures(void **state) {
    (void)state;
    static const double exact[] = {0, 1, 0x1p-126, 0x1p127, 0x1.fep100, INFINITY};
    for (size_t i = 0; i < sizeof(exact) / sizeof(exact[0]); i++) {
        assert_true(through(exact[i], false) == exact[i] && through(exact[i], true) == exact[i]);
    }
    assert_true(isnan(through(NAN, false)) && isnan(through(-1, true)) && isnan(through(-INFINITY, true)));
    assert_true(through(1e300, false) == INFINITY && through(1e300, true) == INFINITY);
    assert_true(through(0x1.01p0, false) == 0x1p0 || through(0x1.01p0, false) == 0x1.02p0);
    assert_true(through(0x1.00001p0, false) == 1 && through(0x1.00001p0, true) == 0x1.02p0);
    assert_true(through(1 + 0x1p-50, true) == 0x1.02p0); /* it does not even fit an f32 */
    assert_true(through(1e-60, true) > 0);
    assert_true(isnan(through(1e-60, false)) &&
                isnan(through(0x1.fp-127, false))); /* not zero, as of exact values */
}

static void test_invalid_tables(void **state) {
    (void)state;
    measures_entry entries[3] = {entry_of(0, 1), entry_of(4, 2), entry_of(5, 3)}, *got;
    size_t count;
    bytes raw = {0};
    measures_encode(&raw, entries, 3);
    assert_int_equal(raw.size, 2 + 6 + 30);
    for (size_t size = 0; size <= raw.size; size++) { /* truncated */
        ckd_error err = {0};
        ckd_status expected = size == raw.size ? CKD_OK : CKD_E_CORRUPT;
        assert_int_equal(measures_decode(&got, &count, raw.data, size, &(record_place){"p", 77}, &err),
                         expected);
        assert_true(expected == CKD_OK ||
                    (err.offset == 77 && strcmp(err.file, "p") == 0 && !got && count == 0));
        free(got);
    }
    bytes_put_u8(&raw, 0);
    assert_int_equal(measures_decode(&got, &count, raw.data, raw.size, &(record_place){"p", 0}, NULL),
                     CKD_E_CORRUPT);
    raw.size--;
    static const struct {
        size_t at;
        uint8_t value;
    } lies[] = {{0, 0}, {0, 2},   {0, 4},    {1, 1},    {1, 3},       {1, 5},
                {1, 0}, {1, 255}, {2, 0x80}, {8, 0x80}, {8 + 6, 0xff}};
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        uint8_t old = raw.data[lies[i].at];
        raw.data[lies[i].at] = lies[i].value;
        assert_int_equal(measures_decode(&got, &count, raw.data, raw.size, &(record_place){"p", 0}, NULL),
                         CKD_E_CORRUPT);
        raw.data[lies[i].at] = old;
    }
    bytes_free(&raw);
    /* Numbers of shards beyond the largest, and more entries than bytes. */
    static const uint64_t gaps[] = {UINT64_MAX, UINT64_MAX - 1};
    for (size_t i = 0; i < 2; i++) {
        bytes b = {0};
        wire_put_varint(&b, 2);
        bytes_put_u8(&b, 2);
        wire_put_varint(&b, gaps[i]);
        for (int k = 0; k < 23; k++) {
            bytes_put_u8(&b, 0);
        }
        assert_int_equal(measures_decode(&got, &count, b.data, b.size, &(record_place){"p", 0}, NULL),
                         CKD_E_CORRUPT);
        bytes_free(&b);
    }
    for (int bits = 10; bits < 64; bits += 3) {
        bytes b = {0};
        wire_put_varint(&b, UINT64_C(1) << bits);
        bytes_put_u8(&b, 2);
        bytes_put_u64(&b, 0);
        assert_int_equal(measures_decode(&got, &count, b.data, b.size, &(record_place){"p", 0}, NULL),
                         CKD_E_CORRUPT);
        bytes_free(&b);
    }
}

/* ---- stores ---- */

enum { FIRST = 3, STEPS = 2, ROWS = 160 };

static scene scene_at(uint64_t step) {
    scene s = scene_of(step);
    s.rows = ROWS;
    return s;
}

static int setup(void **state) {
    *state = tempdir_create();
    ckd_store *store = store_create(*state);
    for (uint64_t step = FIRST; step < FIRST + STEPS; step++) {
        scene s = scene_at(step);
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
    measure_store(store_path_of(*state, ""));
    return 0;
}

/* Tensors of the scene in the order of their shards. "exp_avg.w" has shards 2 and 3, one for each half. */
static const char *const order[] = {"master.w", "w",     "exp_avg.w",   "embedding",      "tied",
                                    "count",    "empty", "exp_avg.net", "exp_avg_sq.net", "net"};
enum { TENSORS = sizeof(order) / sizeof(order[0]) };

static void expect_tensor(const ckd_tensor_info *t, size_t number) {
    size_t shard = number + (number > 2);
    measures m = measures_of_shard(shard);
    assert_string_equal(t->name, order[number]);
    if (!shard_has_measures(shard)) {
        assert_true(t->rel_l2 == 0 && t->max_error == 0 && t->direction_change == 0 && t->nonfinite == 0);
        return;
    }
    expect_near(t->rel_l2, sqrt(m.error_squares / m.value_squares));
    assert_true(t->max_error >= m.max_error && t->max_error < m.max_error * (1 + 1.0 / 128));
    assert_int_equal(t->nonfinite, m.nonfinite);
    if (isnan(m.direction_change)) {
        assert_true(isnan(t->direction_change));
    } else { /* the other half of tensor 2 is exact */
        expect_near(t->direction_change, number == 2 ? m.direction_change / sqrt(2) : m.direction_change);
    }
}

static ckd_checkpoint checkpoint_at(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
    return c;
}

static void check_lists(ckd_store *store) {
    for (uint64_t step = FIRST; step < FIRST + STEPS; step++) {
        ckd_checkpoint c = checkpoint_at(store, step);
        ckd_tensor_list *list;
        ckd_load *load;
        assert_int_equal(c.fidelity, CKD_NEAR);
        assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
        assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
        const ckd_tensor_list *from_files = ckd_load_tensors(load);
        assert_true(list->count == TENSORS && from_files->count == TENSORS);
        for (size_t i = 0; i < TENSORS; i++) {
            expect_tensor(&list->items[i], i);
            expect_tensor(&from_files->items[i], i);
        }
        ckd_load_end(load);
        ckd_tensor_list_free(list);
    }
}

static void test_stores_report_their_errors(void **state) {
    for (int mode = CKD_OPEN_READ; mode <= CKD_OPEN_WRITE; mode++) {
        ckd_store *store = store_reopen(*state, mode);
        check_lists(store);
        assert_int_equal(verify_damage(store), 0);
        ckd_store_close(store);
    }
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    check_lists(store);
    ckd_store_close(store);
}

/* An exact delta on a lossy checkpoint reports no errors. */
static void test_exact_checkpoints_have_no_errors(void **state) {
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    scene s = scene_at(FIRST + STEPS);
    ckd_checkpoint c;
    ckd_tensor_list *list;
    assert_int_equal(scene_save(&c, store, &s, NULL), CKD_OK);
    assert_int_equal(c.fidelity, CKD_EXACT);
    assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *t = &list->items[i];
        assert_true(t->rel_l2 == 0 && t->max_error == 0 && t->direction_change == 0 && t->nonfinite == 0);
    }
    ckd_tensor_list_free(list);
    ckd_store_close(store);
}

/* The record of measures in a step's chunk file. */
typedef struct table {
    char path[4096];
    uint64_t payload, size, offset;
} table;

static table find_table(const char *dir, const ckd_id *id) {
    table t = {.size = 0};
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s", store_path_of(dir, "data/c"));
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));) {
        char path[4096];
        chunk *c;
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        if (e->d_name[0] == '.' || chunk_open(&c, path, NULL) != CKD_OK) {
            continue;
        }
        const record *last = &c->records[c->record_count - 1];
        if (memcmp(&last->tensor->checkpoint, id, sizeof(*id)) == 0) {
            assert_int_equal(last->kind, RECORD_MEASURES);
            memcpy(t.path, path, sizeof(path));
            t.payload = last->payload_offset;
            t.size = last->stored_size;
            t.offset = last->offset;
        }
        chunk_close(c);
    }
    closedir(d);
    assert_true(t.size > 20);
    return t;
}

static void flip(const table *t, uint64_t at) {
    size_t size;
    unsigned char *data = read_whole_file(t->path, &size);
    data[at] ^= 0x10;
    write_whole_file(t->path, data, size);
    free(data);
}

/* With damaged measures every value loads, no figure is reported, and a verification finds the damage. */
static void test_damage_costs_no_value(void **state) {
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    ckd_checkpoint c = checkpoint_at(store, FIRST + 1);
    ckd_store_close(store);
    table t = find_table(*state, &c.id);
    for (uint64_t at = t.payload; at < t.payload + t.size; at += 5) {
        flip(&t, at);
        store = store_reopen(*state, CKD_OPEN_READ);
        scene s = scene_at(FIRST + 1);
        ckd_load *load;
        ckd_verify_result *result;
        assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
        assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
        const ckd_tensor_list *list = ckd_load_tensors(load);
        for (size_t i = 0; i < list->count; i++) {
            assert_true(isnan(list->items[i].rel_l2) && isnan(list->items[i].max_error));
        }
        ckd_load_end(load);
        assert_int_equal(ckd_store_verify(&result, store, NULL, NULL), CKD_OK);
        assert_int_equal(result->damage_count, 1);
        assert_int_equal(result->damage[0].offset, t.offset);
        ckd_verify_result_free(result);
        ckd_store_close(store);
        flip(&t, at);
    }
    store = store_reopen(*state, CKD_OPEN_READ);
    check_lists(store);
    ckd_store_close(store);
}

/* Wrong measures are found even if all checksums are right. */
static void test_wrong_measures_are_found(void **state) {
    mismeasure_store(store_path_of(*state, ""));
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    ckd_verify_result *result;
    assert_int_equal(ckd_store_verify(&result, store, NULL, NULL), CKD_OK);
    assert_int_equal(result->damage_count, STEPS);
    for (size_t i = 0; i < STEPS; i++) {
        assert_non_null(strstr(result->damage[i].what, "the measures do not have the content hash"));
        assert_int_equal(result->damage[i].checkpoint_count, 0);
    }
    ckd_verify_result_free(result);
    for (uint64_t step = FIRST; step < FIRST + STEPS; step++) {
        scene s = scene_at(step);
        assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

/* ---- writing ---- */

static chunk_writer *writer_at(const char *path) {
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    chunk_writer *w;
    assert_int_equal(chunk_writer_create(&w, path, &identity, NULL), CKD_OK);
    return w;
}

static void test_measures_of_other_tensors_are_refused(void **state) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/file", (char *)*state);
    chunk_writer *w = writer_at(path);
    record r = sample_block();
    uint8_t payload[SAMPLE_BYTES] = {0};
    assert_int_equal(chunk_writer_append(w, &r, payload, NULL), CKD_OK);
    ckd_region whole = {.kind = CKD_REGION_WHOLE}, flat = {.kind = CKD_REGION_FLAT, .start = 0, .count = 5};
    ckd_id checkpoint = r.tensor->checkpoint;
    measures m = measures_of_shard(0);
    save_measures none = {0}, right = {0}, wrong_name = {0}, wrong_region = {0};
    assert_int_equal(measures_write_all(&none, w, &checkpoint, NULL), CKD_OK); /* writes nothing */
    assert_int_equal(measures_add(&wrong_name, "layer.0.bias", &whole, 2, &m, NULL), CKD_OK);
    assert_int_equal(measures_write_all(&wrong_name, w, &checkpoint, NULL), CKD_E_INVALID);
    assert_int_equal(measures_add(&wrong_region, "layer.0.weight", &flat, 2, &m, NULL), CKD_OK);
    assert_int_equal(measures_write_all(&wrong_region, w, &checkpoint, NULL), CKD_E_INVALID);
    measures before = {1e9, 1e9, 1e9, 1e9, 1e9, NAN, NAN, 5},
             unknown = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0};
    m.nonfinite = 2;
    assert_int_equal(measures_add(&right, "layer.0.weight", &whole, 2, &before, NULL), CKD_OK);
    assert_int_equal(measures_add(&right, "layer.0.weight", &whole, 2, &m, NULL), CKD_OK);
    assert_int_equal(measures_add(&right, "layer.0.weight", &whole, 2, &unknown, NULL), CKD_OK);
    assert_int_equal(measures_write_all(&right, w, &checkpoint, NULL), CKD_OK);
    hash128 root;
    uint64_t size;
    assert_int_equal(chunk_writer_finish_durable(w, &root, &size, NULL), CKD_OK);
    chunk *c;
    assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
    assert_int_equal(c->record_count, 2);
    measures_entry *entries;
    size_t count;
    assert_int_equal(measures_read(&entries, &count, c, &c->records[1], NULL), CKD_OK);
    assert_true(count == 1 && entries[0].shard == 0);
    expect_figures(&entries[0].measures, &m);
    free(entries);
    chunk_close(c);
    measures_free(&right);
    measures_free(&wrong_name);
    measures_free(&wrong_region);
}

/* Records whose hashes are right, but whose table is wrong, whose coding is unknown, or whose header is invalid. */
static void test_invalid_records(void **state) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/lying", (char *)*state);
    record_tensor tensor = {.name = "measures", .checkpoint = sample_id(5), .role = CKD_ROLE_OTHER};
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    measures_entry e = entry_of(0, 1), *got;
    bytes raw = {0};
    measures_encode(&raw, &e, 1);
    record sound = {.kind = RECORD_MEASURES,
                    .tensor = &tensor,
                    .region = &whole,
                    .raw_size = raw.size,
                    .stored_size = raw.size,
                    .content = content_hash(raw.data, raw.size)};
    static const ckd_status expected[] = {CKD_OK, CKD_E_CORRUPT, CKD_E_UNSUPPORTED, CKD_E_CORRUPT,
                                          CKD_E_CORRUPT};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        record r = sound;
        r.content.bytes[0] ^= i == 1;
        r.coding = i == 2 ? 9 : i == 3;
        r.raw_size += i == 4;
        chunk_writer *w = writer_at(path);
        assert_int_equal(chunk_writer_append(w, &r, raw.data, NULL), CKD_OK);
        hash128 root;
        uint64_t size;
        assert_int_equal(chunk_writer_finish_durable(w, &root, &size, NULL), CKD_OK);
        chunk *c;
        size_t count;
        assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
        assert_int_equal(measures_read(&got, &count, c, &c->records[0], NULL), expected[i]);
        free(got);
        chunk_close(c);
        assert_int_equal(file_remove(path, false, NULL), CKD_OK);
    }
    bytes_free(&raw);
    ckd_status status;
    assert_null(record_problem(&sound, &status));
    tensor.name = "measure";
    assert_non_null(record_problem(&sound, &status));
    tensor.name = "measures";
    sound.predictor = 1;
    assert_non_null(record_problem(&sound, &status));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, tempdir_teardown)

/* If the squares exceed the range of f32, the relative error is unknown. It is not reported as 0. */
static void test_squares_beyond_f32(void **state) {
    (void)state;
    const double squares[] = {1e30, 3e38, 1e39};
    for (int i = 0; i < 3; i++) {
        measures m = {.error_squares = through(squares[i] / 16, false),
                      .value_squares = through(squares[i], false)};
        double reported = measures_rel_l2(&m);
        assert_true(i < 2 ? fabs(reported - 0.25) < 1e-3 : isnan(reported));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables_round_trip),
        cmocka_unit_test(test_further_figures),
        cmocka_unit_test(test_single_figures),
        cmocka_unit_test(test_squares_beyond_f32),
        cmocka_unit_test(test_invalid_tables),
        TEST(test_stores_report_their_errors),
        TEST(test_exact_checkpoints_have_no_errors),
        TEST(test_damage_costs_no_value),
        TEST(test_wrong_measures_are_found),
        TEST(test_measures_of_other_tensors_are_refused),
        TEST(test_invalid_records),
    };
    return cmocka_run_group_tests_name("measures", tests, NULL, NULL);
}
