/* Repairs the store's identity, which all other files of the store repeat. */
#include <stdio.h>

#include "engine/integrity/repair.h"
#include "engine/store/store.h"

/* An identity that cannot be read may be intact, and stays. */
static bool can_replace(ckd_status found) {
    return found == CKD_E_CORRUPT || found == CKD_E_NOT_FOUND;
}

/* Returns CORRUPT if the other files are not of the store that was opened. */
static ckd_status check_id(const ckd_store *store, ckd_error *err) {
    ckd_id id;
    bool found;
    ckd_status status = identity_derive(&id, &found, store, err);
    if (status == CKD_OK && found && !id_equal(&id, &store->id)) {
        return err_corrupt(err, path_in(store->path, FILE_IDENTITY).text, CKD_NO_OFFSET,
                           "the store's files were replaced by those of another store meanwhile");
    }
    return status;
}

/*
 * The time of creation is not known, so the new file has none. The damaged one stays until the new one takes its name.
 */
static ckd_status write_again(pathname *aside, const ckd_store *store, ckd_error *err) {
    store_identity identity = {.id = store->id};
    pathname ready = path_in(store->path, "data/.tmp-identity"),
             temp = path_in(store->path, "data/.tmp-identity-new");
    bytes data = {0};
    store_identity_encode(&data, &identity);
    ckd_status status = data.failed ? err_nomem(err, METADATA_ENVELOPE_MIN, "the store's identity") : CKD_OK;
    THEN(status, file_remove(ready.text, true, err)); /* perhaps left by a repair that died */
    THEN(status, file_remove(temp.text, true, err));
    THEN(status, file_create_durable(ready.text, temp.text, data.data, data.size, err));
    if (status == CKD_OK) {
        status = repair_publish(aside, store, ready.text, "data", strrchr(FILE_IDENTITY, '/') + 1, err);
        if (status != CKD_OK) {
            (void)file_remove(ready.text, true, NULL);
        }
    }
    bytes_free(&data);
    return status;
}

/* *found, *why: the error of the identity if it was not replaced. */
static ckd_status replace(ckd_status *found, bool *done, pathname *aside, ckd_store *store, ckd_error *why,
                          ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    *found = identity_condition(store, why); /* another repair may have replaced it already */
    if (can_replace(*found)) {
        *found = check_id(store, why);
        *done = *found == CKD_OK;
        status = *done ? write_again(aside, store, err) : CKD_OK;
    }
    if (status == CKD_OK && *found == CKD_OK) {
        atomic_store(&store->identity_lost, false);
    }
    lock_release(lock);
    return status;
}

ckd_status repair_identity(repairing *r, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname path = path_in(r->store->path, FILE_IDENTITY), aside = {.text = ""};
    ckd_status found = identity_condition(r->store, &why);
    ckd_status status = damage_record(&r->damage, found, &why, CKD_NO_OFFSET, "", err);
    if (found == CKD_OK || status != CKD_OK) {
        return status;
    }
    bool done = r->options->dry_run && can_replace(found);
    if (!r->options->dry_run && can_replace(found)) {
        status = replace(&found, &done, &aside, r->store, &why, err);
    }
    if (status != CKD_OK || done) {
        return status == CKD_OK ? repair_report(r, path.text, aside.text, METADATA_ENVELOPE_MIN + 8, err)
                                : status;
    }
    if (found == CKD_OK) {
        damage_drop_file(&r->damage, repair_inside(r, path.text));
        return CKD_OK;
    }
    damage_append_text(
        &r->damage, repair_inside(r, path.text),
        found == CKD_E_CORRUPT
            ? why.message
            : "it may be intact, so it stays: make it readable, or if that is impossible, move it away, "
              "then run ckptdelta repair again");
    return is_damage(found, &why) ? CKD_OK : err_from(err, found, &why);
}
