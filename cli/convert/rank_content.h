/*
 * The content of one rank of a layout, made from a checkpoint: the inverse of import. The checkpoint's names are looked
 * up once. Then each rank's tensors are determined, and loaded box by box. Tensors of flat buffers are placed there
 * (rank_flat.c).
 */
#ifndef CLI_RANK_CONTENT_H
#define CLI_RANK_CONTENT_H

#include "cli/layout/layout.h"

/* A checkpoint's tensors with their matching rules. The list must outlive it. */
typedef struct bound_checkpoint {
    const layout *layout;
    const ckd_tensor_list *list;
    layout_bindings *bindings; /* one per tensor */
} bound_checkpoint;

/* Matches the tensors. Errors: MISMATCH (a tensor that no rule matches, or that no rank would hold), NOMEM. */
ckd_status bound_checkpoint_make(bound_checkpoint *out, const layout *l, const ckd_tensor_list *list,
                                 ckd_error *err);
void bound_checkpoint_free(bound_checkpoint *b);

typedef struct rank_tensor {
    char *name; /* in the rank's file */
    const layout_rule *rule;
    /* layout_tensors_of(rule) tensors of the checkpoint; NULL for a flat buffer */
    const ckd_tensor_info **parts;
    layout_share share;          /* for a flat buffer only the shape */
    struct rank_tensor *members; /* for a flat buffer: tensors as the rank would have them */
    layout_range *ranges;        /* the range of each member in the buffer */
    size_t member_count;
} rank_tensor;

ckd_dtype rank_tensor_dtype(const rank_tensor *t);
void rank_tensor_free(rank_tensor *t);

typedef struct rank_content {
    rank_tensor *items; /* in checkpoint order */
    size_t count;
} rank_content;

/*
 * Determines a rank's tensors. Errors: MISMATCH (the tensor cannot be cut as the rule says, or a part is missing; with
 * the rule's file and line), NOMEM.
 */
ckd_status rank_content_make(rank_content *out, const bound_checkpoint *b, uint32_t rank, ckd_error *err);
void rank_content_free(rank_content *c);
/*
 * Step of rank_content_make: moves tensors into flat buffers. A buffer takes the place of its first tensor. Errors: as
 * above.
 */
ckd_status rank_content_flatten(rank_content *c, const bound_checkpoint *b, uint32_t rank, ckd_error *err);

/* Appends one request for each checkpoint region that the tensor needs. Names belong to the checkpoint. */
ckd_status rank_tensor_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                ckd_error *err);

/* As rank_tensor_requests, for flat buffers. */
ckd_status rank_flat_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                              ckd_error *err);
ckd_status rank_flat_load(void *to, void *scratch, const rank_tensor *t, const ckd_region *box,
                          ckd_load *load, ckd_error *err);
/* Appends the requests of one box. */
ckd_status rank_tensor_box_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                    const ckd_region *box, ckd_error *err);
ckd_status rank_add_request(ckd_load_request **requests, size_t *count, const ckd_load_request *request,
                            ckd_error *err);

/*
 * Loads a box into `to`. The box is in coordinates of the rank's tensor. `scratch`: as much memory again, for
 * scratch.
 */
ckd_status rank_tensor_load(void *to, void *scratch, const rank_tensor *t, const ckd_region *box,
                            ckd_load *load, ckd_error *err);

#endif
