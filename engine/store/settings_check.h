/* Looking for damage in pins, tags, policies and parity settings: of verify, scrub and repair. Internal to engine/. */
#ifndef ENGINE_STORE_SETTINGS_CHECK_H
#define ENGINE_STORE_SETTINGS_CHECK_H

#include "engine/store/damage.h"

/* Adds those that cannot be read to the damage. No checkpoint suffers, but none can be deleted. Errors: IO, NOMEM. */
ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err);

#endif
