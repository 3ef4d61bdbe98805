/* Reports what parity covers, by names and sizes alone. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/integrity/internal.h"

static ckd_status list_settings(ckd_parity_status *out, const ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    ckd_status status = settings_read_kind(&n, store, METADATA_PARITY, err);
    if (status == CKD_OK) {
        out->settings = calloc(n.count + 1, sizeof(*out->settings));
        status = out->settings ? CKD_OK : err_nomem(err, n.count * sizeof(*out->settings), "parity settings");
    }
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        const stored_setting *k = &n.items[i];
        if (k->name.kind != METADATA_PARITY) {
            continue;
        }
        ckd_parity_setting *s = &out->settings[out->setting_count++];
        bool for_all = strcmp(k->name.name, POLICY_OF_ALL) == 0;
        *s = (ckd_parity_setting){.data = k->parity.data, .parity = k->parity.parity, .status = k->status};
        snprintf(s->run, sizeof(s->run), "%s", for_all ? "" : k->name.name);
    }
    settings_free(&n);
    return status;
}

static bool covered(const parity_sets *sets, const live_file *f, const ckd_store *store) {
    size_t count;
    const parity_membership *c = parity_sets_of(sets, &f->file.id, &count);
    bool found = false;
    for (size_t i = 0; i < count && !found; i++) {
        int redundancy = c[i].set->redundancy_left;
        /* The file itself is one of the missing members. */
        redundancy += !live_file_exists(store, &f->file.id, f->file.size);
        found = redundancy > 0;
    }
    return found;
}

static ckd_status count_all(ckd_parity_status *out, const ckd_store *store, damage_list *ignored,
                            ckd_error *err) {
    live_files files = {0};
    parity_sets sets = {0};
    ckd_status status = live_files_read(&files, store, ignored, err);
    THEN(status, parity_sets_read(&sets, store, ignored, err));
    out->groups = sets.count;
    out->parity_files = sets.files;
    out->parity_bytes = sets.bytes;
    out->unreadable = sets.unreadable;
    for (size_t i = 0; i < sets.count && status == CKD_OK; i++) {
        parity_set *s = sets.items[i];
        s->redundancy_left = parity_set_redundancy(s, store);
        out->weak_groups += s->redundancy_left < (int)s->group.rows;
        out->spent_groups += s->redundancy_left <= 0;
    }
    for (size_t i = 0; i < files.count && status == CKD_OK; i++) {
        const live_file *f = &files.items[i];
        bool safe = covered(&sets, f, store);
        out->files++;
        out->file_bytes += f->file.size;
        out->covered_files += safe;
        out->covered_bytes += safe ? f->file.size : 0;
    }
    parity_sets_free(&sets);
    live_files_free(&files);
    return status;
}

ckd_status ckd_store_parity_status(ckd_parity_status **out, ckd_store *store, ckd_error *err) {
    *out = NULL;
    ckd_parity_status *result = calloc(1, sizeof(*result));
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    ckd_status status =
        result && ignored.result ? CKD_OK : err_nomem(err, sizeof(*result), "the status of parity");
    THEN(status, list_settings(result, store, err));
    THEN(status, count_all(result, store, &ignored, err));
    ckd_verify_result_free(ignored.result);
    if (status != CKD_OK) {
        ckd_parity_status_free(result);
        return status;
    }
    *out = result;
    return CKD_OK;
}

void ckd_parity_status_free(ckd_parity_status *status) {
    if (status) {
        free(status->settings);
        free(status);
    }
}
