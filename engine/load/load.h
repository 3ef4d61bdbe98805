/* A load in progress. Internal to engine/: load.c, device.c, batch.c, explain.c, ranks/collective_load.c. */
#ifndef ENGINE_LOAD_H
#define ENGINE_LOAD_H

#include "base/file.h"
#include "engine/device/device.h"
#include "engine/decode/sibling_cache.h"

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
    bool *again; /* by tensor of the view: other tensors of the checkpoint are built from it */
    struct {
        /*
         * Counts blocks of tensors that a device completed. `decoded`: the device decoded them, from the root of what
         * was sent. `sent`: the host decoded them and sent their values.
         */
        uint64_t decoded, sent;
        uint64_t given_up; /* tensors where the device failed and the host took over */
    } device;
};

/* Converts a request of any version to this version's struct. */
ckd_load_request load_request(const ckd_load_request *request);
/* Every public call begins with it. Errors: INVALID (no load, no requests, or a request without a name or size). */
ckd_status load_check_requests(const ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err);
/* How a request differs from the stored tensor (NULL: the name is not stored); 0: not at all. */
ckd_difference load_difference(const ckd_load_request *q, const view_tensor *t);
/* Writes what differs into `text`, as the end of a sentence. */
void load_describe_difference(char *text, size_t size, ckd_difference kind, const ckd_load_request *q,
                              const view_tensor *t);
/*
 * Sets the span of a request that has no differences. `region` is the caller's, and the span points to it. sized: also
 * checks that the caller's memory fits. Errors: INVALID.
 */
ckd_status load_span(span *want, ckd_region *region, const ckd_load_request *q, const view_tensor *t,
                     bool sized, ckd_error *err);
/*
 * Plans the reads of all requests that have no differences. The caller releases the plan (load_plan_free). Errors: as
 * ckd_load_explain.
 */
ckd_status load_plan_make(load_plan **out, ckd_load *load, const ckd_load_request *requests, size_t count,
                          ckd_error *err);
/* Differences between the checkpoint and all requests. Zero-initialise; release with load_differences_free. */
typedef struct load_differences {
    ckd_load_difference *items; /* own their strings */
    size_t count, capacity;
} load_differences;
ckd_status load_find_differences(load_differences *out, const ckd_load *load,
                                 const ckd_load_request *requests, size_t count, ckd_error *err);
/* Finds tensors that nobody requested. asked: by tensor of the load's view. */
ckd_status load_find_unexpected(load_differences *out, const ckd_load *load, const bool *asked,
                                ckd_error *err);
void load_differences_free(load_differences *d);
/* Fails if there are differences that are not allowed: names the first, and counts all. Errors: MISMATCH. */
ckd_status load_refuse(const load_differences *d, unsigned allowed, ckd_error *err);
/* Makes all checks of requests that need no payload. Errors: as ckd_load_all. */
ckd_status load_check(const ckd_load *load, const ckd_load_request *requests, size_t count, unsigned allowed,
                      ckd_error *err);
/* Sets the plan and the payloads that blocks are decoded with from now on; both may be NULL. */
void load_set_plan(ckd_load *load, const load_plan *plan, const payloads *at_hand);
/* Calls `each` for the blocks of a tensor that may intersect the span, until a call fails. */
typedef ckd_status (*load_block_fn)(void *context, const view_block *b, ckd_error *err);
ckd_status load_each_block(const view_tensor *t, const span *want, load_block_fn each, void *context,
                           ckd_error *err);
/* The caller frees `items`, also on failure. */
typedef struct load_blocks {
    const view_block **items;
    size_t count, capacity;
} load_blocks;
ckd_status load_list(load_blocks *out, const view_tensor *t, const span *want, ckd_error *err);
/* Places one block's part of the span, with the worker's decoder. */
ckd_status load_scatter_one(ckd_load *load, uint32_t worker, const view_tensor *t, const view_block *b,
                            const span *want, void *to, uint64_t *copied, ckd_error *err);
/* Decodes these blocks in parallel and places them. Adds the number of elements placed to *copied. */
ckd_status load_scatter(ckd_load *load, const view_tensor *t, const span *want, void *to,
                        const view_block *const *blocks, size_t count, uint64_t *copied, ckd_error *err);
/* Decodes and places the whole span. */
ckd_status load_scatter_all(ckd_load *load, const view_tensor *t, const span *want, void *to, ckd_error *err);
ckd_status load_check_complete(uint64_t copied, const span *want, ckd_error *err);

/*
 * device.c. The same into device memory (q->data on q->device), ordered before later work of the caller's stream. If
 * the device fails, out of memory included, the host decodes instead; the fallback is counted and reported. Errors: as
 * ckd_load_tensor; DEVICE.
 */
ckd_status load_scatter_on_device(ckd_load *load, const view_tensor *t, const span *want,
                                  const ckd_load_request *q, ckd_error *err);

/* For loads of several ranks, which go block by block: the device memory of one tensor's span. */
typedef struct load_device_target {
    const view_tensor *tensor;
    const span *want;
    void *data;
} load_device_target;
/* The outcome on a device. If it is not done, the host decodes instead and reports the error, if there is one. */
typedef struct load_attempt {
    bool done, bad; /* bad: the device's values are not the ones that were saved */
    ckd_status status;
    ckd_error why;
} load_attempt;
/* Whether the device should decode any of it. Removes blocks without elements of the span from the list. */
bool load_suits_device(const view_tensor *t, const span *want, void *data, load_blocks *list);
/* Decodes some blocks of the target. Adds the number of elements placed to *copied, if all succeed. */
void load_decode_there(load_attempt *out, ckd_load *load, device_lease *lease,
                       const load_device_target *there, const view_block **blocks, size_t count,
                       uint64_t *copied);
/* Counts and reports that the host decoded after the device failed. */
void load_report_attempt(ckd_load *load, const view_tensor *t, const load_attempt *a);
/* Orders the lease's work before later work of the caller's stream, and returns the lease. status: of that work. */
ckd_status load_lease_done(ckd_load *load, device_lease *lease, ckd_status status, ckd_error *err);

#endif
