/* The files of one save, combined: every tensor once, and the metadata of all. */
#ifndef CLI_INPUTS_H
#define CLI_INPUTS_H

#include "cli/files/roles.h"
#include "cli/files/safetensors.h"

typedef struct cli_input {
    const safetensors_file *file;
    const safetensors_tensor *tensor;
    ckd_role role;
    const char *weight;             /* the tensor that it belongs to; NULL: unknown */
    bool largest;                   /* an exp_avg_sq that is AMSGrad's running maximum */
    bool in_doubt;                  /* its name looks like optimizer state, but no weight belongs to it */
    const ckd_optimizer *optimizer; /* NULL: none */
    ckd_read_fn read;               /* NULL: the values come from the file's tensor */
    void *context;
} cli_input;

typedef struct cli_inputs {
    safetensors_file **files;
    size_t file_count;
    cli_input *tensors; /* in save order: masters first, so that their copies are recognised */
    size_t count;
    json_t *metadata; /* of all files; NULL if none has any */
    uint64_t bytes;   /* of all tensors */
} cli_inputs;

/*
 * Opens and checks all files. INVALID if two files have the same tensor, or different values for the same metadata key.
 * Release with cli_inputs_close, also after a failure.
 */
ckd_status cli_inputs_open(cli_inputs *out, char *const *paths, size_t count, cli_roles *roles,
                           ckd_error *err);
/* Sets the roles of all tensors together, then moves masters to the front. */
ckd_status cli_inputs_set_roles(cli_inputs *inputs, cli_roles *roles, ckd_error *err);
/* Returns what determines the role of a file's tensor. */
ckd_tensor_name cli_tensor_name(const safetensors_tensor *tensor);
/* IO if a file was modified meanwhile. */
ckd_status cli_inputs_check_unchanged(const cli_inputs *inputs, ckd_error *err);
void cli_inputs_close(cli_inputs *inputs);

#endif
