/*
 * Bytes: little-endian fields, a growing output buffer, a bounded input cursor, and sizes that cannot overflow. Nothing
 * here trusts its input, and no struct is ever dumped as bytes.
 */
#ifndef BASE_BYTES_H
#define BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/error.h"

/* ---- sizes: false on overflow; *out is unchanged then ---- */
static inline bool size_mul(uint64_t *out, uint64_t a, uint64_t b) {
    uint64_t product; /* the builtin stores the wrapped product on overflow */
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}
static inline bool size_add(uint64_t *out, uint64_t a, uint64_t b) {
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

/* ---- little-endian scalars at any alignment ---- */
static inline uint16_t load_le16(const void *p) {
    const uint8_t *b = p;
    return (uint16_t)(b[0] | b[1] << 8);
}
static inline uint32_t load_le32(const void *p) {
    uint32_t v;
    memcpy(&v, p, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}
static inline uint64_t load_le64(const void *p) {
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}
static inline void store_le16(void *p, uint16_t v) {
    uint8_t *b = p;
    b[0] = (uint8_t)v;
    b[1] = (uint8_t)(v >> 8);
}
static inline void store_le32(void *p, uint32_t v) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    memcpy(p, &v, 4);
}
static inline void store_le64(void *p, uint64_t v) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    memcpy(p, &v, 8);
}

/*
 * A growing byte buffer. Zero-initialise it and release it with bytes_free. A failed allocation sets `failed`, which
 * sticks until bytes_free: write all fields, then check once.
 */
typedef struct bytes {
    uint8_t *data;
    size_t size, capacity;
    bool failed;
} bytes;

void bytes_free(bytes *b);
/* Appends `size` uninitialised bytes and returns them; NULL on failure. The pointer is valid until the next append. */
void *bytes_extend(bytes *b, size_t size);
/*
 * Returns `size` uninitialised bytes of a reusable buffer; its old content is lost. On failure returns NULL with NOMEM
 * in err, and the buffer stays usable. `what` names the memory in the message.
 */
void *bytes_scratch(bytes *b, uint64_t size, const char *what, ckd_error *err);
/* Empties the buffer and keeps its memory. */
static inline void bytes_clear(bytes *b) {
    b->size = 0;
}
/* Empties a buffer that may have failed, clears `failed`, and keeps the memory. */
static inline bytes *bytes_reset(bytes *b) {
    b->size = 0;
    b->failed = false;
    return b;
}
/* `data` must not lie in the buffer itself. */
void bytes_put(bytes *b, const void *data, size_t size);
void bytes_put_u8(bytes *b, uint8_t v);
void bytes_put_u16(bytes *b, uint16_t v);
void bytes_put_u32(bytes *b, uint32_t v);
void bytes_put_u64(bytes *b, uint64_t v);
/* Writes a u16 length, then the bytes without a NUL. Strings longer than 65535 bytes set `failed`. */
void bytes_put_string(bytes *b, const char *s);

/*
 * Makes room for at least `count` items in an array that grows by doubling. On NOMEM the array is unchanged. `array`
 * and `capacity` (a size_t) are variables, zero at first. `what` names the array in the message. Release it with free.
 */
#define ARRAY_GROW(array, capacity, count, what, err) \
    array_grow(&(array), &(capacity), count, sizeof(*(array)), what, err)
ckd_status array_grow(void *array, size_t *capacity, size_t count, size_t size, const char *what,
                      ckd_error *err);

/* A cursor over bytes in memory. A read past the end returns zeros and sets `failed`, which sticks. */
typedef struct reader {
    const uint8_t *data;
    size_t size, at;
    bool failed;
} reader;

static inline reader reader_of(const void *data, size_t size) {
    return (reader){data, size, 0, false};
}
static inline size_t reader_left(const reader *r) {
    return r->size - r->at;
}
/* Returns the next `size` bytes, or NULL and sets `failed`. For size 0 the result is not NULL and must not be read. */
const void *reader_take(reader *r, size_t size);
static inline uint8_t reader_u8(reader *r) {
    if (r->failed || r->at == r->size) {
        r->failed = true;
        return 0;
    }
    return r->data[r->at++];
}
uint16_t reader_u16(reader *r);
uint32_t reader_u32(reader *r);
uint64_t reader_u64(reader *r);
/*
 * Reads a string written by bytes_put_string into `out` and adds a NUL. Fails, with `out` empty, if the string needs
 * more than capacity - 1 bytes, contains a NUL, or is not valid UTF-8.
 */
void reader_string(reader *r, char *out, size_t capacity);
/* Is this valid UTF-8 (no overlong forms, no surrogates) without NUL? */
bool utf8_valid(const char *s, size_t size);

#endif
