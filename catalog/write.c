/* Adds, replaces, moves and removes checkpoints, and adds timings. entry.c validates entries first. */
#include <stdlib.h>
#include <string.h>

#include "base/vocabulary.h"
#include "catalog/db.h"

ckd_status need_transaction(const catalog *c, ckd_error *err) {
    ckd_status status = handle_usable(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (sqlite3_get_autocommit(c->db)) {
        return err_set(err, CKD_E_STATE, "no transaction of the catalog is under way%s",
                       c->mode == CATALOG_READ ? ": it was opened for reading" : "");
    }
    return CKD_OK;
}

/* Finds a run's key by its name; adds the run if it is missing. */
static ckd_status run_key(int64_t *key, catalog *c, const char *name, ckd_error *err) {
    query q;
    bool row = false;
    ckd_status status = query_begin(&q, c, S_RUN_KEY, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, name);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        *key = column_key(&q, 0);
        status = query_row_status(&q, err);
    }
    query_end(&q);
    if (status != CKD_OK || row) {
        return status;
    }
    status = query_begin(&q, c, S_RUN_ADD, err);
    bind_text(&q, 1, name);
    status = query_run(&q, status, err);
    *key = sqlite3_last_insert_rowid(c->db);
    return status;
}

/* ---- rows ---- */

/* An existing row. key 0: there is none. */
typedef struct old_row {
    int64_t key, run;
    uint32_t generation;
    ckd_id id;
} old_row;

static ckd_status find_step(old_row *out, catalog *c, const char *run, uint64_t step, ckd_error *err) {
    query q;
    bool row = false;
    *out = (old_row){0};
    ckd_status status = query_begin(&q, c, S_CHECKPOINT_AT, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, run);
        bind_u64(&q, 2, step);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        out->key = column_key(&q, 0);
        out->generation = column_u32(&q, 1, 0, UINT32_MAX);
        column_id(&out->id, &q, 2, false);
        out->run = column_key(&q, 3);
        status = query_row_status(&q, err);
    }
    query_end(&q);
    return status;
}

static ckd_status run_with_key(catalog *c, statement which, int64_t key, ckd_error *err) {
    query q;
    ckd_status status = query_begin(&q, c, which, err);
    bind_key(&q, 1, key);
    return query_run(&q, status, err);
}

/* Writes row *key; if *key is 0, inserts a row and sets *key. */
static ckd_status put_checkpoint(int64_t *key, catalog *c, int64_t run, const catalog_entry *entry,
                                 ckd_error *err) {
    const ckd_checkpoint *p = entry->checkpoint;
    query q;
    ckd_status status = query_begin(&q, c, *key ? S_CHECKPOINT_REPLACE : S_CHECKPOINT_ADD, err);
    if (*key) {
        bind_key(&q, 20, *key);
    }
    bind_key(&q, 1, run);
    bind_u64(&q, 2, p->step);
    bind_id(&q, 3, &p->id);
    bind_id(&q, 4, &p->parent);
    bind_id(&q, 5, &p->resumed_from);
    bind_u64(&q, 6, p->generation);
    bind_u64(&q, 7, p->kind);
    bind_u64(&q, 8, p->fidelity);
    bind_u64(&q, 9, p->lossy_resumes);
    bind_u64(&q, 10, p->depth);
    bind_u64(&q, 11, p->world);
    bind_u64(&q, 12, p->tensors);
    bind_u64(&q, 13, p->raw_bytes);
    bind_u64(&q, 14, p->stored_bytes);
    bind_u64(&q, 15, entry->manifest_bytes);
    bind_real(&q, 16, p->load_cost);
    bind_u64(&q, 17, p->created_ns);
    bind_real(&q, 18, p->metric);
    bind_text(&q, 19, p->metric_name);
    status = query_run(&q, status, err);
    if (status == CKD_OK && !*key) {
        *key = sqlite3_last_insert_rowid(c->db);
    }
    return status;
}

static ckd_status put_suspect(catalog *c, int64_t checkpoint, uint32_t reasons, ckd_error *err) {
    query q;
    ckd_status status = query_begin(&q, c, S_SUSPECT_ADD, err);
    bind_key(&q, 1, checkpoint);
    bind_u64(&q, 2, reasons);
    return query_run(&q, status, err);
}

static ckd_status put_file(catalog *c, int64_t checkpoint, size_t ordinal, const catalog_file *f,
                           ckd_error *err) {
    query q;
    ckd_status status = query_begin(&q, c, S_FILE_ADD, err);
    bind_key(&q, 1, checkpoint);
    bind_u64(&q, 2, ordinal);
    bind_text(&q, 3, f->name);
    bind_u64(&q, 4, f->rank);
    bind_u64(&q, 5, f->size);
    bind_blob16(&q, 6, f->root.bytes);
    return query_run(&q, status, err);
}

/* ---- one checkpoint ---- */

/* Finds the row to replace, which must be an older generation of the same checkpoint. old->key 0: there is none. */
static ckd_status find_old(old_row *old, catalog *c, const ckd_checkpoint *p, ckd_error *err) {
    int64_t same_id;
    ckd_status status = find_step(old, c, p->run, p->step, err);
    THEN(status, checkpoint_key(&same_id, c, &p->id, err));
    if (status != CKD_OK) {
        return status;
    }
    if (same_id != old->key) {
        return err_set(err, CKD_E_EXISTS,
                       old->key ? "the catalog has another checkpoint %s@%llu"
                                : "the catalog has the id of %s@%llu under another name",
                       p->run, (unsigned long long)p->step);
    }
    if (old->key && old->generation >= p->generation) {
        return err_set(err, CKD_E_EXISTS, "the catalog has generation %u of %s@%llu", old->generation, p->run,
                       (unsigned long long)p->step);
    }
    return CKD_OK;
}

static ckd_status add_rows(catalog *c, const catalog_entry *entry, ckd_error *err) {
    old_row old;
    int64_t run = 0, key = 0;
    ckd_status status = find_old(&old, c, entry->checkpoint, err);
    if (status == CKD_OK && old.key) { /* timings stay */
        status = run_with_key(c, S_SUSPECT_DROP, old.key, err);
        THEN(status, run_with_key(c, S_FILES_DROP, old.key, err));
    }
    THEN(status, run_key(&run, c, entry->checkpoint->run, err));
    if (status == CKD_OK) {
        key = old.key;
        status = put_checkpoint(&key, c, run, entry, err);
    }
    if (status == CKD_OK && entry->checkpoint->suspect) {
        status = put_suspect(c, key, entry->checkpoint->suspect, err);
    }
    for (size_t i = 0; status == CKD_OK && i < entry->file_count; i++) {
        status = put_file(c, key, i, &entry->files[i], err);
    }
    return status;
}

/* Ends a savepoint. After a failure the caller may continue, and must not commit half a checkpoint. */
static ckd_status end_savepoint(catalog *c, ckd_status status, ckd_error *err) {
    THEN(status, catalog_run(c, S_RELEASE, err));
    if (status != CKD_OK && !sqlite3_get_autocommit(c->db)) {
        if (catalog_run(c, S_ROLLBACK_TO, NULL) != CKD_OK || catalog_run(c, S_RELEASE, NULL) != CKD_OK) {
            catalog_rollback(c);
        }
    }
    return status;
}

ckd_status catalog_add(catalog *c, const catalog_entry *entry, ckd_error *err) {
    ckd_status status = need_transaction(c, err);
    THEN(status, entry_validate(entry, err));
    THEN(status, work_limit_set(c, err));
    if (status == CKD_OK) {
        status = catalog_run(c, S_SAVEPOINT, err);
        THEN(status, end_savepoint(c, add_rows(c, entry, err), err));
    }
    return status;
}

/* ---- another run ---- */

static ckd_status put_move(catalog *c, const old_row *old, int64_t run, const ckd_checkpoint *checkpoint,
                           uint64_t manifest_bytes, ckd_error *err) {
    query q;
    ckd_status status = query_begin(&q, c, S_CHECKPOINT_MOVE, err);
    bind_key(&q, 1, run);
    bind_u64(&q, 2, checkpoint->generation);
    bind_u64(&q, 3, checkpoint->stored_bytes);
    bind_u64(&q, 4, manifest_bytes);
    bind_key(&q, 5, old->key);
    return query_run(&q, status, err);
}

static ckd_status move_row(catalog *c, const ckd_checkpoint *checkpoint, uint64_t manifest_bytes,
                           ckd_error *err) {
    ckd_checkpoint before;
    old_row old = {0}, existing = {0};
    int64_t run = 0;
    ckd_status status = catalog_find_id(&before, c, &checkpoint->id, err);
    THEN(status, find_step(&old, c, before.run, before.step, err));
    THEN(status, find_step(&existing, c, checkpoint->run, checkpoint->step, err));
    if (status == CKD_OK && existing.key) {
        return err_set(err, CKD_E_EXISTS, "the catalog has another checkpoint %s@%llu", checkpoint->run,
                       (unsigned long long)checkpoint->step);
    }
    THEN(status, run_key(&run, c, checkpoint->run, err));
    THEN(status, put_move(c, &old, run, checkpoint, manifest_bytes, err));
    return status == CKD_OK ? run_with_key(c, S_RUN_DROP, old.run, err) : status;
}

ckd_status catalog_move(catalog *c, const ckd_checkpoint *checkpoint, uint64_t manifest_bytes,
                        ckd_error *err) {
    ckd_status status = need_transaction(c, err);
    THEN(status, work_limit_set(c, err));
    if (status == CKD_OK) {
        status = catalog_run(c, S_SAVEPOINT, err);
        THEN(status, end_savepoint(c, move_row(c, checkpoint, manifest_bytes, err), err));
    }
    return status;
}

/* ---- removing ---- */

static ckd_status remove_rows(catalog *c, const char *run, uint64_t step, ckd_error *err) {
    old_row old;
    ckd_status status = find_step(&old, c, run, step, err);
    if (status == CKD_OK && !old.key) {
        status = err_set(err, CKD_E_NOT_FOUND, "the catalog has no checkpoint %s@%llu", run,
                         (unsigned long long)step);
    }
    if (status == CKD_OK) {
        /* Foreign keys of the schema delete all rows that refer to it, too. */
        status = run_with_key(c, S_CHECKPOINT_DROP, old.key, err);
    }
    return status == CKD_OK ? run_with_key(c, S_RUN_DROP, old.run, err) : status;
}

ckd_status catalog_remove(catalog *c, const char *run, uint64_t step, ckd_error *err) {
    ckd_status status = need_transaction(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!run_name_valid(run) || !number_storable(step)) {
        return err_set(err, CKD_E_NOT_FOUND, "the catalog has no checkpoint %.*s@%llu", CKD_RUN_MAX, run,
                       (unsigned long long)step);
    }
    status = work_limit_set(c, err);
    if (status == CKD_OK) {
        status = catalog_run(c, S_SAVEPOINT, err);
        THEN(status, end_savepoint(c, remove_rows(c, run, step, err), err));
    }
    return status;
}

/* Finds the row of a checkpoint that gets timings. */
static ckd_status timed_key(int64_t *key, catalog *c, const ckd_id *id, ckd_error *err) {
    ckd_status status = checkpoint_key(key, c, id, err);
    return status == CKD_OK && !*key
               ? err_set(err, CKD_E_NOT_FOUND,
                         "the catalog does not have the checkpoint that a timing is for")
               : status;
}

ckd_status catalog_add_stage(catalog *c, const ckd_id *id, const ckd_stage_times *stage, ckd_error *err) {
    int64_t key = 0;
    query q;
    const char *name = stage_name((uint32_t)stage->stage);
    ckd_status status = need_transaction(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!name || stage->end_ns < stage->begin_ns || !number_storable(stage->end_ns) ||
        !number_storable(stage->work_ns) || !number_storable(stage->bytes)) {
        return err_set(
            err, CKD_E_INVALID,
            "a rank's timing needs a known stage that does not end before it begins, and figures below 2^63");
    }
    status = timed_key(&key, c, id, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_RANK_TIMING_PUT, err);
    bind_key(&q, 1, key);
    bind_u64(&q, 2, stage->rank);
    bind_text(&q, 3, name);
    bind_u64(&q, 4, stage->begin_ns);
    bind_u64(&q, 5, stage->end_ns);
    bind_u64(&q, 6, stage->work_ns);
    bind_u64(&q, 7, stage->bytes);
    return query_run(&q, status, err);
}

ckd_status catalog_add_timing(catalog *c, const ckd_id *id, const char *stage, uint64_t ns,
                              uint64_t byte_count, ckd_error *err) {
    int64_t key = 0;
    query q;
    ckd_status status = need_transaction(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!text_storable(stage, 1, STAGE_MAX) || !number_storable(ns) || !number_storable(byte_count)) {
        return err_set(err, CKD_E_INVALID, "a timing needs a stage of 1 to %d bytes and figures below 2^63",
                       STAGE_MAX);
    }
    status = timed_key(&key, c, id, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_TIMING_PUT, err);
    bind_key(&q, 1, key);
    bind_text(&q, 2, stage);
    bind_u64(&q, 3, ns);
    bind_u64(&q, 4, byte_count);
    return query_run(&q, status, err);
}
