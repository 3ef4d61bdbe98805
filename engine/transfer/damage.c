/* Damage in chunk files with records of several checkpoints. Decides which damage concerns an item. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/transfer/internal.h"

bool transfer_has_damage_of(const damaged_part *h, const ckd_id *checkpoint) {
    while (h && !id_equal(&h->checkpoint, checkpoint)) {
        h = h->next;
    }
    return h != NULL;
}

/* Finds the checkpoints whose records a load of the item reads. */
static ckd_status find_owners(const transfer *t, transfer_item *item, ckd_error *err) {
    const view *v;
    view_cache views;
    manifest m;
    char run[CKD_RUN_MAX + 1];
    const ckd_checkpoint *c = &item->m.checkpoint;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    snprintf(run, sizeof(run), "%.*s", (int)strcspn(item->source, "@"), item->source);
    views_init(&views, t->from);
    ckd_status status = store_read_manifest(&m, t->from, run, c->step, c->generation, &why);
    THEN(status, views_add(&v, &views, &m, &why));
    THEN(status, closure_owners(&item->owners, &views, v, &why));
    views_free(&views);
    item->owners_known = true;
    item->needs_all = status != CKD_OK;
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

/*
 * Whether the item needs records of this checkpoint in a file. It needs its own records, and those that it builds on. A
 * file may have others, too: compaction packs several checkpoints into a file, and some of them may be deleted.
 */
static ckd_status needs(bool *out, const transfer *t, transfer_item *item, const ckd_id *checkpoint,
                        ckd_error *err) {
    bool own = id_equal(checkpoint, &item->m.checkpoint.id);
    ckd_status status = own || item->owners_known ? CKD_OK : find_owners(t, item, err);
    *out = own || item->needs_all || id_list_has(&item->owners, checkpoint);
    return status;
}

ckd_status transfer_find_damaged(const damaged_part **damaged, const transfer *t, const damaged_part *list,
                                 transfer_item *item, ckd_error *err) {
    ckd_status status = CKD_OK;
    *damaged = NULL;
    for (const damaged_part *h = list; h && !*damaged && status == CKD_OK; h = h->next) {
        bool needed;
        status = needs(&needed, t, item, &h->checkpoint, err);
        *damaged = needed ? h : NULL;
    }
    return status;
}

ckd_status transfer_record_damage(damaged_part **list, const ckd_id *checkpoint, const ckd_error *why,
                                  ckd_error *err) {
    if (transfer_has_damage_of(*list, checkpoint)) {
        return CKD_OK;
    }
    damaged_part *h = malloc(sizeof(*h));
    if (!h) {
        return err_nomem(err, sizeof(*h), "what is damaged");
    }
    *h = (damaged_part){*checkpoint, *why, *list};
    *list = h;
    return CKD_OK;
}

void transfer_damage_free(damaged_part **list) {
    while (*list) {
        damaged_part *h = *list;
        *list = h->next;
        free(h);
    }
}
