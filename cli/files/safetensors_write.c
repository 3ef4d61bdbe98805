/*
 * Makes the headers of safetensors files, and converts their metadata to and from text. tensor_file.c in cli/convert
 * writes the values.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"
#include "cli/files/files.h"

/* A tensor and its input position: qsort is not stable. */
typedef struct placed {
    safetensors_tensor tensor;
    size_t place;
} placed;

/* The largest elements first: then each tensor is aligned. */
static int by_dtype_size(const void *left, const void *right) {
    const placed *a = left, *b = right;
    size_t size_a = ckd_dtype_size(a->tensor.dtype), size_b = ckd_dtype_size(b->tensor.dtype);
    if (size_a != size_b) {
        return size_a > size_b ? -1 : 1;
    }
    return a->place < b->place ? -1 : a->place > b->place;
}

ckd_status safetensors_arrange(uint64_t *data_size, safetensors_tensor *tensors, size_t count,
                               ckd_error *err) {
    *data_size = 0;
    placed *order = calloc(count ? count : 1, sizeof(*order));
    if (!order) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        order[i] = (placed){tensors[i], i};
    }
    qsort(order, count, sizeof(*order), by_dtype_size);
    uint64_t end = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        safetensors_tensor *t = &tensors[i];
        *t = order[i].tensor;
        t->begin = end;
        if (__builtin_mul_overflow(t->elements, (uint64_t)ckd_dtype_size(t->dtype), &t->size) ||
            __builtin_add_overflow(end, t->size, &end) || end > INT64_MAX) {
            status = cli_error(err, CKD_E_UNSUPPORTED,
                               "the tensors are too large for one file; choose fewer tensors");
        }
    }
    free(order);
    *data_size = status == CKD_OK ? end : 0;
    return status;
}

/* Returns NULL if out of memory. */
static json_t *tensor_entry(const safetensors_tensor *t) {
    json_t *shape = json_array();
    for (uint32_t d = 0; d < t->ndim; d++) {
        if (json_array_append_new(shape, json_integer((json_int_t)t->shape[d])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", safetensors_dtype_name(t->dtype), "shape", shape,
                     "data_offsets", (json_int_t)t->begin, (json_int_t)(t->begin + t->size));
}

static ckd_status add_tensors(json_t *root, const safetensors_tensor *tensors, size_t count, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        const safetensors_tensor *t = &tensors[i];
        if (strcmp(t->name, "__metadata__") == 0 || !safetensors_dtype_name(t->dtype)) {
            cli_error(err, CKD_E_UNSUPPORTED, "a safetensors file cannot hold tensor '%s' of dtype %s",
                      t->name, ckd_dtype_name(t->dtype));
            return cli_error_tensor(err, t->name);
        }
        if (json_object_set_new(root, t->name, tensor_entry(t)) != 0) {
            return cli_error_nomem(err);
        }
    }
    return CKD_OK;
}

static ckd_status dump(char **out, size_t *size, const json_t *root, ckd_error *err) {
    size_t length = json_dumpb(root, NULL, 0, JSON_COMPACT), padded = (length + 7) / 8 * 8;
    if (length == 0) {
        return cli_error_nomem(err);
    }
    if (padded > SAFETENSORS_HEADER_MAX) {
        return cli_error(err, CKD_E_UNSUPPORTED,
                         "the header would have %zu bytes, the format's limit is %u; choose fewer tensors",
                         padded, SAFETENSORS_HEADER_MAX);
    }
    char *bytes = malloc(8 + padded);
    if (!bytes) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < 8; i++) {
        bytes[i] = (char)(uint8_t)((uint64_t)padded >> (8 * i));
    }
    memset(bytes + 8, ' ', padded);
    if (json_dumpb(root, bytes + 8, length, JSON_COMPACT) != length) {
        free(bytes);
        return cli_error_nomem(err);
    }
    *out = bytes;
    *size = 8 + padded;
    return CKD_OK;
}

ckd_status safetensors_format_header(char **out, size_t *size, const safetensors_tensor *tensors,
                                     size_t count, json_t *metadata, ckd_error *err) {
    *out = NULL;
    *size = 0;
    json_t *root = json_object();
    if (!root || (metadata && json_object_set(root, "__metadata__", metadata) != 0)) {
        json_decref(root);
        return cli_error_nomem(err);
    }
    ckd_status status = add_tensors(root, tensors, count, err);
    THEN(status, dump(out, size, root, err));
    json_decref(root);
    return status;
}

char *safetensors_metadata_text(json_t *metadata) {
    return json_dumps(metadata, JSON_COMPACT | JSON_SORT_KEYS);
}

ckd_status safetensors_metadata_parse(json_t **out, const char *text, size_t size, ckd_error *err) {
    json_error_t where;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
    bool good = json_is_object(root);
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        good = good && json_is_string(value);
    }
    *out = good ? root : NULL;
    if (!good) {
        json_decref(root);
        return cli_error(err, CKD_E_UNSUPPORTED,
                         "the blob 'safetensors.metadata' of this checkpoint is not a JSON object of "
                         "strings; some other program wrote it");
    }
    return CKD_OK;
}
