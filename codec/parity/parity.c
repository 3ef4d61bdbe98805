/*
 * Describes, lays out and reads parity files. The description of the group is at the front and again at the back, so
 * damage to one copy loses nothing.
 */
#include "codec/parity/parity.h"

#include <stdlib.h>

#include "codec/metadata/metadata.h"

#define MEMBER_BYTES       44u
#define PARITY_GROUP_BYTES 36u /* before the members, including their count */
#define TRAILER_MAGIC      "CKDP"

/* ---- the group ---- */

void parity_group_encode(bytes *to, const ckd_id *store, const parity_group *g) {
    size_t start = metadata_begin(to, METADATA_PARITY_GROUP, store, 0, 0);
    wire_put_id(to, &g->id);
    bytes_put_u16(to, (uint16_t)g->rows);
    bytes_put_u16(to, (uint16_t)g->row);
    bytes_put_u32(to, g->piece);
    bytes_put_u64(to, g->created_ns);
    bytes_put_u32(to, (uint32_t)g->member_count);
    for (size_t i = 0; i < g->member_count; i++) {
        const parity_member *m = &g->members[i];
        bytes_put_u32(to, m->column);
        wire_put_id(to, &m->file);
        bytes_put_u64(to, m->size);
        wire_put_hash(to, &m->root);
    }
    metadata_end(to, start);
}

static bool geometry_valid(const parity_group *g) {
    bool power =
        g->piece >= PARITY_PIECE_MIN && g->piece <= PARITY_PIECE_MAX && (g->piece & (g->piece - 1)) == 0;
    return power && g->rows >= 1 && g->rows <= ERASURE_PARITY_MAX && g->row < g->rows;
}

static void take_member(metadata_reader *n, parity_group *g, size_t i) {
    parity_member *m = &g->members[i];
    m->column = reader_u32(&n->in);
    m->file = metadata_take_id(n);
    m->size = reader_u64(&n->in);
    m->root = wire_hash(&n->in);
    bool ordered = i == 0 || m->column > g->members[i - 1].column;
    if (!n->in.failed &&
        (!ordered || m->column >= ERASURE_DATA_MAX || m->size == 0 || m->size > PARITY_FILE_MAX)) {
        metadata_fail(n, CKD_E_CORRUPT, "a member of a parity group has an impossible size or place");
    }
}

ckd_status parity_group_decode(parity_group *out, const ckd_id *store, const void *data, size_t size,
                               const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_PARITY_GROUP, store, data, size, path, err);
    memset(out, 0, sizeof(*out));
    metadata_check_no_generation(&n);
    out->id = metadata_take_id(&n);
    out->rows = reader_u16(&n.in);
    out->row = reader_u16(&n.in);
    out->piece = reader_u32(&n.in);
    out->created_ns = reader_u64(&n.in);
    if (!n.in.failed && !geometry_valid(out)) {
        metadata_fail(&n, CKD_E_CORRUPT, "a parity group has impossible rows or pieces");
    }
    out->members = metadata_take_array(&n, &out->member_count, MEMBER_BYTES, sizeof(*out->members));
    if (!n.in.failed && (out->member_count < 1 || out->member_count > ERASURE_DATA_MAX)) {
        metadata_fail(&n, CKD_E_CORRUPT, "a parity group has no members, or too many");
    }
    for (size_t i = 0; i < out->member_count && !n.in.failed; i++) {
        take_member(&n, out, i);
    }
    ckd_status status = metadata_close(&n, NULL, 0);
    if (status != CKD_OK) {
        parity_group_free(out);
    }
    return status;
}

void parity_group_free(parity_group *g) {
    free(g->members);
    memset(g, 0, sizeof(*g));
}

bool parity_group_same(const parity_group *a, const parity_group *b) {
    bool same = memcmp(&a->id, &b->id, sizeof(a->id)) == 0 && a->rows == b->rows && a->piece == b->piece &&
                a->created_ns == b->created_ns && a->member_count == b->member_count;
    for (size_t i = 0; i < a->member_count && same; i++) {
        const parity_member *x = &a->members[i], *y = &b->members[i];
        same = x->column == y->column && x->size == y->size && hash128_equal(&x->root, &y->root) &&
               memcmp(&x->file, &y->file, sizeof(x->file)) == 0;
    }
    return same;
}

/* ---- layout ---- */

static uint64_t longest(const parity_group *g) {
    uint64_t size = 0;
    for (size_t i = 0; i < g->member_count; i++) {
        size = g->members[i].size > size ? g->members[i].size : size;
    }
    return size;
}

static uint32_t part_of(uint64_t size, uint32_t piece, uint64_t stripe) {
    uint64_t begin = stripe * piece;
    return size <= begin ? 0 : size - begin < piece ? (uint32_t)(size - begin) : piece;
}

uint64_t parity_stripes(const parity_group *g) {
    return (longest(g) + g->piece - 1) / g->piece;
}

uint32_t parity_piece_size(const parity_group *g, uint64_t stripe) {
    return part_of(longest(g), g->piece, stripe);
}

uint32_t parity_member_size(const parity_group *g, size_t member, uint64_t stripe) {
    return part_of(g->members[member].size, g->piece, stripe);
}

static uint32_t beside_piece(const parity_group *g) {
    return (uint32_t)(8 * g->member_count) + PARITY_BEHIND;
}

uint32_t parity_stripe_size(const parity_group *g, uint64_t stripe) {
    return parity_piece_size(g, stripe) + beside_piece(g);
}

uint64_t parity_stripe_offset(const parity_group *g, uint64_t stripe) {
    uint64_t size = longest(g), begin = stripe * g->piece;
    return (begin < size ? begin : size) + stripe * beside_piece(g);
}

static uint64_t head_bytes(const parity_group *g) {
    return METADATA_ENVELOPE_MIN + PARITY_GROUP_BYTES + (uint64_t)g->member_count * MEMBER_BYTES;
}

uint64_t parity_file_size(const parity_group *g) {
    return 2 * head_bytes(g) + parity_stripe_offset(g, parity_stripes(g)) + PARITY_TRAILER;
}

/* ---- stripes ---- */

void parity_stripe_finish(uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe) {
    uint8_t *trailer = stripe_data + parity_stripe_size(g, stripe) - PARITY_BEHIND;
    memcpy(trailer, g->id.bytes, sizeof(g->id.bytes));
    store_le32(trailer + 16, (uint32_t)stripe);
    store_le32(trailer + 20, row);
    store_le64(trailer + 24, hash64(stripe_data, (size_t)(trailer + 24 - stripe_data)));
}

bool parity_stripe_valid(const uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe) {
    const uint8_t *trailer = stripe_data + parity_stripe_size(g, stripe) - PARITY_BEHIND;
    return memcmp(trailer, g->id.bytes, sizeof(g->id.bytes)) == 0 &&
           load_le32(trailer + 16) == (uint32_t)stripe && load_le32(trailer + 20) == row &&
           wire_hash_matches(load_le64(trailer + 24),
                             hash64(stripe_data, (size_t)(trailer + 24 - stripe_data)));
}

bool parity_member_valid(const uint8_t *stripe_data, const parity_group *g, size_t member, uint64_t stripe,
                         const void *data) {
    uint64_t stored = load_le64(stripe_data + parity_piece_size(g, stripe) + 8 * member);
    return wire_hash_matches(stored, hash64(data, parity_member_size(g, member, stripe)));
}

void parity_put_trailer(bytes *to, uint32_t head_size) {
    size_t start = to->size;
    bytes_put_u32(to, head_size);
    bytes_put(to, TRAILER_MAGIC, 4);
    if (!to->failed) {
        bytes_put_u64(to, hash64(to->data + start, 8));
    }
}

/* ---- reading ---- */

static ckd_status decode_at(parity_group *out, const parity_file *f, const ckd_id *store, uint64_t offset,
                            uint64_t size, ckd_error *err) {
    if (size < METADATA_ENVELOPE_MIN ||
        size > METADATA_ENVELOPE_MIN + PARITY_GROUP_BYTES + ERASURE_DATA_MAX * MEMBER_BYTES) {
        return err_corrupt(err, file_path(f->file), offset,
                           "the group record of this parity file has an impossible size");
    }
    uint8_t *data = malloc(size);
    if (!data) {
        return err_nomem(err, size, "a parity group");
    }
    ckd_status status = file_read_at(f->file, offset, data, size, err);
    THEN(status, parity_group_decode(out, store, data, size, file_path(f->file), err));
    free(data);
    return status;
}

static ckd_status open_front(parity_group *out, parity_file *f, const ckd_id *store, ckd_error *err) {
    uint8_t front[METADATA_ENVELOPE_FRONT];
    ckd_status status = file_read_at(f->file, 0, front, sizeof(front), err);
    if (status == CKD_OK) {
        uint32_t payload = load_le32(front + METADATA_ENVELOPE_FRONT - 4);
        status = decode_at(out, f, store, 0, (uint64_t)payload + METADATA_ENVELOPE_MIN, err);
    }
    return status;
}

static ckd_status open_back(parity_group *out, parity_file *f, const ckd_id *store, ckd_error *err) {
    uint8_t trailer[PARITY_TRAILER];
    uint64_t size = file_size(f->file);
    if (size < PARITY_TRAILER) {
        return err_corrupt(err, file_path(f->file), 0, "the parity file is cut off");
    }
    uint64_t at = size - PARITY_TRAILER;
    ckd_status status = file_read_at(f->file, at, trailer, sizeof(trailer), err);
    if (status != CKD_OK) {
        return status;
    }
    uint32_t length = load_le32(trailer);
    if (memcmp(trailer + 4, TRAILER_MAGIC, 4) != 0 ||
        !wire_hash_matches(load_le64(trailer + 8), hash64(trailer, 8)) || length > at) {
        return err_corrupt(err, file_path(f->file), at, "the end of the parity file is damaged, or cut off");
    }
    return decode_at(out, f, store, at - length, length, err);
}

/* The back copy replaces a front copy that is damaged or unreadable. Any other error of the front copy stands. */
static ckd_status either(ckd_status front, ckd_status back) {
    return back == CKD_OK && (front == CKD_E_CORRUPT || front == CKD_E_IO) ? CKD_OK : front;
}

static ckd_status open_either(parity_file *f, const ckd_id *store, ckd_error *err) {
    parity_group back = {.rows = 0};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status front = open_front(&f->group, f, store, err);
    ckd_status back_status = open_back(&back, f, store, &why);
    f->front_damaged = front != CKD_OK;
    f->back_damaged = back_status != CKD_OK ||
                      (front == CKD_OK && !(parity_group_same(&back, &f->group) && back.row == f->group.row));
    if (front == CKD_OK && file_size(f->file) != parity_file_size(&f->group)) {
        f->back_damaged = true;
    }
    ckd_status status = either(front, back_status);
    if (status == CKD_OK && front != CKD_OK) {
        f->group = back;
    } else {
        parity_group_free(&back);
    }
    f->head_size = (uint32_t)head_bytes(&f->group);
    return status;
}

ckd_status parity_open(parity_file **out, const ckd_id *store, const char *path, ckd_error *err) {
    *out = NULL;
    parity_file *f = calloc(1, sizeof(*f));
    ckd_status status = f ? file_open_read(&f->file, path, err) : err_nomem(err, sizeof(*f), "a parity file");
    THEN(status, open_either(f, store, err));
    if (status != CKD_OK) {
        parity_close(f);
        return status;
    }
    *out = f;
    return CKD_OK;
}

void parity_close(parity_file *f) {
    if (f) {
        file_close_read(f->file);
        parity_group_free(&f->group);
        free(f);
    }
}

bool parity_has_stripe(const parity_file *f, uint64_t stripe) {
    return f->head_size + parity_stripe_offset(&f->group, stripe + 1) <= file_size(f->file);
}

ckd_status parity_read(parity_file *f, uint64_t first, uint64_t count, uint8_t *to, ckd_error *err) {
    uint64_t begin = f->head_size + parity_stripe_offset(&f->group, first);
    uint64_t size = f->head_size + parity_stripe_offset(&f->group, first + count) - begin;
    uint64_t available = file_size(f->file) > begin ? file_size(f->file) - begin : 0;
    available = available < size ? available : size;
    memset(to + available, 0, size - available);
    return available ? file_read_at(f->file, begin, to, available, err) : CKD_OK;
}
