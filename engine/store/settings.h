/*
 * The settings in data/n, which say what a store is to keep and to cover by parity: pins, tags, policies and parity settings. codec/FORMAT.md, "What is kept". Internal to engine/.
 *
 * Each has a name and generations, of which the highest counts, readable or not: a lower one is what it said before. Settings change only under the
 * publish lock; who reads them without it tries again when one has gone meanwhile.
 */
#ifndef ENGINE_STORE_SETTINGS_H
#define ENGINE_STORE_SETTINGS_H

#include "engine/store/manifest_set.h"

typedef struct stored_setting {
    setting_name name;
    ckd_status status; /* CKD_OK, or why it cannot be read: then only the name is known */
    pin_setting pin;   /* the one that the name says */
    tag_setting tag;
    policy_setting policy;
    parity_setting parity;
} stored_setting;

typedef struct setting_list {
    stored_setting *items; /* by kind, then name; of each the highest generation */
    size_t count;
} setting_list;

/* All settings, those that cannot be read included. Release with settings_free, also after failures. Errors: IO (the folder), NOMEM. */
ckd_status settings_read(setting_list *out, const ckd_store *store, ckd_error *err);
/* Only those of one kind: the others' files are not read. */
ckd_status settings_read_kind(setting_list *out, const ckd_store *store, metadata_kind kind, ckd_error *err);
void settings_free(setting_list *n);
/* NULL: there is none. */
const stored_setting *settings_find(const setting_list *n, metadata_kind kind, const char *name);
/* Why a setting cannot be read, naming its file; CKD_OK: it can. */
ckd_status settings_why(const stored_setting *setting, const ckd_store *store, ckd_error *err);
/* The same of the first that cannot: what it keeps is not known, so nothing may be deleted. */
ckd_status settings_check(const setting_list *n, const ckd_store *store, ckd_error *err);
/* Which of CKD_KEPT_PINNED and CKD_KEPT_TAGGED are true of a checkpoint. */
unsigned settings_kept_why(const setting_list *n, const ckd_id *checkpoint);
/* The policy of a run: its own, else that of all others; also one that cannot be read. NULL: there is none. */
const stored_setting *settings_policy(const setting_list *n, const char *run);
/* The same of how its chunk files are to be covered by parity. */
const stored_setting *settings_parity(const setting_list *n, const char *run);
/* STATE, and what to do about it, if a chosen checkpoint is pinned or tagged. CORRUPT and others: as settings_check. */
ckd_status settings_check_chosen(const ckd_store *store, const manifest_set *chosen, ckd_error *err);

/*
 * Changes, under the publish lock. Publishes the setting that `encoded` holds, durably, and takes away what it said before. A failure may leave the one or
 * the other.
 */
ckd_status settings_publish(const ckd_store *store, const setting_name *name, const bytes *encoded,
                            ckd_error *err);
/* NOT_FOUND without a message about what is missing; UNSUPPORTED: it means something to a newer version. One that is damaged goes. */
ckd_status settings_remove(const ckd_store *store, metadata_kind kind, const char *name, ckd_error *err);
/*
 * The name that the next setting of something gets. `before` (zeroed if there is none) is what it says now. Errors: UNSUPPORTED (the setting
 * there is of a newer version, and must not be replaced), INVALID (no generation is left), IO, NOMEM.
 */
ckd_status settings_next(setting_name *out, stored_setting *before, const ckd_store *store,
                         metadata_kind kind, const char *name, ckd_error *err);

#endif
