/* Checks pins, tags, policies and parity settings for damage, for verify, scrub and repair. Internal to engine/. */
#ifndef ENGINE_STORE_SETTINGS_CHECK_H
#define ENGINE_STORE_SETTINGS_CHECK_H

#include "engine/store/damage.h"

/* Adds unreadable settings to the damage. They harm no checkpoint, but block deletions. Errors: IO, NOMEM. */
ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err);

#endif
