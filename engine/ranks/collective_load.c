/* Collective loads: the requests of this rank, the payloads that other ranks need as well, and then the rounds. */
#include <stdlib.h>

#include "engine/ranks/internal.h"
#include "engine/ranks/collective_load.h"

#define LIST_VERSION UINT32_C(0x314c444b) /* version of everything that ranks send each other here */
/*
 * Up to this many payloads, one directory rank sees all and balances them best. With more payloads, several directory
 * ranks see a part each, so that no list grows too long for one of them.
 */
#define SEEN_BY_ONE (UINT64_C(1) << 18)

/* ---- requests ---- */

typedef struct scheduled_block {
    uint32_t turn;
    const view_block *block;
} scheduled_block;

static int by_turn(const void *a, const void *b) {
    const scheduled_block *x = a, *y = b;
    if (x->turn != y->turn) {
        return x->turn < y->turn ? -1 : 1;
    }
    return x->block < y->block ? -1 : x->block > y->block;
}

/* Sorts the task's blocks by turn. Those without elements of the span are not in the plan, and removed. */
static ckd_status schedule(scheduled_task *s, const load_plan *plan, ckd_error *err) {
    load_task *task = &s->task;
    scheduled_block *all = malloc((task->count + 1) * sizeof(*all));
    s->turns = malloc((task->count + 1) * sizeof(*s->turns));
    size_t count = 0;
    if (!all || !s->turns) {
        free(all);
        return err_nomem(err, task->count * sizeof(*all), "a load's plan");
    }
    for (size_t i = 0; i < task->count; i++) {
        const view_block *b = task->blocks[i];
        size_t node = load_plan_find(plan, b->materialized ? b->materialized : b->record);
        if (node != LOAD_NONE) {
            all[count++] = (scheduled_block){plan->nodes[node].turn, b};
        }
    }
    qsort(all, count, sizeof(*all), by_turn);
    for (size_t i = 0; i < count; i++) {
        task->blocks[i] = all[i].block;
        s->turns[i] = all[i].turn;
    }
    task->count = count;
    free(all);
    return CKD_OK;
}

/* All ranks are done: a failure now is this rank's alone. */
static ckd_status finish_tasks(collective_load *j, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < j->task_count && status == CKD_OK; i++) {
        const load_task *task = &j->tasks[i].task;
        status = err_in_tensor(err, load_task_finish(j->load, task, err), task->tensor->tensor->name);
    }
    return status;
}

static ckd_status make_tasks(collective_load *j, const ckd_load_request *requests, size_t count,
                             ckd_error *err) {
    j->tasks = calloc(count + 1, sizeof(*j->tasks));
    if (!j->tasks) {
        return err_nomem(err, count * sizeof(*j->tasks), "a load's plan");
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        ckd_load_request q;
        const view_tensor *t = load_match(&q, j->load, &requests[i]);
        if (t) {
            scheduled_task *s = &j->tasks[j->task_count++];
            status = load_task_make(&s->task, j->load, &q, t, err);
            THEN(status, schedule(s, j->plan, err));
            err_in_tensor(err, status, q.name);
        }
    }
    return status;
}

/* Does everything that needs no other rank. */
static ckd_status prepare(collective_load *j, const collective_request *q, ckd_error *err) {
    ckd_status status = load_check(j->load, q->items, q->count, q->allowed | CKD_DIFFERS_UNEXPECTED, err);
    THEN(status, load_plan_make(&j->plan, j->load, q->items, q->count, err));
    THEN(status, load_plan_order(j->plan, j->round_bytes / 4, err));
    THEN(status, payloads_init(&j->payloads, j->plan, err));
    if (status == CKD_OK) {
        load_set_plan(j->load, j->plan, &j->payloads);
        status = make_tasks(j, q->items, q->count, err);
    }
    return status;
}

/* ---- lists of needed payloads, for the directory ranks ---- */

/* Returns the number of directory ranks, given the need of the rank that needs most. All ranks must agree on it. */
static uint32_t directory_ranks(uint64_t max_nodes, uint64_t seen_by_one, uint32_t world) {
    uint64_t all = max_nodes > UINT64_MAX / world ? UINT64_MAX : max_nodes * world;
    return all / seen_by_one < world ? (uint32_t)(all / seen_by_one) + 1 : world;
}

/* This rank's lists, by directory rank, and the nodes of their entries. */
typedef struct payload_list {
    bytes *lists;   /* world of them */
    bytes *replies; /* world of them */
    ckd_bytes *items;
    size_t *nodes; /* of all entries, list after list */
    size_t *first; /* by rank: the start of its list in nodes */
    uint32_t directory_ranks;
} payload_list;

/*
 * Identifies a payload by its position, so that all ranks give it the same id. A file of materialized copies has the
 * identity of the file that it was made with.
 */
static hash128 id_of(const load_node *n) {
    uint8_t at[sizeof(hash128) + 8];
    memcpy(at, n->chunk->root.bytes, sizeof(hash128));
    store_le64(at + sizeof(hash128), n->record->payload_offset);
    return hash128_of(at, sizeof(at));
}

static void put_asked(bytes *to, const collective_load *j, const ckd_load_request *requests, size_t count) {
    const view *v = j->load->view;
    uint8_t *requested = bytes_extend(to, v->tensor_count);
    if (!requested) {
        return;
    }
    memset(requested, 0, v->tensor_count);
    for (size_t i = 0; i < count; i++) {
        ckd_load_request q = load_request(&requests[i]);
        const view_tensor *t = q.name ? view_find(v, q.name) : NULL;
        if (t) {
            requested[t - v->tensors] = 1;
        }
    }
}

static ckd_status payload_list_init(payload_list *n, const collective_load *j, ckd_error *err) {
    size_t world = j->ranks.world, count = j->plan->node_count;
    *n = (payload_list){calloc(world, sizeof(*n->lists)),     calloc(world, sizeof(*n->replies)),
                        calloc(world, sizeof(*n->items)),     malloc((count + 1) * sizeof(*n->nodes)),
                        calloc(world + 1, sizeof(*n->first)), 1};
    return n->lists && n->replies && n->items && n->nodes && n->first
               ? CKD_OK
               : err_nomem(err, count * sizeof(*n->nodes), "what this rank needs");
}

static void payload_list_free(payload_list *n, uint32_t world) {
    for (uint32_t r = 0; r < world; r++) {
        if (n->lists) {
            bytes_free(&n->lists[r]);
        }
        if (n->replies) {
            bytes_free(&n->replies[r]);
        }
    }
    free(n->lists);
    free(n->replies);
    free(n->items);
    free(n->nodes);
    free(n->first);
}

/* Sorts nodes by directory rank and writes the lists. */
static void list_nodes(payload_list *n, const collective_load *j) {
    uint32_t world = j->ranks.world;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < j->plan->node_count; i++) {
            const load_node *node = &j->plan->nodes[i];
            hash128 id = id_of(node);
            uint32_t to = directory_rank_of(&id, n->directory_ranks);
            if (node->record->stored_size && pass == 0) {
                n->first[to + 1]++;
            } else if (node->record->stored_size) {
                n->nodes[n->first[to]++] = i;
                reader_list_add(&n->lists[to], &id, node->record->stored_size, node->first);
            }
        }
        for (uint32_t r = 0; r < world && pass == 0; r++) {
            n->first[r + 1] += n->first[r];
        }
    }
    for (uint32_t r = world; r > 0; r--) { /* each was advanced to the start of the next one */
        n->first[r] = n->first[r - 1];
    }
    n->first[0] = 0;
}

/* Rank 0 also learns which tensors this rank requests. */
static ckd_status write_lists(payload_list *n, collective_load *j, const collective_request *q,
                              ckd_error *err) {
    const view *v = j->load->view;
    for (uint32_t r = 0; r < j->ranks.world; r++) {
        bytes *to = &n->lists[r];
        bytes_put_u32(to, LIST_VERSION);
        bytes_put(to, v->manifest.checkpoint.id.bytes, sizeof(ckd_id));
        bytes_put_u64(to, v->tensor_count);
        bytes_put_u8(to, (q->allowed & CKD_DIFFERS_UNEXPECTED) != 0);
        if (r == 0) {
            put_asked(to, j, q->items, q->count);
        }
    }
    list_nodes(n, j);
    for (uint32_t r = 0; r < j->ranks.world; r++) {
        if (n->lists[r].failed) {
            return err_nomem(err, n->lists[r].size, "what this rank needs");
        }
        n->items[r] = (ckd_bytes){n->lists[r].data, n->lists[r].size};
        j->ranks.out[r] = (ckd_buffers){&n->items[r], 1};
    }
    return CKD_OK;
}

/* ---- what all ranks need ---- */

/* Opens one rank's message. `entries` receives its entries. */
static ckd_status open_list(ckd_bytes *entries, collective_load *j, uint32_t rank, bool *requested,
                            bool *refused, ckd_error *err) {
    const view *v = j->load->view;
    reader at = reader_of(j->ranks.received[rank].data, j->ranks.received[rank].size);
    uint32_t version = reader_u32(&at);
    const void *id = reader_take(&at, sizeof(ckd_id));
    uint64_t tensors = reader_u64(&at);
    *refused = !reader_u8(&at) || *refused;
    if (at.failed || version != LIST_VERSION) {
        return err_set(err, CKD_E_CORRUPT,
                       "what rank %u sent cannot be read: all ranks must use the same version",
                       (unsigned)rank);
    }
    if (memcmp(id, &v->manifest.checkpoint.id, sizeof(ckd_id)) != 0 || tensors != v->tensor_count) {
        return err_set(err, CKD_E_INVALID,
                       "rank %u loads another checkpoint than rank %u, which loads %s@%llu", (unsigned)rank,
                       (unsigned)j->ranks.rank, v->manifest.checkpoint.run,
                       (unsigned long long)v->manifest.checkpoint.step);
    }
    const uint8_t *flags = j->ranks.rank == 0 ? reader_take(&at, v->tensor_count) : NULL;
    for (size_t i = 0; flags && i < v->tensor_count; i++) {
        requested[i] = requested[i] || flags[i];
    }
    *entries = (ckd_bytes){(uint8_t *)j->ranks.received[rank].data + at.at, reader_left(&at)};
    return at.failed ? err_set(err, CKD_E_CORRUPT, "the message of rank %u is truncated", (unsigned)rank)
                     : CKD_OK;
}

/* Called on rank 0, which sees the requests of all ranks. */
static ckd_status refuse_unexpected(const collective_load *j, const bool *requested, ckd_error *err) {
    load_differences differences = {NULL, 0, 0};
    ckd_status status = load_find_unexpected(&differences, j->load, requested, err);
    THEN(status, load_refuse(&differences, 0, err));
    load_differences_free(&differences);
    return status;
}

static ckd_status take_lists(payload_list *n, collective_load *j, ckd_error *err) {
    bool refused = false, *requested = calloc(j->load->view->tensor_count + 1, sizeof(*requested));
    ckd_status status = requested ? CKD_OK : err_nomem(err, j->load->view->tensor_count, "a list of tensors");
    for (uint32_t r = 0; r < j->ranks.world && status == CKD_OK; r++) {
        status = open_list(&n->items[r], j, r, requested, &refused, err);
    }
    if (status == CKD_OK && refused && j->ranks.rank == 0) {
        status = refuse_unexpected(j, requested, err);
    }
    THEN(status, assign_readers(n->replies, n->items, j->ranks.world, err));
    for (uint32_t r = 0; r < j->ranks.world && status == CKD_OK; r++) {
        n->items[r] = (ckd_bytes){n->replies[r].data, n->replies[r].size};
        j->ranks.out[r] = (ckd_buffers){&n->items[r], 1};
    }
    free(requested);
    return status;
}

/* ---- the replies ---- */

/* Counts entries. assigned not NULL: also fills them in, and marks their nodes. */
static bool read_reply(collective_load *j, const payload_list *n, uint32_t rank, bool *assigned,
                       size_t *receivers) {
    reader at = reader_of(j->ranks.received[rank].data, j->ranks.received[rank].size);
    reader_reply reply;
    while (reader_reply_next(&reply, &at, j->ranks.world)) {
        if (reply.index >= n->first[rank + 1] - n->first[rank]) {
            return false;
        }
        size_t node = n->nodes[n->first[rank] + reply.index];
        if (assigned && assigned[node]) {
            return false;
        }
        if (assigned) {
            assigned[node] = true;
            j->send_entries[j->send_count] = (send_entry){reply.position, id_of(&j->plan->nodes[node]), node,
                                                          reply.receiver_count, *receivers};
            for (uint32_t i = 0; i < reply.receiver_count; i++) {
                j->receivers[*receivers + i] = load_le32(reply.receivers + 4 * (size_t)i);
            }
        }
        j->send_count++;
        *receivers += reply.receiver_count;
    }
    return !at.failed;
}

static ckd_status read_replies(collective_load *j, const payload_list *n, bool *assigned, size_t *receivers,
                               ckd_error *err) {
    j->send_count = *receivers = 0;
    for (uint32_t r = 0; r < j->ranks.world; r++) {
        if (!read_reply(j, n, r, assigned, receivers)) {
            j->send_count = 0;
            return err_set(err, CKD_E_CORRUPT, "the reply of rank %u is malformed", (unsigned)r);
        }
    }
    return CKD_OK;
}

static ckd_status take_replies(collective_load *j, const payload_list *n, ckd_error *err) {
    size_t receivers;
    ckd_status status = read_replies(j, n, NULL, &receivers, err);
    if (status != CKD_OK) {
        return status;
    }
    bool *assigned = calloc(j->plan->node_count + 1, sizeof(*assigned));
    j->send_entries = calloc(j->send_count + 1, sizeof(*j->send_entries));
    j->receivers = calloc(receivers + 1, sizeof(*j->receivers));
    status = assigned && j->send_entries && j->receivers
                 ? read_replies(j, n, assigned, &receivers, err)
                 : err_nomem(err, j->send_count * sizeof(*j->send_entries), "what ranks share");
    free(assigned);
    return status;
}

/* ---- the whole load ---- */

static ckd_status exchange_lists(payload_list *n, collective_load *j, const collective_request *q,
                                 ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = prepare(j, q, &why);
    THEN(status, payload_list_init(n, j, &why));
    uint64_t max = UINT64_MAX - (status == CKD_OK ? j->plan->node_count : 0);
    ckd_status agreed = all_reduce_min(&j->ranks, &max, status, &why, err);
    if (agreed != CKD_OK) {
        return agreed;
    }
    n->directory_ranks = directory_ranks(UINT64_MAX - max, j->seen_by_one, j->ranks.world);
    status = write_lists(n, j, q, &why);
    agreed = all_to_all(&j->ranks, status, &why, err);
    if (agreed != CKD_OK) {
        return agreed;
    }
    status = take_lists(n, j, &why);
    agreed = all_to_all(&j->ranks, status, &why, err);
    if (agreed != CKD_OK) {
        return agreed;
    }
    status = take_replies(j, n, &why);
    memset(j->ranks.out, 0, j->ranks.world * sizeof(*j->ranks.out));
    payload_list_free(n, j->ranks.world);
    *n = (payload_list){NULL};
    return rounds_run(j, status, &why, err);
}

static void collective_load_free(collective_load *j) {
    for (size_t i = 0; j->tasks && i < j->task_count; i++) {
        load_task_free(&j->tasks[i].task);
        free(j->tasks[i].turns);
    }
    free(j->tasks);
    free(j->send_entries);
    free(j->receivers);
    payloads_free(&j->payloads);
    load_plan_free(j->plan);
}

ckd_status collective_load_run(ckd_load *load, const ckd_transport *transport, const collective_request *q,
                               ckd_error *err) {
    ckd_transport t;
    ckd_status status = rank_transport(&t, transport, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!t.exchange || !t.all_reduce_min || t.rank >= t.world || t.world > CKD_WORLD_MAX) {
        return err_set(
            err, CKD_E_INVALID,
            "to load together, a transport must have exchange, all_reduce_min, and a rank below its world");
    }
    collective_load j = {.load = load,
                         .round_bytes = load->staging / 8,
                         .held_bytes = load->staging / 8,
                         .seen_by_one = q->seen_by_one};
    payload_list n = {NULL};
    status = collective_begin(&j.ranks, &t, err);
    if (status != CKD_OK) {
        return status;
    }
    load_divide_staging(load, load->staging / 2, true); /* payloads get the other half */
    status = exchange_lists(&n, &j, q, err);
    THEN(status, finish_tasks(&j, err));
    load_divide_staging(load, load->staging, false);
    load_set_plan(load, NULL, NULL);
    payload_list_free(&n, t.world);
    collective_end(&j.ranks);
    collective_load_free(&j);
    return status;
}

ckd_status ckd_load_all_together(ckd_load *load, const ckd_transport *transport,
                                 const ckd_load_request *requests, size_t count, unsigned allowed,
                                 ckd_error *err) {
    const collective_request q = {requests, count, allowed, SEEN_BY_ONE};
    return collective_load_run(load, transport, &q, err);
}
