/*
 * Operations on single elements: residuals, rotations, contexts, casts, optimizer steps. A thread takes the
 * elements in 16 bytes of each input, and accesses them at once. If addresses do not allow that, it reads and
 * writes the elements one by one.
 */
#ifndef KERNELS_CUDA_ELEMENTS_H
#define KERNELS_CUDA_ELEMENTS_H

#include "kernels/cuda/launch.h"
#include "kernels/scalar_lattice.h"

typedef struct element_spans {
    device_span span[DEVICE_SPANS];
} element_spans;

typedef struct step_spans {
    device_span span[DEVICE_SPANS];
    scalar_step step;
} step_spans;

#define ELEMENT_BYTES 16u /* per thread and input */

DEVICE_FN bool elements_aligned(const void *address, size_t bytes) {
    return (uintptr_t)address % bytes == 0;
}

/* Number of elements of a type in 16 bytes. */
#define ELEMENTS_OF(type) (ELEMENT_BYTES / (uint32_t)sizeof(type))
/* n elements of `type`, accessed at once; n elements of the input type have 16 bytes. */
#define DEFINE_LANES(name, type, n)                   \
    typedef struct ALIGNED(sizeof(type) * (n)) name { \
        type at[n];                                   \
    } name;

/*
 * to[i] = an expression of a (from[i]), b (first[i]) and c (second[i]), in memory order. IN, OUT: types of
 * elements; inputs: number of arrays read.
 */
#define DEFINE_ELEMENTS(name, arguments, IN, OUT, inputs, expression)                            \
    DEFINE_LANES(name##_in, IN, ELEMENTS_OF(IN))                                                 \
    DEFINE_LANES(name##_out, OUT, ELEMENTS_OF(IN))                                               \
    DEVICE_FN OUT name##_of(const arguments *all, IN a, IN b, IN c) {                            \
        (void)all, (void)b, (void)c;                                                             \
        return (OUT)(expression);                                                                \
    }                                                                                            \
    DEVICE_FN void name##_one(const arguments *all, const device_span *s, uint64_t i) {          \
        const IN a = ((const IN *)s->from)[i];                                                   \
        const IN b = (inputs) > 1 ? ((const IN *)s->first)[i] : a;                               \
        const IN c = (inputs) > 2 ? ((const IN *)s->second)[i] : a;                              \
        ((OUT *)s->to)[i] = name##_of(all, a, b, c);                                             \
    }                                                                                            \
    DEVICE_FN void name##_many(const arguments *all, const device_span *s, uint64_t i) {         \
        name##_in a = *(const name##_in *)(const void *)((const IN *)s->from + i), b = a, c = a; \
        name##_out to;                                                                           \
        if ((inputs) > 1) {                                                                      \
            b = *(const name##_in *)(const void *)((const IN *)s->first + i);                    \
        }                                                                                        \
        if ((inputs) > 2) {                                                                      \
            c = *(const name##_in *)(const void *)((const IN *)s->second + i);                   \
        }                                                                                        \
        UNROLL for (uint32_t j = 0; j < ELEMENTS_OF(IN); j++) {                                  \
            to.at[j] = name##_of(all, a.at[j], b.at[j], c.at[j]);                                \
        }                                                                                        \
        *(name##_out *)(void *)((OUT *)s->to + i) = to;                                          \
    }                                                                                            \
    DEVICE_FN void name(const place *at, const arguments *all) {                                 \
        const device_span *s = &all->span[at->span];                                             \
        const uint32_t each = ELEMENTS_OF(IN);                                                   \
        uint64_t i = ((uint64_t)at->block * LAUNCH_THREADS + at->thread) * each;                 \
        bool together = elements_aligned(s->to, sizeof(name##_out)) &&                           \
                        elements_aligned(s->from, ELEMENT_BYTES) &&                              \
                        elements_aligned((inputs) > 1 ? s->first : NULL, ELEMENT_BYTES) &&       \
                        elements_aligned((inputs) > 2 ? s->second : NULL, ELEMENT_BYTES);        \
        if (together && i + each <= s->n) {                                                      \
            name##_many(all, s, i);                                                              \
            return;                                                                              \
        }                                                                                        \
        for (uint64_t end = i + each; i < end && i < s->n; i++) {                                \
            name##_one(all, s, i);                                                               \
        }                                                                                        \
    }                                                                                            \
    KERNEL(name, arguments)

DEFINE_ELEMENTS(copy_8, element_spans, uint8_t, uint8_t, 1, a)

#define DEFINE_WIDTH_ELEMENTS(width, type)                                                  \
    DEFINE_ELEMENTS(residual_##width, element_spans, type, type, 2, a - b)                  \
    DEFINE_ELEMENTS(apply_##width, element_spans, type, type, 2, a + b)                     \
    DEFINE_ELEMENTS(rotate_##width, element_spans, type, type, 1, scalar_rotate_##width(a)) \
    DEFINE_ELEMENTS(unrotate_##width, element_spans, type, type, 1, scalar_unrotate_##width(a))
DEFINE_WIDTH_ELEMENTS(8, uint8_t)
DEFINE_WIDTH_ELEMENTS(16, uint16_t)
DEFINE_WIDTH_ELEMENTS(32, uint32_t)
DEFINE_WIDTH_ELEMENTS(64, uint64_t)

#define DEFINE_CONTEXT_ELEMENTS(name, type, function) \
    DEFINE_ELEMENTS(context_##name, element_spans, type, uint8_t, 1, function(a))
DEFINE_CONTEXT_ELEMENTS(f64, uint64_t, scalar_context_f64)
DEFINE_CONTEXT_ELEMENTS(f32, uint32_t, scalar_context_f32)
DEFINE_CONTEXT_ELEMENTS(f16, uint16_t, scalar_context_f16)
DEFINE_CONTEXT_ELEMENTS(bf16, uint16_t, scalar_context_bf16)
DEFINE_CONTEXT_ELEMENTS(f8_e4m3, uint8_t, scalar_context_f8_e4m3)
DEFINE_CONTEXT_ELEMENTS(f8_e5m2, uint8_t, scalar_context_f8_e5m2)
DEFINE_CONTEXT_ELEMENTS(i64, int64_t, scalar_context_signed)
DEFINE_CONTEXT_ELEMENTS(i32, int32_t, scalar_context_signed)
DEFINE_CONTEXT_ELEMENTS(i16, int16_t, scalar_context_signed)
DEFINE_CONTEXT_ELEMENTS(i8, int8_t, scalar_context_signed)
DEFINE_CONTEXT_ELEMENTS(u64, uint64_t, scalar_context_unsigned)
DEFINE_CONTEXT_ELEMENTS(u32, uint32_t, scalar_context_unsigned)
DEFINE_CONTEXT_ELEMENTS(u16, uint16_t, scalar_context_unsigned)
DEFINE_CONTEXT_ELEMENTS(u8, uint8_t, scalar_context_unsigned)

DEFINE_ELEMENTS(cast_f32_bf16, element_spans, uint32_t, uint16_t, 1, scalar_bf16_from_f32(a))
DEFINE_ELEMENTS(cast_f32_f16, element_spans, uint32_t, uint16_t, 1, scalar_f16_from_f32(a))
DEFINE_ELEMENTS(cast_f64_f32, element_spans, uint64_t, uint32_t, 1, scalar_f32_from_f64(a))
DEFINE_ELEMENTS(widen_f16, element_spans, uint16_t, uint32_t, 1, scalar_f32_from_f16(a))
DEFINE_ELEMENTS(widen_bf16, element_spans, uint16_t, uint32_t, 1, (uint32_t)a << 16)
DEFINE_ELEMENTS(widen_f32, element_spans, uint32_t, uint32_t, 1, a)
DEFINE_ELEMENTS(widen_i8, element_spans, uint8_t, uint32_t, 1, scalar_bits((float)(int8_t)a))

/* ---- optimizer steps: one kernel per rule of FORMAT.md ---- */

#define DEFINE_STEP_ELEMENTS(rule, inputs, expression)                                     \
    DEVICE_FN uint32_t predicted_##rule(const scalar_step *s, float x, float a, float b) { \
        (void)b;                                                                           \
        return scalar_prediction(scalar_bits(expression));                                 \
    }                                                                                      \
    DEFINE_ELEMENTS(step_##rule, step_spans, float, uint32_t, inputs, predicted_##rule(&all->step, a, b, c))
#define DEFINE_SQUARE_ELEMENTS(k, lerp, mul)                                              \
    DEFINE_STEP_ELEMENTS(lerp, 3, scalar_square_##k(s, x, scalar_gradient_lerp(s, a, b))) \
    DEFINE_STEP_ELEMENTS(mul, 3, scalar_square_##k(s, x, scalar_gradient_mul(s, a, b)))
DEFINE_SQUARE_ELEMENTS(0, 1, 6)
DEFINE_SQUARE_ELEMENTS(1, 2, 7)
DEFINE_SQUARE_ELEMENTS(2, 3, 8)
DEFINE_SQUARE_ELEMENTS(3, 4, 9)
DEFINE_SQUARE_ELEMENTS(4, 5, 10)
DEFINE_STEP_ELEMENTS(17, 3, scalar_adam_0(s, x, a, b))
DEFINE_STEP_ELEMENTS(18, 3, scalar_adam_1(s, x, a, b))
DEFINE_STEP_ELEMENTS(19, 3, scalar_adam_2(s, x, a, b))
DEFINE_STEP_ELEMENTS(20, 3, scalar_adam_3(s, x, a, b))
DEFINE_STEP_ELEMENTS(21, 3, scalar_adam_4(s, x, a, b))
DEFINE_STEP_ELEMENTS(22, 3, scalar_adam_5(s, x, a, b))
DEFINE_STEP_ELEMENTS(33, 2, scalar_sgd_0(s, x, a))
DEFINE_STEP_ELEMENTS(34, 2, scalar_sgd_1(s, x, a))
DEFINE_STEP_ELEMENTS(35, 3, scalar_sgd_0(s, x, scalar_nesterov(s, a, b)))
DEFINE_STEP_ELEMENTS(36, 3, scalar_sgd_1(s, x, scalar_nesterov(s, a, b)))
DEFINE_STEP_ELEMENTS(49, 2, scalar_moment_0(s, x, a))
DEFINE_STEP_ELEMENTS(50, 2, scalar_moment_1(s, x, a))
DEFINE_STEP_ELEMENTS(51, 2, scalar_moment_2(s, x, a))
DEFINE_STEP_ELEMENTS(52, 2, scalar_moment_3(s, x, a))
DEFINE_STEP_ELEMENTS(53, 2, scalar_moment_4(s, x, a))
DEFINE_STEP_ELEMENTS(54, 2, scalar_moment_5(s, x, a))
DEFINE_STEP_ELEMENTS(55, 2, scalar_momentum_0(s, x, a))
DEFINE_STEP_ELEMENTS(56, 2, scalar_momentum_1(s, x, a))
DEFINE_STEP_ELEMENTS(65, 3, scalar_square_0(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP_ELEMENTS(66, 3, scalar_square_1(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP_ELEMENTS(67, 3, scalar_square_2(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP_ELEMENTS(68, 3, scalar_square_3(s, x, scalar_gradient_bf16(s, a, b)))
DEFINE_STEP_ELEMENTS(69, 3, scalar_square_4(s, x, scalar_gradient_bf16(s, a, b)))

/* ---- choice of the kernel ---- */

typedef device_result (*elements_launch)(const device_queue *, uint32_t, uint32_t, const element_spans *,
                                         device_failure *);
typedef device_result (*step_launch)(const device_queue *, uint32_t, uint32_t, const step_spans *,
                                     device_failure *);

#define BY_WIDTH(name, size)          \
    ((size) == 1   ? name##_8_launch  \
     : (size) == 2 ? name##_16_launch \
     : (size) == 4 ? name##_32_launch \
                   : name##_64_launch)

static inline bool elements_are_float(ckd_dtype dtype) {
    return dtype >= CKD_F64 && dtype <= CKD_F8_E5M2;
}

static inline elements_launch context_launch_of(ckd_dtype dtype) {
    switch (dtype) {
    case CKD_F64:
        return context_f64_launch;
    case CKD_F32:
        return context_f32_launch;
    case CKD_F16:
        return context_f16_launch;
    case CKD_BF16:
        return context_bf16_launch;
    case CKD_F8_E4M3:
        return context_f8_e4m3_launch;
    case CKD_F8_E5M2:
        return context_f8_e5m2_launch;
    case CKD_I64:
        return context_i64_launch;
    case CKD_I32:
        return context_i32_launch;
    case CKD_I16:
        return context_i16_launch;
    case CKD_I8:
        return context_i8_launch;
    case CKD_U64:
        return context_u64_launch;
    case CKD_U32:
        return context_u32_launch;
    case CKD_U16:
        return context_u16_launch;
    default:
        return context_u8_launch;
    }
}

static inline elements_launch cast_launch_of(ckd_dtype to, ckd_dtype from) {
    if (from == CKD_F32) {
        return to == CKD_BF16 ? cast_f32_bf16_launch : (to == CKD_F16 ? cast_f32_f16_launch : NULL);
    }
    return from == CKD_F64 && to == CKD_F32 ? cast_f64_f32_launch : NULL;
}

/* Returns the launch of a rule from 49 to 69, which has a gradient scale; NULL: there is none. */
static inline step_launch gradient_launch_of(uint32_t rule) {
    switch (rule) {
    case 49:
        return step_49_launch;
    case 50:
        return step_50_launch;
    case 51:
        return step_51_launch;
    case 52:
        return step_52_launch;
    case 53:
        return step_53_launch;
    case 54:
        return step_54_launch;
    case 55:
        return step_55_launch;
    case 56:
        return step_56_launch;
    case 65:
        return step_65_launch;
    case 66:
        return step_66_launch;
    case 67:
        return step_67_launch;
    case 68:
        return step_68_launch;
    case 69:
        return step_69_launch;
    default:
        return NULL;
    }
}

static inline step_launch step_launch_of(uint32_t rule) {
    switch (rule) {
    case 1:
        return step_1_launch;
    case 2:
        return step_2_launch;
    case 3:
        return step_3_launch;
    case 4:
        return step_4_launch;
    case 5:
        return step_5_launch;
    case 6:
        return step_6_launch;
    case 7:
        return step_7_launch;
    case 8:
        return step_8_launch;
    case 9:
        return step_9_launch;
    case 10:
        return step_10_launch;
    case 17:
        return step_17_launch;
    case 18:
        return step_18_launch;
    case 19:
        return step_19_launch;
    case 20:
        return step_20_launch;
    case 21:
        return step_21_launch;
    case 22:
        return step_22_launch;
    case 33:
        return step_33_launch;
    case 34:
        return step_34_launch;
    case 35:
        return step_35_launch;
    case 36:
        return step_36_launch;
    default:
        return gradient_launch_of(rule);
    }
}

/* Returns NULL if there is no kernel. size: of an input element. */
static inline elements_launch elements_launch_of(const device_elements *what, size_t size) {
    bool turned = elements_are_float(what->dtype);
    switch (what->operation) {
    case DEVICE_COPY:
        return size == 1 ? copy_8_launch : NULL;
    case DEVICE_RESIDUAL:
        return BY_WIDTH(residual, size);
    case DEVICE_APPLY:
        return BY_WIDTH(apply, size);
    case DEVICE_ROTATE:
        return turned ? BY_WIDTH(rotate, size) : NULL;
    case DEVICE_UNROTATE:
        return turned ? BY_WIDTH(unrotate, size) : NULL;
    case DEVICE_CONTEXT:
        return context_launch_of(what->dtype);
    case DEVICE_CAST:
        return cast_launch_of(what->to_dtype, what->dtype);
    case DEVICE_WIDEN:
        return what->dtype == CKD_F16    ? widen_f16_launch
               : what->dtype == CKD_BF16 ? widen_bf16_launch
               : what->dtype == CKD_F32  ? widen_f32_launch
               : what->dtype == CKD_I8   ? widen_i8_launch
                                         : NULL;
    default:
        return NULL;
    }
}

/* Equals ckd_dtype_size, which the backend is not linked with. */
static inline size_t elements_size(ckd_dtype dtype) {
    static const uint8_t sizes[] = {0, 8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1};
    return (size_t)dtype < sizeof(sizes) ? sizes[dtype] : 0;
}

static device_result run_elements(const device_queue *queue, bool *known, const device_elements *what,
                                  const device_span *spans, uint32_t count, device_failure *why) {
    size_t size = elements_size(what->dtype);
    elements_launch launch = size ? elements_launch_of(what, size) : NULL;
    step_launch step = what->operation == DEVICE_STEP ? step_launch_of(what->rule->rule) : NULL;
    uint64_t max = 0;
    step_spans all;
    *known = launch || step;
    for (uint32_t i = 0; i < count && i < DEVICE_SPANS; i++) {
        all.span[i] = spans[i];
        max = spans[i].n > max ? spans[i].n : max;
    }
    if (!*known || max == 0) {
        return DEVICE_DONE;
    }
    uint32_t blocks = launch_blocks((max + ELEMENT_BYTES / size - 1) / (ELEMENT_BYTES / size));
    if (step) {
        all.step = scalar_step_of(what->rule->coefficients);
        return step(queue, blocks, count, &all, why);
    }
    element_spans plain;
    memcpy(plain.span, all.span, sizeof(plain.span));
    return launch(queue, blocks, count, &plain, why);
}

#endif
