/*
 * Rebuilds a member of a parity group, stripe by stripe. Each stripe has hashes of the members' pieces, which show
 * which pieces are undamaged. So damaged files can help to repair each other if their damage is in different places.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/integrity/internal.h"

typedef struct rebuilder {
    const ckd_store *store;
    const parity_group *g;
    size_t target;
    size_t preferred; /* the row to trust first; if it is damaged in a stripe, the next undamaged one */
    bool contradicts; /* undamaged rows of some stripe have different hashes */
    rate_limiter *limiter;
    ckd_error *why;                    /* why the file cannot be rebuilt */
    file_reader *in[ERASURE_DATA_MAX]; /* NULL: the file is missing */
    parity_file *rows[ERASURE_PARITY_MAX];
    file_writer *out; /* NULL: nothing is written */
    uint8_t *data[ERASURE_DATA_MAX];
    uint8_t *stripes[ERASURE_PARITY_MAX];
    uint8_t *piece; /* the rebuilt one */
    uint8_t *memory;
} rebuilder;

/* ---- reading ---- */

static void open_all(rebuilder *r, const parity_set *s) {
    for (size_t i = 0; i < r->g->member_count; i++) {
        pathname p = path_chunk(r->store->path, &r->g->members[i].file, "");
        if (file_open_read(&r->in[i], p.text, NULL) != CKD_OK) {
            r->in[i] = NULL;
        }
    }
    for (uint32_t row = 0; row < r->g->rows; row++) {
        if (parity_set_open(&r->rows[row], s, row, r->store, NULL) != CKD_OK) {
            r->rows[row] = NULL;
        }
    }
}

static ckd_status take_memory(rebuilder *r, ckd_error *err) {
    const parity_group *g = r->g;
    uint64_t batch = parity_batch(g);
    size_t data = batch * g->piece, row = batch * (g->piece + 8 * g->member_count + PARITY_BEHIND);
    size_t all = g->member_count * data + g->rows * row + g->piece;
    r->memory = malloc(all);
    if (!r->memory) {
        return err_nomem(err, all, "rebuilding a file");
    }
    for (size_t i = 0; i < g->member_count; i++) {
        r->data[i] = r->memory + i * data;
    }
    for (size_t k = 0; k < g->rows; k++) {
        r->stripes[k] = r->memory + g->member_count * data + k * row;
    }
    r->piece = r->memory + all - g->piece;
    return CKD_OK;
}

/* Fills unreadable pieces with zeros. Their hash shows that they are wrong, unless they were zeros. */
static void read_piecewise(file_reader *file, uint64_t begin, uint8_t *to, uint64_t size, uint32_t piece) {
    for (uint64_t at = 0; at < size; at += piece) {
        uint64_t n = size - at < piece ? size - at : piece;
        if (file_read_at(file, begin + at, to + at, n, NULL) != CKD_OK) {
            memset(to + at, 0, n);
        }
    }
}

static uint64_t read_member(const rebuilder *r, size_t i, uint64_t first, uint64_t count) {
    uint64_t begin = first * r->g->piece, size = count * r->g->piece;
    uint64_t available = r->in[i] ? file_size(r->in[i]) : 0;
    available = available < r->g->members[i].size ? available : r->g->members[i].size;
    available = available > begin ? available - begin : 0;
    available = available < size ? available : size;
    memset(r->data[i] + available, 0, size - available);
    if (available && file_read_at(r->in[i], begin, r->data[i], available, NULL) != CKD_OK) {
        read_piecewise(r->in[i], begin, r->data[i], available, r->g->piece);
    }
    return available;
}

static uint64_t read_row(const rebuilder *r, uint32_t row, uint64_t first, uint64_t count) {
    const parity_group *g = r->g;
    uint64_t size = parity_stripe_offset(g, first + count) - parity_stripe_offset(g, first);
    if (!r->rows[row]) {
        return 0;
    }
    parity_read_readable(r->rows[row], g, first, count, r->stripes[row]);
    return size;
}

/* ---- a stripe ---- */

typedef struct stripe_view {
    /* at, offset: places of the members' pieces, and of the stripe, in the batch */
    uint64_t number, at, offset;
    unsigned valid[ERASURE_PARITY_MAX]; /* undamaged rows */
    size_t valid_count;
    unsigned rows[ERASURE_PARITY_MAX]; /* undamaged rows with the trusted hashes */
    size_t row_count;
    unsigned lost[ERASURE_DATA_MAX], intact[ERASURE_DATA_MAX]; /* indices of members */
    size_t lost_count, intact_count;
    const uint8_t *says; /* the stripe whose hashes are trusted; NULL: there is none */
    bool target_lost;
    size_t target_place; /* index in `lost` */
} stripe_view;

/*
 * Whether a member's piece is unchanged. Without an intact row this cannot be told. Then all existing bytes count as
 * unchanged, and only missing ones as lost.
 */
static bool piece_is_intact(const rebuilder *r, const stripe_view *v, size_t i) {
    const parity_group *g = r->g;
    if (!r->in[i]) {
        return false;
    }
    return v->says ? parity_member_valid(v->says, g, i, v->number, r->data[i] + v->at)
                   : v->number * g->piece + parity_member_size(g, i, v->number) <= file_size(r->in[i]);
}

static void find_valid_rows(stripe_view *v, const rebuilder *r, uint64_t first, uint64_t stripe) {
    const parity_group *g = r->g;
    *v = (stripe_view){.number = stripe,
                       .at = (stripe - first) * g->piece,
                       .offset = parity_stripe_offset(g, stripe) - parity_stripe_offset(g, first)};
    for (uint32_t row = 0; row < g->rows; row++) {
        if (r->rows[row] && parity_has_stripe(r->rows[row], stripe) &&
            parity_stripe_valid(r->stripes[row] + v->offset, g, row, stripe)) {
            v->valid[v->valid_count++] = row;
        }
    }
}

static void sort_members(stripe_view *v, const rebuilder *r) {
    v->intact_count = v->lost_count = 0;
    v->target_lost = false;
    for (size_t i = 0; i < r->g->member_count; i++) {
        if (parity_member_size(r->g, i, v->number) == 0) {
            continue;
        }
        bool right = piece_is_intact(r, v, i);
        if (i == r->target && !right) {
            v->target_lost = true;
            v->target_place = v->lost_count;
        }
        if (right) {
            v->intact[v->intact_count++] = (unsigned)i;
        } else {
            v->lost[v->lost_count++] = (unsigned)i;
        }
    }
}

/* Trusts the hashes of an undamaged row, if there is one. Rows with other hashes are then not used. */
static void believe(stripe_view *v, rebuilder *r, size_t which) {
    v->says = v->valid_count ? r->stripes[v->valid[which]] + v->offset : NULL;
    v->row_count = 0;
    for (size_t i = 0; i < v->valid_count; i++) {
        if (parity_hashes_same(v->says, r->stripes[v->valid[i]] + v->offset, r->g, v->number)) {
            v->rows[v->row_count++] = v->valid[i];
        }
    }
    r->contradicts = r->contradicts || v->row_count < v->valid_count;
    sort_members(v, r);
}

static void report_why(const rebuilder *r, const stripe_view *v) {
    char hex[CKD_ID_TEXT];
    const parity_group *g = r->g;
    ckd_id_text(hex, &g->id);
    err_set(
        r->why, CKD_E_CORRUPT,
        "%zu files of parity group %s are lost or damaged in the same place (from byte %llu on), and only "
        "%zu of %u parity files are intact there",
        v->lost_count, hex, (unsigned long long)(v->number * g->piece), v->row_count, (unsigned)g->rows);
}

/* Inputs of the matrix are parity, then undamaged pieces. Only the target's row is used. */
static ckd_status solve(const rebuilder *r, const stripe_view *v, ckd_error *err) {
    const parity_group *g = r->g;
    uint8_t matrix[ERASURE_PARITY_MAX * (ERASURE_PARITY_MAX + ERASURE_DATA_MAX)];
    unsigned lost[ERASURE_PARITY_MAX], intact[ERASURE_DATA_MAX];
    const uint8_t *inputs[ERASURE_PARITY_MAX + ERASURE_DATA_MAX];
    size_t columns = v->lost_count + v->intact_count;
    for (size_t i = 0; i < v->lost_count; i++) {
        lost[i] = g->members[v->lost[i]].column;
        inputs[i] = r->stripes[v->rows[i]] + v->offset;
    }
    for (size_t i = 0; i < v->intact_count; i++) {
        intact[i] = g->members[v->intact[i]].column;
        inputs[v->lost_count + i] = r->data[v->intact[i]] + v->at;
    }
    erasure_matrix(matrix, lost, v->rows, v->lost_count, intact, v->intact_count);
    return erasure_sums(&(erasure_product){(uint8_t *const[]){r->piece}, inputs,
                                           matrix + v->target_place * columns, 1, columns,
                                           parity_piece_size(g, v->number)},
                        err);
}

/* *piece: the member's content in this stripe, according to the trusted hashes. */
static ckd_status rebuild_piece(bool *possible, const uint8_t **piece, const rebuilder *r,
                                const stripe_view *v, ckd_error *err) {
    *possible = true;
    *piece = r->data[r->target] + v->at;
    if (!v->target_lost) {
        return CKD_OK;
    }
    if (v->lost_count > v->row_count) {
        report_why(r, v);
        *possible = false;
        return CKD_OK;
    }
    ckd_status status = solve(r, v, err);
    *piece = r->piece;
    *possible = status == CKD_OK && parity_member_valid(v->says, r->g, r->target, v->number, r->piece);
    if (status == CKD_OK && !*possible) {
        err_set(r->why, CKD_E_CORRUPT, "the parity is inconsistent: what it rebuilds is not what was there");
    }
    return status;
}

/* If undamaged rows contradict each other, each is trusted in turn. */
static ckd_status rebuild_stripe(bool *possible, rebuilder *r, uint64_t first, uint64_t stripe,
                                 ckd_error *err) {
    uint32_t size = parity_member_size(r->g, r->target, stripe);
    const uint8_t *piece = NULL;
    ckd_status status = CKD_OK;
    stripe_view v;
    find_valid_rows(&v, r, first, stripe);
    size_t tries = v.valid_count ? v.valid_count : 1, begin = 0;
    while (begin < v.valid_count && v.valid[begin] < r->preferred) {
        begin++;
    }
    *possible = false;
    for (size_t i = 0; i < tries && !*possible && status == CKD_OK; i++) {
        believe(&v, r, (begin + i) % tries);
        status = rebuild_piece(possible, &piece, r, &v, err);
        tries = v.row_count == v.valid_count ? 1 : tries;
    }
    return status == CKD_OK && *possible && r->out && size ? file_append(r->out, piece, size, err) : status;
}

/* ---- the whole file ---- */

static ckd_status rebuild_stripes(bool *possible, rebuilder *r, ckd_error *err) {
    const parity_group *g = r->g;
    uint64_t batch = parity_batch(g);
    uint64_t stripes = (g->members[r->target].size + g->piece - 1) / g->piece;
    ckd_status status = CKD_OK;
    for (uint64_t first = 0; first < stripes && *possible && status == CKD_OK; first += batch) {
        uint64_t count = stripes - first < batch ? stripes - first : batch, read = 0;
        for (size_t i = 0; i < g->member_count; i++) {
            read += read_member(r, i, first, count);
        }
        for (uint32_t row = 0; row < g->rows; row++) {
            read += read_row(r, row, first, count);
        }
        for (uint64_t s = first; s < first + count && *possible && status == CKD_OK; s++) {
            status = rebuild_stripe(possible, r, first, s, err);
        }
        THEN(status, rate_limiter_add(r->limiter, read, err));
    }
    return status;
}

/* Checks the rebuilt file down to each record. */
static ckd_status check_rebuilt(bool *right, const rebuilder *r, const file_ref *expected, ckd_error *err) {
    pathname p = path_rebuilt(r->store->path, &expected->id);
    bytes payload = {0};
    damage_list found = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = r->store->path};
    file_check f = {.store = r->store, .damage = &found, .payload = &payload, .path = p.text};
    ckd_status status = found.result ? check_named_file(&f, expected, "", err)
                                     : err_nomem(err, sizeof(ckd_verify_result), "a check");
    *right = status == CKD_OK && found.result->damage_count == 0;
    if (status == CKD_OK && !*right) {
        err_set(r->why, CKD_E_CORRUPT, "the rebuilt file is not the one that the manifest names: %s",
                found.result->damage[0].what);
    }
    ckd_verify_result_free(found.result);
    bytes_free(&payload);
    return status;
}

static ckd_status rebuild(bool *possible, rebuilder *r, const rebuild_request *q, ckd_error *err) {
    pathname p = path_rebuilt(r->store->path, &q->expected->id);
    ckd_status status = take_memory(r, err);
    if (status == CKD_OK && q->write) {
        status = file_create(&r->out, p.text, r->g->piece, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    open_all(r, q->set);
    *possible = true;
    status = rebuild_stripes(possible, r, err);
    if (status != CKD_OK || !*possible || !q->write) {
        return status;
    }
    status = file_sync(r->out, err);
    if (status == CKD_OK) {
        file_writer *out = r->out;
        r->out = NULL;
        status = file_close(out, err);
        THEN(status, check_rebuilt(possible, r, q->expected, err));
        if (status != CKD_OK || !*possible) {
            file_remove(p.text, true, NULL);
        }
    }
    return status;
}

static ckd_status attempt(bool *possible, rebuilder *r, const rebuild_request *q, ckd_error *err) {
    ckd_status status = rebuild(possible, r, q, err);
    file_discard(r->out);
    for (size_t i = 0; i < r->g->member_count; i++) {
        file_close_read(r->in[i]);
    }
    for (uint32_t row = 0; row < r->g->rows; row++) {
        parity_close(r->rows[row]);
    }
    free(r->memory);
    *possible = *possible && status == CKD_OK;
    return status;
}

/*
 * If undamaged rows contradict each other, one may give a file that is not the expected one. Another row is then
 * preferred.
 */
ckd_status repair_rebuild(bool *possible, const ckd_store *store, const rebuild_request *q, ckd_error *why,
                          ckd_error *err) {
    const parity_group *g = &q->set->group;
    const parity_member *m = &g->members[q->member];
    bool again = true;
    ckd_status status = CKD_OK;
    *possible = false;
    if (m->size != q->expected->size || !hash128_equal(&m->root, &q->expected->root)) {
        err_set(why, CKD_E_CORRUPT, "its parity is for another file of this name");
        return CKD_OK;
    }
    rebuilder *r = calloc(1, sizeof(*r));
    if (!r) {
        return err_nomem(err, sizeof(*r), "rebuilding a file");
    }
    for (size_t preferred = 0; preferred < g->rows && again && status == CKD_OK; preferred++) {
        *r = (rebuilder){.store = store,
                         .g = g,
                         .target = q->member,
                         .preferred = preferred,
                         .limiter = q->limiter,
                         .why = why};
        status = attempt(possible, r, q, err);
        again = r->contradicts && !*possible;
    }
    free(r);
    return status;
}
