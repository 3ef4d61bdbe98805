/*
 * Writes a safetensors file from a checkpoint, slice by slice, in two buffers: one is written while the other is
 * filled. Small tensors are loaded together, so that all threads have work.
 */
#include "cli/convert/convert.h"

#include <stdlib.h>
#include <string.h>

#include "cli/files/files.h"

#define SLICE_BYTES (UINT64_C(16) << 20)

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

/* ---- the buffers ---- */

/* Writes the content of the buffer, and empties it. */
static ckd_status flush(file_writing *w, ckd_error *err) {
    if (w->filled == 0) {
        return CKD_OK;
    }
    ckd_status status = w->behind ? cli_writer_write(w->writer, w->output, w->buffer, w->filled, err)
                                  : cli_output_write(w->output, w->buffer, w->filled, err);
    if (w->behind) {
        char *writing = w->buffer;
        w->buffer = w->other;
        w->other = writing;
    }
    w->filled = 0;
    return status;
}

/* Provides space behind the content of the buffer. */
static ckd_status make_space(file_writing *w, size_t size, ckd_error *err) {
    return w->filled + size > SLICE_BYTES ? flush(w, err) : CKD_OK;
}

static ckd_status add_filled(file_writing *w, size_t size, ckd_error *err) {
    w->filled += size;
    w->done += size;
    return cli_progress_update(&w->progress, w->done, w->total) ? cli_output_interrupted(w->output, err)
                                                                : CKD_OK;
}

/* ---- slices ---- */

typedef struct slice_context {
    file_writing *writing;
    const safetensors_tensor *tensor;
    const rank_tensor *of_rank; /* NULL: no layout */
    ckd_dtype stored;
} slice_context;

static ckd_status load_slice(const slice_context *p, const ckd_region *slice, uint64_t elements,
                             ckd_error *err) {
    file_writing *w = p->writing;
    char *to = w->buffer + w->filled;
    if (p->of_rank) {
        return rank_tensor_load(to, w->scratch, p->of_rank, slice, w->load, err);
    }
    bool cast = p->stored != p->tensor->dtype;
    ckd_load_request request = CKD_LOAD_REQUEST_INIT;
    request.name = p->tensor->name;
    request.region = *slice;
    request.data = cast ? w->scratch : to;
    request.size = (size_t)(elements * ckd_dtype_size(p->stored));
    ckd_status status = ckd_load_tensor(w->load, &request, err);
    if (status == CKD_OK && cast) {
        cli_cast(to, p->tensor->dtype, w->scratch, p->stored, (size_t)elements);
    }
    return status;
}

static ckd_status copy_slice(void *context, const ckd_region *slice, uint64_t elements, ckd_error *err) {
    slice_context *p = context;
    size_t size = (size_t)(elements * ckd_dtype_size(p->tensor->dtype));
    ckd_status status = make_space(p->writing, size, err);
    THEN(status, load_slice(p, slice, elements, err));
    return status == CKD_OK ? add_filled(p->writing, size, err) : status;
}

/* Cuts a whole tensor at its block boundaries, so that no block is decoded twice. */
static ckd_status copy_whole(slice_context *p, uint64_t max, ckd_error *err) {
    const safetensors_tensor *t = p->tensor;
    max -= max % CKD_BLOCK_ELEMENTS;
    ckd_status status = CKD_OK;
    for (uint64_t first = 0; first < t->elements && status == CKD_OK; first += max) {
        uint64_t count = t->elements - first < max ? t->elements - first : max;
        ckd_region slice = {.kind = CKD_REGION_FLAT, .start = first, .count = count};
        status = copy_slice(p, &slice, count, err);
    }
    return status;
}

static ckd_dtype stored_as(const file_content *c, const safetensors_tensor *t) {
    return c->stored ? c->stored[t->number] : t->dtype;
}

static ckd_status copy_tensor(file_writing *w, const file_content *c, const safetensors_tensor *t,
                              ckd_error *err) {
    slice_context p = {w, t, NULL, stored_as(c, t)};
    size_t element = ckd_dtype_size(t->dtype), before = ckd_dtype_size(p.stored);
    uint64_t max = SLICE_BYTES / (before > element ? before : element);
    if (c->of_rank.items) {
        p.of_rank = &c->of_rank.items[t->number];
        ckd_region all = {.kind = CKD_REGION_BOX};
        memcpy(all.lengths, p.of_rank->share.lengths, sizeof(all.lengths));
        return cli_cut_box(&all, t->ndim, max, copy_slice, &p, err);
    }
    return c->regions ? cli_cut_box(&c->regions[t->number], t->ndim, max, copy_slice, &p, err)
                      : copy_whole(&p, max, err);
}

/* ---- tensors together ---- */

/* Some of a file's tensors, one after the other. */
typedef struct tensor_batch {
    const file_content *content;
    size_t first, count;
    size_t size, uncast; /* bytes in the buffer, and in `scratch` those before they are cast */
} tensor_batch;

/* Returns the bytes of scratch memory that a tensor takes. */
static uint64_t uncast_size(const file_content *c, const safetensors_tensor *t) {
    ckd_dtype stored = stored_as(c, t);
    return stored == t->dtype ? 0 : (t->elements * ckd_dtype_size(stored) + 7) / 8 * 8;
}

#define BATCH_TENSORS 4096u /* each takes a request and a place in the load's plan */

/* Returns as many tensors as fit into a buffer; none if the next one does not fit. */
static tensor_batch next_batch(const file_content *c, size_t first) {
    tensor_batch b = {c, first, 0, 0, 0};
    for (size_t i = first; i < c->count && !c->of_rank.items && b.count < BATCH_TENSORS; i++, b.count++) {
        const safetensors_tensor *t = &c->tensors[i];
        uint64_t uncast = uncast_size(c, t);
        if (t->size > SLICE_BYTES - b.size || uncast > SLICE_BYTES - b.uncast) {
            break;
        }
        b.size += (size_t)t->size;
        b.uncast += (size_t)uncast;
    }
    return b;
}

static void fill_requests(ckd_load_request *requests, const tensor_batch *b, const file_writing *w) {
    char *to = w->buffer + w->filled, *uncast = w->scratch;
    for (size_t i = 0; i < b->count; i++) {
        const safetensors_tensor *t = &b->content->tensors[b->first + i];
        ckd_load_request *q = &requests[i];
        uint64_t space = uncast_size(b->content, t);
        *q = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q->name = t->name;
        if (b->content->regions) {
            q->region = b->content->regions[t->number];
        }
        q->data = space ? uncast : to;
        q->size = (size_t)(t->elements * ckd_dtype_size(stored_as(b->content, t)));
        to += t->size;
        uncast += space;
    }
}

static void cast_batch(const ckd_load_request *requests, const tensor_batch *b, char *to) {
    for (size_t i = 0; i < b->count; i++) {
        const safetensors_tensor *t = &b->content->tensors[b->first + i];
        if (requests[i].data != to && t->elements > 0) {
            cli_cast(to, t->dtype, requests[i].data, stored_as(b->content, t), (size_t)t->elements);
        }
        to += t->size;
    }
}

/* Loads the tensors at once, so that small ones keep all threads busy, too. */
static ckd_status copy_batch(file_writing *w, const tensor_batch *b, ckd_error *err) {
    ckd_load_request *requests = malloc(b->count * sizeof(*requests));
    if (!requests) {
        return cli_error_nomem(err);
    }
    ckd_status status = make_space(w, b->size, err);
    if (status == CKD_OK) {
        fill_requests(requests, b, w);
        status = ckd_load_all(w->load, requests, b->count, CKD_DIFFERS_UNEXPECTED, err);
    }
    if (status == CKD_OK) {
        cast_batch(requests, b, w->buffer + w->filled);
        status = add_filled(w, b->size, err);
    }
    free(requests);
    return status;
}

/* ---- files ---- */

ckd_status file_writing_begin(file_writing *w, ckd_load *load, const char *verb, uint64_t total,
                              const cli_options *options, ckd_error *err) {
    *w = (file_writing){.load = load, .total = total, .memory = malloc(3 * SLICE_BYTES)};
    cli_progress_begin(&w->progress, verb, options->quiet);
    cli_interrupt_catch();
    if (!w->memory) {
        return cli_error_nomem(err);
    }
    w->buffer = w->memory;
    w->other = w->buffer + SLICE_BYTES;
    w->scratch = w->other + SLICE_BYTES;
    w->writer = options->threads == 1 ? NULL : cli_writer_new();
    return CKD_OK;
}

static ckd_status copy_tensors(file_writing *w, const file_content *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->count && status == CKD_OK;) {
        tensor_batch b = next_batch(c, i);
        status = b.count ? copy_batch(w, &b, err) : copy_tensor(w, c, &c->tensors[i], err);
        i += b.count ? b.count : 1;
    }
    THEN(status, flush(w, err));
    return status;
}

ckd_status file_content_write(file_writing *w, const file_content *c, const char *path, bool force,
                              cli_outputs *set, ckd_error *err) {
    ckd_status status = cli_output_open(&w->output, path, force, c->header_size + c->data_size, err);
    if (status != CKD_OK) {
        return status;
    }
    w->behind = w->writer && !cli_output_is_standard(path); /* there a signal ends a wait for a reader */
    w->filled = 0;
    status = cli_output_write(w->output, c->header, c->header_size, err);
    THEN(status, copy_tensors(w, c, err));
    ckd_error later;
    ckd_status written = w->behind ? cli_writer_wait(w->writer, &later) : CKD_OK;
    if (status == CKD_OK && written != CKD_OK) {
        status = written;
        *err = later;
    }
    if (status == CKD_OK) {
        return set ? cli_outputs_add(set, w->output, err) : cli_output_commit(w->output, err);
    }
    cli_output_drop(w->output);
    return status;
}

void file_writing_end(file_writing *w) {
    cli_progress_end(&w->progress);
    cli_writer_free(w->writer);
    free(w->memory);
    *w = (file_writing){0};
}
