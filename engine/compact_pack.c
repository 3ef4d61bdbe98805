/*
 * Small chunk files of old checkpoints become one: a store of small deltas is mostly files. Records are copied as they are. What is packed stays a checkpoint by itself; a file goes when the
 * last of its checkpoints has gone, and one of which less than half is wanted any more is written anew.
 */
#include <stdlib.h>

#include "engine/compact.h"

#define MOST_TIMES   4u   /* of that, in a pack */
#define LEAST_FILES  4u   /* fewer are not worth it: packs of packs would be written too often */
#define MOST_FILES   256u /* that are open at a time */
#define NEWEST_APART 4u   /* of each run: the next save builds on them, and policies may soon let them go */

/* What is wanted of a file by those who are not to go, and by what can come back from the trash. */
typedef struct file_share {
    ckd_id file;
    uint64_t size;
    double wanted;
} file_share;

typedef struct packing {
    compaction *c;
    uint64_t below;
    const need **items; /* what may be packed, by run, then step */
    size_t count;
    file_share *shares; /* by file */
    size_t share_count;
} packing;

/* ---- what there is ---- */

static int by_file(const void *a, const void *b) {
    return memcmp(&((const file_share *)a)->file, &((const file_share *)b)->file, sizeof(ckd_id));
}

/* A checkpoint's part of a file: all of it, unless others have parts of it, too, as its stored bytes tell then. */
static double part_of(const manifest *m, size_t file) {
    uint64_t all = 0;
    for (size_t i = 0; i < m->file_count; i++) {
        all += m->files[i].size;
    }
    double own = all ? (double)m->checkpoint.stored_bytes / (double)all : 0;
    return (own < 1 ? own : 1) * (double)m->files[file].size;
}

static ckd_status find_shares(packing *p, const needs *all, ckd_error *err) {
    size_t total = 0, used = 0;
    for (size_t i = 0; i < all->count; i++) {
        total += all->items[i].m.file_count;
    }
    p->shares = calloc(total + 1, sizeof(*p->shares));
    if (!p->shares) {
        return err_nomem(err, total * sizeof(*p->shares), "chunk files");
    }
    for (size_t i = 0; i < all->count; i++) {
        const need *n = &all->items[i];
        bool wanted = !n->superseded && !compact_is_unwanted(p->c, &n->m.checkpoint.id);
        for (size_t k = 0; k < n->m.file_count; k++) {
            p->shares[used++] =
                (file_share){n->m.files[k].id, n->m.files[k].size, wanted ? part_of(&n->m, k) : 0};
        }
    }
    if (used) {
        qsort(p->shares, used, sizeof(*p->shares), by_file);
    }
    for (size_t i = 0; i < used; i++) {
        if (p->share_count && by_file(&p->shares[p->share_count - 1], &p->shares[i]) == 0) {
            p->shares[p->share_count - 1].wanted += p->shares[i].wanted;
        } else {
            p->shares[p->share_count++] = p->shares[i];
        }
    }
    return CKD_OK;
}

static bool is_wasteful(const packing *p, const note_file *file) {
    file_share key = {.file = file->id};
    const file_share *s = bsearch(&key, p->shares, p->share_count, sizeof(key), by_file);
    return s && s->wanted < (double)s->size / 2;
}

static bool any_wasteful(const packing *p, const manifest *m) {
    bool any = false;
    for (size_t i = 0; i < m->file_count && !any; i++) {
        any = is_wasteful(p, &m->files[i]);
    }
    return any;
}

static bool all_small(const packing *p, const manifest *m) {
    bool small = m->file_count > 0;
    for (size_t i = 0; i < m->file_count && small; i++) {
        small = m->files[i].size < p->below;
    }
    return small;
}

static int by_place(const void *a, const void *b) {
    const ckd_checkpoint *x = &(*(const need *const *)a)->m.checkpoint,
                         *y = &(*(const need *const *)b)->m.checkpoint;
    int order = strcmp(x->run, y->run);
    return order ? order : (x->step > y->step) - (x->step < y->step);
}

/* All but the newest of each run, in files that are small or mostly waste. */
static ckd_status find_items(packing *p, const need *const *order, size_t count, ckd_error *err) {
    p->items = calloc(count + 1, sizeof(*p->items));
    if (!p->items) {
        return err_nomem(err, count * sizeof(*p->items), "checkpoints");
    }
    if (count) {
        memcpy(p->items, order, count * sizeof(*p->items));
        qsort(p->items, count, sizeof(*p->items), by_place);
    }
    for (size_t i = 0; i < count; i++) {
        const need *n = p->items[i];
        bool old = i + NEWEST_APART < count &&
                   strcmp(p->items[i + NEWEST_APART]->m.checkpoint.run, n->m.checkpoint.run) == 0;
        if (old && (all_small(p, &n->m) || any_wasteful(p, &n->m))) {
            p->items[p->count++] = n;
        }
    }
    return CKD_OK;
}

/* ---- which go together ---- */

static bool fits(const packing *p, const compact_pack *g, const need *n) {
    const need *first = g->items[0];
    return g->count < COMPACT_PACK_MOST && g->bytes + n->m.checkpoint.stored_bytes <= MOST_TIMES * p->below &&
           n->m.file_count == first->m.file_count && (g->count + 1) * n->m.file_count <= MOST_FILES &&
           strcmp(n->m.checkpoint.run, first->m.checkpoint.run) == 0;
}

/* Packs of the same run lie together, so that neighbours tell how many files there are. */
static bool is_worth_it(const packing *p, const compact_pack *g) {
    size_t files = 0;
    bool wasteful = false;
    for (size_t i = 0; i < g->count; i++) {
        const note_file *file = &g->items[i]->m.files[0];
        files += i == 0 || !id_equal(&file->id, &g->items[i - 1]->m.files[0].id);
        wasteful = wasteful || any_wasteful(p, &g->items[i]->m);
    }
    return files >= LEAST_FILES || wasteful;
}

ckd_status compact_find_packs(compact_packs *out, compaction *c, const needs *all, const need *const *order,
                              size_t count, ckd_error *err) {
    packing p = {.c = c, .below = c->options.pack_below};
    *out = (compact_packs){.items = NULL};
    if (p.below == CKD_NO_PACKS) {
        return CKD_OK;
    }
    ckd_status status = find_shares(&p, all, err);
    if (status == CKD_OK) {
        status = find_items(&p, order, count, err);
    }
    if (status == CKD_OK) {
        out->items = calloc(p.count + 1, sizeof(*out->items));
        status = out->items ? CKD_OK : err_nomem(err, p.count * sizeof(*out->items), "packs");
    }
    out->members = p.items;
    for (size_t at = 0; at < p.count && status == CKD_OK;) {
        compact_pack g = {.items = p.items + at};
        while (at < p.count && (g.count == 0 || fits(&p, &g, p.items[at]))) {
            g.bytes += p.items[at++]->m.checkpoint.stored_bytes;
            g.count++;
        }
        if (is_worth_it(&p, &g)) {
            out->items[out->count++] = g;
            out->bytes += g.bytes;
        }
    }
    free(p.shares);
    return status;
}

void compact_packs_free(compact_packs *packs) {
    free(packs->items);
    free((void *)packs->members);
    *packs = (compact_packs){.items = NULL};
}
