/*
 * The CPU backend: one loop per function and dtype, written so that compilers vectorise it. Not an ordinary
 * header: one .c file per instruction set defines CPU_TABLE, CPU_NAME and CPU_TARGET, and includes it.
 *
 * Elements are read and written with memcpy: buffers need no alignment, and compilers emit plain moves.
 */
#include <math.h>
#include <string.h>

#include "kernels/blas.h"
#include "kernels/cpu.h"
#include "kernels/scalar.h"

/*
 * CPU_LOOP: vectorised at any optimisation level of the build; clang does so from -O2 on. CPU_NO_CARRY:
 * buffers are separate or identical, so no element depends on another one.
 */
#if defined(__GNUC__) && !defined(__clang__)
#define CPU_LOOP     CPU_TARGET __attribute__((optimize("O3", "no-trapping-math", "fp-contract=off")))
#define CPU_NO_CARRY _Pragma("GCC ivdep")
#else
#define CPU_LOOP     CPU_TARGET
#define CPU_NO_CARRY _Pragma("clang loop vectorize(assume_safety)")
#endif

#define LOAD(type, name, from, i) \
    type name;                    \
    memcpy(&name, (const uint8_t *)(from) + (i) * sizeof(type), sizeof(type))
#define STORE(type, to, i, value)                                             \
    do {                                                                      \
        type stored_ = (type)(value);                                         \
        memcpy((uint8_t *)(to) + (i) * sizeof(type), &stored_, sizeof(type)); \
    } while (0)

/* ---- residuals and rotations, by width ---- */

#define DEFINE_RESIDUAL(width)                                                                       \
    CPU_LOOP static void residual_##width(void *residual, const void *current, const void *previous, \
                                          size_t n) {                                                \
        CPU_NO_CARRY                                                                                 \
        for (size_t i = 0; i < n; i++) {                                                             \
            LOAD(uint##width##_t, a, current, i);                                                    \
            LOAD(uint##width##_t, b, previous, i);                                                   \
            STORE(uint##width##_t, residual, i, a - b);                                              \
        }                                                                                            \
    }                                                                                                \
    CPU_LOOP static void apply_##width(void *current, const void *previous, const void *residual,    \
                                       size_t n) {                                                   \
        CPU_NO_CARRY                                                                                 \
        for (size_t i = 0; i < n; i++) {                                                             \
            LOAD(uint##width##_t, a, previous, i);                                                   \
            LOAD(uint##width##_t, b, residual, i);                                                   \
            STORE(uint##width##_t, current, i, a + b);                                               \
        }                                                                                            \
    }
#define DEFINE_ROTATE(width)                                                             \
    CPU_LOOP static void rotate_##width(void *rotated, const void *values, size_t n) {   \
        CPU_NO_CARRY                                                                     \
        for (size_t i = 0; i < n; i++) {                                                 \
            LOAD(uint##width##_t, a, values, i);                                         \
            STORE(uint##width##_t, rotated, i, scalar_rotate_##width(a));                \
        }                                                                                \
    }                                                                                    \
    CPU_LOOP static void unrotate_##width(void *values, const void *rotated, size_t n) { \
        CPU_NO_CARRY                                                                     \
        for (size_t i = 0; i < n; i++) {                                                 \
            LOAD(uint##width##_t, a, rotated, i);                                        \
            STORE(uint##width##_t, values, i, scalar_unrotate_##width(a));               \
        }                                                                                \
    }
#define DEFINE_WIDTH(width) \
    DEFINE_RESIDUAL(width)  \
    DEFINE_ROTATE(width)

DEFINE_WIDTH(8)
DEFINE_WIDTH(16)
DEFINE_WIDTH(32)
DEFINE_WIDTH(64)

/* ---- contexts, by dtype ---- */

#define DEFINE_CONTEXT(name, type, function)                                              \
    CPU_LOOP static void context_##name(uint8_t *context, const void *values, size_t n) { \
        CPU_NO_CARRY                                                                      \
        for (size_t i = 0; i < n; i++) {                                                  \
            LOAD(type, a, values, i);                                                     \
            context[i] = function(a);                                                     \
        }                                                                                 \
    }
DEFINE_CONTEXT(f64, uint64_t, scalar_context_f64)
DEFINE_CONTEXT(f32, uint32_t, scalar_context_f32)
DEFINE_CONTEXT(f16, uint16_t, scalar_context_f16)
DEFINE_CONTEXT(bf16, uint16_t, scalar_context_bf16)
DEFINE_CONTEXT(f8_e4m3, uint8_t, scalar_context_f8_e4m3)
DEFINE_CONTEXT(f8_e5m2, uint8_t, scalar_context_f8_e5m2)
DEFINE_CONTEXT(i64, int64_t, scalar_context_signed)
DEFINE_CONTEXT(i32, int32_t, scalar_context_signed)
DEFINE_CONTEXT(i16, int16_t, scalar_context_signed)
DEFINE_CONTEXT(i8, int8_t, scalar_context_signed)
DEFINE_CONTEXT(u64, uint64_t, scalar_context_unsigned)
DEFINE_CONTEXT(u32, uint32_t, scalar_context_unsigned)
DEFINE_CONTEXT(u16, uint16_t, scalar_context_unsigned)
DEFINE_CONTEXT(u8, uint8_t, scalar_context_unsigned)

/* ---- values that are not finite ---- */

/*
 * All bits of `mask` are set in NaNs and infinities, and in no other value. Sums have the elements' width, which
 * vectorises best. To avoid overflow, each takes at most `max` elements.
 */
#define DEFINE_NONFINITE(width, max)                                                                 \
    CPU_LOOP static uint64_t nonfinite_##width(const void *values, size_t n, uint##width##_t mask) { \
        uint64_t count = 0;                                                                          \
        for (size_t first = 0; first < n; first += (max)) {                                          \
            size_t end = n - first < (max) ? n : first + (max);                                      \
            uint##width##_t sum = 0;                                                                 \
            for (size_t i = first; i < end; i++) {                                                   \
                LOAD(uint##width##_t, a, values, i);                                                 \
                sum = (uint##width##_t)(sum + ((a & mask) == mask));                                 \
            }                                                                                        \
            count += sum;                                                                            \
        }                                                                                            \
        return count;                                                                                \
    }
DEFINE_NONFINITE(8, 128)
DEFINE_NONFINITE(16, 16384)
DEFINE_NONFINITE(32, 16384)
DEFINE_NONFINITE(64, 16384)

static uint64_t count_nonfinite(ckd_dtype dtype, const void *values, size_t n) {
    switch (dtype) {
    case CKD_F64:
        return nonfinite_64(values, n, UINT64_C(0x7ff0000000000000));
    case CKD_F32:
        return nonfinite_32(values, n, UINT32_C(0x7f800000));
    case CKD_F16:
        return nonfinite_16(values, n, 0x7c00);
    case CKD_BF16:
        return nonfinite_16(values, n, 0x7f80);
    case CKD_F8_E4M3: /* it has no infinities */
        return nonfinite_8(values, n, 0x7f);
    case CKD_F8_E5M2:
        return nonfinite_8(values, n, 0x7c);
    default:
        return 0;
    }
}

/* ---- casts ---- */

#define DEFINE_CAST(name, narrow, wide, function)                    \
    CPU_LOOP static void name(void *out, const void *in, size_t n) { \
        CPU_NO_CARRY                                                 \
        for (size_t i = 0; i < n; i++) {                             \
            LOAD(wide, a, in, i);                                    \
            STORE(narrow, out, i, function(a));                      \
        }                                                            \
    }
DEFINE_CAST(cast_f32_bf16, uint16_t, uint32_t, scalar_bf16_from_f32)
DEFINE_CAST(cast_f32_f16, uint16_t, uint32_t, scalar_f16_from_f32)
DEFINE_CAST(cast_f64_f32, uint32_t, uint64_t, scalar_f32_from_f64)

#include "kernels/lattice_loops.h"
#include "kernels/products_loops.h"
#include "kernels/low_rank_loops.h"
#include "kernels/sums_loops.h"
#include "kernels/tile_loops.h"

/* ---- optimizer steps: one loop per rule ---- */

#define DEFINE_STEP(name, expression)                                                                    \
    CPU_LOOP static void step_##name(const scalar_step *rule, void *out, const void *parent_values,      \
                                     const void *first, const void *second, size_t n) {                  \
        const scalar_step copy = *rule, *const s = &copy; /* so that writes to `out` do not change it */ \
        CPU_NO_CARRY                                                                                     \
        for (size_t i = 0; i < n; i++) {                                                                 \
            LOAD(float, x, parent_values, i);                                                            \
            LOAD(float, a, first, i);                                                                    \
            LOAD(float, b, second, i);                                                                   \
            float predicted = expression;                                                                \
            uint32_t bits;                                                                               \
            memcpy(&bits, &predicted, sizeof(bits));                                                     \
            STORE(uint32_t, out, i, scalar_prediction(bits));                                            \
        }                                                                                                \
    }
#define DEFINE_SQUARE(k)                                                          \
    DEFINE_STEP(lerp_##k, scalar_square_##k(s, x, scalar_gradient_lerp(s, a, b))) \
    DEFINE_STEP(mul_##k, scalar_square_##k(s, x, scalar_gradient_mul(s, a, b)))
DEFINE_SQUARE(0)
DEFINE_SQUARE(1)
DEFINE_SQUARE(2)
DEFINE_SQUARE(3)
DEFINE_SQUARE(4)
DEFINE_STEP(adam_0, scalar_adam_0(s, x, a, b))
DEFINE_STEP(adam_1, scalar_adam_1(s, x, a, b))
DEFINE_STEP(adam_2, scalar_adam_2(s, x, a, b))
DEFINE_STEP(adam_3, scalar_adam_3(s, x, a, b))
DEFINE_STEP(adam_4, scalar_adam_4(s, x, a, b))
DEFINE_STEP(adam_5, scalar_adam_5(s, x, a, b))
DEFINE_STEP(sgd_0, ((void)b, scalar_sgd_0(s, x, a)))
DEFINE_STEP(sgd_1, ((void)b, scalar_sgd_1(s, x, a)))
DEFINE_STEP(nesterov_0, scalar_sgd_0(s, x, scalar_nesterov(s, a, b)))
DEFINE_STEP(nesterov_1, scalar_sgd_1(s, x, scalar_nesterov(s, a, b)))
DEFINE_STEP(moment_0, ((void)b, scalar_moment_0(s, x, a)))
DEFINE_STEP(moment_1, ((void)b, scalar_moment_1(s, x, a)))
DEFINE_STEP(moment_2, ((void)b, scalar_moment_2(s, x, a)))
DEFINE_STEP(moment_3, ((void)b, scalar_moment_3(s, x, a)))
DEFINE_STEP(moment_4, ((void)b, scalar_moment_4(s, x, a)))
DEFINE_STEP(moment_5, ((void)b, scalar_moment_5(s, x, a)))
DEFINE_STEP(momentum_0, ((void)b, scalar_momentum_0(s, x, a)))
DEFINE_STEP(momentum_1, ((void)b, scalar_momentum_1(s, x, a)))
DEFINE_STEP(bf16_0, scalar_square_0(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP(bf16_1, scalar_square_1(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP(bf16_2, scalar_square_2(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP(bf16_3, scalar_square_3(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP(bf16_4, scalar_square_4(s, x, scalar_gradient_bf16(s, a, b)))

typedef void (*step_loop)(const scalar_step *, void *, const void *, const void *, const void *, size_t);

/* By rule number. */
static const step_loop step_loops[] = {
    [1] = step_lerp_0,    [2] = step_lerp_1,    [3] = step_lerp_2,      [4] = step_lerp_3,
    [5] = step_lerp_4,    [6] = step_mul_0,     [7] = step_mul_1,       [8] = step_mul_2,
    [9] = step_mul_3,     [10] = step_mul_4,    [17] = step_adam_0,     [18] = step_adam_1,
    [19] = step_adam_2,   [20] = step_adam_3,   [21] = step_adam_4,     [22] = step_adam_5,
    [33] = step_sgd_0,    [34] = step_sgd_1,    [35] = step_nesterov_0, [36] = step_nesterov_1,
    [49] = step_moment_0, [50] = step_moment_1, [51] = step_moment_2,   [52] = step_moment_3,
    [53] = step_moment_4, [54] = step_moment_5, [55] = step_momentum_0, [56] = step_momentum_1,
    [65] = step_bf16_0,   [66] = step_bf16_1,   [67] = step_bf16_2,     [68] = step_bf16_3,
    [69] = step_bf16_4,
};

static bool optimizer_step(const step_rule *rule, void *out, const void *parent_values, const void *first,
                           const void *second, size_t n) {
    size_t known = sizeof(step_loops) / sizeof(step_loops[0]);
    step_loop loop = rule->rule < known ? step_loops[rule->rule] : NULL;
    if (!loop) {
        return false;
    }
    scalar_step s = scalar_step_of(rule->coefficients);
    loop(&s, out, parent_values, first, second ? second : first, n);
    return true;
}

/* ---- the table's functions: choose the loop ---- */

typedef void (*binary_loop)(void *, const void *, const void *, size_t);
typedef void (*unary_loop)(void *, const void *, size_t);
typedef void (*context_loop)(uint8_t *, const void *, size_t);

typedef struct dtype_loops {
    binary_loop residual, apply;
    unary_loop rotate, unrotate; /* NULL: values stay as they are */
    context_loop context;
    size_t size;
} dtype_loops;

#define FLOAT_LOOPS(width, name) \
    { residual_##width, apply_##width, rotate_##width, unrotate_##width, context_##name, (width) / 8 }
#define INTEGER_LOOPS(width, name) \
    { residual_##width, apply_##width, NULL, NULL, context_##name, (width) / 8 }

static const dtype_loops loops_of[] = {
    [CKD_F64] = FLOAT_LOOPS(64, f64),        [CKD_F32] = FLOAT_LOOPS(32, f32),
    [CKD_F16] = FLOAT_LOOPS(16, f16),        [CKD_BF16] = FLOAT_LOOPS(16, bf16),
    [CKD_F8_E4M3] = FLOAT_LOOPS(8, f8_e4m3), [CKD_F8_E5M2] = FLOAT_LOOPS(8, f8_e5m2),
    [CKD_I64] = INTEGER_LOOPS(64, i64),      [CKD_I32] = INTEGER_LOOPS(32, i32),
    [CKD_I16] = INTEGER_LOOPS(16, i16),      [CKD_I8] = INTEGER_LOOPS(8, i8),
    [CKD_U64] = INTEGER_LOOPS(64, u64),      [CKD_U32] = INTEGER_LOOPS(32, u32),
    [CKD_U16] = INTEGER_LOOPS(16, u16),      [CKD_U8] = INTEGER_LOOPS(8, u8),
    [CKD_BOOL] = INTEGER_LOOPS(8, u8),
};

/* Returns NULL for an invalid dtype; the functions then do nothing. */
static const dtype_loops *loops_for(ckd_dtype dtype) {
    size_t known = sizeof(loops_of) / sizeof(loops_of[0]);
    return (size_t)dtype < known && loops_of[dtype].size ? &loops_of[dtype] : NULL;
}

static void ordered_residual(ckd_dtype dtype, void *residual, const void *current, const void *previous,
                             size_t n) {
    const dtype_loops *loops = loops_for(dtype);
    if (loops) {
        loops->residual(residual, current, previous, n);
    }
}

static void ordered_apply(ckd_dtype dtype, void *current, const void *previous, const void *residual,
                          size_t n) {
    const dtype_loops *loops = loops_for(dtype);
    if (loops) {
        loops->apply(current, previous, residual, n);
    }
}

static void rotate_or_copy(unary_loop rotate, size_t element, void *to, const void *from, size_t n) {
    if (rotate) {
        rotate(to, from, n);
    } else if (n && to != from) {
        memcpy(to, from, n * element);
    }
}

static void rotate_sign(ckd_dtype dtype, void *rotated, const void *values, size_t n) {
    const dtype_loops *loops = loops_for(dtype);
    if (loops) {
        rotate_or_copy(loops->rotate, loops->size, rotated, values, n);
    }
}

static void unrotate_sign(ckd_dtype dtype, void *values, const void *rotated, size_t n) {
    const dtype_loops *loops = loops_for(dtype);
    if (loops) {
        rotate_or_copy(loops->unrotate, loops->size, values, rotated, n);
    }
}

static void magnitude_context(ckd_dtype dtype, uint8_t *context, const void *values, size_t n) {
    const dtype_loops *loops = loops_for(dtype);
    if (loops) {
        loops->context(context, values, n);
    }
}

static bool cast(ckd_dtype to, void *out, ckd_dtype from, const void *in, size_t n) {
    unary_loop loop = NULL;
    if (from == CKD_F32) {
        loop = to == CKD_BF16 ? cast_f32_bf16 : (to == CKD_F16 ? cast_f32_f16 : NULL);
    } else if (from == CKD_F64 && to == CKD_F32) {
        loop = cast_f64_f32;
    }
    if (!loop) {
        return false;
    }
    loop(out, in, n);
    return true;
}

const kernels CPU_TABLE = {
    .version = KERNELS_VERSION,
    .name = CPU_NAME,
    .ordered_residual = ordered_residual,
    .ordered_apply = ordered_apply,
    .rotate_sign = rotate_sign,
    .unrotate_sign = unrotate_sign,
    .magnitude_context = magnitude_context,
    .cast = cast,
    .optimizer_step = optimizer_step,
    .widen = widen,
    .lattice_apply = lattice_apply,
    .lattice_values = lattice_values,
    .widen_integers = widen_integers,
    .lattice_apply_q8 = lattice_apply_q8,
    .lattice_residual = lattice_residual,
    .products = products,
    .low_rank_apply = low_rank_apply,
    .factor_values = factor_values,
    .factor_panels = factor_panels,
    .gemm = gemm,
    .quantise = quantise,
    .level_apply = level_apply,
    .level_quantise = level_quantise,
    .level_of = level_of,
    .sums_of = sums_of,
    .moment_row = moment_row,
    .moment_columns = moment_columns,
    .quantise_q8 = quantise_q8,
    .quantise_run = quantise_run,
    .error_of = error_of,
    .beyond = beyond,
    .level_fill = level_fill,
    .bins_of = bins_of,
    .count_nonfinite = count_nonfinite,
};
