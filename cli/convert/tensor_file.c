#include "cli/convert/convert.h"

#include <stdlib.h>
#include <string.h>

#include "cli/files/files.h"

#define PIECE_BYTES (UINT64_C(16) << 20)

void file_content_free(file_content *c) {
    free(c->tensors);
    free(c->regions);
    free(c->stored);
    free(c->header);
    rank_content_free(&c->of_rank);
    *c = (file_content){0};
}

ckd_status file_content_arrange(file_content *c, json_t *metadata, ckd_error *err) {
    char *header = NULL;
    size_t header_size = 0;
    ckd_status status = safetensors_arrange(&c->data_size, c->tensors, c->count, err);
    THEN(status, safetensors_format_header(&header, &header_size, c->tensors, c->count, metadata, err));
    c->header = header;
    c->header_size = header_size;
    return status;
}

ckd_status file_metadata(json_t **out, ckd_load *load, ckd_error *err) {
    *out = NULL;
    void *text;
    size_t size;
    ckd_status status = ckd_load_blob(&text, &size, load, METADATA_BLOB, err);
    if (status == CKD_OK) {
        status = safetensors_metadata_parse(out, text, size, err);
        ckd_blob_free(text);
    }
    return status == CKD_E_NOT_FOUND ? CKD_OK : status;
}

/* ---- pieces ---- */

typedef struct piece_context {
    file_writing *writing;
    cli_output *output;
    const safetensors_tensor *tensor;
    const rank_tensor *of_rank; /* NULL: no layout */
    ckd_dtype stored;
} piece_context;

static ckd_status load_piece(const piece_context *p, const ckd_region *piece, uint64_t elements,
                             ckd_error *err) {
    file_writing *w = p->writing;
    if (p->of_rank) {
        return rank_tensor_load(w->buffer, w->scratch, p->of_rank, piece, w->load, err);
    }
    bool cast = p->stored != p->tensor->dtype;
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = p->tensor->name;
    request.region = *piece;
    request.data = cast ? w->scratch : w->buffer;
    request.size = (size_t)(elements * ckd_dtype_size(p->stored));
    ckd_status status = ckd_load_tensor(w->load, &request, err);
    if (status == CKD_OK && cast) {
        cli_cast(w->buffer, p->tensor->dtype, w->scratch, p->stored, (size_t)elements);
    }
    return status;
}

static ckd_status copy_piece(void *context, const ckd_region *piece, uint64_t elements, ckd_error *err) {
    piece_context *p = context;
    file_writing *w = p->writing;
    size_t size = (size_t)(elements * ckd_dtype_size(p->tensor->dtype));
    ckd_status status = load_piece(p, piece, elements, err);
    THEN(status, cli_output_write(p->output, w->buffer, size, err));
    if (status != CKD_OK) {
        return status;
    }
    w->done += size;
    return cli_progress_update(&w->progress, w->done, w->total) ? cli_output_interrupted(p->output, err)
                                                                : CKD_OK;
}

/* Cuts a whole tensor at its block boundaries, so that no block is decoded twice. */
static ckd_status copy_whole(piece_context *p, uint64_t max, ckd_error *err) {
    const safetensors_tensor *t = p->tensor;
    max -= max % CKD_BLOCK_ELEMENTS;
    ckd_status status = CKD_OK;
    for (uint64_t first = 0; first < t->elements && status == CKD_OK; first += max) {
        uint64_t count = t->elements - first < max ? t->elements - first : max;
        ckd_region piece = {.kind = CKD_REGION_FLAT, .start = first, .count = count};
        status = copy_piece(p, &piece, count, err);
    }
    return status;
}

static ckd_status copy_tensor(file_writing *w, cli_output *output, const file_content *c,
                              const safetensors_tensor *t, ckd_error *err) {
    piece_context p = {w, output, t, NULL, c->stored ? c->stored[t->number] : t->dtype};
    size_t element = ckd_dtype_size(t->dtype), before = ckd_dtype_size(p.stored);
    uint64_t max = PIECE_BYTES / (before > element ? before : element);
    if (c->of_rank.items) {
        p.of_rank = &c->of_rank.items[t->number];
        ckd_region all = {.kind = CKD_REGION_BOX};
        memcpy(all.lengths, p.of_rank->share.lengths, sizeof(all.lengths));
        return cli_cut_box(&all, t->ndim, max, copy_piece, &p, err);
    }
    return c->regions ? cli_cut_box(&c->regions[t->number], t->ndim, max, copy_piece, &p, err)
                      : copy_whole(&p, max, err);
}

/* ---- files ---- */

ckd_status file_writing_begin(file_writing *w, ckd_load *load, const char *verb, uint64_t total, bool quiet,
                              ckd_error *err) {
    *w = (file_writing){.load = load, .total = total, .buffer = malloc(2 * PIECE_BYTES)};
    w->scratch = (char *)w->buffer + PIECE_BYTES;
    cli_progress_begin(&w->progress, verb, quiet);
    cli_interrupt_catch();
    return w->buffer ? CKD_OK : cli_error_nomem(err);
}

ckd_status file_content_write(file_writing *w, const file_content *c, const char *path, bool force,
                              cli_outputs *set, ckd_error *err) {
    cli_output *output = NULL;
    ckd_status status = cli_output_open(&output, path, force, c->header_size + c->data_size, err);
    THEN(status, cli_output_write(output, c->header, c->header_size, err));
    for (size_t i = 0; i < c->count && status == CKD_OK; i++) {
        status = copy_tensor(w, output, c, &c->tensors[i], err);
    }
    if (status == CKD_OK) {
        return set ? cli_outputs_add(set, output, err) : cli_output_commit(output, err);
    }
    cli_output_drop(output);
    return status;
}

void file_writing_end(file_writing *w) {
    cli_progress_end(&w->progress);
    free(w->buffer);
    *w = (file_writing){0};
}
