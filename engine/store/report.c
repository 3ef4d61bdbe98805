/* Reports the bytes that a store takes, by run, role, fidelity, tensor and checkpoint. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/tensors.h"

/* Looks at each file only once, because there may be hundreds of thousands. */
static ckd_status file_sizes(ckd_report *r, const ckd_store *store, ckd_error *err) {
    static const char *const measured[] = {DIR_CHUNKS, DIR_MANIFESTS, DIR_MATERIALIZED, DIR_PARITY};
    uint64_t rest = 0;
    ckd_error why = {0};
    ckd_status status = dir_bytes(&r->chunk_bytes, path_in(store->path, DIR_CHUNKS).text, err);
    THEN(status, dir_bytes(&r->manifest_bytes, path_in(store->path, DIR_MANIFESTS).text, err));
    if (status == CKD_OK) {
        status = dir_bytes(&r->materialized_bytes, path_in(store->path, DIR_MATERIALIZED).text, &why);
        status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    if (status == CKD_OK) {
        status = dir_bytes(&r->parity_bytes, path_in(store->path, DIR_PARITY).text, &why);
        status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    THEN(status, dir_bytes_without(&rest, store->path, measured, 4, err));
    r->catalog_bytes = file_bytes(path_in(store->path, FILE_CATALOG).text) +
                       file_bytes(path_in(store->path, FILE_CATALOG "-journal").text);
    /* A save may have made the catalog larger meanwhile. */
    r->other_bytes = rest > r->catalog_bytes ? rest - r->catalog_bytes : 0;
    r->stored_bytes = r->chunk_bytes + r->manifest_bytes + r->materialized_bytes + r->parity_bytes +
                      r->catalog_bytes + r->other_bytes;
    return status;
}

static void free_rows(ckd_report *r) {
    ckd_checkpoint_list list = {r->checkpoint_count, r->by_checkpoint};
    catalog_list_free(&list);
    free(r->by_run);
    free(r->by_role);
    free(r->roles);
    free(r->by_fidelity);
    free(r->by_tensor);
    memset(r, 0, sizeof(*r));
}

typedef struct filling {
    ckd_report *report;
    catalog_files listed;
} filling;

static ckd_status add_fidelities(ckd_report *r, ckd_error *err) {
    r->by_fidelity = calloc(CKD_COARSE, sizeof(*r->by_fidelity));
    if (!r->by_fidelity) {
        return err_nomem(err, CKD_COARSE * sizeof(*r->by_fidelity), "a report");
    }
    for (ckd_fidelity f = CKD_EXACT; f <= CKD_COARSE; f++) {
        ckd_usage *u = &r->by_fidelity[r->fidelity_count];
        for (size_t i = 0; i < r->checkpoint_count; i++) {
            const ckd_checkpoint *c = &r->by_checkpoint[i];
            bool matches = c->fidelity == f;
            u->checkpoints += matches;
            u->raw_bytes += matches ? c->raw_bytes : 0;
            u->stored_bytes += matches ? c->stored_bytes : 0;
        }
        snprintf(u->name, sizeof(u->name), "%s", ckd_fidelity_name(f));
        r->fidelity_count += u->checkpoints > 0;
    }
    return CKD_OK;
}

/* Checks that both answers list the same runs; tensors_report relies on it. */
static ckd_status check_runs(const ckd_report *r, ckd_error *err) {
    size_t at = 0;
    bool agree = true;
    for (size_t i = 0; i < r->run_count && agree; i++) {
        uint64_t count = r->by_run[i].checkpoints;
        agree = count > 0 && count <= r->checkpoint_count - at;
        for (uint64_t k = 0; k < count && agree; k++) {
            agree = strcmp(r->by_checkpoint[at++].run, r->by_run[i].name) == 0;
        }
    }
    return agree && at == r->checkpoint_count
               ? CKD_OK
               : err_set(err, CKD_E_CORRUPT, "the entries of the catalog about its runs are inconsistent");
}

static ckd_status fill_rows(filling *f, catalog *c, ckd_error *err) {
    ckd_report *r = f->report;
    ckd_checkpoint_list list = {0};
    ckd_status status = catalog_list(&list, c, NULL, err);
    r->by_checkpoint = list.items;
    r->checkpoint_count = list.count;
    for (size_t i = 0; i < list.count; i++) {
        r->raw_bytes += list.items[i].raw_bytes;
    }
    THEN(status, catalog_usage_by_run(&r->by_run, &r->run_count, c, err));
    THEN(status, check_runs(r, err));
    THEN(status, catalog_usage_files(&f->listed, c, err));
    r->file_count = f->listed.count + list.count;
    return status == CKD_OK ? add_fidelities(r, err) : status;
}

static ckd_status query_rows(void *context, catalog *c, ckd_error *err) {
    filling *f = context;
    bool opened;
    ckd_status status = catalog_snapshot(&opened, c, err);
    if (status == CKD_OK) {
        status = fill_rows(f, c, err);
        catalog_snapshot_end(c, opened);
    }
    if (status != CKD_OK) {
        free_rows(f->report);
    }
    return status;
}

/* Sums up all checkpoints by the roles that occur. One row is left for the overhead. */
static ckd_status add_roles(ckd_report *r, ckd_error *err) {
    r->by_role = calloc(CKD_ROLE_OTHER + 1, sizeof(*r->by_role));
    if (!r->by_role) {
        return err_nomem(err, CKD_ROLE_OTHER * sizeof(*r->by_role), "a report");
    }
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        ckd_usage *u = &r->by_role[r->role_count];
        for (size_t i = 0; i < r->checkpoint_count; i++) {
            const ckd_role_bytes *b = &r->roles[i].roles[role];
            u->checkpoints += b->elements || b->stored_bytes;
            add_capped(&u->raw_bytes, b->raw_bytes);
            add_capped(&u->stored_bytes, b->stored_bytes);
        }
        snprintf(u->name, sizeof(u->name), "%s", ckd_role_name(role));
        r->role_count += u->checkpoints > 0;
    }
    return CKD_OK;
}

/* Adds headers, footers and rounded index shares, which belong to no tensor's records. */
static void add_overhead(ckd_report *r, const catalog_files *listed) {
    uint64_t accounted = 0, raw = 0;
    for (size_t i = 0; i < r->role_count; i++) {
        accounted += r->by_role[i].stored_bytes;
        raw += r->by_role[i].raw_bytes;
    }
    ckd_usage *rest = &r->by_role[r->role_count++];
    *rest = (ckd_usage){0};
    snprintf(rest->name, sizeof(rest->name), "overhead");
    rest->checkpoints = r->checkpoint_count;
    rest->raw_bytes = r->raw_bytes > raw ? r->raw_bytes - raw : 0;
    rest->stored_bytes = listed->chunk_bytes > accounted ? listed->chunk_bytes - accounted : 0;
    uint64_t all = r->chunk_bytes + r->manifest_bytes,
             listed_bytes = listed->chunk_bytes + listed->manifest_bytes;
    r->unlisted_bytes = all > listed_bytes ? all - listed_bytes : 0;
}

ckd_status ckd_store_report(ckd_report **out, ckd_store *store, ckd_error *err) {
    *out = NULL;
    ckd_report *r = calloc(1, sizeof(*r));
    if (!r) {
        return err_nomem(err, sizeof(*r), "a report");
    }
    filling f = {.report = r};
    ckd_status status = store_query(store, query_rows, &f, err);
    THEN(status, tensors_report(r, store, err));
    THEN(status, add_roles(r, err));
    THEN(status, file_sizes(r, store, err));
    if (status != CKD_OK) {
        ckd_report_free(r);
        return status;
    }
    add_overhead(r, &f.listed);
    *out = r;
    return CKD_OK;
}

void ckd_report_free(ckd_report *report) {
    if (report) {
        free_rows(report);
        free(report);
    }
}
