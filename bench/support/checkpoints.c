#include <stdlib.h>
#include <string.h>

#include "bench/support/support.h"

void **bench_values_new(const ckd_tensor_list *list) {
    void **values = bench_allocated(calloc(list->count + 1, sizeof(*values)));
    for (size_t i = 0; i < list->count; i++) {
        values[i] = bench_allocated(malloc(list->items[i].raw_bytes + 1));
        memset(values[i], 0, list->items[i].raw_bytes);
    }
    return values;
}

void bench_values_free(void **values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(values[i]);
    }
    free(values);
}

void bench_load_values(ckd_load *load, const ckd_tensor_list *list, void **values) {
    ckd_error err = {0};
    for (size_t i = 0; i < list->count; i++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = list->items[i].name;
        q.data = values[i];
        q.size = list->items[i].raw_bytes;
        bench_check(ckd_load_tensor(load, &q, &err), &err);
    }
}

ckd_tensor bench_tensor_like(const ckd_tensor_info *info, const void *values) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = info->name;
    t.role = info->role;
    t.dtype = info->dtype;
    t.ndim = info->ndim;
    t.shape = info->shape;
    t.data = values;
    return t;
}
