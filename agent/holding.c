/* The memory of sessions. */
#include "agent/internal.h"

#include <stdio.h>
#include <stdlib.h>

holding *holding_add(agent *a, const slot_hello *hello, int fd, int watch) {
    holding *h = calloc(1, sizeof(*h));
    if (!h) {
        return NULL;
    }
    h->fd = fd;
    h->watch = watch;
    h->rank = h->shown.rank = hello->rank;
    h->world = h->shown.world = hello->world;
    h->shown.connected = 1;
    h->shown.process = local_peer_process(fd);
    h->shown.newest_step = h->shown.durable_step = CKD_LATEST;
    h->shown.copied_step = h->shown.local_step = CKD_LATEST;
    snprintf(h->shown.run, sizeof(h->shown.run), "%s", hello->run);
    snprintf(h->saves_to, sizeof(h->saves_to), "%s", hello->run);
    h->next = a->holdings;
    a->holdings = h;
    return h;
}

static void free_set(slot_set *set) {
    if (set) {
        for (uint32_t i = 0; i < set->count; i++) {
            shared_memory_release(&set->slots[i].memory, false);
        }
        slot_layout_free(&set->layout);
        free(set);
    }
}

void holding_remove(agent *a, holding *h) {
    holding **place = &a->holdings;
    while (*place != h) {
        place = &(*place)->next;
    }
    *place = h->next;
    a->used_bytes -= h->set ? h->set->bytes : 0;
    free_set(h->set);
    local_close(h->watch);
    free(h);
}

bool holding_lacks_parts(const holding *h) {
    return h->settled && h->deferred;
}

bool holding_has_state(const holding *h) {
    bool found = false;
    for (uint32_t i = 0; h->set && i < h->set->count && !found; i++) {
        slot_content content;
        found = slot_read(&content, &h->set->slots[i], NULL) != CKD_E_NOT_FOUND;
        slot_content_free(&content);
    }
    return found;
}

static bool same_run(const holding *a, const holding *b) {
    return a != b && strcmp(a->shown.run, b->shown.run) == 0;
}

static bool same_rank(const holding *a, const holding *b) {
    return a->rank == b->rank && a->world == b->world;
}

ckd_status holdings_await_settled(agent *a, const holding *own, ckd_error *err) {
    for (;;) {
        bool waiting = false;
        for (const holding *h = a->holdings; h; h = h->next) {
            /* a holding without memory leaves nothing, and its own session may be waiting here */
            if (!same_run(h, own) || !h->set || h->settled ||
                (h->fd >= 0 && !local_peer_gone(h->fd, h->watch))) {
                continue;
            }
            if (h->stuck) {
                return err_set(
                    err, CKD_E_BUSY,
                    "the agent holds step %llu of run '%s', which a trainer that died has left and which "
                    "cannot be made durable at present: %s",
                    (unsigned long long)h->shown.newest_step, h->shown.run, h->shown.trouble);
            }
            waiting = true;
        }
        if (!waiting || a->stopping) {
            return waiting ? err_set(err, CKD_E_BUSY, "the agent is ending") : CKD_OK;
        }
        pthread_cond_wait(&a->changed, &a->mutex);
    }
}

/* ---- giving memory ---- */

static uint64_t step_of(const shared_slot *s) {
    slot_content c;
    bool good = slot_read(&c, s, NULL) == CKD_OK;
    uint64_t step = good ? c.request.options.step + 1 : 0;
    slot_content_free(&c);
    return step;
}

/* Sorts the slots by step, because the session overwrites the first one first. */
static void sort_slots(slot_set *set) {
    for (uint32_t i = 1; i < set->count; i++) {
        for (uint32_t k = i; k > 0 && step_of(&set->slots[k]) < step_of(&set->slots[k - 1]); k--) {
            shared_slot moved = set->slots[k];
            ckd_id done = set->done[k];
            set->slots[k] = set->slots[k - 1];
            set->done[k] = set->done[k - 1];
            set->slots[k - 1] = moved;
            set->done[k - 1] = done;
        }
    }
}

/*
 * Takes over the slots of this rank from a dead launch of the run if they fit. Removes all other slots of this rank in
 * dead launches.
 */
static slot_set *take_over(agent *a, const holding *own, const slot_layout *layout, uint32_t count) {
    slot_set *found = NULL;
    for (holding *h = a->holdings, *next; h; h = next) {
        next = h->next;
        if (!same_run(h, own) || h->rank != own->rank || !h->settled) {
            continue;
        }
        /* A trainer that outlives its connection still writes to its slots. */
        if (!found && h->set && same_rank(h, own) && h->watch >= 0 && local_peer_gone(-1, h->watch) &&
            h->set->count == count && slot_layout_equal(&h->set->layout, layout)) {
            found = h->set;
            a->used_bytes -= found->bytes;
            h->set = NULL;
        }
        holding_remove(a, h);
    }
    return found;
}

/* Removes durable states of dead trainers until there is room. Returns false if there is not. */
static bool make_room(agent *a, uint64_t need) {
    while (a->used_bytes > a->options.memory_bytes || need > a->options.memory_bytes - a->used_bytes) {
        holding *oldest = NULL;
        for (holding *h = a->holdings; h; h = h->next) {
            bool durable = h->settled && !holding_lacks_parts(h);
            if (durable && (!oldest || h->ended_ns < oldest->ended_ns)) {
                oldest = h;
            }
        }
        if (!oldest) {
            return false;
        }
        holding_remove(a, oldest);
    }
    return true;
}

static huge_pages pages_of(const agent *a) {
    return (huge_pages)a->options.huge_pages; /* the kinds have the same numbers */
}

/* Where huge pages are only tried, they may waste an eighth: pages of 1 GiB would take the budget from other states. */
static huge_pages pages_for(const agent *a, uint64_t size) {
    huge_pages pages = pages_of(a);
    uint64_t ordinary = shared_memory_bytes(size, HUGE_PAGES_OFF);
    bool wastes = shared_memory_bytes(size, pages) - ordinary > ordinary / 8;
    return pages == HUGE_PAGES_TRY && wastes ? HUGE_PAGES_OFF : pages;
}

static ckd_status make_set(slot_set **out, slot_layout *layout, uint32_t count, huge_pages huge,
                           ckd_error *err) {
    slot_set *set = calloc(1, sizeof(*set));
    if (!set) {
        return err_nomem(err, sizeof(*set), "slots");
    }
    set->layout = *layout;
    *layout = (slot_layout){.count = 0};
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
        shared_memory *memory = &set->slots[i].memory;
        set->slots[i].layout = &set->layout;
        status = shared_memory_make(memory, set->layout.size, huge, err);
        set->bytes += memory->size;
        set->huge_bytes += memory->huge_bytes;
        set->count += status == CKD_OK;
    }
    if (status != CKD_OK) {
        free_set(set);
        return status;
    }
    *out = set;
    return CKD_OK;
}

static void report_ordinary_pages(agent *a, const slot_set *set) {
    pthread_mutex_lock(&a->mutex);
    bool reports = pages_of(a) != HUGE_PAGES_OFF && set->huge_bytes < set->bytes && !a->huge_reported;
    a->huge_reported |= reports;
    pthread_mutex_unlock(&a->mutex);
    if (reports) {
        agent_say(
            a,
            "only %llu of %llu MiB are in huge pages, the rest is in ordinary ones: the pool has too few "
            "free (sysctl vm.nr_hugepages)",
            (unsigned long long)(set->huge_bytes >> 20), (unsigned long long)(set->bytes >> 20) + 1);
    }
}

ckd_status holding_give_memory(agent *a, holding *h, slot_layout *layout, uint32_t count, ckd_error *err) {
    if (h->set || count < 1 || count > SLOTS_MAX) {
        return err_set(err, CKD_E_INVALID, "a session asks once for 1 to %d slots", SLOTS_MAX);
    }
    huge_pages pages = pages_for(a, layout->size);
    uint64_t need = count * shared_memory_bytes(layout->size, pages);
    pthread_mutex_lock(&a->mutex);
    slot_set *set = take_over(a, h, layout, count);
    need = set ? set->bytes : need;
    bool room = make_room(a, need);
    a->used_bytes += room ? need : 0;
    pthread_mutex_unlock(&a->mutex);
    if (!room) {
        free_set(set);
        return err_set(
            err, CKD_E_NOMEM,
            "%u slots of this state take %llu MiB, and the agent may hold %llu MiB in all: start it with a "
            "larger --budget",
            (unsigned)count, (unsigned long long)(need >> 20) + 1,
            (unsigned long long)(a->options.memory_bytes >> 20));
    }
    ckd_status status = CKD_OK;
    if (set) {
        sort_slots(set);
    } else {
        status = make_set(&set, layout, count, pages, err);
    }
    uint64_t taken = status == CKD_OK ? set->bytes : 0; /* fewer than needed, if ordinary pages are used */
    pthread_mutex_lock(&a->mutex);
    h->set = status == CKD_OK ? set : NULL;
    h->shown.memory_bytes = taken;
    a->used_bytes -= need - taken;
    pthread_mutex_unlock(&a->mutex);
    if (status == CKD_OK) {
        report_ordinary_pages(a, set);
    }
    return status;
}

/* ---- finding values ---- */

static bool has_values(const shared_slot *s, const ckd_id *checkpoint) {
    slot_content c;
    bool good = slot_read(&c, s, NULL) == CKD_OK;
    bool yes = good && memcmp(&c.request.options.checkpoint_id, checkpoint, sizeof(*checkpoint)) == 0;
    slot_content_free(&c);
    return yes;
}

/* Whether the holding has memory of this rank, and is `own` or settled. */
static bool is_of_rank(const holding *h, const holding *own) {
    return h->set && same_rank(h, own) && (h == own || h->settled);
}

bool holdings_doubt(const agent *a, const holding *own, const ckd_id *checkpoint) {
    bool found = false;
    for (const holding *h = a->holdings; h; h = h->next) {
        for (uint32_t i = 0; is_of_rank(h, own) && i < h->set->count; i++) {
            found |= slot_doubts(&h->set->slots[i], checkpoint);
        }
    }
    return found;
}

const shared_slot *holdings_find(const agent *a, const holding *own, const ckd_id *checkpoint) {
    for (const holding *h = a->holdings; h; h = h->next) {
        for (uint32_t i = 0; is_of_rank(h, own) && i < h->set->count; i++) {
            if (has_values(&h->set->slots[i], checkpoint)) {
                return &h->set->slots[i];
            }
        }
    }
    return NULL;
}
