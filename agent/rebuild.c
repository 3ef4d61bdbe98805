/* Computes files of lost nodes from parity and from the files of the other nodes of the group. */
#include "agent/parity.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/common/common.h"

#define COPY_BYTES (1u << 20)

/* A node of the group, and the parity that it keeps. */
typedef struct member_view {
    bool present;
    uint64_t life;
    stripe_members parity; /* for others */
} member_view;

typedef struct rebuild {
    tier *of;
    member_view *views; /* by position */
    unsigned pieces;    /* number for the name of the next fetched file */
    ckd_status status;  /* the first failure */
    ckd_error why;
    ckd_status passing; /* the first failure of a piece that may be temporary */
    ckd_error passing_why;
} rebuild;

/* A sum of a stripe, minus the pieces that other nodes still have. */
typedef struct equation {
    unsigned index;                       /* of the parity */
    unsigned unknown[ERASURE_PARITY_MAX]; /* places of lost pieces, ascending */
    size_t count;
    char path[700];
} equation;

/* ---- what the nodes have ---- */

static size_t position_at(const parity *p, const stripe_member *m) {
    return (m->row + p->lost + m->place) % p->count;
}

static void look(rebuild *r) {
    tier *t = r->of;
    for (size_t i = 0; i < t->parity->count; i++) {
        size_t host = t->parity->members[i];
        member_view *v = &r->views[i];
        bytes answer = {.size = 0};
        parity_query q = {.kind = PARITY_TABLE};
        parity_about about;
        ckd_error why;
        if (host != t->hosts.self && !peer_alive(t->node, host)) {
            continue;
        }
        ckd_status status = parity_ask(&answer, t, host, &q, &why);
        THEN(status, parity_read_table(&about, &v->parity, t->parity, &answer, &why));
        v->present = status == CKD_OK;
        v->life = v->present ? about.life : 0;
        bytes_free(&answer);
    }
}

/* Whether another attempt is useless once all nodes are present. */
static bool is_final(ckd_status status) {
    return status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT;
}

/* A temporary failure replaces a permanent one: nothing is given up while another attempt may succeed. */
static void fail(rebuild *r, ckd_status status, const ckd_error *why) {
    if (r->status == CKD_OK || (is_final(r->status) && !is_final(status))) {
        r->status = err_from(&r->why, status, why);
    }
}

/* ---- one piece ---- */

static void note_passing(rebuild *r, ckd_status status, const ckd_error *why) {
    if (status != CKD_OK && !is_final(status) && r->passing == CKD_OK) {
        r->passing = err_from(&r->passing_why, status, why);
    }
}

/* Gets a piece of a node that is present: as a file of this node, or as a blob of ARRIVED_SET. */
static ckd_status get_piece(summand *out, rebuild *r, const stripe_member *m, ckd_error *err) {
    tier *t = r->of;
    const parity *p = t->parity;
    size_t position = position_at(p, m);
    peer_range range = parity_piece(p, position, m->row, m->blob.size);
    bytes answer = {.size = 0};
    out->range = range;
    if (!range.size) {
        return CKD_OK;
    }
    if (position == p->self) {
        snprintf(out->path, sizeof(out->path), "%s/pieces/%s", t->folder, m->blob.name);
        return file_exists(out->path)
                   ? CKD_OK
                   : err_set(err, CKD_E_NOT_FOUND, "%s is not here any more", m->blob.name);
    }
    parity_query q = {.kind = PARITY_PIECE, .about = *m, .offset = range.offset, .size = range.size};
    snprintf(q.to, sizeof(q.to), "%s", t->hosts.items[t->hosts.self].name);
    snprintf(q.held, sizeof(q.held), "%s-%u", t->set, r->pieces++);
    ckd_status status = parity_ask(&answer, t, p->members[position], &q, err);
    THEN(status, peer_held_file(out->path, sizeof(out->path), t->node, ARRIVED_SET, q.held, err));
    out->range.offset = 0;
    bytes_free(&answer);
    return status;
}

/* Gets a sum of a node as a file here. */
static ckd_status get_sum(summand *out, rebuild *r, size_t position, const stripe_member *at,
                          ckd_error *err) {
    tier *t = r->of;
    char name[PEER_BLOB_MAX + 1], work[64];
    stripe_name(name, at->row, at->number);
    ckd_status status;
    *out = (summand){.coefficient = 1};
    if (position == t->parity->self) {
        status = peer_held_file(out->path, sizeof(out->path), t->node, PARITY_SET, name, err);
    } else {
        snprintf(work, sizeof(work), "sum-%u", r->pieces++);
        parity_work_path(out->path, t, work);
        status = peer_fetch(t->node, t->parity->members[position], PARITY_SET, name, out->path, err);
    }
    out->range.size = status == CKD_OK ? file_bytes(out->path) : 0;
    return status;
}

static void note_unknown(equation *e, unsigned place) {
    size_t i = e->count++;
    for (; i > 0 && e->unknown[i - 1] > place; i--) {
        e->unknown[i] = e->unknown[i - 1];
    }
    e->unknown[i] = place;
}

static bool same_place(const stripe_member *a, const stripe_member *b) {
    return a->row == b->row && a->number == b->number && a->place == b->place &&
           strcmp(a->blob.set, b->blob.set) == 0 && a->blob.life == b->blob.life &&
           strcmp(a->blob.name, b->blob.name) == 0;
}

/* Finds the members of the stripe in a node's table. Returns false if the wanted one is not among them. */
static bool find_stripe(const stripe_member **out, size_t *count, const member_view *v,
                        const stripe_member *wanted) {
    bool has = false;
    *count = 0;
    for (size_t i = 0; i < v->parity.count; i++) {
        const stripe_member *m = &v->parity.items[i];
        if (m->row == wanted->row && m->number == wanted->number && *count < ERASURE_DATA_MAX) {
            out[(*count)++] = m;
            has |= same_place(m, wanted);
        }
    }
    return has;
}

/* Removes the pieces and sums that were fetched since number `from`. */
static void remove_fetched(rebuild *r, unsigned from) {
    char held[PEER_BLOB_MAX + 1], name[64], path[700];
    for (unsigned i = from; i < r->pieces; i++) {
        snprintf(held, sizeof(held), "%s-%u", r->of->set, i);
        (void)peer_held_remove(r->of->node, ARRIVED_SET, held, NULL);
        snprintf(name, sizeof(name), "sum-%u", i);
        parity_work_path(path, r->of, name);
        (void)file_remove(path, true, NULL);
    }
}

/* Makes the file e->path: the sum of the node at `position`, minus the pieces that still exist. */
static ckd_status make_equation(equation *e, rebuild *r, size_t position, const stripe_member *wanted,
                                ckd_error *err) {
    const parity *p = r->of->parity;
    const stripe_member *members[ERASURE_DATA_MAX];
    size_t count, used = 1;
    if (!find_stripe(members, &count, &r->views[position], wanted)) {
        return err_set(err, CKD_E_NOT_FOUND, "node %s does not have parity of %s",
                       r->of->hosts.items[p->members[position]].name, wanted->blob.name);
    }
    summand *of = calloc(count + 1, sizeof(*of));
    if (!of) {
        return err_nomem(err, count * sizeof(*of), "parity");
    }
    unsigned from = r->pieces;
    e->index = parity_index(p, position, wanted->row);
    ckd_status status = get_sum(&of[0], r, position, wanted, err);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const member_view *v = &r->views[position_at(p, members[i])];
        bool known = !same_place(members[i], wanted) && v->present && v->life == members[i]->blob.life;
        if (known) {
            ckd_error why;
            ckd_status got = get_piece(&of[used], r, members[i], &why);
            note_passing(r, got, &why);
            known = got == CKD_OK;
        }
        if (known) {
            of[used++].coefficient = erasure_coefficient(e->index, members[i]->place);
        } else if (e->count < ERASURE_PARITY_MAX) {
            note_unknown(e, members[i]->place);
        } else {
            status = err_set(err, CKD_E_CORRUPT, "too many nodes are lost");
        }
    }
    THEN(status, parity_sum(e->path, of[0].range.size, of, used, err));
    remove_fetched(r, from);
    free(of);
    return status;
}

static bool same_unknown(const equation *a, const equation *b) {
    return a->count == b->count && memcmp(a->unknown, b->unknown, a->count * sizeof(a->unknown[0])) == 0;
}

/*
 * Finds as many equations with the same unknown pieces as there are such pieces. Returns how many; 0: there are too
 * few.
 */
static size_t choose_equations(const equation **out, const equation *e, size_t count) {
    for (size_t first = 0; first < count; first++) {
        size_t found = 0;
        for (size_t i = first; i < count && found < e[first].count; i++) {
            if (same_unknown(&e[i], &e[first])) {
                out[found++] = &e[i];
            }
        }
        if (found == e[first].count) {
            return found;
        }
    }
    return 0;
}

static ckd_status solve(const char *path, rebuild *r, const stripe_member *wanted, const equation *e,
                        size_t count, ckd_error *err) {
    const parity *p = r->of->parity;
    const equation *chosen[ERASURE_PARITY_MAX];
    uint8_t matrix[ERASURE_PARITY_MAX * ERASURE_PARITY_MAX];
    unsigned rows[ERASURE_PARITY_MAX];
    summand of[ERASURE_PARITY_MAX];
    size_t at = 0, found = choose_equations(chosen, e, count);
    if (!found) {
        return err_set(err, CKD_E_NOT_FOUND,
                       "more nodes are lost, or cannot be reached, than the parity allows");
    }
    for (size_t i = 0; i < found; i++) {
        rows[i] = chosen[i]->index;
    }
    erasure_matrix(matrix, chosen[0]->unknown, rows, found, NULL, 0);
    while (chosen[0]->unknown[at] != wanted->place) {
        at++;
    }
    for (size_t i = 0; i < found; i++) {
        of[i] = (summand){.coefficient = matrix[at * found + i], .range = {0, file_bytes(chosen[i]->path)}};
        snprintf(of[i].path, sizeof(of[i].path), "%s", chosen[i]->path);
    }
    peer_range range = parity_piece(p, position_at(p, wanted), wanted->row, wanted->blob.size);
    return parity_sum(path, range.size, of, found, err);
}

/* Writes the piece of one row into a new file. */
static ckd_status make_piece(const char *path, rebuild *r, const stripe_member *wanted, ckd_error *err) {
    const parity *p = r->of->parity;
    equation equations[ERASURE_PARITY_MAX];
    size_t count = 0;
    r->passing = CKD_OK;
    ckd_status status =
        err_set(err, CKD_E_NOT_FOUND, "nobody that is there has parity of %s", wanted->blob.name);
    for (unsigned i = 0; i < p->lost; i++) {
        size_t position = (wanted->row + i) % p->count;
        equation *e = &equations[count];
        char name[64];
        if (!r->views[position].present) {
            continue;
        }
        *e = (equation){.count = 0};
        snprintf(name, sizeof(name), "equation-%u", i);
        parity_work_path(e->path, r->of, name);
        status = make_equation(e, r, position, wanted, err);
        note_passing(r, status, err);
        count += status == CKD_OK;
    }
    if (count) {
        status = solve(path, r, wanted, equations, count, err);
    }
    if (is_final(status) && r->passing != CKD_OK) {
        status = err_from(err, r->passing, &r->passing_why);
    }
    for (size_t i = 0; i < count; i++) {
        (void)file_remove(equations[i].path, true, NULL);
    }
    return status;
}

/* ---- one file ---- */

static ckd_status append_file(file_writer *to, const char *path, ckd_error *err) {
    file_reader *from = NULL;
    uint8_t *memory = malloc(COPY_BYTES);
    ckd_status status = memory ? file_open_read(&from, path, err) : err_nomem(err, COPY_BYTES, "a file");
    uint64_t size = status == CKD_OK ? file_size(from) : 0;
    for (uint64_t at = 0; at < size && status == CKD_OK; at += COPY_BYTES) {
        size_t length = size - at < COPY_BYTES ? (size_t)(size - at) : COPY_BYTES;
        status = file_read_at(from, at, memory, length, err);
        THEN(status, file_append(to, memory, length, err));
    }
    file_close_read(from);
    free(memory);
    return status;
}

static ckd_status append_piece(file_writer *to, rebuild *r, const stripe_member *wanted, ckd_error *err) {
    char path[700];
    parity_work_path(path, r->of, "piece");
    ckd_status status = make_piece(path, r, wanted, err);
    THEN(status, append_file(to, path, err));
    (void)file_remove(path, true, NULL);
    return status;
}

/* Writes all pieces of a file, one after the other. of: its member in any row. */
static ckd_status write_file(const char *path, rebuild *r, const stripe_member *of, ckd_error *err) {
    const parity *p = r->of->parity;
    size_t position = position_at(p, of);
    file_writer *to = NULL;
    (void)file_remove(path, true, NULL); /* a failed attempt may have left it */
    ckd_status status = file_create(&to, path, 0, err);
    for (uint32_t row = 0; row < p->count && status == CKD_OK; row++) {
        stripe_member wanted = *of;
        wanted.row = row;
        wanted.place = parity_index(p, position, row) - p->lost;
        bool has_piece = parity_index(p, position, row) >= p->lost;
        status = has_piece ? append_piece(to, r, &wanted, err) : CKD_OK;
    }
    if (status != CKD_OK && to) {
        file_discard(to);
        return status;
    }
    return to ? file_close(to, err) : status;
}

static ckd_status rebuild_file(rebuild *r, const stripe_member *of, ckd_error *err) {
    tier *t = r->of;
    char path[700], held[1024], name[PEER_BLOB_MAX + 1];
    blob_entry made;
    snprintf(name, sizeof(name), "data/c/%.240s", of->blob.name);
    if (peer_held_file(held, sizeof(held), t->node, of->blob.set, name, NULL) == CKD_OK) {
        return CKD_OK;
    }
    parity_work_path(path, t, "rebuilt");
    ckd_status status = write_file(path, r, of, err);
    THEN(status, blob_file_hash(&made, path, err));
    if (status == CKD_OK && (made.size != of->blob.size || !hash128_equal(&made.hash, &of->blob.hash))) {
        (void)file_remove(path, true, NULL);
        status = err_set(err, CKD_E_CORRUPT, "what was computed of %s does not have its hash", of->blob.name);
    }
    THEN(status, peer_keep(t->node, of->blob.set, name, path, err));
    return status;
}

/* ---- nodes ---- */

/* Whether the file belongs to a life of the node that has ended, and was still needed. */
static bool is_lost(const rebuild *r, size_t position, const char *set, const stripe_member *m) {
    const member_view *v = &r->views[position];
    return strcmp(m->blob.set, set) == 0 && !m->dropped && !(v->present && v->life == m->blob.life);
}

static bool is_same_file(const stripe_member *a, const stripe_member *b) {
    return strcmp(a->blob.set, b->blob.set) == 0 && a->blob.life == b->blob.life &&
           strcmp(a->blob.name, b->blob.name) == 0;
}

/* Whether this member is the first of its file, among all views. */
static bool is_first(const rebuild *r, const stripe_member *m) {
    for (size_t i = 0; i < r->of->parity->count; i++) {
        const stripe_members *in = &r->views[i].parity;
        for (size_t k = 0; k < in->count; k++) {
            if (&in->items[k] == m) {
                return true;
            }
            if (is_same_file(&in->items[k], m)) {
                return false;
            }
        }
    }
    return true;
}

/* Whether some view says that the file was dropped, so that it is not needed. */
static bool is_dropped(const rebuild *r, const stripe_member *m) {
    bool dropped = false;
    for (size_t i = 0; i < r->of->parity->count; i++) {
        const stripe_members *in = &r->views[i].parity;
        for (size_t k = 0; k < in->count && !dropped; k++) {
            dropped = in->items[k].dropped && is_same_file(&in->items[k], m);
        }
    }
    return dropped;
}

/* Whether this node is the first present one of the group, apart from the lost one. */
static bool is_up_to_us(const rebuild *r, size_t lost) {
    const parity *p = r->of->parity;
    size_t first = 0;
    while (first < p->count && (first == lost || !r->views[first].present)) {
        first++;
    }
    return first == p->self;
}

/* Gets the small files of a lost node. All nodes of the group have them, except nodes that came back after a loss. */
static void get_small_files(rebuild *r, size_t lost, const char *set) {
    tier *t = r->of;
    const parity *p = t->parity;
    char path[1024];
    for (size_t i = 0; i < p->count; i++) {
        blob_list remote = {.count = 0};
        ckd_error why;
        if (i == p->self || i == lost || !r->views[i].present) {
            continue;
        }
        ckd_status status = peer_list(&remote, t->node, p->members[i], set, &why);
        for (size_t k = 0; k < remote.count; k++) {
            const char *name = remote.items[k].name;
            if (peer_held_file(path, sizeof(path), t->node, set, name, NULL) != CKD_OK) {
                parity_work_path(path, t, "small");
                (void)file_remove(path, true, NULL);
                ckd_error *first = status == CKD_OK ? &why : NULL;
                ckd_status one = peer_fetch(t->node, p->members[i], set, name, path, first);
                THEN(one, peer_keep(t->node, set, name, path, first));
                status = status == CKD_OK ? one : status;
            }
        }
        if (status != CKD_OK && !is_final(status)) { /* other nodes may have what one lacks */
            fail(r, status, &why);
        }
        blob_list_free(&remote);
    }
}

/* Returns true if the node has lost any files. */
static bool rebuild_node(rebuild *r, size_t position, const char *set) {
    bool any = false;
    for (size_t i = 0; i < r->of->parity->count; i++) {
        const stripe_members *in = &r->views[i].parity;
        for (size_t k = 0; k < in->count; k++) {
            const stripe_member *m = &in->items[k];
            if (is_lost(r, position, set, m) && is_first(r, m) && !is_dropped(r, m)) {
                ckd_error why;
                ckd_status status = rebuild_file(r, m, &why);
                any = true;
                if (status != CKD_OK) {
                    fail(r, status, &why);
                }
            }
        }
    }
    return any;
}

static void rebuild_each(rebuild *r, const char *wanted) {
    parity *p = r->of->parity;
    look(r);
    for (size_t i = 0; i < p->count; i++) {
        char set[PEER_SET_MAX + 1];
        tier_set_name(set, r->of->hosts.items[p->members[i]].name);
        bool ours = i != p->self && (!wanted[0] || strcmp(wanted, set) == 0) && is_up_to_us(r, i);
        if (ours && rebuild_node(r, i, set)) {
            get_small_files(r, i, set);
            pthread_mutex_lock(&p->mutex);
            p->rebuilt[i] = true;
            pthread_mutex_unlock(&p->mutex);
        }
    }
}

static bool all_present(const rebuild *r) {
    bool all = true;
    for (size_t i = 0; i < r->of->parity->count; i++) {
        all &= r->views[i].present;
    }
    return all;
}

/*
 * A sum may change while it is used, because other nodes go on. A file computed from it then does not match its hash,
 * and is computed again.
 */
ckd_status parity_rebuild(tier *t, const char *set, ckd_error *err) {
    rebuild r = {.of = t};
    bool final = false;
    pthread_mutex_lock(&t->parity->rebuild_mutex);
    for (int tries = 0; tries < 3 && (tries == 0 || final || r.status == CKD_E_CORRUPT); tries++) {
        r.status = CKD_OK;
        r.views = calloc(t->parity->count, sizeof(*r.views));
        if (!r.views) {
            r.status = err_nomem(&r.why, t->parity->count * sizeof(*r.views), "parity");
            break;
        }
        rebuild_each(&r, set);
        final = all_present(&r) && is_final(r.status);
        for (size_t i = 0; i < t->parity->count; i++) {
            free(r.views[i].parity.items);
        }
        free(r.views);
    }
    pthread_mutex_unlock(&t->parity->rebuild_mutex);
    if (final) {
        agent_say(t->agent, "files of a lost node cannot be computed, and states that need them are lost: %s",
                  r.why.message);
        return CKD_OK;
    }
    return err_from(err, r.status, &r.why);
}

void parity_peer_changed(tier *t, size_t host) {
    parity *p = t->parity;
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->count; i++) {
        p->rebuilt[i] &= p->members[i] != host;
        p->settled[i] &= p->members[i] != host;
    }
    pthread_mutex_unlock(&p->mutex);
}

bool parity_set_is_whole(tier *t, const char *set) {
    parity *p = t->parity;
    bool whole = true;
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->count; i++) {
        char name[PEER_SET_MAX + 1];
        tier_set_name(name, t->hosts.items[p->members[i]].name);
        whole &= strcmp(name, set) != 0 || p->rebuilt[i];
    }
    pthread_mutex_unlock(&p->mutex);
    return whole;
}
