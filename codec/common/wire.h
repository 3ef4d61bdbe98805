/*
 * Field types that base/bytes.h lacks: variable-length integers, identities, hashes. They report failures as
 * base/bytes.h does. codec/FORMAT.md, "Conventions".
 */
#ifndef CODEC_WIRE_H
#define CODEC_WIRE_H

#include "base/bytes.h"
#include "base/hash.h"
#include "include/ckptdelta.h"

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
 * Do the stored and the computed hash match? All parsers use these two functions. Hashes only detect damage; a parser
 * must be safe without them. So fuzzers link versions that always return true (tests/support/unchecked.c).
 */
bool wire_hash_matches(uint64_t stored, uint64_t computed);
bool wire_content_matches(const hash128 *stored, const hash128 *computed);

#endif
