/*
 * Checks every stored byte of a chunk file, and names the checkpoints that damage harms. verify, scrub and repair share
 * it. It decodes no values: integrity/verify_values.c does.
 */
#include "engine/store/damage.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/store/view.h"

#define READ_AHEAD (256u << 10)        /* small records are read together */
#define RUN_BYTES  (UINT64_C(4) << 20) /* records that a thread reads through at a time */

/*
 * Names the tensors in a damaged bundle. Only decoding shows which of them are damaged. If the bundle's headers are
 * damaged, the tensors are unknown.
 */
static void name_members(chunk *c, const record *bundle, ckd_error *why) {
    const chunk_records *records;
    size_t used = strlen(why->message), count = 0;
    if (chunk_records_of(&records, c, &bundle->tensor->checkpoint, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < records->count; i++) {
        const record *r = &records->records[i];
        if (r->bundle != bundle) {
            continue;
        }
        const char *before = count++ ? ", " : "; it holds ";
        size_t length = strlen(before) + strlen(r->tensor->name);
        if (used + length + sizeof(", ...") > sizeof(why->message)) {
            snprintf(why->message + used, sizeof(why->message) - used, ", ...");
            return;
        }
        used += (size_t)snprintf(why->message + used, sizeof(why->message) - used, "%s%s", before,
                                 r->tensor->name);
    }
}

/* The checkpoint that a record belongs to; NULL: it is gone. */
static const dependency_info *owner_of(const file_check *f, const record *r) {
    for (size_t i = 0; i < f->dependency_info_count; i++) {
        if (id_equal(&f->dependency_infos[i].id, &r->tensor->checkpoint)) {
            return &f->dependency_infos[i];
        }
    }
    return NULL;
}

static bool names_file(const dependency_info *l, const ckd_id *file) {
    bool found = false;
    for (size_t i = 0; i < l->file_count && !found; i++) {
        found = id_equal(&l->files[i].id, file);
    }
    return found;
}

/* The outcome of a check: CKD_OK, or damage. */
typedef struct finding {
    ckd_status status;
    const ckd_error *why;
    uint64_t number; /* of the record in the file; CKD_NO_OFFSET: none */
} finding;

static ckd_status record_for(const file_check *f, const finding *found, const char *checkpoint,
                             ckd_error *err) {
    return damage_record(f->damage, found->status, found->why, found->number, checkpoint, err);
}

/*
 * Records damage to a file, or to something in it, for every checkpoint whose manifest names the file, as each may need
 * it.
 */
static ckd_status record_for_all(const file_check *f, const ckd_id *file, const finding *found,
                                 ckd_error *err) {
    ckd_status status = record_for(f, found, "", err);
    for (size_t i = 0; i < f->dependency_info_count && found->status != CKD_OK && status == CKD_OK; i++) {
        if (names_file(&f->dependency_infos[i], file)) {
            status = record_for(f, found, f->dependency_infos[i].name, err);
        }
    }
    return status;
}

/* Records damage for the record's checkpoint; if that is gone, for all that may need it. */
static ckd_status damage_of_record(const file_check *f, const chunk *c, const record *r, const finding *found,
                                   ckd_error *err) {
    const dependency_info *owner = owner_of(f, r);
    return owner ? record_for(f, found, owner->name, err) : record_for_all(f, &c->identity.file, found, err);
}

/* Checks measures, because decoding values does not read them. Damaged measures make no checkpoint unloadable. */
static ckd_status check_measures(const file_check *f, const chunk *c, const chunk_records *records,
                                 ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < records->count && status == CKD_OK; i++) {
        const record *r = &records->records[i];
        measures_entry *entries = NULL;
        size_t count;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (r->kind == RECORD_MEASURES) {
            ckd_status found = measures_read(&entries, &count, c, r, &why);
            why.offset = is_damage(found, &why) ? r->offset : why.offset;
            status = damage_record(f->damage, found, &why, chunk_record_number(c, r), "", err);
        }
        free(entries);
    }
    return status;
}

/*
 * Checks the contents for every checkpoint in the file. A bundle that does not unpack was reported as damage already.
 */
static ckd_status check_contents(const file_check *f, chunk *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        const record *r = &c->outer[i];
        const chunk_records *records;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (i && id_equal(&r->tensor->checkpoint, &r[-1].tensor->checkpoint)) {
            continue;
        }
        finding found = {chunk_records_of(&records, c, &r->tensor->checkpoint, &why), &why, CKD_NO_OFFSET};
        status = found.status == CKD_OK ? check_measures(f, c, records, err)
                                        : damage_of_record(f, c, r, &found, err);
    }
    return status;
}

static ckd_status check_record(const file_check *f, chunk *c, size_t number, ckd_error *err) {
    const record *r = &c->outer[number];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    finding found = {record_read_through(f->payload, c, r, &why), &why, number};
    if (is_damage(found.status, &why)) {
        why.offset = r->offset; /* one entry per record, however the damage shows */
        if (r->kind == RECORD_BUNDLE) {
            name_members(c, r, &why);
        } else {
            err_in_tensor(&why, found.status, r->tensor->name);
        }
    }
    ckd_status status = damage_of_record(f, c, r, &found, err);
    return status == CKD_OK && f->throttle ? f->throttle(f->throttle_context, r->stored_size, err) : status;
}

ckd_status open_named_file(chunk **out, const ckd_store *store, const char *path, const file_ref *file,
                           ckd_error *err) {
    ckd_status status = chunk_open_bundled(out, path, err);
    if (status != CKD_OK) {
        return err_in_file(err, status, path);
    }
    const chunk *c = *out;
    bool same = hash128_equal(&c->root, &file->root) && c->size == file->size &&
                id_equal(&c->identity.file, &file->id) && id_equal(&c->identity.store, &store->id);
    if (!same) {
        chunk_close(*out);
        *out = NULL;
        return err_corrupt(err, path, CKD_NO_OFFSET, "this is not the chunk file that its manifest names");
    }
    return CKD_OK;
}

ckd_status read_named_file_at(const ckd_store *store, const char *path, const file_ref *file,
                              ckd_error *err) {
    chunk *c = NULL;
    bytes payload = {0};
    ckd_status status = open_named_file(&c, store, path, file, err);
    THEN(status, chunk_read_in_order(c, err));
    for (size_t i = 0; status == CKD_OK && i < c->outer_count; i++) {
        status = record_read_through(&payload, c, &c->outer[i], err);
    }
    bytes_free(&payload);
    chunk_close(c);
    return status;
}

ckd_status read_named_file(const ckd_store *store, const file_ref *file, ckd_error *err) {
    return read_named_file_at(store, path_chunk(store->path, &file->id, "").text, file, err);
}

/* ---- on all threads ---- */

/* Runs of neighbouring records. Run i begins with record first[i]. */
typedef struct record_runs {
    const chunk *file;
    size_t *first, count;
    bool *intact; /* of each record: it was read and is undamaged */
} record_runs;

/*
 * Each run has a reader of its own, because a reader's buffer serves one thread. Files that fail are checked again, in
 * order.
 */
static ckd_status read_run(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    (void)err;
    const record_runs *runs = context;
    chunk mine = *runs->file;
    bytes payload = {0};
    if (file_open_read(&mine.file, file_path(runs->file->file), NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = chunk_read_in_order(&mine, NULL);
    for (size_t i = runs->first[index]; i < runs->first[index + 1] && status == CKD_OK; i++) {
        runs->intact[i] = record_read_through(&payload, &mine, &mine.outer[i], NULL) == CKD_OK;
    }
    bytes_free(&payload);
    file_close_read(mine.file);
    return CKD_OK;
}

static void cut_into_runs(record_runs *runs) {
    const chunk *c = runs->file;
    uint64_t begin = 0;
    for (size_t i = 0; i < c->outer_count; i++) {
        if (i == 0 || c->outer[i].offset - begin >= RUN_BYTES) {
            runs->first[runs->count++] = i;
            begin = c->outer[i].offset;
        }
    }
    runs->first[runs->count] = c->outer_count;
}

/* Sets intact[i] of the records that need no further check. If memory is short, sets none. */
static void read_in_parallel(bool *intact, const file_check *f, const chunk *c) {
    record_runs runs = {c, calloc(c->outer_count + 1, sizeof(*runs.first)), 0, intact};
    if (runs.first) {
        cut_into_runs(&runs);
        if (runs.count > 1) {
            (void)pool_run(f->pool, runs.count, read_run, &runs, NULL);
        }
    }
    free(runs.first);
}

ckd_status check_named_file(const file_check *f, const file_ref *file, const char *checkpoint,
                            ckd_error *err) {
    chunk *c;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_chunk(f->store->path, &file->id, "");
    ckd_status status = open_named_file(&c, f->store, f->path ? f->path : p.text, file, &why);
    if (status != CKD_OK) {
        finding found = {status, &why, CKD_NO_OFFSET};
        ckd_status noted = record_for(f, &found, checkpoint, err);
        return noted == CKD_OK ? record_for_all(f, &file->id, &found, err) : noted;
    }
    bool *intact = f->pool && pool_threads(f->pool) > 1 ? calloc(c->outer_count + 1, sizeof(*intact)) : NULL;
    if (intact) {
        read_in_parallel(intact, f, c);
    }
    status = chunk_read_in_order(c, err);
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        status = intact && intact[i] ? CKD_OK : check_record(f, c, i, err);
    }
    free(intact);
    THEN(status, check_contents(f, c, err));
    chunk_close(c);
    return status;
}
