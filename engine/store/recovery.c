/*
 * Cleans up after writers that died. Their intents say what they were writing. store_recover runs whenever a store is
 * opened for writing. visit_intent takes an intent that nobody has locked for a dead writer's, and clean_intent removes
 * the chunk files that it names, unless a manifest names them or may have named them.
 */
#include <stdlib.h>

#include "engine/store/damage.h"
#include "engine/store/handle.h"
#include "engine/store/manifests.h"
#include "engine/store/strays.h"

/* All chunk files that a manifest names, sorted by id. unknown: a manifest is unreadable, so nothing may be removed. */
typedef struct named_files {
    ckd_id *ids;
    size_t count, capacity;
    bool unknown;
} named_files;

static ckd_status add_named(named_files *named, const manifest *m, ckd_error *err) {
    if (ARRAY_GROW(named->ids, named->capacity, named->count + m->file_count, "chunk file names", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        named->ids[named->count++] = m->files[i].id;
    }
    return CKD_OK;
}

static ckd_status read_named(named_files *named, const ckd_store *store, ckd_error *err) {
    manifest_list list = {0};
    /* A manifest may exist although its writer died before syncing. It counts from now on, so make it durable. */
    ckd_status status = dir_sync(path_in(store->path, DIR_MANIFESTS).text, err);
    if (status == CKD_OK) {
        status = manifests_read_all(&list, store, err); /* checkpoints in the trash may come back */
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        manifest m;
        ckd_error why = {0};
        status = store_read_manifest(&m, store, list.items[i].run, list.items[i].step,
                                     list.items[i].generation, &why);
        if (status == CKD_OK) {
            status = add_named(named, &m, err);
            manifest_free(&m);
        } else {
            named->unknown = true;
            status = CKD_OK;
        }
    }
    manifests_free(&list);
    if (named->count) {
        qsort(named->ids, named->count, sizeof(*named->ids), id_compare);
    }
    return status;
}

static bool is_named(const named_files *named, const ckd_id *id) {
    return id_among(id, named->ids, named->count);
}

/*
 * Whether the dead writer wrote this doubtful checkpoint. If the checkpoint was committed, the writer's file is no
 * leftover.
 */
static bool wrote(const intent *dead, const ckd_checkpoint *doubtful) {
    return dead->step == doubtful->step && strcmp(dead->run, doubtful->run) == 0;
}

/*
 * Whether the chunk file has records of a checkpoint that a catalog lists and whose manifest is lost. A checkpoint
 * that may be lost or deleted counts only if the dead writer wrote it. Any other was probably deleted, and its records
 * are here because others use them. A file that cannot be read may have such records, and counts.
 */
static bool is_of_lost(const ckd_store *store, const intent *dead, const ckd_id *file, const vanished *v) {
    bytes ids = {0};
    bool found = (v->count || v->doubtful_count) && !strays_add_recorded(&ids, store, file);
    ids_sort(&ids);
    for (size_t i = 0; i < v->count && !found; i++) {
        found = ids_contain(&ids, &v->items[i].id);
    }
    for (size_t i = 0; i < v->doubtful_count && !found; i++) {
        found = wrote(dead, &v->doubtful[i]) && ids_contain(&ids, &v->doubtful[i].id);
    }
    bytes_free(&ids);
    return found;
}

/*
 * Called if a writer died while it wrote the catalog. Opening the catalog for writing rolls the journal back, which
 * recovery may do. An empty file is not opened: SQLite would turn it into an empty catalog, which would pass as
 * evidence that nothing was committed.
 */
static void roll_back_catalog(const ckd_store *store) {
    catalog *c = NULL;
    if (file_bytes(path_in(store->path, FILE_CATALOG "-journal").text) &&
        file_bytes(path_in(store->path, FILE_CATALOG).text)) {
        (void)catalog_open(&c, path_in(store->path, FILE_CATALOG).text, CATALOG_WRITE, &store->id, 0, NULL);
        catalog_close(c);
    }
}

/* Removes a file that was never committed. With `doubt` it may have been, and is moved to data/q. */
static ckd_status drop_file(const ckd_store *store, const ckd_id *id, bool doubt, ckd_error *err) {
    pathname p = path_chunk(store->path, id, ""), aside;
    return !file_exists(p.text) ? CKD_OK
           : doubt              ? damage_put_aside(&aside, store, DIR_CHUNKS, strrchr(p.text, '/') + 1, err)
                                : file_remove(p.text, true, err);
}

static ckd_status drop_files(const ckd_store *store, const intent *dead, const named_files *named,
                             const vanished *lost, bool doubt, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < dead->file_count && status == CKD_OK; i++) {
        const ckd_id *id = &dead->files[i].id;
        status = file_remove(path_chunk(store->path, id, ".tmp").text, true, err);
        if (status == CKD_OK && !is_named(named, id) && !is_of_lost(store, dead, id, lost)) {
            status = drop_file(store, id, doubt, err);
        }
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_CHUNKS).text, err) : status;
}

/* The evidence is read once for all dead writers, and only if there is one whose files nothing names. */
typedef struct recovery {
    const ckd_store *store;
    named_files named;
    bool named_read;
    vanished lost;
    bool lost_read;
    bool any_damaged; /* a damaged intent is now in data/q */
} recovery;

static bool has_unnamed(const recovery *r, const intent *dead) {
    bool unnamed = false;
    for (size_t i = 0; i < dead->file_count && !unnamed; i++) {
        const ckd_id *id = &dead->files[i].id;
        unnamed = !is_named(&r->named, id) && file_exists(path_chunk(r->store->path, id, "").text);
    }
    return unnamed;
}

static ckd_status find_lost(recovery *r, ckd_error *err) {
    if (r->lost_read) {
        return CKD_OK;
    }
    roll_back_catalog(r->store);
    r->lost_read = true;
    ckd_error why = {0};
    ckd_status status = vanished_find(&r->lost, r->store, &why);
    if (status == CKD_OK || status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    r->lost.rows = ROWS_LATER;
    store_message(r->store, "it is unknown now which checkpoints are lost: %s", why.message);
    return CKD_OK;
}

/*
 * Removes the files of a dead writer that no manifest names, then its intent. The writer may have committed even so,
 * if its manifest was lost since. Only the catalog tells:
 * - It lists the checkpoint: the files stay. The intent goes, because a repair makes a manifest only from files that
 *   nothing names.
 * - It does not list the checkpoint: the files go.
 * - It cannot be read now: files and intent stay.
 * - It is gone, or younger than the intent: the files are moved to data/q, and the intent goes.
 */
static ckd_status clean_intent(recovery *r, const char *name, const intent *dead, ckd_error *err) {
    static const vanished none = {0};
    const ckd_store *store = r->store;
    bool unnamed = has_unnamed(r, dead);
    ckd_status status = unnamed ? find_lost(r, err) : CKD_OK;
    const vanished *lost = unnamed ? &r->lost : &none;
    rows_known rows = unnamed && lost->rows == ROWS_KNOWN ? vanished_rows_of(store, name) : lost->rows;
    bool later = lost->unweighed || rows == ROWS_LATER, aside = rows == ROWS_GONE;
    ckd_error why = {0};
    if (status == CKD_OK && !later) {
        status = drop_files(store, dead, &r->named, lost, aside, &why);
        THEN(status, file_remove(path_of(store->path, DIR_INTENTS, name).text, true, &why));
        err_from(err, status, &why);
    }
    if (aside && status != CKD_OK && status != CKD_E_NOMEM) {
        store_message(
            store, "leftovers of a writer of %s@%llu are kept for now, as they cannot be moved to data/q: %s",
            dead->run, (unsigned long long)dead->step, why.message);
        return CKD_OK;
    }
    if (status == CKD_OK) {
        store_message(
            store,
            later   ? "leftovers of a writer of %s@%llu are kept for now, as the catalog cannot be read"
            : aside ? "a writer of %s@%llu died, and no catalog shows whether it had finished: its leftovers "
                      "are in data/q; ckptdelta repair --purge removes them"
                    : "cleaned up after a writer of %s@%llu that died",
            dead->run, (unsigned long long)dead->step);
    }
    return status;
}

/*
 * A damaged intent may name any file. While it stays, leftovers of its writer could not be told from files of lost
 * checkpoints. So it goes to data/q. Files of its writer with final names stay, because they may belong to a
 * checkpoint.
 */
static void put_intent_aside(recovery *r, const char *name, const ckd_error *why) {
    pathname aside;
    ckd_error failed = {0};
    bool moved = why->status == CKD_E_CORRUPT &&
                 damage_put_aside(&aside, r->store, DIR_INTENTS, name, &failed) == CKD_OK;
    r->any_damaged = r->any_damaged || moved;
    store_message(r->store,
                  moved ? "an intent of a writer that died is damaged, and was moved to data/q: %s (%s)"
                        : "an intent cannot be read and is left alone: %s (%s)",
                  why->message, path_of(r->store->path, DIR_INTENTS, name).text);
}

static ckd_status visit_intent(recovery *r, const char *name, ckd_error *err) {
    const ckd_store *store = r->store;
    pathname p = path_of(store->path, DIR_INTENTS, name);
    file_lock *lock;
    ckd_status status = lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL);
    if (status != CKD_OK) {
        return CKD_OK; /* its writer is alive, or has just finished */
    }
    bytes data = {0};
    intent dead = {0};
    ckd_error why = {0};
    status = file_read_all(&data, p.text, METADATA_MAX, &why);
    THEN(status, intent_decode(&dead, &store->id, data.data, data.size, p.text, &why));
    if (status != CKD_OK) {
        put_intent_aside(r, name, &why);
        status = CKD_OK;
    } else {
        status = r->named_read ? CKD_OK : read_named(&r->named, store, err);
        r->named_read = true;
        if (status == CKD_OK && r->named.unknown) {
            store_message(store,
                          "leftovers of a writer that died are kept: a damaged manifest may name them");
        } else if (status == CKD_OK) {
            status = clean_intent(r, name, &dead, err);
        }
    }
    intent_free(&dead);
    bytes_free(&data);
    lock_release(lock);
    return status;
}

static ckd_status visit_intents(const ckd_store *store, ckd_error *err) {
    dir_list list;
    recovery r = {.store = store};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id id;
        if (strlen(list.names[i]) == CKD_ID_TEXT - 1 && id_parse(&id, list.names[i])) {
            status = visit_intent(&r, list.names[i], err);
        }
    }
    dir_list_free(&list);
    if (status == CKD_OK && r.any_damaged) {
        status = strays_remove_unfinished(store, err);
    }
    free(r.named.ids);
    vanished_free(&r.lost);
    return status;
}

/* Removes temporary files. They live only while their maker holds the publish lock, which we hold now. */
static ckd_status remove_temporaries(const ckd_store *store, const char *dir, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, dir).text, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (strncmp(list.names[i], ".tmp-", 5) == 0) {
            status = file_remove(path_of(store->path, dir, list.names[i]).text, true, err);
        }
    }
    dir_list_free(&list);
    return status;
}

ckd_status store_recover(ckd_store *store, ckd_error *err) {
    static const char *const dirs[] = {"data", DIR_MANIFESTS, DIR_INTENTS, DIR_TOMBSTONES, DIR_SETTINGS};
    ckd_status status = store_make_directories(store->path, err);
    /* Copies and archives often lack empty folders. Their maker, we or somebody who died, may not have synced them. */
    THEN(status, dir_sync(path_in(store->path, "data").text, err));
    for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]) && status == CKD_OK; i++) {
        status = remove_temporaries(store, dirs[i], err);
    }
    if (status != CKD_OK) {
        return status;
    }
    deletion_mark_restore(store);
    status = visit_intents(store, err);
    return status == CKD_OK ? store->hooks->recover(store, err) : status;
}

static bool has_renames(const ckd_store *store) {
    setting_list all = {0};
    bool any = settings_read_kind(&all, store, METADATA_RENAME, NULL) == CKD_OK && all.count > 0;
    settings_free(&all);
    return any;
}

bool store_complete_renames(ckd_store *store) {
    if (!has_renames(store)) {
        return false;
    }
    (void)store_recover(store, NULL);
    return has_renames(store);
}
