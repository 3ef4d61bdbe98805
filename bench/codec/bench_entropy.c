/*
 * bench_entropy: entropy coding of small quantised integers, mostly zero, as lossy checkpoints consist of. All coders
 * run on the same bytes in one run.
 *
 *   bench_entropy [BLOCK_KI] [REPEATS]        blocks of 256 Ki integers, 9 repeats
 *
 * The integers of one byte are independent, of three shapes and several entropies:
 *
 *   symbols    codec/entropy/entropy.h in CLASS, headers and tables counted
 *   plane      its planes, as 512 columns: slower, and made for integers that are not independent
 *   zstd, lz4  zstd -1 and LZ4
 *
 * Then come factors: Gaussian integers of a known scale in 24 columns of 128, coded in the contexts of a scale.
 *
 * `over` is the size beyond the entropy of order 0 (for factors: of the distribution). Speeds are GB/s of the fp32
 * values that the integers stand for, four bytes each, by processor time. They are medians of runs that take turns. The
 * last columns are decoding times relative to copying these fp32 values, and to `symbols`.
 */
#include <lz4.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "bench/support/support.h"
#include "bench/support/rates.h"
#include "codec/entropy/entropy.h"

static adaptive_scratch models;

enum { MAX_BLOCK = 1 << 18, MAX_REPEATS = 99, COLUMNS = 512, FACTORS = 128 * 24 };

typedef enum coder_kind { SYMBOLS, PLANE, ZSTD, LZ4, CODERS } coder_kind;
static const char *const coder_names[CODERS] = {"symbols", "plane", "zstd -1", "lz4"};
static const char *const shape_names[RATES_SHAPES] = {"geometric", "gaussian", "dead zone"};

static struct {
    size_t n, size;
    int8_t values[MAX_BLOCK], back[MAX_BLOCK];
    int32_t wide[MAX_BLOCK], wide_back[MAX_BLOCK];
    float copy[2][MAX_BLOCK];
    uint8_t stream[2 * MAX_BLOCK];
    uint8_t contexts[FACTORS];
    bytes appended;
    symbols_workspace *symbols;
    ZSTD_CCtx *zstd_out;
    ZSTD_DCtx *zstd_in;
} b;

static void require(int holds, const char *what) {
    if (!holds) {
        bench_die("failed", what);
    }
}

/* ---- coding ---- */

static adaptive_plane plane(void) {
    return (adaptive_plane){b.n, COLUMNS, 0, NULL};
}

static void encode(coder_kind c) {
    adaptive_plane p = plane();
    switch (c) {
    case SYMBOLS:
        symbols_plan(b.symbols, 0, SYMBOLS_CLASS, &(symbols_input){1, b.n, b.values, NULL}, NULL);
        b.size = symbols_encode(b.symbols, 0, b.values, NULL, b.stream, sizeof(b.stream));
        break;
    case PLANE:
        bytes_clear(&b.appended);
        adaptive_plane_encode(&b.appended, &p, b.wide, &models);
        b.size = b.appended.size;
        break;
    case ZSTD:
        b.size = ZSTD_compressCCtx(b.zstd_out, b.stream, sizeof(b.stream), b.values, b.n, 1);
        break;
    default:
        b.size = (size_t)LZ4_compress_default((const char *)b.values, (char *)b.stream, (int)b.n,
                                              (int)sizeof(b.stream));
    }
}

static void decode(coder_kind c) {
    adaptive_plane p = plane();
    switch (c) {
    case SYMBOLS:
        require(symbols_decode(b.symbols, &(symbols_output){1, b.n, b.back, NULL}, b.stream, b.size, NULL) ==
                    CKD_OK,
                "symbols");
        break;
    case PLANE:
        require(adaptive_plane_decode(b.wide_back, &p, b.appended.data, b.size, &models, NULL) == CKD_OK,
                "plane");
        break;
    case ZSTD:
        require(ZSTD_decompressDCtx(b.zstd_in, b.back, b.n, b.stream, b.size) == b.n, "zstd");
        break;
    default:
        require(LZ4_decompress_safe((char *)b.stream, (char *)b.back, (int)b.size, (int)b.n) == (int)b.n,
                "lz4");
    }
}

static void check(coder_kind c) {
    require(c == PLANE ? memcmp(b.wide_back, b.wide, b.n * sizeof(b.wide[0])) == 0
                       : memcmp(b.back, b.values, b.n) == 0,
            "the decoded integers differ");
}

/* ---- times ---- */

typedef struct timing {
    double encode[MAX_REPEATS], decode[MAX_REPEATS];
    size_t size;
} timing;

static void measure(timing *t, coder_kind c, int repeat) {
    double start = bench_cpu_seconds();
    encode(c);
    t->encode[repeat] = bench_cpu_seconds() - start;
    start = bench_cpu_seconds();
    decode(c);
    t->decode[repeat] = bench_cpu_seconds() - start;
    t->size = b.size;
    check(c);
}

static double copy_seconds(void) {
    double start = bench_cpu_seconds();
    memcpy(b.copy[1], b.copy[0], b.n * sizeof(float));
    __asm__ volatile("" : : "r"(b.copy[1]) : "memory");
    return bench_cpu_seconds() - start;
}

static void print_row(timing *t, const char *name, int repeats, double bits, double copy, double symbols) {
    double raw = (double)b.n * sizeof(float) / 1e9, decoding = bench_median(t->decode, repeats);
    printf("| %-9s | %6.3f | %+6.1f %% | %6.2f | %6.2f | %6.1f | %5.2f |\n", name,
           8 * (double)t->size / (double)b.n, 100 * (8 * (double)t->size / bits - 1),
           raw / bench_median(t->encode, repeats), raw / decoding, decoding / copy, decoding / symbols);
}

static void measure_rate(rates_shape shape, double rate, int repeats) {
    static timing times[CODERS];
    double copies[MAX_REPEATS];
    rates_draw(b.values, b.n, shape, rates_scale(shape, rate));
    for (size_t i = 0; i < b.n; i++) {
        b.wide[i] = b.values[i];
    }
    for (int r = 0; r < repeats; r++) {
        for (coder_kind c = 0; c < CODERS; c++) {
            measure(&times[c], c, r);
        }
        copies[r] = copy_seconds();
    }
    double entropy = rates_entropy(b.values, b.n), copy = bench_median(copies, repeats);
    double symbols = bench_median(times[SYMBOLS].decode, repeats);
    printf("\n%s, entropy %.3f bits\n\n", shape_names[shape], entropy);
    printf(
        "| coder     |   bits |     over | enc GB/s | dec GB/s | / copy | / symbols |\n|---|---|---|---|---|---|---|\n");
    for (coder_kind c = 0; c < CODERS; c++) {
        print_row(&times[c], coder_names[c], repeats, entropy * (double)b.n, copy, symbols);
    }
}

/* ---- factors ---- */

static double gaussian_bits(double deviation) {
    double bits = 0, unit = deviation * sqrt(2);
    for (size_t i = 0; i < FACTORS; i++) {
        double at = fabs((double)b.wide[i]);
        bits -= log2(0.5 * erfc((at - 0.5) / unit) - 0.5 * erfc((at + 0.5) / unit));
    }
    return bits;
}

static void draw_factors(double deviation) {
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < FACTORS; i++) {
        b.wide[i] = (int32_t)rint(deviation * rates_gaussian(&state));
        b.contexts[i] = (uint8_t)adaptive_context_of(deviation);
    }
}

static void measure_factors(int repeats) {
    printf("\nfactors: %d Gaussian integers of a known scale\n\n", FACTORS);
    printf("| deviation | bits | over | encode ns | decode ns |\n|---|---|---|---|---|\n");
    for (double deviation = 0.5; deviation < 20; deviation *= 2) {
        timing t;
        draw_factors(deviation);
        for (int r = 0; r < repeats; r++) {
            bytes_clear(&b.appended);
            double start = bench_cpu_seconds();
            adaptive_encode(&b.appended, ADAPTIVE_SCALED, &(adaptive_sequence){FACTORS, b.contexts}, b.wide,
                            &models);
            t.encode[r] = bench_cpu_seconds() - start;
            start = bench_cpu_seconds();
            require(adaptive_decode(b.wide_back, &(adaptive_sequence){FACTORS, b.contexts}, b.appended.data,
                                    b.appended.size, &models, NULL) == CKD_OK,
                    "factors");
            t.decode[r] = bench_cpu_seconds() - start;
            require(memcmp(b.wide, b.wide_back, FACTORS * sizeof(b.wide[0])) == 0, "factors differ");
        }
        double bits = 8 * (double)b.appended.size;
        printf("| %.1f | %.3f | %+.2f %% | %.0f | %.0f |\n", deviation, bits / FACTORS,
               100 * (bits / gaussian_bits(deviation) - 1), 1e9 * bench_median(t.encode, repeats) / FACTORS,
               1e9 * bench_median(t.decode, repeats) / FACTORS);
    }
}

int main(int argc, char **argv) {
    static const double rates[] = {0.05, 0.1, 0.2, 0.5, 1, 2, 3};
    b.n = (size_t)(argc > 1 ? atoi(argv[1]) : 256) << 10;
    int repeats = argc > 2 ? atoi(argv[2]) : 9;
    require(b.n >= COLUMNS && b.n <= MAX_BLOCK && repeats >= 1 && repeats <= MAX_REPEATS,
            "usage: bench_entropy [BLOCK_KI 1..256] [REPEATS 1..99]");
    b.zstd_out = ZSTD_createCCtx();
    b.zstd_in = ZSTD_createDCtx();
    require(symbols_workspace_create(&b.symbols, NULL) == CKD_OK && b.zstd_out && b.zstd_in, "out of memory");
    printf("%s; blocks of %zu Ki\n", bench_machine(), b.n >> 10);
    for (rates_shape shape = 0; shape < RATES_SHAPES; shape++) {
        for (unsigned i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
            measure_rate(shape, rates[i], repeats);
        }
    }
    measure_factors(repeats);
    symbols_workspace_free(b.symbols);
    ZSTD_freeCCtx(b.zstd_out);
    ZSTD_freeDCtx(b.zstd_in);
    bytes_free(&b.appended);
    return 0;
}
