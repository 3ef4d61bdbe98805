/* Answers the queries of other nodes' agents about the states that are kept here. */
#include "agent/parity.h"
#include "agent/restart.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/ranks/ranks.h"

#define JOIN_MS       60000   /* for the other ranks' agents, which have been asked at the same time */
#define PARTS_MS      3600000 /* for parts of other sizes, on nodes that may have several of them */
#define LOOK_EVERY_NS UINT64_C(100000000)

/* ---- queries, as bytes ---- */

static void put_id(bytes *to, const ckd_id *id) {
    bytes_put(to, id->bytes, sizeof(id->bytes));
}

static void get_id(ckd_id *id, reader *from) {
    const void *at = reader_take(from, sizeof(id->bytes));
    memcpy(id->bytes, at ? at : (ckd_id){{0}}.bytes, sizeof(id->bytes));
}

void query_put(bytes *to, const query *q) {
    bytes_put_u8(to, q->kind);
    put_id(to, &q->store);
    bytes_put_string(to, q->set);
    bytes_put_string(to, q->run);
    put_id(to, &q->checkpoint);
    put_id(to, &q->group);
    bytes_put_u32(to, q->rank);
    bytes_put_u32(to, q->world);
    bytes_put_u64(to, q->newest_ns);
}

static ckd_status get_query(query *q, const bytes *from, ckd_error *err) {
    reader r = reader_of(from->data, from->size);
    q->kind = reader_u8(&r);
    get_id(&q->store, &r);
    reader_string(&r, q->set, sizeof(q->set));
    reader_string(&r, q->run, sizeof(q->run));
    get_id(&q->checkpoint, &r);
    get_id(&q->group, &r);
    q->rank = reader_u32(&r);
    q->world = reader_u32(&r);
    q->newest_ns = reader_u64(&r);
    return r.failed ? err_set(err, CKD_E_INVALID, "a query that has no meaning") : CKD_OK;
}

static void put_found(bytes *to, const found *f) {
    bytes_put_string(to, f->set);
    bytes_put_string(to, f->run);
    bytes_put_u64(to, f->step);
    bytes_put_u64(to, f->created_ns);
    put_id(to, &f->checkpoint);
    bytes_put_u32(to, f->rank);
    bytes_put_u32(to, f->world);
}

ckd_status found_get(found *f, reader *from, ckd_error *err) {
    reader_string(from, f->set, sizeof(f->set));
    reader_string(from, f->run, sizeof(f->run));
    f->step = reader_u64(from);
    f->created_ns = reader_u64(from);
    get_id(&f->checkpoint, from);
    f->rank = reader_u32(from);
    f->world = reader_u32(from);
    bool fine = !from->failed && f->world <= CKD_WORLD_MAX && (f->world == 0 || f->rank < f->world);
    return fine ? CKD_OK : err_set(err, CKD_E_INVALID, "an answer that has no meaning");
}

bool is_of_run(const char *run, const char *wanted) {
    size_t length = strlen(wanted);
    return !length || (strncmp(run, wanted, length) == 0 && (run[length] == '\0' || run[length] == '~'));
}

/* ---- sets ---- */

ckd_status open_shared(ckd_store **out, const tier *t, ckd_open_mode mode, ckd_error *err) {
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = t->agent->options.threads;
    options.on_message = t->agent->options.on_message;
    options.message_context = t->agent->options.message_context;
    return ckd_store_open(out, t->agent->store, mode, &options, err);
}

static bool is_own(const char *set) {
    return strcmp(set, OWN_SET) == 0;
}

static void close_set(ckd_store *copies, tier *t, const char *set) {
    ckd_store_close(copies);
    if (is_own(set)) {
        pthread_mutex_unlock(&t->store_mutex);
    } else if (disk_copies_is_set(set)) {
        disk_copies_release(t);
    } else {
        peer_set_release(t->node);
    }
}

/* Opens the copies of a node, which do not change until close_set. */
static ckd_status open_set(ckd_store **out, tier *t, const char *set, ckd_error *err) {
    char path[700];
    *out = NULL;
    if (is_own(set)) {
        snprintf(path, sizeof(path), "%s/own", t->folder);
        pthread_mutex_lock(&t->store_mutex);
    } else {
        ckd_status status = disk_copies_is_set(set) ? disk_copies_hold(path, sizeof(path), t, set, err)
                                                    : peer_set_hold(path, sizeof(path), t->node, set, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    ckd_status status = ckd_store_open(out, path, CKD_OPEN_READ, NULL, err);
    if (status != CKD_OK) {
        close_set(NULL, t, set);
    }
    return status;
}

/* ---- lists ---- */

/* Whether slot_part_run makes names like this one. */
static bool is_part_run(const char *run) {
    const char *hash = run + strlen(SLOT_PART_PREFIX);
    return strncmp(run, SLOT_PART_PREFIX, strlen(SLOT_PART_PREFIX)) == 0 &&
           strspn(hash, "0123456789abcdef") == 2 * sizeof(hash128) && hash[2 * sizeof(hash128)] == '.';
}

/*
 * Describes a checkpoint among the copies: a state, or a part of one. A part that cannot be read must not pass for a
 * state. Errors: those of slot_part_describe.
 */
static ckd_status describe(found *out, ckd_store *copies, const char *set, const ckd_checkpoint *c,
                           ckd_error *err) {
    slot_part_info part;
    bool is_part = is_part_run(c->run);
    ckd_status status = is_part ? slot_part_describe(&part, copies, &c->id, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    *out = (found){.step = c->step, .created_ns = c->created_ns, .checkpoint = c->id};
    snprintf(out->set, sizeof(out->set), "%s", set);
    snprintf(out->run, sizeof(out->run), "%s", is_part ? part.run : c->run);
    if (is_part) {
        out->checkpoint = part.checkpoint;
        out->rank = part.rank;
        out->world = part.world;
    }
    return CKD_OK;
}

/* Adds all states that can be read. Errors: of the set, or of the first state that cannot be read. */
static ckd_status list_set(bytes *answer, uint32_t *count, tier *t, const char *set, const char *run,
                           ckd_error *err) {
    ckd_store *copies;
    ckd_checkpoint_list *list = NULL;
    ckd_status status = open_set(&copies, t, set, err), unread = CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_store_list(&list, copies, NULL, err);
    for (size_t i = 0; status == CKD_OK && i < list->count && *count < FOUND_MAX; i++) {
        found f;
        ckd_status read = describe(&f, copies, set, &list->items[i], unread == CKD_OK ? err : NULL);
        unread = unread == CKD_OK ? read : unread;
        if (read == CKD_OK && is_of_run(f.run, run)) {
            put_found(answer, &f);
            (*count)++;
        }
    }
    ckd_checkpoint_list_free(list);
    close_set(copies, t, set);
    return status == CKD_OK ? unread : status;
}

/*
 * Errors: those of list_set, but not damage, which no later attempt mends. The snapshots stay until all of them could be
 * listed.
 */
static ckd_status list_snapshots(bytes *answer, uint32_t *count, tier *t, const char *run, ckd_error *err) {
    char **sets = NULL;
    size_t set_count = 0;
    ckd_status status = disk_copies_sets(&sets, &set_count, t, err);
    for (size_t i = 0; i < set_count; i++) {
        ckd_error why;
        ckd_status listed = list_set(answer, count, t, sets[i], run, &why);
        bool counts = listed != CKD_OK && listed != CKD_E_NOT_FOUND && !ckd_error_is_damage(&why);
        if (counts && status == CKD_OK) {
            status = err_set(err, listed, "a snapshot on its disk cannot be read: %s", why.message);
        }
        free(sets[i]);
    }
    free(sets);
    return status;
}

/*
 * Lists the states of this node's own trainers, too: if ranks save together, perhaps no other node has this rank's
 * part. Lists the copies on the disk as well: they may be of this node's last life, or sound where those in memory are
 * damaged.
 */
static ckd_status answer_list(bytes *answer, tier *t, const query *q, ckd_error *err) {
    char **sets = NULL;
    size_t set_count = 0;
    uint32_t count = 0;
    bytes states = {.size = 0};
    ckd_error lacks = {.offset = CKD_NO_OFFSET};
    bool lacking = t->parity && parity_rebuild(t, q->set, &lacks) != CKD_OK;
    ckd_status status = peer_held_sets(&sets, &set_count, t->node, err);
    for (size_t i = 0; i < set_count; i++) {
        bool whole = !t->parity || parity_set_is_whole(t, sets[i]);
        if (whole && (!q->set[0] || strcmp(q->set, sets[i]) == 0)) {
            (void)list_set(&states, &count, t, sets[i], q->run, NULL); /* a set may have no manifest yet */
        }
        free(sets[i]);
    }
    free(sets);
    if (!q->set[0]) {
        (void)list_set(&states, &count, t, OWN_SET, q->run, NULL);
    }
    if (!q->set[0] || strcmp(q->set, t->set) == 0) {
        ckd_error why;
        if (list_snapshots(&states, &count, t, q->run, &why) != CKD_OK && !lacking) {
            lacking = err_from(&lacks, why.status, &why) != CKD_OK;
        }
    }
    bytes_put_u32(answer, count);
    bytes_put(answer, states.data, states.size);
    bytes_put_string(answer, lacking ? lacks.message : "");
    bytes_free(&states);
    return status;
}

/* ---- making copies durable ---- */

static ckd_status check_trash(ckd_store *shared, const ckd_id *id, ckd_error *err) {
    ckd_trash *trash = NULL;
    ckd_status status = ckd_store_trash(&trash, shared, err);
    for (size_t i = 0; status == CKD_OK && i < trash->count; i++) {
        if (memcmp(&trash->items[i].checkpoint.id, id, sizeof(*id)) == 0) {
            status = err_set(err, CKD_E_STATE, "it was deleted in the store");
        }
    }
    ckd_trash_free(trash);
    return status;
}

/* Decodes every value and compares it with its hash before any of the copy goes to the store. */
static ckd_status verify_copy(ckd_store *copies, const ckd_id *id, ckd_error *err) {
    ckd_checkpoint_list *list = NULL;
    ckd_verify_result *result = NULL;
    ckd_verify_options options = CKD_VERIFY_OPTIONS_INIT;
    ckd_status status = ckd_store_list(&list, copies, NULL, err);
    const ckd_checkpoint *c = NULL;
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        c = memcmp(&list->items[i].id, id, sizeof(*id)) == 0 ? &list->items[i] : c;
    }
    if (status == CKD_OK && !c) {
        status = err_set(err, CKD_E_NOT_FOUND, "it is not among the copies any more");
    }
    if (status == CKD_OK) {
        options.run = c->run;
        options.step = c->step;
        options.one_step = 1;
        status = ckd_store_verify(&result, copies, &options, err);
    }
    if (status == CKD_OK && result->damage_count) {
        status = err_set(err, CKD_E_CORRUPT, "the copy is damaged: %.400s", result->damage[0].what);
    }
    ckd_verify_result_free(result);
    ckd_checkpoint_list_free(list);
    return status;
}

static ckd_status copy_verified(ckd_store *shared, ckd_store *copies, const query *q, ckd_error *err) {
    ckd_copy_options options = CKD_COPY_OPTIONS_INIT;
    options.checkpoints = &q->checkpoint;
    options.count = 1;
    ckd_status status = verify_copy(copies, &q->checkpoint, err);
    THEN(status, check_trash(shared, &q->checkpoint, err));
    THEN(status, ckd_copy(NULL, shared, copies, &options, err));
    return status;
}

static ckd_status store_copy(tier *t, ckd_store *shared, const query *q, ckd_error *err) {
    ckd_store *copies;
    ckd_status status = open_set(&copies, t, q->set, err);
    if (status != CKD_OK) {
        return status;
    }
    status = copy_verified(shared, copies, q, err);
    close_set(copies, t, q->set);
    return status;
}

/* ---- making parts durable, with the agents that have the other ones ---- */

static ckd_status check_stop(void *context, ckd_error *err) {
    const tier *t = context;
    bool stops;
    local_wait(&t->agent->stop, 1, 0, &stops);
    return stops ? err_set(err, CKD_E_CANCELLED, "the agent is ending") : CKD_OK;
}

static ckd_status load_part(shared_slot *out, slot_layout *layout, tier *t, const query *q, ckd_error *err) {
    ckd_store *copies;
    ckd_id id = slot_part_id(&q->checkpoint, q->rank);
    ckd_status status = open_set(&copies, t, q->set, err);
    if (status != CKD_OK) {
        return status;
    }
    status = verify_copy(copies, &id, err);
    THEN(status, slot_part_load(out, layout, copies, &id, err));
    close_set(copies, t, q->set);
    return status;
}

/* meets: joins only to find out whether all ranks come. */
static ckd_status join(ckd_ranks **out, bool meets, tier *t, ckd_store *shared, const query *q,
                       ckd_error *err) {
    char group[2 * CKD_ID_TEXT];
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    cancel_check stop = {.poll = check_stop, .context = t, .every_ns = LOOK_EVERY_NS};
    int length = snprintf(group, sizeof(group), meets ? "meet-" : "parts-");
    ckd_id_text(group + length, &q->group);
    o.rank = q->rank;
    o.world = q->world;
    o.group = group;
    o.timeout_ms = meets ? JOIN_MS : PARTS_MS;
    return ranks_join(out, shared, &o, &stop, err);
}

/*
 * The first join waits only briefly, in case a rank's node cannot be asked. The second one waits long for slow ranks,
 * because all are present by then and a death is noticed at once.
 */
static ckd_status join_twice(ckd_ranks **out, tier *t, ckd_store *shared, const query *q, ckd_error *err) {
    ckd_ranks *first = NULL;
    *out = NULL;
    ckd_status status = join(&first, true, t, shared, q, err);
    ckd_ranks_leave(first);
    THEN(status, join(out, false, t, shared, q, err));
    return status;
}

/* newest_ns: dates the state before those that a launch stores meanwhile. */
static ckd_status save_part(ckd_store *shared, ckd_ranks *ranks, const shared_slot *s, uint64_t newest_ns,
                            ckd_error *err) {
    slot_content content;
    ckd_checkpoint saved;
    ckd_error why;
    ckd_status status = slot_read(&content, s, &why);
    if (status != CKD_OK) {
        return ranks_agree(ranks, status, &why, NULL, 0, err); /* others do not wait for this part */
    }
    content.request.newest_ns = newest_ns;
    status = slot_save(&saved, shared, ranks, s, &content, err);
    slot_content_free(&content);
    return status;
}

/*
 * Makes a slot from the part, and saves it as a rank's thread saves the slot of its trainer. All ranks join, even those
 * that fail later, so that none waits in vain. *bad: this part is useless.
 */
static ckd_status store_part(bool *bad, tier *t, ckd_store *shared, const query *q, ckd_error *err) {
    slot_layout layout = {.count = 0};
    shared_slot part = {.layout = &layout};
    ckd_ranks *ranks = NULL;
    rank_nodes *nodes = NULL;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = join_twice(&ranks, t, shared, q, err);
    THEN(status, rank_nodes_watch(&nodes, t, ranks, q->world, err));
    if (status != CKD_OK) {
        ranks_break_off(ranks);
        return status;
    }
    ckd_status own = check_trash(shared, &q->checkpoint, &why);
    THEN(own, load_part(&part, &layout, t, q, &why));
    *bad = own != CKD_OK;
    THEN(status, ranks_agree(ranks, own, &why, NULL, 0, err));
    THEN(status, save_part(shared, ranks, &part, q->newest_ns, err));
    ranks_break_off(ranks);
    free(nodes);
    slot_part_free(&part, &layout);
    return own == CKD_OK ? status : err_from(err, own, &why);
}

/* The answer: a u8, non-zero if the part is useless; the status as a u32; and its message. */
static ckd_status answer_part(bytes *answer, tier *t, ckd_store *shared, const query *q) {
    bool bad = false;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_part(&bad, t, shared, q, &why);
    bytes_put_u8(answer, bad);
    bytes_put_u32(answer, (uint32_t)status);
    bytes_put_string(answer, status == CKD_OK ? "" : why.message);
    return CKD_OK;
}

/* ---- calls ---- */

static void take_call(agent *a, const ckd_id *group) {
    pthread_mutex_lock(&a->mutex);
    for (holding *h = a->holdings; h; h = h->next) {
        h->due |= h->world && memcmp(&h->group, group, sizeof(*group)) == 0;
    }
    pthread_mutex_unlock(&a->mutex);
}

/* ---- answers ---- */

static ckd_status answer_from_stores(bytes *answer, tier *t, const query *q, ckd_error *err) {
    ckd_store *shared = NULL;
    bool lists = q->kind == QUERY_LIST;
    bool stores = q->kind == QUERY_STORE;
    ckd_status status = open_shared(&shared, t, lists ? CKD_OPEN_READ : CKD_OPEN_WRITE, err);
    if (status == CKD_OK && memcmp(&shared->id, &q->store, sizeof(q->store)) != 0) {
        status = err_set(err, CKD_E_MISMATCH, "its agent serves another store");
    }
    if (status == CKD_OK) {
        status = lists    ? answer_list(answer, t, q, err)
                 : stores ? store_copy(t, shared, q, err)
                          : answer_part(answer, t, shared, q);
    }
    if (status == CKD_OK && stores && !disk_copies_is_set(q->set)) {
        agent_say(t->agent, "a state of a lost node is durable, from its copy here (%s)", q->set);
    }
    ckd_store_close(shared);
    return status;
}

ckd_status restart_answer(void *context, bytes *answer, const bytes *asked, ckd_error *err) {
    tier *t = context;
    query q = {.kind = 0};
    pthread_mutex_lock(&t->mutex);
    bool ready = t->version > 0;
    pthread_mutex_unlock(&t->mutex);
    ckd_status status = ready && asked->size ? CKD_OK : err_set(err, CKD_E_BUSY, "its agent is beginning");
    if (status != CKD_OK) {
        return status;
    }
    if (asked->data[0] >= PARITY_TABLE) {
        return parity_answer(t, answer, asked, err);
    }
    status = get_query(&q, asked, err);
    if (status != CKD_OK) {
        return status;
    }
    if (q.kind == QUERY_CALL) {
        take_call(t->agent, &q.checkpoint);
        return CKD_OK;
    }
    return q.kind >= QUERY_LIST && q.kind <= QUERY_PART
               ? answer_from_stores(answer, t, &q, err)
               : err_set(err, CKD_E_UNSUPPORTED, "a query of kind %d", q.kind);
}
