/*
 * Combines the input files of a save into one list of tensors. Masters come first, because a weight that is a rounded
 * master is stored as a reference to it.
 */
#include "cli/files/files.h"

#include <stdlib.h>
#include <string.h>

static int by_name(const void *left, const void *right) {
    const cli_input *const *a = left, *const *b = right;
    return strcmp((*a)->tensor->name, (*b)->tensor->name);
}

static ckd_status check_unique(const cli_inputs *inputs, ckd_error *err) {
    const cli_input **sorted = malloc((inputs->count ? inputs->count : 1) * sizeof(*sorted));
    if (!sorted) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < inputs->count; i++) {
        sorted[i] = &inputs->tensors[i];
    }
    qsort(sorted, inputs->count, sizeof(*sorted), by_name);
    ckd_status status = CKD_OK;
    for (size_t i = 1; i < inputs->count && status == CKD_OK; i++) {
        if (by_name(&sorted[i - 1], &sorted[i]) == 0) {
            cli_error(err, CKD_E_INVALID, "tensor '%.200s' is in both %.120s and %.120s",
                      sorted[i]->tensor->name, sorted[i - 1]->file->path, sorted[i]->file->path);
            status = err->status;
        }
    }
    free(sorted);
    return status;
}

static ckd_status merge_metadata(cli_inputs *inputs, const safetensors_file *file, ckd_error *err) {
    if (!file->header.metadata) {
        return CKD_OK;
    }
    if (!inputs->metadata) {
        inputs->metadata = json_object();
    }
    const char *key;
    json_t *value;
    json_object_foreach(file->header.metadata, key, value) {
        json_t *existing = json_object_get(inputs->metadata, key);
        if (existing && !json_equal(existing, value)) {
            return cli_error_at(
                err, CKD_E_INVALID, file->path, CKD_NO_OFFSET,
                "the files disagree about the key '%.120s' of their metadata: '%.100s' and '%.100s'", key,
                json_string_value(existing), json_string_value(value));
        }
        if (!existing && json_object_set(inputs->metadata, key, value) != 0) {
            return cli_error_nomem(err);
        }
    }
    return inputs->metadata ? CKD_OK : cli_error_nomem(err);
}

static ckd_status open_files(cli_inputs *inputs, char *const *paths, size_t count, ckd_error *err) {
    inputs->files = calloc(count ? count : 1, sizeof(*inputs->files));
    if (!inputs->files) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        ckd_status status = safetensors_open(&inputs->files[i], paths[i], err);
        if (status != CKD_OK) {
            return status;
        }
        inputs->file_count++;
        status = merge_metadata(inputs, inputs->files[i], err);
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* Collects the tensors of all files in input order. */
static ckd_status collect(cli_inputs *inputs, ckd_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < inputs->file_count; i++) {
        total += inputs->files[i]->header.count;
    }
    inputs->tensors = calloc(total ? total : 1, sizeof(*inputs->tensors));
    if (!inputs->tensors) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < inputs->file_count; i++) {
        const safetensors_header *header = &inputs->files[i]->header;
        for (size_t j = 0; j < header->count; j++) {
            inputs->tensors[inputs->count++] =
                (cli_input){.file = inputs->files[i], .tensor = &header->tensors[j], .ahead = inputs->ahead};
            inputs->bytes += header->tensors[j].size;
        }
    }
    return CKD_OK;
}

/* Moves masters before the others; otherwise keeps the order. */
static ckd_status put_masters_first(cli_inputs *inputs, ckd_error *err) {
    cli_input *all = malloc((inputs->count ? inputs->count : 1) * sizeof(*all));
    if (!all) {
        return cli_error_nomem(err);
    }
    size_t count = 0;
    for (int masters = 1; masters >= 0; masters--) {
        for (size_t i = 0; i < inputs->count; i++) {
            if ((inputs->tensors[i].role == CKD_ROLE_MASTER) == masters) {
                all[count++] = inputs->tensors[i];
            }
        }
    }
    memcpy(inputs->tensors, all, count * sizeof(*all));
    free(all);
    return CKD_OK;
}

ckd_status cli_inputs_set_roles(cli_inputs *inputs, cli_roles *roles, ckd_error *err) {
    ckd_tensor_name *tensors = calloc(inputs->count + 1, sizeof(*tensors));
    ckd_tensor_role *found = calloc(inputs->count + 1, sizeof(*found));
    ckd_status status = tensors && found ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < inputs->count && status == CKD_OK; i++) {
        tensors[i] = cli_tensor_name(inputs->tensors[i].tensor);
    }
    THEN(status, cli_roles_find(found, roles, tensors, inputs->count, inputs->metadata, err));
    for (size_t i = 0; i < inputs->count && status == CKD_OK; i++) {
        inputs->tensors[i].role = found[i].role;
        inputs->tensors[i].weight = found[i].weight;
        inputs->tensors[i].largest = found[i].largest;
        inputs->tensors[i].in_doubt = found[i].in_doubt;
    }
    free(tensors);
    free(found);
    return status == CKD_OK ? put_masters_first(inputs, err) : status;
}

ckd_status cli_inputs_open(cli_inputs *out, char *const *paths, size_t count, cli_roles *roles,
                           ckd_error *err) {
    *out = (cli_inputs){.ahead = cli_read_ahead_new()};
    ckd_status status = out->ahead ? CKD_OK : cli_error_nomem(err);
    THEN(status, open_files(out, paths, count, err));
    THEN(status, collect(out, err));
    THEN(status, cli_inputs_set_roles(out, roles, err));
    return status == CKD_OK ? check_unique(out, err) : status;
}

ckd_tensor_name cli_tensor_name(const safetensors_tensor *t) {
    return (ckd_tensor_name){t->name, CKD_ROLE_AUTO, t->dtype, t->ndim, t->shape};
}

ckd_status cli_inputs_check_unchanged(const cli_inputs *inputs, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < inputs->file_count && status == CKD_OK; i++) {
        status = safetensors_check_unchanged(inputs->files[i], err);
    }
    return status;
}

void cli_inputs_close(cli_inputs *inputs) {
    cli_read_ahead_free(inputs->ahead);
    for (size_t i = 0; i < inputs->file_count; i++) {
        safetensors_close(inputs->files[i]);
    }
    free(inputs->files);
    free(inputs->tensors);
    json_decref(inputs->metadata);
    *inputs = (cli_inputs){0};
}
