/* Adaptive streams: round trips, sizes compared with the entropy, damage, and refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/entropy.h"

static adaptive_scratch models;

/* ---- integers to code ---- */

static double uniform(void) {
    return ((double)(next_random() >> 11) + 0.5) / 9007199254740992.0;
}

static double gaussian(void) {
    return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform());
}

typedef enum kind { ZERO, SPARSE, TERNARY, SMALL, WIDE, EXTREME, ANY, KINDS } kind;

static int32_t integer(kind k) {
    static const int32_t ends[] = {INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX};
    switch (k) {
    case ZERO:
        return 0;
    case SPARSE:
        return next_random() % 50 ? 0 : (int32_t)(next_random() % 7) - 3;
    case TERNARY:
        return (int32_t)(next_random() % 3) - 1;
    case SMALL:
        return (int32_t)lrint(gaussian() * 3);
    case WIDE:
        return (int32_t)lrint(gaussian() * 3e4);
    case EXTREME:
        return ends[next_random() % 7];
    default:
        return (int32_t)((uint32_t)next_random() >> next_random() % 32);
    }
}

static int32_t *integers(kind k, size_t n) {
    int32_t *values = malloc((n + 1) * sizeof(*values));
    assert_non_null(values);
    for (size_t i = 0; i < n; i++) {
        values[i] = integer(k);
    }
    return values;
}

/* Random bytes. Coders reduce them to the range that they use. */
static uint8_t *any_bytes(size_t n) {
    uint8_t *out = malloc(n + 1);
    assert_non_null(out);
    for (size_t i = 0; i < n; i++) {
        out[i] = (uint8_t)next_random();
    }
    return out;
}

/* ---- one interface for both kinds of streams ---- */

typedef struct sample {
    adaptive_plane plane; /* columns 0: integers with contexts, which are in `hints` */
    adaptive_start start;
    int32_t *values;
    uint8_t *extra; /* owned; plane.hints may point to it */
} sample;

static void encode(bytes *to, const sample *s) {
    if (s->plane.columns) {
        adaptive_plane_encode(to, &s->plane, s->values, &models);
    } else {
        adaptive_encode(to, s->start, &(adaptive_sequence){s->plane.count, s->plane.hints}, s->values,
                        &models);
    }
    assert_false(to->failed);
}

#define GUARD 0x5a5a5a5a

/*
 * Decodes a copy of the exact size, so that sanitizers notice reads beyond it, with guards around the
 * integers.
 */
static ckd_status decode(int32_t *values, const sample *s, const uint8_t *from, size_t size) {
    size_t n = s->plane.count;
    uint8_t *copy = malloc(size ? size : 1);
    int32_t *out = malloc((n + 2) * sizeof(*out));
    assert_non_null(copy);
    assert_non_null(out);
    memcpy(copy, from, size);
    for (size_t i = 0; i < n + 2; i++) {
        out[i] = GUARD;
    }
    ckd_error err;
    memset(&err, 0, sizeof(err));
    ckd_status status =
        s->plane.columns
            ? adaptive_plane_decode(out + 1, &s->plane, copy, size, &models, &err)
            : adaptive_decode(out + 1, &(adaptive_sequence){n, s->plane.hints}, copy, size, &models, &err);
    assert_true(out[0] == GUARD && out[n + 1] == GUARD);
    assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    assert_true((status == CKD_OK) == (err.message[0] == 0));
    for (size_t i = 0; i < n && status != CKD_OK; i++) {
        assert_int_equal(out[i + 1], 0);
    }
    memcpy(values, out + 1, n * sizeof(*values));
    free(out);
    free(copy);
    return status;
}

/* Encodes and decodes; returns the size in bytes. */
static size_t round_trip(const sample *s) {
    bytes stream = {0};
    bytes_put_u32(&stream, 0x12345678); /* the stream is appended */
    encode(&stream, s);
    assert_int_equal(load_le32(stream.data), 0x12345678);
    size_t n = s->plane.count, size = stream.size - 4;
    assert_true(n > 0 || size == 0);
    int32_t *back = malloc((n + 1) * sizeof(*back));
    assert_non_null(back);
    assert_int_equal(decode(back, s, stream.data + 4, size), CKD_OK);
    assert_memory_equal(back, s->values, n * sizeof(*back));
    free(back);
    bytes_free(&stream);
    return size;
}

static void sample_free(sample *s) {
    free(s->values);
    free(s->extra);
}

static sample make(kind k, size_t n, uint64_t columns, uint64_t phase, bool hints) {
    sample s = {.plane = {n, columns, phase, NULL}, .values = integers(k, n), .extra = any_bytes(n)};
    s.plane.hints = hints ? s.extra : NULL;
    return s;
}

/* ---- round trips ---- */

static void values_are_read_back(void **state) {
    (void)state;
    static const size_t counts[] = {0, 1, 2, 3, 17, 300, 5000};
    for (kind k = 0; k < KINDS; k++) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            for (unsigned how = 0; how < 4; how++) {
                sample s = make(k, counts[c], 0, 0, how & 1);
                s.start = how & 2 ? ADAPTIVE_SCALED : ADAPTIVE_EVEN;
                round_trip(&s);
                sample_free(&s);
            }
        }
    }
}

static void planes_are_read_back(void **state) {
    (void)state;
    static const struct {
        size_t count;
        uint64_t columns, phase;
    } shapes[] = {{0, 1, 0},
                  {1, 1, 0},
                  {7, 1, 0},
                  {9, 2, 1},
                  {10, 3, 2},
                  {100, 16, 0},
                  {1000, 16, 15},
                  {4000, 4000, 77},
                  {4000, 3999, 3998},
                  {5000, 64, 5},
                  {70, 1000, 0},
                  {70, 1000, 990},
                  {50, UINT64_MAX, UINT64_MAX - 20},
                  {20000, 131, 1}};
    for (kind k = 0; k < KINDS; k++) {
        for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
            for (unsigned hints = 0; hints < 2; hints++) {
                sample s = make(k, shapes[i].count, shapes[i].columns, shapes[i].phase, hints);
                round_trip(&s);
                sample_free(&s);
            }
        }
    }
}

/* ---- sizes ---- */

/* The entropy of rounded Gaussians, in bits. */
static double ideal_bits(const int32_t *values, size_t n, double deviation) {
    double bits = 0, unit = deviation * sqrt(2);
    for (size_t i = 0; i < n; i++) {
        double at = fabs((double)values[i]);
        bits -= log2(0.5 * erfc((at - 0.5) / unit) - 0.5 * erfc((at + 0.5) / unit));
    }
    return bits;
}

static sample factor(size_t n, double deviation, adaptive_start start) {
    sample s = make(ZERO, n, 0, 0, true);
    s.start = start;
    for (size_t i = 0; i < n; i++) {
        s.values[i] = (int32_t)lrint(gaussian() * deviation);
        s.extra[i] = (uint8_t)adaptive_context_of(deviation);
    }
    return s;
}

/* The sizes of many integers, and of few integers of a known scale, are close to their entropy. */
static void factors_are_near_their_entropy(void **state) {
    (void)state;
    for (double deviation = 0.5; deviation <= 20; deviation *= 1.25) {
        for (unsigned start = 0; start < 2; start++) {
            sample s = factor(128 * 24, deviation, (adaptive_start)start);
            double ideal = ideal_bits(s.values, s.plane.count, deviation);
            assert_true(8 * (double)round_trip(&s) <= 1.02 * ideal);
            sample_free(&s);
        }
        double ideal = 0, taken = 0;
        for (unsigned repeat = 0; repeat < 20; repeat++) {
            sample s = factor(48, deviation, ADAPTIVE_SCALED);
            ideal += ideal_bits(s.values, 48, deviation);
            taken += 8 * (double)round_trip(&s);
            sample_free(&s);
        }
        assert_true(taken <= 1.02 * ideal + 20 * 8);
    }
}

static void contexts_have_scales(void **state) {
    (void)state;
    assert_int_equal(adaptive_context_of(1), 16);
    assert_int_equal(adaptive_context_of(2), 20);
    assert_int_equal(adaptive_context_of(2.1), 20);
    assert_int_equal(adaptive_context_of(2.2), 21);
    assert_int_equal(adaptive_context_of(1e9), ADAPTIVE_CONTEXTS - 1);
    assert_int_equal(adaptive_context_of(INFINITY), ADAPTIVE_CONTEXTS - 1);
    assert_int_equal(adaptive_context_of(1e-9), 0);
    assert_int_equal(adaptive_context_of(0), 0);
    assert_int_equal(adaptive_context_of(-1), 0);
    assert_int_equal(adaptive_context_of(NAN), 0);
}

/* The bytes that a coder without a model of the plane needs at least. */
static double entropy(const int32_t *values, size_t n) {
    double counts[65] = {0}, bits = 0;
    for (size_t i = 0; i < n; i++) {
        assert_true(abs(values[i]) <= 32);
        counts[values[i] + 32]++;
    }
    for (unsigned i = 0; i < 65; i++) {
        bits += counts[i] > 0 ? counts[i] * log2((double)n / counts[i]) : 0;
    }
    return bits / 8;
}

/* Nonzero with probability `density`, with geometric magnitudes. */
static int32_t rare(double density) {
    int32_t size = 0;
    if (uniform() < density) {
        for (size = 1; size < 32 && uniform() < 0.25; size++) {
        }
    }
    return next_random() % 2 ? size : -size;
}

static void even_planes_cost_nothing(void **state) {
    (void)state;
    static const double densities[] = {0.0005, 0.002, 0.01, 0.05, 0.2, 0.4};
    static const size_t columns[] = {1, 64, 768, 4096};
    for (unsigned d = 0; d < 6; d++) {
        for (unsigned c = 0; c < 4; c++) {
            sample s = make(ZERO, c % 2 ? 1 << 18 : 1 << 16, columns[c], 0, false);
            for (size_t i = 0; i < s.plane.count; i++) {
                s.values[i] = rare(densities[d]);
            }
            assert_true((double)round_trip(&s) <= 1.01 * entropy(s.values, s.plane.count) + 16);
            sample_free(&s);
        }
    }
}

/* The size of a plane of 256 x 256 divided by its entropy. */
static double relative_size(double density, double by_row, double by_column, double by_place, bool hints) {
    enum { SIDE = 256, PATCH = 16 };
    static double row[SIDE], column[SIDE], place[SIDE / PATCH][SIDE / PATCH];
    for (unsigned i = 0; i < SIDE; i++) {
        row[i] = exp(by_row * gaussian());
        column[i] = exp(by_column * gaussian());
        for (unsigned j = 0; i < SIDE / PATCH && j < SIDE / PATCH; j++) {
            place[i][j] = exp(by_place * gaussian());
        }
    }
    sample s = make(ZERO, SIDE * SIDE, SIDE, 0, hints);
    for (unsigned i = 0; i < SIDE * SIDE; i++) {
        double patch = place[i / SIDE / PATCH][i % SIDE / PATCH];
        s.extra[i] %= 4;
        double more = hints ? pow(2, s.extra[i]) : 1;
        s.values[i] = rare(fmin(density * row[i / SIDE] * column[i % SIDE] * patch * more, 0.9));
    }
    double relative = (double)round_trip(&s) / entropy(s.values, s.plane.count);
    sample_free(&s);
    return relative;
}

static void uneven_planes_gain(void **state) {
    (void)state;
    for (double density = 0.05; density < 0.3; density *= 3) {
        assert_true(relative_size(density, 0.8, 0, 0, false) < 0.97);
        assert_true(relative_size(density, 0, 0.8, 0, false) < 0.97);
        assert_true(relative_size(density, 0.8, 0.8, 0, false) < 0.93);
        assert_true(relative_size(density, 0, 0, 1.2, false) < 0.97);
        assert_true(relative_size(density / 4, 0, 0, 0, true) < 0.97);
    }
}

/* ---- damage ---- */

static sample damaged(unsigned which) {
    sample s = make(which % 2 ? SMALL : SPARSE, 400, which / 4 ? 20 : 0, 0, which & 2);
    s.start = (adaptive_start)(which / 2 % 2);
    return s;
}

static void damage_does_no_harm(void **state) {
    (void)state;
    for (unsigned which = 0; which < 8; which++) {
        sample s = damaged(which);
        bytes stream = {0};
        encode(&stream, &s);
        size_t refused = 0;
        int32_t back[400];
        for (size_t bit = 0; bit < 8 * stream.size; bit++) {
            stream.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            refused += decode(back, &s, stream.data, stream.size) != CKD_OK;
            /* A plane's mode may make no difference; everything else does. */
            assert_true((which >= 4 && bit < 8) || memcmp(back, s.values, sizeof(back)) != 0);
            stream.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        assert_true(refused > 6 * stream.size); /* nearly all damage shows at the end of a stream */
        bytes_free(&stream);
        sample_free(&s);
    }
}

static void sizes_must_be_right(void **state) {
    (void)state;
    for (unsigned which = 0; which < 8; which++) {
        sample s = damaged(which);
        bytes stream = {0};
        encode(&stream, &s);
        size_t size = stream.size;
        int32_t back[400];
        for (size_t less = 0; less < size; less++) { /* may be a valid stream of other integers */
            assert_true(decode(back, &s, stream.data, less) != CKD_OK ||
                        memcmp(back, s.values, sizeof(back)) != 0);
        }
        assert_int_equal(decode(back, &s, stream.data, 0), CKD_E_CORRUPT);
        for (unsigned more = 0; more < 8; more++) {
            bytes_put_u8(&stream, 0);
            assert_int_equal(decode(back, &s, stream.data, stream.size), CKD_E_CORRUPT);
        }
        s.plane.count = 0;
        assert_int_equal(decode(back, &s, stream.data, size), CKD_E_CORRUPT);
        assert_int_equal(decode(back, &s, stream.data, 0), CKD_OK);
        s.plane.count = 400;
        bytes_free(&stream);
        sample_free(&s);
    }
}

static void noise_does_no_harm(void **state) {
    (void)state;
    for (unsigned i = 0; i < 3000; i++) {
        size_t size = next_random() % 64;
        uint8_t *noise = any_bytes(size);
        sample s = make(ZERO, next_random() % 500, next_random() % 3 ? 1 + next_random() % 40 : 0, 0, i & 1);
        int32_t back[500];
        decode(back, &s, noise, size);
        sample_free(&s);
        free(noise);
    }
}

/* The first two bits of a stream are its kind. */
static void kinds_are_distinguished(void **state) {
    (void)state;
    int32_t back[10];
    sample values = make(SMALL, 10, 0, 0, false), plane = make(SMALL, 10, 5, 0, false);
    const uint8_t unknown[] = {0xd0, 0x11, 0x22, 0x33};
    assert_int_equal(decode(back, &values, unknown, 4), CKD_E_UNSUPPORTED);
    assert_int_equal(decode(back, &plane, unknown, 4), CKD_E_UNSUPPORTED);
    bytes stream = {0};
    encode(&stream, &values);
    assert_int_equal(decode(back, &plane, stream.data, stream.size), CKD_E_UNSUPPORTED);
    bytes_clear(&stream);
    encode(&stream, &plane);
    assert_int_equal(decode(back, &values, stream.data, stream.size), CKD_E_UNSUPPORTED);
    const uint8_t density[] = {0xbf, 0xf8, 0, 0}; /* kind 2, mode 3, density 127 */
    assert_int_equal(decode(back, &plane, density, 4), CKD_E_CORRUPT);
    bytes_free(&stream);
    sample_free(&values);
    sample_free(&plane);
}

/* A failed allocation is recorded in the buffer. */
static void failures_stick(void **state) {
    (void)state;
    sample s = make(SMALL, 500, 25, 0, false);
    bytes full = {.failed = true};
    adaptive_plane_encode(&full, &s.plane, s.values, &models);
    assert_true(full.failed && full.size == 0);
    adaptive_encode(&full, ADAPTIVE_EVEN, &(adaptive_sequence){500, NULL}, s.values, &models);
    assert_true(full.failed && full.size == 0);
    s.plane.count = SIZE_MAX / 8;
    bytes none = {0};
    adaptive_plane_encode(&none, &s.plane, s.values, &models);
    assert_true(none.failed);
    assert_int_equal(adaptive_plane_decode(s.values, &s.plane, "", 0, &models, NULL), CKD_E_INVALID);
    bytes_free(&none);
    sample_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_are_read_back),
        cmocka_unit_test(planes_are_read_back),
        cmocka_unit_test(factors_are_near_their_entropy),
        cmocka_unit_test(contexts_have_scales),
        cmocka_unit_test(even_planes_cost_nothing),
        cmocka_unit_test(uneven_planes_gain),
        cmocka_unit_test(damage_does_no_harm),
        cmocka_unit_test(sizes_must_be_right),
        cmocka_unit_test(noise_does_no_harm),
        cmocka_unit_test(kinds_are_distinguished),
        cmocka_unit_test(failures_stick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
