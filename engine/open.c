/* Opens a store and wires the rooms together. Only this file knows what each room does for an open store. */
#include "engine/compact/compact.h"
#include "engine/device/device.h"
#include "engine/integrity/integrity.h"
#include "engine/ranks/ranks.h"
#include "engine/retain/retain.h"
#include "engine/save/save.h"
#include "engine/transfer/transfer.h"
#include "objects/objects.h"

static ckd_status recover(ckd_store *store, ckd_error *err) {
    ckd_status status = ranks_recover(store, err);
    THEN(status, transfer_recover(store, err));
    THEN(status, rename_recover(store, err));
    parity_recover(store);
    return status == CKD_OK && !store->options.keep_trash ? trash_collect_if_no_readers(store, err) : status;
}

static void close_store(ckd_store *store) {
    device_references_close(store);
    device_leases_close(store);
    save_workspace_free(store->workspace, false);
    object_mirror_close(store->mirror);
}

/* Applies the run's policy, which may delete checkpoints and then compact the run. */
static void after_commit(ckd_store *store, const char *run) {
    ckd_policy applied;
    if (retain_after_commit(&applied, store, run)) {
        compact_after_deletion(store, &applied);
    }
}

static const store_hooks hooks = {.recover = recover, .after_commit = after_commit, .close = close_store};

/* The error of a store in a bucket: its address says more than the path of its mirror. */
static ckd_status name_address(ckd_status status, const char *address, ckd_error *err) {
    return status == CKD_E_NOT_FOUND ? err_set(err, status, "no ckptdelta store at '%s'", address) : status;
}

/* An address that is not understood would otherwise become a folder of that name. */
static ckd_status check_path(const char *path, ckd_error *err) {
    size_t length = strspn(path, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+");
    bool is_path = strncmp(path + length, ":/", 2) != 0 || length == 0;
    bool is_url = !is_path && path[length + 2] == '/';
    if (is_path && objects_is_mirror(path)) {
        return err_set(
            err, CKD_E_INVALID,
            "'%s' is no store by itself, but what this machine keeps of one in a bucket: name the s3:// "
            "address that is in %s/../address",
            path, path);
    }
    if (is_path || (!is_url && strncmp(path, "s3:", 3) != 0)) {
        return CKD_OK;
    }
    return err_set(
        err, CKD_E_INVALID,
        "'%s' is no store: name a directory, or s3://BUCKET/PREFIX, in lower case and with two slashes",
        path);
}

ckd_status ckd_store_open(ckd_store **out, const char *root, ckd_open_mode mode,
                          const ckd_store_options *options, ckd_error *err) {
    object_mirror *mirror = NULL;
    *out = NULL;
    if (!root || !objects_address_is_remote(root)) {
        ckd_status known = root ? check_path(root, err) : CKD_OK;
        return known == CKD_OK ? store_open(out, root, mode, options, &hooks, err) : known;
    }
    ckd_status status = objects_mirror(&mirror, root, mode != CKD_OPEN_READ, err);
    if (status != CKD_OK) {
        return status;
    }
    status = store_open(out, object_mirror_path(mirror), mode, options, &hooks, err);
    if (status == CKD_OK) {
        (*out)->mirror = mirror;
        return CKD_OK;
    }
    object_mirror_close(mirror);
    return name_address(status, root, err);
}

ckd_status ckd_store_rebuild(ckd_rebuild_result *result, const char *path, const ckd_store_options *options,
                             ckd_error *err) {
    object_mirror *mirror = NULL;
    if (!path || !objects_address_is_remote(path)) {
        ckd_status known = path ? check_path(path, err) : CKD_OK;
        return known == CKD_OK ? store_rebuild(result, path, options, &hooks, err) : known;
    }
    ckd_status status = objects_mirror(&mirror, path, true, err);
    if (status == CKD_OK) {
        status = store_rebuild(result, object_mirror_path(mirror), options, &hooks, err);
        object_mirror_close(mirror);
        status = name_address(status, path, err);
    }
    return status;
}
