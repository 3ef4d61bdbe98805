/* Finds chunk files that no manifest and no intent names. */
#include "engine/store/strays.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/chunk/chunk.h"
#include "codec/parity/parity.h"
#include "engine/store/manifests.h"

bool ids_contain(const bytes *ids, const ckd_id *id) {
    return id_among(id, (const ckd_id *)(const void *)ids->data, ids->size / sizeof(*id));
}

void ids_sort(bytes *ids) {
    if (ids->size) {
        qsort(ids->data, ids->size / sizeof(ckd_id), sizeof(ckd_id), id_compare);
    }
}

/* ---- files that nothing names ---- */

#define UNNAMED_S \
    UINT64_C(86400) /* a save on another machine takes less than a day from its upload to its commit */

ckd_status strays_list_chunks(bytes *ids, const ckd_store *store, bool settled, ckd_error *err) {
    dir_list list;
    ckd_status status =
        dir_list_settled(&list, path_in(store->path, DIR_CHUNKS).text, settled ? UNNAMED_S : 0, err);
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

/* Errors: those of the intent; NOT_FOUND: its writer has just finished. */
static ckd_status read_intent(intent *out, const ckd_store *store, const char *path, ckd_error *err) {
    bytes data = {0};
    ckd_status status = file_read_all(&data, path, METADATA_MAX, err);
    THEN(status, intent_decode(out, &store->id, data.data, data.size, path, err));
    bytes_free(&data);
    return status;
}

static bool is_intent(const char *name) {
    ckd_id id;
    return strlen(name) == CKD_ID_TEXT - 1 && id_parse(&id, name);
}

/* *complete: cleared if an intent is unreadable. */
static ckd_status add_intents(bytes *named, bool *complete, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        intent in = {0};
        ckd_error why = {0};
        if (!is_intent(list.names[i])) {
            continue;
        }
        status = read_intent(&in, store, path_of(store->path, DIR_INTENTS, list.names[i]).text, &why);
        if (status == CKD_OK) {
            add_files(named, in.files, in.file_count);
            intent_free(&in);
        }
        *complete = *complete && (status == CKD_OK || status == CKD_E_NOT_FOUND);
        status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    dir_list_free(&list);
    return status;
}

ckd_status intents_damage(damage_list *damage, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_error missing = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, &missing);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &missing);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        intent in = {0};
        ckd_error why = {.offset = CKD_NO_OFFSET};
        pathname p = path_of(store->path, DIR_INTENTS, list.names[i]);
        ckd_status found = is_intent(list.names[i]) ? read_intent(&in, store, p.text, &why) : CKD_OK;
        intent_free(&in);
        if (found == CKD_E_CORRUPT) {
            err_in_file(&why, found, p.text);
            status = damage_record(damage, found, &why, CKD_NO_OFFSET, "", err);
        }
    }
    dir_list_free(&list);
    return status;
}

ckd_status strays_remove_unfinished(const ckd_store *store, ckd_error *err) {
    static const char end[] = ".ckd.tmp";
    dir_list list;
    bytes named = {0};
    bool complete = true;
    ckd_status status = dir_list_local(&list, path_in(store->path, DIR_CHUNKS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    status = add_intents(&named, &complete, store, err);
    ids_sort(&named);
    for (size_t i = 0; i < list.count && complete && status == CKD_OK; i++) {
        ckd_id id;
        size_t length = strlen(list.names[i]);
        bool unfinished = length == CKD_ID_TEXT - 1 + strlen(end) &&
                          strcmp(list.names[i] + CKD_ID_TEXT - 1, end) == 0 && id_parse(&id, list.names[i]);
        if (unfinished && !ids_contain(&named, &id)) {
            status = file_remove(path_of(store->path, DIR_CHUNKS, list.names[i]).text, true, err);
        }
    }
    bytes_free(&named);
    dir_list_free(&list);
    return status;
}

/* *complete stays as it is if the manifest was read, or was removed since it was listed. */
static ckd_status add_manifest(bytes *named, bytes *checkpoints, bool *complete, const ckd_store *store,
                               const manifest_name *n, ckd_error *err) {
    manifest m;
    ckd_error why = {0};
    ckd_status status = store_read_manifest(&m, store, n->run, n->step, n->generation, &why);
    if (status == CKD_OK) {
        add_files(named, m.files, m.file_count);
        bytes_put(checkpoints, &m.checkpoint.id, sizeof(ckd_id));
        manifest_free(&m);
    }
    *complete = *complete && (status == CKD_OK || status == CKD_E_NOT_FOUND);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

/*
 * Adds the files of all generations, those of deleted checkpoints included. `checkpoints`: their ids. A rename gives a
 * checkpoint another name. One listing may miss the new name, and the old manifest may be gone before it is read. So
 * the folder is listed until a listing has no new names.
 */
ckd_status strays_add_manifests(bytes *named, bytes *checkpoints, bool *complete, const ckd_store *store,
                                ckd_error *err) {
    enum { TRIES = 100 };
    manifest_list before = {0};
    bool settled = false;
    ckd_status status = CKD_OK;
    for (int i = 0; i < TRIES && !settled && status == CKD_OK; i++) {
        manifest_list list = {0};
        status = manifests_read_all(&list, store, err);
        settled = status == CKD_OK && i > 0; /* the first one may miss all of them */
        for (size_t k = 0; k < list.count && status == CKD_OK; k++) {
            if (!manifests_contain(&before, &list.items[k])) {
                settled = false;
                status = add_manifest(named, checkpoints, complete, store, &list.items[k], err);
            }
        }
        manifests_free(&before);
        before = list;
    }
    manifests_free(&before);
    *complete = *complete && settled;
    return status == CKD_OK && (named->failed || checkpoints->failed)
               ? err_nomem(err, named->size, "chunk file names")
               : status;
}

static bool add_recorded(bytes *ids, const char *path) {
    chunk *c;
    ckd_status status = chunk_open_bundled(&c, path, NULL);
    if (status != CKD_OK) {
        return status == CKD_E_NOT_FOUND;
    }
    for (size_t i = 0; i < c->outer_count; i++) {
        const ckd_id *id = &c->outer[i].tensor->checkpoint;
        if (i == 0 || !id_equal(id, &c->outer[i - 1].tensor->checkpoint)) {
            bytes_put(ids, id, sizeof(*id));
        }
    }
    chunk_close(c);
    return true;
}

bool strays_add_recorded(bytes *ids, const ckd_store *store, const ckd_id *file) {
    return add_recorded(ids, path_chunk(store->path, file, "").text);
}

bool strays_add_aside(bytes *ids, const ckd_store *store) {
    dir_list list;
    if (damage_list_folder(&list, store, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < list.count; i++) {
        (void)add_recorded(ids, path_of(store->path, DIR_DAMAGED, list.names[i]).text);
    }
    dir_list_free(&list);
    return true;
}

/* Whether the group of a parity file covers a missing file. Also true if that cannot be told. */
static bool covers_missing(const ckd_store *store, const char *parity_path) {
    parity_file *f;
    ckd_status status = parity_open(&f, &store->id, parity_path, NULL);
    if (status != CKD_OK) {
        return status != CKD_E_NOT_FOUND;
    }
    bool missing = false;
    for (size_t i = 0; i < f->group.member_count && !missing; i++) {
        missing = !file_exists(path_chunk(store->path, &f->group.members[i].file, "").text);
    }
    parity_close(f);
    return missing;
}

bool strays_may_be_rebuilt(const ckd_store *store) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_PARITY).text, NULL);
    if (status != CKD_OK) {
        return status != CKD_E_NOT_FOUND;
    }
    bool may = false;
    for (size_t i = 0; i < list.count && !may; i++) {
        ckd_id group;
        uint32_t row;
        may = parity_name_parse(&group, &row, list.names[i]) &&
              covers_missing(store, path_of(store->path, DIR_PARITY, list.names[i]).text);
    }
    dir_list_free(&list);
    return may;
}

static ckd_status add_stray(vanished *v, const ckd_store *store, const ckd_id *id, ckd_error *err) {
    bytes ids = {0};
    strays_add_recorded(&ids, store, id);
    if (ids.failed) {
        bytes_free(&ids);
        return err_nomem(err, sizeof(*id), "a chunk file's checkpoints");
    }
    ids_sort(&ids);
    v->strays[v->stray_count++] = (stray_file){
        .id = *id, .checkpoints = (ckd_id *)(void *)ids.data, .checkpoint_count = ids.size / sizeof(*id)};
    return CKD_OK;
}

/*
 * Lists the files first, so that later ones cannot be strays. Then reads intents before manifests, because a file
 * passes from an intent to a manifest.
 */
ckd_status strays_find(vanished *v, bytes *checkpoints, const ckd_store *store, ckd_error *err) {
    bytes files = {0}, named = {0};
    bool complete = true;
    ckd_status status = strays_list_chunks(&files, store, true, err);
    THEN(status, add_intents(&named, &complete, store, err));
    THEN(status, strays_add_manifests(&named, checkpoints, &complete, store, err));
    size_t count = files.size / sizeof(ckd_id);
    v->incomplete = !complete;
    if (status == CKD_OK) {
        ids_sort(&named);
        ids_sort(checkpoints);
        v->strays = calloc(count + 1, sizeof(*v->strays));
        status = v->strays ? CKD_OK : err_nomem(err, count * sizeof(*v->strays), "chunk files");
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        ckd_id id;
        memcpy(&id, files.data + i * sizeof(id), sizeof(id));
        if (!ids_contain(&named, &id) && file_exists(path_chunk(store->path, &id, "").text)) {
            status = add_stray(v, store, &id, err);
        }
    }
    bytes_free(&files);
    bytes_free(&named);
    return status;
}

/* ---- strays that nobody needs ---- */

/* A record of a stray whose checkpoint has no manifest. */
typedef struct orphan {
    hash128 key;
    size_t stray; /* index in v->strays */
    bool found;   /* a file that a manifest names has the same record */
} orphan;

typedef struct orphans {
    orphan *items; /* sorted by key, once they are searched */
    size_t count, capacity;
    bytes scratch;
} orphans;

static int by_key(const void *a, const void *b) {
    return memcmp(&((const orphan *)a)->key, &((const orphan *)b)->key, sizeof(hash128));
}

/* Identifies a record wherever it is: its checkpoint, tensor, place and values. */
static hash128 key_of(bytes *scratch, const record *r) {
    bytes_clear(scratch);
    bytes_put(scratch, &r->tensor->checkpoint, sizeof(ckd_id));
    bytes_put(scratch, &r->kind, sizeof(r->kind));
    bytes_put(scratch, &r->content, sizeof(r->content));
    bytes_put(scratch, &r->first, sizeof(r->first));
    bytes_put(scratch, &r->count, sizeof(r->count));
    bytes_put(scratch, r->tensor->name, strlen(r->tensor->name));
    return content_hash(scratch->data, scratch->size);
}

/* Adds the records of one stray. A file that cannot be read may hold anything, so it is never spare. */
static ckd_status add_orphans(orphans *out, vanished *v, size_t stray, const bytes *checkpoints,
                              const char *path, ckd_error *err) {
    chunk *c;
    if (chunk_open(&c, path, NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    v->strays[stray].spare = true;
    for (size_t i = 0; i < c->record_count && status == CKD_OK; i++) {
        const record *r = &c->records[i];
        if (ids_contain(checkpoints, &r->tensor->checkpoint)) {
            continue;
        }
        status = ARRAY_GROW(out->items, out->capacity, out->count + 1, "records", err);
        if (status == CKD_OK) {
            out->items[out->count++] = (orphan){.key = key_of(&out->scratch, r), .stray = stray};
        }
    }
    chunk_close(c);
    return status;
}

/* Marks the orphans that the file has. */
static void find_orphans(orphans *o, const char *path) {
    chunk *c;
    if (chunk_open(&c, path, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < c->record_count; i++) {
        const orphan wanted = {.key = key_of(&o->scratch, &c->records[i])};
        orphan *at = bsearch(&wanted, o->items, o->count, sizeof(*o->items), by_key);
        while (at && at > o->items && by_key(at - 1, &wanted) == 0) {
            at--;
        }
        for (; at && at < o->items + o->count && by_key(at, &wanted) == 0; at++) {
            at->found = true;
        }
    }
    chunk_close(c);
}

static ckd_status search_named(orphans *o, const ckd_store *store, ckd_error *err) {
    bytes named = {0}, unused = {0};
    bool complete = true;
    ckd_status status = strays_add_manifests(&named, &unused, &complete, store, err);
    if (status == CKD_OK) {
        ids_sort(&named);
    }
    for (size_t at = 0; at < named.size && status == CKD_OK; at += sizeof(ckd_id)) {
        ckd_id id;
        memcpy(&id, named.data + at, sizeof(id));
        if (at == 0 || memcmp(named.data + at - sizeof(id), &id, sizeof(id)) != 0) {
            find_orphans(o, path_chunk(store->path, &id, "").text);
        }
    }
    bytes_free(&named);
    bytes_free(&unused);
    return status;
}

ckd_status strays_find_spare(vanished *v, const bytes *checkpoints, const ckd_store *store, ckd_error *err) {
    orphans o = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        pathname p = path_chunk(store->path, &v->strays[i].id, "");
        status = add_orphans(&o, v, i, checkpoints, p.text, err);
    }
    if (status == CKD_OK && o.count) {
        qsort(o.items, o.count, sizeof(*o.items), by_key);
        status = search_named(&o, store, err);
    }
    if (status == CKD_OK && o.scratch.failed) {
        status = err_nomem(err, o.scratch.size, "records");
    }
    for (size_t i = 0; i < o.count && status == CKD_OK; i++) {
        v->strays[o.items[i].stray].spare &= o.items[i].found;
    }
    free(o.items);
    bytes_free(&o.scratch);
    return status;
}
