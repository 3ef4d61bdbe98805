/*
 * Parity across nodes. Shared by the files of agent/ that keep it: stripes.c, pieces.c and rebuild.c.
 *
 * The nodes of a group have an order, and a group has as many rows as nodes. Row r has its parity at the nodes r, r +
 * 1, ..., `lost` of them, and pieces of files of the `data` other ones. A node cuts each of its chunk files into `data`
 * pieces, one for each row in which it has no parity. A stripe of a row is the sum of at most one piece of each of
 * these nodes, each times a coefficient (codec/common: erasure_coefficient). So the files of any `lost` nodes can be
 * computed from the others.
 */
#ifndef AGENT_PARITY_H
#define AGENT_PARITY_H

#include <stdatomic.h>

#include "agent/internal.h"

#define PARITY_SET  "parity" /* blobs with sums; no set of a node has this name */
#define ARRIVED_SET "pieces" /* pieces that arrived for a stripe, or for a rebuild */

/* A file of a node that a stripe has a piece of. */
typedef struct parity_blob {
    char set[PEER_SET_MAX + 1]; /* the node's */
    uint64_t life;              /* random; another one for each start of the node's agent */
    char name[PEER_BLOB_MAX + 1];
    uint64_t size; /* of the file */
    hash128 hash;  /* of the file, as in blob_entry */
} parity_blob;

typedef struct stripe_member {
    uint32_t row;
    uint32_t place; /* index of the node among those with pieces in the row */
    uint64_t number;
    parity_blob blob;
    bool dropped; /* its node no longer has the file, but the file's piece is still part of the sum */
} stripe_member;

typedef struct stripe_members {
    stripe_member *items;
    size_t count, capacity;
} stripe_members;

/* A chunk file of this node. A link keeps the file as long as any stripe has a piece of it. */
typedef struct piece_file {
    parity_blob blob;
    uint64_t step;         /* of the state that it was written for; 0: not known */
    uint64_t number;       /* of its stripes, in all rows */
    uint64_t dropped_from; /* the first version of the tier without it; 0: the tier has it */
    bool taken_out;        /* its pieces are taken out of stripes that other nodes still use */
    bool *listed;          /* by position in the group: the node has a piece of it in parity */
} piece_file;

typedef struct file_step {
    char name[PEER_BLOB_MAX + 1];
    uint64_t step;
} file_step;

struct parity {
    size_t members[PEER_HOSTS_MAX]; /* hosts, in the order of the group */
    size_t count, self;
    unsigned data, lost;
    uint64_t life, group;            /* group: a hash of the settings on which all its nodes must agree */
    pthread_mutex_t work_mutex;      /* one thread changes sums at a time */
    pthread_mutex_t rebuild_mutex;   /* one thread rebuilds files at a time */
    pthread_mutex_t mutex;           /* guards the fields below */
    stripe_members stripes;          /* of the rows in which this node has parity */
    bool rebuilt[PEER_HOSTS_MAX];    /* by position: the node's set is whole on this node */
    bool settled[PEER_HOSTS_MAX];    /* by position: parity_about.settled */
    bool unnotified[PEER_HOSTS_MAX]; /* by position: the node does not know that stripes here are gone */
    bool unclear;                    /* for the mirror: other nodes have small files that are not needed */
    piece_file *files;               /* used only by the mirror */
    size_t file_count, file_capacity;
    struct file_step *steps; /* of files that the mirror has not seen yet */
    size_t step_count, step_capacity;
    atomic_uint_fast64_t dropped_bytes; /* of files that are kept only because stripes have pieces of them */
};

/* ---- queries to other nodes' agents ---- */

enum {
    PARITY_TABLE = 16, /* of `about.blob.set`, "": of all; answered with parity_about and the members */
    PARITY_ADD,        /* adds the piece `held` to its stripe */
    PARITY_TAKE_OUT,   /* takes the piece `held` out of its stripe */
    PARITY_DROP,       /* the node no longer needs the files `dropped` of this life */
    PARITY_FORGET,     /* removes stripes with files from other lives of the node */
    PARITY_LOOK,       /* stripes are gone: the node should check which of its pieces are in parity */
    PARITY_PIECE       /* sends a part of `about.blob` to node `to` */
};

typedef struct parity_query {
    uint8_t kind;
    stripe_member about;
    uint64_t offset, size;        /* of the piece in the file */
    char to[PEER_NAME_MAX + 1];   /* HOST:PORT */
    char held[PEER_BLOB_MAX + 1]; /* the blob in ARRIVED_SET; "": the piece is empty */
    bytes dropped;                /* names, each a string; the caller of parity_ask frees it */
} parity_query;

/* Errors: those of peer_ask and of the answer; UNSUPPORTED, MISMATCH (the node has no parity, or other groups). */
ckd_status parity_ask(bytes *answer, tier *t, size_t host, const parity_query *q, ckd_error *err);

/* ---- stripes.c: what this node has in parity for others ---- */
/* Returns a node's index among those with the parity of a row, from 0; parity->lost or more: it has pieces there. */
unsigned parity_index(const parity *p, size_t position, uint32_t row);
/* Writes the name of a stripe's sum in PARITY_SET. */
void stripe_name(char out[PEER_BLOB_MAX + 1], uint32_t row, uint64_t number);
/* Returns the part of a file that is the piece of a row. */
peer_range parity_piece(const parity *p, size_t position, uint32_t row, uint64_t size);
/* Reads an answer to PARITY_TABLE. Release with free of out->items. */
typedef struct parity_about {
    uint64_t life; /* of the agent */
    bool settled;  /* it has asked all nodes of the group for copies from its last life */
} parity_about;
ckd_status parity_read_table(parity_about *about, stripe_members *out, const parity *p, const bytes *answer,
                             ckd_error *err);
/* Writes a file: the sum of parts of files, each times its coefficient and padded with zeros. */
typedef struct summand {
    char path[1024];
    peer_range range;
    uint8_t coefficient;
} summand;
ckd_status parity_sum(const char *path, uint64_t size, const summand *of, size_t count, ckd_error *err);
/* Writes the path of a file in the work folder. The caller removes the file. */
void parity_work_path(char out[700], const tier *t, const char *name);
ckd_status parity_answer(tier *t, bytes *answer, const bytes *asked, ckd_error *err);

/* ---- rebuild.c ---- */
/*
 * Computes the files that nodes of the group have lost, so that their sets on this node are whole. Only the first
 * present node of the group does it. set: the node's set; "": those of all nodes. Errors: BUSY, IO, CORRUPT (something
 * could not be rebuilt now), NOSPACE, NOMEM.
 */
ckd_status parity_rebuild(tier *t, const char *set, ckd_error *err);
/* A node has come or gone. Its files here may be replaced by those of another life. */
void parity_peer_changed(tier *t, size_t host);
/* Whether the set of a node is whole, and does not have only small files. */
bool parity_set_is_whole(tier *t, const char *set);

#endif
