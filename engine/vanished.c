#include "engine/vanished.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/chunk.h"

static int by_id(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}

static bool has_id(const bytes *ids, const ckd_id *id) {
    return ids->size && bsearch(id, ids->data, ids->size / sizeof(*id), sizeof(*id), by_id);
}

static void sort_ids(bytes *ids) {
    if (ids->size) {
        qsort(ids->data, ids->size / sizeof(ckd_id), sizeof(ckd_id), by_id);
    }
}

/* ---- files that nobody names ---- */

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

static void add_files(bytes *named, const note_file *files, size_t count) {
    for (size_t i = 0; i < count; i++) {
        bytes_put(named, &files[i].id, sizeof(ckd_id));
    }
}

/* *known: all intents could be read. */
static ckd_status add_intents(bytes *named, bool *known, const ckd_store *store, ckd_error *err) {
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
        status = file_read_all(&data, p.text, NOTE_MAX, &why);
        if (status == CKD_OK) {
            status = intent_decode(&in, &store->id, data.data, data.size, p.text, &why);
        }
        if (status == CKD_OK) {
            add_files(named, in.files, in.file_count);
            intent_free(&in);
        }
        *known = *known && (status == CKD_OK || status == CKD_E_NOT_FOUND); /* gone: it ended meanwhile */
        status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
        bytes_free(&data);
    }
    dir_list_free(&list);
    return status;
}

/* Of all generations, those of deleted checkpoints included. `checkpoints`: whose they are. */
static ckd_status add_manifests(bytes *named, bytes *checkpoints, bool *known, const ckd_store *store,
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
        *known = *known && (status == CKD_OK || status == CKD_E_NOT_FOUND);
        status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    manifests_free(&list);
    return status == CKD_OK && (named->failed || checkpoints->failed)
               ? err_nomem(err, named->size, "chunk file names")
               : status;
}

static ckd_status add_stray(vanished *v, const ckd_store *store, const ckd_id *id, ckd_error *err) {
    chunk *c;
    bytes ids = {0};
    if (chunk_open_outer(&c, path_chunk(store->path, id, "").text, NULL) == CKD_OK) {
        for (size_t i = 0; i < c->outer_count; i++) {
            const ckd_id *of = &c->outer[i].tensor->checkpoint;
            if (i == 0 || !id_equal(of, &c->outer[i - 1].tensor->checkpoint)) {
                bytes_put(&ids, of, sizeof(*of));
            }
        }
        chunk_close(c);
    }
    if (ids.failed) {
        bytes_free(&ids);
        return err_nomem(err, sizeof(*id), "a chunk file's checkpoints");
    }
    sort_ids(&ids);
    v->strays[v->stray_count++] = (stray_file){
        .id = *id, .checkpoints = (ckd_id *)(void *)ids.data, .checkpoint_count = ids.size / sizeof(*id)};
    return CKD_OK;
}

/* First the files are listed: what comes later is no stray; then who may name them, each before it may hand a file on to the next. */
static ckd_status find_strays(vanished *v, bytes *checkpoints, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, named = {0};
    bool known = true;
    ckd_status status = list_chunks(&files, store, err);
    if (status == CKD_OK) {
        status = add_intents(&named, &known, store, err);
    }
    if (status == CKD_OK) {
        status = add_manifests(&named, checkpoints, &known, store, err);
    }
    size_t count = files.size / sizeof(ckd_id);
    if (status == CKD_OK) {
        sort_ids(&named);
        sort_ids(checkpoints);
        v->strays = calloc(count + 1, sizeof(*v->strays));
        status = v->strays ? CKD_OK : err_nomem(err, count * sizeof(*v->strays), "chunk files");
    }
    for (size_t i = 0; i < count && known && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        if (!has_id(&named, &id) && file_name_taken(path_chunk(store->path, &id, "").text)) {
            status = add_stray(v, store, &id, err);
        }
    }
    bytes_free(&files);
    bytes_free(&named);
    return status;
}

/* ---- what is known of them ---- */

/* No manifest has it, and some stray file has records of it. */
static ckd_status consider(vanished *v, const bytes *checkpoints, const ckd_checkpoint *c, ckd_error *err) {
    bool found = false;
    for (size_t i = 0; i < v->count; i++) {
        if (id_equal(&v->items[i].id, &c->id)) {
            return CKD_OK;
        }
    }
    for (size_t i = 0; i < v->stray_count && !has_id(checkpoints, &c->id); i++) {
        stray_file *s = &v->strays[i];
        if (s->checkpoint_count &&
            bsearch(&c->id, s->checkpoints, s->checkpoint_count, sizeof(c->id), by_id)) {
            found = s->explained = true;
        }
    }
    if (found && v->count == v->capacity) {
        size_t capacity = 2 * v->capacity + 8;
        ckd_checkpoint *grown = realloc(v->items, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "checkpoints");
        }
        v->items = grown;
        v->capacity = capacity;
    }
    if (found) {
        v->items[v->count++] = *c;
    }
    return CKD_OK;
}

/* Of a catalog that cannot be read nothing is known. */
static ckd_status ask_catalog(vanished *v, const bytes *checkpoints, const ckd_store *store, const char *name,
                              ckd_error *err) {
    catalog *c = NULL;
    ckd_checkpoint_list list = {0};
    ckd_error why = {0};
    pathname p = path_in(store->path, name);
    ckd_status status = file_exists(p.text) ? catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, &why)
                                            : CKD_E_NOT_FOUND;
    status = status == CKD_OK ? catalog_list(&list, c, NULL, &why) : status;
    ckd_status result = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    for (size_t i = 0; i < list.count && status == CKD_OK && result == CKD_OK; i++) {
        result = consider(v, checkpoints, &list.items[i], err);
    }
    catalog_list_free(&list);
    catalog_close(c);
    return result;
}

static ckd_status ask_kept(vanished *v, const bytes *checkpoints, const ckd_store *store, ckd_error *err) {
    dir_list list;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        bytes data = {0};
        manifest m;
        pathname p = path_of(store->path, DIR_DAMAGED, list.names[i]);
        size_t length = strlen(list.names[i]);
        bool kept = length > strlen(VANISHED_END) &&
                    strcmp(list.names[i] + length - strlen(VANISHED_END), VANISHED_END) == 0 &&
                    file_read_all(&data, p.text, NOTE_MAX, NULL) == CKD_OK &&
                    manifest_decode(&m, &store->id, data.data, data.size, p.text, NULL) == CKD_OK;
        if (kept) {
            status = consider(v, checkpoints, &m.checkpoint, err);
            manifest_free(&m);
        }
        bytes_free(&data);
    }
    dir_list_free(&list);
    return status;
}

ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err) {
    bytes checkpoints = {0};
    *out = (vanished){0};
    ckd_status status = find_strays(out, &checkpoints, store, err);
    if (status == CKD_OK && out->stray_count) {
        status = ask_catalog(out, &checkpoints, store, FILE_CATALOG, err);
    }
    if (status == CKD_OK && out->stray_count) {
        status = ask_kept(out, &checkpoints, store, err);
    }
    if (status == CKD_OK && out->stray_count) { /* which a rebuild leaves */
        status = ask_catalog(out, &checkpoints, store, FILE_CATALOG ".old", err);
    }
    bytes_free(&checkpoints);
    return status;
}

void vanished_free(vanished *v) {
    for (size_t i = 0; i < v->stray_count; i++) {
        free(v->strays[i].checkpoints);
    }
    free(v->strays);
    free(v->items);
    *v = (vanished){0};
}

/* ---- telling, and keeping ---- */

ckd_status vanished_note(const vanished *v, const ckd_store *store, damage_list *damage, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &v->items[i];
        char checkpoint[CHECKPOINT_TEXT];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        pathname p = path_manifest(store->path, c->run, c->step, c->generation);
        checkpoint_text(checkpoint, c->run, c->step, false);
        ckd_status found = err_corrupt(&why, p.text, CKD_NO_OFFSET,
                                       "the manifest is gone, and nobody deleted the checkpoint");
        status = damage_note(damage, found, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = err_corrupt(
            &why, path_chunk(store->path, &v->strays[i].id, "").text, CKD_NO_OFFSET,
            "no manifest names this chunk file: that of its checkpoint is gone, and so is its run and step; "
            "pull the checkpoint from a copy, or remove the file if nobody misses it");
        status = v->strays[i].explained ? CKD_OK : damage_note(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    return status;
}

static pathname kept_path(const ckd_store *store, const ckd_checkpoint *c) {
    char name[CKD_RUN_MAX + 64];
    snprintf(name, sizeof(name), "%s.%llu.%u" VANISHED_END, c->run, (unsigned long long)c->step,
             (unsigned)c->generation);
    return path_of(store->path, DIR_DAMAGED, name);
}

static ckd_status write_kept(const ckd_store *store, const ckd_checkpoint *known, ckd_error *err) {
    bytes data = {0};
    manifest m = {.checkpoint = *known};
    manifest_encode(&data, &store->id, &m);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    if (status == CKD_OK) {
        status = dir_create(path_in(store->path, DIR_DAMAGED).text, true, err);
    }
    if (status == CKD_OK) {
        status = file_publish_bytes(kept_path(store, known).text,
                                    path_of(store->path, DIR_DAMAGED, ".tmp-lost").text, data.data, data.size,
                                    err);
    }
    bytes_free(&data);
    return status == CKD_E_EXISTS ? CKD_OK : status;
}

void vanished_forget(const ckd_store *store, const ckd_checkpoint *known) {
    (void)file_remove(kept_path(store, known).text, true, NULL);
}

ckd_status vanished_keep(const ckd_store *store, const ckd_checkpoint *const *known, size_t count,
                         ckd_error *err) {
    vanished v = {0};
    bytes checkpoints = {0};
    ckd_error why = {0};
    ckd_status status = count ? find_strays(&v, &checkpoints, store, &why) : CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = consider(&v, &checkpoints, known[i], &why);
    }
    for (size_t i = 0; i < v.count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &v.items[i];
        ckd_status kept = write_kept(store, c, &why);
        store_message(store,
                      "the manifest of %s@%llu is gone, and nobody deleted the checkpoint: ckptdelta repair "
                      "may bring it back%s%s",
                      c->run, (unsigned long long)c->step, kept == CKD_OK ? "" : "; ",
                      kept == CKD_OK ? "" : why.message);
        status = kept == CKD_E_NOMEM ? kept : CKD_OK;
    }
    vanished_free(&v);
    bytes_free(&checkpoints);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}
