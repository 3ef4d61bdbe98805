/* The interface of engine/ranks/ for other rooms. README.md has an overview. */
#ifndef ENGINE_RANKS_RANKS_H
#define ENGINE_RANKS_RANKS_H

#include "engine/store/store.h"

/* members.c: Removes the files of dead ranks from data/r. The caller holds the publish lock. */
ckd_status ranks_recover(const ckd_store *store, ckd_error *err);

#endif
