/* A load in progress. Internal to engine/: the files of load/, and ranks/collective_load.c. */
#ifndef ENGINE_LOAD_LOAD_H
#define ENGINE_LOAD_LOAD_H

#include "base/file.h"
#include "engine/decode/decode.h"
#include "engine/device/device.h"

struct ckd_load {
    ckd_store *store;
    file_lock *reader_lock;
    view_cache views;
    const view *view;
    ckd_tensor_list tensors;
    decoder *decoders; /* one per worker */
    uint32_t decoder_count;
    sibling_cache shared; /* across the calls of this load */
    values_store cached;  /* likewise */
    uint64_t staging;     /* bytes that may be held besides the caller's and the workers' */
    columns_cache columns;
    bool *has_derived; /* by tensor of the view: other tensors of the checkpoint are built from it */
    struct {
        /*
         * Counts blocks of tensors that a device completed. `decoded`: the device decoded them, from the root of what
         * was sent. `sent`: the host decoded them and sent their values.
         */
        uint64_t decoded, sent;
        uint64_t given_up; /* tensors where the device failed and the host took over */
    } device;
};

/*
 * Divides the memory for values that are needed again between both caches. With a plan the values_store keeps them all,
 * and gets what the siblings of earlier calls leave. No thread may be decoding.
 */
void load_divide_staging(ckd_load *load, uint64_t staging, bool planned);
/* Converts a request of any version to this version's struct. */
ckd_load_request load_request(const ckd_load_request *request);
/* Every public call begins with it. Errors: INVALID (no load, no requests, or a request without a name or size). */
ckd_status load_check_requests(const ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err);
/* Finds the stored tensor of a request without differences, else NULL. *q: the request, in this version's struct. */
const view_tensor *load_match(ckd_load_request *q, const ckd_load *load, const ckd_load_request *request);
/* How a request differs from the stored tensor (NULL: the name is not stored); 0: not at all. */
ckd_difference load_difference(const ckd_load_request *q, const view_tensor *t);
/* Writes what differs into `text`, as the end of a sentence. */
void load_describe_difference(char *text, size_t size, ckd_difference kind, const ckd_load_request *q,
                              const view_tensor *t);
/*
 * Sets the span of a request that has no differences. `region` is the caller's, and the span points to it. sized: also
 * checks that the caller's memory fits. Errors: INVALID.
 */
ckd_status load_span(region_span *span, ckd_region *region, const ckd_load_request *q, const view_tensor *t,
                     bool sized, ckd_error *err);
/*
 * Plans the reads of all requests that have no differences. The caller releases the plan (load_plan_free). Errors: as
 * ckd_load_explain.
 */
ckd_status load_plan_make(load_plan **out, ckd_load *load, const ckd_load_request *requests, size_t count,
                          ckd_error *err);
/* Announces the plan's reads to a store whose files are elsewhere. Does without if memory is short. */
void load_plan_announce(const load_plan *plan);
/*
 * Differences between the checkpoint and all requests. Zero-initialise; release with load_differences_free. ignored:
 * CKD_DIFFERS_UNEXPECTED if nobody wants to know of tensors that are not requested. A load of some then takes no longer
 * for those.
 */
typedef struct load_differences {
    ckd_load_difference *items; /* own their strings */
    size_t count, capacity;
} load_differences;
ckd_status load_find_differences(load_differences *out, const ckd_load *load,
                                 const ckd_load_request *requests, size_t count, unsigned ignored,
                                 ckd_error *err);
/* Finds tensors that nobody requested. requested: by tensor of the load's view. */
ckd_status load_find_unexpected(load_differences *out, const ckd_load *load, const bool *requested,
                                ckd_error *err);
void load_differences_free(load_differences *d);
/* Fails if there are differences that are not allowed: names the first, and counts all. Errors: MISMATCH. */
ckd_status load_refuse(const load_differences *d, unsigned allowed, ckd_error *err);
/* Makes all checks of requests that need no payload. Errors: as ckd_load_all. */
ckd_status load_check(const ckd_load *load, const ckd_load_request *requests, size_t count, unsigned allowed,
                      ckd_error *err);
/* Sets the plan and the payloads that blocks are decoded with from now on; both may be NULL. */
void load_set_plan(ckd_load *load, const load_plan *plan, const payloads *in_memory);
/* Sets the values that the caller has anyway, until the next call; NULL: none. No thread may be decoding. */
void load_set_known(ckd_load *load, const known_values *known);
/* Calls `each` for the blocks of a tensor that may intersect the span, until a call fails. */
typedef ckd_status (*load_block_fn)(void *context, const view_block *b, ckd_error *err);
ckd_status load_each_block(const view_tensor *t, const region_span *span, load_block_fn visit, void *context,
                           ckd_error *err);

/* ---- execute.c ---- */
/*
 * One request of a load: the span it asks for, its destination, and the blocks that may have its values. Made in place,
 * as the span points to the region. Zero-initialise; release with load_task_free.
 */
typedef struct load_task {
    const view_tensor *tensor;
    region_span span;
    ckd_region region;
    void *to; /* host memory; the task's own if it is for a device. NULL: the device decodes the blocks */
    const ckd_device *device; /* final destination; NULL: `to` */
    void *on_device;
    const view_block **blocks;
    size_t count, capacity, done; /* the first `done` blocks are decoded */
    uint64_t copied;              /* elements of these */
} load_task;

/* Sets span, destination and blocks for a request without differences to the tensor. Errors: INVALID, DEVICE, NOMEM. */
ckd_status load_task_make(load_task *out, ckd_load *load, const ckd_load_request *q, const view_tensor *t,
                          ckd_error *err);
/* Adds the blocks that may have a part of the span. */
ckd_status load_task_list(load_task *task, ckd_error *err);
/*
 * Decodes the next `count` blocks. If a device fails, out of memory included, the host decodes instead, from the first
 * block on; that is counted and reported. After the last block, the whole span must be there. Errors: CORRUPT and
 * others of decoding, NOMEM.
 */
ckd_status load_task_execute(ckd_load *load, load_task *task, size_t count, ckd_error *err);
/* Whether the whole span is there, once all blocks are decoded. Errors: CORRUPT. */
ckd_status load_task_check(const load_task *task, ckd_error *err);
/* Decodes one block's part of a span, with the worker's decoder. Adds the number of elements to *copied. */
ckd_status load_decode_block(ckd_load *load, uint32_t worker, const view_block *b, const span_target *target,
                             uint64_t *copied, ckd_error *err);
/* Copies values that were decoded in host memory to their device, before later work of the caller's stream. */
ckd_status load_task_finish(ckd_load *load, const load_task *task, ckd_error *err);
void load_task_free(load_task *task);

/* ---- device_task.c ---- */
/* The outcome on a device. If it is not done, the host decodes instead and reports the error, if there is one. */
typedef struct device_attempt {
    bool done, mismatch; /* mismatch: the device's values are not the ones that were saved */
    ckd_status status;
    ckd_error why;
} device_attempt;
/* Decodes the task's blocks from `first` on, up to those done. */
void load_decode_on_device(device_attempt *out, ckd_load *load, load_task *task, size_t first);
/* If the device did not make the values, the host does, and reports that. Errors: as load_task_execute. */
ckd_status load_task_after_device(ckd_load *load, load_task *task, const device_attempt *attempt,
                                  ckd_error *err);
/* Counts and reports that the host decoded after the device failed. */
void load_report_attempt(ckd_load *load, const view_tensor *t, const device_attempt *a);
/* Allocates host memory for the whole task, which is finally copied to its device. Errors: NOMEM. */
ckd_status load_task_use_host(load_task *task, ckd_error *err);
/*
 * Sets the destination. If no block is better decoded on the device, that is host memory first. Errors: INVALID,
 * DEVICE, NOMEM.
 */
ckd_status load_task_find_device(load_task *task, ckd_load *load, const ckd_load_request *q, ckd_error *err);

/*
 * The tensors for devices of one call. They may be written until load_devices_wait returns: the host works on some
 * while devices work on others. An error names the tensor. Errors: as load_task_execute. load_devices_end waits for
 * devices, too, and accepts NULL.
 */
typedef struct load_devices load_devices;
ckd_status load_devices_begin(load_devices **out, ckd_load *load, ckd_error *err);
ckd_status load_devices_add(load_devices *d, const ckd_load_request *q, const view_tensor *tensor,
                            ckd_error *err);
ckd_status load_devices_wait(load_devices *d, ckd_error *err);
void load_devices_end(load_devices *d);

/* ---- task_batch.c ---- */
/*
 * Decodes all blocks of new tasks for host memory, in one run of the pool. An error names the tensor. Errors: as
 * load_task_execute.
 */
ckd_status load_tasks_execute(ckd_load *load, load_task *tasks, size_t count, ckd_error *err);

#endif
