#include "engine/read_through.h"

#include <stdio.h>
#include <stdlib.h>

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

ckd_status checkpoint_read_through(ckd_store *store, const manifest_name *name, ckd_error *err) {
    manifest m;
    view *v;
    bytes payload = {0};
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, err);
    if (status != CKD_OK) {
        return status;
    }
    status = view_open(&v, store, &m, NULL, CKD_E_CORRUPT, err);
    for (size_t i = 0; status == CKD_OK && i < v->chunk_count; i++) {
        const chunk *c = v->chunks[i];
        for (size_t k = 0; k < c->outer_count && status == CKD_OK; k++) {
            status = record_read_through(&payload, c, &c->outer[k], err);
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

static ckd_status read_one(ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    manifest_name name = {.step = c->step, .generation = c->generation};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    memcpy(name.run, c->run, sizeof(name.run));
    ckd_status status = checkpoint_read_through(store, &name, &why);
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

ckd_status read_safe_through(ckd_store *store, const ckd_prune *plan, ckd_error *err) {
    needs n = {0};
    file_lock *lock = NULL;
    need **todo = NULL;
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status == CKD_OK) {
        status = needs_read(&n, store, err);
    }
    if (status == CKD_OK) {
        todo = calloc(n.count + 1, sizeof(need *));
        status = todo ? CKD_OK : err_nomem(err, n.count * sizeof(need *), "what is to be verified");
    }
    if (status == CKD_OK) {
        choose_safe(&n, plan, todo);
    }
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        if (n.items[i].chosen) {
            status = read_one(store, &n.items[i].m.checkpoint, err);
        }
    }
    free(todo);
    needs_free(&n);
    lock_release(lock);
    return status;
}
