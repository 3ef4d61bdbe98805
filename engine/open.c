/* Opens a store and wires the rooms together. Only this file knows what each room does for an open store. */
#include "engine/compact/compact.h"
#include "engine/device/device.h"
#include "engine/integrity/integrity.h"
#include "engine/ranks/ranks.h"
#include "engine/retain/retain.h"
#include "engine/save/save.h"
#include "engine/transfer/transfer.h"

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
}

/* Applies the run's policy, which may delete checkpoints and then compact the run. */
static void after_commit(ckd_store *store, const char *run) {
    ckd_policy applied;
    if (retain_after_commit(&applied, store, run)) {
        compact_after_deletion(store, &applied);
    }
}

static const store_hooks hooks = {.recover = recover, .after_commit = after_commit, .close = close_store};

ckd_status ckd_store_open(ckd_store **out, const char *root, ckd_open_mode mode,
                          const ckd_store_options *options, ckd_error *err) {
    return store_open(out, root, mode, options, &hooks, err);
}

ckd_status ckd_store_rebuild(ckd_rebuild_result *result, const char *path, const ckd_store_options *options,
                             ckd_error *err) {
    return store_rebuild(result, path, options, &hooks, err);
}
