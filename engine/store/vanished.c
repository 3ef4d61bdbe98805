/* Finds checkpoints whose manifests are lost: by their rows in the catalog, and by chunk files that nothing names. */
#include "engine/store/damage.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/store/lost_rows.h"
#include "engine/store/manifests.h"
#include "engine/store/strays.h"

/* ---- lost checkpoints ---- */

/* The evidence about checkpoints that a catalog knew. */
typedef struct evidence {
    bytes checkpoints; /* ids in manifests, sorted */
    manifest_list names;
    manifest_list before, after; /* the tombstones, read before and after the names */
} evidence;

static void evidence_free(evidence *e) {
    bytes_free(&e->checkpoints);
    manifests_free(&e->names);
    manifests_free(&e->before);
    manifests_free(&e->after);
}

/* Reads names after manifests, because a generation may be replaced while manifests are read. */
static ckd_status find_evidence(vanished *v, evidence *e, const ckd_store *store, ckd_error *err) {
    ckd_status status = strays_find(v, &e->checkpoints, store, err);
    THEN(status, manifests_tombstones(&e->before, store, err));
    THEN(status, manifests_read_all(&e->names, store, err));
    return status == CKD_OK ? manifests_tombstones(&e->after, store, err) : status;
}

static bool was_in_trash(const evidence *e, const manifest_name *name) {
    return manifests_covering_tombstone(&e->before, name) && manifests_covering_tombstone(&e->after, name);
}

static bool is_deleted(const evidence *e, const ckd_checkpoint *c) {
    manifest_name name = {.step = c->step, .generation = c->generation};
    snprintf(name.run, sizeof(name.run), "%s", c->run);
    return manifests_covering_tombstone(&e->before, &name) || manifests_covering_tombstone(&e->after, &name);
}

/*
 * Whether the checkpoint was deleted, or has a manifest by its name: a damaged one, or another generation. The lists
 * hold names only, so damaged contents do not matter. A manifest in the trash does not count, because it belongs to an
 * earlier checkpoint of the same name. But it counts if a deletion or a restore moves it while the lists are read.
 */
static bool is_named(const evidence *e, const ckd_checkpoint *c) {
    bool found = is_deleted(e, c);
    for (size_t i = 0; i < e->names.count && !found; i++) {
        const manifest_name *n = &e->names.items[i];
        found = n->step == c->step && strcmp(n->run, c->run) == 0 && !was_in_trash(e, n);
    }
    return found;
}

static ckd_status add(ckd_checkpoint **items, size_t *count, size_t *capacity, const ckd_checkpoint *c,
                      ckd_error *err) {
    if (ARRAY_GROW(*items, *capacity, *count + 1, "checkpoints", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    (*items)[(*count)++] = *c;
    return CKD_OK;
}

/* explain: the checkpoint is lost, so its files are marked as explained. */
static bool in_strays(vanished *v, const ckd_id *checkpoint, bool explain) {
    bool found = false;
    for (size_t i = 0; i < v->stray_count; i++) {
        stray_file *s = &v->strays[i];
        if (s->checkpoint_count &&
            bsearch(checkpoint, s->checkpoints, s->checkpoint_count, sizeof(*checkpoint), id_compare)) {
            found = true;
            s->explained = s->explained || explain;
        }
    }
    return found;
}

static ckd_checkpoint *find_checkpoint(ckd_checkpoint *items, size_t count, const ckd_id *id) {
    for (size_t i = 0; i < count; i++) {
        if (id_equal(&items[i].id, id)) {
            return &items[i];
        }
    }
    return NULL;
}

/* If the record of a checkpoint is damaged, only its name is known. Another source may know the rest. */
static bool has_checkpoint(ckd_checkpoint *items, size_t count, const ckd_checkpoint *c) {
    ckd_checkpoint *found = find_checkpoint(items, count, &c->id);
    if (found && !found->created_ns) {
        *found = *c;
    }
    return found != NULL;
}

/* How much a catalog's row proves. */
typedef enum witness {
    SAYS_NOTHING, /* unless a stray file has records of its checkpoint: then it is doubtful */
    DOUBTFUL,     /* unless a stray file has records of its checkpoint: then it is lost */
    PROVES,       /* it was not deleted */
} witness;

/*
 * A catalog that is older than a deletion. Each machine that uses a bucket has a catalog of its own, which gets old
 * whenever another one deletes.
 */
static witness old_rows_of(const ckd_store *store) {
    return store_is_remote(store) ? SAYS_NOTHING : DOUBTFUL;
}

static ckd_status add_if_lost(vanished *v, const evidence *e, const ckd_checkpoint *c, witness w,
                              ckd_error *err) {
    if (ids_contain(&e->checkpoints, &c->id) || has_checkpoint(v->items, v->count, c)) {
        return CKD_OK;
    }
    /*
     * A stray may hold records of a deleted checkpoint on which a lost one builds. An old row does not tell whether its
     * checkpoint was deleted or lost.
     */
    bool strays = !v->incomplete && in_strays(v, &c->id, w != SAYS_NOTHING);
    if (w == PROVES || (strays && w == DOUBTFUL)) {
        const ckd_checkpoint *known = find_checkpoint(v->doubtful, v->doubtful_count, &c->id);
        return add(&v->items, &v->count, &v->capacity, known && !c->created_ns ? known : c, err);
    }
    return (strays || w == DOUBTFUL) && !has_checkpoint(v->doubtful, v->doubtful_count, c)
               ? add(&v->doubtful, &v->doubtful_count, &v->doubtful_capacity, c, err)
               : CKD_OK;
}

/*
 * Drops doubtful checkpoints without a record in any chunk file, including those in data/q: they cannot come back, so
 * nothing is lost. They stay as long as they may be lost checkpoints with records: while the weight of rows is unknown,
 * a chunk file cannot be read, or parity may rebuild one.
 */
static ckd_status drop_without_records(vanished *v, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, recorded = {0};
    if (v->unweighed || !v->doubtful_count || strays_may_be_rebuilt(store)) {
        return CKD_OK;
    }
    ckd_status status = strays_list_chunks(&files, store, false, err);
    bool all_read = true;
    for (size_t i = 0; i < files.size / sizeof(ckd_id) && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        all_read = strays_add_recorded(&recorded, store, &id) && all_read;
    }
    all_read = strays_add_aside(&recorded, store) && all_read;
    if (status == CKD_OK && recorded.failed) {
        status = err_nomem(err, recorded.size, "the checkpoints of chunk files");
    }
    size_t count = v->doubtful_count;
    if (status == CKD_OK) {
        ids_sort(&recorded);
        v->doubtful_count = all_read ? 0 : count;
    }
    for (size_t i = 0; i < count && all_read && status == CKD_OK; i++) {
        if (ids_contain(&recorded, &v->doubtful[i].id)) {
            v->doubtful[v->doubtful_count++] = v->doubtful[i];
        }
    }
    bytes_free(&files);
    bytes_free(&recorded);
    return status;
}

/*
 * A deleted checkpoint that can still be restored needs its manifest, so a missing one is a loss. A collection ends the
 * grace period in the tombstone before it removes a manifest, and a rename or a restore keeps the id. So none of these
 * looks like a loss.
 */
static ckd_status add_from_trash(vanished *v, const evidence *e, const ckd_store *store, ckd_error *err) {
    bool *covers;
    ckd_status status = manifests_mark_covering(&covers, &e->before, &e->names, err);
    for (size_t i = 0; i < e->before.count && !v->incomplete && status == CKD_OK; i++) {
        tombstone t;
        bool lost = !covers[i] && tombstone_read(&t, store, &e->before.items[i], NULL) == CKD_OK &&
                    tombstone_in_grace(&t, clock_wall_ns()) && !ids_contain(&e->checkpoints, &t.checkpoint);
        if (lost) {
            ckd_checkpoint c = {.id = t.checkpoint, .step = t.step, .generation = t.generation};
            snprintf(c.run, sizeof(c.run), "%s", t.run);
            (void)in_strays(v, &c.id, true);
            status = add(&v->trashed, &v->trashed_count, &v->trashed_capacity, &c, err);
        }
    }
    free(covers);
    return status;
}

/* ---- sources of known checkpoints ---- */

typedef struct rows {
    ckd_checkpoint_list list;
    char noted[CATALOG_META]; /* the deletion mark, read before the rows */
    rows_known known;
    ckd_error why; /* unless they are known */
} rows;

/* A journal was left by a writer that died. The next writer rolls it back, and then the rows can be read. */
static rows_known rows_after(ckd_status status, const ckd_store *store) {
    switch (status) {
    case CKD_OK:
        return ROWS_KNOWN;
    case CKD_E_CORRUPT:
        return file_bytes(path_in(store->path, FILE_CATALOG "-journal").text) ? ROWS_LATER : ROWS_GONE;
    case CKD_E_NOT_FOUND:
    case CKD_E_MISMATCH:
        return ROWS_GONE;
    default:
        return ROWS_LATER;
    }
}

/* Reads a catalog's rows; none if it cannot be read. */
static ckd_status read_rows(rows *out, const ckd_store *store, const char *name, ckd_error *err) {
    catalog *c = NULL;
    ckd_error why = {0};
    pathname p = path_in(store->path, name);
    *out = (rows){.noted = ""};
    ckd_status status = file_exists(p.text) ? catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, &why)
                                            : CKD_E_NOT_FOUND;
    THEN(status, catalog_meta(out->noted, c, DELETION_MARK_META, &why));
    THEN(status, catalog_list(&out->list, c, NULL, &why));
    catalog_close(c);
    out->known = rows_after(status, store);
    out->why = why;
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

void older_intent_key(char out[CATALOG_META], const char *name) {
    snprintf(out, CATALOG_META, "intent %.*s", CKD_ID_TEXT - 1, name);
}

rows_known vanished_rows_of(const ckd_store *store, const char *name) {
    catalog *c = NULL;
    char key[CATALOG_META], older[CATALOG_META] = "";
    older_intent_key(key, name);
    ckd_status status =
        catalog_open(&c, path_in(store->path, FILE_CATALOG).text, CATALOG_READ, &store->id, 1000, NULL);
    THEN(status, catalog_meta(older, c, key, NULL));
    catalog_close(c);
    return status == CKD_OK && older[0] ? ROWS_GONE : rows_after(status, store);
}

/*
 * Sets *out to how much rows prove. otherwise: the value if the catalog is older than some deletion; also set after an
 * error. Errors: IO, NOMEM.
 */
static ckd_status weigh(witness *out, const char noted[CATALOG_META], const ckd_store *store,
                        witness otherwise, ckd_error *err) {
    bool current;
    ckd_status status = deletion_mark_is_current(&current, noted, store, err);
    *out = current ? PROVES : otherwise;
    return status;
}

/* Considers rows without a manifest or a tombstone. otherwise: as for weigh. */
static ckd_status add_lost_rows(vanished *v, const evidence *e, const rows *r, const ckd_store *store,
                                witness otherwise, ckd_error *err) {
    witness w;
    ckd_status status = CKD_OK;
    bool weighed = weigh(&w, r->noted, store, otherwise, NULL) == CKD_OK;
    for (size_t i = 0; i < r->list.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &r->list.items[i];
        bool named = is_named(e, c);
        status = named ? CKD_OK : add_if_lost(v, e, c, w, err);
        v->unweighed = v->unweighed || (!named && !weighed && otherwise == DOUBTFUL);
    }
    return status;
}

static ckd_status add_saved_losses(vanished *v, const evidence *e, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = damage_list_folder(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        manifest m;
        if (lost_row_read(&m, store, list.names[i], VANISHED_END)) {
            status = add_if_lost(v, e, &m.checkpoint, PROVES, err);
            manifest_free(&m);
        } else if (lost_row_read(&m, store, list.names[i], DOUBTFUL_END)) {
            /* A later checkpoint of the same name does not matter: this one was missing before that one was saved. */
            status = is_deleted(e, &m.checkpoint) ? CKD_OK : add_if_lost(v, e, &m.checkpoint, DOUBTFUL, err);
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
    return status;
}

/* Reads rows before manifests: a checkpoint that was new then has a manifest now. */
ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err) {
    evidence e = {0};
    rows now = {0}, old = {0}; /* old: the catalog that a rebuild put aside */
    *out = (vanished){0};
    ckd_status status = read_rows(&now, store, FILE_CATALOG, err);
    THEN(status, read_rows(&old, store, FILE_CATALOG ".old", err));
    THEN(status, find_evidence(out, &e, store, err));
    THEN(status, add_lost_rows(out, &e, &now, store, old_rows_of(store), err));
    out->rows = now.known;
    THEN(status, add_saved_losses(out, &e, store, err));
    THEN(status, add_lost_rows(out, &e, &old, store, SAYS_NOTHING, err));
    THEN(status, drop_without_records(out, store, err));
    THEN(status, add_from_trash(out, &e, store, err));
    bool lost = out->count || out->doubtful_count || out->trashed_count;
    if (status == CKD_OK && !out->incomplete && out->stray_count && !lost) {
        status = strays_find_spare(out, &e.checkpoints, store, err);
    }
    catalog_list_free(&now.list);
    catalog_list_free(&old.list);
    evidence_free(&e);
    return status;
}

bool vanished_confirm(vanished *v, const char *run, uint64_t step, ckd_error *err) {
    size_t at = 0;
    while (at < v->doubtful_count &&
           (v->doubtful[at].step != step || strcmp(v->doubtful[at].run, run) != 0)) {
        at++;
    }
    if (at == v->doubtful_count || add(&v->items, &v->count, &v->capacity, &v->doubtful[at], err) != CKD_OK) {
        return false;
    }
    v->doubtful[at] = v->doubtful[--v->doubtful_count];
    return true;
}

void vanished_free(vanished *v) {
    for (size_t i = 0; i < v->stray_count; i++) {
        free(v->strays[i].checkpoints);
    }
    free(v->strays);
    free(v->items);
    free(v->doubtful);
    free(v->trashed);
    *v = (vanished){0};
}

/* ---- reporting and keeping ---- */

static void report_doubt(const ckd_store *store, const ckd_checkpoint *c) {
    store_message(
        store,
        "a catalog lists %s@%llu, which has no manifest: either it was deleted and the catalog is an "
        "older copy, or its manifest is lost; ckptdelta repair --manifest %s@%llu brings it back, "
        "repair --purge forgets it",
        c->run, (unsigned long long)c->step, c->run, (unsigned long long)c->step);
}

ckd_status vanished_add_lost(const ckd_checkpoint *c, const ckd_store *store, damage_list *damage,
                             ckd_error *err) {
    char checkpoint[CHECKPOINT_TEXT];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_manifest(store->path, c->run, c->step, c->generation);
    uint32_t next;
    bool taken = manifests_new_generation(&next, store, c->run, c->step, NULL) == CKD_E_EXISTS;
    checkpoint_text(checkpoint, c->run, c->step, false);
    ckd_status found =
        taken ? err_corrupt(
                    &why, p.text, CKD_NO_OFFSET,
                    "an earlier checkpoint of this name is lost, as its manifest is missing; the one that "
                    "was saved later is not affected")
              : err_corrupt(&why, p.text, CKD_NO_OFFSET,
                            "the manifest is lost: it is missing, and the checkpoint was not deleted");
    return damage_record(damage, found, &why, CKD_NO_OFFSET, taken ? "" : checkpoint, err);
}

static ckd_status add_lost_from_trash(const ckd_checkpoint *c, const ckd_store *store, damage_list *damage,
                                      ckd_error *err) {
    char checkpoint[CHECKPOINT_TEXT];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_manifest(store->path, c->run, c->step, c->generation);
    checkpoint_text(checkpoint, c->run, c->step, true);
    ckd_status found = err_corrupt(&why, p.text, CKD_NO_OFFSET,
                                   "the manifest of a deleted checkpoint is lost, so it cannot be restored; "
                                   "ckptdelta trash --empty --all forgets it");
    return damage_record(damage, found, &why, CKD_NO_OFFSET, checkpoint, err);
}

static void report_spare(const vanished *v, const ckd_store *store) {
    size_t count = 0;
    uint64_t size = 0;
    for (size_t i = 0; i < v->stray_count; i++) {
        count += v->strays[i].spare;
        size += v->strays[i].spare ? file_bytes(path_chunk(store->path, &v->strays[i].id, "").text) : 0;
    }
    if (count) {
        store_message(
            store, "%zu chunk files, %llu bytes, belong to no checkpoint; ckptdelta repair puts them aside",
            count, (unsigned long long)size);
    }
}

ckd_status vanished_add_damage(const vanished *v, const ckd_store *store, damage_list *damage,
                               ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->count && status == CKD_OK; i++) {
        status = vanished_add_lost(&v->items[i], store, damage, err);
    }
    for (size_t i = 0; i < v->trashed_count && status == CKD_OK; i++) {
        status = add_lost_from_trash(&v->trashed[i], store, damage, err);
    }
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        const stray_file *s = &v->strays[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = err_corrupt(
            &why, path_chunk(store->path, &s->id, "").text, CKD_NO_OFFSET,
            "no manifest names this chunk file: its checkpoint's manifest is lost, and with it the run "
            "and step; pull the checkpoint from a copy of the store, or remove the file if it is not "
            "needed");
        bool reported = !v->incomplete && !s->explained && !s->spare;
        status = reported ? damage_record(damage, found, &why, CKD_NO_OFFSET, "", err) : CKD_OK;
    }
    report_spare(v, store);
    for (size_t i = 0; i < v->doubtful_count && status == CKD_OK; i++) {
        report_doubt(store, &v->doubtful[i]);
    }
    return status;
}

/*
 * A row that cannot be judged or kept now stays in the catalog. That is no damage to the catalog, whatever the status.
 */
static ckd_status not_now(ckd_error *err, ckd_status status, const ckd_error *why) {
    ckd_status out = status == CKD_E_NOSPACE ? status : CKD_E_IO;
    (void)err_from(err, out, why);
    if (err) {
        err->status = out;
    }
    return out;
}

static ckd_status unweighed_error(const ckd_store *store, ckd_error *err) {
    char mark[CATALOG_META];
    ckd_status status = deletion_mark_read(mark, store, err);
    if (status != CKD_OK) {
        return status;
    }
    err_set(
        err, CKD_E_IO,
        "the deletion mark could not be read, so it is unknown whether checkpoints without a manifest are lost; "
        "try again");
    return err_in_file(err, CKD_E_IO, path_in(store->path, FILE_DELETIONS).text);
}

/* Keeps them all as far as possible. Errors: IO (one of them could not be kept), NOMEM. */
static ckd_status keep_rows(const vanished *v, const ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->count + v->doubtful_count && status != CKD_E_NOMEM; i++) {
        bool lost = i < v->count;
        const ckd_checkpoint *c = lost ? &v->items[i] : &v->doubtful[i - v->count];
        ckd_error why = {0};
        ckd_status kept = lost_row_keep(store, c, lost ? VANISHED_END : DOUBTFUL_END, &why);
        status = kept == CKD_OK ? status : err_from(err, kept, &why);
    }
    return status;
}

ckd_status vanished_save(const ckd_store *store, const ckd_checkpoint *const *checkpoints, size_t count,
                         const char noted[CATALOG_META], ckd_error *err) {
    vanished v = {0};
    evidence e = {0};
    witness w;
    ckd_error why = {0};
    ckd_status status = find_evidence(&v, &e, store, &why);
    THEN(status, weigh(&w, noted, store, old_rows_of(store), &why));
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = add_if_lost(&v, &e, checkpoints[i], w, &why);
    }
    THEN(status, drop_without_records(&v, store, &why));
    for (size_t i = 0; i < v.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &v.items[i];
        store_message(
            store,
            "the manifest of %s@%llu is gone, but the checkpoint was not deleted: ckptdelta repair may "
            "bring it back",
            c->run, (unsigned long long)c->step);
    }
    for (size_t i = 0; i < v.doubtful_count && status == CKD_OK; i++) {
        report_doubt(store, &v.doubtful[i]);
    }
    THEN(status, keep_rows(&v, store, &why));
    vanished_free(&v);
    evidence_free(&e);
    return status == CKD_OK || status == CKD_E_NOMEM ? err_from(err, status, &why)
                                                     : not_now(err, status, &why);
}

ckd_status vanished_save_found(const ckd_store *store, ckd_error *err) {
    vanished v;
    ckd_error why = {0};
    ckd_status status = vanished_find(&v, store, &why);
    if (status == CKD_OK && v.unweighed) {
        status = unweighed_error(store, &why);
    }
    THEN(status, keep_rows(&v, store, &why));
    vanished_free(&v);
    return status == CKD_OK || status == CKD_E_NOMEM ? err_from(err, status, &why)
                                                     : not_now(err, status, &why);
}

static ckd_status refuse_for_now(const ckd_store *store, const rows *now, ckd_error *err) {
    if (now->known != ROWS_LATER) {
        return unweighed_error(store, err);
    }
    if (now->why.status != CKD_E_CORRUPT) {
        return err_from(err, now->why.status, &now->why);
    }
    err_set(err, CKD_E_STATE,
            "a writer died while it wrote the catalog, so lost checkpoints may need what would be removed: "
            "open the store for writing again first");
    return err_in_file(err, CKD_E_STATE, path_in(store->path, FILE_CATALOG).text);
}

/*
 * Looks at catalog.db alone: a rebuild has saved what catalog.db.old knows. Saves nothing, so that a full disk cannot
 * prevent this check. The next refresh of the catalog saves what was found.
 */
ckd_status vanished_check_removal(const ckd_store *store, ckd_error *err) {
    vanished v = {0};
    evidence e = {0};
    rows now = {0};
    ckd_status status = vanished_check_none(store, err);
    THEN(status, read_rows(&now, store, FILE_CATALOG, err));
    THEN(status, find_evidence(&v, &e, store, err));
    THEN(status, add_lost_rows(&v, &e, &now, store, old_rows_of(store), err));
    if (status == CKD_OK && v.count) {
        status = lost_row_refuse(store, &v.items[0], err);
    } else if (status == CKD_OK && (v.unweighed || now.known == ROWS_LATER)) {
        status = refuse_for_now(store, &now, err);
    }
    catalog_list_free(&now.list);
    evidence_free(&e);
    vanished_free(&v);
    return status;
}
