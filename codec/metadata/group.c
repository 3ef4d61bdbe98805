/*
 * Encodes and decodes group records: the optimizer, and the coefficients from which steps are predicted.
 * codec/FORMAT.md, "Optimizer steps".
 */
#include "codec/metadata/metadata.h"

#include <string.h>

#define FLAG_NESTEROV 1u

group_inputs group_rule_inputs(uint32_t rule) {
    if ((rule >= RULE_SQUARE_FIRST && rule <= RULE_SQUARE_LAST) ||
        (rule >= RULE_BF16_FIRST && rule <= RULE_BF16_LAST)) {
        return INPUTS_MOMENTS_BEFORE;
    }
    if (rule >= RULE_MOMENT_FIRST && rule <= RULE_VELOCITY_LAST) {
        return INPUTS_GRADIENT;
    }
    if (rule >= RULE_ADAM_FIRST && rule <= RULE_ADAM_LAST) {
        return INPUTS_MOMENT_SQUARE;
    }
    if (rule >= RULE_SGD_FIRST && rule <= RULE_SGD_LAST) {
        return INPUTS_MOMENTUM;
    }
    return rule >= RULE_NESTEROV_FIRST && rule <= RULE_NESTEROV_LAST ? INPUTS_MOMENTUM_NESTEROV : INPUTS_NONE;
}

uint32_t group_input_count(group_inputs inputs) {
    return inputs == INPUTS_NONE || inputs == INPUTS_GRADIENT ? 0 : inputs == INPUTS_MOMENTUM ? 1 : 2;
}

static void put_f64(uint8_t **at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    store_le64(*at, bits);
    *at += sizeof(bits);
}

static double take_f64(const uint8_t **at) {
    uint64_t bits = load_le64(*at);
    double value;
    memcpy(&value, &bits, sizeof(value));
    *at += sizeof(bits);
    return value;
}

void group_encode(uint8_t to[GROUP_BYTES], const optimizer_group *g) {
    store_le16(to, (uint16_t)g->kind);
    store_le16(to + 2, (uint16_t)g->rule);
    store_le32(to + 4, g->nesterov ? FLAG_NESTEROV : 0);
    store_le64(to + 8, g->step);
    uint8_t *at = to + 16;
    const double hyper[] = {g->lr, g->beta1, g->beta2, g->eps, g->weight_decay, g->momentum, g->dampening};
    for (size_t i = 0; i < sizeof(hyper) / sizeof(hyper[0]); i++) {
        put_f64(&at, hyper[i]);
    }
    for (size_t i = 0; i < GROUP_COEFFICIENTS; i++) {
        put_f64(&at, g->coefficients[i]);
    }
}

ckd_status group_decode(optimizer_group *out, const void *from, size_t size, const char *path,
                        uint64_t offset, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    const uint8_t *raw = from;
    if (size < 4) {
        return err_corrupt(err, path, offset, "a group record cannot have %zu bytes", size);
    }
    uint32_t kind = load_le16(raw), rule = load_le16(raw + 2);
    if (kind < GROUP_ADAMW || kind > GROUP_SGD || group_rule_inputs(rule) == INPUTS_NONE) {
        return err_unsupported(
            err, path, offset,
            "the optimizer step has kind %u and rule %u, which this version does not know; load it with a "
            "newer ckptdelta",
            (unsigned)kind, (unsigned)rule);
    }
    uint32_t flags = size == GROUP_BYTES ? load_le32(raw + 4) : ~0u;
    if (flags & ~FLAG_NESTEROV) {
        return err_corrupt(err, path, offset, "a group record has the wrong size or unknown flags");
    }
    const uint8_t *at = raw + 16;
    *out = (optimizer_group){.kind = kind, .rule = rule, .nesterov = flags != 0, .step = load_le64(raw + 8)};
    double *const hyper[] = {&out->lr,           &out->beta1,    &out->beta2,    &out->eps,
                             &out->weight_decay, &out->momentum, &out->dampening};
    for (size_t i = 0; i < sizeof(hyper) / sizeof(hyper[0]); i++) {
        *hyper[i] = take_f64(&at);
    }
    for (size_t i = 0; i < GROUP_COEFFICIENTS; i++) {
        out->coefficients[i] = take_f64(&at);
    }
    return CKD_OK;
}
