/* Keeps the catalog's knowledge of lost checkpoints in data/q, each as a manifest without files. */
#include "engine/store/lost_rows.h"

#include <stdio.h>
#include <string.h>

#include "engine/store/manifests.h"
#include "engine/store/strays.h"

/* The id is in the name: a checkpoint may be lost, saved again as the same generation, and lost again. */
static pathname lost_file_path(const ckd_store *store, const ckd_checkpoint *c, const char *end) {
    char name[CKD_RUN_MAX + 96], id[CKD_ID_TEXT];
    ckd_id_text(id, &c->id);
    snprintf(name, sizeof(name), "%s.%llu.%u.%s%s", c->run, (unsigned long long)c->step,
             (unsigned)c->generation, id, end);
    return path_of(store->path, DIR_DAMAGED, name);
}

/* Whether the file is there and intact. */
static bool is_kept(const ckd_store *store, const char *path) {
    manifest m = {0};
    bytes data = {0};
    ckd_status status = file_read_all(&data, path, METADATA_MAX, NULL);
    THEN(status, manifest_decode(&m, &store->id, data.data, data.size, path, NULL));
    manifest_free(&m);
    bytes_free(&data);
    return status == CKD_OK;
}

/* Replaces a damaged file, unless nothing but its name is known of the checkpoint. */
static ckd_status write_lost_file(const ckd_store *store, const ckd_checkpoint *checkpoint, const char *end,
                                  ckd_error *err) {
    bytes data = {0};
    manifest m = {.checkpoint = *checkpoint};
    pathname path = lost_file_path(store, checkpoint, end);
    if (file_exists(path.text) && (!checkpoint->created_ns || is_kept(store, path.text))) {
        return CKD_OK;
    }
    manifest_encode(&data, &store->id, &m);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    ckd_id own; /* two processes may do this at the same time */
    char name[CKD_ID_TEXT + 16], hex[CKD_ID_TEXT];
    THEN(status, damage_make_folder(store, err));
    THEN(status, ckd_id_new(&own, err));
    if (status == CKD_OK) {
        ckd_id_text(hex, &own);
        snprintf(name, sizeof(name), ".tmp-%s", hex);
        pathname temporary = path_of(store->path, DIR_DAMAGED, name);
        status = file_replace_durable(path.text, temporary.text, data.data, data.size, err);
    }
    bytes_free(&data);
    return status;
}

ckd_status lost_row_keep(const ckd_store *store, const ckd_checkpoint *c, const char *end, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = write_lost_file(store, c, end, &why);
    if (status == CKD_OK || status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    status = status == CKD_E_NOSPACE ? status : CKD_E_IO;
    err_set(err, status, "the catalog's record of the lost checkpoint %.128s@%llu cannot be saved: %s",
            c->run, (unsigned long long)c->step, why.message);
    if (err) {
        err->sys_errno = why.sys_errno;
    }
    return err_in_file(err, status, lost_file_path(store, c, end).text);
}

/*
 * Takes run, step, generation and id from the name if the file is damaged or cannot be read now. The checkpoint stays
 * lost, because a repair cannot tell whether it has found everything.
 */
static bool read_name(manifest *out, const char *name, size_t length) {
    char text[CKD_RUN_MAX + 96];
    manifest_name n;
    ckd_id id;
    size_t before_id = length > CKD_ID_TEXT ? length - CKD_ID_TEXT : 0;
    snprintf(text, sizeof(text), "%.*s", (int)before_id, name);
    if (!before_id || name[before_id] != '.' || !id_parse(&id, name + before_id + 1) ||
        !manifest_name_parse(&n, text)) {
        return false;
    }
    *out = (manifest){.checkpoint = {.id = id, .step = n.step, .generation = n.generation}};
    memcpy(out->checkpoint.run, n.run, sizeof(n.run));
    return true;
}

bool lost_row_read(manifest *out, const ckd_store *store, const char *name, const char *end) {
    bytes data = {0};
    pathname p = path_of(store->path, DIR_DAMAGED, name);
    size_t length = strlen(name);
    if (length <= strlen(end) || strcmp(name + length - strlen(end), end) != 0) {
        return false;
    }
    ckd_status status = file_read_all(&data, p.text, METADATA_MAX, NULL);
    THEN(status, manifest_decode(out, &store->id, data.data, data.size, p.text, NULL));
    bytes_free(&data);
    bool of_another = status == CKD_E_NOT_FOUND || status == CKD_E_MISMATCH;
    return status == CKD_OK || (!of_another && read_name(out, name, length - strlen(end)));
}

void vanished_forget(const ckd_store *store, const ckd_id *checkpoint) {
    dir_list list;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        manifest m;
        if (lost_row_read(&m, store, list.names[i], VANISHED_END) ||
            lost_row_read(&m, store, list.names[i], DOUBTFUL_END)) {
            if (id_equal(&m.checkpoint.id, checkpoint)) {
                (void)file_remove(path_of(store->path, DIR_DAMAGED, list.names[i]).text, true, NULL);
            }
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
}

/*
 * Whether the checkpoint has a manifest, of any generation and under any name, so that it is no longer lost. A copy or
 * a renamed run may have brought it back.
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
        if (lost_row_read(&m, store, list.names[i], VANISHED_END) ||
            lost_row_read(&m, store, list.names[i], DOUBTFUL_END)) {
            if (has_manifest(store, &m.checkpoint)) {
                (void)file_remove(path_of(store->path, DIR_DAMAGED, list.names[i]).text, true, NULL);
            }
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
}

ckd_status lost_row_refuse(const ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    err_set(
        err, CKD_E_STATE,
        "the manifest of %.128s@%llu is lost, and only a repair knows which files it needs: run ckptdelta "
        "repair first; if that cannot bring it back, remove this file to give it up",
        c->run, (unsigned long long)c->step);
    return err_in_file(err, CKD_E_STATE, lost_file_path(store, c, VANISHED_END).text);
}

ckd_status vanished_check_none(const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = damage_list_folder(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        manifest m;
        if (lost_row_read(&m, store, list.names[i], VANISHED_END)) {
            status = has_manifest(store, &m.checkpoint) ? CKD_OK : lost_row_refuse(store, &m.checkpoint, err);
            manifest_free(&m);
        }
    }
    dir_list_free(&list);
    return status;
}
