/* Finds the roles of the registered tensors from all their names together, once registration is complete. */
#include <stdlib.h>

#include "engine/session/session.h"

static void report_doubts(ckd_session *s, size_t count, const char *first) {
    pthread_mutex_lock(&s->saver.store_turn);
    store_message(
        s->saver.store,
        "%zu of the registered tensors look like an optimizer's and belong to no weight of the same shape, the first is '%s': "
        "they are stored exactly unless they are given a role",
        count, first);
    pthread_mutex_unlock(&s->saver.store_turn);
}

/* Ranks hold different tensors but must agree on roles. With ranks, each name is therefore taken by itself. */
ckd_status session_find_roles(ckd_session *s, bool lossy, ckd_error *err) {
    if (s->saver.ranks) {
        return CKD_OK;
    }
    ckd_tensor_name *tensors = calloc(s->item_count + 1, sizeof(*tensors));
    ckd_tensor_role *found = calloc(s->item_count + 1, sizeof(*found));
    size_t count = 0, doubts = 0;
    const char *first = NULL;
    for (size_t i = 0; i < s->item_count && tensors && found; i++) {
        if (!s->items[i].is_bytes) {
            const ckd_tensor *t = &s->items[i].tensor;
            tensors[count++] = (ckd_tensor_name){t->name, t->role, t->dtype, t->ndim, t->shape};
        }
    }
    ckd_status status = tensors && found
                            ? ckd_roles_find(found, tensors, count, NULL, 0, err)
                            : err_nomem(err, s->item_count * sizeof(*tensors), "roles of tensors");
    for (size_t i = 0, k = 0; i < s->item_count && status == CKD_OK; i++) {
        ckd_tensor *t = &s->items[i].tensor;
        if (!s->items[i].is_bytes) {
            t->role = found[k].role;
            t->weight = t->weight ? t->weight : found[k].weight;
            first = found[k].in_doubt && !first ? t->name : first;
            doubts += found[k++].in_doubt ? 1 : 0;
        }
    }
    free(tensors);
    free(found);
    if (status == CKD_OK && doubts && lossy) {
        report_doubts(s, doubts, first);
    }
    return status;
}
