/* The store, as other rooms see it: the handle, its manifests, views of checkpoints, damage. */
#ifndef ENGINE_STORE_STORE_H
#define ENGINE_STORE_STORE_H

#include "engine/store/handle.h"
#include "engine/store/manifests.h"
#include "engine/store/view.h"
#include "engine/store/damage.h"

#endif
