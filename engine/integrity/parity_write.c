/* Writes parity files. Reads the members side by side, a few stripes at a time. */
#include <stdlib.h>

#include "engine/integrity/internal.h"

#define MEMORY (UINT64_C(64) << 20)

uint64_t parity_batch(const parity_group *g) {
    uint64_t stripe_bytes = (uint64_t)(g->member_count + g->rows) * g->piece;
    uint64_t count = MEMORY / stripe_bytes, max = (UINT64_C(1) << 20) / g->piece;
    count = count < max ? count : max;
    return count ? count : 1;
}

typedef struct encoder {
    const ckd_store *store;
    const parity_group *g;
    rate_limiter *limiter;
    uint32_t rows[ERASURE_PARITY_MAX]; /* rows to write */
    size_t row_count;
    file_reader *in[ERASURE_DATA_MAX];
    file_writer *out[ERASURE_PARITY_MAX];
    uint8_t *matrix;                     /* row_count x member_count */
    uint8_t *data[ERASURE_DATA_MAX];     /* a batch of each member */
    uint8_t *parity[ERASURE_PARITY_MAX]; /* a batch of stripes of each row */
    uint8_t *memory;
} encoder;

static ckd_status open_members(encoder *e, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < e->g->member_count && status == CKD_OK; i++) {
        const parity_member *m = &e->g->members[i];
        pathname p = path_chunk(e->store->path, &m->file, "");
        status = file_open_read(&e->in[i], p.text, err);
        if (status == CKD_OK && file_size(e->in[i]) != m->size) {
            status = err_corrupt(err, p.text, CKD_NO_OFFSET,
                                 "the size of the file is not the one in its manifest");
        }
    }
    return status;
}

static ckd_status create_rows(encoder *e, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t r = 0; r < e->row_count && status == CKD_OK; r++) {
        parity_group g = *e->g;
        bytes head = {0};
        g.row = e->rows[r];
        parity_group_encode(&head, &e->store->id, &g);
        status = head.failed ? err_nomem(err, head.size, "a parity group") : CKD_OK;
        THEN(status, file_create(&e->out[r], path_parity(e->store->path, &g.id, g.row, ".tmp").text, 0, err));
        THEN(status, file_append(e->out[r], head.data, head.size, err));
        bytes_free(&head);
    }
    return status;
}

static ckd_status take_memory(encoder *e, ckd_error *err) {
    const parity_group *g = e->g;
    uint64_t batch = parity_batch(g);
    size_t data = batch * g->piece, row = batch * (g->piece + 8 * g->member_count + PARITY_BEHIND);
    size_t matrix = e->row_count * g->member_count;
    size_t all = g->member_count * data + e->row_count * row + matrix;
    e->memory = malloc(all);
    if (!e->memory) {
        return err_nomem(err, all, "making parity");
    }
    for (size_t i = 0; i < g->member_count; i++) {
        e->data[i] = e->memory + i * data;
    }
    for (size_t r = 0; r < e->row_count; r++) {
        e->parity[r] = e->memory + g->member_count * data + r * row;
    }
    e->matrix = e->memory + all - matrix;
    for (size_t r = 0; r < e->row_count; r++) {
        for (size_t i = 0; i < g->member_count; i++) {
            e->matrix[r * g->member_count + i] = erasure_coefficient(e->rows[r], g->members[i].column);
        }
    }
    return CKD_OK;
}

static ckd_status read_members(encoder *e, uint64_t first, uint64_t count, uint64_t *read, ckd_error *err) {
    const parity_group *g = e->g;
    ckd_status status = CKD_OK;
    *read = 0;
    for (size_t i = 0; i < g->member_count && status == CKD_OK; i++) {
        uint64_t begin = first * g->piece, size = count * g->piece, available = g->members[i].size;
        available = available > begin ? available - begin : 0;
        available = available < size ? available : size;
        memset(e->data[i] + available, 0, size - available);
        status = available ? file_read_at(e->in[i], begin, e->data[i], available, err) : CKD_OK;
        *read += available;
    }
    return status;
}

static ckd_status encode_stripe(encoder *e, uint64_t first, uint64_t stripe, ckd_error *err) {
    const parity_group *g = e->g;
    uint64_t at = (stripe - first) * g->piece;
    uint64_t offset = parity_stripe_offset(g, stripe) - parity_stripe_offset(g, first);
    uint32_t size = parity_piece_size(g, stripe);
    const uint8_t *inputs[ERASURE_DATA_MAX];
    uint8_t *out[ERASURE_PARITY_MAX];
    for (size_t i = 0; i < g->member_count; i++) {
        inputs[i] = e->data[i] + at;
    }
    for (size_t r = 0; r < e->row_count; r++) {
        out[r] = e->parity[r] + offset;
    }
    ckd_status status =
        erasure_sums(&(erasure_product){out, inputs, e->matrix, e->row_count, g->member_count, size}, err);
    for (size_t i = 0; i < g->member_count && status == CKD_OK; i++) {
        uint64_t hash = hash64(inputs[i], parity_member_size(g, i, stripe));
        for (size_t r = 0; r < e->row_count; r++) {
            store_le64(out[r] + size + 8 * i, hash);
        }
    }
    for (size_t r = 0; r < e->row_count && status == CKD_OK; r++) {
        parity_stripe_finish(out[r], g, e->rows[r], stripe);
    }
    return status;
}

static ckd_status encode_batch(encoder *e, uint64_t first, uint64_t count, ckd_error *err) {
    uint64_t read, size = parity_stripe_offset(e->g, first + count) - parity_stripe_offset(e->g, first);
    ckd_status status = read_members(e, first, count, &read, err);
    for (uint64_t s = first; s < first + count && status == CKD_OK; s++) {
        status = encode_stripe(e, first, s, err);
    }
    for (size_t r = 0; r < e->row_count && status == CKD_OK; r++) {
        status = file_append(e->out[r], e->parity[r], size, err);
    }
    return status == CKD_OK ? rate_limiter_add(e->limiter, read, err) : status;
}

static ckd_status finish_rows(encoder *e, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t r = 0; r < e->row_count && status == CKD_OK; r++) {
        parity_group g = *e->g;
        bytes tail = {0};
        g.row = e->rows[r];
        parity_group_encode(&tail, &e->store->id, &g);
        parity_put_trailer(&tail, (uint32_t)tail.size);
        status = tail.failed ? err_nomem(err, tail.size, "a parity group")
                             : file_append(e->out[r], tail.data, tail.size, err);
        bytes_free(&tail);
        THEN(status, file_sync(e->out[r], err));
        if (status == CKD_OK) {
            status = file_close(e->out[r], err);
            e->out[r] = NULL;
        }
    }
    return status;
}

static void choose_rows(encoder *e, uint32_t rows) {
    for (uint32_t row = 0; row < e->g->rows; row++) {
        if (rows & UINT32_C(1) << row) {
            e->rows[e->row_count++] = row;
        }
    }
}

static ckd_status encode(encoder *e, ckd_error *err) {
    uint64_t stripes = parity_stripes(e->g), batch = parity_batch(e->g);
    ckd_status status = e->rows[e->row_count - 1] > 0 ? erasure_ready(err) : CKD_OK;
    THEN(status, open_members(e, err));
    THEN(status, take_memory(e, err));
    THEN(status, create_rows(e, err));
    for (uint64_t first = 0; first < stripes && status == CKD_OK; first += batch) {
        status = encode_batch(e, first, stripes - first < batch ? stripes - first : batch, err);
    }
    return status == CKD_OK ? finish_rows(e, err) : status;
}

ckd_status parity_write(const ckd_store *store, const parity_group *g, uint32_t rows, rate_limiter *p,
                        ckd_error *err) {
    encoder *e = calloc(1, sizeof(*e));
    if (!e) {
        return err_nomem(err, sizeof(*e), "making parity");
    }
    *e = (encoder){.store = store, .g = g, .limiter = p};
    choose_rows(e, rows);
    ckd_status status = encode(e, err);
    for (size_t i = 0; i < g->member_count; i++) {
        file_close_read(e->in[i]);
    }
    for (size_t r = 0; r < e->row_count; r++) {
        file_discard(e->out[r]);
    }
    free(e->memory);
    free(e);
    if (status != CKD_OK) {
        parity_write_undo(store, g, rows);
    }
    return status;
}

void parity_write_undo(const ckd_store *store, const parity_group *g, uint32_t rows) {
    for (uint32_t row = 0; row < g->rows; row++) {
        if (rows & UINT32_C(1) << row) {
            file_remove(path_parity(store->path, &g->id, row, ".tmp").text, true, NULL);
        }
    }
}
