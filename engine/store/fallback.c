/*
 * Finds an older checkpoint to load if the newest is unreadable. The caller must ask for it: no call falls back to an
 * older state silently.
 */
#include <stdio.h>

#include "engine/common/common.h"
#include "engine/store/handle.h"
#include "engine/store/lost_rows.h"

typedef struct previous_query {
    ckd_checkpoint *out;
    const char *run;
    uint64_t step;
} previous_query;

/* Searches the run, then the runs that it branched off when training went back. */
static ckd_status query_previous(void *context, catalog *c, ckd_error *err) {
    const previous_query *q = context;
    char name[CKD_RUN_MAX + 1], root[CKD_RUN_MAX + 1];
    unsigned number;
    snprintf(name, sizeof(name), "%s", q->run);
    ckd_status status = catalog_newest_healthy(q->out, c, name, q->step, err);
    while (status == CKD_E_NOT_FOUND && branch_root(root, &number, name)) {
        (void)branch_name(name, root, number - 1, NULL); /* no longer than the original name */
        status = catalog_newest_healthy(q->out, c, name, q->step, err);
    }
    return status;
}

ckd_status ckd_store_previous(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                              ckd_error *err) {
    memset(out, 0, sizeof(*out));
    if (!run) {
        return err_set(err, CKD_E_INVALID, "a run must be named");
    }
    previous_query q = {out, run, step};
    ckd_status status = store_query(store, query_previous, &q, err);
    return status != CKD_E_NOT_FOUND ? status
                                     : err_set(err, status, "there is no checkpoint before %.*s@%llu",
                                               CKD_RUN_MAX, run, (unsigned long long)step);
}

/* An error about a manifest of a newer checkpoint, or one of a later branch of its run. */
static ckd_status newer_error(ckd_error *err, const ckd_store *store, const manifest_name *name,
                              const ckd_checkpoint *newest, const char *what, const ckd_error *why) {
    pathname p = path_manifest(store->path, name->run, name->step, name->generation);
    bool same_run = strcmp(name->run, newest->run) == 0;
    err_set(err, why->status, "%s@%llu is %s than %s@%llu and %s: %.300s", name->run,
            (unsigned long long)name->step, same_run ? "newer" : "of a later branch", newest->run,
            (unsigned long long)newest->step, what, why->message);
    return err_in_file(err, why->status, p.text);
}

/*
 * A newer checkpoint can be read. It was committed meanwhile, or its writer died before the catalog had it. Refreshes
 * the catalog, so that the caller finds it.
 */
static ckd_status report_newer(ckd_store *store, const manifest_name *name, const ckd_id *id,
                               const ckd_checkpoint *newest, ckd_error *err) {
    ckd_checkpoint found;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    uint32_t generation;
    ckd_status status = store_refresh_catalog(store, &why);
    THEN(status, store_find(&found, store, name->run, name->step, &why));
    if (status == CKD_OK) {
        err_set(&why, CKD_E_EXISTS, "look for the newest again");
        return newer_error(err, store, name, newest, "is listed now", &why);
    }
    bool renamed = status == CKD_E_NOT_FOUND && store_find_id(&found, store, id, NULL) == CKD_OK;
    bool exists = status == CKD_E_NOT_FOUND &&
                  manifests_new_generation(&generation, store, name->run, name->step, NULL) == CKD_E_EXISTS;
    if (exists && !renamed) {
        err_set(&why, CKD_E_CORRUPT, "it is inconsistent");
        return newer_error(err, store, name, newest, "cannot be listed", &why);
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why); /* it was deleted meanwhile */
}

/*
 * Reads the manifest that has this name. suspect_ok: it may be that of a suspect checkpoint. Errors: EXISTS (look
 * again), CORRUPT and others (it cannot be read).
 */
static ckd_status check_name(ckd_store *store, const manifest_name *name, const ckd_checkpoint *newest,
                             bool suspect_ok, ckd_error *err) {
    manifest m;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, &why);
    if (status == CKD_OK) {
        bool expected = suspect_ok && m.checkpoint.suspect;
        status = expected ? CKD_OK : report_newer(store, name, &m.checkpoint.id, newest, err);
        manifest_free(&m);
    } else if (status == CKD_E_NOT_FOUND) { /* it was deleted meanwhile */
        status = CKD_OK;
    } else {
        newer_error(err, store, name, newest, "cannot be read", &why);
        if (err) {
            err->sys_errno = why.sys_errno; /* tells whether only this file is affected */
        }
    }
    return status;
}

/*
 * Reports the lost checkpoints of the run that are newer than `newest`, once per handle. newest: NULL if nothing is
 * listed. Training goes on without them, but not silently.
 */
static void report_lost(ckd_store *store, const char *run, const ckd_checkpoint *newest) {
    dir_list list;
    if (atomic_load(&store->losses_reported) || damage_list_folder(&list, store, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        manifest m;
        if (!lost_row_read(&m, store, list.names[i], VANISHED_END)) {
            continue;
        }
        const ckd_checkpoint *c = &m.checkpoint;
        if (strcmp(c->run, run) == 0 && (!newest || c->step > newest->step)) {
            atomic_store(&store->losses_reported, true);
            store_message(
                store,
                "%s@%llu was committed and is lost, as its manifest is missing: ckptdelta repair may bring it back",
                c->run, (unsigned long long)c->step);
        }
        manifest_free(&m);
    }
    dir_list_free(&list);
}

/*
 * Reads the manifests themselves, because the catalog may be behind and, at the latest after a rebuild, does not list
 * unreadable ones.
 */
ckd_status ckd_store_check_newest(ckd_store *store, const ckd_checkpoint *newest, ckd_error *err) {
    manifest_list list = {0};
    ckd_status status = manifests_read(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        const manifest_name *name = &list.items[i];
        bool first = i == 0 || !same_checkpoint_name(&list.items[i - 1], name);
        if (first && name->step > newest->step && strcmp(name->run, newest->run) == 0) {
            status = check_name(store, name, newest, false, err);
        }
    }
    manifests_free(&list);
    if (status == CKD_OK) {
        report_lost(store, newest->run, newest);
    }
    return status;
}

/* Whether the catalog lists a checkpoint of the run that is at least as new as this one. */
static bool is_followed(ckd_store *store, const manifest_name *name) {
    ckd_checkpoint newest;
    return store_find(&newest, store, name->run, CKD_LATEST, NULL) == CKD_OK && newest.step >= name->step;
}

ckd_status store_check_later_branches(ckd_store *store, const ckd_checkpoint *newest, ckd_error *err) {
    char root[CKD_RUN_MAX + 1], other_root[CKD_RUN_MAX + 1];
    unsigned number, other;
    manifest_list list = {0};
    branch_root(root, &number, newest->run);
    ckd_status status = manifests_read(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        const manifest_name *name = &list.items[i];
        bool first = i == 0 || !same_checkpoint_name(&list.items[i - 1], name);
        branch_root(other_root, &other, name->run);
        if (first && other > number && strcmp(other_root, root) == 0 && !is_followed(store, name)) {
            status = check_name(store, name, newest, false, err);
        }
    }
    manifests_free(&list);
    return status;
}

ckd_status store_check_unlisted(ckd_store *store, const char *run, ckd_error *err) {
    char root[CKD_RUN_MAX + 1], other_root[CKD_RUN_MAX + 1];
    unsigned first, number;
    manifest_list list = {0};
    branch_root(root, &first, run);
    ckd_status status = manifests_read(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        const manifest_name *n = &list.items[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        manifest m = {0};
        branch_root(other_root, &number, n->run);
        if (number < first || strcmp(other_root, root) != 0) {
            continue;
        }
        status = store_read_manifest(&m, store, n->run, n->step, n->generation, &why);
        manifest_free(&m);
        if (status != CKD_OK && status != CKD_E_NOT_FOUND) { /* not deleted meanwhile */
            err_set(
                err, status,
                "%s@%llu cannot be read, and nothing else of its run, which is not new, is listed: %.300s",
                n->run, (unsigned long long)n->step, why.message);
            err_in_file(err, status, path_manifest(store->path, n->run, n->step, n->generation).text);
        }
        status = status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    manifests_free(&list);
    if (status == CKD_OK) {
        report_lost(store, run, NULL);
    }
    return status;
}

/* ---- passing suspect ones over ---- */

/*
 * An unreadable manifest between the two may be that of a later healthy checkpoint. Errors: as ckd_store_check_newest.
 */
static ckd_status check_between(ckd_store *store, const ckd_checkpoint *healthy,
                                const ckd_checkpoint *suspect, ckd_error *err) {
    char root[CKD_RUN_MAX + 1], other_root[CKD_RUN_MAX + 1];
    unsigned first, last, number;
    manifest_list list = {0};
    branch_root(root, &first, healthy->run);
    branch_root(root, &last, suspect->run);
    ckd_status status = manifests_read(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        const manifest_name *name = &list.items[i];
        bool newest = i == 0 || !same_checkpoint_name(&list.items[i - 1], name);
        branch_root(other_root, &number, name->run);
        bool later = number > first || (number == first && name->step > healthy->step);
        if (newest && later && number <= last && name->step < suspect->step &&
            strcmp(other_root, root) == 0) {
            status = check_name(store, name, healthy, true, err);
        }
    }
    manifests_free(&list);
    return status;
}

ckd_status ckd_store_healthy(ckd_checkpoint *out, ckd_store *store, const ckd_checkpoint *newest,
                             ckd_error *err) {
    ckd_checkpoint from = *newest;
    ckd_status status, between = CKD_OK;
    ckd_error why;
    *out = from;
    if (!from.suspect) {
        return CKD_OK;
    }
    do { /* EXISTS: the catalog was behind */
        why = (ckd_error){.offset = CKD_NO_OFFSET};
        status = ckd_store_previous(out, store, from.run, from.step, &why);
        between = status == CKD_OK ? check_between(store, out, &from, &why) : CKD_OK;
    } while (between == CKD_E_EXISTS);
    if (status == CKD_OK) {
        store_message(store, "%s@%llu is suspect and passed over: %s@%llu is used instead", from.run,
                      (unsigned long long)from.step, out->run, (unsigned long long)out->step);
        return err_from(err, between, &why);
    }
    *out = from;
    return status == CKD_E_NOT_FOUND
               ? err_set(err, CKD_E_STATE,
                         "all checkpoints of run '%s' are suspect, as values became NaN or infinite; to use "
                         "the newest anyway, name its step, %llu",
                         from.run, (unsigned long long)from.step)
               : err_from(err, status, &why);
}

int ckd_error_is_damage(const ckd_error *why) {
    return why->status == CKD_E_CORRUPT || (why->status == CKD_E_NOT_FOUND && why->file[0]) ||
           (why->status == CKD_E_IO && file_is_unreadable(why->sys_errno));
}
