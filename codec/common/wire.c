/*
 * Writes and reads the field types that all formats share. Every parser uses these functions, so each check is in one
 * place.
 */
#include "codec/common/common.h"

void wire_put_varint(bytes *to, uint64_t v) {
    while (v >= 0x80) {
        bytes_put_u8(to, (uint8_t)(v | 0x80));
        v >>= 7;
    }
    bytes_put_u8(to, (uint8_t)v);
}

uint64_t wire_varint_long(reader *from) {
    uint64_t v = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
        uint8_t byte = reader_u8(from);
        bool overlong = byte == 0 && shift > 0;
        bool too_large = shift == 63 && byte > 1;
        if (from->failed || overlong || too_large) {
            break;
        }
        v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return v;
        }
    }
    from->failed = true;
    return 0;
}

void wire_put_id(bytes *to, const ckd_id *id) {
    bytes_put(to, id->bytes, sizeof(id->bytes));
}

ckd_id wire_id(reader *from) {
    ckd_id id = {{0}};
    const void *p = reader_take(from, sizeof(id.bytes));
    if (p) {
        memcpy(id.bytes, p, sizeof(id.bytes));
    }
    return id;
}

bool wire_id_zero(const ckd_id *id) {
    static const ckd_id zero;
    return memcmp(id, &zero, sizeof(zero)) == 0;
}

void wire_put_hash(bytes *to, const hash128 *h) {
    bytes_put(to, h->bytes, sizeof(h->bytes));
}

hash128 wire_hash(reader *from) {
    hash128 h = {{0}};
    const void *p = reader_take(from, sizeof(h.bytes));
    if (p) {
        memcpy(h.bytes, p, sizeof(h.bytes));
    }
    return h;
}

void wire_put_f64(bytes *to, double v) {
    uint64_t bits;
    memcpy(&bits, &v, sizeof(bits));
    bytes_put_u64(to, bits);
}

double wire_f64(reader *from) {
    uint64_t bits = reader_u64(from);
    double v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}
