/*
 * Checkpoints that the destination has as they were before the source was compacted, while something that is to come builds on the links that compaction moved into them. They
 * get the source's generation as their next one, if what the destination has finds in it all links that it builds on.
 */
#include <stdlib.h>

#include "engine/needs.h"
#include "engine/transfer.h"
#include "engine/view.h"

/* ---- which ---- */

bool transfer_is_renewed(const transfer *t, const ckd_id *id) {
    for (size_t i = 0; i < t->renewed_count; i++) {
        if (id_equal(&t->renewed[i].id, id)) {
            return !t->renewed[i].refused;
        }
    }
    return false;
}

/* *added: it was not known yet. */
static ckd_status add(bool *added, transfer *t, const ckd_id *id, ckd_error *err) {
    for (size_t i = 0; i < t->renewed_count; i++) {
        if (id_equal(&t->renewed[i].id, id)) {
            return CKD_OK;
        }
    }
    transfer_renewed *grown = realloc(t->renewed, (t->renewed_count + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, (t->renewed_count + 1) * sizeof(*grown), "a plan of a copy");
    }
    t->renewed = grown;
    grown[t->renewed_count++] = (transfer_renewed){.id = *id};
    *added = true;
    return CKD_OK;
}

static const ckd_checkpoint *find_in(const ckd_checkpoint_list *list, const ckd_id *id) {
    for (size_t i = 0; i < list->count; i++) {
        if (id_equal(&list->items[i].id, id)) {
            return &list->items[i];
        }
    }
    return NULL;
}

/* ---- what builds on which links ---- */

static ckd_status open_view(view **out, const ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    manifest m;
    *out = NULL;
    ckd_status status = store_read_manifest(&m, store, c->run, c->step, c->generation, err);
    return status == CKD_OK ? view_open(out, store, &m, NULL, CKD_E_CORRUPT, err) : status;
}

/* Has the holder all of its links that v builds on? */
static bool has_links_of(const view *holder, const view *v) {
    const ckd_id *id = &holder->manifest.checkpoint.id;
    for (size_t i = 0; i < v->chunk_count; i++) {
        for (size_t k = 0; k < v->parts[i]->count; k++) {
            const record *r = &v->parts[i]->records[k];
            for (uint32_t d = 0; d < r->dependency_count; d++) {
                const dependency *on = &r->dependencies[d];
                if (on->kind == DEPENDS_LINK && id_equal(&on->checkpoint, id) &&
                    !view_find_link(holder, r, &on->content)) {
                    return false;
                }
            }
        }
    }
    return true;
}

static bool same_files(const view *a, const view *b) {
    const manifest *x = &a->manifest, *y = &b->manifest;
    bool same = x->file_count == y->file_count;
    for (size_t i = 0; i < x->file_count && same; i++) {
        same = id_equal(&x->files[i].id, &y->files[i].id);
    }
    return same;
}

/* Does the item, as the source has it, need more of a checkpoint than the destination has of it, and the source has that? What cannot be read is found later. */
static ckd_status needs_newer(bool *out, const transfer *t, const transfer_item *item,
                              const ckd_checkpoint *there, const ckd_checkpoint *here, ckd_error *err) {
    view *old = NULL, *newer = NULL, *v = NULL;
    ckd_checkpoint source = item->m.checkpoint;
    const ckd_checkpoint *listed = find_in(&t->source, &source.id);
    ckd_status status = open_view(&old, t->to, there, err);
    *out = false;
    if (status == CKD_OK) {
        status = open_view(&newer, t->from, here, err);
    }
    if (status == CKD_OK && listed && !same_files(old, newer)) {
        status = open_view(&v, t->from, listed, err);
        *out = status == CKD_OK && !has_links_of(old, v) && has_links_of(newer, v);
    }
    view_close(v);
    view_close(newer);
    view_close(old);
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

static ckd_status look_below(bool *added, transfer *t, const transfer_item *item, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < item->m.dependency_count && status == CKD_OK; i++) {
        const ckd_id *id = &item->m.dependencies[i];
        const ckd_checkpoint *there = find_in(&t->present, id), *here = find_in(&t->source, id);
        const transfer_item *holder = transfer_find_item(t, id);
        bool newer = false;
        if (there && here && !(holder && transfer_moves(holder))) {
            status = needs_newer(&newer, t, item, there, here, err);
        }
        if (newer) {
            status = add(added, t, id, err);
        }
    }
    return status;
}

/* ---- what the destination has that builds on it ---- */

static bool depends(const manifest *m, const ckd_id *on) {
    bool found = false;
    for (size_t i = 0; i < m->dependency_count && !found; i++) {
        found = id_equal(&m->dependencies[i], on);
    }
    return found;
}

ckd_status transfer_read_needs(needs *out, const transfer *t, ckd_error *err) {
    ckd_status status = needs_read(out, t->to, err);
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

ckd_status transfer_check_dependents(bool *fit, const transfer *t, const needs *n, const ckd_id *id,
                                     ckd_error *err) {
    view *newer = NULL;
    const ckd_checkpoint *here = find_in(&t->source, id);
    ckd_status status = here ? open_view(&newer, t->from, here, err) : CKD_OK;
    *fit = status == CKD_OK && here && n->items;
    for (size_t i = 0; i < n->count && *fit; i++) {
        const need *x = &n->items[i];
        view *v = NULL;
        if (x->superseded || !depends(&x->m, id)) {
            continue;
        }
        status = open_view(&v, t->to, &x->m.checkpoint, err);
        *fit = status == CKD_OK && has_links_of(newer, v);
        view_close(v);
    }
    view_close(newer);
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

ckd_status transfer_find_renewed(bool *again, transfer *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    *again = false;
    for (size_t i = 0; i < t->count && t->to && status == CKD_OK; i++) {
        if (transfer_moves(&t->items[i])) {
            status = look_below(again, t, &t->items[i], err);
        }
    }
    needs n = {0};
    status = status == CKD_OK && *again ? transfer_read_needs(&n, t, err) : status;
    for (size_t i = 0; i < t->renewed_count && *again && status == CKD_OK; i++) {
        bool fit = true;
        if (!t->renewed[i].looked_at) {
            t->renewed[i].looked_at = true;
            status = transfer_check_dependents(&fit, t, &n, &t->renewed[i].id, err);
        }
        t->renewed[i].refused = t->renewed[i].refused || !fit;
    }
    needs_free(&n);
    return status;
}
