#include "engine/store/waste.h"

#include <stdlib.h>

uint64_t waste_own_part(const manifest *m, size_t file) {
    uint64_t all = 0, stored = m->checkpoint.stored_bytes;
    for (size_t i = 0; i < m->own_count; i++) {
        all += m->files[i].size;
    }
    stored -= stored < m->file_bytes ? stored : m->file_bytes;
    double own = all ? (double)stored / (double)all : 0;
    return (uint64_t)((own < 1 ? own : 1) * (double)m->files[file].size);
}

/* The part of one manifest in a file. */
typedef struct file_part {
    ckd_id file;
    uint64_t size, own;
    bool is_asked; /* a listed checkpoint of the run names it */
    bool in_trash; /* a deleted checkpoint that can come back names it */
} file_part;

static size_t parts_of(file_part *to, const manifest_entry *x, const char *run) {
    const manifest *m = &x->m;
    size_t count = 0;
    for (size_t i = 0; i < m->file_count && !x->chosen && (x->in_trash || !x->superseded); i++) {
        to[count++] = (file_part){.file = m->files[i].id,
                                  .size = m->files[i].size,
                                  .own = !x->in_trash && i < m->own_count ? waste_own_part(m, i) : 0,
                                  .is_asked = !x->in_trash && (!run || strcmp(m->checkpoint.run, run) == 0),
                                  .in_trash = x->in_trash};
    }
    return count;
}

static void add_file(chunk_waste *to, const file_part *f) {
    to->bytes += f->is_asked ? f->size : 0;
    to->dead += f->is_asked && !f->in_trash && f->own < f->size ? f->size - f->own : 0;
}

ckd_status waste_of(chunk_waste *out, const manifest_set *n, const char *run, ckd_error *err) {
    size_t total = 0, count = 0;
    *out = (chunk_waste){0};
    for (size_t i = 0; i < n->count; i++) {
        total += n->items[i].m.file_count;
    }
    file_part *parts = calloc(total + 1, sizeof(*parts));
    if (!parts) {
        return err_nomem(err, total * sizeof(*parts), "chunk file names");
    }
    for (size_t i = 0; i < n->count; i++) {
        count += parts_of(parts + count, &n->items[i], run);
    }
    if (count) {
        qsort(parts, count, sizeof(*parts), id_compare);
    }
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && id_compare(&parts[i], &parts[end]) == 0; end++) {
            parts[i].own += parts[end].own;
            parts[i].is_asked |= parts[end].is_asked;
            parts[i].in_trash |= parts[end].in_trash;
        }
        add_file(out, &parts[i]);
    }
    free(parts);
    return CKD_OK;
}
