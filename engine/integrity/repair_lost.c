/*
 * Repairs checkpoints whose manifests are lost. Their chunk files may be damaged or missing, too. No manifest names
 * these files, but parity groups do: a group knows the size and the hash of each member.
 */
#include <stdio.h>
#include <stdlib.h>

#include "codec/chunk/chunk.h"
#include "engine/integrity/repair.h"
#include "engine/store/store.h"

/* ---- damaged files ---- */

static ckd_status throttle(void *context, uint64_t stored_bytes, ckd_error *err) {
    return rate_limiter_add(context, stored_bytes, err);
}

static ckd_status look_at_stray(repairing *r, const parity_member *m, ckd_error *err) {
    size_t before = r->result->left->damage_count;
    file_ref file = {.id = m->file, .size = m->size, .root = m->root};
    file_check check = {.store = r->store,
                        .damage = &r->damage,
                        .payload = &r->check.payload,
                        .throttle = throttle,
                        .throttle_context = &r->limiter};
    r->limiter.total += m->size;
    ckd_status status = check_named_file(&check, &file, "", err);
    if (status == CKD_OK && r->result->left->damage_count > before) {
        r->bad[r->bad_count++] = (bad_file){.file = file};
    }
    return status;
}

static ckd_status make_room(repairing *r, size_t more, ckd_error *err) {
    bad_file *grown = realloc(r->bad, (r->bad_count + more) * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, more * sizeof(*grown), "damaged files");
    }
    r->bad = grown;
    return CKD_OK;
}

ckd_status repair_look_at_strays(repairing *r, ckd_error *err) {
    vanished v = {0};
    ckd_status status = r->sets.count ? vanished_find(&v, r->store, err) : CKD_OK;
    if (status == CKD_OK && v.stray_count) {
        status = make_room(r, v.stray_count, err);
    }
    for (size_t i = 0; i < v.stray_count && status == CKD_OK; i++) {
        size_t count;
        const parity_membership *c = parity_sets_of(&r->sets, &v.strays[i].id, &count);
        status = count ? look_at_stray(r, &c->set->group.members[c->member], err) : CKD_OK;
    }
    vanished_free(&v);
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

/* ---- missing files ---- */

/*
 * Parity does not tell which missing files were deleted on purpose. So all are rebuilt under temporary names, and their
 * records are examined.
 */
typedef struct missing_file {
    const parity_set *set;
    size_t member;
    bool wanted;    /* has records of a lost checkpoint, or of one that it builds on */
    bool published; /* under its own name */
} missing_file;

typedef struct missing_files {
    missing_file *items;
    size_t count, capacity;
} missing_files;

static const parity_member *member_of(const missing_file *f) {
    return &f->set->group.members[f->member];
}

static bool is_missing(const repairing *r, const ckd_id *file) {
    return !live_files_find(&r->files, file) && !file_exists(path_chunk(r->store->path, file, "").text);
}

static bool is_listed(const missing_files *files, const ckd_id *file) {
    bool listed = false;
    for (size_t i = 0; i < files->count && !listed; i++) {
        listed = id_equal(&member_of(&files->items[i])->file, file);
    }
    return listed;
}

/* Without ISA-L a file cannot be rebuilt from several rows; that is no failure. */
static ckd_status rebuild(missing_files *out, repairing *r, const parity_set *s, size_t member,
                          ckd_error *err) {
    const parity_member *m = &s->group.members[member];
    file_ref expected = {.id = m->file, .size = m->size, .root = m->root};
    rebuild_request q = {s, member, &expected, true, &r->limiter};
    ckd_error why = {0}, local = {0};
    bool possible;
    if (ARRAY_GROW(out->items, out->capacity, out->count + 1, "missing files", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    ckd_status status = repair_rebuild(&possible, r->store, &q, &why, &local);
    if (possible) {
        out->items[out->count++] = (missing_file){.set = s, .member = member};
    }
    return status == CKD_E_UNSUPPORTED ? CKD_OK : err_from(err, status, &local);
}

static ckd_status rebuild_all(missing_files *out, repairing *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->sets.count; i++) {
        const parity_set *s = r->sets.items[i];
        for (size_t k = 0; k < s->group.member_count && status == CKD_OK; k++) {
            const ckd_id *file = &s->group.members[k].file;
            if (is_missing(r, file) && !is_listed(out, file)) {
                status = rebuild(out, r, s, k, err);
            }
        }
    }
    return status;
}

static bool has_id(const bytes *ids, const ckd_id *id) {
    bool found = false;
    for (size_t at = 0; at < ids->size && !found; at += sizeof(*id)) {
        found = memcmp(ids->data + at, id, sizeof(*id)) == 0;
    }
    return found;
}

static void add_dependencies(bytes *ids, chunk *c, const ckd_id *checkpoint) {
    const chunk_records *records;
    if (chunk_records_of(&records, c, checkpoint, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < records->count; i++) {
        const record *r = &records->records[i];
        for (uint32_t k = 0; k < r->dependency_count; k++) {
            const ckd_id *id = &r->dependencies[k].checkpoint;
            if (!id_is_zero(id) && !has_id(ids, id)) {
                bytes_put(ids, id, sizeof(*id));
            }
        }
    }
}

/*
 * Adds the dependencies of the records that a file has of the listed checkpoints. Returns true if it has such records.
 */
static bool follow(bytes *ids, const char *path) {
    chunk *c;
    bool found = false;
    if (chunk_open_bundled(&c, path, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < c->outer_count; i++) {
        const ckd_id *id = &c->outer[i].tensor->checkpoint;
        bool is_new = i == 0 || !id_equal(id, &c->outer[i - 1].tensor->checkpoint);
        if (is_new && has_id(ids, id)) {
            found = true;
            add_dependencies(ids, c, id);
        }
    }
    chunk_close(c);
    return found;
}

/* Repeats, because the records of each file may show that another one is needed. */
static ckd_status choose_wanted(missing_files *files, const repairing *r, const vanished *v, ckd_error *err) {
    bytes ids = {0};
    for (size_t i = 0; i < v->count; i++) {
        bytes_put(&ids, &v->items[i].id, sizeof(ckd_id));
    }
    for (size_t before = 0; before != ids.size && !ids.failed;) {
        before = ids.size;
        for (size_t i = 0; i < v->stray_count; i++) {
            follow(&ids, path_chunk(r->store->path, &v->strays[i].id, "").text);
        }
        for (size_t i = 0; i < files->count; i++) {
            missing_file *f = &files->items[i];
            f->wanted = follow(&ids, path_rebuilt(r->store->path, &member_of(f)->file).text);
        }
    }
    ckd_status status = ids.failed ? err_nomem(err, ids.size, "lost checkpoints") : CKD_OK;
    bytes_free(&ids);
    return status;
}

static ckd_status publish_wanted(bool *any, missing_files *files, const repairing *r, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < files->count && status == CKD_OK; i++) {
        missing_file *f = &files->items[i];
        pathname to = path_chunk(r->store->path, &member_of(f)->file, ""), aside;
        pathname from = path_rebuilt(r->store->path, &member_of(f)->file);
        if (f->wanted && !file_exists(to.text)) {
            status = repair_publish(&aside, r->store, from.text, DIR_CHUNKS, strrchr(to.text, '/') + 1, err);
            f->published = status == CKD_OK;
            *any = *any || f->published;
        }
    }
    lock_release(lock);
    return status;
}

/* Brings back the missing files that lost checkpoints need, from data/q and from parity. *any: there is one. */
static ckd_status bring_back(bool *any, missing_files *files, repairing *r, ckd_error *err) {
    vanished v = {0};
    ckd_status status = vanished_find(&v, r->store, err);
    (void)confirm_named(r, &v, NULL); /* it may be back by now */
    THEN(status, repair_return_aside(any, r->store, &v, err));
    THEN(status, rebuild_all(files, r, err));
    if (status == CKD_OK && files->count) {
        status = choose_wanted(files, r, &v, err);
        THEN(status, publish_wanted(any, files, r, err));
    }
    vanished_free(&v);
    return status;
}

static ckd_status report_rebuilt(repairing *r, const char *path, uint64_t size, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status found = err_corrupt(&why, path, CKD_NO_OFFSET, "a chunk file of a lost checkpoint is missing");
    ckd_status status = damage_record(&r->damage, found, &why, CKD_NO_OFFSET, "", err);
    return status == CKD_OK ? repair_report(r, path, "", size, err) : status;
}

/* The caller holds the publish lock. */
static ckd_status settle_each(const missing_files *files, repairing *r, const vanished *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < files->count && status == CKD_OK; i++) {
        const parity_member *m = member_of(&files->items[i]);
        pathname p = path_chunk(r->store->path, &m->file, "");
        if (!files->items[i].published) {
            continue;
        }
        if (v->stray_count && !v->incomplete &&
            bsearch(&m->file, v->strays, v->stray_count, sizeof(*v->strays), id_compare)) {
            status = file_remove(p.text, true, err);
            damage_drop_file(&r->damage, repair_inside(r, p.text));
        } else {
            status = report_rebuilt(r, p.text, m->size, err);
        }
    }
    return status;
}

/*
 * Removes rebuilt files that no manifest names even now. Their checkpoint did not come back, and they would be left
 * over if it is given up. Their parity stays. If a power cut brings a file back, the next repair can use it.
 */
static ckd_status settle(const missing_files *files, repairing *r, ckd_error *err) {
    vanished v = {0};
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, r->store, err);
    if (status == CKD_OK) {
        status = vanished_find(&v, r->store, err);
        THEN(status, settle_each(files, r, &v, err));
        lock_release(lock);
    }
    vanished_free(&v);
    return status;
}

/* ---- manifests ---- */

/* A dry run rebuilds no files, so it does not know which checkpoints they would bring back. */
static bool may_rebuild_more(const repairing *r) {
    bool more = false;
    for (size_t i = 0; i < r->bad_count && !more; i++) {
        more = !r->bad[i].f && r->bad[i].repaired;
    }
    for (size_t i = 0; i < r->sets.count && !more; i++) {
        const parity_group *g = &r->sets.items[i]->group;
        for (size_t k = 0; k < g->member_count && !more; k++) {
            more = is_missing(r, &g->members[k].file);
        }
    }
    return more;
}

static ckd_status repair_vanished(bool *done, repairing *r, const vanished *v, const ckd_checkpoint *c,
                                  ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_manifest(r->store->path, c->run, c->step, c->generation);
    manifest_request q = {c, v, &r->files, !r->options->dry_run, &r->damage};
    /* The repair of another checkpoint of this name may have removed its entry. */
    ckd_status status = vanished_add_lost(c, r->store, &r->damage, err);
    THEN(status, repair_manifest(done, r->store, &q, &why, err));
    if (status == CKD_OK && *done) {
        status = repair_report(r, p.text, "", 0, err);
    } else if (status == CKD_OK) {
        damage_append_text(&r->damage, repair_inside(r, p.text), why.message);
        if (r->options->dry_run && may_rebuild_more(r)) {
            damage_append_text(&r->damage, repair_inside(r, p.text),
                               "a repair rebuilds chunk files first, and may bring it back then");
        }
    }
    return status;
}

/* Repeats, because a checkpoint may be a delta on one that came back. */
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

/* Drops the results of the first attempt: its reasons no longer hold, and its messages must not be repeated. */
static void forget_first_try(repairing *r, vanished *v) {
    for (size_t i = 0; i < v->count; i++) {
        const ckd_checkpoint *c = &v->items[i];
        pathname p = path_manifest(r->store->path, c->run, c->step, c->generation);
        damage_drop_file(&r->damage, repair_inside(r, p.text));
    }
    v->doubtful_count = 0;
}

/* The newest first: among lost checkpoints of the same name, it gets the name. */
static int by_age(const void *a, const void *b) {
    const ckd_checkpoint *x = a, *y = b;
    return (x->created_ns < y->created_ns) - (x->created_ns > y->created_ns);
}

/*
 * again: this is the second attempt, with rebuilt files. The first one may have brought back the checkpoint that the
 * caller named. *left: some checkpoints are still lost.
 */
static ckd_status repair_manifests(bool *left, repairing *r, bool again, ckd_error *err) {
    vanished v = {0};
    ckd_error why = {0};
    ckd_status status = vanished_find(&v, r->store, err);
    if (status == CKD_OK) {
        ckd_status named = confirm_named(r, &v, &why);
        status = again && named == CKD_E_NOT_FOUND ? CKD_OK : err_from(err, named, &why);
    }
    if (again) {
        forget_first_try(r, &v);
    }
    bool *done = status == CKD_OK ? calloc(v.count + 1, sizeof(*done)) : NULL;
    if (status == CKD_OK && !done) {
        status = err_nomem(err, v.count, "manifests that are gone");
    }
    if (status == CKD_OK && v.count) {
        qsort(v.items, v.count, sizeof(*v.items), by_age);
    }
    if (status == CKD_OK && r->options->dry_run) {
        status = vanished_add_damage(&v, r->store, &r->damage, err);
    }
    THEN(status, repair_each(done, r, &v, err));
    *left = false;
    for (size_t i = 0; i < v.count && done; i++) {
        *left = *left || !done[i];
    }
    free(done);
    vanished_free(&v);
    return status;
}

/* Tries the manifests again with the missing files that parity can rebuild. */
static ckd_status repair_with_missing(repairing *r, ckd_error *err) {
    missing_files files = {0};
    bool left, any = false;
    ckd_status status = bring_back(&any, &files, r, err);
    if (status == CKD_OK && any) {
        status = repair_manifests(&left, r, true, err);
    }
    if (any) { /* after failures, too */
        ckd_error why = {0};
        ckd_status settled = settle(&files, r, &why);
        status = status == CKD_OK ? err_from(err, settled, &why) : status;
    }
    for (size_t i = 0; i < files.count; i++) {
        file_remove(path_rebuilt(r->store->path, &member_of(&files.items[i])->file).text, true, NULL);
    }
    free(files.items);
    return status;
}

ckd_status repair_lost(repairing *r, ckd_error *err) {
    vanished v = {0};
    bool left;
    ckd_status status = repair_manifests(&left, r, false, err);
    if (status != CKD_OK || r->options->dry_run) {
        return status;
    }
    status = left ? repair_with_missing(r, err) : CKD_OK;
    /* Some files have a manifest again, so the files that nothing names are found again. */
    THEN(status, vanished_find(&v, r->store, err));
    THEN(status, vanished_add_damage(&v, r->store, &r->damage, err));
    vanished_free(&v);
    return status;
}
