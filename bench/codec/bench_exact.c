/*
 * bench_exact: exact coding of real training states, all coders in one run.
 *
 *   bench_exact [--quick] [--width N] [--seeds N] [--repeats N] [--json FILE]
 *
 * For each seed it trains a small GPT (train_gpt), and keeps its states in bench/series/: 50 steps apart, 1 step apart,
 * and the same in a continuation at a low learning rate. Weights, exp_avg and exp_avg_sq are measured separately, as
 * fp32 and rounded to bf16:
 *
 *   zstd      zstd -3 on the file, no parent
 *   xor       XOR with the parent, byte planes, zstd -3
 *   alone     ours without parent: exponents by ANS, sign and mantissa raw
 *   delta     ours on the parent: classes of ordered differences by ANS, low bits raw
 *   ours      the smaller of both, block by block, as a save takes it (tables and headers of streams counted)
 *
 * Speeds are raw bytes per second of processor time, medians. `ours` includes samples, plans and the content hash.
 */
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zstd.h>

#include "base/hash.h"
#include "bench/support/support.h"
#include "engine/encode/internal.h"
#include "kernels/kernels.h"

enum { BLOCK = 1 << 18, MAX_TENSORS = 512, ROLES = 3, MAX_REPEATS = 9 };

typedef struct options {
    int width, seeds, repeats;
    const char *json;
} options;

/* One role of one state: all its tensors one after the other; a block never spans two. */
typedef struct state {
    uint8_t *bytes;
    size_t size, ends[MAX_TENSORS], columns[MAX_TENSORS], tensors; /* ends in elements */
} state;

typedef struct result {
    double raw, zstd, xor, alone, delta, ours;                     /* bytes */
    double xor_encode, xor_decode, ours_encode, ours_decode, copy; /* seconds */
} result;

static const char *const role_names[ROLES] = {"weight", "exp_avg", "exp_avg_sq"};

/* ---- states ---- */

static int role_of(const char *name) {
    return strncmp(name, "exp_avg_sq.", 11) == 0 ? 2 : strncmp(name, "exp_avg.", 8) == 0 ? 1 : 0;
}

/* The files have no shapes. All but one kind of matrix of the example GPT have as many columns as the model is wide. */
static size_t columns_of(const char *name, int width) {
    return (size_t)(strstr(name, "mlp.proj.weight") ? 4 * width : width);
}

static void append_file(state *s, const char *path, int width) {
    FILE *f = fopen(path, "rb");
    struct stat info;
    if (!f || fstat(fileno(f), &info) != 0 || s->tensors == MAX_TENSORS) {
        bench_die(path, "it cannot be read, or there are too many files");
    }
    s->bytes = realloc(s->bytes, s->size + (size_t)info.st_size);
    if (!s->bytes || fread(s->bytes + s->size, 1, (size_t)info.st_size, f) != (size_t)info.st_size) {
        bench_die(path, "it cannot be read, or there are too many files");
    }
    s->size += (size_t)info.st_size;
    s->columns[s->tensors] = columns_of(path, width);
    s->ends[s->tensors++] = s->size / 4;
    fclose(f);
}

static void read_state(state roles[ROLES], const char *dir, int width) {
    char pattern[4200];
    glob_t found;
    snprintf(pattern, sizeof(pattern), "%s/*.f32", dir);
    memset(roles, 0, ROLES * sizeof(*roles));
    if (glob(pattern, 0, NULL, &found) != 0) {
        bench_die(pattern, "there are no such files");
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        append_file(&roles[role_of(strrchr(found.gl_pathv[i], '/') + 1)], found.gl_pathv[i], width);
    }
    globfree(&found);
}

/* The state rounded to bf16. */
static state rounded(const state *s) {
    state out = *s;
    out.size = s->size / 2;
    out.bytes = malloc(out.size);
    if (!out.bytes || !kernels_cpu()->cast(CKD_BF16, out.bytes, CKD_F32, s->bytes, s->size / 4)) {
        bench_die("bf16", "rounding failed");
    }
    return out;
}

/* ---- the yardsticks ---- */

static void to_planes(uint8_t *planes, const uint8_t *a, const uint8_t *b, size_t n, size_t width) {
    for (size_t p = 0; p < width; p++) {
        uint8_t *out = planes + p * n;
        for (size_t i = 0; i < n; i++) {
            out[i] = a[i * width + p] ^ b[i * width + p];
        }
    }
}

static void from_planes(uint8_t *values, const uint8_t *planes, const uint8_t *parent, size_t n,
                        size_t width) {
    for (size_t p = 0; p < width; p++) {
        const uint8_t *in = planes + p * n;
        for (size_t i = 0; i < n; i++) {
            values[i * width + p] = in[i] ^ parent[i * width + p];
        }
    }
}

static void measure_yardsticks(result *r, const state *now, const state *before, size_t width, int repeats) {
    size_t bound = ZSTD_compressBound(now->size), packed = 0;
    uint8_t *to = malloc(bound), *planes = malloc(now->size), *back = malloc(now->size);
    double encode[MAX_REPEATS], decode[MAX_REPEATS], copy[MAX_REPEATS];
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_DCtx *d = ZSTD_createDCtx();
    r->zstd += (double)ZSTD_compressCCtx(c, to, bound, now->bytes, now->size, 3);
    for (int i = 0; i < repeats; i++) {
        double start = bench_cpu_seconds();
        memcpy(back, now->bytes, now->size);
        copy[i] = bench_cpu_seconds() - start;
        start = bench_cpu_seconds();
        to_planes(planes, now->bytes, before->bytes, now->size / width, width);
        packed = ZSTD_compressCCtx(c, to, bound, planes, now->size, 3);
        encode[i] = bench_cpu_seconds() - start;
        start = bench_cpu_seconds();
        ZSTD_decompressDCtx(d, planes, now->size, to, packed);
        from_planes(back, planes, before->bytes, now->size / width, width);
        decode[i] = bench_cpu_seconds() - start;
        if (memcmp(back, now->bytes, now->size) != 0) {
            bench_die("xor", "the decoded bytes differ");
        }
    }
    r->xor += (double)packed;
    r->xor_encode += bench_median(encode, repeats);
    r->xor_decode += bench_median(decode, repeats);
    r->copy += bench_median(copy, repeats);
    ZSTD_freeCCtx(c);
    ZSTD_freeDCtx(d);
    free(to);
    free(planes);
    free(back);
}

/* ---- ours ---- */

typedef struct coded {
    size_t offset, size, first, count;
    bool delta;
} coded;

typedef struct coding_job {
    ckd_dtype dtype;
    size_t width;
    symbols_workspace *work;
    block_plan plan;
    uint8_t *residual, *context, *stream;
    coded *blocks;
    size_t *expected; /* bytes of each block on its own in the parent; a save finds them in its record */
    size_t block_count;
    double alone, delta;
} coding_job;

static void encode_block(coding_job *j, const state *now, const state *before, size_t first, size_t count,
                         const symbols_grid *grid, size_t *at) {
    const uint8_t *values = now->bytes + first * j->width, *parent = before->bytes + first * j->width;
    size_t raw = count * j->width;
    volatile uint8_t keep = content_hash(values, raw).bytes[0];
    (void)keep;
    block_plan *p = &j->plan;
    plan_input in = {j->dtype, values, count, *grid};
    if (block_plan_begin(p, &in, true, j->expected[j->block_count], NULL) != CKD_OK ||
        block_plan_delta(p, parent, NULL) != CKD_OK) {
        bench_die("ours", "a block cannot be planned");
    }
    bool delta = p->delta_planned && p->delta < p->standalone;
    if (!delta && block_plan_as_standalone(p, NULL) != CKD_OK) {
        bench_die("ours", "a block cannot be planned");
    }
    coded *b = &j->blocks[j->block_count++];
    *b = (coded){*at, 0, first, count, delta};
    if ((delta ? p->delta : p->standalone) < raw) {
        b->size = block_plan_encode(p, delta, j->stream + *at, raw + 64);
    } else {
        b->size = raw; /* raw: decode_all knows it by its size */
        memcpy(j->stream + *at, values, raw);
    }
    *at += b->size;
}

typedef void (*block_coding_fn)(coding_job *, const state *now, const state *before, size_t first,
                                size_t count, const symbols_grid *grid, size_t *at);

/* Returns the bytes written. */
static size_t each_block(coding_job *j, const state *now, const state *before, block_coding_fn step) {
    size_t at = 0, first = 0;
    j->block_count = 0;
    for (size_t t = 0; t < now->tensors; t++) {
        size_t begin = first, count;
        for (; first < now->ends[t]; first += count) {
            symbols_grid grid = {now->columns[t], (first - begin) % now->columns[t]};
            count = now->ends[t] - first < BLOCK ? now->ends[t] - first : BLOCK;
            step(j, now, before, first, count, &grid, &at);
        }
    }
    return at;
}

/* Not timed. `now` is the parent. */
static void expect_block(coding_job *j, const state *now, const state *before, size_t first, size_t count,
                         const symbols_grid *grid, size_t *at) {
    (void)before;
    (void)at;
    const uint8_t *values = now->bytes + first * j->width;
    plan_input in = {j->dtype, values, count, *grid};
    if (block_plan_begin(&j->plan, &in, false, 0, NULL) != CKD_OK) {
        bench_die("ours", "a block cannot be planned");
    }
    j->expected[j->block_count++] = j->plan.standalone;
}

/* Not timed. Measures both ways in full; encode_block estimates from a sample. */
static void measure_block(coding_job *j, const state *now, const state *before, size_t first, size_t count,
                          const symbols_grid *grid, size_t *at) {
    (void)at;
    const kernels *k = kernels_cpu();
    const uint8_t *values = now->bytes + first * j->width, *parent = before->bytes + first * j->width;
    size_t raw = count * j->width, delta;
    plan_input in = {j->dtype, values, count, *grid};
    if (block_plan_begin(&j->plan, &in, false, 0, NULL) != CKD_OK) {
        bench_die("ours", "a block cannot be planned");
    }
    k->ordered_residual(j->dtype, j->residual, values, parent, count);
    k->magnitude_context(j->dtype, j->context, parent, count);
    delta = symbols_plan(j->work, 1, SYMBOLS_CLASS,
                         &(symbols_input){(unsigned)j->width, count, j->residual, j->context}, NULL);
    j->alone += (double)(j->plan.standalone < raw ? j->plan.standalone : raw);
    j->delta += (double)(delta < raw ? delta : raw);
}

static void decode_all(coding_job *j, const state *before, uint8_t *back) {
    const kernels *k = kernels_cpu();
    for (size_t i = 0; i < j->block_count; i++) {
        const coded *b = &j->blocks[i];
        uint8_t *to = back + b->first * j->width;
        const uint8_t *parent = before->bytes + b->first * j->width;
        size_t raw = b->count * j->width;
        if (b->size == raw) {
            memcpy(to, j->stream + b->offset, raw);
        } else if (b->delta) {
            k->magnitude_context(j->dtype, j->context, parent, b->count);
            if (symbols_decode(j->work,
                               &(symbols_output){(unsigned)j->width, b->count, j->residual, j->context},
                               j->stream + b->offset, b->size, NULL) != CKD_OK) {
                bench_die("ours", "a block cannot be decoded");
            }
            k->ordered_apply(j->dtype, to, parent, j->residual, b->count);
        } else {
            if (symbols_decode(j->work, &(symbols_output){(unsigned)j->width, b->count, to, NULL},
                               j->stream + b->offset, b->size, NULL) != CKD_OK) {
                bench_die("ours", "a block cannot be decoded");
            }
            k->unrotate_sign(j->dtype, to, to, b->count);
        }
        volatile uint8_t keep = content_hash(to, raw).bytes[0];
        (void)keep;
    }
}

static void measure_ours(result *r, const state *now, const state *before, ckd_dtype dtype, size_t width,
                         int repeats) {
    coding_job j = {.dtype = dtype, .width = width};
    double encode[MAX_REPEATS], decode[MAX_REPEATS];
    size_t size = 0, blocks = now->size / width / BLOCK + now->tensors + 1;
    uint8_t *back = malloc(now->size);
    j.residual = malloc(BLOCK * width);
    j.context = malloc(BLOCK);
    j.stream = malloc(now->size + blocks * 128);
    j.blocks = calloc(blocks, sizeof(*j.blocks));
    j.expected = calloc(blocks, sizeof(*j.expected));
    if (!back || !j.residual || !j.context || !j.stream || !j.blocks || !j.expected ||
        symbols_workspace_create(&j.work, NULL) != CKD_OK) {
        bench_die("memory", "there is not enough of it");
    }
    block_plan_init(&j.plan, kernels_cpu(), j.work);
    each_block(&j, before, before, expect_block);
    for (int i = 0; i < repeats; i++) {
        double start = bench_cpu_seconds();
        size = each_block(&j, now, before, encode_block);
        encode[i] = bench_cpu_seconds() - start;
        start = bench_cpu_seconds();
        decode_all(&j, before, back);
        decode[i] = bench_cpu_seconds() - start;
        if (memcmp(back, now->bytes, now->size) != 0) {
            bench_die("ours", "the decoded bytes differ");
        }
    }
    each_block(&j, now, before, measure_block);
    r->alone += j.alone;
    r->delta += j.delta;
    r->ours += (double)size;
    r->ours_encode += bench_median(encode, repeats);
    r->ours_decode += bench_median(decode, repeats);
    block_plan_free(&j.plan);
    symbols_workspace_free(j.work);
    free(j.residual);
    free(j.context);
    free(j.stream);
    free(j.blocks);
    free(j.expected);
    free(back);
}

/* ---- tables ---- */

static void measure_pair(result *r, const state *now, const state *before, ckd_dtype dtype, int repeats) {
    size_t width = dtype == CKD_F32 ? 4 : 2;
    r->raw += (double)now->size;
    measure_yardsticks(r, now, before, width, repeats);
    measure_ours(r, now, before, dtype, width, repeats);
}

static void print_row(FILE *json, const char *series, const char *role, const char *dtype, const result *r,
                      int last) {
    double gb = r->raw / 1e9;
    printf("%-14s %-10s %-4s  %6.3f %6.3f %6.3f %6.3f %6.3f  %7.3f   %6.2f %6.2f   %6.2f %6.2f\n", series,
           role, dtype, r->raw / r->zstd, r->raw / r->xor, r->raw / r->alone, r->raw / r->delta,
           r->raw / r->ours, r->ours / r->xor, gb / r->xor_encode, gb / r->ours_encode, gb / r->xor_decode,
           gb / r->ours_decode);
    fprintf(
        json,
        "    {\"series\": \"%s\", \"role\": \"%s\", \"dtype\": \"%s\", \"raw_bytes\": %.0f, \"zstd\": %.4f, "
        "\"xor_planes_zstd\": %.4f, \"standalone\": %.4f, \"delta\": %.4f, \"ours\": %.4f, \"size_against_xor\": %.4f, "
        "\"encode_GBps\": {\"xor_planes_zstd\": %.4f, \"ours\": %.4f}, \"decode_GBps\": {\"xor_planes_zstd\": %.4f, "
        "\"ours\": %.4f}, \"memcpy_GBps\": %.3f}%s\n",
        series, role, dtype, r->raw, r->raw / r->zstd, r->raw / r->xor, r->raw / r->alone, r->raw / r->delta,
        r->raw / r->ours, r->ours / r->xor, gb / r->xor_encode, gb / r->ours_encode, gb / r->xor_decode,
        gb / r->ours_decode, gb / r->copy, last ? "" : ",");
}

/* Pairs of steps: parent and child. */
static const struct {
    const char *name, *parent, *child;
} series[] = {{"50 apart", "pretrain/450", "pretrain/500"},
              {"1 apart", "pretrain/500", "pretrain/501"},
              {"tuning 50", "finetune/551", "finetune/601"},
              {"tuning 1", "finetune/601", "finetune/602"}};
#define SERIES ((int)(sizeof(series) / sizeof(series[0])))

static void make_series(char *dir, size_t size, int width, int seed) {
    snprintf(dir, size, "bench/series/exact-w%d-s%d", width, seed);
    char store[4200], pretrain[4200], finetune[4200], wide[16], seeds[16], marker[4200];
    snprintf(marker, sizeof(marker), "%s/done", dir);
    if (bench_file_exists(marker)) {
        return;
    }
    snprintf(store, sizeof(store), "%s/store", dir);
    snprintf(pretrain, sizeof(pretrain), "%s/pretrain", dir);
    snprintf(finetune, sizeof(finetune), "%s/finetune", dir);
    snprintf(wide, sizeof(wide), "%d", width);
    snprintf(seeds, sizeof(seeds), "%d", seed);
    bench_remove_tree(dir);
    mkdir("bench/series", 0777);
    mkdir(dir, 0777);
    bench_run_trainer((const char *[]){"--width", wide, "--seed", seeds, "--store", store, "--run",
                                       "pretrain", "--steps", "501", "--schedule", "constant", "--dump",
                                       pretrain, "--dump-steps", "450,500,501", NULL});
    bench_run_trainer((const char *[]){
        "--width",      wide,       "--seed",  seeds,    "--store",      store,         "--run", "finetune",
        "--resume-run", "pretrain", "--steps", "602",    "--schedule",   "constant",    "--lr",  "1e-5",
        "--warmup",     "1",        "--dump",  finetune, "--dump-steps", "551,601,602", NULL});
    bench_close_output(bench_open_output(marker), marker);
}

static void measure_series(const options *o, int which, FILE *json) {
    result fp32[ROLES] = {0}, bf16[ROLES] = {0};
    for (int seed = 1; seed <= o->seeds; seed++) {
        char dir[4096], before_dir[4200], now_dir[4200];
        state now[ROLES], before[ROLES];
        make_series(dir, sizeof(dir), o->width, seed);
        snprintf(before_dir, sizeof(before_dir), "%s/%s", dir, series[which].parent);
        snprintf(now_dir, sizeof(now_dir), "%s/%s", dir, series[which].child);
        read_state(before, before_dir, o->width);
        read_state(now, now_dir, o->width);
        for (int role = 0; role < ROLES; role++) {
            measure_pair(&fp32[role], &now[role], &before[role], CKD_F32, o->repeats);
            state half = rounded(&now[role]), half_before = rounded(&before[role]);
            measure_pair(&bf16[role], &half, &half_before, CKD_BF16, o->repeats);
            free(half.bytes);
            free(half_before.bytes);
            free(now[role].bytes);
            free(before[role].bytes);
        }
    }
    for (int role = 0; role < ROLES; role++) {
        print_row(json, series[which].name, role_names[role], "fp32", &fp32[role], 0);
        print_row(json, series[which].name, role_names[role], "bf16", &bf16[role],
                  which == SERIES - 1 && role == ROLES - 1);
    }
}

int main(int argc, char **argv) {
    options o = {.width = 128};
    int quick = 0;
    const bench_option known[] = {{"--quick", .flag = &quick},
                                  {"--width", .number = &o.width, .least = 1, .most = 4096},
                                  {"--seeds", .number = &o.seeds, .least = 1, .most = 100},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = MAX_REPEATS},
                                  {"--json", .text = &o.json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    o.seeds = o.seeds ? o.seeds : quick ? 1 : 3;
    o.repeats = o.repeats ? o.repeats : quick ? 3 : 7;
    char name[64];
    snprintf(name, sizeof(name), "bench/results/bench_exact-w%d.json", o.width);
    o.json = o.json ? o.json : name;
    FILE *json = bench_open_output(o.json);
    fprintf(
        json,
        "{\n  \"benchmark\": \"exact\",\n  \"machine\": \"%s\",\n  \"width\": %d, \"seeds\": %d, \"repeats\": %d,\n  \"rows\": [\n",
        bench_machine(), o.width, o.seeds, o.repeats);
    printf("ratios, and GB/s per core of raw bytes (encode, decode); %d seeds, %s\n", o.seeds,
           bench_machine());
    printf("%-14s %-10s %-4s  %6s %6s %6s %6s %6s  %7s   %6s %6s   %6s %6s\n", "series", "role", "type",
           "zstd", "xor", "alone", "delta", "ours", "of xor", "xor E", "ours E", "xor D", "ours D");
    for (int which = 0; which < SERIES; which++) {
        measure_series(&o, which, json);
    }
    fprintf(json, "  ]\n}\n");
    bench_close_output(json, o.json);
    return 0;
}
