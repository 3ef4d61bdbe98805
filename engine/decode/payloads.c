/* Payloads in memory, by node of a plan. */
#define _GNU_SOURCE /* qsort_r */
#include "engine/decode/payloads.h"

#include <stdlib.h>

ckd_status payloads_init(payloads *out, const load_plan *plan, ckd_error *err) {
    size_t count = plan->node_count + 1;
    *out = (payloads){
        .plan = plan, .data = calloc(count, sizeof(*out->data)), .held = calloc(count, sizeof(*out->held))};
    if (!out->data || !out->held) {
        payloads_free(out);
        return err_nomem(err, count * sizeof(*out->data), "a list of payloads");
    }
    return CKD_OK;
}

void payloads_free(payloads *p) {
    for (size_t i = 0; i < p->held_count; i++) {
        free(p->data[p->held[i]]);
    }
    free(p->data);
    free(p->held);
    *p = (payloads){.plan = NULL};
}

const void *payloads_find(const payloads *p, const record *r) {
    size_t node = p ? load_plan_find(p->plan, r) : LOAD_NONE;
    return node == LOAD_NONE ? NULL : p->data[node];
}

void payloads_add(payloads *p, size_t node, void *data) {
    p->data[node] = data;
    p->held[p->held_count++] = node;
    p->bytes += p->plan->nodes[node].record->stored_size;
}

static int by_last_turn(const void *a, const void *b, void *plan) {
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    uint32_t of_x = ((const load_plan *)plan)->nodes[x].last, of_y = ((const load_plan *)plan)->nodes[y].last;
    return of_x != of_y ? (of_x < of_y ? -1 : 1) : x < y ? -1 : x > y;
}

void payloads_settle(payloads *p, uint64_t done, uint64_t max) {
    qsort_r(p->held, p->held_count, sizeof(*p->held), by_last_turn, (void *)p->plan);
    size_t kept = 0;
    uint64_t left = max;
    for (size_t i = 0; i < p->held_count; i++) {
        size_t node = p->held[i];
        uint64_t size = p->plan->nodes[node].record->stored_size;
        if (p->plan->nodes[node].last < done || size > left) {
            free(p->data[node]);
            p->data[node] = NULL;
        } else {
            p->held[kept++] = node;
            left -= size;
        }
    }
    p->held_count = kept;
    p->bytes = max - left;
}
