#include "engine/common/common.h"

#include <math.h>
#include <string.h>

#include "base/bytes.h"

/* A float of 1 + exponent_bits + mantissa_bits bits, IEEE style. */
static double decode_small(uint32_t bits, int exponent_bits, int mantissa_bits) {
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    double value;
    if (exponent == top) {
        value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        value = ldexp(mantissa | 1u << mantissa_bits, exponent - bias - mantissa_bits);
    }
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

/* e4m3 (OCP "fn"): no infinities, only the all-ones pattern is NaN, so the top exponent holds numbers. */
static double decode_e4m3(uint8_t bits) {
    uint32_t mantissa = bits & 7u;
    int exponent = bits >> 3 & 15;
    double value = exponent == 15 && mantissa == 7 ? NAN
                   : exponent == 0                 ? ldexp(mantissa, -9)
                                                   : ldexp(mantissa | 8u, exponent - 10);
    return bits & 0x80 ? -value : value;
}

double element_to_double(ckd_dtype dtype, const void *values, uint64_t i) {
    const uint8_t *p = (const uint8_t *)values + i * ckd_dtype_size(dtype);
    switch (dtype) {
    case CKD_F64: {
        uint64_t bits = load_le64(p);
        double value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    case CKD_F32: {
        uint32_t bits = load_le32(p);
        float value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    case CKD_F16:
        return decode_small(load_le16(p), 5, 10);
    case CKD_BF16:
        return decode_small(load_le16(p), 8, 7);
    case CKD_F8_E4M3:
        return decode_e4m3(*p);
    case CKD_F8_E5M2:
        return decode_small(*p, 5, 2);
    default:
        return 0;
    }
}
