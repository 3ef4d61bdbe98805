/* Shapes and regions, which the catalog stores as readable text. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/db.h"

/* Appends at `at`. The buffers hold CKD_MAX_DIMS numbers of the largest size. */
static size_t put(char *out, size_t size, size_t at, const char *text) {
    size_t length = strlen(text);
    if (at < size && length < size - at) {
        memcpy(out + at, text, length + 1);
    }
    return at + length;
}

static size_t put_number(char *out, size_t size, size_t at, uint64_t number) {
    char text[24];
    snprintf(text, sizeof(text), "%" PRIu64, number);
    return put(out, size, at, text);
}

void shape_format(char out[SHAPE_TEXT], uint32_t ndim, const uint64_t *shape) {
    size_t at = put(out, SHAPE_TEXT, 0, "[");
    for (uint32_t d = 0; d < ndim; d++) {
        at = put(out, SHAPE_TEXT, at, d ? ", " : "");
        at = put_number(out, SHAPE_TEXT, at, shape[d]);
    }
    put(out, SHAPE_TEXT, at, "]");
}

bool region_format(char out[REGION_TEXT], uint32_t ndim, const ckd_region *region) {
    uint64_t end;
    size_t at = 0;
    switch (region->kind) {
    case CKD_REGION_WHOLE:
        put(out, REGION_TEXT, 0, "whole");
        return true;
    case CKD_REGION_FLAT:
        if (!size_add(&end, region->start, region->count)) {
            return false;
        }
        at = put(out, REGION_TEXT, at, "flat ");
        at = put_number(out, REGION_TEXT, at, region->start);
        at = put(out, REGION_TEXT, at, "+");
        put_number(out, REGION_TEXT, at, region->count);
        return true;
    case CKD_REGION_BOX:
        at = put(out, REGION_TEXT, at, "box [");
        for (uint32_t d = 0; d < ndim; d++) {
            if (!size_add(&end, region->offsets[d], region->lengths[d])) {
                return false;
            }
            at = put(out, REGION_TEXT, at, d ? ", " : "");
            at = put_number(out, REGION_TEXT, at, region->offsets[d]);
            at = put(out, REGION_TEXT, at, ":");
            at = put_number(out, REGION_TEXT, at, end);
        }
        put(out, REGION_TEXT, at, "]");
        return true;
    }
    return false;
}

/* Parses decimal digits without a leading zero. Moves *text past them. */
static bool parse_number(uint64_t *out, const char **text) {
    const char *p = *text;
    uint64_t value = 0;
    if (*p < '0' || *p > '9' || (p[0] == '0' && p[1] >= '0' && p[1] <= '9')) {
        return false;
    }
    for (; *p >= '0' && *p <= '9'; p++) {
        if (!size_mul(&value, value, 10) || !size_add(&value, value, (uint64_t)(*p - '0'))) {
            return false;
        }
    }
    *out = value;
    *text = p;
    return true;
}

bool shape_parse(uint32_t *ndim, uint64_t shape[CKD_MAX_DIMS], const char *text) {
    *ndim = 0;
    if (*text++ != '[') {
        return false;
    }
    if (strcmp(text, "]") == 0) {
        return true;
    }
    for (;;) {
        if (*ndim == CKD_MAX_DIMS || !parse_number(&shape[*ndim], &text)) {
            return false;
        }
        ++*ndim;
        if (strcmp(text, "]") == 0) {
            return true;
        }
        if (*text++ != ',' || *text++ != ' ') {
            return false;
        }
    }
}
