/* Moves lattice values by integers that are mostly 0; part of kernels/lattice_loops.h, which includes it. */
/* Eight elements at a time, in the compiler's vectors: any processor's instructions give the same bits. */
#define FEW 8
typedef float few_floats __attribute__((vector_size(4 * FEW)));
typedef int32_t few_integers __attribute__((vector_size(4 * FEW)));
typedef int8_t few_bytes __attribute__((vector_size(FEW)));
#ifndef ROUND_EIGHT /* scalar_rint, for magnitudes below the limit */
#define ROUND_EIGHT(x) round_eight(x)
#define round_eight(x)                                                                                   \
    __extension__({                                                                                      \
        few_integers sign_ = (few_integers)(x)&INT32_MIN,                                                \
                     small_ = (few_floats)((few_integers)(x) ^ sign_) < 8388608.0f;                      \
        few_floats big_ = (few_floats)(sign_ | 0x4b000000), near_ = ((x) + big_) - big_;                 \
        __builtin_convertvector(                                                                         \
            (few_floats)(((few_integers)near_ & small_) | ((few_integers)(x) & ~small_)), few_integers); \
    })
#endif
/* scalar_units, eight at a time. */
#define UNITS_EIGHT(x)                                                                              \
    __extension__({                                                                                 \
        few_integers bits_ = (few_integers)(x);                                                     \
        few_floats kept_ = (few_floats)(bits_ & ((few_floats)(bits_ & INT32_MAX) < LATTICE_LIMIT)); \
        ROUND_EIGHT(kept_);                                                                         \
    })

#define EIGHT CPU_TARGET static inline __attribute__((always_inline))

/* Vectors are passed by pointer, as targets differ in how they pass vectors by value. */
#define FLOATS_AT(from)                      \
    __extension__({                          \
        few_floats all_;                     \
        memcpy(&all_, (from), sizeof(all_)); \
        all_;                                \
    })

/* Adds the lattice units of eight integers: scalar_level times step, rounded. */
EIGHT void add_own_units(few_integers *units, const int8_t *q, const few_floats *step, const lattice_run *r) {
    few_bytes narrow;
    memcpy(&narrow, q, sizeof(narrow));
    few_integers wide = __builtin_convertvector(narrow, few_integers), negative = wide < 0;
    few_integers level = (wide ^ negative) - negative, one = level == 1, two = level == 2, more = level > 2;
    few_floats offset =
        (few_floats)((one & (int32_t)scalar_bits(r->offset[0])) | (two & (int32_t)scalar_bits(r->offset[1])) |
                     (more & (int32_t)scalar_bits(r->offset[2])));
    few_floats at = __builtin_convertvector(level, few_floats) - offset;
    at = (few_floats)((few_integers)at ^ (negative & INT32_MIN));
    at = at * *step;
    *units = *units + UNITS_EIGHT(at);
}

/* scalar_move, eight at a time. */
EIGHT void move_units(float *values, const few_integers *units, const lattice_run *r) {
    few_floats value = FLOATS_AT(values);
    few_integers stays = *units == 0, from = UNITS_EIGHT(value * r->per_unit);
    few_floats moved = __builtin_convertvector(from + *units, few_floats) * r->unit;
    value = (few_floats)(((few_integers)value & stays) | ((few_integers)moved & ~stays));
    memcpy(values, &value, sizeof(value));
}

/* column: may be NULL. */
EIGHT void move_eight(float *values, const int8_t *q, const float *column, const lattice_run *r) {
    few_floats step = {0};
    few_integers units = {0};
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
    8 /* times FEW; their nonzero groups are counted first, as a branch on each could not be predicted */

CPU_TARGET static inline __attribute__((always_inline)) void apply_few(float *values, const int8_t *q,
                                                                       const float *column, size_t n,
                                                                       const lattice_run *run) {
    const lattice_run r = *run;
    size_t i = 0;
    for (; i + FEW * MANY <= n; i += FEW * MANY) {
        unsigned moved = 0;
        for (size_t j = 0; j < MANY; j++) {
            moved += eight_at(q + i + FEW * j) != 0;
        }
        if (moved == 0) {
            continue;
        }
        bool all = moved > MANY / 3;
        for (size_t j = i; j < i + FEW * MANY; j += FEW) {
            if (all || eight_at(q + j)) {
                move_eight(values + j, q + j, column ? column + j : NULL, &r);
            }
        }
    }
    for (; i < n; i++) {
        move_by(&values[i], q[i], column ? r.row_step * column[i] : r.row_step, &r);
    }
}

/* Most integers are 0. Long stretches of zeros are skipped. */
CPU_LOOP static void lattice_apply_few(float *values, const int8_t *q, size_t n, const lattice_run *run) {
    if (run->column_step) {
        apply_few(values, q, run->column_step, n, run);
    } else {
        apply_few(values, q, NULL, n, run);
    }
}
