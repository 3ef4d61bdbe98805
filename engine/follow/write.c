/*
 * Makes the files of a checkpoint beside those that the folder has. A file whose header stays the same is copied, and
 * only the blocks that changed are loaded into the copy. All written bytes are read back after the sync.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/follow/follow.h"

#define SLICE_BYTES (UINT64_C(16) << 20)

/* A written part of a file, to be read back. */
typedef struct written_slice {
    uint64_t offset, size, hash;
} written_slice;

/* One new file. */
typedef struct file_job {
    follow_writing *w;
    const follow_shard *shard;
    follow_path path, present_path;
    file_writer *to;
    file_reader *old;       /* the present file, if the new one began as a copy of it; NULL: cannot be read */
    follow_present present; /* the copy's values, if the old checkpoint does not tell what changed */
    bool copied, trusted;   /* trusted: the copy has the values of w->before */
    written_slice *slices;
    size_t count, capacity;
} file_job;

/* ---- values ---- */

static ckd_status progress(follow_writing *w, uint64_t size, ckd_error *err) {
    const ckd_follow_options *o = w->options;
    w->done += size;
    return o->on_progress && o->on_progress(o->progress_context, w->done, w->layout->tensor_bytes)
               ? err_set(err, CKD_E_CANCELLED, "following was cancelled; the folder is as it was")
               : CKD_OK;
}

static ckd_status put(file_job *j, uint64_t offset, const void *data, uint64_t size, ckd_error *err) {
    ckd_status status = ARRAY_GROW(j->slices, j->capacity, j->count + 1, "what was written", err);
    THEN(status, offset == file_written(j->to) ? file_append(j->to, data, (size_t)size, err)
                                               : file_write_at(j->to, offset, data, (size_t)size, err));
    if (status == CKD_OK) {
        j->slices[j->count++] = (written_slice){offset, size, hash64(data, (size_t)size)};
    }
    return status;
}

static ckd_status put_range(file_job *j, const follow_tensor *t, follow_range range, ckd_error *err) {
    follow_writing *w = j->w;
    uint64_t element = ckd_dtype_size(t->info->dtype), max = SLICE_BYTES / element;
    ckd_status status = CKD_OK;
    for (uint64_t done = 0; done < range.count && status == CKD_OK; done += max) {
        uint64_t count = range.count - done < max ? range.count - done : max;
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = t->info->name;
        q.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = range.first + done, .count = count};
        q.data = w->buffer;
        q.size = (size_t)(count * element);
        status = ckd_load_tensor(w->load, &q, err);
        w->store_failed = status != CKD_OK;
        THEN(status, put(j, t->offset + (range.first + done) * element, w->buffer, q.size, err));
        THEN(status, progress(w, q.size, err));
        w->written += status == CKD_OK ? q.size : 0;
    }
    return status;
}

static ckd_status put_tensor(file_job *j, const follow_tensor *t, follow_ranges *ranges, ckd_error *err) {
    follow_writing *w = j->w;
    const view_tensor *now = view_find(w->load->view, t->info->name);
    const view_tensor *before = j->trusted ? view_find(w->before, t->info->name) : NULL;
    before = before && now && follow_same_form(now, before) ? before : NULL;
    if (!now) {
        return err_set(err, CKD_E_NOT_FOUND, "the checkpoint has no tensor '%s'", t->info->name);
    }
    uint64_t written = w->written;
    follow_known folder = {.now = now, .before = before, .file = j->old, .offset = t->offset};
    const known_values known = {follow_known_copy, &folder};
    j->present.offset = t->offset;
    ckd_status status = CKD_OK;
    if (j->copied) {
        load_set_known(w->load, j->old ? &known : NULL);
        status = follow_ranges_find(ranges, now, before, &j->present, err);
        for (size_t i = 0; i < ranges->count && status == CKD_OK; i++) {
            status = put_range(j, t, ranges->items[i], err);
        }
        load_set_known(w->load, NULL);
    } else {
        status = put_range(j, t, (follow_range){0, t->info->elements}, err);
    }
    THEN(status, progress(w, t->size - (w->written - written), err));
    return err_in_tensor(err, status, t->info->name);
}

/* ---- one file ---- */

/* Whether the present file begins with this header and has the right size. */
static bool same_header(file_reader *present, const follow_shard *s) {
    bytes header = {0};
    bool same = file_size(present) == s->size && bytes_extend(&header, s->header.size) &&
                file_read_at(present, 0, header.data, s->header.size, NULL) == CKD_OK &&
                memcmp(header.data, s->header.data, s->header.size) == 0;
    bytes_free(&header);
    return same;
}

/* Whether a block of the tensors in the file has changed. */
static ckd_status anything_new(bool *out, const file_job *j, ckd_error *err) {
    follow_ranges ranges = {0};
    ckd_status status = CKD_OK;
    *out = false;
    for (size_t i = 0; i < j->shard->count && status == CKD_OK && !*out; i++) {
        const char *name = j->shard->tensors[i].info->name;
        const view_tensor *now = view_find(j->w->load->view, name), *before = view_find(j->w->before, name);
        if (!now || !before || !follow_same_form(now, before)) {
            *out = true;
            break;
        }
        status = follow_ranges_find(&ranges, now, before, NULL, err);
        *out = ranges.count > 0;
    }
    free(ranges.items);
    return status;
}

/* Whether the present file still has the values of w->before: nobody else has changed it. */
static bool is_trusted(const file_job *j) {
    const follow_file *known = follow_state_find(j->w->state, j->shard->name);
    return j->w->before && known && follow_file_unchanged(known, j->present_path.text);
}

/* Opens a copy of the present file, which has the same layout. If nothing is new, j->to stays NULL. */
static ckd_status copy_present(file_job *j, ckd_error *err) {
    bool any = true;
    ckd_status status = is_trusted(j) ? anything_new(&any, j, err) : CKD_OK;
    if (status == CKD_OK && !any) {
        j->copied = j->trusted = true;
        return CKD_OK;
    }
    THEN(status, file_clone(j->present_path.text, j->path.text, err));
    THEN(status, file_continue(&j->to, j->path.text, j->shard->size, 0, err));
    if (status != CKD_OK) {
        return status;
    }
    j->copied = true;
    j->trusted = is_trusted(j); /* the file may have changed while it was copied */
    (void)file_open_read(&j->old, j->present_path.text, NULL);
    return j->trusted ? CKD_OK : file_open_read(&j->present.file, j->path.text, err);
}

static ckd_status open_new(file_job *j, ckd_error *err) {
    file_reader *present = NULL;
    bool same =
        file_open_read(&present, j->present_path.text, NULL) == CKD_OK && same_header(present, j->shard);
    file_close_read(present);
    if (same) {
        return copy_present(j, err);
    }
    ckd_status status = file_create(&j->to, j->path.text, (size_t)1 << 20, err);
    THEN(status, put(j, 0, j->shard->header.data, j->shard->header.size, err));
    return status;
}

/* Compares the file with what was written to it. */
static ckd_status read_back(const file_job *j, ckd_error *err) {
    file_reader *file = NULL;
    ckd_status status = file_open_read(&file, j->path.text, err);
    if (status == CKD_OK && file_size(file) != j->shard->size) {
        status = err_corrupt(err, j->path.text, CKD_NO_OFFSET,
                             "the size of the file is not the one that was written");
    }
    bytes room = {0};
    for (size_t i = 0; i < j->count && status == CKD_OK; i++) {
        const written_slice *p = &j->slices[i];
        void *data = bytes_scratch(&room, p->size, "a part of a file", err);
        status = data ? file_read_at(file, p->offset, data, (size_t)p->size, err) : CKD_E_NOMEM;
        if (status == CKD_OK && hash64(data, (size_t)p->size) != p->hash) {
            status = err_corrupt(err, j->path.text, p->offset,
                                 "the bytes of the file are not those that were written");
        }
    }
    bytes_free(&room);
    file_close_read(file);
    return status;
}

static ckd_status fill(file_job *j, ckd_error *err) {
    follow_ranges ranges = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < j->shard->count && status == CKD_OK; i++) {
        status = put_tensor(j, &j->shard->tensors[i], &ranges, err);
    }
    free(ranges.items);
    return status;
}

/* If nothing is new, the present file stays. */
static ckd_status finish_file(file_job *j, ckd_error *err) {
    follow_writing *w = j->w;
    const follow_shard *s = j->shard;
    if (!j->to) {
        return follow_state_keep(&w->next, follow_state_find(w->state, s->name), err);
    }
    hash128 header = hash128_of(s->header.data, s->header.size);
    ckd_status status = file_sync(j->to, err);
    ckd_status closed = file_close(j->to, status == CKD_OK ? err : NULL);
    j->to = NULL;
    status = status == CKD_OK ? closed : status;
    THEN(status, read_back(j, err));
    THEN(status, follow_state_add(&w->next, s->name, j->path.text, &header, err));
    w->files++;
    return status;
}

static ckd_status write_shard(follow_writing *w, const follow_shard *s, ckd_error *err) {
    file_job j = {.w = w,
                  .shard = s,
                  .path = follow_path_new(w->folder, s->name),
                  .present_path = follow_path_of(w->folder, s->name)};
    ckd_status status = open_new(&j, err);
    THEN(status, fill(&j, err));
    THEN(status, finish_file(&j, err));
    file_discard(j.to);
    file_close_read(j.present.file);
    file_close_read(j.old);
    bytes_free(&j.present.room);
    free(j.slices);
    return status;
}

/* ---- the index ---- */

static bool has_index(const follow_writing *w, const char *path) {
    bytes present = {0};
    const bytes *index = &w->layout->index;
    bool same = file_read_all(&present, path, index->size + 1, NULL) == CKD_OK &&
                present.size == index->size && memcmp(present.data, index->data, index->size) == 0;
    bytes_free(&present);
    return same;
}

static ckd_status write_index(follow_writing *w, ckd_error *err) {
    const bytes *index = &w->layout->index;
    hash128 hash = hash128_of(index->data, index->size);
    follow_path path = follow_path_of(w->folder, FOLLOW_INDEX);
    file_writer *to = NULL;
    if (has_index(w, path.text)) {
        return follow_state_add(&w->next, FOLLOW_INDEX, path.text, &hash, err);
    }
    path = follow_path_new(w->folder, FOLLOW_INDEX);
    ckd_status status = file_create(&to, path.text, 0, err);
    THEN(status, file_append(to, index->data, index->size, err));
    THEN(status, file_sync(to, err));
    if (status == CKD_OK) {
        status = file_close(to, err);
    } else {
        file_discard(to);
    }
    THEN(status, follow_state_add(&w->next, FOLLOW_INDEX, path.text, &hash, err));
    w->files++;
    return status;
}

/* ---- all files ---- */

ckd_status follow_write(follow_writing *w, ckd_error *err) {
    const ckd_checkpoint *c = ckd_load_checkpoint(w->load);
    w->next.checkpoint = c->id;
    memcpy(w->next.run, c->run, sizeof(w->next.run));
    w->next.step = c->step;
    w->next.created_ns = c->created_ns;
    w->next.tensor_bytes = w->layout->tensor_bytes;
    w->buffer = malloc(SLICE_BYTES);
    ckd_status status = w->buffer ? CKD_OK : err_nomem(err, SLICE_BYTES, "values to write");
    for (size_t i = 0; i < w->layout->count && status == CKD_OK; i++) {
        status = write_shard(w, &w->layout->shards[i], err);
    }
    if (status == CKD_OK && w->layout->index.size) {
        status = write_index(w, err);
    }
    free(w->buffer);
    w->buffer = NULL;
    return status;
}
