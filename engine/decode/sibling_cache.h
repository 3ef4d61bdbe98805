/*
 * What a load decodes anyway, kept until it is asked for. Weights that are an optimizer step are rebuilt together with their moments, and
 * with those of every ancestor; asked for one after the other, all of that would be done again for the second moments. So of the
 * checkpoint that is being loaded, moments that weights were rebuilt from are kept, and second moments are
 * rebuilt as part of their weights, which are kept. At most `limit` bytes are held; beyond that, blocks are decoded again.
 * Internal to engine/; thread-safe.
 */
#ifndef ENGINE_DECODE_SIBLING_CACHE_H
#define ENGINE_DECODE_SIBLING_CACHE_H

#include "engine/decode/values.h"

typedef struct sibling_cache {
    pthread_mutex_t mutex;
    const view *view;
    const view_block *
        *dependent_weights; /* by number of the view's block: the weights predicted from it, or NULL */
    void **cached;          /* by the same: its values, or NULL */
    bool *handed_out;       /* by the same: all of it was handed out already */
    uint64_t bytes, limit;
} sibling_cache;

/* Leaves out->view NULL if the checkpoint has no steps: then there is nothing to share, and sibling_cache_scatter must not be called. */
ckd_status sibling_cache_init(sibling_cache *out, const view *v, uint64_t limit, ckd_error *err);
void sibling_cache_free(sibling_cache *s);

/* Is it a step, or rebuilt together with one? */
bool sibling_cache_has(const sibling_cache *s, const view_block *b);
/* As block_into_span, of one of the view's blocks. */
ckd_status sibling_cache_scatter(sibling_cache *s, decoder *d, view_cache *cache, const view_tensor *t,
                                 const view_block *b, const span *want, void *to, uint64_t *copied,
                                 ckd_error *err);

#endif
