/* The order in which checkpoints are rewritten. */
#include <stdlib.h>

#include "engine/compact/compact.h"

#define LINEAGE_ROUNDS 256

typedef struct level {
    manifest_entry *n;
    size_t level, place; /* level: above all that it builds on or descends from; place: its old index */
} level;

static int by_level(const void *a, const void *b) {
    const level *x = a, *y = b;
    int order = (x->level < y->level) - (x->level > y->level);
    return order ? order : (x->place > y->place) - (x->place < y->place);
}

static bool raise_above(level *to, const level *all, const manifest_set *n, const ckd_id *id) {
    const manifest_entry *on = id_is_zero(id) ? NULL : manifest_set_find(n, id);
    size_t at = on ? on->order_index : SIZE_MAX;
    bool higher = at != SIZE_MAX && all[at].level >= to->level && &all[at] != to;
    to->level = higher ? all[at].level + 1 : to->level;
    return higher;
}

ckd_status compact_order(manifest_entry **order, size_t count, manifest_set *n, ckd_error *err) {
    level *all = calloc(count + 1, sizeof(*all));
    if (!all) {
        return err_nomem(err, count * sizeof(*all), "an order of checkpoints");
    }
    for (size_t i = 0; i < n->count; i++) {
        n->items[i].order_index = SIZE_MAX;
    }
    for (size_t i = 0; i < count; i++) {
        all[i] = (level){order[i], 0, i};
        order[i]->order_index = i;
    }
    bool changed = true;
    for (int rounds = 0; changed && rounds < LINEAGE_ROUNDS; rounds++) {
        changed = false;
        for (size_t i = count; i-- > 0;) {
            const manifest *m = &all[i].n->m;
            changed = raise_above(&all[i], all, n, &m->checkpoint.parent) || changed;
            for (size_t k = 0; k < m->dependency_count; k++) {
                changed = raise_above(&all[i], all, n, &m->dependencies[k]) || changed;
            }
        }
    }
    qsort(all, count, sizeof(*all), by_level);
    for (size_t i = 0; i < count && !changed; i++) { /* otherwise they form a cycle */
        order[i] = all[i].n;
    }
    free(all);
    return CKD_OK;
}
