/* Takes tensors and blobs from the caller. Blocks of a tensor may be in progress beyond the call. */
#include <stdlib.h>

#include "engine/save/internal.h"
#include "engine/device/device.h"
#include "engine/common/common.h"
#include "engine/save/device.h"
#include "engine/save/lossy.h"

#define HEADER_BYTES 512u /* of a blob's record, roughly, without its name */

static ckd_status check_description(const ckd_tensor *t, geometry *shape, uint64_t *elements,
                                    ckd_error *err) {
    size_t length = t->name ? strlen(t->name) : 0;
    if (length == 0 || length > CKD_NAME_MAX || !utf8_valid(t->name, length)) {
        return err_set(err, CKD_E_INVALID, "a tensor's name must have 1 to %d bytes of UTF-8", CKD_NAME_MAX);
    }
    if (t->weight && strnlen(t->weight, CKD_NAME_MAX + 1) > CKD_NAME_MAX) {
        return err_in_tensor(
            err, err_set(err, CKD_E_INVALID, "its weight's name has more than %d bytes", CKD_NAME_MAX),
            t->name);
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

/* Reports a tensor that would be lossy if its role were known. */
static void record_doubt(ckd_save *save, const ckd_tensor *t, const role_name *parsed, uint64_t elements) {
    bool small = parsed->slot == SLOT_SMALL && parsed->sure;
    bool doubt = t->role == CKD_ROLE_AUTO && parsed->marked && !small && elements >= ROLE_MIN &&
                 ckd_role_of(t->name, t->dtype) == CKD_ROLE_OTHER &&
                 lossy_part_of(CKD_ROLE_WEIGHT, t->dtype) != LOSSY_NONE;
    if (!doubt || save_coarsest_fidelity(save) == CKD_EXACT) {
        return;
    }
    if (save->lossy.in_doubt++ == 0) {
        store_message(
            save->store,
            "'%s' looks like optimizer state, but its name does not say which weight it belongs to: it is "
            "stored exactly unless you give it a role",
            t->name);
    }
}

uint64_t ckd_save_in_doubt(const ckd_save *save) {
    return save->lossy.in_doubt;
}

/*
 * Finds the parameter to which the tensor belongs. If the given role differs from the role that the name suggests, the
 * name is not trusted for the parameter either.
 */
static ckd_status find_weight(tensor_context *context, ckd_save *save, const ckd_tensor *t, ckd_error *err) {
    const record_tensor *tensor = context->tensor;
    size_t length = strlen(tensor->name), size = length;
    role_name parsed;
    role_name_read(&parsed, tensor->name, length);
    record_doubt(save, t, &parsed, context->shape.elements);
    bool by_name = tensor->role == CKD_ROLE_WEIGHT ||
                   (parsed.slot != SLOT_NONE && role_of_slot(parsed.slot) == tensor->role);
    context->largest = parsed.slot == SLOT_LARGEST_SECOND && tensor->role == CKD_ROLE_EXP_AVG_SQ;
    const char *weight = t->weight                         ? t->weight
                         : !by_name                        ? NULL
                         : tensor->role == CKD_ROLE_WEIGHT ? tensor->name
                                                           : role_name_family(tensor->name, length, &size);
    context->weight = weight;
    if (!weight || (weight != t->weight && weight + size == tensor->name + length)) {
        return CKD_OK; /* the weight's name is the end of the tensor's name, which the save keeps */
    }
    size = t->weight ? strlen(t->weight) : size;
    char *copy = arena_alloc(&save->registry.arena, size + 1);
    if (!copy) {
        return err_nomem(err, size + 1, "a weight's name");
    }
    memcpy(copy, weight, size);
    copy[size] = '\0';
    context->weight = copy;
    return CKD_OK;
}

/* Returns the save's copy of a region. Most regions are whole, and share one. NULL: out of memory. */
static const ckd_region *keep_region(ckd_save *save, const geometry *shape, const ckd_region *region) {
    static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
    ckd_region canonical = region_canonical(shape, region);
    if (canonical.kind == CKD_REGION_WHOLE) {
        return &whole;
    }
    ckd_region *copy = arena_alloc(&save->registry.arena, sizeof(*copy));
    if (copy) {
        *copy = canonical;
    }
    return copy;
}

/* Describes a tensor. The content index points to its name and region, which live as long as the save. */
static ckd_status make_tensor_context(ckd_save *save, const ckd_tensor *t, const geometry *shape,
                                      tensor_context *context, ckd_error *err) {
    size_t length = strlen(t->name) + 1;
    record_tensor *tensor = arena_alloc(&save->registry.arena, sizeof(*tensor));
    char *name = arena_alloc(&save->registry.arena, length);
    const ckd_region *region = keep_region(save, shape, &t->region);
    if (!tensor || !name || !region) {
        return err_nomem(err, sizeof(*tensor) + length + sizeof(*region), "a tensor's description");
    }
    memcpy(name, t->name, length);
    *tensor = (record_tensor){.name = name,
                              .checkpoint = save->checkpoint,
                              .dtype = t->dtype,
                              .ndim = t->ndim,
                              .role = t->role == CKD_ROLE_AUTO ? ckd_role_of(name, t->dtype) : t->role};
    memcpy(tensor->shape, shape->shape, t->ndim * sizeof(uint64_t));
    *context = (tensor_context){
        .tensor = tensor, .shape = *shape, .region = region, .block_elements = save_block_elements(save, t)};
    ckd_status status = find_weight(context, save, t, err);
    if (status != CKD_OK) {
        return status;
    }
    const view *before = save->target.compare ? save->sources.existing : save->sources.parent;
    const view_tensor *old = before ? view_find(before, name) : NULL;
    bool same = old && old->tensor->dtype == t->dtype && old->shape->ndim == shape->ndim &&
                memcmp(old->shape->shape, shape->shape, shape->ndim * sizeof(uint64_t)) == 0;
    context->parent = same ? old : NULL;
    if (old && !same && !save->target.compare) {
        store_message(save->store,
                      "%s is stored without a delta: in the parent it is %s, with a different %s", name,
                      ckd_dtype_name(old->tensor->dtype), old->tensor->dtype == t->dtype ? "shape" : "dtype");
    }
    return CKD_OK;
}

/* ---- comparing with the store ---- */

typedef struct comparing {
    ckd_save *save;
    const tensor_context *tensor;
} comparing;

static ckd_status compare_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    comparing *c = context;
    return save_compare_block(c->save, &c->save->pipeline.jobs[index], c->tensor, err);
}

static ckd_status compare_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                                 uint64_t elements, ckd_error *err) {
    comparing c = {save, t};
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; status == CKD_OK && (at < elements || elements == 0);) {
        uint32_t count = 0;
        uint64_t first = at;
        status = cancel_poll(&save->group.stop, err);
        while (status == CKD_OK && count < save->pipeline.threads && (at < elements || count == 0)) {
            block_job *job = &save->pipeline.jobs[count++];
            job->input.first = at;
            job->input.count = elements - at < t->block_elements ? elements - at : t->block_elements;
            at += job->input.count;
            tensor_elements block = {tensor, job->input.first, job->input.count};
            status = save_fetch(&job->input.values, save, &job->input.own, &block, err);
        }
        THEN(status, pool_run(save->store->pool, count, compare_one, &c, err));
        THEN(status, save_report_progress(save, (at - first) * ckd_dtype_size(tensor->dtype), err));
        if (elements == 0) {
            break;
        }
    }
    if (status == CKD_OK) {
        save_compared_region(&save->sources, t);
    }
    return status;
}

/* ---- saving ---- */

/*
 * Saves a tensor with an optimizer. Moments are held block by block for the tensors that they predict, so nothing
 * else is in progress meanwhile.
 */
static ckd_status save_on_step(ckd_save *save, const ckd_tensor *tensor, tensor_context *t, uint64_t elements,
                               ckd_error *err) {
    step_tensor step;
    ckd_status status = save_flush(save, err);
    if (status != CKD_OK) {
        return status;
    }
    step_begin(&step, &save->registry.steps, tensor->optimizer, t, elements, save->sources.parent);
    t->step = step.source.available ? &step.source : NULL;
    status = save_exact_span(save, &(exact_span){tensor, t, 0, elements}, &step, err);
    THEN(status, save_flush(save, err));
    if (status != CKD_OK) {
        save_stop_helpers(save); /* they use `step` */
    }
    step_end(&step, &save->registry.steps);
    return status;
}

/* Saves a region in blocks of its own order. */
static ckd_status save_whole(ckd_save *save, const ckd_tensor *tensor, tensor_context *t, uint64_t elements,
                             ckd_error *err) {
    ckd_status status = save_record_whole(&save->registry, t, elements, err);
    if (status != CKD_OK) {
        return status;
    }
    if (elements > 0 && save_lossy_part(save, t->tensor) != LOSSY_NONE) {
        return save_lossy_region(save, tensor, t, elements, err);
    }
    status = pair_exact_tensor(save, tensor, t, elements, err);
    if (status != CKD_OK) {
        return status;
    }
    exact_span all = {tensor, t, 0, elements};
    return tensor->optimizer ? save_on_step(save, tensor, t, elements, err)
                             : save_exact_span(save, &all, NULL, err);
}

static ckd_status save_region(ckd_save *save, const ckd_tensor *tensor, ckd_error *err) {
    geometry shape;
    uint64_t elements;
    tensor_context context;
    ckd_status status = check_description(tensor, &shape, &elements, err);
    THEN(status, make_tensor_context(save, tensor, &shape, &context, err));
    THEN(status, save_record_region(&save->registry, context.tensor, &shape, context.region, elements, err));
    if (status != CKD_OK) {
        return tensor->name ? err_in_tensor(err, status, tensor->name) : status;
    }
    bool has_cached = context.parent && !save->sources.ignore_cached;
    context.parent_values = has_cached ? save->input.parent_values : NULL;
    context.decoded_values = save->target.compare ? NULL : save->input.decoded_values;
    context.values_span = (region_span){context.region, 0, elements};
    bool expected = context.parent && elements > 0;
    save->input.leaves_budget = expected ? (double)elements / (double)shape.elements : 0;
    if (save->target.compare) {
        status = compare_region(save, tensor, &context, elements, err);
    } else if (save_is_cut(save, tensor, &context, elements)) {
        status = save_in_panels(save, tensor, &context, err);
    } else {
        status = save_whole(save, tensor, &context, elements, err);
    }
    if (!save->input.buffers_are_stable) {
        THEN(status, save_end_tiles(save, err));
        if (status == CKD_OK && save->device.has_pending_values) {
            status = save_flush(save, err);
            save->device.has_pending_values = false;
        }
        THEN(status, save_copy_borrowed(save, err));
    }
    if (status != CKD_OK) {
        save_stop_helpers(save);
    }
    return err_in_tensor(err, status, tensor->name);
}

/*
 * Returns true if the device keeps the values for the next save's deltas. Lossy tensors are kept when they are coded
 * (lossy/device.c).
 */
static bool device_keeps_values(const ckd_save *save, const ckd_tensor *t) {
    ckd_role role = t->role == CKD_ROLE_AUTO ? ckd_role_of(t->name, t->dtype) : t->role;
    return save_device_is_used() && save->store->device_reference_bytes > 0 && !save->target.compare &&
           (role == CKD_ROLE_WEIGHT || role == CKD_ROLE_MASTER || role == CKD_ROLE_OTHER) &&
           (t->dtype == CKD_F32 || t->dtype == CKD_BF16 || t->dtype == CKD_F16) &&
           save_fidelity(save, role) == CKD_EXACT;
}

/*
 * Whether the store still has intact records of the parent's values that the device has. A parent of another shape is
 * not used at all.
 */
static bool parent_is_intact(ckd_save *save, const ckd_tensor *t, const ckd_region *region,
                             uint64_t elements) {
    const view *parent = save->sources.parent;
    const view_tensor *old = parent ? view_find(parent, t->name) : NULL;
    const view_source stored = {parent, old, {region, 0, elements}, NULL};
    bool same = old && old->tensor->dtype == t->dtype && old->shape->ndim == t->ndim &&
                memcmp(old->shape->shape, t->shape, t->ndim * sizeof(uint64_t)) == 0;
    bytes scratch = {0};
    same = same && chain_is_intact(&save->sources.views, &stored, &scratch);
    bytes_free(&scratch);
    return same;
}

/*
 * Saves a tensor from `values`, whose lease and address are set. The cached values should be the parent's; hashes
 * show if they are not.
 */
static ckd_status save_beside_parent(ckd_save *save, const ckd_tensor *t, const geometry *shape,
                                     device_reader *values, ckd_error *err) {
    ckd_region region = region_canonical(shape, &t->region);
    device_reference_key key = {t->name, t->dtype, t->ndim, {&region, 0, values->elements}};
    int device = values->lease->queue.device;
    device_reference *reference = device_reference_acquire(save->store, device, &key);
    bool counts =
        reference && !save->sources.ignore_cached && parent_is_intact(save, t, &region, values->elements);
    values->parent_values = counts ? reference->memory : NULL;
    save->device.named_elements = 0;
    ckd_status status = save_region(save, t, err);
    /* its blocks will be duplicates again, so no delta will need its values */
    bool already_saved = save->device.named_elements == values->elements;
    if (status == CKD_OK && !already_saved) {
        /* All blocks have been looked at. Values that are not cached now are decoded by the next save. */
        ckd_error unheard;
        (void)device_reference_keep(&reference, save->store, values->lease, &key, values->data, &unheard);
    }
    device_reference_release(save->store, reference);
    return status;
}

typedef struct fetched_values {
    const uint8_t *values;
    size_t element;
} fetched_values;

static ckd_status read_fetched(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const fetched_values *f = context;
    (void)err;
    memcpy(to, f->values + first * f->element, count * f->element);
    return CKD_OK;
}

/* Saves a small tensor: waits once for the device, then works on the host alone. Gives the lease back. */
static ckd_status save_small(ckd_save *save, ckd_tensor *t, device_lease *lease, uint64_t elements,
                             ckd_error *err) {
    fetched_values fetched = {.element = ckd_dtype_size(t->dtype)};
    const void *values;
    ckd_status status = device_read_small(&values, lease, t->data, elements * fetched.element, err);
    if (status != CKD_OK) {
        device_release(save->store, lease);
        return err_in_tensor(err, status, t->name);
    }
    fetched.values = values;
    t->data = NULL;
    t->read = read_fetched;
    t->read_context = &fetched;
    status = save_region(save, t, err);
    device_release_idle(save->store, lease);
    return status;
}

/* Values on a device are read like those of a read function. */
static ckd_status save_from_device(ckd_save *save, const ckd_tensor *tensor, ckd_error *err) {
    ckd_tensor t = *tensor;
    geometry shape;
    uint64_t elements;
    device_lease *lease;
    ckd_status status = check_description(&t, &shape, &elements, err);
    if (status == CKD_OK && elements == 0) {
        return save_region(save, &t, err);
    }
    THEN(status, device_acquire(&lease, save->store, t.device, t.data, err));
    if (status != CKD_OK) {
        return err_in_tensor(err, status, t.name ? t.name : "");
    }
    if (elements * ckd_dtype_size(t.dtype) <= DEVICE_SMALL) {
        return save_small(save, &t, lease, elements, err);
    }
    device_reader values = device_reader_of(lease, t.data, ckd_dtype_size(t.dtype), elements);
    t.data = NULL;
    t.read = device_read;
    t.read_context = &values;
    status = device_keeps_values(save, &t) ? save_beside_parent(save, &t, &shape, &values, err)
                                           : save_region(save, &t, err);
    device_release(save->store, lease);
    return status;
}

ckd_status ckd_save_tensor(ckd_save *save, const ckd_tensor *tensor, ckd_error *err) {
    ckd_status status = save_check_open(save, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_tensor description;
    ckd_optimizer optimizer = CKD_OPTIMIZER_INIT;
    status = tensor_copy(&description, tensor, err);
    if (status == CKD_OK && description.optimizer) {
        status = optimizer_copy(&optimizer, description.optimizer, err);
        description.optimizer = &optimizer;
    }
    if (status == CKD_OK) {
        save->input.callers_mode = float_mode_enter();
        bool on_device = description.device && description.data;
        status = on_device ? save_from_device(save, &description, err) : save_region(save, &description, err);
        float_mode_leave(save->input.callers_mode);
    }
    save_make_room(save, status); /* does not help this save, but the caller's next one */
    save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
    return status;
}

ckd_status save_finish_blocks(ckd_save *save, ckd_error *err) {
    save->input.callers_mode = float_mode_enter();
    ckd_status status = save_end_tiles(save, err);
    THEN(status, save_flush(save, err));
    if (status != CKD_OK) {
        save_stop_helpers(save);
    }
    float_mode_leave(save->input.callers_mode);
    save_make_room(save, status); /* does not help this save, but the caller's next one */
    save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
    return status;
}

static ckd_status check_blob(const char *name, const void *data, size_t size, ckd_error *err) {
    size_t length = name ? strnlen(name, CKD_NAME_MAX + 1) : 0;
    if (length == 0 || length > CKD_NAME_MAX || !utf8_valid(name, length)) {
        return err_set(err, CKD_E_INVALID, "a blob's name must have 1 to %d bytes of UTF-8", CKD_NAME_MAX);
    }
    if (size > CKD_BLOB_MAX) {
        return err_set(err, CKD_E_INVALID, "blob '%s' has %zu bytes; at most 1 GiB is allowed", name, size);
    }
    return data || size == 0
               ? CKD_OK
               : err_set(err, CKD_E_INVALID, "blob '%s' has %zu bytes, and no data is given", name, size);
}

static ckd_status write_blob(ckd_save *save, const char *name, const void *data, size_t size,
                             ckd_error *err) {
    size_t length = strlen(name);
    record_tensor tensor = {.name = name, .checkpoint = save->checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region region = {.kind = CKD_REGION_WHOLE};
    bytes packed = {0};
    coder_result result = {.limit = size};
    ckd_status status = CKD_OK;
    if (bytes_extend(&packed, size + 1)) {
        result.to = packed.data;
        status = coder_encode(save->pipeline.jobs[0].decoder.coder, CODING_ZSTD, 0,
                              &(coder_source){data, size, 1}, &result, err);
    }
    bool is_raw = result.stored == 0;
    record r = {.kind = RECORD_BLOB,
                .coding = is_raw ? CODING_RAW : CODING_ZSTD,
                .tensor = &tensor,
                .region = &region,
                .raw_size = size,
                .stored_size = is_raw ? size : result.stored,
                .content = content_hash(data, size),
                .chain_stored = is_raw ? size : result.stored,
                .base_stored = is_raw ? size : result.stored};
    if (status == CKD_OK) {
        save->output.index_bytes += HEADER_BYTES + length;
        save_free_space(save, HEADER_BYTES + length + r.stored_size, 0);
        status = chunk_writer_append(save->output.writer, &r, is_raw ? data : packed.data, err);
    }
    save_make_room(save, status);
    bytes_free(&packed);
    save->stats.raw_bytes += size;
    return status;
}

ckd_status ckd_save_blob(ckd_save *save, const char *name, const void *data, size_t size, ckd_error *err) {
    ckd_status status = save_check_open(save, err);
    if (status != CKD_OK) {
        return status;
    }
    status = check_blob(name, data, size, err);
    THEN(status, cancel_poll(&save->group.stop, err));
    THEN(status, save_record_blob(&save->registry, name, err));
    THEN(status, save_finish_blocks(save, err));
    THEN(status, save->target.compare ? save_compare_blob(save, name, data, size, err)
                                      : write_blob(save, name, data, size, err));
    save->state = status == CKD_OK ? SAVE_OPEN : SAVE_FAILED;
    return status;
}
