#include "engine/store/damage.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/chunk/chunk.h"
#include "engine/store/manifests.h"

static bool has_id(const bytes *ids, const ckd_id *id) {
    return id_among(id, (const ckd_id *)(const void *)ids->data, ids->size / sizeof(*id));
}

static void sort_ids(bytes *ids) {
    if (ids->size) {
        qsort(ids->data, ids->size / sizeof(ckd_id), sizeof(ckd_id), id_compare);
    }
}

/* ---- files that nothing names ---- */

static ckd_status list_chunks(bytes *ids, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_CHUNKS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count; i++) {
        char hex[CKD_ID_TEXT];
        ckd_id id;
        snprintf(hex, sizeof(hex), "%.*s", (int)sizeof(hex) - 1, list.names[i]);
        if (strcmp(list.names[i] + strlen(hex), ".ckd") == 0 && id_parse(&id, hex)) {
            bytes_put(ids, &id, sizeof(id));
        }
    }
    dir_list_free(&list);
    return ids->failed ? err_nomem(err, ids->size, "chunk file names") : CKD_OK;
}

static void add_files(bytes *named, const file_ref *files, size_t count) {
    for (size_t i = 0; i < count; i++) {
        bytes_put(named, &files[i].id, sizeof(ckd_id));
    }
}

/* *complete: cleared if an intent is unreadable. */
static ckd_status add_intents(bytes *named, bool *complete, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id id;
        bytes data = {0};
        intent in = {0};
        ckd_error why = {0};
        pathname p = path_of(store->path, DIR_INTENTS, list.names[i]);
        if (strlen(list.names[i]) != CKD_ID_TEXT - 1 || !id_parse(&id, list.names[i])) {
            continue;
        }
        status = file_read_all(&data, p.text, METADATA_MAX, &why);
        THEN(status, intent_decode(&in, &store->id, data.data, data.size, p.text, &why));
        if (status == CKD_OK) {
            add_files(named, in.files, in.file_count);
            intent_free(&in);
        }
        /* gone: its writer finished meanwhile */
        *complete = *complete && (status == CKD_OK || status == CKD_E_NOT_FOUND);
        status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
        bytes_free(&data);
    }
    dir_list_free(&list);
    return status;
}

/* Adds the files of all generations, those of deleted checkpoints included. `checkpoints`: their ids. */
static ckd_status add_manifests(bytes *named, bytes *checkpoints, bool *complete, const ckd_store *store,
                                ckd_error *err) {
    manifest_list list = {0};
    ckd_status status = manifests_read_all(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        const manifest_name *n = &list.items[i];
        manifest m;
        ckd_error why = {0};
        status = store_read_manifest(&m, store, n->run, n->step, n->generation, &why);
        if (status == CKD_OK) {
            add_files(named, m.files, m.file_count);
            bytes_put(checkpoints, &m.checkpoint.id, sizeof(ckd_id));
            manifest_free(&m);
        }
        *complete = *complete && (status == CKD_OK || status == CKD_E_NOT_FOUND);
        status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    manifests_free(&list);
    return status == CKD_OK && (named->failed || checkpoints->failed)
               ? err_nomem(err, named->size, "chunk file names")
               : status;
}

/* Adds the checkpoints that a chunk file has records of; none if it cannot be read. */
static void add_recorded(bytes *ids, const ckd_store *store, const ckd_id *file) {
    chunk *c;
    if (chunk_open_bundled(&c, path_chunk(store->path, file, "").text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < c->outer_count; i++) {
        const ckd_id *id = &c->outer[i].tensor->checkpoint;
        if (i == 0 || !id_equal(id, &c->outer[i - 1].tensor->checkpoint)) {
            bytes_put(ids, id, sizeof(*id));
        }
    }
    chunk_close(c);
}

static ckd_status add_stray(vanished *v, const ckd_store *store, const ckd_id *id, ckd_error *err) {
    bytes ids = {0};
    add_recorded(&ids, store, id);
    if (ids.failed) {
        bytes_free(&ids);
        return err_nomem(err, sizeof(*id), "a chunk file's checkpoints");
    }
    sort_ids(&ids);
    v->strays[v->stray_count++] = (stray_file){
        .id = *id, .checkpoints = (ckd_id *)(void *)ids.data, .checkpoint_count = ids.size / sizeof(*id)};
    return CKD_OK;
}

/*
 * Lists the files first, so that later ones cannot be strays. Then reads intents before manifests, as a file passes
 * from an intent to a manifest.
 */
static ckd_status find_strays(vanished *v, bytes *checkpoints, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, named = {0};
    bool complete = true;
    ckd_status status = list_chunks(&files, store, err);
    THEN(status, add_intents(&named, &complete, store, err));
    THEN(status, add_manifests(&named, checkpoints, &complete, store, err));
    size_t count = files.size / sizeof(ckd_id);
    if (status == CKD_OK) {
        sort_ids(&named);
        sort_ids(checkpoints);
        v->strays = calloc(count + 1, sizeof(*v->strays));
        status = v->strays ? CKD_OK : err_nomem(err, count * sizeof(*v->strays), "chunk files");
    }
    for (size_t i = 0; i < count && complete && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        if (!has_id(&named, &id) && file_exists(path_chunk(store->path, &id, "").text)) {
            status = add_stray(v, store, &id, err);
        }
    }
    bytes_free(&files);
    bytes_free(&named);
    return status;
}

/* ---- lost checkpoints ---- */

/* The evidence about checkpoints that a catalog knew. */
typedef struct evidence {
    bytes checkpoints; /* ids in manifests, sorted */
    manifest_list names, tombstones;
} evidence;

static void evidence_free(evidence *e) {
    bytes_free(&e->checkpoints);
    manifests_free(&e->names);
    manifests_free(&e->tombstones);
}

/* Reads names after manifests, as a generation may be replaced while manifests are read. */
static ckd_status find_evidence(vanished *v, evidence *e, const ckd_store *store, ckd_error *err) {
    ckd_status status = find_strays(v, &e->checkpoints, store, err);
    THEN(status, manifests_read_all(&e->names, store, err));
    return status == CKD_OK ? manifests_tombstones(&e->tombstones, store, err) : status;
}

/* Both lists hold names only, so damaged contents do not matter. */
static bool is_named(const evidence *e, const ckd_checkpoint *c) {
    manifest_name name = {.step = c->step, .generation = c->generation};
    snprintf(name.run, sizeof(name.run), "%s", c->run);
    bool found = manifests_covering_tombstone(&e->tombstones, &name);
    name.generation = 0; /* any generation of a manifest counts */
    return found || manifests_covering_tombstone(&e->names, &name);
}

static ckd_status add(ckd_checkpoint **items, size_t *count, size_t *capacity, const ckd_checkpoint *c,
                      ckd_error *err) {
    if (ARRAY_GROW(*items, *capacity, *count + 1, "checkpoints", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    (*items)[(*count)++] = *c;
    return CKD_OK;
}

static bool in_strays(vanished *v, const ckd_id *checkpoint) {
    bool found = false;
    for (size_t i = 0; i < v->stray_count; i++) {
        stray_file *s = &v->strays[i];
        if (s->checkpoint_count &&
            bsearch(checkpoint, s->checkpoints, s->checkpoint_count, sizeof(*checkpoint), id_compare)) {
            found = s->explained = true;
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

/* The weight of a catalog's row, if no stray file has records of its checkpoint. */
typedef enum witness {
    SAYS_NOTHING,
    DOUBTFUL,
    PROVES, /* it was not deleted */
} witness;

static ckd_status add_if_lost(vanished *v, const evidence *e, const ckd_checkpoint *c, witness w,
                              ckd_error *err) {
    if (has_id(&e->checkpoints, &c->id) || has_checkpoint(v->items, v->count, &c->id)) {
        return CKD_OK;
    }
    if (in_strays(v, &c->id) || w == PROVES) {
        return add(&v->items, &v->count, &v->capacity, c, err);
    }
    return w == DOUBTFUL && !has_checkpoint(v->doubtful, v->doubtful_count, &c->id)
               ? add(&v->doubtful, &v->doubtful_count, &v->doubtful_capacity, c, err)
               : CKD_OK;
}

/* Drops doubtful checkpoints without a record in any chunk file: they cannot come back, so nothing is lost. */
static ckd_status drop_without_records(vanished *v, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, recorded = {0};
    ckd_status status = v->doubtful_count ? list_chunks(&files, store, err) : CKD_OK;
    for (size_t i = 0; i < files.size / sizeof(ckd_id) && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        add_recorded(&recorded, store, &id);
    }
    if (status == CKD_OK && recorded.failed) {
        status = err_nomem(err, recorded.size, "the checkpoints of chunk files");
    }
    size_t count = v->doubtful_count;
    if (status == CKD_OK) {
        sort_ids(&recorded);
        v->doubtful_count = 0;
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        if (has_id(&recorded, &v->doubtful[i].id)) {
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
            status = is_named(e, &m.checkpoint) ? CKD_OK : add_if_lost(v, e, &m.checkpoint, DOUBTFUL, err);
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

ckd_status vanished_add_damage(const vanished *v, const ckd_store *store, damage_list *damage,
                               ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &v->items[i];
        char checkpoint[CHECKPOINT_TEXT];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        pathname p = path_manifest(store->path, c->run, c->step, c->generation);
        checkpoint_text(checkpoint, c->run, c->step, false);
        ckd_status found =
            err_corrupt(&why, p.text, CKD_NO_OFFSET,
                        "the manifest is lost: it is missing, and the checkpoint was not deleted");
        status = damage_record(damage, found, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = err_corrupt(
            &why, path_chunk(store->path, &v->strays[i].id, "").text, CKD_NO_OFFSET,
            "no manifest names this chunk file: its checkpoint's manifest is lost, and with it run and step; "
            "pull the checkpoint from a copy of the store, or remove the file if it is not needed");
        status = v->strays[i].explained ? CKD_OK : damage_record(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    for (size_t i = 0; i < v->doubtful_count && status == CKD_OK; i++) {
        report_doubt(store, &v->doubtful[i]);
    }
    return status;
}

static pathname lost_file_path(const ckd_store *store, const ckd_checkpoint *c, const char *end) {
    char name[CKD_RUN_MAX + 64];
    snprintf(name, sizeof(name), "%s.%llu.%u%s", c->run, (unsigned long long)c->step, (unsigned)c->generation,
             end);
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

/* Whether the checkpoint has a manifest of any generation, so that it is no longer lost. */
static bool has_manifest(const ckd_store *store, const ckd_checkpoint *c) {
    manifest_list all = {0};
    bool has = false;
    if (manifests_read_all(&all, store, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < all.count && !has; i++) {
        manifest m;
        const manifest_name *n = &all.items[i];
        if (n->step == c->step && strcmp(n->run, c->run) == 0 &&
            store_read_manifest(&m, store, n->run, n->step, n->generation, NULL) == CKD_OK) {
            has = id_equal(&m.checkpoint.id, &c->id);
            manifest_free(&m);
        }
    }
    manifests_free(&all);
    return has;
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
