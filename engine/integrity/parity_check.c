/*
 * Looks for damage in parity files and in members of groups. A damaged parity file harms no checkpoint, but the next
 * damage may not be repairable.
 */
#include <stdlib.h>

#include "engine/integrity/internal.h"

typedef struct row_check {
    const parity_set *s;
    uint32_t row;
    const char *path;
    damage_list *damage;
    parity_file *file;
    uint8_t *stripes; /* one batch */
} row_check;

static ckd_status record_stripe(const row_check *c, uint64_t stripe, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    uint64_t offset = c->file->head_size + parity_stripe_offset(&c->s->group, stripe);
    ckd_status status = err_corrupt(&why, c->path, offset, "a piece of parity is damaged");
    return damage_record(c->damage, status, &why, stripe, "", err);
}

static ckd_status check_ends(const row_check *c, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK;
    if (c->file->front_damaged) {
        status = err_corrupt(&why, c->path, 0, "the head of a parity file is damaged");
    } else if (c->file->back_damaged) {
        status = err_corrupt(&why, c->path, parity_file_size(&c->s->group) - PARITY_TRAILER,
                             "the end of a parity file is damaged, or cut off");
    }
    return damage_record(c->damage, status, &why, CKD_NO_OFFSET, "", err);
}

static ckd_status check_batch(const row_check *c, uint64_t first, uint64_t count, ckd_error *err) {
    const parity_group *g = &c->s->group;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = parity_read(c->file, first, count, c->stripes, &why);
    if (status != CKD_OK) {
        err_in_file(&why, status, c->path);
        return damage_record(c->damage, status, &why, CKD_NO_OFFSET, "", err);
    }
    const uint8_t *at = c->stripes;
    for (uint64_t s = first; s < first + count && status == CKD_OK; s++) {
        status = parity_stripe_valid(at, g, c->row, s) ? CKD_OK : record_stripe(c, s, err);
        at += parity_stripe_size(g, s);
    }
    return status;
}

static ckd_status check_stripes(row_check *c, rate_limiter *p, ckd_error *err) {
    const parity_group *g = &c->s->group;
    uint64_t stripes = parity_stripes(g), batch = parity_batch(g);
    size_t size = batch * (g->piece + 8 * g->member_count + PARITY_BEHIND);
    c->stripes = malloc(size);
    ckd_status status = c->stripes ? CKD_OK : err_nomem(err, size, "a parity file");
    /*
     * Stops at the end of a file that was cut off, which check_ends has recorded. The sizes in a damaged head may be
     * arbitrary, and must not make the check slow.
     */
    uint64_t end = file_size(c->file->file);
    for (uint64_t first = 0; first < stripes && status == CKD_OK; first += batch) {
        if (c->file->head_size + parity_stripe_offset(g, first) >= end) {
            break;
        }
        uint64_t count = stripes - first < batch ? stripes - first : batch;
        status = check_batch(c, first, count, err);
        if (status == CKD_OK && p) {
            status = rate_limiter_add(
                p, parity_stripe_offset(g, first + count) - parity_stripe_offset(g, first), err);
        }
    }
    free(c->stripes);
    return status;
}

/*
 * Records a missing row, unless the file exists and cannot be read, or the group is being made or removed, or was
 * removed meanwhile.
 */
static ckd_status record_missing(const parity_set *s, uint32_t row, const ckd_store *store,
                                 damage_list *damage, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_parity(store->path, &s->group.id, row, "");
    /* A remover removes the mark last, so it is checked first. */
    bool marked = file_exists(path_parity_mark(store->path, &s->group.id).text);
    bool others = false; /* other rows exist; if none does, the group was removed meanwhile */
    for (uint32_t i = 0; i < s->group.rows && !others; i++) {
        others = (s->present >> i & 1) && file_exists(path_parity(store->path, &s->group.id, i, "").text);
    }
    if (file_exists(p.text) || marked || !others) {
        /* The file may also exist and be unreadable, which was recorded before. */
        return CKD_OK;
    }
    err_corrupt(&why, p.text, CKD_NO_OFFSET, "a file of a parity group is missing");
    return damage_record(damage, CKD_E_CORRUPT, &why, CKD_NO_OFFSET, "", err);
}

ckd_status parity_check_row(const parity_set *s, uint32_t row, const ckd_store *store, damage_list *damage,
                            rate_limiter *p, ckd_error *err) {
    if (!(s->present >> row & 1)) {
        return record_missing(s, row, store, damage, err);
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname path = path_parity(store->path, &s->group.id, row, "");
    row_check c = {.s = s, .row = row, .path = path.text, .damage = damage};
    ckd_status status = parity_set_open(&c.file, s, row, store, &why);
    /* It was removed meanwhile. The remover makes sure that nothing is lost. */
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (status != CKD_OK) {
        err_in_file(&why, status, path.text);
        return damage_record(damage, status, &why, CKD_NO_OFFSET, "", err);
    }
    status = check_ends(&c, err);
    THEN(status, check_stripes(&c, p, err));
    parity_close(c.file);
    return status;
}

/* ---- new rows ---- */

bool parity_hashes_same(const uint8_t *a, const uint8_t *b, const parity_group *g, uint64_t stripe) {
    size_t at = parity_piece_size(g, stripe);
    return memcmp(a + at, b + at, 8 * g->member_count) == 0;
}

typedef struct row_pair {
    const parity_group *g;
    uint32_t old_row;
    parity_file *old, *new;
    uint8_t *old_stripes, *new_stripes; /* one batch of each */
} row_pair;

void parity_read_readable(parity_file *f, const parity_group *g, uint64_t first, uint64_t count,
                          uint8_t *to) {
    if (parity_read(f, first, count, to, NULL) == CKD_OK) {
        return;
    }
    for (uint64_t s = first; s < first + count; s++) {
        uint8_t *stripe = to + parity_stripe_offset(g, s) - parity_stripe_offset(g, first);
        if (parity_read(f, s, 1, stripe, NULL) != CKD_OK) {
            memset(stripe, 0, parity_stripe_size(g, s));
        }
    }
}

/* Stripes of the old row that cannot be read are not compared. */
static ckd_status compare_batch(bool *agree, const row_pair *c, uint64_t first, uint64_t count,
                                ckd_error *err) {
    ckd_status status = parity_read(c->new, first, count, c->new_stripes, err);
    size_t at = 0;
    if (status == CKD_OK) {
        parity_read_readable(c->old, c->g, first, count, c->old_stripes);
    }
    for (uint64_t s = first; s < first + count && status == CKD_OK && *agree; s++) {
        const uint8_t *old = c->old_stripes + at;
        if (parity_has_stripe(c->old, s) && parity_stripe_valid(old, c->g, c->old_row, s)) {
            *agree = parity_hashes_same(old, c->new_stripes + at, c->g, s);
        }
        at += parity_stripe_size(c->g, s);
    }
    return status;
}

static ckd_status compare_rows(bool *agree, row_pair *c, rate_limiter *p, ckd_error *err) {
    const parity_group *g = c->g;
    uint64_t stripes = parity_stripes(g), batch = parity_batch(g);
    size_t size = batch * (g->piece + 8 * g->member_count + PARITY_BEHIND);
    c->old_stripes = malloc(2 * size);
    if (!c->old_stripes) {
        return err_nomem(err, 2 * size, "a parity file");
    }
    c->new_stripes = c->old_stripes + size;
    ckd_status status = CKD_OK;
    for (uint64_t first = 0; first < stripes && *agree && status == CKD_OK; first += batch) {
        uint64_t count = stripes - first < batch ? stripes - first : batch;
        status = compare_batch(agree, c, first, count, err);
        if (status == CKD_OK && p) {
            status = rate_limiter_add(
                p, parity_stripe_offset(g, first + count) - parity_stripe_offset(g, first), err);
        }
    }
    free(c->old_stripes);
    return status;
}

ckd_status parity_check_new_row(bool *agree, const parity_set *s, uint32_t row, const ckd_store *store,
                                rate_limiter *p, ckd_error *err) {
    row_pair c = {.g = &s->group};
    *agree = true;
    ckd_status status =
        parity_open(&c.new, &store->id, path_parity(store->path, &s->group.id, row, ".tmp").text, err);
    for (uint32_t i = 0; i < s->group.rows && *agree && status == CKD_OK; i++) {
        c.old_row = i;
        if (parity_set_open(&c.old, s, i, store, NULL) == CKD_OK) {
            status = compare_rows(agree, &c, p, err);
            parity_close(c.old);
        }
    }
    parity_close(c.new);
    return status;
}

/* ---- members ---- */

static ckd_status throttle(void *context, uint64_t stored_bytes, ckd_error *err) {
    return rate_limiter_add(context, stored_bytes, err);
}

ckd_status parity_check_member(bool *right, const parity_member *m, const ckd_store *store, bytes *payload,
                               rate_limiter *p, ckd_error *err) {
    damage_list found = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    file_check check = {.store = store,
                        .damage = &found,
                        .payload = payload,
                        .throttle = p ? throttle : NULL,
                        .throttle_context = p};
    file_ref expected = {.id = m->file, .size = m->size, .root = m->root};
    ckd_status status = found.result ? check_named_file(&check, &expected, "", err)
                                     : err_nomem(err, sizeof(ckd_verify_result), "a check");
    *right = status == CKD_OK && found.result->damage_count == 0;
    ckd_verify_result_free(found.result);
    return status == CKD_E_NOMEM || status == CKD_E_CANCELLED ? status : CKD_OK;
}
