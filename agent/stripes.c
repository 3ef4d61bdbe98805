/* Parity that this node keeps for files of other nodes. */
#include "agent/parity.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/common/common.h"

#define SUM_PIECE  (256u << 10) /* bytes of each file in memory at a time */
#define TABLE_MAX  (1u << 20)   /* members in an answer */
#define MEMBER_MIN 60           /* least number of bytes of a member */

/* ---- rows and pieces ---- */

unsigned parity_index(const parity *p, size_t position, uint32_t row) {
    return (unsigned)((position + p->count - row) % p->count);
}

void stripe_name(char out[PEER_BLOB_MAX + 1], uint32_t row, uint64_t number) {
    snprintf(out, PEER_BLOB_MAX + 1, "r%u-%llu", (unsigned)row, (unsigned long long)number);
}

peer_range parity_piece(const parity *p, size_t position, uint32_t row, uint64_t size) {
    uint64_t length = (size + p->data - 1) / p->data, offset = 0;
    for (uint32_t r = 0; r < row; r++) {
        offset += parity_index(p, position, r) >= p->lost ? length : 0;
    }
    uint64_t left = offset < size ? size - offset : 0;
    return (peer_range){offset < size ? offset : size, left < length ? left : length};
}

/* ---- queries, as bytes ---- */

static void put_member(bytes *to, const stripe_member *m) {
    bytes_put_u32(to, m->row);
    bytes_put_u32(to, m->place);
    bytes_put_u64(to, m->number);
    bytes_put_string(to, m->blob.set);
    bytes_put_u64(to, m->blob.life);
    bytes_put_string(to, m->blob.name);
    bytes_put_u64(to, m->blob.size);
    bytes_put(to, m->blob.hash.bytes, sizeof(m->blob.hash.bytes));
    bytes_put_u8(to, m->dropped);
}

static void get_member(stripe_member *m, reader *from) {
    m->row = reader_u32(from);
    m->place = reader_u32(from);
    m->number = reader_u64(from);
    reader_string(from, m->blob.set, sizeof(m->blob.set));
    m->blob.life = reader_u64(from);
    reader_string(from, m->blob.name, sizeof(m->blob.name));
    m->blob.size = reader_u64(from);
    const void *hash = reader_take(from, sizeof(m->blob.hash.bytes));
    memcpy(m->blob.hash.bytes, hash ? hash : (hash128){{0}}.bytes, sizeof(m->blob.hash.bytes));
    m->dropped = reader_u8(from) != 0;
}

ckd_status parity_ask(bytes *answer, tier *t, size_t host, const parity_query *q, ckd_error *err) {
    bytes asked = {.size = 0};
    bytes_put_u8(&asked, q->kind);
    bytes_put_u64(&asked, t->parity->group);
    put_member(&asked, &q->about);
    bytes_put_u64(&asked, q->offset);
    bytes_put_u64(&asked, q->size);
    bytes_put_string(&asked, q->to);
    bytes_put_string(&asked, q->held);
    bytes_put(&asked, q->dropped.data, q->dropped.size);
    asked.failed |= q->dropped.failed;
    bool takes_long = q->kind != PARITY_TABLE && q->kind != PARITY_LOOK; /* waits for work_mutex */
    /* a node that sends a piece here needs its own connections meanwhile */
    bool alone = host == t->hosts.self || q->kind == PARITY_PIECE;
    ckd_status status = asked.failed ? err_nomem(err, asked.size, "a query")
                        : alone      ? restart_ask(answer, t, host, &asked, takes_long, err)
                                     : peer_ask_in_turn(answer, t->node, host, &asked, takes_long, err);
    bytes_free(&asked);
    return status;
}

static ckd_status get_query(parity_query *q, const tier *t, const bytes *from, ckd_error *err) {
    reader r = reader_of(from->data, from->size);
    q->kind = reader_u8(&r);
    uint64_t group = reader_u64(&r);
    get_member(&q->about, &r);
    q->offset = reader_u64(&r);
    q->size = reader_u64(&r);
    reader_string(&r, q->to, sizeof(q->to));
    reader_string(&r, q->held, sizeof(q->held));
    q->dropped = (bytes){.data = (uint8_t *)from->data + r.at, .size = r.size - r.at};
    if (r.failed) {
        return err_set(err, CKD_E_INVALID, "a query that has no meaning");
    }
    if (!t->parity) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "its agent keeps whole copies: all agents need the same --parity");
    }
    return group == t->parity->group
               ? CKD_OK
               : err_set(err, CKD_E_MISMATCH,
                         "its agent has other groups: all need the same --parity and the same list of nodes");
}

/* ---- sums ---- */

typedef struct summing {
    file_reader **files;
    uint8_t **in, *matrix, *memory;
    file_writer *out;
} summing;

static ckd_status open_all(summing *s, const summand *of, size_t count, ckd_error *err) {
    s->files = calloc(count + 1, sizeof(*s->files));
    s->in = calloc(count + 1, sizeof(*s->in));
    s->matrix = calloc(count + 1, 1);
    s->memory = malloc((count + 1) * SUM_PIECE);
    if (!s->files || !s->in || !s->matrix || !s->memory) {
        return err_nomem(err, (count + 1) * SUM_PIECE, "parity");
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        s->in[i] = s->memory + (i + 1) * SUM_PIECE;
        s->matrix[i] = of[i].coefficient;
        status = of[i].range.size ? file_open_read(&s->files[i], of[i].path, err) : CKD_OK;
    }
    return status;
}

/* Reads a part of a summand. Bytes behind its end are zeros. */
static ckd_status read_part(uint8_t *to, file_reader *f, const peer_range *range, uint64_t at, size_t size,
                            ckd_error *err) {
    uint64_t left = at < range->size ? range->size - at : 0;
    size_t take = left < size ? (size_t)left : size;
    memset(to + take, 0, size - take);
    return take ? file_read_at(f, range->offset + at, to, take, err) : CKD_OK;
}

static ckd_status write_sums(summing *s, uint64_t size, const summand *of, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < size && status == CKD_OK; at += SUM_PIECE) {
        size_t length = size - at < SUM_PIECE ? (size_t)(size - at) : SUM_PIECE;
        for (size_t i = 0; i < count && status == CKD_OK; i++) {
            status = read_part(s->in[i], s->files[i], &of[i].range, at, length, err);
        }
        memset(s->memory, 0, count ? 0 : length);
        THEN(status, erasure_sums(&(erasure_product){.out = &s->memory,
                                                     .in = (const uint8_t *const *)s->in,
                                                     .matrix = s->matrix,
                                                     .rows = 1,
                                                     .columns = count,
                                                     .size = length},
                                  err));
        THEN(status, file_append(s->out, s->memory, length, err));
    }
    return status;
}

ckd_status parity_sum(const char *path, uint64_t size, const summand *of, size_t count, ckd_error *err) {
    summing s = {.out = NULL};
    ckd_status status = open_all(&s, of, count, err);
    (void)file_remove(path, true, NULL); /* a failed attempt may have left it */
    THEN(status, file_create(&s.out, path, 0, err));
    if (s.out) {
        status = write_sums(&s, size, of, count, err);
        if (status == CKD_OK) {
            status = file_close(s.out, err);
        } else {
            file_discard(s.out);
        }
    }
    for (size_t i = 0; s.files && i < count; i++) {
        file_close_read(s.files[i]);
    }
    free(s.files);
    free(s.in);
    free(s.matrix);
    free(s.memory);
    return status;
}

void parity_work_path(char out[700], const tier *t, const char *name) {
    snprintf(out, 700, "%s/work/%s", t->folder, name);
}

/* ---- the table: under its mutex ---- */

static bool same_stripe(const stripe_member *a, const stripe_member *b) {
    return a->row == b->row && a->number == b->number;
}

static bool same_blob(const parity_blob *a, const parity_blob *b) {
    return strcmp(a->set, b->set) == 0 && a->life == b->life && strcmp(a->name, b->name) == 0;
}

static stripe_member *find(parity *p, const stripe_member *at) {
    for (size_t i = 0; i < p->stripes.count; i++) {
        stripe_member *m = &p->stripes.items[i];
        if (same_stripe(m, at) && m->place == at->place) {
            return m;
        }
    }
    return NULL;
}

static size_t count_members(const parity *p, const stripe_member *at, bool dropped_too) {
    size_t count = 0;
    for (size_t i = 0; i < p->stripes.count; i++) {
        const stripe_member *m = &p->stripes.items[i];
        count += same_stripe(m, at) && (dropped_too || !m->dropped);
    }
    return count;
}

/* Removes a stripe with all its members. The caller holds work_mutex. */
static void remove_stripe(tier *t, const stripe_member *at) {
    parity *p = t->parity;
    char name[PEER_BLOB_MAX + 1];
    stripe_member of = *at; /* `at` may be one of them */
    pthread_mutex_lock(&p->mutex);
    for (size_t i = p->stripes.count; i-- > 0;) {
        if (same_stripe(&p->stripes.items[i], &of)) {
            p->stripes.items[i] = p->stripes.items[--p->stripes.count];
        }
    }
    pthread_mutex_unlock(&p->mutex);
    stripe_name(name, of.row, of.number);
    (void)peer_held_remove(t->node, PARITY_SET, name, NULL);
}

/* ---- adding, and taking out ---- */

static ckd_status check_place(const parity *p, const stripe_member *m, ckd_error *err) {
    bool fine = m->row < p->count && parity_index(p, p->self, m->row) < p->lost && m->place < p->data &&
                m->blob.name[0];
    return fine ? CKD_OK
                : err_set(err, CKD_E_INVALID, "a piece of a file that belongs to another node's parity");
}

/* Makes the new sum, and replaces the old one by it. *unsound: the old one cannot be read. */
static ckd_status change_sum(bool *unsound, tier *t, const parity_query *q, bool first, ckd_error *err) {
    char name[PEER_BLOB_MAX + 1], work[700];
    summand of[2];
    const stripe_member *m = &q->about;
    uint64_t size = 0;
    size_t count = 0;
    ckd_status status = CKD_OK;
    stripe_name(name, m->row, m->number);
    if (!first) {
        of[count] = (summand){.coefficient = 1};
        status = peer_held_file(of[count].path, sizeof(of[count].path), t->node, PARITY_SET, name, err);
        *unsound = status != CKD_OK && status != CKD_E_NOMEM;
        size = status == CKD_OK ? file_bytes(of[count].path) : 0;
        of[count++].range.size = size;
    }
    if (status == CKD_OK && q->held[0]) {
        of[count] = (summand){
            .coefficient = erasure_coefficient(parity_index(t->parity, t->parity->self, m->row), m->place)};
        status = peer_held_file(of[count].path, sizeof(of[count].path), t->node, ARRIVED_SET, q->held, err);
        of[count].range.size = status == CKD_OK ? file_bytes(of[count].path) : 0;
        size = of[count].range.size > size ? of[count].range.size : size;
        count++;
    }
    parity_work_path(work, t, "sum");
    THEN(status, parity_sum(work, size, of, count, err));
    THEN(status, peer_keep(t->node, PARITY_SET, name, work, err));
    return status;
}

/* Makes room for a member, so that listing it cannot fail once the sum has its piece. */
static ckd_status reserve_member(parity *p, ckd_error *err) {
    pthread_mutex_lock(&p->mutex);
    ckd_status status =
        ARRAY_GROW(p->stripes.items, p->stripes.capacity, p->stripes.count + 1, "parity", err);
    pthread_mutex_unlock(&p->mutex);
    return status;
}

static void list_member(parity *p, const stripe_member *m) {
    pthread_mutex_lock(&p->mutex);
    p->stripes.items[p->stripes.count++] = *m;
    pthread_mutex_unlock(&p->mutex);
}

static void unlist_member(parity *p, const stripe_member *at) {
    pthread_mutex_lock(&p->mutex);
    stripe_member *m = find(p, at);
    if (m) {
        *m = p->stripes.items[--p->stripes.count];
    }
    pthread_mutex_unlock(&p->mutex);
}

/*
 * Marks all nodes except the owner of the set `but`: they may have pieces in the removed stripes. The mirror notifies
 * them.
 */
static void mark_unnotified(tier *t, const char *but) {
    parity *p = t->parity;
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->count; i++) {
        char set[PEER_SET_MAX + 1];
        tier_set_name(set, t->hosts.items[p->members[i]].name);
        p->unnotified[i] |= i != p->self && strcmp(set, but) != 0;
    }
    pthread_mutex_unlock(&p->mutex);
    pthread_mutex_lock(&t->mutex);
    t->woken = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

/*
 * Errors: STATE (the place is taken, or the piece is not there), and those of the sum. A stripe whose sum cannot be
 * read no longer protects anything. It is removed, and its nodes send their pieces again. After other failures the
 * stripe is unchanged.
 */
static ckd_status change_stripe(tier *t, const parity_query *q, ckd_error *err) {
    parity *p = t->parity;
    const stripe_member *m = &q->about;
    bool adds = q->kind == PARITY_ADD, unsound = false;
    pthread_mutex_lock(&p->mutex);
    const stripe_member *known = find(p, m);
    bool same = known && same_blob(&known->blob, &m->blob), taken = known != NULL;
    size_t count = count_members(p, m, true);
    pthread_mutex_unlock(&p->mutex);
    if (adds && same) {
        return CKD_OK;
    }
    if (adds ? taken : !same) {
        return err_set(err, CKD_E_STATE, "its parity has another file in the place of %s", m->blob.name);
    }
    if (!adds && count == 1) {
        remove_stripe(t, m);
        return CKD_OK;
    }
    ckd_status status = reserve_member(p, err);
    THEN(status, change_sum(&unsound, t, q, count == 0, err));
    if (status == CKD_OK && adds) {
        list_member(p, m);
    } else if (status == CKD_OK) {
        unlist_member(p, m);
    }
    if (unsound) {
        remove_stripe(t, m);
        mark_unnotified(t, "");
    }
    return status;
}

static ckd_status answer_change(tier *t, const parity_query *q, ckd_error *err) {
    ckd_status status = check_place(t->parity, &q->about, err);
    if (status == CKD_OK) {
        pthread_mutex_lock(&t->parity->work_mutex);
        status = change_stripe(t, q, err);
        pthread_mutex_unlock(&t->parity->work_mutex);
    }
    if (q->held[0]) {
        (void)peer_held_remove(t->node, ARRIVED_SET, q->held, NULL);
    }
    return status;
}

/* ---- dropping and forgetting ---- */

/* Removes the first stripe that `useless` finds. Returns false if there is none. */
typedef bool (*stripe_fn)(const parity *p, const stripe_member *m, const parity_blob *of);
static bool remove_first(tier *t, stripe_fn useless, const parity_blob *of) {
    parity *p = t->parity;
    stripe_member found;
    bool any = false;
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->stripes.count && !any; i++) {
        any = useless(p, &p->stripes.items[i], of);
        found = p->stripes.items[i];
    }
    pthread_mutex_unlock(&p->mutex);
    if (any) {
        remove_stripe(t, &found);
    }
    return any;
}

static bool all_dropped(const parity *p, const stripe_member *m, const parity_blob *of) {
    (void)of;
    return m->dropped && count_members(p, m, false) == 0;
}

static bool has_other_life(const parity *p, const stripe_member *m, const parity_blob *of) {
    (void)p;
    return strcmp(m->blob.set, of->set) == 0 && m->blob.life != of->life;
}

static bool is_named(const bytes *names, const char *name) {
    char one[PEER_BLOB_MAX + 1];
    reader r = reader_of(names->data, names->size);
    while (!r.failed && r.at < r.size) {
        reader_string(&r, one, sizeof(one));
        if (!r.failed && strcmp(one, name) == 0) {
            return true;
        }
    }
    return false;
}

/* A dropped name never comes back, so a query that arrives late does no harm. */
static void drop(tier *t, const parity_blob *of, const bytes *names) {
    parity *p = t->parity;
    pthread_mutex_lock(&p->work_mutex);
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->stripes.count; i++) {
        parity_blob *b = &p->stripes.items[i].blob;
        bool is_of = strcmp(b->set, of->set) == 0 && b->life == of->life;
        p->stripes.items[i].dropped |= is_of && is_named(names, b->name);
    }
    pthread_mutex_unlock(&p->mutex);
    while (remove_first(t, all_dropped, of)) {
    }
    pthread_mutex_unlock(&p->work_mutex);
}

/*
 * Removes stripes with pieces that their node has lost. Without these pieces the sums cannot restore the files of other
 * nodes either.
 */
static void forget(tier *t, const parity_blob *of) {
    parity *p = t->parity;
    bool any = false;
    pthread_mutex_lock(&p->work_mutex);
    while (remove_first(t, has_other_life, of)) {
        any = true;
    }
    pthread_mutex_unlock(&p->work_mutex);
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->count; i++) {
        char set[PEER_SET_MAX + 1];
        tier_set_name(set, t->hosts.items[p->members[i]].name);
        p->rebuilt[i] &= strcmp(set, of->set) != 0; /* its small files are about to be replaced */
    }
    pthread_mutex_unlock(&p->mutex);
    if (any) {
        mark_unnotified(t, of->set);
        (void)pieces_notify(t);
    }
}

static void look_again(tier *t) {
    pthread_mutex_lock(&t->mutex);
    for (size_t i = 0; i < t->hosts.count; i++) {
        t->peers[i].has = 0;
        t->peers[i].changes++;
    }
    t->woken = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

/* ---- answers ---- */

/* Whether the whole group has been asked. This node need not ask itself, because its own list has its copies. */
static bool all_asked(tier *t) {
    bool all = true;
    pthread_mutex_lock(&t->mutex);
    for (size_t i = 0; i < t->parity->count; i++) {
        all &= i == t->parity->self || t->peers[t->parity->members[i]].asked;
    }
    pthread_mutex_unlock(&t->mutex);
    return all;
}

/* A node that asks for its own set sends no piece meanwhile, so pieces of it that have arrived are useless. */
static void answer_table(bytes *answer, tier *t, const char *set) {
    parity *p = t->parity;
    uint32_t count = 0;
    bytes members = {.size = 0};
    if (set[0]) {
        peer_held_remove_below(t->node, ARRIVED_SET, set);
    }
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->stripes.count; i++) {
        if (!set[0] || strcmp(p->stripes.items[i].blob.set, set) == 0) {
            put_member(&members, &p->stripes.items[i]);
            count++;
        }
    }
    pthread_mutex_unlock(&p->mutex);
    bytes_put_u64(answer, p->life);
    bytes_put_u8(answer, all_asked(t));
    bytes_put_u32(answer, count);
    bytes_put(answer, members.data, members.size);
    answer->failed |= members.failed;
    bytes_free(&members);
}

static bool is_possible(const parity *p, const stripe_member *m) {
    return m->row < p->count && m->place < p->data && m->blob.name[0] && !strchr(m->blob.name, '/');
}

ckd_status parity_read_table(parity_about *about, stripe_members *out, const parity *p, const bytes *answer,
                             ckd_error *err) {
    reader r = reader_of(answer->data, answer->size);
    *out = (stripe_members){.count = 0};
    about->life = reader_u64(&r);
    about->settled = reader_u8(&r) != 0;
    uint32_t count = reader_u32(&r);
    if (r.failed || count > TABLE_MAX || count > answer->size / MEMBER_MIN) {
        return err_set(err, CKD_E_INVALID, "an answer that has no meaning");
    }
    out->items = calloc((size_t)count + 1, sizeof(*out->items));
    if (!out->items) {
        return err_nomem(err, count * sizeof(*out->items), "a table of parity");
    }
    for (; out->count < count && !r.failed; out->count++) {
        get_member(&out->items[out->count], &r);
        r.failed |= !is_possible(p, &out->items[out->count]);
    }
    if (r.failed) {
        free(out->items);
        *out = (stripe_members){.count = 0};
        return err_set(err, CKD_E_INVALID, "an answer that has no meaning");
    }
    return CKD_OK;
}

/* Sends a part of a file of this node to a node that rebuilds another node's file. */
static ckd_status answer_piece(tier *t, const parity_query *q, ckd_error *err) {
    char path[1024];
    uint64_t sent;
    const parity_blob *b = &q->about.blob;
    size_t host = 0;
    while (host < t->hosts.count && strcmp(t->hosts.items[host].name, q->to) != 0) {
        host++;
    }
    snprintf(path, sizeof(path), "%s/pieces/%s", t->folder, b->name);
    if (host == t->hosts.count || strchr(b->name, '/')) {
        return err_set(err, CKD_E_INVALID, "a query that has no meaning");
    }
    if (b->life != t->parity->life || !file_exists(path)) {
        return err_set(err, CKD_E_NOT_FOUND, "%s is not here any more", b->name);
    }
    uint64_t size = file_bytes(path);
    if (q->offset > size || q->size > size - q->offset) {
        return err_set(err, CKD_E_INVALID, "a part of a file that this node does not have");
    }
    return peer_put(&sent, t->node, host,
                    &(peer_copy){ARRIVED_SET, q->held, path, &(peer_range){q->offset, q->size}}, err);
}

ckd_status parity_answer(tier *t, bytes *answer, const bytes *asked, ckd_error *err) {
    parity_query q;
    ckd_status status = get_query(&q, t, asked, err);
    if (status != CKD_OK) {
        return status;
    }
    switch (q.kind) {
    case PARITY_TABLE:
        answer_table(answer, t, q.about.blob.set);
        return answer->failed ? err_nomem(err, answer->size, "a table of parity") : CKD_OK;
    case PARITY_ADD:
    case PARITY_TAKE_OUT:
        return answer_change(t, &q, err);
    case PARITY_DROP:
        drop(t, &q.about.blob, &q.dropped);
        return CKD_OK;
    case PARITY_FORGET:
        forget(t, &q.about.blob);
        return CKD_OK;
    case PARITY_LOOK:
        look_again(t);
        return CKD_OK;
    case PARITY_PIECE:
        return answer_piece(t, &q, err);
    default:
        return err_set(err, CKD_E_UNSUPPORTED, "a query of kind %d", q.kind);
    }
}
