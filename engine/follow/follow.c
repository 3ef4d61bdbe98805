/* Following: opens the folder, waits for a newer checkpoint, applies it. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/follow/follow.h"
#include "engine/store/store.h"

#define FOLDER_MAX 4096
#define POLL_MS    2000

/* ---- open and close ---- */

static void free_list(const char *const *list, size_t count) {
    for (size_t i = 0; list && i < count; i++) {
        free((char *)list[i]);
    }
    free((void *)list);
}

void ckd_follow_close(ckd_follow *f) {
    if (!f) {
        return;
    }
    file_watch_close(f->watch);
    follow_state_free(&f->state);
    free(f->failures);
    free_list(f->options.only, f->options.only_count);
    free_list(f->options.exclude, f->options.exclude_count);
    free((char *)f->options.into);
    free((char *)f->options.tag);
    free((char *)f->options.member);
    lock_release(f->lock);
    free(f);
}

static ckd_status copy_text(const char **text, ckd_error *err) {
    *text = *text ? strdup(*text) : NULL;
    return *text ? CKD_OK : err_nomem(err, 1, "the options");
}

/* Replaces the list by a copy, or by NULL on failure. */
static ckd_status copy_list(const char *const **list, size_t count, ckd_error *err) {
    const char **to = calloc(count + 1, sizeof(*to));
    for (size_t i = 0; to && i < count; i++) {
        to[i] = strdup((*list)[i]);
        if (!to[i]) {
            free_list(to, count);
            to = NULL;
        }
    }
    *list = to;
    return to ? CKD_OK : err_nomem(err, count, "the options");
}

/* Copies the strings. All strings in f->options belong to f afterwards, even after a failure. */
static ckd_status own_options(ckd_follow *f, const ckd_follow_options *o, ckd_error *err) {
    f->options = *o;
    f->options.run = f->options.tag = f->options.into = f->options.member = NULL;
    f->options.only = f->options.exclude = NULL;
    const char *into = o->into, *tag = o->tag, *member = o->member;
    const char *const *only = o->only, *const *exclude = o->exclude;
    ckd_status status = copy_text(&into, err);
    f->options.into = into;
    if (status == CKD_OK && tag) {
        status = copy_text(&tag, err);
        f->options.tag = tag;
    }
    if (status == CKD_OK && member) {
        status = copy_text(&member, err);
        f->options.member = member;
    }
    if (status == CKD_OK) {
        status = copy_list(&only, o->only_count, err);
        f->options.only = only;
    }
    if (status == CKD_OK) {
        status = copy_list(&exclude, o->exclude_count, err);
        f->options.exclude = exclude;
    }
    snprintf(f->run, sizeof(f->run), "%s", o->run ? o->run : "");
    return status;
}

static ckd_status check_options(const ckd_follow_options *o, ckd_error *err) {
    if (!o->into || !o->into[0] || strlen(o->into) > FOLDER_MAX) {
        return err_set(err, CKD_E_INVALID, "following needs a folder, whose path has at most %d bytes",
                       FOLDER_MAX);
    }
    if (o->run && o->tag) {
        return err_set(err, CKD_E_INVALID, "follow either a run or a tag, not both");
    }
    if ((o->run && !run_name_valid(o->run)) || (o->tag && !run_name_valid(o->tag))) {
        return err_set(err, CKD_E_INVALID, "'%.200s' is not a valid name of a run or tag",
                       o->run ? o->run : o->tag);
    }
    return o->member && !o->member[0] ? err_set(err, CKD_E_INVALID, "the member to follow has no name")
                                      : CKD_OK;
}

/* Refuses model files that the state does not name: no follower wrote them. An unreadable state excuses all files. */
static ckd_status check_owner(const ckd_follow *f, ckd_error *err) {
    const char *into = f->options.into;
    bool unreadable = !f->state.count && file_exists(follow_path_of(into, FOLLOW_STATE).text);
    if (f->options.overwrite || unreadable || file_exists(follow_path_of(into, FOLLOW_JOURNAL).text)) {
        return CKD_OK;
    }
    dir_list list;
    ckd_status status = dir_list_read(&list, into, err);
    for (size_t i = 0; status == CKD_OK && i < list.count; i++) {
        if (follow_is_model_file(list.names[i]) && !follow_state_find(&f->state, list.names[i])) {
            status = err_set(err, CKD_E_EXISTS,
                             "%s has model files that no follower wrote, such as %s; --overwrite (in a "
                             "program: overwrite) replaces them",
                             into, list.names[i]);
        }
    }
    dir_list_free(&list);
    return status;
}

static ckd_status open_folder(ckd_follow *f, ckd_error *err) {
    const char *into = f->options.into;
    bool made = !dir_exists(into);
    ckd_status status = dir_create(into, true, err);
    /* A version is durable only if the folder is. The maker of the folder may have died before it synced it. */
    if (status == CKD_OK) {
        ckd_status synced = dir_sync(follow_path_of(into, "..").text, made ? err : NULL);
        status = made ? synced : CKD_OK; /* the folder above an existing one may be unreadable */
    }
    THEN(status, check_owner(f, err));
    THEN(status,
         lock_acquire(&f->lock, follow_path_of(into, FOLLOW_LOCK).text, LOCK_EXCLUSIVE, true, 0, err));
    if (status == CKD_E_BUSY) {
        return err_set(err, CKD_E_BUSY, "another process already follows into %s", into);
    }
    THEN(status, follow_recover(into, err));
    THEN(status, follow_state_read(&f->state, into, err));
    THEN(status, check_owner(f, err));
    THEN(status, file_watch_open(&f->watch, err));
    if (status == CKD_OK) {
        pathname identity = path_in(f->store->path, FILE_IDENTITY);
        f->identity_inode = file_inode(identity.text);
        f->identity_ns = file_modified_ns(identity.text);
        file_watch_add(f->watch, path_in(f->store->path, DIR_MANIFESTS).text);
        file_watch_add(f->watch, path_in(f->store->path, DIR_SETTINGS).text); /* tags */
    }
    return status;
}

ckd_status ckd_follow_open(ckd_follow **out, ckd_store *store, const ckd_follow_options *options,
                           ckd_error *err) {
    *out = NULL;
    ckd_follow_options o = {0};
    ckd_status status = store && options ? COPY_OPTIONS(&o, options, "ckd_follow_options", err)
                                         : err_set(err, CKD_E_INVALID, "following needs a store and options");
    THEN(status, check_options(&o, err));
    if (status != CKD_OK) {
        return status;
    }
    ckd_follow *f = calloc(1, sizeof(*f));
    if (!f) {
        return err_nomem(err, sizeof(*f), "following");
    }
    f->store = store;
    status = own_options(f, &o, err);
    THEN(status, follow_choice(&f->choice, &f->options, err));
    THEN(status, open_folder(f, err));
    if (status != CKD_OK) {
        ckd_follow_close(f);
        return status;
    }
    if (!f->run[0] && !o.tag) { /* the store may have more runs by now */
        memcpy(f->run, f->state.run, sizeof(f->run));
    }
    *out = f;
    return CKD_OK;
}

void ckd_follow_applied(ckd_follow_result *out, const ckd_follow *f) {
    *out = (ckd_follow_result){0};
    if (f) {
        out->checkpoint.id = f->state.checkpoint;
        out->checkpoint.step = f->state.step;
        out->checkpoint.created_ns = f->state.created_ns;
        out->bytes = f->state.tensor_bytes;
        memcpy(out->checkpoint.run, f->state.run, sizeof(out->checkpoint.run));
    }
}

/* ---- wait ---- */

void ckd_follow_cancel(ckd_follow *f) {
    if (f) {
        atomic_store(&f->cancelled, true);
        file_watch_wake(f->watch);
    }
}

/* Whether the folder is as it was when this checkpoint was applied. */
static bool is_applied(const ckd_follow *f, const ckd_checkpoint *c) {
    bool same = id_equal(&f->state.checkpoint, &c->id) && hash128_equal(&f->state.choice, &f->choice);
    for (size_t i = 0; same && i < f->state.count; i++) {
        const follow_file *file = &f->state.files[i];
        same = follow_file_unchanged(file, follow_path_of(f->options.into, file->name).text);
    }
    return same;
}

/* Whether the store was removed and created again. The open handle would only know the old one. */
static bool is_replaced(const ckd_follow *f) {
    pathname identity = path_in(f->store->path, FILE_IDENTITY);
    uint64_t inode = file_inode(identity.text), modified_ns = file_modified_ns(identity.text);
    return inode && modified_ns && (inode != f->identity_inode || modified_ns != f->identity_ns);
}

static ckd_status look(int *newer, ckd_follow *f, ckd_error *err) {
    ckd_checkpoint c;
    ckd_error why;
    if (is_replaced(f)) {
        return err_set(err, CKD_E_STATE, "the store at %s was replaced", f->store->path);
    }
    ckd_status status = follow_choose(&c, NULL, f, &why);
    *newer = status == CKD_OK && !is_applied(f, &c);
    /* An unreachable store and a damaged tag may be temporary. */
    if (status != CKD_OK && status != CKD_E_NOT_FOUND && status != CKD_E_STATE) {
        follow_report(f, "the newest checkpoint cannot be found for now", &why);
    }
    if (status == CKD_E_NOT_FOUND && !f->waits) {
        store_message(f->store, "waiting: %s", why.message);
    }
    f->waits = status == CKD_E_NOT_FOUND;
    bool lasts = status == CKD_E_INVALID || status == CKD_E_NOMEM;
    return lasts ? err_from(err, status, &why) : CKD_OK;
}

ckd_status ckd_follow_wait(int *newer, ckd_follow *f, uint64_t timeout_ms, ckd_error *err) {
    *newer = 0;
    if (!f) {
        return err_set(err, CKD_E_INVALID, "nothing is followed");
    }
    const ckd_follow_options *o = &f->options;
    uint64_t poll_ms = o->poll_ms ? o->poll_ms : POLL_MS, begun = clock_monotonic_ns();
    uint64_t poll_ns = poll_ms > UINT64_MAX / 1000000 ? UINT64_MAX : poll_ms * 1000000;
    uint64_t limit_ns = timeout_ms > UINT64_MAX / 1000000 ? UINT64_MAX : timeout_ms * 1000000;
    for (;;) {
        if (atomic_exchange(&f->cancelled, false) ||
            (o->on_progress && o->on_progress(o->progress_context, 0, 0))) {
            return err_set(err, CKD_E_CANCELLED, "waiting was cancelled");
        }
        ckd_status status = look(newer, f, err);
        uint64_t passed = clock_monotonic_ns() - begun;
        if (status != CKD_OK || *newer || passed >= limit_ns) {
            return status;
        }
        uint64_t left = limit_ns - passed;
        file_watch_wait(f->watch, left < poll_ns ? left : poll_ns);
    }
}

/* ---- apply ---- */

/* Writes the new files and commits them. After a failure before the commit point, the folder is as it was. */
static ckd_status write_and_commit(follow_writing *w, ckd_follow *f, ckd_error *err) {
    bool committed = false;
    ckd_status status = check_owner(f, err);
    THEN(status, follow_write(w, err));
    THEN(status, follow_commit(&committed, f->options.into, &w->next, err));
    if (committed) {
        ckd_status recovered = status == CKD_OK ? CKD_OK : follow_recover(f->options.into, err);
        follow_state_free(&f->state);
        f->state = w->next;
        w->next = (follow_state){0};
        return recovered;
    }
    follow_state_free(&w->next);
    (void)follow_recover(f->options.into, NULL);
    return status;
}

/* A missing or changed file of the folder is an IO error: the checkpoint itself is intact. */
static ckd_status folder_error(ckd_error *err, ckd_status status) {
    bool gone = status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT;
    if (gone && err) {
        err->status = CKD_E_IO;
    }
    return gone ? CKD_E_IO : status;
}

/* *of_store: the error is about the checkpoint. */
static ckd_status apply(ckd_follow_result *out, ckd_follow *f, const ckd_checkpoint *c, bool *of_store,
                        ckd_error *err) {
    ckd_load *load = NULL, *before = NULL;
    follow_layout layout = {0};
    ckd_status status = ckd_load_begin(&load, f->store, &c->id, err);
    *of_store = status != CKD_OK;
    THEN(status, follow_layout_make(&layout, ckd_load_tensors(load), &f->options, err));
    *of_store = *of_store || status == CKD_E_UNSUPPORTED;
    if (status == CKD_OK && !id_is_zero(&f->state.checkpoint)) {
        (void)ckd_load_begin(&before, f->store, &f->state.checkpoint, NULL);
    }
    if (status == CKD_OK) {
        follow_writing w = {.folder = f->options.into,
                            .load = load,
                            .before = before ? before->view : NULL,
                            .state = &f->state,
                            .options = &f->options,
                            .layout = &layout,
                            .next = {.choice = f->choice}};
        status = write_and_commit(&w, f, err);
        *of_store = w.store_failed;
        out->files = w.files;
        out->written_bytes = w.written;
        out->read_bytes = ckd_load_bytes_read(load);
    }
    follow_layout_free(&layout);
    ckd_load_end(before);
    ckd_load_end(load);
    return *of_store ? status : folder_error(err, status);
}

/* Whether the error concerns only this checkpoint. */
static bool passes_over(const ckd_error *why) {
    return why->status == CKD_E_UNSUPPORTED || why->status == CKD_E_NOT_FOUND || ckd_error_is_damage(why);
}

ckd_status ckd_follow_apply(ckd_follow_result *out, ckd_follow *f, ckd_error *err) {
    ckd_checkpoint c;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_follow_applied(out, f);
    if (!f) {
        return err_set(err, CKD_E_INVALID, "nothing is followed");
    }
    uint64_t skipped = 0, files = 0, written = 0, read = 0;
    ckd_status status = follow_choose(&c, &skipped, f, &why);
    bool applied = false;
    while (status == CKD_OK && !applied && !is_applied(f, &c)) {
        bool of_store = false;
        ckd_follow_result r = {0};
        status = apply(&r, f, &c, &of_store, &why);
        applied = status == CKD_OK;
        files = r.files;
        written = r.written_bytes;
        read += r.read_bytes;
        if (!applied && of_store && passes_over(&why)) {
            f->failure = why;
            store_message(f->store, "%s@%llu is passed over: %s", c.run, (unsigned long long)c.step,
                          why.message);
            status = follow_remember_failure(f, &c, &why);
            THEN(status, follow_choose(&c, &skipped, f, &why));
        }
    }
    ckd_follow_applied(out, f);
    out->applied = applied;
    out->files = files;
    out->written_bytes = written;
    out->read_bytes = read;
    out->passed_over = skipped;
    if (status == CKD_E_NOT_FOUND && skipped) { /* the folder keeps what it has */
        return id_is_zero(&f->state.checkpoint) ? err_from(err, f->failure.status, &f->failure) : CKD_OK;
    }
    return err_from(err, status, &why);
}
