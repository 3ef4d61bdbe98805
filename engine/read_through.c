#include "engine/read_through.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/wire.h"
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
    return wire_content_matches(&r->content, &content)
               ? CKD_OK
               : err_corrupt(err, file_path(c->file), r->offset,
                             "a bundle does not have the content hash it was written with");
}

/* Damage to records of checkpoints that the file's reader does not need is no reason to stop; that is not known of older files. */
static ckd_status chunk_read_through(bool *all_whole, const chunk *c, const ckd_id *own, bytes *payload,
                                     ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < c->outer_count && status == CKD_OK; k++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = record_read_through(payload, c, &c->outer[k], &why);
        bool needed = !own || id_equal(&c->outer[k].tensor->checkpoint, own);
        *all_whole = *all_whole && found == CKD_OK;
        status = needed || !is_damage(found, &why) ? err_from(err, found, &why) : CKD_OK;
    }
    return status;
}

/* ---- before others are deleted ---- */

/* The newest of every run that loses any. */
static void choose_safe(needs *n, const ckd_prune *plan) {
    for (size_t begin = 0, end; begin < plan->count; begin = end) {
        const char *run = plan->items[begin].checkpoint.run;
        bool loses = false;
        for (end = begin; end < plan->count && strcmp(plan->items[end].checkpoint.run, run) == 0; end++) {
            loses = loses || !plan->items[end].kept;
        }
        for (size_t i = begin; i < end && loses; i++) {
            if (plan->items[i].kept & CKD_KEPT_SAFETY) {
                need *x = needs_find(n, &plan->items[i].checkpoint.id);
                if (x) {
                    x->chosen = true;
                }
            }
        }
    }
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

/* The file was read through lately. A clock that was set back makes nothing fresh. */
static bool is_fresh(const memory *m, const note_file *of) {
    char name[64];
    verified_name(name, &of->id);
    const catalog_file_state *f =
        m->count ? bsearch(name, m->files, m->count, sizeof(*m->files), by_file_name) : NULL;
    return f && f->size == of->size && f->verified_ns >= m->since_ns && f->verified_ns <= m->now_ns;
}

static ckd_status tell_damage(const ckd_checkpoint *c, ckd_status status, ckd_error *why, ckd_error *err) {
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND) {
        char text[sizeof(why->message)];
        snprintf(text, sizeof(text),
                 "%s@%llu, which the newest that are left need, is damaged: %.200s; "
                 "nothing was deleted",
                 c->run, (unsigned long long)c->step, why->message);
        memcpy(why->message, text, sizeof(text));
        why->status = status = status == CKD_E_NOT_FOUND ? CKD_E_CORRUPT : status;
    }
    return err_from(err, status, why);
}

/* Files of the checkpoint that are not fresh; those that are whole are added to `done`. */
static ckd_status read_files(verified_files *done, ckd_store *store, const manifest *of, const memory *m,
                             ckd_error *err) {
    bytes payload = {0};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < of->file_count && status == CKD_OK; i++) {
        manifest one = {.files = &of->files[i], .file_count = 1};
        bool whole = true;
        chunk *c = NULL;
        if (is_fresh(m, &of->files[i])) {
            continue;
        }
        status = view_open_chunk(&c, store, &of->files[i], &of->checkpoint, &why);
        if (status == CKD_OK) {
            status =
                chunk_read_through(&whole, c, i < of->own_count ? &of->checkpoint.id : NULL, &payload, &why);
        }
        chunk_close(c);
        status = status == CKD_OK && whole ? verified_add(done, &one, &why) : status;
    }
    bytes_free(&payload);
    return tell_damage(&of->checkpoint, status, &why, err);
}

static ckd_status read_chosen(verified_files *done, ckd_store *store, const needs *n, const memory *m,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    done->at_ns = m->now_ns;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        if (n->items[i].chosen && !n->items[i].superseded) {
            status = read_files(done, store, &n->items[i].m, m, err);
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
    ckd_status status = store_lock_reader_within(&lock, store, patience_ms, err);
    if (status == CKD_OK) {
        status = needs_read(&n, store, err);
    }
    if (status == CKD_OK) {
        choose_safe(&n, plan);
        m = recall(store, trusted_s);
        status = read_chosen(&done, store, &n, &m, err);
    }
    if (status == CKD_OK) {
        verified_hand_over(store, &done);
    }
    lock_release(lock);
    free(done.ids);
    free(m.files);
    needs_free(&n);
    return status;
}
