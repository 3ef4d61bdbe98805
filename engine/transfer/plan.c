/* Plans a copy between stores: the requested checkpoints, without those that the destination has. */
#include <stdio.h>
#include <stdlib.h>

#include "base/vocabulary.h"
#include "engine/store/store.h"
#include "engine/transfer/internal.h"

/* The checkpoints of a store. */
typedef struct listing {
    ckd_checkpoint_list list; /* sorted by run, then step */
    size_t *by_id;            /* indices in the list, sorted by id */
} listing;

typedef struct planning {
    transfer *t;
    listing from, to;
    bool *selected;      /* by index in the source's list */
    const char *renamed; /* the run that gets another name, or NULL */
} planning;

/* ---- the checkpoints of both stores ---- */

static int by_listed_id(const void *a, const void *b, void *list) {
    const ckd_checkpoint *items = ((const ckd_checkpoint_list *)list)->items;
    return memcmp(&items[*(const size_t *)a].id, &items[*(const size_t *)b].id, sizeof(ckd_id));
}

static ckd_status sort_listing(listing *l, ckd_error *err) {
    l->by_id = malloc((l->list.count + 1) * sizeof(*l->by_id));
    if (!l->by_id) {
        return err_nomem(err, l->list.count * sizeof(*l->by_id), "a list of checkpoints");
    }
    for (size_t i = 0; i < l->list.count; i++) {
        l->by_id[i] = i;
    }
    qsort_r(l->by_id, l->list.count, sizeof(*l->by_id), by_listed_id, &l->list);
    return CKD_OK;
}

/* Returns the index in the list, or the length of the list if the id is not there. */
static size_t find_id(const listing *l, const ckd_id *id) {
    size_t low = 0, high = l->list.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(&l->list.items[l->by_id[middle]].id, id, sizeof(*id)) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool found = low < l->list.count && id_equal(&l->list.items[l->by_id[low]].id, id);
    return found ? l->by_id[low] : l->list.count;
}

static const ckd_checkpoint *listed(const listing *l, const ckd_id *id) {
    size_t at = find_id(l, id);
    return at < l->list.count ? &l->list.items[at] : NULL;
}

static int by_place(const void *a, const void *b) {
    const ckd_checkpoint *x = a, *y = b;
    int order = strcmp(x->run, y->run);
    return order ? order : (x->step > y->step) - (x->step < y->step);
}

static int by_id_and_generation(const void *a, const void *b) {
    const tombstone *x = a, *y = b;
    int order = id_compare(x, y);
    return order ? order : (x->generation < y->generation) - (x->generation > y->generation);
}

/*
 * Reads the tombstones of the destination's trash. An unreadable tombstone is skipped; publishing would find a
 * conflict.
 */
static ckd_status read_trash(transfer *t, ckd_error *err) {
    manifest_list tombstones = {0};
    const ckd_store *store = t->to;
    ckd_status status = manifests_tombstones(&tombstones, store, err);
    t->trash = calloc(tombstones.count + 1, sizeof(*t->trash));
    if (status == CKD_OK && !t->trash) {
        status = err_nomem(err, tombstones.count * sizeof(*t->trash), "the trash");
    }
    for (size_t i = 0; i < tombstones.count && status == CKD_OK; i++) {
        const manifest_name *name = &tombstones.items[i];
        tombstone *dead = &t->trash[t->trash_count];
        status = tombstone_read(dead, store, name, NULL);
        if (status == CKD_OK &&
            file_exists(path_manifest(store->path, name->run, name->step, name->generation).text)) {
            t->trash_count++;
        }
        status = status == CKD_E_NOMEM ? err_nomem(err, sizeof(*dead), "a tombstone") : CKD_OK;
    }
    if (t->trash_count) {
        qsort(t->trash, t->trash_count, sizeof(*t->trash), by_id_and_generation);
    }
    manifests_free(&tombstones);
    return status;
}

ckd_status transfer_read_destination(transfer *t, ckd_error *err) {
    transfer_plan_free(t);
    if (!t->to) {
        return CKD_OK;
    }
    ckd_status status = t->options->dry_run ? store_list(&t->present, t->to, NULL, err)
                                            : catalog_list(&t->present, t->to->catalog, NULL, err);
    return status == CKD_OK ? read_trash(t, err) : status;
}

static ckd_status sort_both(planning *p, ckd_error *err) {
    p->from.list = p->t->source;
    p->to.list = p->t->present;
    ckd_status status = sort_listing(&p->from, err);
    return status == CKD_OK ? sort_listing(&p->to, err) : status;
}

/* ---- the checkpoints to copy ---- */

static ckd_status mark_asked(planning *p, ckd_error *err) {
    const transfer *t = p->t;
    size_t count = p->from.list.count;
    p->selected = calloc(count + 1, sizeof(*p->selected));
    if (!p->selected) {
        return err_nomem(err, count * sizeof(*p->selected), "a plan of a copy");
    }
    for (size_t i = 0; i < count && !t->selected; i++) {
        p->selected[i] = true;
    }
    for (size_t i = 0; t->selected && i < t->selected_count; i++) {
        size_t at = find_id(&p->from, &t->selected[i]);
        if (at == count || p->selected[at]) {
            char hex[CKD_ID_TEXT];
            ckd_id_text(hex, &t->selected[i]);
            return at == count ? err_set(err, CKD_E_NOT_FOUND, "there is no checkpoint %s in '%s'", hex,
                                         t->from->path)
                               : err_set(err, CKD_E_INVALID, "checkpoint %s is given twice", hex);
        }
        p->selected[at] = true;
    }
    return CKD_OK;
}

/* Only one run can get another name. */
static ckd_status check_rename(planning *p, ckd_error *err) {
    const char *new_name = p->t->options->as_run;
    if (new_name && !run_name_valid(new_name)) {
        return err_set(
            err, CKD_E_INVALID,
            "'%.128s' is not a valid run name: use 1 to %d of A-Z a-z 0-9 . _ - ~, not starting with a dot or dash",
            new_name, CKD_RUN_MAX);
    }
    for (size_t i = 0; new_name && i < p->from.list.count; i++) {
        const char *run = p->from.list.items[i].run;
        if (p->selected[i] && p->renamed && strcmp(p->renamed, run) != 0) {
            return err_set(
                err, CKD_E_INVALID,
                "checkpoints of the runs %s and %s cannot be copied as one run: copy them one after "
                "the other",
                p->renamed, run);
        }
        p->renamed = p->selected[i] ? run : p->renamed;
    }
    return CKD_OK;
}

/* The name of the checkpoint's run in the destination. */
static const char *destination_run(const planning *p, const ckd_checkpoint *c) {
    return p->renamed && strcmp(p->renamed, c->run) == 0 ? p->t->options->as_run : c->run;
}

/* Returns the newest tombstone of a checkpoint in the destination's trash, or NULL. */
static const tombstone *in_trash(const transfer *t, const ckd_id *id) {
    const tombstone *found =
        t->trash_count ? bsearch(id, t->trash, t->trash_count, sizeof(*found), id_compare) : NULL;
    while (found && found > t->trash && id_equal(&found[-1].checkpoint, id)) {
        found--;
    }
    return found;
}

/* Takes over the members of m. */
static ckd_status add_item(planning *p, size_t at, manifest *m, ckd_copy_state state, ckd_error *err) {
    transfer *t = p->t;
    const ckd_checkpoint *c = &p->from.list.items[at];
    if (ARRAY_GROW(t->items, t->capacity, t->count + 1, "a plan of a copy", err) != CKD_OK) {
        manifest_free(m);
        return CKD_E_NOMEM;
    }
    transfer_item *item = &t->items[t->count++];
    *item = (transfer_item){.m = *m, .state = state};
    snprintf(item->source, sizeof(item->source), "%s@%llu", c->run, (unsigned long long)c->step);
    snprintf(item->m.checkpoint.run, sizeof(item->m.checkpoint.run), "%s", destination_run(p, c));
    item->m.checkpoint.stored_bytes -= m->file_bytes; /* a manifest does not count its own size */
    return CKD_OK;
}

/* A restored checkpoint keeps its name in the trash, which a rename may have changed. */
static ckd_status add_restored(planning *p, size_t at, manifest *m, const tombstone *dead, ckd_error *err) {
    ckd_status status = add_item(p, at, m, CKD_COPY_RESTORED, err);
    if (status == CKD_OK) {
        ckd_checkpoint *c = &p->t->items[p->t->count - 1].m.checkpoint;
        snprintf(c->run, sizeof(c->run), "%s", dead->run);
    }
    return status;
}

ckd_status transfer_check_present(const transfer *t, const char *name, const ckd_checkpoint *existing,
                                  ckd_error *err) {
    const char *new_name = t->options->as_run;
    return !new_name || strcmp(existing->run, new_name) == 0
               ? CKD_OK
               : err_set(err, CKD_E_EXISTS,
                         "%s is in '%s' already, as %s@%llu: a store has each checkpoint only once", name,
                         t->to->path, existing->run, (unsigned long long)existing->step);
}

static ckd_status add_present(planning *p, size_t at, const ckd_checkpoint *existing, ckd_error *err) {
    char name[CHECKPOINT_TEXT];
    manifest m = {.checkpoint = *existing};
    checkpoint_text(name, p->from.list.items[at].run, p->from.list.items[at].step, false);
    ckd_status status = transfer_check_present(p->t, name, existing, err);
    THEN(status, add_item(p, at, &m, CKD_COPY_PRESENT, err));
    if (status == CKD_OK) {
        p->t->items[p->t->count - 1].m.checkpoint = *existing;
    }
    return status;
}

static ckd_status add_skipped_item(planning *p, size_t at, const ckd_error *why, ckd_error *err) {
    manifest m = {.checkpoint = p->from.list.items[at]};
    ckd_status status = add_item(p, at, &m, CKD_COPY_LEFT, err);
    if (status == CKD_OK) {
        p->t->items[p->t->count - 1].left = *why;
        p->t->any_left = true;
    }
    return status;
}

/* ---- one checkpoint ---- */

static ckd_status read_source(manifest *m, const planning *p, const ckd_checkpoint *c, ckd_error *err) {
    ckd_status status = store_read_manifest(m, p->t->from, c->run, c->step, c->generation, err);
    if (status == CKD_OK && !id_equal(&m->checkpoint.id, &c->id)) {
        manifest_free(m);
        status = CKD_E_NOT_FOUND;
    }
    return status == CKD_E_NOT_FOUND
               ? err_set(err, CKD_E_NOT_FOUND, "%s@%llu was deleted or saved again meanwhile; copy again",
                         c->run, (unsigned long long)c->step)
               : status;
}

static ckd_status plan_one(planning *p, size_t at, ckd_error *err) {
    const ckd_checkpoint *c = &p->from.list.items[at], *existing = listed(&p->to, &c->id);
    if (existing) {
        return add_present(p, at, existing, err);
    }
    const tombstone *dead = in_trash(p->t, &c->id);
    ckd_error why = {.offset = CKD_NO_OFFSET};
    manifest m;
    ckd_status status = read_source(&m, p, c, &why);
    if (status == CKD_OK) {
        status = manifest_complete_early(&m, p->t->from, &why);
        if (status == CKD_OK) {
            return dead ? add_restored(p, at, &m, dead, err) : add_item(p, at, &m, CKD_COPY_MOVED, err);
        }
        manifest_free(&m);
    }
    if (!is_damage(status, &why) && status != CKD_E_UNSUPPORTED) {
        return err_from(err, status, &why);
    }
    char text[sizeof(why.message)];
    snprintf(text, sizeof(text), "%s@%llu in '%.100s' is damaged, and was not copied: %.200s", c->run,
             (unsigned long long)c->step, p->t->from->path, why.message);
    memcpy(why.message, text, sizeof(text));
    return add_skipped_item(p, at, &why, err);
}

const transfer_item *transfer_find_item(const transfer *t, const ckd_id *id) {
    for (size_t i = 0; i < t->count; i++) {
        if (id_equal(&t->items[i].m.checkpoint.id, id)) {
            return &t->items[i];
        }
    }
    return NULL;
}

/* ---- runs and steps ---- */

ckd_status transfer_check_runs(const transfer *t, ckd_error *err) {
    const char *before = "";
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        const char *run = t->items[i].m.checkpoint.run;
        if (transfer_moves(&t->items[i]) && strcmp(run, before) != 0) {
            status = settings_check_not_renamed(t->to, run, err);
            before = run;
        }
    }
    return status;
}

static ckd_status conflict(const transfer_item *item, const char *what, ckd_error *err) {
    return err_set(err, CKD_E_EXISTS, "%s@%llu is %s; nothing was copied: give the copied run another name",
                   item->m.checkpoint.run, (unsigned long long)item->m.checkpoint.step, what);
}

static int by_item_place(const void *a, const void *b) {
    const transfer_item *const *x = a, *const *y = b;
    return by_place(&(*x)->m.checkpoint, &(*y)->m.checkpoint);
}

/* A checkpoint that is restored from the trash keeps its name, like one that the destination lists. */
static ckd_status check_restored_name(const planning *p, const transfer_item *item, ckd_error *err) {
    const char *new_name = p->t->options->as_run;
    const ckd_checkpoint *c = &item->m.checkpoint;
    if (!new_name || strcmp(c->run, new_name) == 0) {
        return CKD_OK;
    }
    return err_set(
        err, CKD_E_EXISTS,
        "%s is in the trash of '%s', as %s@%llu; nothing was copied: restore it there, or empty the "
        "trash",
        item->source, p->t->to->path, c->run, (unsigned long long)c->step);
}

/*
 * Checks that no two items will have the same run and step, and that no item has those of a checkpoint in the
 * destination. This comes before the first change of the destination.
 */
static ckd_status check_places(const planning *p, ckd_error *err) {
    const transfer *t = p->t;
    const transfer_item **sorted = calloc(t->count + 1, sizeof(*sorted));
    ckd_status status = sorted ? CKD_OK : err_nomem(err, t->count * sizeof(*sorted), "a plan of a copy");
    size_t moved = 0;
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        const ckd_checkpoint_list *to = &p->to.list;
        const transfer_item *item = &t->items[i];
        bool restored = item->state == CKD_COPY_RESTORED;
        if (!restored && item->state != CKD_COPY_MOVED) {
            continue;
        }
        sorted[moved++] = item;
        if (restored) {
            status = check_restored_name(p, item, err);
        } else if (to->count &&
                   bsearch(&item->m.checkpoint, to->items, to->count, sizeof(*to->items), by_place)) {
            status = conflict(item, "another checkpoint in the destination", err);
        }
    }
    if (status == CKD_OK) {
        qsort(sorted, moved, sizeof(*sorted), by_item_place);
    }
    for (size_t i = 1; i < moved && status == CKD_OK; i++) {
        if (by_item_place(&sorted[i - 1], &sorted[i]) == 0) {
            bool restored = !transfer_moves(sorted[i - 1]) || !transfer_moves(sorted[i]);
            status = conflict(
                sorted[i],
                restored ? "the name of a checkpoint that would come back from the destination's trash"
                         : "the name of two of these checkpoints",
                err);
        }
    }
    free(sorted);
    return status;
}

/* ---- chunk files ---- */

transfer_file *transfer_find_file(const transfer *t, const ckd_id *id) {
    transfer_file key = {.file.id = *id};
    return t->file_count ? bsearch(&key, t->files, t->file_count, sizeof(key), id_compare) : NULL;
}

static ckd_status gather_files(transfer *t, ckd_error *err) {
    size_t total = 0, used = 0;
    for (size_t i = 0; i < t->count; i++) {
        total += transfer_moves(&t->items[i]) ? t->items[i].m.file_count : 0;
    }
    t->files = calloc(total + 1, sizeof(*t->files));
    if (!t->files) {
        return err_nomem(err, total * sizeof(*t->files), "chunk files to copy");
    }
    for (size_t i = 0; i < t->count; i++) {
        const manifest *m = &t->items[i].m;
        for (size_t k = 0; k < m->file_count && transfer_moves(&t->items[i]); k++) {
            t->files[used++].file = m->files[k];
        }
    }
    qsort(t->files, used, sizeof(*t->files), id_compare);
    for (size_t i = 0; i < used; i++) {
        if (t->file_count == 0 || id_compare(&t->files[t->file_count - 1], &t->files[i]) != 0) {
            t->files[t->file_count++] = t->files[i];
        }
    }
    for (size_t i = 0; i < t->file_count; i++) {
        transfer_file *f = &t->files[i];
        pathname p = path_chunk(t->to ? t->to->path : "", &f->file.id, "");
        f->in_place = t->to && file_exists(p.text);
        f->to_move = !f->in_place;
        f->part = transfer_find_part(t, &f->file.id);
        f->checked = f->is_intact = f->part && f->part->in_place;
    }
    return CKD_OK;
}

/* ---- tags ---- */

static bool is_asked(const planning *p, const ckd_id *id) {
    size_t at = find_id(&p->from, id);
    return at < p->from.list.count && p->selected[at];
}

/* Fills t->tags with the tags to set. Errors: EXISTS (the destination has one of them on another checkpoint). */
static ckd_status plan_tags(planning *p, ckd_error *err) {
    transfer *t = p->t;
    ckd_tag_list *existing = NULL;
    ckd_status status = ckd_store_tags(&t->tags, t->from, err);
    if (status == CKD_OK && t->to) {
        status = ckd_store_tags(&existing, t->to, err);
    }
    size_t kept = 0;
    for (size_t i = 0; status == CKD_OK && i < t->tags->count; i++) {
        const ckd_tag *tag = &t->tags->items[i];
        if (tag->status != CKD_OK) {
            store_message(t->from, "tag %s cannot be read, and is not copied", tag->tag);
            continue;
        }
        bool selected = is_asked(p, &tag->checkpoint);
        for (size_t k = 0; existing && k < existing->count && selected; k++) {
            const ckd_tag *other = &existing->items[k];
            bool same = strcmp(tag->tag, other->tag) == 0;
            if (same && !(other->status == CKD_OK && id_equal(&tag->checkpoint, &other->checkpoint))) {
                status = err_set(err, CKD_E_EXISTS,
                                 "the destination has the tag %s on another checkpoint; nothing was copied: "
                                 "move it there first, or copy without tags",
                                 tag->tag);
            }
            selected = selected && !same;
        }
        if (selected) {
            t->tags->items[kept++] = *tag;
        }
    }
    if (t->tags) {
        t->tags->count = kept;
    }
    ckd_tag_list_free(existing);
    return status;
}

static ckd_status plan(planning *p, ckd_error *err) {
    ckd_status status = sort_both(p, err);
    THEN(status, mark_asked(p, err));
    THEN(status, check_rename(p, err));
    for (size_t i = 0; i < p->from.list.count && status == CKD_OK; i++) {
        status = p->selected[i] ? plan_one(p, i, err) : CKD_OK;
    }
    THEN(status, transfer_skip_blocked(p->t, err));
    THEN(status, check_places(p, err));
    return status == CKD_OK && p->t->options->tags ? plan_tags(p, err) : status;
}

ckd_status transfer_plan(transfer *t, ckd_error *err) {
    planning p = {.t = t};
    ckd_status status = plan(&p, err);
    free(p.from.by_id);
    free(p.to.by_id);
    free(p.selected);
    return status;
}

ckd_status transfer_plan_files(transfer *t, ckd_error *err) {
    ckd_status status = transfer_choose_parts(t, err);
    THEN(status, gather_files(t, err));
    return status == CKD_OK ? transfer_count_bytes(t, err) : status;
}

void transfer_plan_free(transfer *t) {
    transfer_parts_free(t);
    catalog_list_free(&t->present);
    for (size_t i = 0; i < t->count; i++) {
        manifest_free(&t->items[i].m);
        bytes_free(&t->items[i].owners);
    }
    for (size_t i = 0; i < t->file_count; i++) {
        transfer_damage_free(&t->files[i].damaged);
        transfer_damage_free(&t->files[i].damaged_in_place);
    }
    free(t->items);
    free(t->files);
    free(t->trash);
    ckd_tag_list_free(t->tags);
    t->items = NULL;
    t->trash = NULL;
    t->trash_count = 0;
    t->files = NULL;
    t->tags = NULL;
    t->count = t->capacity = t->file_count = 0;
    t->total = 0;
    t->any_left = false;
}
