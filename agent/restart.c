/*
 * Finds the states that a lost node has left on other nodes. The agent of a restart asks all peers what they keep; the one
 * that has the newest state verifies it, and makes it durable in the store, where the session finds it. One table says why.
 */
#include "agent/internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"

#define FOUND_MAX     4096
#define DECISIONS_MAX (64u << 10)
#define PAUSE_MIN_NS  UINT64_C(1000000000) /* between searches for the last life of this node */
#define PAUSE_MAX_NS  UINT64_C(60000000000)

enum { QUESTION_LIST = 1, QUESTION_STORE = 2 };

/* ---- questions, as bytes ---- */

typedef struct question {
    uint8_t kind;
    ckd_id store; /* both agents must serve the same */
    char set[PEER_SET_MAX + 1], run[CKD_RUN_MAX + 1];
    ckd_id checkpoint;
} question;

static void put_id(bytes *to, const ckd_id *id) {
    bytes_put(to, id->bytes, sizeof(id->bytes));
}

static void get_id(ckd_id *id, reader *from) {
    const void *at = reader_take(from, sizeof(id->bytes));
    memcpy(id->bytes, at ? at : (ckd_id){{0}}.bytes, sizeof(id->bytes));
}

static void put_question(bytes *to, const question *q) {
    bytes_put_u8(to, q->kind);
    put_id(to, &q->store);
    bytes_put_string(to, q->set);
    bytes_put_string(to, q->run);
    put_id(to, &q->checkpoint);
}

static ckd_status get_question(question *q, const bytes *from, ckd_error *err) {
    reader r = reader_of(from->data, from->size);
    q->kind = reader_u8(&r);
    get_id(&q->store, &r);
    reader_string(&r, q->set, sizeof(q->set));
    reader_string(&r, q->run, sizeof(q->run));
    get_id(&q->checkpoint, &r);
    return r.failed ? err_set(err, CKD_E_INVALID, "a question that has no meaning") : CKD_OK;
}

/* A state that a peer keeps. */
typedef struct found {
    size_t host;
    char set[PEER_SET_MAX + 1], run[CKD_RUN_MAX + 1];
    uint64_t step, created_ns;
    ckd_id checkpoint;
} found;

static void put_found(bytes *to, const char *set, const ckd_checkpoint *c) {
    bytes_put_string(to, set);
    bytes_put_string(to, c->run);
    bytes_put_u64(to, c->step);
    bytes_put_u64(to, c->created_ns);
    put_id(to, &c->id);
}

static ckd_status get_found(found *f, reader *from, ckd_error *err) {
    reader_string(from, f->set, sizeof(f->set));
    reader_string(from, f->run, sizeof(f->run));
    f->step = reader_u64(from);
    f->created_ns = reader_u64(from);
    get_id(&f->checkpoint, from);
    return from->failed ? err_set(err, CKD_E_INVALID, "an answer that has no meaning") : CKD_OK;
}

/* A run, or a branch of it. */
static bool is_of_run(const char *run, const char *wanted) {
    size_t length = strlen(wanted);
    return !length || (strncmp(run, wanted, length) == 0 && (run[length] == '\0' || run[length] == '~'));
}

/* ---- the side that keeps copies ---- */

/* The store is there, or something is wrong: an answer must not make one in an empty mount point. */
static ckd_status open_shared(ckd_store **out, const tier *t, ckd_open_mode mode, ckd_error *err) {
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = t->agent->options.threads;
    options.on_message = t->agent->options.on_message;
    options.message_context = t->agent->options.message_context;
    return ckd_store_open(out, t->agent->store, mode, &options, err);
}

static ckd_status check_store(const ckd_store *shared, const question *q, ckd_error *err) {
    return memcmp(&shared->id, &q->store, sizeof(q->store)) == 0
               ? CKD_OK
               : err_set(err, CKD_E_MISMATCH, "its agent serves another store");
}

static ckd_status list_set(bytes *answer, uint32_t *count, tier *t, const char *set, const char *run,
                           ckd_error *err) {
    char path[700];
    ckd_store *copies = NULL;
    ckd_checkpoint_list *list = NULL;
    ckd_status status = peer_set_hold(path, sizeof(path), t->node, set, err);
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_store_open(&copies, path, CKD_OPEN_READ, NULL, err);
    THEN(status, ckd_store_list(&list, copies, NULL, err));
    for (size_t i = 0; status == CKD_OK && i < list->count && *count < FOUND_MAX; i++) {
        if (is_of_run(list->items[i].run, run)) {
            put_found(answer, set, &list->items[i]);
            (*count)++;
        }
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(copies);
    peer_set_release(t->node);
    return status;
}

static ckd_status answer_list(bytes *answer, tier *t, const question *q, ckd_error *err) {
    char **sets = NULL;
    size_t set_count = 0;
    uint32_t count = 0;
    bytes states = {.size = 0};
    ckd_status status = peer_held_sets(&sets, &set_count, t->node, err);
    for (size_t i = 0; i < set_count; i++) {
        if (!q->set[0] || strcmp(q->set, sets[i]) == 0) {
            (void)list_set(&states, &count, t, sets[i], q->run, NULL); /* a set may have no manifest yet */
        }
        free(sets[i]);
    }
    free(sets);
    bytes_put_u32(answer, count);
    bytes_put(answer, states.data, states.size);
    bytes_free(&states);
    return status;
}

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

/* Every value is decoded and compared with its hash before anything of it goes to the store. */
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

static ckd_status copy_verified(ckd_store *shared, ckd_store *copies, const question *q, ckd_error *err) {
    ckd_copy_options options = CKD_COPY_OPTIONS_INIT;
    options.checkpoints = &q->checkpoint;
    options.count = 1;
    ckd_status status = verify_copy(copies, &q->checkpoint, err);
    THEN(status, check_trash(shared, &q->checkpoint, err));
    THEN(status, ckd_copy(NULL, shared, copies, &options, err));
    return status;
}

static ckd_status store_copy(tier *t, ckd_store *shared, const question *q, ckd_error *err) {
    char path[700];
    ckd_store *copies = NULL;
    ckd_status status = peer_set_hold(path, sizeof(path), t->node, q->set, err);
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_store_open(&copies, path, CKD_OPEN_READ, NULL, err);
    THEN(status, copy_verified(shared, copies, q, err));
    ckd_store_close(copies);
    peer_set_release(t->node);
    return status;
}

ckd_status restart_answer(void *context, bytes *answer, const bytes *asked, ckd_error *err) {
    tier *t = context;
    question q = {.kind = 0};
    ckd_store *shared = NULL;
    pthread_mutex_lock(&t->mutex);
    bool ready = t->version > 0;
    pthread_mutex_unlock(&t->mutex);
    ckd_status status =
        ready ? get_question(&q, asked, err) : err_set(err, CKD_E_BUSY, "its agent is beginning");
    THEN(status, open_shared(&shared, t, q.kind == QUESTION_STORE ? CKD_OPEN_WRITE : CKD_OPEN_READ, err));
    THEN(status, check_store(shared, &q, err));
    if (status == CKD_OK && q.kind == QUESTION_LIST) {
        status = answer_list(answer, t, &q, err);
    } else if (status == CKD_OK && q.kind == QUESTION_STORE) {
        status = store_copy(t, shared, &q, err);
        if (status == CKD_OK) {
            agent_say(t->agent, "a state of a lost node is durable, from its copy here (%s)", q.set);
        }
    } else {
        status = status == CKD_OK ? err_set(err, CKD_E_UNSUPPORTED, "a question of kind %d", q.kind) : status;
    }
    ckd_store_close(shared);
    return status;
}

/* ---- the side that asks ---- */

typedef struct search {
    tier *of;
    question question;
    found *items;
    size_t count, capacity;
    ckd_store *shared;
    bool of_last_life, again, asked[PEER_HOSTS_MAX]; /* again: what goes wrong was said before */
} search;

static void decide(tier *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void decide(tier *t, const char *format, ...) {
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

/* This node may itself have copies of the one that is lost. */
static ckd_status ask(bytes *answer, tier *t, size_t host, const question *q, ckd_error *err) {
    bytes asked = {.size = 0};
    put_question(&asked, q);
    ckd_status status = CKD_OK;
    if (asked.failed) {
        status = err_nomem(err, asked.size, "a question");
    } else if (host == t->hosts.self) {
        status = restart_answer(t, answer, &asked, err);
    } else {
        status = peer_ask(answer, t->node, host, &asked, err);
    }
    bytes_free(&asked);
    return status;
}

static ckd_status take_list(search *s, size_t host, const bytes *answer, ckd_error *err) {
    reader r = reader_of(answer->data, answer->size);
    uint32_t count = reader_u32(&r);
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < count && status == CKD_OK && s->count < FOUND_MAX; i++) {
        found f = {.host = host};
        status = get_found(&f, &r, err);
        THEN(status, ARRAY_GROW(s->items, s->capacity, s->count + 1, "copies", err));
        if (status == CKD_OK) {
            s->items[s->count++] = f;
        }
    }
    return status;
}

static void ask_everybody(search *s) {
    tier *t = s->of;
    for (size_t host = 0; host < t->hosts.count; host++) {
        bytes answer = {.size = 0};
        ckd_error why;
        if (s->again && t->peers[host].asked) {
            continue;
        }
        ckd_status status = ask(&answer, t, host, &s->question, &why);
        THEN(status, take_list(s, host, &answer, &why));
        s->asked[host] = status == CKD_OK;
        if (status != CKD_OK && !s->again) {
            decide(t, "node %s: not asked: %.300s", t->hosts.items[host].name, why.message);
        }
        bytes_free(&answer);
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

/* The newest state of a run, or of its branches, in the store. */
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

/* A copy that is damaged, or was deleted in the store, remains so. */
static bool may_succeed_later(ckd_status status) {
    return status != CKD_E_CORRUPT && status != CKD_E_STATE && status != CKD_E_NOT_FOUND &&
           status != CKD_E_INVALID && status != CKD_E_MISMATCH && status != CKD_E_UNSUPPORTED &&
           status != CKD_E_EXISTS;
}

static bool make_durable(search *s, const found *f) {
    tier *t = s->of;
    bytes answer = {.size = 0};
    ckd_error why;
    const char *name = t->hosts.items[f->host].name;
    question q = s->question;
    q.kind = QUESTION_STORE;
    q.checkpoint = f->checkpoint;
    snprintf(q.set, sizeof(q.set), "%s", f->set);
    ckd_status status = ask(&answer, t, f->host, &q, &why);
    if (status == CKD_OK) {
        decide(t, "%s@%" PRIu64 " at %s: verified, durable, chosen", f->run, f->step, name);
        agent_say(t->agent,
                  "step %" PRIu64 " of run '%s' comes from the memory of node %s, verified: it is durable",
                  f->step, f->run, name);
    } else if (may_succeed_later(status) && s->again) {
        s->asked[f->host] = false;
    } else {
        s->asked[f->host] = !may_succeed_later(status);
        decide(t, "%s@%" PRIu64 " at %s: not used: %.300s", f->run, f->step, name, why.message);
        agent_say(t->agent, "step %" PRIu64 " of run '%s' in the memory of node %s is not used: %s", f->step,
                  f->run, name, why.message);
    }
    bytes_free(&answer);
    return status == CKD_OK;
}

/* Decides for one run: its states, the newest first, until one is durable or the store's is as new. */
static void choose(search *s, const char *root) {
    tier *t = s->of;
    ckd_checkpoint stored;
    bool any = newest_stored(&stored, s->shared, root), done = false;
    for (size_t i = 0; i < s->count && !done; i++) {
        const found *f = &s->items[i];
        char own_root[CKD_RUN_MAX + 1];
        run_root(own_root, f->run);
        if (strcmp(own_root, root) != 0) {
            continue;
        }
        bool same = any && memcmp(&stored.id, &f->checkpoint, sizeof(stored.id)) == 0;
        if (same || (any && stored.created_ns >= f->created_ns)) {
            decide(t, "%s@%" PRIu64 " at %s: %s", f->run, f->step, t->hosts.items[f->host].name,
                   same ? "the newest one in the store already" : "older than the store's");
            break;
        }
        done = make_durable(s, f);
    }
    if (any && !done && !s->again) {
        decide(t, "%s@%" PRIu64 " in the store: chosen", stored.run, stored.step);
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
            s->question.run, missing, t->hosts.count, t->hosts.items[first].name,
            missing > 1 ? " and others" : "");
    }
}

static void search_peers(search *s) {
    tier *t = s->of;
    ckd_error why;
    pthread_mutex_lock(
        &t->restart_mutex); /* a second search finds in the store what the first one has put there */
    ckd_status status = open_shared(&s->shared, t, CKD_OPEN_READ, &why);
    if (status == CKD_OK) {
        s->question.store = s->shared->id;
        ask_everybody(s);
        if (s->question.run[0]) {
            say_not_asked(s);
        }
        choose_each(s);
    } else if (!s->again) {
        agent_say(t->agent, "other nodes were not asked for states, as the store cannot be opened: %s",
                  why.message);
    }
    if (status == CKD_OK && s->of_last_life && !s->again) {
        record_report(t->agent, s->shared);
    }
    ckd_store_close(s->shared);
    pthread_mutex_unlock(&t->restart_mutex);
    free(s->items);
}

void restart_from_peers(tier *t, const char *run) {
    search s = {.of = t, .question = {.kind = QUESTION_LIST}};
    run_root(s.question.run, run);
    search_peers(&s);
}

void restart_last_life(tier *t) {
    search s = {.of = t, .question = {.kind = QUESTION_LIST}, .of_last_life = true};
    uint64_t now_ns = clock_monotonic_ns();
    bool wanted = false;
    pthread_mutex_lock(&t->mutex);
    for (size_t host = 0; host < t->hosts.count; host++) {
        wanted |= !t->peers[host].asked && peer_alive(t->node, host);
    }
    wanted = wanted && (!t->asked_ns || now_ns - t->asked_ns > t->ask_pause_ns);
    s.again = t->ask_pause_ns > 0;
    if (wanted) {
        uint64_t pause_ns = s.again ? t->ask_pause_ns * 2 : PAUSE_MIN_NS;
        t->ask_pause_ns = pause_ns < PAUSE_MAX_NS ? pause_ns : PAUSE_MAX_NS;
        t->asked_ns = now_ns;
    }
    pthread_mutex_unlock(&t->mutex);
    if (!wanted) {
        return;
    }
    snprintf(s.question.set, sizeof(s.question.set), "%s", t->set);
    search_peers(&s);
    pthread_mutex_lock(&t->mutex);
    for (size_t host = 0; host < t->hosts.count; host++) {
        t->peers[host].asked |= s.asked[host];
    }
    pthread_mutex_unlock(&t->mutex);
}
