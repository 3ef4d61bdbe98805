/* Reconciles a catalog with the manifests, which are authoritative. */
#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "engine/store/manifests.h"
#include "engine/store/damage.h"

#define MARK "mark" /* key in the catalog's table meta */

/* One (run, step) of both sides: its manifests, newest generation first, and its catalog row. */
typedef struct pairing {
    const manifest_name *items;
    size_t count;              /* 0: no manifest counts */
    const ckd_checkpoint *row; /* NULL: not in the catalog */
} pairing;

/*
 * Readers hold no lock. A writer may hold none when it queries a catalog in memory; no other process changes its rows.
 */
static bool is_unlocked(const ckd_store *store) {
    return store->mode == CKD_OPEN_READ || store->catalog_in_memory;
}

/* A merge of both lists, which are sorted by run and step. */
typedef struct cursor {
    const manifest_list *manifests;
    const ckd_checkpoint_list *rows;
    size_t manifest, checkpoint;
} cursor;

static size_t generations(const manifest_list *list, size_t first) {
    size_t end = first + 1;
    while (end < list->count && same_checkpoint_name(&list->items[first], &list->items[end])) {
        end++;
    }
    return end - first;
}

static int compare_names(const manifest_name *a, const ckd_checkpoint *b) {
    int order = strcmp(a->run, b->run);
    return order ? order : a->step < b->step ? -1 : a->step > b->step;
}

static bool next_pairing(pairing *out, cursor *c) {
    *out = (pairing){0};
    bool has_manifest = c->manifest < c->manifests->count, has_known = c->checkpoint < c->rows->count;
    int order = !has_manifest ? 1
                : !has_known
                    ? -1
                    : compare_names(&c->manifests->items[c->manifest], &c->rows->items[c->checkpoint]);
    if (has_manifest && order <= 0) {
        out->items = &c->manifests->items[c->manifest];
        out->count = generations(c->manifests, c->manifest);
        c->manifest += out->count;
    }
    if (has_known && order >= 0) {
        out->row = &c->rows->items[c->checkpoint++];
    }
    return has_manifest || has_known;
}

/*
 * Removes the rows that catalog_add cannot replace. A replaced row keeps its timings. *superseded: while a run is being
 * renamed, a checkpoint may have manifests under both names; then the higher generation counts.
 */
static ckd_status remove_unless_replaceable(bool *superseded, ckd_store *store, const ckd_checkpoint *row,
                                            const ckd_checkpoint *next, ckd_error *err) {
    ckd_checkpoint same;
    ckd_error why = {0};
    bool replaceable = !row || (row->generation < next->generation && id_equal(&row->id, &next->id));
    *superseded = false;
    ckd_status status = replaceable ? CKD_OK : catalog_remove(store->catalog, row->run, row->step, err);
    ckd_status found = status == CKD_OK ? catalog_find_id(&same, store->catalog, &next->id, &why) : status;
    if (status != CKD_OK || found == CKD_E_NOT_FOUND) {
        return status;
    }
    if (found != CKD_OK) {
        return err_from(err, found, &why);
    }
    bool other_name = same.step != next->step || strcmp(same.run, next->run) != 0;
    *superseded = other_name && same.generation > next->generation;
    return other_name && same.generation < next->generation
               ? catalog_remove(store->catalog, same.run, same.step, err)
               : CKD_OK;
}

static void skip(ckd_store *store, const manifest_name *name, const ckd_error *why) {
    store->manifests_skipped++;
    store_message(store, "manifest %s.%llu.%u is not used: %s", name->run, (unsigned long long)name->step,
                  (unsigned)name->generation, why->message);
}

/* An unreadable manifest does not keep the others from being listed. */
static bool may_be_skipped(ckd_status status) {
    return status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND ||
           status == CKD_E_IO;
}

static bool same_row(const ckd_checkpoint *a, const ckd_checkpoint *b) {
    return id_equal(&a->id, &b->id) && id_equal(&a->parent, &b->parent) && a->kind == b->kind &&
           a->created_ns == b->created_ns && a->raw_bytes == b->raw_bytes &&
           a->stored_bytes == b->stored_bytes;
}

typedef enum agreement {
    DIFFERS,
    AGREES,
    REPLACED, /* differs: the manifest has the same generation, but is another checkpoint's */
} agreement;

/*
 * Whether the catalog's row matches the manifest. While a handle keeps one file open, comparing names is enough, as the
 * file changes only with the manifests. A file that is new to the handle may be an old one that was put back, whose
 * names mean other checkpoints.
 */
static ckd_status compare(agreement *out, const ckd_store *store, const pairing *p, ckd_error *err) {
    *out = p->count && p->row && p->row->generation == p->items[0].generation ? AGREES : DIFFERS;
    if (*out == DIFFERS || store->catalog_compared) {
        return CKD_OK;
    }
    manifest m;
    ckd_error why = {0};
    ckd_status status =
        store_read_manifest(&m, store, p->items[0].run, p->items[0].step, p->items[0].generation, &why);
    if (status == CKD_OK) {
        *out = !id_equal(&m.checkpoint.id, &p->row->id) ? REPLACED
               : same_row(&m.checkpoint, p->row)        ? AGREES
                                                        : DIFFERS;
        manifest_free(&m);
    }
    return may_be_skipped(status)
               ? CKD_OK
               : err_from(err, status, &why); /* the row is no worse than the damaged manifest */
}

/* ---- a manifest, as rows of the catalog ---- */

static void file_row(catalog_file *row, const file_ref *file) {
    memset(row, 0, sizeof(*row));
    scrub_times_name(row->name, &file->id);
    row->rank = file->rank;
    row->size = file->size;
    row->root = file->root;
}

ckd_status store_ingest(ckd_store *store, const manifest *m, ckd_error *err) {
    catalog_file *files = calloc(m->own_count + 1, sizeof(*files));
    if (!files) {
        return err_nomem(err, m->own_count * sizeof(*files), "catalog rows");
    }
    for (size_t i = 0; i < m->own_count; i++) { /* older files belong to other checkpoints, or to none */
        file_row(&files[i], &m->files[i]);
    }
    catalog_entry entry = {.checkpoint = &m->checkpoint,
                           .manifest_bytes = m->file_bytes,
                           .files = files,
                           .file_count = m->own_count};
    ckd_status status = catalog_add(store->catalog, &entry, err);
    free(files);
    return status;
}

/* ---- the pairings that differ ---- */

/*
 * Ingests the highest valid generation. If there is none, the checkpoint is not listed. *changed: it is gone, so the
 * manifests must be listed again. NULL: a manifest that is gone is skipped.
 */
static ckd_status ingest_newest(bool *changed, ckd_store *store, const pairing *p, ckd_error *err) {
    for (size_t i = 0; i < p->count; i++) {
        const manifest_name *name = &p->items[i];
        ckd_error why = {0};
        manifest m;
        ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, &why);
        bool skipped = may_be_skipped(status);
        if (status == CKD_OK) {
            bool superseded;
            status = remove_unless_replaceable(&superseded, store, p->row, &m.checkpoint, err);
            if (status != CKD_OK || superseded) {
                manifest_free(&m);
                return status;
            }
            status = store_ingest(store, &m, &why);
            manifest_free(&m);
            /*
             * It contradicts itself, or has another checkpoint's id. It is skipped, so that all other checkpoints can
             * be listed.
             */
            skipped = status == CKD_E_INVALID || status == CKD_E_EXISTS || status == CKD_E_NOT_FOUND;
        }
        if (status == CKD_E_NOT_FOUND && changed) {
            *changed = true;
            return CKD_OK;
        }
        if (!skipped) {
            return err_from(err, status, &why);
        }
        skip(store, name, &why);
    }
    return CKD_OK;
}

static bool is_deleted(const manifest_list *tombstones, const ckd_checkpoint *c) {
    manifest_name name = {.step = c->step, .generation = c->generation};
    snprintf(name.run, sizeof(name.run), "%s", c->run);
    return manifests_covering_tombstone(tombstones, &name) != NULL;
}

/* Compares all pairings. The caller frees the array, also on failure. */
static ckd_status compare_all(agreement **out, const ckd_store *store, const manifest_list *manifests,
                              const ckd_checkpoint_list *listed, ckd_error *err) {
    size_t count = 0, capacity = manifests->count + listed->count;
    pairing p;
    cursor c = {manifests, listed, 0, 0};
    *out = calloc(capacity + 1, sizeof(**out));
    ckd_status status = *out ? CKD_OK : err_nomem(err, capacity * sizeof(**out), "checkpoints");
    while (status == CKD_OK && next_pairing(&p, &c)) {
        status = compare(&(*out)[count++], store, &p, err);
    }
    return status;
}

/*
 * Keeps rows that the catalog is about to drop although their checkpoints have neither a manifest nor a tombstone. A
 * manifest that was replaced by another checkpoint's is gone, too. A row that cannot be kept must stay in the catalog,
 * so the failure ends the reconciliation. Without the publish lock nothing is kept: others may have deleted the
 * checkpoint, and removed its tombstone as well.
 */
static ckd_status keep_vanished(const ckd_store *store, const manifest_list *manifests,
                                const ckd_checkpoint_list *listed, const agreement *found, ckd_error *err) {
    char noted[CATALOG_META];
    if (is_unlocked(store)) {
        return CKD_OK;
    }
    const ckd_checkpoint **lost = calloc(listed->count + 1, sizeof(*lost));
    manifest_list tombstones = {0};
    pairing p;
    cursor c = {manifests, listed, 0, 0};
    size_t count = 0;
    ckd_status status = lost ? manifests_tombstones(&tombstones, store, err)
                             : err_nomem(err, listed->count * sizeof(*lost), "checkpoints");
    THEN(status, catalog_meta(noted, store->catalog, DELETION_MARK_META, err));
    for (size_t i = 0; status == CKD_OK && next_pairing(&p, &c); i++) {
        if (found[i] == REPLACED || (p.count == 0 && !is_deleted(&tombstones, p.row))) {
            lost[count++] = p.row;
        }
    }
    if (status == CKD_OK && count) {
        status = vanished_save(store, lost, count, noted, err);
    }
    manifests_free(&tombstones);
    free(lost);
    return status;
}

static ckd_status apply(bool *changed, ckd_store *store, const manifest_list *manifests,
                        const ckd_checkpoint_list *listed, ckd_error *err) {
    pairing p;
    cursor c = {manifests, listed, 0, 0};
    agreement *found;
    ckd_status status = compare_all(&found, store, manifests, listed, err);
    THEN(status, keep_vanished(store, manifests, listed, found, err));
    while (status == CKD_OK && next_pairing(&p, &c)) {
        /* removals first: an id may have moved to another name */
        if (p.count == 0) {
            status = catalog_remove(store->catalog, p.row->run, p.row->step, err);
        }
    }
    c = (cursor){manifests, listed, 0, 0};
    for (size_t i = 0; status == CKD_OK && next_pairing(&p, &c); i++) {
        if (p.count && found[i] != AGREES) {
            status = ingest_newest(changed, store, &p, err);
        }
    }
    free(found);
    return status;
}

/* ---- marks: whether the folders are unchanged since the catalog agreed with their contents ---- */

/*
 * A store with this many checkpoints gets a mark even if nothing else is written, because reading all its manifests
 * takes longer than a write.
 */
#define WORTH_A_MARK 1000

/*
 * Makes the mark of the folders; "" if it is unknown. Under the publish lock, or before the names are read: later
 * changes then show in the names, or not at all.
 */
static void mark_of(char out[CATALOG_META], const ckd_store *store) {
    char manifests[FILE_FINGERPRINT], tombstones[FILE_FINGERPRINT];
    file_fingerprint(manifests, path_in(store->path, DIR_MANIFESTS).text);
    file_fingerprint(tombstones, path_in(store->path, DIR_TOMBSTONES).text);
    bool known = manifests[0] && tombstones[0];
    snprintf(out, CATALOG_META, "%s%s%s", known ? manifests : "", known ? ", " : "", known ? tombstones : "");
}

ckd_status store_record_fingerprint(ckd_store *store, ckd_error *err) {
    char mark[CATALOG_META];
    if (store->catalog_in_memory || !store->catalog_compared) {
        return CKD_OK;
    }
    mark_of(mark, store);
    return catalog_set_meta(store->catalog, MARK, mark, err);
}

/*
 * If the mark is unchanged, this catalog was compared with these manifests. From then on comparing names is enough,
 * because every writer of a manifest also changes the row in the file. For a catalog in memory nobody does that: a
 * deleted checkpoint may be saved again with the same generation.
 */
static ckd_status trust_mark(ckd_store *store, const char *mark, ckd_error *err) {
    char noted[CATALOG_META];
    bool others_have_files =
        store_is_remote(store); /* machines that change the store change their own catalogs */
    if (others_have_files || store->catalog_in_memory) {
        store->catalog_compared = false;
    }
    if (store->catalog_compared || !mark[0]) {
        return CKD_OK;
    }
    ckd_status status = catalog_meta(noted, store->catalog, MARK, err);
    store->catalog_compared = status == CKD_OK && strcmp(noted, mark) == 0;
    return status;
}

ckd_status store_record_meta(ckd_store *store, const char *key, const char *text, ckd_error *err) {
    char noted[CATALOG_META];
    ckd_status status = catalog_meta(noted, store->catalog, key, err);
    if (status != CKD_OK || !text[0] || strcmp(noted, text) == 0) {
        return status;
    }
    status = catalog_begin(store->catalog, err);
    if (status != CKD_OK) {
        return status;
    }
    status = catalog_set_meta(store->catalog, key, text, err);
    if (status != CKD_OK) {
        catalog_rollback(store->catalog);
        return status;
    }
    return catalog_commit(store->catalog, err);
}

/* ---- merging ---- */

/* State of the folders, read before the names of the manifests. */
typedef struct folder_marks {
    char folders[CATALOG_META], deletions[CATALOG_META];
    bool deletions_unknown; /* the catalog keeps its present mark, which is no newer */
    bool final;             /* the manifests will not be listed again if one is gone */
} folder_marks;

/* Compares both lists, which are in the same order. */
typedef struct names_check {
    const manifest_list *manifests;
    size_t at;
    bool agree;
} names_check;

static bool check_place(void *context, const char *run, uint64_t step, uint32_t generation) {
    names_check *n = context;
    const manifest_name *name = n->at < n->manifests->count ? &n->manifests->items[n->at] : NULL;
    n->agree = name && name->step == step && name->generation == generation && strcmp(name->run, run) == 0;
    n->at = n->agree ? n->at + generations(n->manifests, n->at) : n->at;
    return n->agree;
}

/* The cheap half of all_agree: names only. */
static ckd_status names_agree(bool *out, const ckd_store *store, const manifest_list *manifests,
                              ckd_error *err) {
    names_check n = {manifests, 0, true};
    ckd_status status = catalog_places(store->catalog, check_place, &n, err);
    *out = n.agree && n.at == manifests->count;
    return status;
}

static ckd_status apply_in_transaction(reconcile_result *result, ckd_store *store, const folder_marks *marks,
                                       const manifest_list *manifests, const ckd_checkpoint_list *listed,
                                       ckd_error *err) {
    ckd_status status = catalog_begin(store->catalog, err);
    if (status != CKD_OK) {
        return status;
    }
    status = apply(marks->final ? NULL : &result->changed, store, manifests, listed, err);
    THEN(status, scrub_times_write(store, err));
    THEN(status, catalog_set_meta(store->catalog, MARK, marks->folders, err));
    if (status == CKD_OK && !marks->deletions_unknown) {
        status = catalog_set_meta(store->catalog, DELETION_MARK_META, marks->deletions, err);
    }
    if (status != CKD_OK) {
        catalog_rollback(store->catalog);
        return status;
    }
    status = catalog_commit(store->catalog, err);
    store->scrubbed.count = status == CKD_OK ? 0 : store->scrubbed.count;
    return status;
}

static ckd_status all_agree(bool *out, const ckd_store *store, const manifest_list *manifests,
                            const ckd_checkpoint_list *listed, ckd_error *err) {
    pairing p;
    cursor c = {manifests, listed, 0, 0};
    ckd_status status = CKD_OK;
    agreement found = AGREES;
    while (found == AGREES && status == CKD_OK && next_pairing(&p, &c)) {
        status = compare(&found, store, &p, err);
    }
    *out = found == AGREES;
    return status;
}

/*
 * Reconciles with the listed manifests. Syncs data/m first, so that everything in a writer's catalog is durable, even
 * if the writer of a manifest died before its own sync.
 */
static ckd_status reconcile_lists(reconcile_result *result, ckd_store *store, const folder_marks *marks,
                                  const manifest_list *manifests, ckd_error *err) {
    ckd_checkpoint_list listed = {0};
    ckd_status status = catalog_list(&listed, store->catalog, NULL, err);
    result->catalog_failed = status != CKD_OK;
    bool agree = true;
    THEN(status, all_agree(&agree, store, manifests, &listed, err));
    if (status == CKD_OK && !agree) {
        bool durable = store->mode != CKD_OPEN_READ;
        result->behind = !durable && !store->catalog_in_memory;
        if (durable) {
            status = dir_sync(path_in(store->path, DIR_MANIFESTS).text, err);
        }
        if (status == CKD_OK && !result->behind) {
            status = apply_in_transaction(result, store, marks, manifests, &listed, err);
            result->catalog_failed = status != CKD_OK;
        }
    } else if (status == CKD_OK && (store->catalog_in_memory ||
                                    (manifests->count >= WORTH_A_MARK && store->mode != CKD_OPEN_READ))) {
        status = store_record_meta(store, MARK, marks->folders, err);
        result->catalog_failed = status != CKD_OK;
    }
    catalog_list_free(&listed);
    return status;
}

static ckd_status reconcile(reconcile_result *result, ckd_store *store, const folder_marks *marks,
                            const manifest_list *manifests, ckd_error *err) {
    bool agree = false;
    ckd_status status = trust_mark(store, marks->folders, err);
    if (status == CKD_OK && store->catalog_compared) {
        status = names_agree(&agree, store, manifests, err);
    }
    result->catalog_failed = status != CKD_OK;
    if (status == CKD_OK && !agree) {
        status = reconcile_lists(result, store, marks, manifests, err);
    }
    if (status == CKD_OK && !result->behind && (store->mode != CKD_OPEN_READ || store->catalog_in_memory)) {
        status = store_record_meta(store, DELETION_MARK_META, marks->deletions, err);
        result->catalog_failed = status != CKD_OK;
    }
    store->catalog_compared = store->catalog_compared || (status == CKD_OK && !result->behind);
    return status;
}

static bool changed_since(const folder_marks *marks, const ckd_store *store) {
    char now[CATALOG_META];
    mark_of(now, store);
    return strcmp(now, marks->folders) != 0;
}

static ckd_status reconcile_once(reconcile_result *result, ckd_store *store, bool final, ckd_error *err) {
    *result = (reconcile_result){0};
    folder_marks marks = {.final = final};
    manifest_list manifests;
    marks.deletions_unknown = deletion_mark_read(marks.deletions, store, NULL) != CKD_OK;
    mark_of(marks.folders, store);
    ckd_status status = manifests_read(&manifests, store, err);
    if (status != CKD_OK) {
        return status;
    }
    result->changed = !final && changed_since(&marks, store);
    if (!result->changed) {
        status = reconcile(result, store, &marks, &manifests, err);
    }
    manifests_free(&manifests);
    return status;
}

/*
 * Without a lock, a compaction may replace manifests meanwhile. A listing of the folder may then show neither the old
 * manifest nor the new one, or a manifest may be gone when it is read. Rows that a try has added stay in the catalog, so
 * the next try reads only what has changed since.
 */
ckd_status store_reconcile_catalog(reconcile_result *result, ckd_store *store, ckd_error *err) {
    enum { TRIES = 20 };
    int tries = is_unlocked(store) ? TRIES : 1;
    ckd_status status;
    do {
        status = reconcile_once(result, store, --tries == 0, err);
    } while (status == CKD_OK && result->changed);
    return status;
}
