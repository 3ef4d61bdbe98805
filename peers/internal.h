/*
 * Shared by the files of peers/. README.md has an overview.
 *
 *   hosts.c    the list of nodes, and who keeps copies for whom
 *   secret.c   who may connect
 *   tcp.c      sockets between nodes
 *   ucx.c      bytes between two processes, over UCX
 *   wire.c     connections: a socket, and UCX where there is a network that it is faster on
 *   frame.c    frames: lengths that are bounded, bytes that are hashed
 *   bucket.c   the limit of bytes per second
 *   blobs.c    what a node keeps for others
 *   serve.c    connections of others
 *   peer.c     a connection to another node, and what it is asked for
 *   node.c     begins and ends; signs of life
 */
#ifndef PEERS_INTERNAL_H
#define PEERS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "peers/peers.h"

#define STRANGERS_MAX 256 /* connections at a time that have not proved the secret */
#define STRANGERS_OF  48  /* of them from one address: a single machine keeps no other one out */

/* ---- tcp.c ---- */

/* When a wait ends early. */
typedef struct wire_limits {
    uint32_t silence_ms;      /* of one send or receive */
    int stop;                 /* readable: CANCELLED */
    bool (*lost)(void *peer); /* asked now and then: has the peer gone? NULL: not known */
    void *peer;
} wire_limits;

/* The end of a wait that begins now. */
uint64_t wire_limits_end(const wire_limits *limits);
/* Does a wait go on? It does not look at `stop`. Errors: IO (lost), BUSY (silence). */
ckd_status wire_limits_check(const wire_limits *limits, uint64_t end_ns, ckd_error *err);

/*
 * At the first of the name's addresses that this machine has; at the same port of all its addresses if it has none.
 * Errors: INVALID (the name), IO.
 */
ckd_status tcp_listen(int *out, const peer_host *at, ckd_error *err);
/* Waits for a connection; CANCELLED once `stop` is readable. Errors: IO. */
ckd_status tcp_accept(int *out, int listener, int stop, ckd_error *err);
/* Tries the name's addresses in turn. Errors: INVALID (the name), IO, BUSY (silence), CANCELLED. */
ckd_status tcp_connect(int *out, const peer_host *to, const wire_limits *limits, ckd_error *err);
/* A hash of the other side's address, without its port; not 0. */
uint64_t tcp_origin(int fd);
/* Errors: IO, BUSY (silence), CANCELLED. */
ckd_status tcp_send(int fd, const void *data, size_t size, const wire_limits *limits, ckd_error *err);
ckd_status tcp_receive(int fd, void *to, size_t size, const wire_limits *limits, ckd_error *err);

/* ---- ucx.c ---- */

typedef struct ucx_net ucx_net;   /* UCX in this process */
typedef struct ucx_link ucx_link; /* to a peer; one thread uses it */

/*
 * *out is NULL if there is no UCX here, or no network that it is faster on. Errors: if CKD_UCX_TLS is set: IO,
 * UNSUPPORTED; NOMEM.
 */
ckd_status ucx_open(ucx_net **out, ckd_error *err);
void ucx_close(ucx_net *net); /* accepts NULL */
/* Adds this side's address. The socket is readable once the peer is gone. Errors: IO, NOMEM. */
ckd_status ucx_link_open(ucx_link **out, bytes *address, ucx_net *net, int socket, ckd_error *err);
/* UCX trusts what the address says: it comes from who has the secret. Errors: IO (there is no way there), NOMEM. */
ckd_status ucx_link_connect(ucx_link *l, const bytes *address, ckd_error *err);
/* Errors: IO, BUSY (silence), CANCELLED, NOMEM. */
ckd_status ucx_send(ucx_link *l, const void *data, size_t size, const wire_limits *limits, ckd_error *err);
ckd_status ucx_receive(ucx_link *l, void *to, size_t size, const wire_limits *limits, ckd_error *err);
void ucx_link_close(ucx_link *l); /* accepts NULL */

/* ---- wire.c ---- */

typedef struct wire wire; /* a connection; one thread uses it */

/* net may be NULL. As tcp_accept; limits are set by the caller. */
ckd_status wire_accept(wire **out, ucx_net *net, int listener, int stop, ckd_error *err);
/* As tcp_connect. */
ckd_status wire_connect(wire **out, ucx_net *net, const peer_host *to, const wire_limits *limits,
                        ckd_error *err);
/* This side's address for UCX; empty: the connection stays on its socket. Called once, before wire_reach. */
void wire_address(bytes *out, wire *w);
/*
 * Makes the way to the other side's address; empty: the connection stays on its socket. Errors: IO (there is none),
 * NOMEM.
 */
ckd_status wire_reach(wire *w, const bytes *address, ckd_error *err);
/* UCX carries what follows, if there is a way. The other side does the same. */
void wire_switch(wire *w);
void wire_set_limits(wire *w, const wire_limits *limits);
/* A hash of the other side's address, without its port; not 0. */
uint64_t wire_origin(const wire *w);
/* After an error nothing but wire_close is of use. Errors: IO, BUSY (silence), CANCELLED, NOMEM. */
ckd_status wire_send(wire *w, const void *data, size_t size, ckd_error *err);
ckd_status wire_receive(wire *w, void *to, size_t size, ckd_error *err);
void wire_close(wire *w); /* accepts NULL */

/* For tests: sees, and may change, bytes that have arrived. */
typedef void (*wire_fault_fn)(void *context, void *data, size_t size);
void wire_set_fault(wire_fault_fn fault, void *context);

/* ---- secret.c ---- */

enum { SECRET_NONCE = 32, SECRET_PROOF = 32 /* bytes */ };

typedef enum greeting_side { CONNECTS, LISTENS } greeting_side;
/* Both sides of a connection know this after the first two messages. Indices are greeting_side. */
typedef struct greeting {
    const char *names[2]; /* of the nodes, as the list has them */
    uint8_t nonces[2][SECRET_NONCE];
} greeting;

/* Must have succeeded before the others are called. UNSUPPORTED: there is no libcrypto here. */
ckd_status secret_usable(ckd_error *err);
/* Makes the proof that this side has the secret. Errors: NOMEM. */
ckd_status secret_prove(uint8_t out[SECRET_PROOF], const peer_secret *secret, const greeting *g,
                        greeting_side side, ckd_error *err);
/* READ_ONLY: it is not the proof of that side. Errors: NOMEM. */
ckd_status secret_check(const uint8_t proof[SECRET_PROOF], const peer_secret *secret, const greeting *g,
                        greeting_side side, ckd_error *err);

/* ---- frame.c ---- */

#define PEER_PROTOCOL 5
#define PEER_PACKET   (1u << 20) /* bytes of a blob that travel together and share a hash */
#define FRAME_MAX     (PEER_PACKET + 4096)
#define HELLO_MAX     1024u
#define ANSWER_MAX    (64u << 20)

typedef enum frame_kind {
    FRAME_HELLO = 1, /* name, nonce; answered with a nonce and the proof that this node has the secret */
    FRAME_PROOF,     /* that whoever connects has it, too; answered */
    FRAME_PING,
    FRAME_PUT,    /* set, blob, u64 size, hash; answered, then the packets, then answered again */
    FRAME_FETCH,  /* set, blob; answered with size and hash, then the packets, then an answer */
    FRAME_LIST,   /* set */
    FRAME_DELETE, /* set, blob */
    FRAME_ASK,    /* what the agent understands */
    FRAME_DATA,
    FRAME_ANSWER, /* u32 status, message, u64 size of the body; the body follows in FRAME_DATA */
    FRAME_ADDRESS /* for UCX, empty: none; answered with the other side's; both: UCX carries what follows */
} frame_kind;

ckd_status frame_send(wire *w, frame_kind kind, const void *body, size_t size, ckd_error *err);
/*
 * Clears the body first. Errors: CORRUPT (head or body do not have their hashes), INVALID (no frame of ours),
 * UNSUPPORTED.
 */
ckd_status frame_receive(frame_kind *kind, bytes *body, wire *w, ckd_error *err);
/* From somebody who has not proved the secret: INVALID if it is of another kind or has more than HELLO_MAX bytes. */
ckd_status frame_receive_hello(bytes *body, wire *w, frame_kind kind, ckd_error *err);
/* As frame_receive, but another kind is INVALID. */
ckd_status frame_expect(bytes *body, wire *w, frame_kind kind, ckd_error *err);
/* why: of a failure. body: NULL: none; at most ANSWER_MAX. */
ckd_status frame_answer(wire *w, ckd_status status, const ckd_error *why, const bytes *body, ckd_error *err);
/* Takes an answer of at most `max` bytes. Returns what the peer did; *answered: false if there was no answer at all. */
ckd_status frame_take_answer(bytes *body, bool *answered, wire *w, uint64_t max, ckd_error *err);

/* ---- bucket.c ---- */
typedef struct bucket {
    pthread_mutex_t mutex;
    uint64_t bytes_per_s; /* 0: no limit */
    double tokens;
    uint64_t filled_ns;
    int stop;
    atomic_bool closed;
    peer_busy_fn is_busy; /* NULL: never */
    void *context;
} bucket;
void bucket_init(bucket *b, const peer_options *options, int stop);
/* Waits until `size` bytes may be sent. While training is busy, they wait for 100 ms at most. Errors: CANCELLED. */
ckd_status bucket_take(bucket *b, uint64_t size, ckd_error *err);
/* Nothing may be sent from now on. */
void bucket_close(bucket *b);
void bucket_destroy(bucket *b);

/* ---- blobs.c ---- */
typedef struct held_blob held_blob;
typedef struct blobs {
    char folder[512];
    pthread_mutex_t mutex; /* of the list */
    pthread_rwlock_t lock; /* exclusive: sets change */
    held_blob *items;
    size_t count, capacity;
    uint64_t budget_bytes, used_bytes; /* with what is arriving */
    uint64_t arrivals;
} blobs;

/* Empties the folder, which it makes. */
ckd_status blobs_open(blobs *out, const char *folder, uint64_t budget_bytes, ckd_error *err);
void blobs_close(blobs *b); /* removes everything */
bool blob_names_valid(const char *set, const char *name);
bool blobs_has(blobs *b, const char *set, const blob_entry *entry);
/* A blob that arrives. */
typedef struct arrival {
    blobs *to;
    char set[PEER_SET_MAX + 1];
    blob_entry entry;
    char path[1024], temp[1024];
    struct file_writer *file;
    bytes hashes;
    uint64_t done;
} arrival;
/* Errors: NOSPACE (the budget), INVALID (a name), IO, NOMEM. */
ckd_status arrival_begin(arrival *out, blobs *b, const char *set, const blob_entry *entry, ckd_error *err);
ckd_status arrival_add(arrival *a, const bytes *packet, ckd_error *err);
/* Errors: CORRUPT (not the announced bytes). Always releases the arrival. */
ckd_status arrival_end(arrival *a, ckd_status so_far, ckd_error *err);
/* Errors: NOT_FOUND. */
ckd_status blobs_find(blob_entry *out, char path[1024], blobs *b, const char *set, const char *name,
                      ckd_error *err);
/* Also CORRUPT: the file does not have the hash that it arrived with. */
ckd_status blobs_find_sound(blob_entry *out, char path[1024], blobs *b, const char *set, const char *name,
                            ckd_error *err);
/* As peer_keep. */
ckd_status blobs_keep(blobs *b, const char *set, const char *name, const char *path, ckd_error *err);
ckd_status blob_range_hash(blob_entry *out, const char *path, const peer_range *range, ckd_error *err);
ckd_status blobs_list(blob_list *out, blobs *b, const char *set, ckd_error *err);
ckd_status blobs_remove(blobs *b, const char *set, const char *name, ckd_error *err);
void blobs_remove_below(blobs *b, const char *set, const char *folder);
/* Sends a part of a file in packets. hash: of what was sent. limit: asked before each packet; NULL: no limit. */
ckd_status blob_send(hash128 *hash, wire *w, const char *path, const peer_range *range, bucket *limit,
                     ckd_error *err);

/* ---- peer.c ---- */
typedef struct peer {
    peer_node *node;
    size_t host;
    pthread_mutex_t mutex; /* of `data` */
    wire *data;
    pthread_t thread; /* of signs of life */
    bool started;
    atomic_bool no_way;               /* for UCX: connections stay on their sockets */
    atomic_bool alive, looked, stale; /* stale: `data` is from before the peer was gone */
    atomic_uint losses;
    _Atomic uint64_t seen_ns; /* when it last answered; before that, when this node began */
    _Atomic uint64_t lost_ns; /* when it was last found silent; 0: it was never alive before */
} peer;

/* Connects. Each side proves that it has the secret. */
ckd_status peer_connect(wire **out, peer_node *node, size_t host, const wire_limits *limits, ckd_error *err);

/* ---- serve.c ---- */
ckd_status serve_begin(peer_node *node, ckd_error *err);
void serve_end(peer_node *node);

/* ---- node.c ---- */
struct peer_node {
    peer_options options;
    int stop;
    ucx_net *net; /* NULL: sockets only */
    int listener; /* a socket */
    blobs held;
    bucket limit;
    peer *peers; /* by host */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t acceptor;
    bool accepting;
    atomic_uint_fast64_t hurried_ns; /* 0: nobody hurries */
    uint32_t connections;
    uint64_t strangers[STRANGERS_MAX]; /* who has not proved the secret yet: wire_origin; 0: nobody */
};

#endif
