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

/* What the low-rank part adds, in lattice units. */
static inline __attribute__((always_inline)) int32_t lattice_low(float low_rank, float step,
                                                                 const lattice_run *run) {
    return scalar_units((low_rank * run->low_rank_unit) * step);
}

/* The four cases apart, so that each is a plain loop. */
#define LATTICE_CASES(body)                                 \
    do {                                                    \
        if (run->column_step) {                             \
            const float *column = run->column_step;         \
            if (low_rank) {                                 \
                body(low_rank[i], run->row_step *column[i]) \
            } else {                                        \
                body(0.0f, run->row_step *column[i])        \
            }                                               \
        } else if (low_rank) {                              \
            body(low_rank[i], run->row_step)                \
        } else {                                            \
            body(0.0f, run->row_step)                       \
        }                                                   \
    } while (0)

CPU_LOOP static void lattice_apply(float *values, const int32_t *q, const float *low_rank, size_t n,
                                   const lattice_run *run) {
    const float o1 = run->offset[0], o2 = run->offset[1], o3 = run->offset[2];
#define BODY(low, step_expression)                                          \
    CPU_NO_CARRY for (size_t i = 0; i < n; i++) {                           \
        float step = step_expression;                                       \
        int32_t own = scalar_units(scalar_level(q[i], o1, o2, o3) * step);  \
        int32_t more = scalar_add(lattice_low(low, step, run), own);        \
        values[i] = scalar_move(values[i], more, run->unit, run->per_unit); \
    }
    LATTICE_CASES(BODY);
#undef BODY
}

CPU_LOOP static void lattice_values(float *values, const int32_t *q, size_t n, float unit) {
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t units = scalar_units((float)q[i]);
        values[i] = units ? (float)units * unit : 0.0f;
    }
}

static inline __attribute__((always_inline)) void move_by(float *value, int8_t q, float step,
                                                          const lattice_run *run) {
    float at = scalar_level(q, run->offset[0], run->offset[1], run->offset[2]);
    *value = scalar_move(*value, scalar_units(at * step), run->unit, run->per_unit);
}

#define FEW 8

/* Most integers are 0: where eight in a row are, nothing is to be done. */
CPU_LOOP static void lattice_apply_few(float *values, const int8_t *q, size_t n, const lattice_run *run) {
    const lattice_run r = *run;
    size_t i = 0;
    for (; i + FEW <= n; i += FEW) {
        uint64_t all;
        memcpy(&all, q + i, FEW);
        if (all == 0) {
            continue;
        }
        float step[FEW];
        for (size_t j = 0; j < FEW; j++) {
            step[j] = r.column_step ? r.row_step * r.column_step[i + j] : r.row_step;
        }
        CPU_NO_CARRY
        for (size_t j = 0; j < FEW; j++) {
            move_by(&values[i + j], q[i + j], step[j], &r);
        }
    }
    for (; i < n; i++) {
        move_by(&values[i], q[i], r.column_step ? r.row_step * r.column_step[i] : r.row_step, &r);
    }
}

CPU_LOOP static void lattice_residual(float *residual, const float *now, const float *previous,
                                      const float *low_rank, size_t n, const lattice_run *run) {
#define BODY(low, step_expression)                                                                    \
    CPU_NO_CARRY for (size_t i = 0; i < n; i++) {                                                     \
        float step = step_expression;                                                                 \
        float from = scalar_move(previous[i], lattice_low(low, step, run), run->unit, run->per_unit); \
        float r = (now[i] - from) * run->per_unit / step;                                             \
        residual[i] = scalar_magnitude(r) < LATTICE_LIMIT ? r : 0.0f;                                 \
    }
    LATTICE_CASES(BODY);
#undef BODY
}

CPU_LOOP static void quantise(int32_t *q, const float *residual, const float up[3], size_t n) {
    const float one = up[0], two = 1.0f + up[1], add = 1.0f - up[2];
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        float at = scalar_magnitude(residual[i]);
        float more = at + add;
        more = more < 2.0f ? 2.0f : more;
        int32_t level = (int32_t)(more < LATTICE_LIMIT ? more : 0.0f);
        level = at < two ? 1 : level;
        level = at < one ? 0 : level;
        q[i] = residual[i] < 0.0f ? -level : level;
    }
}

/* Without a parent all start from the level of birth. */
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

/* Four components at a time, so that sums are read and written less often; zeros of a sparse factor cost nothing. */
CPU_LOOP static void add_products(float *sums, const float *left, const float *right, size_t rank,
                                  size_t columns) {
    size_t k = 0;
    for (; k + 4 <= rank; k += 4) {
        const float a = left[k], b = left[k + 1], c = left[k + 2], d = left[k + 3];
        const float *r = right + k * columns;
        if (a == 0.0f && b == 0.0f && c == 0.0f && d == 0.0f) {
            continue;
        }
        CPU_NO_CARRY
        for (size_t j = 0; j < columns; j++) {
            sums[j] += (a * r[j] + b * r[columns + j]) + (c * r[2 * columns + j] + d * r[3 * columns + j]);
        }
    }
    for (; k < rank; k++) {
        const float a = left[k], *r = right + k * columns;
        CPU_NO_CARRY
        for (size_t j = 0; j < columns; j++) {
            sums[j] += a * r[j];
        }
    }
}
static void products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                     size_t columns) {
    memset(sums, 0, rows * columns * sizeof(float));
    for (size_t i = 0; i < rows; i++) {
        add_products(sums + i * columns, left + i * rank, right, rank, columns);
    }
}
