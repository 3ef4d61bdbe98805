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
    decoder *decoders; /* one a worker */
    uint32_t decoder_count;
    sibling_cache shared; /* between the calls of this load */
    values_store cached;  /* likewise */
    uint64_t staging;     /* bytes to be held besides the caller's and the workers' */
    columns_cache columns;
    bool *again; /* by tensor of the view: others of the checkpoint are made from it */
    struct {
        uint64_t decoded,
            sent; /* blocks of tensors that were decoded on a device: there, from the root of what is sent on; by the host */
        uint64_t given_up; /* tensors at which a device failed, so that the host had to do it */
    } device;
};

/* The request in this version's form, whatever version it was compiled with. */
ckd_load_request load_request(const ckd_load_request *request);
/* INVALID: no load, no requests, or one without a name or of no size. Public calls begin with it. */
ckd_status load_check_requests(const ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err);
/* What a request differs in from the tensor stored (NULL: none has its name); 0: nothing. */
ckd_difference load_difference(const ckd_load_request *q, const view_tensor *t);
/* `what` of a difference, one sentence's end, into `text`. */
void load_describe_difference(char *text, size_t size, ckd_difference kind, const ckd_load_request *q,
                              const view_tensor *t);
/*
 * The span that a request without differences wants, of `region`, the caller's room for it. sized: its memory must fit. Errors: INVALID.
 */
ckd_status load_span(span *want, ckd_region *region, const ckd_load_request *q, const view_tensor *t,
                     bool sized, ckd_error *err);
/* What the requests that do not differ will read. It belongs to the caller: load_plan_free. Errors: as ckd_load_explain. */
ckd_status load_plan_make(load_plan **out, ckd_load *load, const ckd_load_request *requests, size_t count,
                          ckd_error *err);
/* How the checkpoint differs from all that is asked for. Zero-initialise; load_differences_free. */
typedef struct load_differences {
    ckd_load_difference *items; /* strings are their own */
    size_t count, capacity;
} load_differences;
ckd_status load_find_differences(load_differences *out, const ckd_load *load,
                                 const ckd_load_request *requests, size_t count, ckd_error *err);
/* Those that are in the checkpoint and not `asked` for, by tensor of its view. */
ckd_status load_find_unexpected(load_differences *out, const ckd_load *load, const bool *asked,
                                ckd_error *err);
void load_differences_free(load_differences *d);
/* MISMATCH if there are any that are not allowed: names the first one, and counts all. */
ckd_status load_refuse(const load_differences *d, unsigned allowed, ckd_error *err);
/* All that can be wrong with requests before anything is read. Errors: as ckd_load_all. */
ckd_status load_check(const ckd_load *load, const ckd_load_request *requests, size_t count, unsigned allowed,
                      ckd_error *err);
/* From now on blocks are decoded by this plan, and from these payloads; both may be NULL. */
void load_set_plan(ckd_load *load, const load_plan *plan, const payloads *at_hand);
/* Calls `each` for the blocks of a tensor that may intersect the span, until it fails. */
typedef ckd_status (*load_block_fn)(void *context, const view_block *b, ckd_error *err);
ckd_status load_each_block(const view_tensor *t, const span *want, load_block_fn each, void *context,
                           ckd_error *err);
/* They lie in `items`, which belong to the caller, also on failure: free. */
typedef struct load_blocks {
    const view_block **items;
    size_t count, capacity;
} load_blocks;
ckd_status load_list(load_blocks *out, const view_tensor *t, const span *want, ckd_error *err);
/* One block's share of the span, by the worker's decoder. */
ckd_status load_scatter_one(ckd_load *load, uint32_t worker, const view_tensor *t, const view_block *b,
                            const span *want, void *to, uint64_t *copied, ckd_error *err);
/* Rebuilds these blocks in parallel, and adds to *copied how many elements of the span they had. */
ckd_status load_scatter(ckd_load *load, const view_tensor *t, const span *want, void *to,
                        const view_block *const *blocks, size_t count, uint64_t *copied, ckd_error *err);
/* All that the span wants. */
ckd_status load_scatter_all(ckd_load *load, const view_tensor *t, const span *want, void *to, ckd_error *err);
ckd_status load_check_complete(uint64_t copied, const span *want, ckd_error *err);

/*
 * device.c. The same into the memory of a device, where q->data and q->device are; the caller's stream finds it there. What fails there, out of memory or not, is done by the
 * host, which is counted and told. Errors: as ckd_load_tensor; DEVICE.
 */
ckd_status load_scatter_on_device(ckd_load *load, const view_tensor *t, const span *want,
                                  const ckd_load_request *q, ckd_error *err);

/* Of loads by several ranks, block by block: where a span of a tensor is to be, in a device's memory. */
typedef struct load_device_target {
    const view_tensor *tensor;
    const span *want;
    void *data;
} load_device_target;
/* What came of it: if it is not done, the host is to do it, which says what is wrong, if anything is. */
typedef struct load_attempt {
    bool done, bad; /* bad: what came out is not what was saved */
    ckd_status status;
    ckd_error why;
} load_attempt;
/* Is anything of it better done there? Blocks that have nothing of the span leave the list. */
bool load_suits_device(const view_tensor *t, const span *want, void *data, load_blocks *list);
/* Some of its blocks. Adds to *copied how many elements of the span they had, if all is well. */
void load_decode_there(load_attempt *out, ckd_load *load, device_lease *lease,
                       const load_device_target *there, const view_block **blocks, size_t count,
                       uint64_t *copied);
/* The host could do what the device could not, which is counted and told. */
void load_report_attempt(ckd_load *load, const view_tensor *t, const load_attempt *a);
/* What was put on the line comes before what the caller's stream has from now on. Gives the line back. status: of what was put there. */
ckd_status load_lease_done(ckd_load *load, device_lease *lease, ckd_status status, ckd_error *err);

#endif
