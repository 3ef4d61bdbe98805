/*
 * Chooses the files to copy. A file is copied unchanged if the copied checkpoints read most of it. A file that
 * compaction packed, or that holds much of deleted checkpoints, is copied in parts: only the records that the copied
 * checkpoints read are copied, into new files.
 *
 * The id of a part begins with a hash of the id of the original file. So a later copy finds the parts of a file in
 * the destination by name, without opening others, and copies only records that none of them has.
 *
 * There is one exception: a copied checkpoint's own records stay together in one part, in their order, because the
 * order of tensors and the measures of a lossy checkpoint follow from it. So a record is copied at most twice: for
 * checkpoints that build on it, and later with its own checkpoint.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/transfer/internal.h"
#include "engine/store/store.h"
#include "engine/transfer/parts.h"

#define MOSTLY_READ 0.9
/* An interrupted copy keeps the parts that have arrived, so it loses less with smaller parts. */
#define PART_BYTES (UINT64_C(256) << 20)
#define MAX_VIEWS  64u /* open at once */

/* ---- files that the destination lacks ---- */

static part_source *find_source(const choosing *c, const ckd_id *id) {
    part_source key = {.file.id = *id};
    return c->count ? bsearch(&key, c->sources, c->count, sizeof(key), id_compare) : NULL;
}

/* Estimates the checkpoint's bytes in its own file, from its stored bytes. */
static uint64_t own_bytes(const manifest *m, size_t file) {
    double all = 0;
    for (size_t i = 0; i < m->own_count; i++) {
        all += (double)m->files[i].size;
    }
    double share = file < m->own_count && all > 0 ? (double)m->checkpoint.stored_bytes / all : 0;
    return (uint64_t)((share < 1 ? share : 1) * (double)m->files[file].size);
}

static ckd_status find_sources(choosing *c, ckd_error *err) {
    const transfer *t = c->t;
    size_t total = 0, kept = 0;
    for (size_t i = 0; i < t->count; i++) {
        total += transfer_moves(&t->items[i]) ? t->items[i].m.file_count : 0;
    }
    c->sources = calloc(total + 1, sizeof(*c->sources));
    if (!c->sources) {
        return err_nomem(err, total * sizeof(*c->sources), "chunk files to copy");
    }
    for (size_t i = 0; i < t->count; i++) {
        const manifest *m = &t->items[i].m;
        for (size_t k = 0; k < m->file_count && transfer_moves(&t->items[i]); k++) {
            if (!t->to || !file_exists(path_chunk(t->to->path, &m->files[k].id, "").text)) {
                c->sources[c->count++] = (part_source){.file = m->files[k], .own = own_bytes(m, k)};
            }
        }
    }
    qsort(c->sources, c->count, sizeof(*c->sources), id_compare);
    for (size_t i = 0; i < c->count; i++) {
        if (kept && id_compare(&c->sources[kept - 1], &c->sources[i]) == 0) {
            c->sources[kept - 1].own += c->sources[i].own;
        } else {
            c->sources[kept++] = c->sources[i];
        }
    }
    c->count = kept;
    return CKD_OK;
}

static ckd_status list_folders(choosing *c, ckd_error *err) {
    const transfer *t = c->t;
    if (!t->to) {
        return CKD_OK;
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = dir_list_read(&c->named, path_in(t->to->path, DIR_CHUNKS).text, err);
    if (status == CKD_OK) {
        status = dir_list_read(&c->arrived, path_in(t->to->path, DIR_INCOMING).text, &why);
        status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    for (size_t i = 0; i < c->count && status == CKD_OK; i++) {
        part_source *s = &c->sources[i];
        s->may_have_parts = transfer_may_have_parts(c, s);
        s->is_whole = !s->may_have_parts && (double)s->own >= MOSTLY_READ * (double)s->file.size;
    }
    return status;
}

/* ---- records that are read ---- */

typedef struct marking {
    choosing *c;
    const view *root;
} marking;

/* The bytes of all records and of the index. */
static uint64_t bytes_in(const chunk *c) {
    uint64_t all = c->index_stored;
    for (size_t i = 0; i < c->outer_count; i++) {
        all += c->outer[i].header_size + c->outer[i].stored_size;
    }
    return all;
}

static ckd_status mark_record(void *context, const view *v, const view_block *b, ckd_error *err) {
    const marking *k = context;
    part_source *s = find_source(k->c, &k->root->manifest.files[b->file].id);
    uint64_t hash = record_hash(b->record);
    (void)v;
    if (!s || s->is_whole || hash_set_has(&s->records, hash)) {
        return CKD_OK;
    }
    s->all = s->all ? s->all : bytes_in(b->chunk);
    s->read += view_stored_bytes(b);
    return hash_set_add(&s->records, hash, err);
}

/* Fills *out with the source's manifest, without lists that a view does not need. */
static ckd_status draft_of(manifest *out, const transfer_item *item, ckd_error *err) {
    *out = (manifest){.checkpoint = item->m.checkpoint};
    snprintf(out->checkpoint.run, sizeof(out->checkpoint.run), "%.*s", (int)strcspn(item->source, "@"),
             item->source);
    ckd_status status = manifest_add_files(out, item->m.files, item->m.file_count, err);
    out->own_count = item->m.own_count;
    if (status != CKD_OK) {
        manifest_free(out);
    }
    return status;
}

/* Marks all records of the checkpoint in its own files, and everything else that a load of it reads. */
static ckd_status mark_reads(choosing *c, view_cache *views, const transfer_item *item, ckd_error *err) {
    marking k = {.c = c};
    manifest draft;
    ckd_status status = draft_of(&draft, item, err);
    THEN(status, views_add(&k.root, views, &draft, err));
    for (size_t i = 0; status == CKD_OK && i < k.root->chunk_count; i++) {
        const chunk_records *records = k.root->parts[i];
        for (size_t r = 0; r < records->count && status == CKD_OK; r++) {
            view_block b = {.record = &records->records[r], .chunk = k.root->chunks[i], .file = (uint32_t)i};
            status = mark_record(&k, k.root, &b, err);
        }
    }
    return status == CKD_OK ? closure_visit(views, k.root, mark_record, &k, err) : status;
}

static bool names_undecided(const choosing *c, const manifest *m) {
    bool any = false;
    for (size_t i = 0; i < m->file_count && !any; i++) {
        const part_source *s = find_source(c, &m->files[i].id);
        any = s && !s->is_whole;
    }
    return any;
}

/* Decides to copy a file unchanged if enough of it is read. Later items need not look at it. */
static void decide(choosing *c) {
    for (size_t i = 0; i < c->count; i++) {
        part_source *s = &c->sources[i];
        s->is_whole =
            s->is_whole || (s->all && !s->may_have_parts && (double)s->read >= MOSTLY_READ * (double)s->all);
    }
}

static ckd_status mark_items(choosing *c, ckd_error *err) {
    transfer *t = c->t;
    view_cache views;
    ckd_status status = CKD_OK;
    views_init(&views, t->from);
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        transfer_item *item = &t->items[i];
        if (!transfer_moves(item) || !names_undecided(c, &item->m)) {
            continue;
        }
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = mark_reads(c, &views, item, &why);
        if (is_damage(status, &why) || status == CKD_E_UNSUPPORTED) {
            status = transfer_explain_damage(t, item, status, &why);
            transfer_skip(t, item, status, &why);
            status = CKD_OK;
        }
        err_from(err, status, &why);
        decide(c);
        if (views_are_many(&views, MAX_VIEWS)) {
            views_free(&views);
            views_init(&views, t->from);
        }
    }
    views_free(&views);
    return status;
}

/* ---- parts ---- */

static ckd_status count_record(void *context, const chunk *c, const record *r, ckd_error *err) {
    part_source *s = context;
    (void)c;
    return transfer_count_owner(&s->owners, &s->owner_count, r, err);
}

/* Collects records that are read, and that no part has, in new parts. */
typedef struct splitting {
    choosing *c;
    part_source *s;
    const hash_set *have;
    ckd_id last;    /* the last record's checkpoint */
    bool is_fresh;  /* that checkpoint is an item, and no existing part has all of it */
    bool has_begun; /* the last part is a new one */
} splitting;

static bool is_own(const transfer_item *item, const file_ref *file) {
    bool own = false;
    for (size_t i = 0; item && i < item->m.own_count && !own; i++) {
        own = id_equal(&item->m.files[i].id, &file->id);
    }
    return own && transfer_moves(item);
}

/* Begins a new part. This happens only between two checkpoints. */
static ckd_status begin_part(splitting *k, ckd_error *err) {
    transfer_part *added, new = {.file.rank = k->s->file.rank, .source = k->s->file};
    new.file.size = CHUNK_FILE_HEADER;
    ckd_status status = transfer_name_part(&new.file.id, &k->s->file.id, err);
    THEN(status, transfer_add_part(&added, k->c->t, &new, err));
    k->s->part_count += status == CKD_OK;
    k->has_begun = status == CKD_OK;
    return status;
}

static ckd_status take_record(void *context, const chunk *c, const record *r, ckd_error *err) {
    splitting *k = context;
    transfer *t = k->c->t;
    const ckd_id *id = &r->tensor->checkpoint;
    bool another = !id_equal(id, &k->last);
    if (another) {
        k->last = *id;
        k->is_fresh = is_own(transfer_find_item(t, id), &k->s->file) &&
                      !transfer_find_owner(k->s->owners, k->s->owner_count, id)->has_all;
    }
    uint64_t hash = record_hash(r);
    if (!hash_set_has(&k->s->records, hash) || (!k->is_fresh && hash_set_has(k->have, hash))) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    if (!k->has_begun || (another && t->parts[t->part_count - 1].file.size > PART_BYTES)) {
        status = begin_part(k, err);
    }
    if (status == CKD_OK) {
        const view_block b = {.record = r, .chunk = c};
        transfer_part *p = &t->parts[t->part_count - 1];
        p->file.size += view_stored_bytes(&b); /* an estimate until it is written */
        status = transfer_add_record(p, r, err);
        if (status == CKD_OK) {
            transfer_find_owner(p->owners, p->owner_count, id)->has_all = k->is_fresh;
        }
    }
    return status;
}

static ckd_status make_parts_of(choosing *c, part_source *s, ckd_error *err) {
    chunk *file = NULL;
    hash_set have = {.slots = NULL};
    splitting k = {.c = c, .s = s, .have = &have};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    s->first_part = c->t->part_count;
    ckd_status status = chunk_open_bundled(&file, path_chunk(c->t->from->path, &s->file.id, "").text, &why);
    if (status != CKD_OK || !file->outer_count) { /* it is empty, or damaged, which fetching it reports */
        s->is_whole = true;
        chunk_close(file);
        return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    status = chunk_each_record(file, count_record, s, err);
    if (status == CKD_OK && s->may_have_parts) {
        status = transfer_use_parts(c, s, &have, err);
    }
    bool mostly = s->all && (double)s->read >= MOSTLY_READ * (double)s->all;
    s->is_whole = mostly && !s->part_count;
    if (status == CKD_OK && !s->is_whole) {
        status = chunk_each_record(file, take_record, &k, err);
    }
    free(have.slots);
    chunk_close(file);
    return status;
}

static ckd_status make_parts(choosing *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->count && status == CKD_OK; i++) {
        status = c->sources[i].is_whole ? CKD_OK : make_parts_of(c, &c->sources[i], err);
    }
    return status;
}

/* ---- manifests that name parts ---- */

/* Adds the parts of a file. own: only the part that has all records of the checkpoint in the file. */
static ckd_status add_parts(manifest *to, const choosing *c, const part_source *s, bool own, ckd_error *err) {
    ckd_status status = CKD_OK;
    bool added = false;
    for (size_t i = 0; i < s->part_count && status == CKD_OK && !(own && added); i++) {
        const transfer_part *p = &c->t->parts[s->first_part + i];
        const transfer_owner *owner = transfer_find_owner(p->owners, p->owner_count, &to->checkpoint.id);
        if (!own || (owner && owner->has_all)) {
            status = manifest_add_files(to, &p->file, 1, err);
            added = true;
        }
    }
    return status;
}

/* Own files stay in front. Parts take the places of the files that they come from. */
static ckd_status name_files(transfer_item *item, const choosing *c, ckd_error *err) {
    manifest *m = &item->m, new = {.checkpoint = m->checkpoint};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->own_count && status == CKD_OK; i++) {
        const part_source *s = find_source(c, &m->files[i].id);
        status = s && !s->is_whole ? add_parts(&new, c, s, true, err)
                                   : manifest_add_files(&new, &m->files[i], 1, err);
    }
    new.own_count = new.file_count;
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        const part_source *s = find_source(c, &m->files[i].id);
        status = s && !s->is_whole ? add_parts(&new, c, s, false, err)
                                   : manifest_add_files(&new, &m->files[i], 1, err);
    }
    if (status != CKD_OK) {
        free(new.files);
        return status;
    }
    free(m->files);
    m->files = new.files;
    m->file_count = new.file_count;
    m->own_count = new.own_count;
    item->has_parts = true;
    return CKD_OK;
}

ckd_status transfer_choose_parts(transfer *t, ckd_error *err) {
    choosing c = {.t = t};
    ckd_status status = find_sources(&c, err);
    if (status == CKD_OK && c.count) {
        status = list_folders(&c, err);
    }
    THEN(status, mark_items(&c, err));
    THEN(status, make_parts(&c, err));
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        bool changes = transfer_moves(&t->items[i]) && names_undecided(&c, &t->items[i].m);
        status = changes ? name_files(&t->items[i], &c, err) : CKD_OK;
    }
    for (size_t i = 0; i < c.count; i++) {
        free(c.sources[i].records.slots);
        free(c.sources[i].owners);
    }
    free(c.sources);
    dir_list_free(&c.named);
    dir_list_free(&c.arrived);
    bytes_free(&c.payload);
    return status;
}

const transfer_part *transfer_find_part(const transfer *t, const ckd_id *id) {
    const transfer_part *found = NULL;
    for (size_t i = 0; i < t->part_count && !found; i++) {
        found = id_equal(&t->parts[i].file.id, id) ? &t->parts[i] : NULL;
    }
    return found;
}

void transfer_parts_free(transfer *t) {
    for (size_t i = 0; i < t->part_count; i++) {
        transfer_free_part(&t->parts[i]);
    }
    free(t->parts);
    t->parts = NULL;
    t->part_count = t->part_capacity = 0;
}
