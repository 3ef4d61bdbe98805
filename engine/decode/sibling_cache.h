/*
 * Keeps values that a load decodes as a by-product, until they are requested. Weights stored as an optimizer step are
 * rebuilt together with their moments, and with those of every ancestor. If the second moments are requested next, all
 * that work would be repeated. So moments of the loaded checkpoint that weights were rebuilt from are kept. Second
 * moments are rebuilt as part of their weights, which are kept too. At most `limit` bytes are held; beyond that, blocks
 * are decoded again. Internal to engine/; thread-safe.
 */
#ifndef ENGINE_DECODE_SIBLING_CACHE_H
#define ENGINE_DECODE_SIBLING_CACHE_H

#include "engine/decode/values.h"

typedef struct sibling_cache {
    pthread_mutex_t mutex;
    const view *view;
    const view_block *
        *dependent_weights; /* by index of the view's block: the weights predicted from it, or NULL */
    void **cached;          /* likewise: its values, or NULL */
    bool *handed_out;       /* likewise: all of it was handed out */
    uint64_t bytes, limit;
} sibling_cache;

/*
 * Leaves out->view NULL if the checkpoint has no steps: nothing is shared then, and sibling_cache_scatter must not be
 * called.
 */
ckd_status sibling_cache_init(sibling_cache *out, const view *v, uint64_t limit, ckd_error *err);
void sibling_cache_free(sibling_cache *s);

/* Whether the block is a step, or is rebuilt together with one. */
bool sibling_cache_has(const sibling_cache *s, const view_block *b);
/* Like block_into_span, for one of the view's blocks. */
ckd_status sibling_cache_scatter(sibling_cache *s, decoder *d, const view_block *b, const span_target *target,
                                 uint64_t *copied, ckd_error *err);

#endif
