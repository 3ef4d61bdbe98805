/*
 * Checks the files of checkpoints that the destination has already. A checkpoint may be listed there, or be in the
 * trash, although files of it are damaged or missing. Such files are copied from the source like any other file.
 *
 * Files of listed checkpoints are checked by header, index and footer: a nightly copy into a large archive must not
 * read all of it. A checkpoint that is restored from the trash is read through.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/integrity/integrity.h"
#include "engine/retain/retain.h"
#include "engine/transfer/internal.h"

/* A file that an item names. */
typedef struct use {
    file_ref file;
    size_t item;
} use;

typedef struct uses {
    use *items; /* sorted by file */
    size_t count, capacity;
} uses;

static ckd_status add_uses(uses *u, const manifest *m, size_t item, ckd_error *err) {
    if (ARRAY_GROW(u->items, u->capacity, u->count + m->file_count, "the files of the destination", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        u->items[u->count++] = (use){m->files[i], item};
    }
    return CKD_OK;
}

/*
 * Adds the files that the destination's own manifest names, which a compaction there may have written. A checkpoint
 * that was deleted meanwhile adds nothing.
 */
static ckd_status add_item(uses *u, transfer *t, size_t at, ckd_error *err) {
    transfer_item *item = &t->items[at];
    const ckd_checkpoint *c = &item->m.checkpoint;
    manifest m = {.files = NULL};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = item->state == CKD_COPY_RESTORED
                            ? manifest_add_files_of(&m, t->to, &c->id, &why)
                            : store_read_manifest(&m, t->to, c->run, c->step, c->generation, &why);
    if (status == CKD_OK) {
        status = add_uses(u, &m, at, err);
        manifest_free(&m);
        return status;
    }
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (!is_damage(status, &why)) {
        return err_from(err, status, &why);
    }
    char text[sizeof(why.message)];
    snprintf(text, sizeof(text), "the manifest of %s in '%.100s' is damaged: %.200s", item->source,
             t->to->path, why.message);
    memcpy(why.message, text, sizeof(text));
    transfer_skip(t, item, status, &why);
    return CKD_OK;
}

ckd_status transfer_replace(const transfer *t, const transfer_file *f, ckd_error *err) {
    char hex[CKD_ID_TEXT], name[CKD_ID_TEXT + 4];
    pathname aside;
    ckd_id_text(hex, &f->file.id);
    snprintf(name, sizeof(name), "%s.ckd", hex);
    return repair_publish(&aside, t->to, transfer_path(t, &f->file.id).text, DIR_CHUNKS, name, err);
}

/* The reader lock keeps the manifest that names the file. */
static ckd_status put_in_place(transfer *t, const transfer_file *f, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, t->to, err);
    if (status == CKD_OK) {
        status = transfer_replace(t, f, err);
        lock_release(lock);
    }
    if (status != CKD_OK) {
        file_remove(transfer_path(t, &f->file.id).text, true, NULL);
    }
    return status;
}

/* Copies the file if the source has it whole. Otherwise *why says what is wrong with the source's file. */
static ckd_status mend(bool *mended, transfer *t, transfer_file *f, const transfer_item *item, ckd_error *why,
                       ckd_error *err) {
    t->total += f->file.size;
    ckd_status status =
        t->options->dry_run ? transfer_check_source(t, f, item, why) : transfer_refetch_file(t, f, item, why);
    *mended = status == CKD_OK;
    if (is_damage(status, why) || status == CKD_E_UNSUPPORTED) {
        return CKD_OK;
    }
    if (status != CKD_OK) {
        return err_from(err, status, why);
    }
    t->mended_files++;
    t->mended_bytes += f->file.size;
    return t->options->dry_run ? CKD_OK : put_in_place(t, f, err);
}

/* Leaves out all items that name the file. */
static void leave_users(transfer *t, const use *first, size_t count, const ckd_error *why,
                        const ckd_error *source) {
    for (size_t i = 0; i < count; i++) {
        transfer_item *item = &t->items[first[i].item];
        const ckd_checkpoint *c = &item->m.checkpoint;
        ckd_error left = *why;
        snprintf(left.message, sizeof(left.message),
                 "a chunk file of %.60s@%llu in '%.80s' is damaged or gone (%.100s), and the source cannot "
                 "replace it: %.120s",
                 c->run, (unsigned long long)c->step, t->to->path, why->message, source->message);
        if (item->state != CKD_COPY_LEFT) {
            transfer_skip(t, item, CKD_E_CORRUPT, &left);
        }
    }
}

static ckd_status check_and_mend(transfer *t, const use *first, size_t count, bool all, ckd_error *err) {
    transfer_file f = {.file = first->file, .in_place = true};
    transfer_item *item = &t->items[first->item];
    ckd_error why = {.offset = CKD_NO_OFFSET}, source = {.offset = CKD_NO_OFFSET};
    bool mended;
    ckd_status status = transfer_check_destination(t, &f, all, &why);
    if (status == CKD_E_NOT_FOUND) { /* a missing file is damage: its manifest names it */
        status = CKD_E_CORRUPT;
    }
    if (status == CKD_OK || !is_damage(status, &why)) {
        return err_from(err, status, &why);
    }
    status = mend(&mended, t, &f, item, &source, err);
    if (status == CKD_OK && mended) {
        item->bytes += f.file.size;
    } else if (status == CKD_OK) {
        leave_users(t, first, count, &why, &source);
    }
    return status;
}

ckd_status transfer_repair_destination(transfer *t, ckd_copy_state state, ckd_error *err) {
    uses u = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->count && t->to && status == CKD_OK; i++) {
        status = t->items[i].state == state ? add_item(&u, t, i, err) : CKD_OK;
    }
    if (u.count) {
        qsort(u.items, u.count, sizeof(*u.items), id_compare);
    }
    for (size_t i = 0, end; i < u.count && status == CKD_OK; i = end) {
        for (end = i + 1; end < u.count && id_compare(&u.items[i], &u.items[end]) == 0; end++) {
        }
        status = check_and_mend(t, &u.items[i], end - i, state == CKD_COPY_RESTORED, err);
    }
    free(u.items);
    return status;
}

/* ---- checkpoints that stay in the trash ---- */

typedef struct restoring {
    ckd_id *ids; /* of all RESTORED items */
    ckd_error *left;
    size_t count;
} restoring;

static ckd_status begin_restoring(restoring *r, const transfer *t, ckd_error *err) {
    *r = (restoring){.ids = calloc(t->count + 1, sizeof(*r->ids)),
                     .left = calloc(t->count + 1, sizeof(*r->left))};
    for (size_t i = 0; i < t->count && r->ids; i++) {
        if (t->items[i].state == CKD_COPY_RESTORED) {
            r->ids[r->count++] = t->items[i].m.checkpoint.id;
        }
    }
    return r->ids && r->left ? CKD_OK : err_nomem(err, t->count * sizeof(*r->left), "a plan of a copy");
}

/* The copy of a checkpoint would have the id of the one in the trash, and a store has each id only once. */
static void leave_in_trash(transfer *t, transfer_item *item, const ckd_error *why) {
    ckd_error left = *why;
    snprintf(left.message, sizeof(left.message),
             "%.120s was not copied: it is in the trash of '%.80s' and cannot be restored there (%.140s); "
             "once it is gone from that trash, copy again",
             item->source, t->to->path, why->message);
    transfer_skip(t, item, why->status, &left);
}

static void leave_refused(transfer *t, const restoring *r) {
    for (size_t i = 0, k = 0; i < t->count && k < r->count; i++) {
        transfer_item *item = &t->items[i];
        if (id_equal(&item->m.checkpoint.id, &r->ids[k])) {
            const ckd_error *why = &r->left[k++];
            if (why->status != CKD_OK) {
                leave_in_trash(t, item, why);
            }
        }
    }
}

static void end_restoring(restoring *r) {
    free(r->ids);
    free(r->left);
}

ckd_status transfer_skip_blocked(transfer *t, ckd_error *err) {
    restoring r;
    ckd_status status = begin_restoring(&r, t, err);
    if (status == CKD_OK && r.count) {
        status = undelete_check(r.left, t->to, r.ids, r.count, err);
    }
    if (status == CKD_OK) {
        leave_refused(t, &r);
    }
    end_restoring(&r);
    return status;
}

/* Clears the errors of items that another copy or a user restored meanwhile: they were no longer in the trash. */
static ckd_status follow_restored(transfer *t, restoring *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0, k = 0; i < t->count && k < r->count && status == CKD_OK; i++) {
        transfer_item *item = &t->items[i];
        if (id_equal(&item->m.checkpoint.id, &r->ids[k])) {
            ckd_checkpoint found;
            ckd_error why = {.offset = CKD_NO_OFFSET};
            status = store_find_id(&found, t->to, &r->ids[k], &why);
            if (status == CKD_OK) {
                item->m.checkpoint = found;
                r->left[k] = (ckd_error){.offset = CKD_NO_OFFSET};
            }
            status = err_except(err, status, CKD_E_NOT_FOUND, &why);
            k++;
        }
    }
    return status;
}

ckd_status transfer_restore(transfer *t, ckd_error *err) {
    restoring r = {.ids = NULL};
    ckd_status status = transfer_repair_destination(t, CKD_COPY_RESTORED, err);
    THEN(status, begin_restoring(&r, t, err));
    if (status == CKD_OK && r.count) {
        status = ckd_store_undelete_each(r.left, t->to, r.ids, r.count, err);
        THEN(status, follow_restored(t, &r, err));
    }
    if (status == CKD_OK) {
        leave_refused(t, &r);
    }
    end_restoring(&r);
    return status;
}
