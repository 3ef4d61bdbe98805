#include "tests/support/device_packed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/device/internal.h"
#include "kernels/scalar_lattice.h"
#include "tests/support/device_arrays.h"

typedef struct shape {
    uint64_t count, columns, phase;
} shape;
static const shape shapes[] = {{1, 1, 0},       {31, 31, 0},    {33, 8, 0},     {127, 40, 3},
                               {128, 128, 0},   {129, 16, 7},   {255, 16, 7},   {1024, 32, 0},
                               {1025, 33, 32},  {4099, 127, 5}, {8192, 256, 0}, {70001, 768, 3},
                               {131072, 512, 0}};
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* ---- integers ---- */

/* Widths of the groups: all equal, all different, or mostly zeros with a few wide integers. */
typedef enum spread { EQUAL, ANY, SPIKES, SPREADS } spread;

static void *zeroed(uint64_t size) {
    void *memory = calloc(size + 1, 1);
    assert_non_null(memory);
    return memory;
}

/* Random integers of at most `most` bits, the sign included. levels: some are LEVEL_ZERO. */
static int32_t *some_integers(uint64_t n, spread how, uint32_t most, bool levels) {
    int32_t *q = zeroed(n * sizeof(*q));
    for (uint64_t i = 0; i < n; i++) {
        uint32_t which_group = (uint32_t)(i / DEVICE_GROUP), width = how == EQUAL ? most
                                                                     : how == ANY
                                                                         ? which_group * 7 % (most + 1)
                                                                     : next_random() % 200 ? 0
                                                                                           : most;
        int32_t largest = width ? (int32_t)((UINT32_C(1) << (width - 1)) - 1) : 0;
        q[i] = largest ? (int32_t)(next_random() % (2 * (uint64_t)largest + 1)) - largest : 0;
        q[i] = largest && next_random() % 64 == 0 ? (next_random() % 2 ? largest : -largest) : q[i];
        q[i] = levels && next_random() % (which_group % 2 ? 3 : 300) == 0 ? LEVEL_ZERO : q[i];
    }
    return q;
}

/*
 * Checks packed integers bit by bit against the definition in kernels/device.h. No group may be wider than
 * needed.
 */
static void check_packed(const uint32_t *packed, uint64_t size, const int32_t *q, uint64_t n) {
    uint64_t begin = ((n + DEVICE_GROUP - 1) / DEVICE_GROUP * 4 + 15) / 16;
    for (uint64_t first = 0; first < n; first += DEVICE_GROUP) {
        uint32_t head = packed[first / DEVICE_GROUP], width = head % (1u << DEVICE_WIDTH_BITS);
        uint32_t largest = 0;
        bool zeros = false;
        assert_int_equal(head >> DEVICE_WIDTH_BITS, begin);
        for (uint64_t i = 0; i < DEVICE_GROUP; i++) {
            const uint32_t *lane = packed + 4 * begin + i % 4;
            uint32_t got = 0;
            for (uint32_t bit = 0; bit < width; bit++) {
                uint64_t at = i / 4 * width + bit;
                got |= (lane[at / 32 * 4] >> at % 32 & 1) << bit;
            }
            int32_t want = first + i < n ? q[first + i] : 0;
            bool zero = want == LEVEL_ZERO;
            zeros |= zero;
            largest |= zero ? 0 : (uint32_t)abs(want);
            assert_true(width || want == 0);
            want = zero ? -(int32_t)(UINT32_C(1) << (width - 1)) : want;
            assert_int_equal(got, width ? (uint32_t)want & ((UINT32_C(1) << width) - 1) : 0);
        }
        assert_int_equal(width, largest ? scalar_bit_length(largest) + 1 : zeros);
        begin += width;
    }
    assert_int_equal(size, 16 * begin);
}

/* Packs integers and copies them to the device, as a load does. */
static array packed_on_device(const int32_t *q, const int8_t *few, uint64_t n, bool levels) {
    pack_integers from = {few ? NULL : q, few, n, levels, cpu};
    uint64_t heads = device_pack_heads(n), most = heads + (n / DEVICE_GROUP + 1) * DEVICE_GROUP * 4;
    uint32_t *host = NULL;
    assert_int_equal(posix_memalign((void **)&host, 16, most + 16), 0);
    memset(host, SENTINEL, most + 16);
    uint64_t size = device_pack_measure(host, &from);
    assert_true(size >= heads && size <= most);
    device_pack(host, &from);
    check_packed(host, size, q, n);
    for (uint64_t i = size; i < most + 16; i++) {
        assert_int_equal(((uint8_t *)host)[i], SENTINEL);
    }
    array a = array_new(size, 1, 0);
    memcpy(a.host, host, size);
    array_give(&a);
    must(backend->finish(&queue, &why));
    free(host);
    return a;
}

/* ---- tiles ---- */

typedef struct tile {
    shape s;
    uint64_t rows;
    array parent_values, low, row, column, values;
    device_tile t;
} tile;

static void fill_small(array *a, float scale) {
    for (size_t i = 0; i < a->bytes / sizeof(float); i++) {
        ((float *)(void *)a->host)[i] = scale * ((float)(next_random() % 20001) - 10000);
    }
    array_give(a);
}

static void fill_steps(array *a, float times) {
    for (size_t i = 0; i < a->bytes / sizeof(float); i++) {
        ((float *)(void *)a->host)[i] = times * scalar_quarter_octaves((int32_t)(next_random() % 9) - 4);
    }
    array_give(a);
}

/*
 * plain: integers count units, as in lossy bases. Otherwise the tile has a parent, sums of products, steps
 * and offsets.
 */
static void tile_new(tile *t, const shape *s, bool plain) {
    *t = (tile){.s = *s, .rows = (s->phase + s->count + s->columns - 1) / s->columns};
    t->parent_values = array_new(s->count, 4, s->count % 3);
    t->low = array_new(s->count, 4, 0);
    t->row = array_new(t->rows, 4, 1);
    t->column = array_new(s->columns, 4, 1);
    t->values = array_new(s->count, 4, s->count % 2);
    fill_small(&t->parent_values, 1e-6f);
    fill_small(&t->low, 1);
    fill_steps(&t->row, plain ? 0 : 16);
    fill_steps(&t->column, 1);
    for (uint64_t i = 0; i < t->rows && plain; i++) {
        ((float *)(void *)t->row.host)[i] = 1;
    }
    array_give(&t->row);
    t->t = (device_tile){.parent_values = plain ? NULL : (const float *)(const void *)t->parent_values.device,
                         .values = (float *)(void *)t->values.device,
                         .low_rank = plain ? NULL : (const float *)(const void *)t->low.device,
                         .row_step = (const float *)(const void *)t->row.device,
                         .column_step = plain ? NULL : (const float *)(const void *)t->column.device,
                         .count = s->count,
                         .columns = s->columns,
                         .phase = s->phase,
                         .unit = 0x1p-14f,
                         .per_unit = 0x1p14f,
                         .low_rank_unit = 0.0078125f,
                         .offset = {plain ? 0 : 0.125f, plain ? 0 : 0.0625f, plain ? 0 : 0.03125f}};
}

static void tile_free(tile *t) {
    array *all[] = {&t->parent_values, &t->low, &t->row, &t->column, &t->values};
    for (size_t i = 0; i < 5; i++) {
        array_free(all[i]);
    }
}

/* Computes the values on the CPU, row by row. */
static void move_on_cpu(float *values, const tile *t, const int32_t *q) {
    for (uint64_t at = 0, n; at < t->s.count; at += n) {
        uint64_t place = t->s.phase + at, column = place % t->s.columns, left = t->s.count - at;
        n = t->s.columns - column < left ? t->s.columns - column : left;
        lattice_run run = {.unit = t->t.unit,
                           .per_unit = t->t.per_unit,
                           .row_step = ((float *)(void *)t->row.host)[place / t->s.columns],
                           .column_step = t->t.column_step ? (float *)(void *)t->column.host + column : NULL,
                           .low_rank_unit = t->t.low_rank_unit,
                           .offset = {t->t.offset[0], t->t.offset[1], t->t.offset[2]}};
        cpu->lattice_apply(values + at, q + at, t->t.low_rank ? (float *)(void *)t->low.host + at : NULL, n,
                           &run);
    }
}

static void compare_tile(const shape *s, const int32_t *q, const int8_t *few, bool plain) {
    tile t;
    tile_new(&t, s, plain);
    array packed = packed_on_device(q, few, s->count, false);
    t.t.packed = (const uint32_t *)(const void *)packed.device;
    must(backend->move(&queue, &t.t, &why));
    float *got = zeroed(s->count * sizeof(float)), *want = zeroed(s->count * sizeof(float));
    array_take(&t.values, got);
    if (!plain) {
        memcpy(want, t.parent_values.host, s->count * sizeof(float));
    }
    move_on_cpu(want, &t, q);
    assert_memory_equal(got, want, s->count * sizeof(float));
    if (plain && s->count) { /* lossy bases: compare with the host's function for them, too */
        cpu->lattice_values(want, q, s->count, t.t.unit);
        assert_memory_equal(got, want, s->count * sizeof(float));
    }
    array_free(&packed);
    tile_free(&t);
    free(got);
    free(want);
}

static void test_tiles(void **state) {
    (void)state;
    static const uint32_t widths[] = {0, 2, 3, 4, 8, 11, 16, 17, 24, DEVICE_WIDTH_MAX};
    for (size_t i = 0; i < SHAPES; i++) {
        for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
            for (int how = 0; how < SPREADS; how++) {
                int32_t *q = some_integers(shapes[i].count, (spread)how, widths[w], false);
                compare_tile(&shapes[i], q, NULL, (i + w + (size_t)how) % 2);
                free(q);
            }
        }
    }
}

static void test_bytes(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES * 2; i++) {
        const shape *s = &shapes[i / 2];
        int32_t *q = some_integers(s->count, i % 2 ? ANY : SPIKES, 8, false);
        int8_t *few = zeroed(s->count);
        for (uint64_t j = 0; j < s->count; j++) {
            few[j] = (int8_t)q[j];
        }
        compare_tile(s, q, few, i % 4 == 0);
        free(q);
        free(few);
    }
}

/* ---- second moments ---- */

static void compare_levels(const shape *s, const int32_t *q, bool means, int32_t step) {
    uint64_t rows = (s->phase + s->count + s->columns - 1) / s->columns;
    array row = array_new(rows, 4, 0), column = array_new(s->columns, 4, 1),
          values = array_new(s->count, 4, s->count % 2), packed = packed_on_device(q, NULL, s->count, true);
    for (uint64_t i = 0; i < rows; i++) {
        ((int32_t *)(void *)row.host)[i] = 4 * ((int32_t)(next_random() % 21) - 10);
    }
    for (uint64_t i = 0; i < s->columns; i++) {
        ((int32_t *)(void *)column.host)[i] = means ? 4 * ((int32_t)(next_random() % 21) - 10) : 0;
    }
    array_give(&row);
    array_give(&column);
    device_levels t = {.values = (float *)(void *)values.device,
                       .packed = (const uint32_t *)(const void *)packed.device,
                       .row = means ? (const int32_t *)(const void *)row.device : NULL,
                       .column = means ? (const int32_t *)(const void *)column.device : NULL,
                       .count = s->count,
                       .columns = s->columns,
                       .phase = s->phase,
                       .birth = scalar_level_of(1e-8f),
                       .step = step};
    must(backend->move_levels(&queue, &t, &why));
    float *got = zeroed(s->count * sizeof(float)), *want = zeroed(s->count * sizeof(float));
    array_take(&values, got);
    for (uint64_t at = 0, n; at < s->count; at += n) {
        uint64_t place = s->phase + at, c = place % s->columns, left = s->count - at;
        n = s->columns - c < left ? s->columns - c : left;
        level_run run = {.row = means ? ((int32_t *)(void *)row.host)[place / s->columns] : 0,
                         .column = (int32_t *)(void *)column.host + c,
                         .birth = t.birth,
                         .step = step};
        cpu->level_apply(want + at, q + at, n, &run);
    }
    assert_memory_equal(got, want, s->count * sizeof(float));
    array *arrays[] = {&row, &column, &values, &packed};
    for (size_t i = 0; i < 4; i++) {
        array_free(arrays[i]);
    }
    free(got);
    free(want);
}

static void test_levels(void **state) {
    (void)state;
    static const uint32_t widths[] = {0, 2, 3, 8, 13};
    for (size_t i = 0; i < SHAPES; i++) {
        for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
            for (int how = 0; how < SPREADS; how++) {
                int32_t *q = some_integers(shapes[i].count, (spread)how, widths[w], true);
                compare_levels(&shapes[i], q, (i + w) % 2, how ? 24 : 1);
                free(q);
            }
        }
    }
}

/* ---- integers that are too wide ---- */

static void test_too_wide(void **state) {
    (void)state;
    static const int32_t wide[] = {1 << (DEVICE_WIDTH_MAX - 1), -(1 << (DEVICE_WIDTH_MAX - 1)), INT32_MAX,
                                   -INT32_MAX};
    uint32_t heads[4];
    int32_t *q = some_integers(300, EQUAL, DEVICE_WIDTH_MAX, false);
    pack_integers from = {q, NULL, 300, false, cpu};
    assert_int_equal(device_pack_heads(300), sizeof(heads));
    assert_true(device_pack_measure(heads, &from) > 0);
    for (size_t i = 0; i < 4; i++) {
        int32_t was = q[100 * i - i];
        q[100 * i - i] = wide[i];
        assert_int_equal(device_pack_measure(heads, &from), 0);
        q[100 * i - i] = was;
    }
    /* Only second moments have LEVEL_ZERO; for others this is an integer that is too wide. */
    q[299] = LEVEL_ZERO;
    assert_int_equal(device_pack_measure(heads, &from), 0);
    from.levels = true;
    assert_true(device_pack_measure(heads, &from) > 0);
    free(q);
}

int device_packed(const char *name, const device_backend *of) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tiles), cmocka_unit_test(test_bytes),
                                       cmocka_unit_test(test_levels), cmocka_unit_test(test_too_wide)};
    return run_queue_tests(name, of, tests);
}
