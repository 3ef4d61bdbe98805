/* Lookups in the plan of a load. engine/load makes the plan. */
#include "engine/decode/load_plan.h"

#include <stdlib.h>

void load_plan_free(load_plan *x) {
    if (!x) {
        return;
    }
    free(x->nodes);
    free(x->edges);
    free(x->order);
    free(x->table);
    free(x->views);
    free(x);
}

size_t load_plan_slot(const load_plan *x, const record *r) {
    size_t at = (size_t)(((uintptr_t)r >> 3) * UINT64_C(0x9e3779b97f4a7c15) >> 17) & (x->table_size - 1);
    while (x->table[at] != LOAD_NONE && x->nodes[x->table[at]].record != r) {
        at = (at + 1) & (x->table_size - 1);
    }
    return at;
}

size_t load_plan_find(const load_plan *plan, const record *r) {
    return plan->table[load_plan_slot(plan, r)];
}

uint32_t load_plan_uses(const load_plan *plan, const record *r) {
    size_t at = load_plan_find(plan, r);
    return at == LOAD_NONE ? 0 : plan->nodes[at].uses;
}
