/* The blocks of its own checkpoint that an optimizer step builds on. Internal to engine/. Thread-safe. */
#ifndef ENGINE_DECODE_STEP_INPUTS_H
#define ENGINE_DECODE_STEP_INPUTS_H

#include "engine/decode/cost.h"
#include "engine/store/view.h"

/* The step's dependency `index`, if that is one block of the same checkpoint over the same span; else NULL. */
const view_block *step_input(const view *v, const view_block *b, uint32_t index);
/*
 * The cost that the block adds to loading the rest of its checkpoint. For a step, this excludes the moments that it is
 * predicted from, as they are loaded with it (sibling_cache.h).
 */
load_cost step_share(const view *v, const view_block *b);

#endif
