#include <stdlib.h>
#include <string.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

static const char *const prefixes[QUALITY_PARTS] = {"", "exp_avg.", "exp_avg_sq."};

static void *allocate(size_t size) {
    return bench_allocated(malloc(size + !size));
}

static ckd_store *open_store(const char *path, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    bench_check(ckd_store_open(&store, path, mode, NULL, &err), &err);
    return store;
}

/* ---- load ---- */

static void load_one(ckd_load *load, const char *name, void *data, size_t size) {
    ckd_error err = {0};
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = name;
    request.data = data;
    request.size = size;
    bench_check(ckd_load_tensor(load, &request, &err), &err);
}

static void load_small(quality_state *s, ckd_load *load, const ckd_tensor_info *info) {
    quality_small *small = &s->smalls[s->small_count++];
    if (s->small_count > sizeof(s->smalls) / sizeof(s->smalls[0]) || info->raw_bytes > sizeof(small->data)) {
        bench_die(info->name, "it is not a tensor of train_gpt");
    }
    *small = (quality_small){.dtype = info->dtype, .ndim = info->ndim, .size = info->raw_bytes};
    snprintf(small->name, sizeof(small->name), "%s", info->name);
    memcpy(small->shape, info->shape, sizeof(small->shape));
    load_one(load, small->name, small->data, small->size);
}

static void load_parts(quality_state *s, ckd_load *load, const ckd_tensor_info *info) {
    quality_tensor *t = &s->tensors[s->count++];
    char name[sizeof(t->name) + 16];
    *t = (quality_tensor){.ndim = info->ndim, .count = info->elements};
    if (info->dtype != CKD_F32 || strlen(info->name) >= sizeof(t->name)) {
        bench_die(info->name, "it is not a tensor of train_gpt");
    }
    snprintf(t->name, sizeof(t->name), "%s", info->name);
    memcpy(t->shape, info->shape, sizeof(t->shape));
    for (int part = 0; part < QUALITY_PARTS; part++) {
        snprintf(name, sizeof(name), "%s%s", prefixes[part], t->name);
        t->parts[part] = allocate(t->count * sizeof(float));
        load_one(load, name, t->parts[part], t->count * sizeof(float));
    }
    s->parameters += t->count;
}

quality_state quality_load(uint64_t *bytes, const char *path, const char *run, uint64_t step) {
    ckd_store *store = open_store(path, CKD_OPEN_READ);
    ckd_error err = {0};
    ckd_checkpoint checkpoint;
    ckd_load *load;
    bench_check(ckd_store_find(&checkpoint, store, run, step, &err), &err);
    bench_check(ckd_load_begin(&load, store, &checkpoint.id, &err), &err);
    const ckd_tensor_list *list = ckd_load_tensors(load);
    quality_state s = {.step = step, .tensors = allocate(list->count * sizeof(quality_tensor))};
    for (size_t i = 0; i < list->count; i++) {
        if (list->items[i].role == CKD_ROLE_OTHER) {
            load_small(&s, load, &list->items[i]);
        } else if (list->items[i].role == CKD_ROLE_WEIGHT) {
            load_parts(&s, load, &list->items[i]);
        }
    }
    void *config;
    if (ckd_load_blob(&config, &s.config_size, load, "gpt.config", &err) != CKD_OK ||
        s.config_size > sizeof(s.config)) {
        bench_die(path, "it is not a checkpoint of train_gpt");
    }
    memcpy(s.config, config, s.config_size);
    ckd_blob_free(config);
    if (bytes) {
        *bytes = checkpoint.stored_bytes;
    }
    ckd_load_end(load);
    ckd_store_close(store);
    return s;
}

/* ---- save ---- */

static void save_one(ckd_save *save, const char *name, ckd_role role, ckd_dtype dtype, uint32_t ndim,
                     const uint64_t *shape, const void *data) {
    ckd_error err = {0};
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = name;
    tensor.role = role;
    tensor.dtype = dtype;
    tensor.ndim = ndim;
    tensor.shape = shape;
    tensor.data = data;
    bench_check(ckd_save_tensor(save, &tensor, &err), &err);
}

uint32_t quality_save(const char *path, const char *run, const quality_state *s, const quality_library *how,
                      int base, const uint64_t *resumed_from) {
    static const ckd_role roles[QUALITY_PARTS] = {CKD_ROLE_WEIGHT, CKD_ROLE_EXP_AVG, CKD_ROLE_EXP_AVG_SQ};
    ckd_store *store = open_store(path, CKD_OPEN_CREATE);
    ckd_error err = {0};
    ckd_save_options options = CKD_SAVE_OPTIONS_INIT;
    options.run = run;
    options.step = s->step;
    options.fidelity = how->fidelity;
    options.effort = how->effort;
    options.max_load_cost = how->max_load_cost;
    options.step_scale = how->step_scale;
    options.role_fidelity[CKD_ROLE_EXP_AVG] = how->moments;
    options.base = base;
    if (resumed_from) {
        options.resumed_from_run = run;
        options.resumed_from_step = *resumed_from;
    }
    ckd_save *save;
    ckd_checkpoint saved = {0};
    bench_check(ckd_save_begin(&save, store, &options, &err), &err);
    /* Second moments first: the steps of the weights follow them. */
    for (size_t i = 0; i < s->count; i++) {
        for (int part = QUALITY_PARTS; part-- > 0;) {
            const quality_tensor *t = &s->tensors[i];
            char name[sizeof(t->name) + 16];
            snprintf(name, sizeof(name), "%s%s", prefixes[part], t->name);
            save_one(save, name, roles[part], CKD_F32, t->ndim, t->shape, t->parts[part]);
        }
    }
    for (size_t i = 0; i < s->small_count; i++) {
        const quality_small *m = &s->smalls[i];
        save_one(save, m->name, CKD_ROLE_OTHER, m->dtype, m->ndim, m->shape, m->data);
    }
    bench_check(ckd_save_blob(save, "gpt.config", s->config, s->config_size, &err), &err);
    bench_check(ckd_save_commit(NULL, save, &err), &err);
    bench_check(ckd_store_find(&saved, store, run, s->step, &err), &err);
    ckd_store_close(store);
    return saved.lossy_resumes;
}

/* ---- memory ---- */

quality_state quality_blank(const quality_state *like) {
    quality_state s = *like;
    s.tensors = allocate(s.count * sizeof(*s.tensors));
    memcpy(s.tensors, like->tensors, s.count * sizeof(*s.tensors));
    for (size_t i = 0; i < s.count; i++) {
        for (int part = 0; part < QUALITY_PARTS; part++) {
            size_t size = s.tensors[i].count * sizeof(float);
            s.tensors[i].parts[part] = allocate(size);
            memset(s.tensors[i].parts[part], 0xff, size); /* NaN */
        }
    }
    return s;
}

int quality_same(const quality_state *a, const quality_state *b) {
    int same = a->count == b->count && a->small_count == b->small_count;
    for (size_t i = 0; same && i < a->count; i++) {
        const quality_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        same = x->count == y->count && strcmp(x->name, y->name) == 0;
        for (int part = 0; same && part < QUALITY_PARTS; part++) {
            same = memcmp(x->parts[part], y->parts[part], x->count * sizeof(float)) == 0;
        }
    }
    for (size_t i = 0; same && i < a->small_count; i++) {
        same = memcmp(a->smalls[i].data, b->smalls[i].data, a->smalls[i].size) == 0;
    }
    return same;
}

void quality_free(quality_state *s) {
    for (size_t i = 0; i < s->count; i++) {
        for (int part = 0; part < QUALITY_PARTS; part++) {
            free(s->tensors[i].parts[part]);
        }
    }
    free(s->tensors);
    *s = (quality_state){0};
}
