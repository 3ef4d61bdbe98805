/*
 * Settings in data/n, which say what a store keeps and what parity covers: pins, tags, policies and parity settings.
 * Also runs that are being renamed. codec/FORMAT.md, "What is kept". Internal to engine/.
 *
 * Each has a name and generations. The highest generation counts even if it is unreadable, as lower ones are outdated.
 * Settings change only under the publish lock. A reader without the lock retries when a file has disappeared meanwhile.
 */
#ifndef ENGINE_STORE_SETTINGS_H
#define ENGINE_STORE_SETTINGS_H

#include "engine/store/manifest_set.h"

typedef struct stored_setting {
    setting_name name;
    ckd_status status; /* CKD_OK, or why it is unreadable; then only the name is valid */
    pin_setting pin;   /* name.kind says which of these is valid */
    tag_setting tag;
    policy_setting policy;
    parity_setting parity;
    rename_setting rename;
} stored_setting;

typedef struct setting_list {
    stored_setting *items; /* by kind, then name; only the highest generations */
    size_t count;
} setting_list;

/*
 * Reads all settings, unreadable ones included. Release with settings_free, also after failures. Errors: IO (the
 * folder), NOMEM.
 */
ckd_status settings_read(setting_list *out, const ckd_store *store, ckd_error *err);
/* Reads the settings of one kind only. */
ckd_status settings_read_kind(setting_list *out, const ckd_store *store, metadata_kind kind, ckd_error *err);
void settings_free(setting_list *n);
/* NULL: there is none. */
const stored_setting *settings_find(const setting_list *n, metadata_kind kind, const char *name);
/* Returns why a setting is unreadable, naming its file; CKD_OK if it is readable. */
ckd_status settings_why(const stored_setting *setting, const ckd_store *store, ckd_error *err);
/* The same for the first unreadable setting. Its effect is unknown, so nothing may be deleted. */
ckd_status settings_check(const setting_list *n, const ckd_store *store, ckd_error *err);
/* Which of CKD_KEPT_PINNED and CKD_KEPT_TAGGED apply to a checkpoint. */
unsigned settings_kept_why(const setting_list *n, const ckd_id *checkpoint);
/* The policy of a run: its own, else the one for all other runs; readable or not. NULL: there is none. */
const stored_setting *settings_policy(const setting_list *n, const char *run);
/* The same for parity settings. */
const stored_setting *settings_parity(const setting_list *n, const char *run);
/* Fails if a chosen checkpoint is pinned or tagged, and says what to do. Errors: STATE, those of settings_check. */
ckd_status settings_check_chosen(const ckd_store *store, const manifest_set *chosen, ckd_error *err);

/*
 * Publishes the encoded setting durably, then removes lower generations. After a failure, either the old or the new one
 * counts. Under the publish lock.
 */
ckd_status settings_publish(const ckd_store *store, const setting_name *name, const bytes *encoded,
                            ckd_error *err);
/*
 * Removes a setting, even a damaged one. Under the publish lock. Errors: NOT_FOUND (the message leaves the
 * kind out), UNSUPPORTED (a newer version wrote it), IO, NOMEM.
 */
ckd_status settings_remove(const ckd_store *store, metadata_kind kind, const char *name, ckd_error *err);
/*
 * Sets the name of the next generation. *before is the present setting, zeroed if there is none. Errors: UNSUPPORTED
 * (the present setting is a newer version's, and must not be replaced), INVALID (no generation is left), IO, NOMEM.
 */
ckd_status settings_next(setting_name *out, stored_setting *before, const ckd_store *store,
                         metadata_kind kind, const char *name, ckd_error *err);

#endif
