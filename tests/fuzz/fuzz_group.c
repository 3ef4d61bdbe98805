/*
 * group_decode from any bytes, and its step on values from the bytes that follow. An accepted group is coded
 * to the same bytes again. Every instruction set predicts the same bits, for any coefficients and values.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/metadata/metadata.h"
#include "kernels/cpu.h"
#include "tests/support/fuzz.h"

enum { VALUES = 40 };

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

static void predict(const optimizer_group *g, const uint8_t *data, size_t size) {
    uint8_t in[3][4 * VALUES], first[4 * VALUES], second[4 * VALUES];
    for (size_t i = 0; i < sizeof(in); i++) {
        in[i / (4 * VALUES)][i % (4 * VALUES)] = size ? data[i % size] : 0;
    }
    step_rule rule = {.rule = g->rule};
    memcpy(rule.coefficients, g->coefficients, sizeof(rule.coefficients));
    const void *other = group_input_count(group_rule_inputs(g->rule)) > 1 ? in[2] : NULL;
    require(kernels_cpu_portable.optimizer_step(&rule, first, in[0], in[1], other, VALUES));
    require(kernels_cpu()->optimizer_step(&rule, second, in[0], in[1], other, VALUES));
    require(memcmp(first, second, sizeof(first)) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t length = size > GROUP_BYTES ? GROUP_BYTES : size;
    uint8_t *exact = malloc(length ? length : 1), again[GROUP_BYTES];
    require(exact != NULL);
    memcpy(exact, data, length);
    optimizer_group g;
    ckd_status status = group_decode(&g, exact, length, "fuzz", 0, NULL);
    if (status == CKD_OK) {
        require(length == GROUP_BYTES);
        group_encode(again, &g);
        require(memcmp(again, exact, GROUP_BYTES) == 0);
        predict(&g, data + length, size - length);
    } else {
        require(status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
    }
    free(exact);
    return 0;
}
