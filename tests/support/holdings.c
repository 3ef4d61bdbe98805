#include "tests/support/holdings.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

void hold(holdings *h, uint32_t rank, const ckd_tensor *t, const ckd_region *region) {
    assert_true(h->counts[rank] < REGIONS_MOST);
    ckd_tensor mine = *t;
    mine.region = *region;
    h->tensors[rank][h->counts[rank]++] = mine;
}

ckd_tensor holdings_tensor(const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = dtype;
    t.ndim = ndim;
    t.shape = shape;
    return t;
}

ckd_region region_whole(void) {
    return (ckd_region){.kind = CKD_REGION_WHOLE};
}
ckd_region region_flat(uint64_t start, uint64_t count) {
    return (ckd_region){.kind = CKD_REGION_FLAT, .start = start, .count = count};
}
ckd_region region_rows(uint64_t from, uint64_t count, uint64_t columns) {
    return (ckd_region){.kind = CKD_REGION_BOX, .offsets = {from, 0}, .lengths = {count, columns}};
}

ckd_status holdings_plan(ckd_plan **plan, const holdings *h, ckd_error *err) {
    ckd_bytes descriptions[RANKS_MOST] = {{NULL, 0}};
    ckd_status status = CKD_OK;
    for (uint32_t r = 0; r < h->world && status == CKD_OK; r++) { /* ranks may be added in any order */
        status =
            ckd_plan_describe(&descriptions[h->world - 1 - r], r, h->world, h->tensors[r], h->counts[r], err);
    }
    *plan = NULL;
    if (status == CKD_OK) {
        status = ckd_plan_make(plan, descriptions, h->world, err);
    }
    for (uint32_t r = 0; r < h->world; r++) {
        ckd_bytes_free(&descriptions[r]);
    }
    return status;
}

ckd_plan *holdings_planned(const holdings *h) {
    ckd_plan *plan;
    ckd_error err = {0};
    if (holdings_plan(&plan, h, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.tensor);
    }
    return plan;
}

void holdings_refused(const holdings *h, ckd_status status, const char *tensor, const char *what) {
    ckd_plan *plan;
    ckd_error err = {0};
    assert_int_equal(holdings_plan(&plan, h, &err), status);
    assert_null(plan);
    assert_string_equal(err.tensor, tensor);
    if (!strstr(err.message, what)) {
        fail_msg("\"%s\" does not say \"%s\"", err.message, what);
    }
}
