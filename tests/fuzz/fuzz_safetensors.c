/*
 * The safetensors header. The first byte selects the size of the data after it; the rest is JSON. An accepted
 * header must be consistent, and be the same when it is written and read back.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/files/files.h"
#include "tests/support/fuzz.h"

static void check(int good) {
    if (!good)
        abort();
}

static void check_cover(const safetensors_header *header, uint64_t data_size) {
    uint64_t at = 0;
    for (size_t i = 0; i < header->count; i++) {
        const safetensors_tensor *t = &header->tensors[i];
        check(t->begin == at && t->size == t->elements * ckd_dtype_size(t->dtype));
        check(t->ndim <= CKD_MAX_DIMS && t->elements <= CKD_MAX_ELEMENTS);
        check(t->name[0] && strlen(t->name) <= CKD_NAME_MAX);
        at += t->size;
    }
    check(at == data_size);
}

static void check_round_trip(safetensors_header *header, uint64_t data_size) {
    uint64_t arranged;
    char *bytes;
    size_t size;
    ckd_error err;
    check(safetensors_arrange(&arranged, header->tensors, header->count, &err) == CKD_OK &&
          arranged == data_size);
    check(safetensors_format_header(&bytes, &size, header->tensors, header->count, header->metadata, &err) ==
          CKD_OK);
    safetensors_header again;
    check(safetensors_parse(&again, bytes + 8, size - 8, data_size, "again", &err) == CKD_OK);
    check(again.count == header->count && !again.metadata == !header->metadata);
    check(!header->metadata || json_equal(again.metadata, header->metadata));
    check_cover(&again, data_size);
    safetensors_header_free(&again);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    safetensors_header header;
    ckd_error err;
    uint64_t data_size = data[0];
    if (safetensors_parse(&header, (const char *)data + 1, size - 1, data_size, "fuzz", &err) == CKD_OK) {
        check_cover(&header, data_size);
        check_round_trip(&header, data_size);
        safetensors_header_free(&header);
    } else {
        check(err.status != CKD_OK && err.message[0]);
    }
    return 0;
}
