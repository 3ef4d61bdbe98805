/*
 * What compaction moved out of deleted checkpoints are links in those that stay, and a block may build on the link of another checkpoint. The
 * destination may have that one as it was before the compaction, or as a compaction of its own left it: without the link.
 */
#include "engine/transfer.h"
#include "engine/view.h"

static ckd_status check_link(const transfer *t, view_cache *there, const transfer_item *item,
                             const record *of, const dependency *on, ckd_error *err) {
    const transfer_item *holder = transfer_find_item(t, &on->checkpoint);
    const view *v;
    if (holder && transfer_moves(holder)) {
        return CKD_OK; /* with its links */
    }
    ckd_status status = views_get(&v, there, &on->checkpoint, err);
    if (status != CKD_OK || view_find_link(v, of, &on->content)) {
        return status;
    }
    return err_set(
        err, CKD_E_STATE,
        "%s builds on differences that compaction moved into %s, which '%.200s' has without them, as "
        "it was before or by a compaction of its own; nothing of it was copied there. Copy into a "
        "store that does not have %s",
        item->source, holder ? holder->source : "another checkpoint", t->to->path,
        holder ? holder->source : "it");
}

static ckd_status check_file(const transfer *t, view_cache *there, const transfer_item *item,
                             const transfer_file *f, ckd_error *err) {
    chunk *c = NULL;
    pathname path = f->arrived ? transfer_path(t, &f->file.id) : path_chunk(t->to->path, &f->file.id, "");
    const chunk_part *own = NULL;
    ckd_status status = chunk_open_outer(&c, path.text, err);
    if (status == CKD_OK) {
        status = chunk_part_of(&own, c, &item->m.checkpoint.id, err);
    }
    for (size_t i = 0; status == CKD_OK && i < own->count; i++) {
        const record *r = &own->records[i];
        for (uint32_t k = 0; k < r->dependency_count && status == CKD_OK; k++) {
            const dependency *on = &r->dependencies[k];
            if (on->kind == DEPENDS_LINK && !id_equal(&on->checkpoint, &r->tensor->checkpoint)) {
                status = check_link(t, there, item, r, on, err);
            }
        }
    }
    chunk_close(c);
    return status;
}

ckd_status transfer_check_links(const transfer *t, const transfer_item *item, ckd_error *err) {
    view_cache there;
    ckd_status status = CKD_OK;
    views_init(&there, t->to);
    there.values_only = true;
    for (size_t i = 0; i < item->m.file_count && status == CKD_OK; i++) {
        status = check_file(t, &there, item, transfer_find_file(t, &item->m.files[i].id), err);
    }
    views_free(&there);
    return status;
}
