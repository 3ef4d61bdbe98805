/*
 * The store's identity: data/store has the id that all other files of the store repeat. If data/store is lost, the id
 * is taken from them. While such files exist, no new identity is made, because they would then belong to another store.
 */
#include <stdio.h>

#include "codec/chunk/chunk.h"
#include "engine/store/damage.h"
#include "engine/store/handle.h"

#define IDENTITY_MAX 4096

/* ---- data/store ---- */

static ckd_status read_identity(ckd_id *out, const ckd_store *store, ckd_error *err) {
    pathname p = path_in(store->path, FILE_IDENTITY);
    bytes data = {0};
    store_identity identity;
    ckd_status status = file_read_all(&data, p.text, IDENTITY_MAX, err);
    THEN(status, store_identity_decode(&identity, data.data, data.size, p.text, err));
    if (status == CKD_OK) {
        *out = identity.id;
    }
    bytes_free(&data);
    return status;
}

ckd_status identity_condition(const ckd_store *store, ckd_error *why) {
    ckd_id id;
    ckd_status status = read_identity(&id, store, why);
    pathname p = path_in(store->path, FILE_IDENTITY);
    if (status == CKD_OK && !id_equal(&id, &store->id)) {
        status = err_set(why, CKD_E_STATE, "the store at '%s' was replaced while it was open", store->path);
    }
    if (status == CKD_E_NOT_FOUND) {
        err_set(why, status, "the store's identity is missing");
    }
    return err_in_file(why, status, p.text);
}

bool identity_was_replaced(const ckd_store *store, ckd_error *err) {
    static const ckd_id none;
    char now[FILE_FINGERPRINT];
    ckd_error why = {0};
    file_fingerprint(now, path_in(store->path, FILE_IDENTITY).text);
    bool same = now[0] && strcmp(now, store->identity_mark) == 0;
    if (same || id_equal(&store->id, &none) || identity_condition(store, &why) != CKD_E_STATE) {
        return false;
    }
    err_from(err, CKD_E_STATE, &why);
    return true;
}

ckd_status identity_create(const ckd_store *store, ckd_error *err) {
    store_identity identity = {.created_ns = clock_wall_ns()};
    ckd_status status = ckd_id_new(&identity.id, err);
    if (status != CKD_OK) {
        return status;
    }
    bytes data = {0};
    store_identity_encode(&data, &identity);
    if (data.failed) {
        status = err_nomem(err, IDENTITY_MAX, "the store's identity");
    } else {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &identity.id);
        char temp[64];
        snprintf(temp, sizeof(temp), "data/.tmp-%s", hex);
        ckd_error why = {0};
        status = file_create_durable(path_in(store->path, FILE_IDENTITY).text,
                                     path_in(store->path, temp).text, data.data, data.size, &why);
        status =
            err_except(err, status, CKD_E_EXISTS, &why); /* another process created it at the same time */
    }
    bytes_free(&data);
    return status;
}

/* ---- files that repeat the id ---- */

typedef struct votes {
    ckd_id id;
    bool any;
    pathname first; /* the file that told it */
} votes;

typedef ckd_status (*read_id_fn)(ckd_id *out, const char *path, ckd_error *err);

/* Reads the id from a metadata file of any kind, and checks the checksum. */
static ckd_status id_of_metadata(ckd_id *out, const char *path, ckd_error *err) {
    bytes data = {0};
    ckd_status status = file_read_all(&data, path, METADATA_MAX, err);
    if (status == CKD_OK) {
        unsigned kind = data.size >= METADATA_ENVELOPE_MIN ? load_le16(data.data + 10) : METADATA_MANIFEST;
        metadata_reader n = metadata_open((metadata_kind)kind, NULL, data.data, data.size, path, err);
        status = n.status;
        *out = n.store;
    }
    bytes_free(&data);
    return status;
}

static ckd_status id_of_chunk_file(ckd_id *out, const char *path, ckd_error *err) {
    chunk *c;
    ckd_status status = chunk_open_bundled(&c, path, err);
    if (status == CKD_OK) {
        *out = c->identity.store;
        chunk_close(c);
    }
    return status;
}

/* A file that is damaged or cannot be read has no vote. */
static ckd_status add_vote(votes *v, read_id_fn read_id, const pathname *path, ckd_error *err) {
    ckd_id id;
    ckd_error why = {0};
    ckd_status status = read_id(&id, path->text, &why);
    if (status != CKD_OK) {
        return is_damage(status, &why) ? CKD_OK : err_from(err, status, &why);
    }
    if (!v->any) {
        *v = (votes){.id = id, .any = true, .first = *path};
    } else if (!id_equal(&v->id, &id)) {
        return err_corrupt(
            err, path->text, CKD_NO_OFFSET,
            "it is unknown which store this is: its identity (data/store) is damaged or missing, "
            "and its files are of different stores, such as %s and %s; move the files of the "
            "other store away, then run ckptdelta repair",
            v->first.text, path->text);
    }
    return CKD_OK;
}

static bool is_named_metadata(const char *name) {
    manifest_name m;
    setting_name s;
    return manifest_name_parse(&m, name) || setting_name_parse(&s, name);
}

static bool is_named_chunk(const char *name) {
    ckd_id id;
    return id_parse(&id, name) && strcmp(name + CKD_ID_TEXT - 1, ".ckd") == 0;
}

static ckd_status add_votes_in(votes *v, const ckd_store *store, const char *dir, ckd_error *err) {
    bool chunks = strcmp(dir, DIR_CHUNKS) == 0;
    dir_list list = {0};
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, dir).text, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (chunks ? is_named_chunk(list.names[i]) : is_named_metadata(list.names[i])) {
            pathname p = path_of(store->path, dir, list.names[i]);
            status = add_vote(v, chunks ? id_of_chunk_file : id_of_metadata, &p, err);
        }
    }
    dir_list_free(&list);
    return status;
}

/*
 * Manifests decide; without any, chunk files do. In a store without checkpoints, settings and the deletion mark decide.
 */
ckd_status identity_derive(ckd_id *out, bool *found, const ckd_store *store, ckd_error *err) {
    votes v = {.any = false};
    ckd_status status = add_votes_in(&v, store, DIR_MANIFESTS, err);
    if (status == CKD_OK && !v.any) {
        status = add_votes_in(&v, store, DIR_CHUNKS, err);
    }
    if (status == CKD_OK && !v.any) {
        pathname mark = path_in(store->path, FILE_DELETIONS);
        status = add_votes_in(&v, store, DIR_TOMBSTONES, err);
        THEN(status, add_votes_in(&v, store, DIR_SETTINGS, err));
        THEN(status, add_vote(&v, id_of_metadata, &mark, err));
    }
    *out = v.id;
    *found = status == CKD_OK && v.any;
    return status;
}

ckd_status identity_is_expected(bool *out, const ckd_store *store, ckd_error *err) {
    static const char *const folders[] = {DIR_CHUNKS,   DIR_MANIFESTS, DIR_TOMBSTONES, DIR_INTENTS,
                                          DIR_SETTINGS, DIR_PARITY,    DIR_DAMAGED};
    ckd_status status = CKD_OK;
    *out = file_exists(path_in(store->path, FILE_IDENTITY).text) ||
           file_exists(path_in(store->path, FILE_DELETIONS).text);
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]) && !*out && status == CKD_OK; i++) {
        dir_list list = {0};
        ckd_error why = {0};
        status = dir_list_read(&list, path_in(store->path, folders[i]).text, &why);
        for (size_t k = 0; status == CKD_OK && k < list.count; k++) {
            *out = *out || list.names[k][0] != '.';
        }
        dir_list_free(&list);
        status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    return status;
}

/* ---- opening ---- */

static ckd_status no_store(const ckd_store *store, ckd_error *err) {
    return err_set(err, CKD_E_NOT_FOUND, "no ckptdelta store at '%s' (there is no %s in it)", store->path,
                   FILE_IDENTITY);
}

/* why: the error of data/store. */
static ckd_status open_lost(ckd_store *store, const ckd_error *why, ckd_error *err) {
    bool found, expected = true;
    pathname p = path_in(store->path, FILE_IDENTITY);
    bool missing = why->status == CKD_E_NOT_FOUND;
    ckd_status status = missing ? identity_is_expected(&expected, store, err) : CKD_OK;
    if (status == CKD_OK && !expected) {
        return no_store(store, err);
    }
    THEN(status, identity_derive(&store->id, &found, store, err));
    if (status != CKD_OK) {
        return status;
    }
    const char *what = missing ? "it is missing" : why->message;
    if (!found) {
        return err_corrupt(
            err, p.text, CKD_NO_OFFSET,
            "the store's identity (data/store) cannot be used: %s; no other file of the store has its id: "
            "take data/store from a backup, or if nothing in '%s' is of value, name a new directory",
            what, store->path);
    }
    if (store->mode == CKD_OPEN_CREATE) {
        return err_corrupt(
            err, p.text, CKD_NO_OFFSET,
            "the store's identity (data/store) cannot be used: %s; the rest of the store is still there: "
            "run ckptdelta repair %s, which writes the identity again",
            what, store->path);
    }
    atomic_store(&store->identity_lost, true);
    store_message(
        store,
        "the store's identity (data/store) cannot be used: %s; the id in the store's other files is used; "
        "run ckptdelta repair %s, which writes it again",
        what, store->path);
    return CKD_OK;
}

/*
 * An identity of a later version is no damage, and the other files may have another meaning in that version, too. An
 * identity that cannot be read now may be intact and readable later, so readers go on, but writers do not begin.
 */
ckd_status identity_open(ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    file_fingerprint(store->identity_mark, path_in(store->path, FILE_IDENTITY).text);
    ckd_status status = read_identity(&store->id, store, &why);
    bool lost = status == CKD_E_IO ? store->mode == CKD_OPEN_READ && is_damage(status, &why)
                                   : status == CKD_E_CORRUPT || status == CKD_E_NOT_FOUND;
    return lost ? open_lost(store, &why, err) : err_from(err, status, &why);
}
