/* Names: of the public enums, of ids, and of runs that branch off other runs. */
#include "engine/common/common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/vocabulary.h"

#define STRINGIFY_(x) #x
#define STRINGIFY(x)  STRINGIFY_(x)

const char *ckd_version(void) {
    return STRINGIFY(CKD_VERSION_MAJOR) "." STRINGIFY(CKD_VERSION_MINOR) "." STRINGIFY(CKD_VERSION_PATCH);
}

const char *ckd_status_name(ckd_status status) {
    switch (status) {
    case CKD_OK:
        return "OK";
    case CKD_E_INVALID:
        return "INVALID";
    case CKD_E_NOMEM:
        return "NOMEM";
    case CKD_E_IO:
        return "IO";
    case CKD_E_NOSPACE:
        return "NOSPACE";
    case CKD_E_NOT_FOUND:
        return "NOT_FOUND";
    case CKD_E_EXISTS:
        return "EXISTS";
    case CKD_E_CORRUPT:
        return "CORRUPT";
    case CKD_E_UNSUPPORTED:
        return "UNSUPPORTED";
    case CKD_E_BUSY:
        return "BUSY";
    case CKD_E_READ_ONLY:
        return "READ_ONLY";
    case CKD_E_STATE:
        return "STATE";
    case CKD_E_MISMATCH:
        return "MISMATCH";
    case CKD_E_CANCELLED:
        return "CANCELLED";
    case CKD_E_DEVICE:
        return "DEVICE";
    }
    return "UNKNOWN";
}

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [CKD_DTYPE_NONE] = {"none", 0}, [CKD_F64] = {"f64", 8},   [CKD_F32] = {"f32", 4},
    [CKD_F16] = {"f16", 2},         [CKD_BF16] = {"bf16", 2}, [CKD_F8_E4M3] = {"f8e4m3", 1},
    [CKD_F8_E5M2] = {"f8e5m2", 1},  [CKD_I64] = {"i64", 8},   [CKD_I32] = {"i32", 4},
    [CKD_I16] = {"i16", 2},         [CKD_I8] = {"i8", 1},     [CKD_U64] = {"u64", 8},
    [CKD_U32] = {"u32", 4},         [CKD_U16] = {"u16", 2},   [CKD_U8] = {"u8", 1},
    [CKD_BOOL] = {"bool", 1},
};
#define DTYPE_COUNT (sizeof(dtypes) / sizeof(dtypes[0]))

size_t ckd_dtype_size(ckd_dtype dtype) {
    return (size_t)dtype < DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *ckd_dtype_name(ckd_dtype dtype) {
    return (size_t)dtype < DTYPE_COUNT ? dtypes[dtype].name : "?";
}

const char *ckd_stage_name(ckd_stage stage) {
    return stage_name((uint32_t)stage);
}

const char *ckd_role_name(ckd_role role) {
    switch (role) {
    case CKD_ROLE_AUTO:
        return "auto";
    case CKD_ROLE_WEIGHT:
        return "weight";
    case CKD_ROLE_EXP_AVG:
        return "exp_avg";
    case CKD_ROLE_EXP_AVG_SQ:
        return "exp_avg_sq";
    case CKD_ROLE_MASTER:
        return "master";
    case CKD_ROLE_OTHER:
        return "other";
    }
    return "?";
}

const char *ckd_fidelity_name(ckd_fidelity fidelity) {
    switch (fidelity) {
    case CKD_FIDELITY_DEFAULT:
    case CKD_EXACT:
        return "exact";
    case CKD_NEAR:
        return "near";
    case CKD_COARSE:
        return "coarse";
    }
    return "?";
}

const char *ckd_kind_name(ckd_kind kind) {
    switch (kind) {
    case CKD_BASE:
        return "base";
    case CKD_DELTA:
        return "delta";
    case CKD_LOSSY_BASE:
        return "base";
    }
    return "?";
}

void ckd_id_text(char text[CKD_ID_TEXT], const ckd_id *id) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < sizeof(id->bytes); i++) {
        text[2 * i] = digits[id->bytes[i] >> 4];
        text[2 * i + 1] = digits[id->bytes[i] & 15];
    }
    text[2 * sizeof(id->bytes)] = '\0';
}

ckd_status ckd_id_new(ckd_id *out, ckd_error *err) {
    return random_bytes(out->bytes, sizeof(out->bytes), err);
}

/* ---- runs: RUN~K for branches, RUN.lost and RUN.lostK for checkpoints that came back ---- */

bool branch_root(char root[CKD_RUN_MAX + 1], unsigned *number, const char *run) {
    snprintf(root, CKD_RUN_MAX + 1, "%s", run);
    char *tilde = strrchr(root, '~');
    char *end = NULL;
    unsigned long k = tilde && tilde[1] >= '1' && tilde[1] <= '9' ? strtoul(tilde + 1, &end, 10) : 0;
    if (!tilde || tilde == root || !end || *end || k < 2 || k > 1000000) {
        *number = 1;
        return false;
    }
    *tilde = '\0';
    *number = (unsigned)k;
    return true;
}

ckd_status branch_name(char out[CKD_RUN_MAX + 1], const char *root, unsigned number, ckd_error *err) {
    int n = number < 2 ? snprintf(out, CKD_RUN_MAX + 1, "%s", root)
                       : snprintf(out, CKD_RUN_MAX + 1, "%s~%u", root, number);
    return n > CKD_RUN_MAX
               ? err_set(err, CKD_E_INVALID, "the branch's name '%s~%u' is too long", root, number)
               : CKD_OK;
}

ckd_status returned_name(char out[CKD_RUN_MAX + 1], const char *run, unsigned number, ckd_error *err) {
    int n = number < 2 ? snprintf(out, CKD_RUN_MAX + 1, "%s.lost", run)
                       : snprintf(out, CKD_RUN_MAX + 1, "%s.lost%u", run, number);
    return n > CKD_RUN_MAX ? err_set(err, CKD_E_INVALID, "the name '%s.lost' is too long", run) : CKD_OK;
}

bool is_returned_name(const char *run) {
    const char *dot = strrchr(run, '.'), *word = ".lost";
    if (!dot || dot == run || strncmp(dot, word, strlen(word)) != 0) {
        return false;
    }
    const char *number = dot + strlen(word);
    return !*number || (*number >= '1' && *number <= '9' && strspn(number, "0123456789") == strlen(number));
}
