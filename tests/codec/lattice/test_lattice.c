/*
 * Payloads of lossy blocks: round trips in every form, refusals, damage, and the memory that any bytes can
 * take.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/entropy.h"
#include "codec/common/common.h"
#include "tests/support/lattices.h"
#include "tests/support/xorshift.h"

static symbols_workspace *work;
static lattice_scratch coder_scratch, scratch;

static int set_up(void **state) {
    (void)state;
    return symbols_workspace_create(&work, NULL) == CKD_OK ? 0 : 1;
}
static int tear_down(void **state) {
    (void)state;
    symbols_workspace_free(work);
    lattice_scratch_free(&coder_scratch);
    lattice_scratch_free(&scratch);
    return 0;
}

/* Decodes a copy of the exact size, so that sanitizers notice reads beyond it. */
static ckd_status decode_with(lattice_block *out, uint64_t count, const lattice_columns *shared,
                              const lattice_columns *rows, const void *from, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    memcpy(copy, from, size);
    ckd_error err;
    memset(&err, 0, sizeof(err));
    ckd_status status =
        lattice_decode(out, &(lattice_payload){copy, size, count, shared, rows, false}, &scratch, work, &err);
    assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    assert_true((status == CKD_OK) == (err.message[0] == 0));
    free(copy);
    return status;
}

static ckd_status decode(lattice_block *out, uint64_t count, const lattice_columns *shared, const void *from,
                         size_t size) {
    return decode_with(out, count, shared, NULL, from, size);
}

static void encode(bytes *to, const lattice_block *b, lattice_effort effort) {
    assert_int_equal(lattice_encode(to, b, effort, &coder_scratch, work, NULL), CKD_OK);
}

/* Values of a parent: numbers and special values. */
static uint8_t *some_values(ckd_dtype dtype, uint64_t n) {
    static const uint32_t odd[] = {0x80000000, 1, 0x7f800000, 0xff800000, 0x7fc00001, 0x7f7fffff,
                                   0xc9000000, 0, 0x7f810000, 0xffffffff, 0x7c010000, 0xfe000000};
    size_t size = ckd_dtype_size(dtype);
    uint8_t *out = malloc(n * size + 1);
    assert_non_null(out);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits =
            next_random() % 8 ? 0x3c000000 + (uint32_t)(next_random() % 0x2000000) : odd[next_random() % 12];
        bits = size == 2 ? bits >> 16 : bits;
        memcpy(out + i * size, &bits, size);
    }
    return out;
}

/* ---- round trips ---- */

static void round_trip(unsigned forms, unsigned kind, uint64_t count, uint64_t columns, uint64_t phase) {
    static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16};
    lattices_made m;
    lattices_make(&m, forms, kind, count, columns, phase);
    const lattice_columns *shared = m.b.shared ? &m.b.own : NULL;
    for (int effort = LATTICE_FAST; effort <= LATTICE_SMALL; effort++) {
        bytes payload = {0};
        lattice_block back;
        bytes_put_u32(&payload, 0x12345678); /* the payload is appended */
        encode(&payload, &m.b, (lattice_effort)effort);
        assert_int_equal(load_le32(payload.data), 0x12345678);
        assert_int_equal(
            decode_with(&back, count, shared, lattices_rows(&m.b), payload.data + 4, payload.size - 4),
            CKD_OK);
        assert_true(lattices_same(&m.b, &back));
        ckd_dtype dtype = dtypes[(forms + kind + count) % 3];
        uint8_t *parent = some_values(dtype, count);
        assert_int_equal(lattices_check(&back, shared, dtype, effort ? parent : NULL), CKD_OK);
        free(parent);
        bytes_free(&payload);
    }
    lattices_made_free(&m);
}

static void test_round_trips(void **state) {
    (void)state;
    for (unsigned forms = 0; forms < LATTICES_FORMS; forms++) {
        for (unsigned kind = 0; kind < LATTICES_KINDS; kind++) {
            round_trip(forms, kind, 173, 24, 0);
            round_trip(forms, kind, 100, 1 + next_random() % 130, 0);
            round_trip(forms, kind, 1 + next_random() % 40, 17, next_random() % 17);
        }
        round_trip(forms, LATTICES_FEW, 1, 1, 0);
        round_trip(forms, LATTICES_BYTES, 7, 1, 0);
        round_trip(forms, LATTICES_BYTES, 9, 400, 395);
    }
}

static void test_large_blocks(void **state) {
    (void)state;
    for (unsigned kind = 0; kind < LATTICES_KINDS; kind++) {
        round_trip(LATTICES_ROWS | LATTICES_STEPS | LATTICES_FACTOR, kind, 1 << 18, 512, 0);
        round_trip(LATTICES_LEVELS | LATTICES_ROWS, kind, (1 << 18) - 5, 1000, 3);
        for (uint64_t more = 0; more < 3; more++) { /* in each dtype */
            round_trip(LATTICES_ROWS, kind, (1 << 16) - 5 + more, 100, 3);
            round_trip(LATTICES_STEPS, kind, (1 << 16) - 5 + more, 100, 3);
            round_trip(LATTICES_ROWS | LATTICES_STEPS | LATTICES_EXCEPTIONS, kind, (1 << 16) - 5 + more, 100,
                       3);
        }
    }
}

static bool comes_as_masks(unsigned forms, unsigned kind) {
    lattices_made m;
    bytes payload = {0};
    lattice_block back;
    lattices_make(&m, forms, kind, 1 << 15, 64, 0);
    encode(&payload, &m.b, LATTICE_FAST);
    const lattice_payload from = {payload.data, payload.size, m.b.count, NULL, NULL, true};
    assert_int_equal(lattice_decode(&back, &from, &scratch, work, NULL), CKD_OK);
    for (uint64_t i = 0, at = 0; back.masks && i < m.b.count; i++) {
        int32_t got = back.masks[i / 8] >> i % 8 & 1 ? back.others[at++] : 0;
        assert_int_equal(got, m.b.q[i]);
        assert_true(i + 1 < m.b.count || at == back.other_count);
    }
    assert_true(!back.masks || (!back.q && !back.q8));
    lattices_made_free(&m);
    bytes_free(&payload);
    return back.masks != NULL;
}

/* lattices_check compares the values. */
static void test_masks_of_few(void **state) {
    (void)state;
    assert_true(comes_as_masks(0, LATTICES_FEW));
    assert_true(comes_as_masks(LATTICES_ROWS | LATTICES_STEPS | LATTICES_EXCEPTIONS, LATTICES_FEW));
    assert_false(comes_as_masks(LATTICES_FACTOR, LATTICES_FEW));
    assert_false(comes_as_masks(LATTICES_LEVELS, LATTICES_FEW));
    assert_false(comes_as_masks(0, LATTICES_BYTES));
    assert_false(comes_as_masks(0, LATTICES_NONE));
}

static size_t size_of(const lattice_block *b, lattice_effort effort) {
    bytes payload = {0};
    encode(&payload, b, effort);
    size_t size = payload.size;
    bytes_free(&payload);
    return size;
}

/* Effort small is never larger than fast. A few small integers take little space either way. */
static void test_sizes(void **state) {
    (void)state;
    for (unsigned kind = 0; kind < LATTICES_KINDS; kind++) {
        lattices_made m;
        lattices_make(&m, LATTICES_ROWS, kind, 30000, 300, 0);
        size_t fast = size_of(&m.b, LATTICE_FAST), small = size_of(&m.b, LATTICE_SMALL);
        assert_true(small <= fast);
        assert_true(kind != LATTICES_NONE || small < 100);
        assert_true(kind != LATTICES_FEW || fast < 30000 / 14); /* their entropy is 0.34 bits */
        lattices_made_free(&m);
    }
}

/* ---- shared columns and rows ---- */

static void test_columns(void **state) {
    (void)state;
    for (unsigned forms = 0; forms <= (LATTICES_STEPS | LATTICES_FACTOR); forms += LATTICES_STEPS) {
        lattices_made m;
        lattices_make(&m, forms, LATTICES_FEW, 100, 40, 0);
        bytes raw = {0};
        lattice_columns back;
        assert_int_equal(lattice_columns_encode(&raw, &m.b.own, &scratch, work, NULL), CKD_OK);
        assert_int_equal(lattice_columns_decode(&back, raw.data, raw.size, &scratch, work, NULL), CKD_OK);
        assert_true(lattices_same_columns(&back, &m.b.own));
        for (size_t size = 0; size < raw.size; size++) {
            assert_int_equal(lattice_columns_decode(&back, raw.data, size, &scratch, work, NULL),
                             CKD_E_CORRUPT);
        }
        bytes_put_u8(&raw, 0);
        assert_int_equal(lattice_columns_decode(&back, raw.data, raw.size, &scratch, work, NULL),
                         CKD_E_CORRUPT);
        bytes_free(&raw);
        lattices_made_free(&m);
    }
}

/* A block with shared columns needs them, and they must be of a matrix as wide as its own. */
static void test_shared_columns_must_fit(void **state) {
    (void)state;
    lattices_made m, other;
    lattice_block back;
    bytes payload = {0};
    lattices_make(&m, LATTICES_SHARED | LATTICES_STEPS | LATTICES_FACTOR, LATTICES_FEW, 100, 40, 0);
    lattices_make(&other, LATTICES_STEPS, LATTICES_FEW, 100, 40, 0);
    encode(&payload, &m.b, LATTICE_FAST);
    assert_int_equal(decode(&back, 100, &m.b.own, payload.data, payload.size), CKD_OK);
    assert_int_equal(decode(&back, 100, NULL, payload.data, payload.size), CKD_E_CORRUPT);
    assert_int_equal(decode(&back, 100, &other.b.own, payload.data, payload.size), CKD_E_CORRUPT);
    m.b.own.columns = 41;
    assert_int_equal(decode(&back, 100, &m.b.own, payload.data, payload.size), CKD_E_CORRUPT);
    bytes_free(&payload);
    lattices_made_free(&m);
    lattices_made_free(&other);
}

/* A block with shared rows needs them, and there must be as many as its own. */
static void test_shared_rows_must_fit(void **state) {
    (void)state;
    lattices_made m;
    lattice_block back;
    bytes payload = {0};
    const unsigned all = LATTICES_SHARED | LATTICES_SHARED_ROWS | LATTICES_ROWS | LATTICES_FACTOR;
    lattices_make(&m, all, LATTICES_FEW, 100, 40, 20);
    lattice_columns rows = *lattices_rows(&m.b);
    assert_int_equal(rows.columns, 3);
    encode(&payload, &m.b, LATTICE_FAST);
    assert_int_equal(decode_with(&back, 100, &m.b.own, &rows, payload.data, payload.size), CKD_OK);
    assert_true(back.row == rows.step && back.factor == rows.factor);
    assert_int_equal(decode_with(&back, 100, &m.b.own, NULL, payload.data, payload.size), CKD_E_CORRUPT);
    assert_int_equal(decode_with(&back, 100, NULL, &rows, payload.data, payload.size), CKD_E_CORRUPT);
    lattice_columns other = rows;
    other.columns = 4;
    assert_int_equal(decode_with(&back, 100, &m.b.own, &other, payload.data, payload.size), CKD_E_CORRUPT);
    other = rows;
    other.step = NULL;
    assert_int_equal(decode_with(&back, 100, &m.b.own, &other, payload.data, payload.size), CKD_E_CORRUPT);
    other = rows;
    other.rank++;
    assert_int_equal(decode_with(&back, 100, &m.b.own, &other, payload.data, payload.size), CKD_E_CORRUPT);
    payload.data[0] ^= 128; /* shared rows are declared no longer */
    assert_int_equal(decode_with(&back, 100, &m.b.own, &rows, payload.data, payload.size), CKD_E_CORRUPT);
    payload.data[0] ^= 128 | 64; /* symbols of missing integers */
    assert_int_equal(decode_with(&back, 100, &m.b.own, &rows, payload.data, payload.size), CKD_E_CORRUPT);
    bytes_free(&payload);
    lattices_made_free(&m);
    /* No rows at all, then declared as shared. */
    lattices_make(&m, LATTICES_SHARED, LATTICES_FEW, 100, 40, 20);
    encode(&payload, &m.b, LATTICE_FAST);
    assert_int_equal(decode_with(&back, 100, &m.b.own, NULL, payload.data, payload.size), CKD_OK);
    payload.data[0] |= 128;
    rows = (lattice_columns){.columns = 3};
    assert_int_equal(decode_with(&back, 100, &m.b.own, &rows, payload.data, payload.size), CKD_E_CORRUPT);
    bytes_free(&payload);
    lattices_made_free(&m);
}

/* The panel of a side record may be narrower than its factor. A block's own factor may not. */
static void test_more_components_than_columns(void **state) {
    (void)state;
    int32_t shift[7] = {0, 1, 2, 3, 4, 5, 24}, factor[14];
    lattice_columns narrow = {.columns = 2, .rank = 7, .shift = shift, .factor = factor}, back;
    for (int i = 0; i < 14; i++) {
        factor[i] = i - 7;
    }
    bytes raw = {0};
    assert_int_equal(lattice_columns_encode(&raw, &narrow, &scratch, work, NULL), CKD_OK);
    assert_int_equal(lattice_columns_decode(&back, raw.data, raw.size, &scratch, work, NULL), CKD_OK);
    assert_true(lattices_same_columns(&back, &narrow));
    bytes_free(&raw);
    int32_t rows[7] = {1, 1, 1, 1, 1, 1, 0};
    lattice_block block = {.count = 2, .columns = 2, .own = narrow, .factor = rows}, again;
    bytes payload = {0};
    encode(&payload, &block, LATTICE_FAST);
    assert_int_equal(decode(&again, 2, NULL, payload.data, payload.size), CKD_E_CORRUPT);
    bytes_free(&payload);
}

/* ---- limits: payloads field by field ---- */

enum { LEVELS = 1, ROWS = 2, GRID = 4, FACTOR = 8, EXCEPTIONS = 16, SHARED = 32 };

typedef struct fields {
    unsigned form;
    int32_t step, exponent; /* exponent, or birth */
    uint64_t columns, phase;
    unsigned columns_form;
    int32_t column_step;
    uint64_t rank;
    int32_t shift, scale, factor, row, low_rank;
    uint64_t exceptions, place, next;
    uint8_t q;
    unsigned more; /* extra bytes at the end */
} fields;
#define COUNT 12
static const fields linear = {0, 0, 0, 4, 1, 3, 0, 2, 0, 20, 1, 0, 0, 2, 3, 0, 0, 0};
static const fields levels = {LEVELS, 1, 1, 4, 1, 1, 0, 2, 0, 20, 1, 0, 0, 2, 3, 0, 0, 0};

static void put_signed(bytes *to, int64_t v) {
    wire_put_varint(to, (uint64_t)(v < 0 ? -2 * v - 1 : 2 * v));
}

static void put_integers(bytes *to, int32_t value, uint64_t n, adaptive_start start,
                         const uint8_t *contexts) {
    int32_t *values = malloc(n * sizeof(*values) + 1);
    bytes stream = {0};
    assert_non_null(values);
    for (uint64_t i = 0; i < n; i++) {
        values[i] = value;
    }
    adaptive_encode(&stream, start, &(adaptive_sequence){n, contexts}, values, &coder_scratch.adaptive);
    wire_put_varint(to, stream.size);
    bytes_put(to, stream.data, stream.size);
    bytes_free(&stream);
    free(values);
}

static void put_factor(bytes *to, const fields *f, uint64_t rows) {
    int32_t *scales = calloc(f->rank + 1, sizeof(*scales));
    uint8_t *contexts = malloc(rows * f->rank + 1);
    bytes stream = {0};
    assert_non_null(scales);
    assert_non_null(contexts);
    memset(contexts, f->scale & 63, rows * f->rank);
    scales[0] = f->scale;
    adaptive_encode(&stream, ADAPTIVE_EVEN, &(adaptive_sequence){f->rank, NULL}, scales,
                    &coder_scratch.adaptive);
    wire_put_varint(to, stream.size);
    bytes_put(to, stream.data, stream.size);
    put_integers(to, f->factor, rows * f->rank, ADAPTIVE_SCALED, contexts);
    bytes_free(&stream);
    free(scales);
    free(contexts);
}

static void put_columns(bytes *to, const fields *f) {
    bytes_put_u8(to, (uint8_t)f->columns_form);
    if (f->columns_form & 1) {
        put_integers(to, f->column_step, f->columns, ADAPTIVE_EVEN, NULL);
    }
    if (f->columns_form & 2) {
        wire_put_varint(to, f->rank);
        put_integers(to, f->shift, f->rank, ADAPTIVE_EVEN, NULL);
        put_factor(to, f, f->columns);
    }
}

static void put_block(bytes *to, const fields *f) {
    uint64_t columns = f->form & GRID ? f->columns : COUNT, phase = f->form & GRID ? f->phase : 0;
    uint64_t rows = columns ? (phase + COUNT + columns - 1) / columns : 1;
    bytes_put_u8(to, (uint8_t)f->form);
    put_signed(to, f->step);
    put_signed(to, f->exponent);
    bytes_put(to, "\1\2\3", f->form & LEVELS ? 0 : 3);
    if (f->form & GRID) {
        wire_put_varint(to, f->columns);
        wire_put_varint(to, f->phase);
        if (!(f->form & SHARED)) {
            put_columns(to, f);
        }
    }
    if (f->form & ROWS) {
        put_integers(to, f->row, rows, ADAPTIVE_EVEN, NULL);
    }
    if (f->form & FACTOR) {
        put_signed(to, f->low_rank);
        put_factor(to, f, rows);
    }
    if (f->form & EXCEPTIONS) {
        wire_put_varint(to, f->exceptions);
        for (uint64_t i = 0; i < f->exceptions; i++) {
            wire_put_varint(to, i ? f->next : f->place);
            bytes_put_u32(to, 0x40400000);
        }
    }
    bytes_put_u8(to, f->q);
    bytes_put(to, "\0\0\0\0\0\0\0\0", f->more);
}

static ckd_status decoded(const fields *f) {
    bytes payload = {0};
    lattice_block b;
    put_block(&payload, f);
    assert_false(payload.failed);
    ckd_status status = decode(&b, COUNT, NULL, payload.data, payload.size);
    if (status == CKD_OK) {
        uint8_t *parent = some_values(CKD_F32, COUNT);
        status = lattices_check(&b, NULL, CKD_F32, parent);
        free(parent);
    }
    bytes_free(&payload);
    return status;
}

#define IS(expected, base, ...)                   \
    do {                                          \
        fields f = base;                          \
        fields *const set = &f;                   \
        __VA_ARGS__;                              \
        assert_int_equal(decoded(set), expected); \
    } while (0)
#define FINE(base, ...)    IS(CKD_OK, base, __VA_ARGS__)
#define REFUSED(base, ...) IS(CKD_E_CORRUPT, base, __VA_ARGS__)

static void test_numbers_at_the_beginning(void **state) {
    (void)state;
    FINE(linear, f.step = -400, f.exponent = -120);
    FINE(linear, f.step = 400, f.exponent = 120);
    REFUSED(linear, f.step = -401);
    REFUSED(linear, f.step = 401);
    REFUSED(linear, f.exponent = -121);
    REFUSED(linear, f.exponent = 121);
    REFUSED(linear, f.step = INT32_MIN);
    FINE(levels, f.step = 4096, f.exponent = 2039);
    REFUSED(levels, f.step = 0);
    REFUSED(levels, f.step = 4097);
    REFUSED(levels, f.step = -1);
    REFUSED(levels, f.exponent = 0);
    REFUSED(levels, f.exponent = 2040);
    REFUSED(linear, f.form = 64);
    REFUSED(linear, f.form = 128);
    REFUSED(linear, f.form = 128 | GRID | ROWS);
    REFUSED(linear, f.form = ROWS);
    REFUSED(linear, f.form = FACTOR);
    REFUSED(linear, f.form = SHARED);
    REFUSED(linear, f.form = SHARED | GRID);
}

static void test_limits_of_grids(void **state) {
    (void)state;
    FINE(linear, f.form = GRID, f.columns_form = 0, f.columns = UINT64_C(1) << 40);
    REFUSED(linear, f.form = GRID, f.columns_form = 0, f.columns = (UINT64_C(1) << 40) + 1);
    REFUSED(linear, f.form = GRID, f.columns_form = 0, f.columns = 0, f.phase = 0);
    FINE(linear, f.form = GRID, f.columns_form = 0, f.phase = 3);
    REFUSED(linear, f.form = GRID, f.columns_form = 0, f.phase = 4);
    REFUSED(linear, f.form = GRID, f.columns_form = 4);
    FINE(linear, f.form = GRID, f.columns_form = 1, f.columns = LATTICE_MAX_COLUMNS);
    REFUSED(linear, f.form = GRID, f.columns_form = 1, f.columns = LATTICE_MAX_COLUMNS + 1);
    FINE(linear, f.form = GRID | ROWS, f.columns_form = 1, f.column_step = 4096, f.row = -4096);
    FINE(levels, f.form = LEVELS | GRID | ROWS, f.column_step = -4096, f.row = 4096);
    REFUSED(linear, f.form = GRID, f.columns_form = 1, f.column_step = 4097);
    REFUSED(linear, f.form = GRID, f.columns_form = 1, f.column_step = -4097);
    REFUSED(linear, f.form = GRID | ROWS, f.columns_form = 0, f.row = 4097);
    REFUSED(levels, f.form = LEVELS | GRID | ROWS, f.row = -4097);
    REFUSED(levels, f.form = LEVELS | GRID | ROWS, f.row = INT32_MIN);
}

static void test_limits_of_factors(void **state) {
    (void)state;
    const unsigned both = GRID | FACTOR;
    FINE(linear, f.form = both, f.rank = 4, f.shift = 10, f.low_rank = 64);
    FINE(linear, f.form = both, f.low_rank = -64, f.scale = 0, f.factor = 1);
    REFUSED(linear, f.form = both, f.low_rank = 65);
    REFUSED(linear, f.form = both, f.low_rank = -65);
    REFUSED(linear, f.form = both, f.rank = 0);
    REFUSED(linear, f.form = both, f.rank = 5);
    REFUSED(linear, f.form = both, f.shift = 25);
    REFUSED(linear, f.form = both, f.shift = -1);
    FINE(linear, f.form = both, f.scale = 63);
    REFUSED(linear, f.form = both, f.scale = 64);
    REFUSED(linear, f.form = both, f.scale = -1);
    REFUSED(linear, f.form = GRID, f.columns_form = 2);
    REFUSED(linear, f.form = both, f.columns_form = 1);
    REFUSED(levels, f.form = LEVELS | both, f.columns_form = 2);
    REFUSED(levels, f.form = LEVELS | GRID, f.columns_form = 2);
    FINE(linear, f.form = both, f.columns = 4000, f.rank = LATTICE_MAX_RANK);
    REFUSED(linear, f.form = both, f.columns = 4000, f.rank = LATTICE_MAX_RANK + 1);
}

/* 2^24 integers, and one component more. This is not checked like the others, which would take long. */
static void test_largest_factor(void **state) {
    (void)state;
    for (unsigned rank = 1024; rank <= 1025; rank++) {
        fields f = linear;
        bytes payload = {0};
        lattice_block b;
        f.form = GRID | FACTOR;
        f.columns_form = 2;
        f.columns = 1 << 14;
        f.rank = rank;
        f.factor = 0;
        f.scale = 0;
        put_block(&payload, &f);
        assert_false(payload.failed);
        assert_int_equal(decode(&b, COUNT, NULL, payload.data, payload.size),
                         rank * f.columns <= LATTICE_MAX_FACTOR ? CKD_OK : CKD_E_CORRUPT);
        bytes_free(&payload);
    }
}

/* Sums of products must stay below 2^24. Here they have 2 components of factor^2 2^shift. */
static void test_low_rank_parts_are_exact(void **state) {
    (void)state;
    const unsigned both = GRID | FACTOR;
    FINE(linear, f.form = both, f.factor = 2048, f.shift = 1, f.rank = 1);
    REFUSED(linear, f.form = both, f.factor = 2048, f.shift = 1, f.rank = 2);
    REFUSED(linear, f.form = both, f.factor = -4096, f.shift = 0, f.rank = 1);
    FINE(linear, f.form = both, f.factor = -4095, f.shift = 0, f.rank = 1);
    REFUSED(linear, f.form = both, f.factor = INT32_MIN, f.shift = 24, f.rank = 4);
    REFUSED(linear, f.form = both, f.factor = 1, f.shift = 24, f.rank = 1);
    FINE(linear, f.form = both, f.factor = 1, f.shift = 23, f.rank = 1);
}

static void test_limits_of_exceptions(void **state) {
    (void)state;
    FINE(linear, f.form = EXCEPTIONS);
    FINE(levels, f.form = LEVELS | EXCEPTIONS);
    FINE(linear, f.form = EXCEPTIONS, f.exceptions = COUNT, f.place = 0);
    REFUSED(linear, f.form = EXCEPTIONS, f.exceptions = COUNT + 1, f.place = 0);
    REFUSED(linear, f.form = EXCEPTIONS, f.exceptions = 0);
    FINE(linear, f.form = EXCEPTIONS, f.place = 0, f.next = COUNT - 2);
    REFUSED(linear, f.form = EXCEPTIONS, f.place = 0, f.next = COUNT - 1);
    REFUSED(linear, f.form = EXCEPTIONS, f.place = COUNT);
    REFUSED(linear, f.form = EXCEPTIONS, f.place = UINT64_MAX);
    REFUSED(linear, f.form = EXCEPTIONS, f.next = UINT64_MAX);
    REFUSED(linear, f.form = EXCEPTIONS, f.next = UINT32_MAX);
}

static void test_forms_of_integers(void **state) {
    (void)state;
    FINE(linear, f.more = 0);
    REFUSED(linear, f.more = 1);
    for (unsigned q = 0; q < 256; q++) {
        fields f = linear, g = levels;
        f.q = g.q = (uint8_t)q;
        assert_int_equal(decoded(&f), q ? CKD_E_CORRUPT : CKD_OK);
        f.more = g.more = 3;
        if (q != 1 && q != 2 && q != 4 && q != 8 && q != 16) {
            assert_int_equal(decoded(&f), CKD_E_CORRUPT);
            assert_int_equal(decoded(&g), CKD_E_CORRUPT);
        }
    }
}

/* ---- encodings of integers ---- */

static void put_stream(bytes *to, symbols_mode mode, const int8_t *values, size_t n) {
    symbols_plan(work, 0, mode, &(symbols_input){1, n, values, NULL}, NULL);
    size_t bound = symbols_bound(work, 0);
    uint8_t *at = bytes_extend(to, bound + 1);
    assert_non_null(at);
    to->size -= bound + 1 - symbols_encode(work, 0, values, NULL, at, bound);
}

static ckd_status masks(lattice_block *out, const fields *front, const int8_t *mask, const int8_t *values,
                        size_t n) {
    bytes payload = {0}, stream = {0};
    put_block(&payload, front);
    put_stream(&stream, SYMBOLS_SPLIT, mask, 2);
    wire_put_varint(&payload, stream.size);
    bytes_put(&payload, stream.data, stream.size);
    put_stream(&payload, SYMBOLS_CLASS, values, n);
    ckd_status status = decode(out, COUNT, NULL, payload.data, payload.size);
    bytes_free(&stream);
    bytes_free(&payload);
    return status;
}

static void test_masks(void **state) {
    (void)state;
    lattice_block b;
    fields f = linear, g = levels;
    f.q = g.q = 16;
    const int8_t mask[2] = {-127, 8}, values[3] = {-128, 127, 1}, zero[3] = {3, 0, 1}, beyond[2] = {-127, 16};
    assert_int_equal(masks(&b, &f, mask, values, 3), CKD_OK);
    for (unsigned i = 0; i < COUNT; i++) {
        assert_int_equal(lattices_integer(&b, i), i == 0 ? -128 : i == 7 ? 127 : i == 11);
    }
    assert_int_equal(masks(&b, &f, mask, values, 2), CKD_E_CORRUPT);
    assert_int_equal(masks(&b, &f, mask, zero, 3), CKD_E_CORRUPT);
    assert_int_equal(masks(&b, &f, beyond, values, 3), CKD_E_CORRUPT);
    assert_int_equal(masks(&b, &g, mask, values, 3), CKD_E_CORRUPT);
}

/* The lowest integer is a normal value, except in levels, where it means that the value is zero. */
static void test_lowest_integers(void **state) {
    (void)state;
    for (unsigned width = 1; width <= 2; width++) {
        for (int of_levels = 0; of_levels < 2; of_levels++) {
            int16_t words[COUNT] = {INT16_MIN, INT16_MAX, 5};
            int8_t narrow[COUNT] = {INT8_MIN, INT8_MAX, 5};
            const void *values = width == 1 ? (const void *)narrow : words;
            fields f = of_levels ? levels : linear;
            f.q = (uint8_t)width;
            bytes payload = {0};
            put_block(&payload, &f);
            symbols_plan(work, 0, SYMBOLS_SPLIT, &(symbols_input){width, COUNT, values, NULL}, NULL);
            uint8_t stream[256];
            size_t size = symbols_encode(work, 0, values, NULL, stream, sizeof(stream));
            assert_true(size > 0);
            bytes_put(&payload, stream, size);
            lattice_block b;
            assert_int_equal(decode(&b, COUNT, NULL, payload.data, payload.size), CKD_OK);
            int32_t lowest = width == 1 ? INT8_MIN : INT16_MIN;
            assert_int_equal(lattices_integer(&b, 0), of_levels ? INT32_MIN : lowest);
            assert_int_equal(lattices_integer(&b, 1), -1 - lowest);
            assert_int_equal(lattices_integer(&b, 2), 5);
            assert_int_equal(lattices_integer(&b, 3), 0);
            bytes_free(&payload);
        }
    }
}

static void test_exceptions_of_narrow_dtypes(void **state) {
    (void)state;
    lattices_made m;
    lattices_make(&m, LATTICES_EXCEPTIONS, LATTICES_FEW, 50, 50, 0);
    assert_int_equal(lattices_check(&m.b, NULL, CKD_BF16, NULL), CKD_OK);
    m.bits[0] |= 0x10000;
    assert_int_equal(lattices_check(&m.b, NULL, CKD_F32, NULL), CKD_OK);
    assert_int_equal(lattices_check(&m.b, NULL, CKD_BF16, NULL), CKD_E_CORRUPT);
    assert_int_equal(lattices_check(&m.b, NULL, CKD_F16, NULL), CKD_E_CORRUPT);
    lattices_made_free(&m);
}

/* ---- damage ---- */

/* Memory may be as much as the header's numbers need; buffers grow by half. */
static void check_memory(uint64_t count, uint64_t columns, uint64_t rank) {
    const bytes *all[] = {&scratch.row, &scratch.step,   &scratch.shift, &scratch.factor, &scratch.own_factor,
                          &scratch.q,   &scratch.narrow, &scratch.q8,    &scratch.at,     &scratch.bits};
    uint64_t held = 0, rows = count + 1, factors = columns * rank + (count + 2 * columns) * rank;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        held += all[i]->capacity;
    }
    assert_true(held <= 2 * (5 * factors + 4 * (rows + columns) + 24 * count) + 65536);
}

static void damage(const lattice_block *b, lattice_effort effort) {
    bytes payload = {0};
    lattice_block back;
    const lattice_columns *shared = b->shared ? &b->own : NULL;
    encode(&payload, b, effort);
    uint8_t *parent = some_values(CKD_F32, b->count);
    unsigned survived = 0, cut = 0;
    for (size_t size = 0; size < payload.size; size++) { /* a few prefixes happen to be valid payloads */
        if (decode_with(&back, b->count, shared, lattices_rows(b), payload.data, size) == CKD_OK) {
            cut++;
            lattices_check(&back, shared, CKD_F32, parent);
        }
    }
    assert_true(cut <= 2 + payload.size / 50);
    for (size_t at = 0; at < payload.size; at++) {
        for (unsigned change = 1; change < 256; change = change * 3 + 1) {
            payload.data[at] ^= (uint8_t)change;
            lattice_scratch_free(&scratch);
            memset(&scratch, 0, sizeof(scratch));
            if (decode_with(&back, b->count, shared, lattices_rows(b), payload.data, payload.size) ==
                CKD_OK) {
                survived++;
                if (survived % 8 == 0) {
                    lattices_check(&back, shared, CKD_F32, parent);
                }
            }
            /* One changed byte can increase columns and components to these numbers. */
            check_memory(b->count, 4096, 64);
            payload.data[at] ^= (uint8_t)change;
        }
    }
    assert_true(survived > 0); /* payloads have no checksum */
    free(parent);
    bytes_free(&payload);
}

static void test_damage(void **state) {
    (void)state;
    for (unsigned forms = 0; forms < LATTICES_FORMS; forms += 1 + next_random() % 5) {
        lattices_made m;
        lattices_make(&m, forms, 1 + forms % (LATTICES_KINDS - 1), 60, 12, forms % 12);
        damage(&m.b, forms % 2 ? LATTICE_SMALL : LATTICE_FAST);
        lattices_made_free(&m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_large_blocks),
        cmocka_unit_test(test_masks_of_few),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_columns),
        cmocka_unit_test(test_shared_columns_must_fit),
        cmocka_unit_test(test_shared_rows_must_fit),
        cmocka_unit_test(test_more_components_than_columns),
        cmocka_unit_test(test_numbers_at_the_beginning),
        cmocka_unit_test(test_limits_of_grids),
        cmocka_unit_test(test_limits_of_factors),
        cmocka_unit_test(test_largest_factor),
        cmocka_unit_test(test_low_rank_parts_are_exact),
        cmocka_unit_test(test_limits_of_exceptions),
        cmocka_unit_test(test_forms_of_integers),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_lowest_integers),
        cmocka_unit_test(test_exceptions_of_narrow_dtypes),
        cmocka_unit_test(test_damage),
    };
    return cmocka_run_group_tests_name("lattice", tests, set_up, tear_down);
}
