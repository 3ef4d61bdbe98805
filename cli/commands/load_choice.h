/* What of a checkpoint `load` writes into a file: which tensors, and which part of each. */
#ifndef CLI_LOAD_CHOICE_H
#define CLI_LOAD_CHOICE_H

#include "cli/files/regions.h"
#include "cli/convert/tensor_file.h"

typedef struct load_choice {
    char **globs; /* of names in the file; none, and no regions: all */
    size_t glob_count;
    cli_regions regions;
    layout *layout; /* what its ranks hold; NULL: none was given */
} load_choice;

/*
 * The file's tensors and its header; of a layout, those of one rank (else `bound` and `rank` are not looked at). Release with
 * file_content_free, also after a failure. Errors: NOT_FOUND (no tensor is chosen, or --region names none), INVALID, those of
 * rank_content_make and file_content_arrange.
 */
ckd_status load_choice_make(file_content *out, load_choice *choice, ckd_load *load,
                            const bound_checkpoint *bound, uint32_t rank, ckd_error *err);
/* All that the file's tensors are made of: whole tensors, regions of them, or what a rank's tensors need. free() it, also after a failure. */
ckd_status load_choice_requests(ckd_load_request **out, size_t *count, const file_content *c, ckd_error *err);

#endif
