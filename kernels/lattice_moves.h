/* Moves lattice values by integers that are mostly 0; part of kernels/lattice_loops.h, which includes it. */
/* Eight elements at a time, in the compiler's vectors: all instruction sets give the same bits. */
#define LANES 8
typedef float f32x8 __attribute__((vector_size(4 * LANES)));
typedef int32_t i32x8 __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32x8 __attribute__((vector_size(4 * LANES))); /* the format defines sums modulo 2^32 */
typedef int8_t i8x8 __attribute__((vector_size(LANES)));
#ifndef ROUND_EIGHT /* scalar_rint, for magnitudes below the limit */
#define ROUND_EIGHT(x) round_eight(x)
#define round_eight(x)                                                                             \
    __extension__({                                                                                \
        i32x8 sign_ = (i32x8)(x)&INT32_MIN, small_ = (f32x8)((i32x8)(x) ^ sign_) < 8388608.0f;     \
        f32x8 big_ = (f32x8)(sign_ | 0x4b000000), near_ = ((x) + big_) - big_;                     \
        __builtin_convertvector((f32x8)(((i32x8)near_ & small_) | ((i32x8)(x) & ~small_)), i32x8); \
    })
#endif
/* scalar_units, eight at a time. */
#define UNITS_EIGHT(x)                                                               \
    __extension__({                                                                  \
        i32x8 bits_ = (i32x8)(x);                                                    \
        f32x8 kept_ = (f32x8)(bits_ & ((f32x8)(bits_ & INT32_MAX) < LATTICE_LIMIT)); \
        ROUND_EIGHT(kept_);                                                          \
    })

#define EIGHT CPU_TARGET static inline __attribute__((always_inline))

/* Vectors are passed by pointer, as targets differ in how they pass vectors by value. */
#define FLOATS_AT(from)                      \
    __extension__({                          \
        f32x8 all_;                          \
        memcpy(&all_, (from), sizeof(all_)); \
        all_;                                \
    })

/* Adds the lattice units of eight integers: scalar_level times step, rounded. */
EIGHT void add_own_units(i32x8 *units, const int8_t *q, const f32x8 *step, const lattice_run *r) {
    i8x8 narrow;
    memcpy(&narrow, q, sizeof(narrow));
    i32x8 wide = __builtin_convertvector(narrow, i32x8), negative = wide < 0;
    i32x8 level = (wide ^ negative) - negative, one = level == 1, two = level == 2, more = level > 2;
    f32x8 offset =
        (f32x8)((one & (int32_t)scalar_bits(r->offset[0])) | (two & (int32_t)scalar_bits(r->offset[1])) |
                (more & (int32_t)scalar_bits(r->offset[2])));
    f32x8 at = __builtin_convertvector(level, f32x8) - offset;
    at = (f32x8)((i32x8)at ^ (negative & INT32_MIN));
    at = at * *step;
    *units = (i32x8)((u32x8)*units + (u32x8)UNITS_EIGHT(at));
}

/* scalar_move, eight at a time. */
EIGHT void move_units(float *values, const i32x8 *units, const lattice_run *r) {
    f32x8 value = FLOATS_AT(values);
    i32x8 stays = *units == 0, from = UNITS_EIGHT(value * r->per_unit);
    f32x8 moved = __builtin_convertvector((i32x8)((u32x8)from + (u32x8)*units), f32x8) * r->unit;
    value = (f32x8)(((i32x8)value & stays) | ((i32x8)moved & ~stays));
    memcpy(values, &value, sizeof(value));
}

/* column: may be NULL. */
EIGHT void move_eight(float *values, const int8_t *q, const float *column, const lattice_run *r) {
    f32x8 step = {0};
    i32x8 units = {0};
    step = column ? FLOATS_AT(column) * r->row_step : step + r->row_step;
    add_own_units(&units, q, &step, r);
    move_units(values, &units, r);
}

static inline __attribute__((always_inline)) void move_by(float *value, int8_t q, float step,
                                                          const lattice_run *run) {
    float at = scalar_level(q, run->offset[0], run->offset[1], run->offset[2]);
    *value = scalar_move(*value, scalar_units(at * step), run->unit, run->per_unit);
}

static inline __attribute__((always_inline)) uint64_t eight_at(const int8_t *q) {
    uint64_t all;
    memcpy(&all, q, sizeof(all));
    return all;
}

#define MANY \
    8 /* groups of LANES, whose nonzero ones are counted first: a branch on each is hard to predict */

CPU_TARGET static inline __attribute__((always_inline)) void apply_q8(float *values, const int8_t *q,
                                                                      const float *column, size_t n,
                                                                      const lattice_run *run) {
    const lattice_run r = *run;
    size_t i = 0;
    for (; i + LANES * MANY <= n; i += LANES * MANY) {
        unsigned moved = 0;
        for (size_t j = 0; j < MANY; j++) {
            moved += eight_at(q + i + LANES * j) != 0;
        }
        if (moved == 0) {
            continue;
        }
        bool all = moved > MANY / 3;
        for (size_t j = i; j < i + LANES * MANY; j += LANES) {
            if (all || eight_at(q + j)) {
                move_eight(values + j, q + j, column ? column + j : NULL, &r);
            }
        }
    }
    for (; i < n; i++) {
        move_by(&values[i], q[i], column ? r.row_step * column[i] : r.row_step, &r);
    }
}

/* Most integers are 0, so it skips long stretches of zeros. */
CPU_LOOP static void lattice_apply_q8(float *values, const int8_t *q, size_t n, const lattice_run *run) {
    if (run->column_step) {
        apply_q8(values, q, run->column_step, n, run);
    } else {
        apply_q8(values, q, NULL, n, run);
    }
}
