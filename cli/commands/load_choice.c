/*
 * Chooses the tensors and regions that `load` writes. With a layout these are one rank's tensors, otherwise the
 * checkpoint's own.
 */
#include "cli/commands/load_choice.h"

#include <fnmatch.h>
#include <stdlib.h>

static bool wanted(load_choice *choice, const char *name) {
    if (cli_regions_names(&choice->regions, name)) {
        return true;
    }
    for (size_t i = 0; i < choice->glob_count; i++) {
        if (fnmatch(choice->globs[i], name, 0) == 0) {
            return true;
        }
    }
    return choice->glob_count == 0 && (choice->regions.count == 0 || choice->regions.shards);
}

/* Adds a tensor. Its shape in the file is that of the selected part. */
static ckd_status choose_tensor(file_content *c, const load_choice *choice, const ckd_tensor_info *info,
                                ckd_error *err) {
    safetensors_tensor *t = &c->tensors[c->count];
    *t = (safetensors_tensor){
        .name = info->name, .dtype = info->dtype, .ndim = info->ndim, .number = c->count};
    ckd_status status = cli_regions_find(&c->regions[c->count++], t->shape, &choice->regions, info, err);
    t->elements = 1;
    for (uint32_t d = 0; d < t->ndim; d++) {
        t->elements *= t->shape[d];
    }
    return status;
}

static ckd_status check_regions_used(const cli_regions *regions, ckd_error *err) {
    for (size_t i = 0; i < regions->count; i++) {
        if (!regions->items[i].used) {
            return cli_error(
                err, CKD_E_NOT_FOUND,
                "this checkpoint has no tensor '%s', which --region names; ckptdelta show lists its tensors",
                regions->items[i].tensor);
        }
    }
    return CKD_OK;
}

/* Adds the tensors of one rank of the layout. */
static ckd_status choose_rank_tensors(file_content *c, load_choice *choice, const bound_checkpoint *b,
                                      uint32_t rank, ckd_error *err) {
    ckd_status status = rank_content_make(&c->of_rank, b, rank, err);
    c->tensors = calloc(c->of_rank.count + 1, sizeof(*c->tensors));
    if (status == CKD_OK && !c->tensors) {
        status = cli_error_nomem(err);
    }
    for (size_t i = 0; i < c->of_rank.count && status == CKD_OK; i++) {
        const rank_tensor *from = &c->of_rank.items[i];
        if (!wanted(choice, from->name)) {
            continue;
        }
        safetensors_tensor *t = &c->tensors[c->count++];
        *t = (safetensors_tensor){.name = from->name,
                                  .dtype = rank_tensor_dtype(from),
                                  .ndim = from->share.ndim,
                                  .elements = 1,
                                  .number = i};
        for (uint32_t d = 0; d < t->ndim; d++) {
            t->shape[d] = from->share.lengths[d];
            t->elements *= t->shape[d];
        }
    }
    return status;
}

static ckd_status choose_own_tensors(file_content *c, load_choice *choice, const ckd_tensor_list *list,
                                     ckd_error *err) {
    c->tensors = calloc(list->count + 1, sizeof(*c->tensors));
    c->regions = calloc(list->count + 1, sizeof(*c->regions));
    if (!c->tensors || !c->regions) {
        return cli_error_nomem(err);
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        if (wanted(choice, list->items[i].name)) {
            status = choose_tensor(c, choice, &list->items[i], err);
        }
    }
    if (choice->regions.count + choice->regions.shards == 0) {
        free(c->regions);
        c->regions = NULL; /* whole tensors are read block by block */
    }
    return status == CKD_OK ? check_regions_used(&choice->regions, err) : status;
}

static ckd_status choose_tensors(file_content *c, load_choice *choice, const ckd_load *load,
                                 const bound_checkpoint *b, uint32_t rank, ckd_error *err) {
    ckd_status status = choice->layout ? choose_rank_tensors(c, choice, b, rank, err)
                                       : choose_own_tensors(c, choice, ckd_load_tensors(load), err);
    if (status == CKD_OK && c->count == 0 && choice->glob_count > 0) {
        status = cli_error(err, CKD_E_NOT_FOUND,
                           "no tensor of this checkpoint matches --tensor; ckptdelta show lists them");
    }
    return status;
}

ckd_status load_choice_make(file_content *out, load_choice *choice, ckd_load *load,
                            const bound_checkpoint *bound, uint32_t rank, ckd_error *err) {
    json_t *metadata = NULL;
    ckd_status status = choose_tensors(out, choice, load, bound, rank, err);
    THEN(status, file_metadata(&metadata, load, err));
    THEN(status, file_content_arrange(out, metadata, err));
    json_decref(metadata);
    return status;
}

ckd_status load_choice_requests(ckd_load_request **out, size_t *count, const file_content *c,
                                ckd_error *err) {
    *out = calloc(c->count + 1, sizeof(**out));
    *count = 0;
    ckd_status status = *out ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < c->count && status == CKD_OK; i++) {
        if (c->of_rank.items) {
            status = rank_tensor_requests(out, count, &c->of_rank.items[c->tensors[i].number], err);
            continue;
        }
        ckd_load_request *request = &(*out)[(*count)++];
        *request = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        request->name = c->tensors[i].name;
        if (c->regions) {
            request->region = c->regions[c->tensors[i].number];
        }
    }
    return status;
}
