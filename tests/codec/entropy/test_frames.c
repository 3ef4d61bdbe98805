/*
 * Framed symbol streams: round trips with grids of all kinds, which streams are framed, sizes and estimates,
 * capacity, damage, and the example in FORMAT.md.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/symbols_work.h"

static symbols_workspace *work;

static int set_up(void **state) {
    (void)state;
    return symbols_workspace_create(&work, NULL) == CKD_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    symbols_workspace_free(work);
    return 0;
}

static const unsigned widths[] = {1, 2, 4, 8};

/* ---- integers to code ---- */

typedef enum kind {
    ALL_ZERO,
    ALL_EQUAL,
    RANDOM,
    SHARED, /* the lowest bits are the same, the highest differ */
    LEVELS, /* rows and columns have different scales */
    BOTH,
    MANY_ZEROS, /* like LEVELS, but half of the rows and some columns are zero */
    KINDS
} kind;

typedef struct data {
    unsigned width;
    size_t n;
    symbols_grid grid;
    uint8_t *values;
} data;

static uint64_t mixed(uint64_t x) {
    x = (x + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    return x * UINT64_C(0xbf58476d1ce4e5b9) >> 32;
}

/* Up to 88 symbols, depending on row and column. The bits below are noise. */
static uint64_t leveled(const data *d, size_t i, bool zeros) {
    uint64_t columns = d->grid.columns ? d->grid.columns : 1;
    uint64_t row = (d->grid.phase + i) / columns, column = (d->grid.phase + i) % columns;
    if (zeros && (row % 2 || column % 5 == 4)) {
        return 0;
    }
    uint64_t symbol = mixed(row) % 40 + mixed(~column) % 40 + next_random() % 8;
    unsigned low = d->width == 1 ? 0 : 8 * d->width - 8;
    return (symbol + 60) << low | (next_random() & ((UINT64_C(1) << low) - 1));
}

static uint64_t integer(const data *d, kind k, size_t i) {
    unsigned bits = 8 * d->width;
    switch (k) {
    case ALL_ZERO:
        return 0;
    case ALL_EQUAL:
        return UINT64_C(0x923456789abcdef1);
    case RANDOM:
        return next_random();
    case SHARED:
        return next_random() << bits / 3 | 1;
    case LEVELS:
        return leveled(d, i, false);
    case BOTH:
        return leveled(d, i, false) << 1 | 1;
    default:
        return leveled(d, i, true);
    }
}

static data make(kind k, unsigned width, size_t n, uint64_t columns, uint64_t phase) {
    data d = {width, n, {columns, phase}, malloc(n * width + 1)};
    assert_non_null(d.values);
    for (size_t i = 0; i < n; i++) {
        uint64_t v = integer(&d, k, i);
        memcpy(d.values + i * width, &v, width);
    }
    return d;
}

/* ---- coding with sentinels around everything that is written ---- */

#define GUARD 32

static void check_guard(const uint8_t *at) {
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(at[i], 0xa5);
    }
}

/* A copy in an allocation of the exact size, so that sanitizers notice reads beyond it. */
static uint8_t *exactly(const uint8_t *from, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    memcpy(copy, from, size);
    return copy;
}

static uint8_t *encode(const data *d, int slot, const symbols_grid *grid, size_t *size) {
    size_t planned =
        symbols_plan(work, slot, SYMBOLS_SPLIT, &(symbols_input){d->width, d->n, d->values, NULL}, grid);
    size_t bound = symbols_bound(work, slot);
    uint8_t *out = malloc(bound + GUARD);
    assert_non_null(out);
    memset(out, 0xa5, bound + GUARD);
    *size = symbols_encode(work, slot, d->values, NULL, out, bound);
    assert_true(*size > 0 && *size <= bound);
    check_guard(out + bound);
    /* The choice between codings relies on the planned size. */
    assert_true(*size <= planned + planned / 256 + 8 && planned <= *size + *size / 256 + 48);
    return out;
}

/* Decodes to an odd address, with sentinels. The values are at `all` + GUARD + 1. */
static ckd_status decode_into(uint8_t *all, const data *d, const uint8_t *context, const uint8_t *stream,
                              size_t size, ckd_error *err) {
    size_t bytes_decoded = d->n * d->width;
    ckd_error own;
    err = err ? err : &own;
    memset(err, 0, sizeof(*err));
    memset(all, 0xa5, bytes_decoded + 2 * GUARD + 1);
    ckd_status status =
        symbols_decode(work, &(symbols_output){d->width, d->n, all + GUARD + 1, context}, stream, size, err);
    assert_true(status == CKD_OK || err->message[0]);
    check_guard(all + 1);
    check_guard(all + GUARD + 1 + bytes_decoded);
    return status;
}

static uint8_t *buffer_for(const data *d) {
    uint8_t *all = malloc(d->n * d->width + 2 * GUARD + 1);
    assert_non_null(all);
    return all;
}

static bool same(const uint8_t *all, const data *d) {
    return memcmp(all + GUARD + 1, d->values, d->n * d->width) == 0;
}

static size_t round_trip(const data *d, const symbols_grid *grid) {
    size_t size;
    uint8_t *out = encode(d, (int)(next_random() % 2), grid, &size);
    uint8_t *stream = exactly(out, size), *all = buffer_for(d);
    assert_int_equal(decode_into(all, d, NULL, stream, size, NULL), CKD_OK);
    assert_true(same(all, d));
    free(all);
    free(stream);
    free(out);
    return size;
}

/* ---- round trips ---- */

static const size_t phases_of = 4;
static uint64_t phase_of(uint64_t columns, size_t which) {
    return which == 0 || columns == 0 ? 0
                                      : (which == 1 ? 1 % columns : (which == 2 ? columns / 2 : columns - 1));
}

static void test_round_trips(void **state) {
    (void)state;
    static const size_t counts[] = {1, 2, 7, 8, 9, 255, 2048, 4095, 4096, 4097, 9001};
    static const uint64_t columns[] = {0, 1, 2, 16, 17, 31, 64, 100, 255, 256, 500, 4096, UINT64_C(1) << 40};
    for (size_t w = 0; w < 4; w++) {
        for (int k = 0; k < KINDS; k++) {
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                for (size_t j = 0; j < sizeof(columns) / sizeof(columns[0]) * phases_of; j++) {
                    uint64_t phase = phase_of(columns[j / phases_of], j % phases_of);
                    data d = make((kind)k, widths[w], counts[c], columns[j / phases_of], phase);
                    round_trip(&d, &d.grid);
                    free(d.values);
                }
                data d = make((kind)k, widths[w], counts[c], counts[c], 0);
                round_trip(&d, &d.grid);
                round_trip(&d, NULL);
                free(d.values);
            }
        }
    }
}

/* Every number of columns for which there may be levels, and some larger ones. */
static void test_all_columns(void **state) {
    (void)state;
    size_t levels = 0;
    for (uint64_t columns = 1; columns <= 300; columns++) {
        data d = make(BOTH, widths[columns % 4], 4600, columns, next_random() % columns);
        levels += round_trip(&d, &d.grid) + 10 < round_trip(&d, NULL);
        free(d.values);
    }
    assert_true(levels > 150);
}

static void test_whole_blocks(void **state) {
    (void)state;
    static const uint64_t columns[] = {1, 32, 768, 4096, 16000, SYMBOLS_MAX_COUNT};
    for (size_t w = 0; w < 4; w++) {
        for (int k = 0; k < KINDS; k++) {
            uint64_t c = columns[((size_t)k + w) % 6];
            data d = make((kind)k, widths[w], SYMBOLS_MAX_COUNT, c, c / 3);
            round_trip(&d, &d.grid);
            free(d.values);
        }
    }
}

/* A senseless grid is ignored. */
static void test_senseless_grids_are_ignored(void **state) {
    (void)state;
    static const symbols_grid grids[] = {
        {0, 0}, {0, 5}, {64, 64}, {64, UINT64_MAX}, {UINT64_MAX, UINT64_MAX - 1}};
    data d = make(LEVELS, 4, 6000, 64, 0);
    size_t without = round_trip(&d, NULL);
    for (size_t i = 0; i < sizeof(grids) / sizeof(grids[0]); i++) {
        assert_int_equal(round_trip(&d, &grids[i]), without);
    }
    free(d.values);
}

/* ---- which streams are framed ---- */

typedef struct head {
    bool framed;
    unsigned shift;
    uint64_t shared, columns, phase;
} head;

static uint64_t take_varint(const uint8_t **at) {
    uint64_t v = 0;
    unsigned shift = 0;
    do {
        v |= (uint64_t)(**at & 127) << shift;
        shift += 7;
    } while (*(*at)++ & 128);
    return v;
}

static head head_of(const data *d, const symbols_grid *grid) {
    size_t size;
    uint8_t *out = encode(d, 0, grid, &size);
    const uint8_t *at = out;
    head h = {.framed = *at++ == SYMBOLS_FRAMED};
    if (h.framed) {
        h.shift = *at++;
        h.shared = take_varint(&at);
        h.columns = take_varint(&at);
        h.phase = h.columns ? take_varint(&at) : 0;
    }
    free(out);
    return h;
}

/* A frame is not worth it for fewer bits. Shared bits that belong to symbols cost nothing anyway. */
static bool worth(size_t n, unsigned shift, unsigned low_bits) {
    return n * (shift < low_bits ? shift : low_bits) >= 128;
}

/* Every number of shared bits is found, and never more than all integers share. */
static void test_shared_bits(void **state) {
    (void)state;
    static const size_t counts[] = {2, 63, 64, 65, 3000};
    for (size_t j = 0; j < 4 * 5; j++) {
        unsigned width = widths[j / 5], bits = 8 * width;
        size_t n = counts[j % 5];
        for (unsigned shift = 0; shift < bits; shift++) {
            data d = make(RANDOM, width, n, 0, 0);
            uint64_t shared = next_random() & ((UINT64_C(1) << shift) - 1);
            for (size_t i = 0; i < n; i++) { /* the next bit is 1 in the last integer only */
                uint64_t above = i == 0 ? 0 : (i == n - 1 ? UINT64_MAX : next_random());
                uint64_t v = above << shift << 1 | (uint64_t)(i == n - 1) << shift | shared;
                memcpy(d.values + i * width, &v, width);
            }
            head h = head_of(&d, NULL);
            bool framed = worth(n, shift, bits - 8);
            assert_int_equal(h.framed, framed);
            assert_int_equal(h.shift, framed ? shift : 0);
            assert_true(h.shared == (framed ? shared : 0) && h.columns == 0);
            round_trip(&d, NULL);
            free(d.values);
        }
    }
}

static void test_equal_integers(void **state) {
    (void)state;
    for (size_t w = 0; w < 4; w++) {
        for (int k = ALL_ZERO; k <= ALL_EQUAL; k++) {
            data d = make((kind)k, widths[w], 4096, 64, 3);
            assert_int_equal(head_of(&d, &d.grid).columns, 0);
            assert_true(round_trip(&d, &d.grid) < 48);
            free(d.values);
        }
    }
}

static void test_levels_where_they_help(void **state) {
    (void)state;
    for (size_t w = 0; w < 4; w++) {
        for (int k = 0; k < KINDS; k++) {
            data d = make((kind)k, widths[w], 10007, 90, 13);
            head h = head_of(&d, &d.grid);
            bool leveled = k == LEVELS || k == BOTH || k == MANY_ZEROS;
            assert_true(leveled ? h.columns == 90 && h.phase == 13 : h.columns == 0);
            unsigned shift = k == BOTH ? 1 : (k == SHARED ? 8 * widths[w] / 3 : 0);
            assert_int_equal(h.shift, widths[w] == 1 ? 0 : shift); /* a byte has no bits below the symbol */
            free(d.values);
        }
    }
}

/* With contexts, or in mode CLASS, there is no frame. */
static void test_no_frame_with_contexts(void **state) {
    (void)state;
    data d = make(BOTH, 4, 8192, 64, 0);
    uint8_t *context = calloc(d.n, 1), *all = buffer_for(&d);
    assert_non_null(context);
    for (int mode = 0; mode < 2; mode++) {
        for (int contexts = mode; contexts < 2; contexts++) {
            const uint8_t *given = contexts ? context : NULL;
            symbols_plan(work, 0, (symbols_mode)mode, &(symbols_input){4, d.n, d.values, given}, &d.grid);
            size_t bound = symbols_bound(work, 0);
            uint8_t *out = malloc(bound);
            assert_non_null(out);
            size_t size = symbols_encode(work, 0, d.values, given, out, bound);
            assert_true(size > 0 && out[0] < 0x80);
            assert_int_equal(decode_into(all, &d, given, out, size, NULL), CKD_OK);
            assert_true(same(all, &d));
            free(out);
        }
    }
    free(all);
    free(context);
    free(d.values);
}

/* The decoder ignores contexts from its caller: a framed stream has its own. */
static void test_contexts_of_the_caller_are_ignored(void **state) {
    (void)state;
    data d = make(BOTH, 2, 8192, 64, 9);
    size_t size;
    uint8_t *out = encode(&d, 0, &d.grid, &size), *all = buffer_for(&d), *context = malloc(d.n);
    assert_non_null(context);
    for (size_t i = 0; i < d.n; i++) {
        context[i] = (uint8_t)next_random();
    }
    assert_int_equal(decode_into(all, &d, context, out, size, NULL), CKD_OK);
    assert_true(same(all, &d));
    free(context);
    free(all);
    free(out);
    free(d.values);
}

/* ---- sizes ---- */

static void test_frames_pay(void **state) {
    (void)state;
    size_t n = 1 << 16;
    data d = make(LEVELS, 4, n, 256, 0);
    size_t with = round_trip(&d, &d.grid), without = round_trip(&d, NULL);
    /* 24 bits are noise; symbols take 3.5 bits instead of 6 */
    assert_true(8 * with < n * 28 - n / 3 && 8 * without > n * 30);
    free(d.values);
    /* The shared bit is the only difference. */
    data one = make(LEVELS, 4, n, 256, 0), none = make(LEVELS, 4, n, 256, 0);
    for (size_t i = 0; i < n; i++) {
        one.values[4 * i] |= 1;
        memcpy(none.values + 4 * i, one.values + 4 * i, 4);
    }
    none.values[4 * (n - 1)] ^= 1;
    size_t saved = round_trip(&none, &none.grid) - round_trip(&one, &one.grid);
    assert_true(saved > n / 8 - n / 64 && saved < n / 8 + n / 64);
    free(one.values);
    free(none.values);
    /* A grid that does not help costs nothing. */
    data random = make(SHARED, 4, n, 0, 0);
    symbols_grid grid = {100, 7};
    assert_int_equal(round_trip(&random, &grid), round_trip(&random, NULL));
    free(random.values);
}

/* A normal number by Box and Muller, from two uniform ones. */
static double normal(void) {
    double u = ((double)(next_random() >> 11) + 0.5) * 0x1p-53, v = (double)(next_random() >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Second moments in fp32 as in training (sign: their roots with a sign), rotated as the engine does. */
static data moments(size_t rows, size_t columns, double spread, bool sign) {
    data d = {4, rows * columns, {columns, 0}, malloc(rows * columns * 4)};
    double *row = malloc(rows * sizeof(*row)), *column = malloc(columns * sizeof(*column));
    assert_true(d.values && row && column);
    for (size_t i = 0; i < rows; i++) {
        row[i] = spread * normal();
    }
    for (size_t i = 0; i < columns; i++) {
        column[i] = spread * normal();
    }
    for (size_t i = 0; i < d.n; i++) {
        double scale = exp(row[i / columns] + column[i % columns] - 9);
        float v = (float)(sign ? scale * normal() : scale * scale * exp(0.4 * normal()));
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits = bits << 1 | bits >> 31;
        memcpy(d.values + 4 * i, &bits, 4);
    }
    free(row);
    free(column);
    return d;
}

/* Estimates from whole rows all over the matrix, as the engine does. */
static double estimated(const data *d, size_t share, const symbols_grid *grid) {
    size_t columns = (size_t)d->grid.columns, rows = d->n / columns, taken = rows / share;
    uint8_t *sample = malloc(taken * columns * 4);
    assert_non_null(sample);
    for (size_t i = 0; i < taken; i++) {
        memcpy(sample + i * columns * 4, d->values + i * share * columns * 4, columns * 4);
    }
    size_t of =
        symbols_estimate(work, SYMBOLS_SPLIT, &(symbols_input){4, taken * columns, sample, NULL}, grid, d->n);
    free(sample);
    return (double)of;
}

static void test_estimates(void **state) {
    (void)state;
    static const size_t shapes[][2] = {{256, 256}, {512, 128}, {1024, 256}, {96, 2048}};
    for (size_t i = 0; i < 4 * 4; i++) {
        data d = moments(shapes[i / 4][0], shapes[i / 4][1], i % 4 < 2 ? 1 : 0.3, i % 2);
        size_t planned, plain;
        planned = symbols_plan(work, 0, SYMBOLS_SPLIT, &(symbols_input){4, d.n, d.values, NULL}, &d.grid);
        plain = symbols_plan(work, 0, SYMBOLS_SPLIT, &(symbols_input){4, d.n, d.values, NULL}, NULL);
        assert_true(planned < plain);
        double whole = estimated(&d, 1, &d.grid) / (double)planned;
        double sampled = estimated(&d, 16, &d.grid) / (double)planned;
        double without = estimated(&d, 16, NULL) / (double)plain;
        assert_true(whole > 0.98 && whole < 1.02);
        assert_true(sampled > 0.96 && sampled < 1.04);
        assert_true(without > 0.98 && without < 1.02);
        free(d.values);
    }
}

/* ---- plans and capacity ---- */

static void test_two_slots(void **state) {
    (void)state;
    data d[2] = {make(BOTH, 4, 9000, 80, 3), make(LEVELS, 8, 5000, 50, 49)};
    uint8_t *out[2], *all = buffer_for(&d[1]);
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        symbols_plan(work, i, SYMBOLS_SPLIT, &(symbols_input){d[i].width, d[i].n, d[i].values, NULL},
                     &d[i].grid);
    }
    for (int i = 1; i >= 0; i--) { /* decoding in between must not change the other plan */
        out[i] = malloc(symbols_bound(work, i));
        assert_non_null(out[i]);
        size[i] = symbols_encode(work, i, d[i].values, NULL, out[i], symbols_bound(work, i));
        assert_int_equal(decode_into(all, &d[i], NULL, out[i], size[i], NULL), CKD_OK);
        assert_true(same(all, &d[i]));
    }
    free(all);
    for (int i = 0; i < 2; i++) {
        free(out[i]);
        free(d[i].values);
    }
}

/* Too small a capacity is reported, and nothing is written beyond it. The exact size is enough. */
static void test_capacity(void **state) {
    (void)state;
    static const kind kinds[] = {LEVELS, SHARED, BOTH, MANY_ZEROS};
    for (size_t j = 0; j < 4; j++) {
        data d = make(kinds[j], widths[j], 4800, 20, 7); /* more than 127 bytes of levels */
        size_t size;
        uint8_t *want = encode(&d, 0, &d.grid, &size);
        assert_int_equal(want[0], SYMBOLS_FRAMED);
        for (size_t capacity = 0; capacity <= size;
             capacity += capacity > 9000 && capacity + 40 < size ? 17 : 1) {
            uint8_t *out = malloc(capacity + GUARD);
            assert_non_null(out);
            memset(out + capacity, 0xa5, GUARD);
            assert_int_equal(symbols_encode(work, 0, d.values, NULL, out, capacity),
                             capacity < size ? 0 : size);
            check_guard(out + capacity);
            assert_true(capacity < size || memcmp(out, want, size) == 0);
            free(out);
        }
        free(want);
        free(d.values);
    }
}

/* ---- damage ---- */

static data damage_sample(size_t which) {
    static const struct {
        kind k;
        unsigned width;
        size_t n, columns;
    } samples[] = {{SHARED, 2, 300, 0}, {SHARED, 8, 40, 0}, {LEVELS, 1, 4096, 64}, {BOTH, 4, 4100, 33}};
    return make(samples[which].k, samples[which].width, samples[which].n, samples[which].columns,
                samples[which].columns / 2);
}
#define DAMAGE_SAMPLES 4
#define DAMAGED_FRONT  400 /* the frame, the levels and the headers are here */

static void test_flipped_bits(void **state) {
    (void)state;
    for (size_t which = 0; which < DAMAGE_SAMPLES; which++) {
        data d = damage_sample(which);
        size_t size, refused = 0;
        uint8_t *out = encode(&d, 0, &d.grid, &size), *stream = exactly(out, size), *all = buffer_for(&d);
        assert_int_equal(out[0], SYMBOLS_FRAMED);
        for (size_t bit = 0; bit < 8 * size; bit += bit / 8 < DAMAGED_FRONT ? 1 : 61) {
            stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
            ckd_status status = decode_into(all, &d, NULL, stream, size, NULL);
            assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
            refused += status != CKD_OK;
            stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        assert_true(refused > 0);
        assert_int_equal(decode_into(all, &d, NULL, stream, size, NULL), CKD_OK);
        assert_true(same(all, &d));
        free(all);
        free(stream);
        free(out);
        free(d.values);
    }
}

static void test_truncations(void **state) {
    (void)state;
    for (size_t which = 0; which < DAMAGE_SAMPLES; which++) {
        data d = damage_sample(which);
        size_t size;
        uint8_t *out = encode(&d, 0, &d.grid, &size), *all = buffer_for(&d);
        for (size_t left = 0; left < size; left++) {
            uint8_t *stream = exactly(out, left);
            assert_int_equal(decode_into(all, &d, NULL, stream, left, NULL), CKD_E_CORRUPT);
            free(stream);
        }
        uint8_t *longer = malloc(size + 1);
        assert_non_null(longer);
        memcpy(longer, out, size);
        for (unsigned extra = 0; extra < 256; extra++) {
            longer[size] = (uint8_t)extra;
            assert_true(decode_into(all, &d, NULL, longer, size + 1, NULL) != CKD_OK || !same(all, &d));
        }
        free(longer);
        free(all);
        free(out);
        free(d.values);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_all_columns),
        cmocka_unit_test(test_whole_blocks),
        cmocka_unit_test(test_senseless_grids_are_ignored),
        cmocka_unit_test(test_shared_bits),
        cmocka_unit_test(test_equal_integers),
        cmocka_unit_test(test_levels_where_they_help),
        cmocka_unit_test(test_no_frame_with_contexts),
        cmocka_unit_test(test_contexts_of_the_caller_are_ignored),
        cmocka_unit_test(test_frames_pay),
        cmocka_unit_test(test_estimates),
        cmocka_unit_test(test_two_slots),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_truncations),
    };
    return cmocka_run_group_tests_name("frames", tests, set_up, tear_down);
}
