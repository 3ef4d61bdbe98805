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

void kept_seconds_free(kept_second *k) {
    while (k) {
        kept_second *next = k->next;
        lossy_scales_free(&k->scales);
        direction_free(&k->sample);
        free(k);
        k = next;
    }
}

/* The first of a list becomes the first of another one. */
static void move(kept_second **to, kept_second **from) {
    kept_second *k = *from;
    *from = k->next;
    k->next = *to;
    *to = k;
}

void kept_seconds_end(ckd_save *save) {
    kept_second *unused = NULL;
    while (save->seconds) {
        move(&save->tiles->spare, &save->seconds);
    }
    for (kept_second **at = save->tiles ? &save->tiles->spare : NULL; at && *at;) {
        if ((*at)->served) {
            (*at)->served = false;
            at = &(*at)->next;
        } else {
            move(&unused, at);
        }
    }
    kept_seconds_free(unused);
}

/* One that nobody has, new if need be; NULL: out of memory. */
static kept_second *begin(save_tiles *all) {
    kept_second none = {.served = true}, *k = all->spare;
    if (!k) {
        k = malloc(sizeof(*k));
    } else {
        all->spare = k->next;
        none.scales.memory = k->scales.memory;
        none.sample.memory = k->sample.memory;
    }
    if (k) {
        *k = none;
    }
    return k;
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
        move(&save->tiles->spare, at);
    }
}

ckd_status keep_second(kept_second **out, ckd_save *save, const lossy_tile *t, const tensor_context *context,
                       ckd_error *err) {
    const char *weight = without(context->tensor->name, second_prefix);
    *out = NULL;
    if (!weight) {
        return CKD_OK;
    }
    kept_second *kept = begin(save->tiles);
    if (!kept) {
        return err_nomem(err, sizeof(*kept), "second moments' means");
    }
    kept->weight = weight;
    kept->first = t->first;
    kept->region = *context->region;
    kept->next = save->seconds;
    save->seconds = kept;
    ckd_status status = direction_begin(&kept->sample, t->count, err);
    *out = status == CKD_OK ? kept : NULL;
    return status;
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
