/*
 * Finds the states that a lost node has left on other nodes. After a restart, the agent asks all peers which states
 * they keep. The one that has the newest state verifies it, and makes it durable in the store, where the session finds
 * it. If the state has several ranks, the agents that have its parts do that together. `ckptdelta agent --explain`
 * shows what was chosen, and why.
 */
#include "agent/restart.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/threads.h"

#define DECISIONS_MAX (64u << 10)
#define PAUSE_MIN_NS  UINT64_C(1000000000) /* between searches for the last life of this node */
#define PAUSE_MAX_NS  UINT64_C(60000000000)

typedef struct search {
    tier *of;
    query query;
    found *items;
    size_t count, capacity;
    ckd_store *shared;
    bool of_last_life, again, asked[PEER_HOSTS_MAX]; /* again: asks only peers that were not asked */
    bool silent[PEER_HOSTS_MAX];                     /* these gave no answer */
    bool quiet;                                      /* failures were reported before */
    bool later; /* a state of several ranks cannot be assembled now, but perhaps later */
} search;

/* Adds a line to the output of `--explain`. */
static void log_decision(tier *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void log_decision(tier *t, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    pthread_mutex_lock(&t->mutex);
    if (t->decisions.size > DECISIONS_MAX) {
        bytes_clear(&t->decisions);
    }
    bytes_put(&t->decisions, line, strlen(line));
    bytes_put(&t->decisions, "\n", 1);
    pthread_mutex_unlock(&t->mutex);
}

ckd_status restart_ask(bytes *answer, tier *t, size_t host, const bytes *asked, bool takes_long,
                       ckd_error *err) {
    return host == t->hosts.self ? restart_answer(t, answer, asked, err)
                                 : peer_ask(answer, t->node, host, asked, takes_long, err);
}

/* Asks a node, which may be this one. A list takes long with parity, because files are rebuilt first. */
static ckd_status ask(bytes *answer, tier *t, size_t host, const query *q, ckd_error *err) {
    bytes asked = {.size = 0};
    bool takes_long = q->kind == QUERY_STORE || q->kind == QUERY_PART || (q->kind == QUERY_LIST && t->parity);
    query_put(&asked, q);
    ckd_status status = asked.failed ? err_nomem(err, asked.size, "a query")
                                     : restart_ask(answer, t, host, &asked, takes_long, err);
    bytes_free(&asked);
    return status;
}

/* Errors: also BUSY, after the list was taken, if other files could not be rebuilt from parity now. */
static ckd_status take_list(search *s, size_t host, const bytes *answer, ckd_error *err) {
    reader r = reader_of(answer->data, answer->size);
    char lacks[sizeof(err->message)];
    uint32_t count = reader_u32(&r);
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < count && status == CKD_OK && s->count < FOUND_MAX; i++) {
        found f = {.host = host};
        status = found_get(&f, &r, err);
        THEN(status, ARRAY_GROW(s->items, s->capacity, s->count + 1, "copies", err));
        if (status == CKD_OK) {
            s->items[s->count++] = f;
        }
    }
    reader_string(&r, lacks, sizeof(lacks));
    return status == CKD_OK && lacks[0] ? err_set(err, CKD_E_BUSY, "%s", lacks) : status;
}

static void ask_one(search *s, size_t host) {
    tier *t = s->of;
    bytes answer = {.size = 0};
    ckd_error why;
    ckd_status status = ask(&answer, t, host, &s->query, &why);
    s->silent[host] = status == CKD_E_IO; /* a node that still works on its answer yields BUSY */
    THEN(status, take_list(s, host, &answer, &why));
    s->asked[host] = status == CKD_OK;
    if (status != CKD_OK && !s->quiet) {
        log_decision(t, "node %s: not asked, or not for all: %.300s", t->hosts.items[host].name, why.message);
    }
    bytes_free(&answer);
}

static void ask_everybody(search *s) {
    const tier *t = s->of;
    for (size_t host = 0; host < t->hosts.count; host++) {
        if (!s->again || !t->peers[host].asked) {
            ask_one(s, host);
        }
    }
}

/* A silent node may be busy, and have the newest state. That justifies a short wait: otherwise steps are lost. */
static void ask_silent_ones_again(search *s) {
    const tier *t = s->of;
    bool any = false;
    for (size_t host = 0; host < t->hosts.count; host++) {
        any |= s->silent[host];
    }
    if (any) {
        peer_node_await_recent(t->node);
    }
    for (size_t host = 0; host < t->hosts.count; host++) {
        if (s->silent[host] && peer_alive(t->node, host)) {
            ask_one(s, host);
        }
    }
}

/* The newest first; of one state, the peers in the order of the list. */
static int by_date(const void *a, const void *b) {
    const found *x = a, *y = b;
    if (x->created_ns != y->created_ns) {
        return x->created_ns < y->created_ns ? 1 : -1;
    }
    return (x->host > y->host) - (x->host < y->host);
}

static void run_root(char out[CKD_RUN_MAX + 1], const char *run) {
    snprintf(out, CKD_RUN_MAX + 1, "%.*s", (int)strcspn(run, "~"), run);
}

/* Finds the newest state of a run and its branches in the store. */
static bool newest_stored(ckd_checkpoint *out, ckd_store *shared, const char *root) {
    ckd_checkpoint_list *list = NULL;
    bool any = false;
    if (ckd_store_list(&list, shared, NULL, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        if (is_of_run(c->run, root) && (!any || c->created_ns > out->created_ns)) {
            *out = *c;
            any = true;
        }
    }
    ckd_checkpoint_list_free(list);
    return any;
}

/* A damaged copy stays damaged, and a state that was deleted in the store stays deleted. */
static bool may_succeed_later(ckd_status status) {
    return status != CKD_E_CORRUPT && status != CKD_E_STATE && status != CKD_E_NOT_FOUND &&
           status != CKD_E_INVALID && status != CKD_E_MISMATCH && status != CKD_E_UNSUPPORTED &&
           status != CKD_E_EXISTS;
}

/* ---- states of several ranks ---- */

/* One rank's part, and the call that asks a node to store it. */
typedef struct part_call {
    tier *of;
    query query;
    found *part;
    pthread_t thread;
    bool begun, bad;
    ckd_status status;
    ckd_error why;
} part_call;

static ckd_status take_part_answer(part_call *p, const bytes *answer) {
    char text[sizeof(p->why.message)];
    reader r = reader_of(answer->data, answer->size);
    p->bad = reader_u8(&r) != 0;
    uint32_t status = reader_u32(&r);
    reader_string(&r, text, sizeof(text));
    if (r.failed) {
        return err_set(&p->why, CKD_E_INVALID, "an answer that has no meaning");
    }
    return status == CKD_OK ? CKD_OK : err_set(&p->why, (ckd_status)status, "%s", text);
}

static void *call_part(void *context) {
    part_call *p = context;
    bytes answer = {.size = 0};
    p->status = ask(&answer, p->of, p->part->host, &p->query, &p->why);
    if (p->status == CKD_OK) {
        p->status = take_part_answer(p, &answer);
    }
    bytes_free(&answer);
    return NULL;
}

static bool same_state(const found *a, const found *b) {
    return a->world == b->world && memcmp(&a->checkpoint, &b->checkpoint, sizeof(a->checkpoint)) == 0;
}

/* Finds an undamaged copy of every rank's part. Returns the first rank without one, or world if there are all. */
static uint32_t find_parts(part_call *calls, search *s, const found *state) {
    for (size_t i = s->count; i-- > 0;) {
        found *f = &s->items[i];
        if (same_state(f, state) && !f->bad) {
            calls[f->rank].part = f;
        }
    }
    uint32_t rank = 0;
    while (rank < state->world && calls[rank].part) {
        rank++;
    }
    return rank;
}

/*
 * Makes all calls at once, because the ranks wait for each other. Returns the first failure, and marks useless parts.
 */
static ckd_status call_parts(part_call *calls, search *s, const found *state, uint64_t newest_ns,
                             ckd_error *err) {
    query q = s->query;
    ckd_status status = ckd_id_new(&q.group, err);
    if (status != CKD_OK) {
        return status;
    }
    q.kind = QUERY_PART;
    q.checkpoint = state->checkpoint;
    q.world = state->world;
    q.newest_ns = newest_ns;
    for (uint32_t rank = 0; rank < state->world; rank++) {
        part_call *p = &calls[rank];
        p->of = s->of;
        p->query = q;
        p->query.rank = rank;
        snprintf(p->query.set, sizeof(p->query.set), "%s", p->part->set);
        p->status = thread_start(&p->thread, call_part, p, &p->why);
        p->begun = p->status == CKD_OK;
    }
    for (uint32_t rank = 0; rank < state->world; rank++) {
        part_call *p = &calls[rank];
        if (p->begun) {
            pthread_join(p->thread, NULL);
        }
        p->part->bad |= p->bad;
        if (p->status != CKD_OK && (status == CKD_OK || p->bad)) {
            status = err_from(err, p->status, &p->why);
        }
    }
    return status;
}

bool restart_is_stored(tier *t, const ckd_id *id) {
    ckd_store *shared = NULL; /* opened again, because the search's store has an older catalog */
    ckd_checkpoint_list *list = NULL;
    bool found_it = false;
    if (open_shared(&shared, t, CKD_OPEN_READ, NULL) == CKD_OK &&
        ckd_store_list(&list, shared, NULL, NULL) == CKD_OK) {
        for (size_t i = 0; i < list->count; i++) {
            found_it |= memcmp(&list->items[i].id, id, sizeof(*id)) == 0;
        }
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(shared);
    return found_it;
}

static bool all_asked(const search *s) {
    bool all = true;
    for (size_t host = 0; host < s->of->hosts.count; host++) {
        all &= s->asked[host];
    }
    return all;
}

/* Marks a state that cannot be assembled, so that its other parts are not tried. */
static void give_up_state(search *s, const found *state) {
    for (size_t i = 0; i < s->count; i++) {
        s->items[i].bad |= same_state(&s->items[i], state);
    }
}

/*
 * Waits for nodes that have parts, and seem to be gone: a node that was started again is found again soon. If one of them
 * is not asked, the others would wait for it in vain. Errors: IO (one is gone).
 */
static ckd_status await_hosts(const part_call *calls, uint32_t world, const search *s, ckd_error *err) {
    const tier *t = s->of;
    for (bool waited = false;; waited = true) {
        const found *silent = NULL;
        for (uint32_t rank = 0; rank < world; rank++) {
            silent = peer_alive(t->node, calls[rank].part->host) ? silent : calls[rank].part;
        }
        if (!silent || waited) {
            return silent ? err_set(err, CKD_E_IO, "node %s shows no sign of life",
                                    t->hosts.items[silent->host].name)
                          : CKD_OK;
        }
        peer_node_await_recent(t->node);
    }
}

static bool make_parts_durable(search *s, const found *state, uint64_t newest_ns) {
    tier *t = s->of;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    found wanted = *state; /* it may become bad */
    for (size_t tries = 0; tries <= t->hosts.count; tries++) {
        bool stops; /* this node would not join the others */
        local_wait(&t->agent->stop, 1, 0, &stops);
        if (stops) {
            err_set(&why, CKD_E_CANCELLED, "the agent is ending");
            s->later = true;
            break;
        }
        part_call *calls = calloc(wanted.world, sizeof(*calls));
        uint32_t missing = calls ? find_parts(calls, s, &wanted) : 0;
        if (!calls || missing < wanted.world) {
            s->later |= !calls || !all_asked(s);
            free(calls);
            err_set(&why, CKD_E_NOT_FOUND, "no sound copy of what rank %u of %u had", (unsigned)missing,
                    (unsigned)wanted.world);
            break;
        }
        ckd_status status = await_hosts(calls, wanted.world, s, &why);
        THEN(status, call_parts(calls, s, &wanted, newest_ns, &why));
        bool again = false, in_memory = true;
        for (uint32_t rank = 0; rank < wanted.world; rank++) {
            again |= calls[rank].bad;
            in_memory &= !disk_copies_is_set(calls[rank].part->set);
        }
        free(calls);
        /* a call may have failed after the commit */
        if (status == CKD_OK || restart_is_stored(t, &wanted.checkpoint)) {
            log_decision(t, "%s@%" PRIu64 " of %u ranks: verified, durable, chosen", wanted.run, wanted.step,
                         (unsigned)wanted.world);
            agent_say(t->agent,
                      "step %" PRIu64
                      " of run '%s' comes from the %snodes of its %u ranks, verified: it is durable",
                      wanted.step, wanted.run, in_memory ? "memory of the " : "", (unsigned)wanted.world);
            return true;
        }
        if (!again) { /* STATE: the node of some rank did not come */
            s->later |= may_succeed_later(status) || status == CKD_E_STATE;
            break;
        }
    }
    give_up_state(s, &wanted);
    if (s->quiet) {
        return false;
    }
    log_decision(t, "%s@%" PRIu64 " of %u ranks: not used: %.300s", wanted.run, wanted.step,
                 (unsigned)wanted.world, why.message);
    agent_say(t->agent, "step %" PRIu64 " of run '%s' on the nodes of its %u ranks is not used: %s",
              wanted.step, wanted.run, (unsigned)wanted.world, why.message);
    return false;
}

void restart_call_ranks(tier *t, const ckd_id *group) {
    query q = {.kind = QUERY_CALL, .checkpoint = *group};
    for (size_t host = 0; host < t->hosts.count; host++) {
        bytes answer = {.size = 0};
        if (peer_alive(t->node, host)) {
            (void)ask(&answer, t, host, &q, NULL); /* an agent that is not reached stores at its next save */
        }
        bytes_free(&answer);
    }
}

/* ---- choosing ---- */

/* For lines of `--explain`. */
static void name_place(char out[PEER_NAME_MAX + 16], const search *s, const found *f) {
    snprintf(out, PEER_NAME_MAX + 16, "%s%s", s->of->hosts.items[f->host].name,
             disk_copies_is_set(f->set) ? " (disk)" : "");
}

static bool make_durable(search *s, const found *f) {
    tier *t = s->of;
    bytes answer = {.size = 0};
    ckd_error why;
    char place[PEER_NAME_MAX + 16];
    const char *name = t->hosts.items[f->host].name, *kind = disk_copies_is_set(f->set) ? "disk" : "memory";
    name_place(place, s, f);
    query q = s->query;
    q.kind = QUERY_STORE;
    q.checkpoint = f->checkpoint;
    snprintf(q.set, sizeof(q.set), "%s", f->set);
    if (!peer_alive(t->node, f->host)) {
        peer_node_await_recent(t->node);
    }
    ckd_status status = ask(&answer, t, f->host, &q, &why);
    if (status == CKD_OK) {
        log_decision(t, "%s@%" PRIu64 " at %s: verified, durable, chosen", f->run, f->step, place);
        agent_say(t->agent,
                  "step %" PRIu64 " of run '%s' comes from the %s of node %s, verified: it is durable",
                  f->step, f->run, kind, name);
    } else if (may_succeed_later(status) && s->quiet) {
        s->asked[f->host] = false;
    } else {
        s->asked[f->host] = !may_succeed_later(status);
        log_decision(t, "%s@%" PRIu64 " at %s: not used: %.300s", f->run, f->step, place, why.message);
        agent_say(t->agent, "step %" PRIu64 " of run '%s' %s the %s of node %s is not used: %s", f->step,
                  f->run, disk_copies_is_set(f->set) ? "on" : "in", kind, name, why.message);
    }
    bytes_free(&answer);
    return status == CKD_OK;
}

/* Chooses for one run: tries its states, the newest first, until one is durable or the store's is as new. */
static void choose(search *s, const char *root) {
    tier *t = s->of;
    ckd_checkpoint stored;
    bool any = newest_stored(&stored, s->shared, root), done = false;
    for (size_t i = 0; i < s->count && !done; i++) {
        found *f = &s->items[i];
        char own_root[CKD_RUN_MAX + 1];
        run_root(own_root, f->run);
        if (strcmp(own_root, root) != 0 || f->bad ||
            (f->world && s->of_last_life)) { /* the other ranks' parts are elsewhere */
            continue;
        }
        bool same = any && memcmp(&stored.id, &f->checkpoint, sizeof(stored.id)) == 0;
        if (same || (any && stored.created_ns >= f->created_ns)) {
            char place[PEER_NAME_MAX + 16];
            name_place(place, s, f);
            log_decision(t, "%s@%" PRIu64 " at %s: %s", f->run, f->step, place,
                         same ? "the newest one in the store already" : "older than the store's");
            break;
        }
        done = f->world ? make_parts_durable(s, f, any ? stored.created_ns : 0) : make_durable(s, f);
    }
    s->later &= !done; /* the stored state is now newer than all states of others */
    if (any && !done && !s->quiet) {
        log_decision(t, "%s@%" PRIu64 " in the store: chosen", stored.run, stored.step);
    }
}

static void choose_each(search *s) {
    if (s->count) {
        qsort(s->items, s->count, sizeof(*s->items), by_date);
    }
    for (size_t i = 0; i < s->count; i++) {
        char root[CKD_RUN_MAX + 1], earlier[CKD_RUN_MAX + 1];
        bool first = true;
        run_root(root, s->items[i].run);
        for (size_t k = 0; k < i && first; k++) {
            run_root(earlier, s->items[k].run);
            first = strcmp(root, earlier) != 0;
        }
        if (first) {
            choose(s, root);
        }
    }
}

static void say_not_asked(const search *s) {
    const tier *t = s->of;
    size_t missing = 0, first = 0;
    for (size_t host = t->hosts.count; host-- > 0;) {
        missing += !s->asked[host];
        first = s->asked[host] ? first : host;
    }
    if (missing) {
        agent_say(
            t->agent,
            "run '%s' begins, and %zu of %zu nodes could not be asked for a newer state than the store's: "
            "%s%s",
            s->query.run, missing, t->hosts.count, t->hosts.items[first].name,
            missing > 1 ? " and others" : "");
    }
}

static void search_peers(search *s) {
    tier *t = s->of;
    ckd_error why;
    pthread_mutex_lock(
        &t->restart_mutex); /* a second search finds the state that the first one has put into the store */
    ckd_status status = open_shared(&s->shared, t, CKD_OPEN_READ, &why);
    if (status == CKD_OK) {
        s->query.store = s->shared->id;
        ask_everybody(s);
        if (s->query.run[0] && !s->quiet) {
            ask_silent_ones_again(s);
            say_not_asked(s);
        }
        choose_each(s);
    } else if (!s->quiet) {
        agent_say(t->agent, "nobody was asked for newer states, as the store cannot be opened: %s",
                  why.message);
    }
    if (status == CKD_OK && s->of_last_life && !s->again) {
        record_report(t->agent, s->shared);
    }
    s->later |= status != CKD_OK;
    ckd_store_close(s->shared);
    s->shared = NULL;
    pthread_mutex_unlock(&t->restart_mutex);
}

static bool search_run(tier *t, const char *run, bool quiet) {
    search s = {.of = t, .query = {.kind = QUERY_LIST}, .quiet = quiet};
    run_root(s.query.run, run);
    search_peers(&s);
    free(s.items);
    return !s.later;
}

bool restart_from_peers(tier *t, const char *run) {
    return search_run(t, run, false);
}

/* Marks the peers that have parts of the run's states to be asked again. They keep the parts until then. */
static void ask_again(search *s, const char *root) {
    for (size_t i = 0; i < s->count; i++) {
        char other[CKD_RUN_MAX + 1];
        run_root(other, s->items[i].run);
        if (s->items[i].world && strcmp(other, root) == 0) {
            s->asked[s->items[i].host] = false;
        }
    }
}

/* Searches for states of several ranks whose parts this node's last life left. The other parts are elsewhere. */
static void search_for_parts(search *s) {
    for (size_t i = 0; i < s->count; i++) {
        char root[CKD_RUN_MAX + 1], earlier[CKD_RUN_MAX + 1];
        run_root(root, s->items[i].run);
        bool first = s->items[i].world > 0;
        for (size_t k = 0; k < i && first; k++) {
            run_root(earlier, s->items[k].run);
            first = !s->items[k].world || strcmp(root, earlier) != 0;
        }
        if (first && !search_run(s->of, root, s->quiet)) {
            ask_again(s, root);
        }
    }
}

void restart_last_life(tier *t) {
    search s = {.of = t, .query = {.kind = QUERY_LIST}, .of_last_life = true};
    uint64_t now_ns = clock_monotonic_ns();
    bool wanted = false;
    pthread_mutex_lock(&t->mutex);
    for (size_t host = 0; host < t->hosts.count; host++) {
        wanted |= !t->peers[host].asked && peer_alive(t->node, host);
    }
    wanted = wanted && (!t->asked_ns || now_ns - t->asked_ns > t->ask_pause_ns);
    s.again = s.quiet = t->ask_pause_ns > 0;
    if (wanted) {
        uint64_t pause_ns = s.again ? t->ask_pause_ns * 2 : PAUSE_MIN_NS;
        t->ask_pause_ns = pause_ns < PAUSE_MAX_NS ? pause_ns : PAUSE_MAX_NS;
        t->asked_ns = now_ns;
    }
    pthread_mutex_unlock(&t->mutex);
    if (!wanted) {
        return;
    }
    snprintf(s.query.set, sizeof(s.query.set), "%s", t->set);
    search_peers(&s);
    search_for_parts(&s);
    free(s.items);
    pthread_mutex_lock(&t->mutex);
    for (size_t host = 0; host < t->hosts.count; host++) {
        t->peers[host].asked |= s.asked[host];
    }
    pthread_mutex_unlock(&t->mutex);
}
