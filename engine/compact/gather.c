/*
 * Chooses the chunk files to merge. Small files of old checkpoints become one: a store of small deltas consists mostly
 * of files. A policy's compaction does so only with files of deleted checkpoints. A file with too many dead bytes is
 * replaced by a new one with its live records. Records are copied unchanged, whichever checkpoint they were written
 * for. Then each manifest that names an old file gets a next generation that names the new one.
 */
#include <stdlib.h>

#include "engine/compact/internal.h"
#include "engine/store/store.h"
#include "engine/compact/gather.h"

#define TIMES_MAX    4u    /* a common file has at most this many times pack_below */
#define FILES_MAX    64u   /* files in a common file: opening it reads its whole index */
#define FILES_MIN    4u    /* of one rank; merging fewer would rewrite common files too often */
#define DEAD_MIN     4096u /* bytes */
#define NEWEST_APART 4u    /* of each run: the next save builds on them, and policies may soon delete them */

/* ---- the chunk files ---- */

static merge_source *find_source(const gathering *g, const file_ref *file) {
    merge_source key = {.file = *file};
    return g->source_count ? bsearch(&key, g->sources, g->source_count, sizeof(key), id_compare) : NULL;
}

static bool is_newest(const gathering *g, size_t i) {
    return i + NEWEST_APART >= g->count ||
           strcmp(g->order[i + NEWEST_APART]->m.checkpoint.run, g->order[i]->m.checkpoint.run) != 0;
}

/* The file of an empty checkpoint has no records. Among records of others, nothing would prove the checkpoint. */
static bool is_empty(const manifest *m) {
    return m->checkpoint.tensors == 0 && m->checkpoint.raw_bytes == 0;
}

static ckd_status find_sources(gathering *g, ckd_error *err) {
    size_t total = 0, kept = 0;
    for (size_t i = 0; i < g->count; i++) {
        total += g->order[i]->m.file_count;
    }
    g->sources = calloc(total + 1, sizeof(*g->sources));
    if (!g->sources) {
        return err_nomem(err, total * sizeof(*g->sources), "chunk files");
    }
    for (size_t i = 0; i < g->count; i++) {
        const manifest *m = &g->order[i]->m;
        for (size_t k = 0; k < m->file_count; k++) {
            bool own = k < m->own_count;
            g->sources[g->source_count++] =
                (merge_source){.file = m->files[k],
                               .first = g->order[i],
                               .live = own ? waste_owned_bytes(m, k) : 0,
                               .is_owned = own,
                               .stays = own && (is_newest(g, i) || is_empty(m)),
                               .is_asked = compact_allows_run(g->c, m->checkpoint.run)};
        }
    }
    if (g->source_count) {
        qsort(g->sources, g->source_count, sizeof(*g->sources), id_compare);
    }
    for (size_t i = 0; i < g->source_count; i++) {
        merge_source *last = kept ? &g->sources[kept - 1] : NULL, *s = &g->sources[i];
        if (last && id_compare(last, s) == 0) {
            last->live += s->live;
            last->is_owned = last->is_owned || s->is_owned;
            last->stays = last->stays || s->stays;
            last->is_asked = last->is_asked || s->is_asked;
        } else {
            g->sources[kept++] = *s;
        }
    }
    g->source_count = kept;
    for (size_t i = 0; i < g->c->all->count; i++) { /* the trash frees its files without a merge */
        const manifest_entry *n = &g->c->all->items[i];
        for (size_t k = 0; n->in_trash && k < n->m.own_count; k++) {
            merge_source *s = find_source(g, &n->m.files[k]);
            if (s) {
                s->is_owned = true;
            }
        }
    }
    return CKD_OK;
}

/* ---- live bytes ---- */

typedef struct counting {
    gathering *g;
    const view *root;
    hash_set *met;
} counting;

static ckd_status count_record(void *context, const view *v, const view_block *b, ckd_error *err) {
    counting *k = context;
    merge_source *s = find_source(k->g, &k->root->manifest.files[b->file]);
    uint64_t hash = compact_record_hash(b->chunk, b->record);
    if (!s || !s->is_wasteful || (v == k->root && b->file < k->root->manifest.own_count) ||
        hash_set_has(k->met, hash)) {
        return CKD_OK;
    }
    s->live += view_stored_bytes(b);
    return hash_set_add(k->met, hash, err);
}

/* If no file is above the limit, neither is their total. File systems have no blocks smaller than DEAD_MIN. */
static bool is_wasteful(const gathering *g, const merge_source *s) {
    uint64_t dead = s->live < s->file.size ? s->file.size - s->live : 0;
    return s->is_asked && dead >= DEAD_MIN &&
           (double)dead > (double)s->file.size * g->c->limits.dead_percent / 100;
}

/* Own files alone may make a file seem wasteful. For these, records that others read are counted, too. */
static ckd_status find_wasteful(gathering *g, ckd_error *err) {
    hash_set met = {.slots = NULL};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < g->source_count; i++) {
        g->sources[i].is_wasteful = is_wasteful(g, &g->sources[i]);
    }
    for (size_t i = 0; i < g->count && status == CKD_OK; i++) {
        const manifest *m = &g->order[i]->m;
        bool any = false;
        for (size_t k = m->own_count; k < m->file_count && !any; k++) {
            const merge_source *s = find_source(g, &m->files[k]);
            any = s && s->is_wasteful;
        }
        const view *v;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        counting k = {.g = g, .met = &met};
        ckd_status opened = any ? views_get(&v, &g->c->views, &m->checkpoint.id, &why) : CKD_E_NOT_FOUND;
        if (opened == CKD_OK) {
            k.root = v;
            opened = closure_visit(&g->c->views, v, count_record, &k, &why);
        }
        status = opened == CKD_E_NOMEM ? err_from(err, opened, &why) : CKD_OK; /* verify reports damage */
    }
    for (size_t i = 0; i < g->source_count; i++) {
        g->sources[i].is_wasteful = is_wasteful(g, &g->sources[i]);
    }
    free(met.slots);
    return status;
}

/* ---- groups ---- */

static int by_place(const void *a, const void *b) {
    const merge_source *x = *(const merge_source *const *)a, *y = *(const merge_source *const *)b;
    const ckd_checkpoint *p = &x->first->m.checkpoint, *q = &y->first->m.checkpoint;
    int order = strcmp(p->run, q->run);
    order = order ? order : (p->step > q->step) - (p->step < q->step);
    order = order ? order : (x->file.rank > y->file.rank) - (x->file.rank < y->file.rank);
    return order ? order : id_compare(x, y);
}

/*
 * Adds the checkpoints that a file has records of, each together with the file's rank. *shared: one of them was in
 * the set.
 */
static ckd_status list_owners(hash_set *to, bool *shared, compaction *c, const merge_source *s,
                              ckd_error *err) {
    chunk *opened = NULL;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = view_open_chunk(&opened, c->store, &s->file, &s->first->m.checkpoint, &why);
    *shared = false;
    for (size_t i = 0; status == CKD_OK && i < opened->outer_count; i++) {
        struct {
            ckd_id id;
            uint64_t rank;
        } key = {opened->outer[i].tensor->checkpoint, s->file.rank};
        uint64_t hash = hash64(&key, sizeof(key));
        bool repeated = i && id_equal(&key.id, &opened->outer[i - 1].tensor->checkpoint);
        *shared = *shared || (!repeated && hash_set_has(to, hash));
        status = hash_set_add(to, hash, &why);
    }
    chunk_close(opened);
    return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
}

static bool together(const merge_source *a, const merge_source *b) {
    return strcmp(a->first->m.checkpoint.run, b->first->m.checkpoint.run) == 0;
}

/*
 * Takes as many sources from the front as may be merged. Two files of a rank with records of the same checkpoint must
 * stay separate. One of them has the records from before a recoding, which other checkpoints still read. In one file a
 * reader could not tell them apart.
 */
static ckd_status fill_group(merge_set *x, merge_source **chosen, size_t count, ckd_error *err) {
    uint64_t max = TIMES_MAX * x->g->c->options.pack_below, live = 0;
    hash_set owners = {.slots = NULL};
    ckd_status status = CKD_OK;
    for (; x->count < count && x->count < FILES_MAX && status == CKD_OK; x->count++) {
        const merge_source *s = chosen[x->count];
        bool fits = x->count == 0 || s->first == chosen[x->count - 1]->first ||
                    (together(chosen[0], s) && live + s->live <= max);
        bool shared = false;
        status = fits ? list_owners(&owners, &shared, x->g->c, s, err) : CKD_OK;
        if (!fits || (shared && x->count)) {
            break;
        }
        live += s->live;
    }
    free(owners.slots);
    return status;
}

/* A group becomes one file for each rank. */
static size_t count_ranks(const merge_set *x) {
    size_t ranks = 0;
    for (size_t i = 0; i < x->count; i++) {
        bool met = false;
        for (size_t k = 0; k < i && !met; k++) {
            met = x->sources[k]->file.rank == x->sources[i]->file.rank;
        }
        ranks += !met;
    }
    return ranks;
}

static ckd_status run_groups(gathering *g, merge_source **chosen, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < count && status == CKD_OK && !compact_limit_reached(g->c);) {
        merge_set x = {.g = g, .sources = chosen + at};
        bool wasteful = false;
        status = fill_group(&x, chosen + at, count - at, err);
        size_t fewest = FILES_MIN - 1 + count_ranks(&x);
        for (size_t i = 0; i < x.count; i++) {
            wasteful = wasteful || chosen[at + i]->is_wasteful;
        }
        at += x.count;
        if (status == CKD_OK && (x.count >= fewest || wasteful)) {
            status = compact_merge(&x, err);
        }
    }
    return status;
}

static int by_run_and_step(const void *a, const void *b) {
    const ckd_checkpoint *x = &(*(const manifest_entry *const *)a)->m.checkpoint,
                         *y = &(*(const manifest_entry *const *)b)->m.checkpoint;
    int order = strcmp(x->run, y->run);
    return order ? order : (x->step > y->step) - (x->step < y->step);
}

static bool is_packed(const compaction *c, const merge_source *s) {
    bool may = c->limits.waste_run ? s->is_asked && !s->is_owned : !s->stays;
    return may && s->file.size < c->options.pack_below;
}

ckd_status compact_gather(compaction *c, manifest_entry *const *order, size_t count, gathered_fn gathered,
                          void *context, ckd_error *err) {
    manifest_entry **sorted = calloc(count + 1, sizeof(*sorted));
    gathering g = {.c = c, .order = sorted, .count = count, .gathered = gathered, .context = context};
    merge_source **chosen = NULL;
    size_t used = 0;
    if (!sorted) {
        return err_nomem(err, count * sizeof(*sorted), "checkpoints");
    }
    if (count) {
        memcpy(sorted, order, count * sizeof(*sorted));
        qsort(sorted, count, sizeof(*sorted), by_run_and_step);
    }
    ckd_status status = find_sources(&g, err);
    THEN(status, find_wasteful(&g, err));
    if (status == CKD_OK) {
        chosen = calloc(g.source_count + 1, sizeof(*chosen));
        status = chosen ? CKD_OK : err_nomem(err, g.source_count * sizeof(*chosen), "chunk files");
    }
    for (size_t i = 0; i < g.source_count && status == CKD_OK; i++) {
        merge_source *s = &g.sources[i];
        if (s->is_wasteful || is_packed(c, s)) {
            chosen[used++] = s;
        }
    }
    if (used) {
        qsort(chosen, used, sizeof(*chosen), by_place);
        status = run_groups(&g, chosen, used, err);
    }
    free(chosen);
    free(g.sources);
    free(sorted);
    return status;
}
