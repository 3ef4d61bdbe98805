/*
 * The ranks' messages over MPI: sizes first, then bytes in messages that fit an MPI count. Nobody sends before those
 * who receive have the memory, and a rank without it still takes part in every call of MPI. Otherwise others would
 * wait. Rank 0 commits between the two halves of an exchange. So the memory for its answer is reserved in the first
 * half: a rank without it fails the save there, and cannot miss the outcome.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"

#define TAG       7
#define NO_MEMORY UINT64_MAX     /* instead of the size of a part: this rank has no memory for the answer */
enum { ANSWER_RESERVED = 4096 }; /* bytes; the answer to a commit has a few hundred */

typedef struct mpi_group {
    MPI_Comm comm;
    int rank, world;
    uint64_t *sizes; /* rank 0: of what each rank sends */
    void *reserved;  /* other ranks: ANSWER_RESERVED bytes from a gather to the broadcast after it; or NULL */
} mpi_group;

ckd_status mpi_failed(ckd_error *err, ckd_status status, const char *format, const char *why) {
    if (err) {
        memset(err, 0, sizeof(*err));
        err->status = status;
        err->offset = CKD_NO_OFFSET;
        snprintf(err->message, sizeof(err->message), format, why);
    }
    return status;
}

ckd_status mpi_check(int code, ckd_error *err) {
    char why[MPI_MAX_ERROR_STRING + 1] = "";
    int length;
    if (code == MPI_SUCCESS) {
        return CKD_OK;
    }
    if (MPI_Error_string(code, why, &length) != MPI_SUCCESS) {
        why[0] = '\0';
    }
    return mpi_failed(err, CKD_E_IO, "MPI failed: %.400s", why);
}

static ckd_status reserve(ckd_bytes *out, uint64_t size, ckd_error *err) {
    *out = (ckd_bytes){size < SIZE_MAX ? malloc((size_t)size + 1) : NULL, (size_t)size};
    return out->data ? CKD_OK : mpi_failed(err, CKD_E_NOMEM, "out of memory for %s", "what a rank sent");
}

/* The reserved memory if the answer fits, which belongs to the caller then. */
static ckd_status reserve_answer(mpi_group *g, ckd_bytes *out, uint64_t size, ckd_error *err) {
    if (!g->reserved || size > ANSWER_RESERVED) {
        return reserve(out, size, err);
    }
    *out = (ckd_bytes){g->reserved, (size_t)size};
    g->reserved = NULL;
    return CKD_OK;
}

static ckd_status receive(mpi_group *g, ckd_bytes *out, int from, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < out->size && status == CKD_OK; at += MESSAGE_MAX) {
        int count = (int)(out->size - at < MESSAGE_MAX ? out->size - at : MESSAGE_MAX);
        status = mpi_check(
            MPI_Recv((char *)out->data + at, count, MPI_BYTE, from, TAG, g->comm, MPI_STATUS_IGNORE), err);
    }
    return status;
}

static ckd_status send(mpi_group *g, const ckd_bytes *data, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < data->size && status == CKD_OK; at += MESSAGE_MAX) {
        int count = (int)(data->size - at < MESSAGE_MAX ? data->size - at : MESSAGE_MAX);
        status = mpi_check(MPI_Send((const char *)data->data + at, count, MPI_BYTE, 0, TAG, g->comm), err);
    }
    return status;
}

static ckd_status reserve_all(const mpi_group *g, ckd_bytes *all, ckd_error *err) {
    ckd_status status = CKD_OK;
    char who[32];
    for (int r = 0; r < g->world && status == CKD_OK; r++) {
        snprintf(who, sizeof(who), "rank %d", r);
        status = g->sizes[r] != NO_MEMORY
                     ? reserve(&all[r], g->sizes[r], err)
                     : mpi_failed(err, CKD_E_NOMEM, "%s is out of memory for rank 0's answer", who);
    }
    return status;
}

static ckd_status receive_all(mpi_group *g, const ckd_bytes *part, ckd_bytes *all, ckd_error *err) {
    ckd_status status = CKD_OK;
    if (part->size) {
        memcpy(all[0].data, part->data, part->size);
    }
    for (int r = 1; r < g->world && status == CKD_OK; r++) {
        status = receive(g, &all[r], r, err);
    }
    return status;
}

/* Without memory on some rank nothing is sent. The others learn it from rank 0's answer. */
static ckd_status gather(void *context, const ckd_bytes *part, ckd_bytes *all, ckd_error *err) {
    mpi_group *g = context;
    ckd_status room = CKD_OK;
    if (g->rank != 0 && !g->reserved) {
        g->reserved = malloc(ANSWER_RESERVED);
    }
    uint64_t size = g->rank == 0 || g->reserved ? part->size : NO_MEMORY;
    ckd_status status =
        mpi_check(MPI_Gather(&size, 1, MPI_UINT64_T, g->sizes, 1, MPI_UINT64_T, 0, g->comm), err);
    if (status == CKD_OK && g->rank == 0) {
        room = reserve_all(g, all, err);
    }
    int receives = room == CKD_OK;
    if (status == CKD_OK) {
        status = mpi_check(MPI_Bcast(&receives, 1, MPI_INT, 0, g->comm), err);
    }
    if (status != CKD_OK || !receives) {
        return status != CKD_OK ? status : room;
    }
    return g->rank == 0 ? receive_all(g, part, all, err) : send(g, part, err);
}

/* If one rank has no memory, all fail. */
static ckd_status broadcast(void *context, ckd_bytes *data, ckd_error *err) {
    mpi_group *g = context;
    uint64_t size = g->rank == 0 ? data->size : 0;
    ckd_status room = CKD_OK;
    ckd_status status = mpi_check(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, g->comm), err);
    if (status == CKD_OK && g->rank != 0) {
        room = reserve_answer(g, data, size, err);
    }
    int here = room == CKD_OK, all = 0;
    if (status == CKD_OK) {
        status = mpi_check(MPI_Allreduce(&here, &all, 1, MPI_INT, MPI_LAND, g->comm), err);
    }
    if (status == CKD_OK && !all) {
        return room != CKD_OK
                   ? room
                   : mpi_failed(err, CKD_E_NOMEM, "out of memory for %s", "an answer, on another rank");
    }
    for (size_t at = 0; at < size && status == CKD_OK; at += MESSAGE_MAX) {
        int count = (int)(size - at < MESSAGE_MAX ? size - at : MESSAGE_MAX);
        status = mpi_check(MPI_Bcast((char *)data->data + at, count, MPI_BYTE, 0, g->comm), err);
    }
    return status;
}

static void leave(void *context) {
    mpi_group *g = context;
    MPI_Comm_free(&g->comm);
    free(g->sizes);
    free(g->reserved);
    free(g);
}

/* Makes all ranks fail if one of them cannot join, so nobody waits for it. */
static ckd_status agree(MPI_Comm comm, ckd_status status_here, ckd_error *err) {
    struct {
        int status, rank;
    } own = {(int)status_here, 0}, worst = {0, 0};
    ckd_error *caller_err = status_here == CKD_OK ? err : NULL; /* otherwise it already holds an error */
    MPI_Comm_rank(comm, &own.rank);
    ckd_status status = mpi_check(MPI_Allreduce(&own, &worst, 1, MPI_2INT, MPI_MAXLOC, comm), caller_err);
    if (status_here != CKD_OK || status != CKD_OK || worst.status == CKD_OK) {
        return status_here != CKD_OK ? status_here : status;
    }
    char who[32];
    snprintf(who, sizeof(who), "rank %d", worst.rank);
    return mpi_failed(err, (ckd_status)worst.status, "%s could not join: its error says why", who);
}

/* Collective. Takes over the communicator, also on failure. */
static ckd_status make_group(mpi_group **out, MPI_Comm comm, ckd_error *err) {
    int rank, world;
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &world);
    mpi_group *g = calloc(1, sizeof(*g));
    uint64_t *sizes = calloc(rank == 0 ? (size_t)world : 1, sizeof(*sizes));
    ckd_status status =
        g && sizes ? CKD_OK : mpi_failed(err, CKD_E_NOMEM, "out of memory for %s", "a group of ranks");
    status = agree(comm, status, err);
    if (status != CKD_OK) {
        MPI_Comm_free(&comm);
        free(sizes);
        free(g);
        return status;
    }
    *g = (mpi_group){.comm = comm, .rank = rank, .world = world, .sizes = sizes};
    *out = g;
    return CKD_OK;
}

ckd_status ckd_mpi_join(ckd_ranks **out, ckd_store *store, MPI_Comm comm, ckd_error *err) {
    *out = NULL;
    MPI_Comm copy;
    mpi_group *g;
    ckd_status status = mpi_check(MPI_Comm_dup(comm, &copy), err);
    if (status == CKD_OK) {
        status = make_group(&g, copy, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    ckd_transport t = CKD_TRANSPORT_INIT;
    t.context = g;
    t.rank = (uint32_t)g->rank;
    t.world = (uint32_t)g->world;
    t.gather = gather;
    t.broadcast = broadcast;
    t.leave = leave;
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = t.rank;
    o.world = t.world;
    o.transport = &t;
    ckd_ranks *ranks = NULL;
    status = agree(g->comm, ckd_ranks_join(&ranks, store, &o, err), err);
    if (status == CKD_OK) {
        *out = ranks;
    } else if (ranks) {
        ckd_ranks_leave(ranks);
    } else {
        leave(g);
    }
    return status;
}
