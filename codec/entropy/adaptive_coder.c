/* The end of a range-coded number, and its carries. */
#include "codec/entropy/adaptive_coder.h"

#include <string.h>

#define WINDOW (UINT64_C(1) << 32)

#define SHARE(seen)    65536u / ((seen) + 2)
#define SHARES_4(at)   SHARE(at), SHARE((at) + 1), SHARE((at) + 2), SHARE((at) + 3)
#define SHARES_16(at)  SHARES_4(at), SHARES_4((at) + 4), SHARES_4((at) + 8), SHARES_4((at) + 12)
#define SHARES_64(at)  SHARES_16(at), SHARES_16((at) + 16), SHARES_16((at) + 32), SHARES_16((at) + 48)
#define SHARES_256(at) SHARES_64(at), SHARES_64((at) + 64), SHARES_64((at) + 128), SHARES_64((at) + 192)
const uint16_t adaptive_shares[ADAPTIVE_SHARES] = {SHARES_256(0), SHARES_256(256), SHARES_256(512),
                                                   SHARES_256(768)};

void adaptive_begin_encoding(adaptive_coder *c, bytes *to) {
    *c = (adaptive_coder){.range = UINT32_MAX, .to = to, .start = to->size};
}

/* The interval starts as [0, 2^32), so its lower bound never carries past the first byte. */
static void carry(adaptive_coder *c) {
    if (c->low >= WINDOW) {
        c->low -= WINDOW;
        size_t at = c->to->size;
        while (at > c->start && ++c->to->data[--at] == 0) {
        }
    }
}

void adaptive_shift_out(adaptive_coder *c) {
    if (!c->to->failed) {
        carry(c);
        bytes_put_u8(c->to, (uint8_t)(c->low >> 24));
        c->low = c->low << 8 & UINT32_MAX;
    }
}

/*
 * Finds the number in the interval with the most trailing zero bytes, at most four. Returns the number of these bytes.
 */
static unsigned shortest(uint64_t low, uint32_t range, uint64_t *number) {
    for (unsigned zeros = 4;; zeros--) {
        uint64_t unit = UINT64_C(1) << (8 * zeros);
        *number = (low + unit - 1) & ~(unit - 1);
        if (*number < low + range) {
            return zeros;
        }
    }
}

void adaptive_end_encoding(adaptive_coder *c) {
    if (c->to->failed) {
        return;
    }
    carry(c);
    unsigned zeros = shortest(c->low, c->range, &c->low);
    carry(c);
    for (unsigned i = 4; i > zeros; i--) {
        adaptive_shift_out(c);
    }
}

void adaptive_begin_decoding(adaptive_coder *c, const uint8_t *from, size_t size) {
    *c = (adaptive_coder){.range = UINT32_MAX, .from = from, .size = size};
    for (unsigned i = 0; i < 4; i++, c->at++) {
        c->window = c->window << 8 | (c->at < size ? from[c->at] : 0);
    }
    c->code = c->window;
}

bool adaptive_end_decoding(const adaptive_coder *c) {
    uint64_t number;
    unsigned zeros = shortest((uint32_t)(c->window - c->code), c->range, &number);
    return (uint32_t)number == c->window && c->at == c->size + zeros;
}
