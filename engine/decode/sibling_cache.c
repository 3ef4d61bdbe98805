/*
 * Keeps the moments that a load decodes while it rebuilds weights from optimizer steps, until they are requested.
 * Without it, their chains would be decoded twice.
 */
#include "engine/decode/internal.h"

#include <stdlib.h>

static size_t number_of(const sibling_cache *s, const view_block *b) {
    return (size_t)(b - s->view->blocks);
}

/* ---- blocks that are rebuilt together ---- */

static bool is_step(const view_block *b) {
    return b->record->predictor == PREDICT_STEP && !b->materialized;
}

/* The weights of a group lead their moments. If the weights are no step, second moments lead first ones. */
static void set_dependent_weights(sibling_cache *s, const view_block *b) {
    for (uint32_t i = 1; i < b->record->dependency_count; i++) {
        const view_block *input = step_input(s->view, b->record, i);
        const view_block **dependent_weight = input ? &s->dependent_weights[number_of(s, input)] : NULL;
        if (dependent_weight &&
            (!*dependent_weight || (*dependent_weight)->record->tensor->role == CKD_ROLE_EXP_AVG_SQ)) {
            *dependent_weight = b;
        }
    }
}

ckd_status sibling_cache_init(sibling_cache *out, const view *v, uint64_t limit, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    out->limit = limit;
    pthread_mutex_init(&out->mutex, NULL);
    bool any = false;
    for (size_t i = 0; i < v->block_count && !any; i++) {
        any = is_step(&v->blocks[i]);
    }
    if (!any) {
        return CKD_OK;
    }
    out->dependent_weights = calloc(v->block_count, sizeof(*out->dependent_weights));
    out->cached = calloc(v->block_count, sizeof(*out->cached));
    out->handed_out = calloc(v->block_count, sizeof(*out->handed_out));
    if (!out->dependent_weights || !out->cached || !out->handed_out) {
        return err_nomem(err, v->block_count * sizeof(*out->cached), "blocks of a load");
    }
    out->view = v;
    for (size_t i = 0; i < v->block_count; i++) {
        if (is_step(&v->blocks[i])) {
            set_dependent_weights(out, &v->blocks[i]);
        }
    }
    return CKD_OK;
}

void sibling_cache_free(sibling_cache *s) {
    for (size_t i = 0; s->view && i < s->view->block_count; i++) {
        free(s->cached[i]);
    }
    free(s->dependent_weights);
    free(s->cached);
    free(s->handed_out);
    pthread_mutex_destroy(&s->mutex);
    memset(s, 0, sizeof(*s));
}

bool sibling_cache_has(const sibling_cache *s, const view_block *b) {
    return is_step(b) || s->dependent_weights[number_of(s, b)];
}

#define MAX_GROUP 4u /* a first moment, the second one, the weights */

size_t sibling_cache_group(const sibling_cache *s, const view_block *b) {
    const view_block *last = b;
    for (uint32_t i = 0; i < MAX_GROUP && s->dependent_weights[number_of(s, last)]; i++) {
        last = s->dependent_weights[number_of(s, last)];
    }
    return number_of(s, last);
}

/* ---- keeping ---- */

/* Reserves memory for the block's values. NULL if they are cached or were handed out, or if the limit is reached. */
static void *reserve(sibling_cache *s, const view_block *b) {
    size_t number = number_of(s, b);
    uint64_t size = b->record->raw_size;
    pthread_mutex_lock(&s->mutex);
    bool reserved =
        !s->cached[number] && !s->handed_out[number] && size <= s->limit && s->bytes <= s->limit - size;
    s->bytes += reserved ? size : 0;
    pthread_mutex_unlock(&s->mutex);
    void *memory = reserved ? malloc(size + 1) : NULL;
    if (reserved && !memory) {
        pthread_mutex_lock(&s->mutex);
        s->bytes -= size;
        pthread_mutex_unlock(&s->mutex);
    }
    return memory;
}

/* filled: false if the memory from reserve is not needed after all. */
static void insert(sibling_cache *s, const view_block *b, void *memory, bool filled) {
    size_t number = number_of(s, b);
    pthread_mutex_lock(&s->mutex);
    if (filled && !s->cached[number]) {
        s->cached[number] = memory;
        memory = NULL;
    }
    s->bytes -= memory ? b->record->raw_size : 0;
    pthread_mutex_unlock(&s->mutex);
    free(memory);
}

/* Caches the inputs of the leading block, as far as the decoder still has them. */
static void keep_inputs(sibling_cache *s, decoder *d, const view_block *dependent_weight,
                        const view_block *except) {
    for (uint32_t i = 1; i < dependent_weight->record->dependency_count; i++) {
        const view_block *input = step_input(s->view, dependent_weight->record, i);
        void *memory = input && input != except ? reserve(s, input) : NULL;
        if (memory) {
            insert(s, input, memory, values_cached(d, input, memory));
        }
    }
}

/* ---- handing out ---- */

/* Values stay cached if only a part of them was needed. */
static bool hand_out(sibling_cache *s, const view_block *b, const span_target *target, uint64_t *copied) {
    size_t number = number_of(s, b);
    pthread_mutex_lock(&s->mutex);
    void *values = s->cached[number];
    s->cached[number] = NULL;
    pthread_mutex_unlock(&s->mutex);
    if (!values) {
        return false;
    }
    uint64_t placed = span_target_copy(target, b, values);
    *copied += placed;
    insert(s, b, values, placed < b->record->count);
    return true;
}

/*
 * Rebuilds second moments as part of their weights. Returns false if the caller must decode the block as usual, which
 * also reports errors.
 */
static bool scatter_with_weight(sibling_cache *s, decoder *d, const view_block *b, const span_target *target,
                                uint64_t *copied) {
    const view_block *dependent_weight = s->dependent_weights[number_of(s, b)];
    bool square = b->record->tensor->role == CKD_ROLE_EXP_AVG_SQ && !b->materialized;
    void *memory = square && dependent_weight ? reserve(s, dependent_weight) : NULL;
    if (!memory) {
        return false;
    }
    d->blocks_decoded = 0;
    bool placed = values_of_input(d, s->view, dependent_weight, memory, NULL) == CKD_OK;
    insert(s, dependent_weight, memory, placed);
    void *values = placed ? malloc(b->record->raw_size + 1) : NULL;
    placed = values && values_cached(d, b, values);
    if (placed) {
        *copied += span_target_copy(target, b, values);
        keep_inputs(s, d, dependent_weight, b);
    }
    free(values);
    return placed;
}

ckd_status sibling_cache_scatter(sibling_cache *s, decoder *d, const view_block *b, const span_target *target,
                                 uint64_t *copied, ckd_error *err) {
    uint64_t before = *copied;
    ckd_status status = CKD_OK;
    if (!hand_out(s, b, target, copied)) {
        values_cache_begin(d);
        if (!scatter_with_weight(s, d, b, target, copied)) {
            status = block_into_span(d, s->view, b, target, copied, err);
            if (status == CKD_OK && is_step(b)) {
                keep_inputs(s, d, b, NULL);
            }
        }
        values_cache_end(d);
    }
    if (status == CKD_OK && *copied - before == b->record->count) {
        pthread_mutex_lock(&s->mutex);
        s->handed_out[number_of(s, b)] = true;
        pthread_mutex_unlock(&s->mutex);
    }
    return status;
}
