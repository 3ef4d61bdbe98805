#include "engine/read_through.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/damage.h"
#include "engine/needs.h"

ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err) {
    ckd_status status = chunk_check_record(c, r, err);
    if (status != CKD_OK) {
        return status;
    }
    bytes_clear(payload);
    void *to = bytes_extend(payload, r->stored_size + 1);
    if (!to) {
        payload->failed = false;
        return err_nomem(err, r->stored_size, "a payload");
    }
    status = chunk_read_payload(c, r, to, err);
    if (status != CKD_OK || r->kind != RECORD_BUNDLE) {
        return status; /* values are hashed when they are rebuilt */
    }
    hash128 content = content_hash(to, r->stored_size);
    return hash128_equal(&content, &r->content)
               ? CKD_OK
               : err_corrupt(err, file_path(c->file), r->offset,
                             "a bundle does not have the content hash it was written with");
}

ckd_status checkpoint_read_through(bool *all_whole, ckd_store *store, const manifest_name *name,
                                   ckd_error *err) {
    manifest m;
    view *v;
    bytes payload = {0};
    *all_whole = true;
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, err);
    if (status != CKD_OK) {
        return status;
    }
    status = view_open(&v, store, &m, NULL, CKD_E_CORRUPT, err);
    for (size_t i = 0; status == CKD_OK && i < v->chunk_count; i++) {
        const chunk *c = v->chunks[i];
        for (size_t k = 0; k < c->outer_count && status == CKD_OK; k++) {
            ckd_error why = {.offset = CKD_NO_OFFSET};
            ckd_status found = record_read_through(&payload, c, &c->outer[k], &why);
            bool own = id_equal(&c->outer[k].tensor->checkpoint, &v->manifest.checkpoint.id);
            *all_whole = *all_whole && found == CKD_OK;
            status = own || !is_damage(found, &why) ? err_from(err, found, &why) : CKD_OK;
        }
    }
    view_close(v);
    bytes_free(&payload);
    return status;
}

/* ---- before others are deleted ---- */

/* Chooses a checkpoint and what it depends on. */
static void choose_chain(needs *n, const ckd_id *id, need **todo) {
    size_t count = 0;
    need *first = needs_find(n, id);
    if (first && !first->chosen) {
        first->chosen = true;
        todo[count++] = first;
    }
    while (count) {
        const need *x = todo[--count];
        for (size_t i = 0; i < x->m.dependency_count; i++) {
            need *d = needs_find(n, &x->m.dependencies[i]);
            if (d && !d->chosen) {
                d->chosen = true;
                todo[count++] = d;
            }
        }
    }
}

/* The newest of every run that loses any, with their chains. */
static void choose_safe(needs *n, const ckd_prune *plan, need **todo) {
    for (size_t begin = 0, end; begin < plan->count; begin = end) {
        const char *run = plan->items[begin].checkpoint.run;
        bool loses = false;
        for (end = begin; end < plan->count && strcmp(plan->items[end].checkpoint.run, run) == 0; end++) {
            loses = loses || !plan->items[end].kept;
        }
        for (size_t i = begin; i < end && loses; i++) {
            if (plan->items[i].kept & CKD_KEPT_SAFETY) {
                choose_chain(n, &plan->items[i].checkpoint.id, todo);
            }
        }
    }
}

static ckd_status read_one(bool *all_whole, ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    manifest_name name = {.step = c->step, .generation = c->generation};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    memcpy(name.run, c->run, sizeof(name.run));
    ckd_status status = checkpoint_read_through(all_whole, store, &name, &why);
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND) {
        char text[sizeof(why.message)];
        snprintf(text, sizeof(text),
                 "%s@%llu, which the newest that are left need, is damaged: %.200s; "
                 "nothing was deleted",
                 c->run, (unsigned long long)c->step, why.message);
        memcpy(why.message, text, sizeof(text));
        why.status = status = status == CKD_E_NOT_FOUND ? CKD_E_CORRUPT : status;
    }
    return err_from(err, status, &why);
}

/* What need not be read again. */
typedef struct memory {
    catalog_file_state *files; /* by name */
    size_t count;
    uint64_t since_ns, now_ns;
} memory;

static memory recall(ckd_store *store, uint64_t trusted_s) {
    memory m = {.now_ns = clock_wall_ns()};
    uint64_t longest = m.now_ns / UINT64_C(1000000000);
    m.since_ns = m.now_ns - (trusted_s < longest ? trusted_s : longest) * UINT64_C(1000000000);
    m.files = trusted_s ? verified_recall(&m.count, store) : NULL;
    return m;
}

static int by_file_name(const void *name, const void *state) {
    return strcmp(name, ((const catalog_file_state *)state)->name);
}

/* All of its files were read through lately. A clock that was set back makes nothing fresh. */
static bool is_fresh(const memory *m, const manifest *of) {
    for (size_t i = 0; i < of->file_count; i++) {
        char name[64];
        verified_name(name, &of->files[i].id);
        const catalog_file_state *f =
            m->count ? bsearch(name, m->files, m->count, sizeof(*m->files), by_file_name) : NULL;
        if (!f || f->size != of->files[i].size || f->verified_ns < m->since_ns ||
            f->verified_ns > m->now_ns) {
            return false;
        }
    }
    return true;
}

static ckd_status read_chosen(verified_files *done, ckd_store *store, const needs *n, const memory *m,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    done->at_ns = m->now_ns;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        const need *x = &n->items[i];
        if (x->chosen && !is_fresh(m, &x->m)) {
            bool all_whole;
            status = read_one(&all_whole, store, &x->m.checkpoint, err);
            status = status == CKD_OK && all_whole ? verified_add(done, &x->m, err) : status;
        }
    }
    return status;
}

ckd_status read_safe_through(ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                             uint32_t patience_ms, ckd_error *err) {
    needs n = {0};
    memory m = {0};
    verified_files done = {0};
    file_lock *lock = NULL;
    need **todo = NULL;
    ckd_status status = store_lock_reader_within(&lock, store, patience_ms, err);
    if (status == CKD_OK) {
        status = needs_read(&n, store, err);
    }
    if (status == CKD_OK) {
        todo = calloc(n.count + 1, sizeof(need *));
        status = todo ? CKD_OK : err_nomem(err, n.count * sizeof(need *), "what is to be verified");
    }
    if (status == CKD_OK) {
        choose_safe(&n, plan, todo);
        m = recall(store, trusted_s);
        status = read_chosen(&done, store, &n, &m, err);
    }
    if (status == CKD_OK) {
        verified_hand_over(store, &done);
    }
    lock_release(lock);
    free(done.ids);
    free(m.files);
    free(todo);
    needs_free(&n);
    return status;
}
