/* The interface of codec/common/ for other rooms. README.md has an overview. */
#ifndef CODEC_COMMON_COMMON_H
#define CODEC_COMMON_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "base/error.h"
#include "base/hash.h"
#include "include/ckptdelta.h"

/*
 * Compiles a loop twice: for any processor, and for x86-64 with AVX2 and BMI2. The choice is made at run time. Write
 * the loop once as an always-inline function, and call it from two functions marked CPU_PLAIN and CPU_AVX2. Internal to
 * codec/.
 */

#define CPU_INLINE static inline __attribute__((always_inline, unused))

/* GCC vectorises these loops at any build level; clang does so from -O2 on. */
#if defined(__GNUC__) && !defined(__clang__)
#define CPU_PLAIN __attribute__((optimize("O3")))
#else
#define CPU_PLAIN
#endif

#if defined(__x86_64__)
#define CPU_AVX2 CPU_PLAIN __attribute__((target("avx2,bmi,bmi2")))
static inline bool cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
/* For the few loops that gain more from AVX-512. */
#define CPU_AVX512 CPU_PLAIN __attribute__((target("avx2,bmi,bmi2,avx512f,avx512bw,avx512vl")))
static inline bool cpu_has_avx512(void) {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
/* The oldest x86-64 processors have no instruction that counts bits. */
#define CPU_POPCOUNT __attribute__((target("bmi,popcnt")))
static inline bool cpu_has_popcount(void) {
    return __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}
#else
#define CPU_POPCOUNT
static inline bool cpu_has_popcount(void) {
    return true;
}
#define CPU_AVX2   CPU_PLAIN
#define CPU_AVX512 CPU_PLAIN
static inline bool cpu_has_avx512(void) {
    return false;
}
static inline bool cpu_has_avx2(void) {
    return false;
}
#endif

/*
 * Erasure coding over pieces of equal size: Reed-Solomon in GF(2^8) with polynomial 0x11d. Row 0 is plain XOR. Other
 * rows use ISA-L, which is opened with dlopen on first use (libisal.so.2, or the file named by CKD_ISAL in the
 * environment). codec/FORMAT.md, "Parity", is normative. Thread-safe.
 */

#define ERASURE_DATA_MAX   128u /* columns */
#define ERASURE_PARITY_MAX 16u  /* rows */

/* Returns the coefficient of a column's piece in a row of parity; never 0. Every square submatrix is invertible. */
uint8_t erasure_coefficient(unsigned row, unsigned column);

/* Returns CKD_OK if rows other than row 0 can be computed; otherwise err (UNSUPPORTED) says what to install. */
ckd_status erasure_ready(ckd_error *err);

/*
 * out[r] = the sum over c of matrix[r * columns + c] * in[c]. All buffers are distinct. At most ERASURE_PARITY_MAX rows
 * and ERASURE_DATA_MAX + ERASURE_PARITY_MAX columns.
 */
typedef struct erasure_product {
    uint8_t *const *out;
    const uint8_t *const *in;
    const uint8_t *matrix;
    size_t rows, columns;
    size_t size; /* bytes of each buffer */
} erasure_product;
/* Without ISA-L every coefficient must be 0 or 1. Errors: UNSUPPORTED, NOMEM. */
ckd_status erasure_sums(const erasure_product *p, ckd_error *err);

/*
 * Makes the matrix that rebuilds the pieces of `count` lost columns (ascending) from `count` rows of parity and the
 * other columns. Its inputs are the parity of `rows`, then the pieces of `intact` columns, in the given orders. matrix
 * has room for count * (count + intact_count).
 */
void erasure_matrix(uint8_t *matrix, const unsigned *lost, const unsigned *rows, size_t count,
                    const unsigned *intact, size_t intact_count);

/*
 * Field types that base/bytes.h lacks: variable-length integers, identities, hashes. They report failures as
 * base/bytes.h does. codec/FORMAT.md, "Conventions".
 */

/*
 * Writes ULEB128: seven bits per byte, lowest first; the top bit is set on all bytes but the last. Always the shortest
 * form.
 */
void wire_put_varint(bytes *to, uint64_t v);
/* The slow path of wire_varint, for any length. */
uint64_t wire_varint_long(reader *from);
/* Fails on more than 64 bits and on forms that are not the shortest. */
static inline uint64_t wire_varint(reader *from) {
    if (!from->failed && from->at < from->size && from->data[from->at] < 0x80) {
        return from->data[from->at++];
    }
    return wire_varint_long(from);
}
/* Fails and returns 0 if the value exceeds `limit`. */
static inline uint64_t wire_varint_max(reader *from, uint64_t limit) {
    uint64_t v = wire_varint(from);
    if (v > limit) {
        from->failed = true;
        return 0;
    }
    return v;
}

void wire_put_id(bytes *to, const ckd_id *id);
ckd_id wire_id(reader *from);
bool wire_id_zero(const ckd_id *id);
void wire_put_hash(bytes *to, const hash128 *h);
hash128 wire_hash(reader *from);
/* Writes an IEEE double as its 64 bits; NaNs keep their payload. */
void wire_put_f64(bytes *to, double v);
double wire_f64(reader *from);

/*
 * Returns true if both hashes match. All parsers use these two functions. Hashes only detect damage, so a parser must
 * be safe without them. Fuzzers therefore link versions that always return true (tests/support/unchecked.c).
 */
bool wire_hash_matches(uint64_t stored, uint64_t computed);
bool wire_content_matches(const hash128 *stored, const hash128 *computed);

/*
 * One-shot zstd frames, for indexes, heads and measures. The process keeps one context of each kind (100 KiB to a few
 * MiB) for the next caller, so successive saves allocate none. Thread-safe and lock-free, so a forked child may
 * continue to use it.
 */

/* Returns the largest size of a frame for `size` bytes. */
size_t zstd_once_bound(size_t size);
/*
 * Compresses into one frame. `capacity` is at least the bound. Returns the size of the frame, or 0 if out of memory,
 * the only possible error.
 */
size_t zstd_once_pack(void *to, size_t capacity, const void *from, size_t size, int level);
/*
 * Decompresses exactly one frame, which must state `size` as its content size and take all `packed` bytes. Errors:
 * CORRUPT, NOMEM; the caller writes the message.
 */
ckd_status zstd_once_unpack(void *to, size_t size, const void *from, size_t packed);

#endif
