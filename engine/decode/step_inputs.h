/* What a block that an optimizer step predicts builds on, in its own checkpoint. Internal to engine/. Thread-safe. */
#ifndef ENGINE_DECODE_STEP_INPUTS_H
#define ENGINE_DECODE_STEP_INPUTS_H

#include "engine/decode/cost.h"
#include "engine/store/view.h"

/* A step's dependency number `index`, if it is one block of the same checkpoint over the same span; else NULL. */
const view_block *step_input(const view *v, const view_block *b, uint32_t index);
/*
 * What loading the block adds to loading the rest of its checkpoint: of a step, not the moments that it is predicted from, which are
 * loaded with it. (sibling_cache.h)
 */
load_cost step_share(const view *v, const view_block *b);

#endif
