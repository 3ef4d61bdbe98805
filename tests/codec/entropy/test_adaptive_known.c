/*
 * Decodes the streams in tests/golden/adaptive.txt, and compares the integers.
 * tests/reader/test_adaptive_reader.py does the same with the independent reader. Each line has a name; a
 * start of 0 or 1 (integers with contexts) or 2 (a plane); columns and phase; the count; the integers; as
 * many contexts or hints, or -1 for none; and the stream in hexadecimal. If a file is given as the argument,
 * this program writes such lines to it instead.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/entropy.h"

static adaptive_scratch models;

#define KNOWN "tests/golden/adaptive.txt"
#define MOST  8192

typedef struct known {
    char name[32];
    unsigned start;
    adaptive_plane plane;
    int32_t values[MOST];
    uint8_t extra[MOST];
    uint8_t stream[4 * MOST];
    size_t size;
} known;

/* ---- reading ---- */

static bool read_stream(FILE *f, known *k) {
    int c = fgetc(f);
    unsigned byte;
    for (k->size = 0; c == ' ' && k->size < sizeof(k->stream) && fscanf(f, "%2x", &byte) == 1; k->size++) {
        k->stream[k->size] = (uint8_t)byte;
        c = fgetc(f);
        ungetc(c, f);
        c = c == '\n' ? c : ' ';
    }
    return k->size > 0;
}

static bool read_known(FILE *f, known *k) {
    if (fscanf(f, "%31s %u %" SCNu64 " %" SCNu64 " %zu", k->name, &k->start, &k->plane.columns,
               &k->plane.phase, &k->plane.count) != 5) {
        return false;
    }
    assert_in_range(k->plane.count, 1, MOST);
    for (size_t i = 0; i < k->plane.count; i++) {
        assert_int_equal(fscanf(f, "%" SCNd32, &k->values[i]), 1);
    }
    int extra = 0;
    k->plane.hints = NULL;
    for (size_t i = 0; i < k->plane.count && extra >= 0; i++) {
        assert_int_equal(fscanf(f, "%d", &extra), 1);
        k->extra[i] = (uint8_t)extra;
        k->plane.hints = extra >= 0 ? k->extra : NULL;
    }
    assert_true(read_stream(f, k));
    return true;
}

static void known_streams_decode(void **state) {
    (void)state;
    static known k;
    static int32_t back[MOST];
    FILE *f = fopen(KNOWN, "r");
    assert_non_null(f);
    unsigned seen = 0;
    for (; read_known(f, &k); seen++) {
        ckd_status status = k.start == 2
                                ? adaptive_plane_decode(back, &k.plane, k.stream, k.size, &models, NULL)
                                : adaptive_decode(back, &(adaptive_sequence){k.plane.count, k.plane.hints},
                                                  k.stream, k.size, &models, NULL);
        assert_int_equal(status, CKD_OK);
        assert_memory_equal(back, k.values, k.plane.count * sizeof(*back));
        if (k.start != 2) { /* an encoder has no choices here */
            bytes again = {0};
            adaptive_encode(&again, (adaptive_start)k.start,
                            &(adaptive_sequence){k.plane.count, k.plane.hints}, k.values, &models);
            assert_int_equal(again.size, k.size);
            assert_memory_equal(again.data, k.stream, k.size);
            bytes_free(&again);
        }
    }
    assert_true(feof(f) && seen >= 20);
    fclose(f);
}

/* ---- writing ---- */

/* An integer that is zero, except one in `one_in`, which has up to `bits` bits. */
static int32_t any(unsigned one_in, unsigned bits) {
    if (next_random() % one_in) {
        return 0;
    }
    uint32_t size = (uint32_t)(next_random() % 100 ? next_random() % (1 + bits / 2)
                                                   : next_random() >> (64 - 1 - next_random() % bits));
    return (int32_t)(next_random() % 2 ? size : 0 - size);
}

static void write_known(FILE *f, const known *k) {
    bytes stream = {0};
    if (k->start == 2) {
        adaptive_plane_encode(&stream, &k->plane, k->values, &models);
    } else {
        adaptive_encode(&stream, (adaptive_start)k->start,
                        &(adaptive_sequence){k->plane.count, k->plane.hints}, k->values, &models);
    }
    fprintf(f, "%s %u %" PRIu64 " %" PRIu64 " %zu", k->name, k->start, k->plane.columns, k->plane.phase,
            k->plane.count);
    for (size_t i = 0; i < k->plane.count; i++) {
        fprintf(f, " %" PRId32, k->values[i]);
    }
    for (size_t i = 0; i < k->plane.count && k->plane.hints; i++) {
        fprintf(f, " %u", k->plane.hints[i]);
    }
    fprintf(f, "%s ", k->plane.hints ? "" : " -1");
    for (size_t i = 0; i < stream.size; i++) {
        fprintf(f, "%02x", stream.data[i]);
    }
    fprintf(f, "\n");
    bytes_free(&stream);
}

static void write_values(FILE *f, known *k) {
    for (unsigned start = 0; start < 2; start++) {
        for (unsigned bits = 2; bits <= 32; bits += 10) {
            for (unsigned contexts = 0; contexts < 2; contexts++) {
                k->start = start;
                k->plane = (adaptive_plane){bits * 10, 0, 0, contexts ? k->extra : NULL};
                for (size_t i = 0; i < k->plane.count; i++) {
                    k->values[i] = any(1 + bits % 3, bits);
                    k->extra[i] = (uint8_t)(next_random() % 64);
                }
                snprintf(k->name, sizeof(k->name), "values-%u-%u-%u", start, bits, contexts);
                write_known(f, k);
            }
        }
        k->start = start;
        k->plane = (adaptive_plane){1500, 0, 0, NULL};
        for (size_t i = 0; i < k->plane.count; i++) {
            k->values[i] = any(2, 3);
        }
        snprintf(k->name, sizeof(k->name), "values-%u-long", start);
        write_known(f, k);
    }
}

/* Writes planes. With `patch` > 1 they have square patches that are dense or nearly all zero. */
static void write_planes(FILE *f, known *k) {
    static const uint64_t columns[] = {1, 3, 17, 40, 700};
    for (unsigned patch = 1; patch < 12; patch += 2) {
        for (unsigned shape = 0; shape < 5; shape++) {
            uint64_t across = columns[shape], phase = patch % across;
            k->start = 2;
            k->plane = (adaptive_plane){600, across, phase, shape % 2 ? k->extra : NULL};
            uint64_t noise = next_random();
            for (size_t i = 0; i < k->plane.count; i++) {
                uint64_t place = (phase + i) / across / patch * 31 + (phase + i) % across / patch;
                unsigned one_in =
                    patch == 1 ? 12
                               : (noise >> place * 7 % 61 & 1 ? 2 + patch : (shape % 2 ? 12 : 3 + 2 * patch));
                k->values[i] = any(one_in, 3 + shape * 6);
                k->extra[i] = (uint8_t)(next_random() % 16);
            }
            snprintf(k->name, sizeof(k->name), "plane-%u-%" PRIu64, patch, across);
            write_known(f, k);
        }
    }
    k->plane = (adaptive_plane){8000, 64, 0, NULL};
    for (size_t i = 0; i < k->plane.count; i++) {
        k->values[i] = i % 64 % 7 ? 1 - (int32_t)(next_random() % 2 * 2) : 0;
    }
    snprintf(k->name, sizeof(k->name), "plane-long");
    write_known(f, k);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        static known k;
        FILE *f = fopen(argv[1], "w");
        if (!f) {
            return 1;
        }
        write_planes(f, &k);
        write_values(f, &k);
        return fclose(f) != 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(known_streams_decode)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
