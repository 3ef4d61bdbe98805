/* This node's chunk files in the parity that other nodes of its group keep. Called by the thread of the mirror. */
#include "agent/parity.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/common/common.h"

#define CHUNKS        "data/c"
#define LONG_ROUNDS   4 /* versions for which a stripe may keep a file that this node does not need */
#define DROPPED_PART  4 /* files kept for stripes may take 1/DROPPED_PART of the size of the other files */
#define GROUP_MAX     64
#define FILES_OF_STEP 256 /* stripe numbers set aside for a step; more files than that do no harm */
#define POSITIONS(p)  for (size_t position = 0; position < (p)->count; position++)

/* ---- begin and end ---- */

static ckd_status make_folders(const tier *t, ckd_error *err) {
    static const char *const names[] = {"pieces", "work"};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < 2 && status == CKD_OK; i++) {
        char path[700];
        snprintf(path, sizeof(path), "%s/%s", t->folder, names[i]);
        status = dir_create(path, true, err);
    }
    return status;
}

/* Identifies a group: its nodes, their order, and how many can be lost. All nodes of a group must agree on it. */
static uint64_t group_hash(const tier *t) {
    const parity *p = t->parity;
    bytes all = {.size = 0};
    bytes_put_u32(&all, p->lost);
    POSITIONS(p) {
        bytes_put_string(&all, t->hosts.items[p->members[position]].name);
    }
    uint64_t hash = all.failed ? 0 : hash64(all.data, all.size);
    bytes_free(&all);
    return hash;
}

ckd_status parity_begin(tier *t, ckd_error *err) {
    const ckd_agent_options *o = &t->agent->options;
    unsigned size = o->parity_data + o->parity;
    if (!o->parity && !o->parity_data) {
        return CKD_OK;
    }
    if (!o->parity || !o->parity_data || size > GROUP_MAX || o->parity > ERASURE_PARITY_MAX) {
        return err_set(err, CKD_E_INVALID,
                       "parity is K+M: of K + M nodes, at most %d, any M can be lost, at most %d", GROUP_MAX,
                       ERASURE_PARITY_MAX);
    }
    parity *p = calloc(1, sizeof(*p));
    if (!p) {
        return err_nomem(err, sizeof(*p), "parity");
    }
    t->parity = p;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_mutex_init(&p->work_mutex, NULL);
    pthread_mutex_init(&p->rebuild_mutex, NULL);
    p->count = peer_hosts_group(p->members, &t->hosts, t->hosts.self, size);
    if (!p->count) {
        return err_set(err, CKD_E_INVALID, "parity %u+%u needs %u nodes, and the list has %zu",
                       o->parity_data, o->parity, size, t->hosts.count);
    }
    while (p->members[p->self] != t->hosts.self) {
        p->self++;
    }
    p->lost = o->parity;
    p->data = (unsigned)p->count - p->lost;
    p->group = group_hash(t);
    ckd_status status = p->lost > 1 ? erasure_ready(err) : CKD_OK;
    THEN(status, random_bytes(&p->life, sizeof(p->life), err));
    THEN(status, make_folders(t, err));
    return status;
}

void parity_end(tier *t) {
    parity *p = t->parity;
    if (!p) {
        return;
    }
    for (size_t i = 0; i < p->file_count; i++) {
        free(p->files[i].listed);
    }
    free(p->files);
    free(p->steps);
    free(p->stripes.items);
    pthread_mutex_destroy(&p->mutex);
    pthread_mutex_destroy(&p->work_mutex);
    pthread_mutex_destroy(&p->rebuild_mutex);
    free(p);
    t->parity = NULL;
}

/* Checks that a node is settled. Each life of a node is asked only until it is. Errors: BUSY. */
static ckd_status check_settled(tier *t, size_t position, ckd_error *err) {
    parity *p = t->parity;
    bytes answer = {.size = 0};
    stripe_members none = {.count = 0};
    parity_about about = {.settled = false};
    parity_query q = {.kind = PARITY_TABLE, .about = {.blob = {.set = "none"}}};
    pthread_mutex_lock(&p->mutex);
    bool settled = p->settled[position];
    pthread_mutex_unlock(&p->mutex);
    if (settled) {
        return CKD_OK;
    }
    ckd_status status = parity_ask(&answer, t, p->members[position], &q, err);
    THEN(status, parity_read_table(&about, &none, p, &answer, err));
    bytes_free(&answer);
    free(none.items);
    pthread_mutex_lock(&p->mutex);
    p->settled[position] = about.settled;
    pthread_mutex_unlock(&p->mutex);
    return status == CKD_OK && !about.settled
               ? err_set(err, CKD_E_BUSY, "it still looks for what its last life has left")
               : status;
}

/*
 * Each of the nodes has some of the parity, so a state is protected by all of them or by none. Nothing may be removed
 * while one of them may still need it.
 */
ckd_status parity_check_group(tier *t, ckd_error *err) {
    const parity *p = t->parity;
    ckd_status status = CKD_OK;
    for (size_t position = 0; position < p->count && status == CKD_OK; position++) {
        size_t host = p->members[position];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (position == p->self) {
            continue;
        }
        pthread_mutex_lock(&t->mutex);
        bool asked = t->peers[host].asked;
        pthread_mutex_unlock(&t->mutex);
        status = !peer_alive(t->node, host) ? err_set(&why, CKD_E_BUSY, "it shows no sign of life")
                 : !asked                   ? err_set(&why, CKD_E_BUSY,
                                                      "it was not asked yet for what this node's last life has left")
                                            : check_settled(t, position, &why);
        if (status != CKD_OK) {
            err_set(err, status, "node %s of the group: %.300s", t->hosts.items[host].name, why.message);
        }
    }
    return status;
}

/* ---- this node's files ---- */

static piece_file *find_file(parity *p, const char *name) {
    for (size_t i = 0; i < p->file_count; i++) {
        if (strcmp(p->files[i].blob.name, name) == 0) {
            return &p->files[i];
        }
    }
    return NULL;
}

static void link_path(char out[1024], const tier *t, const char *name) {
    snprintf(out, 1024, "%s/pieces/%s", t->folder, name);
}

/* Takes the recorded step of a file; 0: there is none. */
static uint64_t take_step(parity *p, const char *name) {
    uint64_t step = 0;
    pthread_mutex_lock(&p->mutex);
    for (size_t i = 0; i < p->step_count; i++) {
        if (strcmp(p->steps[i].name, name) == 0) {
            step = p->steps[i].step;
            p->steps[i] = p->steps[--p->step_count];
            break;
        }
    }
    pthread_mutex_unlock(&p->mutex);
    return step;
}

/*
 * Nodes of one job have files of the same size at the same step, and drop them at the same time: such files share
 * stripes.
 */
static uint64_t choose_number(const parity *p, uint64_t step) {
    uint64_t number = step * FILES_OF_STEP;
    for (bool used = true; used; number += used) {
        used = false;
        for (size_t i = 0; i < p->file_count; i++) {
            used |= p->files[i].number == number;
        }
    }
    return number;
}

/* Adds a file, whose link exists already, to p->files. */
static ckd_status take_file(tier *t, const char *name, ckd_error *err) {
    parity *p = t->parity;
    char path[1024];
    blob_entry entry;
    piece_file f = {.blob = {.life = p->life}};
    link_path(path, t, name);
    snprintf(f.blob.set, sizeof(f.blob.set), "%s", t->set);
    snprintf(f.blob.name, sizeof(f.blob.name), "%s", name);
    ckd_status status = blob_file_hash(&entry, path, err);
    THEN(status, ARRAY_GROW(p->files, p->file_capacity, p->file_count + 1, "files", err));
    if (status == CKD_OK) {
        f.blob.size = entry.size;
        f.blob.hash = entry.hash;
        f.listed = calloc(p->count, sizeof(*f.listed));
        status = f.listed ? CKD_OK : err_nomem(err, p->count, "files");
    }
    if (status == CKD_OK) {
        f.step = take_step(p, name);
        f.number = choose_number(p, f.step);
        p->files[p->file_count++] = f;
    }
    return status;
}

/* Links the new files. names: the files that this node has now. */
static ckd_status link_files(dir_list *names, tier *t, ckd_error *err) {
    char folder[700], from[1024], to[1024];
    snprintf(folder, sizeof(folder), "%s/own/" CHUNKS, t->folder);
    pthread_mutex_lock(&t->store_mutex); /* none of them is removed meanwhile */
    ckd_status status = err_except(err, dir_list_read(names, folder, err), CKD_E_NOT_FOUND, err);
    for (size_t i = 0; i < names->count && status == CKD_OK; i++) {
        link_path(to, t, names->names[i]);
        if (names->names[i][0] != '.' && !file_exists(to)) {
            snprintf(from, sizeof(from), "%s/%s", folder, names->names[i]);
            status = file_link(from, to, err);
        }
    }
    pthread_mutex_unlock(&t->store_mutex);
    return status;
}

static bool list_has(const dir_list *names, const char *name) {
    for (size_t i = 0; i < names->count; i++) {
        if (strcmp(names->names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/*
 * A file that this node no longer needs stays while stripes have pieces of it, because these pieces are needed to
 * compute the other nodes' files. Nodes in step with this one drop their files at the same time, which frees the
 * stripe. If they do not, and many such files remain, their pieces are sent once more and taken out.
 */
static void look_at_dropped(tier *t) {
    parity *p = t->parity;
    uint64_t dropped = 0, needed = 0;
    pthread_mutex_lock(&t->mutex);
    uint64_t version = t->version;
    pthread_mutex_unlock(&t->mutex);
    for (size_t i = 0; i < p->file_count; i++) {
        *(p->files[i].dropped_from ? &dropped : &needed) += p->files[i].blob.size;
    }
    atomic_store(&p->dropped_bytes, dropped);
    for (size_t i = 0; i < p->file_count && dropped > needed / DROPPED_PART; i++) {
        piece_file *f = &p->files[i];
        if (f->dropped_from && (f->taken_out || version - f->dropped_from >= LONG_ROUNDS)) {
            f->taken_out = true;
            dropped -= f->blob.size;
        }
    }
}

ckd_status pieces_look(tier *t, ckd_error *err) {
    parity *p = t->parity;
    dir_list names = {.count = 0};
    ckd_status status = link_files(&names, t, err);
    for (size_t i = 0; i < names.count && status == CKD_OK; i++) {
        bool known = names.names[i][0] == '.' || find_file(p, names.names[i]);
        status = known ? CKD_OK : take_file(t, names.names[i], err);
    }
    pthread_mutex_lock(&t->mutex);
    for (size_t i = 0; i < p->file_count && status == CKD_OK; i++) {
        piece_file *f = &p->files[i];
        if (!f->dropped_from && !list_has(&names, f->blob.name)) {
            f->dropped_from = t->version;
        }
    }
    pthread_mutex_unlock(&t->mutex);
    dir_list_free(&names);
    if (status == CKD_OK) {
        look_at_dropped(t);
    }
    return status;
}

/* Removes recorded steps of files that were gone before the mirror saw them. */
static void remove_old_steps(parity *p, const dir_list *names) {
    for (size_t i = p->step_count; i-- > 0;) {
        if (!list_has(names, p->steps[i].name)) {
            p->steps[i] = p->steps[--p->step_count];
        }
    }
}

void pieces_record_step(tier *t, uint64_t step) {
    parity *p = t->parity;
    char folder[700], link[1024];
    dir_list names = {.count = 0};
    snprintf(folder, sizeof(folder), "%s/own/" CHUNKS, t->folder);
    if (dir_list_read(&names, folder, NULL) != CKD_OK) {
        return;
    }
    pthread_mutex_lock(&p->mutex);
    remove_old_steps(p, &names);
    for (size_t i = 0; i < names.count; i++) {
        link_path(link, t, names.names[i]);
        bool known = names.names[i][0] == '.' || file_exists(link);
        for (size_t k = 0; k < p->step_count && !known; k++) {
            known = strcmp(p->steps[k].name, names.names[i]) == 0;
        }
        if (!known && ARRAY_GROW(p->steps, p->step_capacity, p->step_count + 1, "files", NULL) == CKD_OK) {
            file_step *s = &p->steps[p->step_count++];
            snprintf(s->name, sizeof(s->name), "%.255s", names.names[i]);
            s->step = step;
        }
    }
    pthread_mutex_unlock(&p->mutex);
    dir_list_free(&names);
}

/* ---- one node ---- */

static size_t position_of(const parity *p, size_t host) {
    size_t position = 0;
    while (p->members[position] != host) {
        position++;
    }
    return position;
}

static ckd_status ask_simple(tier *t, size_t host, uint8_t kind, const parity_blob *of, ckd_error *err) {
    bytes answer = {.size = 0};
    parity_query q = {.kind = kind, .about = {.blob = *of}};
    ckd_status status = parity_ask(&answer, t, host, &q, err);
    bytes_free(&answer);
    return status;
}

/* Lists the pieces of this node's files that another node has in parity. */
static ckd_status read_table(stripe_members *out, tier *t, size_t host, ckd_error *err) {
    bytes answer = {.size = 0};
    parity_about about;
    parity_query q = {.kind = PARITY_TABLE};
    snprintf(q.about.blob.set, sizeof(q.about.blob.set), "%s", t->set);
    *out = (stripe_members){.count = 0};
    ckd_status status = parity_ask(&answer, t, host, &q, err);
    THEN(status, parity_read_table(&about, out, t->parity, &answer, err));
    bytes_free(&answer);
    return status;
}

/*
 * Makes a node forget stripes with files of this node's last life: nobody has these files any more, so the stripes are
 * useless.
 */
static ckd_status forget_last_life(stripe_members *remote, tier *t, size_t host, ckd_error *err) {
    parity_blob of = {.life = t->parity->life};
    bool any = false;
    snprintf(of.set, sizeof(of.set), "%s", t->set);
    for (size_t i = 0; i < remote->count; i++) {
        any |= remote->items[i].blob.life != of.life;
    }
    if (!any) {
        return CKD_OK;
    }
    free(remote->items);
    *remote = (stripe_members){.count = 0};
    ckd_status status = ask_simple(t, host, PARITY_FORGET, &of, err);
    THEN(status, read_table(remote, t, host, err));
    return status;
}

bool pieces_notify(tier *t) {
    parity *p = t->parity;
    bool left = false;
    POSITIONS(p) {
        pthread_mutex_lock(&p->mutex);
        bool unnotified = p->unnotified[position];
        p->unnotified[position] = false;
        pthread_mutex_unlock(&p->mutex);
        if (unnotified && ask_simple(t, p->members[position], PARITY_LOOK, &(parity_blob){.life = p->life},
                                     NULL) != CKD_OK) {
            pthread_mutex_lock(&p->mutex);
            p->unnotified[position] = true;
            pthread_mutex_unlock(&p->mutex);
            left = true;
        }
    }
    return left;
}

static const stripe_member *find_member(const stripe_members *remote, const piece_file *f, uint32_t row) {
    for (size_t i = 0; i < remote->count; i++) {
        const stripe_member *m = &remote->items[i];
        if (m->row == row && m->blob.life == f->blob.life && strcmp(m->blob.name, f->blob.name) == 0) {
            return m;
        }
    }
    return NULL;
}

/* Sends the piece of a row, and has it added to its stripe or taken out. */
static ckd_status send_piece(tier *t, size_t host, const piece_file *f, uint32_t row, uint8_t kind,
                             ckd_error *err) {
    const parity *p = t->parity;
    char path[1024];
    bytes answer = {.size = 0};
    uint64_t sent = 0;
    peer_range range = parity_piece(p, p->self, row, f->blob.size);
    parity_query q = {.kind = kind, .offset = range.offset, .size = range.size};
    q.about = (stripe_member){.row = row, .number = f->number, .blob = f->blob};
    q.about.place = parity_index(p, p->self, row) - p->lost;
    link_path(path, t, f->blob.name);
    ckd_status status =
        parity_check_group(t, err); /* a node that was lost meanwhile needs the sums unchanged */
    if (status == CKD_OK && range.size) {
        snprintf(q.held, sizeof(q.held), "%s/r%u-%llu", t->set, (unsigned)row, (unsigned long long)f->number);
        status = peer_put(&sent, t->node, host, &(peer_copy){ARRIVED_SET, q.held, path, &range}, err);
    }
    pthread_mutex_lock(&t->mutex);
    t->peers[host].sent_bytes += sent;
    pthread_mutex_unlock(&t->mutex);
    THEN(status, parity_ask(&answer, t, host, &q, err));
    bytes_free(&answer);
    return status;
}

/* Whether the node has the parity of this row, and this one a piece. */
static bool is_row_between(const parity *p, size_t position, uint32_t row) {
    return parity_index(p, position, row) < p->lost && parity_index(p, p->self, row) >= p->lost;
}

static ckd_status add_pieces(const stripe_members *remote, tier *t, size_t host, ckd_error *err) {
    parity *p = t->parity;
    size_t position = position_of(p, host);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < p->file_count; i++) {
        piece_file *f = &p->files[i];
        for (uint32_t row = 0; row < p->count && status == CKD_OK && !f->dropped_from; row++) {
            if (mirror_is_stopping(t)) {
                return err_set(err, CKD_E_CANCELLED, "the agent is ending");
            }
            if (is_row_between(p, position, row) && !find_member(remote, f, row)) {
                f->listed[position] = true;
                status = send_piece(t, host, f, row, PARITY_ADD, err);
            }
        }
    }
    return status;
}

ckd_status pieces_add(tier *t, size_t host, ckd_error *err) {
    stripe_members remote = {.count = 0};
    ckd_status status = read_table(&remote, t, host, err);
    THEN(status, forget_last_life(&remote, t, host, err));
    THEN(status, add_pieces(&remote, t, host, err));
    free(remote.items);
    return status;
}

static ckd_status take_out(const stripe_members *remote, tier *t, size_t host, const piece_file *f,
                           ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t row = 0; row < t->parity->count && status == CKD_OK; row++) {
        status = find_member(remote, f, row) ? send_piece(t, host, f, row, PARITY_TAKE_OUT, err) : CKD_OK;
    }
    return status;
}

/* Tells a node which files in its parity this node no longer needs. all: it needs none of them. */
static ckd_status send_dropped(const stripe_members *remote, tier *t, size_t host, bool all, ckd_error *err) {
    parity *p = t->parity;
    bytes answer = {.size = 0};
    parity_query q = {.kind = PARITY_DROP, .about = {.blob = {.life = p->life}}};
    snprintf(q.about.blob.set, sizeof(q.about.blob.set), "%s", t->set);
    for (size_t i = 0; i < remote->count; i++) {
        const stripe_member *m = &remote->items[i];
        const piece_file *f = find_file(p, m->blob.name);
        if (!m->dropped && (all || !f || f->dropped_from)) {
            bytes_put_string(&q.dropped, m->blob.name);
        }
    }
    bool any = q.dropped.size > 0 || q.dropped.failed;
    ckd_status status = any ? parity_ask(&answer, t, host, &q, err) : CKD_OK;
    bytes_free(&answer);
    bytes_free(&q.dropped);
    return status;
}

static bool lists_file(const stripe_members *remote, const parity *p, const piece_file *f) {
    for (uint32_t row = 0; row < p->count; row++) {
        if (find_member(remote, f, row)) {
            return true;
        }
    }
    return false;
}

ckd_status pieces_drop(tier *t, size_t host, ckd_error *err) {
    parity *p = t->parity;
    size_t position = position_of(p, host);
    stripe_members remote = {.count = 0};
    bool any = false;
    for (size_t i = 0; i < p->file_count; i++) {
        any |= p->files[i].dropped_from && p->files[i].listed[position];
    }
    if (!any) {
        return CKD_OK;
    }
    ckd_status status = read_table(&remote, t, host, err);
    for (size_t i = 0; i < p->file_count && status == CKD_OK; i++) {
        const piece_file *f = &p->files[i];
        status = f->dropped_from && f->taken_out ? take_out(&remote, t, host, f, err) : CKD_OK;
    }
    THEN(status, send_dropped(&remote, t, host, false, err));
    free(remote.items);
    remote = (stripe_members){.count = 0};
    THEN(status, read_table(&remote, t, host, err));
    for (size_t i = 0; i < p->file_count && status == CKD_OK; i++) {
        p->files[i].listed[position] = lists_file(&remote, p, &p->files[i]);
    }
    free(remote.items);
    return status;
}

bool pieces_release(tier *t) {
    parity *p = t->parity;
    bool left = false;
    for (size_t i = p->file_count; i-- > 0;) {
        piece_file *f = &p->files[i];
        bool listed = false;
        POSITIONS(p) {
            listed |= f->listed[position];
        }
        if (f->dropped_from && !listed) {
            char path[1024];
            link_path(path, t, f->blob.name);
            (void)file_remove(path, true, NULL);
            free(f->listed);
            *f = p->files[--p->file_count];
        } else {
            left |= f->dropped_from > 0;
        }
    }
    look_at_dropped(t);
    return left;
}

void pieces_leave(tier *t) {
    POSITIONS(t->parity) {
        size_t host = t->parity->members[position];
        stripe_members remote = {.count = 0};
        bool asks = host != t->hosts.self && peer_alive(t->node, host);
        if (asks && read_table(&remote, t, host, NULL) == CKD_OK) {
            (void)send_dropped(&remote, t, host, true, NULL);
        }
        free(remote.items);
    }
}
