/* Collects the chains of blocks for a device: follows them from the wanted block to the root, then reverses them. */
#include "engine/device/internal.h"

#include <stdlib.h>

#include "kernels/scalar_lattice.h"

#define HALF_EXACT 2048.0f  /* f16 holds all integers up to this one */
#define F16_MAX    65504.0f /* the largest f16 */

void chain_sides_init(chain_sides *s) {
    s->first = NULL;
    s->streams = false;
    pthread_mutex_init(&s->mutex, NULL);
}

static void free_side(chain_side *side) {
    bytes_free(&side->sent);
    free(side->largest);
    free(side);
}

void chain_sides_free(chain_sides *s) {
    while (s->first) {
        chain_side *side = s->first;
        s->first = side->next;
        free_side(side);
    }
    pthread_mutex_destroy(&s->mutex);
}

void device_chain_free(device_chain *c) {
    free(c->links);
    bytes_free(&c->sent);
    bytes_free(&c->streams);
    *c = (device_chain){.block = NULL};
}

/* A chain under construction, followed as far as `block`. */
typedef struct chain_builder {
    device_chain *c;
    chain_sides *sides;
    decoder *d;
    const view *view;
    const view_block *block;
} chain_builder;

/* ---- arrays to be sent ---- */

/* Returns memory for an array, aligned to 16 bytes, at offset *at. NULL: out of memory. */
static void *put_array(bytes *to, uint64_t size, size_t *at, ckd_error *err) {
    size_t begin = (to->size + 15) / 16 * 16;
    uint8_t *array = bytes_extend(to, begin - to->size + (size_t)size);
    if (!array) {
        err_nomem(err, size, "what goes to a device");
        return NULL;
    }
    memset(array, 0, to->data + begin - array);
    *at = begin;
    return to->data + begin;
}

static ckd_status put_copy(bytes *to, const void *from, uint64_t size, size_t *at, ckd_error *err) {
    void *array = put_array(to, size, at, err);
    if (array && size) {
        memcpy(array, from, (size_t)size);
    }
    return array ? CKD_OK : CKD_E_NOMEM;
}

/* Chooses the smallest dtype that holds the factor: one byte, f16 or f32. shift NULL: none. */
static ckd_dtype factor_dtype(float *largest, uint32_t rank, const int32_t *shift) {
    float max = 0;
    bool exact = true;
    for (uint32_t k = 0; k < rank; k++) {
        exact &= largest[k] <= HALF_EXACT;
        largest[k] *= shift ? (float)(1u << shift[k]) : 1;
        max = largest[k] > max ? largest[k] : max;
    }
    return max <= INT8_MAX ? CKD_I8 : (exact && max <= F16_MAX ? CKD_F16 : CKD_F32);
}

/*
 * Pads rows of `rank` floats to `padded`. Goes from the last row to the first, as `floats` has room for the
 * result.
 */
static void pad_rows(float *floats, uint64_t count, uint32_t rank, uint32_t padded, const int32_t *shift) {
    for (uint64_t i = count; i-- > 0;) {
        float *to = floats + i * padded;
        memmove(to, floats + i * rank, rank * sizeof(float));
        for (uint32_t k = 0; k < rank && shift; k++) {
            to[k] *= (float)(1u << shift[k]);
        }
        memset(to + rank, 0, (padded - rank) * sizeof(float));
    }
}

/* Output memory for steps and a factor. */
typedef struct factor_output {
    chain_factor *at;
    bytes *to;
    float *largest; /* largest magnitude, per component of the factor */
} factor_output;

/* A decoded factor, count x rank. shift: per component; NULL: none. */
typedef struct factor_input {
    const int32_t *factor;
    uint64_t count;
    uint32_t rank;
    const int32_t *shift;
} factor_input;

/* Sends a factor, padded with zeros as products of bytes require. */
static ckd_status put_factor(const factor_output *out, const factor_input *in, decoder *d, ckd_error *err) {
    uint32_t rank = in->rank, padded = device_bytes_rank(rank);
    uint64_t n = in->count * padded;
    float *largest = out->largest;
    float *floats = bytes_scratch(&d->lattice.left, n * sizeof(float) + 1, "decoding scratch", err);
    if (!floats) {
        return CKD_E_NOMEM;
    }
    memset(largest, 0, rank * sizeof(float));
    d->kernels->factor_values(floats, largest, in->factor, in->count, rank);
    ckd_dtype dtype = factor_dtype(largest, rank, in->shift);
    out->at->dtype = dtype;
    out->at->count = n;
    void *at = put_array(out->to, n * ckd_dtype_size(dtype), &out->at->factor, err);
    if (at && dtype == CKD_I8) {
        lattice_factor_bytes(at, in->factor, in->count, rank, padded, in->shift);
        return CKD_OK;
    }
    pad_rows(floats, in->count, rank, padded, in->shift);
    if (at && dtype == CKD_F16) {
        d->kernels->cast(CKD_F16, at, CKD_F32, floats, n);
    } else if (at) {
        memcpy(at, floats, n * sizeof(float));
    }
    return at ? CKD_OK : CKD_E_NOMEM;
}

/* Sends columns: steps as the device multiplies them, or levels as they are. */
static ckd_status put_columns(const factor_output *out, const lattice_columns *c, chain_side_kind kind,
                              decoder *d, ckd_error *err) {
    ckd_status status = CKD_OK;
    *out->at = (chain_factor){.has_step = c->step && kind != CHAIN_ROWS};
    if (out->at->has_step) {
        void *array = put_array(out->to, c->columns * sizeof(int32_t), &out->at->step, err);
        if (!array) {
            return CKD_E_NOMEM;
        }
        for (uint64_t i = 0; i < c->columns; i++) {
            float step = kind == CHAIN_COLUMNS ? scalar_quarter_octaves(c->step[i]) : 0;
            memcpy((uint8_t *)array + 4 * i, kind == CHAIN_COLUMNS ? (const void *)&step : &c->step[i], 4);
        }
    }
    if (c->rank && kind != CHAIN_LEVEL_COLUMNS) {
        const factor_input in = {c->factor, c->columns, c->rank, kind == CHAIN_COLUMNS ? c->shift : NULL};
        status = put_factor(out, &in, d, err);
    }
    return status;
}

/* ---- side records ---- */

static ckd_status make_side(chain_side **out, const cached_columns *from, chain_side_kind kind, decoder *d,
                            ckd_error *err) {
    *out = NULL;
    chain_side *side = calloc(1, sizeof(*side));
    if (!side) {
        return err_nomem(err, sizeof(*side), "what blocks share with others");
    }
    side->content = from->content;
    side->kind = kind;
    side->largest = malloc((from->columns.rank + 1) * sizeof(float));
    const factor_output to = {&side->at, &side->sent, side->largest};
    ckd_status status = side->largest
                            ? put_columns(&to, &from->columns, kind, d, err)
                            : err_nomem(err, from->columns.rank * sizeof(float), "what blocks share");
    if (status != CKD_OK) {
        free_side(side);
        return status;
    }
    *out = side;
    return CKD_OK;
}

/* Finds or makes a side. Other threads wait meanwhile, as this takes less time than a block. */
static ckd_status side_of(chain_side **out, const chain_builder *m, const cached_columns *from,
                          chain_side_kind kind, ckd_error *err) {
    chain_sides *sides = m->sides;
    ckd_status status = CKD_OK;
    pthread_mutex_lock(&sides->mutex);
    chain_side *side = sides->first;
    while (side && !(side->kind == kind && hash128_equal(&side->content, &from->content))) {
        side = side->next;
    }
    if (!side) {
        status = make_side(&side, from, kind, m->d, err);
        if (status == CKD_OK) {
            side->next = sides->first;
            sides->first = side;
        }
    }
    pthread_mutex_unlock(&sides->mutex);
    *out = side;
    return status;
}

/* ---- lossy blocks ---- */

/* Sends packed integers, unless all are 0. *fit = false: one is too large. */
static ckd_status put_integers(bool *fit, chain_link *l, bytes *to, const lattice_block *b, const kernels *k,
                               ckd_error *err) {
    const pack_integers from = {b->q, b->q8, b->count, b->map == LATTICE_LEVELS, k};
    uint64_t heads = device_pack_heads(b->count);
    *fit = true;
    l->packed = b->q8 || b->q;
    uint32_t *packed = l->packed ? put_array(to, heads, &l->at, err) : NULL;
    if (!packed) {
        return l->packed ? CKD_E_NOMEM : CKD_OK;
    }
    uint64_t size = device_pack_measure(packed, &from);
    *fit = size > 0;
    if (*fit && !bytes_extend(to, (size_t)(size - heads))) {
        return err_nomem(err, size, "what goes to a device");
    }
    if (*fit) {
        device_pack((uint32_t *)(void *)(to->data + l->at), &from);
    }
    return CKD_OK;
}

static ckd_status put_row_steps(chain_link *l, bytes *to, const lattice_block *b, ckd_error *err) {
    float *steps = put_array(to, l->rows * sizeof(float), &l->row, err);
    for (uint64_t i = 0; i < l->rows && steps; i++) {
        steps[i] = scalar_quarter_octaves(scalar_add(b->step, b->row ? b->row[i] : 0));
    }
    return steps ? CKD_OK : CKD_E_NOMEM;
}

/*
 * Sends both factors, and the columns' steps. *fit = false: sums of their products may be inexact, which the
 * host will report.
 */
static ckd_status put_factors(bool *fit, chain_link *l, const chain_builder *m, const lattice_parts *p,
                              ckd_error *err) {
    const lattice_block *b = &p->block;
    float left[LATTICE_MAX_RANK], right[LATTICE_MAX_RANK];
    const factor_output to_left = {&l->left, &m->c->sent, left}, to_right = {&l->right, &m->c->sent, right};
    const factor_input rows = {b->factor, l->rows, b->own.rank, NULL};
    ckd_status status = b->shared ? side_of(&l->right_side, m, p->columns, CHAIN_COLUMNS, err)
                                  : put_columns(&to_right, &b->own, CHAIN_COLUMNS, m->d, err);
    if (status != CKD_OK || !b->factor) {
        return status;
    }
    l->rank = device_bytes_rank(b->own.rank);
    status = b->shared_rows ? side_of(&l->left_side, m, p->rows, CHAIN_ROWS, err)
                            : put_factor(&to_left, &rows, m->d, err);
    if (status == CKD_OK) {
        *fit = lattice_sums_exact(l->left_side ? l->left_side->largest : left,
                                  l->right_side ? l->right_side->largest : right, b->own.rank);
    }
    return status;
}

static ckd_status put_exceptions(bool *fit, chain_link *l, bytes *to, const lattice_block *b, size_t size,
                                 ckd_error *err) {
    l->exceptions = b->exceptions;
    *fit = b->exceptions <= CHAIN_EXCEPTIONS;
    if (!b->exceptions || !*fit) {
        return CKD_OK;
    }
    ckd_status status =
        put_copy(to, b->exception_at, b->exceptions * sizeof(uint32_t), &l->exception_at, err);
    uint8_t *bits = status == CKD_OK ? put_array(to, b->exceptions * size, &l->exception_bits, err) : NULL;
    for (uint32_t i = 0; i < b->exceptions && bits; i++) {
        uint32_t all = b->exception_bits[i];
        uint16_t half = (uint16_t)all;
        *fit = *fit && (size == 4 || all <= UINT16_MAX);
        memcpy(bits + i * size, size == 4 ? (const void *)&all : &half, size);
    }
    return bits ? CKD_OK : CKD_E_NOMEM;
}

static ckd_status put_linear(bool *fit, chain_link *l, const chain_builder *m, const lattice_parts *p,
                             ckd_error *err) {
    const lattice_block *b = &p->block;
    bytes *to = &m->c->sent;
    lattice_work no_steps = {.step = {0}};
    if (l->delta && !b->q && !b->q8 && !b->factor && !b->exceptions) {
        l->form = CHAIN_SAME;
        *fit = true;
        return CKD_OK;
    }
    l->form = CHAIN_LINEAR;
    l->run = lattice_row_run(b, &no_steps, 0);
    ckd_status status = put_integers(fit, l, to, b, m->d->kernels, err);
    status = status == CKD_OK && *fit ? put_row_steps(l, to, b, err) : status;
    return status == CKD_OK && *fit ? put_factors(fit, l, m, p, err) : status;
}

static ckd_status put_levels(bool *fit, chain_link *l, const chain_builder *m, const lattice_parts *p,
                             ckd_error *err) {
    const lattice_block *b = &p->block;
    const factor_output columns = {&l->right, &m->c->sent, NULL};
    ckd_status status = CKD_OK;
    *fit = !l->delta;
    if (!*fit) {
        return CKD_OK;
    }
    l->form = CHAIN_LEVELS;
    l->birth = b->birth;
    l->step = b->step;
    l->has_rows = b->row != NULL;
    status = put_integers(fit, l, columns.to, b, m->d->kernels, err);
    if (status == CKD_OK && b->row) {
        status = put_copy(columns.to, b->row, l->rows * sizeof(int32_t), &l->row, err);
    }
    if (status != CKD_OK || !*fit) {
        return status;
    }
    return b->shared ? side_of(&l->right_side, m, p->columns, CHAIN_LEVEL_COLUMNS, err)
                     : put_columns(&columns, &b->own, CHAIN_LEVEL_COLUMNS, m->d, err);
}

static ckd_status add_lossy(bool *fit, chain_link *l, const chain_builder *m, const view *v,
                            const view_block *b, ckd_error *err) {
    lattice_parts p;
    ckd_status status = values_lattice_read(&p, m->d, v, b, false, err);
    if (status != CKD_OK) {
        return status;
    }
    l->columns = p.block.columns;
    l->phase = p.block.phase;
    l->rows = lattice_rows(&p.block);
    status = p.block.map == LATTICE_LEVELS ? put_levels(fit, l, m, &p, err) : put_linear(fit, l, m, &p, err);
    if (status == CKD_OK && *fit) {
        status = put_exceptions(fit, l, &m->c->sent, &p.block, ckd_dtype_size(b->record->tensor->dtype), err);
    }
    values_lattice_release(m->d, &p);
    return status;
}

/* ---- exact blocks ---- */

static ckd_status add_stream(bool *fit, chain_link *l, device_chain *c, decoder *d, const view_block *b,
                             ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    symbols_parts *parts = malloc(sizeof(*parts)); /* too large for a thread's stack */
    ckd_status status =
        parts ? values_payload(d, b, &payload, err) : err_nomem(err, sizeof(*parts), "a symbol stream");
    *fit = false;
    if (status == CKD_OK && r->count && r->count <= DEVICE_STREAM_MAX) {
        status = symbols_parts_read(parts, fit, (unsigned)ckd_dtype_size(r->tensor->dtype), payload,
                                    r->stored_size, err);
    }
    if (status == CKD_OK && *fit) {
        *fit = l->delta || !parts->contexts;
        l->form = CHAIN_STREAM;
        l->size = r->stored_size;
        l->memory = dense_reading_memory(parts, parts->bits);
        status = put_copy(&c->streams, payload, r->stored_size, &l->at, err);
    }
    free(parts);
    return status;
}

static ckd_status add_raw(bool *fit, chain_link *l, device_chain *c, decoder *d, const view_block *b,
                          ckd_error *err) {
    const void *payload;
    *fit = b->record->stored_size == b->record->raw_size;
    ckd_status status = *fit ? values_payload(d, b, &payload, err) : CKD_OK;
    return status == CKD_OK && *fit ? put_copy(&c->sent, payload, b->record->raw_size, &l->at, err) : status;
}

/* ---- links ---- */

/* Makes room for one more link, behind the others. */
static chain_link *next_link(device_chain *c, ckd_error *err) {
    if (c->count == c->capacity) {
        uint32_t capacity = 2 * c->capacity + 4;
        chain_link *grown = realloc(c->links, capacity * sizeof(*grown));
        if (!grown) {
            err_nomem(err, capacity * sizeof(*grown), "a chain of blocks");
            return NULL;
        }
        c->links = grown;
        c->capacity = capacity;
    }
    return &c->links[c->count];
}

/* Adds the block as a link. *fit = false: it does not suit a device. v NULL: a copy that depends on nothing. */
static ckd_status add_link(bool *fit, chain_link *l, const chain_builder *m, const view *v,
                           const view_block *b, ckd_error *err) {
    device_chain *c = m->c;
    const record *r = b->record;
    bool lossy = r->coding == CODING_LATTICE;
    *fit = false;
    ckd_status status = values_check_supported(b, err);
    if (status != CKD_OK || r->predictor > PREDICT_CAST || (r->predictor == PREDICT_CAST && c->cast) ||
        (!v && r->predictor != PREDICT_NONE)) {
        return status;
    }
    *l = (chain_link){.record = r,
                      .form = r->predictor == PREDICT_CAST   ? CHAIN_CAST
                              : r->predictor == PREDICT_COPY ? CHAIN_SAME
                                                             : CHAIN_VALUES,
                      .delta = r->predictor != PREDICT_NONE,
                      .hashed = !lossy || c->count == 0};
    if (l->form == CHAIN_CAST || l->form == CHAIN_SAME) {
        *fit = true;
        /* Counted from the wanted block; reverse_links turns this round. */
        c->cast = l->form == CHAIN_CAST ? c->count + 1 : c->cast;
    } else if (lossy) {
        status = add_lossy(fit, l, m, v, b, err);
    } else if (r->coding == CODING_SYMBOLS && m->sides->streams) {
        status = add_stream(fit, l, c, m->d, b, err);
    } else if (r->coding == CODING_RAW && !l->delta) {
        status = add_raw(fit, l, c, m->d, b, err);
    }
    return status;
}

/* Adds the block's record, or its materialized copy's. Either is compared with the block's own hash. */
static ckd_status add_block(bool *fit, const chain_builder *m, const view *v, const view_block *b,
                            ckd_error *err) {
    device_chain *c = m->c;
    const view_block copy = {.record = b->materialized, .chunk = b->materialized_chunk};
    chain_link *l = next_link(c, err);
    size_t sent = c->sent.size, stream = c->streams.size;
    *fit = false;
    if (!l) {
        return CKD_E_NOMEM;
    }
    ckd_status status = copy_counts(m->d->views, v, b, &m->d->stored) ? add_link(fit, l, m, NULL, &copy, err)
                                                                      : add_link(fit, l, m, v, b, err);
    if (status == CKD_OK && *fit) {
        l->record = b->record;
        c->count++;
    } else {
        *fit = false;
        c->sent.size = sent;
        c->streams.size = stream;
    }
    return status;
}

static void reverse_links(device_chain *c) {
    for (uint32_t i = 0; i < c->count / 2; i++) {
        chain_link first = c->links[i];
        c->links[i] = c->links[c->count - 1 - i];
        c->links[c->count - 1 - i] = first;
    }
    c->cast = c->cast ? c->count - c->cast : 0;
}

static void *put_values(device_chain *c, const record *r, ckd_error *err) {
    chain_link *l = next_link(c, err);
    if (!l) {
        return NULL;
    }
    c->count++;
    *l = (chain_link){.record = r, .form = CHAIN_VALUES};
    return put_array(&c->sent, r->raw_size, &l->at, err);
}

/* Lists the values with bits that bf16 lacks. Stops when there are too many. */
static uint32_t find_long_values(uint32_t *at, const uint8_t *values, uint64_t n) {
    uint32_t found = 0;
    for (uint64_t i = 0; i < n && found <= CHAIN_EXCEPTIONS; i++) {
        uint16_t low;
        memcpy(&low, values + 4 * i, sizeof(low)); /* values are little-endian */
        if (low) {
            at[found++] = (uint32_t)i;
        }
    }
    return found;
}

ckd_status device_chain_filled(device_chain *c, ckd_error *err) {
    chain_link *l = &c->links[c->count - 1];
    uint64_t n = l->record->count;
    uint32_t at[CHAIN_EXCEPTIONS + 1], bits[CHAIN_EXCEPTIONS];
    uint8_t *values = c->sent.data + l->at;
    bool floats = l->record->tensor->dtype == CKD_F32;
    uint32_t found = floats ? find_long_values(at, values, n) : 0;
    if (!floats || found > CHAIN_EXCEPTIONS || n <= CHAIN_EXCEPTIONS) {
        return CKD_OK;
    }
    for (uint32_t i = 0; i < found; i++) {
        memcpy(&bits[i], values + 4 * (uint64_t)at[i], sizeof(bits[i]));
    }
    for (uint64_t i = 0; i < n; i++) {
        memmove(values + 2 * i, values + 4 * i + 2, 2);
    }
    l->half = true;
    c->sent.size -= 2 * n;
    l->exceptions = found;
    ckd_status status =
        found == 0 ? CKD_OK : put_copy(&c->sent, at, found * sizeof(*at), &l->exception_at, err);
    return status == CKD_OK && found
               ? put_copy(&c->sent, bits, found * sizeof(*bits), &l->exception_bits, err)
               : status;
}

/*
 * Adds the values that the last link builds on, decoded by the host, as the root. parent: the block that has them, in
 * view `owner`; NULL: several blocks have them.
 */
static ckd_status add_parent_values(const chain_builder *m, const view *owner, const view_block *parent,
                                    ckd_error *err) {
    void *to = put_values(m->c, parent ? parent->record : m->block->record, err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    ckd_status status = parent ? values_of_input(m->d, owner, parent, to, err)
                               : values_dependency(m->d, m->view, m->block, to, err);
    return status == CKD_OK ? device_chain_filled(m->c, err) : status;
}

static bool rounds(const view_block *b, const view_block *from) {
    ckd_dtype to = b->record->tensor->dtype, wide = from->record->tensor->dtype;
    return wide == CKD_F32 ? to == CKD_BF16 || to == CKD_F16 : wide == CKD_F64 && to == CKD_F32;
}

/* The values below a rounding do not suit a device. The host decodes and rounds them, and sends the narrow values. */
static ckd_status drop_cast(const chain_builder *m, ckd_error *err) {
    device_chain *c = m->c;
    c->count--;
    c->cast = 0;
    if (c->count == 0) {
        return CKD_OK;
    }
    void *to = put_values(c, m->block->record, err);
    ckd_status status = to ? values_of_input(m->d, m->view, m->block, to, err) : CKD_E_NOMEM;
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

/* Follows the last link to the block that it builds on. *more = false: the chain is complete. */
static ckd_status add_ancestor(bool *more, chain_builder *m, ckd_error *err) {
    device_chain *c = m->c;
    const view *owner = NULL;
    const view_block *parent = NULL;
    bool cast = c->links[c->count - 1].form == CHAIN_CAST;
    ckd_status status = view_parent_block(&parent, &owner, m->d->views, m->view, m->block, err);
    *more = parent && c->count < CHAIN_LINKS && (!cast || rounds(m->block, parent));
    if (status == CKD_OK && *more) {
        status = add_block(more, m, owner, parent, err);
    }
    if (status == CKD_OK && !*more) {
        status = cast ? drop_cast(m, err) : add_parent_values(m, owner, parent, err);
    }
    m->view = owner;
    m->block = parent;
    return status;
}

ckd_status device_chain_make(device_chain *c, chain_sides *sides, decoder *d, const view *v, ckd_error *err) {
    chain_builder m = {c, sides, d, v, c->block};
    bool more;
    c->count = c->cast = 0;
    d->blocks_decoded = 0;
    ckd_status status = add_block(&more, &m, v, c->block, err);
    while (status == CKD_OK && more && c->links[c->count - 1].delta) {
        status = add_ancestor(&more, &m, err);
    }
    reverse_links(c);
    return status;
}

void *device_chain_values(device_chain *c, ckd_error *err) {
    c->count = c->cast = 0;
    c->sent.size = c->streams.size = 0;
    return put_values(c, c->block->record, err);
}
