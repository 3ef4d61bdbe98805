/*
 * Each manifest names all files that a load reads. Files of other checkpoints are named as they were at that time. If
 * such a checkpoint was rewritten since, its old files stay only because these manifests name them. So these manifests
 * get the new files instead.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/compact/internal.h"
#include "engine/compact/gather.h"

static bool is_named(const manifest *m, const file_ref *f) {
    bool found = false;
    for (size_t i = 0; i < m->file_count && !found; i++) {
        found = id_equal(&m->files[i].id, &f->id);
    }
    return found;
}

/* ---- records that a load would read in another file than before ---- */

typedef struct moving {
    compaction *c;
    const file_ref *written; /* files that were just read back */
    size_t written_count;
    hash_set before; /* the records that a load reads by the published manifest */
    bytes payload;
} moving;

static bool is_written(const moving *x, const chunk *c) {
    bool found = false;
    for (size_t i = 0; i < x->written_count && !found; i++) {
        found = id_equal(&x->written[i].id, &c->identity.file);
    }
    return found;
}

static ckd_status add_before(void *context, const view *v, const view_block *b, ckd_error *err) {
    moving *x = context;
    (void)v;
    return hash_set_add(&x->before, compact_record_hash(b->chunk, b->record), err);
}

static ckd_status read_moved(void *context, const view *v, const view_block *b, ckd_error *err) {
    moving *x = context;
    compaction *c = x->c;
    (void)v;
    /* Members of a bundle have no checksum of their own. */
    const record *r = b->record->bundle ? b->record->bundle : b->record;
    uint64_t hash = compact_record_hash(b->chunk, r);
    if (hash_set_has(&x->before, compact_record_hash(b->chunk, b->record)) ||
        hash_set_has(&c->intact, hash) || is_written(x, b->chunk)) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    if (r->kind == RECORD_BUNDLE) {
        status = record_read_through(&x->payload, b->chunk, r, err);
    } else {
        void *to = bytes_scratch(&x->payload, r->stored_size + 1, "a record", err);
        status = to ? chunk_read_payload(b->chunk, r, to, err) : CKD_E_NOMEM;
    }
    THEN(status, compact_throttle(c, r->stored_size, 0, err));
    return status == CKD_OK ? hash_set_add(&c->intact, hash, err) : status;
}

static bool same_files(const manifest *a, const manifest *b) {
    bool same = a->file_count == b->file_count;
    for (size_t i = 0; i < a->file_count && same; i++) {
        same = id_equal(&a->files[i].id, &b->files[i].id);
    }
    return same;
}

/*
 * The order of the files decides which of two equal records is read. So a record may move between two files that both
 * manifests name.
 */
ckd_status compact_read_moved(compaction *c, const view *draft, const file_ref *written, size_t count,
                              ckd_error *err) {
    moving x = {.c = c, .written = written, .written_count = count};
    const view *now;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = views_get(&now, &c->views, &draft->manifest.checkpoint.id, err);
    if (status != CKD_OK || same_files(&now->manifest, &draft->manifest)) {
        return status;
    }
    /* If something is missing, fewer records count as read by the present manifest, and more are checked. */
    ckd_status walked = closure_visit(&c->views, now, add_before, &x, &why);
    status = walked == CKD_E_NOMEM ? err_from(err, walked, &why) : CKD_OK;
    THEN(status, closure_visit(&c->views, draft, read_moved, &x, err));
    bytes_free(&x.payload);
    free(x.before.slots);
    return status;
}

/* ---- the newest files ---- */

/*
 * Adds files that the manifest does not name yet: those of the newest generations of checkpoints that it builds on.
 * own: their own files.
 */
static ckd_status add_newer(manifest *m, compaction *c, const view *now, const bytes *owners, bool own,
                            ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < owners->size && status == CKD_OK; at += sizeof(ckd_id)) {
        const view *older;
        ckd_id id;
        memcpy(&id, owners->data + at, sizeof(id));
        if (id_equal(&id, &now->manifest.checkpoint.id) || compact_is_victim(c, &id) ||
            views_get(&older, &c->views, &id, NULL) != CKD_OK) {
            continue;
        }
        const manifest *from = &older->manifest;
        size_t i = own ? 0 : from->own_count, end = own ? from->own_count : from->file_count;
        for (; i < end && status == CKD_OK; i++) {
            bool newer = !is_named(&now->manifest, &from->files[i]);
            status = newer ? manifest_add_files(m, &from->files[i], 1, err) : CKD_OK;
        }
    }
    return status;
}

/*
 * Candidates: own files, newer files of the checkpoints that it builds on, and the other files that it names now. The
 * last keep their order: a merged file may hold the old version of a record that was rewritten with a shorter chain,
 * and must not come before the file with the new version.
 */
static ckd_status newest_files(manifest *m, compaction *c, const view *now, const bytes *owners,
                               ckd_error *err) {
    *m = (manifest){.checkpoint = now->manifest.checkpoint, .own_count = now->manifest.own_count};
    ckd_status status = manifest_add_files(m, now->manifest.files, now->manifest.own_count, err);
    THEN(status, add_newer(m, c, now, owners, true, err));
    THEN(status, add_newer(m, c, now, owners, false, err));
    return status == CKD_OK ? manifest_add_files(m, now->manifest.files, now->manifest.file_count, err)
                            : status;
}

/*
 * Opens a draft that names just the files that are needed. Takes over the members of m. Errors: CORRUPT (a file is
 * missing, or another one), IO, NOMEM.
 */
static ckd_status open_draft(const view **out, compaction *c, manifest *m, ckd_error *err) {
    const view *wide;
    manifest tight = {.checkpoint = m->checkpoint, .own_count = m->own_count};
    ckd_status status = manifest_add_files(&tight, m->files, m->file_count, err);
    if (status == CKD_OK) {
        status = views_add(&wide, &c->views, m, err);
    } else {
        manifest_free(m);
    }
    THEN(status, closure_prove_files(&tight, &c->views, wide, err));
    if (status != CKD_OK) {
        manifest_free(&tight);
        return status;
    }
    return views_add(out, &c->views, &tight, err);
}

ckd_status compact_open(const view **draft, const manifest **published, compaction *c, const ckd_id *id,
                        ckd_error *err) {
    const view *now;
    ckd_status status = views_get(&now, &c->views, id, err);
    bytes owners = {0};
    manifest m = {.files = NULL};
    if (status == CKD_OK) {
        *published = &now->manifest;
        *draft = now;
        status = closure_owners(&owners, &c->views, now, err);
    }
    if (status == CKD_OK && now->manifest.file_count > now->manifest.own_count) {
        status = newest_files(&m, c, now, &owners, err);
        if (status != CKD_OK) {
            manifest_free(&m);
        }
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status opened = status == CKD_OK ? open_draft(draft, c, &m, &why) : CKD_OK;
        if (opened == CKD_OK && !c->options.estimate) {
            opened = compact_read_moved(c, *draft, NULL, 0, &why);
        }
        if (opened != CKD_OK) { /* newer files are damaged; those of the published manifest are intact */
            *draft = now;
            bool stops = opened == CKD_E_NOMEM || opened == CKD_E_CANCELLED;
            status = stops ? err_from(err, opened, &why) : CKD_OK;
        }
    }
    bytes_free(&owners);
    return status;
}

bool compact_is_stale(const rewrite_plan *p) {
    const manifest *a = &p->view->manifest, *b = p->published;
    bool same = a->file_count == b->file_count;
    for (size_t i = 0; i < a->file_count && same; i++) {
        same = is_named(b, &a->files[i]);
    }
    return !same;
}

ckd_status compact_update_manifest(uint64_t *stored, compaction *c, const rewrite_plan *p, ckd_error *err) {
    const manifest *published = p->published, *draft = &p->view->manifest;
    manifest m = *published;
    bool undecided = false;
    if (published->checkpoint.generation == UINT32_MAX) {
        return err_set(err, CKD_E_UNSUPPORTED, "its generation number is already the largest possible");
    }
    m.checkpoint.generation++;
    m.checkpoint.stored_bytes -= published->file_bytes;
    m.files = draft->files;
    m.file_count = draft->file_count;
    return compact_publish_manifest(stored, &undecided, c, &m, err);
}
