/*
 * The coders, one row of the table each. A state is the file DIR/STEP.xz, compressed as a whole by the command xz;
 * ExCP's by `xz -9e`, which makes it as small as possible. The library keeps a store in DIR.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench/lossy/excp.h"
#include "bench/lossy/quality.h"
#include "bench/support/support.h"

#define PERTURBATION 1e-5f /* relative */

/* ---- files through xz ---- */

static void file_path(char path[QUALITY_PATH], const char *dir, uint64_t step) {
    snprintf(path, QUALITY_PATH, "%.400s/%" PRIu64 ".xz", dir, step);
}

/* level NULL: as it is. */
static void write_xz(const char *level, const char *dir, uint64_t step, const uint8_t *data, size_t size) {
    char path[QUALITY_PATH], line[QUALITY_PATH + 32];
    file_path(path, dir, step);
    snprintf(line, sizeof(line), "%s %s >'%s'", level ? "xz -c" : "cat", level ? level : "", path);
    FILE *pipe = popen(line, "w");
    if (!pipe || fwrite(data, 1, size, pipe) != size || pclose(pipe) != 0) {
        bench_die(path, "xz failed");
    }
}

/* The decompressed file, the caller's; `stored` becomes the size of the file. */
static uint8_t *read_xz(size_t *size, uint64_t *stored, const char *dir, uint64_t step) {
    char path[QUALITY_PATH], line[QUALITY_PATH + 32];
    struct stat info;
    file_path(path, dir, step);
    snprintf(line, sizeof(line), "xz -dcf --format=xz <'%s'",
             path); /* -f: what is not compressed stays as it is */
    FILE *pipe = stat(path, &info) == 0 ? popen(line, "r") : NULL;
    uint8_t *data = NULL;
    size_t n = pipe != NULL;
    for (*size = 0; n; *size += n) {
        data = realloc(data, *size + (1u << 20));
        n = data ? fread(data + *size, 1, 1u << 20, pipe) : 0;
    }
    if (!pipe || pclose(pipe) != 0 || !data) {
        bench_die(path, "xz cannot read it");
    }
    *stored = (uint64_t)info.st_size;
    return data;
}

/* ---- plain floats: first states, and those without moments ---- */

static void plain_encode(const char *level, const char *dir, const quality_state *now, int parts) {
    excp_bytes bytes = {.data = malloc(now->parameters * sizeof(float) * (size_t)parts)};
    for (int part = 0; bytes.data && part < parts; part++) {
        for (size_t i = 0; i < now->count; i++) {
            size_t size = now->tensors[i].count * sizeof(float);
            memcpy(bytes.data + bytes.size, now->tensors[i].parts[part], size);
            bytes.size += size;
        }
    }
    if (!bytes.data) {
        bench_die(dir, "no memory");
    }
    write_xz(level, dir, now->step, bytes.data, bytes.size);
    free(bytes.data);
}

/* Parts that the file lacks become zero. */
static uint64_t plain_decode(const char *dir, quality_state *now, int parts) {
    uint64_t stored;
    size_t size, at = 0;
    uint8_t *data = read_xz(&size, &stored, dir, now->step);
    if (size != now->parameters * sizeof(float) * (size_t)parts) {
        bench_die(dir, "its file has the wrong length");
    }
    for (int part = 0; part < QUALITY_PARTS; part++) {
        for (size_t i = 0; i < now->count; i++) {
            size_t bytes = now->tensors[i].count * sizeof(float);
            if (part < parts) {
                memcpy(now->tensors[i].parts[part], data + at, bytes);
                at += bytes;
            } else {
                memset(now->tensors[i].parts[part], 0, bytes);
            }
        }
    }
    free(data);
    return stored;
}

static void weights_encode(const quality_coder *coder, const char *dir, const quality_state *now,
                           const quality_state *before) {
    (void)coder;
    plain_encode(NULL, dir, now, before ? 1 : QUALITY_PARTS);
}

static uint64_t weights_decode(const quality_coder *coder, const char *dir, quality_state *now,
                               const quality_state *before) {
    (void)coder;
    return plain_decode(dir, now, before ? 1 : QUALITY_PARTS);
}

/* The encoder's process ends afterwards, so it may change the state. */
static void perturbed_encode(const quality_coder *coder, const char *dir, const quality_state *now,
                             const quality_state *before) {
    (void)coder;
    uint64_t seed = now->step + 1;
    for (size_t i = 0; before && i < now->count; i++) {
        for (size_t k = 0; k < now->tensors[i].count; k++) {
            now->tensors[i].parts[0][k] *= 1 + PERTURBATION * bench_normal(&seed);
        }
    }
    plain_encode(NULL, dir, now, QUALITY_PARTS);
}

static uint64_t perturbed_decode(const quality_coder *coder, const char *dir, quality_state *now,
                                 const quality_state *before) {
    (void)coder;
    (void)before;
    return plain_decode(dir, now, QUALITY_PARTS);
}

/* ---- the library: it has the reconstructed state itself ---- */

static void library_path(char path[QUALITY_PATH], const char *dir) {
    snprintf(path, QUALITY_PATH, "%.400s/store", dir);
}

static void library_encode(const quality_coder *coder, const char *dir, const quality_state *now,
                           const quality_state *before) {
    char path[QUALITY_PATH];
    library_path(path, dir);
    quality_save(path, "chain", now, &coder->library, !before, NULL);
}

static uint64_t library_decode(const quality_coder *coder, const char *dir, quality_state *now,
                               const quality_state *before) {
    (void)coder;
    (void)before;
    char path[QUALITY_PATH];
    uint64_t stored;
    library_path(path, dir);
    uint64_t step = now->step;
    quality_free(now);
    *now = quality_load(&stored, path, "chain", step);
    return stored;
}

/* ---- ExCP ---- */

static float *copy_of(const float *values, size_t count) {
    float *copy = malloc((count + !count) * sizeof(*copy));
    if (!copy) {
        bench_die("ExCP", "no memory");
    }
    return memcpy(copy, values, count * sizeof(*copy));
}

/* The three arrays of a tensor before quantisation. */
static void excp_prune(float *parts[QUALITY_PARTS], const quality_tensor *now, const quality_tensor *before,
                       const quality_coder *coder) {
    for (int part = 0; part < QUALITY_PARTS; part++) {
        parts[part] = copy_of(now->parts[part], now->count);
    }
    for (size_t i = 0; i < now->count; i++) {
        parts[0][i] -= before->parts[0][i];
    }
    double threshold = excp_threshold(parts[0], parts[2], now->count, coder->alpha, coder->most);
    if (threshold < 0) {
        bench_die("ExCP", "no memory");
    }
    excp_prune_weights(parts[0], now->count, threshold);
    excp_prune_moments(parts[1], parts[2], parts[0], now->count, EXCP_BETA);
}

/*
 * Tensor by tensor, as the released program has it: residual, first and second moment. Vectors are treated as matrices
 * are.
 */
static void excp_encode(const quality_coder *coder, const char *dir, const quality_state *now,
                        const quality_state *before) {
    if (!before) {
        plain_encode("-6", dir, now, QUALITY_PARTS);
        return;
    }
    excp_bytes all = {0};
    for (size_t i = 0; i < now->count; i++) {
        float *parts[QUALITY_PARTS];
        excp_prune(parts, &now->tensors[i], &before->tensors[i], coder);
        for (int part = 0; part < QUALITY_PARTS; part++) {
            if (excp_write(&all, parts[part], now->tensors[i].count)) {
                bench_die("ExCP", "no memory");
            }
            free(parts[part]);
        }
    }
    write_xz("-9e", dir, now->step, all.data, all.size);
    free(all.data);
}

static uint64_t excp_decode(const quality_coder *coder, const char *dir, quality_state *now,
                            const quality_state *before) {
    (void)coder;
    if (!before) {
        return plain_decode(dir, now, QUALITY_PARTS);
    }
    uint64_t stored;
    excp_input in;
    uint8_t *data = read_xz(&in.size, &stored, dir, now->step);
    in.data = data;
    for (size_t i = 0; i < now->count; i++) {
        for (int part = 0; part < QUALITY_PARTS; part++) {
            if (excp_read(now->tensors[i].parts[part], now->tensors[i].count, &in)) {
                bench_die(dir, "the file of ExCP cannot be read");
            }
        }
    }
    if (in.size != 0) {
        bench_die(dir, "the file of ExCP is too long");
    }
    free(data);
    for (size_t i = 0; i < now->count; i++) {
        for (size_t k = 0; k < now->tensors[i].count; k++) {
            now->tensors[i].parts[0][k] += before->tensors[i].parts[0][k];
        }
    }
    return stored;
}

/* ---- the table ---- */

#define LIBRARY      library_encode, library_decode
#define EXCP         excp_encode, excp_decode
#define OF_EXCP(cap) .alpha = INFINITY, .most = (cap), .curve = "excp", .knob = (cap)
/* Points of a curve. */
#define STEPS(of, fidelity_, scale)                                                                      \
    {                                                                                                    \
        of "*" #scale, of ", steps times " #scale, LIBRARY, .library = {fidelity_, .step_scale = scale}, \
                                                            .curve = of, .knob = scale, .curve_only = 1  \
    }
/* Exact states but for one part, to see where the loss comes from: 0 weights, 1 first moments, 2 second moments. */
#define ONE_PART(of, fidelity_, letter, part, words)                                       \
    {                                                                                      \
        of "-" letter, of ", only " words, LIBRARY, .unsized = 1, .library = {fidelity_},  \
                                                    .lossy = 1u << (part), .named_only = 1 \
    }
/* Exact states but for weights that are not the decoded ones. */
#define MIX(of, fidelity_, name_, mix_, words)                                                       \
    {                                                                                                \
        of "-" name_, of ", only weights, " words, LIBRARY, .unsized = 1, .library = {fidelity_},    \
                                                            .mix = mix_, .lossy = 1, .named_only = 1 \
    }
#define MIXES(of, fidelity_)                                                    \
    MIX(of, fidelity_, "lag", QUALITY_LAG, "only what they lag behind"),        \
        MIX(of, fidelity_, "rest", QUALITY_REST, "only the rest of the error"), \
        MIX(of, fidelity_, "scaled", QUALITY_SCALED, "the delta scaled up until nothing lags")
#define PARTS(of, fidelity_)                                                                      \
    ONE_PART(of, fidelity_, "w", 0, "weights"), ONE_PART(of, fidelity_, "m", 1, "first moments"), \
        ONE_PART(of, fidelity_, "v", 2, "second moments")
#define MEDIANS(cap) \
    { "excp-" #cap, "ExCP, always " #cap " medians", EXCP, OF_EXCP(cap), .curve_only = 1 }

const quality_coder quality_coders[] = {
    {"exact", "the library, bit for bit", LIBRARY, .bit_exact = 1, .library = {CKD_EXACT}},
    STEPS("near", CKD_NEAR, 0.5),
    STEPS("near", CKD_NEAR, 0.7),
    {"near", "the library, near", LIBRARY, .library = {CKD_NEAR}, .curve = "near", .knob = 1},
    STEPS("near", CKD_NEAR, 1.4),
    {"near-16", "near, loads of up to 16 base loads", LIBRARY, .library = {CKD_NEAR, .max_load_cost = 16}},
    {"near-cm*0.7", "near, first moments as in coarse, steps times 0.7", LIBRARY,
     .library = {CKD_NEAR, .step_scale = 0.7, .moments = CKD_COARSE}, .named_only = 1},
    {"near-cm*0.5", "near, first moments as in coarse, steps times 0.5", LIBRARY,
     .library = {CKD_NEAR, .step_scale = 0.5, .moments = CKD_COARSE}, .named_only = 1},
    STEPS("coarse", CKD_COARSE, 0.5),
    STEPS("coarse", CKD_COARSE, 0.7),
    STEPS("coarse", CKD_COARSE, 0.85),
    {"coarse", "the library, coarse", LIBRARY, .library = {CKD_COARSE}, .curve = "coarse", .knob = 1},
    STEPS("coarse", CKD_COARSE, 1.2),
    STEPS("coarse", CKD_COARSE, 1.4),
    STEPS("coarse", CKD_COARSE, 1.7),
    STEPS("coarse", CKD_COARSE, 2),
    STEPS("coarse", CKD_COARSE, 2.8),
    {"coarse-1", "coarse, effort 1: scalar only", LIBRARY, .library = {CKD_COARSE, .effort = 1}},
    {"coarse-16", "coarse, loads of up to 16 base loads", LIBRARY,
     .library = {CKD_COARSE, .max_load_cost = 16}},
    {"excp", "ExCP with its own alpha, 5e-5", EXCP, .alpha = EXCP_ALPHA, .most = EXCP_MAX_FACTOR,
     .curve = "excp"},
    MEDIANS(1),
    MEDIANS(1.5),
    MEDIANS(2),
    {"excp-2.5", "ExCP, always 2.5 medians", EXCP, OF_EXCP(EXCP_MAX_FACTOR)},
    MEDIANS(3),
    MEDIANS(4),
    {"no-moments", "exact weights, zero moments", weights_encode, weights_decode, .unsized = 1},
    {"perturbed", "exact, weights times 1 + 1e-5 x normal: the noise of the measure", perturbed_encode,
     perturbed_decode, .unsized = 1},
    PARTS("near", CKD_NEAR),
    PARTS("coarse", CKD_COARSE),
    MIXES("near", CKD_NEAR),
    MIXES("coarse", CKD_COARSE),
};
const size_t quality_coder_count = sizeof(quality_coders) / sizeof(quality_coders[0]);
_Static_assert(sizeof(quality_coders) / sizeof(quality_coders[0]) <= QUALITY_MAX_CODERS,
               "results have no room for them");

/* ---- which of them ---- */

static int named(const quality_coder *coder, const char *names) {
    size_t length = strlen(coder->name);
    for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, coder->name, length) == 0 && (at[length] == ',' || !at[length])) {
            return 1;
        }
    }
    return 0;
}

static int is_measured(const quality_coder *coder, const quality_options *o) {
    int lossy = coder->library.fidelity > CKD_EXACT;
    switch (o->mode) {
    case QUALITY_RESUMES:
    case QUALITY_MERGE:
    case QUALITY_DRIFT:
        return lossy && (o->only ? named(coder, o->only) : coder->knob == 1);
    case QUALITY_CURVES:
        return coder->bit_exact || (o->only          ? named(coder, o->only)
                                    : coder->unsized ? !coder->named_only
                                                     : coder->curve != NULL);
    default:
        return coder->bit_exact ||
               (o->only ? named(coder, o->only) : !coder->curve_only && !coder->named_only);
    }
}

size_t quality_next(const quality_options *o, size_t from) {
    while (from < quality_coder_count && !is_measured(&quality_coders[from], o)) {
        from++;
    }
    return from;
}

quality_coder quality_with_load_cost(const quality_coder *coder, const quality_options *o) {
    quality_coder copy = *coder;
    if (o->load_cost > 0 && !(copy.library.max_load_cost > 0)) {
        copy.library.max_load_cost = o->load_cost;
    }
    return copy;
}
