/*
 * Chooses which files share a group. Parity is as long as the longest member, so only files of similar size (half an
 * octave) share a group. They should also be of similar age, because files saved together tend to be deleted together.
 */
#include <stdlib.h>

#include "engine/integrity/internal.h"

#define SMALL_FILE (UINT64_C(1) << 16) /* smaller files form one size class */

typedef struct wanted {
    uint32_t data, parity; /* 0: none */
    bool off;              /* a setting says that there must be none */
} wanted;

/* ---- settings ---- */

/* An unreadable setting counts as none if an old group can serve as a model. */
static ckd_status wanted_for(wanted *out, const parity_inputs *inputs, const char *run, ckd_error *err) {
    const stored_setting *n = settings_parity(inputs->settings, run);
    *out = (wanted){0};
    n = n && n->status != CKD_OK && inputs->data ? NULL : n;
    ckd_status status = n ? settings_why(n, inputs->store, err) : CKD_OK;
    if (status == CKD_OK && n) {
        *out = (wanted){n->parity.data, n->parity.parity, !n->parity.data};
    }
    return status;
}

/* ---- existing groups ---- */

/*
 * Use of the group for the live file `f`. A missing member counts whatever the settings say. Checkpoints of other runs
 * may need the files of a run that was deleted or renamed, and such files may have no setting. They keep the cover that
 * they have.
 */
static parity_use use_of(const parity_set *s, const live_file *f, const wanted *w,
                         const parity_inputs *inputs) {
    const parity_group *g = &s->group;
    bool all_listed = true, any_missing = false, is_missing = false;
    for (size_t i = 0; i < g->member_count; i++) {
        const live_file *m = live_files_find(inputs->files, &g->members[i].file);
        bool same =
            m && m->file.size == g->members[i].size && hash128_equal(&m->file.root, &g->members[i].root);
        bool missing = same && !live_file_exists(inputs->store, &m->file.id, m->file.size);
        any_missing = any_missing || missing;
        is_missing = is_missing || (missing && m == f);
        all_listed = all_listed && same;
    }
    if (is_missing) {
        return PARITY_BROKEN;
    }
    bool whole = s->present == (UINT32_C(1) << g->rows) - 1 && !any_missing && all_listed;
    bool fits = whole && g->rows == w->parity && g->member_count <= w->data;
    if ((!fits || !w->data) && parity_set_redundancy(s, inputs->store) <= 0) {
        return w->data ? PARITY_SPENT : PARITY_NONE;
    }
    if (any_missing) {
        return PARITY_BROKEN;
    }
    if (w->off) {
        return PARITY_NONE;
    }
    return !fits ? PARITY_PART : g->member_count == w->data ? PARITY_FULL : PARITY_SMALL;
}

/* The group that protects a file best. The newest one wins among equals. */
static const parity_set *best_of(parity_use *use, const live_file *f, const wanted *w,
                                 const parity_inputs *inputs) {
    size_t count;
    const parity_membership *c = parity_sets_of(inputs->sets, &f->file.id, &count);
    const parity_set *best = NULL;
    *use = PARITY_NONE;
    for (size_t i = 0; i < count; i++) {
        parity_use found = use_of(c[i].set, f, w, inputs);
        bool better = found > *use || (best && found == *use && found != PARITY_NONE &&
                                       c[i].set->group.created_ns > best->group.created_ns);
        if (better) {
            best = c[i].set;
            *use = found;
        }
    }
    return best;
}

/* ---- new groups ---- */

typedef struct candidate {
    const live_file *f;
    const parity_set *now; /* a group that is too small; NULL: the file is in no group that can stay */
    wanted w;
    unsigned size_class;
} candidate;

static unsigned size_class(uint64_t size) {
    unsigned bits = 64 - (unsigned)__builtin_clzll(size);
    return size < SMALL_FILE ? 0 : 2 * bits + (unsigned)(size >> (bits - 2) & 1);
}

static int by_class_and_age(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    uint64_t p[5] = {x->w.data, x->w.parity, x->f->in_trash, x->size_class, x->f->created_ns};
    uint64_t q[5] = {y->w.data, y->w.parity, y->f->in_trash, y->size_class, y->f->created_ns};
    for (size_t i = 0; i < 5; i++) {
        if (p[i] != q[i]) {
            return p[i] < q[i] ? -1 : 1;
        }
    }
    return memcmp(&x->f->file.id, &y->f->file.id, sizeof(ckd_id));
}

static ckd_status find_candidates(candidate *out, size_t *count, const parity_inputs *inputs, const char *run,
                                  ckd_error *err) {
    *count = 0;
    for (size_t i = 0; i < inputs->files->count; i++) {
        const live_file *f = &inputs->files->items[i];
        candidate c = {.f = f};
        parity_use use;
        if (run && strcmp(run, f->name.run) != 0) {
            continue;
        }
        ckd_status status = wanted_for(&c.w, inputs, f->name.run, err);
        if (status != CKD_OK) {
            return status;
        }
        if (!c.w.data && !c.w.off) {
            c.w = (wanted){inputs->data, inputs->parity, false};
        }
        const parity_set *best = best_of(&use, f, &c.w, inputs);
        bool possible = c.w.data && f->file.size && f->file.size <= PARITY_FILE_MAX;
        if (possible && use != PARITY_BROKEN && use != PARITY_FULL) {
            c.now = use == PARITY_SMALL ? best : NULL;
            c.size_class = size_class(f->file.size);
            out[(*count)++] = c;
        }
    }
    return CKD_OK;
}

/* Are candidates `first` to `end` - 1 exactly the members of an existing group? */
static bool stays(const candidate *first, const candidate *end) {
    const parity_set *now = first->now;
    bool same = now && now->group.member_count == (size_t)(end - first);
    for (const candidate *c = first; c < end && same; c++) {
        same = c->now == now;
    }
    return same;
}

static ckd_status add_group(parity_plan *p, const candidate *first, size_t count, ckd_error *err) {
    parity_group g = {.rows = first->w.parity, .piece = PARITY_PIECE, .member_count = count};
    g.members = calloc(count, sizeof(*g.members));
    if (!g.members) {
        return err_nomem(err, count * sizeof(*g.members), "a parity group");
    }
    for (size_t i = 0; i < count; i++) {
        const file_ref *f = &first[i].f->file;
        g.members[i] = (parity_member){(uint32_t)i, f->id, f->size, f->root};
        p->files++;
        p->file_bytes += f->size;
    }
    p->items[p->count++] = g;
    return CKD_OK;
}

static bool together(const candidate *a, const candidate *b) {
    return a->w.data == b->w.data && a->w.parity == b->w.parity && a->size_class == b->size_class &&
           a->f->in_trash == b->f->in_trash; /* the trash goes soon */
}

static ckd_status cut(parity_plan *p, const candidate *c, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK;) {
        size_t n = 1;
        while (i + n < count && n < c[i].w.data && together(&c[i], &c[i + n])) {
            n++;
        }
        if (!stays(&c[i], &c[i + n])) {
            status = add_group(p, &c[i], n, err);
        }
        i += n;
    }
    return status;
}

ckd_status parity_plan_make(parity_plan *out, const parity_inputs *inputs, const char *run, ckd_error *err) {
    *out = (parity_plan){0};
    size_t count = 0, capacity = inputs->files->count;
    candidate *c = calloc(capacity + 1, sizeof(*c));
    out->items = calloc(capacity + 1, sizeof(*out->items));
    ckd_status status = c && out->items ? find_candidates(c, &count, inputs, run, err)
                                        : err_nomem(err, capacity * sizeof(*c), "a plan of parity");
    if (status == CKD_OK && count) {
        qsort(c, count, sizeof(*c), by_class_and_age);
        status = cut(out, c, count, err);
    }
    free(c);
    return status;
}

void parity_plan_free(parity_plan *p) {
    for (size_t i = 0; i < p->count; i++) {
        parity_group_free(&p->items[i]);
    }
    free(p->items);
    *p = (parity_plan){0};
}

ckd_status parity_plan_best(const parity_set **out, const live_file *f, const parity_inputs *inputs,
                            ckd_error *err) {
    wanted w;
    parity_use use;
    *out = NULL;
    ckd_status status = wanted_for(&w, inputs, f->name.run, err);
    if (status == CKD_OK) {
        *out = best_of(&use, f, &w, inputs);
    }
    return status;
}

ckd_status parity_plan_needed(bool *needed, const parity_inputs *inputs, ckd_error *err) {
    for (size_t i = 0; i < inputs->files->count; i++) {
        const live_file *f = &inputs->files->items[i];
        wanted w;
        parity_use use;
        ckd_status status = wanted_for(&w, inputs, f->name.run, err);
        if (status != CKD_OK) {
            return status;
        }
        const parity_set *best = best_of(&use, f, &w, inputs);
        if (best) {
            needed[best->place] = true;
        }
        size_t count;
        const parity_membership *c = parity_sets_of(inputs->sets, &f->file.id, &count);
        for (size_t k = 0; k < count; k++) { /* any of them may be the one that brings its member back */
            if (use_of(c[k].set, f, &w, inputs) == PARITY_BROKEN) {
                needed[c[k].set->place] = true;
            }
        }
    }
    return CKD_OK;
}

/* ---- lost checkpoints ---- */

static bool is_stray(const vanished *v, const ckd_id *file) {
    return v->stray_count && bsearch(file, v->strays, v->stray_count, sizeof(*v->strays), id_compare);
}

/* Does the group cover a file that a lost checkpoint may need? If so, no manifest names the file any more. */
static bool covers_lost(const parity_set *s, const parity_inputs *inputs, const vanished *v) {
    for (size_t i = 0; i < s->group.member_count; i++) {
        const ckd_id *file = &s->group.members[i].file;
        bool missing = !file_exists(path_chunk(inputs->store->path, file, "").text);
        if (!live_files_find(inputs->files, file) && (missing || is_stray(v, file))) {
            return true;
        }
    }
    return false;
}

ckd_status parity_plan_keep_lost(bool *needed, size_t *kept, const parity_inputs *inputs, ckd_error *err) {
    vanished v = {0};
    *kept = 0;
    ckd_status status = vanished_find(&v, inputs->store, err);
    bool any = v.count || v.doubtful_count || v.stray_count;
    for (size_t i = 0; i < inputs->sets->count && any && status == CKD_OK; i++) {
        if (!needed[i] && covers_lost(inputs->sets->items[i], inputs, &v)) {
            needed[i] = true;
            ++*kept;
        }
    }
    vanished_free(&v);
    return status;
}
