/* What a lossy save keeps of second moments, for the tensors that come after them: the steps of their weights, and how far their first
 * moments' errors turn an optimizer's step. */
#include <stdlib.h>

#include "engine/save_lossy.h"

static const char second_prefix[] = "exp_avg_sq.";
static const char first_prefix[] = "exp_avg.";
static const char master_prefix[] = "master.";

static const char *without(const char *name, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) == 0 ? name + length : NULL;
}

static void free_one(kept_second *k) {
    lossy_scales_free(&k->scales);
    direction_free(&k->sample);
    free(k);
}

void kept_seconds_free(kept_second *k) {
    while (k) {
        kept_second *next = k->next;
        free_one(k);
        k = next;
    }
}

/* A weight's master is not the last one: what is rounded from it may come. */
void second_was_used(ckd_save *save, kept_second *k, const tensor_context *context) {
    if (!k) {
        return;
    }
    const char *name = context->tensor->name;
    k->moment_came = k->moment_came || without(name, first_prefix);
    k->weight_came = k->weight_came || strcmp(name, k->weight) == 0;
    bool needed = false; /* by a tile that is under way beside this one */
    for (int i = 0; i < 2; i++) {
        const held_tile *h = &save->tiles->held[i];
        needed = needed || (h->in_use && h->second == k);
    }
    if (k->moment_came && k->weight_came && !needed) {
        kept_second **at = &save->seconds;
        while (*at != k) {
            at = &(*at)->next;
        }
        *at = k->next;
        free_one(k);
    }
}

ckd_status keep_second(kept_second **out, ckd_save *save, const lossy_tile *t, const tensor_context *context,
                       ckd_error *err) {
    const char *weight = without(context->tensor->name, second_prefix);
    *out = NULL;
    if (!weight) {
        return CKD_OK;
    }
    kept_second *kept = calloc(1, sizeof(*kept));
    if (!kept) {
        return err_nomem(err, sizeof(*kept), "second moments' means");
    }
    *kept =
        (kept_second){.next = save->seconds, .weight = weight, .first = t->first, .region = *context->region};
    ckd_status status = direction_begin(&kept->sample, t->count, err);
    if (status != CKD_OK) {
        free(kept);
        return status;
    }
    save->seconds = *out = kept;
    return CKD_OK;
}

kept_second *find_second(const ckd_save *save, const lossy_tile *t, const tensor_context *context) {
    const char *name = context->tensor->name, *of = without(name, master_prefix);
    of = of ? of : without(name, first_prefix);
    const char *weight = of ? of : name;
    for (kept_second *k = save->seconds; k; k = k->next) {
        if (strcmp(k->weight, weight) == 0 && k->first == t->first && k->sample.count == t->count &&
            region_equal(&k->region, context->region, context->shape.ndim)) {
            return k;
        }
    }
    return NULL;
}
