/*
 * Reads safetensors files. The header is hostile input, so everything in it is checked against the size of the file
 * before any value is read.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/output/output.h"
#include "cli/files/files.h"

static const struct {
    const char *name;
    ckd_dtype dtype;
} dtypes[] = {
    {"F64", CKD_F64},         {"F32", CKD_F32},         {"F16", CKD_F16},   {"BF16", CKD_BF16},
    {"F8_E4M3", CKD_F8_E4M3}, {"F8_E5M2", CKD_F8_E5M2}, {"I64", CKD_I64},   {"I32", CKD_I32},
    {"I16", CKD_I16},         {"I8", CKD_I8},           {"U64", CKD_U64},   {"U32", CKD_U32},
    {"U16", CKD_U16},         {"U8", CKD_U8},           {"BOOL", CKD_BOOL},
};
#define DTYPE_COUNT (sizeof(dtypes) / sizeof(dtypes[0]))

const char *safetensors_dtype_name(ckd_dtype dtype) {
    for (size_t i = 0; i < DTYPE_COUNT; i++) {
        if (dtypes[i].dtype == dtype) {
            return dtypes[i].name;
        }
    }
    return NULL;
}

ckd_dtype safetensors_dtype(const char *name) {
    for (size_t i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return dtypes[i].dtype;
        }
    }
    return CKD_DTYPE_NONE;
}

/* ------------------------------------------------------------------------------------------------ the header */

/* Context of the parser, for error messages. */
typedef struct parser {
    const char *path;
    ckd_error *err;
} parser;

#define BAD_TENSOR(p, status, name, ...) \
    (cli_error_at((p)->err, status, (p)->path, CKD_NO_OFFSET, __VA_ARGS__), cli_error_tensor((p)->err, name))

static ckd_status check_metadata(const parser *p, json_t *metadata) {
    if (!json_is_object(metadata)) {
        return cli_error_at(p->err, CKD_E_CORRUPT, p->path, CKD_NO_OFFSET,
                            "__metadata__ is not a JSON object");
    }
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value)) {
            return cli_error_at(p->err, CKD_E_CORRUPT, p->path, CKD_NO_OFFSET,
                                "__metadata__ has a value that is not a string, under the key '%s'", key);
        }
    }
    return CKD_OK;
}

static ckd_status parse_dtype(const parser *p, safetensors_tensor *t, const json_t *dtype) {
    if (!json_is_string(dtype)) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name, "a tensor's dtype is missing or not a string");
    }
    t->dtype = safetensors_dtype(json_string_value(dtype));
    if (t->dtype == CKD_DTYPE_NONE) {
        return BAD_TENSOR(p, CKD_E_UNSUPPORTED, t->name, "the dtype %s of tensor '%s' is not supported",
                          json_string_value(dtype), t->name);
    }
    return CKD_OK;
}

/* The limits hold for empty tensors, too: a length of 0 counts as 1. */
static ckd_status parse_shape(const parser *p, safetensors_tensor *t, const json_t *shape) {
    if (!json_is_array(shape)) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name, "a tensor's shape is missing or not an array");
    }
    if (json_array_size(shape) > CKD_MAX_DIMS) {
        return BAD_TENSOR(p, CKD_E_UNSUPPORTED, t->name, "a tensor has %zu dimensions, %d are the limit",
                          json_array_size(shape), CKD_MAX_DIMS);
    }
    uint64_t elements = 1;
    bool empty = false;
    size_t d;
    json_t *length;
    json_array_foreach(shape, d, length) {
        if (!json_is_integer(length) || json_integer_value(length) < 0) {
            return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                              "a tensor's shape has a length that is not a whole number");
        }
        t->shape[d] = (uint64_t)json_integer_value(length);
        if (t->shape[d] == 0) {
            empty = true;
        } else if (__builtin_mul_overflow(elements, t->shape[d], &elements) || elements > CKD_MAX_ELEMENTS) {
            return BAD_TENSOR(p, CKD_E_UNSUPPORTED, t->name, "a tensor has more than 2^40 elements");
        }
    }
    t->ndim = (uint32_t)json_array_size(shape);
    t->elements = empty ? 0 : elements;
    return CKD_OK;
}

static ckd_status parse_offsets(const parser *p, safetensors_tensor *t, const json_t *offsets,
                                uint64_t data_size) {
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < 0) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                          "a tensor's data_offsets are missing or not two whole numbers (begin and end)");
    }
    t->begin = (uint64_t)json_integer_value(begin);
    uint64_t end_at = (uint64_t)json_integer_value(end);
    if (t->begin > end_at) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                          "a tensor's data_offsets end at %" PRIu64 ", before they begin at %" PRIu64, end_at,
                          t->begin);
    }
    if (end_at > data_size) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                          "a tensor's data ends at %" PRIu64 ", but the file has only %" PRIu64
                          " bytes of data: it was cut off, or its header is damaged",
                          end_at, data_size);
    }
    t->size = end_at - t->begin;
    uint64_t expected = t->elements * ckd_dtype_size(t->dtype); /* at most 2^43 */
    if (t->size != expected) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                          "a tensor's data_offsets cover %" PRIu64
                          " bytes, but its shape and dtype need %" PRIu64,
                          t->size, expected);
    }
    return CKD_OK;
}

static ckd_status parse_tensor(const parser *p, safetensors_tensor *t, const char *name, const json_t *entry,
                               uint64_t data_size) {
    size_t length = strlen(name);
    if (length == 0 || length > CKD_NAME_MAX) {
        return BAD_TENSOR(p, CKD_E_UNSUPPORTED, name, "a tensor's name has %zu bytes; 1 to %d are possible",
                          length, CKD_NAME_MAX);
    }
    t->name = strdup(name);
    if (!t->name) {
        return cli_error_nomem(p->err);
    }
    if (!json_is_object(entry)) {
        return BAD_TENSOR(p, CKD_E_CORRUPT, name, "a tensor's entry in the header is not a JSON object");
    }
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)entry, key, value) {
        if (strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 && strcmp(key, "data_offsets") != 0) {
            return BAD_TENSOR(p, CKD_E_UNSUPPORTED, name,
                              "a tensor's entry in the header has an unknown field '%s', which would be lost",
                              key);
        }
    }
    ckd_status status = parse_dtype(p, t, json_object_get(entry, "dtype"));
    THEN(status, parse_shape(p, t, json_object_get(entry, "shape")));
    return status == CKD_OK ? parse_offsets(p, t, json_object_get(entry, "data_offsets"), data_size) : status;
}

/* Empty tensors precede a tensor that begins at the same offset. */
static int by_offset(const void *left, const void *right) {
    const safetensors_tensor *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    if (a->size != b->size) {
        return a->size < b->size ? -1 : 1;
    }
    return strcmp(a->name, b->name);
}

/* Checks that the tensors, sorted by offset, cover all data exactly once. */
static ckd_status check_cover(const parser *p, const safetensors_header *header, uint64_t data_size) {
    uint64_t end = 0;
    for (size_t i = 0; i < header->count; i++) {
        const safetensors_tensor *t = &header->tensors[i];
        if (t->begin < end) {
            return BAD_TENSOR(p, CKD_E_CORRUPT, t->name, "the data of tensors '%s' and '%s' overlap",
                              header->tensors[i - 1].name, t->name);
        }
        if (t->begin > end) {
            return BAD_TENSOR(p, CKD_E_CORRUPT, t->name,
                              "there is a hole: bytes %" PRIu64 " to %" PRIu64
                              " of the data belong to no tensor",
                              end, t->begin);
        }
        end += t->size;
    }
    if (end != data_size) {
        return cli_error_at(p->err, CKD_E_CORRUPT, p->path, CKD_NO_OFFSET,
                            "%" PRIu64 " bytes after the last tensor's data belong to no tensor",
                            data_size - end);
    }
    return CKD_OK;
}

static ckd_status parse_object(const parser *p, safetensors_header *out, json_t *root, uint64_t data_size) {
    json_t *metadata = json_object_get(root, "__metadata__");
    if (metadata) {
        ckd_status status = check_metadata(p, metadata);
        if (status != CKD_OK) {
            return status;
        }
        out->metadata = json_incref(metadata);
    }
    size_t count = json_object_size(root);
    out->tensors = calloc(count ? count : 1, sizeof(*out->tensors));
    if (!out->tensors) {
        return cli_error_nomem(p->err);
    }
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry) {
        if (entry == metadata) {
            continue;
        }
        ckd_status status = parse_tensor(p, &out->tensors[out->count++], name, entry, data_size);
        if (status != CKD_OK) {
            return status;
        }
    }
    qsort(out->tensors, out->count, sizeof(*out->tensors), by_offset);
    return check_cover(p, out, data_size);
}

ckd_status safetensors_parse(safetensors_header *out, const char *json, size_t length, uint64_t data_size,
                             const char *path, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    parser p = {path, err};
    if (length == 0 || json[0] != '{') {
        return cli_error_at(err, CKD_E_CORRUPT, path, 8,
                            "the header does not begin with '{': not a safetensors file");
    }
    json_error_t where;
    json_t *root = json_loadb(json, length, JSON_REJECT_DUPLICATES, &where);
    if (!root) {
        if (json_error_code(&where) == json_error_out_of_memory) {
            return cli_error_nomem(err);
        }
        return cli_error_at(err, CKD_E_CORRUPT, path, 8 + (where.position > 0 ? (uint64_t)where.position : 0),
                            "the header is not valid JSON: %s", where.text);
    }
    ckd_status status = parse_object(&p, out, root, data_size);
    json_decref(root);
    if (status != CKD_OK) {
        safetensors_header_free(out);
    }
    return status;
}

void safetensors_header_free(safetensors_header *header) {
    for (size_t i = 0; i < header->count; i++) {
        free((char *)header->tensors[i].name);
    }
    free(header->tensors);
    json_decref(header->metadata);
    memset(header, 0, sizeof(*header));
}

/* -------------------------------------------------------------------------------------------------- the file */

ckd_status safetensors_read_bytes(const safetensors_file *file, uint64_t offset, void *to, size_t size,
                                  ckd_error *err) {
    char *at = to;
    while (size > 0) {
        ssize_t n = pread(file->fd, at, size, (off_t)offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            cli_error_sys(err, errno, file->path, "cannot read");
            err->offset = offset;
            return err->status;
        }
        if (n == 0) {
            return cli_error_at(
                err, CKD_E_IO, file->path, offset,
                "the file became shorter while it was being read; save again once it is complete");
        }
        at += n;
        offset += (uint64_t)n;
        size -= (size_t)n;
    }
    return CKD_OK;
}

/* Creates a file without a name in the folder for temporary files. */
static int open_unnamed(const char *folder) {
    char path[4096];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || snprintf(path, sizeof(path), "%s/ckptdelta-XXXXXX", folder) >= (int)sizeof(path)) {
        return fd;
    }
    fd = mkostemp(path, O_CLOEXEC); /* the file system has no O_TMPFILE */
    if (fd >= 0) {
        unlink(path);
    }
    return fd;
}

static ckd_status copy_pipe(int to, const safetensors_file *file, const char *folder, ckd_error *err) {
    static char buffer[1 << 18];
    for (;;) {
        ssize_t n = read(file->fd, buffer, sizeof(buffer));
        if (n == 0) {
            return CKD_OK;
        }
        if (n < 0 && errno != EINTR) {
            return cli_error_sys(err, errno, file->path, "cannot read");
        }
        for (ssize_t done = 0, written; done<n; done += written> 0 ? written : 0) {
            written = write(to, buffer + done, (size_t)(n - done));
            if (written < 0 && errno != EINTR) {
                return cli_error_sys(
                    err, errno, folder,
                    "cannot store what comes through a pipe; TMPDIR may name a folder with more space");
            }
        }
    }
}

/* Copies a pipe into a file, because values are not read in the order in which they arrive. */
#define IMPORT_IT "`python -m ckptdelta import` of the Python package reads it"

static ckd_status spool(safetensors_file *file, ckd_error *err) {
    const char *folder = getenv("TMPDIR");
    folder = folder && *folder ? folder : "/tmp";
    int to = open_unnamed(folder), flags = fcntl(file->fd, F_GETFL);
    if (to < 0) {
        return cli_error_sys(err, errno, folder, "cannot create a file for what comes through a pipe");
    }
    if (flags >= 0 && flags & O_NONBLOCK) {
        (void)fcntl(file->fd, F_SETFL, flags & ~O_NONBLOCK);
    }
    ckd_status status = copy_pipe(to, file, folder, err);
    close(file->fd);
    file->fd = to;
    return status;
}

static ckd_status open_input(safetensors_file *file, ckd_error *err) {
    /* O_NONBLOCK: opening a pipe without a writer must not block. */
    file->fd = strcmp(file->path, "-") == 0 ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)
                                            : open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (file->fd < 0 || fstat(file->fd, &st) != 0) {
        return cli_error_sys(err, errno, file->path, "cannot open");
    }
    if (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)) {
        ckd_status status = spool(file, err);
        if (status != CKD_OK) {
            return status;
        }
        if (fstat(file->fd, &st) != 0) {
            return cli_error_sys(err, errno, file->path, "cannot read the status of the file");
        }
    }
    if (S_ISDIR(st.st_mode)) {
        return cli_error_at(err, CKD_E_IO, file->path, CKD_NO_OFFSET,
                            "a folder, not a safetensors file; if it is a checkpoint of transformers or of "
                            "torch.distributed.checkpoint, " IMPORT_IT);
    }
    if (!S_ISREG(st.st_mode)) {
        return cli_error_at(err, CKD_E_IO, file->path, CKD_NO_OFFSET, "neither a regular file nor a pipe");
    }
    file->size = (uint64_t)st.st_size;
    file->modified = st.st_mtim;
    file->device = st.st_dev;
    file->inode = st.st_ino;
    return CKD_OK;
}

/* Is it a zip archive, or a pickle of protocol 2 or later? torch.save() writes these. */
static bool is_torch_file(const uint8_t start[8]) {
    return memcmp(start, "PK\3\4", 4) == 0 || (start[0] == 0x80 && start[1] >= 2 && start[1] <= 5);
}

static ckd_status read_header(safetensors_file *file, ckd_error *err) {
    uint8_t prefix[8];
    if (file->size < sizeof(prefix)) {
        return cli_error_at(err, CKD_E_CORRUPT, file->path, CKD_NO_OFFSET,
                            "a file of %" PRIu64 " bytes is too short to be a safetensors file", file->size);
    }
    ckd_status status = safetensors_read_bytes(file, 0, prefix, sizeof(prefix), err);
    if (status != CKD_OK) {
        return status;
    }
    uint64_t length = 0;
    for (size_t i = 0; i < sizeof(prefix); i++) {
        length |= (uint64_t)prefix[i] << (8 * i);
    }
    if (is_torch_file(prefix) && (length > SAFETENSORS_HEADER_MAX || length > file->size)) {
        return cli_error_at(err, CKD_E_CORRUPT, file->path, 0,
                            "a file of torch.save(), not of safetensors; " IMPORT_IT);
    }
    if (length > SAFETENSORS_HEADER_MAX) {
        return cli_error_at(err, CKD_E_CORRUPT, file->path, 0,
                            "a header of %" PRIu64
                            " bytes exceeds the format's limit of %u: not a safetensors file",
                            length, SAFETENSORS_HEADER_MAX);
    }
    if (length > file->size - sizeof(prefix)) {
        return cli_error_at(err, CKD_E_CORRUPT, file->path, 0,
                            "a header of %" PRIu64 " bytes does not fit into a file of %" PRIu64, length,
                            file->size);
    }
    char *json = malloc(length ? (size_t)length : 1);
    if (!json) {
        return cli_error_nomem(err);
    }
    status = safetensors_read_bytes(file, sizeof(prefix), json, (size_t)length, err);
    if (status == CKD_OK) {
        file->data_begin = sizeof(prefix) + length;
        status = safetensors_parse(&file->header, json, (size_t)length, file->size - file->data_begin,
                                   file->path, err);
    }
    free(json);
    return status;
}

ckd_status safetensors_open(safetensors_file **out, const char *path, ckd_error *err) {
    *out = NULL;
    safetensors_file *file = calloc(1, sizeof(*file));
    if (!file) {
        return cli_error_nomem(err);
    }
    file->fd = -1;
    file->path = strdup(path);
    ckd_status status = file->path ? open_input(file, err) : cli_error_nomem(err);
    THEN(status, read_header(file, err));
    if (status != CKD_OK) {
        safetensors_close(file);
        return status;
    }
    *out = file;
    return CKD_OK;
}

void safetensors_close(safetensors_file *file) {
    if (!file) {
        return;
    }
    if (file->fd >= 0) {
        close(file->fd);
    }
    safetensors_header_free(&file->header);
    free(file->path);
    free(file);
}

ckd_status safetensors_read(const safetensors_file *file, const safetensors_tensor *tensor, uint64_t first,
                            uint64_t count, void *to, ckd_error *err) {
    const cli_input input = {.file = file, .tensor = tensor};
    return cli_input_read(&input, first, count, to, err);
}

ckd_status cli_input_read(const cli_input *input, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const safetensors_file *file = input->file;
    const safetensors_tensor *tensor = input->tensor;
    if (first > tensor->elements || count > tensor->elements - first) {
        cli_error_at(err, CKD_E_INVALID, file->path, CKD_NO_OFFSET,
                     "elements %" PRIu64 " + %" PRIu64 " do not exist", first, count);
        return cli_error_tensor(err, tensor->name);
    }
    size_t element = ckd_dtype_size(tensor->dtype), size = (size_t)(count * element);
    uint64_t begin = file->data_begin + tensor->begin + first * element;
    ckd_status status = input->ahead ? cli_read_ahead_read(input->ahead, file, begin, to, size, err)
                                     : safetensors_read_bytes(file, begin, to, size, err);
    return status == CKD_OK ? CKD_OK : cli_error_tensor(err, tensor->name);
}

ckd_status safetensors_check_unchanged(const safetensors_file *file, ckd_error *err) {
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return cli_error_sys(err, errno, file->path, "cannot read the status of the file");
    }
    if ((uint64_t)st.st_size != file->size || st.st_mtim.tv_sec != file->modified.tv_sec ||
        st.st_mtim.tv_nsec != file->modified.tv_nsec) {
        return cli_error_at(
            err, CKD_E_IO, file->path, CKD_NO_OFFSET,
            "the file was written to while it was being read; save again once it is complete");
    }
    return CKD_OK;
}
