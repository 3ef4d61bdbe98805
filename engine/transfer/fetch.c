/*
 * Copies a chunk file from another store. Each record is checked as it is read, and the whole file once it is durable.
 * A file that an earlier copy left incomplete is continued.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/common/common.h"
#include "engine/store/store.h"
#include "engine/transfer/internal.h"

#define WRITE_BUFFER ((size_t)1 << 20)
#define ABANDONED_NS (UINT64_C(7) * 24 * 3600 * 1000000000)

/* ---- data/x: SOURCE is a lock file, SOURCE.FILE a file on its way; both are ids ---- */

enum { HEX = CKD_ID_TEXT - 1 };

pathname transfer_path(const transfer *t, const ckd_id *file) {
    char source[CKD_ID_TEXT], id[CKD_ID_TEXT], name[2 * CKD_ID_TEXT];
    ckd_id_text(source, &t->from->id);
    ckd_id_text(id, file);
    snprintf(name, sizeof(name), "%s.%s", source, id);
    return path_of(t->to->path, DIR_INCOMING, name);
}

static pathname lock_path(const ckd_store *store, const char *name) {
    char source[CKD_ID_TEXT];
    snprintf(source, sizeof(source), "%.*s", HEX, name);
    return path_of(store->path, DIR_INCOMING, source);
}

ckd_status transfer_lock_incoming(transfer *t, ckd_error *err) {
    char source[CKD_ID_TEXT];
    ckd_id_text(source, &t->from->id);
    ckd_status status = dir_create(path_in(t->to->path, DIR_INCOMING).text, true, err);
    THEN(status, lock_acquire(&t->incoming, lock_path(t->to, source).text, LOCK_EXCLUSIVE, true,
                              t->to->options.lock_timeout_ms, err));
    if (status == CKD_E_BUSY && err) {
        err_set(err, status, "another copy from '%s' to '%s' is under way", t->from->path, t->to->path);
    }
    return status;
}

#define UNFINISHED ".part" /* suffix of a part that is not durable yet */

static bool is_unfinished(const char *name) {
    size_t length = strlen(name);
    return length > strlen(UNFINISHED) && strcmp(name + length - strlen(UNFINISHED), UNFINISHED) == 0;
}

/*
 * Removes one source's files that are older than before_ns, and unfinished parts. Removes the source's lock file if
 * no other file remains. names: all files of the source; the caller holds its lock.
 */
static ckd_status sweep(const ckd_store *store, char *const *names, size_t count, uint64_t before_ns,
                        ckd_error *err) {
    size_t left = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        pathname p = path_of(store->path, DIR_INCOMING, names[i]);
        if (strlen(names[i]) == HEX) {
            continue;
        }
        if (file_modified_ns(p.text) < before_ns || is_unfinished(names[i])) {
            status = file_remove(p.text, true, err);
        } else {
            left++;
        }
    }
    return status == CKD_OK && !left ? file_remove(lock_path(store, names[0]).text, true, err) : status;
}

static size_t same_source(const dir_list *list, size_t first) {
    size_t end = first + 1;
    while (end < list->count && strncmp(list->names[first], list->names[end], HEX) == 0) {
        end++;
    }
    return end;
}

void transfer_unlock_incoming(transfer *t) {
    dir_list list = {0};
    char source[CKD_ID_TEXT];
    if (!t->incoming) {
        return;
    }
    ckd_id_text(source, &t->from->id);
    if (dir_list_read(&list, path_in(t->to->path, DIR_INCOMING).text, NULL) == CKD_OK) {
        for (size_t i = 0, end; i < list.count; i = end) {
            end = same_source(&list, i);
            if (strncmp(list.names[i], source, HEX) == 0) {
                sweep(t->to, &list.names[i], end - i, 0, NULL);
            }
        }
        dir_list_free(&list);
    }
    lock_release(t->incoming);
    t->incoming = NULL;
}

ckd_status transfer_recover(const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INCOMING).text, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    uint64_t now = clock_wall_ns(), before = now > ABANDONED_NS ? now - ABANDONED_NS : 0;
    for (size_t i = 0, end; i < list.count && status == CKD_OK; i = end) {
        ckd_id id;
        file_lock *lock;
        end = same_source(&list, i);
        if (strlen(list.names[i]) < HEX || !id_parse(&id, list.names[i]) ||
            lock_acquire(&lock, lock_path(store, list.names[i]).text, LOCK_EXCLUSIVE, true, 0, NULL) !=
                CKD_OK) {
            continue; /* a copy is under way */
        }
        status = sweep(store, &list.names[i], end - i, before, err);
        lock_release(lock);
    }
    dir_list_free(&list);
    return status;
}

/* ---- rate ---- */

static ckd_status report_progress(void *context, ckd_error *err) {
    const transfer *t = context;
    const ckd_copy_options *o = t->options;
    int stop = o->on_progress ? o->on_progress(o->progress_context, t->done, t->total) : 0;
    return stop ? err_set(err, CKD_E_CANCELLED,
                          "the copy was cancelled; committed checkpoints stay, and the next copy continues")
                : CKD_OK;
}

/* Called after each record: waits to keep the requested rate. */
static ckd_status limit_rate(transfer *t, uint64_t bytes_moved, ckd_error *err) {
    t->done += bytes_moved;
    t->moved += bytes_moved;
    return rate_wait(t->options->bytes_per_s, t->begun_ns, t->moved, report_progress, t, err);
}

/* ---- reading ---- */

/* Says in the message which checkpoint cannot be read, and that the source is damaged. */
ckd_status transfer_explain_damage(const transfer *t, const transfer_item *item, ckd_status status,
                                   ckd_error *err) {
    if (!err || !(status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND)) {
        return status;
    }
    char why[sizeof(err->message)];
    memcpy(why, err->message, sizeof(why));
    snprintf(err->message, sizeof(err->message), "%s in '%.100s' is damaged, and was not copied: %.200s",
             item->source, t->from->path, why);
    return err->status = status == CKD_E_NOT_FOUND ? CKD_E_CORRUPT : status;
}

static uint64_t end_of(const record *r) {
    return r->payload_offset + r->stored_size;
}

/* ---- damage in the source ---- */

/* Takes a damaged payload as it is, or zeros if it cannot be read. Its checksum still shows the damage. */
static ckd_status take_damaged(transfer *t, transfer_file *f, const chunk *c, const record *r,
                               const ckd_error *why, ckd_error *err) {
    bytes_clear(&t->payload);
    uint8_t *to = bytes_extend(&t->payload, r->stored_size + 1);
    if (!to) {
        t->payload.failed = false;
        return err_nomem(err, r->stored_size, "a payload");
    }
    if (file_read_at(c->file, r->payload_offset, to, r->stored_size, NULL) != CKD_OK) {
        memset(to, 0, r->stored_size);
    }
    return transfer_record_damage(&f->damaged, &r->tensor->checkpoint, why, err);
}

/* ---- writing ---- */

static ckd_status append_zeros(file_writer *to, uint64_t count, ckd_error *err) {
    static const uint8_t zeros[4096];
    ckd_status status = CKD_OK;
    while (count && status == CKD_OK) {
        size_t slice = count < sizeof(zeros) ? (size_t)count : sizeof(zeros);
        status = file_append(to, zeros, slice, err);
        count -= slice;
    }
    return status;
}

/* A file that is being copied. */
typedef struct file_copy {
    transfer *t;
    transfer_file *f;
    const transfer_item *item; /* the checkpoint that it is fetched for */
    const chunk *from;
    file_writer *to;
} file_copy;

/*
 * Copies a record and the gap in front of it. The header is encoded again; record_read_through has compared it with the
 * one in the file.
 */
static ckd_status copy_record(const file_copy *k, size_t number, ckd_error *err) {
    transfer *t = k->t;
    file_writer *to = k->to;
    const record *r = &k->from->outer[number];
    uint64_t begin = number ? end_of(r - 1) : CHUNK_FILE_HEADER;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = record_read_through(&t->payload, k->from, r, &why);
    if (is_damage(status, &why)) {
        status = take_damaged(t, k->f, k->from, r, &why, err);
    } else {
        err_from(err, status, &why);
    }
    if (status != CKD_OK) {
        return status;
    }
    bytes_clear(&t->header);
    record_encode(&t->header, r);
    if (t->header.failed) {
        return err_nomem(err, r->header_size, "a record header");
    }
    status = append_zeros(to, r->offset - begin, err);
    THEN(status, file_append(to, t->header.data, t->header.size, err));
    THEN(status, file_append(to, t->payload.data, r->stored_size, err));
    return status == CKD_OK ? limit_rate(t, end_of(r) - begin, err) : status;
}

/* Copies index and footer. */
static ckd_status copy_end(const file_copy *k, ckd_error *err) {
    transfer *t = k->t;
    const chunk *c = k->from;
    size_t size = (size_t)(c->size - c->index_offset);
    bytes_clear(&t->payload);
    void *data = bytes_extend(&t->payload, size);
    if (!data) {
        t->payload.failed = false;
        return err_nomem(err, size, "a chunk file's index");
    }
    ckd_status status = file_read_at(c->file, c->index_offset, data, size, err);
    if (status != CKD_OK) {
        return transfer_explain_damage(t, k->item, status, err);
    }
    status = file_append(k->to, data, size, err);
    return status == CKD_OK ? limit_rate(t, size, err) : status;
}

/* Returns how many bytes of the file of an earlier copy can be kept: none, the header with whole records, or all. */
static uint64_t arrived_before(const char *path, const chunk *c, const uint8_t header[CHUNK_FILE_HEADER]) {
    uint8_t existing[CHUNK_FILE_HEADER];
    file_reader *f;
    uint64_t size = file_bytes(path), keep = CHUNK_FILE_HEADER;
    if (size < CHUNK_FILE_HEADER || size > c->size || file_open_read(&f, path, NULL) != CKD_OK) {
        return 0;
    }
    bool same = file_read_at(f, 0, existing, sizeof(existing), NULL) == CKD_OK &&
                memcmp(existing, header, sizeof(existing)) == 0;
    file_close_read(f);
    for (size_t i = 0; i < c->outer_count && end_of(&c->outer[i]) <= size; i++) {
        keep = end_of(&c->outer[i]);
    }
    return !same ? 0 : size == c->size ? size : keep;
}

static ckd_status copy_rest(const file_copy *k, uint64_t keep, ckd_error *err) {
    const chunk *c = k->from;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        if (end_of(&c->outer[i]) > keep) {
            status = copy_record(k, i, err);
        }
    }
    if (status == CKD_OK && keep < c->size) {
        status = copy_end(k, err);
    }
    return status == CKD_OK ? file_sync(k->to, err) : status;
}

/*
 * After a cancellation, the file stays and can be continued. After any other failure it is removed: it is damaged, or
 * takes space that is missing.
 */
static ckd_status end_file(file_writer *to, ckd_status status, ckd_error *err) {
    if (status == CKD_OK) {
        return file_close(to, err);
    }
    if (status == CKD_E_CANCELLED) {
        file_close(to, NULL);
    } else {
        file_discard(to);
    }
    return status;
}

/* *resumed: an earlier copy had left a part of the file. */
static ckd_status fill(bool *resumed, file_copy *k, const char *path, ckd_error *err) {
    uint8_t header[CHUNK_FILE_HEADER];
    transfer *t = k->t;
    ckd_status status = chunk_header_in_store(header, k->from, &t->to->id, err);
    if (status != CKD_OK) {
        return transfer_explain_damage(t, k->item, status, err);
    }
    uint64_t keep = arrived_before(path, k->from, header);
    *resumed = keep > 0;
    if (!keep) {
        status = file_remove(path, true, err);
        THEN(status, file_create(&k->to, path, WRITE_BUFFER, err));
    } else {
        status = file_continue(&k->to, path, keep, WRITE_BUFFER, err);
        t->done += keep;
    }
    if (status != CKD_OK) {
        return status;
    }
    if (!keep) {
        status = file_append(k->to, header, sizeof(header), err);
        THEN(status, limit_rate(t, sizeof(header), err));
    }
    THEN(status, copy_rest(k, keep, err));
    return end_file(k->to, status, err);
}

/* Checks the file that arrived, without the records of checkpoints with damage in the source's file. */
static ckd_status check_arrived(transfer *t, const char *path, const transfer_file *f, ckd_error *err) {
    chunk *c = NULL;
    ckd_status status = open_named_file(&c, t->to, path, &f->file, err);
    THEN(status, chunk_read_in_order(c, err));
    for (size_t i = 0; status == CKD_OK && i < c->outer_count; i++) {
        if (!transfer_has_damage_of(f->damaged, &c->outer[i].tensor->checkpoint)) {
            status = record_read_through(&t->payload, c, &c->outer[i], err);
        }
    }
    chunk_close(c);
    return status;
}

/* Reads a file that the destination has already, and notes its damage. */
static ckd_status read_in_place(transfer *t, transfer_file *f, ckd_error *err) {
    chunk *c = NULL;
    transfer_damage_free(&f->damaged_in_place); /* it may be of a file that was replaced since */
    ckd_status status =
        open_named_file(&c, t->to, path_chunk(t->to->path, &f->file.id, "").text, &f->file, err);
    THEN(status, chunk_read_in_order(c, err));
    for (size_t i = 0; status == CKD_OK && i < c->outer_count; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = record_read_through(&t->payload, c, &c->outer[i], &why);
        if (is_damage(status, &why)) {
            status = transfer_record_damage(&f->damaged_in_place, &c->outer[i].tensor->checkpoint, &why, err);
        } else {
            err_from(err, status, &why);
        }
    }
    chunk_close(c);
    f->checked = status == CKD_OK;
    f->is_intact = f->checked && !f->damaged_in_place;
    return status;
}

/* CORRUPT: the destination's file, or a record in it that the item needs, is damaged. */
static ckd_status check_in_place(transfer *t, transfer_file *f, transfer_item *item, ckd_error *err) {
    const damaged_part *damaged = NULL;
    ckd_status status = f->checked ? CKD_OK : read_in_place(t, f, err);
    THEN(status, transfer_find_damaged(&damaged, t, f->damaged_in_place, item, err));
    return status == CKD_OK && damaged ? err_from(err, damaged->why.status, &damaged->why) : status;
}

/* Fetches a file. If the copy differs from the original, it is removed. */
static ckd_status fetch_once(bool *resumed, transfer *t, transfer_file *f, const transfer_item *item,
                             ckd_error *err) {
    chunk *c = NULL;
    pathname path = transfer_path(t, &f->file.id);
    *resumed = false;
    ckd_status status =
        open_named_file(&c, t->from, path_chunk(t->from->path, &f->file.id, "").text, &f->file, err);
    if (status != CKD_OK) {
        return transfer_explain_damage(t, item, status, err);
    }
    status = chunk_read_in_order(c, err);
    THEN(status, fill(resumed, &(file_copy){t, f, item, c, NULL}, path.text, err));
    chunk_close(c);
    if (status == CKD_OK) {
        status = check_arrived(t, path.text, f, err);
        if (status == CKD_E_CORRUPT) {
            file_remove(path.text, true, NULL);
        }
    }
    return status;
}

/* ---- parts ---- */

typedef struct part_copy {
    transfer *t;
    transfer_file *f;
    chunk_writer *to;
    record_copier copier;
} part_copy;

/* Copies a record if it is wanted. Damaged records are left out. */
static ckd_status copy_wanted(void *context, const chunk *c, const record *r, ckd_error *err) {
    part_copy *k = context;
    const view_block b = {.record = r, .chunk = c};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    if (!hash_set_has(&k->f->part->records, record_hash(r))) {
        return CKD_OK;
    }
    ckd_status status = record_copy(&k->copier, k->to, c, r, &why);
    if (is_damage(status, &why)) {
        return transfer_record_damage(&k->f->damaged, &r->tensor->checkpoint, &why, err);
    }
    return status == CKD_OK ? limit_rate(k->t, view_stored_bytes(&b), err) : err_from(err, status, &why);
}

static ckd_status write_part(transfer *t, transfer_file *f, const char *path, chunk *from, ckd_error *err) {
    part_copy k = {.t = t, .f = f};
    chunk_identity identity = {t->to->id, f->file.id, t->writer};
    ckd_status status = file_remove(path, true, err);
    THEN(status, chunk_writer_create(&k.to, path, &identity, err));
    if (status != CKD_OK) {
        return status;
    }
    chunk_writer_gather(k.to);
    status = chunk_each_record(from, copy_wanted, &k, err);
    bytes_free(&k.copier.payload);
    if (status != CKD_OK) {
        chunk_writer_abort(k.to);
        return status;
    }
    return chunk_writer_finish_durable(k.to, &f->file.root, &f->file.size, err);
}

/* Fetches a part. A part that arrived before was read through when it was found. */
static ckd_status fetch_part(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err) {
    chunk *c = NULL;
    pathname path = transfer_path(t, &f->file.id);
    const file_ref *source = &f->part->source;
    uint64_t end = t->done + f->part->file.size;
    ckd_status status = CKD_OK;
    if (!f->part->is_complete) {
        status = open_named_file(&c, t->from, path_chunk(t->from->path, &source->id, "").text, source, err);
        if (status != CKD_OK) {
            return transfer_explain_damage(t, item, status, err);
        }
        /* A part gets its name once it is durable, so a later copy that finds it need not sync it. */
        pathname unfinished;
        snprintf(unfinished.text, sizeof(unfinished.text), "%.*s" UNFINISHED,
                 (int)sizeof(unfinished.text) - 8, path.text);
        status = chunk_read_in_order(c, err);
        THEN(status, write_part(t, f, unfinished.text, c, err));
        chunk_close(c);
        THEN(status, file_rename(unfinished.text, path.text, err));
        THEN(status, check_arrived(t, path.text, f, err));
    }
    t->done = status == CKD_OK ? end : t->done;
    return status == CKD_OK ? limit_rate(t, 0, err) : status;
}

/* ---- one file ---- */

static ckd_status fetch_whole(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err) {
    uint64_t done = t->done;
    bool resumed;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = fetch_once(&resumed, t, f, item, &why);
    if (status == CKD_E_CORRUPT && resumed) { /* the earlier bytes may have been lost in a power cut */
        t->done = done;
        status = fetch_once(&resumed, t, f, item, &why);
    }
    return err_from(err, status, &why);
}

/* A file with damage does not replace another damaged one: each may have the last copy of some records. */
static ckd_status refuse_to_replace(transfer *t, transfer_file *f, const transfer_item *item,
                                    ckd_error *err) {
    ckd_error why = f->damaged->why;
    ckd_status status = file_remove(transfer_path(t, &f->file.id).text, true, err);
    return status == CKD_OK ? err_from(err, transfer_explain_damage(t, item, why.status, &why), &why)
                            : status;
}

static ckd_status fetch(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err) {
    if (f->in_place && f->damaged) { /* fetched before */
        return refuse_to_replace(t, f, item, err);
    }
    ckd_status status = f->part ? fetch_part(t, f, item, err) : fetch_whole(t, f, item, err);
    if (status == CKD_OK && f->in_place && f->damaged) {
        return refuse_to_replace(t, f, item, err);
    }
    f->arrived = status == CKD_OK;
    f->is_intact = f->arrived && !f->damaged;
    if (f->arrived) { /* the file in data/c, if any, is damaged */
        f->in_place = false;
        f->to_move = true;
    }
    return status;
}

ckd_status transfer_fetch_file(transfer *t, transfer_file *f, transfer_item *item, ckd_error *err) {
    const damaged_part *damaged;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = transfer_find_damaged(&damaged, t, f->damaged, item, &why);
    if (status == CKD_OK && !f->arrived && !damaged) {
        status = f->in_place ? check_in_place(t, f, item, &why) : CKD_E_NOT_FOUND;
        if (!f->in_place || is_damage(status, &why)) {
            status = fetch(t, f, item, &why);
        }
        THEN(status, transfer_find_damaged(&damaged, t, f->damaged, item, &why));
    }
    if (status == CKD_OK && damaged) {
        why = damaged->why;
        status = transfer_explain_damage(t, item, why.status, &why);
    }
    return err_from(err, status, &why);
}

ckd_status transfer_refetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err) {
    ckd_status status = fetch(t, f, item, err);
    transfer_damage_free(&f->damaged);
    return status;
}

ckd_status transfer_check_destination(transfer *t, const transfer_file *f, bool all, ckd_error *err) {
    pathname p = path_chunk(t->to->path, &f->file.id, "");
    chunk *c = NULL;
    if (all) {
        return check_arrived(t, p.text, f, err);
    }
    ckd_status status = open_named_file(&c, t->to, p.text, &f->file, err);
    chunk_close(c);
    return status;
}

ckd_status transfer_check_source(const transfer *t, const transfer_file *f, const transfer_item *item,
                                 ckd_error *err) {
    chunk *c = NULL;
    pathname p = path_chunk(t->from->path, &f->file.id, "");
    ckd_status status = open_named_file(&c, t->from, p.text, &f->file, err);
    chunk_close(c);
    return status == CKD_OK ? status : transfer_explain_damage(t, item, status, err);
}
