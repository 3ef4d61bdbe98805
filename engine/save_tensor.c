/* Saving one tensor: its blocks are analysed and encoded in parallel, decided and written in order. */
#include <stdlib.h>

#include "engine/ready.h"
#include "engine/save_lossy.h"

#define SKIP_AFTER \
    4u /* deltas that lost in a row, after which most blocks of the tensor are not tried as one */
#define RETRY_EVERY  8u
#define HEADER_BYTES 512u /* of a record, about, its tensor's name not counted */

static ckd_status check_description(const ckd_tensor *t, geometry *shape, uint64_t *elements,
                                    ckd_error *err) {
    size_t length = t->name ? strlen(t->name) : 0;
    if (length == 0 || length > CKD_NAME_MAX || !utf8_valid(t->name, length)) {
        return err_set(err, CKD_E_INVALID, "a tensor's name must have 1 to %d bytes of UTF-8", CKD_NAME_MAX);
    }
    if (ckd_dtype_size(t->dtype) == 0) {
        return err_in_tensor(err, err_set(err, CKD_E_INVALID, "unknown dtype %d", (int)t->dtype), t->name);
    }
    if (t->role < CKD_ROLE_AUTO || t->role > CKD_ROLE_OTHER) {
        return err_in_tensor(err, err_set(err, CKD_E_INVALID, "unknown role %d", (int)t->role), t->name);
    }
    if (!geometry_init(shape, t->ndim, t->shape)) {
        return err_in_tensor(
            err,
            err_set(err, CKD_E_INVALID, "a tensor has at most %d dimensions and 2^40 elements", CKD_MAX_DIMS),
            t->name);
    }
    if (!region_count(elements, shape, &t->region)) {
        return err_in_tensor(
            err, err_set(err, CKD_E_INVALID, "the region does not lie inside the tensor's shape"), t->name);
    }
    if (t->optimizer) {
        ckd_status status = step_check_optimizer(t->optimizer, err);
        if (status != CKD_OK) {
            return err_in_tensor(err, status, t->name);
        }
    }
    if (*elements && !t->data && !t->read) {
        return err_in_tensor(err, err_set(err, CKD_E_INVALID, "neither data nor a read function"), t->name);
    }
    return CKD_OK;
}

/* Names and regions that the content index points to live as long as the save. */
static ckd_status make_tensor_context(ckd_save *save, const ckd_tensor *t, const geometry *shape,
                                      tensor_context *context, ckd_error *err) {
    size_t length = strlen(t->name) + 1;
    record_tensor *tensor = arena_alloc(&save->arena, sizeof(*tensor));
    char *name = arena_alloc(&save->arena, length);
    ckd_region *region = arena_alloc(&save->arena, sizeof(*region));
    if (!tensor || !name || !region) {
        return err_nomem(err, sizeof(*tensor) + length + sizeof(*region), "a tensor's description");
    }
    memcpy(name, t->name, length);
    *region = region_canonical(shape, &t->region);
    *tensor = (record_tensor){.name = name,
                              .checkpoint = save->checkpoint,
                              .dtype = t->dtype,
                              .ndim = t->ndim,
                              .role = t->role == CKD_ROLE_AUTO ? ckd_role_of(name, t->dtype) : t->role};
    memcpy(tensor->shape, shape->shape, t->ndim * sizeof(uint64_t));
    *context = (tensor_context){
        .tensor = tensor, .shape = *shape, .region = region, .block_elements = save_block_elements(save, t)};
    const view *before = save->target.compare ? save->existing : save->parent;
    const view_tensor *old = before ? view_find(before, name) : NULL;
    bool same = old && old->tensor->dtype == t->dtype && old->shape.ndim == shape->ndim &&
                memcmp(old->shape.shape, shape->shape, shape->ndim * sizeof(uint64_t)) == 0;
    context->parent = same ? old : NULL;
    if (old && !same && !save->target.compare) {
        store_message(save->store, "%s is saved without its parent: there it is %s of another %s", name,
                      ckd_dtype_name(old->tensor->dtype), old->tensor->dtype == t->dtype ? "shape" : "dtype");
    }
    return CKD_OK;
}

ckd_status save_fetch(const void **values, ckd_save *save, bytes *room, const ckd_tensor *t, uint64_t first,
                      uint64_t count, ckd_error *err) {
    size_t size = ckd_dtype_size(t->dtype);
    if (t->data) {
        *values = (const uint8_t *)t->data + first * size;
        return CKD_OK;
    }
    void *to = bytes_scratch(room, count * size + 1, "a tensor's elements", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    *values = to;
    if (count == 0) {
        return CKD_OK;
    }
    if (err) {
        memset(err, 0, sizeof(*err));
        err->offset = CKD_NO_OFFSET;
    }
    float_mode_leave(save->callers_mode);
    ckd_status status = t->read(t->read_context, first, count, to, err);
    save->callers_mode = float_mode_enter();
    if (status != CKD_OK && err && err->status == CKD_OK) {
        err_set(err, status, "the read function of the tensor failed");
    }
    return status;
}

typedef struct batch {
    ckd_save *save;
    const tensor_context *tensor;
} batch;

static ckd_status analyse_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    batch *b = context;
    block_job *job = &b->save->jobs[index];
    return b->save->target.compare ? save_compare_block(b->save, job, b->tensor, err)
                                   : block_analyse(job, &b->save->coding, b->tensor, &b->save->budget, err);
}

static ckd_status encode_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    batch *b = context;
    return block_encode(&b->save->jobs[index], b->tensor, err);
}

static ckd_status remember(ckd_save *save, const block_job *job, const tensor_context *t, const record *r,
                           ckd_error *err) {
    content_entry entry = {.content = job->original,
                           .stored = job->content,
                           .values = job->content,
                           .error = job->error,
                           .dtype = t->tensor->dtype,
                           .tensor = t->tensor->name,
                           .region = t->region,
                           .first = job->first,
                           .count = job->count,
                           .ndim = t->shape.ndim,
                           .shape = t->tensor->shape,
                           .depth = r->depth,
                           .chain_stored = job->chain.stored,
                           .chain_work = job->chain.work};
    ckd_status status = content_index_add(&save->known, &entry, err);
    bool rounds = !job->known || job->lossy || hash128_equal(&job->content, &job->original);
    if (status == CKD_OK && rounds && t->tensor->role == CKD_ROLE_MASTER && t->tensor->dtype == CKD_F32) {
        entry.rounded = true;
        entry.content = job->rounded_bf16;
        entry.values = job->result_bf16;
        entry.error = job->error_bf16;
        entry.dtype = CKD_BF16;
        status = content_index_add(&save->known, &entry, err);
        entry.content = job->rounded_f16;
        entry.values = job->result_f16;
        entry.error = job->error_f16;
        entry.dtype = CKD_F16;
        status = status == CKD_OK ? content_index_add(&save->known, &entry, err) : status;
    }
    return status;
}

/* The block once more, coded on its own. Its loss costs speed, never data: the save goes on without copies then. */
static void append_ready(ckd_save *save, const block_job *job, const record *of) {
    const candidate *c = &job->standalone;
    bool is_raw = c->coding == CODING_RAW;
    record r = *of;
    r.coding = (uint32_t)c->coding;
    r.predictor = PREDICT_NONE;
    r.stored_size = is_raw ? of->raw_size : c->size;
    r.dependency_count = 0;
    r.depth = 0;
    r.chain_stored = r.base_stored = r.stored_size;
    ckd_status status = CKD_OK;
    if (!save->ready) {
        pathname p = path_ready(save->store->path, &save->checkpoint, save->options.rank, &save->writer_id);
        chunk_identity identity = {save->store->id, save->file_id, save->writer_id};
        status = chunk_writer_create(&save->ready, p.text, &identity, NULL);
    }
    if (status == CKD_OK) {
        status = chunk_writer_append(save->ready, &r, is_raw ? job->values : c->payload.data, NULL);
    }
    if (status != CKD_OK) {
        chunk_writer_abort(save->ready);
        save->ready = NULL;
        save->ready_failed = true;
    }
}

/* The optimizer that the block names, unless it is there already. */
static ckd_status append_group(ckd_save *save, const block_job *job, ckd_error *err) {
    bool written;
    ckd_status status = step_note_group(&written, &save->steps, &job->step.content, err);
    if (status != CKD_OK || written) {
        return status;
    }
    record_tensor tensor = {.name = GROUP_NAME, .checkpoint = save->checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region region = {.kind = CKD_REGION_WHOLE};
    record r = {.kind = RECORD_GROUP,
                .tensor = &tensor,
                .region = &region,
                .raw_size = GROUP_BYTES,
                .stored_size = GROUP_BYTES,
                .content = job->step.content,
                .chain_stored = GROUP_BYTES,
                .base_stored = GROUP_BYTES};
    return chunk_writer_append(save->writer, &r, job->step.group, err);
}

static void hold(step_tensor *step, const block_job *job, const tensor_context *t, const record *r) {
    uint64_t symbols = job->chosen == &job->delta ? job->plan.delta_symbols : job->count;
    load_cost own = {(double)r->stored_size,
                     decode_work((predictor)r->predictor, (coding)r->coding, ckd_dtype_size(t->tensor->dtype),
                                 r->raw_size, r->stored_size, symbols)};
    held_block block = {.content = job->content,
                        .own = own,
                        .chain = job->chain,
                        .base = job->base,
                        .depth = r->depth,
                        .on_step = r->predictor == PREDICT_STEP,
                        .on_parent = r->predictor == PREDICT_PARENT};
    step_hold(step, job->first, job->count, job->values, &block);
}

static ckd_status append(ckd_save *save, block_job *job, const tensor_context *t, step_tensor *step,
                         ckd_error *err) {
    const candidate *c = job->chosen;
    uint64_t raw = job->count * ckd_dtype_size(t->tensor->dtype);
    bool is_raw = c && c->coding == CODING_RAW;
    record r = {.kind = RECORD_BLOCK,
                .coding = c ? (uint32_t)c->coding : CODING_RAW,
                .predictor = (uint32_t)job->predictor,
                .tensor = t->tensor,
                .region = t->region,
                .first = job->first,
                .count = job->count,
                .raw_size = raw,
                .stored_size = is_raw ? raw
                               : c    ? c->size
                                      : 0,
                .content = job->content,
                .depth = job->depth,
                .chain_stored = (uint64_t)job->chain.stored,
                .chain_work = (uint64_t)job->chain.work,
                .base_stored = job->base_stored,
                .dependencies = job->dependencies,
                .dependency_count =
                    job->predictor == PREDICT_NONE ? job->alone_dependencies : job->dependency_count};
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < r.dependency_count && status == CKD_OK; i++) {
        const ckd_id *on = &job->dependencies[i].checkpoint;
        status = id_equal(on, &save->checkpoint) ? CKD_OK : save_depend(save, on, err);
    }
    if (status == CKD_OK && job->predictor == PREDICT_STEP) {
        status = append_group(save, job, err);
        step->used = job->step.rule;
    }
    if (status == CKD_OK) {
        status = chunk_writer_append(save->writer, &r,
                                     is_raw ? job->values
                                     : c    ? c->payload.data
                                            : NULL,
                                     err);
    }
    if (status == CKD_OK && job->keep_ready && !save->ready_failed) {
        append_ready(save, job, &r);
    }
    if (status == CKD_OK) {
        if (step) {
            hold(step, job, t, &r);
        }
        status = remember(save, job, t, &r, err);
    }
    return status;
}

/* How the deltas of one tensor fare, so that one which never wins is not tried at every block. */
typedef struct delta_record {
    uint32_t lost, since;
} delta_record;

static void prepare_trial(block_job *job, delta_record *tried) {
    job->try_delta = tried->lost < SKIP_AFTER || tried->since++ % RETRY_EVERY == RETRY_EVERY - 1;
}

static void note_trial(const block_job *job, delta_record *tried) {
    if (!job->known && (job->delta.available || job->delta_lost)) {
        bool won = job->delta.available && job->delta.size < job->standalone.size;
        tried->lost = won ? 0 : tried->lost + 1;
    }
}

static uint64_t payload_size(const block_job *job, const candidate *c, const tensor_context *t) {
    uint64_t raw = job->count * ckd_dtype_size(t->tensor->dtype);
    return c && c->coding != CODING_RAW ? c->size : c ? raw : 0;
}

/* For the batch as it was decided. */
static void make_room(ckd_save *save, uint32_t count, const tensor_context *t) {
    uint64_t payload = 0, copies = 0, header = HEADER_BYTES + strlen(t->tensor->name);
    for (uint32_t i = 0; i < count; i++) {
        const block_job *job = &save->jobs[i];
        payload += header + payload_size(job, job->chosen, t);
        copies +=
            job->keep_ready && !save->ready_failed ? header + payload_size(job, &job->standalone, t) : 0;
        save->index_bytes += header;
    }
    save_make_room(save, payload, copies);
}

void save_tell_damage(ckd_save *save) {
    if (!save->told_damage) {
        save->told_damage = true;
        store_message(save->store,
                      "parts of %s@%llu are damaged; they are saved anew instead of as deltas (run "
                      "ckptdelta verify)",
                      save->target.lineage.run, (unsigned long long)save->target.lineage.step);
    }
}

ckd_status save_write_batch(ckd_save *save, uint32_t count, const tensor_context *t, step_tensor *step,
                            ckd_error *err) {
    batch b = {save, t};
    uint64_t start = clock_monotonic_ns();
    for (uint32_t i = 0; i < count; i++) {
        block_decide(&save->jobs[i], t, &save->budget);
        if (save->jobs[i].parent_damaged) {
            save_tell_damage(save);
        }
    }
    ckd_status status = pool_run(save->store->pool, count, encode_one, &b, err);
    uint64_t encoded = clock_monotonic_ns();
    make_room(save, count, t);
    for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
        status = append(save, &save->jobs[i], t, step, err);
    }
    save->encode_ns += encoded - start;
    save->append_ns += clock_monotonic_ns() - encoded;
    return status;
}

ckd_status save_report_progress(ckd_save *save, uint64_t raw, ckd_error *err) {
    save->raw_bytes += raw;
    const ckd_save_options *o = &save->options;
    if (!o->on_progress) {
        return CKD_OK;
    }
    float_mode_leave(save->callers_mode);
    int stop = o->on_progress(o->progress_context, save->raw_bytes,
                              o->total_bytes > save->raw_bytes ? o->total_bytes : save->raw_bytes);
    save->callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the save was cancelled") : CKD_OK;
}

/* The next blocks, one a job; returns how many. An empty region is one empty block: it says that the tensor exists. */
static ckd_status save_batch(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t *at,
                             uint64_t elements, delta_record *tried, step_tensor *step, ckd_error *err) {
    uint32_t count = 0;
    uint64_t first = *at;
    ckd_status status = stop_look(&save->stop, err);
    if (status != CKD_OK) {
        return status;
    }
    do {
        block_job *job = &save->jobs[count++];
        job->first = *at;
        uint64_t most = t->rows ? save_panel_block(t->rows, *at) : t->block_elements;
        job->count = elements - *at < most ? elements - *at : most;
        *at += job->count;
        prepare_trial(job, tried);
        status = save_fetch(&job->values, save, &job->own, tensor, job->first, job->count, err);
    } while (status == CKD_OK && count < save->job_count && *at < elements);
    batch b = {save, t};
    uint64_t start = clock_monotonic_ns();
    save->coding.dependencies = save->dependencies;
    save->coding.dependency_count = save->dependency_count;
    if (status == CKD_OK) {
        status = pool_run(save->store->pool, count, analyse_one, &b, err);
    }
    save->analyse_ns += clock_monotonic_ns() - start;
    if (status == CKD_OK && !save->target.compare) {
        status = save_write_batch(save, count, t, step, err);
        for (uint32_t i = 0; i < count; i++) {
            note_trial(&save->jobs[i], tried);
        }
    }
    return status == CKD_OK ? save_report_progress(save, (*at - first) * ckd_dtype_size(tensor->dtype), err)
                            : status;
}

ckd_status save_exact_span(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t first,
                           uint64_t end, step_tensor *step, ckd_error *err) {
    delta_record tried = {0};
    ckd_status status;
    do {
        status = save_batch(save, tensor, t, &first, end, &tried, step, err);
    } while (status == CKD_OK && first < end);
    return status;
}

/* The region's own figures replace those expected of its share of the tensor. */
static void stop_expecting(load_budget *budget, const view *v, const view_tensor *parent, double share) {
    for (size_t s = 0; s < parent->shard_count; s++) {
        for (size_t i = 0; i < parent->shards[s].block_count; i++) {
            const record *r = parent->shards[s].blocks[i].record;
            load_cost chain = step_share(v, &parent->shards[s].blocks[i]), base = record_base(r);
            budget->rest_chain.stored -= share * chain.stored;
            budget->rest_chain.work -= share * chain.work;
            budget->rest_base.stored -= share * base.stored;
            budget->rest_base.work -= share * base.work;
        }
    }
}

static ckd_status save_region(ckd_save *save, const ckd_tensor *tensor, ckd_error *err) {
    geometry shape;
    uint64_t elements;
    tensor_context context;
    ckd_status status = check_description(tensor, &shape, &elements, err);
    if (status == CKD_OK) {
        status = make_tensor_context(save, tensor, &shape, &context, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    context.before = context.parent ? save->before : NULL;
    context.held = (span){context.region, 0, elements};
    if (context.parent && !save->target.compare && save->options.world == 1 && elements > 0) {
        stop_expecting(&save->budget, save->parent, context.parent,
                       (double)elements / (double)shape.elements);
    }
    if (save_is_cut(save, tensor, &context, elements)) {
        status = save_in_panels(save, tensor, &context, err);
    } else if (elements == 0 || save_lossy_part(save, context.tensor) == LOSSY_NONE) {
        step_tensor step;
        step_begin(&step, &save->steps, tensor->optimizer, context.tensor, context.region, elements,
                   context.parent, save->parent);
        context.step = step.source.available ? &step.source : NULL;
        status = save_exact_span(save, tensor, &context, 0, elements, &step, err);
        step_end(&step, &save->steps);
    } else {
        status = save_lossy_region(save, tensor, &context, elements, err);
    }
    if (status == CKD_OK && save->target.compare) {
        save_compared_region(save, &context);
    }
    return status == CKD_OK ? CKD_OK : err_in_tensor(err, status, tensor->name);
}

ckd_status ckd_save_tensor(ckd_save *save, const ckd_tensor *tensor, ckd_error *err) {
    ckd_status status = save_check_open(save, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_tensor description = {0};
    memcpy(&description, tensor,
           tensor->struct_size < sizeof(description) ? tensor->struct_size : sizeof(description));
    ckd_optimizer optimizer = {0};
    if (description.optimizer) {
        size_t size = description.optimizer->struct_size;
        memcpy(&optimizer, description.optimizer, size < sizeof(optimizer) ? size : sizeof(optimizer));
        description.optimizer = &optimizer;
    }
    save->callers_mode = float_mode_enter();
    status = save_region(save, &description, err);
    float_mode_leave(save->callers_mode);
    save_may_retry(save, status); /* not this save, but the caller's next one */
    save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
    return status;
}

ckd_status ckd_save_blob(ckd_save *save, const char *name, const void *data, size_t size, ckd_error *err) {
    ckd_status status = save_check_open(save, err);
    size_t length = name ? strlen(name) : 0;
    if (status == CKD_OK && (length == 0 || length > CKD_NAME_MAX || !utf8_valid(name, length))) {
        status = err_set(err, CKD_E_INVALID, "a blob's name must have 1 to %d bytes of UTF-8", CKD_NAME_MAX);
    }
    if (status == CKD_OK && size > CKD_BLOB_MAX) {
        status = err_set(err, CKD_E_INVALID, "blob '%s' has %zu bytes; at most 1 GiB is allowed", name, size);
    }
    status = status == CKD_OK ? stop_look(&save->stop, err) : status;
    if (status != CKD_OK) {
        return status;
    }
    if (save->target.compare) {
        status = save_compare_blob(save, name, data, size, err);
        save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
        return status;
    }
    record_tensor tensor = {.name = name, .checkpoint = save->checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region region = {.kind = CKD_REGION_WHOLE};
    bytes packed = {0};
    size_t stored = 0;
    if (bytes_extend(&packed, size + 1)) {
        status = coder_encode(save->jobs[0].decoder.coder, CODING_ZSTD, 0, 1, data, size, packed.data, size,
                              &stored, err);
    }
    bool is_raw = stored == 0;
    record r = {.kind = RECORD_BLOB,
                .coding = is_raw ? CODING_RAW : CODING_ZSTD,
                .tensor = &tensor,
                .region = &region,
                .raw_size = size,
                .stored_size = is_raw ? size : stored,
                .content = content_hash(data, size),
                .chain_stored = is_raw ? size : stored,
                .base_stored = is_raw ? size : stored};
    if (status == CKD_OK) {
        save->index_bytes += HEADER_BYTES + length;
        save_make_room(save, HEADER_BYTES + length + r.stored_size, 0);
        status = chunk_writer_append(save->writer, &r, is_raw ? data : packed.data, err);
    }
    save_may_retry(save, status);
    bytes_free(&packed);
    save->raw_bytes += size;
    save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
    return status;
}
