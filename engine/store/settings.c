/*
 * Reads and changes settings: pins, tags, policies, parity settings, renames. An unreadable one may be a pin, so
 * nothing is deleted while there is one.
 */
#include "engine/store/manifests.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/common/common.h"

static int by_name(const void *a, const void *b) {
    const stored_setting *x = a, *y = b;
    int order = (int)x->name.kind - (int)y->name.kind;
    order = order ? order : strcmp(x->name.name, y->name.name);
    uint32_t p = x->name.generation, q = y->name.generation;
    return order ? order : (p < q) - (p > q);
}

static bool same_subject(const setting_name *a, const setting_name *b) {
    return a->kind == b->kind && strcmp(a->name, b->name) == 0;
}

/* ---- reading ---- */

/* The name that the setting's content states. */
static setting_name name_within(const stored_setting *n) {
    setting_name name = {.kind = n->name.kind};
    if (name.kind == METADATA_PIN) {
        ckd_id_text(name.name, &n->pin.checkpoint);
        name.generation = n->pin.generation;
    } else if (name.kind == METADATA_TAG) {
        memcpy(name.name, n->tag.tag, sizeof(name.name));
        name.generation = n->tag.generation;
    } else if (name.kind == METADATA_RENAME) {
        memcpy(name.name, n->rename.run, sizeof(name.name));
        name.generation = n->rename.generation;
    } else {
        const char *run = name.kind == METADATA_PARITY ? n->parity.run : n->policy.run;
        snprintf(name.name, sizeof(name.name), "%s", run[0] ? run : POLICY_OF_ALL);
        name.generation = name.kind == METADATA_PARITY ? n->parity.generation : n->policy.generation;
    }
    return name;
}

static ckd_status decode_kind(stored_setting *n, const ckd_id *store, const bytes *data, const char *path,
                              ckd_error *err) {
    switch (n->name.kind) {
    case METADATA_PIN:
        return pin_decode(&n->pin, store, data->data, data->size, path, err);
    case METADATA_TAG:
        return tag_decode(&n->tag, store, data->data, data->size, path, err);
    case METADATA_RENAME:
        return rename_decode(&n->rename, store, data->data, data->size, path, err);
    case METADATA_PARITY:
        return parity_decode(&n->parity, store, data->data, data->size, path, err);
    default:
        return policy_decode(&n->policy, store, data->data, data->size, path, err);
    }
}

static ckd_status decode(stored_setting *n, const ckd_id *store, const bytes *data, const char *path,
                         ckd_error *err) {
    ckd_status status = decode_kind(n, store, data, path, err);
    if (status != CKD_OK) {
        return status;
    }
    setting_name within = name_within(n);
    if (same_subject(&within, &n->name) && within.generation == n->name.generation) {
        return CKD_OK;
    }
    return err_corrupt(err, path, CKD_NO_OFFSET,
                       "this file holds the setting of %s, which does not match its name", within.name);
}

/* Reads the content, and sets everything but the name. */
static ckd_status read_setting(stored_setting *n, const ckd_store *store, ckd_error *err) {
    pathname p = path_setting(store->path, &n->name);
    setting_name name = n->name;
    bytes data = {0};
    *n = (stored_setting){.name = name};
    ckd_status status = file_read_all(&data, p.text, METADATA_MAX, err);
    THEN(status, decode(n, &store->id, &data, p.text, err));
    bytes_free(&data);
    if (status != CKD_OK) {
        *n = (stored_setting){.name = name, .status = status};
    }
    return status;
}

/* Lists the names of all generations. */
static ckd_status list_setting_names(setting_list *out, const ckd_store *store, ckd_error *err) {
    dir_list list;
    *out = (setting_list){0};
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_SETTINGS).text, &why);
    if (status != CKD_OK) { /* copies and archives drop empty folders */
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    out->items = calloc(list.count + 1, sizeof(*out->items));
    if (!out->items) {
        status = err_nomem(err, list.count * sizeof(*out->items), "the names of settings");
    }
    for (size_t i = 0; i < list.count && out->items; i++) {
        if (setting_name_parse(&out->items[out->count].name, list.names[i])) {
            out->count++;
        }
    }
    dir_list_free(&list);
    if (out->count) {
        qsort(out->items, out->count, sizeof(*out->items), by_name);
    }
    return status;
}

/* only: this kind; 0: all. *vanished: a listed file no longer exists. */
static ckd_status read_once(setting_list *out, bool *vanished, const ckd_store *store, metadata_kind only,
                            ckd_error *err) {
    ckd_status status = list_setting_names(out, store, err);
    size_t kept = 0;
    *vanished = false;
    for (size_t i = 0; i < out->count && status == CKD_OK; i++) {
        stored_setting *n = &out->items[i];
        bool wanted = !only || n->name.kind == only;
        if (!wanted || (kept > 0 && same_subject(&n->name, &out->items[kept - 1].name))) {
            continue;
        }
        ckd_error why = {0};
        out->items[kept] = *n;
        ckd_status found = read_setting(&out->items[kept++], store, &why);
        *vanished = *vanished || found == CKD_E_NOT_FOUND;
        status = found == CKD_E_NOMEM ? err_from(err, found, &why) : CKD_OK;
    }
    out->count = kept;
    return status;
}

ckd_status settings_read_kind(setting_list *out, const ckd_store *store, metadata_kind only, ckd_error *err) {
    enum { TRIES = 100 };
    bool vanished = true;
    ckd_status status = CKD_OK;
    *out = (setting_list){0};
    for (int i = 0; i < TRIES && vanished && status == CKD_OK; i++) {
        settings_free(out);
        status = read_once(out, &vanished, store, only, err);
    }
    return status;
}

ckd_status settings_read(setting_list *out, const ckd_store *store, ckd_error *err) {
    return settings_read_kind(out, store, (metadata_kind)0, err);
}

void settings_free(setting_list *n) {
    free(n->items);
    *n = (setting_list){0};
}

const stored_setting *settings_find(const setting_list *n, metadata_kind kind, const char *name) {
    for (size_t i = 0; i < n->count; i++) {
        if (n->items[i].name.kind == kind && strcmp(n->items[i].name.name, name) == 0) {
            return &n->items[i];
        }
    }
    return NULL;
}

ckd_status settings_why(const stored_setting *setting, const ckd_store *store, ckd_error *err) {
    stored_setting copy = *setting;
    return setting->status == CKD_OK ? CKD_OK : read_setting(&copy, store, err);
}

ckd_status settings_check(const setting_list *n, const ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        ckd_error why = {0};
        if (n->items[i].name.kind == METADATA_PARITY || n->items[i].name.kind == METADATA_RENAME) {
            continue; /* it keeps nothing */
        }
        status = settings_why(&n->items[i], store, &why);
        if (status != CKD_OK && status != CKD_E_NOMEM) { /* the other fields of `why` say where */
            char text[sizeof(why.message)];
            snprintf(
                text, sizeof(text),
                "%.300s; nothing is deleted until this is fixed, as the setting may protect checkpoints: "
                "restore the file, or set or delete the %s again",
                why.message, setting_word(n->items[i].name.kind));
            memcpy(why.message, text, sizeof(text));
        }
        err_from(err, status, &why);
    }
    return status;
}

/* ---- what settings keep ---- */

unsigned settings_kept_why(const setting_list *n, const ckd_id *checkpoint) {
    unsigned reasons = 0;
    for (size_t i = 0; i < n->count; i++) {
        const stored_setting *x = &n->items[i];
        if (x->name.kind == METADATA_PIN) {
            reasons |= id_equal(&x->pin.checkpoint, checkpoint) ? CKD_KEPT_PINNED : 0;
        } else if (x->name.kind == METADATA_TAG) {
            reasons |= id_equal(&x->tag.checkpoint, checkpoint) ? CKD_KEPT_TAGGED : 0;
        }
    }
    return reasons;
}

static const stored_setting *about_run(const setting_list *n, metadata_kind kind, const char *run) {
    const stored_setting *own = settings_find(n, kind, run);
    return own ? own : settings_find(n, kind, POLICY_OF_ALL);
}

/* The user has not yet decided which checkpoints to keep that a repair brought back under another name. */
const stored_setting *settings_policy(const setting_list *n, const char *run) {
    return is_returned_name(run) ? settings_find(n, METADATA_POLICY, run)
                                 : about_run(n, METADATA_POLICY, run);
}

const stored_setting *settings_parity(const setting_list *n, const char *run) {
    return about_run(n, METADATA_PARITY, run);
}

const stored_setting *settings_rename(const setting_list *n, const char *run, const stored_setting *own) {
    const stored_setting *found = NULL;
    for (size_t i = 0; i < n->count && !found; i++) {
        const stored_setting *s = &n->items[i];
        bool counts = s->name.kind == METADATA_RENAME && s->status == CKD_OK && s != own;
        found = counts && (strcmp(s->rename.run, run) == 0 || strcmp(s->rename.to, run) == 0) ? s : NULL;
    }
    return found;
}

ckd_status settings_refuse_renamed(const stored_setting *record, ckd_error *err) {
    return err_set(err, CKD_E_BUSY,
                   "run '%s' is being renamed to '%s', which will be completed when all loads have ended",
                   record->rename.run, record->rename.to);
}

ckd_status settings_check_not_renamed(const ckd_store *store, const char *run, ckd_error *err) {
    setting_list all = {0};
    ckd_status status = settings_read_kind(&all, store, METADATA_RENAME, err);
    const stored_setting *record = status == CKD_OK ? settings_rename(&all, run, NULL) : NULL;
    status = record ? settings_refuse_renamed(record, err) : status;
    settings_free(&all);
    return status;
}

static ckd_status refuse(const stored_setting *n, const ckd_checkpoint *c, ckd_error *err) {
    if (n->name.kind == METADATA_TAG) {
        return err_set(err, CKD_E_STATE,
                       "%s@%llu has the tag %s: move or delete that first (ckptdelta tag --delete)", c->run,
                       (unsigned long long)c->step, n->tag.tag);
    }
    const char *reason = n->pin.reason;
    return err_set(err, CKD_E_STATE, "%s@%llu is pinned%s%s%s: unpin it first (ckptdelta pin --delete)",
                   c->run, (unsigned long long)c->step, reason[0] ? " (" : "", reason, reason[0] ? ")" : "");
}

ckd_status settings_check_chosen(const ckd_store *store, const manifest_set *chosen, ckd_error *err) {
    setting_list n = {0};
    ckd_status status = settings_read(&n, store, err);
    THEN(status, settings_check(&n, store, err));
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        const stored_setting *x = &n.items[i];
        const manifest_entry *kept =
            manifest_set_find(chosen, x->name.kind == METADATA_PIN ? &x->pin.checkpoint : &x->tag.checkpoint);
        bool keeps = x->name.kind == METADATA_PIN || x->name.kind == METADATA_TAG;
        if (keeps && kept && kept->chosen) {
            status = refuse(x, &kept->m.checkpoint, err);
        }
    }
    settings_free(&n);
    return status;
}

/* ---- changing ---- */

/* Removes the generations of a subject below name->generation, lowest first. They have no effect any more. */
static ckd_status remove_below(const ckd_store *store, const setting_name *name, ckd_error *err) {
    setting_list all;
    ckd_status status = list_setting_names(&all, store, err);
    for (size_t i = all.count; i-- > 0 && status == CKD_OK;) {
        const setting_name *old = &all.items[i].name;
        if (same_subject(old, name) && old->generation < name->generation) {
            status = file_remove(path_setting(store->path, old).text, true, err);
        }
    }
    settings_free(&all);
    return status;
}

ckd_status settings_publish(const ckd_store *store, const setting_name *name, const bytes *encoded,
                            ckd_error *err) {
    ckd_id unique;
    char hex[CKD_ID_TEXT], temp[64];
    if (encoded->failed) {
        return err_nomem(err, encoded->size, "a setting");
    }
    ckd_status status = ckd_id_new(&unique, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_id_text(hex, &unique);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname temporary = path_of(store->path, DIR_SETTINGS, temp);
    status = file_publish_durable(NULL, path_setting(store->path, name).text, temporary.text, encoded->data,
                                  encoded->size, err);
    if (status != CKD_OK) {
        file_remove(temporary.text, true, NULL);
        return status;
    }
    remove_below(store, name, NULL); /* a lower generation that stays has no effect */
    return CKD_OK;
}

/* Refuses to replace a newer version's setting. */
static ckd_status check_replaceable(const stored_setting *n, const ckd_store *store, ckd_error *err) {
    bool replaceable = n->status == CKD_OK || n->status == CKD_E_CORRUPT;
    return replaceable ? CKD_OK : settings_why(n, store, err);
}

/* Finds the newest generation; before->name.kind is 0 if there is none. */
static ckd_status find_newest(stored_setting *before, const ckd_store *store, metadata_kind kind,
                              const char *name, ckd_error *err) {
    setting_list all;
    *before = (stored_setting){0};
    ckd_status status = settings_read(&all, store, err);
    const stored_setting *found = status == CKD_OK ? settings_find(&all, kind, name) : NULL;
    if (found) {
        *before = *found;
        status = check_replaceable(found, store, err);
    }
    settings_free(&all);
    return status;
}

ckd_status settings_next(setting_name *out, stored_setting *before, const ckd_store *store,
                         metadata_kind kind, const char *name, ckd_error *err) {
    *out = (setting_name){.kind = kind};
    snprintf(out->name, sizeof(out->name), "%s", name);
    ckd_status status = find_newest(before, store, kind, name, err);
    if (status != CKD_OK || !before->name.kind) {
        return status;
    }
    if (before->name.generation == UINT32_MAX) {
        return err_set(
            err, CKD_E_INVALID,
            "the setting of %s has no generation number left for a change; delete it, then set it again",
            name);
    }
    out->generation = before->name.generation + 1;
    return CKD_OK;
}

/*
 * Lower generations are removed durably before the one that counts, so that no power cut brings an older setting back.
 */
ckd_status settings_remove(const ckd_store *store, metadata_kind kind, const char *name, ckd_error *err) {
    stored_setting last;
    pathname folder = path_in(store->path, DIR_SETTINGS);
    ckd_status status = find_newest(&last, store, kind, name, err);
    if (status == CKD_OK && !last.name.kind) { /* the process that removed it may have died before syncing */
        status = dir_sync(folder.text, err);
        return status != CKD_OK ? status : err_set(err, CKD_E_NOT_FOUND, "there is no setting of %s", name);
    }
    THEN(status, remove_below(store, &last.name, err));
    if (status == CKD_OK && last.name.generation > 0) {
        status = dir_sync(folder.text, err);
    }
    THEN(status, file_remove(path_setting(store->path, &last.name).text, true, err));
    return status == CKD_OK ? dir_sync(folder.text, err) : status;
}
