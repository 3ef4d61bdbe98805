/*
 * What a load decodes anyway, kept until it is asked for. Weights that are an optimizer step are rebuilt together with their moments, and
 * with those of every ancestor; asked for one after the other, all of that would be done again for the second moments. So of the
 * checkpoint that is being loaded, moments that weights were rebuilt from are kept, and second moments are
 * rebuilt as part of their weights, which are kept. At most `limit` bytes are held; beyond that, blocks are decoded again.
 * Internal to engine/; thread-safe.
 */
#ifndef ENGINE_LOAD_SHARED_H
#define ENGINE_LOAD_SHARED_H

#include "engine/decode/values.h"

typedef struct load_shared {
    pthread_mutex_t mutex;
    const view *view;
    const view_block **leaders; /* by number of the view's block: the weights predicted from it, or NULL */
    void **kept;                /* by the same: its values, or NULL */
    bool *given;                /* by the same: all of it was handed out already */
    uint64_t bytes, limit;
} load_shared;

/* Leaves out->view NULL if the checkpoint has no steps: then there is nothing to share, and load_shared_place must not be called. */
ckd_status load_shared_init(load_shared *out, const view *v, uint64_t limit, ckd_error *err);
void load_shared_free(load_shared *s);

/* Is it a step, or rebuilt together with one? */
bool load_shared_has(const load_shared *s, const view_block *b);
/* As block_into_span, of one of the view's blocks. */
ckd_status load_shared_place(load_shared *s, decoder *d, view_cache *cache, const view_tensor *t,
                             const view_block *b, const span *want, void *to, uint64_t *copied,
                             ckd_error *err);

#endif
