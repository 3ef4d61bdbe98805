/*
 * Sums over runs of a lossy tile, for encoders; part of kernels/cpu_loops.h, which includes it. In fixed lanes, so that every
 * instruction set gives the same bits.
 */
#define HALF (FEW / 2)
typedef float half_floats __attribute__((vector_size(4 * HALF)));
typedef double half_doubles __attribute__((vector_size(8 * HALF)));

#define SUMS_INLINE          CPU_TARGET static inline __attribute__((always_inline))
#define AS_FLOATS(mask)      ((few_floats)(mask))
#define AS_INTEGERS(floats)  ((few_integers)(floats))
#define WITHIN(floats, most) ((AS_INTEGERS(floats) & INT32_MAX) <= (most)) /* by their bits */
#define CHOOSE(mask, a, b)   AS_FLOATS((AS_INTEGERS(a) & (mask)) | (AS_INTEGERS(b) & ~(mask)))

typedef struct lanes {
    half_doubles now[2], moved[2], weighted[2];
    few_floats largest, least, farthest;
    few_integers finite, compared, bits, lowest;
} lanes;

SUMS_INLINE void add_squares(half_doubles to[2], const few_floats *v) {
    half_floats half[2];
    memcpy(half, v, sizeof(half));
    for (int i = 0; i < 2; i++) {
        half_doubles wide = __builtin_convertvector(half[i], half_doubles);
        to[i] += wide * wide;
    }
}

/* Where the lowest bit of a float stands; INT32_MAX of zero and of what is not finite. */
SUMS_INLINE void add_lowest(lanes *l, const few_floats *of) {
    few_integers bits = AS_INTEGERS(*of), exponent = bits >> 23 & 255, normal = exponent > 0;
    few_integers mantissa = (bits & 0x7fffff) | (normal & 0x800000);
    few_integers low = mantissa & -mantissa, none = (low == 0) | (exponent == 255);
    few_integers place = AS_INTEGERS(__builtin_convertvector(low, few_floats)) >> 23;
    place += exponent + (1 & ~normal) - 150 - 127;
    place = (place & ~none) | (none & INT32_MAX);
    few_integers lower = place < l->lowest;
    l->lowest = (place & lower) | (l->lowest & ~lower);
    l->bits |= bits;
}

/* before, weight: or NULL. */
SUMS_INLINE void add_lanes(lanes *l, const float *now, const float *before, const float *weight,
                           float row_weight, const int32_t most[2], bool lattice) {
    few_floats v, b, w;
    memcpy(&v, now, sizeof(v));
    few_integers finite = WITHIN(v, most[0]), less = (v < l->least) & finite;
    few_floats kept = AS_FLOATS(AS_INTEGERS(v) & finite),
               magnitude = AS_FLOATS(AS_INTEGERS(kept) & INT32_MAX);
    l->largest = CHOOSE(magnitude > l->largest, magnitude, l->largest);
    l->least = CHOOSE(less, v, l->least);
    l->finite -= finite;
    add_squares(l->now, &kept);
    if (before) {
        memcpy(&b, before, sizeof(b));
        v = v - b;
        finite = WITHIN(v, most[1]);
        kept = AS_FLOATS(AS_INTEGERS(v) & finite);
        magnitude = AS_FLOATS(AS_INTEGERS(kept) & INT32_MAX);
        l->farthest = CHOOSE(magnitude > l->farthest, magnitude, l->farthest);
        l->compared -= finite;
        add_squares(l->moved, &kept);
        if (lattice) {
            add_lowest(l, &b);
        }
    }
    if (weight) {
        memcpy(&w, weight, sizeof(w));
        kept = kept * (w * row_weight);
        add_squares(l->weighted, &kept);
    }
}

SUMS_INLINE double lane_total(const half_doubles v[2]) {
    half_doubles sum = v[0] + v[1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

SUMS_INLINE void take_lanes(lattice_sums *s, const lanes *l, bool before, bool weight) {
    s->now += lane_total(l->now);
    for (int i = 0; i < FEW; i++) {
        s->finite += (uint64_t)l->finite[i];
        s->compared += (uint64_t)(before ? l->compared[i] : l->finite[i]);
        s->largest = l->largest[i] > s->largest ? l->largest[i] : s->largest;
        s->least = l->least[i] < s->least ? l->least[i] : s->least;
        s->farthest = l->farthest[i] > s->farthest ? l->farthest[i] : s->farthest;
        s->before_bits |= (uint32_t)l->bits[i];
        s->lowest_bit = l->lowest[i] < s->lowest_bit ? l->lowest[i] : s->lowest_bit;
    }
    double moved = lane_total(before ? l->moved : l->now);
    s->moved += moved;
    s->weighted += weight ? lane_total(l->weighted) : moved;
}

SUMS_INLINE void add_run(lattice_sums *s, const float *now, const float *before, const float *weight,
                         float row_weight, const float most[2], bool lattice, size_t n) {
    const int32_t bits[2] = {(int32_t)scalar_bits(most[0]), (int32_t)scalar_bits(most[1])};
    lanes l = {.least = INFINITY - (few_floats){0}, .lowest = INT32_MAX - (few_integers){0}};
    size_t i = 0;
    for (; i + FEW <= n; i += FEW) {
        add_lanes(&l, now + i, before ? before + i : NULL, weight ? weight + i : NULL, row_weight, bits,
                  lattice);
    }
    if (i < n) { /* what is not a number counts for nothing */
        float rest[3][FEW] = {{NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN}};
        size_t left = (n - i) * sizeof(float);
        memcpy(rest[0], now + i, left);
        if (before) {
            memcpy(rest[1], before + i, left);
        }
        if (weight) {
            memcpy(rest[2], weight + i, left);
        }
        add_lanes(&l, rest[0], before ? rest[1] : NULL, weight ? rest[2] : NULL, row_weight, bits, lattice);
    }
    take_lanes(s, &l, before, weight);
}

CPU_LOOP static void sums_of(lattice_sums *s, const float *now, const float *before, const float *weight,
                             float row_weight, const float most[2], bool lattice, size_t n) {
    if (before && weight) {
        add_run(s, now, before, weight, row_weight, most, lattice, n);
    } else if (before && lattice) {
        add_run(s, now, before, NULL, 1, most, true, n);
    } else if (before) {
        add_run(s, now, before, NULL, 1, most, false, n);
    } else if (weight) {
        add_run(s, now, NULL, weight, row_weight, most, false, n);
    } else {
        add_run(s, now, NULL, NULL, 1, most, false, n);
    }
}

/* ---- means of rows and columns ---- */

/* Which elements count: positive and finite, and what they are compared with as well. */
#define MOMENT(value, with)                                                   \
    uint32_t bits = scalar_bits(value) & mask;                                \
    uint32_t counts = 0u - (uint32_t)((bits - 1u < limit) & ((with) > 0.0f)); \
    float kept = scalar_float(bits & counts), kept_from = scalar_float(scalar_bits(with) & counts)

#define MOMENT_LANES 8
SUMS_INLINE void add_moments(double sums[2], const float *now, const float *from, uint32_t mask,
                             uint32_t limit, size_t n) {
    double all[2][MOMENT_LANES] = {{0}, {0}};
    size_t i = 0;
    for (; i + MOMENT_LANES <= n; i += MOMENT_LANES) {
        for (size_t j = 0; j < MOMENT_LANES; j++) {
            MOMENT(now[i + j], from ? from[i + j] : 1.0f);
            all[0][j] += (double)kept;
            all[1][j] += (double)kept_from;
        }
    }
    for (; i < n; i++) {
        MOMENT(now[i], from ? from[i] : 1.0f);
        all[0][i % MOMENT_LANES] += (double)kept;
        all[1][i % MOMENT_LANES] += (double)kept_from;
    }
    for (size_t j = 0; j < MOMENT_LANES; j++) {
        sums[0] += all[0][j];
        sums[1] += all[1][j];
    }
}
CPU_LOOP static void moment_row(double sums[2], const float *now, const float *from, bool magnitudes,
                                float most, size_t n) {
    uint32_t mask = magnitudes ? UINT32_C(0x7fffffff) : UINT32_MAX, limit = scalar_bits(most);
    if (from) {
        add_moments(sums, now, from, mask, limit, n);
    } else {
        add_moments(sums, now, NULL, mask, limit, n);
    }
}

CPU_LOOP static void moment_columns(double *sums, double *from_sums, const float *now, const float *from,
                                    double from_scale, bool magnitudes, float most, size_t n) {
    uint32_t mask = magnitudes ? UINT32_C(0x7fffffff) : UINT32_MAX, limit = scalar_bits(most);
    if (from) {
        CPU_NO_CARRY
        for (size_t i = 0; i < n; i++) {
            MOMENT(now[i], from[i]);
            sums[i] += (double)kept;
            from_sums[i] += (double)kept_from * from_scale;
        }
    } else {
        CPU_NO_CARRY
        for (size_t i = 0; i < n; i++) {
            MOMENT(now[i], 1.0f);
            sums[i] += (double)kept;
            from_sums[i] += (double)kept_from * from_scale;
        }
    }
}

/* ---- integers in bytes ---- */

typedef struct few_counts {
    few_floats below[3];
    few_integers count[3], largest;
} few_counts;

/* scalar_quantised, eight at a time. */
SUMS_INLINE void quantise_eight(int8_t *few, few_counts *c, const float *residual, float one, float two,
                                float add) {
    few_floats r;
    memcpy(&r, residual, sizeof(r));
    few_integers sign = (few_integers)r >> 31;
    few_floats magnitude = (few_floats)((few_integers)r & INT32_MAX), more = magnitude + add;
    few_integers low = more < 2.0f, fits = more < LATTICE_LIMIT;
    few_integers level =
        __builtin_convertvector((few_floats)((few_integers)more & fits & ~low), few_integers);
    level = (level & ~low) | (low & 2);
    few_integers first = magnitude < two, none = magnitude < one;
    level = ((level & ~first) | (first & 1)) & ~none;
    few_integers larger = level > c->largest;
    c->largest = (level & larger) | (c->largest & ~larger);
    few_integers is[3] = {level == 1, level == 2, level > 2};
    few_floats short_of = __builtin_convertvector(level, few_floats) - magnitude;
    for (int w = 0; w < 3; w++) {
        c->below[w] += (few_floats)((few_integers)short_of & is[w]);
        c->count[w] -= is[w];
    }
    few_bytes narrow = __builtin_convertvector((level ^ sign) - sign, few_bytes);
    memcpy(few, &narrow, sizeof(narrow));
}

CPU_LOOP static bool quantise_few(int8_t *few, level_sums *s, const float *residual, const float up[3],
                                  size_t n) {
    const float one = up[0], two = 1.0f + up[1], add = 1.0f - up[2];
    few_counts c = {.largest = {0}};
    size_t i = 0;
    for (; i + FEW <= n; i += FEW) {
        quantise_eight(few + i, &c, residual + i, one, two, add);
    }
    if (i < n) {
        float rest[FEW] = {0};
        int8_t bytes[FEW];
        memcpy(rest, residual + i, (n - i) * sizeof(float));
        quantise_eight(bytes, &c, rest, one, two, add);
        memcpy(few + i, bytes, n - i);
    }
    int32_t largest = 0;
    for (int j = 0; j < FEW; j++) {
        largest = c.largest[j] > largest ? c.largest[j] : largest;
        for (int w = 0; w < 3; w++) {
            s->below[w] += (double)c.below[w][j];
            s->count[w] += (uint64_t)c.count[w][j];
        }
    }
    return largest <= INT8_MAX;
}
