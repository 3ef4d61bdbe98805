/*
 * Encodes and decodes an array of integers, by the number of its coding. Raw, zstd, LZ4 and byte planes are done here.
 * coder_decode passes symbol streams on to symbols.c: symbols_decode. coder_encode refuses them, because they are
 * planned first (symbols.c: symbols_plan, symbols_encode). A new coding has a row in `codings`.
 */
#include "codec/entropy/entropy.h"

#include <lz4.h>
#include <lz4hc.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "codec/common/common.h"

struct coder {
    symbols_workspace *symbols;
    ZSTD_CCtx *zstd_out;
    ZSTD_DCtx *zstd_in;
    void *lz4;    /* LZ4_stream_t */
    void *lz4_hc; /* LZ4_streamHC_t, NULL until needed */
    uint8_t *planes;
    size_t planes_size;
};

/* Indexed by coding. Messages name only codings of arrays. */
static const struct {
    const char *name;
    bool is_array;
} codings[] = {
    [CODING_RAW] = {"raw", true},
    [CODING_ZSTD] = {"zstd", true},
    [CODING_LZ4] = {"lz4", true},
    [CODING_ZSTD_PLANES] = {"zstd on byte planes", true},
    [CODING_LZ4_PLANES] = {"lz4 on byte planes", true},
    [CODING_SYMBOLS] = {"symbols", true},
    [CODING_LATTICE] = {"?", false},
    [CODING_GRADIENT] = {"?", false},
};

#define CODINGS (sizeof(codings) / sizeof(codings[0]))

const char *coding_name(coding c) {
    return (uint32_t)c < CODINGS ? codings[c].name : "?";
}

bool coding_is_array(uint32_t c) {
    return c < CODINGS && codings[c].is_array;
}

/* ---- scratch ---- */

ckd_status coder_create(coder **out, ckd_error *err) {
    *out = NULL;
    coder *c = calloc(1, sizeof(*c));
    if (!c) {
        return err_nomem(err, sizeof(*c), "a coder");
    }
    ckd_status status = symbols_workspace_create(&c->symbols, err);
    if (status == CKD_OK) {
        c->zstd_out = ZSTD_createCCtx();
        c->zstd_in = ZSTD_createDCtx();
        c->lz4 = malloc((size_t)LZ4_sizeofState());
        if (!c->zstd_out || !c->zstd_in || !c->lz4) {
            status = err_nomem(err, (size_t)LZ4_sizeofState(), "compression contexts");
        }
    }
    if (status != CKD_OK) {
        coder_free(c);
        return status;
    }
    *out = c;
    return CKD_OK;
}

void coder_free(coder *c) {
    if (!c) {
        return;
    }
    symbols_workspace_free(c->symbols);
    ZSTD_freeCCtx(c->zstd_out);
    ZSTD_freeDCtx(c->zstd_in);
    free(c->lz4);
    free(c->lz4_hc);
    free(c->planes);
    free(c);
}

symbols_workspace *coder_symbols(coder *c) {
    return c->symbols;
}

static ckd_status planes_scratch(coder *c, size_t size, ckd_error *err) {
    if (size <= c->planes_size) {
        return CKD_OK;
    }
    uint8_t *grown = realloc(c->planes, size);
    if (!grown) {
        return err_nomem(err, size, "byte planes");
    }
    c->planes = grown;
    c->planes_size = size;
    return CKD_OK;
}

static bool on_planes(coding id) {
    return id == CODING_ZSTD_PLANES || id == CODING_LZ4_PLANES;
}

/* ---- byte planes ---- */

CPU_INLINE void split(uint8_t *restrict planes, unsigned width, const uint8_t *restrict values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (unsigned b = 0; b < width; b++) {
            planes[b * n + i] = values[i * width + b];
        }
    }
}

CPU_INLINE void join(uint8_t *restrict values, unsigned width, const uint8_t *restrict planes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (unsigned b = 0; b < width; b++) {
            values[i * width + b] = planes[b * n + i];
        }
    }
}

#define DEFINE_PLANES(name, target)                                                                     \
    target static void split_##name(uint8_t *planes, unsigned width, const uint8_t *values, size_t n) { \
        if (width == 2) {                                                                               \
            split(planes, 2, values, n);                                                                \
        } else if (width == 4) {                                                                        \
            split(planes, 4, values, n);                                                                \
        } else {                                                                                        \
            split(planes, 8, values, n);                                                                \
        }                                                                                               \
    }                                                                                                   \
    target static void join_##name(uint8_t *values, unsigned width, const uint8_t *planes, size_t n) {  \
        if (width == 2) {                                                                               \
            join(values, 2, planes, n);                                                                 \
        } else if (width == 4) {                                                                        \
            join(values, 4, planes, n);                                                                 \
        } else {                                                                                        \
            join(values, 8, planes, n);                                                                 \
        }                                                                                               \
    }
DEFINE_PLANES(avx2, CPU_AVX2)
DEFINE_PLANES(plain, CPU_PLAIN)

void planes_split(uint8_t *planes, unsigned width, const void *values, size_t n) {
    if (width == 1) {
        if (n) {
            memcpy(planes, values, n);
        }
        return;
    }
    (cpu_has_avx2() ? split_avx2 : split_plain)(planes, width, values, n);
}

void planes_join(void *values, unsigned width, const uint8_t *planes, size_t n) {
    if (width == 1) {
        if (n) {
            memcpy(values, planes, n);
        }
        return;
    }
    (cpu_has_avx2() ? join_avx2 : join_plain)(values, width, planes, n);
}

/* ---- encoding ---- */

size_t coding_bound(size_t size) {
    size_t zstd = ZSTD_compressBound(size);
    size_t lz4 = size + size / 255 + 16; /* LZ4_COMPRESSBOUND without its size limit */
    return zstd > lz4 ? zstd : lz4;
}

static ckd_status encode_raw(const void *from, size_t size, coder_result *result) {
    if (size < result->limit) {
        if (size) {
            memcpy(result->to, from, size);
        }
        result->stored = size;
    }
    return CKD_OK;
}

/* Returns how many bytes the caller provides at least. */
static size_t capacity_of(const coder_result *result, size_t size) {
    size_t bound = coding_bound(size);
    return result->limit < bound ? result->limit : bound;
}

static ckd_status encode_zstd(coder *c, int level, const void *from, size_t size, coder_result *result,
                              ckd_error *err) {
    if (level > ZSTD_maxCLevel() || level < ZSTD_minCLevel()) {
        return err_set(err, CKD_E_INVALID, "zstd has no level %d: choose %d to %d", level, ZSTD_minCLevel(),
                       ZSTD_maxCLevel());
    }
    size_t stored = ZSTD_compressCCtx(c->zstd_out, result->to, capacity_of(result, size), from, size,
                                      level ? level : ZSTD_CLEVEL_DEFAULT);
    if (!ZSTD_isError(stored)) {
        result->stored = stored < result->limit ? stored : 0;
        return CKD_OK;
    }
    if (ZSTD_getErrorCode(stored) == ZSTD_error_dstSize_tooSmall) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_NOMEM, "zstd: %s", ZSTD_getErrorName(stored));
}

static ckd_status encode_lz4(coder *c, int level, const void *from, size_t size, coder_result *result,
                             ckd_error *err) {
    if (level < 0 || level > LZ4HC_CLEVEL_MAX) {
        return err_set(err, CKD_E_INVALID, "LZ4 has no level %d: choose 0 to %d", level, LZ4HC_CLEVEL_MAX);
    }
    if (size > LZ4_MAX_INPUT_SIZE) {
        return CKD_OK; /* more than an LZ4 block can hold: no result below the limit */
    }
    size_t memory = capacity_of(result, size);
    int capacity = memory > LZ4_MAX_INPUT_SIZE ? LZ4_MAX_INPUT_SIZE : (int)memory;
    int stored;
    if (level == 0) {
        stored = LZ4_compress_fast_extState(c->lz4, from, result->to, (int)size, capacity, 1);
    } else {
        if (!c->lz4_hc && !(c->lz4_hc = malloc((size_t)LZ4_sizeofStateHC()))) {
            return err_nomem(err, (size_t)LZ4_sizeofStateHC(), "LZ4 HC");
        }
        stored = LZ4_compress_HC_extStateHC(c->lz4_hc, from, result->to, (int)size, capacity, level);
    }
    result->stored = stored > 0 && (size_t)stored < result->limit ? (size_t)stored : 0;
    return CKD_OK;
}

ckd_status coder_encode(coder *c, coding id, int level, const coder_source *from, coder_result *result,
                        ckd_error *err) {
    const void *data = from->data;
    size_t size = from->size;
    result->stored = 0;
    if (on_planes(id)) {
        if (!planes_valid(from->width, size)) {
            return err_set(err, CKD_E_INVALID, "%zu bytes cannot be divided into integers of %u bytes", size,
                           from->width);
        }
        ckd_status status = planes_scratch(c, size, err);
        if (status != CKD_OK) {
            return status;
        }
        planes_split(c->planes, from->width, data, size / from->width);
        data = c->planes;
    }
    switch (id) {
    case CODING_RAW:
        return encode_raw(data, size, result);
    case CODING_ZSTD:
    case CODING_ZSTD_PLANES:
        return encode_zstd(c, level, data, size, result, err);
    case CODING_LZ4:
    case CODING_LZ4_PLANES:
        return encode_lz4(c, level, data, size, result, err);
    case CODING_SYMBOLS:
    case CODING_LATTICE:
    case CODING_GRADIENT:
        break;
    }
    return err_set(err, CKD_E_INVALID, "coding %d (%s) is not encoded this way", (int)id, coding_name(id));
}

/* ---- decoding ---- */

static ckd_status decode_raw(void *to, size_t raw, const void *from, size_t stored, ckd_error *err) {
    if (raw != stored) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "there are %zu raw bytes, not the expected %zu", stored,
                           raw);
    }
    if (raw) {
        memcpy(to, from, raw);
    }
    return CKD_OK;
}

/* Requires exactly one frame that states `raw` bytes. */
static ckd_status decode_zstd(coder *c, void *to, size_t raw, const void *from, size_t stored,
                              ckd_error *err) {
    unsigned long long declared = ZSTD_getFrameContentSize(from, stored);
    size_t frame = ZSTD_findFrameCompressedSize(from, stored);
    if (ZSTD_isError(frame)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "zstd: %s", ZSTD_getErrorName(frame));
    }
    if (frame != stored || declared != raw) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a zstd frame does not have the expected size of %zu bytes", raw);
    }
    size_t result = ZSTD_decompressDCtx(c->zstd_in, to, raw, from, stored);
    if (ZSTD_isError(result)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "zstd: %s", ZSTD_getErrorName(result));
    }
    if (result != raw) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "zstd gives %zu bytes, not the expected %zu", result,
                           raw);
    }
    return CKD_OK;
}

static ckd_status decode_lz4(void *to, size_t raw, const void *from, size_t stored, ckd_error *err) {
    if (raw > LZ4_MAX_INPUT_SIZE || stored > INT32_MAX) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "%zu bytes are more than an LZ4 block holds", raw);
    }
    int result = LZ4_decompress_safe(from, to, (int)stored, (int)raw);
    if (result < 0) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "LZ4: error %d in a block of %zu bytes", result, stored);
    }
    if ((size_t)result != raw) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "LZ4 gives %d bytes, not the expected %zu", result, raw);
    }
    return CKD_OK;
}

ckd_status coder_decode(coder *c, coding id, const coder_target *target, const void *from, size_t stored,
                        ckd_error *err) {
    void *to = target->to;
    size_t raw = target->size;
    unsigned width = target->width;
    if (on_planes(id) || id == CODING_SYMBOLS) {
        if (!planes_valid(width, raw)) {
            return err_corrupt(err, NULL, CKD_NO_OFFSET,
                               "%zu bytes cannot be divided into integers of %u bytes", raw, width);
        }
    }
    if (on_planes(id)) {
        ckd_status status = planes_scratch(c, raw, err);
        if (status != CKD_OK) {
            return status;
        }
        to = c->planes;
    }
    ckd_status status = CKD_OK;
    switch (id) {
    case CODING_RAW:
        return decode_raw(to, raw, from, stored, err);
    case CODING_ZSTD:
    case CODING_ZSTD_PLANES:
        status = decode_zstd(c, to, raw, from, stored, err);
        break;
    case CODING_LZ4:
    case CODING_LZ4_PLANES:
        status = decode_lz4(to, raw, from, stored, err);
        break;
    case CODING_SYMBOLS:
        return symbols_decode(c->symbols, &(symbols_output){width, raw / width, to, target->context}, from,
                              stored, err);
    case CODING_LATTICE:
    case CODING_GRADIENT:
    default:
        return err_unsupported(err, NULL, CKD_NO_OFFSET,
                               "coding %d is unknown to this version: use a newer one", (int)id);
    }
    if (status == CKD_OK && on_planes(id)) {
        planes_join(target->to, width, c->planes, raw / width);
    }
    return status;
}
