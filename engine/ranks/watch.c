/*
 * Checks that ranks make by themselves through the store's directory, whether they wait or are busy. They find out
 * whether a rank has died, and which came first: rank 0's commit, or the decision of another rank to give it up.
 *
 * A rank checks another one by trying its lock. Each rank checks a few at a time, beginning with the rank after itself.
 * So all ranks are checked equally often, whatever their number. A rank that finds another one missing records it in a
 * file that all ranks check.
 */
#include <stdio.h>

#include "engine/ranks/internal.h"

#define LOOKED_AT 8u /* ranks checked at a time */

ckd_status rank_died(uint32_t rank, uint32_t world, const char *when, ckd_error *err) {
    return err_set(err, CKD_E_STATE, "rank %u of %u has died or left %s: nothing was committed",
                   (unsigned)rank, (unsigned)world, when);
}

/*
 * Names a file after the rank's id, so that it is removed once that rank is gone. Files of the whole group carry rank
 * 0's id: without rank 0 there is no group.
 */
static pathname path_of_group(const rank_files *f, uint32_t rank, const char *what) {
    char hex[CKD_ID_TEXT], name[2 * CKD_ID_TEXT + 16];
    ckd_id_text(hex, &f->members[rank].id);
    snprintf(name, sizeof(name), "%s.%s", hex, what);
    return path_of(f->store->path, DIR_RANKS, name);
}

/* ---- the end of a group ---- */

ckd_status rank_group_error(const rank_files *f, ckd_error *err) {
    ckd_bytes message;
    pathname p = path_of_group(f, 0, "over");
    /* also if it cannot be read now; there will be another check */
    if (rank_file_read(&message, &p, NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = rank_message_read(&message, err).status;
    ckd_bytes_free(&message);
    return status;
}

ckd_status rank_end_group(const rank_files *f, ckd_status status, ckd_error *why) {
    ckd_error earlier = {0};
    ckd_bytes message = rank_message_write(status, why, true, NULL, 0);
    if (message.data) {
        pathname temp = path_of_group(f, f->rank, "over.tmp"), p = path_of_group(f, 0, "over");
        /* If this fails for another reason, the others find the dead rank by themselves. */
        if (rank_file_publish(&p, &temp, &message, NULL) == CKD_E_EXISTS) {
            ckd_status recorded = rank_group_error(f, &earlier);
            status = recorded == CKD_OK ? status : err_from(why, recorded, &earlier);
        }
    }
    ckd_bytes_free(&message);
    return status;
}

ckd_status rank_ask_watch(const rank_files *f, uint32_t rank, ckd_error *err) {
    return f->watch.look
               ? f->watch.look(f->watch.context, rank, clock_monotonic_ns() - f->waits_since_ns, err)
               : CKD_OK;
}

bool rank_is_missing(const rank_files *f, uint32_t rank, uint64_t number) {
    const member *m = &f->members[rank];
    pathname message = path_message(f->store, &m->id, number, "");
    return !file_exists(message.text) && !member_lives(f, m) && !file_exists(message.text);
}

/*
 * Ranks leave once rank 0 is gone. So if rank 0 is gone by now, too, it was the first, and the error names it. This
 * rank may have checked it just before it went.
 */
ckd_status rank_find_missing(rank_files *f, uint64_t number, ckd_error *err) {
    for (uint32_t i = 0; i < LOOKED_AT && i < f->world; i++) {
        uint32_t rank = f->turn++ % f->world;
        if (rank == f->rank || rank == 0 || !rank_is_missing(f, rank, number)) {
            continue;
        }
        return f->rank == 0 || member_lives(f, &f->members[0])
                   ? rank_died(rank, f->world, "before it had sent its part", err)
                   : rank_died(0, f->world, "before it reported the outcome", err);
    }
    return CKD_OK;
}

/* This runs before the rank's own part exists, so nothing can have been committed. */
ckd_status rank_poll(void *files, ckd_error *err) {
    rank_files *f = files;
    ckd_error why = {0};
    ckd_status status = rank_group_error(f, &why);
    if (status != CKD_OK) {
        return err_from(err, status, &why);
    }
    if (f->rank != 0 && !member_lives(f, &f->members[0])) {
        status = rank_died(0, f->world, "before it reported the outcome", &why);
    } else {
        status = rank_find_missing(f, f->number, &why);
    }
    if (status != CKD_OK) {
        status = rank_end_group(f, status, &why);
    }
    return err_from(err, status, &why);
}

/* ---- commit or give up ---- */

enum { CLAIMED = 1, GIVEN_UP = 2 };

/*
 * Writes a decision: u32 decision, u32 rank. Returns the decision that counts, this one or an earlier one; 0:
 * unknown.
 */
static uint32_t decide(uint32_t *decider, const rank_files *f, const ckd_id *checkpoint, uint32_t decision,
                       ckd_error *err) {
    char hex[CKD_ID_TEXT], temporary[CKD_ID_TEXT + 8];
    uint8_t data[8];
    ckd_id_text(hex, checkpoint);
    snprintf(temporary, sizeof(temporary), "%s.tmp", hex);
    store_le32(data, decision);
    store_le32(data + 4, f->rank);
    pathname temp = path_of_group(f, f->rank, temporary), p = path_of_group(f, 0, hex);
    ckd_bytes own = {data, sizeof(data)}, existing;
    ckd_status status = rank_file_publish(&p, &temp, &own, err);
    /*
     * The content of the file decides, whether or not ours was written. On a network file system, a step reported as
     * failed may have succeeded.
     */
    if (rank_file_read(&existing, &p, status == CKD_OK || status == CKD_E_EXISTS ? err : NULL) != CKD_OK) {
        return 0;
    }
    bool sound = existing.size == sizeof(data);
    uint32_t decided = sound ? load_le32(existing.data) : 0;
    *decider = sound ? load_le32((const uint8_t *)existing.data + 4) : 0;
    ckd_bytes_free(&existing);
    if (decided != CLAIMED && decided != GIVEN_UP) {
        err_set(err, CKD_E_CORRUPT,
                "a message between ranks cannot be read: all ranks must use the same version");
        return 0;
    }
    return decided;
}

ckd_status rank_claim_commit(void *files, const ckd_id *checkpoint, ckd_error *err) {
    rank_files *f = files;
    ckd_error why = {0};
    uint32_t decider = 0, decided = decide(&decider, f, checkpoint, CLAIMED, &why);
    f->claimed = true;
    f->checkpoint = *checkpoint;
    if (decided == GIVEN_UP) {
        return err_set(
            err, CKD_E_STATE,
            "rank %u of %u gave up the save, as it did not learn the outcome in time: nothing was committed",
            (unsigned)decider, (unsigned)f->world);
    }
    return decided == CLAIMED ? CKD_OK : err_from(err, why.status ? why.status : CKD_E_IO, &why);
}

rank_commit rank_give_up_commit(const rank_files *f, const ckd_id *checkpoint) {
    uint32_t decider = 0;
    switch (decide(&decider, f, checkpoint, GIVEN_UP, NULL)) {
    case GIVEN_UP:
        return COMMIT_GIVEN_UP;
    case CLAIMED:
        return COMMIT_CLAIMED;
    default:
        return COMMIT_UNKNOWN;
    }
}

void rank_forget_claim(rank_files *f) {
    if (f->claimed) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &f->checkpoint);
        f->claimed = file_remove(path_of_group(f, 0, hex).text, true, NULL) != CKD_OK;
    }
}
