/*
 * What a rank of a layout is to hold of a checkpoint: the way back from import. First all of the checkpoint's names are looked up, once;
 * then each rank's tensors are found, and loaded box by box. Those that belong into flat buffers are put there (rank_flat.c).
 */
#ifndef CLI_RANK_CONTENT_H
#define CLI_RANK_CONTENT_H

#include "cli/layout/layout.h"

/* A checkpoint's tensors, and the rules that match them. The list must outlive it. */
typedef struct bound_checkpoint {
    const layout *layout;
    const ckd_tensor_list *list;
    layout_bindings *bindings; /* of each tensor */
} bound_checkpoint;

/* Errors: MISMATCH (a tensor that no rule matches, or that no rank would hold), NOMEM. */
ckd_status bound_checkpoint_make(bound_checkpoint *out, const layout *l, const ckd_tensor_list *list,
                                 ckd_error *err);
void bound_checkpoint_free(bound_checkpoint *b);

typedef struct rank_tensor {
    char *name; /* in the rank's file */
    const layout_rule *rule;
    const ckd_tensor_info *
        *parts;         /* layout_tensors_of(rule) tensors of the checkpoint; NULL of a flat buffer */
    layout_share share; /* of a flat buffer only the shape */
    struct rank_tensor *members; /* of a flat buffer: tensors as the rank would have them */
    layout_range *ranges;        /* and what of each is in it */
    size_t member_count;
} rank_tensor;

ckd_dtype rank_tensor_dtype(const rank_tensor *t);
void rank_tensor_free(rank_tensor *t);

typedef struct rank_content {
    rank_tensor *items; /* in the order of the checkpoint */
    size_t count;
} rank_content;

/* Errors: MISMATCH (it cannot be cut as the rule says, a part is missing: with the rule's file and line), NOMEM. */
ckd_status rank_content_make(rank_content *out, const bound_checkpoint *b, uint32_t rank, ckd_error *err);
void rank_content_free(rank_content *c);
/* Step of it: puts tensors into flat buffers, which stand where the first of them stood. Errors: as above. */
ckd_status rank_content_flatten(rank_content *c, const bound_checkpoint *b, uint32_t rank, ckd_error *err);

/* One request for each region of the checkpoint that the tensor needs, added behind those that are there. Names are the checkpoint's. */
ckd_status rank_tensor_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                ckd_error *err);

/* The same for flat buffers. */
ckd_status rank_flat_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                              ckd_error *err);
ckd_status rank_flat_load(void *to, void *room, const rank_tensor *t, const ckd_region *box, ckd_load *load,
                          ckd_error *err);
/* Requests of one box. */
ckd_status rank_tensor_box_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                    const ckd_region *box, ckd_error *err);
ckd_status rank_add_request(ckd_load_request **requests, size_t *count, const ckd_load_request *one,
                            ckd_error *err);

/* Loads a box of the rank's tensor, in the coordinates of that, into `to`. room: as much memory again. */
ckd_status rank_tensor_load(void *to, void *room, const rank_tensor *t, const ckd_region *box, ckd_load *load,
                            ckd_error *err);

#endif
