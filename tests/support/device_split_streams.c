#include <math.h>

#include "engine/device/internal.h"
#include "tests/support/device_lines.h"
#include "tests/support/device_streams.h"

static unsigned framed_streams; /* streams with a frame that were written on the device */

/*
 * Reads SPLIT streams, and integers whose lowest bits are shared and not stored, as with values without a
 * parent.
 */
static void test_split(void **state) {
    (void)state;
    for (size_t i = 1; i < LENGTHS - 1; i++) {
        for (unsigned width = 1; width <= 8; width *= 2) {
            size_t n = block_lengths[i];
            bool dense;
            static symbols_parts parts;
            array to = array_new(n, width, 0);
            uint8_t *got = malloc(to.bytes), *stream = malloc(10 * n + SYMBOLS_MAX_HEADER);
            assert_true(got && stream);
            for (size_t j = 0; j < n; j++) {
                uint64_t v = (UINT64_C(5) << (8 * width - 4)) + (next_random() >> (64 - 6 * width)) -
                             (next_random() >> (64 - 5 * width));
                memcpy(to.host + j * width, &v, width);
            }
            symbols_plan(work, 0, SYMBOLS_SPLIT, &(symbols_input){width, n, to.host, NULL}, NULL);
            size_t size = symbols_encode(work, 0, to.host, NULL, stream, 10 * n + SYMBOLS_MAX_HEADER);
            assert_int_equal(symbols_parts_read(&parts, &dense, width, stream, size, NULL), CKD_OK);
            for (unsigned shift = 0; shift < 8 && dense; shift += 3) {
                dense_batch batch = {0};
                uint64_t shared = 5 & ((1u << shift) - 1);
                dense_integers of = {
                    .integers = to.device, .n = (uint32_t)n, .shift = shift, .shared = shared};
                assert_int_equal(
                    dense_add_reading(&batch, &parts, &of, stream + parts.header, parts.bits, NULL), CKD_OK);
                array memory = batch_memory(&batch);
                lease.reader = NULL;
                assert_int_equal(dense_read(&batch, &lease, memory.device, NULL), CKD_OK);
                assert_true(dense_read_ok(&batch, 0));
                array_take(&to, got);
                for (size_t j = 0; j < n; j++) {
                    uint64_t want = 0, v = 0;
                    memcpy(&want, to.host + j * width, width);
                    memcpy(&v, got + j * width, width);
                    assert_true(v == ((want << shift | shared) & (UINT64_MAX >> (64 - 8 * width))));
                }
                array_free(&memory);
                dense_batch_free(&batch);
            }
            free(got);
            free(stream);
            array_free(&to);
        }
    }
}

/* ---- writing values without a parent ---- */

static uint64_t count_of(const uint32_t *from, unsigned context) {
    uint64_t all = 0;
    for (unsigned i = 0; i < DEVICE_SYMBOLS; i++) {
        all += from[(size_t)context * DEVICE_SYMBOLS + i];
    }
    return all;
}

enum { SCALED, MOMENTS, FEW_BITS, ANY_BITS, EQUAL, WAYS };

/*
 * SCALED: rows and columns with different scales. MOMENTS: second moments. FEW_BITS: the lower 16 bits of f32
 * values are 0. ANY_BITS: any bits. EQUAL: all values are the same.
 */
static void fill_values(uint8_t *to, ckd_dtype dtype, size_t n, size_t columns, int way) {
    float *floats = malloc((n + 1) * sizeof(*floats));
    assert_non_null(floats);
    for (size_t i = 0; i < n; i++) {
        size_t row = i / columns, column = i % columns;
        float noise = (float)(int32_t)next_random() / 0x1p31f;
        float scale = ldexpf(1, (int)(row * 7 % 11) + (int)(column * 5 % 13) - 20);
        floats[i] = way == EQUAL ? 0.5f : noise * scale;
        floats[i] = way == MOMENTS ? (i % 97 ? floats[i] * floats[i] : 0) : floats[i];
    }
    cpu->cast(dtype == CKD_F32 ? CKD_BF16 : dtype, to, CKD_F32, floats, n);
    if (dtype == CKD_F32 && way == FEW_BITS) {
        uint16_t *half = malloc((n + 1) * sizeof(*half));
        assert_non_null(half);
        memcpy(half, to, n * sizeof(*half));
        cpu->widen((float *)(void *)to, CKD_BF16, half, n);
        free(half);
    } else if (dtype == CKD_F32) {
        memcpy(to, floats, n * sizeof(*floats));
    }
    for (size_t i = 0; way == ANY_BITS && i < n * ckd_dtype_size(dtype); i++) {
        to[i] = (uint8_t)next_random();
    }
    free(floats);
}

/* The results of the device's steps for a block's integers. */
typedef struct splitting {
    size_t n, width;
    array integers, extents, sums, squares, levels, contexts, symbols, counts;
    symbols_splitting split;
    symbols_lines lines;
    uint8_t *chosen; /* levels of rows and columns; NULL: none */
    uint32_t *counted;
} splitting;

static void split_step(splitting *s, device_split_step step) {
    device_split d = {.integers = s->integers.device,
                      .extents = (device_extent *)(void *)s->extents.device,
                      .sums = s->lines.columns ? (uint64_t *)(void *)s->sums.device : NULL,
                      .squares = (uint64_t *)(void *)s->squares.device,
                      .levels = s->chosen ? s->levels.device : NULL,
                      .contexts = s->contexts.device,
                      .bias = s->split.bias,
                      .n = (uint32_t)s->n,
                      .width = (uint32_t)s->width,
                      .bits = s->split.bits,
                      .columns = s->lines.columns,
                      .phase = s->lines.phase,
                      .rows = s->lines.rows};
    array there = copied(&d, 1, sizeof(d));
    must(backend->split(&queue, step, (const device_split *)(const void *)there.device, 1, (uint32_t)s->n,
                        &why));
    array_free(&there);
}

static void look_at_extents(splitting *s) {
    device_extent e[DEVICE_EXTENTS(DEVICE_STREAM_MAX)];
    split_step(s, DEVICE_SPLIT_EXTENT);
    array_take(&s->extents, e);
    symbols_extent all = {(unsigned)s->width, s->n, UINT64_MAX, 0, e[0].any, 0};
    for (size_t i = 0; i < DEVICE_EXTENTS(s->n); i++) {
        all.low = e[i].low < all.low ? e[i].low : all.low;
        all.high = e[i].high > all.high ? e[i].high : all.high;
        all.differing |= e[i].differing;
    }
    s->split = symbols_split_finest(&all);
}

static void look_at_lines(splitting *s, const symbols_grid *grid) {
    s->lines = symbols_lines_of(grid, s->n);
    uint32_t all = s->lines.rows + s->lines.columns;
    s->sums = array_new(all, sizeof(uint64_t), 0);
    s->levels = array_new(all, 1, 0);
    array_give(&s->sums);
    array_give(&s->squares);
    split_step(s, DEVICE_SPLIT_LINES);
    uint64_t *sums = malloc(s->sums.bytes + 1), squares;
    uint8_t *levels = malloc(all + 1);
    assert_true(sums && levels);
    array_take(&s->sums, sums);
    array_take(&s->squares, &squares);
    bool worth = s->lines.columns && symbols_levels_of(levels, work, &s->lines, sums, squares, s->n);
    s->chosen = worth ? s->levels.host : NULL;
    if (worth) {
        memcpy(s->levels.host, levels, all);
        array_give(&s->levels);
    }
    split_step(s, DEVICE_SPLIT_CONTEXTS);
    free(sums);
    free(levels);
}

static void count_split(splitting *s) {
    device_classes c = {.integers = s->integers.device,
                        .contexts = s->chosen ? s->contexts.device : NULL,
                        .symbols = s->symbols.device,
                        .counts = (uint32_t *)(void *)s->counts.device,
                        .centre = s->split.bias,
                        .n = (uint32_t)s->n,
                        .width = (uint32_t)s->width,
                        .split = 1,
                        .bits = s->split.bits};
    array there = copied(&c, 1, sizeof(c));
    array_give(&s->counts);
    must(backend->classify(&queue, (const device_classes *)(const void *)there.device, 1, (uint32_t)s->n,
                           &why));
    s->counted = malloc(s->counts.bytes);
    assert_non_null(s->counted);
    array_take(&s->counts, s->counted);
    array_free(&there);
}

/* Writes the stream from the counts. It must equal the codec's stream. */
static void compare_split_stream(splitting *s, const uint8_t *want, size_t want_size) {
    static symbols_parts parts;
    dense_batch batch = {0};
    symbols_counts c = {.width = (unsigned)s->width, .n = s->n, .last_context = 255, .counts = s->counted};
    for (; c.first_context < 255 && count_of(s->counted, c.first_context) == 0; c.first_context++) {
    }
    for (; c.last_context > 0 && count_of(s->counted, c.last_context) == 0; c.last_context--) {
    }
    c.counts += (size_t)c.first_context * DEVICE_SYMBOLS;
    symbols_plan_split(work, 1, &c, &s->split, &s->lines, s->chosen);
    symbols_parts_planned(&parts, work, 1);
    uint8_t *got = malloc(symbols_bound(work, 1) + SYMBOLS_MAX_HEADER);
    assert_non_null(got);
    size_t frame = symbols_parts_frame(work, 1, got), size = frame + parts.header;
    assert_true(frame <= symbols_parts_frame_bound(work, 1));
    framed_streams += frame > 0;
    symbols_parts_header(work, 1, got + frame);
    dense_integers of = {.integers = s->integers.device,
                         .symbols = s->symbols.device,
                         .contexts = s->contexts.device,
                         .n = (uint32_t)s->n,
                         .shift = parts.shift};
    assert_int_equal(dense_add_writing(&batch, &parts, &of, parts.bound, NULL), CKD_OK);
    array memory = batch_memory(&batch);
    lease.reader = NULL;
    assert_int_equal(dense_write(&batch, &lease, memory.device, NULL), CKD_OK);
    uint64_t payload;
    const void *from = dense_payload(&batch, 0, &payload);
    assert_int_equal(size + payload, want_size);
    must(backend->copy(&queue, got + size, from, payload, DEVICE_TO_HOST, &why));
    must(backend->finish(&queue, &why));
    assert_memory_equal(got, want, want_size);
    free(got);
    array_free(&memory);
    dense_batch_free(&batch);
}

static void compare_split(ckd_dtype dtype, size_t n, const symbols_grid *grid, int way) {
    splitting s = {.n = n, .width = ckd_dtype_size(dtype)};
    array values = array_new(n, s.width, 0);
    s.integers = array_new(n, s.width, 0);
    s.extents = array_new(DEVICE_EXTENTS(n), sizeof(device_extent), 0);
    s.squares = array_new(1, sizeof(uint64_t), 0);
    s.contexts = array_new(n, 1, 0);
    s.symbols = array_new(n, 1, 0);
    s.counts = array_new(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t), 0);
    fill_values(values.host, dtype, n, (size_t)grid->columns ? (size_t)grid->columns : 1, way);
    array_give(&values);
    elements(DEVICE_ROTATE, dtype, s.integers.device, values.device, NULL, n);
    cpu->rotate_sign(dtype, s.integers.host, values.host, n);
    symbols_plan(work, 0, SYMBOLS_SPLIT, &(symbols_input){(unsigned)s.width, n, s.integers.host, NULL}, grid);
    size_t bound = symbols_bound(work, 0);
    uint8_t *stream = malloc(bound);
    assert_non_null(stream);
    size_t size = symbols_encode(work, 0, s.integers.host, NULL, stream, bound);
    look_at_extents(&s);
    look_at_lines(&s, grid);
    count_split(&s);
    compare_split_stream(&s, stream, size);
    array *arrays[] = {&values,   &s.integers, &s.extents, &s.sums,  &s.squares,
                       &s.levels, &s.contexts, &s.symbols, &s.counts};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        array_free(arrays[i]);
    }
    free(stream);
    free(s.counted);
}

static void test_split_writing(void **state) {
    (void)state;
    static const symbols_grid grids[] = {{0, 0}, {64, 0}, {200, 77}, {1000, 999}};
    static const size_t lengths[] = {1, 33, 4099, 40000};
    static const ckd_dtype floats[] = {CKD_F32, CKD_BF16, CKD_F16};
    for (int way = 0; way < WAYS; way++) {
        for (size_t d = 0; d < 3; d++) {
            for (size_t i = 0; i < 4; i++) {
                compare_split(floats[d], lengths[i], &grids[(i + d + (size_t)way) % 4], way);
            }
            compare_split(floats[d], 40000, &grids[1 + d], way);
        }
    }
    compare_split(CKD_F32, DEVICE_STREAM_MAX, &(symbols_grid){512, 100}, MOMENTS);
    assert_true(framed_streams >= 10);
}

int device_split_streams(const char *name, const device_backend *of) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_split), cmocka_unit_test(test_split_writing)};
    return run_stream_tests(name, of, tests);
}
