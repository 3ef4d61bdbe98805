/*
 * Field types of the containers that base/bytes.h does not have: variable-length integers, identities, hashes. Writing
 * to a buffer and reading from a cursor fail the way base/bytes.h's own functions do. codec/FORMAT.md, "Conventions".
 */
#ifndef CODEC_WIRE_H
#define CODEC_WIRE_H

#include "base/bytes.h"
#include "base/hash.h"
#include "include/ckptdelta.h"

/* ULEB128: seven bits a byte, lowest first, the top bit set on all bytes but the last. Always the shortest form. */
void wire_put_varint(bytes *to, uint64_t v);
/* The same as wire_varint, of any length. */
uint64_t wire_varint_long(reader *from);
/* Fails on more than 64 bits and on a form that is not the shortest. */
static inline uint64_t wire_varint(reader *from) {
    if (!from->failed && from->at < from->size && from->data[from->at] < 0x80) {
        return from->data[from->at++];
    }
    return wire_varint_long(from);
}
/* Fails, and yields 0, above `limit`. */
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
/* An IEEE double as its 64 bits: NaNs keep their payload. */
void wire_put_f64(bytes *to, double v);
double wire_f64(reader *from);

/*
 * Does a stored checksum or content hash match? All parsers ask these two. Hashes find damage; they must not be what keeps a
 * parser safe. So fuzzers are linked with other ones, which always say yes (tests/support/unchecked.c).
 */
bool wire_hash_matches(uint64_t stored, uint64_t computed);
bool wire_content_matches(const hash128 *stored, const hash128 *computed);

#endif
