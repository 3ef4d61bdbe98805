#include "cli/inputs.h"

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
        json_t *known = json_object_get(inputs->metadata, key);
        if (known && !json_equal(known, value)) {
            return cli_error_at(
                err, CKD_E_INVALID, file->path, CKD_NO_OFFSET,
                "the files disagree about the key '%.120s' of their metadata: '%.100s' and '%.100s'", key,
                json_string_value(known), json_string_value(value));
        }
        if (!known && json_object_set(inputs->metadata, key, value) != 0) {
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

/* The tensors of all files, first those of role master, then the others, else as they come. */
static ckd_status collect(cli_inputs *inputs, cli_roles *roles, ckd_error *err) {
    size_t total = 0, masters = 0;
    for (size_t i = 0; i < inputs->file_count; i++) {
        total += inputs->files[i]->header.count;
    }
    cli_input *all = calloc(total ? total : 1, sizeof(*all));
    inputs->tensors = calloc(total ? total : 1, sizeof(*all));
    if (!all || !inputs->tensors) {
        free(all);
        return cli_error_nomem(err);
    }
    size_t count = 0;
    for (size_t i = 0; i < inputs->file_count; i++) {
        const safetensors_header *header = &inputs->files[i]->header;
        for (size_t j = 0; j < header->count; j++) {
            const safetensors_tensor *t = &header->tensors[j];
            all[count] =
                (cli_input){inputs->files[i], t, cli_roles_find(roles, t->name, t->dtype), NULL, NULL, NULL};
            masters += all[count++].role == CKD_ROLE_MASTER;
            inputs->bytes += t->size;
        }
    }
    size_t next_master = 0, next_other = masters;
    for (size_t i = 0; i < total; i++) {
        inputs->tensors[all[i].role == CKD_ROLE_MASTER ? next_master++ : next_other++] = all[i];
    }
    inputs->count = total;
    free(all);
    return CKD_OK;
}

ckd_status cli_inputs_open(cli_inputs *out, char *const *paths, size_t count, cli_roles *roles,
                           ckd_error *err) {
    *out = (cli_inputs){0};
    ckd_status status = open_files(out, paths, count, err);
    if (status == CKD_OK) {
        status = collect(out, roles, err);
    }
    return status == CKD_OK ? check_unique(out, err) : status;
}

ckd_status cli_inputs_check_unchanged(const cli_inputs *inputs, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < inputs->file_count && status == CKD_OK; i++) {
        status = safetensors_check_unchanged(inputs->files[i], err);
    }
    return status;
}

void cli_inputs_close(cli_inputs *inputs) {
    for (size_t i = 0; i < inputs->file_count; i++) {
        safetensors_close(inputs->files[i]);
    }
    free(inputs->files);
    free(inputs->tensors);
    json_decref(inputs->metadata);
    *inputs = (cli_inputs){0};
}
