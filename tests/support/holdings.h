/* What ranks hold of some tensors, and the plans that follow from it. */
#ifndef TESTS_SUPPORT_HOLDINGS_H
#define TESTS_SUPPORT_HOLDINGS_H

#include "include/ckptdelta.h"

enum { RANKS_MOST = 12, REGIONS_MOST = 64, TENSOR_COUNT_MAX = 6 };

typedef struct holdings {
    uint32_t world;
    ckd_tensor tensors[RANKS_MOST][REGIONS_MOST];
    size_t counts[RANKS_MOST];
} holdings;

/* The rank holds this region of the tensor, too. */
void hold(holdings *h, uint32_t rank, const ckd_tensor *t, const ckd_region *region);

ckd_tensor holdings_tensor(const char *name, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape);
ckd_region region_whole(void);
ckd_region region_flat(uint64_t start, uint64_t count);
ckd_region region_rows(uint64_t from, uint64_t count, uint64_t columns); /* of a matrix */

/* Described and planned. *plan: NULL on failure. */
ckd_status holdings_plan(ckd_plan **plan, const holdings *h, ckd_error *err);
/* The same; fails the test unless it works. */
ckd_plan *holdings_planned(const holdings *h);
/* Does not make a plan: `what` is in the message, the tensor is named. */
void holdings_refused(const holdings *h, ckd_status status, const char *tensor, const char *what);

#endif
