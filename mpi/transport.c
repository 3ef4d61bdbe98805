/* The ranks' messages over MPI: sizes first, then bytes in pieces that fit an MPI count. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"

#define TAG 7

typedef struct mpi_group {
    MPI_Comm comm;
    int rank, world;
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

static ckd_status receive(mpi_group *g, ckd_bytes *out, int from, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < out->size && status == CKD_OK; at += MPI_PIECE) {
        int count = (int)(out->size - at < MPI_PIECE ? out->size - at : MPI_PIECE);
        status = mpi_check(
            MPI_Recv((char *)out->data + at, count, MPI_BYTE, from, TAG, g->comm, MPI_STATUS_IGNORE), err);
    }
    return status;
}

static ckd_status send(mpi_group *g, const ckd_bytes *data, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < data->size && status == CKD_OK; at += MPI_PIECE) {
        int count = (int)(data->size - at < MPI_PIECE ? data->size - at : MPI_PIECE);
        status = mpi_check(MPI_Send((const char *)data->data + at, count, MPI_BYTE, 0, TAG, g->comm), err);
    }
    return status;
}

static ckd_status receive_all(mpi_group *g, const ckd_bytes *part, ckd_bytes *all, const uint64_t *sizes,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    for (int r = 0; r < g->world && status == CKD_OK; r++) {
        status = reserve(&all[r], sizes[r], err);
        if (status == CKD_OK && r > 0) {
            status = receive(g, &all[r], r, err);
        } else if (status == CKD_OK && part->size) {
            memcpy(all[r].data, part->data, part->size);
        }
    }
    return status;
}

static ckd_status gather(void *context, const ckd_bytes *part, ckd_bytes *all, ckd_error *err) {
    mpi_group *g = context;
    uint64_t size = part->size;
    uint64_t *sizes = g->rank == 0 ? calloc((size_t)g->world, sizeof(*sizes)) : NULL;
    if (g->rank == 0 && !sizes) {
        return mpi_failed(err, CKD_E_NOMEM, "out of memory for %s", "sizes");
    }
    ckd_status status =
        mpi_check(MPI_Gather(&size, 1, MPI_UINT64_T, sizes, 1, MPI_UINT64_T, 0, g->comm), err);
    if (status == CKD_OK) {
        status = g->rank == 0 ? receive_all(g, part, all, sizes, err) : send(g, part, err);
    }
    free(sizes);
    return status;
}

static ckd_status broadcast(void *context, ckd_bytes *data, ckd_error *err) {
    mpi_group *g = context;
    uint64_t size = g->rank == 0 ? data->size : 0;
    ckd_status status = mpi_check(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, g->comm), err);
    if (status == CKD_OK && g->rank != 0) {
        status = reserve(data, size, err);
    }
    for (size_t at = 0; at < size && status == CKD_OK; at += MPI_PIECE) {
        int count = (int)(size - at < MPI_PIECE ? size - at : MPI_PIECE);
        status = mpi_check(MPI_Bcast((char *)data->data + at, count, MPI_BYTE, 0, g->comm), err);
    }
    return status;
}

static void leave(void *context) {
    mpi_group *g = context;
    MPI_Comm_free(&g->comm);
    free(g);
}

/* Makes all ranks fail if one of them cannot join, so nobody waits for it. */
static ckd_status agree(mpi_group *g, ckd_status status_here, ckd_error *err) {
    struct {
        int status, rank;
    } own = {(int)status_here, g->rank}, worst = {0, 0};
    ckd_error *caller_err = status_here == CKD_OK ? err : NULL; /* otherwise it already holds an error */
    ckd_status status = mpi_check(MPI_Allreduce(&own, &worst, 1, MPI_2INT, MPI_MAXLOC, g->comm), caller_err);
    if (status_here != CKD_OK || status != CKD_OK || worst.status == CKD_OK) {
        return status_here != CKD_OK ? status_here : status;
    }
    char who[32];
    snprintf(who, sizeof(who), "rank %d", worst.rank);
    return mpi_failed(err, (ckd_status)worst.status, "%s could not join: its error says why", who);
}

ckd_status ckd_mpi_join(ckd_ranks **out, ckd_store *store, MPI_Comm comm, ckd_error *err) {
    *out = NULL;
    mpi_group *g = calloc(1, sizeof(*g));
    if (!g) {
        return mpi_failed(err, CKD_E_NOMEM, "out of memory for %s", "a group of ranks");
    }
    ckd_status status = mpi_check(MPI_Comm_dup(comm, &g->comm), err);
    if (status != CKD_OK) {
        free(g);
        return status;
    }
    MPI_Comm_set_errhandler(g->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(g->comm, &g->rank);
    MPI_Comm_size(g->comm, &g->world);
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
    status = agree(g, ckd_ranks_join(&ranks, store, &o, err), err);
    if (status == CKD_OK) {
        *out = ranks;
    } else if (ranks) {
        ckd_ranks_leave(ranks);
    } else {
        leave(g);
    }
    return status;
}
