/* Framed streams: the lowest bits that all integers share, and the header that records them. */
#include "base/bytes.h"
#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* ---- shared bits: signs of second moments, mantissas of bf16 values in fp32 ---- */

#define SAMPLE 64 /* enough to see that most arrays share no bits */

/* Finds the bits in which any integer differs from the first. */
CPU_INLINE uint64_t differing(unsigned width, const uint8_t *values, size_t n) {
    uint64_t first = symbols_load(values, width, 0), any = 0;
    for (size_t i = 0; i < n; i++) {
        any |= symbols_load(values, width, i) ^ first;
    }
    return any;
}

CPU_AVX2 static uint64_t differing_avx2(unsigned width, const uint8_t *values, size_t n) {
    switch (width) {
    case 1:
        return differing(1, values, n);
    case 2:
        return differing(2, values, n);
    case 4:
        return differing(4, values, n);
    default:
        return differing(8, values, n);
    }
}
CPU_PLAIN static uint64_t differing_plain(unsigned width, const uint8_t *values, size_t n) {
    return differing(width, values, n);
}

static unsigned trailing_zeros(uint64_t bits, unsigned max) {
    unsigned zeros = bits ? (unsigned)__builtin_ctzll(bits) : max;
    return zeros < max ? zeros : max;
}

void symbols_shared_bits(symbols_frame *f, unsigned width, const void *values, size_t n) {
    unsigned max = 8 * width - 1; /* one bit must remain for the symbols */
    uint64_t bits = differing_plain(width, values, n < SAMPLE ? n : SAMPLE);
    f->shift = trailing_zeros(bits, max);
    if (f->shift) {
        bits = (cpu_has_avx2() ? differing_avx2 : differing_plain)(width, values, n);
        f->shift = trailing_zeros(bits, max);
    }
    f->shared = symbols_load(values, width, 0) & ((UINT64_C(1) << f->shift) - 1);
}

#define ADD_ALL(type, load, store)                                                   \
    for (size_t i = 0; i < n; i++) {                                                 \
        store(values + i * sizeof(type),                                             \
              (type)((type)(load(values + i * sizeof(type)) << f->shift) | shared)); \
    }

CPU_INLINE void add_shared(const symbols_frame *f, unsigned width, uint8_t *values, size_t n) {
    uint64_t shared = f->shared;
    if (width == 1) {
        for (size_t i = 0; i < n; i++) {
            values[i] = (uint8_t)(values[i] << f->shift | shared);
        }
    } else if (width == 2) {
        ADD_ALL(uint16_t, load_le16, store_le16)
    } else if (width == 4) {
        ADD_ALL(uint32_t, load_le32, store_le32)
    } else {
        ADD_ALL(uint64_t, load_le64, store_le64)
    }
}

CPU_AVX2 static void add_shared_avx2(const symbols_frame *f, unsigned width, uint8_t *values, size_t n) {
    add_shared(f, width, values, n);
}
CPU_PLAIN static void add_shared_plain(const symbols_frame *f, unsigned width, uint8_t *values, size_t n) {
    add_shared(f, width, values, n);
}

void symbols_add_shared(const symbols_frame *f, unsigned width, void *values, size_t n) {
    if (f->shift) {
        (cpu_has_avx2() ? add_shared_avx2 : add_shared_plain)(f, width, values, n);
    }
}

/* ---- the header ---- */

size_t symbols_frame_write(const symbols_frame *f, size_t stream_size, uint8_t *to) {
    size_t at = 0;
    to[at++] = SYMBOLS_FRAMED;
    to[at++] = (uint8_t)f->shift;
    at = symbols_put_varint(to, at, f->shared);
    at = symbols_put_varint(to, at, f->columns);
    if (f->columns) {
        at = symbols_put_varint(to, at, f->phase);
        at = symbols_put_varint(to, at, stream_size);
    }
    return at;
}

static bool read_grid(symbols_frame *f, size_t *stream_size, reader *r, size_t n) {
    f->phase = f->rows = 0;
    *stream_size = 0;
    f->columns = (uint32_t)wire_varint_max(r, n / SYMBOLS_FRAMED_MAX);
    if (f->columns == 0) {
        return true;
    }
    f->phase = (uint32_t)wire_varint_max(r, f->columns - 1);
    f->rows = (uint32_t)((f->phase + n + f->columns - 1) / f->columns);
    *stream_size = (size_t)wire_varint_max(r, r->size);
    return f->rows + f->columns <= n / SYMBOLS_FRAMED_MAX;
}

bool symbols_frame_read(symbols_frame *f, size_t *stream_size, reader *from, unsigned width, size_t n) {
    bool begins = reader_u8(from) == SYMBOLS_FRAMED;
    f->shift = reader_u8(from);
    if (!begins || f->shift >= 8 * width) {
        return false;
    }
    f->shared = wire_varint_max(from, (UINT64_C(1) << f->shift) - 1);
    bool sensible = read_grid(f, stream_size, from, n);
    return sensible && !from->failed && *stream_size <= reader_left(from);
}
