/*
 * Repair: looks at everything first. Then it rebuilds chunk files from parity until no more can be rebuilt, and then
 * parity from chunk files.
 */
#include "engine/integrity/internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/integrity/checkpoint_check.h"
#include "engine/store/store.h"
#include "engine/integrity/throttled_check.h"

typedef struct bad_file {
    const live_file *f;
    bool repaired;
} bad_file;

typedef struct bad_row {
    const parity_set *s;
    uint32_t rows; /* bit set */
} bad_row;

typedef struct repairing {
    ckd_store *store;
    const ckd_repair_options *options;
    ckd_repair_result *result;
    size_t repaired_capacity;
    damage_list damage;
    live_files files;
    parity_sets sets;
    throttled_check check;
    rate_limiter limiter;
    bad_file *bad;
    size_t bad_count;
    bad_row *rows;
    size_t row_count;
} repairing;

/* ---- the result ---- */

/* The first problem that is known of a file. */
static const char *problem_of(const repairing *r, const char *file) {
    const ckd_verify_result *found = r->result->left;
    for (size_t i = 0; i < found->damage_count; i++) {
        if (strcmp(found->damage[i].file, file) == 0) {
            return found->damage[i].what;
        }
    }
    return "";
}

static const char *inside(const repairing *r, const char *path) {
    return path[0] ? path + strlen(r->store->path) + 1 : path;
}

static ckd_status report_repaired(repairing *r, const char *path, const char *aside, uint64_t size,
                                  ckd_error *err) {
    ckd_repair_result *out = r->result;
    if (ARRAY_GROW(out->repaired, r->repaired_capacity, out->repaired_count + 1, "what was repaired", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    ckd_repaired *x = &out->repaired[out->repaired_count++];
    *x = (ckd_repaired){.file = strdup(inside(r, path)),
                        .what = strdup(problem_of(r, inside(r, path))),
                        .aside = strdup(inside(r, aside)),
                        .bytes = size};
    if (!x->file || !x->what || !x->aside) {
        return err_nomem(err, strlen(path), "what was repaired");
    }
    damage_drop_file(&r->damage, x->file);
    return CKD_OK;
}

/* ---- looking for damage ---- */

static ckd_status look_at_files(repairing *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    r->bad = calloc(r->files.count + 1, sizeof(*r->bad));
    if (!r->bad) {
        return err_nomem(err, r->files.count * sizeof(*r->bad), "damaged files");
    }
    for (size_t i = 0; i < r->files.count && status == CKD_OK; i++) {
        bool right, listed;
        status = throttled_check_file(&right, &listed, &r->check, &r->files.items[i], err);
        if (status == CKD_OK && listed && !right) {
            r->bad[r->bad_count++].f = &r->files.items[i];
        }
    }
    return status;
}

/*
 * A damaged file no longer counts as verified. A failure is only a message: it must not keep the files from being
 * repaired.
 */
static ckd_status forget_verified(repairing *r, ckd_error *err) {
    scrubbed_files damaged = {.at_ns = 0};
    ckd_error why = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->bad_count && status == CKD_OK; i++) {
        file_ref file = r->bad[i].f->file;
        manifest single = {.files = &file, .file_count = 1};
        status = scrub_times_add(&damaged, &single, err);
    }
    if (status == CKD_OK &&
        scrub_record(r->store, &damaged, r->store->options.lock_timeout_ms, &why) != CKD_OK) {
        store_message(r->store, "the catalog could not record which files are damaged: %s", why.message);
    }
    free(damaged.ids);
    return status;
}

static ckd_status look_at_rows(repairing *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    r->rows = calloc(r->sets.count + 1, sizeof(*r->rows));
    if (!r->rows) {
        return err_nomem(err, r->sets.count * sizeof(*r->rows), "damaged parity");
    }
    for (size_t i = 0; i < r->sets.count && status == CKD_OK; i++) {
        const parity_set *s = r->sets.items[i];
        uint32_t damaged = 0;
        for (uint32_t row = 0; row < s->group.rows && status == CKD_OK; row++) {
            size_t before = r->result->left->damage_count;
            bool present = s->present >> row & 1;
            status = parity_check_row(s, row, r->store, &r->damage, &r->limiter, err);
            damaged |= !present || r->result->left->damage_count > before ? UINT32_C(1) << row : 0;
        }
        if (damaged) {
            r->rows[r->row_count++] = (bad_row){s, damaged};
        }
    }
    return status;
}

/* ---- chunk files ---- */

/* Publishes a rebuilt chunk file, if its manifest still exists. */
static ckd_status publish_chunk(bool *done, pathname *aside, const repairing *r, const live_file *f,
                                ckd_error *err) {
    char hex[CKD_ID_TEXT], name[64];
    file_lock *lock;
    pathname from = path_rebuilt(r->store->path, &f->file.id);
    ckd_id_text(hex, &f->file.id);
    snprintf(name, sizeof(name), "%s.ckd", hex);
    *done = false;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    if (status == CKD_OK) {
        pathname path = path_manifest(r->store->path, f->name.run, f->name.step, f->name.generation);
        if (file_exists(path.text)) {
            status = repair_publish(aside, r->store, from.text, DIR_CHUNKS, name, err);
            *done = status == CKD_OK;
        }
        lock_release(lock);
    }
    if (!*done) {
        file_remove(from.text, true, NULL);
    }
    return status;
}

static ckd_status repair_from(bool *repaired, repairing *r, bad_file *b, const parity_membership *c,
                              ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET}, local = {.offset = CKD_NO_OFFSET};
    pathname path = path_chunk(r->store->path, &b->f->file.id, ""), aside = {.text = ""};
    bool write = !r->options->dry_run, possible;
    rebuild_request q = {c->set, c->member, &b->f->file, write, &r->limiter};
    ckd_status status = repair_rebuild(&possible, r->store, &q, &why, &local);
    if (status == CKD_E_UNSUPPORTED) { /* ISA-L is missing */
        possible = false;
        why = local;
        status = CKD_OK;
    }
    if (status != CKD_OK) {
        return err_from(err, status, &local);
    }
    *repaired = possible;
    if (possible && write) {
        status = publish_chunk(repaired, &aside, r, b->f, err);
        if (status == CKD_OK && !*repaired) {
            damage_append_text(&r->damage, inside(r, path.text),
                               "its manifest was removed or replaced meanwhile; run ckptdelta repair again");
        }
    } else if (!possible) {
        damage_append_text(&r->damage, inside(r, path.text), why.message);
    }
    b->repaired = *repaired;
    return status == CKD_OK && *repaired ? report_repaired(r, path.text, aside.text, b->f->file.size, err)
                                         : status;
}

static ckd_status repair_one(bool *repaired, repairing *r, bad_file *b, ckd_error *err) {
    size_t count;
    const parity_membership *c = parity_sets_of(&r->sets, &b->f->file.id, &count);
    ckd_status status = CKD_OK;
    *repaired = false;
    for (size_t i = 0; i < count && !*repaired && status == CKD_OK; i++) {
        status = repair_from(repaired, r, b, &c[i], err);
    }
    if (!count) {
        damage_append_text(&r->damage, inside(r, path_chunk(r->store->path, &b->f->file.id, "").text),
                           "no parity covers it");
    }
    return status;
}

/* Repeats, as a rebuilt file may be what another one lacks. */
static ckd_status repair_files(repairing *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (bool repeat = true; repeat && status == CKD_OK;) {
        repeat = false;
        for (size_t i = 0; i < r->bad_count && status == CKD_OK; i++) {
            bool repaired = false;
            if (!r->bad[i].repaired) {
                status = repair_one(&repaired, r, &r->bad[i], err);
            }
            repeat = repeat || (repaired && !r->options->dry_run);
        }
    }
    return status;
}

/* ---- parity ---- */

static bool is_bad(const repairing *r, const ckd_id *file) {
    bool bad = false;
    for (size_t i = 0; i < r->bad_count && !bad; i++) {
        bad = !r->bad[i].repaired && id_equal(&r->bad[i].f->file.id, file);
    }
    return bad;
}

/*
 * Members that are live were read before. The others are read now: a collection that waits for this repair has not
 * removed them yet, or the manifest that names them is lost.
 */
static ckd_status check_member(bool *right, repairing *r, const parity_member *m, ckd_error *err) {
    const live_file *f = live_files_find(&r->files, &m->file);
    if (f) {
        *right = hash128_equal(&f->file.root, &m->root) && f->file.size == m->size && !is_bad(r, &m->file);
        return CKD_OK;
    }
    r->limiter.total += m->size;
    return parity_check_member(right, m, r->store, &r->check.payload, &r->limiter, err);
}

/* *right: all members exist and are undamaged. */
static ckd_status check_members(bool *right, repairing *r, const parity_group *g, ckd_error *err) {
    ckd_status status = CKD_OK;
    *right = true;
    for (size_t i = 0; i < g->member_count && *right && status == CKD_OK; i++) {
        status = check_member(right, r, &g->members[i], err);
    }
    return status;
}

/* A file cannot replace a directory: moves it aside. */
static ckd_status move_directory_aside(const repairing *r, const char *path, ckd_error *err) {
    pathname aside;
    return dir_exists(path) ? repair_put_aside(&aside, r->store, DIR_PARITY, strrchr(path, '/') + 1, err)
                            : CKD_OK;
}

/*
 * Publishes rebuilt rows. No member is removed under the publish lock. If one was removed before, the group was
 * removed or is about to be.
 */
static ckd_status publish_rows(bool *done, repairing *r, const bad_row *b, ckd_error *err) {
    const parity_group *g = &b->s->group;
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    if (status != CKD_OK) {
        return status;
    }
    if (parity_members_exist(g, r->store)) {
        for (uint32_t row = 0; row < g->rows && status == CKD_OK; row++) {
            pathname from = path_parity(r->store->path, &g->id, row, ".tmp");
            pathname to = path_parity(r->store->path, &g->id, row, "");
            if (b->rows >> row & 1) {
                status = move_directory_aside(r, to.text, err);
                THEN(status, file_rename(from.text, to.text, err));
            }
        }
        THEN(status, dir_sync(path_in(r->store->path, DIR_PARITY).text, err));
        *done = status == CKD_OK;
    }
    lock_release(lock);
    return status;
}

/* *done is false without an error if a member was collected meanwhile. */
static ckd_status write_rows(bool *done, repairing *r, const bad_row *b, ckd_error *err) {
    const parity_group *g = &b->s->group;
    *done = false;
    ckd_status status = parity_write(r->store, g, b->rows, &r->limiter, err);
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (status == CKD_OK) {
        status = publish_rows(done, r, b, err);
        if (!*done) {
            parity_write_undo(r->store, g, b->rows);
        }
    }
    return status;
}

static ckd_status repair_rows(repairing *r, const bad_row *b, ckd_error *err) {
    const parity_group *g = &b->s->group;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    bool right = false;
    ckd_status status = check_members(&right, r, g, &why);
    const char *reason = right ? "" : "some of the files that it covers are missing or damaged";
    if (status == CKD_OK && right && !r->options->dry_run) {
        bool done;
        status = write_rows(&done, r, b, &why);
        reason = status == CKD_E_UNSUPPORTED ? why.message
                 : done                      ? ""
                                             : "files that it covers were removed meanwhile";
    }
    if (status != CKD_OK && status != CKD_E_UNSUPPORTED) {
        return err_from(err, status, &why);
    }
    status = CKD_OK;
    for (uint32_t row = 0; row < g->rows && status == CKD_OK; row++) {
        pathname p = path_parity(r->store->path, &g->id, row, "");
        if (!(b->rows >> row & 1)) {
            continue;
        }
        if (reason[0]) {
            damage_append_text(&r->damage, inside(r, p.text), reason);
        } else {
            status = report_repaired(r, p.text, "", parity_file_size(g), err);
        }
    }
    return status;
}

/*
 * Moves parity files aside whose group is unknown. Nothing can be made of them. Their members get new parity
 * instead.
 */
static ckd_status put_lost_aside(repairing *r, ckd_error *err) {
    file_lock *lock;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->sets.lost_count && status == CKD_OK; i++) {
        const parity_lost *l = &r->sets.lost[i];
        pathname p = path_parity(r->store->path, &l->group, l->row, ""), aside = {.text = ""};
        uint64_t size = file_bytes(p.text);
        if (parity_sets_find(&r->sets, &l->group)) {
            continue; /* rebuilt with its group, or cannot be */
        }
        if (!r->options->dry_run) {
            status = store_lock_publish(&lock, r->store, err);
            if (status == CKD_OK) {
                status = repair_put_aside(&aside, r->store, DIR_PARITY, strrchr(p.text, '/') + 1, err);
                lock_release(lock);
            }
        }
        if (status == CKD_OK) {
            damage_append_text(&r->damage, inside(r, p.text),
                               "it protected no file any more: run ckptdelta parity");
            status = report_repaired(r, p.text, aside.text, size, err);
        }
    }
    return status;
}

/* ---- manifests ---- */

static ckd_status repair_vanished(bool *done, repairing *r, const vanished *v, const ckd_checkpoint *c,
                                  ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_manifest(r->store->path, c->run, c->step, c->generation);
    manifest_request q = {c, v, &r->files, !r->options->dry_run, &r->damage};
    ckd_status status = repair_manifest(done, r->store, &q, &why, err);
    if (status == CKD_OK && *done) {
        status = report_repaired(r, p.text, "", 0, err);
    } else if (status == CKD_OK) {
        damage_append_text(&r->damage, inside(r, p.text), why.message);
    }
    return status;
}

/* Repeats, as a checkpoint may be a delta on one that came back. */
static ckd_status repair_each(bool *done, repairing *r, const vanished *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (bool repeat = true; repeat && status == CKD_OK;) {
        repeat = false;
        for (size_t i = 0; i < v->count && status == CKD_OK; i++) {
            if (!done[i]) {
                status = repair_vanished(&done[i], r, v, &v->items[i], err);
                repeat = repeat || (done[i] && !r->options->dry_run);
            }
        }
    }
    return status;
}

/* Counts the checkpoint that the caller named among the vanished ones, even if that is doubtful. */
static ckd_status confirm_named(const repairing *r, vanished *v, ckd_error *err) {
    const char *run = r->options->manifest_run;
    uint64_t step = r->options->manifest_step;
    ckd_error why = {0};
    bool found = !run || vanished_confirm(v, run, step, &why);
    for (size_t i = 0; i < v->count && !found; i++) {
        found = v->items[i].step == step && strcmp(v->items[i].run, run) == 0;
    }
    if (found || why.status != CKD_OK) {
        return err_from(err, why.status, &why);
    }
    return err_set(err, CKD_E_NOT_FOUND,
                   "no catalog knows a checkpoint %.128s@%llu whose manifest is gone, or no chunk file has "
                   "records of it",
                   run, (unsigned long long)step);
}

static ckd_status repair_manifests(repairing *r, ckd_error *err) {
    vanished v = {0};
    ckd_status status = vanished_find(&v, r->store, err);
    THEN(status, confirm_named(r, &v, err));
    bool *done = status == CKD_OK ? calloc(v.count + 1, sizeof(*done)) : NULL;
    if (status == CKD_OK && !done) {
        status = err_nomem(err, v.count, "manifests that are gone");
    }
    THEN(status, vanished_add_damage(&v, r->store, &r->damage, err));
    THEN(status, repair_each(done, r, &v, err));
    free(done);
    vanished_free(&v);
    return status;
}

/* ---- the catalog, which can be made from the manifests ---- */

ckd_status catalog_condition(const ckd_store *store, ckd_error *why) {
    pathname p = path_in(store->path, FILE_CATALOG);
    catalog *c = NULL;
    ckd_status status = catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, why);
    THEN(status, catalog_check(c, why));
    catalog_close(c);
    bool journal = file_bytes(path_in(store->path, FILE_CATALOG "-journal").text) > 0;
    if (status != CKD_E_CORRUPT || journal) {
        /*
         * It is fine, missing (the next writer makes it), in use by a writer, or has the journal of one that died (the
         * next writer rolls it back). The manifests are what counts.
         */
        return CKD_OK;
    }
    return err_in_file(why, status, p.text);
}

/* Moves the catalog to catalog.db.old and makes a new one. Errors: as store_rebuild_catalog; BUSY. */
static ckd_status repair_catalog(ckd_store *store, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&store->mutex);
    status = store_rebuild_catalog(store, true, err);
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
    return status;
}

static ckd_status repair_cache(repairing *r, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status found = catalog_condition(r->store, &why);
    ckd_status status = damage_record(&r->damage, found, &why, CKD_NO_OFFSET, "", err);
    if (found == CKD_OK || status != CKD_OK) {
        return status;
    }
    pathname p = path_in(r->store->path, FILE_CATALOG), old = path_in(r->store->path, FILE_CATALOG ".old");
    uint64_t size = file_bytes(p.text);
    status = r->options->dry_run ? CKD_OK : repair_catalog(r->store, err);
    return status == CKD_OK ? report_repaired(r, p.text, old.text, size, err) : status;
}

/* ---- checkpoints ---- */

/*
 * Checks whether each checkpoint would load now, as far as indexes tell. In a dry run, damage that could be repaired
 * does not count.
 */
static ckd_status look_at_checkpoints(repairing *r, ckd_error *err) {
    ckd_status status = checkpoints_check_all(r->store, &r->damage, err);
    for (size_t i = 0; i < r->result->repaired_count && r->options->dry_run; i++) {
        damage_drop_file(&r->damage, r->result->repaired[i].file);
    }
    return status;
}

/* Under the publish lock, as its holders write to the same folder. */
static ckd_status purge(repairing *r, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    if (status == CKD_OK) {
        status = repair_purge(&r->result->purged_files, &r->result->purged_bytes, r->store, err);
        lock_release(lock);
    }
    return status;
}

/* ---- the whole repair ---- */

static ckd_status repair(repairing *r, ckd_error *err) {
    ckd_status status = live_files_read(&r->files, r->store, &r->damage, err);
    THEN(status, parity_sets_read(&r->sets, r->store, &r->damage, err));
    if (status == CKD_OK) { /* damaged settings cannot be rebuilt */
        status = settings_damage(&r->damage, r->store, err);
    }
    r->limiter.total = r->files.bytes + r->sets.bytes;
    THEN(status, look_at_files(r, err));
    if (status == CKD_OK && !r->options->dry_run) {
        status = forget_verified(r, err);
    }
    THEN(status, look_at_rows(r, err));
    THEN(status, repair_files(r, err));
    for (size_t i = 0; i < r->row_count && status == CKD_OK; i++) {
        status = repair_rows(r, &r->rows[i], err);
    }
    THEN(status, put_lost_aside(r, err));
    THEN(status, repair_manifests(r, err));
    THEN(status, repair_cache(r, err));
    THEN(status, look_at_checkpoints(r, err));
    r->result->left->checkpoints = r->files.dependency_info_count;
    if (status == CKD_OK && r->options->purge && !r->options->dry_run) {
        status = purge(r, err);
    }
    return status == CKD_OK ? damage_add_dependents(&r->damage, r->files.dependency_infos,
                                                    r->files.dependency_info_count, err)
                            : status;
}

static ckd_status run(repairing *r, ckd_error *err) {
    file_lock *lock = NULL;
    bool alone = !r->options->dry_run;
    ckd_status status = alone ? parity_lock(&lock, r->store, err) : CKD_OK;
    THEN(status, repair(r, err));
    lock_release(lock);
    bytes_free(&r->check.payload);
    parity_sets_free(&r->sets);
    live_files_free(&r->files);
    free(r->bad);
    free(r->rows);
    return status;
}

ckd_status ckd_store_repair(ckd_repair_result **out, ckd_store *store, const ckd_repair_options *options,
                            ckd_error *err) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    *out = NULL;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_repair_options", err);
    status = status != CKD_OK || o.dry_run ? status : store_check_writable(store, err);
    if (status != CKD_OK) {
        return status;
    }
    repairing r = {.store = store, .options = &o, .result = calloc(1, sizeof(*r.result))};
    if (!r.result || !(r.result->left = calloc(1, sizeof(*r.result->left)))) {
        free(r.result);
        return err_nomem(err, sizeof(*r.result), "a repair");
    }
    r.damage = (damage_list){.result = r.result->left, .store_path = store->path};
    r.check = (throttled_check){store, &r.damage, &r.files, &r.limiter, {0}, NULL};
    r.limiter = (rate_limiter){.bytes_per_s = o.bytes_per_s,
                               .on_progress = o.on_progress,
                               .context = o.progress_context,
                               .cancelled = "the repair was cancelled",
                               .begun_ns = clock_monotonic_ns()};
    status = run(&r, err);
    if (status != CKD_OK) {
        ckd_repair_result_free(r.result);
        return status;
    }
    *out = r.result;
    return CKD_OK;
}

void ckd_repair_result_free(ckd_repair_result *result) {
    if (!result) {
        return;
    }
    for (size_t i = 0; i < result->repaired_count; i++) {
        free((char *)result->repaired[i].file);
        free((char *)result->repaired[i].what);
        free((char *)result->repaired[i].aside);
    }
    free(result->repaired);
    ckd_verify_result_free(result->left);
    free(result);
}
