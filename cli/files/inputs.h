/* The files of one save, taken together: every tensor once, the metadata of all. */
#ifndef CLI_INPUTS_H
#define CLI_INPUTS_H

#include "cli/files/roles.h"
#include "cli/files/safetensors.h"

typedef struct cli_input {
    const safetensors_file *file;
    const safetensors_tensor *tensor;
    ckd_role role;
    const char *weight;             /* the tensor that it belongs to; NULL: none is known */
    bool largest;                   /* an exp_avg_sq that is AMSGrad's largest so far */
    bool in_doubt;                  /* looks like an optimizer's, and has no weight */
    const ckd_optimizer *optimizer; /* NULL: none was given */
    ckd_read_fn read;               /* NULL: the values are those of the file's tensor */
    void *context;
} cli_input;

typedef struct cli_inputs {
    safetensors_file **files;
    size_t file_count;
    cli_input *tensors; /* in the order to save: masters first, so that copies of them are found */
    size_t count;
    json_t *metadata; /* of all files; NULL if none has any */
    uint64_t bytes;   /* of all tensors */
} cli_inputs;

/*
 * Opens and checks all files. INVALID if two of them have the same tensor, or different values under the same key of their
 * metadata. Release with cli_inputs_close, also after a failure.
 */
ckd_status cli_inputs_open(cli_inputs *out, char *const *paths, size_t count, cli_roles *roles,
                           ckd_error *err);
/* The roles of all tensors together; then masters come first. */
ckd_status cli_inputs_set_roles(cli_inputs *inputs, cli_roles *roles, ckd_error *err);
/* What the role of a file's tensor follows from. */
ckd_tensor_name cli_tensor_name(const safetensors_tensor *tensor);
/* IO if a file was written to meanwhile. */
ckd_status cli_inputs_check_unchanged(const cli_inputs *inputs, ckd_error *err);
void cli_inputs_close(cli_inputs *inputs);

#endif
