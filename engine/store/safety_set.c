/* Reads through the checkpoints that must survive a deletion, before anything is deleted. */
#include "engine/store/view.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/common/common.h"
#include "engine/store/damage.h"
#include "engine/store/manifests.h"

/*
 * The checkpoints whose records a load of a checkpoint reads. Determined only if needed, because that opens all of the
 * checkpoint's files.
 */
typedef struct needed_records {
    ckd_store *store;
    const manifest *of;
    bytes owners;
    bool known, unknowable; /* unknowable: cannot be determined, so any may be needed */
} needed_records;

static ckd_status find_needed(needed_records *n, ckd_error *err) {
    const view *v;
    view_cache views;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    manifest draft = {.checkpoint = n->of->checkpoint, .own_count = n->of->own_count};
    views_init(&views, n->store);
    ckd_status status = manifest_add_files(&draft, n->of->files, n->of->file_count, err);
    if (status != CKD_OK) {
        manifest_free(&draft);
        views_free(&views);
        return status;
    }
    status = views_add(&v, &views, &draft, &why);
    THEN(status, closure_owners(&n->owners, &views, v, &why));
    views_free(&views);
    n->known = true;
    n->unknowable = status != CKD_OK;
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

static ckd_status is_needed(bool *needed, needed_records *n, const ckd_id *owner, ckd_error *err) {
    bool own = id_equal(owner, &n->of->checkpoint.id);
    ckd_status status = own || n->known ? CKD_OK : find_needed(n, err);
    *needed = own || n->unknowable || id_list_has(&n->owners, owner);
    return status;
}

/*
 * Stops at damage to records that the checkpoint needs. A merged file also has records of others, and damage to these
 * must not prevent a deletion by policy.
 */
static ckd_status chunk_read_through(bool *all_whole, const chunk *c, needed_records *n, bytes *payload,
                                     ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < c->outer_count && status == CKD_OK; k++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = record_read_through(payload, c, &c->outer[k], &why);
        bool needed = true;
        *all_whole = *all_whole && found == CKD_OK;
        if (is_damage(found, &why)) {
            status = is_needed(&needed, n, &c->outer[k].tensor->checkpoint, err);
        }
        status = status == CKD_OK && needed ? err_from(err, found, &why) : status;
    }
    return status;
}

/*
 * The next checkpoint of the plan, from *at on, that must be intact before others are deleted: one of the newest of a
 * run that loses any. NULL: there is none.
 */
static const ckd_checkpoint *next_in_safety_set(const ckd_prune *plan, size_t *at) {
    for (; *at < plan->count; (*at)++) {
        const ckd_retained *r = &plan->items[*at];
        bool loses = false;
        for (size_t i = 0; i < plan->count && (r->kept & CKD_KEPT_SAFETY) && !loses; i++) {
            const ckd_retained *other = &plan->items[i];
            loses = !other->kept && strcmp(other->checkpoint.run, r->checkpoint.run) == 0;
        }
        if (loses) {
            return &plan->items[(*at)++].checkpoint;
        }
    }
    return NULL;
}

static bool is_read(const safety_reading *done, const ckd_id *id) {
    bool found = false;
    for (size_t i = 0; i < done->count && !found; i++) {
        found = id_equal(&done->checkpoints[i], id);
    }
    return found;
}

bool safety_set_is_read(const safety_reading *done, const ckd_prune *plan) {
    bool all = true;
    size_t at = 0;
    for (const ckd_checkpoint *c; all && (c = next_in_safety_set(plan, &at)) != NULL;) {
        all = is_read(done, &c->id);
    }
    return all;
}

static ckd_status record_scanned(safety_reading *done, const ckd_id *id, ckd_error *err) {
    if (ARRAY_GROW(done->checkpoints, done->capacity, done->count + 1,
                   "the checkpoints that were read through", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    done->checkpoints[done->count++] = *id;
    return CKD_OK;
}

void safety_reading_free(safety_reading *r) {
    free(r->checkpoints);
    free(r->files.ids);
}

/* Files that need not be read again. */
typedef struct verified_times {
    const ckd_store *store;
    catalog_file_state *files; /* by name */
    size_t count;
    uint64_t since_ns, now_ns;
} verified_times;

static verified_times load_verified_times(ckd_store *store, uint64_t trusted_s) {
    verified_times m = {.store = store, .now_ns = clock_wall_ns()};
    uint64_t longest = m.now_ns / UINT64_C(1000000000);
    m.since_ns = m.now_ns - (trusted_s < longest ? trusted_s : longest) * UINT64_C(1000000000);
    m.files = trusted_s ? scrub_times_load(&m.count, store) : NULL;
    return m;
}

static int by_file_name(const void *name, const void *state) {
    return strcmp(name, ((const catalog_file_state *)state)->name);
}

/*
 * Whether the file was read recently and still exists. Times in the future, after a clock was set back, do not count.
 */
static bool is_fresh(const verified_times *m, const scrubbed_files *done, const file_ref *file) {
    char name[64];
    for (size_t i = 0; i < done->count; i++) {
        if (id_equal(&done->ids[i], &file->id)) {
            return true;
        }
    }
    scrub_times_name(name, &file->id);
    const catalog_file_state *f =
        m->count ? bsearch(name, m->files, m->count, sizeof(*m->files), by_file_name) : NULL;
    return f && f->size == file->size && f->verified_ns >= m->since_ns && f->verified_ns <= m->now_ns &&
           live_file_exists(m->store, &file->id, file->size);
}

static ckd_status report_damage(const ckd_checkpoint *c, ckd_status status, ckd_error *why, ckd_error *err) {
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND) {
        char text[sizeof(why->message)];
        snprintf(
            text, sizeof(text),
            "%s@%llu, which the newest remaining checkpoints need, is damaged: %.200s; nothing was deleted",
            c->run, (unsigned long long)c->step, why->message);
        memcpy(why->message, text, sizeof(text));
        why->status = status = status == CKD_E_NOT_FOUND ? CKD_E_CORRUPT : status;
    }
    return err_from(err, status, why);
}

/* Reads files of the checkpoint that are not fresh; adds intact ones to `done`. */
static ckd_status read_files(scrubbed_files *done, ckd_store *store, const manifest *from,
                             const verified_times *m, ckd_error *err) {
    bytes payload = {0};
    needed_records needed = {.store = store, .of = from};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < from->file_count && status == CKD_OK; i++) {
        manifest single = {.files = &from->files[i], .file_count = 1};
        bool whole = true;
        chunk *c = NULL;
        if (is_fresh(m, done, &from->files[i])) {
            continue;
        }
        status = view_open_chunk(&c, store, &from->files[i], &from->checkpoint, &why);
        THEN(status, chunk_read_in_order(c, &why));
        THEN(status, chunk_read_through(&whole, c, &needed, &payload, &why));
        chunk_close(c);
        status = status == CKD_OK && whole ? scrub_times_add(done, &single, &why) : status;
    }
    bytes_free(&payload);
    bytes_free(&needed.owners);
    return report_damage(&from->checkpoint, status, &why, err);
}

/* Skips a checkpoint that no longer exists: the plan is outdated then, and will not be carried out. */
static ckd_status read_each(safety_reading *done, ckd_store *store, const ckd_prune *plan,
                            const manifest_set *n, const verified_times *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t at = 0;
    for (const ckd_checkpoint *c; status == CKD_OK && (c = next_in_safety_set(plan, &at)) != NULL;) {
        const manifest_entry *x = is_read(done, &c->id) ? NULL : manifest_set_find(n, &c->id);
        if (x) {
            status = read_files(&done->files, store, &x->m, m, err);
            THEN(status, record_scanned(done, &c->id, err));
        }
    }
    return status;
}

ckd_status read_safety_set(safety_reading *done, ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                           uint32_t timeout_ms, ckd_error *err) {
    manifest_set n = {0};
    file_lock *lock = NULL;
    ckd_status status = store_lock_reader_within(&lock, store, timeout_ms, err);
    THEN(status, manifest_set_read(&n, store, err));
    if (status == CKD_OK) {
        verified_times m = load_verified_times(store, trusted_s);
        done->files.at_ns = m.now_ns;
        status = read_each(done, store, plan, &n, &m, err);
        free(m.files);
    }
    lock_release(lock);
    manifest_set_free(&n);
    return status;
}
