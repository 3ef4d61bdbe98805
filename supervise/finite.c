/* Are the weights and moments of a checkpoint finite? It loads them, a part of a tensor at a time. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define PART ((uint64_t)4 << 20) /* elements */

/* The bits of a dtype, and its exponent. A value is finite unless all bits of the exponent are set. */
typedef struct float_format {
    size_t bytes;
    uint64_t exponent;
} float_format;

/* bytes is 0 for dtypes that have no infinities or NaNs. */
static float_format format_of(ckd_dtype dtype) {
    switch (dtype) {
    case CKD_F64:
        return (float_format){8, UINT64_C(0x7ff) << 52};
    case CKD_F32:
        return (float_format){4, UINT64_C(0xff) << 23};
    case CKD_F16:
        return (float_format){2, 0x7c00};
    case CKD_BF16:
        return (float_format){2, 0x7f80};
    case CKD_F8_E4M3: /* no infinities; its NaNs have all bits set but the sign */
        return (float_format){1, 0x7f};
    case CKD_F8_E5M2:
        return (float_format){1, 0x7c};
    default:
        return (float_format){0, 0};
    }
}

#define DEFINE_ALL_FINITE(name, type)                                            \
    static bool name(const uint8_t *values, uint64_t count, uint64_t exponent) { \
        uint64_t found = 0;                                                      \
        for (uint64_t i = 0; i < count; i++) {                                   \
            type bits;                                                           \
            memcpy(&bits, values + i * sizeof(bits), sizeof(bits));              \
            found += (bits & (type)exponent) == (type)exponent;                  \
        }                                                                        \
        return found == 0;                                                       \
    }
DEFINE_ALL_FINITE(all_finite_8, uint8_t)
DEFINE_ALL_FINITE(all_finite_16, uint16_t)
DEFINE_ALL_FINITE(all_finite_32, uint32_t)
DEFINE_ALL_FINITE(all_finite_64, uint64_t)

static bool all_finite(const uint8_t *values, uint64_t count, float_format f) {
    switch (f.bytes) {
    case 8:
        return all_finite_64(values, count, f.exponent);
    case 4:
        return all_finite_32(values, count, f.exponent);
    case 2:
        return all_finite_16(values, count, f.exponent);
    default:
        return all_finite_8(values, count, f.exponent);
    }
}

static bool is_checked(const ckd_tensor_info *t) {
    return (t->role == CKD_ROLE_WEIGHT || t->role == CKD_ROLE_EXP_AVG || t->role == CKD_ROLE_EXP_AVG_SQ ||
            t->role == CKD_ROLE_MASTER) &&
           format_of(t->dtype).bytes > 0;
}

static ckd_status check_tensor(bool *finite, ckd_load *load, const ckd_tensor_info *t, uint8_t *memory,
                               ckd_error *err) {
    float_format f = format_of(t->dtype);
    for (uint64_t at = 0; *finite && at < t->elements; at += PART) {
        uint64_t count = t->elements - at < PART ? t->elements - at : PART;
        ckd_load_request request = CKD_LOAD_REQUEST_INIT;
        request.name = t->name;
        request.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = at, .count = count};
        request.data = memory;
        request.size = (size_t)count * f.bytes;
        ckd_status status = ckd_load_tensor(load, &request, err);
        if (status != CKD_OK) {
            return status;
        }
        *finite = all_finite(memory, count, f);
    }
    return CKD_OK;
}

ckd_status finite_check(char tensor[SUPERVISE_TEXT_MAX], ckd_store *store, const ckd_id *id,
                        const candidates_rule *rule, ckd_error *err) {
    ckd_load *load = NULL;
    uint8_t *memory = malloc(PART * sizeof(uint64_t));
    ckd_status status = memory ? CKD_OK : supervise_error(err, CKD_E_NOMEM, "out of memory");
    bool finite = true;
    tensor[0] = '\0';
    THEN(status, ckd_load_begin(&load, store, id, err));
    const ckd_tensor_list *tensors = status == CKD_OK ? ckd_load_tensors(load) : NULL;
    for (size_t i = 0; status == CKD_OK && finite && i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        if (rule->on_progress && rule->on_progress(rule->progress_context, i, tensors->count)) {
            status = supervise_error(err, CKD_E_CANCELLED, "cancelled");
        } else if (is_checked(t)) {
            status = check_tensor(&finite, load, t, memory, err);
        }
        if (!finite) {
            snprintf(tensor, SUPERVISE_TEXT_MAX, "%s", t->name);
        }
    }
    ckd_load_end(load);
    free(memory);
    return status;
}
