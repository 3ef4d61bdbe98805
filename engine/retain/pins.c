/* Sets, removes and lists pins and tags. store/settings.c finds which checkpoints they protect. */
#include <stdio.h>
#include <stdlib.h>

#include "base/vocabulary.h"
#include "engine/store/store.h"

/* A change of one setting. The caller holds the publish lock. */
typedef struct setting_change {
    metadata_kind kind;
    const char *name;         /* of the setting */
    const ckd_id *checkpoint; /* must exist; NULL: the setting is removed */
    const char *reason;
    bool move;
} setting_change;

/* Brings the catalog in step with the manifests first. The caller holds the publish lock. */
static ckd_status check_listed(ckd_store *store, const ckd_id *checkpoint, ckd_error *err) {
    ckd_checkpoint found;
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh_catalog_locked(store, err);
    THEN(status, catalog_find_id(&found, store->catalog, checkpoint, err));
    pthread_mutex_unlock(&store->mutex);
    if (status == CKD_E_NOT_FOUND) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, checkpoint);
        status = err_set(err, CKD_E_NOT_FOUND, "the store has no checkpoint %s", hex);
    }
    return status;
}

/* *same: there is nothing to do. */
static ckd_status check_before(bool *same, const setting_change *c, const stored_setting *before,
                               const ckd_store *store, ckd_error *err) {
    *same = false;
    if (!before->name.kind) {
        return CKD_OK;
    }
    if (before->status != CKD_OK) { /* damaged */
        return c->kind == METADATA_PIN || c->move ? CKD_OK : settings_why(before, store, err);
    }
    if (c->kind == METADATA_PIN) {
        *same = strcmp(before->pin.reason, c->reason) == 0;
        return CKD_OK;
    }
    *same = id_equal(&before->tag.checkpoint, c->checkpoint);
    if (*same || c->move) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_EXISTS,
                   "the tag %s belongs to another checkpoint; move it, or choose another name", c->name);
}

static void encode(bytes *to, const ckd_store *store, const setting_change *c, const setting_name *name) {
    if (c->kind == METADATA_PIN) {
        pin_setting pin = {
            .checkpoint = *c->checkpoint, .generation = name->generation, .pinned_ns = clock_wall_ns()};
        snprintf(pin.reason, sizeof(pin.reason), "%s", c->reason);
        pin_encode(to, &store->id, &pin);
    } else {
        tag_setting tag = {
            .checkpoint = *c->checkpoint, .generation = name->generation, .tagged_ns = clock_wall_ns()};
        memcpy(tag.tag, name->name, sizeof(tag.tag));
        tag_encode(to, &store->id, &tag);
    }
}

static ckd_status publish_change(ckd_store *store, const setting_change *c, ckd_error *err) {
    setting_name next;
    stored_setting before;
    bool same = false;
    ckd_status status = check_listed(store, c->checkpoint, err);
    THEN(status, settings_next(&next, &before, store, c->kind, c->name, err));
    THEN(status, check_before(&same, c, &before, store, err));
    if (status != CKD_OK) {
        return status;
    }
    /* The process that wrote the setting may have died before it was durable. */
    if (same) {
        return dir_sync(path_in(store->path, DIR_SETTINGS).text, err);
    }
    bytes encoded = {0};
    encode(&encoded, store, c, &next);
    status = settings_publish(store, &next, &encoded, err);
    bytes_free(&encoded);
    return status;
}

static ckd_status change(ckd_store *store, const setting_change *c, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_check_writable(store, err);
    THEN(status, store_lock_publish(&lock, store, err));
    if (status != CKD_OK) {
        return status;
    }
    status = c->checkpoint ? publish_change(store, c, err) : settings_remove(store, c->kind, c->name, err);
    lock_release(lock);
    return status;
}

/* ---- pins ---- */

ckd_status ckd_store_pin(ckd_store *store, const ckd_id *checkpoint, const char *reason, ckd_error *err) {
    char hex[CKD_ID_TEXT];
    setting_change c = {
        .kind = METADATA_PIN, .name = hex, .checkpoint = checkpoint, .reason = reason ? reason : ""};
    ckd_id_text(hex, checkpoint);
    if (strlen(c.reason) > CKD_REASON_MAX || !utf8_valid(c.reason, strlen(c.reason))) {
        return err_set(err, CKD_E_INVALID, "the reason of a pin is at most %d bytes of UTF-8",
                       CKD_REASON_MAX);
    }
    return change(store, &c, err);
}

ckd_status ckd_store_unpin(ckd_store *store, const ckd_id *checkpoint, ckd_error *err) {
    char hex[CKD_ID_TEXT];
    setting_change c = {.kind = METADATA_PIN, .name = hex};
    ckd_id_text(hex, checkpoint);
    ckd_status status = change(store, &c, err);
    return status == CKD_E_NOT_FOUND ? err_set(err, status, "checkpoint %s is not pinned", hex) : status;
}

/* The number of settings of a kind. */
static size_t count_of(const setting_list *n, metadata_kind kind) {
    size_t count = 0;
    for (size_t i = 0; i < n->count; i++) {
        count += n->items[i].name.kind == kind;
    }
    return count;
}

static void fill_pins(ckd_pin_list *list, const setting_list *n) {
    for (size_t i = 0; i < n->count; i++) {
        const stored_setting *x = &n->items[i];
        if (x->name.kind == METADATA_PIN) {
            ckd_pin *pin = &list->items[list->count++];
            *pin = (ckd_pin){.status = x->status, .pinned_ns = x->pin.pinned_ns};
            (void)id_parse(&pin->checkpoint, x->name.name);
            memcpy(pin->reason, x->pin.reason, sizeof(pin->reason));
        }
    }
}

ckd_status ckd_store_pins(ckd_pin_list **out, ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    *out = NULL;
    ckd_pin_list *list = calloc(1, sizeof(*list));
    ckd_status status = list ? settings_read_kind(&n, store, METADATA_PIN, err)
                             : err_nomem(err, sizeof(*list), "a list of pins");
    if (status == CKD_OK) {
        list->items = calloc(count_of(&n, METADATA_PIN) + 1, sizeof(*list->items));
        status = list->items ? CKD_OK : err_nomem(err, n.count * sizeof(*list->items), "a list of pins");
    }
    if (status == CKD_OK) {
        fill_pins(list, &n);
        *out = list;
    } else {
        ckd_pin_list_free(list);
    }
    settings_free(&n);
    return status;
}

void ckd_pin_list_free(ckd_pin_list *list) {
    if (list) {
        free(list->items);
        free(list);
    }
}

/* ---- tags ---- */

static ckd_status check_tag(const char *tag, ckd_error *err) {
    return run_name_valid(tag)
               ? CKD_OK
               : err_set(err, CKD_E_INVALID,
                         "a tag is 1 to %d of A-Z a-z 0-9 . _ - ~, not starting with a dot or "
                         "a dash",
                         CKD_RUN_MAX);
}

ckd_status ckd_store_set_tag(ckd_store *store, const char *tag, const ckd_id *checkpoint, int move,
                             ckd_error *err) {
    setting_change c = {.kind = METADATA_TAG, .name = tag, .checkpoint = checkpoint, .move = move != 0};
    ckd_status status = check_tag(tag, err);
    return status == CKD_OK ? change(store, &c, err) : status;
}

static ckd_status no_such_tag(const char *tag, ckd_error *err) {
    return err_set(err, CKD_E_NOT_FOUND, "the store has no tag %s", tag);
}

ckd_status ckd_store_remove_tag(ckd_store *store, const char *tag, ckd_error *err) {
    setting_change c = {.kind = METADATA_TAG, .name = tag};
    ckd_status status = check_tag(tag, err);
    THEN(status, change(store, &c, err));
    return status == CKD_E_NOT_FOUND ? no_such_tag(tag, err) : status;
}

static void fill_tags(ckd_tag_list *list, const setting_list *n) {
    for (size_t i = 0; i < n->count; i++) {
        const stored_setting *x = &n->items[i];
        if (x->name.kind == METADATA_TAG) {
            ckd_tag *tag = &list->items[list->count++];
            *tag = (ckd_tag){
                .status = x->status, .checkpoint = x->tag.checkpoint, .tagged_ns = x->tag.tagged_ns};
            memcpy(tag->tag, x->name.name, sizeof(tag->tag));
        }
    }
}

ckd_status ckd_store_tags(ckd_tag_list **out, ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    *out = NULL;
    ckd_tag_list *list = calloc(1, sizeof(*list));
    ckd_status status = list ? settings_read_kind(&n, store, METADATA_TAG, err)
                             : err_nomem(err, sizeof(*list), "a list of tags");
    if (status == CKD_OK) {
        list->items = calloc(count_of(&n, METADATA_TAG) + 1, sizeof(*list->items));
        status = list->items ? CKD_OK : err_nomem(err, n.count * sizeof(*list->items), "a list of tags");
    }
    if (status == CKD_OK) {
        fill_tags(list, &n);
        *out = list;
    } else {
        ckd_tag_list_free(list);
    }
    settings_free(&n);
    return status;
}

void ckd_tag_list_free(ckd_tag_list *list) {
    if (list) {
        free(list->items);
        free(list);
    }
}

ckd_status ckd_store_find_tag(ckd_checkpoint *out, ckd_store *store, const char *tag, ckd_error *err) {
    setting_list n = {0};
    memset(out, 0, sizeof(*out));
    ckd_status status = check_tag(tag, err);
    THEN(status, settings_read_kind(&n, store, METADATA_TAG, err));
    const stored_setting *found = status == CKD_OK ? settings_find(&n, METADATA_TAG, tag) : NULL;
    THEN(status, found ? settings_why(found, store, err) : no_such_tag(tag, err));
    THEN(status, store_find_id(out, store, &found->tag.checkpoint, err));
    if (status == CKD_E_NOT_FOUND && found) {
        status = err_set(err, status, "the checkpoint that has the tag %s is not in the store any more", tag);
    }
    settings_free(&n);
    return status;
}
