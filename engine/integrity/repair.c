/*
 * Repair: checks everything first. Then it rebuilds chunk files from parity until no more can be rebuilt, and finally
 * parity from chunk files.
 */
#include "engine/integrity/repair.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/integrity/checkpoint_check.h"
#include "engine/store/store.h"

/* ---- the result ---- */

/* The first known problem of a file. */
static const char *problem_of(const repairing *r, const char *file) {
    const ckd_verify_result *found = r->result->left;
    for (size_t i = 0; i < found->damage_count; i++) {
        if (strcmp(found->damage[i].file, file) == 0) {
            return found->damage[i].what;
        }
    }
    return "";
}

const char *repair_inside(const repairing *r, const char *path) {
    return path[0] ? path + strlen(r->store->path) + 1 : path;
}

ckd_status repair_report(repairing *r, const char *path, const char *aside, uint64_t size, ckd_error *err) {
    ckd_repair_result *out = r->result;
    if (ARRAY_GROW(out->repaired, r->repaired_capacity, out->repaired_count + 1, "what was repaired", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    ckd_repaired *x = &out->repaired[out->repaired_count++];
    *x = (ckd_repaired){.file = strdup(repair_inside(r, path)),
                        .what = strdup(problem_of(r, repair_inside(r, path))),
                        .aside = strdup(repair_inside(r, aside)),
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
            const live_file *f = &r->files.items[i];
            r->bad[r->bad_count++] = (bad_file){.file = f->file, .f = f};
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
        file_ref file = r->bad[i].file;
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

/*
 * Whether the file is still wanted: some manifest names it or, if none did at first, the file itself is still there.
 * The run may have been renamed, so the name of a manifest does not matter. The caller holds the publish lock.
 */
static ckd_status is_wanted(bool *out, const repairing *r, const bad_file *b, ckd_error *err) {
    *out = file_exists(path_chunk(r->store->path, &b->file.id, "").text);
    return b->f ? live_file_is_named(out, r->store, b->f, err) : CKD_OK;
}

static ckd_status publish_chunk(bool *done, pathname *aside, const repairing *r, const bad_file *b,
                                const char *from, ckd_error *err) {
    file_lock *lock;
    pathname to = path_chunk(r->store->path, &b->file.id, "");
    *done = false;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    bool wanted = false;
    if (status == CKD_OK) {
        status = is_wanted(&wanted, r, b, err);
        if (wanted) {
            status = repair_publish(aside, r->store, from, DIR_CHUNKS, strrchr(to.text, '/') + 1, err);
            *done = status == CKD_OK;
        }
        lock_release(lock);
    }
    return status;
}

/* from: the intact file; not used in a dry run. */
static ckd_status replace_chunk(bool *repaired, repairing *r, bad_file *b, const char *from, ckd_error *err) {
    pathname path = path_chunk(r->store->path, &b->file.id, ""), aside = {.text = ""};
    ckd_status status = CKD_OK;
    *repaired = true;
    if (!r->options->dry_run) {
        status = publish_chunk(repaired, &aside, r, b, from, err);
        if (status == CKD_OK && !*repaired) {
            damage_append_text(&r->damage, repair_inside(r, path.text), "it was removed meanwhile");
        }
    }
    b->repaired = *repaired;
    return status == CKD_OK && *repaired ? repair_report(r, path.text, aside.text, b->file.size, err)
                                         : status;
}

static ckd_status repair_from(bool *repaired, repairing *r, bad_file *b, const parity_membership *c,
                              ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET}, local = {.offset = CKD_NO_OFFSET};
    pathname from = path_rebuilt(r->store->path, &b->file.id);
    bool write = !r->options->dry_run, possible;
    rebuild_request q = {c->set, c->member, &b->file, write, &r->limiter};
    ckd_status status = repair_rebuild(&possible, r->store, &q, &why, &local);
    if (status == CKD_E_UNSUPPORTED) { /* ISA-L is missing */
        possible = false;
        why = local;
        status = CKD_OK;
    }
    if (status != CKD_OK) {
        return err_from(err, status, &local);
    }
    if (!possible) {
        pathname path = path_chunk(r->store->path, &b->file.id, "");
        damage_append_text(&r->damage, repair_inside(r, path.text), why.message);
        return CKD_OK;
    }
    status = replace_chunk(repaired, r, b, from.text, err);
    if (write && !*repaired) {
        file_remove(from.text, true, NULL);
    }
    return status;
}

static ckd_status repair_one(bool *repaired, repairing *r, bad_file *b, ckd_error *err) {
    size_t count;
    pathname aside;
    const parity_membership *c = parity_sets_of(&r->sets, &b->file.id, &count);
    bool found;
    ckd_status status = repair_find_aside(&found, &aside, r->store, &b->file, err);
    *repaired = false;
    if (status == CKD_OK && found) {
        return replace_chunk(repaired, r, b, aside.text, err);
    }
    for (size_t i = 0; i < count && !*repaired && status == CKD_OK; i++) {
        status = repair_from(repaired, r, b, &c[i], err);
    }
    if (!count) {
        damage_append_text(&r->damage, repair_inside(r, path_chunk(r->store->path, &b->file.id, "").text),
                           "no parity covers it");
    }
    return status;
}

/* Repeats, because a rebuilt file may make it possible to rebuild another one. */
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

/* Files of checkpoints that were deleted since they were looked at are no damage. */
static ckd_status drop_unneeded(repairing *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->bad_count && status == CKD_OK; i++) {
        bool wanted = r->bad[i].repaired || !r->bad[i].f;
        status = wanted ? CKD_OK : is_wanted(&wanted, r, &r->bad[i], err);
        if (status == CKD_OK && !wanted) {
            pathname path = path_chunk(r->store->path, &r->bad[i].file.id, "");
            damage_drop_file(&r->damage, repair_inside(r, path.text));
        }
    }
    return status;
}

/* ---- parity ---- */

static bool is_bad(const repairing *r, const ckd_id *file) {
    bool bad = false;
    for (size_t i = 0; i < r->bad_count && !bad; i++) {
        bad = !r->bad[i].repaired && id_equal(&r->bad[i].file.id, file);
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

/* Moves a directory aside, because a file cannot replace it. */
static ckd_status move_directory_aside(const repairing *r, const char *path, ckd_error *err) {
    pathname aside;
    return dir_exists(path) ? damage_put_aside(&aside, r->store, DIR_PARITY, strrchr(path, '/') + 1, err)
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

/*
 * *reason: "" if the rows are made. The members were read before, perhaps hours ago. So the new rows are compared with
 * the remains of the old ones, whose hashes tell the former content of the members.
 */
static ckd_status write_rows(const char **reason, repairing *r, const bad_row *b, ckd_error *err) {
    const parity_group *g = &b->s->group;
    uint32_t first = (uint32_t)__builtin_ctz(b->rows);
    bool done = false, agree;
    *reason = "files that it covers were removed meanwhile";
    ckd_status status = parity_write(r->store, g, b->rows, &r->limiter, err);
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (status != CKD_OK) {
        return status;
    }
    status = parity_check_new_row(&agree, b->s, first, r->store, &r->limiter, err);
    if (status == CKD_OK && !agree) {
        *reason =
            "parity computed from the group's files contradicts the rest of its parity: run ckptdelta "
            "repair again; if this persists, remove the group's files in data/p and run ckptdelta parity";
    } else if (status == CKD_OK) {
        status = publish_rows(&done, r, b, err);
    }
    if (done) {
        *reason = "";
    } else {
        parity_write_undo(r->store, g, b->rows);
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
        status = write_rows(&reason, r, b, &why);
        reason = status == CKD_E_UNSUPPORTED ? why.message : reason;
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
            damage_append_text(&r->damage, repair_inside(r, p.text), reason);
        } else {
            status = repair_report(r, p.text, "", parity_file_size(g), err);
        }
    }
    return status;
}

/* Moves parity files aside whose group is unknown. They are useless. Their members get new parity instead. */
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
                status = damage_put_aside(&aside, r->store, DIR_PARITY, strrchr(p.text, '/') + 1, err);
                lock_release(lock);
            }
        }
        if (status == CKD_OK) {
            damage_append_text(&r->damage, repair_inside(r, p.text),
                               "it no longer protected any file: run ckptdelta parity");
            status = repair_report(r, p.text, aside.text, size, err);
        }
    }
    return status;
}

/* ---- generations before a compaction ---- */

static ckd_status report_dropped(repairing *r, const bool *dropped, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0, k = 0; i < r->bad_count && status == CKD_OK; i++) {
        bad_file *b = &r->bad[i];
        if (b->f && !b->repaired && dropped[k++]) {
            pathname p = path_chunk(r->store->path, &b->file.id, "");
            b->repaired = true;
            damage_append_text(&r->damage, repair_inside(r, p.text),
                               "older files hold the same values and are used again");
            status = repair_report(r, p.text, "", b->file.size, err);
        }
    }
    return status;
}

/* The catalog is in order by now. */
static ckd_status repair_older(repairing *r, ckd_error *err) {
    ckd_id *bad = calloc(r->bad_count + 1, sizeof(*bad));
    bool *dropped = calloc(r->bad_count + 1, sizeof(*dropped));
    generation_request q = {.bad = bad, .live = &r->files, .write = !r->options->dry_run};
    for (size_t i = 0; bad && i < r->bad_count; i++) {
        if (r->bad[i].f && !r->bad[i].repaired) { /* sorted, as the live files are */
            bad[q.bad_count++] = r->bad[i].file.id;
        }
    }
    ckd_status status = bad && dropped ? repair_generations(dropped, r->store, &q, err)
                                       : err_nomem(err, r->bad_count * sizeof(*bad), "damaged files");
    THEN(status, report_dropped(r, dropped, err));
    free(bad);
    free(dropped);
    return status;
}

/* ---- the catalog, which can be made from the manifests ---- */

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
    return status == CKD_OK ? repair_report(r, p.text, old.text, size, err) : status;
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

static ckd_status report_spare(void *context, const char *path, const char *aside, ckd_error *err) {
    repairing *r = context;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    uint64_t size = file_bytes(aside);
    ckd_status found = err_corrupt(&why, path, CKD_NO_OFFSET, "no checkpoint needs this chunk file");
    ckd_status status = damage_record(&r->damage, found, &why, CKD_NO_OFFSET, "", err);
    return status == CKD_OK ? repair_report(r, path, aside, size, err) : status;
}

/* Takes the publish lock, because its holders write to the same folder. */
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
    ckd_status status = repair_identity(r, err);
    THEN(status, live_files_read(&r->files, r->store, &r->damage, err));
    THEN(status, parity_sets_read(&r->sets, r->store, &r->damage, err));
    if (status == CKD_OK) { /* damaged settings cannot be rebuilt */
        status = settings_damage(&r->damage, r->store, err);
    }
    THEN(status, intents_damage(&r->damage, r->store, err));
    r->limiter.total = r->files.bytes + r->sets.bytes;
    THEN(status, look_at_files(r, err));
    if (status == CKD_OK && !r->options->dry_run) {
        status = forget_verified(r, err);
    }
    THEN(status, repair_look_at_strays(r, err));
    THEN(status, look_at_rows(r, err));
    THEN(status, repair_files(r, err));
    for (size_t i = 0; i < r->row_count && status == CKD_OK; i++) {
        status = repair_rows(r, &r->rows[i], err);
    }
    THEN(status, put_lost_aside(r, err));
    THEN(status, repair_lost(r, err));
    THEN(status, drop_unneeded(r, err));
    THEN(status, repair_cache(r, err));
    THEN(status, repair_older(r, err));
    THEN(status, look_at_checkpoints(r, err));
    if (status == CKD_OK && !r->options->dry_run && !r->result->left->damage_count) {
        status = repair_put_spare_aside(r->store, &r->sets, report_spare, r, err);
    }
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
    status = status != CKD_OK || o.dry_run ? status : store_check_repairable(store, err);
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
