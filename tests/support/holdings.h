/* Which regions of tensors each rank holds, and the plans that follow. */
#ifndef TESTS_SUPPORT_HOLDINGS_H
#define TESTS_SUPPORT_HOLDINGS_H

#include "include/ckptdelta.h"

enum { RANKS_MOST = 12, REGIONS_MOST = 64, TENSOR_COUNT_MAX = 6 };

typedef struct holdings {
    uint32_t world;
    ckd_tensor tensors[RANKS_MOST][REGIONS_MOST];
    size_t counts[RANKS_MOST];
} holdings;

/* Adds a region of the tensor to those that the rank holds. */
void hold(holdings *h, uint32_t rank, const ckd_tensor *t, const ckd_region *region);

ckd_tensor holdings_tensor(const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape);
ckd_region region_whole(void);
ckd_region region_flat(uint64_t start, uint64_t count);
ckd_region region_rows(uint64_t from, uint64_t count, uint64_t columns); /* rows of a matrix */

/* Describes the holdings and makes a plan. *plan is NULL on failure. */
ckd_status holdings_plan(ckd_plan **plan, const holdings *h, ckd_error *err);
/* The same; fails the test on an error. */
ckd_plan *holdings_planned(const holdings *h);
/* Expects that making a plan fails. The message must contain `what` and name the tensor. */
void holdings_refused(const holdings *h, ckd_status status, const char *tensor, const char *what);

#endif
