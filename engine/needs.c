#include "engine/needs.h"

#include <stdlib.h>

static int by_id(const void *a, const void *b) {
    const need *x = a, *y = b;
    int order = memcmp(&x->m.checkpoint.id, &y->m.checkpoint.id, sizeof(ckd_id));
    uint32_t p = x->m.checkpoint.generation, q = y->m.checkpoint.generation;
    return order ? order : (p < q) - (p > q);
}

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err) {
    pathname p = path_tombstone(store->path, name->run, name->step, name->generation);
    bytes data = {0};
    ckd_status status = file_read_all(&data, p.text, NOTE_MAX, err);
    if (status == CKD_OK) {
        status = tombstone_decode(out, &store->id, data.data, data.size, p.text, err);
    }
    bytes_free(&data);
    return status;
}

/* What a collection or a return from the trash takes away meanwhile (there is none under the publish lock) is as if it had not been there. */
static ckd_status read_need(needs *to, const ckd_store *store, const manifest_name *name,
                            const manifest_list *tombstones, ckd_error *err) {
    need *n = &to->items[to->count];
    ckd_status status = store_read_manifest(&n->m, store, name->run, name->step, name->generation, err);
    if (status != CKD_OK) {
        return status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    to->count++;
    const manifest_name *killer = manifests_killer(tombstones, name);
    if (killer) {
        status = tombstone_read(&n->dead, store, killer, err);
        n->is_dead = status == CKD_OK;
    }
    return status == CKD_E_NOT_FOUND ? CKD_OK : status;
}

ckd_status needs_read(needs *out, const ckd_store *store, ckd_error *err) {
    manifest_list names = {0}, tombstones = {0};
    *out = (needs){0};
    ckd_status status = manifests_read_all(&names, store, err);
    if (status == CKD_OK) {
        status = manifests_tombstones(&tombstones, store, err);
    }
    if (status == CKD_OK) {
        out->items = calloc(names.count + 1, sizeof(*out->items));
        status = out->items ? CKD_OK : err_nomem(err, names.count * sizeof(*out->items), "manifests");
    }
    for (size_t i = 0; i < names.count && status == CKD_OK; i++) {
        status = read_need(out, store, &names.items[i], &tombstones, err);
    }
    manifests_free(&names);
    manifests_free(&tombstones);
    if (status != CKD_OK) {
        needs_free(out);
        return status;
    }
    qsort(out->items, out->count, sizeof(*out->items), by_id);
    for (size_t i = 1; i < out->count; i++) {
        need *n = &out->items[i], *before = &out->items[i - 1];
        n->superseded =
            id_equal(&n->m.checkpoint.id, &before->m.checkpoint.id) && n->is_dead == before->is_dead;
    }
    return CKD_OK;
}

void needs_free(needs *n) {
    for (size_t i = 0; i < n->count; i++) {
        manifest_free(&n->items[i].m);
    }
    free(n->items);
    *n = (needs){0};
}

need *needs_find(const needs *n, const ckd_id *id) {
    size_t low = 0, high = n->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(&n->items[middle].m.checkpoint.id, id, sizeof(*id)) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < n->count && id_equal(&n->items[low].m.checkpoint.id, id) ? &n->items[low] : NULL;
}

static const need *end_of(const needs *n) {
    return n->items + n->count;
}

ckd_status needs_choose(needs *n, const ckd_id *ids, size_t count, bool dead, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &ids[i]);
        need *first = needs_find(n, &ids[i]);
        if (!first || first->is_dead != dead) {
            return err_set(err, CKD_E_NOT_FOUND, "there is no checkpoint %s %s", hex,
                           dead ? "in the trash" : "in this store");
        }
        if (first->chosen) {
            return err_set(err, CKD_E_INVALID, "checkpoint %s is given twice", hex);
        }
        for (need *g = first; g < end_of(n) && id_equal(&g->m.checkpoint.id, &ids[i]); g++) {
            g->chosen = true;
        }
    }
    return CKD_OK;
}

/* Calls `visit` with the chosen, newest generations that the checkpoint depends on. */
typedef void (*visit_fn)(need *dependency, void *context);
static void visit_dependencies(const needs *n, const need *of, visit_fn visit, void *context) {
    for (size_t i = 0; i < of->m.dependency_count; i++) {
        need *d = needs_find(n, &of->m.dependencies[i]);
        if (d && d->chosen) {
            visit(d, context);
        }
    }
}

static void count_dependent(need *dependency, void *context) {
    (void)context;
    dependency->dependents_left++;
}

typedef struct ordering {
    need **items;
    size_t count;
} ordering;

static void release_dependency(need *dependency, void *context) {
    ordering *o = context;
    if (--dependency->dependents_left == 0) {
        o->items[o->count++] = dependency;
    }
}

ckd_status needs_order(need ***out, size_t *count, needs *n, ckd_error *err) {
    ordering o = {calloc(n->count + 1, sizeof(need *)), 0};
    size_t chosen = 0;
    if (!o.items) {
        return err_nomem(err, n->count * sizeof(need *), "an order of checkpoints");
    }
    for (need *x = n->items; x < end_of(n); x++) {
        x->dependents_left = 0;
    }
    for (need *x = n->items; x < end_of(n); x++) {
        if (x->chosen && !x->superseded) {
            chosen++;
            visit_dependencies(n, x, count_dependent, NULL);
        }
    }
    for (need *x = n->items; x < end_of(n); x++) {
        if (x->chosen && !x->superseded && x->dependents_left == 0) {
            o.items[o.count++] = x;
        }
    }
    for (size_t i = 0; i < o.count; i++) {
        visit_dependencies(n, o.items[i], release_dependency, &o);
    }
    if (o.count != chosen) {
        free(o.items);
        return err_set(err, CKD_E_CORRUPT,
                       "checkpoints depend on each other in a circle; nothing was changed");
    }
    *out = o.items;
    *count = o.count;
    return CKD_OK;
}

/* ---- writers ---- */

#define SAME_TIME_NS \
    UINT64_C(60000000000) /* clocks of the machines that write to a store may differ by so much */

/* What living writers may come to depend on, and those of them whose own dependencies were not looked at. */
typedef struct in_use {
    const ckd_store *store;
    needs *all;
    need **todo;
    size_t todo_count;
    uint64_t begun_ns; /* the writer at hand; about */
    in_use_fn visit;
    void *context;
} in_use;

/* Was this generation replaced before the writer began? `newer` is the next one. */
static bool was_replaced(const in_use *u, const need *newer) {
    const ckd_checkpoint *c = &newer->m.checkpoint;
    uint64_t at = file_modified_ns(path_manifest(u->store->path, c->run, c->step, c->generation).text);
    return at && at + SAME_TIME_NS < u->begun_ns;
}

static ckd_status use(in_use *u, const ckd_id *id, bool named, const intent *live, ckd_error *err) {
    need *first = needs_find(u->all, id);
    ckd_status status = CKD_OK;
    if (first && !first->in_use) {
        first->in_use = true;
        status = u->visit(u->context, first, named, live, err);
    }
    for (need *g = first; g && g < end_of(u->all) && id_equal(&g->m.checkpoint.id, id); g++) {
        if (g > first && was_replaced(u, g - 1)) {
            break;
        }
        if (!g->looked_at) {
            g->looked_at = true;
            u->todo[u->todo_count++] = g;
        }
    }
    return status;
}

static ckd_status use_all_of(in_use *u, const intent *live, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (need *x = u->all->items; x < end_of(u->all); x++) {
        x->looked_at = false; /* another writer may have begun at another time */
    }
    for (size_t i = 0; i < live->dependency_count && status == CKD_OK; i++) {
        status = use(u, &live->dependencies[i], true, live, err);
    }
    while (u->todo_count && status == CKD_OK) {
        const need *n = u->todo[--u->todo_count];
        for (size_t i = 0; i < n->m.dependency_count && status == CKD_OK; i++) {
            status = use(u, &n->m.dependencies[i], false, live, err);
        }
    }
    return status;
}

static ckd_status visit_writer(in_use *u, const char *name, ckd_error *err) {
    pathname p = path_of(u->store->path, DIR_INTENTS, name);
    file_lock *lock;
    ckd_status status = lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL);
    if (status == CKD_OK || status == CKD_E_NOT_FOUND) {
        lock_release(status == CKD_OK ? lock : NULL);
        return CKD_OK; /* its writer died, or has just ended */
    }
    bytes data = {0};
    intent live = {0};
    u->begun_ns = file_modified_ns(p.text);
    status = file_read_all(&data, p.text, NOTE_MAX, err);
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (status == CKD_OK) {
        status = intent_decode(&live, &u->store->id, data.data, data.size, p.text, err);
    }
    if (status == CKD_OK) {
        status = use_all_of(u, &live, err);
    }
    intent_free(&live);
    bytes_free(&data);
    return status;
}

ckd_status needs_visit_in_use(needs *n, const ckd_store *store, in_use_fn visit, void *context,
                              ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    in_use u = {.store = store,
                .all = n,
                .todo = calloc(n->count + 1, sizeof(*u.todo)),
                .visit = visit,
                .context = context};
    status = u.todo ? CKD_OK : err_nomem(err, n->count * sizeof(*u.todo), "checkpoints in use");
    for (need *x = n->items; x < end_of(n); x++) {
        x->in_use = false;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id id;
        if (strlen(list.names[i]) == CKD_ID_TEXT - 1 && id_parse(&id, list.names[i])) {
            status = visit_writer(&u, list.names[i], err);
        }
    }
    free(u.todo);
    dir_list_free(&list);
    return status;
}
