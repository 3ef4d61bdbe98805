/*
 * Framed symbol streams that a decoder must refuse, field by field, in crafted streams; the example in
 * FORMAT.md; and the portable loops of frames, compared with the vectorised ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* ---- the portable loops: the same sources with other names, compiled for a processor without AVX2 ---- */

#define cpu_has_avx2()                false
#define symbols_shared_bits           portable_shared_bits
#define symbols_add_shared            portable_add_shared
#define symbols_frame_write           portable_frame_write
#define symbols_frame_read            portable_frame_read
#define symbols_fill_levels           portable_fill_levels
#define symbols_choose_levels         portable_choose_levels
#define symbols_set_grid              portable_set_grid
#define symbols_choose_counted_levels portable_choose_counted_levels
void symbols_shared_bits(symbols_frame *f, unsigned width, const void *values, size_t n);
void symbols_add_shared(const symbols_frame *f, unsigned width, void *values, size_t n);
size_t symbols_frame_write(const symbols_frame *f, size_t stream_size, uint8_t *to);
bool symbols_frame_read(symbols_frame *f, size_t *stream_size, reader *from, unsigned width, size_t n);
void symbols_fill_levels(uint8_t *context, const symbols_frame *f, size_t n);
void symbols_choose_levels(symbols_frame *f, symbols_level_sums *s, const symbols_grid *grid,
                           const uint8_t *symbols, size_t n, size_t of);
bool symbols_set_grid(uint32_t *columns, uint32_t *phase, uint32_t *rows, const symbols_grid *grid, size_t n,
                      size_t of);
bool symbols_choose_counted_levels(symbols_frame *f, symbols_level_sums *s, uint64_t squares, size_t n);
#include "codec/entropy/symbols_frame.c"
#include "codec/entropy/symbols_levels.c"
#undef symbols_shared_bits
#undef symbols_add_shared
#undef symbols_frame_write
#undef symbols_frame_read
#undef symbols_fill_levels
#undef symbols_choose_levels
#undef symbols_set_grid
#undef symbols_choose_counted_levels

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

/* Finding and restoring shared bits, for arrays of all lengths and alignments. */
static void test_shared_bits_without_avx2(void **state) {
    (void)state;
    enum { MOST = 300 };
    uint8_t values[2][MOST * 8 + 8] = {{0}};
    for (int round = 0; round < 20000; round++) {
        unsigned width = widths[next_random() % 4], shift = (unsigned)(next_random() % (8 * width));
        size_t n = 1 + next_random() % MOST, at = next_random() % 8, odd = next_random() % n;
        uint64_t shared = next_random() & ((UINT64_C(1) << shift) - 1);
        for (size_t i = 0; i < n; i++) {
            uint64_t v = (next_random() << shift | shared) ^ (i == odd ? UINT64_C(1) << shift : 0);
            memcpy(values[0] + at + i * width, &v, width);
        }
        symbols_frame a = {0}, b = {0};
        symbols_shared_bits(&a, width, values[0] + at, n);
        portable_shared_bits(&b, width, values[0] + at, n);
        assert_true(a.shift >= shift && a.shift == b.shift && a.shared == b.shared);
        a.shift = shift;
        a.shared = shared;
        memcpy(values[1], values[0], sizeof(values[0]));
        symbols_add_shared(&a, width, values[0] + at, n);
        portable_add_shared(&a, width, values[1] + at, n);
        assert_memory_equal(values[0], values[1], sizeof(values[0]));
        for (size_t i = 0; i < n; i++) {
            uint64_t v = 0;
            memcpy(&v, values[0] + at + i * width, width);
            assert_true((v & ((UINT64_C(1) << shift) - 1)) == shared);
        }
    }
}

/* Contexts compared with their definition, and chosen levels. */
static void test_levels_without_avx2(void **state) {
    (void)state;
    enum { MOST = 20000 };
    static uint8_t symbols[MOST], contexts[2][MOST + 1];
    static symbols_frame a, b;
    static symbols_level_sums sums;
    size_t chosen = 0;
    for (int round = 0; round < 200; round++) {
        size_t n = 4096 + next_random() % (MOST - 4096), columns = 8 + next_random() % 200;
        symbols_grid grid = {columns, next_random() % columns};
        unsigned scale = (unsigned)(next_random() % 4) * 20;
        for (size_t i = 0; i < n; i++) {
            size_t row = (grid.phase + i) / columns, column = (grid.phase + i) % columns;
            symbols[i] = (uint8_t)(next_random() % 60 + scale * (row % 3) + scale * (column % 2));
        }
        symbols_choose_levels(&a, &sums, &grid, symbols, n, n);
        portable_choose_levels(&b, &sums, &grid, symbols, n, n);
        assert_true(a.columns == b.columns && a.rows == b.rows && (a.columns == 0 || a.phase == b.phase));
        if (a.columns == 0) {
            continue;
        }
        chosen++;
        assert_memory_equal(a.level, b.level, a.rows + a.columns);
        for (size_t i = 0; round % 2 && i < a.rows + a.columns; i++) {
            a.level[i] = (uint8_t)next_random(); /* sums beyond 255 */
        }
        contexts[0][n] = contexts[1][n] = 0xa5;
        symbols_fill_levels(contexts[0], &a, n);
        portable_fill_levels(contexts[1], &a, n);
        for (size_t i = 0; i < n; i++) {
            unsigned sum = a.level[(grid.phase + i) / columns] + a.level[a.rows + (grid.phase + i) % columns];
            assert_int_equal(contexts[0][i], sum < 255 ? sum : 255);
            assert_int_equal(contexts[1][i], contexts[0][i]);
        }
        assert_true(contexts[0][n] == 0xa5 && contexts[1][n] == 0xa5);
    }
    assert_true(chosen > 50 && chosen < 200);
}

/* ---- crafted streams ---- */

enum { N = 640, COLUMNS = 40, PHASE = 7, ROWS = 17, LINES = ROWS + COLUMNS, WIDTH = 2, MOST = 8192 };

typedef struct stream {
    uint8_t bytes[MOST];
    size_t size;
} stream;

static void put_bytes(stream *s, const uint8_t *from, size_t size) {
    assert_true(s->size + size <= MOST);
    memcpy(s->bytes + s->size, from, size);
    s->size += size;
}

static void put_byte(stream *s, unsigned byte) {
    put_bytes(s, &(uint8_t){(uint8_t)byte}, 1);
}

static void put_number(stream *s, uint64_t v) {
    for (; v >= 128; v >>= 7) {
        put_byte(s, (unsigned)(v | 128));
    }
    put_byte(s, (unsigned)v);
}

/* A dense stream of n integers of `width` bytes each. */
static stream dense(symbols_mode mode, unsigned width, const void *values, const uint8_t *context, size_t n) {
    stream s = {.size = 0};
    symbols_groups groups;
    symbols_slot *p = &work->plan[0].inner;
    symbols_dense_plan(work, p, &groups, mode, &(symbols_input){width, n, values, context});
    s.size = symbols_dense_encode(work, p, values, context, s.bytes, MOST);
    assert_true(s.size > 0 && p->header.contexts == (context != NULL));
    return s;
}

/* The parts of a framed stream. Tests may set fields to any value before `together`. */
typedef struct parts {
    unsigned shift;
    uint64_t shared, columns, phase;
    uint64_t size_off; /* added to the size of the stream of levels */
    stream levels, integers;
    uint8_t contexts[N];
    uint16_t values[N];
} parts;

/* Valid parts: levels 0 ... 7; each integer is (30 times its context, plus 0 or 1) times 4, plus 2. */
static parts valid_parts(void) {
    parts p = {.shift = 2, .shared = 2, .columns = COLUMNS, .phase = PHASE};
    uint8_t levels[LINES];
    uint16_t x[N];
    for (size_t i = 0; i < LINES; i++) {
        levels[i] = (uint8_t)(next_random() % 8);
    }
    for (size_t i = 0; i < N; i++) {
        p.contexts[i] = (uint8_t)(levels[(PHASE + i) / COLUMNS] + levels[ROWS + (PHASE + i) % COLUMNS]);
        x[i] = (uint16_t)(30 * p.contexts[i] + next_random() % 2);
        p.values[i] = (uint16_t)(4 * x[i] + 2);
    }
    p.levels = dense(SYMBOLS_SPLIT, 1, levels, NULL, LINES);
    p.integers = dense(SYMBOLS_SPLIT, WIDTH, x, p.contexts, N);
    return p;
}

static stream together(const parts *p) {
    stream s = {.size = 0};
    put_byte(&s, SYMBOLS_FRAMED);
    put_byte(&s, p->shift);
    put_number(&s, p->shared);
    put_number(&s, p->columns);
    if (p->columns) {
        put_number(&s, p->phase);
        put_number(&s, p->levels.size + p->size_off);
        put_bytes(&s, p->levels.bytes, p->levels.size);
    }
    put_bytes(&s, p->integers.bytes, p->integers.size);
    return s;
}

/* Decodes from and to memory of the exact size. message: a part of the error's text, or NULL. */
static ckd_status decode(uint16_t *values, size_t n, const uint8_t *context, const stream *s,
                         const char *message) {
    uint8_t *exact = malloc(s->size ? s->size : 1);
    uint16_t *to = malloc(n * sizeof(*to));
    assert_true(exact && to);
    memcpy(exact, s->bytes, s->size);
    memset(to, 0xa5, n * sizeof(*to));
    ckd_error err = {0};
    ckd_status status = symbols_decode(work, &(symbols_output){WIDTH, n, to, context}, exact, s->size, &err);
    assert_true(status == CKD_OK ? values != NULL : err.message[0]);
    if (message && !strstr(err.message, message)) {
        fail_msg("\"%s\", not \"%s\"", err.message, message);
    }
    if (status == CKD_OK) {
        memcpy(values, to, n * sizeof(*to));
    }
    free(to);
    free(exact);
    return status;
}

static void refused(const parts *p, ckd_status want, const char *message) {
    stream s = together(p);
    uint16_t values[N];
    assert_int_equal(decode(values, N, NULL, &s, message), want);
}

#define NO_FRAME "header is invalid"

static void test_valid_stream(void **state) {
    (void)state;
    parts p = valid_parts();
    uint16_t values[N];
    stream s = together(&p);
    assert_int_equal(decode(values, N, NULL, &s, NULL), CKD_OK);
    assert_memory_equal(values, p.values, sizeof(values));
    /* Integers are modulo 2^16: the highest bits of x are lost. */
    uint16_t x[N];
    for (size_t i = 0; i < N; i++) {
        x[i] = (uint16_t)(p.values[i] / 4 | 0xc000);
    }
    p.integers = dense(SYMBOLS_SPLIT, WIDTH, x, p.contexts, N);
    s = together(&p);
    assert_int_equal(decode(values, N, NULL, &s, NULL), CKD_OK);
    assert_memory_equal(values, p.values, sizeof(values));
    /* CLASS is allowed, too. */
    p.integers = dense(SYMBOLS_CLASS, WIDTH, x, p.contexts, N);
    s = together(&p);
    assert_int_equal(decode(values, N, NULL, &s, NULL), CKD_OK);
    assert_memory_equal(values, p.values, sizeof(values));
}

static void test_refused_shared_bits(void **state) {
    (void)state;
    static const struct {
        unsigned shift;
        uint64_t shared;
        ckd_status want;
    } cases[] = {{16, 0, CKD_E_CORRUPT}, {17, 0, CKD_E_CORRUPT},
                 {64, 0, CKD_E_CORRUPT}, {255, 0, CKD_E_CORRUPT},
                 {2, 4, CKD_E_CORRUPT},  {2, UINT64_MAX, CKD_E_CORRUPT},
                 {0, 1, CKD_E_CORRUPT},  {15, 32768, CKD_E_CORRUPT},
                 {15, 32767, CKD_OK},    {0, 0, CKD_OK},
                 {2, 3, CKD_OK}};
    for (int levels = 0; levels < 2; levels++) {
        parts p = valid_parts();
        if (!levels) {
            p.columns = 0;
            p.integers = dense(SYMBOLS_SPLIT, WIDTH, p.values, NULL, N);
        }
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            p.shift = cases[i].shift;
            p.shared = cases[i].shared;
            refused(&p, cases[i].want, cases[i].want == CKD_OK ? NULL : NO_FRAME);
        }
    }
}

static void test_refused_grids(void **state) {
    (void)state;
    /*
     * 80 is n / 8, which leaves no lines for rows. 9 columns have 72 rows, which are 81 lines where 80 are
     * allowed.
     */
    static const uint64_t columns[] = {1, 9, 79, 80, 81, N, N + 1, UINT64_C(1) << 32, UINT64_MAX};
    parts good = valid_parts(), p = good;
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++) {
        p.columns = columns[i];
        p.phase = 0;
        refused(&p, CKD_E_CORRUPT, NO_FRAME);
    }
    static const uint64_t phases[] = {COLUMNS, COLUMNS + 1, (UINT64_C(1) << 32) + PHASE, UINT64_MAX};
    p = good;
    for (size_t i = 0; i < 4; i++) {
        p.phase = phases[i];
        refused(&p, CKD_E_CORRUPT, NO_FRAME);
    }
    p.phase = COLUMNS - 1; /* also valid, but with other contexts */
    stream s = together(&p);
    uint16_t values[N];
    assert_true(decode(values, N, NULL, &s, NULL) == CKD_E_CORRUPT ||
                memcmp(values, p.values, sizeof(values)) != 0);
}

/* Exactly n / 8 lines are accepted, and one more is not. */
static void test_most_lines(void **state) {
    (void)state;
    for (unsigned phase = 0; phase < 2; phase++) {
        enum { COUNT = 800 };
        for (uint64_t columns = 8; columns <= 100; columns++) {
            uint64_t rows = (phase + COUNT + columns - 1) / columns;
            uint8_t levels[COUNT] = {0};
            uint16_t x[COUNT], values[COUNT];
            for (size_t i = 0; i < COUNT; i++) {
                x[i] = (uint16_t)(i % 5);
            }
            parts p = {.columns = columns, .phase = phase};
            p.levels = dense(SYMBOLS_SPLIT, 1, levels, NULL, (size_t)(rows + columns));
            p.integers = dense(SYMBOLS_SPLIT, WIDTH, x, NULL, COUNT);
            stream s = together(&p);
            bool fits = rows + columns <= COUNT / 8;
            assert_int_equal(decode(values, COUNT, NULL, &s, fits ? NULL : NO_FRAME),
                             fits ? CKD_OK : CKD_E_CORRUPT);
            assert_true(!fits || memcmp(values, x, sizeof(x)) == 0);
        }
    }
}

static void test_refused_levels(void **state) {
    (void)state;
    parts good = valid_parts(), p = good;
    /* A stream that begins or ends in the wrong place, or after the end. */
    size_t rest = good.integers.size;
    const uint64_t off[] = {1, UINT64_MAX, UINT64_C(0) - good.levels.size, rest, rest - 1};
    for (size_t i = 0; i < 5; i++) {
        p.size_off = off[i];
        refused(&p, CKD_E_CORRUPT, NULL);
    }
    const uint64_t beyond[] = {rest + 1, UINT64_MAX - p.levels.size, (UINT64_C(1) << 63) - p.levels.size,
                               UINT64_C(1) << 32};
    for (size_t i = 0; i < 4; i++) {
        p.size_off = beyond[i];
        refused(&p, CKD_E_CORRUPT, NO_FRAME);
    }
    /* One level too few, one too many. */
    uint8_t levels[LINES + 1];
    for (size_t i = 0; i < LINES + 1; i++) {
        levels[i] = (uint8_t)(next_random() % 200);
    }
    p = good;
    for (size_t lines = LINES - 1; lines <= LINES + 1; lines += 2) {
        p.levels = dense(SYMBOLS_SPLIT, 1, levels, NULL, lines);
        refused(&p, CKD_E_CORRUPT, "does not end");
    }
    /* A SPLIT stream with contexts: one table, k = 7, bias 0, one symbol. Everything else is right. */
    static const uint8_t one_table[] = {0x03, 0x70, 0x00, 0x00, 0x00};
    p.levels = (stream){.size = 0};
    put_bytes(&p.levels, one_table, sizeof(one_table));
    for (size_t i = 0; i < (LINES * 7 + 5) / 8; i++) {
        put_byte(&p.levels, 0);
    }
    put_byte(&p.levels, 1u << (LINES * 7 + 5) % 8);
    refused(&p, CKD_E_CORRUPT, "the block has none");
}

/* Streams within a frame must be dense. Without levels there are no contexts. */
static void test_refused_kinds(void **state) {
    (void)state;
    parts good = valid_parts(), p;
    for (unsigned kind = 0x80; kind <= 0xff; kind++) {
        p = good;
        p.levels.bytes[0] = (uint8_t)kind;
        refused(&p, CKD_E_UNSUPPORTED, NULL);
        p = good;
        p.integers.bytes[0] = (uint8_t)kind;
        refused(&p, CKD_E_UNSUPPORTED, NULL);
        if (kind > SYMBOLS_CHANGES) {
            stream s = together(&good);
            s.bytes[0] = (uint8_t)kind;
            assert_int_equal(decode(NULL, N, NULL, &s, NULL), CKD_E_UNSUPPORTED);
        }
    }
    p = good;
    p.columns = 0; /* contexts without levels; those of the caller are not used */
    stream s = together(&p);
    assert_int_equal(decode(NULL, N, p.contexts, &s, "the block has none"), CKD_E_CORRUPT);
    p.integers.size = 0;
    refused(&p, CKD_E_CORRUPT, NULL);
}

/* Numbers that are not in their shortest form, and streams cut at any byte. */
static void test_refused_numbers_and_ends(void **state) {
    (void)state;
    parts p = valid_parts();
    stream good = together(&p);
    assert_true(good.bytes[2] == 2 && good.bytes[3] == COLUMNS && good.bytes[4] == PHASE &&
                good.bytes[5] == p.levels.size);
    for (size_t at = 2; at <= 5; at++) {
        stream s = {.size = 0};
        put_bytes(&s, good.bytes, at);
        put_byte(&s, good.bytes[at] | 128u);
        put_byte(&s, 0);
        put_bytes(&s, good.bytes + at + 1, good.size - at - 1);
        assert_int_equal(decode(NULL, N, NULL, &s, NO_FRAME), CKD_E_CORRUPT);
    }
    for (size_t left = 0; left < good.size; left++) {
        stream s = good;
        s.size = left;
        assert_int_equal(decode(NULL, N, NULL, &s, NULL), CKD_E_CORRUPT);
    }
    uint16_t values[N];
    for (size_t n = 1; n <= N; n++) { /* with other numbers of integers, the last row is incomplete */
        if (n != N) {
            assert_int_equal(decode(values, n, NULL, &good, NULL), CKD_E_CORRUPT);
        }
    }
}

static void test_example_of_the_format(void **state) {
    (void)state;
    static const uint8_t framed[] = {0x81, 0x02, 0x01, 0x10, 0x04, 0x0a, 0x01, 0x01, 0x00, 0x00,
                                     0x00, 0xff, 0x00, 0xff, 0x01, 0x80, 0x03, 0x02, 0x10, 0x00,
                                     0x00, 0x00, 0x00, 0x00, 0x04, 0x04, 0x08, 0x08, 0x00, 0x20};
    int16_t got[272];
    assert_int_equal(symbols_decode(work, &(symbols_output){2, 272, got, NULL}, framed, sizeof(framed), NULL),
                     CKD_OK);
    for (int i = 0; i < 272; i++) {
        assert_int_equal(got[i], 1 + 4 * ((4 + i) / 16 >= 9) + 4 * ((4 + i) % 16 >= 8));
    }
}

/* A sample of more than a block may have more lines than there is space for. Then it has no levels. */
static void test_samples_of_more_than_a_block(void **state) {
    (void)state;
    static symbols_frame f;
    enum { ROOM = SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX };
    static const uint64_t columns[] = {100, ROOM - 9, ROOM - 8, ROOM, 60000, SYMBOLS_MAX_COUNT / 4};
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]); i++) {
        symbols_grid grid = {columns[i], 0};
        bool fits = columns[i] <= ROOM - 9; /* and 9 rows */
        assert_int_equal(symbols_set_grid(&f.columns, &f.phase, &f.rows, &grid, SYMBOLS_MAX_COUNT,
                                          (size_t)SYMBOLS_MAX_COUNT * 16),
                         fits);
        assert_true(!fits || f.rows + f.columns <= ROOM);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_bits_without_avx2),
        cmocka_unit_test(test_levels_without_avx2),
        cmocka_unit_test(test_valid_stream),
        cmocka_unit_test(test_refused_shared_bits),
        cmocka_unit_test(test_refused_grids),
        cmocka_unit_test(test_most_lines),
        cmocka_unit_test(test_samples_of_more_than_a_block),
        cmocka_unit_test(test_refused_levels),
        cmocka_unit_test(test_refused_kinds),
        cmocka_unit_test(test_refused_numbers_and_ends),
        cmocka_unit_test(test_example_of_the_format),
    };
    return cmocka_run_group_tests_name("frames refused", tests, set_up, tear_down);
}
