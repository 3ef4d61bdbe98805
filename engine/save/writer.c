/*
 * Writes encoded blocks into the chunk file. A block is first registered, in order (order.c: save_register_block), so
 * that later blocks know it. Its bytes may then be written by any thread, in order.
 *
 * Also makes space for a save on a disk that is nearly full. A failed write into the chunk file cannot be repeated,
 * because the values of earlier tensors are gone. So materialized copies are removed before the disk is full. Small
 * files that did not fit are written again, as new files. Some file systems do not report how much space is left
 * (quotas, some network file systems). There the save fails, but it has removed the copies, and the next save has their
 * space.
 */
#include "engine/store/store.h"
#include "engine/save/internal.h"

#define HEADER_BYTES 512u /* of a record, roughly, without its tensor's name */
/* Space for everything besides the blocks: 1 MiB of each file that is still buffered; manifest, intents, catalog. */
#define SLACK (UINT64_C(4) << 20)

void save_append_free(save_append *a) {
    for (size_t i = 0; i < sizeof(a->sides) / sizeof(a->sides[0]); i++) {
        bytes_free(&a->sides[i].data);
    }
}

static ckd_status add_duplicate(ckd_save *save, const content_entry *entry, ckd_error *err) {
    pthread_rwlock_wrlock(&save->pipeline.registry_lock);
    ckd_status status = content_index_add(&save->registry.dedup_index, entry, err);
    pthread_rwlock_unlock(&save->pipeline.registry_lock);
    return status;
}

static ckd_status remember(ckd_save *save, const block_job *job, const tensor_context *t, const record *r,
                           ckd_error *err) {
    content_entry entry = {.content = job->analysis.original,
                           .stored = job->output.content,
                           .values = job->output.content,
                           .error = job->output.error,
                           .dtype = t->tensor->dtype,
                           .tensor = t->tensor->name,
                           .region = t->region,
                           .first = job->input.first,
                           .count = job->input.count,
                           .ndim = t->shape.ndim,
                           .shape = t->tensor->shape,
                           .depth = r->depth,
                           .chain_stored = job->decision.chain.stored,
                           .chain_work = job->decision.chain.work};
    ckd_status status = add_duplicate(save, &entry, err);
    bool rounds = !block_is_duplicate(job) || job->output.lossy ||
                  hash128_equal(&job->output.content, &job->analysis.original);
    if (status == CKD_OK && rounds && t->tensor->role == CKD_ROLE_MASTER && t->tensor->dtype == CKD_F32) {
        entry.rounded = true;
        entry.content = job->analysis.rounded_bf16;
        entry.values = job->output.result_bf16;
        entry.error = job->output.error_bf16;
        entry.dtype = CKD_BF16;
        status = add_duplicate(save, &entry, err);
        entry.content = job->analysis.rounded_f16;
        entry.values = job->output.result_f16;
        entry.error = job->output.error_f16;
        entry.dtype = CKD_F16;
        THEN(status, add_duplicate(save, &entry, err));
    }
    return status;
}

/*
 * Writes the block once more, coded on its own. A failure costs speed, never data: the save continues without copies.
 */
static void append_materialized(ckd_save *save, const block_job *job, const record *original) {
    const candidate *c = &job->analysis.standalone;
    bool is_raw = c->coding == CODING_RAW;
    record r = *original;
    r.coding = (uint32_t)c->coding;
    r.predictor = PREDICT_NONE;
    r.stored_size = is_raw ? original->raw_size : c->size;
    r.dependency_count = 0;
    r.depth = 0;
    r.chain_stored = r.base_stored = r.stored_size;
    ckd_status status = CKD_OK;
    if (!save->output.materialized) {
        pathname p = path_materialized(save->store->path, &save->checkpoint, save->options.rank,
                                       &save->output.writer_id);
        chunk_identity identity = {save->store->id, save->output.file_id, save->output.writer_id};
        status = chunk_writer_create_in(&save->output.materialized, p.text, &identity,
                                        save->pipeline.workspace->copying, NULL);
    }
    THEN(status, chunk_writer_append(save->output.materialized, &r,
                                     is_raw ? job->input.values : c->payload.data, NULL));
    if (status != CKD_OK) {
        chunk_writer_abort(save->output.materialized);
        save->output.materialized = NULL;
        save->output.materialized_failed = true;
    }
}

/* Writes the optimizer's group that the block names. */
static ckd_status write_group(ckd_save *save, const block_job *job, ckd_error *err) {
    record_tensor tensor = {.name = GROUP_NAME, .checkpoint = save->checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region region = {.kind = CKD_REGION_WHOLE};
    record r = {.kind = RECORD_GROUP,
                .tensor = &tensor,
                .region = &region,
                .raw_size = GROUP_BYTES,
                .stored_size = GROUP_BYTES,
                .content = job->analysis.step.content,
                .chain_stored = GROUP_BYTES,
                .base_stored = GROUP_BYTES};
    return chunk_writer_append(save->output.writer, &r, job->analysis.step.group, err);
}

static void pin_block(step_tensor *step, const block_job *job, const tensor_context *t, const record *r) {
    uint64_t symbols =
        job->decision.chosen == &job->analysis.predicted ? job->plan.delta_symbols : job->input.count;
    load_cost own = {(double)r->stored_size,
                     decode_work((predictor)r->predictor, (coding)r->coding, ckd_dtype_size(t->tensor->dtype),
                                 r->raw_size, r->stored_size, symbols)};
    pinned_block block = {.content = job->output.content,
                          .own = own,
                          .chain = job->decision.chain,
                          .base = job->decision.base,
                          .depth = r->depth,
                          .on_step = r->predictor == PREDICT_STEP,
                          .on_parent = r->predictor == PREDICT_PARENT || r->coding == CODING_GRADIENT};
    step_pin(step, job->input.first, job->input.count, job->input.values, &block);
}

static bool is_raw(const block_job *job) {
    return job->decision.chosen && job->decision.chosen->coding == CODING_RAW;
}

static record describe(const block_job *job, const tensor_context *t) {
    const candidate *c = job->decision.chosen;
    uint64_t raw = job->input.count * ckd_dtype_size(t->tensor->dtype);
    return (record){.kind = RECORD_BLOCK,
                    .coding = c ? (uint32_t)c->coding : CODING_RAW,
                    .predictor = (uint32_t)job->decision.predictor,
                    .tensor = t->tensor,
                    .region = t->region,
                    .first = job->input.first,
                    .count = job->input.count,
                    .raw_size = raw,
                    .stored_size = is_raw(job) ? raw
                                   : c         ? c->size
                                               : 0,
                    .content = job->output.content,
                    .depth = job->decision.depth,
                    .chain_stored = (uint64_t)job->decision.chain.stored,
                    .chain_work = (uint64_t)job->decision.chain.work,
                    .base_stored = job->decision.base_stored,
                    .dependencies = job->decision.dependencies,
                    .dependency_count = job->decision.predictor == PREDICT_NONE
                                            ? job->decision.standalone_dependencies
                                            : job->decision.dependency_count};
}

ckd_status save_depend(save_output *out, const ckd_id *checkpoint, ckd_error *err) {
    for (size_t i = out->dependency_count; i-- > 0;) {
        if (id_equal(&out->dependencies[i], checkpoint)) {
            return CKD_OK;
        }
    }
    if (ARRAY_GROW(out->dependencies, out->dependency_capacity, out->dependency_count + 1, "dependencies",
                   err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    out->dependencies[out->dependency_count++] = *checkpoint;
    return CKD_OK;
}

ckd_status save_register(save_append *out, ckd_save *save, const block_job *job, const tensor_context *t,
                         step_tensor *step, ckd_error *err) {
    out->record = describe(job, t);
    out->group = false;
    const record *r = &out->record;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < r->dependency_count && status == CKD_OK; i++) {
        const ckd_id *checkpoint = &job->decision.dependencies[i].checkpoint;
        status =
            id_equal(checkpoint, &save->checkpoint) ? CKD_OK : save_depend(&save->output, checkpoint, err);
    }
    if (status == CKD_OK && job->decision.predictor == PREDICT_STEP) {
        bool written;
        status = step_record_group(&written, &save->registry.steps, &job->analysis.step.content, err);
        out->group = !written;
        step->used = job->analysis.step.rule;
    }
    if (status != CKD_OK) {
        return status;
    }
    if (step) {
        if (!block_is_duplicate(job)) {
            step_record_gradient(step, job->analysis.step.tried,
                                 job->analysis.step.fits ? job->analysis.step.scale : 0);
        }
        pin_block(step, job, t, r);
    }
    return remember(save, job, t, r, err);
}

ckd_status save_write_block(ckd_save *save, const block_job *job, save_append *a, ckd_error *err) {
    const candidate *c = job->decision.chosen;
    ckd_status status = a->group ? write_group(save, job, err) : CKD_OK;
    for (uint32_t i = 0; i < a->side_count && status == CKD_OK; i++) {
        status = chunk_writer_append(save->output.writer, &a->sides[i].record, a->sides[i].data.data, err);
    }
    THEN(status, chunk_writer_append(save->output.writer, &a->record,
                                     is_raw(job) ? job->input.values
                                     : c         ? c->payload.data
                                                 : NULL,
                                     err));
    if (status == CKD_OK && job->decision.materialize && !save->output.materialized_failed) {
        append_materialized(save, job, &a->record);
    }
    return status;
}

static uint64_t payload_size(const block_job *job, const candidate *c, const tensor_context *t) {
    uint64_t raw = job->input.count * ckd_dtype_size(t->tensor->dtype);
    return c && c->coding != CODING_RAW ? c->size : c ? raw : 0;
}

void save_free_space_for(ckd_save *save, const block_job *job, const tensor_context *t, disk_space *space) {
    uint64_t header = HEADER_BYTES + strlen(t->tensor->name);
    space->payload += header + payload_size(job, job->decision.chosen, t);
    space->copies += job->decision.materialize && !save->output.materialized_failed
                         ? header + payload_size(job, &job->analysis.standalone, t)
                         : 0;
    save->output.index_bytes += header;
}

/* ---- disk space ---- */

static void drop_own(ckd_save *save) {
    chunk_writer_abort(save->output.materialized);
    save->output.materialized = NULL;
    save->output.materialized_failed = true;
}

bool save_drop_copies(ckd_save *save) {
    bool dropped = save->output.materialized != NULL;
    drop_own(save);
    views_drop_materialized(&save->sources.views);
    dropped = materialized_drop_all(save->store) || dropped; /* includes this save's, if they are complete */
    save->output.materialized_closed = false;
    if (dropped) {
        store_message(save->store,
                      "the disk is nearly full: the copies that keep the newest checkpoints cheap to load "
                      "were removed");
    }
    return dropped;
}

bool save_make_room(ckd_save *save, ckd_status status) {
    return status == CKD_E_NOSPACE && save_drop_copies(save);
}

/* An answer about free space remains valid for this time and this many bytes, if there is much more space than that. */
#define ANSWER_NS    UINT64_C(1000000000)
#define ANSWER_BYTES (UINT64_C(64) << 20)

bool save_has_space(ckd_save *save, uint64_t payload, uint64_t copies, uint64_t added) {
    free_space *known = &save->output.space;
    uint64_t needed = payload + save->output.index_bytes + SLACK, now_ns = clock_monotonic_ns();
    known->added += added;
    bool plenty = known->available / 4 >= ANSWER_BYTES && known->available / 2 >= needed + copies;
    if (plenty && known->added < ANSWER_BYTES && now_ns - known->asked_ns < ANSWER_NS) {
        return true;
    }
    uint64_t available = dir_free_space(path_in(save->store->path, DIR_CHUNKS).text);
    *known = (free_space){.available = available, .asked_ns = now_ns};
    return available >= needed && available - needed >= copies;
}

void save_free_space(ckd_save *save, uint64_t payload, uint64_t copies) {
    uint64_t available = dir_free_space(path_in(save->store->path, DIR_CHUNKS).text);
    uint64_t needed = payload + save->output.index_bytes + SLACK;
    if (available < needed) {
        save_drop_copies(save);
    } else if (available - needed < copies) {
        drop_own(save);
    }
}
