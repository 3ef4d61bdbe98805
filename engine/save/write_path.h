/* How large chunk files of saves are written (ckd_store_options.write_path). Internal to engine/. */
#ifndef ENGINE_WRITE_PATH_H
#define ENGINE_WRITE_PATH_H

#include "engine/save/save.h"

/* For the chunk file of this save, which is not created yet: by default the fastest way, which may have to be found first. Takes the store's mutex. */
file_way write_path_choose(ckd_save *save);
/* In a transaction, with the mutex: what was found, if that is new. */
ckd_status write_path_note(ckd_store *store, ckd_error *err);
/*
 * Bytes that the checkpoint before must take (or the state, where a session makes the first one), so that a save's file is taken to be large: for tests, which have no time to
 * make such. Not while a save is under way.
 */
void store_probe_from(uint64_t size);

#endif
