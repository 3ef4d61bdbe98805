/* The part of a checkpoint that `load` writes into a file: which tensors, and which region of each. */
#ifndef CLI_LOAD_CHOICE_H
#define CLI_LOAD_CHOICE_H

#include "cli/files/files.h"
#include "cli/convert/convert.h"

typedef struct load_choice {
    char **globs; /* globs of names in the file; all tensors if there are no globs and no regions */
    size_t glob_count;
    cli_regions regions;
    layout *layout; /* layout of the ranks; NULL: none given */
} load_choice;

/*
 * Chooses the file's tensors and makes its header. With a layout they are those of one rank; otherwise `bound` and
 * `rank` are ignored. Release with file_content_free, also after a failure. Errors: NOT_FOUND (no tensor is chosen, or
 * --region names none), INVALID, those of rank_content_make and file_content_arrange.
 */
ckd_status load_choice_make(file_content *out, load_choice *choice, ckd_load *load,
                            const bound_checkpoint *bound, uint32_t rank, ckd_error *err);
/*
 * Lists the load requests for the file's tensors: whole tensors, regions, or what a rank's tensors need. free() the
 * result, also after a failure.
 */
ckd_status load_choice_requests(ckd_load_request **out, size_t *count, const file_content *c, ckd_error *err);

#endif
