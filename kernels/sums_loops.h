/*
 * Sums over runs of a lossy tile, for encoders; part of kernels/cpu_loops.h, which includes it. The lanes are
 * fixed, so that every instruction set gives the same bits.
 */
#define HALF (LANES / 2)
typedef float half_floats __attribute__((vector_size(4 * HALF)));
typedef double half_doubles __attribute__((vector_size(8 * HALF)));
typedef float loose_floats
    __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any float's address */

#ifndef STORE_NARROW /* integers as bytes, if they fit */
#define STORE_NARROW(to, x)                                \
    do {                                                   \
        i8x8 narrow_ = __builtin_convertvector((x), i8x8); \
        memcpy((to), &narrow_, sizeof(narrow_));           \
    } while (0)
#endif
#ifndef WIDE_HALF /* floats as doubles */
#define WIDE_HALF(x) __builtin_convertvector(x, half_doubles)
#endif

#define SUMS_INLINE         CPU_TARGET static inline __attribute__((always_inline))
#define AS_FLOATS(mask)     ((f32x8)(mask))
#define AS_INTEGERS(floats) ((i32x8)(floats))
#define WITHIN(floats, max) ((AS_INTEGERS(floats) & INT32_MAX) <= (max)) /* compares bits */
#define CHOOSE(mask, a, b)  AS_FLOATS((AS_INTEGERS(a) & (mask)) | (AS_INTEGERS(b) & ~(mask)))

typedef struct lanes {
    half_doubles now[2], moved[2], weighted[2];
    f32x8 largest, smallest, farthest;
    f32x8 lowest;
    i32x8 finite, compared, bits;
} lanes;

SUMS_INLINE void add_squares(half_doubles to[2], const f32x8 *v) {
    half_floats half[2];
    memcpy(half, v, sizeof(half));
    for (int i = 0; i < 2; i++) {
        half_doubles wide = WIDE_HALF(half[i]);
        to[i] += wide * wide;
    }
}

/*
 * Lowers l->lowest to the value of the lowest bit of each nonzero float. That of a value that is not finite is
 * NaN or infinite, and never lower.
 */
SUMS_INLINE void add_lowest(lanes *l, const f32x8 *of) {
    i32x8 bits = AS_INTEGERS(*of), size = bits & INT32_MAX, power = (bits & 0x7fffff) == 0;
    i32x8 without = size & (size - 1) & ~power; /* a power of two is its own lowest bit */
    f32x8 low = AS_FLOATS(size) - AS_FLOATS(without);
    i32x8 lower = (low < l->lowest) & (low > 0.0f);
    l->lowest = CHOOSE(lower, low, l->lowest);
    l->bits |= bits;
}

/* Which elements of a run count, and how. */
typedef struct lane_rules {
    int32_t limits[2]; /* as bits */
    float row_weight;
    bool lattice;
} lane_rules;

/* parent_values, weight: may be NULL. */
SUMS_INLINE void add_lanes(lanes *l, const float *now, const float *parent_values, const float *weight,
                           const lane_rules *rules) {
    f32x8 v, b, w;
    memcpy(&v, now, sizeof(v));
    i32x8 finite = WITHIN(v, rules->limits[0]), less = (v < l->smallest) & finite;
    f32x8 kept = AS_FLOATS(AS_INTEGERS(v) & finite), magnitude = AS_FLOATS(AS_INTEGERS(kept) & INT32_MAX);
    l->largest = CHOOSE(magnitude > l->largest, magnitude, l->largest);
    l->smallest = CHOOSE(less, v, l->smallest);
    l->finite -= finite;
    add_squares(l->now, &kept);
    if (parent_values) {
        memcpy(&b, parent_values, sizeof(b));
        v = v - b;
        finite = WITHIN(v, rules->limits[1]);
        kept = AS_FLOATS(AS_INTEGERS(v) & finite);
        magnitude = AS_FLOATS(AS_INTEGERS(kept) & INT32_MAX);
        l->farthest = CHOOSE(magnitude > l->farthest, magnitude, l->farthest);
        l->compared -= finite;
        add_squares(l->moved, &kept);
        if (rules->lattice) {
            add_lowest(l, &b);
        }
    }
    if (weight) {
        memcpy(&w, weight, sizeof(w));
        kept = kept * (w * rules->row_weight);
        add_squares(l->weighted, &kept);
    }
}

SUMS_INLINE double lane_total(const half_doubles v[2]) {
    half_doubles sum = v[0] + v[1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

SUMS_INLINE void take_lanes(lattice_sums *s, const lanes *l, bool has_parent, bool weight) {
    s->now += lane_total(l->now);
    for (int i = 0; i < LANES; i++) {
        s->finite += (uint64_t)l->finite[i];
        s->compared += (uint64_t)(has_parent ? l->compared[i] : l->finite[i]);
        s->largest = l->largest[i] > s->largest ? l->largest[i] : s->largest;
        s->smallest = l->smallest[i] < s->smallest ? l->smallest[i] : s->smallest;
        s->farthest = l->farthest[i] > s->farthest ? l->farthest[i] : s->farthest;
        s->parent_bits |= (uint32_t)l->bits[i];
        int32_t lowest = l->lowest[i] < INFINITY ? ilogbf(l->lowest[i]) : INT32_MAX;
        s->lowest_bit = lowest < s->lowest_bit ? lowest : s->lowest_bit;
    }
    double moved = lane_total(has_parent ? l->moved : l->now);
    s->moved += moved;
    s->weighted += weight ? lane_total(l->weighted) : moved;
}

/* Inlined for the constants has_parent, has_weight and lattice. */
SUMS_INLINE void add_run(lattice_sums *s, const sums_run *run, bool has_parent, bool has_weight, bool lattice,
                         size_t n) {
    const float *const now = run->now, *const parent_values = has_parent ? run->parent_values : NULL,
                       *const weight = has_weight ? run->weight : NULL;
    const lane_rules rules = {{(int32_t)scalar_bits(run->limits[0]), (int32_t)scalar_bits(run->limits[1])},
                              run->row_weight,
                              lattice};
    lanes l = {.smallest = INFINITY - (f32x8){0}, .lowest = INFINITY - (f32x8){0}};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        add_lanes(&l, now + i, parent_values ? parent_values + i : NULL, weight ? weight + i : NULL, &rules);
    }
    if (i < n) { /* NaNs count for nothing */
        float rest[3][LANES] = {{NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN}};
        size_t left = (n - i) * sizeof(float);
        memcpy(rest[0], now + i, left);
        if (parent_values) {
            memcpy(rest[1], parent_values + i, left);
        }
        if (weight) {
            memcpy(rest[2], weight + i, left);
        }
        add_lanes(&l, rest[0], parent_values ? rest[1] : NULL, weight ? rest[2] : NULL, &rules);
    }
    take_lanes(s, &l, parent_values, weight);
}

CPU_LOOP static void sums_of(lattice_sums *s, const sums_run *run, size_t n) {
    if (run->parent_values && run->weight) {
        add_run(s, run, true, true, run->lattice, n);
    } else if (run->parent_values && run->lattice) {
        add_run(s, run, true, false, true, n);
    } else if (run->parent_values) {
        add_run(s, run, true, false, false, n);
    } else if (run->weight) {
        add_run(s, run, false, true, false, n);
    } else {
        add_run(s, run, false, false, false, n);
    }
}

/* ---- integers in bytes ---- */

typedef struct level_counts {
    f32x8 below[3];
    i32x8 count[3], largest;
} level_counts;

/* scalar_quantised, eight at a time. */
SUMS_INLINE void quantise_eight(int8_t *q8, level_counts *c, const float *residual, float one, float two,
                                float add) {
    f32x8 r;
    memcpy(&r, residual, sizeof(r));
    i32x8 sign = (i32x8)r >> 31;
    f32x8 magnitude = (f32x8)((i32x8)r & INT32_MAX), more = magnitude + add;
    i32x8 low = more < 2.0f, fits = more < LATTICE_LIMIT;
    i32x8 level = __builtin_convertvector((f32x8)((i32x8)more & fits & ~low), i32x8);
    level = (level & ~low) | (low & 2);
    i32x8 first = magnitude < two, none = magnitude < one;
    level = ((level & ~first) | (first & 1)) & ~none;
    i32x8 larger = level > c->largest;
    c->largest = (level & larger) | (c->largest & ~larger);
    i32x8 is[3] = {level == 1, level == 2, level > 2};
    f32x8 short_of = __builtin_convertvector(level, f32x8) - magnitude;
    for (int w = 0; w < 3; w++) {
        c->below[w] += (f32x8)((i32x8)short_of & is[w]);
        c->count[w] -= is[w];
    }
    STORE_NARROW(q8, (level ^ sign) - sign);
}

SUMS_INLINE bool take_counts(level_sums *s, const level_counts *c) {
    int32_t largest = 0;
    for (int j = 0; j < LANES; j++) {
        largest = c->largest[j] > largest ? c->largest[j] : largest;
        for (int w = 0; w < 3; w++) {
            s->below[w] += (double)c->below[w][j];
            s->count[w] += (uint64_t)c->count[w][j];
        }
    }
    return largest <= INT8_MAX;
}

CPU_LOOP static bool quantise_q8(int8_t *q8, level_sums *s, const float *residual, const float up[3],
                                 size_t n) {
    const float one = up[0], two = 1.0f + up[1], add = 1.0f - up[2];
    level_counts c = {.largest = {0}};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        quantise_eight(q8 + i, &c, residual + i, one, two, add);
    }
    if (i < n) {
        float rest[LANES] = {0};
        int8_t bytes[LANES];
        memcpy(rest, residual + i, (n - i) * sizeof(float));
        quantise_eight(bytes, &c, rest, one, two, add);
        memcpy(q8 + i, bytes, n - i);
    }
    return take_counts(s, &c);
}

/* ---- integers in bytes, from values ---- */

#ifndef ANY_EIGHT /* is the highest bit of any element set? */
#define ANY_EIGHT(x)                                                            \
    __extension__({                                                             \
        uint64_t any_[LANES / 2];                                               \
        memcpy(any_, &(x), sizeof(any_));                                       \
        (any_[0] | any_[1] | any_[2] | any_[3]) & UINT64_C(0x8000000080000000); \
    })
#endif
#define AT_ONCE     4      /* times LANES; nearly always all or none of them are zeros */
#define SURELY_LESS 0.999f /* of a threshold; rounding changes a quotient by less than 0.1 % */

/*
 * A difference in lattice units, and a step. parent_values, column: may be NULL. These are macros, as passing
 * vectors by address would force them into memory.
 */
#define DIFFERENCE_EIGHT(now, parent_values, r)                   \
    __extension__({                                               \
        f32x8 now_ = *(const loose_floats *)(now), parent_ = {0}; \
        if (parent_values) {                                      \
            parent_ = *(const loose_floats *)(parent_values);     \
            now_ = now_ - parent_;                                \
        }                                                         \
        now_ *(r).per_unit;                                       \
    })
#define STEP_EIGHT(column, r)                                       \
    __extension__({                                                 \
        f32x8 step_ = (r).row_step - (f32x8){0};                    \
        if (column) {                                               \
            step_ = *(const loose_floats *)(column) * (r).row_step; \
        }                                                           \
        step_;                                                      \
    })
#define CANDIDATES(difference, step) \
    AS_INTEGERS(AS_FLOATS((AS_FLOATS(AS_INTEGERS(difference) & INT32_MAX) >= (step)*less)))

/* scalar_quantised of lattice_residual's quotients. Levels are not limited, as large ones do not fit a byte. */
#define QUANTISE_EIGHT(q8, difference, step)                                                    \
    do {                                                                                        \
        f32x8 quotient_ = (difference) / (step);                                                \
        i32x8 sign_ = AS_INTEGERS(quotient_) >> 31, size_ = AS_INTEGERS(quotient_) & INT32_MAX; \
        size_ &= AS_FLOATS(size_) < LATTICE_LIMIT;                                              \
        f32x8 more_ = AS_FLOATS(size_) + add;                                                   \
        i32x8 first_ = AS_FLOATS(size_) < two, none_ = AS_FLOATS(size_) < one;                  \
        i32x8 level_ = __builtin_convertvector(more_, i32x8), larger_ = level_ < 2;             \
        level_ = (level_ & ~larger_) | (larger_ & 2);                                           \
        level_ = ((level_ & ~first_) | (first_ & 1)) & ~none_;                                  \
        larger_ = level_ > largest;                                                             \
        largest = (level_ & larger_) | (largest & ~larger_);                                    \
        STORE_NARROW(q8, (level_ ^ sign_) - sign_);                                             \
    } while (0)

/* Values to quantise. parent_values, column (steps): may be NULL. */
typedef struct quantise_source {
    const float *now, *parent_values, *column;
} quantise_source;

SUMS_INLINE int32_t quantise_values(int8_t *q8, const quantise_source *from, const float up[3], size_t n,
                                    const lattice_run *run) {
    const float *const now = from->now, *const parent_values = from->parent_values,
                       *const column = from->column;
    const lattice_run r = *run;
    const float one = up[0], two = 1.0f + up[1], add = 1.0f - up[2], less = one * SURELY_LESS;
    i32x8 largest = {0};
    size_t i = 0;
#define PARENT(j) (parent_values ? parent_values + i + LANES * (j) : NULL)
#define COLUMN(j) (column ? column + i + LANES * (j) : NULL)
    for (; i + LANES * AT_ONCE <= n; i += LANES * AT_ONCE) {
        f32x8 d0 = DIFFERENCE_EIGHT(now + i, PARENT(0), r),
              d1 = DIFFERENCE_EIGHT(now + i + LANES, PARENT(1), r);
        f32x8 d2 = DIFFERENCE_EIGHT(now + i + 2 * LANES, PARENT(2), r),
              d3 = DIFFERENCE_EIGHT(now + i + 3 * LANES, PARENT(3), r);
        f32x8 s0 = STEP_EIGHT(COLUMN(0), r), s1 = STEP_EIGHT(COLUMN(1), r), s2 = STEP_EIGHT(COLUMN(2), r),
              s3 = STEP_EIGHT(COLUMN(3), r);
        i32x8 any = (CANDIDATES(d0, s0) | CANDIDATES(d1, s1)) | (CANDIDATES(d2, s2) | CANDIDATES(d3, s3));
        if (!ANY_EIGHT(any)) {
            memset(q8 + i, 0, LANES * AT_ONCE);
            continue;
        }
        QUANTISE_EIGHT(q8 + i, d0, s0);
        QUANTISE_EIGHT(q8 + i + LANES, d1, s1);
        QUANTISE_EIGHT(q8 + i + 2 * LANES, d2, s2);
        QUANTISE_EIGHT(q8 + i + 3 * LANES, d3, s3);
    }
#undef PARENT
#undef COLUMN
    for (; i < n; i += LANES) {
        size_t left = n - i < LANES ? n - i : LANES;
        float rest[3][LANES] = {{0}, {0}, {0}};
        int8_t bytes[LANES];
        memcpy(rest[0], now + i, left * sizeof(float));
        if (parent_values) {
            memcpy(rest[1], parent_values + i, left * sizeof(float));
        }
        if (column) {
            memcpy(rest[2], column + i, left * sizeof(float));
        }
        f32x8 difference = DIFFERENCE_EIGHT(rest[0], parent_values ? rest[1] : NULL, r);
        f32x8 step = STEP_EIGHT(column ? rest[2] : NULL, r);
        QUANTISE_EIGHT(bytes, difference, step);
        memcpy(q8 + i, bytes, left);
    }
    int32_t max = 0;
    for (int j = 0; j < LANES; j++) {
        max = largest[j] > max ? largest[j] : max;
    }
    return max;
}

CPU_LOOP static int32_t quantise_run(int8_t *q8, const float *now, const float *parent_values,
                                     const float up[3], size_t n, const lattice_run *run) {
    const float *column = run->column_step;
    if (parent_values) {
        return column ? quantise_values(q8, &(quantise_source){now, parent_values, column}, up, n, run)
                      : quantise_values(q8, &(quantise_source){now, parent_values, NULL}, up, n, run);
    }
    return column ? quantise_values(q8, &(quantise_source){now, NULL, column}, up, n, run)
                  : quantise_values(q8, &(quantise_source){now, NULL, NULL}, up, n, run);
}

/* ---- errors ---- */

typedef struct error_lanes {
    half_doubles energy[2], error[2];
    f32x8 farthest;
    i32x8 finite, unlike;
} error_lanes;

SUMS_INLINE void add_error(error_lanes *l, const float *given, const float *decoded) {
    f32x8 v, d;
    memcpy(&v, given, sizeof(v));
    memcpy(&d, decoded, sizeof(d));
    i32x8 finite = WITHIN(v, 0x7f7fffff);
    d = v - d;
    i32x8 magnitude = AS_INTEGERS(d) & INT32_MAX & finite, within = magnitude <= 0x7f7fffff;
    v = AS_FLOATS(AS_INTEGERS(v) & finite);
    d = AS_FLOATS(magnitude & within);
    l->farthest = CHOOSE(d > l->farthest, d, l->farthest);
    l->finite -= finite;
    l->unlike |= ~within;
    add_squares(l->energy, &v);
    add_squares(l->error, &d);
}

CPU_LOOP static void error_of(error_sums *s, const float *given, const float *decoded, size_t n) {
    error_lanes l = {.finite = {0}};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        add_error(&l, given + i, decoded + i);
    }
    if (i < n) { /* NaNs count for nothing */
        float rest[2][LANES] = {{NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN}};
        memcpy(rest[0], given + i, (n - i) * sizeof(float));
        memcpy(rest[1], decoded + i, (n - i) * sizeof(float));
        add_error(&l, rest[0], rest[1]);
    }
    s->energy += lane_total(l.energy);
    s->error += lane_total(l.error);
    for (int j = 0; j < LANES; j++) {
        s->finite += (uint64_t)l.finite[j];
        s->largest = l.farthest[j] > s->largest ? l.farthest[j] : s->largest;
        s->largest = l.unlike[j] ? INFINITY : s->largest;
    }
}
