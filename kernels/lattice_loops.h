/* Loops over elements of lossy blocks; part of kernels/cpu_loops.h, which includes it. */
#include "kernels/scalar_lattice.h"

CPU_LOOP static void widen_f16(float *to, const void *from, size_t n) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        LOAD(uint16_t, a, from, i);
        to[i] = scalar_float(scalar_f32_from_f16(a));
    }
}
CPU_LOOP static void widen_bf16(float *to, const void *from, size_t n) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        LOAD(uint16_t, a, from, i);
        to[i] = scalar_float((uint32_t)a << 16);
    }
}
static bool widen(float *to, ckd_dtype from, const void *in, size_t n) {
    switch (from) {
    case CKD_F32:
        if (n) {
            memmove(to, in, n * sizeof(float));
        }
        return true;
    case CKD_F16:
        widen_f16(to, in, n);
        return true;
    case CKD_BF16:
        widen_bf16(to, in, n);
        return true;
    default:
        return false;
    }
}

/* Lattice units of the low-rank part. */
static inline __attribute__((always_inline)) int32_t lattice_low(float low_rank, float step,
                                                                 const lattice_run *run) {
    return scalar_units((low_rank * run->low_rank_unit) * step);
}

/* Separates the four cases, so that each is a simple loop. `low`: lattice units of the low-rank part. */
#define LATTICE_CASES(body)                                                     \
    do {                                                                        \
        const float *column = run->column_step;                                 \
        if (column && low_rank) {                                               \
            body(lattice_low(low_rank[i], step, run), run->row_step *column[i]) \
        } else if (column) {                                                    \
            body(0, run->row_step *column[i])                                   \
        } else if (low_rank) {                                                  \
            body(lattice_low(low_rank[i], step, run), run->row_step)            \
        } else {                                                                \
            body(0, run->row_step)                                              \
        }                                                                       \
    } while (0)

CPU_LOOP static void lattice_apply(float *values, const int32_t *q, const float *low_rank, size_t n,
                                   const lattice_run *run) {
    const float o1 = run->offset[0], o2 = run->offset[1], o3 = run->offset[2];
#define BODY(low, step_expression)                                          \
    CPU_NO_CARRY for (size_t i = 0; i < n; i++) {                           \
        float step = step_expression;                                       \
        int32_t own = scalar_units(scalar_level(q[i], o1, o2, o3) * step);  \
        int32_t more = scalar_add(low, own);                                \
        values[i] = scalar_move(values[i], more, run->unit, run->per_unit); \
    }
    LATTICE_CASES(BODY);
#undef BODY
}

CPU_LOOP static void lattice_values(float *values, const int32_t *q, size_t n, float unit) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)scalar_units((float)q[i]) * unit;
    }
}

CPU_LOOP static void widen_integers(int32_t *to, const int8_t *q, size_t n) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        to[i] = q[i];
    }
}

#include "kernels/lattice_moves.h"

CPU_LOOP static void lattice_residual(float *residual, const float *now, const float *previous,
                                      const float *low_rank, size_t n, const lattice_run *run) {
#define BODY(low, step_expression)                                                              \
    CPU_NO_CARRY for (size_t i = 0; i < n; i++) {                                               \
        float step = step_expression;                                                           \
        int32_t by = low;                                                                       \
        float from = by ? scalar_move(previous[i], by, run->unit, run->per_unit) : previous[i]; \
        float r = (now[i] - from) * run->per_unit / step;                                       \
        residual[i] = scalar_magnitude(r) < LATTICE_LIMIT ? r : 0.0f;                           \
    }
    LATTICE_CASES(BODY);
#undef BODY
}

CPU_LOOP static void quantise(int32_t *q, const float *residual, const float up[3], size_t n) {
    const float one = up[0], two = 1.0f + up[1], add = 1.0f - up[2];
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t level = scalar_quantised(scalar_magnitude(residual[i]), one, two, add);
        q[i] = residual[i] < 0.0f ? -level : level;
    }
}

/* Without a parent all values start from the level of birth. */
#define LEVEL_FROM(value) ((scalar_level_of(value) & of_parent) | birth)

CPU_LOOP static void level_apply(float *values, const int32_t *q, size_t n, const level_run *run) {
    const int32_t of_parent = run->has_parent ? -1 : 0, birth = run->has_parent ? 0 : run->birth;
    const int32_t row = run->row, born = run->birth, step = run->step;
    const int32_t *column = run->column;
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t offset = row + column[i];
        int32_t level = scalar_level_apply(LEVEL_FROM(values[i]), q[i], offset, born, step);
        uint32_t stays = (uint32_t) - (int32_t)((q[i] | offset) == 0) & (uint32_t)of_parent;
        values[i] =
            scalar_float(((uint32_t)level << LEVEL_SHIFT & ~stays) | (scalar_bits(values[i]) & stays));
    }
}

CPU_LOOP static void level_quantise(int32_t *q, const float *now, const float *previous, float up, size_t n,
                                    const level_run *run) {
    const int32_t of_parent = run->has_parent ? -1 : 0, birth = run->has_parent ? 0 : run->birth;
    const int32_t row = run->row, born = run->birth;
    const float per_step = 1.0f / (float)run->step, add = 1.0f - up;
    const int32_t *column = run->column;
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t to = scalar_level_of(now[i]);
        int32_t from = LEVEL_FROM(previous[i]);
        int32_t absent = -(int32_t)(from == 0), gone = ~absent & LEVEL_ZERO;
        int32_t start = (from | (born & absent)) + row + column[i];
        float distance = (float)(to - start) * per_step;
        int32_t steps = (int32_t)(scalar_magnitude(distance) + add);
        steps = distance < 0.0f ? -steps : steps;
        steps -= absent & ~(steps >> 31);
        q[i] = to ? steps : gone;
    }
}

CPU_LOOP static void level_of(int32_t *level, const float *values, size_t n) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        level[i] = scalar_level_of(values[i]);
    }
}
