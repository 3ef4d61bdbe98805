/* Finds checkpoints of a list by id. A hash table serves long lists, in which every checkpoint names its parent. */
#include "cli/output/output.h"

#include <stdlib.h>
#include <string.h>

bool cli_has_id(const ckd_checkpoint *c, const ckd_id *id) {
    return memcmp(&c->id, id, sizeof(*id)) == 0;
}

bool cli_id_is_none(const ckd_id *id) {
    static const ckd_id zero;
    return memcmp(id, &zero, sizeof(zero)) == 0;
}

const ckd_checkpoint *cli_by_id(const ckd_checkpoint_list *all, const ckd_id *id) {
    for (size_t i = 0; i < all->count; i++) {
        if (cli_has_id(&all->items[i], id)) {
            return &all->items[i];
        }
    }
    return NULL;
}

/* Returns the slot of an id, or the free slot for it. Ids are random, so any part of them is a hash. */
static size_t slot_of(const cli_ids *ids, const ckd_id *id) {
    uint64_t hash;
    memcpy(&hash, id->bytes, sizeof(hash));
    size_t at = (size_t)hash & (ids->capacity - 1);
    while (ids->slots[at] && !cli_has_id(ids->slots[at], id)) {
        at = (at + 1) & (ids->capacity - 1);
    }
    return at;
}

ckd_status cli_ids_make(cli_ids *out, const ckd_checkpoint_list *all, ckd_error *err) {
    *out = (cli_ids){.all = all, .capacity = 16};
    while (out->capacity < 2 * all->count) {
        out->capacity *= 2;
    }
    out->slots = calloc(out->capacity, sizeof(const ckd_checkpoint *));
    if (!out->slots) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < all->count; i++) {
        size_t at = slot_of(out, &all->items[i].id);
        out->slots[at] = out->slots[at] ? out->slots[at] : &all->items[i];
    }
    return CKD_OK;
}

void cli_ids_free(cli_ids *ids) {
    free(ids->slots);
    *ids = (cli_ids){0};
}

const ckd_checkpoint *cli_ids_find(const cli_ids *ids, const ckd_id *id) {
    return ids->slots ? ids->slots[slot_of(ids, id)] : cli_by_id(ids->all, id);
}
