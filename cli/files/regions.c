/*
 * Parses --shard, --dim and --region, and finds the part of each tensor that they select. Also cuts a box into slices,
 * so that a load needs little memory.
 */
#include "cli/files/files.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

/* ---- options ---- */

/* Parses a number of `length` digits. */
static bool parse_number(uint64_t *out, const char *text, size_t length) {
    char digits[24];
    if (length >= sizeof(digits)) {
        return false;
    }
    memcpy(digits, text, length);
    digits[length] = '\0';
    return cli_parse_u64(out, digits);
}

ckd_status cli_regions_set_shard(cli_regions *r, const char *text, ckd_error *err) {
    const char *slash = strchr(text, '/');
    uint64_t shard, shards;
    if (!slash || !parse_number(&shard, text, (size_t)(slash - text)) || !cli_parse_u64(&shards, slash + 1) ||
        shard >= shards) {
        return cli_error(err, CKD_E_INVALID,
                         "--shard is I/N with I from 0 to N - 1, such as 0/4 ... 3/4, not '%s'", text);
    }
    r->shard = shard;
    r->shards = shards;
    return CKD_OK;
}

bool cli_parse_dim(int32_t *out, const char *text) {
    bool negative = text[0] == '-';
    uint64_t number;
    if (!cli_parse_u64(&number, text + negative) || number - negative >= CKD_MAX_DIMS) {
        return false;
    }
    *out = negative ? -(int32_t)number : (int32_t)number;
    return true;
}

uint32_t cli_dim_of(int32_t dim, uint32_t ndim) {
    int64_t from_first = dim < 0 ? (int64_t)ndim + dim : dim;
    return from_first >= 0 && from_first < ndim ? (uint32_t)from_first : CKD_MAX_DIMS;
}

ckd_status cli_regions_set_dim(cli_regions *r, const char *text, ckd_error *err) {
    if (!cli_parse_dim(&r->dim, text)) {
        return cli_error(err, CKD_E_INVALID,
                         "--dim is a number from 0 to %d, or, from the last one back, -1 to -%d, not '%s'",
                         CKD_MAX_DIMS - 1, CKD_MAX_DIMS, text);
    }
    r->dim_given = true;
    return CKD_OK;
}

/* Parses "a:b", ":b", "a:" or ":" up to `end`. */
static bool parse_interval(uint64_t *first, uint64_t *last, const char *text, const char *end) {
    const char *colon = memchr(text, ':', (size_t)(end - text));
    *first = 0;
    *last = UINT64_MAX;
    return colon && (colon == text || parse_number(first, text, (size_t)(colon - text))) &&
           (colon + 1 == end || parse_number(last, colon + 1, (size_t)(end - colon - 1))) && *first <= *last;
}

/* Parses "[a:b,c:d]" and nothing else. */
static bool parse_box(cli_region *out, const char *text) {
    size_t length = strlen(text);
    if (length < 2 || text[0] != '[' || text[length - 1] != ']') {
        return false;
    }
    const char *at = text + 1, *close = text + length - 1;
    while (at < close || out->ndim > 0) {
        const char *comma = memchr(at, ',', (size_t)(close - at));
        const char *end = comma ? comma : close;
        if (out->ndim == CKD_MAX_DIMS ||
            !parse_interval(&out->first[out->ndim], &out->end[out->ndim], at, end)) {
            return false;
        }
        out->ndim++;
        if (!comma) {
            break;
        }
        at = comma + 1;
    }
    return true;
}

/* Finds the last "=[", since names may contain these characters. NULL if there is none, or no name before it. */
static const char *find_box(const char *text) {
    const char *found = NULL;
    for (const char *at = text; (at = strstr(at, "=[")); at++) {
        found = at;
    }
    return found && found > text ? found + 1 : NULL;
}

ckd_status cli_regions_add(cli_regions *r, const char *text, ckd_error *err) {
    cli_region region = {0};
    const char *box = find_box(text);
    if (!box || !parse_box(&region, box)) {
        return cli_error(
            err, CKD_E_INVALID,
            "--region is NAME=[a:b,c:d], elements a to b - 1 of the first dimension and so on, a or b may "
            "be left out, not '%s'",
            text);
    }
    cli_region *items = realloc(r->items, (r->count + 1) * sizeof(*items));
    if (!items) {
        return cli_error_nomem(err);
    }
    r->items = items;
    region.tensor = strndup(text, (size_t)(box - 1 - text));
    if (!region.tensor) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < r->count; i++) {
        if (strcmp(items[i].tensor, region.tensor) == 0) {
            cli_error(err, CKD_E_INVALID,
                      "a file holds one region of a tensor; load the others of '%s' into files of their own",
                      region.tensor);
            free(region.tensor);
            return CKD_E_INVALID;
        }
    }
    items[r->count++] = region;
    return CKD_OK;
}

void cli_regions_free(cli_regions *r) {
    for (size_t i = 0; i < r->count; i++) {
        free(r->items[i].tensor);
    }
    free(r->items);
    *r = (cli_regions){0};
}

/* ---- finding ---- */

static cli_region *find_own(const cli_regions *r, const char *tensor) {
    for (size_t i = 0; i < r->count; i++) {
        if (strcmp(r->items[i].tensor, tensor) == 0) {
            return &r->items[i];
        }
    }
    return NULL;
}

bool cli_regions_names(cli_regions *r, const char *tensor) {
    cli_region *region = find_own(r, tensor);
    if (region) {
        region->used = true;
    }
    return region != NULL;
}

static ckd_status not_inside(const ckd_tensor_info *info, ckd_error *err) {
    char shape[200] = "a scalar";
    for (uint32_t d = 0, at = 0; d < info->ndim && at < sizeof(shape) - 24; d++) {
        at +=
            (uint32_t)snprintf(shape + at, sizeof(shape) - at, "%s%" PRIu64, d ? " x " : "", info->shape[d]);
    }
    cli_error(err, CKD_E_INVALID, "--region is not inside the tensor, which is %s", shape);
    return cli_error_tensor(err, info->name);
}

static ckd_status cut_own(ckd_region *out, const cli_region *region, const ckd_tensor_info *info,
                          ckd_error *err) {
    if (region->ndim > info->ndim) {
        return not_inside(info, err);
    }
    for (uint32_t d = 0; d < region->ndim; d++) {
        uint64_t end = region->end[d] == UINT64_MAX ? info->shape[d] : region->end[d];
        if (region->first[d] > end || end > info->shape[d]) {
            return not_inside(info, err);
        }
        out->offsets[d] = region->first[d];
        out->lengths[d] = end - region->first[d];
    }
    return CKD_OK;
}

/* As torch.chunk: ceil(L / N) each, until nothing is left. */
static void cut_shard(ckd_region *out, const cli_regions *r, const ckd_tensor_info *info, uint32_t dim) {
    uint64_t all = info->shape[dim], shard_length = all / r->shards + (all % r->shards != 0);
    uint64_t first =
        shard_length && r->shard < (all + shard_length - 1) / shard_length ? r->shard * shard_length : all;
    out->offsets[dim] = first;
    out->lengths[dim] = all - first < shard_length ? all - first : shard_length;
}

ckd_status cli_regions_find(ckd_region *out, uint64_t lengths[CKD_MAX_DIMS], const cli_regions *r,
                            const ckd_tensor_info *info, ckd_error *err) {
    *out = (ckd_region){.kind = CKD_REGION_BOX};
    memcpy(out->lengths, info->shape, info->ndim * sizeof(uint64_t));
    const cli_region *region = find_own(r, info->name);
    ckd_status status = region ? cut_own(out, region, info, err) : CKD_OK;
    uint32_t dim = cli_dim_of(r->dim, info->ndim);
    if (!region && r->shards && dim < info->ndim) {
        cut_shard(out, r, info, dim);
    }
    memcpy(lengths, out->lengths, sizeof(out->lengths));
    return status;
}

/* ---- slices ---- */

ckd_status cli_cut_box(const ckd_region *box, uint32_t ndim, uint64_t max, cli_box_fn visit, void *context,
                       ckd_error *err) {
    uint64_t elements = 1;
    for (uint32_t d = 0; d < ndim; d++) {
        elements *= box->lengths[d];
    }
    if (elements <= max || elements == 1) {
        return elements ? visit(context, box, elements, err) : CKD_OK;
    }
    uint32_t dim = 0;
    while (box->lengths[dim] == 1) {
        dim++;
    }
    uint64_t rows = max / (elements / box->lengths[dim]);
    ckd_region slice = *box;
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < box->lengths[dim] && status == CKD_OK; at += slice.lengths[dim]) {
        uint64_t left = box->lengths[dim] - at;
        slice.offsets[dim] = box->offsets[dim] + at;
        slice.lengths[dim] = rows == 0 ? 1 : left < rows ? left : rows;
        status = cli_cut_box(&slice, ndim, max, visit, context, err);
    }
    return status;
}
