/*
 * The trainer's state in a ckptdelta store, and as raw files. For every tensor of the table a checkpoint holds NAME,
 * exp_avg.NAME and exp_avg_sq.NAME. It also has four small tensors:
 *
 *   step             i64     completed optimizer steps
 *   rng.state        u64[4]  generator of the next batch
 *   loader.position  i64     bytes of text trained on so far
 *   loader.text      u64     hash of the text
 *
 * and the blob "gpt.config", the architecture as text. Batches depend on (seed, step) only, so the generator need not
 * be restored. It is saved and compared on resume, since another --seed would silently train on other batches.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "examples/gpt_state.h"

const char *const gpt_prefixes[GPT_PARTS] = {"", "exp_avg.", "exp_avg_sq."};
const int gpt_part_order[GPT_PARTS] = {1, 2, 0};

float *gpt_part_of(const gpt_tensor *tensor, int part) {
    float *const parts[GPT_PARTS] = {tensor->weight, tensor->exp_avg, tensor->exp_avg_sq};
    return parts[part];
}

int gpt_complain(const char *what, const ckd_error *err) {
    fprintf(stderr, "train_gpt: %s: %s (%s)\n", what, err->message, ckd_status_name(err->status));
    return -1;
}

void gpt_describe_config(char text[GPT_CONFIG_MAX], const gpt_config *c) {
    snprintf(text, GPT_CONFIG_MAX, "vocab=%d context=%d width=%d layers=%d heads=%d batch=%d", GPT_VOCAB,
             c->context, c->width, c->layers, c->heads, c->batch);
}

gpt_small gpt_small_of(const gpt_model *model, const gpt_text *text, const gpt_progress *progress) {
    int64_t batch_bytes = (int64_t)model->config.batch * model->config.context;
    gpt_small small = {.step = (int64_t)progress->step, .text = text->hash};
    small.position = small.step * batch_bytes;
    gpt_rng rng;
    gpt_text_batch(text, &model->config, progress->seed, progress->step + 1, NULL, NULL, &rng);
    memcpy(small.rng, rng.s, sizeof small.rng);
    return small;
}

/* -------------------------------------------------------------------------------------------------------- save */

void gpt_small_tensors(ckd_tensor out[GPT_SMALL], const gpt_small *small) {
    static const uint64_t four = 4;
    const struct {
        const char *name;
        ckd_dtype dtype;
        uint32_t ndim;
        const void *data;
    } items[GPT_SMALL] = {
        {"step", CKD_I64, 0, &small->step},
        {"rng.state", CKD_U64, 1, small->rng},
        {"loader.position", CKD_I64, 0, &small->position},
        {"loader.text", CKD_U64, 0, &small->text},
    };
    for (size_t i = 0; i < GPT_SMALL; i++) {
        out[i] = (ckd_tensor)CKD_TENSOR_INIT;
        out[i].name = items[i].name;
        out[i].role = CKD_ROLE_OTHER;
        out[i].dtype = items[i].dtype;
        out[i].ndim = items[i].ndim;
        out[i].shape = items[i].ndim ? &four : NULL;
        out[i].data = items[i].data;
    }
}

static ckd_status save_small(ckd_save *save, const gpt_small *small, ckd_error *err) {
    ckd_tensor tensors[GPT_SMALL];
    gpt_small_tensors(tensors, small);
    ckd_status status = CKD_OK;
    for (size_t i = 0; status == CKD_OK && i < GPT_SMALL; i++)
        status = ckd_save_tensor(save, &tensors[i], err);
    return status;
}

static ckd_status save_tensor(ckd_save *save, const gpt_tensor *from, int part,
                              const ckd_optimizer *optimizer, ckd_error *err) {
    char name[GPT_NAME_MAX + 16];
    snprintf(name, sizeof name, "%s%s", gpt_prefixes[part], from->name);
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = name;
    tensor.dtype = CKD_F32;
    tensor.ndim = from->ndim;
    tensor.shape = from->shape;
    tensor.data = gpt_part_of(from, part);
    ckd_optimizer own;
    if (optimizer) {
        own = gpt_optimizer_for(optimizer, from);
        tensor.optimizer = &own;
    }
    return ckd_save_tensor(save, &tensor, err);
}

/*
 * The update that led to this step. With it, a checkpoint one step after its parent takes little more than its first
 * moments.
 */
ckd_optimizer gpt_optimizer_of(const gpt_adamw *o, uint64_t step) {
    ckd_optimizer optimizer = CKD_OPTIMIZER_INIT;
    optimizer.kind = CKD_ADAMW;
    optimizer.lr = gpt_adamw_rate(o, step);
    optimizer.beta1 = o->beta1;
    optimizer.beta2 = o->beta2;
    optimizer.eps = o->eps;
    optimizer.weight_decay = o->weight_decay;
    optimizer.step = step;
    return optimizer;
}

ckd_optimizer gpt_optimizer_for(const ckd_optimizer *of, const gpt_tensor *tensor) {
    ckd_optimizer own = *of;
    own.weight_decay = tensor->ndim > 1 ? own.weight_decay : 0;
    return own;
}

static ckd_status save_all(ckd_save *save, const gpt_model *model, const gpt_small *small,
                           const ckd_optimizer *optimizer, ckd_error *err) {
    char config[GPT_CONFIG_MAX];
    gpt_describe_config(config, &model->config);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < model->tensor_count; i++)
        for (int part = 0; status == CKD_OK && part < GPT_PARTS; part++)
            status = save_tensor(save, &model->tensors[i], gpt_part_order[part], optimizer, err);
    if (status == CKD_OK)
        status = save_small(save, small, err);
    if (status == CKD_OK)
        status = ckd_save_blob(save, GPT_CONFIG_BLOB, config, strlen(config), err);
    return status;
}

int gpt_state_save(ckd_store *store, const gpt_lineage *lineage, const gpt_model *model, const gpt_text *text,
                   const gpt_progress *progress, double metric, ckd_checkpoint *info) {
    ckd_error err = {0};
    gpt_small small = gpt_small_of(model, text, progress);
    ckd_save_options options = CKD_SAVE_OPTIONS_INIT;
    options.run = lineage->run;
    options.fidelity = lineage->fidelity;
    options.step = progress->step;
    /* a repeated run gives the same bits; anything else is an error */
    options.on_duplicate = lineage->rewound ? CKD_DUPLICATE_BRANCH : CKD_DUPLICATE_SAME_OK;
    options.metric_name = "loss";
    options.metric = metric;
    options.resumed_from_run = lineage->resumed_run;
    options.resumed_from_step = lineage->resumed_step;
    if (lineage->branch) {
        options.parent_run = lineage->resumed_run;
        options.parent_step = lineage->resumed_step;
    }
    ckd_save *save = NULL;
    if (ckd_save_begin(&save, store, &options, &err) != CKD_OK)
        return gpt_complain("cannot begin a save", &err);
    ckd_optimizer optimizer;
    if (lineage->adamw)
        optimizer = gpt_optimizer_of(lineage->adamw, progress->step);
    if (save_all(save, model, &small, lineage->adamw ? &optimizer : NULL, &err) != CKD_OK) {
        ckd_save_abort(save);
        return gpt_complain("cannot save", &err);
    }
    if (ckd_save_commit(info, save, &err) != CKD_OK)
        return gpt_complain("cannot commit the save", &err);
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- load */

static ckd_status load_one(ckd_load *load, const char *name, ckd_dtype dtype, uint32_t ndim,
                           const uint64_t *shape, void *data, size_t size, ckd_error *err) {
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = name;
    request.dtype = dtype;
    request.ndim = ndim;
    request.shape = shape;
    request.data = data;
    request.size = size;
    return ckd_load_tensor(load, &request, err);
}

static ckd_status load_small(ckd_load *load, gpt_small *small, ckd_error *err) {
    static const uint64_t four = 4;
    ckd_status status = load_one(load, "step", CKD_I64, 0, NULL, &small->step, sizeof small->step, err);
    if (status == CKD_OK)
        status = load_one(load, "rng.state", CKD_U64, 1, &four, small->rng, sizeof small->rng, err);
    if (status == CKD_OK)
        status = load_one(load, "loader.position", CKD_I64, 0, NULL, &small->position, sizeof small->position,
                          err);
    if (status == CKD_OK)
        status = load_one(load, "loader.text", CKD_U64, 0, NULL, &small->text, sizeof small->text, err);
    return status;
}

/* Refuses another architecture, batch, seed or text: training would not continue what was saved. */
static int check_config(ckd_load *load, const gpt_model *model) {
    ckd_error err = {0};
    char want[GPT_CONFIG_MAX];
    gpt_describe_config(want, &model->config);
    void *have = NULL;
    size_t size = 0;
    if (ckd_load_blob(&have, &size, load, GPT_CONFIG_BLOB, &err) != CKD_OK)
        return gpt_complain("cannot resume", &err);
    int same = size == strlen(want) && memcmp(have, want, size) == 0;
    if (!same)
        fprintf(stderr, "train_gpt: cannot resume: the checkpoint has %.*s, the options say %s\n", (int)size,
                (const char *)have, want);
    ckd_blob_free(have);
    return same ? 0 : -1;
}

static int check_small(const gpt_small *have, const gpt_small *want) {
    const char *what = NULL;
    if (have->text != want->text)
        what = "the text differs from the one it was trained on; pass the same --text";
    else if (memcmp(have->rng, want->rng, sizeof have->rng) != 0)
        what = "it was trained with another --seed";
    else if (have->position != want->position)
        what = "its loader position does not fit its step";
    if (what)
        fprintf(stderr, "train_gpt: cannot resume: %s\n", what);
    return what ? -1 : 0;
}

static int load_all(ckd_load *load, gpt_model *model, const gpt_text *text, gpt_progress *progress) {
    ckd_error err = {0};
    gpt_small small = {0};
    if (check_config(load, model))
        return -1;
    if (load_small(load, &small, &err) != CKD_OK)
        return gpt_complain("cannot resume", &err);
    progress->step = (uint64_t)small.step;
    gpt_small want = gpt_small_of(model, text, progress);
    if (check_small(&small, &want))
        return -1;
    for (size_t i = 0; i < model->tensor_count; i++) {
        const gpt_tensor *tensor = &model->tensors[i];
        for (int part = 0; part < GPT_PARTS; part++) {
            char name[GPT_NAME_MAX + 16];
            snprintf(name, sizeof name, "%s%s", gpt_prefixes[part], tensor->name);
            if (load_one(load, name, CKD_F32, tensor->ndim, tensor->shape, gpt_part_of(tensor, part),
                         tensor->count * sizeof(float), &err) != CKD_OK)
                return gpt_complain("cannot resume", &err);
        }
    }
    return 0;
}

int gpt_state_load(ckd_store *store, const char *run, uint64_t step, gpt_model *model, const gpt_text *text,
                   gpt_progress *progress) {
    ckd_error err = {0};
    ckd_checkpoint checkpoint;
    ckd_load *load = NULL;
    if (ckd_store_find(&checkpoint, store, run, step, &err) != CKD_OK)
        return gpt_complain("cannot resume", &err);
    if (ckd_load_begin(&load, store, &checkpoint.id, &err) != CKD_OK)
        return gpt_complain("cannot resume", &err);
    int result = load_all(load, model, text, progress);
    ckd_load_end(load);
    return result;
}

/* -------------------------------------------------------------------------------------------------------- dump */

static int write_floats(const char *path, const float *data, size_t count) {
    FILE *file = fopen(path, "wb");
    int failed = !file;
    for (size_t i = 0; !failed && i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &data[i], sizeof bits);
        const uint8_t bytes[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16),
                                  (uint8_t)(bits >> 24)};
        failed = fwrite(bytes, 1, sizeof bytes, file) != sizeof bytes;
    }
    if (file && fclose(file) != 0)
        failed = 1;
    if (failed)
        fprintf(stderr, "train_gpt: cannot write %s: %s\n", path, strerror(errno));
    return failed ? -1 : 0;
}

static int make_directory(const char *path) {
    if (mkdir(path, 0777) == 0 || errno == EEXIST)
        return 0;
    fprintf(stderr, "train_gpt: cannot create the directory %s: %s\n", path, strerror(errno));
    return -1;
}

int gpt_state_dump(const char *dir, const gpt_model *model, uint64_t step) {
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/%" PRIu64, dir, step);
    if (length < 0 || (size_t)length + GPT_NAME_MAX + 24 > sizeof path) {
        fprintf(stderr, "train_gpt: the path %s is too long\n", dir);
        return -1;
    }
    if (make_directory(dir) || make_directory(path))
        return -1;
    for (size_t i = 0; i < model->tensor_count; i++) {
        const gpt_tensor *tensor = &model->tensors[i];
        for (int part = 0; part < GPT_PARTS; part++) {
            snprintf(path + length, sizeof path - (size_t)length, "/%s%s.f32", gpt_prefixes[part],
                     tensor->name);
            if (write_floats(path, gpt_part_of(tensor, part), tensor->count))
                return -1;
        }
    }
    return 0;
}
