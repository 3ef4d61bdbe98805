/*
 * The items of a compaction's result. A checkpoint may be rewritten in several passes, and its file merged with others
 * after that. It is one item nevertheless.
 */
#include <stdlib.h>

#include "engine/compact/internal.h"

/*
 * Items of the same checkpoint are equal, and stay in the order of work. Items that were left out are not joined with
 * those that were done.
 */
static int by_checkpoint(const void *a, const void *b) {
    const ckd_compacted *x = *(ckd_compacted *const *)a, *y = *(ckd_compacted *const *)b;
    int order = memcmp(&x->checkpoint.id, &y->checkpoint.id, sizeof(ckd_id));
    order = order ? order : (x->left.status != CKD_OK) - (y->left.status != CKD_OK);
    return order ? order : (x > y) - (x < y);
}

static bool is_same(const ckd_compacted *x, const ckd_compacted *y) {
    return id_equal(&x->checkpoint.id, &y->checkpoint.id) &&
           (x->left.status == CKD_OK) == (y->left.status == CKD_OK);
}

/* Clears the item that is joined with an earlier one. */
static void join(ckd_compaction *out, ckd_compacted *first, ckd_compacted *again) {
    if (first->left.status == CKD_OK) {
        out->before -= again->checkpoint.stored_bytes;
        out->after -= first->bytes;
        first->why |= again->why;
        first->blocks = again->blocks ? again->blocks : first->blocks;
        first->recoded += again->recoded;
        first->bytes = again->bytes;
        first->depth = again->depth;
    } else {
        out->left--;
    }
    again->why = 0;
    again->checkpoint.id = (ckd_id){{0}};
}

ckd_status compact_join_items(ckd_compaction *out, ckd_error *err) {
    ckd_compacted **order = calloc(out->count + 1, sizeof(*order));
    size_t kept = 0;
    if (!order) {
        return err_nomem(err, out->count * sizeof(*order), "a list of checkpoints");
    }
    for (size_t i = 0; i < out->count; i++) {
        order[i] = &out->items[i];
    }
    qsort(order, out->count, sizeof(*order), by_checkpoint);
    for (size_t i = 0, first = 0; i < out->count; i++) {
        first = i && is_same(order[first], order[i]) ? first : i;
        if (first != i) {
            join(out, order[first], order[i]);
        }
    }
    free(order);
    for (size_t i = 0; i < out->count; i++) {
        if (!id_is_zero(&out->items[i].checkpoint.id)) {
            out->items[kept++] = out->items[i];
        }
    }
    out->count = kept;
    return CKD_OK;
}
