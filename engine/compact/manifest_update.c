/*
 * Each manifest names all files that a load reads. Files of other checkpoints are named as they were at that time.
 * If such a checkpoint was rewritten since, its old files stay only for the manifests that name them. These
 * manifests get the new files instead.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/compact/internal.h"
#include "engine/compact/gather.h"

/* ---- records in files that the manifest did not name before ---- */

typedef struct moving {
    compaction *c;
    const view *draft;
    bool *is_new; /* by file of the draft: the published manifest does not name it */
    bytes payload;
} moving;

static bool is_named(const manifest *m, const file_ref *f) {
    bool found = false;
    for (size_t i = 0; i < m->file_count && !found; i++) {
        found = id_equal(&m->files[i].id, &f->id);
    }
    return found;
}

static ckd_status read_moved(void *context, const view *v, const view_block *b, ckd_error *err) {
    moving *x = context;
    compaction *c = x->c;
    /* Blocks in new own files were read back. */
    bool own = v == x->draft && b->file < v->manifest.own_count && b->record->kind == RECORD_BLOCK;
    if (own || !x->is_new[b->file]) {
        return CKD_OK;
    }
    /* Members of a bundle have no checksum of their own. */
    const record *r = b->record->bundle ? b->record->bundle : b->record;
    uint64_t hash = compact_record_hash(b->chunk, r);
    if (hash_set_has(&c->intact, hash)) {
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

ckd_status compact_read_moved(compaction *c, const manifest *published, const view *draft, ckd_error *err) {
    const manifest *m = &draft->manifest;
    moving x = {.c = c, .draft = draft, .is_new = calloc(m->file_count + 1, sizeof(*x.is_new))};
    bool any = false;
    if (!x.is_new) {
        return err_nomem(err, m->file_count, "a manifest's files");
    }
    for (size_t i = 0; i < m->file_count; i++) {
        x.is_new[i] = !is_named(published, &m->files[i]);
        any = any || x.is_new[i];
    }
    ckd_status status = any ? closure_visit(&c->views, draft, read_moved, &x, err) : CKD_OK;
    bytes_free(&x.payload);
    free(x.is_new);
    return status;
}

/* ---- the newest files ---- */

/* Candidates: own files, files of the newest generations that it builds on, and the other files that it names now. */
static ckd_status newest_files(manifest *m, compaction *c, const view *now, const bytes *owners,
                               ckd_error *err) {
    *m = (manifest){.checkpoint = now->manifest.checkpoint, .own_count = now->manifest.own_count};
    ckd_status status = manifest_add_files(m, now->manifest.files, now->manifest.own_count, err);
    for (size_t at = 0; at < owners->size && status == CKD_OK; at += sizeof(ckd_id)) {
        const view *older;
        ckd_id id;
        memcpy(&id, owners->data + at, sizeof(id));
        if (!id_equal(&id, &now->manifest.checkpoint.id) && !compact_is_victim(c, &id) &&
            views_get(&older, &c->views, &id, NULL) == CKD_OK) {
            status = manifest_add_files(m, older->manifest.files, older->manifest.file_count, err);
        }
    }
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
    THEN(status, closure_prune_files(&tight, &c->views, wide, err));
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
            opened = compact_read_moved(c, *published, *draft, &why);
        }
        if (opened != CKD_OK) { /* newer files are damaged, those of the published manifest are not */
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
