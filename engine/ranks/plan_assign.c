/*
 * Decides which rank writes a region that several ranks hold. Regions with one holder come first, because they leave no
 * choice. Then the largest comes first, each going to the holder with the least to write so far (Graham, "Bounds on
 * multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969).
 */
#include <stdlib.h>
#include <string.h>

#include "engine/ranks/internal.h"

/* Groups [from, from + count), which go to one rank. */
typedef struct unit {
    size_t from, count;
    uint64_t bytes;
    uint32_t first; /* index of the first holder, in the order of tensors */
} unit;

static int by_unit(const void *a, const void *b) {
    const plan_group *x = a, *y = b;
    bool shared_x = x->count > 1, shared_y = y->count > 1;
    if (shared_x != shared_y) {
        return shared_x ? 1 : -1;
    }
    if (shared_x && x->unit != y->unit) {
        return x->unit < y->unit ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static int largest_first(const void *a, const void *b) {
    const unit *x = a, *y = b;
    if (x->bytes != y->bytes) {
        return x->bytes > y->bytes ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static uint32_t least_loaded(const plan_group *g, const uint32_t *ranks, const uint64_t *loads) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < g->count; i++) {
        if (loads[ranks[g->first + i]] < loads[ranks[g->first + best]]) {
            best = i;
        }
    }
    return best;
}

ckd_status plan_assign(uint32_t *chosen, plan_group *groups, size_t count, const uint32_t *ranks,
                       uint64_t *loads, ckd_error *err) {
    if (count == 0) { /* no rank has any tensor */
        return CKD_OK;
    }
    qsort(groups, count, sizeof(*groups), by_unit);
    size_t alone = 0, unit_count = 0;
    for (; alone < count && groups[alone].count == 1; alone++) {
        chosen[alone] = 0;
        loads[ranks[groups[alone].first]] += groups[alone].bytes;
    }
    unit *units = malloc((count - alone + 1) * sizeof(*units));
    if (!units) {
        return err_nomem(err, (count - alone) * sizeof(*units), "shared regions");
    }
    for (size_t i = alone; i < count; i++) {
        /* Units are hashes. Comparing the counts, too, ensures that the chosen index is a holder in every group. */
        if (i == alone || groups[i].unit != groups[i - 1].unit || groups[i].count != groups[i - 1].count) {
            units[unit_count++] = (unit){.from = i, .first = groups[i].first};
        }
        units[unit_count - 1].count++;
        units[unit_count - 1].bytes += groups[i].bytes;
    }
    qsort(units, unit_count, sizeof(*units), largest_first);
    for (size_t u = 0; u < unit_count; u++) {
        const plan_group *first = &groups[units[u].from];
        uint32_t best = least_loaded(first, ranks, loads);
        for (size_t i = units[u].from; i < units[u].from + units[u].count; i++) {
            chosen[i] = best;
        }
        loads[ranks[first->first + best]] += units[u].bytes;
    }
    free(units);
    return CKD_OK;
}
