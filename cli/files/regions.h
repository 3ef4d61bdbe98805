/* The part of each tensor to load: --shard I/N --dim D, --region NAME=[a:b,c:d]. */
#ifndef CLI_REGIONS_H
#define CLI_REGIONS_H

#include "cli/output/errors.h"

/* first ... end - 1 of each of the first `ndim` dimensions; later dimensions are whole. */
typedef struct cli_region {
    char *tensor;
    uint32_t ndim;
    uint64_t first[CKD_MAX_DIMS], end[CKD_MAX_DIMS]; /* UINT64_MAX: to the end */
    bool used;
} cli_region;

/*
 * Parses a dimension: from 0, or counted back from the last one, which is -1. Returns false if no tensor can have it.
 * For a tensor of ndim dimensions, cli_dim_of gives its index; CKD_MAX_DIMS: there is none.
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

/*
 * Parsers of options. INVALID, with the expected form, for any other text, and for a second region of the same tensor.
 */
ckd_status cli_regions_set_shard(cli_regions *r, const char *text, ckd_error *err); /* "I/N", I from 0 */
ckd_status cli_regions_set_dim(cli_regions *r, const char *text, ckd_error *err);
ckd_status cli_regions_add(cli_regions *r, const char *text, ckd_error *err); /* "NAME=[a:b,c:d]" */
void cli_regions_free(cli_regions *r);

/* Does the tensor have its own --region? Marks it as used. */
bool cli_regions_names(cli_regions *r, const char *tensor);
/*
 * Finds the part of a tensor to load. This is its own region; else the shard, cut as torch.chunk does (may be empty),
 * if the tensor has the dimension; else the whole tensor. `lengths` gets info->ndim lengths. INVALID if the region is
 * not inside the tensor.
 */
ckd_status cli_regions_find(ckd_region *out, uint64_t lengths[CKD_MAX_DIMS], const cli_regions *r,
                            const ckd_tensor_info *info, ckd_error *err);

/*
 * Cuts a box into pieces of at most `max` elements, but at least one, in row-major order. Calls `each` until it fails.
 */
typedef ckd_status (*cli_piece_fn)(void *context, const ckd_region *piece, uint64_t elements, ckd_error *err);
ckd_status cli_cut_box(const ckd_region *box, uint32_t ndim, uint64_t max, cli_piece_fn each, void *context,
                       ckd_error *err);

#endif
