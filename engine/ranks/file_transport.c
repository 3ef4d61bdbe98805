/*
 * How ranks exchange bytes without a communication library: through files in the store's directory. A message appears
 * by a rename. Its receivers read it, and its sender removes it once it knows that they have read it. A waiting rank
 * checks whether the ranks it waits for are alive (watch.c).
 */
#include <stdlib.h>
#include <unistd.h>

#include "base/hash.h"
#include "codec/common/common.h"
#include "engine/ranks/internal.h"

#define TIMEOUT_MS  600000
#define MESSAGE_MAX ((size_t)1 << 30)
#define LOOKED_AT   64u /* ranks whose liveness rank 0 checks between two pauses */

/* ---- messages ---- */

static ckd_status write_whole(const char *path, const ckd_bytes *data, ckd_error *err) {
    uint8_t check[8];
    store_le64(check, hash64(data->data, data->size));
    file_writer *w;
    ckd_status status = file_create(&w, path, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    status = data->size ? file_append(w, data->data, data->size, err) : CKD_OK;
    THEN(status, file_append(w, check, sizeof(check), err));
    ckd_status closed = file_close(w, status == CKD_OK ? err : NULL);
    return status == CKD_OK ? closed : status;
}

ckd_status rank_file_publish(const pathname *path, const pathname *temp, const ckd_bytes *data,
                             ckd_error *err) {
    ckd_status status = write_whole(temp->text, data, err);
    THEN(status, file_rename_noreplace(temp->text, path->text, err));
    if (status != CKD_OK) {
        file_remove(temp->text, true, NULL);
    }
    return status;
}

static ckd_status send(rank_files *f, uint64_t number, const ckd_bytes *data, ckd_error *err) {
    const ckd_id *me = &f->members[f->rank].id;
    pathname temp = path_message(f->store, me, number, ".tmp"), p = path_message(f->store, me, number, "");
    return rank_file_publish(&p, &temp, data, err);
}

/*
 * A rank that could not send, or could not read an answer, takes part in no further exchange, but lives on. The others
 * would wait for it, so it leaves, and they notice that it is gone. This decides nothing about a commit. Rank 0 sends
 * when its commit has ended, and the others look for a manifest. Rank 0 cannot commit without the parts of all others.
 */
static ckd_status leave_if_failed(rank_files *f, ckd_status status) {
    if (status != CKD_OK) {
        f->silent = true;
        members_leave(f);
    }
    return status;
}

ckd_status rank_file_read(ckd_bytes *out, const pathname *path, ckd_error *err) {
    bytes data = {0};
    ckd_status status = file_read_all(&data, path->text, MESSAGE_MAX, err);
    if (status == CKD_OK && (data.size < 8 || !wire_hash_matches(load_le64(data.data + data.size - 8),
                                                                 hash64(data.data, data.size - 8)))) {
        err_set(err, CKD_E_CORRUPT, "a message between ranks is damaged");
        status = err_in_file(err, CKD_E_CORRUPT, path->text);
    }
    if (status != CKD_OK) {
        bytes_free(&data);
        return status;
    }
    *out = (ckd_bytes){data.data, data.size - 8};
    return CKD_OK;
}

static ckd_status receive(ckd_bytes *out, const rank_files *f, const ckd_id *sender, uint64_t number,
                          ckd_error *err) {
    pathname p = path_message(f->store, sender, number, "");
    return rank_file_read(out, &p, err);
}

/* Removes this rank's messages before `number`. All receivers have read them. */
static void forget(rank_files *f, uint64_t number) {
    for (; f->oldest_message < number; f->oldest_message++) {
        file_remove(path_message(f->store, &f->members[f->rank].id, f->oldest_message, "").text, true, NULL);
    }
}

/* ---- gather ---- */

typedef struct gathering {
    rank_files *f;
    ckd_bytes *all;
    uint64_t number;
} gathering;

static ckd_status gather_from(gathering *g, uint32_t rank, bool look, ckd_error *err) {
    const member *m = &g->f->members[rank];
    ckd_status status = receive(&g->all[rank], g->f, &m->id, g->number, err);
    if (status != CKD_E_NOT_FOUND || !look) {
        return status;
    }
    ckd_error why = {0};
    ckd_status missing = member_lives(g->f, m)
                             ? rank_ask_watch(g->f, rank, &why)
                             : rank_died(rank, g->f->world, "before it had sent its part", &why);
    if (missing != CKD_OK) {
        status = receive(&g->all[rank], g->f, &m->id, g->number, err); /* its last message */
    }
    return status == CKD_E_NOT_FOUND && missing != CKD_OK ? err_from(err, missing, &why) : status;
}

static ckd_status gather_once(void *context, ckd_error *err) {
    gathering *g = context;
    rank_files *f = g->f;
    uint32_t waiting = 0, first = 0;
    for (uint32_t i = 1; i < f->world; i++) {
        if (g->all[i].data) {
            continue;
        }
        bool look = f->world <= LOOKED_AT || (i + f->turn) % f->world < LOOKED_AT;
        ckd_status status = gather_from(g, i, look, err);
        if (status == CKD_E_NOT_FOUND) {
            first = waiting++ ? first : i;
        } else if (status != CKD_OK) {
            return status;
        }
    }
    f->turn += LOOKED_AT;
    ckd_status status = waiting ? rank_group_error(f, err) : CKD_OK; /* others may know which rank is dead */
    return waiting == 0 || status != CKD_OK
               ? status
               : err_set(
                     err, CKD_E_BUSY,
                     "timed out: %u of %u ranks are alive but have not joined this exchange, the first of "
                     "them rank %u",
                     (unsigned)waiting, (unsigned)f->world, (unsigned)first);
}

static ckd_status copy_bytes(ckd_bytes *out, const ckd_bytes *from, ckd_error *err) {
    *out = (ckd_bytes){malloc(from->size + 1), from->size};
    if (!out->data) {
        return err_nomem(err, from->size, "a message");
    }
    if (from->size) {
        memcpy(out->data, from->data, from->size);
    }
    return CKD_OK;
}

static ckd_status gather(void *context, const ckd_bytes *message, ckd_bytes *all, ckd_error *err) {
    rank_files *f = context;
    gathering g = {f, all, f->number++};
    if (f->rank != 0) {
        return leave_if_failed(f, send(f, g.number, message, err));
    }
    f->waits_since_ns = clock_monotonic_ns();
    ckd_status status = copy_bytes(&all[0], message, err);
    THEN(status, retry_while_busy(gather_once, &g, f->timeout_ms, err));
    if (status == CKD_OK) {
        forget(f, g.number); /* a rank that sent this message has read all earlier ones */
        rank_forget_claim(f);
    } else if (err) {
        status = rank_end_group(f, status, err); /* notifies busy ranks */
    }
    return status;
}

/* ---- broadcast ---- */

typedef struct reception {
    rank_files *f;
    ckd_bytes *out;
    uint64_t number;
} reception;

/*
 * A dead rank that has not sent its message to rank 0 ends the group for all. Rank 0, even if busy, will notice it,
 * too. If rank 0 has answered meanwhile, the missing rank had only finished earlier than this one.
 */
static ckd_status look_at_others(reception *r, ckd_error *err) {
    rank_files *f = r->f;
    ckd_error why = {0};
    ckd_status missing = rank_group_error(f, &why);
    THEN(missing, rank_find_missing(f, r->number - 1, &why));
    THEN(missing, rank_ask_watch(f, 0, &why));
    if (missing == CKD_OK) {
        return err_set(err, CKD_E_BUSY, "timed out: rank 0 of %u is alive but does not answer",
                       (unsigned)f->world);
    }
    ckd_status status = receive(r->out, f, &f->members[0].id, r->number, err);
    if (status != CKD_E_NOT_FOUND) {
        return status;
    }
    return err_from(err, rank_end_group(f, missing, &why), &why);
}

static ckd_status receive_once(void *context, ckd_error *err) {
    reception *r = context;
    const member *m = &r->f->members[0];
    ckd_status status = receive(r->out, r->f, &m->id, r->number, err);
    if (status != CKD_E_NOT_FOUND) {
        return status;
    }
    if (member_lives(r->f, m)) {
        return look_at_others(r, err);
    }
    status = receive(r->out, r->f, &m->id, r->number, err);
    return status == CKD_E_NOT_FOUND ? rank_died(0, r->f->world, "before it reported the outcome", err)
                                     : status;
}

static ckd_status broadcast(void *context, ckd_bytes *data, ckd_error *err) {
    rank_files *f = context;
    reception r = {f, data, f->number++};
    if (f->rank == 0) {
        return f->world > 1 ? leave_if_failed(f, send(f, r.number, data, err)) : CKD_OK;
    }
    f->waits_since_ns = clock_monotonic_ns();
    ckd_status status = retry_while_busy(receive_once, &r, f->timeout_ms, err);
    if (status == CKD_OK) {
        forget(f, r.number);
    }
    /* After a timeout the caller gives up the save, and the others notice that. */
    return status == CKD_E_BUSY ? status : leave_if_failed(f, status);
}

/* ---- joining ---- */

static ckd_status announce(rank_files *f, ckd_error *err) {
    bytes ids = {0};
    for (uint32_t r = 0; r < f->world; r++) {
        bytes_put(&ids, f->members[r].id.bytes, sizeof(ckd_id));
    }
    ckd_bytes data = {ids.data, ids.size};
    ckd_status status =
        ids.failed ? err_nomem(err, ids.size, "the members of a group") : send(f, 0, &data, err);
    bytes_free(&ids);
    return status;
}

/* Returns whether this rank 0 lists us as a member. *other: it has a group without us. */
static bool accepted(bool *other, rank_files *f, const member *coordinator) {
    ckd_bytes ids;
    *other = false;
    if (receive(&ids, f, &coordinator->id, 0, NULL) != CKD_OK) {
        return false;
    }
    const ckd_id *id = ids.data; /* bytes: any alignment */
    bool is_member = ids.size == f->world * sizeof(ckd_id) && id_equal(&id[f->rank], &f->members[f->rank].id);
    for (uint32_t r = 0; is_member && r < f->world; r++) {
        f->members[r].id = id[r];
        member_name(&f->members[r], f, r);
    }
    ckd_bytes_free(&ids);
    *other = !is_member;
    return is_member;
}

static ckd_status find_coordinator(void *context, ckd_error *err) {
    rank_files *f = context;
    dir_list list;
    ckd_status status = cancel_poll(&f->stop, err);
    THEN(status, dir_list_read(&list, path_in(f->store->path, DIR_RANKS).text, err));
    if (status != CKD_OK) {
        return status;
    }
    member m;
    bool found = false, other, present = false;
    for (size_t at = 0; !found && members_next_coordinator(&m, f, &list, &at);) {
        found = accepted(&other, f, &m);
        present = present || !other;
    }
    dir_list_free(&list);
    if (found) {
        return CKD_OK;
    }
    if (member_is_gone(&f->members[0], present)) {
        return rank_died(0, f->world, "before all had joined", err);
    }
    return err_set(err, CKD_E_BUSY, "rank 0 of %u has not found all ranks of this group", (unsigned)f->world);
}

static void leave(void *context) {
    rank_files *f = context;
    members_leave(f);
    free(f->members);
    free(f);
}

ckd_status rank_files_join(ckd_transport *out, ckd_store *store, const ckd_ranks_options *options,
                           const cancel_check *stop, ckd_error *err) {
    *out = (ckd_transport){0};
    const char *group_name = options->group ? options->group : "";
    rank_files *f = calloc(1, sizeof(*f));
    member *members = calloc(options->world, sizeof(*members));
    if (!f || !members) {
        free(f);
        free(members);
        return err_nomem(err, options->world * sizeof(*members), "the members of a group");
    }
    *f = (rank_files){.store = store,
                      .rank = options->rank,
                      .world = options->world,
                      .group = hash64(group_name, strlen(group_name)),
                      .timeout_ms = options->timeout_ms ? options->timeout_ms : TIMEOUT_MS,
                      .members = members,
                      .number = 1,
                      /* the list of members stays, so that newcomers see that they are not in it */
                      .oldest_message = 1,
                      .turn = options->rank + 1,
                      .stop = stop ? *stop : (cancel_check){.poll = NULL},
                      .process = getpid()};
    ckd_status status = members_enter(f, err);
    if (status == CKD_OK && f->rank == 0) {
        status = members_find_all(f, err);
        THEN(status, announce(f, err));
    } else if (status == CKD_OK) {
        status = retry_while_busy(find_coordinator, f, f->timeout_ms, err);
    }
    if (status != CKD_OK) {
        f->world = 0; /* nobody to wait for */
        leave(f);
        return status;
    }
    *out = (ckd_transport){.struct_size = sizeof(*out),
                           .context = f,
                           .rank = options->rank,
                           .world = options->world,
                           .gather = gather,
                           .broadcast = broadcast,
                           .leave = leave};
    return CKD_OK;
}
