#include "engine/store/damage.h"

#include <stdio.h>
#include <stdlib.h>

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

/* Reads names after manifests, as a generation may be replaced while manifests are read. */
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
 * Whether the checkpoint was deleted, or has a manifest by its name: a damaged one, or another generation. The lists hold
 * names only, so damaged contents do not matter. A manifest in the trash is of an earlier checkpoint of this name. One
 * that a deletion or a restore moves meanwhile counts.
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

/* explain: the checkpoint is lost, so that it accounts for the files. */
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

static bool has_checkpoint(const ckd_checkpoint *items, size_t count, const ckd_id *id) {
    bool found = false;
    for (size_t i = 0; i < count && !found; i++) {
        found = id_equal(&items[i].id, id);
    }
    return found;
}

/* The weight of a catalog's row. */
typedef enum witness {
    SAYS_NOTHING, /* unless a stray file has records of its checkpoint: then it is doubtful */
    DOUBTFUL,     /* unless a stray file has records of its checkpoint: then it is lost */
    PROVES,       /* it was not deleted */
} witness;

static ckd_status add_if_lost(vanished *v, const evidence *e, const ckd_checkpoint *c, witness w,
                              ckd_error *err) {
    if (ids_contain(&e->checkpoints, &c->id) || has_checkpoint(v->items, v->count, &c->id)) {
        return CKD_OK;
    }
    /* A stray may hold records of a deleted checkpoint that a lost one builds on. An old row does not tell which. */
    bool strays = in_strays(v, &c->id, w != SAYS_NOTHING);
    if (w == PROVES || (strays && w == DOUBTFUL)) {
        return add(&v->items, &v->count, &v->capacity, c, err);
    }
    return (strays || w == DOUBTFUL) && !has_checkpoint(v->doubtful, v->doubtful_count, &c->id)
               ? add(&v->doubtful, &v->doubtful_count, &v->doubtful_capacity, c, err)
               : CKD_OK;
}

/* Drops doubtful checkpoints without a record in any chunk file: they cannot come back, so nothing is lost. */
static ckd_status drop_without_records(vanished *v, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, recorded = {0};
    ckd_status status = v->doubtful_count ? strays_list_chunks(&files, store, err) : CKD_OK;
    for (size_t i = 0; i < files.size / sizeof(ckd_id) && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        strays_add_recorded(&recorded, store, &id);
    }
    if (status == CKD_OK && recorded.failed) {
        status = err_nomem(err, recorded.size, "the checkpoints of chunk files");
    }
    size_t count = v->doubtful_count;
    if (status == CKD_OK) {
        ids_sort(&recorded);
        v->doubtful_count = 0;
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        if (ids_contain(&recorded, &v->doubtful[i].id)) {
            v->doubtful[v->doubtful_count++] = v->doubtful[i];
        }
    }
    bytes_free(&files);
    bytes_free(&recorded);
    return status;
}

/* ---- sources of known checkpoints ---- */

typedef struct rows {
    ckd_checkpoint_list list;
    char noted[CATALOG_META]; /* the deletion mark, read before the rows */
} rows;

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
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

/*
 * Considers rows without a manifest or a tombstone. otherwise: their weight if the catalog is older than some deletion.
 */
static ckd_status add_lost_rows(vanished *v, const evidence *e, const rows *r, const ckd_store *store,
                                witness otherwise, ckd_error *err) {
    ckd_status status = CKD_OK;
    witness w = deletion_mark_is_current(r->noted, store) ? PROVES : otherwise;
    for (size_t i = 0; i < r->list.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &r->list.items[i];
        status = is_named(e, c) ? CKD_OK : add_if_lost(v, e, c, w, err);
    }
    return status;
}

/* Reads a file that data/q keeps of a checkpoint; false unless its name has this suffix. */
static bool read_lost_file(manifest *out, const ckd_store *store, const char *name, const char *end) {
    bytes data = {0};
    pathname p = path_of(store->path, DIR_DAMAGED, name);
    size_t length = strlen(name);
    bool matches = length > strlen(end) && strcmp(name + length - strlen(end), end) == 0 &&
                   file_read_all(&data, p.text, METADATA_MAX, NULL) == CKD_OK &&
                   manifest_decode(out, &store->id, data.data, data.size, p.text, NULL) == CKD_OK;
    bytes_free(&data);
    return matches;
}

static ckd_status add_saved_losses(vanished *v, const evidence *e, const ckd_store *store, ckd_error *err) {
    dir_list list;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        manifest m;
        if (read_lost_file(&m, store, list.names[i], VANISHED_END)) {
            status = add_if_lost(v, e, &m.checkpoint, PROVES, err);
            manifest_free(&m);
        } else if (read_lost_file(&m, store, list.names[i], DOUBTFUL_END)) {
            /* A later checkpoint of the name does not matter: this one was missed before it was saved. */
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
    THEN(status, add_lost_rows(out, &e, &now, store, DOUBTFUL, err));
    THEN(status, add_saved_losses(out, &e, store, err));
    THEN(status, add_lost_rows(out, &e, &old, store, SAYS_NOTHING, err));
    THEN(status, drop_without_records(out, store, err));
    if (status == CKD_OK && out->stray_count && !out->count && !out->doubtful_count) {
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
        taken ? err_corrupt(&why, p.text, CKD_NO_OFFSET,
                            "an earlier checkpoint of this name is lost, as its manifest is missing; the one "
                            "that was saved later is not concerned")
              : err_corrupt(&why, p.text, CKD_NO_OFFSET,
                            "the manifest is lost: it is missing, and the checkpoint was not deleted");
    return damage_record(damage, found, &why, CKD_NO_OFFSET, taken ? "" : checkpoint, err);
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
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        const stray_file *s = &v->strays[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = err_corrupt(
            &why, path_chunk(store->path, &s->id, "").text, CKD_NO_OFFSET,
            "no manifest names this chunk file: its checkpoint's manifest is lost, and with it run and step; "
            "pull the checkpoint from a copy of the store, or remove the file if it is not needed");
        status =
            s->explained || s->spare ? CKD_OK : damage_record(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    report_spare(v, store);
    for (size_t i = 0; i < v->doubtful_count && status == CKD_OK; i++) {
        report_doubt(store, &v->doubtful[i]);
    }
    return status;
}

/* The id is in the name: a checkpoint may be lost, saved again as the same generation, and lost again. */
static pathname lost_file_path(const ckd_store *store, const ckd_checkpoint *c, const char *end) {
    char name[CKD_RUN_MAX + 96], id[CKD_ID_TEXT];
    ckd_id_text(id, &c->id);
    snprintf(name, sizeof(name), "%s.%llu.%u.%s%s", c->run, (unsigned long long)c->step,
             (unsigned)c->generation, id, end);
    return path_of(store->path, DIR_DAMAGED, name);
}

static ckd_status write_lost_file(const ckd_store *store, const ckd_checkpoint *checkpoint, const char *end,
                                  ckd_error *err) {
    bytes data = {0};
    manifest m = {.checkpoint = *checkpoint};
    pathname temporary = path_of(store->path, DIR_DAMAGED, ".tmp-lost");
    manifest_encode(&data, &store->id, &m);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    THEN(status, damage_make_folder(store, err));
    if (status == CKD_OK) { /* a writer that died may have left it */
        status = file_remove(temporary.text, true, err);
    }
    if (status == CKD_OK) {
        status = file_create_durable(lost_file_path(store, checkpoint, end).text, temporary.text, data.data,
                                     data.size, err);
    }
    bytes_free(&data);
    return status == CKD_E_EXISTS ? CKD_OK : status;
}

static ckd_status save_lost_row(const ckd_store *store, const ckd_checkpoint *c, const char *end,
                                ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = write_lost_file(store, c, end, &why);
    if (status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    if (status != CKD_OK) {
        store_message(store, "the catalog's record of the lost checkpoint %s@%llu cannot be saved: %s",
                      c->run, (unsigned long long)c->step, why.message);
    }
    return CKD_OK;
}

void vanished_forget(const ckd_store *store, const ckd_id *checkpoint) {
    dir_list list;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        manifest m;
        if (read_lost_file(&m, store, list.names[i], VANISHED_END) ||
            read_lost_file(&m, store, list.names[i], DOUBTFUL_END)) {
            if (id_equal(&m.checkpoint.id, checkpoint)) {
                (void)file_remove(path_of(store->path, DIR_DAMAGED, list.names[i]).text, true, NULL);
            }
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
}

ckd_status vanished_save(const ckd_store *store, const ckd_checkpoint *const *checkpoints, size_t count,
                         bool current, ckd_error *err) {
    vanished v = {0};
    evidence e = {0};
    ckd_error why = {0};
    ckd_status status = find_evidence(&v, &e, store, &why);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = add_if_lost(&v, &e, checkpoints[i], current ? PROVES : DOUBTFUL, &why);
    }
    THEN(status, drop_without_records(&v, store, &why));
    for (size_t i = 0; i < v.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &v.items[i];
        store_message(store,
                      "the manifest of %s@%llu is gone, and nobody deleted the checkpoint: ckptdelta repair "
                      "may bring it back",
                      c->run, (unsigned long long)c->step);
        status = save_lost_row(store, c, VANISHED_END, &why);
    }
    for (size_t i = 0; i < v.doubtful_count && status == CKD_OK; i++) {
        report_doubt(store, &v.doubtful[i]);
        status = save_lost_row(store, &v.doubtful[i], DOUBTFUL_END, &why);
    }
    if (status != CKD_OK && status != CKD_E_NOMEM) {
        store_message(
            store,
            "the catalog drops %zu checkpoints without a manifest, and their records cannot be saved: %s",
            count, why.message);
    }
    vanished_free(&v);
    evidence_free(&e);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

ckd_status vanished_save_found(const ckd_store *store, ckd_error *err) {
    vanished v;
    ckd_error why = {0};
    ckd_status status = vanished_find(&v, store, &why);
    for (size_t i = 0; i < v.count && status == CKD_OK; i++) {
        status = save_lost_row(store, &v.items[i], VANISHED_END, &why);
    }
    for (size_t i = 0; i < v.doubtful_count && status == CKD_OK; i++) {
        status = save_lost_row(store, &v.doubtful[i], DOUBTFUL_END, &why);
    }
    vanished_free(&v);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

/*
 * Whether the checkpoint has a manifest, of any generation and under any name, so that it is no longer lost: a copy or a
 * renamed run may have brought it back.
 */
static bool has_manifest(const ckd_store *store, const ckd_checkpoint *c) {
    bytes files = {0}, checkpoints = {0};
    bool complete = true;
    bool has = strays_add_manifests(&files, &checkpoints, &complete, store, NULL) == CKD_OK;
    ids_sort(&checkpoints);
    has = has && ids_contain(&checkpoints, &c->id);
    bytes_free(&files);
    bytes_free(&checkpoints);
    return has;
}

void vanished_forget_found(const ckd_store *store) {
    dir_list list;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        manifest m;
        if (read_lost_file(&m, store, list.names[i], VANISHED_END) ||
            read_lost_file(&m, store, list.names[i], DOUBTFUL_END)) {
            if (has_manifest(store, &m.checkpoint)) {
                (void)file_remove(path_of(store->path, DIR_DAMAGED, list.names[i]).text, true, NULL);
            }
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
}

static ckd_status refuse_removal(const ckd_store *store, const ckd_checkpoint *c, const char *file,
                                 ckd_error *err) {
    err_set(
        err, CKD_E_STATE,
        "the manifest of %.128s@%llu is lost, and only a repair knows which files it needs: run ckptdelta repair "
        "first; where that cannot bring it back, remove this file to give it up",
        c->run, (unsigned long long)c->step);
    return err_in_file(err, CKD_E_STATE, path_of(store->path, DIR_DAMAGED, file).text);
}

ckd_status vanished_check_none(const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = CKD_OK;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return CKD_OK;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        manifest m;
        if (read_lost_file(&m, store, list.names[i], VANISHED_END)) {
            status = has_manifest(store, &m.checkpoint)
                         ? CKD_OK
                         : refuse_removal(store, &m.checkpoint, list.names[i], err);
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
    return status;
}

/*
 * Looks at catalog.db alone: a rebuild has saved what catalog.db.old knows. Saves nothing: the next sync of the catalog
 * does, and a full disk cannot hinder this check.
 */
ckd_status vanished_check_removal(const ckd_store *store, ckd_error *err) {
    vanished v = {0};
    evidence e = {0};
    rows now = {0};
    ckd_status status = vanished_check_none(store, err);
    THEN(status, read_rows(&now, store, FILE_CATALOG, err));
    THEN(status, find_evidence(&v, &e, store, err));
    THEN(status, add_lost_rows(&v, &e, &now, store, DOUBTFUL, err));
    if (status == CKD_OK && v.count) {
        pathname p = lost_file_path(store, &v.items[0], VANISHED_END);
        status = refuse_removal(store, &v.items[0], strrchr(p.text, '/') + 1, err);
    }
    catalog_list_free(&now.list);
    evidence_free(&e);
    vanished_free(&v);
    return status;
}
