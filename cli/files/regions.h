/* Which part of each tensor is wanted: --shard I/N --dim D, --region NAME=[a:b,c:d]. */
#ifndef CLI_REGIONS_H
#define CLI_REGIONS_H

#include "cli/output/errors.h"

/* first ... end - 1 of each of `ndim` dimensions; what lies behind these is whole. */
typedef struct cli_region {
    char *tensor;
    uint32_t ndim;
    uint64_t first[CKD_MAX_DIMS], end[CKD_MAX_DIMS]; /* UINT64_MAX: to the end */
    bool used;
} cli_region;

/*
 * A dimension as people say it: from 0 on, or back from the last one, which is -1. False if no tensor can have it. Of tensors of ndim
 * dimensions it is the one that cli_dim_of gives; CKD_MAX_DIMS: they have none such.
 */
bool cli_parse_dim(int32_t *out, const char *text);
uint32_t cli_dim_of(int32_t dim, uint32_t ndim);

typedef struct cli_regions {
    uint64_t shard, shards; /* shards 0: no --shard */
    int32_t dim;
    bool dim_given;
    cli_region *items;
    size_t count;
} cli_regions;

/* Each is INVALID, with what was expected, if the text is something else; a region of a tensor that has one already, too. */
ckd_status cli_regions_set_shard(cli_regions *r, const char *text, ckd_error *err); /* "I/N", I from 0 */
ckd_status cli_regions_set_dim(cli_regions *r, const char *text, ckd_error *err);
ckd_status cli_regions_add(cli_regions *r, const char *text, ckd_error *err); /* "NAME=[a:b,c:d]" */
void cli_regions_free(cli_regions *r);

/* Has the tensor a --region of its own? Marks it as used. */
bool cli_regions_names(cli_regions *r, const char *tensor);
/*
 * The part of a tensor that is wanted: its own region; else the shard, as torch.chunk cuts (possibly nothing), where it has the
 * dimension; else all of it. Then `lengths` are its lengths, info->ndim of them. INVALID if the region is not inside the tensor.
 */
ckd_status cli_regions_find(ckd_region *out, uint64_t lengths[CKD_MAX_DIMS], const cli_regions *r,
                            const ckd_tensor_info *info, ckd_error *err);

/*
 * Cuts a box into pieces of at most `max` elements, but of one element at least, that follow each other in its row-major order.
 * Calls `each` until it fails.
 */
typedef ckd_status (*cli_piece_fn)(void *context, const ckd_region *piece, uint64_t elements, ckd_error *err);
ckd_status cli_cut_box(const ckd_region *box, uint32_t ndim, uint64_t max, cli_piece_fn each, void *context,
                       ckd_error *err);

#endif
