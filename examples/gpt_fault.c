/* Faults on purpose, for tests and benchmarks of what notices them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt_options.h"

int gpt_fault_parse(gpt_fault *out, const char *text) {
    static const char *const kinds[] = {[GPT_FAULT_SPIKE] = "spike",
                                        [GPT_FAULT_FREEZE] = "freeze",
                                        [GPT_FAULT_STUCK] = "stuck",
                                        [GPT_FAULT_NAN] = "nan",
                                        [GPT_FAULT_ZERO] = "zero"};
    const char *at = strchr(text, '@');
    char *end = NULL;
    *out = (gpt_fault){.kind = GPT_FAULT_NONE};
    for (int kind = GPT_FAULT_SPIKE; at && kind <= GPT_FAULT_ZERO; kind++)
        if (strlen(kinds[kind]) == (size_t)(at - text) &&
            strncmp(text, kinds[kind], (size_t)(at - text)) == 0)
            out->kind = (gpt_fault_kind)kind;
    out->step = at ? strtoull(at + 1, &end, 10) : 0;
    return out->kind == GPT_FAULT_NONE || out->step == 0 || *end ? -1 : 0;
}

gpt_adamw gpt_fault_adamw(const gpt_options *o, uint64_t step, int rank) {
    const gpt_fault *f = &o->fault;
    gpt_adamw adamw = o->adamw;
    if (f->kind == GPT_FAULT_SPIKE && step == f->step)
        adamw.lr *= 100, adamw.min_lr *= 30;
    if ((f->kind == GPT_FAULT_FREEZE || (f->kind == GPT_FAULT_STUCK && rank == 1)) && step >= f->step)
        adamw.lr = adamw.min_lr = 0;
    return adamw;
}

void gpt_fault_spoil(gpt_model *model, const gpt_options *o, uint64_t step) {
    if (o->fault.kind == GPT_FAULT_NAN && step == o->fault.step)
        model->tensors[0].weight[0] = NAN;
    size_t middle = model->tensor_count / 2;
    while (middle + 1 < model->tensor_count && model->tensors[middle].ndim < 2)
        middle++;
    if (o->fault.kind == GPT_FAULT_ZERO && step == o->fault.step)
        memset(model->tensors[middle].weight, 0, model->tensors[middle].count * sizeof(float));
}
